"""Other meshes and micro-batches for the same ranks: which fit, and which are fastest by the estimate.

The method. Every mesh (dp_replicate, dp_shard, cp, tp) of so many ranks and every micro-batch that divides a rank's
rows is a candidate. What its shards take is a closed form, and so is a rough time: arithmetic is shared alike, and what
FSDP, replicas, tp and cp send follows from the sizes (dtrain/parallel/README.md). In the order of that time candidates
are traced. A trace holds for all candidates that differ in how many ranks share a parameter or copy it, since only
their shards and links differ: peak and traffic are carried over with these put right. The search ends with the
`best` that fit, or after `most_traces`.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from dtrain.config import Sizes, check, sizes
from dtrain.config.schema import Recipe
from dtrain.models.config import ModelConfig, read_config
from dtrain.plan.hardware import ARITHMETIC, BANDWIDTH, Hardware, Time, estimate, link, wire_bytes
from dtrain.plan.plan import problems, rows_of_a_sample, row_length
from dtrain.plan.step import Step, plan_step
from dtrain.parallel.fits import misfits
from dtrain.policy.precision import choose_precision


@dataclass(frozen=True)
class Found:
    """A candidate that was looked at: its step, and the estimate of its time."""

    sizes: Sizes
    step: Step
    time: Time


@dataclass(frozen=True)
class Search:
    """best: those that fit, fastest first. too_large: those that were traced and do not. counts: how many candidates
    ended how."""

    best: list[Found]
    too_large: list[Found]
    counts: Counter


def search(
    recipe: Recipe,
    config: ModelConfig,
    world_size: int,
    hardware: Hardware,
    budget: int,
    *,
    best: int = 10,
    most_traces: int = 12,
) -> Search:
    """The fastest meshes and micro-batches of `recipe` on `world_size` ranks whose peak is within `budget` bytes."""
    counts: Counter = Counter()
    closed = _ClosedForms(recipe, config, hardware)
    ranked = []
    for world in candidates(recipe, config, world_size, hardware.per_node, counts):
        if closed.shards(world) > budget:
            counts["shards alone exceed the budget"] += 1
        else:
            ranked.append((closed.time(world), world))
    ranked.sort(key=lambda entry: entry[0])
    traces: dict[tuple, tuple[Sizes, Step]] = {}
    fitting: list[Found] = []
    too_large: list[Found] = []
    for index, (_, world) in enumerate(ranked):
        key = _alike(world)
        if len(fitting) >= best or (key not in traces and len(traces) >= most_traces):
            counts["slower by the rough time, not traced"] += len(ranked) - index
            break
        if key not in traces:
            traces[key] = world, plan_step(with_mesh(recipe, world), config, world)
        step = _carried(*traces[key], world, closed)
        found = Found(world, step, estimate(step, world, hardware))
        (fitting if step.peak <= budget else too_large).append(found)
    counts["peak exceeds the budget"] = len(too_large)
    counts["fit"] = len(fitting)
    return Search(sorted(fitting, key=lambda one: one.time.total), too_large, counts)


def candidates(
    recipe: Recipe, config: ModelConfig, world_size: int, per_node: int, counts: Counter
) -> Iterator[Sizes]:
    """Every mesh and micro-batch that the model and the recipe allow; `counts` is told of those that they do not."""
    total, length = recipe.train.global_batch, recipe.data.max_length
    for tp in _divisors(world_size):
        if misfits(config, tp):
            counts["tp does not fit the model"] += 1
            continue
        if tp > per_node:
            counts["tp is larger than a node"] += 1
            continue
        for cp in _divisors(world_size // tp):
            if cp > 1 and length < 2 * cp:
                counts["cp cuts rows into pieces of nothing"] += 1
                continue
            dp = world_size // tp // cp
            if total % dp:
                counts["train.global_batch is no multiple of dp"] += 1
                continue
            for replicate in _divisors(dp):
                for micro in _divisors(total // dp):
                    yield Sizes(world_size, replicate, dp // replicate, cp, tp, total, micro, total // dp // micro)


def with_mesh(recipe: Recipe, world: Sizes) -> Recipe:
    """`recipe` on the mesh and with the micro-batch of `world`."""
    parallel = replace(
        recipe.parallel, dp_replicate=world.dp_replicate, dp_shard=world.dp_shard, cp=world.cp, tp=world.tp
    )
    return replace(recipe, parallel=parallel, train=replace(recipe.train, micro_batch=world.micro_batch))


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _alike(world: Sizes) -> tuple:
    """What a trace depends on, but for the sizes of shards."""
    sharded = world.dp_shard * world.cp > 1
    return world.tp, world.cp, sharded, world.dp_replicate > 1, world.micro_batch, min(world.accumulation, 3)
