"""Tokenizer of a model (`tokenizer.json`), its special tokens, and control tokens that users write as text.

`tokenizer.json` turns text into ids and back. The names of the special tokens are in several files next to it, of which
each model fills other ones. Torch is not imported.

A chat template writes control tokens (`<|im_end|>`, `<|image_pad|>`) and the words of users into one string, in which a
tokenizer cannot tell them apart: a user who writes `<|im_end|>` would end the turn. So a control token in the content
of a user or a tool is escaped before the template sees it, by a private character behind its first one. The tokenizer
reads an escaped token as its characters.

`data.special_tokens` chooses which tokens are escaped. By default these are the tokens of the conversation's structure:
what the template writes itself, what stands for an image, and padding, begin and end of text. Other control tokens stay
tokens, as in transformers' `apply_chat_template`, because users write them on purpose. For example, Qwen2-VL's
`<|im_end|>` is escaped and its grounding mark `<|box_start|>` is not.
"""

import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Encoding
from tokenizers import Tokenizer as Backend

from dtrain.base.errors import UserError
from dtrain.base.json_files import LARGE_FILE_BYTES, read_json, read_text

ESCAPE = "\U0010fffd"
STAND_INS = range(0xF0000, 0xFFFFE)  # private characters, each for one control token
WRITERS = ("assistant", "system", "developer", "model")  # roles whose content may hold control tokens

SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
SPECIAL_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")
IMAGE_TOKENS = ("image_token", "boi_token", "eoi_token", "video_token", "audio_token")
TOKEN_TABLES = ("extra_special_tokens", "model_specific_special_tokens")  # of tokenizer_config.json
TOKENIZER_FILES = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "config.json")


