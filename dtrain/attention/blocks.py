"""Attention over one block of keys, forward and backward, and the merge of blocks by their log-sum-exp.

k and v are separate tensors everywhere, and the heads of v may have another size than those of q and k (multi-head
latent attention, DeepSeek-V2, arXiv:2405.04434). Letters: B rows, H query heads, kv key heads (H is a multiple of kv),
Q queries, K keys of a block, hd the head size of q and k, hd_v that of v.

    q [B, H, Q, hd]     block 0: k [B, kv, K, hd], v [B, kv, K, hd_v]  -> out, lse
                        block 1: k [B, kv, K, hd], v [B, kv, K, hd_v]  -> out, lse     merge
                        ...                                                            merge
                        the heads' sinks, if the family has some                       merge

`lse` [B, H, Q] is the log-sum-exp of the scores, and `out` [B, H, Q, hd_v] the softmax average of the values. Example:
one query whose scores are 0 and ln 3 for the two keys of block 0, with values 1 and 5, and ln 4 for the one key of
block 1, with value 8:

    block 0    lse = ln(1 + 3) = ln 4    out = (1 * 1 + 3 * 5) / 4 = 4
    block 1    lse = ln 4                out = 8
    merged     lse = ln(4 + 4) = ln 8    out = 4 * 4/8 + 8 * 4/8 = 6 = (1 * 1 + 3 * 5 + 4 * 8) / 8

The backward of a block uses the output and the log-sum-exp of all blocks. Its weights are exp(score - lse), as in the
full softmax, so the gradients of the blocks are simply added. With `grad` the gradient of the merged output, D = grad ·
out and w the weight of a key, the gradient is w · grad by the key's value, and w · (grad · value - D) by its score. In
the example, grad = 1 and D = 6:

    block 0    w = 1/8, 3/8    gradient by the scores: 1/8 * (1 - 6) = -5/8 and 3/8 * (5 - 6) = -3/8
    block 1    w = 4/8         gradient by the score: 4/8 * (8 - 6) = 8/8

A head may have a sink, a learnt score that takes part in the softmax of every query (Xiao et al., arXiv:2309.17453;
gpt-oss). It is one more block, of a single key whose value is zero. The backward of the other blocks needs no change,
because it uses the merged log-sum-exp.

Under a mask a block is computed in one of two ways: by torch's CPU kernel, or by matrix products on every device. The
products have all scores of a call in memory, so `MaskedBlocks` passes them a run of queries at a time. The bias
[B or 1, 1, Q, K] is 0 or -inf. The softmax is computed in max(float32, the dtype). Without a mask,
`segments.VarlenBlocks` computes a block by variable-length flash attention.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from dtrain.attention.visibility import BlockMask
from dtrain.parallel.collectives import flat_views

cpu_flash_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
cpu_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Partial(NamedTuple):
    """Attention over the keys seen so far, in max(float32, the dtype).

    Attributes:
        out: Softmax average of the values, [.., Q, hd_v] or in another layout of the same numbers.
        lse: Log-sum-exp of the scores, [.., Q]. -inf for queries that have seen no key, whose `out` is 0.
    """

    out: Tensor
    lse: Tensor


class Gradients(NamedTuple):
    """Gradients of q, k and v in max(float32, the dtype), to which the backward of each block adds its part."""

    q: Tensor
    k: Tensor
    v: Tensor


def merge_by_log_sum_exp(first: Partial, second: Partial) -> Partial:
    """Merge the attention of the same queries over two sets of keys.

    Each average is weighted by its share of the sum of exponentials. A query that has seen no key in either set gets an
    output of 0 and a log-sum-exp of -inf.

    Args:
        first: Attention over the first set of keys: out [.., Q, hd_v], lse [.., Q].
        second: Attention over the second set, in the same shapes. `out` may be a scalar, as for a sink, whose value is
            0.

    Returns:
        Attention over both sets: out [.., Q, hd_v], lse [.., Q].

    Example:
        One key with score 0 and value 3, and one with score ln 2 and value 6: the shares are 1/3 and 2/3.

        >>> first = Partial(torch.tensor([[3.0]]), torch.tensor([0.0]))
        >>> second = Partial(torch.tensor([[6.0]]), torch.tensor([2.0]).log())
        >>> merged = merge_by_log_sum_exp(first, second)
        >>> merged.out.item(), round(merged.lse.exp().item(), 4)
        (5.0, 3.0)

    Reference:
        FlashAttention, arXiv:2205.14135, section 3.1.
    """
    # e^a / (e^a + e^b) = sigmoid(a - b). If both lse are -inf, the difference is NaN. Both outputs are then 0, and any
    # weights of them give 0, so NaN may be replaced by 0.
    difference = (first.lse - second.lse).nan_to_num(nan=0.0, posinf=float("inf"), neginf=float("-inf"))
    first_weight = difference.sigmoid()
    dtype = first_weight.dtype
    out = torch.lerp(second.out.to(dtype), first.out.to(dtype), first_weight[..., None])
    return Partial(out, torch.logaddexp(first.lse, second.lse))


def merge_with_sinks(merged: Partial, sinks: Tensor) -> Partial:
    """Add one more key to every query: its score is the sink, and its value is 0.

    Args:
        merged: Attention without sinks: out [.., Q, hd_v], lse [.., Q].
        sinks: Scores, in a shape that broadcasts with `merged.lse`.

    Returns:
        Attention with sinks, in the shapes of `merged`.

    Example:
        One key with score 0 and value 4, and a sink of 0: half of the weight is on the sink.

        >>> merged = Partial(torch.tensor([[4.0]]), torch.tensor([0.0]))
        >>> merge_with_sinks(merged, torch.tensor([0.0])).out
        tensor([[2.]])
    """
    sink = Partial(merged.out.new_zeros(()), sinks.to(merged.lse.dtype))
    return merge_by_log_sum_exp(merged, sink)


def pad_heads_to_one_size(*heads: Tensor) -> list[Tensor]:
    """Pad heads with zeros to the largest head size, because flash attention requires a single size.

    Zeros change neither the scores nor the other values of the output.

    Args:
        heads: Tensors [.., hd] or [.., hd_v].

    Returns:
        The tensors, [.., max(hd, hd_v)]. Tensors that already have this size are not copied.
    """
    largest = max(tensor.shape[-1] for tensor in heads)
    padded = []
    for tensor in heads:
        missing = largest - tensor.shape[-1]
        padded.append(F.pad(tensor, (0, missing)) if missing else tensor)
    return padded


class Products:
    """Block attention by matrix products, on every device. All scores [B, H, Q, K] of a call are in memory at once."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Partial:
        """Compute attention over a block.

        Args:
            q: [B, H, Q, hd].
            k: [B, kv, K, hd].
            v: [B, kv, K, hd_v].
            bias: Additive mask, [B or 1, 1, Q, K], 0 or -inf.
            scale: Factor of the scores.

        Returns:
            out [B, H, Q, hd_v] and lse [B, H, Q]. Queries that see no key of the block get 0 and -inf.
        """
        wide = torch.promote_types(q.dtype, torch.float32)
        scores = _scores(q, k, bias, scale, wide)
        lse = torch.logsumexp(scores, -1)
        # The lse of a query without keys is -inf. Subtracting it from scores of -inf would give NaN.
        finite_lse = lse.masked_fill(_sees_no_key(bias), 0.0)
        weights = (scores - finite_lse[..., None]).exp()
        return Partial(torch.matmul(weights, _for_heads(v, q).to(wide)), lse)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, merged: Partial, bias: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the block's part of the gradients of q, k and v, in their dtypes.

        Args:
            grad: Gradient of the merged output, [B, H, Q, hd_v].
            q: [B, H, Q, hd].
            k: [B, kv, K, hd].
            v: [B, kv, K, hd_v].
            merged: Attention over the keys of all blocks: out [B, H, Q, hd_v], which may be in q's dtype, and lse
                [B, H, Q].
            bias: Additive mask, [B or 1, 1, Q, K], 0 or -inf.
            scale: Factor of the scores.

        Returns:
            The gradients in the shapes of q, k and v.
        """
        wide = merged.lse.dtype
        grad, out = grad.to(wide), merged.out.to(wide)
        # The formulas of the module's docstring. D is a sum over the output of all blocks.
        scores = _scores(q, k, bias, scale, wide)  # [B, H, Q, K]
        weights = (scores - merged.lse[..., None]).exp()
        weight_grad = torch.matmul(grad, _for_heads(v, q).to(wide).transpose(-1, -2))
        d = (grad * out).sum(-1, keepdim=True)  # [B, H, Q, 1]
        score_grad = weights * (weight_grad - d) * scale
        q_grad = torch.matmul(score_grad, _for_heads(k, q).to(wide))
        k_grad = torch.matmul(score_grad.transpose(-1, -2), q.to(wide))
        v_grad = torch.matmul(weights.transpose(-1, -2), grad)
        return q_grad.to(q.dtype), _to_key_heads(k_grad, k), _to_key_heads(v_grad, v)


class CpuFlash:
    """Block attention by torch's CPU kernel, which never stores all scores. Same methods as `Products`."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Partial:
        wide = torch.promote_types(q.dtype, torch.float32)
        value_size = v.shape[-1]
        q, k, v = pad_heads_to_one_size(q, k, v)
        out, lse = cpu_flash_forward(q, k, v, attn_mask=bias.to(q.dtype), scale=scale)
        # torch returns an lse of 0 for a row without keys.
        lse = lse.to(wide).masked_fill(_sees_no_key(bias), float("-inf"))
        return Partial(out[..., :value_size].to(wide), lse)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, merged: Partial, bias: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        head_size, value_size = q.shape[-1], v.shape[-1]
        grad, q, k, v, out = pad_heads_to_one_size(grad, q, k, v, merged.out)
        options = {"dropout_p": 0.0, "is_causal": False, "attn_mask": bias.to(q.dtype), "scale": scale}
        q_grad, k_grad, v_grad = cpu_flash_backward(grad, q, k, v, out, merged.lse, **options)
        return q_grad[..., :head_size], k_grad[..., :head_size], v_grad[..., :value_size]


