"""Completions of several turns: the model and an environment alternate until one of them ends the episode.

All ranks call the engine together. Only rank 0 has the environments, and broadcasts their replies. Training needs the
very tokens that were sampled, so nothing that was sampled is ever encoded again. A sequence grows like this:

    prompt              <|user|>What is 2 + 2?<|end|><|assistant|>      given
    turn 1              It is 5.<|end|>                                 sampled, trained
    observation         <|user|>Wrong. Try again.<|end|><|assistant|>   encoded by `Observations`, not trained
    turn 2              It is 4.<|end|>                                 sampled, trained
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

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

# Only the beginning of a very long observation is encoded, CHARACTERS characters for each id that fits. MARGIN more ids
# than fit are computed and dropped, because the last ids may differ if the text continues. A character has at most 4
# ids, so the margin covers at least 1024 characters.
CHARACTERS, MARGIN = 8, 4096


class Observations:
    """Encodes observations so that they can follow sampled tokens.

    In a conversation, the text of an observation is everything that the chat template writes between two replies of the
    model: the end of the turn, unless the model has sampled it, then the messages, then the generation prompt. To find
    this text, a conversation of a question, a placeholder reply and the messages is rendered, and the text after the
    placeholder is kept. For example, with the message "Try again." of a user:

        rendered    <|user|>question<|end|><|assistant|>PLACEHOLDER<|end|><|user|>Try again.<|end|><|assistant|>
        kept                                                       <|end|><|user|>Try again.<|end|><|assistant|>
        encoded     without the first <|end|>, if the sampled completion ends with it

    Args:
        tokenizer: The tokenizer.
        template: The chat template. None if the prompts are plain text. Observations are plain text then, too.
        calls: How tools are called. None without tools.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, calls: ToolFormat | None = None):
        self.tokenizer, self._template, self._calls = tokenizer, template, calls
        self._replies = None if template is None else Replies(template)

    def completion_text(self, completion: Completion) -> str:
        """Return the text of a completion for the environment.

        Special tokens are left out, except with tools: they may mark a call. If the prompt ends with the opening of a
        thinking block, the text of a tool's environment begins with it.
        """
        if self._calls is None:
            return self.tokenizer.decode(completion.ids, skip_special_tokens=True)
        text = self.tokenizer.decode(completion.ids, skip_special_tokens=False)
        return f"<think>{text}" if self._calls.thinks else text

    def encode(self, observation: Observation, completion: Completion, room: float = math.inf) -> list[int]:
        """Return the token ids of an observation that follows `completion`.

        Args:
            observation: A text or messages.
            completion: The completion before it.
            room: Tokens that the sequence can still hold. An observation with more tokens may be cut, to at least
                `room` + 1 of them, so that the caller sees that it does not fit.

        Raises:
            UserError: If the template refuses the messages.
        """
        if self._replies is not None:
            if isinstance(observation, str):
                messages = [{"role": "user", "content": observation}]
            else:
                messages = [_with_parsed_calls(message, index) for index, message in enumerate(observation)]
            text = self._text_after_reply(self._replies, messages)
        elif isinstance(observation, str):
            text = observation
        else:
            raise UserError("it observed messages: that needs a prompt of messages and a chat template")
        length = CHARACTERS * (room + MARGIN)
        while length < len(text):
            ids = self._encode_after(text[: int(length)], completion)
            if len(ids) > room + MARGIN:
                return ids[:-MARGIN]
            length *= CHARACTERS
        return self._encode_after(text, completion)

    def _encode_after(self, text: str, completion: Completion) -> list[int]:
        """Encode `text`, without the end of the turn if the completion has it already."""
        ids = self._encode_continuation(text)
        if self._template is None:
            return ids
        end_ids = set(self.tokenizer.eos_ids)
        has_ended = bool(completion.ids) and completion.ids[-1] in end_ids
        if not has_ended:
            return ids
        end = next((index for index, token in enumerate(ids) if token in end_ids), None)
        # An end token after other text belongs to the next message.
        if end is not None and not self.tokenizer.decode(ids[:end]).strip():
            return ids[end + 1 :]
        return ids

    def _text_after_reply(self, replies: Replies, messages: Sequence[dict[str, Any]]) -> str:
        """Return the text that the template writes after a reply, for the messages that follow the reply.

        Args:
            replies: Renders conversations with a placeholder reply.
            messages: The messages.

        Returns:
            The end of the reply's turn, the messages, and the generation prompt.

        Raises:
            UserError: If the template writes nothing after a reply.
        """
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

    def _encode_continuation(self, text: str) -> list[int]:
        """Encode `text` as the continuation of another text.

        Some tokenizers put a space before the first word they encode, so `text` is encoded after a word, and the word
        is removed.
        """
        word_ids = self.tokenizer.encode(REPLY)
        ids = self.tokenizer.encode(REPLY + text)
        if ids[: len(word_ids)] == word_ids:
            return ids[len(word_ids) :]
        return self.tokenizer.encode(text)


