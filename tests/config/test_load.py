"""Recipes in: defaults as recipe.md fixes them, overrides, types, and every mistake answered at once."""

import ast
import copy
import inspect
import pickle
import subprocess
import sys
import traceback
from dataclasses import asdict, is_dataclass, replace
from itertools import pairwise

import pytest
import yaml

from dtrain import recipe as config
from dtrain.base.errors import RecipeError, UserError
from dtrain.recipe import rollouts, schema, spelling
from dtrain.training import SECTIONS, load_recipe, recipe_and_problems, recipe_keys
from tests.problem_lines import lines

# The block of recipe.md, less what it shows as an example: run.name, launch.nproc, the paths, data.val, train.steps.
DEFAULTS = """
method: sft
run: {name: sft, dir: runs, seed: 0}
launch: {nproc: 1, device: auto, max_restarts: 0}
model: {path: null, init: pretrained}
data: {train: {path: null, format: auto}, val: null, max_length: 4096, packing: true, loss_on: assistant, shuffle: true,
  too_long: truncate}
parallel: {dp_replicate: 1, dp_shard: -1, cp: 1, tp: 1, sequence_parallel: auto, cp_rotate: allgather,
  custom_plan: null, cpu_offload: false, reshard_after_forward: default}
train: {steps: null, epochs: null, global_batch: 64, micro_batch: auto, dtype: auto, max_grad_norm: 1.0,
  activation_checkpointing: auto, compile: false, validate_every: auto, skip_nonfinite: 0}
optimizer: {name: adamw, lr: 0.00001, betas: [0.9, 0.95], eps: 0.00000001, weight_decay: 0.1}
scheduler: {name: cosine, warmup: 0.03, warmup_steps: null, min_lr_ratio: 0.1}
checkpoint: {every: 100, keep_last: 3, resume: auto, async_save: true, export: final, init_from: null}
metrics: {every: 1, tensorboard: auto, wandb: null}
dpo: {loss: sigmoid, beta: 0.1, label_smoothing: 0.0, reference: start, sft_weight: 0.0, loss_weights: null,
  f_divergence: reverse_kl, ld_alpha: null}
grpo: {prompts_per_step: 16, group_size: 8, updates_per_rollout: 1, loss: dapo, beta: 0.0, clip: [0.2, 0.2],
  advantage: group, rewards: [{fn: math_exact, weight: 1.0}],
  sampling: {temperature: 1.0, top_k: null, top_p: 1.0, max_new_tokens: 512}, engine: native}
distill: {teacher: null, top_k: null, kl: forward, temperature: 1.0}
"""


def problems(recipe=None, *overrides):
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe or {}, overrides)
    return lines(caught.value.problems)


def contains(whole, part):
    if isinstance(part, dict):
        return all(key in whole and contains(whole[key], value) for key, value in part.items())
    if isinstance(part, list) and part and isinstance(part[0], dict):
        return len(whole) == len(part) and all(map(contains, whole, part))
    return whole == part and type(whole) is type(part)


def test_defaults_are_those_of_the_recipe_page():
    of_all_methods = asdict(schema.make_recipe_type(SECTIONS, SECTIONS)())
    assert contains(of_all_methods | {"run": asdict(load_recipe({}).run)}, yaml.safe_load(DEFAULTS))


def test_a_recipe_saved_with_the_sections_of_all_methods_is_no_other_one():
    """As earlier versions saved one: it resumes without differences, and its other sections are not read."""
    recipe = load_recipe({"method": "dpo", "dpo": {"beta": 0.2}, "model": {"path": "m"}})
    others = {name: asdict(section()) for name, section in SECTIONS.items()}
    saved = yaml.safe_load(config.to_yaml(recipe))
    assert saved.keys() & others.keys() == {"dpo"}
    old = yaml.safe_dump({**others, **saved})
    assert config.diff_recipes(old, recipe) == []
    loaded = load_recipe(yaml.safe_load(old))
    assert loaded == recipe and loaded.unused_keys == [] and config.to_yaml(loaded) == config.to_yaml(recipe)
    changed = load_recipe(yaml.safe_load(old), ["method=kto"])
    assert changed.unused_keys == ["dpo.beta"] and changed.kto.beta == 0.1
    assert config.diff_recipes(old, changed) == [("method", "dpo", "kto")]
    others["grpo"]["beta"] = 0.5
    assert load_recipe({**others, **saved}).unused_keys == ["grpo.beta"]
    assert config.diff_recipes(yaml.safe_dump({**others, **saved}), recipe) == [("grpo.beta", 0.5, 0.0)]


