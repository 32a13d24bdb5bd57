"""tools/check_gpu, whole, on two pretend cards."""

import subprocess
from functools import partial

import pytest
import torch

from tests.pretend import cuda
from tests.pretend.card import Card
from tests.pretend.mutants import Mutant
from tests.pretend.worlds import ROOT, run_pretend
from tests.world import run_world
from tools.gpu.check import Asked, check
from tools.gpu.parts import PARTS, described
from tools.gpu.ranks import join, run


def called(rank, function, size, args):
    return function(rank, size, *args)


def joined(patience, rank, size, store):
    import torch

    torch.set_num_threads(1)
    cuda.insert(cuda.card())
    join(rank, size, store, patience)


def forked(function, size, *args, timeout=60.0, patience=30.0):
    """As `tools.gpu.ranks.run`, by forks of the process that has the cards."""
    return run_world(called, size, function, size, args, timeout=timeout, join=partial(joined, patience))


def checked(rank, out, world):
    return check(Asked(world, out, compiled=False, small=True), forked)


def test_all_parts_go_well(tmp_path):
    out = tmp_path / "check.txt"
    status = run_pretend(checked, 1, out, 2, card=Card(devices=2), timeout=400.0)
    text = out.read_text()
    assert status == [0], text
    assert text.count("\nok ") > 20 and "NVIDIA H100" in text and text.rstrip().endswith("== nothing wrong")
    assert "8 rows: 8 equal to the end" in text
    assert "a collective without its other rank" in text


def half_checked(rank, out, names=("saves", "devices and versions")):
    some = {name: PARTS[name] for name in names}
    return check(Asked(1, out, compiled=False, small=True), forked, some)


def test_what_is_wrong_is_told_and_the_rest_goes_on(tmp_path):
    out = tmp_path / "check.txt"
    lost = Mutant("dtrain.models.common.functions", ".to(positions.device, non_blocking=True)", "")
    assert run_pretend(half_checked, 1, out, mutants=[lost]) == [1]
    text = out.read_text()
    assert "WRONG" in text and "same device" in text and "NVIDIA H100" in text and "== 1 wrong" in text


def test_graphs_that_draw_other_tokens_are_wrong(tmp_path):
    stale = Mutant("dtrain.inference.graphs", "self.tokens.copy_(tokens)\n        self.logprobs", "self.logprobs")
    out = tmp_path / "check.txt"
    part = ("graph decode against eager",)
    assert run_pretend(half_checked, 1, out, part, mutants=[stale]) == [1]
    assert "WRONG  0.6B, 8 rows: 0 equal" in out.read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_rank_without_a_gpu_says_so():
    with pytest.raises(RuntimeError, match=r"rank 0:[\s\S]*set_device"):
        run(described, 1, timeout=60.0)
    done = subprocess.run([ROOT / "tools" / "check_gpu"], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr == "torch sees no CUDA device here\n"
