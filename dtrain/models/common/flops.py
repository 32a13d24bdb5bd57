"""Training FLOPs of a model per token, as a run's mfu and plan count them, and of a vision tower per patch."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from dtrain.base.name_patterns import matched
from dtrain.models.common.config import LINEAR, SLIDING
from dtrain.models.common.decoder import CausalLM
from dtrain.parallel.experts import expert_parameters

if TYPE_CHECKING:
    from dtrain.models.vision.common import VisionTower


def flops_per_token(model: CausalLM, seq_len: int) -> float:
    """Return the training FLOPs per token of `model` in rows of `seq_len`: 6·N + 12·Σ over layers of H·hd·(keys in
    reach); 4 for a frozen parameter, whose gradient is not computed. Of experts those count that a token goes to. A
    vision tower's are `flops_per_patch`.

    A linear layer's state of K·V a head takes three products a token, whatever the length: 18·Hv·K·V.
    PaLM's count (arXiv:2204.02311, appendix B): N leaves out the input embedding, attention is counted over all
    keys of the row or window, though a causal query sees half of them on average; recomputation is not counted.
    """
    config = model.config
    lookups = [] if config.tie_word_embeddings else [model.model.embed_tokens.weight]
    if (table := getattr(model.model, "embed_tokens_per_layer", None)) is not None:
        lookups.append(table.weight)
    lookups += [parameter for tower in model.model.vision for parameter in tower.parameters()]
    left_out = set(map(id, lookups))
    products = [parameter for parameter in model.parameters() if id(parameter) not in left_out]
    share = {} if config.experts is None else dict.fromkeys(expert_parameters(model), config.experts.share)
    count = sum(
        weights_in(parameter) * (6 if parameter.requires_grad else 4) * share.get(parameter, 1)
        for parameter in products
    )
    window = config.sliding_window or seq_len
    reach = [
        model.model.head_sizes[kind] * (min(seq_len, window) if kind == SLIDING else seq_len)
        for kind in config.layer_types
        if kind != LINEAR
    ]
    states = 0 if config.linear is None else config.layer_types.count(LINEAR) * config.linear.state
    return count + 12.0 * config.num_attention_heads * sum(reach) + 18.0 * states


def flops_per_patch(tower: "VisionTower", patches: int) -> float:
    """Return the FLOPs per patch of `tower`, for an image of so many `patches`, in a step that trains what of it is
    trained: of each matrix, and of the attention of each layer, those of the forward; as many again where the gradient
    goes on to the layers before, for some of these are trained; and of a trained matrix as many for its own gradient.

    Matrices of the projector see the tokens alone. Counted in full, as `flops_per_token` counts, are attention to all
    patches in reach, and no recomputation.
    """
    config, total, goes_on = tower.config, 0.0, False
    layers = {id(layer): index for index, layer in enumerate(tower.layers)}
    for name, module in _children_first("", tower):
        own = {f"{name}.{key}": parameter for key, parameter in module.named_parameters(recurse=False)}
        for path, parameter in own.items():
            if parameter.dim() < 2 or isinstance(module, nn.Embedding) or matched([path], tower.lookups):
                continue
            products = 1 + goes_on + parameter.requires_grad
            share = config.pool**2 if matched([path], tower.projector) else 1
            total += 2.0 * products * parameter.numel() / share
        goes_on = goes_on or any(parameter.requires_grad for parameter in own.values())
        if (index := layers.get(id(module))) is not None:
            attention = 4.0 * config.num_attention_heads * config.head_dim * config.reach(index, patches)
            total += attention * (3 if goes_on else 1)
    return total


def _children_first(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for child_name, child in module.named_children():
        yield from _children_first(f"{name}.{child_name}" if name else child_name, child)
    yield name, module


def weights_in(parameter: Tensor) -> int:
    """Return how many weights of a model the parameter, [any shape], is: two for a byte of codes, none for scales
    (`nf4`)."""
    return parameter.numel() * {torch.uint8: 2, torch.int32: 0}.get(parameter.dtype, 1)
