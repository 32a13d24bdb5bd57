"""Chat templates write what transformers writes."""

import hashlib
import json
import pickle

import pytest
from transformers import PreTrainedTokenizerFast

from dtrain.base.errors import UserError
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
        marked = template.render_marked(rows)
        assert marked.text == template.render(rows) == expected
        start, end = marked.blocks[3]
        assert expected[start:end] == "[THINK]hm[/THINK] Me.\n<|eot_id|>"


def test_named_templates_are_read_as_transformers_saves_them(tmp_path):
    default = "{% for m in messages %}{{ m.content }}{% endfor %}"
    oracle = PreTrainedTokenizerFast.from_pretrained(save(tmp_path / "m", byte_level()))
    oracle.chat_template = {"default": default, "tool_use": "{{ tools[0].function.name }}" + default, "rag": "rag"}
    directory = tmp_path / "saved"
    oracle.save_pretrained(directory)
    assert (directory / "additional_chat_templates" / "tool_use.jinja").is_file()
    oracle = PreTrainedTokenizerFast.from_pretrained(directory)
    template = pickle.loads(pickle.dumps(load(directory)[1]))
    for tools in (None, TOOLS):
        expected = oracle.apply_chat_template([ASK, SAY], tools=tools, tokenize=False)
        assert template.render([ASK, SAY], tools) == template.render_marked([ASK, SAY], tools).text == expected
    assert "tool_use.jinja" in template.origin and "rag" not in template.origin
    # Without chat_template.jinja the default may still be in tokenizer_config.json.
    (directory / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match="additional_chat_templates.*no template named default, only rag, tool_use"):
        load(directory)
    save(directory, byte_level(), default)
    template = load(directory)[1]
    assert template.render([ASK]) == ASK["content"] and template.render([ASK], TOOLS) == "f" + ASK["content"]


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
    marked = template.render_marked(CHATS["system"][1:])
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
    assert ChatTemplate("{{ strftime_now('%d') }}", "here", {}).writes_todays_date
    assert not ChatTemplate("{{ strftime_now('%d') }}", "here", {}, {"date_string": "1"}).writes_todays_date
    assert not ChatTemplate(templates.LLAMA3, "here", {}).writes_todays_date
