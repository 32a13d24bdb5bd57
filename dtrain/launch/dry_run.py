"""Dry run: all that the processes of a run would refuse before its first step, without one: `dtrain validate`.

`preflight` is what needs no torch; `run` calls it too. The rest is here, by the functions that a rank calls: its
device, the run's directory, the rows of the data, the model on meta with the headers of its weights, the optimizer and
the start. Nothing is trained, no code of a stranger is imported, and no file stays behind.

Data of up to SMALL_DATA bytes are tokenised whole, as the run does it; of others the first rows of each file, and the
shape of all rows that LOOK_SECONDS allow, which `DryRun.notes` tell. Weights of up to SMALL_WEIGHTS bytes are
compared with those of a run that goes on. Sets of `eval` are read as the run does. What only the run itself can tell is
left to it: ports, servers, memory, files that are damaged within, what is still to come from the hub, and what code
does that the recipe names.
"""

import time
from collections.abc import Callable, Collection, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import torch

from dtrain.base.errors import UserError, in_words
from dtrain.base.files import refuse_unwritable
from dtrain.base.json_files import loads
from dtrain.base.ranks import Ranks
from dtrain.checkpoint.dcp.store import CheckpointStore
from dtrain.checkpoint.huggingface.safetensor_files import weight_files
from dtrain.data import Cursor, Rows, Tokenizer, open_rows
from dtrain.data.formats.plain_prompts import describe
from dtrain.data.sources.sources import Look, looks
from dtrain.launch.devices import choose_device, problems, start_device
from dtrain.launch.place import RankPlace
from dtrain.methods import METHODS, Method
from dtrain.methods.spec import REWARD_MODEL, spec_of
from dtrain.models.common.decoder import CausalLM
from dtrain.models.read_config import read_config
from dtrain.optim.update import (
    SCHEDULES,
    build_scheduler,
)
from dtrain.policy.build import choose_attention, choose_delta
from dtrain.policy.checkpoint import weights_of
from dtrain.policy.precision import Precision, choose_precision
from dtrain.recipe import Recipe
from dtrain.run import eval_sets, metrics, resume, sizes
from dtrain.run.directory import RunDirectory
from dtrain.run.dry_run import dry_run_model, dry_run_optimizer, dry_run_other_model
from dtrain.run.preflight import has_urls, to_copy
from dtrain.run.sizes import refuse_idle, resolve_batch_size

SMALL_DATA = 4 << 20
LOOK_SECONDS = 5.0
SMALL_WEIGHTS = 256 << 20

T = TypeVar("T")


@dataclass
class DryRun:
    """Result of a dry run: `problems` and `notes`, a line each; where the data tell it, the recipe with its sizes, and
    its steps."""

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    sized: Recipe | None = None
    steps: int | None = None

    def ask(self, act: Callable[..., T], *arguments: Any) -> T | None:
        """Return `act(*arguments)`; or None, and what it refuses is one of the problems."""
        try:
            return act(*arguments)
        except (OSError, UserError) as error:
            self.problems.append(in_words(error))
            return None


def dry_run(
    recipe: Recipe,
    world_size: int,
    environ: MutableMapping[str, str],
    *,
    here: bool,
    known: Sequence[str] = (),
    awaited: Collection[str] = (),
) -> DryRun:
    """Return the problems of a run of `recipe` in a world of `world_size` processes, and its notes and sizes.

    here: whether the run is to be on this machine, whose devices are then asked. known: what is known to be wrong;
    with that only what stands by itself is looked at. awaited: keys of what the run downloads first: weights that are
    not looked at, or data.
    """
    result = DryRun()
    device_type = (result.ask(_device, recipe, world_size, environ) if here else None) or "cpu"
    result.problems += metrics.lacking(recipe.metrics)
    run = RunDirectory(recipe.run.directory)
    result.ask(run.look)
    if recipe.checkpoint.export != "none" and run.path.is_dir():
        result.ask(refuse_unwritable, run.export)
    tokenizer = _quietly(Tokenizer.from_directory, recipe.model.directory) if recipe.model.path else None
    if tokenizer is None:
        return result
    before = len(result.problems)
    columns, rows, trained_plain = _data(recipe, tokenizer, result, known, awaited)
    is_read = bool(columns) and len(result.problems) == before
    if known:
        return result
    for eval_set in eval_sets.sets(recipe):
        if f"{eval_set.key}.path" not in awaited:
            evaluations = import_module("dtrain.run.evaluations")
            result.ask(evaluations.read_set, recipe, eval_set, tokenizer, trained_plain, result.notes.append)
    precision = choose_precision(recipe.train.dtype, device_type, recipe.train.masters)
    model = result.ask(partial(dry_run_model, recipe, precision, has_weights="model.path" not in awaited))
    for key, other in spec_of(recipe).other_models(recipe):
        if key not in awaited:
            result.ask(partial(dry_run_other_model, Path(other), is_classifier=key == REWARD_MODEL))
    sized = result.ask(resolve_batch_size, recipe, rows["train"], world_size) if rows else recipe
    method = result.ask(METHODS[recipe.method], sized) if sized is not None else None
    if sized is None or method is None:
        return result
    if rows:
        columns = {split: rows_of.samples.column_names() for split, rows_of in rows.items()}
        result.sized, result.steps = sized, result.ask(_steps, sized, method, rows["train"])
    steps = result.steps or sized.train.steps
    result.notes += [] if steps is None else sizes.notes(sized, steps)
    if is_read:
        result.ask(method.examine, columns, {split: len(rows_of.samples) for split, rows_of in rows.items()})
    if here and (rows or recipe.data.packing != "auto"):
        device, longest = torch.device(device_type), method.spec.longest_row(sized)
        model_config = result.ask(read_config, recipe.model.directory)
        result.ask(choose_attention, sized, model_config, precision, device, longest)
        result.ask(choose_delta, sized, model_config, precision, device)
        result.ask(method.refuse_device, device)
    if model is not None:
        _updates(sized, model, steps or 1000, world_size, precision, result)
        result.ask(_start, recipe, run, tokenizer, method, model, rows, awaited)
    return result


