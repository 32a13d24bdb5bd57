"""Completions in several turns: an environment answers each, until it is done. Token-exact: nothing that was sampled is
ever encoded again.

An environment is made for each completion by a function that a recipe names (`grpo.environment`),

    make(row, seed) -> Environment

row: the data's row, its prompt and columns; seed: a number of its own for each completion. The prompt is the data's;
then `step` is given each completion's text, and `observe` says what the model reads next. All on one rank only.
"""

import hashlib
import importlib
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from dtrain.data.replies import QUESTION, REPLY
from dtrain.data.template import ChatTemplate
from dtrain.data.tokenizer import Tokenizer
from dtrain.errors import UserError
from dtrain.rollout.request import Completion, Request, SamplingParams
from dtrain.rollout.rewards.find import find, search_path

Observation = str | Sequence[dict[str, Any]]


class Environment(Protocol):
    """done: whether the episode is over; read after each step."""

    done: bool

    def step(self, completion: str) -> float | None:
        """Take a completion's text, without special tokens. Returns what it earns, None for no opinion."""

    def observe(self) -> Observation:
        """What the model reads before its next completion: a text, which becomes a user's message where the prompt is
        a conversation, or messages."""


class Engine(Protocol):
    """On a mesh collective: every rank passes all requests and gets all completions."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]: ...


@dataclass
class Episode:
    """What followed a prompt: completions and what the environment put between them.

    ids, sampled, logprobs [s] each: tokens, whether the model drew them, and with what log-probability (0 where not).
    earned: Σ of the steps' rewards, None where no step had one. turns: completions drawn. finish: stop, the environment
    was done; length, a completion was cut or the sequence is full; turns, there were as many as may be. version: the
    oldest weights that a token was drawn with, where the engine knows.
    """

    prompt: Sequence[int]
    ids: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    earned: float | None = None
    turns: int = 0
    finish: Literal["stop", "length", "turns"] = "turns"
    version: int | None = None

    def add(self, ids: Sequence[int], logprobs: Sequence[float] | None = None) -> None:
        """Tokens of the model, with their log-probabilities, or of the environment."""
        self.ids += ids
        self.sampled += [logprobs is not None] * len(ids)
        self.logprobs += [0.0] * len(ids) if logprobs is None else logprobs


@dataclass(frozen=True)
class _Reply:
    """What an environment gave for one completion: what it earned, whether that was all, what is read next."""

    earned: float | None
    done: bool
    ids: list[int]


def run_episodes(
    engine: Engine,
    requests: Sequence[Request],
    environments: Sequence[Environment] | None,
    observations: "Observations",
    *,
    max_turns: int,
    max_length: int,
    first: Callable[[Callable[[], Any]], Any] = lambda act: act(),
) -> list[Episode]:
    """Runs an episode for each of N requests, all turns of one round in one call of the engine; in their order.

    requests: the first turns; their SamplingParams are each turn's, cut to what max_length leaves of the sequence,
    prompt included. A later turn has the same prompt_index and sample_index and the seed `turn_seed(seed, turn)`, so
    that its draws depend on these and its own positions alone. environments: one each; on other ranks than the one on
    which `first` runs what it is given they are not read and may be None. first: runs a function on one rank and gives
    its result on every rank (`Ranks.first`); once for each round.

    A completion that was cut (finish "length") is still stepped, so that what it earned is known, and ends its episode
    as cut even where the environment is done. An observation that leaves no room for a completion is left out. Raises
    UserError for an observation that is neither text nor messages, or a reward that is no number, and ValueError
    for a prompt that leaves no room.
    """
    episodes = [Episode(request.prompt) for request in requests]
    full = [len(request.prompt) for request in requests if len(request.prompt) >= max_length]
    if full:
        raise ValueError(f"a prompt of {max(full)} tokens leaves no room within max_length={max_length}")
    live = list(range(len(requests)))
    for turn in range(max_turns):
        if not live:
            break
        drawn = engine.generate([_turn(requests[one], episodes[one], turn, max_length) for one in live])
        for one, completion in zip(live, drawn, strict=True):
            _take(episodes[one], completion)

        def answer(live: list[int] = live, drawn: list[Completion] = drawn, is_last: bool = turn + 1 == max_turns):
            return [
                _step(environments[one], completion, observations, is_last=is_last or completion.finish == "length")
                for one, completion in zip(live, drawn, strict=True)
            ]

        going_on = []
        for one, completion, reply in zip(live, drawn, first(answer), strict=True):
            episode = episodes[one]
            if reply.earned is not None:
                episode.earned = (episode.earned or 0.0) + reply.earned
            if completion.finish == "length":
                episode.finish = "length"
            elif reply.done:
                episode.finish = "stop"
            elif turn + 1 < max_turns and len(reply.ids) >= _room(episode, max_length):
                episode.finish = "length"
            elif turn + 1 < max_turns:
                episode.add(reply.ids)
                going_on.append(one)
        live = going_on
    return episodes


def find_maker(path: str) -> Callable[[Any, int], Environment]:
    """The function of a recipe's `grpo.environment`, looked for from the working directory too. Raises UserError where
    it is not there; what its module raises passes."""
    module, function = find(path, "environment")
    sys.path[:] = search_path()
    return getattr(importlib.import_module(module), function)


def environment_seed(request: Request) -> int:
    """The seed that a completion's environment is made with: the first 8 bytes of BLAKE2b of its seed and places."""
    return _hashed(f"environment:{request.seed}:{request.prompt_index}:{request.sample_index}")


