"""Tools of MCP servers: what they answer, and servers that break the protocol, hang or die."""

import json
import re
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dtrain.base.errors import UserError
from dtrain.data.text.tool_format import learn_tool_format
from dtrain.recipe.rollouts import Tool
from dtrain.rl.environments import mcp
from dtrain.rl.environments.episodes import Observations, run_episodes
from dtrain.rl.environments.stepping import Environments
from dtrain.rl.environments.tools import Toolbox
from dtrain.rl.tools import tool_schemas
from tests.environments.test_environment import Scripted, requests_for
from tests.environments.test_tools import HERE, family
from tests.environments.tiny_tools import tiny_tools
from tests.methods.comparing import samples_of
from tests.running import assert_same, run
from tests.serve.serving import Process, controlled, key_file, make_model

SERVER = f"{sys.executable} {Path(__file__).with_name('mcp_server.py')}"


def test_a_server_of_tools(tmp_path, monkeypatch, capfd):
    """Its tools in pages, answers, failures; where it ends, those who ask lose their episodes, and others find it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["mcp", SERVER])
    mcp.main()
    (tmp_path / "tools.json").write_text(capfd.readouterr().out)
    tools = tool_schemas([Tool(f"{HERE}.add"), Tool(mcp=SERVER, schema="tools.json")])
    schemas = [schema for _, schema in tools]
    assert [one["function"]["name"] for one in schemas] == ["add", "say", "fail", "end", "wait"]
    assert schemas[1]["function"]["description"] == "To say."
    sources = [(one.mcp or (HERE, "add"), schema["function"]) for one, schema in tools]
    tokenizer, template = family(tmp_path, "qwen25")
    calls, said = learn_tool_format(template, schemas), []

    def text(name, **arguments):
        return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"

    def answers(texts):
        environments.make([({}, number) for number in range(len(texts))])
        engine = Scripted(tokenizer, {number: [one, "So."] for number, one in enumerate(texts)})
        episodes = run_episodes(engine.generate, requests_for([7], len(texts), 300), environments,
                                Observations(tokenizer, template, calls), max_turns=2, max_length=999)  # fmt: skip
        found = [re.findall(r"<tool_response>\n(.*?)\n</tool_response>", tokenizer.decode(one.ids), re.DOTALL)
                 for one in episodes]  # fmt: skip
        return found, [(one.finish, one.calls, one.failures) for one in episodes]

    made_by = "dtrain.rl.environments.tools:Toolbox"
    with Environments(made_by, options=(sources, calls.form, False, 99), whose="grpo.tools",
                      timeout=1.0, threads=3, say=said.append) as environments:  # fmt: skip
        given = [
            text("say", text="ü\n") + text("add", a=1),
            text("fail", text="a") + text("say"),
            text("say", text="b"),
        ]
        found, ends = answers(given)
        process = found[2][0].split("\n")[1]
        assert found == [[f"ü\n\n{process}", "2"], ["error: it failed", "error: no text"], [f"b\n{process}"]]
        assert ends == [("stop", 2, 0), ("stop", 2, 2), ("stop", 1, 0)]
        assert answers([text("end", text="a")])[1] == [("lost", 0, 0)]
        assert "mcp_server.py ended with status 3" in said[0]
        found, ends = answers(given)
        assert ends == [("stop", 2, 0), ("stop", 2, 2), ("stop", 1, 0)] and found[2][0].split("\n")[1] != process
        assert answers([text("wait", text="a"), text("add", a=1)])[1] == [("lost", 0, 0), ("stop", 1, 0)]
        assert answers(given)[1] == ends  # it hangs still: its process went with the threads that wait for it
    other = {**sources[1][1], "description": "Another."}
    with pytest.raises(UserError, match="offers no say as the file says that it does; write it anew"):
        Toolbox([(SERVER, other)], calls.form, False, 99)
    for command, says in (("/no/such/server", "cannot be started"), ("false", "before it answered initialize")):
        with pytest.raises(UserError, match=says):
            mcp.ToolServer(command)
    with pytest.raises(UserError, match="there is no file gone.json of what .* write it: python -m dtrain.rl.environ"):
        tool_schemas([Tool(mcp=SERVER, schema="gone.json")])
    (tmp_path / "other.json").write_text('{"tools": []}')
    with pytest.raises(UserError, match="other.json must be a list of tools"):
        tool_schemas([Tool(mcp=SERVER, schema="other.json")])


HOSTILE = f"{sys.executable} {Path(__file__).with_name('mcp_hostile.py')}"
MALFORMED = {  # what the tool is given: what the model reads
    "list": "error: {} answered with a result that is a list, not an object",
    "null": "error: {} answered with a result that is null, not an object",
    "content": "error: {} answered with content that is a string, not a list",
    "part": "error: {} answered with a part of the content that is a string, not an object",
    "error": "error: {} answered with an error that is a string, not an object",
    "neither": "error: {} answered with a result that is null, not an object",
    "strange text": "{'a': 1}",
    "no content": "",
    "twice": "first",
    "others first": "right",
    "fine": "fine",
}
BREAKING = {  # what ends a server, with the calls under way and those after
    "no UTF-8": "wrote a line that is not UTF-8",
    "endless": "wrote a line of more than 16 MiB",
    "silent": "closed its output",
}


@pytest.mark.processes
def test_a_server_that_answers_against_the_protocol_fails_its_calls_alone():
    server = mcp.ToolServer(HOSTILE)
    try:
        for text, said in MALFORMED.items():
            assert server.answer("say", {"text": text}) == said.replace("{}", HOSTILE, 1), text
    finally:
        server.close()


@pytest.mark.processes
@pytest.mark.parametrize("text", BREAKING)
def test_a_server_that_nobody_can_read_is_ended_and_no_call_of_it_hangs(text):
    server = mcp.ToolServer(HOSTILE)
    with ThreadPoolExecutor(2) as threads:
        try:
            under_way = threads.submit(server.answer, "say", {"text": "wait"})
            broken = threads.submit(server.answer, "say", {"text": text})
            for call in (under_way, broken):
                with pytest.raises(mcp.ServerGone, match=BREAKING[text]):
                    call.result(20)
            with pytest.raises(mcp.ServerGone, match=BREAKING[text]):
                threads.submit(server.answer, "say", {"text": "late"}).result(5)
            server.ensure()
            assert threads.submit(server.answer, "say", {"text": "a"}).result(5) == "a"
        finally:
            server.close()  # ends a call that hangs, so that the threads end


@pytest.mark.processes
@pytest.mark.parametrize("start, says", [
    ("null", "a result that is null, not an object .initialize"), ("a list", "a result that is a list"),
    ("pages", "more than 1000 pages"), ("tools", "no list of named tools"),
])  # fmt: skip
def test_a_server_that_starts_against_the_protocol(start, says):
    with pytest.raises(UserError, match=says):
        mcp.ToolServer(f"{HOSTILE} '{start}'").tools()


def test_a_run_with_tools_over_a_server_is_that_of_the_native_engine(tmp_path):
    native = tiny_tools(tmp_path, name="native")
    run(native)
    model = make_model(tmp_path / "served", 1)
    for name in ("tokenizer.json", "chat_template.jinja"):
        shutil.copy(native.model.directory / name, model / name)
    process = Process(model, "--max-rows", "8", *controlled(tmp_path))
    try:
        over_http = ("grpo.engine=http", f"grpo.server.urls=[{process.url}]")
        served = tiny_tools(tmp_path, *over_http, f"grpo.server.api_key_file={key_file(tmp_path)}", name="served")
        run(served)
    finally:
        process.kill()
    assert_same(served, native, rtol=1e-9)
    completions = [[row["completion"] for row in samples_of(one)] for one in (served, native)]
    assert completions[0] == completions[1] and any("</tool_call> w8" in text for text in completions[0])
