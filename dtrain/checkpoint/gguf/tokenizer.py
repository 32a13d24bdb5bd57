"""A tokenizer in a GGUF file: tokens with types, merges or scores, ids of special tokens, and the chat template.

Models that dtrain exports use one of two kinds of tokenizers in llama.cpp:

    gpt2     byte-level BPE: a text is split by regular expressions, then merges are applied by rank
    llama    SentencePiece's BPE: two neighbours merge if their text is a token, the best score first; no split

tokenizer.json is read. Everything in it for which llama.cpp would give other ids is refused by name.

llama.cpp has the regular expressions in its own code, under names (`tokenizer.ggml.pre`). A name is chosen only if the
steps of tokenizer.json split every text in the same way. Expressions that distinguish capital from small letters
(tekken, gpt-4o) are refused, because llama.cpp does so only for ASCII letters: it splits ÉCOLE after the É.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import ByteLevel

from dtrain.base.errors import UserError
from dtrain.base.json_files import LARGE_FILE_BYTES, read_json
from dtrain.base.model_directory import TOKENIZER_FILE
from dtrain.data.text.template import choose_template
from dtrain.data.text.tokenizer import Tokenizer

_SPACE = "▁"  # SentencePiece's character for a space
_PHI3 = "phi-3"  # llama.cpp strips spaces after special tokens if `general.name` contains this
_KEEP_SPACES = ("<unk>", "<s>", "<|endoftext|>")  # special tokens after which it does not
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_AFTER_DIGITS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"\p{N}{1,3}" + _AFTER_DIGITS
_QWEN2 = _CONTRACTIONS + r"\p{N}" + _AFTER_DIGITS
_DIGIT = r"\p{N}"
_NAMES = {
    ((_GPT2,), False): "gpt-2",
    ((_DIGIT, _GPT2), False): "smollm",
    ((_QWEN2,), False): "qwen2",
    ((_LLAMA3,), True): "llama-bpe",
    ((_LLAMA3,), False): "smaug-bpe",
}
"""llama.cpp's name, by the regular expressions that split a text one after the other, and `ignore_merges`.

