"""Stage start: the checkpoint that a run goes on from, what changed since, and the step that it ends with."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from dtrain.checkpoint.dcp.store import CheckpointStore
from dtrain.checkpoint.huggingface.safetensor_files import weight_files
from dtrain.data import Cursor
from dtrain.methods.spec import spec_of
from dtrain.models.common.decoder import CausalLM
from dtrain.optim.update import SCHEDULES, build_scheduler
from dtrain.policy.saved import weights_of
from dtrain.run import resume
from dtrain.run.host import DryHost, Host

if TYPE_CHECKING:
    from dtrain.run.spec import RunSpec

SMALL_WEIGHTS = 256 << 20  # bytes that a dry run reads, to compare them with those of a run that goes on


def resolve(spec: "RunSpec", host: Host) -> bool:
    """Find the start and its digests. A dry run also checks the schedule, and that the weights fit the model."""
    if isinstance(host, DryHost):
        if spec.model is not None:
            _schedule(spec, host)
            host.ask(_look, spec, spec.model, host)
        return True
    recipe, method = spec.recipe, spec.method
    spec.store = CheckpointStore(spec.run.checkpoints, host.ranks)
    needs_start = method.needs_start
    spec.start = resume.find_start(recipe, spec.run, spec.store, needs_start is not None, host.ranks, host.say)
    if needs_start is not None:
        identity = resume.start_identity(recipe, spec.start, spec.identities, needs_start)
        spec.identities[f"{recipe.method}.reference"] = identity
    spec.total_steps = recipe.train.steps or _last_step_of_epochs(spec)
    return True


def _last_step_of_epochs(spec: "RunSpec") -> int:
    """The step that `train.epochs` ends with: those of the start and what is left. Where the start was saved with other
    epochs or another global_batch, its rows are not step × batch."""
    start = spec.start
    saved = start.state["method"] if start.state else {}
    return start.step + spec.method.source.steps_left(spec.rows["train"], Cursor(*start.cursor), saved)


def _schedule(spec: "RunSpec", host: DryHost) -> None:
    """Build the schedule, where no stranger's code is needed for it."""
    recipe, steps = spec.recipe, spec.steps or spec.recipe.train.steps or 1000
    stages = recipe.scheduler if isinstance(recipe.scheduler, list) else [recipe.scheduler]
    if all(stage.name in SCHEDULES for stage in stages):
        optimizer = spec.optimizer or torch.optim.SGD([torch.zeros(())], lr=recipe.optimizer.lr)
        host.ask(build_scheduler, recipe.scheduler, optimizer, steps)


def _look(spec: "RunSpec", model: CausalLM, host: DryHost) -> None:
    """Check that the run could start where it would, by what it was saved with. No file is read whole."""
    recipe, ranks = spec.written, host.ranks
    store = CheckpointStore(spec.run.checkpoints, ranks)
    needs_start = spec.method.needs_start is not None
    start = resume.find_start(recipe, spec.run, store, needs_start, ranks, host.say, deep=False)
    directories = [Path(other) for _, other in spec_of(recipe).other_models(recipe)]
    if recipe.model.init == "pretrained":
        directories.append(recipe.model.directory)
    weights = [file for directory in directories for file in weight_files(directory)]
    known: dict[str, str] = {}
    if not host.awaited and sum(file.stat().st_size for file in weights) <= SMALL_WEIGHTS:
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


def _weights(spec: "RunSpec", model: CausalLM, start: resume.Start, known: dict[str, str]) -> None:
    """Check that the weights of `checkpoint.init_from` are of this model."""
    assert start.weights is not None
    store, step = start.weights
    resume.refuse_other_adapter(spec.written, model, start)
    weights = weights_of(model, store, step)
    if not weights.is_whole and known:
        resume.refuse_other_base(start, known)
    store.refuse_misfit(step, weights.wanted, weights.cast)
