"""A causal language model whose decoder is that of the transformers library.

TransformersCausalLM        dtrain's `CausalLM`: head, tied weights, names in files
  TransformersDecoder       dtrain's `Stack`: calls the decoder of transformers
    embed_tokens, layers, norm, ...   modules of transformers, adopted by `modules.adopt_modules`
"""

import math
from collections.abc import Mapping
from copy import deepcopy
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dtrain.attention.kernels import Kernel
from dtrain.models.common.config import ModelConfig, TransformersModel
from dtrain.models.common.decoder import CausalLM
from dtrain.models.common.masks import AttentionMasks
from dtrain.models.common.micro_batch import MicroBatchContext
from dtrain.models.transformers.config import ATTENTION, build_library_model, decoder_of, make_library_config
from dtrain.models.transformers.modules import adopt_modules, set_key_heads
from dtrain.models.transformers.plan import make_plan
from dtrain.models.transformers.running import RunningForward, running
from dtrain.parallel.tensor import Stack


class TransformersDecoder(Stack):
    """The decoder of a model of transformers, under dtrain's interface.

    The children of transformers' decoder are this module's children, under the same names. Transformers' decoder is no
    child itself, so that names are those of the files.

    Args:
        config: Config of the model.
        library_model: The model of transformers, whose decoder is taken.

    Attributes:
        kernel: Attention kernel of all layers, set when the model is built.
        embed_tokens: The embedding of the tokens. Its name among the children may be another.
        layers: The decoder layers. Their name among the children may be another.
    """

    kernel: Kernel
    flash_delta = None
    no_flash_delta_reason = ""
    vision: tuple[()] = ()

    def __init__(self, config: ModelConfig, library_model: PreTrainedModel):
        super().__init__()
        self.config = config
        source = _source_of(config)
        decoder = library_model.get_submodule(source.prefix)
        embedding, layers = decoder.get_submodule(source.embedding), decoder.get_submodule(source.layers)
        adopt_modules(decoder, embedding, layers, _float32_names(library_model))
        for layer, kind in zip(layers, config.layer_types, strict=True):
            set_key_heads(layer, config.kv_heads_of(kind))
        for name, child in decoder.named_children():
            self.add_module(name, child)
        self._buffer_dtypes = {name: buffer.dtype for name, buffer in decoder.named_buffers()}
        # Both decoders have the same buffers, also after `to` has replaced them.
        self.__dict__["_buffers"] = decoder._buffers
        self.__dict__["_non_persistent_buffers_set"] = decoder._non_persistent_buffers_set
        # In tuples, because nn.Module would register plain attributes as children of their own names.
        self._library = (library_model,)
        self._ends = (embedding, layers)

    def __getattr__(self, name: str) -> Any:
        """Return the embedding and the layers under dtrain's names."""
        if name in ("embed_tokens", "layers") and name not in self._modules:
            return self._ends[0 if name == "embed_tokens" else 1]
        return super().__getattr__(name)

    @property
    def library_model(self) -> PreTrainedModel:
        """The model of transformers, whose decoder this is."""
        return self._library[0]

    @property
    def takes_packing(self) -> bool:
        """True if attention computes from the packing of a micro-batch."""
        return self.kernel.takes_packing

    def states(self, input_ids: Tensor, context: MicroBatchContext) -> Tensor:
        """Override `Stack.states`: token ids [B, S] -> hidden states after the final norm [B, S, D].

        Collectives:
            Those of `AttentionMasks` and of the layers.
        """
        num_rows, length = input_ids.shape
        positions, masks = self._positions(input_ids, context), None
        dtype = self.embed_tokens.weight.dtype
        if context.cache is None:
            masks = AttentionMasks(self.kernel, context, positions, num_rows, length, dtype, input_ids.device)
        is_double = dtype is torch.float64
        forward = RunningForward(self.kernel, masks, context.cache, context.adapters, is_double)
        decoder = self.library_model.get_submodule(_source_of(self.config).prefix)
        with running(forward):
            output = decoder(input_ids=input_ids, position_ids=positions.expand(num_rows, -1), use_cache=False)
        hidden = output.last_hidden_state
        # The head of a classifier has no factor.
        factor = _source_of(self.config).logit_factor if self.config.num_labels is None else 1.0
        return hidden if factor == 1.0 else hidden * factor

    def _positions(self, input_ids: Tensor, context: MicroBatchContext) -> Tensor:
        """Return the positions of the tokens, [B or 1, S]."""
        if context.cache is not None:
            return context.cache.positions
        if context.position_ids is not None:
            return context.position_ids
        length, max_length = input_ids.shape[1], self.config.max_document_length
        if max_length is not None and length > max_length:
            raise ValueError(f"The rows have {length} tokens, and this model takes documents of at most {max_length}.")
        return torch.arange(length, device=input_ids.device)[None]

    def reset_buffers(self) -> None:
        """Initialise buffers as transformers does.

        Those that are not in files, such as rotary frequencies, are computed here only. The others, such as the biases
        of routers, are read from files later, unless the model starts from scratch.

        Raises:
            RuntimeError: If transformers leaves a buffer that is not in files without values.
        """
        modules: list[nn.Module] = []
        buffers: list[tuple[nn.Module, str, Tensor]] = []
        for module in self.modules():
            for name, values in module._buffers.items():
                if values is None:
                    continue
                modules.append(module)
                if name not in module._non_persistent_buffers_set:
                    values.zero_()
                    continue
                buffers.append((module, name, values))
                if values.is_floating_point():
                    values.fill_(math.nan)
        # transformers does not change tensors with this mark. Parameters get their values elsewhere.
        parameters = list(self.parameters())
        for parameter in parameters:
            parameter._is_hf_initialized = True  # type: ignore[attr-defined]
        # The decoder comes first, because Falcon-H1 computes buffers of its layers there.
        decoder = decoder_of(self.library_model)
        for module in [decoder, *dict.fromkeys(modules)]:
            decoder._init_weights(module)
        for parameter in parameters:
            del parameter._is_hf_initialized  # type: ignore[attr-defined]
        for module, name, values in buffers:
            if values.device.type != "meta" and bool(values.isnan().any()):
                raise RuntimeError(f"transformers does not initialise the buffer {name} of {type(module).__name__}")
        # transformers computes a buffer in its own dtype, such as the factor 50.5 in bfloat16 for sqrt(2560) = 50.596.
        for name, values in self.named_buffers():
            if values.is_floating_point() and values.device.type != "meta":
                values.copy_(values.to(self._buffer_dtypes.get(name, values.dtype)))


