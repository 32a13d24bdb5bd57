"""dtrain's client of tools on a real server of the package `mcp`, beside that package's own client."""

import asyncio
import sys
import tempfile
import threading
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.real.common import Checks, need  # noqa: E402

need("mcp", "mcp")

from mcp import ClientSession, StdioServerParameters  # noqa: E402
from mcp.client.stdio import stdio_client  # noqa: E402

from dtrain.rl.environments.mcp import ServerGone, ToolServer  # noqa: E402

SERVER = '''
import os
try:
    from mcp.server import MCPServer
except ImportError:  # before 2.0
    from mcp.server.fastmcp import FastMCP as MCPServer

server = MCPServer("numbers")


@server.tool()
def power(base: int, exponent: int = 2) -> int:
    """Raises a number to a power."""
    return base**exponent


@server.tool()
async def words(text: str) -> list[str]:
    """Splits a text."""
    return text.split()


@server.tool()
def divide(dividend: float, divisor: float) -> float:
    """Divides."""
    return dividend / divisor


@server.tool()
def leave() -> str:
    """Ends the server."""
    os._exit(3)


server.run("stdio")
'''
CALLS = [("power", {"base": 3}), ("power", {"base": 2, "exponent": 10}), ("words", {"text": "añb c \u2028d"})]
WRONG = [("divide", {"dividend": 1, "divisor": 0}), ("power", {"base": "x"}), ("nothing", {})]


async def by_its_own(file: Path) -> tuple[list[dict], list[str]]:
    """Return the tools and the texts of CALLS' answers, as the package's client gets them."""
    parameters = StdioServerParameters(command=sys.executable, args=[str(file)])
    async with stdio_client(parameters) as (reading, writing), ClientSession(reading, writing) as session:
        await session.initialize()
        listed = [tool.model_dump(by_alias=True) for tool in (await session.list_tools()).tools]
        answers = [await session.call_tool(name, arguments) for name, arguments in CALLS]
        return listed, ["\n".join(part.text for part in answer.content) for answer in answers]


def main() -> None:
    checks = Checks()
    print(f"mcp {version('mcp')}")
    with tempfile.TemporaryDirectory() as root:
        file = Path(root, "server.py")
        file.write_text(SERVER)
        listed, texts = asyncio.run(by_its_own(file))
        server = ToolServer(f"{sys.executable} {file}")
        try:
            tools = [tool["function"] for tool in server.tools()]
            expected = [(tool["name"], tool["description"], tool["inputSchema"]) for tool in listed]
            described = [(tool["name"], tool["description"], tool["parameters"]) for tool in tools]
            checks.same("names, descriptions and schemas", described, expected)
            checks.same("answers", [server.answer(*call) for call in CALLS], texts)
            wrong = [server.answer(*call) for call in WRONG]
            checks.holds("mistakes answer an error", all(text.startswith("error: ") for text in wrong), wrong)
            together: list[str] = []
            calls = [
                threading.Thread(target=lambda n=n: together.append(server.answer("power", {"base": n})))
                for n in range(16)
            ]
            for call in calls:
                call.start()
            for call in calls:
                call.join(60)
            checks.same("16 calls at once", sorted(map(int, together)), [n * n for n in range(16)])
            try:
                ended = server.answer("leave", {})
            except ServerGone as error:
                ended = str(error)
            checks.holds("a server that ends is told", "3" in ended, ended)
            server.ensure()
            checks.same("started again", server.answer("power", {"base": 5}), "25")
        finally:
            server.close()
    checks.end()


if __name__ == "__main__":
    main()
