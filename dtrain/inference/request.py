"""Requests to an engine and its completions: token ids in, token ids and log-probabilities out. No torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from dtrain.inference.chats import ImagePrompt
    from dtrain.models.common.micro_batch import Images

ShouldStop = Callable[[], bool]  # whether to give up what is being drawn


@dataclass(frozen=True)
class SamplingParams:
    """Settings of a draw: logits ÷ temperature, then top-k, then top-p of what is left, then min-p, renormalised.

    temperature 0 takes the likeliest token. top_k None, top_p 1.0 and min_p 0.0 keep everything; min_p keeps tokens of
    at least min_p times the likeliest one's probability (arXiv:2407.01082). A completion ends with a token of
    `stop_ids`, which it keeps, with the token that completes one of the texts in `stop`, or after `max_new_tokens`.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    stop_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Request:
    """Request for one completion of one prompt.

    The draw at position t depends on (seed, prompt_index, sample_index, t) alone: not on the batch, the mesh or the
    order of the requests. Requests with equal prompts share the work of reading the prompt. routed: whether the
    completion is to say which experts tokens went to. images: those of the prompt's tokens, as a batch of one row
    [1, S], on the host; None for a text. image_prompt: the same prompt for an engine that sends the images elsewhere.
    """

    prompt: Sequence[int]
    sampling: SamplingParams
    seed: int = 0
    prompt_index: int = 0
    sample_index: int = 0
    routed: bool = False
    images: "Images | None" = None
    image_prompt: "ImagePrompt | None" = None


@dataclass(frozen=True)
class Completion:
    """Tokens that were drawn, the stop token among them, and each one's log-probability where it was drawn.

    logprobs: of the distribution sampled from; at temperature 0 the log-softmax of the plain logits.
    finish: "stop" by a stop token or text, "length" by max_new_tokens.
    version: how many updates the weights had seen, where the engine knows; the oldest of the completion's tokens.
    routed: the experts that the tokens of prompt and completion went to, [tokens, layers, k] int16 on the host; -1
    where nobody says, as of the last one, which no forward has read; None where the engine was not asked.
    """

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: Literal["stop", "length"] = "length"
    version: int | None = None
    routed: "Tensor | None" = field(default=None, compare=False)


class RolloutEngine(Protocol):
    """Engine that draws completions with the present weights, of which `version` is the number of optimizer steps.
    is_remote: whether servers draw them, who take a request's images as `image_prompt`, not decoded, and may draw ahead
    of time."""

    is_remote: bool = False

    def generate(
        self, requests: Sequence[Request], should_stop: ShouldStop | None = None, *, version: int = 0
    ) -> list[Completion]:
        """Return the completions of `requests`, in order. Collective: every rank passes all requests and gets all
        completions, or Interrupted where a rank's `should_stop` says yes meanwhile."""
        ...

    def prefetch(self, requests: Sequence[Request], version: int) -> None:
        """Take the requests that come next, where the engine `is_remote`."""
        return None
