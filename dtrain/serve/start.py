"""From what was typed after `dtrain serve` to a server that runs."""

import socket
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from ipaddress import ip_address

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


def _ask(url: str, chats: bool) -> str:
    """A command that asks the server something."""
    path = "chat/completions" if chats else "completions"
    body = '{"messages": [{"role": "user", "content": "Hello"}]}' if chats else '{"prompt": "Hello"}'
    return f"  curl {url}/v1/{path} -H 'Content-Type: application/json' -d '{body}'"


def serve_directory(asked: Namespace, say: Callable[[str], None] = print) -> None:
    """Serve a directory's model (as `dtrain generate` takes it) until a signal; see `server.serve`, which raises.

    asked: the command's arguments. Raises UserError.
    """
    key = read_key(asked.api_key_file)
    if asked.control is not None and key is None:
        raise UserError("--control lets clients change the model: give --api-key-file FILE too, a file with their key")
    address = _address(asked.host, asked.port, key)
    device = choose_device(asked.device)
    dtype = choose_dtype(asked.dtype, device)
    model, tokenizer = load(asked.directory, dtype, device)
    model.eval()
    most = model.config.max_position_embeddings
    if asked.max_length is not None and asked.max_length > most:
        raise UserError(f"--max-length {asked.max_length}: the model was built for {most} positions")
    template = choose_template(tokenizer.directory, tokenizer.special_tokens, asked.chat_template)
    length = asked.max_length or most
    encoder = PromptEncoder(tokenizer, template, max_length=length, options=PromptOptions(length))
    decode = partial(tokenizer.decode, skip_special_tokens=True)
    worker = EngineThread(Engine(model, decode=decode, max_rows=asked.max_rows, max_tokens=asked.max_tokens))
    parser = Parser(encoder, asked.name or str(asked.directory), length)
    hosts = {"localhost", "127.0.0.1", "[::1]", asked.host.lower(), address[0]}
    updates = Updates(model, worker, asked.control, watched=asked.watch is not None)
    service = Service(parser, worker, updates, key, hosts)
    if asked.adapter is not None:
        service.adapters.begin_with(*asked.adapter)
    try:
        server = HttpServer(address, service)
    except OSError as error:
        raise UserError(
            f"cannot listen at {asked.host}:{asked.port} ({error.strerror or error}); choose another --port, or 0 for "
            "a free one"
        ) from error
    kind = str(dtype).removeprefix("torch.")
    shown = f"[{asked.host}]" if ":" in asked.host else asked.host
    beside = "".join(f", with its adapter {name}" for name in parser.adapters)
    say(f"serving {parser.model} at http://{shown}:{server.server_port} ({kind} on {device}{beside})")
    if key is None:
        say(_ask(f"http://{shown}:{server.server_port}", template is not None))
    serve(server, grace=asked.grace, watch=asked.watch, say=say)


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
