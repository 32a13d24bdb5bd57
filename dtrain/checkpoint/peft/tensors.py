"""Names and shapes of the tensors in an adapter's file, compared with those that a model needs. Imports no torch.

A model's parameter and its name in PEFT's file:

    model.layers.0.self_attn.q_proj.lora_A    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from dtrain.adapters.config import (
    EMBEDDING_AND_HEAD,
    AdapterConfig,
    adapter_parameter_shapes,
    from_tower_name,
    is_adapter,
    is_in_vision_tower,
    is_stack,
    to_tower_name,
)
from dtrain.base.errors import UserError, limit_problems
from dtrain.base.model_directory import ADAPTER_WEIGHTS, read_safetensors_header
from dtrain.checkpoint.huggingface.file_rows import adapter_shape_in_file, fused_weights, locate_parts
from dtrain.models.common.config import EXPERT_STACKS, ModelConfig

_PICKLE = "adapter_model.bin"
PREFIX = "base_model.model."
_FIRST, _SECOND = EXPERT_STACKS


def peft_names(name: str, config: AdapterConfig, model: ModelConfig) -> list[str]:
    """Return PEFT's names for a parameter.

    Args:
        name: Name of the parameter in the model or in its files.
        config: The adapter.
        model: Config of the model.

    Returns:
        One name for a parameter of the adapter or of a fully trained module, two for a tied embedding, and none for any
        other parameter.
    """

    def outer(inner: str) -> str:
        return PREFIX + (to_tower_name(inner) if model.is_text_tower else inner)

    module, _, parameter = name.rpartition(".")
    module = model.file_module(module)
    if is_adapter(name):
        if is_stack(module):
            # PEFT wraps a module once for each of its parameters that it adapts, the first one innermost.
            parent, _, stack = module.rpartition(".")
            module = (
                f"{parent}.base_layer" if stack == _FIRST and config.select_layers([f"{parent}.{_SECOND}"]) else parent
            )
        kind = "lora_magnitude_vector" if parameter == "lora_magnitude" else f"{parameter}.weight"
        return [outer(f"{module}.{kind}")]
    # A tied embedding is one parameter of the model. PEFT's files have it twice, as embedding and as head.
    modules = list(EMBEDDING_AND_HEAD) if model.tie_word_embeddings and module in EMBEDDING_AND_HEAD else [module]
    if not config.select_saved_modules(modules):
        return []
    return [outer(f"{saved_module}.{parameter}") for saved_module in modules]


def stored_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors in an adapter's file, from its header. Raises UserError."""
    path = directory / ADAPTER_WEIGHTS
    if not path.is_file():
        raise UserError(no_weights_problem(directory))
    return {name: tuple(entry["shape"]) for name, entry in read_safetensors_header(path)[0].items()}


def num_outputs_in_adapter(directory: Path) -> int | None:
    """Return the number of outputs of a classifier's head in an adapter's file, None without a head.

    Raises UserError.
    """
    shape = stored_shapes(directory).get(f"{PREFIX}score.weight")
    return shape[0] if shape else None


def has_tower_tensors(directory: Path) -> bool:
    """Check whether an adapter's file has tensors of a vision tower. Raises UserError."""
    return any(is_in_vision_tower(name.removeprefix(PREFIX)) for name in stored_shapes(directory))


