"""Reader of a run's files, also while the run continues: metric rows, its recipe, and its completions. No torch.

fields.toml is the one table of the fields of metrics.jsonl, with units and meanings. The order of a row, the report's
labels and docs/metrics.md (tools/metrics_reference.py) come from it. `Method.measures` lists the fields of a method;
fields that no method lists are written under all. Completions are read from samples.jsonl and evals.jsonl.
"""

import json
import math
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any

import yaml

from dtrain.base.errors import UserError
from dtrain.base.json_files import check_shape, loads, read_text

Point = tuple[float, float]

AVERAGED_STEPS = 10  # a curve is summarised by the means of its first and its last steps
LARGEST_VALUE = 1e300  # what sums and differences of are still numbers
LONGEST_LINE = 1 << 24  # bytes of a line that is read
MAX_RECIPE_ENTRIES = 100_000  # entries of a recipe, with what its aliases repeat
_MARK_BYTES = 64  # bytes before the place that was read to, by which a file is known again

MAX_PROMPT_IMAGES = 64  # of a prompt
_STEP_OF_LINE = re.compile(rb'\{"step": (\d{1,18})[,}]')


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


_FIELD_TABLES = tomllib.loads(Path(__file__).with_name("fields.toml").read_text(encoding="utf-8"))
_ROW, _OF_METHODS, EVALUATION = (
    tuple(MetricField(name, **entry) for name, entry in _FIELD_TABLES[table].items())
    for table in ("row", "methods", "evaluation")
)
FIELDS = (*_ROW, *_OF_METHODS)
ROW_ORDER = tuple(field.name for field in _ROW)
"""The order in which a row is written; a method's own fields follow in the order they came."""

_BY_NAME: Mapping[str, MetricField] = MappingProxyType({field.name: field for field in FIELDS})


def find_field(name: str) -> MetricField | None:
    """Return the table's entry of a field of a training or validation row; None for one that it has not."""
    entry = _BY_NAME.get(name) or _BY_NAME.get(name.removeprefix("val_"))
    family = name.partition("/")[0] + "/NAME"
    return entry or (_BY_NAME.get(family) if "/" in name else None)


class LineFollower:
    """The whole lines of a file that others write to: `read_new` gives those that are new.

    A file that was cut or replaced, as a resume does, is read from its beginning again: `num_restarts` counts these.
    `num_skipped`: lines longer than LONGEST.
    """

    def __init__(self, path: Path):
        self.path = path
        self.num_restarts = self.num_skipped = 0
        self._end, self._mark = 0, b""

    def read_new(self) -> Iterator[tuple[int, bytes]]:
        """Yield each new line that is whole, with the place where it begins. None where there is no file."""
        try:
            with self.path.open("rb") as file:
                file.seek(max(0, self._end - _MARK_BYTES))
                if file.read(min(self._end, _MARK_BYTES)) != self._mark:
                    self.num_restarts, self.num_skipped, self._end, self._mark = self.num_restarts + 1, 0, 0, b""
                    file.seek(0)
                while line := file.readline(LONGEST_LINE):
                    start, is_whole, mark = self._end, line.endswith(b"\n"), self._mark + line[-_MARK_BYTES:]
                    while not mark.endswith(b"\n"):
                        if not (rest := file.readline(LONGEST_LINE)):
                            return  # torn, or still being written
                        mark = mark[-_MARK_BYTES:] + rest[-_MARK_BYTES:]
                    self._end, self._mark = file.tell(), mark[-_MARK_BYTES:]
                    if is_whole:
                        yield start, line
                    else:
                        self.num_skipped += 1
        except FileNotFoundError:
            return
        except OSError as error:
            raise UserError(f"{self.path}: {error.strerror or error}") from error


def parse_row(line: bytes) -> dict[str, Any] | None:
    """The row that a line holds; None where it is damaged."""
    try:
        row = loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file of JSON lines. Damaged lines, and a last one that is torn, are none; nor is a missing file."""
    for _, line in LineFollower(path).read_new():
        if (row := parse_row(line)) is not None:
            yield row


def number(value: Any) -> float | None:
    """A number of a row, NaN and infinities among them; None for anything else."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def is_plottable(value: float) -> bool:
    """Return whether a value can be drawn and summed: neither NaN nor infinite, nor near that."""
    return abs(value) <= LARGEST_VALUE


def curve_points(rows: Iterable[Mapping[str, Any]], field: str) -> list[Point]:
    """(step, value) of the rows that have that field, as a sound number."""
    pairs = ((number(row.get("step")), number(row.get(field))) for row in rows)
    return [(x, y) for x, y in pairs if x is not None and y is not None and is_plottable(x) and is_plottable(y)]


