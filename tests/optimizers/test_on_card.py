"""dtrain's own optimizers on the pretend card: the CPU's numbers, and nothing that waits for the device."""

import pytest

from tests.optimizers.stepping import recipe_of
from tests.pretend.test_sft import assert_close, on_card, on_cpu

CASES = {
    "muon": ("optimizer.name=muon", "optimizer.lr=3e-3", "train.dtype=float64", "parallel.tp=2"),
    "int8": ("optimizer.state=int8", "train.dtype=float32", "parallel.tp=2"),
    "masters": ("optimizer.state=int8", "train.masters=bfloat16", "parallel.reduce_each=true"),
}
NEAR = {"muon": 1e-9, "int8": 1e-4, "masters": 3e-2}


@pytest.mark.parametrize("case", CASES)
def test_the_card_has_the_cpus_numbers_and_is_not_waited_for(tmp_path, case):
    shape = ["train.steps=3", *CASES[case]]
    alone = [one for one in shape if not one.startswith("parallel.tp")]
    expected = on_cpu(recipe_of(tmp_path, *alone, "run.name=cpu"))
    rows, felt = on_card(recipe_of(tmp_path, *shape, "run.name=card"), 2)
    assert_close(rows, expected, NEAR[case])
    assert not felt.count("sync", within="optimizers/") and not felt.count("pageable", within="optimizers/")
