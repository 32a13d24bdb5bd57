"""A model on a mesh with its optimizer."""

from dtrain.policy.batching import Batching, DynamicShapes, Fixed, Packed
from dtrain.policy.memory import get_cpu_state_dict, unshard_fsdp2_model
from dtrain.policy.policy import Policy
from dtrain.policy.weights import WeightReceiver

__all__ = [
    "Batching",
    "DynamicShapes",
    "Fixed",
    "Packed",
    "Policy",
    "WeightReceiver",
    "get_cpu_state_dict",
    "unshard_fsdp2_model",
]
