"""Metrics of a run: their fields, writing them to files and services, and reading them again. Only rank 0 writes.

metrics   the recorder, which sends the rows of a run to every sink
sinks     metrics.jsonl, TensorBoard, Weights & Biases
terminal  the progress bar and the lines of a run, escaping of control characters, small plots
records   the table of a row's fields; reading rows and completions, also while the run continues

Importing this package imports no torch.
"""

from dtrain.training.metrics.metrics import Recorder, build, memory_gib, model_flops_utilisation, package_problems

__all__ = ["Recorder", "build", "package_problems", "memory_gib", "model_flops_utilisation"]
