"""Facts known before a run from its model's directory and its files, in the user's terms."""

import json

import pytest

from dtrain.base.errors import RecipeError
from dtrain.parallel.mesh import Runtime
from dtrain.training import load_recipe
from dtrain.training.trainer import train
from tests.problem_lines import lines, missing_problems, preflight, shapes
from tests.tiny import save_weights, tiny_grpo, tiny_recipe, write_model, write_pairs


def problems(tmp_path, *overrides):
    return "\n".join(preflight(load_recipe(tiny_recipe(tmp_path), overrides), 1))


def test_a_sound_recipe_has_no_problem(tmp_path):
    assert problems(tmp_path) == ""
    assert problems(tmp_path, "data.val.path=${data.train.path}") == ""


@pytest.mark.parametrize(
    ("overrides", "answer"),
    [
        (["model.path=/no/such/place"], "there is no directory '/no/such/place'"),
        (["model.init=pretrained"], "has neither model.safetensors nor model.safetensors.index.json"),
        (["data.train.path=nowhere.jsonl"], "data.train.path: there is no file nowhere.jsonl"),
        (["data.train.path=x/*.jsonl"], "data.train.path: no file matches x/*.jsonl"),
        (["data.val.path=nowhere.jsonl"], "data.val.path: there is no file nowhere.jsonl"),
        (["data.train.sources=[{path: gone.csv}]"], "data.train.sources[0].path: there is no file gone.csv"),
        (["data.chat_template=gone.jinja"], "data.chat_template: there is no file gone.jinja"),
        (["checkpoint.resume=gone"], "checkpoint.resume=gone: there is no such directory"),
        (["optimizer.lr=-1"], "optimizer.lr=-1.0 must be"),
    ],
)
def test_each_mistake_is_named(tmp_path, overrides, answer):
    assert answer in problems(tmp_path, *overrides)


@pytest.mark.parametrize(
    ("overrides", "answer"),
    [
        (["model.path=Qwen/Qwen3-0.6B"], "Fetch it with `dtrain download Qwen/Qwen3-0.6B`"),
        (["method=dpo", "dpo.reference=Qwen/Qwen3-0.6B"], "dpo.reference=Qwen/Qwen3-0.6B is not a directory here"),
        (["method=distill", "distill.teacher=Qwen/Qwen3-8B"], "Fetch it with `dtrain download Qwen/Qwen3-8B`"),
        (["data.train.path=tatsu-lab/alpaca"], "dataset of the Hugging Face hub"),
    ],
)
def test_what_is_on_the_hub_is_awaited_and_no_mistake(tmp_path, overrides, answer):
    recipe = load_recipe(tiny_recipe(tmp_path), overrides)
    assert answer in "\n".join(missing_problems(recipe)) and "Fetch" not in "\n".join(preflight(recipe, 1))


def test_mistakes_of_several_kinds_come_together(tmp_path):
    recipe = load_recipe(tiny_recipe(tmp_path), ["model.path=gone", "data.train.path=gone.jsonl", "train.steps=0"])
    assert len(preflight(recipe, 1)) == 3


@pytest.mark.parametrize(
    ("overrides", "answers"),
    [
        (["dpo.reference={bare}"], ["dpo.reference={bare} has no config.json, so it is not a model. Use"]),
        (["dpo.reference={run}"], ["dpo.reference={run} has no config.json, so it is not a model. Set dpo.reference"]),
        (["dpo.reference={file}"], ["dpo.reference={file}: there is no such directory. Use start, base, none (start"]),
        (["dpo.reference=none"], []),
        (["method=grpo", "grpo.beta=1", "grpo.reference=none"], ["grpo.reference=none: there is no such directory"]),
        (["method=distill", "distill.teacher=/gone"], ["distill.teacher=/gone: there is no such directory. Use a"]),
        (["model.path=/gone", "dpo.reference=/here"], ["model.path: there is no directory '/gone'", "dpo.reference=/"]),
        (
            ["model.path={bare}", "dpo.reference={bare}"],
            ["{bare} has no config.json: model.path", "dpo.reference={bare} has no config.json"],
        ),
    ],
)
def test_each_model_that_is_none_is_named_once_by_its_own_key(tmp_path, overrides, answers):
    places = {name: tmp_path / name for name in ("bare", "run", "file")}
    places["bare"].mkdir()
    (places["run"] / "export").mkdir(parents=True)
    places["file"].touch()
    drawn = [] if not any("grpo" in one for one in overrides) else ["grpo.sampling.max_new_tokens=8"]
    overrides = ["method=dpo", *drawn, *(one.format_map(places) for one in overrides)]
    found = shapes(load_recipe(tiny_recipe(tmp_path), overrides), 1)
    assert len(found) == len(answers), found
    for problem, answer in zip(found, answers, strict=True):
        assert problem.startswith(answer.format_map(places)), problem


