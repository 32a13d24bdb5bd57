"""Metrics of a run, and its record of them. Rank 0 alone writes. No torch before it is asked of a device.

metrics   the rows of a run
sinks     metrics.jsonl, TensorBoard, Weights & Biases
terminal  the bar and the lines of a run, words made harmless, small plots
records   the table of a row's fields; rows and completions read again
"""

from dtrain.training.metrics.metrics import Recorder, build, memory_gib, model_flops_utilisation, package_problems

__all__ = ["Recorder", "build", "package_problems", "memory_gib", "model_flops_utilisation"]
