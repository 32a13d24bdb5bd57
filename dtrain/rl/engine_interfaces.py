"""Interfaces of the engines that draw completions, and of the players that draw them in several turns.

Every engine draws with the present weights: `generate` is collective, every rank passes all requests and gets all
completions, in their order, or Interrupted where a rank's `ask_stop` says yes meanwhile. `expect` tells the engine
which requests come next, for one that can draw ahead of time.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from dtrain.inference.request import AskStop, Completion, Request
from dtrain.rl.buffer import Sample


class RolloutEngine(Protocol):
    def generate(
        self, requests: Sequence[Request], version: int, ask_stop: AskStop | None = None
    ) -> list[Completion]: ...

    def expect(self, requests: Sequence[Request], version: int) -> None: ...


class EpisodePlayer(Protocol):
    """Player of completions in several turns, an environment answering each (`rl.environments.play`)."""

    def play(
        self,
        engine: RolloutEngine,
        requests: Sequence[Request],
        rows: Sequence[Mapping[str, Any]],
        version: int,
        ask_stop: AskStop | None = None,
    ) -> list[Sample]: ...