class Tokenizer:
    """Tokenizer of text to ids and back.

    directory       where it was read
    special_tokens  name → text of the special tokens that are named, as chat templates see them (`bos_token` ...)
    control_tokens  all special tokens; data.special_tokens says which of them a user's words in a chat are not read as
    framing_texts   texts of the control tokens for padding, begin and end of text, and for images, by the model's files
    bos_id          or None
    eos_ids         all tokens that end a generation, the model's own `eos_id` first: `eos_token` of
                    tokenizer_config.json or special_tokens_map.json, then eos_token_id of generation_config.json and
                    of config.json (each a number or a list); empty where no file names one
    pad_id          `pad_token`, else pad_token_id of generation_config.json or config.json, else eos_id, else 0
                    (padding is neither attended to nor trained, so that any id serves)
    size            highest id + 1
    id_limit        what ids of tokenized rows must stay below: config.json's vocab_size, or `size` if that is larger
    """

    def __init__(
        self, directory: Path, tokenizer_json: str, files: Mapping[str, Mapping[str, Any]], base: Path | None = None
    ):
        self.directory, self._base = directory, base
        config, tokens_map, generation, model = (files.get(name, {}) for name in TOKENIZER_FILES)
        self._whole = _backend(directory, tokenizer_json, config)
        self._plain = _backend(directory, tokenizer_json, config)
        # Without its post-processor the tokenizer adds nothing, and its offsets are those of the text itself: the
        # byte-level post-processor would cut the leading space off a token's offsets.
        self._plain.post_processor = None
        self.special_tokens = _special_tokens(directory, self._whole, config, tokens_map)
        self.control_tokens = ControlTokens(_control_texts(self._whole, config, self.special_tokens))
        inner = model.get("text_config")
        model = {**(inner if isinstance(inner, dict) else {}), **model}

        def ids_of(name: str) -> list[int]:
            text, key = self.special_tokens.get(name), f"{name}_id"
            named = None if text is None else self._whole.token_to_id(text)
            return [*([] if named is None else [named]), *_ids(generation, key), *_ids(model, key)]

        self.eos_ids: list[int] = list(dict.fromkeys(ids_of("eos_token")))
        self.bos_id = next(iter(ids_of("bos_token")), None)
        self.pad_id: int = [*ids_of("pad_token"), *self.eos_ids, 0][0]
        self.framing_texts = self._framing_texts(config, generation, model)
        self.size = max(self.vocabulary.values(), default=-1) + 1
        self.id_limit = max([self.size, *_ids(model, "vocab_size")])
        self._source = (tokenizer_json, config.get("added_tokens_decoder"))

    @classmethod
    def from_directory(cls, path: str | Path, base: Path | None = None) -> "Tokenizer":
        """Read the tokenizer of a model's directory, or of an adapter's, whose `base` has the files that name a model's
        own special tokens. Raises UserError where there is none that `tokenizers` reads."""
        directory = Path(path).expanduser()
        file = directory / "tokenizer.json"
        if not directory.is_dir():
            raise UserError(f"model.path: there is no directory {path}")
        if not file.is_file():
            raise UserError(_missing(directory))
        paths = {name: directory / name for name in TOKENIZER_FILES if (directory / name).is_file()}
        if base is not None:
            paths = {name: base / name for name in TOKENIZER_FILES[2:] if (base / name).is_file()} | paths
        files = {name: read_json(file) for name, file in paths.items()}
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
        """Every token as the tokenizer spells it, added ones too, and its id."""
        return self._whole.get_vocab(with_added_tokens=True)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of everything that decides the ids."""
        named = json.dumps([self._source[1], self.special_tokens, self.bos_id, self.eos_ids], sort_keys=True)
        return hashlib.sha256((self._source[0] + named).encode()).hexdigest()[:16]

    def _framing_texts(self, config: Mapping[str, Any], *files: Mapping[str, Any]) -> list[str]:
        """Return the texts of control tokens that the files name for padding, begin, end and images.

        config.json and generation_config.json name ids, such as `eos_token_id`, `vision_start_token_id` (Qwen2-VL) and
        `boi_token_index` (Gemma 3). tokenizer_config.json names texts.
        """
        texts = {self.special_tokens.get(name) for name in ("bos_token", "eos_token", "pad_token")}
        tables = [config, *(config.get(name) for name in TOKEN_TABLES)]
        for table in tables:
            named = table if isinstance(table, dict) else {}
            texts |= {_text_of(named.get(name)) for name in IMAGE_TOKENS}
        for file in files:
            for key in file:
                if key.endswith(("_token_id", "_token_index")):
                    texts |= {self._whole.id_to_token(token_id) for token_id in _ids(file, key)}
        return [text for text in self.control_tokens.texts if text in texts]

    def added_tokens(self) -> dict[int, AddedToken]:
        """Return the tokens that are found in a text before it is split, by id."""
        return self._whole.get_added_tokens_decoder()

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Return ids of `text`, its escaped control tokens as characters; with special tokens, what the tokenizer's
        post-processor adds (BOS, for most), but no second BOS to a text that begins with it."""
        if not add_special_tokens and self.control_tokens.has_escaped(text):
            return self.encode_with_offsets(text)[0]
        ids = _encode(self._whole if add_special_tokens else self._plain, text, add_special_tokens).ids
        is_doubled = add_special_tokens and ids[:1] == ids[1:2] and ids[:1] == self.affixes()[0]
        return ids[1:] if is_doubled else ids

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return ids of `text`, nothing added, and each token's characters [start, end) in `text`."""
        if not self.control_tokens.has_escaped(text):
            encoding = _encode(self._plain, text, False)
            return encoding.ids, encoding.offsets
        plain, places = self.control_tokens.with_stand_ins(text)
        backend, id_of = self._with_stand_ins
        encoding = _encode(backend, plain, False)
        ids = [id_of.get(token, token) for token in encoding.ids]
        return ids, [(places[start], places[end]) for start, end in encoding.offsets]

    @cached_property
    def _with_stand_ins(self) -> tuple[Backend, dict[int | None, int]]:
        return self.control_tokens.backend_of_stand_ins(self._plain)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return self._whole.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def pieces(self, ids: Sequence[int]) -> list[tuple[str | None, str]]:
        """Decode `ids` in pieces that begin at control tokens.

        A control token and the characters of its name decode to the same text; the pieces tell them apart.

        Returns:
            For each piece, the control token that it begins with (None for a first piece without one) and the text
            after this token.
        """
        groups: list[list[int]] = [[]]
        for token in ids:
            if token in self._control_ids:
                groups.append([])
            groups[-1].append(token)
        pieces: list[tuple[str | None, str]] = []
        for group in groups:
            control = self._control_ids.get(group[0]) if group else None
            if control is None:
                pieces.append((None, self.decode(group)))
                continue
            # Decoded together, since a tokenizer of pieces drops the space in front of the first one that it decodes.
            text = self.decode(group)
            pieces.append((control, text[len(control) :] if text.startswith(control) else self.decode(group[1:])))
        return pieces if groups[0] else pieces[1:]

    @cached_property
    def _control_ids(self) -> dict[int, str]:
        vocabulary = self.vocabulary
        return {vocabulary[text]: text for text in self.control_tokens.texts}

    def affixes(self) -> tuple[list[int], list[int]]:
        """Return the ids that the post-processor puts before and after a text."""
        plain, whole = self.encode("a"), self.encode("a", add_special_tokens=True)
        for start in range(len(whole) - len(plain) + 1):
            if whole[start : start + len(plain)] == plain:
                return whole[:start], whole[start + len(plain) :]
        raise UserError(f"{self.directory / 'tokenizer.json'}: its post_processor rewrites the text's own tokens")


