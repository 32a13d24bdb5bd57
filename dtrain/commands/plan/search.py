"""Other meshes and micro-batches for the same ranks: which fit, and which are fastest by the estimate.

The method. Every mesh (dp_replicate, dp_shard, cp, tp) of so many ranks and every micro-batch that divides a rank's
rows is a candidate. What its shards take is a closed form, and so is a rough time: arithmetic is shared alike, and what
FSDP, replicas, tp and cp send follows from the sizes (dtrain/parallel/README.md). In the order of that time candidates
are traced, each as `dtrain plan` would. The search ends with the `best` that fit, or after `max_traces`.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dtrain.commands.plan.hardware import StepTime, estimate_step, wire_time
from dtrain.commands.plan.plan import Plan, candidates, divisors, problems, with_keys, with_mesh
from dtrain.commands.plan.step import Step, plan_step
from dtrain.recipe import Recipe, Sizes, derive_sizes
from dtrain.recipe.world import FASTEST_VALUES, format_overrides, get_key, replace_keys


@dataclass(frozen=True)
class Candidate:
    """A candidate that was traced: its step, and the estimate of its time."""

    sizes: Sizes
    step: Step
    time: StepTime


@dataclass(frozen=True)
class SearchResult:
    """Outcome of a search. best: the candidates that fit, fastest first. too_large: those that were traced and do not.
    counts: the number of candidates by outcome."""

    best: list[Candidate]
    too_large: list[Candidate]
    counts: Counter[str]


def search(plan: Plan, *, best: int = 10, max_traces: int = 16) -> SearchResult:
    """Return the fastest meshes and micro-batches of a plan's recipe on its ranks whose peak is within its budget."""
    counts: Counter[str] = Counter()
    closed, spec = ClosedForms(plan), plan.spec
    ranked = []
    for world in candidates(spec.recipe, spec.model_config, spec.world.size, plan.hardware.per_node, counts):
        if closed.shards(world) > plan.budget:
            counts["shards alone exceed the budget"] += 1
        else:
            ranked.append((closed.time(world), world))
    ranked.sort(key=lambda entry: entry[0])
    fitting: list[Candidate] = []
    too_large: list[Candidate] = []
    for index, (_, world) in enumerate(ranked):
        if len(fitting) >= best or index >= max_traces:
            counts["slower by the rough time, not traced"] += len(ranked) - index
            break
        step = plan_step(with_keys(spec, with_mesh(spec.recipe, world), world))
        candidate = Candidate(world, step, estimate_step(step, world, plan.hardware))
        (fitting if step.peak <= plan.budget else too_large).append(candidate)
    counts["peak exceeds the budget"] = len(too_large)
    counts["fit"] = len(fitting)
    return SearchResult(sorted(fitting, key=lambda candidate: candidate.time.total), too_large, counts)


class ClosedForms:
    """The least bytes, the messages and the rough time of a candidate, from sizes alone."""

    def __init__(self, plan: Plan):
        self.plan, recipe = plan, plan.spec.recipe
        self.precision = plan.spec.precision
        self.fsdp = plan.spec.facts.fsdp_messages(self.precision.compute)
        self.computes_again = recipe.train.activation_checkpointing == "full"
        self.resident = plan.step.resident * _shards(plan.spec.sizes)

    def shards(self, world: Sizes) -> float:
        """Return the bytes of a rank's parameters, gradients and optimizer state, if all are sharded evenly."""
        return self.resident / _shards(world)

    def time(self, world: Sizes) -> float:
        """Return the rough seconds of a step."""
        plan, hardware = self.plan, self.plan.hardware
        passes = 4 / 3 if self.computes_again else 1  # of a layer, by one forward and backward
        flops = world.accumulation * self._tokens(world) * plan.flops_per_token * passes / world.tp
        computing = flops / (hardware.arithmetic[self.precision.compute] * hardware.reach)
        times = (wire_time(*message, world, hardware) for message in self.messages(world))
        gathered, reduced, replicas, tp, cp = times
        return max(computing, gathered + reduced + replicas) + tp + cp

    def messages(self, world: Sizes) -> list[tuple[str, str, int, float, float]]:
        """Return the dimension, kind, ranks, count and bytes of a step's messages, by the formulas of
        dtrain/parallel/README.md: of FSDP the all-gathers and the reduce-scatters, of replicas, of tp and of cp."""
        config, passes = self.plan.spec.model_config, world.accumulation
        compute, reduce = self.precision.compute.itemsize, self.precision.reduce.itemsize
        tokens, shards = self._tokens(world), world.dp_shard * world.cp
        trained, layers = self.plan.trained_parameters / world.tp, config.num_hidden_layers
        widths = self.plan.spec.facts.key_widths(world.tp)
        keeping = len(widths)  # linear layers send states, whose size is that of no row
        width = sum(widths) / max(keeping, 1)
        keys = tokens * world.cp * width * compute  # and values, of a layer, on the mean
        gathers, gathered, reduces = self.fsdp.num_gathers, self.fsdp.gathered_bytes, self.fsdp.num_reduces
        sums = passes if self.plan.spec.recipe.parallel.reduce_each else 1  # of gradients over shards, in a step
        in_layers = passes * (5 if self.computes_again else 4) * layers  # all-reduces over tp
        exchanges = passes * (3 if self.computes_again else 2)  # of a layer's keys
        return [
            ("fsdp", "all-gather", shards, passes * gathers, passes * gathered / world.tp),
            ("fsdp", "reduce-scatter", shards, sums * reduces, sums * trained * reduce),
            ("dp_replicate", "all-reduce", world.dp_replicate, reduces, trained / shards * reduce),
            ("tp", "all-reduce", world.tp, in_layers, in_layers * tokens * config.hidden_size * compute),
            ("cp", "all-gather", world.cp, exchanges * layers, exchanges * keeping * keys),
        ]

    def _tokens(self, world: Sizes) -> float:
        """Return the tokens of a pass on a rank."""
        method = self.plan.spec.method
        return world.micro_batch * method.rows_per_sample() * method.row_length() / world.cp


