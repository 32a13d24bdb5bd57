"""Keys of transformers' TrainingArguments, which TRL, axolotl, LLaMA-Factory and Unsloth share.

Compared with transformers 5.23. Keys that only have another name here are in key_aliases.toml; these functions hold
what takes more than a name.
"""

import math
from typing import Any, Literal

from dtrain.recipe import key_aliases
from dtrain.recipe.other_tools.draft import Draft, listed, number_of

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
    "report_to",
    "ddp_timeout",
    "save_only_model",
    "eval_sample_packing",
    "push_to_hub",
    "hub_model_id",
    "hub_model_revision",
    "hub_strategy",
    "hub_private_repo",
)

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


def convert_batch(draft: Draft, *, accumulation: int = 1) -> None:
    """Write the batch of one GPU: micro-batch times gradient accumulation, whose default is `accumulation`."""
    draft.rename({"per_device_train_batch_size": "train.micro_batch", "micro_batch_size": "train.micro_batch"})
    draft.defaults["train.global_batch"] = draft.defaults["train.micro_batch"] * accumulation
    names = ("gradient_accumulation_steps", "gradient_accumulation", "grad_accum", "grad_accumulation_steps")
    # "auto" is DeepSpeed's word for the value of its launcher.
    accumulation_given = None if draft.take(*names) == "auto" else draft.number(*names)
    micro_batch = draft.values.get("train.micro_batch")
    if micro_batch is None and accumulation_given is None:
        return
    if not isinstance(micro_batch, int):
        micro_batch = draft.defaults["train.micro_batch"]
    batch = micro_batch * int(accumulation_given or accumulation)
    draft.put("train.global_batch", batch, "gradient_accumulation_steps")


def convert_clipping(draft: Draft, *, null_is_off: bool) -> None:
    """Write gradient clipping. 0 switches it off, and for transformers null does too."""
    is_null = "max_grad_norm" in draft.file and draft.file["max_grad_norm"] is None
    value = draft.take("max_grad_norm")
    if value == 0 or (is_null and null_is_off):
        draft.set("train.max_grad_norm", None)
    elif value is not None:
        draft.put("train.max_grad_norm", value, "max_grad_norm")


def convert_precision(draft: Draft) -> None:
    """Write the type that the model computes in. bf16 wins over fp16, and without either it is float32."""
    bf16, fp16 = draft.take("bf16", "bfloat16"), draft.take("fp16", "float16")
    if bf16 and bf16 != "auto":
        draft.put("train.dtype", "bfloat16", "bf16")
    elif fp16:
        draft.put("train.dtype", "float16", "fp16")
    elif bf16 is False and draft.defaults.get("train.dtype") == "bfloat16":
        draft.put("train.dtype", "float32", "bf16")


def convert_optimizer(draft: Draft) -> None:
    """Write the two betas, each of which may be given without the other."""
    first, second = draft.take("adam_beta1"), draft.take("adam_beta2")
    if first is not None or second is not None:
        default_first, default_second = draft.defaults["optimizer.betas"]
        betas = [default_first if first is None else first, default_second if second is None else second]
        draft.put("optimizer.betas", betas, "adam_beta1")


def convert_length(draft: Draft) -> None:
    """Write steps or epochs. A recipe has one of them, and max_steps wins there too."""
    steps, epochs = draft.number("max_steps"), draft.take("num_train_epochs", "num_epochs")
    if steps is not None and steps > 0:
        draft.put("train.steps", steps, "max_steps")
        draft.defaults.pop("train.epochs", None)
    elif epochs is not None:
        source = "num_train_epochs" if "num_train_epochs" in draft.file else "num_epochs"
        draft.put("train.epochs", epochs, source)


