"""Files of a model's directory in Hugging Face's layout, or of an adapter's directory in PEFT's layout.

Names of the files, the index of the weights, and the header of a safetensors file. Imports no torch.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dtrain.base.errors import UserError
from dtrain.base.json_files import LARGE_FILE_BYTES, SMALL_FILE_BYTES, is_non_negative_int, loads, read_json

CONFIG = "config.json"
TOKENIZER_FILE = "tokenizer.json"
WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
CHAT_TEMPLATE = "chat_template.jinja"
CHAT_TEMPLATES = "additional_chat_templates"  # the folder of further named templates (transformers 5)
EXPORT_RECORD = "dtrain.json"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"

# Files that transformers and similar libraries read, in addition to config.json and the weights.
_COMPANIONS = """generation_config.json tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json
    tokenizer.model vocab.json merges.txt chat_template.jinja chat_template.json preprocessor_config.json
    processor_config.json image_processor_config.json"""
COMPANIONS = tuple(_COMPANIONS.split())
# Companions in sub-folders, as glob patterns: named chat templates, and the further tokenizers of a processor, which
# transformers saves in a folder named after each (InstructBLIP's `qformer_tokenizer/`).
NESTED_COMPANIONS = (f"{CHAT_TEMPLATES}/*.jinja", *(f"*tokenizer*/{name}" for name in COMPANIONS))


def find_companions(directory: Path) -> list[str]:
    """Return the companion files of a model: tokenizer, chat templates and the like.

    Args:
        directory: The model's directory.

    Returns:
        Paths relative to the directory, such as "tokenizer.json" and "additional_chat_templates/tool_use.jinja".
    """
    found = [name for name in COMPANIONS if (directory / name).is_file()]
    for pattern in NESTED_COMPANIONS:
        files = sorted(path for path in directory.glob(pattern) if path.is_file())
        found += [path.relative_to(directory).as_posix() for path in files]
    return found


def is_chat_template(companion: str) -> bool:
    """Check whether a companion file, by its path from `find_companions`, contains only chat templates."""
    return companion in (CHAT_TEMPLATE, "chat_template.json") or companion.startswith(f"{CHAT_TEMPLATES}/")


def is_template_text(value: str) -> bool:
    """Check whether a value of `data.chat_template` is the text of a template. Otherwise it is the name of a file.

    Example:
        >>> is_template_text("{{ messages[0]['content'] }}"), is_template_text("chatml.jinja")
        (True, False)
    """
    return "{%" in value or "{{" in value


def has_vision(directory: Path) -> bool:
    """Check whether a model's config.json describes a vision tower. Raises UserError if the file is damaged."""
    file = directory / CONFIG
    return file.is_file() and isinstance(read_json(file).get("vision_config"), dict)


def has_weights(directory: Path) -> bool:
    """Check whether a directory contains weights, in one file or several."""
    return any((directory / name).is_file() for name in (WEIGHTS, WEIGHTS_INDEX))


def is_adapter_directory(path: str | Path) -> bool:
    """Check whether a directory contains an adapter in PEFT's layout, and not a full model."""
    return (Path(path) / ADAPTER_CONFIG).is_file() and not has_weights(Path(path))


def find_weight_files(directory: Path, single: str = WEIGHTS) -> Mapping[str, Sequence[str]] | None:
    """Find the files with a model's weights.

    Args:
        directory: The model's directory.
        single: Name of the file if all weights are in one file.

    Returns:
        The names of the tensors in each file, by the file's name. The list is empty for the file `single`, which has no
        index. None if there are no weights.

    Raises:
        UserError: If the index is damaged.
    """
    if (directory / single).is_file():
        return {single: ()}
    if (directory / WEIGHTS_INDEX).is_file():
        return read_weights_index(directory)
    return None


def read_weights_index(directory: Path) -> dict[str, list[str]]:
    """Return the names of the tensors in each file of an index. Raises UserError if the index is damaged."""
    try:
        weight_map = read_json(directory / WEIGHTS_INDEX, max_bytes=LARGE_FILE_BYTES).get("weight_map")
    except UserError as error:
        raise UserError(f"{directory / WEIGHTS_INDEX}: damaged: {error}") from error
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise UserError(f"{directory / WEIGHTS_INDEX} is damaged: it has no weight_map from tensors to files")
    files: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        if Path(file).name != file:
            raise UserError(
                f"{directory / WEIGHTS_INDEX}: places {name} in {file!r}, which is no file of this directory"
            )
        files.setdefault(file, []).append(name)
    return files


def read_safetensors_header(path: Path) -> tuple[dict[str, dict[str, Any]], int]:
    """Read the header of a safetensors file.

    Returns:
        The entry of each tensor (dtype, shape and data_offsets) by its name, and the position in the file at which the
        data begin.

    Raises:
        UserError: If the file cannot be read, or is cut short or damaged.
    """
    try:
        with path.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            if not 0 < size <= SMALL_FILE_BYTES:
                raise ValueError(f"a header of {size} bytes")
            header = loads(stream.read(size))
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        for entry in entries.values():
            begin, end = entry["data_offsets"]
            if not (
                is_non_negative_int(begin)
                and is_non_negative_int(end)
                and begin <= end
                and isinstance(entry["shape"], list)
            ):
                raise ValueError("an entry of its header is malformed")
        # The data follow the header directly, so the file ends where the last tensor ends. A file that was cut short by
        # an interrupted download does not.
        ends = [entry["data_offsets"][1] for entry in entries.values()]
        if path.stat().st_size != 8 + size + max(ends, default=0):
            raise ValueError("its size is not the one in its header")
        return entries, 8 + size
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: cut short or damaged ({error}); download it again") from error
