"""Files of other tools as recipes: their own defaults, read from transformers where it has them, else from the sources
named here; and what dtrain builds of such a recipe, against transformers' schedules and torch's AdamW."""

import math

import pytest
import torch
import transformers
import yaml
from torch.optim.lr_scheduler import ConstantLR, LinearLR, SequentialLR

from dtrain import recipe as config
from dtrain.base.errors import RecipeError
from dtrain.methods import load_recipe, recipe_and_problems, recipe_keys, translate_recipe
from dtrain.optim.update import build_optimizer, build_scheduler
from dtrain.recipe import key_aliases, other_tools
from tools import coming_from

BARE = {
    "TRL": "model_name_or_path: m\ndataset_name: d.jsonl",
    "axolotl": "base_model: m\ndatasets: [{path: d.jsonl}]\nlearning_rate: 1.0e-4",
    "LLaMA-Factory": "model_name_or_path: m\ndataset: d.jsonl",
    "Unsloth": "model_name: m\ntrain_dataset: d.jsonl",
    "torchtune": """
checkpointer: {_component_: torchtune.training.FullModelHFCheckpointer, checkpoint_dir: m}
model: {_component_: torchtune.models.qwen2.lora_qwen2_0_5b, lora_attn_modules: [q_proj, output_proj]}
dataset: {_component_: torchtune.datasets.chat_dataset, data_files: d.jsonl}
optimizer: {_component_: torch.optim.AdamW}
epochs: 1
batch_size: 2
""",
    "NeMo-RL": "policy: {model_name: m}\nsft: {max_num_epochs: 1}\ndata: {train: {data_path: d.jsonl}}",
    "Automodel": """
model: {pretrained_model_name_or_path: m}
dataset: {path_or_dataset_id: d.jsonl}
optimizer: {_target_: torch.optim.AdamW}
""",
}
"""Tool → a file with a model and data, and what the tool demands beside them."""

