"""LoRA and DoRA in a model: adding and removing them, their forward, and their initial values.

`add_adapters` registers the parameters `lora_A`, `lora_B` and, for DoRA, `lora_magnitude` on the adapted layers, and
sets the layers' `wrapper`. With rank r and scale s:

    LoRA (arXiv:2106.09685)   y = W x + s B A drop(x) + b, with A [r, in] and B [out, r]
    DoRA (arXiv:2402.09353)   y = m / ‖W + s B A‖ (W x + s B A x) + b, with m [out]

The norm in DoRA is that of each row, and a constant in the backward. A stack of experts has an A and a B for each
expert. For example, rank 16 on q_proj with weight [2048, 1024] adds A [16, 1024] and B [2048, 16].

Whether the adapters take part in a forward, and the numbers of tokens from which dropout is computed, belong to a
micro-batch and are passed down in its context (`models.common.micro_batch.AdapterContext`). An adapter stores neither.
"""

import math
from dataclasses import dataclass, field
from typing import cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from dtrain.adapters.config import PARAMETERS, AdapterConfig, adapter_parameter_shapes, is_adapter
from dtrain.base.batch import Batch
from dtrain.base.randomness import mix, random_key, random_uniform
from dtrain.models.building import adaptable_shapes, build
from dtrain.models.common.config import ModelConfig
from dtrain.models.common.decoder import CausalLM
from dtrain.models.common.linear import Linear
from dtrain.models.common.micro_batch import AdapterContext
from dtrain.models.common.moe import ExpertLinear, Router, grouped_product
from dtrain.parallel.placement import local_slices, local_tensor
from dtrain.parallel.tensor import TensorParallel

NORM_ROWS = 1024
"""Rows of a weight whose products with A are in memory at the same time, when DoRA computes norms."""


@dataclass(frozen=True)
class AdapterSettings:
    """Settings that all adapters of a model share (a `WrapperSettings`).

    Attributes:
        config: The config of the adapters.
        seed: Seed of the dropout.
    """

    config: AdapterConfig
    seed: int = 0

    @property
    def dropout(self) -> float:
        """Probability with which an adapter drops an input element in training."""
        return self.config.dropout

    def dropout_tokens(self, batch: Batch, step: int) -> Tensor:
        """Return a number for each token, from which dropout is computed.

        A number is a function of the seed, the step, the position of the token in its document, and the tokens of the
        document up to this one. So dropout is the same on every mesh, in whatever row or micro-batch a document is, and
        whether or not the beginning that documents have in common is computed once. Equal beginnings have equal
        dropout.

        Args:
            batch: A host micro-batch of full rows.
            step: The optimizer step, which changes the dropout.

        Returns:
            [B, S] int64.

        Example:
            The second document begins like the first one, so it has the same numbers there.

            >>> settings = AdapterSettings(AdapterConfig(dropout=0.1))
            >>> ids, seq_ids = torch.tensor([[5, 6, 7, 5, 6, 8]]), torch.tensor([[0, 0, 0, 1, 1, 1]])
            >>> positions = torch.tensor([[0, 1, 2, 0, 1, 2]])
            >>> batch = {"input_ids": ids, "seq_ids": seq_ids, "position_ids": positions}
            >>> first, second = settings.dropout_tokens(batch, step=0).chunk(2, 1)
            >>> (first == second).tolist()
            [[True, True, False]]
        """
        positions, seq_ids = batch["position_ids"], batch["seq_ids"]
        hashes = mix(mix(batch["input_ids"] + 1) + positions)  # [B, S]
        # The sum of the hashes from the beginning of the document: subtract what the row had before the document.
        sums = hashes.cumsum(1)  # integers, which wrap around
        begins_document = torch.ones_like(seq_ids, dtype=torch.bool)
        begins_document[:, 1:] = seq_ids.diff() != 0
        columns = torch.arange(seq_ids.shape[1])
        first_columns = torch.where(begins_document, columns, 0).cummax(1).values
        sums_before = (sums - hashes).gather(1, first_columns)
        prefix_hashes = sums - sums_before + random_key(self.seed, step)
        return mix(mix(prefix_hashes) + positions)


