"""Decoding on the pretend card in half precision: variable-length attention over slots where it proves itself."""

import torch

from dtrain import models
from dtrain.inference.engine import Engine
from dtrain.inference.varlen_decode import SlotFlashAttention, check_varlen_decode, choose_varlen_decode
from dtrain.models.read_config import read_config
from tests.pretend.mutants import Mutant
from tests.pretend.runs import rows_of, train_on_card
from tests.pretend.test_methods import grpo
from tests.pretend.worlds import run_pretend
from tests.rollout.test_varlen_decode import launches
from tests.tiny import tiny_recipe

HALF = torch.bfloat16


def chosen(rank, root):
    """Return what is said of a tiny model and of heads that are too large, what an engine takes by itself, and the
    launches of a layer."""
    device, config = torch.device("cuda", rank), read_config(tiny_recipe(root).model.path)
    flash, note = choose_varlen_decode(config, HALF, device)
    sizes = {"heads": 4, "key_heads": 2, "window": 40, "dtype": HALF, "device": device}
    counts = launches(None, device, HALF), launches(SlotFlashAttention(), device, HALF)
    by_itself = Engine(models.build(config, HALF).to(device))._flash
    return (
        type(flash),
        note,
        check_varlen_decode(SlotFlashAttention(), head_dim=512, value_dim=512, **sizes),
        by_itself,
        counts,
    )


def test_it_proves_itself_where_it_is(tmp_path):
    ((kind, note, problem, by_itself, counts),) = run_pretend(chosen, 1, tmp_path)
    assert (kind, note, by_itself) == (SlotFlashAttention, "", None)
    assert problem == "varlen_attn does not run here: FlashAttention only supports head dimension at most 256"
    assert counts == (28, 16)  # and each of the two calls makes the state of a generator, as one kernel more


REFUSED = Mutant(
    "dtrain.inference.varlen_decode",
    "problem = check_varlen_decode(flash, **shape, dtype=dtype, device=device)",
    "problem = 'too old'",
)


def decoded(rank, recipe):
    return train_on_card(rank, recipe, 1).count("kernel", within="inference/kv_cache.py")


def test_a_rollout_by_graphs(tmp_path):
    """What trains measures the same of both: attention by varlen_attn, and by products where it is refused."""
    counts = []
    for name, mutants in (("flash", []), ("products", [REFUSED])):
        keys = "train.dtype=bfloat16", "grpo.cuda_graphs=true", "grpo.sampling.max_new_tokens=12"
        recipe = grpo(tmp_path, *keys, name=name)
        counts += run_pretend(decoded, 1, recipe, mutants=mutants)
        assert max(row["mismatch_kl"] for row in rows_of(recipe)) < 2e-5
    assert counts[0] > counts[1]  # those of the proof
