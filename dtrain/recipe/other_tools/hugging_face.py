"""Keys of transformers' TrainingArguments, which TRL, axolotl, LLaMA-Factory and Unsloth share.

Compared with transformers 5.23. Keys that only have another name in dtrain are in key_aliases.toml. This module
converts the keys whose values must be changed or combined.
"""

import math
from typing import Any, Literal

from dtrain.recipe import spelling
from dtrain.recipe.other_tools.draft import Draft, as_number

DEFAULTS: dict[str, Any] = {
    "run.seed": 42,
    "train.epochs": 3,
    "train.micro_batch": 8,
    "train.max_grad_norm": 1.0,
    "optimizer.name": "adamw",
    "optimizer.lr": 5e-5,
    "optimizer.betas": [0.9, 0.999],
    "optimizer.eps": 1e-8,
    "optimizer.weight_decay": 0.0,
    "scheduler.name": "linear",
    "scheduler.warmup": 0,
    "scheduler.min_lr_ratio": 0.0,
}

# Where something is written, how validation is batched, and which kernel computes attention: no number depends on it.
NEEDLESS = (
    "output_dir",
    "logging_dir",
    "per_device_eval_batch_size",
    "eval_batch_size",
    "overwrite_output_dir",
    "attn_implementation",
    "flash_attn",
    "flash_attention",
    "sdp_attention",
    "data_seed",
    "padding_free",
    "do_eval",
    "ddp_timeout",
    "save_only_model",
    "eval_sample_packing",
    "push_to_hub",
    "hub_model_id",
    "hub_model_revision",
    "hub_strategy",
    "hub_private_repo",
)

TRACKERS = ("wandb", "trackio", "mlflow", "swanlab")
"""Names in `report_to` that are names of `metrics.sinks`, too. tensorboard is on by default."""

COMPLETIONS_ONLY = (
    "where rows hold a prompt and a completion, TRL trains on the completion only: data.loss_on=completion"
)
GROUPED_BY_LENGTH = (
    "group_by_length orders an epoch by length there; train.dynamic_batch sorts within a batch, the order stays random"
)
BFLOAT16_ROUNDING = (
    "torch rounds weights in bfloat16 to the nearest; train.masters=bfloat16 rounds up or down at random"
)
DOUBLE_QUANTIZATION = "bitsandbytes may quantize nf4's scales too (double quantization); here they stay float32"


def convert_training(
    draft: Draft, *, null_is_off: bool = True, rounding: Literal["up", "axolotl"] = "up", accumulation: int = 1
) -> None:
    """Write the keys of TrainingArguments that this module converts. Data sets must be written before.

    Args:
        draft: The draft.
        null_is_off: Whether `max_grad_norm: null` switches clipping off. Otherwise null means the default.
        rounding: How the tool rounds a warm-up that is a share of the steps. See `convert_schedule`.
        accumulation: The tool's default of gradient accumulation.
    """
    convert_batch(draft, accumulation=accumulation)
    convert_clipping(draft, null_is_off=null_is_off)
    convert_precision(draft)
    convert_optimizer(draft)
    convert_length(draft)
    convert_schedule(draft, rounding=rounding)
    convert_validation(draft)
    convert_saving(draft)
    convert_trackers(draft)
    convert_revision(draft)


def convert_batch(draft: Draft, *, accumulation: int = 1) -> None:
    """Write the batch of one GPU: micro-batch times gradient accumulation, whose default is `accumulation`."""
    draft.rename({"per_device_train_batch_size": "train.micro_batch", "micro_batch_size": "train.micro_batch"})
    draft.defaults["train.global_batch"] = draft.defaults["train.micro_batch"] * accumulation
    names = ("gradient_accumulation_steps", "gradient_accumulation", "grad_accum", "grad_accumulation_steps")
    steps = draft.take_int(*names, default=None, minimum=1)
    micro_batch = draft.values.get("train.micro_batch")
    if micro_batch is None and steps is None:
        return
    if not isinstance(micro_batch, int):  # auto
        micro_batch = draft.defaults["train.micro_batch"]
    draft.put("train.global_batch", micro_batch * (steps or accumulation), "gradient_accumulation_steps")


def convert_clipping(draft: Draft, *, null_is_off: bool) -> None:
    """Write gradient clipping. 0 switches clipping off.

    Args:
        draft: The draft.
        null_is_off: Whether null switches clipping off too, as in transformers.
    """
    is_null = "max_grad_norm" in draft.file and draft.file["max_grad_norm"] is None
    value = draft.take("max_grad_norm")
    if value == 0 or (is_null and null_is_off):
        draft.set("train.max_grad_norm", None)
    elif value is not None:
        draft.put("train.max_grad_norm", value, "max_grad_norm")


