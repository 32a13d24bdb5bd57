"""Files of other tools: values and keys that mean something else there, and what no key says."""

import pytest
import yaml

from dtrain import recipe as config
from dtrain.base.errors import RecipeError
from dtrain.recipe import spelling
from dtrain.recipe.other_tools import (
    automodel,
    axolotl,
    hugging_face,
    llama_factory,
    nemo_rl,
    torchtune,
    trl,
    unsloth,
    verl,
)
from dtrain.recipe.saved import unflatten
from dtrain.training import convert_recipe, load_recipe, recipe_and_problems, recipe_keys
from tests.config.test_other_tools import BARE, converted, recipe_of


def lost_keys(made) -> list[str]:
    return [lost.key for lost in made.lost]


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


def test_axolotl_trains_bfloat16_weights_only_without_adapter_and_sharding():
    """axolotl 0.19, loaders/model.py; accelerate's FSDP and DeepSpeed keep float32 copies, PEFT float32 adapters."""
    lora = "\nadapter: lora\nlora_r: 8\nlora_alpha: 16\nlora_target_linear: true"
    for lines, masters in (
        ("bf16: auto", "bfloat16"),
        ("bf16: true", "bfloat16"),
        ("bf16: false", "float32"),
        ("fp16: true", "float32"),
        ("bf16: true\ndeepspeed: zero3.json", "float32"),
        ("bf16: true\nfsdp_version: 2\nfsdp_config: {reshard_after_forward: true}", "float32"),
        (f"bf16: true{lora}", "float32"),
    ):
        assert recipe_of(f"{BARE['axolotl']}\n{lines}").train.masters == masters, lines


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
    answers = [spelling.explain_unknown_key(f"{section}._component_") for section in keys]
    assert all(key in answer for key, answer in zip(keys.values(), answers, strict=True))
    assert len({*answers}) == len(keys)


# Tool, a line of its file, the key that is lost, a part of the reason, and the recipe's key that gets no default.
LOST = [
    ("TRL", "lr_scheduler_type: polynomial", "lr_scheduler_type", "is not one of constant", "scheduler.name"),
    ("TRL", "optim: lion_8bit", "optim", "is not one of adamw", "optimizer.name"),
    ("TRL", "max_prompt_length: 100", "max_prompt_length", "data.max_length", ""),
    ("TRL", "dtype: auto", "dtype", "train.masters", ""),
    ("TRL", "packing_strategy: wrapped", "packing_strategy", "see one another", ""),
    ("TRL", "load_in_8bit: true", "load_in_8bit", "8 bits", ""),
    ("TRL", "eos_token: <|im_end|>", "eos_token", "special tokens", ""),
    ("TRL", "attention_dropout: 0.1", "attention_dropout", "dropout", ""),
    ("TRL", "use_peft: true\nbias: all", "bias", "biases are not trained", ""),
    ("axolotl", "tokens: [<new>]", "tokens", "new tokens", ""),
    ("axolotl", "special_tokens: {eos_token: <|im_end|>}", "special_tokens.eos_token", "special tokens", ""),
    ("axolotl", "chat_template: chatml", "chat_template", "axolotl's", "data.chat_template"),
    ("axolotl", "chat_template: qwen3_5", "chat_template", "axolotl's", "data.chat_template"),
    ("axolotl", "rl_beta: 0.1", "rl_beta", "has no beta", ""),
    ("axolotl", "adapter: llama-adapter", "adapter", "LoRA", ""),
    ("LLaMA-Factory", "rope_scaling: yarn", "rope_scaling", "config.json", ""),
    ("LLaMA-Factory", "template: alpaca", "template", "LLaMA-Factory's own", "data.chat_template"),
    ("LLaMA-Factory", "finetuning_type: freeze", "finetuning_type", "freeze trains 2 layers", ""),
    (
        "LLaMA-Factory",
        "finetuning_type: freeze\nfreeze_trainable_layers: 4",
        "freeze_trainable_layers",
        "train.train_only",
        "train.train_only",
    ),
    ("LLaMA-Factory", "packing: true", "packing", "see one another", ""),
    ("LLaMA-Factory", "quantization_bit: 8", "quantization_bit", "4 bits", "lora.quantize"),
    ("LLaMA-Factory", "pref_beta: 0.2", "pref_beta", "method=sft", "dpo.beta"),
    ("torchtune", "tokenizer: {prompt_template: x}", "tokenizer.prompt_template", "data.chat_template", ""),
    ("torchtune", "loss: {_component_: my.Loss}", "loss._component_", "my.Loss", ""),
    ("NeMo-RL", "defaults: mine.yaml", "defaults", "mine.yaml is not read", ""),
    ("Automodel", "lr_scheduler: {lr_decay_style: wsd}", "lr_scheduler.lr_decay_style", "wsd", "scheduler.name"),
]


