"""The command `dtrain compare`: tables and small plots of runs in the terminal. No torch."""

import argparse
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from dtrain.commands.report.results import Row, differences, identity_rows, results
from dtrain.commands.report.run_files import RunFiles, open_runs
from dtrain.training.metrics.terminal import plot, printable

NARROWEST = 16  # minimum width of a column in characters
DRAWN = ("loss", "val_loss", "reward_mean", "val_reward_mean", "accuracy", "grad_norm", "tokens_per_sec")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `dtrain compare`."""
    runs = "directories of runs, such as runs/x runs/y"
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help=runs)


def run(arguments: argparse.Namespace) -> None:
    """Print the comparison."""
    runs = open_runs(arguments.runs)
    print("\n".join(comparison(runs, shutil.get_terminal_size((100, 0)).columns)))


def comparison(runs: Sequence[RunFiles], width: int) -> Iterator[str]:
    """Yield the lines of a comparison: tables of the runs, their differences and results, then plots of their curves.

    Args:
        runs: The runs.
        width: Width of the terminal in characters.
    """
    differing_keys = differences(runs)
    tables = [
        ("", identity_rows(runs)),
        ("what differs", differing_keys),
        ("results (★ the best)", results(runs)),
    ]
    names = Row("", [run.name for run in runs])
    longest_label = max(len(row.label) for _, rows in tables for row in rows)
    label_width = min(longest_label, 32)
    column_width = max(NARROWEST, (width - label_width) // len(runs) - 2)
    for title, rows in tables:
        if not rows:
            continue
        if title:
            yield f"\n{title}"
        for row in [names, *rows]:
            yield from _table_lines(row, label_width, column_width)
    if len(runs) > 1 and not differing_keys:
        yield "\nno key of the recipes differs"
    measured = dict.fromkeys(field for run in runs for field in run.curves)
    rewards = [field for field in measured if field.startswith("eval_") and field.endswith("_reward_mean")]
    for field in [*DRAWN, *rewards]:
        yield from _plots(runs, field, width)


def _plots(runs: Sequence[RunFiles], field: str, width: int) -> Iterator[str]:
    """Yield a plot of a field for each run, with the same axes for all runs."""
    all_points = [point for run in runs for point in run.points(field)]
    plot_width = min(64, max(16, width - 32))
    for run in runs:
        lines = plot(run.points(field), plot_width, 4, all_points)
        if lines:
            yield f"\n{printable(field)}, {printable(run.name)}"
            yield from lines


def _table_lines(row: Row, label_width: int, column_width: int) -> Iterator[str]:
    """Yield a row of a table as lines. Texts that are longer than their column continue on the next line."""
    cells = [textwrap.wrap(printable(row.label), label_width) or [""]]
    for number, text in enumerate(row.texts):
        star = " ★" if number in row.best else ""
        cells.append(textwrap.wrap(printable(text) + star, column_width, break_on_hyphens=False) or [""])
    widths = [label_width] + [column_width] * len(row.texts)
    for line in range(max(len(cell) for cell in cells)):
        parts = []
        for cell, cell_width in zip(cells, widths, strict=True):
            text = cell[line] if line < len(cell) else ""
            parts.append(f"{text:<{cell_width}}")
        yield "  ".join(parts).rstrip()
