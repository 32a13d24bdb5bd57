"""The tokenizer of a model (`tokenizer.json`), its special tokens, and control tokens that users write as text.

`tokenizer.json` turns text into ids and back. The special tokens (BOS, EOS, padding, ..) are named in other files of
the directory: tokenizer_config.json, special_tokens_map.json, generation_config.json and config.json. Which of these
files name them differs from model to model.

Control tokens in the words of users. A chat template writes control tokens (`<|im_end|>`, `<|image_pad|>`) and the
words of users into one string. A tokenizer cannot tell them apart, so a user who writes `<|im_end|>` would end the
turn. Therefore a control token in a user's or a tool's message is escaped before the template sees it, by a private
character after its first character, and the tokenizer reads an escaped token as plain characters:

    message     Say <|im_end|>
    escaped     Say <␛|im_end|>                                        ␛ is ESCAPE
    rendered    <|im_start|>user\\nSay <␛|im_end|><|im_end|>\\n
    ids         <|im_start|> is one token, <␛|im_end|> the tokens of "<", "|", "im", ..., <|im_end|> one token

To tokenize such a text, each real control token is replaced by a single private character (its stand-in), which a copy
of the tokenizer knows as that token. The escaped ones lose their escape character and are plain text in that copy.

`data.special_tokens` chooses which tokens are escaped. By default these are the tokens of the conversation's structure:
those that the template writes itself, those that stand for an image, and padding, begin and end of text. Other control
tokens stay tokens, as in transformers' `apply_chat_template`, because users write them on purpose. For example,
Qwen2-VL's `<|im_end|>` is escaped, but its grounding mark `<|box_start|>` is not.

This module does not import torch.
"""

import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Encoding, Tokenizer as Backend

from dtrain.base.errors import UserError
from dtrain.base.json_files import LARGE_FILE_BYTES, read_json, read_text

ESCAPE = "\U0010fffd"
STAND_INS = range(0xF0000, 0xFFFFE)  # private characters, one for each control token
WRITERS = ("assistant", "system", "developer", "model")  # roles whose content may have control tokens

SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Flags of a token in `added_tokens_decoder`.
SPECIAL_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")
# Keys of tokenizer_config.json and its tables that name tokens for images, video and audio.
IMAGE_TOKENS = ("image_token", "boi_token", "eoi_token", "video_token", "audio_token")
TOKEN_TABLES = ("extra_special_tokens", "model_specific_special_tokens")  # of tokenizer_config.json
TOKENIZER_FILES = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "config.json")


class Affixes(NamedTuple):
    """Ids that belong before and after a text.

    Attributes:
        before: Ids before it, such as BOS.
        after: Ids after it, such as EOS.
    """

    before: list[int]
    after: list[int]


class EncodedText(NamedTuple):
    """Ids of a text, and where each token is.

    Attributes:
        ids: Token ids.
        offsets: Characters [start, end) of each token.
    """

    ids: list[int]
    offsets: list[tuple[int, int]]


class DecodedPiece(NamedTuple):
    """A piece of decoded ids.

    Attributes:
        control: The control token that the piece begins with; None for a first piece without one.
        text: The text after this token.
    """

    control: str | None
    text: str


