"""A model on a mesh with its optimizer.

policy                the one object through which trainer and methods train
build, precision      from a recipe to a model on its mesh; its dtypes
trained               which of its parameters are trained
batching              a caller's batch at the door, and its micro-batches
score                 what a loss may ask of the model
reference, teacher    frozen weights of the same model; another model
reward_model          another model with a head of one output, which rates texts
saved                 what it saves and reads
memory, weights       weights moved away and back; given to whoever generates
"""

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