def test_keys_of_another_method_stay_with_a_recipe():
    written = load_recipe({"grpo": {"sampling": {"temperature": 0.5}}}, ["dpo={beta: 1.0}"])
    assert written.unused_keys == ["grpo.sampling.temperature", "dpo"]
    assert set(load_recipe(written).unused_keys) == {"grpo.sampling.temperature", "dpo.beta"}
    with pytest.raises(
        RecipeError, match="grpo.sampling.temprature is not a key of a recipe; did you mean grpo.sampling.te"
    ):
        load_recipe({"grpo": {"sampling": {"temprature": 0.5}}})


def test_every_key_is_documented_where_it_is_defined():
    sections = [
        cls for cls in [*vars(schema).values(), *vars(rollouts).values(), *SECTIONS.values()] if is_dataclass(cls)
    ]
    assert len(sections) > 25
    for cls in sections:
        nodes = ast.parse(inspect.getsource(cls)).body[0].body
        pairs = [pair for pair in pairwise(nodes) if isinstance(pair[0], ast.AnnAssign)]
        documented = {field.target.id for field, text in pairs if isinstance(text, ast.Expr)}
        for key, hint in inspect.get_annotations(cls).items():
            if is_dataclass(hint):
                continue  # a section: its class says what it is
            assert key in documented, f"{cls.__name__}.{key}"


