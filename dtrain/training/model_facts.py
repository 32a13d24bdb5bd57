"""Facts about a model that follow from its shapes: counts of weights, FLOPs, messages of FSDP, memory of an answer.

The lines that a run prints at its start use `count_weights`, and `dtrain plan` uses `ModelFacts`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
from torch import nn

from dtrain.base.batch import Grid, RowImages
from dtrain.base.hardware import FREE_MEMORY_FRACTION
from dtrain.models.common.config import LINEAR, ModelConfig
from dtrain.models.common.decoder import CausalLM
from dtrain.models.common.flops import flops_per_token, num_weights
from dtrain.parallel.apply import find_plan, style_name
from dtrain.parallel.fsdp import get_fsdp_units
from dtrain.parallel.placement import bytes_of
from dtrain.recipe import Recipe
from dtrain.training.eval_sets import default_max_new_tokens


class WeightCounts(NamedTuple):
    """Numbers of weights.

    Attributes:
        total: All weights, with those of adapters. A byte of 4-bit codes counts as two weights.
        trained: Trained weights.
    """

    total: int
    trained: int


def count_weights(module: nn.Module) -> WeightCounts:
    """Count the weights of a model or of a part of it, on any device."""
    parameters = list(module.parameters())
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    return WeightCounts(sum(map(num_weights, parameters)), trained)


@dataclass(frozen=True)
class FsdpMessages:
    """Messages of FSDP in a forward and a backward of one micro-batch, without tensor parallel.

    Attributes:
        num_gathers: Number of all-gathers.
        gathered_bytes: Bytes that all of them gather.
        num_reduces: Number of FSDP units with gradients to reduce.
    """

    num_gathers: int
    gathered_bytes: float
    num_reduces: int


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a recipe's model.

    Attributes:
        recipe: The recipe.
        config: Config of the model.
        model: The model, unsharded, on any device.
    """

    recipe: Recipe
    config: ModelConfig
    model: CausalLM

    @property
    def weights(self) -> WeightCounts:
        """The numbers of weights."""
        return count_weights(self.model)

    def row_flops_per_token(self, num_tokens: int, images: Sequence[Grid]) -> float:
        """Return the training FLOPs per token of a full row, whose documents have `data.max_length` tokens.

        Args:
            num_tokens: Tokens of the row.
            images: Grids of the row's images, which the vision tower encodes.
        """
        flops = flops_per_token(self.model, self.recipe.data.max_length)
        if not images:
            return flops
        from dtrain.models.vision.common import ImageFlops  # a text model loads no tower

        return flops + ImageFlops(*self.model.model.vision).total(RowImages([], [list(images)])) / num_tokens

    def tensor_parallel_styles(self) -> dict[str, str]:
        """Return the tensor-parallel plan: the name of the style for each module pattern.

        Patterns of a vision tower name its layers one by one. Their numbers are replaced by `*`, so that all layers
        share an entry.
        """
        styles = {}
        for pattern, style in find_plan(self.recipe.parallel.custom_plan, self.model).items():
            styles[re.sub(r"\.\d+(?=\.)", ".*", pattern)] = style_name(style)
        return styles

    def longest_answer_bytes(self, compute: torch.dtype, tp: int) -> int:
        """Return the smallest number of bytes that an evaluation needs on a rank for keys and values.

        This is the memory for one sequence of a prompt and the longest answer of `eval`, which together have
        `data.max_length` tokens. 0 without `eval`.

        Args:
            compute: Dtype of computation.
            tp: Number of tensor-parallel ranks.
        """
        recipe, positions = self.recipe, self.config.max_position_embeddings
        if recipe.eval is None:
            return 0
        from dtrain.inference.kv_cache import position_bytes, slot_size  # only runs with `eval` generate

        default = default_max_new_tokens(positions)
        answer = max(section.sampling.max_new_tokens or default for section in recipe.evals.values())
        prompt = max(1, min(recipe.data.max_length, positions) - answer)
        num_positions = slot_size(answer) + slot_size(prompt)
        return int(num_positions * position_bytes(self.config, compute, tp) / FREE_MEMORY_FRACTION)

    def fsdp_messages(self, compute: torch.dtype) -> FsdpMessages:
        """Return the messages of FSDP in a forward and a backward.

        Args:
            compute: Dtype in which trained weights are gathered. Frozen weights are gathered as they are stored.
        """
        units = get_fsdp_units(self.model)
        gathered_twice = units.regathered_in_backward(self.recipe.parallel.reshard_after_forward)
        num_gathers, gathered_bytes, num_reduces = 0, 0.0, 0
        for unit, weights in units.parameters():
            times = 2 if unit in gathered_twice else 1
            trained = sum(weight.numel() for weight in weights if weight.requires_grad)
            frozen_bytes = bytes_of(weight for weight in weights if not weight.requires_grad)
            num_gathers += times
            gathered_bytes += times * (trained * compute.itemsize + frozen_bytes)
            if trained:
                num_reduces += 1
        return FsdpMessages(num_gathers, gathered_bytes, num_reduces)

    def key_widths(self, tp: int) -> list[int]:
        """Return the number of elements of a token's keys and values on a tp rank, for each layer with a KV cache.

        Layers of linear attention have none. A rank has at least one head.
        """
        widths = []
        for kind in self.config.layer_types:
            if kind != LINEAR:
                widths.append(self.config.kv_heads_of(kind).num_elements(tp))
        return widths

    @property
    def num_first_dense(self) -> int:
        """The number of dense layers before the first sparse one. 0 in models without experts."""
        experts = self.config.experts
        return 0 if experts is None else min(experts.layers)

    @property
    def layer_kinds(self) -> list[tuple[str, bool]]:
        """The type of each layer, and whether it is sparse."""
        config = self.config
        return [(kind, config.is_sparse(index)) for index, kind in enumerate(config.layer_types)]

    @property
    def layer_period(self) -> int:
        """The number of layers after which the kinds of layers repeat. If they never repeat, the number of layers.

        The dense layers before the first sparse one are not counted. For example, Gemma 3 has five layers with a
        sliding window before each full one, so its period is 6. DeepSeek-V3 has 3 dense layers and then a period of 1.
        """
        kinds = self.layer_kinds[self.num_first_dense :]
        for period in range(1, len(kinds)):
            if all(kind == kinds[index % period] for index, kind in enumerate(kinds)):
                return period
        return self.config.num_hidden_layers

    @property
    def num_end_layers(self) -> int:
        """The number of layers at each end of the model whose memory or messages may differ from those in the middle.

        FSDP gathers the next layer in advance and keeps the last one gathered. The first layers may add features of the
        vision tower, or be the dense ones of a mixture of experts. The last layers keep activations that are not yet
        offloaded to the host.
        """
        num_layers = [2]
        if self.num_first_dense > 0:
            num_layers.append(self.num_first_dense + 1)
        if self.layer_period > 1:
            num_layers.append(self.layer_period + 1)
        deepstack = len(getattr(self.config.vision, "deepstack", ()))
        if deepstack:
            num_layers.append(deepstack + 1)
        if self.recipe.train.activation_offload:
            from dtrain.memory.activation_offload import MAX_COPYING_LAYERS  # optional

            num_layers.append(MAX_COPYING_LAYERS + 1)
        return max(num_layers)

    def layers_train_alike(self) -> bool:
        """Check whether all layers of a kind train the same parameters, and no layer reads the keys of another layer.

        For example, False if `train.freeze` names `model.layers.0.*`, or if an adapter is only in some layers.
        """
        recipe, config = self.recipe, self.config
        if config.num_kv_shared_layers:
            return False
        if recipe.lora is None:
            # A pattern can single out a layer only by a digit, or by a wildcard that matches one.
            patterns = "".join([*recipe.train.train_only, *recipe.train.freeze])
            return not any(character in patterns for character in "0123456789?[")
        from dtrain.checkpoint.peft.config import adapter_of  # optional
        from dtrain.models.building import adaptable_shapes, module_names

        adapter = adapter_of(asdict(recipe.lora))
        adapted: Mapping[str, object] = adapter.select_layers(adaptable_shapes(config))
        full = dict.fromkeys(adapter.select_saved_modules(module_names(config)))
        layers: list[dict[str, object]] = [{} for _ in config.layer_types]
        for name, low_rank in {**full, **adapted}.items():
            match = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name)
            if match is not None:
                layers[int(match[1])][match[2]] = low_rank
        trained_in_kind: dict[tuple[str, bool], dict[str, object]] = {}
        for kind, trained in zip(self.layer_kinds, layers, strict=True):
            if trained != trained_in_kind.setdefault(kind, trained):
                return False
        return True
