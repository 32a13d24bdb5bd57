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

Merge = tuple[str, ...]
"""Two texts that are merged."""

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


def _read(tokenizer: Tokenizer, content: Mapping[str, Any], rows: int) -> Vocabulary:
    """Convert a tokenizer to llama.cpp's form, without its chat template.

    Args:
        tokenizer: The tokenizer.
        content: Content of its tokenizer.json.
        rows: Rows of the model's embedding.

    Raises:
        UserError: If llama.cpp would give other ids for some text. The error names the part of tokenizer.json.
    """
    model = content["model"]
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
    merges = _read_merges(model)
    if is_byte_level:
        _read_byte_level(vocabulary, content, merges)
    else:
        _read_sentencepiece(vocabulary, tokenizer, content, merges)
    normalizer = Backend.from_str(json.dumps(content)).normalizer
    _set_types_of_added_tokens(vocabulary, tokenizer, normalizer)
    _set_special_tokens(vocabulary, tokenizer)
    return vocabulary


def _read_merges(model: Mapping[str, Any]) -> list[Merge]:
    """Return the merges by rank. tokenizer.json has a merge as "a b" or as ["a", "b"]."""
    merges = []
    for merge in model.get("merges", ()):
        merges.append(tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge))
    return merges


def _read_byte_level(vocabulary: Vocabulary, content: Mapping[str, Any], merges: Sequence[Merge]) -> None:
    """Set the fields of a vocabulary of kind "gpt2": the name of its regular expressions, and merges."""
    normalizer = content.get("normalizer")
    if normalizer is not None and normalizer.get("type") != "NFC":
        raise UserError(f"normalizer: llama.cpp has none, and this one is {normalizer.get('type')}")
    if normalizer is not None:
        vocabulary.notes.append(
            "llama.cpp does not compose characters (NFC), as the tokenizer does: give it composed ones"
        )
    # Both leave out bytes without a token, unless tokenizer.json has a token to replace them.
    if content["model"].get("unk_token") is not None and set(ByteLevel.alphabet()) - set(vocabulary.tokens):
        raise UserError("model: bytes without a token become its unk_token")
    vocabulary.pre = _pre_tokenizer_name(content)
    vocabulary.merges = [" ".join(merge) for merge in merges]


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
    ignores_merges = tokenizer["model"].get("ignore_merges") is True
    name = _NAMES.get((tuple(steps), ignores_merges))
    if name is None:
        expressions = " then ".join(steps) or "nothing"
        merging = "looks whole words up before it merges" if ignores_merges else "merges every word"
        raise UserError(f"pre_tokenizer: llama.cpp has none that splits by {expressions} and {merging}")
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
    vocabulary: Vocabulary, tokenizer: Tokenizer, content: Mapping[str, Any], merges: Sequence[Merge]
) -> None:
    """Set the fields of a vocabulary of kind "llama": byte tokens, the unknown token and scores. Raises UserError."""
    if content["model"].get("ignore_merges"):
        raise UserError("model: it looks whole words up before it merges (ignore_merges)")
    vocabulary.adds_space = _adds_space(content)
    ids = {token: number for number, token in enumerate(vocabulary.tokens)}
    for value in range(256):
        number = ids.get(f"<0x{value:02X}>")
        if number is None:
            raise UserError(f"model: the byte <0x{value:02X}> has no token")
        vocabulary.types[number] = "BYTE"
    unknown = content["model"].get("unk_token")
    if unknown in ids:
        vocabulary.types[ids[unknown]] = "UNKNOWN"
        vocabulary.ids["unk"] = ids[unknown]
    added_tokens = {token.content for token in tokenizer.added_tokens().values()}
    vocabulary.scores = _scores(vocabulary.tokens, merges, added_tokens)


def _adds_space(content: Mapping[str, Any]) -> bool:
    """Check whether a space is added before a text and after every special token, as in Llama 2. Gemma adds none.

    Raises UserError for any step that does not replace spaces as SentencePiece does.
    """
    normalizer, split = content.get("normalizer") or {}, content.get("pre_tokenizer") or {}
    steps = normalizer.get("normalizers", [normalizer] if normalizer else [])
    step_types = [step.get("type") for step in steps]
    replace_spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    if step_types in (["Prepend", "Replace"], ["Replace"]) and steps[-1] == replace_spaces:
        if split and not (split.get("type") == "Split" and split.get("pattern") == {"String": " "}):
            raise UserError(f"pre_tokenizer: llama.cpp splits no text of SentencePiece's, and this is {split}")
        return len(step_types) == 2
    if not step_types and split.get("type") == "Metaspace":
        scheme = split.get("prepend_scheme", "always")
        if split.get("replacement") == _SPACE and split.get("split") is False and scheme != "first":
            if scheme == "always":  # it adds none before a space, and llama.cpp does
                raise UserError("pre_tokenizer: Metaspace adds a space where a text has none; llama.cpp adds it always")
            return False
        raise UserError(
            f"pre_tokenizer: Metaspace with prepend_scheme {scheme!r} and split {split.get('split')!r}; llama.cpp adds "
            "a space after every special token or none at all, and splits nothing"
        )
    raise UserError(
        f"normalizer: llama.cpp has no tokenizer with the steps {step_types or '(none)'} and the pre_tokenizer {split}"
    )


