"""Other meshes and micro-batches for the same ranks: which fit, and which are fastest by the estimate.

The method. Every mesh (dp_replicate, dp_shard, cp, tp) of so many ranks and every micro-batch that divides a rank's
rows is a candidate. What its shards take is a closed form, and so is a rough time: arithmetic is shared alike, and what
FSDP, replicas, tp and cp send follows from the sizes (dtrain/parallel/README.md). In the order of that time candidates
are traced, each as `dtrain plan` would. The search ends with the `best` that fit, or after `most_traces`.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from dtrain import models
from dtrain.config import Sizes, sizes
from dtrain.config.schema import Recipe
from dtrain.models.config import ModelConfig, read_config
from dtrain.optim import build_optimizer
from dtrain.parallel.fits import misfits
from dtrain.plan.hardware import Hardware, Time, estimate, wire_time
from dtrain.plan.plan import problems, row_length, rows_of_a_sample
from dtrain.plan.policy import state_bytes
from dtrain.plan.step import Step, plan_step
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
    most_traces: int = 16,
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
    fitting: list[Found] = []
    too_large: list[Found] = []
    for index, (_, world) in enumerate(ranked):
        if len(fitting) >= best or index >= most_traces:
            counts["slower by the rough time, not traced"] += len(ranked) - index
            break
        step = plan_step(with_mesh(recipe, world), config, world)
        found = Found(world, step, estimate(step, world, hardware))
        (fitting if step.peak <= budget else too_large).append(found)
    counts["peak exceeds the budget"] = len(too_large)
    counts["fit"] = len(fitting)
    return Search(sorted(fitting, key=lambda one: one.time.total), too_large, counts)


def candidates(recipe: Recipe, config: ModelConfig, world_size: int, per_node: int, counts: Counter) -> Iterator[Sizes]:
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


def on_a_mesh_that_fits(recipe: Recipe, world_size: int, per_node: int) -> Recipe:
    """`recipe` as it is, or, where its mesh or micro-batch alone keeps it from `world_size` ranks, on the first of
    `candidates` that does not."""
    if not problems(recipe, world_size) or not recipe.model.path:
        return recipe
    one = replace(recipe.parallel, dp_replicate=1, dp_shard=-1, cp=1, tp=1)
    alone = replace(recipe, parallel=one, train=replace(recipe.train, micro_batch=1))
    if problems(alone, 1):
        return recipe
    tried = candidates(recipe, read_config(recipe.model.path), world_size, per_node, Counter())
    fitting = (with_mesh(recipe, world) for world in tried)
    return next((other for other in fitting if not problems(other, world_size)), recipe)


def with_mesh(recipe: Recipe, world: Sizes) -> Recipe:
    """`recipe` on the mesh and with the micro-batch of `world`."""
    parallel = replace(
        recipe.parallel, dp_replicate=world.dp_replicate, dp_shard=world.dp_shard, cp=world.cp, tp=world.tp
    )
    return replace(recipe, parallel=parallel, train=replace(recipe.train, micro_batch=world.micro_batch))


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


class _ClosedForms:
    """What a candidate takes at least, and about how long, from sizes alone."""

    def __init__(self, recipe: Recipe, config: ModelConfig, hardware: Hardware):
        self.recipe, self.config, self.hardware = recipe, config, hardware
        self.precision = choose_precision(recipe.train.dtype, "cuda")
        model = models.build(config, device="meta")
        self.elements = sum(parameter.numel() for parameter in model.parameters())
        self.flops_per_token = model.flops_per_token(recipe.data.max_length)
        sample = nn.Parameter(torch.ones(1024, 1024, dtype=self.precision.master))
        optimizer = build_optimizer(recipe.optimizer, [("sample", sample)])
        sample.grad = torch.ones_like(sample)
        optimizer.step()
        self.held = self.elements * (2 * sample.element_size() + state_bytes(optimizer) / sample.numel())

    def shards(self, world: Sizes) -> float:
        """Bytes of a rank's parameters, gradients and optimizer state, if all were shared out evenly."""
        return self.held / (world.tp * world.dp_shard * world.cp)

    def time(self, world: Sizes) -> float:
        """Seconds of a step, roughly: what is sent by the formulas of dtrain/parallel/README.md."""
        recipe, config, hardware = self.recipe, self.config, self.hardware
        again = recipe.train.activation_checkpointing == "full"
        compute, reduce = self.precision.compute.itemsize, self.precision.reduce.itemsize
        rows = world.micro_batch * rows_of_a_sample(recipe)
        tokens = rows * row_length(recipe) / world.cp  # of a pass, on a rank
        peak = hardware.arithmetic[self.precision.compute] * hardware.reach
        computing = world.accumulation * tokens * self.flops_per_token * (4 / 3 if again else 1) / world.tp / peak
        shards = world.dp_shard * world.cp
        whole, layers = self.elements / world.tp, config.num_hidden_layers
        keys = 2 * tokens * world.cp * max(1, config.num_key_value_heads / world.tp) * config.head_dim * compute
        gathers = 1 if recipe.parallel.reshard_after_forward is False else 2
        passes = world.accumulation
        lanes = [
            ("fsdp", "all-gather", shards, passes * gathers * (layers + 1), passes * gathers * whole * compute),
            ("fsdp", "reduce-scatter", shards, layers + 1, whole * reduce),
            ("dp_replicate", "all-reduce", world.dp_replicate, layers + 1, whole / shards * reduce),
            (
                "tp",
                "all-reduce",
                world.tp,
                passes * (4 + again) * layers,
                passes * (4 + again) * layers * tokens * config.hidden_size * compute,
            ),
            ("cp", "all-gather", world.cp, passes * (2 + again) * layers, passes * (2 + again) * layers * keys),
        ]
        sent: Counter = Counter()
        for name, kind, ranks, count, size in lanes:
            sent[name] += wire_time(name, kind, ranks, count, size, world, hardware)
        return max(computing, sent["fsdp"] + sent["dp_replicate"]) + sent["tp"] + sent["cp"]


