"""Every method on modules of transformers, on meshes: the numbers of dtrain's own modules in one process."""

import json
from functools import partial

import pytest
import torch
import transformers as hf

from dtrain.base.errors import UserError
from tests.methods.recipes import recipe_of
from tests.models.library_configs import tiny_config
from tests.problem_lines import preflight
from tests.running import assert_each, assert_parity, assert_same_rows, metrics, run, run_all, trajectory, weights
from tests.tiny import VOCAB, tiny_grpo, write_model

FAMILY = "olmo3"  # layers with a window and with full attention
MESHES = {
    "dp2": ("train.micro_batch=3",),
    "cp2": ("train.micro_batch=6", "parallel.cp=2"),
    "tp2": ("train.micro_batch=6", "parallel.tp=2", "parallel.sequence_parallel=false"),
}
# method, mesh, further options
CASES = [
    ("dpo", "tp2", ()),
    ("kto", "dp2", ()),
    ("pairs", "tp2", ()),
    ("distill", "cp2", ()),
    ("grpo", "tp2", ()),
    ("sft", "tp2", ("lora={rank: 4, dora: true, dropout: 0.2}",)),
    ("dpo", "cp2", ("lora={rank: 4, dropout: 0.2}",)),
    ("sft", "dp2", ("train.freeze=['*embed_tokens*','*mlp*']", "train.max_grad_norm=0.01")),
]


def test_methods_on_meshes_have_the_numbers_of_the_native_model(tmp_path):
    native, library = [], []
    for number, (method, mesh, options) in enumerate(CASES):
        root = tmp_path / str(number)
        root.mkdir()
        one_process = ("model.implementation=native", "train.micro_batch=12")
        on_mesh = ("model.implementation=transformers", *MESHES[mesh])
        native.append(recipe_of(root, method, *options, *one_process, name="native", family=FAMILY))
        library.append(recipe_of(root, method, *options, *on_mesh, name="library", family=FAMILY))
    run_all(native)
    run_all(library, 2)
    checks = []
    for (method, mesh, options), expected, recipe in zip(CASES, native, library, strict=True):
        check = partial(assert_numbers_of, recipe, expected)
        checks.append((f"{method}, {mesh} {options}", check))
    assert_each(checks)
    samples = [row["mismatch_kl"] for row in metrics(library[4]) if "loss" in row]
    assert max(map(abs, samples)) < 1e-12  # the engine's log-probabilities are the trainer's


def assert_numbers_of(recipe, expected):
    # Rotary frequencies of transformers are numbers in float32, so angles differ by 1e-8. Adam's division by small
    # gradients makes more of it in weights.
    assert_parity(recipe, trajectory(expected), weights(expected), loss=1e-8, norm=1e-8, weight=1e-6)


def library_model(directory, model_type, **changes):
    """Write a tiny model of a family that dtrain does not have, with weights, and return its directory."""
    write_model(directory)
    config = tiny_config(model_type, tie_word_embeddings=False, initializer_range=0.3, **changes)
    torch.manual_seed(3)
    hf.AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


def test_a_teacher_and_a_sampled_mixture_of_transformers_on_meshes(tmp_path):
    """A teacher of another implementation than its student, and GRPO of a mixture of experts in float32."""
    taught, sampled = tmp_path / "taught", tmp_path / "sampled"
    taught.mkdir(), sampled.mkdir()
    teacher = library_model(taught / "glm4", "glm4")
    distill = partial(recipe_of, taught, "distill", f"distill.teacher={teacher}", family="qwen3")
    mixture = library_model(sampled / "olmoe-tied", "olmoe", bos_token_id=0, eos_token_id=1, pad_token_id=None)
    assert json.loads((mixture / "config.json").read_text())["vocab_size"] == VOCAB
    shape = ("train.dtype=float32", "train.steps=2", "checkpoint.every=2", "scheduler.warmup_steps=0")
    grpo = partial(tiny_grpo, sampled, *shape, "model.init=pretrained", family="olmoe")
    expected = run_all([distill("train.micro_batch=12", name="one"), grpo("train.micro_batch=8", name="one")])
    on_tp = distill(*MESHES["tp2"], name="tp2")
    on_dp = grpo("train.micro_batch=2", "parallel.ep=2", name="dp2")
    run_all([on_tp, on_dp], 2)
    assert_numbers_of(on_tp, expected[0])
    assert_same_rows(trajectory(on_dp), trajectory(expected[1]), 1e-5, 1e-4, "olmoe")
    rows = [row for row in metrics(on_dp) if "loss" in row]
    assert len(rows) == 2 and all(abs(row["mismatch_kl"]) < 1e-6 for row in rows)
    assert not any("expert" in name or "balance" in name for name in rows[0])  # transformers' routers report nothing


def test_a_model_that_cannot_be_sampled_is_refused_before_any_work(tmp_path):
    library_model(tmp_path / "falcon_h1-tied", "falcon_h1", bos_token_id=0, eos_token_id=1, pad_token_id=None)
    recipe = tiny_grpo(tmp_path, "model.init=pretrained", "data.packing=false", family="falcon_h1")
    problems = "\n".join(preflight(recipe, 1))
    assert "grpo.engine=native cannot sample from FalconH1ForCausalLM" in problems and "grpo.engine=http" in problems
    with pytest.raises(UserError, match="it has a state besides the keys and values of attention"):
        run(recipe)  # the engine itself refuses it too
