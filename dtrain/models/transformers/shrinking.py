"""Small copies of configs of the transformers library, for the proof at a run's start.

A copy has every kind of layer of the model, a few of each, and small sizes. For example, a model of 61 layers of which
the first three are dense, with 128 heads, 256 experts and a window of 4096 tokens, becomes one of 4 layers, 2 heads, 32
experts and a window of 4.

The fields of a config have different names and meanings in each family, and transformers has no description of them.
They are therefore found by their names. A name may mislead: a copy may then not run, or have other kinds of layers than
the model. `small_configs` leaves such copies out, and continues with larger ones, in which fewer fields are changed.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from torch import nn
from transformers import PretrainedConfig

from dtrain.models.transformers.config import (
    ATTENTION,
    TOP_K_NAMES,
    RecordedAttention,
    build_library_model,
    decoder_of,
    find_names,
    make_library_config,
    record_attention,
)

VOCABULARY = 97  # not a multiple of any number of tp ranks, so that shards are uneven
FIRST_TOKEN = 3  # the smaller ids are those of padding, begin and end
WINDOW = 4  # tokens of windows and chunks, less than those of a document
_MAX_SIZE = 64  # of the hidden states, unless heads are larger
_INNER_SIZE = 32

_INNER_NAMES = ("ffn_dim", "n_inner", "ffn_hidden_size", "d_ff", "block_ff_dim", "mlp_hidden_size")
_EXPERT_NAMES = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_SPECIAL_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@dataclass(frozen=True)
class SmallConfig:
    """A small copy of a config.

    Attributes:
        values: Fields of the copy's config.json.
        kept: Groups of sizes that are not reduced: "heads", "inner sizes" and "experts". Empty for the smallest copy.
    """

    values: dict[str, Any]
    kept: tuple[str, ...]


def small_configs(values: Mapping[str, Any], tp: int = 1) -> Iterator[SmallConfig]:
    """Yield small copies of a config that have the model's kinds of layers, the smallest copy first.

    The caller takes the first copy that runs.

    Args:
        values: The fields of config.json.
        tp: Tensor-parallel ranks, which divide the copy's heads if they divide the model's.
    """
    config = make_library_config(values, "config.json")
    kinds = find_layer_kinds(config)
    full = {**config.to_dict(), "architectures": values.get("architectures"), "torch_dtype": None, "dtype": None}
    names = config.attribute_map  # the family's names of common fields, such as num_hidden_layers: n_layer in GPT-2
    for kept in ((), ("heads",), ("heads", "inner sizes"), ("heads", "inner sizes", "experts")):
        for layers in _layer_choices(kinds):
            small = dict(full)
            _cut_layers(small, names, len(kinds), layers)
            _shrink_vocabulary(small, names)
            _shrink_windows(small)
            if "heads" not in kept:
                _shrink_heads(small, names, tp)
                _shrink_linear_heads(small, tp)
            if "inner sizes" not in kept:
                _shrink_inner_sizes(small, tp)
            if "experts" not in kept:
                _shrink_experts(small)
            if _has_kinds(small, set(kinds)):
                yield SmallConfig(small, kept)
                break


def find_layer_kinds(config: PretrainedConfig) -> list[tuple[object, ...]]:
    """Return the kind of each layer: the classes of its modules, and whether its attention has a window or sinks.

    Kinds are only compared with each other. Modules of single experts are left out, because a copy has fewer experts.
    """
    model = build_library_model(config, ATTENTION)
    names = find_names(model)
    if names is None:
        raise ValueError(f"{config.model_type} has no list of layers")
    layers = cast(nn.ModuleList, decoder_of(model).get_submodule(names.layers))
    attention: list[RecordedAttention | None] = record_attention(model)
    kinds: list[tuple[object, ...]] = []
    for layer, recorded in zip(layers, attention, strict=True):
        classes = tuple(
            (name, type(module).__name__) for name, module in layer.named_modules() if ".experts." not in name
        )
        if recorded is None:
            kinds.append((classes, None))
        else:
            kinds.append((classes, recorded.window is not None, recorded.has_sinks))
    return kinds


def _has_kinds(values: Mapping[str, Any], wanted: set[tuple[object, ...]]) -> bool:
    """Check whether a copy can be built on the meta device, and has the wanted kinds of layers and no other."""
    try:
        config = make_library_config(values, "config.json")
        return set(find_layer_kinds(config)) == wanted
    except Exception:  # noqa: BLE001 - a class of transformers may raise anything for sizes that do not fit
        return False


def _layer_choices(kinds: list[tuple[object, ...]]) -> list[list[int]]:
    """Return selections of layers that may have all kinds of layers, the shortest one first.

    Which selection works depends on how the config describes the kinds. A list with an entry for each layer, such as
    `layer_types`, can be cut to any selection. A number such as `first_k_dense_replace`, or the period of a pattern,
    only works with all layers up to the last kind.

    Example:
        >>> _layer_choices(["dense", "dense", "sparse", "sparse"])
        [[0, 2], [0, 1, 2], [0, 1, 2, 3]]
    """
    first = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    if len(first) == 1 and len(kinds) > 1:
        first.append(1)
    choices = [sorted(first), list(range(max(first) + 1)), list(range(len(kinds)))]
    return [choice for number, choice in enumerate(choices) if choice not in choices[:number]]


def _cut_layers(values: dict[str, Any], names: Mapping[str, str], num_layers: int, layers: list[int]) -> None:
    """Reduce a config in place to a selection of layers.

    Args:
        values: The fields.
        names: The family's names of common fields.
        num_layers: Number of layers of the model.
        layers: Indices of the selected layers.
    """
    values[names.get("num_hidden_layers", "num_hidden_layers")] = len(layers)
    for name, value in values.items():
        if isinstance(value, list | tuple) and len(value) == num_layers and name != "architectures":
            values[name] = [value[index] for index in layers]
        elif isinstance(value, list) and name.endswith(("_layers", "_idxs", "_layer_ids", "_indices")):
            # The entries are indices of layers, for example of those with experts. Renumber the layers that remain.
            if all(isinstance(entry, int) for entry in value):
                values[name] = [layers.index(entry) for entry in value if entry in layers]


def _shrink_vocabulary(values: dict[str, Any], names: Mapping[str, str]) -> None:
    for name, value in values.items():
        # Gemma has a second embedding with vocab_size_per_layer_input rows.
        if ("vocab_size" in name or name == names.get("vocab_size")) and type(value) is int:
            values[name] = min(value, VOCABULARY)
        elif name.endswith("token_id") and value is not None:
            small = _SPECIAL_TOKENS.get(name, 0)
            values[name] = [small] if isinstance(value, list) else small


def _shrink_windows(values: dict[str, Any]) -> None:
    """Shrink windows and chunks below the length of the proof's documents, so that the proof sees them."""
    for name, value in values.items():
        is_window = "window" in name or name.endswith("chunk_size")
        if is_window and "layers" not in name and type(value) is int and value > WINDOW:
            values[name] = WINDOW


