"""Two micro-batches in flight: their forwards first, then their backwards, in either order.

One of them may be a reference's, which has no adapters.
"""

import pytest
import torch

from dtrain.base.batch import collate
from dtrain.memory import tiles
from dtrain.models.building import init_weights
from dtrain.models.common.routing import BalanceLoss, RoutingRecord
from dtrain.models.read_config import read_config
from dtrain.parallel.mesh import Runtime, build_mesh
from dtrain.parallel.placement import local_tensor
from dtrain.policy import Policy
from dtrain.policy.batching import Fixed, split_into_micro_batches
from dtrain.recipe import derive_sizes
from tests.cases import run_cases
from tests.models.test_vision_models import CASES as TOWERS
from tests.policy.test_images import batch_of, recipe_of
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


def gradients(policy, batches, order, without_adapters=()):
    """Return losses, gradients and records after the forwards and backwards of `order`, such as "f0 f1 b1 b0".

    without_adapters: the numbers of the micro-batches whose forward has no adapters.
    """
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
            losses[number] = policy.scorer.run_at_head(
                batches[number],
                loss_of,
                balance=balance,
                record=record,
                adapters=number not in without_adapters,
                step=number,
            )
            records[number] = record
        else:
            backwards += 1
            policy.sharding.sync_gradients(backwards == len(batches))
            losses[number].backward()
    found = {f"loss of {number}": loss.detach() for number, loss in losses.items()}
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


def built(rank, recipe, world_size, has_vision=False):
    derived = derive_sizes(recipe, world_size)
    runtime = Runtime(rank=rank, local_rank=rank, world_size=world_size)
    mesh = build_mesh(runtime, dp_shard=derived.dp_shard, cp=derived.cp, tp=derived.tp, ep=derived.ep)
    policy = Policy(recipe, read_config(recipe.model.path, vision=has_vision), mesh, runtime)
    init_weights(policy.model, 1, only="*.lora_B")  # without which an A has no gradient
    return policy


def rows_of(policy, is_replayed=False):
    seed = 2 * policy.mesh.dp_rank
    return [
        packed_rows(2, 16, 5, seed, has_padding=False, is_replayed=is_replayed),
        packed_rows(3, 24, 17, seed + 1, has_padding=True, is_replayed=is_replayed),
    ]


def compare(policy, batches, without_adapters=()):
    """Compare each interleaving with one micro-batch after the other, and return the number of comparisons."""
    expected = gradients(policy, batches, "f0 b0 f1 b1", without_adapters)
    count = 0
    for order in ("f0 f1 b1 b0", "f0 f1 b0 b1"):
        found = gradients(policy, batches, order, without_adapters)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            scale = max(float(value.abs().max()), 1e-12) if value.numel() else 1.0
            far = float((found[name] - value).abs().max()) / scale if value.numel() else 0.0
            assert far <= 1e-9, (order, name, far)
            count += 1
    return count


def interleaved(rank, recipe, world_size, is_replayed):
    policy = built(rank, recipe, world_size)
    return compare(policy, rows_of(policy, is_replayed))


def interleaved_with_reference(rank, recipe, world_size, tower):
    """Compare micro-batches of which the second has no adapters. tower: the name of a model with images, or None."""
    policy = built(rank, recipe, world_size, tower is not None)
    if tower is None:
        batches = rows_of(policy)
    else:
        batch, images = batch_of(TOWERS[tower], policy.model.config)
        batches = split_into_micro_batches(batch, Fixed(2), len(images), policy.mesh.dp, images=images).batches
    count = compare(policy, batches, without_adapters={1})
    with_adapters = gradients(policy, batches, "f0 f1 b1 b0")
    reference = gradients(policy, batches, "f0 f1 b1 b0", {1})
    assert torch.equal(with_adapters["loss of 0"], reference["loss of 0"])
    assert not torch.allclose(with_adapters["loss of 1"], reference["loss of 1"], rtol=1e-4)

    # A reference forward without a graph, between a policy's forward and backward, is that of a model without adapters.
    alone = policy.scorer.logprobs(batches[1], adapters=False)
    loss = policy.scorer.run_at_head(batches[0], loss_of)
    between = policy.scorer.logprobs(batches[1], adapters=False)
    loss.backward()
    assert torch.equal(between, alone)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if name.endswith("lora_B"):
                parameter.zero_()
    plain = policy.scorer.logprobs(batches[1])
    assert torch.allclose(plain, alone, rtol=1e-12, atol=1e-12)
    return count


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
    monkeypatch.setattr(tiles, "TILE_TOKENS", 16)  # so that these short rows have several tiles
    world_size, keys = MESHES[mesh]
    cases = {}
    for name, (family, more, is_replayed) in CASES.items():
        recipe = tiny_recipe(tmp_path, *keys, *more, family=family)
        cases[name] = recipe, world_size, is_replayed
    compared = run_cases(interleaved, world_size, cases)
    assert all(count > 20 for ranks in compared.values() for count in ranks)


# With norms that are trained too, so that a forward without adapters has a graph.
LORA, DORA = "lora={rank: 4, modules_to_save: [norm]}", "lora={rank: 4, dora: true, modules_to_save: [norm]}"
DROPOUT = "lora={rank: 4, dropout: 0.3, modules_to_save: [norm]}"
OF_EXPERTS = "lora={rank: 4, target: [all-linear, experts, gate.weight], modules_to_save: [norm]}"
OF_TOWER = "lora={rank: 4, target: '.*', modules_to_save: [norm]}"

# Name -> family, recipe's keys.
TEXT_REFERENCES = {
    "lora": ("qwen3", [LORA]),
    "dora, full": ("qwen3", [DORA, FULL]),
    "dropout, full": ("qwen3", [DROPOUT, FULL]),
    "dropout, selective tiles": ("qwen3", [DROPOUT, SELECTIVE, "train.tile=all"]),
    "tiles on the host": ("qwen3", [LORA, FULL, "train.tile=all", "train.activation_offload=true"]),
    "experts": ("qwen3-moe", [OF_EXPERTS]),
    "experts, full": ("qwen3-moe", [OF_EXPERTS, FULL]),
    "linear layers, selective": ("qwen3.5", [DROPOUT, SELECTIVE]),
    "layers with own embeddings": ("gemma4", [LORA, FULL]),
}
TOWER_REFERENCES = {"qwen3-vl": [FULL], "qwen2.5-vl": [SELECTIVE], "gemma4": []}
REFERENCE_MESHES = {**MESHES, "ep 2": (2, ["parallel.ep=2"])}


@pytest.mark.processes
@pytest.mark.parametrize("mesh", REFERENCE_MESHES)
def test_a_reference_without_adapters_may_be_in_flight_with_the_policy(tmp_path, monkeypatch, mesh):
    monkeypatch.setattr(tiles, "TILE_TOKENS", 16)
    world_size, keys = REFERENCE_MESHES[mesh]
    cases = {}
    for name, (family, more) in TEXT_REFERENCES.items():
        if mesh != "ep 2" or family == "qwen3-moe":
            cases[name] = tiny_recipe(tmp_path, *keys, *more, family=family), world_size, None
    if mesh != "ep 2":
        for tower, more in TOWER_REFERENCES.items():
            recipe = recipe_of(tmp_path / tower, tower, *keys, *more, OF_TOWER)
            cases[tower] = recipe, world_size, tower
    compared = run_cases(interleaved_with_reference, world_size, cases)
    assert all(count > 20 for ranks in compared.values() for count in ranks)
