"""Keys and values of running sequences.

Keys and values are stored in slots. A pool has slots of one capacity, a power of two. Each prompt has one slot, which
all its samples share. Each running row (a sample) has another slot for the tokens that it has added. When that is full,
the row moves to a slot of twice the capacity, so at most half of a slot is empty. Example: a prompt of 40 tokens with
two samples, after 33 decoded tokens:

    prompts, capacity 64     slot 0: 40 positions of the prompt
    rows, capacity 64        slot 0: 33 positions of sample 0      slot 1: 33 positions of sample 1
                             (both were in the pool of capacity 32 until they had 32 positions)

The used slots of a pool are always its first ones, so attention reads them as one tensor without an index. If a row
leaves, the last row takes its place.

Layers with a sliding window store only the positions that a later token can see. Layers of linear attention store, in
place of keys, the states from which `attention.linear` continues. Their size is independent of the length. A row starts
with the states of its prompt.

`SlotFlashAttention` is variable-length attention to slots, which is used on CUDA in half precision.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import AuxRequest, varlen_attn

from dtrain.base.hardware import free_device_memory
from dtrain.inference.request import Request
from dtrain.models.common.config import LINEAR, ModelConfig
from dtrain.models.common.decoder import CausalLM

SMALLEST_SLOT = 32


class VarlenSegments(NamedTuple):
    """Segments of queries and keys in a call of variable-length attention, n of each.

    Attributes:
        query_ends: Boundaries of the segments of queries, int32 [n + 1]: segment i has the queries from query_ends[i]
            to query_ends[i + 1] (torch's cu_seq_q). Queries behind the last segment are not computed.
        key_ends: Boundaries of the segments of keys, int32 [n + 1] (torch's cu_seq_k).
        used: The number of visible keys at the beginning of each segment, int32 [n].
        longest_query: Upper bound for the number of queries of a segment.
        longest_key: Upper bound for the number of keys of a segment.
    """

    query_ends: Tensor
    key_ends: Tensor
    used: Tensor
    longest_query: int
    longest_key: int


class SlotFlashAttention:
    """Variable-length flash attention to slots."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, slots: VarlenSegments, scale: float) -> tuple[Tensor, Tensor]:
        """Compute the attention of each segment of queries to its slot.

        Args:
            q: Queries, [T, kv, hd].
            k: Keys of all slots, [K, kv, hd].
            v: Values, [K, kv, hd].
            slots: The segments.
            scale: Factor of the scores.

        Returns:
            The output [T, kv, hd], and the log-sum-exp of the scores [kv, T], float32.
        """
        # FlashAttention-2 never splits the keys of a segment here. FlashAttention-3 does, unless torch uses
        # deterministic algorithms, so its rounding may depend on the number of rows. The matrix products of other
        # layers have the same property.
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out, lse = varlen_attn(
                q,
                k,
                v,
                slots.query_ends,
                slots.key_ends,
                slots.longest_query,
                slots.longest_key,
                return_aux=AuxRequest(lse=True),
                scale=scale,
                seqused_k=slots.used,
            )
        return out, lse


def slot_size(length: int) -> int:
    """Return the capacity of the smallest slot for `length` positions.

    Example:
        >>> [slot_size(length) for length in (1, 32, 33, 64)]
        [32, 32, 64, 64]
    """
    return max(SMALLEST_SLOT, power_of_two(length))


def power_of_two(count: int) -> int:
    """Return the smallest power of two that is at least `count`.

    Example:
        >>> [power_of_two(count) for count in (1, 3, 4, 5)]
        [1, 4, 4, 8]
    """
    return 1 << (count - 1).bit_length()


def rounded(count: int) -> int:
    """Round up to one of four sizes between two powers of two.

    The sizes between 32 and 64 are 40, 48, 56 and 64, so the result is at most a quarter more than `count`.

    Example:
        >>> [rounded(count) for count in (7, 33, 47, 65)]
        [7, 40, 48, 80]
    """
    unit = 1 << max(0, (count - 1).bit_length() - 3)
    return -(-count // unit) * unit


@dataclass(eq=False)
class KVSlot:
    """Slot of one sequence.

    Attributes:
        pool: The slot's pool.
        index: Index in the pool.
        length: The number of positions that are filled.
        owner: The sequence, for rows.
        rotary_shift: For prompts, the number to add to the index of a later token to get its rotary position. It
            differs from 0 only if the prompt has images, which may have fewer rotary positions than tokens.
    """

    pool: "KVSlotPool"
    index: int
    length: int = 0
    owner: Any = None
    rotary_shift: int = 0


class KVSlotPool:
    """Slots of one capacity.

    Each layer has keys [slots, kv, n, hd] and values [slots, kv, n, hd_v], where n is the capacity, or less in a layer
    that stores fewer positions. Memory is allocated at the first write to a layer, with the dtype and device of what is
    written, and grows with the number of used slots.

    Args:
        capacity: Positions of a slot.
        max_positions: For each layer, the largest number of positions that it stores. None: all.
        by_position: Layers whose memory is [slots, n, kv, hd], so that the heads of a position are next to each other.

    Attributes:
        capacity: Positions of a slot.
        slots: The used slots, by index.
        min_slots: Slots for which memory is allocated, even if fewer are used.
        sizes: Positions of each layer, n.
    """

    def __init__(self, capacity: int, max_positions: Sequence[int | None], by_position: Container[int] = ()):
        self.capacity = capacity
        self.slots: list[KVSlot] = []
        self.min_slots = 0
        self.sizes = [capacity if limit is None else min(capacity, limit) for limit in max_positions]
        self._by_position = by_position
        self._linear: set[int] = set()  # layers of linear attention
        self._layers: list[tuple[Tensor, ...] | None] = [None] * len(max_positions)

    def take(self) -> KVSlot:
        """Add an empty slot after the used ones and return it."""
        slot = KVSlot(self, len(self.slots))
        self.slots.append(slot)
        return slot

    def layer(self, index: int, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Return keys and values of a layer for every slot in use.

        Args:
            index: The layer.
            k: Keys that are to be written, [.., kv, hd]. Only their sizes, dtype and device are used, if the layer has
                no memory yet.
            v: Values that are to be written, [.., kv, hd_v].

        Returns:
            Keys [slots, kv, n, hd] and values [slots, kv, n, hd_v], views of the pool's memory.
        """
        shapes = [(like.shape[-2], self.sizes[index], like.shape[-1]) for like in (k, v)]
        return self._allocate(index, shapes, (k, v))

    def states(self, index: int, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the states of a layer of linear attention for every slot in use, [slots, ..] each.

        Args:
            index: The layer.
            like: States that are to be written, [.., ..]. Only their sizes, dtypes and devices are used, if the layer
                has no memory yet.
        """
        self._linear.add(index)
        return self._allocate(index, [tuple(state.shape[1:]) for state in like], like)

    def _allocate(self, index: int, shapes: Sequence[tuple[int, ...]], like: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return a layer's memory for every slot in use, allocating or growing it if necessary.

        Args:
            index: The layer.
            shapes: Shape of a slot in each tensor.
            like: Tensors with the dtype and the device of each.
        """
        stored = self._layers[index]
        needed = max(len(self.slots), self.min_slots)
        if stored is not None and stored[0].shape[0] >= needed:
            return stored
        # Memory grows by half, so that it is not copied for every new slot.
        count = needed if stored is None else max(needed, stored[0].shape[0] * 3 // 2)
        # Memory starts as zeros: attention multiplies masked positions by 0, and 0 times NaN would be NaN.
        grown = tuple(self._zeros(index, (count, *shape), tensor) for shape, tensor in zip(shapes, like, strict=True))
        if stored is not None:
            for new, old in zip(grown, stored, strict=True):
                new[: old.shape[0]] = old
        self._layers[index] = grown
        return grown

    def _zeros(self, index: int, shape: tuple[int, ...], like: Tensor) -> Tensor:
        if index in self._linear or index not in self._by_position:
            return like.new_zeros(shape)
        slots, heads, positions, size = shape
        return like.new_zeros((slots, positions, heads, size)).transpose(1, 2)

    def stored_states(self, index: int) -> tuple[Tensor, ...]:
        """Return the states of a layer of linear attention that has stored some, for every slot in use.

        Raises:
            ValueError: If nothing was stored.
        """
        stored = self._layers[index]
        if stored is None:
            raise ValueError(f"layer {index} has stored no states yet")
        return self.states(index, stored)

    def begin(self, targets: Sequence[int], source: "KVSlotPool", sources: Sequence[int]) -> None:
        """Begin rows with the states of linear attention of their prompts, by copying them from another pool.

        Args:
            targets: Indices of the rows' slots in this pool.
            source: Pool of the prompts.
            sources: Indices of the prompts' slots in `source`, one per target.
        """
        for layer in source._linear:
            stored = source._layers[layer]
            assert stored is not None
            device = stored[0].device
            target_index = torch.tensor(targets, device=device)
            source_index = torch.tensor(sources, device=device)
            for new, old in zip(self.states(layer, stored), stored, strict=True):
                new[target_index] = old[source_index]

    def tensors(self) -> list[Tensor]:
        """Return the memory of all layers."""
        tensors: list[Tensor] = []
        for stored in self._layers:
            if stored is not None:
                tensors += stored
        return tensors

    def keys_and_values(self) -> list[Tensor]:
        """Return the memory of all layers without those of linear attention."""
        tensors: list[Tensor] = []
        for index, stored in enumerate(self._layers):
            if stored is not None and index not in self._linear:
                tensors += stored
        return tensors

    def clear(self) -> None:
        """Empty every slot. Memory is kept, and set to zeros as if it were new."""
        for slot in self.slots:
            slot.owner = None  # a captured step may still have the slot
        self.slots = []
        for tensor in self.tensors():
            tensor.zero_()

    def linear_states(self) -> list[Tensor]:
        """Return the states of every layer of linear attention, [slots, ..] each."""
        states: list[Tensor] = []
        for layer in sorted(self._linear):
            states += self.stored_states(layer)
        return states

    def release(self, gone: Sequence[KVSlot]) -> None:
        """Empty the slots `gone`.

        The last used slots move to the emptied indices, so that the used slots stay the first ones. For example, if
        slots 1 and 3 of 0 to 4 are released, slot 4 moves to index 1, and the slots 0 to 2 are left. Unused memory is
        set to zeros.
        """
        leaving = {slot.index for slot in gone}
        for slot in gone:
            slot.owner = None
        remaining = len(self.slots) - len(leaving)
        holes = sorted(index for index in leaving if index < remaining)
        movers = [index for index in range(remaining, len(self.slots)) if index not in leaving]
        for hole, mover in zip(holes, movers, strict=True):
            self.slots[hole] = self.slots[mover]
            self.slots[hole].index = hole
        del self.slots[remaining:]
        self._copy(self, movers, holes)
        for tensor in self.tensors():
            tensor[remaining : remaining + len(leaving)] = 0

    def receive(self, slots: Sequence[KVSlot]) -> None:
        """Move sequences from smaller slots of another pool to this one. All of them must be from the same pool."""
        source = slots[0].pool
        first = len(self.slots)
        self.slots += slots
        indices = [slot.index for slot in slots]
        for layer, stored in enumerate(source._layers):  # allocate memory for them
            if stored is not None and layer in source._linear:
                self.states(layer, stored)
            elif stored is not None:
                keys, values = stored
                self.layer(layer, keys[:, :, 0], values[:, :, 0])
        source._copy(self, indices, list(range(first, len(self.slots))))
        source.release([KVSlot(source, index) for index in indices])
        for index, slot in enumerate(slots, first):
            slot.pool, slot.index = self, index

    def _copy(self, target: "KVSlotPool", sources: list[int], targets: list[int]) -> None:
        """Copy slots to those of a pool with the same or a larger capacity."""
        if not sources:
            return
        for stored, target_stored in zip(self._layers, target._layers, strict=True):
            if stored is None or target_stored is None:
                continue
            device = stored[0].device
            source_index = torch.tensor(sources, device=device)
            target_index = torch.tensor(targets, device=device)
            for old, new in zip(stored, target_stored, strict=True):
                new[target_index, :, : old.shape[2]] = old[source_index]  # a larger slot has more positions


class KeyValues:
    """The cache of one engine: pools of prompts and of rows.

    Args:
        windows: Sliding window of each layer. None: the layer sees all positions.
        bidirectional: For each layer, whether the tokens of an image see each other. None: in no layer.
        flash: Attention of rows to their slots. None: matrix products.

    Attributes:
        windows: As in the arguments.
        bidirectional: As in the arguments.
        flash: As in the arguments.
        prompts: Pools of prompts by capacity.
        rows: Pools of rows by capacity.
    """

    def __init__(
        self,
        windows: Sequence[int | None],
        bidirectional: Sequence[bool] | None = None,
        flash: SlotFlashAttention | None = None,
    ):
        self.windows = tuple(windows)
        self.bidirectional = tuple(bidirectional or [False] * len(windows))
        self.flash = flash
        self.prompts: dict[int, KVSlotPool] = {}
        self.rows: dict[int, KVSlotPool] = {}
        # The first token after a prompt sees window - 1 positions of it. At least one position is stored, so that no
        # tensor is empty.
        self._prompt_positions = [None if window is None else max(window - 1, 1) for window in windows]

    @classmethod
    def of(cls, config: ModelConfig, flash: SlotFlashAttention | None = None) -> "KeyValues":
        """Return an empty cache for a model."""
        return cls(config.windows, [kind in config.bidirectional_types for kind in config.layer_types], flash)

    @property
    def pools(self) -> list[KVSlotPool]:
        """All pools."""
        return [*self.prompts.values(), *self.rows.values()]

    def new_prompt(self, length: int, rotary_shift: int = 0) -> KVSlot:
        """Return a slot for a prompt of `length` tokens."""
        slot = self._pool(self.prompts, slot_size(length)).take()
        slot.length, slot.rotary_shift = length, rotary_shift
        return slot

    def new_row(self, owner: Any = None, capacity: int = SMALLEST_SLOT) -> KVSlot:
        """Return an empty slot for a row of the sequence `owner`."""
        slot = self._pool(self.rows, capacity).take()
        slot.owner = owner
        return slot

    def grow(self) -> bool:
        """Move rows whose slot is full to slots of twice the capacity. Return whether any row has moved."""
        moved = False
        # Begin with the largest capacity: a row that has just moved is not looked at again.
        for capacity, pool in sorted(self.rows.items(), reverse=True):
            full = [slot for slot in pool.slots if slot.length == capacity]
            if full:
                self._pool(self.rows, 2 * capacity).receive(full)
                moved = True
        return moved

    def release(self, slots: Sequence[KVSlot]) -> None:
        """Empty slots of any pools."""
        by_pool: dict[KVSlotPool, list[KVSlot]] = {}
        for slot in slots:
            by_pool.setdefault(slot.pool, []).append(slot)
        for pool, slots_of_pool in by_pool.items():
            pool.release(slots_of_pool)

    def rows_in_order(self) -> list[KVSlot]:
        """Return the slots of all rows, by capacity and index, the order of the rows in `Decode`."""
        return [slot for _, pool in sorted(self.rows.items()) for slot in pool.slots]

    def _pool(self, pools: dict[int, KVSlotPool], capacity: int) -> KVSlotPool:
        """Return the pool of a capacity, creating it if necessary. `pools` is `prompts` or `rows`."""
        if capacity not in pools:
            is_for_prompts = pools is self.prompts
            by_position = set()
            for layer, window in enumerate(self.windows):
                # Flash attention needs the heads of a position next to each other. Prompts in layers with a window are
                # read by matrix products instead, which need the positions of a head next to each other.
                if self.flash is not None and not (is_for_prompts and window is not None):
                    by_position.add(layer)
            max_positions = self._prompt_positions if is_for_prompts else self.windows
            pools[capacity] = KVSlotPool(capacity, max_positions, by_position)
        return pools[capacity]


class PromptKey(NamedTuple):
    """Identity of a prompt: requests with equal keys share it.

    Attributes:
        ids: Token ids.
        images: Digest of the images. None without images.
    """

    ids: tuple[int, ...]
    images: str | None

    @classmethod
    def of(cls, request: Request) -> "PromptKey":
        """Return the key of a request's prompt."""
        return cls(tuple(request.prompt), None if request.images is None else request.images.digest)


@dataclass
class CachedPrompt:
    """Prompt in the cache.

    Attributes:
        slot: Its slot.
        logits: Logits of the token after it, [V].
        routed: Experts to which its tokens were routed, [P, layers, k], if these are recorded.
        users: The number of rows that use it.
    """

    slot: KVSlot
    logits: Tensor
    routed: Tensor | None
    users: int = 0


@dataclass(frozen=True)
class Budget:
    """Limits of one engine.

    Attributes:
        rows: Rows that are decoded together.
        tokens: Positions of keys and values.
        prefill: Prompt tokens that are read in one forward: enough for full-sized products, and little compared to the
            activations of training.
    """

    rows: int
    tokens: int
    prefill: int


def choose_budget(
    model: CausalLM, device: torch.device, ranks: int = 1, tp: int = 1, *, with_graphs: bool = False
) -> Budget:
    """Choose the budget of an engine.

    The number of rows follows from arithmetic: a decoding step reads every weight once, so more rows cost little until
    the products are bound by arithmetic. A CPU reaches this point at a few dozen rows, and more rows only push keys and
    values out of its caches. A GPU reaches it at some hundreds of rows. The number of positions is the memory of
    `free_device_memory` divided by the bytes of a position. States of linear attention get at most half of it.

    Args:
        model: The model.
        device: Device of the engine.
        ranks: The largest number of engines that share a host.
        tp: The number of ranks that share the heads.
        with_graphs: Whether CUDA graphs are used, which round rows and prompts up, at most twofold.
    """
    config = model.config
    dtype, free = next(model.parameters()).dtype, free_device_memory(device, ranks)
    per_position = position_bytes(config, dtype, tp)
    rows, prefill = (128, 2048) if device.type == "cpu" else (512, 16384)
    if config.linear_attention is not None:
        wide = torch.promote_types(dtype, torch.float32).itemsize
        window = (
            (config.linear_attention.conv_width - 1)
            * (2 * config.linear_attention.total_key_dim + config.linear_attention.total_value_dim)
            * dtype.itemsize
        )
        state = config.layer_types.count(LINEAR) * (config.linear_attention.state_size * wide + window) // tp
        per_row = 2 * state  # of the row and its prompt
        rows = max(1, min(rows, free // 2 // per_row))
        free -= rows * per_row
    tokens = max(1, free // max(per_position, 1))
    return Budget(rows, tokens // 2 if with_graphs else tokens, prefill)


def position_bytes(config: ModelConfig, dtype: torch.dtype, tp: int = 1) -> int:
    """Return the bytes of one position of keys and values in all layers that store keys.

    Layers with a window are counted like the others, although they store fewer positions.

    Args:
        config: The model's config.
        dtype: Dtype of the parameters.
        tp: The number of ranks that share the heads.
    """
    return sum(heads.num_elements(tp) for heads in config.cached_kv_heads) * dtype.itemsize
