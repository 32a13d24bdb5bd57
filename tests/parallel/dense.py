"""Oracle of the tests of meshes: a tiny float64 model in one process, its loss and its gradients."""

import copy
import json

import torch

from dtrain import models
from dtrain.models.read_config import read_config
from tests.tiny import write_model

LLAMA_BIASES = {"attention_bias": True, "mlp_bias": True}  # on every projection, o_proj and down_proj too


def config_of(directory, family="llama", *, tied=True, **changes):
    name = f"{family}-{tied}-{json.dumps(changes, sort_keys=True)}".replace("/", "")
    return read_config(write_model(directory / str(abs(hash(name))), family, tied=tied, **changes))


def random_model(config, seed=0):
    """A model whose parameters are all random, biases and norms too, the same on every rank."""
    model = models.build(config, torch.float64)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        for buffer in model.buffers():
            buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator, dtype=torch.float64))
    return model


def random_batch(vocab, rows=2, length=7, seed=1, packed=False):
    """input_ids, labels [B, S], position_ids and seq_ids: two documents a row, or one with padding in the last row."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocab, (rows, length), generator=generator)
    labels = torch.randint(vocab, (rows, length), generator=generator)
    positions = torch.arange(length).expand(rows, -1).clone()
    documents = torch.zeros(rows, length, dtype=torch.int64)
    if packed:
        cut = length // 2
        documents[:, cut:] = 1
        positions[:, cut:] -= cut
    else:
        documents[-1, -length // 3 :] = -1
        labels[-1, -length // 3 :] = -100
    labels[0, 0] = -100
    return {"input_ids": ids, "labels": labels, "position_ids": positions, "seq_ids": documents}


def dense_loss(model, batch):
    """−Σ log p(label) from the whole logits."""
    logits = model(batch["input_ids"], batch["position_ids"], batch["seq_ids"])
    logits = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
    trained = batch["labels"] >= 0
    logprobs = logits[trained].log_softmax(-1)
    return -logprobs.gather(-1, batch["labels"][trained][:, None]).sum()


def dense_gradients(model, batches):
    """The sum of the losses over the batches, and every parameter's gradient, by one process."""
    model = copy.deepcopy(model)
    total = sum(dense_loss(model, batch) for batch in batches)
    total.backward()
    return total.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def assert_gradients(model, expected, rtol=1e-11):
    found = {name: whole(parameter.grad) for name, parameter in model.named_parameters()}
    assert set(found) == set(expected)
    for name, gradient in found.items():
        error = (gradient - expected[name]).abs().max() / expected[name].abs().max()
        assert error <= rtol, f"{name}: {error:.1e}"
