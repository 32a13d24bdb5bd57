"""Completions in several turns: a recipe's environments, run on rank 0, around an engine that all ranks call."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dtrain.checkpoint.ranks import Ranks
from dtrain.data import Tokenizer
from dtrain.data.template import ChatTemplate
from dtrain.methods.engines import Draws
from dtrain.methods.rollout_buffer import Sample
from dtrain.rollout.environment import Observations, environment_seed, find_maker, run_episodes
from dtrain.rollout.request import AskStop, Completion, Request


@dataclass(frozen=True)
class _AtVersion:
    """An engine as the episodes call it."""

    engine: Draws
    version: int
    ask_stop: AskStop | None

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        return self.engine.generate(requests, self.version, self.ask_stop)


class Episodes:
    """Plays requests as episodes in environments that `path` makes. Collective. Raises UserError for a path that is not
    there."""

    def __init__(
        self, path: str, tokenizer: Tokenizer, template: ChatTemplate | None, *, max_turns: int, max_length: int
    ):
        self.tokenizer, self.template = tokenizer, template
        self.max_turns, self.max_length = max_turns, max_length
        self.ranks = Ranks()
        self._make: Any = None

        def find() -> None:
            self._make = find_maker(path)

        self.ranks.first(find)

    def play(
        self,
        engine: Draws,
        requests: Sequence[Request],
        rows: Sequence[Mapping[str, Any]],
        version: int,
        ask_stop: AskStop | None = None,
    ) -> list[Sample]:
        """An episode for each request, whose data row the environment is made with; in their order. Raises Interrupted
        as `engine` does."""
        environments: list[Any] = []

        def make() -> None:
            pairs = zip(requests, rows, strict=True)
            environments.extend(self._make(dict(row), environment_seed(request)) for request, row in pairs)

        self.ranks.first(make)
        is_chat = bool(rows) and isinstance(rows[0]["prompt"], list) and isinstance(rows[0]["prompt"][0], Mapping)
        episodes = run_episodes(
            _AtVersion(engine, version, ask_stop),
            requests,
            environments or None,
            Observations(self.tokenizer, self.template if is_chat else None),
            max_turns=self.max_turns,
            max_length=self.max_length,
            first=self.ranks.first,
        )
        return [
            Sample(one.prompt, one.ids, one.sampled, one.logprobs, one.finish, one.version, one.earned)
            for one in episodes
        ]
