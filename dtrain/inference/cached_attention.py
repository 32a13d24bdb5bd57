"""Attention over the KV cache: whole prompts (`Prefill`), or one more token of every running row (`Decode`).

The model passes each layer's queries, keys and values to `attend`. The keys of a decoding row are stored in two places:
its prompt's slot, which all samples of the prompt share, and its own slot, with the tokens that it has added. Attention
to each part is computed separately, and the two results are merged by their log-sum-exp. All samples of a prompt attend
to its keys in one matrix product. Example: prompt A has the samples 0 and 2, prompt B has sample 1, and all slots are
in one pool of prompts and one pool of rows:

    prompt part   table [[0, 2],      Rows 0 and 2 attend to the keys of A in one product, row 1 to those of B. B has
                         [1, 0]]      only one row, so its second entry is padding (row 0), whose result is not read.
    row part      rows 0 to 2         Each row attends to the keys in its own slot.
    merge         by log-sum-exp      out = (out_p · exp(lse_p) + out_r · exp(lse_r)) / (exp(lse_p) + exp(lse_r))

A step can be captured as a CUDA graph and replayed (`inference.graphs`). A `Decode` with `fixed=True` is made for this:
sizes are rounded up, so that few shapes and so few graphs occur, and all memory of a step keeps its address.

Shapes: R rows, G prompts of a pool, n the largest number of rows of a prompt, kv key heads, rep query heads per key
head, hd the head size of queries and keys, hd_v that of values, L keys.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from dtrain.attention.blocks import CpuFlash, Partial, merge_by_log_sum_exp, merge_with_sinks
from dtrain.attention.kernels import SdpaKernel
from dtrain.attention.linear.layer import LinearMask
from dtrain.attention.visibility import Visibility, additive
from dtrain.inference.kv_cache import KeyValues, KVSlot, KVSlotPool, power_of_two, rounded, slot_size

# A matrix product with this number of rows takes no longer than one with a single row.
ROWS_AS_FAST_AS_ONE = 8


class Prefill:
    """Cache of a forward that reads prompts from their beginning, [B, S], padded on the right.

    Padding needs no mask here. It comes after all tokens of its row, so causal attention hides it from them. Its keys
    are stored too, but decoding steps mask them by the prompt's length.

    Args:
        store: The cache.
        slots: Slots of the prompts, consecutive new ones of one pool, in the batch's order.
        device: The device.
        ends: For each token of an image, the position after the image's last token, [B, S], as in `Images`.

    Attributes:
        skips_hooks: Whether the model calls modules without their hooks.
        rotary_frequencies: Rotary frequencies on the device, filled by the model.
        positions: Positions of the tokens, [1, S].
        last_index: Index of each row's last token, [B].
    """

    skips_hooks = False

    def __init__(self, store: KeyValues, slots: Sequence[KVSlot], device: torch.device, ends: Tensor | None = None):
        self._layer_kinds = list(zip(store.windows, store.bidirectional, strict=True))
        self._ends = ends
        self._pool = slots[0].pool
        self._indices = slice(slots[0].index, slots[0].index + len(slots))
        self._max_length = max(slot.length for slot in slots)
        self._lengths = torch.tensor([slot.length for slot in slots], device=device)
        self._kernel = SdpaKernel()
        self._masks: dict[tuple[int | None, bool], object] = {}  # by kind of layer
        self.rotary_frequencies: dict[Any, Tensor] = {}
        self.positions = torch.arange(self._max_length, device=device)[None]
        self.last_index: Tensor | None = self._lengths - 1

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
        """Store keys and values, and compute attention.

        Args:
            layer: Layer whose keys are used.
            q: Queries, [B, S, H, hd].
            k: Keys, [B, S, kv, hd].
            v: Values, [B, S, kv, hd_v].
            scale: Factor of the scores.
            is_stored: Whether the layer has stored k and v already, for models whose layers share them.
            sinks: A score per head that takes part in the softmax, [H].

        Returns:
            [B, S, H, hd_v].
        """
        if not is_stored:
            self._write(layer, k, v)
        kind = self._layer_kinds[layer]
        if kind not in self._masks:
            self._masks[kind] = self._kernel.prepare(self._visibility(*kind), q.dtype, q.device)
        return self._kernel(q, k, v, self._masks[kind], scale, sinks)

    def _visibility(self, window: int | None, is_bidirectional: bool) -> Visibility:
        """Return which keys are visible in a kind of layers."""
        visibility = Visibility(self._max_length, self._max_length, window)
        if not is_bidirectional or self._ends is None:
            return visibility
        positions = self.positions.expand_as(self._ends)
        return replace(
            visibility,
            query_positions=positions,
            key_positions=self.positions,
            rows=len(positions),
            query_ends=self._ends,
        )

    def _write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store k [B, S, kv, hd] and v [B, S, kv, hd_v]. A layer with a window stores only the last positions."""
        size = self._pool.sizes[layer]
        for stored, new in zip(self._pool.layer(layer, k, v), (k, v), strict=True):
            if self._max_length > size:
                start = (self._lengths - size).clamp(min=0)  # [B]
                columns = (start[:, None] + torch.arange(size, device=new.device)).clamp(max=self._max_length - 1)
                new = new[torch.arange(new.shape[0], device=new.device)[:, None], columns]  # [B, size, kv, ..]
            stored[self._indices, :, : new.shape[1]] = new.transpose(1, 2)

    def linear_mask(self, width: int) -> LinearMask:
        """Return the mask for linear attention, in which each prompt is a document.

        Args:
            width: Width of the layer's convolution.
        """
        return LinearMask.of_lengths(self._lengths, self._max_length, width)

    def read_states(self, layer: int) -> tuple[Tensor, ...]:
        """Raise ValueError: a prompt is read from its beginning, before which there are no states."""
        raise ValueError("a prompt has no states of linear attention before it")

    def write_states(self, layer: int, *states: Tensor) -> None:
        """Store the states [B, ..] of linear attention after the prompts' last tokens."""
        for stored, new in zip(self._pool.states(layer, states), states, strict=True):
            stored[self._indices] = new


