"""What a client may ask: bodies of /v1/completions and /v1/chat/completions to requests, or an error that says why not.

The fields are in the tables below: OpenAI's, and vLLM's beside them, with their defaults. dtrain's own are
`prompt_index` and `sample_index`: the numbers of the first prompt and the first sample, which together with `seed` make
the draws those of the native engine. No torch.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dtrain.data.formats import read_messages, read_tools
from dtrain.data.prompts import Prompt, PromptEncoder
from dtrain.errors import UserError
from dtrain.rollout.request import Request, SamplingParams
from dtrain.rollout.serve.fields import (
    ApiError,
    Field,
    check,
    check_json,
    flag,
    free,
    ids,
    ignored,
    is_ids,
    items,
    number,
    only,
    record,
    refusal,
    text,
    texts,
    whole,
)

MOST_SAMPLES = 1024  # of a prompt
MOST_REQUESTS = 4096  # of one call
SEED_LIMIT = 2**63
INDEX = whole(0, SEED_LIMIT - 1, 0)


def _prompts(value: Any, name: str) -> list[str | list[int]]:
    several = value if isinstance(value, list) and not is_ids(value) else [value]
    if not several or not all(isinstance(one, str) or is_ids(one) for one in several):
        raise ApiError(400, "prompt must be a text, token ids, or a list of either, none empty", name)
    return several


def _content(value: Any, name: str) -> Any:
    return value if isinstance(value, str) else PARTS.read(value, name)


def _arguments(value: Any, name: str) -> Any:
    """A tool call's: an object, or a text of JSON, which the template may want as an object."""
    if not isinstance(value, str):
        return free(value, name)
    check_json(value.encode(errors="replace"), name)
    return value


def _given(value: Any, table: Mapping[str, Field], name: str) -> dict[str, Any]:
    """The fields that are there: a template may ask whether one is."""
    return {one: read for one, read in check(value, table, name).items() if read is not None}


def _long_text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise refusal(name, "a text", value)
    return value


FREE_TEXT = Field(_long_text)  # as long as the body may be
SHARED: dict[str, Field] = {
    "model": text(4096),
    "n": whole(1, MOST_SAMPLES, 1),
    "temperature": number(0.0, 1e6, 1.0),
    "top_k": whole(-1, 2**31 - 1, -1),  # -1 and 0: off
    "top_p": number(0.0, 1.0, 1.0, above=True),
    "min_p": number(0.0, 1.0, 0.0),
    "stop": texts(64, 1024),
    "stop_token_ids": ids(1024),
    "ignore_eos": flag(),
    "include_stop_str_in_output": flag(),
    "seed": whole(-SEED_LIMIT, SEED_LIMIT - 1),
    "prompt_index": INDEX,
    "sample_index": INDEX,
    "stream": flag(),
    "stream_options": record(
        {"include_usage": flag(), "include_obfuscation": ignored(), "continuous_usage_stats": only(False)}
    ),
    "return_token_ids": flag(),
    "return_tokens_as_token_ids": flag(),
    # What the engine does not have, with the values that ask for nothing.
    "best_of": only(1),
    "frequency_penalty": only(0),
    "presence_penalty": only(0),
    "repetition_penalty": only(1),
    "length_penalty": only(1),
    "logit_bias": only({}),
    "bad_words": only([]),
    "allowed_token_ids": only(),
    "min_tokens": only(0),
    "prompt_logprobs": only(),
    "use_beam_search": only(False),
    "truncate_prompt_tokens": only(),
    "structured_outputs": only(),
    "skip_special_tokens": only(True),
    "spaces_between_special_tokens": only(True),
    # What changes nothing here.
    **dict.fromkeys(
        ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "cache_salt")
        + ("prompt_cache_retention", "priority", "request_id", "rid"),
        ignored(),
    ),
}
COMPLETION: dict[str, Field] = {
    **SHARED,
    "prompt": Field(_prompts),
    "max_tokens": whole(0, 2**31 - 1, 16),
    "logprobs": whole(0, 2**31 - 1),
    "add_special_tokens": flag(True),
    "echo": only(False),
    "suffix": only(""),
    "response_format": only({"type": "text"}),
    "prompt_embeds": only(),
}
PARTS = items(lambda value, name: value if isinstance(value, str) else _given(value, PART, name))
PART: dict[str, Field] = {"type": only("text"), "text": FREE_TEXT}
FUNCTION: dict[str, Field] = {"name": text(), "arguments": Field(_arguments)}
CALL: dict[str, Field] = {
    "id": text(),
    "type": only("function"),
    "index": whole(0, 2**31 - 1),
    "function": Field(lambda value, name: _given(value, FUNCTION, name)),
}
MESSAGE: dict[str, Field] = {
    "role": text(),
    "content": Field(_content),
    "name": text(),
    "tool_calls": items(lambda value, name: _given(value, CALL, name)),
    "tool_call_id": text(),
    **dict.fromkeys(("reasoning_content", "reasoning", "thinking"), FREE_TEXT),
    **dict.fromkeys(("refusal", "audio", "function_call"), only()),  # null in an answer of OpenAI's that comes back
    "annotations": ignored(),
}
CHAT: dict[str, Field] = {
    **SHARED,
    "messages": items(lambda value, name: _given(value, MESSAGE, name)),
    "tools": items(free),
    "max_tokens": whole(0, 2**31 - 1),
    "max_completion_tokens": whole(0, 2**31 - 1),
    "logprobs": flag(),
    "top_logprobs": only(0),
    "tool_choice": only("auto", "none"),
    "parallel_tool_calls": ignored(),
    "functions": only([]),
    "function_call": only("auto", "none"),
    "response_format": only({"type": "text"}),
    "modalities": only(["text"]),
    "audio": only(),
    "prediction": ignored(),
    "reasoning_effort": only(),
    "verbosity": only(),
    "web_search_options": only(),
    "chat_template": only(),
    "chat_template_kwargs": only({}),
    "add_generation_prompt": only(True),
    "continue_final_message": only(False),
    "documents": only([]),
    "echo": only(False),
}


