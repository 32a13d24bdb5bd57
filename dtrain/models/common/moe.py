"""Mixture of experts in place of a layer's MLP: the router, the stacked experts and their weighted sum.

A sparse MLP computes T tokens in five steps. For example, 2 rows of 4 tokens (T = 8), E = 4 experts and k = 2 per
token:

    Router            scores experts and chooses k per token: experts [8, 2], weights [8, 2]
    sort_by_expert    sorts the 16 choices by expert: their order [16], and the rows of each expert, `counts` [4]
    GatedExperts      computes the 16 rows, each with its own expert, on the rank that stores the expert
    collect           puts the results back in the order of the tokens: [8, 2, D]
    bmm               adds up each token's results by its weights: [8, D]

Routing is computed in float32 or better, and ties go to the lower expert. No token is dropped, padding is not routed,
and an expert without a token has a gradient of zeros. A token's results are added in the order of its experts, on the
token's own rank. `parallel.experts` sends rows to the experts' ranks and back.

The letters in shapes are those of `decoder`, with T tokens in B rows, E experts, and k experts for each token.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtrain.models.common.config import SIGMOID, ExpertsConfig, ModelConfig
from dtrain.models.common.decoder import GatedMLP, PreNormLayer
from dtrain.models.common.functions import ACTIVATIONS, clamped_gated_activation, gated_activation
from dtrain.models.common.linear import DenseWeight, Linear, ReadParameter
from dtrain.models.common.micro_batch import AdapterContext, LayerContext
from dtrain.models.common.routing import MicroBatchRouting, Routing
from dtrain.parallel.experts import Experts, collect_token_rows, counts_to_list, repeat_token_rows
from dtrain.parallel.tensor import Block, LocalParameters

Choose = Callable[[Tensor], Tensor]
"""Replaces a router's choices [T, k] by other experts, ascending, [T, k]."""

# Added to a sum of sigmoids before it divides: all of them are 0 if all logits are far below 0. As in DeepSeek's code.
_MIN_SCORE_SUM = 1e-20

# Tensor-parallel plan of a sparse MLP. A family adds it to its own plan.
SPARSE_PLAN = {
    "model.layers.*.mlp.gate": "router",
    "model.layers.*.mlp.experts.gate_proj": "expert_colwise",
    "model.layers.*.mlp.experts.up_proj": "expert_colwise",
    "model.layers.*.mlp.experts.down_proj": "expert_rowwise",
    "model.layers.*.mlp.shared_expert": "within",
    "model.layers.*.mlp.shared_expert.gate_proj": "colwise",
    "model.layers.*.mlp.shared_expert.up_proj": "colwise",
    "model.layers.*.mlp.shared_expert.down_proj": "rowwise_within",
    "model.layers.*.mlp.shared_expert_gate": "router",
}


class ExpertStorage(Protocol):
    """Storage of an expert layer's stack of weights W [E, out, in] in the layer's parameters."""

    def grouped_product(self, x: Tensor, counts: Tensor, read: ReadParameter) -> Tensor:
        """Return each row's product with the matrix of its expert.

        Args:
            x: Rows sorted by expert, [m, in].
            counts: Rows of each expert on this rank, [E/ep] int64.
            read: Returns a parameter by name.

        Returns:
            [m, out].
        """

    def dense_weight(self, read: ReadParameter) -> Tensor:
        """Return W [E, out, in] as a dense tensor in the dtype of computation."""


class ExpertMatrices(Protocol):
    """A stack of matrices [E, out, in] that returns dense matrices by index. A tensor is one."""

    @property
    def shape(self) -> Sequence[int]:
        """The sizes [E, out, in]."""

    def __getitem__(self, index: Any, /) -> Tensor:
        """Return a dense matrix [out, in] for a number, or dense matrices [n, out, in] for a slice."""


class OutputWrapper(Protocol):
    """An addition to the output of an expert layer or a router, for example LoRA.

    Attributes:
        scale: Factor of the addition.
    """

    scale: float

    def __call__(
        self,
        layer: "ExpertLinear | Router",
        x: Tensor,
        out: Tensor,
        context: AdapterContext | None,
        counts: Tensor | None = None,
    ) -> Tensor:
        """Return `out` [m, out] with the addition.

        Args:
            layer: The layer.
            x: Its input, [m, in].
            out: Its output, [m, out].
            context: The micro-batch's context. If it is not `enabled`, nothing is added.
            counts: Rows of each expert, [E/ep] int64. None for a router.
        """