class ControlTokens:
    """Texts of a tokenizer's control tokens, and their escaped form.

    Attributes:
        texts: All of them, the longest first.
        escaped: Those that `escape` escapes. By default all.
    """

    def __init__(self, texts: Sequence[str], escaped: Collection[str] | None = None):
        self.texts = tuple(sorted(texts, key=lambda text: (-len(text), text)))  # the longest match counts
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

        def written(match: re.Match[str]) -> str:
            token = match[0]
            return token[0] + ESCAPE + token[1:] if token in self.escaped else token

        return self._pattern.sub(written, text)

    def escape_message(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a chat message, the control tokens in its content escaped unless its role may write them."""
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
        return ESCAPE in text and any(match["escaped"] for match in self._escaped_or_not.finditer(text))

    def with_stand_ins(self, text: str) -> tuple[str, list[int]]:
        """Return `text` with escaped tokens as plain characters and each control token as its stand-in, and the place
        in `text` of each character and of the end. Raises UserError where `text` has a stand-in's character."""
        if any(ord(character) in STAND_INS for character in text):
            raise UserError(
                "the conversation has private characters that dtrain writes control tokens with, and a control token "
                "in a user's message; remove either"
            )
        pieces: list[str] = []
        places: list[int] = []
        start = 0
        for match in self._escaped_or_not.finditer(text):
            begin, end = match.span()
            pieces.append(text[start:begin])
            places += range(start, begin)
            if match["escaped"]:
                pieces.append(match[0].replace(ESCAPE, "", 1))
                places += [begin, *range(begin + 2, end)]
            else:
                pieces.append(self._stand_in(match[0]))
                places.append(begin)
            start = end
        pieces.append(text[start:])
        return "".join(pieces), [*places, *range(start, len(text) + 1)]

    def _stand_in(self, text: str) -> str:
        return chr(STAND_INS[self.texts.index(text)])

    def backend_of_stand_ins(self, backend: Backend) -> tuple[Backend, dict[int | None, int]]:
        """Return the tokenizer `backend` with stand-ins in the place of control tokens, whose own texts are plain
        characters to it, and a map from its ids of added tokens to those of `backend`.

        A control token of one character that is a piece of the model, too, stays that piece.
        """
        written = json.loads(backend.to_str())
        stand_ins = {text: self._stand_in(text) for text in self.texts}
        for token in written["added_tokens"]:
            if token["content"] in stand_ins:  # found in the text as it is written, before a normalizer changes it
                token |= {"content": stand_ins[token["content"]], "normalized": False}
        model, unknown = written["model"], written["model"].get("unk_token")
        can_lose = model["type"] in ("BPE", "Unigram") or unknown is not None
        hidden = {text: 2 * own for text, own in stand_ins.items() if len(text) > 1 and can_lose}  # no text has these
        if isinstance(model["vocab"], dict):
            model["vocab"] = {hidden.get(text, text): number for text, number in model["vocab"].items()}
        else:
            model["vocab"] = [[hidden.get(text, text), score] for text, score in model["vocab"]]
        if unknown in hidden:
            model["unk_token"] = hidden[unknown]
        if "merges" in model:
            merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
            model["merges"] = [merge for merge in merges if not {*merge, "".join(merge)} & hidden.keys()]
        changed = Backend.from_str(json.dumps(written))
        added = {token.content: number for number, token in backend.get_added_tokens_decoder().items()}
        return changed, {changed.token_to_id(stand_ins.get(text, text)): number for text, number in added.items()}


def _encode(backend: Backend, text: str, add_special_tokens: bool) -> Encoding:
    try:
        return backend.encode(text, add_special_tokens=add_special_tokens)
    except TypeError as problem:  # the library's word for a string that is no Unicode text
        half = next((at for at, character in enumerate(text) if "\ud800" <= character <= "\udfff"), None)
        if half is None:
            raise
        raise UserError(
            f"the text has half a character at {half}, {text[half]!r} (one of a surrogate pair), which is no Unicode; "
            "mend or drop it"
        ) from problem


def _backend(directory: Path, text: str, config: Mapping[str, Any]) -> Backend:
    try:
        backend = Backend.from_str(text)
    except BaseException as problem:  # the library raises nothing narrower, and its panics are no Exception
        if isinstance(problem, KeyboardInterrupt):
            raise
        raise UserError(
            f"{directory / 'tokenizer.json'} is not readable: {problem}. "
            "Is the file whole, and the tokenizers package up to date?"
        ) from problem
    backend.no_truncation()
    backend.no_padding()
    for token_id, token in _added(directory / "tokenizer_config.json", config.get("added_tokens_decoder") or {}):
        if backend.token_to_id(token["content"]) is not None:
            continue
        flags = {name: token[name] is True for name in SPECIAL_TOKEN_FLAGS if name in token}
        backend.add_tokens([AddedToken(token["content"], special=token.get("special") is True, **flags)])
        if backend.token_to_id(token["content"]) != token_id:
            raise UserError(
                f"{directory / 'tokenizer_config.json'}: added_tokens_decoder gives {token['content']!r} the id "
                f"{token_id}, which does not follow the ids of tokenizer.json; "
                "save the tokenizer anew with transformers"
            )
    return backend


def _added(file: Path, written: Any) -> list[tuple[int, dict[str, Any]]]:
    entries = written.items() if isinstance(written, dict) else [("", written)]
    for key, token in entries:
        if not (key.isdecimal() and len(key) < 10 and isinstance(token, dict) and _is_text(token.get("content"))):
            raise UserError(f"{file}: added_tokens_decoder must be a table of ids, each with the content of its token")
    return sorted(((int(key), token) for key, token in entries), key=lambda entry: entry[0])


def _is_text(value: Any) -> bool:
    """Return whether `value` is a string that is Unicode: JSON can spell half a character."""
    return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)


