"""Files of NeMo Automodel.

Compared with nemo_automodel/components (training, optim, _peft, datasets) and nemo_automodel/recipes/llm of Automodel
0.7. An object is named by `_target_`, and its arguments are the other keys of the same section.
"""

import fnmatch
from typing import Any

from dtrain.recipe.other_tools.draft import Dataset, Draft, Tool, put_chat_template, put_datasets, set_split
from dtrain.recipe.other_tools.hugging_face import put_bfloat16_weights

DEFAULTS: dict[str, Any] = {
    "run.seed": 42,
    "data.packing": False,
    "train.epochs": 10,
    "train.global_batch": 32,
    "train.micro_batch": 1,
    "train.max_grad_norm": 1.0,
    "optimizer.lr": 1e-3,
    "optimizer.betas": [0.9, 0.999],
    "optimizer.weight_decay": 0.01,
    "scheduler.name": "constant",
    "scheduler.warmup": 0,
}
LORA_DEFAULTS: dict[str, Any] = {"lora.rank": 8, "lora.alpha": 32, "lora.dropout": 0.0, "lora.target": ".*_proj"}

RENAMED = {
    "model.pretrained_model_name_or_path": "model.path",
    "step_scheduler.global_batch_size": "train.global_batch",
    "step_scheduler.local_batch_size": "train.micro_batch",
    "step_scheduler.ckpt_every_steps": "checkpoint.every",
    "step_scheduler.val_every_steps": "train.validate_every",
    "rng.seed": "run.seed",
    "seed": "run.seed",
    "optimizer._target_": "optimizer.name",
    "optimizer.lr": "optimizer.lr",
    "optimizer.betas": "optimizer.betas",
    "optimizer.eps": "optimizer.eps",
    "optimizer.weight_decay": "optimizer.weight_decay",
    "clip_grad_norm.max_norm": "train.max_grad_norm",
    "dataloader.shuffle": "data.shuffle",
    "distributed.tp_size": "parallel.tp",
    "distributed.cp_size": "parallel.cp",
    "distributed.ep_size": "parallel.ep",
    "distributed.dp_replicate_size": "parallel.dp_replicate",
    "distributed.sequence_parallel": "parallel.sequence_parallel",
    "distributed.activation_checkpointing": "train.activation_checkpointing",
    "compile.enabled": "train.compile",
    "wandb.project": "metrics.wandb",
    "wandb.name": "run.name",
}
LORA_RENAMED = {
    "peft.dim": "lora.rank",
    "peft.alpha": "lora.alpha",
    "peft.dropout": "lora.dropout",
    "peft.use_dora": "lora.dora",
}
NEEDLESS = (
    "recipe",
    "ci.",
    "model._target_",
    "model.backend.",
    "model.trust_remote_code",
    "model.attn_implementation",
    "model.use_liger_kernel",
    "model.use_sdpa_patching",
    "model.output_hidden_states",
    "teacher_model.",
    "step_scheduler.",
    "dist_env.",
    "rng.",
    "compile.",
    "distributed.",
    "distributed_config.",
    "checkpoint.",
    "loss_fn.",
    "kd_loss_fn.",
    "dataloader.",
    "validation_dataloader.",
    "packed_sequence.",
    "optimizer.fused",
    "optimizer.foreach",
    "wandb.",
    "mlflow.",
    "comet.",
    "benchmark.",
    "profiling.",
    "tokenizer._target_",
    "tokenizer.pretrained_model_name_or_path",
    "peft._target_",
    "peft.match_all_linear",
    "peft.use_triton",
    "peft.use_memory_efficient_lora",
    "peft.lora_dtype",
    "lr_scheduler.",
)
# Data sets whose rows dtrain can read, by the last part of their `_target_`.
DATASETS = ("ChatDataset", "ColumnMappedTextInstructionDataset")


def convert(draft: Draft) -> None:
    """Write the content of a file of NeMo Automodel to the draft."""
    draft.set_defaults(DEFAULTS)
    for key, value in draft.file.items():
        if key.startswith("distributed.") and value == "none":
            draft.file[key] = None  # Automodel's word for the default
    _convert_distillation(draft)
    draft.method = str(draft.values.get("method", "sft"))
    has_adapter = draft.take("peft._target_") is not None
    if str(draft.file.get("optimizer._target_")).endswith(".Adam"):
        draft.defaults["optimizer.weight_decay"] = 0.0
    draft.rename(RENAMED)
    if str(draft.file.get("model._target_")).endswith("from_config"):
        draft.rename({"model.config.pretrained_model_name_or_path": "model.path"})
        draft.ignore("model.config._target_")
        if not draft.take("model.load_base_model"):
            draft.put("model.init", "scratch", "model._target_")
    _convert_length(draft)
    _convert_data(draft)
    if has_adapter:
        _convert_adapter(draft)
    else:
        draft.ignore("peft.")
    _convert_weights(draft)
    if any(key.startswith("lr_scheduler.") for key in draft.file):
        _convert_schedule(draft)
    if draft.take("distributed.pp_size") not in (None, 1, "none"):
        draft.lose("distributed.pp_size", "dtrain has no pipeline parallelism")
    draft.ignore(*NEEDLESS)


