"""The sandbox in which a chat template runs: jinja's, with a limit on its work, on what it builds and on its time.

A template comes from whoever made the model. jinja's sandbox keeps it away from the machine, but lets loops turn in
loops and a text double itself; a limit of time ends no long call in C and comes after the memory is full. Here each
rendering has a budget. Rounds of loops, calls, filters, tests and comparisons count, with the parts of their arguments;
so does what is built. What gives much out of little is checked before it runs. `Counting` puts the counters into the
parsed template, as filters, whose names a template cannot take.
"""

import re
import threading
import time
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Sequence, Sized, ValuesView
from functools import wraps
from types import FunctionType
from typing import Any

import jinja2
from jinja2 import nodes, pass_eval_context
from jinja2.runtime import Context, LoopContext, Macro, markup_join, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

ROUNDS = 4_000_000
CALL = 10  # rounds: what a call, a filter or a test takes of the time
BUILT = 1 << 28  # characters, and ENTRY for each entry of a list
ENTRY = 8
SECONDS = 20.0
BITS = 20_000  # of a whole number
# What takes more time than its text is long, or fills a text up to any width; no chat template has a use for it.
FILTERS_LEFT_OUT = ("urlize", "striptags", "wordwrap", "pprint", "center", "batch", "slice")
METHODS_LEFT_OUT = frozenset(
    "striptags center ljust rjust zfill expandtabs encode translate maketrans to_bytes".split()
)
# Filters and tests that look at the outside of what they are given and build nothing; and those that build its like.
FREE = frozenset(
    """length count first last default d attr items map select reject selectattr rejectattr safe boolean callable
    defined undefined none string mapping number integer float sequence iterable sameas true false""".split()
)
SHALLOW = ("list", "reverse")
# A field as wide as a text, or as another argument says: of `%`, and of `format`.
_WIDE_PERCENT = re.compile(r"%(\([^)]*\))?[-+ #0]*(\d{5}|\*|\d*\.(\d{5}|\*))")
_WIDE_BRACES = re.compile(r"\{[^{}:]*:[^{}]*(\d{5}|\{)")
CHECKED = ("replace", "join", "format", "indent", "tojson")  # filters that give much out of little
_PLAIN = frozenset([str, int, float, bool, type(None)])


class TooMuch(jinja2.TemplateRuntimeError):
    """A rendering has used up its budget."""


