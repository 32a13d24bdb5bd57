"""A training step on stand-in tensors, traced: the memory, messages and arithmetic of `Policy.train` on one rank.

The step is the trainer's own: the method's `prepare`, then `Policy.train`, on a model that `policy.build.lay_out` laid
out over a process group of as many ranks as are planned, of which this process is one and the only one.

On a planned CPU the host's tensors lie in the same memory: the step's rows are counted too.
"""

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from dtrain.base.batch import IGNORE, Row, collate
from dtrain.commands.plan.memory import Phase
from dtrain.commands.plan.planned_device import PlannedDevice
from dtrain.commands.plan.policy import PlannedPolicy, bytes_of, mark_layers, on_device
from dtrain.commands.plan.tracer import Tracer
from dtrain.methods import Method, method_of
from dtrain.models.common.config import ModelConfig
from dtrain.parallel.mesh import build_mesh
from dtrain.parallel.placement import chunk_bounds
from dtrain.parallel.runtime import Runtime
from dtrain.recipe import Sizes
from dtrain.recipe.schema import Recipe

TRACED = 3  # micro-batches: a first, a last, and one like all between them


@dataclass(frozen=True)
class Trace:
    """A traced step of `layers` layers and `micro_batches` micro-batches.

    peaks: by phase, bytes by part. counts: as of `Tracer`; and (None, ..) "parameters", "trained", "gradients",
    "state": bytes of this rank's shards, of those that are trained, and of the optimizer's state for them; "table": of
    the embeddings for each layer; "lightest": the smallest parameters that a rank has; "rows", "micro rows": of the
    host's tensors on a planned CPU, and of those that one micro-batch brings.
    """

    layers: int
    micro_batches: int
    peaks: dict[Phase, Counter[str]]
    counts: Counter[tuple]


def trace_step(recipe: Recipe, config: ModelConfig, sizes: Sizes, *, rank: int = 0, device: str = "cuda") -> Trace:
    """Trace a step of `recipe` on the model of `config`, as rank `rank` of `sizes.world_size` computes it on a device
    of type `device`. Nothing is sent: no other rank is in the process group.

    Can be called once, in a process of its own, which keeps the group. Raises RuntimeError where torch.distributed is
    up: a plan never shares a process with a run.
    """
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 (registers the backend "fake")

    if dist.is_initialized():
        raise RuntimeError("a plan needs a process of its own, and torch.distributed is up in this one")
    warnings.simplefilter("ignore")  # torch's own, of what a later release will want
    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=sizes.world_size)
    mesh = build_mesh(Runtime(), **sizes.shape, ep=sizes.ep)  # FSDP on stand-ins is FSDP on a CPU
    planned = torch.device(device, 0) if device == "cuda" else torch.device(device)
    tracer = Tracer(mesh, on_host=device == "cpu")
    policy = PlannedPolicy(recipe, config, mesh, Runtime(rank=rank, device=planned), tracer)
    mark_layers(policy.model.model.layers, tracer)
    method = method_of(recipe)
    policy.keep_beside(method)
    micro_batches = min(sizes.accumulation, TRACED)
    with PlannedDevice(planned):
        policy.init_optimizer(total_steps=10)
        with tracer:
            tracer.memory.begin(Phase("start"))
            rows = full_rows(recipe, method, micro_batches)
            batch, loss = method.prepare(policy, collate(rows, list(rows[0])))
            policy.train(batch, loss, mbs=method.micro_rows)
    parameters = list(policy.model.parameters())
    table = getattr(policy.model.model, "embed_tokens_per_layer", None)
    held = {
        "parameters": bytes_of(map(on_device, parameters)),
        "trained": bytes_of(on_device(parameter) for parameter in parameters if parameter.requires_grad),
        "table": 0 if table is None else bytes_of([on_device(table.weight)]),
        "gradients": policy.gradient_bytes,
        "state": policy.state_bytes,
        "lightest": _min_shard_bytes(parameters),
        "rows": policy.scorer.host if tracer.on_host else 0,
        "micro rows": policy.scorer.micro_rows if tracer.on_host else 0,
    }
    counts = tracer.counts + Counter({(None, name): size for name, size in held.items()})
    return Trace(config.num_hidden_layers, micro_batches, tracer.memory.peaks(), counts)


def full_rows(recipe: Recipe, method: Method, micro_batches: int) -> list[Row]:
    """Return a rank's rows of a step, as full as the recipe allows: every row of `data.max_length` tokens (a packed row
    of pairs twice as many), every token trained that has one before it; packed rows hold two documents, so that the
    masks are those of packing."""
    length = method.row_length()
    count = micro_batches * recipe.train.micro_batch * method.rows_of_a_sample()
    documents = 2 if recipe.data.packing and method.kind != "prompts" else 1
    places = torch.arange(length)
    seq_ids = places * documents // length
    begins = torch.searchsorted(seq_ids, seq_ids)
    streams = {
        "input_ids": torch.ones_like(places),
        "labels": torch.where((begins.roll(-1) == places + 1) | (places == length - 1), IGNORE, 1),
        "position_ids": places - begins,
        "seq_ids": seq_ids,
    }
    if method.kind == "prompts":
        of_rollouts = ["old_logprobs", "sampling_logprobs", "advantages", "reference_logprobs"]
        names = of_rollouts if method.needs_reference() else of_rollouts[:-1]
        streams |= {name: torch.zeros(length, dtype=torch.float64) for name in names}
    if method.kind == "labelled":  # the second half are replies that do not belong to their prompts
        streams["desirable"] = torch.where(streams["labels"] == IGNORE, 0.0, 1.0).double()
    rows: list[Row] = [{name: stream.clone() for name, stream in streams.items()} for _ in range(count)]
    others = rows if method.kind == "labelled" else []
    return [*rows, *({**row, "desirable": torch.zeros_like(row["desirable"])} for row in others)]


def _min_shard_bytes(parameters: Sequence[Tensor]) -> int:
    """Return the bytes of `parameters` on the rank that holds fewest. Chunks fall off towards the last rank of a
    dimension, so it is last in some of them; rank 0 holds most."""
    ndim = max((p.device_mesh.ndim for p in parameters if isinstance(p, DTensor)), default=0)
    corners = product((False, True), repeat=ndim)
    return min(
        sum(_elements(parameter, corner) * on_device(parameter).element_size() for parameter in parameters)
        for corner in corners
    )


def _elements(parameter: Tensor, last: tuple[bool, ...]) -> int:
    """Return the elements on the rank that is last in the mesh dimensions where `last` is true, first in the others;
    cut in the order of `placement.local_slices`."""
    if not isinstance(parameter, DTensor):
        return parameter.numel()
    sizes = list(parameter.shape)
    cuts = [
        (placement, dim)
        for dim, placement in enumerate(parameter.placements)
        if isinstance(placement, Shard | _StridedShard)
    ]
    for placement, dim in sorted(cuts, key=lambda cut: isinstance(cut[0], _StridedShard)):
        ranks = parameter.device_mesh.size(dim)
        start, end = chunk_bounds(sizes[placement.dim], ranks, ranks - 1 if last[dim] else 0)
        sizes[placement.dim] = end - start
    return prod(sizes)
