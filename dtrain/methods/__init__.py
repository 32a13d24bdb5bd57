"""Methods: what a batch is, which loss, which metrics. One loop, small methods."""

from dtrain.methods.sft import Sft

METHODS = {"sft": Sft}
