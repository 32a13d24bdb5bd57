"""Reward: the share of tests that the Python code in a completion passes. Code has the standard library alone."""

import json
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from textwrap import dedent
from typing import Any

from dtrain.base.errors import UserError
from dtrain.base.ranges import shown
from dtrain.rl.rewards.code_sandbox import CodeSandbox
from dtrain.rl.rewards.columns import values_of

_BLOCK = re.compile(
    r"^[ \t]*(?P<fence>`{3,})[ \t]*(?P<language>[^\s`]*)[^\n`]*\n(?P<code>.*?)(?:^[ \t]*(?P=fence)(?![\w`])|\Z)",
    re.DOTALL | re.MULTILINE,
)
_PYTHON = ("python", "py", "python3")

Test = tuple[str | None, str, str]  # code; or None, a program's input and its output


class PythonTests:
    """Reward of the share of a row's tests that a completion's code passes.

    column: the data's tests: a text of Python, a list of such (asserts, one test each), or {"inputs": [...],
    "outputs": [...]}, texts that a program reads and must print. whole: 1.0 where all pass, else 0.0. timeout: seconds
    of a test. memory: MiB. allow_full_access: runs the model's code as you, with your files and network, where
    bubblewrap (`code_sandbox`) is not at hand.

    Raises UserError where the walls cannot be built, or the interpreter does not start within the memory.
    """

    def __init__(
        self,
        *,
        column: str = "tests",
        whole: bool = False,
        timeout: float = 6.0,
        memory: int = 512,
        allow_full_access: bool = False,
    ):
        self._column, self._whole = column, whole
        self._sandbox = CodeSandbox(timeout, memory << 20, has_walls=not allow_full_access)
        if not self._sandbox.passes("value = 1", "assert value == 1"):
            raise UserError(
                f"python_tests: memory={memory} MiB or timeout={timeout} is too little for Python itself here"
            )

    def __call__(self, completions: Sequence[str], **columns: Sequence[Any]) -> list[float | None]:
        """Return the share of each row's tests that the completion's last block of Python passes, alone and in a
        process of its own for each test; None for a row without tests."""
        rows = [read_tests(value, self._column) for value in values_of("python_tests", self._column, columns)]
        jobs = [(code_of(text), *test) for text, tests in zip(completions, rows, strict=True) for test in tests]
        with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)))) as pool:
            passed = iter(list(pool.map(lambda job: self._sandbox.passes(*job), jobs)))
        shares: list[float | None] = []
        for tests in rows:
            right = sum(next(passed) for _ in tests)
            share = right / len(tests) if tests else None
            shares.append(share if share is None or not self._whole else float(share == 1))
        return shares


def code_of(completion: str) -> str:
    """Return the last block of a completion that is named Python's, else the last without a name, else the whole text.

    >>> code_of("So:\\n```python\\nx = 1\\n```\\nIt prints:\\n```\\n1\\n```")
    'x = 1\\n'
    """
    blocks = {}  # whether it is named -> its code
    for block in _BLOCK.finditer(completion):
        language = block["language"].lower()
        if language in ("", *_PYTHON):
            blocks[language in _PYTHON] = block["code"]
    return dedent(blocks.get(True, blocks.get(False, completion)))


def read_tests(value: Any, column: str) -> list[Test]:
    """Return the tests of a row, which may be JSON. Raises UserError for a value that holds none.

    >>> read_tests(["assert x == 1"], "tests")
    [('assert x == 1', '', '')]
    >>> read_tests({"inputs": ["1 2"], "outputs": [3]}, "tests")
    [(None, '1 2', '3')]
    """
    if value is None or value == "" or value == []:
        return []
    tests = value
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        with suppress(ValueError):  # a text of Python
            tests = json.loads(value)
    if isinstance(tests, dict):
        inputs, outputs = tests.get("inputs"), tests.get("outputs")
        if isinstance(inputs, list) and isinstance(outputs, list) and len(inputs) == len(outputs):
            if not tests.get("fn_name"):
                return [(None, _written(stdin), _written(out)) for stdin, out in zip(inputs, outputs, strict=True)]
    texts = [tests] if isinstance(tests, str) else tests
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise UserError(
            f"python_tests: {column} is {shown(value)}: it must be a text of Python, a list of such texts, or as many "
            "inputs as outputs of a program (those of a function, by fn_name: write them as asserts)"
        )
    return [(text, "", "") for text in texts]


def _written(value: Any) -> str:
    """Return an input or output of a program as text; a list has its lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)
