"""Reading the fields of a config.json: typed, with all problems collected, and no unknown field ignored.

`read_unquantized_modules` reads the `quantization_config` of bitsandbytes' checkpoints.

Example: a family reads the fields that it uses, and refuses what is left.

    >>> problems = []
    >>> fields = Fields({"hidden_size": 64, "num_hidden_layers": -1, "use_magic": True}, problems)
    >>> fields.integer("hidden_size"), fields.integer("num_hidden_layers"), fields.integer("vocab_size", 32_000)
    (64, 1, 32000)
    >>> fields.refuse_the_rest()
    >>> for problem in problems:
    ...     print(problem)
    num_hidden_layers -1: must be a whole number of at least 1 and at most 2048
    use_magic True: not a field that dtrain knows; it may change the numbers
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, Self

from dtrain.base.name_patterns import pattern_error

# Fields of config.json files that change no number in the training of a causal decoder.
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

# The largest accepted integers, by field. At least ten times what is published. Other fields end at MAX_INTEGER.
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
    """The fields of one JSON object.

    A missing or null field gets its default. A field of the wrong type is a problem, and gets a value with which
    reading can go on. `refuse_the_rest` makes a problem of every field that was not read.

    Args:
        values: The fields.
        problems: List to which problems are added.
        prefix: Prefix of the fields' names in problems, for example `rope_parameters.`.
    """

    def __init__(self, values: Mapping[str, Any], problems: list[str], prefix: str = ""):
        self._values = values
        self._used: set[str] = set()
        self._prefix = prefix
        self.problems = problems

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def with_defaults(self, defaults: Mapping[str, Any]) -> Self:
        """Return the same fields, with `defaults` for those that are missing or null."""
        values = dict(defaults)
        for key, value in self._values.items():
            if value is not None or key not in defaults:
                values[key] = value
        return self._with(values)

    def without(self, key: str) -> Self:
        """Return the same fields without `key`."""
        return self._with({name: value for name, value in self._values.items() if name != key})

    def _with(self, values: Mapping[str, Any]) -> Self:
        """Return fields with other values and the same record of what was read."""
        fields = type(self)(values, self.problems, self._prefix)
        fields._used = self._used
        return fields

    def add_problem(self, text: str) -> None:
        """Add a problem."""
        self.problems.append(self._prefix + text)

    def ignore(self, *keys: str) -> None:
        """Mark fields as read, although their values have no effect."""
        self._used.update(keys)

    def get(self, key: str) -> Any:
        """Return the value of a field without checking it. None if it is missing."""
        self._used.add(key)
        return self._values.get(key)

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        """Read an integer from `minimum` to the field's `MAX_SIZES`. Without a default, the field is required."""
        value = self._or_default(key, default)
        maximum = MAX_SIZES.get(key, MAX_INTEGER)
        is_valid = isinstance(value, int) and not isinstance(value, bool) and minimum <= value <= maximum
        requirement = f": must be a whole number of at least {minimum} and at most {maximum}"
        return self._checked(is_valid, key, value, minimum, requirement)

    def optional_integer(self, key: str, default: int | None = None) -> int | None:
        """Read an integer. None if there is neither a field nor a default."""
        if self.get(key) is None and default is None:
            return None
        return self.integer(key, default)

    def number(
        self,
        key: str,
        default: float | None = None,
        *,
        above: float = 0.0,
        maximum: float = 1e6,
        allow_zero: bool = False,
    ) -> float:
        """Read a number in (above, maximum]. Without a default, the field is required.

        Args:
            key: Name of the field.
            default: Value of a missing field.
            above: Lower bound, which is not included.
            maximum: Upper bound, which is included.
            allow_zero: Whether 0 is allowed too.
        """
        value = self._or_default(key, default)
        # NaN satisfies neither comparison.
        is_valid = is_number(value) and (above < value <= maximum or (allow_zero and value == 0))
        requirement = f": must be a number above {above:g} and at most {maximum:g}{', or 0' if allow_zero else ''}"
        return float(self._checked(is_valid, key, value, maximum, requirement))

    def optional_number(self, key: str, *, allow_zero: bool = False) -> float | None:
        """Read a number. None if there is no field."""
        return None if self.get(key) is None else self.number(key, allow_zero=allow_zero)

    def flag(self, key: str, default: bool) -> bool:
        """Read true or false."""
        value = self._or_default(key, default)
        return self._checked(isinstance(value, bool), key, value, default, ": must be true or false")

    def choice(self, key: str, choices: tuple[str, ...], default: str | None) -> str:
        """Read one of `choices`."""
        value = self._or_default(key, default)
        requirement = f" is not implemented; there are: {', '.join(choices)}"
        return self._checked(value in choices, key, value, choices[0], requirement)

    def token_id(self, key: str, default: int | None = None) -> int | None:
        """Read a token id, or the first of a list. Only a missing field gets the default: null means no token."""
        value: Any = self.get(key) if key in self else default
        if isinstance(value, list):
            value = value[0] if value else None
        return self._checked(_is_token(value), key, value, None, ": must be a token id")

    def token_ids(self, key: str) -> tuple[int, ...]:
        """Read a token id or a list of them."""
        value = self.get(key)
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        if all(map(_is_token, ids)):
            return tuple(ids)
        self.add_problem(f"{key} {format_value(value)}: must be a token id or a list of them")
        return ()

    def dtype(self) -> str | None:
        """Read the dtype of the weights. None if it is "auto" or missing.

        transformers 5 writes it as `dtype`, transformers 4 as `torch_dtype`.
        """
        value = self.get("dtype") or self.get("torch_dtype")
        name = value.removeprefix("torch.") if isinstance(value, str) else value
        if name is not None and name not in DTYPES:
            self.add_problem(f"dtype {format_value(value)} is not read; there are: {', '.join(DTYPES)}")
        return None if name == "auto" else name

    def must_be_off(self, key: str, reason: str) -> None:
        """Add a problem if a field has a value other than null, false, zero or empty."""
        if self.get(key):
            self.add_problem(f"{key} {format_value(self._values[key])}: {reason}")

    def refuse_the_rest(self) -> None:
        """Add a problem for every field that was not read, unless it changes no number or is switched off."""
        for key, value in self._values.items():
            if key not in self._used and key not in IGNORED_FIELDS and value:
                name = format_value(key)[1:-1]
                self.add_problem(
                    f"{name} {format_value(value)}: not a field that dtrain knows; it may change the numbers"
                )

    def _or_default(self, key: str, default: Any) -> Any:
        """Return the value of a field, or the default. Without either, add a problem."""
        value = self.get(key)
        if value is None and default is None:
            self.add_problem(f"{key} is missing")
        return default if value is None else value

    def _checked(self, is_valid: bool, key: str, value: Any, substitute: Any, requirement: str) -> Any:
        """Return `value` if it is valid, else `substitute`, with a problem if there is a value."""
        if is_valid:
            return value
        if value is not None:
            self.add_problem(f"{key} {format_value(value)}{requirement}")
        return substitute


