"""Check flash-linear-attention on a device before `flash` is used there.

Packed rows, plain rows and pieces of context parallel are compared with `chunks` in float32, forward and backward. For
the pieces, this process computes the pieces of all ranks.
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

_LENGTHS = ((1, 61, 66, 64), (150, 42))  # documents of two rows of 192 tokens; the last one of each row is padding
_TOLERANCE = 0.02  # relative error of a document's results: several times the error of the kernels in bfloat16


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
    """Check a rule on this device. Returns the problem, or None if its results are those of `chunked` in float32.

    Each document is compared separately, so that an error in a small document is found. No collectives. The random
    state of the run is not changed.

    Args:
        rule: The rule.
        key_heads: Hk.
        value_heads: Hv.
        key_dim: K.
        value_dim: V.
        dtype: The dtype of the inputs.
        device: The device.
        exchanges: Whether to check the pieces of context parallel, too.
    """
    documents = documents_of(_LENGTHS)
    begins = [[0, *(at for at in range(1, row.numel()) if row[at] != row[at - 1])] for row in documents]
    real, length = documents.to(device) >= 0, documents.shape[1]
    segments = (documents.diff(dim=1, prepend=documents[:, :1] - 1) != 0).cumsum(1).to(device)
    generator = torch.Generator().manual_seed(0)

    def random(heads: int, *size: int) -> Tensor:
        return torch.randn(*documents.shape, heads, *size, generator=generator).to(dtype).to(device)

    q, k = random(key_heads, key_dim), random(key_heads, key_dim)
    v, grad = random(value_heads, value_dim), random(value_heads, value_dim)
    g, beta = -random(value_heads).float().exp() / 16, random(value_heads).sigmoid()  # slow decays
    parts = [q, k, v, g, beta]

    def in_pieces(*inputs: Tensor) -> Tensor:
        """Compute the rule on rows that are divided into 4 pieces, as on 2 context-parallel ranks."""
        size = length // 4
        begins_of_pieces = []
        for row in begins:
            for piece in range(4):
                start = piece * size
                begins_of_pieces.append([at - start for at in row if start <= at < start + size])
        seen = real.unflatten(1, (4, -1)).flatten(0, 1)
        q, k, v, g, beta = (tensor.unflatten(1, (4, -1)).flatten(0, 1) for tensor in inputs)
        out = rule(q, k, v, g, beta, Borders.of(begins_of_pieces, size, device), seen, _Chain(4))
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
        for result, expected in zip(results, truth, strict=True):
            for row, begins_of_row in enumerate(cuts):
                for begin, end in pairwise((*begins_of_row, length)):
                    document = row, slice(begin, end)
                    difference = float((result[document].float() - expected[document]).norm())
                    # `not <=` is also true if the difference is NaN.
                    if not difference <= _TOLERANCE * float(expected[document].norm() + expected.norm() / 100):
                        return f"flash-linear-attention gives other numbers than torch here, in {name}"
    return None


def _failures() -> tuple[type[Exception], ...]:
    """Return the types of errors that mean that this torch, Triton or device does not support the kernels."""
    triton = sys.modules.get("triton.errors")
    of_triton = () if triton is None else (triton.TritonError,)
    return *UNSUPPORTED, *of_triton


class _Chain(Pieces):
    """Pieces of context parallel that are all in this process, [B · P, ..], the pieces of a row one after another."""

    def __init__(self, count: int):
        self.count, self.mine = count, range(count)

    def _gathered(self, x: Tensor) -> Tensor:
        return x.unflatten(0, (-1, self.count)).transpose(0, 1)


def _exact(segments: Tensor | None, real: Tensor | None, *parts: Tensor) -> Tensor:
    """Return the output of `chunked` for q, k, v, g and beta."""
    q, k, v, g, beta = parts
    return chunked(q, k, v, g, beta, segments, real)[0]
