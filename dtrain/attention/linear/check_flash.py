"""The check of flash-linear-attention on a device before `flash` is used there: packed rows, plain rows and the pieces
of context parallel, forward and backward, against `chunks` in float32.

The ranks of an exchange are played one after the other in this process.
"""

import sys
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from dtrain.attention.check_varlen import UNSUPPORTED, differentiated, documents_of, does_not_run
from dtrain.attention.linear.chunks import chunked
from dtrain.attention.linear.context import Pieces
from dtrain.attention.linear.flash import Borders, FlashDelta

_LENGTHS = ((1, 61, 66, 64), (150, 42))  # documents of two rows of 192, the last of them padding
_MOST_OFF = 0.02  # of the results' size in a document: several times what the kernels are off in bfloat16


def prove(
    rule: FlashDelta,
    *,
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    exchanges: bool,
) -> str | None:
    """Return why `rule` is not to be used for such heads here; None where it computes what `chunked` does in float32:
    packed and plain rows, and where there is an exchange their pieces, forward and backward. Each document is compared
    by itself, so that a small one counts. No collective, and no random number of the run's is drawn."""
    documents = documents_of(_LENGTHS)
    begins = [[0, *(at for at in range(1, row.numel()) if row[at] != row[at - 1])] for row in documents]
    real, length = documents.to(device) >= 0, documents.shape[1]
    segments = (documents.diff(dim=1, prepend=documents[:, :1] - 1) != 0).cumsum(1).to(device)
    draw = torch.Generator().manual_seed(0)

    def drawn(heads: int, *size: int) -> Tensor:
        return torch.randn(*documents.shape, heads, *size, generator=draw).to(dtype).to(device)

    q, k = drawn(key_heads, key_dim), drawn(key_heads, key_dim)
    v, grad = drawn(value_heads, value_dim), drawn(value_heads, value_dim)
    g, beta = -drawn(value_heads).float().exp() / 16, drawn(value_heads).sigmoid()  # a state lives long
    parts = [q, k, v, g, beta]

    def in_pieces(*inputs: Tensor) -> Tensor:
        size = length // 4
        places = [[at - n * size for at in row if n * size <= at < (n + 1) * size] for row in begins for n in range(4)]
        seen = real.unflatten(1, (4, -1)).flatten(0, 1)
        q, k, v, g, beta = (tensor.unflatten(1, (4, -1)).flatten(0, 1) for tensor in inputs)
        out = rule(q, k, v, g, beta, Borders.of(places, size, device), seen, _Chain(4))
        return out.unflatten(0, (-1, 4)).flatten(1, 2)

    borders = Borders.of(begins, length, device)
    checks: list[tuple[str, Callable[..., Tensor], Tensor | None, Tensor | None]]
    checks = [
        ("packed rows", lambda q, k, v, g, beta: rule(q, k, v, g, beta, borders, real), segments, real),
        ("plain rows", lambda q, k, v, g, beta: rule(q, k, v, g, beta, None, None), None, None),
    ]
    if exchanges:
        checks.append(("pieces of rows", in_pieces, segments, real))
    for name, function, of_row, is_real in checks:
        try:
            results = differentiated(function, parts, grad)
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except _failures() as error:
            return does_not_run("flash-linear-attention", error)
        wide = [part.float() for part in parts]
        truth = differentiated(partial(_exact, of_row, is_real), wide, grad.float())
        cuts = begins if of_row is not None else [[0], [0]]
        for result, other in zip(results, truth, strict=True):
            for row, places in enumerate(cuts):
                for begin, end in pairwise((*places, length)):
                    at = row, slice(begin, end)
                    off = float((result[at].float() - other[at]).norm())
                    if not off <= _MOST_OFF * float(other[at].norm() + other.norm() / 100):
                        return f"flash-linear-attention gives other numbers than torch here, in {name}"
    return None


def _failures() -> tuple[type[Exception], ...]:
    """Return the errors that are raised for what a torch, a Triton or a device does not have."""
    triton = sys.modules.get("triton.errors")
    of_triton = () if triton is None else (triton.TritonError,)
    return *UNSUPPORTED, *of_triton


class _Chain(Pieces):
    """Pieces that are all here, those of a row side by side: [B · P, ..]."""

    def __init__(self, count: int):
        self.count, self.mine = count, range(count)

    def _gathered(self, x: Tensor) -> Tensor:
        return x.unflatten(0, (-1, self.count)).transpose(0, 1)


def _exact(segments: Tensor | None, real: Tensor | None, *parts: Tensor) -> Tensor:
    q, k, v, g, beta = parts
    return chunked(q, k, v, g, beta, segments, real)[0]
