"""Reading the fields of a config.json: typed, with every problem collected, and nothing passed over in silence.

`read_unquantized_modules` reads the `quantization_config` of bitsandbytes' checkpoints.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, Self

from dtrain.base.name_patterns import pattern_error

# Fields that config.json files carry and that change no number of a causal decoder's training.
IGNORED_FIELDS = frozenset(
    """
    architectures model_type transformers_version name_or_path _name_or_path _commit_hash auto_map torch_dtype dtype
    use_cache output_attentions output_hidden_states return_dict use_return_dict torchscript use_bfloat16 is_decoder
    attn_implementation _attn_implementation _attn_implementation_autoset _attn_implementation_internal
    _experts_implementation_internal _flash_attn_2_enabled use_flash_attn use_flash_attention_2 _output_attentions
    chunk_size_feed_forward tie_last_hidden_states keys_to_ignore_at_inference tie_encoder_decoder tf_legacy_loss
    id2label label2id num_labels problem_type finetuning_task task_specific_params prefix tokenizer_class
    bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id cls_token_id mask_token_id decoder_start_token_id
    image_token_id boi_token_id eoi_token_id
    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p
    typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
    num_return_sequences output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id
    remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens max_new_tokens
    epsilon_cutoff eta_cutoff encoder_repetition_penalty num_assistant_tokens num_assistant_tokens_schedule
    assistant_confidence_threshold assistant_lookbehind target_lookbehind cache_implementation generation_config
    model_max_length tokenizer_model_max_length max_sequence_length seq_length tokenizer_padding_side
    unsloth_fixed unsloth_version transformers.js_config neftune_noise_alpha
    pretraining_tp
    """.split()
    # pretraining_tp: how transformers 4 may cut its matrix products, whose sum is the same.
)

# The largest that a whole number may be, by its field; others end at LARGEST. Ten times and more what is published.
MAX_INTEGER = 2**31 - 1
MAX_SIZES = {
    "vocab_size": 2**24,
    "hidden_size": 2**20,
    "intermediate_size": 2**22,
    "num_hidden_layers": 2**11,
    "num_attention_heads": 2**14,
    "num_key_value_heads": 2**14,
    "head_dim": 2**13,
}
DTYPES = ("float64", "float32", "float16", "bfloat16", "auto")

_READABLE_FORMATS = "of quantized weights only bitsandbytes' nf4, mxfp4, and fp8 in blocks of 128 × 128 are read"
_USE_ORIGINAL = "; use the original checkpoint"
_USE_SIBLING = (
    "take the model in bfloat16, by the same name without -FP8, -AWQ, -GPTQ-Int4 or -bnb-8bit (Qwen, Meta), or with "
    "-BF16 (Mistral)"
)


class Fields:
    """The fields of one JSON object. A missing or null field takes its default; one of the wrong kind is a problem
    and takes a value to go on with. What was never asked for, and is not harmless, is refused at the end."""

    def __init__(self, values: Mapping[str, Any], problems: list[str], prefix: str = ""):
        self._values = values
        self._used: set[str] = set()
        self._prefix = prefix
        self.problems = problems

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def with_defaults(self, defaults: Mapping[str, Any]) -> Self:
        """The same fields, with `defaults` where one is missing or null."""
        set_here = {key: value for key, value in self._values.items() if value is not None or key not in defaults}
        return self._with({**defaults, **set_here})

    def without(self, key: str) -> Self:
        """The same fields without `key`."""
        return self._with({name: value for name, value in self._values.items() if name != key})

    def _with(self, values: Mapping[str, Any]) -> Self:
        fields = type(self)(values, self.problems, self._prefix)
        fields._used = self._used
        return fields

    def add_problem(self, text: str) -> None:
        self.problems.append(self._prefix + text)

    def ignore(self, *keys: str) -> None:
        """Mark `keys` as fields that are none of ours."""
        self._used.update(keys)

    def get(self, key: str) -> Any:
        self._used.add(key)
        return self._values.get(key)

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        value, most = self._or_default(key, default), MAX_SIZES.get(key, MAX_INTEGER)
        fits = isinstance(value, int) and not isinstance(value, bool) and minimum <= value <= most
        words = f": must be a whole number of at least {minimum} and at most {most}"
        return self._checked(fits, key, value, minimum, words)

    def optional_integer(self, key: str, default: int | None = None) -> int | None:
        """Return what `integer` does; None where there is neither a field nor a default."""
        return None if self.get(key) is None and default is None else self.integer(key, default)

    def number(
        self, key: str, default: float | None = None, *, least: float = 0.0, most: float = 1e6, zero: bool = False
    ) -> float:
        """A number above `least` and up to `most`; zero: or 0."""
        value = self._or_default(key, default)
        fits = is_number(value) and (least < value <= most or (zero and value == 0))  # NaN is neither
        words = f": must be a number above {least:g} and at most {most:g}{', or 0' if zero else ''}"
        return float(self._checked(fits, key, value, most, words))

    def optional_number(self, key: str, *, zero: bool = False) -> float | None:
        """Return what `number` does; None where there is no field."""
        return None if self.get(key) is None else self.number(key, zero=zero)

    def flag(self, key: str, default: bool) -> bool:
        value = self._or_default(key, default)
        return self._checked(isinstance(value, bool), key, value, default, ": must be true or false")

    def choice(self, key: str, choices: tuple[str, ...], default: str | None) -> str:
        value = self._or_default(key, default)
        words = f" is not implemented; there are: {', '.join(choices)}"
        return self._checked(value in choices, key, value, choices[0], words)

    def token_id(self, key: str, default: int | None = None) -> int | None:
        """A token id, of a list the first; null is none, and only a missing field takes the default."""
        value: Any = self.get(key) if key in self else default
        if isinstance(value, list):
            value = value[0] if value else None
        return self._checked(_is_token(value), key, value, None, ": must be a token id")

    def token_ids(self, key: str) -> tuple[int, ...]:
        value = self.get(key)
        values = value if isinstance(value, list) else [] if value is None else [value]
        if all(map(_is_token, values)):
            return tuple(values)
        self.add_problem(f"{key} {format_value(value)}: must be a token id or a list of them")
        return ()

    def dtype(self) -> str | None:
        """Read the dtype: transformers 5 writes `dtype`, 4 `torch_dtype`; "auto" says nothing."""
        value = self.get("dtype") or self.get("torch_dtype")
        name = value.removeprefix("torch.") if isinstance(value, str) else value
        if name is not None and name not in DTYPES:
            self.add_problem(f"dtype {format_value(value)} is not read; there are: {', '.join(DTYPES)}")
        return None if name == "auto" else name

    def must_be_off(self, key: str, reason: str) -> None:
        if self.get(key):
            self.add_problem(f"{key} {format_value(self._values[key])}: {reason}")

    def refuse_the_rest(self) -> None:
        """Add a problem for every field not asked for, unless it is harmless or switched off."""
        for key, value in self._values.items():
            if key not in self._used and key not in IGNORED_FIELDS and value:
                name = format_value(key)[1:-1]
                self.add_problem(
                    f"{name} {format_value(value)}: not a field that dtrain knows; it may change the numbers"
                )

    def _or_default(self, key: str, default: Any) -> Any:
        value = self.get(key)
        if value is None and default is None:
            self.add_problem(f"{key} is missing")
        return default if value is None else value

    def _checked(self, fits: bool, key: str, value: Any, otherwise: Any, words: str) -> Any:
        """Return `value` if it fits; else what to go on with, `otherwise`, and a problem of these words."""
        if not fits and value is not None:
            self.add_problem(f"{key} {format_value(value)}{words}")
        return value if fits else otherwise


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -MAX_INTEGER <= value <= MAX_INTEGER


def format_value(value: Any) -> str:
    """The value in a message, cut to one line."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _other_format_hint(values: dict[str, Any]) -> str:
    """Return what to say of weights in a format that is known."""
    method = values.get("quant_method")
    if method == "bitsandbytes" and values.get("load_in_8bit", values.get("_load_in_8bit")):
        return f"{_USE_ORIGINAL}; bitsandbytes weights in 8 bits are not trained: {_USE_SIBLING}"
    known = ("fp8", "fbgemm_fp8", "finegrained_fp8", "awq", "gptq", "compressed-tensors", "modelopt", "hqq")
    return f"{_USE_ORIGINAL}; {method} weights are not trained: {_USE_SIBLING}" if method in known else _USE_ORIGINAL


