"""Other meshes and micro-batches for the same ranks: which fit, and which are fastest by the estimate.

The method. Every mesh (dp_replicate, dp_shard, cp, tp) of so many ranks and every micro-batch that divides a rank's
rows is a candidate. What its shards take is a closed form, and so is a rough time: arithmetic is shared alike, and what
FSDP, replicas, tp and cp send follows from the sizes (dtrain/parallel/README.md). In the order of that time candidates
are traced, each as `dtrain plan` would. The search ends with the `best` that fit, or after `most_traces`.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from dtrain import models
from dtrain.commands.plan.hardware import Hardware, Time, estimate, wire_time
from dtrain.commands.plan.plan import Plan, problems
from dtrain.commands.plan.policy import bytes_of, state_bytes
from dtrain.commands.plan.step import Step, plan_step
from dtrain.methods import method_of
from dtrain.models.common.config import LINEAR, ModelConfig
from dtrain.models.common.decoder import flops_per_token
from dtrain.models.read_config import read_config
from dtrain.optim.update import build_optimizer
from dtrain.parallel.fits import mesh_problems_of_model
from dtrain.policy.precision import choose_precision
from dtrain.policy.trained import choose_trained
from dtrain.recipe import Sizes, sizes
from dtrain.recipe.schema import Recipe
from dtrain.recipe.world import LARGEST_AUTO


@dataclass(frozen=True)
class Candidate:
    """A candidate that was traced: its step, and the estimate of its time."""

    sizes: Sizes
    step: Step
    time: Time


@dataclass(frozen=True)
class SearchResult:
    """Outcome of a search. best: the candidates that fit, fastest first. too_large: those that were traced and do not.
    counts: the number of candidates by outcome."""

    best: list[Candidate]
    too_large: list[Candidate]
    counts: Counter[str]


def search(
    recipe: Recipe,
    config: ModelConfig,
    world_size: int,
    hardware: Hardware,
    budget: int,
    *,
    best: int = 10,
    most_traces: int = 16,
) -> SearchResult:
    """Return the fastest meshes and micro-batches of `recipe` on `world_size` ranks whose peak is within `budget`
    bytes."""
    counts: Counter[str] = Counter()
    closed = _ClosedForms(recipe, config, hardware)
    ranked = []
    for world in candidates(recipe, config, world_size, hardware.per_node, counts):
        if closed.shards(world) > budget:
            counts["shards alone exceed the budget"] += 1
        else:
            ranked.append((closed.time(world), world))
    ranked.sort(key=lambda entry: entry[0])
    fitting: list[Candidate] = []
    too_large: list[Candidate] = []
    for index, (_, world) in enumerate(ranked):
        if len(fitting) >= best or index >= most_traces:
            counts["slower by the rough time, not traced"] += len(ranked) - index
            break
        step = plan_step(with_mesh(recipe, world), config, world)
        candidate = Candidate(world, step, estimate(step, world, hardware))
        (fitting if step.peak <= budget else too_large).append(candidate)
    counts["peak exceeds the budget"] = len(too_large)
    counts["fit"] = len(fitting)
    return SearchResult(sorted(fitting, key=lambda candidate: candidate.time.total), too_large, counts)


def candidates(
    recipe: Recipe, config: ModelConfig, world_size: int, per_node: int, counts: Counter[str]
) -> Iterator[Sizes]:
    """Yield every mesh and micro-batch that the model and the recipe allow; the others are counted in `counts`."""
    length, is_open = recipe.data.max_length, recipe.train.global_batch == "auto"
    total = LARGEST_AUTO if is_open else recipe.train.batch
    for tp in _divisors(world_size):
        if mesh_problems_of_model(config, tp, recipe.parallel.ep):
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
                    accumulation, ep = total // dp // micro, recipe.parallel.ep
                    yield Sizes(world_size, replicate, dp // replicate, cp, tp, total, micro, accumulation, ep)


def on_a_mesh_that_fits(recipe: Recipe, world_size: int, per_node: int) -> Recipe:
    """Return `recipe` as it is, or, if its mesh or micro-batch alone keeps it from `world_size` ranks, on the first of
    `candidates` that does not."""
    if not problems(recipe, world_size) or not recipe.model.path:
        return recipe
    if problems(with_mesh(recipe, Sizes(1, 1, -1, 1, 1, 1, 1, 1)), 1):
        return recipe
    tried = candidates(
        recipe, read_config(recipe.model.path, method_of(recipe).labels()), world_size, per_node, Counter()
    )
    fitting = (with_mesh(recipe, world) for world in tried)
    return next((other for other in fitting if not problems(other, world_size)), recipe)


def with_mesh(recipe: Recipe, world: Sizes) -> Recipe:
    """Return `recipe` on the mesh and with the micro-batch of `world`."""
    mesh = {f"parallel.{name}": size for name, size in world.shape.items()}
    return _changed(recipe, mesh | {"train.micro_batch": world.micro_batch})


def _changed(recipe: Recipe, overrides: Mapping[str, Any]) -> Recipe:
    for key, value in overrides.items():
        section, name = key.split(".")
        recipe = replace(recipe, **{section: replace(getattr(recipe, section), **{name: value})})
    return recipe


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


class _ClosedForms:
    """The least bytes and the rough time of a candidate, from sizes alone."""

    def __init__(self, recipe: Recipe, config: ModelConfig, hardware: Hardware):
        self.recipe, self.config, self.hardware = recipe, config, hardware
        self.precision = choose_precision(recipe.train.dtype, "cuda", recipe.train.masters)
        model = models.build(config, device="meta")
        choose_trained(model, recipe, self.precision.compute)
        self.trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        self.frozen_bytes = bytes_of(parameter for parameter in model.parameters() if not parameter.requires_grad)
        self.flops_per_token = flops_per_token(model, recipe.data.max_length)
        sample = nn.Parameter(torch.ones(1024, 1024, dtype=self.precision.master))
        optimizer = build_optimizer(recipe.optimizer, [("sample", sample)])
        sample.grad = torch.ones_like(sample)
        optimizer.step()
        of_each = sample.element_size() + state_bytes(optimizer) / sample.numel()
        if recipe.parallel.optimizer_offload:
            of_each = self.precision.compute.itemsize
        self.held = self.trained * (sample.element_size() + of_each) + self.frozen_bytes

    def shards(self, world: Sizes) -> float:
        """Return the bytes of a rank's parameters, gradients and optimizer state, if all are sharded evenly."""
        return self.held / (world.tp * world.dp_shard * world.cp)

    def time(self, world: Sizes) -> float:
        """Return the rough seconds of a step; messages by the formulas of dtrain/parallel/README.md."""
        recipe, config, hardware = self.recipe, self.config, self.hardware
        again = recipe.train.activation_checkpointing == "full"
        compute, reduce = self.precision.compute.itemsize, self.precision.reduce.itemsize
        spec = method_of(recipe)
        rows = world.micro_batch * spec.rows_of_a_sample()
        tokens = rows * spec.row_length() / world.cp  # of a pass, on a rank
        peak = hardware.arithmetic[self.precision.compute] * hardware.reach
        computing = world.accumulation * tokens * self.flops_per_token * (4 / 3 if again else 1) / world.tp / peak
        shards = world.dp_shard * world.cp
        trained, layers = self.trained / world.tp, config.num_hidden_layers
        whole = trained * compute + self.frozen_bytes / world.tp  # bytes
        heads = [config.heads_of(kind) for kind in config.layer_types if kind != LINEAR]
        keeping = len(heads)  # linear layers send states, whose size is that of no row
        width = sum(max(1, layer.count / world.tp) * layer.size for layer in heads) / max(keeping, 1)
        keys = 2 * tokens * world.cp * width * compute  # of a layer, on the mean
        gathers = 1 if recipe.parallel.reshard_after_forward is False else 2
        passes = world.accumulation
        in_layers = passes * (4 + again) * layers  # all-reduces over tp
        messages = [
            ("fsdp", "all-gather", shards, passes * gathers * (layers + 1), passes * gathers * whole),
            ("fsdp", "reduce-scatter", shards, layers + 1, trained * reduce),
            ("dp_replicate", "all-reduce", world.dp_replicate, layers + 1, trained / shards * reduce),
            ("tp", "all-reduce", world.tp, in_layers, in_layers * tokens * config.hidden_size * compute),
            ("cp", "all-gather", world.cp, passes * (2 + again) * layers, passes * (2 + again) * keeping * keys),
        ]
        gathered, reduced, replicas, tp, cp = (wire_time(*message, world, hardware) for message in messages)
        return max(computing, gathered + reduced + replicas) + tp + cp