def convert_precision(draft: Draft) -> None:
    """Write the dtype of the computation. bf16 has precedence over fp16, and without either it is float32."""
    bf16 = draft.take_flag("bf16", "bfloat16", default=None)
    fp16 = draft.take_flag("fp16", "float16", default=False)
    if bf16:
        draft.put("train.dtype", "bfloat16", "bf16")
    elif fp16:
        draft.put("train.dtype", "float16", "fp16")
    elif bf16 is False and draft.defaults.get("train.dtype") == "bfloat16":
        draft.put("train.dtype", "float32", "bf16")


def convert_optimizer(draft: Draft) -> None:
    """Write Adam's two betas. A beta that the file does not set has the tool's default."""
    first = draft.take_number("adam_beta1", default=None)
    second = draft.take_number("adam_beta2", default=None)
    if first is not None or second is not None:
        default_first, default_second = draft.defaults["optimizer.betas"]
        betas = [default_first if first is None else first, default_second if second is None else second]
        draft.put("optimizer.betas", betas, "adam_beta1")


def convert_length(draft: Draft) -> None:
    """Write steps or epochs. A recipe has one of them, and max_steps has precedence, as in transformers."""
    steps = draft.take_int("max_steps", default=0)
    epochs = draft.take("num_train_epochs", "num_epochs")
    if steps > 0:
        draft.put("train.steps", steps, "max_steps")
        draft.defaults.pop("train.epochs", None)
    elif epochs is not None:
        source = "num_train_epochs" if "num_train_epochs" in draft.file else "num_epochs"
        draft.put("train.epochs", epochs, source)


def convert_schedule(draft: Draft, *, rounding: Literal["up", "axolotl"]) -> None:
    """Write the schedule and its warm-up.

    Args:
        draft: The draft.
        rounding: How the tool rounds a warm-up that is a share of the steps. "up": to the next whole number. "axolotl":
            down, with 2 steps in place of 1, and at most 100 steps if the share is axolotl's default.
    """
    name = draft.take("lr_scheduler_type", "lr_scheduler")
    source = "lr_scheduler_type" if "lr_scheduler_type" in draft.file else "lr_scheduler"
    if name is not None:
        draft.put("scheduler.name", name, source)
    _convert_lowest_rate(draft, name)
    steps = draft.take_number("warmup_steps", default=None)
    fraction = draft.take_number("warmup_ratio", default=None)
    if name == "constant":
        # transformers' constant has no warm-up; constant_with_warmup has one
        draft.set("scheduler.warmup", 0)
        return
    if steps is not None and 0 < steps < 1:  # transformers 5 accepts a share under this name
        fraction = steps
        steps = None
    if steps:
        count = int(steps)
        if rounding == "axolotl" and count == 1:
            count = 2
        draft.put("scheduler.warmup_steps", count, "warmup_steps")
        draft.defaults.pop("scheduler.warmup", None)
    elif fraction is None and steps == 0:
        draft.put("scheduler.warmup", 0, "warmup_steps")
    elif fraction is None:
        default_share = draft.defaults["scheduler.warmup"]
        if 0 < default_share < 1:
            _convert_warmup_fraction(draft, default_share, False, rounding)
    elif 0 < fraction < 1:
        _convert_warmup_fraction(draft, fraction, True, rounding)
    else:
        draft.put("scheduler.warmup", int(fraction), "warmup_ratio")


def _convert_warmup_fraction(draft: Draft, fraction: float, is_given: bool, rounding: str) -> None:
    """Write a warm-up that is a share of the steps. If the file sets the number of steps, warm-up steps are written.

    Args:
        draft: The draft.
        fraction: The share.
        is_given: Whether the file sets the share. Otherwise it is the tool's default.
        rounding: As in `convert_schedule`.
    """
    tool = draft.tool.name if draft.tool else ""
    steps = draft.values.get("train.steps")
    if steps is None:
        if is_given:
            draft.put("scheduler.warmup", fraction, "warmup_ratio")
        if rounding == "axolotl":
            draft.note("axolotl warms up for 100 steps at most by default, and for 2 where a share gives 1")
        else:
            draft.note(f"{tool} rounds a share of warm-up up to whole steps; here it is rounded down")
        return
    if rounding == "axolotl":
        count = int(fraction * steps) if is_given else min(int(fraction * steps), 100)
        count = 2 if count == 1 else count
    else:
        count = math.ceil(steps * fraction)
    draft.defaults.pop("scheduler.warmup", None)
    draft.set("scheduler.warmup_steps", count, f"{fraction:g} of train.steps, as {draft.version} rounds it")


