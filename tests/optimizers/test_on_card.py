"""dtrain's own optimizers on pretend cards: the CPU's numbers, and a wait for the device only where states lie on the
host, one a step."""

import pytest

from tests.optimizers.stepping import pageable_copies_in_steps, recipe_of, waits_in_steps
from tests.pretend.test_sft import assert_close, on_card, on_cpu

FLOAT32 = 2e-6  # relative, of loss and norm: sums in another order
INT8 = "optimizer.state=int8"
ON_HOST = "parallel.optimizer_offload=true"
CASES = {  # ranks, keys, those that the CPU's run does without, how near
    "muon": (2, ("optimizer.name=muon", "optimizer.lr=3e-3", "train.dtype=float64"), ("parallel.tp=2",), 1e-9),
    "states on the host": (2, ("train.dtype=float64",), (ON_HOST,), 1e-12),
    "int8": (2, (INT8, "train.dtype=float32"), ("parallel.tp=2",), 1e-4),
    "int8 on the host": (1, (INT8, "train.dtype=float32"), (ON_HOST,), FLOAT32),
    "masters in bfloat16": (2, (INT8, "train.masters=bfloat16", "parallel.reduce_each=true"), (), 3e-2),
}


@pytest.mark.parametrize("case", CASES)
def test_the_card_has_the_cpus_numbers(tmp_path, case):
    size, keys, of_cards, near = CASES[case]
    shape = ["train.steps=3", *keys]
    expected = on_cpu(recipe_of(tmp_path, *shape, "run.name=cpu"))
    rows, felt = on_card(recipe_of(tmp_path, *shape, *of_cards, "run.name=card"), size)
    assert_close(rows, expected, near)
    assert waits_in_steps(felt) == (3 if ON_HOST in of_cards else 0)
    assert not pageable_copies_in_steps(felt)
