"""Methods: what a batch is, which loss, which metrics. One loop, small methods. README.md says how to add one.

method                               what every method can do
sft, dpo, grpo, distill              how each differs
objective, precompute                dpo: what is minimised; the reference's sums, once
collect, engines                     grpo: a rollout; what draws and judges it
rollout_buffer, table                grpo: a rollout as tensors; on the terminal
"""

from dtrain.methods.distill import Distill
from dtrain.methods.dpo import Dpo
from dtrain.methods.grpo import Grpo
from dtrain.methods.method import Method, Run
from dtrain.methods.sft import Sft

METHODS: dict[str, type[Method]] = {"sft": Sft, "dpo": Dpo, "grpo": Grpo, "distill": Distill}

__all__ = ["METHODS", "Method", "Run"]
