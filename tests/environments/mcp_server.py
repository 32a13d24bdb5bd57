"""A tool server of the package `mcp`, over standard input and output, or over HTTP on a port. Run as a program."""

import os
import sys
import time
from pathlib import Path

from mcp.server import MCPServer
from mcp.server.mcpserver import Image

server = MCPServer("tests", log_level="CRITICAL")


@server.tool()
def say(text: str) -> str:
    """To say."""
    return f"{text}\n{os.getpid()}"


@server.tool()
def power(base: int, exponent: int = 2) -> int:
    """Raise a number to a power."""
    return base**exponent


@server.tool()
async def words(text: str) -> list[str]:
    """Split a text."""
    return text.split()


@server.tool(structured_output=False)
def picture() -> list[str | Image]:
    """Show something."""
    return ["look:", Image(data=b"GIF", format="gif")]


@server.tool()
def end() -> str:
    """End the server."""
    os._exit(3)


@server.tool()
async def wait() -> str:
    """Hang, and hold the event loop, so that the server does not see the end of its input."""
    Path("hangs").touch()
    time.sleep(60)
    return ""


if len(sys.argv) > 1:
    server.run("streamable-http", port=int(sys.argv[1]))
else:
    server.run("stdio")
