"""Files of other tools as recipes: their own defaults, read from transformers where it has them, else from the sources
named here; and what dtrain builds of such a recipe, against transformers' schedules and torch's AdamW."""

import math
import re

import pytest
import torch
import transformers
import yaml
from torch.optim.lr_scheduler import ConstantLR, LinearLR, SequentialLR

from dtrain.optim.update import build_scheduler
from dtrain.policy.optimizer import build_optimizer
from dtrain.recipe import other_tools
from dtrain.training import convert_recipe, load_recipe
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
    "verl": "model: {path: m}\ndata: {train_files: d.jsonl}",
    "alignment-handbook": "model_name_or_path: m\ndataset_mixer: {d.jsonl: 1.0}",
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
        "train.masters": "bfloat16",  # loaders/model.py loads the weights in torch_dtype, which bf16 sets
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
    "alignment-handbook": TRL,
    # verl 0.10: trainer/config/sft_trainer_engine.yaml, optim/fsdp.yaml
    "verl": {
        "run.seed": 1,
        "train.epochs": 4,
        "train.global_batch": 256,
        "train.micro_batch": 8,  # max_token_len_per_gpu 8192 / max_length 1024
        "train.dynamic_batch": True,
        "train.dtype": "bfloat16",
        "train.masters": "float32",
        "train.max_grad_norm": 1.0,
        "train.activation_checkpointing": "full",
        "optimizer.name": "adamw",
        "optimizer.lr": 1e-3,
        "optimizer.betas": [0.9, 0.999],
        "optimizer.weight_decay": 0.01,
        "scheduler.name": "constant",
        "scheduler.warmup": 0,
        "data.max_length": 1024,
        "data.packing": False,
        "data.too_long": "error",
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
        "train.masters": "bfloat16",  # from_pretrained takes the checkpoint's type
    },
}


def converted(file: str) -> other_tools.Conversion:
    return convert_recipe(coming_from.arguments(file))


def recipe_of(file: str):
    """The recipe that the user is told to copy, as dtrain reads it."""
    return load_recipe(yaml.safe_load(converted(file).text()))


def value(recipe, key):
    for part in key.split("."):
        recipe = getattr(recipe, part)
    return recipe


@pytest.mark.parametrize("tool", DEFAULTS)
def test_a_bare_file_gets_its_tools_defaults(tool):
    assert converted(BARE[tool]).tool == tool
    recipe = recipe_of(BARE[tool])
    assert (recipe.method, recipe.model.path, recipe.data.train.path) == ("sft", "m", "d.jsonl")
    assert {key: value(recipe, key) for key in DEFAULTS[tool]} == DEFAULTS[tool]
    assert (recipe.lora is not None) == any(key.startswith("lora.") for key in DEFAULTS[tool])


@pytest.mark.parametrize("tool", DEFAULTS)
def test_each_default_says_whose_it_is_and_what_the_file_says_does_not(tool):
    made = converted(BARE[tool])
    assert made.comments.keys() <= made.values.keys() and "optimizer.betas" in made.comments
    lines = [line for line in made.text().splitlines() if "#" in line and not line.startswith("#")]
    assert len(lines) == len(made.comments)
    version = f"{made.tool} {made.version}"
    for line in lines:  # the tool's default, or the file's key and value where the recipe has another form of it
        is_of_file = re.search(r"# [\w.]+: ", line) is not None
        assert version in line or made.tool in line or is_of_file, line
    assert "model.path" not in made.comments


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
    made = converted(f"{BARE['TRL']}\nlora_r: 8")
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


def test_cosine_with_min_lr_needs_its_lowest_rate_as_in_transformers():
    text = f"{BARE['TRL']}\nmax_steps: 3\nlr_scheduler_type: cosine_with_min_lr"
    with pytest.raises(ValueError, match="One of min_lr or min_lr_rate should be set"):
        transformers.get_scheduler("cosine_with_min_lr", torch.optim.SGD([torch.ones(1)], 1.0), 0, 3)
    (lost,) = converted(text).lost
    assert lost.key == "lr_scheduler_kwargs" and lost.changes_numbers and "scheduler.min_lr_ratio" in lost.reason


