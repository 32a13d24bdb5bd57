"""Completions in several turns: a recipe's environments, or its tools, which rank 0 calls, with an engine that all
ranks call. Token-exact: nothing that was sampled is ever encoded again."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from dtrain.base.errors import UserError
from dtrain.base.randomness import random_key
from dtrain.base.ranks import Ranks
from dtrain.data.formats.formats import read_tool_calls
from dtrain.data.text.call_form import QUESTION
from dtrain.data.text.replies import REPLY, Replies
from dtrain.data.text.template import ChatTemplate
from dtrain.data.text.tokenizer import Tokenizer
from dtrain.data.text.tool_calls import ToolFormat, learn_tool_format
from dtrain.inference.request import Completion, Request, RolloutEngine, SamplingParams, ShouldStop
from dtrain.methods.method import RunContext
from dtrain.recipe.rollouts import RolloutSection
from dtrain.recipe.schema import Data
from dtrain.rl.environments.stepping import EnvironmentReply, Environments, Observation, Turn
from dtrain.rl.rewards.catalog import find
from dtrain.rl.samples import Sample
from dtrain.rl.tools import tool_schemas

# Of a text that is far too long its beginning is tokenised: so many characters for each id that is needed, and so many
# ids more than needed, since those at the end, of 1024 characters or more, may be others where the text goes on.
CHARACTERS, MARGIN = 8, 4096


class Observations:
    """Encoder of what an environment says, so that it can stand behind sampled tokens.

    In a conversation it is what the chat template writes between a reply's own text and the next one: the end of the
    turn, where the model has not written it, the messages, and the generation prompt. That is learnt from a
    conversation of a question, a reply and these messages. template None: the prompts are plain texts, and so are the
    observations. calls: how tools are called, where they are; their answers come first in an
    observation that has any.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, calls: ToolFormat | None = None):
        self.tokenizer, self._template, self._calls = tokenizer, template, calls
        self._replies = None if template is None else Replies(template)

    def completion_text(self, completion: Completion) -> str:
        """Return the text of a completion, without special tokens; where tools are, with them, since they may mark a
        call, and behind the opening of the thinking that the prompt ends with."""
        text = self.tokenizer.decode(completion.ids, skip_special_tokens=self._calls is None)
        return f"<think>{text}" if self._calls is not None and self._calls.thinks else text

    def encode(self, observation: Observation, completion: Completion, room: float = math.inf) -> list[int]:
        """Return the ids that follow `completion`. Of an observation of more than `room` ids it may be the first
        ones alone, more than `room`. Raises UserError as the template does."""
        if self._replies is not None:
            if isinstance(observation, str):
                messages = [{"role": "user", "content": observation}]
            else:
                messages = [_with_calls_read(message, index) for index, message in enumerate(observation)]
            text = self._behind_a_reply(self._replies, messages)
        elif isinstance(observation, str):
            text = observation
        else:
            raise UserError("it observed messages: that needs a prompt of messages and a chat template")
        length = CHARACTERS * (room + MARGIN)
        while length < len(text):
            ids = self._behind_a_completion(text[: int(length)], completion)
            if len(ids) > room + MARGIN:
                return ids[:-MARGIN]
            length *= CHARACTERS
        return self._behind_a_completion(text, completion)

    def _behind_a_completion(self, text: str, completion: Completion) -> list[int]:
        """Return the ids of `text`, without the end of the turn where the model has written it."""
        ids = self._behind_a_word(text)
        if self._template is None:
            return ids
        ends = set(self.tokenizer.eos_ids)
        has_ended = bool(completion.ids) and completion.ids[-1] in ends
        end = next((index for index, token in enumerate(ids) if token in ends), None)
        if has_ended and end is not None and not self.tokenizer.decode(ids[:end]).strip():
            return ids[end + 1 :]
        return ids

    def _behind_a_reply(self, replies: Replies, messages: Sequence[dict[str, Any]]) -> str:
        if self._calls is not None and messages[0]["role"] == "tool":
            return self._calls.text_after_call(messages)
        reply = {"role": "assistant", "content": REPLY}
        template = replies.template
        conversation = replies.with_calls([QUESTION, reply, *messages], None)
        text = template.render(conversation, add_generation_prompt=True)
        _, reply_text, rest = text.partition(REPLY)
        if not reply_text or not rest.strip():
            raise UserError(f"the chat template, {template.origin}, writes nothing after a reply")
        return rest

    def _behind_a_word(self, text: str) -> list[int]:
        """Return the ids of `text` where it continues a text: some tokenizers put a space in front of what they begin
        with."""
        head, whole = self.tokenizer.encode(REPLY), self.tokenizer.encode(REPLY + text)
        return whole[len(head) :] if whole[: len(head)] == head else self.tokenizer.encode(text)


