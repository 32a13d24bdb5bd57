"""Spec of a run: everything that a recipe, its files and a world decide, decided once by `resolve`.

A stage (`dtrain.run.stages`) fills its fields of the spec, or has problems. `Trainer` builds what the spec says;
`dtrain validate` resolves the same stages in the same order and prints. They differ in their `Host` alone: on the ranks
of a run the first problem ends it, on every rank; a `DryHost` collects problems, keeps no file and reads large data and
weights in part. Nothing is allocated: the model is on meta, of weights the headers are read.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch.optim import Optimizer

from dtrain.checkpoint.dcp.store import CheckpointStore
from dtrain.data import Rows, Tokenizer
from dtrain.methods import Method
from dtrain.models.common.config import ModelConfig
from dtrain.models.common.decoder import CausalLM
from dtrain.policy.precision import Precision
from dtrain.recipe import Recipe, Sizes
from dtrain.run.directory import RunDirectory
from dtrain.run.host import Host
from dtrain.run.resume import Start
from dtrain.run.stages import Stage, data, model, outputs, sizes, start, tokenizer


@dataclass(frozen=True)
class World:
    """World that a run is resolved for: its processes and the type of their devices. is_here: whether it is this
    machine's, whose devices may then be asked."""

    size: int
    device_type: str = "cpu"
    is_here: bool = True


@dataclass
class RunSpec:
    """Everything that is decided of a run, in the order of the stages; a field is set by the stage that it stands
    under, and a dry run sets those that it can.

    recipe: as written, and from the stage data on with what the data decide: packing, then the batch; written: as it
    was given.
    """

    recipe: Recipe
    world: World
    written: Recipe = field(init=False)
    run: RunDirectory = field(init=False)
    # tokenizer
    tokenizer: Tokenizer = field(init=False)
    # model
    precision: Precision = field(init=False)
    model_config: ModelConfig = field(init=False)
    model: CausalLM | None = None  # on meta, on the first rank
    optimizer: Optimizer | None = None  # over it
    identities: dict[str, str] = field(default_factory=dict)  # digests of what the run reads at its start
    # data: by split
    rows: dict[str, Rows] = field(default_factory=dict)
    columns: dict[str, list[str]] = field(default_factory=dict)
    plain_prompts: int = 0  # of the training rows
    is_data_read: bool = False
    # sizes
    method: Method = field(init=False)
    sizes: Sizes = field(init=False)
    steps: int | None = None  # of a fresh run
    # start
    store: CheckpointStore = field(init=False)
    start: Start = field(init=False)
    total_steps: int = field(init=False)

    def __post_init__(self) -> None:
        self.written = self.recipe
        self.run = RunDirectory(self.recipe.run.directory)


STAGES: Mapping[str, Stage] = {
    "outputs": outputs.resolve,
    "tokenizer": tokenizer.resolve,
    "model": model.resolve,
    "data": data.resolve,
    "sizes": sizes.resolve,
    "start": start.resolve,
}


def resolve(recipe: Recipe, world: World, host: Host, until: str = "start") -> RunSpec:
    """Return the spec of `recipe` in `world`, resolved up to the stage `until`. Collective on the ranks of a run.

    A dry run ends with the stage after which nothing can be looked at; its problems are in `host.problems`. Raises
    UserError.
    """
    spec = RunSpec(recipe, world)
    for name, stage in {**STAGES, **host.stages}.items():
        if not stage(spec, host) or name == until:
            break
    return spec
