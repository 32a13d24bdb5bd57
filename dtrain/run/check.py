"""Checks across a recipe's keys, and of a world of so many processes; every problem at once.

No torch and no file is read here: `run.preflight` adds what the model's directory and the data files tell. What a
method asks of its section is its own: `dtrain.methods.spec`; of `lora`, `dtrain.run.lora_section`; of `eval`,
`dtrain.run.eval_section`.
"""

import re
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from typing import Any

from dtrain.base.ranges import Range, is_finite, nearest, out_of_range, shown
from dtrain.data.sources import columns
from dtrain.methods import recipe_keys
from dtrain.methods.spec import spec_of
from dtrain.recipe import key_aliases, saved
from dtrain.recipe.schema import OPTIMIZERS, SCHEDULES, DataSource, Recipe
from dtrain.recipe.world import batch_problems, mesh_problems
from dtrain.run.eval_sets import best_problems, sets

# What a resume compares beside the recipe's keys, and `checkpoint.allow_changes` may name.
DIGESTS = ("data.fingerprint", "data.val.fingerprint", "model.weights", "model.config", "model.tokenizer")


def _lora() -> Any:
    """The checks of the section `lora`, which recipes without one do not load."""
    return import_module("dtrain.run.lora_section")


def notes(recipe: Recipe) -> list[str]:
    """Return notes for the user of `recipe` before a run, which are no mistakes."""
    share = recipe.data.val if recipe.train.validate_every is None else None
    unused = f"note: data.val={share} keeps rows out of training; set train.validate_every to be told their loss"
    lines = saved.notes(recipe)
    if recipe.lora is not None:
        lines += _lora().notes(recipe)
    if isinstance(share, float):
        lines.append(unused)
    return lines


def check(recipe: Recipe, world_size: int) -> list[str]:
    """Return every problem of `recipe` in a world of `world_size` processes, in the user's terms; empty if there is
    none."""
    wrong = [(key, f"{key}={shown(value)} must be {sentence}") for key, value, sentence in out_of_range(recipe)]
    problems = [text for _, text in wrong]
    problems += _required(recipe)
    problems += _names(recipe)
    problems += _formats(recipe)
    problems += _columns(recipe)
    problems += spec_of(recipe).problems(recipe)
    problems += _lora().problems(recipe) if recipe.lora is not None else []
    problems += _stages(recipe)
    problems += _allowed_changes(recipe)
    problems += best_problems(recipe)
    problems += import_module("dtrain.run.eval_section").problems(recipe) if sets(recipe) else []
    problems += _few_bits(recipe)
    problems += _rate(recipe)
    problems += _muon(recipe)
    problems += _dynamic(recipe)
    problems += _of_cuda(recipe)
    if world_size >= 1 and not any(key.startswith("parallel.") for key, _ in wrong):
        of_mesh, shape = mesh_problems(recipe, world_size)
        problems += of_mesh
        problems += _sequence(recipe)
        is_open = recipe.train.global_batch == "auto"  # the data say, when the run starts
        if not is_open and not any(key in ("train.global_batch", "train.micro_batch") for key, _ in wrong):
            # Where the mesh does not fit its world, what its keys say of dp: of dp_shard=-1 that it is 1 or more.
            replicate, shard = shape[:2] if shape else (recipe.parallel.dp_replicate, max(recipe.parallel.dp_shard, 1))
            problems += batch_problems(recipe, replicate * shard)
    return problems


def _dynamic(recipe: Recipe) -> list[str]:
    is_wrong = recipe.train.dynamic_batch and recipe.data.packing
    return ["train.dynamic_batch=true is for padded rows: set data.packing=false, or leave it out"] if is_wrong else []


