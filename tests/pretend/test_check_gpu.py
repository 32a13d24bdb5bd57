"""tools/check_gpu, whole, on two pretend cards."""

import os
import subprocess
from functools import partial

import pytest
import torch

from tests.pretend import cuda
from tests.pretend.card import Card
from tests.pretend.mutants import Mutant
from tests.pretend.worlds import ROOT, run_pretend
from tests.world import run_world
from tools.gpu.check import PARTS, check
from tools.gpu.layers import shares_of
from tools.gpu.parity import described
from tools.gpu.ranks import Ranks, join
from tools.gpu.runs import Options


def called(rank, function, size, args):
    return function(rank, size, *args)


def joined(patience, grouped, environ, rank, size, store):
    import torch

    torch.set_num_threads(1)
    os.environ.update(environ)
    cuda.insert(cuda.card())
    join(rank, size, store if grouped and size > 1 else None, patience)


def forked(function, size, *args, timeout=60.0, patience=30.0, grouped=True, environ=None):
    """As `tools.gpu.ranks.Ranks`, by forks of the process that has the cards."""
    join = partial(joined, patience, grouped, environ or {})
    return run_world(called, size, function, size, args, timeout=timeout, join=join)


def test_all_parts_go_well(tmp_path):
    """But for the trace: torch's profiler does not run in a fork."""
    out = tmp_path / "check.txt"
    parts = tuple(name for name in PARTS if name != "a step's trace")
    status = run_pretend(half_checked, 1, out, parts, 2, card=Card(devices=2), timeout=400.0)
    text = out.read_text()
    assert status == [0], text
    assert text.count("\nok ") > 40 and "NVIDIA H100" in text and text.rstrip().endswith("== nothing wrong")
    assert "8 rows: 8 equal to the end" in text and "24 of 24 tensors arrived" in text
    assert "a collective without its other rank" in text and text.count(": the same bits\n") == 2


def test_shares_of_a_trace():
    kernels = [("gemm", 0.0, 40.0), ("ncclDevKernel", 30.0, 60.0), ("gemm", 70.0, 75.0), ("add", 95.0, 100.0)]
    shares = shares_of(kernels)
    assert shares["seconds"] == 1e-4
    assert shares["idle"] == pytest.approx(0.3) and shares["NCCL alone"] == pytest.approx(0.2)
    assert shares["gaps under 20 us"] == pytest.approx(0.1)


def half_checked(rank, out, names=("GRPO", "devices and versions"), world=1):
    some = {name: PARTS[name] for name in names}
    return check(Options(world, out, compiled=False, small=True), forked, some)


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
    assert "WRONG  8 rows: 0 equal" in out.read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_rank_without_a_gpu_says_so():
    ranks = Ranks()
    with pytest.raises(RuntimeError, match=r"rank 0:[\s\S]*CUDA does not start"):
        ranks(described, 1, timeout=60.0)
    done = subprocess.run([ROOT / "tools" / "check_gpu"], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr == "torch sees no CUDA device here\n"