def _scores(tokens: Sequence[str], merges: Sequence[Merge], added: set[str]) -> list[float]:
    """Return a score for each token with which llama.cpp applies merges in the order of tokenizer.json.

    tokenizer.json ranks pairs, and merges the pair with the lowest rank first. llama.cpp scores merged texts, and forms
    the text with the highest score first. So the score of a text is minus the rank of its merge. For example, the
    merges "a b" (rank 0) and "ab c" (rank 1) give "ab" the score 0 and "abc" the score -1. Tokens that no merge forms
    have the lowest score.

    Args:
        tokens: All tokens.
        merges: The merges, by rank.
        added: Added tokens, which are not merged.

    Raises:
        UserError: If scores cannot express the ranks. This is so if the pairs that form a token do not have
            consecutive ranks, or if two tokens together are the text of a third one, but no merge joins them.
    """
    ranks = _ranks_of_merged_texts(merges)
    _check_merged_texts(ranks, set(tokens) - added, set(merges))
    return [-float(ranks.get(token, len(ranks))) for token in tokens]


def _ranks_of_merged_texts(merges: Sequence[Merge]) -> dict[str, int]:
    """Return the rank of each text that merges form. Raises UserError if other merges are between those of a text."""
    ranks: dict[str, int] = {}
    previous = None
    for left, right in merges:
        text = left + right
        if text != previous and text in ranks:
            raise UserError(f"model: merges form {text!r} at ranks apart, which scores of tokens cannot say")
        ranks.setdefault(text, len(ranks))
        previous = text
    return ranks


def _check_merged_texts(ranks: Mapping[str, int], tokens: set[str], merges: set[Merge]) -> None:
    """Raise UserError if llama.cpp would join two tokens that no merge joins, because their text is a token.

    Args:
        ranks: Rank of each text that a merge forms.
        tokens: All tokens that are not added tokens.
        merges: The merges.
    """
    for text in ranks.keys() & tokens:
        for left, right in _splits_into_tokens(text, tokens):
            if (left, right) not in merges:
                raise UserError(f"model: no merge forms {text!r} of {left!r} and {right!r}, which llama.cpp does")
    for text in tokens - ranks.keys():
        if _splits_into_tokens(text, tokens):
            raise UserError(f"model: no merge forms {text!r}, which llama.cpp forms of its parts")


def _splits_into_tokens(text: str, tokens: set[str]) -> list[tuple[str, str]]:
    """Return the ways to write a text as two tokens.

    Example:
        >>> _splits_into_tokens("abc", {"a", "ab", "bc"})
        [('a', 'bc')]
    """
    splits = []
    for cut in range(1, len(text)):
        left, right = text[:cut], text[cut:]
        if left in tokens and right in tokens:
            splits.append((left, right))
    return splits


def _set_types_of_added_tokens(vocabulary: Vocabulary, tokenizer: Tokenizer, normalizer: Normalizer | None) -> None:
    """Set the types of added tokens. Raises UserError for flags that llama.cpp does not have."""
    added_tokens = tokenizer.added_tokens()
    for number, token in added_tokens.items():
        if token.single_word or token.lstrip:
            flag = "single_word" if token.single_word else "lstrip"
            raise UserError(f"added_tokens: {token.content!r} is {flag}, which llama.cpp does not know")
        is_changed = normalizer is not None and normalizer.normalize_str(token.content) != token.content
        if token.normalized and is_changed:
            raise UserError(f"added_tokens: {token.content!r} is found after the normalizer changed it (normalized)")
        # Tokens of spaces are merged like other tokens, and written as spaces.
        is_spaces = not token.content.strip(_SPACE) and vocabulary.kind == "llama"
        if vocabulary.types[number] == "NORMAL" and not is_spaces:
            vocabulary.types[number] = "CONTROL" if token.special else "USER_DEFINED"

    # llama.cpp strips spaces only as Phi-3 does: after every added token but three.
    stripping = {token.content for token in added_tokens.values() if token.rstrip}
    vocabulary.strips_after_special = bool(stripping)
    if not stripping:
        return
    matched = {token.content for number, token in added_tokens.items() if vocabulary.types[number] != "NORMAL"}
    keeping = set(_KEEP_SPACES)
    is_phi3 = stripping == matched - keeping and "</s>" in stripping and keeping <= matched
    if not is_phi3:
        raise UserError(f"added_tokens: {min(stripping)!r} is rstrip. llama.cpp supports this only as Phi-3 uses it")


def _set_special_tokens(vocabulary: Vocabulary, tokenizer: Tokenizer) -> None:
    """Set the ids of special tokens, and which of them are added to a text.

    Raises UserError if other tokens than bos_token and eos_token are added.
    """
    before, after = tokenizer.affixes()
    if len(before) > 1 or len(after) > 1:
        raise UserError("post_processor: it adds more than one token before a text or after it")
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    adds_other_bos = bool(before) and before[0] != bos
    adds_other_eos = bool(after) and after[0] != eos
    if adds_other_bos or adds_other_eos:
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
    adders = {
        "bos": writer.add_bos_token_id,
        "eos": writer.add_eos_token_id,
        "unk": writer.add_unk_token_id,
        "pad": writer.add_pad_token_id,
        "eot": writer.add_eot_token_id,
        "eom": writer.add_eom_token_id,
    }
    for name, number in vocabulary.ids.items():
        adders[name](number)
    writer.add_add_bos_token(vocabulary.adds_bos)
    writer.add_add_eos_token(vocabulary.adds_eos)
    if vocabulary.chat_templates:
        templates = vocabulary.chat_templates.items()
        writer.add_chat_template([{"name": name, "template": source} for name, source in templates])
