"""Dry run of a run: the stages of `resolve` on one process that stands for all, with every problem at once.

Files of up to SMALL_DATA bytes are tokenised whole, as the run does it; of others the first rows of each file are read,
and the shape of all rows that LOOK_SECONDS allow. Weights of up to SMALL_WEIGHTS bytes are compared with those of a run
that goes on. Notes say what was not read. No file stays behind.
"""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch

from dtrain.base.errors import UserError, in_words
from dtrain.base.json_files import loads
from dtrain.base.ranks import Ranks
from dtrain.checkpoint.dcp.store import CheckpointStore
from dtrain.checkpoint.huggingface.safetensor_files import weight_files
from dtrain.data.formats.encoder import describe
from dtrain.data.sources.sources import Look, looks
from dtrain.methods.spec import spec_of
from dtrain.models.common.decoder import CausalLM
from dtrain.optim.update import SCHEDULES, build_scheduler
from dtrain.policy.build import choose_attention, choose_delta
from dtrain.policy.checkpoint import weights_of
from dtrain.run import eval_sets, metrics, resume
from dtrain.run.host import Host
from dtrain.run.preflight_data import has_urls, to_copy
from dtrain.run.spec import RunSpec
from dtrain.run.stages import tokenizer
from dtrain.run.stages.data import open_splits, row_options, splits

SMALL_DATA = 4 << 20
LOOK_SECONDS = 5.0
SMALL_WEIGHTS = 256 << 20

T = TypeVar("T")


def _tokenizer(spec: RunSpec, host: "DryHost") -> bool:
    """Read the tokenizer; without one the dry run ends, and `preflight` has told why."""
    try:
        return bool(spec.recipe.model.path) and tokenizer.resolve(spec, host)
    except (OSError, UserError):
        return False


def _data(spec: RunSpec, host: "DryHost") -> bool:
    """Look at rows and at the sets of `eval`; with problems that are known already the dry run ends here."""
    _look_at_rows(spec, host)
    if host.known:
        return False
    _look_at_sets(spec, host)
    return True


def _start(spec: RunSpec, host: "DryHost") -> bool:
    """Check kernels, the schedule, and that the run could start where it would."""
    if spec.world.is_here and (spec.rows or spec.recipe.data.packing != "auto"):
        _kernels(spec, host)
    if spec.model is not None:
        _schedule(spec, host)
        host.ask(_look_at_start, spec, spec.model, host)
    return True


def _kernels(spec: RunSpec, host: "DryHost") -> None:
    """Refuse what this machine's device cannot do. A run chooses where its ranks build the model: they must agree on
    what each of their devices proves."""
    recipe, method = spec.recipe, spec.method
    device, longest = torch.device(spec.world.device_type), method.spec.longest_row(recipe)
    host.ask(choose_attention, recipe, spec.model_config, spec.precision, device, longest)
    host.ask(choose_delta, recipe, spec.model_config, spec.precision, device)
    host.ask(method.refuse_device, device)


def _look_at_rows(spec: RunSpec, host: "DryHost") -> None:
    """Read the first rows of every file, and the rows where the files are small. Each file's first mistake is one of
    the problems."""
    recipe, before = spec.recipe, len(host.problems)
    of_rows = ("data.", "data=", "grpo.tools")
    is_unread = any(line.startswith(of_rows) for line in (*host.known, *host.awaited)) or to_copy(recipe)
    options = None if is_unread else host.ask(row_options, spec, _copies(spec))
    if options is None:
        return
    plain: dict[str, int] = {}
    files: list[tuple[str, Look]] = []
    start = len(host.problems)
    for split in splits(spec):
        opened = host.ask(partial(looks, recipe.data, split=split, **options)) or []
        files += [(f"data.{split}", look) for look in opened]
        chunks = [host.ask(look.first) for look in opened]
        rows = [loads(text)["columns"] for chunk in chunks if chunk for text in chunk.columns if text]
        spec.columns[split] = list(dict.fromkeys(name for row in rows for name in row))
        plain[split] = sum(chunk.plain_prompts for chunk in chunks if chunk)
    spec.plain_prompts = plain["train"]
    if len(host.problems) > start:
        return
    encoders = {key: look.encoder for key, look in files}
    is_small = sum(_size(look.file) for _, look in files) <= SMALL_DATA
    if is_small and not host.known:
        host.ask(open_splits, spec, _copies(spec), _drop, False)
    plain |= {split: rows.samples.meta["plain_prompts"] for split, rows in spec.rows.items()}
    spec.plain_prompts = plain["train"]
    for split, count in plain.items():
        encoder = encoders[f"data.{split}"]
        host.notes += describe(f"{split} data", count, encoder.prompts_as, encoder.template, bool(spec.rows))
    if not is_small:
        _shapes(files, host)
    spec.is_data_read = bool(spec.columns) and len(host.problems) == before


def _look_at_sets(spec: RunSpec, host: "DryHost") -> None:
    """Read the sets of `eval` as the run does."""
    recipe = spec.recipe
    for eval_set in eval_sets.sets(recipe):
        if f"{eval_set.key}.path" not in host.awaited:
            read_set = import_module("dtrain.run.evaluations").read_set
            host.ask(read_set, recipe, eval_set, spec.tokenizer, spec.plain_prompts, host.notes.append)


def _copies(spec: RunSpec) -> Path | None:
    """Return where copies of URLs are; rows are kept nowhere."""
    return spec.recipe.cache if has_urls(spec.recipe) else None


