"""Every method by the name that a recipe calls it by."""

from dtrain.methods.distill import Distill
from dtrain.methods.dpo import Dpo
from dtrain.methods.grpo import Grpo
from dtrain.methods.method import Method
from dtrain.methods.sft import Sft

METHODS: dict[str, type[Method]] = {"sft": Sft, "dpo": Dpo, "grpo": Grpo, "distill": Distill}
