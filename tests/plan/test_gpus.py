"""The GPUs that `dtrain plan --gpu` knows."""

import json
from dataclasses import replace

import pytest
import torch

from dtrain.base.errors import RecipeError
from dtrain.base.hardware import DeviceFacts, peak_flops
from dtrain.commands.cli import main
from dtrain.commands.plan.background import PlannedPeak
from dtrain.commands.plan.hardware import GPUS, hardware_of
from dtrain.commands.plan.plan import make_plan
from dtrain.recipe.world import FASTEST_VALUES, format_overrides
from dtrain.training import load_recipe
from tests.tiny import tiny_recipe


def test_no_gpu_has_more_memory_than_is_sold():
    for gpu in GPUS.values():
        sold = int(gpu.name.split()[-2])  # "RTX 4090 24 GB"
        assert 0.9 * sold < gpu.memory_gib <= sold


def test_a_plan_names_the_gpu_that_is_asked_for(tmp_path, capfd):
    words = ["plan", "sft", f"model.path={tiny_recipe(tmp_path).model.path}", "--json", "--step-time", "1"]
    assert main([*words, "--gpu", "RTX4090"]) == 0
    assert json.loads(capfd.readouterr().out)["gpu"] == "RTX 4090 24 GB"


def test_a_gpu_without_bfloat16_is_told_so_and_has_no_flash_attention(tmp_path):
    packed = ["data.max_length=64", "data.packing=true", "train.global_batch=4"]
    for words in ([], ["train.dtype=bfloat16"]):
        with pytest.raises(RecipeError, match="a T4 16 GB does not support. Set train.dtype=float16 or float32"):
            make_plan(tiny_recipe(tmp_path, *packed, "train.dtype=auto", *words), 1, GPUS["t4"])
    assert torch.bfloat16 not in GPUS["t4"].arithmetic
    half = tiny_recipe(tmp_path, *packed, "train.dtype=float16")
    old, new = make_plan(half, 1, GPUS["t4"]), make_plan(half, 1, GPUS["l4"])
    assert old.step.flops[torch.float16] > new.step.flops[torch.float16]  # a mask hides pairs that are computed
    assert make_plan(tiny_recipe(tmp_path, "launch.device=cpu", "train.dtype=bfloat16"), 1, GPUS["t4"]).device == "cpu"


V100 = DeviceFacts(0, "one", "Tesla V100-SXM2-32GB", 32 * 2**30, (7, 0), "GPU-0")
A6000 = DeviceFacts(0, "one", "NVIDIA RTX A6000", 48 * 2**30, (8, 6), "GPU-1")


def test_a_gpu_that_is_not_in_the_table_is_planned_by_what_is_known_of_it():
    for device in (V100, A6000):
        hardware, (line,) = hardware_of(device)
        assert line == f"{device.name} is not in the table of GPUs: times are those of an A100 80 GB"
        assert (hardware.name, hardware.memory_gib) == (device.name, device.memory / 2**30)
        assert (torch.bfloat16 in hardware.arithmetic) == (device is A6000)
        assert hardware.arithmetic[torch.float16] == GPUS["a100"].arithmetic[torch.float16]
    assert hardware_of(replace(V100, name="NVIDIA H100 80GB HBM3")) == (GPUS["h100"], ())


@pytest.mark.slow
@pytest.mark.processes
def test_a_gpu_without_flash_attention_is_chosen_for_without_it(tmp_path):
    packed = ["data.max_length=64", "data.packing=true", "train.global_batch=4", "train.dtype=float16"]
    recipe = tiny_recipe(tmp_path, *packed, *(f"{key}=auto" for key in FASTEST_VALUES), "train.micro_batch=1")
    peaks = {}
    for device in (V100, A6000):
        with PlannedPeak(recipe, 1, "cuda") as planned:
            peak = planned.choose(device.memory, device, 2**40)
        assert f"{device.name} is not in the table" in peak.choice.lines[-1]
        fixed = load_recipe(recipe, format_overrides(peak.choice.values))
        assert peak.size == make_plan(fixed, 1, hardware_of(device)[0]).step.peak
        with PlannedPeak(fixed, 1, "cuda") as planned:
            assert planned.peak_if_too_large(device) is None and planned.peak().size == peak.size
        peaks[device.name] = peak.size
    assert peaks[V100.name] != peaks[A6000.name]


def test_a_gpu_with_a_plan_has_a_peak_for_mfu():
    """Names as CUDA gives them; the T4 has no bfloat16."""
    names = {
        "a100": "NVIDIA A100-SXM4-80GB",
        "h100": "NVIDIA H100 80GB HBM3",
        "h200": "NVIDIA H200",
        "b200": "NVIDIA B200",
        "3090": "NVIDIA GeForce RTX 3090",
        "4090": "NVIDIA GeForce RTX 4090",
        "5090": "NVIDIA GeForce RTX 5090",
        "l40s": "NVIDIA L40S",
        "a10": "NVIDIA A10",
        "l4": "NVIDIA L4",
        "t4": "Tesla T4",
        "mi300x": "AMD Instinct MI300X",
    }
    assert names.keys() == GPUS.keys()
    for key, name in names.items():
        for dtype in (torch.bfloat16, torch.float16):
            assert peak_flops(name, str(dtype).removeprefix("torch.")) == GPUS[key].arithmetic.get(dtype)
