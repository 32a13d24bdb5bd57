"""Rotary scaling from config.json.

transformers 4 writes `rope_theta` and `rope_scaling`, transformers 5 writes `rope_parameters`. Imports no torch.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

from dtrain.models.common.config_fields import Fields, format_value, is_number


@dataclass(frozen=True)
class Sections:
    """Division of a head's pairs of dimensions among the axes time, height and width.

    Used by the multimodal positions M-RoPE (arXiv:2409.12191, section 2.1).

    Attributes:
        sizes: Number of pairs of each axis.
        interleaved: Whether axes take turns, pair by pair, until height and width have all their pairs (Qwen3-VL,
            arXiv:2511.21631). If not, the pairs of an axis are neighbours.
    """

    sizes: tuple[int, ...]
    interleaved: bool

    def axes(self, pairs: int) -> tuple[int, ...]:
        """Return the axis, 0 to 2, of each pair.

        Args:
            pairs: Number of pairs of a head.

        Raises:
            ValueError: If the sizes do not add up to `pairs`, without interleaving.

        Example:
            >>> Sections((4, 2, 2), interleaved=False).axes(8)
            (0, 0, 0, 0, 1, 1, 2, 2)
            >>> Sections((4, 2, 2), interleaved=True).axes(8)
            (0, 1, 2, 0, 1, 2, 0, 0)
        """
        axes: list[int] = []
        if self.interleaved:
            for pair in range(pairs):
                axis = pair % 3
                axes.append(axis if pair < 3 * self.sizes[axis] else 0)
            return tuple(axes)
        if sum(self.sizes) != pairs:
            raise ValueError(f"mrope_section {list(self.sizes)}: it must add up to the {pairs} pairs of a head")
        for axis, size in enumerate(self.sizes):
            axes += [axis] * size
        return tuple(axes)


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of one layer type. Each kind of scaling uses some of the fields.

    Attributes:
        kind: default, linear, llama3, yarn, longrope or proportional.
        theta: Base of the frequencies.
        rotary_fraction: Fraction of each head's dimensions, the first ones, that are rotated (partial_rotary_factor).
            With proportional, the first dimensions of either half, at the frequencies of full heads.
        factor: Factor by which positions are stretched.
        low_freq_factor: With llama3, wavelengths above original_max_positions / low_freq_factor are stretched by
            `factor`.
        high_freq_factor: With llama3, wavelengths below original_max_positions / high_freq_factor are kept.
        original_max_positions: Longest document before the scaling.
        beta_fast: With yarn, dimensions that turn at least this often within the original length are kept.
        beta_slow: With yarn, dimensions that turn at most this often are stretched by `factor`.
        truncate: With yarn, whether the ends of the ramp are rounded to whole dimensions.
        table_scale: Factor of cosines and sines (YaRN's attention factor, arXiv:2309.00071, section 3.4).
        score_scale: DeepSeek multiplies scores by its square, also those of dimensions that are not rotated
            (mscale_all_dim of YaRN). Other families do not read it.
        query_beta: How much queries grow with each multiple of `original_max_positions` (Llama 4's scaling,
            `models.mistral`).
        pair_factors: With longrope, divisors of the frequencies.
        sections: Axes of the pairs, in a model that takes images. The positions of text are the same on all axes.
    """

    kind: str = "default"
    theta: float = 10_000.0
    rotary_fraction: float = 1.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    table_scale: float = 1.0
    score_scale: float = 1.0
    query_beta: float = 0.0
    pair_factors: tuple[float, ...] = ()
    sections: Sections | None = None


ROPE_KINDS = ("default", "linear", "llama3", "yarn")
"""Kinds of scaling in families that name no others."""


