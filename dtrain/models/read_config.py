"""config.json, as transformers 4 and 5 write it, to one `ModelConfig`. Loads torch with the family, when it reads one.

Every field of the file is used, known to change nothing, or refused by name, all problems at once. The family reads
its own (`CausalLM.read`); what families share is in `common.model_fields`, rotary scaling in `common.rope_config`.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dtrain.base.errors import UserError
from dtrain.base.json_files import read_json
from dtrain.base.ranges import directory_hint
from dtrain.models.common.config import ModelConfig
from dtrain.models.common.config_fields import read_unquantized_modules
from dtrain.models.common.model_fields import ModelFields
from dtrain.models.registry import FAMILIES, architecture_of_classifier, architecture_of_model_type, load_class
from dtrain.recipe.shipped import how_to_make

MAX_PARAMETERS = 10**14


def read_config(directory: str | Path, labels: int | None = None, vision: bool = False) -> ModelConfig:
    """The model described by `directory`/config.json. Raises UserError listing everything that cannot be used.

    labels: None for a language model alone; n for a classifier of n outputs, which a language model's files begin; 0
    for whichever the files are. vision: with the tower for images, of a model that has one.
    """
    directory = Path(directory)
    path = directory / "config.json"
    if not directory.is_dir():
        raise UserError(_no_directory(str(directory)))
    if not path.exists():
        raise UserError(f"{directory} has no config.json: model.path must be a model's directory{_instead(directory)}")
    return parse_config(read_json(path), str(path), labels, vision)


_GGUF = "dtrain reads no GGUF, the files of llama.cpp: give the original model, config.json with *.safetensors"


def _instead(directory: Path) -> str:
    """Return what to add where `directory` holds something else."""
    if any(directory.glob("*.gguf")):
        return f"; {_GGUF}"
    if (directory / "export" / "config.json").is_file():
        return f"; this is a run's, so set model.path={directory / 'export'}"
    if (directory / "checkpoints").is_dir():
        return f"; this is a run's: `dtrain export {directory} OUT`, and set model.path=OUT"
    inner = next((path.parent for path in sorted(directory.glob("*/config.json"))), None)
    return f"; there is one in {inner}" if inner else ""


def _no_directory(name: str) -> str:
    if name.lower().endswith(".gguf"):
        return f"model.path={name}: {_GGUF}"
    if Path(name).is_file():
        return (
            f"model.path={name} is a file: give the directory that holds config.json, *.safetensors and the tokenizer"
        )
    message = f"model.path: there is no directory {name!r}"
    if command := how_to_make(name):
        return message + command
    if hint := directory_hint(name):
        return message + hint
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", name):
        message += f"; for a model of the Hugging Face hub, `dtrain download {name}` fetches it and says where it is"
    return message


def parse_config(
    values: dict[str, Any], where: str = "config.json", labels: int | None = None, vision: bool = False
) -> ModelConfig:
    """The model that the fields of a config.json describe; `where` names the file in errors (UserError); labels,
    vision: as of `read_config`."""
    own, named = num_classifier_outputs(values), None
    if own is not None:
        named = values["architectures"][0]
        values = {**values, "architectures": [architecture_of_classifier(named)]}
    architecture = _architecture(values, where)
    problems: list[str] = []
    quantization = values.get("quantization_config")
    values = {key: value for key, value in values.items() if key != "quantization_config"}
    model, fields = load_class(architecture), ModelFields(values, problems)
    is_multimodal = FAMILIES[architecture].text_tower is not None
    config: ModelConfig = fields.read_text_tower(architecture, model, vision) if is_multimodal else model.read(fields)
    if quantization:
        config = replace(config, unquantized_modules=read_unquantized_modules(quantization, problems))
    if not problems and config.num_parameters > MAX_PARAMETERS:
        problems.append(
            f"sizes of {config.num_parameters:,} parameters, {config.num_parameters * 2 >> 40:,} TiB in bfloat16: "
            "no memory holds them; check vocab_size, hidden_size, intermediate_size and num_hidden_layers"
        )
    if labels is not None and (labels or own):
        if FAMILIES[architecture].classifier is None:
            names = ", ".join(name for name, family in FAMILIES.items() if family.classifier)
            problems.append(f"no head of classes or rewards; there is one for: {names}")
        if own and labels not in (0, own):
            problems.append(f"a head of {own} outputs where {labels} are asked for: set reward.num_labels={own}")
        config = replace(config, num_labels=labels or own, has_new_head=own is None, tie_word_embeddings=False)
    elif own:
        outputs = "outputs" if own > 1 else "output"
        problems.append(
            f"a head of {own} {outputs} in place of the vocabulary: it rates or classifies texts and "
            "writes none. method=reward trains it; elsewhere give a language model"
        )
    if problems:
        raise UserError(
            "\n".join([f"{where}: {named or architecture} with", *(f"  - {problem}" for problem in problems)])
        )
    return config


def num_classifier_outputs(values: Mapping[str, Any]) -> int | None:
    """Return how many outputs the head of a classifier has, by its config.json; None for another model. transformers
    writes names for them where they are not two."""
    written = values.get("architectures")
    named = written[0] if isinstance(written, list) and written else None
    if architecture_of_classifier(named) is None:
        return None
    names, count = values.get("id2label"), values.get("num_labels")
    outputs = len(names) if isinstance(names, dict) and names else count
    return outputs if isinstance(outputs, int) and outputs > 0 else 2


def _architecture(values: dict[str, Any], where: str) -> str:
    kind = values.get("model_type")
    named = values.get("architectures") or [architecture_of_model_type(kind) or kind]
    named = named if isinstance(named, list) else [named]
    for name in named:
        if isinstance(name, str) and name in FAMILIES:
            return name
    names = " or ".join(map(str, named[:5]))[:200]
    raise UserError(f"{where}: architecture {names} is not supported; there are: {', '.join(FAMILIES)}")
