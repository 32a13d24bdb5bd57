"""Preference rows to the two documents of a pair: the prompt with the chosen and with the rejected completion.

    prompt, chosen, rejected                    all strings, or all lists of messages (with `tools`, `system`)
    prompt a string, the others messages        the prompt is a user message
    prompt messages, the others strings         the completions are assistant messages
    chosen, rejected                            whole conversations, or whole strings, with a common beginning
    question, chosen, rejected                  replies to a user message (also `input`, as in orca_dpo_pairs)
    conversations, chosen, rejected             replies to a conversation (LLaMA-Factory)
    instruction, chosen, rejected               replies to a user message with Alpaca's `input` and `history`
    prompt_ids, chosen_ids, rejected_ids        token ids, used as they are; the completions do not repeat the prompt

If completions repeat the messages of an explicit prompt, these are removed. A completion of messages begins with an
assistant message.

Where completions begin. A template or a tokenizer may write the end of a prompt in another way once something follows
it: thinking is dropped, or tokens merge. So the prompt of a pair is the longest common beginning, in tokens, of

    the prompt           A B C D
    prompt + chosen      A B C E F
    prompt + rejected    A B C E G           the prompt is A B C, the completions are E F and E G

and without an explicit prompt, of the last two only. The prompt keeps at least one token, because nothing predicts the
first token of a document. Each completion keeps at least one token, too. Every completion token is trained, through the
token that ends the turn. White space that a template writes after the turn is left out. A prompt of messages is
rendered with the generation prompt, and plain strings are framed as in encoder.py.

Too long. First the prompt loses tokens at its beginning, the same number in both documents: as many as the longer
completion needs, but one token stays. Then each completion loses its end. With max_length=6, a prompt of 5 tokens and
completions of 3 and 8 tokens become a prompt of 1 token and completions of 3 and 5. Documents that are scored at their
end keep it and lose the beginning of the completion (labels.py).

This module does not import torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from dtrain.base.errors import UserError
from dtrain.base.json_files import json_type
from dtrain.data.formats.encoder import IMAGE_CUT, TOO_LONG, USER, Document, RowEncoder
from dtrain.data.formats.formats import (
    read_integers,
    read_messages,
    read_question,
    read_string,
    read_tools,
    refuse_images,
    require_keys,
    with_system,
)
from dtrain.data.formats.image_parts import image_parts, text_of, with_images, without_images
from dtrain.data.text.dropped_text import DroppedText
from dtrain.data.text.replies import Messages

if TYPE_CHECKING:
    from dtrain.data.images.reader import LaidOutImage

Message = dict[str, Any]
Ids = list[int]
# Other names of the column `prompt`. If chosen and rejected have replies only, such a column is never ignored.
PROMPT_NAMES = ("conversations", "instruction", "question", "input", "query")
# Reasons why a row gives no sample.
SAME_TOKENS = "chosen and rejected are the same tokens"
SAME_TOKENS_CUT = "chosen and rejected are the same tokens within data.max_length"


@dataclass(frozen=True)
class ChatPair:
    """A conversation and two ways to continue it.

    Attributes:
        prompt: Messages of the conversation, at least one.
        chosen: Messages of the better completion, at least one.
        rejected: Messages of the worse completion, at least one.
        tools: Tools that the conversation lists.
    """

    prompt: list[Message]
    chosen: list[Message]
    rejected: list[Message]
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class TextPair:
    """A text and two ways to continue it.

    Attributes:
        prompt: The text. None: it is the common beginning of chosen and rejected.
        chosen: The better completion.
        rejected: The worse completion.
    """

    prompt: str | None
    chosen: str
    rejected: str


@dataclass(frozen=True)
class TokenPair:
    """Token ids of a prompt and of two completions, used as they are.

    Attributes:
        prompt: Ids of the prompt.
        chosen: Ids of the better completion.
        rejected: Ids of the worse completion.
    """

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]


class PairIds(NamedTuple):
    """Token ids of a prompt and of its two completions. None of them is empty.

    Attributes:
        prompt: Ids of the prompt.
        chosen: Ids of the better completion.
        rejected: Ids of the worse completion.
    """

    prompt: Ids
    chosen: Ids
    rejected: Ids


def normalise_pair(row: Mapping[str, Any], name: str) -> ChatPair | TextPair | TokenPair:
    """Convert a row in format `name` (preference or tokenized) to a pair.

    Raises:
        UserError: If the row is wrong.

    Example:
        >>> normalise_pair({"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"}, "preference")
        TextPair(prompt='2 + 2 =', chosen=' 4', rejected=' 5')
    """
    require_keys(row, name, "pairs")
    if name == "tokenized":
        refuse_images(row, "token ids")
        return TokenPair(
            prompt=_read_ids(row["prompt_ids"], "prompt_ids"),
            chosen=_read_ids(row["chosen_ids"], "chosen_ids"),
            rejected=_read_ids(row["rejected_ids"], "rejected_ids"),
        )
    prompt = _as_list_of_messages(row.get("prompt"))
    chosen = _as_list_of_messages(row.get("chosen"))
    rejected = _as_list_of_messages(row.get("rejected"))
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise UserError(
            f"chosen is {json_type(chosen)} and rejected {json_type(rejected)}. Both must be strings, or both lists of "
            "messages"
        )
    if prompt is None and isinstance(chosen, str):
        prompt = _read_prompt_of_other_name(row)
    if isinstance(chosen, str) and not isinstance(prompt, list):
        return _read_text_pair(row, prompt, chosen, rejected)
    return _read_chat_pair(row, prompt, chosen, rejected)


def _as_list_of_messages(value: Any) -> Any:
    """Return a single message as a list, and any other value unchanged."""
    return [value] if isinstance(value, dict) else value


def common_prefix_length(first: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the number of entries that two sequences have in common at their beginning.

    Example:
        >>> common_prefix_length([5, 6, 7], [5, 6, 8, 9])
        2
    """
    limit = min(len(first), len(other))
    for index in range(limit):
        if first[index] != other[index]:
            return index
    return limit


