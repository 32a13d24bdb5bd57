"""Search for the fastest meshes and micro-batches for a number of ranks that fit into memory.

The method. Every mesh (dp_replicate, dp_shard, cp, tp) of this number of ranks and every micro-batch that divides a
rank's rows is a candidate. The size of its shards has a closed form, and so has a rough step time: arithmetic is
divided evenly, and the messages of FSDP, replicas, tp and cp follow from the sizes (dtrain/parallel/README.md).
Candidates whose shards fit are traced in the order of the rough time, each as `dtrain plan` would. The search ends when
`best` candidates fit, or after `max_traces`.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from dtrain.commands.plan.hardware import StepTime, estimate_step, wire_time
from dtrain.commands.plan.plan import Plan, candidates, divisors, problems, with_keys, with_mesh
from dtrain.commands.plan.step import Step, plan_step
from dtrain.recipe import Recipe, Sizes, derive_sizes
from dtrain.recipe.world import FASTEST_VALUES, format_overrides, get_key, replace_keys


@dataclass(frozen=True)
class Candidate:
    """A mesh and micro-batch that was traced.

    Attributes:
        sizes: The mesh and the micro-batch.
        step: The traced step.
        time: Its estimated time.
    """

    sizes: Sizes
    step: Step
    time: StepTime


@dataclass(frozen=True)
class SearchResult:
    """The outcome of a search.

    Attributes:
        best: Candidates that fit, fastest first.
        too_large: Candidates that were traced and do not fit.
        counts: Number of candidates by outcome.
    """

    best: list[Candidate]
    too_large: list[Candidate]
    counts: Counter[str]


def search(plan: Plan, *, best: int = 10, max_traces: int = 16) -> SearchResult:
    """Search the fastest meshes and micro-batches whose peak is within a plan's budget.

    Args:
        plan: Plan of the recipe on its own mesh.
        best: Number of candidates to find.
        max_traces: Maximum number of candidates to trace.
    """
    counts: Counter[str] = Counter()
    closed_forms, spec = ClosedForms(plan), plan.spec
    ranked: list[tuple[float, Sizes]] = []
    for sizes in candidates(spec.recipe, spec.model_config, spec.world.size, plan.hardware.per_node, counts):
        if closed_forms.shard_bytes(sizes) > plan.budget:
            counts["shards alone exceed the budget"] += 1
        else:
            ranked.append((closed_forms.time(sizes), sizes))
    ranked.sort(key=lambda entry: entry[0])
    fitting: list[Candidate] = []
    too_large: list[Candidate] = []
    for index, (_, sizes) in enumerate(ranked):
        if len(fitting) >= best or index >= max_traces:
            counts["slower by the rough time, not traced"] += len(ranked) - index
            break
        step = plan_step(with_keys(spec, with_mesh(spec.recipe, sizes), sizes))
        candidate = Candidate(sizes, step, estimate_step(step, sizes, plan.hardware))
        if step.peak <= plan.budget:
            fitting.append(candidate)
        else:
            too_large.append(candidate)
    counts["peak exceeds the budget"] = len(too_large)
    counts["fit"] = len(fitting)
    return SearchResult(sorted(fitting, key=lambda candidate: candidate.time.total), too_large, counts)


class Message(NamedTuple):
    """All messages of one kind in a step.

    Attributes:
        dimension: Dimension of the mesh.
        kind: Kind of collective.
        num_ranks: Ranks of the group.
        num_messages: Number of messages.
        size: Bytes of all messages together.
    """

    dimension: str
    kind: str
    num_ranks: int
    num_messages: float
    size: float


class ClosedForms:
    """Lower bound of the memory, messages and rough time of a candidate, computed from sizes without a trace.

    Args:
        plan: Plan of the recipe on its own mesh.
    """

    def __init__(self, plan: Plan):
        self.plan = plan
        self.precision = plan.spec.precision
        self.fsdp = plan.spec.facts.fsdp_messages(self.precision.compute)
        self.recomputes = plan.spec.recipe.train.activation_checkpointing == "full"
        self.unsharded_bytes = plan.step.resident * _num_shards(plan.spec.sizes)

    def shard_bytes(self, sizes: Sizes) -> float:
        """Return the bytes of a rank's parameters, gradients and optimizer state, if all are sharded evenly."""
        return self.unsharded_bytes / _num_shards(sizes)

    def time(self, sizes: Sizes) -> float:
        """Return the rough seconds of a step."""
        plan, hardware = self.plan, self.plan.hardware
        # A forward and a backward take three times the forward. Recomputing the layers adds one more forward.
        recompute_factor = 4 / 3 if self.recomputes else 1
        flops = sizes.accumulation * self._tokens(sizes) * plan.flops_per_token * recompute_factor / sizes.tp
        computing = flops / (hardware.arithmetic[self.precision.compute] * hardware.reach)
        gathers, reductions, replicas, tp, cp = [
            wire_time(*message, sizes, hardware) for message in self.messages(sizes)
        ]
        # FSDP and replicas communicate while layers compute, tp and cp do not.
        return max(computing, gathers + reductions + replicas) + tp + cp

    def messages(self, sizes: Sizes) -> list[Message]:
        """Return a step's messages: FSDP's all-gathers and reduce-scatters, then those of replicas, tp and cp.

        The formulas are explained in dtrain/parallel/README.md.
        """
        spec, config = self.plan.spec, self.plan.spec.model_config
        compute_bytes, reduce_bytes = self.precision.compute.itemsize, self.precision.reduce.itemsize
        num_shards = sizes.dp_shard * sizes.cp
        num_passes = sizes.accumulation
        num_layers = config.num_hidden_layers
        tokens = self._tokens(sizes)
        trained = self.plan.trained_parameters / sizes.tp
        num_gathers, num_reductions = self.fsdp.num_gathers, self.fsdp.num_reduces
        reductions_per_step = num_passes if spec.recipe.parallel.reduce_each else 1
        # Per layer and pass: two all-reduces in the forward, two in the backward, one more if it recomputes.
        tp_reductions = num_passes * (5 if self.recomputes else 4) * num_layers
        # Linear-attention layers have no keys: they send states, whose size does not depend on the row.
        key_widths = spec.facts.key_widths(sizes.tp)
        num_key_layers = len(key_widths)
        mean_width = sum(key_widths) / max(num_key_layers, 1)
        bytes_per_exchange = tokens * sizes.cp * mean_width * compute_bytes  # keys and values of a layer
        cp_exchanges = num_passes * (3 if self.recomputes else 2)  # of each layer
        return [
            Message("fsdp", "all-gather", num_shards, num_passes * num_gathers, self._gathered_bytes(sizes)),
            Message(
                "fsdp",
                "reduce-scatter",
                num_shards,
                reductions_per_step * num_reductions,
                reductions_per_step * trained * reduce_bytes,
            ),
            Message(
                "dp_replicate", "all-reduce", sizes.dp_replicate, num_reductions, trained / num_shards * reduce_bytes
            ),
            Message(
                "tp", "all-reduce", sizes.tp, tp_reductions, tp_reductions * tokens * config.hidden_size * compute_bytes
            ),
            Message(
                "cp",
                "all-gather",
                sizes.cp,
                cp_exchanges * num_layers,
                cp_exchanges * num_key_layers * bytes_per_exchange,
            ),
        ]

    def _gathered_bytes(self, sizes: Sizes) -> float:
        return sizes.accumulation * self.fsdp.gathered_bytes / sizes.tp

    def _tokens(self, sizes: Sizes) -> float:
        """Return the tokens of a pass on a rank."""
        method = self.plan.spec.method
        return sizes.micro_batch * method.rows_per_sample() * method.row_length() / sizes.cp


