"""What a client may ask: bodies of /v1/completions and /v1/chat/completions to requests, or an error that says why not.

Fields are OpenAI's, and vLLM's beside them (top_k, min_p, stop_token_ids, ignore_eos, return_token_ids,
return_tokens_as_token_ids, include_stop_str_in_output, add_special_tokens), with their defaults. dtrain's own are
`prompt_index` and `sample_index`: the numbers of the first prompt and the first sample, which together with `seed` make
the draws those of the native engine. A field that would change the answer and is not known to dtrain is refused; other
unknown fields are passed over. No torch.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dtrain.data.formats import read_messages, read_tools
from dtrain.data.prompts import Prompt, PromptEncoder
from dtrain.errors import UserError
from dtrain.rollout.request import Request, SamplingParams

MOST_SAMPLES = 1024
SEED_LIMIT = 2**63
# Fields that change what is drawn or answered and that the engine does not have, with the values that ask for nothing.
REFUSED: dict[str, tuple] = {
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "min_tokens": (0,),
    "prompt_logprobs": (),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "use_beam_search": (False,),
    "truncate_prompt_tokens": (),
    "prompt_embeds": (),
    "audio": (),
    "modalities": (["text"],),
}


class ApiError(Exception):
    """An answer other than 200: `status`, and the message, the parameter and the type of OpenAI's error object."""

    def __init__(self, status: int, message: str, param: str | None = None):
        self.status, self.message, self.param = status, message, param
        super().__init__(message)

    @property
    def body(self) -> dict[str, Any]:
        kinds = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 409: "conflict"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.status}}


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
        fields = self._fields(body)
        prompts = self._prompts(fields)
        most = fields.integer("max_tokens", 16, 0)
        logprobs = fields.integer("logprobs", None, 0)
        if logprobs is not None and logprobs > 1:
            raise ApiError(400, "logprobs: dtrain gives the drawn token's only; ask for 0 or 1", "logprobs")
        return self._ask(fields, prompts, most, logprobs is not None, chat=False)

    def chat(self, body: Mapping[str, Any]) -> Ask:
        """A body of /v1/chat/completions. Raises ApiError."""
        fields = self._fields(body)
        if body.get("messages") is None:
            raise ApiError(400, "messages is missing: a list of objects with role and content", "messages")
        if self.encoder.template is None:
            raise ApiError(400, f"{self.model} has no chat template; use /v1/completions", "messages")
        try:
            messages, _ = read_messages(body["messages"], "messages")
            prompt = self.encoder.encode(Prompt(messages, tools=read_tools(body)))
        except UserError as error:
            raise ApiError(400, str(error), "messages") from error
        most = fields.integer("max_completion_tokens", fields.integer("max_tokens", None, 0), 0)
        if most is None:
            most = max(0, self.max_length - len(prompt))
        return self._ask(fields, [prompt], most, fields.flag("logprobs", False), chat=True)

    def _fields(self, body: Any) -> "Fields":
        if not isinstance(body, Mapping):
            raise ApiError(400, "the body must be a JSON object")
        model = body.get("model")
        if model is not None and model != self.model:
            raise ApiError(404, f"there is no model {model!r} here; this server has {self.model!r}", "model")
        for name, neutral in REFUSED.items():
            value = body.get(name)
            if value is not None and value not in neutral:
                raise ApiError(400, f"{name}={value!r}: dtrain serve does not have it; leave it out", name)
        return Fields(body)

    def _prompts(self, fields: "Fields") -> list[list[int]]:
        value = fields.body.get("prompt")
        several = value if isinstance(value, list) and not _is_ids(value) else [value]
        if not several or not all(isinstance(one, str) or _is_ids(one) for one in several):
            raise ApiError(400, "prompt must be a text, token ids, or a list of either, none empty", "prompt")
        specials = fields.flag("add_special_tokens", True)
        try:
            prompts = [self.tokenizer.encode(one, specials) if isinstance(one, str) else one for one in several]
        except UserError as error:
            raise ApiError(400, str(error), "prompt") from error
        if not all(prompts):
            raise ApiError(400, "prompt has no token: a completion needs one at least to follow", "prompt")
        return prompts

    def _ask(self, fields: "Fields", prompts: list[list[int]], most: int, logprobs: bool, chat: bool) -> Ask:
        longest = max(map(len, prompts))
        if longest + most > self.max_length:
            raise ApiError(
                400,
                f"the prompt's {longest} tokens and max_tokens={most} make {longest + most}, and the model's context "
                f"holds {self.max_length}; ask for less",
                "max_tokens",
            )
        samples = fields.integer("n", 1, 1, MOST_SAMPLES)
        eos = () if fields.flag("ignore_eos", False) else tuple(self.tokenizer.eos_ids)
        sampling = SamplingParams(
            max_new_tokens=most,
            temperature=fields.number("temperature", 1.0, 0.0),
            top_k=_top_k(fields.integer("top_k", -1, -1)),
            top_p=fields.number("top_p", 1.0, 0.0, 1.0, open_below=True),
            min_p=fields.number("min_p", 0.0, 0.0, 1.0),
            stop_ids=tuple(dict.fromkeys([*fields.ids("stop_token_ids"), *eos])),
            stop=fields.texts("stop"),
        )
        seed = fields.integer("seed", None, -SEED_LIMIT, SEED_LIMIT - 1)
        seed = secrets.randbelow(SEED_LIMIT) if seed is None else seed
        first_prompt, first_sample = fields.integer("prompt_index", 0, 0), fields.integer("sample_index", 0, 0)
        requests = [
            Request(prompt, sampling, seed, first_prompt + index, first_sample + sample)
            for index, prompt in enumerate(prompts)
            for sample in range(samples)
        ]
        options = fields.body.get("stream_options") or {}
        return Ask(
            requests=requests,
            samples=samples,
            chat=chat,
            stream=fields.flag("stream", False),
            usage=isinstance(options, Mapping) and bool(options.get("include_usage")),
            logprobs=logprobs,
            token_ids=fields.flag("return_token_ids", False),
            tokens_as_ids=fields.flag("return_tokens_as_token_ids", False),
            keep_stop=fields.flag("include_stop_str_in_output", False),
            eos_ids=eos,
        )


