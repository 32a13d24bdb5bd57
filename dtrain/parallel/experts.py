"""Expert parallel: which rank has which experts, and how rows of tokens go to their experts and come back.

A layer's experts are stacks of matrices [E, out, in]. Over ep a rank has E/ep of them, whole experts in a row; FSDP
shards those over what is left of its ranks (`fsdp`), and tensor parallel cuts each expert's inner size. Tokens travel:
their counts, the rows, and the results back, three all-to-alls forward and two backward. No row is dropped, and a rank
adds up its own tokens' results, so that no sum depends on the layout (GShard's dispatch, arXiv:2006.16668, without its
capacity).
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from dtrain.base.torch_functions import has_values
from dtrain.parallel.collectives import all_to_all, exchange
from dtrain.parallel.mesh import concatenate_meshes
from dtrain.parallel.placement import chunk_bounds, local_tensor, make_dtensor
from dtrain.parallel.tensor import LocalParameters, LocalView


class Experts(nn.Module):
    """The part of a sparse MLP that has the experts' stacks as its children's parameters."""

    count: int  # of experts in the whole model's layer
    ep: DeviceMesh | None = None  # set by `shard_experts`

    def compute_on_expert_ranks(
        self, rows: Tensor, counts: Tensor, compute: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """rows [n, D] of this rank, sorted by expert, counts [E] int64 of each -> their results [n, D'], by
        `compute(rows [m, D] of this rank's experts, sorted by expert, counts [E/ep])` -> [m, D'].

        Under ep three all-to-alls (the counts, for which the host waits, rows, results), two of them again backward."""
        if self.ep is None:
            return compute(rows, counts)
        ranks, group = self.ep.size(), self.ep.get_group()
        each = [len(counts) // ranks] * ranks
        theirs = all_to_all(counts, each, each, group).view(ranks, -1)  # [ep, E/ep]
        both = torch.stack([counts.view(ranks, -1).sum(1), theirs.sum(1)])
        if has_values(both):
            sends, receives = both.tolist()
        else:
            sends, receives = counts_to_list(both[0], len(rows)), counts_to_list(both[1], len(rows))
        numbers = torch.arange(len(counts) // ranks, device=counts.device).repeat(ranks)
        order = numbers.repeat_interleave(theirs.flatten(), output_size=sum(receives)).argsort(stable=True)  # [m]
        back = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=order.device))
        arrived = _Permuted.apply(exchange(rows, receives, sends, group), order, back)
        results = _Permuted.apply(compute(arrived, theirs.sum(0)), back, order)
        return exchange(results, sends, receives, group)


def expert_parameters(model: nn.Module) -> set[nn.Parameter]:
    """The stacks of all experts in `model`."""
    return {parameter for module in model.modules() if isinstance(module, Experts) for parameter in module.parameters()}


def shard_experts(model: nn.Module, ep: DeviceMesh, tp: DeviceMesh) -> None:
    """Leave this rank E/ep of the experts of each layer of `model`, whose plan over the one-dimensional `tp` is
    applied. Their parameters become DTensors over (ep, tp), or over `ep` where tp has one rank. No collective."""
    both = concatenate_meshes(ep, tp) if tp.size() > 1 else ep
    cut: dict[nn.Parameter, nn.Parameter] = {}  # what is shared before is shared after
    for experts in (module for module in model.modules() if isinstance(module, Experts)):
        experts.ep = ep
        for module in (inner for inner in experts.modules() if isinstance(inner, LocalParameters)):
            for name, held in module._parameters.items():
                if held is not None:
                    if held not in cut:
                        cut[held] = _cut_by_expert(held, both, ep)
                    module._parameters[name] = cut[held]
                    view = module.local_views.get(name, LocalView(None))
                    module.local_views = {**module.local_views, name: replace(view, is_expert=True)}


def _cut_by_expert(held: nn.Parameter, mesh: DeviceMesh, ep: DeviceMesh) -> nn.Parameter:
    local = local_tensor(held)
    start, end = chunk_bounds(held.shape[0], ep.size(), ep.get_local_rank())
    others = held.placements if isinstance(held, DTensor) else ()
    placed = make_dtensor(local.detach()[start:end].clone(), mesh, [Shard(0), *others], held)
    return nn.Parameter(placed, requires_grad=held.requires_grad)


def counts_to_list(counts: Tensor, total: int) -> list[int]:
    """Return counts [n] int64 whose sum is `total` as a list. The host waits for them. Without values, as on the meta
    device, the shares are even."""
    if has_values(counts):
        return counts.tolist()
    return [(total + index) // len(counts) for index in range(len(counts))]


def repeat_token_rows(x: Tensor, order: Tensor, copies: int) -> Tensor:
    """Rows [n, D] of tokens x [T, D], of which each stands in `copies` places in a row: `order` [n] says which of the
    T · copies places each row is, none twice."""
    return cast(Tensor, _Spread.apply(x, order, copies))


def collect_token_rows(rows: Tensor, order: Tensor, tokens: int, copies: int) -> Tensor:
    """`spread` undone: rows [n, D] in their places, [T, copies, D], zeros in the others."""
    places = rows.new_zeros(tokens * copies, rows.shape[1])
    return places.index_copy(0, order, rows).view(tokens, copies, rows.shape[1])


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.tokens, ctx.copies = len(x), copies
        return x[order // copies]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        return collect_token_rows(grads[0], order, ctx.tokens, ctx.copies).sum(1), None, None


class _Permuted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return rows[order]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        return grads[0][back], None, None
