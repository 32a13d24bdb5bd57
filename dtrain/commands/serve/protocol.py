"""Bodies of /v1/completions and /v1/chat/completions as requests to the engine, or an error with the reason.

Every body is checked field by field against a table. A field that the table does not name is refused. The tables
below have OpenAI's fields and vLLM's, with their defaults, and SGLang's `return_routed_experts`. dtrain adds two kinds.
`prompt_index` and `sample_index`, the numbers of the first prompt and of the first sample, and `seed` make the samples
equal to the native engine's. `images` are the images of a prompt of token ids. No torch.
"""

import json
import math
import reprlib
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Union

from dtrain.base.errors import UserError
from dtrain.base.ranges import name_hint
from dtrain.data.formats.formats import read_messages, read_tools
from dtrain.data.formats.prompts import Prompt
from dtrain.data.images.files import MAX_STORED_PIXELS
from dtrain.inference.chats import ChatEncoder, ChatPrompt, ImageError
from dtrain.inference.request import Request, SamplingParams

if TYPE_CHECKING:
    from dtrain.models.common.micro_batch import Images


_WORDS = {bool: "true or false", int: "a whole number", float: "a number"}
_WORDS |= {str: "a text", list: "a list", dict: "an object"}
shown = reprlib.repr  # a value for a message, cut short


class ApiError(Exception):
    """An answer other than 200: `status`, and the message, the parameter and the type of OpenAI's error object."""

    def __init__(self, status: int, message: str, param: str | None = None):
        self.status, self.message, self.param = status, message, param
        super().__init__(message)

    @property
    def body(self) -> dict[str, Any]:
        kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 409: "conflict"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.status}}


def read_object(raw: bytes | bytearray) -> dict[str, Any]:
    """Return the JSON object of a body. Raises ApiError."""
    try:
        body = json.loads(raw.decode(), parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError) as error:  # of the encoding too
        raise ApiError(400, f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    return body


def _finite(text: str) -> float:
    """Return the number in `text`; raises ValueError for NaN and Infinity, which JSON does not have."""
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text[:20]} is no finite number")
    return value


@dataclass(frozen=True)
class Field:
    """A row of a table. kind: the value's type, None for any. default: for null and absence. least, most: of
    a number, or of a text's or a list's length. of: a list's entries, or an object's table. among: the only values that
    are served. use: converts the value, or raises ApiError."""

    kind: type | None = None
    default: Any = None
    minimum: float = 0
    maximum: float = math.inf
    of: Union["Field", "Table", None] = None
    among: tuple | None = None
    use: Callable[[Any, str], Any] | None = None

    def read(self, value: Any, name: str) -> Any:
        """Return the value that `value` of the field `name` stands for. Raises ApiError."""
        if self.kind is not None and type(value) is not self.kind and (self.kind, type(value)) != (float, int):
            raise ApiError(400, f"{name} must be {_WORDS[self.kind]}, not {shown(value)}", name)
        size = value if self.kind in (int, float) else len(value) if self.kind in (str, list) else self.minimum
        if not self.minimum <= size <= self.maximum:
            bounds = (
                f"at least {self.minimum}" if self.maximum == math.inf else f"from {self.minimum} to {self.maximum}"
            )
            what = f"{name}={shown(value)}" if size is value else f"the length of {name}, {size},"
            raise ApiError(400, f"{what} must be {bounds}", name)
        is_flag = isinstance(value, bool)  # 1 is no True
        if self.among is not None and value not in [item for item in self.among if isinstance(item, bool) == is_flag]:
            rest = f"it may be {', '.join(map(str, self.among))}" if self.among else "leave it out"
            raise ApiError(400, f"{name}={shown(value)}: dtrain serve does not have it; {rest}", name)
        if isinstance(self.of, Field):
            return [self.of.read(item, f"{name}[{index}]") for index, item in enumerate(value)]
        if self.of is not None:
            return {key: item for key, item in check(value, self.of, name).items() if item is not None}
        return value if self.use is None else self.use(value, name)


