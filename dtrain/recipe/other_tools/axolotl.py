"""Files of axolotl.

Compared with axolotl/utils/schemas, axolotl/core/builders, axolotl/utils/config and axolotl/prompters.py of axolotl
0.19. axolotl trains with TRL's and transformers' trainers, and uses their defaults for settings without its own.
"""

from collections.abc import Mapping
from typing import Any

from dtrain.recipe.other_tools import hugging_face, trl
from dtrain.recipe.other_tools.draft import (
    FILE_READERS,
    Dataset,
    Draft,
    Tool,
    as_list,
    lose_alpaca_prompts,
    put_chat_template,
    put_datasets,
    set_split,
)

DEFAULTS: dict[str, Any] = {
    "data.max_length": 512,
    "data.packing": False,
    "data.too_long": "drop",
    "data.shuffle": True,
    "train.epochs": 1,
    "train.micro_batch": 1,
    "train.dtype": "bfloat16",
    "train.activation_checkpointing": "none",
    "scheduler.name": "cosine",
    "scheduler.warmup": 0.03,
}
LORA_DEFAULTS: dict[str, Any] = {"lora.dropout": 0.0}
METHOD_DEFAULTS: dict[str, dict[str, Any]] = {
    "sft": {"data.loss_on": "assistant"},
    "dpo": {"dpo.beta": 0.1, "dpo.loss": "sigmoid"},
    "kto": {"kto.beta": 0.1},
    "grpo": {"grpo.group_size": 8, "grpo.loss": "dapo", "grpo.beta": 0.0, "grpo.sampling.max_new_tokens": 512},
}
REQUIRED = {
    "lora.rank": "axolotl has no rank of its own: write lora.rank",
    "lora.alpha": "axolotl has no alpha of its own: write lora.alpha",
    "lora.target": "axolotl has no layers of its own: write lora.target",
    "optimizer.lr": "axolotl has no learning rate of its own: write optimizer.lr",
}
"""Keys without a default in axolotl, and the note for a file that does not set them."""

RENAMED = {
    "base_model": "model.path",
    "batch_size": "train.global_batch",
    "optimizer": "optimizer.name",
    "sequence_len": "data.max_length",
    "simpo_gamma": "dpo.kwargs.simpo_gamma",
}
# Names for experiment trackers, caches, kernels and parallelism that change no number.
NEEDLESS = (
    "wandb_watch",
    "wandb_entity",
    "wandb_mode",
    "wandb_log_model",
    "wandb_run_id",
    "dataset_prepared_path",
    "fsdp_version",
    "fsdp",
    "fsdp_config.",
    "deepspeed",
    "strict",
    "tokenizer_use_mistral_common",
    "saves_per_epoch",
    "evals_per_epoch",
    "special_tokens.pad_token",
    "experimental_skip_move_to_device",
    "torchdistx_path",
    "xformers_attention",
    "flex_attention",
    "flex_attn_compile_kwargs.",
    "liger_rms_norm_gated",
    "fused_attn_kernel",
    "rl",
    "chat_template_jinja",
)
HARMLESS_PLUGINS = ("liger", "cut_cross_entropy", "integrations.kernels")

GRPO = {
    "num_generations": "grpo.group_size",
    "num_iterations": "grpo.updates_per_rollout",
    "max_completion_length": "grpo.sampling.max_new_tokens",
    "temperature": "grpo.sampling.temperature",
    "top_p": "grpo.sampling.top_p",
    "top_k": "grpo.sampling.top_k",
    "scale_rewards": "grpo.scale",
    "loss_type": "grpo.loss",
    "mask_truncated_completions": "grpo.mask_truncated",
    "importance_sampling_level": "grpo.kwargs.importance_sampling_level",
    **trl.IMPORTANCE_SAMPLING,
}
"""Keys of the section `trl`, the arguments of TRL's GRPOConfig."""


