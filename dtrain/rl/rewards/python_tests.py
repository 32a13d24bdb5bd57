"""Reward `python_tests`: the share of a row's tests that the Python code in a completion passes.

Each test runs in a sandbox of its own (`code_sandbox`). There are two kinds: a program that reads an input and prints
an expected output (`ProgramTest`), and a text of Python that calls the code (`AssertTest`). The output of a program,
and values that a test compares with literals, are compared outside the sandbox.

Before a test in Python is sent into the sandbox, each comparison with a literal is replaced by a report of the value.
The comparison is made outside. The sandbox never contains the expected literal, so the model's code cannot read it:

    assert add(1, 2) == 3                      _dtrain_report(0, add(1, 2))            here: _0 == 3
    assert abs(half(3) - 1.5) < 1e-6, "half"   _dtrain_report(1, half(3))              here: abs(_0 - 1.5) < 1e-6
    assert f(x) == y                           _dtrain_report_equality(2, f(x), y)     here: _0 == _1
    assert is_even(2)                          assert is_even(2)                       decided in the sandbox

The test passes if it ran to its end and all reported values satisfy their comparisons.
"""

import ast
import json
import math
import operator
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from textwrap import dedent
from typing import Any

from dtrain.base.errors import UserError
from dtrain.base.json_files import split_lines
from dtrain.base.ranges import format_value
from dtrain.rl.rewards.code_sandbox import CodeSandbox
from dtrain.rl.rewards.columns import values_of

_COMPARISONS: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda item, container: item in container,
    ast.NotIn: lambda item, container: item not in container,
}
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {"abs": abs, "math.isclose": math.isclose}

# Type of a reported value -> how it is made. Frozen sets take the place of sets, and equal them. A value that is no
# plain data becomes a new object, which equals nothing.
_DECODE: Mapping[str, Callable[..., object]] = {
    "int": lambda digits: int(digits, 16),
    "Fraction": Fraction,
    "complex": complex,
    "bytes": bytes.fromhex,
    "tuple": lambda *items: items,
    "set": lambda *items: frozenset(items),
    "dict": lambda *pairs: dict(pairs),
    "object": object,
}


@dataclass(frozen=True)
class AssertTest:
    """A text of Python that runs after the code, in the same module."""

    text: str

    def passes(self, code: str, sandbox: CodeSandbox) -> bool:
        """Run the test and decide the comparisons that it reports."""
        rewriter = _Rewriter()
        try:
            tree = ast.parse(self.text)
            test = ast.unparse(rewriter.visit(tree))
        except (SyntaxError, ValueError):
            return False
        finished = sandbox.run(code, test=test, modules=_module_names(tree))
        lines = finished.output.splitlines()
        if not lines or lines[-1] != '"end"':
            return False
        reached = set()
        try:
            for line in lines[:-1]:
                number, nodes = json.loads(line)
                values = {f"_{index}": _decode(node) for index, node in enumerate(nodes)}
                if not _evaluate(rewriter.conditions[number], values):
                    return False
                reached.add(number)
        except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError):
            return False  # values that cannot be compared, or a line that the code forged
        return rewriter.required <= reached


class _Rewriter(ast.NodeTransformer):
    """Replaces the asserts that are decided outside the sandbox by reports.

    Attributes:
        conditions: For the reports of each number, the comparison that has to hold.
        required: Numbers of asserts that have to be reached. Those in a branch need not be.
    """

    def __init__(self) -> None:
        self.conditions: list[ast.expr] = []
        self.required: set[int] = set()
        self._is_in_branch = False

    def generic_visit(self, node: ast.AST) -> ast.AST:
        """Visit the statements of a block, except in a `try`: the test may catch the error of an assert there."""
        if isinstance(node, ast.Try | ast.TryStar):
            return node
        was_in_branch = self._is_in_branch
        self._is_in_branch = was_in_branch or isinstance(node, ast.If | ast.While | ast.Match)
        super().generic_visit(node)
        self._is_in_branch = was_in_branch
        return node

    def visit_Assert(self, node: ast.Assert) -> list[ast.stmt]:
        """Replace each part of `assert a and b` by a statement, without the message, which may contain the literal."""
        match node.test:
            case ast.BoolOp(ast.And(), parts):
                return [self._statement(part) for part in parts]
            case test:
                return [self._statement(test)]

    def _statement(self, test: ast.expr) -> ast.stmt:
        """Return the report of a test, or its assert if the sandbox has to decide it."""
        reported: list[ast.expr] = []
        condition = _condition(test, reported)
        if condition is None:
            return ast.Assert(test)
        number = len(self.conditions)
        self.conditions.append(condition)
        if not self._is_in_branch:
            self.required.add(number)
        function = "_dtrain_report" if _has_literal(condition) else "_dtrain_report_equality"
        return ast.Expr(ast.Call(ast.Name(function), [ast.Constant(number), *reported], []))