def _read_prompt_of_other_name(row: Mapping[str, Any]) -> list[Message] | None:
    """Return the prompt of a row with replies only, from a column with another name; None if there is none."""
    names = []
    for name in PROMPT_NAMES:
        is_alpaca_input = name == "input" and row.get("instruction")
        if row.get(name) and not is_alpaca_input:
            names.append(name)
    if names == ["conversations"]:
        messages, _ = read_messages(row["conversations"], "conversations")
        return messages
    if names == ["instruction"]:
        return read_question(row)
    if names in (["question"], ["input"]):
        return [{"role": "user", "content": read_string(row[names[0]], names[0])}]
    if names:
        raise UserError(
            f"in addition to chosen and rejected, the row has {', '.join(names)}. Name the prompt, for example with "
            f"data.train.columns={{prompt: {names[0]}}}"
        )
    return None


def _read_ids(value: Any, key: str) -> list[int]:
    ids = read_integers(value, key)
    if not ids:
        raise UserError(
            f"{key} is empty. A completion's first token is predicted from the prompt, so each of prompt_ids, "
            "chosen_ids and rejected_ids needs at least one token"
        )
    if any(token < 0 for token in ids):
        raise UserError(f"{key} holds a negative id. Ids are positions in the vocabulary, from 0")
    return ids


def _read_text_pair(row: Mapping[str, Any], prompt: Any, chosen: str, rejected: str) -> TextPair:
    refuse_images(row, "plain prompts")
    for name in ("tools", "system"):
        if row.get(name):
            raise UserError(
                f"{name} goes with messages, but the row's prompt and completions are strings. "
                f"Write them as lists of messages, set data.prompts_as=user, or remove {name}"
            )
    if prompt is not None:
        return TextPair(read_string(prompt, "prompt"), chosen, rejected)
    if not chosen or not rejected or chosen[0] != rejected[0]:
        raise UserError(f"chosen and rejected do not begin alike, and {_describe_missing_prompt(row)}")
    return TextPair(None, chosen, rejected)


