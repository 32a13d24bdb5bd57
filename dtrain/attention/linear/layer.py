"""Linear attention of Qwen3.5: a short causal convolution and the gated delta rule, in training and decoding.

Both functions read a `LinearMask`, which is built once per forward. Convolution and state begin anew in each document.
Padding belongs to no document: nothing is read from it, and the output of the rule is 0 there. `chunks` has the
arithmetic of the rule, and `context` the exchange under context parallel.

Example of the convolution with width W = 3 and weights w0 w1 w2, for packed documents a0 a1 | b0 b1:

    a0: w2 a0    a1: w1 a0 + w2 a1    b0: w2 b0    b1: w1 b0 + w2 b1

Letters: B rows, S tokens of a row (under context parallel this rank's S/cp), C channels, W the width of the
convolution, Hk key heads, Hv value heads (a multiple of Hk), K and V their sizes. Heads and channels may be those of
one tp rank.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from dtrain.attention.linear.chunks import EPS, chunked
from dtrain.attention.linear.context import Pieces
from dtrain.attention.linear.flash import Borders, FlashDelta, begins_within
from dtrain.attention.packing import Packing

NO_DOCUMENT = -2  # the document of the tokens before a row, which no token belongs to
CACHE_ELEMENTS = 2**17  # elements of the convolution that are computed at a time on a CPU, to fit its cache
MAX_ELEMENTS = 2**26  # the same on other devices


@dataclass(frozen=True)
class LinearMask:
    """Documents and padding of the rows of a forward, for linear layers.

    The mask has R rows of L consecutive tokens: the B rows, or under context parallel the two pieces of each row.

    Attributes:
        width: W.
        segments: Number of documents that began at or before each token, [R, L] int64. Tokens with 0 continue the
            document before the row. None: each row is one document without padding.
        real: [R, L] bool, False on padding. None: there is no padding.
        near: [W - 1, R, L, 1] bool: whether the token 1, 2, ... before is in the same document. None: it always is.
        pieces: The exchange of context parallel. None without context parallel.
        flash: Computes the rule by flash-linear-attention. None: `chunks.chunked` computes it.
        borders: The documents in the form that `flash` needs. None: each row is one document.
    """

    width: int = 4
    segments: Tensor | None = None
    real: Tensor | None = None
    near: Tensor | None = None
    pieces: Pieces | None = None
    flash: FlashDelta | None = None
    borders: Borders | None = None

    @classmethod
    def of(
        cls,
        documents: Tensor | None,
        tokens: int,
        width: int = 4,
        group: Any = None,
        flash: FlashDelta | None = None,
        packing: Packing | None = None,
    ) -> "LinearMask":
        """Return the mask of a forward.

        Args:
            documents: The document of each token (`seq_ids`), -1 on padding, [B, S/cp]. None: each row is one document.
            tokens: S/cp, without padding of sequence parallel.
            width: W.
            group: Context-parallel ranks, which have the rows in the head-tail layout. None without context parallel.
            flash: Computes the rule. None: `chunks.chunked` does.
            packing: Of the full rows. None: if there is `flash`, the host reads the documents from the device.

        Collectives:
            With `group` and `documents`, one all-gather of the last W - 1 ids of each piece.
        """
        pieces = None if group is None or group.size() == 1 else Pieces(group, tokens)
        if documents is None:
            return cls(width, pieces=pieces, flash=flash)
        if pieces is None:
            ids_before = documents[:, :1].expand(-1, width - 1)  # as if the first document had begun before the row
        else:
            ids_before = pieces.before(documents, width - 1, NO_DOCUMENT)
            documents = pieces.split(documents)
        extended = torch.cat([ids_before, documents], 1)  # [R, W - 1 + L]
        real = documents >= 0
        is_first = real & (documents != extended[:, width - 2 : -1])  # the first token of each document
        near = []
        for lag in range(1, width):
            ids_at_lag = extended[:, width - 1 - lag : extended.shape[1] - lag]
            near.append(ids_at_lag == documents)
        borders = None
        if flash is not None:
            if packing is not None:
                begins = _begins_in_pieces(packing, pieces)
            else:
                begins = [row.nonzero()[:, 0].tolist() for row in is_first.cpu()]
            borders = Borders.of(begins, documents.shape[1], documents.device)
        segments = is_first.cumsum(1)
        return cls(width, segments, real, torch.stack(near)[..., None], pieces, flash, borders)

    @classmethod
    def of_lengths(cls, lengths: Tensor, count: int, width: int = 4) -> "LinearMask":
        """Return the mask of rows of one document each, of lengths [B], padded on the right to `count` tokens."""
        documents = (torch.arange(count, device=lengths.device) < lengths[:, None]).long() - 1
        return cls.of(documents, count, width)


def _begins_in_pieces(packing: Packing, pieces: Pieces | None) -> list[list[int]]:
    """Return the indices at which documents begin in each of the R rows of a mask."""
    if pieces is None:
        return [list(begins_of_row) for begins_of_row in packing.begins]
    size = pieces.tokens // 2
    begins = []
    for begins_of_row in packing.begins:
        for piece in pieces.local_pieces:
            begins.append(begins_within(begins_of_row, piece * size, size))
    return begins


def causal_conv(x: Tensor, weight: Tensor, mask: LinearMask) -> Tensor:
    """Compute silu of a causal convolution of each channel, within documents. Sums are in max(float32, the dtype).

    Args:
        x: [B, S, C].
        weight: [C, W]. The last column is multiplied with the token itself.
        mask: The documents.

    Returns:
        [B, S, C] in the dtype of x.

    Collectives:
        Under context parallel, one all-gather of the last W - 1 inputs of each piece, [2, B, W - 1, C] per rank, and in
        the backward one reduce-scatter of the same size.
    """
    if mask.pieces is None:
        return _Convolution.apply(x, None, weight, mask.near)
    window = mask.pieces.before(x, mask.width - 1, 0)
    out = _Convolution.apply(mask.pieces.split(x), window, weight, mask.near)
    return mask.pieces.join(out, x.shape[1])


def last_window(x: Tensor, mask: LinearMask) -> Tensor:
    """Return the last W - 1 inputs of the last document of each row, which the convolution of the next token reads.

    Args:
        x: All inputs, [B, S, C].
        mask: The documents.

    Returns:
        [B, W - 1, C]. Zeros before the beginning of the document.
    """
    count = mask.width - 1
    extended = torch.cat([x.new_zeros(len(x), count, x.shape[2]), x], 1)  # token t is at index t + W - 1
    if mask.real is None or mask.near is None:
        return extended[:, -count:]
    rows = torch.arange(len(x), device=x.device)
    positions = torch.arange(x.shape[1], device=x.device)
    last = (positions * mask.real).amax(1)  # index of the last token that is not padding, [B]
    offsets = torch.arange(1, count + 1, device=x.device)
    window = extended[rows[:, None], last[:, None] + offsets]  # [B, W - 1, C], the last entry is token `last`
    has_token = mask.real.any(1)[:, None]  # False for rows of padding only, [B, 1]
    is_in_document = []  # for each entry of the window, [B, 1]
    for lag in reversed(range(1, count)):
        is_in_document.append(mask.near[lag - 1, rows, last])
    is_in_document.append(has_token)
    is_valid = torch.stack(is_in_document, 1) & has_token[:, None]  # [B, W - 1, 1]
    return torch.where(is_valid, window, 0)


def gated_delta(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, mask: LinearMask
) -> tuple[Tensor, Tensor | None]:
    """Compute the gated delta rule.

    Args:
        q: [B, S, Hk, K]. l2-normalised here, and multiplied by K^-0.5.
        k: [B, S, Hk, K]. l2-normalised here.
        v: [B, S, Hv, V].
        g: Logarithms of the decays, at most 0, [B, S, Hv].
        beta: [B, S, Hv].
        mask: The documents.

    Returns:
        The output, [B, S, Hv, V] in the dtype of v, and the last state, [B, Hv, K, V] in max(float32, the dtype). The
        state is None under context parallel and with `mask.flash`.

    Collectives:
        Under context parallel, one all-gather of the pieces' maps, [2, B, Hv, K, K + V] per rank, and in the backward
        one of [2, B, Hv, K, V] per rank.
    """
    if mask.pieces is None and mask.flash is None:
        return chunked(q, k, v, g, beta, mask.segments, mask.real)
    length = v.shape[1]
    if mask.pieces is not None:
        q, k, v, g, beta = (mask.pieces.split(tensor) for tensor in (q, k, v, g, beta))
    if mask.flash is not None:
        out = mask.flash(q, k, v, g, beta, mask.borders, mask.real, mask.pieces)
    else:
        out, _ = chunked(q, k, v, g, beta, mask.segments, mask.real, exchange=mask.pieces)
    if mask.pieces is not None:
        out = mask.pieces.join(out, length)
    return out, None


def conv_step(x: Tensor, weight: Tensor, window: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `causal_conv` of the next T tokens of each row, while decoding. Not for training.

    Args:
        x: [B, T, C].
        weight: [C, W].
        window: The W - 1 inputs before these tokens, [B, W - 1, C].

    Returns:
        The output, [B, T, C], and the window after these tokens.
    """
    inputs = torch.cat([window.to(x.dtype), x], 1)
    wide = torch.promote_types(x.dtype, torch.float32)
    convolved = _convolve(inputs.to(wide), weight.to(wide), None)
    return F.silu(convolved).to(x.dtype), inputs[:, x.shape[1] :]