THEIRS = transformers.TrainingArguments(use_cpu=True)
HUGGING_FACE = {
    "run.seed": THEIRS.seed,
    "train.epochs": THEIRS.num_train_epochs,
    "train.steps": None,
    "train.micro_batch": THEIRS.per_device_train_batch_size,
    "train.global_batch": THEIRS.per_device_train_batch_size * THEIRS.gradient_accumulation_steps,
    "train.max_grad_norm": THEIRS.max_grad_norm,
    "optimizer.name": "adamw",  # adamw_torch_fused
    "optimizer.state": "float32",
    "optimizer.lr": THEIRS.learning_rate,
    "optimizer.betas": [THEIRS.adam_beta1, THEIRS.adam_beta2],
    "optimizer.eps": THEIRS.adam_epsilon,
    "optimizer.weight_decay": THEIRS.weight_decay,
    "scheduler.name": str(THEIRS.lr_scheduler_type.value),
    "scheduler.warmup": THEIRS.warmup_steps,
    "scheduler.min_lr_ratio": 0.0,  # get_linear_schedule_with_warmup, get_cosine_schedule_with_warmup
    "data.shuffle": True,  # train_sampling_strategy random
    "data.packing": False,
}
# trl 1.16.0: trainer/base_config.py, sft_config.py
TRL = HUGGING_FACE | {
    "optimizer.lr": 2e-5,
    "data.max_length": 1024,
    "data.loss_on": "all",
    "data.too_long": "truncate",
    "train.dtype": "bfloat16",
    "train.activation_checkpointing": "full",
}
DEFAULTS = {
    "TRL": TRL,
    # axolotl 0.19.0: utils/schemas/config.py and training.py, core/builders/base.py
    "axolotl": HUGGING_FACE
    | {
        "optimizer.lr": 1e-4,
        "train.epochs": 1,
        "train.micro_batch": 1,
        "train.global_batch": 1,
        "scheduler.name": "cosine",
        "scheduler.warmup": 0.03,
        "data.max_length": 512,
        "data.loss_on": "assistant",
        "data.too_long": "drop",
        "train.dtype": "bfloat16",
        "train.activation_checkpointing": "none",
    },
    # llamafactory 0.9.5: hparams/finetuning_args.py, data_args.py, model_args.py
    "LLaMA-Factory": HUGGING_FACE
    | {
        "data.max_length": 2048,
        "data.loss_on": "assistant",
        "train.activation_checkpointing": "full",
        "lora.rank": 8,
        "lora.alpha": 16,
        "lora.dropout": 0.0,
        "lora.target": "all-linear",
        "lora.quantize": "none",
    },
    # unsloth 2026.10.9: models/rl.py (replacements), llama.py (get_peft_model), loader.py (from_pretrained)
    "Unsloth": TRL
    | {
        "run.seed": 3407,
        "train.micro_batch": 4,
        "train.global_batch": 8,
        "optimizer.lr": 5e-5,
        "optimizer.weight_decay": 0.001,
        "optimizer.state": "int8",
        "scheduler.warmup": 0.1,
        "data.max_length": 2048,
        "lora.rank": 16,
        "lora.alpha": 16,
        "lora.dropout": 0.0,
        "lora.target": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        "lora.quantize": "nf4",
    },
    # torchtune 0.6.1: recipes/lora_finetune_single_device.py, models/qwen2/_model_builders.py, torch.optim.AdamW
    "torchtune": {
        "train.epochs": 1,
        "train.micro_batch": 2,
        "train.global_batch": 2,
        "train.max_grad_norm": None,
        "optimizer.name": "adamw",
        "optimizer.lr": 1e-3,
        "optimizer.betas": [0.9, 0.999],
        "optimizer.weight_decay": 0.01,
        "scheduler.name": "constant",
        "scheduler.warmup": 0,
        "data.packing": False,
        "data.loss_on": "assistant",
        "lora.rank": 8,
        "lora.alpha": 16,
        "lora.dropout": 0.0,
        "lora.target": ["q_proj", "o_proj"],
    },
    # NeMo-RL, examples/configs/sft.yaml of commit 00455ac: no scheduler
    "NeMo-RL": {
        "run.seed": 42,
        "train.epochs": 1,
        "train.global_batch": 32,
        "train.micro_batch": 1,
        "train.dtype": "bfloat16",
        "train.max_grad_norm": 1.0,
        "optimizer.lr": 5e-6,
        "optimizer.betas": [0.9, 0.98],
        "optimizer.eps": 1e-5,
        "optimizer.weight_decay": 0.1,
        "scheduler.name": "constant",
        "scheduler.warmup": 0,
        "data.max_length": 1024,
        "data.packing": False,
    },
    # nemo_automodel 0.7.0: components/training/step_scheduler.py, recipes/llm/train_ft.py, torch.optim.AdamW
    "Automodel": {
        "run.seed": 42,
        "train.epochs": 10,
        "train.global_batch": 32,
        "train.micro_batch": 1,
        "train.max_grad_norm": 1.0,
        "optimizer.lr": 1e-3,
        "optimizer.betas": [0.9, 0.999],
        "optimizer.weight_decay": 0.01,
        "scheduler.name": "constant",
        "scheduler.warmup": 0,
        "data.packing": False,
    },
}


METHODS_ = ("sft", "dpo", "kto", "grpo")


def translated(file: str) -> other_tools.Translation:
    return translate_recipe(coming_from.arguments(file))


def recipe_of(file: str):
    """The recipe that the user is told to copy, as dtrain reads it."""
    return load_recipe(yaml.safe_load(translated(file).text()))


def value(recipe, key):
    for part in key.split("."):
        recipe = getattr(recipe, part)
    return recipe


@pytest.mark.parametrize("tool", DEFAULTS)
def test_a_bare_file_gets_its_tools_defaults(tool):
    assert translated(BARE[tool]).tool.name == tool
    recipe = recipe_of(BARE[tool])
    assert (recipe.method, recipe.model.path, recipe.data.train.path) == ("sft", "m", "d.jsonl")
    assert {key: value(recipe, key) for key in DEFAULTS[tool]} == DEFAULTS[tool]
    assert (recipe.lora is not None) == any(key.startswith("lora.") for key in DEFAULTS[tool])


@pytest.mark.parametrize("tool", DEFAULTS)
def test_each_default_says_whose_it_is_and_what_the_file_says_does_not(tool):
    made = translated(BARE[tool])
    assert made.origins.keys() <= made.values.keys() and "optimizer.betas" in made.origins
    lines = [line for line in made.text().splitlines() if "#" in line and not line.startswith("#")]
    assert len(lines) == len(made.origins)
    version = f"{made.tool.name} {made.tool.version}"
    assert all(version in line for line in lines) and "model.path" not in made.origins