def _describe_missing_prompt(row: Mapping[str, Any]) -> str:
    """Return the end of the error for a row that needs an explicit prompt."""
    if "prompt" in row:
        return "prompt is null in this row. Give the row a prompt, or leave the row out"
    return f"the row has no prompt (only {', '.join(map(str, row))}). Rename the prompt's column to prompt"


class _Completion(NamedTuple):
    """The messages of a completion, and whether each is marked as trained (None: not marked)."""

    messages: list[Message]
    marks: list[bool | None]


class _PairPrompt(NamedTuple):
    """The prompt of a pair.

    Attributes:
        messages: The messages.
        num_repeated: How many messages at the beginning of chosen and rejected repeat the prompt.
    """

    messages: list[Message]
    num_repeated: int


def _read_chat_pair(row: Mapping[str, Any], prompt: Any, chosen: Any, rejected: Any) -> ChatPair:
    """Convert a preference row with messages to a pair.

    The prompt is explicit (messages or a string), in a column of another name, or the common beginning of chosen and
    rejected. Messages of the prompt that both completions repeat are removed from them.

    Raises:
        UserError: If the row has no prompt, or a completion does not begin with an assistant message.
    """
    chosen, chosen_marks = _read_completion(chosen, "chosen")
    rejected, rejected_marks = _read_completion(rejected, "rejected")
    are_replies_only = chosen[0]["role"] == rejected[0]["role"] == "assistant"
    if prompt is None and are_replies_only:
        prompt = _read_prompt_of_other_name(row)
    if prompt is None:
        messages, start = _common_prompt(row, chosen, rejected)
    elif isinstance(prompt, str):
        messages, start = _string_prompt(prompt, chosen, rejected, are_replies_only)
    else:
        messages, _ = read_messages(prompt, "prompt")
        length = len(messages)
        is_repeated = chosen[:length] == messages and rejected[:length] == messages
        start = length if is_repeated else 0
    _check_completion(chosen, chosen_marks, start, "chosen")
    _check_completion(rejected, rejected_marks, start, "rejected")
    messages = with_system(messages, row.get("system"))
    if image_parts([*chosen[start:], *rejected[start:]]):
        raise UserError("chosen or rejected has an image. The images of a pair must be in its prompt")
    return ChatPair(with_images(row, messages), chosen[start:], rejected[start:], read_tools(row))


def _common_prompt(row: Mapping[str, Any], chosen: list[Message], rejected: list[Message]) -> _PairPrompt:
    """Return the common beginning of two conversations as their prompt. Raises UserError if there is none."""
    start = _num_common_messages(chosen, rejected)
    if not start:
        raise UserError(f"chosen and rejected do not begin with the same message, and {_describe_missing_prompt(row)}")
    return _PairPrompt(chosen[:start], start)


def _string_prompt(prompt: str, chosen: list[Message], rejected: list[Message], are_replies_only: bool) -> _PairPrompt:
    """Return the prompt of a row that has it as a string.

    Some files write the prompt twice: as a string, and as the first messages of both completions.

    Raises:
        UserError: If the completions begin with other messages than the prompt.
    """
    start = 0 if are_replies_only else _num_common_messages(chosen, rejected)
    if not start:
        return _PairPrompt([{"role": "user", "content": prompt}], 0)
    messages = chosen[:start]
    if not _has_message_with_text(messages, prompt):
        raise UserError(
            "prompt is a string that is none of the messages which chosen and rejected begin with. "
            "Remove prompt, or these messages"
        )
    return _PairPrompt(messages, start)


def _read_completion(value: Any, key: str) -> _Completion:
    """Read the messages of a completion. A string is an assistant message."""
    if isinstance(value, str):
        return _Completion([{"role": "assistant", "content": value}], [None])
    return _Completion(*read_messages(value, key))


def _num_common_messages(chosen: list[Message], rejected: list[Message]) -> int:
    """Return the number of messages that both begin with. Each keeps at least one message as its completion."""
    return min(common_prefix_length(chosen, rejected), len(chosen) - 1, len(rejected) - 1)


