"""Files of verl: the resolved settings of its PPO trainer (`actor_rollout_ref`, with GRPO and its relatives) and SFT.

Compared with verl/trainer/config, verl/trainer/ppo/core_algos.py and verl/workers of verl 0.10, and for files with
`model.partial_pretrain` with sft_trainer.yaml of verl 0.4. verl's scripts pass settings as overrides such as
`data.train_batch_size=1024`. The user first writes these to a file, as lines `data.train_batch_size: 1024` or nested.
"""

from typing import Any

from dtrain.recipe.other_tools.draft import Dataset, Draft, Tool, put_chat_template, put_datasets

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"

SHARED_DEFAULTS: dict[str, Any] = {
    "train.dtype": "bfloat16",
    "train.max_grad_norm": 1.0,
    "optimizer.weight_decay": 0.01,
    "optimizer.betas": [0.9, 0.999],
    "scheduler.name": "constant",
    "scheduler.warmup": 0,
    "scheduler.min_lr_ratio": 0.0,
}
GRPO_DEFAULTS: dict[str, Any] = {
    "data.packing": False,
    "data.too_long": "error",
    "data.loss_on": "assistant",
    "train.epochs": 30,
    "train.activation_checkpointing": "full",
    "optimizer.lr": 1e-6,
    "grpo.beta": 0.0,
    "grpo.loss": "dapo",
    "grpo.clip": [0.2, 0.2],
}
SFT_DEFAULTS: dict[str, Any] = {
    "run.seed": 1,
    "data.max_length": 1024,
    "data.too_long": "error",
    "data.packing": False,
    "train.epochs": 4,
    "train.global_batch": 256,
    "train.micro_batch": 4,
    "train.activation_checkpointing": "full",
    "optimizer.lr": 1e-3,
}
FORMER_SFT_DEFAULTS: dict[str, Any] = {
    "train.activation_checkpointing": "none",
    "optimizer.lr": 1e-5,
    "optimizer.betas": [0.9, 0.95],
    "scheduler.name": "cosine",
    "scheduler.warmup": 0.1,
}
LORA_DEFAULTS: dict[str, Any] = {"lora.alpha": 16, "lora.target": "all-linear", "lora.dropout": 0.0}

# adv_estimator: grpo.advantage and grpo.scale. A scale of None depends on algorithm.norm_adv_by_std_in_grpo.
ESTIMATORS: dict[str, tuple[str, str | None]] = {
    "grpo": ("group", None),
    "grpo_vectorized": ("group", None),
    "rloo": ("leave_one_out", "none"),
    "rloo_vectorized": ("leave_one_out", "none"),
    "gpg": ("group", "none"),
}
# loss_mode: grpo.loss, and the entries of grpo.kwargs by the actor's keys that they are read from
LOSS_MODES: dict[str, tuple[str, dict[str, str]]] = {
    "vanilla": ("dapo", {}),
    "gspo": ("gspo", {}),
    "sapo": ("sapo", {"tau_pos": "sapo_temperature_pos", "tau_neg": "sapo_temperature_neg"}),
    "cispo": ("cispo", {}),
    "geo_mean": ("gmpo", {}),
    "gpg": ("reinforce", {}),
}
# loss_agg_mode of the clipped loss: dtrain's loss that divides in the same way
AGGREGATIONS = {"token-mean": "dapo", "seq-mean-token-mean": "grpo", "seq-mean-token-sum-norm": "dr_grpo"}
KL_ESTIMATORS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}

