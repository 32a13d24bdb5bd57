"""Tools of MCP servers: servers of the package `mcp` itself, over standard input and output and over HTTP."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from anyio.from_thread import start_blocking_portal

from dtrain.base.errors import UserError
from dtrain.commands.cli import main
from dtrain.data.text.tool_calls import learn_tool_format
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
from tests.rollout.test_rewards import alive, gone_within
from tests.running import assert_same, run
from tests.serve.serving import Process, controlled, key_file, make_model, wait_until

pytest.importorskip("mcp", reason="the package mcp is not installed: pip install 'dtrain[mcp]'")

ROOT = Path(__file__).parents[2]
FILE = Path(__file__).with_name("mcp_server.py")
SERVER = f"{sys.executable} {FILE}"
NAMES = ["say", "power", "words", "picture", "end", "wait"]
TOOLBOX = "dtrain.rl.environments.tools:Toolbox"


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


class Players:
    """Episodes of one turn with a call each, and one that ends, against environments of a server's tools."""

    def __init__(self, root, monkeypatch, capfd):
        monkeypatch.chdir(root)
        monkeypatch.setattr(sys, "argv", ["mcp", SERVER])
        mcp.main()
        (root / "tools.json").write_text(capfd.readouterr().out)
        tools = tool_schemas([Tool(f"{HERE}.add"), Tool(mcp=SERVER, schema="tools.json")])
        self.schemas = [schema for _, schema in tools]
        self.sources = [(one.mcp or (HERE, "add"), schema["function"]) for one, schema in tools]
        self.tokenizer, self.template = family(root, "qwen25")
        self.calls = learn_tool_format(self.template, self.schemas)
        self.said = []

    def environments(self, timeout, server=SERVER):
        sources = [(server if source == SERVER else source, schema) for source, schema in self.sources]
        options = (sources, self.calls.form, False, 99)
        say = self.said.append
        return Environments(TOOLBOX, options=options, whose="grpo.tools", timeout=timeout, threads=3, print_line=say)

    def play(self, environments, texts):
        """Return the tools' answers of each episode, and how it ended: (finish, calls, failures)."""
        environments.make([({}, number) for number in range(len(texts))])
        engine = Scripted(self.tokenizer, {number: [one, "So."] for number, one in enumerate(texts)})
        observations = Observations(self.tokenizer, self.template, self.calls)
        requests = requests_for([7], len(texts), 300)
        episodes = run_episodes(engine.generate, requests, environments, observations, max_turns=2, max_length=999)
        pattern = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)
        answers = [pattern.findall(self.tokenizer.decode(one.ids)) for one in episodes]
        return answers, [(one.finish, one.calls, one.failures) for one in episodes]


@pytest.fixture
def players(tmp_path, monkeypatch, capfd):
    return Players(tmp_path, monkeypatch, capfd)


@pytest.mark.processes
def test_a_server_of_tools(players):
    """Where it ends, those who ask lose their episodes, and the next ones find another."""
    assert [one["function"]["name"] for one in players.schemas] == ["add", *NAMES]
    assert players.schemas[1]["function"]["description"] == "To say."
    given = [call("say", text="ü\n") + call("add", a=1), call("power", base="a") + call("say"), call("say", text="b")]
    # Seconds: a server that was lost is started within a make, and imports the package mcp.
    with players.environments(timeout=8.0) as environments:
        found, ends = players.play(environments, given)
        process = found[2][0].split("\n")[1]
        assert found[0] == [f"ü\n\n{process}", "2"] and found[2] == [f"b\n{process}"]
        assert all(text.startswith("error: ") for text in found[1])
        assert ends == [("stop", 2, 0), ("stop", 2, 2), ("stop", 1, 0)]
        assert players.play(environments, [call("end")])[1] == [("lost", 0, 0)]
        assert "mcp_server.py: Connection closed" in players.said[0]
        found, same_ends = players.play(environments, given)
        assert same_ends == ends and found[2][0].split("\n")[1] != process
        assert players.play(environments, [call("wait"), call("add", a=1)])[1] == [("lost", 0, 0), ("stop", 1, 0)]
        assert players.play(environments, given)[1] == ends  # the one that hangs went with the environments' process