def test_a_tokenizer_beyond_the_models_vocabulary(tmp_path):
    model = write_model(tmp_path / "small", vocab_size=66)
    found = problems(tmp_path, f"model.path={model}")
    assert "highest id is 66, but config.json's vocab_size is 66" in found
    padded = write_model(tmp_path / "padded", vocab_size=128)
    assert problems(tmp_path, f"model.path={padded}") == ""


def test_no_tokenizer_and_no_config(tmp_path):
    model = write_model(tmp_path / "bare")
    (model / "tokenizer.json").unlink()
    assert "tokenizer" in problems(tmp_path, f"model.path={model}")
    (model / "config.json").unlink()
    assert "has no config.json" in problems(tmp_path, f"model.path={model}")


def test_weights_that_an_index_names_and_the_directory_lacks(tmp_path):
    model = write_model(tmp_path / "sharded")
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    (model / "one.safetensors").touch()
    overrides = (f"model.path={model}", "model.init=pretrained")
    assert "names files that do not exist: two.safetensors" in problems(tmp_path, *overrides)
    index.write_text("{}")
    assert "is damaged: it has no weight_map" in problems(tmp_path, *overrides)
    (model / "model.safetensors").touch()
    assert "model.safetensors: cut short or damaged (a header of 0 bytes)" in problems(tmp_path, *overrides)
    save_weights(model)
    assert problems(tmp_path, *overrides) == ""


@pytest.mark.trap(
    "fewer KV heads than ranks of tensor parallel",
    "huggingface/transformers #48307",
    "a crash in the middle of the forward, or a head in pieces",
    "replicated where that works, refused before the run where not",
)
@pytest.mark.parametrize(
    ("tp", "answer"),
    [
        (1, ""),
        (2, ""),
        (4, ""),
        (0, ""),  # the recipe's own check refuses it
        (3, "does not divide the model's 4 query heads. Use 1, 2 or 4"),
        (3, "parallel.tp=3 and the model's 2 KV heads: neither divides the other. Use 1, 2 or 4"),
        (8, "does not divide the model's 4 query heads. Use 1, 2 or 4"),
    ],
)
def test_heads_that_tensor_parallel_cannot_share_out(tmp_path, tp, answer):
    found = problems(tmp_path, f"parallel.tp={tp}", "parallel.dp_shard=1").replace("parallel.tp=0 must", "")
    assert answer in found and bool(answer) == ("Use 1" in found)


@pytest.mark.parametrize(("inner", "tp", "fits"), [(9, 4, False), (10, 4, True), (20, 8, False), (22, 8, True)])
def test_mlps_of_which_a_rank_would_hold_nothing(tmp_path, inner, tp, fits):
    model = write_model(tmp_path / "narrow", num_attention_heads=8, intermediate_size=inner)
    found = problems(tmp_path, f"model.path={model}", f"parallel.tp={tp}", f"launch.nproc={tp}")
    allowed = ". Use 1 or 2" if inner == 9 else ". Use 1, 2 or 4"
    said = f"parallel.tp={tp} leaves a rank none of the {inner} inner dimensions of the model's MLPs{allowed}"
    assert (said in found) != fits and ("inner dimensions" in found) != fits


def test_every_violation_of_a_mesh_comes_with_what_fits(tmp_path):
    model = write_model(tmp_path / "odd", num_attention_heads=12, num_key_value_heads=6, head_dim=16, vocab_size=9)
    found = problems(tmp_path, f"model.path={model}", "parallel.tp=8", "parallel.cp=3", "data.max_length=5")
    for part in (
        "cp 3 × tp 8 = 24 does not divide 1 process",
        "data.max_length=6 or more",
        "12 query heads. Use 1, 2 or 3.\n",
        "6 KV heads: neither divides the other. Use 1, 2 or 3.\n",
        "leaves a rank none of the model's 9 tokens. Use 1, 2 or 3.\n",
    ):
        assert part in f"{found}\n", part


def kept_by_a_run(root, name, **changes):
    """A run's directory with a save and the model's small files, as `init_from` is given it."""
    directory = root / "runs" / name
    (directory / "checkpoints" / "step-3").mkdir(parents=True)
    write_model(directory / "model", **changes)
    return directory