NEEDLESS = (
    # engines, placement on machines, kernels and limits of memory: no number depends on them
    f"{ROLLOUT}.name",
    f"{ROLLOUT}.mode",
    f"{ROLLOUT}.prompt_length",
    f"{ROLLOUT}.response_length",
    f"{ROLLOUT}.tensor_model_parallel_size",
    f"{ROLLOUT}.data_parallel_size",
    f"{ROLLOUT}.expert_parallel_size",
    f"{ROLLOUT}.pipeline_model_parallel_size",
    f"{ROLLOUT}.gpu_memory_utilization",
    f"{ROLLOUT}.max_num_batched_tokens",
    f"{ROLLOUT}.max_num_seqs",
    f"{ROLLOUT}.max_model_len",
    f"{ROLLOUT}.load_format",
    f"{ROLLOUT}.layered_summon",
    f"{ROLLOUT}.enforce_eager",
    f"{ROLLOUT}.free_cache_engine",
    f"{ROLLOUT}.enable_chunked_prefill",
    f"{ROLLOUT}.enable_prefix_caching",
    f"{ROLLOUT}.disable_log_stats",
    f"{ROLLOUT}.calculate_log_probs",
    f"{ROLLOUT}.dtype",
    f"{ROLLOUT}.seed",
    f"{ROLLOUT}.n_gpus_per_node",
    f"{ROLLOUT}.nnodes",
    f"{ROLLOUT}.skip_tokenizer_init",
    f"{ROLLOUT}.scheduling_policy",
    f"{ROLLOUT}.logprobs_mode",
    f"{ROLLOUT}.cudagraph_capture_sizes",
    f"{ROLLOUT}.moe_load_balance_metrics_interval",
    f"{ROLLOUT}.over_sample_rate",
    f"{ROLLOUT}.skip_dump_dir",
    f"{ROLLOUT}.log_prob_micro_batch_size",
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu",
    f"{ROLLOUT}.log_prob_use_dynamic_bsz",
    f"{ROLLOUT}.log_prob_max_token_len_per_gpu",
    f"{ROLLOUT}.engine_kwargs.",
    f"{ROLLOUT}.agent.",
    f"{ROLLOUT}.checkpoint_engine.",
    f"{ROLLOUT}.profiler.",
    f"{ROLLOUT}.trace.",
    f"{ROLLOUT}.multi_turn.",
    f"{ROLLOUT}.val_kwargs.",
    "actor_rollout_ref.ref.",
    "actor_rollout_ref.hybrid_engine",
    f"{ACTOR}.checkpoint.",
    f"{ACTOR}.profiler.",
    f"{ACTOR}.router_replay.",
    f"{ACTOR}.fsdp_config.",
    f"{ACTOR}.strategy",
    f"{ACTOR}.rollout_n",
    f"{ACTOR}.shuffle",
    f"{ACTOR}.data_loader_seed",
    f"{ACTOR}.use_torch_compile",
    f"{ACTOR}.calculate_entropy",
    f"{ACTOR}.calculate_sum_pi_squared",
    f"{ACTOR}.entropy_from_logits_with_chunking",
    f"{ACTOR}.entropy_from_logits_chunk_size",
    f"{ACTOR}.entropy_checkpointing",
    f"{ACTOR}.ppo_max_token_len_per_gpu",
    f"{ACTOR}.ppo_micro_batch_size",
    f"{ACTOR}.use_remove_padding",
    f"{ACTOR}.use_prefix_grouper",
    f"{ACTOR}.policy_loss.",
    f"{ACTOR}.tau_pos",
    f"{ACTOR}.tau_neg",
    f"{ACTOR}.optim.",
    "algorithm.gamma",
    "algorithm.lam",
    "algorithm.kl_ctrl.",
    "algorithm.pf_ppo.",
    "algorithm.kl_penalty",
    "algorithm.filter_groups.",
    "algorithm.rollout_correction.",
    "critic.",
    "reward.num_workers",
    "reward.reward_model.",
    "reward.sandbox_fusion.",
    "reward.custom_reward_function.name",
    "reward_model.rollout.",
    "reward_model.num_workers",
    "reward_model.sandbox_fusion.",
    "reward_manager.source",
    "reward_manager.module.",
    "reward_model.model.",
    "custom_reward_function.name",
    "sandbox_fusion.",
    "distillation.",
    "transfer_queue.",
    f"{ROLLOUT}.prometheus.",
    f"{ROLLOUT}.disaggregation.",
    f"{ROLLOUT}.mtp.",
    "actor_rollout_ref.nccl_timeout",
    "defaults",
    "global_profiler.",
    "profiler.",
    "skip.",
    "ray_kwargs.",
    "engine.",
    "optim.",
    "checkpoint.",
    "data.shuffle",
    "data.num_workers",
    "data.dataloader_num_workers",
    "data.filter_overlong_prompts_workers",
    "data.reward_fn_key",
    "data.val_batch_size",
    "data.return_raw_chat",
    "data.return_raw_input_ids",
    "data.return_full_prompt",
    "data.return_multi_modal_inputs",
    "data.trust_remote_code",
    "data.use_shm",
    "data.image_key",
    "data.video_key",
    "data.audio_key",
    "data.image_patch_size",
    "data.pad_mode",
    "data.max_token_len_per_gpu",
    "data.micro_batch_size",
    "data.balance_dp_token",
    "data.ignore_input_ids_mismatch",
    "data.custom_cls.name",
    "data.enable_thinking_key",
    "data.tool_config_path",
    "data.function_tool_path",
    "trainer.",
    "use_remove_padding",
)
NEEDLESS_OF_MODEL = (
    "use_remove_padding",
    "use_fused_kernels",
    "use_liger",
    "use_shm",
    "trust_remote_code",
    "external_lib",
    "tokenizer_path",
    "hf_config_path",
    "fused_kernel_options.",
    "fsdp_config.",
    "mtp.",
    "lora.",
    "tiled_mlp.",
    "_target_",
)
_CLASSES = "_target_"


