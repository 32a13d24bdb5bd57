"""Packed rows by torch's variable-length flash attention, on CUDA in half precision: documents cost their own length
squared, where a mask over the row costs the row's, and no mask is held.

The kernel is chosen only where it proves itself: `prove` computes a small case on the device itself, forward and
backward, and compares it with `SdpaKernel`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from dtrain.attention.kernels import Abilities, Kernel, SdpaKernel, Span, Visibility

HALF = (torch.bfloat16, torch.float16)
_PROVED_WITH = ((1, 63, 64, 128), (200, 56))  # documents of two rows of 256
_TIMES = 4.0  # how much farther than SDPA from the result in float32 it may be: sums in another order


class DocumentEnds(NamedTuple):
    """The documents of all rows behind one another: where each begins, and the end of the last [n + 1], int32; the
    longest; keys seen to the left and right of a query, -1: all."""

    ends: Tensor
    longest: int
    window: tuple[int, int]


class VarlenKernel(Kernel):
    """`torch.nn.attention.varlen` where rows hold several documents; rows of one document are SDPA's.

    Needs documents that lie in one piece each, positions that count their tokens, and no other rank's keys, as rows
    have them without context parallel. Reads from the device once per forward and kind of layer.
    """

    name = "varlen"
    abilities = Abilities(
        devices=frozenset({"cuda"}), window=True, documents=True, cache=False, backward=True, context_parallel=False
    )

    def __init__(
        self,
        attend: Callable[..., Tensor] = varlen_attn,  # type: ignore[assignment]  # a tensor unless more is asked for
    ):
        self._attend, self._plain = attend, SdpaKernel()

    def prepare(self, visibility: Visibility, dtype: torch.dtype, device: torch.device) -> list[Span] | DocumentEnds:
        if visibility.query_documents is None:
            return self._plain.prepare(visibility, dtype, device)
        documents = visibility.query_documents  # [B, S]
        begins = torch.ones_like(documents, dtype=torch.bool)
        begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
        ends = torch.nn.functional.pad(begins.flatten().nonzero().flatten(), (0, 1), value=documents.numel())
        window = -1 if visibility.window is None else visibility.window - 1
        return DocumentEnds(ends.to(torch.int32), int(ends.diff().max()), (window, 0))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, prepared: list[Span] | DocumentEnds, scale: float) -> Tensor:
        if not isinstance(prepared, DocumentEnds):
            return self._plain(q, k, v, prepared, scale)
        ends, longest = prepared.ends, prepared.longest
        tokens = (part.flatten(0, 1) for part in (q, k, v))  # [B · S, heads, hd]
        out = self._attend(
            *tokens, ends, ends, longest, longest, scale=scale, window_size=prepared.window, enable_gqa=True
        )
        return out.unflatten(0, q.shape[:2])


def prove(
    kernel: Kernel, *, heads: int, key_heads: int, head_dim: int, window: int | None, dtype: torch.dtype,
    device: torch.device,
) -> str | None:  # fmt: skip
    """Why `kernel` is not to be used for such heads here; None where it computes what SDPA does. No collective, and no
    random number of the run's is drawn."""
    try:
        found = _compute(kernel, heads, key_heads, head_dim, window, dtype, device)
        plain = _compute(SdpaKernel(), heads, key_heads, head_dim, window, dtype, device)
        exact = _compute(SdpaKernel(), heads, key_heads, head_dim, window, torch.float32, device)
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:  # what a torch or a device does not have
        return f"{kernel.name} does not run here: {(str(error).splitlines() or [type(error).__name__])[0]}"
    for one, other, truth in zip(found, plain, exact, strict=True):
        off, usual = (float((some.float() - truth).abs().max()) for some in (one, other))
        if not off <= _TIMES * usual + torch.finfo(dtype).eps * float(truth.abs().max()):
            return f"{kernel.name} gives other numbers than sdpa here: {off:.2e} from the truth, sdpa {usual:.2e}"
    return None


def _compute(
    kernel: Any, heads: int, key_heads: int, head_dim: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """The output and the gradients of q, k and v on fixed numbers."""
    lengths = [list(row) for row in _PROVED_WITH]
    documents = torch.tensor([[n for n, size in enumerate(row) for _ in range(size)] for row in lengths])
    documents[-1, -lengths[-1][-1] :] = -1  # padding
    positions = torch.tensor([[at for size in row for at in range(size)] for row in lengths])
    count = documents.shape[1]
    documents, positions = documents.to(device), positions.to(device)
    draw = torch.Generator().manual_seed(0)

    def drawn(of: int) -> Tensor:
        values = torch.randn(len(lengths), count, of, head_dim, generator=draw).to(HALF[0]).float()
        return values.to(device, dtype)

    q, k, v = (drawn(of).requires_grad_() for of in (heads, key_heads, key_heads))
    visibility = Visibility(count, count, window, positions, positions, documents, documents)
    out = kernel(q, k, v, kernel.prepare(visibility, dtype, device), head_dim**-0.5)
    grads = torch.autograd.grad(out, (q, k, v), drawn(heads))
    return [out.detach(), *grads]
