"""The parts of the page that are text, readable without JavaScript. Every word of a run is escaped here."""

import math
from collections.abc import Iterable, Sequence
from html import escape
from itertools import islice

import yaml

from dtrain.commands.report import charts as figures
from dtrain.commands.report import mesh
from dtrain.commands.report.measures import shown
from dtrain.commands.report.results import Row, cut, differences, identities, mesh_of, mesh_words, results
from dtrain.commands.report.run_files import RunFiles
from dtrain.run.metrics import records
from dtrain.run.metrics.terminal import printable

STEPS = 5  # of a run whose answers are shown side by side
LONGEST = 1500  # characters of an answer or a prompt
GROUP = 16  # completions of a group
READ = 5000  # completions of a rollout that are looked at
RECIPE = 50_000  # characters of a recipe


def safe(text: str) -> str:
    """Return text for HTML: no tag, no attribute's end, no control character, no half of a surrogate pair."""
    return escape(printable(text.replace("\r\n", "\n")).encode("utf-8", "replace").decode())


def chip(number: int, name: str) -> str:
    """Return a run's name in its colour."""
    return f'<span class="chip" data-run="{number % 8}"><bdi>{safe(name)}</bdi></span>'


def scrolls(body: str, label: str, kind: str = "") -> str:
    """Return a part that may be wider than the page and scrolls, also by keyboard."""
    return f'<div class="scroll {kind}" tabindex="0" role="region" aria-label="{label}">{body}</div>'


def table(runs: Sequence[RunFiles], rows: Sequence[Row], caption: str, code: bool = False) -> str:
    """Return a table of rows by runs. code: the labels are keys."""
    head = "".join(f'<th scope="col">{chip(number, run.name)}</th>' for number, run in enumerate(runs))
    lines = [f'<caption class="out">{caption}</caption><thead><tr><td></td>{head}</tr></thead><tbody>']
    for row in rows:
        label = f"<code>{safe(row.label)}</code>" if code else safe(row.label)
        cells = [
            f'<td class="best">{safe(text)} <abbr title="the best of the runs">★</abbr></td>'
            if number in row.best
            else f"<td>{safe(text)}</td>"
            for number, text in enumerate(row.texts)
        ]
        lines.append(f'<tr><th scope="row">{label}</th>{"".join(cells)}</tr>')
    return scrolls(f"<table>{''.join(lines)}</tbody></table>", caption)


def overview(runs: Sequence[RunFiles]) -> str:
    parts = [table(runs, identities(runs), "What the runs are" if len(runs) > 1 else "What the run is")]
    if rows := results(runs):
        parts.append(f"<h3>Results</h3>{table(runs, rows, 'Results')}")
    return "".join(parts)


def differing(runs: Sequence[RunFiles]) -> str:
    """Return the differences between the recipes; nothing for one run."""
    if len(runs) < 2:
        return ""
    rows = differences(runs)
    return table(runs, rows, "Keys that differ", code=True) if rows else "<p>No key of the recipes differs.</p>"


def answers(runs: Sequence[RunFiles], most: int) -> str:
    """Return the evaluations' first prompts, with the runs' answers at several steps side by side."""
    blocks: dict[tuple[str, int, str], list[tuple[int, records.Answer]]] = {}
    total: set[tuple[str, int, str]] = set()
    held = [run.evals.steps.keys() for run in runs if run.evals.steps]
    common = _spread(sorted(set.intersection(*map(set, held))), STEPS - 1) if held else []
    for number, run in enumerate(runs):
        own = sorted(run.evals.steps)
        for step in sorted({*common, *own[-1:]}) if len(runs) > 1 and common else _spread(own, STEPS):
            for answer in run.evals.of_step(step):
                key = (answer.set, answer.index, answer.prompt)
                total.add(key)
                if answer.sample == 0 and answer.index < most:
                    blocks.setdefault(key, []).append((number, answer))
    if not blocks:
        return ""
    parts = []
    sets = dict.fromkeys(name for name, _, _ in blocks)
    for (name, index, prompt), entries in sorted(
        blocks.items(), key=lambda block: (list(sets).index(block[0][0]), block[0][1])
    ):
        rows = []
        for number in dict.fromkeys(number for number, _ in entries):
            cards = "".join(_card(answer) for who, answer in entries if who == number)
            rows.append(chip(number, runs[number].name) if len(runs) > 1 else "")
            rows.append(scrolls(cards, f"Answers to prompt {index}", "side"))
        head = f"<h3>{safe(name) or 'evaluation'}, prompt {index}</h3>{_text(prompt, 'prompt')}"
        parts.append(f"<article>{head}{''.join(rows)}</article>")
    note = f"<p>The first {most} prompts of each set, and of each run at most {STEPS} of its evaluations; "
    note += f"{len(blocks):,} of {len(total):,} prompts are here.</p>"
    return note + "".join(parts)