class SelectionBias(LocalParameters):
    """Bias [E] that is added to the scores of experts for the choice. It has no gradient and is not trained.

    In files the bias belongs to the router itself (`ModelConfig.unnamed_modules`). It stays in float32, because it
    makes differences between scores that are smaller than a step of bfloat16.
    """

    keeps_full_precision = True
    e_score_correction_bias: Tensor

    def __init__(self, num_experts: int):
        super().__init__()
        self.register_buffer("e_score_correction_bias", torch.empty(num_experts))


class RoutedTokens(NamedTuple):
    """Result of a router.

    Attributes:
        experts: Experts of each token, ascending, [T, k] int64.
        weights: Their weights, [T, k].
        shares: Scores of all experts, divided by their sum, [T, E] in float32 or better.
    """

    experts: Tensor
    weights: Tensor
    shares: Tensor


class Router(LocalParameters):
    """Router that sends each token to the k experts with the largest scores.

    Attributes:
        wrapper: Adds to the logits. None leaves them unchanged.
        top_k: Number of experts of a token, k.
        settings: How experts are scored, chosen and weighted.
        selection: Bias of the scores for the choice. None without one.
    """

    wrapper: OutputWrapper | None = None

    def __init__(self, config: ModelConfig, sizes: ExpertsConfig):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(sizes.num_experts, config.hidden_size))
        self.register_parameter("bias", nn.Parameter(torch.empty(sizes.num_experts)) if sizes.has_biases else None)
        self.top_k = sizes.top_k
        self.settings = sizes.router
        self.selection = SelectionBias(sizes.num_experts) if sizes.router.has_selection_bias else None

    def logits(self, x: Tensor, adapters: AdapterContext | None) -> Tensor:
        """Compute the logits, [T, D] -> [T, E]."""
        weight = self.local("weight")
        bias = None if self.bias is None else self.local("bias")
        if self.settings.score_function == SIGMOID:
            wide = torch.promote_types(x.dtype, torch.float32)
            x_wide, weight = x.to(wide), weight.to(wide)
            bias = None if bias is None else bias.to(wide)
            out = F.linear(x_wide, weight, bias)
        else:
            out = F.linear(x, weight, bias)
        return out if self.wrapper is None else self.wrapper(self, x, out, adapters)

    def forward(self, x: Tensor, choose: Choose | None = None, adapters: AdapterContext | None = None) -> RoutedTokens:
        """Route tokens.

        Args:
            x: [T, D].
            choose: Replaces the router's choices. None keeps them.
            adapters: The micro-batch's context for the wrapper.

        Returns:
            Experts, weights and scores. The weights have the dtype of `x`.
        """
        routed = self.route_tokens(x, choose, adapters)
        return routed._replace(weights=routed.weights.to(x.dtype))

    def route_tokens(self, x: Tensor, choose: Choose | None, adapters: AdapterContext | None) -> RoutedTokens:
        """Compute `forward` without rounding the weights to the dtype of `x`."""
        logits = self.logits(x, adapters)
        wide = torch.promote_types(x.dtype, torch.float32)
        is_sigmoid = self.settings.score_function == SIGMOID
        if is_sigmoid:
            scores = logits.to(wide).sigmoid()
            shares = scores / (scores.sum(-1, keepdim=True) + _MIN_SCORE_SUM)
        else:
            scores = shares = logits.softmax(-1, dtype=wide)
        experts = self.select(scores.detach())
        if choose is not None:
            experts = choose(experts)
        weights = scores.gather(1, experts)
        if self.settings.is_normalized:
            total = weights.sum(-1, keepdim=True)
            if is_sigmoid:
                total = total + _MIN_SCORE_SUM
            weights = weights / total
        if self.settings.scale != 1.0:
            weights = weights * self.settings.scale
        return RoutedTokens(experts, weights, shares)

    def select(self, scores: Tensor) -> Tensor:
        """Return the router's own choices.

        For example, 8 experts in 4 groups, of which 2 groups and 2 experts are chosen, with these scores:

            .5 .1 | .4 .4 | .9 .0 | .2 .1

        The sums of each group's two largest scores are .6, .8, .9 and .3, so the second and the third group are chosen.
        The two largest scores in them are those of experts 4 and 2. Expert 0 is not chosen, although its score is
        larger than that of expert 2.

        Args:
            scores: [T, E].

        Returns:
            Experts, ascending, [T, k] int64.
        """
        if self.selection is not None:
            scores = scores + self.selection.e_score_correction_bias
        num_groups = self.settings.num_groups
        if num_groups > 1:
            by_group = scores.unflatten(1, (num_groups, -1))  # [T, groups, E / groups]
            group_scores = by_group.topk(2, dim=-1).values.sum(-1)
            is_chosen = torch.zeros_like(group_scores, dtype=torch.bool)
            is_chosen.scatter_(1, select_top_k(group_scores, self.settings.num_top_groups), True)
            scores = by_group.masked_fill(~is_chosen[..., None], -torch.inf).flatten(1)
        return select_top_k(scores, self.top_k)


