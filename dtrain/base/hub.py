"""Models of the Hugging Face hub by their id, `owner/name`: from huggingface_hub's cache, or downloaded into it.

Only weights in safetensors and the small files of a model are downloaded, no code and no pickle. Token, endpoint,
offline mode and cache directory are huggingface_hub's settings (HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE, HF_HOME).
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
from dtrain.base.ranges import directory_hint

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
MAX_FILES_NAMED = 8  # of the missing files, in a message
SMALL_FILES = [CONFIG, *COMPANIONS, *NESTED_COMPANIONS]
DOWNLOADED_FILES = [*SMALL_FILES, WEIGHTS, SHARDS, WEIGHTS_INDEX]
_SNAPSHOT = re.compile(r"models--([A-Za-z0-9][\w.-]*)--([\w.-]+)")
_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_model_id(path: str) -> bool:
    """Check whether a path is the id of a model on the hub, `owner/name`.

    An existing path is no id. A path in a directory that contains runs is no id either: `runs/typo` is then a mistyped
    name of a run.
    """
    if _ID.fullmatch(path) is None or Path(path).exists():
        return False
    has_runs = any(Path(path).parent.glob("*/config.yaml"))
    return not has_runs


def cached_model_id(directory: Path) -> str | None:
    """Return the id of the model in a directory of the hub's cache. None for any other directory.

    Example:
        >>> cached_model_id(Path("/cache/hub/models--Qwen--Qwen3-0.6B/snapshots/c1899de2"))
        'Qwen/Qwen3-0.6B'
    """
    snapshots = directory.absolute().parent
    match = _SNAPSHOT.fullmatch(snapshots.parent.name)
    if snapshots.name != "snapshots" or match is None:
        return None
    return f"{match[1]}/{match[2]}"


def find_model_directory(path: Path) -> Path:
    """Return a model's directory for a path or an id on the hub. No network.

    Args:
        path: A directory, or the id of a model in the hub's cache.

    Raises:
        UserError: If there is no such directory and no such model in the cache.
    """
    if path.is_dir():
        return path
    name = str(path)
    is_id = is_model_id(name)
    if is_id:
        directory = cached_model_directory(name)
        if directory is not None:
            return directory
        missing = missing_files(name)
        if missing:
            raise UserError(incomplete_download_message(name, missing, f"dtrain download {name}"))
        hint = f". Run `dtrain download {name}` first if it is a model on the Hugging Face hub"
    else:
        hint = directory_hint(name)
    raise UserError(f"{name}: no such directory. Use the directory of a model, adapter, run or step{hint}")


def cached_model_directory(name: str, *, weights: bool = True) -> Path | None:
    """Return the directory of a model in the cache. No network.

    Args:
        name: The model's id.
        weights: Whether the weights are needed.

    Returns:
        The directory. None if the model is not in the cache, or not completely.
    """
    directory = cached_snapshot(name)
    if directory is None or missing_files(name, weights=weights) or not _is_complete(directory, weights):
        return None
    return directory


def missing_files(name: str, *, weights: bool = True) -> list[str]:
    """Return the files that an interrupted download of model `name` did not reach. No network.

    A file is missing if the hub's listing of the repository, which huggingface_hub caches, or the index of the weights
    names the file and the snapshot lacks it. Only files that are needed to read the model are returned.

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
        with suppress(UserError):  # a damaged index is reported when the weights are read
            needed += find_weight_files(directory) or ()
    return sorted({path for path in needed if not (directory / path).is_file()})


def incomplete_download_message(name: str, missing: Sequence[str], command: str) -> str:
    """Return the message for a model or dataset whose download was interrupted.

    Args:
        name: Its id.
        missing: The files that are missing, at least one.
        command: The command that finishes the download.
    """
    shown = ", ".join(missing[:MAX_FILES_NAMED])
    if len(missing) > MAX_FILES_NAMED:
        shown += ", .."
    count = "1 file is missing" if len(missing) == 1 else f"{len(missing)} files are missing"
    return (
        f"{name}: its download into the hub's cache on this machine is incomplete: {count} ({shown}). Run `{command}` "
        "on a machine with a network, which downloads only these"
    )


