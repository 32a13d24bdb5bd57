"""Files of NeMo-RL.

NeMo-RL has no defaults in code. A file names in `defaults` one of NeMo-RL's example files, whose values it inherits. So
the tables of defaults below have the values of these examples: examples/configs/sft.yaml, dpo.yaml, rm.yaml,
grpo_math_1B.yaml and distillation_math.yaml.

Compared with these files, nemo_rl/algorithms and nemo_rl/models/automodel of commit 7ea279a.
"""

from collections.abc import Mapping
from typing import Any

from dtrain.recipe.other_tools.draft import Dataset, Draft, Tool, put_chat_template, put_datasets, set_split

METHODS = {"grpo": "grpo", "ppo": "ppo", "dpo": "dpo", "sft": "sft", "distillation": "distill", "rm": "reward"}
"""Name of a section of the file -> dtrain's method. The first of these sections that the file has decides.

dtrain has no method ppo, which needs a critic. It refuses the converted recipe, instead of training by another method.
"""

EXAMPLES = {
    "sft": "sft.yaml",
    "dpo": "dpo.yaml",
    "reward": "rm.yaml",
    "grpo": "grpo_math_1B.yaml",
    "distill": "distillation_math.yaml",
}
"""NeMo-RL's example of each method. A file that builds on it has the defaults below."""

DEFAULTS: dict[str, Any] = {
    "run.seed": 42,
    "data.max_length": 1024,
    "data.packing": False,
    "train.dtype": "bfloat16",
    "train.max_grad_norm": 1.0,
    "train.micro_batch": 1,
    "train.epochs": 1,
    "train.activation_checkpointing": "none",
    "optimizer.lr": 5e-6,
    "optimizer.betas": [0.9, 0.98],
    "optimizer.eps": 1e-5,
    "optimizer.weight_decay": 0.1,
    "scheduler.name": "constant",
    "scheduler.warmup": 0,
    "parallel.sequence_parallel": False,
}


def rise_from_a_tenth(steps: int) -> list[dict[str, Any]]:
    """Return the schedule of NeMo-RL's examples: from a tenth of the rate in `steps`, and constant after."""
    rise = {"start_factor": 0.1, "total_iters": steps}
    return [
        {"name": "torch.optim.lr_scheduler.LinearLR", "steps": steps, "kwargs": rise},
        {"name": "constant"},
    ]


METHOD_DEFAULTS: dict[str, dict[str, Any]] = {
    "sft": {"train.steps": 60, "train.global_batch": 32},
    "dpo": {
        "train.steps": 150,
        "train.micro_batch": 2,
        "train.global_batch": 128,
        "dpo.beta": 0.05,
        "scheduler": rise_from_a_tenth(20),
    },
    "reward": {"data.max_length": 8192, "train.global_batch": 128, "optimizer.lr": 2e-6},
    "grpo": {
        "data.max_length": 512,
        "data.packing": True,
        "train.micro_batch": 4,
        "train.global_batch": 512,
        "optimizer.betas": [0.9, 0.999],
        "optimizer.eps": 1e-8,
        "optimizer.weight_decay": 0.01,
        "scheduler": rise_from_a_tenth(50),
        "grpo.prompts_per_step": 32,
        "grpo.group_size": 16,
        "grpo.beta": 0.01,
        "grpo.loss": "dapo",
        "grpo.advantage": "leave_one_out",
        "grpo.scale": "leave_one_out",
    },
    "distill": {
        "data.max_length": 8192,
        "train.steps": 1000,
        "train.global_batch": 64,
        "train.activation_checkpointing": "full",
        "optimizer.lr": 2e-5,
        "optimizer.betas": [0.9, 0.999],
        "optimizer.eps": 1e-8,
        "optimizer.weight_decay": 0.01,
        "distill.samples": "student",
        "distill.kl": "mixed",
        "distill.top_k": 64,
        "distill.zero_outside_topk": False,
        "distill.prompts_per_step": 128,
        "scheduler": rise_from_a_tenth(10),
    },
}
LORA_DEFAULTS: dict[str, Any] = {
    "lora.rank": 8,
    "lora.alpha": 32,
    "lora.dropout": 0.0,
    "lora.target": "all-linear",
}

