"""Reading a config.json, as transformers 4 and 5 write it, into a `ModelConfig`.

Every field of the file is used, known to change no number, or refused by name. All problems are reported together. A
family reads its own fields (`CausalLM.read`). `common.model_fields` reads what families share, and `common.rope_config`
the rotary embedding. torch is loaded with the family, when a file names it.
"""

import difflib
import re
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dtrain.base.errors import UserError
from dtrain.base.json_files import read_json
from dtrain.base.ranges import directory_hint
from dtrain.models.common.config import ModelConfig
from dtrain.models.common.config_fields import read_unquantized_modules
from dtrain.models.common.model_fields import ModelFields
from dtrain.models.registry import architecture_of_classifier, architecture_of_model_type, families, load_class
from dtrain.recipe.shipped import how_to_make

_CLASSIFIER = "ForSequenceClassification"

MAX_PARAMETERS = 10**14
"""A config with more parameters than this is taken for a mistake."""


def read_config(
    directory: str | Path, labels: int | None = None, vision: bool = False, implementation: str = "auto"
) -> ModelConfig:
    """Read the config of the model in a directory.

    Args:
        directory: Directory with a config.json.
        labels: None if the model must be a language model. n for a classifier of n outputs, which may start from a
            language model. 0 for a classifier of any number of outputs or a language model, whichever the files are.
        vision: Whether to read the vision tower too, of a model that has one.
        implementation: "native" for dtrain's own model, "transformers" for that of the transformers library. "auto":
            dtrain's own model if there is one.

    Raises:
        UserError: With everything that cannot be used.
    """
    directory = Path(directory)
    path = directory / "config.json"
    if not directory.is_dir():
        raise UserError(_no_directory(str(directory)))
    if not path.exists():
        raise UserError(f"{directory} has no config.json: model.path must be a model's directory{_instead(directory)}")
    return parse_config(read_json(path), str(path), labels, vision, implementation)


_GGUF = "dtrain reads no GGUF, the files of llama.cpp: give the original model, config.json with *.safetensors"


def _instead(directory: Path) -> str:
    """Return the end of an error message that names what `directory` contains in place of a model."""
    if any(directory.glob("*.gguf")):
        return f"; {_GGUF}"
    if (directory / "export" / "config.json").is_file():
        return f"; this is a run's, so set model.path={directory / 'export'}"
    if (directory / "checkpoints").is_dir():
        return f"; this is a run's: `dtrain export {directory} OUT`, and set model.path=OUT"
    inner_configs = sorted(directory.glob("*/config.json"))
    return f"; there is one in {inner_configs[0].parent}" if inner_configs else ""


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
    values: dict[str, Any],
    where: str = "config.json",
    labels: int | None = None,
    vision: bool = False,
    implementation: str = "auto",
) -> ModelConfig:
    """Return the config that the fields of a config.json describe.

    Args:
        values: The fields.
        where: Name of the file in errors.
        labels: As in `read_config`.
        vision: As in `read_config`.
        implementation: As in `read_config`.

    Raises:
        UserError: With everything that cannot be used.
    """
    if implementation == "transformers" or (implementation == "auto" and not _is_native(values)):
        return _transformers_config(values, where, labels, implementation)
    written_outputs = num_classifier_outputs(values)
    classifier = None
    if written_outputs is not None:
        classifier = values["architectures"][0]
        values = {**values, "architectures": [architecture_of_classifier(classifier)]}
    architecture = _architecture(values, where)
    problems: list[str] = []
    quantization = values.get("quantization_config")
    values = {key: value for key, value in values.items() if key != "quantization_config"}
    model, fields = load_class(architecture), ModelFields(values, problems)
    config: ModelConfig
    if families()[architecture].text_tower is not None:
        config = fields.read_text_tower(architecture, model, vision)
    else:
        config = model.read(fields)
    if quantization:
        config = replace(config, unquantized_modules=read_unquantized_modules(quantization, problems))
    if not problems and config.num_parameters > MAX_PARAMETERS:
        problems.append(
            f"sizes of {config.num_parameters:,} parameters, {config.num_parameters * 2 >> 40:,} TiB in bfloat16: "
            "no memory holds them; check vocab_size, hidden_size, intermediate_size and num_hidden_layers"
        )
    config = _with_classifier_head(config, labels, written_outputs, problems)
    if problems:
        lines = [f"{where}: {classifier or architecture} with"]
        lines += [f"  - {problem}" for problem in problems]
        raise UserError("\n".join(lines))
    return config


def _is_native(values: Mapping[str, Any]) -> bool:
    """Check whether dtrain has a model of its own for the fields of a config.json."""
    names = [name for name in _architecture_names(values) if isinstance(name, str)]
    return any(name in families() or architecture_of_classifier(name) is not None for name in names)