def _num_shards(sizes: Sizes) -> int:
    return sizes.tp * sizes.dp_shard * sizes.cp


def find_smallest_change(plan: Plan) -> tuple[str, Step] | None:
    """Find the smallest change with which a recipe fits into the plan's budget.

    No change affects the numbers that the run computes. The changes are tried in this order: gradients reduced after
    each micro-batch, smaller micro-batches, activation checkpointing, both, tiles, activations on the host, no
    replicas, more tp or cp, then more ranks.

    Returns:
        The change as overrides, and its step. None if none of the changes fits.
    """
    closed_forms, spec = ClosedForms(plan), plan.spec
    for overrides, world_size in _changes(spec.recipe, spec.world.size, plan.hardware.per_node):
        recipe = replace_keys(spec.recipe, overrides)
        if problems(recipe, world_size):
            continue
        changed_sizes = derive_sizes(recipe, world_size)
        if closed_forms.shard_bytes(changed_sizes) > plan.budget:
            continue
        step = plan_step(with_keys(spec, recipe, changed_sizes))
        if step.peak <= plan.budget:
            words = format_overrides(overrides)
            if world_size != spec.world.size:
                words.append(f"--world-size {world_size}")
            return " ".join(words), step
    return None


# Kind of activation checkpointing -> kinds that keep less memory.
_STRONGER_CHECKPOINTING = {
    "none": ["selective", "full"],
    "mlp": ["selective", "full"],
    "selective": ["full"],
    "full": [],
}


def _changes(recipe: Recipe, world_size: int, per_node: int) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield changes (overrides, world size), smallest first. Later ones include some of the earlier ones."""
    train, parallel = recipe.train, recipe.parallel
    base: dict[str, Any] = {}
    is_sharded = parallel.dp_shard * parallel.cp > 1 or (parallel.dp_shard == -1 and world_size > parallel.tp)
    if not parallel.reduce_each and is_sharded and train.num_batch_rows > train.num_micro_batch_rows:
        base = {"parallel.reduce_each": True}
        yield base, world_size
    for micro_batch in reversed(divisors(train.num_micro_batch_rows)[:-1]):
        yield base | {"train.micro_batch": micro_batch}, world_size
    checkpointing = [
        {"train.activation_checkpointing": kind} for kind in _STRONGER_CHECKPOINTING[train.activation_checkpointing]
    ]
    for change in checkpointing:
        yield base | change, world_size
    if train.num_micro_batch_rows > 1:
        base |= {"train.micro_batch": 1}
        if checkpointing:
            yield base | checkpointing[-1], world_size
    if checkpointing:
        base |= checkpointing[-1]
    for key, value in (("train.tile", "all"), ("train.activation_offload", True)):
        if get_key(recipe, key) == FASTEST_VALUES[key]:
            base |= {key: value}
            yield base, world_size
    if parallel.dp_shard != -1:
        base |= {"parallel.dp_shard": -1}
    if parallel.dp_replicate > 1:
        base |= {"parallel.dp_replicate": 1}
        yield base, world_size
    larger_tps = [tp for tp in divisors(per_node) if tp >= parallel.tp]
    for exponent in range(8):
        num_ranks = world_size * 2**exponent
        for tp in larger_tps:
            for cp in (parallel.cp, 2 * parallel.cp):
                if (num_ranks, tp, cp) == (world_size, parallel.tp, parallel.cp):
                    continue
                shape = {}
                if tp != parallel.tp:
                    shape["parallel.tp"] = tp
                if cp != parallel.cp:
                    shape["parallel.cp"] = cp
                yield base | shape, num_ranks
