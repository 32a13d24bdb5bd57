"""The command `dtrain push`: its arguments, and its one commit. No torch."""

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
    parser.add_argument("run", metavar="RUN", type=Path, help="a run's directory, such as runs/x, with its export/")
    parser.add_argument("name", metavar="OWNER/NAME", help="of the model on the hub; made where there is none")
    public = "a new repository is open to everybody (default: private); one that is there stays as it is"
    parser.add_argument("--public", action="store_true", help=public)
    parser.add_argument("--revision", metavar="BRANCH", help="the branch to push to, made where there is none")
    began = "the hub's id of the base model, where the run cannot tell"
    parser.add_argument("--base", metavar="OWNER/NAME", help=began)
    dry = "print the card and the names of the files; send nothing"
    parser.add_argument("--dry-run", action="store_true", help=dry)


def run(arguments: argparse.Namespace) -> None:
    name, revision = arguments.name, arguments.revision
    for key, value in (("", name), ("--base ", arguments.base)):
        if value is not None and ("/" not in value or value.startswith(("/", ".", "~"))):
            raise UserError(f"{key}{value} is no model's id on the hub: give OWNER/NAME")
    files = _files(arguments.run / "export")
    record, step = RunFiles(arguments.run, name), read_saved_step(arguments.run / "export").get("step")
    record.refresh_metrics()
    base = arguments.base or base_of_recipe(record.recipe)
    pushed = Run(name.split("/")[1], record, step if isinstance(step, int) else None, ADAPTER_CONFIG in files, base)
    if arguments.dry_run:
        print(card(pushed, {}))
        print("\n".join(sorted([*files, README, CURVE])))
        return
    with _hub_errors(name):
        from huggingface_hub import HfApi

        api = HfApi(library_name="dtrain")
        made = api.create_repo(name, private=not arguments.public, exist_ok=True)
        name = made.repo_id
        if revision is not None:
            api.create_branch(name, branch=revision, exist_ok=True)
        commit = _commit(api, name, revision, files, pushed)
        is_private = bool(api.repo_info(name).private)
    print(f"{commit.commit_url}\n{name} is {'private' if is_private else 'public'}")
    if arguments.public and is_private:
        print(f"it was there already, and stays private: its settings on the hub open it ({made}/settings)")


def _files(export: Path) -> dict[str, Path]:
    """Return the files of an export (weights, configuration, tokenizer, chat templates) by their path within it."""
    known = {CONFIG, WEIGHTS_INDEX, ADAPTER_CONFIG, ADAPTER_WEIGHTS}
    files = {path.name: path for path in export.glob("*") if path.name in known or path.suffix == WEIGHTS}
    files |= {name: export / name for name in find_companions(export)}
    if not any(name.endswith(WEIGHTS) for name in files) or not files.keys() & {CONFIG, ADAPTER_CONFIG}:
        run = export.parent
        there = "has no export" if run.is_dir() else "is no directory"
        raise UserError(f"{run} {there}: give a run's directory; `dtrain export {run} {export}` writes its export")
    return files


def _commit(api: Any, name: str, revision: str | None, files: dict[str, Path], pushed: Run) -> Any:
    """Make one commit with the files, the card and the curve; it deletes the weights and templates they replace."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    there = api.list_repo_files(name, revision=revision)
    theirs = {}
    if README in there:
        theirs = read_card(Path(api.hf_hub_download(name, README, revision=revision)), name)
    contents: dict[str, Any] = {path: str(file) for path, file in files.items()}
    contents[README] = card(pushed, theirs).encode()
    if any(pushed.losses):
        contents[CURVE] = svg(*pushed.losses).encode()
    if pushed.is_adapter and pushed.base is not None:
        named = {**read_json(files[ADAPTER_CONFIG]), BASE: pushed.base}  # in place of a directory of this machine
        contents[ADAPTER_CONFIG] = json.dumps(named, indent=2).encode()
    stale = [
        path for path in there if path.endswith((WEIGHTS, WEIGHTS_INDEX)) and "/" not in path and path not in contents
    ]
    # A named template that was pushed before would write conversations with tools, in the place of the new template.
    stale += [path for path in there if path.startswith(f"{CHAT_TEMPLATES}/") and path not in contents]
    operations: list[Any] = [CommitOperationAdd(path, content) for path, content in sorted(contents.items())]
    operations += [CommitOperationDelete(path) for path in stale]
    title = f"dtrain: {pushed.name}" + (f", step {pushed.step}" if pushed.step is not None else "")
    return api.create_commit(name, operations, commit_message=title, revision=revision)


@contextmanager
def _hub_errors(name: str) -> Iterator[None]:
    """Raise the library's errors in the block as a UserError that says what to do."""
    from huggingface_hub import errors

    owner = name.split("/")[0]
    login = "run `hf auth login`, or set HF_TOKEN to a token that may write"
    try:
        yield
    except errors.HfHubHTTPError as error:
        problem = {
            401: f"the hub knows no token of yours, or it is the wrong one: {login}",
            403: f"your token may not write there: name an owner that you are, {login}",
            404: f"the hub has no owner {owner}, or not for your token: {login}",
        }.get(getattr(error.response, "status_code", 0))
        problem = problem or f"the hub answered with an error: {str(error).strip().splitlines()[0]}"
        raise UserError(f"{name}: {problem}") from error
    except errors.LocalTokenNotFoundError as error:
        raise UserError(f"{name}: there is no token on this machine: {login}") from error
    except (ValueError, OSError) as error:  # a name that the hub does not take, HF_HUB_OFFLINE
        raise UserError(f"{name} could not be pushed: {str(error).strip().splitlines()[0]}") from error
    except client_errors() as error:
        raise UserError(f"{name} could not be pushed: the hub cannot be reached ({error})") from error
