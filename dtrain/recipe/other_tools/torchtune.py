"""Files of torchtune.

Compared with torchtune/training, torchtune/models, torchtune/datasets and recipes/*.py of torchtune 0.6.1. A component
is an object that the file names by `_component_`. The other keys of its section are arguments of its builder.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from dtrain.recipe.other_tools.draft import (
    FILE_READERS,
    Dataset,
    Draft,
    Tool,
    lose_alpaca_prompts,
    put_datasets,
    set_split,
)
from dtrain.recipe.other_tools.hugging_face import put_bfloat16_weights

DEFAULTS: dict[str, Any] = {
    "data.packing": False,
    "train.max_grad_norm": None,
    "optimizer.lr": 1e-3,
    "optimizer.betas": [0.9, 0.999],
    "optimizer.weight_decay": 0.01,
    "scheduler.name": "constant",
    "scheduler.warmup": 0,
    "scheduler.min_lr_ratio": 0.0,
}
LORA_DEFAULTS: dict[str, Any] = {"lora.rank": 8, "lora.alpha": 16, "lora.dropout": 0.0}
METHOD_DEFAULTS: dict[str, dict[str, Any]] = {"dpo": {"dpo.beta": 0.1}}

# Keys of torchtune's recipe for GRPO. Its batch counts prompts. Each step samples new completions of them.
GRPO_RENAMED = {
    "batch_size": "grpo.prompts_per_step",
    "grpo_samples": "grpo.group_size",
    "forward_batch_size": "train.micro_batch",
    "num_steps": "train.steps",
    "ppo_epochs": "grpo.updates_per_rollout",
    "max_generated_tokens": "grpo.sampling.max_new_tokens",
    "temperature": "grpo.sampling.temperature",
    "top_k": "grpo.sampling.top_k",
    "loss.kl_coeff": "grpo.beta",
    "ref_checkpointer.checkpoint_dir": "grpo.reference",
}

RENAMED = {
    "checkpointer.checkpoint_dir": "model.path",
    "tokenizer.max_seq_len": "data.max_length",
    "ref_checkpointer.checkpoint_dir": "dpo.reference",
    "teacher_checkpointer.checkpoint_dir": "distill.teacher",
    "seed": "run.seed",
    "shuffle": "data.shuffle",
    "batch_size": "train.micro_batch",
    "dtype": "train.dtype",
    "device": "launch.device",
    "compile": "train.compile",
    "clip_grad_norm": "train.max_grad_norm",
    "enable_activation_checkpointing": "train.activation_checkpointing",
    "enable_activation_offloading": "train.activation_offload",
    "fsdp_cpu_offload": "parallel.cpu_offload",
    "tensor_parallel_dim": "parallel.tp",
    "context_parallel_dim": "parallel.cp",
    "data_parallel_shard_dim": "parallel.dp_shard",
    "data_parallel_replicate_dim": "parallel.dp_replicate",
    "run_val_every_n_steps": "train.validate_every",
    "log_every_n_steps": "metrics.every",
    "metric_logger.project": "metrics.wandb",
    "optimizer.lr": "optimizer.lr",
    "optimizer.betas": "optimizer.betas",
    "optimizer.eps": "optimizer.eps",
    "optimizer.weight_decay": "optimizer.weight_decay",
    "lr_scheduler.num_warmup_steps": "scheduler.warmup_steps",
    "loss.label_smoothing": "dpo.label_smoothing",
}
LORA_RENAMED = {
    "model.lora_rank": "lora.rank",
    "model.lora_alpha": "lora.alpha",
    "model.lora_dropout": "lora.dropout",
    "model.use_dora": "lora.dora",
}
NEEDLESS = (
    "output_dir",
    "checkpointer.",
    "ref_checkpointer.",
    "teacher_checkpointer.",
    "teacher_model.",
    "tokenizer._component_",
    "tokenizer.path",
    "tokenizer.merges_file",
    "tokenizer.merges_path",
    "tokenizer.vocab_path",
    "collate_fn",
    "metric_logger.",
    "profiler.",
    "log_peak_memory_stats",
    "log_level",
    "save_adapter_weights_only",
    "resume_from_checkpoint",
    "optimizer.fused",
    "optimizer_in_bwd",
    "batch_size_val",
    "loss.num_output_chunks",
    "kd_loss.num_output_chunks",
    "custom_sharded_layers",
    "fsdp_reshard_after_forward",
    "tensor_parallel_plan.",
    "cudnn_deterministic_mode",
    "model.quantize_base",
)

LAYERS = {"output_proj": "o_proj", "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
MLP = ["gate_proj", "up_proj", "down_proj"]

# Losses by the end of their component's name, and the recipe's keys that they set.
LOSSES: dict[str, dict[str, Any]] = {
    "DPOLoss": {"method": "dpo"},
    "RSOLoss": {"method": "dpo", "dpo.loss": "hinge"},
    "CrossEntropyLoss": {},
    "CEWithChunkedOutputLoss": {},
    "PPOLoss": {"method": "ppo"},  # refused by dtrain, instead of training otherwise
    "GRPOSimpleLoss": {"method": "grpo", "grpo.loss": "grpo"},
    "GRPOLoss": {"method": "grpo", "grpo.loss": "grpo"},
    "GRPOCompletionLoss": {"method": "grpo", "grpo.loss": "grpo"},
}
# Data sets by the last part of their component's name: where the rows are, their format, and whether the loss
# includes prompts (the default of `train_on_input`).
DATASETS: dict[str, dict[str, Any]] = {
    "alpaca_dataset": {"path": "tatsu-lab/alpaca", "format": "alpaca", "trains_prompts": True},
    "alpaca_cleaned_dataset": {"path": "yahma/alpaca-cleaned", "format": "alpaca", "trains_prompts": True},
    "slimorca_dataset": {"path": "Open-Orca/SlimOrca-Dedup", "format": "sharegpt"},
    "chat_dataset": {},
    "instruct_dataset": {"format": "prompt_completion"},
    "preference_dataset": {},
    "text_completion_dataset": {"format": "text", "trains_prompts": True},
}


def convert(draft: Draft) -> None:
    """Write the content of a file of torchtune to the draft."""
    draft.set_defaults(DEFAULTS)
    _convert_losses(draft)
    draft.method = str(draft.values.get("method", "sft"))
    draft.set_defaults(METHOD_DEFAULTS.get(draft.method, {}))
    _convert_model(draft)
    _convert_data(draft)
    _convert_optimizer(draft)
    if draft.method == "grpo":
        _convert_grpo(draft)
    draft.rename(RENAMED)
    if draft.method != "grpo":
        _convert_batch(draft)
    draft.ignore(*NEEDLESS)
    if not draft.given("seed"):
        draft.note("seed: null draws a seed there; run.seed is 0 here")
    if not draft.given("tokenizer.max_seq_len") and not draft.has("data.max_length"):
        draft.note("tokenizer.max_seq_len: null cuts no row there; data.max_length cuts at 4096 here")
    if draft.values.get("train.dtype") == "bfloat16":
        put_bfloat16_weights(draft, "torchtune trains weights in dtype, without a float32 copy")


def _convert_losses(draft: Draft) -> None:
    """Write the method and the loss, which the component of `loss` or `kd_loss` shows."""
    loss = draft.take("loss._component_")
    if loss is not None:
        ending = str(loss).rpartition(".")[2]
        settings = next((LOSSES[name] for name in LOSSES if ending.endswith(name)), None)
        if settings is None:
            draft.lose("loss._component_", f"dtrain has no key for the loss {loss}")
        else:
            for key, value in settings.items():
                draft.set(key, value)
    beta = draft.take("loss.beta", "loss.gamma")
    if beta is not None and draft.values.get("method") == "dpo":
        draft.put("dpo.beta", beta, "loss.beta")
    distilling = draft.take("kd_loss._component_")
    if distilling is not None:
        draft.put("method", "distill", "kd_loss._component_")
        draft.put("distill.samples", "data", "kd_loss._component_")
        kind = "reverse" if "Reverse" in str(distilling) else "forward"
        draft.put("distill.kl", kind, "kd_loss._component_")
        if "Symmetric" in str(distilling):
            draft.lose("kd_loss._component_", "distill.kl=mixed comes close to it")
        if draft.take("kd_ratio", default=0.5) != 1:
            draft.lose("kd_ratio", "distillation has no term of cross-entropy here")


def _convert_model(draft: Draft) -> None:
    """Write the adapter, which the name of the model's builder shows."""
    builder = str(draft.take("model._component_", default=""))
    arguments = draft.section("model")
    if not re.search(r"\.q?(lora|dora)_", builder):
        return
    draft.set_defaults(LORA_DEFAULTS)
    draft.rename(LORA_RENAMED)
    if re.search(r"\.q(lora|dora)_", builder) or arguments.get("quantize_base"):
        draft.set("lora.quantize", "nf4", f"{builder.rpartition('.')[2]} of {draft.version}")
    if re.search(r"\.q?dora_", builder):
        draft.set("lora.dora", True, f"{builder.rpartition('.')[2]} of {draft.version}")
    layers = [LAYERS.get(str(layer), str(layer)) for layer in draft.take_list("model.lora_attn_modules")]
    if arguments.get("apply_lora_to_mlp"):
        layers += MLP
    if layers:
        draft.put("lora.target", layers, "model.lora_attn_modules")
    if arguments.get("apply_lora_to_output"):
        draft.lose("model.apply_lora_to_output", "the head gets no adapter; lora.modules_to_save=[lm_head] trains it")


