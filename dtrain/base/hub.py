"""Models of the Hugging Face hub by their id, `owner/name`: from huggingface_hub's cache, or downloaded into it.

Only weights in safetensors and the small files of a model are downloaded, no code and no pickle. Token, endpoint,
offline mode and the cache's place are huggingface_hub's settings (HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE, HF_HOME).
Torch is not imported, and huggingface_hub only by a function that needs it.

`client_errors` returns the exceptions of the network clients, which have no base class in common.
"""

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

from dtrain.base.errors import UserError
from dtrain.base.model_directory import (
    COMPANIONS,
    CONFIG,
    NESTED_COMPANIONS,
    TOKENIZER_FILE,
    WEIGHTS,
    WEIGHTS_INDEX,
    find_weight_files,
)
from dtrain.base.ranges import directory_hint, plural

# Module of a client -> its error for a server that cannot be reached or a transfer that breaks off.
NETWORK_CLIENTS = {
    "aiohttp": "ClientError",  # https://, and requests of s3fs and gcsfs
    "botocore.exceptions": "BotoCoreError",  # s3://
    "google.auth.exceptions": "GoogleAuthError",  # gs://
    "gcsfs.retry": "HttpError",
    "httpx2": "TransportError",  # huggingface_hub 2
    "httpx": "TransportError",  # huggingface_hub 1
}

SHARDS = "model-*.safetensors"
MAX_FILES_NAMED = 8  # missing files in a message
SMALL_FILES = [CONFIG, *COMPANIONS, *NESTED_COMPANIONS]
DOWNLOADED_FILES = [*SMALL_FILES, WEIGHTS, SHARDS, WEIGHTS_INDEX]
_SNAPSHOT = re.compile(r"models--([A-Za-z0-9][\w.-]*)--([\w.-]+)")
_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_model_id(path: str) -> bool:
    """Return whether `path` reads as a model's id on the hub. A directory of that name comes first, and beside a
    run's directory no id is looked for."""
    is_one = _ID.fullmatch(path) is not None and not Path(path).exists()
    return is_one and not any(Path(path).parent.glob("*/config.yaml"))


def cached_model_id(directory: Path) -> str | None:
    """Return the id of the model whose directory in the cache this is; None for another directory."""
    repository = directory.absolute().parent.parent
    match = _SNAPSHOT.fullmatch(repository.name) if directory.absolute().parent.name == "snapshots" else None
    return f"{match[1]}/{match[2]}" if match else None


def find_model_directory(path: Path) -> Path:
    """Return `path` where it is a directory, else the cached directory of the model whose id it is. No network.
    Raises UserError."""
    if path.is_dir():
        return path
    name = str(path)
    if (has_id := is_model_id(name)) and (directory := cached_model_directory(name)) is not None:
        return directory
    if has_id and (missing := missing_files(name)):
        raise UserError(incomplete_download_message(name, missing, f"dtrain download {name}"))
    fetched = f"; a model of the Hugging Face hub is fetched first: `dtrain download {name}`"
    takes = "give a model's directory, an adapter's, a run's or a step's"
    raise UserError(f"{name}: no such directory; {takes}{fetched if has_id else directory_hint(name)}")


def cached_model_directory(name: str, *, weights: bool = True) -> Path | None:
    """Return the directory of model `name` in the cache; None where it is not there whole. No network.

    weights: without them the directory is not whole.
    """
    directory = cached_snapshot(name)
    if directory is None or missing_files(name, weights=weights) or not _is_whole(directory, weights):
        return None
    return directory


def missing_files(name: str, *, weights: bool = True) -> list[str]:
    """Return the files that an interrupted download of model `name` did not reach. No network.

    They are known from the hub's listing, which huggingface_hub keeps beside a snapshot, or from the index of the
    weights. Only files without which a model cannot be read are named.

    Args:
        name: The model's id.
        weights: Whether the weights are needed.

    Returns:
        The names, sorted. Empty if nothing of the model is in the cache, or nothing is known to be missing.
    """
    directory = cached_snapshot(name)
    if directory is None:
        return []
    listed = cached_listing(name, "model", directory.name)
    needed = [path for path in listed if path in (CONFIG, TOKENIZER_FILE)]
    if weights and not _has_weights(directory):
        needed += [
            path for path in listed if any(fnmatchcase(path, pattern) for pattern in (WEIGHTS, SHARDS, WEIGHTS_INDEX))
        ]
        with suppress(UserError):  # a damaged index is reported where the weights are read
            needed += find_weight_files(directory) or ()
    return sorted({path for path in needed if not (directory / path).is_file()})


def incomplete_download_message(name: str, missing: Sequence[str], command: str) -> str:
    """Return the message for a model or dataset whose download was interrupted.

    Args:
        name: Its id.
        missing: The files that are missing, at least one.
        command: The command that finishes the download.
    """
    shown = ", ".join(missing[:MAX_FILES_NAMED]) + (", .." if len(missing) > MAX_FILES_NAMED else "")
    count = f"{len(missing)} {plural(len(missing), 'file')} {'is' if len(missing) == 1 else 'are'} missing"
    return (
        f"{name}: its download into the hub's cache on this machine is incomplete: {count} ({shown}). Run `{command}` "
        "where there is a network: it downloads only these"
    )


def cached_listing(name: str, kind: str, commit: str) -> list[str]:
    """Return every path of a repository at `commit`, as huggingface_hub caches them; [] if it has no listing.

    Args:
        name: The repository's id.
        kind: model, or dataset.
        commit: The name of the snapshot's directory.
    """
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        return [entry.path for entry in get_cached_repo_tree(name, repo_type=kind, revision=commit)]
    except CachedRepoTreeNotFoundError:
        return []


