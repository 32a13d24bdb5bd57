"""Reading and writing of PEFT's adapter_config.json. Imports no torch.

The layout: https://huggingface.co/docs/peft/developer_guides/checkpoint. A field of the file is either used
(`_USED_FIELDS`), known to change no number (`_FREE_FIELDS`), or refused by its name. All problems are reported
together.

The base model that the file names is compared with the model of the run: by its path, its id, or its content.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dtrain.adapters.config import (
    ALL_LINEAR,
    EMBEDDING_AND_HEAD,
    AdapterConfig,
    from_tower_name,
    is_expert_or_router,
    is_in_vision_tower,
    parameter_name,
    to_tower_name,
    value_by_pattern,
)
from dtrain.base import hub
from dtrain.base.errors import Problem, UserError
from dtrain.base.json_files import is_non_negative_int, read_json
from dtrain.base.model_directory import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    CONFIG,
    find_weight_files,
    is_adapter_directory,
    read_safetensors_header,
)
from dtrain.base.name_patterns import matches_suffix, pattern_error, suffix_pattern
from dtrain.checkpoint.peft import tensors
from dtrain.checkpoint.peft.tensors import PREFIX
from dtrain.models.common.config import ModelConfig
from dtrain.models.common.config_fields import is_number
from dtrain.models.registry import families

ADAPTER = "adapter"  # the folder of a step
BASE = "base_model_name_or_path"
_MAX_VALUE_LENGTH = 200  # characters of a value in messages

# Model types whose experts PEFT converts when it loads an adapter, and the names that PEFT treats as experts' matrices:
# peft.utils.transformers_weight_conversion (_MOE_TARGET_MODULE_MAPPING) with transformers.conversion_mapping. The types
# that dtrain does not have are for families that a user registers.
_QWEN_EXPERTS = frozenset({"gate", "gate_proj", "up_proj", "down_proj"})
_MIXTRAL_EXPERTS = frozenset({"gate", "w1", "w2", "w3"})
EXPERT_NAMES_OF_PEFT = {
    **dict.fromkeys(("mixtral", "minimax", "minimax_m2"), _MIXTRAL_EXPERTS),
    **dict.fromkeys(
        (
            "qwen2_moe qwen3_moe qwen3_next qwen3_omni_moe qwen3_omni_moe_text qwen3_omni_moe_thinker afmoe beam "
            "cohere2_moe deepseek_v2 deepseek_v3 deepseek_v32 dots1 Dots3NoteTextModel ernie4_5_moe exaone_moe "
            "flex_olmo glm4_moe glm4_moe_lite glm4v_moe glm_moe_dsa hunyuan_v1_moe longcat_flash mellum olmoe "
            "sarvam_mla solar_open UnlimitedOcrTextModel"
        ).split(),
        _QWEN_EXPERTS,
    ),
}

# Fields that change no number of a trained adapter, for example how it was initialised and where it came from.
_FREE_FIELDS = frozenset(
    "auto_mapping base_model_name_or_path corda_config ensure_weight_tying eva_config fan_in_fan_out inference_mode "
    "loftq_config lora_ga_config megatron_core peft_version qalora_group_size revision runtime_config".split()
)
_MERGE = "merge it in PEFT (merge_and_unload), and give the merged model as model.path"
_CONVERT = (
    "such a start changes the base's own weights: save it with PEFT's "
    "save_pretrained(..., path_initial_model_for_weight_conversion=...), which gives an adapter of the unchanged base"
)
_STARTS = (True, False, "gaussian", "orthogonal", "eva")  # initialisations that only set A and B

_COMPARED_BYTES = 4096  # bytes of a tensor; training changes some of them

# PEFT's names for the fields of an AdapterConfig that a recipe may set too.
_PEFT_NAMES = {"rank": "r", "alpha": "lora_alpha", "target": "target_modules", "parameters": "target_parameters"}
_PEFT_NAMES |= {"exclude": "exclude_modules", "rslora": "use_rslora", "dora": "use_dora"}
_PEFT_NAMES |= {name: name for name in ("rank_pattern", "alpha_pattern", "modules_to_save")}


def adapter_of(section: Mapping[str, Any]) -> AdapterConfig:
    """Return the adapter that a recipe's section `lora` describes.

    Args:
        section: The keys of `lora` that the recipe sets. With `path` the adapter is the one of the file there, with the
            section's `dropout` if that is not 0.

    Raises:
        UserError: For all fields of the file that cannot be used, and all keys that contradict it.
    """
    if section.get("path") is None:
        return AdapterConfig.from_values(section)
    file = Path(section["path"]) / ADAPTER_CONFIG
    config, problems = _read_config(Path(section["path"]))
    if config is None:
        raise UserError("\n".join(problems))
    dropout = section.get("dropout") or config.dropout
    problems += _contradictions(section, config)
    if config.parameters and (config.dora or dropout):
        problems.append(f"{file}: target_parameters goes without DoRA and dropout, in PEFT too: set lora.dropout=0")
    if problems:
        raise UserError("\n".join(problems))
    return AdapterConfig.from_values(vars(config) | {"dropout": dropout})


def read_adapter_config(directory: Path) -> AdapterConfig:
    """Read `directory`/adapter_config.json. Raises UserError for all fields that cannot be used."""
    return adapter_of({"path": directory})


def adapter_problems(section: Mapping[str, Any], model: ModelConfig) -> list[Problem]:
    """Return the problems of the adapter at `lora.path` for a model: fields, contradicting keys and tensors.

    Only the names and shapes of tensors are read.

    Args:
        section: The keys of `lora` that the recipe sets.
        model: The config of the model.
    """
    from dtrain.models.building import adaptable_shapes  # loads torch

    directory = Path(section["path"])
    try:
        config = adapter_of(section)
        stored = tensors.stored_shapes(directory)
    except UserError as error:
        return [Problem("lora.path", line) for line in str(error).splitlines()]
    problem = config.dropout_problem(adaptable_shapes(model))
    if problem:
        return [Problem("lora.path", f"{directory / ADAPTER_CONFIG}: {problem}")]
    vocab_shape = (model.vocab_size, model.hidden_size)
    embedding_and_head = {f"{name}.weight": vocab_shape for name in EMBEDDING_AND_HEAD}
    expected = tensors.adapter_shapes(config, model, embedding_and_head)

    def is_optional(name: str) -> bool:
        """Check whether a tensor belongs to a module in modules_to_save other than embedding and head."""
        module = from_tower_name(name.removeprefix(PREFIX)).rpartition(".")[0]
        return module not in EMBEDDING_AND_HEAD and bool(config.select_saved_modules([module]))

    lines = tensors.mismatches(directory, stored, expected, is_optional, model=model)
    return [Problem("lora.path", line) for line in lines]


def peft_config(config: AdapterConfig, model: ModelConfig, base: str | None) -> dict[str, Any]:
    """Return the content of adapter_config.json.

    `target_modules` are the last parts of the adapted layers' names, such as `q_proj`, if no other layer ends so.
    Otherwise they are full names. `target_parameters` have two parts, such as `experts.gate_up_proj`. Patterns are
    written as the adapter has them, if their order makes no difference, because PEFT sorts them.

    Args:
        config: The adapter.
        model: The config of the adapted model.
        base: The name or directory of the model, or None.
    """
    from dtrain.models.building import adaptable_shapes, module_names  # loads torch

    layers = adaptable_shapes(model)
    parameter_names = [name for name in layers if is_expert_or_router(name)]
    layer_names = [name for name in layers if not is_expert_or_router(name)]
    parameters, adapted = config.select_parameters(parameter_names), config.select_layers(layer_names)
    # PEFT's names of the adapted layers and parameters: in a multimodal model they are within its text tower.
    peft_names = {}
    for name in [*adapted, *parameters]:
        peft_names[name] = to_tower_name(name) if model.is_text_tower else name

    last_parts = sorted({name.rpartition(".")[2] for name in adapted})
    matching = {name for name in layer_names if name.rpartition(".")[2] in last_parts}
    # A vision tower has layers with the same last names, so layers of a text tower get their full names.
    if matching == set(adapted) and not model.is_text_tower:
        target_modules = last_parts
    else:
        target_modules = sorted(peft_names[name] for name in adapted)

    target_parameters = sorted({".".join(parameter_name(name).split(".")[-2:]) for name in parameters})
    matching_parameters = AdapterConfig(parameters=tuple(target_parameters)).select_parameters(parameter_names)
    if matching_parameters != parameters or model.is_text_tower:
        target_parameters = sorted(parameter_name(peft_names[name]) for name in parameters)

    pattern_names = {}  # PEFT's name of each layer, by the name that the adapter's patterns are matched with
    for name, peft_name in peft_names.items():
        pattern_names[parameter_name(config.matched_name(name))] = parameter_name(peft_name)
    alpha_pattern = {key: _as_integer_if_equal(value) for key, value in config.alpha_pattern.items()}

    modules_to_save = list(config.modules_to_save)
    if model.is_text_tower:
        saved = sorted(to_tower_name(name) for name in config.select_saved_modules(module_names(model)))
        # PEFT saves a module with everything in it, and does not find modules inside of it.
        modules_to_save = [name for name in saved if not any(name.startswith(f"{other}.") for other in saved)]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if model.num_labels is None else "SEQ_CLS",
        BASE: base,
        "inference_mode": True,
        "r": config.rank,
        "lora_alpha": _as_integer_if_equal(config.alpha),
        "lora_dropout": config.dropout,
        "target_modules": target_modules,
        "target_parameters": target_parameters or None,
        "exclude_modules": None,
        "layers_to_transform": None,
        "rank_pattern": _patterns(config.rank_pattern, config.rank, pattern_names),
        "alpha_pattern": _patterns(alpha_pattern, config.alpha, pattern_names),
        "use_rslora": config.rslora,
        "use_dora": config.dora,
        "modules_to_save": modules_to_save or None,
        "ensure_weight_tying": bool(model.tie_word_embeddings and config.select_saved_modules(EMBEDDING_AND_HEAD)),
        "bias": "none",
        "lora_bias": False,
        "fan_in_fan_out": False,
        "init_lora_weights": True,
    }


def misread_layers(config: AdapterConfig, model: ModelConfig) -> list[str]:
    """Return the adapted layers that PEFT drops when it loads the adapter's files.

    transformers 5 stores the experts of a layer as one stacked parameter. PEFT (0.21) therefore replaces each target
    whose last part is the name of an expert's matrix, such as `gate_proj`, by the stack of experts. But a dense MLP has
    matrices of the same names, for example in Qwen3-MoE with `mlp_only_layers`. With the target
    `model.layers.0.mlp.gate_proj`, a dense layer, PEFT creates new adapters for the experts of all layers and drops the
    saved adapter of layer 0. No value of `target_modules` avoids this.

    Args:
        config: The adapter.
        model: Config of the adapted model.

    Returns:
        Names of the layers.
    """
    from dtrain.models.building import adaptable_shapes  # loads torch

    expert_names = EXPERT_NAMES_OF_PEFT.get(_model_type(model) or "", frozenset())
    misread = []
    for name in config.select_layers(adaptable_shapes(model)):
        if not is_expert_or_router(name) and name.rpartition(".")[2] in expert_names:
            misread.append(name)
    return misread


def _model_type(model: ModelConfig) -> str | None:
    """Return the model_type of a model's config.json. None for a family that has none."""
    if model.transformers is not None:
        return model.transformers.values.get("model_type")
    family = families().get(model.architecture)
    return None if family is None else family.model_type