def turn_seed(seed: int, turn: int) -> int:
    """The seed of a turn, counted from 0: the first has the request's own, so that an episode of one turn is what it
    would be without an environment; later ones the first 8 bytes of BLAKE2b of "seed:turn"."""
    return seed if turn == 0 else _hashed(f"{seed}:{turn}")


class Observations:
    """Encodes what an environment says so that it can stand behind sampled tokens.

    In a conversation it is what the chat template writes between a reply's own text and the next one: the end of the
    turn, where the model has not written it, the messages, and the generation prompt. That is learnt from a
    conversation of a question, a reply and these messages. template None: the prompts are plain texts, and so are the
    observations.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None):
        self.tokenizer, self._template = tokenizer, template

    def text_of(self, completion: Completion) -> str:
        return self.tokenizer.decode(completion.ids, skip_special_tokens=True)

    def encode(self, observation: Observation, completion: Completion) -> list[int]:
        """Ids that follow `completion`. Raises UserError as the template does."""
        messages = _messages(observation)
        if self._template is None:
            if not isinstance(observation, str):
                raise UserError("an environment observed messages: that needs a prompt of messages and a chat template")
            return self._behind_a_word(observation)
        reply = {"role": "assistant", "content": REPLY}
        text = self._template.render([QUESTION, reply, *messages], add_generation_prompt=True)
        before, found, rest = text.partition(REPLY)
        if not found or not rest.strip():
            raise UserError(f"the chat template, {self._template.origin}, writes nothing after a reply")
        ids = self._behind_a_word(rest)
        ends = set(self.tokenizer.eos_ids)
        has_ended = bool(completion.ids) and completion.ids[-1] in ends
        end = next((place for place, token in enumerate(ids) if token in ends), None)
        if has_ended and end is not None and not self.tokenizer.decode(ids[:end]).strip():
            return ids[end + 1 :]
        return ids

    def _behind_a_word(self, text: str) -> list[int]:
        """Ids of `text` where it continues a text: some tokenizers put a space in front of what they begin with."""
        head, whole = self.tokenizer.encode(REPLY), self.tokenizer.encode(REPLY + text)
        return whole[len(head) :] if whole[: len(head)] == head else self.tokenizer.encode(text)


def _hashed(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


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
    known = [version for version in (episode.version, completion.version) if version is not None]
    episode.version = min(known, default=None)


def _step(environment: Environment, completion: Completion, observations: Observations, *, is_last: bool) -> _Reply:
    earned = environment.step(observations.text_of(completion))
    if earned is not None:
        if isinstance(earned, str) or not hasattr(earned, "__float__") or math.isinf(float(earned)):
            raise UserError(f"an environment's step gave {earned!r}; a finite number or None is needed")
        earned = None if math.isnan(float(earned)) else float(earned)
    if environment.done or is_last:
        return _Reply(earned, bool(environment.done), [])
    return _Reply(earned, False, observations.encode(environment.observe(), completion))


def _messages(observation: Any) -> Sequence[dict[str, Any]]:
    if isinstance(observation, str):
        return [{"role": "user", "content": observation}]
    is_list = isinstance(observation, Sequence) and len(observation) > 0
    if is_list and all(isinstance(message, dict) and "role" in message for message in observation):
        return observation
    raise UserError(f"an environment observed {observation!r}; a text or a list of messages is needed")
