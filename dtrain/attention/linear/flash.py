"""The gated delta rule by the kernels of flash-linear-attention (package fla-core,
https://github.com/fla-org/flash-linear-attention), on CUDA in half precision, where `check_flash` finds their
numbers right.

Only the inputs are saved for the backward, as in `chunks`, so that both take the same memory in a plan. Letters are
those of `layer`. A `LinearMask` has R rows of L tokens.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dtrain.attention.linear.chunks import head_groups
from dtrain.attention.linear.context import Pieces


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


def installed() -> FlashDelta | str:
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
