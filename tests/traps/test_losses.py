"""Losses that others got wrong, by name: against float64 and formulas by hand, and transformers' own loss."""

import json
import statistics
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from dtrain.losses.head.logprobs import logprobs_from_hidden_states
from dtrain.losses.policy.advantage import advantages
from dtrain.methods.kto import KtoMethod
from tests.test_trainer import metrics, run
from tests.tiny import save_weights, tiny_recipe, write_model

transformers = pytest.importorskip("transformers")


@pytest.mark.trap(
    "log-probabilities in bfloat16 move with the batch",
    "volcengine/verl #6280",
    "ratios outside of 0.9 to 1.1 where the policy has not changed",
)
def test_log_probabilities_of_bfloat16_tensors_are_summed_in_float32():
    """Those of float64 to 1e-5, whatever the tiles and the rows beside them."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(12, 64, generator=generator).bfloat16()
    weight = torch.randn(500, 64, generator=generator).bfloat16()
    targets = torch.randint(0, 500, (12,), generator=generator)
    exact = (hidden.double() @ weight.double().T).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    for tile in (None, (1, 500), (5, 33)):
        found = logprobs_from_hidden_states(hidden, weight, targets, tile=tile).logprobs
        assert (found.double() - exact).abs().max() < 1e-5
        alone = logprobs_from_hidden_states(hidden[:1], weight, targets[:1], tile=tile).logprobs
        assert (alone.double() - exact[:1]).abs().max() < 1e-5
    rounded = (hidden @ weight.T).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    assert (rounded.double() - exact).abs().max() > 1e-2  # what the trap gives


def loss_of_transformers(directory, rows):
    """Mean over the labels of all rows, each row alone, by transformers' model in float64."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)
    total, count = 0.0, 0
    for row in rows:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1]
        labels = torch.tensor(row["labels"][1:])
        total += functional.cross_entropy(logits, labels, reduction="sum").item()
        count += (labels != -100).sum().item()
    return total / count


@pytest.mark.trap(
    "a fused loss without the scale of the logits",
    "unslothai/unsloth PR#11277",
    "7.9 instead of 2.0 at the start, and another model",
)
@pytest.mark.trap(
    "the count of trained tokens divided by the accumulation once more",
    "huggingface/transformers PR#35438",
    "the loss doubles with the accumulation",
    "eight micro-batches have transformers' loss of the eight rows",
)
@pytest.mark.parametrize("family", ["granite", "gemma4", "llama"])
def test_the_first_loss_is_that_of_transformers_logits(tmp_path, family):
    """Logits as the model's own forward scales and caps them."""
    directory = save_weights(write_model(tmp_path / f"{family}-tied", family))
    shape = ("data.shuffle=false", "data.packing=false", "train.micro_batch=1", "train.steps=1")
    start = ("model.init=pretrained", "scheduler.warmup_steps=0")
    recipe = run(tiny_recipe(tmp_path, *shape, *start, family=family))
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()[:8]]
    expected = loss_of_transformers(directory, rows)
    assert metrics(recipe)[0]["loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.trap(
    "the spread of equal rewards, in float32, is above zero",
    "NVIDIA-NeMo/RL PR#4161",
    "one advantage is 4000 times too large",
)
@pytest.mark.parametrize("equal", [0.35, 0.4, 0.1])
def test_one_reward_beside_equal_ones_is_not_divided_by_a_rounding(equal):
    """Mean and deviation of the others by Python's statistics; equal others do not divide."""
    rewards = [equal] * 7 + [equal + 0.6]
    given = torch.tensor(rewards, dtype=torch.float32)
    found = advantages(given, 8, baseline="leave_one_out", scale="leave_one_out")
    expected = []
    for place, value in enumerate(given.tolist()):
        others = [one for at, one in enumerate(given.tolist()) if at != place]
        spread = statistics.stdev(others)
        expected.append((value - statistics.mean(others)) / (spread + 1e-6 if spread > 1e-9 else 1))
    assert found.tolist() == pytest.approx(expected, rel=1e-6)
    assert found.abs().max() < 1


@pytest.mark.trap(
    "in an odd batch one prompt of KTO's KL has its own reply",
    "huggingface/trl #1911",
    "the KL is too large, and with it every loss",
)
@pytest.mark.parametrize("count", [2, 3, 5, 8])
def test_no_prompt_of_the_kl_has_its_own_reply(tmp_path, count):
    """Each prompt has the reply of another, and each reply one prompt, for any number of rows."""
    mask = torch.tensor([False, True])
    samples = [((torch.tensor([at, 100 + at]), mask),) for at in range(count)]
    rows = SimpleNamespace(samples=samples, max_length=8)
    for seed in range(6):
        method = KtoMethod(tiny_recipe(tmp_path, "method=kto", f"run.seed={seed}"))
        pairs = [ids.tolist() for ids, _ in method._mismatched(rows, range(count))]
        assert [prompt for prompt, _ in pairs] == list(range(count))
        assert sorted(reply - 100 for _, reply in pairs) == list(range(count))
        assert all(reply - 100 != prompt for prompt, reply in pairs)
