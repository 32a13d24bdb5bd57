"""The command `dtrain report`: its arguments and its output file. No torch."""

import argparse
from pathlib import Path

from dtrain.base.errors import UserError, describe_error
from dtrain.base.files import atomic_write_text
from dtrain.commands.arguments import at_least
from dtrain.commands.web import check_installed

RUNS = "directories of runs, such as runs/x; the page has the name of the first"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `dtrain report`."""
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help=RUNS)
    out = "HTML file to write (default: report.html)"
    parser.add_argument("-o", "--out", metavar="FILE", type=Path, default=Path("report.html"), help=out)
    answers = "number of prompts of each evaluation whose answers are included (default: 8)"
    parser.add_argument("--answers", type=at_least(1), default=8, metavar="N", help=answers)
    live = "serve the page on this machine and update it until Ctrl-C, instead of writing a file"
    parser.add_argument("--live", action="store_true", help=live)
    port = "port of --live; 0 chooses a free one (default: 8001)"
    parser.add_argument("--port", type=at_least(0), default=8001, help=port)


def run(arguments: argparse.Namespace) -> None:
    """Write the page, or serve it with --live."""
    from dtrain.commands.report.page import MARK, page, page_state, plotly
    from dtrain.commands.report.run_files import open_runs

    if arguments.live:
        check_installed("dtrain report --live")
    library = plotly()
    runs = open_runs(arguments.runs)
    if arguments.live:
        from dtrain.commands.report.live import follow

        follow(runs, arguments.answers, arguments.port, library)
        return
    out: Path = arguments.out
    if out.is_dir():
        raise UserError(f"-o {out} is a directory: name a file, such as {out / 'report.html'}")
    try:
        if out.exists():
            with out.open("rb") as file:
                if MARK.encode() not in file.read(1000):
                    raise UserError(f"-o {out} already exists and is not a report of dtrain; choose another name")
        text = page(*page_state(runs, arguments.answers), library)
        atomic_write_text(out, text)
    except OSError as error:
        raise UserError(f"-o {describe_error(error)}") from error
    print(f"wrote {out} ({_bytes(len(text.encode()))}, {_bytes(len(library.encode()))} of them the charts' library)")


def _bytes(size: float) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.0f} kB"
