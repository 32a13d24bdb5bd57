"""Prompts that are computed once: the numbers are those of a run that computes each document on its own.

The run without sharing is the oracle: loss, metrics, gradients and weights over ten steps in float64, relative to 1e-12
of the largest value of a tensor.
"""

from types import SimpleNamespace

import pytest
import torch

from dtrain.base.batch import RowImages, collate, num_trained_tokens
from dtrain.memory import tiles
from dtrain.models.read_config import read_config
from dtrain.parallel.mesh import Runtime, build_mesh
from dtrain.parallel.placement import local_tensor
from dtrain.policy import DynamicShapes, Fixed, Packed, Policy
from dtrain.policy.batching import split_into_micro_batches
from dtrain.policy.prompt_sharing import PromptSharing
from dtrain.recipe import derive_sizes
from tests.cases import run_cases
from tests.models.test_vision_models import CASES as TOWERS
from tests.policy.test_images import batch_of as picture_rows, recipe_of as picture_recipe
from tests.tiny import VOCAB, tiny_recipe

STEPS = 10
TOLERANCE = 1e-12
LAYERS, EXPERTS, TOP = 2, 8, 3  # of the sparse layers of the tiny mixture


def document(tokens, prompt_length, group, generator, is_replayed):
    tokens = torch.tensor(tokens)
    length = len(tokens)
    labels = torch.cat([tokens[1:], torch.tensor([-100])])
    labels[: prompt_length - 1] = -100
    row = {
        "input_ids": tokens,
        "labels": labels,
        "position_ids": torch.arange(length),
        "seq_ids": torch.zeros(length, dtype=torch.int64),
        "prompt_ids": torch.full((length,), group),
        "advantages": torch.randn(length, generator=generator, dtype=torch.float64),
    }
    if is_replayed:
        # The experts of a prompt are those of the engine that computed it, the same for each of its completions.
        prompt_generator = torch.Generator().manual_seed(group)
        scores = torch.rand(100, LAYERS, EXPERTS, generator=prompt_generator)
        scores[prompt_length:] = torch.rand(100 - prompt_length, LAYERS, EXPERTS, generator=generator)
        row["routed_experts"] = scores[:length].argsort(-1)[..., :TOP].to(torch.int16)
    return row


def batch_of(step, dp_rank, is_replayed=False):
    """Return groups of odd sizes: nested beginnings, equal completions, one alone, one without a label."""
    generator = torch.Generator().manual_seed(100 * dp_rank + step)

    def draw(count):
        return torch.randint(2, VOCAB, (count,), generator=generator).tolist()

    rows = []
    prompt = draw(21)
    for length in (7, 1, 30):
        rows.append(document(prompt + draw(length), len(prompt), 5, generator, is_replayed))
    # Two of the three continue alike for a turn of 18 tokens. One of them ends with it.
    prompt, turn = draw(9), draw(18)
    for completion in (turn + draw(5), draw(4), turn, turn + draw(3)):
        rows.append(document(prompt + completion, len(prompt), 8, generator, is_replayed))
    completion = draw(6)
    for _ in range(2):
        rows.append(document(prompt + completion, len(prompt), 2, generator, is_replayed))
    rows.append(document(draw(13), 4, -1, generator, is_replayed))
    rows.append(document(draw(3), 1, 11, generator, is_replayed))
    rows[0]["labels"][:] = -100
    order = torch.randperm(len(rows), generator=generator).tolist()[dp_rank:]  # ranks have different numbers of rows
    streams = ("input_ids", "labels", "position_ids", "seq_ids", "prompt_ids", "advantages")
    batch = collate([rows[index] for index in order], streams)
    if is_replayed:
        batch["routed_experts"] = torch.full((*batch["input_ids"].shape, LAYERS, TOP), -1, dtype=torch.int16)
        for row, index in enumerate(order):
            routed = rows[index]["routed_experts"]
            batch["routed_experts"][row, : len(routed)] = routed
    return batch


def loss_of(source, batch, global_sequences, global_tokens):
    """Compute a loss over tokens and over documents that reads every kind of value."""
    scores = source.logprobs(entropy=True)
    by_token = (scores.logprobs * batch["advantages"].to(scores.logprobs)).sum() / global_tokens
    sums = source.sum_by_document(torch.stack([scores.logprobs, (batch["labels"] != -100).to(scores.logprobs)]))
    means = sums[0] / sums[1].clamp(min=1)
    by_document = source.count_once((means.sigmoid() + 0.1 * means).sum() / global_sequences)
    weighted = source.weighted_sum(batch["advantages"]) / global_tokens
    metrics = {"entropy": scores.entropy.sum(), "weighted": weighted.detach()}
    return -by_token - by_document - 0.3 * weighted - 0.01 * scores.entropy.sum() / global_tokens, metrics


