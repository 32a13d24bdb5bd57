"""Ranks that others got wrong, by name: two ranks of one world beside one process."""

import pytest
import torch

from dtrain import models
from dtrain.models.read_config import read_config
from dtrain.parallel.mesh import Runtime, build_mesh
from dtrain.parallel.placement import local_tensor
from dtrain.policy import Policy
from tests.tiny import tiny_recipe
from tests.world import run_world


def weights_of_replicas(rank, recipe):
    """The names of parameters that differ from those of one process."""
    runtime = Runtime(rank=rank, world_size=2)
    policy = Policy(recipe, read_config(recipe.model.path), build_mesh(runtime, dp_replicate=2), runtime)
    alone = models.build(read_config(recipe.model.path), torch.float64)
    models.init_weights(alone, recipe.run.seed)
    expected = dict(alone.named_parameters())
    found = {name: local_tensor(one.detach()) for name, one in policy.model.named_parameters()}
    assert found.keys() == expected.keys()
    return [name for name, one in found.items() if not torch.equal(one, expected[name])]


@pytest.mark.trap(
    "replicas of HSDP begin with other weights",
    "allenai/OLMo-core PR#319",
    "each replica trains a model of its own",
)
def test_replicas_begin_with_the_weights_of_one_process(tmp_path):
    """Both ranks of dp_replicate=2 hold, to the bit, what one process draws."""
    assert run_world(weights_of_replicas, 2, tiny_recipe(tmp_path, "parallel.dp_replicate=2")) == [[], []]