def read_rope(
    fields: Fields,
    max_positions: int,
    head_dim: int,
    rotary_fraction: float | None = None,
    scales_queries: bool = False,
    kinds: tuple[str, ...] = ROPE_KINDS,
    sections: Sections | None = None,
) -> Rope:
    """Read the rope of a model whose layers all share it.

    Args:
        fields: Fields of the model.
        max_positions: Longest document.
        head_dim: Elements of a head.
        rotary_fraction: The family's default of partial_rotary_factor. None in a family that only rotates full heads.
        scales_queries: Whether llama_4_scaling_beta is read.
        kinds: Kinds of scaling that the family has.
        sections: The family's default of mrope_section. None in a family with one axis.
    """
    rope_object = fields.get("rope_parameters")
    rope_object = fields.get("rope_scaling") or rope_object or {}
    theta = read_theta(fields, "rope_theta", 10_000.0)
    original_max_positions = fields.optional_integer("original_max_position_embeddings")
    rotary_fraction = _read_fraction(fields, rotary_fraction)
    rope = read_rope_object(
        fields,
        "rope_parameters",
        rope_object,
        theta,
        max_positions,
        kinds,
        original_max_positions,
        rotary_fraction,
        scales_queries,
    )
    if sections is not None:
        rope = replace(rope, sections=_read_sections(fields, rope_object, sections))
    rotated = int(head_dim * rope.rotary_fraction)
    if rope.kind == "longrope" and len(rope.pair_factors) != rotated // 2:
        fields.add_problem(
            f"short_factor has {len(rope.pair_factors)} numbers for the {rotated // 2} pairs that are rotated"
        )
    if rotated < 2 or rotated % 2:
        fields.add_problem(
            f"partial_rotary_factor {rope.rotary_fraction} of head_dim {head_dim} is {rotated} dimensions, and "
            "rotary embeddings need pairs"
        )
    return rope


def _read_sections(fields: Fields, rope_object: Any, default: Sections) -> Sections:
    """Read mrope_section of a rope's object."""
    sizes = default.sizes
    if isinstance(rope_object, dict):
        sizes = rope_object.get("mrope_section", default.sizes)
    is_valid = isinstance(sizes, list | tuple) and len(sizes) == 3 and all(type(size) is int for size in sizes)
    if not is_valid:
        fields.add_problem(f"mrope_section {format_value(sizes)}: must be three numbers of pairs")
        return default
    return replace(default, sizes=tuple(sizes))


def read_ropes_by_kind(
    fields: Fields, max_positions: int, thetas: dict[str, float], kinds: tuple[str, ...] = ROPE_KINDS
) -> dict[str, Rope]:
    """Read the ropes of full and sliding layers.

    Args:
        fields: Fields of the model. `rope_scaling` belongs to the full layers.
        max_positions: Longest document.
        thetas: Default base by layer type, that of full layers first.
        kinds: Kinds of scaling that the family has.
    """
    full = list(thetas)[0]
    nested = fields.get("rope_parameters") or {}
    if not isinstance(nested, dict) or set(nested) - set(thetas):
        fields.add_problem(f"rope_parameters {format_value(nested)}: must be nested under {' and '.join(thetas)}")
        nested = {}
    scaling = fields.get("rope_scaling") or {}
    ropes = {}
    for kind, theta in thetas.items():
        values = nested.get(kind) or {}
        if kind == full and isinstance(values, dict) and isinstance(scaling, dict):
            values = {**values, **scaling}
        ropes[kind] = read_rope_object(fields, f"rope_parameters.{kind}", values, theta, max_positions, kinds)
    return ropes


def _read_fraction(fields: Fields, default: float | None) -> float | None:
    """Read the fraction of a head that is rotated. None in a family that only rotates full heads."""
    if default is not None:
        return fields.number("partial_rotary_factor", default, maximum=1.0)
    fraction = fields.number("partial_rotary_factor", 1.0)
    if fraction != 1.0:
        fields.add_problem(f"partial_rotary_factor {fraction}: only whole heads are rotated in this architecture")
    return None


def read_theta(fields: Fields, key: str, default: float) -> float:
    """Read the base of the rotary frequencies.

    The base must be above 1: a base of 1 would rotate all pairs alike, and YaRN divides by its logarithm.

    Args:
        fields: The fields to read from.
        key: Name of the field.
        default: Base if the field is missing.
    """
    return fields.number(key, default, above=1.0, maximum=1e15)


