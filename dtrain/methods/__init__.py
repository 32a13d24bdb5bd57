"""Methods: what a batch is, which loss, which metrics. One loop, small methods."""

from dtrain.methods.method import Method
from dtrain.methods.sft import Sft

METHODS: dict[str, type[Method]] = {"sft": Sft}