def misread_problem(config: AdapterConfig, model: ModelConfig) -> str | None:
    """Return an error if PEFT would read the adapter's files wrongly (see `misread_layers`), or None."""
    layers = misread_layers(config, model)
    if not layers:
        return None
    matrix = layers[0].rpartition(".")[2]
    model_type = _model_type(model)
    return (
        f"PEFT drops the adapter of {layers[0]} when it loads these files: in models of type {model_type} it takes "
        f"{matrix} for a matrix of experts"
    )


def base_problems(directory: Path, model: Path) -> list[Problem]:
    """Return a problem if the adapter in `directory` was not trained on the model in the directory `model`.

    The names of the two models are compared, then a few bytes of each weight. If these are not enough to decide, there
    is no problem here, and `base_notes` returns a note.
    """
    if _is_base(directory, model) is not False:
        return []
    base = base_of(directory)
    text = f"{directory / ADAPTER_CONFIG}: {BASE} is {_base_name(directory)}, and model.path={model} has other weights"
    fix = f"Set model.path={base}, or write {model} there if the adapter was trained on it"
    return [Problem("lora.path", text, fix)]


def base_notes(directory: Path, model: Path) -> list[str]:
    """Return a note for the user if it is unknown whether the adapter in `directory` was trained on `model`."""
    try:
        if not is_adapter_directory(directory) or _is_base(directory, model) is not None:
            return []
        name = _base_name(directory)
    except UserError:  # reported by `adapter_problems`
        return []
    reason = f"{BASE} is {name}" if name else f"it names no base ({BASE})"
    return [
        f"note: {directory / ADAPTER_CONFIG}: {reason}; whether that is the model at model.path={model} cannot be "
        "checked here, and on another model the adapter is useless"
    ]


