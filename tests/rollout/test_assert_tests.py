"""Tests written in Python: ordinary ones tell right code from wrong code, and no trick makes wrong code pass."""

from concurrent.futures import ThreadPoolExecutor

from dtrain.rl.rewards.python_tests import AssertTest
from tests.rollout.test_code_sandbox import sandbox_or_skip

# With another SHIFT the code is wrong, and each of the tests must fail.
CODE = """
import collections, decimal, fractions
from dataclasses import dataclass

SHIFT = 0
Pair = collections.namedtuple("Pair", "x y")

def add(a, b): return a + b + SHIFT
def same(value): return value if not SHIFT else (value, SHIFT)
def sort(items): items.sort(reverse=bool(SHIFT))
def half(x): return decimal.Decimal(x + SHIFT) / 2
def third(x): return fractions.Fraction(x + SHIFT, 3)
def count(n): yield from range(SHIFT, n)
def each(function, items): return [function(item + SHIFT) for item in items]
def hello(): print("hello", SHIFT)
def fail(): raise KeyError("a", SHIFT)
def pair(x): return Pair(x, SHIFT)
class Wrong(ValueError): pass
@dataclass
class Point:
    x: int
    y: int = SHIFT
    def __post_init__(self): self.x += SHIFT
class Stack(list):
    def pop(self): return list.pop(self) + SHIFT
print("what the code prints is no report", flush=True)
"""

ORDINARY = r"""
assert add(1, 2) == 3

assert 3 == add(1, 2), "one and two"

assert add(1, 2) == add(0, 1) + 2 and add(1, 1) == 2

assert add(0, 1) is not None and add(1, 1) < 3 and 2 <= add(1, 1) <= 2 and add(1, 2) in (3, 5)

def check(candidate):
    assert candidate(1, 2) == 3
check(add)

from solution import add as plus
import solution
assert plus(1, 2) == solution.add(1, 2) == 3

for a, b, total in [(1, 2, 3), (0, 0, 0)]:
    assert add(a, b) == total

items = [3, 1]; sort(items)
assert items == [1, 3]

assert abs(add(0.5, 0.25) - 0.75) < 1e-6

assert math.isclose(add(0.1, 0.2), 0.3, rel_tol=1e-9)

assert half(1) == 0.5 and third(3) == 1

assert same({"a": [1, (2.5, None)], 2: {3}}) == {"a": [1, (2.5, None)], 2: {3}}

assert same(b"a") == b"a" and same(1j) == 1j and same(True) is True

assert same(2 ** 100) == 1267650600228229401496703205376

assert same(10 ** 5000) == 10 ** 5000

assert same("\ud800") == "\ud800" and same(float("inf")) == float("inf")

assert list(count(3)) == [0, 1, 2] and next(count(2)) == 0

assert each(lambda x: x + 1, [1, 2]) == [2, 3] and each(str, [1]) == ["1"]

try:
    fail()
    assert False
except KeyError as error:
    assert error.args == ("a", 0)

assert pair(1) == (1, 0)

assert isinstance(Wrong(), ValueError) and Point(1) == Point(1, 0) and Point(1).x == 1

stack = Stack([1, 2])
assert stack == [1, 2] and stack.pop() == 2 and len(stack) == 1

import io, contextlib
output = io.StringIO()
with contextlib.redirect_stdout(output): hello()
assert output.getvalue() == 'hello 0\n'

assert collections.Counter(same("aab")) == {"a": 2, "b": 1}

if SHIFT == 7: assert add(1, 2) == 4
assert SHIFT == 0

import unittest
class Case(unittest.TestCase):
    def test(self):
        self.assertEqual(add(1, 2), 3)
        with self.assertRaises(KeyError): fail()
found = unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(Case))
assert found.wasSuccessful() and found.testsRun == 1
""".strip().split("\n\n")

