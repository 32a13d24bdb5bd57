"""Configs of models of the transformers library: from a config.json to a `ModelConfig`.

The sizes of attention do not come from the fields of the config, whose names differ between families, but from the
model itself: its forward runs once on the meta device, and the running forward records the shapes of each attention
(`record_attention`). For example, DeepSeek-V3's layers report 128 query heads, 128 key heads, heads of 192
elements in queries and keys, and of 128 in values.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.integrations.moe import ExpertsInterface

from dtrain.attention.kernels import SdpaKernel
from dtrain.base.errors import UserError
from dtrain.models.common.config import FULL, LINEAR, SLIDING, KVHeads, ModelConfig, TransformersModel
from dtrain.models.transformers.experts import compute_experts
from dtrain.models.transformers.modules import has_stacked_experts
from dtrain.models.transformers.running import RunningForward, attend, running

ATTENTION = "dtrain"
"""Name of dtrain's attention in transformers' registry."""
EXPERTS = "dtrain"
"""Name of dtrain's experts in transformers' registry."""
_PROBE_TOKENS = 4  # tokens of the row with which shapes are recorded

# Fields that change logits after the head, in the forward of a `...ForCausalLM`, which dtrain does not call.
_LOGIT_FACTORS = ("logit_scale", "lm_head_multiplier")
_LOGIT_DIVISORS = ("logits_scaling",)
TOP_K_NAMES = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k", "top_k_experts")
"""Fields with the number of experts that compute a token."""
# Kinds of rotary embedding whose tables depend on the longest row of a micro-batch.
_LENGTH_DEPENDENT_ROPES = ("dynamic", "longrope")
# What transformers raises for a field with a wrong value: its validation raises the first, and code that computes from
# the field the others.
_FIELD_ERRORS = (StrictDataclassError, KeyError, TypeError, ValueError, ZeroDivisionError)


@dataclass(frozen=True)
class RecordedAttention:
    """Shapes of one layer's attention.

    Attributes:
        heads: Query heads.
        kv: Heads of keys and values.
        scale: Factor of the scores.
        window: Number of keys that a query sees. None: all.
        has_sinks: Whether the heads have sinks.
    """

    heads: int
    kv: KVHeads
    scale: float
    window: int | None
    has_sinks: bool


AttentionInterface.register(ATTENTION, attend)
ExpertsInterface.register(EXPERTS, compute_experts)


def read_transformers_config(values: Mapping[str, Any], where: str) -> ModelConfig:
    """Return the config of a model of transformers that the fields of a config.json describe.

    Args:
        values: The fields.
        where: Name of the file in errors.

    Raises:
        UserError: If transformers has no causal language model for it, or if dtrain cannot compute it.
    """
    config = make_library_config(values, where)
    architecture = class_of(config).__name__
    try:
        model = build_library_model(config, ATTENTION)
    except _FIELD_ERRORS as error:
        # Some classes, such as Falcon, look up their attention in a table of their own, which does not have dtrain's.
        if isinstance(error, KeyError) and error.args == (ATTENTION,):
            text = f"{where}: the attention of {architecture} cannot be replaced by dtrain's ({error})"
            raise UserError(text) from error
        raise UserError(_describe_field_error(error, where)) from error
    problems = _find_problems(config, model)
    if problems:
        lines = [f"{where}: {architecture} of transformers {transformers.__version__} with"]
        raise UserError("\n".join([*lines, *(f"  - {problem}" for problem in problems)]))
    try:
        layers = record_attention(model)
    except Exception as error:  # noqa: BLE001 - any class of transformers may raise anything here
        reason = str(error)
        if isinstance(error, TypeError | AttributeError) and "NoneType" in reason:
            reason = f"its layers read an attention mask, which dtrain does not make ({reason})"
        raise UserError(f"{where}: {architecture} does not run on dtrain's attention: {reason}") from error
    return _model_config(values, config, model, layers, where)


def is_known_model_type(model_type: object) -> bool:
    """Check whether the installed transformers has a model of this type."""
    return isinstance(model_type, str) and model_type in transformers.CONFIG_MAPPING


def make_library_config(values: Mapping[str, Any], where: str) -> PretrainedConfig:
    """Return the config object of transformers for the fields of a config.json.

    Raises:
        UserError: If the installed transformers has no causal language model of this kind.
    """
    model_type = values.get("model_type")
    names = values.get("architectures")
    names = names if isinstance(names, list) and names else [names]
    shown = names[0] or f"model_type {model_type}"
    if values.get("auto_map") and model_type not in transformers.CONFIG_MAPPING:
        raise UserError(
            f"{where}: {shown} is code of the model's repository, which dtrain does not run. Use a model whose class "
            "is part of the transformers library"
        )
    if not is_known_model_type(model_type):
        raise UserError(f"{where}: transformers {transformers.__version__} has no model of the type {model_type}")
    config = _parse(values, where)
    for name in dropout_fields(config):
        setattr(config, name, 0.0)
    cls = class_of(config)
    if names[0] is not None and names[0] != cls.__name__:
        text = (
            f"{where}: architectures names {shown}, and the model_type {model_type} is {cls.__name__} in transformers"
        )
        raise UserError(f"{text}. Correct one of them")
    return config


def get_library_source(config: ModelConfig) -> TransformersModel:
    """Return the description of a model whose modules are those of transformers. Raises ValueError for other models."""
    if config.transformers is None:
        raise ValueError(f"{config.architecture} is a model of dtrain")
    return config.transformers


def _parse(values: Mapping[str, Any], where: str) -> PretrainedConfig:
    """Return the fields of a config.json as transformers' config of their model type.

    Raises:
        UserError: If transformers refuses a field.
    """
    with _quiet():
        # transformers writes an infinity as {"__float__": "Infinity"}.
        fields = PretrainedConfig._decode_special_floats(dict(values))
        try:
            return transformers.CONFIG_MAPPING[values["model_type"]].from_dict(fields)
        except _FIELD_ERRORS as error:
            raise UserError(_describe_field_error(error, where)) from error


def _describe_field_error(error: Exception, where: str) -> str:
    """Return the message for an error of transformers about a field, on one line."""
    reason = " ".join(str(error).split())
    if isinstance(error, KeyError):
        reason = f"it does not know {reason}"  # the text of a KeyError is only the key
    text = f"{where}: transformers {transformers.__version__} does not take its fields: {reason}"
    return f"{text}. Correct the file, or download it again"


def dropout_fields(config: PretrainedConfig) -> dict[str, float]:
    """Return the fields of a config that add random noise in training, and are not 0: dropout, and jitter of routers.

    dtrain trains without noise, because random numbers would depend on the mesh.
    """
    fields = {}
    for name, value in vars(config).items():
        is_noise = any(part in name for part in ("dropout", "pdrop", "layerdrop", "jitter"))
        is_of_classifier = name.startswith(("classifier_", "summary_"))
        if is_noise and not is_of_classifier and isinstance(value, float) and 0.0 < value <= 1.0:
            fields[name] = value
    return fields


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Context in which transformers logs no warnings. They are about generation and its own attention."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def class_of(config: PretrainedConfig) -> type[PreTrainedModel]:
    """Return the `...ForCausalLM` of a config. Raises UserError if there is none."""
    mapping = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) not in mapping:
        raise UserError(f"transformers has no causal language model of the type {config.model_type}")
    return mapping[type(config)]


def find_classifier(values: Mapping[str, Any]) -> str | None:
    """Return the name of transformers' sequence classifier for a config.json, in whose form reward models are exported.

    None if transformers has no such class, or if its parameters are not those of dtrain's classifier: the decoder of
    the language model, and a head `score` without a bias.
    """
    config = make_library_config(values, "config.json")
    cls = transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)
    if cls is None:
        return None
    with _quiet(), torch.device("meta"):
        names = cls._from_config(deepcopy(config)).state_dict().keys()
        decoder_names = class_of(config)._from_config(deepcopy(config)).base_model.state_dict().keys()
    prefix = class_of(config).base_model_prefix
    expected = {f"{prefix}.{name}" for name in decoder_names} | {"score.weight"}
    return cls.__name__ if names == expected else None


def build_library_model(config: PretrainedConfig, attention: str, device: str = "meta") -> PreTrainedModel:
    """Build a model of transformers in float32, without values on "meta", otherwise with its initial values.

    Args:
        config: The config. It is copied.
        attention: Name of the attention in transformers' registry. With "eager", experts are transformers' own, too.
        device: "meta" or "cpu".
    """
    config = deepcopy(config)
    config.use_cache = False
    experts = "eager" if attention == "eager" else EXPERTS
    with _quiet(), torch.device(device):
        model = class_of(config)._from_config(
            config, dtype=torch.float32, attn_implementation=attention, experts_implementation=experts
        )
    # Some models would look for padding among their tokens to warn of it, which a GPU has to wait for. Not by an
    # attribute, because some configs refuse None.
    vars(model.config)["pad_token_id"] = None
    return model.train()


@dataclass(frozen=True, eq=False)
class _RecordingForward(RunningForward):
    """A running forward that records the shapes of attention and computes none.

    Attributes:
        recorded: The recorded shapes by number of the layer.
    """

    recorded: dict[int, RecordedAttention] = field(default_factory=dict)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, sinks: Tensor | None
    ) -> Tensor:
        """Override `RunningForward.attend`: record the arguments, and return a tensor without values."""
        self.recorded[layer] = RecordedAttention(
            heads=q.shape[2],
            kv=KVHeads(k.shape[2], k.shape[-1], v.shape[-1]),
            scale=scale,
            window=window,
            has_sinks=sinks is not None,
        )
        return q.new_empty((*q.shape[:3], v.shape[-1]))


def record_attention(model: PreTrainedModel) -> list[RecordedAttention | None]:
    """Run a model on the meta device, and return the shapes of each layer's attention.

    Args:
        model: The model of transformers with dtrain's attention, on the meta device. Its experts are changed.

    Returns:
        One entry for each layer. None for a layer without attention, such as one with Mamba.
    """
    for module in model.modules():
        if type(module).__name__.endswith("Experts"):
            module.forward = _forward_on_meta(module.forward)
    ids = torch.zeros((1, _PROBE_TOKENS), dtype=torch.int64, device="meta")
    positions = torch.zeros((1, _PROBE_TOKENS), dtype=torch.int64, device="meta")
    forward = _RecordingForward(SdpaKernel(), masks=None, cache=None, adapters=None)
    with torch.no_grad(), _quiet(), running(forward):
        decoder_of(model)(input_ids=ids, position_ids=positions, use_cache=False)
    num_layers = model.config.get_text_config().num_hidden_layers
    return [forward.recorded.get(index) for index in range(num_layers)]


def _forward_on_meta(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a forward of experts that also runs on meta tensors.

    Most mixtures call `compute_experts`, which runs on the meta device. Some, such as DBRX, loop over the experts that
    the router has selected, which meta tensors do not have: torch raises NotImplementedError. The input is then
    returned, because the output has the same shape.
    """

    def compute(hidden_states: Tensor, *routing: Any, **further: Any) -> Tensor:
        try:
            return forward(hidden_states, *routing, **further)
        except NotImplementedError:
            return hidden_states

    return compute


