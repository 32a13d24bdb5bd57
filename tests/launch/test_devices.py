"""Problems of a run's GPUs, from facts made up here: no GPU is asked for."""

import threading
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from dtrain.base.errors import UserError
from dtrain.commands.plan.background import Peak, PlannedPeak
from dtrain.commands.plan.hardware import USABLE_MEMORY
from dtrain.launch import devices
from dtrain.launch.devices import (
    DeviceFacts,
    check_on_all_ranks,
    choose_device,
    device_notes,
    find_device_problems,
    start_device,
)
from dtrain.launch.processes import run_workers
from dtrain.launch.rank import RunJob, _find_device_problems
from dtrain.launch.rank_info import RankInfo
from tests.tiny import tiny_recipe

H100 = DeviceFacts(0, "one", "NVIDIA H100 80GB HBM3", 80 * 2**30, (9, 0), "GPU-0")
T4 = DeviceFacts(0, "one", "Tesla T4", 15 * 2**30, (7, 5), "GPU-9")
KERNELS = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "compute_120"]


def ranks(*facts: DeviceFacts) -> list[DeviceFacts]:
    """Each with a rank and a card of its own."""
    return [replace(one, rank=rank, uuid=f"GPU-{rank}") for rank, one in enumerate(facts)]


@pytest.mark.parametrize("world", [ranks(H100), ranks(H100, H100)])
def test_gpus_of_one_kind_are_fine(world):
    assert find_device_problems(world, "auto", KERNELS) == device_notes(world) == []


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_bfloat16_takes_capability_8(dtype):
    (problem,) = find_device_problems([T4], dtype, KERNELS)
    assert "Tesla T4 (15 GiB, compute capability 7.5) does not compute in bfloat16" in problem
    assert f"train.dtype={dtype}" in problem
    assert "Set train.dtype=float16 or float32" in problem


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_other_dtypes_take_any_capability(dtype):
    assert find_device_problems([T4], dtype, KERNELS) == []


@pytest.mark.parametrize(
    ("capability", "kernels", "runs"),
    [
        ((8, 9), ["sm_80"], True),  # a later minor version
        ((8, 0), ["sm_86"], False),  # an earlier one
        ((9, 0), ["sm_80", "sm_86"], False),  # binaries are for one major version
        ((9, 0), ["compute_80"], True),  # PTX for all later ones
        ((9, 0), ["sm_90a"], True),
        ((12, 0), ["sm_120"], True),
        ((6, 1), ["sm_75", "compute_120"], False),
        ((6, 1), [], True),  # a build that does not say
    ],
)
def test_torch_has_kernels_for_the_device(capability, kernels, runs):
    refusals = find_device_problems([replace(T4, capability=capability)], "float32", kernels)
    assert (refusals == []) == runs
    assert runs or "this torch has no kernels for Tesla T4" in refusals[0]


def test_ranks_take_one_kind_of_gpu():
    (problem,) = find_device_problems(
        ranks(H100, H100, replace(H100, name="NVIDIA A100", capability=(8, 0))), "auto", KERNELS
    )
    assert (
        "of different kinds, NVIDIA H100 80GB HBM3 (80 GiB, compute capability 9.0) on rank 0, 1; NVIDIA A100"
        in problem
    )
    assert "on rank 2: ranks would take different kernels" in problem


def test_other_memory_is_only_told():
    world = ranks(H100, replace(H100, memory=94 * 2**30))
    assert find_device_problems(world, "auto", KERNELS) == []
    assert "the smallest memory and the slowest GPU limit the run" in device_notes(world)[0]


def test_two_ranks_on_one_card():
    (problem,) = find_device_problems([H100, replace(H100, rank=1)], "auto", KERNELS)
    assert problem.startswith("2 ranks on one share 1 GPU, and NCCL takes one rank each")
    assert (
        find_device_problems([H100, replace(H100, rank=1, host="another")], "auto", KERNELS) == []
    )  # ids are of a host's own


def test_slices_work_alone():
    part = replace(H100, name="NVIDIA H100 80GB HBM3 MIG 1g.10gb", memory=10 * 2**30)
    assert find_device_problems([part], "auto", KERNELS) == []
    (problem,) = find_device_problems(ranks(part, part), "auto", KERNELS)
    assert "rank 0 has a MIG slice" in problem
    assert "set launch.nproc=1" in problem


