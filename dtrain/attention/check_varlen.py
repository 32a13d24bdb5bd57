"""The check of a device before `segments.Flash` is used on it: a small case of all that will be asked of it, forward
and backward, against `SdpaKernel`'s numbers.

The ranks of an exchange are played one after the other in this process.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from dtrain.attention.blocks import Gradients, Partial, sinks_grad, with_sinks
from dtrain.attention.context import over_keys
from dtrain.attention.kernels import Kernel, SdpaKernel
from dtrain.attention.packing import Packing
from dtrain.attention.segments import Flash, VarlenBlocks, put
from dtrain.attention.varlen import VarlenKernel
from dtrain.attention.visibility import Visibility
from dtrain.parallel.context.batch import join_sequence, shard_sequence

_LENGTHS = ((1, 61, 66, 128), (62, 138, 56))  # documents of two rows of 256, the last of them padding
_WIDEST = 100  # a window that hides something of these
# What is raised for what a torch, a kernel's package or a device does not have.
UNSUPPORTED = RuntimeError, ValueError, TypeError, AttributeError, AssertionError
_TIMES = 4.0  # how much farther than SDPA from the result in float32 it may be: sums in another order


class Case(NamedTuple):
    """Fixed numbers: q [B, S, H, hd], k [B, S, kv, hd], v [B, S, kv, hd_v], grad [B, S, H, hd_v], sinks [H]."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    seen: Visibility
    packing: Packing
    scale: float
    sinks: Tensor | None = None

    @property
    def parts(self) -> list[Tensor]:
        """Return q, k, v, and the sinks where there are some."""
        return [*self[:3], *([] if self.sinks is None else [self.sinks])]


def prove(
    flash: Flash,
    *,
    heads: int,
    key_heads: int,
    head_dim: int,
    value_dim: int,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
    exchange: str | None = None,
    sinks: bool = False,
    is_later: bool = False,
) -> str | None:
    """Return why `flash` is not to be used for such heads here; None where it computes what SDPA does: whole rows, and
    where there is an exchange (allgather or ring) what is asked of it there. head_dim, value_dim: of a head of queries
    and keys, and of values. sinks: whether the heads have some.
    is_later: `later_flash` has put another in the place of SDPA's own for plain causal rows, which are looked at too.
    No collective, and no random number of the run's is drawn."""
    try:
        narrowed = None if window is None else min(window, _WIDEST)
        sizes = heads, key_heads, head_dim, value_dim, narrowed, sinks
        wide, case = (_case(*sizes, case_dtype, device) for case_dtype in (torch.float32, dtype))
        plain, exact = (_whole(SdpaKernel(), inputs) for inputs in (case, wide))
        checks = [("varlen", _whole(VarlenKernel(flash), case), plain, exact)]
        if exchange is not None:
            results = (in_ring if exchange == "ring" else gathered)(flash, case)
            checks.append((f"varlen for {exchange}", results, plain, exact))
        if is_later:
            causal = Visibility(case.seen.queries, case.seen.keys, rows=len(case.q))
            rows, wide = (inputs._replace(seen=causal) for inputs in (case, wide))
            with sdpa_kernel(SDPBackend.MATH):
                usual = _whole(SdpaKernel(), rows)
            checks.append(("sdpa of plain rows", _whole(SdpaKernel(), rows), usual, _whole(SdpaKernel(), wide)))
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except UNSUPPORTED as error:
        return does_not_run("varlen", error)
    return next(filter(None, (difference(name, "sdpa", *numbers) for name, *numbers in checks)), None)


def difference(
    name: str, usual: str, results: Sequence[Tensor], others: Sequence[Tensor], truths: Sequence[Tensor]
) -> str | None:
    """Return how `results`, of `name`, are farther from the truths in float32 than rounding makes the others, of
    `usual`; None where they are not."""
    for result, other, truth in zip(results, others, truths, strict=True):
        off, off_usually = (float((values.float() - truth).abs().max()) for values in (result, other))
        if not off <= _TIMES * off_usually + torch.finfo(result.dtype).eps * float(truth.abs().max()):
            return f"{name} gives other numbers than {usual} here: {off:.2e} from float32, {usual} {off_usually:.2e}"
    return None


