"""Checks before anything starts, all at once: of the recipe, and of the files that it names.

Loads torch for a model's config.json alone. `dtrain validate` adds what a rank would
refuse before its first step (`launch.validate`). A model or dataset of the hub that is not in the cache is no problem:
a run fetches it once all else is right, and `validate` asks the hub for what the run would.
"""

import os
import re
import shlex
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from dtrain.base.errors import RecipeError, UserError, in_words
from dtrain.base.hub import cached, download, look
from dtrain.base.model_directory import CONFIG
from dtrain.base.ranges import beside
from dtrain.checkpoint.peft.config import is_adapter_directory
from dtrain.data.sources import hub as data_hub
from dtrain.methods import recipe_and_problems
from dtrain.methods.spec import spec_of
from dtrain.models.read_config import read_config
from dtrain.recipe import Recipe, redact
from dtrain.recipe.schema import DataSource
from dtrain.run import eval_sets
from dtrain.run.check import check
from dtrain.run.preflight_data import absent_data, data_problems, eval_problems
from dtrain.run.preflight_models import (
    differing_tokens,
    is_model,
    model_files,
    model_ids,
    model_shapes,
    reference_problems,
)


def load(recipe: str | Path | Mapping, overrides: Sequence[str] = ()) -> Recipe:
    """`methods.load_recipe`, whose RecipeError also lists what `preflight` finds in the rest of a wrong recipe."""
    loaded, problems = recipe_and_problems(recipe, overrides)
    local = with_local_model(loaded)
    if problems:
        raise RecipeError(together(problems, preflight(local, local.launch.nproc)))
    return local


def together(refused: Sequence[str], problems: Sequence[str]) -> list[str]:
    """Problems of a recipe's text and of what is left of it, each once. What was `refused` is not missing too."""
    keys = [re.split(r"[=:]", problem)[0] for problem in refused]

    def follows(problem: str) -> bool:
        missing = re.match(r"(\S+)(?: or (\S+))? is missing", problem)
        named = [key for key in missing.groups() if key] if missing else []
        emptied = re.match(r"([\w.]+)=\[\]", problem)
        return any(f"{name}.".startswith(f"{key}.") for key in keys for name in named) or bool(
            emptied and any(key.startswith(f"{emptied[1]}[") for key in keys)
        )

    left = [problem for problem in problems if not follows(problem)]
    return list(dict.fromkeys([*refused, *left]))


def with_local_model(recipe: Recipe, *, fetch: bool = False) -> Recipe:
    """`recipe` with the directory in the hub's cache for each model that is named by an id (`Qwen/Qwen3-0.6B`).

    A model that is not in the cache is downloaded with `fetch`, and stays an id without. So is a dataset, which stays
    an id in any case. Raises UserError where the hub does not give them.
    """
    for key, name, weights in model_ids(recipe):
        path = cached(name, weights=weights)
        if path is None and fetch:
            with _named(key, name):
                path = download(name, weights=weights, key=key)
        if path is not None:
            recipe = _placed(recipe, key, str(path))
    for key, name, pick in absent_data(recipe) if fetch else ():
        with _named(key, name):
            data_hub.download(name, pick, key.removesuffix(".path"))
    return recipe


def with_small_files(recipe: Recipe) -> tuple[Recipe, dict[str, str], list[str]]:
    """Do as `with_local_model` with fetch, but of models the small files alone, and of datasets none.

    Also: key → what the run will download, and what the hub refuses, as it would refuse the run.
    """
    awaited, refused = {}, []
    for key, name, weights in model_ids(recipe):
        try:
            with _named(key, name):
                directory, size = look(name, key) if weights else (download(name, weights=False, key=key), 0)
        except UserError as error:
            refused.append(str(error))
            continue
        recipe = _placed(recipe, key, str(directory))
        if weights:
            awaited[key] = f"{key}={name}: the run downloads its weights from the hub, {size / 2**30:.2f} GiB"
    for key, name, pick in absent_data(recipe):
        try:
            with _named(key, name):
                _, files = data_hub.look(name, pick, key.removesuffix(".path"))
        except UserError as error:
            refused.append(str(error))
            continue
        awaited[key] = (
            f"{key}={name}: the run downloads {len(files)} file{'s' if len(files) != 1 else ''} from the hub, whose "
            "rows are looked at then"
        )
    return recipe, awaited, refused