def _is_unpacked(values: dict[str, Any]) -> bool:
    """Return whether weights with this section are read as bfloat16 (`checkpoint.huggingface.safetensor_files`)."""
    is_fp8 = values.get("quant_method") == "fp8" and values.get("weight_block_size") == [128, 128]
    is_plain = values.get("activation_scheme", "dynamic") == "dynamic" and values.get("fmt", "e4m3") == "e4m3"
    return values.get("quant_method") == "mxfp4" or (is_fp8 and is_plain)


def read_unquantized_modules(section: Any, problems: list[str]) -> tuple[str, ...] | None:
    """The patterns of modules that a checkpoint with this section, in 4 bits, holds as they were; None of one that is
    read as bfloat16. What dtrain does not read is added to `problems`: everything but bitsandbytes' nf4, mxfp4, and fp8
    in blocks."""
    values = section if isinstance(section, dict) else {}
    if _is_unpacked(values):
        return None
    kind, storage = values.get("bnb_4bit_quant_type", "fp4"), values.get("bnb_4bit_quant_storage") or "uint8"
    if values.get("quant_method") != "bitsandbytes" or not values.get("load_in_4bit", values.get("_load_in_4bit")):
        problems.append(f"quantization_config {format_value(section)}: {_READABLE_FORMATS}{_other_format_hint(values)}")
    elif kind != "nf4":
        problems.append(
            f"quantization_config has bnb_4bit_quant_type {format_value(kind)}: {_READABLE_FORMATS}{_USE_ORIGINAL}"
        )
    elif storage not in ("uint8", "torch.uint8"):
        problems.append(f"quantization_config has bnb_4bit_quant_storage {format_value(storage)}: only uint8 is read")
    patterns = values.get("llm_int8_skip_modules") or []
    if not isinstance(patterns, list) or not all(map(_is_pattern, patterns)):
        problems.append("quantization_config llm_int8_skip_modules: must be a list of names or regular expressions")
        return ()
    return tuple(patterns)


def is_unquantized(patterns: Iterable[str], name: str) -> bool:
    """Return whether the module of this name is left as it was, as transformers matches names: a pattern is the name's
    beginning up to a dot, as it stands or as a regular expression, or its end."""
    return any(re.fullmatch(_from_start(pattern), name) or name.endswith(pattern) for pattern in patterns)


def _from_start(pattern: str) -> str:
    """The expression for whole names of which `pattern` is the beginning, up to a dot."""
    return rf"(?:{pattern})(?:(?<=\.)|(?=\.|$)).*"


def _is_pattern(value: Any) -> bool:
    return isinstance(value, str) and pattern_error(_from_start(value)) is None
