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

STEPS = 5  # evaluations of a run whose answers are shown side by side
LONGEST = 1500  # maximum characters of an answer or a prompt
GROUP = 16  # maximum completions of a group
READ = 5000  # maximum completions of a rollout that are read

MAX_BOXES = 4  # number of boxes drawn for a dimension of the mesh, if the dimension has more than MAX_BOXES + 1 ranks
WORDS = {
    "dp_replicate": "copies of the sharded model (HSDP), a frame each",
    "dp_shard": "data-parallel ranks that share out the weights (FSDP2), a row each",
    "cp": "context-parallel ranks that share a sequence, a grey group each",
    "tp": "tensor-parallel ranks that share each matrix, the boxes of a group",
}

Prompt = tuple[str, int, str, tuple[str, ...]]  # set, index, text, digests of its images


def prompts(runs: Sequence[RunFiles], max_prompts: int) -> tuple[list[tuple[Prompt, dict[int, list[Answer]]]], int]:
    """Return the first prompts of the evaluations with their answers at several steps.

    Args:
        runs: The runs.
        max_prompts: Number of prompts of each evaluation set.

    Returns:
        For each prompt its answers by the run's number, and the number of all prompts.
    """
    evaluated_steps = [set(run.evals.steps) for run in runs if run.evals.steps]
    common_steps: list[int] = []
    if evaluated_steps:
        common_steps = _spread(sorted(set.intersection(*evaluated_steps)), STEPS - 1)
    answers_by_prompt: dict[Prompt, dict[int, list[Answer]]] = {}
    all_prompts: set[Prompt] = set()
    for number, run in enumerate(runs):
        own_steps = sorted(run.evals.steps)
        if len(runs) > 1 and common_steps:
            # Several runs are compared at the same steps. The last step of each run is shown too.
            steps = sorted({*common_steps, *own_steps[-1:]})
        else:
            steps = _spread(own_steps, STEPS)
        for step in steps:
            for answer in run.evals.read_step(step):
                digests = tuple(image.digest for image in answer.images)
                key = (answer.set, answer.index, answer.prompt, digests)
                all_prompts.add(key)
                if answer.sample == 0 and answer.index < max_prompts:
                    answers_by_prompt.setdefault(key, {}).setdefault(number, []).append(answer)
    sets = list(dict.fromkeys(set_name for set_name, *_ in answers_by_prompt))

    def order(item: tuple[Prompt, dict[int, list[Answer]]]) -> tuple[int, int]:
        (set_name, index, _, _), _ = item
        return sets.index(set_name), index

    return sorted(answers_by_prompt.items(), key=order), len(all_prompts)


@dataclass(frozen=True)
class Group:
    """The completions of one prompt in a rollout.

    Attributes:
        prompt: A completion with the prompt.
        names: Names of the reward functions, if there are several.
        answers: The best completions, best first, each with the position of its reward between 0 (or the lowest reward,
            if it is negative) and the highest reward, from 0 to 1.
        num_more: Number of completions that are left out. Not positive if none is.
    """

    prompt: Answer
    names: list[str]
    answers: list[tuple[Answer, float]]
    num_more: int


def groups(runs: Sequence[RunFiles]) -> dict[int, list[Group]]:
    """Return, by the run's number, the group whose rewards differ most in its first, middle and last rollout."""
    groups_by_run = {}
    for number, run in enumerate(runs):
        widest = [_widest_group(run.samples, step) for step in _spread(sorted(run.samples.steps), 3)]
        if any(widest):
            groups_by_run[number] = [_group(answers) for answers in widest if answers]
    return groups_by_run


def _rewards(answers: Sequence[Answer]) -> list[float]:
    return [answer.reward for answer in answers if answer.reward is not None]


def _widest_group(samples: AnswerFile, step: int) -> list[Answer]:
    """Return the group of a rollout whose rewards differ most, the first if there are several."""
    by_prompt: dict[int, list[Answer]] = {}
    for answer in islice(samples.read_step(step), READ):
        by_prompt.setdefault(answer.index, []).append(answer)

    def reward_range(group: list[Answer]) -> float:
        rewards = _rewards(group)
        return max(rewards) - min(rewards) if rewards else -1.0

    return max(by_prompt.values(), key=reward_range, default=[])