def _has_message_with_text(messages: list[Message], text: str) -> bool:
    return any(text_of(message.get("content", "")).strip() == text.strip() for message in messages)


def _check_completion(messages: list[Message], marks: list[bool | None], start: int, key: str) -> None:
    """Raise UserError if messages[start:] is not a completion."""
    if len(messages) <= start:
        raise UserError(f"{key} has no message beyond the prompt's. Give it a reply")
    role = messages[start]["role"]
    if role != "assistant":
        raise UserError(
            f"{key}[{start}] is a {role} message, but a completion begins with an assistant message. chosen and "
            "rejected may differ from a reply on, not before it"
        )
    if False in marks[start:]:
        index = start + marks[start:].index(False)
        raise UserError(
            f"{key}[{index}] asks not to be trained, but in a pair the whole completion counts. Remove the mark"
        )


class PairEncoder(RowEncoder):
    """Encoder of preference rows to samples of two documents, chosen and rejected.

    Attributes:
        keeps_ends: Whether documents keep the text that a template writes after the last turn, and completions that are
            too long lose their beginning instead of their end.
    """

    documents = 2
    accepts_images = True
    noun = "pairs"
    fingerprint_marks: Sequence[str] = ("pairs",)
    keeps_ends = False

    def row_content(self, row: Mapping[str, Any], name: str) -> Any:
        """Return the prompt, the two completions and the tools."""
        pair = self._read_pair(row, name)
        if not isinstance(pair, ChatPair):
            return [pair.prompt, pair.chosen, pair.rejected, None]
        prompt = without_images(pair.prompt)
        return [prompt, pair.chosen, pair.rejected, pair.tools, *self.image_content(pair.prompt)]

    def encode_row(self, row: Mapping[str, Any], name: str) -> list[Document] | str:
        """Encode a pair to two documents: the prompt with the chosen and with the rejected completion."""
        pair = self._read_pair(row, name)
        images = self.read_images(pair.prompt) if isinstance(pair, ChatPair) else []
        full = self.encode(pair, images)
        full_lengths = (len(full.prompt) + len(full.chosen), len(full.prompt) + len(full.rejected))
        if self.is_dropped(max(full_lengths)):
            return TOO_LONG
        if full.chosen == full.rejected:
            texts = self._completion_texts(pair) if isinstance(pair, ChatPair) else []
            num_dropped = sum(text.dropped for text in texts)
            if num_dropped:
                return f"{SAME_TOKENS}, since the chat template leaves out {num_dropped} characters of them"
            return SAME_TOKENS
        cut = truncate_pair(full.prompt, full.chosen, full.rejected, self.max_length, self.keeps_ends)
        num_full = len(full.prompt)
        first = num_full - len(cut.prompt)
        cut_images = self.images_in_range(full.prompt, images, range(first, num_full))
        if cut_images is None:
            return IMAGE_CUT
        if cut.chosen == cut.rejected:
            return SAME_TOKENS_CUT
        texts = self._completion_texts(pair) if isinstance(pair, ChatPair) else [DroppedText(), DroppedText()]
        documents = []
        for completion, full_length, text in zip((cut.chosen, cut.rejected), full_lengths, texts, strict=True):
            trained = bytearray(len(cut.prompt)) + b"\1" * len(completion)
            documents.append(Document([*cut.prompt, *completion], trained, full_length, images=cut_images, text=text))
        return documents

    def _completion_texts(self, pair: ChatPair) -> list[DroppedText]:
        """Count the text of the two completions, and the part of it that the chat template leaves out."""
        texts = []
        for completion in (pair.chosen, pair.rejected):
            messages = [*pair.prompt, *completion]
            replies = []
            for index in range(len(pair.prompt), len(messages)):
                if messages[index]["role"] == "assistant":
                    replies.append(index)
            texts.append(self.count_text(messages, pair.tools, replies))
        return texts

    def _read_pair(self, row: Mapping[str, Any], name: str) -> ChatPair | TextPair | TokenPair:
        pair = normalise_pair(self.as_messages(row, name), name)
        if isinstance(pair, TextPair) and self.prompts_as == USER:
            raise UserError(
                "data.prompts_as=user makes the prompt a user message, but the row has no explicit prompt: chosen and "
                "rejected are strings with a common beginning. Add a column prompt, or set data.prompts_as=text"
            )
        return pair

    def encode(self, pair: ChatPair | TextPair | TokenPair, images: "Sequence[LaidOutImage]" = ()) -> PairIds:
        """Encode a pair without truncating it.

        Args:
            pair: The pair.
            images: Images of the prompt's parts, in order.

        Raises:
            UserError: If the pair is wrong, for example because its prompt has no token.
        """
        if isinstance(pair, TokenPair):
            self.check_ids(pair.prompt, "prompt_ids")
            self.check_ids(pair.chosen, "chosen_ids")
            self.check_ids(pair.rejected, "rejected_ids")
            return PairIds(pair.prompt, pair.chosen, pair.rejected)
        prompt: Ids | None
        if isinstance(pair, ChatPair):
            prompt = self.tokenizer.encode(self.render(pair.prompt, pair.tools, True, images=images))
            chosen = self._encode_chat([*pair.prompt, *pair.chosen], pair.tools, images)
            rejected = self._encode_chat([*pair.prompt, *pair.rejected], pair.tools, images)
        else:
            prompt = None if pair.prompt is None else self.encode_text(pair.prompt, ends=False)
            chosen = self.encode_text((pair.prompt or "") + pair.chosen)
            rejected = self.encode_text((pair.prompt or "") + pair.rejected)
        # The completions begin at `start`; the module's docstring has an example.
        limit = min(len(chosen), len(rejected)) - 1  # each completion keeps one token
        start = min(common_prefix_length(chosen, rejected), limit)
        if prompt is not None:
            start = min(start, common_prefix_length(prompt, chosen))
        if start < 1:
            raise UserError(
                "the prompt has no token, so there is nothing to predict a completion's first token from. "
                "Give the row a prompt that is not empty"
            )
        self.check_image_tokens(chosen[:start], images)
        return PairIds(chosen[:start], chosen[start:], rejected[start:])

    def _encode_chat(self, messages: Messages, tools: Messages | None, images: "Sequence[LaidOutImage]") -> Ids:
        """Return the ids of a prompt with its completion."""
        text = self.render(messages, tools, images=images)
        return self.tokenizer.encode(text if self.keeps_ends else text.rstrip())