def base_of(directory: Path) -> Path:
    """Return the directory of an adapter's base model.

    `base_model_name_or_path` may be a path relative to the working directory or to the adapter's directory, or an id on
    the hub whose model is in the cache.

    Raises:
        UserError: If there is no such model.
    """
    file, key = directory / ADAPTER_CONFIG, BASE
    name = read_json(file).get(key)
    if not isinstance(name, str) or not name:
        raise UserError(f"{file} names no base ({key}): write the base model's directory, or its id on the hub, there")
    for path in (Path(name), directory / name):
        if (path / CONFIG).is_file():
            return path
    if not hub.is_model_id(name):
        raise UserError(f"{file}: {key} is {name}, and no model is there: write the base model's directory there")
    cached = hub.cached_model_directory(name)
    if cached is None:
        raise UserError(
            f"{file}: {key} is {name}, which is not a directory here and not in the hub's cache on this machine: "
            f"`dtrain download {name}` fetches it, or write its directory there"
        )
    return cached


def _patterns(patterns: Mapping[str, Any], default: float, peft_names: Mapping[str, str]) -> dict[str, Any]:
    """Return rank or alpha patterns that mean the same in any order, because PEFT sorts them.

    For example, {"q_proj": 4, "layers.0.self_attn.q_proj": 8} gives layer 0 the rank 4 if the first match counts, and 8
    in the other order. Such patterns are replaced by one pattern for each layer.

    Args:
        patterns: The adapter's patterns and their values. The first pattern that matches a layer counts.
        default: The value of layers that no pattern matches.
        peft_names: PEFT's names of the adapted layers, by dtrain's names.

    Returns:
        `patterns`, if all patterns that match a layer have the same value, for every layer. Otherwise one pattern for
        each layer whose value is not `default`.
    """
    is_unchanged = True
    pattern_by_layer = {}
    for name, peft_name in peft_names.items():
        value = value_by_pattern(patterns, name, default)
        matching_values = {other for pattern, other in patterns.items() if matches_suffix(pattern, peft_name)}
        if (matching_values or {default}) != {value}:
            is_unchanged = False
        if value != default:
            pattern_by_layer[re.escape(peft_name)] = value
    return dict(patterns) if is_unchanged else pattern_by_layer


