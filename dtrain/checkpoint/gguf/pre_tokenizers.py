"""llama.cpp's name for how a tokenizer splits a text, by the content of tokenizer.json.

llama.cpp has the regular expressions in its own code, under names (`tokenizer.ggml.pre`). A name is given where the
steps of tokenizer.json split every text as it does. Those that tell capital and small letters apart (tekken, gpt-4o)
are not among them: llama.cpp has this for ASCII letters alone, and cuts ÉCOLE after the É.
"""

from collections.abc import Mapping
from typing import Any

from dtrain.base.errors import UserError

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
"""Regular expressions that split in turn, and whether whole words are looked up before merges -> llama.cpp's name."""


def pre_tokenizer_name(tokenizer: Mapping[str, Any]) -> str:
    """Return llama.cpp's name for how a byte-level tokenizer.json splits texts. Raises UserError that names the step
    for which it has none."""
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
    """Return the regular expressions of one step. UserError for a step that is none."""
    kind = entry.get("type")
    if kind == "ByteLevel":
        if entry.get("add_prefix_space"):
            raise UserError("pre_tokenizer: ByteLevel adds a space before a text (add_prefix_space)")
        return [_GPT2] if entry.get("use_regex", True) else []
    if kind == "Digits" and entry.get("individual_digits"):
        return [_DIGIT]
    if kind == "Split":
        regex = (entry.get("pattern") or {}).get("Regex")
        # Matches are kept and what lies between them is dropped: there is nothing between those of a known expression.
        keeps_matches = (entry.get("behavior"), entry.get("invert", False)) in (("Isolated", False), ("Removed", True))
        if regex is not None and keeps_matches:
            return [regex]
    raise UserError(f"pre_tokenizer: llama.cpp has no step {kind} of this kind: {dict(entry)}")
