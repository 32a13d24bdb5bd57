"""The command `dtrain compare`: a report in the terminal. No torch."""

import argparse
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from dtrain.commands.report.results import Row, differences, identity_rows, results
from dtrain.commands.report.run_files import RunFiles, open_runs
from dtrain.training.metrics.terminal import plot, printable

NARROWEST = 16  # characters of a column
DRAWN = ("loss", "val_loss", "reward_mean", "val_reward_mean", "accuracy", "grad_norm", "tokens_per_sec")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="runs' directories, such as runs/x runs/y")


def run(arguments: argparse.Namespace) -> None:
    runs = open_runs(arguments.runs)
    print("\n".join(comparison(runs, shutil.get_terminal_size((100, 0)).columns)))


def comparison(runs: Sequence[RunFiles], width: int) -> Iterator[str]:
    """Yield the lines: the runs, what differs, results, and a small plot of each curve of learning."""
    parts = [("", identity_rows(runs)), ("what differs", differences(runs)), ("results (★ the best)", results(runs))]
    names = Row("", [run.name for run in runs])
    labels = min(max(len(row.label) for _, rows in parts for row in rows), 32)
    column = max(NARROWEST, (width - labels) // len(runs) - 2)
    for title, rows in parts:
        if rows:
            yield from [f"\n{title}"] if title else []
            for row in [names, *rows]:
                yield from _wrapped(row, labels, column)
    if len(runs) > 1 and not parts[1][1]:
        yield "\nno key of the recipes differs"
    fields = dict.fromkeys(field for run in runs for field in run.curves)
    measured = [field for field in fields if field.startswith("eval_") and field.endswith("_reward_mean")]
    for field in [*DRAWN, *measured]:
        known = [run.known(field) for run in runs]
        every = [point for points in known for point in points]
        for run, points in zip(runs, known, strict=True):
            if lines := plot(points, min(64, max(16, width - 32)), 4, every):
                yield from [f"\n{printable(field)}, {printable(run.name)}", *lines]


def _wrapped(row: Row, labels: int, column: int) -> Iterator[str]:
    """Yield a row of a table as lines; texts longer than their column go on below."""
    texts = [printable(text) + (" ★" if number in row.best else "") for number, text in enumerate(row.texts)]
    cells = [textwrap.wrap(text, column, break_on_hyphens=False) or [""] for text in texts]
    head = textwrap.wrap(printable(row.label), labels) or [""]
    for at in range(max(map(len, [head, *cells]))):
        parts = [f"{cell[at] if at < len(cell) else '':<{column}}" for cell in cells]
        yield "  ".join([f"{head[at] if at < len(head) else '':<{labels}}", *parts]).rstrip()