def _as_integer_if_equal(number: float) -> float:
    """Convert a float that is a whole number to an integer, which is the type that PEFT declares.

    Example:
        >>> _as_integer_if_equal(16.0), _as_integer_if_equal(0.5)
        (16, 0.5)
    """
    return int(number) if number == int(number) else number


class _ConfigFile(NamedTuple):
    """The adapter that a file describes, and the problems of the file.

    Attributes:
        config: The adapter. None if the file cannot be read.
        problems: The problems; at least one without an adapter.
    """

    config: AdapterConfig | None
    problems: list[str]


def _read_config(directory: Path) -> _ConfigFile:
    """Read adapter_config.json of a directory."""
    file = directory / ADAPTER_CONFIG
    if not file.is_file():
        return _ConfigFile(None, [_no_config_problem(directory)])
    try:
        content = read_json(file)
    except UserError as error:
        return _ConfigFile(None, [str(error)])
    values = {name: content.pop(name, field.default) for name, field in _USED_FIELDS.items()}
    problems = _value_problems(file, values)
    problems += _unknown_field_problems(file, content)
    has_parameters = _is_names(values["target_parameters"]) and values["target_parameters"]
    if not values["target_modules"] and not has_parameters:
        problems.append(f"{file}: target_modules must be {_LAYERS}")
    if not (directory / ADAPTER_WEIGHTS).is_file():
        problems.append(tensors.no_weights_problem(directory))
    if problems:
        return _ConfigFile(None, problems)
    config = _config_of_fields(values, uses_tower_names=_has_tower_names(directory))
    return _ConfigFile(config, _target_problems(file, config))


