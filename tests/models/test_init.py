"""Starting values: transformers' distributions, a function of seed, name and logical position alone."""

import math

import pytest
import torch
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from dtrain import models
from dtrain.base.randomness import random_key
from dtrain.models.building import _standard_normal
from tests.models.oracle import VARIANTS
from tests.world import run_world


def config(variant="llama-pad"):
    return models.parse_config(VARIANTS[variant]().to_dict())


def initialised(variant="llama-pad", seed=0, dtype=torch.float32):
    model = models.build(config(variant), dtype=dtype)
    models.init_weights(model, seed)
    return dict(model.named_parameters())


def test_normals_have_the_moments_of_a_normal():
    draws = _standard_normal(torch.arange(400_000), random_key(0, "x"))
    n = draws.numel()
    assert abs(draws.mean()) < 4 / math.sqrt(n)
    assert abs(draws.var() - 1) < 4 * math.sqrt(2 / n)
    assert abs(draws.pow(3).mean()) < 4 * math.sqrt(15 / n)
    assert abs(draws.pow(4).mean() - 3) < 4 * math.sqrt(96 / n)
    for lag in (1, 2, 48, 4096):
        assert abs((draws[lag:] * draws[:-lag]).mean()) < 4 / math.sqrt(n)
    assert abs((draws * _standard_normal(torch.arange(n), random_key(0, "y"))).mean()) < 4 / math.sqrt(n)
    assert draws.isfinite().all() and draws.unique().numel() > n - 2


def test_splitmix64_is_the_published_generator():
    """The reference generator started at 1234567 gives 6457827717110365317 first (Vigna's splitmix64.c)."""
    gamma, mask = 0x9E3779B97F4A7C15, 2**64 - 1
    # the generator adds gamma, then mixes; ours mixes index * gamma + key
    uniform = (torch.erf(_standard_normal(torch.tensor([1]), 1234567) / math.sqrt(2)) + 1) / 2
    assert abs(uniform.item() - 6457827717110365317 / 2**64) < 1e-12
    assert (1 * gamma + 1234567) & mask == (1234567 + gamma) & mask


@pytest.mark.parametrize(
    "variant", ["llama-pad", "llama-biases", "qwen3-biases", "gemma3-untied", "olmo3", "smollm3", "granite-biases"]
)
def test_distributions_are_those_of_transformers(variant):
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(VARIANTS[variant]())
    ours = initialised(variant)
    for name, parameter in theirs.named_parameters():
        mine = ours[name]
        if parameter.unique().numel() < 3:
            assert torch.equal(mine, parameter), name
            continue
        n = parameter.numel()
        assert abs(mine.mean() - 0) < 5 * 0.1 / math.sqrt(n), name
        assert abs(mine.std() / parameter.std() - 1) < 10 / math.sqrt(n), name
        assert torch.equal(mine == 0, parameter == 0), name  # the padding token's row


def test_seed_and_name_decide():
    first, again, other = initialised(seed=1), initialised(seed=1), initialised(seed=2)
    name = "model.layers.0.mlp.gate_proj.weight"
    assert torch.equal(first[name], again[name]) and not torch.equal(first[name], other[name])
    assert not torch.equal(first[name], first[name.replace("gate", "up")])


def test_lower_precision_is_the_rounded_draw():
    high, low = initialised(dtype=torch.float64), initialised(dtype=torch.bfloat16)
    assert all(torch.equal(high[name].to(torch.bfloat16), low[name]) for name in high)


def _sharded(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    model = models.build(config(), device="meta")
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    models.init_weights(model, 7)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    return _differing(model)


def _differing(model) -> list[str]:
    expected = initialised(seed=7)
    assert [name for name, _ in model.named_parameters()] == list(expected)
    return [name for name, p in model.named_parameters() if not torch.equal(p.full_tensor(), expected[name])]


@pytest.mark.trap(
    "random weights repeat on every rank",
    "pytorch/torchtitan #3106",
    "shards that are copies of each other",
    "the weights are those of one process on every mesh",
)
@pytest.mark.parametrize("world_size", [2, 3])
def test_every_mesh_has_the_same_weights(world_size):
    assert run_world(_sharded, world_size, world_size) == [[]] * world_size


def _two_dimensional(rank):
    mesh = init_device_mesh("cpu", (2, 2))
    model = models.build(config())
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            placements = [Shard(0), Shard(1)] if parameter.dim() == 2 else [Replicate(), Shard(0)]
            distributed = distribute_tensor(parameter.detach(), mesh, placements)
            module.register_parameter(name, torch.nn.Parameter(distributed))
    model.tie_weights()
    models.init_weights(model, 7)
    return _differing(model)


@pytest.mark.trap(
    "random weights depend on how they are sharded",
    "pytorch/pytorch #168058",
    "no run on another mesh can be compared",
    "seed, name and place decide",
)
def test_columns_are_sharded_right_too():
    assert run_world(_two_dimensional, 4) == [[]] * 4
