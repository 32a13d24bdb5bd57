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
variable-length calls instead of masks.

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

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from dtrain.attention.blocks import BlockByBlock, MaskedBlocks, blocks_for, pad_heads_to_one_size
from dtrain.attention.packing import Packing
from dtrain.attention.visibility import Visibility, additive
from dtrain.base.batch import Batch, pad_stream
from dtrain.base.torch_functions import has_values
from dtrain.parallel.context.batch import join_sequence, shard_sequence

if TYPE_CHECKING:
    from dtrain.attention.packing import Call
    from dtrain.attention.segments import Flash, Steps


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

    def keys(
        self, positions: Tensor, documents: Tensor | None, packing: "Packing | None" = None
    ) -> tuple[Tensor, Tensor | None] | None:
        """Return the positions and documents of all keys. Called once per forward.

        Args:
            positions: Positions of this rank's tokens, [B or 1, S/cp].
            documents: Documents of this rank's tokens, [B, S/cp]. None: each row is one document.
            packing: The documents of the full rows, if the host knows them.

        Returns:
            Positions [B or 1, S] and documents [B, S]. None if the kernel computes from the packing and needs no
            tensors.
        """
        return positions, documents

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
        return self.over(q, *self.begin_gather(k, v, prepared)(), prepared, scale, sinks)

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

    def calls(self, packing: "Packing", window: int | None) -> "list[list[Call]]":
        """Return the variable-length calls for packed rows, a list for each exchange of keys."""
        return [packing.of_rows(window)]

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
        ((segments,),) = steps
        shape = q.shape[:2]
        q, k, v = (part.flatten(0, 1) for part in (q, k, v))  # [B · S, heads, hd or hd_v]
        return flash(q, k, v, segments, scale, sinks).unflatten(0, shape)


class Span(NamedTuple):
    """A call of scaled_dot_product_attention: consecutive queries, a slice with all keys that they see, and the mask.

    For example, queries 64 to 127 of a causal row with a window of 16: keys 49 to 127.

    Attributes:
        queries: The queries.
        keys: The keys.
        bias: Additive mask, [B or 1, 1, q, k]. None if the mask is `causal` or `hidden`.
        causal: Whether the mask is causal by index.
        hidden: The mask as a `Visibility`, from which every layer computes the bias of this span. The biases of all
            spans together would be a mask of queries × keys. None if there is a bias, or the mask is causal.
        groups: Whether the kernel accepts fewer key heads than query heads. If not, key heads are repeated.
    """

    queries: slice
    keys: slice
    bias: Tensor | None
    causal: bool
    hidden: Visibility | None = None
    groups: bool = True

    def of(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
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
        everything = slice(0, visibility.queries), slice(0, visibility.keys)
        size = 64 if visibility.keys < 1024 else 128
        if device.type != "cpu":
            if dtype == torch.float64:
                return [Span(*everything, None, False, visibility)]
            if visibility.is_causal:
                return [Span(*everything, None, True, groups=dtype in HALF and _has_flash(device))]
            if len(runs := visibility.runs()) > 1:
                reach = (visibility.reach(run) for run in runs)
                # The memory-efficient kernel reads the mask in pieces of 16 bytes, at addresses that are multiples of
                # 16. So each slice of keys starts at a multiple of 16.
                whole = (slice(keys.start // 16 * 16, keys.stop) for keys in reach)
                return [Span(run, keys, None, False, visibility, False) for run, keys in zip(runs, whole, strict=True)]
            return [Span(*everything, visibility.bias(everything[0], dtype, device), False, groups=False)]
        if visibility.queries <= size:
            if visibility.is_causal:
                return [Span(*everything, None, True)]
            return [Span(*everything, visibility.bias(everything[0], dtype, device), False)]
        runs = [slice(start, min(start + size, visibility.queries)) for start in range(0, visibility.queries, size)]
        if visibility.is_plain:
            return _plain_blocks(visibility, runs, dtype, device)
        return [self._seen_block(visibility, run, dtype, device) for run in runs]

    def _seen_block(self, visibility: Visibility, run: slice, dtype: torch.dtype, device: torch.device) -> Span:
        """Return the span of a slice of queries, with the keys that they see in some row."""
        visible = visibility.visible(run, device)  # [B, q, K]
        keys = self.seen_keys(visible, visibility, run)
        return Span(run, keys, additive(visible[:, :, keys], dtype)[:, None], False)

    def seen_keys(self, visible: Tensor, visibility: Visibility, run: slice) -> slice:
        """Return the smallest slice that contains the visible keys. Used on CPUs only, because the host reads the mask.

        Args:
            visible: The mask of the slice of queries, [B, q, K] bool.
            visibility: The mask of all queries.
            run: The slice of queries.
        """
        if not has_values(visible):
            return slice(0, visibility.keys)
        seen = visible.any(0).any(0).nonzero()
        return slice(int(seen[0]), int(seen[-1]) + 1)

    def over(
        self, q: Tensor, k: Tensor, v: Tensor, prepared: list[Span], scale: float, sinks: Tensor | None = None
    ) -> Tensor:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # [B, heads, length, hd]
        if (hidden := prepared[0].hidden) is not None and (q.dtype == torch.float64 or sinks is not None):
            return self._block(q, k, v, hidden, scale, sinks)
        if sinks is not None:
            causal = Visibility(q.shape[2], q.shape[2])  # by index: a span of all queries
            parts = [
                self._block(*span.of(q, k, v), causal if span.bias is None else span.bias, scale, sinks)
                for span in prepared
            ]
            return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        if q.shape[1] != k.shape[1] and not prepared[0].groups:
            k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], 1) for part in (k, v))
        outputs = [output.transpose(1, 2) for output in self._outputs(q, k, v, prepared, scale)]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def _block(
        self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | Visibility, scale: float, sinks: Tensor | None
    ) -> Tensor:
        """Compute attention with `MaskedBlocks`, from q, k, v [B, heads, length, hd or hd_v] to [B, Q, H, hd_v]."""
        attention = MaskedBlocks(blocks_for(q.device), scale)
        return BlockByBlock.apply(q, k, v, [hidden], None, attention, sinks).transpose(1, 2)

    def _outputs(self, q: Tensor, k: Tensor, v: Tensor, prepared: list[Span], scale: float) -> Iterator[Tensor]:
        gqa = q.shape[1] != k.shape[1]
        for block in prepared:
            attend = partial(_attend, block, scale=scale, gqa=gqa)
            if block.hidden is None:
                yield attend(*block.of(q, k, v))
            else:
                yield checkpoint(
                    attend, *block.of(q, k, v), use_reentrant=False, preserve_rng_state=False, determinism_check="none"
                )