def _convert_optimizer(draft: Draft) -> None:
    name = draft.take("optimizer._component_")
    if name is not None:
        draft.put("optimizer.name", name, "optimizer._component_")
        if str(name).endswith((".Adam", ".SGD")):
            draft.defaults["optimizer.weight_decay"] = 0.0
    schedule = draft.take("lr_scheduler._component_")
    # The component is in torchtune.training.lr_schedulers, and before 0.4 it was in torchtune.modules.
    if schedule is not None and str(schedule).endswith("get_cosine_schedule_with_warmup"):
        draft.put("scheduler.name", "cosine", "lr_scheduler._component_")
    elif schedule is not None:
        draft.put("scheduler.name", schedule, "lr_scheduler._component_")
    if draft.take("lr_scheduler.num_cycles") not in (None, 0.5):
        draft.lose("lr_scheduler.num_cycles", "a cosine falls once here", "scheduler.name")
    if draft.given("lr_scheduler.num_warmup_steps"):
        draft.defaults.pop("scheduler.warmup")


def _convert_data(draft: Draft) -> None:
    train = _datasets(draft, "data.train", "dataset")
    put_datasets(draft, "data.train", [entry.dataset for entry in train], "dataset")
    if train:
        trains_prompts = {entry.trains_prompts for entry in train}
        if len(trains_prompts) > 1:
            draft.lose("dataset.train_on_input", "data.loss_on counts for all data sets", "data.loss_on")
        elif trains_prompts == {True} and draft.method == "sft":
            draft.set("data.loss_on", "all", "train_on_input, by default or as the file says")
    validation = _datasets(draft, "data.val", "dataset_val")
    put_datasets(draft, "data.val", [entry.dataset for entry in validation], "dataset_val")


