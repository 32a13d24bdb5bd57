"""FSDP2 over a decoder. The FSDP units of a model are made here, and controlled through `Sharding`.

`shard_model` decides which modules form one unit, in which dtypes, and that gradients are summed. `Sharding` is what
the rest of dtrain uses afterwards: it gathers and frees weights, and decides when gradients are reduced.

A unit is a module whose weights FSDP gathers in one all-gather. Example: 3 layers, an embedding that is not tied to the
head, over 2 ranks. By default one step with one micro-batch does this (U is the root with the last norm):

    forward     all-gather U, embedding, layer 0, layer 1, layer 2, head     (each starts while the one before computes)
                the embedding, layer 0 and layer 1 are freed after their forward
                layer 2, the head and U stay gathered, because the backward begins with them
    backward    all-gather layer 1, layer 0     (an embedding's backward reads only ids, not the weight)
                reduce-scatter of each unit's gradients, right after its backward

Gradient reduction: each rank has the gradient of its own tokens for every element of a unit. The reduce-scatter adds
the ranks' gradients, and leaves each rank the sum for its own shard. Under HSDP an all-reduce over the replicas
follows. Example with a weight of 4 elements on 2 ranks:

    gradient on rank 0   [1, 2, 3, 4]                  shard of rank 0 after the reduction   [11, 22]
    gradient on rank 1   [10, 20, 30, 40]              shard of rank 1                       [33, 44]

FSDP's default would divide these sums by 2. dtrain sets the divisor to 1, because each rank has already divided its
loss by the number of tokens in the global batch. With several micro-batches, gradients are added on each rank, and
reduced once after the last backward (`Sharding.sync_gradients`).
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
    """FSDP unit that `shard_model` has made.

    Attributes:
        reshards_after_forward: Whether the unit's weights are freed after its forward.
    """

    reshards_after_forward: bool


class MasterTensor(Tensor):
    """Local shard of a parameter in host memory, of which FSDP gathers a rounded copy (`memory.host_masters`).

    Attributes:
        rounded: The copy on the device, [rows, ..], padded with rows to the size of the largest rank's shard.
    """

    rounded: Tensor

    def refresh(self) -> None:
        """Round the copy again, after this tensor was written."""
        raise NotImplementedError


def get_host_masters(model: nn.Module) -> list[MasterTensor]:
    """Return the local shards of `model` that are in host memory and have a rounded copy on the device."""
    local_tensors = [local_tensor(parameter) for parameter in model.parameters()]
    return [tensor for tensor in local_tensors if isinstance(tensor, MasterTensor)]


def get_device_parameter(parameter: Tensor) -> Tensor:
    """Return `parameter`, or the rounded copy of its local shard if the shard is in host memory."""
    local = local_tensor(parameter)
    return local.rounded if isinstance(local, MasterTensor) else parameter


@dataclass(frozen=True)
class FsdpUnits:
    """The modules of a model that are FSDP units. A unit inside another one is gathered separately.

    Attributes:
        exact: Modules that compute in float32 at least (`LocalParameters.keeps_full_precision`).
        lookups: Embeddings that are not tied to the head.
        tower: Layers of a vision tower.
        layers: Layers of the decoder.
        ends: The head, unless it is part of the root, and the root.
    """

    exact: list[nn.Module]
    lookups: list[nn.Module]
    tower: list[nn.Module]
    layers: list[nn.Module]
    ends: list[nn.Module]

    def regathered_in_backward(self, reshard_after_forward: bool | str) -> list[nn.Module]:
        """Return the units that are freed after their forward and gathered again for their backward.

        Args:
            reshard_after_forward: As in `shard_model`.
        """
        if reshard_after_forward is False:
            return []
        if reshard_after_forward is True:
            return [*self.tower, *self.layers, *self.ends]
        return [*self.tower, *self.layers[:-1]]

    def parameters(self) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
        """Yield each unit with the parameters that it gathers, inner units before the root that contains them."""
        seen = set[nn.Parameter]()
        for unit in (*self.exact, *self.lookups, *self.tower, *self.layers, *self.ends):
            unit_parameters = [parameter for parameter in unit.parameters() if parameter not in seen]
            seen.update(unit_parameters)
            yield unit, unit_parameters


def get_fsdp_units(model: ParallelModel) -> FsdpUnits:
    """Return the modules of `model` that become FSDP units.

    These are every decoder layer, and the embedding and the head separately unless they are tied. The root has the
    rest: the last norm, and a tied pair or the small head of a classifier.
    """
    head = model.head
    embeddings = [module for module in model.modules() if isinstance(module, VocabEmbedding)]
    lookups: list[nn.Module] = [embedding for embedding in embeddings if embedding.weight is not head.weight]
    is_head_tied = len(lookups) < len(embeddings)
    exact: list[nn.Module] = []
    for module in full_precision_modules(model).values():
        has_parameters = any(True for _ in module.parameters())
        if has_parameters:  # FSDP ignores buffers
            exact.append(module)
    return FsdpUnits(
        exact=exact,
        lookups=lookups,
        tower=list(model.model.vision_layers),
        layers=list(model.model.layers),
        ends=[model] if is_head_tied or isinstance(head, ScoreHead) else [head, model],
    )


def mixed_precision(compute_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None) -> MixedPrecisionPolicy:
    """Return FSDP's policy for these dtypes.

    Inputs are not cast where they enter a unit: ids are integers, and hidden states and rotary tables have the right
    dtype already.

    Args:
        compute_dtype: Dtype to which gathered weights are cast. None: that of the parameters.
        reduce_dtype: Dtype in which gradients are reduced. None: `compute_dtype`.
    """
    return MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)


def shard_model(
    model: ParallelModel,
    mesh: DeviceMesh,
    precision: MixedPrecisionPolicy,
    offload: OffloadPolicy | None = None,
    reshard_after_forward: bool | str = "default",
    expert_mesh: DeviceMesh | None = None,
) -> "Sharding":
    """Shard `model` in place by FSDP2, unit by unit. The module's docstring has an example.

    Gradients are summed, not averaged: the loss already divides by the count of the global batch.

    A frozen parameter that only one rank stores, in the compute dtype, is ignored by FSDP, which would copy it in every
    forward.

    Args:
        model: The model, on the meta device or with weights.
        mesh: One dimension, or two, (replicate, shard), for HSDP.
        precision: Dtypes of computation and reduction.
        offload: Where FSDP stores the shards. None: on the device.
        reshard_after_forward: The units that are freed between forward and backward. "default": all but the last layer,
            the head and the root, because the forward ends and the backward begins with these. True: all units. False:
            none, so the whole model stays in memory.
        expert_mesh: Mesh over which experts that are distributed over ep are sharded, with the dimensions of `mesh`.
            Their layer then has two all-gathers instead of one.
    """
    offload = offload or OffloadPolicy()
    placement_fn = None if expert_mesh is None else _expert_placements(model, expert_mesh)
    make_unit = partial(
        _make_unit,
        offload=offload,
        placement_fn=placement_fn,
        ignored=_parameters_to_ignore(model, mesh, precision, offload, expert_mesh),
    )
    units = get_fsdp_units(model)
    regathered = units.regathered_in_backward(reshard_after_forward)

    # Inner units must become units before the root. Modules with full precision compute in float32 where the others
    # compute in half precision, and FSDP has one dtype per unit. They stay gathered from the forward to the backward.
    wide_dtype = None
    if precision.param_dtype is not None:
        wide_dtype = torch.promote_types(precision.param_dtype, torch.float32)
    for module in units.exact:
        make_unit(module, mesh, mixed_precision(wide_dtype, wide_dtype), reshard=False)

    # The output of an embedding keeps the weights' dtype, because the decoder may still scale it before the layers.
    lookup_precision = replace(precision, output_dtype=None)
    lookups = []
    for module in units.lookups:
        lookups.append(make_unit(module, mesh, lookup_precision, reshard=reshard_after_forward is not False))
    for lookup in lookups:
        # Its backward adds rows of gradients by ids, and does not read the weight.
        lookup.set_unshard_in_backward(False)

    for module in units.tower:  # FSDP records by itself in which order these are gathered
        make_unit(module, mesh, precision, reshard=module in regathered)
    stack = []
    for module in (*units.layers, *units.ends):
        stack.append(make_unit(module, mesh, precision, reshard=module in regathered))

    # Each unit gathers the next one while it computes: the root first, then embeddings, layers, and the head.
    for unit, following in pairwise([stack[-1], *lookups, *stack[:-1]]):
        unit.set_modules_to_forward_prefetch([following])

    # These methods read the head's weight outside of `forward`. Unless they are registered, they would see only this
    # rank's shard and silently give wrong numbers.
    register_fsdp_forward_method(model.head, "with_weight")  # no effect if the head is not a unit
    for name in ("with_head", "next_logits"):
        register_fsdp_forward_method(model, name)
    return Sharding(model)


def _parameters_to_ignore(
    model: nn.Module,
    mesh: DeviceMesh,
    precision: MixedPrecisionPolicy,
    offload: OffloadPolicy,
    expert_mesh: DeviceMesh | None,
) -> set[nn.Parameter]:
    """Return the frozen parameters that one rank stores in the dtype in which they are used."""
    if isinstance(offload, CPUOffloadPolicy):
        return set()
    experts = set[nn.Parameter]() if expert_mesh is None else expert_parameters(model)
    ignored = set()
    for parameter in model.parameters():
        parameter_mesh = mesh
        if expert_mesh is not None and parameter in experts:
            parameter_mesh = expert_mesh
        needs_no_cast = not parameter.is_floating_point() or precision.param_dtype in (None, parameter.dtype)
        if parameter_mesh.size() == 1 and needs_no_cast and not parameter.requires_grad:
            ignored.add(parameter)
    return ignored


PlacementFn = Callable[[nn.Parameter], Any]


def _expert_placements(model: nn.Module, mesh: DeviceMesh) -> PlacementFn:
    """Return FSDP's `shard_placement_fn` for experts that are distributed over ep.

    They are sharded over `mesh` by experts. If a rank has fewer experts than `mesh` has shards, they are sharded by the
    columns of each expert instead, provided that these divide evenly. For other parameters the function returns None,
    which means FSDP's default.
    """
    # Imported here because torch 2.11 does not have it. That release runs everything but ep.
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult

    if mesh.ndim > 1:
        info: FSDPMeshInfo = HSDPMeshInfo(mesh=mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    else:
        info = FSDPMeshInfo(mesh=mesh, shard_mesh_dim=0)
    num_shards = mesh.size(mesh.ndim - 1)
    experts = expert_parameters(model)

    def placement(parameter: nn.Parameter) -> Any:
        if parameter not in experts:
            return None
        shape = local_tensor(parameter).shape
        num_experts, num_columns = shape[0], shape[-1]
        # NF4 codes (adapters.nf4) are divided where their scales are: one scale belongs to 32 bytes of codes.
        divisible_columns = num_columns // 32 if parameter.dtype == torch.uint8 else num_columns
        dim = 0
        if num_experts < num_shards and divisible_columns % num_shards == 0:
            dim = parameter.dim() - 1
        return ShardPlacementResult(placement=Shard(dim), mesh_info=info)

    return placement


def _make_unit(
    module: nn.Module,
    mesh: DeviceMesh,
    precision: MixedPrecisionPolicy,
    *,
    reshard: bool,
    offload: OffloadPolicy,
    placement_fn: PlacementFn | None,
    ignored: set[nn.Parameter],
) -> _Unit:
    """Make a module an FSDP unit whose gradients are summed."""
    fully_shard(
        module,
        mesh=mesh,
        mp_policy=precision,
        offload_policy=offload,
        reshard_after_forward=reshard,
        shard_placement_fn=placement_fn,
        ignored_params=ignored,
    )
    unit = cast(_Unit, module)
    unit.reshards_after_forward = reshard
    unit.set_gradient_divide_factor(1.0)
    # A plain sum on every backend, in place of nccl's AVG or PREMUL_SUM.
    unit.set_force_sum_reduction_for_comms(True)
    return unit


class Sharding:
    """The FSDP units of one model: gathers and frees their weights, and controls when gradients are reduced.

    FSDP gathers a unit's weights for its forward and frees them afterwards. The last layers of a forward stay gathered,
    because a backward usually follows. If none follows, as in an evaluation, `reshard` frees them. Until then
    `model.parameters()` are the gathered copies: values written to them are lost, and a save would see no shards.

    A model without FSDP is accepted, too. It has no units, and the methods do nothing.

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
        host masters (`memory.host_masters`) again afterwards, also if the code inside raises an error. No collective.
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