BlockComputation = Products | CpuFlash


def blocks_for(device: torch.device) -> BlockComputation:
    """Return the implementation that computes blocks on `device`."""
    return CpuFlash() if device.type == "cpu" else Products()


Step = TypeVar("Step", contravariant=True)


class BlockAttention(Protocol[Step]):
    """Interface of attention over blocks of keys, implemented by `MaskedBlocks` and `segments.VarlenBlocks`.

    Each implementation defines the layout of q, k, v and the output. It also defines the type of a step, which
    describes the keys of a block that each query sees: `MaskedBlocks` uses a mask, `VarlenBlocks` a list of calls.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, step: Step, so_far: Partial | None) -> Partial:
        """Compute attention over a block, and merge it with the attention over the blocks before.

        Args:
            q: Queries.
            k: Keys of this block.
            v: Values of this block.
            step: The visible keys of this block.
            so_far: Attention over the blocks before. Its tensors may be overwritten. None for the first block.

        Returns:
            Attention over all blocks up to this one.
        """

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, merged: Partial, step: Step, gradients: Gradients
    ) -> None:
        """Add this block's part to `gradients`.

        Args:
            grad: Gradient of the merged output, in its layout.
            q: Queries.
            k: Keys of this block.
            v: Values of this block.
            merged: Attention over all blocks. The output is in q's dtype.
            step: The visible keys of this block.
            gradients: Sums of the gradients of q, and of this block's k and v. Modified in place.
        """

    def by_head(self, out: Tensor) -> Tensor:
        """Convert an output, or its gradient, from this layout to [.., H, Q, hd_v], or back.

        Both directions exchange the same two dimensions, if any. For example, [T, H, hd_v] becomes [H, T, hd_v].
        """


class KeysAndValues(NamedTuple):
    """Keys and values, or their gradients, as views of one flat buffer, so that one message carries both.

    Attributes:
        buffer: [n], first all of k, then all of v.
        k: [B, kv, K, hd], or in another layout.
        v: [B, kv, K, hd_v], or in another layout.
    """

    buffer: Tensor
    k: Tensor
    v: Tensor

    @classmethod
    def of_buffer(cls, buffer: Tensor, like: "KeysAndValues") -> "KeysAndValues":
        """Split a flat buffer into views k and v with the shapes of `like`."""
        return cls(buffer, *flat_views(buffer, [like.k.shape, like.v.shape]))

    @classmethod
    def zeros_like(cls, k: Tensor, v: Tensor, dtype: torch.dtype) -> "KeysAndValues":
        """Allocate a zero buffer for k and v in `dtype`."""
        buffer = k.new_zeros(k.numel() + v.numel(), dtype=dtype)
        return cls(buffer, *flat_views(buffer, [k.shape, v.shape]))

    @classmethod
    def copy_of(cls, k: Tensor, v: Tensor) -> "KeysAndValues":
        """Copy k and v into one new buffer."""
        buffer = k.new_empty(k.numel() + v.numel())
        message = cls(buffer, *flat_views(buffer, [k.shape, v.shape]))
        message.k.copy_(k)
        message.v.copy_(v)
        return message


def with_sinks(attention: BlockAttention[Any], merged: Partial, sinks: Tensor | None) -> Partial:
    """Merge attention with the sinks of its heads.

    Args:
        attention: Defines the layout of `merged.out`.
        merged: Attention without sinks.
        sinks: [H]. None: return `merged`.
    """
    if sinks is None:
        return merged
    out = attention.by_head(merged.out)
    # [H, 1]: the same for each query
    with_sink = merge_with_sinks(Partial(out, merged.lse), sinks[:, None])
    return Partial(attention.by_head(with_sink.out), with_sink.lse)


def sinks_grad(attention: BlockAttention[Any], grad: Tensor, merged: Partial, sinks: Tensor | None) -> Tensor | None:
    """Compute the gradient of the sinks.

    Args:
        attention: Defines the layout of `grad` and `merged.out`.
        grad: Gradient of the merged output.
        merged: Attention with the sinks.
        sinks: [H], or None.

    Returns:
        [H] in the dtype of `sinks`, or None without sinks.
    """
    if sinks is None:
        return None
    dtype = merged.lse.dtype
    # A sink is a key whose value is 0, so its gradient is w · (grad · 0 - D), summed over queries and rows.
    grad, out = attention.by_head(grad).to(dtype), attention.by_head(merged.out).to(dtype)
    d = (grad * out).sum(-1)  # [.., H, Q]
    weights = (sinks.to(dtype)[:, None] - merged.lse).exp()
    sum_over_queries = (weights * d).sum(-1)  # [.., H]
    return -sum_over_queries.view(-1, len(sinks)).sum(0).to(sinks.dtype)


@dataclass(frozen=True)
class MaskedBlocks:
    """`BlockAttention` under masks. A step is a `BlockMask`: a bias, or the `Visibility` to compute a large bias from.

    q is [B, H, Q, hd], k [B, kv, K, hd], v [B, kv, K, hd_v], the output [B, H, Q, hd_v], its log-sum-exp [B, H, Q].

    Attributes:
        blocks: The implementation that computes a block.
        scale: Factor of the scores.
        max_bytes: Largest number of bytes of scores in memory. If the scores of all queries take more, consecutive
            slices of the queries (runs) are computed one after another.
    """

    blocks: BlockComputation
    scale: float
    max_bytes: int = 2**28

    def forward(self, q: Tensor, k: Tensor, v: Tensor, step: BlockMask, so_far: Partial | None) -> Partial:
        """Override `BlockAttention.forward`."""
        outs, lses = [], []
        for run, keys, bias in self._parts(q, k, step):
            part = self.blocks.forward(q[:, :, run], k[:, :, keys], v[:, :, keys], bias, self.scale)
            outs.append(part.out)
            lses.append(part.lse)
        if len(outs) == 1:
            partial = Partial(outs[0], lses[0])
        else:
            partial = Partial(torch.cat(outs, 2), torch.cat(lses, 2))
        return partial if so_far is None else merge_by_log_sum_exp(so_far, partial)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, merged: Partial, step: BlockMask, gradients: Gradients
    ) -> None:
        """Override `BlockAttention.backward`."""
        for run, keys, bias in self._parts(q, k, step):
            merged_run = Partial(merged.out[:, :, run], merged.lse[:, :, run])
            q_grad, k_grad, v_grad = self.blocks.backward(
                grad[:, :, run], q[:, :, run], k[:, :, keys], v[:, :, keys], merged_run, bias, self.scale
            )
            gradients.q[:, :, run] += q_grad
            gradients.k[:, :, keys] += k_grad
            gradients.v[:, :, keys] += v_grad

    def _parts(self, q: Tensor, k: Tensor, step: BlockMask) -> Iterator[tuple[slice, slice, Tensor]]:
        """Yield slices of queries, the slice of keys that each may see, and their bias [B or 1, 1, run, keys]."""
        wide = torch.promote_types(q.dtype, torch.float32)
        row_bytes = q.shape[0] * q.shape[1] * k.shape[2] * wide.itemsize
        if isinstance(step, Tensor):
            size = max(1, self.max_bytes // row_bytes)
            for start in range(0, q.shape[2], size):
                run = slice(start, start + size)
                yield run, slice(0, k.shape[2]), step[:, :, run]
            return
        for run in step.runs(row_bytes, self.max_bytes):
            keys = step.reach(run)
            yield run, keys, step.bias(run, q.dtype, q.device)[..., keys]

    def by_head(self, out: Tensor) -> Tensor:
        """Override `BlockAttention.by_head`: the layout already is [B, H, Q, hd_v]."""
        return out


class BlockByBlock(torch.autograd.Function):
    """Attention over blocks of keys, one after the other, in q's dtype.

    The forward saves no scores and no blocks of other ranks. The backward receives the blocks a second time, computes
    their scores again, and adds up the gradients block by block, from the output and log-sum-exp over all blocks.

    `apply(q, k, v, steps, ring, attention, sinks)`:

        q, k, v: This rank's tensors, in the layout of `attention`.
        steps: The visible keys of each block, in the order of the blocks. None or an empty step: none are visible.
        ring: `context.Ring`, which yields this rank's own block, and then the blocks of other ranks. None: k and v are
            the only block.
        attention: `BlockAttention`.
        sinks: [H], or None.

    The gradient of a block travels around the ring one message behind its keys. On rank 0 of 3:

        step 0    computes on block 0                                        passes the gradient of block 0 on
        step 1    computes on block 2, adds what rank 2 has sent             passes the gradient of block 2 on
        step 2    computes on block 1, adds what ranks 1 and 2 have sent     passes the gradient of block 1 on
        end       receives the gradient of block 0, to which ranks 0, 1 and 2 have added their parts

    Collectives:
        With a ring of n ranks, n - 1 exchanges with the neighbours in the forward, and 2n - 1 in the backward.
    """

    @staticmethod
    def forward(ctx, q, k, v, steps, ring, attention, sinks):
        partial: Any = None
        blocks = [(k, v)] if ring is None else ring.around(k, v)
        for (block_k, block_v), step in zip(blocks, steps, strict=True):
            if step is not None:
                partial = attention.forward(q, block_k, block_v, step, partial)
        out, lse = with_sinks(attention, partial, sinks)
        ctx.save_for_backward(q, k, v, out.to(q.dtype), lse, sinks)
        ctx.steps, ctx.ring, ctx.attention = steps, ring, attention
        return out.to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        q, k, v, out, lse, sinks = ctx.saved_tensors
        merged = Partial(out, lse)
        grad = grad.contiguous()
        q_grad = torch.zeros_like(q, dtype=lse.dtype)
        incoming = None  # the gradient of the next block, from the rank before this one
        blocks = [(k, v)] if ctx.ring is None else ctx.ring.around(k, v)
        for (block_k, block_v), step in zip(blocks, ctx.steps, strict=True):
            kv_grad = KeysAndValues.zeros_like(k, v, lse.dtype)  # this rank's part of the block's gradient
            if step is not None:
                gradients = Gradients(q_grad, kv_grad.k, kv_grad.v)
                ctx.attention.backward(grad, q, block_k, block_v, merged, step, gradients)
            if ctx.ring is None:
                continue
            # The parts of the ranks before travelled while this block was computed. The sum travels while the next
            # block is computed.
            if incoming is not None:
                kv_grad.buffer.add_(incoming.wait().buffer)
            incoming = ctx.ring.pass_on(kv_grad)
        if incoming is not None:
            kv_grad = incoming.wait()  # the gradient of this rank's own block, from all ranks
        sink_grad = sinks_grad(ctx.attention, grad, merged, sinks)
        return q_grad.to(q.dtype), kv_grad.k.to(k.dtype), kv_grad.v.to(v.dtype), None, None, None, sink_grad


def _sees_no_key(bias: Tensor) -> Tensor:
    """Return the mask of queries that see no key of the block, [B or 1, 1, Q] bool."""
    return (bias == float("-inf")).all(-1)


def _scores(q: Tensor, k: Tensor, bias: Tensor, scale: float, wide: torch.dtype) -> Tensor:
    """Return q · kᵀ · scale + bias in the dtype `wide`, [B, H, Q, K]."""
    k = _for_heads(k, q)  # [B, H, K, hd]
    scores = torch.matmul(q.to(wide), k.to(wide).transpose(-1, -2))
    return scores * scale + bias.to(wide)


def _for_heads(kv: Tensor, q: Tensor) -> Tensor:
    """Repeat each key head for the query heads that read it, [B, kv, K, hd] to [B, H, K, hd]."""
    return kv.repeat_interleave(q.shape[1] // kv.shape[1], dim=1)


def _to_key_heads(grad: Tensor, kv: Tensor) -> Tensor:
    """Sum a gradient over the query heads of each key head, [B, H, K, hd] to [B, kv, K, hd]: reverses `_for_heads`."""
    return grad.unflatten(1, (kv.shape[1], -1)).sum(2).to(kv.dtype)