class TuneDataset(NamedTuple):
    """A data set of torchtune.

    Attributes:
        dataset: Its files, format and columns.
        trains_prompts: Whether the loss includes the tokens of prompts.
    """

    dataset: Dataset
    trains_prompts: bool


def _datasets(draft: Draft, section: str, source: str) -> list[TuneDataset]:
    """Return the data sets at `dataset` or `dataset_val`."""
    if isinstance(draft.take(source), list):
        entries = draft.take_entries(source)
    else:
        arguments = draft.section(source)
        entries = [arguments] if arguments else []
    found = []
    for entry in entries:
        dataset = _dataset(draft, entry, section, source)
        if dataset is not None:
            found.append(dataset)
    return found


def _dataset(draft: Draft, arguments: Mapping[str, Any], section: str, source: str) -> TuneDataset | None:
    """Return a data set by its component and arguments. A component that is not in DATASETS is listed as lost."""
    component = str(arguments.get("_component_"))
    dataset_type = DATASETS.get(component.rpartition(".")[2])
    if dataset_type is None:
        draft.lose(f"{source}._component_", f"{component} reads rows in its own way; write them as messages")
        return None
    path = arguments.get("data_files") or arguments.get("source") or dataset_type.get("path")
    if path is None or (isinstance(path, str) and path in FILE_READERS):
        draft.lose(f"{source}.source", "no file or data set is named")
        return None
    dataset = Dataset(path, format=dataset_type.get("format"), subset=arguments.get("name"))
    set_split(draft, dataset, section, arguments.get("split"), f"{source}.split")
    if dataset.format == "alpaca":
        lose_alpaca_prompts(draft, f"{source}._component_")
    style, column = arguments.get("conversation_style"), arguments.get("conversation_column")
    if style in ("sharegpt", "openai"):
        dataset.format = "sharegpt" if style == "sharegpt" else "messages"
    default_column = "conversations" if dataset.format == "sharegpt" else "messages"
    if column not in (None, default_column):
        dataset.columns[default_column] = str(column)
    if arguments.get("column") not in (None, "text"):
        dataset.columns["text"] = str(arguments["column"])
    column_map = _column_map(draft, arguments, source)
    if dataset.format == "prompt_completion":
        # torchtune calls these columns input and output
        dataset.columns["prompt"] = column_map.get("input", "input")
        dataset.columns["completion"] = column_map.get("output", "output")
    else:
        for name, file_column in column_map.items():
            if name != file_column:
                dataset.columns[name] = file_column
    if arguments.get("packed"):
        draft.put("data.packing", True, f"{source}.packed")
    elif "packed" in arguments and source == "dataset":
        draft.put("data.packing", False, f"{source}.packed")
    if arguments.get("new_system_prompt"):
        draft.lose(f"{source}.new_system_prompt", "write the system message into the rows")
    if arguments.get("max_seq_len") is not None:
        draft.put("data.max_length", arguments["max_seq_len"], f"{source}.max_seq_len")
    trains_prompts = bool(arguments.get("train_on_input", dataset_type.get("trains_prompts", False)))
    return TuneDataset(dataset, trains_prompts)