@pytest.mark.parametrize(("tool", "line", "key", "reason", "ours"), LOST)
def test_a_key_that_cannot_be_carried_over_is_named_with_its_reason(tool, line, key, reason, ours):
    made = converted(f"{BARE[tool]}\n{line}")
    reasons = {lost.key: lost.reason for lost in made.lost}
    assert reason in reasons.get(key, "")
    assert f"#   {key}: " in made.text()
    assert ours not in made.values  # nor does the tool's default stand in for it


# Tool, a line of its file with a value of the wrong type, the key that is lost, and a part of the reason.
WRONG_TYPES = [
    ("TRL", "gradient_accumulation_steps: [4]", "gradient_accumulation_steps", "[4] is not a whole number"),
    ("TRL", "gradient_accumulation_steps: 0", "gradient_accumulation_steps", "0 is too small"),
    ("TRL", "per_device_train_batch_size: many", "per_device_train_batch_size", "many"),
    ("TRL", "warmup_ratio: [0.1]", "warmup_ratio", "[0.1] is not a number"),
    ("TRL", "max_steps: often", "max_steps", "often is not a whole number"),
    ("TRL", "use_peft: maybe", "use_peft", "maybe is neither true nor false"),
    ("TRL", "datasets: [d.jsonl]", "datasets[0]", "d.jsonl is not a mapping"),
    ("TRL", "num_generations: 4\nreward_weights: [x]", "reward_weights", "x is not a number"),
    ("TRL", "learning_rate: {peak: 1.0}", "learning_rate.peak", ""),
    ("alignment-handbook", "dataset_mixture: {datasets: [a/b]}", "dataset_mixture.datasets[0]", "is not a mapping"),
    ("axolotl", "test_datasets: d.jsonl", "test_datasets[0]", "d.jsonl is not a mapping"),
    ("axolotl", "test_datasets: [{type: alpaca}]", "test_datasets", "has no path"),
    ("axolotl", "val_set_size: half", "val_set_size", "half is not a number"),
    ("axolotl", "trl: 3", "trl", "3 is not a mapping"),
    ("LLaMA-Factory", "packing: tight", "packing", "tight is neither true nor false"),
    ("LLaMA-Factory", "stage: [sft]", "stage", "sft"),
    ("LLaMA-Factory", "warmup_steps: .inf", "warmup_steps", "inf is not a number"),
    ("Unsloth", "load_in_4bit: [1]", "load_in_4bit", "[1] is neither true nor false"),
    ("torchtune", "max_steps_per_epoch: x", "max_steps_per_epoch", "x is not a whole number"),
    ("torchtune", "gradient_accumulation_steps: {}", "gradient_accumulation_steps", "{} is not a whole number"),
    ("NeMo-RL", "cluster: [8]", "", ""),
    ("NeMo-RL", "checkpointing: {save_period: often}", "checkpointing.save_period", "often"),
    ("verl", "optim: {lr_warmup_steps: soon}", "optim.lr_warmup_steps", "soon is not a whole number"),
    ("verl", "optim: null", "", ""),
    ("Automodel", "step_scheduler: {max_steps: 0}", "step_scheduler.max_steps", "0 is too small"),
    ("Automodel", "lr_scheduler: {min_lr: low}", "lr_scheduler.min_lr", "low is not a number"),
]


