"""Methods: what a batch is, which loss, which metrics. One loop, small methods. README.md says how to add one.

method                       the base of the methods, and the part of a run that a method uses
sft, dpo, kto, distill, reward    each method with its section; method grpo is in dtrain.rl

The table of the methods is dtrain.training.METHODS.
"""

from dtrain.methods.method import Method

__all__ = ["Method"]
