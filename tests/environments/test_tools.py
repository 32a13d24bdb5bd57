"""Tools that a model may call: what it is told of them, how its calls are read, and episodes token by token."""

import json
import re

import pytest
from transformers.utils import get_json_schema

from dtrain import recipe as config
from dtrain.base.errors import UserError
from dtrain.commands.cli import main
from dtrain.data.formats.prompts import PromptEncoder, PromptOptions
from dtrain.data.text.template import ChatTemplate
from dtrain.data.text.tokenizer import Tokenizer
from dtrain.data.text.tool_calls import CALL_READERS, ToolCall, learn_tool_format, read_calls
from dtrain.inference.request import Completion
from dtrain.recipe.rollouts import Tool
from dtrain.rl.environments.episodes import Observations, run_episodes
from dtrain.rl.environments.stepping import Environments
from dtrain.rl.environments.tools import Toolbox
from dtrain.rl.tools import tool_schema, tool_schemas
from tests.data import makers, templates
from tests.environments import toolbox
from tests.environments.test_environment import Here, Scripted, requests_for
from tests.environments.tiny_tools import TINY, tiny_tools
from tests.methods.comparing import assert_same_samples, rows_of, samples_of
from tests.running import assert_same, interrupt, run

HERE = "tests.environments.toolbox"
NAMES = ("add", "look_up", "say", "halve", "wait")
TOOLS = [tool_schema(f"{HERE}.{name}") for name in NAMES]
SOURCES = [((HERE, one["function"]["name"]), one["function"]) for one in TOOLS]
PARAMETERS = {one["function"]["name"]: one["function"]["parameters"] for one in TOOLS}
FAMILIES = {  # template, what ends a turn, the form of its calls
    "qwen25": (templates.QWEN25, "<|im_end|>", 0),
    "qwen35": (templates.QWEN35, "<|im_end|>", 1),
    "llama3": (templates.LLAMA3, "<|eot_id|>", 2),
    "mistral": (templates.MISTRAL, "</s>", 3),
}
ASKED = [{"role": "user", "content": "two and two?"}]


def family(tmp_path, name):
    source, end, _ = FAMILIES[name]
    tokenizer = makers.byte_level(None)
    directory = makers.save(tmp_path / name, tokenizer, eos_token=end, bos_token="<s>")
    tokenizer = Tokenizer.from_directory(directory)
    return tokenizer, ChatTemplate(source, name, tokenizer.special_tokens)


def box(template, most=4096):
    found = learn_tool_format(template, TOOLS)
    return Toolbox(SOURCES, found.form, found.is_single, most)


def calls_of(*pairs):
    return [
        {"type": "function", "id": f"call{number:05}", "function": {"name": name, "arguments": arguments}}
        for number, (name, arguments) in enumerate(pairs)
    ]


@pytest.mark.parametrize("name", ["add", "look_up", "several", "say"])
def test_schemas_are_those_that_transformers_makes(name):
    """transformers imports the function; dtrain reads its source. `several` has no Args, which transformers wants."""
    found = tool_schema(f"{HERE}.{name}")
    function = getattr(toolbox, name)
    if name == "several":
        function.__doc__ += "\n\nArgs:\n    one: -\n    many: -\n    any_of: -\n"
        for one in found["function"]["parameters"]["properties"].values():
            one["description"] = "-"
    expected = get_json_schema(function)
    expected["function"].pop("return", None)
    assert found == expected


REFUSED = {
    "bare": "its parameter text has no type hint. Write for example text: str",
    "silent": "has no docstring. Write one for the model",
    "strange": "JSON has no value for the type hint when: time.struct_time. Use str, int",
    "mixed": "JSON has no value for the type hint pair: tuple[int, int]",
    "open_ended": "has *args",
    "VALUE": "has no `def VALUE` at its top",
    "lookup": "defines no lookup; did you mean look_up?",
}


@pytest.mark.parametrize("name", REFUSED)
def test_functions_that_make_no_tool(name):
    with pytest.raises(UserError) as error:
        tool_schemas([Tool(f"{HERE}.{name}")])
    assert REFUSED[name] in str(error.value)