@dataclass
class Adapter:
    """LoRA or DoRA of one linear layer (a `LinearWrapper`).

    Attributes:
        scale: Scale s of B·A.
        dora: Whether the adapter is DoRA.
        number: Number of the layer, which distinguishes its dropout from that of other layers.
        settings: Settings that all adapters of the model share.
    """

    scale: float
    dora: bool
    number: int
    settings: AdapterSettings = field(repr=False)

    def __call__(self, layer: Linear, x: Tensor, context: AdapterContext | None) -> Tensor:
        """Compute the layer's forward with the adapter, [..., in] -> [..., out].

        Collectives:
            In a layer whose inputs are cut over tp, DoRA all-reduces its norms [out].
        """
        bias = None if layer.bias is None else layer.local("bias")
        if context is not None and not context.enabled:
            return layer.product(x, bias)
        a, b = layer.local("lora_A"), layer.local("lora_B")
        dropped = self._apply_dropout(layer, x, context)
        added = F.linear(F.linear(dropped, a) * self.scale, b)
        if not self.dora:
            return layer.product(x, bias) + added
        magnitude = layer.local("lora_magnitude")
        # Norms are rounded to the magnitude's dtype, so that the ratio of a new adapter is 1 in half precision too. The
        # smallest normal number as the minimum keeps a row of zeros a row of zeros.
        norms = self._norms(layer, a, b).to(magnitude.dtype)
        ratio = magnitude / norms.clamp_(min=torch.finfo(norms.dtype).tiny)  # [out]
        if dropped is x:
            out = ratio * (layer.product(x, None) + added)
        else:
            # As in PEFT: the difference that DoRA makes to the layer's own product is computed from dropped inputs.
            out = layer.product(x, None) + (ratio - 1) * layer.product(dropped, None) + ratio * added
        return out if bias is None else out + bias

    def _apply_dropout(self, layer: Linear, x: Tensor, context: AdapterContext | None) -> Tensor:
        """Apply dropout to the input of the adapter.

        Whether an element is dropped is a function of the token's number, the layer and the element's index in the full
        input, so that every mesh drops the same elements.

        Args:
            layer: The adapted layer.
            x: [B, S, in] or [B · S, in].
            context: The micro-batch's context. None drops nothing.

        Returns:
            `x` with some elements set to zero and the others scaled up. `x` itself without dropout.
        """
        tokens = None if context is None else context.dropout_tokens
        probability = self.settings.dropout
        if tokens is None or not probability or not layer.training:
            return x
        first = 0 if layer.tp is None else layer.tp.local_start(layer.in_features)
        sequence_tp = layer.sequence_tp
        if sequence_tp is not None and sequence_tp.sequence_parallel:
            # Outside of blocks, sequence parallel cuts the tokens.
            tokens = tokens.chunk(sequence_tp.size, 1)[sequence_tp.rank]
        elements = torch.arange(first, first + x.shape[-1], device=x.device)
        is_kept = random_uniform(elements, (tokens ^ random_key(self.number))[..., None]) >= probability  # [B, S, in]
        return x * (is_kept / (1 - probability)).to(x.dtype).view_as(x)

    @torch.no_grad()
    def _norms(self, layer: Linear, a: Tensor, b: Tensor) -> Tensor:
        """Compute the norm of each row of W + s B A, [out], in float32 or better.

        ‖W + s B A‖² = ‖W‖² + 2s Σ (W Aᵀ ∘ B) + s² Σ (B (A Aᵀ) ∘ B) needs no second matrix as large as W.
        """
        wide = torch.promote_types(a.dtype, torch.float32)
        a, b = a.to(wide), b.to(wide)
        weight = layer.dense_weight()
        a_products = (a @ a.t()) * self.scale**2  # s² A Aᵀ, [r, r]
        squares = []
        for weight_rows, b_rows in zip(weight.split(NORM_ROWS), b.split(NORM_ROWS), strict=True):
            rows = weight_rows.to(wide)
            cross = 2 * self.scale * (rows @ a.t()) + b_rows @ a_products  # [rows, r]
            squares.append(rows.square().sum(1) + (cross * b_rows).sum(1))
        return _all_reduce_squares(torch.cat(squares), layer.tp).sqrt_()


@dataclass
class ParameterAdapter:
    """LoRA of an expert layer or of a router, without dropout (an `OutputWrapper`).

    Attributes:
        scale: Scale s of B·A.
    """

    scale: float

    def __call__(
        self,
        layer: "ExpertLinear | Router",
        x: Tensor,
        out: Tensor,
        context: AdapterContext | None,
        counts: Tensor | None = None,
    ) -> Tensor:
        """Override `OutputWrapper.__call__`: [m, in] and [m, out] -> [m, out].

        Under tensor parallel, the result is a partial sum if `out` is one.
        """
        if context is not None and not context.enabled:
            return out
        a, b = layer.local("lora_A"), layer.local("lora_B")
        if counts is None:
            return out + F.linear(F.linear(x, a) * self.scale, b)
        return out + grouped_product(grouped_product(x, a, counts) * self.scale, b, counts)


Adapted = Linear | ExpertLinear | Router
"""Layers that may have an adapter."""