class Fields:
    """A body's fields with their kinds checked: each reader gives the default for null, and raises ApiError."""

    def __init__(self, body: Mapping[str, Any]):
        self.body = body

    def integer(self, name: str, default: int | None, least: int, most: int | None = None) -> int | None:
        value = self.body.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise ApiError(400, f"{name} must be a whole number, not {value!r}", name)
        return self._within(name, value, least, most)

    def number(
        self, name: str, default: float, least: float, most: float | None = None, *, open_below: bool = False
    ) -> float:
        value = self.body.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
            raise ApiError(400, f"{name} must be a number, not {value!r}", name)
        if open_below and value == least:
            raise ApiError(400, f"{name}={value} must be above {least}", name)
        return float(self._within(name, value, least, most))

    def flag(self, name: str, default: bool) -> bool:
        value = self.body.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ApiError(400, f"{name} must be true or false, not {value!r}", name)
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        value = self.body.get(name)
        several = [] if value is None else [value] if isinstance(value, str) else value
        if not isinstance(several, list) or not all(isinstance(one, str) and one for one in several):
            raise ApiError(400, f"{name} must be a text or a list of texts, none empty", name)
        return tuple(several)

    def ids(self, name: str) -> list[int]:
        value = self.body.get(name)
        if value is None or value == []:
            return []
        if not _is_ids(value):
            raise ApiError(400, f"{name} must be a list of token ids", name)
        return value

    @staticmethod
    def _within(name: str, value: float, least: float, most: float | None) -> float:
        if value < least or (most is not None and value > most):
            bounds = f"at least {least}" if most is None else f"from {least} to {most}"
            raise ApiError(400, f"{name}={value} must be {bounds}", name)
        return value


def _top_k(value: int) -> int | None:
    return value if value > 0 else None


def _is_ids(value: Any) -> bool:
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        return False
    return all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in value)