def _column_map(draft: Draft, arguments: Mapping[str, Any], source: str) -> dict[str, str]:
    """Return torchtune's names of columns and the file's. In a list of data sets the mapping is not flattened."""
    found = {}
    for key, value in arguments.items():
        if key.startswith("column_map."):
            found[key.removeprefix("column_map.")] = str(value)
    nested_map = arguments.get("column_map")
    if isinstance(nested_map, Mapping):
        for key, value in nested_map.items():
            found[str(key)] = str(value)
    elif nested_map:
        draft.lose(f"{source}.column_map", f"{nested_map} is not a mapping. Write one such as {{input: question}}")
    return found


def _convert_batch(draft: Draft) -> None:
    """Write the batch of one GPU, and the steps if the file limits those of an epoch."""
    micro_batch = draft.values.get("train.micro_batch", 1)
    if micro_batch == "auto":
        micro_batch = 1
    accumulation = draft.take_int("gradient_accumulation_steps", default=1, minimum=1)
    draft.put("train.global_batch", micro_batch * accumulation, "gradient_accumulation_steps")
    epochs = draft.take_int("epochs", default=1)
    steps_per_epoch = draft.take_int("max_steps_per_epoch", default=None)
    if steps_per_epoch:
        draft.put("train.steps", steps_per_epoch * epochs, "max_steps_per_epoch")
    else:
        draft.put("train.epochs", epochs, "epochs")


def _convert_grpo(draft: Draft) -> None:
    """Write the sizes and the loss of GRPO: one optimizer step takes all completions of its prompts."""
    draft.rename(GRPO_RENAMED)
    epsilon = draft.take_number("loss.epsilon", default=None)
    if epsilon is not None:
        draft.put("grpo.clip", [epsilon, epsilon], "loss.epsilon")
    prompts, group = draft.values.get("grpo.prompts_per_step", 1), draft.values.get("grpo.group_size", 1)
    draft.set("train.global_batch", prompts * group, "the completions of a rollout")
    if not draft.has("train.steps"):
        draft.rename({"epochs": "train.epochs"})
    draft.ignore("epochs", "max_steps_per_epoch", "gradient_accumulation_steps")
    if draft.take("reward_functions") is not None:
        draft.lose("reward_functions", "name functions in grpo.rewards")
    draft.note("torchtune's recipe judges answers itself; here grpo.rewards names what judges them")


TORCHTUNE = Tool("torchtune", "0.6.1", (r"(.*\.)?_component_",), convert)
