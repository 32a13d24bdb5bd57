"""Chat templates write what transformers writes."""

import hashlib
import json
import pickle
import resource
import time

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers import PreTrainedTokenizerFast

from dtrain.base.errors import UserError
from dtrain.data.text import sandbox
from dtrain.data.text.template import ChatTemplate, choose_template
from dtrain.data.text.tokenizer import Tokenizer
from tests.data import templates
from tests.data.makers import byte_level, save

ASK, SAY = {"role": "user", "content": " Who? "}, {"role": "assistant", "content": " Me.\n"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"q": "<ü>", "n": [1, 2]}}}
CHATS = {
    "short": [ASK, SAY],
    "system": [{"role": "system", "content": "be <b>rief</b>"}, ASK, SAY, ASK, SAY],
    "thinking": [ASK, {**SAY, "reasoning_content": "hm"}, ASK, {**SAY, "thinking": "hm hm"}],
    "calls": [ASK, {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "7"}, SAY],
    "prompt": [ASK],
}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "ü", "parameters": {"type": "object"}}}]
FAMILIES = ("LLAMA3", "QWEN25", "QWEN3", "GEMMA3", "LLAMA2", "BY_INDEX", "GENERATION", "SLOPPY", "CHANNELS")


def load(directory, template=None, **variables):
    tokenizer = Tokenizer.from_directory(directory)
    return tokenizer, choose_template(directory, tokenizer, template, variables)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}, {"date_string": "1 Jan 2000"}], ids=str)
def test_equals_transformers(tmp_path, family, chat, variables):
    save(tmp_path, byte_level(), getattr(templates, family))
    tokenizer, template = load(tmp_path, **variables)
    oracle = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for tools in (None, TOOLS):
        for prompt in (False, True):
            options = dict(tools=tools, add_generation_prompt=prompt)
            try:
                expected = oracle.apply_chat_template(CHATS[chat], tokenize=False, **options, **variables)
            except Exception as problem:
                with pytest.raises(UserError) as error:
                    template.render(CHATS[chat], **options)
                assert str(problem) in str(error.value)
                continue
            assert template.render(CHATS[chat], **options) == expected
            ids = oracle.apply_chat_template(CHATS[chat], return_dict=False, **options, **variables)
            assert tokenizer.encode(expected) == ids


@pytest.mark.trap(
    "thoughts of a message dropped by the template",
    "THUDM/slime PR#330",
    "a thinking model is trained without thoughts",
    "they go where the template reads them, as transformers renders them",
)
def test_thoughts_go_where_the_template_reads_them(tmp_path):
    save(tmp_path, byte_level(), templates.PARTS)
    _, template = load(tmp_path)
    oracle = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    thought = {"type": "thinking", "thinking": "hm"}
    call = {"role": "assistant", "tool_calls": [CALL]}
    alone = json.dumps([template.source, *template._arguments[2:]], sort_keys=True, default=str)
    assert template.fingerprint != hashlib.sha256(alone.encode()).hexdigest()[:16]  # of caches without thoughts
    for name in ("reasoning_content", "thinking", "reasoning"):
        rows = [ASK, {**call, name: "hm"}, {"role": "tool", "content": "7"}, {**SAY, name: "hm"}, ASK, SAY]
        parts = [[thought], None, [thought, {"type": "text", "text": " Me.\n"}]]
        theirs = [
            ASK,
            *({**row, "content": part or row["content"]} for row, part in zip(rows[1:4], parts, strict=True)),
        ]
        expected = oracle.apply_chat_template([*theirs, ASK, SAY], tokenize=False)
        assert expected.count("[THINK]hm[/THINK]") == 2
        marked = template.marked(rows)
        assert marked.text == template.render(rows) == expected
        start, end = marked.blocks[3]
        assert expected[start:end] == "[THINK]hm[/THINK] Me.\n<|eot_id|>"


def test_extras_of_the_field():
    source = (
        "{% for m in messages %}{% if loop.index0 == 1 %}{% break %}{% endif %}{{ m | tojson(indent=1) }}{% endfor %}"
        "{{ strftime_now('%Y') | length }}{{ tools }}"
    )
    assert ChatTemplate(source, "here", {}).render([{"a": "<ü>"}, {}]) == '{\n "a": "<ü>"\n}4None'
    template = ChatTemplate("{{ messages | tojson }}", "here", {})
    assert template.render([{"role": "x", "a": "<ü>"}]) == '[{"role": "x", "a": "<ü>"}]'


def test_sandbox():
    template = ChatTemplate("{{ messages.__class__.__mro__ }}", "here", {})
    with pytest.raises(UserError, match="unsafe"):
        template.render([ASK])
    template = ChatTemplate("{{ messages.append(1) }}", "here", {})
    with pytest.raises(UserError):
        template.render([ASK])
    with pytest.raises(UserError, match="dtrain gives a template no filter center"):
        ChatTemplate("{{ 'a' | center(9) }}", "here", {}).render([ASK])


