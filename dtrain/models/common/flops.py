"""Training FLOPs of a model per token, as a run's mfu and plan count them."""

import torch
from torch import Tensor

from dtrain.models.common.config import LINEAR, SLIDING
from dtrain.models.common.decoder import CausalLM
from dtrain.parallel.experts import expert_parameters


def text_flops(model: CausalLM) -> tuple[float, float, float]:
    """Return the training FLOPs of `model` for a token, for a pair of a token and one of its document, and for such a
    pair within the model's window: 6·N of a token + 12·Σ over layers of H·hd of a pair in reach; 4 for a frozen
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
    share = {} if config.experts is None else dict.fromkeys(expert_parameters(model), config.experts.share)
    of_token = sum(
        weights_in(parameter) * (6 if parameter.requires_grad else 4) * share.get(parameter, 1)
        for parameter in products
    )
    states = 0 if config.linear is None else config.layer_types.count(LINEAR) * config.linear.state
    sizes = [(kind, model.model.head_sizes[kind]) for kind in config.layer_types if kind != LINEAR]
    whole, windowed = (sum(size for kind, size in sizes if (kind == SLIDING) is slides) for slides in (False, True))
    of_pair = 12.0 * config.num_attention_heads
    return of_token + 18.0 * states, of_pair * whole, of_pair * windowed


def flops_per_token(model: CausalLM, seq_len: int) -> float:
    """Return the training FLOPs per token of `model` for a document of `seq_len` tokens, by `text_flops`."""
    counts = 1, seq_len, min(seq_len, model.config.sliding_window or seq_len)
    return sum(flops * count for flops, count in zip(text_flops(model), counts, strict=True))


def weights_in(parameter: Tensor) -> int:
    """Return how many weights of a model the parameter, [any shape], is: two for a byte of codes, none for scales
    (`nf4`)."""
    return parameter.numel() * {torch.uint8: 2, torch.int32: 0}.get(parameter.dtype, 1)