With `ignore_merges`, a word that is a token is not merged from its parts.
"""


@dataclass
class Vocabulary:
    """A tokenizer in the form of a GGUF file.

    Attributes:
        kind: "gpt2" or "llama".
        pre: llama.cpp's name of the regular expressions.
        tokens: Text of each token.
        types: Type of each token, a name of gguf's TokenType.
        merges: Merges of "gpt2", by rank.
        scores: Scores of "llama".
        ids: Ids of special tokens, by llama.cpp's names such as "eos".
        adds_bos: Whether a text begins with the token "bos".
        adds_eos: Whether a text ends with the token "eos".
        adds_space: Whether a space is added before a text.
        strips_after_special: Whether spaces after special tokens are removed, as in Phi-3.
        chat_templates: Chat templates by name: "default", "tool_use".
        notes: Lines for the user about what llama.cpp does not have.
    """

    kind: str
    pre: str
    tokens: list[str]
    types: list[str]
    merges: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    ids: dict[str, int] = field(default_factory=dict)
    adds_bos: bool = False
    adds_eos: bool = False
    adds_space: bool = False
    strips_after_special: bool = False
    chat_templates: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def read_vocabulary(directory: Path, base: Path, rows: int, template: Path) -> Vocabulary:
    """Read a tokenizer.

    Args:
        directory: Directory of the tokenizer.
        base: As in `Tokenizer.from_directory`.
        rows: Rows of the model's embedding. Rows without a token get the type UNUSED.
        template: Directory of the chat template.

    Raises:
        UserError: If llama.cpp does not have this tokenizer.
    """
    tokenizer = Tokenizer.from_directory(directory, base)
    file = directory / TOKENIZER_FILE
    if tokenizer.size > rows:
        raise UserError(f"{file} has an id {tokenizer.size - 1}, and the model's embedding has {rows} rows")
    try:
        vocabulary = _read(tokenizer, read_json(file, max_bytes=LARGE_FILE_BYTES), rows)
    except UserError as error:
        raise UserError(
            f"{file}: no GGUF file gives this tokenizer's ids: {error}. `dtrain export RUN DIR` writes a directory; "
            "llama.cpp's own convert_hf_to_gguf.py may write a file of it with other ids"
        ) from error
    chosen = choose_template(template, tokenizer)
    vocabulary.chat_templates = {} if chosen is None else chosen.sources_by_name
    return vocabulary


def _read(tokenizer: Tokenizer, written: Mapping[str, Any], rows: int) -> Vocabulary:
    """Convert a tokenizer to llama.cpp's form, without its chat template.

    Args:
        tokenizer: The tokenizer.
        written: Content of its tokenizer.json.
        rows: Rows of the model's embedding.

    Raises:
        UserError: If llama.cpp would give other ids for some text. The error names the part of tokenizer.json.
    """
    model = written["model"]
    if model.get("type") != "BPE":
        raise UserError(f"model: its type is {model.get('type')}; BPE is written")
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise UserError(f"model: it has a {key}")
    words = {number: word for word, number in tokenizer.vocabulary.items()}
    tokens = [words.get(number, f"[PAD{number}]") for number in range(rows)]
    if len(set(tokens)) < rows:
        raise UserError("model: a token is called [PAD and its id, as llama.cpp's tokens without a text are")
    types = ["NORMAL" if number in words else "UNUSED" for number in range(rows)]
    is_byte_level = not model.get("byte_fallback")
    vocabulary = Vocabulary("gpt2" if is_byte_level else "llama", "default", tokens, types)
    pairs = []  # tokenizer.json has merges as "a b" or as ["a", "b"]
    for merge in model.get("merges", ()):
        pairs.append(tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge))
    if is_byte_level:
        _read_byte_level(vocabulary, written, pairs)
    else:
        _read_sentencepiece(vocabulary, tokenizer, written, pairs)
    _type_added(vocabulary, tokenizer, Backend.from_str(json.dumps(written)).normalizer)
    _add_special(vocabulary, tokenizer)
    return vocabulary


def _read_byte_level(vocabulary: Vocabulary, written: Mapping[str, Any], pairs: Sequence[tuple[str, ...]]) -> None:
    """Set the fields of a vocabulary of kind "gpt2": the name of its regular expressions, and merges."""
    normalizer = written.get("normalizer")
    if normalizer is not None and normalizer.get("type") != "NFC":
        raise UserError(f"normalizer: llama.cpp has none, and this one is {normalizer.get('type')}")
    if normalizer is not None:
        vocabulary.notes.append(
            "llama.cpp does not compose characters (NFC), as the tokenizer does: give it composed ones"
        )
    # Both leave out bytes without a token, unless tokenizer.json has a token to replace them.
    if written["model"].get("unk_token") is not None and set(ByteLevel.alphabet()) - set(vocabulary.tokens):
        raise UserError("model: bytes without a token become its unk_token")
    vocabulary.pre = _pre_tokenizer_name(written)
    vocabulary.merges = [" ".join(pair) for pair in pairs]


def _pre_tokenizer_name(tokenizer: Mapping[str, Any]) -> str:
    """Return llama.cpp's name for the way in which a byte-level tokenizer.json splits texts.

    Raises UserError that names the step which llama.cpp does not have.
    """
    steps: list[str] = []
    part = tokenizer.get("pre_tokenizer") or {}
    entries = part.get("pretokenizers", [part])
    for entry in entries:
        steps += _regexes(entry)
    if not entries or entries[-1].get("type") != "ByteLevel":
        raise UserError("pre_tokenizer: its last step is not ByteLevel, as llama.cpp's is")
    looks_up = tokenizer["model"].get("ignore_merges") is True
    name = _NAMES.get((tuple(steps), looks_up))
    if name is None:
        has = "and looks whole words up before it merges" if looks_up else "and merges every word"
        raise UserError(f"pre_tokenizer: llama.cpp has none that splits by {' then '.join(steps) or 'nothing'} {has}")
    return name


def _regexes(entry: Mapping[str, Any]) -> list[str]:
    """Return the regular expressions of one step of tokenizer.json. Raises UserError for any other step."""
    kind = entry.get("type")
    if kind == "ByteLevel":
        if entry.get("add_prefix_space"):
            raise UserError("pre_tokenizer: ByteLevel adds a space before a text (add_prefix_space)")
        return [_GPT2] if entry.get("use_regex", True) else []
    if kind == "Digits" and entry.get("individual_digits"):
        return [_DIGIT]
    if kind == "Split":
        regex = (entry.get("pattern") or {}).get("Regex")
        # "Removed" with "invert" keeps matches, and drops what is between them. Known expressions match everything.
        keeps_matches = (entry.get("behavior"), entry.get("invert", False)) in (("Isolated", False), ("Removed", True))
        if regex is not None and keeps_matches:
            return [regex]
    raise UserError(f"pre_tokenizer: llama.cpp has no step {kind} of this kind: {dict(entry)}")


def _read_sentencepiece(
    vocabulary: Vocabulary, tokenizer: Tokenizer, written: Mapping[str, Any], pairs: Sequence[tuple[str, ...]]
) -> None:
    """Set the fields of a vocabulary of kind "llama": byte tokens, the unknown token and scores. Raises UserError."""
    if written["model"].get("ignore_merges"):
        raise UserError("model: it looks whole words up before it merges (ignore_merges)")
    vocabulary.adds_space = _adds_space(written)
    ids = {token: number for number, token in enumerate(vocabulary.tokens)}
    for value in range(256):
        number = ids.get(f"<0x{value:02X}>")
        if number is None:
            raise UserError(f"model: the byte <0x{value:02X}> has no token")
        vocabulary.types[number] = "BYTE"
    unknown = written["model"].get("unk_token")
    if unknown in ids:
        vocabulary.types[ids[unknown]] = "UNKNOWN"
        vocabulary.ids["unk"] = ids[unknown]
    vocabulary.scores = _scores(
        vocabulary.tokens, pairs, {token.content for token in tokenizer.added_tokens().values()}
    )


def _adds_space(written: Mapping[str, Any]) -> bool:
    """Check whether a space is added before a text and after every special token, as in Llama 2. Gemma adds none.

    Raises UserError for any step that does not replace spaces as SentencePiece does.
    """
    normalizer, split = written.get("normalizer") or {}, written.get("pre_tokenizer") or {}
    steps = normalizer.get("normalizers", [normalizer] if normalizer else [])
    kinds = [step.get("type") for step in steps]
    replaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    if kinds in (["Prepend", "Replace"], ["Replace"]) and steps[-1] == replaces:
        if split and not (split.get("type") == "Split" and split.get("pattern") == {"String": " "}):
            raise UserError(f"pre_tokenizer: llama.cpp splits no text of SentencePiece's, and this is {split}")
        return len(kinds) == 2
    if not kinds and split.get("type") == "Metaspace":
        scheme = split.get("prepend_scheme", "always")
        if split.get("replacement") == _SPACE and split.get("split") is False and scheme != "first":
            if scheme == "always":  # it adds none before a space, and llama.cpp does
                raise UserError("pre_tokenizer: Metaspace adds a space where a text has none; llama.cpp adds it always")
            return False
        raise UserError(
            f"pre_tokenizer: Metaspace with prepend_scheme {scheme!r} and split {split.get('split')!r}; llama.cpp adds "
            "a space after every special token or none at all, and splits nothing"
        )
    raise UserError(f"normalizer: llama.cpp has none that does {kinds or 'nothing'} beside a pre_tokenizer {split}")


def _scores(tokens: Sequence[str], pairs: Sequence[tuple[str, ...]], added: set[str]) -> list[float]:
    """Return a score for each token with which llama.cpp applies merges in the order of tokenizer.json.

    tokenizer.json ranks pairs, and merges the pair with the lowest rank first. llama.cpp scores merged texts, and forms
    the text with the highest score first. So the score of a text is minus the rank of its merge. For example, the
    merges "a b" (rank 0) and "ab c" (rank 1) give "ab" the score 0 and "abc" the score -1. Tokens that no merge forms
    have the lowest score.

    Args:
        tokens: All tokens.
        pairs: The merges, by rank.
        added: Added tokens, which are not merged.

    Raises:
        UserError: If scores cannot express the ranks. This is so if the pairs that form a token do not have
            consecutive ranks, or if two tokens together are the text of a third one, but no merge joins them.
    """
    ranks: dict[str, int] = {}
    previous = None
    for left, right in pairs:
        word = left + right
        if word != previous and word in ranks:
            raise UserError(f"model: merges form {word!r} at ranks apart, which scores of tokens cannot say")
        ranks.setdefault(word, len(ranks))
        previous = word
    known, merged = set(tokens) - added, set(pairs)
    for word in ranks.keys() & known:
        for cut in range(1, len(word)):
            part = word[:cut], word[cut:]
            if part[0] in known and part[1] in known and part not in merged:
                raise UserError(f"model: no merge forms {word!r} of {part[0]!r} and {part[1]!r}, which llama.cpp does")
    for word in known - ranks.keys():
        if any(word[:cut] in known and word[cut:] in known for cut in range(1, len(word))):
            raise UserError(f"model: no merge forms {word!r}, which llama.cpp forms of its parts")
    return [-float(ranks.get(token, len(ranks))) for token in tokens]


def _type_added(vocabulary: Vocabulary, tokenizer: Tokenizer, normalizer: Normalizer | None) -> None:
    """Set the types of added tokens. Raises UserError for flags that llama.cpp does not have."""
    added = tokenizer.added_tokens()
    for number, token in added.items():
        if token.single_word or token.lstrip:
            flag = "single_word" if token.single_word else "lstrip"
            raise UserError(f"added_tokens: {token.content!r} is {flag}, which llama.cpp does not know")
        changes = normalizer is not None and normalizer.normalize_str(token.content) != token.content
        if token.normalized and changes:
            raise UserError(f"added_tokens: {token.content!r} is found after the normalizer changed it (normalized)")
        is_spaces = not token.content.strip(_SPACE) and vocabulary.kind == "llama"
        if vocabulary.types[number] == "NORMAL" and not is_spaces:  # spaces are merged, and written as spaces
            vocabulary.types[number] = "CONTROL" if token.special else "USER_DEFINED"
    stripping = {token.content for token in added.values() if token.rstrip}
    vocabulary.strips_after_special = bool(stripping)
    if stripping:
        matched = {token.content for number, token in added.items() if vocabulary.types[number] != "NORMAL"}
        if stripping != matched - set(_KEEP_SPACES) or "</s>" not in stripping or set(_KEEP_SPACES) - matched:
            raise UserError(f"added_tokens: {min(stripping)!r} is rstrip, which llama.cpp knows as Phi-3 has it alone")


def _add_special(vocabulary: Vocabulary, tokenizer: Tokenizer) -> None:
    before, after = tokenizer.affixes()
    if len(before) > 1 or len(after) > 1:
        raise UserError("post_processor: it adds more than one token before a text or after it")
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    if before and before[0] != bos or after and after[0] != eos:
        raise UserError("post_processor: it adds other tokens than bos_token before a text and eos_token after it")
    vocabulary.adds_bos, vocabulary.adds_eos = bool(before), bool(after)
    # llama.cpp ends an answer at each of these tokens: the end of a text, of a turn, of a message.
    vocabulary.ids |= dict(zip(("eos", "eot", "eom"), tokenizer.eos_ids, strict=False))
    if bos is not None:
        vocabulary.ids["bos"] = bos
    if "pad_token" in tokenizer.special_tokens:
        vocabulary.ids["pad"] = tokenizer.pad_id


def general_name(name: str, vocabulary: Vocabulary) -> str | None:
    """Return the name to store in a file (`general.name`); None to store none.

    llama.cpp strips spaces after special tokens if this name contains "phi-3". So it must, or must not, contain it.
    """
    is_phi3 = any(word in name.lower() for word in (_PHI3, "phi3"))
    if vocabulary.strips_after_special == is_phi3:
        return name
    return f"{name} ({_PHI3})" if vocabulary.strips_after_special else None


def add_vocabulary(writer: Any, vocabulary: Vocabulary) -> None:
    """Add the tokenizer to a GGUFWriter."""
    from gguf import TokenType

    writer.add_tokenizer_model(vocabulary.kind)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types([TokenType[kind] for kind in vocabulary.types])
    if vocabulary.kind == "llama":
        writer.add_token_scores(vocabulary.scores)
        writer.add_add_space_prefix(vocabulary.adds_space)
    else:
        writer.add_token_merges(vocabulary.merges)
    adders = {"bos": writer.add_bos_token_id, "eos": writer.add_eos_token_id, "unk": writer.add_unk_token_id}
    adders |= {"pad": writer.add_pad_token_id, "eot": writer.add_eot_token_id, "eom": writer.add_eom_token_id}
    for name, number in vocabulary.ids.items():
        adders[name](number)
    writer.add_add_bos_token(vocabulary.adds_bos)
    writer.add_add_eos_token(vocabulary.adds_eos)
    if vocabulary.chat_templates:
        templates = vocabulary.chat_templates.items()
        writer.add_chat_template([{"name": name, "template": source} for name, source in templates])