def _card(answer: records.Answer) -> str:
    cut_off = '<span class="warn">cut off</span>' if answer.is_truncated else ""
    tokens = f"{answer.tokens:,} tokens" if answer.tokens is not None else ""
    head = f"<header><b>step {answer.step:,}</b> {_reward(answer)} <small>{tokens}</small> {cut_off}</header>"
    return f'<section class="answer">{head}{_text(answer.text, "text")}</section>'


def _reward(answer: records.Answer) -> str:
    if answer.reward is None:
        return '<span class="reward">no reward</span>'
    parts = ", ".join(f"{name} {shown(value)}" for name, value in answer.parts.items())
    return f'<span class="reward" title="{safe(parts)}">reward {shown(answer.reward)}</span>'


def _text(text: str, kind: str) -> str:
    return f'<pre class="{kind}" dir="auto">{safe(cut(text, LONGEST)) or "<i>(empty)</i>"}</pre>'


def groups(runs: Sequence[RunFiles]) -> str:
    """Return the group whose rewards differ most, of each run's first, middle and last rollout."""
    parts = []
    for number, run in enumerate(runs):
        steps = _spread(sorted(run.samples.steps), 3)
        if not steps:
            continue
        parts.append(f"<h3>{chip(number, run.name)}</h3>" if len(runs) > 1 else "")
        for place, step in enumerate(steps):
            widest = _widest(run.samples, step)
            if widest:
                is_open = " open" if place == len(steps) - 1 else ""
                head = f"<summary>The rollout before step {step:,}: prompt {widest[0].index}</summary>"
                parts.append(f'<details id="group-{number}-{place}"{is_open}>{head}{_group(widest)}</details>')
    if not any(parts):
        return ""
    note = "<p>Of the first, the middle and the last rollout, the group of completions whose rewards differ most.</p>"
    return note + "".join(parts)


def _widest(index: records.Answers, step: int) -> list[records.Answer]:
    """Return the group of a step whose rewards differ most; the first of several."""
    by_prompt: dict[int, list[records.Answer]] = {}
    for answer in islice(index.of_step(step), READ):
        by_prompt.setdefault(answer.index, []).append(answer)

    def width(group: list[records.Answer]) -> float:
        known = [answer.reward for answer in group if answer.reward is not None]
        return max(known) - min(known) if known else -1.0

    return max(by_prompt.values(), key=width, default=[])


def _group(group: Sequence[records.Answer]) -> str:
    ranked = sorted(group, key=lambda answer: -math.inf if answer.reward is None else answer.reward, reverse=True)
    known = [answer.reward for answer in group if answer.reward is not None]
    low, high = (min(0.0, *known), max(known)) if known else (0.0, 0.0)
    names = list(dict.fromkeys(name for answer in group for name in answer.parts))
    names = names if len(names) > 1 else []
    head = "".join(
        f'<th scope="col">{safe(name)}</th>' for name in ["reward", *names, "advantage", "tokens", "completion"]
    )
    lines = []
    for answer in ranked[:GROUP]:
        share = (answer.reward - low) / (high - low) if answer.reward is not None and high > low else 0.0
        reward = "none" if answer.reward is None else shown(answer.reward)
        bar = f'<meter min="0" max="1" value="{share:.3f}" aria-hidden="true"></meter>'
        parts = "".join(f"<td>{_number(answer.parts.get(name))}</td>" for name in names)
        cut_off = ' <span class="warn">cut off</span>' if answer.is_truncated else ""
        tokens = "" if answer.tokens is None else f"{answer.tokens:,}"
        lines.append(
            f"<tr><td>{bar} {reward}</td>{parts}<td>{_number(answer.advantage)}</td><td>{tokens}{cut_off}</td>"
            f"<td>{_text(answer.text, 'text')}</td></tr>"
        )
    more = f"<p>{len(group) - GROUP:,} more completions are left out.</p>" if len(group) > GROUP else ""
    body = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    region = scrolls(body, "Completions with their rewards", "group")
    return f"{_text(group[0].prompt, 'prompt')}{region}{more}"


