"""Parsing of /v1/completions and /v1/chat/completions: from a body to requests for the engine, or to an error.

Every body is checked field by field against a table. A field that the table does not have is refused. The tables have
OpenAI's fields and vLLM's, with their defaults, and SGLang's `return_routed_experts`. dtrain adds two kinds of fields.
`prompt_index` and `sample_index`, the numbers of the first prompt and of the first sample, together with `seed` give
the same samples as dtrain's own engine. `images` are the images of a prompt of token ids. No torch.
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
    """A response other than 200.

    Attributes:
        status: Status of the response.
        message: Message of OpenAI's error object.
        param: Field of the request that is wrong, if it is one.
    """

    def __init__(self, status: int, message: str, param: str | None = None):
        self.status, self.message, self.param = status, message, param
        super().__init__(message)

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        types = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 409: "conflict"}
        default = "server_error" if self.status >= 500 else "invalid_request_error"
        error_type = types.get(self.status, default)
        return {"error": {"message": self.message, "type": error_type, "param": self.param, "code": self.status}}


def read_object(raw: bytes | bytearray) -> dict[str, Any]:
    """Parse the JSON object of a body. Raises ApiError."""
    try:
        body = json.loads(raw.decode(), parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError) as error:  # ValueError also if it is not UTF-8
        raise ApiError(400, f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    return body


def _finite(text: str) -> float:
    """Parse a finite number. Raises ValueError for NaN and Infinity, which JSON does not have."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is not a finite number")
    return value


@dataclass(frozen=True)
class Field:
    """The rule for a field of a body.

    Attributes:
        kind: Type of the value. None: any.
        default: Value if the field is missing or null.
        minimum: Smallest number, or smallest length of a text or a list.
        maximum: Largest number, or largest length of a text or a list.
        items: Rule for the entries of a list, or table of an object.
        choices: The only values that are served.
        convert: Function of the value and the field's name. It returns the value to use, or raises ApiError.
    """

    kind: type | None = None
    default: Any = None
    minimum: float = 0
    maximum: float = math.inf
    items: Union["Field", "Table", None] = None
    choices: tuple | None = None
    convert: Callable[[Any, str], Any] | None = None

    def read(self, value: Any, name: str) -> Any:
        """Check a value and return the value to use.

        Args:
            value: Value in the body, not null.
            name: Name of the field, for errors.

        Raises:
            ApiError: If the value is wrong.

        Example:
            >>> Field(int, maximum=8).read(3, "n")
            3
            >>> Field(float).read("hot", "temperature")
            Traceback (most recent call last):
                ...
            dtrain.commands.serve.protocol.ApiError: temperature must be a number, not 'hot'
        """
        # `type` instead of `isinstance`, because True is an int. A whole number may stand for a float.
        has_kind = self.kind is None or type(value) is self.kind or (self.kind is float and type(value) is int)
        if not has_kind:
            assert self.kind is not None
            raise ApiError(400, f"{name} must be {_WORDS[self.kind]}, not {shown(value)}", name)
        self._check_size(value, name)
        self._check_choice(value, name)
        if isinstance(self.items, Field):
            return [self.items.read(item, f"{name}[{index}]") for index, item in enumerate(value)]
        if self.items is not None:
            fields = check(value, self.items, name)
            return {key: item for key, item in fields.items() if item is not None}
        return value if self.convert is None else self.convert(value, name)

    def _check_size(self, value: Any, name: str) -> None:
        """Raise ApiError if a number, or the length of a text or list, is out of range."""
        if self.kind in (int, float):
            size, what = value, f"{name}={shown(value)}"
        elif self.kind in (str, list):
            size, what = len(value), f"the length of {name}, {len(value)},"
        else:
            return
        if not self.minimum <= size <= self.maximum:
            if self.maximum == math.inf:
                bounds = f"at least {self.minimum}"
            else:
                bounds = f"from {self.minimum} to {self.maximum}"
            raise ApiError(400, f"{what} must be {bounds}", name)

    def _check_choice(self, value: Any, name: str) -> None:
        """Raise ApiError if only other values are served."""
        if self.choices is None:
            return
        is_flag = isinstance(value, bool)  # 1 == True in Python, but not in JSON
        if value in [choice for choice in self.choices if isinstance(choice, bool) == is_flag]:
            return
        fix = f"it may be {', '.join(map(str, self.choices))}" if self.choices else "leave it out"
        raise ApiError(400, f"{name}={shown(value)}: dtrain serve does not support it; {fix}", name)


