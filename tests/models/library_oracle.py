"""What transformers computes for a model, with eager attention and one document at a time: an oracle.

transformers computes norms, rotary tables and routers in float32, also in a model in float64. `DoublePrecision` makes
them float64, so that dtrain's numbers must agree to rounding.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dtrain.models.common.decoder import CausalLM
from dtrain.models.transformers.running import DoublePrecision

DOCUMENTS = (9, 7)  # tokens


@dataclass(frozen=True)
class Numbers:
    """A loss, and the gradients by transformers' names."""

    loss: float
    gradients: dict[str, Tensor]


def make_oracle(config: Any) -> Any:
    """Return transformers' model with eager attention, and random weights in float64."""
    import transformers

    torch.manual_seed(0)
    cls = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model = cls._from_config(config, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager")
    model = model.double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def make_rows(vocab_size: int) -> tuple[Tensor, Tensor]:
    """Return the tokens of the documents, [1, S], and a weight for each log-probability, [1, S, V]."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, vocab_size, (1, sum(DOCUMENTS)), generator=generator)
    weights = torch.rand(1, sum(DOCUMENTS), vocab_size, generator=generator, dtype=torch.float64)
    return ids, weights


def packed_streams(vocab_size: int) -> dict[str, Tensor]:
    """Return the documents in one row, and the weights of their log-probabilities."""
    ids, weights = make_rows(vocab_size)
    positions = torch.cat([torch.arange(n) for n in DOCUMENTS])[None]
    numbers = torch.cat([torch.full((n,), number) for number, n in enumerate(DOCUMENTS)])[None]
    return {"input_ids": ids, "position_ids": positions, "seq_ids": numbers, "weights": weights}


def weighted_loss(logits: Tensor, weights: Tensor) -> Tensor:
    """Return minus the weighted sum of log-probabilities."""
    return -(logits.log_softmax(-1) * weights).sum() / weights.shape[-1]


def compute_expected(model: Any) -> Numbers:
    """Compute the documents one at a time in transformers."""
    ids, weights = make_rows(model.config.get_text_config().vocab_size)
    with DoublePrecision():
        logits = [model(input_ids=document, use_cache=False).logits for document in ids.split(DOCUMENTS, dim=1)]
        loss = weighted_loss(torch.cat(logits, dim=1), weights)
        loss.backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        gradients[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return Numbers(float(loss.detach()), gradients)


@torch.no_grad()
def is_causal(model: Any) -> bool:
    """Check that the logits of tokens do not depend on later tokens."""
    document = make_rows(model.config.get_text_config().vocab_size)[0][:, : DOCUMENTS[0]]
    with DoublePrecision():
        full = model(input_ids=document, use_cache=False).logits[:, :5]
        cut = model(input_ids=document[:, :5], use_cache=False).logits
    return bool((full - cut).abs().max() <= 1e-5 * full.abs().max())


def library_name(model: CausalLM, name: str) -> str:
    """Return transformers' name of a parameter of dtrain's model, native or not."""
    source = model.config.transformers
    return name if source is None else source.library_name(name)


@torch.no_grad()
def copy_weights(model: CausalLM, library_model: Any) -> None:
    """Copy parameters, and the buffers that are in files."""
    source = library_model.state_dict()
    for name, tensor in model.state_dict().items():
        tensor.copy_(source[library_name(model, name)])


def compute_packed(model: CausalLM) -> Numbers:
    """Compute the documents in one row."""
    row = packed_streams(model.config.vocab_size)
    logits = model(row["input_ids"], row["position_ids"], row["seq_ids"])
    return backward(model, logits, row["weights"])


def compute_padded(model: CausalLM) -> Numbers:
    """Compute the documents in a row each, with padding after them."""
    ids, weights = make_rows(model.config.vocab_size)
    rows = torch.zeros(len(DOCUMENTS), max(DOCUMENTS), dtype=torch.int64)
    for row, document in zip(rows, ids[0].split(DOCUMENTS), strict=True):
        row[: len(document)] = document
    outputs = model(rows)
    logits = torch.cat([output[:n] for output, n in zip(outputs, DOCUMENTS, strict=True)])[None]
    return backward(model, logits, weights)


def backward(model: CausalLM, logits: Tensor, weights: Tensor) -> Numbers:
    """Compute the loss and the gradients. Sharded logits and gradients are gathered."""
    if isinstance(logits, DTensor):
        logits = logits.full_tensor()
    loss = weighted_loss(logits, weights)
    loss.backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        gradient = torch.zeros(parameter.shape, dtype=torch.float64) if parameter.grad is None else parameter.grad
        if isinstance(gradient, DTensor):
            gradient = gradient.full_tensor()
        gradients[library_name(model, name)] = gradient
    return Numbers(float(loss.detach()), gradients)


def find_difference(computed: Numbers, expected: Numbers, loss: float, gradient: float) -> str:
    """Return how numbers differ from what is expected. Empty if they agree within relative tolerances.

    Args:
        computed: The numbers.
        expected: The expected numbers.
        loss: Tolerance of the loss.
        gradient: Tolerance of each gradient.
    """
    error = abs((computed.loss - expected.loss) / expected.loss)
    if not error <= loss:
        return f"the loss differs by {error:.1e}"
    largest = max(float(theirs.abs().max()) for theirs in expected.gradients.values())
    for name, ours in computed.gradients.items():
        theirs = expected.gradients[name]
        # The gradient of a bias of keys is zero but for rounding, so small gradients are compared with the largest.
        scale = max(float(theirs.abs().max()), 1e-3 * largest)
        error = float((ours - theirs).abs().max()) / scale
        if not error <= gradient:
            return f"the gradient of {name} differs by {error:.1e}"
    return ""
