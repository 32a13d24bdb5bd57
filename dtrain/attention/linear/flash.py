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
from dtrain.attention.varlen import UNSUPPORTED, documents_of, does_not_run, first_line, with_gradients

_LENGTHS = ((1, 61, 66, 64), (150, 42))  # documents of two rows of 192 tokens; the last one of each row is padding
_TOLERANCE = 0.02  # relative error of a document's results: several times the error of the kernels in bfloat16


class Borders(NamedTuple):
    """The documents of concatenated rows, as cu_seqlens for the kernels.

    Example: two rows of 4 tokens. Documents begin at tokens 0 and 3 of the first row, and at token 2 of the second row,
    whose first two tokens continue a document of the piece before it. ends = [0, 3, 4, 6, 8], first = [0, 2],
    last = [1, 3], continues = [False, True].

    Attributes:
        ends: cu_seqlens of the n documents, int64 [n + 1], on the device.
        host: The same on the host.
        first: Index of the first document of each row, int64 [R].
        last: Index of the last document of each row, int64 [R].
        continues: Whether the first document of each row began before the row, bool [R, 1, 1, 1].
    """

    ends: Tensor
    host: Tensor
    first: Tensor
    last: Tensor
    continues: Tensor

    @classmethod
    def of(cls, begins: Sequence[Sequence[int]], length: int, device: torch.device) -> "Borders":
        """Return the borders of rows. They are copied to the device in one copy, for which the host does not wait.

        Args:
            begins: For each row, the indices at which documents begin.
            length: Tokens of a row.
            device: The device.
        """
        cu_seqlens: list[int] = []
        first, last, continues = [], [], []
        for row, begins_of_row in enumerate(begins):
            first.append(len(cu_seqlens))
            start = row * length
            cu_seqlens.append(start)  # a border also if the row continues a document
            cu_seqlens += [start + begin for begin in begins_of_row if begin > 0]
            last.append(len(cu_seqlens) - 1)
            continues.append(int(0 not in begins_of_row))
        cu_seqlens.append(len(begins) * length)
        numbers = [*cu_seqlens, *first, *last, *continues]
        host = torch.tensor(numbers, dtype=torch.int64, pin_memory=device.type == "cuda", device="cpu")
        sizes = [len(cu_seqlens), len(first), len(last), len(continues)]
        on_device = host.to(device, non_blocking=True).split(sizes)
        return cls(
            ends=on_device[0],
            host=host[: len(cu_seqlens)],
            first=on_device[1],
            last=on_device[2],
            continues=on_device[3].bool()[:, None, None, None],
        )


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
            # Padding does not read, decay or write.
            is_padding = ~real[..., None]
            q = q.masked_fill(is_padding[..., None], 0)
            g = g.masked_fill(is_padding, 0)
            beta = beta.masked_fill(is_padding, 0)
        return _Flash.apply(q, k, v, g, beta, self, borders, exchange)

    def run(
        self, inputs: Sequence[Tensor], borders: Borders | None, state: Tensor | None, with_last: bool
    ) -> tuple[Tensor, Tensor]:
        """Call the operation. Differentiable.

        Args:
            inputs: q, k, v, g, beta.
            borders: The documents.
            state: The state before each row, [R, Hv, K, V], for documents that began before the row. None: zeros.
            with_last: Whether to compute the last states.

        Returns:
            The outputs, [R, L, Hv, V], and the last state of each row, [R, Hv, K, V] in float32. The latter is only
            meaningful if `with_last`.
        """
        q, k, v, g, beta = inputs
        rows, length = v.shape[:2]
        cu_seqlens = cu_seqlens_on_host = None
        if borders is not None:
            # The kernels accept several documents in a single row only: [1, R · L, heads, ..].
            q, k, v = q.flatten(0, 1)[None], k.flatten(0, 1)[None], v.flatten(0, 1)[None]
            g, beta = g.flatten(0, 1)[None], beta.flatten(0, 1)[None]
            cu_seqlens, cu_seqlens_on_host = borders.ends, borders.host
            if state is not None:
                num_documents = len(borders.host) - 1
                zeros = state.new_zeros(num_documents, *state.shape[1:])
                state = zeros.index_copy(0, borders.first, state * borders.continues)
        out, last = self._operation(
            q,
            k,
            v,
            g,
            beta,
            scale=k.shape[-1] ** -0.5,
            initial_state=state,
            output_final_state=with_last,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=cu_seqlens,
            cu_seqlens_cpu=cu_seqlens_on_host,
        )
        if with_last and borders is not None:
            last = last.index_select(0, borders.last)
        return out.reshape(rows, length, *out.shape[2:]), last

    def maps(self, inputs: Sequence[Tensor], borders: Borders | None) -> Tensor:
        """Return M and U of each row side by side, [R, Hv, K, K + V]. The last state of a row is M · first + U.

        The columns of a state [K, V] are computed independently, so one call with K + V columns computes both: M is the
        last state if the first one is the unit matrix and all values are 0, and U if the first one is 0.
        """
        q, k, v, g, beta = inputs
        rows, key_size, value_size = len(v), k.shape[-1], v.shape[-1]
        wide = torch.promote_types(v.dtype, torch.float32)
        unit = torch.eye(key_size, dtype=wide, device=v.device).expand(rows, v.shape[2], key_size, key_size)
        first = torch.cat([unit, unit.new_zeros(*unit.shape[:3], value_size)], -1)  # [R, Hv, K, K + V]
        values = torch.cat([v.new_zeros(*v.shape[:3], key_size), v], -1)  # [R, L, Hv, K + V]
        _, last = self.run((q, k, values, g, beta), borders, first, True)
        return last


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
                out[:, :, heads.values], _ = rule.run(heads.select(q, k, v, g, beta), borders, None, False)
        ctx.save_for_backward(q, k, v, g, beta, first, maps)
        ctx.rule, ctx.borders, ctx.exchange = rule, borders, exchange
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        *inputs, first, maps = ctx.saved_tensors
        results: Sequence[Tensor]
        if ctx.exchange is not None:
            with torch.enable_grad():
                leaves = [tensor.detach().requires_grad_() for tensor in inputs]
                first = first.detach().requires_grad_()
                out, last = ctx.rule.run(leaves, ctx.borders, first, True)
            (first_grad,) = torch.autograd.grad(out, (first,), grad, retain_graph=True)
            last_grad = ctx.exchange.backward(first_grad, maps)
            results = torch.autograd.grad((out, last), leaves, (grad, last_grad))
            return *results, None, None, None
        results = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in inputs]
        _, k, v, _, _ = inputs
        for heads in head_groups(v.shape[1], k, v):
            with torch.enable_grad():
                leaves = [tensor.detach().requires_grad_() for tensor in heads.select(*inputs)]
                out, _ = ctx.rule.run(leaves, ctx.borders, None, False)
            grads = torch.autograd.grad(out, leaves, grad[:, :, heads.values])
            for result, grad_of_heads in zip(heads.select(*results), grads, strict=True):
                result.copy_(grad_of_heads)
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
        return f"flash-linear-attention cannot be loaded: {first_line(error)}"
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
    rows, length = documents.shape
    is_first = documents.diff(dim=1, prepend=documents[:, :1] - 1) != 0  # the first token of each document
    begins = [row.nonzero()[:, 0].tolist() for row in is_first]
    segments = is_first.cumsum(1).to(device)
    real = documents.to(device) >= 0
    generator = torch.Generator().manual_seed(0)

    def random(num_heads: int, *size: int) -> Tensor:
        return torch.randn(rows, length, num_heads, *size, generator=generator).to(dtype).to(device)

    q, k = random(key_heads, key_dim), random(key_heads, key_dim)
    v, grad = random(value_heads, value_dim), random(value_heads, value_dim)
    g = -random(value_heads).float().exp() / 16  # slow decays
    beta = random(value_heads).sigmoid()
    borders = Borders.of(begins, length, device)

    def packed_rows(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        return rule(q, k, v, g, beta, borders, real)

    def plain_rows(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        return rule(q, k, v, g, beta, None, None)

    def rows_in_pieces(*inputs: Tensor) -> Tensor:
        """Compute the rule on rows that are divided into 4 pieces, as on 2 context-parallel ranks."""
        size = length // 4
        begins_of_pieces = []
        for begins_of_row in begins:
            for start in range(0, length, size):
                begins_of_pieces.append(begins_within(begins_of_row, start, size))
        q, k, v, g, beta, real_pieces = (_in_pieces(tensor) for tensor in (*inputs, real))
        piece_borders = Borders.of(begins_of_pieces, size, device)
        out = rule(q, k, v, g, beta, piece_borders, real_pieces, _Chain(4))
        return out.unflatten(0, (-1, 4)).flatten(1, 2)

    one_document_per_row = [[0]] * rows
    checks = [
        _Check("packed rows", packed_rows, begins, segments, real),
        _Check("plain rows", plain_rows, one_document_per_row, None, None),
    ]
    if exchanges:
        checks.append(_Check("pieces of rows", rows_in_pieces, begins, segments, real))
    inputs = [q, k, v, g, beta]
    wide_inputs = [tensor.float() for tensor in inputs]
    for check in checks:
        try:
            results = with_gradients(check.function, inputs, grad)
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except _failures() as error:
            return does_not_run("flash-linear-attention", error)
        exact = with_gradients(partial(_exact, check.segments, check.real), wide_inputs, grad.float())
        for result, exact_result in zip(results, exact, strict=True):
            if not _documents_agree(result, exact_result, check.begins):
                return f"flash-linear-attention gives other numbers than torch here, in {check.name}"
    return None


class _Check(NamedTuple):
    """A comparison of the rule with `chunked`.

    Attributes:
        name: For the message.
        function: Computes the rule from q, k, v, g and beta.
        begins: For each row, the indices at which documents begin.
        segments: The same for `chunked`, [R, L]. None: each row is one document.
        real: [R, L] bool, False on padding. None: there is no padding.
    """

    name: str
    function: Callable[..., Tensor]
    begins: Sequence[Sequence[int]]
    segments: Tensor | None
    real: Tensor | None


def _documents_agree(result: Tensor, exact: Tensor, begins: Sequence[Sequence[int]]) -> bool:
    """Compare each document of rows [R, L, ..] with the exact result, relative to the norms of document and result."""
    for row, begins_of_row in enumerate(begins):
        for begin, end in pairwise((*begins_of_row, exact.shape[1])):
            document = row, slice(begin, end)
            error = float((result[document].float() - exact[document]).norm())
            norm = float(exact[document].norm() + exact.norm() / 100)
            # `not <=` is also true if the error is NaN.
            if not error <= _TOLERANCE * norm:
                return False
    return True


def begins_within(begins: Sequence[int], start: int, size: int) -> list[int]:
    """Return the beginnings of documents within a piece of a row, relative to the start of the piece.

    Example:
        >>> begins_within([0, 3, 5], start=2, size=3)
        [1]
    """
    return [begin - start for begin in begins if start <= begin < start + size]


def _in_pieces(tensor: Tensor) -> Tensor:
    """Divide rows [R, L, ..] into 4 pieces each, [4 · R, L / 4, ..]."""
    return tensor.unflatten(1, (4, -1)).flatten(0, 1)


def _failures() -> tuple[type[Exception], ...]:
    """Return the types of errors that mean that this torch, Triton or device does not support the kernels."""
    triton = sys.modules.get("triton.errors")
    of_triton = () if triton is None else (triton.TritonError,)
    return *UNSUPPORTED, *of_triton


class _Chain(Pieces):
    """Pieces of context parallel that are all in this process, [B · P, ..], the pieces of a row one after another."""

    def __init__(self, count: int):
        self.count = count
        self.local_pieces = range(count)

    def _gathered(self, x: Tensor) -> Tensor:
        return x.unflatten(0, (-1, self.count)).transpose(0, 1)


def _exact(segments: Tensor | None, real: Tensor | None, *parts: Tensor) -> Tensor:
    """Return the output of `chunked` for q, k, v, g and beta."""
    q, k, v, g, beta = parts
    return chunked(q, k, v, g, beta, segments, real)[0]