def _placed(section: Any, key: str, value: str) -> Any:
    """`section` with `value` at `key`."""
    name, _, rest = key.partition(".")
    return replace(section, **{name: _placed(getattr(section, name), rest, value) if rest else value})


@contextmanager
def _named(key: str, name: str) -> Iterator[None]:
    """Put the key that is meant before what the hub says of the block."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{key}={name}: {str(error).removeprefix(f'{key}: ')}") from error


def not_here(recipe: Recipe) -> list[str]:
    """Return what `with_local_model` would fetch, as problems where nothing is fetched."""
    return [
        f"{key}={name} is no directory here, and as a model of the Hugging Face hub it is not in this machine's cache: "
        f"`dtrain download {name}` fetches it{beside(name)}"
        for key, name, _ in model_ids(recipe)
    ] + [data_hub.absent(name, pick, key) for key, name, pick in absent_data(recipe)]


def preflight(recipe: Recipe, world_size: int, awaited: Collection[str] = ()) -> list[str]:
    """Return every problem of `recipe` in a world of `world_size` processes that needs no training to be seen. What a
    run fetches from the hub is none. awaited: keys of models whose weights are not looked at."""
    splits = [("data.train", recipe.data.train), ("data.val", recipe.data.val)]
    looks: list[Callable[[], list[str]]] = [
        lambda: _of_other_methods(recipe) + check(recipe, world_size),
        lambda: model_shapes(recipe),
        lambda: model_files(recipe, awaited),
        *(partial(data_problems, recipe, split, key) for key, split in splits if isinstance(split, DataSource)),
        *(partial(eval_problems, recipe, each) for each in eval_sets.sets(recipe)),
        lambda: _checkpoint(recipe),
        lambda: _export(recipe),
        lambda: [text for text, is_problem in _code(recipe) if is_problem],
    ]
    problems = []
    for look_at in looks:
        try:
            problems += look_at()
        except OSError as error:  # a directory on the way that this user may not enter, a name that is too long
            problems.append(f"{in_words(error)}: let this user read it, or name another place in the recipe")
    return [redact(problem, recipe) for problem in problems]


def named_code(recipe: Recipe) -> list[str]:
    """Return what a run of `recipe` imports because the recipe names it, a line each: the key, its import path, its
    file."""
    return [text for text, is_problem in _code(recipe) if not is_problem]


def shapes(recipe: Recipe, world_size: int) -> list[str]:
    """The problems among them that decide what a step holds and computes: of all files, each model's config.json, which
    must be here."""
    problems = check(recipe, world_size) + not_here(recipe) + model_shapes(recipe)
    return [redact(problem, recipe) for problem in problems]


def _of_other_methods(recipe: Recipe) -> list[str]:
    """Return keys that the recipe gives to another method."""
    named = [(key, key.split(".")[0]) for key in getattr(recipe, "unread", ())]
    return [
        f"{key} is read by method={method} alone, and this recipe has method={recipe.method}: leave it out, or set "
        f"method={method}"
        for key, method in named
    ]


def _code(recipe: Recipe) -> list[tuple[str, bool]]:
    """Return for each import path of the recipe where it leads, or why it leads nowhere (True). Nothing of it is
    run."""
    stages = recipe.scheduler if isinstance(recipe.scheduler, list) else []
    named: list[tuple[str, Any, str]] = [
        ("optimizer.name", recipe.optimizer.name, "optimizer"),
        *((f"scheduler[{i}].name", stage.name, "scheduler") for i, stage in enumerate(stages)),
        ("scheduler.name", getattr(recipe.scheduler, "name", None), "scheduler"),
        ("parallel.custom_plan", recipe.parallel.custom_plan, "plan"),
        *spec_of(recipe).code(recipe),
        *(code for each in eval_sets.sets(recipe) for code in each.code),
    ]
    lines = []
    by_command = ("server of tools", "environment of verifiers")
    named = [(key, path, what) for key, path, what in named if what in by_command or _is_import_path(path)]
    if not any(path for _, path, _ in named):
        return []
    from dtrain.rl.rewards.find import find_file, find_verifiers
    from dtrain.rl.tools import tool_schema

    for key, path, what in named:
        if what == "server of tools":
            lines += _server(key, path)
        elif what == "environment of verifiers" and path is not None:
            try:
                lines.append((f"{key}: {path}, from {find_verifiers(path)}", False))
            except UserError as error:
                lines.append((f"{key}: {error}", True))
        elif path is not None:
            try:
                origin = find_file(path, what)[2]
                if what == "tool":
                    tool_schema(path)
                lines.append((f"{key}: {path}, from {origin}", False))
            except UserError as error:
                lines.append((f"{key}: {error}", True))
    return lines


def _is_import_path(value: Any) -> bool:
    return isinstance(value, str) and bool(set(".:") & set(value))


def _server(key: str, command: str | None) -> list[tuple[str, bool]]:
    """Find the program of a command that a run starts, as `_code` has it."""
    if command is None:
        return []
    try:
        (program, *_) = shlex.split(command)
    except ValueError as error:
        return [(f"{key}={command} is no command: {error or 'it is empty'}", True)]
    file = shutil.which(program)
    return [(f"{key}: {command}, by {file}" if file else f"{key}={command}: there is no program {program}", not file)]


def _checkpoint(recipe: Recipe) -> list[str]:
    resume, init_from = recipe.checkpoint.resume, recipe.checkpoint.init_from
    problems = []
    if any((recipe.run.directory / "checkpoints").glob("step-*")):
        return []  # a run that goes on says itself what it needs of them
    if resume not in (None, "auto") and not Path(resume).is_dir():
        problems.append(
            f"checkpoint.resume={resume}: there is no such directory; auto takes the run's newest checkpoint"
        )
    if init_from is None:
        return problems
    if not Path(init_from).is_dir():
        problems.append(
            f"checkpoint.init_from={init_from}: there is no such directory; give a run's, or a step-N of one"
        )
    elif is_adapter_directory(init_from):
        problems.append(
            f"checkpoint.init_from={init_from} is an adapter's directory, not a run's: set lora.path={init_from} "
            "instead"
        )
    elif (Path(init_from) / "config.json").is_file():
        problems.append(
            f"checkpoint.init_from={init_from} is a model's directory, not a run's: set model.path={init_from} instead"
        )
    elif "model.config" not in recipe.checkpoint.allow_changes:
        problems += _start(recipe, Path(init_from))
    is_adapter = any(any(Path(init_from).glob(place)) for place in ("adapter", "checkpoints/step-*/adapter"))
    if recipe.lora is None and is_adapter:
        problems.append(
            f"checkpoint.init_from={init_from} has an adapter that this run has not: set lora as it was there, or "
            f"`dtrain export {init_from} OUT`, and set model.path=OUT and checkpoint.init_from=null"
        )
    if recipe.lora is not None and recipe.lora.quantize == "nf4" and not is_adapter:
        problems.append(
            f"checkpoint.init_from={init_from} holds whole weights, and lora.quantize=nf4 rounds those of model.path: "
            f"`dtrain export {init_from} OUT`, and set model.path=OUT and checkpoint.init_from=null"
        )
    return problems


def _start(recipe: Recipe, path: Path) -> list[str]:
    """Return what makes the model whose weights are taken another one than ours, by the files that its run keeps."""
    above = [path, *path.absolute().parents][:3]  # a run's directory, its checkpoints, a step of them
    kept = next((place / "model" for place in above if (place / "model" / CONFIG).is_file()), None)
    ours = recipe.model.directory
    if kept is None or not is_model(ours) or not is_model(kept):
        return []
    key = "checkpoint.init_from"
    differences = reference_problems(read_config(ours), read_config(kept), key, str(path))
    differences += [f"{key}={path}: {problem}" for problem in differing_tokens(kept, ours)]
    return [f"{problem}, or name the change: checkpoint.allow_changes=[model.config]" for problem in differences]


def _export(recipe: Recipe) -> list[str]:
    """An export takes the place of its whole directory."""
    target = os.path.realpath(recipe.run.directory / "export")  # of a loop of links it gives something
    if recipe.checkpoint.export == "none":
        return []
    read = [("model.path", recipe.model.path), *spec_of(recipe).other_models(recipe)]
    read += [] if recipe.lora is None else [("lora.path", recipe.lora.path)]
    return [
        f"{key}={path} lies where this run puts its export ({target}), which would take its place: choose another "
        "run.name, or checkpoint.export=none"
        for key, path in read
        if path and Path(os.path.realpath(path)).is_relative_to(target)
    ]
