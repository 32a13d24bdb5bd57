"""The GPUs that `dtrain plan --gpu` knows."""

import json

import pytest
import torch

from dtrain.base.errors import RecipeError
from dtrain.base.gpus import peak_flops
from dtrain.commands.cli import main
from dtrain.commands.plan.hardware import GPUS
from dtrain.commands.plan.plan import make_plan
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
        with pytest.raises(RecipeError, match="T4 16 GB does not compute: set train.dtype=float16 or float32"):
            make_plan(tiny_recipe(tmp_path, *packed, "train.dtype=auto", *words), 1, GPUS["t4"])
    assert torch.bfloat16 not in GPUS["t4"].arithmetic
    half = tiny_recipe(tmp_path, *packed, "train.dtype=float16")
    old, new = make_plan(half, 1, GPUS["t4"]), make_plan(half, 1, GPUS["l4"])
    assert old.step.flops[torch.float16] > new.step.flops[torch.float16]  # a mask hides pairs that are computed
    assert make_plan(tiny_recipe(tmp_path, "launch.device=cpu", "train.dtype=bfloat16"), 1, GPUS["t4"]).device == "cpu"


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
