"""Training FLOPs of a model per token and per pair of tokens, for a run's mfu and for plan."""

from typing import NamedTuple

import torch
from torch import Tensor

from dtrain.models.common.config import LINEAR, SLIDING
from dtrain.models.common.decoder import CausalLM
from dtrain.parallel.experts import expert_parameters


class TextFlops(NamedTuple):
    """Training FLOPs of a model's text. token: of a token; pair: of a token and one of its document, in the layers that
    see whole documents; windowed_pair: of such a pair within the window, in the layers that have one."""

    per_token: float
    per_pair: float
    per_windowed_pair: float


def get_text_flops(model: CausalLM) -> TextFlops:
    """Return the training FLOPs of `model`: 6·N of a token, 6·Σ over layers of H·(hd + hd_v) of a pair; 4 for a frozen
    parameter, whose gradient is not computed. Of experts those count that a token goes to. A vision tower's are
    `vision.flops.flops_per_patch`.

    A linear layer's state of K·V a head takes three products a token, whatever the length: 18·Hv·K·V.
    PaLM's count (arXiv:2204.02311, appendix B): N leaves out the input embedding, attention is counted over all
    keys of the document or window, though a causal query sees half of them on average; recomputation is not counted.
    """
    config = model.config
    lookups = [] if config.tie_word_embeddings else [model.model.embed_tokens.weight]
    if (table := getattr(model.model, "embed_tokens_per_layer", None)) is not None:
        lookups.append(table.weight)
    lookups += [parameter for tower in model.model.vision for parameter in tower.parameters()]
    left_out = set(map(id, lookups))
    products = [parameter for parameter in model.parameters() if id(parameter) not in left_out]
    share = {} if config.experts is None else dict.fromkeys(expert_parameters(model), config.experts.active_fraction)
    of_token = sum(
        num_weights(parameter) * (6 if parameter.requires_grad else 4) * share.get(parameter, 1)
        for parameter in products
    )
    states = (
        0 if config.linear_attention is None else config.layer_types.count(LINEAR) * config.linear_attention.state_size
    )
    per_element = 6.0 * config.num_attention_heads
    heads = [(kind, config.kv_heads_of(kind)) for kind in config.layer_types if kind != LINEAR]
    sizes = [(kind, per_element * (each.head_dim + each.value_dim)) for kind, each in heads]
    windowed = sum(size for kind, size in sizes if kind == SLIDING)
    return TextFlops(of_token + 18.0 * states, sum(size for _, size in sizes) - windowed, windowed)


def flops_per_token(model: CausalLM, seq_len: int) -> float:
    """Return the training FLOPs per token of `model` for a document of `seq_len` tokens, by `get_text_flops`."""
    flops, window = get_text_flops(model), model.config.sliding_window or seq_len
    return flops.per_token + seq_len * flops.per_pair + min(seq_len, window) * flops.per_windowed_pair


def num_weights(parameter: Tensor) -> int:
    """Return how many weights of a model the parameter, [any shape], is: two for a byte of codes, none for scales
    (`adapters.nf4`)."""
    return parameter.numel() * {torch.uint8: 2, torch.int32: 0}.get(parameter.dtype, 1)