def read_rope_object(
    fields: Fields,
    where: str,
    rope_object: Any,
    theta: float,
    max_positions: int,
    kinds: tuple[str, ...],
    original: int | None = None,
    rotary_fraction: float | None = None,
    scales_queries: bool = False,
) -> Rope:
    """Read the rope that an object describes.

    Args:
        fields: Fields of the model, to which problems are added.
        where: Key of the object in problems.
        rope_object: The object.
        theta: Base if the object has none.
        max_positions: Longest document.
        kinds: Kinds of scaling that the family has.
        original: Original length by another key of the file. None without one.
        rotary_fraction: As in `read_rope`.
        scales_queries: As in `read_rope`.
    """
    if not isinstance(rope_object, dict):
        fields.add_problem(f"{where} {format_value(rope_object)} is no object")
        return Rope()
    inner = Fields(rope_object, fields.problems, prefix=where + ".")
    inner.ignore("type", "original_max_position_embeddings")
    inner.ignore("mrope_section", "mrope_interleaved")  # read by `_read_sections`
    kind = inner.get("rope_type") or rope_object.get("type") or "default"
    if kind == "mrope" and "mrope_section" in rope_object:
        kind = "default"
    if kind == "su" and "longrope" in kinds:  # its first name
        kind = "longrope"
    if kind not in kinds:
        fields.add_problem(f"{where}: rope type {format_value(kind)} is not implemented; there are: {', '.join(kinds)}")
        return Rope()
    theta = read_theta(inner, "rope_theta", theta)
    rotary_fraction = _read_fraction(inner, rotary_fraction)
    length = 0
    if kind in ("llama3", "yarn", "longrope") or scales_queries:
        length = original or inner.integer("original_max_position_embeddings", max_positions)
    values: dict[str, Any] = {}
    if rotary_fraction is not None:
        values["rotary_fraction"] = rotary_fraction
    if kind != "default":
        # The factor may be missing where it follows from the two lengths: DeepSeek's YaRN, and Phi.
        ratio = max_positions / max(length, 1)
        default_factor = {"yarn": ratio, "longrope": ratio, "proportional": 1.0}.get(kind)
        values["factor"] = inner.number("factor", default_factor, above=1e-3)
    if kind == "llama3":
        values |= _read_llama3(inner)
    elif kind == "yarn":
        values |= _read_yarn(inner, values["factor"], length)
    elif kind == "longrope":
        values |= _read_longrope(inner, values["factor"], length)
    if scales_queries:
        inner.ignore("max_position_embeddings")
        values["query_beta"] = inner.number("llama_4_scaling_beta", allow_zero=True)
    inner.refuse_the_rest()
    return Rope(kind=kind, theta=theta, original_max_positions=length, **values)


def _read_llama3(fields: Fields) -> dict[str, Any]:
    """Read the fields of Llama 3.1's scaling."""
    low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
    if high <= low:
        fields.add_problem("high_freq_factor must be greater than low_freq_factor")
    return {"low_freq_factor": low, "high_freq_factor": high}


def _read_yarn(fields: Fields, factor: float, length: int) -> dict[str, Any]:
    """Read the fields of YaRN. Its attention factor may be missing.

    transformers then infers 0.1 · ln(factor) + 1, or, in DeepSeek's files, the ratio of two such terms.
    """
    values: dict[str, Any] = {
        "beta_fast": fields.number("beta_fast", 32.0, allow_zero=True) or 32.0,  # 0 is read as unset
        "beta_slow": fields.number("beta_slow", 1.0, allow_zero=True) or 1.0,
        "truncate": fields.flag("truncate", True),
    }
    attention_factor = fields.optional_number("attention_factor")
    mscale = fields.optional_number("mscale", allow_zero=True)
    mscale_all_dim = fields.optional_number("mscale_all_dim", allow_zero=True)
    if mscale and mscale_all_dim:
        inferred = _yarn_magnitude(factor, mscale) / _yarn_magnitude(factor, mscale_all_dim)
    else:
        inferred = _yarn_magnitude(factor, 1.0)
    values["table_scale"] = inferred if attention_factor is None else attention_factor
    weight = fields.get("mscale_all_dim")
    values["score_scale"] = _yarn_magnitude(factor, weight) if is_number(weight) else 1.0
    return values


def _yarn_magnitude(factor: float, weight: float) -> float:
    """Return 0.1 · weight · ln(factor) + 1, or 1 for factors up to 1."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _read_longrope(fields: Fields, factor: float, length: int) -> dict[str, Any]:
    """Read the fields of LongRoPE, for documents up to the original length.

    The attention factor may be missing. transformers then infers √(1 + ln(factor) / ln(length)).
    """
    short_factors = _read_factors(fields, "short_factor")
    long_factors = _read_factors(fields, "long_factor")
    if len(long_factors) != len(short_factors):
        fields.add_problem("short_factor and long_factor are not of one length")
    attention_factor = fields.optional_number("attention_factor")
    inferred = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(max(length, 2)))
    return {"pair_factors": short_factors, "table_scale": inferred if attention_factor is None else attention_factor}


def _read_factors(fields: Fields, key: str) -> tuple[float, ...]:
    """Read a list of LongRoPE's divisors."""
    value = fields.get(key)
    numbers = value if isinstance(value, list) else [value]
    if not all(is_number(number) and 0 < number <= 1e6 for number in numbers):
        fields.add_problem(f"{key} {format_value(value)}: must be a list of numbers above 0 and at most 1e+06")
        return ()
    return tuple(map(float, numbers))