def _convert_distillation(draft: Draft) -> None:
    teacher = draft.take("teacher_model.pretrained_model_name_or_path")
    if teacher is None:
        return
    draft.put("method", "distill", "teacher_model.pretrained_model_name_or_path")
    draft.put("distill.teacher", teacher, "teacher_model.pretrained_model_name_or_path")
    draft.put("distill.samples", "data", "teacher_model.pretrained_model_name_or_path")
    draft.put("distill.kl", "forward", "kd_loss_fn._target_")
    if draft.take("kd_ratio", default=0.5) != 1:
        draft.lose("kd_ratio", "distillation has no term of cross-entropy here")
    if draft.take("kd_loss_fn.temperature", default=1.0) != 1:
        draft.lose("kd_loss_fn.temperature", "distill.temperature multiplies the loss by its square too")


def _convert_length(draft: Draft) -> None:
    steps = draft.take_int("step_scheduler.max_steps", default=None, minimum=1)
    epochs = draft.take("step_scheduler.num_epochs")
    if steps is not None:
        draft.put("train.steps", steps, "step_scheduler.max_steps")
        draft.defaults.pop("train.epochs")
        if epochs is not None:
            draft.note("a run ends there at the steps or at the epochs, whichever is first; here train.steps counts")
    elif epochs is not None:
        draft.put("train.epochs", epochs, "step_scheduler.num_epochs")


def _convert_data(draft: Draft) -> None:
    for section, source in (("data.train", "dataset"), ("data.val", "validation_dataset")):
        dataset = _dataset(draft, section, source)
        if dataset is not None:
            put_datasets(draft, section, [dataset], source)
    packed_length = draft.take("packed_sequence.packed_sequence_size")
    if packed_length:
        draft.put("data.packing", True, "packed_sequence.packed_sequence_size")
        draft.set("data.max_length", packed_length, "packed_sequence.packed_sequence_size")


def _dataset(draft: Draft, section: str, source: str) -> Dataset | None:
    """Return the data set at a key, if dtrain reads its rows."""
    put_chat_template(draft, f"{source}.chat_template")
    arguments = draft.section(source)
    if not arguments:
        return None
    target = str(arguments.get("_target_", DATASETS[0]))
    path = arguments.get("path_or_dataset_id")
    if target.rpartition(".")[2] not in DATASETS or path is None:
        draft.lose(f"{source}._target_", f"{target} reads rows in a way of its own; write them as messages")
        return None
    dataset = Dataset(path, subset=arguments.get("name"))
    set_split(draft, dataset, section, arguments.get("split"), f"{source}.split")
    mapping = {}
    for key, value in arguments.items():
        if key.startswith("column_mapping."):
            mapping[key.removeprefix("column_mapping.")] = str(value)
    if mapping:
        # Automodel writes a context in front of the question. dtrain's format alpaca has both: instruction and input.
        has_context = "context" in mapping
        dataset.format = "alpaca" if has_context else "prompt_completion"
        names = {"question": "instruction" if has_context else "prompt", "context": "input"}
        names["answer"] = "output" if has_context else "completion"
        dataset.columns = {names[part]: column for part, column in mapping.items() if part in names}
        if has_context or arguments.get("use_hf_chat_template"):
            draft.put("data.prompts_as", "user", f"{source}.column_mapping")
        if arguments.get("answer_only_loss_mask") is False:
            draft.put("data.loss_on", "all", f"{source}.answer_only_loss_mask")
        elif not has_context:
            draft.put("data.loss_on", "completion", f"{source}.answer_only_loss_mask")
    if arguments.get("seq_length") is not None:
        draft.put("data.max_length", arguments["seq_length"], f"{source}.seq_length")
    if arguments.get("mask_history"):
        draft.put("data.loss_on", "last", f"{source}.mask_history")
    for name in ("limit_dataset_samples", "mask_reasoning_content", "num_samples_limit"):
        if arguments.get(name):
            draft.lose(f"{source}.{name}", "dtrain has no key for it")
    return dataset


