"""The other methods on pretend cards: equal to the CPU's in float64, on one rank and on several."""

import pytest

from tests.methods.test_distill import teacher_at
from tests.pretend.test_sft import EXACT, assert_close, on_card, on_cpu
from tests.tiny import tiny_grpo, tiny_recipe, write_pairs

STEPS = "train.steps=3"


def dpo(root, *keys, name):
    pairs = root / "pairs.jsonl"
    if not pairs.exists():
        write_pairs(pairs)
    section = "method=dpo", f"data.train.path={pairs}", "train.global_batch=4", "train.micro_batch=2"
    return tiny_recipe(root, STEPS, *section, *keys, name=name)


def grpo(root, *keys, name):
    return tiny_grpo(root, STEPS, *keys, name=name)


def distill(root, *keys, name):
    return tiny_recipe(root, STEPS, "method=distill", f"distill.teacher={teacher_at(root)}", *keys, name=name)


def lora(root, *keys, name):
    return tiny_recipe(root, STEPS, "lora.rank=4", "lora.dropout=0.1", *keys, name=name)


CASES = {
    "dpo-sft-term": (dpo, 2, ("dpo.loss=[sigmoid, sft]",), ()),
    "grpo-tp": (grpo, 2, (), ("parallel.tp=2",)),
    "distill-topk": (distill, 2, ("distill.top_k=8",), ("parallel.tp=2",)),
    "lora": (lora, 2, (), ()),
}


@pytest.mark.parametrize("method", CASES)
def test_float64_is_the_cpus(tmp_path, method):
    make, size, keys, mesh = CASES[method]
    expected = on_cpu(make(tmp_path, *keys, name="cpu"))
    rows, _ = on_card(make(tmp_path, *keys, *mesh, name="card"), size)
    assert_close(rows, expected, EXACT)