def test_two_tools_of_one_name_and_a_decorator_that_changes_arguments():
    with pytest.raises(UserError, match="two tools are named add"):
        tool_schemas([Tool(f"{HERE}.add"), Tool(f"{HERE}:add")])
    with pytest.raises(UserError, match="does not accept the parameters in its source"):
        Toolbox([((HERE, "bent"), {"name": "bent", "parameters": {"properties": {"other": {}}}})], "", False, 9)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_call_is_read_as_its_template_writes_it(tmp_path, name):
    _, template = family(tmp_path, name)
    found = learn_tool_format(template, TOOLS)
    assert found.form == list(CALL_READERS)[FAMILIES[name][2]]
    assert found.is_single == (name == "llama3")
    assert found.thinks == (name == "qwen35")
    pairs = [
        ("look_up", {"words": ['a "b" c', "<d>"], "how": "near", "most": None}),
        ("say", {"text": "ü\n  {12}\n", "times": 2}),
        ("halve", {"number": 0.5}),
        ("add", {"a": -3}),
        ("say", {"text": "true"}),
    ]
    for given in [[one] for one in pairs] + [pairs] * (not found.is_single):
        messages = [*ASKED, {"role": "assistant", "content": "", "tool_calls": calls_of(*given)}]
        text = template.render(messages, TOOLS)
        written = text[len(template.render(ASKED, TOOLS, add_generation_prompt=True)) :]
        if name == "qwen35":  # the newline behind a text is the template's or the text's
            given = [(tool, {**values, "text": values["text"].rstrip("\n")}) if "text" in values else (tool, values)
                     for tool, values in given]  # fmt: skip
            written = written.replace("\n\n</parameter>", "\n</parameter>")
        assert read_calls(found.form, written, PARAMETERS) == [ToolCall(*one) for one in given]


