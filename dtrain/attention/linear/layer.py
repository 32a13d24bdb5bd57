"""Linear attention of Qwen3.5: a short causal convolution, then the gated delta rule; packed rows, context parallel and
decoding. `chunks` has the arithmetic of the rule, `context` what ranks exchange.

Both read a `LinearMask`, made once per forward. A document's convolution and state begin with it. Padding is in no
document: nothing is read from it, and the rule's output there is 0. Letters: B rows, S tokens of a row (under context
parallel this rank's S/cp), C channels, W the convolution's width, Hk key heads, Hv value heads, a multiple of Hk, K and
V their sizes; heads and channels may be one tp rank's.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from dtrain.attention.linear.chunks import EPS, chunked
from dtrain.attention.linear.context import Pieces
from dtrain.attention.linear.flash import Borders, FlashDelta
from dtrain.attention.packing import Packing

NOWHERE = -2  # the document of what is before a row
BLOCK = 2**17  # elements that a convolution works on at once, on a CPU: what a cache holds
MOST = 2**26  # the same elsewhere


@dataclass(frozen=True)
class LinearMask:
    """The documents and padding of a forward's rows, for linear layers. R: rows of L tokens that lie in one run each:
    the B rows, or under context parallel the two pieces of each.

    segments [R, L] int64: how many documents began at or before a token, 0 where the state before the row goes on.
    real [R, L] bool: what is no padding. near [W - 1, R, L, 1] bool: whether the token 1, 2 .. before is of the same
    document. None: one document without padding. pieces: the exchange of context parallel. flash: what computes the
    rule in place of `chunked`, and borders what it must know of documents.
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
        """documents: the rows' seq_ids [B, S/cp], -1 on padding; None: each row is one document. tokens: S/cp, without
        what sequence parallel pads. width: W. group: of context parallel, whose ranks hold the rows head-tail
        (`parallel.context.batch`). packing: of the whole rows; without it `flash` has the host read where documents
        begin.

        One all-gather over `group`, of the last W - 1 ids of each piece, where there are ids.
        """
        pieces = None if group is None or group.size() == 1 else Pieces(group, tokens)
        if documents is None:
            return cls(width, pieces=pieces, flash=flash)
        if pieces is None:
            before = documents[:, :1].expand(-1, width - 1)  # what a row goes on from, if it does
        else:
            before = pieces.before(documents, width - 1, NOWHERE)
            documents = pieces.split(documents)
        whole = torch.cat([before, documents], 1)  # [R, W - 1 + L]
        real = documents >= 0
        begins = real & (documents != whole[:, width - 2 : -1])
        near = [whole[:, width - 1 - lag : whole.shape[1] - lag] == documents for lag in range(1, width)]
        borders = None
        if flash is not None:
            places = _in_pieces(packing, pieces) if packing else [row.nonzero()[:, 0].tolist() for row in begins.cpu()]
            borders = Borders.of(places, documents.shape[1], documents.device)
        return cls(width, begins.cumsum(1), real, torch.stack(near)[..., None], pieces, flash, borders)

    @classmethod
    def of_lengths(cls, lengths: Tensor, count: int, width: int = 4) -> "LinearMask":
        """Rows of one document of lengths [B] each, in [B, count] tokens, padded on the right."""
        documents = (torch.arange(count, device=lengths.device) < lengths[:, None]).long() - 1
        return cls.of(documents, count, width)


def _in_pieces(packing: Packing, pieces: Pieces | None) -> list[list[int]]:
    """Return where documents begin in each of R rows."""
    if pieces is None:
        return [list(row) for row in packing.begins]
    size = pieces.tokens // 2
    starts = [(row, piece * size) for row in packing.begins for piece in pieces.mine]
    return [[at - start for at in row if start <= at < start + size] for row, start in starts]


