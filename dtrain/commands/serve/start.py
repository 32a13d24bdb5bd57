"""The start and the end of `dtrain serve`: from its arguments to a running server, and its response to signals.

uvicorn runs on one thread, the engine on another, and the main thread waits for signals. After a signal the engine
first finishes the running requests, while uvicorn refuses new ones with status 503. Then uvicorn shuts down, once all
responses are sent.
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
from typing import NamedTuple

from dtrain.base.errors import Stopped, UserError
from dtrain.base.model_directory import CONFIG
from dtrain.base.ranges import plural
from dtrain.commands.serve.app import make_app
from dtrain.commands.serve.classify import Classifier, ClassifyService, label_names
from dtrain.commands.serve.protocol import ApiError, Parser
from dtrain.commands.serve.routes import Service
from dtrain.commands.serve.updates import Updates
from dtrain.commands.serve.worker import EngineThread
from dtrain.commands.web import listen, make_server
from dtrain.data.formats.pairs import PairEncoder
from dtrain.inference.engine import Engine
from dtrain.inference.generate import LoadedModel, choose_device, choose_dtype, image_problem, load
from dtrain.rl.remote.http_client import read_api_key
from dtrain.rl.remote.publish import newest_complete_step, read_marker

WATCH_SECONDS = 1.0  # time between checks of a watched directory, and of whether both threads are alive


def serve(
    sock: socket.socket,
    service: Service | ClassifyService,
    *,
    grace: float,
    watch: Path | None = None,
    access_log: bool = True,
    print_line: Callable[[str], None] = print,
) -> None:
    """Serve until SIGTERM or Ctrl-C. Must be called on the main thread.

    Args:
        sock: The listening socket.
        service: The routes. Its worker is started here.
        grace: Seconds to finish running requests after a signal. The rest is refused. A second signal ends at once.
        watch: Directory whose newest complete step-N is loaded when it appears.
        access_log: Whether each request is logged.
        print_line: Prints a line.

    Raises:
        Stopped: After a signal.
        UserError: If the engine or the HTTP server failed.
    """
    worker, updates = service.worker, service.updates
    signals: queue.SimpleQueue[int] = queue.SimpleQueue()
    previous_handlers = {}
    for number in (signal.SIGTERM, signal.SIGINT):
        previous_handlers[number] = signal.signal(number, lambda signum, frame: signals.put(signum))
    server = make_server(make_app(service), access_log=access_log)
    worker.start()
    # uvicorn leaves signals alone if it does not run on the main thread.
    http = threading.Thread(target=server.run, args=([sock],), name="http", daemon=True)
    http.start()
    watcher = None
    if watch is not None and updates is not None:
        watcher = DirectoryWatcher(watch, updates, print_line)
    signum = None
    try:
        while signum is None and worker.failure is None and http.is_alive():
            with suppress(queue.Empty):
                signum = signals.get(timeout=WATCH_SECONDS)
            if watcher is not None and signum is None:
                watcher.look()
        finished = worker.end(grace, hurry=lambda: not signals.empty())
        server.should_exit = True
        http.join()
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)
    if signum is None:
        raise UserError(worker.failure or "the HTTP server has failed; the lines above say why")
    outcome = "all running requests were finished" if finished else "requests that had not finished were refused"
    raise Stopped(signum, f"the server has ended; {outcome}")


class DirectoryWatcher:
    """Loads the newest complete step-N of a directory when it appears, each one once.

    Args:
        shared: The directory.
        updates: Loads weights into the model.
        print_line: Prints a line.
    """

    def __init__(self, shared: Path, updates: Updates, print_line: Callable[[str], None]):
        self.shared, self.updates, self.print_line = shared, updates, print_line
        self._seen: tuple[int, str] | None = None

    def look(self) -> None:
        """Load the newest step if it is new."""
        latest = newest_complete_step(self.shared)
        if latest is None:
            return
        version, directory = latest
        with suppress(FileNotFoundError):  # it was deleted meanwhile
            seen = version, read_marker(directory)
            if self._seen == seen:
                return
            self._seen = seen
            try:
                self.updates.load(directory, version)
                self.print_line(f"loaded version {version} of the weights from {directory}")
            except (UserError, ApiError) as error:
                self.print_line(f"{directory} is not loaded: {error}")


class _Prepared(NamedTuple):
    """A service that is ready to start, with texts for the line that announces it.

    Attributes:
        service: The service.
        what: Name of the model and what it returns.
        adapters: Its adapters, or "".
        path: Path of an example request.
        body: Body of the example request.
    """

    service: Service | ClassifyService
    what: str
    adapters: str
    path: str
    body: str


def serve_directory(arguments: Namespace, print_line: Callable[[str], None] = print) -> None:
    """Serve the model of a directory until a signal.

    Args:
        arguments: Arguments of the command.
        print_line: Prints a line.

    Raises:
        Stopped: After a signal.
        UserError: If the model cannot be served.
    """
    key = read_api_key(arguments.api_key_file)
    if arguments.control is not None and key is None:
        raise UserError("--control lets clients change the model: also give --api-key-file FILE, a file with their key")
    host = _address(arguments.host, arguments.port, key)
    device = choose_device(arguments.device)
    dtype = choose_dtype(arguments.dtype, device)
    has_images = image_problem(arguments.directory) is None
    loaded = load(arguments.directory, dtype, device, classifiers=True, vision=has_images)
    model, _ = loaded
    model.eval()
    max_positions = model.config.max_position_embeddings
    if arguments.max_length is not None and arguments.max_length > max_positions:
        raise UserError(
            f"--max-length {arguments.max_length} is more than the {max_positions} positions of the model's context"
        )
    hosts = {"localhost", "127.0.0.1", "[::1]", arguments.host.lower(), host}
    if model.config.num_labels is not None:
        prepared = _prepare_classifier(arguments, loaded, key, hosts)
    else:
        prepared = _prepare_language_model(arguments, loaded, key, hosts)
    sock = listen(host, arguments.port)
    host_in_url = f"[{arguments.host}]" if ":" in arguments.host else arguments.host
    url = f"http://{host_in_url}:{sock.getsockname()[1]}"
    dtype_name = str(dtype).removeprefix("torch.")
    print_line(f"serving {prepared.what} at {url} ({dtype_name} on {device}{prepared.adapters})")
    if key is None:
        print_line(f"  curl {url}{prepared.path} -H 'Content-Type: application/json' -d '{prepared.body}'")
    serve(
        sock,
        prepared.service,
        grace=arguments.grace,
        watch=arguments.watch,
        access_log=arguments.access_log,
        print_line=print_line,
    )


def _prepare_classifier(arguments: Namespace, loaded: LoadedModel, key: str | None, hosts: set[str]) -> _Prepared:
    model, tokenizer = loaded
    _check_classifier_options(arguments)
    template = loaded.template(arguments.chat_template)
    length = arguments.max_length or model.config.max_position_embeddings
    name = arguments.name or str(arguments.directory)
    encoder = PairEncoder(tokenizer, template, max_length=length)
    assert model.config.num_labels is not None
    names = label_names(tokenizer.directory / CONFIG, model.config.num_labels)
    service = ClassifyService(Classifier(model), encoder, name, names, key, hosts)
    what = f"{name}, {len(names)} {plural(len(names), 'output')}"
    return _Prepared(service, what, "", "/classify", '{"input": "Hello"}')


def _prepare_language_model(arguments: Namespace, loaded: LoadedModel, key: str | None, hosts: set[str]) -> _Prepared:
    model, _ = loaded
    template = loaded.template(arguments.chat_template)
    length = arguments.max_length or model.config.max_position_embeddings
    name = arguments.name or str(arguments.directory)
    engine = Engine(
        model,
        decode=loaded.decode,
        max_rows=arguments.max_rows,
        max_tokens=arguments.max_tokens,
        records_routing=model.routing is not None,
    )
    worker = EngineThread(engine)
    parser = Parser(loaded.chats(template, length, arguments.directory), name, length)
    updates = Updates(model, worker, arguments.control, watched=arguments.watch is not None)
    service = Service(parser, worker, updates, key, hosts)
    if arguments.adapter is not None:
        service.adapters.load_at_start(*arguments.adapter)
    adapters = "".join(f", with its adapter {adapter}" for adapter in parser.adapters)
    if template is None:
        return _Prepared(service, name, adapters, "/v1/completions", '{"prompt": "Hello"}')
    body = '{"messages": [{"role": "user", "content": "Hello"}]}'
    return _Prepared(service, name, adapters, "/v1/chat/completions", body)


def _check_classifier_options(arguments: Namespace) -> None:
    """Raise UserError for options that a classifier does not have."""
    options = ("control", "watch", "adapter", "max_rows", "max_tokens")
    given = [f"--{key.replace('_', '-')}" for key in options if getattr(arguments, key) is not None]
    if given:
        raise UserError(
            f"{arguments.directory} is a classifier or reward model, and {', '.join(given)} is for language models: "
            "leave it out"
        )


def _address(host: str, port: int, key: str | None) -> str:
    """Return the numeric address of `host`. Raises UserError if other machines could connect without a key."""
    if port > 65535:
        raise UserError(f"--port {port} is larger than 65535, the largest port")
    try:
        address = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, ValueError) as error:
        raise UserError(f"--host {host}, --port {port}: there is no such address ({error})") from error
    if key is None and not ip_address(address).is_loopback:
        raise UserError(
            f"--host {host} lets other machines connect: give --api-key-file FILE, a file with the key that they must "
            "send, or leave --host out to serve this machine only"
        )
    return address