# What may be changed so that a plan fits, the least change first: none of these changes a number that the run computes.
def smallest_change(recipe: Recipe, world_size: int, hardware: Hardware, budget: int) -> tuple[str, Step] | None:
    """The first of the changes that makes `recipe` fit into `budget` bytes a rank, as overrides, and its step.

    Tried: gradients reduced after each micro-batch, with that smaller micro-batches, activation checkpointing, both, no
    replicas, more tp or cp, then more ranks.
    """
    config = read_config(recipe.model.path)
    closed = _ClosedForms(recipe, config, hardware)
    for words, changed, ranks in _changes(recipe, world_size, hardware.per_node):
        if problems(changed, ranks):
            continue
        world = sizes(changed, ranks)
        if closed.shards(world) > budget:
            continue
        step = plan_step(changed, config, world)
        if step.peak <= budget:
            return words, step
    return None


def _changes(recipe: Recipe, world_size: int, per_node: int) -> Iterator[tuple[str, Recipe, int]]:
    train, parallel = recipe.train, recipe.parallel
    shards = parallel.dp_shard * parallel.cp > 1 or (parallel.dp_shard == -1 and world_size > parallel.tp)
    if not parallel.reduce_each and shards and train.global_batch > train.micro_batch:
        each = replace(recipe, parallel=replace(parallel, reduce_each=True))
        yield "parallel.reduce_each=true", each, world_size
        for words, changed, ranks in _changes(each, world_size, per_node):
            yield f"parallel.reduce_each=true {words}", changed, ranks
        return
    lower = [n for n in reversed(_divisors(train.micro_batch)) if n < train.micro_batch]
    for micro in lower:
        yield f"train.micro_batch={micro}", replace(recipe, train=replace(train, micro_batch=micro)), world_size
    least = replace(train, micro_batch=1, activation_checkpointing="full")
    words = "" if train.micro_batch == 1 else "train.micro_batch=1 "
    kinds = {"none": ("selective", "full"), "mlp": ("selective", "full"), "selective": ("full",), "full": ()}
    for kind in kinds[train.activation_checkpointing]:
        changed = replace(recipe, train=replace(train, activation_checkpointing=kind))
        yield f"train.activation_checkpointing={kind}", changed, world_size
    if least != train:
        if train.activation_checkpointing != "full" and words:
            yield f"{words}train.activation_checkpointing=full", replace(recipe, train=least), world_size
        words += "" if train.activation_checkpointing == "full" else "train.activation_checkpointing=full "
    lean = replace(recipe, train=least)
    if parallel.dp_replicate > 1:
        shared = replace(parallel, dp_replicate=1, dp_shard=-1)
        yield f"{words}parallel.dp_replicate=1", replace(lean, parallel=shared), world_size
    parallel = replace(parallel, dp_replicate=1, dp_shard=-1)
    words += "" if recipe.parallel.dp_replicate == 1 else "parallel.dp_replicate=1 "
    for ranks in (world_size, *(world_size * 2**n for n in range(1, 8))):
        more = "" if ranks == world_size else f" --world-size {ranks}"
        for tp in (n for n in _divisors(per_node) if n >= parallel.tp):
            for cp in (parallel.cp, 2 * parallel.cp):
                if (ranks, tp, cp) == (world_size, recipe.parallel.tp, recipe.parallel.cp):
                    continue
                keys = [f"parallel.tp={tp}"] * (tp != parallel.tp) + [f"parallel.cp={cp}"] * (cp != parallel.cp)
                shape = replace(parallel, tp=tp, cp=cp)
                yield " ".join(f"{words} {' '.join(keys)} {more}".split()), replace(lean, parallel=shape), ranks
