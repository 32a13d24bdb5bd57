"""Kernels that compute attention under a `Visibility`.

A kernel turns a `Visibility` into its own form once per forward (`prepare`), and is then called by every layer of that
kind with q [B, Q, H, hd], k [B, K, kv, hd], v [B, K, kv, hd_v], and sinks [H] if the heads have some (`blocks`). H is a
multiple of kv, and both count this rank's heads. The head size of v may differ from that of q and k. The output is
[B, Q, H, hd_v] in q's dtype. The softmax is computed in max(float32, that dtype).

    a layer's q, k, v
        begin_gather(k, v)    the keys of other ranks, if the kernel gathers them; q is projected in the meantime
        over(q, k, v)         attention over these keys

Three kernels differ in how they obtain the keys: `SdpaKernel` has full rows, `context.GatherKernel` gathers the keys of
all ranks, and `context.RingKernel` passes them from rank to rank. Each of them computes attention under masks.
`varlen.VarlenKernel` contains one of the three. It obtains the keys from this kernel, and computes packed rows by
variable-length calls instead of masks. `varlen.TreeKernel` does so only for rows in which sequences share their
beginning. It is the kernel of CPUs.

`SdpaByRow` is for the meta tensors of `dtrain plan`, and makes calls of the same sizes as `SdpaKernel` on a CPU. There
`SdpaKernel` reads the mask to find the keys that a span of queries sees, and computes these keys only. Meta tensors
have no values to read, so `SdpaByRow` finds the keys from the first row of the micro-batch, which is on the host. The
other rows must have the same documents.

`GroupedKernel` calls any of these kernels for one group of heads at a time, to reduce the memory of gathered and copied
keys. A group is a key head with its query heads. For example, 8 query heads and 2 key heads: first query heads 0 to 3
with key head 0, then query heads 4 to 7 with key head 1. Gathered keys of one head at a time take half the memory.

Gathered keys are not saved for the backward, which gathers them again and computes the attention again. Kernels that do
not gather (a ring, or full rows) compute nothing again.

Reference:
    UPipe, arXiv:2602.21196.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from dtrain.attention.blocks import BlockByBlock, MaskedBlocks, blocks_for, pad_heads_to_one_size
from dtrain.attention.packing import Packing
from dtrain.attention.visibility import BlockMask, MaskStreams, Visibility, additive
from dtrain.base.batch import Batch, pad_stream
from dtrain.base.torch_functions import has_values
from dtrain.parallel.context.batch import join_sequence, shard_sequence

if TYPE_CHECKING:
    from dtrain.attention.context import Ring
    from dtrain.attention.packing import Call
    from dtrain.attention.segments import Flash, Steps
    from dtrain.attention.tree import TreePacking


Gathering = Callable[[], tuple[Tensor, Tensor]]  # waits for keys and values that are being gathered, and returns them
HALF = (torch.bfloat16, torch.float16)


class Kernel:
    """Interface of a kernel that computes attention of queries over keys and values.

    Attributes:
        name: The name that the summary of a run prints.
        note: Why this kernel was chosen although another was requested, or "".
        exchange: Suffix of the name of a kernel that contains this one, such as " ring".
        group: The cp group, whose ranks have the rows in the head-tail layout. None without context parallel.
        takes_packing: Whether the kernel computes from a `Packing` if one is given.
        is_context_parallel: Whether the kernel computes over the keys of all cp ranks.
        gathers: Whether `begin_gather` gathers the keys of other ranks.
    """

    name: str
    note = ""
    exchange = ""
    group: Any = None
    takes_packing = False
    is_context_parallel = False
    gathers = False

    def keys(self, local: MaskStreams, packing: "Packing | TreePacking | None" = None) -> MaskStreams | None:
        """Return the positions and documents of all keys, in natural order. Called once per forward.

        Args:
            local: Positions and documents of this rank's tokens, [B, S/cp] each.
            packing: The documents of the full rows, if the host knows them.

        Returns:
            Those of all keys, [B, S] each. None if the kernel computes from the packing and needs no tensors.
        """
        return local

    def computes_from(self, packing: "Packing | TreePacking", window: int | None) -> bool:
        """Check whether `prepare` needs only the packing of rows, and no positions and documents.

        Args:
            packing: The packing of the full rows.
            window: Number of keys that a query sees, its own included. None: no window.
        """
        return False

    def take_rows(self, batch: Batch) -> None:
        """Accept the rows of the next forward, on the host, [B, S] each. Only `SdpaByRow` needs them."""

    def prepare(self, visibility: Visibility, dtype: torch.dtype, device: torch.device) -> Any:
        """Convert a visibility to the form that this kernel's `over` reads, for all layers of a kind.

        Args:
            visibility: The mask of this rank's queries over all keys.
            dtype: Dtype of the queries.
            device: Device of the queries.
        """
        raise NotImplementedError

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, prepared: Any, scale: float, sinks: Tensor | None = None
    ) -> Tensor:
        """Compute attention of a layer: `begin_gather`, then `over`.

        Args:
            q: [B, Q, H, hd].
            k: This rank's keys, [B, K, kv, hd].
            v: This rank's values, [B, K, kv, hd_v].
            prepared: The result of `prepare`.
            scale: Factor of the scores.
            sinks: [H], or None.

        Returns:
            [B, Q, H, hd_v] in q's dtype.
        """
        wait_for_keys = self.begin_gather(k, v, prepared)
        k, v = wait_for_keys()
        return self.over(q, k, v, prepared, scale, sinks)

    def begin_gather(self, k: Tensor, v: Tensor, prepared: Any) -> Gathering:
        """Begin to gather the keys and values that `over` reads. Several layers may read the same ones.

        Args:
            k: This rank's keys, [B, K, kv, hd].
            v: This rank's values, [B, K, kv, hd_v].
            prepared: The result of `prepare`.

        Returns:
            A function that waits for the keys and values and returns them. A kernel that gathers nothing returns k and
            v unchanged.
        """
        return lambda: (k, v)

    def over(self, q: Tensor, k: Tensor, v: Tensor, prepared: Any, scale: float, sinks: Tensor | None = None) -> Tensor:
        """Compute attention of q over the keys and values that `begin_gather` has returned, [B, Q, H, hd_v]."""
        raise NotImplementedError

    def has_calls(self, packing: "Packing | TreePacking", window: int | None) -> bool:
        """Check whether variable-length calls can compute rows with this packing."""
        return True

    def calls(self, packing: "Packing | TreePacking", window: int | None) -> "list[list[Call]]":
        """Return the variable-length calls for packed rows, a list for each exchange of keys."""
        return [packing.of_rows(window)]

    def ring(self) -> "Ring | None":
        """Return the ring in which keys are passed on. None if `begin_gather` returns all keys."""
        return None

    def over_segments(
        self, flash: "Flash", q: Tensor, k: Tensor, v: Tensor, steps: "Steps", scale: float, sinks: Tensor | None
    ) -> Tensor:
        """Compute attention as `over` does, but by variable-length calls.

        Args:
            flash: Implementation of variable-length attention.
            q: [B, S, H, hd], without the padding of sequence parallel, which the packing does not count.
            k: [B, S, kv, hd], as `begin_gather` returns them.
            v: [B, S, kv, hd_v].
            steps: The calls of `calls` on the device, for each exchange of keys.
            scale: Factor of the scores.
            sinks: [H], or None.

        Returns:
            [B, S, H, hd_v].
        """
        ((segments,),) = steps  # one exchange with one call, because this rank has full rows
        rows_and_length = q.shape[:2]
        flat_q, flat_k, flat_v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)  # [B · S, heads, hd or hd_v]
        return flash(flat_q, flat_k, flat_v, segments, scale, sinks).unflatten(0, rows_and_length)


class Span(NamedTuple):
    """A call of scaled_dot_product_attention: consecutive queries, a slice with all keys that they see, and the mask.

    For example, queries 64 to 127 of a causal row with a window of 16: keys 49 to 127.

    Exactly one of `bias`, `is_causal` and `visibility` defines the mask.

    Attributes:
        queries: The queries.
        keys: The keys.
        bias: Additive mask, [B or 1, 1, q, k]. None if another attribute defines the mask.
        is_causal: Whether the mask is causal by index.
        visibility: The mask of all queries, from which every layer computes the bias of this span. The biases of all
            spans together would be a mask of queries × keys. None if another attribute defines the mask.
        supports_gqa: Whether the kernel accepts fewer key heads than query heads. If not, key heads are repeated.
    """

    queries: slice
    keys: slice
    bias: Tensor | None = None
    is_causal: bool = False
    visibility: Visibility | None = None
    supports_gqa: bool = True

    def select(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the queries, keys and values of the span, given all of them [B, heads, length, hd or hd_v]."""
        return q[:, :, self.queries], k[:, :, self.keys], v[:, :, self.keys]