RENAMED = {
    "policy.model_name": "model.path",
    "policy.train_global_batch_size": "train.global_batch",
    "policy.train_micro_batch_size": "train.micro_batch",
    "policy.max_total_sequence_length": "data.max_length",
    "policy.precision": "train.dtype",
    "policy.optimizer.name": "optimizer.name",
    "policy.optimizer.kwargs.lr": "optimizer.lr",
    "policy.optimizer.kwargs.weight_decay": "optimizer.weight_decay",
    "policy.optimizer.kwargs.betas": "optimizer.betas",
    "policy.optimizer.kwargs.eps": "optimizer.eps",
    "policy.sequence_packing.enabled": "data.packing",
    "policy.dtensor_cfg.tensor_parallel_size": "parallel.tp",
    "policy.dtensor_cfg.context_parallel_size": "parallel.cp",
    "policy.dtensor_cfg.expert_parallel_size": "parallel.ep",
    "policy.dtensor_cfg.dp_replicate_size": "parallel.dp_replicate",
    "policy.dtensor_cfg.sequence_parallel": "parallel.sequence_parallel",
    "policy.dtensor_cfg.cpu_offload": "parallel.cpu_offload",
    "policy.dtensor_cfg.activation_checkpointing": "train.activation_checkpointing",
    "policy.activation_checkpointing_enabled": "train.activation_checkpointing",
    "checkpointing.save_period": "checkpoint.every",
    "checkpointing.keep_top_k": "checkpoint.keep_last",
    "data.shuffle": "data.shuffle",
    "cluster.gpus_per_node": "launch.nproc",
}
LORA_RENAMED = {"dim": "lora.rank", "alpha": "lora.alpha", "dropout": "lora.dropout"}
# Keys of the method's own section, and of `loss_fn`.
METHOD_KEYS: dict[str, dict[str, str]] = {
    "sft": {},
    "dpo": {
        "dpo.reference_policy_kl_penalty": "dpo.beta",
        "dpo.sft_loss_weight": "dpo.sft_weight",
    },
    "reward": {},
    "grpo": {
        "grpo.num_prompts_per_step": "grpo.prompts_per_step",
        "grpo.num_generations_per_prompt": "grpo.group_size",
        "grpo.overlong_filtering": "grpo.mask_truncated",
        "grpo.max_rollout_turns": "grpo.max_turns",
        "grpo.dynamic_sampling_max_gen_batches": "grpo.max_refills",
        "loss_fn.reference_policy_kl_penalty": "grpo.beta",
        "policy.generation.temperature": "grpo.sampling.temperature",
        "policy.generation.top_p": "grpo.sampling.top_p",
        "policy.generation.top_k": "grpo.sampling.top_k",
        "policy.generation.stop_strings": "grpo.sampling.stop",
        "policy.generation.max_new_tokens": "grpo.sampling.max_new_tokens",
    },
    "distill": {
        "distillation.num_prompts_per_step": "distill.prompts_per_step",
        "distillation.topk_logits_k": "distill.top_k",
        "loss_fn.kl_type": "distill.kl",
        "loss_fn.mixed_kl_weight": "distill.mixed_kl_weight",
        "loss_fn.zero_outside_topk": "distill.zero_outside_topk",
        "teacher.model_name": "distill.teacher",
        "policy.generation.temperature": "distill.sampling.temperature",
        "policy.generation.top_p": "distill.sampling.top_p",
        "policy.generation.top_k": "distill.sampling.top_k",
        "policy.generation.stop_strings": "distill.sampling.stop",
        "policy.generation.max_new_tokens": "distill.sampling.max_new_tokens",
    },
}
NEEDLESS = (
    # engines, memory, loggers and machines: no number depends on them
    "policy.generation.",
    "policy.dynamic_batching.",
    "policy.sequence_packing.",
    "policy.make_sequence_length_divisible_by",
    "policy.logprob_batch_size",
    "policy.logprob_chunk_size",
    "policy.generation_batch_size",
    "policy.offload_optimizer_for_logprob",
    "policy.optimizer.kwargs.foreach",
    "policy.optimizer.kwargs.fused",
    "policy.reward_model_cfg.",
    "policy.tokenizer.name",
    "policy.tokenizer.use_fastokens",
    "policy.megatron_cfg.",
    "policy.draft.",
    "policy.dtensor_cfg.enabled",
    "policy.dtensor_cfg._v2",
    "policy.dtensor_cfg.env_vars.",
    "policy.dtensor_cfg.automodel_kwargs.",
    "policy.dtensor_cfg.lora_cfg.",
    "policy.dtensor_cfg.clear_cache_every_n_steps",
    "policy.scheduler",
    "teacher.",
    "checkpointing.",
    "data.num_workers",
    "data.max_input_seq_length",
    "data.default.processor",
    "data.default.env_name",
    "data.use_multiple_dataloader",
    "data.add_bos",
    "data.add_eos",
    "data.add_generation_prompt",
    "data.train.",
    "data.validation.",
    "data.default.dataset_name",
    "data_plane.",
    "env.",
    "logger.",
    "cluster.",
    "grpo.adv_estimator.",
    "grpo.async_grpo.",
    "grpo.reward_shaping.",
    "grpo.reward_scaling.",
    "loss_fn.",
)
# Keys of the method's section about validation. dtrain validates at the end too, in its own batches.
VALIDATION = (
    "val_batches",
    "val_global_batch_size",
    "val_micro_batch_size",
    "val_at_start",
    "val_at_end",
    "val_start_at",
    "val_batch_size",
    "max_val_samples",
    "val_num_generations_per_prompt",
)


