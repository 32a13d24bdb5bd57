"""From what was typed after `dtrain serve` to a server that runs."""

import socket
from collections.abc import Callable
from ipaddress import ip_address
from pathlib import Path

from dtrain.data.prompts import PromptEncoder, PromptOptions
from dtrain.data.template import choose_template
from dtrain.errors import UserError
from dtrain.remote.http import read_key
from dtrain.rollout.engine import Engine
from dtrain.rollout.generate import choose_device, choose_dtype, load
from dtrain.serve.protocol import Parser
from dtrain.serve.routes import Service
from dtrain.serve.server import HttpServer, serve
from dtrain.serve.updates import Updates
from dtrain.serve.worker import EngineThread


def serve_directory(
    directory: Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    device: str = "auto",
    dtype: str = "auto",
    max_rows: int | None = None,
    max_tokens: int | None = None,
    max_length: int | None = None,
    name: str | None = None,
    chat_template: str | None = None,
    api_key_file: Path | None = None,
    control: Path | None = None,
    watch: Path | None = None,
    grace: float = 30.0,
    say: Callable[[str], None] = print,
) -> None:
    """Serve the model of `directory` (as `dtrain generate` takes it) until a signal; see `server.serve`, which raises.

    max_rows, max_tokens: the engine's. max_length: prompt and completion together, at most what the model was built
    for. name: what clients call the model (default: `directory` as given). chat_template: a file, in place of the
    model's own. api_key_file: the key that clients must send; without one only this machine is served. control:
    clients with the key may pause the server and give it weights, by broadcast or from directories below this one.
    Raises UserError.
    """
    key = read_key(api_key_file)
    if control is not None and key is None:
        raise UserError("--control lets clients change the model: give --api-key-file FILE too, a file with their key")
    address = _address(host, port, key)
    torch_device = choose_device(device)
    torch_dtype = choose_dtype(dtype, torch_device)
    model, tokenizer = load(Path(directory), torch_dtype, torch_device)
    model.eval()
    most = model.config.max_position_embeddings
    if max_length is not None and max_length > most:
        raise UserError(f"--max-length {max_length}: the model was built for {most} positions")
    template = choose_template(tokenizer.directory, tokenizer.special_tokens, chat_template)
    length = max_length or most
    encoder = PromptEncoder(tokenizer, template, max_length=length, options=PromptOptions(length))

    def decode(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=True)

    worker = EngineThread(Engine(model, decode=decode, max_rows=max_rows, max_tokens=max_tokens))
    parser = Parser(encoder, name or str(directory), length)
    hosts = {"localhost", "127.0.0.1", "[::1]", host.lower(), address[0]}
    service = Service(parser, worker, Updates(model, worker, control), key, hosts)
    try:
        server = HttpServer(address, service)
    except OSError as error:
        raise UserError(
            f"cannot listen at {host}:{port} ({error.strerror or error}); choose another --port, or 0 for a free one"
        ) from error
    kind = str(torch_dtype).removeprefix("torch.")
    shown = f"[{host}]" if ":" in host else host
    say(f"serving {name or directory} at http://{shown}:{server.server_port} ({kind} on {torch_device})")
    serve(server, grace=grace, watch=watch, say=say)


def _address(host: str, port: int, key: str | None) -> tuple:
    """Where to listen. Raises UserError where others than this machine could come without a key."""
    if port > 65535:
        raise UserError(f"--port {port}: ports end at 65535")
    try:
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4]
    except (OSError, ValueError) as error:
        raise UserError(f"--host {host}, --port {port}: there is no such address ({error})") from error
    if key is None and not ip_address(address[0]).is_loopback:
        raise UserError(
            f"--host {host} lets other machines in: give --api-key-file FILE, a file with the key that they must send, "
            "or leave --host out to serve this machine alone"
        )
    return address