def trained(rank, recipe, world_size, batching, is_replayed):
    """Return losses, metrics, gradients, weights, log-probabilities and the number of shared tokens of ten steps."""
    sizes = derive_sizes(recipe, world_size)
    runtime = Runtime(rank=rank, local_rank=rank, world_size=world_size)
    mesh = build_mesh(runtime, dp_shard=sizes.dp_shard, cp=sizes.cp, tp=sizes.tp, ep=sizes.ep)
    policy = Policy(recipe, read_config(recipe.model.path), mesh, runtime)
    policy.init_optimizer(total_steps=STEPS)
    found, num_shared = {}, 0
    for step in range(STEPS):
        batch = batch_of(step, mesh.dp_rank, is_replayed)
        if step % 5 == 0:
            found[f"logprobs {step}"] = policy.logprobs(batch, batching)
            evaluated = policy.evaluate(batch, loss_of, batching)
            found[f"evaluation {step}"] = torch.tensor([evaluated.loss, *evaluated.metrics.values()])
        result = policy.forward_backward(batch, loss_of, batching)
        if step in (0, STEPS - 1):
            for name, parameter in policy.model.named_parameters():
                if parameter.grad is not None:
                    found[f"gradient {step} of {name}"] = local_tensor(parameter.grad).clone()
        update = policy.optimizer_step()
        values = [result.loss, update.grad_norm, *result.metrics.values(), *result.routing_metrics.values()]
        found[f"step {step}"] = torch.tensor(values, dtype=torch.float64)
        counts = result.counts
        found[f"counts {step}"] = torch.tensor(
            [counts.trained_tokens, counts.documents, counts.tokens + counts.shared_tokens]
        ).double()
        num_shared += counts.shared_tokens
    for name, parameter in policy.model.named_parameters():
        found[f"weight {name}"] = local_tensor(parameter.detach()).clone()
    return found, num_shared


def compare(rank, shared, alone, world_size, batching, is_replayed):
    expected, num_shared = trained(rank, alone, world_size, batching, is_replayed)
    assert num_shared == 0
    found, num_shared = trained(rank, shared, world_size, batching, is_replayed)
    assert num_shared > 0
    assert_equal(found, expected)


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if value.numel():
            scale = max(float(value.abs().max()), 1e-3)
            far = float((found[name] - value).abs().max()) / scale
            assert far <= TOLERANCE, (name, far)


FULL, SELECTIVE = (f"train.activation_checkpointing={kind}" for kind in ("full", "selective"))
# Name -> family, the recipe's keys, how micro-batches are formed, whether experts are replayed.
CASES = {
    "dense": ("llama", [], Packed(100), False),
    "fixed rows": ("qwen3", [FULL], Fixed(4), False),
    "similar lengths": ("llama", [SELECTIVE], DynamicShapes(90), False),
    "windows": ("olmo3", [], Packed(200), False),
    "windows and sinks": ("gpt-oss", [], Packed(120), False),
    "tiles": ("qwen3", [FULL, "train.tile=all"], Packed(300), False),
    "LoRA with dropout": ("llama", ["lora={rank: 4, dropout: 0.3}"], Packed(120), False),
    "experts": ("qwen3-moe", ["moe.balance=0.1"], Packed(120), False),
    "experts replayed": ("qwen3-moe", ["moe.balance=0.1", FULL], Fixed(3), True),
    "latent attention": ("deepseek-v3", [], Packed(120), False),
    "keys that layers share": ("gemma4", [], Packed(120), False),
}
ON_RANKS = ("dense", "similar lengths", "windows and sinks", "LoRA with dropout", "experts replayed", "tiles")
MESHES = {
    "one rank": (1, []),
    "dp 2": (2, []),
    "cp 2": (2, ["parallel.cp=2"]),
    "cp 3 in a ring": (3, ["parallel.cp=3", "parallel.cp_rotate=ring"]),
    "sequence parallel": (2, ["parallel.tp=2", "parallel.sequence_parallel=true"]),
}


@pytest.mark.processes
@pytest.mark.parametrize("mesh", MESHES)
def test_numbers_are_those_without_sharing(tmp_path, monkeypatch, mesh):
    monkeypatch.setattr(tiles, "TILE_TOKENS", 16)  # so that these short rows have several tiles
    world_size, keys = MESHES[mesh]
    cases = {}
    for name in CASES if world_size == 1 else ON_RANKS:
        family, more, batching, is_replayed = CASES[name]
        keys_of_case = [*keys, *more, "train.dtype=float64", "optimizer.lr=1e-3"]
        shared = tiny_recipe(tmp_path, *keys_of_case, "train.share_prompts=true", family=family)
        alone = tiny_recipe(tmp_path, *keys_of_case, "train.share_prompts=false", family=family)
        cases[name] = shared, alone, world_size, batching, is_replayed
    run_cases(compare, world_size, cases)


