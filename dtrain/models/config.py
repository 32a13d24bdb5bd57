"""What a model is: config.json, as transformers 4 and 5 write it, to one `ModelConfig`. Imports no torch.

Every field of the file is used, known to change nothing, or refused by name, all problems at once. Where a field is
absent the default is transformers' for that family. Rotary scaling has a file of its own, `rope_config`.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dtrain.errors import UserError
from dtrain.json_files import read_json
from dtrain.models.fields import Fields, shown
from dtrain.models.quantization_config import unquantized
from dtrain.models.rope_config import Rope, read_gemma4_ropes, read_gemma_ropes, read_olmo_ropes, read_rope

__all__ = ["FULL", "LINEAR", "SLIDING", "KeyHeads", "LinearAttention", "ModelConfig", "PerLayer", "Rope"]
__all__ += ["parse_config", "read_config"]

MOST_PARAMETERS = 10**14
FULL = "full_attention"
SLIDING = "sliding_attention"


LINEAR = "linear_attention"


@dataclass(frozen=True)
class LinearAttention:
    """The sizes of layers of linear attention. width: of the convolution, in tokens."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def state(self) -> int:
        """Elements of one row's state."""
        return self.value_heads * self.key_dim * self.value_dim


@dataclass(frozen=True)
class KeyHeads:
    """The heads of keys and values of layers of one kind; queries have heads of the same size. tied: whether keys and
    values come from one projection."""

    count: int
    size: int
    tied: bool = False


@dataclass(frozen=True)
class PerLayer:
    """A second table of embeddings, of which every layer has `size` columns. vocab: its rows."""

    vocab: int
    size: int


@dataclass(frozen=True)
class ModelConfig:
    """A decoder, with config.json's names where it has them. Sizes in elements, of the whole model."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int  # as `head_dim`, of the kinds of layers that `key_heads` does not name
    head_dim: int
    max_position_embeddings: int
    hidden_act: str  # a key of models.functions.ACTIVATIONS
    rms_norm_eps: float
    initializer_range: float
    tie_word_embeddings: bool
    layer_types: tuple[str, ...]  # FULL, SLIDING or LINEAR, one a layer
    sliding_window: int | None  # keys that a SLIDING layer sees, the query's own included; None without such layers
    ropes: dict[str, Rope]  # by layer type
    attention_scale: float  # what q·k is multiplied by
    attention_gate: bool = False  # whether q_proj gives a gate of attention's output beside the queries
    linear: LinearAttention | None = None  # of LINEAR layers
    key_heads: Mapping[str, KeyHeads] = field(default_factory=dict)  # by layer type
    shared_layers: int = 0  # the last layers, which read the keys and values of an earlier one of their type
    shared_width: int = 1  # times intermediate_size: the MLPs of those
    per_layer: PerLayer | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    final_logit_softcapping: float | None = None
    unturned: tuple[int, ...] = ()  # the layers without rotary positions
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0  # what logits are divided by
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None  # its embedding starts at zero and gets no gradient as an input, as in transformers
    dtype: str | None = None  # of the weights in the files, such as "bfloat16"
    is_text_tower: bool = False  # one part of a multimodal checkpoint
    unquantized: tuple[str, ...] | None = None  # modules that a checkpoint in 4 bits leaves as they were
    # A layer's module in the files -> the model's modules whose rows it joins, in order; the others are alike.
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    unnamed: tuple[str, ...] = ()  # modules of the model whose parameters the files name as their parent's

    def parts(self, name: str) -> list[str]:
        """The model's modules that the module `name` of the files is: itself, or those whose rows it joins."""
        parent, _, module = name.rpartition(".")
        return [f"{parent}.{part}" for part in self.fused[module]] if module in self.fused else [name]

    def whole(self, name: str) -> str:
        """The module of the files that the model's module `name` is, or is a part of."""
        parent, _, module = name.rpartition(".")
        return next((f"{parent}.{one}" for one, parts in self.fused.items() if module in parts), name)

    @property
    def linear_key_heads(self) -> int | None:
        return None if self.linear is None else self.linear.key_heads

    def heads_of(self, kind: str) -> KeyHeads:
        """Of layers of type `kind`."""
        return self.key_heads.get(kind) or KeyHeads(self.num_key_value_heads, self.head_dim)

    @property
    def kv_heads(self) -> dict[str, int]:
        """How many heads of keys there are, by the type of layers with attention."""
        kinds = dict.fromkeys(kind for kind in self.layer_types if kind != LINEAR)
        return {kind: self.heads_of(kind).count for kind in kinds}

    @property
    def key_sources(self) -> tuple[int, ...]:
        """Of each layer the one whose keys and values it reads: itself, or the last one of its type that has some."""
        own = self.num_hidden_layers - self.shared_layers
        last = {kind: index for index, kind in enumerate(self.layer_types[:own])}
        return tuple(index if index < own else last[kind] for index, kind in enumerate(self.layer_types))

    def inner_size(self, layer: int) -> int:
        """Of the MLP of a layer, by its number."""
        own = self.num_hidden_layers - self.shared_layers
        return self.intermediate_size * (self.shared_width if layer >= own else 1)

    @property
    def parameters(self) -> int:
        """How many there are in the matrices; norms and biases are left out."""
        hidden, widths = self.hidden_size, 0
        for index, (kind, source) in enumerate(zip(self.layer_types, self.key_sources, strict=True)):
            widths += 3 * self.inner_size(index)
            if kind == LINEAR and self.linear is not None:
                widths += 2 * self.linear.keys + 3 * self.linear.values + 2 * self.linear.value_heads
                continue
            heads = self.heads_of(kind)
            keys = 0 if source != index else (2 - heads.tied) * heads.count
            widths += heads.size * ((2 + self.attention_gate) * self.num_attention_heads + keys)
        vocabulary = (2 - self.tie_word_embeddings) * self.vocab_size * hidden
        if self.per_layer is not None:
            widths += (self.num_hidden_layers + 2 * self.num_hidden_layers) * self.per_layer.size
            vocabulary += self.per_layer.vocab * self.num_hidden_layers * self.per_layer.size
        return hidden * widths + vocabulary


