"""Tensors of an adapter's file: their names, shapes and headers, compared with a model's. Imports no torch."""

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
    """PEFT's names for the parameter `name`, or for what the files join it in: of an adapter, or of a module that is
    trained whole; none for another. A tied embedding is written under two."""

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
    both = list(EMBEDDING_AND_HEAD) if model.tie_word_embeddings and module in EMBEDDING_AND_HEAD else [module]
    return [outer(f"{saved_module}.{parameter}") for saved_module in both] if config.select_saved_modules(both) else []


def stored_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """The tensors of an adapter's file, by name, from its header. Raises UserError."""
    path = directory / ADAPTER_WEIGHTS
    if not path.is_file():
        raise UserError(no_weights_problem(directory))
    return {name: tuple(entry["shape"]) for name, entry in read_safetensors_header(path)[0].items()}


def num_outputs_in_adapter(directory: Path) -> int | None:
    """Return the outputs of the head of rewards or classes in an adapter's file, None without one. Raises UserError."""
    shape = stored_shapes(directory).get(f"{PREFIX}score.weight")
    return shape[0] if shape else None


def has_tower_tensors(directory: Path) -> bool:
    """Return whether an adapter's file has tensors of a vision tower. Raises UserError."""
    return any(is_in_vision_tower(name.removeprefix(PREFIX)) for name in stored_shapes(directory))


def mismatches(
    directory: Path,
    stored: Mapping[str, tuple[int, ...]],
    wanted: Mapping[str, tuple[int, ...]],
    free: Callable[[str], bool] = lambda name: False,
    *,
    model: ModelConfig,
) -> list[str]:
    """Return what does not fit between an adapter's tensors and those that a model wants, by PEFT's names.

    An adapter whose embedding or head has another number of rows than the model's gets one line that says so.

    Args:
        directory: The adapter's directory, for the messages.
        stored: Shapes of its tensors.
        wanted: Shapes that the model has for it.
        free: Whether a stored tensor that is not wanted is no mistake.
        model: The model's config.
    """
    if (rows := _rows_of_another_vocabulary(stored, model)) is not None:
        return [
            f"{directory / ADAPTER_WEIGHTS}: the adapter was trained with a vocabulary of {rows} tokens, and the model "
            f"has {model.vocab_size}. Merge it in PEFT: base.resize_token_embeddings({rows}), then "
            f"PeftModel.from_pretrained(base, '{directory}').merge_and_unload(); save the result together with the "
            "adapter's tokenizer, and give it as model.path"
        ]
    is_tied = model.tie_word_embeddings
    missing, shapes = [], []
    for name, shape in wanted.items():
        if name not in stored:
            missing.append(f"missing: {name}{_TIED if is_tied and 'lm_head' in name else ''}")
        elif stored[name] != shape:
            shapes.append(f"shape: {name} is {list(stored[name])}, the model has {list(shape)}")
    unexpected = [f"unexpected: {name}{_hint(name)}" for name in sorted(stored.keys() - wanted) if not free(name)]
    problems = [problem for group in (missing, shapes, unexpected) for problem in limit_problems(group, name_kind=True)]
    return [f"{directory / ADAPTER_WEIGHTS}: {problem}; is it an adapter of this model?" for problem in problems]


def _rows_of_another_vocabulary(stored: Mapping[str, tuple[int, ...]], model: ModelConfig) -> int | None:
    """Return the rows of an adapter's embedding or head if they are not those of the model, else None.

    PEFT saves both, whether or not `modules_to_save` names them, where `resize_token_embeddings` was called.
    """
    for name, shape in stored.items():
        module = from_tower_name(name.removeprefix(PREFIX)).removesuffix(".weight")
        is_another = shape[1:] == (model.hidden_size,) and shape[0] != model.vocab_size
        if module in EMBEDDING_AND_HEAD and is_another:
            return shape[0]
    return None


_TIED = " (the head is tied to the embedding: PEFT's ensure_weight_tying writes both, with equal values)"


def _hint(name: str) -> str:
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
    """PEFT's names and the shapes of an adapter's tensors, for a model with these parameters of its own: those of
    adapted layers, and what is trained whole."""
    from dtrain.models.building import adaptable_shapes  # loads torch

    shapes = adaptable_shapes(model)
    wanted = {fused.name: locate_parts(fused, fused.name, parameters)[0] for fused in fused_weights(model, parameters)}
    for name, layer in config.select_layers(shapes).items():
        for part, shape in adapter_parameter_shapes(shapes[name], layer.rank, config.dora).items():
            wanted[f"{name}.{part}"] = adapter_shape_in_file(f"{name}.{part}", shape)
    return {outer: shape for name, shape in wanted.items() for outer in peft_names(name, config, model)}


def no_weights_problem(directory: Path) -> str:
    if (directory / _PICKLE).is_file():
        return (
            f"{directory} has its tensors as {_PICKLE}, a pickle, which dtrain does not open. Convert it with PEFT, "
            'once: python -c "from peft import AutoPeftModelForCausalLM as M; '
            f"M.from_pretrained('{directory}').save_pretrained('{directory}-safetensors')\""
        )
    return f"{directory} has no {ADAPTER_WEIGHTS}: the adapter is not whole; copy or save it again"
