"""FSDP2 over a decoder, and the only place that knows FSDP.

`shard_model` decides which modules form one unit, in which dtypes, and that gradients are summed (never averaged).
`Sharding` is what the rest of dtrain uses afterwards: it gathers and frees weights, and decides when gradients are
reduced.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import Shard

from dtrain.parallel.experts import expert_parameters
from dtrain.parallel.placement import local_tensor
from dtrain.parallel.tensor import ParallelModel, ScoreHead, VocabEmbedding, full_precision_modules


class _Unit(FSDPModule):
    reshards_after_forward: bool


class MasterTensor(Tensor):
    """Local tensor of a parameter of which FSDP gathers a rounded copy (`memory.host_masters`).

    Attributes:
        rounded: The copy, [rows, ..], filled up with rows to the size of the largest rank's shard.
    """

    rounded: Tensor

    def refresh(self) -> None:
        """Round the copy anew, after this tensor was written."""
        raise NotImplementedError


def get_host_masters(model: nn.Module) -> list[MasterTensor]:
    """Return the local tensors of `model` of which FSDP gathers rounded copies."""
    local_tensors = [local_tensor(parameter) for parameter in model.parameters()]
    return [tensor for tensor in local_tensors if isinstance(tensor, MasterTensor)]


def get_device_parameter(parameter: Tensor) -> Tensor:
    """Return `parameter` [..], or the device's rounded copy of its shard if the parameter is in host memory."""
    local = local_tensor(parameter)
    return local.rounded if isinstance(local, MasterTensor) else parameter


@dataclass(frozen=True)
class FsdpUnits:
    """The modules of a model that FSDP gathers each by itself, without those within them that are units too.

    exact: those that keep their precision. lookups: embeddings that are not tied to the head. tower: layers of a vision
    tower. layers: of the decoder. ends: the head where it is no part of the root, and the root.
    """

    exact: list[nn.Module]
    lookups: list[nn.Module]
    tower: list[nn.Module]
    layers: list[nn.Module]
    ends: list[nn.Module]

    def regathered_in_backward(self, reshard_after_forward: bool | str) -> list[nn.Module]:
        """Return the units that the forward gives back and the backward gathers once more."""
        if reshard_after_forward is False:
            return []
        if reshard_after_forward is True:
            return [*self.tower, *self.layers, *self.ends]
        return [*self.tower, *self.layers[:-1]]

    def parameters(self) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
        """Yield each unit with the parameters that it gathers."""
        seen = set[nn.Parameter]()
        for unit in (*self.exact, *self.lookups, *self.tower, *self.layers, *self.ends):
            own = [parameter for parameter in unit.parameters() if parameter not in seen]
            seen.update(own)
            yield unit, own


def get_fsdp_units(model: ParallelModel) -> FsdpUnits:
    """Return the units of `model`: every decoder layer, an embedding and the head each where they are not tied to each
    other, and the root of what is left: the last norm, with a tied pair or a classifier's small head."""
    head = model.head
    embeddings = [module for module in model.modules() if isinstance(module, VocabEmbedding)]
    lookups: list[nn.Module] = [embedding for embedding in embeddings if embedding.weight is not head.weight]
    is_in_root = len(lookups) < len(embeddings) or isinstance(head, ScoreHead)
    # A module that has buffers only is of no concern to FSDP.
    exact = (module for module in full_precision_modules(model).values() if any(True for _ in module.parameters()))
    return FsdpUnits(
        exact=list(exact),
        lookups=lookups,
        tower=list(model.model.vision_layers),
        layers=list(model.model.layers),
        ends=[model] if is_in_root else [head, model],
    )


def mixed_precision(compute_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None) -> MixedPrecisionPolicy:
    """Return FSDP's policy of these dtypes. Inputs are not cast at the borders of units: ids are integers, and hidden
    states and rotary tables have the dtype already."""
    return MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)


