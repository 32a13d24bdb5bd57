"""The gated delta rule computed by chunks, and its derivative.

For each document and value head there is a state S [K, V], which is zero at the beginning of the document. A token
decays the state and then writes to it, and its output reads from it:

    S ← exp(g_t) · S        S ← S + k_t n_tᵀ with n_t = β_t · (v_t - Sᵀ k_t)        o_t = Sᵀ q_t

Token by token this would be slow. Within a chunk of C tokens that begins with the state S_0, let G_t be the sum of g up
to token t of the chunk. Then S_t = exp(G_t) · S_0 + Σ_{j ≤ t} exp(G_t - G_j) · k_j n_jᵀ, so what token t writes is

    n_t = β_t · (v_t - exp(G_t) · S_0ᵀ k_t - Σ_{j < t} exp(G_t - G_j) · (k_t · k_j) · n_j)

This is a unit lower triangular system for the n of a chunk, with L_tj = β_t · exp(G_t - G_j) · (k_t · k_j) for j < t:

    (I + L) n = β v - (β exp(G) k) S_0        n = u - w S_0,  u = (I + L)⁻¹ β v,  w = (I + L)⁻¹ (β exp(G) k)

u and w do not depend on the state, so they are computed for all chunks at once (`_within_chunks`). Then the state is
carried from chunk to chunk (`_carry_states`): S_C = exp(G_C) · S_0 + Σ_j exp(G_C - G_j) · k_j n_jᵀ.

Example: K = V = 1, two tokens with k = q = 1, β = 1/2, v = 4 and 2, decays exp(g) = 1 and 1/2, and S_0 = 2.

    token by token    S = 2, n = 1/2 · (4 - 2) = 1, S = 3, o = 3; then S = 3/2, n = 1/2 · (2 - 3/2) = 1/4, S = o = 7/4
    as a chunk        exp(G) = 1, 1/2 and L_21 = 1/2 · 1/2 = 1/4
                      u = 2, 1 - 1/4 · 2 = 1/2 and w = 1/2, 1/4 - 1/4 · 1/2 = 1/8
                      n = 2 - 1/2 · 2, 1/2 - 1/8 · 2 = 1, 1/4
                      S_C = 1/2 · 2 + 1/2 · 1 + 1 · 1/4 = 7/4

The derivative is written out. Only the inputs are saved for the backward, which computes u, w and the states again.
Decays are exponentials of differences of G within one document, which are at most 0. Products of tokens of different
documents are masked. So there are no infinities.

Shapes are [N, B, Hk, r, C, ..] with N chunks, B rows, Hk key heads and r value heads per key head. r is 1 in tensors
that all value heads of a key head share.

Reference:
    Yang et al., Gated Delta Networks, arXiv:2412.06464, section 3.3.
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
GROUP = 2**19  # elements of the values that are computed at a time on a CPU, to fit its cache
MOST = 2**25  # the same on other devices, and the limit for keeping the chunks during an exchange: some GiB in all
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
    """Compute the gated delta rule over rows, in max(float32, the dtype).

    Args:
        q: [B, S, Hk, K]. Normalised and scaled here.
        k: [B, S, Hk, K]. Normalised here.
        v: [B, S, Hv, V].
        g: Logarithms of the decays, at most 0, [B, S, Hv].
        beta: [B, S, Hv].
        segments: Number of documents that began at or before each token, [B, S]. Tokens with 0 continue from `state`.
            None: each row is one document, and continues from `state`.
        real: [B, S] bool, False on padding: nothing is read, written or decayed there, and the output is 0.
        state: The state before each row, [B, Hv, K, V]. None: zeros.
        exchange: Context parallel, where a row is a piece of a longer one. `state` is None then.

    Returns:
        The output, [B, S, Hv, V] in the dtype of v, and the last state of each row, [B, Hv, K, V].

    Collectives:
        Those of `exchange`.
    """
    return _Chunked.apply(q, k, v, g, beta, segments, real, state, exchange)


class _Rows(NamedTuple):
    """Division of rows into chunks, and the masks of documents.

    Attributes:
        length: Tokens of a row.
        chunks: Number of chunks, N.
        size: Tokens of a chunk, C. The last chunk may be padded.
        dtype: The compute dtype.
        visible: [N, B, 1, 1, C, C], or [C, C] if each row is one document: True if token j is at or before token i and
            in the same document.
        from_start: [N, B, 1, 1, C], True for tokens of the document that the state before the chunk belongs to. None:
            all tokens.
        to_end: [N, B, 1, 1, C], True for tokens of the document that the state after the chunk belongs to. None: all.
        real: [N, B, 1, 1, C], False on padding. None: there is no padding.
    """

    length: int
    chunks: int
    size: int
    dtype: torch.dtype
    visible: Tensor
    from_start: Tensor | None
    to_end: Tensor | None
    real: Tensor | None

    @classmethod
    def of(cls, values: Tensor, segments: Tensor | None, real: Tensor | None) -> "_Rows":
        length = values.shape[1]
        size = min(CHUNK, length)
        count = -(-length // size)
        visible = torch.ones(size, size, dtype=torch.bool, device=values.device).tril_()
        from_start = to_end = None

        def cut(stream: Tensor) -> Tensor:
            """Divide [B, S] into chunks, [N, B, 1, 1, C]. The last chunk is filled with the value of the last token."""
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

    def to_chunks(self, x: Tensor, key_heads: int) -> Tensor:
        """Copy [B, S, H, ..] to chunks, [N, B, Hk, H / Hk, C, ..]. The last chunk is filled with zeros."""
        rows, _, heads = x.shape[:3]
        shape = (self.chunks, rows, heads, self.size, *x.shape[3:])
        order = (1, 0, 3, 2, *range(4, len(shape)))  # to [B, N, C, H, ..]
        out = torch.empty(shape, dtype=self.dtype, device=x.device)
        into, num_full = out.permute(order), self.length // self.size
        if num_full:
            into[:, :num_full] = x[:, : num_full * self.size].unflatten(1, (num_full, self.size))
        if remainder := self.length - num_full * self.size:
            out[num_full:] = 0
            into[:, num_full, :remainder] = x[:, num_full * self.size :]
        return out.unflatten(2, (key_heads, heads // key_heads))

    def to_rows(self, x: Tensor) -> Tensor:
        """Convert chunks back to rows, [B, S, H, ..]: the inverse of `to_chunks`."""
        x = x.flatten(2, 3)
        tokens = x.permute(1, 0, 3, 2, *range(4, x.dim()))  # [B, N, C, H, ..]
        return tokens.flatten(1, 2)[:, : self.length]


class _WithinChunks(NamedTuple):
    """Values of all chunks that do not depend on the states. The module's docstring defines G, L, u and w.

    Attributes:
        q: Normalised and multiplied by K^-0.5, [N, B, Hk, 1, C, K].
        k: Normalised, [N, B, Hk, 1, C, K].
        v: [N, B, Hk, r, C, V].
        inverse_q: 1 / norm of q, [N, B, Hk, 1, C, 1].
        inverse_k: 1 / norm of k, [N, B, Hk, 1, C, 1].
        beta: [N, B, Hk, r, C].
        start: exp(G_t), the decay from the beginning of the chunk to a token, [N, B, Hk, r, C].
        end: exp(G_C - G_t), the decay from a token to the end of the chunk, [N, B, Hk, r, C].
        chunk_decay: exp(G_C), the decay over the chunk, [N, B, Hk, r, 1, 1].
        decay: exp(G_i - G_j), the decay from token j to token i, [N, B, Hk, r, C, C].
        kk: k_i · k_j, [N, B, Hk, 1, C, C].
        qk: q_i · k_j, [N, B, Hk, 1, C, C].
        inverse: (I + L)⁻¹, [N, B, Hk, r, C, C].
        scores: decay · qk, the weights with which outputs read the n of the chunk, [N, B, Hk, r, C, C].
        u: The n of a chunk whose first state is zero, [N, B, Hk, r, C, V].
        w: n = u - w S_0, [N, B, Hk, r, C, K].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    inverse_q: Tensor
    inverse_k: Tensor
    beta: Tensor
    start: Tensor
    end: Tensor
    chunk_decay: Tensor
    decay: Tensor
    kk: Tensor
    qk: Tensor
    inverse: Tensor
    scores: Tensor
    u: Tensor
    w: Tensor