def _with_calls_read(message: dict[str, Any], index: int) -> dict[str, Any]:
    """Return an observed message, whose calls have objects as arguments. Raises UserError."""
    if not message.get("tool_calls"):
        return message
    calls = read_tool_calls(message["tool_calls"], f"messages[{index}].tool_calls")
    return {**message, "tool_calls": calls}


@dataclass(frozen=True)
class Episodes:
    """Plays requests as episodes in environments, which ranks other than 0 do not have. Collective."""

    environments: Environments | None
    tokenizer: Tokenizer
    template: ChatTemplate | None
    calls: ToolFormat | None
    max_turns: int
    max_length: int
    ranks: Ranks
    has_tools_in_rows: bool = False

    def play(
        self,
        engine: RolloutEngine,
        requests: Sequence[Request],
        rows: Sequence[Mapping[str, Any]],
        version: int,
        should_stop: ShouldStop | None = None,
    ) -> list[Sample]:
        """Play an episode for each request, whose data row the environment is made with; in their order. Raises
        UserError as `environments` does, and Interrupted as `engine` does."""
        calls = self.calls
        if self.has_tools_in_rows and (
            tools := next(filter(None, (row["columns"].get("tools") for row in rows)), None)
        ):
            calls = learn_tool_format(self.template, tools)
            form = (calls.form, calls.is_single)
            rows = [{**row, "columns": {**row["columns"], "calls": form}} for row in rows]

        def make() -> None:
            if self.environments is not None:
                seeds = [environment_seed(request) for request in requests]
                self.environments.make([(dict(row), seed) for row, seed in zip(rows, seeds, strict=True)])

        self.ranks.run_on_first(make)
        is_chat = bool(rows) and isinstance(rows[0]["prompt"], list) and isinstance(rows[0]["prompt"][0], Mapping)
        samples = run_episodes(
            partial(engine.generate, should_stop=should_stop, version=version),
            requests,
            self.environments,
            Observations(self.tokenizer, self.template if is_chat else None, calls),
            max_turns=self.max_turns,
            max_length=self.max_length,
            first=self.ranks.run_on_first,
        )
        if self.environments is not None:
            self.environments.forget()
        return samples


def open_episodes(section: RolloutSection, data: Data, run: RunContext) -> Episodes | None:
    """Open the environments of `section`, or its tools, in their own process, on rank 0 alone; the run closes it. None
    where it has neither. Collective. Raises UserError."""
    if not section.has_episodes:
        return None
    library = section.verifiers
    tokenizer, template = run.source.tokenizer, run.source.template
    tools = tool_schemas(section.tools) if section.tools else []
    calls = learn_tool_format(template, [schema for _, schema in tools]) if tools else None
    ranks = Ranks()

    def start() -> Environments | None:
        if not ranks.is_first:
            return None
        arguments: dict[str, Any] = {"path": section.environment}
        if calls is not None:
            sources = [(find(tool.fn, "tool") if tool.fn else tool.mcp, schema["function"]) for tool, schema in tools]
            options = (sources, calls.form, calls.is_single, section.tool_output)
            arguments = {"path": "dtrain.rl.environments.tools:Toolbox", "options": options, "whose": "grpo.tools"}
        if library.name is not None:
            path = "dtrain.rl.environments.verifiers:open_library"
            special = [token.content for token in tokenizer.added_tokens().values() if token.special]
            library_options = (library.name, library.args, special)
            arguments = {"path": path, "options": library_options, "whose": "grpo.verifiers"}
        environments = Environments(
            **arguments, timeout=section.environment_timeout, threads=section.environment_threads, say=run.metrics.say
        )
        return run.stack.enter_context(environments)

    environments, has_own = ranks.run_on_all(start), library.name is not None
    return Episodes(environments, tokenizer, template, calls, section.max_turns, data.max_length, ranks, has_own)


