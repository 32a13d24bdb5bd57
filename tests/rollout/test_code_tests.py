"""Tests and asserts of rows run against code in the sandbox: the values that pass between them."""

from tests.rollout.test_code_sandbox import passed, sandbox_or_skip

CODE = """
import math
from collections import Counter, deque, namedtuple
from dataclasses import dataclass
from enum import Enum

LIMIT, calls = 3, 0
Pair = namedtuple("Pair", "x y")
class Color(Enum):
    RED = 1
    BLUE = 2
def add(a, b): return a + b
def same(a): return a
def sort(a): a.sort()
def rows(): return [[0] * 2] * 2
def count(n): yield from range(n)
def each(f, xs): return [f(x) for x in xs]
def hello(): print("hello")
def keywords(*args, **kwargs): return args, kwargs
def sum(a, b): return a * b
def call():
    global calls
    calls += 1
class Wrong(ValueError):
    def __init__(self, code):
        super().__init__(f"code {code}")
        self.code = code
def fail(kind): raise {"own": Wrong(7), "built-in": KeyError("a", 3)}[kind]
class Stack:
    size = 5
    def __init__(self): self.items = []
    def push(self, x):
        self.items.append(x)
        return self
    def pop(self): return self.items.pop()
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)
    def __getitem__(self, i): return self.items[i]
    def __str__(self): return f"Stack{self.items}"
    def __enter__(self): return self
    def __exit__(self, *error): return True
class Deep(Stack): pass
@dataclass(frozen=True)
class Point:
    x: int
    y: int
    def __add__(self, o): return Point(self.x + o.x, self.y + o.y)
    def __lt__(self, o): return self.x < o.x
class Items(list):
    def first(self): return self[0]
class Node:
    def __init__(self, value, after=None): self.value, self.after = value, after
def values(node):
    while node:
        yield node.value
        node = node.after
def loop():
    a = [1]
    a.append(a)
    return a
VALUES = (1, 2.5, float("nan"), -0.0, 1 + 2j, b"a", {1, 2}, frozenset({3}), {"a": [1]}, None, True, 10**5000, "\\ud800",
          range(3), deque([1], 5), Counter("aab"), Pair(1, 2), bytearray(b"b"), float("inf"), {1: 2}.keys())
"""

TESTS = r"""
assert add(1, 2) == 3 and LIMIT == 3

def check(candidate):
    assert candidate(1, 2) == 3
check(add)

from solution import add as plus
import solution
assert plus(1, 2) == solution.add(1, 2) == 3

a = [3, 1]; sort(a)
assert a == [1, 3]

a = [3, 1]; b = {'k': a}
assert same(a) is a and same(b)['k'] is a

r = rows(); r[0][0] = 1; assert r == [[1, 0], [1, 0]]
a = loop(); assert a[1] is a

assert list(count(3)) == [0, 1, 2] and next(count(2)) == 0

c = count(1); next(c)
try:
    next(c)
    assert False
except StopIteration: pass

assert each(lambda x: x + 1, [1, 2]) == [2, 3] and each(str, [1]) == ['1'] and each(len, ['ab']) == [2]

assert each(str, iter([1, 2])) == each(str, (x for x in (1, 2))) == ['1', '2']

seen = []; each(seen.append, [1])
assert seen == [1]

def f(x): raise KeyError(x)
try:
    each(f, [1])
    assert False
except KeyError as e:
    assert e.args == (1,)

try:
    fail('own')
    assert False
except Wrong as e:
    assert e.code == 7 and str(e) == 'code 7'

try:
    fail('own')
    assert False
except ValueError as e:
    assert e.args == ('code 7',)

try:
    fail('built-in')
    assert False
except KeyError as e:
    assert e.args == ('a', 3)

s = Stack(); s.push(1).push(2)
assert len(s) == 2 and s.pop() == 2 and list(s) == [1] and s[0] == 1 and s.items == [1]
assert str(s) == 'Stack[1]' and isinstance(s, Stack) and Stack.size == 5 and type(s).__name__ == 'Stack' and s

assert isinstance(Deep(), Stack) and not isinstance(Stack(), Deep) and not Stack()

with Stack() as s: raise KeyError(1)

assert Point(1, 2) == Point(1, 2) != Point(1, 3) and Point(1, 2) + Point(1, 1) == Point(2, 3) < Point(3, 0)

assert {Point(1, 2)} == {Point(1, 2)} and [Point(1, 2)] == [Point(1, 2)] and repr(Point(1, 2)) == 'Point(x=1, y=2)'

import copy
a = Node(1); b = copy.deepcopy(a); b.value = 2
assert a.value == 1 and a.__dict__['value'] == 1

i = Items([1, 2])
assert i == [1, 2] and i != [1] and i.first() == 1 and len(i) == 2 and 2 in i

assert list(values(Node(1, Node(2)))) == [1, 2] and Node(1).after is None

assert Color.RED.value == 1 and Color.RED is Color(1) and Color['RED'] == Color.RED and len(list(Color)) == 2

import io, contextlib
b = io.StringIO()
with contextlib.redirect_stdout(b): hello()
assert b.getvalue() == 'hello\n'

call(); call()
assert calls == 2

assert sum([1, 2]) == 3 and add(1, 1) == 2

assert sum(2, 3) == 6

assert math.isclose(add(0.1, 0.2), 0.3)

assert keywords(1, a=2) == ((1,), {'a': 2}) and callable(add) and add.__name__ == 'add' and eval('add(1, 2)') == 3

from collections import defaultdict
d = defaultdict(int); assert add(d['x'], 1) == 1 and same(d)['y'] == 0

import datetime, decimal, fractions
D, F = decimal.Decimal, fractions.Fraction
day = datetime.datetime(2020, 1, 2, 3)
assert add(D('1.1'), D(2)) == D('3.1') and add(F(1, 2), 1) == F(3, 2) and same(day) == day and same(int) is int

import math
from collections import *
v = VALUES
assert v[:2] == (1, 2.5) and math.isnan(v[2]) and str(v[3]) == '-0.0'
assert v[4:6] == (1 + 2j, b'a') and v[6] == {1, 2} and type(v[7]) is frozenset and v[8:11] == ({'a': [1]}, None, True)
assert v[11] == 10**5000 and v[12] == '\ud800' and v[13] == range(3) and v[14] == deque([1]) and v[14].maxlen == 5
assert v[15] == Counter('aab') and v[16] == (1, 2) and v[16].y == 2 and v[17:] == (b'b', math.inf, {1})

import unittest
class Case(unittest.TestCase):
    def test(self):
        self.assertEqual(add(1, 2), 3)
        with self.assertRaises(Wrong): fail('own')
found = unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(Case))
assert found.wasSuccessful() and found.testsRun == 1
""".strip().split("\n\n")


def test_tests_ask_of_code_what_they_ask_in_one_process():
    """The same tests hold where code and test are one module, `from solution import` and names of modules aside."""
    sandbox = sandbox_or_skip()
    cases = {test: (CODE, test) for test in TESTS}
    assert set(TESTS) - passed(sandbox, cases) == set()
    for test in TESTS:
        if "solution" not in test and "sum(" not in test:
            exec(compile(f"{CODE}\n{test}", "both", "exec"), {"__name__": "both"})


def test_what_cannot_be_sent_fails():
    """Whatever the test catches."""
    code = "def f(x): return 2\nclass A: pass"
    tests = (
        "class B: pass\ntry: f(B())\nexcept BaseException: pass",
        "class B(A): pass\ntry: B()\nexcept Exception: pass",
    )
    assert passed(sandbox_or_skip(), {test: (code, test) for test in tests}) == set()
