"""Standard input of commands that read a line for each prompt."""

import io
import sys


def keep_carriage_returns() -> None:
    r"""Let only `\n` end a line of standard input, before anything is read from it.

    Python's default also ends a line at a lone `\r`, which may be part of a prompt, as in a captured progress bar.
    """
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(newline="\n")