def mismatches(
    directory: Path,
    stored: Mapping[str, tuple[int, ...]],
    expected: Mapping[str, tuple[int, ...]],
    is_optional: Callable[[str], bool] = lambda name: False,
    *,
    model: ModelConfig,
) -> list[str]:
    """Compare the tensors of an adapter's file with the tensors that a model needs, by PEFT's names.

    If the adapter's embedding or head has another number of rows than the model's, this is the only error returned.

    Args:
        directory: The adapter's directory, for the messages.
        stored: Shapes of its tensors.
        expected: Shapes that the model needs.
        is_optional: Whether a stored tensor that is not expected is no mistake.
        model: The model's config.

    Returns:
        The errors.
    """
    rows = _rows_of_another_vocabulary(stored, model)
    if rows is not None:
        return [
            f"{directory / ADAPTER_WEIGHTS}: the adapter was trained with a vocabulary of {rows} tokens, and the model "
            f"has {model.vocab_size}. Merge it in PEFT: base.resize_token_embeddings({rows}), then "
            f"PeftModel.from_pretrained(base, '{directory}').merge_and_unload(); save the result together with the "
            "adapter's tokenizer, and give it as model.path"
        ]
    missing, shapes = [], []
    for name, shape in expected.items():
        if name not in stored:
            hint = _TIED if model.tie_word_embeddings and "lm_head" in name else ""
            missing.append(f"missing: {name}{hint}")
        elif stored[name] != shape:
            shapes.append(f"shape: {name} is {list(stored[name])}, the model has {list(shape)}")
    unexpected = []
    for name in sorted(stored.keys() - expected):
        if not is_optional(name):
            unexpected.append(f"unexpected: {name}{_hint(name)}")
    errors = []
    for group in (missing, shapes, unexpected):
        for problem in limit_problems(group, name_kind=True):
            errors.append(f"{directory / ADAPTER_WEIGHTS}: {problem}; is it an adapter of this model?")
    return errors


def _rows_of_another_vocabulary(stored: Mapping[str, tuple[int, ...]], model: ModelConfig) -> int | None:
    """Return the number of rows of an adapter's embedding or head, if it differs from the model's. None otherwise.

    If `resize_token_embeddings` was called before training, PEFT saves embedding and head with the adapter, whether or
    not `modules_to_save` names them.
    """
    for name, shape in stored.items():
        module = from_tower_name(name.removeprefix(PREFIX)).removesuffix(".weight")
        is_another = shape[1:] == (model.hidden_size,) and shape[0] != model.vocab_size
        if module in EMBEDDING_AND_HEAD and is_another:
            return shape[0]
    return None


_TIED = " (the head is tied to the embedding: PEFT's ensure_weight_tying writes both, with equal values)"


def _hint(name: str) -> str:
    """Return the probable reason for an unexpected name, in parentheses, or an empty text."""
    if "_orig_mod." in name:
        return " (of a compiled model: leave `_orig_mod.` out of its names)"
    if ".default" in name:
        return " (an adapter's own name, which PEFT leaves out in files: save it with save_pretrained)"
    if re.search(r"\.experts\.\d+\.", name):
        return " (of each expert, as transformers 4 had them: PEFT's from_pretrained and save_pretrained make stacks)"
    if is_in_vision_tower(name.removeprefix(PREFIX)):
        return " (of a vision tower, which the model is built without)"
    if not name.startswith(PREFIX):
        return f" (PEFT's names begin with {PREFIX})"
    return ""


def adapter_shapes(
    config: AdapterConfig, model: ModelConfig, parameters: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of an adapter's tensors by PEFT's names.

    Args:
        config: The adapter.
        model: Config of the model.
        parameters: Shapes of the model's own parameters by name, for modules that are trained fully.
    """
    from dtrain.models.building import adaptable_shapes  # loads torch

    layers = adaptable_shapes(model)
    shapes = {}  # by the names of files
    for fused in fused_weights(model, parameters):
        shapes[fused.name] = locate_parts(fused, fused.name, parameters).shape
    for name, layer in config.select_layers(layers).items():
        for part, shape in adapter_parameter_shapes(layers[name], layer.rank, config.dora).items():
            parameter = f"{name}.{part}"
            shapes[parameter] = adapter_shape_in_file(parameter, shape)
    by_peft_name = {}
    for name, shape in shapes.items():
        for peft_name in peft_names(name, config, model):
            by_peft_name[peft_name] = shape
    return by_peft_name


def no_weights_problem(directory: Path) -> str:
    """Return the error for an adapter's directory without safetensors."""
    if (directory / _PICKLE).is_file():
        return (
            f"{directory} has its tensors as {_PICKLE}, a pickle, which dtrain does not open. Convert it with PEFT, "
            'once: python -c "from peft import AutoPeftModelForCausalLM as M; '
            f"M.from_pretrained('{directory}').save_pretrained('{directory}-safetensors')\""
        )
    return f"{directory} has no {ADAPTER_WEIGHTS}: the adapter is not whole; copy or save it again"
