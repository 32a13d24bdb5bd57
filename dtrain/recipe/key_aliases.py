"""Names of keys and values in other tools, and dtrain's names for the same things.

The tools: Hugging Face's TrainingArguments, PEFT and TRL, Axolotl, LLaMA-Factory, Unsloth, torchtune, torchtitan, NeMo
and NeMo-RL, Megatron, verl. Looked up by the last part of an unknown key, so `learning_rate` and
`training_args.learning_rate` get one answer, or by the last two where these are named; `sequence_packing.enabled` is
looked up as `sequence_packing`. `unsupported_keys` has the words that have no key here.
"""

import re
from collections.abc import Collection
from typing import Any

from dtrain.base import ranges
from dtrain.recipe.unsupported_keys import NEEDLESS, NOT_YET, by_word

OURS = by_word(
    {
        "method, sft | dpo | kto | grpo | distill | reward; pretraining is sft with data.train.format=text": (
            "stage rl task training_type"
        ),
        "run.name": (
            "run_name wandb_name wandb_run_name ray_run_name swanlab_run_name mlflow_run_name trackio_run_name "
            "experiment_name"
        ),
        "run.dir and run.name: a run's directory is run.dir/run.name": "output_dir save_dir logging_dir",
        "run.seed": "seed data_seed random_seed random_state",
        "launch.nproc": (
            "nproc_per_node num_gpus nproc num_processes n_gpu n_gpus gpus devices ngpu ray_num_workers world_size"
        ),
        "launch.device=cpu": "use_cpu no_cuda",
        "launch.device: auto | cpu | cuda; CUDA_VISIBLE_DEVICES chooses among GPUs": "device_map",
        "launch.collective_timeout: in seconds": "ddp_timeout",
        "model.path, a directory or an id of the hub": (
            "model_name_or_path model_name base_model pretrained_model_name_or_path model_id model_path "
            "model.name model.model model.id model.model_name model.name_or_path"
        ),
        "model.path, where training starts; a run saves under run.dir/run.name/checkpoints": "checkpoint_dir",
        "model.path: the tokenizer is read from the model's directory": (
            "tokenizer tokenizer_name tokenizer_config tokenizer_name_or_path tokenizer_path"
        ),
        "model.init=scratch": "train_from_scratch from_scratch reinit_weights",
        "model.attention, auto | sdpa | varlen": (
            "attn_implementation flash_attn flash_attention use_flash_attention use_flash_attention_2 "
            "flash_attention_2 sdp_attention sdpa_attention xformers_attention flex_attention eager_attention "
            "sage_attention attention_implementation"
        ),
        "data.train.split": "dataset_split dataset_train_split train_split",
        "data.train.subset": "dataset_config dataset_config_name dataset_subset",
        "data.train.revision": "dataset_revision",
        "data.train.columns: our names of columns with the file's": (
            "column_map column_mapping columns field_messages dataset_text_field text_column field_instruction"
            " field_output message_property_mappings prompt_column response_column"
        ),
        "data.train.path, files, URLs or a dataset's id on the hub": (
            "dataset dataset_name dataset_id dataset.path dataset.name data.name data.dataset data.file"
        ),
        "data.train.path: the whole path; no dataset_info.json is read": "dataset_dir",
        "data.train.path": (
            "dataset_path data_path data_files train_dataset train_file train_files data.path training_data"
        ),
        "data.train.path, a list of them, or data.train.sources with weights; the format is found by itself": (
            "datasets"
        ),
        "data.train.sources, [{path, weight}]: each has a weight": "interleave_probs mix_strategy train.weight",
        "data.train.path, with data.train.format=text": "pretraining_dataset",
        "data.train.format, messages | sharegpt | alpaca | prompt_completion | text | tokenized | preference": (
            "dataset_format dataset_type formatting data.format data.type"
        ),
        "data.train.format=preference": "ranking",
        "data.val, a section with a path": "eval_dataset test_datasets val_dataset validation_dataset",
        "data.val, a share such as 0.05, or a section with a path": (
            "val_set_size val_size test_split_size validation_split eval_split_ratio test_size"
            " validation_split_percentage"
        ),
        "data.val.path": "validation_file val_files eval_file val_file val_path",
        "data.max_length": (
            "cutoff_len max_seq_len max_seq_length max_total_sequence_length sequence_len seq_len "
            "model_max_length sequence_length context_length block_size max_len n_ctx"
        ),
        "data.max_length: prompt and completion together": "max_prompt_length max_prompt_len max_target_length",
        "data.packing": "sample_packing packed sequence_packing neat_packing multipack",
        "data.packing: it counts for validation too": "eval_sample_packing eval_packing",
        "data.packing, whose rows need no padding": "padding_free batch_flattening",
        "data.loss_on, assistant | completion | last | all": (
            "train_on_inputs train_on_input train_on_prompt roles_to_train"
        ),
        "data.loss_on=assistant": "assistant_only_loss",
        "data.loss_on=completion": "completion_only_loss train_on_responses_only train_on_completions_only",
        "data.loss_on=last": "only_unmask_final mask_history",
        "data.too_long, truncate | drop | error": "truncation_mode truncation excess_length_strategy",
        "data.shuffle": "shuffle_merged_datasets shuffle_dataset shuffle_data",
        "data.shuffle=false": "disable_shuffling",
        "data.num_workers": (
            "dataloader_num_workers dataset_num_proc preprocessing_num_workers dataset_processes num_proc"
        ),
        "data.cache_dir: where tokenized sets are kept": "dataset_prepared_path tokenized_path",
        "data.chat_template: a file, or null for the model's own": (
            "template chat_template chat_template_jinja chat_template_path prompt_template"
        ),
        "data.template_kwargs": "chat_template_kwargs",
        "data.template_kwargs, {enable_thinking: false}": "enable_thinking",
        "parallel.dp_replicate": "data_parallel_replicate_degree data_parallel_replicate_dim dp_replicate_size",
        "parallel.ep": "expert_parallel_size expert_model_parallel_size expert_parallel_degree ep_size",
        "moe.balance": "moe_aux_loss_coef router_aux_loss_coef output_router_logits aux_loss_coef",
        "parallel.dp_shard": (
            "data_parallel_size data_parallel_shard_degree data_parallel_shard_dim dp_size dp_shard_size"
        ),
        "parallel.dp_shard: parameters are sharded by FSDP2 always": "fsdp fsdp_config fsdp_version ddp zero_stage",
        "parallel.cp": (
            "context_parallel_size context_parallel_degree context_parallel_dim cp_size sequence_parallel_degree "
            "sequence_parallel_size"
        ),
        "parallel.tp": (
            "tensor_parallel_size tensor_parallel_degree tensor_parallel_dim tensor_model_parallel_size tp_size"
        ),
        "parallel.cpu_offload": "offload_params fsdp_cpu_offload param_offload",
        "parallel.optimizer_offload": "offload_optimizer optimizer_in_cpu optimizer_cpu_offload",
        "train.steps": "max_steps max_num_steps num_steps max_train_steps num_train_steps training_steps total_steps",
        "train.steps: in place of train.epochs": "max_steps_per_epoch",
        "train.epochs": "num_train_epochs num_epochs epoch max_num_epochs n_epochs max_epochs",
        "train.global_batch (all ranks, one optimizer step) and train.micro_batch (one rank, at once)": "batch_size",
        "train.global_batch": "train_batch_size train_global_batch_size global_batch_size total_batch_size",
        "train.global_batch: it is micro_batch × accumulation × dp": (
            "gradient_accumulation_steps gradient_accumulation grad_accum grad_accumulation_steps steps_per_generation"
        ),
        "train.global_batch: counted in completions": "ppo_mini_batch_size",
        "train.micro_batch": (
            "per_device_train_batch_size micro_batch_size train_micro_batch_size device_batch_size "
            "per_gpu_train_batch_size"
        ),
        "train.dynamic_batch, with data.packing=false": (
            "use_dynamic_bsz use_dynamic_batch use_dynamic_batch_size dynamic_batching group_by_length"
        ),
        "train.micro_batch: under train.dynamic_batch a micro-batch has up to micro_batch × data.max_length tokens": (
            "ppo_max_token_len_per_gpu max_token_len_per_gpu log_prob_max_token_len_per_gpu train_mb_tokens "
            "logprob_mb_tokens max_tokens_per_gpu train_max_tokens_per_gpu"
        ),
        "train.micro_batch: it counts for validation too": "per_device_eval_batch_size eval_batch_size",
        "train.micro_batch: `dtrain plan RECIPE --search` finds it": "auto_find_batch_size",
        "train.dtype=bfloat16": "bf16 bfloat16 load_in_16bit",
        "train.dtype=float16": "fp16 float16",
        "train.dtype=float32": "fp32 float32",
        "train.dtype": "torch_dtype precision mixed_precision compute_dtype infer_dtype",
        "train.masters=bfloat16, weights without a float32 copy": "pure_bf16",
        "train.max_grad_norm": "max_grad_norm gradient_clipping clip_grad_norm grad_clip",
        "train.activation_checkpointing, none | full | mlp | selective": (
            "gradient_checkpointing enable_activation_checkpointing use_gradient_checkpointing "
            "selective_checkpointing recompute_granularity"
        ),
        "train.activation_checkpointing=none": "disable_gradient_checkpointing",
        "train.compile: true or false": "torch_compile_backend torch_compile_mode torch_compile_options",
        "train.compile": "torch_compile compile_model unsloth_force_compile",
        "train.freeze, patterns of parameter names": "freeze frozen_parameters freeze_modules",
        "train.train_only, patterns of parameter names": (
            "unfrozen_parameters freeze_trainable_layers freeze_trainable_modules freeze_extra_modules "
            "finetune_last_n_layers"
        ),
        "train.skip_nonfinite": "skip_nan_steps",
        "lora={}, a section whose keys have defaults, or null for full fine-tuning": (
            "use_lora use_peft peft peft_config lora_config adapter_config"
        ),
        "lora={} for lora, lora.quantize=nf4 for qlora, or null for full fine-tuning": "adapter finetuning_type",
        "lora=null: all weights are trained": "full_finetuning",
        "lora.quantize=nf4": "qlora load_in_4bit quantize_base quantization quantization_config use_qlora use_4bit",
        "lora.quantize, nf4 | none": "quantization_bit quantization_method bnb_4bit_quant_type quantization_type",
        "train.dtype: 4-bit weights are computed with in it too": "bnb_4bit_compute_dtype",
        "lora.rank": "r lora_r lora_rank peft.dim lora.dim adapter_dim lora.r lora_dim",
        "lora.alpha": "lora_alpha peft.alpha",
        "lora.dropout": "lora_dropout peft.dropout",
        "lora.target, all-linear | a list of names | a regular expression": (
            "lora_target lora_target_modules target_modules lora_attn_modules lora.targets lora.modules"
        ),
        "lora.target, a list in which experts, experts.gate_up_proj and experts.down_proj are a mixture's": (
            "lora_target_parameters target_parameters"
        ),
        "lora.target=all-linear": "lora_target_linear match_all_linear",
        "lora.target: a list in which gate_proj, up_proj and down_proj are the MLP's": (
            "apply_lora_to_mlp finetune_mlp_modules"
        ),
        "lora.target: a list in which q_proj, k_proj, v_proj and o_proj are the attention's": (
            "finetune_attention_modules"
        ),
        "lora.modules_to_save=[lm_head], trained whole: the head gets no adapter": "apply_lora_to_output",
        "lora.exclude, a list of names or a regular expression": "exclude_modules lora_exclude_modules",
        "lora.target: a regular expression for whole names": (
            "layers_to_transform layers_pattern peft_layers_to_transform peft_layers_pattern"
        ),
        "lora.modules_to_save": "lora_modules_to_save additional_target modules_to_save",
        "lora.rslora": "use_rslora peft_use_rslora",
        "lora.dora": "use_dora peft_use_dora",
        "lora.rank_pattern": "rank_pattern lora_rank_pattern",
        "lora.alpha_pattern": "alpha_pattern lora_alpha_pattern",
        "lora.path, an adapter's directory to go on from": (
            "adapter_path adapter_name_or_path lora_model_dir lora_adapter_path lora_path adapter_checkpoint"
        ),
        "lora.path: an adapter's directory to go on from; a run resumes by itself, checkpoint.resume=auto": (
            "resume_from_adapter resume_from_checkpoint_adapter_only"
        ),
        "train.validate_every": (
            "eval_steps val_every eval_every eval_interval val_check_interval run_val_every_n_steps"
        ),
        "train.validate_every: counted in steps": "evals_per_epoch eval_epochs",
        "train.validate_every: steps between validations, or null": "eval_strategy evaluation_strategy do_eval",
        "train.patience, with checkpoint.keep_best": "early_stopping_patience early_stopping_steps",
        "eval.path, prompts whose answers are judged": "generate_samples num_generation_samples",
        "eval.show": "eval_table_size",
        "eval.sampling.max_new_tokens": "eval_max_new_tokens",
        "optimizer.name": "optim optimizer_type optimizer_name",
        "optimizer.name=muon": "use_muon",
        "optimizer.name, a name or an import path": "optimizer._component_ optimizer._target_",
        "scheduler.name, a name or an import path": "lr_scheduler._component_ lr_scheduler._target_",
        "dpo.loss or grpo.loss: sft has cross-entropy without a key": "loss._component_ loss_fn._target_",
        "model.path: its config.json names the family; lora={} and lora.quantize=nf4 stand for lora_ and qlora_": (
            "model._component_ model._target_"
        ),
        "model.path: the tokenizer is read from that directory": "tokenizer._component_ tokenizer._target_",
        "data.train.path, and data.train.format for what its rows are": "dataset._component_ dataset._target_",
        "model.path for what is read; a run saves under run.dir/run.name/checkpoints": "checkpointer._component_",
        "dpo.reference: start, a directory or an id of the hub": "ref_checkpointer._component_",
        "metrics.wandb, metrics.tensorboard: metrics.jsonl is always written": "metric_logger._component_",
        "lora={}: its keys are rank, alpha, dropout and target": "peft._target_",
        "optimizer.lr": "learning_rate lr max_lr peak_lr base_learning_rate",
        "optimizer.betas, a list of two": "adam_beta1 adam_beta2 beta1 beta2",
        "optimizer.eps": "adam_epsilon adam_eps",
        "optimizer.kwargs": "optim_args",
        "optimizer.state, float32 | bfloat16 | int8": "use_8bit_adam use_8bit_optimizer",
        "scheduler.name": "lr_scheduler_type lr_scheduler scheduler_type lr_schedule lr_decay_style",
        "scheduler.warmup, a share of the steps": "warmup_ratio warmup_fraction lr_warmup_fraction",
        "scheduler.warmup_steps": "num_warmup_steps lr_warmup_steps lr_warmup_iters warmup_iters",
        "scheduler.min_lr_ratio: a share of optimizer.lr": "min_lr lr_min",
        "scheduler.min_lr_ratio": "cosine_min_lr_ratio min_lr_rate",
        "scheduler.kwargs": "lr_scheduler_kwargs",
        "scheduler, a list of stages with steps each": "cosine_constant_lr_ratio",
        "checkpoint.every": (
            "save_steps save_period save_every_n_steps save_interval save_freq save_every checkpointing_steps"
        ),
        "checkpoint.every: counted in steps": "save_every_n_epochs saves_per_epoch",
        "checkpoint.every: steps between saves, or null": "save_strategy",
        "checkpoint.keep_last": "save_total_limit keep_last_n_checkpoints",
        "checkpoint.keep_best: val_loss or another metric; its save stays": "load_best_model_at_end",
        "checkpoint.keep_best": "metric_for_best_model metric_name",
        "checkpoint.keep_best: one is kept; and checkpoint.keep_last": "keep_top_k",
        "checkpoint.resume, auto | null | a step's directory": "resume_from_checkpoint",
        "checkpoint.resume": "resume auto_resume_from_checkpoints resume_checkpoint",
        "checkpoint.resume: null starts over, and wants another run.name": "overwrite_output_dir",
        "checkpoint.export: final | every | none": "save_only_model save_final_model",
        "metrics.every": "logging_steps log_every log_every_n_steps log_interval log_freq logging_interval",
        "metrics.tensorboard and metrics.wandb": "report_to logger loggers",
        "metrics.tensorboard": "use_tensorboard",
        "metrics.wandb": "wandb_project",
        "metrics.wandb: a project's name, or null": "use_wandb",
        "metrics.plan: planned memory beside what was measured": "log_peak_memory_stats",
        "dpo.loss, grpo.loss or sft.loss": "loss_type",
        "sft.loss=dft": "use_dft_loss",
        "sft.label_smoothing": "label_smoothing_factor",
        "dpo.loss": "pref_loss dpo_loss_type dpo_loss preference_loss",
        "dpo.loss_weights": "dpo_loss_weights",
        "dpo.beta": "pref_beta dpo_beta rl_beta kl_beta",
        "dpo.beta, with dpo.loss=orpo": "orpo_alpha",
        "dpo.label_smoothing": "dpo_label_smoothing",
        "dpo.reference, start | none | base | a directory or an id of the hub": (
            "ref_model reference_model ref_model_name_or_path"
        ),
        "dpo.reference=none": "reference_free",
        "dpo.sft_weight": "rpo_alpha sft_loss_weight pref_ftx",
        "dpo.f_divergence": "f_divergence_type",
        "dpo.use_weighting": "use_weighting",
        "dpo.precompute": "precompute_ref_log_probs",
        "dpo.sync_every: steps between moves of the reference, or null": "sync_ref_model",
        "dpo.sync_every": "ref_model_sync_steps",
        "dpo.sync_mix": "ref_model_mixup_alpha",
        "kto.desirable_weight": "desirable_weight kto_desirable_weight kto_chosen_weight",
        "kto.undesirable_weight": "undesirable_weight kto_undesirable_weight kto_rejected_weight",
        "kto.beta": "kto_beta",
        "reward.center_rewards_coefficient": "center_rewards_coefficient",
        "dpo.kwargs, {simpo_gamma: 0.5}": "simpo_gamma",
        "dpo.kwargs, {discopop_tau: 0.05}": "discopop_tau",
        "dpo.kwargs, {f_alpha_divergence_coef: 0.5}": "f_alpha_divergence_coef",
        "grpo, a section with keys of its own": "trl",
        "grpo.prompts_per_step: times grpo.group_size": "generation_batch_size",
        "grpo.prompts_per_step": "rollout_batch_size num_prompts_per_step",
        "grpo.group_size": "num_generations grpo_samples num_generations_per_prompt",
        "grpo.updates_per_rollout": "num_iterations ppo_epochs",
        "grpo.beta": "kl_loss_coef kl_coef kl_coeff",
        "grpo.beta or dpo.beta": "reference_policy_kl_penalty",
        "grpo.clip, [below, above]": (
            "epsilon epsilon_high ratio_clip_min ratio_clip_max clip_ratio_low clip_ratio_high clip_range cliprange"
        ),
        "grpo.kwargs, {delta: 2.0}": "delta",
        "grpo.sampling, a section": "generation_kwargs",
        "grpo.tools, [{fn: package.module.function}]": "tools tool_config_path tool_names",
        "grpo.tool_output: in characters": "max_tool_response_length",
        "grpo.environment, the import path of a maker of environments": "rollout_func environment_factory",
        "grpo.server, a section": "vllm",
        "grpo.kwargs, {top_entropy_quantile: 0.2}": "top_entropy_quantile",
        "grpo.kwargs, {sampling_correction: ...}, {sampling_clip_max: ...}": (
            "vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_importance_sampling_cap "
            "vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min"
        ),
        "grpo.kwargs, {off_policy_mask_threshold: ...}": "off_policy_mask_threshold",
        "grpo.kwargs, {importance_sampling_level: token | sequence}": "importance_sampling_level",
        "grpo.kwargs, {entropy_coef: ...}": "entropy_coeff entropy_coef",
        "grpo.advantage=leave_one_out with grpo.scale=leave_one_out": "use_leave_one_out_baseline",
        "grpo.advantage, group | leave_one_out | batch | none": "advantage_estimator adv_estimator",
        "grpo.scale, group | leave_one_out | batch | none": "scale_rewards normalize_rewards",
        "grpo.reward_model.path, a directory or an id of the hub": "reward_model_path reward_model.model.path",
        "grpo.rewards, [{fn, weight, kwargs}]": (
            "reward_funcs reward_functions reward_weights reward_fn reward_function"
        ),
        "grpo.mask_truncated": "mask_truncated_completions overlong_filtering",
        "grpo.dynamic_sampling, none | drop | refill": "use_dynamic_sampling skip_zero_advantage_batches",
        "grpo.sampling.max_new_tokens": (
            "sampling.max_tokens max_completion_length max_response_length max_generated_tokens max_new_tokens"
        ),
        "grpo.sampling.stop, a list of texts": "stop_strings stop_sequences stop_words",
        "grpo.engine=http: with grpo.server.urls": (
            "use_vllm vllm_server_host vllm_server_port vllm_mode fast_inference rollout_engine"
        ),
        "grpo.server.urls": "vllm_server_base_url",
        "grpo.server.start_timeout, in seconds": "vllm_server_timeout",
        "grpo.system_prompt": "system_prompt",
        "grpo.show: how many completions the terminal shows; samples.jsonl has all": (
            "log_completions num_completions_to_print"
        ),
        "grpo.max_turns": "max_tool_calling_iterations max_assistant_turns max_rollout_turns",
        "grpo.router_replay": (
            "enable_rollout_routing_replay use_rollout_routing_replay use_routing_replay enable_router_replay "
            "enable_return_routed_experts routing_replay"
        ),
        "grpo.offload": "vllm_enable_sleep_mode",
        "grpo.max_off_policy_steps": "max_staleness max_trajectory_age_steps",
        "distill.teacher, a directory or an id of the hub": (
            "teacher_model_name_or_path teacher.model_name teacher_checkpointer teacher_model"
        ),
        "distill.top_k": "topk_logits_k kd_top_k",
        "distill.temperature": "kd_temperature",
        "distill.student_share, with distill.samples=student": "lmbda",
        "checkpoint.export, whose directory `dtrain push RUN OWNER/NAME` sends to the hub": "push_to_hub hub_model_id",
    }
)
"""Their word → our key, or our key and how it counts. After a comma stands a remark, and a value can be taken over as
it is, or as `key=value` where theirs is true; after a colon or a second key it cannot (`moved`)."""

