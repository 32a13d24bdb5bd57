"""Two micro-batches in flight: their forwards first, then their backwards, in either order."""

import pytest
import torch

from dtrain.base.batch import collate
from dtrain.memory import tiles
from dtrain.models.building import init_weights
from dtrain.models.common.routing import BalanceLoss, RoutingRecord
from dtrain.models.read_config import read_config
from dtrain.parallel.mesh import build_mesh
from dtrain.parallel.placement import local_tensor
from dtrain.parallel.runtime import Runtime
from dtrain.policy import Policy
from dtrain.recipe import sizes
from tests.cases import run_cases
from tests.tiny import VOCAB, tiny_recipe

LAYERS, EXPERTS, TOP = 2, 8, 3  # of the sparse layers of the tiny mixture
ADAPTER = "lora={rank: 4, dropout: 0.3}"
FULL, SELECTIVE = (f"train.activation_checkpointing={kind}" for kind in ("full", "selective"))


def loss_of(source, batch):
    return -source.weighted_sum()


def packed_rows(num_rows, length, border, seed, *, has_padding, is_replayed):
    """Rows of two documents each, the second of which begins at `border`."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(num_rows):
        ids = torch.randint(0, VOCAB, (length + 1,), generator=generator)
        positions = torch.arange(length)
        row = {
            "input_ids": ids[:-1],
            "labels": ids[1:].clone(),
            "position_ids": torch.where(positions < border, positions, positions - border),
            "seq_ids": (positions >= border).long(),
        }
        if has_padding:
            row["seq_ids"][-2:], row["labels"][-2:] = -1, -100
        if is_replayed:
            scores = torch.rand(length, LAYERS, EXPERTS, generator=generator)
            row["routed_experts"] = scores.argsort(-1)[..., :TOP].to(torch.int16)
            row["routed_experts"][:3] = -1  # the router decides
        rows.append(row)
    return collate(rows)


def gradients(policy, batches, order):
    """Return gradients and records after the forwards and backwards of `order`, such as "f0 f1 b1 b0"."""
    policy.model.zero_grad()
    policy.model.train()
    losses, records, backwards = {}, {}, 0
    for step in order.split():
        number = int(step[1])
        if step[0] == "f":
            record, balance = RoutingRecord(), None
            if policy.model.routing is not None:
                # Each micro-batch has a factor of its own, so that one micro-batch's in place of the other's shows.
                balance = BalanceLoss(torch.tensor(0.3 + number, dtype=torch.float64))
            losses[number] = policy.scorer.at_head(batches[number], loss_of, balance=balance, record=record)
            records[number] = record
        else:
            backwards += 1
            policy.sharding.sync_gradients(backwards == len(batches))
            losses[number].backward()
    found = {}
    for name, parameter in policy.model.named_parameters():
        if parameter.grad is not None:
            found[name] = local_tensor(parameter.grad).clone()
    for number, record in records.items():
        for layer, counts in record.counts.items():
            found[f"counts of layer {layer} in {number}"] = counts
            found[f"balance loss of layer {layer} in {number}"] = record.balance_losses[layer]
        for layer, replays in record.replays.items():
            found[f"replays of layer {layer} in {number}"] = replays
    return found


def interleaved(rank, recipe, world_size, is_replayed):
    """Return the largest relative difference of each interleaving from one micro-batch after the other."""
    derived = sizes(recipe, world_size)
    runtime = Runtime(rank=rank, local_rank=rank, world_size=world_size)
    mesh = build_mesh(runtime, dp_shard=derived.dp_shard, cp=derived.cp, tp=derived.tp)
    policy = Policy(recipe, read_config(recipe.model.path), mesh, runtime)
    init_weights(policy.model, 1, only="*.lora_B")  # without which an A has no gradient
    seed = 2 * mesh.dp_rank
    batches = [
        packed_rows(2, 16, 5, seed, has_padding=False, is_replayed=is_replayed),
        packed_rows(3, 24, 17, seed + 1, has_padding=True, is_replayed=is_replayed),
    ]
    expected = gradients(policy, batches, "f0 b0 f1 b1")
    differences = []
    for order in ("f0 f1 b1 b0", "f0 f1 b0 b1"):
        found = gradients(policy, batches, order)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            scale = max(float(value.abs().max()), 1e-12) if value.numel() else 1.0
            far = float((found[name] - value).abs().max()) / scale if value.numel() else 0.0
            assert far <= 1e-9, (order, name, far)
            differences.append(far)
    return len(differences)


# Name -> family, recipe's keys, whether experts are replayed.
CASES = {
    "dense": ("qwen3", [], False),
    "dense, full": ("qwen3", [FULL], False),
    "dense, selective": ("qwen3", [SELECTIVE], False),
    "dense, on the host": ("qwen3", [FULL, "train.activation_offload=true"], False),
    "dense, kept on the host": ("qwen3", ["train.activation_offload=true"], False),
    "dense, tiles": ("qwen3", [SELECTIVE, "train.tile=all"], False),
    "adapters": ("qwen3", [ADAPTER], False),
    "adapters, full": ("qwen3", [ADAPTER, FULL], False),
    "adapters, selective": ("qwen3", [ADAPTER, SELECTIVE], False),
    "adapters, tiles": ("qwen3", [ADAPTER, SELECTIVE, "train.tile=all"], False),
    "experts": ("qwen3-moe", [], False),
    "experts, full": ("qwen3-moe", [FULL], False),
    "experts replayed": ("qwen3-moe", [], True),
    "experts replayed, full": ("qwen3-moe", [FULL], True),
    "experts replayed, selective": ("qwen3-moe", [SELECTIVE], True),
    "experts replayed, on the host": ("qwen3-moe", [FULL, "train.activation_offload=true"], True),
    "linear layers": ("qwen3.5", [FULL], False),
    "keys that layers share": ("gemma4", [FULL], False),
}
MESHES = {
    "one rank": (1, []),
    "dp_shard 2": (2, []),
    "cp 2": (2, ["parallel.cp=2"]),
    "sequence parallel": (2, ["parallel.tp=2", "parallel.sequence_parallel=true"]),
}


@pytest.mark.processes
@pytest.mark.parametrize("mesh", MESHES)
def test_gradients_are_those_of_one_micro_batch_after_the_other(tmp_path, monkeypatch, mesh):
    monkeypatch.setattr(tiles, "TOKENS", 16)  # so that these short rows have several tiles
    world_size, keys = MESHES[mesh]
    cases = {}
    for name, (family, more, is_replayed) in CASES.items():
        recipe = tiny_recipe(tmp_path, *keys, *more, family=family)
        cases[name] = recipe, world_size, is_replayed
    compared = run_cases(interleaved, world_size, cases)
    assert all(count > 20 for ranks in compared.values() for count in ranks)
