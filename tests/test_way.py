"""The way of a batch stays short: how many files it runs through, and how many frames lie between `train` and its loss.

A number that grows is looked at: what does the reader of a step have to open now that they had not before?
"""

import pytest

from tests.world import run_world
from tools.count_way import count, tiny

MOST = {  # files of a step; files of the whole way; frames to the loss
    "sft": (15, 27, 9),
    "dpo": (19, 33, 9),
    "distill": (18, 30, 9),
    "grpo": (18, 46, 9),
}


def counted(rank, method, root):
    found = count(tiny(method, root))
    return [len(found[name]) for name in ("step", "way", "frames")], found


@pytest.mark.parametrize("method", MOST)
def test_the_way_of_a_batch_is_short(method, tmp_path):
    ((numbers, found),) = run_world(counted, 1, method, tmp_path)
    assert min(numbers) > 0 and all(mine <= most for mine, most in zip(numbers, MOST[method], strict=True)), found


def test_what_a_loss_calls_is_counted(tmp_path):
    ((_, found),) = run_world(counted, 1, "sft", tmp_path)
    assert {"methods/sft.py", "models/common/decoder.py", "losses/head/weighted_sum.py", "optim/update.py"} <= set(
        found["step"]
    )
    assert {"data/rows/cache.py", "data/rows/rows.py", "run/trainer.py"} <= set(found["way"])
    assert found["frames"][0] == "run/trainer.py:train_checked" and found["frames"][-1] == "methods/sft.py:loss"
