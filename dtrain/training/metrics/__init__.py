"""Metrics of a run: their fields, writing them to files and services, and reading them again. Only rank 0 writes.

metrics   the recorder, which sends the rows of a run to every sink
sinks     metrics.jsonl, and the interface of trackers
trackers  TensorBoard, Weights & Biases, trackio, MLflow, SwanLab, and classes that a recipe names
terminal  the progress bar and the lines of a run, escaping of control characters, small plots
records   the table of a row's fields; reading rows and completions, also while the run continues

Importing this package imports no torch.
"""

from dtrain.training.metrics.metrics import Recorder, build, memory_gib, model_flops_utilisation
from dtrain.training.metrics.sinks import MetricSink, TrackedRun
from dtrain.training.metrics.trackers import SINKS_KEY, option_problems, package_problems, tagged

__all__ = [
    "SINKS_KEY",
    "MetricSink",
    "Recorder",
    "TrackedRun",
    "build",
    "memory_gib",
    "model_flops_utilisation",
    "option_problems",
    "package_problems",
    "tagged",
]