def _with_parsed_calls(message: dict[str, Any], index: int) -> dict[str, Any]:
    """Return an observed message whose tool calls have objects as arguments. Raises UserError."""
    if not message.get("tool_calls"):
        return message
    calls = read_tool_calls(message["tool_calls"], f"messages[{index}].tool_calls")
    return {**message, "tool_calls": calls}


@dataclass(frozen=True)
class Episodes:
    """Plays requests as episodes in environments.

    Attributes:
        environments: The environments. None on ranks other than 0.
        tokenizer: The tokenizer.
        template: The model's chat template. None if it has none.
        calls: How tools are called. None without `grpo.tools`.
        max_turns: Largest number of turns of an episode.
        max_length: Largest number of tokens of an episode.
        ranks: The ranks of the run.
        has_tools_in_rows: Whether rows of the data may have tools, as those of the library `verifiers` do.
    """

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
        """Play an episode for each request.

        Args:
            engine: Samples the turns.
            requests: The first turns.
            rows: The data's row of each request. Its environment is made with it.
            version: Version of the weights.
            should_stop: Whether this rank is asked to stop.

        Returns:
            The samples, in the order of `requests`.

        Raises:
            UserError: If environments fail that have never worked.
            Interrupted: As the engine.

        Collectives:
            One broadcast from rank 0 for the environments, and for each round those of the engine and a broadcast.
        """
        calls = self.calls
        tools = self._first_tools_of_rows(rows)
        if tools:
            calls = learn_tool_format(self.template, tools)
            call_form = (calls.form, calls.is_single)
            rows = [{**row, "columns": {**row["columns"], "calls": call_form}} for row in rows]

        def make() -> None:
            if self.environments is not None:
                seeded_rows = []
                for row, request in zip(rows, requests, strict=True):
                    seeded_rows.append((dict(row), environment_seed(request)))
                self.environments.make(seeded_rows)

        self.ranks.run_on_first(make)
        is_chat = bool(rows) and isinstance(rows[0]["prompt"], list) and isinstance(rows[0]["prompt"][0], Mapping)
        samples = run_episodes(
            partial(engine.generate, should_stop=should_stop, version=version),
            requests,
            self.environments,
            Observations(self.tokenizer, self.template if is_chat else None, calls),
            max_turns=self.max_turns,
            max_length=self.max_length,
            run_on_first=self.ranks.run_on_first,
        )
        if self.environments is not None:
            self.environments.forget()
        return samples

    def _first_tools_of_rows(self, rows: Sequence[Mapping[str, Any]]) -> Any:
        """Return the tools of the first row that has some. None if rows have no tools."""
        if not self.has_tools_in_rows:
            return None
        for row in rows:
            tools = row["columns"].get("tools")
            if tools:
                return tools
        return None


def open_episodes(section: RolloutSection, data: Data, run: RunContext) -> Episodes | None:
    """Start the process of the environments on rank 0. The run closes it.

    Returns:
        The episodes. None if the section has no environment, tools or `verifiers`.

    Raises:
        UserError: On every rank, if the environments or tools cannot be loaded.

    Collectives:
        One broadcast from rank 0.
    """
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
        if library.name is not None:
            special_tokens = [token.content for token in tokenizer.added_tokens().values() if token.special]
            arguments: dict[str, Any] = {
                "path": "dtrain.rl.environments.verifiers:open_library",
                "options": (library.name, library.args, special_tokens),
                "whose": "grpo.verifiers",
            }
        elif calls is not None:
            sources = []
            for tool, schema in tools:
                source = find(tool.fn, "tool") if tool.fn else tool.mcp
                sources.append((source, schema["function"]))
            arguments = {
                "path": "dtrain.rl.environments.tools:Toolbox",
                "options": (sources, calls.form, calls.is_single, section.tool_output),
                "whose": "grpo.tools",
            }
        else:
            arguments = {"path": section.environment}
        environments = Environments(
            **arguments,
            timeout=section.environment_timeout,
            threads=section.environment_threads,
            print_line=run.metrics.print_line,
        )
        return run.stack.enter_context(environments)

    return Episodes(
        ranks.run_on_all(start),
        tokenizer,
        template,
        calls,
        section.max_turns,
        data.max_length,
        ranks,
        has_tools_in_rows=library.name is not None,
    )