def cached_listing(name: str, kind: str, commit: str) -> list[str]:
    """Return the cached listing of a repository: all of its paths at `commit`. [] if the listing is not cached.

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

    # None would mean all files: the library then treats a snapshot with any missing file as an incomplete download.
    patterns = list(needed)
    try:
        directory = snapshot_download(
            name, repo_type=kind, revision=revision, allow_patterns=patterns, local_files_only=True
        )
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    return Path(directory)


def _is_complete(directory: Path, weights: bool) -> bool:
    """Check whether a directory contains config.json, and the weights if they are needed."""
    return (directory / CONFIG).is_file() and (not weights or _has_weights(directory))


def download_model(name: str, *, weights: bool = True, key: str = "model.path") -> Path:
    """Download the files of a model that are not in the cache, and return its directory there.

    Several processes may call this at the same time, because huggingface_hub locks each file.

    Args:
        name: The model's id.
        weights: Whether to download the weights too.
        key: The recipe key that names the model, for messages.

    Raises:
        UserError: If the model cannot be downloaded. The message says what to do.
    """
    from huggingface_hub import snapshot_download

    patterns = DOWNLOADED_FILES if weights else SMALL_FILES
    command = f"dtrain download {name}"
    with hub_errors(name, "model", command, f"{key} to a directory", partial(missing_files, name, weights=weights)):
        directory = Path(snapshot_download(name, allow_patterns=patterns))
    # Without a network, the library does not check a snapshot for which it has no listing.
    missing = missing_files(name, weights=weights)
    if missing:
        raise UserError(incomplete_download_message(name, missing, command))
    _refuse_unfit(name, (directory / CONFIG).is_file(), not weights or _has_weights(directory))
    return directory


def look_up_model(name: str, key: str = "model.path") -> tuple[Path, int]:
    """Download only the small files of a model, to find out about its weights.

    Args:
        name: The model's id.
        key: The recipe key that names the model, for messages.

    Returns:
        Its directory in the cache, and the bytes of its weights, which `download_model` would download.

    Raises:
        UserError: As `download_model`.
    """
    from huggingface_hub import HfApi

    directory = download_model(name, weights=False, key=key)
    with hub_errors(name, "model", f"dtrain download {name}", f"{key} to a directory"):
        listed = HfApi().list_repo_tree(name, revision=directory.name)
        sizes = {entry.path: getattr(entry, "size", 0) for entry in listed}
    _refuse_unfit(name, True, WEIGHTS in sizes or WEIGHTS_INDEX in sizes)
    weights = [path for path in sizes if any(fnmatchcase(path, pattern) for pattern in (WEIGHTS, SHARDS))]
    return directory, sum(sizes[path] for path in weights)


def _refuse_unfit(name: str, has_config: bool, has_weights: bool) -> None:
    """Raise UserError for a repository without config.json or without weights in safetensors."""
    if not has_config or not has_weights:
        lacking = "weights in safetensors" if has_config else CONFIG
        raise UserError(f"{name} has no {lacking} on the hub, so dtrain cannot train it")


@contextmanager
def hub_errors(
    name: str, kind: str, command: str, otherwise: str, missing: Callable[[], Sequence[str]] = list
) -> Iterator[None]:
    """Context that turns errors of huggingface_hub into a UserError that says what to do.

    Args:
        name: The id of a repository on the hub.
        kind: model, or dataset.
        command: The command that downloads it on a machine with a network.
        otherwise: An alternative, such as "model.path to a directory".
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
            f"{name} is gated, and you have not accepted its terms. Accept them at https://huggingface.co/{path}, then "
            "run `hf auth login`, or set HF_TOKEN to a token of that account"
        ) from error
    except RevisionNotFoundError as error:
        raise UserError(f"{name} has no such revision on the hub. Use one of its branches, tags or commits") from error
    except RepositoryNotFoundError as error:
        raise UserError(
            f"there is no {here} {name} here, and the hub has no such {kind}. Check the name. If it is private, run "
            "`hf auth login`, or set HF_TOKEN"
        ) from error
    except client_errors(LocalEntryNotFoundError) as error:
        names = missing()
        if names:
            raise UserError(incomplete_download_message(name, names, command)) from error
        raise UserError(
            f"{name} is not a {here} here and not in the hub's cache on this machine, and the hub cannot be reached "
            f"(no network, or HF_HUB_OFFLINE=1). Run `{command}` on a machine with a network, or set {otherwise}"
        ) from error
    except HfHubHTTPError as error:
        raise UserError(f"{name}: the hub answered with an error: {str(error).strip().splitlines()[0]}") from error
    except OSError as error:
        raise UserError(f"{name} could not be downloaded: {error}") from error


def _has_weights(directory: Path) -> bool:
    """Check whether all files with weights are in a directory."""
    try:
        return all((directory / name).is_file() for name in find_weight_files(directory) or [WEIGHTS])
    except UserError:  # a damaged index is reported when the weights are read
        return False


def client_errors(*others: type[Exception]) -> tuple[type[Exception], ...]:
    """Return `others` and the error classes of the network clients that this process has loaded, for `except`.

    The clients are optional, and the one that huggingface_hub uses depends on its version. A client that is not loaded
    cannot have raised an error, so nothing is imported.
    """
    loaded = [getattr(sys.modules[module], name) for module, name in NETWORK_CLIENTS.items() if module in sys.modules]
    return (*others, *loaded)