VALUES: dict[str, dict[str, str]] = {
    "method": {
        "sft": "pt pretrain pretraining cpt instruct instruction_tuning finetune",
        "dpo, with dpo.loss=orpo": "orpo",
        "dpo, with dpo.loss=simpo": "simpo cpo",
        "dpo, with dpo.loss=ipo": "ipo",
        "grpo, with grpo.loss=gspo": "gspo",
        "grpo, with grpo.advantage=leave_one_out": "rloo",
        "grpo, which needs no critic": "ppo",
        "grpo": "dapo reinforce rl rlhf rlvr",
        "dpo": "preference",
        "kto": "unpaired_preference",
        "sft, and the section lora={}": "lora qlora peft",
        "sft, with sft.loss=dft": "dft",
        "distill": "kd gkd distillation opd",
        "reward": "rm reward_model reward_modeling classification",
    },
    "dpo.loss": {
        "sigmoid, which is DPO's own": "dpo dpop sigmoid_loss logistic",
        "bco_pair": "bco",
        "sigmoid, with dpo.use_weighting=true": "wpo",
        "apo_zero or apo_down": "apo",
        "sppo_hard": "sppo",
        "nca_pair": "nca",
        "exo_pair": "exo",
        "robust": "rdpo cdpo robust_dpo",
        "sigmoid, with dpo.sft_weight=1": "sft rpo",
    },
    "grpo.loss": {
        "reinforce, with grpo.advantage=leave_one_out": "rloo",
        "reinforce": "pg policy_gradient vanilla",
        "dr_grpo": "drgrpo dr-grpo",
        "grpo, which needs no critic": "ppo",
    },
    "train.dtype": {"bfloat16": "bf16 mixed", "float16": "fp16 half 16", "float32": "fp32 float full 32 no"},
    "train.masters": {"bfloat16": "bf16", "float32": "fp32"},
    "train.activation_checkpointing": {"full": "true unsloth all block", "none": "false off no"},
    "optimizer.name": {
        "adamw": "adamw_torch adamw_torch_fused adamw_hf adamw_apex_fused fused_adamw torch.optim.adamw",
        "adam": "torch.optim.adam",
        "sgd": "torch.optim.sgd",
        "adamw, with optimizer.state=int8": (
            "adamw_8bit adamw_bnb_8bit adam8bit adamw8bit adamw_torch_8bit ao_adamw_8bit bitsandbytes.optim.adamw8bit "
            "torchao.optim.adamw8bit"
        ),
        "adamw, with optimizer.state=int8 and parallel.optimizer_offload=true": (
            "paged_adamw_8bit bitsandbytes.optim.pagedadamw8bit"
        ),
        "adamw, with parallel.optimizer_offload=true": "paged_adamw_32bit paged_adamw",
    },
    "scheduler.name": {
        "cosine, with scheduler.min_lr_ratio": "cosine_with_min_lr cosine_annealing cosineannealing cosineannealinglr",
        "cosine": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
        "constant, with scheduler.warmup": "constant_with_warmup",
        "cosine, with scheduler.warmup": "cosine_with_warmup",
        "linear, with scheduler.warmup": "linear_with_warmup",
        "wsd": "warmup_stable_decay",
    },
    "lora.target": {"all-linear": "all all_linear linear auto"},
    "lora.quantize": {
        "nf4": "4bit int4 4 bnb bitsandbytes qlora true",
        "nf4, in 4 bits; none has 8": "8bit int8 8 fp8 fp4",
        "none": "false no",
    },
    "model.attention": {
        "varlen": "flash_attention_2 fa2 fa3 flash flash_attention flash_attention_3",
        "sdpa": "eager math xformers disabled",
    },
    "model.linear_attention": {
        "fla": "flash triton flash-linear-attention fused",
        "torch": "chunk chunked eager naive",
    },
    "model.init": {"scratch": "random from_scratch", "pretrained": "weights finetune"},
    "data.train.format": {
        "messages": "openai chatml chat_template chat conversational conversation oai",
        "text": "completion pretrain pt raw corpus",
        "alpaca": "instruction instruct",
        "preference": "dpo ranking pairs chosen_rejected orpo",
        "auto": "json jsonl csv parquet hf",
    },
    "data.loss_on": {
        "assistant": "assistant_only responses response false",
        "completion": "answer output",
        "all": "full true",
    },
    "data.too_long": {
        "truncate": "keep_start cut",
        "truncate, which keeps the start of a row": "keep_end",
        "drop": "skip filter discard",
        "error": "raise",
    },
    "launch.device": {"cuda": "gpu nvidia 0 cuda:0 rocm", "cpu": "mps"},
    "checkpoint.resume": {"auto": "true latest last yes", "null": "false no none"},
    "checkpoint.export": {"final": "true last end", "none": "false never no", "every": "always steps"},
    "checkpoint.keep_best": {"val_loss": "eval_loss loss_val validation_loss", "val_reward_mean": "reward eval_reward"},
    "grpo.engine": {"http": "vllm sglang server", "native": "hf transformers local torch"},
    "grpo.advantage": {"group": "grpo gae", "leave_one_out": "rloo loo", "none": "reinforce"},
    "grpo.scale": {"group": "true std", "leave_one_out": "rloo loo", "none": "false no"},
    "grpo.rewards.fn": {
        "math_exact": "accuracy accuracy_reward math math_verify gsm8k correctness exact_match",
        "format_tags": "format format_reward think_format think_format_reward soft_format_reward strict_format_reward",
        "length_penalty": "length length_reward soft_overlong_punishment",
        "python_tests": "code code_reward code_execution binary_code prime_code",
        "cosine_length": "cosine cosine_scaled cosine_scaled_reward",
        "repetition_penalty": "repetition repetition_penalty_reward",
        "json_valid": "json json_format",
    },
    "launch.nproc": {"write how many; dtrain plan RECIPE says what each would hold": "auto gpu all max"},
    "parallel.dp_shard": {"write -1, which takes the ranks that are left": "auto all"},
    "data.max_length": {"write a number of tokens, such as 4096": "auto max model"},
    "train.micro_batch": {"write a number of rows, such as 1": "auto"},
    "train.compile": {"write true": "reduce-overhead max-autotune default inductor"},
    "metrics.wandb": {"write the project's name, such as metrics.wandb=my-project": "true", "write null": "false"},
    "run.name": {"write a name, such as run.name=first": "true", "leave it out, or write null": "false"},
    "checkpoint.init_from": {"write a run's directory, such as runs/first": "true", "write null": "false"},
    "data.chat_template": {
        "null": "tokenizer_default",
        "write a file's path; null takes the model's own": "true",
        "write null": "false",
    },
    "distill.kl": {"mixed": "both", "jsd": "js gkd", "forward": "fkl fwd", "reverse": "rkl rev"},
    "dpo.reference": {"none": "false no"},
}
"""Key → our value, and its remark after a comma, → their words for it. Looked up in lower case."""
_FAMILIES = by_word(
    {
        "columns": "field_ message_field_ message_property_",
        "delta": "sapo_ vespo_ dppo_",
        "use_galore": "galore_ qgalore_ apollo_ badam_ lisa_ dion_",
        "use_swanlab": "swanlab_ comet_ mlflow_ trackio_ otel_",
        "vllm_gpu_memory_utilization": "vllm_ sglang_",
        "infer_backend": "gradio_ generation_",
        "relora": "relora_ oft_ kt_",
        "enable_torch_profiler": "profiler_ profile_",
        "image_size": "image_ video_ audio_",
        "fp8": "fp8_ float8_",
        "use_ray": "ray_",
        "export_quantization_bit": "export_quantization_",
        "fsdp_backward_prefetch": "fsdp_ ddp_",
        "preprocessing_batch_size": "preprocess_ preprocessing_",
        "tokenizer_legacy": "tokenizer_",
    }
)
"""Where words of other tools are many: one that has the answer of all that begin so."""
_MEANT = {key: by_word(table) for key, table in VALUES.items()}


