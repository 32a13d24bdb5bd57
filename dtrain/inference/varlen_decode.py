"""Attention of decoding steps by torch's variable-length flash attention, on CUDA in half precision.

Variable-length attention computes many segments in one call: the queries of segment i attend to the keys of segment i.
Here a segment of keys is one slot of a pool, and only its first `used` keys are visible. `used` is a tensor on the
device. A step therefore reads only the visible keys, and one CUDA graph serves rows of any length.

Example: 2 rows with 5 and 9 tokens in slots of 32 positions, continuing one prompt of 20 tokens in a slot of 32, with 4
query heads per key head:

    rows       segment 0: queries 0-3 (the heads of row 0) attend to slot 0, used 6      (5 tokens and the new one)
               segment 1: queries 4-7 (the heads of row 1) attend to slot 1, used 10
    prompts    segment 0: queries 0-7 (both rows) attend to slot 0, used 20, so the prompt's keys are read once

The 4 query heads that share a key head are 4 queries of a segment, as if they were 4 rows. The results for rows and
prompts are merged by their log-sum-exp. In layers with a sliding window each row may see another part of its prompt,
which `used` cannot express. In these layers `Decode` computes the attention to prompts by matrix products.

`kv_cache.SlotFlashAttention` is the operation. Before it is used on a device, `choose_varlen_decode` compares a small
step with the products of `cached_attention.Decode`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from dtrain.attention.blocks import Partial, merge_by_log_sum_exp, merge_with_sinks
from dtrain.attention.kernels import HALF
from dtrain.attention.varlen import UNSUPPORTED, describe_difference, does_not_run
from dtrain.inference.cached_attention import (
    Decode,
    PromptProducts,
    RowPart,
    concatenated,
    index_tensor,
    rows_by_prompt,
)
from dtrain.inference.kv_cache import KeyValues, KVSlot, KVSlotPool, SlotFlashAttention, VarlenSegments, power_of_two
from dtrain.models.common.config import ModelConfig

# Cases of the check: (length, number of rows) of each prompt.
_CHECK_PROMPTS = ((1, 3), (37, 1), (130, 2), (25, 1))
# Cases of the check: (capacity of the slot, number of tokens) of each row.
_CHECK_ROWS = ((64, 0), (64, 1), (512, 130), (64, 62), (512, 400), (512, 70), (64, 33))
# A window that hides some of these keys.
_CHECK_WINDOW = 100


@dataclass
class _Prompts:
    """The prompts of one pool.

    Attributes:
        pool: The pool.
        order: Their rows, prompt by prompt, int64.
        ends: Where each prompt's rows begin in `order`, and where the last ones end, int32 [G + 1].
        used: Length of each prompt, int32 [G].
        longest: The largest number of rows of a prompt, or a larger number.
    """

    pool: KVSlotPool
    order: Tensor
    ends: Tensor
    used: Tensor
    longest: int


class VarlenDecode(Decode):
    """`Decode` that computes attention by the cache's `flash`, except to prompts in layers with a window."""

    def __init__(self, store: KeyValues, prompts: Sequence[KVSlot], device: torch.device, *, fixed: bool = False):
        assert store.flash is not None
        self._flash = store.flash
        # Segments of the present step. Layers of one kind share them.
        self._segments: dict[tuple[object, ...], VarlenSegments] = {}
        super().__init__(store, prompts, device, fixed=fixed)

    def _choose_max_keys(self, pool: KVSlotPool) -> int | None:
        """Return None: the kernel reads as many keys as there are."""
        return None

    def _lay_out_prompts(self, store: KeyValues, prompts: Sequence[KVSlot], fixed: bool) -> None:
        """Set the segments of prompts, and where each row finds its result. Arguments as in `Decode`."""
        self._prompts: list[_Prompts] = []
        rows_of = rows_by_prompt(store, prompts, self.places)
        # Index of each row in the concatenated results of all pools.
        result_index = [0] * self.rows
        start = 0
        for pool in store.prompts.values():
            groups = [rows_of[slot] for slot in pool.slots]
            used = [slot.length for slot in pool.slots]
            order = [row for rows in groups for row in rows]
            if not order:
                continue
            for index, row in enumerate(order, start):
                result_index[row] = index
            longest = max(map(len, groups))
            if fixed:
                pool.min_slots = max(pool.min_slots, len(groups))
                num_empty = _room(pool.min_slots) - len(groups)
                groups = groups + [[]] * num_empty
                used = used + [0] * num_empty
                order += [0] * (_room(len(order)) - len(order))
                longest = _room(longest)
            ends = list(accumulate(map(len, groups), initial=0))
            # The three lists are copied to the device as one tensor, because the host waits for each copy.
            parts = index_tensor([*order, *ends, *used], self._device).split([len(order), len(ends), len(used)])
            self._prompts.append(_Prompts(pool, parts[0], parts[1].int(), parts[2].int(), longest))
            start += len(order)
        for row in set(range(self.rows)).difference(self.places):
            # Indices without a row read the result of some row, because results behind the last segment may be
            # uninitialised memory.
            result_index[row] = result_index[self.places[0]]
        self._result_index = index_tensor(result_index, self._device)  # [R]
        with_window: dict[int | None, int] = {}
        for window, layer in self._layer_of_window.items():
            if window is not None:
                with_window[window] = layer
        if with_window:
            self.products = PromptProducts(store, rows_of, self.rows, with_window, self._device, fixed=fixed)

    @property
    def shape(self) -> tuple[object, ...]:
        prompts = ((each.pool.capacity, len(each.used), len(each.order), each.longest) for each in self._prompts)
        return *super().shape, *prompts

    def addresses(self) -> list[int]:
        addresses = super().addresses()
        for prompts in self._prompts:
            addresses += [tensor.data_ptr() for tensor in prompts.pool.keys_and_values()]
        return addresses

    def _tensors(self) -> list[Tensor]:
        tensors = [*super()._tensors(), self._result_index]
        for prompts in self._prompts:
            tensors += [prompts.order, prompts.ends, prompts.used]
        return tensors

    def _view_rows(self) -> None:
        """Set where each row writes. Which keys it sees is part of the segments."""
        for part in self._row_parts:
            added = self._added[part.rows]
            for window, layer in self._layer_of_window.items():
                size = part.pool.sizes[layer]
                # The positions of a window are a ring buffer. Once all are written, they are just those that the token
                # sees.
                part.columns[window] = added if size == part.pool.capacity else added % size

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
        """Store keys and values, and compute attention. Arguments and result as in `Decode.attend`."""
        if not is_stored:
            self._write(layer, k, v)
        grouped = q[:, 0].unflatten(1, (k.shape[2], -1))  # [R, kv, rep, hd]
        window, rep = self._windows[layer], grouped.shape[2]
        queries = grouped.transpose(1, 2).contiguous()
        row_results = []
        for part in self._row_parts:
            keys_and_values = part.pool.layer(layer, k, v)  # allocates the layer in its first step
            segments = self._row_segments(part, window, rep)
            row_results.append(self._over(queries[part.rows], keys_and_values, segments, scale))
        over_rows = Partial(*concatenated(row_results))  # out [R, rep, kv, hd_v], lse [R, rep, kv]
        if window is not None:
            assert self.products is not None, "set by _lay_out_prompts if a layer has a window"
            by_products = self.products.attend(layer, window, grouped * scale, k, v)  # [R, kv, rep, ..]
            over_prompts = Partial(*(term.transpose(1, 2) for term in by_products))
        else:
            prompt_results = []
            for prompts in self._prompts:
                keys_and_values = prompts.pool.layer(layer, k, v)
                segments = self._prompt_segments(prompts, rep)
                prompt_results.append(self._over(queries[prompts.order], keys_and_values, segments, scale))
            over_prompts = Partial(*(term[self._result_index] for term in concatenated(prompt_results)))
        merged = merge_by_log_sum_exp(over_rows, over_prompts)
        if sinks is not None:
            merged = merge_with_sinks(merged, sinks.view(k.shape[2], -1).t())
        by_head = merged.out.transpose(1, 2)  # [R, kv, rep, hd_v]
        return by_head.to(q.dtype, memory_format=torch.contiguous_format).flatten(1, 2)[:, None]

    def _over(
        self, queries: Tensor, keys_and_values: Sequence[Tensor], segments: VarlenSegments, scale: float
    ) -> Partial:
        """Compute attention to the slots of a pool.

        Args:
            queries: [r, rep, kv, hd].
            keys_and_values: The pool's, [slots, kv, n, hd] and [slots, kv, n, hd_v].
            segments: The slot of each query, and how many of its keys are visible.
            scale: Factor of the scores.

        Returns:
            out [r, rep, kv, hd_v], lse [r, rep, kv].
        """
        k, v = (tensor.transpose(1, 2).flatten(0, 1) for tensor in keys_and_values)  # [slots · n, kv, hd]
        out, lse = self._flash(queries.flatten(0, 1), k, v, segments, scale)
        rep = queries.shape[1]
        return Partial(out.unflatten(0, (-1, rep)), lse.t().unflatten(0, (-1, rep)))

    def _row_segments(self, part: RowPart, window: int | None, rep: int) -> VarlenSegments:
        """Return the segments of rows: `rep` queries each, and the row's own slot."""
        key = part.pool, window, rep
        if key not in self._segments:
            count = len(part.indices)
            size = part.pool.sizes[self._layer_of_window[window]]
            used = (self._added[part.rows] + 1).clamp(max=size).to(torch.int32)
            ends = torch.arange(count + 1, dtype=torch.int32, device=self._device)
            self._segments[key] = VarlenSegments(ends * rep, ends * size, used, max(2, rep), size)
        return self._segments[key]

    def _prompt_segments(self, prompts: _Prompts, rep: int) -> VarlenSegments:
        """Return the segments of prompts: `rep` queries for each of a prompt's rows, and the prompt's slot."""
        key = prompts.pool, None, rep
        if key not in self._segments:
            capacity = prompts.pool.capacity
            longest = max(2, prompts.longest * rep)
            ends = torch.arange(len(prompts.used) + 1, dtype=torch.int32, device=self._device)
            # A fixed step is padded with empty segments. There may be more segments than allocated slots, so boundaries
            # are clamped to the end of the memory, which leaves the empty segments without keys.
            ends = ends.clamp(max=len(prompts.pool.tensors()[0])) * capacity
            self._segments[key] = VarlenSegments(prompts.ends * rep, ends, prompts.used, longest, capacity)
        return self._segments[key]