def smallest_change(plan: Plan) -> tuple[str, Step] | None:
    """Return the first change that makes the recipe fit into the budget of a rank, as overrides, and its step. No
    change affects a number that the run computes; the least change comes first.

    Tried: gradients reduced after each micro-batch, with that smaller micro-batches, activation checkpointing, both, no
    replicas, more tp or cp, then more ranks.
    """
    closed, world_size = _ClosedForms(plan.recipe, plan.config, plan.hardware), plan.sizes.world_size
    for overrides, ranks in _changes(plan.recipe, world_size, plan.hardware.per_node):
        changed = _changed(plan.recipe, overrides)
        if problems(changed, ranks):
            continue
        world = sizes(changed, ranks)
        if closed.shards(world) > plan.budget:
            continue
        step = plan_step(changed, plan.config, world)
        if step.peak <= plan.budget:
            words = [f"{key}={str(value).lower()}" for key, value in overrides.items()]
            if ranks != world_size:
                words.append(f"--world-size {ranks}")
            return " ".join(words), step
    return None


_LESS_KEPT = {"none": ["selective", "full"], "mlp": ["selective", "full"], "selective": ["full"], "full": []}


def _changes(recipe: Recipe, world_size: int, per_node: int) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield the changes to try, as overrides and ranks."""
    train, parallel = recipe.train, recipe.parallel
    base: dict[str, Any] = {}
    is_sharded = parallel.dp_shard * parallel.cp > 1 or (parallel.dp_shard == -1 and world_size > parallel.tp)
    if not parallel.reduce_each and is_sharded and train.batch > train.micro_batch:
        base = {"parallel.reduce_each": True}
        yield base, world_size
    for micro in reversed(_divisors(train.micro_batch)[:-1]):
        yield base | {"train.micro_batch": micro}, world_size
    kinds = [{"train.activation_checkpointing": kind} for kind in _LESS_KEPT[train.activation_checkpointing]]
    for kind in kinds:
        yield base | kind, world_size
    if train.micro_batch > 1:
        base |= {"train.micro_batch": 1}
        if kinds:
            yield base | kinds[-1], world_size
    base |= kinds[-1] if kinds else {}
    if parallel.dp_shard != -1:
        base |= {"parallel.dp_shard": -1}
    if parallel.dp_replicate > 1:
        base |= {"parallel.dp_replicate": 1}
        yield base, world_size
    for ranks in (world_size * 2**n for n in range(8)):
        for tp in (n for n in _divisors(per_node) if n >= parallel.tp):
            for cp in (parallel.cp, 2 * parallel.cp):
                if (ranks, tp, cp) != (world_size, parallel.tp, parallel.cp):
                    shape = {"parallel.tp": tp} if tp != parallel.tp else {}
                    yield base | shape | ({"parallel.cp": cp} if cp != parallel.cp else {}), ranks
