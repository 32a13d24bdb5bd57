"""Rows of prompts: the text that the model answers, and the columns by which answers are scored. Torch is not imported.

    messages, sharegpt      the conversation through its last user (or tool) message; the answer after it is a column
    prompt                  a list of messages, or a string, which is the beginning of a text, or a user's message
                            (encoder.py); `completion` is a column
    question                a user's message, as in GSM8K's files (question, answer)
    instruction, input      a user's message, as in Alpaca's files; `output` is a column
    prompt_ids              token ids, used as they are

Every other column is kept for the rewards, `system` and `tools`, which the template reads, among them. Where a row has
no column `answer`, the answer that the format holds (the last assistant message, `completion`, `output`) becomes it. A
prompt of messages is rendered with the generation prompt; a string begins with what the tokenizer's post-processor puts
there. A prompt that is too long loses its beginning.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from dtrain.base.errors import UserError
from dtrain.base.json_files import json_type
from dtrain.data.formats.encoder import IMAGE_CUT, TOO_LONG, Document, Encoder, RowEncoder
from dtrain.data.formats.formats import (
    PROMPT_FORMATS,
    read_instruction,
    read_integers,
    read_messages,
    read_string,
    read_tools,
    refuse_images,
    require_keys,
    with_system,
)
from dtrain.data.formats.image_parts import COLUMN, with_images, without_images
from dtrain.data.text.template import ChatTemplate
from dtrain.data.text.tokenizer import Tokenizer
from dtrain.data.text.tool_calls import learn_tool_format

if TYPE_CHECKING:
    from dtrain.data.images.reader import LaidOutImage

Message = dict[str, Any]
# What a reward's function is called with beside the columns.
RESERVED = ("prompts", "completions", "completion_ids")
# Marks the end of a message that a completion continues. It ends with a space, so that a template that strips shows.
CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


@dataclass(frozen=True)
class Prompt:
    """A prompt of one row. `content`: a conversation, a text, or token ids. `columns`: the row's others, `answer` among
    them where known. `variables`: for the chat template, beside its own. `continues`: whether the completion goes on
    with the conversation's last message instead of replying to it."""

    content: list[Message] | str | list[int]
    columns: dict[str, Any] = field(default_factory=dict)
    tools: list[dict[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    continues_last_message: bool = False

    @property
    def content_without_images(self) -> Any:
        """The content with bare parts in the place of images, as rewards and records have it."""
        return without_images(self.content) if self.is_chat else self.content  # type: ignore[arg-type]

    @property
    def is_chat(self) -> bool:
        return bool(self.content) and isinstance(self.content[0], Mapping)


@dataclass(frozen=True)
class PromptOptions:
    """Options of prompts. room: tokens of the longest prompt. system: the system message of conversations that have
    none. loss_on: as `data.loss_on`, where the row with its own answer is wanted too; None: the prompt alone. tools:
    schemas of the tools that every prompt lists. answers: whether something answers calls of the rows' own tools."""

    max_prompt_length: int
    system: str | None = None
    loss_on: str | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    answers_row_tools: bool = False

    @classmethod
    def for_length(cls, max_length: int, max_new_tokens: int, system: str | None, **options: Any) -> "PromptOptions":
        """Return options with the room that a completion leaves in a sequence of `max_length`, one token at least."""
        return cls(max(1, max_length - max_new_tokens), system, **options)


def normalise_prompt(row: Mapping[str, Any], name: str, system: str | None = None) -> Prompt:
    """Return `row` of format `name` (a key of formats.PROMPT_FORMATS) in its one shape. Raises UserError."""
    require_keys(row, name, "prompts")
    if name == "tokenized":
        refuse_images(row, "token ids")
        ids = read_integers(row["prompt_ids"], "prompt_ids")
        if not ids or min(ids) < 0:
            raise UserError("prompt_ids must hold one id at least, and none below 0")
        return Prompt(ids, _columns(row, "prompt_ids"))
    if name == "prompt_completion" and isinstance(row["prompt"], str):
        refuse_images(row, "plain prompts")
        return Prompt(row["prompt"], _columns(row, "prompt", answer=row.get("completion")))
    messages, columns = _chat(row, name)
    messages = with_system(messages, row.get("system") or system)
    columns.pop(COLUMN, None)
    return Prompt(with_images(row, messages), columns, read_tools(row))


def _chat(row: Mapping[str, Any], name: str) -> tuple[list[Message], dict[str, Any]]:
    if name == "question":
        messages = [{"role": "user", "content": read_string(row["question"], "question")}]
        return messages, _columns(row, "question")
    if name == "alpaca":
        messages = [{"role": "user", "content": read_instruction(row)}]
        return messages, _columns(row, "instruction", "input", answer=row.get("output"))
    if name == "prompt_completion":
        messages, _ = read_messages(row["prompt"], "prompt")
        _check_end(messages, "prompt")
        answer = row.get("completion")
        return messages, _columns(row, "prompt", answer=_text_of(answer) if isinstance(answer, list | dict) else answer)
    (key,) = PROMPT_FORMATS[name]
    messages, _ = read_messages(row[key], key)
    end = max((index + 1 for index, message in enumerate(messages) if message["role"] != "assistant"), default=0)
    _check_end(messages[:end], key)
    return messages[:end], _columns(row, key, answer=_text_of(messages[end:]))


def _check_end(messages: Sequence[Message], key: str) -> None:
    if not messages or messages[-1]["role"] in ("system", "developer", "assistant"):
        role = messages[-1]["role"] if messages else "assistant"
        raise UserError(f"{key}: there is no user message for the model to answer; the last is of role {role}")


def _text_of(answer: Any) -> str | None:
    if isinstance(answer, list) and answer and isinstance(answer[-1], Mapping):
        answer = answer[-1].get("content")
    return answer if isinstance(answer, str) else None


def _columns(row: Mapping[str, Any], *taken: str, answer: str | None = None) -> dict[str, Any]:
    columns = {str(key): value for key, value in row.items() if key not in (*taken, *RESERVED)}
    if columns.get("answer") is None and answer is not None:
        columns["answer"] = answer
    return columns


class PromptEncoder(RowEncoder):
    """Encoder of prompts to samples of one document without a trained token, the prompt and the columns as JSON beside
    it, images as bare parts; with `options.loss_on` a second document, that of `encoder.Encoder`."""

    noun = "prompts"
    accepts_images = True
    stores_columns = True
    marks = ("prompts, all columns",)
    string_columns: Mapping[str, Sequence[str]] = MappingProxyType({"prompt_completion": ("prompt",)})

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate | None, *, options: PromptOptions | None, **limits: Any
    ):
        super().__init__(tokenizer, template, **limits)
        self.options = options = options or PromptOptions(self.max_length)
        self.decides = [[options.max_prompt_length, options.system]]
        if options.tools:
            learn_tool_format(template, options.tools)
            self.decides[0].append(options.tools)
        self._template, self._knows_calls = template, bool(options.tools)
        self._examples: Encoder | None = None
        if options.loss_on is not None:
            self._examples = Encoder(tokenizer, template, loss_on=options.loss_on, **limits)
            self.decides[0].append(options.loss_on)
            self.documents = 2

    def row_content(self, row: Mapping[str, Any], name: str) -> Any:
        prompt = normalise_prompt(self.as_messages(row, name), name)
        messages: Any = prompt.content if prompt.is_chat else ()
        return [prompt.content_without_images, prompt.tools, *self.image_content(messages)]

    def encode_row(self, row: Mapping[str, Any], name: str) -> list[Document] | str:
        prompt = normalise_prompt(self.as_messages(row, name), name, self.options.system)
        if self.options.tools:
            prompt = self._with_tools(prompt)
        has_tools = bool(self.options.tools or (self.options.answers_row_tools and prompt.tools))
        if has_tools and not self._knows_calls:
            learn_tool_format(self._template, prompt.tools or [])
            self._knows_calls = True
        images = self.images_of(prompt)
        ids, is_dropped = self.encode(prompt, images), self.too_long == "drop"
        if len(ids) > self.options.max_prompt_length and (self.too_long == "error" or (has_tools and not is_dropped)):
            others = "drop, since a cut would take its tools" if has_tools else "truncate or drop"
            raise UserError(
                f"the prompt has {len(ids)} tokens, and beside sampling.max_new_tokens there is room for "
                f"{self.options.max_prompt_length} within data.max_length={self.max_length}; raise it, or set "
                f"data.too_long to {others}"
            )
        if len(ids) > self.options.max_prompt_length and is_dropped:
            return TOO_LONG
        try:
            columns = json.dumps({"prompt": prompt.content_without_images, "columns": prompt.columns}).encode()
        except TypeError as problem:
            raise UserError(f"a column is neither text, number, list nor object ({problem}); drop it") from problem
        kept = ids[-self.options.max_prompt_length :]
        own_images = self.images_in_range(ids, images, range(len(ids) - len(kept), len(ids)))
        if own_images is None:
            return IMAGE_CUT
        own = [] if self._examples is None else self._examples.encode_row(row, name)
        if isinstance(own, str):
            return own
        return [Document(kept, bytearray(len(kept)), len(ids), columns, own_images), *own]

    def _with_tools(self, prompt: Prompt) -> Prompt:
        """Add the options' tools to a prompt. Raises UserError where it cannot list tools, or has some of its own."""
        if not isinstance(prompt.content[0], Mapping):
            raise UserError("grpo.tools: the template tells the model of tools in a conversation, and this prompt is a "
                            "text or token ids; give it messages, or set data.prompts_as=user for texts")  # fmt: skip
        if prompt.tools is not None:
            raise UserError("the row has tools of its own, and the run those of grpo.tools, which alone can be called: "
                            "take the column away, or name its tools in grpo.tools")  # fmt: skip
        return replace(prompt, tools=[dict(tool) for tool in self.options.tools])

    def images_of(self, prompt: Prompt) -> "list[LaidOutImage]":
        """Return the images of a prompt, laid out from their headers. Raises UserError."""
        return self.read_images(prompt.content) if prompt.is_chat else []  # type: ignore[arg-type]

    def encode(self, prompt: Prompt, images: "Sequence[LaidOutImage]" = ()) -> list[int]:
        """Return the prompt's token ids, not yet cut, one at least. images: those of its parts, in order. Raises
        UserError."""
        content: Any = prompt.content
        if isinstance(content, str):
            ids = self.encode_text(content, ends=False)
        elif content and isinstance(content[0], int):
            self.check_ids(content, "prompt_ids")
            ids = list(content)
        elif content and isinstance(content[0], Mapping):
            if prompt.continues_last_message:
                text = _through_tag(self.render(_tagged(content), prompt.tools, False, prompt.variables, images))
            else:
                text = self.render(content, prompt.tools, True, prompt.variables, images)
            ids = self.tokenizer.encode(text)
            self.check_image_tokens(ids, images)
        else:
            raise UserError(f"a prompt must be messages, a text or token ids, not {json_type(content)}")
        if not ids:
            raise UserError("the prompt has no token, so that there is nothing to answer; give the row a prompt")
        return ids


def _tagged(messages: Sequence[Message]) -> list[Message]:
    """Return a conversation with a tag at the end of its last message. Raises UserError if that has no text."""
    *others, last = messages
    content = last.get("content")
    if isinstance(content, str):
        return [*others, {**last, "content": content + CONTINUE_TAG}]
    parts = list(content or ())
    for index in reversed(range(len(parts))):
        if "text" in parts[index]:
            parts[index] = {**parts[index], "text": parts[index]["text"] + CONTINUE_TAG}
            return [*others, {**last, "content": parts}]
    raise UserError("the last message has no text that could be continued")


def _through_tag(text: str) -> str:
    """Return a rendered conversation up to the tag in its last message.

    As transformers' `apply_chat_template(continue_final_message=True)`: a template that strips messages drops the space
    of the tag. Without the tag it would strip the end of the message too.

    Raises:
        UserError: If the template did not write the tag.
    """
    start = text.rfind(CONTINUE_TAG.strip())
    if start < 0:
        raise UserError("the chat template does not write the text of the last message, so it cannot be continued")
    return text[:start] if text.startswith(CONTINUE_TAG, start) else text[:start].rstrip()
