"""Keys and values of running sequences.

They lie in pools of slots of one size, a prompt's apart from its rows'. The samples of one prompt share its slot; what
a row adds lies in a slot of its own, in a pool of larger ones as it grows, so that at most half of a slot is empty. The
slots of a pool that are in use are its first ones: attention reads them as one tensor, without an index. Layers with a
sliding window keep no more than a later token can see. Layers of linear attention keep, in place of keys, the states
that `attention.linear` goes on from, of one size whatever the length; a row begins with its prompt's.

`SlotFlashAttention` is variable-length attention to the slots, which a cache uses on CUDA in half precision.
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
from dtrain.models.common.config import LINEAR, SLIDING, ModelConfig
from dtrain.models.common.decoder import CausalLM

SMALLEST_SLOT = 32


class VarlenSegments(NamedTuple):
    """Segments. query_ends, key_ends: [n + 1] int32, where each begins and the last one ends; queries may stand behind
    the last one. used: [n] int32, the keys that are seen of each. longest_query, longest_key: of a segment, or more."""

    query_ends: Tensor
    key_ends: Tensor
    used: Tensor
    longest_query: int
    longest_key: int


class SlotFlashAttention:
    """The operation: q [T, kv, hd], k and v [K, kv, hd] → [T, kv, hd], and the log-sum-exp [kv, T], float32."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, slots: VarlenSegments, scale: float) -> tuple[Tensor, Tensor]:
        # Splits of the keys are left to the kernel: as the products of other layers, it may round by how many rows
        # there are. FlashAttention-2 never splits here; 3 does, but for deterministic algorithms.
        ends, longest = (slots.query_ends, slots.key_ends), (slots.longest_query, slots.longest_key)
        options: dict[str, Any] = {"return_aux": AuxRequest(lse=True), "scale": scale, "seqused_k": slots.used}
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out, lse = varlen_attn(q, k, v, *ends, *longest, **options)
        return out, lse


def slot_size(length: int) -> int:
    """Return the capacity of the smallest slot for `length` positions: a power of two."""
    return max(SMALLEST_SLOT, power_of_two(length))


def power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