Table = Mapping[str, Field]


def check(body: Mapping[str, Any], table: Table, name: str = "") -> dict[str, Any]:
    """Check an object against a table and return the values of all fields of the table.

    Args:
        body: The object.
        table: Rules by field.
        name: Name of the object inside the body. "" for the body itself.

    Raises:
        ApiError: If a field is wrong or unknown.
    """
    prefix = f"{name}." if name else ""
    for key in body:
        if key not in table:
            full_name = f"{prefix}{key[:64]}"
            hint = name_hint(key, table, prefix, otherwise="")
            raise ApiError(400, f"{full_name} is not a field that dtrain serve knows{hint}", full_name)
    values = {}
    for key, field in table.items():
        value = body.get(key)
        values[key] = field.default if value is None else field.read(value, prefix + key)
    return values


def is_token_ids(value: Any) -> bool:
    """Return whether a value is a non-empty list of non-negative integers.

    Example:
        >>> is_token_ids([1, 2]), is_token_ids([]), is_token_ids([True])
        (True, False, False)
    """
    return isinstance(value, list) and bool(value) and all(type(item) is int and item >= 0 for item in value)


FLAG = Field(bool, False)
TEXT = Field(str, maximum=4096)
COUNT = Field(int, maximum=2**31 - 1)
IGNORED = Field()  # accepted, and changes nothing in the response

MAX_REQUESTS = 4096  # largest number of completions of one call
MAX_CHARACTERS_PER_TOKEN = 256  # a prompt with more characters for each token of the context is refused unread
SEED_LIMIT = 2**63


def texts_or_ids(value: Any, name: str) -> list[str | list[int]]:
    """Return a list of texts and lists of token ids, from a single one or a list. Raises ApiError."""
    prompts = value if isinstance(value, list) and not is_token_ids(value) else [value]
    has_valid_length = 0 < len(prompts) <= MAX_REQUESTS
    if not has_valid_length or not all(isinstance(prompt, str) or is_token_ids(prompt) for prompt in prompts):
        expected = f"a text, token ids, or a list of at most {MAX_REQUESTS} of them, none empty"
        raise ApiError(400, f"{name} must be {expected}", name)
    return prompts


def _stops(value: Any, name: str) -> tuple[str, ...]:
    """Return stop texts, from a single one or a list. Raises ApiError."""
    stops = [value] if isinstance(value, str) else value
    are_texts = isinstance(stops, list)
    if are_texts:
        are_texts = all(isinstance(stop, str) and 0 < len(stop) <= 1024 for stop in stops[:65])
    if not are_texts:
        raise ApiError(400, f"{name} must be a text or a list of texts, each of 1 to 1024 characters", name)
    if len(stops) > 64:
        raise ApiError(400, f"{name} must be at most 64 texts", name)
    return tuple(stops)


def _content(value: Any, name: str) -> Any:
    """Check the content of a message: a text, or parts of texts and images."""
    if isinstance(value, str):
        return value
    parts = Field(list, maximum=4096, items=Field(dict, items=PART)).read(value, name)
    for index, part in enumerate(parts):
        kind = part.get("type", "text")
        if part.keys() - {"type"} != {kind}:
            raise ApiError(400, f"{name}[{index}] of type {kind} must have the field {kind}, and no other", name)
    return parts


def _data_uri(value: Any, name: str) -> str:
    """Check that a value is a data URI. A server must not read files or fetch addresses that a client names."""
    if not isinstance(value, str) or value[:5].lower() != "data:":
        problem = "must contain the image (data:image/png;base64,...): files and addresses are not read here"
        raise ApiError(400, f"{name}={shown(value)} {problem}", name)
    return value


def _arguments(value: Any, name: str) -> Any:
    """Return the arguments of a tool call: an object, or JSON text, which `read_messages` parses."""
    if isinstance(value, str):
        return value
    return Field(dict).read(value, name)