def delta_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `gated_delta` of the next T tokens of each row, while decoding.

    Args:
        q: [B, T, Hk, K].
        k: [B, T, Hk, K].
        v: [B, T, Hv, V].
        g: [B, T, Hv].
        beta: [B, T, Hv].
        state: The state before these tokens, [B, Hv, K, V].

    Returns:
        The output, [B, T, Hv, V] in the dtype of v, and the state after these tokens.
    """
    if q.shape[1] > 1:
        return chunked(q, k, v, g, beta, state=state)
    dtype = v.dtype
    wide = torch.promote_types(dtype, torch.float32)
    q, k, v, g, beta = (tensor[:, 0].to(wide) for tensor in (q, k, v, g, beta))
    repeats = v.shape[1] // k.shape[1]
    q, k = _key_for_value_heads(q, repeats), _key_for_value_heads(k, repeats)  # [B, Hv, 1, K]
    state = state * g.exp()[..., None, None]
    new = (v[..., None, :] - k @ state) * beta[..., None, None]  # [B, Hv, 1, V]
    state = torch.addcmul(state, k.mT, new)
    out = (q * q.shape[-1] ** -0.5) @ state  # [B, Hv, 1, V]
    return out.transpose(1, 2).to(dtype), state


def _key_for_value_heads(key: Tensor, repeats: int) -> Tensor:
    """Normalise the queries or keys of one token, [B, Hk, K], and repeat them for the value heads, [B, Hv, 1, K]."""
    normed = key * (torch.linalg.vecdot(key, key) + EPS).rsqrt()[..., None]
    if repeats > 1:
        normed = normed.repeat_interleave(repeats, 1)
    return normed[..., None, :]


def _convolve(x: Tensor, weight: Tensor, near: Tensor | None) -> Tensor:
    """Compute the convolution of n tokens, [R, n, C].

    Args:
        x: The inputs, from W - 1 tokens before, [R, W - 1 + n, C].
        weight: [C, W].
        near: Whether the token 1, 2, ... before is in the same document, [W - 1, R, n, 1]. None: it always is.
    """
    before = weight.shape[1] - 1
    count = x.shape[1] - before
    total = x[:, before:] * weight[:, before]
    for lag in range(1, before + 1):
        inputs = x[:, before - lag : before - lag + count]  # the tokens `lag` before
        if near is None:
            total.addcmul_(inputs, weight[:, before - lag])
        else:
            total.add_((inputs * weight[:, before - lag]).masked_fill_(~near[lag - 1], 0))
    return total


class _Convolution(torch.autograd.Function):
    """silu of the convolution, [R, L, C], with a written backward.

    Computes some tokens at a time, so that intermediate results fit the cache of a CPU.

    `apply(x, window, weight, near)`:

        x: [R, L, C].
        window: The W - 1 inputs before each row, [R, W - 1, C]. None: zeros.
        weight: [C, W].
        near: [W - 1, R, L, 1], or None.
    """

    @staticmethod
    def forward(ctx, x, window, weight, near):
        ctx.save_for_backward(x, window, weight, near)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        wide = torch.promote_types(x.dtype, torch.float32)
        weight = weight.to(wide)
        for start, stop in _blocks(x):
            inputs = _inputs_of(x, window, start, stop, weight.shape[1], wide)
            convolved = _convolve(inputs, weight, None if near is None else near[:, :, start:stop])
            out[:, start:stop] = F.silu(convolved, inplace=True)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, window, weight, near = ctx.saved_tensors
        wide = torch.promote_types(x.dtype, torch.float32)
        width = weight.shape[1]
        before = width - 1
        wide_weight = weight.to(wide)
        # Gradient of the window and of x, one after the other.
        x_grad = torch.zeros(len(x), before + x.shape[1], x.shape[2], dtype=wide, device=x.device)
        weight_grad = torch.zeros_like(wide_weight)
        for start, stop in _blocks(x):
            inputs = _inputs_of(x, window, start, stop, width, wide)
            near_block = None if near is None else near[:, :, start:stop]
            convolved = _convolve(inputs, wide_weight, near_block)
            convolved_grad = torch.ops.aten.silu_backward(grad[:, start:stop].to(wide), convolved)
            for lag in range(width):
                masked_grad = convolved_grad
                if lag > 0 and near_block is not None:
                    masked_grad = convolved_grad.masked_fill(~near_block[lag - 1], 0)
                tokens = slice(before - lag, before - lag + stop - start)  # the tokens `lag` before
                x_grad[:, start:][:, tokens].addcmul_(masked_grad, wide_weight[:, before - lag])
                weight_grad[:, before - lag] += (masked_grad * inputs[:, tokens]).sum((0, 1))
        window_grad = None if window is None else x_grad[:, :before].to(window.dtype)
        return x_grad[:, before:].to(x.dtype), window_grad, weight_grad.to(weight.dtype), None


def _blocks(x: Tensor) -> list[tuple[int, int]]:
    """Return the first token and the end of each block of tokens that is computed at a time."""
    length = x.shape[1]
    max_elements = CACHE_ELEMENTS if x.device.type == "cpu" else MAX_ELEMENTS
    elements_per_token = max(1, x.shape[0] * x.shape[2])
    size = max(64, max_elements // elements_per_token)
    return [(start, min(start + size, length)) for start in range(0, length, size)]


def _inputs_of(x: Tensor, window: Tensor | None, start: int, stop: int, width: int, dtype: torch.dtype) -> Tensor:
    """Return the inputs of tokens `start` to `stop`, from W - 1 tokens before, [R, W - 1 + n, C]."""
    first = start - (width - 1)
    if first >= 0:
        return x[:, first:stop].to(dtype)
    before = x.new_zeros(len(x), width - 1, x.shape[2]) if window is None else window
    return torch.cat([before.to(dtype), x[:, :stop].to(dtype)], 1)[:, start:]
