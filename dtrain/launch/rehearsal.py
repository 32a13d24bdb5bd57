"""What the processes of a run would refuse before its first step, found without one: `dtrain validate`.

`preflight` is what needs no torch; `run` calls it too. The rest is here, by the functions that a rank calls: its
device, the run's directory, the rows of the data, the model on meta with the headers of its weights, the optimizer and
the start. Nothing is trained, no code of a stranger is imported, and no file stays behind.

Data of up to SMALL_DATA bytes are tokenised whole, as the run does it; of others the first rows of each file. Weights
of up to SMALL_WEIGHTS bytes are compared with those of a run that goes on. What only the run itself can tell is left to
it: ports, servers, memory, files that are damaged within, and what code does that the recipe names.
"""

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from dtrain import metrics, models, resume
from dtrain.checkpoint.files import refuse_unwritable
from dtrain.checkpoint.huggingface import check_fit
from dtrain.checkpoint.rundir import RunDirectory
from dtrain.checkpoint.safetensor_files import WeightFiles, weight_files
from dtrain.checkpoint.store import CheckpointStore
from dtrain.config import Recipe
from dtrain.data import Cursor, Rows, Tokenizer, open_rows
from dtrain.data.sources import first_rows
from dtrain.errors import UserError, in_words
from dtrain.json_files import loads
from dtrain.launch.devices import choose_device, problems, start_device
from dtrain.launch.place import RankPlace
from dtrain.methods import METHODS, Method
from dtrain.methods.facts import facts_of
from dtrain.models.config import read_config
from dtrain.models.layers import CausalLM
from dtrain.optim import (
    NAMES,
    SCHEDULES,
    WHOLE_PARAMETERS_ONLY,
    build_optimizer,
    build_scheduler,
    cannot_step_shards,
    is_torchs,
)
from dtrain.parallel.apply import find_plan, styles_of
from dtrain.parallel.ranks import Ranks
from dtrain.policy.precision import Precision, choose_precision
from dtrain.policy.trained import choose_trained
from dtrain.preflight import has_urls, to_copy
from dtrain.sizing import refuse_idle, settled

SMALL_DATA = 4 << 20
SMALL_WEIGHTS = 256 << 20

T = TypeVar("T")


@dataclass
class Rehearsal:
    """What was found: `problems`, a line each, and where the data tell it the recipe with its sizes and its steps."""

    problems: list[str] = field(default_factory=list)
    settled: Recipe | None = None
    steps: int | None = None

    def ask(self, act: Callable[..., T], *given: Any) -> T | None:
        """What `act` gives; or None, and what it refuses is one of the problems."""
        try:
            return act(*given)
        except (OSError, UserError) as error:
            self.problems.append(in_words(error))
            return None


def rehearse(
    recipe: Recipe, world_size: int, environ: MutableMapping[str, str], *, here: bool, known: Sequence[str] = ()
) -> Rehearsal:
    """What a run of `recipe` in a world of `world_size` processes would refuse.

    here: whether the run is to be on this machine, whose devices are then asked. known: what is known to be wrong;
    with that only what stands by itself is looked at.
    """
    found = Rehearsal()
    device_type = (found.ask(_device, recipe, world_size, environ) if here else None) or "cpu"
    found.problems += metrics.lacking(recipe.metrics)
    run = RunDirectory(recipe.run.directory)
    found.ask(run.look)
    if recipe.checkpoint.export != "none" and run.path.is_dir():
        found.ask(refuse_unwritable, run.export)
    tokenizer = _quietly(Tokenizer.from_directory, recipe.model.directory) if recipe.model.path else None
    if tokenizer is None or any(problem.startswith("data.") for problem in known) or to_copy(recipe):
        return found
    before = len(found.problems)
    cache_dir = recipe.cache if has_urls(recipe) else None  # of copies; rows are kept nowhere
    columns, size = _first_rows(recipe, tokenizer, cache_dir, found)
    if known:
        return found
    rows = {}
    if len(found.problems) == before and size <= SMALL_DATA:
        rows = found.ask(_rows, recipe, tokenizer, cache_dir) or {}
    precision = choose_precision(recipe.train.dtype, device_type, recipe.train.masters)
    model = found.ask(_model, recipe, precision)
    for _, other in facts_of(recipe).other_models(recipe):
        found.ask(_other_model, Path(other))
    sized = found.ask(settled, recipe, rows["train"], world_size) if rows else recipe
    method = found.ask(METHODS[recipe.method], sized) if sized is not None else None
    if sized is None or method is None:
        return found
    if rows:
        columns = {split: one.samples.column_names() for split, one in rows.items()}
        found.settled, found.steps = sized, found.ask(_steps, sized, method, rows["train"])
    found.ask(method.examine, columns)
    if model is not None:
        is_mixed = precision.compute not in (torch.float32, torch.float64)  # one process mixes by FSDP
        _updates(sized, model, found.steps or sized.train.steps or 1000, world_size > 1 or is_mixed, found)
        found.ask(_start, recipe, run, tokenizer, method, model, rows)
    return found


def _quietly(act: Callable[..., T], *given: Any) -> T | None:
    try:
        return act(*given)
    except UserError:  # preflight tells
        return None


def _device(recipe: Recipe, count: int, environ: MutableMapping[str, str]) -> str:
    place = RankPlace(world_size=count, local_world_size=count, environ=environ)
    device = choose_device(recipe.launch.device, place)
    if device.type == "cuda":
        places = [replace(place, rank=rank, local_rank=rank) for rank in range(count)]
        devices = [start_device(torch.device("cuda", one.local_rank), one) for one in places]
        found = problems(devices, recipe, torch.cuda.get_arch_list() if torch.version.cuda else ())
        if found:
            raise UserError("\n".join(found))
    return device.type


