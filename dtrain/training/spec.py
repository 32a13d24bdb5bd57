"""Spec of a run: everything that a recipe, its files and a world decide, decided once by `resolve`.

A stage (`dtrain.training.setup`) has all that is asked about its topic. `resolve` first lets its host call the checks:
`check_keys` of every stage, then `check_models` of every stage, then `check_files`. A `DryHost` does, and collects
every problem; a `Host`, a rank of a run, does not, since its launcher has. Then `resolve` calls that of the stages, in
the order of STAGES. They fill the spec; on the ranks of a run the first problem is raised on every rank.

    dtrain run       `launch.start`: a DryHost, its checks alone; then on each rank `Trainer.open`: a Host, every stage
    dtrain validate  `launch.start.dry_run`: a DryHost, its checks; then every stage that the problems leave
    dtrain plan      `commands.plan.plan`: checks of keys and models; then the stages of its host, up to sizes
    dtrain preview   `commands.preview`: no check and no host; the rows of the stage data

`Trainer` builds what the spec says; `dtrain validate` prints. Nothing is allocated: the model is on meta, of weights
the headers are read.
"""

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from dtrain.base.errors import UserError
from dtrain.base.ranges import out_of_range
from dtrain.data.text.template import ChatTemplate, choose_template
from dtrain.data.text.tokenizer import Tokenizer
from dtrain.models.common.config import ModelConfig
from dtrain.models.read_config import read_config
from dtrain.recipe import Recipe, Sizes
from dtrain.recipe.automatic import with_compile, without_auto
from dtrain.recipe.world import dp_of
from dtrain.training import REWARD_MODEL, method_of
from dtrain.training.directory import RunDirectory

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from dtrain.checkpoint.dcp.store import CheckpointStore
    from dtrain.data import Rows
    from dtrain.data.images.processor import Layout
    from dtrain.methods import Method
    from dtrain.models.common.decoder import CausalLM
    from dtrain.policy.precision import Precision
    from dtrain.recipe.rollouts import Reward
    from dtrain.rl.judging import Questions
    from dtrain.training.host import Host
    from dtrain.training.resume import Start

STAGES = (
    "outputs tokenizer model others adapter code mesh optimizer first_rows data evals tower sizes kernels schedule "
    "start"
).split()
"""Names of the stages' modules, in the order in which they resolve."""


@dataclass(frozen=True)
class World:
    """World that a run is resolved for: its processes and the type of their devices. is_here: whether it is this
    machine's, whose devices may then be asked."""

    size: int
    device_type: str = "cpu"
    is_here: bool = True


