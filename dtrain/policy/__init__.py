"""A model on a mesh with its optimizer.

policy                the object through which trainer and methods train. Read this first
build                 a model on its mesh, and which of its parameters are trained
optimizer             a recipe's optimizer, and the optional memory features that it uses
batching              checking a caller's batch, and its micro-batches
prompt_sharing        documents that begin alike: finding them, and the row in which a beginning is computed once
score                 what a loss can read of the model
results               what a step returns, and its events, for code that measures it
options               the sections of a recipe that a policy reads, its dtypes, and options for building
reference             frozen weights of the same model
other_models          a teacher for distillation, and a reward model that scores texts
checkpoint            saving and loading, of one model or of several under their names
offloader             weights and optimizer state moved to host memory and back; the device's memory and profiler
weights               full tensors for inference engines, sent in buckets; the bytes of a rank's weights
worker                the policy under NeMo-RL's name and keywords
"""

from dtrain.parallel.fsdp import unshard_fsdp2_model
from dtrain.policy.batching import Batching, DynamicShapes, Fixed, Packed
from dtrain.policy.checkpoint import load_models, save_models
from dtrain.policy.offloader import get_cpu_state_dict
from dtrain.policy.options import BuildOptions
from dtrain.policy.policy import Policy
from dtrain.policy.results import StepObserver, StepResult, UpdateResult
from dtrain.policy.weights import WeightReceiver
from dtrain.policy.worker import DTensorPolicyWorker

__all__ = [
    "Batching",
    "BuildOptions",
    "DTensorPolicyWorker",
    "DynamicShapes",
    "Fixed",
    "Packed",
    "Policy",
    "StepObserver",
    "StepResult",
    "UpdateResult",
    "WeightReceiver",
    "get_cpu_state_dict",
    "load_models",
    "save_models",
    "unshard_fsdp2_model",
]
