"""Start of an HTTP server: the listening socket, and uvicorn with its settings and logs.

`dtrain serve` and `dtrain report --live` both start here. uvicorn, starlette and httptools belong to the extra `serve`,
and uvicorn is imported only when a server is made, after `check_installed`. No torch.
"""

import importlib.util
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dtrain.base.errors import UserError, describe_error

if TYPE_CHECKING:
    import uvicorn
    from starlette.applications import Starlette

LIBRARIES = ("starlette", "uvicorn", "httptools", "anyio")
BACKLOG = 1024  # connections that wait to be accepted
KEEP_ALIVE_SECONDS = 60  # longer than clients keep an idle connection, so that none sends into a closed one
SHUTDOWN_SECONDS = 5  # time to finish sending responses when the server ends

# Warnings and tracebacks, and one line for each request, all on stderr.
LOGS = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {
        "message": {"format": "%(levelname)s: %(message)s"},
        "access": {
            "()": "uvicorn.logging.AccessFormatter",
            "fmt": '%(asctime)s %(client_addr)s "%(request_line)s" %(status_code)s',
            "use_colors": False,
        },
    },
    "handlers": {
        "message": {"class": "logging.StreamHandler", "formatter": "message"},
        "access": {"class": "logging.StreamHandler", "formatter": "access"},
    },
    "loggers": {
        "uvicorn": {"handlers": ["message"], "level": "WARNING", "propagate": False},
        "uvicorn.access": {"handlers": ["access"], "level": "INFO", "propagate": False},
    },
}


def check_installed(command: str) -> None:
    """Raise UserError if a library of the extra `serve`, which `command` needs, is not installed."""
    missing = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"{command} needs {', '.join(missing)}, not installed here: pip install 'dtrain[serve]'")


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at a numeric address.

    Args:
        host: IPv4 or IPv6 address. `::` also accepts IPv4.
        port: 0 takes a free one.

    Raises:
        UserError: If the address cannot be used, for example because the port is taken.
    """
    is_ipv6 = ":" in host
    family = socket.AF_INET6 if is_ipv6 else socket.AF_INET
    try:
        return socket.create_server(
            (host, port),
            family=family,
            backlog=BACKLOG,
            dualstack_ipv6=is_ipv6 and socket.has_dualstack_ipv6(),
        )
    except (OSError, OverflowError) as error:
        where = f"{host}:{port} ({describe_error(error)})"
        raise UserError(f"cannot listen at {where}; choose another --port, or 0 for a free one") from error


def make_server(
    app: "Starlette", *, access_log: bool = False, logs: Mapping[str, Any] | None = LOGS
) -> "uvicorn.Server":
    """Return a uvicorn server for `app`, to be run on the socket of `listen`.

    Args:
        app: The application.
        access_log: Whether each request is logged.
        logs: Configuration for `logging.config.dictConfig`. None leaves the process's loggers as they are.
    """
    import uvicorn

    config = uvicorn.Config(
        app,
        loop="asyncio",
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None if logs is None else dict(logs),
        access_log=access_log,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
    )
    return uvicorn.Server(config)
