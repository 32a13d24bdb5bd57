"""Rows of prompts: the text that the model completes, and the columns that rewards score completions with.

    messages, sharegpt      the conversation up to its last user (or tool) message; the reply after it is the answer
    prompt                  a list of messages, or a string, which is the beginning of a text or a user message
                            (encoder.py); `completion` is the answer
    question                a user message, as in GSM8K's files (question, answer)
    instruction, input      a user message, as in Alpaca's files; `output` is the answer
    prompt_ids              token ids, used as they are

All other columns are stored for the rewards, also `system` and `tools`, which the template reads. If a row has no
column `answer`, the answer of its format becomes that column. For example,

    {"messages": [{"role": "user", "content": "2 + 2"}, {"role": "assistant", "content": "4"}], "level": 1}

gives the prompt [{"role": "user", "content": "2 + 2"}] and the columns {"level": 1, "answer": "4"}.

A prompt of messages is rendered with the generation prompt. A string begins with what the tokenizer's post-processor
adds. A prompt that is too long loses its beginning.

This module does not import torch.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

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
# Names of a reward function's other arguments; columns with these names are left out.
RESERVED = ("prompts", "completions", "completion_ids")
# Marks the end of a message that a completion continues. It ends with a space, so that one can see whether a template
# strips messages.
CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


@dataclass(frozen=True)
class Prompt:
    """The prompt of a row.

    Attributes:
        content: A conversation, a text, or token ids.
        columns: The row's other columns, with `answer` if it is known.
        tools: Tools that the conversation lists.
        variables: Variables of the chat template for this prompt.
        continues_last_message: Whether the completion continues the conversation's last message instead of replying.
    """

    content: list[Message] | str | list[int]
    columns: dict[str, Any] = field(default_factory=dict)
    tools: list[dict[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    continues_last_message: bool = False

    @property
    def content_without_images(self) -> Any:
        """The content, with images removed from its image parts. Rewards and records use this form."""
        return without_images(self.content) if self.is_chat else self.content  # type: ignore[arg-type]

    @property
    def is_chat(self) -> bool:
        """True if the content is a conversation."""
        return bool(self.content) and isinstance(self.content[0], Mapping)


@dataclass(frozen=True)
class PromptOptions:
    """Options for the encoding of prompts.

    Attributes:
        max_prompt_length: Maximum number of tokens of a prompt.
        system: System message of conversations that have none.
        loss_on: If set, a sample has a second document: the row with its own answer, trained as in `data.loss_on`.
        tools: Schemas of tools that every prompt lists.
        answers_row_tools: Whether an environment of the library `verifiers` answers calls of tools that rows list.
    """

    max_prompt_length: int
    system: str | None = None
    loss_on: str | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    answers_row_tools: bool = False

    @classmethod
    def for_length(cls, max_length: int, max_new_tokens: int, system: str | None, **options: Any) -> "PromptOptions":
        """Return options for prompts that leave room for a completion in a sequence of `max_length` tokens."""
        return cls(max(1, max_length - max_new_tokens), system, **options)


class _ChatAndColumns(NamedTuple):
    messages: list[Message]
    columns: dict[str, Any]


def normalise_prompt(row: Mapping[str, Any], name: str, system: str | None = None) -> Prompt:
    """Convert a row to a prompt.

    Args:
        row: The row.
        name: Its format, a key of `formats.PROMPT_FORMATS`.
        system: System message of conversations that have none.

    Raises:
        UserError: If the row is wrong.

    Example:
        >>> prompt = normalise_prompt({"question": "What is 2 + 2?", "answer": "#### 4"}, "question")
        >>> prompt.content, prompt.columns
        ([{'role': 'user', 'content': 'What is 2 + 2?'}], {'answer': '#### 4'})
    """
    require_keys(row, name, "prompts")
    if name == "tokenized":
        refuse_images(row, "token ids")
        ids = read_integers(row["prompt_ids"], "prompt_ids")
        if not ids or min(ids) < 0:
            raise UserError("prompt_ids must hold at least one id, and no negative id")
        return Prompt(ids, _other_columns(row, ["prompt_ids"]))
    if name == "prompt_completion" and isinstance(row["prompt"], str):
        refuse_images(row, "plain prompts")
        return Prompt(row["prompt"], _other_columns(row, ["prompt"], answer=row.get("completion")))
    messages, columns = _read_chat(row, name)
    messages = with_system(messages, row.get("system") or system)
    columns.pop(COLUMN, None)
    return Prompt(with_images(row, messages), columns, read_tools(row))


def _read_chat(row: Mapping[str, Any], name: str) -> _ChatAndColumns:
    """Return the messages of a prompt, without its answer, and the row's other columns. Raises UserError."""
    if name == "question":
        messages = [{"role": "user", "content": read_string(row["question"], "question")}]
        return _ChatAndColumns(messages, _other_columns(row, ["question"]))
    if name == "alpaca":
        messages = [{"role": "user", "content": read_instruction(row)}]
        return _ChatAndColumns(messages, _other_columns(row, ["instruction", "input"], answer=row.get("output")))
    if name == "prompt_completion":
        messages, _ = read_messages(row["prompt"], "prompt")
        _check_ends_with_question(messages, "prompt")
        answer = row.get("completion")
        if isinstance(answer, list | dict):
            answer = _text_of_last_message(answer)
        return _ChatAndColumns(messages, _other_columns(row, ["prompt"], answer=answer))
    (key,) = PROMPT_FORMATS[name]
    messages, _ = read_messages(row[key], key)
    # The assistant messages at the end are the answer.
    end = len(messages)
    while end > 0 and messages[end - 1]["role"] == "assistant":
        end -= 1
    _check_ends_with_question(messages[:end], key)
    columns = _other_columns(row, [key], answer=_text_of_last_message(messages[end:]))
    return _ChatAndColumns(messages[:end], columns)