class TransformersCausalLM(CausalLM):
    """A causal language model of transformers on dtrain's meshes.

    Its parameters have the names of the files, except for the name of the decoder, which is always `model`, and that of
    the head, `lm_head`.
    """

    compile_obstacle = "its layers are those of transformers"
    # Those of transformers' activation xIELU, and of routers. The others are computed by `reset_buffers`.
    initial_buffers = {"*.e_score_correction_bias": 0.0, "*.act_fn.beta": 0.5, "*.act_fn.eps": -1e-6}

    def __init__(self, config: ModelConfig):
        source = _source_of(config)
        library_config = make_library_config(source.values, "config.json")
        library_model = build_library_model(library_config, ATTENTION)
        self._library_config = library_config
        decoder = TransformersDecoder(config, library_model)
        super().__init__(config, decoder)  # type: ignore[arg-type]  # a Stack with the attributes of a Decoder
        if source.has_head_bias and config.num_labels is None:
            self.lm_head.bias = nn.Parameter(torch.empty(config.vocab_size, device="meta"))
        if config.tie_word_embeddings:
            self.tied_parameters = {"lm_head.weight": f"model.{source.embedding}.weight"}
            self.tie_weights()

    def _applicable_plan(self) -> dict[str, Any]:
        """Override `CausalLM._applicable_plan`: the plan of transformers in dtrain's styles."""
        return make_plan(self._library_config, self)

    @property
    def initial_values(self) -> Mapping[str, str]:  # type: ignore[override]  # a table of the class in other families
        """`CausalLM.initial_values`, read from the values that transformers gives to each kind of module."""
        # The modules of this model may be sharded already.
        return find_initial_values(build_library_model(self._library_config, ATTENTION))

    def to_empty(self, *, device: Any, recurse: bool = True) -> Self:
        """Allocate the model's memory, and compute the buffers that are not in files."""
        super().to_empty(device=device, recurse=recurse)
        cast(TransformersDecoder, self.model).reset_buffers()
        return self

    @property
    def library_model(self) -> PreTrainedModel:
        """The model of transformers. Its decoder has the modules of this one."""
        return cast(TransformersDecoder, self.model).library_model

    def library_name(self, name: str) -> str:
        """Return transformers' name of a parameter or buffer."""
        return _source_of(self.config).library_name(name)

    def checkpoint_names(self, name: str) -> list[str]:
        """Override `CausalLM.checkpoint_names`. Files of some architectures have other names (`conversion`)."""
        return [self.library_name(name)]

    @property
    def ignored_checkpoint_names(self) -> tuple[str, ...]:
        """Override `CausalLM.ignored_checkpoint_names`: also the layers that predict further tokens."""
        source = _source_of(self.config)
        patterns = [*super().ignored_checkpoint_names]
        if self.config.has_new_head:
            patterns.append(rf"{source.head}\..*")
        first = self.config.num_hidden_layers
        num_further = getattr(self._library_config, "num_nextn_predict_layers", None) or 0
        for index in range(first, first + num_further):
            patterns.append(rf"{source.prefix}\.{source.layers}\.{index}\..*")
        return tuple(patterns)