def _convert_adapter(draft: Draft) -> None:
    """Write the keys of `peft` and `quantization`."""
    draft.set_defaults(LORA_DEFAULTS)
    draft.rename(LORA_RENAMED)
    targets = [str(name) for name in draft.take_list("peft.target_modules")]
    excluded = [str(name) for name in draft.take_list("peft.exclude_modules")]
    if draft.take_flag("peft.match_all_linear", default=False):
        draft.put("lora.target", "all-linear", "peft.match_all_linear")
        draft.note("match_all_linear gives the head an adapter too there; all-linear does not")
    elif targets:
        draft.put("lora.target", _module_names(targets), "peft.target_modules")
    elif excluded:
        draft.put("lora.target", "all-linear", "peft.exclude_modules")
        draft.put("lora.exclude", _module_names(excluded), "peft.exclude_modules")
    if draft.take("quantization.load_in_4bit"):
        draft.put("lora.quantize", "nf4", "quantization.load_in_4bit")
        draft.ignore("quantization.")
    if draft.take("peft.moe_rank_scaling"):
        draft.lose("peft.moe_rank_scaling", "write ranks of experts in lora.rank_pattern")
    draft.note(
        "Automodel initialises A by Xavier and applies dropout behind the adapter; here A is initialised as in PEFT, "
        "and dropout is applied to the adapter's inputs"
    )


def _module_names(patterns: list[str]) -> str | list[str]:
    """Translate names of modules, some of which may be patterns such as `*_proj`, to a value of `lora.target`.

    A list without patterns stays a list. With a pattern, all entries become one regular expression for full names.
    """
    if not any("*" in pattern or "?" in pattern for pattern in patterns):
        return patterns
    translated = []
    for pattern in patterns:
        is_plain = "*" not in pattern and "?" not in pattern
        expression = fnmatch.translate(pattern).removeprefix("(?s:").removesuffix(r")\Z").removesuffix(r")\z")
        translated.append(rf"(.*\.)?{expression}" if is_plain else expression)
    return translated[0] if len(translated) == 1 else "|".join(f"({expression})" for expression in translated)


def _convert_weights(draft: Draft) -> None:
    """Write the dtype of trained weights and adapters. Automodel loads and trains them in `model.torch_dtype`."""
    given = draft.take("model.torch_dtype", "model.dtype", default="auto")
    dtype = str(given).removeprefix("torch.")
    if dtype in ("fp32", "float32"):
        return
    if dtype not in ("bf16", "bfloat16", "auto"):
        draft.lose("model.torch_dtype", f"{dtype} is no type of trained weights here")
        return
    draft.put("train.dtype", "bfloat16", "model.torch_dtype")
    comment = "Automodel trains weights in model.torch_dtype, without a float32 copy"
    if dtype == "auto":
        comment = "Automodel trains weights in the type of the model's files, which is bfloat16 for most"
    put_bfloat16_weights(draft, comment)


def _convert_schedule(draft: Draft) -> None:
    """Write the schedule: a warm-up from a tenth of the learning rate, then a decay to a hundredth of it."""
    given = draft.section("lr_scheduler")
    rate = draft.effective("optimizer.lr")
    steps = draft.values.get("train.steps")
    warmup = draft.take_int("lr_scheduler.lr_warmup_steps", default=None, minimum=0)
    lowest = _share_of_rate(draft, "lr_scheduler.min_lr", rate, default=0.01)
    start = _share_of_rate(draft, "lr_scheduler.init_lr", rate, default=0.1)
    style = str(given.get("lr_decay_style", "cosine")).lower()
    if warmup is None and steps is not None:
        warmup = min(1000, steps // 10)
    if style not in ("cosine", "linear", "constant"):
        draft.lose("lr_scheduler.lr_decay_style", f"dtrain's schedules are no {style}", "scheduler.name")
        return
    if warmup is None:
        # A stage needs its number of steps, which depends on the data. This is the nearest schedule without it.
        draft.put("scheduler.name", style, "lr_scheduler.lr_decay_style")
        draft.set("scheduler.warmup", 0.1, "Automodel's is a tenth of the steps too, and at most 1000 steps")
        draft.set("scheduler.min_lr_ratio", lowest)
        draft.note("Automodel's warm-up begins at a tenth of the rate, here at 0; with train.steps it is the same")
        return
    if given.get("lr_decay_steps") not in (None, steps):
        draft.lose("lr_scheduler.lr_decay_steps", "a schedule falls until the last step here")
    decay: dict[str, Any] = {"name": style}
    if style != "constant":
        decay["min_lr_ratio"] = lowest
    stages = [decay]
    if warmup:
        warmup_kwargs = {"start_factor": start, "total_iters": warmup}
        stages.insert(0, {"name": "torch.optim.lr_scheduler.LinearLR", "steps": warmup, "kwargs": warmup_kwargs})
    draft.set("scheduler", stages, "Automodel warms up from a tenth of the rate and falls to a hundredth")


def _share_of_rate(draft: Draft, source: str, rate: float, default: float) -> float:
    """Return a learning rate of the file as a share of `rate`, the highest one."""
    value = draft.take_number(source, default=None)
    if value is None or rate <= 0:
        return default
    return value / rate


AUTOMODEL = Tool(
    "Automodel", "0.7", (r"model\.pretrained_model_name_or_path", r"step_scheduler\..*"), convert, counts_all_gpus=True
)
