"""Rows of preferences, in one shape, to the two documents of a pair: the prompt with the chosen, and with the rejected
completion.

    prompt, chosen, rejected                    all strings, or all lists of messages (with `tools`, `system`)
    prompt a string, the others messages        the prompt is a user message
    prompt messages, the others strings         the completions are assistant messages
    chosen, rejected                            whole conversations, or whole strings, that share their beginning
    question, chosen, rejected                  replies to a user's message (also `input` alone, as in orca_dpo_pairs)
    conversations, chosen, rejected             replies to a conversation, as LLaMA-Factory has them
    instruction, chosen, rejected               replies to a user's message with Alpaca's `input` and `history`
    prompt_ids, chosen_ids, rejected_ids        token ids, used as they are; the completions do not repeat the prompt

Completions that repeat the messages of an explicit prompt lose them. A completion of messages begins with an assistant
message.

Where the completions begin. A template or a tokenizer may write the end of a prompt otherwise once something follows
it (thinking that is dropped, tokens that merge). So the prompt of a pair is the longest beginning, in tokens, that the
prompt alone, prompt + chosen and prompt + rejected have in common; without a prompt of its own, that the other two
have. Every token behind it is trained, in both documents, through the token that ends the turn; the white space that
a template writes after that one is left out, as in encoder.py. A prompt of messages is rendered with the generation
prompt; plain strings are framed as encoder.py frames them. At least one token stays in the prompt and in each
completion: a document's first token is predicted from nothing.

What is too long loses the beginning of its prompt, as much as the longer completion asks for and all but one token at
most, the same in both documents; then each completion loses its end. Documents that are rated keep their ends
(`labels.py`). Torch is not imported.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
# The columns of a prompt where there is no `prompt`. Beside replies alone they are never passed over.
PROMPT_NAMES = ("conversations", "instruction", "question", "input", "query")
Ids = list[int]
SAME_TOKENS = "chosen and rejected are the same tokens"
SAME_TOKENS_CUT = "chosen and rejected are the same tokens within data.max_length"


@dataclass(frozen=True)
class ChatPair:
    """Two ways in which the conversation `prompt` goes on; none of the three lists is empty."""

    prompt: list[Message]
    chosen: list[Message]
    rejected: list[Message]
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class TextPair:
    """Two ways in which the text `prompt` goes on. None: the prompt is what chosen and rejected begin with alike."""

    prompt: str | None
    chosen: str
    rejected: str


@dataclass(frozen=True)
class TokenPair:
    """Two ways in which `prompt` goes on, in token ids, used as they are."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]


def normalise_pair(row: Mapping[str, Any], name: str) -> ChatPair | TextPair | TokenPair:
    """Return `row` of format `name` (preference or tokenized) in its shape. Raises UserError."""
    require_keys(row, name, "pairs")
    if name == "tokenized":
        refuse_images(row, "token ids")
        return TokenPair(*(_ids(row[key], key) for key in ("prompt_ids", "chosen_ids", "rejected_ids")))
    values = (row.get(key) for key in ("prompt", "chosen", "rejected"))  # a single message is a list of it
    lists: list[Any] = [[value] if isinstance(value, dict) else value for value in values]
    prompt, chosen, rejected = lists
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise UserError(
            f"chosen is {json_type(chosen)} and rejected {json_type(rejected)}; both must be strings, or both lists of "
            "messages"
        )
    if prompt is None and isinstance(chosen, str):
        prompt = _other_prompt(row)
    if isinstance(chosen, str) and not isinstance(prompt, list):
        return _texts(row, prompt, chosen, rejected)
    return _chats(row, prompt, chosen, rejected)


