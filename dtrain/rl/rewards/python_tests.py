"""Reward `python_tests`: the share of a row's tests that the Python code in a completion passes.

Each test runs in a sandbox of its own (`code_sandbox`). There are two kinds: a program that reads an input and prints
an expected output (`ProgramTest`), and a text of Python that calls the code (`AssertTest`). The output of a program,
and values that a test compares with literals, are compared outside the sandbox.
"""

import json
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from textwrap import dedent
from typing import Any

from dtrain.base.errors import UserError
from dtrain.base.json_files import split_lines
from dtrain.base.ranges import shown
from dtrain.rl.rewards.assert_tests import AssertTest
from dtrain.rl.rewards.code_sandbox import CodeSandbox
from dtrain.rl.rewards.columns import values_of

_BLOCK = re.compile(
    r"^[ \t]*(?P<fence>`{3,})[ \t]*(?P<language>[^\s`]*)[^\n`]*\n(?P<code>.*?)(?:^[ \t]*(?P=fence)(?![\w`])|\Z)",
    re.DOTALL | re.MULTILINE,
)
_PYTHON = ("python", "py", "python3")


@dataclass(frozen=True)
class ProgramTest:
    """A program that has to print `expected` on input `stdin` and exit with status 0.

    White space at the ends of lines and of the output does not count.
    """

    stdin: str
    expected: str

    def passes(self, code: str, sandbox: CodeSandbox) -> bool:
        """Run the program and compare its output."""
        finished = sandbox.run(code, stdin_text=self.stdin)
        return finished.status == 0 and _lines(finished.output) == _lines(self.expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in split_lines(text.strip())]


class PythonTests:
    """Reward of the share of a row's tests that a completion's code passes.

    Args:
        column: Column of the data with the tests (`read_tests`).
        whole: Return 1.0 if all tests pass, else 0.0.
        timeout: Seconds of processor time for each test.
        memory: MiB for each test.
        allow_full_access: Run the model's code without a sandbox, as the current user with files and network.

    Raises:
        UserError: If the sandbox does not start on this machine, or the interpreter needs more memory or time.
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
        self._column = column
        self._whole = whole
        self._sandbox = CodeSandbox(timeout, memory << 20, is_isolated=not allow_full_access)
        if not AssertTest("assert value == 1").passes("value = 1", self._sandbox):
            raise UserError(
                f"python_tests: memory={memory} MiB or timeout={timeout} is too little for Python itself here"
            )

    def __call__(self, completions: Sequence[str], **columns: Sequence[Any]) -> list[float | None]:
        """Return the share of tests that each completion passes; None for a row without tests."""
        rows = [read_tests(value, self._column) for value in values_of("python_tests", self._column, columns)]
        jobs: list[tuple[ProgramTest | AssertTest, str]] = []
        for completion, tests in zip(completions, rows, strict=True):
            code = code_of(completion)
            jobs += [(test, code) for test in tests]
        with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)))) as pool:
            passed = list(pool.map(lambda job: job[0].passes(job[1], self._sandbox), jobs))
        shares = []
        start = 0
        for tests in rows:
            shares.append(self._share(passed[start : start + len(tests)]))
            start += len(tests)
        return shares

    def _share(self, passed: Sequence[bool]) -> float | None:
        if not passed:
            return None
        if self._whole:
            return float(all(passed))
        return sum(passed) / len(passed)


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


def read_tests(value: Any, column: str) -> list[ProgramTest | AssertTest]:
    """Return the tests of a row.

    Args:
        value: A text of Python, a list of such texts, or {"inputs": [...], "outputs": [...]} of a program. It may be
            JSON. Empty values contain no test.
        column: Name of the column, for the message.

    Raises:
        UserError: If the value is something else.

    Example:
        >>> read_tests({"inputs": ["1 2"], "outputs": [3]}, "tests")
        [ProgramTest(stdin='1 2', expected='3')]
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
                pairs = zip(inputs, outputs, strict=True)
                return [ProgramTest(_written(stdin), _written(output)) for stdin, output in pairs]
    texts = [tests] if isinstance(tests, str) else tests
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise UserError(
            f"python_tests: {column} is {shown(value)}: it must be a text of Python, a list of such texts, or as many "
            "inputs as outputs of a program (those of a function, by fn_name: write them as asserts)"
        )
    return [AssertTest(text) for text in texts]


def _written(value: Any) -> str:
    """Return an input or output of a program as text; a list has its lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)