class SdpaKernel(Kernel):
    """torch's scaled_dot_product_attention, on every device.

    On a GPU:

    - A mask that is only causal uses torch's causal kernel.
    - Other masks are additive. If the mask takes at most `MASK_BYTES`, there is one call. Otherwise there is one call
      per span of queries, whose mask is computed in every layer, and again in the backward.
    - In float64 there is no fused kernel, so `MaskedBlocks` computes matrix products of some queries at a time.
    - Key heads are repeated for their query heads, unless torch uses its flash kernel. The memory-efficient kernel does
      not support groups of heads, and torch would use its composition, which stores all scores.

    On a CPU there is one call per span of queries, over only the keys that these queries see. With one call for all
    queries, torch's CPU kernel would also compute masked scores, in blocks of up to 512 keys. That would waste a third
    of the time at 512 tokens, and most of the time in rows that are packed with short documents.

    Sinks need the log-sum-exp, which torch's function does not return, so heads with sinks use `MaskedBlocks`.
    """

    name = "sdpa"

    def __init__(self, note: str = ""):
        self.note = note

    def prepare(self, visibility: Visibility, dtype: torch.dtype, device: torch.device) -> list[Span]:
        if device.type == "cpu":
            return self._spans_on_cpu(visibility, dtype, device)
        return _spans_on_gpu(visibility, dtype, device)

    def _spans_on_cpu(self, visibility: Visibility, dtype: torch.dtype, device: torch.device) -> list[Span]:
        """Divide the queries into spans of 64 or 128, each with only the keys that its queries see."""
        span_length = 64 if visibility.keys < 1024 else 128
        if visibility.queries <= span_length:
            return [_span_of_all(visibility, dtype, device)]
        runs = []
        for start in range(0, visibility.queries, span_length):
            runs.append(slice(start, min(start + span_length, visibility.queries)))
        if visibility.is_by_index:
            return _spans_by_index(visibility, runs, dtype, device)
        return [self._span_of_visible_keys(visibility, run, dtype, device) for run in runs]

    def _span_of_visible_keys(
        self, visibility: Visibility, run: slice, dtype: torch.dtype, device: torch.device
    ) -> Span:
        """Return the span of a slice of queries, with the keys that they see in some row."""
        visible = visibility.visible(run, device)  # [B, q, K]
        keys = self.visible_keys(visible, visibility, run)
        bias = additive(visible[:, :, keys], dtype)[:, None]
        return Span(run, keys, bias)

    def visible_keys(self, visible: Tensor, visibility: Visibility, run: slice) -> slice:
        """Return the smallest slice that contains the visible keys. Used on CPUs only, because the host reads the mask.

        Args:
            visible: The mask of the slice of queries, [B, q, K] bool.
            visibility: The mask of all queries.
            run: The slice of queries.
        """
        if not has_values(visible):
            return slice(0, visibility.keys)
        is_visible_to_any = visible.any(0).any(0)  # [K]
        indices = is_visible_to_any.nonzero()
        return slice(int(indices[0]), int(indices[-1]) + 1)

    def over(
        self, q: Tensor, k: Tensor, v: Tensor, prepared: list[Span], scale: float, sinks: Tensor | None = None
    ) -> Tensor:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # [B, heads, length, hd]
        visibility = prepared[0].visibility
        if visibility is not None and (q.dtype == torch.float64 or sinks is not None):
            # `MaskedBlocks` divides the queries itself, so the spans are not needed.
            return self._attend_by_blocks(q, k, v, visibility, scale, sinks)
        if sinks is not None:
            outputs = self._attend_with_sinks(q, k, v, prepared, scale, sinks)
        else:
            outputs = self._attend_by_spans(q, k, v, prepared, scale)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def _attend_by_blocks(
        self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float, sinks: Tensor | None
    ) -> Tensor:
        """Compute attention with `MaskedBlocks`, from q, k, v [B, heads, length, hd or hd_v] to [B, Q, H, hd_v]."""
        attention = MaskedBlocks(blocks_for(q.device), scale)
        return BlockByBlock.apply(q, k, v, [mask], None, attention, sinks).transpose(1, 2)

    def _attend_with_sinks(
        self, q: Tensor, k: Tensor, v: Tensor, spans: list[Span], scale: float, sinks: Tensor
    ) -> list[Tensor]:
        """Compute attention of each span with sinks, [B, q, H, hd_v] each."""
        outputs = []
        for span in spans:
            mask: BlockMask
            if span.bias is not None:
                mask = span.bias
            else:  # causal by index: the only span, with all queries
                mask = Visibility(q.shape[2], q.shape[2])
            outputs.append(self._attend_by_blocks(*span.select(q, k, v), mask, scale, sinks))
        return outputs

    def _attend_by_spans(self, q: Tensor, k: Tensor, v: Tensor, spans: list[Span], scale: float) -> list[Tensor]:
        """Call torch's function for each span, [B, q, H, hd_v] each."""
        if q.shape[1] != k.shape[1] and not spans[0].supports_gqa:
            repeats = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        enable_gqa = q.shape[1] != k.shape[1]
        outputs = []
        for span in spans:
            attend = partial(_attend, span, scale=scale, enable_gqa=enable_gqa)
            if span.visibility is None:
                out = attend(*span.select(q, k, v))
            else:
                # Do not save the bias of the span. The backward computes it again.
                out = checkpoint(
                    attend,
                    *span.select(q, k, v),
                    use_reentrant=False,
                    preserve_rng_state=False,
                    determinism_check="none",
                )
            outputs.append(out.transpose(1, 2))
        return outputs


