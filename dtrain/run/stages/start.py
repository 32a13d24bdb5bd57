"""Stage start: the checkpoint that a run goes on from, and the step that it ends with."""

from typing import TYPE_CHECKING

from dtrain.checkpoint.dcp.store import CheckpointStore
from dtrain.data import Cursor
from dtrain.run import resume
from dtrain.run.host import Host

if TYPE_CHECKING:
    from dtrain.run.spec import RunSpec


def resolve(spec: "RunSpec", host: Host) -> bool:
    """Find the start and its digests. Collective."""
    recipe, needs_start = spec.recipe, spec.method.needs_start
    spec.store = CheckpointStore(spec.run.checkpoints, host.ranks)
    say = host.recorder.say
    spec.start = resume.find_start(recipe, spec.run, spec.store, needs_start is not None, host.ranks, say)
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