Table = Mapping[str, Field]


def check(body: Mapping[str, Any], table: Table, name: str = "") -> dict[str, Any]:
    """Return every field of `table`, read from `body`, which stands at `name`. Raises ApiError."""
    inside = f"{name}." if name else ""
    for key in body:
        if key not in table:
            full, meant = f"{inside}{key[:64]}", name_hint(key, table, inside, otherwise="")
            raise ApiError(400, f"{full} is no field that dtrain serve knows{meant}", full)
    return {
        key: field.default if body.get(key) is None else field.read(body[key], inside + key)
        for key, field in table.items()
    }


def is_token_ids(value: Any) -> bool:
    """Return whether `value` is a list of numbers that may be token ids, not empty."""
    return isinstance(value, list) and bool(value) and all(type(item) is int and item >= 0 for item in value)


FLAG = Field(bool, False)
TEXT = Field(str, maximum=4096)
COUNT = Field(int, maximum=2**31 - 1)
IGNORED = Field()  # changes nothing in the answer

MAX_REQUESTS = 4096  # of one call
MAX_CHARACTERS_PER_TOKEN = 256  # of a prompt's text, for each token that the context holds
SEED_LIMIT = 2**63


def texts_or_ids(value: Any, name: str) -> list[str | list[int]]:
    """Return a list of texts or lists of ids, from one of them or a list. Raises ApiError."""
    several = value if isinstance(value, list) and not is_token_ids(value) else [value]
    if (
        len(several) > MAX_REQUESTS
        or not several
        or not all(isinstance(item, str) or is_token_ids(item) for item in several)
    ):
        what = f"a text, token ids, or a list of either, none empty, {MAX_REQUESTS} at most"
        raise ApiError(400, f"{name} must be {what}", name)
    return several


def _stops(value: Any, name: str) -> tuple[str, ...]:
    several = [value] if isinstance(value, str) else value
    if not isinstance(several, list) or not all(
        isinstance(stop, str) and 0 < len(stop) <= 1024 for stop in several[:65]
    ):
        raise ApiError(400, f"{name} must be a text or a list of texts, none empty or beyond 1024 characters", name)
    if len(several) > 64:
        raise ApiError(400, f"{name} must be 64 texts at most", name)
    return tuple(several)


def _content(value: Any, name: str) -> Any:
    if isinstance(value, str):
        return value
    parts = Field(list, maximum=4096, of=Field(dict, of=PART)).read(value, name)
    for place, part in enumerate(parts):
        kind = part.get("type", "text")
        if part.keys() - {"type"} != {kind}:
            raise ApiError(400, f"{name}[{place}] of type {kind} must have the field {kind}, and no other", name)
    return parts


def _data_uri(value: Any, name: str) -> str:
    """Return a data URI: a server reads no file, and fetches nothing, for whoever asks."""
    if not isinstance(value, str) or value[:5].lower() != "data:":
        what = "must hold the image itself (data:image/png;base64,...): files and addresses are not read here"
        raise ApiError(400, f"{name}={shown(value)} {what}", name)
    return value


def _arguments(value: Any, name: str) -> Any:
    """Return the arguments of a tool call: an object, or JSON text, which `read_messages` parses."""
    if isinstance(value, str):
        return value
    return Field(dict).read(value, name)


def _variables(value: Any, name: str) -> dict[str, Any]:
    for key, item in Field(dict).read(value, name).items():
        if not isinstance(item, str | int | float | None) or (isinstance(item, str) and len(item) > 4096):
            raise ApiError(400, f"{name}.{key[:64]} must be true, false, null, a number or a short text", name)
    return value


