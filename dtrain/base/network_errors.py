"""Errors of network clients, which have no base class in common."""

import sys

# Module of a client -> its error for a server that cannot be reached or a transfer that breaks off.
CLIENTS = {
    "aiohttp": "ClientError",  # https://, and requests of s3fs and gcsfs
    "botocore.exceptions": "BotoCoreError",  # s3://
    "google.auth.exceptions": "GoogleAuthError",  # gs://
    "gcsfs.retry": "HttpError",
    "httpx2": "TransportError",  # huggingface_hub 2
    "httpx": "TransportError",  # huggingface_hub 1
}


def client_errors(*others: type[Exception]) -> tuple[type[Exception], ...]:
    """Return `others` and the error classes of the network clients that this process has loaded, for `except`.

    The clients are optional, and the one that huggingface_hub uses depends on its version. A client that is not loaded
    cannot have raised an error, so nothing is imported.
    """
    loaded = [getattr(sys.modules[module], name) for module, name in CLIENTS.items() if module in sys.modules]
    return (*others, *loaded)
