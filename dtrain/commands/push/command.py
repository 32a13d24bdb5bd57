"""The command `dtrain push`: its arguments, and the one commit that it makes. No torch."""

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dtrain.base.errors import UserError
from dtrain.base.hub import client_errors
from dtrain.base.json_files import read_json
from dtrain.base.model_directory import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    CHAT_TEMPLATES,
    CONFIG,
    WEIGHTS_INDEX,
    find_companions,
)
from dtrain.checkpoint.huggingface.model_files import read_saved_step
from dtrain.checkpoint.peft.config import BASE
from dtrain.commands.push.card import CURVE, Run, base_of_recipe, card, svg
from dtrain.commands.report.run_files import RunFiles
from dtrain.data.sources.hub import README, read_card

WEIGHTS = ".safetensors"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `dtrain push`."""
    run = "directory of a run that has an export/, such as runs/x"
    parser.add_argument("run", metavar="RUN", type=Path, help=run)
    name = "name of the repository on the hub; it is created if it does not exist"
    parser.add_argument("name", metavar="OWNER/NAME", help=name)
    public = "make a new repository public (default: private); an existing one is not changed"
    parser.add_argument("--public", action="store_true", help=public)
    revision = "branch to push to; it is created if it does not exist"
    parser.add_argument("--revision", metavar="BRANCH", help=revision)
    base = "hub id of the base model, if the run's files do not contain it"
    parser.add_argument("--base", metavar="OWNER/NAME", help=base)
    dry_run = "print the model card and the names of the files, and upload nothing"
    parser.add_argument("--dry-run", action="store_true", help=dry_run)


def run(arguments: argparse.Namespace) -> None:
    """Upload the export of a run, or print what would be uploaded."""
    name, revision = arguments.name, arguments.revision
    _check_id(name)
    if arguments.base is not None:
        _check_id(arguments.base, option="--base ")
    export = arguments.run / "export"
    files = _files(export)
    run_files = RunFiles(arguments.run, name)
    run_files.refresh_metrics()
    step = read_saved_step(export).get("step")
    pushed = Run(
        name=name.split("/")[1],
        files=run_files,
        step=step if isinstance(step, int) else None,
        is_adapter=ADAPTER_CONFIG in files,
        base=arguments.base or base_of_recipe(run_files.recipe),
    )
    if arguments.dry_run:
        print(card(pushed, {}))
        print("\n".join(sorted([*files, README, CURVE])))
        return
    with _hub_errors(name):
        from huggingface_hub import HfApi

        api = HfApi(library_name="dtrain")
        repository = api.create_repo(name, private=not arguments.public, exist_ok=True)
        name = repository.repo_id
        if revision is not None:
            api.create_branch(name, branch=revision, exist_ok=True)
        commit = _commit(api, name, revision, files, pushed)
        is_private = bool(api.repo_info(name).private)
    print(f"{commit.commit_url}\n{name} is {'private' if is_private else 'public'}")
    if arguments.public and is_private:
        print(f"it already existed and stays private; its settings on the hub can change that ({repository}/settings)")


def _check_id(name: str, option: str = "") -> None:
    """Raise UserError if `name` cannot be the id of a model on the hub."""
    if "/" not in name or name.startswith(("/", ".", "~")):
        raise UserError(f"{option}{name} is not the id of a model on the hub. Write it as OWNER/NAME")


def _files(export: Path) -> dict[str, Path]:
    """Return the files of an export (weights, configuration, tokenizer, chat templates) by their path within it."""
    names = {CONFIG, WEIGHTS_INDEX, ADAPTER_CONFIG, ADAPTER_WEIGHTS}
    files = {path.name: path for path in export.glob("*") if path.name in names or path.suffix == WEIGHTS}
    files |= {name: export / name for name in find_companions(export)}
    has_weights = any(name.endswith(WEIGHTS) for name in files)
    has_config = CONFIG in files or ADAPTER_CONFIG in files
    if not has_weights or not has_config:
        run = export.parent
        problem = "has no export" if run.is_dir() else "is not a directory"
        raise UserError(
            f"{run} {problem}. Use the directory of a run. `dtrain export {run} {export}` writes its export"
        )
    return files


def _commit(api: Any, name: str, revision: str | None, files: dict[str, Path], pushed: Run) -> Any:
    """Commit the files, the card and the curve, and delete the weights and templates that they replace."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    existing_files = api.list_repo_files(name, revision=revision)
    existing_front_matter = {}
    if README in existing_files:
        existing_front_matter = read_card(Path(api.hf_hub_download(name, README, revision=revision)), name)
    contents: dict[str, Any] = {path: str(file) for path, file in files.items()}
    contents[README] = card(pushed, existing_front_matter).encode()
    if any(pushed.losses):
        contents[CURVE] = svg(*pushed.losses).encode()
    if pushed.is_adapter and pushed.base is not None:
        # The file names the base model by its directory on this machine.
        config = {**read_json(files[ADAPTER_CONFIG]), BASE: pushed.base}
        contents[ADAPTER_CONFIG] = json.dumps(config, indent=2).encode()
    stale = []
    for path in existing_files:
        is_weights = path.endswith((WEIGHTS, WEIGHTS_INDEX)) and "/" not in path
        # If a named template of an earlier push stays, for example one for tools, transformers keeps using it.
        is_template = path.startswith(f"{CHAT_TEMPLATES}/")
        if (is_weights or is_template) and path not in contents:
            stale.append(path)
    operations: list[Any] = [CommitOperationAdd(path, content) for path, content in sorted(contents.items())]
    operations += [CommitOperationDelete(path) for path in stale]
    title = f"dtrain: {pushed.name}"
    if pushed.step is not None:
        title += f", step {pushed.step}"
    return api.create_commit(name, operations, commit_message=title, revision=revision)


@contextmanager
def _hub_errors(name: str) -> Iterator[None]:
    """Turn the errors of the hub's client in the block into UserErrors that say what to do."""
    from huggingface_hub import errors

    owner = name.split("/")[0]
    login = "Run `hf auth login`, or set HF_TOKEN to a token with write access"
    problems_by_status = {
        401: f"the hub does not accept your token, or you have none. {login}",
        403: f"your token may not write to this repository. Use another owner. {login}",
        404: f"the hub has no owner {owner}, or your token cannot see it. {login}",
    }
    try:
        yield
    except errors.HfHubHTTPError as error:
        status = getattr(error.response, "status_code", 0)
        problem = problems_by_status.get(status, f"the hub answered with an error: {_first_line(error)}")
        raise UserError(f"{name}: {problem}") from error
    except errors.LocalTokenNotFoundError as error:
        raise UserError(f"{name}: there is no token on this machine. {login}") from error
    except (ValueError, OSError) as error:  # a name that the hub does not accept, or HF_HUB_OFFLINE
        raise UserError(f"{name} could not be pushed: {_first_line(error)}") from error
    except client_errors() as error:
        raise UserError(f"{name} could not be pushed, because the hub cannot be reached: {error}") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