SAME = (
    "def f(x): return Liar({})\nclass Liar{}:\n    __eq__ = lambda self, other: True\n    __hash__ = lambda self: 2\n"
)
NUMBER = "class Liar:\n    __sub__ = __rsub__ = __abs__ = lambda *a: 0\n    __lt__ = __gt__ = lambda *a: True\n"
FORGED = r"""
import os
for number in range(9):
    os.write(1, b'[%d, [3]]\n' % number)
    for line in (b'[0, [true]]\n', b'[0, []]\n', b'"end"\n'):
        for file in range(1, 64):
            try: os.write(file, line)
            except OSError: pass
os._exit(0)
"""
FINDS = r"""
import re, sys
def f(x):
    frame = sys._getframe()
    while frame:
        for value in [*frame.f_globals.values(), *frame.f_locals.values(), *frame.f_code.co_consts]:
            if found := re.search("secret-[0-9]+", str(value)):
                return found[0]
        frame = frame.f_back
"""
TRICKS = {
    "an object that equals everything": (SAME.format("", ""), "assert f(1) == 2"),
    "from the other side": (SAME.format("", ""), "assert 2 == f(1)"),
    "in a list": (SAME.format("", ""), "assert [f(1)] == [2]"),
    "in a set": (SAME.format("", ""), "assert f(1) in {2}"),
    "against a variable": (SAME.format("", ""), "expected = 2\nassert f(1) == expected"),
    "an int": (SAME.format("7", "(int)"), "assert f(1) == 2"),
    "a str": (SAME.format("'7'", "(str)"), "assert f(1) == '2'"),
    "a list": (SAME.format("[7]", "(list)"), "assert f(1) == [2]"),
    "a dict": (SAME.format("{7: 7}", "(dict)"), "assert f(1) == {2: 2}"),
    "ANY": ("from unittest.mock import ANY\ndef f(x): return ANY", "assert f(1) == 2"),
    "a difference": (f"{NUMBER}def f(x): return Liar()", "assert abs(f(1) - 2) < 1e-6"),
    "an order": (f"{NUMBER}def f(x): return Liar()", "assert f(1) < 2"),
    "other built-ins": ("import builtins, math\nmath.isclose = builtins.abs = lambda *a, **k: 0\ndef f(x): return 9",
                        "assert abs(f(0) - 2) < 1e-6"),
    "an exit before the test": ("import os; os._exit(0)", ""),
    "an exit in a function": ("import os\ndef f(x): os._exit(0)", "assert f(1) == 2"),
    "a polite exit": ("def f(x): raise SystemExit(0)", "assert f(1) == 2"),
    "a forged report": (FORGED, "assert f(1) == 2"),
    "a forged report of a later assert": (f"def f(x):{FORGED.replace(chr(10), chr(10) + '    ')}",
                                          "assert f(1) == 4\nassert f(1) == 2"),
    "the literal, found in memory": (FINDS, "assert f(1) == 'secret-123', 'it is secret-123'"),
    "no report": ("", "def check(): assert f(1) == 2"),
}  # fmt: skip


def passed(sandbox, cases):
    """The names of those of `cases`, name -> (code, test), that pass."""
    with ThreadPoolExecutor(2) as pool:
        results = pool.map(lambda case: AssertTest(case[1]).passes(case[0], sandbox), cases.values())
        return {name for name, result in zip(cases, results, strict=True) if result}


def test_ordinary_tests_tell_right_code_from_wrong_code():
    sandbox = sandbox_or_skip()
    assert passed(sandbox, {test: (CODE, test) for test in ORDINARY}) == set(ORDINARY)
    wrong = CODE.replace("SHIFT = 0", "SHIFT = 1")
    assert passed(sandbox, {test: (wrong, test) for test in ORDINARY}) == set()


def test_no_trick_passes_a_test():
    assert passed(sandbox_or_skip(), TRICKS) == set()


def test_only_literals_are_secret():
    """The attempt to find the literal is real: it finds a value that the test assigns."""
    test = "expected = 'secret-123'\nassert f(1) == expected"
    assert AssertTest(test).passes(FINDS, sandbox_or_skip())