def _drop(line: str) -> None:
    """Print nothing of what a run would say while it reads."""


def _size(file: Path) -> int:
    """Bytes, those that are packed counted tenfold."""
    return file.stat().st_size * (10 if file.suffix.lower() in (".gz", ".parquet") else 1)


def _shapes(files: Sequence[tuple[str, Look]], host: "DryHost") -> None:
    """The shape of the rows of large files, and in the time that is left what the template and the lengths refuse. Each
    file is given an equal part of the time."""
    end, before = time.monotonic() + LOOK_SECONDS, len(host.problems)
    files = list({look.file: (key, look) for key, look in reversed(files)}.values())  # a share of a file is one of both
    for whole, what in ((False, "not looked at"), (True, "looked at without the chat template and data.too_long")):
        wanted = [file for file in files if not (whole and file[1].shape_is_all)]
        unread = []
        for index, (key, look) in enumerate(sorted(wanted, key=lambda file: _size(file[1].file))):
            now = time.monotonic()
            line = host.ask(look.rest, now + max(0.0, end - now) / (len(wanted) - index), whole)
            if line is not None:
                unread.append(f"{key}: {look.file} from line {line} on")
        if unread:
            more = f", and of {len(unread) - 3} more files" if len(unread) > 3 else ""
            listed = "; ".join(unread[:3])
            host.notes.append(f"note: {what}, for want of time: {listed}{more}. The run reads it all")
        if unread or len(host.problems) > before:
            return


def _schedule(spec: RunSpec, host: "DryHost") -> None:
    """Build the schedule, where no stranger's code is needed for it."""
    recipe, steps = spec.recipe, spec.steps or spec.recipe.train.steps or 1000
    stages = recipe.scheduler if isinstance(recipe.scheduler, list) else [recipe.scheduler]
    if all(stage.name in SCHEDULES for stage in stages):
        optimizer = spec.optimizer or torch.optim.SGD([torch.zeros(())], lr=recipe.optimizer.lr)
        host.ask(build_scheduler, recipe.scheduler, optimizer, steps)


def _look_at_start(spec: RunSpec, model: CausalLM, host: "DryHost") -> None:
    """Check that the run could start where it would, by what it was saved with. No file is read whole."""
    recipe, ranks = spec.written, host.ranks
    store = CheckpointStore(spec.run.checkpoints, ranks)
    needs_start = spec.method.needs_start is not None
    start = resume.find_start(recipe, spec.run, store, needs_start, ranks, _drop, deep=False)
    directories = [Path(other) for _, other in spec_of(recipe).other_models(recipe)]
    if recipe.model.init == "pretrained":
        directories.append(recipe.model.directory)
    known: dict[str, str] = {}
    if not host.awaited:  # what is downloaded first has no files here
        weights = [file for directory in directories for file in weight_files(directory)]
        if sum(file.stat().st_size for file in weights) <= SMALL_WEIGHTS:
            known = resume.identities(recipe, spec.tokenizer, ranks)
    if start.weights is not None:
        _weights(spec, model, start, known)
    if start.state is None:
        return
    for split, key in (("train", "data.fingerprint"), ("val", "data.val.fingerprint")):
        if split in spec.rows:
            known[key] = spec.rows[split].samples.identity
    # A place whose content was not read may hold the same.
    unread = [key for key, of in resume.PLACES.items() if of not in known]
    allowed = replace(recipe.checkpoint, allow_changes=[*recipe.checkpoint.allow_changes, *unread])
    resume.compare(replace(recipe, checkpoint=allowed), start, known, spec.rows.get("train"))


def _weights(spec: RunSpec, model: CausalLM, start: resume.Start, known: dict[str, str]) -> None:
    """Check that the weights of `checkpoint.init_from` are of this model."""
    assert start.weights is not None
    store, step = start.weights
    resume.refuse_other_adapter(spec.written, model, start)
    weights = weights_of(model, store, step)
    if not weights.is_whole and known:
        resume.refuse_other_base(start, known)
    store.refuse_misfit(step, weights.wanted, weights.cast)


class DryHost(Host):
    """`dtrain validate`: problems are collected, one process stands for all, and no file stays behind.

    known: what is known to be wrong; with that only what stands by itself is looked at. awaited: keys of what the run
    downloads first: weights that are not looked at, or data. notes: lines for the user.
    """

    stages = MappingProxyType({"tokenizer": _tokenizer, "data": _data, "start": _start})

    def __init__(self, known: Sequence[str] = (), awaited: Collection[str] = ()):
        self.known, self.awaited = known, awaited
        self.ranks = Ranks(alone=True)
        self.problems: list[str] = []
        self.notes: list[str] = []

    def ask(self, act: Callable[..., T], *arguments: Any) -> T | None:
        """Return `act(*arguments)`; or None, and what it refuses is one of the problems."""
        try:
            return act(*arguments)
        except (OSError, UserError) as error:
            self.problems.append(in_words(error))
            return None

    def first(self, act: Callable[[], object]) -> None:
        """Do as `ask`."""
        self.ask(act)

    def note(self, lines: Sequence[str]) -> None:
        """Keep lines for the user."""
        self.notes += lines

    def identify(self, spec: RunSpec) -> None:
        """Leave the digests to the stage start, where they are compared."""

    def open_outputs(self, spec: RunSpec) -> None:
        """Look whether the run's directory could be taken and its metrics' packages are there."""
        self.problems += metrics.lacking(spec.recipe.metrics)
        self.ask(spec.run.look)