def _shrink_heads(values: dict[str, Any], names: Mapping[str, str], tp: int) -> None:
    """Reduce the numbers of heads and the hidden size. The size of a head stays, because rotary tables depend on it.

    For example, 32 query heads and 8 key heads become 4 and 2 for tp = 1: two key heads with two query heads each. For
    tp = 4 they become 8 and 4.
    """
    heads_name = names.get("num_attention_heads", "num_attention_heads")
    kv_name = names.get("num_key_value_heads", "num_key_value_heads")
    size_name = names.get("hidden_size", "hidden_size")
    heads, hidden_size = values.get(heads_name), values.get(size_name)
    if type(heads) is not int or type(hidden_size) is not int:
        return
    kv_heads = values.get(kv_name)
    if type(kv_heads) is not int or kv_heads < 1 or heads % kv_heads:
        kv_heads = heads
    small_kv_heads = _small_divisor(kv_heads, max(2, tp))
    group = heads // kv_heads
    # Two query heads for each key head show errors in repeating keys, and tp must divide the query heads.
    small_group = _small_divisor(group, max(min(2, group), tp // small_kv_heads))
    small_heads = small_kv_heads * small_group
    if values.get(kv_name) is not None:
        values[kv_name] = small_kv_heads
    values[heads_name] = small_heads
    has_head_size_field = any("head_dim" in name and value for name, value in values.items())
    if has_head_size_field and hidden_size != heads * (values.get("head_dim") or 0):
        # The family stores the size of a head in a field, so the hidden size is free.
        values[size_name] = min(hidden_size, _MAX_SIZE)
    else:
        # The class may compute the size of a head as hidden_size // heads, so the quotient must stay.
        values[size_name] = hidden_size // heads * small_heads


def _shrink_linear_heads(values: dict[str, Any], tp: int) -> None:
    """Shrink the numbers of heads of linear attention by one factor."""
    counts = {}
    for name, value in values.items():
        if name.startswith("linear_num") and name.endswith("heads") and type(value) is int:
            counts[name] = value
    if counts:
        fewest = min(counts.values())
        factor = fewest // _small_divisor(fewest, max(2, tp))
        values |= {name: count // factor for name, count in counts.items()}


def _small_divisor(number: int, least: int) -> int:
    """Return the smallest divisor of `number` that is at least `least`, or `number`.

    Example:
        >>> _small_divisor(8, 3)
        4
    """
    return next((size for size in range(least, number) if number % size == 0), number)


def _shrink_inner_sizes(values: dict[str, Any], tp: int) -> None:
    size = math.lcm(_INNER_SIZE, tp)
    for name, value in values.items():
        if ("intermediate_size" in name or name in _INNER_NAMES) and type(value) is int and value > size:
            values[name] = size
        elif "intermediate_size" in name and isinstance(value, list):
            values[name] = [min(entry, size) for entry in value]


def _shrink_experts(values: dict[str, Any]) -> None:
    """Reduce the number of experts to twice those of a token, and at least two for each group of experts.

    For example, DeepSeek-V3 selects 8 experts of a token from 4 of 8 groups: 8 · max(2, 2 · 8 / 4) = 32 experts.
    """
    top_k = max((values.get(name) or 1 for name in TOP_K_NAMES), default=1)
    groups = values.get("n_group") or values.get("num_expert_group") or 1
    chosen_groups = values.get("topk_group") or 1
    per_group = max(2, math.ceil(2 * top_k / chosen_groups))
    for name in _EXPERT_NAMES:
        value = values.get(name)
        if type(value) is int and value > groups * per_group:
            values[name] = groups * per_group
