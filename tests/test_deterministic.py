"""`run.deterministic`: what it sets while a run lasts, the sums that it replaces, the kernel that it refuses."""

import pytest
import torch

from dtrain.base.torch_functions import cumsum, deterministic_algorithms, prefix_sums
from dtrain.launch.rank import RunJob, run_rank
from dtrain.launch.rank_info import RankInfo
from dtrain.parallel.mesh import StopFlag
from tests.tiny import tiny_recipe


@pytest.mark.parametrize("length", [0, 1, 2, 3, 64, 1000])
def test_doubled_sums_are_cumulative_sums(length):
    values = torch.randn(3, length, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(3, length, dtype=torch.float64)
    [grad] = torch.autograd.grad(prefix_sums(values), values, upstream)
    torch.testing.assert_close(prefix_sums(values), values.cumsum(-1), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(grad, upstream.flip(-1).cumsum(-1).flip(-1), rtol=1e-13, atol=1e-13)
    assert cumsum(values.float(), torch.float64).dtype == torch.float64


def test_a_run_has_the_mode_and_gives_it_back(tmp_path):
    modes = []

    def note(recipe, runtime):
        modes.append(
            (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled())
        )

    for value in ("true", "false"):
        recipe = tiny_recipe(tmp_path, f"run.deterministic={value}", name=value)
        environ = {}
        run_rank(RunJob(recipe, train=note), RankInfo(environ=environ), torch.device("cpu"), StopFlag())
        assert environ == ({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if value == "true" else {})
        assert not torch.are_deterministic_algorithms_enabled()
    assert modes == [(True, False), (False, False)]


def test_it_leaves_the_environment_that_a_user_set():
    environ = {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}
    with deterministic_algorithms(environ):
        pass
    assert environ == {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}