class Tokenizer:
    """Tokenizer of text to ids and back.

    Attributes:
        directory: Directory of its files.
        special_tokens: Texts of the special tokens that have a name (`bos_token`, ...), as chat templates see them.
        control_tokens: All special tokens, including those without a name.
        framing_texts: Texts of the control tokens that the model's files name for padding, begin and end of text, and
            images.
        bos_id: Id of the begin-of-text token, or None.
        eos_ids: All tokens that end a generation, the model's own `eos_id` first. They come from `eos_token` of
            tokenizer_config.json or special_tokens_map.json, then from eos_token_id (a number or a list) of
            generation_config.json and of config.json. Empty if no file names one.
        pad_id: `pad_token`, else pad_token_id of generation_config.json or config.json, else eos_id, else 0. Padding is
            neither attended to nor trained, so any id works.
        size: Highest id + 1.
        id_limit: Upper bound of the ids in tokenized rows: vocab_size of config.json, or `size` if that is larger.
    """

    def __init__(
        self, directory: Path, tokenizer_json: str, files: Mapping[str, Mapping[str, Any]], base: Path | None = None
    ):
        """Build the tokenizer from the content of its files; see `from_directory`.

        Args:
            directory: Directory of the files, for messages.
            tokenizer_json: Content of tokenizer.json.
            files: Content of the files of `TOKENIZER_FILES` that exist.
            base: As in `from_directory`.
        """
        self.directory = directory
        self._base = base
        config, tokens_map, generation, model = (files.get(name, {}) for name in TOKENIZER_FILES)
        self._backend = _load_backend(directory, tokenizer_json, config)
        # Without its post-processor, the tokenizer adds no tokens, and offsets are those of the text itself. (The
        # byte-level post-processor would cut the leading space off a token's offsets.)
        self._text_backend = _load_backend(directory, tokenizer_json, config)
        self._text_backend.post_processor = None
        self.special_tokens = _special_tokens(directory, self._backend, config, tokens_map)
        self.control_tokens = ControlTokens(_control_texts(self._backend, config, self.special_tokens))
        inner = model.get("text_config")
        model = {**(inner if isinstance(inner, dict) else {}), **model}
        self.eos_ids: list[int] = list(dict.fromkeys(self._named_ids("eos_token", generation, model)))
        bos_ids = self._named_ids("bos_token", generation, model)
        self.bos_id = bos_ids[0] if bos_ids else None
        self.pad_id: int = [*self._named_ids("pad_token", generation, model), *self.eos_ids, 0][0]
        self.framing_texts = self._find_framing_texts(config, generation, model)
        self.size = max(self.vocabulary.values(), default=-1) + 1
        self.id_limit = max([self.size, *_read_ids(model, "vocab_size")])
        self._source = (tokenizer_json, config.get("added_tokens_decoder"))

    @classmethod
    def from_directory(cls, path: str | Path, base: Path | None = None) -> "Tokenizer":
        """Read the tokenizer of a model's directory.

        Args:
            path: The directory of a model or of an adapter.
            base: For an adapter, the directory of its base model, whose config.json and generation_config.json name
                the model's own special tokens.

        Raises:
            UserError: If there is no tokenizer that the tokenizers library can read.
        """
        directory = Path(path).expanduser()
        file = directory / "tokenizer.json"
        if not directory.is_dir():
            raise UserError(f"model.path: there is no directory {path}")
        if not file.is_file():
            raise UserError(_missing_tokenizer_error(directory))
        paths = {}
        if base is not None:
            for name in TOKENIZER_FILES[2:]:
                if (base / name).is_file():
                    paths[name] = base / name
        for name in TOKENIZER_FILES:
            if (directory / name).is_file():
                paths[name] = directory / name
        files = {name: read_json(path) for name, path in paths.items()}
        if not isinstance(read_json(file, max_bytes=LARGE_FILE_BYTES).get("model"), dict):
            raise UserError(f"{file} is no tokenizer of the tokenizers library: it has no model")
        return cls(directory, read_text(file, LARGE_FILE_BYTES), files, base)

    def __reduce__(self):
        return Tokenizer.from_directory, (self.directory, self._base)

    @property
    def eos_id(self) -> int | None:
        """The token that ends a sequence, or None."""
        return self.eos_ids[0] if self.eos_ids else None

    @property
    def vocabulary(self) -> dict[str, int]:
        """Ids of all tokens, including added ones, by the tokenizer's spelling of the token."""
        return self._backend.get_vocab(with_added_tokens=True)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of everything that decides the ids."""
        tokenizer_json, added_tokens = self._source
        named = json.dumps([added_tokens, self.special_tokens, self.bos_id, self.eos_ids], sort_keys=True)
        return hashlib.sha256((tokenizer_json + named).encode()).hexdigest()[:16]

    def _named_ids(self, name: str, generation: Mapping[str, Any], model: Mapping[str, Any]) -> list[int]:
        """Return the ids of a named special token by the token's text, generation_config.json and config.json."""
        ids = []
        text = self.special_tokens.get(name)
        if text is not None:
            token_id = self._backend.token_to_id(text)
            if token_id is not None:
                ids.append(token_id)
        key = f"{name}_id"
        return [*ids, *_read_ids(generation, key), *_read_ids(model, key)]

    def _find_framing_texts(self, config: Mapping[str, Any], *id_files: Mapping[str, Any]) -> list[str]:
        """Return the texts of control tokens that the files name for padding, begin, end and images.

        config.json and generation_config.json name ids, such as `eos_token_id`, `vision_start_token_id` (Qwen2-VL) and
        `boi_token_index` (Gemma 3). tokenizer_config.json names texts.
        """
        texts: set[str | None] = {self.special_tokens.get(name) for name in ("bos_token", "eos_token", "pad_token")}
        for table in (config, *(config.get(name) for name in TOKEN_TABLES)):
            if isinstance(table, dict):
                texts.update(_text_of_token(table.get(name)) for name in IMAGE_TOKENS)
        for file in id_files:
            for key in file:
                if key.endswith(("_token_id", "_token_index")):
                    texts.update(self._backend.id_to_token(token_id) for token_id in _read_ids(file, key))
        return [text for text in self.control_tokens.texts if text in texts]

    def added_tokens(self) -> dict[int, AddedToken]:
        """Return the tokens that are found in a text before it is split, by id."""
        return self._backend.get_added_tokens_decoder()

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of a text, in which escaped control tokens are plain characters.

        Args:
            text: The text.
            add_special_tokens: Whether to add what the tokenizer's post-processor adds (BOS, for most). A text that
                begins with BOS gets no second one.
        """
        if not add_special_tokens:
            if self.control_tokens.has_escaped(text):
                return self.encode_with_offsets(text).ids
            return _encode(self._text_backend, text, False).ids
        ids = _encode(self._backend, text, True).ids
        has_doubled_bos = ids[:1] == ids[1:2] and ids[:1] == self.affixes().before
        return ids[1:] if has_doubled_bos else ids

    def encode_with_offsets(self, text: str) -> EncodedText:
        """Return the ids of a text without added tokens, and the characters of each token in `text`."""
        if not self.control_tokens.has_escaped(text):
            encoding = _encode(self._text_backend, text, False)
            return EncodedText(encoding.ids, encoding.offsets)
        text_with_stand_ins, positions = self.control_tokens.with_stand_ins(text)
        encoding = _encode(self._stand_in_backend.backend, text_with_stand_ins, False)
        id_map = self._stand_in_backend.id_map
        return EncodedText(
            ids=[id_map.get(token, token) for token in encoding.ids],
            offsets=[(positions[start], positions[end]) for start, end in encoding.offsets],
        )

    @cached_property
    def _stand_in_backend(self) -> "StandInBackend":
        return self.control_tokens.stand_in_backend(self._text_backend)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Return the text of ids."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def pieces(self, ids: Sequence[int]) -> list[DecodedPiece]:
        """Decode `ids` in pieces that begin at control tokens.

        A control token and the characters of its text decode to the same text, and the pieces distinguish them. For
        example, the control token `<|im_end|>` followed by the characters of the same text gives one piece,
        DecodedPiece(control="<|im_end|>", text="<|im_end|>").
        """
        groups: list[list[int]] = [[]]
        for token in ids:
            if token in self._control_ids:
                groups.append([])
            groups[-1].append(token)
        pieces: list[DecodedPiece] = []
        for group in groups:
            control = self._control_ids.get(group[0]) if group else None
            # Decoded together, because a SentencePiece tokenizer drops the space of the first token that it decodes.
            text = self.decode(group)
            if control is None:
                pieces.append(DecodedPiece(None, text))
            elif text.startswith(control):
                pieces.append(DecodedPiece(control, text[len(control) :]))
            else:
                pieces.append(DecodedPiece(control, self.decode(group[1:])))
        return pieces if groups[0] else pieces[1:]

    @cached_property
    def _control_ids(self) -> dict[int, str]:
        vocabulary = self.vocabulary
        return {vocabulary[text]: text for text in self.control_tokens.texts}

    def affixes(self) -> Affixes:
        """Return the ids that the post-processor puts before and after a text. Raises UserError if it does more."""
        without = self.encode("a")
        with_affixes = self.encode("a", add_special_tokens=True)
        for start in range(len(with_affixes) - len(without) + 1):
            end = start + len(without)
            if with_affixes[start:end] == without:
                return Affixes(with_affixes[:start], with_affixes[end:])
        raise UserError(f"{self.directory / 'tokenizer.json'}: its post_processor rewrites the text's own tokens")


class TextWithStandIns(NamedTuple):
    """A text with control tokens replaced by their stand-ins.

    Attributes:
        text: The text.
        positions: Position in the original text of each character of `text`, and of its end.
    """

    text: str
    positions: list[int]


class StandInBackend(NamedTuple):
    """A tokenizer that knows stand-ins instead of control tokens.

    Attributes:
        backend: The tokenizer. The texts of control tokens are plain characters to it.
        id_map: Ids of the original tokenizer for the ids of added tokens in `backend`.
    """

    backend: Backend
    id_map: dict[int | None, int]


class ControlTokens:
    """Texts of a tokenizer's control tokens, and their escaped form.

    Attributes:
        texts: All of them, the longest first.
        escaped: Those that `escape` escapes. By default all.

    Example:
        >>> tokens = ControlTokens(["<|im_start|>", "<|im_end|>"], escaped=["<|im_end|>"])
        >>> tokens.escape("<|im_end|> <|im_start|>") == f"<{ESCAPE}|im_end|> <|im_start|>"
        True
    """

    def __init__(self, texts: Sequence[str], escaped: Collection[str] | None = None):
        # In an alternation of a regular expression the first match counts, and it should be the longest.
        self.texts = tuple(sorted(texts, key=lambda text: (-len(text), text)))
        self.escaped = frozenset(self.texts if escaped is None else escaped)

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self.texts)) or r"(?!)")

    @cached_property
    def _escaped_or_not(self) -> re.Pattern[str]:
        escaped = "|".join(re.escape(text[0] + ESCAPE + text[1:]) for text in self.texts)
        return re.compile(f"(?P<escaped>{escaped})|(?P<control>{self._pattern.pattern})" if escaped else r"(?!)")

    def find(self, text: str) -> list[re.Match[str]]:
        """Return the matches of control tokens in `text`, in order."""
        return list(self._pattern.finditer(text))

    def escape(self, text: str) -> str:
        """Return `text` with each control token of `escaped` in its escaped form."""

        def replacement(match: re.Match[str]) -> str:
            token = match[0]
            return token[0] + ESCAPE + token[1:] if token in self.escaped else token

        return self._pattern.sub(replacement, text)

    def escape_message(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a chat message with the control tokens in its content escaped, unless its role may write them."""
        if message.get("role") in WRITERS or not self.escaped or "content" not in message:
            return message
        return {**message, "content": self._escape_value(message["content"])}

    def _escape_value(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.escape(value)
        if isinstance(value, list):
            return [self._escape_value(part) for part in value]
        if isinstance(value, dict):
            return {key: part if key == "type" else self._escape_value(part) for key, part in value.items()}
        return value

    def has_escaped(self, text: str) -> bool:
        """Return True if a text has an escaped control token."""
        return ESCAPE in text and any(match["escaped"] for match in self._escaped_or_not.finditer(text))

    def with_stand_ins(self, text: str) -> TextWithStandIns:
        """Return a text in which each control token is its stand-in, and escaped control tokens are plain characters.

        Raises:
            UserError: If the text has a character that is used as a stand-in.
        """
        if any(ord(character) in STAND_INS for character in text):
            raise UserError(
                "the conversation has private characters that dtrain writes control tokens with, and a control token "
                "in a user's message. Remove either"
            )
        pieces: list[str] = []
        positions: list[int] = []
        start = 0
        for match in self._escaped_or_not.finditer(text):
            begin, end = match.span()
            pieces.append(text[start:begin])
            positions += range(start, begin)
            if match["escaped"]:
                pieces.append(match[0].replace(ESCAPE, "", 1))
                positions += [begin, *range(begin + 2, end)]  # the escape character is the second one
            else:
                pieces.append(self._stand_in(match[0]))
                positions.append(begin)
            start = end
        pieces.append(text[start:])
        positions += range(start, len(text) + 1)
        return TextWithStandIns("".join(pieces), positions)

    def _stand_in(self, text: str) -> str:
        return chr(STAND_INS[self.texts.index(text)])

    def stand_in_backend(self, backend: Backend) -> StandInBackend:
        """Return a copy of a tokenizer that knows stand-ins instead of control tokens.

        The copy must read the characters of a control token's text as ordinary pieces. So the entries of control tokens
        in the model's vocabulary are renamed to names that no text contains, and merges that form these entries are
        removed. For example, the entry `<|im_end|>` is renamed to its stand-in, doubled.

        Two kinds of control tokens are not renamed: those of one character, which may be ordinary pieces of the model,
        and all control tokens of a WordPiece or WordLevel model without an unknown token.

        Args:
            backend: The tokenizer.
        """
        state = json.loads(backend.to_str())
        stand_ins = {text: self._stand_in(text) for text in self.texts}
        for token in state["added_tokens"]:
            if token["content"] in stand_ins:
                # Stand-ins are found in the text as it is, before a normalizer changes it.
                token["content"] = stand_ins[token["content"]]
                token["normalized"] = False
        model = state["model"]
        unknown = model.get("unk_token")
        can_rename = model["type"] in ("BPE", "Unigram") or unknown is not None
        new_names = {}  # a doubled stand-in, which no text has
        if can_rename:
            new_names = {text: 2 * stand_in for text, stand_in in stand_ins.items() if len(text) > 1}
        if isinstance(model["vocab"], dict):
            model["vocab"] = {new_names.get(text, text): number for text, number in model["vocab"].items()}
        else:
            model["vocab"] = [[new_names.get(text, text), score] for text, score in model["vocab"]]
        if unknown in new_names:
            model["unk_token"] = new_names[unknown]
        if "merges" in model:
            merges = []
            for merge in model["merges"]:
                parts = merge.split(" ") if isinstance(merge, str) else merge
                if not {*parts, "".join(parts)} & new_names.keys():
                    merges.append(parts)
            model["merges"] = merges
        changed = Backend.from_str(json.dumps(state))
        id_map = {}
        for number, token in backend.get_added_tokens_decoder().items():
            id_map[changed.token_to_id(stand_ins.get(token.content, token.content))] = number
        return StandInBackend(changed, id_map)


def _encode(backend: Backend, text: str, add_special_tokens: bool) -> Encoding:
    try:
        return backend.encode(text, add_special_tokens=add_special_tokens)
    except TypeError as problem:
        # The library raises this for a string that is no Unicode text: JSON can spell half of a surrogate pair.
        for position, character in enumerate(text):
            if "\ud800" <= character <= "\udfff":
                raise UserError(
                    f"the text has half a character at {position}, {character!r} (one of a surrogate pair), which is "
                    "no Unicode. Correct or remove it"
                ) from problem
        raise


def _load_backend(directory: Path, text: str, config: Mapping[str, Any]) -> Backend:
    """Load tokenizer.json, without truncation and padding, and add the tokens of tokenizer_config.json."""
    try:
        backend = Backend.from_str(text)
    except BaseException as problem:  # the library raises nothing narrower, and its panics are no Exception
        if isinstance(problem, KeyboardInterrupt):
            raise
        raise UserError(
            f"{directory / 'tokenizer.json'} is not readable: {problem}. "
            "Is the file complete, and the tokenizers package up to date?"
        ) from problem
    backend.no_truncation()
    backend.no_padding()
    config_file = directory / "tokenizer_config.json"
    for token_id, token in _read_added_tokens(config_file, config.get("added_tokens_decoder") or {}):
        if backend.token_to_id(token["content"]) is not None:
            continue
        flags = {name: token[name] is True for name in SPECIAL_TOKEN_FLAGS if name in token}
        backend.add_tokens([AddedToken(token["content"], special=token.get("special") is True, **flags)])
        if backend.token_to_id(token["content"]) != token_id:
            raise UserError(
                f"{config_file}: added_tokens_decoder gives {token['content']!r} the id {token_id}, which does not "
                "follow the ids of tokenizer.json. Save the tokenizer again with transformers"
            )
    return backend


def _read_added_tokens(file: Path, table: Any) -> list[tuple[int, dict[str, Any]]]:
    """Return the tokens of an `added_tokens_decoder`, sorted by id. Raises UserError if it is no such table."""
    error = UserError(f"{file}: added_tokens_decoder must be a table of ids, each with the content of its token")
    if not isinstance(table, dict):
        raise error
    tokens = []
    for key, token in table.items():
        is_id = key.isdecimal() and len(key) < 10
        if not is_id or not isinstance(token, dict) or not _is_unicode(token.get("content")):
            raise error
        tokens.append((int(key), token))
    tokens.sort(key=lambda entry: entry[0])
    return tokens


def _is_unicode(value: Any) -> bool:
    """Return True if `value` is a Unicode string. (JSON can spell half of a surrogate pair.)"""
    return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)