def _group(answers: Sequence[Answer]) -> Group:
    """Rank the completions of a prompt by their rewards."""

    def reward_or_lowest(answer: Answer) -> float:
        return -math.inf if answer.reward is None else answer.reward

    rewards = _rewards(answers)
    low = min(0.0, *rewards) if rewards else 0.0
    high = max(rewards) if rewards else 0.0
    ranked = []
    for answer in sorted(answers, key=reward_or_lowest, reverse=True)[:GROUP]:
        position = 0.0
        if answer.reward is not None and high > low:
            position = (answer.reward - low) / (high - low)
        ranked.append((answer, position))
    names = list(dict.fromkeys(name for answer in answers for name in answer.parts))
    return Group(answers[0], names if len(names) > 1 else [], ranked, len(answers) - GROUP)


def meshes(runs: Sequence[RunFiles]) -> list[dict[str, Any]]:
    """Return each different mesh of the runs: its picture, its description, a legend and the numbers of its runs."""
    runs_by_mesh: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for number, run in enumerate(runs):
        sizes = mesh_of(run)
        if sizes:
            runs_by_mesh.setdefault(tuple(sizes.items()), []).append(number)
    entries = []
    for mesh, numbers in runs_by_mesh.items():
        sizes = dict(mesh)
        entries.append(
            {
                "picture": Markup(picture(sizes)),
                "words": describe_mesh(runs[numbers[0]]),
                "legend": legend(sizes),
                "runs": numbers,
            }
        )
    return entries


def notes(runs: Sequence[RunFiles]) -> list[tuple[int, str]]:
    """Return notes on data that is missing on the page, each with the run's number."""
    entries = []
    for number, run in enumerate(runs):
        longest = max((len(curve.steps) for curve in run.curves.values()), default=0)
        if longest > charts.MAX_POINTS:
            text = (
                f"its curves have up to {longest:,} points; the charts show about {charts.MAX_POINTS:,} of each, "
                "including the smallest and the largest value of every bucket of neighbours"
            )
            entries.append((number, text))
        num_skipped = run.damaged + run.metrics.num_skipped
        if num_skipped:
            entries.append((number, f"{num_skipped:,} damaged or overlong lines of metrics.jsonl are left out"))
        if not run.curves:
            entries.append((number, "it has no row of metrics yet"))
        if run.planned_gib is None and "mem_gib" in run.curves:
            entries.append((number, "no plan of its memory is known (metrics.plan=true makes one)"))
    return entries


def key_of(chart: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the legend of a chart: the name and the dash of each line."""
    names = dict.fromkeys((line["name"], line["dash"]) for line in chart["lines"])
    key = list(names)
    if chart["levels"]:
        key.append(("planned", "level"))
    return key


def _spread(steps: Sequence[int], max_steps: int) -> list[int]:
    """Return at most `max_steps` of the steps, evenly spaced, including the first and the last.

    Example:
        >>> _spread([10, 20, 30, 40, 50, 60], 3)
        [10, 30, 60]
    """
    if len(steps) <= max_steps:
        return list(steps)
    indices = [round(number * (len(steps) - 1) / (max_steps - 1)) for number in range(max_steps)]
    return sorted({steps[index] for index in indices})


def picture(sizes: Mapping[str, int], first_rank: int = 0) -> str:
    """Return a picture of a mesh as nested boxes of HTML.

    Replicas are frames, data-parallel ranks are rows in a frame, context-parallel ranks are groups in a row, and
    tensor-parallel ranks are the boxes of a group.

    Args:
        sizes: Size of each dimension, from the outermost: dp_replicate, dp_shard, cp, tp.
        first_rank: Number of the first rank.

    Example:
        >>> picture({"tp": 2}, first_rank=4)
        '<div class="tp several"><b>4</b><b>5</b></div>'
    """
    if not sizes:
        return f"<b>{first_rank}</b>"
    (name, size), *inner_sizes = sizes.items()
    inner = dict(inner_sizes)
    ranks_per_part = math.prod(inner.values())
    # If there are many parts, only the first ones and the last one are drawn, with dots between them.
    has_gap = size > MAX_BOXES + 1
    drawn = [*range(MAX_BOXES - 1), size - 1] if has_gap else list(range(size))
    parts = []
    for index in drawn:
        if has_gap and index == size - 1:
            parts.append("<i>⋯</i>")
        parts.append(picture(inner, first_rank + index * ranks_per_part))
    several = " several" if size > 1 else ""
    return f'<div class="{name}{several}">{"".join(parts)}</div>'


def legend(sizes: Mapping[str, int]) -> list[str]:
    """Return the legend of the picture's groups, from the outermost."""
    if math.prod(sizes.values()) == 1:
        return ["one process holds everything"]
    return [f"{name} {size}: {WORDS[name]}" for name, size in sizes.items() if size > 1]
