"""Reward `math_verify`: answers that the package `math-verify` compares with sympy (expressions, sets, intervals).

The package's own time limits are alarms, which interrupt Python code but not a large power or factorial computed in C.
Instead, each comparison runs in a process of a pool (`pebble`), which is killed and replaced when the time is over.
"""

import logging
import os
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from dtrain.base import orphans
from dtrain.base.errors import UserError
from dtrain.rl.rewards.math_answers import extract_marked_answer
from dtrain.rl.rewards.right_answers import accepted_answers, score_math_answers

if TYPE_CHECKING:
    from pebble import ProcessPool

MAX_PROCESSES = 8  # sympy takes about 100 MB in each


class MathVerify:
    """Reward of 1.0 where the completion's answer equals the data's, else 0.0; None for a row without an answer.

    `math_exact` compares first. Answers that it finds different are parsed and compared by math-verify, as in
    `math_verify.parse` and `math_verify.verify`.

    Args:
        column: The data's answers: a number, a text of LaTeX with or without $, or a list of accepted answers.
        timeout: Seconds for one completion. An answer that takes longer is not right.

    Raises:
        UserError: If a package is not installed.

    Example:
        >>> MathVerify()(["It is $\\\\sqrt{8}$.", "\\\\boxed{(1, 2]}"], answer=["2\\\\sqrt{2}", "[1, 2]"])
        [1.0, 0.0]
    """

    def __init__(self, *, column: str = "answer", timeout: float = 5.0):
        missing = [name for name in ("math_verify", "pebble") if find_spec(name) is None]
        if missing:
            raise UserError(f"reward math_verify needs {' and '.join(missing)}, not installed: "
                            "pip install 'dtrain[math]'")  # fmt: skip
        self._column, self._timeout = column, timeout
        self._pool: ProcessPool | None = None

    def __call__(self, completions: Sequence[str], **columns: Sequence[Any]) -> list[float | None]:
        from pebble import ProcessExpired

        scores = score_math_answers("math_verify", completions, self._column, columns)
        accepted = accepted_answers("math_verify", self._column, columns)
        undecided = [row for row, score in enumerate(scores) if score == 0.0]
        if not undecided:
            return scores
        texts = [completions[row] for row in undecided]
        answers = [[str(answer) for answer in accepted[row]] for row in undecided]
        if self._pool is None:
            self._pool = _new_pool()
        verdicts = self._pool.map(is_equivalent, texts, answers, timeout=self._timeout).result()
        for row in undecided:
            try:
                scores[row] = float(next(verdicts))
            except (TimeoutError, ProcessExpired):  # too slow, or out of memory
                scores[row] = 0.0
        return scores


def is_equivalent(text: str, accepted: Sequence[str]) -> bool:
    """Return whether the answer in a text equals one of the accepted answers. Sets no time limit."""
    from math_verify import parse, verify

    if "####" in text and "\\boxed" not in text:
        text = _as_latex(text)
    answer_in_text = parse(text, parsing_timeout=None)
    for answer in accepted:
        right = parse(_as_latex(answer), parsing_timeout=None)
        if verify(right, answer_in_text, timeout_seconds=None):
            return True
    return False


def _as_latex(answer: str) -> str:
    """Return an answer in \\boxed{..}, without which math-verify reads no LaTeX.

    Example:
        >>> _as_latex("half of it. #### 1/2")
        '\\\\boxed{1/2}'
    """
    if "$" in answer or "\\boxed" in answer:
        return answer
    marked = extract_marked_answer(answer)
    return f"\\boxed{{{answer if marked is None else marked}}}"


def _new_pool() -> "ProcessPool":
    from multiprocessing import get_context

    from pebble import ProcessPool

    # This process may have threads, and a fork of a process with threads can deadlock. So a fork server without threads
    # makes the processes. The server has imported sympy already.
    context = get_context("forkserver")
    context.set_forkserver_preload(["math_verify", __name__])
    count = min(os.cpu_count() or 1, MAX_PROCESSES)
    return ProcessPool(max_workers=count, initializer=_begin, context=context)


def _begin() -> None:
    """Prepare a process of the pool."""
    orphans.end_with_parent(os.getppid())
    # math-verify would warn in each process that no time limit is set.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
