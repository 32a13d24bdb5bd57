"""Keys of other tools that change no number of a run: trackers, logs, saving, machines, profilers.

A key that dtrain does not carry over stops a run, unless it is one of these. A key that nobody knows counts as one that
changes numbers, because the opposite mistake would train something else without a word.
"""

from collections.abc import Sequence

# The recipe's keys that change no number of the training, or the start of such keys.
RECIPE_KEYS = (
    "checkpoint.every",
    "checkpoint.keep_last",
    "data.cache_dir",
    "data.num_workers",
    "data.val",
    "launch.",
    "metrics.",
    "model.attention",
    "parallel.",
    "run.dir",
    "run.name",
    "train.activation_checkpointing",
    "train.activation_offload",
    "train.compile",
    "train.tile",
    "train.validate_every",
)
# A key of a file whose last part is one of these names changes no number.
NAMES = frozenset(
    """
    deepspeed deepcompile ds3_gather_for_generation use_kt use_v1_kernels streaming buffer_size
    loss_watchdog_threshold loss_watchdog_patience eval_on_start eval_delay n_shot bench_dataset do_bench_eval
    do_predict predict_with_generate report_to log_level log_level_replica log_on_each_node log_completions log_samples
    log_peak_memory_stats num_completions_to_print run_project name_prefix push_to_hub disable_tqdm verbose debug
    no_remove_unused_columns do_causal_lm_eval eval_causal_lm_metrics
    layer_offloading offload_layers offload_embedding pp pp_size pipeline_parallel_size pipeline_parallel_degree
    pipeline_model_parallel_size gc_steps use_vllm use_wandb ci notes tags group experiment_name project_name
    """.split()
)
# A key of a file that has one of these starts, in any of its parts, changes no number.
PREFIXES = (
    "comet",
    "hub_",
    "logger",
    "logging_",
    "mlflow",
    "otel",
    "profil",
    "push_to_hub_",
    "ray_",
    "save_",
    "skypilot",
    "slurm",
    "swanlab",
    "tensorboard",
    "trackio",
    "use_comet",
    "use_mlflow",
    "use_otel",
    "use_ray",
    "use_swanlab",
    "use_trackio",
    "wandb",
)


def may_change_numbers(source: str, recipe_keys: Sequence[str]) -> bool:
    """Check whether a run without a key of another tool's file may have other numbers.

    Args:
        source: The dotted key in the file.
        recipe_keys: The recipe's keys that it is for, if there are any.

    Example:
        >>> may_change_numbers("wandb_project", []), may_change_numbers("neftune_noise_alpha", [])
        (False, True)
        >>> may_change_numbers("save_steps", ["checkpoint.every"])
        False
    """
    parts = source.lower().replace("-", "_").split(".")
    if parts[-1] in NAMES or any(part.startswith(PREFIXES) for part in parts):
        return False
    if not recipe_keys:
        return True
    return not all(key.startswith(RECIPE_KEYS) for key in recipe_keys)
