"""Episodes of several turns with an engine. Token-exact: nothing that was sampled is ever encoded again."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

from dtrain.base.randomness import key
from dtrain.data.text.tool_calls import FAILED
from dtrain.inference.request import Completion, Request, SamplingParams
from dtrain.rl.environments.observations import Observation, Observations

if TYPE_CHECKING:
    from torch import Tensor


class Environment(Protocol):
    """Environment of one episode. done: whether the episode is over; read after each step."""

    done: bool

    def step(self, completion: str) -> float | None:
        """Take a completion's text, without special tokens. Returns what it earns, None for no opinion."""

    def observe(self) -> Observation:
        """Return what the model reads before its next completion: a text, which becomes a user's message where the
        prompt is a conversation, or messages."""

    # It may have `end() -> float | None` too: no more completions come, though it is not done; and `metrics`, a dict of
    # numbers that are reported beside what the episode earned.


class TurnEngine(Protocol):
    """Engine of the turns. Collective on a mesh: every rank passes all requests and gets all completions."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]: ...


@dataclass
class Episode:
    """Tokens behind a prompt: completions and what the environment put between them.

    ids, sampled, logprobs [s] each: tokens, whether the model drew them, and with what log-probability (0 where not).
    earned: Σ of the steps' rewards, None where no step had one. turns: completions drawn; longest: tokens of the
    longest, infinite where one was cut. calls, failures: answers of tools that were read, and those among them that say
    that a call failed. metrics: the environment's, as they were last. finish: stop, the environment was done; length, a
    completion was cut or the sequence is full; turns, there were as many as may be; lost, the environment failed, and
    earned is None since nobody knows the whole of it. version: the oldest weights that a token was drawn with, where
    the engine knows. routed: as `Completion` has it, of each token what the first turn that read it says.
    """

    prompt: Sequence[int]
    ids: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    earned: float | None = None
    turns: int = 0
    longest: float = 0
    calls: int = 0
    failures: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    finish: Literal["stop", "length", "turns", "lost"] = "turns"
    version: int | None = None
    routed: "Tensor | None" = field(default=None, compare=False)

    def add(self, ids: Sequence[int], logprobs: Sequence[float] | None = None) -> None:
        """Append tokens of the model, with their log-probabilities, or of the environment."""
        self.ids += ids
        self.sampled += [logprobs is not None] * len(ids)
        self.logprobs += [0.0] * len(ids) if logprobs is None else logprobs


@dataclass(frozen=True)
class Turn:
    """Input of environment `number`: a completion's text, and whether nothing is read after it. room: tokens that are
    left of the sequence behind it."""

    number: int
    text: str
    is_last: bool
    room: float = math.inf


@dataclass(frozen=True)
class EnvironmentReply:
    """Reply of an environment to one completion: what it earned, whether that was all, the ids that are read next
    (none after the last), with how many answers of tools and failures among them. is_lost: nothing of that is known, or
    there will be no more. metrics: the environment's."""

    earned: float | None = None
    done: bool = False
    ids: Sequence[int] = ()
    is_lost: bool = False
    calls: int = 0
    failures: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)


class Steps(Protocol):
    """Environments numbered as the requests are: `stepping.Environments`."""

    def step(self, turns: Sequence[Turn], encode: Callable[[int, Observation], list[int]]) -> list[EnvironmentReply]:
        """Return a reply to each turn. encode: ids of an observation, from its index in `turns`; raises UserError."""