def run_episodes(
    generate: Callable[[list[Request]], list[Completion]],
    requests: Sequence[Request],
    environments: Environments | None,
    observations: Observations,
    *,
    max_turns: int,
    max_length: int,
    run_on_first: Callable[[Callable[[], Any]], Any] = lambda act: act(),
) -> list[Sample]:
    """Run an episode for each of N requests. All turns of a round are one call of the engine.

    A completion that was cut (finish "length") is still passed to its environment, so that its reward is known. The
    episode then ends with finish "length", even if the environment is done. An observation that leaves no room for
    another completion is left out. If an environment is lost, its episode ends after the completion it received last.

    Args:
        generate: Samples completions, as an engine's `generate`.
        requests: The first turns. Their SamplingParams apply to each turn, shortened to the tokens that max_length
            leaves. Later turns have the same prompt_index and sample_index and the seed `turn_seed(seed, turn)`, so
            their tokens depend only on these and their position.
        environments: N environments. Only the rank of `run_on_first` needs them.
        observations: Encodes observations.
        max_turns: Largest number of turns.
        max_length: Largest number of tokens of a sequence, prompt included.
        run_on_first: Runs a function on one rank and returns its result on every rank, once for each round.

    Returns:
        The samples, in the order of `requests`.

    Raises:
        UserError: If environments fail that have never worked.
        ValueError: If a prompt leaves no room for a completion.

    Collectives:
        Those of `generate` and `run_on_first`.
    """
    too_long = [len(request.prompt) for request in requests if len(request.prompt) >= max_length]
    if too_long:
        raise ValueError(f"a prompt of {max(too_long)} tokens leaves no room within max_length={max_length}")
    samples = [Sample(request.prompt) for request in requests]
    live = list(range(len(requests)))  # indices of the episodes that continue
    for turn in range(max_turns):
        if not live:
            break
        is_last_round = turn + 1 == max_turns
        turn_requests = [_turn_request(requests[number], samples[number], turn, max_length) for number in live]
        completions = generate(turn_requests)
        turns = []
        for number, completion in zip(live, completions, strict=True):
            sample = samples[number]
            sample.append_completion(completion)
            is_last = is_last_round or completion.finish == "length"
            turns.append(_PlayedTurn(number, completion, is_last, room=max_length - sample.length))
        replies = run_on_first(partial(_step_environments, environments, observations, turns))
        live = []
        for played, reply in zip(turns, replies, strict=True):
            sample = samples[played.number]
            is_over = _add_reply(sample, played.completion, reply, is_last_round, max_length)
            if not is_over:
                live.append(played.number)
    return samples


class _PlayedTurn(NamedTuple):
    """A sampled turn of an episode.

    Attributes:
        number: Number of the episode.
        completion: The completion.
        is_last: Whether the model gets no further turn.
        room: Tokens that the sequence can still hold after the completion.
    """

    number: int
    completion: Completion
    is_last: bool
    room: int


def _step_environments(
    environments: Environments | None, observations: Observations, played: Sequence[_PlayedTurn]
) -> list[EnvironmentReply]:
    """Pass the completions of a round to the environments, on the rank that has them."""
    assert environments is not None, "only the rank with the environments calls this"
    turns = []
    for turn in played:
        text = observations.completion_text(turn.completion)
        turns.append(Turn(turn.number, text, turn.is_last, turn.room))

    def encode(index: int, observation: Observation) -> list[int]:
        return observations.encode(observation, played[index].completion, played[index].room)

    return environments.step(turns, encode)


def _add_reply(
    sample: Sample, completion: Completion, reply: EnvironmentReply, is_last_round: bool, max_length: int
) -> bool:
    """Add an environment's reply to a sample. Return whether the episode is over."""
    sample.calls += reply.calls
    sample.failures += reply.failures
    sample.metrics = reply.metrics
    if reply.earned is not None:
        sample.earned = (sample.earned or 0.0) + reply.earned
    if reply.is_lost:
        sample.earned = None  # what was earned so far would blame the model for the failure
        sample.finish = "lost"
    elif completion.finish == "length":
        sample.finish = "length"
    elif reply.done:
        sample.finish = "stop"
    elif is_last_round:
        pass  # `finish` is "turns" from the beginning
    elif len(reply.ids) >= max_length - sample.length:
        sample.finish = "length"
    else:
        sample.append_tokens(reply.ids)
        return False
    return True


def environment_seed(request: Request) -> int:
    """Return the seed of a completion's environment, derived from the request's seed and indices."""
    return random_key("environment", request.seed, request.prompt_index, request.sample_index) % 2**64


def turn_seed(seed: int, turn: int) -> int:
    """Return the seed of a turn.

    Turn 0 has the request's seed, so an episode of one turn has the same tokens as without an environment. Later turns
    have seeds derived from it and their number.

    Example:
        >>> turn_seed(7, 0)
        7
    """
    return seed if turn == 0 else random_key(seed, turn) % 2**64


def _turn_request(request: Request, sample: Sample, turn: int, max_length: int) -> Request:
    """Return the request for the next turn of an episode, whose prompt is the sequence so far."""
    max_new_tokens = min(request.sampling.max_new_tokens, max_length - sample.length)
    sampling: SamplingParams = replace(request.sampling, max_new_tokens=max_new_tokens)
    seed = turn_seed(request.seed, turn)
    return replace(request, prompt=[*sample.prompt, *sample.ids], sampling=sampling, seed=seed)