def _of_cuda(recipe: Recipe) -> list[str]:
    unfit = {
        "launch.device=cpu": recipe.launch.device == "cpu",
        f"train.dtype={recipe.train.dtype}": recipe.train.dtype in ("float32", "float64"),
    }
    named = [key for key, is_so in unfit.items() if is_so]
    kernels = {"attention": "varlen", "linear_attention": "fla"}
    return [
        f"model.{key}={value} is for CUDA and bfloat16 or float16, and {' and '.join(named)}: set "
        f"model.{key}=auto, which takes it where it can"
        for key, value in kernels.items()
        if named and getattr(recipe.model, key) == value
    ]


def _few_bits(recipe: Recipe) -> list[str]:
    """Return conflicts of weights and moments of fewer bits than float32, or of moments on the host."""
    state, masters, dtype = recipe.optimizer.state, recipe.train.masters, recipe.train.dtype
    settings = {
        f"optimizer.state={state}": state != "float32",
        f"train.masters={masters}": masters != "float32",
        "parallel.optimizer_offload=true": recipe.parallel.optimizer_offload,
    }
    fewer = [setting for setting, is_set in settings.items() if is_set]
    if not fewer:
        return []
    problems, named = [], " and ".join(fewer)
    back = " and ".join(
        key.partition("=")[0] + ("=false" if key.startswith("parallel") else "=float32") for key in fewer
    )
    if recipe.parallel.optimizer_offload and recipe.parallel.cpu_offload:
        problems.append(
            "parallel.optimizer_offload=true and parallel.cpu_offload=true: the second has the optimizer's state and "
            "its step on the host already; set one of them to false"
        )
    can = ("adamw", "adam", "muon") if fewer == ["train.masters=bfloat16"] else ("adamw", "adam")
    if recipe.optimizer.name not in can:
        able = f"{', '.join(can[:-1])} and {can[-1]}"
        problems.append(f"{named}: for {able}, and optimizer.name={recipe.optimizer.name}; set {back}")
    elif recipe.optimizer.name != "muon":
        why = f"not with {named}, whose step takes lr, betas, eps and weight_decay there; leave it out, or set {back}"
        problems += _kwargs(recipe, _ADAMS, f"optimizer.kwargs.{{}}: {why}")
    if masters == "bfloat16" and dtype not in ("auto", "bfloat16"):
        problems.append(
            f"train.masters=bfloat16 keeps weights in bfloat16, in which train.dtype={dtype} would gain nothing: set "
            "train.dtype=bfloat16, or train.masters=float32"
        )
    elif state != "float32" and dtype == "float64":
        problems.append(
            f"train.dtype=float64 is for exact numbers, and optimizer.state={state} rounds moments: set "
            "train.dtype=float32 or bfloat16, or optimizer.state=float32"
        )
    if masters == "bfloat16" and recipe.parallel.cpu_offload:
        problems.append(
            "parallel.cpu_offload=true steps on the host, where the rounding of train.masters=bfloat16 would take "
            "longer than all else: set parallel.cpu_offload=false, or train.masters=float32"
        )
    return problems


# What dtrain's own AdamW and Adam take of `optimizer.kwargs`, as torch's do.
_SIZE = (lambda v: is_finite(v) and v >= 0, "a finite number, at least 0")
_ADAMS: dict[str, Range] = {
    "lr": _SIZE,
    "betas": (
        lambda v: isinstance(v, list) and len(v) == 2 and all(is_finite(beta) and 0 <= beta < 1 for beta in v),
        "two numbers from 0 up to 1",
    ),
    "eps": _SIZE,
    "weight_decay": _SIZE,
}


def _kwargs(recipe: Recipe, holds: Mapping[str, Range], unknown: str) -> list[str]:
    """Return the entries of `optimizer.kwargs` that are none of `holds`, in the words of `unknown`, or break its
    rule."""
    problems = []
    for key, value in recipe.optimizer.kwargs.items():
        if key not in holds:
            problems.append(unknown.format(key))
        elif not holds[key][0](value):
            problems.append(f"optimizer.kwargs.{key}={shown(value)} must be {holds[key][1]}")
    return problems