def convert(draft: Draft) -> None:
    """Write the content of a file of verl to the draft."""
    draft.set_defaults(SHARED_DEFAULTS)
    is_rollout = any(key.startswith(("actor_rollout_ref.", "algorithm.")) for key in draft.file)
    if is_rollout:
        _convert_rollout_training(draft)
    else:
        _convert_fine_tuning(draft)
    _convert_trainer(draft)
    draft.ignore(*[key for key in draft.file if key.rpartition(".")[2] == _CLASSES])
    draft.ignore(*NEEDLESS)


# Supervised fine-tuning


def _convert_fine_tuning(draft: Draft) -> None:
    """Write a file of verl's SFT trainer, of verl 0.10 or in the former form (`model.partial_pretrain`)."""
    draft.put("method", "sft", "data.train_files")
    draft.method = "sft"
    is_former = draft.given("model.partial_pretrain")
    draft.set_defaults(SFT_DEFAULTS, FORMER_SFT_DEFAULTS if is_former else {})
    _convert_model(draft, "model")
    _convert_optimizer(draft, "optim", "optim.clip_grad")
    draft.rename(
        {
            "model.partial_pretrain": "model.path",
            "data.train_batch_size": "train.global_batch",
            "data.micro_batch_size_per_gpu": "train.micro_batch",
            "data.max_length": "data.max_length",
            "trainer.seed": "run.seed",
            "ulysses_sequence_parallel_size": "parallel.cp",
            "engine.ulysses_sequence_parallel_size": "parallel.cp",
        }
    )
    put_chat_template(draft, "data.chat_template")
    _convert_files(draft, None)
    _convert_columns(draft)
    uses_tokens = draft.take_flag("data.use_dynamic_bsz", default=not is_former)
    tokens = draft.take_int("data.max_token_len_per_gpu", default=8192, minimum=1)
    length = draft.effective("data.max_length")
    if uses_tokens and length > 0:
        draft.set("train.dynamic_batch", True, f"data.use_dynamic_bsz of {draft.version}")
        draft.set(
            "train.micro_batch",
            max(1, tokens // length),
            f"{tokens} tokens of {draft.version}'s data.max_token_len_per_gpu",
        )
    _convert_truncation(draft)


def _convert_columns(draft: Draft) -> None:
    """Write the columns of rows: messages, or a prompt and a response, either of which may be in a mapping."""
    has_prompts = draft.given("data.prompt_key", "data.response_key")
    is_multi_turn = draft.take_flag("data.multiturn.enable", default=not has_prompts)
    names = {
        "messages": draft.take("data.messages_key", "data.multiturn.messages_key"),
        "tools": draft.take("data.tools_key", "data.multiturn.tools_key"),
    }
    # For example, prompt_key: extra and prompt_dict_keys: [question] read row["extra"]["question"]: "extra.question".
    prompt_parts = [draft.take("data.prompt_key") or "question", *draft.take_list("data.prompt_dict_keys")]
    response_parts = [draft.take("data.response_key") or "answer", *draft.take_list("data.response_dict_keys")]
    columns = {}
    if is_multi_turn:
        for column, file_column in names.items():
            if file_column not in (None, column):
                columns[column] = str(file_column)
    else:
        draft.put("data.train.format", "prompt_completion", "data.prompt_key")
        columns["prompt"] = ".".join(str(part) for part in prompt_parts)
        columns["completion"] = ".".join(str(part) for part in response_parts)
        draft.put("data.prompts_as", "user", "data.prompt_key")  # verl writes both by the chat template
    if columns:
        draft.put("data.train.columns", columns, "data.messages_key")
    if draft.take("data.custom_cls.path"):
        draft.lose("data.custom_cls.path", "a data set's class of your own; write its rows as messages")


# Rollouts


def _convert_rollout_training(draft: Draft) -> None:
    """Write a file of verl's PPO trainer. Only its estimators without a critic are converted, to method=grpo."""
    draft.set_defaults(GRPO_DEFAULTS)
    _convert_estimator(draft)
    draft.method = str(draft.values["method"])
    _convert_model(draft, MODEL)
    _convert_rollout_sizes(draft)
    _convert_optimizer(draft, f"{ACTOR}.optim", f"{ACTOR}.grad_clip", f"{ACTOR}.optim.clip_grad")
    _convert_policy_loss(draft)
    _convert_divergence(draft)
    _convert_sampling(draft)
    _convert_rewards(draft)
    _convert_files(draft, draft.take("data.prompt_key", default="prompt"))
    _convert_truncation(draft)
    if draft.take("data.filter_overlong_prompts"):
        draft.set("data.too_long", "drop", "data.filter_overlong_prompts")
    draft.rename(
        {
            "data.seed": "run.seed",
            f"{ACTOR}.ulysses_sequence_parallel_size": "parallel.cp",
            f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size": "parallel.cp",
            f"{ACTOR}.fsdp_config.param_offload": "parallel.cpu_offload",
            f"{ACTOR}.fsdp_config.optimizer_offload": "parallel.optimizer_offload",
        }
    )
    if draft.values.get("parallel.cpu_offload"):
        draft.remove("parallel.optimizer_offload")  # cpu_offload moves the optimizer's state too


def _convert_estimator(draft: Draft) -> None:
    """Write the method, the baseline of advantages and their scale, which `adv_estimator` decides.

    For an estimator that dtrain does not have, a method is written that dtrain refuses, so that nobody trains with
    another estimator by mistake.
    """
    name = str(draft.take("algorithm.adv_estimator", default="gae"))
    divides = draft.take("algorithm.norm_adv_by_std_in_grpo", default=True)
    if name not in ESTIMATORS:
        reason = (
            "it needs a critic; method=grpo does not" if name == "gae" else "grpo.advantage has group and leave_one_out"
        )
        draft.lose("algorithm.adv_estimator", f"{name}: {reason}")
        draft.set("method", "ppo" if name == "gae" else name)  # refused by dtrain, instead of training otherwise
        return
    draft.put("method", "grpo", "algorithm.adv_estimator")
    baseline, scale = ESTIMATORS[name]
    if scale is None:
        scale = "group" if divides else "none"
    draft.put("grpo.advantage", baseline, "algorithm.adv_estimator")
    draft.put("grpo.scale", scale, "algorithm.adv_estimator")


def _convert_rollout_sizes(draft: Draft) -> None:
    """Write the sizes of rollouts. verl counts prompts, and dtrain's global batch counts completions."""
    prompts = draft.take_int("data.train_batch_size", default=1024, minimum=1)
    group = draft.take_int(f"{ROLLOUT}.n", default=1, minimum=1)
    minibatch = draft.take_int(f"{ACTOR}.ppo_mini_batch_size", default=256, minimum=1)
    updates = draft.take_int(f"{ACTOR}.ppo_epochs", default=1, minimum=1)
    draft.put("grpo.prompts_per_step", prompts, "data.train_batch_size")
    draft.put("grpo.group_size", group, f"{ROLLOUT}.n")
    comment = f"{minibatch} prompts of ppo_mini_batch_size, {group} completions each"
    draft.set("train.global_batch", minibatch * group, comment)
    draft.put("grpo.updates_per_rollout", updates, f"{ACTOR}.ppo_epochs")
    prompt_length = draft.take_int("data.max_prompt_length", default=512, minimum=1)
    response_length = draft.take_int("data.max_response_length", default=512, minimum=1)
    length = prompt_length + response_length
    draft.set("data.max_length", length, "data.max_prompt_length + data.max_response_length")
    draft.put("grpo.sampling.max_new_tokens", response_length, "data.max_response_length")
    draft.rename({f"{ACTOR}.ppo_micro_batch_size_per_gpu": "train.micro_batch"})
    if draft.take_flag(f"{ACTOR}.use_dynamic_bsz", default=False):
        tokens = draft.take_int(f"{ACTOR}.ppo_max_token_len_per_gpu", default=16384, minimum=1)
        draft.set("grpo.dynamic_batch", True, "use_dynamic_bsz")
        draft.set("train.micro_batch", max(1, tokens // length), f"{tokens} tokens of ppo_max_token_len_per_gpu")
    steps = draft.take_int("trainer.total_training_steps", default=None)
    steps_per_rollout = _steps_per_rollout(draft)
    if steps:
        comment = f"{steps} rollouts with {steps_per_rollout} optimizer steps each"
        draft.set("train.steps", steps * steps_per_rollout, comment)
        draft.defaults.pop("train.epochs")
    if steps_per_rollout > 1:
        draft.note("verl's learning rate moves once per rollout; dtrain's moves with every optimizer step")
    draft.note("verl leaves out the last prompts of an epoch that fill no batch; dtrain trains on them")


def _steps_per_rollout(draft: Draft) -> int:
    """Return the optimizer steps of a rollout. It is 1 for supervised fine-tuning.

    For example, 64 prompts with 8 completions each in minibatches of 128 completions are 64 · 8 / 128 = 4 steps.
    """
    if not draft.has("grpo.prompts_per_step"):
        return 1
    completions = draft.effective("grpo.prompts_per_step") * draft.effective("grpo.group_size", 1)
    minibatches = max(1, completions // draft.effective("train.global_batch"))
    return int(minibatches * draft.effective("grpo.updates_per_rollout", 1))


def _convert_policy_loss(draft: Draft) -> None:
    """Write the loss, its clip, its entropy term, and the correction for the sampling engine's probabilities."""
    mode = str(draft.take(f"{ACTOR}.policy_loss.loss_mode", default="vanilla"))
    aggregation = str(draft.take(f"{ACTOR}.loss_agg_mode", default="token-mean"))
    loss_mode = LOSS_MODES.get(mode)
    if loss_mode is None:
        draft.lose(f"{ACTOR}.policy_loss.loss_mode", f"dtrain has no policy loss {mode}", "grpo.loss")
        return
    loss, options = loss_mode
    if mode == "vanilla":
        if aggregation in AGGREGATIONS:
            loss = AGGREGATIONS[aggregation]
        else:
            draft.lose(f"{ACTOR}.loss_agg_mode", f"grpo.loss has no {aggregation}", "grpo.loss")
        dual_clip = draft.take_number(f"{ACTOR}.clip_ratio_c", default=3.0)
        comment = f"clip_ratio_c of {draft.version}"
        _put_loss_option(draft, "dual_clip", dual_clip, comment)
    else:
        draft.take(f"{ACTOR}.clip_ratio_c")
        if draft.given(f"{ACTOR}.loss_agg_mode"):
            draft.note(f"loss_agg_mode={aggregation}: grpo.loss={loss} divides as its paper does")
    draft.put("grpo.loss", loss, f"{ACTOR}.policy_loss.loss_mode")
    for name, option in options.items():
        value = draft.take_number(f"{ACTOR}.{name}", default=None)
        if value is not None:
            _put_loss_option(draft, option, value, "")
    both = draft.take_number(f"{ACTOR}.clip_ratio", default=0.2)
    low = draft.take_number(f"{ACTOR}.clip_ratio_low", default=both)
    high = draft.take_number(f"{ACTOR}.clip_ratio_high", default=both)
    draft.put("grpo.clip", [low, high], f"{ACTOR}.clip_ratio")
    entropy = draft.take_number(f"{ACTOR}.entropy_coeff", default=0)
    if entropy:
        _put_loss_option(draft, "entropy_coef", entropy, "")
    if draft.take(f"{ACTOR}.loss_scale_factor") is not None:
        draft.lose(f"{ACTOR}.loss_scale_factor", "dr_grpo divides by grpo.sampling.max_new_tokens")
    correction = draft.take("algorithm.rollout_correction.rollout_is")
    if correction in ("token", "sequence"):
        threshold = draft.take_number("algorithm.rollout_correction.rollout_is_threshold", default=2.0)
        _put_loss_option(draft, "sampling_correction", f"{correction}_truncate", "")
        _put_loss_option(draft, "sampling_clip_max", threshold, "")
    else:
        _put_loss_option(draft, "sampling_correction", "none", "")
    if draft.take("algorithm.rollout_correction.rollout_rs") is not None:
        draft.lose("algorithm.rollout_correction.rollout_rs", "write grpo.kwargs.sampling_correction with a mask")


def _convert_divergence(draft: Draft) -> None:
    """Write the divergence from the reference as a term of the loss."""
    kind = str(draft.take(f"{ACTOR}.kl_loss_type", default="low_var_kl"))
    weight = draft.take_number(f"{ACTOR}.kl_loss_coef", default=0.001)
    if draft.take_flag(f"{ACTOR}.use_kl_loss", default=False) and weight:
        draft.put("grpo.beta", weight, f"{ACTOR}.kl_loss_coef")
        estimator = KL_ESTIMATORS.get(kind.removesuffix("+"))
        if estimator is None:
            draft.lose(f"{ACTOR}.kl_loss_type", f"{kind} is not one of k1, k2 and k3")
        else:
            _put_loss_option(draft, "kl_estimator", estimator, "")
            _put_loss_option(draft, "kl_gradient", "k2" if kind.endswith("+") else "direct", "")
    if draft.take("algorithm.use_kl_in_reward"):
        draft.lose("algorithm.use_kl_in_reward", "grpo.beta adds the divergence to the loss, not to the reward")


def _put_loss_option(draft: Draft, name: str, value: Any, comment: str) -> None:
    """Add an option of the policy loss to `grpo.kwargs`."""
    draft.put("grpo.kwargs", {name: value}, f"{ACTOR}.policy_loss.{name}")
    if comment:
        draft.comments["grpo.kwargs"] = comment


def _convert_sampling(draft: Draft) -> None:
    """Write how completions are sampled, and dynamic sampling."""
    draft.rename(
        {
            f"{ROLLOUT}.temperature": "grpo.sampling.temperature",
            f"{ROLLOUT}.top_p": "grpo.sampling.top_p",
            f"{ROLLOUT}.top_k": "grpo.sampling.top_k",
            "algorithm.filter_groups.max_num_gen_batches": "grpo.max_refills",
        }
    )
    if draft.take_flag(f"{ROLLOUT}.do_sample", default=True) is False:
        draft.lose(f"{ROLLOUT}.do_sample", "completions are sampled here, and rollouts never take the argmax")
    if draft.take(f"{ROLLOUT}.repetition_penalty", default=1.0) != 1.0:
        draft.lose(f"{ROLLOUT}.repetition_penalty", "the policy's distribution would have to share it")
    if draft.take("algorithm.filter_groups.enable"):
        draft.put("grpo.dynamic_sampling", "refill", "algorithm.filter_groups.enable")
    else:
        draft.remove("grpo.max_refills")
    if draft.values.get("grpo.max_refills") == 0:  # no limit there
        draft.remove("grpo.max_refills")
    if draft.take(f"{ROLLOUT}.multi_turn.enable"):
        draft.lose(f"{ROLLOUT}.multi_turn.enable", "name tools in grpo.tools, or an environment in grpo.environment")


def _convert_rewards(draft: Draft) -> None:
    """Write the rewards, the reward model, and the penalty for long completions.

    verl chooses a reward function by each row's `data_source`, or uses a function from a Python file.
    """
    function = draft.take("custom_reward_function.path", "reward.custom_reward_function.path")
    if function is not None:
        source = next(key for key in draft.file if key.endswith("custom_reward_function.path"))
        draft.lose(
            source,
            "grpo.rewards takes the import path of fn(prompts, completions, completion_ids, **columns)",
            "grpo.rewards",
        )
    elif draft.method == "grpo":
        comment = "verl chooses by data_source; this compares with the rows' reward_model.ground_truth"
        rewards = [{"fn": "math_exact", "kwargs": {"column": "reward_model.ground_truth"}}]
        draft.set("grpo.rewards", rewards, comment)
    enabled = draft.take("reward_model.enable", "reward.reward_model.enable")
    path = draft.take("reward_model.model.path", "reward.reward_model.model_path")
    if enabled and path is not None:
        draft.put("grpo.reward_model.path", path, "reward_model.model.path")
    for section in ("reward_model.overlong_buffer", "reward.reward_kwargs.overlong_buffer_cfg"):
        buffer = draft.section(section)
        if buffer.get("enable") and buffer.get("penalty_factor", 1.0) == 1.0:
            draft.put("grpo.overlong_cache", buffer.get("len"), f"{section}.len")
        elif buffer.get("enable"):
            draft.lose(f"{section}.penalty_factor", "grpo.overlong_cache takes off up to 1")
    names = ("reward_model.reward_manager", "reward.reward_manager.name", "reward_manager.name")
    manager = draft.take(*names, default="naive")
    if manager not in ("naive", "dapo", "batch", "prime"):
        draft.lose("reward_model.reward_manager", "name what judges a completion in grpo.rewards")
    draft.ignore("reward.reward_manager.", "reward_model.reward_manager", "reward_model.enable")


# Both trainers


def _convert_model(draft: Draft, section: str) -> None:
    """Write the model and its adapter, and the dtype of trained weights, which is float32 by default in verl.

    Args:
        draft: The draft.
        section: The file's section of the model.
    """
    draft.rename({f"{section}.path": "model.path"})
    checkpoints = draft.take(f"{section}.enable_gradient_checkpointing")
    if checkpoints is not None:
        draft.put("train.activation_checkpointing", checkpoints, f"{section}.enable_gradient_checkpointing")
    draft.rename({f"{section}.enable_activation_offload": "train.activation_offload"})
    put_chat_template(draft, f"{section}.custom_chat_template")
    rank = draft.take_int(f"{section}.lora_rank", default=0)
    if rank:
        draft.set_defaults(LORA_DEFAULTS)
        draft.put("lora.rank", rank, f"{section}.lora_rank")
        draft.rename(
            {
                f"{section}.lora_alpha": "lora.alpha",
                f"{section}.target_modules": "lora.target",
                f"{section}.exclude_modules": "lora.exclude",
                f"{section}.lora_adapter_path": "lora.path",
            }
        )
    draft.ignore(f"{section}.lora_alpha", f"{section}.target_modules", f"{section}.lora_rank")
    kind = draft.take(f"{section}.fsdp_config.model_dtype", f"{ACTOR}.fsdp_config.model_dtype", "engine.model_dtype")
    if kind in ("bf16", "bfloat16") and not rank:
        draft.set("train.masters", "bfloat16", "fsdp_config.model_dtype")
    if draft.section(f"{section}.override_config"):
        draft.lose(f"{section}.override_config", "write it into the model's config.json")
    draft.ignore(*[f"{section}.{name}" for name in NEEDLESS_OF_MODEL])


def _convert_optimizer(draft: Draft, section: str, *clips: str) -> None:
    """Write the optimizer, the clipping of gradients and the schedule.

    Args:
        draft: The draft.
        section: The file's section of the optimizer.
        clips: The file's keys for the maximum norm of gradients. The first key with a value counts.
    """
    names = {"optimizer": "AdamW", "optimizer_impl": "torch.optim"}
    given = {name: draft.take(f"{section}.{name}") for name in names}
    if any(value is not None for value in given.values()):
        module = given["optimizer_impl"] or names["optimizer_impl"]
        optimizer = given["optimizer"] or names["optimizer"]
        draft.put("optimizer.name", f"{module}.{optimizer}", f"{section}.optimizer")
    draft.rename(
        {
            f"{section}.lr": "optimizer.lr",
            f"{section}.betas": "optimizer.betas",
            f"{section}.weight_decay": "optimizer.weight_decay",
            f"{section}.lr_scheduler_type": "scheduler.name",
            f"{section}.lr_scheduler": "scheduler.name",
            f"{section}.warmup_style": "scheduler.name",
            f"{section}.min_lr_ratio": "scheduler.min_lr_ratio",
        }
    )
    clip = draft.take(*clips)
    if clip is not None:
        draft.put("train.max_grad_norm", clip, clips[0])
    steps = draft.take_int(f"{section}.lr_warmup_steps", default=None)
    fraction = draft.take_number(f"{section}.lr_warmup_steps_ratio", f"{section}.warmup_steps_ratio", default=None)
    if steps is not None and steps > 0:
        # verl's schedule moves once per rollout.
        draft.put("scheduler.warmup_steps", steps * _steps_per_rollout(draft), f"{section}.lr_warmup_steps")
        draft.defaults.pop("scheduler.warmup")
    elif fraction is not None:
        draft.put("scheduler.warmup", fraction or 0, f"{section}.lr_warmup_steps_ratio")
    if draft.take(f"{section}.num_cycles", default=0.5) != 0.5:
        draft.lose(f"{section}.num_cycles", "a cosine falls once here", "scheduler.name")
    if draft.take(f"{section}.zero_indexed_step") is False:
        draft.note(f"{section}.zero_indexed_step=false: the rate is that of the next step there")
    if draft.section(f"{section}.override_optimizer_config"):
        draft.lose(f"{section}.override_optimizer_config", "optimizer.kwargs takes arguments of the optimizer's class")


def _convert_files(draft: Draft, prompt_column: str | None) -> None:
    """Write the files of `data.train_files` and `data.val_files`. `prompt_column`: the rows' column of prompts."""
    for section, source in (("data.train", "data.train_files"), ("data.val", "data.val_files")):
        datasets = []
        for path in draft.take_list(source):
            dataset = Dataset(str(path))
            if prompt_column not in (None, "prompt"):
                dataset.columns["prompt"] = str(prompt_column)
            datasets.append(dataset)
        put_datasets(draft, section, datasets, source)
    for name in ("data.train_max_samples", "data.val_max_samples"):
        if draft.take(name, default=-1) != -1:
            draft.lose(name, "dtrain reads all rows; write the part into a file of its own")
    thinking = draft.section("data.apply_chat_template_kwargs")
    if draft.take("data.enable_thinking_default") not in (None, "none"):
        thinking.setdefault("enable_thinking", draft.file["data.enable_thinking_default"])
    if thinking:
        draft.put("data.template_kwargs", thinking, "data.apply_chat_template_kwargs")
    if draft.take("data.shuffle") is False:
        draft.put("data.shuffle", False, "data.shuffle")


def _convert_truncation(draft: Draft) -> None:
    side = draft.take("data.truncation", default="error")
    if side in ("error", "right"):
        draft.put("data.too_long", "error" if side == "error" else "truncate", "data.truncation")
    else:
        draft.lose("data.truncation", f"{side}: data.too_long=truncate keeps the start of a row", "data.too_long")


def _convert_trainer(draft: Draft) -> None:
    """Write the keys of `trainer`: length, name, saving, validation and logging."""
    steps_per_rollout = _steps_per_rollout(draft)  # verl counts rollouts, and dtrain counts optimizer steps
    if draft.take("trainer.total_training_steps") and not draft.has("train.steps"):
        draft.put("train.steps", draft.file["trainer.total_training_steps"], "trainer.total_training_steps")
    if draft.has("train.steps"):
        draft.defaults.pop("train.epochs", None)
    else:
        draft.rename({"trainer.total_epochs": "train.epochs"})
    draft.rename(
        {
            "trainer.experiment_name": "run.name",
            "trainer.n_gpus_per_node": "launch.nproc",
            "trainer.max_ckpt_to_keep": "checkpoint.keep_last",
            "trainer.max_actor_ckpt_to_keep": "checkpoint.keep_last",
        }
    )
    for source, key in (("trainer.save_freq", "checkpoint.every"), ("trainer.test_freq", "train.validate_every")):
        every = draft.take(source)
        if isinstance(every, int) and every > 0:
            draft.put(key, every * steps_per_rollout, source)
    if "wandb" in draft.take_list("trainer.logger") and draft.given("trainer.project_name"):
        draft.put("metrics.wandb", draft.take("trainer.project_name"), "trainer.project_name")
    if draft.take("trainer.nnodes", default=1) != 1:
        draft.note("trainer.nnodes: start dtrain on every node, by torchrun or SLURM")


MARKS = (r"actor_rollout_ref\..*", r"data\.train_files", r"model\.partial_pretrain")
VERL = Tool("verl", "0.10", MARKS, convert, counts_all_gpus=True)
