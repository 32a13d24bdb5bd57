"""Environment of `grpo.tools`, which makes the tool calls in a completion. The model reads the results next.

The environment runs in the environments' process. A call that hangs is abandoned like any step of an environment. If a
tool server ends, the episodes that call it are lost, and the server is started again for the next episodes. An
observation has one message for each call:

    completion     <tool_call>{"name": "power", "arguments": {"base": 2, "exponent": 10}}</tool_call>
    observation    [{"role": "tool", "name": "power", "tool_call_id": "call00000", "content": "1024"}]
"""

import asyncio
import importlib
import inspect
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from dtrain.base.errors import UserError
from dtrain.base.ranges import closest_name
from dtrain.data.text.tool_calls import (
    ERROR_PREFIX,
    UNREADABLE_NAME,
    Parameters,
    ToolCall,
    find_schema_violation,
    read_calls,
)
from dtrain.rl.tools import find_server
from dtrain.rl.worker import attempt, shown

if TYPE_CHECKING:
    from dtrain.rl.environments.mcp import ToolServer


class Toolbox:
    """Maker of environments with the same tools, one for each completion.

    Args:
        sources: For each tool its source and its schema. The source is (module, function), or the address of a server.
            The schema has "name" and "parameters".
        form: How calls are written, as in `data.text.tool_calls.ToolFormat`.
        is_single: Whether the template writes at most one call in a turn.
        max_characters: Largest number of characters of an answer. A longer answer is cut, with a note at its end.

    Attributes:
        parameters: The JSON schema of each tool's parameters, by the tool's name.

    Raises:
        UserError: If a function does not take the parameters of its schema, or a server lacks the tool.
    """

    def __init__(
        self,
        sources: Sequence[tuple[tuple[str, str] | str, Mapping[str, Any]]],
        form: str,
        is_single: bool,
        max_characters: int,
    ):
        self.form, self._is_single, self._max_characters = form, is_single, max_characters
        self.parameters: Parameters = {schema["name"]: schema["parameters"] for _, schema in sources}
        self._servers: dict[str, ToolServer] = {}  # by address
        self._functions: dict[str, Any] = {}  # by the tool's name
        self._server_of_tool: dict[str, ToolServer] = {}  # by the tool's name
        with ExitStack() as connections:
            addresses = dict.fromkeys(source for source, _ in sources if isinstance(source, str))
            if addresses:
                self._servers = _connect(addresses, connections)
            schemas_of_server = {}
            for address, server in self._servers.items():
                functions = [tool["function"] for tool in server.tools()]
                schemas_of_server[address] = {function["name"]: function for function in functions}
            for source, schema in sources:
                name = schema["name"]
                if not isinstance(source, str):
                    module, function = source
                    self._functions[name] = _load_function(module, function, schema["parameters"])
                elif schemas_of_server[source].get(name) == schema:
                    self._server_of_tool[name] = self._servers[source]
                else:
                    raise UserError(
                        f"grpo.tools: {source} has no tool {name} with the schema in the file. Write the file again: "
                        f'python -m dtrain.rl.environments.mcp "{source}"'
                    )
            # Everything worked, so the connections stay open until `close`.
            self._connections = connections.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections to the servers, and end the thread of their event loop."""
        self._connections.close()

    def __call__(self, row: Mapping[str, Any], seed: int) -> "ToolUse":
        for server in self._servers.values():
            server.ensure()
        return ToolUse(self)

    def calls(self, text: str) -> list[ToolCall]:
        """Return the calls in a completion: only the first if the template writes at most one in a turn."""
        calls = read_calls(self.form, text, self.parameters)
        return calls[:1] if self._is_single else calls

    def answer(self, call: ToolCall) -> str:
        """Make a call and return its result as text, or a text that begins with "error: ".

        A text is returned unchanged, and any other value as JSON.
        """
        problem = self._call_problem(call)
        if problem is not None:
            return self._cut(ERROR_PREFIX + problem)
        if call.name in self._server_of_tool:
            return self._cut(self._server_of_tool[call.name].answer(call.name, call.arguments))
        outcome = attempt(partial(_run, self._functions[call.name], call.arguments))
        if "value" in outcome:
            return self._cut(outcome["value"])
        reason = outcome.get("user") or outcome["error"].splitlines()[-1]
        return self._cut(ERROR_PREFIX + reason)

    def _call_problem(self, call: ToolCall) -> str | None:
        """Return the problem of a call, as a message for the model. None if the call can be made."""
        if call.problem is not None:
            return call.problem
        if call.name not in self.parameters:
            near = closest_name(call.name, self.parameters)
            hint = f"did you mean {near}?" if near else f"there are {', '.join(self.parameters)}"
            return f"there is no tool {shown(call.name)}; {hint}"
        if call.name in self._server_of_tool:
            return None  # the server checks the arguments itself
        known = self.parameters[call.name]["properties"]
        for name in call.arguments:
            if name not in known:
                return f"{call.name} takes no argument {shown(name)}; it takes {', '.join(known) or 'none'}"
        return find_schema_violation(call.arguments, self.parameters[call.name], "arguments")

    def _cut(self, text: str) -> str:
        if len(text) <= self._max_characters:
            return text
        return f"{text[: self._max_characters]}\n[cut: {self._max_characters} of {len(text)} characters]"


class ToolUse:
    """Environment of one completion. Steps have no rewards. The episode ends after a completion without a call.

    Attributes:
        done: Whether the last completion had no call.
    """

    def __init__(self, box: Toolbox):
        self.done = False
        self._box = box
        self._num_calls = 0  # in all turns
        self._calls: list[ToolCall] = []  # of the last completion

    def step(self, completion: str) -> None:
        """Read the tool calls in a completion. `observe` makes them."""
        self._calls = self._box.calls(completion)
        self.done = not self._calls

    def observe(self) -> list[dict[str, Any]]:
        """Make the calls of the last completion and return a message of role "tool" for each, in their order."""
        answers = []
        for call in self._calls:
            name = call.name if call.name in self._box.parameters else UNREADABLE_NAME
            call_id = f"call{self._num_calls:05}"
            answers.append({"role": "tool", "name": name, "tool_call_id": call_id, "content": self._box.answer(call)})
            self._num_calls += 1
        return answers


def _connect(addresses: Iterable[str], connections: ExitStack) -> dict[str, "ToolServer"]:
    """Connect to tool servers, in one event loop. `connections` closes them."""
    for address in addresses:
        find_server(address)
    # Optional packages, which tools that are Python functions do not need.
    from anyio.from_thread import start_blocking_portal

    from dtrain.rl.environments.mcp import ToolServer

    portal = connections.enter_context(start_blocking_portal())
    return {address: connections.enter_context(ToolServer(address, portal)) for address in addresses}


def _load_function(module: str, name: str, parameters: Mapping[str, Any]) -> Any:
    """Import a tool and check that it takes the parameters of its schema, which was read from its source."""
    function = getattr(importlib.import_module(module), name)
    if not callable(function):
        raise UserError(f"tool {module}.{name} is {shown(function)}, which cannot be called")
    try:
        inspect.signature(function).bind(**dict.fromkeys(parameters["properties"]))
    except TypeError as error:
        raise UserError(
            f"tool {module}.{name} does not accept the parameters in its source ({error}). A decorator must not change "
            "them"
        ) from None
    return function


def _run(function: Any, arguments: Mapping[str, Any]) -> str:
    """Call a tool, sync or async, and return its result as text."""
    value = function(**arguments)
    if inspect.iscoroutine(value):
        value = asyncio.run(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