def _rate(recipe: Recipe) -> list[str]:
    """A rate of 0 trains nothing; muon has two, and the class's own arguments win."""
    section = recipe.optimizer
    others = (section.adam_lr or 0.0) if section.name == "muon" else 0.0
    if section.lr != 0 or others > 0 or "lr" in section.kwargs:
        return []
    return [
        "optimizer.lr=0 trains nothing: set a rate, such as 1e-5 (2e-4 with lora). `dtrain eval` measures a model "
        "without training; train.freeze keeps single parameters as they are"
    ]


def _muon(recipe: Recipe) -> list[str]:
    """Check `optimizer.kwargs` of muon, and `optimizer.adam_lr` of others."""
    name = recipe.optimizer.name
    if name != "muon":
        is_set = recipe.optimizer.adam_lr is not None
        fix = f"optimizer.adam_lr is muon's, and optimizer.name={name}: set optimizer.lr, or optimizer.adam_lr=null"
        return [fix] if is_set else []
    holds: dict[str, Range] = {
        "momentum": (lambda v: is_finite(v) and 0 <= v < 1, "a number from 0 up to 1"),
        "nesterov": (lambda v: isinstance(v, bool), "true or false"),
        "ns_steps": (lambda v: type(v) is int and 1 <= v < 100, "a whole number from 1 to 99"),
        "ns_coefficients": (lambda v: isinstance(v, list) and len(v) == 3 and all(map(is_finite, v)), "three numbers"),
        "adjust_lr_fn": (lambda v: v in ("match_rms_adamw", "original"), "match_rms_adamw or original"),
    }
    return _kwargs(recipe, holds, f"optimizer.kwargs.{{}} is none of muon's: {', '.join(holds)}")


def _get(recipe: Recipe, key: str) -> Any:
    """The value at a dotted key; None where a section on the way is switched off."""
    value: Any = recipe
    for part in key.split("."):
        value = getattr(value, part, None)
    return value


def _required(recipe: Recipe) -> list[str]:
    problems = []
    if not recipe.model.path:
        problems.append("model.path is missing: set it to a local directory with config.json, weights and tokenizer")
    problems += spec_of(recipe).missing(recipe)
    problems += _source(recipe.data.train, "data.train")
    if isinstance(recipe.data.val, DataSource):
        problems += _source(recipe.data.val, "data.val")
    elif recipe.data.val is None and recipe.train.validate_every is not None:
        problems.append(
            f"train.validate_every={recipe.train.validate_every} needs a validation set: set data.val.path, "
            "or data.val=0.05 for a share of the training rows, or train.validate_every=null"
        )
    steps, epochs = recipe.train.steps, recipe.train.epochs
    if steps is None and epochs is None:
        problems.append("train.steps or train.epochs is missing: set one of them")
    if steps is not None and epochs is not None:
        problems.append(f"train.steps={steps} and train.epochs={epochs} exclude each other: set one of them to null")
    name = recipe.run.name
    if name is not None and (not name.strip() or "/" in name or name in (".", "..")):
        problems.append(f"run.name={name} must be the name of one directory; run.dir says where it lies")
    elif name is not None and (not name.isprintable() or len(name.encode()) > 200):
        problems.append(f"run.name={name[:40]!r} must have at most 200 bytes, and no character that is not printed")
    return problems


def _source(source: DataSource, key: str) -> list[str]:
    if source.sources is None:
        return [] if source.path else [f"{key}.path is missing: set it to a file, a glob or a list of them"]
    problems = [] if source.sources else [f"{key}.sources is empty: give it at least one {{path, format, weight}}"]
    if source.path:
        problems.append(f"{key}.path and {key}.sources are both set: sources replace path, so set one of them to null")
    for index, entry in enumerate(source.sources):
        if not entry.path:
            problems.append(f"{key}.sources[{index}].path is missing: set it to a file, a glob or a list of them")
    return problems


