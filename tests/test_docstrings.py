"""Docstrings begin with what the thing does or is; public functions on tensors say shapes."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import dtrain

PACKAGE = Path(dtrain.__file__).parent
PART = r"(?:\.\.\.?|[A-Za-z0-9][\w/+*.· -]*)"
SHAPE = re.compile(rf"(?<!\w)\[{PART}(?:, {PART})*\]|\bscalar")  # [B, S/cp], [T, V/tp], [rows], [..., 2], a scalar
LEAST = 0.8
CLAUSE = re.compile(r"(What|Whether|Of|As|Where|How|That|One|Those|Which|Who|When)\b")


def on_tensors(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(name, docstring) of each public function and method with a Tensor among its parameters and results."""
    for node in tree.body:
        inner = node.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_") else []
        for one in [node, *inner]:
            if isinstance(one, ast.FunctionDef) and not one.name.startswith("_"):
                arguments = [*one.args.posonlyargs, *one.args.args, *one.args.kwonlyargs]
                notes = [ast.unparse(note) for note in (one.returns, *(a.annotation for a in arguments)) if note]
                if any(re.search(r"\bD?Tensor\b", note) for note in notes):
                    yield one.name, ast.get_docstring(one) or ""


def test_functions_on_tensors_tell_shapes():
    told, silent = 0, []
    for path in sorted(PACKAGE.rglob("*.py")):
        for name, text in on_tensors(ast.parse(path.read_text())):
            told += bool(SHAPE.search(text))
            silent += [] if SHAPE.search(text) else [f"{path.relative_to(PACKAGE)}: {name}"]
    share = told / (told + len(silent))
    assert share >= LEAST, f"{share:.0%} tell shapes; silent: " + "; ".join(silent)


def docstrings(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(name, docstring) of the module, its classes and functions, as far as they have one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield getattr(node, "name", "module"), text


def test_docstrings_begin_with_what_the_thing_does_or_is():
    clauses = [
        f"{path.relative_to(PACKAGE)}: {name}: {text.splitlines()[0]}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for name, text in docstrings(ast.parse(path.read_text()))
        if CLAUSE.match(text)
    ]
    assert not clauses, "\n".join(clauses)
