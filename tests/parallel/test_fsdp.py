"""FSDP2 around a decoder: evaluation between steps, accumulation, and weights that are written in place."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from dtrain.parallel.fsdp import shard_model
from dtrain.parallel.placement import local_tensor, reshard_model
from dtrain.policy.policy import sync_gradients
from tests.cases import run_cases
from tests.parallel.dense import assert_gradients, config_of, dense_gradients, dense_loss, random_batch, random_model
from tests.world import run_world


def sharded(config, reshard="default"):
    model = random_model(config)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    dtype = torch.float64
    shard_model(model, mesh, compute_dtype=dtype, reduce_dtype=dtype, reshard_after_forward=reshard)
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
            reshard_model(model)
        for index, batch in enumerate(batches[2 * rank : 2 * rank + 2]):
            sync_gradients(model, index == 1)
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
    config = config_of(tmp_path)
    run_cases(steps_between_evaluations, 3, {str(reshard): (config, reshard) for reshard in ("default", True, False)})


def written_in_place(rank, config):
    model, batch = sharded(config), random_batch(config.vocab_size)
    oracle = random_model(config)
    with torch.no_grad():
        dense_loss(model, batch)
        assert not all(isinstance(parameter, DTensor) for parameter in model.parameters())
        reshard_model(model)
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        for parameter in [*model.parameters(), *oracle.parameters()]:
            local_tensor(parameter).mul_(0.5)
        for _ in range(2):
            found, expected = dense_loss(model, batch), dense_loss(oracle, batch)
            assert abs(found - expected) <= 1e-12 * abs(expected)
            reshard_model(model)


def test_weights_written_in_place_after_an_evaluation_are_seen(tmp_path):
    run_world(written_in_place, 2, config_of(tmp_path))


def without_fsdp(model, batch):
    sync_gradients(model, False)
    reshard_model(model)
    return dense_loss(model, batch)


def test_a_model_without_fsdp_is_left_alone(tmp_path):
    model, batch = random_model(config_of(tmp_path)), random_batch(67)
    assert torch.equal(without_fsdp(model, batch), dense_loss(model, batch))