def causal_conv(x: Tensor, weight: Tensor, mask: LinearMask) -> Tensor:
    """silu of the causal convolution of each channel by itself: x [B, S, C], weight [C, W] -> [B, S, C] in x's dtype.

    Sums are in max(float32, the dtype). Under context parallel one all-gather of the last W - 1 inputs of each piece,
    [2, B, W - 1, C] a rank, and as large a reduce-scatter backward.
    """
    if mask.pieces is None:
        return _Convolution.apply(x, None, weight, mask.near)
    window = mask.pieces.before(x, mask.width - 1, 0)
    out = _Convolution.apply(mask.pieces.split(x), window, weight, mask.near)
    return mask.pieces.join(out, x.shape[1])


def last_window(x: Tensor, mask: LinearMask) -> Tensor:
    """The last W - 1 inputs [B, W - 1, C] of each row's last document, zeros where it has fewer, from all of them
    x [B, S, C]: what the token after it is convolved with."""
    count = mask.width - 1
    whole = torch.cat([x.new_zeros(len(x), count, x.shape[2]), x], 1)
    if mask.real is None or mask.near is None:
        return whole[:, -count:]
    rows, places = torch.arange(len(x), device=x.device)[:, None], torch.arange(x.shape[1], device=x.device)
    last = (places * mask.real).amax(1, keepdim=True)  # [B, 1]
    window = whole[rows, last + torch.arange(1, count + 1, device=x.device)]  # [B, W - 1, C]
    same = [mask.near[lag, rows[:, 0], last[:, 0]] for lag in reversed(range(count - 1))]  # [B, 1] each
    is_any = mask.real.any(1)[:, None]  # of the last token itself
    seen = torch.stack([*same, is_any], 1) & is_any[:, None]
    return torch.where(seen, window, 0)