def _has_flash(device: torch.device) -> bool:
    """Check for a CUDA device with torch's flash kernel. A planned device that is not present counts as one."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device) >= (8, 0)


def _attend(block: Span, q: Tensor, k: Tensor, v: Tensor, scale: float, gqa: bool) -> Tensor:
    """Compute attention of a span, [B, H, q, hd_v].

    Args:
        block: The span.
        q: Its queries, [B, H, q, hd].
        k: Its keys, [B, H or kv, k, hd].
        v: Its values, [B, H or kv, k, hd_v].
        scale: Factor of the scores.
        gqa: Whether there are fewer key heads than query heads.
    """
    bias = block.bias
    value_size = v.shape[-1]
    if block.hidden is not None:
        # The memory-efficient kernel requires a mask whose address is a multiple of 16 bytes.
        bias = block.hidden.bias(block.queries, q.dtype, q.device)[..., block.keys].contiguous()
    if bias is None or q.device.type == "cpu":
        # If q and v have different head sizes, torch uses its composition, which stores all scores. Only the GPU's
        # memory-efficient kernel supports two sizes, and torch uses it if there is a mask.
        q, k, v = pad_heads_to_one_size(q, k, v)
    out = scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=block.causal, scale=scale, enable_gqa=gqa)
    return out if out.shape[-1] == value_size else out[..., :value_size]


def _plain_blocks(visibility: Visibility, runs: list[slice], dtype: torch.dtype, device: torch.device) -> list[Span]:
    """Return the spans of a mask that is causal by index, with an optional window.

    The mask depends only on the distance of query and key, so all spans use slices of one bias, that of the last span.
    """
    size, keys = runs[0].stop, visibility.keys
    last = Visibility(keys, keys, visibility.window).visible(slice(keys - size, keys), device)  # [1, size, K]
    bias = additive(last, dtype)[:, None]
    blocks = []
    for run in runs:
        reach = visibility.reach(run)
        count, seen = run.stop - run.start, reach.stop - reach.start
        blocks.append(Span(run, reach, bias[:, :, size - count :, keys - seen :], False))
    return blocks


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
        self._parts: list[Tensor] = []

    def take_rows(self, batch: Batch) -> None:
        """Store the first row of the micro-batch, divided over the cp ranks."""
        length = batch["input_ids"].shape[1]
        multiple = 2 * self._size if self._size > 1 else 1
        padded = -(-length // multiple) * multiple
        names = [name for name in ("position_ids", "seq_ids", "image_ends") if name in batch]
        row = torch.stack([pad_stream(name, batch[name][0], padded) for name in names])  # [2 or 3, S]
        self._parts = [row]
        if self._size > 1:
            self._parts = [shard_sequence(row, rank, self._size) for rank in range(self._size)]

    def seen_keys(self, visible: Tensor, visibility: Visibility, run: slice) -> slice:
        """Override `SdpaKernel.seen_keys`. The mask `visible` [B, q, K] has no values and is not read."""
        missing = visibility.queries - self._parts[0].shape[1]
        pads = torch.tensor([[2**30], [-1], [2**30]])[: len(self._parts[0])]
        parts = [torch.cat([part, pads.expand(-1, missing)], 1) for part in self._parts]
        own, keys = parts[self._rank], join_sequence(parts)
        row = replace(visibility, query_positions=own[:1], key_positions=keys[:1])
        if row.query_documents is not None:
            row = replace(row, query_documents=own[1:2], key_documents=keys[1:2])
        if row.query_ends is not None:
            row = replace(row, query_ends=own[2:])
        return super().seen_keys(row.visible(run, torch.device("cpu")), row, run)


class GroupedKernel(Kernel):
    """Kernel that calls another kernel for one key head at a time, to save memory.

    With n key heads, a gathering kernel sends n messages of 1/n of the size instead of one. Its backward gathers the
    keys again.

    Args:
        inner: The kernel to call.
    """

    def __init__(self, inner: Kernel):
        self.inner, self.note, self.group = inner, inner.note, inner.group
        self.name = f"{inner.name} by groups of heads"
        self.is_context_parallel, self.takes_packing = inner.is_context_parallel, inner.takes_packing

    def keys(
        self, positions: Tensor, documents: Tensor | None, packing: Packing | None = None
    ) -> tuple[Tensor, Tensor | None] | None:
        """Return the keys of `inner`."""
        return self.inner.keys(positions, documents, packing)

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
        return _by_group(partial(self.inner.over, prepared=prepared, scale=scale), q, k, v, sinks)


def _by_group(attend: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
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