@pytest.mark.parametrize(("tool", "line", "key", "reason"), WRONG_TYPES)
def test_a_value_of_the_wrong_type_is_named_with_its_key_and_the_fix(tool, line, key, reason):
    made = converted(f"{BARE[tool]}\n{line}")
    made.text()
    if key:
        reasons = {lost.key: lost.reason for lost in made.lost}
        assert reason in reasons[key]


NOTED = [
    ("TRL", "truncation_mode: keep_end", "which keeps the start of a row"),
    ("TRL", "warmup_ratio: 0.1", "rounds a share of warm-up up"),
    ("TRL", "beta: 0.1", "write method=kto behind FILE"),
    ("axolotl", "adapter: lora", "axolotl has no rank of its own"),
    ("LLaMA-Factory", "group_by_length: true", "orders an epoch by length there"),
    ("LLaMA-Factory", "pure_bf16: true\nfinetuning_type: full", "rounds weights in bfloat16 to the nearest"),
    ("LLaMA-Factory", "template: qwen3", "stands for the model's own chat template"),
    ("axolotl", "eot_tokens: ['<|im_end|>']", "decides what ends a turn"),
    ("Automodel", "lr_scheduler: {lr_decay_style: cosine}", "begins at a tenth of the rate"),
]


@pytest.mark.parametrize(("tool", "line", "note"), NOTED)
def test_what_no_key_says_is_noted(tool, line, note):
    made = converted(f"{BARE[tool]}\n{line}")
    assert any(note in comment for comment in made.text().splitlines() if comment.startswith("#"))


# Tool, lines of its file, and values of the recipe. Sources: transformers 5.23, trainer_optimizer.py (`_get_rmsprop`)
# and trainer_utils.py (IntervalStrategy); axolotl 0.19, utils/schemas/config.py (tiled_mlp, activation_offloading);
# NeMo-RL 7ea279a, examples/configs/grpo_math_1B.yaml; Automodel 0.7, recipes/_dist_setup.py ("none").
TAKEN = [
    ("axolotl", "chat_template: jinja\nchat_template_jinja: '{% x %}'", {"data.chat_template": "{% x %}"}),
    ("TRL", "chat_template: '{{ messages }}'", {"data.chat_template": "{{ messages }}"}),
    ("TRL", "optim: rmsprop", {"optimizer.name": "torch.optim.RMSprop"}),
    ("axolotl", "tiled_mlp: true", {"train.tile": "mlp"}),
    ("axolotl", "activation_offloading: legacy", {"train.activation_offload": True}),
    ("axolotl", "cosine_constant_lr_ratio: 0", {}),
    ("axolotl", "loss_watchdog_threshold: 5.0", {}),
    ("LLaMA-Factory", "deepspeed: zero3.json", {}),
    ("alignment-handbook", "model_revision: main\neval_strategy: epoch\nsave_steps: 0.5", {}),
    ("Automodel", "distributed: {dp_replicate_size: none, tp_size: 2}", {"parallel.tp": 2}),
]


@pytest.mark.parametrize(("tool", "lines", "values"), TAKEN)
def test_keys_that_dtrain_has_or_that_change_no_number_stop_nothing(tool, lines, values):
    made = converted(f"{BARE[tool]}\n{lines}")
    assert made.blocking() == []
    assert {key: made.values.get(key) for key in values} == values


