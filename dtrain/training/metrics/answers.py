"""Completions of a run, read from samples.jsonl and evals.jsonl also while the run still goes. No torch."""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtrain.training.metrics.records import LONGEST, Lines, is_sound, number, row_of

MOST_IMAGES = 64  # of a prompt
_STEP = re.compile(rb'\{"step": (\d{1,18})[,}]')


@dataclass(frozen=True)
class ImageOfPrompt:
    """Image of a prompt. digest: SHA-256 of its bytes, in hex. path: its file; None: its bytes are in the data's
    cache."""

    name: str
    digest: str
    path: str | None = None

    @classmethod
    def of(cls, entry: Any) -> "ImageOfPrompt | None":
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
    images: tuple[ImageOfPrompt, ...] = ()

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
            reward=_known(row.get("reward")),
            parts={str(name): known for name, value in named if (known := _known(value)) is not None},
            tokens=_count(row.get("tokens", row.get("completion_len"))),
            is_truncated=row.get("finish") == "length" or row.get("truncated") is True,
            advantage=_known(row.get("advantage")),
            images=tuple(filter(None, map(ImageOfPrompt.of, images[:MOST_IMAGES] if isinstance(images, list) else ()))),
        )


class Answers:
    """samples.jsonl or evals.jsonl by their steps. `steps`: of each, where its lines begin and end; rows are read when
    they are asked for, since such a file may be larger than the memory."""

    def __init__(self, path: Path):
        self.steps: dict[int, list[tuple[int, int]]] = {}
        self._lines, self._times = Lines(path), 0

    def look(self) -> bool:
        """Find the steps that are new; whether there is anything new."""
        is_new = False
        for start, line in self._lines.look():
            is_new = self._renew() or True
            match = _STEP.match(line)  # as dtrain writes a row
            step = int(match[1]) if match else _count((row_of(line) or {}).get("step"))
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
        if self._lines.times == self._times:
            return False
        self.steps, self._times = {}, self._lines.times
        return True

    def of_step(self, step: int) -> Iterator[Answer]:
        """The answers of a step, as they were written."""
        for start, end in self.steps.get(step, ()):
            with suppress(OSError), self._lines.path.open("rb") as file:  # it may have gone since
                file.seek(start)
                while file.tell() < end and (line := file.readline(LONGEST)):
                    if (
                        (row := row_of(line)) is not None
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


def _known(value: Any) -> float | None:
    known = number(value)
    return known if known is not None and is_sound(known) else None


def _count(value: Any) -> int | None:
    known = _known(value)
    return None if known is None or abs(known) > 2**53 else int(known)