# Keys of the method's section that have the value 1 in NeMo-RL's examples, and have no key in dtrain.
SINGLE = {"grpo": ("batch_multiplier",), "distill": ("num_generations_per_prompt", "max_rollout_turns")}


def convert(draft: Draft) -> None:
    """Write the content of a file of NeMo-RL to the draft."""
    section = next((name for name in METHODS if any(key.startswith(f"{name}.") for key in draft.file)), "sft")
    draft.method = draft.typed_method or METHODS[section]
    draft.set("method", draft.method)
    draft.set_defaults(DEFAULTS, METHOD_DEFAULTS.get(draft.method, {}))
    if draft.method in ("dpo", "grpo", "distill"):
        draft.defaults.pop("scheduler.name")
        draft.defaults.pop("scheduler.warmup")
    base = draft.take("defaults")
    if base is not None and [str(base).rpartition("/")[2]] != [EXAMPLES.get(draft.method)]:
        example = EXAMPLES.get(draft.method, "its own")
        draft.lose("defaults", f"{base} is not read; the values of NeMo-RL's example {example} are used")

    _convert_length(draft, section)
    _convert_data(draft)
    draft.rename(METHOD_KEYS.get(draft.method, {}))
    if draft.method == "grpo":
        _convert_policy_loss(draft)
        _convert_advantage(draft)
    if draft.method == "dpo":
        _convert_preference_loss(draft)
    _convert_megatron(draft)
    _convert_clipping(draft)
    _convert_schedule(draft)
    draft.rename(RENAMED)
    _convert_adapter(draft)
    _convert_sampling_length(draft)
    if draft.take("logger.wandb_enabled") and draft.given("logger.wandb.project"):
        draft.put("metrics.wandb", draft.file["logger.wandb.project"], "logger.wandb.project")
    if draft.take("cluster.num_nodes", default=1) != 1:
        draft.note("cluster.num_nodes: start dtrain on every node, by torchrun or SLURM")
    for name in SINGLE.get(draft.method, ()):
        if draft.take(f"{section}.{name}") == 1:
            draft.ignore(f"{section}.{name}")
        elif draft.given(f"{section}.{name}"):
            draft.lose(f"{section}.{name}", "dtrain has no key for it; it is 1 here")
    draft.ignore(*NEEDLESS, *[f"{section}.{name}" for name in VALIDATION])