def images_batch(case, config, step):
    """Return three completions of each prompt with images. In the last group, one completion has another image."""
    batch, images = picture_rows(case, config)
    generator = torch.Generator().manual_seed(step)
    rows = [row for row in range(len(images)) for _ in range(3)]
    batch = {name: stream[rows].clone() for name, stream in batch.items()}
    batch["prompt_ids"] = torch.tensor(rows)[:, None].expand_as(batch["input_ids"])
    batch["advantages"] = torch.randn(batch["input_ids"].shape, generator=generator, dtype=torch.float64)
    for row, seq_ids in enumerate(batch["seq_ids"]):
        length = int((seq_ids >= 0).sum())
        # The last four tokens of a row are text. Its completions differ there.
        batch["input_ids"][row, length - 4 : length] = torch.randint(3, 20, (4,), generator=generator)
    pixels = [images.pixels[row] for row in rows]
    keys = [[100 * row + index for index in range(len(images.grids[row]))] for row in rows]
    pixels[-1], keys[-1] = pixels[-1] + 0.5, [999]
    return batch | {"images": RowImages(pixels, [images.grids[row] for row in rows], keys)}


def trained_on_images(rank, recipe, world_size, name):
    sizes = derive_sizes(recipe, world_size)
    mesh = build_mesh(Runtime(rank=rank, world_size=world_size), dp_shard=sizes.dp_shard, cp=sizes.cp, tp=sizes.tp)
    config = read_config(recipe.model.path, vision=True)
    policy = Policy(recipe, config, mesh, Runtime(rank=rank, world_size=world_size))
    policy.init_optimizer(total_steps=STEPS)
    found, shared = {}, 0
    for step in range(2):
        batch = images_batch(TOWERS[name], config, step)
        result = policy.forward_backward(batch, loss_of, Packed(150))
        for parameter_name, parameter in policy.model.named_parameters():
            if parameter.grad is not None:
                found[f"gradient {step} of {parameter_name}"] = local_tensor(parameter.grad).clone()
        update = policy.optimizer_step()
        found[f"step {step}"] = torch.tensor([result.loss, update.grad_norm, *result.metrics.values()])
        shared += result.counts.shared_tokens
    return found, shared


def compare_images(rank, shared, alone, world_size, name):
    expected, num_shared = trained_on_images(rank, alone, world_size, name)
    assert num_shared == 0
    found, num_shared = trained_on_images(rank, shared, world_size, name)
    # Three groups of three share all but the last tokens. The last group shares its images between two rows only.
    assert num_shared > 100
    assert_equal(found, expected)


@pytest.mark.processes
@pytest.mark.parametrize("ranks", [1, 2])
def test_images_of_prompts(tmp_path, ranks):
    cases = {}
    for name in ("qwen3-vl", "gemma3", "gemma4-bidirectional", "qwen2.5-vl"):
        if ranks == 2 and name == "qwen2.5-vl":
            continue
        root = tmp_path / name
        keys = ["train.dtype=float64", f"parallel.cp={ranks}", "optimizer.lr=1e-3"]
        shared = picture_recipe(root, name, *keys, "train.share_prompts=true")
        alone = picture_recipe(root, name, *keys, "train.share_prompts=false")
        cases[name] = shared, alone, ranks, name
    run_cases(compare_images, ranks, cases)


def test_equal_completions_are_limited_by_their_labels():
    """The loss copies the hidden states of a completion for each of its copies."""
    generator = torch.Generator().manual_seed(0)
    rows = [document([3] * 30 + [4] * 10, 30, 0, generator, is_replayed=False)] * 8
    batch = collate(rows, ("input_ids", "labels", "position_ids", "seq_ids", "prompt_ids"))
    one_rank = SimpleNamespace(size=lambda: 1)
    for batching in (Packed(60), DynamicShapes(60)):
        pieces = split_into_micro_batches(batch, batching, len(rows), one_rank, sharing=PromptSharing())
        assert [num_trained_tokens(piece) for piece in pieces.batches] == [60, 20]


def logprobs_of(rank, recipe, batches):
    runtime = Runtime(rank=rank)
    policy = Policy(recipe, read_config(recipe.model.path), build_mesh(runtime, dp_shard=1, cp=1, tp=1), runtime)
    return [policy.logprobs(batch, batching) for batch in batches for batching in (Fixed(1), Fixed(2), Packed(100))]


@pytest.mark.processes
def test_empty_rows_and_gaps_of_positions(tmp_path):
    ids = torch.tensor([[3, 4, 5, 6, 3, 4, 5, 7]] + [[0] * 8] * 3)
    empty_rows = {"input_ids": ids, "prompt_ids": torch.zeros_like(ids)}
    empty_rows["seq_ids"] = torch.tensor([[0] * 4 + [1] * 4] + [[-1] * 8] * 3)
    # The model's window is 6.
    gaps = {"input_ids": ids[[0, 0], :7], "prompt_ids": torch.zeros(2, 7, dtype=torch.int64)}
    gaps["position_ids"] = torch.tensor([[0, 1, 2, 8, 9, 10, 11]] * 2)
    cases = {}
    for setting in ("true", "false"):
        recipe = tiny_recipe(tmp_path, f"train.share_prompts={setting}", family="olmo3")
        cases[setting] = recipe, [empty_rows, gaps]
    ((shared,), (alone,)) = run_cases(logprobs_of, 1, cases).values()
    assert_equal(dict(enumerate(shared)), dict(enumerate(alone)))
    assert alone[0][0].count_nonzero() == 6 and not alone[0][1:].any()