def _splits(recipe: Recipe) -> list[str]:
    return ["train"] if recipe.data.val is None else ["train", "val"]


def _given(recipe: Recipe) -> dict[str, Any]:
    """What `open_rows` and `first_rows` are told of a recipe."""
    facts = facts_of(recipe)
    return {"kind": facts.kind, "prompts": facts.prompts(recipe), "seed": recipe.run.seed}


def _first_rows(
    recipe: Recipe, tokenizer: Tokenizer, cache_dir: Path | None, found: Rehearsal
) -> tuple[dict[str, list[str]], int]:
    """Of each split the columns that its first rows have, and the bytes of all files, those that are packed counted
    tenfold. Each file's first mistake is one of the problems."""
    columns: dict[str, list[str]] = {}
    size, given = 0, {**_given(recipe), "tokenizer": tokenizer, "cache_dir": cache_dir}
    for split in _splits(recipe):
        reads = found.ask(partial(first_rows, recipe.data, split=split, **given)) or []
        size += sum(file.stat().st_size * (10 if file.suffix in (".gz", ".parquet") else 1) for file, _ in reads)
        chunks = [found.ask(read) for _, read in reads]
        rows = [loads(text)["columns"] for chunk in chunks if chunk for text in chunk.columns if text]
        columns[split] = list(dict.fromkeys(name for row in rows for name in row))
    return columns, size


def _rows(recipe: Recipe, tokenizer: Tokenizer, cache_dir: Path | None) -> dict[str, Rows]:
    given = {**_given(recipe), "tokenizer": tokenizer, "cache_dir": cache_dir, "epochs": recipe.train.epochs}
    return {
        split: open_rows(recipe.data, split=split, say=lambda line: None, progress=False, **given)
        for split in _splits(recipe)
    }


def _model(recipe: Recipe, precision: Precision) -> CausalLM:
    """The model on meta, as a rank builds it, once the headers of its weights fit it."""
    model = models.build(read_config(recipe.model.directory), dtype=precision.master, device="meta")
    choose_trained(model, recipe, precision.compute)
    if recipe.parallel.tp > 1 and not isinstance(recipe.parallel.custom_plan, str):
        plan = find_plan(recipe.parallel.custom_plan, model)
        styles_of(model, plan, sequence_parallel=recipe.parallel.sequence_parallel)
    if recipe.model.init == "pretrained":
        check_fit(model, WeightFiles(recipe.model.directory))
    return model


def _other_model(path: Path) -> None:
    check_fit(models.build(read_config(path), device="meta"), WeightFiles(path))


def _steps(recipe: Recipe, method: Method, rows: Rows) -> int:
    steps = recipe.train.steps or method.steps_left(rows, Cursor(), {})
    refuse_idle(recipe, rows, steps)
    return steps


def _updates(recipe: Recipe, model: CausalLM, steps: int, is_sharded: bool, found: Rehearsal) -> None:
    """The optimizer and its schedule, where no stranger's code is needed for them."""
    optimizer: torch.optim.Optimizer | None = None
    if recipe.optimizer.name in NAMES or is_torchs(recipe.optimizer.name):
        optimizer = found.ask(build_optimizer, recipe.optimizer, model.named_parameters(), recipe.run.seed)
        if is_sharded and isinstance(optimizer, WHOLE_PARAMETERS_ONLY):
            found.problems.append(cannot_step_shards(recipe.optimizer.name))
    stages = recipe.scheduler if isinstance(recipe.scheduler, list) else [recipe.scheduler]
    if all(stage.name in SCHEDULES for stage in stages):
        optimizer = optimizer or torch.optim.SGD([torch.zeros(())], lr=recipe.optimizer.lr)
        found.ask(build_scheduler, recipe.scheduler, optimizer, steps)


def _start(
    recipe: Recipe, run: RunDirectory, tokenizer: Tokenizer, method: Method, model: CausalLM, rows: dict[str, Rows]
) -> None:
    """Where the run would start, and whether what it was saved with allows that."""
    ranks = Ranks(alone=True)
    store = CheckpointStore(run.checkpoints, ranks)
    start = resume.find_start(recipe, run, store, method.needs_start is not None, ranks, lambda line: None, deep=False)
    resume.refuse_other_adapter(recipe, model, start)
    if start.state is None:
        return
    known: dict[str, str] = {}
    directories = [Path(other) for _, other in facts_of(recipe).other_models(recipe)]
    directories += [recipe.model.directory] * (recipe.model.init == "pretrained")
    if sum(file.stat().st_size for one in directories for file in weight_files(one)) <= SMALL_WEIGHTS:
        known = resume.identities(recipe, tokenizer, ranks)
    for split, key in (("train", "data.fingerprint"), ("val", "data.val.fingerprint")):
        if split in rows:
            known[key] = rows[split].samples.identity
    # A place whose content was not read may hold the same.
    unread = [key for key, of in resume.PLACES.items() if of not in known]
    allowed = replace(recipe.checkpoint, allow_changes=[*recipe.checkpoint.allow_changes, *unread])
    fingerprint = rows["train"].fingerprint if rows else start.state["data_fingerprint"]
    resume.compare(replace(recipe, checkpoint=allowed), start, known, fingerprint)