class Decode:
    """Cache of decoding steps, each of which reads one token of every row.

    An object serves step after step, as long as no row is added, removed or moved to another pool. A step consists of
    `begin`, one forward of tokens [R, 1], `end`, and `lengthen`, which updates the host's data before the next step.

    With `fixed`, R is the number of rows rounded up. `places` has the index of each row among the R. The other indices
    are padding, whose results must not be read. For example, 9 rows in one pool become R = 10 with places 0 to 8. Two
    `Decode` objects of equal `shape` run the same kernels. A captured step therefore keeps its own `Decode` and uses
    `load` to copy the rows of another one into its memory, until the step `is_full`.

    Args:
        store: The cache.
        prompts: Prompt of each row, in the order of `store.rows_in_order()`.
        device: The device.
        fixed: Whether sizes are rounded up and addresses stay the same, for CUDA graphs.

    Attributes:
        skips_hooks: Whether the model calls modules without their hooks, which a graph cannot have.
        rotary_frequencies: Rotary frequencies on the device, filled by the model.
        last_index: None, because each row has one token.
        positions: Rotary position of each token, [R, 1], after `begin`.
        rows: The number of rows with padding, R.
        places: Index of each row of the cache among the R.
        live: `places` as a tensor on the device. None without `fixed`.
        products: Computes the attention to prompts. None if no layer needs matrix products (`VarlenDecode`).
    """

    last_index: Tensor | None = None

    def __init__(self, store: KeyValues, prompts: Sequence[KVSlot], device: torch.device, *, fixed: bool = False):
        self.skips_hooks = fixed
        self.rotary_frequencies: dict[Any, Tensor] = {}
        self._windows = store.windows
        self._layer_of_window = {window: layer for layer, window in enumerate(store.windows)}  # any layer with it
        self._slots = store.rows_in_order()
        self._device = device
        self._row_parts: list[RowPart] = []
        self.places: list[int] = []
        self.rows = self._lay_out_rows(store, fixed)
        self.live = torch.tensor(self.places, device=device) if fixed else None
        self.products: PromptProducts | None = None
        self._lay_out_prompts(store, prompts, fixed)
        self._copy_prompt_states(prompts)
        added = [0] * self.rows
        before = [0] * self.rows
        step = [0] * self.rows
        for row, slot, prompt in zip(self.places, self._slots, prompts, strict=True):
            added[row] = slot.length
            before[row] = prompt.length + prompt.rotary_shift
            step[row] = 1
        self._added = torch.tensor(added, device=device)  # tokens in each row's own slot, [R]
        self._before = torch.tensor(before, device=device)  # rotary position of the first of these, [R]
        # Padding does not count tokens: it writes to the first position of its slot again and again, and the next row
        # in that slot overwrites it.
        self._step: Tensor | int = torch.tensor(step, device=device) if fixed else 1

    def _lay_out_rows(self, store: KeyValues, fixed: bool) -> int:
        """Set `_row_parts` and `places`, and return the number of rows with padding."""
        start = 0
        for _, pool in sorted(store.rows.items()):
            used = len(pool.slots)
            if not used:
                continue
            count = used
            max_keys = None
            if fixed:
                # The number of rows shrinks towards the end of a rollout. Up to 8 rows cost no more than one, so the
                # last few rows are padded to the slots that are allocated anyway, which gives few different shapes.
                count = max(rounded(used), min(ROWS_AS_FAST_AS_ONE, pool.min_slots))
                pool.min_slots = max(pool.min_slots, count)
                max_keys = self._choose_max_keys(pool)
            indices = torch.arange(count, device=self._device)
            self._row_parts.append(RowPart(pool, slice(start, start + count), indices, max_keys))
            self.places += range(start, start + used)
            start += count
        return start

    def _choose_max_keys(self, pool: KVSlotPool) -> int | None:
        """Return the number of keys that a fixed step reads from each slot of a pool. None: as many as are used."""
        return slot_size(max(slot.length for slot in pool.slots) + 1)

    def _lay_out_prompts(self, store: KeyValues, prompts: Sequence[KVSlot], fixed: bool) -> None:
        """Set how the attention to prompts is computed. Arguments as in the class."""
        rows_of = rows_by_prompt(store, prompts, self.places)
        self.products = PromptProducts(store, rows_of, self.rows, self._layer_of_window, self._device, fixed=fixed)

    def _copy_prompt_states(self, prompts: Sequence[KVSlot]) -> None:
        """Copy the states of linear attention from their prompts to rows that have no tokens yet."""
        pairs: dict[tuple[KVSlotPool, KVSlotPool], list[tuple[int, int]]] = {}
        for slot, prompt in zip(self._slots, prompts, strict=True):
            if slot.length == 0:
                pairs.setdefault((slot.pool, prompt.pool), []).append((slot.index, prompt.index))
        for (pool, source), indices in pairs.items():
            pool.begin([row for row, _ in indices], source, [prompt for _, prompt in indices])

    def linear_mask(self, width: int) -> None:
        """Return None: linear attention continues from states."""
        return None

    def read_states(self, layer: int) -> tuple[Tensor, ...]:
        """Return the states of a layer of linear attention, [R, ..] each."""
        parts = []
        for part in self._row_parts:
            states = part.pool.stored_states(layer)
            parts.append(tuple(state[: len(part.indices)] for state in states))
        return concatenated(parts)

    def write_states(self, layer: int, *states: Tensor) -> None:
        """Store the states of a layer of linear attention, [R, ..] each."""
        for part in self._row_parts:
            for stored, new in zip(part.pool.stored_states(layer), states, strict=True):
                stored[: len(part.indices)] = new[part.rows]

    @property
    def num_sampled(self) -> Tensor:
        """The number of tokens that each row's completion has before this step, [R].

        This is one more than the row has cached: the last sampled token is the input of this step.
        """
        return self._added + 1

    @property
    def shape(self) -> tuple[Any, ...]:
        """Hashable value that determines the kernels of a step. Equal shapes differ only in values of tensors."""
        rows = tuple((part.pool.capacity, len(part.indices), part.max_keys) for part in self._row_parts)
        prompts = None if self.products is None else self.products.shape
        return rows, prompts

    @property
    def is_full(self) -> bool:
        """Whether a row has reached the last key that a fixed step reads."""
        if not self.skips_hooks:
            return False
        for part in self._row_parts:
            if max(slot.length for slot in part.pool.slots) == part.max_keys:
                return True
        return False

    def addresses(self) -> list[int]:
        """Return the addresses of the cache's memory that steps read and write."""
        tensors: list[Tensor] = []
        for row_part in self._row_parts:
            tensors += row_part.pool.tensors()
        if self.products is not None:
            tensors += self.products.keys_and_values()
        return [tensor.data_ptr() for tensor in tensors]

    def state(self) -> list[Tensor]:
        """Return the tensors that a step reads and then changes. If they are restored, a step can be repeated."""
        state = [self._added]
        for part in self._row_parts:
            state += part.pool.linear_states()
        return state

    def load(self, other: "Decode") -> None:
        """Copy the rows of another `Decode` of the same shape to the memory of this one."""
        self.live = other.live
        for tensor, other_tensor in zip(self._tensors(), other._tensors(), strict=True):
            tensor.copy_(other_tensor)

    def _tensors(self) -> list[Tensor]:
        """Return the tensors that depend on the rows."""
        tensors = [self._added, self._before]
        if isinstance(self._step, Tensor):
            tensors.append(self._step)
        if self.products is not None:
            tensors += self.products.tensors()
        return tensors

    def begin(self) -> None:
        """Prepare positions and masks before the forward of a step."""
        self.positions = (self._before + self._added)[:, None]
        self._view_rows()
        if self.products is not None:
            self.products.begin(self._added)

    def _view_rows(self) -> None:
        """Set where each row writes, and which keys of its own slot it sees, by window."""
        for part in self._row_parts:
            added = self._added[part.rows]
            longest = part.max_keys or max(slot.length for slot in part.pool.slots) + 1
            for window, layer in self._layer_of_window.items():
                size = part.pool.sizes[layer]
                num_keys = min(longest, size)
                columns = torch.arange(num_keys, device=self._device)
                # With a window of `size` positions the slot is a ring buffer. Once it is full, it has exactly the
                # positions that the new token sees, so all of them are visible, in any order.
                part.columns[window] = added if longest <= size else added % size
                part.views[window] = _View(num_keys, columns <= added[:, None])

    def end(self) -> None:
        """Count one token more for every row, on the device, after the forward."""
        self._added += self._step
        for row_part in self._row_parts:
            row_part.views.clear()
            row_part.columns.clear()
        if self.products is not None:
            self.products.end()

    def lengthen(self) -> None:
        """Count one token more in the slots, on the host, after a step."""
        for slot in self._slots:
            slot.length += 1

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
        """Store keys and values, and compute attention.

        Args:
            layer: Layer whose keys are used.
            q: Queries, [R, 1, H, hd].
            k: Keys, [R, 1, kv, hd].
            v: Values, [R, 1, kv, hd_v].
            scale: Factor of the scores.
            is_stored: Whether the layer has stored k and v already, for models whose layers share them.
            sinks: A score per head that takes part in the softmax, [H].

        Returns:
            [R, 1, H, hd_v].
        """
        window = self._windows[layer]
        num_heads, key_heads = q.shape[2], k.shape[2]
        if not is_stored:
            self._write(layer, k, v)
        grouped = (q[:, 0] * scale).unflatten(1, (key_heads, num_heads // key_heads))  # [R, kv, rep, hd]
        results = []
        for part in self._row_parts:
            view = part.views[window]
            keys, values = part.pool.layer(layer, k, v)
            visible = slice(len(part.indices)), slice(None), slice(view.keys)
            bias = view.bias(q.dtype)[:, None, None]  # [rows, 1, 1, L]
            results.append(_attend_to(grouped[part.rows], keys[visible], values[visible], bias))
        over_rows = Partial(*concatenated(results))
        assert self.products is not None, "set by _lay_out_prompts"
        over_prompts = self.products.attend(layer, window, grouped, k, v)
        merged = merge_by_log_sum_exp(over_rows, over_prompts)
        if sinks is not None:
            merged = merge_with_sinks(merged, sinks.view(key_heads, -1))
        return merged.out.to(q.dtype).flatten(1, 2)[:, None]

    def _write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store k [R, 1, kv, hd] and v [R, 1, kv, hd_v] in the rows' slots."""
        for part in self._row_parts:
            columns = part.columns[self._windows[layer]]
            for stored, new in zip(part.pool.layer(layer, k, v), (k, v), strict=True):
                stored[part.indices, :, columns] = new[part.rows, 0]


class _View:
    """Visible keys of a part in one step, for all layers with the same window.

    Args:
        keys: The number of keys to read, the first ones of each slot.
        visible: Which of these are visible, bool [..., keys].
    """

    def __init__(self, keys: int, visible: Tensor):
        self.keys = keys
        self._visible = visible
        self._bias: Tensor | None = None

    def bias(self, dtype: torch.dtype) -> Tensor:
        """Return the mask that is added to the scores, [..., keys]."""
        if self._bias is None:
            self._bias = additive(self._visible, dtype)
        return self._bias


@dataclass
class RowPart:
    """Rows whose slots are in one pool.

    Attributes:
        pool: The pool. The rows have its first slots.
        rows: Their indices among the R rows.
        indices: Indices of their slots, [rows].
        max_keys: The number of keys that a fixed step reads. None: as many as are used.
        columns: Position in the slot at which each row writes in this step, [rows], by window.
        views: Visible keys in this step, by window.
    """

    pool: KVSlotPool
    rows: slice
    indices: Tensor
    max_keys: int | None
    columns: dict[int | None, Tensor] = field(default_factory=dict)
    views: dict[int | None, _View] = field(default_factory=dict)


@dataclass
class PromptPart:
    """Prompts in one pool.

    Attributes:
        pool: The pool.
        table: Rows of each prompt, [G, n].
        lengths: Lengths of the prompts, [G].
        longest: The number of keys to read.
        views: Visible keys in this step, by window.
    """

    pool: KVSlotPool
    table: Tensor
    lengths: Tensor
    longest: int
    views: dict[int | None, _View] = field(default_factory=dict)


class PromptProducts:
    """Attention of rows to their prompts by matrix products, one for each pool of prompts.

    Args:
        store: The cache.
        rows_of: The rows of each prompt, as `rows_by_prompt` returns them.
        num_rows: The number of rows with padding, R.
        layer_of_window: Windows of the layers that use the products, with a layer of each.
        device: The device.
        fixed: As in `Decode`.

    Attributes:
        parts: The prompts of each pool.
    """

    def __init__(
        self,
        store: KeyValues,
        rows_of: Mapping[KVSlot, list[int]],
        num_rows: int,
        layer_of_window: Mapping[int | None, int],
        device: torch.device,
        *,
        fixed: bool = False,
    ):
        self._layer_of_window = layer_of_window
        self._device = device
        self._head_indices: dict[int, Tensor] = {}  # [kv, 1] by the number of key heads, from the first step on
        self.parts: list[PromptPart] = []
        # Where each row finds its result: group and index in the table of the only pool, or an offset in the results of
        # all pools.
        group_of_row = [0] * num_rows
        index_of_row = [0] * num_rows
        offset_of_row = [0] * num_rows
        offset = 0
        for pool in store.prompts.values():
            groups = [rows_of[slot] for slot in pool.slots]
            count = max(map(len, groups), default=0)
            if count == 0:
                continue
            lengths = [slot.length for slot in pool.slots]
            longest = max(lengths)
            if fixed:
                # A single prompt with several rows is padded to 8 rows, which cost nothing. With several prompts this
                # padding would be added to each of them.
                min_count = ROWS_AS_FAST_AS_ONE if len(groups) == 1 and count > 1 else 1
                count = max(min_count, power_of_two(count))
                longest = pool.capacity
                num_empty = power_of_two(len(groups)) - len(groups)
                groups = groups + [[]] * num_empty
                lengths = lengths + [1] * num_empty
                pool.min_slots = max(pool.min_slots, len(groups))
            for group, rows in enumerate(groups):
                for index, row in enumerate(rows):
                    group_of_row[row] = group
                    index_of_row[row] = index
                    offset_of_row[row] = offset + group * count + index
            offset += len(groups) * count
            # Groups with fewer rows are filled with row 0, whose result is computed again and not read.
            table = index_tensor([rows + [0] * (count - len(rows)) for rows in groups], device)
            self.parts.append(PromptPart(pool, table, index_tensor(lengths, device), longest))
        # If each prompt has one row and they are in the same order, nothing has to be reordered.
        has_one_row_each = len(self.parts) == 1 and self.parts[0].table.shape == (num_rows, 1)
        self._is_sorted = has_one_row_each and group_of_row == list(range(num_rows))
        if len(self.parts) == 1:
            self._result_index = index_tensor([group_of_row, index_of_row], device)  # [2, R]
        else:
            self._result_index = index_tensor(offset_of_row, device)  # [R]

    @property
    def shape(self) -> tuple[Any, ...]:
        """As in `Decode`."""
        parts = tuple((part.pool.capacity, *part.table.shape) for part in self.parts)
        return parts, self._is_sorted

    def keys_and_values(self) -> list[Tensor]:
        """Return the keys and values of the prompts."""
        tensors: list[Tensor] = []
        for part in self.parts:
            tensors += part.pool.keys_and_values()
        return tensors

    def tensors(self) -> list[Tensor]:
        """Return the tensors that depend on the rows."""
        tensors = [self._result_index]
        for part in self.parts:
            tensors += [part.table, part.lengths]
        return tensors

    def begin(self, added: Tensor) -> None:
        """Set which keys of its prompt each row sees in the next step.

        Args:
            added: The number of tokens in each row's own slot, [R].
        """
        for part in self.parts:
            for window, layer in self._layer_of_window.items():
                size = part.pool.sizes[layer]
                columns = torch.arange(min(part.longest, size), device=self._device)
                stored = part.lengths.clamp(max=size)[:, None, None]  # [G, 1, 1]
                visible = columns < stored  # [G, 1, L]
                if window is not None:
                    # Positions are counted from the first stored key. A row with `added` tokens of its own is at
                    # position stored + added, and sees the window - 1 positions before that.
                    first = added[part.table][..., None] + stored - window + 1  # [G, n, 1]
                    visible = visible & (columns >= first)
                part.views[window] = _View(columns.shape[0], visible)

    def end(self) -> None:
        """Free the masks of a step."""
        for part in self.parts:
            part.views.clear()

    def attend(self, layer: int, window: int | None, grouped: Tensor, k: Tensor, v: Tensor) -> Partial:
        """Compute the attention of rows to their prompts.

        Args:
            layer: Layer whose keys are used.
            window: Its window.
            grouped: Scaled queries, [R, kv, rep, hd].
            k: As in `KVSlotPool.layer`.
            v: As in `KVSlotPool.layer`.

        Returns:
            out [R, kv, rep, hd_v] and lse [R, kv, rep].
        """
        key_heads = grouped.shape[1]
        if key_heads not in self._head_indices:
            self._head_indices[key_heads] = torch.arange(key_heads, device=grouped.device)[:, None]
        results = []
        for part in self.parts:
            view = part.views[window]
            keys, values = part.pool.layer(layer, k, v)
            num_groups = part.table.shape[0]
            visible = slice(num_groups), slice(None), slice(view.keys)
            queries = grouped
            if not self._is_sorted:
                # The indices [G, 1, n] and [kv, 1] broadcast to [G, kv, n], which selects [G, kv, n, rep, hd]. The rows
                # of a prompt and their query heads are then flattened to one dimension, [G, kv, n·rep, hd].
                queries = grouped[part.table[:, None], self._head_indices[key_heads]].flatten(2, 3)
            bias = view.bias(grouped.dtype)[:, None, :, None]  # [G, 1, 1 or n, 1, L]
            if bias.shape[2] > 1:
                bias = bias.expand(-1, -1, -1, grouped.shape[2], -1)
            results.append(_attend_to(queries, keys[visible], values[visible], bias.flatten(2, 3)))
        return self._by_row(results)

    def _by_row(self, results: Sequence[Partial]) -> Partial:
        """Reorder the results of each pool of prompts, [G, kv, n·rep, ..], to [R, kv, rep, ..]."""
        if self._is_sorted:
            return results[0]
        split: list[list[Tensor]] = []  # of each pool, out and lse [G, kv, n, rep, ..]
        for result, part in zip(results, self.parts, strict=True):
            num_rows = part.table.shape[1]
            split.append([term.unflatten(2, (num_rows, -1)) for term in result])
        if len(split) == 1:
            groups, indices = self._result_index
            return Partial(*(term[groups, :, indices] for term in split[0]))
        # [G·n, kv, rep, ..] of all pools together
        flat = [tuple(term.transpose(1, 2).flatten(0, 1) for term in terms) for terms in split]
        return Partial(*(term[self._result_index] for term in concatenated(flat)))


def index_tensor(values: list[int] | list[list[int]], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


def rows_by_prompt(store: KeyValues, prompts: Sequence[KVSlot], rows: Sequence[int]) -> dict[KVSlot, list[int]]:
    """Return the rows of each prompt in the cache.

    Args:
        store: The cache.
        prompts: Prompt of each row.
        rows: Indices of the rows.
    """
    rows_of: dict[KVSlot, list[int]] = {}
    for pool in store.prompts.values():
        for slot in pool.slots:
            rows_of[slot] = []
    for row, prompt in zip(rows, prompts, strict=True):
        rows_of[prompt].append(row)
    return rows_of


def _attend_to(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Partial:
    """Compute attention over some of the keys, in max(float32, the dtype).

    Products of half precision are summed in float32, as fused kernels do.

    Args:
        q: Scaled queries, [B, kv, m, hd].
        k: [B, kv, L, hd].
        v: [B, kv, L, hd_v].
        bias: [B, 1, 1 or m, L].

    Returns:
        out [B, kv, m, hd_v] and lse [B, kv, m]. Queries that see no key get 0 and -inf.
    """
    is_half = q.dtype in (torch.bfloat16, torch.float16)
    if is_half and q.device.type == "cpu":
        return CpuFlash().forward(q, k, v, bias.expand(-1, 1, q.shape[2], -1), 1.0)
    scores = _products(q, k.transpose(-1, -2), is_half).add_(bias)
    lse = torch.logsumexp(scores, -1)
    # Without a visible key the lse is -inf, and -inf - (-inf) would be NaN.
    finite_lse = lse.clamp(min=torch.finfo(lse.dtype).min)
    weights = scores.sub_(finite_lse[..., None]).exp_()
    return Partial(_products(weights.to(v.dtype), v, is_half), lse)


def _products(a: Tensor, b: Tensor, is_half: bool) -> Tensor:
    """Return a [B, kv, m, x] @ b [B, kv, x, n], in float32 if they have half precision."""
    flat_a, flat_b = a.flatten(0, 1), b.flatten(0, 1)
    if is_half:
        product = torch.bmm(flat_a, flat_b, out_dtype=torch.float32)
    else:
        product = torch.bmm(flat_a, flat_b)
    return product.unflatten(0, a.shape[:2])


def concatenated(parts: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Concatenate tuples of tensors, entry by entry, along the first dimension.

    Example:
        >>> a, b = concatenated([(torch.zeros(2), torch.zeros(2, 3)), (torch.zeros(1), torch.zeros(1, 3))])
        >>> list(a.shape), list(b.shape)
        ([3], [3, 3])
    """
    if len(parts) == 1:
        return parts[0]
    return tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True))