def cached_snapshot(
    name: str, kind: str = "model", revision: str | None = None, needed: Sequence[str] = ()
) -> Path | None:
    """Return the directory of a repository in the cache, which may be incomplete. No network.

    Args:
        name: The repository's id.
        kind: model, or dataset.
        revision: A branch, a tag or a commit; None for the main branch.
        needed: Files that must be in the directory if the repository has them.

    Returns:
        The directory; None if no download of the repository began, or a needed file is missing.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    patterns = list(needed)  # without patterns, the library takes any missing file for an incomplete download
    try:
        directory = snapshot_download(
            name, repo_type=kind, revision=revision, allow_patterns=patterns, local_files_only=True
        )
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    return Path(directory)


def _is_whole(directory: Path, weights: bool) -> bool:
    return (directory / CONFIG).is_file() and (not weights or _has_weights(directory))


def download_model(name: str, *, weights: bool = True, key: str = "model.path") -> Path:
    """Download what the cache does not hold of model `name`, and return its directory there. Raises UserError that
    says what to do where the hub does not give it. Several processes may ask at once: the library locks each file.
    key: that names the model."""
    from huggingface_hub import snapshot_download

    patterns = DOWNLOADED_FILES if weights else SMALL_FILES
    command = f"dtrain download {name}"
    with hub_errors(name, "model", command, f"{key} to a directory", partial(missing_files, name, weights=weights)):
        directory = Path(snapshot_download(name, allow_patterns=patterns))
    # Without a network the library returns a snapshot for which it keeps no listing as it is.
    if missing := missing_files(name, weights=weights):
        raise UserError(incomplete_download_message(name, missing, command))
    _refuse_unfit(name, (directory / CONFIG).is_file(), not weights or _has_weights(directory))
    return directory


def look_up_model(name: str, key: str = "model.path") -> tuple[Path, int]:
    """Download the small files of model `name`; return its directory in the cache and the bytes of the weights that
    `download_model` would fetch beside them. Raises UserError as `download_model` does."""
    from huggingface_hub import HfApi

    directory = download_model(name, weights=False, key=key)
    with hub_errors(name, "model", f"dtrain download {name}", f"{key} to a directory"):
        listed = HfApi().list_repo_tree(name, revision=directory.name)
        sizes = {entry.path: getattr(entry, "size", 0) for entry in listed}
    _refuse_unfit(name, True, WEIGHTS in sizes or WEIGHTS_INDEX in sizes)
    weights = [path for path in sizes if any(fnmatchcase(path, pattern) for pattern in (WEIGHTS, SHARDS))]
    return directory, sum(sizes[path] for path in weights)


def _refuse_unfit(name: str, has_config: bool, has_weights: bool) -> None:
    if not has_config or not has_weights:
        lacking = "weights in safetensors" if has_config else CONFIG
        raise UserError(f"{name} has no {lacking} on the hub: dtrain cannot train it")


@contextmanager
def hub_errors(
    name: str, kind: str, command: str, otherwise: str, missing: Callable[[], Sequence[str]] = list
) -> Iterator[None]:
    """Raise what the library raises in the block as a UserError that says what to do.

    Args:
        name: The id of a repository on the hub.
        kind: model, or dataset.
        command: What fetches it elsewhere.
        otherwise: What else to set.
        missing: Returns the files that an interrupted download did not reach. Called if the hub cannot be reached.
    """
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    path = {"model": name, "dataset": f"datasets/{name}"}[kind]
    here = {"model": "directory", "dataset": "file"}[kind]
    try:
        yield
    except GatedRepoError as error:
        raise UserError(
            f"{name} is gated: its owner wants your agreement. Log in at https://huggingface.co/{path} and accept, "
            "then run `hf auth login`, or set HF_TOKEN to a token of that account"
        ) from error
    except RevisionNotFoundError as error:
        raise UserError(f"{name} has no such revision on the hub: give a branch, a tag or a commit of it") from error
    except RepositoryNotFoundError as error:
        raise UserError(
            f"there is no {here} {name} here, and the hub has no such {kind}, or it is private and no token, or the "
            "wrong one, was sent: check the name, or run `hf auth login`, or set HF_TOKEN"
        ) from error
    except client_errors(LocalEntryNotFoundError) as error:
        if names := missing():
            raise UserError(incomplete_download_message(name, names, command)) from error
        raise UserError(
            f"{name} is no {here} here and not in the hub's cache on this machine, and the hub cannot be reached "
            f"(no network, or HF_HUB_OFFLINE=1): run `{command}` where there is a network, or set {otherwise}"
        ) from error
    except HfHubHTTPError as error:
        raise UserError(f"{name}: the hub answered with an error: {str(error).strip().splitlines()[0]}") from error
    except OSError as error:
        raise UserError(f"{name} could not be downloaded: {error}") from error


def _has_weights(directory: Path) -> bool:
    try:
        return all((directory / name).is_file() for name in find_weight_files(directory) or [WEIGHTS])
    except UserError:  # told of where the weights are read
        return False


def client_errors(*others: type[Exception]) -> tuple[type[Exception], ...]:
    """Return `others` and the error classes of the network clients that this process has loaded, for `except`.

    The clients are optional, and the one that huggingface_hub uses depends on its version. A client that is not loaded
    cannot have raised an error, so nothing is imported.
    """
    loaded = [getattr(sys.modules[module], name) for module, name in NETWORK_CLIENTS.items() if module in sys.modules]
    return (*others, *loaded)