def gated_delta(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, mask: LinearMask
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule: q and k [B, S, Hk, K], v [B, S, Hv, V], g and beta [B, S, Hv] -> [B, S, Hv, V] in v's
    dtype, and the last state [B, Hv, K, V] in max(float32, the dtype), which `mask.flash` does not give.

    q and k are l2-normalised here, and q multiplied by K^-0.5. g, at most 0, is the logarithm of the decay. Under
    context parallel no state is returned, and there is one all-gather of the pieces' maps, [2, B, Hv, K, K + V] a rank
    forward and [2, B, Hv, K, V] backward.
    """
    if mask.pieces is None and mask.flash is None:
        return chunked(q, k, v, g, beta, mask.segments, mask.real)
    length = v.shape[1]
    if mask.pieces is not None:
        q, k, v, g, beta = (mask.pieces.split(part) for part in (q, k, v, g, beta))
    if mask.flash is not None:
        out = mask.flash(q, k, v, g, beta, mask.borders, mask.real, mask.pieces)
    else:
        out, _ = chunked(q, k, v, g, beta, mask.segments, mask.real, exchange=mask.pieces)
    return out if mask.pieces is None else mask.pieces.join(out, length), None


def conv_step(x: Tensor, weight: Tensor, window: Tensor) -> tuple[Tensor, Tensor]:
    """`causal_conv` of the next T tokens of each row: x [B, T, C], weight [C, W] and the inputs before, window
    [B, W - 1, C] -> [B, T, C] and the window after. No derivative is kept in mind."""
    whole = torch.cat([window.to(x.dtype), x], 1)
    wide = torch.promote_types(x.dtype, torch.float32)
    sums = _summed(whole.to(wide), weight.to(wide), None)
    return F.silu(sums).to(x.dtype), whole[:, x.shape[1] :]


def delta_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """`gated_delta` of the next T tokens of each row, shapes [B, T, ..] as there, from `state` [B, Hv, K, V] -> [B, T,
    Hv, V] in v's dtype and the state after."""
    if q.shape[1] > 1:
        return chunked(q, k, v, g, beta, state=state)
    wide, dtype = torch.promote_types(v.dtype, torch.float32), v.dtype
    q, k, v, g, beta = (part[:, 0].to(wide) for part in (q, k, v, g, beta))
    repeats = v.shape[1] // k.shape[1]
    q, k = (part * (torch.linalg.vecdot(part, part) + EPS).rsqrt()[..., None] for part in (q, k))
    q, k = ((part.repeat_interleave(repeats, 1) if repeats > 1 else part)[..., None, :] for part in (q, k))
    state = state * g.exp()[..., None, None]
    new = (v[..., None, :] - k @ state) * beta[..., None, None]  # [B, Hv, 1, V]
    state = torch.addcmul(state, k.mT, new)
    return ((q * q.shape[-1] ** -0.5) @ state).transpose(1, 2).to(dtype), state


def _summed(x: Tensor, weight: Tensor, near: Tensor | None) -> Tensor:
    """x [R, W - 1 + n, C], weight [C, W], near [W - 1, R, n, 1] -> [R, n, C]"""
    width = weight.shape[1]
    count = x.shape[1] - width + 1
    sums = x[:, width - 1 :] * weight[:, width - 1]
    for lag in range(1, width):
        part = x[:, width - 1 - lag : width - 1 - lag + count]
        if near is None:
            sums.addcmul_(part, weight[:, width - 1 - lag])
        else:
            sums.add_((part * weight[:, width - 1 - lag]).masked_fill_(~near[lag - 1], 0))
    return sums


class _Convolution(torch.autograd.Function):
    """x [R, L, C], window [R, W - 1, C] or None, weight [C, W], near [W - 1, R, L, 1] or None -> [R, L, C]; some tokens
    at a time, so that what lies between is in the cache of a CPU."""

    @staticmethod
    def forward(ctx, x, window, weight, near):
        ctx.save_for_backward(x, window, weight, near)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        wide = torch.promote_types(x.dtype, torch.float32)
        weight = weight.to(wide)
        for start, stop in _blocks(x):
            part = _from(x, window, start, stop, weight.shape[1], wide)
            sums = _summed(part, weight, None if near is None else near[:, :, start:stop])
            out[:, start:stop] = F.silu(sums, inplace=True)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, window, weight, near = ctx.saved_tensors
        wide, width, before = torch.promote_types(x.dtype, torch.float32), weight.shape[1], weight.shape[1] - 1
        of_x = torch.zeros(len(x), before + x.shape[1], x.shape[2], dtype=wide, device=x.device)
        factors = weight.to(wide)
        of_weight = torch.zeros_like(factors)
        for start, stop in _blocks(x):
            part = _from(x, window, start, stop, width, wide)
            seen = None if near is None else near[:, :, start:stop]
            sums = _summed(part, factors, seen)
            of_sums = torch.ops.aten.silu_backward(grad[:, start:stop].to(wide), sums)
            for lag in range(width):
                some = of_sums if lag == 0 or seen is None else of_sums.masked_fill(~seen[lag - 1], 0)
                at = slice(before - lag, before - lag + stop - start)
                of_x[:, start:][:, at].addcmul_(some, factors[:, before - lag])
                of_weight[:, before - lag] += (some * part[:, at]).sum((0, 1))
        of_window = None if window is None else of_x[:, :before].to(window.dtype)
        return of_x[:, before:].to(x.dtype), of_window, of_weight.to(weight.dtype), None


def _blocks(x: Tensor) -> list[tuple[int, int]]:
    """Return where blocks of tokens begin and end."""
    length = x.shape[1]
    size = max(64, (BLOCK if x.device.type == "cpu" else MOST) // max(1, x.shape[0] * x.shape[2]))
    return [(start, min(start + size, length)) for start in range(0, length, size)]


def _from(x: Tensor, window: Tensor | None, start: int, stop: int, width: int, dtype: torch.dtype) -> Tensor:
    """The inputs from W - 1 before `start`: [R, W - 1 + n, C]."""
    if start >= width - 1:
        return x[:, start - width + 1 : stop].to(dtype)
    before = x.new_zeros(len(x), width - 1, x.shape[2]) if window is None else window
    return torch.cat([before.to(dtype), x[:, :stop].to(dtype)], 1)[:, start:]