def convert(draft: Draft) -> None:
    """Write the content of a file of axolotl to the draft."""
    adapter = draft.take("adapter")
    has_adapter = adapter in ("lora", "qlora")
    draft.set_defaults(hugging_face.DEFAULTS, DEFAULTS)
    draft.defaults.pop("optimizer.lr")
    _convert_method_name(draft)
    draft.set_defaults(METHOD_DEFAULTS.get(draft.method, {}))
    if has_adapter:
        draft.set_defaults(LORA_DEFAULTS)
        if adapter == "qlora":
            draft.put("lora.quantize", "nf4", "adapter")
    elif adapter:
        draft.lose("adapter", "dtrain has adapters of LoRA and DoRA")

    _convert_data(draft)
    hugging_face.convert_training(draft, null_is_off=False, rounding="axolotl")
    if draft.given("batch_size"):
        # axolotl derives the accumulation: batch_size / micro_batch_size. RENAMED writes the batch.
        draft.remove("train.global_batch")
    _convert_method(draft)
    draft.rename(RENAMED)
    if draft.take("tiled_mlp") is True:
        draft.put("train.tile", "mlp", "tiled_mlp")
    if draft.given("activation_offloading"):
        draft.put("train.activation_offload", bool(draft.take("activation_offloading")), "activation_offloading")
    if draft.take_number("cosine_constant_lr_ratio", default=0):
        reason = "write a list of stages in scheduler: the falling one, and a constant one"
        draft.lose("cosine_constant_lr_ratio", reason, "scheduler")
    _convert_weights(draft, has_adapter)
    _convert_plugins(draft)
    draft.ignore(*hugging_face.NEEDLESS, *NEEDLESS)
    draft.carry_aliases()
    if draft.method == "grpo":
        hugging_face.convert_rollout_size(draft, "trl.")
    hugging_face.finish_adapter(draft, has_adapter)
    hugging_face.add_common_notes(draft)
    for key, note in REQUIRED.items():
        if key not in draft.values and (has_adapter or not key.startswith("lora.")):
            draft.note(note)


def _convert_method_name(draft: Draft) -> None:
    """Write the method: the value of `rl`, or reward with `reward_model: true`, or else supervised fine-tuning."""
    name = draft.take("rl")
    if draft.take("reward_model") is True:
        draft.put("method", "reward", "reward_model")
    elif name:
        draft.put("method", name, "rl")
    if draft.take("process_reward_model"):
        draft.lose("process_reward_model", "dtrain trains reward models of full replies only")
    draft.method = str(draft.values.get("method", "sft"))


# Data


def _convert_data(draft: Draft) -> None:
    datasets = _datasets(draft, "data.train", "datasets")
    put_datasets(draft, "data.train", datasets, "datasets")
    if draft.method == "sft" and datasets and all(dataset.format == "text" for dataset in datasets):
        draft.set("data.loss_on", "all", "type completion trains every token")
    _convert_pretraining(draft)
    put_datasets(draft, "data.val", _datasets(draft, "data.val", "test_datasets"), "test_datasets")
    hugging_face.convert_validation_split(draft, "val_set_size")
    if draft.take("eot_tokens") and draft.method == "sft":
        # They end the turns that are trained, and the end of a turn is trained here, too.
        draft.note("eot_tokens: here the chat template decides what ends a turn, and its end is trained")
    template = draft.take("chat_template")
    if template == "jinja":
        put_chat_template(draft, "chat_template_jinja")
    else:
        put_chat_template(draft, "chat_template")
    if draft.take("evals_per_epoch") and draft.has("data.val"):
        draft.note("evals_per_epoch: train.validate_every counts steps; a run validates at the end in any case")


# Keys of an entry of `datasets` that are read below. All others are listed as lost.
DATASET_KEYS = {
    "path",
    "type",
    "data_files",
    "ds_type",
    "name",
    "revision",
    "split",
    "trust_remote_code",
    "field",
    "field_messages",
    "field_tools",
    "field_chosen",
    "field_rejected",
    "message_property_mappings",
    "message_field_role",
    "message_field_content",
}


def _datasets(draft: Draft, section: str, source: str) -> list[Dataset]:
    """Return the data sets that `datasets` or `test_datasets` lists."""
    found = []
    for entry in draft.take_entries(source):
        if entry.get("path"):
            found.append(_dataset(draft, entry, section, source))
        else:
            draft.lose(source, "an entry has no path, so it names no data. Write one such as {path: my.jsonl}")
    return found


def _dataset(draft: Draft, entry: Mapping[str, Any], section: str, source: str) -> Dataset:
    """Return one entry of `datasets`. Its keys that dtrain does not have are listed as lost."""
    files = entry.get("data_files")
    path = entry["path"] if files is None else files
    dataset = Dataset(path, subset=entry.get("name"), revision=entry.get("revision"))
    set_split(draft, dataset, section, entry.get("split"), f"{source}.split")
    kind = entry.get("type")
    if isinstance(kind, Mapping):
        _read_own_type(draft, dataset, kind, source)
    elif kind is not None:
        _read_type(draft, dataset, str(kind), entry, source)
    for column in ("chosen", "rejected"):
        if entry.get(f"field_{column}") not in (None, column):
            dataset.columns[column] = str(entry[f"field_{column}"])
    for key in sorted(set(entry) - DATASET_KEYS):
        value = entry[key]
        if value is not None and value is not False and not _is_dtrains_behaviour(key, value):
            draft.lose(f"{source}.{key}", f"dtrain has no key for it; its value is {value}")
    return dataset


