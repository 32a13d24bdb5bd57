"""Every field of metrics.jsonl: its unit and what it means. fields.toml is the one table of them, for the order of a
row, the report's labels and docs/metrics.md (tools/metrics_reference.py). `Method.measures` says which a method writes;
those that no method names are written under all. No torch.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType


@dataclass(frozen=True)
class MetricField:
    """A field of a training row, or of a validation row under `val_` and its name.

    title: for a reader. unit: "" for a number without one. where: what has to be so for the field to be written; "":
    always.
    """

    name: str
    title: str
    meaning: str
    unit: str = ""
    where: str = ""


_FILE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
_ROW, _OF_METHODS, EVALUATION = (
    tuple(MetricField(name, **entry) for name, entry in _FILE[table].items())
    for table in ("row", "methods", "evaluation")
)
FIELDS = (*_ROW, *_OF_METHODS)
ROW_ORDER = tuple(field.name for field in _ROW)
"""The order in which a row is written; a method's own fields follow in the order they came."""

_BY_NAME: Mapping[str, MetricField] = MappingProxyType({field.name: field for field in FIELDS})


def field_of(name: str) -> MetricField | None:
    """Return the table's entry of a field of a training or validation row; None for one that it has not."""
    entry = _BY_NAME.get(name) or _BY_NAME.get(name.removeprefix("val_"))
    family = name.partition("/")[0] + "/NAME"
    return entry or (_BY_NAME.get(family) if "/" in name else None)