class RenderBudget:
    """Remaining rounds, size and time of one rendering."""

    def __init__(self):
        self.rounds, self.built, self.until = ROUNDS, BUILT, time.thread_time() + SECONDS

    def spend(self, rounds: int, built: int = 0) -> None:
        self.rounds -= rounds
        self.built -= built
        if self.rounds < 0:
            raise TooMuch(f"it takes more than {ROUNDS:,} rounds of loops and calls")
        if self.built < 0:
            raise TooMuch(f"it builds more than {BUILT >> 20} MiB of text and lists")
        if time.thread_time() > self.until:
            raise TooMuch(f"it takes longer than {SECONDS:.0f} s")

    def would_build(self, size: int) -> None:
        """Raise TooMuch where `size` could not be spent; spends nothing."""
        if size > self.built:
            self.spend(0, size)

    def weigh(self, values: Iterable[Any]) -> int:
        """Spend a round for every part of `values`, one that they hold twice twice, as whoever prints or compares them
        meets it. Returns about how many characters they print."""
        waiting, parts, text = list(values), 1, 0
        while waiting:
            value = waiting.pop()
            if isinstance(value, str):
                text += len(value)
            elif type(value) in _PLAIN:
                continue
            elif isinstance(value, dict | list | tuple | set | frozenset | KeysView | ValuesView | ItemsView):
                parts += len(value)
                if parts > self.rounds:
                    break
                waiting += value
                waiting += value.values() if isinstance(value, dict) else ()
            elif isinstance(value, Namespace):
                waiting.append(object.__getattribute__(value, "_Namespace__attrs"))
        self.spend(parts)
        self.would_build(text)
        return text + 20 * parts


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's environment for chat templates, with a budget for each rendering, which `begin` starts."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self, filters: dict[str, Callable[..., Any]], **options: Any):
        super().__init__(finalize=self._weighed, **options)
        self._thread = threading.local()  # several may render at once
        del self.globals["lipsum"]
        self.filters |= filters
        self.filters |= {name: _left_out(name) for name in FILTERS_LEFT_OUT}
        tables: list[dict[str, Any]] = [self.filters, self.tests]
        for table in tables:
            table |= {name: self._counted(name, function) for name, function in table.items() if name not in FREE}
        for function in (self._loop, self._weighed, self._sized, self._joined, self._seen):
            self.filters[f"dtrain.{function.__name__.removeprefix('_')}"] = function

    def begin(self) -> None:
        self._thread.budget = RenderBudget()

    @property
    def budget(self) -> RenderBudget:
        return self._thread.budget

    def compiled(self, source: str, *changes: NodeTransformer) -> jinja2.Template:
        """Compile the template of a text, with `changes` and counters. Raises what jinja and Python raise for it."""
        self.begin()
        tree = self.parse(source)
        for change in (*changes, Counting()):
            tree = change.visit(tree)
        return self.from_string(tree)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in METHODS_LEFT_OUT and super().is_safe_attribute(obj, attr, value)

    def concat(self, pieces: Iterable[str]) -> str:
        budget, kept = self.budget, []
        for piece in pieces:
            kept.append(piece)
            budget.built -= len(piece)
            if budget.built < 0:
                budget.spend(0)
        return "".join(kept)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(argument, tuple):  # its hash looks at every part
            self.budget.weigh(argument)
        return super().getitem(obj, argument)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: B902, N805
        if isinstance(__obj, FunctionType) and not hasattr(__obj, "__wrapped__"):  # ours
            return __self._sized(super().call(__context, __obj, *args, **kwargs))
        __self.budget.spend(CALL)
        if isinstance(__obj, Macro):  # what it is given it looks at by itself
            return super().call(__context, __obj, *args, **kwargs)
        arguments, named = __self._weighed_arguments(args, kwargs)
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        if isinstance(owner, str):
            __self._check_room(__obj.__name__, owner, [*arguments, *named.values()])
        return __self._sized(super().call(__context, __obj, *arguments, **named))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and isinstance(left, str) and isinstance(right, str):
            self.budget.spend(1, len(left) + len(right))
            return left + right
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * max(right, 1) if operator == "**" else left.bit_length() + right.bit_length()
            if bits > BITS:
                raise TooMuch("it computes with numbers of thousands of digits")
        elif operator == "%" and isinstance(left, str):
            self.budget.weigh([right])
            self._check_room("%", left, [right])
        else:
            factor = max([side for side in (left, right) if isinstance(side, int)], default=1) if operator == "*" else 1
            self.budget.would_build((_size(left) + _size(right)) * factor)
        return self._sized(super().call_binop(context, operator, left, right))

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.budget.spend(CALL)
            arguments, named = (args, kwargs) if name in SHALLOW else self._weighed_arguments(args, kwargs)
            if name in CHECKED:
                contexts = Context | nodes.EvalContext | jinja2.Environment
                values = [value for value in arguments if not isinstance(value, contexts)]
                method = "%" if name == "format" else name  # the filter of that name is Python's `%`
                self._check_room(method, values[0] if values else None, [*values[1:], *named.values()])
            return self._sized(function(*arguments, **named))

        return counted

    def _weighed_arguments(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        if not kwargs and _PLAIN.issuperset(map(type, args)):
            return args, kwargs
        arguments = [self._whole(value) for value in args]
        named = {name: self._whole(value) for name, value in kwargs.items()}
        self.budget.weigh([*arguments, *named.values()])
        return arguments, named

    def _whole(self, value: Any) -> Any:
        return list(self._loop(value)) if isinstance(value, Iterator) and not isinstance(value, LoopContext) else value

    def _check_room(self, name: str, value: Any, arguments: Sequence[Any]) -> None:
        """Raise TooMuch where the budget has no room for the result of the method or filter `name` of `value`."""
        texts = [argument for argument in arguments if isinstance(argument, str)]
        widest = max([*map(len, texts), *(argument for argument in arguments if isinstance(argument, int)), 4])
        if name == "replace" and len(texts) > 1:
            self.budget.would_build(str(value).count(texts[0]) * len(texts[1]))
        elif name == "join":
            separator = max(map(len, [*texts, value if isinstance(value, str) else ""]))
            self.budget.would_build(separator * max(map(_size, [value, *arguments])))
        elif name in ("%", "format", "format_map"):
            sign, wide = ("%", _WIDE_PERCENT) if name == "%" else ("{", _WIDE_BRACES)
            text = str(value).replace("%%", "")
            fields = text.count(sign) * (10**4 + self.budget.weigh(arguments))
            self.budget.would_build(BUILT + 1 if wide.search(text) else fields)
        elif name == "indent":
            self.budget.would_build(len(str(value).splitlines()) * widest)
        elif name == "tojson" and arguments:
            self.budget.would_build(self.budget.weigh([value]) * widest)

    def _loop(self, values: Any) -> Any:
        """Return the values that a loop goes through, a round for each."""
        if not isinstance(values, Sized):
            return map(self._sized, values)
        self.budget.spend(len(values))
        return values

    def _weighed(self, value: Any) -> Any:
        if type(value) not in _PLAIN:
            self.budget.weigh([value])
        return value

    def _seen(self, value: Any) -> Any:
        self.budget.spend(1)
        return value

    def _sized(self, value: Any) -> Any:
        self.budget.spend(1, _size(value))
        return value

    @pass_eval_context
    def _joined(self, context: nodes.EvalContext, *pieces: Any) -> str:
        self.budget.weigh(pieces)
        return self._sized((markup_join if context.autoescape else str_join)(pieces))


def _left_out(name: str) -> Callable[..., Any]:
    def refused(*_: Any, **__: Any) -> Any:
        raise jinja2.TemplateRuntimeError(f"dtrain gives a template no filter {name}: its work has no bound")

    return refused


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str) else ENTRY * len(value) if isinstance(value, list | tuple) else ENTRY