def read_config(directory: str | Path) -> ModelConfig:
    """The model described by `directory`/config.json. Raises UserError listing everything that cannot be used."""
    directory = Path(directory)
    path = directory / "config.json"
    if not directory.is_dir():
        raise UserError(_no_directory(str(directory)))
    if not path.exists():
        raise UserError(f"{directory} has no config.json: model.path must be a model's directory{_instead(directory)}")
    return parse_config(read_json(path), str(path))


_GGUF = "dtrain reads no GGUF, the files of llama.cpp: give the original model, config.json with *.safetensors"


def _instead(directory: Path) -> str:
    """What to add where `directory` holds something else."""
    if any(directory.glob("*.gguf")):
        return f"; {_GGUF}"
    if (directory / "export" / "config.json").is_file():
        return f"; this is a run's, so set model.path={directory / 'export'}"
    if (directory / "checkpoints").is_dir():
        return f"; this is a run's: `dtrain export {directory} OUT`, and set model.path=OUT"
    inner = next((path.parent for path in sorted(directory.glob("*/config.json"))), None)
    return f"; there is one in {inner}" if inner else ""


def _no_directory(name: str) -> str:
    if name.lower().endswith(".gguf"):
        return f"model.path={name}: {_GGUF}"
    if Path(name).is_file():
        return (
            f"model.path={name} is a file: give the directory that holds config.json, *.safetensors and the tokenizer"
        )
    message = f"model.path: there is no directory {name!r}"
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", name):
        message += f"; for a model of the Hugging Face hub, `dtrain download {name}` fetches it and says where it is"
    return message