def _number(value: float | None) -> str:
    return "" if value is None else shown(value)


def meshes(runs: Sequence[RunFiles]) -> str:
    """Return a picture for each mesh of the runs."""
    known: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for number, run in enumerate(runs):
        if sizes := mesh_of(run):
            known.setdefault(tuple(sizes.items()), []).append(number)
    parts = []
    for key, numbers in known.items():
        sizes, words = dict(key), safe(mesh_words(runs[numbers[0]]))
        names = " ".join(chip(number, runs[number].name) for number in numbers) if len(runs) > 1 else ""
        lines = "".join(f"<li>{line}</li>" for line in mesh.legend(sizes))
        caption = f"<figcaption>{names} {words}<ul>{lines}</ul></figcaption>"
        parts.append(f"<figure>{scrolls(mesh.picture(sizes, words), 'Mesh')}{caption}</figure>")
    return f'<div class="row">{"".join(parts)}</div>' if parts else ""


def recipes(runs: Sequence[RunFiles]) -> str:
    parts = []
    for number, run in enumerate(runs):
        if run.recipe:
            text = cut(yaml.safe_dump(run.recipe, sort_keys=False, allow_unicode=True), RECIPE)
            head = f"<summary>The recipe of {chip(number, run.name)}</summary>"
            shown_text = f'<pre class="scroll" tabindex="0">{safe(text)}</pre>'
            parts.append(f'<details id="recipe-{number}">{head}{shown_text}</details>')
    return "".join(parts)


def notes(runs: Sequence[RunFiles]) -> str:
    """Return notes on data that is not on the page, or only in part."""
    lines = []
    for number, run in enumerate(runs):
        longest = max((len(curve.steps) for curve in run.curves.values()), default=0)
        texts = []
        if longest > figures.MOST:
            texts.append(
                f"its curves have {longest:,} points; a chart has about {figures.MOST:,} of each, the smallest and the "
                "largest of every bucket of neighbours among them"
            )
        if unread := run.damaged + run.metrics.skipped:
            texts.append(f"{unread:,} damaged or overlong lines of metrics.jsonl are left out")
        if not run.curves:
            texts.append("it has no row of metrics yet")
        if run.planned_gib is None and "mem_gib" in run.curves:
            texts.append("no plan of its memory is known (metrics.plan=true makes one)")
        lines += [f"<li>{chip(number, run.name)} {text}</li>" for text in texts]
    return f"<ul>{''.join(lines)}</ul>" if lines else ""


def _spread(steps: Sequence[int], most: int) -> list[int]:
    """Return at most `most` of the steps, evenly spaced, the first and the last among them."""
    if len(steps) <= most:
        return list(steps)
    return sorted({steps[round(at * (len(steps) - 1) / (most - 1))] for at in range(most)})


def charts(drawn: Iterable[dict], runs: Sequence[RunFiles]) -> str:
    """Return a frame for each chart, with its values as text; page.js draws into it."""
    parts, before = [], None
    for chart in drawn:
        if chart["group"] != before:
            if before is not None:
                parts.append("</div>")
            before = chart["group"]
            parts.append(f"<h3>{safe(before)}</h3>" if before else "")
            parts.append('<div class="charts">')
        parts.append(_figure(chart, runs))
    return "".join([*parts, "</div>"]) if parts else ""


def _figure(chart: dict, runs: Sequence[RunFiles]) -> str:
    unit = f" <small>{safe(chart['unit'])}</small>" if chart["unit"] else ""
    names = list(dict.fromkeys((line["name"], line["dash"]) for line in chart["lines"]))
    if chart["levels"]:
        names.append(("planned", "level"))
    key = "".join(f'<li><i class="{dash}"></i>{safe(name)}</li>' for name, dash in names) if len(names) > 1 else ""
    captions = []
    for note in chart["told"]:
        who = chip(note["run"], runs[note["run"]].name) if len(runs) > 1 else ""
        captions.append(f"<li>{who} {safe(note['name'])}: {safe(note['text'])}</li>")
    return (
        f'<figure id="{chart["id"]}"><h4>{safe(chart["title"])}{unit}</h4><ul class="key">{key}</ul>'
        f'<div class="plot" role="img" aria-label="{safe(chart["title"])}, as told below"></div>'
        f"<figcaption><ul>{''.join(captions)}</ul></figcaption></figure>"
    )