def _span_of_all(
    visibility: Visibility, dtype: torch.dtype, device: torch.device, *, supports_gqa: bool = True
) -> Span:
    """Return one span of all queries and keys, with a bias if the mask is not causal by index."""
    queries, keys = slice(0, visibility.queries), slice(0, visibility.keys)
    if visibility.is_causal:
        return Span(queries, keys, is_causal=True, supports_gqa=supports_gqa)
    return Span(queries, keys, visibility.bias(queries, dtype, device), supports_gqa=supports_gqa)


def _spans_on_gpu(visibility: Visibility, dtype: torch.dtype, device: torch.device) -> list[Span]:
    """Return one span of all queries, or spans whose masks are computed in every layer if the mask would be large."""
    if dtype == torch.float64:
        return [Span(slice(0, visibility.queries), slice(0, visibility.keys), visibility=visibility)]
    if visibility.is_causal:
        uses_flash = dtype in HALF and _has_flash(device)
        return [_span_of_all(visibility, dtype, device, supports_gqa=uses_flash)]
    runs = visibility.runs()
    if len(runs) == 1:
        return [_span_of_all(visibility, dtype, device, supports_gqa=False)]
    spans = []
    for run in runs:
        reach = visibility.reach(run)
        # The memory-efficient kernel reads the mask in parts of 16 bytes, at addresses that are multiples of 16. So
        # each slice of keys starts at a multiple of 16.
        keys = slice(reach.start // 16 * 16, reach.stop)
        spans.append(Span(run, keys, visibility=visibility, supports_gqa=False))
    return spans


def _has_flash(device: torch.device) -> bool:
    """Check for a CUDA device with torch's flash kernel. A planned device that is not present counts as one."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device) >= (8, 0)


def _attend(span: Span, q: Tensor, k: Tensor, v: Tensor, scale: float, enable_gqa: bool) -> Tensor:
    """Compute attention of a span, [B, H, q, hd_v].

    Args:
        span: The span.
        q: Its queries, [B, H, q, hd].
        k: Its keys, [B, H or kv, k, hd].
        v: Its values, [B, H or kv, k, hd_v].
        scale: Factor of the scores.
        enable_gqa: Whether there are fewer key heads than query heads.
    """
    bias = span.bias
    value_size = v.shape[-1]
    if span.visibility is not None:
        # The memory-efficient kernel requires a mask whose address is a multiple of 16 bytes.
        bias = span.visibility.bias(span.queries, q.dtype, q.device)[..., span.keys].contiguous()
    if bias is None or q.device.type == "cpu":
        # If q and v have different head sizes, torch uses its composition, which stores all scores. Only the GPU's
        # memory-efficient kernel supports two sizes, and torch uses it if there is a mask.
        q, k, v = pad_heads_to_one_size(q, k, v)
    out = scaled_dot_product_attention(
        q, k, v, attn_mask=bias, is_causal=span.is_causal, scale=scale, enable_gqa=enable_gqa
    )
    return out if out.shape[-1] == value_size else out[..., :value_size]


def _spans_by_index(visibility: Visibility, runs: list[slice], dtype: torch.dtype, device: torch.device) -> list[Span]:
    """Return the spans of a mask that is causal by index, with an optional window.

    The mask depends only on the distance of query and key, so all spans use slices of one bias, that of the last span.
    """
    span_length, num_keys = runs[0].stop, visibility.keys
    last_queries = slice(num_keys - span_length, num_keys)
    visible = Visibility(num_keys, num_keys, visibility.window).visible(last_queries, device)  # [1, span_length, K]
    bias = additive(visible, dtype)[:, None]
    spans = []
    for run in runs:
        keys = visibility.reach(run)
        first_query = span_length - (run.stop - run.start)
        first_key = num_keys - (keys.stop - keys.start)
        spans.append(Span(run, keys, bias[:, :, first_query:, first_key:]))
    return spans


# The streams that a mask reads, and their values in the padding of sequence parallel.
_MASK_STREAMS = {"position_ids": 2**30, "seq_ids": -1, "last_seq_ids": -1, "image_ends": 2**30}


class SdpaByRow(SdpaKernel):
    """`SdpaKernel` that finds the visible keys from a row on the host.

    The row is padded and divided over the cp ranks in the same way as the rows of the micro-batch.

    Args:
        rank: This rank's number in cp.
        size: Number of cp ranks.
    """

    def __init__(self, rank: int, size: int):
        super().__init__()
        self._rank, self._size = rank, size
        self._row_shards: list[Batch] = []  # streams of the first row, [1, S/cp] each, of each cp rank

    def take_rows(self, batch: Batch) -> None:
        """Store the first row of the micro-batch, divided over the cp ranks."""
        length = batch["input_ids"].shape[1]
        multiple = 2 * self._size if self._size > 1 else 1
        padded_length = -(-length // multiple) * multiple
        row = {}
        for name in _MASK_STREAMS:
            if name in batch:
                row[name] = pad_stream(name, batch[name][0], padded_length)[None]  # [1, S]
        self._row_shards = [row]
        if self._size > 1:
            self._row_shards = []
            for rank in range(self._size):
                shard = {name: shard_sequence(stream, rank, self._size) for name, stream in row.items()}
                self._row_shards.append(shard)

    def visible_keys(self, visible: Tensor, visibility: Visibility, run: slice) -> slice:
        """Override `SdpaKernel.visible_keys`. The mask `visible` [B, q, K] has no values and is not read."""
        queries, keys = {}, {}
        for name in self._row_shards[0]:
            # Sequence parallel may have padded the queries further: with a late position, in the document -1.
            shards = []
            for shard in self._row_shards:
                num_missing = visibility.queries - shard[name].shape[1]
                shards.append(pad(shard[name], (0, num_missing), value=_MASK_STREAMS[name]))
            queries[name] = shards[self._rank]  # [1, Q]
            keys[name] = join_sequence(shards)  # [1, K]
        row = replace(visibility, query_positions=queries["position_ids"], key_positions=keys["position_ids"])
        if row.query_documents is not None:
            row = replace(row, query_documents=queries["seq_ids"], key_documents=keys["seq_ids"])
        if row.key_last_documents is not None:
            row = replace(row, key_last_documents=keys["last_seq_ids"])
        if row.query_ends is not None:
            row = replace(row, query_ends=queries["image_ends"])
        return super().visible_keys(row.visible(run, torch.device("cpu")), row, run)


class GroupedKernel(Kernel):
    """Kernel that calls another kernel for one key head at a time, to save memory.

    With n key heads, a gathering kernel sends n messages of 1/n of the size instead of one. Its backward gathers the
    keys again.

    Args:
        inner: The kernel to call.
    """

    def __init__(self, inner: Kernel):
        self.inner = inner
        self.name = f"{inner.name} by groups of heads"
        self.note = inner.note
        self.group = inner.group
        self.is_context_parallel = inner.is_context_parallel
        self.takes_packing = inner.takes_packing

    def keys(self, local: MaskStreams, packing: "Packing | TreePacking | None" = None) -> MaskStreams | None:
        """Return the keys of `inner`."""
        return self.inner.keys(local, packing)

    def computes_from(self, packing: "Packing | TreePacking", window: int | None) -> bool:
        """Override `Kernel.computes_from` by that of `inner`."""
        return self.inner.computes_from(packing, window)

    def prepare(self, visibility: Visibility, dtype: torch.dtype, device: torch.device) -> Any:
        return self.inner.prepare(visibility, dtype, device)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, prepared: Any, scale: float, sinks: Tensor | None = None
    ) -> Tensor:
        """Override `Kernel.__call__`. If `inner` gathers, the backward gathers and computes each group again."""
        attend = partial(self.inner, prepared=prepared, scale=scale)
        if self.inner.gathers:
            attend = partial(
                checkpoint, attend, use_reentrant=False, preserve_rng_state=False, determinism_check="none"
            )
        return _by_group(attend, q, k, v, sinks)

    def begin_gather(self, k: Tensor, v: Tensor, prepared: Any) -> Gathering:
        """Gather all heads at once, because several layers read them."""
        return self.inner.begin_gather(k, v, prepared)

    def over(self, q: Tensor, k: Tensor, v: Tensor, prepared: Any, scale: float, sinks: Tensor | None = None) -> Tensor:
        attend = partial(self.inner.over, prepared=prepared, scale=scale)
        return _by_group(attend, q, k, v, sinks)


def _by_group(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
    """Call `attend` for each key head with its query heads, and concatenate the outputs to [B, Q, H, hd_v].

    Args:
        attend: Function of the q, k, v and sinks of one group of heads.
        q: [B, Q, H, hd].
        k: [B, K, kv, hd].
        v: [B, K, kv, hd_v].
        sinks: [H], or None.
    """
    num_groups = k.shape[-2]
    queries_per_key = q.shape[2] // num_groups
    sinks_of_groups = [None] * num_groups if sinks is None else sinks.split(queries_per_key)
    groups = zip(q.split(queries_per_key, 2), k.split(1, -2), v.split(1, -2), sinks_of_groups, strict=True)
    outputs = []
    for group_q, group_k, group_v, group_sinks in groups:
        outputs.append(attend(group_q, group_k, group_v, sinks=group_sinks))
    return outputs[0] if num_groups == 1 else torch.cat(outputs, 2)
