"""What a run writes down: metrics.jsonl, TensorBoard, Weights & Biases, the progress bar. Rank 0 alone writes."""

from dtrain.metrics.hardware import memory_gib, model_flops_utilisation, peak_flops
from dtrain.metrics.metrics import Metrics, build
from dtrain.metrics.sinks import cut_jsonl

__all__ = ["Metrics", "build", "cut_jsonl", "memory_gib", "model_flops_utilisation", "peak_flops"]