def test_a_file_then_overrides(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("model: {path: m}\ntrain: {steps: 5, global_batch: 8}\noptimizer:\n  lr: 1e-5\n")
    recipe = load_recipe(path, ["train.steps=7", "optimizer.kwargs.x=c=d", "data.val.path=v.jsonl"])
    assert (recipe.run.name, recipe.train.steps, recipe.train.global_batch) == ("mine", 7, 8)
    assert recipe.optimizer.lr == 1e-5 and recipe.optimizer.kwargs == {"x": "c=d"}
    assert recipe.data.val == schema.DataSource(path="v.jsonl")


@pytest.mark.parametrize(
    ("override", "key", "expected"),
    [
        ("optimizer.lr=1e-5", "optimizer.lr", 1e-5),
        ("optimizer.lr='3e-4'", "optimizer.lr", 3e-4),
        ("optimizer.lr=1", "optimizer.lr", 1.0),
        ("train.steps=1e3", "train.steps", 1000),
        ("train.max_grad_norm=null", "train.max_grad_norm", None),
        ("checkpoint.export=null", "checkpoint.export", "none"),
        ("run.name=2024", "run.name", "2024"),
        ("data.train.path=[a.jsonl,b/*.csv]", "data.train.path", ["a.jsonl", "b/*.csv"]),
        ("optimizer.betas=[0.8,0.9]", "optimizer.betas", [0.8, 0.9]),
        ("optimizer.betas[1]=0.99", "optimizer.betas", [0.9, 0.99]),
        ("scheduler.warmup_steps=${grpo.group_size}", "scheduler.warmup_steps", 8),
        ("data.template_kwargs={enable_thinking: false}", "data.template_kwargs", {"enable_thinking": False}),
        ("metrics.tensorboard=false", "metrics.tensorboard", False),
        ("train.compile=yes", "train.compile", True),
    ],
)
def test_overrides(override, key, expected):
    value = load_recipe({}, [override])
    for part in key.split("."):
        value = getattr(value, part)
    assert value == expected and type(value) is type(expected)


def test_a_scheduler_in_stages_and_weighted_sources():
    recipe = load_recipe(
        {"data": {"train": {"sources": [{"path": "a.jsonl", "weight": 2}, {"path": ["b.csv"], "format": "text"}]}}},
        ["scheduler=[{name: linear, steps: 5, warmup_steps: 5}, {name: cosine}]"],
    )
    assert recipe.scheduler == [schema.Stage(name="linear", steps=5, warmup_steps=5), schema.Stage(name="cosine")]
    assert recipe.data.train.sources[0] == schema.WeightedSource(path="a.jsonl", weight=2.0)
    assert load_recipe(yaml.safe_load(config.to_yaml(recipe))) == recipe


def test_a_recipe_made_in_python_may_refer_to_others_and_a_loaded_one_means_what_it_says(monkeypatch):
    monkeypatch.setenv("RUNS", "here/${run.name}")
    made = schema.Recipe(run=schema.Run(name="a", dir="x-${run.name}"), model=schema.Model(path="${oc.env:RUNS}"))
    loaded = load_recipe(made)
    assert loaded.run.dir == "x-a" and loaded.model.path == "here/${run.name}"
    assert load_recipe(loaded).model.path == "here/${run.name}"


def test_a_list_keeps_its_places_where_the_environment_is_silent(monkeypatch):
    monkeypatch.delenv("NOWHERE", raising=False)
    monkeypatch.setenv("HERE", "second.jsonl")
    recipe = load_recipe({"data": {"train": {"path": ["${oc.env:HERE}", "b.jsonl", "${oc.env:HERE}"]}}})
    assert recipe.data.train.path == ["second.jsonl", "b.jsonl", "second.jsonl"]
    assert "b.jsonl" in config.to_yaml(recipe) and "second" not in config.to_yaml(recipe)
    with pytest.raises(RecipeError, match="the environment has no NOWHERE"):
        load_recipe({"data": {"train": {"path": ["${oc.env:NOWHERE}", "b.jsonl"]}}})


def test_yaml_round_trip_and_diff():
    recipe = load_recipe({"model": {"path": "m"}, "train": {"steps": 3}}, ["optimizer.lr=2.5e-7", "run.name=x"])
    assert load_recipe(yaml.safe_load(config.to_yaml(recipe))) == recipe
    other = load_recipe({"model": {"path": "n"}, "train": {"steps": 3}}, ["optimizer.betas=[0.9,0.99]", "run.name=x"])
    assert config.diff_recipes(config.to_yaml(recipe), other) == [
        ("model.path", "m", "n"),
        ("optimizer.lr", 2.5e-7, 1e-5),
        ("optimizer.betas", [0.9, 0.95], [0.9, 0.99]),
    ]
    assert (
        config.diff_recipes("model: {path: m}\ntrain: {steps: 3}\noptimizer: {lr: 2.5e-7}\nrun: {name: x}", recipe)
        == []
    )


@pytest.mark.parametrize(
    ("override", "answer"),
    [
        ("train.stpes=3", "train.stpes is not a key of a recipe; did you mean train.steps?"),
        ("trian.steps=3", "trian.steps is not a key of a recipe. Use train.steps"),
        ("global_batch=8", "global_batch is not a key of a recipe; did you mean train.global_batch?"),
        ("train.dtype=bf16", "train.dtype=bf16 is not one of auto, bfloat16, float16, float32, float64; did you mean"),
        ("train.steps=abc", "train.steps=abc must be a whole number or null"),
        ("train.steps=1.5", "train.steps=1.5 must be a whole number or null"),
        ("train.steps=true", "train.steps=true must be a whole number or null"),
        ("train.global_batch=null", "train.global_batch=null must be a whole number"),
        ("run.deterministic=maybe", "run.deterministic=maybe must be true or false"),
        ("optimizer.lr=fast", "optimizer.lr=fast must be a number, for example 1e-05"),
        ("train.max_grad_norm=big", "train.max_grad_norm=big must be a number or null, for example 1.0"),
        ("optimizer.betas=0.9", "must be a list of numbers: it has 2, such as [0.9, 0.95]"),
        ("optimizer.betas=[0.9,x]", "optimizer.betas=[0.9, 'x'] must be a list of numbers"),
        ("optimizer=adam", "optimizer is a mapping with the keys name, lr"),
        ("scheduler=null", "scheduler=null: scheduler is a mapping with the keys name"),
        ("data.train=x.jsonl", "data.train is a mapping with the keys path"),
        ("grpo.rewards=[{fnn: a}]", "grpo.rewards[0].fnn is not a key of a recipe; did you mean grpo.rewards[0].fn?"),
        ("optimizer.lr", "an override is written key=value"),
        ("--optimizer.lr=1", "an override is written key=value, without dashes"),
        ("optimizer.betas=[0.9", "the value is not YAML"),
        (f"optimizer.kwargs{'.a' * 90}=1", "the value is nested too deep"),
        ("optimizer.betas[7]=1", "optimizer.betas[7]=1: list index out of range"),
        ("train.steps=${nowhere}", "train.steps: Interpolation key 'nowhere' not found"),
        ("optimizer.eps=???", "optimizer.eps is left open (???)"),
    ],
)
def test_mistakes_are_answered(override, answer):
    assert answer in "\n".join(problems({}, override))


def test_all_mistakes_come_at_once():
    errors = problems(
        {"train": {"stpes": 1, "dtype": "bf16", "learning_rate": 1e-5}, "modle": {"path": "m"}},
        "optimizer.lr=fast",
        "data.max_length=${nowhere}",
    )
    assert len(errors) == 6


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("learning_rate", "optimizer.lr"),
        ("num_train_epochs", "train.epochs"),
        ("gradient_accumulation_steps", "train.global_batch"),
        ("per_device_train_batch_size", "train.micro_batch"),
        ("sample_packing", "data.packing"),
        ("cutoff_len", "data.max_length"),
        ("max_seq_len", "data.max_length"),
        ("warmup_ratio", "scheduler.warmup"),
        ("resume_from_checkpoint", "checkpoint.resume"),
        ("torch_dtype", "train.dtype"),
        ("max_steps_per_epoch", "train.steps"),
        ("loss_type", "dpo.loss"),
        ("precompute_ref_log_probs", "dpo.precompute"),
        ("peft", "lora={}"),
        ("lora_r", "lora.rank"),
        ("use_peft", "lora={}"),
        ("target_modules", "lora.target"),
        ("finetuning_type", "lora={} for lora"),
        ("load_in_4bit", "lora.quantize=nf4"),
        ("adapter_path", "lora.path"),
        ("load_in_8bit", "not have this yet"),
    ],
)
@pytest.mark.parametrize("section", ["", "training_args.", "model."])
def test_words_of_other_tools_are_answered(section, word, key):
    answer = "\n".join(problems({}, f"{section}{word}=1"))
    assert f"{section}{word}: " in answer and key in answer