def rounded(count: int) -> int:
    """Return `count` rounded up to one of four sizes between two powers of two: at most a quarter is too much."""
    unit = 1 << max(0, (count - 1).bit_length() - 3)
    return -(-count // unit) * unit


@dataclass(eq=False)
class KVSlot:
    """Slot of one sequence: number `index` of `pool`, of which `length` positions are filled. owner: whose it is.
    rotary_shift: of a prompt, what is added to the places of the tokens after it for their rotary positions."""

    pool: "KVSlotPool"
    index: int
    length: int = 0
    owner: Any = None
    rotary_shift: int = 0


class KVSlotPool:
    """Slots of one capacity: per layer keys [slots, kv, n, hd] and values [slots, kv, n, hd_v], n the capacity or what
    the layer keeps.

    kept: the most positions that each layer keeps, None for all. by_position: layers that are views of memory
    [slots, n, kv, hd], the heads of a position side by side. Memory comes with the first write to a layer, in the dtype
    and on the device of what is written, and grows with the slots in use.
    """

    def __init__(self, capacity: int, kept: Sequence[int | None], by_position: Container[int] = ()):
        self.capacity = capacity
        self.slots: list[KVSlot] = []  # by index
        self.min_slots = 0  # slots that there is room for, used or not
        self.sizes = [capacity if most is None else min(capacity, most) for most in kept]  # positions, by layer
        self._by_position = by_position
        self._linear: set[int] = set()  # layers that keep states
        self._layers: list[tuple[Tensor, ...] | None] = [None] * len(kept)

    def take(self) -> KVSlot:
        slot = KVSlot(self, len(self.slots))
        self.slots.append(slot)
        return slot

    def layer(self, index: int, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Return keys and values of a layer for every slot in use.

        Args:
            index: The layer.
            k: Keys that are to be written, [.., kv, hd]; only its size, dtype and device count.
            v: Values that are to be written, [.., kv, hd_v].
        """
        kinds = [((like.shape[-2], self.sizes[index], like.shape[-1]), like) for like in (k, v)]
        return self._grown(index, kinds)

    def states(self, index: int, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the states of a layer of linear attention for every slot in use, [slots, ..] each; like: [.., ..] of
        what is to be written."""
        self._linear.add(index)
        return self._grown(index, [(tuple(state.shape[1:]), state) for state in like])

    def _grown(self, index: int, kinds: Sequence[tuple[tuple[int, ...], Tensor]]) -> tuple[Tensor, ...]:
        held = self._layers[index]
        used = max(len(self.slots), self.min_slots)
        if held is None or held[0].shape[0] < used:
            # Zeros, not whatever the memory holds: a NaN that is hidden would still be one after the product.
            count = used if held is None else max(used, held[0].shape[0] * 3 // 2)
            fresh = tuple(self._zeros(index, (count, *shape), like) for shape, like in kinds)
            if held is not None:
                for new, old in zip(fresh, held, strict=True):
                    new[: old.shape[0]] = old
            held = self._layers[index] = fresh
        return held

    def _zeros(self, index: int, shape: tuple[int, ...], like: Tensor) -> Tensor:
        if index in self._linear or index not in self._by_position:
            return like.new_zeros(shape)
        slots, heads, positions, size = shape
        return like.new_zeros((slots, positions, heads, size)).transpose(1, 2)

    def held(self, index: int) -> tuple[Tensor, ...]:
        """Return the states of a layer of linear attention, grown to every slot in use. Raises ValueError without."""
        held = self._layers[index]
        if held is None:
            raise ValueError(f"layer {index} has kept nothing yet")
        return self.states(index, held)

    def begin(self, targets: Sequence[int], source: "KVSlotPool", sources: Sequence[int]) -> None:
        """Let the sequences in the slots `targets` go on from the states of those in the slots `sources` of a pool."""
        for layer in source._linear:
            held = source._layers[layer]
            assert held is not None
            to_index, from_index = (torch.tensor(indices, device=held[0].device) for indices in (targets, sources))
            for mine, theirs in zip(self.states(layer, held), held, strict=True):
                mine[to_index] = theirs[from_index]

    def tensors(self) -> list[Tensor]:
        """Return its memory."""
        return [tensor for held in self._layers if held is not None for tensor in held]

    def keys_and_values(self) -> list[Tensor]:
        """Return its memory but for states of linear attention."""
        layers = (held for index, held in enumerate(self._layers) if index not in self._linear)
        return [tensor for held in layers if held is not None for tensor in held]

    def clear(self) -> None:
        """Empty every slot, and keep the memory: zeros, as new one."""
        for slot in self.slots:
            slot.owner = None  # a step that is kept may hold the slot
        self.slots = []
        for tensor in self.tensors():
            tensor.zero_()

    def linear_states(self) -> list[Tensor]:
        """Return the states of every layer of linear attention, [slots, ..] each."""
        return [state for layer in sorted(self._linear) for state in self.held(layer)]

    def release(self, gone: Sequence[KVSlot]) -> None:
        """Empty the slots of `gone`; the last ones in use move into the holes. Free slots are zeros, as new ones."""
        leaving = {slot.index for slot in gone}
        for slot in gone:
            slot.owner = None
        left = len(self.slots) - len(leaving)
        holes = sorted(index for index in leaving if index < left)
        movers = [index for index in range(left, len(self.slots)) if index not in leaving]
        for hole, mover in zip(holes, movers, strict=True):
            self.slots[hole] = self.slots[mover]
            self.slots[hole].index = hole
        del self.slots[left:]
        self._copy(self, movers, holes)
        for tensor in self.tensors():
            tensor[left : left + len(leaving)] = 0

    def receive(self, slots: Sequence[KVSlot]) -> None:
        """Take over sequences from smaller slots of one other pool, which keeps none of them."""
        source = slots[0].pool
        first = len(self.slots)
        self.slots += slots
        indices = [slot.index for slot in slots]
        for layer, held in enumerate(source._layers):
            if held is not None and layer in source._linear:
                self.states(layer, held)
            elif held is not None:
                keys, values = held
                self.layer(layer, keys[:, :, 0], values[:, :, 0])
        source._copy(self, indices, list(range(first, len(self.slots))))
        source.release([KVSlot(source, index) for index in indices])
        for index, slot in enumerate(slots, first):
            slot.pool, slot.index = self, index

    def _copy(self, target: "KVSlotPool", sources: list[int], targets: list[int]) -> None:
        if not sources:
            return
        for held, into in zip(self._layers, target._layers, strict=True):
            if held is None or into is None:
                continue
            device = held[0].device
            from_index, to_index = (torch.tensor(indices, device=device) for indices in (sources, targets))
            for old, new in zip(held, into, strict=True):
                new[to_index, :, : old.shape[2]] = old[from_index]  # a larger slot has more positions


class KeyValues:
    """Pools of one engine, for a model whose layers have these windows (None: a layer that sees everything).
    bidirectional: of each layer, whether the tokens of an image see one another; by default nowhere. flash: what rows
    attend to the keys of their slots with; None: products."""

    def __init__(
        self,
        windows: Sequence[int | None],
        bidirectional: Sequence[bool] | None = None,
        flash: SlotFlashAttention | None = None,
    ):
        self.windows = tuple(windows)
        self.bidirectional = tuple(bidirectional or [False] * len(windows))
        self.flash = flash
        self.prompts: dict[int, KVSlotPool] = {}  # by capacity
        self.rows: dict[int, KVSlotPool] = {}
        # The first token after a prompt sees window - 1 of it; one slot stays, so that no tensor is empty.
        self._prompt_keeps = [None if window is None else max(window - 1, 1) for window in windows]

    @classmethod
    def of(cls, config: ModelConfig, flash: SlotFlashAttention | None = None) -> "KeyValues":
        """Return an empty cache for a model."""
        windows = [config.sliding_window if kind == SLIDING else None for kind in config.layer_types]
        return cls(windows, [kind in config.bidirectional_types for kind in config.layer_types], flash)

    @property
    def pools(self) -> list[KVSlotPool]:
        return [*self.prompts.values(), *self.rows.values()]

    def new_prompt(self, length: int, rotary_shift: int = 0) -> KVSlot:
        slot = self._pool(self.prompts, slot_size(length)).take()
        slot.length, slot.rotary_shift = length, rotary_shift
        return slot

    def new_row(self, owner: Any = None, capacity: int = SMALLEST_SLOT) -> KVSlot:
        slot = self._pool(self.rows, capacity).take()
        slot.owner = owner
        return slot

    def grow(self) -> bool:
        """Move rows whose slot is full to a larger one. Return whether there were any."""
        moved = False
        for capacity, pool in sorted(self.rows.items(), reverse=True):
            if full := [slot for slot in pool.slots if slot.length == capacity]:
                self._pool(self.rows, 2 * capacity).receive(full)
                moved = True
        return moved

    def release(self, slots: Sequence[KVSlot]) -> None:
        for pool in {slot.pool: None for slot in slots}:
            pool.release([slot for slot in slots if slot.pool is pool])

    def rows_in_order(self) -> list[KVSlot]:
        """Return every row, pool by pool and slot by slot: the order in which `Decode` wants them."""
        return [slot for _, pool in sorted(self.rows.items()) for slot in pool.slots]

    def _pool(self, pools: dict[int, KVSlotPool], capacity: int) -> KVSlotPool:
        if capacity not in pools:
            is_of_prompts = pools is self.prompts
            by_position = {
                layer
                for layer, window in enumerate(self.windows)
                # Prompts of layers with a window are left to products.
                if self.flash is not None and not (is_of_prompts and window is not None)
            }
            pools[capacity] = KVSlotPool(capacity, self._prompt_keeps if is_of_prompts else self.windows, by_position)
        return pools[capacity]


class PromptKey(NamedTuple):
    """Identity of a prompt: its token ids, and the digest of its images, None without."""

    ids: tuple[int, ...]
    images: str | None

    @classmethod
    def of(cls, request: Request) -> "PromptKey":
        return cls(tuple(request.prompt), None if request.images is None else request.images.digest)


@dataclass
class CachedPrompt:
    """Prompt in the cache: its slot, the logits [V] after it, the experts that its tokens went to, [P, layers, k], if
    these are noted, and the number of rows that use it."""

    slot: KVSlot
    logits: Tensor
    routed: Tensor | None
    users: int = 0


@dataclass(frozen=True)
class Budget:
    """Limits of one engine. rows: decoded together; tokens: positions of keys and values held; prefill: prompt tokens
    read in one forward, enough for full-sized products, little beside the activations of training."""

    rows: int
    tokens: int
    prefill: int


def choose_budget(
    model: CausalLM, device: torch.device, ranks: int = 1, tp: int = 1, *, with_graphs: bool = False
) -> Budget:
    """Return the budget of one of at most `ranks` engines that share a host, with its part of the heads under `tp`.

    Rows: decoding reads every weight once per step, whatever the rows, until the products are bound by arithmetic. A
    CPU is there at a few dozen rows, and more of them only push keys and values out of its caches; a GPU at some
    hundreds. Memory: that of `free_device_memory`; what layers of linear attention keep of rows and their prompts takes
    half of it at most. with_graphs: these round rows and prompts up, at most twofold.
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
        rows = max(1, min(rows, free // 2 // (2 * state)))
        free -= rows * 2 * state
    tokens = max(1, free // max(per_position, 1))
    return Budget(rows, tokens // 2 if with_graphs else tokens, prefill)


def position_bytes(config: ModelConfig, dtype: torch.dtype, tp: int = 1) -> int:
    """Return the bytes of a position of keys and values: in every layer that keeps keys, though those with a window
    keep fewer positions, and in the parameters' dtype."""
    return sum(heads.num_elements(tp) for heads in config.cached_kv_heads) * dtype.itemsize
