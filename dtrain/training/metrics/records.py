"""Reader of a run's files, also while the run continues: metric rows, its recipe, and its completions. No torch.

fields.toml is the only table of the fields of metrics.jsonl, with units and meanings. The order of a row, the report's
labels and docs/metrics.md (tools/metrics_reference.py) come from this table. `Method.measures` lists the fields of a
method. In docs/metrics.md, a field that no method lists belongs to all methods. Completions are read from samples.jsonl
and evals.jsonl.

`LineFollower` reads the new complete lines of a file that is still being written. `AnswerFile` uses it to find the
lines of each step, and `read_rows` to read a whole file once.
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
from typing import Any, NamedTuple

import yaml

from dtrain.base.errors import UserError
from dtrain.base.json_files import check_json_size, loads, read_text

Point = tuple[float, float]

AVERAGED_STEPS = 10  # a curve is summarised by the means of its first and its last steps
LARGEST_VALUE = 1e300  # sums and differences of values up to this do not overflow
LONGEST_LINE = 1 << 24  # bytes; longer lines are skipped
MAX_RECIPE_ENTRIES = 100_000  # entries of a recipe, where an alias counts with everything that it repeats
MAX_PROMPT_IMAGES = 64  # further images of a prompt are left out
_MARK_BYTES = 64  # bytes before the current position by which `LineFollower` recognises a file

# The beginning of a row as dtrain writes it: {"step": 12, ...
_STEP_OF_LINE = re.compile(rb'\{"step": (\d{1,18})[,}]')


@dataclass(frozen=True)
class MetricField:
    """A field of a training row. A validation row has it under `val_` and its name.

    Attributes:
        name: Its name in the row.
        title: A short title for readers.
        meaning: What it measures.
        unit: Its unit. "" for a number without one.
        where: The setting with which it is written. "": always.
    """

    name: str
    title: str
    meaning: str
    unit: str = ""
    where: str = ""


_FIELD_TABLES = tomllib.loads(Path(__file__).with_name("fields.toml").read_text(encoding="utf-8"))


def _fields_of_table(table: str) -> tuple[MetricField, ...]:
    return tuple(MetricField(name, **entry) for name, entry in _FIELD_TABLES[table].items())


_ROW = _fields_of_table("row")
FIELDS = (*_ROW, *_fields_of_table("methods"))
EVALUATION = _fields_of_table("evaluation")
ROW_ORDER = tuple(field.name for field in _ROW)
"""The order in which a row is written. A method's own fields follow in the order in which the method returns them."""

_BY_NAME: Mapping[str, MetricField] = MappingProxyType({field.name: field for field in FIELDS})


def find_field(name: str) -> MetricField | None:
    """Return the table's entry for a field of a training or validation row; None if the table has none.

    Names with a slash belong to a family, whose entry is written with NAME.

    >>> find_field("val_token_accuracy").name, find_field("reward/math_exact").name, find_field("mine")
    ('token_accuracy', 'reward/NAME', None)
    """
    for candidate in (name, name.removeprefix("val_")):
        if candidate in _BY_NAME:
            return _BY_NAME[candidate]
    family, slash, _ = name.partition("/")
    return _BY_NAME.get(f"{family}/NAME") if slash else None


class LineFollower:
    """Reader of the complete lines of a file that another process writes. Each call of `read_new` yields the new lines.

    A resume cuts or replaces the file. To notice this, the reader stores the last bytes before its position. If they
    have changed, it reads the file from the beginning again.

    Attributes:
        path: The file, which need not exist yet.
        num_restarts: Number of times that the file was read from the beginning again.
        num_skipped: Number of lines longer than LONGEST_LINE since the last restart.
    """

    def __init__(self, path: Path):
        self.path = path
        self.num_restarts = 0
        self.num_skipped = 0
        self._end = 0  # the position after the last complete line
        self._mark = b""  # the last bytes before that position, up to _MARK_BYTES

    def read_new(self) -> Iterator[tuple[int, bytes]]:
        """Yield the start position and the bytes of each new complete line. Yields nothing if there is no file.

        A last line without a line break is still being written, or was torn by a kill. It is left for the next call.

        Raises:
            UserError: If the file cannot be read.
        """
        try:
            with self.path.open("rb") as file:
                file.seek(max(0, self._end - _MARK_BYTES))
                if file.read(min(self._end, _MARK_BYTES)) != self._mark:
                    self.num_restarts += 1
                    self.num_skipped = 0
                    self._end = 0
                    self._mark = b""
                    file.seek(0)
                while line := file.readline(LONGEST_LINE):
                    start = self._end
                    is_short = line.endswith(b"\n")
                    mark = self._mark + line[-_MARK_BYTES:]
                    while not mark.endswith(b"\n"):  # skip the rest of a long line
                        rest = file.readline(LONGEST_LINE)
                        if not rest:
                            return  # torn, or still being written
                        mark = mark[-_MARK_BYTES:] + rest[-_MARK_BYTES:]
                    self._end = file.tell()
                    self._mark = mark[-_MARK_BYTES:]
                    if is_short:
                        yield start, line
                    else:
                        self.num_skipped += 1
        except FileNotFoundError:
            return
        except OSError as error:
            raise UserError(f"{self.path}: {error.strerror or error}") from error