def test_errors_name_template_line_and_message():
    with pytest.raises(UserError, match=r"my\.jinja, line 2: the chat template is not valid"):
        ChatTemplate("a\n{% if %}", "my.jinja", {})
    template = ChatTemplate("a\n\n{{ raise_exception('no ' + messages[0].role) }}", "my.jinja", {})
    with pytest.raises(UserError, match=r"my\.jinja, refuses .*line 3 of the template.*: no user"):
        template.render([ASK])
    template = ChatTemplate("a\n{{ messages[0].content + 1 }}", "my.jinja", {})
    with pytest.raises(UserError, match=r"line 2 of the template.*str"):
        template.render([ASK])
    with pytest.raises(UserError, match="data.template_kwargs.tools"):
        ChatTemplate("a", "my.jinja", {}, {"tools": 1})


def test_choice(tmp_path):
    directory = save(tmp_path / "m", byte_level())
    assert load(directory)[1] is None
    (directory / "chat_template.json").write_text(json.dumps({"chat_template": "processor"}))
    assert load(directory)[1].render([ASK]) == "processor"
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    save(directory, byte_level(), named)
    template = pickle.loads(pickle.dumps(load(directory)[1]))
    assert template.render([ASK]) == "plain" and template.render([ASK], TOOLS) == "with tools"
    assert "tokenizer_config.json" in template.origin and "default" in template.origin
    (directory / "chat_template.jinja").write_text("jinja file")
    assert load(directory)[1].render([ASK]) == "jinja file"
    (tmp_path / "own.jinja").write_text("own {{ word }}")
    template = load(directory, str(tmp_path / "own.jinja"), word="w")[1]
    assert template.render([ASK]) == "own w" and "own.jinja" in template.origin
    with pytest.raises(UserError, match="data.chat_template: there is no file"):
        load(directory, str(tmp_path / "none.jinja"))
    save(directory, byte_level(), [{"name": "rag", "template": "x"}])
    (directory / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match="no template named default, only rag"):
        load(directory)


@pytest.mark.trap(
    "messages rendered one at a time",
    "verl-project/verl #7807",
    "other tokens than the conversation has",
    "the whole conversation is rendered once",
)
@pytest.mark.parametrize("family", FAMILIES)
def test_marks_tell_each_message_and_change_nothing(family):
    template = ChatTemplate(getattr(templates, family), "here", {"bos_token": "<s>", "eos_token": "</s>"})
    marked = template.marked(CHATS["system"][1:])
    assert marked.text == template.render(CHATS["system"][1:])
    if family == "BY_INDEX":
        assert marked.blocks == [None] * 4
        return
    texts = [marked.text[start:end] for start, end in marked.blocks]
    assert all(("Who?" if index % 2 == 0 else "Me.") in text for index, text in enumerate(texts))
    assert marked.text.endswith("".join(texts))


@pytest.mark.trap(
    "the template writes the date of the day it is rendered",
    "sgl-project/sglang #3296",
    "caches and prompts differ by the day",
    "it is noticed and told; date_string fixes it",
)
def test_today_is_noticed():
    assert ChatTemplate("{{ strftime_now('%d') }}", "here", {}).writes_today
    assert not ChatTemplate("{{ strftime_now('%d') }}", "here", {}, {"date_string": "1"}).writes_today
    assert not ChatTemplate(templates.LLAMA3, "here", {}).writes_today


def times(count, body):
    return f"{{% set ns = namespace(x='a', l=[1]) %}}{{% for i in range({count}) %}}{body}{{% endfor %}}"