def add_adapters(model: CausalLM, config: AdapterConfig, seed: int = 0) -> AdapterSettings:
    """Add the adapters of `config` to a model, not initialised.

    Layers that are joined in files, such as q, k and v of a `qkv_proj`, share A, because the adapter of the joined
    layer has one A. `model.tied_parameters` lists the shared ones.

    Args:
        model: A model on the meta device that is not yet on a mesh.
        config: Config of the adapters.
        seed: Seed of the dropout.

    Returns:
        The settings that the adapters share, to be assigned to `model.adapters`.
    """
    settings = AdapterSettings(config, seed)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, Adapted)}
    linear_names = [name for name, layer in layers.items() if isinstance(layer, Linear)]
    dropout_numbers = {name: number for number, name in enumerate(linear_names)}
    for name, lora in config.select_layers(adaptable_shapes(model.config)).items():
        first, *others = model.config.model_modules(name)
        for part in others:
            model.tied_parameters[f"{part}.lora_A"] = f"{first}.lora_A"
        for part in (first, *others):
            layer = layers[part]
            dtype = layer.weight.dtype
            shapes = adapter_parameter_shapes(layer.weight.shape, lora.rank, config.dora)
            for parameter, shape in shapes.items():
                layer.register_parameter(parameter, nn.Parameter(torch.empty(shape, dtype=dtype, device="meta")))
            if isinstance(layer, Linear):
                # Parts of one joined layer have the same dropout, as the joined layer has one input.
                layer.wrapper = Adapter(lora.scale, config.dora, dropout_numbers[first], settings)
            else:
                layer.wrapper = ParameterAdapter(lora.scale)
    model.tie_weights()
    return settings


def build_with_adapters(
    config: ModelConfig,
    adapter: AdapterConfig | None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> CausalLM:
    """Build a model with the parameters of an adapter, not initialised.

    Args:
        config: Config of the model.
        adapter: The adapter. None builds the model without one.
        dtype: Dtype of the parameters.
        device: Device of the parameters. "meta" takes no memory.
    """
    if adapter is None:
        return build(config, dtype, device)
    model = build(config, dtype, "meta")
    model.adapters = add_adapters(model, adapter)
    if torch.device(device).type != "meta":
        model.to_empty(device=device)
    model.tie_weights()
    return model


def adapted_layers(model: nn.Module) -> dict[str, Adapted]:
    """Return the layers of `model` that have an adapter, by name."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, Adapted)}
    return {name: layer for name, layer in layers.items() if layer.wrapper is not None}


def adapter_config(model: CausalLM) -> AdapterConfig | None:
    """Return the config by which `add_adapters` gave `model` its adapters, or None for a model without adapters."""
    if model.adapters is None:
        return None
    return cast(AdapterSettings, model.adapters).config


def remove_adapters(model: CausalLM) -> None:
    """Remove the adapters of `model` and their parameters."""
    for layer in adapted_layers(model).values():
        layer.wrapper = None
        for parameter in PARAMETERS:
            layer._parameters.pop(parameter, None)
    for name in list(model.tied_parameters):
        if is_adapter(name):
            del model.tied_parameters[name]


@torch.no_grad()
def init_adapters(model: CausalLM, seed: int) -> None:
    """Initialise adapters so that the model computes as without them.

    A is uniform in ±1/√in and B is zero. DoRA's magnitudes are the row norms of the weights, which must be loaded.

    Args:
        model: A model with adapters.
        seed: Seed of A. An element is a function of the seed, the layer's name and its index in the full matrix.

    Collectives:
        Under tensor parallel, one all-reduce for each magnitude of a layer whose inputs are cut.
    """
    for name, layer in adapted_layers(model).items():
        a = layer.get_parameter("lora_A")
        _fill_uniform(a, random_key(seed, f"{model.config.file_module(name)}.lora_A"), 1 / math.sqrt(a.shape[-1]))
        local_tensor(layer.get_parameter("lora_B")).zero_()
        if isinstance(layer, Linear) and isinstance(layer.wrapper, Adapter) and layer.wrapper.dora:
            magnitude = local_tensor(layer.get_parameter("lora_magnitude"))
            weight = layer.dense_weight(local_tensor)  # of this rank's shards
            squares = weight.to(magnitude.dtype).square().sum(1)
            magnitude.copy_(_all_reduce_squares(squares, layer.tp).sqrt_())


def _fill_uniform(parameter: nn.Parameter, key: int, bound: float) -> None:
    """Fill this rank's shard with numbers in [-bound, bound), each a function of the key and the element's index."""
    local = local_tensor(parameter)
    index = torch.zeros((), dtype=torch.int64, device=local.device)  # flat index in the full parameter
    for size, part in zip(parameter.shape, local_slices(parameter), strict=True):
        index = index[..., None] * size + torch.arange(part.start, part.stop, device=local.device)
    local.copy_(random_uniform(index, key).mul_(2).sub_(1).mul_(bound))


def _all_reduce_squares(squares: Tensor, tp: TensorParallel | None) -> Tensor:
    """Sum squares over the tp ranks that have other inputs of the same rows, in place. None: there is one rank."""
    if tp is not None:
        dist.all_reduce(squares, group=tp.group)
    return squares
