"""Rotary scaling as config.json tells it: `rope_theta` and `rope_scaling` (transformers 4) or `rope_parameters` (5)."""

import math
from dataclasses import dataclass, replace
from typing import Any

from dtrain.models.common.config_fields import Fields, format_value, is_number


@dataclass(frozen=True)
class Sections:
    """Division of a head's pairs of dimensions among the axes time, height and width of multimodal positions (M-RoPE,
    arXiv:2409.12191, section 2.1).

    sizes: pairs of each axis. interleaved: whether axes take turns, pair by pair, as far as height and width have
    pairs left (Qwen3-VL, arXiv:2511.21631); else each axis has a run of them.
    """

    sizes: tuple[int, ...]
    interleaved: bool

    def axes(self, pairs: int) -> tuple[int, ...]:
        """Return the axis, 0 to 2, of each of `pairs` pairs. Raises ValueError where the sizes do not add up."""
        if not self.interleaved:
            if sum(self.sizes) != pairs:
                raise ValueError(f"mrope_section {list(self.sizes)}: it must add up to the {pairs} pairs of a head")
            return tuple(axis for axis, size in enumerate(self.sizes) for _ in range(size))
        return tuple(pair % 3 if pair < 3 * self.sizes[pair % 3] else 0 for pair in range(pairs))


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of one kind of layer. kind: default, linear, llama3, yarn, longrope or proportional; the other
    fields belong to some.

    share: of each head's dimensions, its first ones, that are rotated (partial_rotary_factor); of a proportional one
    the first of either half, at the frequencies of whole heads. table_scale multiplies cos and sin (YaRN's attention
    factor, arXiv:2309.00071, section 3.4). score_scale: by its square DeepSeek multiplies scores, those of dimensions
    that are not rotated too (mscale_all_dim of YaRN); other families do not read it. query_beta: how queries grow with
    each original_max_positions (Llama 4's; `models.mistral`). sections: of a model that takes images; a text's
    positions are alike on all axes.
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


ROPE_KINDS = ("default", "linear", "llama3", "yarn")  # of every family that says no other


def read_rope(
    fields: Fields,
    max_positions: int,
    head_dim: int,
    share: float | None = None,
    scales_queries: bool = False,
    kinds: tuple[str, ...] = ROPE_KINDS,
    sections: Sections | None = None,
) -> Rope:
    """The rope of a model whose layers all share it. share: the family's default of partial_rotary_factor, none where
    it rotates whole heads alone. scales_queries: whether llama_4_scaling_beta is read. kinds: that the family has.
    sections: the family's default of mrope_section, and its order."""
    written = fields.get("rope_parameters")
    written = fields.get("rope_scaling") or written or {}
    theta = read_theta(fields, "rope_theta", 10_000.0)
    original = fields.optional_integer("original_max_position_embeddings")
    share = _share(fields, share)
    rope = read_rope_object(
        fields, "rope_parameters", written, theta, max_positions, kinds, original, share, scales_queries
    )
    if sections is not None:
        sizes = written.get("mrope_section", sections.sizes) if isinstance(written, dict) else sections.sizes
        if not (isinstance(sizes, list | tuple) and len(sizes) == 3 and all(type(size) is int for size in sizes)):
            fields.add_problem(f"mrope_section {format_value(sizes)}: must be three numbers of pairs")
            sizes = sections.sizes
        rope = replace(rope, sections=replace(sections, sizes=tuple(sizes)))
    turned = int(head_dim * rope.rotary_fraction)
    if rope.kind == "longrope" and len(rope.pair_factors) != turned // 2:
        fields.add_problem(
            f"short_factor has {len(rope.pair_factors)} numbers for the {turned // 2} pairs that are rotated"
        )
    if turned < 2 or turned % 2:
        fields.add_problem(
            f"partial_rotary_factor {rope.rotary_fraction} of head_dim {head_dim} is {turned} dimensions, and "
            "rotary embeddings need pairs"
        )
    return rope


def read_ropes_by_kind(
    fields: Fields, max_positions: int, thetas: dict[str, float], kinds: tuple[str, ...] = ROPE_KINDS
) -> dict[str, Rope]:
    """The ropes of full layers, to which `rope_scaling` belongs, and of sliding ones; thetas: their bases."""
    full = next(iter(thetas))
    nested = fields.get("rope_parameters") or {}
    if not isinstance(nested, dict) or set(nested) - set(thetas):
        fields.add_problem(f"rope_parameters {format_value(nested)}: must be nested under {' and '.join(thetas)}")
        nested = {}
    scaling, written = fields.get("rope_scaling") or {}, {kind: nested.get(kind) or {} for kind in thetas}
    if isinstance(written[full], dict) and isinstance(scaling, dict):
        written[full] = {**written[full], **scaling}
    return {
        kind: read_rope_object(fields, f"rope_parameters.{kind}", written[kind], theta, max_positions, kinds)
        for kind, theta in thetas.items()
    }


def _share(fields: Fields, default: float | None) -> float | None:
    """Return the share of a head that is rotated; None in an architecture that rotates whole heads alone."""
    if default is not None:
        return fields.number("partial_rotary_factor", default, most=1.0)
    if (partial := fields.number("partial_rotary_factor", 1.0)) != 1.0:
        fields.add_problem(f"partial_rotary_factor {partial}: only whole heads are rotated in this architecture")
    return None


def read_theta(fields: Fields, key: str, default: float) -> float:
    """A base of 1 would turn all pairs alike, and YaRN divides by its logarithm."""
    return fields.number(key, default, least=1.0, most=1e15)


def read_rope_object(
    fields: Fields,
    where: str,
    written: Any,
    theta: float,
    max_positions: int,
    kinds: tuple[str, ...],
    original: int | None = None,
    share: float | None = None,
    scales_queries: bool = False,
) -> Rope:
    """The rope that the object `written` under the key `where` describes; theta: its base where it names none;
    original: the length that another key of the file says; the rest as in `read_rope`."""
    if not isinstance(written, dict):
        fields.add_problem(f"{where} {format_value(written)} is no object")
        return Rope()
    inner = Fields(written, fields.problems, prefix=where + ".")
    inner.ignore("type", "original_max_position_embeddings")
    inner.ignore("mrope_section", "mrope_interleaved")  # of `Sections`
    kind = inner.get("rope_type") or written.get("type") or "default"
    kind = "default" if kind == "mrope" and "mrope_section" in written else kind
    kind = "longrope" if kind == "su" and "longrope" in kinds else kind  # its first name
    if kind not in kinds:
        fields.add_problem(f"{where}: rope type {format_value(kind)} is not implemented; there are: {', '.join(kinds)}")
        return Rope()
    theta = read_theta(inner, "rope_theta", theta)
    share = _share(inner, share)
    length = 0
    if kind in ("llama3", "yarn", "longrope") or scales_queries:
        length = original or inner.integer("original_max_position_embeddings", max_positions)
    values: dict[str, Any] = {} if share is None else {"rotary_fraction": share}
    if kind != "default":
        # Some leave the factor to the two lengths: DeepSeek's YaRN, and Phi.
        ratio = max_positions / max(length, 1)
        default = {"yarn": ratio, "longrope": ratio, "proportional": 1.0}.get(kind)
        values["factor"] = inner.number("factor", default, least=1e-3)
    if kind == "llama3":
        values |= {key: inner.number(key) for key in ("low_freq_factor", "high_freq_factor")}
        if values["high_freq_factor"] <= values["low_freq_factor"]:
            inner.add_problem("high_freq_factor must be greater than low_freq_factor")
    if kind == "yarn":
        values["beta_fast"] = inner.number("beta_fast", 32.0, zero=True) or 32.0  # 0 is read as unset
        values["beta_slow"] = inner.number("beta_slow", 1.0, zero=True) or 1.0
        values["truncate"] = inner.flag("truncate", True)
        values["table_scale"] = _attention_factor(inner, kind, values["factor"], length)
        weight = inner.get("mscale_all_dim")
        values["score_scale"] = _magnitude(values["factor"], weight) if is_number(weight) else 1.0
    if kind == "longrope":
        values["pair_factors"] = _factors(inner, "short_factor")
        if len(_factors(inner, "long_factor")) != len(values["pair_factors"]):
            inner.add_problem("short_factor and long_factor are not of one length")
        values["table_scale"] = _attention_factor(inner, kind, values["factor"], length)
    if scales_queries:
        inner.ignore("max_position_embeddings")
        values["query_beta"] = inner.number("llama_4_scaling_beta", zero=True)
    inner.refuse_the_rest()
    return Rope(kind=kind, theta=theta, original_max_positions=length, **values)


def _attention_factor(fields: Fields, kind: str, factor: float, length: int) -> float:
    """Return what the file says, or what transformers infers: LongRoPE's √(1 + ln(factor) / ln(length)), YaRN's
    0.1·ln(factor) + 1, or DeepSeek's ratio of two such terms."""
    written = fields.optional_number("attention_factor")
    if kind == "longrope":
        inferred = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(max(length, 2)))
    else:
        over, under = (fields.optional_number(key, zero=True) for key in ("mscale", "mscale_all_dim"))
        inferred = _magnitude(factor, over) / _magnitude(factor, under) if over and under else _magnitude(factor, 1.0)
    return inferred if written is None else written


def _magnitude(factor: float, weight: float) -> float:
    """Return YaRN's 0.1·weight·ln(factor) + 1."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _factors(fields: Fields, key: str) -> tuple[float, ...]:
    written = fields.get(key)
    numbers = written if isinstance(written, list) else [written]
    if not all(is_number(number) and 0 < number <= 1e6 for number in numbers):
        fields.add_problem(f"{key} {format_value(written)}: must be a list of numbers above 0 and at most 1e+06")
        return ()
    return tuple(map(float, numbers))