def _room(count: int) -> int:
    """Round up the number of prompts or rows in a fixed step.

    Powers of two give few different shapes, and so few graphs. Padding takes next to no time.
    """
    return max(16, power_of_two(count))


def choose_varlen_decode(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, tp: int = 1
) -> tuple[SlotFlashAttention | None, str]:
    """Choose the attention of decoding rows. No collective.

    Args:
        config: The model's config.
        dtype: Dtype of computation.
        device: The device.
        tp: The number of ranks that share the heads.

    Returns:
        (flash attention, or None for matrix products; a note on why products are used, or ""). The note is empty on
        CPUs and for other dtypes, where matrix products are the only choice.
    """
    if device.type != "cuda" or dtype not in HALF:
        return None, ""
    shapes = config.attention_shapes(tp)
    for shape in shapes:
        if shape["value_dim"] != shape["head_dim"]:
            # The kernel needs keys and values of one head size. Padding the values would make their part of the cache
            # larger by half (for heads of 192 and 128 elements).
            keys, values = shape["head_dim"], shape["value_dim"]
            return None, f"decoding attends by products: heads have {keys} elements in keys and {values} in values"
    flash = SlotFlashAttention()
    for shape in shapes:
        problem = check_varlen_decode(flash, **shape, dtype=dtype, device=device)
        if problem is not None:
            return None, f"decoding attends by products: {problem}"
    return flash, ""


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

    def attend(flash: SlotFlashAttention | None, compute_dtype: torch.dtype) -> list[Tensor]:
        return _attend_full_slots(KeyValues(windows, flash=flash), *sizes, compute_dtype, device)

    try:
        results = attend(flash, dtype)
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except UNSUPPORTED as error:
        return does_not_run("varlen_attn", error)
    by_products, in_float32 = attend(None, dtype), attend(None, torch.float32)
    return describe_difference("varlen_attn", "products", results, by_products, in_float32)


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
    """Compute one step of attention over slots that are full of random numbers.

    Returns:
        The attention of each layer, [rows, 1, H, hd].
    """
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(torch.bfloat16).to(device, dtype)

    prompt_of_row: list[KVSlot] = []
    for length, num_rows in _CHECK_PROMPTS:
        prompt = store.new_prompt(length)
        prompt_of_row += [prompt] * num_rows
    for row, (capacity, added) in enumerate(_CHECK_ROWS):
        store.new_row(row, capacity).length = added
    decode_class = Decode if store.flash is None else VarlenDecode
    prompts = [prompt_of_row[slot.owner] for slot in store.rows_in_order()]
    decode = decode_class(store, prompts, device, fixed=True)
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
