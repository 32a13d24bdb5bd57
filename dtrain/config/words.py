"""The words of other tools, and what dtrain calls the same thing; and what dtrain does not have yet.

The tools: Hugging Face's TrainingArguments and TRL, Axolotl, LLaMA-Factory, torchtune, torchtitan, NeMo and NeMo-RL,
Megatron, verl. Looked up by the last part of an unknown key, so `learning_rate` and `training_args.learning_rate` get
one answer, or by the last two where these are named; `sequence_packing.enabled` is looked up as `sequence_packing`.
"""


def _by_word(table: dict[str, str]) -> dict[str, str]:
    """What each line says, by every word of the line."""
    return {word: said for said, words in table.items() for word in words.split()}


OURS = _by_word(
    {
        "run.name": "run_name",
        "run.dir and run.name: a run's directory is run.dir/run.name": "output_dir",
        "run.seed": "seed",
        "launch.nproc": "nproc_per_node num_gpus",
        "model.path, a directory or an id of the hub": (
            "model_name_or_path model_name base_model pretrained_model_name_or_path"
        ),
        "model.path, where training starts; a run saves under run.dir/run.name/checkpoints": "checkpoint_dir",
        "model.path: the tokenizer is read from the model's directory": "tokenizer tokenizer_name",
        "data.train.path, files, URLs or a dataset's id on the hub": "dataset dataset_name",
        "data.train.split": "dataset_split dataset_train_split train_split",
        "data.train.subset": "dataset_config dataset_config_name",
        "data.train.columns, our names of columns with the file's": (
            "column_map column_mapping field_messages dataset_text_field field_instruction field_output"
        ),
        "data.val, a share of the training rows such as 0.05, or a section": (
            "val_set_size val_size test_size validation_split validation_split_percentage eval_split_ratio"
        ),
        "data.train.path": "dataset_path data_path data_files train_dataset train_file train_files",
        "data.train.sources, [{path, format, weight}]": "datasets",
        "data.val.path": "validation_file val_files",
        "data.max_length": (
            "cutoff_len max_seq_len max_seq_length max_total_sequence_length sequence_len seq_len model_max_length"
        ),
        "data.max_length, of prompt and completion together": "max_prompt_length",
        "data.packing": "sample_packing packed sequence_packing",
        "data.loss_on, assistant | completion | last | all": "train_on_inputs train_on_input",
        "data.loss_on=assistant": "assistant_only_loss",
        "data.loss_on=completion": "completion_only_loss",
        "data.loss_on=last": "only_unmask_final",
        "data.num_workers": "dataloader_num_workers dataset_num_proc",
        "data.chat_template, a file, or null for the model's own": "template",
        "data.template_kwargs": "chat_template_kwargs",
        "parallel.dp_replicate": "data_parallel_replicate_degree data_parallel_replicate_dim dp_replicate_size",
        "parallel.dp_shard": "data_parallel_size data_parallel_shard_degree data_parallel_shard_dim dp_size",
        "parallel.dp_shard: parameters are sharded by FSDP2 always": "fsdp fsdp_config",
        "parallel.cp": "context_parallel_size context_parallel_degree context_parallel_dim cp_size",
        "parallel.tp": (
            "tensor_parallel_size tensor_parallel_degree tensor_parallel_dim tensor_model_parallel_size tp_size"
        ),
        "train.steps": "max_steps max_num_steps num_steps max_train_steps",
        "train.steps, in place of train.epochs": "max_steps_per_epoch",
        "train.epochs": "num_train_epochs num_epochs epoch max_num_epochs",
        "train.global_batch (all ranks, one optimizer step) and train.micro_batch (one rank, at once)": "batch_size",
        "train.global_batch": "train_batch_size train_global_batch_size global_batch_size",
        "train.global_batch: it is micro_batch × accumulation × dp": (
            "gradient_accumulation_steps gradient_accumulation"
        ),
        "train.global_batch, counted in completions": "ppo_mini_batch_size",
        "train.micro_batch": "per_device_train_batch_size micro_batch_size train_micro_batch_size",
        "train.micro_batch, in validation too": "per_device_eval_batch_size",
        "train.dtype=bfloat16": "bf16",
        "train.dtype=float16": "fp16",
        "train.dtype=float32": "fp32",
        "train.dtype": "torch_dtype precision mixed_precision",
        "train.max_grad_norm": "max_grad_norm gradient_clipping clip_grad_norm",
        "train.activation_checkpointing, none | full | mlp | selective": (
            "gradient_checkpointing enable_activation_checkpointing"
        ),
        "train.compile": "torch_compile",
        "train.freeze, patterns of parameter names": "freeze",
        "train.train_only, patterns of parameter names": "unfrozen_parameters",
        "lora={}, a section whose keys have defaults, or null for full fine-tuning": (
            "lora use_lora use_peft peft peft_config lora_config"
        ),
        "lora={} for lora, lora.quantize=nf4 for qlora, or null for full fine-tuning": "adapter finetuning_type",
        "lora.quantize=nf4": "qlora load_in_4bit quantize_base quantization quantization_config",
        "lora.quantize, nf4 | none": "quantization_bit quantization_method bnb_4bit_quant_type quantization_type",
        "train.dtype, in which 4-bit weights are computed with too": "bnb_4bit_compute_dtype",
        "lora.rank": "r lora_r lora_rank peft.dim lora.dim adapter_dim",
        "lora.alpha": "lora_alpha peft.alpha",
        "lora.dropout": "lora_dropout peft.dropout",
        "lora.target, all-linear | a list of names | a regular expression": (
            "lora_target lora_target_modules target_modules lora_attn_modules"
        ),
        "lora.target=all-linear": "lora_target_linear match_all_linear",
        "lora.target, a list in which gate_proj, up_proj and down_proj are the MLP's": "apply_lora_to_mlp",
        "lora.modules_to_save=[lm_head], trained whole: the head gets no adapter": "apply_lora_to_output",
        "lora.exclude, a list of names or a regular expression": "exclude_modules lora_exclude_modules",
        "lora.target, a regular expression for whole names": (
            "layers_to_transform layers_pattern peft_layers_to_transform"
        ),
        "lora.modules_to_save": "lora_modules_to_save additional_target modules_to_save",
        "lora.rslora": "use_rslora peft_use_rslora",
        "lora.dora": "use_dora peft_use_dora",
        "lora.rank_pattern": "rank_pattern",
        "lora.alpha_pattern": "alpha_pattern",
        "lora.path, an adapter's directory to go on from": (
            "adapter_path adapter_name_or_path lora_model_dir lora_adapter_path lora_path adapter_checkpoint"
        ),
        "lora.path, an adapter's directory to go on from; a run resumes by itself, checkpoint.resume=auto": (
            "resume_from_adapter resume_from_checkpoint_adapter_only"
        ),
        "train.validate_every": "eval_steps val_every",
        "train.validate_every, steps between validations or null": "eval_strategy evaluation_strategy",
        "optimizer.name": "optim",
        "optimizer.name or scheduler.name (a name or an import path), dpo.loss or grpo.loss": "_component_",
        "optimizer.lr": "learning_rate lr",
        "optimizer.betas, a list of two": "adam_beta1 adam_beta2",
        "optimizer.eps": "adam_epsilon",
        "optimizer.kwargs": "optim_args",
        "scheduler.name": "lr_scheduler_type lr_scheduler",
        "scheduler.warmup, a share of the steps": "warmup_ratio",
        "scheduler.warmup_steps": "num_warmup_steps",
        "scheduler.min_lr_ratio, a share of optimizer.lr": "min_lr",
        "scheduler.kwargs": "lr_scheduler_kwargs",
        "checkpoint.every": "save_steps save_period save_every_n_steps",
        "checkpoint.every, steps between saves or null": "save_strategy",
        "checkpoint.every, counted in steps": "save_every_n_epochs",
        "checkpoint.keep_last": "save_total_limit keep_last_n_checkpoints",
        "checkpoint.keep_best, val_loss or another metric: its save stays": "load_best_model_at_end",
        "checkpoint.keep_best": "metric_for_best_model metric_name",
        "checkpoint.keep_best, of which one is kept, and checkpoint.keep_last": "keep_top_k",
        "checkpoint.resume, auto | null | a step's directory": "resume_from_checkpoint",
        "checkpoint.resume": "resume",
        "metrics.every": "logging_steps log_every",
        "metrics.tensorboard and metrics.wandb": "report_to",
        "metrics.wandb": "wandb_project",
        "dpo.loss or grpo.loss": "loss_type",
        "dpo.reference, start | none | base | a directory or an id of the hub": "ref_model",
        "dpo.reference=none": "reference_free",
        "dpo.sft_weight": "rpo_alpha sft_loss_weight",
        "dpo.f_divergence": "f_divergence_type",
        "dpo.precompute": "precompute_ref_log_probs",
        "dpo.sync_every, steps between moves of the reference, or null": "sync_ref_model",
        "dpo.sync_every": "ref_model_sync_steps",
        "dpo.sync_mix": "ref_model_mixup_alpha",
        "dpo.kwargs, {simpo_gamma: 0.5}": "simpo_gamma",
        "dpo.kwargs, {discopop_tau: 0.05}": "discopop_tau",
        "grpo.prompts_per_step, times grpo.group_size": "generation_batch_size",
        "grpo.prompts_per_step": "rollout_batch_size num_prompts_per_step",
        "grpo.group_size": "num_generations grpo_samples num_generations_per_prompt",
        "grpo.updates_per_rollout": "num_iterations ppo_epochs",
        "grpo.beta": "kl_loss_coef kl_coef kl_coeff",
        "grpo.beta or dpo.beta": "reference_policy_kl_penalty",
        "grpo.clip, [below, above]": (
            "epsilon epsilon_high ratio_clip_min ratio_clip_max clip_ratio_low clip_ratio_high"
        ),
        "grpo.kwargs, {importance_sampling_level: token | sequence}": "importance_sampling_level",
        "grpo.kwargs, {entropy_coef: ...}": "entropy_coeff",
        "grpo.advantage=leave_one_out": "use_leave_one_out_baseline",
        "grpo.scale, group | batch | none": "scale_rewards normalize_rewards",
        "grpo.rewards, [{fn, weight, kwargs}]": "reward_funcs reward_functions reward_weights",
        "grpo.mask_truncated": "mask_truncated_completions overlong_filtering",
        "grpo.dynamic_sampling, none | drop | refill": "use_dynamic_sampling",
        "grpo.sampling.max_new_tokens": "max_completion_length max_response_length max_generated_tokens",
        "grpo.engine=http, with grpo.server.urls": "use_vllm",
        "grpo.server.urls": "vllm_server_base_url",
        "grpo.max_off_policy_steps": "max_staleness max_trajectory_age_steps",
        "distill.teacher, a directory or an id of the hub": (
            "teacher_model_name_or_path teacher.model_name teacher_checkpointer"
        ),
        "distill.top_k": "topk_logits_k",
        "checkpoint.export, whose directory `dtrain push RUN OWNER/NAME` sends to the hub": "push_to_hub hub_model_id",
    }
)
"""Their word → our key, or our key and how it counts."""