def _convert_length(draft: Draft, section: str) -> None:
    """Write steps, or epochs where the file gives no steps (-1), and the seed."""
    draft.rename({f"{section}.seed": "run.seed"})
    steps = draft.take_int(f"{section}.max_num_steps", default=None)
    epochs = draft.take(f"{section}.max_num_epochs")
    if steps is not None and 0 < steps < 10**6:
        draft.put("train.steps", steps, f"{section}.max_num_steps")
        if epochs is not None or "train.epochs" in draft.defaults:
            draft.note("a run ends there at the steps or at the epochs, whichever is first; here train.steps counts")
    elif epochs is not None:
        draft.put("train.epochs", epochs, f"{section}.max_num_epochs")
    if draft.has("train.steps"):
        draft.defaults.pop("train.epochs", None)
    elif draft.has("train.epochs") or steps is not None or draft.method == "sft":
        draft.defaults.pop("train.steps", None)
    elif "train.steps" in draft.defaults:
        draft.defaults.pop("train.epochs", None)
    every = draft.take(f"{section}.val_period")
    if isinstance(every, int) and every > 0:
        draft.put("train.validate_every", every, f"{section}.val_period")
    if draft.take("sft.only_unmask_final"):
        draft.put("data.loss_on", "last", "sft.only_unmask_final")


def _convert_data(draft: Draft) -> None:
    """Write the data sets of `data.train` and `data.validation`, and the chat template with its variables."""
    for section, name in (("data.train", "train"), ("data.val", "validation")):
        entries = draft.take(f"data.{name}")
        if isinstance(entries, list):
            entries = draft.take_entries(f"data.{name}")
        else:
            values = draft.section(f"data.{name}")
            entries = [values] if values else []
        former = draft.take(f"data.{name}_data_path", "data.val_data_path" if name == "validation" else "")
        datasets = [Dataset(str(former))] if former is not None else []
        for entry in entries:
            dataset = _dataset(draft, entry, section, f"data.{name}")
            if dataset is not None:
                datasets.append(dataset)
        put_datasets(draft, section, datasets, f"data.{name}")
    fraction = draft.take_number("data.train.split_validation_size", default=0)
    if fraction and not draft.has("data.val"):
        draft.put("data.val", fraction, "data.train.split_validation_size")
    for name in ("prompt_file", "system_prompt_file"):
        if draft.take(f"data.default.{name}", f"data.train.{name}") is not None:
            draft.lose(f"data.default.{name}", "write the prompt's text into the rows, or into grpo.system_prompt")
    put_chat_template(draft, "policy.tokenizer.chat_template")
    variables = draft.section("policy.tokenizer.chat_template_kwargs")
    if variables:
        draft.put("data.template_kwargs", variables, "policy.tokenizer.chat_template_kwargs")


def _dataset(draft: Draft, entry: Mapping[str, Any], section: str, source: str) -> Dataset | None:
    """Return a data set of `data_path` or of the hub. Names of NeMo-RL's own data sets are listed as lost."""
    name, path = entry.get("dataset_name"), entry.get("data_path")
    if path is None and (name is None or "/" not in str(name)):
        if name is not None:
            draft.lose(f"{source}.dataset_name", f"{name} is read in a way of NeMo-RL's own; write its rows to a file")
        return None
    dataset = Dataset(str(path if path is not None else name))
    set_split(draft, dataset, section, entry.get("split"), f"{source}.split")
    if path is not None:
        dataset.split = None  # files have no splits
    dataset.subset = entry.get("subset")
    keys = {"input_key": "prompt", "output_key": "answer" if draft.method == "grpo" else "completion"}
    keys |= {"chat_key": "messages", "tool_key": "tools", "prompt_key": "prompt"}
    keys |= {"chosen_key": "chosen", "rejected_key": "rejected"}
    for key, column in keys.items():
        if entry.get(key) not in (None, column):
            dataset.columns[column] = str(entry[key])
    return dataset


