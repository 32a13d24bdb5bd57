"""Adapters of PEFT that cannot be read, or not as they are: each is refused by the field or the tensor."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("peft")

import peft

from dtrain import models
from dtrain.adapters.lora import build_with_adapters
from dtrain.base.errors import UserError
from dtrain.base.model_directory import ADAPTER_CONFIG, ADAPTER_WEIGHTS, is_adapter_directory
from dtrain.checkpoint.huggingface.export import export
from dtrain.checkpoint.peft.config import adapter_problems, base_of, read_adapter_config
from dtrain.checkpoint.peft.files import read_adapter
from dtrain.training.preflight import notes
from tests.adapters.by_peft import IDS, load_base, logits, save_adapter, save_base
from tests.adapters.test_peft_files import change
from tests.models.oracle import save
from tests.problem_lines import lines, preflight
from tests.tiny import tiny_recipe

REFUSED = {
    "peft_type": ("LOHA", "peft_type is 'LOHA', and must be LORA"),
    "task_type": ("SEQ_2_SEQ_LM", ".*must be CAUSAL_LM"),
    "r": (0, "r is 0, and must be a whole number"),
    "target_modules": (None, ".*must be a list of names of layers"),
    "bias": ("all", ".*must be none: merge it in PEFT"),
    "lora_bias": (True, "lora_bias=True is not supported"),
    "target_parameters": ("experts", "target_parameters is 'experts', and must be a list of names of parameters"),
    "trainable_token_indices": ([1], "trainable_token_indices=.* is not supported"),
    "layer_replication": ([[0, 2]], "layer_replication=.* is not supported"),
    "use_qalora": (True, "use_qalora=True is not supported"),
    "alora_invocation_tokens": ([3], "alora_invocation_tokens=.* is not supported"),
    "of_a_later_peft": ({"x": 1}, "of_a_later_peft=.* is not supported"),
    "init_lora_weights": ("pissa_niter_4", ".*changes the base's own weights"),
    "layers_pattern": (["blocks"], "layers_pattern is .*`layers`"),
    "rank_pattern": ({"(": 2}, "rank_pattern is"),
}


@pytest.mark.parametrize("field", REFUSED)
def test_fields_that_cannot_be_used_are_refused_by_name(made, field):
    value, words = REFUSED[field]
    change(made / "adapter", **{field: value})
    with pytest.raises(UserError, match=f"{ADAPTER_CONFIG}: {words}"):
        read_adapter_config(made / "adapter")


def test_all_of_them_at_once(made):
    change(made / "adapter", **{field: value for field, (value, _) in REFUSED.items()})
    assert len(adapter_problems({"path": made / "adapter"}, models.read_config(made / "base"))) == len(REFUSED)


@pytest.mark.parametrize("more", [{}, {"modules_to_save": ["embed_tokens", "lm_head"]}])
def test_an_adapter_with_a_grown_vocabulary_says_so_and_the_advice_works(tmp_path, more):
    """PEFT writes the grown embedding and head whether or not modules_to_save names them."""
    base = save_base(tmp_path / "base", "qwen3")
    model = load_base(base)
    vocab = model.config.vocab_size
    model.resize_token_embeddings(vocab + 3, mean_resizing=False)
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM", **more)
    grown = peft.get_peft_model(model, config).eval()
    grown.save_pretrained(tmp_path / "adapter")
    words = (
        f"the adapter was trained with a vocabulary of {vocab + 3} tokens, and the model has {vocab}. Merge it in PEFT"
    )
    [problem] = lines(adapter_problems({"path": tmp_path / "adapter"}, models.read_config(base)))
    assert words in problem
    with pytest.raises(UserError, match=words):
        models.from_pretrained(tmp_path / "adapter")
    expected = logits(grown)
    again = load_base(base)
    again.resize_token_embeddings(vocab + 3)
    merged = peft.PeftModel.from_pretrained(again, str(tmp_path / "adapter")).merge_and_unload()
    save(merged, tmp_path / "merged")
    assert (models.from_pretrained(tmp_path / "merged").eval()(IDS) - expected).abs().max() < 5e-5


@pytest.mark.parametrize("field", ["target_modules", "exclude_modules", "rank_pattern", "alpha_pattern"])
@pytest.mark.parametrize("pattern, why", [
    ("(" * 5000 + ")" * 5000, "nested too deep"),
    ("(q_proj", r"missing \)"),
])  # fmt: skip
def test_expressions_that_cannot_be_used_are_refused_by_name(made, field, pattern, why):
    change(made / "adapter", **{field: {pattern: 4} if field.endswith("pattern") else pattern})
    with pytest.raises(UserError, match=rf"{ADAPTER_CONFIG}: {field} is .*{why}") as error:
        read_adapter_config(made / "adapter")
    assert len(str(error.value)) < 1000


def test_a_file_of_brackets_is_refused(made):
    (made / "adapter" / ADAPTER_CONFIG).write_text('{"r": ' + "[" * 5000 + "]" * 5000 + "}")
    with pytest.raises(UserError, match=rf"{ADAPTER_CONFIG} is not JSON \(it is nested deeper than 100 levels\)"):
        read_adapter_config(made / "adapter")


@pytest.mark.parametrize("start", [True, False, "gaussian", "orthogonal", "eva"])
def test_starts_that_leave_the_base_alone_are_read(made, start):
    read_adapter_config(change(made / "adapter", init_lora_weights=start, peft_version="9", eva_config={"rho": 2.0}))


@pytest.mark.trap(
    "an adapter of a tied head merged into the embedding",
    "huggingface/peft #2018",
    "other embeddings than were trained",
    "it is refused",
)
@pytest.mark.parametrize("target", [["q_proj", "lm_head"], ".*(embed_tokens|q_proj)"])
def test_an_adapter_of_head_or_embedding_is_refused(made, target):
    with pytest.raises(UserError, match="target_modules means (lm_head|model.embed_tokens), and dtrain adapts"):
        read_adapter_config(change(made / "adapter", target_modules=target))


@pytest.mark.trap(
    "an adapter whose names match nothing is taken",
    "vllm-project/vllm #34186",
    "the base model answers",
    "an error lists what does not fit",
)
def test_tensors_that_do_not_fit_are_listed(made):
    file = made / "adapter" / ADAPTER_WEIGHTS
    tensors = load_file(file)
    first = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    moved = tensors.pop(first)
    tensors[first.replace(".weight", ".default.weight")] = moved
    tensors[first.replace("model.model.", "model._orig_mod.model.")] = moved.clone()
    tensors[first.replace("lora_A", "lora_B")] = torch.zeros(3, 4)
    save_file(tensors, file)
    expected = [
        f"{file}: missing: {first}; is it an adapter of this model?",
        f"{file}: shape: {first.replace('lora_A', 'lora_B')} is [3, 4], the model has [64, 4]; is it an",
        "(of a compiled model: leave `_orig_mod.` out of its names)",
        "(an adapter's own name, which PEFT leaves out in files: save it with save_pretrained)",
    ]
    found = lines(adapter_problems({"path": made / "adapter"}, models.read_config(made / "base")))
    with pytest.raises(UserError) as caught:
        models.from_pretrained(made / "adapter")
    for problems in (found, str(caught.value).splitlines()):
        assert len(problems) == 4
        for one in expected:
            assert any(one in problem for problem in problems), (one, problems)


def test_an_adapter_of_another_model_writes_nothing(made):
    other = save_base(made / "other", "llama3")
    model = build_with_adapters(models.read_config(other), read_adapter_config(made / "adapter"))
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    with pytest.raises(UserError, match="q_proj.lora_B.weight is"):
        read_adapter(model, made / "adapter")
    assert not any(parameter.any() for parameter in model.parameters())
    assert adapter_problems({"path": made / "adapter"}, model.config)


def test_a_pickle_and_other_directories_are_refused(made):
    adapter = made / "adapter"
    (adapter / ADAPTER_WEIGHTS).rename(adapter / "adapter_model.bin")
    with pytest.raises(UserError, match="adapter_model.bin, a pickle.*save_pretrained"):
        read_adapter_config(adapter)
    (adapter / "adapter_model.bin").unlink()
    with pytest.raises(UserError, match="has no adapter_model.safetensors"):
        read_adapter_config(adapter)
    (adapter / ADAPTER_WEIGHTS).write_bytes(b"\x10\0\0\0\0\0\0\0{}")
    with pytest.raises(UserError, match="cut short or damaged"):
        models.from_pretrained(adapter)
    assert "cut short or damaged" in lines(adapter_problems({"path": adapter}, models.read_config(made / "base")))[0]
    with pytest.raises(UserError, match=f"lora.path={made / 'base'}: it has no adapter_config.json"):
        read_adapter_config(made / "base")
    with pytest.raises(UserError, match="there is no such directory"):
        read_adapter_config(made / "nowhere")
    save_adapter(made / "base", made / "again" / "mine")
    with pytest.raises(UserError, match=f"it has no adapter_config.json, and {made / 'again' / 'mine'} has one"):
        read_adapter_config(made / "again")
    assert is_adapter_directory(adapter) and not is_adapter_directory(made / "base")


def test_an_adapter_where_the_run_s_own_export_goes_is_refused(made):
    path = made / "runs" / "run" / "export"
    recipe = tiny_recipe(made, f"lora={{path: {path}}}", "checkpoint.export=final")
    assert any(problem.startswith(f"lora.path={path} is inside ") for problem in preflight(recipe, 1))


@pytest.mark.parametrize("form", ["adapter", "folded"])
def test_an_export_of_an_adapter_finds_its_base_from_anywhere(made, form):
    change(made / "adapter", base_model_name_or_path="../base")
    export(made / "adapter", made / "far" / "out", form=form)
    assert base_of(made / "far" / "out") == made / "base"


def test_an_adapter_of_no_layer_is_not_folded(made):
    empty = made / "empty"
    empty.mkdir()
    save_file({}, empty / ADAPTER_WEIGHTS)
    shutil.copy(made / "adapter" / ADAPTER_CONFIG, empty)
    change(empty, target_modules=["no_such_layer"])
    with pytest.raises(UserError, match="has no adapter of a layer"):
        export(empty, made / "out", form="folded")


def test_an_adapter_of_another_base_is_refused(made):
    """By its weights: a copy is the base, wherever it lies, and what is not here is noted."""
    adapter, file = made / "adapter", made / "adapter" / ADAPTER_CONFIG
    copy, other, wide = (made / name for name in ("copy", "other", "wide"))
    shutil.copytree(made / "base", copy)
    shutil.copytree(made / "base", other)
    tensors = load_file(other / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] += 1e-3
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    shutil.copytree(made / "base", wide)
    save_file({name: one.double() for name, one in tensors.items()}, wide / "model.safetensors")

    def found(model):
        recipe = tiny_recipe(made, "model.init=pretrained", f"lora={{path: {adapter}}}", f"model.path={model}")
        return [one for one in preflight(recipe, 1) if "base_model" in one], notes(recipe)

    assert found(made / "base") == found(copy) == ([], [])
    [problem], lines = found(other)
    assert problem.startswith(f"{file}: base_model_name_or_path is {made / 'base'}, and model.path={other} has other")
    assert f"Set model.path={made / 'base'}, or write {other} there" in problem and lines == []
    problems, [note] = found(wide)  # another dtype
    assert problems == [] and note.startswith(f"note: {file}: base_model_name_or_path is {made / 'base'}; whether")
    for name, said in (("nobody/gone", "is nobody/gone; whether"), (None, "names no base")):
        change(adapter, base_model_name_or_path=name)
        problems, [note] = found(other)
        assert problems == [] and said in note
    change(adapter, base_model_name_or_path="../other")
    assert found(other) == ([], []) and len(found(copy)[0]) == 1


def test_the_base_is_found_or_named(made, monkeypatch):
    adapter = made / "adapter"
    change(adapter, base_model_name_or_path="../base")
    assert base_of(adapter) == adapter / "../base"
    models.from_pretrained(adapter)
    monkeypatch.chdir(made)
    change(adapter, base_model_name_or_path="base")
    assert str(base_of(adapter)) == "base"
    shutil.rmtree(made / "base")
    change(adapter, base_model_name_or_path="nobody/no-such-model")
    with pytest.raises(UserError, match=f"{ADAPTER_CONFIG}: base_model_name.* is .*dtrain download nobody/no-such"):
        models.from_pretrained(adapter)
    change(adapter, base_model_name_or_path="/gone/base")
    with pytest.raises(UserError, match="is /gone/base, and no model is there"):
        models.from_pretrained(adapter)
    change(adapter, base_model_name_or_path=None)
    with pytest.raises(UserError, match="names no base"):
        models.from_pretrained(adapter)
