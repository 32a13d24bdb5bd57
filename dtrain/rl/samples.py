"""A sampled completion of one or several turns, as rollouts and environments fill it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from dtrain.inference.request import Completion


@dataclass
class Sample:
    """A completion of one or several turns.

    Attributes:
        prompt: Token ids of the prompt.
        ids: Token ids of the model's turns and of the environment's answers between them, [s].
        sampled: Whether the model sampled each token, [s].
        logprobs: Log-probability with which each token was sampled, 0 for the environment's, [s].
        finish: "stop" if the environment ended, "length" if a turn was cut or the sequence is full, "turns" at the
            largest number of turns, "lost" if the environment failed, so that the reward is unknown.
        version: Version of the oldest weights that sampled a token, if the engine knows it.
        earned: Sum of the rewards of the steps. None if no step had one.
        longest: Tokens of the model's longest turn, infinite if a turn was cut.
        turns: Turns of the model.
        calls: Answers of tools that were read.
        failures: Those among `calls` that report a failed call.
        routed: Experts of each token, as in `Completion`, from the first turn that read the token.
        data_row: Sample of the data whose images the prompt has. -1 without images.
        metrics: The environment's last metrics.
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

    def append_tokens(self, ids: Sequence[int], logprobs: Sequence[float] | None = None) -> None:
        """Append tokens of the model, with their log-probabilities, or of the environment."""
        self.ids += ids
        self.sampled += [logprobs is not None] * len(ids)
        self.logprobs += [0.0] * len(ids) if logprobs is None else logprobs

    def append_completion(self, completion: Completion) -> None:
        """Append a turn of the model."""
        self.append_tokens(completion.ids, completion.logprobs)
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
