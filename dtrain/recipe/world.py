"""Sizes of a recipe for N processes: the mesh, the batch, and the keys whose `auto` is decided by a plan.

For example, 8 processes with `parallel.tp=2`, `train.global_batch=64` and `train.micro_batch=4` have the mesh
dp_shard 4 × tp 2. Each of the 4 data-parallel ranks computes 64 ÷ 4 = 16 rows per step, in 4 micro-batches.

A plan (`dtrain.commands.plan.choose`) decides the keys in `FASTEST_VALUES` from the memory of the devices. None of them
changes the numbers that a run computes. `train.compile` does, by rounding, so it is decided by the type of device only.
"""

import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, NamedTuple, TypeVar

from dtrain.base.errors import Problem
from dtrain.base.hardware import C_COMPILERS
from dtrain.base.ranges import join_with_or, plural
from dtrain.recipe.schema import Recipe

MAX_AUTO_BATCH = 16  # the largest global batch that train.global_batch=auto chooses
MIN_STEPS_PER_EPOCH = 32  # train.global_batch=auto chooses a batch with which an epoch has at least this many steps

AUTO = "auto"
COMPILE = "train.compile"
MICRO_BATCH = "train.micro_batch"
DEFAULT_MICRO_BATCH = 4
FASTEST_VALUES: dict[str, Any] = {
    MICRO_BATCH: DEFAULT_MICRO_BATCH,
    "train.activation_checkpointing": "none",
    "train.activation_offload": False,
    "train.tile": "none",
    "parallel.reduce_each": False,
    "parallel.optimizer_offload": False,
}
"""Keys whose `auto` a plan decides, with the value of each that costs the least time (and the most memory)."""

Config = TypeVar("Config")


@dataclass(frozen=True)
class Sizes:
    """Sizes of the mesh and of the batch: global_batch = micro_batch × accumulation × dp.

    Attributes:
        world_size: Number of processes: dp_replicate × dp_shard × cp × tp.
        dp_replicate: Copies of the sharded model.
        dp_shard: Ranks over which parameters are sharded.
        cp: Ranks over which a sequence is split.
        tp: Ranks over which matrices are split.
        global_batch: Rows per optimizer step.
        micro_batch: Rows per rank in one forward and backward.
        accumulation: Micro-batches per optimizer step.
        ep: Ranks over which experts are distributed, among dp_shard × cp.
        is_upper_bound: Whether the batch is only bounded, because `train.global_batch=auto` is decided by the data.
    """

    world_size: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    global_batch: int
    micro_batch: int
    accumulation: int
    ep: int = 1
    is_upper_bound: bool = False

    @property
    def dp(self) -> int:
        """Number of data-parallel ranks: ranks, or groups of cp × tp ranks, that compute different rows."""
        return self.dp_replicate * self.dp_shard

    @property
    def shape(self) -> dict[str, int]:
        """Sizes of the mesh by the name of the dimension. Their product is the number of processes."""
        return {"dp_replicate": self.dp_replicate, "dp_shard": self.dp_shard, "cp": self.cp, "tp": self.tp}

    @property
    def axes(self) -> str:
        """Text with the sizes above 1, such as "dp_shard 4 × tp 2"."""
        experts = f", ep {self.ep} among them" if self.ep > 1 else ""
        return " × ".join(f"{name} {size}" for name, size in self.shape.items() if size > 1) + experts

    def __str__(self) -> str:
        shape = self.axes or "one process"
        if self.is_upper_bound:
            ranks = plural(self.dp, "rank")
            return (
                f"mesh: {shape}\nglobal batch auto: by the rows of the data, shared by {self.dp} data-parallel {ranks}"
            )
        return (
            f"mesh: {shape}\nglobal batch {self.global_batch} = micro-batch {self.micro_batch} × "
            f"accumulation {self.accumulation} × data-parallel ranks {self.dp}"
        )


class MeshShape(NamedTuple):
    """Sizes of a mesh's dimensions."""

    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int

    @property
    def dp(self) -> int:
        """Number of data-parallel ranks."""
        return self.dp_replicate * self.dp_shard