def _case(
    heads: int,
    key_heads: int,
    head_dim: int,
    value_dim: int,
    window: int | None,
    sinks: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> Case:
    documents = documents_of(_LENGTHS)
    positions = torch.tensor([[at for size in row for at in range(size)] for row in _LENGTHS])
    rows, count = documents.shape
    packing = Packing.of(positions, documents)
    assert packing is not None
    documents, positions = documents.to(device), positions.to(device)
    seen = Visibility(count, count, window, positions, positions, documents, documents, rows, packing)
    draw = torch.Generator().manual_seed(0)
    q, k, v, grad = (
        torch.randn(rows, count, of, size, generator=draw).to(torch.bfloat16).float().to(device, dtype)
        for of, size in ((heads, head_dim), (key_heads, head_dim), (key_heads, value_dim), (heads, value_dim))
    )
    scores = torch.linspace(-1.0, 3.0, heads, device=device, dtype=dtype) if sinks else None
    return Case(q, k, v, grad, seen, packing, head_dim**-0.5, scores)


def _whole(kernel: Kernel, case: Case) -> list[Tensor]:
    """The output and the gradients of q, k, v and sinks."""
    prepared = kernel.prepare(case.seen, case.q.dtype, case.q.device)

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        return kernel(q, k, v, prepared, case.scale, sinks)

    return differentiated(attend, case.parts, case.grad)


def gathered(flash: Flash, case: Case, size: int = 2) -> list[Tensor]:
    """Attend as `_whole` does, the queries of each of `size` ranks over gathered keys."""

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        outputs = []
        for rank in range(size):
            calls = put(case.packing.over_gathered(case.seen.window, rank, size), q.device)
            mine = shard_sequence(q, rank, size)
            outputs.append(over_keys(flash, mine, k.flatten(0, 1), v.flatten(0, 1), calls, case.scale, sinks))
        return join_sequence(outputs, 1)

    return differentiated(attend, case.parts, case.grad)


@torch.no_grad()
def in_ring(flash: Flash, case: Case, size: int = 2) -> list[Tensor]:
    """Attend as `_whole` does, the queries of each of `size` ranks over one rank's keys after the other."""
    attention, rows = VarlenBlocks(flash, case.scale), len(case.q)
    q, k, v, grad = ([shard_sequence(part, rank, size).flatten(0, 1) for rank in range(size)] for part in case[:4])
    wide = torch.promote_types(case.q.dtype, torch.float32)
    q_grads, k_grads, v_grads = ([torch.zeros_like(tensor, dtype=wide) for tensor in some] for some in (q, k, v))
    outputs, of_sinks = [], []
    for rank in range(size):
        steps = [put(step, case.q.device) for step in case.packing.in_ring(case.seen.window, rank, size)]
        partial: Partial | None = None
        for distance, step in enumerate(steps):
            source = rank - distance
            partial = attention.forward(q[rank], k[source], v[source], step, partial)
        assert partial is not None
        out, lse = with_sinks(attention, partial, case.sinks)
        outputs.append(out)
        merged = Partial(out.to(q[rank].dtype), lse)
        for distance, step in enumerate(steps):
            source = rank - distance
            gradients = Gradients(q_grads[rank], k_grads[source], v_grads[source])
            attention.backward(grad[rank], q[rank], k[source], v[source], merged, step, gradients)
        of_sinks.append(sinks_grad(attention, grad[rank], merged, case.sinks))
    parts = (outputs, q_grads, k_grads, v_grads)
    joined = [join_sequence([shard.unflatten(0, (rows, -1)) for shard in part], 1) for part in parts]
    return joined if case.sinks is None else [*joined, torch.stack(cast(list[Tensor], of_sinks)).sum(0)]


def documents_of(lengths: Sequence[Sequence[int]]) -> Tensor:
    """Return the documents [B, S] of rows, from the lengths in each; the last one of the last row is padding."""
    documents = torch.tensor([[n for n, size in enumerate(row) for _ in range(size)] for row in lengths])
    documents[-1, -lengths[-1][-1] :] = -1
    return documents


def differentiated(function: Callable[..., Tensor], parts: Iterable[Tensor], grad: Tensor) -> list[Tensor]:
    """Return the output [..] of `function` and its gradients by all parts, those of the output being `grad` [..]."""
    leaves = [part.clone().requires_grad_() for part in parts]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def does_not_run(name: str, error: Exception) -> str:
    return f"{name} does not run here: {(str(error).splitlines() or [type(error).__name__])[0]}"
