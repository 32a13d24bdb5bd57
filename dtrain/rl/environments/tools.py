"""Environment of tools: the calls in a completion are done, and their answers are read next.

In the environments' process; a call that hangs is given up as any step is, and a server that ends loses the episodes
that ask it; another is started for the next ones.
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

    sources: of each tool (module, function) or the address of its server, and its schema with `name` and `parameters`.
    form, is_single: `data.text.tool_calls.ToolFormat`'s. most: characters of an answer; what is beyond is cut, and it
    says so. Raises UserError for what is no function of these parameters, and a server that has no such tool.
    """

    def __init__(
        self, sources: Sequence[tuple[tuple[str, str] | str, Mapping[str, Any]]], form: str, is_single: bool, most: int
    ):
        self.form, self._is_single, self._most = form, is_single, most
        self.parameters: Parameters = {schema["name"]: schema["parameters"] for _, schema in sources}
        self._servers: dict[str, ToolServer] = {}
        self._functions: dict[str, Any] = {}
        self._served: dict[str, ToolServer] = {}
        with ExitStack() as connections:
            addresses = dict.fromkeys(source for source, _ in sources if isinstance(source, str))
            if addresses:
                self._servers = _connected(addresses, connections)
            offered = {
                address: {tool["function"]["name"]: tool["function"] for tool in server.tools()}
                for address, server in self._servers.items()
            }
            for source, schema in sources:
                name = schema["name"]
                if not isinstance(source, str):
                    self._functions[name] = _loaded(*source, schema["parameters"])
                elif offered[source].get(name) == schema:
                    self._served[name] = self._servers[source]
                else:
                    raise UserError(
                        f"grpo.tools: {source} offers no {name} as the file says that it does; write it anew: "
                        f'python -m dtrain.rl.environments.mcp "{source}"'
                    )
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
        """Return the calls in a completion; the first alone where the template writes no more in a turn."""
        calls = read_calls(self.form, text, self.parameters)
        return calls[:1] if self._is_single else calls

    def answer(self, call: ToolCall) -> str:
        """Return the result of a call as text: JSON where it is none; or why there is none."""
        problem = self._problem(call)
        if problem is not None:
            return self._cut(ERROR_PREFIX + problem)
        if call.name in self._served:
            return self._cut(self._served[call.name].answer(call.name, call.arguments))
        outcome = attempt(partial(_run, self._functions[call.name], call.arguments))
        if "value" in outcome:
            return self._cut(outcome["value"])
        return self._cut(ERROR_PREFIX + (outcome.get("user") or outcome["error"].splitlines()[-1]))

    def _problem(self, call: ToolCall) -> str | None:
        if call.problem is not None:
            return call.problem
        if call.name not in self.parameters:
            near = closest_name(call.name, self.parameters)
            meant = f"did you mean {near}?" if near else f"there are {', '.join(self.parameters)}"
            return f"there is no tool {shown(call.name)}; {meant}"
        if call.name in self._served:
            return None  # the server says what is wrong
        known = self.parameters[call.name]["properties"]
        other = next((name for name in call.arguments if name not in known), None)
        if other is not None:
            return f"{call.name} takes no argument {shown(other)}; it takes {', '.join(known) or 'none'}"
        return find_schema_violation(call.arguments, self.parameters[call.name], "arguments")

    def _cut(self, text: str) -> str:
        if len(text) <= self._most:
            return text
        return f"{text[: self._most]}\n[cut: {self._most} of {len(text)} characters]"


class ToolUse:
    """Environment of one completion. It earns nothing, and is done where a completion calls no tool."""

    def __init__(self, box: Toolbox):
        self.done = False
        self._box, self._count = box, 0
        self._calls: list[ToolCall] = []

    def step(self, completion: str) -> None:
        self._calls = self._box.calls(completion)
        self.done = not self._calls

    def observe(self) -> list[dict[str, Any]]:
        """Return the answers in the order of the calls, messages of role tool."""
        answers = []
        for call in self._calls:
            name = call.name if call.name in self._box.parameters else UNREADABLE_NAME
            number = f"call{self._count:05}"
            answers.append({"role": "tool", "name": name, "tool_call_id": number, "content": self._box.answer(call)})
            self._count += 1
        return answers


def _connected(addresses: Iterable[str], connections: ExitStack) -> dict[str, "ToolServer"]:
    """Return tool servers by address, which `connections` closes. One event loop serves them."""
    for address in addresses:
        find_server(address)
    # Optional packages: tools that are Python functions do without.
    from anyio.from_thread import start_blocking_portal

    from dtrain.rl.environments.mcp import ToolServer

    portal = connections.enter_context(start_blocking_portal())
    return {address: connections.enter_context(ToolServer(address, portal)) for address in addresses}


def _loaded(module: str, name: str, parameters: Mapping[str, Any]) -> Any:
    function = getattr(importlib.import_module(module), name)
    if not callable(function):
        raise UserError(f"tool {module}.{name} is {shown(function)}, which cannot be called")
    try:
        inspect.signature(function).bind(**dict.fromkeys(parameters["properties"]))
    except TypeError as error:
        raise UserError(f"tool {module}.{name} takes other arguments than its source says ({error}): a decorator must "
                        "keep them") from None  # fmt: skip
    return function


def _run(function: Any, arguments: Mapping[str, Any]) -> str:
    value = function(**arguments)
    if inspect.iscoroutine(value):
        value = asyncio.run(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