def _quietly(act: Callable[..., T], *arguments: Any) -> T | None:
    try:
        return act(*arguments)
    except (OSError, UserError):  # preflight tells
        return None


def _device(recipe: Recipe, count: int, environ: MutableMapping[str, str]) -> str:
    place = RankPlace(world_size=count, local_world_size=count, environ=environ)
    device = choose_device(recipe.launch.device, place)
    if device.type == "cuda":
        places = [replace(place, rank=rank, local_rank=rank) for rank in range(count)]
        devices = [start_device(torch.device("cuda", each.local_rank), each) for each in places]
        refusals = problems(devices, recipe, torch.cuda.get_arch_list() if torch.version.cuda else ())
        if refusals:
            raise UserError("\n".join(refusals))
    return device.type


def _splits(recipe: Recipe) -> list[str]:
    return ["train"] if recipe.data.val is None else ["train", "val"]


def _row_options(recipe: Recipe) -> dict[str, Any]:
    """Return the arguments of `open_rows` and `looks` that follow from a recipe."""
    spec = spec_of(recipe)
    return {
        "kind": spec.kind,
        "prompts": spec.prompts(recipe),
        "label": spec.label(recipe),
        "seed": recipe.run.seed,
    }


def _data(
    recipe: Recipe, tokenizer: Tokenizer, result: DryRun, known: Sequence[str], awaited: Collection[str]
) -> tuple[dict[str, list[str]], dict[str, Rows], int]:
    """Return by split the columns that its first rows have, and its rows where the files are small; and how many of the
    training rows that were read have a plain string as their prompt. Each file's first mistake is one of the
    problems."""
    columns: dict[str, list[str]] = {}
    plain: dict[str, int] = {}
    of_rows = ("data.", "data=", "grpo.tools")
    is_unread = any(line.startswith(of_rows) for line in (*known, *awaited)) or to_copy(recipe)
    options = None if is_unread else result.ask(_row_options, recipe)
    if options is None:
        return columns, {}, 0
    before = len(result.problems)
    cache_dir = recipe.cache if has_urls(recipe) else None  # of copies; rows are kept nowhere
    options = {**options, "tokenizer": tokenizer, "cache_dir": cache_dir}
    files: list[tuple[str, Look]] = []
    for split in _splits(recipe):
        opened = result.ask(partial(looks, recipe.data, split=split, **options)) or []
        files += [(f"data.{split}", look) for look in opened]
        chunks = [result.ask(look.first) for look in opened]
        rows = [loads(text)["columns"] for chunk in chunks if chunk for text in chunk.columns if text]
        columns[split] = list(dict.fromkeys(name for row in rows for name in row))
        plain[split] = sum(chunk.plain_prompts for chunk in chunks if chunk)
    encoders = {key: look.encoder for key, look in files}
    if len(result.problems) > before:
        return columns, {}, plain["train"]
    is_small = sum(_size(look.file) for _, look in files) <= SMALL_DATA
    rows_of = (result.ask(_rows, recipe, tokenizer, cache_dir) if is_small and not known else None) or {}
    plain |= {split: rows.samples.meta["plain_prompts"] for split, rows in rows_of.items()}
    for split, count in plain.items():
        encoder = encoders[f"data.{split}"]
        result.notes += describe(f"{split} data", count, encoder.prompts_as, encoder.template, bool(rows_of))
    if not is_small:
        _shapes(files, result)
    return columns, rows_of, plain["train"]