def _convert_policy_loss(draft: Draft) -> None:
    """Write the loss of GRPO, its clip, and its options in `grpo.kwargs`, from the keys of `loss_fn`."""
    is_by_token = draft.take("loss_fn.token_level_loss", default=True)
    is_by_sequence = draft.take("loss_fn.sequence_level_importance_ratios", default=False)
    if is_by_sequence:
        loss = "gspo"
        if is_by_token:
            draft.note("token_level_loss with ratios of sequences: grpo.loss=gspo takes the mean over sequences")
    else:
        loss = "dapo" if is_by_token else "grpo"
    if draft.take("loss_fn.use_cispo"):
        loss = "cispo"
    if draft.take("loss_fn.disable_ppo_ratio"):
        loss = "reinforce"
    draft.put("grpo.loss", loss, "loss_fn.token_level_loss")
    low = draft.take_number("loss_fn.ratio_clip_min", default=0.2)
    high = draft.take_number("loss_fn.ratio_clip_max", default=0.2)
    draft.put("grpo.clip", [low, high], "loss_fn.ratio_clip_min")
    options: dict[str, Any] = {"sampling_correction": "none"}
    dual_clip = draft.take_number("loss_fn.ratio_clip_c", default=None)
    if dual_clip is not None:
        options["dual_clip"] = dual_clip
    kind = draft.take("loss_fn.reference_policy_kl_type")
    if kind is not None and draft.file.get("loss_fn.reference_policy_kl_penalty") != 0:
        options["kl_estimator"] = kind
    if draft.take("loss_fn.use_importance_sampling_correction"):
        options |= _importance_sampling(draft)
    draft.put("grpo.kwargs", options, "loss_fn.ratio_clip_c")
    for name in ("positive_example_nll_weight", "use_kl_in_reward"):
        if draft.take(f"loss_fn.{name}"):
            draft.lose(f"loss_fn.{name}", "dtrain has no key for it")


def _importance_sampling(draft: Draft) -> dict[str, Any]:
    """Return the options that correct the probabilities of the engine that sampled."""
    modes = {"tis": "token_truncate", "icepop": "token_mask", "seq-mask-tis": "seq_mask_tis"}
    kind = str(draft.take("loss_fn.truncated_importance_sampling_type", default="tis"))
    largest = draft.take_number("loss_fn.truncated_importance_sampling_ratio", default=None)
    smallest = draft.take_number("loss_fn.truncated_importance_sampling_ratio_min", default=None)
    return {"sampling_correction": modes.get(kind, kind), "sampling_clip_max": largest, "sampling_clip_min": smallest}