def _convert_lowest_rate(draft: Draft, name: Any) -> None:
    """Write the learning rate, and the final learning rate as a share of it.

    The file may set the final learning rate as a rate, or as a share.

    Args:
        draft: The draft.
        name: The file's schedule.
    """
    draft.rename({"learning_rate": "optimizer.lr"})
    rate = draft.effective("optimizer.lr")
    ratio = draft.take_number("lr_scheduler_kwargs.min_lr_rate", "cosine_min_lr_ratio", default=None)
    lowest = draft.take_number("lr_scheduler_kwargs.min_lr", default=None)
    if ratio is None and lowest is not None and isinstance(rate, float) and rate > 0:
        ratio = lowest / rate
    if ratio is not None:
        draft.put("scheduler.min_lr_ratio", ratio, "lr_scheduler_kwargs")
    elif name == "cosine_with_min_lr":
        reason = f"transformers refuses {name} without min_lr or min_lr_rate; set scheduler.min_lr_ratio"
        draft.lose("lr_scheduler_kwargs", reason, "scheduler.min_lr_ratio")
    for option in draft.section("lr_scheduler_kwargs"):
        if option not in ("min_lr_rate", "min_lr"):
            draft.lose(
                f"lr_scheduler_kwargs.{option}", "scheduler.kwargs takes the arguments of an import path's class"
            )


def convert_validation(draft: Draft) -> None:
    """Write how often validation runs. `eval_steps` is used if the strategy is "steps" or not given."""
    strategy = draft.take("eval_strategy", "evaluation_strategy")
    every = draft.take_number("eval_steps", default=None)
    if strategy == "epoch" and not draft.has("data.val"):
        return
    if strategy == "epoch":
        source = "eval_strategy" if "eval_strategy" in draft.file else "evaluation_strategy"
        reason = "train.validate_every counts steps; a run validates at the end in any case"
        draft.lose(source, reason, "train.validate_every")
    elif every is not None and strategy not in ("no", False):
        if 0 < every < 1:
            steps = draft.values.get("train.steps")
            if steps is None:
                reason = "train.validate_every counts steps; the file gives a share of them"
                draft.lose("eval_steps", reason, "train.validate_every")
            else:
                draft.put("train.validate_every", math.ceil(steps * every), "eval_steps")
        elif every:
            draft.put("train.validate_every", every, "eval_steps")


def convert_revision(draft: Draft) -> None:
    """List a revision of the model as lost, unless it is the hub's default."""
    revision = draft.take("model_revision", "revision_of_model")
    if revision not in (None, "main"):
        reason = "model.path takes the directory of one revision, and of an id of the hub the branch main"
        draft.lose("model_revision", reason, "model.path")


def convert_saving(draft: Draft) -> None:
    """Switch saving off for `save_strategy: no`. `save_steps` is written by its alias."""
    strategy = draft.take("save_strategy")
    if strategy in ("no", False):
        draft.take("save_steps")
        draft.put("checkpoint.every", None, "save_strategy")


def convert_trackers(draft: Draft) -> None:
    """List the trackers of `report_to` as lost, except for a wandb project, which has an alias."""
    if not draft.given("report_to"):
        return
    names = draft.take_list("report_to")
    if "wandb" not in names and "all" not in names:
        draft.ignore("wandb_project")
    has_project = draft.given("wandb_project")
    trackers = [name for name in names if name in TRACKERS and not (name == "wandb" and has_project)]
    if trackers:
        entries = ", ".join(f"{{name: {name}}}" for name in trackers)
        draft.lose("report_to", f"metrics.sinks=[{entries}] logs there", is_harmless=True)


def convert_validation_split(draft: Draft, *names: str) -> None:
    """Write a validation set that is split off the training rows.

    The value is a share of the rows if it is below 1, else a number of rows. 0 means no validation.
    """
    value = draft.take_number(*names, default=0)
    source = next((name for name in names if name in draft.file), names[0])
    if not value:
        return
    if draft.has("data.val"):
        draft.lose(source, "data.val names a set already")
    else:
        draft.put("data.val", value if value < 1 else int(value), source)


def convert_rewards(draft: Draft, prefix: str = "") -> None:
    """Write GRPO's reward functions and their weights. `prefix` is the section of their keys, such as "trl."."""
    functions = draft.take_list(f"{prefix}reward_funcs")
    weights: list[float] = []
    for weight in draft.take_list(f"{prefix}reward_weights"):
        number = as_number(weight)
        if number is None:
            draft.lose(f"{prefix}reward_weights", f"{weight} is not a number. Write one weight for each function")
            weights = []
            break
        weights.append(float(number))
    rewards = []
    for index, function in enumerate(functions):
        dtrain_name = spelling.find_dtrain_value("grpo.rewards.fn", function) or str(function)
        reward: dict[str, Any] = {"fn": dtrain_name.partition(",")[0]}
        if index < len(weights) and weights[index] != 1:
            reward["weight"] = weights[index]
        rewards.append(reward)
    if rewards:
        draft.put("grpo.rewards", rewards, f"{prefix}reward_funcs")