def parse_config(values: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """The model that the fields of a config.json describe; `where` names the file in errors (UserError)."""
    architecture = _architecture(values, where)
    problems: list[str] = []
    quantization = values.get("quantization_config")
    values = {key: value for key, value in values.items() if key != "quantization_config"}
    config = _READERS[architecture](architecture, Fields(values, problems))
    if quantization:
        config = replace(config, unquantized=unquantized(quantization, problems))
    if not problems and config.parameters > MOST_PARAMETERS:
        problems.append(
            f"sizes of {config.parameters:,} parameters, {config.parameters * 2 >> 40:,} TiB in bfloat16: no memory "
            "holds them; check vocab_size, hidden_size, intermediate_size and num_hidden_layers"
        )
    if problems:
        raise UserError("\n".join([f"{where}: {architecture} with", *(f"  - {problem}" for problem in problems)]))
    return config


def _architecture(values: dict[str, Any], where: str) -> str:
    kind = values.get("model_type")
    named = values.get("architectures") or [_MODEL_TYPES.get(kind, kind) if isinstance(kind, str) else kind]
    named = named if isinstance(named, list) else [named]
    for name in named:
        if isinstance(name, str) and name in _READERS:
            return name
    names = " or ".join(map(str, named[:5]))[:200]
    raise UserError(f"{where}: architecture {names} is not supported; there are: {', '.join(_READERS)}")


def _common(
    architecture: str,
    fields: Fields,
    *,
    activation: tuple[str, str | None] = ("hidden_act", "silu"),
    kv_heads: int | None = None,
    head_dim: int | None = None,
    pad: int | None = None,
    tie: bool = False,
) -> dict[str, Any]:
    """What every family reads in the same way; the keywords are its own defaults (activation: the key, its default)."""
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    # A missing key takes the family's default, null means one for each query head.
    kv_heads = fields.integer("num_key_value_heads", heads if "num_key_value_heads" in fields else kv_heads or heads)
    if heads % kv_heads:
        fields.problem(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    if head_dim is None and fields.get("head_dim") is None and hidden % heads:
        fields.problem(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    head_dim = fields.integer("head_dim", head_dim or max(hidden // heads, 1))
    if head_dim % 2:
        fields.problem(f"head_dim {head_dim} is odd, rotary embeddings need pairs")
    vocab = fields.integer("vocab_size")
    pad = fields.token("pad_token_id", pad)
    if pad is not None and not -vocab <= pad < vocab:
        fields.problem(f"pad_token_id {pad} outside of the vocabulary of {vocab}")
    for key in ("attention_dropout", "resid_pdrop", "embd_pdrop", "hidden_dropout"):
        fields.must_be_off(key, "dropout is not implemented; set it to 0.0")
    fields.must_be_off("use_bidirectional_attention", "only causal attention is implemented")
    return {
        "architecture": architecture,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": fields.integer("intermediate_size"),
        "num_hidden_layers": fields.integer("num_hidden_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": fields.integer("max_position_embeddings"),
        "hidden_act": _ACTIVATIONS[fields.choice(activation[0], tuple(_ACTIVATIONS), activation[1])],
        "rms_norm_eps": fields.number("rms_norm_eps", 1e-6, most=1.0),
        # transformers reads 0 as "unset"
        "initializer_range": fields.number("initializer_range", 0.02, zero=True, most=100.0) or 0.02,
        "tie_word_embeddings": fields.flag("tie_word_embeddings", tie),
        "attention_scale": head_dim**-0.5,
        "bos_token_id": fields.token("bos_token_id"),
        "eos_token_ids": fields.tokens("eos_token_id"),
        "pad_token_id": pad,
        "dtype": fields.dtype(),
    }


# transformers' names of activations, and ours.
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_pytorch_tanh",
    "gelu_new": "gelu_pytorch_tanh",  # the same formula, written out
    "relu": "relu",
}


def _with_one_rope(
    fields: Fields,
    share: float | None = None,
    theta: float = 10_000.0,
    scales_queries: bool = False,
    **values: Any,
) -> ModelConfig:
    """share, theta, scales_queries: as `read_rope` takes them."""
    rope = read_rope(fields, values["max_position_embeddings"], values["head_dim"], share, theta, scales_queries)
    fields.refuse_the_rest()
    return ModelConfig(**values, ropes=dict.fromkeys(values["layer_types"], rope))


def _layer_types(
    fields: Fields, count: int, default: list[str], fixed: bool = False, kinds: tuple[str, str] = (FULL, SLIDING)
) -> tuple[str, ...]:
    """`layer_types` as written, or the default; where the family fixes them, what is written must agree."""
    written = fields.get("layer_types")
    if written is None:
        return tuple(default)
    if not isinstance(written, list) or not all(kind in kinds for kind in written):
        fields.problem(f"layer_types {shown(written)}: entries must be {' or '.join(kinds)}")
    elif len(written) != count:
        fields.problem(f"layer_types has {len(written)} entries for num_hidden_layers {count}")
    elif fixed and written != default:
        fields.problem(f"layer_types {shown(written)}: in this architecture every layer is {default[0]} here")
    else:
        return tuple(written)
    return tuple(default)


def _written_window(fields: Fields) -> int | None:
    """null is no window; transformers takes an absent key for 4096, in every family that has the field."""
    return fields.optional_integer("sliding_window", None if "sliding_window" in fields else 4096)


def _used_window(fields: Fields, layer_types: tuple[str, ...], window: int | None) -> int | None:
    if SLIDING not in layer_types:
        return None
    if window is None:
        fields.problem("layer_types has sliding_attention, but no sliding_window is set")
    return window


def _llama(architecture: str, fields: Fields) -> ModelConfig:
    common = _common(architecture, fields)
    bias, count = fields.flag("attention_bias", False), common["num_hidden_layers"]
    return _with_one_rope(
        fields,
        **common,
        layer_types=_layer_types(fields, count, [FULL] * count, fixed=True),
        sliding_window=None,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
    )


def _mistral(architecture: str, fields: Fields, tie: bool = False, is_text_tower: bool = False) -> ModelConfig:
    common = _common(architecture, fields, kv_heads=8, tie=tie)
    window, count = _written_window(fields), common["num_hidden_layers"]
    types = _layer_types(fields, count, [FULL if window is None else SLIDING] * count, fixed=True)
    values = {**common, "layer_types": types, "sliding_window": window, "is_text_tower": is_text_tower}
    return _with_one_rope(fields, **values)


# What Ministral 3's files may leave out, and the same of Mistral Small's text_config.
_MINISTRAL3_DEFAULTS = {
    "vocab_size": 131_072,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 34,
    "num_attention_heads": 32,
    "max_position_embeddings": 262_144,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1_000_000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 16_384,
        "mscale_all_dim": 1.0,
        "mscale": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}


def _ministral3(architecture: str, fields: Fields, tie: bool = False, is_text_tower: bool = False) -> ModelConfig:
    fields = fields.over(_MINISTRAL3_DEFAULTS)
    common = _common(architecture, fields, kv_heads=8, head_dim=128, pad=11, tie=tie)
    window, count = fields.optional_integer("sliding_window"), common["num_hidden_layers"]
    types = _layer_types(fields, count, [FULL if window is None else SLIDING] * count, fixed=True)
    values = {**common, "layer_types": types, "sliding_window": window, "is_text_tower": is_text_tower}
    return _with_one_rope(fields, scales_queries=True, **values)


def _mistral3_multimodal(architecture: str, fields: Fields) -> ModelConfig:
    """A text tower of either kind. Where neither level says so it is untied, as the published files are."""
    fields.known("vision_config", "image_token_index", "projector_hidden_act", "vision_feature_layer")
    fields.known("multimodal_projector_bias", "spatial_merge_size")
    text = fields.get("text_config")
    is_scaled = isinstance(text, dict) and text.get("model_type") == "ministral3"
    return _text_tower(architecture, fields, _ministral3 if is_scaled else _mistral, tie=False)


def _qwen2(
    architecture: str, fields: Fields, tie: bool = False, is_text_tower: bool = False, theta: float = 10_000.0
) -> ModelConfig:
    if fields.get("attention_bias") is False:
        fields.problem("attention_bias false: Qwen2 always has biases on q, k and v")
    common = _common(architecture, fields, kv_heads=32, tie=tie)
    layers = _qwen_layers(fields, common["num_hidden_layers"])
    return _with_one_rope(fields, theta=theta, **common, **layers, qkv_bias=True, is_text_tower=is_text_tower)


_IMAGES = ("vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


def _qwen2_5_vl(architecture: str, fields: Fields) -> ModelConfig:
    """The text tower, described by `text_config`, or, in the first files, beside the rest."""
    fields.known(*_IMAGES, "vision_token_id")
    defaults = {"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "max_window_layers": 80, "eos_token_id": 151_645}

    def read(architecture: str, text: Fields, tie: bool, is_text_tower: bool) -> ModelConfig:
        return _qwen2(architecture, text.over(defaults), tie, is_text_tower, theta=1_000_000.0)

    if isinstance(fields.get("text_config"), dict):
        return _text_tower(architecture, fields, read, tie=False)
    return read(architecture, fields, tie=False, is_text_tower=True)


def _qwen3_vl(architecture: str, fields: Fields) -> ModelConfig:
    fields.known(*_IMAGES)

    def read(architecture: str, text: Fields, tie: bool, is_text_tower: bool) -> ModelConfig:
        common = _common(architecture, text, kv_heads=32, head_dim=128, tie=tie)
        bias, count = text.flag("attention_bias", False), common["num_hidden_layers"]
        types = _layer_types(text, count, [FULL] * count, fixed=True)
        values = {**common, "layer_types": types, "sliding_window": None, "is_text_tower": is_text_tower}
        return _with_one_rope(text, theta=500_000.0, **values, qkv_bias=bias, o_bias=bias)

    return _text_tower(architecture, fields, read, tie=False)


def _qwen3(architecture: str, fields: Fields) -> ModelConfig:
    common = _common(architecture, fields, kv_heads=32, head_dim=128)
    bias = fields.flag("attention_bias", False)
    layers = _qwen_layers(fields, common["num_hidden_layers"])
    return _with_one_rope(fields, **common, **layers, qkv_bias=bias, o_bias=bias)


def _qwen_layers(fields: Fields, count: int) -> dict[str, Any]:
    """The window counts only where it is switched on, from a certain layer upwards."""
    window, switched_on = _written_window(fields), fields.flag("use_sliding_window", False)
    window = window if switched_on else None
    full_layers = fields.integer("max_window_layers", 28, minimum=0)
    default = [SLIDING if window is not None and index >= full_layers else FULL for index in range(count)]
    types = _layer_types(fields, count, default)
    return {"layer_types": types, "sliding_window": _used_window(fields, types, window)}


# What published Qwen3.5 checkpoints may leave out.
_QWEN3_5_DEFAULTS = {
    "vocab_size": 248_320,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "max_position_embeddings": 32_768,
}


def _qwen3_5(architecture: str, fields: Fields, tie: bool = False, is_text_tower: bool = False) -> ModelConfig:
    fields = fields.over(_QWEN3_5_DEFAULTS)
    fields.known("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")  # a head of its own, which is carried along
    for key, value in (("attn_output_gate", True), ("mamba_ssm_dtype", "float32"), ("output_gate_type", "swish")):
        if fields.get(key) not in (None, value):
            fields.problem(f"{key} {shown(fields.get(key))}: only {shown(value)} is implemented")
    common = _common(architecture, fields, kv_heads=4, head_dim=256, tie=tie)
    bias, count = fields.flag("attention_bias", False), common["num_hidden_layers"]
    interval = fields.integer("full_attention_interval", 4)
    types = _layer_types(
        fields, count, [LINEAR if (n + 1) % interval else FULL for n in range(count)], kinds=(FULL, LINEAR)
    )
    linear = LinearAttention(
        key_heads=fields.integer("linear_num_key_heads", 16),
        value_heads=fields.integer("linear_num_value_heads", 32),
        key_dim=fields.integer("linear_key_head_dim", 128),
        value_dim=fields.integer("linear_value_head_dim", 128),
        width=fields.integer("linear_conv_kernel_dim", 4, minimum=2),
    )
    if linear.value_heads % linear.key_heads:
        fields.problem(
            f"linear_num_value_heads {linear.value_heads} is not a multiple of linear_num_key_heads {linear.key_heads}"
        )
    rope = read_rope(fields, common["max_position_embeddings"], common["head_dim"], share=0.25)
    fields.refuse_the_rest()
    joined = ("in_proj_qkv", "conv1d")
    return ModelConfig(
        **common,
        layer_types=types,
        sliding_window=None,
        ropes=dict.fromkeys(types, rope),
        qkv_bias=bias,
        o_bias=bias,
        attention_gate=True,
        linear=linear,
        is_text_tower=is_text_tower,
        fused={one: tuple(f"{one.removesuffix('_qkv')}_{part}" for part in "qkv") for one in joined},
        unnamed=("decay",),
    )


def _qwen3_5_multimodal(architecture: str, fields: Fields) -> ModelConfig:
    fields.known("vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    fields.known("language_model_only")
    return _text_tower(architecture, fields, _qwen3_5, tie=False)


def _phi3(architecture: str, fields: Fields) -> ModelConfig:
    fields = fields.over({"rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 32_000})
    common = _common(architecture, fields, pad=32_000)
    window, count = fields.optional_integer("sliding_window"), common["num_hidden_layers"]
    types = _layer_types(fields, count, [FULL if window is None else SLIDING] * count, fixed=True)
    fused = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    return _with_one_rope(fields, 1.0, **common, layer_types=types, sliding_window=window, fused=fused)


_OLMO_DEFAULTS = {"rms_norm_eps": 1e-5, "eos_token_id": 50_279, "max_position_embeddings": 2048}


def _olmo2(architecture: str, fields: Fields) -> ModelConfig:
    common = _common(architecture, fields := fields.over(_OLMO_DEFAULTS), pad=1)
    bias, count = fields.flag("attention_bias", False), common["num_hidden_layers"]
    types = _layer_types(fields, count, [FULL] * count, fixed=True)
    return _with_one_rope(fields, **common, layer_types=types, sliding_window=None, qkv_bias=bias, o_bias=bias)


def _olmo3(architecture: str, fields: Fields) -> ModelConfig:
    common = _common(architecture, fields := fields.over(_OLMO_DEFAULTS), pad=1)
    bias, count = fields.flag("attention_bias", False), common["num_hidden_layers"]
    types = _layer_types(fields, count, [SLIDING if (index + 1) % 4 else FULL for index in range(count)])
    ropes = read_olmo_ropes(fields, common["max_position_embeddings"], FULL, SLIDING)
    window = _used_window(fields, types, _written_window(fields))
    fields.refuse_the_rest()
    return ModelConfig(**common, layer_types=types, sliding_window=window, ropes=ropes, qkv_bias=bias, o_bias=bias)


_SMOLLM3_DEFAULTS = {"bos_token_id": 128_000, "eos_token_id": 128_001, "max_position_embeddings": 32_768}


def _smollm3(architecture: str, fields: Fields) -> ModelConfig:
    common = _common(architecture, fields := fields.over(_SMOLLM3_DEFAULTS), kv_heads=4, pad=128_004, tie=True)
    bias, count = fields.flag("attention_bias", False), common["num_hidden_layers"]
    fields.known("max_window_layers")  # of Qwen2, whose config was the model's first
    interval = fields.integer("no_rope_layer_interval", 4)
    written = fields.get("no_rope_layers")  # 1 for a layer that is rotated
    turned = [int((index + 1) % interval != 0) for index in range(count)] if written is None else written
    if not isinstance(turned, list) or any(one not in (0, 1) for one in turned) or len(turned) < count:
        fields.problem(f"no_rope_layers {shown(written)}: must be a list of 0 and 1, one a layer")
        turned = [1] * count
    unturned = tuple(index for index in range(count) if not turned[index])
    window = fields.optional_integer("sliding_window")
    window = window if fields.flag("use_sliding_window", False) else None
    default = [SLIDING if window is not None and index in unturned else FULL for index in range(count)]
    types = _layer_types(fields, count, default)
    return _with_one_rope(
        fields,
        theta=2_000_000.0,
        **common,
        layer_types=types,
        sliding_window=_used_window(fields, types, window),
        unturned=unturned,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
    )


def _granite(
    architecture: str, fields: Fields, inner: int | None = None, fused: Mapping[str, tuple[str, ...]] | None = None
) -> ModelConfig:
    """inner: an intermediate_size of another name."""
    common = _common(architecture, fields := fields.over({"bos_token_id": 1, "eos_token_id": 2}))
    common["intermediate_size"] = inner or common["intermediate_size"]
    common["attention_scale"] = fields.number("attention_multiplier", 1.0)
    bias, count = fields.flag("attention_bias", False), common["num_hidden_layers"]
    return _with_one_rope(
        fields,
        **common,
        layer_types=_layer_types(fields, count, [FULL] * count, fixed=True),
        sliding_window=None,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
        embedding_multiplier=fields.number("embedding_multiplier", 1.0),
        residual_multiplier=fields.number("residual_multiplier", 1.0),
        logits_scaling=fields.number("logits_scaling", 1.0),
        fused=fused or {},
    )


_DENSE = "only Granite 4's dense models are read, such as ibm-granite/granite-4.0-micro"
# Of experts and mamba layers, which dense models do not have.
_UNUSED = """num_experts_per_tok output_router_logits router_aux_loss_coef time_step_limit init_method mamba_n_heads
mamba_n_groups mamba_d_state mamba_d_head mamba_d_conv mamba_expand mamba_chunk_size mamba_conv_bias mamba_proj_bias"""


def _granite_hybrid(architecture: str, fields: Fields) -> ModelConfig:
    fields = fields.over({"intermediate_size": 11_008, "position_embedding_type": "none"})
    fields.known(*_UNUSED.split(), "layers_block_type")
    experts = fields.integer("num_local_experts", 8, minimum=0)
    if experts:
        fields.problem(f"num_local_experts {experts}: a mixture of experts; {_DENSE}")
    types = fields.get("layers_block_type") or fields.get("layer_types") or []
    if not isinstance(types, list) or not types or any(kind not in ("attention", FULL) for kind in types):
        fields.problem(f"layer_types {shown(types or 'missing')}: layers of mamba; {_DENSE}")
    for key, only in (("position_embedding_type", "rope"), ("normalization_function", "rmsnorm")):
        fields.choice(key, (only,), only)
    # Said already; the rest of the file is that of Granite 3.
    dense = fields.without("layer_types")
    fused = {"input_linear": ("gate_proj", "up_proj")}
    return _granite(architecture, dense, fields.integer("shared_intermediate_size", 1024), fused)


# What the published Gemma3 checkpoints leave out of their text_config.
_GEMMA3_DEFAULTS = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "eos_token_id": 1,
    "bos_token_id": 2,
}


def _gemma3(architecture: str, fields: Fields, tie: bool = True, is_text_tower: bool = False) -> ModelConfig:
    fields = fields.over(_GEMMA3_DEFAULTS)
    fields.must_be_off("attn_logit_softcapping", "capping attention logits is not implemented")
    if fields.get("hidden_act") is not None:
        fields.problem("hidden_act: Gemma3 reads hidden_activation")
    common = _common(architecture, fields, activation=("hidden_activation", None), pad=0, tie=tie)
    common["attention_scale"] = fields.number("query_pre_attn_scalar", 256) ** -0.5
    bias, count = fields.flag("attention_bias", False), common["num_hidden_layers"]
    spellings = ("sliding_window_pattern", "_sliding_window_pattern")
    pattern = next(filter(None, [fields.optional_integer(key) for key in spellings]), 6)
    types = _layer_types(fields, count, [SLIDING if (index + 1) % pattern else FULL for index in range(count)])
    values = {
        **common,
        "layer_types": types,
        "sliding_window": _used_window(fields, types, _written_window(fields)),
        "ropes": read_gemma_ropes(fields, common["max_position_embeddings"], FULL, SLIDING),
        "qkv_bias": bias,
        "o_bias": bias,
        "final_logit_softcapping": fields.optional_number("final_logit_softcapping"),
    }
    fields.refuse_the_rest()
    return ModelConfig(**values, is_text_tower=is_text_tower)


def _gemma3_multimodal(architecture: str, fields: Fields) -> ModelConfig:
    """The text tower: `text_config` describes it, the rest of the file images and tokens."""
    fields.known("vision_config", "mm_tokens_per_image", "initializer_range", "audio_config")
    fields.known("boi_token_index", "eoi_token_index", "image_token_index")
    return _text_tower(architecture, fields, _gemma3, tie=True)


# What published Gemma4 checkpoints may leave out.
_GEMMA4_DEFAULTS = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "sliding_window": 512,
    "eos_token_id": 1,
    "bos_token_id": 2,
}


def _gemma4(architecture: str, fields: Fields, tie: bool = True, is_text_tower: bool = False) -> ModelConfig:
    fields = fields.over(_GEMMA4_DEFAULTS)
    fields.must_be_off("enable_moe_block", "mixture of experts is not implemented; the dense models are E2B, E4B, 31B")
    fields.known("num_experts", "top_k_experts", "moe_intermediate_size")  # of experts, which are off
    if fields.get("use_bidirectional_attention") == "vision":  # among an image's tokens; text is causal
        fields = fields.without("use_bidirectional_attention")
    common = _common(architecture, fields, activation=("hidden_activation", None), head_dim=256, pad=0, tie=tie)
    common["attention_scale"] = 1.0  # q and k are normed, and their weights trained to it
    bias, count = fields.flag("attention_bias", False), common["num_hidden_layers"]
    types = _layer_types(fields, count, [SLIDING if (index + 1) % 6 else FULL for index in range(count)])
    types = (*types[:-1], FULL)  # as transformers has it, whatever is written
    heads = _gemma4_heads(fields, types, common)
    shared = fields.integer("num_kv_shared_layers", 0, minimum=0)
    if missing := sorted(set(types) - set(types[: max(0, count - shared)])):
        fields.problem(
            f"num_kv_shared_layers {shared} of {count}: no layer before these has keys of {' and '.join(missing)}"
        )
        shared = 0
    size = fields.integer("hidden_size_per_layer_input", 256, minimum=0)
    rows = fields.integer("vocab_size_per_layer_input", 262_144)
    if size and rows < common["vocab_size"]:
        fields.problem(
            f"vocab_size_per_layer_input {rows} is less than vocab_size {common['vocab_size']}: the tokens beyond it "
            "have no row"
        )
    max_positions, sizes = common["max_position_embeddings"], {kind: one.size for kind, one in heads.items()}
    values = {
        **common,
        "layer_types": types,
        "sliding_window": _used_window(fields, types, _written_window(fields)),
        "ropes": read_gemma4_ropes(fields, max_positions, FULL, SLIDING, sizes),
        "qkv_bias": bias,
        "o_bias": bias,
        "final_logit_softcapping": fields.optional_number("final_logit_softcapping"),
        "key_heads": heads,
        "shared_layers": shared,
        "shared_width": 2 if fields.flag("use_double_wide_mlp", False) else 1,
        "per_layer": PerLayer(rows, size) if size else None,
    }
    fields.refuse_the_rest()
    return ModelConfig(**values, is_text_tower=is_text_tower)


def _gemma4_heads(fields: Fields, types: tuple[str, ...], common: Mapping[str, Any]) -> dict[str, KeyHeads]:
    """Full layers have sizes of their own: `global_head_dim` and `num_global_key_value_heads`, or, where transformers
    has written the file, `per_layer_config`, an object for each layer."""
    tied = fields.flag("attention_k_eq_v", False)
    size = fields.integer("global_head_dim", 512)
    count = fields.optional_integer("num_global_key_value_heads") if tied else None
    fields.known("num_global_key_value_heads")  # without attention_k_eq_v it says nothing
    own = {"head_dim": size} | ({} if count is None else {"num_key_value_heads": count})
    written = fields.get("per_layer_config")
    if written is None:
        written = {str(index): own for index, kind in enumerate(types) if kind == FULL}
    problem = (
        f"per_layer_config {shown(written)}: must give head_dim and num_key_value_heads, alike in layers of a type"
    )
    heads: dict[str, KeyHeads] = {}
    for index, kind in enumerate(types):
        one = written.get(str(index), {}) if isinstance(written, dict) else None
        if not isinstance(one, dict) or set(one) - {"head_dim", "num_key_value_heads"}:
            fields.problem(problem)
            one = {}
        of_layer = Fields(one, fields.problems, prefix=f"per_layer_config.{index}.")
        found = KeyHeads(
            of_layer.integer("num_key_value_heads", common["num_key_value_heads"]),
            of_layer.integer("head_dim", common["head_dim"]),
            tied and kind == FULL,
        )
        if heads.setdefault(kind, found) != found:
            fields.problem(problem)
    for kind, found in heads.items():
        if common["num_attention_heads"] % found.count:
            queries = common["num_attention_heads"]
            fields.problem(f"num_attention_heads {queries} is not a multiple of the {found.count} KV heads of {kind}")
        if found.size % 2:
            fields.problem(f"head_dim {found.size} of {kind} is odd, rotary embeddings need pairs")
    return heads


def _gemma4_multimodal(architecture: str, fields: Fields) -> ModelConfig:
    fields.known("vision_config", "audio_config", "initializer_range", "vision_soft_tokens_per_image")
    fields.known("boi_token_id", "eoi_token_id", "boa_token_id", "eoa_token_id", "eoa_token_index")
    fields.known("image_token_id", "video_token_id", "audio_token_id")
    return _text_tower(architecture, fields, _gemma4, tie=True)


def _text_tower(architecture: str, fields: Fields, read: Callable[..., ModelConfig], tie: bool) -> ModelConfig:
    """What `read` makes of `text_config`; tie: the family's default of tie_word_embeddings."""
    text = fields.get("text_config") or {}
    if not isinstance(text, dict):
        fields.problem(f"text_config {shown(text)} is no object")
        text = {}
    # The files' own end-of-turn tokens stand at the top, beside those of the text model.
    outer = {key: fields.get(key) for key in ("eos_token_id", "torch_dtype", "dtype") if fields.get(key) is not None}
    said = None if fields.get("tie_word_embeddings") is None else fields.flag("tie_word_embeddings", tie)
    if said is not None and text.get("tie_word_embeddings", said) != said:
        fields.problem("tie_word_embeddings is not the same at the top and in text_config")
    fields.refuse_the_rest()
    inner = Fields({**text, **outer}, fields.problems, prefix="text_config.")
    return read(architecture, inner, tie=tie if said is None else said, is_text_tower=True)


_READERS: dict[str, Callable[[str, Fields], ModelConfig]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Ministral3ForCausalLM": _ministral3,
    "Mistral3ForConditionalGeneration": _mistral3_multimodal,
    "Qwen2_5_VLForConditionalGeneration": _qwen2_5_vl,
    "Qwen3VLForConditionalGeneration": _qwen3_vl,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "Phi3ForCausalLM": _phi3,
    "Olmo2ForCausalLM": _olmo2,
    "Olmo3ForCausalLM": _olmo3,
    "SmolLM3ForCausalLM": _smollm3,
    "GraniteForCausalLM": _granite,
    "GraniteMoeHybridForCausalLM": _granite_hybrid,
    "Qwen3_5ForCausalLM": _qwen3_5,
    "Qwen3_5ForConditionalGeneration": _qwen3_5_multimodal,
    "Gemma3ForCausalLM": _gemma3,
    "Gemma3ForConditionalGeneration": _gemma3_multimodal,
    "Gemma4ForCausalLM": _gemma4,
    "Gemma4ForConditionalGeneration": _gemma4_multimodal,
}

# For files without `architectures`, such as those that models from scratch are described by.
_MODEL_TYPES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral3": "Mistral3ForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",
    "gemma4_text": "Gemma4ForCausalLM",
    "gemma4": "Gemma4ForConditionalGeneration",
}