def run_episodes(
    draw: Callable[[list[Request]], list[Completion]],
    requests: Sequence[Request],
    environments: Environments | None,
    observations: Observations,
    *,
    max_turns: int,
    max_length: int,
    first: Callable[[Callable[[], Any]], Any] = lambda act: act(),
) -> list[Sample]:
    """Run an episode for each of N requests, all turns of one round in one call of the engine; in their order.

    draw: an engine's `generate`; collective on a mesh. requests: the first turns; their SamplingParams are each turn's,
    cut to what max_length leaves of the sequence, prompt included. A later turn has the same prompt_index and
    sample_index and the seed `turn_seed(seed, turn)`, so that its draws depend on these and its own positions alone.
    environments: N; on other ranks than the one on which `first` runs what it is given they are not read and may be
    None. first: runs a function on one rank and gives its result on every rank (`Ranks.run_on_first`); once a round.

    A completion that was cut (finish "length") is still stepped, so that what it earned is known, and ends its episode
    as cut even where the environment is done. An observation that leaves no room for a completion is left out. An
    environment that is lost ends its episode behind the completion that it was given. Raises UserError as
    `environments` does, and ValueError for a prompt that leaves no room.
    """
    samples = [Sample(request.prompt) for request in requests]
    full = [len(request.prompt) for request in requests if len(request.prompt) >= max_length]
    if full:
        raise ValueError(f"a prompt of {max(full)} tokens leaves no room within max_length={max_length}")
    live = list(range(len(requests)))
    for turn in range(max_turns):
        if not live:
            break
        drawn = draw([_turn(requests[number], samples[number], turn, max_length) for number in live])
        for number, completion in zip(live, drawn, strict=True):
            samples[number].append_completion(completion)
        is_last_round = turn + 1 == max_turns

        def answer(
            live: list[int] = live, drawn: list[Completion] = drawn, is_last_round: bool = is_last_round
        ) -> list[EnvironmentReply]:
            assert environments is not None, "the rank that asks them has them"
            turns = [
                Turn(
                    number,
                    observations.completion_text(completion),
                    is_last_round or completion.finish == "length",
                    max_length - samples[number].length,
                )
                for number, completion in zip(live, drawn, strict=True)
            ]

            def encode(index: int, observation: Observation) -> list[int]:
                return observations.encode(observation, drawn[index], turns[index].room)

            return environments.step(turns, encode)

        going_on = []
        for number, completion, reply in zip(live, drawn, first(answer), strict=True):
            sample = samples[number]
            sample.calls += reply.calls
            sample.failures += reply.failures
            sample.metrics = reply.metrics
            if reply.earned is not None:
                sample.earned = (sample.earned or 0.0) + reply.earned
            if reply.is_lost:
                sample.earned, sample.finish = None, "lost"
            elif completion.finish == "length":
                sample.finish = "length"
            elif reply.done:
                sample.finish = "stop"
            elif not is_last_round and len(reply.ids) >= max_length - sample.length:
                sample.finish = "length"
            elif not is_last_round:
                sample.append_tokens(reply.ids)
                going_on.append(number)
        live = going_on
    return samples


def environment_seed(request: Request) -> int:
    """Return the seed of a completion's environment: the first 8 bytes of BLAKE2b of its seed and indices."""
    return random_key("environment", request.seed, request.prompt_index, request.sample_index) % 2**64


def turn_seed(seed: int, turn: int) -> int:
    """Return the seed of a turn, counted from 0: the first has the request's own, so that an episode of one turn is
    what it would be without an environment; later ones the first 8 bytes of BLAKE2b of "seed:turn"."""
    return seed if turn == 0 else random_key(seed, turn) % 2**64


def _turn(request: Request, sample: Sample, turn: int, max_length: int) -> Request:
    most = min(request.sampling.max_new_tokens, max_length - sample.length)
    sampling: SamplingParams = replace(request.sampling, max_new_tokens=most)
    seed = turn_seed(request.seed, turn)
    return replace(request, prompt=[*sample.prompt, *sample.ids], sampling=sampling, seed=seed)