def summarize_curve(field: str, values: Sequence[float]) -> tuple[float, float, int]:
    """The first and the last value of a curve, each the mean of so many; of all validation rows one alone, so that it
    is no chance."""
    count = 1 if field.startswith(("val_", "eval_")) else max(1, min(AVERAGED_STEPS, len(values) // 2))
    return fmean(values[:count]), fmean(values[-count:]), count


def read_recipe(directory: Path) -> dict[str, Any]:
    """The tree of a run's config.yaml; nothing where there is none. Raises UserError where it is damaged."""
    path = directory / "config.yaml"
    if not path.is_file():
        return {}
    try:
        tree = yaml.safe_load(read_text(path))
        check_shape(tree, MAX_RECIPE_ENTRIES)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged: {error}") from error
    return tree if isinstance(tree, dict) else {}


@dataclass(frozen=True)
class PromptImage:
    """Image of a prompt. digest: SHA-256 of its bytes, in hex. path: its file; None: its bytes are in the data's
    cache."""

    name: str
    digest: str
    path: str | None = None

    @classmethod
    def of(cls, entry: Any) -> "PromptImage | None":
        """Return the image of an entry of a row's `images`, None for what is none."""
        if not isinstance(entry, Mapping) or not isinstance(entry.get("digest"), str):
            return None
        path = entry.get("path")
        return cls(str(entry.get("name", "")), entry["digest"], path if isinstance(path, str) else None)


@dataclass(frozen=True)
class Answer:
    """A completion of samples.jsonl or evals.jsonl. `set`: the name of its evaluation; "" in a rollout. `index`: of its
    prompt. What is not known is None."""

    step: int
    set: str
    index: int
    sample: int
    prompt: str
    text: str
    reward: float | None
    parts: Mapping[str, float]
    tokens: int | None
    is_truncated: bool
    advantage: float | None
    images: tuple[PromptImage, ...] = ()

    @property
    def key(self) -> tuple[str, int, int, str]:
        """Key that answers to the same question share at all steps."""
        return self.set, self.index, self.sample, self.prompt

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> "Answer | None":
        """Return the answer of a row, None for a row without a step and a text."""
        step, text = number(row.get("step")), row.get("completion", row.get("text"))
        if step is None or not step.is_integer() or not isinstance(text, str):
            return None
        parts, images = row.get("rewards"), row.get("images")
        named = parts.items() if isinstance(parts, Mapping) else ()
        return cls(
            step=int(step),
            set=str(row.get("set", "")),
            index=_count(row.get("index", row.get("group"))) or 0,
            sample=_count(row.get("sample")) or 0,
            prompt=prompt_text(row.get("prompt", "")),
            text=text,
            reward=_sound_number(row.get("reward")),
            parts={str(name): known for name, value in named if (known := _sound_number(value)) is not None},
            tokens=_count(row.get("tokens", row.get("completion_len"))),
            is_truncated=row.get("finish") == "length" or row.get("truncated") is True,
            advantage=_sound_number(row.get("advantage")),
            images=tuple(
                filter(None, map(PromptImage.of, images[:MAX_PROMPT_IMAGES] if isinstance(images, list) else ()))
            ),
        )


class AnswerFile:
    """samples.jsonl or evals.jsonl by their steps. `steps`: of each, where its lines begin and end; rows are read when
    they are asked for, since such a file may be larger than the memory."""

    def __init__(self, path: Path):
        self.steps: dict[int, list[tuple[int, int]]] = {}
        self._lines, self._times = LineFollower(path), 0

    def refresh(self) -> bool:
        """Find the steps that are new; whether there is anything new."""
        is_new = False
        for start, line in self._lines.read_new():
            is_new = self._renew() or True
            match = _STEP_OF_LINE.match(line)  # as dtrain writes a row
            step = int(match[1]) if match else _count((parse_row(line) or {}).get("step"))
            if step is None:
                continue
            places, end = self.steps.setdefault(step, []), start + len(line)
            if places and places[-1][1] == start:
                places[-1] = places[-1][0], end
            else:
                places.append((start, end))
        return self._renew() or is_new

    def _renew(self) -> bool:
        """Forget all where the file began again; whether it did."""
        if self._lines.num_restarts == self._times:
            return False
        self.steps, self._times = {}, self._lines.num_restarts
        return True

    def read_step(self, step: int) -> Iterator[Answer]:
        """The answers of a step, as they were written."""
        for start, end in self.steps.get(step, ()):
            with suppress(OSError), self._lines.path.open("rb") as file:  # it may have gone since
                file.seek(start)
                while file.tell() < end and (line := file.readline(LONGEST_LINE)):
                    if (
                        (row := parse_row(line)) is not None
                        and (answer := Answer.of(row)) is not None
                        and answer.step == step
                    ):
                        yield answer


def prompt_text(prompt: Any) -> str:
    """A prompt as text: messages with their roles, images in them as [image], other values as JSON."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and prompt and all(isinstance(turn, Mapping) and "role" in turn for turn in prompt):
        texts = [(turn["role"], _content_text(turn.get("content"))) for turn in prompt]
        if len(texts) == 1 and texts[0][1] is not None:
            return texts[0][1]
        contents = (turn.get("content") for turn in prompt)
        return "\n".join(
            f"{role}: {json.dumps(content) if text is None else text}"
            for (role, text), content in zip(texts, contents, strict=True)
        )
    return json.dumps(prompt, ensure_ascii=False)


def _content_text(content: Any) -> str | None:
    """The content of a message as text, of its parts that are texts or images; None for any other."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        return None
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) else None
        if isinstance(part, Mapping) and part.get("type") == "image":
            text = "[image]"
        if not isinstance(text, str):
            return None
        texts.append(text)
    return "".join(texts)


def _sound_number(value: Any) -> float | None:
    known = number(value)
    return known if known is not None and is_plottable(known) else None


def _count(value: Any) -> int | None:
    known = _sound_number(value)
    return None if known is None or abs(known) > 2**53 else int(known)