def derive_sizes(recipe: Recipe, world_size: int) -> Sizes:
    """Derive the sizes of the mesh and of the batch.

    With `train.global_batch=auto` the batch is the largest possible one: MAX_AUTO_BATCH rows, rounded up to a
    micro-batch on every rank.

    Args:
        recipe: A recipe in which `training.preflight` found no problem.
        world_size: Number of processes.

    Raises:
        ValueError: If the mesh or the batch does not fit the number of processes.
    """
    problems, shape = mesh_problems(recipe, world_size)
    if problems or not shape:
        raise ValueError("; ".join(map(str, problems)))
    recipe = replace_auto(recipe, shape.dp)
    micro_batch = recipe.train.num_micro_batch_rows
    smallest_batch = micro_batch * shape.dp
    is_upper_bound = recipe.train.global_batch == AUTO
    if is_upper_bound:
        global_batch = math.ceil(MAX_AUTO_BATCH / smallest_batch) * smallest_batch
    else:
        global_batch = recipe.train.num_batch_rows
    accumulation, remainder = divmod(global_batch, smallest_batch)
    if remainder:
        raise ValueError("; ".join(map(str, batch_problems(recipe, shape.dp))))
    return Sizes(
        world_size=world_size,
        dp_replicate=shape.dp_replicate,
        dp_shard=shape.dp_shard,
        cp=shape.cp,
        tp=shape.tp,
        global_batch=global_batch,
        micro_batch=micro_batch,
        accumulation=accumulation,
        ep=recipe.parallel.ep,
        is_upper_bound=is_upper_bound,
    )


def choose_global_batch(rows: int) -> int:
    """Choose the global batch for `train.global_batch=auto`.

    It is the largest power of two up to MAX_AUTO_BATCH with which an epoch has at least MIN_STEPS_PER_EPOCH steps.

    Args:
        rows: Rows of an epoch.

    Example:
        >>> [choose_global_batch(rows) for rows in (10, 100, 300, 10_000)]
        [1, 2, 8, 16]
    """
    max_batch = rows // MIN_STEPS_PER_EPOCH
    batch = 1
    while batch * 2 <= min(max_batch, MAX_AUTO_BATCH):
        batch *= 2
    return batch


def mesh_problems(recipe: Recipe, world_size: int) -> tuple[list[Problem], MeshShape | None]:
    """Check that the mesh fits a number of processes.

    Returns:
        The problems, and the shape of the mesh. None if the product of its sizes is not the number of processes.
    """
    mesh = recipe.parallel
    fixed = mesh.dp_replicate * mesh.cp * mesh.tp  # all but dp_shard
    world = f"{world_size} {plural(world_size, 'process')} (launch.nproc, or what torchrun or SLURM started)"
    sizes = f"dp_replicate {mesh.dp_replicate} × cp {mesh.cp} × tp {mesh.tp}"
    if mesh.dp_shard == -1:
        if world_size % fixed:
            text = f"parallel: {sizes} = {fixed} does not divide {world}"
            fix = f"Set launch.nproc to a multiple of {fixed}, or change one of the three"
            return [Problem("parallel", text, fix)], None
        dp_shard = world_size // fixed
    elif fixed * mesh.dp_shard != world_size:
        # If the other sizes divide the number of processes, another dp_shard would do, else only another launch.nproc.
        can_fit = world_size % fixed == 0
        fitting_shard = f"parallel.dp_shard={world_size // fixed} or -1, or " if can_fit else ""
        text = f"parallel: dp_shard {mesh.dp_shard} × {sizes} = {fixed * mesh.dp_shard} is not {world}"
        return [Problem("parallel", text, f"Set {fitting_shard}launch.nproc={fixed * mesh.dp_shard}")], None
    else:
        dp_shard = mesh.dp_shard
    shape = MeshShape(mesh.dp_replicate, dp_shard, mesh.cp, mesh.tp)
    return _expert_problems(mesh.ep, dp_shard, mesh.cp), shape


def num_dp_ranks(recipe: Recipe, world_size: int) -> int:
    """Return the number of data-parallel ranks. 1 if the mesh does not fit the number of processes."""
    mesh = recipe.parallel
    if world_size < 1 or min(mesh.dp_replicate, mesh.cp, mesh.tp, mesh.ep) < 1 or mesh.dp_shard == 0:
        return 1
    _, shape = mesh_problems(recipe, world_size)
    return 1 if shape is None else shape.dp


def _expert_problems(ep: int, dp_shard: int, cp: int) -> list[Problem]:
    """Return a problem if ep does not divide dp_shard × cp, the ranks that share the experts."""
    num_ranks = dp_shard * cp
    if num_ranks % ep == 0:
        return []
    fitting = [str(size) for size in range(1, num_ranks + 1) if num_ranks % size == 0]
    text = f"parallel.ep={ep} does not divide dp_shard {dp_shard} × cp {cp} = {num_ranks}"
    return [Problem("parallel.ep", text, f"Use {join_with_or(fitting)}")]


def batch_problems(recipe: Recipe, dp: int) -> list[Problem]:
    """Check that the global batch is a multiple of a micro-batch on every data-parallel rank.

    Args:
        recipe: The recipe.
        dp: Number of data-parallel ranks.
    """
    recipe = replace_auto(recipe, dp)
    global_batch, micro_batch = recipe.train.num_batch_rows, recipe.train.num_micro_batch_rows
    smallest_batch = micro_batch * dp
    if global_batch % smallest_batch == 0:
        return []
    lower = global_batch // smallest_batch * smallest_batch
    fixes = [f"train.global_batch={size}" for size in (lower, lower + smallest_batch) if size]
    if global_batch % dp == 0:
        fixes.append(f"train.micro_batch={largest_divisor(global_batch // dp, micro_batch)}")
    text = (
        f"train.global_batch={global_batch} is not micro_batch × accumulation × dp: "
        f"micro_batch {micro_batch} × dp {dp} = {smallest_batch} does not divide it"
    )
    return [Problem("train.global_batch", text, f"Set {join_with_or(fixes)}")]