def _transformers_config(values: dict[str, Any], where: str, labels: int | None, implementation: str) -> ModelConfig:
    """Return the config of a model of the transformers library. The arguments are those of `parse_config`."""
    if find_spec("transformers") is None:
        if implementation == "auto":
            hint = (
                "dtrain also trains the models of the transformers library, which is not installed: pip install "
                "'dtrain[transformers]'"
            )
            raise UserError(_unsupported(values, where, hint))
        text = "model.implementation=transformers needs the transformers library: pip install 'dtrain[transformers]'"
        raise UserError(text)
    from dtrain.models.transformers.config import is_known_model_type, read_transformers_config  # loads transformers

    if implementation == "auto" and not is_known_model_type(values.get("model_type")):
        installed, model_type = version("transformers"), values.get("model_type")
        hint = (
            f"The installed transformers {installed} has no model_type {model_type} either. A newer release may have "
            "it, and code of a model's repository is never run"
        )
        raise UserError(_unsupported(values, where, hint))
    problems: list[str] = []
    architecture = str(next(iter(_architecture_names(values)), ""))
    written_outputs = None
    if architecture.endswith(_CLASSIFIER):
        written_outputs = _num_outputs(values)
        values = {**values, "architectures": [architecture.removesuffix(_CLASSIFIER) + "ForCausalLM"]}
    config = read_transformers_config(values, where)
    config = _with_classifier_head(config, labels, written_outputs, problems)
    if problems:
        raise UserError("\n".join([f"{where}: {config.architecture} with", *(f"  - {text}" for text in problems)]))
    return config


def _with_classifier_head(
    config: ModelConfig, labels: int | None, written_outputs: int | None, problems: list[str]
) -> ModelConfig:
    """Return the config with the head of a classifier, if one is asked for. Problems are added to `problems`.

    Args:
        config: Config of the language model.
        labels: As in `read_config`.
        written_outputs: Outputs of the classifier in the files. None if the files are those of a language model.
        problems: Problems found so far.
    """
    if labels is not None and (labels or written_outputs):
        if config.transformers is not None:
            if classifier_name(config) is None:
                stem = config.architecture.partition("For")[0]
                problems.append(f"no head of classes or rewards: transformers has no {stem}{_CLASSIFIER}")
        elif families()[config.architecture].classifier is None:
            names = ", ".join(name for name, family in families().items() if family.classifier)
            problems.append(f"no head of classes or rewards; there is one for: {names}")
        if written_outputs and labels not in (0, written_outputs):
            problems.append(
                f"a head of {written_outputs} outputs where {labels} are asked for: set "
                f"reward.num_labels={written_outputs}"
            )
        has_new_head = written_outputs is None
        num_labels = labels or written_outputs
        return replace(config, num_labels=num_labels, has_new_head=has_new_head, tie_word_embeddings=False)
    if written_outputs:
        outputs = "outputs" if written_outputs > 1 else "output"
        problems.append(
            f"a head of {written_outputs} {outputs} in place of the vocabulary: it rates or classifies texts and "
            "writes none. method=reward trains it; elsewhere give a language model"
        )
    return config


def classifier_name(config: ModelConfig) -> str | None:
    """Return the architecture of the classifier of a language model. None if there is none."""
    if config.transformers is None:
        return families()[config.architecture].classifier
    from dtrain.models.transformers.config import find_classifier  # loads transformers

    return find_classifier(config.transformers.values)


def num_classifier_outputs(values: Mapping[str, Any]) -> int | None:
    """Return the number of outputs of a classifier's head. None if a config.json is not that of a classifier.

    transformers writes `id2label` if there are not two outputs.

    Example:
        >>> num_classifier_outputs({"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "reward"}})
        1
        >>> num_classifier_outputs({"architectures": ["LlamaForCausalLM"]}) is None
        True
    """
    architectures = values.get("architectures")
    architecture = architectures[0] if isinstance(architectures, list) and architectures else None
    if architecture_of_classifier(architecture) is None:
        return None
    return _num_outputs(values)


def _num_outputs(values: Mapping[str, Any]) -> int:
    """Return the number of outputs that a classifier's config.json describes."""
    names = values.get("id2label")
    num_outputs = len(names) if isinstance(names, dict) and names else values.get("num_labels")
    return num_outputs if isinstance(num_outputs, int) and num_outputs > 0 else 2


def _architecture_names(values: Mapping[str, Any]) -> list[Any]:
    """Return the architectures that a config.json names, or the one of its model_type."""
    model_type = values.get("model_type")
    names = values.get("architectures") or [architecture_of_model_type(model_type) or model_type]
    return names if isinstance(names, list) else [names]


def _architecture(values: dict[str, Any], where: str) -> str:
    """Return the key of `FAMILIES` for a config.json. Raises UserError if there is none."""
    for name in _architecture_names(values):
        if isinstance(name, str) and name in families():
            return name
    hint = "model.implementation=native excludes the modules of the transformers library. Set it to auto to use them"
    raise UserError(_unsupported(values, where, hint))


def _unsupported(values: Mapping[str, Any], where: str, library_hint: str) -> str:
    """Return the error of an architecture that dtrain does not have.

    Args:
        values: The fields of config.json.
        where: Name of the file.
        library_hint: A sentence on the modules of the transformers library.
    """
    names = _architecture_names(values)
    shown_names = " or ".join(map(str, names[:5]))[:200]
    own = "For a family of your own, set model.family, or --family of a command, to its import path"
    similar = _similar_architectures(str(names[0])) if names else []
    known = "docs/models.md lists dtrain's families"
    if similar:
        known = f"Similar families of dtrain are {', '.join(similar)}; docs/models.md lists all"
    return f"{where}: architecture {shown_names} is not supported. {own}. {known}. {library_hint}"


def _similar_architectures(name: str) -> list[str]:
    """Return up to three known architectures whose names are similar, compared without ends such as ForCausalLM.

    Example:
        >>> _similar_architectures("Gemma2ForCausalLM")
        ['Gemma4ForCausalLM', 'Gemma3ForCausalLM']
    """
    architectures: dict[str, str] = {}
    for known in families():
        architectures.setdefault(known.partition("For")[0], known)
    close = difflib.get_close_matches(name.partition("For")[0], architectures)
    return [architectures[stem] for stem in close]
