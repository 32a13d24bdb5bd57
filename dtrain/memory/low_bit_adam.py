"""AdamW and Adam over weights and moments that are stored in fewer bits than the arithmetic has.

A step reads a slice of rows in float32, updates them by `optim.adam.adam_update`, and stores them again: moments as
`low_bit_states` says, bfloat16 weights rounded stochastically. If moments or float32 weights (`host_masters`) are in
host memory, `optimizer_offload` copies them to the device for the time of the slice's update.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dtrain.base.fused import Fused
from dtrain.memory.host_masters import HostMaster
from dtrain.memory.low_bit_states import BLOCK_SIZE, MOMENT_STORAGE, Int8Moment, PlainMoment, kind_of, read, write
from dtrain.memory.optimizer_offload import StateOffloader, ring_bytes
from dtrain.optim.adam import MOMENTS, AdamScalars, adam_scalars, adam_update
from dtrain.optim.local_shard import MAX_SLICE_ELEMENTS, LocalShard
from dtrain.optim.shard_optimizer import ShardOptimizer, StateLocation
from dtrain.optim.stochastic_rounding import (
    BitPositions,
    bit_positions,
    random_bits,
    random_sequence,
    round_bfloat16,
)
from dtrain.parallel.placement import local_tensor

State = dict[str, Tensor]

MASTER = "master"
"""Key under which a slice has its float32 weights, next to the keys of its moments, if they are in host memory."""

_LOW_BIT_DTYPES = torch.bfloat16, torch.int8, torch.uint8


class LowBitAdam(ShardOptimizer):
    """AdamW or Adam with moments in float32, bfloat16 or int8, and weights in float32 or bfloat16.

    The state of a parameter has the keys "step" (on the host), "exp_avg" and "exp_avg_sq", and for int8
    "exp_avg_scale" and "exp_avg_sq_scale".

    Args:
        groups: Parameter groups, with parameters that are plain tensors or DTensors.
        names: Name of each parameter, the same on every mesh. Random bits and the kind of the moments follow from it.
        seed: Seed of the random bits.
        state: How moments are stored: float32, bfloat16 or int8. `low_bit_states.kind_of` has the exceptions.
        lr: Learning rate.
        betas: Decay of the two moments.
        eps: Added to the denominator.
        weight_decay: Weight decay.
        decoupled: Whether the decay multiplies the weights (AdamW), or is added to the gradient (Adam).
        offload: Device of the parameters if the state is in pinned host memory: a CUDA device, or meta, where the state
            is on meta too. None: the state is on the parameters' device.
        slice_elements: Elements of a parameter that are stepped at once.

    Collectives:
        `step` has none, except for int8 moments of parameters in which tensor parallel divides a block
        (`Int8Moment.all_reduce_scales`): two all-reduces per slice.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        names: dict[nn.Parameter, str],
        seed: int,
        state: str,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        decoupled: bool = True,
        offload: torch.device | None = None,
        slice_elements: int = MAX_SLICE_ELEMENTS,
    ):
        super().__init__(groups, {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay})
        self.state_is_on_host = offload is not None
        self._seed = seed
        self._is_decoupled = decoupled
        self._slice_elements = slice_elements
        self._offloader = None
        if offload is not None and offload.type == "cuda":
            self._offloader = StateOffloader(offload)
        self._layouts = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                self._layouts[parameter] = _Layout.of(parameter, names[parameter], state)

    def state_location(self, parameter: Tensor, key: str) -> StateLocation | None:
        """Override `ShardOptimizer.state_location`: scales have a shape of their own."""
        for moment in self._layouts[parameter].moments:
            if isinstance(moment, Int8Moment) and key == moment.scales:
                return moment.scales_location
        return None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # nothing here is computed twice
        """Step every parameter that has a gradient."""
        slices = self._slices()
        if self._offloader is None:
            for each in slices:
                each.step(each.state, can_compile=True)
            return
        # The device's copies of a slice's state are in one buffer. A compiled kernel must not write tensors of several
        # dtypes that share a storage.
        self._offloader.for_each(
            [each.state for each in slices], lambda index, state: slices[index].step(state, can_compile=False)
        )

    def allocate_state(self) -> None:
        """Override `ShardOptimizer.allocate_state`: no step is computed."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self._allocate(parameter)

    def step_buffer_bytes(self) -> int:
        """Override `ShardOptimizer.step_buffer_bytes`: the ring of `optimizer_offload`, for the state so far."""
        return ring_bytes(part for parameter in self.state for part in self._parts_of(parameter))

    def is_fused_on(self, device_type: str) -> bool:
        """Override `ShardOptimizer.is_fused_on`: the update is compiled on CUDA."""
        return device_type == "cuda"

    def _slices(self) -> list["_Slice"]:
        """Count a step, allocate state that is missing, and return the slices of parameters that have gradients."""
        slices: list[_Slice] = []
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    slices += self._slices_of(parameter, group)
        return slices

    def _slices_of(self, parameter: nn.Parameter, group: dict[str, Any]) -> Iterator["_Slice"]:
        """Yield the slices of a parameter. Ranks that share blocks make the same number."""
        layout = self._layouts[parameter]
        shard = layout.shard
        state = self._allocate(parameter)
        state["step"] += 1
        step = int(state["step"].item())
        scalars = adam_scalars(group, step, is_decoupled=self._is_decoupled)
        sequence = random_sequence(self._seed, step, layout.name)

        assert parameter.grad is not None
        weights, gradient = shard.as_matrix(parameter), shard.as_matrix(parameter.grad)
        local = local_tensor(parameter)
        if isinstance(local, HostMaster):
            weights = shard.as_matrix(local.device_copy)
        if layout.has_full_blocks:
            weights, gradient = _in_blocks(weights), _in_blocks(gradient)
        slices = shard.row_slices(self._slice_elements, BLOCK_SIZE)
        for rows, part in zip(slices, self._parts_of(parameter), strict=True):
            yield _Slice(
                layout=layout,
                weights=weights[rows],
                gradient=gradient[rows],
                state=part,
                scalars=scalars,
                positions=bit_positions(shard, rows, sequence),
            )

    def _parts_of(self, parameter: Tensor) -> Iterator[State]:
        """Yield the state of each slice of a parameter, with its float32 weights if they are in host memory."""
        layout, state = self._layouts[parameter], self.state[parameter]
        shard = layout.shard
        matrices: State = {}
        for moment in layout.moments:
            for key in moment.keys:
                matrices[key] = _state_matrix(state[key], shard)
        if isinstance(local_tensor(parameter), HostMaster):
            matrices[MASTER] = shard.as_matrix(parameter)
        if layout.has_full_blocks:
            matrices = {key: layout.in_blocks(key, matrix) for key, matrix in matrices.items()}
        for rows in shard.row_slices(self._slice_elements, BLOCK_SIZE):
            yield {key: matrix[rows] for key, matrix in matrices.items()}

    def _allocate(self, parameter: Tensor) -> State:
        """Return the state of a parameter, which is allocated at its first step."""
        state = self.state[parameter]
        if not state:
            state.update(self._zero_moments(parameter, self._layouts[parameter]))
            state["step"] = torch.zeros(())
        return state

    def _zero_moments(self, parameter: Tensor, layout: "_Layout") -> State:
        """Return the moments of a parameter before its first step."""
        local = local_tensor(parameter).detach()
        state: State = {}
        for moment in layout.moments:
            state.update(moment.allocate(local, torch.promote_types(local.dtype, torch.float32)))
        if self._offloader is not None:
            for key, tensor in state.items():
                state[key] = torch.zeros(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return state


@dataclass(frozen=True)
class _Layout:
    """Storage layout of the optimizer state of a parameter.

    Attributes:
        name: Name of the parameter.
        shard: Its local shard.
        moments: Storage of the two moments, both of the same class.
        edges: `Int8Moment.edges`.
        has_full_blocks: Whether the moments are int8 and the local shard consists of full blocks. Then a step computes
            on [rows, blocks, BLOCK_SIZE].
        all_reduce_scales: `Int8Moment.all_reduce_scales` if other ranks store a part of the same blocks, else None.
    """

    name: str
    shard: LocalShard
    moments: tuple[PlainMoment, ...]
    edges: tuple[int, int] = (0, 0)
    has_full_blocks: bool = False
    all_reduce_scales: Callable[[Tensor], None] | None = None

    @classmethod
    def of(cls, parameter: nn.Parameter, name: str, state: str) -> "_Layout":
        """Return the layout of a parameter under `optimizer.state` = `state`."""
        shard = LocalShard.of(parameter)
        storage = MOMENT_STORAGE[kind_of(name, parameter.shape, state)]
        moments = tuple(storage(shard, key) for key in MOMENTS)
        first = moments[0]
        if not isinstance(first, Int8Moment):
            return cls(name, shard, moments)
        return cls(
            name,
            shard,
            moments,
            edges=first.edges,
            has_full_blocks=not first.shares_blocks and first.edges == (0, 0),
            all_reduce_scales=first.all_reduce_scales if first.shares_blocks else None,
        )

    def in_blocks(self, key: str, matrix: Tensor) -> Tensor:
        """Return the matrix of a state tensor as [rows, blocks, BLOCK_SIZE], and scales as [rows, blocks, 1]."""
        for moment in self.moments:
            if isinstance(moment, Int8Moment) and key == moment.scales:
                return matrix.unsqueeze(-1)
        return _in_blocks(matrix)


@dataclass(frozen=True)
class _Slice:
    """Rows of a parameter that are stepped at once.

    Attributes:
        layout: How the parameter's state is stored.
        weights: [rows, ..]. If float32 weights are in host memory, their rounded copy on the device.
        gradient: [rows, ..].
        state: The same rows of each state tensor, by key; with `MASTER` for float32 weights in host memory.
        scalars: Numbers of the step.
        positions: Positions of the random bits.
    """

    layout: _Layout
    weights: Tensor
    gradient: Tensor
    state: State
    scalars: AdamScalars
    positions: BitPositions

    def step(self, state: State, *, can_compile: bool) -> None:
        """Step the rows.

        Args:
            state: `self.state`, or copies of its tensors on the device.
            can_compile: Whether the update may be one compiled kernel. It never is if ranks share blocks.
        """
        layout = self.layout
        arguments = self.weights, self.gradient, state, self.scalars, self.positions, layout.edges
        if layout.all_reduce_scales is not None:
            _step_rows.function(*arguments, layout.all_reduce_scales)
        elif can_compile:
            _step_rows(*arguments)
        else:
            _step_rows.function(*arguments)


@Fused
def _step_rows(
    weights: Tensor,
    gradient: Tensor,
    state: State,
    scalars: AdamScalars,
    positions: BitPositions,
    edges: tuple[int, int],
    all_reduce_scales: Callable[[Tensor], None] | None = None,
) -> None:
    """Step rows of a parameter and store them again.

    Args:
        weights: As in `_Slice`.
        gradient: As in `_Slice`.
        state: As in `_Slice`.
        scalars: Numbers of the step.
        positions: Positions of the random bits.
        edges: As in `_Layout`.
        all_reduce_scales: As in `_Layout`.
    """
    masters = state.get(MASTER, weights)
    values = masters.to(torch.promote_types(masters.dtype, torch.float32))
    moments = {key: read(state, key, edges) for key in MOMENTS}
    adam_update(values, gradient.to(values.dtype), moments["exp_avg"], moments["exp_avg_sq"], scalars)

    stored = [masters, *(state[key] for key in MOMENTS)]
    if any(tensor.dtype in _LOW_BIT_DTYPES for tensor in stored):
        # One 64-bit number per element: its lowest 16 bits round the weight, the next 24 bits the first moment, and the
        # highest 24 bits the second moment.
        bits = random_bits(values.shape, positions, values.device)
        if masters.dtype == torch.bfloat16:
            masters.copy_(round_bfloat16(values, bits))
        for key, shift in zip(MOMENTS, (16, 40), strict=True):
            if state[key].dtype in _LOW_BIT_DTYPES:
                write(state, key, moments[key], bits >> shift, edges, all_reduce_scales)
    if masters is not weights:
        weights.copy_(values)


def _state_matrix(tensor: Tensor, shard: LocalShard) -> Tensor:
    """Return a state tensor of any shape as [local_rows, ..]: the shard's elements, or the scales of each row."""
    return tensor.view(shard.local_rows, tensor.shape[-1] if tensor.dim() > 1 else 1)


def _in_blocks(matrix: Tensor) -> Tensor:
    """Return [local_rows, local_columns] as [local_rows, blocks, BLOCK_SIZE]."""
    return matrix.unflatten(1, (matrix.shape[1] // BLOCK_SIZE, BLOCK_SIZE))
