"""Names of the files of a model's directory in Hugging Face format, and its index of weights. Imports no torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from dtrain.base.errors import UserError
from dtrain.base.json_files import LARGE, read_json

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CHAT_TEMPLATE = "chat_template.jinja"
HELD = "dtrain.json"

# What transformers and its like read beside config.json and the weights.
_COMPANIONS = """generation_config.json tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json
    tokenizer.model vocab.json merges.txt chat_template.jinja chat_template.json preprocessor_config.json
    processor_config.json image_processor_config.json"""
COMPANIONS = tuple(_COMPANIONS.split())


def has_vision(directory: Path) -> bool:
    """Return whether config.json of a model's directory describes a vision tower. Raises UserError for a damaged
    file."""
    file = directory / CONFIG
    return file.is_file() and isinstance(read_json(file).get("vision_config"), dict)


def has_weights(directory: Path) -> bool:
    """Return whether a directory holds weights, in a file or by an index."""
    return any((directory / name).is_file() for name in (SINGLE, INDEX))


def files_of_weights(directory: Path, single: str = SINGLE) -> Mapping[str, Sequence[str]] | None:
    """Return the files of a directory's weights, and each one's tensors by the index, none of the file `single`, which
    has no index; None without weights. Raises UserError for a damaged index."""
    if (directory / single).is_file():
        return {single: ()}
    return indexed_files(directory) if (directory / INDEX).is_file() else None


def indexed_files(directory: Path) -> dict[str, list[str]]:
    """Return the files that the index of a model's directory names, and each one's tensors. Raises UserError."""
    try:
        weight_map = read_json(directory / INDEX, most=LARGE).get("weight_map")
    except UserError as error:
        raise UserError(f"{directory / INDEX}: damaged: {error}") from error
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise UserError(f"{directory / INDEX}: damaged: {INDEX} is damaged: it has no weight_map from tensors to files")
    files: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        if Path(file).name != file:
            raise UserError(f"{directory / INDEX}: places {name} in {file!r}, which is no file of this directory")
        files.setdefault(file, []).append(name)
    return files