def _convert_advantage(draft: Draft) -> None:
    """Write the baseline and scale of advantages, dynamic sampling, and the shaping of rewards."""
    name = draft.take("grpo.adv_estimator.name", default="grpo")
    if name != "grpo":
        draft.lose("grpo.adv_estimator.name", f"{name}: grpo.advantage has group, leave_one_out, batch and none")
    leaves_out = draft.take_flag(
        "grpo.adv_estimator.use_leave_one_out_baseline", "grpo.use_leave_one_out_baseline", default=None
    )
    divides = draft.take_flag("grpo.adv_estimator.normalize_rewards", "grpo.normalize_rewards", default=True)
    baseline = "group" if leaves_out is False else "leave_one_out"
    if leaves_out is not None:
        draft.put("grpo.advantage", baseline, "grpo.use_leave_one_out_baseline")
    if not divides:
        draft.put("grpo.scale", "none", "grpo.normalize_rewards")
    elif leaves_out is not None:
        draft.put("grpo.scale", baseline, "grpo.normalize_rewards")
    if draft.take("grpo.use_dynamic_sampling"):
        draft.put("grpo.dynamic_sampling", "refill", "grpo.use_dynamic_sampling")
    else:
        draft.remove("grpo.max_refills")
    shaping = draft.section("grpo.reward_shaping")
    if shaping.get("enabled"):
        if shaping.get("overlong_buffer_penalty", 1) == 1:
            draft.put("grpo.overlong_cache", shaping.get("overlong_buffer_length", 128), "grpo.reward_shaping")
        else:
            draft.lose("grpo.reward_shaping.overlong_buffer_penalty", "grpo.overlong_cache takes off up to 1")
    if draft.take("grpo.reward_scaling.enabled"):
        draft.lose("grpo.reward_scaling.enabled", "scale the rewards in a function of your own, in grpo.rewards")
    if draft.take("grpo.async_grpo.enabled"):
        draft.lose("grpo.async_grpo.enabled", "grpo.engine=http with grpo.max_off_policy_steps draws ahead")
    draft.note("env names what judges an answer there; grpo.rewards here, math_exact where none is named")


def _convert_preference_loss(draft: Draft) -> None:
    loss = draft.take("dpo.preference_loss", default="dpo")
    if loss in ("dpo", "ipo"):
        draft.put("dpo.loss", loss, "dpo.preference_loss")
    else:
        draft.lose("dpo.preference_loss", f"dpo.loss has no {loss}", "dpo.loss")
    weight = draft.take_number("dpo.preference_loss_weight", default=1)
    if weight != 1:
        draft.put("dpo.loss_weights", [weight], "dpo.preference_loss_weight")
    for name in ("preference_average_log_probs", "sft_average_log_probs"):
        if draft.take(f"dpo.{name}"):
            draft.lose(f"dpo.{name}", "dpo.loss=sigmoid_norm averages over the tokens of a reply")


def _convert_megatron(draft: Draft) -> None:
    """Write the optimizer and the mesh of `megatron_cfg`, which count if it is enabled."""
    if not draft.take("policy.megatron_cfg.enabled"):
        return
    section = "policy.megatron_cfg"
    draft.rename(
        {
            f"{section}.optimizer.lr": "optimizer.lr",
            f"{section}.optimizer.weight_decay": "optimizer.weight_decay",
            f"{section}.optimizer.adam_eps": "optimizer.eps",
            f"{section}.optimizer.clip_grad": "train.max_grad_norm",
            f"{section}.tensor_model_parallel_size": "parallel.tp",
            f"{section}.context_parallel_size": "parallel.cp",
            f"{section}.expert_model_parallel_size": "parallel.ep",
            f"{section}.sequence_parallel": "parallel.sequence_parallel",
            f"{section}.activation_checkpointing": "train.activation_checkpointing",
        }
    )
    first = draft.take_number(f"{section}.optimizer.adam_beta1", default=None)
    second = draft.take_number(f"{section}.optimizer.adam_beta2", default=None)
    if first is not None and second is not None:
        draft.put("optimizer.betas", [first, second], f"{section}.optimizer.adam_beta1")
    if draft.take(f"{section}.pipeline_model_parallel_size", default=1) != 1:
        draft.lose(f"{section}.pipeline_model_parallel_size", "dtrain has no pipeline parallelism")
    if draft.section(f"{section}.scheduler"):
        draft.lose(f"{section}.scheduler", "write Megatron's schedule as a list in scheduler", "scheduler")
    if draft.take(f"{section}.moe_router_bias_update_rate"):
        draft.lose(f"{section}.moe_router_bias_update_rate", "routers are trained by moe.balance only")


