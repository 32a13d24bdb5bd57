"""Requests to an engine, and its completions: token ids in, token ids and log-probabilities out. Imports no torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from dtrain.inference.chats import ImagePrompt
    from dtrain.models.common.micro_batch import Images

# Returns whether to give up sampling.
ShouldStop = Callable[[], bool]


@dataclass(frozen=True)
class SamplingParams:
    """Settings of sampling.

    Logits are divided by the temperature. Then top-k, top-p and min-p remove tokens, in this order, and the rest is
    renormalised.

    Attributes:
        max_new_tokens: A completion ends after this number of tokens.
        temperature: 0 selects the token with the highest probability.
        top_k: Keep the k tokens with the highest probability. None: all.
        top_p: Keep the smallest set of tokens whose probability reaches p. 1.0: all.
        min_p: Keep tokens with at least this fraction of the highest probability (arXiv:2407.01082). 0.0: all.
        stop_ids: Tokens that end a completion, which includes them.
        stop: Texts that end a completion, with the token that completes one of them.
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

    The token at position t depends only on the model and (seed, prompt_index, sample_index, t). The other requests,
    their order and the mesh play no part. Requests with equal prompts share the computation of the prompt.

    Attributes:
        prompt: Token ids.
        sampling: Settings of sampling.
        seed: Seed of the random numbers.
        prompt_index: Number of the prompt.
        sample_index: Number of the sample, among those of the prompt.
        routed: Whether the completion should include the experts to which its tokens were routed.
        images: Images of the prompt, as a batch of one row [1, S], on the host. None for text.
        image_prompt: The same prompt for an engine that sends images to a server.
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
    """The sampled tokens of a request.

    Attributes:
        ids: Token ids, including the stop token.
        logprobs: Log-probability of each token in the distribution from which it was sampled. At temperature 0, that of
            the log-softmax of the unchanged logits.
        finish: "stop" if a stop token or text ended the completion, "length" if `max_new_tokens` did.
        version: The number of optimizer steps of the weights that sampled the oldest token. None if unknown.
        routed: Experts of each token of prompt and completion, int16 [tokens, layers, k], on the host. -1 where they
            are unknown, such as for the last token, which no forward has read. None if not requested.
    """

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: Literal["stop", "length"] = "length"
    version: int | None = None
    routed: "Tensor | None" = field(default=None, compare=False)


class RolloutEngine(Protocol):
    """Engine that samples completions with the policy's present weights.

    Attributes:
        is_remote: Whether servers sample. A remote engine needs the images of a request as `image_prompt`, and may
            sample requests ahead of time (`prefetch`).
    """

    is_remote: bool = False

    def generate(
        self, requests: Sequence[Request], should_stop: ShouldStop | None = None, *, version: int = 0
    ) -> list[Completion]:
        """Return the completions of `requests`, in order, on every rank. Every rank must pass all requests.

        Args:
            requests: The requests.
            should_stop: Called on each rank while it waits.
            version: The number of optimizer steps of the present weights.

        Raises:
            Interrupted: On every rank, if `should_stop` returned True on any.
        """
        ...

    def prefetch(self, requests: Sequence[Request], version: int) -> None:
        """Start sampling the requests of the next rollout, if the engine is remote."""
        return None