def _size(file: Path) -> int:
    """Bytes, those that are packed counted tenfold."""
    return file.stat().st_size * (10 if file.suffix.lower() in (".gz", ".parquet") else 1)


def _shapes(files: Sequence[tuple[str, Look]], result: DryRun) -> None:
    """The shape of the rows of large files, and in the time that is left what the template and the lengths refuse. Each
    file is given an equal part of the time."""
    end, before = time.monotonic() + LOOK_SECONDS, len(result.problems)
    files = list({look.file: (key, look) for key, look in reversed(files)}.values())  # a share of a file is one of both
    for whole, what in ((False, "not looked at"), (True, "looked at without the chat template and data.too_long")):
        wanted = [file for file in files if not (whole and file[1].shape_is_all)]
        unread = []
        for index, (key, look) in enumerate(sorted(wanted, key=lambda file: _size(file[1].file))):
            now = time.monotonic()
            line = result.ask(look.rest, now + max(0.0, end - now) / (len(wanted) - index), whole)
            if line is not None:
                unread.append(f"{key}: {look.file} from line {line} on")
        if unread:
            more = f", and of {len(unread) - 3} more files" if len(unread) > 3 else ""
            listed = "; ".join(unread[:3])
            result.notes.append(f"note: {what}, for want of time: {listed}{more}. The run reads it all")
        if unread or len(result.problems) > before:
            return


def _rows(recipe: Recipe, tokenizer: Tokenizer, cache_dir: Path | None) -> dict[str, Rows]:
    options = {**_row_options(recipe), "tokenizer": tokenizer, "cache_dir": cache_dir, "epochs": recipe.train.epochs}
    return {
        split: open_rows(recipe.data, split=split, say=lambda line: None, progress=False, **options)
        for split in _splits(recipe)
    }


def _steps(recipe: Recipe, method: Method, rows: Rows) -> int:
    steps = recipe.train.steps or method.steps_left(rows, Cursor(), {})
    refuse_idle(recipe, rows, steps)
    return steps


def _updates(
    recipe: Recipe, model: CausalLM, steps: int, world_size: int, precision: Precision, result: DryRun
) -> None:
    """The optimizer and its schedule, where no stranger's code is needed for them."""
    optimizer = result.ask(dry_run_optimizer, recipe, model, world_size, precision)
    stages = recipe.scheduler if isinstance(recipe.scheduler, list) else [recipe.scheduler]
    if all(stage.name in SCHEDULES for stage in stages):
        optimizer = optimizer or torch.optim.SGD([torch.zeros(())], lr=recipe.optimizer.lr)
        result.ask(build_scheduler, recipe.scheduler, optimizer, steps)


def _start(
    recipe: Recipe,
    run: RunDirectory,
    tokenizer: Tokenizer,
    method: Method,
    model: CausalLM,
    rows: dict[str, Rows],
    awaited: Collection[str],
) -> None:
    """Check that the run could start where it would, by what it was saved with."""
    ranks = Ranks(alone=True)
    store = CheckpointStore(run.checkpoints, ranks)
    start = resume.find_start(recipe, run, store, method.needs_start is not None, ranks, lambda line: None, deep=False)
    known: dict[str, str] = {}
    directories = [Path(other) for _, other in spec_of(recipe).other_models(recipe)]
    if recipe.model.init == "pretrained":
        directories.append(recipe.model.directory)
    if (
        not awaited
        and sum(file.stat().st_size for directory in directories for file in weight_files(directory)) <= SMALL_WEIGHTS
    ):
        known = resume.identities(recipe, tokenizer, ranks)
    if start.weights is not None:
        _weights(recipe, model, start, known)
    if start.state is None:
        return
    for split, key in (("train", "data.fingerprint"), ("val", "data.val.fingerprint")):
        if split in rows:
            known[key] = rows[split].samples.identity
    # A place whose content was not read may hold the same.
    unread = [key for key, of in resume.PLACES.items() if of not in known]
    allowed = replace(recipe.checkpoint, allow_changes=[*recipe.checkpoint.allow_changes, *unread])
    resume.compare(replace(recipe, checkpoint=allowed), start, known, rows.get("train"))


def _weights(recipe: Recipe, model: CausalLM, start: resume.Start, known: dict[str, str]) -> None:
    """Check that the weights of `checkpoint.init_from` are of this model."""
    assert start.weights is not None
    store, step = start.weights
    resume.refuse_other_adapter(recipe, model, start)
    weights = weights_of(model, store, step)
    if not weights.is_whole and known:
        resume.refuse_other_base(start, known)
    store.refuse_misfit(step, weights.wanted, weights.cast)