@dataclass(frozen=True)
class Ask:
    """One HTTP request: `requests` by prompt, then by sample, and how the answer is to look."""

    requests: list[Request]
    samples: int
    chat: bool
    stream: bool
    usage: bool  # in a stream: a last message with the counts
    logprobs: bool
    token_ids: bool
    tokens_as_ids: bool
    keep_stop: bool
    eos_ids: tuple[int, ...]


class Parser:
    """Bodies to `Ask`. encoder: the tokenizer's and the template's; max_length: prompt and completion together."""

    def __init__(self, encoder: PromptEncoder, model: str, max_length: int):
        self.encoder, self.model, self.max_length = encoder, model, max_length
        self.tokenizer = encoder.tokenizer

    def completion(self, body: Mapping[str, Any]) -> Ask:
        """A body of /v1/completions. Raises ApiError."""
        fields = self._fields(body, COMPLETION)
        if fields["prompt"] is None:
            raise ApiError(400, "prompt must be given: a text, token ids, or a list of either", "prompt")
        logprobs = fields["logprobs"]
        if logprobs is not None and logprobs > 1:
            raise ApiError(400, "logprobs: dtrain gives the drawn token's only; ask for 0 or 1", "logprobs")
        specials, prompts = fields["add_special_tokens"], []
        if len(fields["prompt"]) * fields["n"] > MOST_REQUESTS:
            raise ApiError(400, f"prompt and n make more than {MOST_REQUESTS} completions; ask several times", "prompt")
        for one in fields["prompt"]:
            prompts.append(tuple(self._encoded(one, specials) if isinstance(one, str) else one))
            self._check_ids(prompts[-1], "prompt")
        return self._ask(fields, prompts, fields["max_tokens"], logprobs is not None, chat=False)

    def chat(self, body: Mapping[str, Any]) -> Ask:
        """A body of /v1/chat/completions. Raises ApiError."""
        fields = self._fields(body, CHAT)
        if fields["messages"] is None:
            raise ApiError(400, "messages is missing: a list of objects with role and content", "messages")
        if self.encoder.template is None:
            raise ApiError(400, f"{self.model} has no chat template; use /v1/completions", "messages")
        try:
            messages, _ = read_messages(fields["messages"], "messages")
            prompt = tuple(self.encoder.encode(Prompt(messages, tools=read_tools(fields))))
        except UserError as error:
            raise ApiError(400, str(error), "messages") from error
        most = fields["max_completion_tokens"]
        most = fields["max_tokens"] if most is None else most
        if most is None:
            most = max(0, self.max_length - len(prompt))
        return self._ask(fields, [prompt], most, fields["logprobs"], chat=True)

    def _fields(self, body: Mapping[str, Any], table: Mapping[str, Field]) -> dict[str, Any]:
        fields = check(body, table)
        model = fields["model"]
        if model is not None and model != self.model:
            raise ApiError(404, f"there is no model {model!r} here; this server has {self.model!r}", "model")
        self._check_ids(fields["stop_token_ids"], "stop_token_ids")
        return fields

    def _check_ids(self, ids: Sequence[int], name: str) -> None:
        limit = self.tokenizer.id_limit
        if max(ids, default=0) >= limit:
            raise ApiError(400, f"{name} has the id {max(ids)}, beyond the model's vocabulary of {limit}", name)

    def _encoded(self, text: str, specials: bool) -> list[int]:
        try:
            ids = self.tokenizer.encode(text, specials)
        except UserError as error:
            raise ApiError(400, str(error), "prompt") from error
        if not ids:
            raise ApiError(400, "prompt has no token: a completion needs one at least to follow", "prompt")
        return ids

    def _ask(
        self, fields: dict[str, Any], prompts: list[tuple[int, ...]], most: int, logprobs: bool, *, chat: bool
    ) -> Ask:
        longest = max(map(len, prompts))
        if longest + most > self.max_length:
            raise ApiError(
                400,
                f"the prompt's {longest} tokens and max_tokens={most} make {longest + most}, and the model's context "
                f"holds {self.max_length}; ask for less",
                "max_tokens",
            )
        eos = () if fields["ignore_eos"] else tuple(self.tokenizer.eos_ids)
        sampling = SamplingParams(
            max_new_tokens=most,
            temperature=fields["temperature"],
            top_k=fields["top_k"] if fields["top_k"] > 0 else None,
            top_p=fields["top_p"],
            min_p=fields["min_p"],
            stop_ids=tuple(dict.fromkeys([*fields["stop_token_ids"], *eos])),
            stop=fields["stop"],
        )
        seed = secrets.randbelow(SEED_LIMIT) if fields["seed"] is None else fields["seed"]
        requests = [
            Request(prompt, sampling, seed, fields["prompt_index"] + index, fields["sample_index"] + sample)
            for index, prompt in enumerate(prompts)
            for sample in range(fields["n"])
        ]
        return Ask(
            requests=requests,
            samples=fields["n"],
            chat=chat,
            stream=fields["stream"],
            usage=fields["stream_options"]["include_usage"],
            logprobs=logprobs,
            token_ids=fields["return_token_ids"],
            tokens_as_ids=fields["return_tokens_as_token_ids"],
            keep_stop=fields["include_stop_str_in_output"],
            eos_ids=eos,
        )