# Values that ask for nothing, of fields that would change the answer and that the engine does not have.
NONE, ZERO, ONE = Field(among=()), Field(among=(0,)), Field(among=(1,))
NO, YES, EMPTY = Field(among=(False,)), Field(among=(True,)), Field(among=([],))
STREAM_OPTIONS: Table = {"include_usage": FLAG, "include_obfuscation": IGNORED, "continuous_usage_stats": NO}
SAMPLING: Table = {
    "model": TEXT,
    "n": Field(int, 1, 1, 1024),
    "temperature": Field(float, 1.0),
    "top_k": Field(int, -1, -1, 2**31 - 1),  # -1 and 0: off
    "top_p": Field(float, 1.0, 0, 1),
    "min_p": Field(float, 0.0, 0, 1),
    "stop": Field(default=(), use=_stops),
    "stop_token_ids": Field(list, [], maximum=1024, of=COUNT),
    "ignore_eos": FLAG,
    "include_stop_str_in_output": FLAG,
    "seed": Field(int, None, -SEED_LIMIT, SEED_LIMIT - 1),
    "prompt_index": Field(int, 0, 0, SEED_LIMIT - 1),
    "sample_index": Field(int, 0, 0, SEED_LIMIT - 1),
    "stream": FLAG,
    "stream_options": Field(dict, {}, of=STREAM_OPTIONS),
    "return_token_ids": FLAG,
    "return_tokens_as_token_ids": FLAG,
    "return_routed_experts": FLAG,
    "response_format": Field(among=({"type": "text"},)),
    "logit_bias": Field(among=({},)),
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "min_tokens"), ZERO),
    **dict.fromkeys(("repetition_penalty", "length_penalty", "best_of"), ONE),
    **dict.fromkeys(("echo", "use_beam_search"), NO),  # /v1/completions has echo
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens"), YES),
    **dict.fromkeys(("allowed_token_ids", "prompt_logprobs", "structured_outputs", "truncate_prompt_tokens"), NONE),
    **dict.fromkeys(("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"), IGNORED),
    **dict.fromkeys(("prompt_cache_retention", "cache_salt", "priority", "request_id", "rid"), IGNORED),
    "bad_words": EMPTY,
}
COMPLETION: Table = {
    **SAMPLING,
    "prompt": Field(use=texts_or_ids),
    "max_tokens": Field(int, 16),
    "logprobs": Field(int, None, 0, 1),
    "echo": FLAG,
    "add_special_tokens": Field(bool, True),
    "suffix": Field(among=("",)),
    "prompt_embeds": NONE,
    "images": Field(list, [], maximum=4096, of=Field(use=_data_uri)),  # of a prompt of ids, which has their tokens
    "mm_processor_kwargs": Field(dict, {}, of={"max_pixels": Field(int, minimum=1)}),
}
PART: Table = {
    "type": Field(among=("text", "image_url")),
    "text": Field(str),
    "image_url": Field(dict, of={"url": Field(use=_data_uri), "detail": IGNORED}),
}
CALL: Table = {
    "id": TEXT,
    "type": Field(among=("function",)),
    "index": COUNT,
    "function": Field(dict, of={"name": TEXT, "arguments": Field(use=_arguments)}),
}
MESSAGE: Table = {
    "role": TEXT,
    "content": Field(use=_content),
    "name": TEXT,
    "tool_calls": Field(list, maximum=4096, of=Field(dict, of=CALL)),
    "tool_call_id": TEXT,
    **dict.fromkeys(("reasoning_content", "reasoning", "thinking"), Field(str)),
    "refusal": Field(among=("", [])),
    **dict.fromkeys(("audio", "function_call", "annotations"), EMPTY),  # of an answer that comes back
}
CHAT: Table = {
    **SAMPLING,
    "messages": Field(list, maximum=4096, of=Field(dict, of=MESSAGE)),
    "tools": Field(list, maximum=4096, of=Field(dict)),
    "max_tokens": Field(int),
    "max_completion_tokens": Field(int),
    "logprobs": FLAG,
    "top_logprobs": ZERO,
    "modalities": Field(among=(["text"],)),
    "chat_template_kwargs": Field(use=_variables),
    "add_generation_prompt": Field(bool),
    "add_special_tokens": NO,
    "continue_final_message": FLAG,
    **dict.fromkeys(("tool_choice", "function_call"), Field(among=("auto", "none"))),
    **dict.fromkeys(("functions", "documents"), EMPTY),
    **dict.fromkeys(("audio", "reasoning_effort", "verbosity", "web_search_options", "chat_template"), NONE),
    **dict.fromkeys(("prediction", "parallel_tool_calls"), IGNORED),
}


