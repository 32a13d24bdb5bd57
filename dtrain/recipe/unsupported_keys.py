"""Keys of other tools that dtrain does not have: those that it needs no key for, and those that are not there yet.

`key_aliases` looks here after its own table, and names the tools.
"""


def by_word(table: dict[str, str]) -> dict[str, str]:
    """Return text by word, of a table from a text to words with blanks between them."""
    return {word: text for text, words in table.items() for word in words.split()}


NEEDLESS = by_word(
    {
        "`dtrain run` trains; `dtrain eval` answers and judges": "do_train do_predict predict_with_generate",
        "what it saves is in train.compile, train.activation_checkpointing and data.packing": (
            "use_unsloth use_unsloth_gc use_liger_kernel enable_liger_kernel use_liger_loss liger_kernel_config "
            "dpo_use_liger_kernel liger_rope liger_rms_norm liger_glu_activation liger_layer_norm "
            "liger_fused_linear_cross_entropy use_kernels unsloth_tiled_mlp lora_mlp_kernel lora_qkv_kernel "
            "lora_o_kernel flash_attn_cross_entropy flash_attn_rms_norm flash_attn_fuse_mlp"
        ),
        "the loss is computed in tiles, and logits are never whole": (
            "chunked_cross_entropy chunked_cross_entropy_num_chunks tiled_mlp loss_chunk_size num_output_chunks"
        ),
        "no code of a model's repository is run; dtrain has its families built in": (
            "trust_remote_code type_of_model model_type tokenizer_type auto_model processor_type "
            "is_llama_derived_model is_mistral_derived_model is_qwen_derived_model"
        ),
        "tokens come from the model's tokenizer files": (
            "special_tokens tokens eos_token pad_token bos_token unk_token eot_tokens use_fast_tokenizer "
            "tokenizer_use_fast tokenizer_legacy padding_side add_eos_token add_bos_token split_special_tokens "
            "fix_tokenizer"
        ),
        "weights are read in parts, by the ranks that hold them": (
            "low_cpu_mem_usage device_map_planner_kwargs max_memory offload_folder use_safetensors "
            "save_safetensors cpu_ram_efficient_loading sync_module_states fsdp_cpu_ram_efficient_loading"
        ),
        "a packed row is whole, and other rows are padded to the longest": (
            "pad_to_sequence_len pad_to_max_length pad_to_multiple_of length_column_name "
            "sample_packing_eff_est sample_packing_group_size sample_packing_bin_size packing_strategy "
            "multipack_real_batches"
        ),
        "columns are found by name, and other columns stay with the row": (
            "remove_unused_columns label_names ignore_pad_token_for_loss"
        ),
        "tokenized sets are kept and found again by their content": (
            "overwrite_cache load_from_cache_file skip_prepare_dataset is_preprocess preprocess_iterable "
            "data_shared_file_system preprocessing_batch_size dataset_keep_in_memory dataset_kwargs"
        ),
        "each epoch's order is a function of run.seed, and a resumed run goes on at the next row": (
            "ignore_data_skip dataloader_drop_last dataloader_pin_memory dataloader_persistent_workers "
            "dataloader_prefetch_factor full_determinism use_seedable_sampler"
        ),
        "losses count tokens over all ranks and micro-batches": "average_tokens_across_devices num_items_in_batch",
        "activation checkpointing is of the kind without reentrance": (
            "gradient_checkpointing_kwargs activation_checkpointing_kwargs use_reentrant use_reentrant_gc"
        ),
        "the mesh is FSDP2's, made from the section parallel": (
            "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_backend ddp_static_graph "
            "accelerator_config parallelism_config local_rank fsdp_transformer_layer_cls_to_wrap "
            "transformer_layer_cls_to_wrap fsdp_auto_wrap_policy auto_wrap_policy use_orig_params "
            "state_dict_type fsdp_state_dict_type final_state_dict_type fsdp_final_state_dict_type "
            "fsdp_offload_params fsdp_reshard_after_forward fsdp_sharding_strategy fsdp_backward_prefetch "
            "fsdp_use_orig_params"
        ),
        "matrix products follow torch's own setting of TF32": "tf32 float32_mixed_precision",
        "keys and values are cached while completions are drawn only": "use_cache use_kv_cache cache_implementation",
        "memory is reported by the run, and planned by `dtrain plan`": (
            "torch_empty_cache_steps gc_steps gc_collect_steps gpu_memory_limit skip_memory_metrics"
        ),
        "metrics.jsonl has every step, and TensorBoard draws it": (
            "plot_loss logging_strategy logging_first_step logging_nan_inf_filter include_num_input_tokens_seen "
            "include_tokens_per_second include_tkps include_effective_tokens_per_second disable_tqdm log_level "
            "print_param_status save_first_step log_on_each_node profiler_output_dir"
        ),
        "the hub's own login is used, `hf auth login`, and its cache, HF_HOME": (
            "token hf_token hub_token hf_hub_token use_auth_token hf_use_auth_token cache_dir local_files_only"
        ),
        "`dtrain push RUN owner/name` uploads a run's model": (
            "push_to_hub hub_model_id hub_strategy hub_private_repo hub_always_push hub_revision "
            "push_adapter_to_hub push_dataset_to_hub export_hub_model_id push_to_hub_merged"
        ),
        "`dtrain export RUN OUT` writes whole models and adapters, after the run": (
            "export_dir export_size export_device export_legacy_format merge_lora save_method "
            "save_pretrained_merged merge_adapter lora_on_cpu"
        ),
        "`dtrain generate` and `dtrain serve` answer with a model": (
            "do_sample num_beams infer_backend gradio_title gradio_share gradio_server_name gradio_server_port "
            "vllm_maxlen vllm_gpu_util vllm_config"
        ),
        "a model's config.json says how long its contexts are": "rope_scaling rope_theta yarn use_pose",
        "dtrain starts its processes itself, or torchrun and SLURM do": (
            "master_addr master_port machine_rank num_machines use_ray resources_per_worker ray_init_kwargs "
            "cloud launcher"
        ),
        "the server is yours to start: grpo.engine=http, grpo.server.urls": (
            "vllm_gpu_memory_utilization gpu_memory_utilization vllm_tensor_parallel_size vllm_max_model_length "
            "vllm_max_model_len vllm_group_port vllm_model_impl max_lora_rank max_loras disable_log_stats "
            "vllm_enforce_eager vllm_max_lora_rank"
        ),
        "adapters and new modules stand beside the base, which is never changed": (
            "create_new_adapter fan_in_fan_out lora_fan_in_fan_out peft_autocast_adapter_dtype "
            "autocast_adapter_dtype inference_mode bias use_onebitllms"
        ),
        "all of a base that lora trains beside is frozen": (
            "freeze_vision_tower freeze_multi_modal_projector freeze_language_model freeze_mm_modules "
            "finetune_vision_layers finetune_language_layers"
        ),
        "rows may hold tools and tool_calls, and the model's own template writes them": "tool_format",
        "of a loss the lowest value is best, of a reward the highest": "greater_is_better",
        "models have no dropout but lora.dropout": "disable_dropout attention_dropout hidden_dropout",
        "train.dtype and model.attention say how a model is loaded": "model_init_kwargs model_kwargs",
        "validation computes in train.dtype too": "bf16_full_eval fp16_full_eval",
        "a model is a causal language model, and its adapter says so": "task_type",
    }
)
"""Their word → why there is no key for it, or what does it."""

