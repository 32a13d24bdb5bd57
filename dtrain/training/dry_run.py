"""A dry run: everything that `dtrain run` would refuse before its first step, found in one process.

`dtrain validate` calls the checks and then the functions that `training.spec.resolve` calls on each rank. Problems are
collected, no file is left behind, large files are read only in part, and code that the recipe names is not imported.
Only a run can check ports, servers, memory, damage inside of files, and files that have to be downloaded first.

The checks are the functions of `training.setup` that look for problems, in the order of the report. There are three
kinds. `check_keys` reads the recipe only. `check_models` also reads each model's config.json. `check_files` also reads
the headers of weights, tokenizers, and the first rows of data. A check returns its problems; an error that it raises is
one problem. The checks of all topics of one kind are called before those of the next kind.

Imports torch, and the packages of optional features only for a recipe that uses them.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Literal

import torch

from dtrain.base.errors import Problem, UserError, merge_problems, problems_in
from dtrain.policy.options import choose_precision
from dtrain.recipe import Recipe, saved
from dtrain.training import metrics, resume
from dtrain.training.host import DryHost
from dtrain.training.inputs import RunInputs, World
from dtrain.training.setup import (
    code,
    data,
    first_rows,
    kernels,
    mesh,
    model,
    optimizer,
    outputs,
    schedule,
    sizes,
    start,
    tokenizer,
)
from dtrain.training.setup.data import DataFacts
from dtrain.training.setup.model import MetaModel
from dtrain.training.spec import check_other_models, read_evals

Depth = Literal["keys", "models", "files"]
Check = Callable[[RunInputs], list[Problem]]


@dataclass(frozen=True)
class DryRun:
    """The result of a dry run.

    Attributes:
        problems: The problems. If there are any, the other attributes may not be known.
        recipe: The recipe with values in place of `auto`, as far as they are known.
        steps: Steps of a fresh run, if the rows were read.
        notes: Lines for the user.
    """

    problems: tuple[Problem, ...]
    recipe: Recipe
    steps: int | None = None
    notes: tuple[str, ...] = ()


def dry_run(
    recipe: Recipe, world: World, *, pending_downloads: Collection[str] = (), refused: Iterable[Problem] = ()
) -> DryRun:
    """Find every problem because of which a run in `world` would end before its first step.

    Args:
        recipe: The recipe.
        world: The processes, which need not be on this machine.
        pending_downloads: Keys of files that the run downloads first.
        refused: Problems that are known already. They are reported with the others.
    """
    inputs = RunInputs.of(recipe, world, pending_downloads)
    host = DryHost()
    host.problems.extend(merge_problems(refused, find_problems(inputs)))
    has_passed_checks = not host.problems
    host.problems.extend(metrics.package_problems(recipe.metrics))
    host.problems.extend(metrics.option_problems(recipe.metrics))
    host.attempt("run.dir", inputs.run.check_usable)
    host.attempt("checkpoint.export", partial(outputs.refuse_unwritable_export, inputs))
    if not _has_tokenizer(inputs):
        return DryRun(tuple(host.problems), inputs.recipe)
    if not has_passed_checks:
        # The functions that decide the spec expect a recipe without mistakes. Only the data can still be checked.
        first_rows.look_at_data(inputs, host)
        return DryRun(tuple(host.problems), inputs.recipe)
    return _resolve_spec(inputs, host)


def _has_tokenizer(inputs: RunInputs) -> bool:
    """Check that the tokenizer can be read. If it cannot, the checks report the reason."""
    try:
        inputs.source.tokenizer  # noqa: B018 (a cached property)
    except (OSError, UserError):
        return False
    return True


def _resolve_spec(inputs: RunInputs, host: DryHost) -> DryRun:
    """Call the functions that decide the spec of a run, in the order of `spec.resolve`, as far as possible."""
    recipe = inputs.recipe
    precision = choose_precision(recipe.train.dtype, inputs.world.device_type, recipe.train.masters)
    waits_for_data = model.may_name_tower(inputs)  # as in `spec.resolve`
    meta: MetaModel | None = None
    if not waits_for_data:
        meta = host.attempt("model", partial(model.build, inputs, precision, False))
    # Digests of large weights take minutes, so only the run computes them.
    identities: dict[str, str] = {}
    if not inputs.pending_downloads and meta is not None and model.has_small_weights(inputs):
        identities = host.attempt("model.path", partial(resume.identities, inputs, host.ranks)) or {}
    check_other_models(inputs, host)
    data = first_rows.look_at_data(inputs, host)
    evals = read_evals(inputs, data, host)
    has_images = data.has_images or evals.has_images
    if data.rows:
        host.attempt("train.vision", partial(model.refuse_unused_tower, data.recipe, has_images))
    has_failed = meta is None and not waits_for_data  # a second attempt would report the same problem again
    if not has_failed and (has_images or waits_for_data):
        meta = host.attempt("model", partial(model.build, inputs, precision, has_images))
    notes = [*data.notes, *evals.notes, *sizes.position_notes(inputs.recipe, inputs.source)]
    size_facts = sizes.decide(inputs, data, host)
    if size_facts is None:
        return DryRun(tuple(host.problems), data.recipe, notes=tuple(notes))
    notes += size_facts.notes

    # The devices of another machine cannot be examined.
    if inputs.world.is_local and _is_packing_known(data):
        config = inputs.model_config(has_images)
        device = torch.device(inputs.world.device_type)
        kernels.check_device(size_facts.recipe, size_facts.method, config, precision, device, host)
    steps = size_facts.steps or size_facts.recipe.train.steps
    if size_facts.steps is not None and "train" in data.rows:
        idle = partial(schedule.refuse_idle, size_facts.recipe, size_facts.method, data.rows["train"], size_facts.steps)
        host.attempt("train.steps", idle)
    if steps is not None:
        notes += schedule.warmup_notes(size_facts.recipe, steps)
    if meta is not None:
        schedule.check_schedule(size_facts.recipe, steps, meta.optimizer, host)
        start.resolve(inputs, data, size_facts, meta, {**identities, **data.identities}, host)
    return DryRun(tuple(host.problems), size_facts.recipe, size_facts.steps, tuple(notes))


def _is_packing_known(data: DataFacts) -> bool:
    """Check whether `data.packing` is decided. The choice of the attention kernel depends on it."""
    return bool(data.rows) or data.recipe.data.packing != "auto"


def find_problems(inputs: RunInputs, until: Depth = "files") -> list[Problem]:
    """Return every problem of a recipe that can be found before a run.

    Args:
        inputs: The recipe and its world.
        until: The last kind of checks to call.
    """
    problems = _call_checks(_checks_of_keys(inputs), inputs)
    if until in ("models", "files"):
        problems += _call_checks(_checks_of_models(inputs), inputs)
    if until == "files":
        problems += _call_checks(_checks_of_files(inputs), inputs)
    return problems


def _call_checks(checks: list[tuple[str, Check]], inputs: RunInputs) -> list[Problem]:
    problems = []
    for key, check in checks:
        problems += problems_in(key, partial(check, inputs))
    return problems


def _checks_of_keys(inputs: RunInputs) -> list[tuple[str, Check]]:
    checks: list[tuple[str, Check]] = [("run", outputs.check_keys), ("model", model.check_keys)]
    if inputs.recipe.lora is not None:
        checks.append(("lora", _optional("adapter").check_keys))
    checks += [("parallel", mesh.check_keys), ("optimizer", optimizer.check_keys), ("data", data.check_keys)]
    if inputs.recipe.evals:
        checks.append(("eval", _optional("evals").check_keys))
    checks += [("train", sizes.check_keys), ("model.attention", kernels.check_keys)]
    checks += [("scheduler", schedule.check_keys), ("checkpoint", start.check_keys)]
    return checks


def _checks_of_models(inputs: RunInputs) -> list[tuple[str, Check]]:
    checks: list[tuple[str, Check]] = [("model.path", model.check_models)]
    if inputs.other_models:
        checks.append((inputs.recipe.method_name, _optional("other_models").check_models))
    if inputs.recipe.lora is not None:
        checks.append(("lora", _optional("adapter").check_models))
    if inputs.library_models:
        checks.append(("model.path", _optional("transformers_models").check_models))
    checks += [("parallel", mesh.check_models), ("model.linear_attention", kernels.check_models)]
    return checks


def _checks_of_files(inputs: RunInputs) -> list[tuple[str, Check]]:
    checks: list[tuple[str, Check]] = [
        ("run", outputs.check_files),
        ("model.path", tokenizer.check_files),
        ("model.path", model.check_files),
    ]
    if inputs.other_models:
        checks.append((inputs.recipe.method_name, _optional("other_models").check_files))
    if inputs.library_models:
        checks.append(("model.path", _optional("transformers_models").check_files))
    checks += [("", code.check_files), ("data", data.check_files)]
    if inputs.recipe.evals:
        checks.append(("eval", _optional("evals").check_files))
    checks += [("train", sizes.check_files), ("checkpoint", start.check_files)]
    return checks


def notes_before(inputs: RunInputs) -> list[str]:
    """Return notes for the user before a run. They are not mistakes."""
    lines = saved.secret_notes(inputs.original_recipe)
    if inputs.recipe.lora is not None:
        lines += _optional("adapter").notes(inputs)
    return [*lines, *optimizer.notes(inputs), *data.notes(inputs)]


def _optional(name: str) -> ModuleType:
    """Return a module of `training.setup` that only recipes with an optional feature load."""
    return import_module(f"dtrain.training.setup.{name}")
