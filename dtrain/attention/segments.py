"""Variable-length attention over the calls of `attention.packing` and `attention.tree`: torch's flash attention.

`calls_to_device` copies the lengths of all calls to the device in one copy, and the host never waits for the device.
`Flash` computes a call on CUDA, with flat tokens: q is [T, H, hd] with T = B · S. `FlashOnCpu` does the same on a CPU.
In a ring, and in rows with shared beginnings, `VarlenBlocks` computes a block of keys by several calls, and merges them
as `attention.blocks` describes.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from inspect import signature
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import AuxRequest, varlen_attn

from dtrain.attention.blocks import (
    BlockByBlock,
    Gradients,
    Partial,
    cpu_flash_backward,
    cpu_flash_forward,
    merge_by_log_sum_exp,
    pad_heads_to_one_size,
)
from dtrain.attention.packing import Call
from dtrain.attention.visibility import additive

# torch 2.11 does not have this argument, and always accepts fewer key heads than query heads.
_GROUPED_HEADS: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}


class Segments(NamedTuple):
    """A `Call` on the device, with n segments.

    Attributes:
        queries: Slices of flat tokens, as in `Call`.
        keys: Slices of flat tokens, as in `Call`.
        query_ends: cu_seqlens of the queries, int32 [n + 1]: the end of each segment, after a 0.
        key_ends: cu_seqlens of the keys, int32 [n + 1].
        longest_query: At least the number of queries of each segment.
        longest_key: At least the number of keys of each segment.
        window: As in `Call`.
        query_lengths: Number of queries of each segment, on the host.
        key_lengths: Number of keys of each segment, on the host.
        key_index: The tokens of `keys`, int64 [number of keys]. None for few slices, which are faster without it.
    """

    queries: tuple[slice, ...]
    keys: tuple[slice, ...]
    query_ends: Tensor
    key_ends: Tensor
    longest_query: int
    longest_key: int
    window: tuple[int, int]
    query_lengths: tuple[int, ...] = ()
    key_lengths: tuple[int, ...] = ()
    key_index: Tensor | None = None

    def pick_keys(self, tensor: Tensor) -> Tensor:
        """Concatenate the slices of the call's keys, [N, ..] -> [number of keys, ..]."""
        if self.key_index is None:
            return pick(tensor, self.keys)
        return tensor.index_select(0, self.key_index)

    def add_to_keys(self, target: Tensor, values: Tensor) -> None:
        """Add values to the slices of the call's keys in place: the reverse of `pick_keys`.

        Args:
            target: [N, ..].
            values: [number of keys, ..].
        """
        if self.key_index is None:
            add_to_slices(target, self.keys, values)
        else:
            target.index_add_(0, self.key_index, values.to(target.dtype))


Steps = list[list[Segments]]  # the calls for each exchange of keys


