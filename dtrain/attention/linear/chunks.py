"""The gated delta rule by chunks, and its derivative (Yang et al., Gated Delta Networks,
arXiv:2412.06464, section 3.3).

Of each document and value head, token by token, with S [K, V] zero at the document's beginning:

    S ← exp(g_t) · S        S ← S + β_t · k_t (v_t − k_tᵀ S)ᵀ        o_t = Sᵀ q_t

Within a chunk of C tokens the updates are one unit lower triangular system, solved for all chunks together; between
chunks the state is carried one after the other. The derivative is written out: between forward and backward nothing but
the inputs is held, the rest is computed again. Decays are differences of logarithms within one document, and what
another document holds is masked: no infinity enters a product.

Shapes: [N, B, Hk, r, C, ..], N chunks, B rows, Hk key heads, r value heads of each; r is 1 where value heads share.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.linalg import vecdot

from dtrain.attention.linear.context import Pieces
from dtrain.base.torch_functions import cumsum, has_values

CHUNK = 64
GROUP = 2**19  # elements of the values that are computed at a time, on a CPU: what a cache holds
MOST = 2**25  # the same elsewhere, and of what is held for an exchange: some GiB in all
EPS = 1e-6  # of the l2 norm, as in transformers


T = TypeVar("T")


def chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    segments: Tensor | None = None,
    real: Tensor | None = None,
    state: Tensor | None = None,
    exchange: Pieces | None = None,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule over rows, in max(float32, the dtype).

    q, k [B, S, Hk, K], neither normalised nor scaled; v [B, S, Hv, V]; g (≤ 0) and beta [B, S, Hv]. segments [B, S]
    counts the documents that began at or before a token, 0 for those that go on from `state` [B, Hv, K, V] (None:
    zeros). real [B, S]: False where nothing is read, written or decayed, and the output is 0. Gives [B, S, Hv, V] in
    v's dtype and the last state [B, Hv, K, V]; with an `exchange`, where a row is a piece of a longer one, `state` is
    None and collectives are those of its.
    """
    return _Chunked.apply(q, k, v, g, beta, segments, real, state, exchange)