def _no_config_problem(directory: Path) -> str:
    """Return the problem of a directory without adapter_config.json."""
    reason = f"it has no {ADAPTER_CONFIG}" if directory.is_dir() else "there is no such directory"
    for path in sorted(directory.glob("*/")):
        if is_adapter_directory(path):
            reason += f", and {path} has one"
            break
    return f"lora.path={directory}: {reason}; give the directory of an adapter in PEFT's layout"


def _value_problems(file: Path, values: Mapping[str, Any]) -> list[str]:
    """Return an error for each field of `_USED_FIELDS` whose value is not valid."""
    problems = []
    for name, field in _USED_FIELDS.items():
        value = values[name]
        if field.is_valid(value):
            continue
        text = repr(value)
        if len(text) > _MAX_VALUE_LENGTH:
            text = f"{text[:_MAX_VALUE_LENGTH]}..."
        problems.append(f"{file}: {name} is {text}, and must be {field.description}{_pattern_error_of(name, value)}")
    return problems


def _unknown_field_problems(file: Path, fields: Mapping[str, Any]) -> list[str]:
    """Return an error for each unknown field, for example of a later PEFT, unless its value is empty or off."""
    problems = []
    for name, value in fields.items():
        if name not in _FREE_FIELDS and value not in (None, False, [], {}, ""):
            problems.append(f"{file}: {name}={value!r} is not supported: {_MERGE}")
    return problems


def _has_tower_names(directory: Path) -> bool:
    """Check whether the tensors of an adapter have the names of a multimodal model's parts."""
    try:
        stored = tensors.stored_shapes(directory)
    except UserError:  # reported when the tensors are read
        return False
    for stored_name in stored:
        name = stored_name.removeprefix(PREFIX)
        if from_tower_name(name) != name or is_in_vision_tower(name):
            return True
    return False


def _target_problems(file: Path, config: AdapterConfig) -> list[str]:
    """Return the problems of the layers that a file selects."""
    problems = []
    if isinstance(config.target, str) and config.layers is not None:
        problems.append(
            f"{file}: layers_to_transform goes with a list of target_modules, not with a pattern: set it null"
        )
    if config.target == ALL_LINEAR or config.layers is not None:
        return problems
    # Embeddings and the head may be trained in full (modules_to_save), but not adapted.
    adapted = []
    for name in EMBEDDING_AND_HEAD:
        if config.is_targeted(name) and not config.select_saved_modules([name]):
            adapted.append(name)
    if adapted:
        problems.append(
            f"{file}: target_modules means {' and '.join(adapted)}, and dtrain adapts linear layers of the decoder "
            f"only: {_MERGE}"
        )
    return problems


def _config_of_fields(fields: Mapping[str, Any], uses_tower_names: bool) -> AdapterConfig:
    values: dict[str, Any] = {
        "target": (),
        "dropout": fields["lora_dropout"] or 0.0,
        "uses_tower_names": uses_tower_names,
    }
    for name, peft_name in _PEFT_NAMES.items():
        value = fields[peft_name]
        if value not in (None, "", [], {}):
            values[name] = tuple(value) if isinstance(value, list) else value
    layers = fields["layers_to_transform"]
    if layers not in (None, []):
        values["layers"] = tuple(layers) if isinstance(layers, list) else (layers,)
    return AdapterConfig(**values)