def test_words_for_a_value_and_text_that_is_no_yaml():
    assert "did you mean float16?" in problems({}, "train.dtype=fp16")[0]
    assert "did you mean bfloat16?" in problems({}, "train.dtype=bf16")[0]
    [problem] = problems({}, "data.train.path=*.jsonl")
    assert problem.endswith("""quote it for YAML: 'data.train.path="*.jsonl"'""")
    assert load_recipe({}, ['data.train.path="*.jsonl"']).data.train.path == "*.jsonl"


def test_our_keys_in_the_answers_exist_and_theirs_do_not():
    ours = recipe_keys()
    for word, answer in spelling.DTRAIN_KEYS.items():
        named = answer.split(",")[0].split(":")[0].split(" ")[0].split("=")[0]
        assert named in ours or any(key.startswith(f"{named}.") for key in ours), word


def test_files_that_are_no_recipe(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("train:\n  steps: 3\n  steps: 4\n")
    with pytest.raises(UserError, match=r"r\.yaml:3 is not YAML: found duplicate key"):
        load_recipe(path)
    path.write_text("train: [1\n")
    with pytest.raises(UserError, match=r"r\.yaml:2 is not YAML") as error:
        load_recipe(path)
    assert "".join(traceback.format_exception(error.value)).count("Traceback") == 1
    path.write_text("- a\n- b\n")
    with pytest.raises(UserError, match="top level must be a mapping"):
        load_recipe(path)
    path.write_text("# nothing\n")
    assert load_recipe(path).run.name == "r"
    path.write_text("metrics:\n")
    assert load_recipe(path).metrics == schema.Metrics()


def test_shipped_recipes_are_found_by_name():
    """tests/test_recipes.py loads each of them."""
    shipped = dict(config.list_shipped_recipes())
    assert "sft" in shipped and all(shipped.values())
    with pytest.raises(UserError, match="did you mean sft?"):
        load_recipe("sftt")


def test_config_and_preflight_import_no_torch():
    code = "import sys, dtrain, dtrain.commands.cli, dtrain.training.preflight, dtrain.launch\n"
    code += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_number_where_text_belongs_stays_as_typed(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("run: {name: 007}\nmetrics: {wandb: 1e3}\ndata: {train: {path: 12:30}}\nlora: {target: [1e3]}\n")
    loaded = load_recipe(path)
    assert (loaded.run.name, loaded.metrics.wandb, loaded.data.train.path) == ("007", "1e3", "12:30")
    assert loaded.lora.target == ["1e3"]
    for typed, name in {"run.name=1e3": "1e3", "run.name=0x10": "0x10", "run={name: 1_000}": "1_000"}.items():
        assert load_recipe({}, [typed]).run.name == name
    sources = load_recipe({}, ["data.train.sources=[{path: 1e3}]", "data.train.sources[0].path=2e3"])
    assert sources.data.train.sources[0].path == "2e3"
    assert load_recipe({}, ["train.steps=1e3"]).train.steps == 1000
    (tmp_path / "again.yaml").write_text(config.to_yaml(loaded))
    assert load_recipe(tmp_path / "again.yaml").run.name == "007"


@pytest.mark.parametrize(
    ("recipe", "overrides", "name"),
    [
        ("sft", ["model.path=Qwen/Qwen3-0.6B"], "qwen3-0.6b-sft"),
        ("sft", ["model.path=/models/Qwen3 0.6B/", "lora={}"], "qwen3-0.6b-lora-sft"),
        ("sft", ["model.path=Qwen/Qwen3-0.6B", "lora={quantize: nf4}"], "qwen3-0.6b-qlora-sft"),
        ("dpo", ["model.path=runs/qwen3-0.6b-sft/export"], "qwen3-0.6b-sft-dpo"),
        ("kto", ["model.path=/hub/models--Qwen--Qwen3-0.6B/snapshots/c1899de"], "qwen3-0.6b-kto"),
        ("sft", [], "sft"),
        ("sft", ["model.path=a/b", "run.name=mine"], "mine"),
        ("lora-sft", ["model.path=Qwen/Qwen3-0.6B"], "qwen3-0.6b-lora-sft"),
        ("qlora-sft", ["model.path=Qwen/Qwen3-0.6B"], "qwen3-0.6b-qlora-sft"),
        ("lora-dpo", ["model.path=runs/qwen3-0.6b-sft/export"], "qwen3-0.6b-sft-lora-dpo"),
        ("quickstart-lora", ["model.path=/models/own"], "quickstart-lora"),
        ({"method": "dpo", "model": {"path": "a/B"}, "lora": {}}, [], "b-lora-dpo"),
    ],
)
def test_the_default_name_says_model_and_method(recipe, overrides, name):
    """Two models given to one general recipe are two runs; the name depends on the recipe alone."""
    loaded, problems = recipe_and_problems(recipe, overrides)
    assert problems == [] and loaded.run.name == name
    assert recipe_and_problems(recipe, overrides)[0].run.name == name


def test_a_recipe_can_be_pickled_and_copied():
    recipe = load_recipe({"method": "dpo", "model": {"path": "${oc.env:HOME}"}, "dpo": {"beta": 0.5}}, ["sft.loss=dft"])
    for other in (pickle.loads(pickle.dumps(recipe)), copy.deepcopy(recipe)):
        assert other == recipe and other.dpo.beta == 0.5 and other.unused_keys == recipe.unused_keys == ["sft.loss"]
        assert other.references == recipe.references and replace(other, lora=None).section == recipe.section


@pytest.mark.parametrize(
    ("written", "overrides", "expected"),
    [
        ("train: {epochs: 3}", ["train.steps=5"], {"train.steps": 5, "train.epochs": None}),
        ("train: {steps: 5}", ["train.epochs=3"], {"train.steps": None, "train.epochs": 3}),
        ("train: {steps: 5}", ["train.epochs=null"], {"train.steps": 5, "train.epochs": None}),
        ("train: {epochs: 3}", ["train.steps=5", "train.epochs=2"], {"train.steps": 5, "train.epochs": 2}),
        ("scheduler: {warmup_steps: 9}", ["scheduler.warmup=0.2"], {"scheduler.warmup_steps": None}),
        ("data: {train: {path: a}}", ["data.train.sources=[{path: b}]"], {"data.train.path": None}),
        ("data: {val: {sources: [{path: a}]}}", ["data.val.path=b"], {"data.val.sources": None}),
        ("{lora: {}, checkpoint: {init_from: a}}", ["lora.path=b"], {"checkpoint.init_from": None}),
        ("data: {packing: true}", ["train.dynamic_batch=true"], {"data.packing": False, "train.dynamic_batch": True}),
        ("train: {dynamic_batch: true}", ["data.packing=true"], {"data.packing": True, "train.dynamic_batch": False}),
        ("parallel: {cpu_offload: true}", ["parallel.optimizer_offload=true"], {"parallel.cpu_offload": False}),
    ],
)
def test_an_override_unsets_what_it_excludes(written, overrides, expected):
    recipe = load_recipe(yaml.safe_load(written), overrides)
    for key, value in expected.items():
        section, _, name = key.rpartition(".")
        owner = recipe
        for part in section.split("."):
            owner = getattr(owner, part)
        assert getattr(owner, name) == value, key


def test_a_schedule_in_stages_has_no_key_to_unset():
    written = {"scheduler": [{"name": "linear", "steps": 10}, {"name": "constant"}]}
    with pytest.raises(RecipeError, match="scheduler is a list; name an entry by its number"):
        load_recipe(written, ["scheduler.warmup=0.1"])


@pytest.mark.parametrize(
    ("file", "nested"),
    [
        ({"train.steps": 4}, "train.steps is not a key of a recipe; in a file keys are nested: train: {steps: ..}"),
        ({"data": {"train.path": "a"}}, "data.train.path is not a key of a recipe; .*: train: {path: ..}"),
    ],
)
def test_dotted_keys_of_a_file_are_shown_nested(file, nested):
    with pytest.raises(RecipeError, match=nested):
        load_recipe(file)