def get_key(config: Any, key: str) -> Any:
    """Return the value of a key, "section.name"."""
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def replace_keys(config: Config, overrides: Mapping[str, Any]) -> Config:
    """Return a copy of `config` with other values for some dotted keys."""
    for key, value in overrides.items():
        name, _, rest = key.partition(".")
        if rest:
            value = replace_keys(getattr(config, name), {rest: value})
        config = replace(config, **{name: value})  # type: ignore
    return config


def format_overrides(values: Mapping[str, Any]) -> list[str]:
    """Return values by key as overrides.

    Example:
        >>> format_overrides({"train.micro_batch": 4, "train.compile": True})
        ['train.micro_batch=4', 'train.compile=true']
    """
    overrides = []
    for key, value in values.items():
        text = str(value).lower() if isinstance(value, bool) else str(value)
        overrides.append(f"{key}={text}")
    return overrides


def format_choices(config: Any, values: Mapping[str, Any]) -> list[str]:
    """Return the values that were chosen for `auto` as texts for the terminal.

    With `train.global_batch=auto` the global batch is decided later, by the data, and a micro-batch that does not
    divide it is then lowered. The micro-batch that is chosen here is an upper bound in this case: the text is
    "train.micro_batch at most 4" instead of "train.micro_batch=4".

    Args:
        config: The recipe.
        values: The chosen values by key.
    """
    texts = []
    for key, value in values.items():
        if key == MICRO_BATCH and config.train.global_batch == AUTO:
            texts.append(f"{key} at most {value}")
        else:
            texts += format_overrides({key: value})
    return texts


def unresolved_auto_keys(config: Any) -> list[str]:
    """Return the keys in FASTEST_VALUES that are `auto`."""
    return [key for key in FASTEST_VALUES if get_key(config, key) == AUTO]


def replace_auto(config: Config, dp: int = 1) -> Config:
    """Return `config` with the fastest values in place of `auto`, for callers that make no plan of the memory.

    Args:
        config: The recipe.
        dp: Number of data-parallel ranks. An automatic micro-batch is the largest divisor of the rows of a rank that is
            at most DEFAULT_MICRO_BATCH.
    """
    values = {key: FASTEST_VALUES[key] for key in unresolved_auto_keys(config)}
    if get_key(config, COMPILE) == AUTO:
        values[COMPILE] = False
    if not values:
        return config
    global_batch = config.train.global_batch  # type: ignore[attr-defined]
    if MICRO_BATCH in values and isinstance(global_batch, int) and dp > 0 and global_batch > 0:
        values[MICRO_BATCH] = largest_divisor(global_batch // dp, DEFAULT_MICRO_BATCH)
    return replace_keys(config, values)


@dataclass(frozen=True)
class CompileChoice:
    """The value of `train.compile=auto`.

    Attributes:
        value: Whether layers are compiled.
        reason: Why, for the terminal.
    """

    value: bool
    reason: str


def choose_compile(config: Config, device_type: str, is_here: bool = True) -> CompileChoice:
    """Decide whether layers are compiled with `train.compile=auto`.

    Args:
        config: The recipe.
        device_type: "cuda" or "cpu".
        is_here: Whether the devices are on this machine, so that its compilers can be checked. Other machines are
            assumed to have compilers.
    """
    if device_type != "cuda":
        return CompileChoice(False, "no CUDA device")
    if config.run.deterministic:  # type: ignore[attr-defined]
        return CompileChoice(False, "run.deterministic=true")
    has_c_compiler = any(shutil.which(name) for name in C_COMPILERS)
    has_compilers = find_spec("triton") is not None and has_c_compiler
    if is_here and not has_compilers:
        return CompileChoice(False, "Triton and a C compiler are not both installed")
    return CompileChoice(True, "Triton and a C compiler are installed")


def resolve_compile(config: Config, device_type: str, is_here: bool = True) -> Config:
    """Return `config` with the value of `choose_compile` if `train.compile` is auto."""
    if get_key(config, COMPILE) != AUTO:
        return config
    return replace_keys(config, {COMPILE: choose_compile(config, device_type, is_here).value})


def largest_divisor(number: int, limit: int) -> int:
    """Return the largest divisor of `number` up to `limit`, at least 1.

    Example:
        >>> largest_divisor(12, 5)
        4
    """
    for divisor in range(min(number, limit), 1, -1):
        if number % divisor == 0:
            return divisor
    return 1