def _pattern_error_of(key: str, value: Any) -> str:
    """Return the error of the first invalid regular expression in a field, in parentheses, or an empty text."""
    patterns = []
    if isinstance(value, str) and key.endswith("_modules"):
        patterns = [value]
    elif isinstance(value, dict) and key.endswith("_pattern"):
        patterns = [suffix_pattern(pattern) for pattern in value]
    for pattern in patterns:
        error = pattern_error(pattern)
        if error is not None:
            return f" ({error})"
    return ""


def _contradictions(section: Mapping[str, Any], config: AdapterConfig) -> list[str]:
    """Return an error for each key of the section `lora` that contradicts the adapter's file.

    Args:
        section: The keys of `lora` that the recipe sets.
        config: The adapter of the file.
    """
    from_recipe = AdapterConfig.from_values(section)
    defaults = AdapterConfig()
    problems = []
    for field, peft_name in _PEFT_NAMES.items():
        key = "target" if field == "parameters" else field
        if key not in section:
            continue
        value = getattr(from_recipe, field)
        file_value = getattr(config, field)
        if _same_values(value, file_value) or _same_values(value, getattr(defaults, field)):
            continue
        problems.append(
            f"lora.{key} is {_as_list(value)}, and {peft_name} of {Path(section['path']) / ADAPTER_CONFIG} is "
            f"{_as_list(file_value)}: leave lora.{key} out, for the adapter has its own"
        )
    return problems


