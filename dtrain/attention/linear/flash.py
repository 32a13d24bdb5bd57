"""The gated delta rule by the kernels of flash-linear-attention (package fla-core,
https://github.com/fla-org/flash-linear-attention), on CUDA in half precision, where `check_flash` finds their
numbers right.

Between forward and backward nothing but the inputs is held, as in `chunks`, so that a plan holds for both.
Letters as in `layer`; R rows of L tokens: those of a `LinearMask`.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dtrain.attention.linear.chunks import head_groups
from dtrain.attention.linear.context import Pieces


class Borders(NamedTuple):
    """Borders of the documents of rows, the rows behind one another. ends int64 [n + 1], on the device and on the host:
    where each of n documents begins and the last one ends. first, last int64 [R]: which are a row's first and last one.
    goes_on bool [R, 1, 1, 1]: whether the first one began before the row."""

    ends: Tensor
    host: Tensor
    first: Tensor
    last: Tensor
    goes_on: Tensor

    @classmethod
    def of(cls, begins: Sequence[Sequence[int]], length: int, device: torch.device) -> "Borders":
        """begins: of each row of `length` tokens, where documents begin in it. One copy, which the host does not wait
        for."""
        ends: list[int] = []
        first, last = [], []
        for row, places in enumerate(begins):
            first.append(len(ends))
            ends += [row * length, *(row * length + at for at in places if at)]
            last.append(len(ends) - 1)
        ends.append(len(begins) * length)
        goes_on = [int(0 not in row) for row in begins]
        pinned = device.type == "cuda"
        host = torch.tensor([*ends, *first, *last, *goes_on], dtype=torch.int64, pin_memory=pinned, device="cpu")
        parts = host.to(device, non_blocking=True).split([len(ends), *[len(begins)] * 3])
        return cls(parts[0], host[: len(ends)], parts[1], parts[2], parts[3].bool()[:, None, None, None])


class FlashDelta:
    """The rule by `operation`, which is called as fla.ops.gated_delta_rule.chunk_gated_delta_rule is."""

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
        """q and k [R, L, Hk, K], neither normalised nor scaled, v [R, L, Hv, V], g and beta [R, L, Hv] -> [R, L, Hv, V]
        in v's dtype. borders None: each row is one document, or goes on with one. real [R, L]: as `chunked` has it.
        Collectives are those of the `exchange`."""
        if real is not None:
            hidden = ~real[..., None]
            q, g, beta = q.masked_fill(hidden[..., None], 0), g.masked_fill(hidden, 0), beta.masked_fill(hidden, 0)
        return _Flash.apply(q, k, v, g, beta, self, borders, exchange)

    def run(
        self, parts: Sequence[Tensor], borders: Borders | None, state: Tensor | None, with_last: bool
    ) -> tuple[Tensor, Tensor]:
        """The outputs [R, L, Hv, V] and each row's last state [R, Hv, K, V] in float32 (with_last; else anything),
        differentiable. parts: q, k, v, g, beta. state [R, Hv, K, V]: what first documents that go on go on from."""
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
        """[R, Hv, K, K + V]: M and U, a row's last state being M · first + U. The columns of a state do not meet, so
        one call gives both: M is what becomes of the unit matrix where nothing is written."""
        q, k, v, g, beta = parts
        size, shape = k.shape[-1], (len(v), v.shape[2], k.shape[-1])
        unit = torch.eye(size, dtype=torch.promote_types(v.dtype, torch.float32), device=v.device)
        unit = unit.expand(*shape, size)
        first = torch.cat([unit, unit.new_zeros(*shape, v.shape[-1])], -1)
        values = torch.cat([v.new_zeros(*v.shape[:3], size), v], -1)
        return self.run((q, k, values, g, beta), borders, first, True)[1]


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, g, beta, rule, borders, exchange):
        first = kept = None
        if exchange is not None:
            first, kept = exchange.forward(rule.maps((q, k, v, g, beta), borders))
            out, _ = rule.run((q, k, v, g, beta), borders, first, False)
        else:
            out = torch.empty_like(v, memory_format=torch.contiguous_format)
            for heads in head_groups(v.shape[1], k, v):
                out[:, :, heads.values], _ = rule.run(heads.of(q, k, v, g, beta), borders, None, False)
        ctx.save_for_backward(q, k, v, g, beta, first, kept)
        ctx.rule, ctx.borders, ctx.exchange = rule, borders, exchange
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        *parts, first, kept = ctx.saved_tensors
        results: Sequence[Tensor]
        if ctx.exchange is not None:
            with torch.enable_grad():
                leaves = [part.detach().requires_grad_() for part in (*parts, first)]
                out, last = ctx.rule.run(leaves[:-1], ctx.borders, leaves[-1], True)
            (of_first,) = torch.autograd.grad(out, leaves[-1:], grad, retain_graph=True)
            of_last = ctx.exchange.backward(of_first, kept)
            results = torch.autograd.grad((out, last), leaves[:-1], (grad, of_last))
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
    """The rule by the installed library, or why there is none."""
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except ModuleNotFoundError as error:
        if error.name == "fla":
            return "flash-linear-attention is not installed (pip install 'dtrain[fla]')"
        return f"flash-linear-attention cannot be loaded: {error}"
    except (ImportError, RuntimeError, OSError, AttributeError) as error:  # a Triton or a torch that it does not fit
        return f"flash-linear-attention cannot be loaded: {(str(error).splitlines() or [type(error).__name__])[0]}"
    return FlashDelta(chunk_gated_delta_rule)
