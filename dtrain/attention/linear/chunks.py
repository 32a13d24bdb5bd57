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
CACHE_ELEMENTS = 2**19  # elements of the values that are computed at a time on a CPU, to fit its cache
MAX_ELEMENTS = 2**25  # the same on other devices, and the limit for storing chunks during an exchange: a few GiB
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
        num_chunks: N.
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
    num_chunks: int
    size: int
    dtype: torch.dtype
    visible: Tensor
    from_start: Tensor | None
    to_end: Tensor | None
    real: Tensor | None

    @classmethod
    def of(cls, values: Tensor, segments: Tensor | None, real: Tensor | None) -> "_Rows":
        """Return the division of rows [B, S, ..]. The masks are those of `chunked`, [B, S]."""
        length = values.shape[1]
        size = min(CHUNK, length)
        num_chunks = -(-length // size)
        dtype = torch.promote_types(values.dtype, torch.float32)
        visible = torch.ones(size, size, dtype=torch.bool, device=values.device).tril_()
        from_start = to_end = None
        if segments is not None:
            ids = _divide_mask(segments, num_chunks, size)
            last_ids = ids[..., -1:]  # the document of the last token of each chunk
            # The state before the first chunk is that of document 0, before each other chunk that of its last token.
            ids_before = torch.cat([torch.zeros_like(last_ids[:1]), last_ids[:-1]])
            visible = visible & (ids[..., :, None] == ids[..., None, :])
            from_start = ids == ids_before
            to_end = ids == last_ids
        real_in_chunks = None if real is None else _divide_mask(real, num_chunks, size)
        return cls(length, num_chunks, size, dtype, visible, from_start, to_end, real_in_chunks)

    def to_chunks(self, x: Tensor, key_heads: int) -> Tensor:
        """Copy [B, S, H, ..] to chunks, [N, B, Hk, H / Hk, C, ..]. The last chunk is filled with zeros."""
        rows, _, heads = x.shape[:3]
        shape = (self.num_chunks, rows, heads, self.size, *x.shape[3:])
        out = torch.empty(shape, dtype=self.dtype, device=x.device)
        by_token = out.permute(1, 0, 3, 2, *range(4, len(shape)))  # a view, [B, N, C, H, ..]
        num_full = self.length // self.size  # chunks without padding
        num_full_tokens = num_full * self.size
        if num_full:
            by_token[:, :num_full] = x[:, :num_full_tokens].unflatten(1, (num_full, self.size))
        remainder = self.length - num_full_tokens
        if remainder:
            out[num_full:] = 0
            by_token[:, num_full, :remainder] = x[:, num_full_tokens:]
        return out.unflatten(2, (key_heads, heads // key_heads))

    def to_rows(self, x: Tensor) -> Tensor:
        """Convert chunks back to rows, [B, S, H, ..]: the inverse of `to_chunks`."""
        x = x.flatten(2, 3)
        tokens = x.permute(1, 0, 3, 2, *range(4, x.dim()))  # [B, N, C, H, ..]
        return tokens.flatten(1, 2)[:, : self.length]


def _divide_mask(mask: Tensor, num_chunks: int, size: int) -> Tensor:
    """Divide [B, S] into chunks, [N, B, 1, 1, C]. The last chunk is filled with the value of the last token."""
    num_padding = num_chunks * size - mask.shape[1]
    if num_padding:
        mask = torch.cat([mask, mask[:, -1:].expand(-1, num_padding)], 1)
    return mask.unflatten(1, (num_chunks, size)).transpose(0, 1)[:, :, None, None]


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
    q, k, v = rows.to_chunks(q, heads), rows.to_chunks(k, heads), rows.to_chunks(v, heads)
    g, beta = rows.to_chunks(g, heads), rows.to_chunks(beta, heads)
    if rows.real is not None:
        # Padding does not decay, write or read.
        g, beta = g.masked_fill_(~rows.real, 0), beta.masked_fill_(~rows.real, 0)
        q = q.masked_fill_(~rows.real[..., None], 0)
    scale = q.shape[-1] ** -0.5
    inverse_q, inverse_k = _inverse_norm(q), _inverse_norm(k)
    q, k = q.mul_(inverse_q * scale), k.mul_(inverse_k)
    # G, the sums of g. The decay from token j to token i is exp(G_i - G_j).
    log_decay = _cumsum_in_documents(rows, g)
    decay = (log_decay[..., :, None] - log_decay[..., None, :]).masked_fill_(~rows.visible, -torch.inf).exp_()
    start = log_decay.exp()
    end = (log_decay[..., -1:] - log_decay).exp_()
    if rows.from_start is not None and rows.to_end is not None:
        start = start.masked_fill_(~rows.from_start, 0)
        end = end.masked_fill_(~rows.to_end, 0)
    kk, qk = _product(k, k.mT), _product(q, k.mT)
    # L in the strict lower triangle. `solve_triangular` with unitriangular=True reads the diagonal as 1.
    system = (decay * kk).mul_(beta[..., None])
    unit = torch.eye(rows.size, dtype=rows.dtype, device=q.device)
    inverse = torch.linalg.solve_triangular(system, unit.expand_as(system), upper=False, unitriangular=True)
    by_beta = inverse * beta[..., None, :]
    u = _product(by_beta, v)
    w = _product(by_beta.mul_(start[..., None, :]), k)
    scores = torch.mul(qk, decay, out=system)  # in the memory of `system`, which is not needed any more
    chunk_decay = start[..., -1, None, None]
    return _WithinChunks(
        q, k, v, inverse_q, inverse_k, beta, start, end, chunk_decay, decay, kk, qk, inverse, scores, u, w
    )


def _inverse_norm(x: Tensor) -> Tensor:
    """Return 1 / |x| of vectors [.., C, K], [.., C, 1]."""
    return vecdot(x, x).add_(EPS).rsqrt_()[..., None]


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return a [.., m, x] @ b [.., x, n], written to preallocated memory.

    Selective activation checkpointing saves the tensors that `bmm` returns, which would be several times the output.
    The backward computes these products again in any case, so none should be saved.
    """
    leading = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    flat_a = a.expand(*leading, *a.shape[-2:]).flatten(0, -3)
    flat_b = b.expand(*leading, *b.shape[-2:]).flatten(0, -3)
    out = torch.empty(len(flat_a), a.shape[-2], b.shape[-1], dtype=a.dtype, device=a.device)
    return torch.bmm(flat_a, flat_b, out=out).unflatten(0, leading)


def _cumsum_in_documents(rows: _Rows, values: Tensor, backward: bool = False) -> Tensor:
    """Return cumulative sums within each document of each chunk, [N, B, Hk, r, C].

    Each sum includes the token itself and the tokens before it, or with `backward` the tokens after it.
    """
    if rows.from_start is None:
        return cumsum(values.flip(-1)).flip(-1) if backward else cumsum(values)
    # A product with the mask adds the values of one document only.
    visible = rows.visible[:, :, 0, 0].to(values.dtype)  # [N, B, C, C]
    visible = visible.mT if backward else visible
    values_of_heads = values.flatten(2, 3)  # [N, B, Hv, C]
    return _product(visible, values_of_heads.mT).mT.unflatten(2, values.shape[2:4])


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


def _chunk_matrices(chunks: _WithinChunks, unbind: Callable[[Tensor], Sequence[Tensor]]) -> list[_Chunk]:
    """Return the matrices of each chunk. `unbind` is `_chunks_of` or `_chunk_views`."""
    decayed_k = chunks.k * chunks.end[..., None]
    matrices = zip(unbind(chunks.u), unbind(chunks.w), unbind(decayed_k), unbind(chunks.chunk_decay), strict=True)
    return [_Chunk(*of_chunk) for of_chunk in matrices]


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
    if flat.is_contiguous():
        return [flat.view(shape)]
    return [flat[0, 0].expand(shape)]


def _carry_states(chunks: _WithinChunks, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Carry a state through the chunks.

    Args:
        chunks: The chunks.
        state: The state before the first chunk, [B, Hk, r, K, V].

    Returns:
        The states before each chunk, [N, B, Hk, r, K, V]; n, what each token writes, [N, B, Hk, r, C, V]; and the state
        after the last chunk, [B, Hk, r, K, V].
    """
    states = torch.empty(len(chunks.u) + 1, *state.shape, dtype=state.dtype, device=state.device)
    writes = torch.empty_like(chunks.u)
    states[0] = state
    each_chunk = zip(
        _chunk_matrices(chunks, _chunk_views),
        _chunk_views(writes),
        _chunk_views(states[:-1]),
        _chunk_views(states[1:]),
        strict=True,
    )
    for chunk, n, before, after in each_chunk:
        torch.baddbmm(chunk.u, chunk.w, before, alpha=-1, out=n)  # n = u - w S_0
        torch.mul(before, chunk.chunk_decay, out=after).baddbmm_(chunk.k.mT, n)  # S_C
    return states[:-1], writes, states[-1]


def _state_maps(chunks: _WithinChunks) -> Tensor:
    """Return the map from the first state of the rows to the last one, which is M · first + U.

    Returns:
        M and U side by side, [B, Hk, r, K, K + V].
    """
    matrices = _chunk_matrices(chunks, _chunks_of)
    size = chunks.k.shape[-1]
    unit = torch.eye(size, dtype=chunks.k.dtype, device=chunks.k.device)
    m = unit.expand(len(matrices[0].w), size, size)  # before the first chunk: the state itself
    u = m.new_zeros(len(m), size, chunks.u.shape[-1])
    for chunk in matrices:
        # n = u_chunk - w S with S = m · first + u. `w_m` is the part of n that depends on the first state.
        w_m = torch.baddbmm(chunk.w, chunk.w, m, beta=0)
        m = torch.baddbmm(m * chunk.chunk_decay, chunk.k.mT, w_m, alpha=-1)
        n = torch.baddbmm(chunk.u, chunk.w, u, alpha=-1)
        u = torch.baddbmm(u * chunk.chunk_decay, chunk.k.mT, n)
    return torch.cat([m, u], -1).unflatten(0, chunks.u.shape[1:4])


def _carry_gradients(
    chunks: _WithinChunks, by_scores: Tensor, by_start: Tensor, last: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Carry gradients back through the chunks.

    Args:
        chunks: The chunks.
        by_scores: Gradient of n by the outputs of the same chunk, [N, B, Hk, r, C, V].
        by_start: Gradient of the state before each chunk by the outputs of that chunk, [N, B, Hk, r, K, V].
        last: Gradient of the state after the last chunk, [B, Hk, r, K, V]. None: 0.

    Returns:
        The complete gradients of the states after each chunk, of n, and of the state before the first chunk.
    """
    states = by_start.new_empty(len(by_start) + 1, *by_start.shape[1:])
    states[-1] = 0 if last is None else last
    n_grads = torch.empty_like(by_scores)
    each_chunk = zip(
        _chunk_matrices(chunks, _chunk_views),
        _chunk_views(by_scores),
        _chunk_views(by_start),
        _chunk_views(n_grads),
        _chunk_views(states[:-1]),
        _chunk_views(states[1:]),
        strict=True,
    )
    for chunk, by_scores_of_chunk, by_start_of_chunk, n_grad, before, after in reversed(list(each_chunk)):
        torch.baddbmm(by_scores_of_chunk, chunk.k, after, out=n_grad)
        torch.addcmul(by_start_of_chunk, after, chunk.chunk_decay, out=before).baddbmm_(chunk.w.mT, n_grad, alpha=-1)
    return states[1:], n_grads, states[0]


class Heads(NamedTuple):
    """Slices of key heads that are computed together, and of their value heads."""

    keys: slice
    values: slice

    def select(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> list[Tensor]:
        """Return the parts of q, k, v, g and beta [B, S, heads, ..] that belong to these heads."""
        of_keys = [q[:, :, self.keys], k[:, :, self.keys]]
        of_values = [v[:, :, self.values], g[:, :, self.values], beta[:, :, self.values]]
        return of_keys + of_values


def head_groups(length: int, k: Tensor, v: Tensor) -> list[Heads]:
    """Divide the heads into groups that are computed one after the other.

    A group has at most `MAX_ELEMENTS` elements, or on a CPU `CACHE_ELEMENTS` elements, which fit its cache.

    Args:
        length: Tokens of a row, with the padding of the last chunk.
        k: [B, S, Hk, K]. Only its shape and device are read.
        v: [B, S, Hv, V]. Only its shape is read.
    """
    num_key_heads = k.shape[2]
    repeats = v.shape[2] // num_key_heads  # value heads per key head
    elements_per_head = len(k) * length * repeats * max(k.shape[-1], v.shape[-1])
    max_elements = CACHE_ELEMENTS if k.device.type == "cpu" else MAX_ELEMENTS
    size = max(1, min(num_key_heads, max_elements // elements_per_head))
    groups = []
    for start in range(0, num_key_heads, size):
        stop = start + size
        groups.append(Heads(keys=slice(start, stop), values=slice(start * repeats, stop * repeats)))
    return groups


class _Chunked(torch.autograd.Function):
    """The rule with a written backward, one group of heads at a time. The arguments are those of `chunked`."""

    @staticmethod
    def forward(ctx, q, k, v, g, beta, segments, real, state, exchange):
        rows = _Rows.of(v, segments, real)
        groups = head_groups(rows.num_chunks * rows.size, k, v)

        def compute_chunks() -> Iterable[_WithinChunks]:
            return (_within_chunks(rows, *heads.select(q, k, v, g, beta)) for heads in groups)

        get_chunks: Callable[[], Iterable[_WithinChunks]] = compute_chunks
        first, maps = state, None
        if exchange is not None:
            get_chunks = _store_if_small(compute_chunks, v)
            local_maps = torch.cat([_state_maps(chunks).flatten(1, 2) for chunks in get_chunks()], 1)
            first, maps = exchange.forward(local_maps)
            del local_maps
        out = torch.empty_like(v, memory_format=torch.contiguous_format)
        last = torch.empty(len(v), v.shape[2], k.shape[-1], v.shape[-1], dtype=rows.dtype, device=v.device)
        for heads, chunks in zip(groups, get_chunks(), strict=True):
            states, writes, after = _carry_states(chunks, _first_states(first, heads.values, chunks))
            # An output reads the state before the chunk, and what the chunk has written so far.
            reads = _product(chunks.q, states).mul_(chunks.start[..., None])
            reads.add_(_product(chunks.scores, writes))
            out[:, :, heads.values] = rows.to_rows(reads)
            last[:, heads.values] = after.flatten(1, 2)
        ctx.save_for_backward(q, k, v, g, beta, segments, real, first, maps)
        ctx.exchange = exchange
        ctx.state_dtype = None if state is None else state.dtype
        return out, last

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, last):
        q, k, v, g, beta, segments, real, first, maps = ctx.saved_tensors
        rows = _Rows.of(v, segments, real)
        groups = head_groups(rows.num_chunks * rows.size, k, v)

        def compute_inputs() -> Iterable[_BackwardInputs]:
            for heads in groups:
                chunks = _within_chunks(rows, *heads.select(q, k, v, g, beta))
                yield _backward_inputs(rows, chunks, grad[:, :, heads.values], first, heads.values)

        get_inputs: Callable[[], Iterable[_BackwardInputs]] = compute_inputs
        if ctx.exchange is not None:
            get_inputs = _store_if_small(compute_inputs, v)

            # A function, so that its last chunks are freed before the exchange.
            def grads_of_first_states() -> Tensor:
                """Return the gradients of the first states of this rank's pieces by the outputs of these pieces."""
                grads = []
                for inputs in get_inputs():
                    _, _, first_state_grad = _carry_gradients(inputs.chunks, inputs.by_scores, inputs.by_start, None)
                    grads.append(first_state_grad.flatten(1, 2))
                return torch.cat(grads, 1)

            last = ctx.exchange.backward(grads_of_first_states(), maps)
        results = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in (q, k, v, g, beta)]
        first_grad = torch.empty_like(last)
        for heads, inputs in zip(groups, get_inputs(), strict=True):
            last_grad = last[:, heads.values].unflatten(1, inputs.chunks.u.shape[2:4])
            after, n_grad, before = _carry_gradients(inputs.chunks, inputs.by_scores, inputs.by_start, last_grad)
            first_grad[:, heads.values] = before.flatten(1, 2)
            grads = _backward_within_chunks(
                rows, inputs.chunks, inputs.grad, inputs.states, inputs.writes, after, n_grad
            )
            for result, result_grad in zip(heads.select(*results), grads, strict=True):
                result.copy_(rows.to_rows(result_grad))
        state_grad = None if ctx.state_dtype is None else first_grad.to(ctx.state_dtype)
        return *results, None, None, state_grad, None


def _store_if_small(compute: Callable[[], Iterable[T]], v: Tensor) -> Callable[[], Iterable[T]]:
    """Return a function that returns the results of `compute`, and may be called before and after an exchange.

    The results are stored, or computed in each call if they are larger than `MAX_ELEMENTS` elements.
    """
    if v.numel() > MAX_ELEMENTS:
        return compute
    results = list(compute())
    return lambda: results


def _first_states(states: Tensor | None, values: slice, chunks: _WithinChunks) -> Tensor:
    """Return the first states of some value heads, [B, Hk, r, K, V], from `states` [B, Hv, K, V], or zeros."""
    heads = chunks.u.shape[2:4]  # Hk, r
    if states is None:
        return chunks.u.new_zeros(chunks.u.shape[1], *heads, chunks.k.shape[-1], chunks.u.shape[-1])
    return states[:, values].to(chunks.u.dtype).unflatten(1, heads)


class _BackwardInputs(NamedTuple):
    """Values of a group of heads that the backward needs.

    Attributes:
        chunks: The chunks.
        grad: Gradient of the outputs, [N, B, Hk, r, C, V].
        states: The states before each chunk.
        writes: n, what each token writes.
        by_scores: Gradient of n by the outputs of the same chunk.
        by_start: Gradient of the state before each chunk by the outputs of that chunk.
    """

    chunks: _WithinChunks
    grad: Tensor
    states: Tensor
    writes: Tensor
    by_scores: Tensor
    by_start: Tensor


def _backward_inputs(
    rows: _Rows, chunks: _WithinChunks, grad: Tensor, first: Tensor | None, values: slice
) -> _BackwardInputs:
    grad = rows.to_chunks(grad, chunks.k.shape[2])
    if rows.real is not None:
        grad = grad.masked_fill_(~rows.real[..., None], 0)
    states, writes, _ = _carry_states(chunks, _first_states(first, values, chunks))
    by_start = chunks.q.mT @ (grad * chunks.start[..., None])
    by_scores = chunks.scores.mT @ grad
    return _BackwardInputs(chunks, grad, states, writes, by_scores, by_start)


def _backward_within_chunks(
    rows: _Rows, chunks: _WithinChunks, grad: Tensor, states: Tensor, writes: Tensor, after: Tensor, n_grad: Tensor
) -> tuple[Tensor, ...]:
    """Compute the gradients of q, k, v, g and beta, in the layout of chunks.

    Args:
        rows: The division into chunks.
        chunks: The chunks.
        grad: Gradient of the outputs, [N, B, Hk, r, C, V].
        states: The states before each chunk, [N, B, Hk, r, K, V].
        writes: n, [N, B, Hk, r, C, V].
        after: Gradient of the states after each chunk, [N, B, Hk, r, K, V].
        n_grad: Gradient of n, [N, B, Hk, r, C, V].
    """
    q, k, v, beta = chunks.q, chunks.k, chunks.v, chunks.beta

    # The part of an output that reads the state: start_t · S_0ᵀ q_t.
    read = grad @ states.mT  # [.., C, K]
    start_grad = vecdot(read, q)
    q_grad = _sum_over_value_heads(read.mul_(chunks.start[..., None]))

    # The state after the chunk: chunk_decay · S_0 + Σ_t end_t · k_t n_tᵀ. Names with `log` are gradients by the
    # logarithm of a decay.
    write = writes @ after.mT  # [.., C, K]
    end_log_grad = vecdot(write, k).mul_(chunks.end)
    k_grad = _sum_over_value_heads(write.mul_(chunks.end[..., None]))
    chunk_decay_log_grad = (after * states).sum((-2, -1)).mul_(chunks.chunk_decay[..., 0, 0])

    # n = u - w S_0 with u = inverse · (β v) and w = inverse · (β start k). First the gradients of β v and β start k.
    v_grad = chunks.inverse.mT @ n_grad
    w_grad = chunks.inverse.mT @ (n_grad @ states.mT).neg_()
    system_grad = (v_grad @ chunks.u.mT).add_(w_grad @ chunks.w.mT).neg_()  # of L
    by_key = vecdot(w_grad, k)
    beta_grad = vecdot(v_grad, v).addcmul_(by_key, chunks.start)
    start_grad.addcmul_(by_key, beta)
    v_grad.mul_(beta[..., None])
    k_grad += _sum_over_value_heads(w_grad.mul_((beta * chunks.start)[..., None]))

    # L = β decay kk below the diagonal, and scores = decay qk.
    system_grad = system_grad.tril_(-1).mul_(chunks.decay)
    decay_log_grad = system_grad * chunks.kk
    beta_grad += decay_log_grad.sum(-1)
    decay_log_grad.mul_(beta[..., None])
    kk_grad = _sum_over_value_heads(system_grad.mul_(beta[..., None]))
    scores_grad = (grad @ writes.mT).mul_(chunks.decay)
    decay_log_grad.addcmul_(scores_grad, chunks.qk)
    qk_grad = _sum_over_value_heads(scores_grad)
    q_grad += qk_grad @ k
    k_grad += qk_grad.mT @ q + (kk_grad + kk_grad.mT) @ k

    # log decay_ij = G_i - G_j, log start_t = G_t, log end_t = G_C - G_t and log chunk_decay = G_C. G is a
    # cumulative sum of g.
    cumulative_grad = decay_log_grad.sum(-1).sub_(decay_log_grad.sum(-2))  # of G
    cumulative_grad.addcmul_(start_grad, chunks.start).sub_(end_log_grad)
    cumulative_grad[..., -1] += end_log_grad.sum(-1) + chunk_decay_log_grad
    g_grad = _cumsum_in_documents(rows, cumulative_grad, backward=True)
    if rows.real is not None:
        g_grad = g_grad.masked_fill_(~rows.real, 0)
        beta_grad = beta_grad.masked_fill_(~rows.real, 0)
    scale = q.shape[-1] ** -0.5
    q_grad = _l2_norm_backward(q_grad * scale, q / scale, chunks.inverse_q)
    k_grad = _l2_norm_backward(k_grad, k, chunks.inverse_k)
    return q_grad, k_grad, v_grad, g_grad, beta_grad


def _l2_norm_backward(grad: Tensor, normed: Tensor, inverse: Tensor) -> Tensor:
    """Return the gradient of x, given that of x / |x|, the normalised x, and 1 / |x|."""
    return (grad - normed * vecdot(grad, normed)[..., None]).mul_(inverse)


def _sum_over_value_heads(grad: Tensor) -> Tensor:
    """Sum a gradient over the value heads of each key head, [N, B, Hk, r, ..] to [N, B, Hk, 1, ..]."""
    return grad if grad.shape[3] == 1 else grad.sum(3, keepdim=True)