def renumbered(directory):
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    words = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {word: len(words) - 1 - number for word, number in words.items()}
    path.write_text(json.dumps(tokenizer))


@pytest.mark.parametrize("place", ["", "checkpoints", "checkpoints/step-3"])
def test_init_from_a_run_of_another_kind_of_model_is_refused(tmp_path, place):
    same, other = kept_by_a_run(tmp_path, "same"), kept_by_a_run(tmp_path, "other", rope_theta=50.0)
    assert preflight(tiny_recipe(tmp_path, f"checkpoint.init_from={same / place}"), 1) == []
    overrides = [f"checkpoint.init_from={other / place}"]
    (problem,) = preflight(tiny_recipe(tmp_path, *overrides), 1)
    assert "checkpoint.init_from=" in problem and "another kind of model than model.path (rope" in problem
    assert problem.endswith("checkpoint.allow_changes=[model.config].")
    assert preflight(tiny_recipe(tmp_path, *overrides, "checkpoint.allow_changes=[model.config]"), 1) == []
    renumbered(same / "model")
    (problem,) = preflight(tiny_recipe(tmp_path, f"checkpoint.init_from={same / place}"), 1)
    assert "have other ids than in model.path" in problem


def test_a_reference_of_another_tokenizer_is_refused_and_one_without_is_not(tmp_path):
    recipe = tiny_recipe(tmp_path)
    other = save_weights(write_model(tmp_path / "other"))
    write_pairs(tmp_path / "pairs.jsonl")
    dpo = [f"data.train.path={tmp_path / 'pairs.jsonl'}", "method=dpo", f"dpo.reference={other}"]
    assert preflight(load_recipe(recipe, dpo), 1) == []
    renumbered(other)
    (problem,) = preflight(load_recipe(recipe, dpo), 1)
    assert problem.startswith(f"dpo.reference={other}: 66 tokens have other ids")
    (other / "tokenizer.json").unlink()
    assert preflight(load_recipe(recipe, dpo), 1) == []


@pytest.mark.parametrize("how", ["is", "leads to"])
def test_an_export_does_not_take_the_place_of_the_model(tmp_path, how):
    model = write_model(tmp_path / "runs" / "run" / "export" if how == "is" else tmp_path / "model")
    if how == "leads to":
        (tmp_path / "runs" / "run").mkdir(parents=True)
        (tmp_path / "runs" / "run" / "export").symlink_to(model)
    recipe = tiny_recipe(tmp_path, f"model.path={model}", "checkpoint.export=final")
    (problem,) = preflight(recipe, 1)
    assert problem.startswith(f"model.path={model} is inside ")
    assert preflight(load_recipe(recipe, ["run.name=another"]), 1) == []


def test_kernels_of_linear_attention_are_refused_where_there_is_none(tmp_path):
    keys = "model.linear_attention=fla", "train.dtype=bfloat16"
    found = preflight(tiny_recipe(tmp_path, *keys), 1)
    assert found == ["model.linear_attention=fla: this model has no linear attention. Leave it out."]
    assert preflight(tiny_recipe(tmp_path, *keys, family="qwen3.5"), 1) == []


def test_models_with_linear_attention_do_not_share_prompts(tmp_path):
    recipe = tiny_grpo(tmp_path, "train.share_prompts=true", family="qwen3.5")
    (problem,) = preflight(recipe, 1)
    assert problem.startswith("train.share_prompts=true: this model has linear attention")
    assert preflight(load_recipe(recipe, ["train.share_prompts=auto"]), 1) == []


@pytest.mark.parametrize(
    ("overrides", "answer"),
    [
        (["lora={target: [all-linear, experts], dora: true}", "parallel.ep=2"], "for which PEFT has no DoRA"),
        (["optimizer.name=muon", "parallel.tp=2"], "optimizer.name=muon updates complete rows of parameters"),
        (["optimizer.state=int8", "parallel.tp=2"], "optimizer.state=int8 updates complete rows of parameters"),
        (["optimizer.lr=-1"], "optimizer.lr=-1.0 must be"),
    ],
)
def test_a_caller_from_python_is_told_what_validate_tells(tmp_path, overrides, answer):
    """Before any work: no process group is asked for, and no run directory is made."""
    recipe = tiny_recipe(tmp_path, *overrides, family="qwen3-moe")
    with pytest.raises(RecipeError) as refused:
        train(recipe, Runtime(rank=0, local_rank=0, world_size=2))
    assert answer in str(refused.value) and lines(refused.value.problems) == preflight(recipe, 2)
    assert not recipe.run.directory.exists()
