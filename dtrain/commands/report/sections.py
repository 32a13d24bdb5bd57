"""The data of the page's sections that are text, for the templates in sections.html."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from markupsafe import Markup

from dtrain.commands.report import charts
from dtrain.commands.report.results import describe_mesh, mesh_of
from dtrain.commands.report.run_files import RunFiles
from dtrain.training.metrics.records import Answer, AnswerFile

STEPS = 5  # of a run whose answers are shown side by side
LONGEST = 1500  # characters of an answer or a prompt
GROUP = 16  # completions of a group
READ = 5000  # completions of a rollout that are looked at

MAX_BOXES = 4  # boxes drawn of a dimension with more of them than MAX_BOXES + 1
WORDS = {
    "dp_replicate": "copies of the sharded model (HSDP), a frame each",
    "dp_shard": "data-parallel ranks that share out the weights (FSDP2), a row each",
    "cp": "context-parallel ranks that share a sequence, a grey group each",
    "tp": "tensor-parallel ranks that share each matrix, the boxes of a group",
}

Prompt = tuple[str, int, str, tuple[str, ...]]  # set, index, text, digests of its images


def prompts(runs: Sequence[RunFiles], most: int) -> tuple[list[tuple[Prompt, dict[int, list[Answer]]]], int]:
    """Return the evaluations' first prompts, each with its answers at several steps by run, and the number of all
    prompts."""
    blocks: dict[Prompt, dict[int, list[Answer]]] = {}
    total: set[Prompt] = set()
    held = [run.evals.steps.keys() for run in runs if run.evals.steps]
    common = _spread(sorted(set.intersection(*map(set, held))), STEPS - 1) if held else []
    for number, run in enumerate(runs):
        own = sorted(run.evals.steps)
        for step in sorted({*common, *own[-1:]}) if len(runs) > 1 and common else _spread(own, STEPS):
            for answer in run.evals.read_step(step):
                key = (answer.set, answer.index, answer.prompt, tuple(image.digest for image in answer.images))
                total.add(key)
                if answer.sample == 0 and answer.index < most:
                    blocks.setdefault(key, {}).setdefault(number, []).append(answer)
    sets = list(dict.fromkeys(name for name, *_ in blocks))
    return sorted(blocks.items(), key=lambda block: (sets.index(block[0][0]), block[0][1])), len(total)


@dataclass(frozen=True)
class Group:
    """The completions of a prompt, the best first, each with its reward's share of the rewards' range. names: of the
    rewards' parts where there are several; num_more: completions that are left out."""

    prompt: Answer
    names: list[str]
    answers: list[tuple[Answer, float]]
    num_more: int


def groups(runs: Sequence[RunFiles]) -> dict[int, list[Group]]:
    """Return by run the group whose rewards differ most, of its first, middle and last rollout."""
    by_run = {}
    for number, run in enumerate(runs):
        widest = [_widest(run.samples, step) for step in _spread(sorted(run.samples.steps), 3)]
        if any(widest):
            by_run[number] = [_group(answers) for answers in widest if answers]
    return by_run


def _rewards(answers: Sequence[Answer]) -> list[float]:
    return [answer.reward for answer in answers if answer.reward is not None]


def _widest(index: AnswerFile, step: int) -> list[Answer]:
    """Return the group of a step whose rewards differ most; the first of several."""
    by_prompt: dict[int, list[Answer]] = {}
    for answer in islice(index.read_step(step), READ):
        by_prompt.setdefault(answer.index, []).append(answer)

    def width(group: list[Answer]) -> float:
        known = _rewards(group)
        return max(known) - min(known) if known else -1.0

    return max(by_prompt.values(), key=width, default=[])


def _group(answers: Sequence[Answer]) -> Group:
    ranked = sorted(answers, key=lambda answer: -math.inf if answer.reward is None else answer.reward, reverse=True)
    known = _rewards(answers)
    low, high = (min(0.0, *known), max(known)) if known else (0.0, 0.0)

    def share(reward: float | None) -> float:
        return (reward - low) / (high - low) if reward is not None and high > low else 0.0

    names = list(dict.fromkeys(name for answer in answers for name in answer.parts))
    shares = [(answer, share(answer.reward)) for answer in ranked[:GROUP]]
    return Group(answers[0], names if len(names) > 1 else [], shares, len(answers) - GROUP)


def meshes(runs: Sequence[RunFiles]) -> list[dict[str, Any]]:
    """Return a picture for each mesh of the runs, with words, a legend and the runs' numbers."""
    known: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for number, run in enumerate(runs):
        if sizes := mesh_of(run):
            known.setdefault(tuple(sizes.items()), []).append(number)
    entries = []
    for key, numbers in known.items():
        sizes, words = dict(key), describe_mesh(runs[numbers[0]])
        entries.append({"picture": Markup(picture(sizes)), "words": words, "legend": legend(sizes), "runs": numbers})
    return entries


def notes(runs: Sequence[RunFiles]) -> list[tuple[int, str]]:
    """Return notes on data that is not on the page, or only in part, each with its run's number."""
    entries = []
    for number, run in enumerate(runs):
        longest = max((len(curve.steps) for curve in run.curves.values()), default=0)
        if longest > charts.MAX_POINTS:
            kept = charts.MAX_POINTS
            text = f"its curves have {longest:,} points; a chart has about {kept:,} of each, the smallest and "
            entries.append((number, f"{text}the largest of every bucket of neighbours among them"))
        if unread := run.damaged + run.metrics.num_skipped:
            entries.append((number, f"{unread:,} damaged or overlong lines of metrics.jsonl are left out"))
        if not run.curves:
            entries.append((number, "it has no row of metrics yet"))
        if run.planned_gib is None and "mem_gib" in run.curves:
            entries.append((number, "no plan of its memory is known (metrics.plan=true makes one)"))
    return entries


def key_of(chart: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the names of a chart's lines, each with its dash."""
    names = dict.fromkeys((line["name"], line["dash"]) for line in chart["lines"])
    return [*names, *([("planned", "level")] if chart["levels"] else [])]


def _spread(steps: Sequence[int], most: int) -> list[int]:
    """Return at most `most` of the steps, evenly spaced, the first and the last among them."""
    if len(steps) <= most:
        return list(steps)
    return sorted({steps[round(at * (len(steps) - 1) / (most - 1))] for at in range(most)})


def picture(sizes: Mapping[str, int], rank: int = 0) -> str:
    """Return a picture of the mesh from `rank` on as nested boxes of HTML, its sizes by name (dp_replicate, dp_shard,
    cp, tp): a frame for each replica, in it a row for each data-parallel rank, in that a group for each
    context-parallel rank, in that a box for each tensor-parallel one."""
    if not sizes:
        return f"<b>{rank}</b>"
    (name, size), *inner = sizes.items()
    step = math.prod(count for _, count in inner)
    shown = range(size) if size <= MAX_BOXES + 1 else (*range(MAX_BOXES - 1), None, size - 1)
    parts = ["<i>⋯</i>" if at is None else picture(dict(inner), rank + at * step) for at in shown]
    return f'<div class="{name}{" several" if size > 1 else ""}">{"".join(parts)}</div>'


def legend(sizes: Mapping[str, int]) -> list[str]:
    """Return the legend of the picture's groups, from the outermost."""
    if math.prod(sizes.values()) == 1:
        return ["one process holds everything"]
    return [f"{name} {size}: {WORDS[name]}" for name, size in sizes.items() if size > 1]