def test_a_value_in_another_form_has_the_files_own_in_its_comment():
    text = converted(f"{BARE['axolotl']}\noptimizer: adamw_bnb_8bit\nbf16: true\nnum_epochs: 3.0").text()
    assert "  name: adamw  # optimizer: adamw_bnb_8bit" in text or "  state: int8  # optimizer: adamw_bnb_8bit" in text
    assert "  dtype: bfloat16  # bf16: true" in text and "  epochs: 3\n" in text


def test_values_with_more_than_one_key_bring_all_of_them():
    recipe = recipe_of(f"{BARE['TRL']}\noptim: adamw_bnb_8bit\nadam_beta2: 0.95")
    assert (recipe.optimizer.name, recipe.optimizer.state, recipe.optimizer.betas) == ("adamw", "int8", [0.9, 0.95])
    recipe = recipe_of(f"{BARE['axolotl']}\nrl: ipo")
    assert (recipe.method, recipe.dpo.loss, recipe.optimizer.lr) == ("dpo", "ipo", 1e-4)
    recipe = recipe_of(f"{BARE['axolotl']}\ngradient_checkpointing: offload")
    assert (recipe.train.activation_checkpointing, recipe.train.activation_offload) == ("full", True)


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
    ("lines", "method", "values"),
    [  # llamafactory 0.9.5: train/dpo/trainer.py, train/kto/trainer.py
        ("stage: kto\npref_beta: 0.2\nkto_chosen_weight: 2.0", "kto", {"beta": 0.2, "desirable_weight": 2.0}),
        ("pref_beta: 0.2\npref_ftx: 0.5\nstage: dpo", "dpo", {"beta": 0.2, "sft_weight": 0.5, "loss": "sigmoid"}),
        ("stage: dpo\npref_loss: simpo\nsimpo_gamma: 1.0", "dpo", {"loss": "simpo", "kwargs": {"simpo_gamma": 1.0}}),
        ("stage: dpo\nadapter_name_or_path: a", "dpo", {"reference": "base"}),
    ],
)
def test_llama_factorys_keys_of_preferences_are_those_of_its_stage(lines, method, values):
    recipe = recipe_of(f"{BARE['LLaMA-Factory']}\n{lines}")
    assert recipe.method == method
    assert {key: getattr(recipe.section, key) for key in values} == values


@pytest.mark.parametrize(
    ("component", "loss", "beta"), [("DPOLoss\n  beta: 0.2", "sigmoid", 0.2), ("RSOLoss\n  gamma: 0.3", "hinge", 0.3)]
)
def test_torchtunes_loss_of_pairs_makes_its_file_dpo(component, loss, beta):
    """torchtune 0.6.1, rlhf/loss/dpo.py: RSOLoss is relu(1 - gamma·m)."""
    recipe = recipe_of(f"{BARE['torchtune']}\nloss:\n  _component_: torchtune.rlhf.loss.{component}")
    assert (recipe.method, recipe.dpo.loss, recipe.dpo.beta) == ("dpo", loss, beta)


@pytest.mark.parametrize(
    ("file", "method"),
    [
        (f"{BARE['axolotl']}\nrl: gdpo\nrl_beta: 0.1", "gdpo"),
        (f"{BARE['LLaMA-Factory']}\nstage: ppo", "ppo"),
        (f"{BARE['torchtune']}\nloss: {{_component_: torchtune.rlhf.loss.PPOLoss}}", "ppo"),
        ("actor_rollout_ref: {model: {path: m}}\ndata: {train_files: d.jsonl}", "ppo"),  # verl's default is gae
        ("policy: {model_name: m}\nppo: {max_num_steps: 5}\ndata: {train: {data_path: d.jsonl}}", "ppo"),
    ],
)
def test_a_method_that_is_not_here_is_no_other_method_in_the_recipe(file, method):
    made = converted(file)
    assert made.values["method"] == method
    with pytest.raises(RecipeError, match=f"method={method} is not one of"):
        load_recipe(yaml.safe_load(made.text()))


