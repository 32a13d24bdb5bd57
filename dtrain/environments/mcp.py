"""A server of tools that speaks the Model Context Protocol over its standard input and output, as a client sees it.

JSON-RPC 2.0, a message a line: initialize, tools/list, tools/call (the protocol's specification of 2025-06-18).
"""

import json
import shlex
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from dtrain.data.tool_calls import FAILED
from dtrain.errors import UserError
from dtrain.json_files import loads

VERSION = "2025-06-18"
START = 60.0  # seconds for a server's first answers
NO_METHOD = {"code": -32601, "message": "dtrain offers nothing to a server"}


class ServerGone(Exception):
    """The server's process has ended; the message says with what status."""


class ToolServer:
    """A process that `command` starts, in this one's session, so that it ends with it. Its calls may be made by several
    threads at once. Raises UserError where it cannot be started or does not answer as a server of tools."""

    def __init__(self, command: str):
        self.command = command
        self._lock, self._starting, self._number = threading.Lock(), threading.Lock(), 0
        self._start()

    def ensure(self) -> None:
        """Start it again where it has ended. Raises UserError."""
        with self._starting:
            if self._process.poll() is not None:
                self._start()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()

    def tools(self) -> list[dict[str, Any]]:
        """What it offers, in OpenAI's function format."""
        found: list[dict[str, Any]] = []
        cursor: dict[str, Any] = {}
        while True:
            page = self._now("tools/list", cursor)
            found += [_openai(one) for one in page.get("tools", [])]
            if not page.get("nextCursor"):
                return found
            cursor = {"cursor": page["nextCursor"]}

    def answer(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The texts of what a tool answers; `error: ..` where it says that it failed. Raises ServerGone. It waits for
        ever: the caller is given up where that takes too long."""
        reply = self._ask("tools/call", {"name": name, "arguments": dict(arguments)}).result()
        if "error" in reply:
            return FAILED + str(reply["error"].get("message", reply["error"]))
        result = reply.get("result", {})
        parts = result.get("content", [])
        text = "\n".join(str(one["text"]) if "text" in one else f"[{one.get('type', 'content')}]" for one in parts)
        if not parts and "structuredContent" in result:
            text = json.dumps(result["structuredContent"], ensure_ascii=False)
        return FAILED + text if result.get("isError") else text

    def _start(self) -> None:
        self._waiting: dict[int, Future[dict[str, Any]]] = {}
        try:
            self._process = subprocess.Popen(
                shlex.split(self.command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
            )
        except (OSError, ValueError) as error:
            raise UserError(f"grpo.tools: {self.command} cannot be started: {error}") from None
        threading.Thread(target=self._listen, args=(self._process, self._waiting), daemon=True).start()
        about = {"protocolVersion": VERSION, "capabilities": {}, "clientInfo": {"name": "dtrain", "version": "0"}}
        self._now("initialize", about)
        self._send({"method": "notifications/initialized"})

    def _now(self, method: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """A result within START seconds. Raises UserError."""
        try:
            reply = self._ask(method, given).result(START)
        except TimeoutError:
            self._process.kill()
            raise UserError(f"grpo.tools: {self.command} did not answer {method} within {START:g} s") from None
        except ServerGone as gone:
            raise UserError(f"grpo.tools: {gone} before it answered {method}") from None
        if "result" not in reply:
            raise UserError(f"grpo.tools: {self.command} refused {method}: {reply.get('error')}")
        return reply["result"]

    def _ask(self, method: str, given: Mapping[str, Any]) -> Future[dict[str, Any]]:
        answer: Future[dict[str, Any]] = Future()
        with self._lock:
            self._number += 1
            number = self._number
            self._waiting[number] = answer
        self._send({"id": number, "method": method, "params": given})
        return answer

    def _send(self, message: Mapping[str, Any]) -> None:
        line = json.dumps({"jsonrpc": "2.0", **message})
        try:
            with self._lock:
                assert self._process.stdin is not None, "it was opened with a pipe"
                self._process.stdin.write(line + "\n")
                self._process.stdin.flush()
        except (OSError, ValueError):
            raise self._gone(self._process) from None

    def _listen(self, process: subprocess.Popen[str], waiting: dict[int, Future[dict[str, Any]]]) -> None:
        """Hand each reply to who waits for it, until the process ends. A line that is no message is passed over."""
        assert process.stdout is not None, "it was opened with a pipe"
        for line in process.stdout:
            try:
                message = loads(line)
            except ValueError:
                continue
            if not isinstance(message, dict):
                continue
            if "method" in message and "id" in message:
                reply = {"result": {}} if message["method"] == "ping" else {"error": NO_METHOD}
                with suppress(ServerGone):  # told below
                    self._send({"id": message["id"], **reply})
            elif isinstance(number := message.get("id"), int) and number in waiting:
                waiting.pop(number).set_result(message)
        gone = self._gone(process)
        for answer in list(waiting.values()):
            answer.set_exception(gone)

    def _gone(self, process: subprocess.Popen[str]) -> ServerGone:
        try:
            return ServerGone(f"{self.command} ended with status {process.wait(5)}")
        except subprocess.TimeoutExpired:
            return ServerGone(f"{self.command} closed its output")


def _openai(tool: Mapping[str, Any]) -> dict[str, Any]:
    parameters = tool.get("inputSchema", {"type": "object", "properties": {}})
    function = {"name": tool.get("name"), "description": tool.get("description", ""), "parameters": parameters}
    return {"type": "function", "function": function}


def main() -> None:
    """Writes what a server offers, as `grpo.tools[..].schema` reads it: python -m dtrain.environments.mcp COMMAND."""
    server = ToolServer(sys.argv[1])
    print(json.dumps(server.tools(), indent=1, ensure_ascii=False))
    server.close()


if __name__ == "__main__":
    main()