def convert_clip(draft: Draft, prefix: str = "") -> None:
    """Write GRPO's clip. `epsilon` is both bounds unless `epsilon_high` is given."""
    low = draft.take_number(f"{prefix}epsilon", default=None)
    high = draft.take_number(f"{prefix}epsilon_high", default=None)
    if low is None and high is None:
        return
    low = 0.2 if low is None else low
    draft.put("grpo.clip", [low, low if high is None else high], f"{prefix}epsilon")


def convert_rollout_size(draft: Draft, prefix: str = "") -> None:
    """Write the number of prompts of a rollout: its completions, divided by the completions of each prompt.

    By default a rollout has the completions of one optimizer step. For example, with a batch of 8 × 4 completions and
    `num_generations: 8` a rollout has 32 / 8 = 4 prompts.
    """
    group = draft.effective("grpo.group_size")
    steps = draft.take_int(f"{prefix}steps_per_generation", "steps_per_generation", default=None, minimum=1)
    completions = draft.take_int(f"{prefix}generation_batch_size", "generation_batch_size", default=None, minimum=1)
    if completions is None and steps is None:
        completions = draft.effective("train.global_batch")
    elif completions is None:
        completions = draft.effective("train.micro_batch") * steps
    if not (isinstance(completions, int) and isinstance(group, int) and completions > 0 and group > 0):
        draft.lose(
            f"{prefix}num_generations",
            f"grpo.prompts_per_step: {completions} completions of a rollout and {group} of a prompt are no sizes",
            "grpo.prompts_per_step",
        )
    elif completions % group:
        draft.lose(
            f"{prefix}num_generations",
            f"grpo.prompts_per_step: a rollout's {completions} completions are no multiple of {group}",
            "grpo.prompts_per_step",
        )
    else:
        comment = f"{completions} completions of a rollout, {group} for a prompt"
        draft.set("grpo.prompts_per_step", completions // group, comment)


def convert_moving_reference(draft: Draft, *, every: int, mix: float, prefix: str = "") -> None:
    """Write a reference model that moves towards the policy. `every` and `mix` are the tool's defaults."""
    is_moving = draft.take_flag(f"{prefix}sync_ref_model", default=False)
    steps = draft.take_int(f"{prefix}ref_model_sync_steps", default=None, minimum=1)
    alpha = draft.take_number(f"{prefix}ref_model_mixup_alpha", default=None)
    if is_moving:
        draft.put(f"{draft.method}.sync_every", steps or every, f"{prefix}sync_ref_model")
        draft.put(f"{draft.method}.sync_mix", alpha or mix, f"{prefix}sync_ref_model")


def put_bfloat16_weights(draft: Draft, comment: str) -> None:
    """Set `train.masters` to bfloat16, if dtrain's optimizer supports this. Otherwise add a note.

    Args:
        draft: The draft.
        comment: How the other tool stores trained weights.
    """
    name = draft.effective("optimizer.name", "adamw")
    if name in ("adamw", "adam", "muon"):
        draft.set("train.masters", "bfloat16", comment)
        draft.note(BFLOAT16_ROUNDING)
    else:
        draft.note(f"{comment}; here optimizer.name={name} has float32 weights")


def finish_adapter(draft: Draft, has_adapter: bool) -> None:
    """Note what differs for PEFT's adapters. If the file trains no adapter, remove its keys from the recipe."""
    if not has_adapter:
        _drop_adapter_keys(draft)
        return
    if draft.effective("lora.quantize") == "nf4":
        draft.note(DOUBLE_QUANTIZATION)
    bias = draft.take("bias", "lora_bias")
    if bias not in (None, "none", False):
        source = "bias" if draft.given("bias") else "lora_bias"
        draft.lose(source, "biases are not trained next to an adapter here")


def add_common_notes(draft: Draft) -> None:
    """Note differences in keys that all tools on TrainingArguments have."""
    if draft.values.get("train.masters") == "bfloat16":
        draft.note(BFLOAT16_ROUNDING)
    if draft.take("group_by_length"):
        draft.note(GROUPED_BY_LENGTH)
    if draft.take("packing_strategy") == "wrapped":
        draft.lose("packing_strategy", "wrapped packing cuts samples, which then see one another; here they do not")


def _drop_adapter_keys(draft: Draft) -> None:
    """Remove the keys of an adapter from the recipe of a file that trains none."""
    unread = [key for key in draft.values if key.startswith("lora.") and key != "lora.path"]
    for key in unread:
        draft.remove(key)
    if unread and draft.tool:
        draft.note(f"not carried over: {', '.join(unread)}, which {draft.tool.name} reads with an adapter only")