def _formats(recipe: Recipe) -> list[str]:
    """Rows of each format are for some of the methods."""
    problems = []
    for name, split in (("train", recipe.data.train), ("val", recipe.data.val)):
        if not isinstance(split, DataSource):
            continue
        named = [(f"data.{name}.format", split.format)]
        named += [(f"data.{name}.sources[{i}].format", source.format) for i, source in enumerate(split.sources or [])]
        for key, format in named:
            if (why := spec_of(recipe).refuses(recipe, format)) is not None:
                problems.append(f"{key}={format}: {why}")
    return problems


def _columns(recipe: Recipe) -> list[str]:
    """The names of columns are those that the format takes; and stand beside the path that they are for."""
    problems, spec = [], spec_of(recipe)
    label = spec.label(recipe)
    unknown = partial(columns.unknown, more=[label.column] if label else [])
    for name, split in (("train", recipe.data.train), ("val", recipe.data.val)):
        if not isinstance(split, DataSource):
            continue
        key, entries = f"data.{name}", split.sources or []
        problems += unknown(split.columns, spec.kind, split.format, f"{key}.columns")
        problems += [
            f"{key}.{option} goes with {key}.path: give each of {key}.sources its own"
            for option in ("columns", "split", "subset", "revision")
            if entries and getattr(split, option) != getattr(DataSource(), option)
        ]
        for index, entry in enumerate(entries):
            at = f"{key}.sources[{index}].columns"
            problems += unknown(entry.columns, spec.kind, entry.format, at)
    return problems


def _names(recipe: Recipe) -> list[str]:
    stages = _schedule(recipe)
    listed = isinstance(recipe.scheduler, list)
    named: list[tuple[str, str, tuple[str, ...]]] = [("optimizer.name", recipe.optimizer.name, OPTIMIZERS)]
    named += [
        (f"scheduler[{index}].name" if listed else "scheduler.name", stage.name, SCHEDULES)
        for index, stage in enumerate(stages)
    ]
    problems = []
    for key, name, known in named:
        if name in known or "." in name:
            continue
        near = key_aliases.meant(re.sub(r"\[\d+\]", "", key), name) or nearest(name, known)
        hint = f"; did you mean {near}?" if near else ", nor an import path such as package.module.Class"
        problems.append(f"{key}={name} is none of {', '.join(known)}{hint}")
    return problems


def _stages(recipe: Recipe) -> list[str]:
    problems = []
    stages, listed = _schedule(recipe), isinstance(recipe.scheduler, list)
    if not stages:
        problems.append("scheduler=[] has no stages: give a list of {name, steps}, or one {name}")
    for index, stage in enumerate(stages):
        if listed and stage.steps is None and index < len(stages) - 1:
            problems.append(f"scheduler[{index}].steps is missing: only the last stage may leave it out")
    return problems


def _schedule(recipe: Recipe) -> list:
    return recipe.scheduler if isinstance(recipe.scheduler, list) else [recipe.scheduler]


def _allowed_changes(recipe: Recipe) -> list[str]:
    if not recipe.checkpoint.allow_changes:
        return []
    known = recipe_keys()
    parents = {".".join(key.split(".")[:depth]) for key in known for depth in range(1, key.count(".") + 1)}
    names = [*parents, *known, *DIGESTS]
    mappings = tuple(f"{key}." for key in known if isinstance(_get(recipe, key), Mapping))  # any name may stand in them
    problems = []
    for name in recipe.checkpoint.allow_changes:
        if name not in names and not name.startswith(mappings):
            near = nearest(name, names)
            hint = f"; did you mean {near}?" if near else ""
            problems.append(f"checkpoint.allow_changes: {name} is no key of a recipe{hint}")
    return problems


def _sequence(recipe: Recipe) -> list[str]:
    """A sequence is cut into 2·cp pieces; some would be nothing but padding in every row."""
    length, cp = recipe.data.max_length, recipe.parallel.cp
    if cp == 1 or length < 2 or length >= 2 * cp:
        return []
    return [
        f"parallel.cp={cp} cuts a sequence into {2 * cp} pieces, and data.max_length={length} has fewer tokens; "
        f"set data.max_length={2 * cp} or more, or parallel.cp={length // 2} or less"
    ]
