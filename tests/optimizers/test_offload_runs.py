"""Whole runs with masters on the host against the same runs with masters on the card, bit for bit: references that
follow, adapters, frozen parts; saved, resumed, exported."""

import pytest
import torch
from safetensors.torch import load_file

from tests.optimizers.test_offload import OFFLOAD
from tests.pretend.test_methods import dpo, grpo, lora
from tests.pretend.test_sft import on_card
from tests.tiny import tiny_recipe

KEYS = "train.dtype=bfloat16", "optimizer.state=bfloat16", "checkpoint.every=2", "scheduler.warmup_steps=0"
FOLLOWS = "sync_every=1", "sync_mix=0.4"


def sft(root, *keys, name):
    return tiny_recipe(root, *keys, name=name)


CASES = {
    "grpo": (grpo, 1, ("grpo.beta=0.1", "grpo.cuda_graphs=true", *(f"grpo.{one}" for one in FOLLOWS))),
    "grpo-tp": (grpo, 2, ("parallel.tp=2", "grpo.beta=0.1", "grpo.sync_every=2")),
    "dpo": (dpo, 2, tuple(f"dpo.{one}" for one in FOLLOWS)),
    "dora": (lora, 2, ("lora.dora=true", "lora.modules_to_save=[lm_head]")),
    "frozen": (sft, 2, ("train.freeze=['model.layers.0.*']", "parallel.dp_replicate=2")),
}


def numbers(rows):
    return [tuple(row[key] for key in ("step", "loss", "grad_norm")) for row in rows]


@pytest.mark.parametrize("name", CASES)
def test_a_run_saved_resumed_and_exported_has_the_bits(tmp_path, name):
    make, size, keys = CASES[name]
    found = []
    for where, offload in (("card", ()), ("host", (OFFLOAD,))):
        shared = *KEYS, *keys, *offload
        on_card(make(tmp_path, *shared, "train.steps=2", name=where), size)
        recipe = make(tmp_path, *shared, "checkpoint.export=final", "train.steps=4", name=where)
        rows, _ = on_card(recipe, size)
        files = sorted((recipe.run.directory / "export").glob("*.safetensors"))
        tensors = {key: tensor for file in files for key, tensor in load_file(file).items()}
        found.append((numbers(rows), tensors))
    (rows, tensors), (rows_of_host, tensors_of_host) = found
    assert len(rows) == 4 and rows == rows_of_host
    assert tensors.keys() == tensors_of_host.keys()
    assert all(torch.equal(tensors[key], tensors_of_host[key]) for key in tensors)