TOO_MUCH = {
    "loops": "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
    "loops that write": "{% for a in range(100000) %}{% for b in range(100000) %}x{% endfor %}{% endfor %}",
    "loops over pairs": times(99999, "{% for k, v in {'a': 1, 'b': 2}.items() %}" + times(99999, "") + "{% endfor %}"),
    "loops that skip": "{% for a in range(100000) %}{% for b in range(100000) if false %}{% endfor %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "a macro without end": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a loop in itself": "{% for x in [1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
    "text that doubles": times(100, "{% set ns.x = ns.x ~ ns.x %}"),
    "text that is added": times(100, "{% set ns.x = ns.x + ns.x %}"),
    "text that is set": times(100, "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}"),
    "text that is joined": times(100, "{% set ns.x = [ns.x, ns.x] | join %}"),
    "text that is formatted": times(100, "{% set ns.x = '{0}{0}'.format(ns.x) %}"),
    "text of a percent": times(100, "{% set ns.x = '%s%s' % (ns.x, ns.x) %}"),
    "text that is replaced": times(100, "{% set ns.x = ns.x | replace('a', 'aaaaaaaa') %}"),
    "a product": "{{ 'a' * 10000000000 }}",
    "a list": "{{ [1] * 10000000000 }}",
    "a list that doubles": times(100, "{% set ns.l = ns.l + ns.l %}"),
    "lists in lists": times(100, "{% set ns.l = [ns.l, ns.l] %}") + "{{ ns.l }}",
    "objects in objects": times(100, "{% set ns.l = {'a': ns.l, 'b': ns.l} %}") + "{{ ns.l | tojson }}",
    "a key of keys": times(100, "{% set ns.l = (ns.l, ns.l) %}") + "{{ {}[ns.l] }}",
    "slices": "{% set s = 'a' * 200000000 %}" + times(99999, "{% set ns.l = ns.l + [s[1:]] %}"),
    "searches": "{% set s = 'a' * 200000000 %}{% for i in range(99999) if 'b' in s %}{% endfor %}",
    "a power": "{{ 3 ** 1000000000 }}",
    "a wide number": "{{ '%9999999999d' % 1 }}",
    "a width of its own": "{{ '%*d' % (9999999999, 1) }}",
    "a wide field": "{{ '{:9999999999}'.format(1) }}",
    "an indent": "{{ ('a\n' * 100000) | indent(100000000) }}",
    "an indent of JSON": "{{ [1, 2] | tojson(indent=1000000000) }}",
    "a separator": "{{ range(100000) | join('a' * 1000000) }}",
    "a list of texts": "{{ (['a' * 1000000] * 100000) | reverse | join }}",
    "maps": "{% for a in range(100000) %}{{ range(100000) | map('string') | list | length }}{% endfor %}",
    "deep": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
}


@pytest.mark.parametrize("name", TOO_MUCH)
@pytest.mark.slow
def test_a_template_has_limits_of_work_memory_and_time(name, monkeypatch):
    monkeypatch.setattr(sandbox, "ROUNDS", sandbox.ROUNDS // 10)  # the whole budget takes a tenth of a minute
    monkeypatch.setattr(sandbox, "SECONDS", sandbox.SECONDS / 10)
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(UserError, match=r"evil\.jinja"):
        ChatTemplate(TOO_MUCH[name], "evil.jinja", {}).render([ASK])
    assert time.process_time() - began < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1_500_000  # KiB


def test_long_conversations_are_left_alone():
    template = ChatTemplate(templates.QWEN3, "here", {"bos_token": "<s>", "eos_token": "</s>"})
    long = [{"role": ("user", "assistant")[index % 2], "content": "w " * 500} for index in range(2000)]
    assert len(template.render(long)) > 2_000_000


@pytest.mark.slow
def test_the_limit_is_the_same_each_time(monkeypatch):
    assert sandbox.ROUNDS == 4_000_000
    monkeypatch.setattr(sandbox, "ROUNDS", sandbox.ROUNDS // 20)
    loop = "{% for a in range(150) %}{% for b in range(COUNT) %}{% endfor %}{% endfor %}"
    assert ChatTemplate(loop.replace("COUNT", "400"), "here", {}).render([ASK]) == ""
    with pytest.raises(UserError, match="it takes more than 200,000 rounds"):
        ChatTemplate(loop.replace("COUNT", "700"), "here", {}).render([ASK])


def test_what_counts_changes_nothing_of_what_is_written():
    source = (
        "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}{{ loop.previtem is defined }}"
        "{% for k, v in m | dictsort %}{{ k ~ '=' ~ v ~ 3 }}{% endfor %}{% endfor %}{{ messages[::-1][0].role }}"
        "{{ messages | map(attribute='role') | join(', ') }}{{ 'a-%s' % 'b' }}{{ '{:>4}'.format(7) }}{{ [1, (2, 3)] }}"
        "{{ 'x' * 3 }}{{ 2 ** 5 }}{{ 'ab'.replace('a', 'c') }}"
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}"
        "{{ 'user' in messages[0].values() | list }}{{ 1 < 2 <= 3 }}{{ 'a\nb' | indent(2) }}{{ namespace(a=1).a }}"
    )
    expected = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(source)
    assert ChatTemplate(source, "here", {}).render([ASK, ASK]) == expected.render(messages=[ASK, ASK])


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("{{ 'Today: {}, {}: {}'.format(1, 2, 3) }}", "Today: 1, 2: 3"),
        ('{{ \'{"f": {"name": "%s"}}\' % \'x\' }}', '{"f": {"name": "x"}}'),
        ('{{ \'{"year": 1000000000, "name": "%s"}\' | format(\'x\') }}', '{"year": 1000000000, "name": "x"}'),
        ("{{ 'in %d%% 300000000' % 3 }}", "in 3% 300000000"),
        ("{{ '%05.1f|{:>6}'.format('a') % 2 }}", "002.0|     a"),
    ],
)
def test_ordinary_formats_are_no_work(text, written):
    assert ChatTemplate(text, "here", {}).render([ASK]) == written