def test_trackers_of_trl_are_named_and_a_project_counts_only_if_wandb_is_on():
    made = converted(f"{BARE['TRL']}\nreport_to: [wandb, trackio]\nwandb_project: mine")
    assert made.values["metrics.wandb"] == "mine"
    assert [lost.reason for lost in made.lost] == ["metrics.sinks=[{name: trackio}] logs there"]
    made = converted(f"{BARE['TRL']}\nreport_to: tensorboard\nwandb_project: mine")
    assert "metrics.wandb" not in made.values and not made.lost


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
    assert recipe.scheduler.num_warmup_steps(steps) == warmup


def test_nemo_rls_rates_rise_from_a_tenth():
    file = "policy: {model_name: m}\ngrpo: {max_num_steps: 70}\ndata: {train: {data_path: d.jsonl}}"
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2, 2))], lr=5e-6)
    rise = LinearLR(optimizer, start_factor=0.1, end_factor=1.0, total_iters=50)
    stay = ConstantLR(optimizer, factor=1.0, total_iters=10**10)
    mine, _ = ours(recipe_of(file), 70)
    assert mine == pytest.approx(rates(SequentialLR(optimizer, [rise, stay], [50]), optimizer, 70), rel=1e-12)


@pytest.mark.parametrize(
    ("section", "values"),
    [  # NeMo-RL 7ea279a: examples/configs/grpo_math_1B.yaml, rm.yaml, distillation_math.yaml, dpo.yaml
        ("grpo", {"train.epochs": 1, "train.steps": None, "grpo.prompts_per_step": 32, "grpo.group_size": 16}),
        ("rm", {"train.epochs": 1, "train.steps": None, "train.global_batch": 128, "optimizer.lr": 2e-6}),
        ("distillation", {"train.steps": 1000, "train.global_batch": 64, "distill.kl": "mixed", "distill.top_k": 64}),
        ("dpo", {"train.steps": 150, "train.global_batch": 128, "dpo.beta": 0.05}),
    ],
)
def test_a_nemo_rl_file_without_values_has_its_examples(section, values):
    recipe = recipe_of(
        f"policy: {{model_name: m}}\n{section}: {{val_period: -1}}\ndata: {{train: {{data_path: d.jsonl}}}}"
    )
    assert {key: value(recipe, key) for key in values} == values
    rises = {"grpo": 50, "distillation": 10, "dpo": 20}  # LinearLR from a tenth of the rate, then constant
    if section in rises:
        first, second = recipe.scheduler
        assert (first.steps, first.kwargs["start_factor"], second.name) == (rises[section], 0.1, "constant")


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


@pytest.mark.parametrize("module", ["torchtune.training.lr_schedulers", "torchtune.modules"])  # since 0.4, before
def test_torchtunes_schedule_is_a_cosine_to_zero_and_clipping_stays_off(module):
    lines = f"clip_grad_norm: null\nlr_scheduler: {{_component_: {module}."
    recipe = recipe_of(f"{BARE['torchtune']}{lines}get_cosine_schedule_with_warmup, num_warmup_steps: 5}}")
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2, 2))], lr=1e-3)
    scheduler = transformers.get_cosine_schedule_with_warmup(optimizer, 5, 30)
    assert ours(recipe, 30)[0] == pytest.approx(rates(scheduler, optimizer, 30), rel=1e-12, abs=1e-20)
    assert recipe.train.max_grad_norm is None
    assert recipe_of(f"{BARE['torchtune']}clip_grad_norm: 0.5").train.max_grad_norm == 0.5


def test_verls_former_trainer_falls_by_a_cosine_after_a_tenth_of_the_steps():
    """verl 0.4, trainer/config/sft_trainer.yaml and utils/torch_functional.py, which copies transformers' formula."""
    file = "model: {partial_pretrain: m}\ndata: {train_files: d.parquet}\ntrainer: {total_training_steps: 30}"
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2, 2))], lr=1e-5)
    scheduler = transformers.get_cosine_schedule_with_warmup(optimizer, 3, 30)
    mine, built = ours(recipe_of(file), 30)
    assert mine == pytest.approx(rates(scheduler, optimizer, 30), rel=1e-12, abs=1e-20)
    assert list(built.param_groups[0]["betas"]) == [0.9, 0.95]


def test_clipping_is_off_where_transformers_has_it_off_and_its_default_where_axolotl_says_null():
    for off in ("null", "0", "0.0"):
        assert recipe_of(f"{BARE['TRL']}\nmax_grad_norm: {off}").train.max_grad_norm is None
    assert recipe_of(f"{BARE['axolotl']}\nmax_grad_norm: null").train.max_grad_norm == 1.0
