"""Expert parallel: which rank has which experts, and how tokens travel to their experts and back.

The experts of a layer are stacks of matrices, [E, out, in]. Under expert parallel, a rank has E/ep consecutive experts.
FSDP shards these over the remaining ranks (`fsdp`), and tensor parallel shards the inner size of each expert.

Example: E = 4 experts over ep = 2, so rank 0 has the experts 0 and 1, and rank 1 the experts 2 and 3. Each rank has
sorted its rows (one per token and chosen expert) by expert:

                                  rank 0                          rank 1
    rows of the experts           0: a b   1: c   2: d   3: -     0: e   1: -   2: f   3: g h
    counts                        [2, 1, 1, 0]                    [1, 0, 1, 2]

    1. all-to-all of the counts   received [[2, 1], [1, 0]]       received [[1, 0], [1, 2]]
       (a row per sending rank, a column per local expert)
    2. all-to-all of the rows     a b c | e                       d | f g h
    3. sort by local expert       a b e | c                       d f | g h
    4. compute                    expert 0 on a b e, 1 on c       expert 2 on d f, 3 on g h
    5. undo 3, all-to-all back    results of a b c d              results of e f g h

So there are three all-to-alls in the forward. The backward has two, for the gradients of the rows and of the results.
No row is dropped, in contrast to GShard (arXiv:2006.16668), whose experts have a capacity. Each rank adds up the
results of its own tokens, so that no sum depends on the layout.
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
    """The part of a sparse MLP whose children have the experts' stacks as parameters.

    Attributes:
        count: Experts of the layer in the full model.
        ep: Ranks over which the experts are distributed, set by `shard_experts`. None: this rank has all.
    """

    count: int
    ep: DeviceMesh | None = None

    def compute_on_expert_ranks(
        self, rows: Tensor, counts: Tensor, compute: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """Compute rows on the ranks that have their experts. The module's docstring has an example.

        Args:
            rows: This rank's rows, sorted by expert, [n, D].
            counts: The number of rows of each expert, int64 [E], with n in total.
            compute: Computes the local experts. Its arguments are rows sorted by local expert, [m, D], and the number
                of rows of each, [E/ep]. It returns [m, D'].

        Returns:
            The results in the order of `rows`, [n, D'].

        Collectives:
            Under expert parallel three all-to-alls in the forward: counts (the host waits for these), rows, and
            results. Two in the backward.
        """
        if self.ep is None:
            return compute(rows, counts)
        num_ranks, group = self.ep.size(), self.ep.get_group()
        num_local = len(counts) // num_ranks  # experts of a rank
        counts_per_rank = [num_local] * num_ranks
        received_counts = all_to_all(counts, counts_per_rank, counts_per_rank, group).view(num_ranks, -1)  # [ep, E/ep]
        # Rows to and from each rank, [2, ep]. The host needs them for the sizes of the next messages, so both are read
        # at once.
        rows_per_rank = torch.stack([counts.view(num_ranks, -1).sum(1), received_counts.sum(1)])
        if has_values(rows_per_rank):
            sends, receives = rows_per_rank.tolist()
        else:
            sends = counts_to_list(rows_per_rank[0], len(rows))
            receives = counts_to_list(rows_per_rank[1], len(rows))
        # Rows arrive sorted by sending rank, and then by local expert. A stable sort by local expert alone keeps the
        # order of the ranks within an expert.
        local_experts = torch.arange(num_local, device=counts.device).repeat(num_ranks)
        expert_of_row = local_experts.repeat_interleave(received_counts.flatten(), output_size=sum(receives))
        order = expert_of_row.argsort(stable=True)  # [m]
        inverse_order = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=order.device))
        arrived = _Permute.apply(exchange(rows, receives, sends, group), order, inverse_order)
        results = _Permute.apply(compute(arrived, received_counts.sum(0)), inverse_order, order)
        return exchange(results, sends, receives, group)


def expert_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Return the stacks of all experts in `model`."""
    parameters = set[nn.Parameter]()
    for module in model.modules():
        if isinstance(module, Experts):
            parameters.update(module.parameters())
    return parameters


def shard_experts(model: nn.Module, ep: DeviceMesh, tp: DeviceMesh) -> None:
    """Keep only this rank's E/ep experts of each layer, in place. No collective.

    The experts' parameters become DTensors over (ep, tp), or over `ep` if tp has one rank. Parameters that were shared
    between modules stay shared.

    Args:
        model: Model to which its tensor-parallel plan has been applied.
        ep: Expert-parallel ranks.
        tp: Tensor-parallel ranks, one dimension.
    """
    mesh = concatenate_meshes(ep, tp) if tp.size() > 1 else ep
    sharded: dict[nn.Parameter, nn.Parameter] = {}  # by the parameter that it replaces
    for experts in model.modules():
        if not isinstance(experts, Experts):
            continue
        experts.ep = ep
        for module in experts.modules():
            if not isinstance(module, LocalParameters):
                continue
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                if parameter not in sharded:
                    sharded[parameter] = _shard_by_expert(parameter, mesh, ep)
                module._parameters[name] = sharded[parameter]
                view = module.local_views.get(name, LocalView(None))
                module.local_views = {**module.local_views, name: replace(view, is_expert=True)}


def _shard_by_expert(parameter: nn.Parameter, mesh: DeviceMesh, ep: DeviceMesh) -> nn.Parameter:
    """Return the parameter with only this rank's experts, as a DTensor on `mesh`, whose first dimension is `ep`."""
    local = local_tensor(parameter)
    start, end = chunk_bounds(parameter.shape[0], ep.size(), ep.get_local_rank())
    tp_placements = parameter.placements if isinstance(parameter, DTensor) else ()
    dtensor = make_dtensor(local.detach()[start:end].clone(), mesh, [Shard(0), *tp_placements], parameter)
    return nn.Parameter(dtensor, requires_grad=parameter.requires_grad)


def counts_to_list(counts: Tensor, total: int) -> list[int]:
    """Return counts as a list. The host waits for the device.

    Args:
        counts: int64 [n].
        total: Sum of the counts. Tensors without values, as on the meta device, are assumed to have even counts.

    Example:
        >>> counts_to_list(torch.tensor([3, 0, 4]), 7)
        [3, 0, 4]
        >>> counts_to_list(torch.empty(3, dtype=torch.int64, device="meta"), 7)
        [2, 2, 3]
    """
    if has_values(counts):
        return counts.tolist()
    return [(total + index) // len(counts) for index in range(len(counts))]


def repeat_token_rows(x: Tensor, order: Tensor, copies: int) -> Tensor:
    """Return the token of each row, for tokens that are sent to several experts.

    Example: 2 tokens with 2 copies each have the slots 0 1 (token 0) and 2 3 (token 1). The order [2, 0, 3], in which
    slot 1 is left out, selects the tokens 1, 0, 1.

    Args:
        x: Tokens, [T, D].
        order: The slot of each row, among T · copies slots; no slot appears twice, [n].
        copies: Slots per token.

    Returns:
        [n, D]. In the backward, the gradients of a token's rows are added in the order of the slots.
    """
    return cast(Tensor, _RepeatTokenRows.apply(x, order, copies))


def collect_token_rows(rows: Tensor, order: Tensor, tokens: int, copies: int) -> Tensor:
    """Put rows back into the slots from which `repeat_token_rows` made them.

    Args:
        rows: [n, D].
        order: The slot of each row, [n].
        tokens: T, the number of tokens.
        copies: Slots per token.

    Returns:
        [T, copies, D], with zeros in the slots that have no row.
    """
    slots = rows.new_zeros(tokens * copies, rows.shape[1])
    return slots.index_copy(0, order, rows).view(tokens, copies, rows.shape[1])


class _RepeatTokenRows(torch.autograd.Function):
    """`repeat_token_rows`, whose backward adds in a fixed order (indexing's own backward adds atomically on CUDA)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.tokens, ctx.copies = len(x), copies
        return x[order // copies]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        return collect_token_rows(grads[0], order, ctx.tokens, ctx.copies).sum(1), None, None


class _Permute(torch.autograd.Function):
    """Reorder rows by a permutation. The backward indexes with the inverse permutation, so nothing is added up."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse_order: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_order)
        return rows[order]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        (inverse_order,) = ctx.saved_tensors
        return grads[0][inverse_order], None, None