def answer(key: str) -> str | None:
    """Return the answer to the unknown `key`, with dots or without; None where dtrain has no answer of its own."""
    parts = _parts(key)
    for word in (".".join(parts[-2:]), parts[-1]):
        if word in OURS:
            return f"dtrain's word for it is {OURS[word]}"
        if word in NEEDLESS:
            return f"dtrain needs no key for it: {NEEDLESS[word]}"
        if word in NOT_YET:
            return f"dtrain does not have this yet: {NOT_YET[word]}"
    family = next((word for prefix, word in _FAMILIES.items() if parts[-1].startswith(prefix)), None)
    return answer(family) if family else None


def meant(key: str, value: Any) -> str | None:
    """Return our word for a `value` of `key` as other tools or people say it, with its remark; None where unknown."""
    return _MEANT.get(key, {}).get(str(value).lower())


def hint(key: str, value: str, known: Collection[str]) -> str:
    """Return the end of a refusal of `value` at `key`: the value meant, or all names in `known`."""
    near = meant(key, value)
    return f"; did you mean {near}?" if near else ranges.hint(value, known)


def moved(key: str, value: Any) -> tuple[str, Any] | None:
    """Return another tool's key as ours, with its value, whose word may yet be another tool's (`meant`); None where the
    table does not say that it is the same thing."""
    parts = _parts(key)
    entry = key if key in VALUES else OURS.get(".".join(parts[-2:])) or OURS.get(parts[-1]) or ""
    same = re.fullmatch(r"([a-z_0-9.]+)(=[^\s:,]+)?(?:,.*)?", entry)
    if not same or value is None or (same[2] and value is not True):
        return None
    return same[1], same[2].removeprefix("=") if same[2] else value


def _parts(key: str) -> list[str]:
    return key.lower().replace("-", "_").removesuffix(".enabled").split(".")
