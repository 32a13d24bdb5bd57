"""The rewards' process.

    in    ("load", rewards)          (name, module, function, options) each
          ("batch", {name: values})  what the calls that follow are about; no answer
          ("call", index)            one reward over the batch
    out   {"ready": true}            all rewards are loaded
          {"values": [..]}           numbers and null

or what went wrong, as `child` says it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from dtrain.rollout.child import Answer, Tell, attempt, serve
from dtrain.rollout.rewards import calls


def main(parent: int) -> None:
    """Serve calls until the parent closes the pipe. Never returns."""
    serve(parent, _RewardServer().handle)


class _RewardServer:
    """The rewards that are loaded, and the batch that they are about."""

    def __init__(self) -> None:
        self.functions: list[tuple[str, Callable[..., Any]]] = []
        self.batch: calls.Batch = {}

    def handle(self, kind: str, content: Any, tell: Tell) -> None:
        if kind == "batch":
            self.batch = content
        else:
            tell(attempt(partial(self._load if kind == "load" else self._call, content)))

    def _load(self, rewards: list[tuple]) -> Answer:
        self.functions = [(name, calls.load(*where)) for name, *where in rewards]
        return {"ready": True}

    def _call(self, index: int) -> Answer:
        name, function = self.functions[index]
        return {"values": calls.call(name, function, self.batch)}