def test_files_behind_a_reader_of_load_dataset_are_the_path():
    axolotl_file = """
base_model: m
learning_rate: 1.0e-4
datasets: [{path: json, ds_type: json, data_files: [a.jsonl, b.jsonl], type: alpaca}]
test_datasets: [{path: c.jsonl, ds_type: json, type: alpaca}]
val_set_size: 0
"""
    recipe = recipe_of(axolotl_file)
    assert (recipe.data.train.path, recipe.data.val.path) == (["a.jsonl", "b.jsonl"], "c.jsonl")
    torchtune_file = BARE["torchtune"].replace("data_files", "source: json, data_files")
    assert recipe_of(torchtune_file).data.train.path == "d.jsonl"
    recipe = recipe_of(torchtune_file.replace("chat_dataset", "text_completion_dataset"))
    assert (recipe.data.train.format, recipe.data.loss_on) == ("text", "all")
    made = converted(torchtune_file.replace("chat_dataset", "samsum_dataset"))
    assert lost_keys(made) == ["dataset._component_"] and "samsum_dataset" in made.text()


def test_axolotls_data_sets_keep_their_columns_and_differences():
    head = "base_model: m\nlearning_rate: 1.0e-4\ndatasets:\n"
    own_prompts = "{field_instruction: q, field_output: a, format: 'Q: {instruction}'}"
    made = converted(f"{head}  - path: d.jsonl\n    type: {own_prompts}\n")
    recipe = load_recipe(made.recipe())
    assert recipe.data.train.columns == {"instruction": "q", "output": "a"}
    assert lost_keys(made) == ["datasets.type.format"]
    made = converted(f"{head}  - {{path: d.jsonl, type: alpaca}}\nval_set_size: 0\n")
    assert "### Instruction" in made.text() and not any(key.startswith("data.val") for key in made.values)
    sharegpt = "message_property_mappings: {role: from, content: value}, field_messages: talk"
    recipe = recipe_of(
        f"{head}  - {{path: a, type: chat_template, split: train_sft, name: en}}\n"
        f"  - {{path: b.jsonl, type: chat_template, {sharegpt}}}\n"
    )
    first, second = recipe.data.train.sources
    assert (first.path, first.split, first.subset, first.format) == ("a", "train_sft", "en", "messages")
    assert (second.format, second.columns) == ("sharegpt", {"conversations": "talk"})


def test_a_slice_for_validation_is_reported_and_stops_no_run():
    axolotl_entry = "{path: a/b, type: alpaca, split: 'test[:5%]'}"
    torchtune_set = "{_component_: torchtune.datasets.chat_dataset, source: a/b, split: 'test[:5%]'}"
    files = {
        "test_datasets.split": f"{BARE['axolotl']}\ntest_datasets:\n  - {axolotl_entry}",
        "dataset_val.split": f"{BARE['torchtune']}\ndataset_val: {torchtune_set}",
        "dataset_test_split": f"{BARE['TRL']}\neval_strategy: epoch\ndataset_test_split: 'test[:5%]'",
    }
    for key, text in files.items():
        made = converted(text)
        (lost,) = [lost for lost in made.lost if lost.key == key]
        assert lost.reason.startswith("data.val.split takes a split's name") and not lost.changes_numbers
        # Without the slice, the set would be one that the run trains on.
        assert not any(name.startswith("data.val") for name in made.values), key
    made = converted(f"{BARE['TRL']}\neval_strategy: epoch\ndataset_train_split: 'train[:95%]'")
    (lost,) = [lost for lost in made.lost if lost.key == "dataset_train_split"]
    assert lost.reason.startswith("data.train.split takes") and lost.changes_numbers
    assert made.values["data.val.split"] == "test"