class _Rows(NamedTuple):
    """The cut of rows: `chunks` chunks of `size` tokens; masks of [N, B, 1, 1, C, ..] or without rows."""

    length: int
    chunks: int
    size: int
    dtype: torch.dtype
    visible: Tensor  # [N, B, 1, 1, C, C] or [C, C]: j at or before i, in one document
    from_start: Tensor | None  # [N, B, 1, 1, C]: the state before the chunk is of the token's document
    to_end: Tensor | None  # [N, B, 1, 1, C]: the state after the chunk is
    real: Tensor | None  # [N, B, 1, 1, C]

    @classmethod
    def of(cls, values: Tensor, segments: Tensor | None, real: Tensor | None) -> "_Rows":
        length = values.shape[1]
        size = min(CHUNK, length)
        count = -(-length // size)
        visible = torch.ones(size, size, dtype=torch.bool, device=values.device).tril_()
        from_start = to_end = None

        def cut(stream: Tensor) -> Tensor:
            """[B, S] -> [N, B, 1, 1, C]; what fills the last chunk goes on as the row's last token"""
            if missing := count * size - length:
                stream = torch.cat([stream, stream[:, -1:].expand(-1, missing)], 1)
            return stream.unflatten(1, (count, size)).transpose(0, 1)[:, :, None, None]

        if segments is not None:
            ids = cut(segments)
            before = torch.cat([torch.zeros_like(ids[:1, ..., -1:]), ids[:-1, ..., -1:]])
            visible = visible & (ids[..., :, None] == ids[..., None, :])
            from_start, to_end = ids == before, ids == ids[..., -1:]
        dtype = torch.promote_types(values.dtype, torch.float32)
        return cls(length, count, size, dtype, visible, from_start, to_end, None if real is None else cut(real))

    def lay(self, x: Tensor, key_heads: int) -> Tensor:
        """[B, S, H, ..] -> [N, B, Hk, H / Hk, C, ..], a copy; zeros fill the last chunk."""
        rows, _, heads = x.shape[:3]
        shape = (self.chunks, rows, heads, self.size, *x.shape[3:])
        order = (1, 0, 3, 2, *range(4, len(shape)))  # to [B, N, C, H, ..]
        out = torch.empty(shape, dtype=self.dtype, device=x.device)
        into, whole = out.permute(order), self.length // self.size
        into[:, :whole] = x[:, : whole * self.size].unflatten(1, (whole, self.size)) if whole else into[:, :0]
        if left := self.length - whole * self.size:
            out[whole:] = 0
            into[:, whole, :left] = x[:, whole * self.size :]
        return out.unflatten(2, (key_heads, heads // key_heads))

    def back(self, x: Tensor) -> Tensor:
        """`lay` undone: [B, S, H, ..]."""
        x = x.flatten(2, 3)
        tokens = x.permute(1, 0, 3, 2, *range(4, x.dim()))  # [B, N, C, H, ..]
        return tokens.flatten(1, 2)[:, : self.length]


class _Inside(NamedTuple):
    """Values within chunks. q, k are normalised, q scaled; their inverse norms [.., C, 1] beside them."""

    q: Tensor  # [N, B, Hk, 1, C, K]
    k: Tensor
    v: Tensor  # [N, B, Hk, r, C, V]
    inverse_q: Tensor
    inverse_k: Tensor
    beta: Tensor  # [N, B, Hk, r, C]
    start: Tensor  # [N, B, Hk, r, C]: decay from the chunk's beginning to a token
    end: Tensor  # [N, B, Hk, r, C]: from a token to the chunk's end
    whole: Tensor  # [N, B, Hk, r, 1, 1]
    decay: Tensor  # [N, B, Hk, r, C, C]: from j to i
    kk: Tensor  # [N, B, Hk, 1, C, C]
    qk: Tensor
    inverse: Tensor  # [N, B, Hk, r, C, C]: of the system
    scores: Tensor  # [N, B, Hk, r, C, C]
    u: Tensor  # [N, B, Hk, r, C, V]: what is written if the state is zero
    w: Tensor  # [N, B, Hk, r, C, K]: what the state takes away of it


def _inside(rows: _Rows, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> _Inside:
    heads = k.shape[2]
    q, k, v, g, beta = (rows.lay(x, heads) for x in (q, k, v, g, beta))
    if rows.real is not None:
        g, beta = g.masked_fill_(~rows.real, 0), beta.masked_fill_(~rows.real, 0)
        q = q.masked_fill_(~rows.real[..., None], 0)
    scale = q.shape[-1] ** -0.5
    inverse_q, inverse_k = (vecdot(x, x).add_(EPS).rsqrt_()[..., None] for x in (q, k))
    q, k = q.mul_(inverse_q * scale), k.mul_(inverse_k)
    sums = _sums(rows, g)
    decay = (sums[..., :, None] - sums[..., None, :]).masked_fill_(~rows.visible, -torch.inf).exp_()
    start, end = sums.exp(), (sums[..., -1:] - sums).exp_()
    if rows.from_start is not None and rows.to_end is not None:
        start, end = start.masked_fill_(~rows.from_start, 0), end.masked_fill_(~rows.to_end, 0)
    kk, qk = _product(k, k.mT), _product(q, k.mT)
    system = (decay * kk).mul_(beta[..., None])
    unit = torch.eye(rows.size, dtype=rows.dtype, device=q.device)
    inverse = torch.linalg.solve_triangular(system, unit.expand_as(system), upper=False, unitriangular=True)
    by_beta = inverse * beta[..., None, :]
    u = _product(by_beta, v)
    w = _product(by_beta.mul_(start[..., None, :]), k)
    scores = torch.mul(qk, decay, out=system)
    whole = start[..., -1, None, None]
    return _Inside(q, k, v, inverse_q, inverse_k, beta, start, end, whole, decay, kk, qk, inverse, scores, u, w)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a [.., m, x] @ b [.., x, n], written into memory of ours: selective activation checkpointing keeps what `bmm`
    returns. Of a forward that is several times its output, and the way back computes it again as it is."""
    leading = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    flat = [matrix.expand(*leading, *matrix.shape[-2:]).flatten(0, -3) for matrix in (a, b)]
    out = torch.empty(len(flat[0]), a.shape[-2], b.shape[-1], dtype=a.dtype, device=a.device)
    return torch.bmm(*flat, out=out).unflatten(0, leading)


def _sums(rows: _Rows, values: Tensor, backward: bool = False) -> Tensor:
    """[N, B, Hk, r, C]: of each token and those before it in the chunk and its document, each document by itself;
    backward: and those after it."""
    if rows.from_start is None:
        return cumsum(values.flip(-1)).flip(-1) if backward else cumsum(values)
    visible = rows.visible[:, :, 0, 0].to(values.dtype)  # [N, B, C, C]
    visible = visible.mT if backward else visible
    return _product(visible, values.flatten(2, 3).mT).mT.unflatten(2, values.shape[2:4])


class _Chunk(NamedTuple):
    """Matrices that carry a state through one chunk; X: rows and value heads together."""

    u: Tensor  # [X, C, V]
    w: Tensor  # [X, C, K]
    k: Tensor  # [X, C, K]: keys, decayed to the chunk's end
    whole: Tensor  # [X, 1, 1]


def _each(inside: _Inside, unbind: Callable[[Tensor], Sequence[Tensor]]) -> list[_Chunk]:
    parts = inside.u, inside.w, inside.k * inside.end[..., None], inside.whole
    return [_Chunk(*chunk) for chunk in zip(*map(unbind, parts), strict=True)]


def _one_by_one(x: Tensor) -> Sequence[Tensor]:
    """[N, B, Hk, r, ..] -> N times [X, ..]"""
    return x.flatten(1, 3).unbind()


def _in_place(x: Tensor) -> Sequence[Tensor]:
    """Compute what `_one_by_one` does, where results go into memory that is there. Without values nothing is
    carried, and all chunks are one [N · X, ..], of the same sizes."""
    if has_values(x):
        return _one_by_one(x)
    each = x.flatten(1, 3)  # a copy where it is one elsewhere
    whole = (each.shape[:2].numel(), *each.shape[2:])
    return [each.view(whole) if each.is_contiguous() else each[0, 0].expand(whole)]


def _carry(inside: _Inside, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Carry the first state [B, Hk, r, K, V] through the chunks. Returns the states before each chunk [N, ..], what is
    written [N, .., C, V], and the last state."""
    states = torch.empty(len(inside.u) + 1, *state.shape, dtype=state.dtype, device=state.device)
    written = torch.empty_like(inside.u)
    states[0] = state
    parts = (_in_place(tensor) for tensor in (written, states[:-1], states[1:]))
    for chunk, new, before, after in zip(_each(inside, _in_place), *parts, strict=True):
        torch.baddbmm(chunk.u, chunk.w, before, alpha=-1, out=new)
        torch.mul(before, chunk.whole, out=after).baddbmm_(chunk.k.mT, new)
    return states[:-1], written, states[-1]


def _maps(inside: _Inside) -> Tensor:
    """[B, Hk, r, K, K + V]: M and U, the last state being M · first + U."""
    chunks, size = _each(inside, _one_by_one), inside.k.shape[-1]
    unit = torch.eye(size, dtype=inside.k.dtype, device=inside.k.device)
    m = unit.expand(len(chunks[0].w), size, size)
    u = m.new_zeros(len(m), size, inside.u.shape[-1])
    for chunk in chunks:
        taken = torch.baddbmm(chunk.w, chunk.w, m, beta=0)
        m = torch.baddbmm(m * chunk.whole, chunk.k.mT, taken, alpha=-1)
        new = torch.baddbmm(chunk.u, chunk.w, u, alpha=-1)
        u = torch.baddbmm(u * chunk.whole, chunk.k.mT, new)
    return torch.cat([m, u], -1).unflatten(0, inside.u.shape[1:4])


def _carry_back(
    inside: _Inside, by_scores: Tensor, by_start: Tensor, last: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Carry the gradients that outputs give to what is written [N, .., C, V] and to the states [N, .., K, V], and the
    last state's, back through the chunks. Returns those of the states after each chunk, of what is written, and of the
    first state."""
    states = by_start.new_empty(len(by_start) + 1, *by_start.shape[1:])
    states[-1] = 0 if last is None else last
    written = torch.empty_like(by_scores)
    parts = (_in_place(tensor) for tensor in (by_scores, by_start, written, states[:-1], states[1:]))
    each = list(zip(_each(inside, _in_place), *parts, strict=True))
    for chunk, scores, starts, new, before, after in reversed(each):
        torch.baddbmm(scores, chunk.k, after, out=new)
        torch.addcmul(starts, after, chunk.whole, out=before).baddbmm_(chunk.w.mT, new, alpha=-1)
    return states[1:], written, states[0]


class Heads(NamedTuple):
    """Key heads that are computed together, and their value heads."""

    keys: slice
    values: slice

    def of(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> list[Tensor]:
        return [q[:, :, self.keys], k[:, :, self.keys], *(tensor[:, :, self.values] for tensor in (v, g, beta))]


def head_groups(length: int, k: Tensor, v: Tensor) -> list[Heads]:
    """So few heads of rows of `length` tokens at a time that memory is bounded, and on a CPU a cache holds them."""
    heads, repeats = k.shape[2], v.shape[2] // k.shape[2]
    each = len(k) * length * repeats * max(k.shape[-1], v.shape[-1])
    size = max(1, min(heads, (GROUP if k.device.type == "cpu" else MOST) // each))
    starts = range(0, heads, size)
    return [Heads(slice(at, at + size), slice(at * repeats, (at + size) * repeats)) for at in starts]


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, g, beta, segments, real, state, exchange):
        rows = _Rows.of(v, segments, real)
        groups = head_groups(rows.chunks * rows.size, k, v)

        def chunks() -> Iterable[_Inside]:
            return (_inside(rows, *heads.of(q, k, v, g, beta)) for heads in groups)

        first, kept, again = state, None, chunks
        if exchange is not None:
            once, again = _twice(chunks, v)
            first, kept = exchange.forward(torch.cat([_maps(inside).flatten(1, 2) for inside in once()], 1))
        out = torch.empty_like(v, memory_format=torch.contiguous_format)
        last = torch.empty(len(v), v.shape[2], k.shape[-1], v.shape[-1], dtype=rows.dtype, device=v.device)
        for (_, values), inside in zip(groups, again(), strict=True):
            states, written, after = _carry(inside, _first(first, values, inside))
            reads = _product(inside.q, states).mul_(inside.start[..., None])
            reads.add_(_product(inside.scores, written))
            out[:, :, values], last[:, values] = rows.back(reads), after.flatten(1, 2)
        ctx.save_for_backward(q, k, v, g, beta, segments, real, first, kept)
        ctx.exchange, ctx.of_state = exchange, None if state is None else state.dtype
        return out, last

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, last):
        q, k, v, g, beta, segments, real, first, kept = ctx.saved_tensors
        rows = _Rows.of(v, segments, real)
        groups = head_groups(rows.chunks * rows.size, k, v)

        def chunks() -> Iterable[_Reversed]:
            for heads in groups:
                inside = _inside(rows, *heads.of(q, k, v, g, beta))
                yield _reversed(rows, inside, grad[:, :, heads.values], first, heads.values)

        again = chunks
        if ctx.exchange is not None:
            once, again = _twice(chunks, v)
            alone = [_carry_back(part.inside, part.by_scores, part.by_start, None)[2].flatten(1, 2) for part in once()]
            last = ctx.exchange.backward(torch.cat(alone, 1), kept)
        results = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in (q, k, v, g, beta)]
        of_first = torch.empty_like(last)
        for heads, part in zip(groups, again(), strict=True):
            after, new, before = _carry_back(
                part.inside, part.by_scores, part.by_start, last[:, heads.values].unflatten(1, part.inside.u.shape[2:4])
            )
            of_first[:, heads.values] = before.flatten(1, 2)
            grads = _inside_back(rows, part.inside, part.grad, part.states, part.written, after, new)
            for into, some in zip(heads.of(*results), grads, strict=True):
                into.copy_(rows.back(some))
        return *results, None, None, None if ctx.of_state is None else of_first.to(ctx.of_state), None


def _twice(chunks: Callable[[], Iterable[T]], v: Tensor) -> tuple[Callable[[], Iterable[T]], Callable[[], Iterable[T]]]:
    """Return the chunks for both passes, before an exchange and after it: held between, or computed again where it is
    large."""
    if v.numel() > MOST:
        return chunks, chunks
    held = list(chunks())
    return lambda: held, lambda: held


def _first(states: Tensor | None, values: slice, inside: _Inside) -> Tensor:
    """The first states of some heads, [B, Hk, r, K, V]; states [B, Hv, K, V]."""
    heads, size = inside.u.shape[2:4], (inside.k.shape[-1], inside.u.shape[-1])
    if states is None:
        return inside.u.new_zeros(inside.u.shape[1], *heads, *size)
    return states[:, values].to(inside.u.dtype).unflatten(1, heads)


class _Reversed(NamedTuple):
    """Values that the backward needs of some heads: the chunks, the gradient of the outputs, what the way forth gave,
    and what the outputs alone give to what is written and to the states before each chunk."""

    inside: _Inside
    grad: Tensor
    states: Tensor
    written: Tensor
    by_scores: Tensor
    by_start: Tensor


def _reversed(rows: _Rows, inside: _Inside, grad: Tensor, first: Tensor | None, values: slice) -> _Reversed:
    grad = rows.lay(grad, inside.k.shape[2])
    if rows.real is not None:
        grad = grad.masked_fill_(~rows.real[..., None], 0)
    states, written, _ = _carry(inside, _first(first, values, inside))
    by_start = inside.q.mT @ (grad * inside.start[..., None])
    return _Reversed(inside, grad, states, written, inside.scores.mT @ grad, by_start)


def _inside_back(
    rows: _Rows, inside: _Inside, grad: Tensor, states: Tensor, written: Tensor, after: Tensor, new: Tensor
) -> tuple[Tensor, ...]:
    """The gradients of q, k, v, g and beta, laid as they are; `grad` of the outputs, `after` of the states after each
    chunk, `new` of what is written."""
    q, k, v, beta = inside.q, inside.k, inside.v, inside.beta
    read = grad @ states.mT  # [.., C, K]
    of_start = vecdot(read, q)
    of_q = _shared(read.mul_(inside.start[..., None]))
    kept = written @ after.mT  # [.., C, K]
    of_end = vecdot(kept, k).mul_(inside.end)  # of its logarithm
    of_k = _shared(kept.mul_(inside.end[..., None]))
    of_whole = (after * states).sum((-2, -1)).mul_(inside.whole[..., 0, 0])

    # The system: (u, w) = inverse · (β v, β start k)
    of_v = inside.inverse.mT @ new
    of_w = inside.inverse.mT @ (new @ states.mT).neg_()
    of_system = (of_v @ inside.u.mT).add_(of_w @ inside.w.mT).neg_()
    by_key = vecdot(of_w, k)
    of_beta = vecdot(of_v, v).addcmul_(by_key, inside.start)
    of_start.addcmul_(by_key, beta)
    of_v.mul_(beta[..., None])
    of_k += _shared(of_w.mul_((beta * inside.start)[..., None]))

    of_system = of_system.tril_(-1).mul_(inside.decay)
    products = of_system * inside.kk
    of_beta += products.sum(-1)
    products.mul_(beta[..., None])
    of_kk = _shared(of_system.mul_(beta[..., None]))
    of_scores = (grad @ written.mT).mul_(inside.decay)
    products.addcmul_(of_scores, inside.qk)
    of_qk = _shared(of_scores)
    of_q += of_qk @ k
    of_k += of_qk.mT @ q + (of_kk + of_kk.mT) @ k

    of_sums = products.sum(-1).sub_(products.sum(-2)).addcmul_(of_start, inside.start).sub_(of_end)
    of_sums[..., -1] += of_end.sum(-1) + of_whole
    of_g = _sums(rows, of_sums, backward=True)
    if rows.real is not None:
        of_g, of_beta = of_g.masked_fill_(~rows.real, 0), of_beta.masked_fill_(~rows.real, 0)
    scale = q.shape[-1] ** -0.5
    of_q = _unnormed(of_q * scale, q / scale, inside.inverse_q)
    return of_q, _unnormed(of_k, k, inside.inverse_k), of_v, of_g, of_beta


def _unnormed(grad: Tensor, normed: Tensor, inverse: Tensor) -> Tensor:
    return (grad - normed * vecdot(grad, normed)[..., None]).mul_(inverse)


def _shared(grad: Tensor) -> Tensor:
    """Summed over the value heads of a key head: [N, B, Hk, 1, ..]."""
    return grad if grad.shape[3] == 1 else grad.sum(3, keepdim=True)