def is_number(value: Any) -> bool:
    """Check whether a JSON value is a number. Booleans are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -MAX_INTEGER <= value <= MAX_INTEGER


def format_value(value: Any) -> str:
    """Return a value for a message, cut to 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _other_format_hint(values: dict[str, Any]) -> str:
    """Return the end of a problem with quantized weights: which checkpoint to use instead."""
    method = values.get("quant_method")
    if method == "bitsandbytes" and values.get("load_in_8bit", values.get("_load_in_8bit")):
        return f"{_USE_ORIGINAL}; bitsandbytes weights in 8 bits are not trained: {_USE_SIBLING}"
    known_methods = ("fp8", "fbgemm_fp8", "finegrained_fp8", "awq", "gptq", "compressed-tensors", "modelopt", "hqq")
    if method in known_methods:
        return f"{_USE_ORIGINAL}; {method} weights are not trained: {_USE_SIBLING}"
    return _USE_ORIGINAL


def _is_unpacked(values: dict[str, Any]) -> bool:
    """Check whether weights are converted to bfloat16 while they are read: mxfp4, and fp8 in blocks of 128 x 128."""
    if values.get("quant_method") == "mxfp4":
        return True
    is_in_blocks = values.get("quant_method") == "fp8" and values.get("weight_block_size") == [128, 128]
    has_default_format = values.get("activation_scheme", "dynamic") == "dynamic" and values.get("fmt", "e4m3") == "e4m3"
    return is_in_blocks and has_default_format


def read_unquantized_modules(section: Any, problems: list[str]) -> tuple[str, ...] | None:
    """Read which modules a 4-bit checkpoint stores unquantised.

    dtrain reads bitsandbytes' nf4, mxfp4, and fp8 in blocks.

    Args:
        section: The `quantization_config` of a config.json.
        problems: List to which a problem is added for any other format.

    Returns:
        Patterns of module names (`is_unquantized`). None for weights that are read as bfloat16.
    """
    values = section if isinstance(section, dict) else {}
    if _is_unpacked(values):
        return None
    kind = values.get("bnb_4bit_quant_type", "fp4")
    storage = values.get("bnb_4bit_quant_storage") or "uint8"
    is_in_4_bits = values.get("load_in_4bit", values.get("_load_in_4bit"))
    if values.get("quant_method") != "bitsandbytes" or not is_in_4_bits:
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
    """Check whether a module is stored unquantised, matching names as transformers does.

    A pattern matches the beginning of a name up to a dot, as text or as a regular expression, or the end of a name.

    Example:
        >>> is_unquantized(["lm_head"], "lm_head"), is_unquantized(["model.layers.0"], "model.layers.0.mlp.up_proj")
        (True, True)
        >>> is_unquantized(["model.layers.1"], "model.layers.10.mlp.up_proj")
        False
    """
    for pattern in patterns:
        if re.fullmatch(_match_from_start(pattern), name) or name.endswith(pattern):
            return True
    return False


def _match_from_start(pattern: str) -> str:
    """Return an expression for full names that begin with `pattern`, up to a dot or the end."""
    return rf"(?:{pattern})(?:(?<=\.)|(?=\.|$)).*"


def _is_pattern(value: Any) -> bool:
    return isinstance(value, str) and pattern_error(_match_from_start(value)) is None
