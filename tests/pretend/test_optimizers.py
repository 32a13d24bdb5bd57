"""The ways to hold an optimizer's state, on pretend cards: the same numbers as on the CPU."""

import pytest

from tests.pretend.test_sft import EXACT, assert_close, on_card, on_cpu
from tests.tiny import tiny_recipe

FLOAT32 = 2e-6  # relative, of loss and norm: sums in another order
LOW = "optimizer.state=int8", "train.masters=bfloat16", "train.dtype=float32"
CASES = {  # ranks, keys, those of them that a CPU does without, how near
    "muon": (2, ("optimizer.name=muon",), (), EXACT),
    "states on the host": (2, (), ("parallel.optimizer_offload=true",), EXACT),
    "int8": (2, ("optimizer.state=int8", "train.dtype=float32"), (), FLOAT32),
    "int8 on the host, masters in bfloat16": (1, LOW, ("parallel.optimizer_offload=true",), FLOAT32),
}


@pytest.mark.parametrize("case", CASES)
def test_states_are_the_cpus(tmp_path, case):
    size, keys, of_cards, rtol = CASES[case]
    shape = "train.steps=3", *keys
    expected = on_cpu(tiny_recipe(tmp_path, *shape, family="gemma3", name="cpu"))
    rows, felt = on_card(tiny_recipe(tmp_path, *shape, *of_cards, family="gemma3", name="card"), size)
    assert_close(rows, expected, rtol)
    assert felt.count("sync", within="stream") == (3 if of_cards else 0)  # a step waits once for what goes back
