"""Stages of `resolve`, a file each, in the order in which they run.

outputs      the run's directory, its metrics, its export
tokenizer    the tokenizer
model        precision, the models and the optimizer on meta, digests of what is read
data         the rows of the splits
sizes        the method, the batch and the steps
start        the checkpoint that the run goes on from

A stage fills its fields of the `RunSpec`, and returns whether the next one has what it needs.
"""

from collections.abc import Callable
from typing import Any

Stage = Callable[[Any, Any], bool]  # (RunSpec, Host)


def skip(spec: Any, host: Any) -> bool:
    """Leave a stage out."""
    return True
