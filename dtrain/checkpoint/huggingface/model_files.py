"""The small files of a model directory: config.json, tokenizer, chat template. Imports no torch."""

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
from dtrain.models.registry import architecture_of_model_type, families


def copy_companions(source: Path, target: Path, *, config: bool = False, chat_template: str | None = None) -> None:
    """Copy the tokenizer's and processor's files of `source` into the directory `target`.

    Args:
        source: The directory to copy from.
        target: The directory to copy to.
        config: Whether config.json is copied too.
        chat_template: Text of a template that replaces all templates of the source. The source's named templates
            (`additional_chat_templates/`) are then not copied. Otherwise `tool_use` would write conversations with
            tools, although the model was trained on them with `chat_template`.
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
    """Check for a chat template in a directory, as a file or in tokenizer_config.json."""
    if any(is_chat_template(name) for name in find_companions(directory)):
        return True
    try:
        return read_json(directory / "tokenizer_config.json").get("chat_template") is not None
    except UserError:
        return False


def write_companions(
    directory: Path, sources: Iterable[Path], chat_template: str | None, saved_step: Mapping[str, Any] | None
) -> None:
    """Copy the files of tokenizers and processors to a new directory.

    Args:
        directory: The directory.
        sources: Directories with the files. Files of a later directory replace files of an earlier one.
        chat_template: As in `copy_companions`.
        saved_step: As in `write.write_directory`.
    """
    for source in sources:
        copy_companions(source, directory, chat_template=chat_template)
    if saved_step is not None:
        write_synced(directory / EXPORT_RECORD, json.dumps(saved_step))


def read_saved_step(export: Path) -> dict[str, Any]:
    """Return {"step", "save"}: the step of an export, and the mark of its save. {} if the export has no such file."""
    try:
        return read_json(export / EXPORT_RECORD)
    except UserError:
        return {}


def read_model_config(directory: Path) -> dict[str, Any]:
    """Return the content of a model's config.json. Raises UserError if there is none."""
    path = directory / CONFIG
    if not path.is_file():
        raise UserError(f"{directory} has no {CONFIG}: it is no model's directory in Hugging Face format")
    return read_json(path)


_OTHER_PARTS = re.compile(r"(vision|image|video|audio)_.*")  # fields of other parts, in a file without a text_config


def has_untrained_parts(config: dict[str, Any]) -> bool:
    """Check whether a model with this config.json has parts that dtrain may leave out, such as a vision tower."""
    return _text_tower(config) is not None


def text_tower_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json for only the text tower of a multimodal model."""
    if "text_config" in config:
        text = dict(config["text_config"])
    else:
        text = {key: value for key, value in config.items() if not _OTHER_PARTS.fullmatch(key)}
    for key in ("tie_word_embeddings", "dtype", "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id"):
        if key in config:
            text.setdefault(key, config[key])
    model_type = text.get("model_type") if "text_config" in config else None
    if not architecture_of_model_type(model_type):
        model_type = _text_tower(config)
    return text | {"architectures": [architecture_of_model_type(model_type)], "model_type": model_type}


def _text_tower(config: dict[str, Any]) -> str | None:
    """Return the model_type of the text tower of a multimodal model; None for a text model."""
    names = list(config.get("architectures") or [])
    if "text_config" in config:
        names.append(architecture_of_model_type(config.get("model_type")))
    for name in names:
        if isinstance(name, str) and name in families() and families()[name].text_tower:
            return families()[name].text_tower
    return None


def classifier_config(config: dict[str, Any], classifier: str, labels: int, source: Path) -> dict[str, Any]:
    """Return the config.json of a classifier, for transformers.

    transformers finds the end of each text in a batch by `pad_token_id`. If the config has none, the tokenizer's is
    added, unless it is also the token that ends texts.

    Args:
        config: The config.json of the language model.
        classifier: Architecture of the classifier.
        labels: Number of outputs of the head.
        source: Directory of the tokenizer.
    """
    changed: dict[str, Any] = {"architectures": [classifier]}
    if len(config.get("id2label") or ()) != labels:
        changed["id2label"] = {str(index): f"LABEL_{index}" for index in range(labels)}
        changed["label2id"] = {f"LABEL_{index}": index for index in range(labels)}
    changed["problem_type"] = "regression" if labels == 1 else "single_label_classification"
    if config.get("pad_token_id") is None:
        eos_ids = config.get("eos_token_id")
        pad = padding_token(source, eos_ids if isinstance(eos_ids, list) else [eos_ids])
        if pad is not None:
            changed["pad_token_id"] = pad
    return {key: value for key, value in config.items() if key != "num_labels"} | changed


def padding_token(directory: Path, eos_ids: Sequence[int | None]) -> int | None:
    """Return the id of the padding token, or None if there is none or it also ends texts.

    Args:
        directory: Directory of the tokenizer, of which only JSON files are read.
        eos_ids: Ids of the tokens that end texts.
    """
    try:
        settings = read_json(directory / "tokenizer_config.json")
        added = read_json(directory / TOKENIZER_FILE, max_bytes=LARGE_FILE_BYTES).get("added_tokens") or []
    except UserError:
        return None
    pad_token = _token_text(settings.get("pad_token"))
    if not pad_token or pad_token == _token_text(settings.get("eos_token")):
        return None
    for entry in added:
        if isinstance(entry, dict) and entry.get("content") == pad_token:
            pad_id = entry["id"]
            return None if pad_id in eos_ids else pad_id
    return None


def _token_text(token: Any) -> Any:
    """Return the text of a token of tokenizer_config.json, which is a string or an object."""
    return token.get("content") if isinstance(token, dict) else token


def with_dtype(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Set the dtype of the weights in a config.json and in the configs inside of it.

    Args:
        config: Content of config.json. transformers 4 reads `torch_dtype`; 5 writes `dtype` and reads both. The key
            that the config has is used.
        dtype: Name of the dtype, such as "float32".

    Example:
        >>> with_dtype({"dtype": "float32", "text_config": {"dtype": "float32"}}, "bfloat16")
        {'dtype': 'bfloat16', 'text_config': {'dtype': 'bfloat16'}}
    """
    dtype_keys = ("dtype", "torch_dtype")

    def with_replaced_dtypes(part: dict[str, Any]) -> dict[str, Any]:
        result = dict(part)
        for key, value in part.items():
            if isinstance(value, dict):
                result[key] = with_replaced_dtypes(value)
            elif key in dtype_keys and value is not None:
                result[key] = dtype
        return result

    keys = [key for key in dtype_keys if key in config] or ["torch_dtype"]
    return with_replaced_dtypes(config) | dict.fromkeys(keys, dtype)