def _is_dtrains_behaviour(key: str, value: Any) -> bool:
    """Check whether a value of a data set's entry asks for what dtrain does anyway."""
    if key in ("train_on_eos", "train_on_eot"):
        return bool(value == "turn")
    if key == "roles" and isinstance(value, Mapping):
        return all(role in as_list(names) for role, names in value.items())  # each role has its own name
    if key == "roles_to_train":
        return all(role in ("assistant", "gpt") for role in as_list(value))
    return key == "chat_template" and value == "tokenizer_default"


def _read_type(draft: Draft, dataset: Dataset, kind: str, entry: Mapping[str, Any], source: str) -> None:
    """Set the format of a data set whose `type` is a name such as `chat_template`, `alpaca:chat` or `chatml.intel`."""
    base, _, variant = kind.replace(":", ".").partition(".")
    if draft.method not in ("sft", "reward"):
        # For pairs and prompts a type names columns and a template. dtrain finds the columns by their names.
        if kind not in ("chat_template", "chat_template.default", "chat_template.argilla", "user_defined.default"):
            draft.lose(f"{source}.type", f"{kind} has prompts of its own; here columns are found by their names")
        return
    if base == "bradley_terry":
        return
    if base in ("chat_template", "sharegpt"):
        _read_messages(draft, dataset, base, entry, source)
    elif base == "alpaca":
        dataset.format = "alpaca"
        lose_alpaca_prompts(draft, f"{source}.type")
    elif base in ("completion", "pretrain"):
        dataset.format = "text"
        column = str(entry.get("field") or "text")
        if column != "text":
            dataset.columns = {"text": column}
        draft.note("axolotl splits texts that are longer than sequence_len; here data.too_long counts for them")
    else:
        draft.lose(f"{source}.type", f"{kind} has columns and prompts of its own; write such rows as messages")


def _read_messages(draft: Draft, dataset: Dataset, base: str, entry: Mapping[str, Any], source: str) -> None:
    """Set format and columns of conversations, whose messages may have other keys than role and content."""
    mapping = entry.get("message_property_mappings") or {}
    if not isinstance(mapping, Mapping):
        draft.lose(
            f"{source}.message_property_mappings", f"{mapping} is not a mapping. Write {{role: .., content: ..}}"
        )
        mapping = {}
    role = mapping.get("role", entry.get("message_field_role"))
    content = mapping.get("content", entry.get("message_field_content"))
    is_sharegpt = (role, content) == ("from", "value") or (base == "sharegpt" and role is None)
    dataset.format = "sharegpt" if is_sharegpt else "messages"
    column_in_dtrain = "conversations" if is_sharegpt else "messages"
    default_column = "conversations" if base == "sharegpt" else "messages"
    column = str(entry.get("field_messages") or default_column)
    if column != column_in_dtrain:
        dataset.columns[column_in_dtrain] = column
    if entry.get("field_tools") not in (None, "tools"):
        dataset.columns["tools"] = str(entry["field_tools"])
    if not is_sharegpt and (role not in (None, "role") or content not in (None, "content")):
        draft.lose(f"{source}.message_property_mappings", "messages need the keys role and content here")


def _read_own_type(draft: Draft, dataset: Dataset, kind: Mapping[str, Any], source: str) -> None:
    """Set format and columns of a data set whose `type` is a mapping, and note that its prompts are its own text."""
    if draft.method == "sft":
        dataset.format = "alpaca"
        names = {"instruction": "field_instruction", "input": "field_input", "output": "field_output"}
    else:
        names = {"prompt": "field_prompt", "chosen": "field_chosen", "rejected": "field_rejected"}
        names |= {"completion": "field_completion", "label": "field_label"}
    for column, field in names.items():
        if kind.get(field) not in (None, column):
            dataset.columns[column] = str(kind[field])
    prompt_keys = [key for key in kind if str(key).endswith(("format", "system_prompt", "field_system"))]
    for key in prompt_keys:
        if kind[key]:
            draft.lose(
                f"{source}.type.{key}",
                f"{kind[key]!r} is the prompt's own text; here the model's chat template writes prompts",
            )
    if not prompt_keys and draft.method == "sft":
        lose_alpaca_prompts(draft, f"{source}.type")