class Counting(NodeTransformer):
    """Transformer that sends loops, comparisons, slices, joins and lists through the sandbox's counters."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = _through("loop", node.iter)
        if not isinstance(node.target, nodes.Name):  # others call a mark in each round, which looks at the clock
            node.body.insert(0, nodes.ExprStmt(_through("seen", nodes.Const(None))).set_lineno(node.lineno))
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:
        sides: list[nodes.Compare | nodes.Operand] = [node, *node.ops]
        is_short = any(_is_shallow(side.expr) for side in sides)  # before its lists are seen through the counters
        self.generic_visit(node)
        if not is_short or any(side.op in ("in", "notin") for side in node.ops):
            for side in sides:
                side.expr = _through("seen" if is_short else "weighed", side.expr)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        return _through("joined", node.nodes[0], *node.nodes[1:])

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        self.generic_visit(node)
        return _through("sized", node) if isinstance(node.arg, nodes.Slice) else node

    def visit_List(self, node: nodes.Expr) -> nodes.Expr:
        self.generic_visit(node)
        return _through("weighed", node)

    visit_Dict = visit_List

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:
        return node if node.ctx != "load" else self.visit_List(node)


def _is_shallow(node: nodes.Expr) -> bool:
    return isinstance(node, nodes.Const) or (isinstance(node, nodes.List | nodes.Dict) and not node.items)


def _through(name: str, value: nodes.Node, *more: nodes.Node) -> nodes.Filter:
    made = nodes.Filter(value, f"dtrain.{name}", list(more), [], None, None)
    made.set_lineno(value.lineno or 1)
    return made
