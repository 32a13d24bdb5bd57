"""The start and the end of `dtrain serve`: from its arguments to a running server, and its answer to signals.

uvicorn runs on one thread, the engine on another, and the main thread waits for signals. A signal first lets the engine
finish what is under way, while uvicorn refuses new requests with 503. Then uvicorn shuts down, once all answers are
sent.
"""

import queue
import signal
import socket
import threading
from argparse import Namespace
from collections.abc import Callable
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

from dtrain.base.errors import Stopped, UserError
from dtrain.base.model_directory import CONFIG
from dtrain.commands.serve.app import make_app
from dtrain.commands.serve.classify import Classifier, ClassifyService, label_names
from dtrain.commands.serve.protocol import ApiError, Parser
from dtrain.commands.serve.routes import Service
from dtrain.commands.serve.updates import Updates
from dtrain.commands.serve.worker import EngineThread
from dtrain.commands.web import listen, make_server
from dtrain.data.formats.pairs import PairEncoder
from dtrain.inference.engine import Engine
from dtrain.inference.generate import choose_device, choose_dtype, image_problem, load
from dtrain.rl.remote.http_client import read_api_key
from dtrain.rl.remote.publish import newest_complete_step, read_marker

WATCH_SECONDS = 1.0  # between looks at a shared directory, and at whether both threads are alive


def serve(
    sock: socket.socket,
    service: Service | ClassifyService,
    *,
    grace: float,
    watch: Path | None = None,
    access_log: bool = True,
    say: Callable[[str], None] = print,
) -> None:
    """Serve until SIGTERM or Ctrl-C. Must be called on the main thread.

    Args:
        sock: The socket that listens.
        service: The routes. Its worker is started here.
        grace: Seconds to finish what is under way after a signal. The rest is refused. A second signal ends at once.
        watch: Shared directory whose newest complete step-N is read as it appears.
        access_log: Whether each request is logged.
        say: Prints a line.

    Raises:
        Stopped: After a signal.
        UserError: If the engine or the HTTP server failed.
    """
    worker, updates = service.worker, service.updates
    signals: queue.SimpleQueue[int] = queue.SimpleQueue()
    numbers = signal.SIGTERM, signal.SIGINT
    kept = {number: signal.signal(number, lambda signum, frame: signals.put(signum)) for number in numbers}
    server = make_server(make_app(service), access_log=access_log)
    worker.start()
    # uvicorn leaves signals alone if it does not run on the main thread.
    http = threading.Thread(target=server.run, args=([sock],), name="http", daemon=True)
    http.start()
    follower = None if watch is None or updates is None else DirectoryWatcher(watch, updates, say)
    signum = None
    try:
        while signum is None and worker.failure is None and http.is_alive():
            with suppress(queue.Empty):
                signum = signals.get(timeout=WATCH_SECONDS)
            if follower is not None and signum is None:
                follower.look()
        finished = worker.end(grace, hurry=lambda: not signals.empty())
        server.should_exit = True
        http.join()
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
    if signum is None:
        raise UserError(worker.failure or "the HTTP server has failed; the lines above say why")
    rest = "every completion under way was answered" if finished else "completions under way were refused"
    raise Stopped(signum, f"the server has ended; {rest}")


class DirectoryWatcher:
    """DirectoryWatcher of a shared directory: reads its newest whole step-N, each one once."""

    def __init__(self, shared: Path, updates: Updates, say: Callable[[str], None]):
        self.shared, self.updates, self.say = shared, updates, say
        self._seen: tuple[int, str] | None = None

    def look(self) -> None:
        latest = newest_complete_step(self.shared)
        if latest is None:
            return
        version, directory = latest
        with suppress(FileNotFoundError):  # it was pruned just now
            seen = version, read_marker(directory)
            if self._seen == seen:
                return
            self._seen = seen
            try:
                self.updates.load(directory, version)
                self.say(f"version {version} of the weights, from {directory}")
            except (UserError, ApiError) as error:
                self.say(f"{directory} is left alone: {error}")


def serve_directory(arguments: Namespace, say: Callable[[str], None] = print) -> None:
    """Serve a directory's model (as `dtrain generate` takes it) until a signal; see `server.serve`, which raises.

    arguments: the command's. Raises UserError.
    """
    key = read_api_key(arguments.api_key_file)
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
    if model.config.num_labels is not None:
        _refuse_unread(arguments)
        pairs = PairEncoder(tokenizer, template, max_length=length)
        names = label_names(tokenizer.directory / CONFIG, model.config.num_labels)
        service = ClassifyService(Classifier(model), pairs, name, names, key, hosts)
        what, beside = f"{name}, {len(names)} output{'s' if len(names) > 1 else ''}", ""
        path, body = "/classify", '{"input": "Hello"}'
    else:
        engine = Engine(
            model,
            decode=loaded.decode,
            max_rows=arguments.max_rows,
            max_tokens=arguments.max_tokens,
            records_routing=model.routing is not None,
        )
        worker = EngineThread(engine)
        chats = loaded.chats(template, length, arguments.directory)
        parser = Parser(chats, name, length)
        updates = Updates(model, worker, arguments.control, watched=arguments.watch is not None)
        service = Service(parser, worker, updates, key, hosts)
        if arguments.adapter is not None:
            service.adapters.load_at_start(*arguments.adapter)
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