def _special_tokens(directory: Path, backend: Backend, *files: Mapping[str, Any]) -> dict[str, str]:
    """Return name → text, each from the first file that names it; a token may be an object with a text `content`."""
    tokens: dict[str, str] = {}
    for name in SPECIAL_TOKEN_NAMES:
        values = [file[name] for file in files if file.get(name) is not None]
        if not values:
            continue
        text: Any = values[0].get("content") if isinstance(values[0], dict) else values[0]
        if not _is_text(text):
            raise UserError(f"{directory}: {name} must be a text, in tokenizer_config.json or special_tokens_map.json")
        if backend.token_to_id(text) is None:
            raise UserError(
                f"{directory}: {name} is {text!r}, which tokenizer.json has no token for; "
                "correct tokenizer_config.json (or special_tokens_map.json)"
            )
        tokens[name] = text
    return tokens


def _control_texts(backend: Backend, config: Mapping[str, Any], named: Mapping[str, str]) -> list[str]:
    """Return the texts of added tokens that tokenizer.json or a name makes special; not of those that are found as
    single words alone, whose neighbours decide."""
    more = config.get("additional_special_tokens") or []
    entries = [*(config.get("added_tokens_decoder") or {}).values(), *(more if isinstance(more, list) else [])]
    special = {*named.values(), *(entry for entry in entries if isinstance(entry, str))}
    special |= {str(entry.get("content")) for entry in entries if isinstance(entry, dict) and entry.get("special")}
    added = backend.get_added_tokens_decoder().values()
    return [token.content for token in added if (token.special or token.content in special) and not token.single_word]


def _text_of(token: Any) -> str | None:
    """Return the text of a named token, which a file writes as a string or as an object; None if it is neither."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _ids(file: Mapping[str, Any], key: str) -> list[int]:
    """Return the ids under `key`. Anything else names none: -1 stands for nothing in some files."""
    value = file.get(key)
    values = value if isinstance(value, list) else [value]
    return [item for item in values if isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 2**31]


def _missing(directory: Path) -> str:
    slow = [name for name in ("tokenizer.model", "vocab.json", "vocab.txt") if (directory / name).is_file()]
    if not slow:
        return (
            f"{directory} has no tokenizer.json; copy the tokenizer files of the model there "
            "(tokenizer.json, tokenizer_config.json, special_tokens_map.json)"
        )
    return (
        f"{directory} has {slow[0]} but no tokenizer.json, which is the form dtrain reads. transformers converts it:\n"
        f"    pip install transformers sentencepiece protobuf\n"
        f'    python -c "from transformers import AutoTokenizer; '
        f"AutoTokenizer.from_pretrained('{directory}').save_pretrained('{directory}')\""
    )
