"""Every method by the name that a recipe calls it by."""

from dtrain.methods.distill import DistillMethod
from dtrain.methods.dpo import DpoMethod
from dtrain.methods.grpo import GrpoMethod
from dtrain.methods.method import Method
from dtrain.methods.sft import SftMethod

METHODS: dict[str, type[Method]] = {"sft": SftMethod, "dpo": DpoMethod, "grpo": GrpoMethod, "distill": DistillMethod}