@pytest.mark.processes
def test_a_server_ends_with_the_environments_even_where_it_hangs(players):
    """Its parent is another program here, as it is with uvx."""
    with players.environments(timeout=1.0, server=f"sh -c '{SERVER}; true'") as environments:
        found, _ = players.play(environments, [call("say", text="a")])
        server = int(found[0][0].split("\n")[1])
        assert players.play(environments, [call("wait")])[1] == [("lost", 0, 0)] and alive(server)
    assert gone_within(5, server)


@pytest.mark.processes
def test_a_server_ends_with_a_process_that_is_killed(tmp_path):
    """The server hangs, so it does not see that its input is closed."""
    code = f"""
from anyio.from_thread import start_blocking_portal
from dtrain.rl.environments.mcp import ToolServer
with start_blocking_portal() as portal, ToolServer({SERVER!r}, portal) as server:
    print(server.answer("say", {{"text": "a"}}).split()[1], flush=True)
    server.answer("wait", {{}})
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=environment
    )
    with parent:
        server = int(parent.stdout.readline())
        wait_until((tmp_path / "hangs").exists)
        parent.send_signal(signal.SIGKILL)
    assert gone_within(5, server)


@contextmanager
def http_server(port):
    """A server over HTTP on a port of this machine."""
    process = subprocess.Popen([sys.executable, str(FILE), str(port)], stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: is_open(port))
        yield process
    finally:
        process.kill()
        process.wait()


def is_open(port):
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


def free_port():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


@pytest.mark.processes
def test_answers_are_the_same_over_http_and_standard_input_and_output():
    port = free_port()
    url = f"http://127.0.0.1:{port}/mcp"
    with start_blocking_portal() as portal, http_server(port) as process:
        with mcp.ToolServer(SERVER, portal) as local, mcp.ToolServer(url, portal) as remote:
            assert remote.tools() == local.tools()
            assert [one["function"]["name"] for one in local.tools()] == NAMES
            for server in (local, remote):
                assert server.answer("power", {"base": 2, "exponent": 10}) == "1024"
                assert server.answer("words", {"text": "añb c \u2028d"}) == "añb\nc\nd"
                assert server.answer("picture", {}) == "look:\n[image]"
                assert server.answer("power", {"base": "a"}).startswith("error: Error executing tool power")
                assert server.answer("cook", {}) == "error: Unknown tool: cook"
            process.kill()
            process.wait()
            with pytest.raises(mcp.ServerGone, match=f"127.0.0.1:{port}/mcp: Connection closed"):
                remote.answer("say", {"text": "a"})
            with pytest.raises(UserError, match=f"127.0.0.1:{port}/mcp does not answer as an MCP server: All connec"):
                remote.ensure()
            with http_server(port):
                remote.ensure()
                assert remote.answer("say", {"text": "a"}).startswith("a\n")


@pytest.mark.processes
def test_a_server_that_is_none_or_offers_something_else(players):
    other = {**players.sources[1][1], "description": "Another."}
    with pytest.raises(UserError, match="has no tool say with the schema in the file. Write the file again"):
        Toolbox([(SERVER, other)], players.calls.form, False, 99)
    with pytest.raises(UserError, match="the program /no/such/server does not exist"):
        Toolbox([("/no/such/server", other)], players.calls.form, False, 99)
    with start_blocking_portal() as portal:
        with pytest.raises(UserError, match="false does not answer as an MCP server: Connection closed"):
            mcp.ToolServer("false", portal)
    with pytest.raises(
        UserError, match="the file gone.json with the tools of .* does not exist. Write it: python -m dtrain.rl.environ"
    ):
        tool_schemas([Tool(mcp=SERVER, schema="gone.json")])
    Path("other.json").write_text('{"tools": []}')
    with pytest.raises(UserError, match="other.json must be a list of tools"):
        tool_schemas([Tool(mcp=SERVER, schema="other.json")])


def test_the_package_is_missing_before_anything_runs(tmp_path, players, monkeypatch, capfd):
    overrides = [f"grpo.tools=[{{mcp: {SERVER!r}, schema: tools.json}}]", "grpo.max_turns=2"]
    monkeypatch.setattr("dtrain.rl.tools.find_spec", lambda name: None)
    assert main(["validate", "grpo", *overrides]) == 1
    problem = "tool servers need the package mcp, which is not installed: pip install 'dtrain[mcp]'"
    assert problem in capfd.readouterr().err


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