def _same_values(one: Any, other: Any) -> bool:
    """Compare two values of an AdapterConfig. The order of names in a tuple does not matter."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return set(one) == set(other)
    return bool(one == other)


def _as_list(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _is_pattern(value: Any) -> bool:
    return isinstance(value, str) and value != "" and pattern_error(value) is None


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) and name for name in value)


def _is_table(value: Any, is_valid: Callable[[Any], bool]) -> bool:
    """Check for null, or a mapping of regular expressions for names to valid values."""
    if value is None:
        return True
    if not isinstance(value, dict):
        return False
    return all(key and _is_pattern(suffix_pattern(key)) and is_valid(entry) for key, entry in value.items())


def _means_layers(value: Any) -> bool:
    """Check whether `layers_pattern`, PEFT's pattern for the list of layers, matches the decoder's layers."""
    patterns = [value] if isinstance(value, str) else value
    if not patterns:
        return True
    if not isinstance(patterns, list) or not all(map(_is_pattern, patterns)):
        return False
    # PEFT finds a layer's number with this expression (peft.tuners.tuners_utils.check_target_module_exists).
    layer_patterns = [rf"(?:^|.*?\.){pattern}\.\d+\..*" for pattern in patterns]
    valid_patterns = [pattern for pattern in layer_patterns if pattern_error(pattern) is None]
    return any(re.fullmatch(pattern, "model.layers.0.self_attn.q_proj") for pattern in valid_patterns)


def _is_base(directory: Path, model: Path) -> bool | None:
    """Check whether `model` is the base of the adapter in `directory`. None means that it is unknown."""
    name = _base_name(directory)
    if name and name in (str(model), hub.cached_model_id(model)):
        return True
    try:
        base = base_of(directory)
        if base.resolve() == model.resolve():
            return True
        return _same_weights(base, model)
    except UserError:
        return None


def _same_weights(base: Path, model: Path) -> bool | None:
    """Compare a part of each tensor that two models have with the same dtype and shape.

    Returns:
        False if a part differs, True if all tensors were compared, and None otherwise.

    Raises:
        UserError: For files that cannot be read.
    """
    first, second = _tensor_ranges(base), _tensor_ranges(model)
    common = [name for name in first if name in second and first[name].kind == second[name].kind]
    for name in common:
        if _middle_bytes(first[name]) != _middle_bytes(second[name]):
            return False
    is_complete = bool(common) and len(common) == len(first) == len(second)
    return True if is_complete else None


def _base_name(directory: Path) -> Any:
    return read_json(directory / ADAPTER_CONFIG).get(BASE)


class _TensorRange(NamedTuple):
    """Bytes of a tensor in a safetensors file.

    Attributes:
        kind: Dtype and shape.
        file: The file.
        start: First byte.
        size: Number of bytes.
    """

    kind: tuple[str, tuple[int, ...]]
    file: Path
    start: int
    size: int


def _tensor_ranges(directory: Path) -> dict[str, _TensorRange]:
    """Return the bytes of each tensor of a model, by name."""
    ranges = {}
    for name in find_weight_files(directory) or ():
        file = directory / name
        entries, data_start = read_safetensors_header(file)
        for tensor_name, entry in entries.items():
            begin, end = entry["data_offsets"]
            kind = (entry["dtype"], tuple(entry["shape"]))
            ranges[tensor_name] = _TensorRange(kind, file, data_start + begin, end - begin)
    return ranges


def _middle_bytes(tensor: _TensorRange) -> bytes:
    """Read up to `_COMPARED_BYTES` from the middle of a tensor. Raises UserError."""
    file, size = tensor.file, tensor.size
    try:
        with file.open("rb") as stream:
            stream.seek(tensor.start + max(0, size - _COMPARED_BYTES) // 2)
            return stream.read(min(size, _COMPARED_BYTES))
    except OSError as error:
        raise UserError(f"{file}: {error.strerror or error}") from error


def _is_count(value: Any) -> bool:
    return is_non_negative_int(value) and value > 0


def _is_dropout(value: Any) -> bool:
    return value is None or (is_number(value) and 0 <= value < 1)


def _is_switch(value: Any) -> bool:
    return value in (None, False, True)


def _selects_layers(value: Any) -> bool:
    return value is None or _is_pattern(value) or _is_names(value)


def _excludes_layers(value: Any) -> bool:
    return not value or _is_pattern(value) or _is_names(value)


def _is_names_or_null(value: Any) -> bool:
    return value is None or _is_names(value)


def _is_layer_numbers(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(is_non_negative_int, value))
    return value is None or is_non_negative_int(value)


def _is_rank_table(value: Any) -> bool:
    return _is_table(value, _is_count)


def _is_alpha_table(value: Any) -> bool:
    return _is_table(value, is_number)


def _is_one_of(*choices: Any) -> Callable[[Any], bool]:
    return lambda value: value in choices


class _Field(NamedTuple):
    """A field of adapter_config.json.

    Attributes:
        default: Its default in PEFT.
        is_valid: Checks a value.
        description: Description of valid values, with the fix.
    """

    default: Any
    is_valid: Callable[[Any], bool]
    description: str


_LAYERS = "a list of names of layers, or a regular expression for them"
_KNOWN_LIST = "which is `layers` in the models that dtrain knows"
_USED_FIELDS = {
    "peft_type": _Field("LORA", _is_one_of("LORA"), f"LORA: {_MERGE}"),
    "task_type": _Field(None, _is_one_of(None, "CAUSAL_LM", "SEQ_CLS"), f"CAUSAL_LM or SEQ_CLS: {_MERGE}"),
    "r": _Field(8, _is_count, "a whole number, at least 1"),
    "lora_alpha": _Field(8, is_number, "a number"),
    "lora_dropout": _Field(0.0, _is_dropout, "a number from 0 up to 1"),
    "target_modules": _Field(None, _selects_layers, _LAYERS),
    "target_parameters": _Field(None, _is_names_or_null, "a list of names of parameters, or null"),
    "exclude_modules": _Field(None, _excludes_layers, f"{_LAYERS}, or null"),
    "layers_to_transform": _Field(None, _is_layer_numbers, "the numbers of layers, or null"),
    "layers_pattern": _Field(None, _means_layers, f"null, or the name of the list of layers, {_KNOWN_LIST}"),
    "rank_pattern": _Field(None, _is_rank_table, "a table of regular expressions for names and ranks"),
    "alpha_pattern": _Field(None, _is_alpha_table, "a table of regular expressions for names and numbers"),
    "use_rslora": _Field(False, _is_switch, "true or false"),
    "use_dora": _Field(False, _is_switch, "true or false"),
    "modules_to_save": _Field(None, _is_names_or_null, "a list of ends of names of modules, or null"),
    "bias": _Field("none", _is_one_of(None, "none"), f"none: {_MERGE}"),
    "init_lora_weights": _Field(True, _is_one_of(*_STARTS), f"true, false, gaussian, orthogonal or eva: {_CONVERT}"),
}
