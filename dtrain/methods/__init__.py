"""Training methods: which data, which loss, which metrics. README.md explains how to add one.

method                       the base class of methods, and the part of a run that a method uses
sections                     the keys of the methods; imports no torch
sft, dpo, kto, distill, reward    the methods; method grpo is in dtrain.rl

The table of the methods is dtrain.training.METHODS. Importing this package imports no torch: `Method` is imported when
it is first used (PEP 562), because recipes are typed with the classes of `sections`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dtrain.methods.method import Method
else:  # a type checker would accept any name from __getattr__

    def __getattr__(name: str) -> Any:
        if name != "Method":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from dtrain.methods.method import Method

        return Method


__all__ = ["Method"]
