"""FSDP2 around a decoder: evaluation between steps, accumulation, and weights that are written in place."""

import itertools
import math

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from dtrain.models.common.micro_batch import MicroBatchContext
from dtrain.parallel.fsdp import Sharding, mixed_precision, shard_model
from dtrain.parallel.placement import local_tensor
from tests.cases import run_cases
from tests.parallel.dense import assert_gradients, config_of, dense_gradients, dense_loss, random_batch, random_model
from tests.world import run_world


def sharded(config, reshard="default"):
    model = random_model(config)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    dtype = torch.float64
    shard_model(model, mesh, mixed_precision(dtype, dtype), reshard_after_forward=reshard)
    return model


def steps_between_evaluations(rank, config, reshard):
    """Evaluate, accumulate two micro-batches, update, and again: every number is that of one process."""
    ranks = torch.distributed.get_world_size()
    model, oracle = sharded(config, reshard), random_model(config)
    for step in range(2):
        batches = [random_batch(config.vocab_size, seed=10 * step + index) for index in range(2 * ranks)]
        for _ in range(2):
            with torch.no_grad():
                loss = dense_loss(model, batches[rank])
                assert abs(loss - dense_loss(oracle, batches[rank])) <= 1e-12 * abs(loss)
            Sharding(model).reshard()
        for index, batch in enumerate(batches[2 * rank : 2 * rank + 2]):
            Sharding(model).sync_gradients(index == 1)
            dense_loss(model, batch).backward()
        _, expected = dense_gradients(oracle, batches)
        assert_gradients(model, expected)
        with torch.no_grad():
            for parameter in model.parameters():
                local_tensor(parameter).sub_(0.01 * local_tensor(parameter.grad))
                parameter.grad = None
            for name, parameter in oracle.named_parameters():
                parameter.sub_(0.01 * expected[name])


def test_evaluation_and_accumulation_between_steps(tmp_path):
    cases = {}
    for tied, reshard in itertools.product((True, False), ("default", True, False)):
        cases[f"{reshard}, tied={tied}"] = config_of(tmp_path, tied=tied), reshard
    run_cases(steps_between_evaluations, 3, cases)


class InOrder(TorchDispatchMode):
    """`events`: FSDP's messages in their order, each with the unit that its size tells."""

    def __init__(self, units):
        super().__init__()
        self.events, self.units = [], units

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        if name == "c10d._allgather_base_.default":
            self.events.append("gather " + self.units[args[0].numel()])
        elif name == "c10d._reduce_scatter_base_.default":
            self.events.append("reduce " + self.units[args[1].numel()])
        return func(*args, **(kwargs or {}))


def messages_in_order(rank, config):
    """The messages of a step, and between them where embedding, layers and head compute."""
    ranks, model = torch.distributed.get_world_size(), sharded(config)

    def padded(*modules):  # elements that a message of these has
        weights = {id(weight): weight.shape for module in modules for weight in module.parameters()}
        return sum(-(-rows // ranks) * ranks * math.prod(more) for rows, *more in weights.values())

    decoder, head = model.model, model.lm_head
    root = (decoder.norm, decoder.embed_tokens) if config.tie_word_embeddings else (decoder.norm,)
    order = InOrder({padded(head): "vocabulary", padded(decoder.layers[0]): "layer", padded(*root): "root"})

    def note(name, module):
        def ends(module, inputs, output):
            output.register_hook(lambda grad: order.events.append(f"{name}'s backward"))

        module.register_forward_pre_hook(lambda *_: order.events.append(name))
        module.register_forward_hook(ends)

    for name, module in {"lookup": decoder.embed_tokens, "first": decoder.layers[0], "last": decoder.layers[1]}.items():
        note(name, module)

    def at_head(hidden, weight):
        order.events.append("head")
        assert weight.shape == (config.vocab_size, config.hidden_size)
        assert isinstance(decoder.embed_tokens.weight, DTensor) != config.tie_word_embeddings  # a shard, or gathered
        return (hidden @ weight.t()).log_softmax(-1).square().sum()

    with order:
        model.with_head(at_head, random_batch(config.vocab_size)["input_ids"], MicroBatchContext()).backward()
    return order.events


FORWARD = {
    True: ["gather root", "gather layer", "lookup", "gather layer", "first", "last", "head"],
    False: [
        *("gather root", "gather vocabulary", "gather layer", "lookup", "gather layer", "first"),
        *("gather vocabulary", "last", "head"),
    ],
}
BACKWARD = {
    True: [
        *("gather layer", "last's backward", "reduce layer", "first's backward", "reduce layer"),
        *("lookup's backward", "reduce root"),
    ],
    False: [
        *("reduce vocabulary", "gather layer", "last's backward", "reduce layer", "first's backward", "reduce layer"),
        *("lookup's backward", "reduce root", "reduce vocabulary"),
    ],
}


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_head_s_messages_lie_beside_the_layers(tmp_path, ranks):
    """The first layer does not wait for the head's weights, whose gradient leaves before the layers' backward; and the
    embedding is gathered once, and held for its lookup alone."""
    for tied in (True, False):
        orders = run_world(messages_in_order, ranks, config_of(tmp_path, tied=tied))
        assert orders == [FORWARD[tied] + BACKWARD[tied]] * ranks


def written_in_place(rank, config):
    model, batch = sharded(config), random_batch(config.vocab_size)
    oracle = random_model(config)
    with torch.no_grad():
        dense_loss(model, batch)
        assert not all(isinstance(parameter, DTensor) for parameter in model.parameters())
        Sharding(model).reshard()
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        for parameter in [*model.parameters(), *oracle.parameters()]:
            local_tensor(parameter).mul_(0.5)
        for _ in range(2):
            found, expected = dense_loss(model, batch), dense_loss(oracle, batch)
            assert abs(found - expected) <= 1e-12 * abs(expected)
            Sharding(model).reshard()


def test_weights_written_in_place_after_an_evaluation_are_seen(tmp_path):
    run_cases(written_in_place, 2, {f"tied={tied}": (config_of(tmp_path, tied=tied),) for tied in (True, False)})


def without_fsdp(model, batch):
    Sharding(model).sync_gradients(False)
    Sharding(model).reshard()
    return dense_loss(model, batch)


def test_a_model_without_fsdp_is_left_alone(tmp_path):
    model, batch = random_model(config_of(tmp_path)), random_batch(67)
    assert torch.equal(without_fsdp(model, batch), dense_loss(model, batch))