def _check_ends_with_question(messages: Sequence[Message], key: str) -> None:
    role = messages[-1]["role"] if messages else "assistant"
    if role in ("system", "developer", "assistant"):
        raise UserError(f"{key}: there is no user message for the model to answer; the last is of role {role}")


def _text_of_last_message(messages: Any) -> str | None:
    if isinstance(messages, list) and messages and isinstance(messages[-1], Mapping):
        messages = messages[-1].get("content")
    return messages if isinstance(messages, str) else None


def _other_columns(row: Mapping[str, Any], prompt_columns: Sequence[str], answer: str | None = None) -> dict[str, Any]:
    """Return the columns that are not part of the prompt, with `answer` if the row has no such column."""
    columns = {}
    for key, value in row.items():
        if key not in prompt_columns and key not in RESERVED:
            columns[str(key)] = value
    if columns.get("answer") is None and answer is not None:
        columns["answer"] = answer
    return columns


class PromptEncoder(RowEncoder):
    """Encoder of prompts.

    A sample is one document without a trained token. The prompt (without images) and the row's other columns are stored
    with it as JSON. If `options.loss_on` is set, a sample has a second document: the full row, encoded by
    `encoder.Encoder`.

    Attributes:
        options: The options.
    """

    noun = "prompts"
    accepts_images = True
    stores_columns = True
    fingerprint_marks = ("prompts, all columns",)
    string_columns: Mapping[str, Sequence[str]] = MappingProxyType({"prompt_completion": ("prompt",)})

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate | None, *, options: PromptOptions | None, **limits: Any
    ):
        super().__init__(tokenizer, template, **limits)
        options = options or PromptOptions(self.max_length)
        self.options = options
        fingerprint: list[Any] = [options.max_prompt_length, options.system]
        if options.tools:
            learn_tool_format(template, options.tools)  # raises if the template cannot write calls of these tools
            fingerprint.append(options.tools)
        self._has_checked_template = bool(options.tools)
        self._examples: Encoder | None = None
        if options.loss_on is not None:
            self._examples = Encoder(tokenizer, template, loss_on=options.loss_on, **limits)
            fingerprint.append(options.loss_on)
            self.documents = 2
        self.fingerprint_options = [fingerprint]

    def row_content(self, row: Mapping[str, Any], name: str) -> Any:
        """Return the prompt and its tools."""
        prompt = normalise_prompt(self.as_messages(row, name), name)
        messages: Any = prompt.content if prompt.is_chat else ()
        return [prompt.content_without_images, prompt.tools, *self.image_content(messages)]

    def encode_row(self, row: Mapping[str, Any], name: str) -> list[Document] | str:
        """Encode a prompt to one document. With `options.loss_on`, the prompt and its answer are a second document."""
        options = self.options
        prompt = normalise_prompt(self.as_messages(row, name), name, options.system)
        if options.tools:
            prompt = self._with_tools(prompt)
        has_answered_tools = bool(options.tools or (options.answers_row_tools and prompt.tools))
        if has_answered_tools and not self._has_checked_template:
            learn_tool_format(self.template, prompt.tools or [])
            self._has_checked_template = True
        images = self.images_of(prompt)
        ids = self.encode(prompt, images)
        if len(ids) > options.max_prompt_length:
            self._refuse_too_long(len(ids), has_answered_tools)
            if self.too_long == "drop":
                return TOO_LONG
        try:
            columns = json.dumps({"prompt": prompt.content_without_images, "columns": prompt.columns}).encode()
        except TypeError as problem:
            raise UserError(f"a column is neither text, number, list nor object ({problem}). Remove it") from problem
        truncated_ids = ids[-options.max_prompt_length :]
        remaining_images = self.images_in_range(ids, images, range(len(ids) - len(truncated_ids), len(ids)))
        if remaining_images is None:
            return IMAGE_CUT
        documents = [Document(truncated_ids, bytearray(len(truncated_ids)), len(ids), columns, remaining_images)]
        if self._examples is not None:
            answer_documents = self._examples.encode_row(row, name)
            if isinstance(answer_documents, str):
                return answer_documents
            documents += answer_documents
        return documents

    def _refuse_too_long(self, length: int, has_answered_tools: bool) -> None:
        """Raise UserError if a prompt that is too long may be neither cut nor dropped."""
        # A prompt with tools must not be cut, because its beginning lists the tools.
        must_not_be_cut = has_answered_tools and self.too_long != "drop"
        if self.too_long != "error" and not must_not_be_cut:
            return
        choices = "drop, since a cut would take its tools" if has_answered_tools else "truncate or drop"
        raise UserError(
            f"the prompt has {length} tokens, but data.max_length={self.max_length} less sampling.max_new_tokens "
            f"leaves room for {self.options.max_prompt_length}. Raise data.max_length, or set "
            f"data.too_long to {choices}"
        )

    def _with_tools(self, prompt: Prompt) -> Prompt:
        """Add the options' tools to a prompt. Raises UserError if it cannot list tools, or has some of its own."""
        if not isinstance(prompt.content[0], Mapping):
            raise UserError(
                "grpo.tools: the template lists tools in a conversation, but this prompt is a text or token ids. Give "
                "it messages, or set data.prompts_as=user for texts"
            )
        if prompt.tools is not None:
            raise UserError(
                "the row has tools of its own, but in this run only those of grpo.tools can be called. Remove the "
                "column, or name its tools in grpo.tools"
            )
        return replace(prompt, tools=[dict(tool) for tool in self.options.tools])

    def images_of(self, prompt: Prompt) -> "list[LaidOutImage]":
        """Return the images of a prompt, with layouts from their headers. Raises UserError."""
        return self.read_images(prompt.content) if prompt.is_chat else []  # type: ignore[arg-type]

    def encode(self, prompt: Prompt, images: "Sequence[LaidOutImage]" = ()) -> list[int]:
        """Encode a prompt without cutting it.

        Args:
            prompt: The prompt.
            images: Images of the prompt's parts, in order.

        Returns:
            Token ids, at least one.

        Raises:
            UserError: If the prompt is empty, or the template refuses it.
        """
        content: Any = prompt.content
        if isinstance(content, str):
            ids = self.encode_text(content, ends=False)
        elif content and isinstance(content[0], int):
            self.check_ids(content, "prompt_ids")
            ids = list(content)
        elif content and isinstance(content[0], Mapping):
            if prompt.continues_last_message:
                tagged = self.render(_add_continue_tag(content), prompt.tools, False, prompt.variables, images)
                text = _cut_at_continue_tag(tagged)
            else:
                text = self.render(content, prompt.tools, True, prompt.variables, images)
            ids = self.tokenizer.encode(text)
            self.check_image_tokens(ids, images)
        else:
            raise UserError(f"a prompt must be messages, a text or token ids, not {json_type(content)}")
        if not ids:
            raise UserError("the prompt has no token, so there is nothing to answer. Give the row a prompt")
        return ids


def _add_continue_tag(messages: Sequence[Message]) -> list[Message]:
    """Return a conversation with a tag at the end of its last message. Raises UserError if that has no text."""
    *earlier, last = messages
    content = last.get("content")
    if isinstance(content, str):
        return [*earlier, {**last, "content": content + CONTINUE_TAG}]
    parts = list(content or ())
    for index in reversed(range(len(parts))):
        if "text" in parts[index]:
            parts[index] = {**parts[index], "text": parts[index]["text"] + CONTINUE_TAG}
            return [*earlier, {**last, "content": parts}]
    raise UserError("the last message has no text that could be continued")


def _cut_at_continue_tag(text: str) -> str:
    """Return a rendered conversation up to the tag in its last message.

    This is the method of transformers' `apply_chat_template(continue_final_message=True)`. A template that strips
    messages drops the space of the tag. Without the tag, it would strip the end of the message too.

    Raises:
        UserError: If the template did not write the tag.
    """
    start = text.rfind(CONTINUE_TAG.strip())
    if start < 0:
        raise UserError("the chat template does not write the text of the last message, so it cannot be continued")
    return text[:start] if text.startswith(CONTINUE_TAG, start) else text[:start].rstrip()