def _source_of(config: ModelConfig) -> TransformersModel:
    if config.transformers is None:
        raise ValueError(f"{config.architecture} is a model of dtrain")
    return config.transformers


def _float32_names(library_model: PreTrainedModel) -> Any:
    """Return a function that checks whether a parameter stays in float32, whatever the model's dtype."""
    patterns = library_model._keep_in_fp32_modules_strict or ()

    def is_float32(name: str) -> bool:
        return any(pattern in name.split(".") for pattern in patterns)

    return is_float32


MAX_TRIED_ELEMENTS = 2**22
"""Elements of the largest parameter that `find_initial_values` initialises to see its values."""


def find_initial_values(library_model: PreTrainedModel) -> dict[str, str]:
    """Return how transformers initialises each parameter of a decoder, as `CausalLM.initial_values`.

    Linear layers and embeddings have normal weights and no bias at first. A module of another class, such as a norm, is
    copied and initialised by transformers, and its values are read. Large parameters are those of experts, and normal.

    Args:
        library_model: The model of transformers, on any device.
    """
    kinds: dict[str, str] = {"lm_head.bias": "zeros"}
    decoder = decoder_of(library_model)
    for name, module in decoder.named_modules():
        parameters = {key: value for key, value in module._parameters.items() if value is not None}
        if isinstance(module, nn.Linear | nn.Embedding):
            if "bias" in parameters:
                kinds[f"model.{name}.bias"] = "zeros"
        elif parameters and max(value.numel() for value in parameters.values()) <= MAX_TRIED_ELEMENTS:
            copied = deepcopy(module).to_empty(device="cpu", recurse=False)
            for parameter in copied._parameters.values():
                if parameter is not None:
                    parameter.detach().zero_()  # transformers leaves some as they are, such as those of xIELU
            decoder._init_weights(copied)
            for key in parameters:
                value = copied._parameters[key].detach()
                if bool((value == value.flatten()[0]).all()):
                    is_one = float(value.flatten()[0]) == 1.0
                    kinds[f"model.{name}.{key}"] = "ones" if is_one else "zeros"
    kinds["*"] = "normal"
    return kinds
