"""Attention of a forward over the cache: whole prompts (`Prefill`), or one more token of every running row (`Decode`).

The model hands `attend` each layer's queries, keys and values. A row's softmax runs over two parts: its prompt, which
the rows of a group multiply together, and what it has added itself. The two are merged by their log-sum-exp.

A step can be captured and replayed (`inference.graphs`): with `fixed`, sizes are rounded up, so that few shapes occur,
and all that a step reads and writes lies where it lay in the step before.
Letters: R rows, G prompts of a pool, n rows of the largest group, kv key heads, rep query heads of each, L keys.
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

ROWS_AS_FAST_AS_ONE = 8


class Prefill:
    """Prompts read from their beginnings, [B, S], padded on the right; their keys go into the cache.

    slots: new ones, consecutive ones of one pool, in the batch's order. Padding is never seen: it stands to the
    right of every token, and what it writes is hidden by the prompt's length. ends: [B, S], as `Images` has them.
    """

    skips_hooks = False

    def __init__(self, store: KeyValues, slots: Sequence[KVSlot], device: torch.device, ends: Tensor | None = None):
        self._kinds = [*zip(store.windows, store.bidirectional, strict=True)]
        self._ends = ends
        self._pool = slots[0].pool
        self._indices = slice(slots[0].index, slots[0].index + len(slots))
        self._length = max(slot.length for slot in slots)
        self._lengths = torch.tensor([slot.length for slot in slots], device=device)
        self._kernel = SdpaKernel()
        self._masks: dict[tuple[int | None, bool], object] = {}
        self.rotary_frequencies: dict[Any, Tensor] = {}
        self.positions = torch.arange(self._length, device=device)[None]  # [1, S]
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
        """Write keys and values, and return the attention [B, S, H, hd_v] of q [B, S, H, hd].

        k is [B, S, kv, hd], v [B, S, kv, hd_v].
        """
        if not is_stored:
            self._write(layer, k, v)
        window, is_bidirectional = kind = self._kinds[layer]
        if kind not in self._masks:
            visibility = Visibility(self._length, self._length, window)
            if is_bidirectional and self._ends is not None:
                positions = self.positions.expand_as(self._ends)
                visibility = replace(
                    visibility,
                    query_positions=positions,
                    key_positions=self.positions,
                    rows=len(positions),
                    query_ends=self._ends,
                )
            self._masks[kind] = self._kernel.prepare(visibility, q.dtype, q.device)
        return self._kernel(q, k, v, self._masks[kind], scale, sinks)

    def _write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Write k [B, S, kv, hd] and v [B, S, kv, hd_v], or the last of them that the layer keeps."""
        size = self._pool.sizes[layer]
        for tensor, fresh in zip(self._pool.layer(layer, k, v), (k, v), strict=True):
            if self._length > size:
                start = (self._lengths - size).clamp(min=0)  # [B]
                columns = (start[:, None] + torch.arange(size, device=fresh.device)).clamp(max=self._length - 1)
                fresh = fresh[torch.arange(fresh.shape[0], device=fresh.device)[:, None], columns]  # [B, size, kv, ..]
            tensor[self._indices, :, : fresh.shape[1]] = fresh.transpose(1, 2)

    def linear_mask(self, width: int) -> LinearMask:
        """Return the mask of the prompts, each a document."""
        return LinearMask.of_lengths(self._lengths, self._length, width)

    def read_states(self, layer: int) -> tuple[Tensor, ...]:
        raise ValueError("a prompt goes on from nothing")

    def write_states(self, layer: int, *states: Tensor) -> None:
        """Store the states [B, ..] after the prompts' last tokens."""
        for held, fresh in zip(self._pool.states(layer, states), states, strict=True):
            held[self._indices] = fresh