def _shards(world: Sizes) -> int:
    return world.tp * world.dp_shard * world.cp


def find_smallest_change(plan: Plan) -> tuple[str, Step] | None:
    """Return the first change that makes the recipe fit into the budget of a rank, as overrides, and its step. No
    change affects a number that the run computes; the least change comes first.

    Tried: gradients reduced after each micro-batch, with that smaller micro-batches, activation checkpointing, both,
    tiles, activations on the host, no replicas, more tp or cp, then more ranks.
    """
    closed, spec = ClosedForms(plan), plan.spec
    for overrides, ranks in _changes(spec.recipe, spec.world.size, plan.hardware.per_node):
        recipe = replace_keys(spec.recipe, overrides)
        if problems(recipe, ranks):
            continue
        world = derive_sizes(recipe, ranks)
        if closed.shards(world) > plan.budget:
            continue
        step = plan_step(with_keys(spec, recipe, world))
        if step.peak <= plan.budget:
            words = format_overrides(overrides)
            if ranks != spec.world.size:
                words.append(f"--world-size {ranks}")
            return " ".join(words), step
    return None


_LESS_KEPT = {"none": ["selective", "full"], "mlp": ["selective", "full"], "selective": ["full"], "full": []}


def _changes(recipe: Recipe, world_size: int, per_node: int) -> Iterator[tuple[dict[str, Any], int]]:
    train, parallel = recipe.train, recipe.parallel
    base: dict[str, Any] = {}
    is_sharded = parallel.dp_shard * parallel.cp > 1 or (parallel.dp_shard == -1 and world_size > parallel.tp)
    if not parallel.reduce_each and is_sharded and train.num_batch_rows > train.num_micro_batch_rows:
        base = {"parallel.reduce_each": True}
        yield base, world_size
    for micro in reversed(divisors(train.num_micro_batch_rows)[:-1]):
        yield base | {"train.micro_batch": micro}, world_size
    kinds = [{"train.activation_checkpointing": kind} for kind in _LESS_KEPT[train.activation_checkpointing]]
    for kind in kinds:
        yield base | kind, world_size
    if train.num_micro_batch_rows > 1:
        base |= {"train.micro_batch": 1}
        if kinds:
            yield base | kinds[-1], world_size
    base |= kinds[-1] if kinds else {}
    for key, value in (("train.tile", "all"), ("train.activation_offload", True)):
        if get_key(recipe, key) == FASTEST_VALUES[key]:
            base |= {key: value}
            yield base, world_size
    if parallel.dp_shard != -1:
        base |= {"parallel.dp_shard": -1}
    if parallel.dp_replicate > 1:
        base |= {"parallel.dp_replicate": 1}
        yield base, world_size
    for ranks in (world_size * 2**n for n in range(8)):
        for tp in (n for n in divisors(per_node) if n >= parallel.tp):
            for cp in (parallel.cp, 2 * parallel.cp):
                if (ranks, tp, cp) != (world_size, parallel.tp, parallel.cp):
                    shape = {"parallel.tp": tp} if tp != parallel.tp else {}
                    yield base | shape | ({"parallel.cp": cp} if cp != parallel.cp else {}), ranks
