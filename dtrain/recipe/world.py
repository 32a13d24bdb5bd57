"""A recipe in a world of N processes: the sizes of its mesh and batch, and keys whose `auto` a plan decides.

`commands.plan.choose` decides them for a run, by the memory of its devices. No number that a run computes depends on
one of them. `train.compile`, which rounds otherwise, the kind of device decides.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, TypeVar

from dtrain.base.errors import Problem
from dtrain.base.hardware import C_COMPILERS
from dtrain.base.ranges import join_with_or, plural
from dtrain.recipe.schema import Recipe

MAX_AUTO_BATCH = 16
MIN_STEPS_PER_EPOCH = 32

AUTO, COMPILE, MICRO_BATCH = "auto", "train.compile", "train.micro_batch"
DEFAULT_MICRO_BATCH = 4
FASTEST_VALUES: dict[str, Any] = {
    MICRO_BATCH: DEFAULT_MICRO_BATCH,
    "train.activation_checkpointing": "none",
    "train.activation_offload": False,
    "train.tile": "none",
    "parallel.reduce_each": False,
    "parallel.optimizer_offload": False,
}
"""The keys, and the value of each that costs the least time."""

Config = TypeVar("Config")


@dataclass(frozen=True)
class Sizes:
    """The numbers that follow from a recipe in a world: global_batch = micro_batch × accumulation × dp."""

    world_size: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    global_batch: int
    micro_batch: int
    accumulation: int
    ep: int = 1
    is_upper_bound: bool = (
        False  # train.global_batch=auto, which the data settle: the numbers are an upper bound of its parts
    )

    @property
    def dp(self) -> int:
        """Number of ranks, or groups of cp×tp ranks, that see different data."""
        return self.dp_replicate * self.dp_shard

    @property
    def shape(self) -> dict[str, int]:
        """The mesh's sizes, whose product is the world's, by name."""
        return {"dp_replicate": self.dp_replicate, "dp_shard": self.dp_shard, "cp": self.cp, "tp": self.tp}

    @property
    def axes(self) -> str:
        """The sizes above 1 in words."""
        among = f", ep {self.ep} among them" if self.ep > 1 else ""
        return " × ".join(f"{axis} {number}" for axis, number in self.shape.items() if number > 1) + among

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


def derive_sizes(recipe: Recipe, world_size: int) -> Sizes:
    """Return the derived sizes of a recipe in which `run.preflight` found no problem. Where the batch is
    `auto` they are those of its largest number, 16, or of one micro-batch on each rank where that is more."""
    problems, shape = mesh_problems(recipe, world_size)
    if problems or not shape:
        raise ValueError("; ".join(map(str, problems)))
    replicate, shard, cp, tp = shape
    recipe = replace_auto(recipe, replicate * shard)
    unit, is_open = recipe.train.num_micro_batch_rows * replicate * shard, recipe.train.global_batch == "auto"
    total = -(-MAX_AUTO_BATCH // unit) * unit if is_open else recipe.train.num_batch_rows
    accumulation, rest = divmod(total, unit)
    if rest:
        raise ValueError("; ".join(map(str, batch_problems(recipe, replicate * shard))))
    micro, ep = recipe.train.num_micro_batch_rows, recipe.parallel.ep
    return Sizes(world_size, replicate, shard, cp, tp, total, micro, accumulation, ep, is_open)


def choose_global_batch(rows: int) -> int:
    """Return the global batch that `auto` means for so many rows a pass: at least 32 steps of it, where above 1."""
    return max(1, min(MAX_AUTO_BATCH, 1 << max(0, (rows // MIN_STEPS_PER_EPOCH).bit_length() - 1)))


def mesh_problems(recipe: Recipe, world_size: int) -> tuple[list[Problem], tuple[int, int, int, int] | None]:
    """Return the problems of the mesh in this world, and if none its sizes (dp_replicate, dp_shard, cp, tp)."""
    p = recipe.parallel
    fixed = p.dp_replicate * p.cp * p.tp
    world = f"{world_size} {plural(world_size, 'process')} (launch.nproc, or what torchrun or SLURM started)"
    named = f"dp_replicate {p.dp_replicate} × cp {p.cp} × tp {p.tp}"
    if p.dp_shard == -1:
        if world_size % fixed:
            wrong = f"parallel: {named} = {fixed} does not divide {world}"
            fix = f"Set launch.nproc to a multiple of {fixed}, or change one of the three"
            return [Problem("parallel", wrong, fix)], None
        return _experts(p.ep, world_size // fixed, p.cp), (p.dp_replicate, world_size // fixed, p.cp, p.tp)
    if fixed * p.dp_shard != world_size:
        fits = f"parallel.dp_shard={world_size // fixed} or -1, or " if world_size % fixed == 0 else ""
        wrong = f"parallel: dp_shard {p.dp_shard} × {named} = {fixed * p.dp_shard} is not {world}"
        return [Problem("parallel", wrong, f"Set {fits}launch.nproc={fixed * p.dp_shard}")], None
    return _experts(p.ep, p.dp_shard, p.cp), (p.dp_replicate, p.dp_shard, p.cp, p.tp)


def num_dp_ranks(recipe: Recipe, world_size: int) -> int:
    """Return the number of data-parallel ranks in this world, or 1 where the mesh does not fit it."""
    mesh = recipe.parallel
    if world_size < 1 or min(mesh.dp_replicate, mesh.cp, mesh.tp, mesh.ep) < 1 or mesh.dp_shard == 0:
        return 1
    _, shape = mesh_problems(recipe, world_size)
    return 1 if shape is None else shape[0] * shape[1]


def _experts(ep: int, dp_shard: int, cp: int) -> list[Problem]:
    shared = dp_shard * cp
    if shared % ep == 0:
        return []
    fitting = [str(size) for size in range(1, shared + 1) if shared % size == 0]
    wrong = f"parallel.ep={ep} does not divide dp_shard {dp_shard} × cp {cp} = {shared}"
    return [Problem("parallel.ep", wrong, f"Use {join_with_or(fitting)}")]


def batch_problems(recipe: Recipe, dp: int) -> list[Problem]:
    """Return the problem, with its fixes, if micro-batches of `dp` data-parallel ranks do not make up the global
    batch."""
    recipe = replace_auto(recipe, dp)
    total, micro = recipe.train.num_batch_rows, recipe.train.num_micro_batch_rows
    unit = micro * dp
    if total % unit == 0:
        return []
    lower = total // unit * unit
    fixes = [f"train.global_batch={size}" for size in (lower, lower + unit) if size]
    if total % dp == 0:
        per_rank = total // dp
        fixes.append(f"train.micro_batch={max(n for n in range(1, min(micro, per_rank) + 1) if per_rank % n == 0)}")
    wrong = (
        f"train.global_batch={total} is not micro_batch × accumulation × dp: "
        f"micro_batch {micro} × dp {dp} = {unit} does not divide it"
    )
    return [Problem("train.global_batch", wrong, f"Set {join_with_or(fixes)}")]


def get_key(config: Any, key: str) -> Any:
    """Return the value of `key`, "section.name"."""
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def replace_keys(config: Config, overrides: Mapping[str, Any]) -> Config:
    """Return `config` with `overrides`, "section.name" → value, or a longer key."""
    for key, value in overrides.items():
        name, _, rest = key.partition(".")
        config = replace(config, **{name: replace_keys(getattr(config, name), {rest: value}) if rest else value})  # type: ignore
    return config


def format_overrides(values: Mapping[str, Any]) -> list[str]:
    """Return `values` as one types them, "key=value" each."""
    return [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in values.items()]


def format_choices(config: Any, values: Mapping[str, Any]) -> list[str]:
    """Return `values` that were chosen for `auto` in `config`, as a line for the terminal shows them.

    With `train.global_batch=auto` the data decides the global batch later, and a micro-batch that does not divide it is
    lowered then. So what is chosen here is a bound: "train.micro_batch at most 4", and not "train.micro_batch=4".
    """
    texts = []
    for key, value in values.items():
        is_bound = key == MICRO_BATCH and config.train.global_batch == AUTO
        texts += [f"{key} at most {value}"] if is_bound else format_overrides({key: value})
    return texts


def unresolved_auto_keys(config: Any) -> list[str]:
    """Return the keys of USUAL that say `auto`."""
    return [key for key in FASTEST_VALUES if get_key(config, key) == AUTO]


def replace_auto(config: Config, dp: int = 1) -> Config:
    """Return `config` with the usual values in place of `auto`, where no plan has decided.

    dp: data-parallel ranks. A micro-batch is then the largest one up to the usual size that divides a rank's rows.
    """
    values = {key: FASTEST_VALUES[key] for key in unresolved_auto_keys(config)}
    values |= {COMPILE: False} if get_key(config, COMPILE) == AUTO else {}
    if not values:
        return config
    total = config.train.global_batch  # type: ignore[attr-defined]
    if "train.micro_batch" in values and isinstance(total, int) and dp > 0 and total > 0:
        values["train.micro_batch"] = largest_divisor(total // dp, DEFAULT_MICRO_BATCH)
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
        is_here: Whether the devices are on this machine, whose compilers can be examined. Other machines are taken to
            have compilers.
    """
    if device_type != "cuda":
        return CompileChoice(False, "no CUDA device")
    if config.run.deterministic:  # type: ignore[attr-defined]
        return CompileChoice(False, "run.deterministic=true")
    has_compilers = find_spec("triton") is not None and any(map(shutil.which, C_COMPILERS))
    if is_here and not has_compilers:
        return CompileChoice(False, "Triton and a C compiler are not both installed")
    return CompileChoice(True, "Triton and a C compiler are installed")


def resolve_compile(config: Config, device_type: str, is_here: bool = True) -> Config:
    """Return `config` with the value of `choose_compile` if `train.compile` is auto."""
    if get_key(config, COMPILE) != AUTO:
        return config
    return replace_keys(config, {COMPILE: choose_compile(config, device_type, is_here).value})


def largest_divisor(number: int, limit: int) -> int:
    """Return the largest divisor of `number` up to `limit`, at least 1."""
    return max([n for n in range(1, min(number, limit) + 1) if number % n == 0], default=1)