BROKEN = {  # form, text, what the model is told of each call; None: nothing is wrong with it
    "no json": (0, 'I will.\n<tool_call>\nadd(1)\n</tool_call>\n<tool_call>{"name": "add"}', ["no valid JSON", None]),
    "deep": (0, "<tool_call>" + "[" * 100000, ["no valid JSON"]),
    "no name": (0, '<tool_call>{"arguments": {}}</tool_call>', ["must be a JSON object with a name"]),
    "a list": (0, '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', ["must be an object, not a list"]),
    "a text": (0, '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', [None]),
    "an empty text": (0, '<tool_call>{"name": "add", "arguments": ""}</tool_call>', [None]),
    "thinking": (0, '<think><tool_call>{"name": "add"}</tool_call></think>\n\nFour.', []),
    "still thinking": (0, '<think>\n<tool_call>{"name": "add"}</tool_call>', []),
    "quoted": (0, '<tool_call>{"name": "say", "arguments": {"text": "<tool_call>"}}</tool_call>', [None]),
    "no function": (1, "<tool_call>\nadd\n</tool_call>", ["<function=NAME>"]),
    "open": (1, "<tool_call>\n<function=add>\n<parameter=a>\n1\n</function>\n</tool_call>", ["each parameter"]),
    "prose": (2, 'The answer {"name": 1} is four.', []),
    "another object": (2, '{"answer": 4}', []),
    "cut": (2, '{"name": "add", "parameters": {"a": ', ["no valid JSON"]),
    "python": (2, "<|python_tag|>add.call(a=1)", ["a JSON object must stand"]),
    "two": (2, '<|python_tag|>{"name": "add", "parameters": {}}; {"name": "say", "parameters": {}}', [None, None]),
    "by name": (3, '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]say[ARGS]{"text": "b"}', [None, None]),
    "no list": (3, "[TOOL_CALLS]add", ["no valid JSON"]),
    "empty": (3, "[TOOL_CALLS][]", ["must be a JSON object"]),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_written_otherwise(case):
    form, text, problems = BROKEN[case]
    found = read_calls(list(CALL_READERS)[form], text, PARAMETERS)
    assert len(found) == len(problems)
    for one, problem in zip(found, problems, strict=True):
        assert problem in one.problem if problem else one.problem is None


def test_answers(tmp_path):
    _, template = family(tmp_path, "qwen25")
    tools = box(template, most=30)

    def answer(name, **arguments):
        return tools.answer(ToolCall(name, arguments))

    assert answer("add", a=2) == "3" and answer("add", a=2, b=3) == "5"
    assert answer("say", text="ü") == "ü"
    assert answer("look_up", words=["é"]) == '{"é": 1}'
    assert (
        answer("halve", number=0) == "error: ZeroDivisionError: division by zero"[:30] + "\n[cut: 30 of 42 characters]"
    )
    tools = box(template, most=200)
    assert answer("halve", number=0) == "error: ZeroDivisionError: division by zero"
    assert answer("lookup", a=1) == "error: there is no tool 'lookup'; did you mean look_up?"
    assert answer("cook") == "error: there is no tool 'cook'; there are add, look_up, say, halve, wait"
    assert answer("add") == "error: arguments.a is missing"
    assert answer("add", a="1") == "error: arguments.a must be of type integer, not a string"
    assert answer("add", a=True) == "error: arguments.a must be of type integer, not a boolean"
    assert answer("add", a=1, c=2) == "error: add takes no argument 'c'; it takes a, b"
    assert answer("look_up", words=["a", 1]) == "error: arguments.words[1] must be of type string, not a number"
    assert answer("look_up", words=[], how="far") == 'error: arguments.how must be one of ["exact", "near"]'
    assert answer("say", text="a", times=999) == "a" * 200 + "\n[cut: 200 of 999 characters]"
    assert tools.answer(ToolCall("add", problem="so")) == "error: so"
    _, single = family(tmp_path, "llama3")
    two = '{"name": "add", "parameters": {"a": 1}}; {"name": "say", "parameters": {"text": ""}}'
    assert box(single).calls(two) == [ToolCall("add", {"a": 1})]


REPLIES = {  # what the model writes, as its template would, and what that says
    "qwen25": ['Look.\n<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>\n<tool_call>\n{"name": "say", '
               '"arguments": {"text": "\\n dtrain calls <|im_end|>"}}\n</tool_call>',
               '\n<tool_call>\n{"name": "cook", "arguments": {}}\n</tool_call>', "Three."],
    "llama3": ['{"name": "add", "parameters": {"a": 2}}', '{"name": "cook", "parameters": {}}', "Three."],
    "mistral": ['[TOOL_CALLS][{"name": "add", "arguments": {"a": 2}, "id": "call00000"}, {"name": "say", "arguments": '
                '{"text": "b"}, "id": "call00001"}]',
                '[TOOL_CALLS][{"name": "cook", "arguments": {}, "id": "call00002"}]', "Three."],
    "qwen35": ["so\n</think>\n\n<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n</function>\n"
               "</tool_call>\n<tool_call>\n<function=say>\n<parameter=text>\nb\n</parameter>\n</function>\n</tool_call>",
               "<tool_call>?\n</think>\n\n<tool_call>\n<function=cook>\n</function>\n</tool_call>",
               "\n</think>\n\nThree."],
}  # fmt: skip
SAID = {"qwen25": [("say", {"text": "\n dtrain calls <|im_end|>"})], "llama3": []}


@pytest.mark.parametrize("name", FAMILIES)
def test_an_episode_is_the_conversation_that_its_template_writes(tmp_path, name):
    """Question, calls, answers and last reply are the same at once and by tokens; only drawn tokens count as such."""
    tokenizer, template = family(tmp_path, name)
    calls = learn_tool_format(template, TOOLS)
    encoder = PromptEncoder(tokenizer, template, options=PromptOptions(8000, tools=TOOLS), max_length=9999)
    (document,) = encoder.encode_row({"prompt": ASKED}, "prompt_completion")
    engine = Scripted(tokenizer, {0: REPLIES[name]})
    observations = Observations(tokenizer, template, calls)
    (episode,) = run_episodes(
        engine.generate, requests_for(list(document.ids), 1, 400), Here(box(template)({}, 0)), observations,
        max_turns=5, max_length=9999,
    )  # fmt: skip
    first = [("add", {"a": 2}), *SAID.get(name, [("say", {"text": "b"})])]
    answers = ["3", *(arguments["text"] for _, arguments in first[1:])]
    wrong = "error: there is no tool 'cook'; there are add, look_up, say, halve, wait"
    thought = {"qwen35": ["so", "<tool_call>?", ""]}.get(name, [None] * 3)
    content = "Look." if name == "qwen25" else ""
    all_calls = calls_of(*first, ("cook", {}))
    said = [
        {"role": "assistant", "content": content, "tool_calls": all_calls[:-1], "reasoning_content": thought[0]},
        *(
            {"role": "tool", "name": one, "tool_call_id": f"call{number:05}", "content": answer}
            for number, ((one, _), answer) in enumerate(zip(first, answers, strict=True))
        ),
        {"role": "assistant", "content": "", "tool_calls": all_calls[-1:], "reasoning_content": thought[1]},
        {"role": "tool", "name": "cook", "tool_call_id": f"call{len(first):05}", "content": wrong},
        {"role": "assistant", "content": "Three.", "reasoning_content": thought[2]},
    ]
    whole = template.render([*ASKED, *said], TOOLS)
    seen = tokenizer.decode([*episode.prompt, *episode.ids])
    if name == "qwen25":  # its header and a call share the newline that this reply begins with
        whole = whole.replace('assistant\n<tool_call>\n{"name": "cook"', 'assistant\n\n<tool_call>\n{"name": "cook"')
    assert seen == whole.rstrip("\n")
    if name != "llama3":  # whose tokenizer here joins the newlines of a prompt that ends with them
        assert [*episode.prompt, *episode.ids] == tokenizer.encode(whole.rstrip("\n"))
    assert (episode.finish, episode.turns, episode.calls, episode.failures) == ("stop", 3, len(first) + 1, 1)
    silent = Completion(tokenizer.encode("<tool_call>\n<function=add>\n</function>\n</tool_call>"), [], "stop")
    assert len(read_calls(list(CALL_READERS)[1], observations.completion_text(silent), PARAMETERS)) == (
        name != "qwen35"
    )  # it thinks
    drawn = [one for one, was in zip(episode.ids, episode.sampled, strict=True) if was]
    assert drawn == [one for text in REPLIES[name] for one in [*tokenizer.encode(text), tokenizer.eos_id]]
    assert all(value == 0.0 for value, was in zip(episode.logprobs, episode.sampled, strict=True) if not was)


@pytest.mark.parametrize("template, says", [
    (None, "needs a chat template that writes tools, and the model has none"),
    (templates.GEMMA3, "does not tell the model of the tools"),
    (templates.QWEN25.replace("message.tool_calls %}", "[] %}"), "does not write calls of tools"),
    (templates.QWEN25.replace("tool_call>", "call>"), "writes calls in a form that dtrain does not read: "),
    ("{{ tools }}" + templates.ANSWERS.replace("call.function.name", "'<tool_call>' + call.function | tojson"),
     "does not end a turn that calls a tool before the answer"),
])  # fmt: skip
def test_templates_that_are_not_for_tools(template, says):
    template = None if template is None else ChatTemplate(template, "my.jinja", {"bos_token": "<s>"})
    with pytest.raises(UserError, match="grpo.tools.*" + says):
        learn_tool_format(template, TOOLS)


@pytest.mark.parametrize("row, format, says", [
    ({"prompt": "two?"}, "prompt_completion", "this prompt is a text or token ids. Give it messages"),
    ({"prompt": ASKED, "tools": TOOLS[:1]}, "prompt_completion", "the row has tools of its own"),
    ({"question": "two? " * 900}, "question", "set data.too_long to drop, since a cut would take its tools"),
])  # fmt: skip
def test_rows_that_are_not_for_tools(tmp_path, row, format, says):
    tokenizer, template = family(tmp_path, "qwen25")
    encoder = PromptEncoder(tokenizer, template, options=PromptOptions(3000, tools=TOOLS), max_length=9999)
    with pytest.raises(UserError, match=says):
        encoder.encode_row(row, format)


def test_a_call_that_hangs_loses_its_episode_and_no_other(tmp_path):
    tokenizer, template = family(tmp_path, "qwen25")
    calls, said = learn_tool_format(template, TOOLS), []

    def text(name, **arguments):
        return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"

    options = (SOURCES, calls.form, False, 10)
    made_by = "dtrain.rl.environments.tools:Toolbox"
    with Environments(made_by, options=options, whose="grpo.tools", timeout=0.5,
                      print_line=said.append) as environments:  # fmt: skip
        environments.make([({}, number) for number in range(4)])
        engine = Scripted(tokenizer, {
            0: [text("add", a=1), "Two."],
            1: ["None."],
            2: [text("wait", seconds=60), "Late."],
            3: [text("say", text="<|im_end|>" * 9) + text("wait", seconds=0), text("wait", seconds=60)],
        })  # fmt: skip
        observations = Observations(tokenizer, template, calls)
        episodes = run_episodes(engine.generate, requests_for([7], 4, 200), environments, observations, max_turns=2,
                                max_length=999)  # fmt: skip
    assert [one.finish for one in episodes] == ["stop", "stop", "lost", "turns"]  # what nobody would read is not called
    assert [(one.calls, one.failures) for one in episodes] == [(1, 0), (0, 0), (0, 0), (2, 0)]
    assert [one.earned for one in episodes] == [None] * 4
    assert "<tool_response>\n<|im_end|>\n[cut: 10 of 90 characters]\n</tool_response>\n<tool_response>\nwaited\n<" in (
        tokenizer.decode(episodes[3].ids)
    )
    (told,) = said
    assert told.startswith("grpo.tools: step took longer than 0.5 s (grpo.environment_timeout)")


@pytest.mark.parametrize("world_size, shape", [
    (2, ("parallel.tp=2",)),
    (4, ("parallel.cp=2", "data.packing=true")),
])  # fmt: skip
def test_a_run_with_tools_is_the_same_on_every_mesh_and_after_a_resume(tmp_path, world_size, shape):
    fixed = ("checkpoint.every=20", "grpo.prompts_per_step=2", "train.global_batch=4", "run.seed=2")
    one, mesh = (tiny_tools(tmp_path, *more, *fixed, name=name) for name, more in
                 (("one", ()), ("mesh", shape)))  # fmt: skip
    run(one)
    with pytest.raises((Exception, AssertionError), match="stopped after step"):
        interrupt(mesh, world_size, 3)  # within its second rollout
    run(mesh, world_size)
    assert_same(mesh, one, rtol=1e-9)
    assert_same_samples(mesh, one)
    rows, samples = rows_of(one), samples_of(one)
    for row in rows:
        assert 0 < row["tool_failures"] < row["tool_calls"] < 2
    assert [row["tool_calls"] for row in rows_of(mesh)] == [row["tool_calls"] for row in rows]
    assert {"turns", "length"} <= {row["finish"] for row in samples}
    call = r'"after", "arguments": \{"word": "w(\d+)"\}\}</tool_call> w8 (\S+)'
    said = [found for row in samples for found in re.findall(call, row["completion"])]
    assert len(said) > 9 and all(answer == (f"w{int(word) + 30}" if int(word) % 5 else "w2") for word, answer in said)
    assert not any(row["reward"] is None for row in samples)


def test_validate_and_preview_tell_of_tools_and_import_none(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text('open("harm", "w")\ndef find(word: str):\n    """Finds."""\n')
    recipe = tiny_tools(tmp_path, "grpo.tools=[{fn: mine.find}]", "checkpoint.every=20", name="one")
    assert "{{ tool.function.name }}" in TINY
    (recipe.model.directory / "chat_template.jinja").write_text(TINY.replace("tool.function.name", "tool | tojson"))
    (tmp_path / "one.yaml").write_text(config.to_yaml(recipe))
    assert main(["validate", "one.yaml", "data.max_length=200"]) == 0
    assert main(["validate", "one.yaml", "data.max_length=20"]) == 1
    assert "drop, since a cut would take its tools" in capfd.readouterr().err
    written = json.loads((recipe.model.directory / "tokenizer.json").read_text())
    words = {"w62": "Finds", "w63": "find"}
    written["model"]["vocab"] = {words.get(word, word): number for word, number in written["model"]["vocab"].items()}
    (recipe.model.directory / "tokenizer.json").write_text(json.dumps(written))
    assert main(["preview", "one.yaml", "--samples", "1", "data.max_length=200"]) == 0
    out = capfd.readouterr().out
    assert re.search(r"find .* Finds .* w8 w\d\d w5 w9\n", out)
    assert not (tmp_path / "harm").exists()