def _find_problems(config: PretrainedConfig, model: PreTrainedModel) -> list[str]:
    """Return the parts of a model on the meta device that dtrain cannot train. Empty if it can train the model."""
    problems = []
    text_config = config.get_text_config()
    if text_config is not config:
        problems.append("parts for images or sounds; dtrain trains text models of transformers")
    names = find_names(model)
    if names is None:
        problems.append("no list of decoder layers next to the embedding of its tokens, or no head")
    elif any(parameter is not None for parameter in decoder_of(model)._parameters.values()):
        problems.append("parameters outside of its layers and norms")
    tied = getattr(model, "_tied_weights_keys", None) or {}
    if names is not None and is_tied(config):
        head = f"{names.head}.weight"
        others = [name for name in tied if name != head and name != f"{names.head}.bias"]
        if others:
            problems.append(f"shared weights besides those of head and embedding: {', '.join(others)}")
    return problems


@dataclass(frozen=True)
class ModelNames:
    """Names of a model's parts in transformers, and in its files.

    Attributes:
        prefix: Name of the decoder in the model, such as "model" or "transformer".
        embedding: Name of the embedding in the decoder.
        layers: Name of the list of layers in the decoder.
        head: Name of the head in the model.
    """

    prefix: str
    embedding: str
    layers: str
    head: str