def _variables(value: Any, name: str) -> dict[str, Any]:
    """Check variables for the chat template."""
    for key, item in Field(dict).read(value, name).items():
        is_long_text = isinstance(item, str) and len(item) > 4096
        if is_long_text or not isinstance(item, str | int | float | None):
            raise ApiError(400, f"{name}.{key[:64]} must be true, false, null, a number or a short text", name)
    return value


# Fields that dtrain serve does not support are accepted only with a value that has no effect.
NONE, ZERO, ONE = Field(choices=()), Field(choices=(0,)), Field(choices=(1,))
NO, YES, EMPTY = Field(choices=(False,)), Field(choices=(True,)), Field(choices=([],))
STREAM_OPTIONS: Table = {"include_usage": FLAG, "include_obfuscation": IGNORED, "continuous_usage_stats": NO}
SAMPLING: Table = {
    "model": TEXT,
    "n": Field(int, 1, 1, 1024),
    "temperature": Field(float, 1.0),
    "top_k": Field(int, -1, -1, 2**31 - 1),  # -1 and 0: off
    "top_p": Field(float, 1.0, 0, 1),
    "min_p": Field(float, 0.0, 0, 1),
    "stop": Field(default=(), convert=_stops),
    "stop_token_ids": Field(list, [], maximum=1024, items=COUNT),
    "ignore_eos": FLAG,
    "include_stop_str_in_output": FLAG,
    "seed": Field(int, None, -SEED_LIMIT, SEED_LIMIT - 1),
    "prompt_index": Field(int, 0, 0, SEED_LIMIT - 1),
    "sample_index": Field(int, 0, 0, SEED_LIMIT - 1),
    "stream": FLAG,
    "stream_options": Field(dict, {}, items=STREAM_OPTIONS),
    "return_token_ids": FLAG,
    "return_tokens_as_token_ids": FLAG,
    "return_routed_experts": FLAG,
    "response_format": Field(choices=({"type": "text"},)),
    "logit_bias": Field(choices=({},)),
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
    "prompt": Field(convert=texts_or_ids),
    "max_tokens": Field(int, 16),
    "logprobs": Field(int, None, 0, 1),
    "echo": FLAG,
    "add_special_tokens": Field(bool, True),
    "suffix": Field(choices=("",)),
    "prompt_embeds": NONE,
    # Images of a prompt of token ids, which includes the image tokens.
    "images": Field(list, [], maximum=4096, items=Field(convert=_data_uri)),
    "mm_processor_kwargs": Field(dict, {}, items={"max_pixels": Field(int, minimum=1)}),
}
PART: Table = {
    "type": Field(choices=("text", "image_url")),
    "text": Field(str),
    "image_url": Field(dict, items={"url": Field(convert=_data_uri), "detail": IGNORED}),
}
CALL: Table = {
    "id": TEXT,
    "type": Field(choices=("function",)),
    "index": COUNT,
    "function": Field(dict, items={"name": TEXT, "arguments": Field(convert=_arguments)}),
}
MESSAGE: Table = {
    "role": TEXT,
    "content": Field(convert=_content),
    "name": TEXT,
    "tool_calls": Field(list, maximum=4096, items=Field(dict, items=CALL)),
    "tool_call_id": TEXT,
    **dict.fromkeys(("reasoning_content", "reasoning", "thinking"), Field(str)),
    "refusal": Field(choices=("", [])),
    **dict.fromkeys(("audio", "function_call", "annotations"), EMPTY),  # of an answer that comes back
}
CHAT: Table = {
    **SAMPLING,
    "messages": Field(list, maximum=4096, items=Field(dict, items=MESSAGE)),
    "tools": Field(list, maximum=4096, items=Field(dict)),
    "max_tokens": Field(int),
    "max_completion_tokens": Field(int),
    "logprobs": FLAG,
    "top_logprobs": ZERO,
    "modalities": Field(choices=(["text"],)),
    "chat_template_kwargs": Field(convert=_variables),
    "add_generation_prompt": Field(bool),
    "add_special_tokens": NO,
    "continue_final_message": FLAG,
    **dict.fromkeys(("tool_choice", "function_call"), Field(choices=("auto", "none"))),
    **dict.fromkeys(("functions", "documents"), EMPTY),
    **dict.fromkeys(("audio", "reasoning_effort", "verbosity", "web_search_options", "chat_template"), NONE),
    **dict.fromkeys(("prediction", "parallel_tool_calls"), IGNORED),
}