def agreed(starts):
    """Return the message that each rank gets, whose devices start so."""
    store, told = dist.HashStore(), {}

    def rank(number: int) -> None:
        try:
            place = RankInfo(rank=number, world_size=len(starts))
            check_on_all_ranks(starts[number], place, store, lambda seen: find_device_problems(seen, "auto", KERNELS))
        except UserError as error:
            told[number] = str(error)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(len(starts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return told


def test_every_rank_is_told_what_rank_0_finds():
    told = agreed([lambda one=one: one for one in ranks(H100, T4, H100)])
    assert set(told) == {0, 1, 2}
    assert len(set(told.values())) == 1
    assert told[1].splitlines() == find_device_problems(ranks(H100, T4, H100), "auto", KERNELS)
    assert len(told[1].splitlines()) == 2
    check_on_all_ranks(lambda: H100, RankInfo(), None, lambda seen: find_device_problems(seen, "auto", KERNELS))


@pytest.mark.parametrize("bad", [{0}, {2}, {1, 2}])
def test_every_rank_is_told_of_a_device_that_does_not_start(bad):
    def start(number):
        if number in bad:
            raise UserError("the driver is too old")
        return replace(T4, rank=number)

    told = agreed([partial(start, number) for number in range(3)])
    assert told == dict.fromkeys(range(3), "the driver is too old")  # said once; of the others nothing is known


class FakeCuda:
    """torch.cuda of a build with CUDA that sees `count` devices and whose start raises `error`."""

    def __init__(self, monkeypatch, count: int, error: Exception | None = None):
        def init():
            raise error

        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "init", init)


def test_a_build_without_cuda(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UserError, match=r"launch.device=cuda: torch .* is built without CUDA: install a build with it"):
        choose_device("cuda", RankInfo())


@pytest.mark.parametrize("value", ["", "-1", "7"])
def test_devices_that_are_hidden(monkeypatch, capsys, tmp_path, value):
    FakeCuda(monkeypatch, 0)
    place = RankInfo(environ={"CUDA_VISIBLE_DEVICES": value})
    with pytest.raises(UserError, match=f"launch.device=cuda: CUDA_VISIBLE_DEVICES={value} hides all GPUs: unset it"):
        choose_device("cuda", place)
    monkeypatch.setattr(devices, "DRIVER", tmp_path / "none")
    assert choose_device("auto", place) == torch.device("cpu")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(devices, "DRIVER", tmp_path)
    assert choose_device("auto", place) == torch.device("cpu")
    assert (
        f"takes the CPU, though this machine has a GPU: CUDA_VISIBLE_DEVICES={value} hides" in capsys.readouterr().err
    )


def test_more_processes_than_visible_devices(monkeypatch):
    FakeCuda(monkeypatch, 1)
    place = RankInfo(world_size=2, local_world_size=2, environ={"CUDA_VISIBLE_DEVICES": "3"})
    with pytest.raises(UserError, match=r"2 processes on a machine with 1 CUDA device \(CUDA_VISIBLE_DEVICES=3\)"):
        choose_device("auto", place)


def test_the_launcher_tells_of_what_hides_them_too(monkeypatch, tmp_path):
    FakeCuda(monkeypatch, 1)
    with pytest.raises(UserError, match=r"2 processes on a machine with 1 CUDA device \(CUDA_VISIBLE_DEVICES=3\)"):
        run_workers(RunJob(tiny_recipe(tmp_path, "launch.nproc=2")), {"CUDA_VISIBLE_DEVICES": "3"})


def test_a_driver_that_is_too_old(monkeypatch):
    FakeCuda(monkeypatch, 1, RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nmore"))
    with pytest.raises(UserError, match=r"CUDA does not start on .*: The NVIDIA driver .* is too old") as caught:
        start_device(torch.device("cuda", 0), RankInfo())
    assert "built for CUDA 13.0: update the driver" in str(caught.value)
    assert "more" not in str(caught.value)


def test_a_device_without_room_is_told_the_peak_and_what_helps(tmp_path):
    recipe = tiny_recipe(tmp_path, "train.micro_batch=4", "train.global_batch=8", "train.dtype=float32")
    with PlannedPeak(recipe, 1, "cuda") as roomy:
        assert roomy.peak_if_too_large(replace(H100, memory=2**40)) is None
        peak = roomy._peak.size
        assert roomy.peak().words.startswith("planned peak")
    with PlannedPeak(recipe, 1, "cuda") as tight:
        # It fits, but for what CUDA itself takes.
        too_large = tight.peak_if_too_large(replace(H100, memory=int(peak * 1.02)))
    assert too_large.size == peak
    with PlannedPeak(recipe, 1, "cuda") as small:
        too_large = small.peak_if_too_large(replace(H100, memory=int(peak * 0.8 / USABLE_MEMORY)))
    assert too_large.size == peak
    assert "this does not fit: the peak is" in too_large.too_much
    assert "the smallest change that fits is train.micro_batch=2" in too_large.too_much
    assert "metrics.plan=false" in too_large.too_much


@pytest.mark.parametrize("share", [0.95, 1.05])
def test_a_run_ends_where_the_peak_is_more_than_the_memory_and_not_only_than_its_usable_share(tmp_path, capfd, share):
    def peak_if_too_large(device):
        return Peak("", int(share * device.memory), "it takes too much")

    planned = SimpleNamespace(peak_if_too_large=peak_if_too_large)
    reasons = _find_device_problems(tiny_recipe(tmp_path, "train.dtype=float32"), planned, [H100])
    assert ("it takes too much" in reasons) == (share > 1)
    assert ("note: it takes too much" in capfd.readouterr().err) == (share < 1)