def _condition(test: ast.expr, reported: list[ast.expr]) -> ast.expr | None:
    """Return the condition that is evaluated outside the sandbox. None if the sandbox has to decide the test.

    Args:
        test: An expression of an assert.
        reported: Receives the expressions that the sandbox evaluates. The condition names them `_0`, `_1`, ..
    """
    match test:
        case ast.Compare(left, operators, rights):
            for compares, right in zip(operators, rights, strict=True):
                # A container of the code may have its own `in`, and the item to look for is not secret.
                if isinstance(compares, ast.In | ast.NotIn) and not _is_literal(right):
                    return None
            # In the order of evaluation, which the names _0, _1, .. follow.
            left_operand = _operand(left, reported)
            right_operands = [_operand(right, reported) for right in rights]
            condition = ast.Compare(left_operand, operators, right_operands)
            is_equality = len(operators) == 1 and isinstance(operators[0], ast.Eq)
            return condition if is_equality or _has_literal(condition) else None
        case ast.Call(function, [_, _] as arguments, options) if ast.unparse(function) == "math.isclose":
            has_literal_options = all(_is_literal(option.value) for option in options)
            if has_literal_options and any(_is_literal(argument) for argument in arguments):
                return ast.Call(function, [_operand(argument, reported) for argument in arguments], options)
    return None


def _operand(node: ast.expr, reported: list[ast.expr]) -> ast.expr:
    """Return a side of a comparison as the condition contains it."""
    if _is_literal(node):
        return node
    match node:
        case ast.Call(ast.Name("abs") as function, [ast.BinOp(left, ast.Sub() as minus, right)], []):
            if _is_literal(left) or _is_literal(right):
                difference = ast.BinOp(_operand(left, reported), minus, _operand(right, reported))
                return ast.Call(function, [difference], [])
    reported.append(node)
    return ast.Name(f"_{len(reported) - 1}")


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError):
        return False
    return True


def _has_literal(condition: ast.expr) -> bool:
    """Return whether a condition contains a literal. Otherwise it compares only names of reported values."""
    if not isinstance(condition, ast.Compare):  # math.isclose, which always has one
        return True
    operands = [condition.left, *condition.comparators]
    return not all(isinstance(operand, ast.Name) for operand in operands)


def _evaluate(node: ast.expr, values: Mapping[str, Any]) -> Any:
    """Return the value of a condition.

    Args:
        node: The condition or a part of it. It consists only of nodes that `_condition` and `_operand` build, so no
            code of the model is evaluated here.
        values: Name -> the value that the sandbox reported.
    """
    match node:
        case ast.Name(name):
            return values[name]
        case ast.Compare(left, operators, rights):
            operands = [_evaluate(operand, values) for operand in (left, *rights)]
            pairs = zip(operators, operands, operands[1:], strict=False)
            return all(_COMPARISONS[type(compares)](left, right) for compares, left, right in pairs)
        case ast.BinOp(left, ast.Sub(), right):
            return _evaluate(left, values) - _evaluate(right, values)
        case ast.Call(function, arguments, options) if not _is_literal(node):
            positional = [_evaluate(argument, values) for argument in arguments]
            keywords = {str(option.arg): ast.literal_eval(option.value) for option in options}
            return _FUNCTIONS[ast.unparse(function)](*positional, **keywords)
    return ast.literal_eval(node)


def _module_names(tree: ast.Module) -> tuple[str, ...]:
    """Return the modules of the standard library that a test may use without importing them, as `math` in `math.pi`."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            names.add(node.value.id)
    return tuple(sorted(sys.stdlib_module_names & names))


def _decode(node: Any) -> object:
    """Return a reported value, which `sandboxed.encode` wrote or the code forged."""
    if isinstance(node, list):
        return [_decode(item) for item in node]
    if isinstance(node, dict):
        return _DECODE[node["type"]](*[_decode(item) for item in node["items"]])
    return node


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
            code = extract_code(completion)
            jobs += [(test, code) for test in tests]
        with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)))) as pool:
            passed = list(pool.map(self._run_job, jobs))
        scores: list[float | None] = []
        start = 0
        for tests in rows:
            scores.append(self._score(passed[start : start + len(tests)]))
            start += len(tests)
        return scores

    def _run_job(self, job: tuple[ProgramTest | AssertTest, str]) -> bool:
        test, code = job
        return test.passes(code, self._sandbox)

    def _score(self, passed: Sequence[bool]) -> float | None:
        """Return the reward for the results of a row's tests. None without tests."""
        if not passed:
            return None
        if self._whole:
            return float(all(passed))
        return sum(passed) / len(passed)


def extract_code(completion: str) -> str:
    """Return the Python code in a completion.

    It is the last fenced block named python, py or python3, else the last block without a name, else the whole text.

    Example:
        >>> extract_code("So:\\n```python\\nx = 1\\n```\\nIt prints:\\n```\\n1\\n```")
        'x = 1\\n'
    """
    python_code: str | None = None
    unnamed_code: str | None = None
    for block in _BLOCK.finditer(completion):
        language = block["language"].lower()
        if language in _PYTHON:
            python_code = block["code"]
        elif language == "":
            unnamed_code = block["code"]
    if python_code is not None:
        return dedent(python_code)
    return dedent(completion if unnamed_code is None else unnamed_code)


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
                return [ProgramTest(_as_text(stdin), _as_text(output)) for stdin, output in pairs]
    texts = [tests] if isinstance(tests, str) else tests
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise UserError(
            f"python_tests: {column} is {format_value(value)}: it must be a text of Python, a list of such texts, or "
            "as many inputs as outputs of a program (those of a function, by fn_name: write them as asserts)"
        )
    return [AssertTest(text) for text in texts]


def _as_text(value: Any) -> str:
    """Return an input or output of a program as text. A list contains its lines."""
    if isinstance(value, list):
        return "\n".join(str(line) for line in value)
    return str(value)
