"""Training FLOPs of a model per token, as a run's mfu and plan count them."""

from collections import Counter

import torch
from torch import Tensor

from dtrain.models.common.config import LINEAR, SLIDING
from dtrain.models.common.decoder import CausalLM
from dtrain.parallel.experts import expert_parameters


class TextFlops:
    """Training FLOPs of `model` for documents: for each token 6·N + 12·Σ over layers of H·hd·(keys in reach); 4 for a
    frozen parameter, whose gradient is not computed. Of experts those count that a token goes to. A vision tower's are
    `vision.flops.flops_per_patch`.

    A linear layer's state of K·V a head takes three products a token, whatever the length: 18·Hv·K·V.
    PaLM's count (arXiv:2204.02311, appendix B): N leaves out the input embedding, attention is counted over all
    keys of the document or window, though a causal query sees half of them on average; recomputation is not counted.
    """

    def __init__(self, model: CausalLM):
        config = model.config
        lookups = [] if config.tie_word_embeddings else [model.model.embed_tokens.weight]
        if (table := getattr(model.model, "embed_tokens_per_layer", None)) is not None:
            lookups.append(table.weight)
        lookups += [parameter for tower in model.model.vision for parameter in tower.parameters()]
        left_out = set(map(id, lookups))
        products = [parameter for parameter in model.parameters() if id(parameter) not in left_out]
        share = {} if config.experts is None else dict.fromkeys(expert_parameters(model), config.experts.share)
        states = 0 if config.linear is None else config.layer_types.count(LINEAR) * config.linear.state
        self.per_token = 18.0 * states + sum(
            weights_in(parameter) * (6 if parameter.requires_grad else 4) * share.get(parameter, 1)
            for parameter in products
        )
        self.window = config.sliding_window
        kinds, per_head = Counter(config.layer_types), 12.0 * config.num_attention_heads
        self.per_key = {
            kind: per_head * count * model.model.head_sizes[kind] for kind, count in kinds.items() if kind != LINEAR
        }

    def of(self, lengths: Tensor) -> float:
        """Return the FLOPs for documents of `lengths` [documents] int64, in tokens."""
        reach = {kind: lengths.clamp(max=self.window) if kind == SLIDING else lengths for kind in self.per_key}
        pairs = {kind: int((lengths * keys).sum()) for kind, keys in reach.items()}  # of a query and a key in reach
        return self.per_token * int(lengths.sum()) + sum(per * pairs[kind] for kind, per in self.per_key.items())


def flops_per_token(model: CausalLM, seq_len: int) -> float:
    """Return the FLOPs per token of `model` for a document of `seq_len` tokens, by `TextFlops`."""
    return TextFlops(model).of(torch.tensor([seq_len])) / seq_len


def weights_in(parameter: Tensor) -> int:
    """Return how many weights of a model the parameter, [any shape], is: two for a byte of codes, none for scales
    (`nf4`)."""
    return parameter.numel() * {torch.uint8: 2, torch.int32: 0}.get(parameter.dtype, 1)