def truncate_pair(prompt: Ids, chosen: Ids, rejected: Ids, max_length: int, keeps_ends: bool = False) -> PairIds:
    """Cut a pair so that the prompt and either completion together have at most `max_length` tokens.

    Args:
        prompt: Ids of the prompt. It loses its beginning, but keeps at least one token.
        chosen: Ids of the better completion.
        rejected: Ids of the worse completion.
        max_length: Maximum number of tokens of a document.
        keeps_ends: Whether a completion that is still too long loses its beginning instead of its end.

    Example:
        >>> truncate_pair([1, 2, 3, 4, 5], [6, 7, 8], list(range(10, 18)), max_length=6)
        PairIds(prompt=[5], chosen=[6, 7, 8], rejected=[10, 11, 12, 13, 14])
        >>> truncate_pair([1, 2, 3, 4, 5], [6, 7, 8], [9, 10], max_length=6)
        PairIds(prompt=[3, 4, 5], chosen=[6, 7, 8], rejected=[9, 10])
    """
    longest = max(len(chosen), len(rejected))
    prompt_length = min(len(prompt), max(1, max_length - longest))
    completion_length = max_length - prompt_length
    if keeps_ends:
        chosen = chosen[max(0, len(chosen) - completion_length) :]
        rejected = rejected[max(0, len(rejected) - completion_length) :]
    else:
        chosen = chosen[:completion_length]
        rejected = rejected[:completion_length]
    return PairIds(prompt[len(prompt) - prompt_length :], chosen, rejected)
