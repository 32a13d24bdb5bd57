"""Client of tool servers that speak the Model Context Protocol: a command's process, or an address over HTTP.

The protocol is the work of the package `mcp`, which is asyncio. Environments are stepped by threads, so all servers of
an environment share one event loop in a thread of its own, anyio's blocking portal, and a call waits there for its
answer.
"""

import json
import math
import os
import shlex
import sys
import threading
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from dtrain.base import orphans
from dtrain.base.errors import UserError
from dtrain.data.text.tool_calls import ERROR_PREFIX
from dtrain.rl.tools import find_server, is_url

if TYPE_CHECKING:
    from collections.abc import Mapping

    from anyio.from_thread import BlockingPortal
    from mcp.types import CallToolResult

# The package mcp is optional, so it is imported in the functions that use it.

START = 60.0  # seconds for each of a server's first answers


class ServerGone(Exception):
    """The connection to a server is closed, for example because its process has ended; the message names the server."""


class ToolServer:
    """A connected tool server, whose calls several threads may make at once.

    Args:
        address: A command that starts the server, or its http:// or https:// URL.
        portal: Runs the event loop of the connection.

    Raises:
        UserError: If the server cannot be started or reached, or does not answer as a tool server.
    """

    def __init__(self, address: str, portal: "BlockingPortal"):
        self.address = address
        self._portal = portal
        self._lock = threading.Lock()  # for a connection that is made again
        self._connect()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. A process gets two seconds to end by itself."""
        # If the connection was lost, closing it raises the cause, which the failed calls have already reported.
        with suppress(ExceptionGroup):
            self._connection.close()

    def ensure(self) -> None:
        """Connect again if the connection was lost.

        Raises:
            UserError: As the constructor.
        """
        with self._lock:
            if self._is_gone:
                self.close()
                self._connect()

    def tools(self) -> list[dict[str, Any]]:
        """Return the tools that the server offers, in OpenAI's function format.

        Raises:
            UserError: If the server does not list them.
        """
        from mcp import MCPError

        schemas: list[dict[str, Any]] = []
        cursor: str | None = None
        while True:
            try:
                page = self._portal.call(partial(self._client.list_tools, cursor=cursor))
            except MCPError as error:
                raise UserError(f"grpo.tools: {self.address} does not list its tools: {error}") from None
            for tool in page.tools:
                function = {
                    "name": tool.name,
                    "description": tool.description or "",
                    "parameters": tool.input_schema,
                }
                schemas.append({"type": "function", "function": function})
            cursor = page.next_cursor
            if not cursor:
                return schemas

    def answer(self, name: str, arguments: "Mapping[str, Any]") -> str:
        """Return the text of a tool's answer; `error: ..` if the tool or the server reports a failure.

        The call has no time limit of its own. The pool of the environments abandons a call that takes too long.

        Raises:
            ServerGone: If the connection is lost.
        """
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED, INVALID_REQUEST

        client = self._client
        try:
            result = self._portal.call(partial(client.call_tool, name, dict(arguments), read_timeout_seconds=math.inf))
        except MCPError as error:
            # A server over HTTP that was started again refuses requests of its former sessions as invalid.
            if error.code in (CONNECTION_CLOSED, INVALID_REQUEST):
                if client is self._client:  # another thread may have connected again
                    self._is_gone = True
                raise ServerGone(f"{self.address}: {error}") from None
            return f"{ERROR_PREFIX}{error}"
        return _text(result)

    def _connect(self) -> None:
        from mcp import Client, MCPError, StdioServerParameters

        server: str | StdioServerParameters = self.address
        if not is_url(self.address):
            # The package starts a server in a session of its own, which the end of this process's group does not
            # reach. The kernel ends it with this process instead, however that ends.
            arguments = ["-P", orphans.__file__, str(os.getpid()), *shlex.split(self.address)]
            server = StdioServerParameters(command=sys.executable, args=arguments, env=dict(os.environ))
        client = Client(server, read_timeout_seconds=START, cache=None)
        self._connection = ExitStack()
        try:
            self._client = self._connection.enter_context(self._portal.wrap_async_context_manager(client))
        except (ExceptionGroup, MCPError, OSError) as error:
            cause: Exception = error
            while isinstance(cause, ExceptionGroup):
                cause = cause.exceptions[0]
            raise UserError(f"grpo.tools: {self.address} does not answer as an MCP server: {cause}") from None
        self._is_gone = False


def _text(result: "CallToolResult") -> str:
    """Return a tool's result as text. A part that is no text is shown by its type, for example "[image]"."""
    texts = []
    for part in result.content:
        if part.type == "text":
            texts.append(part.text)
        else:
            texts.append(f"[{part.type}]")
    text = "\n".join(texts)
    if not texts and result.structured_content is not None:
        text = json.dumps(result.structured_content, ensure_ascii=False)
    return f"{ERROR_PREFIX}{text}" if result.is_error else text


def main() -> None:
    """Print what a server offers, as `grpo.tools[..].schema` reads it: python -m dtrain.rl.environments.mcp SERVER."""
    address = sys.argv[1]
    try:
        find_server(address)
        from anyio.from_thread import start_blocking_portal

        with start_blocking_portal() as portal, ToolServer(address, portal) as server:
            tools = server.tools()
    except UserError as error:
        raise SystemExit(f"dtrain: {error}") from None
    print(json.dumps(tools, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