class Decode:
    """Cache of decoding steps: one token of every row, step after step until rows come, go or change pools.

    prompts: the prompt of each row of `store.rows_in_order()`. Between `begin` and `end` one forward of [R, 1] tokens;
    `lengthen` tells the host's side of it, before the next step.
    fixed: R is more than the rows; `places` (on the device `live`) says where each stands, and what others compute is
    not to be read. A Decode of equal `shape` then takes the same steps, once it has `load`ed another's rows; until it
    `is_full`.
    """

    last_index: Tensor | None = None

    def __init__(self, store: KeyValues, prompts: Sequence[KVSlot], device: torch.device, *, fixed: bool = False):
        self.skips_hooks = fixed
        self.rotary_frequencies: dict[Any, Tensor] = {}
        self._windows = store.windows
        self._kinds = {window: layer for layer, window in enumerate(store.windows)}  # a layer with each window
        self._slots = store.rows_in_order()
        self._device = device
        self._heads: dict[int, Tensor] = {}  # [kv, 1] by the number of key heads, from the first step on
        self._own: list[Own] = []
        live: list[int] = []
        start = 0
        for _, pool in sorted(store.rows.items()):
            if used := len(pool.slots):
                # Of few rows, as many as there is memory for: the last ones of a rollout go through few shapes.
                count = max(rounded(used), min(ROWS_AS_FAST_AS_ONE, pool.min_slots)) if fixed else used
                pool.min_slots = max(pool.min_slots, count if fixed else 0)
                indices = torch.arange(count, device=device)
                reach = self._reach(pool) if fixed else None
                self._own.append(Own(pool, slice(start, start + count), indices, reach))
                live += range(start, start + used)
                start += count
        self.rows = start  # R
        self.places = live
        # [rows]: where each row of the cache stands among the R; None where there are no others.
        self.live = torch.tensor(live, device=device) if fixed else None
        self._lay_prompts(store, prompts, live, fixed)
        self._begin_rows(prompts)
        added, before, step = ([0] * start for _ in range(3))
        for row, slot, prompt in zip(live, self._slots, prompts, strict=True):
            added[row], before[row], step[row] = slot.length, prompt.length + prompt.rotary_shift, 1
        self._added = torch.tensor(added, device=device)  # [R] own tokens in the cache
        self._before = torch.tensor(before, device=device)  # rotary position of the first own token
        # A row without a sequence stays at its slot's beginning, which the next sequence there overwrites.
        self._step: Tensor | int = torch.tensor(step, device=device) if fixed else 1

    def _reach(self, pool: KVSlotPool) -> int | None:
        """Return how many keys of the rows of a pool a step that is fixed looks at; None: as many as there are."""
        return slot_size(max(slot.length for slot in pool.slots) + 1)

    def _lay_prompts(self, store: KeyValues, prompts: Sequence[KVSlot], live: list[int], fixed: bool) -> None:
        """Set tables of the rows that go on from each prompt, and of where each row finds what its prompt gave."""
        members = members_of(store, prompts, live)
        self._shared: list[_Shared] = []
        groups_of, index_of, offset_of = ([0] * self.rows for _ in range(3))
        offset = 0
        for pool in store.prompts.values():
            groups = [members[slot] for slot in pool.slots]
            count = max(map(len, groups), default=0)
            if count == 0:
                continue
            lengths = [slot.length for slot in pool.slots]
            longest = max(lengths)
            if fixed:
                # Each prompt of the table would take as many: only where there is one are they as fast as one.
                least = ROWS_AS_FAST_AS_ONE if len(groups) == 1 and count > 1 else 1
                count, longest = max(least, power_of_two(count)), pool.capacity
                more = power_of_two(len(groups)) - len(groups)
                groups, lengths = groups + [[]] * more, lengths + [1] * more
                pool.min_slots = max(pool.min_slots, len(groups))
            for group, rows in enumerate(groups):
                for index, row in enumerate(rows):
                    groups_of[row], index_of[row], offset_of[row] = group, index, offset + group * count + index
            offset += len(groups) * count
            # A short group's table goes on with row 0: computed, and never read.
            table = self._index([rows + [0] * (count - len(rows)) for rows in groups])
            self._shared.append(_Shared(pool, table, self._index(lengths), longest))
        # Where each row is its own prompt's only one, in their order, nothing is to be sorted.
        is_one = len(self._shared) == 1 and self._shared[0].table.shape == (self.rows, 1)
        self._is_sorted = is_one and groups_of == list(range(self.rows))
        self._back = self._index([groups_of, index_of] if len(self._shared) == 1 else offset_of)

    def _begin_rows(self, prompts: Sequence[KVSlot]) -> None:
        """Let rows without a token of their own yet go on from their prompts' states."""
        fresh: dict[tuple[KVSlotPool, KVSlotPool], list[tuple[int, int]]] = {}
        for slot, prompt in zip(self._slots, prompts, strict=True):
            if slot.length == 0:
                fresh.setdefault((slot.pool, prompt.pool), []).append((slot.index, prompt.index))
        for (pool, source), pairs in fresh.items():
            pool.begin([index for index, _ in pairs], source, [index for _, index in pairs])

    def linear_mask(self, width: int) -> None:
        return None

    def read_states(self, layer: int) -> tuple[Tensor, ...]:
        """Return the states of a layer, [R, ..] each."""
        return concatenated([tuple(state[: len(own.indices)] for state in own.pool.held(layer)) for own in self._own])

    def write_states(self, layer: int, *states: Tensor) -> None:
        """Store the states of a layer, [R, ..] each."""
        for own in self._own:
            for held, fresh in zip(own.pool.held(layer), states, strict=True):
                held[: len(own.indices)] = fresh[own.rows]

    def _index(self, values: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    @property
    def drawn(self) -> Tensor:
        """Number of tokens [R] that each row's completion has before this step's draw."""
        return self._added + 1

    @property
    def shape(self) -> tuple[Any, ...]:
        """Sizes that a step's kernels depend on, beside the values of tensors."""
        rows = tuple((own.pool.capacity, len(own.indices), own.reach) for own in self._own)
        prompts = tuple((shared.pool.capacity, *shared.table.shape) for shared in self._shared)
        return rows, prompts, self._is_sorted

    @property
    def is_full(self) -> bool:
        """Return whether, with `fixed`, a row has come to the last key that a step looks at."""
        return self.skips_hooks and any(max(slot.length for slot in own.pool.slots) == own.reach for own in self._own)

    def addresses(self) -> list[int]:
        """Return the addresses of what steps read and write of the cache."""
        own = [tensor for own in self._own for tensor in own.pool.tensors()]
        shared = [tensor for shared in self._shared for tensor in shared.pool.keys_and_values()]
        return [tensor.data_ptr() for tensor in own + shared]

    def state(self) -> list[Tensor]:
        """Return the tensors that a step reads and then changes: taken twice from these, it does the same."""
        return [self._added, *(state for own in self._own for state in own.pool.linear_states())]

    def load(self, other: "Decode") -> None:
        """Take over the rows of another of the same shape, into the memory that this one has."""
        self.live = other.live
        for mine, theirs in zip(self._tensors(), other._tensors(), strict=True):
            mine.copy_(theirs)

    def _tensors(self) -> list[Tensor]:
        of_prompts = [tensor for shared in self._shared for tensor in (shared.table, shared.lengths)]
        step = [self._step] if isinstance(self._step, Tensor) else []
        return [self._added, self._before, *step, self._back, *of_prompts]

    def begin(self) -> None:
        """Prepare positions and masks before the forward of a step."""
        self.positions = (self._before + self._added)[:, None]  # [R, 1]
        self._view_rows()
        self._view_prompts(self._kinds)

    def _view_rows(self) -> None:
        for own in self._own:
            added = self._added[own.rows]
            longest = own.reach or max(slot.length for slot in own.pool.slots) + 1
            for window, layer in self._kinds.items():
                size = own.pool.sizes[layer]
                seen = min(longest, size)
                columns = torch.arange(seen, device=self._device)
                # A window's positions are a ring: once all are written, they hold just what the token sees.
                own.columns[window] = added if longest <= size else added % size
                own.views[window] = _View(seen, columns <= added[:, None])

    def _view_prompts(self, kinds: Mapping[int | None, int]) -> None:
        for shared in self._shared:
            for window, layer in kinds.items():
                size = shared.pool.sizes[layer]
                columns = torch.arange(min(shared.longest, size), device=self._device)
                stored = shared.lengths.clamp(max=size)[:, None, None]  # [G, 1, 1]
                visible = columns < stored  # [G, 1, L]
                if window is not None:
                    first = self._added[shared.table][..., None] + stored - window + 1  # [G, n, 1]
                    visible = visible & (columns >= first)
                shared.views[window] = _View(columns.shape[0], visible)

    def end(self) -> None:
        """Count one token more in the cache for every row, after the forward."""
        self._added += self._step
        parts: list[Own | _Shared] = [*self._own, *self._shared]
        for part in parts:
            part.views.clear()
        for own in self._own:
            own.columns.clear()

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
        """Write keys and values, and return the attention [R, 1, H, hd_v] of q [R, 1, H, hd].

        k is [R, 1, kv, hd], v [R, 1, kv, hd_v].
        """
        window, heads, key_heads = self._windows[layer], q.shape[2], k.shape[2]
        if not is_stored:
            self._write(layer, k, v)
        grouped = (q[:, 0] * scale).unflatten(1, (key_heads, heads // key_heads))  # [R, kv, rep, hd]
        parts = []
        for own in self._own:
            view = own.views[window]
            keys, values = own.pool.layer(layer, k, v)
            seen = slice(len(own.indices)), slice(None), slice(view.keys)
            bias = view.bias(q.dtype)[:, None, None]  # [rows, 1, 1, L]
            parts.append(_attend_to(grouped[own.rows], keys[seen], values[seen], bias))
        added = Partial(*concatenated(parts))
        merged = merge_by_log_sum_exp(added, self._over_prompts(layer, grouped, k, v))
        if sinks is not None:
            merged = merge_with_sinks(merged, sinks.view(key_heads, -1))
        return merged.out.to(q.dtype).flatten(1, 2)[:, None]

    def _write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Write k [R, 1, kv, hd] and v [R, 1, kv, hd_v] into the rows' slots."""
        for own in self._own:
            columns = own.columns[self._windows[layer]]
            for tensor, fresh in zip(own.pool.layer(layer, k, v), (k, v), strict=True):
                tensor[own.indices, :, columns] = fresh[own.rows, 0]

    def _over_prompts(self, layer: int, grouped: Tensor, k: Tensor, v: Tensor) -> Partial:
        """Return the attention of scaled queries [R, kv, rep, hd] to their prompts; k, v: as of `KVSlotPool.layer`."""
        window, key_heads = self._windows[layer], grouped.shape[1]
        if key_heads not in self._heads:
            self._heads[key_heads] = torch.arange(key_heads, device=grouped.device)[:, None]
        parts = []
        for shared in self._shared:
            view = shared.views[window]
            keys, values = shared.pool.layer(layer, k, v)
            groups, count = shared.table.shape
            seen = slice(groups), slice(None), slice(view.keys)
            queries = grouped
            if not self._is_sorted:
                queries = grouped[shared.table[:, None], self._heads[key_heads]].flatten(2, 3)  # [G, kv, n · rep, hd]
            bias = view.bias(grouped.dtype)[:, None, :, None]  # [G, 1, 1 or n, 1, L]
            if bias.shape[2] > 1:
                bias = bias.expand(-1, -1, -1, grouped.shape[2], -1)
            parts.append(_attend_to(queries, keys[seen], values[seen], bias.flatten(2, 3)))
        return self._by_row(parts)

    def _by_row(self, parts: Sequence[Partial]) -> Partial:
        """Reorder parts of each pool of prompts from [G, kv, n · rep, ..] to [R, kv, rep, ..]."""
        if self._is_sorted:
            return parts[0]
        counts = [shared.table.shape[1] for shared in self._shared]
        split = [[term.unflatten(2, (n, -1)) for term in part] for part, n in zip(parts, counts, strict=True)]
        if len(split) == 1:
            groups, index = self._back
            return Partial(*(term[groups, :, index] for term in split[0]))
        # [G · n, kv, rep, ..] of all pools together
        flat = [tuple(term.transpose(1, 2).flatten(0, 1) for term in part) for part in split]
        return Partial(*(term[self._back] for term in concatenated(flat)))


class _View:
    """View of a part that the layers of one kind have in one step: the first `keys` positions, those that are `visible`
    [..., L]."""

    def __init__(self, keys: int, visible: Tensor):
        self.keys = keys
        self._visible = visible
        self._bias: Tensor | None = None

    def bias(self, dtype: torch.dtype) -> Tensor:
        if self._bias is None:
            self._bias = additive(self._visible, dtype)
        return self._bias


@dataclass
class Own:
    """The rows of one pool: consecutive ones, in its first slots. reach: the number of keys that a step looks at, None
    for as many as there are. columns: where a step writes, by window."""

    pool: KVSlotPool
    rows: slice
    indices: Tensor
    reach: int | None
    columns: dict[int | None, Tensor] = field(default_factory=dict)
    views: dict[int | None, _View] = field(default_factory=dict)


@dataclass
class _Shared:
    """The prompts of one pool, and the rows [G, n] that go on from each."""

    pool: KVSlotPool
    table: Tensor
    lengths: Tensor  # [G]
    longest: int
    views: dict[int | None, _View] = field(default_factory=dict)


def members_of(store: KeyValues, prompts: Sequence[KVSlot], rows: Sequence[int]) -> dict[KVSlot, list[int]]:
    """Return the rows that go on from each prompt of the cache; prompts: of each of `rows`."""
    members: dict[KVSlot, list[int]] = {slot: [] for pool in store.prompts.values() for slot in pool.slots}
    for row, prompt in zip(rows, prompts, strict=True):
        members[prompt].append(row)
    return members


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
    half = q.dtype in (torch.bfloat16, torch.float16)
    if half and q.device.type == "cpu":
        return CpuFlash().forward(q, k, v, bias.expand(-1, 1, q.shape[2], -1), 1.0)
    scores = _products(q, k.transpose(-1, -2), half).add_(bias)
    lse = torch.logsumexp(scores, -1)
    weights = scores.sub_(lse.clamp(min=torch.finfo(lse.dtype).min)[..., None]).exp_()
    return Partial(_products(weights.to(v.dtype), v, half), lse)


def _products(a: Tensor, b: Tensor, half: bool) -> Tensor:
    """Return a [B, kv, m, x] @ b [B, kv, x, n], in float32 where they are of half precision."""
    flat = a.flatten(0, 1), b.flatten(0, 1)
    return (torch.bmm(*flat, out_dtype=torch.float32) if half else torch.bmm(*flat)).unflatten(0, a.shape[:2])


def concatenated(parts: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Return the tensors of several tuples, those at one place as one."""
    return parts[0] if len(parts) == 1 else tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True))
