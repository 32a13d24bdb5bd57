"""Attention of a decoding step by torch's variable-length flash attention, on CUDA in half precision.

A segment of keys is a slot of a pool, of which the first ones are seen: how many lies on the device, so that a step
reads no more keys than there are, and its graph serves rows of any length. A segment of queries is a row's, or those of
all rows that go on from a prompt, whose keys are then read once; in it stand the query heads of each key head. Both
results are merged by their log-sum-exp. In layers with a window, which may hide a part of a prompt, each row's another,
prompts are left to `Decode`'s products.

`kv_cache.SlotFlashAttention` is the operation. Before it is used on a device, `choose_varlen_decode` compares a small
step with the products of `cached_attention.Decode`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from dtrain.attention.blocks import Partial, merge_by_log_sum_exp, merge_with_sinks
from dtrain.attention.kernels import HALF
from dtrain.attention.varlen import UNSUPPORTED, describe_difference, does_not_run
from dtrain.inference.cached_attention import Decode, Own, concatenated, members_of
from dtrain.inference.kv_cache import KeyValues, KVSlot, KVSlotPool, SlotFlashAttention, VarlenSegments, power_of_two
from dtrain.models.common.config import ModelConfig

_CHECK_PROMPTS = ((1, 3), (37, 1), (130, 2), (25, 1))  # lengths, and rows of each
# Sizes of slots, and own tokens.
_CHECK_ROWS = ((64, 0), (64, 1), (512, 130), (64, 62), (512, 400), (512, 70), (64, 33))
_CHECK_WINDOW = 100  # a window that hides something of these


@dataclass
class _Prompts:
    """The prompts of one pool. order: the rows that go on from each, prompt by prompt, int64; ends: [G + 1] int32,
    where each prompt's rows begin in it; used: [G] int32; longest: the most rows of one, or more."""

    pool: KVSlotPool
    order: Tensor
    ends: Tensor
    used: Tensor
    longest: int


