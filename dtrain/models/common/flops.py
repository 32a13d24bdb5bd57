"""Training FLOPs of a model per token and per pair of tokens, for a run's model FLOPs utilisation and for `dtrain
plan`."""

from typing import NamedTuple

import torch
from torch import Tensor

from dtrain.models.common.config import LINEAR, SLIDING
from dtrain.models.common.decoder import CausalLM
from dtrain.parallel.experts import expert_parameters


class TextFlops(NamedTuple):
    """Training FLOPs of the text model.

    Attributes:
        per_token: FLOPs of a token.
        per_pair: FLOPs of a query and a key of the same document, in the layers that see full documents.
        per_windowed_pair: FLOPs of a query and a key within the window, in the layers that have one.
    """

    per_token: float
    per_pair: float
    per_windowed_pair: float


def get_text_flops(model: CausalLM) -> TextFlops:
    """Return the training FLOPs of the text model.

    This is PaLM's count (arXiv:2204.02311, appendix B):

    - 6 per parameter and token: 2 in the forward, 4 in the backward. 4 for a frozen parameter, whose gradient is not
      computed. The input embedding is left out. Of experts, those count that compute a token.
    - 6 · H · (hd + hd_v) per pair and layer. All keys of the document or window count, although a causal query sees
      half of them on average.
    - Linear attention has 3 products per token with its state: 18 · Hv · K · V, whatever the length.
    - What activation checkpointing computes again is not counted.

    A vision tower is counted by `vision.common.flops_per_patch`.
    """
    config = model.config
    uncounted = {id(parameter) for tower in model.model.vision for parameter in tower.parameters()}
    if not config.tie_word_embeddings:
        uncounted.add(id(model.model.embed_tokens.weight))
    per_layer_table = getattr(model.model, "embed_tokens_per_layer", None)
    if per_layer_table is not None:
        uncounted.add(id(per_layer_table.weight))
    active_fractions: dict[Tensor, float] = {}
    if config.experts is not None:
        active_fractions = dict.fromkeys(expert_parameters(model), config.experts.active_fraction)
    elif config.transformers is not None and config.transformers.experts_per_token is not None:
        for name, parameter in model.named_parameters():
            # transformers stacks the experts of a layer: `mlp.experts.down_proj` is [E, D, inner].
            if name.split(".")[-2] == "experts" and parameter.dim() > 1:
                num_experts = parameter.shape[0]
                active_fractions[parameter] = min(1.0, config.transformers.experts_per_token / num_experts)

    per_token = 0.0
    for parameter in model.parameters():
        if id(parameter) not in uncounted:
            flops_per_weight = 6 if parameter.requires_grad else 4
            per_token += num_weights(parameter) * flops_per_weight * active_fractions.get(parameter, 1)
    per_pair, per_windowed_pair = 0.0, 0.0
    for kind in config.layer_types:
        if kind == LINEAR:
            if config.linear_attention is not None:
                per_token += 18.0 * config.linear_attention.state_size
            continue
        heads = config.kv_heads_of(kind)
        layer_flops = 6.0 * config.num_attention_heads * (heads.head_dim + heads.value_dim)
        if kind == SLIDING:
            per_windowed_pair += layer_flops
        else:
            per_pair += layer_flops
    return TextFlops(per_token, per_pair, per_windowed_pair)


def flops_per_token(model: CausalLM, seq_len: int) -> float:
    """Return the training FLOPs per token for a document of `seq_len` tokens, by `get_text_flops`."""
    flops = get_text_flops(model)
    window = model.config.sliding_window or seq_len
    return flops.per_token + seq_len * flops.per_pair + min(seq_len, window) * flops.per_windowed_pair


def num_weights(parameter: Tensor) -> int:
    """Return the number of model weights that a parameter stores.

    This is the number of elements, except for weights in 4 bits (`adapters.nf4`): a byte of codes stores two weights,
    and scales store none.

    Example:
        >>> num_weights(torch.zeros(4, 8)), num_weights(torch.zeros(4, 8, dtype=torch.uint8))
        (32, 64)
    """
    if parameter.dtype == torch.uint8:
        return 2 * parameter.numel()
    if parameter.dtype == torch.int32:
        return 0
    return parameter.numel()