class DenseStack(DenseWeight):
    """Storage of W in one parameter, `weight` [E, out, in]."""

    def grouped_product(self, x: Tensor, counts: Tensor, read: ReadParameter) -> Tensor:
        """Override `ExpertStorage.grouped_product`: [m, in] -> [m, out]."""
        return grouped_product(x, read("weight"), counts)


class ExpertLinear(LocalParameters):
    """A linear layer of every expert, with stacked weights [E, out, in] and optional biases [E, out].

    Attributes:
        weight_storage: Storage of the weights in the layer's parameters.
        wrapper: Adds to the output. None leaves it as it is.
        num_experts: Number of experts E on all ranks.
        in_features: Size of the input.
        out_features: Size of the output.
    """

    weight_storage: ExpertStorage = DenseStack()
    wrapper: OutputWrapper | None = None

    def __init__(self, num_experts: int, in_features: int, out_features: int, bias: bool = False):
        super().__init__()
        self.num_experts, self.in_features, self.out_features = num_experts, in_features, out_features
        self.weight = nn.Parameter(torch.empty(num_experts, out_features, in_features))
        self.register_parameter("bias", nn.Parameter(torch.empty(num_experts, out_features)) if bias else None)

    def forward(self, x: Tensor, counts: Tensor, adapters: AdapterContext | None = None) -> Tensor:
        """Compute each row's product with the matrix of its expert.

        Args:
            x: Rows sorted by expert, [m, in].
            counts: Rows of each expert on this rank, [E/ep] int64.
            adapters: The micro-batch's context for the wrapper. None: the wrapper takes part.

        Returns:
            [m, out].
        """
        out = self.weight_storage.grouped_product(x, counts, self.local)
        if self.bias is not None:
            out = torch.addmm(out, _one_hot_experts(counts, x), self.local("bias"))
        return out if self.wrapper is None else self.wrapper(self, x, out, adapters, counts)

    def extra_repr(self) -> str:
        return f"{self.num_experts} of {self.in_features} -> {self.out_features}"

    def dense_weight(self, part: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Return W [E, out, in] as a dense tensor, as `Linear.dense_weight` does."""
        if part is None:
            return self.weight_storage.dense_weight(self.local)
        return self.weight_storage.dense_weight(lambda name: part(getattr(self, name)))


class GatedExperts(Experts):
    """Gated MLPs of all experts, down(act(gate(x)) · up(x))."""

    def __init__(self, config: ModelConfig, sizes: ExpertsConfig):
        super().__init__()
        self.count = sizes.num_experts
        self.gate_proj = ExpertLinear(sizes.num_experts, config.hidden_size, sizes.intermediate_size, sizes.has_biases)
        self.up_proj = ExpertLinear(sizes.num_experts, config.hidden_size, sizes.intermediate_size, sizes.has_biases)
        self.down_proj = ExpertLinear(sizes.num_experts, sizes.intermediate_size, config.hidden_size, sizes.has_biases)
        self.gated = partial(gated_activation, activation=ACTIVATIONS[config.hidden_act])
        if sizes.clamp is not None:
            self.gated = partial(clamped_gated_activation, gain=sizes.clamp[0], limit=sizes.clamp[1])

    def forward(self, rows: Tensor, counts: Tensor, adapters: AdapterContext | None = None) -> Tensor:
        """Compute rows with their experts, on the experts' ranks.

        Args:
            rows: Rows sorted by expert, [n, D].
            counts: Rows of each expert, [E] int64.
            adapters: The micro-batch's context for the adapters of experts. All ranks have the same.

        Returns:
            [n, D].

        Collectives:
            Those of `compute_on_expert_ranks`.
        """
        return self.compute_on_expert_ranks(rows, counts, partial(self.compute, adapters=adapters))

    def compute(self, x: Tensor, counts: Tensor, adapters: AdapterContext | None) -> Tensor:
        """Compute rows of this rank's experts.

        Args:
            x: Rows sorted by expert, [m, D].
            counts: Rows of each of this rank's experts, [E/ep] int64.
            adapters: The micro-batch's context for the adapters of experts.

        Returns:
            [m, D].
        """
        inner = self.gated(self.gate_proj(x, counts, adapters), self.up_proj(x, counts, adapters))
        return self.down_proj(inner, counts, adapters)


class SparseMLP(Block):
    """Σ over a token's experts of weight · expert(x), plus the output of a shared expert if there is one.

    Attributes:
        routing: Settings that all sparse layers of the model share.
        layer: Number of this layer among the sparse layers.
    """

    routing: Routing  # set, as `layer`, by `connect_routing`
    layer: int

    def __init__(self, config: ModelConfig, sizes: ExpertsConfig):
        super().__init__()
        self.gate = Router(config, sizes)
        self.experts = GatedExperts(config, sizes)
        self.has_shared = sizes.shared_intermediate_size > 0
        if self.has_shared:
            self.add_shared(config, sizes)

    def add_shared(self, config: ModelConfig, sizes: ExpertsConfig) -> None:
        """Add the modules of the expert that all tokens go to. A family may name them otherwise."""
        self.shared_expert = GatedMLP(config, sizes.shared_intermediate_size)
        self.shared_expert_gate = Linear(config.hidden_size, 1, bias=False)

    def shared(self, hidden: Tensor, adapters: AdapterContext | None) -> Tensor:
        """Compute σ(gate(x)) · expert(x), [B, S, D] -> [B, S, D]."""
        gate = self.shared_expert_gate(hidden, adapters).sigmoid()
        return cast(Tensor, gate * self.shared_expert(hidden, adapters))

    def forward(
        self,
        hidden: Tensor,
        is_real: Tensor | None = None,
        micro_batch: MicroBatchRouting | None = None,
        adapters: AdapterContext | None = None,
    ) -> Tensor:
        """Compute the experts' weighted sum, [B, S, D].

        Args:
            hidden: [B, S, D].
            is_real: Which tokens are not padding, [B, S] bool. None if all are.
            micro_batch: Replayed experts and balance loss of this micro-batch, and the record that this layer writes.
            adapters: Whether adapters take part, and their dropout. Adapters of experts have no dropout.

        Collectives:
            Those of `Experts.compute_on_expert_ranks`, and under tensor parallelism those of `enter` and `leave`.
        """
        hidden = self.enter(hidden)
        x = hidden.flatten(0, 1)  # [T, D]
        choose = None if micro_batch is None else partial(micro_batch.choose, self.layer)
        experts, weights, shares = self.route(x, choose, adapters)
        num_real_tokens = None if micro_batch is None else micro_batch.num_real_tokens
        order, counts = sort_by_expert(experts, self.experts.count, is_real, num_real_tokens)
        if micro_batch is not None:
            if micro_batch.copies is None:
                micro_batch.record.counts[self.layer] = counts
            else:  # a token that documents share counts once for each of them
                all_choices = micro_batch.by_document(experts).flatten()
                ones = torch.ones_like(all_choices)
                micro_batch.record.counts[self.layer] = torch.zeros_like(counts).scatter_add_(0, all_choices, ones)
            weights = self.routing.add_balance_gradient(self.layer, weights, shares, experts, micro_batch)
        results = self.experts(repeat_token_rows(self.expert_input(x), order, experts.shape[1]), counts, adapters)
        results_by_token = collect_token_rows(results, order, *experts.shape)  # [T, k, D]
        mixed = torch.bmm(weights[:, None], results_by_token).view_as(hidden)
        if self.has_shared:
            mixed = mixed + self.shared(hidden, adapters)
        return mixed if self.tp is None else self.tp.leave(mixed)

    def route(self, x: Tensor, choose: Choose | None, adapters: AdapterContext | None) -> RoutedTokens:
        """Call the router with x [T, D]. The arguments are those of `Router.forward`."""
        return cast(RoutedTokens, self.gate(x, choose, adapters))

    def expert_input(self, x: Tensor) -> Tensor:
        """Return the input of the experts, [T, D] -> [T, D]. A family may normalise it."""
        return x


def connect_routing(model: nn.Module, num_experts: int) -> Routing:
    """Number the sparse layers of `model`, and set and return one `Routing` for all of them."""
    sparse = [module for module in model.modules() if isinstance(module, SparseMLP)]
    routing = Routing(num_experts, len(sparse))
    for number, mlp in enumerate(sparse):
        mlp.routing, mlp.layer = routing, number
    return routing


def select_top_k(scores: Tensor, top: int) -> Tensor:
    """Return the indexes of the largest scores of each token. Ties go to the lower index.

    Args:
        scores: Scores of experts or of groups of experts, [T, E]. No score may be -0.0, which float32 scores would
            order below 0.0.
        top: Number of experts of a token.

    Returns:
        [T, top] int64, ascending.
    """
    if scores.dtype != torch.float32:
        return scores.sort(stable=True, dim=-1, descending=True).indices[:, :top].sort(-1).values
    # `topk` does not define which of two equal scores it returns. So score and index are joined in one integer key, in
    # which a higher score counts more than any index, and a lower index more than a higher one.
    count = scores.shape[1]
    lower_first = torch.arange(count, 0, -1, device=scores.device)
    # Read as integers, the bits of float32 numbers from 0 up have the order of the numbers. Those of negative numbers
    # have the reverse order, and flipping all bits but the sign restores it.
    bits = scores.view(torch.int32).long()
    is_negative = bits >> 63  # all bits set, or none
    ordered = bits ^ (is_negative & 0x7FFFFFFF)
    keys = ordered * (count + 1) + lower_first
    return keys.topk(top, sorted=False).indices.sort(-1).values


def sort_by_expert(
    experts: Tensor, num_experts: int, is_real: Tensor | None, num_real_tokens: int | None = None
) -> tuple[Tensor, Tensor]:
    """Sort the choices of tokens by expert.

    Args:
        experts: Experts of each token, [T, k] int64.
        num_experts: Number of experts, E.
        is_real: Which tokens are not padding, [T] or [B, S] bool. None if all are. Choices of padding are left out.
        num_real_tokens: Number of tokens that are not padding. None: the host waits for the device to count them.

    Returns:
        Flat indexes into `experts`, sorted by expert, [n] int64, and the rows of each expert, [E] int64.

    Example:
        Tokens 0 and 1 go to experts 0 and 2, token 2 to experts 1 and 2:

        >>> order, counts = sort_by_expert(torch.tensor([[0, 2], [0, 2], [1, 2]]), 3, None)
        >>> order.tolist(), counts.tolist()
        ([0, 2, 4, 1, 3, 5], [2, 1, 3])
    """
    flat = experts.flatten()
    if is_real is not None:
        # Choices of padding get the number E, which is sorted after all experts.
        is_real_choice = is_real.flatten().repeat_interleave(experts.shape[1])
        flat = torch.where(is_real_choice, flat, num_experts)
    order = flat.argsort(stable=True)
    counts = flat.new_zeros(num_experts + 1).scatter_add_(0, flat, torch.ones_like(flat))[:num_experts]
    if is_real is None:
        return order, counts
    if num_real_tokens is None:
        num_rows = sum(counts_to_list(counts, len(flat)))
    else:
        num_rows = num_real_tokens * experts.shape[1]
    return order[:num_rows], counts


class SparseLayer(PreNormLayer):
    """A layer whose MLP is a mixture of experts, if the config has one in this layer.

    Attributes:
        mixture: Class of the mixture.
    """

    mixture: type[SparseMLP] = SparseMLP

    def add_mlp(self, config: ModelConfig, index: int) -> None:
        self.is_sparse = config.is_sparse(index)
        if self.is_sparse and config.experts is not None:
            self.mlp = self.mixture(config, config.experts)
        else:
            super().add_mlp(config, index)

    def feed_forward(self, normed: Tensor, adapters: AdapterContext | None, context: LayerContext | None) -> Tensor:
        """Override `PreNormLayer.feed_forward`: [B, S, D] -> [B, S, D]"""
        if context is None:
            return super().feed_forward(normed, adapters, context)  # a dense layer
        return cast(Tensor, self.mlp(normed, context.is_real, context.routing, adapters))


def grouped_product(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Multiply each row by the matrix of its expert, with gradients of `x` and `weight`.

    Args:
        x: Rows sorted by expert, [m, in].
        weight: This rank's matrices, [E/ep, out, in].
        counts: Rows of each expert, [E/ep] int64.

    Returns:
        x · W[e]ᵀ for the expert e of each row, [m, out].
    """
    return cast(Tensor, _Grouped.apply(x, weight, counts))


def expert_products(x: Tensor, stack: ExpertMatrices, counts: Tensor, *, back: bool = False) -> Tensor:
    """Multiply each row by the matrix of its expert, without autograd.

    A stack in 4 bits is dequantised at once for a fused product, and otherwise one matrix at a time.

    Args:
        x: Rows sorted by expert, [m, in], or [m, out] with `back`.
        stack: This rank's matrices W, [E/ep, out, in].
        counts: Rows of each expert, [E/ep] int64.
        back: Multiply by W[e], as the backward does, instead of W[e]ᵀ.

    Returns:
        [m, out], or [m, in] with `back`.
    """
    if _has_fused_product(x, stack):
        matrices = stack[:]
        if not back:
            matrices = matrices.transpose(1, 2)
        return F.grouped_mm(x, matrices, offs=counts.cumsum(0, dtype=torch.int32))
    out = x.new_empty(len(x), stack.shape[2 if back else 1])
    for expert, (rows, result) in _rows_by_expert(counts, x, out):
        # A dequantised matrix has no name here, so that it is freed before the next one is made.
        torch.mm(rows, stack[expert] if back else stack[expert].t(), out=result)
    return out


class _Grouped(torch.autograd.Function):
    """Autograd of `grouped_product`. torch's own grouped product has no float64, and is a loop on a CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, counts)
        return expert_products(x, weight, counts)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, counts = ctx.saved_tensors
        needs_x_grad, needs_weight_grad, _ = ctx.needs_input_grad
        grad = grads[0].contiguous()
        x_grad = expert_products(grad, weight, counts, back=True) if needs_x_grad else None
        if not needs_weight_grad:
            return x_grad, None, None
        if _has_fused_product(x, weight):
            weight_grad = F.grouped_mm(grad.t(), x, offs=counts.cumsum(0, dtype=torch.int32))
        else:
            weight_grad = torch.zeros_like(weight)  # an expert without rows keeps zeros
            for expert, (grad_rows, x_rows) in _rows_by_expert(counts, grad, x):
                torch.mm(grad_rows.t(), x_rows, out=weight_grad[expert])
        return x_grad, weight_grad, None


def _one_hot_experts(counts: Tensor, x: Tensor) -> Tensor:
    """Return a one-hot matrix of the expert of each row, [m, E] in the dtype of `x`.

    A product with it adds up the rows of each expert in the same order on every device.
    """
    experts = torch.arange(len(counts), device=x.device)
    return (experts.repeat_interleave(counts, output_size=len(x))[:, None] == experts).to(x.dtype)


def _has_fused_product(x: Tensor, weight: ExpertMatrices) -> bool:
    """Check whether torch has a fused product of rows `x` with their experts' matrices."""
    # The fused product needs rows that begin at multiples of 16 bytes. Rows as long as an adapter's rank may not.
    is_aligned = not any(size * x.element_size() % 16 for size in weight.shape[1:])
    return x.is_cuda and is_aligned and x.dtype in (torch.bfloat16, torch.float16, torch.float32)


def _rows_by_expert(counts: Tensor, *tensors: Tensor) -> list[tuple[int, tuple[Tensor, ...]]]:
    """Return the number of each expert that has rows, with its rows of each tensor [m, ...].

    The host waits for the device to compute `counts`.
    """
    sizes = counts_to_list(counts, len(tensors[0]))
    split_tensors = [tensor.split(sizes) for tensor in tensors]
    rows_by_expert = []
    for expert, size in enumerate(sizes):
        if size:
            rows_by_expert.append((expert, tuple(parts[expert] for parts in split_tensors)))
    return rows_by_expert
