"""Client of a server of tools that speaks the Model Context Protocol over its standard input and output.

JSON-RPC 2.0, a message a line: initialize, tools/list, tools/call (the protocol's specification of 2025-06-18). The
`mcp` package waits for ever on malformed answers, and keeps a line without an end until the memory is full.
"""

import json
import shlex
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from dtrain.base.errors import UserError
from dtrain.base.json_files import kind_of, loads
from dtrain.data.text.tool_calls import FAILED

VERSION = "2025-06-18"
START = 60.0  # seconds for a server's first answers
LINE = 1 << 24  # bytes of a server's message
PAGES = 1000  # of a server's list of tools
NO_METHOD = {"code": -32601, "message": "dtrain offers nothing to a server"}


class ServerGone(Exception):
    """The server's process has ended, or was ended; the message says with what status, or why."""


class MalformedAnswer(Exception):
    """An answer that the protocol does not allow; the message names the server."""


@dataclass
class _Connection:
    """A server's process, the calls that wait for its answers and why it is gone, both under the server's lock."""

    process: subprocess.Popen[bytes]
    waiting: dict[int, Future[dict[str, Any]]] = field(default_factory=dict)
    gone: ServerGone | None = None


class ToolServer:
    """Server of tools: a process that `command` starts, in this one's session, so that it ends with it. Its calls may
    be made by several threads at once. Raises UserError where it cannot be started or does not answer as a server of
    tools."""

    def __init__(self, command: str):
        self.command = command
        self._lock, self._sending, self._starting = threading.Lock(), threading.Lock(), threading.Lock()
        self._number = 0
        self._start()

    def ensure(self) -> None:
        """Start it again where it has ended. Raises UserError."""
        with self._starting:
            if self._connection.gone is not None or self._connection.process.poll() is not None:
                self._start()

    def close(self) -> None:
        """End the process."""
        self._connection.process.kill()
        self._connection.process.wait()

    def tools(self) -> list[dict[str, Any]]:
        """Return the tools that it offers, in OpenAI's function format. Raises UserError."""
        schemas: list[dict[str, Any]] = []
        cursor: dict[str, Any] = {}
        for _ in range(PAGES):
            page = self._now("tools/list", cursor)
            tools = page.get("tools", [])
            if not isinstance(tools, list) or not all(map(_is_tool, tools)):
                raise UserError(f"grpo.tools: {self.command} answered tools/list with what is no list of named tools")
            schemas += map(_openai, tools)
            if not page.get("nextCursor"):
                return schemas
            cursor = {"cursor": page["nextCursor"]}
        raise UserError(f"grpo.tools: {self.command} lists its tools in more than {PAGES} pages")

    def answer(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return the texts of a tool's answer; `error: ..` where it says that it failed, or answers against the
        protocol. Raises ServerGone. It waits for ever: the caller is given up where that takes too long."""
        reply = self._ask("tools/call", {"name": name, "arguments": dict(arguments)}).result()
        try:
            return self._text(reply)
        except MalformedAnswer as error:
            return FAILED + str(error)

    def _text(self, reply: Mapping[str, Any]) -> str:
        """Return the text of a reply. Raises MalformedAnswer."""
        if "error" in reply:
            error = self._object(reply["error"], "an error")
            return FAILED + str(error.get("message", error))
        result = self._object(reply.get("result"), "a result")
        parts = result.get("content", [])
        if not isinstance(parts, list):
            raise MalformedAnswer(f"{self.command} answered with content that is {kind_of(parts)}, not a list")
        items = [self._object(part, "a part of the content") for part in parts]
        text = "\n".join(str(item["text"]) if "text" in item else f"[{item.get('type', 'content')}]" for item in items)
        if not parts and "structuredContent" in result:
            text = json.dumps(result["structuredContent"], ensure_ascii=False)
        return FAILED + text if result.get("isError") else text

    def _object(self, value: Any, what: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise MalformedAnswer(f"{self.command} answered with {what} that is {kind_of(value)}, not an object")
        return value

    def _start(self) -> None:
        try:
            process = subprocess.Popen(shlex.split(self.command), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        except (OSError, ValueError) as error:
            raise UserError(f"grpo.tools: {self.command} cannot be started: {error}") from None
        self._connection = _Connection(process)
        threading.Thread(target=self._listen, args=(self._connection,), daemon=True).start()
        parameters = {"protocolVersion": VERSION, "capabilities": {}, "clientInfo": {"name": "dtrain", "version": "0"}}
        self._now("initialize", parameters)
        self._send(self._connection, {"method": "notifications/initialized"})

    def _now(self, method: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Return the result of a call, which may take START seconds. Raises UserError."""
        try:
            reply = self._ask(method, parameters).result(START)
            if "result" not in reply:
                raise UserError(f"grpo.tools: {self.command} refused {method}: {reply.get('error')}")
            return self._object(reply["result"], "a result")
        except TimeoutError:
            self._connection.process.kill()
            raise UserError(f"grpo.tools: {self.command} did not answer {method} within {START:g} s") from None
        except ServerGone as gone:
            raise UserError(f"grpo.tools: {gone} before it answered {method}") from None
        except MalformedAnswer as error:
            raise UserError(f"grpo.tools: {error} ({method})") from None

    def _ask(self, method: str, parameters: Mapping[str, Any]) -> Future[dict[str, Any]]:
        """Send a request and return its future answer. Raises ServerGone."""
        answer: Future[dict[str, Any]] = Future()
        with self._lock:
            connection = self._connection
            if connection.gone is not None:
                raise connection.gone
            self._number += 1
            number = self._number
            connection.waiting[number] = answer
        self._send(connection, {"id": number, "method": method, "params": parameters})
        return answer

    def _send(self, connection: _Connection, message: Mapping[str, Any]) -> None:
        """Send a message. Raises ServerGone."""
        line = json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n"
        try:
            with self._sending:
                assert connection.process.stdin is not None, "it was opened with a pipe"
                connection.process.stdin.write(line)
                connection.process.stdin.flush()
        except (OSError, ValueError):
            raise self._ended(connection.process) from None

    def _listen(self, connection: _Connection) -> None:
        """Hand each reply to who waits for it, until the process ends, or is ended for what it writes: nobody would
        hear it any more. A line that is no message is passed over."""
        process = connection.process
        assert process.stdout is not None, "it was opened with a pipe"
        gone: ServerGone | None = None
        while gone is None and (line := process.stdout.readline(LINE + 1)):
            if len(line) > LINE:
                gone = ServerGone(f"{self.command} wrote a line of more than {LINE >> 20} MiB and was ended")
            else:
                try:
                    self._read(connection, line)
                except UnicodeDecodeError as error:
                    gone = ServerGone(f"{self.command} wrote a line that is not UTF-8 ({error}) and was ended")
        gone = gone or self._ended(process)
        process.kill()
        with self._lock:
            connection.gone = gone
        for answer in connection.waiting.values():
            answer.set_exception(gone)

    def _read(self, connection: _Connection, line: bytes) -> None:
        """Handle a line from the server. Raises UnicodeDecodeError."""
        try:
            message = loads(line)
        except UnicodeDecodeError:
            raise
        except ValueError:
            return
        if not isinstance(message, dict):
            return
        number = message.get("id")
        if "method" in message and "id" in message:
            reply = {"result": {}} if message["method"] == "ping" else {"error": NO_METHOD}
            with suppress(ServerGone):  # reported by `_listen`
                self._send(connection, {"id": number, **reply})
        elif isinstance(number, int) and not isinstance(number, bool):
            with self._lock:
                answer = connection.waiting.pop(number, None)
            if answer is not None:
                answer.set_result(message)

    def _ended(self, process: subprocess.Popen[bytes]) -> ServerGone:
        try:
            return ServerGone(f"{self.command} ended with status {process.wait(5)}")
        except subprocess.TimeoutExpired:
            return ServerGone(f"{self.command} closed its output")


def _is_tool(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("name"), str)


def _openai(tool: Mapping[str, Any]) -> dict[str, Any]:
    parameters = tool.get("inputSchema", {"type": "object", "properties": {}})
    function = {"name": tool.get("name"), "description": tool.get("description", ""), "parameters": parameters}
    return {"type": "function", "function": function}


def main() -> None:
    """Print what a server offers, as `grpo.tools[..].schema` reads it: python -m dtrain.rl.environments.mcp COMMAND."""
    server = ToolServer(sys.argv[1])
    print(json.dumps(server.tools(), indent=1, ensure_ascii=False))
    server.close()


if __name__ == "__main__":
    main()