def parse_row(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object of a line; None if the line is damaged or something else.

    >>> parse_row(b'{"step": 1, "loss": 2.5}')
    {'step': 1, 'loss': 2.5}
    >>> parse_row(b'{"step": 1, "lo') is None
    True
    """
    try:
        row = loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file of JSON lines. Damaged lines are left out; a missing file has no rows."""
    for _, line in LineFollower(path).read_new():
        row = parse_row(line)
        if row is not None:
            yield row


def number(value: Any) -> float | None:
    """Return a row's value as a float, which may be NaN or infinite; None if it is no number.

    >>> number(3), number(10**400), number(True), number("3")
    (3.0, inf, None, None)
    """
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def is_plottable(value: float) -> bool:
    """Check that a value can be plotted and summed: it is not NaN, and its magnitude is at most LARGEST_VALUE."""
    return abs(value) <= LARGEST_VALUE


def curve_points(rows: Iterable[Mapping[str, Any]], field: str) -> list[Point]:
    """Return (step, value) for each row in which the field is a plottable number.

    >>> curve_points([{"step": 1, "loss": 4.0}, {"step": 2}, {"step": 3, "loss": float("nan")}], "loss")
    [(1.0, 4.0)]
    """
    points = []
    for row in rows:
        step = _plottable_number(row.get("step"))
        value = _plottable_number(row.get(field))
        if step is not None and value is not None:
            points.append((step, value))
    return points


class CurveSummary(NamedTuple):
    """The beginning and the end of a curve.

    Attributes:
        first: The mean of the first values.
        last: The mean of the last values.
        num_averaged: The number of values in each mean.
    """

    first: float
    last: float
    num_averaged: int


def summarize_curve(field: str, values: Sequence[float]) -> CurveSummary:
    """Return the means of the first and of the last values of a curve.

    Up to AVERAGED_STEPS training steps are averaged, because each is of another batch. A validation or an evaluation is
    always of the same rows, so single values are compared.

    >>> summarize_curve("loss", [4.0, 3.0, 2.0, 1.0])
    CurveSummary(first=3.5, last=1.5, num_averaged=2)
    >>> summarize_curve("val_loss", [4.0, 3.0, 2.0, 1.0])
    CurveSummary(first=4.0, last=1.0, num_averaged=1)
    """
    num_averaged = 1
    if not field.startswith(("val_", "eval_")):
        num_averaged = max(1, min(AVERAGED_STEPS, len(values) // 2))
    return CurveSummary(fmean(values[:num_averaged]), fmean(values[-num_averaged:]), num_averaged)


def read_recipe(directory: Path) -> dict[str, Any]:
    """Return the tree of a run's config.yaml; an empty one if there is no such file.

    Raises:
        UserError: If the file is damaged.
    """
    path = directory / "config.yaml"
    if not path.is_file():
        return {}
    try:
        tree = yaml.safe_load(read_text(path))
        check_json_size(tree, MAX_RECIPE_ENTRIES)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged: {error}") from error
    return tree if isinstance(tree, dict) else {}


@dataclass(frozen=True)
class PromptImage:
    """An image of a prompt.

    Attributes:
        name: Its name in the data.
        digest: SHA-256 of its bytes, in hex.
        path: Its file. None if its bytes are in the data's cache.
    """

    name: str
    digest: str
    path: str | None = None

    @classmethod
    def of(cls, entry: Any) -> "PromptImage | None":
        """Return the image of an entry of a row's `images`; None if the entry is damaged."""
        if not isinstance(entry, Mapping) or not isinstance(entry.get("digest"), str):
            return None
        path = entry.get("path")
        return cls(str(entry.get("name", "")), entry["digest"], path if isinstance(path, str) else None)


@dataclass(frozen=True)
class Answer:
    """A completion of samples.jsonl (rollouts) or evals.jsonl (evaluations).

    Attributes:
        step: The step. A rollout's completion has the first step that trains on it.
        set: The name of its evaluation. "" in a rollout.
        index: The number of its prompt.
        sample: The number of the completion among those of its prompt.
        prompt: The prompt as text.
        text: The completion.
        reward: Its reward. None if it is not known.
        parts: The rewards by function, as far as they are known.
        tokens: The number of its tokens. None if it is not known.
        is_truncated: Whether the limit of tokens ended it.
        advantage: Its advantage. None if it has none.
        images: The images of its prompt.
    """

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
        """A key that answers to the same question share at all steps."""
        return self.set, self.index, self.sample, self.prompt

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> "Answer | None":
        """Return the answer of a row; None for a row without a step or a text.

        The two files name some fields differently: samples.jsonl has `completion`, `group`, `tokens` and `finish`,
        evals.jsonl has `text`, `index`, `completion_len` and `truncated`.
        """
        step = number(row.get("step"))
        text = row.get("completion", row.get("text"))
        if step is None or not step.is_integer() or not isinstance(text, str):
            return None
        return cls(
            step=int(step),
            set=str(row.get("set", "")),
            index=_whole_number(row.get("index", row.get("group"))) or 0,
            sample=_whole_number(row.get("sample")) or 0,
            prompt=prompt_text(row.get("prompt", "")),
            text=text,
            reward=_plottable_number(row.get("reward")),
            parts=_rewards_by_function(row.get("rewards")),
            tokens=_whole_number(row.get("tokens", row.get("completion_len"))),
            is_truncated=row.get("finish") == "length" or row.get("truncated") is True,
            advantage=_plottable_number(row.get("advantage")),
            images=_prompt_images(row.get("images")),
        )


def _rewards_by_function(entry: Any) -> dict[str, float]:
    """Return the known rewards of a row's `rewards`."""
    rewards: dict[str, float] = {}
    if isinstance(entry, Mapping):
        for name, value in entry.items():
            reward = _plottable_number(value)
            if reward is not None:
                rewards[str(name)] = reward
    return rewards


def _prompt_images(entries: Any) -> tuple[PromptImage, ...]:
    """Return the first MAX_PROMPT_IMAGES entries of a row's `images`, without damaged entries."""
    if not isinstance(entries, list):
        return ()
    images = [PromptImage.of(entry) for entry in entries[:MAX_PROMPT_IMAGES]]
    return tuple(image for image in images if image is not None)


class AnswerFile:
    """Index of a samples.jsonl or evals.jsonl by step.

    Such a file may be larger than the memory. So only the positions of each step's lines are stored, and the lines
    themselves are read when `read_step` is called.

    Attributes:
        steps: For each step, the byte ranges (begin, end) of its lines.
    """

    def __init__(self, path: Path):
        self.steps: dict[int, list[tuple[int, int]]] = {}
        self._lines = LineFollower(path)
        self._num_restarts = 0

    def refresh(self) -> bool:
        """Find new lines. Return whether the file has changed."""
        has_changed = False
        for start, line in self._lines.read_new():
            self._forget_after_restart()
            has_changed = True
            match = _STEP_OF_LINE.match(line)
            if match:
                step: int | None = int(match[1])
            else:
                step = _whole_number((parse_row(line) or {}).get("step"))
            if step is None:
                continue
            ranges = self.steps.setdefault(step, [])
            end = start + len(line)
            if ranges and ranges[-1][1] == start:  # the previous line of the file is of the same step
                ranges[-1] = (ranges[-1][0], end)
            else:
                ranges.append((start, end))
        # A file that was cut to nothing has no new line, so the loop has not noticed the restart.
        return self._forget_after_restart() or has_changed

    def _forget_after_restart(self) -> bool:
        """Forget all positions if the file is being read from its beginning again. Return whether it is."""
        if self._lines.num_restarts == self._num_restarts:
            return False
        self.steps = {}
        self._num_restarts = self._lines.num_restarts
        return True

    def read_step(self, step: int) -> Iterator[Answer]:
        """Yield the answers of a step, in the order in which they were written."""
        for start, end in self.steps.get(step, ()):
            with suppress(OSError), self._lines.path.open("rb") as file:  # the file may have been deleted
                file.seek(start)
                while file.tell() < end and (line := file.readline(LONGEST_LINE)):
                    row = parse_row(line)
                    answer = None if row is None else Answer.of(row)
                    if answer is not None and answer.step == step:
                        yield answer


def prompt_text(prompt: Any) -> str:
    """Return a prompt as text: messages with their roles, images in them as [image], other values as JSON.

    >>> prompt_text([{"role": "user", "content": "Hi"}])
    'Hi'
    >>> print(prompt_text([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]))
    system: Be brief.
    user: Hi
    """
    if isinstance(prompt, str):
        return prompt
    are_messages = isinstance(prompt, list) and all(isinstance(turn, Mapping) and "role" in turn for turn in prompt)
    if not are_messages or not prompt:
        return json.dumps(prompt, ensure_ascii=False)
    if len(prompt) == 1:
        text = _content_text(prompt[0].get("content"))
        if text is not None:
            return text
    lines = []
    for turn in prompt:
        text = _content_text(turn.get("content"))
        if text is None:
            text = json.dumps(turn.get("content"))
        lines.append(f"{turn['role']}: {text}")
    return "\n".join(lines)


def _content_text(content: Any) -> str | None:
    """Return the content of a message as text; None if it has parts other than texts and images."""
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


def _plottable_number(value: Any) -> float | None:
    """Return a plottable number of a row as a float; None for any other value."""
    parsed = number(value)
    return parsed if parsed is not None and is_plottable(parsed) else None


def _whole_number(value: Any) -> int | None:
    """Return a number of a row as an integer, if a float can hold that exactly; None for any other value."""
    parsed = _plottable_number(value)
    return None if parsed is None or abs(parsed) > 2**53 else int(parsed)