def _special_tokens(directory: Path, backend: Backend, *files: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of named special tokens, each from the first file that names it."""
    tokens: dict[str, str] = {}
    for name in SPECIAL_TOKEN_NAMES:
        values = [file[name] for file in files if file.get(name) is not None]
        if not values:
            continue
        text: Any = values[0].get("content") if isinstance(values[0], dict) else values[0]
        if not _is_unicode(text):
            raise UserError(f"{directory}: {name} must be a text, in tokenizer_config.json or special_tokens_map.json")
        if backend.token_to_id(text) is None:
            raise UserError(
                f"{directory}: {name} is {text!r}, which tokenizer.json has no token for. "
                "Correct tokenizer_config.json (or special_tokens_map.json)"
            )
        tokens[name] = text
    return tokens


def _control_texts(backend: Backend, config: Mapping[str, Any], named: Mapping[str, str]) -> list[str]:
    """Return the texts of the added tokens that tokenizer.json, tokenizer_config.json or a name makes special.

    Tokens that are found only as single words are left out, because their neighbours decide whether they are tokens.
    """
    entries = list((config.get("added_tokens_decoder") or {}).values())
    additional = config.get("additional_special_tokens")
    if isinstance(additional, list):
        entries += additional
    special = set(named.values())
    for entry in entries:
        if isinstance(entry, str):
            special.add(entry)
        elif isinstance(entry, dict) and entry.get("special"):
            special.add(str(entry.get("content")))
    texts = []
    for token in backend.get_added_tokens_decoder().values():
        if (token.special or token.content in special) and not token.single_word:
            texts.append(token.content)
    return texts


def _text_of_token(token: Any) -> str | None:
    """Return the text of a token, which a file writes as a string or as an object; None if it is neither."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _read_ids(file: Mapping[str, Any], key: str) -> list[int]:
    """Return the ids under `key`, a number or a list. Other values name none; some files write -1 for nothing."""
    value = file.get(key)
    values = value if isinstance(value, list) else [value]
    ids = []
    for item in values:
        if isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 2**31:
            ids.append(item)
    return ids


def _missing_tokenizer_error(directory: Path) -> str:
    for name in ("tokenizer.model", "vocab.json", "vocab.txt"):
        if (directory / name).is_file():
            return (
                f"{directory} has {name} but no tokenizer.json, which is the form dtrain reads. transformers converts "
                "it:\n"
                f"    pip install transformers sentencepiece protobuf\n"
                f'    python -c "from transformers import AutoTokenizer; '
                f"AutoTokenizer.from_pretrained('{directory}').save_pretrained('{directory}')\""
            )
    return (
        f"{directory} has no tokenizer.json. Copy the tokenizer files of the model there "
        "(tokenizer.json, tokenizer_config.json, special_tokens_map.json)"
    )