NOT_YET = by_word(
    {
        "weights in 8 bits; lora.quantize=nf4 holds them in 4": "load_in_8bit load_in_fp8",
        "nf4's scales quantised too; lora.quantize=nf4 holds one float32 for 64 weights": (
            "bnb_4bit_use_double_quant use_bnb_nested_quant double_quantization"
        ),
        "starts of adapters that change the base, PiSSA and the like; A is drawn, B is zero": (
            "init_lora_weights pissa_init pissa_iter pissa_convert loftq_config peft_init_lora_weights"
        ),
        "LoRA+; optimizer.lr is one rate for A and B": "loraplus_lr_ratio loraplus_lr_embedding",
        "adapters of other kinds than LoRA and DoRA": (
            "oft_rank oft_block_size oft_target relora relora_steps use_llama_pro alora_invocation_tokens "
            "arrow_config trainable_token_indices peft_trainable_token_indices layer_replication "
            "peft_layer_replication"
        ),
        "biases beside an adapter": "lora_bias",
        "DeepSpeed; parameters are sharded by FSDP2, parallel.dp_shard": (
            "deepspeed deepcompile ds3_gather_for_generation"
        ),
        "pipeline parallel": "pipeline_parallel_size pipeline_parallel_degree pp",
        "computing in 8 bits": "fp8 fp8_config fp8_backend float8 enable_float8 enable_fp8",
        "training for later quantisation": "qat qat_scheme",
        "streamed datasets; data.train.path reads files without loading them whole": (
            "streaming buffer_size dataset_streaming"
        ),
        "a part of the rows; write a shorter file": (
            "max_samples max_train_samples max_eval_samples num_samples limit_train dataset_shard_num "
            "dataset_exact_deduplication"
        ),
        "images, video and sound": (
            "image_max_pixels image_min_pixels video_max_pixels video_min_pixels video_maxlen image_size "
            "image_resize_algorithm media_dir processor_kwargs vision_config"
        ),
        "a system message for rows that have none; write it into the rows": "default_system default_system_message",
        "new tokens; add them to the tokenizer and resize the model before": (
            "resize_vocab add_tokens add_special_tokens new_special_tokens_config resize_token_embeddings_to_32x "
            "added_tokens_overrides resize_model_vocab"
        ),
        "activations on the host; train.activation_checkpointing computes them again": (
            "activation_offloading enable_activation_offloading layer_offloading offload_layers offload_embedding"
        ),
        "revisions of a model; model.path takes the directory of one": "model_revision revision_of_model",
        "an order of samples other than random (data.shuffle) or the files'": (
            "curriculum_sampling sample_packing_sequentially train_sampling_strategy"
        ),
        "min-p under grpo; `dtrain eval --min-p` has it": "min_p",
        "multi-task benchmarks; eval.path names your prompts, whose answers are judged": (
            "n_shot bench_dataset do_bench_eval"
        ),
        "NEFTune": "neftune_noise_alpha noisy_embedding_alpha",
        "an end where the loss explodes; train.patience ends a run that gets no better": (
            "early_stopping_threshold loss_watchdog_threshold loss_watchdog_patience"
        ),
        "other losses of SFT than the mean over tokens": (
            "use_asft_loss use_eaft_loss use_eaft eaft_alpha compute_accuracy"
        ),
        "PPO with a critic, and reward models within it; method=grpo needs neither, method=reward trains one": (
            "reward_model ppo_buffer_size ppo_score_norm ppo_target ppo_whiten_rewards reward_model_type "
            "reward_model_adapters vf_coef gae_lambda critic"
        ),
        "GaLore, APOLLO, BAdam, LISA; optimizer.state=int8 and parallel.optimizer_offload save memory": (
            "use_galore galore_rank galore_target galore_layerwise use_apollo apollo_rank apollo_target "
            "use_badam badam_mode lisa_n_layers lisa_step_interval optim_target_modules use_adam_mini "
            "qgalore_rank"
        ),
        "rates for some parameters; optimizer.lr and, with muon, optimizer.adam_lr are all": (
            "embedding_lr embedding_lr_scale embedding_learning_rate lr_groups lr_div_factor"
        ),
        "longer attention than a model was made for": "shift_attn s2_attention mixture_of_depths",
        "other trackers; metrics.wandb, metrics.tensorboard and metrics.jsonl": (
            "use_swanlab swanlab_project swanlab_mode use_mlflow mlflow_tracking_uri mlflow_experiment_name "
            "use_comet comet_project_name use_trackio trackio_project_name trackio_space_id wandb_entity "
            "wandb_mode wandb_watch wandb_log_model wandb_run_id"
        ),
        "a profiler; run torch.profiler around Python's dtrain.run(recipe)": (
            "profiler profiler._component_ profiler_steps enable_torch_profiler profiler_wait_steps "
            "profiler_active_steps"
        ),
        "plugins": "plugins",
        "weights of GPTQ and AWQ, and export to them": (
            "gptq export_quantization_bit export_quantization_dataset quantize_moe_experts"
        ),
        "a repetition penalty, which the policy's distribution would have to share": (
            "repetition_penalty length_penalty"
        ),
        "learning rates that start again": "lr_scheduler_restarts jagged_restart_steps num_cycles",
        "validation at the start; eval.at_start has the model's answers judged there": "eval_on_start eval_delay",
    }
)
"""What other tools have and dtrain does not have yet."""
