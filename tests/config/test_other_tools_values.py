"""Files of other tools: values and keys that mean something else there, and what no key says."""

import pytest
import yaml

from dtrain import recipe as config
from dtrain.base.errors import RecipeError
from dtrain.methods import load_recipe, recipe_and_problems, recipe_keys, translate_recipe
from dtrain.recipe import key_aliases, other_tools
from tests.config.test_other_tools import BARE, METHODS_, recipe_of, translated


def test_axolotls_zero_is_no_clipping_and_its_own_template_is_the_models():
    recipe = recipe_of(f"{BARE['axolotl']}\nmax_grad_norm: 0.0\nchat_template: tokenizer_default")
    assert (recipe.train.max_grad_norm, recipe.data.chat_template) == (None, None)


def test_bf16_that_is_off_is_float32_and_its_default_is_not():
    for tool in ("TRL", "axolotl"):
        assert recipe_of(f"{BARE[tool]}\nbf16: false").train.dtype == "float32"
        assert recipe_of(f"{BARE[tool]}\nbf16: false\nfp16: true").train.dtype == "float16"
        assert recipe_of(f"{BARE[tool]}\nbf16: true").train.dtype == "bfloat16"
    assert recipe_of(f"{BARE['axolotl']}\nbf16: auto").train.dtype == "bfloat16"
    assert recipe_of(f"{BARE['TRL']}\ndtype: bfloat16").train.masters == "bfloat16"


def test_each_component_of_torchtune_has_an_answer_of_its_own():
    keys = {
        "tokenizer": "model.path",
        "model": "model.path",
        "dataset": "data.train.path",
        "optimizer": "optimizer.name",
        "lr_scheduler": "scheduler.name",
        "loss": "dpo.loss",
        "checkpointer": "model.path",
        "metric_logger": "metrics.wandb",
        "profiler": "does not have this yet: a profiler",
    }
    answers = [key_aliases.answer(f"{section}._component_") for section in keys]
    assert all(key in answer for key, answer in zip(keys.values(), answers, strict=True))
    assert len({*answers}) == len(keys)


UNFIT = [
    ("TRL", "lr_scheduler_type: polynomial", "lr_scheduler_type=polynomial is not carried over"),
    ("TRL", "optim: lion_8bit", "optim=lion_8bit is not carried over"),
    ("TRL", "max_prompt_length: 100", "not carried over: max_prompt_length"),
    ("TRL", "truncation_mode: keep_end", "which keeps the start of a row"),
    ("TRL", "warmup_ratio: 0.1", "rounds a share of warm-up up"),
    ("TRL", "dtype: auto", "dtype=auto is not carried over"),
    ("TRL", "packing_strategy: wrapped", "wrapped packing cuts samples"),
    ("TRL", "load_in_8bit: true", "not carried over: load_in_8bit"),
    ("axolotl", "adapter: lora", "axolotl has no rank of its own"),
    ("LLaMA-Factory", "stage: ppo", "which needs no critic"),
    ("LLaMA-Factory", "finetuning_type: freeze", "freeze trains the last 2 layers"),
    ("LLaMA-Factory", "group_by_length: true", "orders an epoch by length there"),
    ("LLaMA-Factory", "pure_bf16: true\nfinetuning_type: full", "rounds weights in bfloat16 to the nearest"),
    ("TRL", "beta: 0.1", "write method=kto behind FILE"),
    ("axolotl", "rl_beta: 0.1", "not carried over: rl_beta"),
    ("torchtune", "loss: {_component_: torchtune.rlhf.loss.PPOLoss}", "loss._component_: torchtune.rlhf.loss.PPOLoss"),
    ("LLaMA-Factory", "packing: true", "lets samples see one another"),
    ("Automodel", "lr_scheduler: {lr_decay_style: cosine}", "lr_scheduler is not carried over"),
]


@pytest.mark.parametrize(("tool", "line", "note"), UNFIT)
def test_what_no_key_says_is_named(tool, line, note):
    made = translated(f"{BARE[tool]}\n{line}")
    assert any(note in comment for comment in made.text().splitlines() if comment.startswith("#"))
    # Nor does the tool's default stand in for it.
    key = {"num_train_epochs": "train.epochs", "lr_scheduler_type": "scheduler.name", "optim": "optimizer.name"}
    assert key.get(line.partition(":")[0]) not in made.values


def test_values_with_more_than_one_key_bring_all_of_them():
    recipe = recipe_of(f"{BARE['TRL']}\noptim: adamw_bnb_8bit\nadam_beta2: 0.95")
    assert (recipe.optimizer.name, recipe.optimizer.state, recipe.optimizer.betas) == ("adamw", "int8", [0.9, 0.95])
    recipe = recipe_of(f"{BARE['axolotl']}\nrl: ipo")
    assert (recipe.method, recipe.dpo.loss, recipe.optimizer.lr) == ("dpo", "ipo", 1e-4)


