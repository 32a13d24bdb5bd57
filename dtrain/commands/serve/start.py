"""The start of `dtrain serve`: from its arguments to a running server."""

import socket
from argparse import Namespace
from collections.abc import Callable
from ipaddress import ip_address

from dtrain.base.errors import UserError
from dtrain.base.model_directory import CONFIG
from dtrain.commands.serve.classify import Classifier, ClassifyService, names_of
from dtrain.commands.serve.protocol import Parser
from dtrain.commands.serve.routes import Service
from dtrain.commands.serve.server import serve
from dtrain.commands.serve.updates import Updates
from dtrain.commands.serve.worker import EngineThread
from dtrain.commands.web import listen
from dtrain.data.formats.pairs import PairEncoder
from dtrain.inference.engine import Engine
from dtrain.inference.generate import choose_device, choose_dtype, image_problem, load
from dtrain.rl.remote.http_client import read_key


def serve_directory(arguments: Namespace, say: Callable[[str], None] = print) -> None:
    """Serve a directory's model (as `dtrain generate` takes it) until a signal; see `server.serve`, which raises.

    arguments: the command's. Raises UserError.
    """
    key = read_key(arguments.api_key_file)
    if arguments.control is not None and key is None:
        raise UserError("--control lets clients change the model: give --api-key-file FILE too, a file with their key")
    host = _address(arguments.host, arguments.port, key)
    device = choose_device(arguments.device)
    dtype = choose_dtype(arguments.dtype, device)
    sees = image_problem(arguments.directory) is None
    loaded = load(arguments.directory, dtype, device, classifiers=True, vision=sees)
    model, tokenizer = loaded
    model.eval()
    most = model.config.max_position_embeddings
    if arguments.max_length is not None and arguments.max_length > most:
        raise UserError(f"--max-length {arguments.max_length}: the model was built for {most} positions")
    template = loaded.template(arguments.chat_template)
    length = arguments.max_length or most
    name = arguments.name or str(arguments.directory)
    hosts = {"localhost", "127.0.0.1", "[::1]", arguments.host.lower(), host}
    service: Service | ClassifyService
    if model.config.labels is not None:
        _refuse_unread(arguments)
        pairs = PairEncoder(tokenizer, template, max_length=length)
        names = names_of(tokenizer.directory / CONFIG, model.config.labels)
        service = ClassifyService(Classifier(model), pairs, name, names, key, hosts)
        what, beside = f"{name}, {len(names)} output{'s' if len(names) > 1 else ''}", ""
        path, body = "/classify", '{"input": "Hello"}'
    else:
        engine = Engine(
            model,
            decode=loaded.decode,
            max_rows=arguments.max_rows,
            max_tokens=arguments.max_tokens,
            notes_experts=model.routing is not None,
        )
        worker = EngineThread(engine)
        chats = loaded.chats(template, length, arguments.directory)
        parser = Parser(chats, name, length)
        updates = Updates(model, worker, arguments.control, watched=arguments.watch is not None)
        service = Service(parser, worker, updates, key, hosts)
        if arguments.adapter is not None:
            service.adapters.begin_with(*arguments.adapter)
        what, beside = name, "".join(f", with its adapter {adapter}" for adapter in parser.adapters)
        path, body = "/v1/completions", '{"prompt": "Hello"}'
        if template is not None:
            path, body = "/v1/chat/completions", '{"messages": [{"role": "user", "content": "Hello"}]}'
    sock = listen(host, arguments.port)
    shown = f"[{arguments.host}]" if ":" in arguments.host else arguments.host
    url = f"http://{shown}:{sock.getsockname()[1]}"
    say(f"serving {what} at {url} ({str(dtype).removeprefix('torch.')} on {device}{beside})")
    if key is None:
        say(f"  curl {url}{path} -H 'Content-Type: application/json' -d '{body}'")
    serve(sock, service, grace=arguments.grace, watch=arguments.watch, access_log=arguments.access_log, say=say)


def _refuse_unread(arguments: Namespace) -> None:
    """Raise UserError for options that a classifier does not have."""
    options = ("control", "watch", "adapter", "max_rows", "max_tokens")
    named = [f"--{key.replace('_', '-')}" for key in options if getattr(arguments, key) is not None]
    if named:
        raise UserError(
            f"{arguments.directory} rates or classifies texts, and {', '.join(named)} is for models that write"
        )


def _address(host: str, port: int, key: str | None) -> str:
    """Return the numeric address of `host`. Raises UserError if other machines could connect without a key."""
    if port > 65535:
        raise UserError(f"--port {port}: ports end at 65535")
    try:
        address = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, ValueError) as error:
        raise UserError(f"--host {host}, --port {port}: there is no such address ({error})") from error
    if key is None and not ip_address(address).is_loopback:
        raise UserError(
            f"--host {host} lets other machines in: give --api-key-file FILE, a file with the key that they must send, "
            "or leave --host out to serve this machine alone"
        )
    return address