def common_prefix_length(first: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the number of entries that both begin with."""
    limit = min(len(first), len(other))
    return next((at for at in range(limit) if first[at] != other[at]), limit)


def _other_prompt(row: Mapping[str, Any]) -> list[Message] | None:
    """Return the prompt of a row with replies alone, whose column has another name; None where there is none."""
    names = [name for name in PROMPT_NAMES if row.get(name) and not (name == "input" and row.get("instruction"))]
    if names == ["conversations"]:
        return read_messages(row["conversations"], "conversations")[0]
    if names == ["instruction"]:
        return read_question(row)
    if names in (["question"], ["input"]):
        return [{"role": "user", "content": read_string(row[names[0]], names[0])}]
    if names:
        raise UserError(
            f"beside chosen and rejected the row has {', '.join(names)}: say which is the prompt, by "
            f"data.train.columns={{prompt: {names[0]}}} for example"
        )
    return None


def _ids(value: Any, key: str) -> list[int]:
    ids = read_integers(value, key)
    if not ids:
        raise UserError(
            f"{key} is empty; a completion's first token is predicted from the prompt, so each of prompt_ids, "
            "chosen_ids and rejected_ids needs one token at least"
        )
    if any(token < 0 for token in ids):
        raise UserError(f"{key} holds a negative id")
    return ids


def _texts(row: Mapping[str, Any], prompt: Any, chosen: str, rejected: str) -> TextPair:
    refuse_images(row, "plain prompts")
    for name in ("tools", "system"):
        if row.get(name):
            raise UserError(
                f"{name} goes with messages, and the row's prompt and completions are strings; "
                f"give them as lists of messages, or set data.prompts_as=user, or remove {name}"
            )
    if prompt is not None:
        return TextPair(read_string(prompt, "prompt"), chosen, rejected)
    if not chosen or not rejected or chosen[0] != rejected[0]:
        raise UserError(f"chosen and rejected do not begin alike, and {_no_prompt(row)}")
    return TextPair(None, chosen, rejected)


def _no_prompt(row: Mapping[str, Any]) -> str:
    """Return the end of a refusal of a row that needs a prompt of its own."""
    if "prompt" in row:
        return "prompt is null in this row: give the row a prompt, or leave it out"
    return f"the row has no prompt (only {', '.join(map(str, row))}); name the prompt's column prompt"


def _chats(row: Mapping[str, Any], prompt: Any, chosen: Any, rejected: Any) -> ChatPair:
    chosen, chosen_marks = _completion(chosen, "chosen")
    rejected, rejected_marks = _completion(rejected, "rejected")
    if prompt is None and _replies_only(chosen, rejected):
        prompt = _other_prompt(row)
    if prompt is None:
        start = _shared(chosen, rejected)
        if not start:
            raise UserError(f"chosen and rejected do not begin with the same message, and {_no_prompt(row)}")
        before = chosen[:start]
    elif isinstance(prompt, str):
        # Some files hold the prompt twice: as a string, and as the first messages of both completions.
        start = 0 if _replies_only(chosen, rejected) else _shared(chosen, rejected)
        before = chosen[:start] if start else [{"role": "user", "content": prompt}]
        if start and not any(text_of(message.get("content", "")).strip() == prompt.strip() for message in before):
            raise UserError(
                "prompt is a string that is none of the messages which chosen and rejected begin with; "
                "remove prompt, or these messages"
            )
    else:
        before = read_messages(prompt, "prompt")[0]
        repeated = chosen[: len(before)] == before == rejected[: len(before)]
        start = len(before) if repeated else 0
    for messages, marks, key in ((chosen, chosen_marks, "chosen"), (rejected, rejected_marks, "rejected")):
        _check_completion(messages, marks, start, key)
    before = with_system(before, row.get("system"))
    if image_parts([*chosen[start:], *rejected[start:]]):
        raise UserError("chosen or rejected has an image of its own; images of a pair stand in its prompt")
    return ChatPair(with_images(row, before), chosen[start:], rejected[start:], read_tools(row))


def _completion(value: Any, key: str) -> tuple[list[Message], list[bool | None]]:
    if isinstance(value, str):
        return [{"role": "assistant", "content": value}], [None]
    return read_messages(value, key)


def _replies_only(chosen: list[Message], rejected: list[Message]) -> bool:
    return chosen[0]["role"] == rejected[0]["role"] == "assistant"


def _shared(chosen: list[Message], rejected: list[Message]) -> int:
    """Return the number of messages that both begin with; each keeps one of its own."""
    return min(common_prefix_length(chosen, rejected), len(chosen) - 1, len(rejected) - 1)


def _check_completion(messages: list[Message], marks: list[bool | None], start: int, key: str) -> None:
    if len(messages) <= start:
        raise UserError(f"{key} has no message beyond the prompt's; give it a reply")
    if messages[start]["role"] != "assistant":
        raise UserError(
            f"{key}[{start}] is a {messages[start]['role']} message, and a completion begins with an assistant "
            "message: chosen and rejected may differ from a reply on, not before"
        )
    if False in marks[start:]:
        raise UserError(
            f"{key}[{start + marks[start:].index(False)}] asks not to be trained, which pairs cannot: all of a "
            "completion counts; remove the mark"
        )


class PairEncoder(RowEncoder):
    """Encoder of preferences to samples of two documents, chosen and rejected."""

    documents = 2
    accepts_images = True
    noun = "pairs"
    marks: Sequence[str] = ("pairs",)
    keeps_ends = False  # of the documents: what a template writes behind the last turn, and of what is too long

    def row_content(self, row: Mapping[str, Any], name: str) -> Any:
        pair = self._pair(row, name)
        if not isinstance(pair, ChatPair):
            return [pair.prompt, pair.chosen, pair.rejected, None]
        prompt = without_images(pair.prompt)
        return [prompt, pair.chosen, pair.rejected, pair.tools, *self.image_content(pair.prompt)]

    def encode_row(self, row: Mapping[str, Any], name: str) -> list[Document] | str:
        pair = self._pair(row, name)
        images = self.read_images(pair.prompt) if isinstance(pair, ChatPair) else []
        whole, chosen, rejected = self.encode(pair, images)
        prompt = whole
        full = len(prompt) + len(chosen), len(prompt) + len(rejected)
        if self.is_dropped(max(full)):
            return TOO_LONG
        if chosen == rejected:
            texts = self._texts(pair) if isinstance(pair, ChatPair) else []
            dropped = sum(text.dropped for text in texts)
            return (
                f"{SAME_TOKENS}, since the chat template leaves out {dropped} characters of them"
                if dropped
                else SAME_TOKENS
            )
        prompt, chosen, rejected = truncate_pair(prompt, chosen, rejected, self.max_length, self.keeps_ends)
        kept = self.images_in_range(whole, images, range(len(whole) - len(prompt), len(whole)))
        if kept is None:
            return IMAGE_CUT
        if chosen == rejected:
            return SAME_TOKENS_CUT
        texts = self._texts(pair) if isinstance(pair, ChatPair) else [DroppedText(), DroppedText()]
        documents = []
        for completion, length, text in zip((chosen, rejected), full, texts, strict=True):
            trained = bytearray(len(prompt)) + b"\1" * len(completion)
            documents.append(Document([*prompt, *completion], trained, length, images=kept, text=text))
        return documents

    def _texts(self, pair: ChatPair) -> list[DroppedText]:
        """Return the text of the two completions, and what of it the chat template leaves out."""
        texts = []
        for completion in (pair.chosen, pair.rejected):
            messages = [*pair.prompt, *completion]
            replies = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
            completed = [index for index in replies if index >= len(pair.prompt)]
            texts.append(self.count_text(messages, pair.tools, completed))
        return texts

    def _pair(self, row: Mapping[str, Any], name: str) -> ChatPair | TextPair | TokenPair:
        pair = normalise_pair(self.as_messages(row, name), name)
        if isinstance(pair, TextPair) and self.prompts_as == USER:
            raise UserError(
                "data.prompts_as=user makes the prompt a user's message, and the row has no prompt of its own: chosen "
                "and rejected are strings that begin alike. Give it one, named prompt, or set data.prompts_as=text"
            )
        return pair

    def encode(
        self, pair: ChatPair | TextPair | TokenPair, images: "Sequence[LaidOutImage]" = ()
    ) -> tuple[Ids, Ids, Ids]:
        """Return the ids of the prompt and of the two completions, none empty, not yet truncated. images: those of the
        prompt's parts, in order. Raises UserError."""
        if isinstance(pair, TokenPair):
            for ids, key in ((pair.prompt, "prompt_ids"), (pair.chosen, "chosen_ids"), (pair.rejected, "rejected_ids")):
                self.check_ids(ids, key)
            return pair.prompt, pair.chosen, pair.rejected
        if isinstance(pair, ChatPair):
            prompt: Ids | None = self.tokenizer.encode(self.render(pair.prompt, pair.tools, True, images=images))
            chosen, rejected = (
                self._chat([*pair.prompt, *more], pair.tools, images) for more in (pair.chosen, pair.rejected)
            )
        else:
            prompt = None if pair.prompt is None else self.encode_text(pair.prompt, ends=False)
            chosen, rejected = (self.encode_text((pair.prompt or "") + text) for text in (pair.chosen, pair.rejected))
        limit = min(len(chosen), len(rejected)) - 1  # of chosen and rejected, each keeps a token
        at = min(common_prefix_length(chosen, rejected), limit)
        if prompt is not None:
            at = min(at, common_prefix_length(prompt, chosen))
        if at < 1:
            raise UserError(
                "the prompt has no token, so that there is nothing to predict a completion's first token from; "
                "give the row a prompt that is not empty"
            )
        self.check_image_tokens(chosen[:at], images)
        return chosen[:at], chosen[at:], rejected[at:]

    def _chat(self, messages: Messages, tools: Messages | None, images: "Sequence[LaidOutImage]") -> Ids:
        """Return the ids of a prompt with its completion."""
        text = self.render(messages, tools, images=images)
        return self.tokenizer.encode(text if self.keeps_ends else text.rstrip())


def truncate_pair(
    prompt: Ids, chosen: Ids, rejected: Ids, max_length: int, keeps_ends: bool = False
) -> tuple[Ids, Ids, Ids]:
    """Cut the three so that the prompt (never empty) and either completion have at most `max_length` tokens.
    keeps_ends: a completion loses its beginning, not its end."""
    kept = min(len(prompt), max(1, max_length - max(len(chosen), len(rejected))))
    left = max_length - kept
    chosen, rejected = (ids[max(0, len(ids) - left) :] if keeps_ends else ids[:left] for ids in (chosen, rejected))
    return prompt[len(prompt) - kept :], chosen, rejected
