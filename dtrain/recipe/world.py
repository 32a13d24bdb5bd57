"""The mesh and the batch of a recipe in a world of so many processes: the sizes, or what does not fit."""

from dataclasses import dataclass

from dtrain.base.problems import Problem
from dtrain.base.ranges import either, plural
from dtrain.recipe.automatic import without_auto
from dtrain.recipe.schema import Recipe

LARGEST_AUTO = 16
STEPS_OF_A_PASS = 32


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
    is_open: bool = False  # train.global_batch=auto, which the data settle: the numbers are an upper bound of its parts

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
        if self.is_open:
            ranks = plural(self.dp, "rank")
            return (
                f"mesh: {shape}\nglobal batch auto: by the rows of the data, shared by {self.dp} data-parallel {ranks}"
            )
        return (
            f"mesh: {shape}\nglobal batch {self.global_batch} = micro-batch {self.micro_batch} × "
            f"accumulation {self.accumulation} × data-parallel ranks {self.dp}"
        )


def sizes(recipe: Recipe, world_size: int) -> Sizes:
    """Return the derived sizes of a recipe in which `run.preflight` found no problem. Where the batch is
    `auto` they are those of its largest number, 16, or of one micro-batch on each rank where that is more."""
    problems, shape = mesh_problems(recipe, world_size)
    if problems or not shape:
        raise ValueError("; ".join(map(str, problems)))
    replicate, shard, cp, tp = shape
    recipe = without_auto(recipe, replicate * shard)
    unit, is_open = recipe.train.micro * replicate * shard, recipe.train.global_batch == "auto"
    total = -(-LARGEST_AUTO // unit) * unit if is_open else recipe.train.batch
    accumulation, rest = divmod(total, unit)
    if rest:
        raise ValueError("; ".join(map(str, batch_problems(recipe, replicate * shard))))
    micro, ep = recipe.train.micro, recipe.parallel.ep
    return Sizes(world_size, replicate, shard, cp, tp, total, micro, accumulation, ep, is_open)


def automatic_batch(rows: int) -> int:
    """Return the global batch that `auto` means for so many rows a pass: at least 32 steps of it, where above 1."""
    return max(1, min(LARGEST_AUTO, 1 << max(0, (rows // STEPS_OF_A_PASS).bit_length() - 1)))


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


def dp_of(recipe: Recipe, world_size: int) -> int:
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
    return [Problem("parallel.ep", wrong, f"Use {either(fitting)}")]


def batch_problems(recipe: Recipe, dp: int) -> list[Problem]:
    """Return the problem, with its fixes, if micro-batches of `dp` data-parallel ranks do not make up the global
    batch."""
    recipe = without_auto(recipe, dp)
    total, micro = recipe.train.batch, recipe.train.micro
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
    return [Problem("train.global_batch", wrong, f"Set {either(fixes)}")]
