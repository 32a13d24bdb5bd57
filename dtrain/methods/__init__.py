"""Training methods: which data, which loss, which metrics. README.md explains how to add one.

method                       the base class of methods, and the part of a run that a method uses
sft, dpo, kto, distill, reward    the methods, each with its section of the recipe; method grpo is in dtrain.rl

The table of the methods is dtrain.training.METHODS.
"""

from dtrain.methods.method import Method

__all__ = ["Method"]
