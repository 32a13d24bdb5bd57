"""Kernels that only CUDA has, computed on the host with the refusals, the shapes and the memory of the real ones.

Attention in torch 2.13 is FlashAttention-2. Causality and windows are aligned to the ends of queries and keys. A row
that sees no key gives 0 and a log-sum-exp of +inf. The backward computes from the output and log-sum-exp that it is
handed, which may be those of a larger softmax. Its backward holds the gradient of q in float32, and under grouped
queries the gradients of k and v for each query head.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)
_ROWS = 512  # queries whose scores the host holds at a time
_UNSEEN = float("inf")  # the log-sum-exp of a row without a key


class Kernels:
    """library: the pretend device's. note(kind, what): told of every call."""

    def __init__(self, library, note):
        self._host, self._library, self._note = library.host, library, note
        self._registered = torch.library.Library("aten", "IMPL")

    def register(self) -> None:
        for name in (
            "_flash_attention_forward", "_flash_attention_backward", "_fused_rms_norm", "_fused_rms_norm_backward",
            "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward",
            "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_cudnn_attention_backward",
            "_scaled_dot_product_efficient_attention", "_scaled_dot_product_efficient_attention_backward",
        ):  # fmt: skip
            self._registered.impl(name, getattr(self, name[1:]), "CUDA")
        for name in ("mm", "bmm"):
            self._registered.impl(name, self.matrix_product, "CUDA")
            self._registered.impl(f"{name}.dtype", self.product, "CUDA")
            self._registered.impl(f"{name}.dtype_out", self.product_out, "CUDA")
        self._registered.impl("cumsum", self.cumsum, "CUDA")
        self._registered.impl("addmm.dtype", self.sum_with_product, "CUDA")
        self._registered.impl("addmm.dtype_out", self.sum_with_product_out, "CUDA")

    def cumsum(self, values: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
        """Of floats it has no fixed order on CUDA, and refuses under deterministic algorithms."""
        is_ordered = not values.is_floating_point() and not (dtype or torch.int64).is_floating_point
        _require(
            is_ordered or not torch.are_deterministic_algorithms_enabled(),
            "cumsum_cuda_kernel does not have a deterministic implementation",
        )
        return self._library.on_device(self._host(values).cumsum(dim, dtype=dtype), values)

    def matrix_product(self, a: Tensor, b: Tensor) -> Tensor:
        """a @ b [.., m, n] in the operands' dtype. Half precision by way of float32: a CPU's own kernels for it take 30
        times as long."""
        _require(a.device == b.device, f"Expected all tensors to be on the same device, not {a.device} and {b.device}")
        _require(a.dtype == b.dtype, f"expected mat1 and mat2 to have the same dtype, but got: {a.dtype} != {b.dtype}")
        _require(a.dim() == b.dim() and a.shape[-1] == b.shape[-2], f"{list(a.shape)} and {list(b.shape)}: no product")
        here = [self._host(one).float() if a.dtype in HALF else self._host(one) for one in (a, b)]
        return self._library.on_device((here[0] @ here[1]).to(a.dtype), a)

    def product(self, a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
        """a @ b of half operands [.., m, k] and [.., k, n], summed and given in float32."""
        return self._library.on_device(self._wide_product(a, b, out_dtype), a)

    def product_out(self, a: Tensor, b: Tensor, out_dtype: torch.dtype, *, out: Tensor) -> Tensor:
        _require(out.dtype == out_dtype, f"out is {out.dtype} and out_dtype {out_dtype}")
        _require(out.device == a.device, f"out and operands on several devices: {out.device} and {a.device}")
        self._host(out).copy_(self._wide_product(a, b, out_dtype))
        return out

    def sum_with_product(
        self, total: Tensor, a: Tensor, b: Tensor, out_dtype: torch.dtype, *, beta=1, alpha=1
    ) -> Tensor:
        """beta · total + alpha · a @ b in float32, of a total [m, n] in the operands' dtype or in float32."""
        out = torch.empty(a.shape[0], b.shape[1], dtype=out_dtype, device=a.device)
        return self.sum_with_product_out(total, a, b, out_dtype, beta=beta, alpha=alpha, out=out)

    def sum_with_product_out(
        self, total: Tensor, a: Tensor, b: Tensor, out_dtype: torch.dtype, *, beta=1, alpha=1, out: Tensor
    ) -> Tensor:
        _require(out.dtype == out_dtype, f"out is {out.dtype} and out_dtype {out_dtype}")
        _require(
            total.dtype in (a.dtype, out_dtype), f"self is {total.dtype}, and must be of the operands' or out's dtype"
        )
        _require(total.device == a.device == out.device, "operands on several devices")
        self._host(out).copy_(beta * self._host(total).float() + alpha * self._wide_product(a, b, out_dtype))
        return out

    def _wide_product(self, a, b, out_dtype):
        _require(a.device == b.device, f"operands on {a.device} and {b.device}")
        _require(a.dtype == b.dtype, f"mat1 and mat2 must have the same dtype, but got {a.dtype} and {b.dtype}")
        _require(a.dtype in HALF and out_dtype == torch.float32, f"out_dtype {out_dtype} of {a.dtype} operands")
        self._note("kernel", f"product of {a.dtype} in float32")
        return self._host(a).float() @ self._host(b).float()

    def fused_rms_norm(self, x, shape, weight, eps):
        _require(weight is None or weight.device == x.device, "x and weight lie on different devices")
        wide = self._host(x).to(_wide(x.dtype))
        eps = torch.finfo(x.dtype).eps if eps is None else eps
        scale = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
        out = wide * scale if weight is None else wide * scale * self._host(weight)
        return self._give(out.to(x.dtype), x), self._give(scale, x)

    def fused_rms_norm_backward(self, grad, x, shape, scale, weight, wanted):
        wide = _wide(x.dtype)
        grad_, x_, scale_ = (self._host(one).to(wide) for one in (grad, x, scale))
        unit = x_ * scale_
        along = grad_ if weight is None else grad_ * self._host(weight).to(wide)
        x_grad = (along - unit * (along * unit).mean(-1, keepdim=True)) * scale_
        weight_grad = None
        if weight is not None and wanted[1]:
            weight_grad = self._give((grad_ * unit).flatten(0, -2).sum(0).to(weight.dtype), x)
        return self._give(x_grad.to(x.dtype), x) if wanted[0] else None, weight_grad

    def flash_attention_forward(
        self, q, k, v, ends_q, ends_k, max_q, max_k, dropout, causal, debug, *, scale=None, window_size_left=None,
        window_size_right=None, seqused_k=None, alibi_slopes=None, block_table=None, num_splits=None,
    ):  # fmt: skip
        """q [T, H, hd], k and v [K, kv, hd] with cumulative lengths; or [B, S, .., hd] without.

        Gives the output like q, and its log-sum-exp, float32, [H, T] or [B, H, S]. seqused_k: the first keys of each
        segment that are seen, [n] int32."""
        _require(dropout == 0 and alibi_slopes is None and block_table is None, "not pretended")
        _refuse_flash(q, k, v)
        window = _window(causal, window_size_left, window_size_right, max_q, max_k)
        out = torch.empty_like(q)
        if ends_q is None:
            lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)
            self._note("kernel", f"flash head {q.shape[-1]} window {window}")
            pieces = zip(out, lse, q, k, v, strict=True)
        else:
            lse = q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
            self._note("kernel", f"varlen flash head {q.shape[-1]} window {window}")
            runs = list(self._runs(q, k, ends_q, ends_k, max_q, max_k))
            if seqused_k is not None:
                runs = self._used(runs, seqused_k)
            pieces = ((out[a], lse[:, a], q[a], k[b], v[b]) for a, b in runs)
        for to, to_lse, *parts in pieces:
            one, one_lse = _attend(*(_heads_first(self._host(part)) for part in parts), window, None, scale)
            self._host(to).copy_(one.transpose(0, 1))
            self._host(to_lse).copy_(one_lse)
        state = torch.empty(2, dtype=torch.uint64, device=q.device)
        return out, lse, state, q.new_empty(()), q.new_empty(0)

    def flash_attention_backward(
        self, grad, q, k, v, out, lse, ends_q, ends_k, max_q, max_k, dropout, causal, state, unused, *, scale=None,
        window_size_left=None, window_size_right=None,
    ):  # fmt: skip
        """The gradients of q, k and v, in their dtypes, from `out` and `lse` as the forward gives them, or as they are
        over more keys than these."""
        _require(dropout == 0, "not pretended")
        grad, out = grad.contiguous(), out.contiguous()
        _refuse_flash(q, k, v, out, grad)
        _require(lse.dtype == torch.float32 and lse.device == q.device, "softmax_lse must be float32 on the device")
        window = _window(causal, window_size_left, window_size_right, max_q, max_k)
        grads = [torch.empty_like(one) for one in (q, k, v)]
        heads, size = q.shape[-2], q.shape[-1]
        if ends_q is None:
            rows = q.shape[0] * -(-q.shape[1] // 128) * 128
            pieces = list(zip(grad, q, k, v, out, lse, *grads, strict=True))
        else:
            rows = q.shape[0] + 128 * (len(ends_q) - 1)
            pieces = [
                (grad[a], q[a], k[b], v[b], out[a], lse[:, a], grads[0][a], grads[1][b], grads[2][b])
                for a, b in self._runs(q, k, ends_q, ends_k, max_q, max_k)
            ]
        multiple = 32 if size <= 128 else 64
        held = [q.new_empty(rows, heads, 1 + -(-size // multiple) * multiple, dtype=torch.float32)]
        if k.shape[-2] != heads:
            held += [k.new_empty(*k.shape[:-2], heads, size) for _ in range(2)]
        for grad_, q_, k_, v_, out_, lse_, *to in pieces:
            parts = [_heads_first(self._host(one)) for one in (grad_, q_, k_, v_, out_)]
            for one, into in zip(_attend_backward(*parts, self._host(lse_), window, None, scale), to, strict=True):
                self._host(into).copy_(one.transpose(0, 1))
        del held
        return tuple(grads)

    def _runs(self, q, k, ends_q, ends_k, max_q, max_k) -> Iterator[tuple[slice, slice]]:
        """The queries and the keys of each document. Raises where the kernel would read beyond its memory."""
        starts = []
        for ends, of, longest in ((ends_q, q, max_q), (ends_k, k, max_k)):
            _require(ends.dtype == torch.int32, "cu_seqlens must have dtype int32")
            _require(ends.device == q.device, "cu_seqlens must be on the same device as q")
            _require(ends.is_contiguous() and ends.dim() == 1, "cu_seqlens must be contiguous")
            values = self._library.values(ends).tolist()
            lengths = [b - a for a, b in zip(values[:-1], values[1:], strict=True)]
            _require(values[0] >= 0 and values[-1] <= len(of), f"cu_seqlens end at {values[-1]} of {len(of)} tokens")
            _require(min(lengths, default=0) >= 0 and max(lengths, default=0) <= longest, f"longer than {longest}")
            starts.append(values)
        _require(len(starts[0]) == len(starts[1]) > 1, "cu_seqlens of queries and keys differ in length")
        for (a, b), (c, d) in zip(*([*zip(one[:-1], one[1:], strict=True)] for one in starts), strict=True):
            yield slice(a, b), slice(c, d)

    def _used(self, runs, used) -> list[tuple[slice, slice]]:
        _require(used.dtype == torch.int32, "seqused_k must have dtype int32")
        _require(used.is_contiguous() and used.shape == (len(runs),), "seqused_k must be contiguous")
        counts = self._library.values(used).tolist()
        held = [keys.stop - keys.start for _, keys in runs]
        _require(all(n <= most for n, most in zip(counts, held, strict=True)), "keys beyond a segment would be read")
        return [
            (queries, slice(keys.start, keys.start + n))
            for (queries, keys), n in zip(runs, counts, strict=True)
            if queries.stop > queries.start
        ]

    def scaled_dot_product_flash_attention(self, q, k, v, dropout=0.0, causal=False, debug=False, *, scale=None):
        """q [B, H, Q, hd], k and v [B, kv, K, hd]."""
        parts = (one.transpose(1, 2) for one in (q, k, v))
        out, lse, state, unused, empty = self.flash_attention_forward(
            *parts, None, None, q.shape[2], k.shape[2], dropout, causal, debug, scale=scale
        )
        return out.transpose(1, 2), lse, None, None, q.shape[2], k.shape[2], state, unused, empty

    def scaled_dot_product_flash_attention_backward(
        self, grad, q, k, v, out, lse, ends_q, ends_k, max_q, max_k, dropout, causal, state, unused, *, scale=None
    ):
        parts = (one.transpose(1, 2) for one in (grad, q, k, v, out))
        found = self.flash_attention_backward(
            *parts, lse, None, None, max_q, max_k, dropout, causal, state, unused, scale=scale
        )
        return tuple(one.transpose(1, 2) for one in found)

    def scaled_dot_product_cudnn_attention(
        self, q, k, v, bias, with_lse, dropout=0.0, causal=False, debug=False, *, scale=None
    ):
        _require(q.dtype in HALF and q.shape[-1] % 8 == 0, "cuDNN's attention: half precision, heads of 8, 16, ...")
        self._note("kernel", f"cudnn head {q.shape[-1]}" + (" biased" if bias is not None else ""))
        out, lse = self._dense(q, k, v, bias, causal, scale, q.shape[2])
        empty = q.new_empty(0)
        return out, lse[..., None], None, None, q.shape[2], k.shape[2], empty, empty, empty

    def scaled_dot_product_cudnn_attention_backward(
        self, grad, q, k, v, out, lse, seed, offset, bias, ends_q, ends_k, max_q, max_k, dropout, causal, *, scale=None
    ):
        return self._dense_backward(grad, q, k, v, out, lse.squeeze(-1), bias, causal, scale)

    def scaled_dot_product_efficient_attention(self, q, k, v, bias, with_lse, dropout=0.0, causal=False, *, scale=None):
        _require(q.shape[1] == k.shape[1], "memory-efficient attention: as many key heads as query heads")
        self._note("kernel", f"efficient head {q.shape[-1]}" + (" biased" if bias is not None else ""))
        out, lse = self._dense(q, k, v, bias, causal, scale, -(-q.shape[2] // 32) * 32 if with_lse else 0)
        empty = q.new_empty((), dtype=torch.int64)
        return out, lse, empty, empty

    def scaled_dot_product_efficient_attention_backward(
        self, grad, q, k, v, bias, out, lse, seed, offset, dropout, wanted, causal=False, *, scale=None
    ):
        _require(not wanted[3], "not pretended: the gradient of a bias")
        return *self._dense_backward(grad, q, k, v, out, lse[..., : q.shape[2]], bias, causal, scale), None

    def _dense(self, q, k, v, bias, causal, scale, lse_length):
        """Rows that are causal by index from the first key. out [B, H, Q, hd] lies as [B, Q, H, hd] does."""
        _require(q.stride(-1) == k.stride(-1) == v.stride(-1) == 1, "the last dimension must be contiguous")
        _require(bias is None or bias.device == q.device, "mask and queries lie on different devices")
        batch, heads, length, size = q.shape
        out = q.new_empty(batch, length, heads, size).transpose(1, 2)
        lse = q.new_empty(batch, heads, lse_length, dtype=torch.float32)
        window, shift = ((-1, 0), length - k.shape[2]) if causal else ((-1, -1), 0)
        for n in range(batch):
            parts = (self._host(one[n]) for one in (q, k, v))
            one, one_lse = _attend(*parts, window, _row_of(bias, n, self._host), scale, shift)
            self._host(out[n]).copy_(one)
            if lse_length:
                self._host(lse[n, :, :length]).copy_(one_lse)
        return out, lse

    def _dense_backward(self, grad, q, k, v, out, lse, bias, causal, scale):
        grads = [torch.empty_like(one) for one in (q, k, v)]
        window, shift = ((-1, 0), q.shape[2] - k.shape[2]) if causal else ((-1, -1), 0)
        for n in range(len(q)):
            parts = (self._host(one[n]) for one in (grad, q, k, v, out, lse))
            found = _attend_backward(*parts, window, _row_of(bias, n, self._host), scale, shift)
            for one, into in zip(found, grads, strict=True):
                self._host(into[n]).copy_(one)
        return tuple(grads)

    def _give(self, tensor, like):
        return self._library.on_device(tensor, like)


def _require(holds: bool, why: str) -> None:
    if not holds:
        raise RuntimeError(why)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _heads_first(part: Tensor) -> Tensor:
    """[n, heads, hd] -> [heads, n, hd]"""
    return part.transpose(0, 1)


def _row_of(bias, n, host):
    """[H or 1, Q, K] of one row of a bias that is as wide as the batch, or 1."""
    return None if bias is None else host(bias[n if bias.shape[0] > 1 else 0])


def _refuse_flash(q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> None:
    tensors = (q, k, v, *more)
    _require(q.dtype in HALF, "FlashAttention only support fp16 and bf16 data type")
    _require(all(one.dtype == q.dtype for one in tensors), "query, key and value must have the same dtype")
    _require(all(one.device == q.device for one in tensors), "query, key and value must be on the same device")
    _require(all(one.stride(-1) == 1 for one in tensors), "Input tensor must have contiguous last dimension")
    _require(q.shape[-1] <= 256, "FlashAttention only supports head dimension at most 256")
    _require(q.shape[-1] % 8 == 0, "head_size must be a multiple of 8")
    _require(k.shape == v.shape and k.shape[-1] == q.shape[-1], "keys and values of other shapes than the queries")
    _require(q.shape[-2] % k.shape[-2] == 0, "Number of heads in key/value must divide number of heads in query")


def _window(causal, left, right, max_q, max_k) -> tuple[int, int]:
    """Keys seen to the left and right of a query's own place, -1: all."""
    left, right = (-1 if side is None else side for side in (left, right))
    if causal and max_q > 1:
        right = 0
    left, right = (-1 if left >= max_k else left), (-1 if right >= max_k else right)
    # flash_api.cpp, set_params_fprop: a left side alone makes the right one the longest segment of keys, and not all.
    return left, max_k if right < 0 <= left else right


def _blocks(queries: int, keys: int, window: tuple[int, int], shift: int) -> Iterator[tuple[slice, slice, Tensor]]:
    """Runs of queries, the keys that they may see, and what is hidden in between [q, k]. A query's own place is that of
    the key as far from the end as it is, less `shift`."""
    left, right = window
    offset = keys - queries + shift
    for start in range(0, queries, _ROWS):
        stop = min(start + _ROWS, queries)
        first = 0 if left < 0 else min(max(0, start + offset - left), keys)
        last = keys if right < 0 else min(max(first, stop + offset + right), keys)
        distance = torch.arange(start, stop)[:, None] + offset - torch.arange(first, last)[None]
        hidden = torch.zeros(distance.shape, dtype=torch.bool)
        if left >= 0:
            hidden |= distance > left
        if right >= 0:
            hidden |= distance < -right
        yield slice(start, stop), slice(first, last), hidden


def _scores(q, k, hidden, bias, scale):
    """[H, q, k] from q [H, q, hd] and k [H, k, hd], -inf where hidden."""
    scores = (q @ k.transpose(-1, -2)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    return scores.masked_fill(hidden, float("-inf"))


def _for_heads(part: Tensor, heads: int) -> Tensor:
    return part.repeat_interleave(heads // part.shape[0], 0)


def _attend(q, k, v, window, bias, scale, shift=0) -> tuple[Tensor, Tensor]:
    """[H, Q, hd] and [H, Q] from q [H, Q, hd], k and v [kv, K, hd], in float32."""
    wide = _wide(q.dtype)
    if q.is_meta:
        return q.new_empty(q.shape, dtype=wide), q.new_empty(q.shape[:2], dtype=wide)
    out, lse = q.new_zeros(q.shape, dtype=wide), q.new_full(q.shape[:2], _UNSEEN, dtype=wide)
    for rows, keys, hidden in _blocks(q.shape[1], k.shape[1], window, shift):
        if keys.start == keys.stop:
            continue
        k_, v_ = (_for_heads(one[:, keys].to(wide), len(q)) for one in (k, v))
        scores = _scores(q[:, rows].to(wide), k_, hidden, None if bias is None else bias[:, rows, keys], scale)
        total = scores.logsumexp(-1)
        seen = total > float("-inf")
        lse[:, rows] = total.masked_fill(~seen, _UNSEEN)
        out[:, rows] = (scores - total.masked_fill(~seen, 0.0)[..., None]).exp() @ v_
    return out, lse


def _attend_backward(grad, q, k, v, out, lse, window, bias, scale, shift=0) -> tuple[Tensor, Tensor, Tensor]:
    """[H, Q, hd] and twice [kv, K, hd]; lse [H, Q], +inf or -inf for a row that has seen no key."""
    if q.is_meta:
        return q, k, v
    wide = _wide(q.dtype)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    q_grad = q.new_zeros(q.shape, dtype=wide)
    k_grad, v_grad = (k.new_zeros(len(q), *k.shape[1:], dtype=wide) for _ in range(2))
    lse = lse.to(wide).masked_fill(lse == float("-inf"), _UNSEEN)
    for rows, keys, hidden in _blocks(q.shape[1], k.shape[1], window, shift):
        if keys.start == keys.stop:
            continue
        k_, v_ = (_for_heads(one[:, keys].to(wide), len(q)) for one in (k, v))
        q_, grad_ = q[:, rows].to(wide), grad[:, rows].to(wide)
        scores = _scores(q_, k_, hidden, None if bias is None else bias[:, rows, keys], scale)
        weights = (scores - lse[:, rows, None]).exp()
        along = (grad_ * out[:, rows].to(wide)).sum(-1, keepdim=True)
        score_grad = weights * (grad_ @ v_.transpose(-1, -2) - along) * factor
        q_grad[:, rows] = score_grad @ k_
        k_grad[:, keys] += score_grad.transpose(-1, -2) @ q_
        v_grad[:, keys] += weights.transpose(-1, -2) @ grad_
    groups = (len(k), len(q) // len(k))
    return q_grad, k_grad.unflatten(0, groups).sum(1), v_grad.unflatten(0, groups).sum(1)