# trl 1.16.0: trainer/dpo_config.py, kto_config.py, reward_config.py, grpo_config.py, distillation_config.py
METHODS = [
    ("beta: 0.2", "dpo", {"optimizer.lr": 1e-6, "dpo.beta": 0.2, "dpo.loss": "sigmoid", "dpo.label_smoothing": 0.0}),
    (
        "desirable_weight: 2.0",
        "kto",
        {"optimizer.lr": 1e-6, "kto.beta": 0.1, "kto.desirable_weight": 2.0, "data.shuffle": False},
    ),
    ("center_rewards_coefficient: 0.01", "reward", {"optimizer.lr": 1e-4, "data.max_length": 1024}),
    (
        "num_generations: 4\ngradient_accumulation_steps: 2\nreward_funcs: [accuracy]\nepsilon_high: 0.28\n"
        "scale_rewards: false",
        "grpo",
        {
            "optimizer.lr": 1e-6,
            "grpo.beta": 0.0,
            "grpo.loss": "dapo",
            "grpo.clip": [0.2, 0.28],
            "grpo.scale": "none",
            "grpo.group_size": 4,
            "grpo.prompts_per_step": 4,
            "train.global_batch": 16,
            "train.micro_batch": 8,
            "grpo.sampling.max_new_tokens": 512,
            "grpo.sampling.temperature": 1.0,
            "grpo.updates_per_rollout": 1,
        },
    ),
    (
        "teacher_model_name_or_path: t",
        "distill",
        {"distill.teacher": "t", "distill.samples": "student", "distill.kl": "reverse", "optimizer.lr": 1e-6},
    ),
]


@pytest.mark.parametrize(("more", "method", "defaults"), METHODS, ids=[method for _, method, _ in METHODS])
def test_trls_other_methods_are_known_by_their_keys(more, method, defaults):
    recipe = recipe_of(f"{BARE['TRL']}\n{more}")
    assert recipe.method == method
    assert {key: value(recipe, key) for key in defaults} == defaults


def test_trls_adapter_has_the_commands_defaults_and_none_is_read_without_use_peft():
    recipe = recipe_of(f"{BARE['TRL']}\nuse_peft: true")  # trl 1.16.0: trainer/model_config.py
    assert (recipe.lora.rank, recipe.lora.alpha, recipe.lora.dropout) == (16, 32.0, 0.05)
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as TARGETS

    assert recipe.lora.target == TARGETS["qwen3"] == TARGETS["llama"]
    made = translated(f"{BARE['TRL']}\nlora_r: 8")
    assert not any(key.startswith("lora") for key in made.values)
    assert "not carried over: lora.rank" in made.text()


SCHEDULES = [
    ("", "linear", {}),
    ("warmup_ratio: 0.03", "linear", {}),
    ("warmup_steps: 0.11", "linear", {}),
    ("warmup_steps: 7\nlr_scheduler_type: cosine", "cosine", {}),
    ("warmup_steps: 7\nlr_scheduler_type: constant", "constant", {}),
    ("warmup_steps: 7\nlr_scheduler_type: constant_with_warmup", "constant_with_warmup", {}),
    (
        "warmup_steps: 4\nlr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr_rate: 0.2}",
        "cosine_with_min_lr",
        {"min_lr_rate": 0.2},
    ),
    (
        "lr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr: 1.0e-5}",
        "cosine_with_min_lr",
        {"min_lr": 1e-5},
    ),
]


def rates(scheduler, optimizer, steps):
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def ours(recipe, steps):
    """Rates of the steps, by what dtrain builds; and the optimizer."""
    optimizer = build_optimizer(recipe.optimizer, [("w", torch.nn.Parameter(torch.ones(2, 2)))])
    return rates(build_scheduler(recipe.scheduler, optimizer, steps), optimizer, steps), optimizer


