"""A causal language model whose decoder is that of the transformers library.

    TransformersCausalLM        dtrain's `CausalLM`: head, tied weights, names in files
      TransformersDecoder       dtrain's `Stack`: calls the decoder of transformers
        embed_tokens, layers, norm, ...   modules of transformers, changed by `modules.adopt_modules`

Both the `TransformersDecoder` and the decoder of transformers, which runs the forward, have the same children and the
same buffers. FSDP, tensor parallelism and adapters change these modules, and the forward of transformers calls them.
"""

import math
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dtrain.attention.kernels import Kernel
from dtrain.models.common.config import ModelConfig
from dtrain.models.common.decoder import CausalLM
from dtrain.models.common.masks import AttentionMasks
from dtrain.models.common.micro_batch import MicroBatchContext
from dtrain.models.transformers.config import (
    ATTENTION,
    build_library_model,
    decoder_of,
    get_library_source,
    make_library_config,
)
from dtrain.models.transformers.modules import adopt_modules, set_key_heads
from dtrain.models.transformers.plan import make_plan
from dtrain.models.transformers.running import RunningForward, running
from dtrain.parallel.tensor import Stack


class TransformersDecoder(Stack):
    """The decoder of a model of transformers, under dtrain's interface.

    The children of transformers' decoder are also children of this module, under the same names. For example, GPT-2's
    decoder has `wte`, `h` and `ln_f`. Transformers' decoder is not a child itself, because parameters would then be
    named `model.transformer.h.0...` in place of `model.h.0...`.

    Args:
        config: Config of the model.
        library_model: The model of transformers, whose decoder runs the forward. Its modules are changed.

    Attributes:
        kernel: Attention kernel of all layers, set when the model is built.
        embed_tokens: The embedding of the tokens. The child may have another name, such as `wte`.
        layers: The decoder layers. The child may have another name, such as `h`.
    """

    kernel: Kernel
    flash_delta = None
    no_flash_delta_reason = ""
    vision: tuple[()] = ()

    def __init__(self, config: ModelConfig, library_model: PreTrainedModel):
        super().__init__()
        self.config = config
        source = get_library_source(config)
        decoder = library_model.get_submodule(source.prefix)
        embedding, layers = decoder.get_submodule(source.embedding), decoder.get_submodule(source.layers)
        adopt_modules(decoder, embedding, layers, _float32_names(library_model))
        for layer, kind in zip(layers, config.layer_types, strict=True):
            set_key_heads(layer, config.kv_heads_of(kind))
        for name, child in decoder.named_children():
            self.add_module(name, child)
        self._buffer_dtypes = {name: buffer.dtype for name, buffer in decoder.named_buffers()}
        # The decoders share the dictionary of their own buffers. `nn.Module.to` replaces the tensors in it, and so
        # replaces them for both.
        self.__dict__["_buffers"] = decoder._buffers
        self.__dict__["_non_persistent_buffers_set"] = decoder._non_persistent_buffers_set
        # In containers, because nn.Module would register a module that is an attribute as a child of this name.
        self._library = (library_model,)
        self._aliases = {"embed_tokens": embedding, "layers": layers}

    def __getattr__(self, name: str) -> Any:
        """Return the embedding and the layers under dtrain's names, if the children have others."""
        if name in ("embed_tokens", "layers") and name not in self._modules:
            return self._aliases[name]
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
        source = get_library_source(self.config)
        positions = self._positions(input_ids, context)
        dtype = self.embed_tokens.weight.dtype
        masks = None
        if context.cache is None:
            masks = AttentionMasks(self.kernel, context, positions, num_rows, length, dtype, input_ids.device)
        is_double = dtype is torch.float64
        forward = RunningForward(self.kernel, masks, context.cache, context.adapters, is_double)
        decoder = self.library_model.get_submodule(source.prefix)
        with running(forward):
            output = decoder(input_ids=input_ids, position_ids=positions.expand(num_rows, -1), use_cache=False)
        hidden = output.last_hidden_state
        # logits = factor * (hidden @ weight.T) = (factor * hidden) @ weight.T. The head of a classifier has no factor.
        has_factor = self.config.num_labels is None and source.logit_factor != 1.0
        return hidden * source.logit_factor if has_factor else hidden

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
        """Initialise all buffers by transformers' `_init_weights`.

        Buffers that are not in files, such as rotary frequencies, get their final values here. The others, such as the
        biases of routers, are read from files later, unless the model starts from scratch. The former are filled with
        NaN first, so that a buffer that `_init_weights` does not know is noticed. The latter start at zero.

        Raises:
            RuntimeError: If transformers leaves a buffer that is not in files without values.
        """
        modules: dict[nn.Module, None] = {}  # an ordered set
        computed: list[tuple[nn.Module, str, Tensor]] = []  # buffers that are not in files
        for module in self.modules():
            for name, values in module._buffers.items():
                if values is None:
                    continue
                modules[module] = None
                if name not in module._non_persistent_buffers_set:
                    values.zero_()
                    continue
                computed.append((module, name, values))
                if values.is_floating_point():
                    values.fill_(math.nan)
        # `_init_weights` also initialises parameters, unless they have this mark. They get their values elsewhere.
        parameters = list(self.parameters())
        for parameter in parameters:
            parameter._is_hf_initialized = True  # type: ignore[attr-defined]
        # The decoder comes first, because Falcon-H1 computes buffers of its layers there.
        decoder = decoder_of(self.library_model)
        for module in [decoder, *modules]:
            decoder._init_weights(module)
        for parameter in parameters:
            del parameter._is_hf_initialized  # type: ignore[attr-defined]
        for module, name, values in computed:
            if values.device.type != "meta" and bool(values.isnan().any()):
                raise RuntimeError(f"transformers does not initialise the buffer {name} of {type(module).__name__}")
        # Round each buffer as transformers does, which computes it in the buffer's first dtype, not the model's. For
        # example, sqrt(2560) = 50.596 in a buffer in bfloat16 is 50.5 in a model in float32 too.
        for name, values in self.named_buffers():
            if values.is_floating_point() and values.device.type != "meta":
                values.copy_(values.to(self._buffer_dtypes.get(name, values.dtype)))