def test_torchtunes_distillation_names_its_teacher():
    more = """
kd_loss: {_component_: torchtune.modules.loss.ForwardKLWithChunkedOutputLoss}
kd_ratio: 0.5
"""
    first = "teacher_checkpointer: {checkpoint_dir: t, model_type: QWEN2}\n"
    made = converted(f"{first}{BARE['torchtune']}{more}")
    recipe = load_recipe(yaml.safe_load(made.text()))
    assert (recipe.method, recipe.model.path, recipe.distill.teacher, recipe.distill.kl) == (
        "distill", "m", "t", "forward",
    )  # fmt: skip
    assert lost_keys(made) == ["kd_ratio"]


def test_a_list_of_all_linear_is_all_linear():
    recipe = recipe_of(f"{BARE['TRL']}\nuse_peft: true\nlora_target_modules: [all-linear]")
    assert recipe.lora.target == "all-linear"


def test_verls_grpo_counts_prompts_and_ours_counts_completions():
    """verl 0.10: trainer/config/ppo_trainer.yaml and its parts, trainer/ppo/core_algos.py."""
    recipe = recipe_of("""
algorithm: {adv_estimator: grpo, use_kl_in_reward: false}
data: {train_files: [a.parquet, b.parquet], train_batch_size: 64, max_prompt_length: 512, max_response_length: 1024,
       filter_overlong_prompts: true}
actor_rollout_ref:
  model: {path: m, enable_gradient_checkpointing: true}
  actor:
    optim: {lr: 1.0e-6, lr_warmup_steps_ratio: 0.1}
    ppo_mini_batch_size: 16
    ppo_micro_batch_size_per_gpu: 4
    use_kl_loss: true
    kl_loss_coef: 0.002
    clip_ratio_high: 0.28
    entropy_coeff: 0
  rollout: {name: vllm, n: 8, temperature: 0.9, gpu_memory_utilization: 0.6}
trainer: {total_epochs: 2, total_training_steps: null, save_freq: 20, n_gpus_per_node: 8}
""")
    grpo = recipe.grpo
    assert (recipe.method, recipe.data.train.path) == ("grpo", ["a.parquet", "b.parquet"])
    assert (grpo.prompts_per_step, grpo.group_size, recipe.train.global_batch) == (64, 8, 16 * 8)
    assert (recipe.data.max_length, grpo.sampling.max_new_tokens, recipe.data.too_long) == (1536, 1024, "drop")
    assert (grpo.beta, grpo.clip, grpo.loss, grpo.advantage, grpo.scale) == (
        0.002,
        [0.2, 0.28],
        "dapo",
        "group",
        "group",
    )
    assert grpo.kwargs == {
        "dual_clip": 3.0,
        "kl_estimator": "k3",
        "kl_gradient": "direct",
        "sampling_correction": "none",
    }
    assert (recipe.optimizer.betas, recipe.optimizer.weight_decay) == ([0.9, 0.999], 0.01)
    assert (recipe.scheduler.name, recipe.scheduler.warmup) == ("constant", 0.1)
    assert (recipe.train.epochs, recipe.train.micro_batch, recipe.launch.nproc) == (2, 4, 8)
    # a rollout has 64 / 16 = 4 optimizer steps; save_freq counts rollouts
    assert recipe.checkpoint.every == 80


def test_nemo_rls_completions_may_fill_the_sequence_and_its_rewards_are_divided_without_their_own():
    """NeMo-RL 7ea279a, examples/configs/grpo_math_1B.yaml: generation.max_new_tokens is max_total_sequence_length."""
    recipe = recipe_of("""
policy: {model_name: m, max_total_sequence_length: 2048}
grpo: {max_num_steps: 10}
data: {train: {data_path: d.jsonl}}
""")
    assert recipe.grpo.sampling.max_new_tokens == 2048
    assert (recipe.grpo.advantage, recipe.grpo.scale, recipe.grpo.loss) == ("leave_one_out", "leave_one_out", "dapo")


