"""Micro-batches by tokens (`train.dynamic_batch`): the numbers are those of one process with fixed ones."""

import pytest
from torch.nn.modules.module import register_module_forward_pre_hook

from dtrain.base.errors import Stopped
from dtrain.parallel.mesh import Runtime
from dtrain.parallel.tensor import VocabEmbedding
from dtrain.training.trainer import train
from tests.methods.comparing import assert_same_metrics
from tests.methods.recipes import recipe_of
from tests.running import interrupt, run
from tests.tiny import tiny_recipe, write_rows

SFT = ("train.steps=null", "train.epochs=2.5", "train.global_batch=6")  # 13 + 13 + 7 rows: the last batch has 3
VAL = ("data.val.path=${data.train.path}", "train.validate_every=2")


def test_precomputed_log_probabilities_are_those_of_fixed_micro_batches(tmp_path):
    fixed = ("data.packing=false", "train.micro_batch=1")
    one = run(recipe_of(tmp_path, "dpo over the batch", *fixed, name="one"))
    precomputed = ("train.dynamic_batch=true", "dpo.precompute=true")
    two = run(recipe_of(tmp_path, "dpo over the batch", *fixed, *precomputed, name="two"), 2)
    assert_same_metrics(two, one)


def test_fewer_micro_batches_and_a_resume_on_another_mesh(tmp_path, capfd):
    def sft(*overrides, name):
        fixed = ("data.packing=false", "train.micro_batch=1", *SFT, *VAL)
        return tiny_recipe(tmp_path, *fixed, *overrides, name=name)

    write_rows(tmp_path / "rows.jsonl", count=13)
    by_tokens = "train.dynamic_batch=true"
    note = "micro-batches: rows of like length, up to 32 tokens with their padding"
    passes, recipes = [], [sft(name="one"), sft(by_tokens, name="dynamic")]
    for recipe in recipes:
        forwards = []
        counting = register_module_forward_pre_hook(lambda module, _, seen=forwards: seen.append(type(module)))
        train(recipe, Runtime())
        counting.remove()
        passes.append(forwards.count(VocabEmbedding))
    assert note in capfd.readouterr().err and passes[1] < 0.8 * passes[0]
    with pytest.raises((Stopped, AssertionError), match="stopped after step"):
        interrupt(sft(by_tokens, "checkpoint.every=3", name="resumed"), 2, 2)
    resumed = run(sft(by_tokens, "checkpoint.every=3", name="resumed"), 3)
    for other in (recipes[1], resumed):
        assert_same_metrics(other, recipes[0])