def run_episodes(
    engine: TurnEngine,
    requests: Sequence[Request],
    environments: Steps | None,
    observations: Observations,
    *,
    max_turns: int,
    max_length: int,
    first: Callable[[Callable[[], Any]], Any] = lambda act: act(),
) -> list[Episode]:
    """Run an episode for each of N requests, all turns of one round in one call of the engine; in their order.

    requests: the first turns; their SamplingParams are each turn's, cut to what max_length leaves of the sequence,
    prompt included. A later turn has the same prompt_index and sample_index and the seed `turn_seed(seed, turn)`, so
    that its draws depend on these and its own positions alone. environments: N; on other ranks than the one on which
    `first` runs what it is given they are not read and may be None. first: runs a function on one rank and gives its
    result on every rank (`Ranks.first`); once for each round.

    A completion that was cut (finish "length") is still stepped, so that what it earned is known, and ends its episode
    as cut even where the environment is done. An observation that leaves no room for a completion is left out. An
    environment that is lost ends its episode behind the completion that it was given. Raises UserError as
    `environments` does, and ValueError for a prompt that leaves no room.
    """
    episodes = [Episode(request.prompt) for request in requests]
    full = [len(request.prompt) for request in requests if len(request.prompt) >= max_length]
    if full:
        raise ValueError(f"a prompt of {max(full)} tokens leaves no room within max_length={max_length}")
    live = list(range(len(requests)))
    for turn in range(max_turns):
        if not live:
            break
        drawn = engine.generate([_turn(requests[number], episodes[number], turn, max_length) for number in live])
        for number, completion in zip(live, drawn, strict=True):
            _take(episodes[number], completion)

        is_last_round = turn + 1 == max_turns

        def answer(
            live: list[int] = live, drawn: list[Completion] = drawn, is_last_round: bool = is_last_round
        ) -> list[EnvironmentReply]:
            if environments is None:
                raise ValueError("this rank asks the environments, and was given none")
            turns = [
                Turn(
                    number,
                    observations.text_of(completion),
                    is_last_round or completion.finish == "length",
                    _room(episodes[number], max_length),
                )
                for number, completion in zip(live, drawn, strict=True)
            ]

            def encode(index: int, observation: Observation) -> list[int]:
                return observations.encode(observation, drawn[index], turns[index].room)

            return environments.step(turns, encode)

        going_on = []
        for number, completion, reply in zip(live, drawn, first(answer), strict=True):
            episode = episodes[number]
            episode.calls += reply.calls
            episode.failures += reply.failures
            episode.metrics = reply.metrics
            if reply.earned is not None:
                episode.earned = (episode.earned or 0.0) + reply.earned
            if reply.is_lost:
                episode.earned, episode.finish = None, "lost"
            elif completion.finish == "length":
                episode.finish = "length"
            elif reply.done:
                episode.finish = "stop"
            elif not is_last_round and len(reply.ids) >= _room(episode, max_length):
                episode.finish = "length"
            elif not is_last_round:
                episode.add(reply.ids)
                going_on.append(number)
        live = going_on
    return episodes


def tool_answers(observation: Observation) -> tuple[int, int]:
    """Return the number of tools' answers in an observation, and of those that say that a call failed."""
    messages = [] if isinstance(observation, str) else observation
    answers = [str(message.get("content")) for message in messages if message["role"] == "tool"]
    return len(answers), sum(text.startswith(FAILED) for text in answers)


def environment_seed(request: Request) -> int:
    """Return the seed of a completion's environment: the first 8 bytes of BLAKE2b of its seed and indices."""
    return key("environment", request.seed, request.prompt_index, request.sample_index) % 2**64


def turn_seed(seed: int, turn: int) -> int:
    """Return the seed of a turn, counted from 0: the first has the request's own, so that an episode of one turn is
    what it would be without an environment; later ones the first 8 bytes of BLAKE2b of "seed:turn"."""
    return seed if turn == 0 else key(seed, turn) % 2**64


def _room(episode: Episode, max_length: int) -> int:
    return max_length - len(episode.prompt) - len(episode.ids)


def _turn(request: Request, episode: Episode, turn: int, max_length: int) -> Request:
    room = _room(episode, max_length)
    sampling: SamplingParams = replace(request.sampling, max_new_tokens=min(request.sampling.max_new_tokens, room))
    seed = turn_seed(request.seed, turn)
    return replace(request, prompt=[*episode.prompt, *episode.ids], sampling=sampling, seed=seed)


def _take(episode: Episode, completion: Completion) -> None:
    episode.add(completion.ids, completion.logprobs)
    episode.turns += 1
    episode.longest = max(episode.longest, completion.longest)
    routed, before = completion.routed, episode.routed
    if routed is not None and before is not None:  # a later turn may have read a prompt anew, with other roundings
        is_known = before[:, 0, 0] >= 0
        routed = routed.clone()
        routed[: len(before)][is_known] = before[is_known]
    episode.routed = routed
    known = [version for version in (episode.version, completion.version) if version is not None]
    episode.version = min(known, default=None)