def shard_model(
    model: ParallelModel,
    mesh: DeviceMesh,
    precision: MixedPrecisionPolicy,
    offload: OffloadPolicy | None = None,
    reshard_after_forward: bool | str = "default",
    expert_mesh: DeviceMesh | None = None,
) -> "Sharding":
    """Shard `model` in place by its units, and return its `Sharding`.

    mesh: one dimension, or (replicate, shard) for HSDP; expert_mesh: the same of experts that lie over ep, whose layer
    then has two messages where it has one. By default a layer is gathered before its forward and again
    before its backward (one all-gather each, the next layer's on its way while one computes), its gradient
    reduce-scattered after, and under HSDP all-reduced over the replicas. The last layer, the head and the root stay
    gathered between the two: the last of the forward are the first of the backward. An embedding is gathered for its
    forward alone, for its backward reads ids. reshard_after_forward True gives up the former too, False keeps all: one
    all-gather, and the whole model in memory.

    Gradients are summed: the loss already divides by the count of the global batch. A frozen parameter that one rank
    holds whole, in the dtype of computation, is left as it is: FSDP would copy it for every forward.
    """
    offload = offload or OffloadPolicy()
    shards = None if expert_mesh is None else _shards(model, expert_mesh)
    own_unit = partial(_own_unit, shards=shards, whole=_left_whole(model, mesh, precision, offload, expert_mesh))
    units = get_fsdp_units(model)
    again = units.regathered_in_backward(reshard_after_forward)
    # Modules that the decoder calls before the layers compute in float32 where the others compute in half: each is a
    # unit of its own, which stays gathered from the forward to the backward.
    wide = precision.param_dtype and torch.promote_types(precision.param_dtype, torch.float32)
    for module in units.exact:
        own_unit(module, mesh, mixed_precision(wide, wide), offload, False)
    # In the weights' dtype: what comes between an embedding and the layers is not the unit's.
    plain = replace(precision, output_dtype=None)
    lookups = [own_unit(module, mesh, plain, offload, reshard_after_forward is not False) for module in units.lookups]
    for lookup in lookups:
        lookup.set_unshard_in_backward(False)
    for module in units.tower:  # FSDP finds out by itself in which order these are gathered
        own_unit(module, mesh, precision, offload, module in again)
    stack = [own_unit(module, mesh, precision, offload, module in again) for module in (*units.layers, *units.ends)]
    for unit, following in pairwise([stack[-1], *lookups, *stack[:-1]]):
        unit.set_modules_to_forward_prefetch([following])
    # The head's weight is read inside these; unregistered, they would see this rank's shard and give wrong numbers.
    register_fsdp_forward_method(model.head, "with_weight")  # for nothing where it is no unit
    for name in ("with_head", "next_logits"):
        register_fsdp_forward_method(model, name)
    return Sharding(model)


def _left_whole(
    model: nn.Module,
    mesh: DeviceMesh,
    precision: MixedPrecisionPolicy,
    offload: OffloadPolicy,
    expert_mesh: DeviceMesh | None,
) -> set[nn.Parameter]:
    """Return the parameters that FSDP need not see."""
    if isinstance(offload, CPUOffloadPolicy):
        return set()
    experts = set[nn.Parameter]() if expert_mesh is None else expert_parameters(model)
    whole = set()
    for parameter in model.parameters():
        shared = mesh if expert_mesh is None or parameter not in experts else expert_mesh
        is_ready = not parameter.is_floating_point() or precision.param_dtype in (None, parameter.dtype)
        if shared.size() == 1 and is_ready and not parameter.requires_grad:
            whole.add(parameter)
    return whole


Shards = Callable[[nn.Parameter], Any]