@pytest.mark.parametrize(
    ("lines", "method", "loss", "beta"),
    [
        ("rl_beta: 0.2\nrl: dpo", "dpo", "sigmoid", 0.2),
        ("rl: orpo\norpo_alpha: 0.3", "dpo", "orpo", 0.3),
        ("rl: kto\nrl_beta: 0.2", "kto", "kto", 0.2),
    ],
)
def test_axolotls_rl_says_whose_beta_it_is_wherever_it_stands(lines, method, loss, beta):
    recipe = recipe_of(f"{BARE['axolotl']}\n{lines}")
    section = getattr(recipe, recipe.method)
    assert (recipe.method, section.loss, section.beta) == (method, loss, beta)


@pytest.mark.parametrize(
    ("component", "loss", "beta"), [("DPOLoss\n  beta: 0.2", "sigmoid", 0.2), ("RSOLoss\n  gamma: 0.3", "hinge", 0.3)]
)
def test_torchtunes_loss_of_pairs_makes_its_file_dpo(component, loss, beta):
    """torchtune 0.6.1, rlhf/loss/dpo.py: RSOLoss is relu(1 - gamma·m)."""
    recipe = recipe_of(f"{BARE['torchtune']}\nloss:\n  _component_: torchtune.rlhf.loss.{component}")
    assert (recipe.method, recipe.dpo.loss, recipe.dpo.beta) == ("dpo", loss, beta)


def test_a_method_that_is_not_here_is_no_other_method_in_the_recipe():
    made = translated(f"{BARE['axolotl']}\nrl: gdpo\nrl_beta: 0.1")
    assert made.values["method"] == "gdpo" and made.lost == ["rl_beta"]
    with pytest.raises(RecipeError, match="method=gdpo is none of"):
        load_recipe(yaml.safe_load(made.text()))


def test_files_behind_a_reader_of_load_dataset_are_the_path():
    axolotl = """
base_model: m
learning_rate: 1.0e-4
datasets: [{path: json, ds_type: json, data_files: [a.jsonl, b.jsonl], type: alpaca}]
test_datasets: [{path: c.jsonl, ds_type: json, type: alpaca}]
"""
    recipe = recipe_of(axolotl)
    assert (recipe.data.train.path, recipe.data.val.path) == (["a.jsonl", "b.jsonl"], "c.jsonl")
    torchtune = BARE["torchtune"].replace("data_files", "source: json, data_files")
    assert recipe_of(torchtune).data.train.path == "d.jsonl"
    recipe = recipe_of(torchtune.replace("chat_dataset", "text_completion_dataset"))
    assert (recipe.data.train.format, recipe.data.loss_on) == ("text", "all")
    made = translated(torchtune.replace("chat_dataset", "samsum_dataset"))
    assert "dataset._component_: torchtune.datasets.samsum_dataset" in made.lost


def test_torchtunes_distillation_names_its_teacher():
    more = """
kd_loss: {_component_: torchtune.modules.loss.ForwardKLWithChunkedOutputLoss}
kd_ratio: 0.5
"""
    first = "teacher_checkpointer: {checkpoint_dir: t, model_type: QWEN2}\n"
    made = translated(f"{first}{BARE['torchtune']}{more}")
    recipe = load_recipe(yaml.safe_load(made.text()))
    assert (recipe.method, recipe.model.path, recipe.distill.teacher, recipe.distill.kl) == (
        "distill", "m", "t", "forward",
    )  # fmt: skip
    assert made.lost == ["kd_ratio"]


def test_a_list_of_all_linear_is_all_linear():
    recipe = recipe_of(f"{BARE['TRL']}\nuse_peft: true\nlora_target_modules: [all-linear]")
    assert recipe.lora.target == "all-linear"


def test_the_method_that_is_typed_counts_and_a_recipe_of_ours_is_no_file_of_another_tool():
    _, problems = recipe_and_problems({"model_name_or_path": "m", "dataset_name": "d"}, ["method=dpo"])
    assert any("method: dpo" in problem and "lr: 1.0e-06" in problem for problem in problems)
    for name, _ in config.shipped():
        assert translate_recipe(yaml.safe_load(config.find(name).read_text())) is None, name
    _, problems = recipe_and_problems({"model": {"path": "m"}, "template": "x"})
    assert not any("it is written for" in problem for problem in problems)


def test_the_table_names_keys_of_a_recipe():
    known = {"", *recipe_keys()}
    for tool in other_tools.tools().values():
        for named in tool.keys.values():
            ours_ = {
                named.format(method=method).replace(".kwargs.", ".kwargs:").partition(":")[0] for method in METHODS_
            }
            assert ours_ & known, (tool.name, named)
        for recipe in (*tool.defaults.values(), *tool.components.values()):
            load_recipe(without_nulls(recipe))


def without_nulls(tree):
    """A tree of defaults without those that a tool does not have; clipping may be null."""
    if not isinstance(tree, dict):
        return tree
    return {key: without_nulls(one) for key, one in tree.items() if one is not None or key == "max_grad_norm"}