def test_automodels_patterns_of_modules_are_regular_expressions():
    made = recipe_of(f"{BARE['Automodel']}\npeft: {{_target_: x.PeftConfig, target_modules: '*_proj', dim: 4}}")
    assert (made.lora.target, made.lora.rank, made.lora.alpha) == (".*_proj", 4, 32)
    made = recipe_of(f"{BARE['Automodel']}\npeft: {{_target_: x.PeftConfig, target_modules: [q_proj, v_proj]}}")
    assert made.lora.target == ["q_proj", "v_proj"]


def test_the_handbooks_mixture_is_a_list_of_sources():
    recipe = recipe_of("""
model_name_or_path: m
dataset_mixture:
  datasets:
    - {id: a/b, config: SFT, split: train_x, weight: 0.5}
    - {id: c/d, split: train, weight: 1.0}
  test_split_size: 0.1
""")
    first, second = recipe.data.train.sources
    assert (first.path, first.subset, first.split, first.weight) == ("a/b", "SFT", "train_x", 0.5)
    assert (second.path, second.weight, recipe.data.val) == ("c/d", 1.0, 0.1)


def test_the_method_that_is_typed_counts_and_a_recipe_of_ours_is_no_file_of_another_tool():
    recipe, problems = recipe_and_problems({"model_name_or_path": "m", "dataset_name": "d"}, ["method=dpo"])
    assert (recipe.method, recipe.optimizer.lr, problems) == ("dpo", 1e-6, [])
    for name, _ in config.list_shipped_recipes():
        assert convert_recipe(yaml.safe_load(config.find_recipe(name).read_text())) is None, name
    recipe, problems = recipe_and_problems({"model": {"path": "m"}, "template": "x"})
    assert not any("a file of" in str(problem) for problem in problems) and recipe.origin_notes == []


def test_what_cannot_be_resolved_is_named():
    made = converted(f"{BARE['NeMo-RL']}\ncheckpointing: {{save_period: '${{mul:2,3}}'}}\nenv: {{x: '${{mul:1,2}}'}}")
    assert "env.x" not in lost_keys(made)  # an environment's settings change no number of the recipe


def test_the_tables_name_keys_of_a_recipe():
    known = {*recipe_keys()}
    renamed = [
        axolotl.RENAMED,
        axolotl.GRPO,
        trl.IMPORTANCE_SAMPLING,
        llama_factory.RENAMED,
        *llama_factory.PREFERENCE_KEYS.values(),
        torchtune.RENAMED,
        torchtune.LORA_RENAMED,
        torchtune.GRPO_RENAMED,
        nemo_rl.RENAMED,
        nemo_rl.LORA_RENAMED,
        *nemo_rl.METHOD_KEYS.values(),
        automodel.RENAMED,
        automodel.LORA_RENAMED,
    ]
    for table in renamed:
        for theirs, ours in table.items():
            section, is_entry, _ = ours.partition("kwargs.")
            assert (f"{section}kwargs" if is_entry else ours) in known, (theirs, ours)
    defaults = [
        *[module.DEFAULTS for module in (hugging_face, trl, axolotl, llama_factory, unsloth, torchtune, nemo_rl)],
        *[module.LORA_DEFAULTS for module in (trl, axolotl, llama_factory, unsloth, torchtune, nemo_rl, verl)],
        *[layer for module in (trl, axolotl, llama_factory, nemo_rl) for layer in module.METHOD_DEFAULTS.values()],
        *[verl.SHARED_DEFAULTS, verl.GRPO_DEFAULTS, verl.SFT_DEFAULTS, verl.FORMER_SFT_DEFAULTS, automodel.DEFAULTS],
    ]
    for layer in defaults:
        load_recipe(unflatten({key: value for key, value in layer.items() if key != "train.epochs"}))