def _shards(model: nn.Module, mesh: DeviceMesh) -> Shards:
    """Return the mesh over which parameters over ep are sharded: over `mesh`, between experts, or by the columns of
    each where there are fewer than ranks and that cuts evenly. Of others None."""
    # Not above: torch 2.11 has none, and runs all but ep.
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult

    if mesh.ndim > 1:
        info: FSDPMeshInfo = HSDPMeshInfo(mesh=mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    else:
        info = FSDPMeshInfo(mesh=mesh, shard_mesh_dim=0)
    ranks = mesh.size(mesh.ndim - 1)
    experts = expert_parameters(model)

    def shards(parameter: nn.Parameter) -> Any:
        if parameter not in experts:
            return None
        count, *_, columns = local_tensor(parameter).shape
        last = parameter.dim() - 1
        # Codes (adapters.nf4) are cut where their scales are: 32 bytes of codes have one.
        pieces = columns // 32 if parameter.dtype == torch.uint8 else columns
        placement = Shard(last if count < ranks and pieces % ranks == 0 else 0)
        return ShardPlacementResult(placement=placement, mesh_info=info)

    return shards


def _own_unit(
    module: nn.Module,
    mesh: DeviceMesh,
    precision: MixedPrecisionPolicy,
    offload: OffloadPolicy,
    reshard: bool,
    shards: Shards | None,
    whole: set[nn.Parameter],
) -> _Unit:
    fully_shard(
        module,
        mesh=mesh,
        mp_policy=precision,
        offload_policy=offload,
        reshard_after_forward=reshard,
        shard_placement_fn=shards,
        ignored_params=whole,
    )
    unit = cast(_Unit, module)
    unit.reshards_after_forward = reshard
    unit.set_gradient_divide_factor(1.0)
    unit.set_force_sum_reduction_for_comms(True)
    return unit


class Sharding:
    """The FSDP units of one model: gathers and frees their weights, and controls when gradients are reduced.

    FSDP gathers a unit's weights for its forward and frees them afterwards. The last layers of a forward stay gathered,
    because a backward usually follows. If none follows, as in an evaluation, `reshard` frees them. Until then
    `model.parameters()` are the gathered copies: values written to them are lost, and a save would see no shards.

    Works for a model without FSDP, too, which has no units.

    Args:
        model: A model that `shard_model` has sharded, or one that is not sharded.

    Attributes:
        is_sharded: Whether the model has FSDP units.

    Example:
        with torch.no_grad():
            loss = model(batch)
        sharding.reshard()
        with sharding.writing():
            for parameter in model.parameters():
                parameter.mul_(0.5)
    """

    def __init__(self, model: nn.Module):
        self._model = model
        self._units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self.is_sharded = len(self._units) > 0

    def reshard(self) -> None:
        """Free every gathered weight, so that parameters are this rank's shards. No collective."""
        for unit in self._units:
            unit.reshard()

    @contextmanager
    def unsharded(self) -> Iterator[None]:
        """Keep the weights of all units gathered, for any number of forwards without a backward.

        Collectives:
            One all-gather per unit at the beginning. The forwards inside gather nothing.
        """
        units = [cast(_Unit, unit) for unit in self._units]
        try:
            for unit in units:
                unit.set_reshard_after_forward(False, recurse=False)
                unit.unshard()
            yield
        finally:
            for unit in units:
                unit.set_reshard_after_forward(unit.reshards_after_forward, recurse=False)
            self.reshard()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Context for code that writes parameters in place.

        Frees gathered weights before, because values written to gathered copies are lost. Rounds the copies of
        host masters (`memory.host_masters`) anew after, also if the code inside raises an error. No collective.
        """
        self.reshard()
        try:
            yield
        finally:
            for master in get_host_masters(self._model):
                master.refresh()

    def sync_gradients(self, is_last: bool, reduce_each: bool = False) -> None:
        """Set what the next backward does with its gradients.

        Args:
            is_last: Whether it is the backward of a step's last micro-batch, after which gradients are reduced over all
                ranks. Before that they stay as this rank computed them.
            reduce_each: Reduce gradients over the shards after every micro-batch. This saves the memory of unsharded
                gradients. They are still reduced over replicas only after the last.
        """
        if isinstance(self._model, FSDPModule):
            self._model.set_requires_gradient_sync(is_last or reduce_each)
            self._model.set_requires_all_reduce(is_last)
            self._model.set_is_last_backward(is_last)


@contextmanager
def unshard_fsdp2_model(model: nn.Module) -> Iterator[None]:
    """Gather the weights of every FSDP unit of `model`, and free them when the context ends.

    NeMo-RL's function. It is for reading weights, and accepts models that other code has sharded. A forward inside may
    free weights again; use `Sharding.unsharded` for forwards.

    Collectives:
        One all-gather per unit.
    """
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    try:
        for unit in units:
            unit.unshard()
        yield
    finally:
        for unit in units:
            unit.reshard()
