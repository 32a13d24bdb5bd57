"""A sampled completion of one or several turns, as rollouts and environments fill it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from dtrain.inference.request import Completion


@dataclass
class Sample:
    """A completion of one or several turns: the ids of its prompt, its own and an environment's between them.

    ids, sampled, logprobs [s] each: tokens, whether the model drew them, and with what log-probability (0 where not).
    finish: stop, the environment was done; length, a completion was cut or the sequence is full; turns, there were as
    many as may be; lost, the environment failed, and what the completion is worth is unknown. version: the oldest
    weights that a token was drawn with, where the engine knows. earned: Σ of the steps' rewards, None where no step had
    one. longest: tokens of the longest turn that the model drew, infinite where one was cut. turns: completions drawn.
    calls, failures: answers of tools that were read, and those among them that say that a call failed. routed: as
    `Completion` has it, of each token what the first turn that read it says. metrics: the environment's, as they were
    last.
    """

    prompt: Sequence[int]
    ids: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: str = "turns"
    version: int | None = None
    earned: float | None = None
    longest: float = 0
    turns: int = 0
    calls: int = 0
    failures: int = 0
    routed: Tensor | None = field(default=None, compare=False)
    data_row: int = -1
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """Number of tokens, those of the prompt too."""
        return len(self.prompt) + len(self.ids)

    def add(self, ids: Sequence[int], logprobs: Sequence[float] | None = None) -> None:
        """Append tokens of the model, with their log-probabilities, or of the environment."""
        self.ids += ids
        self.sampled += [logprobs is not None] * len(ids)
        self.logprobs += [0.0] * len(ids) if logprobs is None else logprobs

    def take(self, completion: Completion) -> None:
        """Append a turn of the model."""
        self.add(completion.ids, completion.logprobs)
        self.turns += 1
        self.longest = max(self.longest, math.inf if completion.finish == "length" else len(completion.ids))
        routed, before = completion.routed, self.routed
        if routed is not None and before is not None:  # a later turn may have read a prompt anew, with other roundings
            is_known = before[:, 0, 0] >= 0
            routed = routed.clone()
            routed[: len(before)][is_known] = before[is_known]
        self.routed = routed
        known = [version for version in (self.version, completion.version) if version is not None]
        self.version = min(known, default=None)
