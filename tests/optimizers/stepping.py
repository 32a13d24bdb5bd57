"""A model's optimizer alone, on any mesh: gradients by position in the whole tensor, and what it holds afterwards."""

from pathlib import Path

import torch

from dtrain.base.randomness import random_key, random_uniform
from dtrain.checkpoint.dcp.store import CheckpointStore
from dtrain.models.read_config import read_config
from dtrain.optim.local_shard import bit_positions, random_bits
from dtrain.parallel.mesh import Runtime, build_mesh
from dtrain.parallel.placement import local_slices, local_tensor
from dtrain.policy import Policy
from dtrain.recipe import derive_sizes
from tests.tiny import tiny_recipe, write_model
from tests.world import run_world

# Rows and columns that neither ranks nor blocks of 256 divide; down_proj and o_proj are long in their last dimension.
ODD = {
    "hidden_size": 36,
    "intermediate_size": 602,
    "num_hidden_layers": 1,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 50,
}
CPU = torch.device("cpu")
LENGTH = 1e-3  # of gradients, about


def recipe_of(root: Path, *overrides: str, family: str = "qwen3", tied: bool = True, **changes):
    model = root / f"{family}-{tied}"
    if not model.exists():
        write_model(model, family, tied=tied, **ODD | changes)
    return tiny_recipe(
        root,
        f"model.path={model}",
        "train.dtype=auto",
        "scheduler.name=constant",
        "scheduler.warmup_steps=0",
        *overrides,
    )


def policy_on(recipe, rank: int, world_size: int, device: torch.device = CPU) -> Policy:
    world = derive_sizes(recipe, world_size)
    runtime = Runtime(rank=rank, world_size=world_size, device=device)
    shape = {"dp_replicate": world.dp_replicate, "dp_shard": world.dp_shard, "cp": world.cp, "tp": world.tp}
    policy = Policy(recipe, read_config(recipe.model.path), build_mesh(runtime, **shape), runtime)
    policy.init_optimizer(10)
    return policy


def give_gradients(policy: Policy, step: int) -> None:
    """Each parameter's, of very different sizes by row and element, with some that are 0."""
    for name, parameter in policy.model.named_parameters():
        if not parameter.requires_grad:
            continue
        index = torch.arange(parameter.numel()).view(parameter.shape)[local_slices(parameter)]
        drawn = random_uniform(index, random_key("gradient", step, name)) - 0.5
        drawn *= 10.0 ** (-6 * random_uniform(index, random_key("size", name))) * (index % 7 != step % 7) * LENGTH
        parameter.grad = torch.zeros_like(parameter, device=parameter.device)
        local_tensor(parameter.grad).copy_(drawn.to(parameter.dtype))


def steps(rank, recipe, world_size, out, begin, end, start=None):
    policy = policy_on(recipe, rank, world_size)
    if start is not None:
        store = CheckpointStore(start)
        policy.checkpoint.load(store, begin, store.read_state(begin), extra_tensors={})
    for step in range(begin, end):
        give_gradients(policy, step)
        policy.optimizer.step()
    CheckpointStore(out).save(end, policy.checkpoint.tensors(), policy.checkpoint.state())


def step_on(recipe, world_size, out, begin=0, end=3, start=None) -> dict[str, torch.Tensor]:
    """Return the checkpoint of the optimizer's steps from `begin` to `end`, of a run on so many ranks."""
    run_world(steps, world_size, recipe, world_size, out, begin, end, start)
    store = CheckpointStore(out)
    tensors = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in store.tensor_specs(end).items()}
    store.load(end, tensors)
    return tensors


def assert_same_bits(found, expected):
    assert found.keys() == expected.keys()
    differing = [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]
    assert not differing, differing


def bits_of(shard, rows, generate=random_bits):
    """Return the random bits of a slice of a shard's rows."""
    shape = rows.stop - rows.start, shard.local_columns
    return generate(shape, bit_positions(shard, rows, 5), torch.device("cpu"))


# Files of an optimizer's step, without the update around it, which waits for the gradient norm.
STEP_FILES = (
    "dtrain/optim/",
    "dtrain/memory/low_bit",
    "dtrain/memory/optimizer_offload",
    "dtrain/memory/gradient_accumulation",
)


def waits_in_steps(felt) -> int:
    """Return how often the host waited for a pretend card in optimizer steps."""
    return sum(felt.count("sync", within=file, without="optim/update.py") for file in STEP_FILES)


def pageable_copies_in_steps(felt) -> int:
    """Return the number of copies in optimizer steps from or to memory that is not pinned."""
    return sum(felt.count("pageable", within=file) for file in STEP_FILES)