def convert_schedule(draft: Draft, *, rounding: Literal["up", "axolotl"]) -> None:
    """Write the schedule and its warm-up.

    Args:
        rounding: How the tool rounds a warm-up that is a share of the steps. "axolotl": down, at most 100 steps unless
            the file gives the share, and 2 steps where that makes 1.
    """
    name = draft.take("lr_scheduler_type", "lr_scheduler")
    source = "lr_scheduler_type" if "lr_scheduler_type" in draft.file else "lr_scheduler"
    if name is not None:
        draft.put("scheduler.name", name, source)
    _convert_lowest_rate(draft)
    steps_or_share, share = draft.number("warmup_steps"), draft.number("warmup_ratio")
    if name == "constant":
        # transformers' constant has no warm-up; constant_with_warmup has one
        draft.set("scheduler.warmup", 0)
        return
    if isinstance(steps_or_share, float) and 0 < steps_or_share < 1:  # transformers 5 takes a share under this name
        share, steps_or_share = steps_or_share, None
    if steps_or_share:
        count = int(steps_or_share)
        if rounding == "axolotl" and count == 1:
            count = 2
        draft.put("scheduler.warmup_steps", count, "warmup_steps")
        draft.defaults.pop("scheduler.warmup", None)
        return
    if steps_or_share == 0 and share is None:
        draft.put("scheduler.warmup", 0, "warmup_steps")
        return
    is_given = share is not None
    if not is_given:
        share = draft.defaults["scheduler.warmup"]
    if not 0 < share < 1:
        if is_given:
            draft.put("scheduler.warmup", int(share), "warmup_ratio")
        return
    _convert_warmup_share(draft, share, is_given, rounding)


def _convert_warmup_share(draft: Draft, share: float, is_given: bool, rounding: str) -> None:
    """Write a warm-up that is a share of the steps: their number, if the file gives the steps."""
    tool = draft.tool.name if draft.tool else ""
    steps = draft.values.get("train.steps")
    if steps is None:
        if is_given:
            draft.put("scheduler.warmup", share, "warmup_ratio")
        if rounding == "axolotl":
            draft.note("axolotl warms up for 100 steps at most by default, and for 2 where a share gives 1")
        else:
            draft.note(f"{tool} rounds a share of warm-up up to whole steps; here it is rounded down")
        return
    if rounding == "axolotl":
        count = int(share * steps) if is_given else min(int(share * steps), 100)
        count = 2 if count == 1 else count
    else:
        count = math.ceil(steps * share)
    draft.defaults.pop("scheduler.warmup", None)
    draft.set("scheduler.warmup_steps", count, f"{share:g} of train.steps, as {draft.version} rounds it")


def _convert_lowest_rate(draft: Draft) -> None:
    """Write the rate at which the schedule ends, given as a rate or as a share of the highest one."""
    options = draft.section("lr_scheduler_kwargs")
    ratio = options.pop("min_lr_rate", draft.take("cosine_min_lr_ratio"))
    options.pop("min_lr", None)
    lowest = draft.number("lr_scheduler_kwargs.min_lr")
    rate = draft.take("learning_rate")
    if rate is not None:
        draft.put("optimizer.lr", rate, "learning_rate")
    rate = draft.effective("optimizer.lr")
    if ratio is None and lowest is not None and isinstance(rate, float) and rate > 0:
        ratio = lowest / rate
    if ratio is not None:
        draft.put("scheduler.min_lr_ratio", ratio, "lr_scheduler_kwargs")
    for name in options:
        draft.lose(f"lr_scheduler_kwargs.{name}", "scheduler.kwargs takes the arguments of an import path's class")


def convert_validation(draft: Draft) -> None:
    """Write how often validation runs: `eval_steps` counts if the strategy is steps, or not given."""
    strategy, every = draft.take("eval_strategy", "evaluation_strategy"), draft.number("eval_steps")
    if strategy == "epoch" and not draft.has("data.val"):
        return
    if strategy == "epoch":
        source = "eval_strategy" if "eval_strategy" in draft.file else "evaluation_strategy"
        draft.lose(source, "train.validate_every counts steps; a run validates at the end in any case")
    elif every is not None and strategy not in ("no", False):
        if isinstance(every, float) and 0 < every < 1:
            steps = draft.values.get("train.steps")
            if steps is None:
                draft.lose("eval_steps", "train.validate_every counts steps; the file gives a share of them")
            else:
                draft.put("train.validate_every", math.ceil(steps * every), "eval_steps")
        elif every:
            draft.put("train.validate_every", every, "eval_steps")


def convert_saving(draft: Draft) -> None:
    """Write whether a run saves; `save_steps` has a name of its own here."""
    strategy = draft.take("save_strategy")
    if strategy in ("no", False):
        draft.take("save_steps")
        draft.put("checkpoint.every", None, "save_strategy")