GRPO = "algorithm: {adv_estimator: grpo}"
# Lines of a file whose values have a wrong type, and the key that is reported.
REPORTED_VALUES = [
    ("TRL", "gradient_accumulation_steps: [2]", "gradient_accumulation_steps"),
    ("TRL", "max_steps: soon", "max_steps"),
    ("TRL", "warmup_ratio: []", "warmup_ratio"),
    ("TRL", "warmup_steps: [1]", "warmup_steps"),
    ("TRL", "eval_strategy: steps\neval_steps: often", "eval_steps"),
    ("TRL", "lr_scheduler_kwargs: {min_lr: low}", "lr_scheduler_kwargs.min_lr"),
    ("TRL", "num_generations: 2\nreward_funcs: [accuracy]\nreward_weights: [much]", "reward_weights"),
    ("TRL", "num_generations: 2\nreward_funcs: [accuracy]\ngeneration_batch_size: many", "generation_batch_size"),
    ("TRL", "num_generations: 0\nreward_funcs: [accuracy]", "num_generations"),
    ("TRL", "datasets: [1]", "datasets[0]"),
    ("axolotl", "val_set_size: some", "val_set_size"),
    ("axolotl", "pretraining_dataset: [{name: a}]", "pretraining_dataset"),
    ("axolotl", "test_datasets: [a.jsonl]", "test_datasets[0]"),
    ("torchtune", "dataset_val: [a.jsonl]", "dataset_val[0]"),
    ("torchtune", "gradient_accumulation_steps: x", "gradient_accumulation_steps"),
    ("torchtune", "max_steps_per_epoch: [1]", "max_steps_per_epoch"),
    ("verl", f"{GRPO}\nactor_rollout_ref: {{rollout: {{n: many}}}}", "actor_rollout_ref.rollout.n"),
    ("verl", f"{GRPO}\ndata.max_response_length: x", "data.max_response_length"),
    ("verl", "optim: {lr_warmup_steps: few}", "optim.lr_warmup_steps"),
    ("NeMo-RL", "policy: {model_name: m, scheduler: [{kwargs: {}}]}", "policy.scheduler"),
    ("NeMo-RL", "policy: {model_name: m, scheduler: [1]}", "policy.scheduler[0]"),
    ("Automodel", "lr_scheduler: {min_lr: low}\nstep_scheduler: {max_steps: 20}", "lr_scheduler.min_lr"),
]  # fmt: skip


@pytest.mark.parametrize(("tool", "lines", "key"), REPORTED_VALUES)
def test_values_of_a_wrong_type_are_reported(tool, lines, key):
    made = converted(f"{BARE[tool]}\n{lines}" if "policy" not in lines else lines)
    assert key in lost_keys(made)
    yaml.safe_load(made.text())


def test_numbers_as_text_are_numbers():
    recipe = recipe_of(f"{BARE['TRL']}\nmax_steps: '30'\nwarmup_ratio: '0.1'\ngradient_accumulation_steps: '2'")
    assert (recipe.train.steps, recipe.scheduler.warmup_steps, recipe.train.global_batch) == (30, 3, 16)


def test_values_of_several_lines_stay_comments():
    made = converted(f'{BARE["Automodel"]}\nstep_scheduler: {{ckpt_every_steps: "two\\nmethod: dpo"}}')
    assert "method: dpo" in made.text() and yaml.safe_load(made.text())["method"] == "sft"


def test_verls_warm_up_counts_rollouts():
    """verl's worker steps the scheduler once in `update_actor`, after all mini-batches of a rollout."""
    actor = "{ppo_mini_batch_size: 8, optim: {lr_warmup_steps: 5}}"
    model = f"actor_rollout_ref: {{actor: {actor}, rollout: {{n: 4}}, model: {{path: m}}}}"
    data = "data: {train_files: d.jsonl, train_batch_size: 32}"
    assert recipe_of(f"{GRPO}\n{model}\n{data}").scheduler.warmup_steps == 20


def test_verls_greedy_rollouts_are_reported():
    lines = f"{GRPO}\nactor_rollout_ref: {{rollout: {{do_sample: false}}}}"
    assert "actor_rollout_ref.rollout.do_sample" in lost_keys(converted(lines))
