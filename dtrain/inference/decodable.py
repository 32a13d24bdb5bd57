"""Checks that the cache of this package has all that a model of the transformers library carries from token to token.

dtrain's own models know the cache. A model of transformers calls dtrain's attention, and the cache stores the keys and
values of these calls. Layers such as Mamba or a convolution have a state of their own besides, which no cache of this
package stores, and such a model would generate wrong tokens without an error. `find_decoding_problem` therefore
generates with a small copy of the model (`models.transformers.shrinking`), token by token, and compares the logits with
those of the full rows. For example, Cohere2 agrees to 1e-6, and Falcon-H1, whose layers have attention and Mamba side
by side, differs by as much as its logits.
"""

import json
from functools import cache

import torch
from torch import Tensor

from dtrain.base.errors import UserError
from dtrain.inference.cached_attention import Decode, Prefill
from dtrain.inference.kv_cache import KeyValues
from dtrain.models.common.config import LINEAR, ModelConfig
from dtrain.models.common.decoder import CausalLM

TOLERANCE = 1e-3
"""Largest difference of the logits, relative to the largest logit. Norms and rotary tables in float32 give 1e-6."""
NUM_DECODED = 3  # tokens of each document that are decoded one at a time


def refuse_undecodable(config: ModelConfig) -> None:
    """Raise UserError if the engine cannot generate with a model. No collective."""
    problem = find_decoding_problem(config)
    if problem is not None:
        raise UserError(f"{config.architecture} of the transformers library: {problem}")


def find_decoding_problem(config: ModelConfig) -> str | None:
    """Return the problem of generating with a model by the engine, or None. No collective.

    The check of a model of transformers takes about a second, once for each config of a process.
    """
    if config.transformers is None:
        return None
    if LINEAR in config.layer_types:
        layer = config.layer_types.index(LINEAR)
        return f"layer {layer} has no attention, and the state that it carries from token to token is in no cache"
    return _compare_copy(json.dumps(dict(config.transformers.values), sort_keys=True, default=str))


@cache
def _compare_copy(values: str) -> str | None:
    """Return the problem of a small copy of the model with the fields `values` of config.json, in JSON."""
    from dtrain.models.transformers.proof import Copy, NotComputable  # loads transformers
    from dtrain.models.transformers.shrinking import small_configs

    reason = "no small copy of it can be built"
    for small in small_configs(json.loads(values)):
        try:
            copy = Copy.of(small)
            difference = max(_find_difference(copy.model, document) for document in copy.documents)
        except NotComputable as error:
            reason = str(error)
            continue
        if difference <= TOLERANCE:
            return None
        return (
            "it has a state besides the keys and values of attention, or several attentions in a layer, so its tokens "
            "cannot be generated one at a time"
        )
    return f"generation cannot be compared with full rows: {reason}"


@torch.no_grad()
def _find_difference(model: CausalLM, ids: Tensor) -> float:
    """Return the largest relative difference between the logits of decoding and those of the full row.

    Args:
        model: The model, complete on one device.
        ids: Token ids of a row, [length].
    """
    model.eval()
    full = model(ids[None])[0]  # [length, V]
    num_prompt = len(ids) - NUM_DECODED
    store = KeyValues.of(model.config)
    prompt = store.new_prompt(num_prompt)
    decoded = [model.next_logits(ids[None, :num_prompt], Prefill(store, [prompt], ids.device))]
    store.new_row()
    decode = Decode(store, [prompt], ids.device)
    for token in ids[num_prompt:]:
        decode.begin()
        decoded.append(model.next_logits(token[None, None], decode))
        decode.end()
        decode.lengthen()
    expected = full[num_prompt - 1 :]
    return float((torch.cat(decoded) - expected).abs().max() / expected.abs().max())