def convert_held_out_rows(draft: Draft, *names: str) -> None:
    """Write a validation set that is split off the training rows.

    The value is a share below 1, a number of rows above, or 0 for no validation.
    """
    value = draft.number(*names)
    source = next((name for name in names if name in draft.file), names[0])
    if not value:
        return
    if draft.has("data.val"):
        draft.lose(source, "data.val names a set already")
    else:
        draft.put("data.val", value if value < 1 else int(value), source)


def convert_rewards(draft: Draft, prefix: str = "") -> None:
    """Write GRPO's reward functions and their weights. `prefix`: what stands before their keys."""
    functions = listed(draft.take(f"{prefix}reward_funcs"))
    weights = [number_of(weight) for weight in listed(draft.take(f"{prefix}reward_weights"))]
    if None in weights:
        draft.lose(f"{prefix}reward_weights", "some of its entries are no numbers")
    rewards = []
    for index, function in enumerate(functions):
        known = key_aliases.meant("grpo.rewards.fn", function) or str(function)
        reward: dict[str, Any] = {"fn": known.partition(",")[0]}
        if index < len(weights) and weights[index] not in (None, 1):
            reward["weight"] = float(weights[index])
        rewards.append(reward)
    if rewards:
        draft.put("grpo.rewards", rewards, f"{prefix}reward_funcs")


def convert_clip(draft: Draft, prefix: str = "") -> None:
    """Write GRPO's clip: `epsilon` counts above 1 too, unless `epsilon_high` is given."""
    low, high = draft.take(f"{prefix}epsilon"), draft.take(f"{prefix}epsilon_high")
    if low is None and high is None:
        return
    low = 0.2 if low is None else low
    draft.put("grpo.clip", [low, low if high is None else high], f"{prefix}epsilon")


def convert_rollout_size(draft: Draft, prefix: str = "") -> None:
    """Write the prompts of a rollout: the completions of a rollout, divided by those of a prompt.

    By default a rollout has the completions of one optimizer step.
    """
    group = draft.effective("grpo.group_size")
    batch = draft.effective("train.global_batch")
    steps = draft.number(f"{prefix}steps_per_generation", "steps_per_generation")
    completions = draft.number(f"{prefix}generation_batch_size", "generation_batch_size")
    if completions is None:
        completions = draft.effective("train.micro_batch") * steps if steps else batch
    if group < 1 or completions % group:
        draft.lose(
            f"{prefix}num_generations",
            f"grpo.prompts_per_step: a rollout's {completions} completions are no multiple of {group}",
            "grpo.prompts_per_step",
        )
    else:
        comment = f"{completions} completions of a rollout, {group} for a prompt"
        draft.set("grpo.prompts_per_step", completions // group, comment)


def convert_moving_reference(draft: Draft, *, every: int, mix: float, prefix: str = "") -> None:
    """Write a reference that moves towards the policy; `every` and `mix` are the tool's defaults."""
    names = ("sync_ref_model", "ref_model_sync_steps", "ref_model_mixup_alpha")
    is_moving, steps, alpha = (draft.take(f"{prefix}{name}") for name in names)
    if is_moving:
        draft.put(f"{draft.method}.sync_every", steps or every, f"{prefix}sync_ref_model")
        draft.put(f"{draft.method}.sync_mix", alpha or mix, f"{prefix}sync_ref_model")


def put_bfloat16_weights(draft: Draft, comment: str) -> None:
    """Write that trained weights have no float32 copy, if dtrain's optimizer can do without one."""
    name = draft.effective("optimizer.name", "adamw")
    if name in ("adamw", "adam", "muon"):
        draft.set("train.masters", "bfloat16", comment)
        draft.note(BFLOAT16_ROUNDING)
    else:
        draft.note(f"{comment}; here optimizer.name={name} has float32 weights")


def drop_adapter_keys(draft: Draft) -> None:
    """Remove the keys of an adapter from the recipe of a file that trains none."""
    unread = [key for key in draft.values if key.startswith("lora.") and key != "lora.path"]
    for key in unread:
        draft.remove(key)
    if unread and draft.tool:
        draft.note(f"not carried over: {', '.join(unread)}, which {draft.tool.name} reads with an adapter only")