class TransformersCausalLM(CausalLM):
    """A causal language model of transformers on dtrain's meshes.

    Its parameters have the names of the files, except for the name of the decoder, which is always `model`, and that of
    the head, `lm_head`.
    """

    compile_obstacle = "its layers are those of transformers"
    # Buffers that are in files: the biases of routers, and two constants of transformers' activation xIELU.
    # `reset_buffers` computes the others.
    initial_buffers = {"*.e_score_correction_bias": 0.0, "*.act_fn.beta": 0.5, "*.act_fn.eps": -1e-6}

    def __init__(self, config: ModelConfig):
        source = get_library_source(config)
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
        """Override `CausalLM.initial_values`: the kinds of values with which transformers initialises parameters."""
        # From another model on the meta device, because the modules of this one may be sharded already.
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
        return get_library_source(self.config).library_name(name)

    def checkpoint_names(self, name: str) -> list[str]:
        """Override `CausalLM.checkpoint_names`. Files of some architectures have other names (`conversion`)."""
        return [self.library_name(name)]

    @property
    def ignored_checkpoint_names(self) -> tuple[str, ...]:
        """Override `CausalLM.ignored_checkpoint_names`: also the layers of multi-token prediction, and a replaced head.

        For example, DeepSeek-V3 has 61 layers, and files have `model.layers.61` for the prediction of the second token.
        """
        source = get_library_source(self.config)
        patterns = [*super().ignored_checkpoint_names]
        if self.config.has_new_head:
            patterns.append(rf"{source.head}\..*")
        first = self.config.num_hidden_layers
        num_further = getattr(self._library_config, "num_nextn_predict_layers", None) or 0
        for index in range(first, first + num_further):
            patterns.append(rf"{source.prefix}\.{source.layers}\.{index}\..*")
        return tuple(patterns)


def _float32_names(library_model: PreTrainedModel) -> Callable[[str], bool]:
    """Return a function of a parameter's name: whether the parameter stays in float32 in a model of another dtype."""
    patterns = library_model._keep_in_fp32_modules_strict or ()

    def is_float32(name: str) -> bool:
        return any(pattern in name.split(".") for pattern in patterns)

    return is_float32


MAX_TRIED_ELEMENTS = 2**22
"""Elements of the largest parameter that `find_initial_values` initialises to see its values."""


def find_initial_values(library_model: PreTrainedModel) -> dict[str, str]:
    """Return the initial values of each parameter of a decoder, in the form of `CausalLM.initial_values`.

    Linear layers and embeddings start with normal weights and a bias of zeros. For other classes, such as norms, a copy
    of the module is initialised by transformers, and its values decide: all 1 is "ones", any other constant "zeros".
    Larger parameters than MAX_TRIED_ELEMENTS belong to experts, and are normal.

    Args:
        library_model: The model of transformers, on any device.

    Example:
        For a Llama:

        {"lm_head.bias": "zeros", "model.layers.0.input_layernorm.weight": "ones", ..., "*": "normal"}
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
                    # `_init_weights` does not change some parameters, such as those of xIELU.
                    parameter.detach().zero_()
            decoder._init_weights(copied)
            for key in parameters:
                value = copied._parameters[key].detach()
                first = float(value.flatten()[0])
                is_constant = bool((value == first).all())
                if is_constant:
                    kinds[f"model.{name}.{key}"] = "ones" if first == 1.0 else "zeros"
    kinds["*"] = "normal"
    return kinds