VALUES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
"""Their word for a value → ours."""

NOT_YET = _by_word(
    {
        "weights in 8 bits; lora.quantize=nf4 holds them in 4": "load_in_8bit",
        "nf4's scales quantised too; lora.quantize=nf4 holds one float32 for 64 weights": (
            "bnb_4bit_use_double_quant use_bnb_nested_quant double_quantization"
        ),
        "starts of adapters that change the base, PiSSA and the like; A is drawn, B is zero": (
            "init_lora_weights pissa_init pissa_iter loftq_config"
        ),
        "LoRA+; optimizer.lr is one rate for A and B": "loraplus_lr_ratio loraplus_lr_embedding",
        "adapters of single parameters; lora.target names linear layers": "lora_target_parameters target_parameters",
        "biases beside an adapter": "lora_bias",
        "DeepSpeed; parameters are sharded by FSDP2, parallel.dp_shard": "deepspeed",
        "pipeline parallel": "pipeline_parallel_size pipeline_parallel_degree pp",
        "mixture-of-experts models": "expert_parallel_size ep",
        "streamed datasets": "streaming",
        "NEFTune": "neftune_noise_alpha",
        "label smoothing in SFT": "label_smoothing_factor",
        "early stopping": "early_stopping_patience",
    }
)
"""What other tools have and dtrain does not have yet."""


def answer(key: str) -> str | None:
    """What to say to the unknown `key`, with dots or without, or None where dtrain has no answer of its own."""
    parts = key.removesuffix(".enabled").split(".")
    for word in (".".join(parts[-2:]), parts[-1]):
        if word in OURS:
            return f"dtrain's word for it is {OURS[word]}"
        if word in NOT_YET:
            return f"dtrain does not have this yet: {NOT_YET[word]}"
    return None
