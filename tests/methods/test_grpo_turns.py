"""GRPO over an environment: what is trained of its turns, what their length costs, episodes that are lost."""

import math
from dataclasses import replace

import pytest

from dtrain.inference.native import NativeEngine
from tests.methods.comparing import rows_of, samples_of
from tests.running import run
from tests.tiny import tiny_grpo


def test_turns_in_an_environment(tmp_path):
    """The environment's words are read and not trained. Meshes: tests/methods/test_every_method.py."""
    fixed = ("grpo.environment=tests.methods.judges.Asks", "grpo.rewards=[]", "train.steps=4", "train.micro_batch=2")
    turns = ("grpo.sampling.stop=[w1,w2,w3]", "grpo.beta=0.1")  # about every second word ends a turn
    one = run(tiny_grpo(tmp_path, *fixed, *turns, name="one"))
    samples = samples_of(one)
    assert any("w5 w6 w7" in row["completion"] for row in samples)
    assert all(row["reward"] == row["earned"] for row in samples)
    rows = rows_of(one)
    mean = sum(row["tokens"] for row in samples if row["step"] == 1) / 16
    assert rows[0]["completion_len"] < mean  # of which some are the environment's


EVERY_WORD = f"grpo.sampling.stop=[{','.join(f'w{word}' for word in range(2, 67))}]"


@pytest.mark.parametrize("stop", [EVERY_WORD, "grpo.sampling.stop=[]", "some"])
def test_length_is_punished_by_what_the_model_drew_in_its_longest_turn(tmp_path, monkeypatch, stop):
    """Turns of one token each are free, however many they are and whatever is read between them; a turn that was cut
    costs 1, and one that comes near costs a part."""
    fixed = ("grpo.environment=tests.methods.judges.Asks", "grpo.rewards=[]", "train.steps=2", "grpo.overlong_cache=3")
    recipe = tiny_grpo(tmp_path, *fixed, *([stop] if stop != "some" else []))
    generate, longest = NativeEngine.generate, {}

    def some(engine, requests, should_stop=None, **version):
        """Completions of 1 to 5 tokens that end by themselves."""
        found = []
        for request, one in zip(requests, generate(engine, requests, should_stop, **version), strict=True):
            ids = one.ids[: 1 + request.prompt_index + len(request.prompt) % 2]
            found.append(replace(one, ids=ids, logprobs=one.logprobs[: len(ids)], finish="stop"))
            key = (request.prompt_index, request.sample_index)
            longest[key] = max(longest.get(key, 0), len(ids))
        return found

    if stop == "some":
        monkeypatch.setattr(NativeEngine, "generate", some)
    run(recipe)
    samples = samples_of(recipe)
    punished = [row["earned"] - row["reward"] for row in samples]
    if stop == "some":
        expected = [max(0, longest[row["group"], number % 4] - 3) / 3 for number, row in enumerate(samples)]
        assert {0.0, 1 / 3, 2 / 3} <= set(expected)
    else:
        cut = [row["finish"] == "length" for row in samples]
        expected = [float(one) for one in cut]
        assert all(cut) if stop != EVERY_WORD else not any(cut) and max(row["tokens"] for row in samples) > 6
    assert punished == pytest.approx(expected, abs=1e-12)


def test_the_longest_completion_of_an_environment_is_all_its_turns(tmp_path):
    """dr_grpo divides by it: 3 turns of up to 6 tokens."""
    fixed = (
        "grpo.environment=tests.methods.judges.Asks",
        "grpo.rewards=[]",
        "train.steps=1",
        "scheduler.warmup_steps=0",
        "grpo.max_turns=3",
    )
    recipe = tiny_grpo(tmp_path, *fixed, EVERY_WORD, "grpo.loss=dr_grpo", "train.global_batch=16")
    run(recipe)
    drawn = [(row["advantage"], (row["tokens"] + 3) / 4) for row in samples_of(recipe)]  # 3 words between turns
    expected = -sum(advantage * tokens for advantage, tokens in drawn) / (16 * 18)
    assert expected and rows_of(recipe)[0]["loss"] == pytest.approx(expected, rel=1e-9)


def test_episodes_whose_environment_fails_teach_nothing(tmp_path, capfd):
    """Whatever other rewards say of them; the others of their groups are judged and trained without them."""
    turns = ("grpo.environment=tests.methods.judges.Breaks", "grpo.sampling.stop=[w1,w2,w3]", "train.steps=2")
    recipe = tiny_grpo(tmp_path, *turns, "grpo.rewards=[{fn: tests.methods.judges.even}]", "train.micro_batch=2")
    run(recipe)
    samples = samples_of(recipe)
    lost = [row for row in samples if row["finish"] == "lost"]
    assert 0 < len(lost) < len(samples)
    assert rows_of(recipe)[0]["lost_frac"] == sum(row["step"] == 1 for row in lost) / 16
    assert all(row["reward"] is None and row["advantage"] == 0 and "earned" not in row for row in lost)
    assert all(row["rewards"]["even"] is not None for row in lost)
    for row in samples:
        if row["finish"] != "lost":
            assert row["reward"] == pytest.approx(row["rewards"]["even"] + row["earned"], rel=1e-12)
    told = capfd.readouterr()
    assert (told.out + told.err).count("environment tests.methods.judges.Breaks failed in step:") == 1
    assert all(math.isfinite(row["loss"]) for row in rows_of(recipe))