class VarlenDecode(Decode):
    """Decode that attends by the store's `flash`; to prompts, in layers with a window, by products."""

    def __init__(self, store: KeyValues, prompts: Sequence[KVSlot], device: torch.device, *, fixed: bool = False):
        assert store.flash is not None
        self._flash = store.flash
        self._segments: dict[tuple[object, ...], VarlenSegments] = {}  # of a step, as layers ask for them
        super().__init__(store, prompts, device, fixed=fixed)

    def _reach(self, pool: KVSlotPool) -> int | None:
        return None

    def _lay_prompts(self, store: KeyValues, prompts: Sequence[KVSlot], live: list[int], fixed: bool) -> None:
        self._prompts: list[_Prompts] = []
        members, places, start = members_of(store, prompts, live), [0] * self.rows, 0
        for pool in store.prompts.values():
            groups, used = [members[slot] for slot in pool.slots], [slot.length for slot in pool.slots]
            order = [row for rows in groups for row in rows]
            if not order:
                continue
            for place, row in enumerate(order, start):
                places[row] = place
            longest = max(map(len, groups))
            if fixed:
                pool.min_slots = max(pool.min_slots, len(groups))
                more = _room(pool.min_slots) - len(groups)
                groups, used = groups + [[]] * more, used + [0] * more
                order += [0] * (_room(len(order)) - len(order))
                longest = _room(longest)
            ends = list(accumulate(map(len, groups), initial=0))
            # One copy to the device, which waits.
            parts = self._index([*order, *ends, *used]).split([len(order), len(ends), len(used)])
            self._prompts.append(_Prompts(pool, parts[0], parts[1].int(), parts[2].int(), longest))
            start += len(order)
        for row in set(range(self.rows)).difference(live):
            places[row] = places[live[0]]  # a number, whichever: what lies behind the segments may be none
        self._places = self._index(places)  # [R] where each row is found in what all pools gave
        if any(window is not None for window in self._kinds):
            super()._lay_prompts(store, prompts, live, fixed)
        else:
            self._shared, self._is_sorted, self._back = [], False, self._places

    @property
    def shape(self) -> tuple[object, ...]:
        prompts = ((each.pool.capacity, len(each.used), len(each.order), each.longest) for each in self._prompts)
        return *super().shape, *prompts

    def addresses(self) -> list[int]:
        prompts = [tensor for each in self._prompts for tensor in each.pool.keys_and_values()]
        return super().addresses() + [tensor.data_ptr() for tensor in prompts]

    def _tensors(self) -> list[Tensor]:
        prompts = [tensor for each in self._prompts for tensor in (each.order, each.ends, each.used)]
        return [*super()._tensors(), self._places, *prompts]

    def _view_rows(self) -> None:
        for own in self._own:
            added = self._added[own.rows]
            for window, layer in self._kinds.items():
                size = own.pool.sizes[layer]
                # A window's positions are a ring: once all are written, they hold just what the token sees.
                own.columns[window] = added if size == own.pool.capacity else added % size

    def _view_prompts(self, kinds: Mapping[int | None, int]) -> None:
        super()._view_prompts({window: layer for window, layer in kinds.items() if window is not None})

    def end(self) -> None:
        super().end()
        self._segments.clear()

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        is_stored: bool = False,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Write keys and values, and return the attention [R, 1, H, hd_v] of q [R, 1, H, hd].

        k is [R, 1, kv, hd], v [R, 1, kv, hd_v].
        """
        if not is_stored:
            self._write(layer, k, v)
        grouped = q[:, 0].unflatten(1, (k.shape[2], -1))  # [R, kv, rep, hd]
        window, rep = self._windows[layer], grouped.shape[2]
        queries = grouped.transpose(1, 2).contiguous()
        own_parts = []
        for own in self._own:
            keys_and_values = own.pool.layer(layer, k, v)  # allocates the layer in its first step
            slots = self._slots_of_rows(own, window, rep)
            own_parts.append(self._over(queries[own.rows], keys_and_values, slots, scale))
        added = Partial(*concatenated(own_parts))  # out [R, rep, kv, hd_v], lse [R, rep, kv]
        if window is not None:
            by_products = self._over_prompts(layer, grouped * scale, k, v)  # [R, kv, rep, ..]
            prompts = Partial(*(term.transpose(1, 2) for term in by_products))
        else:
            prompt_parts = []
            for each in self._prompts:
                keys_and_values = each.pool.layer(layer, k, v)
                slots = self._slots_of_prompts(each, rep)
                prompt_parts.append(self._over(queries[each.order], keys_and_values, slots, scale))
            prompts = Partial(*(term[self._places] for term in concatenated(prompt_parts)))
        merged = merge_by_log_sum_exp(added, prompts)
        if sinks is not None:
            merged = merge_with_sinks(merged, sinks.view(k.shape[2], -1).t())
        by_head = merged.out.transpose(1, 2)  # [R, kv, rep, hd_v]
        return by_head.to(q.dtype, memory_format=torch.contiguous_format).flatten(1, 2)[:, None]

    def _over(self, queries: Tensor, keys_and_values: Sequence[Tensor], slots: VarlenSegments, scale: float) -> Partial:
        """Compute attention over the first keys of the slots of a pool.

        Args:
            queries: [r, rep, kv, hd].
            keys_and_values: The pool's, [slots, kv, n, hd] and [slots, kv, n, hd_v].
            slots: The slot of each query, and how many of its keys are seen.
            scale: Factor of the scores.

        Returns:
            out [r, rep, kv, hd_v], lse [r, rep, kv].
        """
        k, v = (tensor.transpose(1, 2).flatten(0, 1) for tensor in keys_and_values)  # [slots · n, kv, hd]
        out, lse = self._flash(queries.flatten(0, 1), k, v, slots, scale)
        rep = queries.shape[1]
        return Partial(out.unflatten(0, (-1, rep)), lse.t().unflatten(0, (-1, rep)))

    def _slots_of_rows(self, own: Own, window: int | None, rep: int) -> VarlenSegments:
        key = own.pool, window, rep
        if key not in self._segments:
            count, size = len(own.indices), own.pool.sizes[self._kinds[window]]
            used = (self._added[own.rows] + 1).clamp(max=size).to(torch.int32)
            ends = torch.arange(count + 1, dtype=torch.int32, device=self._device)
            self._segments[key] = VarlenSegments(ends * rep, ends * size, used, max(2, rep), size)
        return self._segments[key]

    def _slots_of_prompts(self, prompts: _Prompts, rep: int) -> VarlenSegments:
        key = prompts.pool, None, rep
        if key not in self._segments:
            capacity, longest = prompts.pool.capacity, max(2, prompts.longest * rep)
            ends = torch.arange(len(prompts.used) + 1, dtype=torch.int32, device=self._device)
            # Segments of no prompt may lie behind the last slot: of no key.
            ends = ends.clamp(max=len(prompts.pool.tensors()[0])) * capacity
            self._segments[key] = VarlenSegments(prompts.ends * rep, ends, prompts.used, longest, capacity)
        return self._segments[key]


def _room(count: int) -> int:
    """Return the room that a step which is fixed has for `count` prompts, their rows, or the rows of one: a power of
    two, so that few shapes occur. What is empty takes next to nothing."""
    return max(16, power_of_two(count))


def choose_varlen_decode(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, tp: int = 1
) -> tuple[SlotFlashAttention | None, str]:
    """Return what a model's rows are to attend with when they are decoded, computing in `dtype`; or None, and a note on
    why products do, "" where nothing else was to be had. tp: ranks that share the heads. No collective."""
    if device.type != "cuda" or dtype not in HALF:
        return None, ""
    shapes = config.attention_shapes(tp)
    for shape in shapes:
        if shape["value_dim"] != shape["head_dim"]:
            # Not padded to one size, as rows in training are: a cache would grow by half (192 and 128 elements).
            keys, values = shape["head_dim"], shape["value_dim"]
            return None, f"decoding attends by products: heads have {keys} elements in keys and {values} in values"
    flash = SlotFlashAttention()
    problems = (check_varlen_decode(flash, **shape, dtype=dtype, device=device) for shape in shapes)
    problem = next(filter(None, problems), None)
    return (flash, "") if problem is None else (None, f"decoding attends by products: {problem}")


def check_varlen_decode(
    flash: SlotFlashAttention,
    *,
    heads: int,
    key_heads: int,
    head_dim: int,
    value_dim: int,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
    sinks: bool = False,
) -> str | None:
    """Compare decoding by flash attention with decoding by products, for rows and prompts of several lengths.

    Issues no collective, and uses no random number of the run.

    Args:
        flash: The operation.
        heads: Query heads of this rank.
        key_heads: Key heads of this rank.
        head_dim: Size of a head of queries and keys.
        value_dim: Size of a head of values.
        window: Keys that a query sees. None: all before it.
        dtype: Dtype of the inputs, float16 or bfloat16.
        device: The device.
        sinks: Whether the heads have sinks.

    Returns:
        The problem, or None if the results are as close to those in float32 as the products'.
    """
    windows = [None] if window is None else [None, min(window, _CHECK_WINDOW)]
    sizes = heads, key_heads, head_dim, value_dim, sinks

    def numbers(flash: SlotFlashAttention | None, compute_dtype: torch.dtype) -> list[Tensor]:
        return _attend_full_slots(KeyValues(windows, flash=flash), *sizes, compute_dtype, device)

    try:
        results = numbers(flash, dtype)
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except UNSUPPORTED as error:
        return does_not_run("varlen_attn", error)
    return describe_difference("varlen_attn", "products", results, numbers(None, dtype), numbers(None, torch.float32))


@torch.no_grad()
def _attend_full_slots(
    store: KeyValues,
    heads: int,
    key_heads: int,
    head_dim: int,
    value_dim: int,
    sinks: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> list[Tensor]:
    """Return the attention [rows, 1, H, hd] of each layer in a step, over slots that are full of numbers."""
    draw = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw).to(torch.bfloat16).to(device, dtype)

    prompts, of_rows = [], []
    for length, rows in _CHECK_PROMPTS:
        prompts.append(store.new_prompt(length))
        of_rows += prompts[-1:] * rows
    owners = dict(enumerate(of_rows))
    for row, (capacity, added) in enumerate(_CHECK_ROWS):
        store.new_row(row, capacity).length = added
    kind = Decode if store.flash is None else VarlenDecode
    decode = kind(store, [owners[slot.owner] for slot in store.rows_in_order()], device, fixed=True)
    decode.begin()
    outputs = []
    for layer in range(len(store.windows)):
        q = random(decode.rows, 1, heads, head_dim)
        k = random(decode.rows, 1, key_heads, head_dim)
        v = random(decode.rows, 1, key_heads, value_dim)
        for pool in store.pools:
            for tensor in pool.layer(layer, k, v):
                tensor.copy_(random(*tensor.shape))
        scores = torch.linspace(-1.0, 3.0, heads, device=device, dtype=dtype) if sinks else None
        outputs.append(decode.attend(layer, q, k, v, head_dim**-0.5, sinks=scores)[decode.places])
    decode.end()
    return outputs