@pytest.mark.parametrize(("lines", "name", "kwargs"), SCHEDULES, ids=[name or "none" for name, _, _ in SCHEDULES])
def test_a_trl_files_rates_and_optimizer_are_transformers(lines, name, kwargs):
    steps = 50
    recipe = recipe_of(f"{BARE['TRL']}\nmax_steps: {steps}\nlearning_rate: 3.0e-4\n{lines}")
    said = yaml.safe_load(lines) or {}
    warmup = said.get("warmup_steps", said.get("warmup_ratio", 0))
    theirs = transformers.TrainingArguments(use_cpu=True, learning_rate=3e-4, warmup_steps=warmup)
    adam = {"betas": (theirs.adam_beta1, theirs.adam_beta2), "eps": theirs.adam_epsilon}
    weights = [torch.nn.Parameter(torch.ones(2, 2))]
    optimizer = torch.optim.AdamW(weights, lr=theirs.learning_rate, weight_decay=theirs.weight_decay, **adam)
    scheduler = transformers.get_scheduler(
        name, optimizer, theirs.get_warmup_steps(steps), steps, scheduler_specific_kwargs=kwargs
    )
    mine, built = ours(recipe, steps)
    assert mine == pytest.approx(rates(scheduler, optimizer, steps), rel=1e-12, abs=0)
    assert isinstance(built, torch.optim.AdamW)
    group, wanted = built.param_groups[0], optimizer.param_groups[0]
    assert [group[key] for key in ("betas", "eps", "weight_decay", "amsgrad")] == [
        wanted[key] for key in ("betas", "eps", "weight_decay", "amsgrad")
    ]


@pytest.mark.parametrize(("steps", "warmup"), [(20, 0), (50, 2), (1000, 30), (4000, 100)])
def test_axolotls_warm_up_counts_as_its_builder_does(steps, warmup):
    recipe = recipe_of(f"{BARE['axolotl']}\nmax_steps: {steps}")
    assert recipe.scheduler.warmup_of(steps) == warmup


def test_nemo_rls_rates_rise_from_a_tenth():
    file = "policy: {model_name: m}\ngrpo: {max_num_steps: 70}\ndata: {train: {data_path: d.jsonl}}"
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2, 2))], lr=5e-6)
    rise = LinearLR(optimizer, start_factor=0.1, end_factor=1.0, total_iters=50)
    stay = ConstantLR(optimizer, factor=1.0, total_iters=10**10)
    mine, _ = ours(recipe_of(file), 70)
    assert mine == pytest.approx(rates(SequentialLR(optimizer, [rise, stay], [50]), optimizer, 70), rel=1e-12)


@pytest.mark.parametrize("style", ["cosine", "linear"])
def test_automodels_rates_rise_from_a_tenth_and_fall_to_a_hundredth(style):
    steps, lr = 60, 1e-3
    mine, _ = ours(
        recipe_of(f"{BARE['Automodel']}\nstep_scheduler: {{max_steps: 60}}\nlr_scheduler: {{lr_decay_style: {style}}}"),
        steps,
    )
    expected = [lr * (0.1 + 0.9 * step / 6) for step in range(7)]  # min(1000, 60 // 10) steps of warm-up
    for step in range(7, steps):
        share = (step - 6) / 54
        falls = 0.5 * (1 + math.cos(math.pi * share)) if style == "cosine" else 1 - share
        expected.append(lr * (0.01 + 0.99 * falls))
    assert mine == pytest.approx(expected, rel=1e-9)


def test_torchtunes_schedule_is_a_cosine_to_zero_and_clipping_stays_off():
    lines = "clip_grad_norm: null\nlr_scheduler: {_component_: torchtune.training.lr_schedulers."
    recipe = recipe_of(f"{BARE['torchtune']}{lines}get_cosine_schedule_with_warmup, num_warmup_steps: 5}}")
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2, 2))], lr=1e-3)
    scheduler = transformers.get_cosine_schedule_with_warmup(optimizer, 5, 30)
    assert ours(recipe, 30)[0] == pytest.approx(rates(scheduler, optimizer, 30), rel=1e-12, abs=1e-20)
    assert recipe.train.max_grad_norm is None
    assert recipe_of(f"{BARE['torchtune']}clip_grad_norm: 0.5").train.max_grad_norm == 0.5


def test_clipping_is_off_where_transformers_has_it_off_and_its_default_where_axolotl_says_null():
    for off in ("null", "0", "0.0"):
        assert recipe_of(f"{BARE['TRL']}\nmax_grad_norm: {off}").train.max_grad_norm is None
    assert recipe_of(f"{BARE['axolotl']}\nmax_grad_norm: null").train.max_grad_norm == 1.0


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
    ("TRL", "num_train_epochs: 0.5", "num_train_epochs=0.5 is not carried over"),
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