def _image_parts(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the fields with images in checked messages, such as "messages[0].content[1]"."""
    names = []
    for message_index, message in enumerate(messages):
        content = message.get("content")
        if not isinstance(content, list):
            continue
        for part_index, part in enumerate(content):
            if part.get("type") == "image_url":
                names.append(f"messages[{message_index}].content[{part_index}]")
    return names


@contextmanager
def api_errors(field: str, images: Sequence[str] = ()) -> Iterator[None]:
    """Turn a UserError in the block into an ApiError.

    Args:
        field: Field of the request that is wrong.
        images: Names of the fields with images. An ImageError is about one of them.
    """
    try:
        yield
    except ImageError as error:
        raise ApiError(400, f"{images[error.number]}: {error}", images[error.number]) from error
    except UserError as error:
        raise ApiError(400, str(error), field) from error


def _with_pixels(api_request: "ApiRequest", images: "Images | None") -> "ApiRequest":
    """Add the decoded images of a call's only prompt to all of its requests."""
    if images is None:
        return api_request
    return replace(api_request, requests=[replace(request, images=images) for request in api_request.requests])


@dataclass(frozen=True)
class ApiRequest:
    """A call of a client.

    Attributes:
        fields: All fields of the table for the route (COMPLETION or CHAT), with defaults filled in.
        name: Name of the model or the adapter.
        adapter: Name of the adapter. None for the model only.
        requests: Requests for the engine: the samples of the first prompt, then those of the next one.
        chat: Whether the prompt is a conversation.
        logprobs: Whether log-probabilities are returned.
        eos_ids: End-of-sequence tokens.
        echo: Text of each prompt, if the response begins with it.
        with_argmax: Whether the most likely token of each position is returned too. Only with echo.
    """

    fields: Mapping[str, Any]
    name: str
    adapter: str | None
    requests: list[Request]
    chat: bool
    logprobs: bool
    eos_ids: tuple[int, ...]
    echo: tuple[str, ...] = ()
    with_argmax: bool = False


class Parser:
    """Parser of bodies.

    Args:
        chats: Encoder of conversations, with the tokenizer and the chat template.
        model: Name of the model.
        max_length: Maximum tokens of prompt and completion together.

    Attributes:
        adapters: Names that a request may use instead of the model's.
    """

    def __init__(self, chats: ChatEncoder, model: str, max_length: int):
        self.chats, self.encoder, self.model, self.max_length = chats, chats.encoder, model, max_length
        self.adapters: tuple[str, ...] = ()
        self.tokenizer = chats.encoder.tokenizer

    def completion(self, body: Mapping[str, Any]) -> ApiRequest:
        """Parse a body of /v1/completions. Raises ApiError."""
        fields = self._fields(body, COMPLETION)
        if fields["prompt"] is None:
            raise ApiError(400, "prompt must be given: a text, token ids, or a list of either", "prompt")
        if len(fields["prompt"]) * fields["n"] > MAX_REQUESTS:
            raise ApiError(
                400, f"prompt and n make more than {MAX_REQUESTS} completions; send several requests", "prompt"
            )
        prompts = [self._prompt(prompt, fields["add_special_tokens"]) for prompt in fields["prompt"]]
        has_logprobs = fields["logprobs"] is not None
        api_request = self._build_request(fields, prompts, fields["max_tokens"], has_logprobs, chat=False)
        if fields["images"]:
            return self._with_images(api_request, fields)
        return self._with_echo(api_request, fields) if fields["echo"] else api_request

    def _with_images(self, api_request: ApiRequest, fields: Mapping[str, Any]) -> ApiRequest:
        """Add the images of a prompt of token ids. Raises ApiError for other prompts."""
        if not is_token_ids(fields["prompt"][0]) or len(fields["prompt"]) > 1 or fields["echo"]:
            raise ApiError(400, "images need a single prompt of token ids with image tokens, and no echo", "images")
        names = [f"images[{number}]" for number in range(len(fields["images"]))]
        with api_errors("images", names):
            chats = self.chats.within(fields["mm_processor_kwargs"].get("max_pixels"))
            prompt = ChatPrompt(fields["prompt"][0], chats.lay_out_all(fields["images"]))
            self._check_room(prompt, names)
            if not chats.reader.are_contiguous(prompt.ids, prompt.images):
                num_tokens = len(chats.reader.image_positions(prompt.ids))
                sizes = [image.layout.tokens for image in prompt.images]
                raise ApiError(
                    400,
                    f"the prompt has {num_tokens} image tokens, but by this model's image processor its images have "
                    f"{sum(sizes)}, those of an image in a row ({sizes}): serve the model that the prompt was made for",
                    "images",
                )
            images = chats.images_of(prompt)
        return _with_pixels(api_request, images)

    def _with_echo(self, api_request: ApiRequest, fields: Mapping[str, Any]) -> ApiRequest:
        """Add the texts of the prompts, with which the response begins. Raises ApiError."""
        if fields["stream"]:
            raise ApiError(400, "echo=True cannot be streamed: set stream=False", "echo")
        with_argmax = fields["logprobs"] == 1
        if with_argmax and fields["max_tokens"] and fields["temperature"]:
            # The engine returns the log-probability of the sampled token only.
            problem = "with echo, logprobs=1 returns the most likely tokens, which are those sampled at temperature=0"
            raise ApiError(400, f"{problem}; set temperature=0, max_tokens=0 or logprobs=0", "logprobs")
        texts = [prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt) for prompt in fields["prompt"]]
        return replace(api_request, echo=tuple(texts), with_argmax=with_argmax)

    def chat(self, body: Mapping[str, Any]) -> ApiRequest:
        """Parse a body of /v1/chat/completions. Raises ApiError."""
        fields = self._fields(body, CHAT)
        if fields["messages"] is None:
            raise ApiError(400, "messages is missing: a list of objects with role and content", "messages")
        if self.encoder.template is None:
            raise ApiError(400, f"{self.model} has no chat template; use /v1/completions", "messages")
        variables = fields["chat_template_kwargs"] or {}
        for name in variables:
            if not self.encoder.template.has_variable(name):
                full_name = f"chat_template_kwargs.{name[:64]}"
                problem = "is not a variable of this model's chat template"
                raise ApiError(400, f"{full_name} {problem}", "chat_template_kwargs")
        parts = _image_parts(fields["messages"])
        with api_errors("messages", parts):
            messages, _ = read_messages(fields["messages"], "messages")
            self._check_num_characters(sum(_num_characters(message) for message in messages), "messages")
            continues = _continues_last_message(fields)
            prompt = self.chats.encode(Prompt(messages, {}, read_tools(fields), variables, continues))
            self._check_room(prompt, parts)
            max_tokens = fields["max_completion_tokens"]
            if max_tokens is None:
                max_tokens = fields["max_tokens"]
            if max_tokens is None:
                max_tokens = max(0, self.max_length - len(prompt.ids))
            api_request = self._build_request(fields, [tuple(prompt.ids)], max_tokens, fields["logprobs"], chat=True)
            images = self.chats.images_of(prompt)
        return _with_pixels(api_request, images)

    def _check_room(self, prompt: ChatPrompt, parts: Sequence[str]) -> None:
        """Raise ApiError, before images are decoded, if they are too large or make the prompt too long.

        Args:
            prompt: The prompt.
            parts: Names of the fields with images.
        """
        tokens = [image.layout.tokens for image in prompt.images]
        num_pixels = 0
        for number, image in enumerate(prompt.images):
            height, width, _ = image.image.header()
            num_pixels += height * width
            if num_pixels > MAX_STORED_PIXELS:
                limit = f"{MAX_STORED_PIXELS / 1e6:g} megapixels"
                raise ImageError(number, f"the images of a request may have {limit} in total: send smaller ones")
        if tokens and len(prompt.ids) > self.max_length:
            part = parts[tokens.index(max(tokens))]
            raise ApiError(
                400,
                f"{part}: the image becomes {max(tokens)} tokens, and the prompt has {len(prompt.ids)}; the model's "
                f"context holds {self.max_length}: send a smaller one",
                part,
            )

    def _fields(self, body: Mapping[str, Any], table: Table) -> dict[str, Any]:
        """Check a body and return its fields. Raises ApiError."""
        fields = check(body, table)
        model = fields["model"]
        names = self.model, *self.adapters
        if model is not None and model not in names:
            raise ApiError(404, f"there is no model {model!r} here; this server has {', '.join(names)}", "model")
        if fields["top_p"] == 0:
            raise ApiError(400, f"top_p={fields['top_p']} must be above 0", "top_p")
        self._check_ids(fields["stop_token_ids"], "stop_token_ids")
        if fields["return_routed_experts"] and fields["stream"]:
            problem = "return_routed_experts=True cannot be streamed: set stream=False"
            raise ApiError(400, problem, "return_routed_experts")
        return fields

    def _check_ids(self, ids: Sequence[int], name: str) -> None:
        limit = self.tokenizer.id_limit
        if max(ids, default=0) >= limit:
            raise ApiError(400, f"{name} has the id {max(ids)}, beyond the model's vocabulary of {limit}", name)

    def _check_num_characters(self, num_characters: int, name: str) -> None:
        """Raise ApiError if a text is far too long. Called before the text is tokenized, which may take long."""
        limit = MAX_CHARACTERS_PER_TOKEN * self.max_length
        if num_characters > limit:
            raise ApiError(400, f"{name} has {num_characters:,} characters, and a prompt at most {limit:,}", name)

    def _prompt(self, prompt: str | list[int], add_special_tokens: bool) -> tuple[int, ...]:
        """Return the token ids of a prompt. Raises ApiError."""
        self._check_num_characters(len(prompt) if isinstance(prompt, str) else 0, "prompt")
        with api_errors("prompt"):
            ids = self.tokenizer.encode(prompt, add_special_tokens) if isinstance(prompt, str) else prompt
        if not ids:
            raise ApiError(400, "prompt has no tokens: a completion needs at least one", "prompt")
        self._check_ids(ids, "prompt")
        return tuple(ids)

    def _build_request(
        self, fields: dict, prompts: list[tuple[int, ...]], max_tokens: int, logprobs: bool, *, chat: bool
    ) -> ApiRequest:
        """Return the requests of all samples of the prompts. Raises ApiError if the context is too short."""
        longest = max(len(prompt) for prompt in prompts)
        if longest + max_tokens > self.max_length:
            raise ApiError(
                400,
                f"the prompt's {longest} tokens and max_tokens={max_tokens} make {longest + max_tokens}, and the "
                f"model's context holds {self.max_length}; ask for less",
                "max_tokens",
            )
        eos_ids = () if fields["ignore_eos"] else tuple(self.tokenizer.eos_ids)
        sampling = SamplingParams(
            max_new_tokens=max_tokens,
            temperature=float(fields["temperature"]),
            top_k=fields["top_k"] if fields["top_k"] > 0 else None,
            top_p=float(fields["top_p"]),
            min_p=float(fields["min_p"]),
            stop_ids=tuple(dict.fromkeys([*fields["stop_token_ids"], *eos_ids])),
            stop=fields["stop"],
        )
        seed = secrets.randbelow(SEED_LIMIT) if fields["seed"] is None else fields["seed"]
        routed, first_sample = fields["return_routed_experts"], fields["sample_index"]
        requests = []
        for index, prompt in enumerate(prompts, fields["prompt_index"]):
            for sample in range(first_sample, first_sample + fields["n"]):
                requests.append(Request(prompt, sampling, seed, index, sample, routed))
        name = fields["model"] or self.model
        adapter = None if name == self.model else name
        return ApiRequest(fields, name, adapter, requests, chat, logprobs, eos_ids)


def _continues_last_message(fields: Mapping[str, Any]) -> bool:
    """Return whether the completion continues the last message. Raises ApiError."""
    continues = fields["continue_final_message"]
    begins = fields["add_generation_prompt"]
    if begins is not None and begins == continues:
        raise ApiError(
            400,
            f"add_generation_prompt={begins} with continue_final_message={continues}: set one of them, or leave both "
            "out to get a reply",
            "add_generation_prompt",
        )
    if continues and fields["messages"][-1]["role"] != "assistant":
        raise ApiError(400, "continue_final_message=True: the last message must be the assistant's", "messages")
    return continues


def _num_characters(message: Mapping[str, Any]) -> int:
    """Return the number of characters of a message's text."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return len(content)
    return sum(len(part.get("text") or "") for part in content)
