"""The gated delta rule by the kernels of flash-linear-attention, on CUDA in half precision.

The package is fla-core (https://github.com/fla-org/flash-linear-attention). The kernels are only used if their results
pass `check_flash_delta`.

Only the inputs are saved for the backward, as in `chunks`, so that both take the same memory in a plan. Letters are
those of `layer`. A `LinearMask` has R rows of L tokens.

`check_flash_delta` checks the kernels on a device before they are used there. Packed rows, plain rows and pieces of
context parallel are compared with `chunks` in float32, forward and backward. For the pieces, this process computes the
pieces of all ranks.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dtrain.attention.linear.chunks import chunked, head_groups
from dtrain.attention.linear.context import Pieces
from dtrain.attention.varlen import UNSUPPORTED, documents_of, does_not_run, with_gradients

_LENGTHS = ((1, 61, 66, 64), (150, 42))  # documents of two rows of 192 tokens; the last one of each row is padding
_TOLERANCE = 0.02  # relative error of a document's results: several times the error of the kernels in bfloat16


class Borders(NamedTuple):
    """The documents of concatenated rows, as cu_seqlens for the kernels.

    Example: two rows of 4 tokens. Documents begin at tokens 0 and 3 of the first row, and at token 2 of the second row,
    whose first two tokens continue a document of the piece before it. ends = [0, 3, 4, 6, 8], first = [0, 2],
    last = [1, 3], goes_on = [False, True].

    Attributes:
        ends: cu_seqlens of the n documents, int64 [n + 1], on the device.
        host: The same on the host.
        first: Index of the first document of each row, int64 [R].
        last: Index of the last document of each row, int64 [R].
        goes_on: Whether the first document of each row began before the row, bool [R, 1, 1, 1].
    """

    ends: Tensor
    host: Tensor
    first: Tensor
    last: Tensor
    goes_on: Tensor

    @classmethod
    def of(cls, begins: Sequence[Sequence[int]], length: int, device: torch.device) -> "Borders":
        """Return the borders of rows. They are copied to the device in one copy, for which the host does not wait.

        Args:
            begins: For each row, the indices at which documents begin.
            length: Tokens of a row.
            device: The device.
        """
        ends: list[int] = []
        first, last = [], []
        for row, begins_of_row in enumerate(begins):
            first.append(len(ends))
            ends += [row * length, *(row * length + begin for begin in begins_of_row if begin)]
            last.append(len(ends) - 1)
        ends.append(len(begins) * length)
        goes_on = [int(0 not in row) for row in begins]
        pinned = device.type == "cuda"
        host = torch.tensor([*ends, *first, *last, *goes_on], dtype=torch.int64, pin_memory=pinned, device="cpu")
        parts = host.to(device, non_blocking=True).split([len(ends), *[len(begins)] * 3])
        return cls(parts[0], host[: len(ends)], parts[1], parts[2], parts[3].bool()[:, None, None, None])


class FlashDelta:
    """Computes the rule with an operation that has the signature of fla.ops.gated_delta_rule.chunk_gated_delta_rule."""

    def __init__(self, operation: Callable[..., tuple[Tensor, Any]]):
        self._operation = operation

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        borders: Borders | None,
        real: Tensor | None,
        exchange: Pieces | None = None,
    ) -> Tensor:
        """Compute the rule, [R, L, Hv, V] in the dtype of v.

        Args:
            q: [R, L, Hk, K]. Normalised and scaled here.
            k: [R, L, Hk, K]. Normalised here.
            v: [R, L, Hv, V].
            g: [R, L, Hv].
            beta: [R, L, Hv].
            borders: The documents. None: each row is one document, or a part of one.
            real: [R, L] bool, False on padding. See `chunks.chunked`.
            exchange: Context parallel. None: the rows are complete.

        Collectives:
            Those of `exchange`.
        """
        if real is not None:
            hidden = ~real[..., None]
            q, g, beta = q.masked_fill(hidden[..., None], 0), g.masked_fill(hidden, 0), beta.masked_fill(hidden, 0)
        return _Flash.apply(q, k, v, g, beta, self, borders, exchange)

    def run(
        self, parts: Sequence[Tensor], borders: Borders | None, state: Tensor | None, with_last: bool
    ) -> tuple[Tensor, Tensor]:
        """Call the operation. Differentiable.

        Args:
            parts: q, k, v, g, beta.
            borders: The documents.
            state: The state before each row, [R, Hv, K, V], for documents that began before the row. None: zeros.
            with_last: Whether to compute the last states.

        Returns:
            The outputs, [R, L, Hv, V], and the last state of each row, [R, Hv, K, V] in float32. The latter is only
            meaningful if `with_last`.
        """
        rows, length = parts[2].shape[:2]
        if borders is not None:
            parts = tuple(part.flatten(0, 1)[None] for part in parts)
            if state is not None:
                zeros = state.new_zeros(len(borders.host) - 1, *state.shape[1:])
                state = zeros.index_copy(0, borders.first, state * borders.goes_on)
        out, last = self._operation(
            *parts,
            scale=parts[1].shape[-1] ** -0.5,
            initial_state=state,
            output_final_state=with_last,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=None if borders is None else borders.ends,
            cu_seqlens_cpu=None if borders is None else borders.host,
        )
        if with_last and borders is not None:
            last = last.index_select(0, borders.last)
        return out.reshape(rows, length, *out.shape[2:]), last

    def maps(self, parts: Sequence[Tensor], borders: Borders | None) -> Tensor:
        """Return M and U of each row side by side, [R, Hv, K, K + V]. The last state of a row is M · first + U.

        The columns of a state [K, V] are computed independently, so one call with K + V columns computes both: M is the
        last state if the first one is the unit matrix and all values are 0, and U if the first one is 0.
        """
        q, k, v, g, beta = parts
        size, shape = k.shape[-1], (len(v), v.shape[2], k.shape[-1])
        unit = torch.eye(size, dtype=torch.promote_types(v.dtype, torch.float32), device=v.device)
        unit = unit.expand(*shape, size)
        first = torch.cat([unit, unit.new_zeros(*shape, v.shape[-1])], -1)
        values = torch.cat([v.new_zeros(*v.shape[:3], size), v], -1)
        return self.run((q, k, values, g, beta), borders, first, True)[1]


class _Flash(torch.autograd.Function):
    """The rule with a backward that calls the operation again. Without an exchange, a group of heads at a time."""

    @staticmethod
    def forward(ctx, q, k, v, g, beta, rule, borders, exchange):
        first = maps = None
        if exchange is not None:
            first, maps = exchange.forward(rule.maps((q, k, v, g, beta), borders))
            out, _ = rule.run((q, k, v, g, beta), borders, first, False)
        else:
            out = torch.empty_like(v, memory_format=torch.contiguous_format)
            for heads in head_groups(v.shape[1], k, v):
                out[:, :, heads.values], _ = rule.run(heads.of(q, k, v, g, beta), borders, None, False)
        ctx.save_for_backward(q, k, v, g, beta, first, maps)
        ctx.rule, ctx.borders, ctx.exchange = rule, borders, exchange
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        *parts, first, maps = ctx.saved_tensors
        results: Sequence[Tensor]
        if ctx.exchange is not None:
            with torch.enable_grad():
                leaves = [part.detach().requires_grad_() for part in (*parts, first)]
                out, last = ctx.rule.run(leaves[:-1], ctx.borders, leaves[-1], True)
            (first_grad,) = torch.autograd.grad(out, leaves[-1:], grad, retain_graph=True)
            last_grad = ctx.exchange.backward(first_grad, maps)
            results = torch.autograd.grad((out, last), leaves[:-1], (grad, last_grad))
            return *results, None, None, None
        results = [torch.empty_like(part, memory_format=torch.contiguous_format) for part in parts]
        for heads in head_groups(parts[2].shape[1], parts[1], parts[2]):
            with torch.enable_grad():
                leaves = [part.detach().requires_grad_() for part in heads.of(*parts)]
                out, _ = ctx.rule.run(leaves, ctx.borders, None, False)
            for into, part_grad in zip(
                heads.of(*results), torch.autograd.grad(out, leaves, grad[:, :, heads.values]), strict=True
            ):
                into.copy_(part_grad)
        return *results, None, None, None


def installed_flash_delta() -> FlashDelta | str:
    """Return the rule computed by the installed library, or the reason why it cannot be used."""
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except ModuleNotFoundError as error:
        if error.name == "fla":
            return "flash-linear-attention is not installed (pip install 'dtrain[fla]')"
        return f"flash-linear-attention cannot be loaded: {error}"
    except (ImportError, RuntimeError, OSError, AttributeError) as error:  # a Triton or a torch that it does not fit
        return f"flash-linear-attention cannot be loaded: {(str(error).splitlines() or [type(error).__name__])[0]}"
    return FlashDelta(chunk_gated_delta_rule)


def check_flash_delta(
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
    """Compare a rule on this device with `chunked` in float32, forward and backward.

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

    Returns:
        The problem, or None if the results agree within the tolerance.

    Raises:
        torch.OutOfMemoryError: If the device has too little memory for the check.
        torch.AcceleratorError: If a kernel has failed on the device.
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
            results = with_gradients(function, parts, grad)
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except _failures() as error:
            return does_not_run("flash-linear-attention", error)
        wide = [part.float() for part in parts]
        truth = with_gradients(partial(_exact, of_row, is_real), wide, grad.float())
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
