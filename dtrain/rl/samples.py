"""A sampled completion of one or several turns. Rollouts and environments fill it turn by turn."""

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
        ids: Token ids of the model's turns and of the environment's observations between them, [s].
        sampled: Whether the model sampled each token, [s].
        logprobs: Log-probability with which each token was sampled, 0 for the environment's tokens, [s].
        finish: "stop" if the environment ended, "length" if a turn was cut or the sequence is full, "turns" at the
            largest number of turns, "lost" if the environment failed, so that the reward is unknown.
        version: Version of the oldest weights that sampled a token. None if the engine does not report versions.
        earned: Sum of the rewards of the environment's steps. None if no step had one.
        longest: Tokens of the model's longest turn, infinite if a turn was cut.
        turns: Number of turns of the model.
        calls: Number of tool calls that were answered.
        failures: Number of them that failed.
        routed: Experts of each token, as in `Completion`, from the first turn that read the token.
        data_row: Row of the data with the images of the prompt. -1 without images.
        metrics: The environment's last metrics.

    Example:
        >>> sample = Sample(prompt=[5, 6])
        >>> sample.append_completion(Completion([7, 8], [-0.5, -0.1], "stop", 3))
        >>> sample.append_tokens([9])  # an observation
        >>> sample.ids, sample.sampled, sample.length, sample.version
        ([7, 8, 9], [True, True, False], 5, 3)
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
        """Number of tokens, including the prompt."""
        return len(self.prompt) + len(self.ids)

    def append_tokens(self, ids: Sequence[int], logprobs: Sequence[float] | None = None) -> None:
        """Append tokens.

        Args:
            ids: Token ids.
            logprobs: Their log-probabilities. None for tokens of the environment, which the model did not sample.
        """
        self.ids += ids
        self.sampled += [logprobs is not None] * len(ids)
        self.logprobs += [0.0] * len(ids) if logprobs is None else logprobs

    def append_completion(self, completion: Completion) -> None:
        """Append a turn of the model."""
        self.append_tokens(completion.ids, completion.logprobs)
        self.turns += 1
        turn_length = math.inf if completion.finish == "length" else len(completion.ids)
        self.longest = max(self.longest, turn_length)
        self._merge_routed_experts(completion.routed)
        versions = [version for version in (self.version, completion.version) if version is not None]
        self.version = min(versions, default=None)

    def _merge_routed_experts(self, routed: Tensor | None) -> None:
        """Keep the experts of earlier turns, and take those of the new tokens from `routed`.

        A later turn may compute the earlier tokens again with other roundings, and so choose other experts for them.
        """
        if routed is not None and self.routed is not None:
            is_known = self.routed[:, 0, 0] >= 0
            routed = routed.clone()
            routed[: len(self.routed)][is_known] = self.routed[is_known]
        self.routed = routed