class Flash:
    """Variable-length flash attention of torch, which requires one head size: smaller heads are padded with zeros.

    q is [T, H, hd], k [K, kv, hd] and v [K, kv, hd_v], with H a multiple of kv. Their tokens are those of the segments'
    slices, concatenated. The output is [T, H, hd_v], the log-sum-exp [H, T], float32.
    """

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float, sinks: Tensor | None = None
    ) -> Tensor:
        """Compute attention. Differentiable.

        Args:
            q: [T, H, hd].
            k: [K, kv, hd].
            v: [K, kv, hd_v].
            segments: The segments of q and k.
            scale: Factor of the scores.
            sinks: [H], or None. The module `blocks` explains sinks.

        Returns:
            [T, H, hd_v].
        """
        if sinks is None:
            value_size = v.shape[-1]
            q, k, v = pad_heads_to_one_size(q, k, v)
            out = self.attend(q, k, v, segments, scale)
            return out if out.shape[-1] == value_size else out[..., :value_size]
        return self._attend_as_block(q, k, v, segments, scale, sinks)

    def _attend_as_block(
        self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float, sinks: Tensor | None
    ) -> Tensor:
        """Compute attention by `forward` and `backward`. The arguments are those of `__call__`."""
        # q and k are the tokens of the slices already, so `VarlenBlocks` takes all of them.
        all_tokens = segments._replace(queries=(slice(0, len(q)),), keys=(slice(0, len(k)),), key_index=None)
        return BlockByBlock.apply(q, k, v, [[all_tokens]], None, VarlenBlocks(self, scale), sinks)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> Partial:
        """Compute attention with its log-sum-exp. Not differentiable. The arguments are those of `__call__`.

        Returns:
            out [T, H, hd_v] and lse [H, T].
        """
        value_size = v.shape[-1]
        q, k, v = pad_heads_to_one_size(q, k, v)
        out, lse = self.attend_with_lse(q, k, v, segments, scale)
        return Partial(out[..., :value_size], lse)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, merged: Partial, segments: Segments, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the segments' part of the gradients of q, k and v.

        Args:
            grad: Gradient of the merged output, [T, H, hd_v].
            q: [T, H, hd].
            k: [K, kv, hd].
            v: [K, kv, hd_v].
            merged: Attention of these queries over all their keys, also those outside of the segments.
            segments: The segments of q and k.
            scale: Factor of the scores.

        Returns:
            The gradients in the shapes of q, k and v.
        """
        head_size, value_size = q.shape[-1], v.shape[-1]
        grad, q, k, v, out = pad_heads_to_one_size(grad, q, k, v, merged.out)
        q_grad, k_grad, v_grad = self.differentiate(grad, q, k, v, Partial(out, merged.lse), segments, scale)
        return q_grad[..., :head_size], k_grad[..., :head_size], v_grad[..., :value_size]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> Tensor:
        """Call torch's operation. Differentiable. All heads have one size."""
        return self._attend(q, k, v, segments, scale, None)

    def attend_with_lse(
        self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Call torch's operation for the output and the log-sum-exp. All heads have one size."""
        return self._attend(q, k, v, segments, scale, AuxRequest(lse=True))

    def differentiate(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, merged: Partial, segments: Segments, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Call torch's backward. All heads have one size."""
        # torch exports no function for this operation, so the registered operation is called directly.
        return torch.ops.torch_attn._varlen_attn_backward(
            grad_out=grad,
            query=q,
            key=k,
            value=v,
            out=merged.out,
            lse=merged.lse.contiguous(),
            cu_seq_q=segments.query_ends,
            cu_seq_k=segments.key_ends,
            max_q=segments.longest_query,
            max_k=segments.longest_key,
            is_causal=segments.window == (-1, 0),
            rng_state=torch.zeros(2, dtype=torch.uint64, device=q.device),  # no dropout
            scale=scale,
            window_size=list(segments.window),
        )

    def _attend(self, q, k, v, segments, scale, aux):
        # From torch 2.15 on, varlen_attn may choose cuDNN. `differentiate` calls the backward of flash attention, so
        # the forward must be flash attention, too.
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return varlen_attn(
                q,
                k,
                v,
                segments.query_ends,
                segments.key_ends,
                segments.longest_query,
                segments.longest_key,
                return_aux=aux,
                scale=scale,
                window_size=segments.window,
                **_GROUPED_HEADS,
            )


# Slices of keys that a call reads one by one. More are read by an index. For example, 2,000 slices of 10 tokens of 256
# numbers take 10 ms to copy and 7 ms to add to on a CPU, and 1 ms each by an index.
MAX_SLICES = 32

_CPU_SPAN = 64  # queries that share one range of keys where only some of these keys are visible


class _CpuCall(NamedTuple):
    """A call of torch's CPU kernel: some queries of a segment over some of its keys.

    Attributes:
        queries: Slice of the flat queries.
        keys: Slice of the flat keys.
        is_causal: Whether query i sees keys 0 to i. There are as many keys as queries then.
        window: Number of keys that a query sees, its own included. The last query's own key is the last key. None: no
            window.
        is_first: Whether no earlier call has these queries.
    """

    queries: slice
    keys: slice
    is_causal: bool = False
    window: int | None = None
    is_first: bool = True


class FlashOnCpu(Flash):
    """`Flash` by torch's CPU kernel of one sequence, segment by segment.

    The CPU kernel computes blocks of up to 512 keys, also where a causal mask hides most of them. So a causal segment
    is halved until its parts have at most `_CPU_SPAN` queries. For example, 256 queries:

        causal    64 queries over 64 keys, 4 times
        full      64 queries over the 64 keys before, 2 times, and 128 queries over 128 keys

    Nothing is computed in vain but half of each causal part, and there is no mask. The results of a query's calls are
    merged by their log-sum-exp. Under a window, spans of `_CPU_SPAN` queries have a mask over the keys that they see.
    """

    def attend(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> Tensor:
        """Override `Flash.attend`."""
        return self._attend_as_block(q, k, v, segments, scale, None)

    def attend_with_lse(
        self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Override `Flash.attend_with_lse`."""
        wide = torch.promote_types(q.dtype, torch.float32)
        out = torch.empty_like(q, dtype=wide)
        lse = torch.empty(q.shape[1], len(q), dtype=wide, device=q.device)
        for call in _cpu_calls(segments):
            part_out, part_lse = cpu_flash_forward(
                _one_row(q[call.queries]),
                _one_row(k[call.keys]),
                _one_row(v[call.keys]),
                is_causal=call.is_causal,
                attn_mask=_window_bias(call, q),
                scale=scale,
            )
            part = Partial(part_out[0].to(wide), part_lse[0].to(wide))  # [H, q, hd], [H, q]
            if not call.is_first:
                before = Partial(out[call.queries].transpose(0, 1), lse[:, call.queries])
                part = merge_by_log_sum_exp(before, part)
            out[call.queries] = part.out.transpose(0, 1)
            lse[:, call.queries] = part.lse
        return out, lse

    def differentiate(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, merged: Partial, segments: Segments, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Override `Flash.differentiate`. The gradients are in max(float32, the dtype)."""
        wide = merged.lse.dtype
        q_grad = torch.zeros_like(q, dtype=wide)
        k_grad, v_grad = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
        for call in _cpu_calls(segments):
            gradients = cpu_flash_backward(
                _one_row(grad[call.queries]),
                _one_row(q[call.queries]),
                _one_row(k[call.keys]),
                _one_row(v[call.keys]),
                _one_row(merged.out[call.queries]),
                merged.lse[None, :, call.queries],
                dropout_p=0.0,
                is_causal=call.is_causal,
                attn_mask=_window_bias(call, q),
                scale=scale,
            )
            q_part, k_part, v_part = (gradient[0].transpose(0, 1) for gradient in gradients)
            q_grad[call.queries] += q_part
            k_grad[call.keys] += k_part
            v_grad[call.keys] += v_part
        return q_grad, k_grad, v_grad


def _cpu_calls(segments: Segments) -> Iterator[_CpuCall]:
    """Yield the calls of torch's CPU kernel for all segments.

    Raises:
        ValueError: If the window is not causal, nor open on both sides.
    """
    left, right = segments.window
    if right != 0 and segments.window != (-1, -1):
        raise ValueError(f"the CPU kernel has no window of {segments.window}. Use (-1, -1), or 0 on the right.")
    query_stop = key_stop = 0
    for num_queries, num_keys in zip(segments.query_lengths, segments.key_lengths, strict=True):
        query_start, key_start = query_stop, key_stop
        query_stop, key_stop = query_start + num_queries, key_start + num_keys
        queries, keys = slice(query_start, query_stop), slice(key_start, key_stop)
        if right != 0:
            yield _CpuCall(queries, keys)
        elif left >= 0:
            yield from _window_calls(queries, keys, left + 1)
        else:
            first_own_key = key_stop - num_queries
            yield from _causal_calls(queries, slice(first_own_key, key_stop))
            if first_own_key > key_start:
                yield _CpuCall(queries, slice(key_start, first_own_key), is_first=False)


def _causal_calls(queries: slice, keys: slice) -> Iterator[_CpuCall]:
    """Yield the calls of causal attention of as many queries as keys: both halves, and the second over the first."""
    num_queries = queries.stop - queries.start
    if num_queries <= _CPU_SPAN:
        yield _CpuCall(queries, keys, is_causal=True)
        return
    # A multiple of the span, so that all parts but the last have its length.
    half = -(-num_queries // (2 * _CPU_SPAN)) * _CPU_SPAN
    first_queries = slice(queries.start, queries.start + half)
    second_queries = slice(queries.start + half, queries.stop)
    first_keys = slice(keys.start, keys.start + half)
    second_keys = slice(keys.start + half, keys.stop)
    yield from _causal_calls(first_queries, first_keys)
    yield from _causal_calls(second_queries, second_keys)
    yield _CpuCall(second_queries, first_keys, is_first=False)


def _window_calls(queries: slice, keys: slice, window: int) -> Iterator[_CpuCall]:
    """Yield the calls of causal attention under a window, in spans of queries over the keys that these see."""
    shift = keys.stop - queries.stop  # the own key of a query has its index plus `shift`
    for start in range(queries.start, queries.stop, _CPU_SPAN):
        stop = min(start + _CPU_SPAN, queries.stop)
        first_key = max(keys.start, start + shift - window + 1)
        yield _CpuCall(slice(start, stop), slice(first_key, stop + shift), window=window)


def _window_bias(call: _CpuCall, q: Tensor) -> Tensor | None:
    """Return the additive mask of a call under a window, [1, 1, q, k]. None without a window."""
    if call.window is None:
        return None
    num_queries, num_keys = call.queries.stop - call.queries.start, call.keys.stop - call.keys.start
    own_keys = torch.arange(num_keys - num_queries, num_keys, device=q.device)
    distance = own_keys[:, None] - torch.arange(num_keys, device=q.device)
    visible = (distance >= 0) & (distance < call.window)
    return additive(visible[None, None], q.dtype)


def _one_row(tokens: Tensor) -> Tensor:
    """Return flat tokens as the CPU kernel reads a row, [n, heads, hd] -> [1, heads, n, hd]."""
    return tokens.transpose(0, 1)[None]


@dataclass(frozen=True)
class VarlenBlocks:
    """`BlockAttention` by variable-length calls.

    A step is a list of calls. The first call of the first step has all queries.

    q is [T, H, hd], k [K, kv, hd], v [K, kv, hd_v], the output [T, H, hd_v] and its log-sum-exp [H, T].
    """

    flash: Flash
    scale: float

    def forward(self, q: Tensor, k: Tensor, v: Tensor, step: list[Segments], so_far: Partial | None) -> Partial:
        """Override `BlockAttention.forward`."""
        for call in step:
            call_q, call_k, call_v = pick(q, call.queries), call.pick_keys(k), call.pick_keys(v)
            part = self.flash.forward(call_q, call_k, call_v, call, self.scale)
            if so_far is None:
                # The first call has every query in order, so its output is the first partial result. It is copied,
                # because the merges below write into it, and activation checkpointing may keep the kernel's own output.
                wide = torch.promote_types(q.dtype, torch.float32)
                so_far = Partial(part.out.to(wide, copy=True), part.lse.clone())
                continue
            # The other calls have some of the queries only. Merge their results into the rows of these queries.
            start = 0
            for rows in call.queries:
                part_rows = slice(start, start + rows.stop - rows.start)  # the same queries in `part`
                start = part_rows.stop
                before = Partial(self.by_head(so_far.out[rows]), so_far.lse[:, rows])
                new = Partial(self.by_head(part.out[part_rows]), part.lse[:, part_rows])
                merged = merge_by_log_sum_exp(before, new)
                so_far.out[rows] = self.by_head(merged.out)
                so_far.lse[:, rows] = merged.lse
        assert so_far is not None  # the first step is never empty
        return so_far

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, merged: Partial, step: list[Segments], gradients: Gradients
    ) -> None:
        """Override `BlockAttention.backward`."""
        for call in step:
            call_q, call_k, call_v = pick(q, call.queries), call.pick_keys(k), call.pick_keys(v)
            call_merged = Partial(pick(merged.out, call.queries), pick(merged.lse, call.queries, 1))
            q_grad, k_grad, v_grad = self.flash.backward(
                pick(grad, call.queries), call_q, call_k, call_v, call_merged, call, self.scale
            )
            add_to_slices(gradients.q, call.queries, q_grad)
            call.add_to_keys(gradients.k, k_grad)
            call.add_to_keys(gradients.v, v_grad)

    def by_head(self, out: Tensor) -> Tensor:
        """Override `BlockAttention.by_head`: [T, H, hd_v] <-> [H, T, hd_v]."""
        return out.transpose(0, 1)


def calls_to_device(calls: Iterable[Call], device: torch.device) -> list[Segments]:
    """Copy the lengths of calls to `device` as cu_seqlens, in one copy for which the host does not wait.

    A call with many slices of keys needs a second copy, with the indices of these keys.

    Example:
        >>> call = Call(window=(-1, 0), query_lengths=[3, 2], key_lengths=[5, 2])
        >>> (segments,) = calls_to_device([call], torch.device("cpu"))
        >>> segments.query_ends.tolist(), segments.key_ends.tolist()
        ([0, 3, 5], [0, 5, 7])
    """
    calls = list(calls)
    cu_seqlens: list[list[int]] = []  # the queries of the first call, its keys, the queries of the second call, ...
    for call in calls:
        cu_seqlens.append(list(accumulate(call.query_lengths, initial=0)))
        cu_seqlens.append(list(accumulate(call.key_lengths, initial=0)))
    flat = list(chain.from_iterable(cu_seqlens))
    host = torch.tensor(flat, dtype=torch.int32, pin_memory=device.type == "cuda", device="cpu")
    on_device = host.to(device, non_blocking=True).split([len(values) for values in cu_seqlens])
    segments = []
    for call, query_ends, key_ends in zip(calls, on_device[0::2], on_device[1::2], strict=True):
        # At least 2, because the kernel uses another code path, which has errors, for a longest segment of one query.
        longest_query = max(2, *call.query_lengths)
        longest_key = max(2, *call.key_lengths)
        if call.window[1] < 0:
            # With a limit on the left only, the kernel replaces the open right side by `max_k`. The first of n queries
            # is n - 1 keys before the last key, so `max_k` must not be less than the queries of a segment.
            longest_key = max(longest_key, *call.query_lengths)
        segments.append(
            Segments(
                queries=tuple(call.queries),
                keys=tuple(call.keys),
                query_ends=query_ends,
                key_ends=key_ends,
                longest_query=longest_query,
                longest_key=longest_key,
                window=call.window,
                query_lengths=tuple(call.query_lengths),
                key_lengths=tuple(call.key_lengths),
                key_index=_key_index(call, device),
            )
        )
    return segments


def _key_index(call: Call, device: torch.device) -> Tensor | None:
    """Return the indices of a call's keys on the device, int64. None if the call has few slices."""
    if len(call.keys) <= MAX_SLICES:
        return None
    host = torch.cat([torch.arange(keys.start, keys.stop, device="cpu") for keys in call.keys])
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)


def pick(tensor: Tensor, slices: Sequence[slice], dim: int = 0) -> Tensor:
    """Concatenate slices of a tensor along a dimension. A single slice is returned as a view.

    Example:
        >>> pick(torch.arange(6), [slice(0, 2), slice(4, 6)])
        tensor([0, 1, 4, 5])
    """
    parts = [tensor.narrow(dim, rows.start, rows.stop - rows.start) for rows in slices]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def add_to_slices(target: Tensor, slices: Sequence[slice], values: Tensor) -> None:
    """Add values to slices of a tensor in place: the reverse of `pick`.

    Args:
        target: [N, ..].
        slices: Slices of the first dimension, n rows in total.
        values: [n, ..], for the slices one after another.
    """
    sizes = [rows.stop - rows.start for rows in slices]
    for rows, values_of_rows in zip(slices, values.split(sizes), strict=True):
        target[rows] += values_of_rows
