"""Reward: the share of tests that the Python code in a completion passes. Code has the standard library alone."""

import json
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from dtrain.errors import UserError
from dtrain.ranges import shown
from dtrain.rollout.rewards.columns import no_column
from dtrain.rollout.rewards.jail import Jail

_BLOCK = re.compile(r"^```(?:python|py|python3)?[ \t]*\n(.*?)^```", re.DOTALL | re.MULTILINE | re.IGNORECASE)

Test = tuple[str, str | None, str | None]  # code, its input, its output


class PythonTests:
    """column: the data's tests: a text of Python, a list of such (asserts, one test each), or {"inputs": [...],
    "outputs": [...]}, what a program reads and must print. whole: 1.0 where all pass, else 0.0. timeout: seconds of a
    test. memory: MiB. isolated: False where the system cannot keep the code from networks and files (jail.py), and may
    not.

    Raises UserError where the system does not isolate, but should.
    """

    def __init__(
        self,
        *,
        column: str = "tests",
        whole: bool = False,
        timeout: float = 6.0,
        memory: int = 512,
        isolated: bool = True,
    ):
        self._column, self._whole = column, whole
        self._jail = Jail(timeout, memory << 20, isolated)
        if not self._jail.passes("", ""):
            raise UserError(
                "python_tests: its process does not start here (it needs Linux, and more than memory's MiB)"
            )

    def __call__(self, completions: Sequence[str], **columns: Sequence[Any]) -> list[float | None]:
        """The share of each row's tests that the completion's last block of Python passes, alone and in a process of
        its own for each test; None for a row without tests."""
        if self._column not in columns:
            raise UserError(no_column("python_tests", self._column, columns))
        rows = [read_tests(value, self._column) for value in columns[self._column]]
        jobs = [(code_of(text), *test) for text, tests in zip(completions, rows, strict=True) for test in tests]
        with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)))) as pool:
            passed = iter(list(pool.map(lambda job: self._jail.passes(*job), jobs)))
        found: list[float | None] = []
        for tests in rows:
            right = sum(next(passed) for _ in tests)
            share = right / len(tests) if tests else None
            found.append(share if share is None or not self._whole else float(share == 1))
        return found


def code_of(completion: str) -> str:
    """The last block of Python of a completion, else the whole text.

    >>> code_of("So:\\n```python\\nx = 1\\n```")
    'x = 1\\n'
    """
    blocks = _BLOCK.findall(completion)
    return blocks[-1] if blocks else completion


def read_tests(value: Any, column: str) -> list[Test]:
    """The tests of a row. Raises UserError for what is none.

    >>> read_tests(["assert x == 1"], "tests")
    [('assert x == 1', None, None)]
    >>> read_tests({"inputs": ["1 2"], "outputs": [3]}, "tests")
    [('', '1 2', '3')]
    """
    if value is None or value == "" or value == []:
        return []
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            value = json.loads(value)
        except ValueError:
            pass  # a text of Python
    if isinstance(value, dict) and len(value.get("inputs", ())) == len(value.get("outputs", "?")):
        return [
            ("", str(given), str(printed)) for given, printed in zip(value["inputs"], value["outputs"], strict=True)
        ]
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, Sequence) or not all(isinstance(one, str) for one in texts):
        raise UserError(
            f"python_tests: {column} is {shown(value)}: it must be a text of Python, a list of such texts, or as many "
            "inputs as outputs"
        )
    return [(text, None, None) for text in texts]