def is_tied(config: PretrainedConfig) -> bool:
    """Check whether head and embedding share their weight. Configs without the field do not."""
    return bool(getattr(config, "tie_word_embeddings", False))


def find_names(model: PreTrainedModel) -> ModelNames | None:
    """Return the names of a model's parts. None if the model does not consist of these parts.

    The model must have two children, a linear head and a decoder. The decoder must contain the embedding of the tokens,
    and exactly one list with as many modules as the config has layers. For example, the parts of GPT-2 are:

        lm_head                 head
        transformer             prefix
        transformer.wte         embedding
        transformer.h           layers
    """
    try:
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    except NotImplementedError:  # raised by transformers if the class has no attribute with a usual name
        return None
    if head is None or type(head) is not nn.Linear or not isinstance(embedding, nn.Embedding):
        return None
    num_layers = model.config.get_text_config().num_hidden_layers
    heads = [name for name, child in model.named_children() if child is head]
    decoders = [name for name, child in model.named_children() if child is not head and list(child.parameters())]
    if len(heads) != 1 or len(decoders) != 1:
        return None
    decoder = model.get_submodule(decoders[0])
    if not isinstance(decoder, PreTrainedModel):
        return None
    embeddings = [name for name, child in decoder.named_modules() if child is embedding]
    layers: list[str] = []  # names of the outermost lists of this length: a layer may contain such a list, too
    for name, child in decoder.named_modules():
        is_nested = any(name.startswith(f"{outer}.") for outer in layers)
        if isinstance(child, nn.ModuleList) and len(child) == num_layers and not is_nested:
            layers.append(name)
    if len(layers) != 1 or len(embeddings) != 1:
        return None
    return ModelNames(decoders[0], embeddings[0], layers[0], heads[0])


def decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return the decoder of a model that has names (`find_names`)."""
    names = find_names(model)
    if names is None:
        raise ValueError(f"{type(model).__name__} has no decoder that dtrain knows")
    return cast(PreTrainedModel, model.get_submodule(names.prefix))  # find_names has checked the type


def _model_config(
    values: Mapping[str, Any],
    config: PretrainedConfig,
    model: PreTrainedModel,
    layers: list[RecordedAttention | None],
    where: str,
) -> ModelConfig:
    """Return dtrain's config of a model.

    Sizes of attention come from the recorded layers. The other fields have the same names in all families, or a default
    that only matters to `dtrain plan`, because the modules of transformers read their own config.

    Args:
        values: The fields of config.json.
        config: The config of transformers.
        model: The model of transformers on the meta device.
        layers: The recorded attention of each layer (`record_attention`).
        where: Name of the file in errors.
    """
    architecture = class_of(config).__name__
    names = find_names(model)
    attention = [layer for layer in layers if layer is not None]
    if names is None or not attention:
        raise UserError(f"{where}: {architecture} has no layer whose attention dtrain computes")
    # The config has one number of heads and one scale. They are those of a layer with full attention, if there is one.
    main = next((layer for layer in attention if layer.window is None), attention[0])
    layer_types: list[str] = []
    kv_heads_by_type: dict[str, KVHeads] = {}
    for layer in layers:
        if layer is None:
            layer_types.append(LINEAR)
            continue
        layer_type = FULL if layer.window is None else SLIDING
        layer_types.append(layer_type)
        kv_heads = kv_heads_by_type.setdefault(layer_type, layer.kv)
        if layer.kv != kv_heads or layer.heads != main.heads:
            raise UserError(f"{where}: {architecture}: its layers of the type {layer_type} have different heads")
    window_by_layer: list[int | None] = []
    for layer in layers:
        window_by_layer.append(None if layer is None else layer.window)
    windows = [window for window in window_by_layer if window is not None]
    head = model.get_submodule(names.head)
    bos = getattr(config, "bos_token_id", None)
    softcap = getattr(config, "final_logit_softcapping", getattr(config, "logits_soft_cap", None))
    return ModelConfig(
        architecture=architecture,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=main.heads,
        num_key_value_heads=main.kv.count,
        head_dim=main.kv.head_dim,
        max_position_embeddings=getattr(config, "max_position_embeddings", None) or 2**30,
        hidden_act=str(getattr(config, "hidden_act", "")),
        rms_norm_eps=float(getattr(config, "rms_norm_eps", None) or 1e-6),
        initializer_range=float(getattr(config, "initializer_range", None) or 0.02),
        tie_word_embeddings=is_tied(config),
        layer_types=tuple(layer_types),
        sliding_window=max(windows, default=None),
        ropes={},
        attention_scale=main.scale,
        kv_heads_by_type=kv_heads_by_type,
        has_sinks=any(layer.has_sinks for layer in attention),
        final_logit_softcapping=softcap,
        bos_token_id=bos if isinstance(bos, int) else None,
        eos_token_ids=_eos_token_ids(config),
        pad_token_id=model.get_input_embeddings().padding_idx,
        dtype=str(config.dtype).removeprefix("torch.") if config.dtype is not None else None,
        transformers=TransformersModel(
            version=transformers.__version__,
            values=dict(values),
            omitted_noise=tuple(dropout_fields(_parse(values, "config.json"))),
            prefix=names.prefix,
            embedding=names.embedding,
            layers=names.layers,
            head=names.head,
            has_head_bias=head.bias is not None,
            logit_factor=_logit_factor(config),
            num_parameters=sum(parameter.numel() for parameter in model.parameters() if parameter.dim() > 1),
            max_document_length=_max_document_length(config, model),
            windows=tuple(window_by_layer),
            num_experts=_num_stacked_experts(model),
            experts_per_token=_experts_per_token(config),
        ),
    )


def _num_stacked_experts(model: PreTrainedModel) -> int | None:
    """Return the number of experts in each layer's stacks. None without stacks, or if layers have other numbers."""
    counts = {int(module.num_experts) for module in model.modules() if has_stacked_experts(module)}
    return counts.pop() if len(counts) == 1 else None


