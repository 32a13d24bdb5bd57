"""The small files beside a model's weights: config.json, tokenizer, chat template. Imports no torch."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dtrain.base.errors import UserError
from dtrain.base.files import atomic_write_bytes, atomic_write_text, write_synced
from dtrain.base.json_files import LARGE_FILE_BYTES, read_json
from dtrain.base.model_directory import (
    CHAT_TEMPLATE,
    CONFIG,
    EXPORT_RECORD,
    TOKENIZER_FILE,
    find_companions,
    is_chat_template,
)
from dtrain.models.registry import FAMILIES, architecture_of_model_type


def copy_companions(source: Path, target: Path, *, config: bool = False, chat_template: str | None = None) -> None:
    """Copy the tokenizer's and processor's files of `source` into the directory `target`.

    Args:
        config: Whether config.json is copied too.
        chat_template: Text of a template that takes the place of the source's own templates. The named ones
            (`additional_chat_templates/`) are then left out as well: `tool_use` would otherwise write conversations
            with tools, which were trained with `chat_template`.
    """
    names = find_companions(source)
    if config and (source / CONFIG).is_file():
        names.append(CONFIG)
    if chat_template is not None:
        names = [name for name in names if not is_chat_template(name)]
    # Templates that are in `target` from before would be mixed with those of `source`.
    if chat_template is not None or _has_chat_template(source):
        for name in find_companions(target):
            if is_chat_template(name) and name not in names:
                (target / name).unlink()
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        atomic_write_bytes(target / name, (source / name).read_bytes())
    if chat_template is not None:
        atomic_write_text(target / CHAT_TEMPLATE, chat_template)


def _has_chat_template(directory: Path) -> bool:
    """Return whether a directory has a chat template, in a file of its own or in tokenizer_config.json."""
    if any(is_chat_template(name) for name in find_companions(directory)):
        return True
    try:
        return read_json(directory / "tokenizer_config.json").get("chat_template") is not None
    except UserError:
        return False


def write_companions(
    directory: Path, sources: Iterable[Path], chat_template: str | None, saved_step: Mapping[str, Any] | None
) -> None:
    """Copy the companions of `sources`, a later one's over an earlier's, to a new `directory`; chat_template,
    saved_step: as
    `write.write_directory` takes them."""
    for source in sources:
        copy_companions(source, directory, chat_template=chat_template)
    if saved_step is not None:
        write_synced(directory / EXPORT_RECORD, json.dumps(saved_step))


def read_saved_step(export: Path) -> dict[str, Any]:
    """{"step", "save"} of an export: its step, and the mark of its save or of the last one before it, if it says so."""
    try:
        return read_json(export / EXPORT_RECORD)
    except UserError:
        return {}


def read_model_config(directory: Path) -> dict[str, Any]:
    """config.json of a model's directory, as it stands; UserError where there is none."""
    path = directory / CONFIG
    if not path.is_file():
        raise UserError(f"{directory} has no {CONFIG}: it is no model's directory in Hugging Face format")
    return read_json(path)


_OF_IMAGES = re.compile(r"(vision|image|video|audio)_.*")  # the fields of other parts, in a file without a text_config


def has_untrained_parts(config: dict[str, Any]) -> bool:
    """Return whether such a model has weights that dtrain reads past: a vision tower, its projector."""
    return _text_tower(config) is not None


def text_tower_config(config: dict[str, Any]) -> dict[str, Any]:
    """The config.json of the text tower alone, for a model that never had the other parts."""
    flat = {key: value for key, value in config.items() if not _OF_IMAGES.fullmatch(key)}
    text = dict(config.get("text_config", flat))
    for key in ("tie_word_embeddings", "dtype", "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id"):
        if key in config:
            text.setdefault(key, config[key])
    kind = text.get("model_type") if "text_config" in config else None
    kind = kind if architecture_of_model_type(kind) else _text_tower(config)
    return text | {"architectures": [architecture_of_model_type(kind)], "model_type": kind}


def _text_tower(config: dict[str, Any]) -> str | None:
    """Return the model_type of the text tower, by the architecture; None for a model that is one."""
    names = list(config.get("architectures") or [])
    if "text_config" in config:
        names.append(architecture_of_model_type(config.get("model_type")))
    towers = [FAMILIES[name].text_tower for name in names if isinstance(name, str) and name in FAMILIES]
    return next(filter(None, towers), None)


def classifier_config(config: dict[str, Any], architecture: str, labels: int, source: Path) -> dict[str, Any]:
    """`config` of a model with a head of so many `labels`, for transformers. architecture: of the language model. Where
    `config` has no pad_token_id, with which transformers reads batches, it is the tokenizer's of `source`, unless that
    ends texts too."""
    changed: dict[str, Any] = {"architectures": [FAMILIES[architecture].classifier]}
    if len(config.get("id2label") or ()) != labels:
        changed["id2label"] = {str(index): f"LABEL_{index}" for index in range(labels)}
        changed["label2id"] = {f"LABEL_{index}": index for index in range(labels)}
    changed["problem_type"] = "regression" if labels == 1 else "single_label_classification"
    if config.get("pad_token_id") is None:
        ends = config.get("eos_token_id")
        if (pad := padding_token(source, ends if isinstance(ends, list) else [ends])) is not None:
            changed["pad_token_id"] = pad
    return {key: value for key, value in config.items() if key != "num_labels"} | changed


def padding_token(directory: Path, eos_ids: Sequence[int | None]) -> int | None:
    """The id of the padding token, as the tokenizer's small files tell; None where it ends texts, as `eos_ids` do."""
    try:
        named = read_json(directory / "tokenizer_config.json")
        added = read_json(directory / TOKENIZER_FILE, max_bytes=LARGE_FILE_BYTES).get("added_tokens") or []
    except UserError:
        return None
    tokens = named.get("pad_token"), named.get("eos_token")
    word, ends = (token.get("content") if isinstance(token, dict) else token for token in tokens)
    if not word or word == ends:
        return None
    ids = (entry["id"] for entry in added if isinstance(entry, dict) and entry.get("content") == word)
    pad = next(ids, None)
    return None if pad in eos_ids else pad


def with_dtype(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """`config`, and the configs inside it, saying that the weights are in `dtype` ("float32"), by the key that they say
    it with: transformers 4 reads `torch_dtype`, 5 writes `dtype` and reads both."""
    keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["torch_dtype"]

    def replaced(part: dict[str, Any]) -> dict[str, Any]:
        named = {key: dtype for key in ("dtype", "torch_dtype") if part.get(key) is not None}
        return part | {key: replaced(value) for key, value in part.items() if isinstance(value, dict)} | named

    return replaced(config) | dict.fromkeys(keys, dtype)
