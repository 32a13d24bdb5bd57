"""One training step on stand-in tensors, watched: what `Policy.train` allocates, sends and computes on one rank.

The step is the trainer's own: the method's `prepare`, then `Policy.train`, on a model that `policy.build.lay_out` laid
out over a process group of as many ranks as are planned, of which this process is one and the only one. The optimizer
steps this rank's shards as plain tensors; `optimizer.state_bytes` says what it holds.

On a planned CPU the host's tensors lie in the same memory: the step's rows are counted too.
"""

import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod

import torch.distributed as dist

from dtrain.batch import collate
from dtrain.config import Sizes
from dtrain.config.schema import Recipe
from dtrain.methods import METHODS
from dtrain.models.config import ModelConfig
from dtrain.parallel.mesh import build_mesh
from dtrain.parallel.placement import local_tensor
from dtrain.parallel.runtime import Runtime
from dtrain.plan.costs import Cost
from dtrain.plan.memory import Piece
from dtrain.plan.optimizer import state_bytes
from dtrain.plan.policy import PlannedPolicy, keep_beside, mark_layers
from dtrain.plan.rows import full_rows
from dtrain.plan.shards import min_shard_elements
from dtrain.plan.stand_in import OnDevice


@contextmanager
def world(rank: int, size: int) -> Iterator[None]:
    """A process group of `size` ranks in which this process is `rank` and nobody else is there; nothing is sent.

    Raises RuntimeError where torch.distributed is up: a plan never shares a process with a run.
    """
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 (registers the backend "fake")

    if dist.is_initialized():
        raise RuntimeError("a plan needs a process of its own, and torch.distributed is up in this one")
    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


TRACED = 3  # micro-batches: a first, a last, and one like all between them

# One row of a step's traffic: (dimension, kind, ranks, on_host).
Lane = tuple[str, str, int, bool]


@dataclass(frozen=True)
class Watched:
    """A step of so many layers and micro-batches, as it was seen.

    pieces: by (phase, pass, layer), the peaks of its timeline; a pass is one micro-batch through the model, None what
    is around them. traffic: (count, bytes) by pass and lane. costs: by pass. parameters, gradients, state: bytes of
    this rank's shards, and of what the optimizer keeps for them. lightest: the smallest parameters that a rank has.
    micro_batches: that were traced. rows, micro_rows: of the host's tensors on a planned CPU, and of those of them that
    one micro-batch brings.
    """

    layers: int
    pieces: dict[tuple[str, int | None, int | None], Piece]
    traffic: dict[int | None, dict[Lane, tuple[int, int]]]
    costs: dict[int | None, Cost]
    parameters: int
    gradients: int
    state: int
    lightest: int
    micro_batches: int
    rows: int
    micro_rows: int


def watch_step(recipe: Recipe, config: ModelConfig, sizes: Sizes, *, rank: int = 0, device: str = "cuda") -> "Watched":
    """One step of `recipe` on the model of `config`, as rank `rank` of `sizes.world_size` computes it on a device of
    type `device`. No collective is sent; torch.distributed must not be up."""
    micro_batches = min(sizes.accumulation, TRACED)
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # torch's own, of what a later release will want
        stack.enter_context(world(rank, sizes.world_size))
        runtime = Runtime(rank=rank, world_size=sizes.world_size)  # FSDP on stand-ins is FSDP on a CPU
        mesh = build_mesh(runtime, dp_replicate=sizes.dp_replicate, dp_shard=sizes.dp_shard, cp=sizes.cp, tp=sizes.tp)
        on_device = stack.enter_context(OnDevice(device))
        policy = PlannedPolicy(recipe, config, mesh, rank, on_device.device)
        mark_layers(policy)
        method = METHODS[recipe.method](recipe)
        keep_beside(policy, method)
        policy.init_optimizer(total_steps=10)
        with policy.watch:
            policy.watch.storages.mark(("start", None, None))
            rows = full_rows(recipe, method, micro_batches)
            batch, loss = method.prepare(policy, collate(rows, list(rows[0])))
            policy.train(batch, loss, mbs=method.micro_rows)
    return _seen(policy, config.num_hidden_layers, micro_batches)


def _seen(policy: PlannedPolicy, layers: int, micro_batches: int) -> Watched:
    watch = policy.watch
    traffic: dict[int | None, dict[Lane, tuple[int, int]]] = defaultdict(dict)
    for number, sent in watch.sent:
        lane = (sent.dimension, sent.kind, sent.ranks, sent.on_host)
        count, size = traffic[number].get(lane, (0, 0))
        traffic[number][lane] = count + 1, size + sent.size
    parameters = list(policy.model.parameters())
    shapes = [tuple(local_tensor(parameter.detach()).shape) for parameter in parameters]
    itemsize = policy.precision.master.itemsize
    rows = (policy.scorer.host, policy.scorer.micro_rows) if watch.on_host else (0, 0)
    return Watched(
        layers,
        watch.storages.pieces(),
        dict(traffic),
        dict(watch.costs),
        sum(map(prod, shapes)) * itemsize,
        policy.gradient_bytes,
        state_bytes(policy.recipe.optimizer, shapes, policy.precision.master),
        min_shard_elements(parameters) * itemsize,
        micro_batches,
        *rows,
    )