def _image_parts(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return where the images of checked messages stand, in order."""
    return [
        f"messages[{number}].content[{place}]"
        for number, message in enumerate(messages)
        for place, part in enumerate(message["content"] if isinstance(message.get("content"), list) else ())
        if part.get("type") == "image_url"
    ]


@contextmanager
def api_errors(field: str, images: Sequence[str] = ()) -> Iterator[None]:
    """Turn a UserError into an ApiError of `field`, or of the image that it is of. images: where they stand."""
    try:
        yield
    except ImageError as error:
        raise ApiError(400, f"{images[error.number]}: {error}", images[error.number]) from error
    except UserError as error:
        raise ApiError(400, str(error), field) from error


def _with_pixels(ask: "ApiRequest", images: "Images | None") -> "ApiRequest":
    """Return `ask` with the images of its one prompt."""
    if images is None:
        return ask
    return replace(ask, requests=[replace(request, images=images) for request in ask.requests])


@dataclass(frozen=True)
class ApiRequest:
    """HTTP request: `requests` by prompt, then by sample, of the model `name`, with an adapter or without. fields: of
    its body, as SAMPLING has them."""

    fields: Mapping[str, Any]
    name: str
    adapter: str | None
    requests: list[Request]
    chat: bool
    logprobs: bool
    eos_ids: tuple[int, ...]
    echo: tuple[str, ...] = ()  # each prompt's text, where answers begin with it
    with_argmax: bool = False  # whether to return the most likely token at each position (with echo)


class Parser:
    """Parser of bodies to `Ask`. chats: the encoder of chats, with the tokenizer and the template; max_length: prompt
    and completion together. `adapters`: names that a request may say in place of the model's."""

    def __init__(self, chats: ChatEncoder, model: str, max_length: int):
        self.chats, self.encoder, self.model, self.max_length = chats, chats.encoder, model, max_length
        self.adapters: tuple[str, ...] = ()
        self.tokenizer = chats.encoder.tokenizer

    def completion(self, body: Mapping[str, Any]) -> ApiRequest:
        """Return the request of a body of /v1/completions. Raises ApiError."""
        fields = self._fields(body, COMPLETION)
        if fields["prompt"] is None:
            raise ApiError(400, "prompt must be given: a text, token ids, or a list of either", "prompt")
        if len(fields["prompt"]) * fields["n"] > MAX_REQUESTS:
            raise ApiError(400, f"prompt and n make more than {MAX_REQUESTS} completions; ask several times", "prompt")
        prompts = [self._prompt(prompt, fields["add_special_tokens"]) for prompt in fields["prompt"]]
        ask = self._ask(fields, prompts, fields["max_tokens"], fields["logprobs"] is not None, chat=False)
        if fields["images"]:
            return self._with_images(ask, fields)
        return self._echoing(ask, fields) if fields["echo"] else ask

    def _with_images(self, ask: ApiRequest, fields: Mapping[str, Any]) -> ApiRequest:
        """Return `ask` with the images of its one prompt of token ids. Raises ApiError for another prompt."""
        if not is_token_ids(fields["prompt"][0]) or len(fields["prompt"]) > 1 or fields["echo"]:
            raise ApiError(400, "images are of one prompt of token ids, which has their tokens, without echo", "images")
        names = [f"images[{number}]" for number in range(len(fields["images"]))]
        with api_errors("images", names):
            chats = self.chats.within(fields["mm_processor_kwargs"].get("max_pixels"))
            prompt = ChatPrompt(fields["prompt"][0], chats.lay_out_all(fields["images"]))
            self._check_room(prompt, names)
            if not chats.reader.are_contiguous(prompt.ids, prompt.images):
                count, sizes = (
                    len(chats.reader.image_positions(prompt.ids)),
                    [image.layout.tokens for image in prompt.images],
                )
                problem = f"the prompt has {count} image tokens, and by this model's image processor {sum(sizes)}"
                fix = "serve the very model that the prompt is for"
                raise ApiError(400, f"{problem}, those of an image in a row ({sizes}): {fix}", "images")
            images = chats.images_of(prompt)
        return _with_pixels(ask, images)

    def _echoing(self, ask: ApiRequest, fields: Mapping[str, Any]) -> ApiRequest:
        """Return `ask` with the prompts in its answers."""
        if fields["stream"]:
            raise ApiError(400, "echo=True is not for streams: set stream=False", "echo")
        likeliest = fields["logprobs"] == 1
        if likeliest and fields["max_tokens"] and fields["temperature"]:
            what = "with echo, logprobs=1 names the likeliest tokens, which are those drawn at temperature=0"
            raise ApiError(400, f"{what}; set that, or max_tokens=0, or logprobs=0", "logprobs")
        texts = [prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt) for prompt in fields["prompt"]]
        return replace(ask, echo=tuple(texts), with_argmax=likeliest)

    def chat(self, body: Mapping[str, Any]) -> ApiRequest:
        """Return the request of a body of /v1/chat/completions. Raises ApiError."""
        fields = self._fields(body, CHAT)
        if fields["messages"] is None:
            raise ApiError(400, "messages is missing: a list of objects with role and content", "messages")
        if self.encoder.template is None:
            raise ApiError(400, f"{self.model} has no chat template; use /v1/completions", "messages")
        variables = fields["chat_template_kwargs"] or {}
        if unknown := [name for name in variables if not self.encoder.template.has_variable(name)]:
            name = f"chat_template_kwargs.{unknown[0][:64]}"
            raise ApiError(400, f"{name} is no variable that this model's chat template reads", "chat_template_kwargs")
        parts = _image_parts(fields["messages"])
        with api_errors("messages", parts):
            messages, _ = read_messages(fields["messages"], "messages")
            self._check_size(sum(map(_characters, messages)), "messages")
            continues = _continues(fields)
            prompt = self.chats.encode(Prompt(messages, {}, read_tools(fields), variables, continues))
            self._check_room(prompt, parts)
            most = fields["max_completion_tokens"]
            most = fields["max_tokens"] if most is None else most
            if most is None:
                most = max(0, self.max_length - len(prompt.ids))
            ask = self._ask(fields, [tuple(prompt.ids)], most, fields["logprobs"], chat=True)
            images = self.chats.images_of(prompt)
        return _with_pixels(ask, images)

    def _check_room(self, prompt: ChatPrompt, parts: Sequence[str]) -> None:
        """Raise ApiError where images, at `parts` of the body, are too large or make a prompt too long, before they are
        decoded."""
        tokens, stored = [image.layout.tokens for image in prompt.images], 0
        for number, image in enumerate(prompt.images):
            height, width, _ = image.image.header()
            stored += height * width
            if stored > MAX_STORED_PIXELS:
                what = f"a request's images may have {MAX_STORED_PIXELS / 1e6:g} megapixels together: send smaller ones"
                raise ImageError(number, what)
        if tokens and len(prompt.ids) > self.max_length:
            part = parts[tokens.index(max(tokens))]
            what = f"{max(tokens)} tokens, and the prompt has {len(prompt.ids)}; the model's context"
            raise ApiError(400, f"{part}: the image becomes {what} holds {self.max_length}: send a smaller one", part)

    def _fields(self, body: Mapping[str, Any], table: Table) -> dict[str, Any]:
        fields = check(body, table)
        model = fields["model"]
        names = self.model, *self.adapters
        if model is not None and model not in names:
            raise ApiError(404, f"there is no model {model!r} here; this server has {', '.join(names)}", "model")
        if fields["top_p"] == 0:
            raise ApiError(400, f"top_p={fields['top_p']} must be above 0", "top_p")
        self._check_ids(fields["stop_token_ids"], "stop_token_ids")
        if fields["return_routed_experts"] and fields["stream"]:
            what = "return_routed_experts=True is not for streams: set stream=False"
            raise ApiError(400, what, "return_routed_experts")
        return fields

    def _check_ids(self, ids: Sequence[int], name: str) -> None:
        limit = self.tokenizer.id_limit
        if max(ids, default=0) >= limit:
            raise ApiError(400, f"{name} has the id {max(ids)}, beyond the model's vocabulary of {limit}", name)

    def _check_size(self, characters: int, name: str) -> None:
        """Raise ApiError, before it is tokenised, for a text that is far too long."""
        most = MAX_CHARACTERS_PER_TOKEN * self.max_length
        if characters > most:
            raise ApiError(400, f"{name} has {characters:,} characters, and a prompt at most {most:,}", name)

    def _prompt(self, prompt: str | list[int], specials: bool) -> tuple[int, ...]:
        self._check_size(len(prompt) if isinstance(prompt, str) else 0, "prompt")
        with api_errors("prompt"):
            ids = self.tokenizer.encode(prompt, specials) if isinstance(prompt, str) else prompt
        if not ids:
            raise ApiError(400, "prompt has no token: a completion needs one at least to follow", "prompt")
        self._check_ids(ids, "prompt")
        return tuple(ids)

    def _ask(
        self, fields: dict, prompts: list[tuple[int, ...]], most: int, logprobs: bool, *, chat: bool
    ) -> ApiRequest:
        longest = max(map(len, prompts))
        if longest + most > self.max_length:
            what = f"the prompt's {longest} tokens and max_tokens={most} make {longest + most}, and the model's"
            raise ApiError(400, f"{what} context holds {self.max_length}; ask for less", "max_tokens")
        eos = () if fields["ignore_eos"] else tuple(self.tokenizer.eos_ids)
        sampling = SamplingParams(
            max_new_tokens=most,
            temperature=float(fields["temperature"]),
            top_k=fields["top_k"] if fields["top_k"] > 0 else None,
            top_p=float(fields["top_p"]),
            min_p=float(fields["min_p"]),
            stop_ids=tuple(dict.fromkeys([*fields["stop_token_ids"], *eos])),
            stop=fields["stop"],
        )
        seed = secrets.randbelow(SEED_LIMIT) if fields["seed"] is None else fields["seed"]
        routed, first_sample = fields["return_routed_experts"], fields["sample_index"]
        requests = [
            Request(prompt, sampling, seed, index, sample, routed)
            for index, prompt in enumerate(prompts, fields["prompt_index"])
            for sample in range(first_sample, first_sample + fields["n"])
        ]
        name = fields["model"] or self.model
        return ApiRequest(fields, name, None if name == self.model else name, requests, chat, logprobs, eos)


def _continues(fields: Mapping[str, Any]) -> bool:
    """Return whether the completion goes on with the last message. Raises ApiError."""
    continues = fields["continue_final_message"]
    begins = fields["add_generation_prompt"]
    if begins is not None and begins == continues:
        what = f"add_generation_prompt={begins} with continue_final_message={continues}: set one of them, or leave both"
        raise ApiError(400, f"{what} out to get a reply", "add_generation_prompt")
    if continues and fields["messages"][-1]["role"] != "assistant":
        raise ApiError(400, "continue_final_message=True: the last message must be the assistant's", "messages")
    return continues


def _characters(message: Mapping[str, Any]) -> int:
    """Return the number of characters of a message's text."""
    content = message.get("content") or ""
    return len(content) if isinstance(content, str) else sum(len(part.get("text") or "") for part in content)