def _eos_token_ids(config: PretrainedConfig) -> tuple[int, ...]:
    """Return the ids of `eos_token_id`, which is one id, a list of ids, or None."""
    eos = getattr(config, "eos_token_id", None)
    if eos is None:
        return ()
    if isinstance(eos, list | tuple):
        return tuple(eos)
    return (eos,)


def _experts_per_token(config: PretrainedConfig) -> int | None:
    """Return the number of experts that compute a token. None if no field has it."""
    for name in TOP_K_NAMES:
        value = getattr(config, name, None)
        if isinstance(value, int):
            return value
    return None


def _logit_factor(config: PretrainedConfig) -> float:
    """Return the factor that the forward of a `...ForCausalLM` applies to the logits."""
    factor = 1.0
    for name in _LOGIT_FACTORS:
        factor *= float(getattr(config, name, None) or 1.0)
    for name in _LOGIT_DIVISORS:
        factor /= float(getattr(config, name, None) or 1.0)
    return factor


def _max_document_length(config: PretrainedConfig, model: PreTrainedModel) -> int | None:
    """Return the largest number of tokens of a document for which the model's positions are right. None: no limit.

    Two kinds of models have a limit. Learned positions (GPT-2) are an embedding with `max_position_embeddings` rows.
    Rotary embeddings of the types "dynamic" and "longrope" change their tables when a row is longer than
    `original_max_position_embeddings`, so a document's numbers would depend on the other rows of the micro-batch.
    """
    for child in decoder_of(model).modules():
        if isinstance(child, nn.Embedding) and child is not model.get_input_embeddings():
            return int(getattr(config, "max_position_embeddings", child.num_embeddings))
    rope_parameters = getattr(config, "rope_parameters", None) or {}
    # The field has the parameters, or in models with several rotary embeddings a dictionary of them by layer type.
    ropes = [rope_parameters]
    if all(isinstance(value, dict) for value in rope_parameters.values()):
        ropes = list(rope_parameters.values())
    for rope in ropes:
        if rope.get("rope_type") in _LENGTH_DEPENDENT_ROPES:
            return int(rope.get("original_max_position_embeddings") or config.max_position_embeddings)
    return None