def _convert_clipping(draft: Draft) -> None:
    is_off = "policy.max_grad_norm" in draft.file and not draft.file["policy.max_grad_norm"]
    value = draft.take("policy.max_grad_norm")
    if is_off:
        draft.set("train.max_grad_norm", None)
    elif value is not None:
        draft.put("train.max_grad_norm", value, "policy.max_grad_norm")


def _convert_schedule(draft: Draft) -> None:
    """Write a list of torch schedulers with milestones as stages. ConstantLR with a factor of 1 is `constant`.

    For example, LinearLR, ConstantLR and `milestones: [50]` are a stage of 50 steps and one for the rest.
    """
    if isinstance(draft.take("policy.scheduler"), list):
        entries = draft.take_entries("policy.scheduler")
    else:
        single = draft.section("policy.scheduler")
        entries = [single] if single.get("name") else []
    stages: list[dict[str, Any]] = []
    milestones: list[int] = []
    for entry in entries:
        if "milestones" in entry:
            milestones = _milestones(draft, entry["milestones"])
            continue
        kwargs = entry.get("kwargs")
        if kwargs is None:  # a single scheduler, whose section is flattened
            kwargs = {key.partition(".")[2]: entry[key] for key in entry if "kwargs." in key}
        if entry.get("name") is None or not isinstance(kwargs, Mapping):
            reason = f"{entry} is no scheduler. Write {{name: torch.optim.lr_scheduler.LinearLR, kwargs: {{..}}}}"
            draft.lose("policy.scheduler", reason, "scheduler")
            return
        name = str(entry["name"])
        if name.endswith("ConstantLR") and kwargs.get("factor") == 1:
            stages.append({"name": "constant"})
        else:
            stages.append({"name": name, "kwargs": dict(kwargs)})
    # Milestones are steps of the run, and a stage of dtrain has a number of steps. The last stage has no milestone.
    start = 0
    for stage, end in zip(stages, milestones, strict=False):
        stage["steps"] = end - start
        start = end
    if stages:
        draft.put("scheduler", stages, "policy.scheduler")


def _milestones(draft: Draft, value: Any) -> list[int]:
    """Return the steps at which one scheduler follows another."""
    if isinstance(value, list) and all(isinstance(step, int) for step in value):
        return value
    draft.lose("policy.scheduler", f"milestones: {value} is not a list of steps. Write one such as [50]", "scheduler")
    return []


def _convert_adapter(draft: Draft) -> None:
    section = "policy.dtensor_cfg.lora_cfg"
    if not draft.take_flag(f"{section}.enabled", default=False):
        return
    draft.set_defaults(LORA_DEFAULTS)
    draft.rename({f"{section}.{name}": key for name, key in LORA_RENAMED.items()})
    for name, key in (("target_modules", "lora.target"), ("exclude_modules", "lora.exclude")):
        modules = draft.take(f"{section}.{name}")
        if modules:
            draft.put(key, modules, f"{section}.{name}")
    draft.note(
        "NeMo-RL initialises A by Xavier and applies dropout behind the adapter; here A is initialised as in PEFT, "
        "and dropout is applied to the adapter's inputs"
    )


def _convert_sampling_length(draft: Draft) -> None:
    """Write the length of completions: by default a completion may fill what the prompt leaves of the sequence."""
    if draft.method not in ("grpo", "distill") or draft.has(f"{draft.method}.sampling.max_new_tokens"):
        return
    length = draft.effective("data.max_length")
    comment = f"{draft.version}'s default: as long as the sequence"
    draft.set(f"{draft.method}.sampling.max_new_tokens", length, comment)


MARKS = (
    r"policy\.model_name",
    r"policy\.train_global_batch_size",
    r"policy\.(dtensor|megatron)_cfg\..*",
    r"(grpo|ppo|dpo|sft|distillation|rm)\.(max_num_steps|max_num_epochs|val_period)",
)
NEMO_RL = Tool("NeMo-RL", "7ea279a", MARKS, convert, counts_all_gpus=True)
