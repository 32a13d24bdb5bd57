"""Methods: what a batch is, which loss, which metrics. One loop, small methods."""

from dtrain.methods.distill import Distill
from dtrain.methods.dpo import Dpo
from dtrain.methods.grpo import Grpo
from dtrain.methods.method import Method, Run
from dtrain.methods.sft import Sft

METHODS: dict[str, type[Method]] = {"sft": Sft, "dpo": Dpo, "grpo": Grpo, "distill": Distill}

__all__ = ["METHODS", "Method", "Run"]
