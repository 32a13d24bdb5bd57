"""AdamW and Adam over weights and moments that are stored in fewer bits than the arithmetic has.

A step reads a slice of rows in float32, updates the rows by `optim.adam.adam_update`, and stores them again. bfloat16
weights are rounded stochastically. If moments or float32 weights are in host memory, `StateOffloader` copies them to
the device for the update of the slice.

A moment is stored between two steps in float32, in bfloat16, or in int8 by blocks. `read_moment` returns some rows in
float32 and `write_moment` stores them again. Both see the same rows of each state tensor, as [rows, local_columns], or
if the shard consists of full blocks as [rows, blocks, BLOCK_SIZE]. Values are rounded up or down at random
(`optim.local_shard`). Rounded to the nearest, a moment that changes by less than half a step of its grid would never
change. The caller passes the random bits.

int8 (after Dettmers et al., arXiv:2110.02861): a row of the full tensor is divided into blocks of `BLOCK_SIZE`
elements, each with its largest magnitude ("scale") in float32. A first moment is stored as a signed code c from -127 to
127 and means sign(c) · (c / 127)² · scale. A second moment is stored as a code from 0 to 255 and means
(c / 255)⁴ · scale. Small values of a block keep about two digits. The grids of the two moments are alike, because the
update is the quotient m / √v. A second moment above 0 is never rounded to 0.

Example: in a block with scale 0.08, the first moment 0.01 has (c / 127)² = 0.125, so c = 44.9. It is stored as 44
(0.0096) or as 45 (0.01004), with the probabilities 0.1 and 0.9, whose mean is 0.01.

If tensor parallel divides a row within a block, its ranks agree on the block's scale, and each stores all scales of the
row.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from dtrain.base.fused import Fused
from dtrain.memory.host_masters import HostMaster
from dtrain.memory.optimizer_offload import StateOffloader, ring_bytes
from dtrain.optim.adam import MOMENTS, AdamScalars, adam_scalars, adam_update
from dtrain.optim.local_shard import (
    MAX_SLICE_ELEMENTS,
    BitPositions,
    LocalShard,
    ShardOptimizer,
    StateLocation,
    bit_positions,
    random_bits,
    random_sequence,
    round_bfloat16,
)
from dtrain.parallel.placement import local_tensor

BLOCK_SIZE = 256
"""Elements that share a scale in int8 moments."""

MIN_ELEMENTS = 4096
"""Moments of smaller tensors stay float32."""

# Largest code and exponent of the grid of a first moment (signed codes) and of a second moment.
_GRIDS = {torch.int8: (127, 2), torch.uint8: (255, 4)}

State = dict[str, Tensor]


def moment_kind(name: str, size: torch.Size, state: str) -> str:
    """Choose the storage of a parameter's moments, a key of `MOMENT_STORAGE`.

    Vectors, small tensors and embeddings (and heads that are tied to one) stay float32. They are a small share of the
    model, and the gradients of an embedding's rows differ too much for one scale.

    Args:
        name: Name of the parameter.
        size: Size of the full parameter.
        state: The recipe's `optimizer.state`.
    """
    is_small = len(size) < 2 or size.numel() < MIN_ELEMENTS
    return "float32" if is_small or "embed" in name else state


class Moment:
    """A moment that is stored in one tensor.

    Attributes:
        shard: Local shard of the parameter.
        key: Key of the moment in the optimizer's state.
        keys: Keys of all tensors that store it.
        dtype: Dtype of the tensor. None: the dtype of the arithmetic.
    """

    def __init__(self, shard: LocalShard, key: str, dtype: torch.dtype | None = None):
        self.shard, self.key, self.dtype = shard, key, dtype
        self.keys: tuple[str, ...] = (key,)

    def allocate(self, like: Tensor, dtype: torch.dtype) -> State:
        """Return the state tensors of a moment that is zero.

        Args:
            like: Local shard of the parameter, [..].
            dtype: Dtype of the arithmetic.
        """
        return {self.key: torch.zeros_like(like, dtype=self.dtype or dtype)}


class Int8Moment(Moment):
    """A moment that is stored as 8-bit codes and a float32 scale per block.

    Attributes:
        scales: Key of the scales.
        shares_blocks: Whether other ranks store a part of the same blocks.
        first_block: Block of the full row at which the stored scales begin.
        num_blocks: Scales per row.
        before: Elements at the start of the first block that other ranks store.
        after: Elements at the end of the last block that other ranks store, or that do not exist.
    """

    def __init__(self, shard: LocalShard, key: str):
        super().__init__(shard, key, torch.int8 if key == "exp_avg" else torch.uint8)
        self.scales = f"{key}_scale"
        self.keys = key, self.scales
        self.shares_blocks = bool(shard.column_groups) and shard.max_local_columns % BLOCK_SIZE != 0
        # Ranks that share a block each store all scales of the row.
        if self.shares_blocks:
            self.first_block, end = 0, shard.num_columns
        else:
            self.first_block, end = shard.first_column // BLOCK_SIZE, shard.first_column + shard.local_columns
        has_blocks = shard.local_columns > 0 or self.shares_blocks
        self.num_blocks = -(-end // BLOCK_SIZE) - self.first_block if has_blocks else 0
        self.before = shard.first_column - self.first_block * BLOCK_SIZE
        self.after = self.num_blocks * BLOCK_SIZE - self.before - shard.local_columns

    @property
    def edges(self) -> tuple[int, int]:
        """`before` and `after`, the numbers of elements that pad the shard's rows to full blocks on both sides."""
        return self.before, self.after

    @property
    def scales_location(self) -> StateLocation:
        """Location of this rank's scales in those of all ranks."""
        num_blocks = -(-self.shard.num_columns // BLOCK_SIZE)
        return StateLocation(
            global_size=(*self.shard.global_row_shape, num_blocks),
            offsets=(*self.shard.row_offsets, self.first_block),
        )

    def allocate(self, like: Tensor, dtype: torch.dtype) -> State:
        """Override `Moment.allocate`.

        Codes have the shape of `like`. Scales are [local rows, blocks], or [matrices, rows, blocks] for a stack of
        matrices.
        """
        scales = torch.zeros(*self.shard.local_row_shape, self.num_blocks, device=like.device)
        return super().allocate(like, dtype) | {self.scales: scales}

    def all_reduce_scales(self, scales: Tensor) -> None:
        """Replace `scales` [rows, blocks] by the largest of all ranks that share blocks. One all-reduce per group."""
        for group in self.shard.column_groups:
            dist.all_reduce(scales, dist.ReduceOp.MAX, group=group)


def read_moment(rows: State, key: str, edges: tuple[int, int] = (0, 0)) -> Tensor:
    """Return rows of a moment in the dtype of the arithmetic.

    Args:
        rows: Rows of each state tensor, by key.
        key: The moment.
        edges: `Int8Moment.edges`.

    Returns:
        The state itself if it has the dtype of the arithmetic, which an update then changes in place. Otherwise a copy
        in float32, [rows, local_columns] or [rows, blocks, BLOCK_SIZE].
    """
    stored = rows[key]
    if stored.dtype == torch.bfloat16:
        return stored.float()
    if stored.dtype not in _GRIDS:
        return stored
    largest_code, exponent = _GRIDS[stored.dtype]
    # Multiply by the reciprocal, because a GPU divides by a number in this way and a CPU does not.
    values = stored.float().mul_(1 / largest_code)
    if exponent == 2:
        values = values * values.abs()  # keeps the sign
    else:
        values = _power(values, exponent)
    return values.mul_(_of_elements(rows[f"{key}_scale"], values, edges))


def write_moment(
    rows: State,
    key: str,
    values: Tensor,
    bits: Tensor,
    edges: tuple[int, int] = (0, 0),
    all_reduce_scales: Callable[[Tensor], None] | None = None,
) -> None:
    """Store rows of a moment, if it is stored in fewer bits than `values` have.

    Args:
        rows: Rows of each state tensor, by key.
        key: The moment.
        values: Its new values, float32 [rows, local_columns] or [rows, blocks, BLOCK_SIZE].
        bits: Random integers of that shape, of which the lowest 24 bits are used.
        edges: `Int8Moment.edges`.
        all_reduce_scales: `Int8Moment.all_reduce_scales` if other ranks store a part of the same blocks.
    """
    stored = rows[key]
    if stored.dtype == torch.bfloat16:
        stored.copy_(round_bfloat16(values, bits))
    if stored.dtype not in _GRIDS:
        return
    magnitudes = values.abs()
    has_full_blocks = magnitudes.dim() == 3
    if has_full_blocks:
        blocks = magnitudes
    else:
        blocks = F.pad(magnitudes, edges).unflatten(1, (-1, BLOCK_SIZE))
    scales = blocks.amax(2, keepdim=has_full_blocks)
    if all_reduce_scales is not None:
        all_reduce_scales(scales)
    # With an infinite scale, all elements of the block would be read as NaN.
    scales.clamp_(max=torch.finfo(scales.dtype).max)
    rows[f"{key}_scale"].copy_(scales)
    magnitudes.div_(_of_elements(torch.where(scales > 0, scales, 1.0), values, edges))
    uniform = (bits & 0xFFFFFF).float().mul_(2.0**-24)  # in [0, 1)
    codes = _codes(magnitudes, uniform, *_GRIDS[stored.dtype])
    if stored.dtype == torch.int8:
        codes.copysign_(values)
    else:
        # A second moment above 0 is never stored as 0, because the update divides by it.
        codes = torch.where(values > 0, codes.clamp_(min=1), codes)
    stored.copy_(codes)


def _of_elements(scales: Tensor, values: Tensor, edges: tuple[int, int]) -> Tensor:
    """Return the scale of each element of `values`, or of each block if `values` is [rows, blocks, BLOCK_SIZE]."""
    if values.dim() == 3:
        return scales  # [rows, blocks, 1]
    return scales.repeat_interleave(BLOCK_SIZE, 1)[:, edges[0] : edges[0] + values.shape[1]]


def _codes(magnitudes: Tensor, uniform: Tensor, largest_code: int, exponent: int) -> Tensor:
    """Round values to codes of the grid (code / largest_code)^exponent, at random, so that the expected value is exact.

    Args:
        magnitudes: Values in [0, 1], any shape; overwritten.
        uniform: Random numbers in [0, 1) of that shape.
        largest_code: Largest code.
        exponent: 2 or 4.

    Returns:
        Codes in float32.
    """
    root = magnitudes
    for _ in range(exponent // 2):
        root = root.sqrt()
    below = (root * largest_code).floor_().clamp_(max=largest_code - 1)
    low = _power(below, exponent)
    distance = _power(below + 1, exponent).sub_(low)
    probability_of_above = magnitudes.mul_(largest_code**exponent).sub_(low).div_(distance)
    return below.add_(uniform < probability_of_above)


def _power(values: Tensor, exponent: int) -> Tensor:
    """Return values [..] to the power of 2 or 4."""
    square = values * values
    return square if exponent == 2 else square.mul_(square)


MOMENT_STORAGE: dict[str, Callable[[LocalShard, str], Moment]] = {
    "float32": Moment,
    "bfloat16": partial(Moment, dtype=torch.bfloat16),
    "int8": Int8Moment,
}
"""Class of a moment by the name of its storage (`moment_kind`)."""


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
        state: How moments are stored: float32, bfloat16 or int8. `moment_kind` has the exceptions.
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
        """Override `ShardOptimizer.step_buffer_bytes`: the ring of `StateOffloader`, for the state so far."""
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
    moments: tuple[Moment, ...]
    edges: tuple[int, int] = (0, 0)
    has_full_blocks: bool = False
    all_reduce_scales: Callable[[Tensor], None] | None = None

    @classmethod
    def of(cls, parameter: nn.Parameter, name: str, state: str) -> "_Layout":
        """Return the layout of a parameter under `optimizer.state` = `state`."""
        shard = LocalShard.of(parameter)
        storage = MOMENT_STORAGE[moment_kind(name, parameter.shape, state)]
        moments = tuple(storage(shard, key) for key in MOMENTS)
        first = moments[0]  # the second has the same class and edges
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
    moments = {key: read_moment(state, key, edges) for key in MOMENTS}
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
                write_moment(state, key, moments[key], bits >> shift, edges, all_reduce_scales)
    if masters is not weights:
        weights.copy_(values)


def _state_matrix(tensor: Tensor, shard: LocalShard) -> Tensor:
    """Return a state tensor of any shape as [local_rows, ..]: the shard's elements, or the scales of each row."""
    return tensor.view(shard.local_rows, tensor.shape[-1] if tensor.dim() > 1 else 1)


def _in_blocks(matrix: Tensor) -> Tensor:
    """Return [local_rows, local_columns] as [local_rows, blocks, BLOCK_SIZE]."""
    return matrix.unflatten(1, (matrix.shape[1] // BLOCK_SIZE, BLOCK_SIZE))