def _within_chunks(rows: _Rows, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> _WithinChunks:
    """Compute all values of the chunks that do not depend on the states, from rows [B, S, heads, ..]."""
    heads = k.shape[2]
    q, k, v, g, beta = (rows.to_chunks(x, heads) for x in (q, k, v, g, beta))
    if rows.real is not None:
        g, beta = g.masked_fill_(~rows.real, 0), beta.masked_fill_(~rows.real, 0)
        q = q.masked_fill_(~rows.real[..., None], 0)
    scale = q.shape[-1] ** -0.5
    inverse_q, inverse_k = (vecdot(x, x).add_(EPS).rsqrt_()[..., None] for x in (q, k))
    q, k = q.mul_(inverse_q * scale), k.mul_(inverse_k)
    sums = _cumsum_in_documents(rows, g)
    decay = (sums[..., :, None] - sums[..., None, :]).masked_fill_(~rows.visible, -torch.inf).exp_()
    start, end = sums.exp(), (sums[..., -1:] - sums).exp_()
    if rows.from_start is not None and rows.to_end is not None:
        start, end = start.masked_fill_(~rows.from_start, 0), end.masked_fill_(~rows.to_end, 0)
    kk, qk = _product(k, k.mT), _product(q, k.mT)
    # L in the strict lower triangle. `solve_triangular` with unitriangular=True reads the diagonal as 1.
    system = (decay * kk).mul_(beta[..., None])
    unit = torch.eye(rows.size, dtype=rows.dtype, device=q.device)
    inverse = torch.linalg.solve_triangular(system, unit.expand_as(system), upper=False, unitriangular=True)
    by_beta = inverse * beta[..., None, :]
    u = _product(by_beta, v)
    w = _product(by_beta.mul_(start[..., None, :]), k)
    scores = torch.mul(qk, decay, out=system)
    chunk_decay = start[..., -1, None, None]
    return _WithinChunks(
        q, k, v, inverse_q, inverse_k, beta, start, end, chunk_decay, decay, kk, qk, inverse, scores, u, w
    )


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return a [.., m, x] @ b [.., x, n], written to preallocated memory.

    Selective activation checkpointing saves the tensors that `bmm` returns, which would be several times the output.
    The backward computes these products again in any case, so none should be saved.
    """
    leading = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    flat = [matrix.expand(*leading, *matrix.shape[-2:]).flatten(0, -3) for matrix in (a, b)]
    out = torch.empty(len(flat[0]), a.shape[-2], b.shape[-1], dtype=a.dtype, device=a.device)
    return torch.bmm(*flat, out=out).unflatten(0, leading)


def _cumsum_in_documents(rows: _Rows, values: Tensor, backward: bool = False) -> Tensor:
    """Return cumulative sums within each document of each chunk, [N, B, Hk, r, C].

    Each sum includes the token itself and the tokens before it, or with `backward` the tokens after it.
    """
    if rows.from_start is None:
        return cumsum(values.flip(-1)).flip(-1) if backward else cumsum(values)
    visible = rows.visible[:, :, 0, 0].to(values.dtype)  # [N, B, C, C]
    visible = visible.mT if backward else visible
    return _product(visible, values.flatten(2, 3).mT).mT.unflatten(2, values.shape[2:4])


class _Chunk(NamedTuple):
    """Matrices that carry a state through one chunk. X = B · Hv, rows and value heads together.

    Attributes:
        u: [X, C, V].
        w: [X, C, K].
        k: Keys, multiplied by the decay to the end of the chunk, [X, C, K].
        chunk_decay: The decay over the chunk, [X, 1, 1].
    """

    u: Tensor
    w: Tensor
    k: Tensor
    chunk_decay: Tensor


def _chunk_matrices(inside: _WithinChunks, unbind: Callable[[Tensor], Sequence[Tensor]]) -> list[_Chunk]:
    """Return the matrices of each chunk. `unbind` is `_chunks_of` or `_chunk_views`."""
    parts = inside.u, inside.w, inside.k * inside.end[..., None], inside.chunk_decay
    return [_Chunk(*chunk) for chunk in zip(*map(unbind, parts), strict=True)]


def _chunks_of(x: Tensor) -> Sequence[Tensor]:
    """Return the N chunks of [N, B, Hk, r, ..], [X, ..] each."""
    return x.flatten(1, 3).unbind()


def _chunk_views(x: Tensor) -> Sequence[Tensor]:
    """Return the chunks as `_chunks_of` does, as views to write results to.

    For tensors without values (in a plan) there is nothing to carry from chunk to chunk, so all chunks are returned as
    one of [N · X, ..], which has the same cost and fewer operations to trace.
    """
    if has_values(x):
        return _chunks_of(x)
    flat = x.flatten(1, 3)  # copies in the same cases as `_chunks_of`, so that a plan counts the same memory
    shape = (flat.shape[:2].numel(), *flat.shape[2:])
    return [flat.view(shape) if flat.is_contiguous() else flat[0, 0].expand(shape)]


def _carry_states(inside: _WithinChunks, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Carry a state through the chunks.

    Args:
        inside: The chunks.
        state: The state before the first chunk, [B, Hk, r, K, V].

    Returns:
        The states before each chunk, [N, B, Hk, r, K, V]; n, what each token writes, [N, B, Hk, r, C, V]; and the state
        after the last chunk, [B, Hk, r, K, V].
    """
    states = torch.empty(len(inside.u) + 1, *state.shape, dtype=state.dtype, device=state.device)
    written = torch.empty_like(inside.u)
    states[0] = state
    parts = (_chunk_views(tensor) for tensor in (written, states[:-1], states[1:]))
    for chunk, new, before, after in zip(_chunk_matrices(inside, _chunk_views), *parts, strict=True):
        torch.baddbmm(chunk.u, chunk.w, before, alpha=-1, out=new)  # n = u - w S_0
        torch.mul(before, chunk.chunk_decay, out=after).baddbmm_(chunk.k.mT, new)  # S_C
    return states[:-1], written, states[-1]


def _state_maps(inside: _WithinChunks) -> Tensor:
    """Return the map from the first state of the rows to the last one, which is M · first + U.

    Returns:
        M and U side by side, [B, Hk, r, K, K + V].
    """
    chunks, size = _chunk_matrices(inside, _chunks_of), inside.k.shape[-1]
    unit = torch.eye(size, dtype=inside.k.dtype, device=inside.k.device)
    m = unit.expand(len(chunks[0].w), size, size)
    u = m.new_zeros(len(m), size, inside.u.shape[-1])
    for chunk in chunks:
        taken = torch.baddbmm(chunk.w, chunk.w, m, beta=0)
        m = torch.baddbmm(m * chunk.chunk_decay, chunk.k.mT, taken, alpha=-1)
        new = torch.baddbmm(chunk.u, chunk.w, u, alpha=-1)
        u = torch.baddbmm(u * chunk.chunk_decay, chunk.k.mT, new)
    return torch.cat([m, u], -1).unflatten(0, inside.u.shape[1:4])


def _carry_gradients(
    inside: _WithinChunks, by_scores: Tensor, by_start: Tensor, last: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Carry gradients back through the chunks.

    Args:
        inside: The chunks.
        by_scores: Gradient of n by the outputs of the same chunk, [N, B, Hk, r, C, V].
        by_start: Gradient of the state before each chunk by the outputs of that chunk, [N, B, Hk, r, K, V].
        last: Gradient of the state after the last chunk, [B, Hk, r, K, V]. None: 0.

    Returns:
        The complete gradients of the states after each chunk, of n, and of the state before the first chunk.
    """
    states = by_start.new_empty(len(by_start) + 1, *by_start.shape[1:])
    states[-1] = 0 if last is None else last
    written = torch.empty_like(by_scores)
    parts = (_chunk_views(tensor) for tensor in (by_scores, by_start, written, states[:-1], states[1:]))
    each = list(zip(_chunk_matrices(inside, _chunk_views), *parts, strict=True))
    for chunk, scores, starts, new, before, after in reversed(each):
        torch.baddbmm(scores, chunk.k, after, out=new)
        torch.addcmul(starts, after, chunk.chunk_decay, out=before).baddbmm_(chunk.w.mT, new, alpha=-1)
    return states[1:], written, states[0]


class Heads(NamedTuple):
    """Slices of key heads that are computed together, and of their value heads."""

    keys: slice
    values: slice

    def of(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> list[Tensor]:
        """Return the parts of q, k, v, g and beta [B, S, heads, ..] that belong to these heads."""
        return [q[:, :, self.keys], k[:, :, self.keys], *(tensor[:, :, self.values] for tensor in (v, g, beta))]


def head_groups(length: int, k: Tensor, v: Tensor) -> list[Heads]:
    """Divide the heads into groups that are computed one after the other.

    A group has at most `MOST` elements, or on a CPU `GROUP` elements, which fit its cache.

    Args:
        length: Tokens of a row, with the padding of the last chunk.
        k: [B, S, Hk, K]. Only its shape and device are read.
        v: [B, S, Hv, V]. Only its shape is read.
    """
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

        def chunks() -> Iterable[_WithinChunks]:
            return (_within_chunks(rows, *heads.of(q, k, v, g, beta)) for heads in groups)

        first, maps, again = state, None, chunks
        if exchange is not None:
            once, again = _for_two_passes(chunks, v)
            first, maps = exchange.forward(torch.cat([_state_maps(inside).flatten(1, 2) for inside in once()], 1))
        out = torch.empty_like(v, memory_format=torch.contiguous_format)
        last = torch.empty(len(v), v.shape[2], k.shape[-1], v.shape[-1], dtype=rows.dtype, device=v.device)
        for (_, values), inside in zip(groups, again(), strict=True):
            states, written, after = _carry_states(inside, _first_states(first, values, inside))
            reads = _product(inside.q, states).mul_(inside.start[..., None])
            reads.add_(_product(inside.scores, written))
            out[:, :, values], last[:, values] = rows.to_rows(reads), after.flatten(1, 2)
        ctx.save_for_backward(q, k, v, g, beta, segments, real, first, maps)
        ctx.exchange, ctx.state_dtype = exchange, None if state is None else state.dtype
        return out, last

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, last):
        q, k, v, g, beta, segments, real, first, maps = ctx.saved_tensors
        rows = _Rows.of(v, segments, real)
        groups = head_groups(rows.chunks * rows.size, k, v)

        def chunks() -> Iterable[_BackwardInputs]:
            for heads in groups:
                inside = _within_chunks(rows, *heads.of(q, k, v, g, beta))
                yield _backward_inputs(rows, inside, grad[:, :, heads.values], first, heads.values)

        again = chunks
        if ctx.exchange is not None:
            once, again = _for_two_passes(chunks, v)

            # A function, so that its last chunks are freed before the exchange.
            def grads_of_first_states() -> Tensor:
                """Return the gradients of the first states of this rank's pieces by the outputs of these pieces."""
                grads = []
                for part in once():
                    _, _, first_state_grad = _carry_gradients(part.inside, part.by_scores, part.by_start, None)
                    grads.append(first_state_grad.flatten(1, 2))
                return torch.cat(grads, 1)

            last = ctx.exchange.backward(grads_of_first_states(), maps)
        results = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in (q, k, v, g, beta)]
        first_grad = torch.empty_like(last)
        for heads, part in zip(groups, again(), strict=True):
            after, new, before = _carry_gradients(
                part.inside, part.by_scores, part.by_start, last[:, heads.values].unflatten(1, part.inside.u.shape[2:4])
            )
            first_grad[:, heads.values] = before.flatten(1, 2)
            grads = _backward_within_chunks(rows, part.inside, part.grad, part.states, part.written, after, new)
            for result, result_grad in zip(heads.of(*results), grads, strict=True):
                result.copy_(rows.to_rows(result_grad))
        return *results, None, None, None if ctx.state_dtype is None else first_grad.to(ctx.state_dtype), None


def _for_two_passes(
    chunks: Callable[[], Iterable[T]], v: Tensor
) -> tuple[Callable[[], Iterable[T]], Callable[[], Iterable[T]]]:
    """Return functions that return the chunks before and after an exchange.

    The chunks are kept during the exchange, or computed again if they are larger than `MOST` elements.
    """
    if v.numel() > MOST:
        return chunks, chunks
    kept = list(chunks())
    return lambda: kept, lambda: kept


def _first_states(states: Tensor | None, values: slice, inside: _WithinChunks) -> Tensor:
    """Return the first states of some value heads, [B, Hk, r, K, V], from `states` [B, Hv, K, V], or zeros."""
    heads, size = inside.u.shape[2:4], (inside.k.shape[-1], inside.u.shape[-1])
    if states is None:
        return inside.u.new_zeros(inside.u.shape[1], *heads, *size)
    return states[:, values].to(inside.u.dtype).unflatten(1, heads)


class _BackwardInputs(NamedTuple):
    """Values of some heads that the backward needs.

    Attributes:
        inside: The chunks.
        grad: Gradient of the outputs, [N, B, Hk, r, C, V].
        states: The states before each chunk.
        written: n, what each token writes.
        by_scores: Gradient of n by the outputs of the same chunk.
        by_start: Gradient of the state before each chunk by the outputs of that chunk.
    """

    inside: _WithinChunks
    grad: Tensor
    states: Tensor
    written: Tensor
    by_scores: Tensor
    by_start: Tensor


def _backward_inputs(
    rows: _Rows, inside: _WithinChunks, grad: Tensor, first: Tensor | None, values: slice
) -> _BackwardInputs:
    grad = rows.to_chunks(grad, inside.k.shape[2])
    if rows.real is not None:
        grad = grad.masked_fill_(~rows.real[..., None], 0)
    states, written, _ = _carry_states(inside, _first_states(first, values, inside))
    by_start = inside.q.mT @ (grad * inside.start[..., None])
    return _BackwardInputs(inside, grad, states, written, inside.scores.mT @ grad, by_start)


def _backward_within_chunks(
    rows: _Rows, inside: _WithinChunks, grad: Tensor, states: Tensor, written: Tensor, after: Tensor, new: Tensor
) -> tuple[Tensor, ...]:
    """Compute the gradients of q, k, v, g and beta, in the layout of chunks.

    Args:
        rows: The division into chunks.
        inside: The chunks.
        grad: Gradient of the outputs, [N, B, Hk, r, C, V].
        states: The states before each chunk, [N, B, Hk, r, K, V].
        written: n, [N, B, Hk, r, C, V].
        after: Gradient of the states after each chunk, [N, B, Hk, r, K, V].
        new: Gradient of n, [N, B, Hk, r, C, V].
    """
    q, k, v, beta = inside.q, inside.k, inside.v, inside.beta

    # The part of an output that reads the state: start_t · S_0ᵀ q_t.
    read = grad @ states.mT  # [.., C, K]
    start_grad = vecdot(read, q)
    q_grad = _sum_over_value_heads(read.mul_(inside.start[..., None]))

    # The state after the chunk: chunk_decay · S_0 + Σ_t end_t · k_t n_tᵀ. Names with `log` are gradients by the
    # logarithm of a decay.
    write = written @ after.mT  # [.., C, K]
    end_log_grad = vecdot(write, k).mul_(inside.end)
    k_grad = _sum_over_value_heads(write.mul_(inside.end[..., None]))
    chunk_decay_log_grad = (after * states).sum((-2, -1)).mul_(inside.chunk_decay[..., 0, 0])

    # n = u - w S_0 with u = inverse · (β v) and w = inverse · (β start k). First the gradients of β v and β start k.
    v_grad = inside.inverse.mT @ new
    w_grad = inside.inverse.mT @ (new @ states.mT).neg_()
    system_grad = (v_grad @ inside.u.mT).add_(w_grad @ inside.w.mT).neg_()  # of L
    by_key = vecdot(w_grad, k)
    beta_grad = vecdot(v_grad, v).addcmul_(by_key, inside.start)
    start_grad.addcmul_(by_key, beta)
    v_grad.mul_(beta[..., None])
    k_grad += _sum_over_value_heads(w_grad.mul_((beta * inside.start)[..., None]))

    # L = β decay kk below the diagonal, and scores = decay qk. `products` is the gradient of log decay.
    system_grad = system_grad.tril_(-1).mul_(inside.decay)
    products = system_grad * inside.kk
    beta_grad += products.sum(-1)
    products.mul_(beta[..., None])
    kk_grad = _sum_over_value_heads(system_grad.mul_(beta[..., None]))
    scores_grad = (grad @ written.mT).mul_(inside.decay)
    products.addcmul_(scores_grad, inside.qk)
    qk_grad = _sum_over_value_heads(scores_grad)
    q_grad += qk_grad @ k
    k_grad += qk_grad.mT @ q + (kk_grad + kk_grad.mT) @ k

    # log decay_ij = G_i - G_j, log start_t = G_t, log end_t = G_C - G_t and log chunk_decay = G_C. G is a
    # cumulative sum of g.
    sums_grad = products.sum(-1).sub_(products.sum(-2)).addcmul_(start_grad, inside.start).sub_(end_log_grad)
    sums_grad[..., -1] += end_log_grad.sum(-1) + chunk_decay_log_grad
    g_grad = _cumsum_in_documents(rows, sums_grad, backward=True)
    if rows.real is not None:
        g_grad, beta_grad = g_grad.masked_fill_(~rows.real, 0), beta_grad.masked_fill_(~rows.real, 0)
    scale = q.shape[-1] ** -0.5
    q_grad = _l2_norm_backward(q_grad * scale, q / scale, inside.inverse_q)
    return q_grad, _l2_norm_backward(k_grad, k, inside.inverse_k), v_grad, g_grad, beta_grad


def _l2_norm_backward(grad: Tensor, normed: Tensor, inverse: Tensor) -> Tensor:
    """Return the gradient of x, given that of x / |x|, the normalised x, and 1 / |x|."""
    return (grad - normed * vecdot(grad, normed)[..., None]).mul_(inverse)


def _sum_over_value_heads(grad: Tensor) -> Tensor:
    """Sum a gradient over the value heads of each key head, [N, B, Hk, r, ..] to [N, B, Hk, 1, ..]."""
    return grad if grad.shape[3] == 1 else grad.sum(3, keepdim=True)