def _convert_pretraining(draft: Draft) -> None:
    """Write `pretraining_dataset`: raw text in which every token is trained. Rows are packed with several texts."""
    listed_entries = draft.take_list("pretraining_dataset")
    if not listed_entries:
        return
    as_mappings = []
    for entry in listed_entries:
        if isinstance(entry, str):
            as_mappings.append({"path": entry})
        else:
            as_mappings.append(entry)
    datasets = []
    for entry in draft.checked_entries(as_mappings, "pretraining_dataset"):
        path = entry.get("path")
        files = entry.get("data_files")
        if path in FILE_READERS and files is not None:
            path = files
        if path is None:
            draft.lose("pretraining_dataset", "an entry has no path, so it names no data. Write {path: my.jsonl}")
            continue
        dataset = Dataset(path, format="text", subset=entry.get("name"), split=entry.get("split"))
        column = str(entry.get("text_column") or "text")
        if column != "text":
            dataset.columns = {"text": column}
        datasets.append(dataset)
        if entry.get("skip"):
            draft.lose("pretraining_dataset.skip", "dtrain reads all rows; write the part into a file of its own")
    put_datasets(draft, "data.train", datasets, "pretraining_dataset")
    draft.set("data.loss_on", "all", "pretraining trains every token")
    draft.note("pretraining_dataset is streamed there, in the order of its files; here it is shuffled by data.shuffle")


# Training


def _convert_method(draft: Draft) -> None:
    """Write the keys of preferences and of GRPO."""
    method = draft.method
    trainer_keys = draft.section("trl")
    if method == "grpo":
        hugging_face.convert_rewards(draft, "trl.")
        hugging_face.convert_clip(draft, "trl.")
        for name, key in GRPO.items():
            if trainer_keys.get(name) not in (None, -1):
                draft.put(key, trainer_keys[name], f"trl.{name}")
        hugging_face.convert_moving_reference(draft, every=64, mix=0.9, prefix="trl.")
        if trainer_keys.get("vllm_importance_sampling_correction") is False:
            draft.put("grpo.kwargs.sampling_correction", "none", "trl.vllm_importance_sampling_correction")
        read = {*GRPO, "beta", "reward_funcs", "reward_weights", "epsilon", "epsilon_high", "sync_ref_model"}
        read |= {"ref_model_sync_steps", "ref_model_mixup_alpha", "generation_batch_size", "steps_per_generation"}
        read |= {"vllm_importance_sampling_correction", "log_completions", "num_completions_to_print", "use_liger_loss"}
        for name, value in trainer_keys.items():
            if name not in read and not name.startswith("vllm") and value not in (False, None) and name != "use_vllm":
                draft.lose(f"trl.{name}", "dtrain has no key for it")
    beta_source = "trl.beta" if "beta" in trainer_keys else "rl_beta" if draft.given("rl_beta") else "orpo_alpha"
    beta = trainer_keys.get("beta", draft.take("rl_beta", "orpo_alpha"))
    if beta is not None:
        if method in ("dpo", "kto", "grpo"):
            draft.put(f"{method}.beta", beta, beta_source)
        else:
            draft.lose(beta_source, f"method={method} has no beta")
    if draft.file.get("rl") == "simpo":
        # TRL's CPOConfig, by which axolotl trains SimPO, adds the chosen replies' NLL with this weight.
        weight = draft.take("cpo_alpha")
        if weight is None:
            draft.set("dpo.sft_weight", 1.0, "cpo_alpha: TRL's default")
        else:
            draft.put("dpo.sft_weight", weight, "cpo_alpha")


def _convert_weights(draft: Draft, has_adapter: bool) -> None:
    """Write the type of the trained weights: with bf16 axolotl loads and trains them in bfloat16.

    FSDP and DeepSpeed keep a float32 copy, as dtrain does by default, and PEFT keeps adapters in float32.
    """
    bf16 = draft.file.get("bf16", draft.file.get("bfloat16"))
    is_bfloat16 = bf16 not in (False, None) or (bf16 is None and not draft.file.get("fp16"))
    shards = draft.given("fsdp", "deepspeed") or any(key.startswith("fsdp_config.") for key in draft.file)
    if is_bfloat16 and not has_adapter and not shards:
        comment = "axolotl trains weights in bfloat16 where bf16 is on, without a float32 copy"
        hugging_face.put_bfloat16_weights(draft, comment)
    if draft.given("deepspeed"):
        draft.note("deepspeed: here parameters are sharded by FSDP2, over parallel.dp_shard ranks")


def _convert_plugins(draft: Draft) -> None:
    """List plugins as lost, except for those that only bring other kernels."""
    plugins = [str(plugin) for plugin in draft.take_list("plugins")]
    unknown_plugins = [plugin for plugin in plugins if not any(name in plugin for name in HARMLESS_PLUGINS)]
    if unknown_plugins:
        draft.lose("plugins", f"dtrain has no plugins of axolotl's: {', '.join(unknown_plugins)}")


AXOLOTL = Tool("axolotl", "0.19", ("base_model",), convert)