class ModelDirectory:
    """Directory of one of a run's models, whose files are read once each.

    labels: as of `read_config`. options: of `choose_template`, beyond what the directory tells.
    """

    def __init__(self, path: str | Path, labels: int | None, *options: Any):
        self.path, self.labels, self._options = Path(path), labels, options

    @cached_property
    def config(self) -> ModelConfig:
        """config.json. Raises UserError where it is no model for the run."""
        return read_config(self.path, self.labels)

    @cached_property
    def vision_config(self) -> ModelConfig:
        """config.json, with the tower for images. Raises UserError where there is none that dtrain has."""
        return read_config(self.path, self.labels, vision=True)

    @cached_property
    def any_config(self) -> ModelConfig | None:
        """config.json of a model with any head; None where it cannot be read."""
        with suppress(UserError):
            return self.config
        with suppress(UserError):
            return read_config(self.path, 0)
        return None

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises UserError."""
        return Tokenizer.from_directory(self.path)

    @cached_property
    def template(self) -> ChatTemplate | None:
        """The chat template, or None. Raises UserError."""
        return choose_template(self.path, self.tokenizer, *self._options)


@dataclass
class RunSpec:
    """Everything that is decided of a run, in the order of the stages; a field is set by the stage that it stands
    under, and a dry run sets those that it can.

    recipe: as written, and from the stage data on with what the data decide: packing, then the batch; written: as it
    was given. awaited: keys of what the run downloads first: weights that are not looked at, or data. notes: lines for
    the user.
    """

    recipe: Recipe
    world: World
    awaited: Collection[str] = ()
    written: Recipe = field(init=False)
    method: "Method" = field(init=False)  # of `recipe`; the stage sizes makes it anew
    run: RunDirectory = field(init=False)
    cache: Path = field(init=False)
    notes: list[str] = field(default_factory=list)
    identities: dict[str, str] = field(default_factory=dict)  # digests of what the run reads at its start
    # model
    precision: "Precision" = field(init=False)
    model: "CausalLM | None" = None  # on meta, on the first rank
    built_for_images: bool | None = None  # `has_images` as `model` was built for; None where it is not built yet
    # data: by split
    rows: "dict[str, Rows]" = field(default_factory=dict)
    columns: dict[str, dict[str, Any]] = field(default_factory=dict)  # a row with every kept column, for each split
    plain_prompts: int = 0  # of the training rows
    has_images: bool = False  # so that the model has its vision tower
    row_images: "Sequence[Layout]" = ()  # of a planned row
    is_data_read: bool = False
    # evals, on the first rank: by the name of the set
    questions: "dict[str, tuple[Questions, list[Reward]]]" = field(default_factory=dict)
    # sizes
    sizes: Sizes = field(init=False)
    steps: int | None = None  # of a fresh run
    # optimizer
    optimizer: "Optimizer | None" = None  # over the model on meta
    # start
    store: "CheckpointStore" = field(init=False)
    start: "Start" = field(init=False)
    changes: list[str] = field(default_factory=list)  # since the save that the run goes on from
    total_steps: int = field(init=False)
    validate_every: int | None = None  # steps, `auto` resolved; None: no validation

    def __post_init__(self) -> None:
        self.written = self.recipe
        recipe = with_compile(self.recipe, self.world.device_type, self.world.is_here)
        recipe = self.recipe = without_auto(recipe, dp_of(recipe, self.world.size))
        self.run, self.cache = RunDirectory(recipe.run.directory, recipe.run.lock), recipe.cache
        self.method, data = method_of(recipe), recipe.data
        options = (data.chat_template, data.template_kwargs, data.special_tokens)
        self.source = ModelDirectory(recipe.model.directory, self.method.labels(), *options)
        self.others = {
            key: ModelDirectory(path, 0 if key.endswith(REWARD_MODEL) else None)
            for key, path in self.method.other_models()
        }

    @property
    def model_config(self) -> ModelConfig:
        """The model's. Raises UserError."""
        return self.source.vision_config if self.has_images else self.source.config

    @property
    def readable_config(self) -> ModelConfig | None:
        """The model's, or None."""
        with suppress(OSError, UserError):
            return self.model_config
        return None

    @cached_property
    def wrong_values(self) -> list[tuple[str, object, str]]:
        """Values of the recipe that are out of their range, as of `out_of_range`."""
        return out_of_range(self.written)


def stages_of(spec: RunSpec, looks_at_rows: bool = False) -> dict[str, ModuleType]:
    """Return the stages that the recipe of `spec` needs, by name."""
    recipe = spec.recipe
    unneeded = {"adapter": recipe.lora is None, "evals": not recipe.evals, "first_rows": not looks_at_rows}
    unneeded["others"] = not spec.others
    return {name: import_module(f"dtrain.training.setup.{name}") for name in STAGES if not unneeded.get(name)}


def resolve(recipe: Recipe, world: World, host: "Host", until: str = "start") -> RunSpec:
    """Return the spec of `recipe` in `world`, resolved up to `until`, a stage, or in a dry run checked up to one of
    `host.DEPTHS`. Collective on the ranks of a run.

    A dry run ends with the stage after which nothing can be looked at; its problems are in `host.problems`. Raises
    UserError.
    """
    spec = RunSpec(recipe, world, host.awaited)
    stages = stages_of(spec, host.is_dry and until in STAGES)
    if not host.check(spec, stages.values(), until):
        return spec
    for name, stage in stages.items():
        is_selected = host.stages is None or name in host.stages
        if is_selected and hasattr(stage, "resolve"):
            can_continue = stage.resolve(spec, host)
            if not can_continue:
                break
        if name == until:
            break
    return spec
