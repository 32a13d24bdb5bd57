"""Dependencies, read from the sources: the tests behind a changed file, and the tests that start processes."""

import ast
import re
import subprocess
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path

# Who calls anything of these modules starts a process or a whole run; so does who calls a test's helper that does.
STARTING_MODULES = {
    "dtrain.commands.cli",
    "dtrain.launch",
    "dtrain.commands.plan",
    "dtrain.rl.environments.calls.TimeoutPool",
    "dtrain.rl.environments.stepping.Environments",
    "dtrain.rl.rewards.Rewards",
    "dtrain.rl.rewards.python_tests",
    "dtrain.rl.rewards.code_sandbox",
    "dtrain.rl.rewards.python_tests.PythonTests",
    "dtrain.rl.rewards.scoring.Rewards",
    "dtrain.training.trainer",
    "multiprocessing",
    "subprocess",
}
STARTING_NAMES = {"os.fork", "dtrain.run"}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imported(tree: ast.AST) -> Iterator[str]:
    """Every dotted name that is imported anywhere in `tree`, `import_module` of a literal and tables of modules
    included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and "import_module" in ast.unparse(node.func):
            yield from (word.value for word in node.args if isinstance(word, ast.Constant))
        elif isinstance(node, ast.Constant) and re.fullmatch(r"dtrain(\.\w+)+(:\w+)?", str(node.value)):
            yield node.value.partition(":")[0]


def changed_since(root: Path, rev: str) -> set[Path]:
    """Files that differ from the commit `rev`, those that git does not track yet among them."""
    asked = (["diff", "--name-only", rev], ["ls-files", "--others", "--exclude-standard"])
    found = [subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True) for words in asked]
    return {root / line for one in found for line in one.stdout.splitlines()}


def dependent_tests(root: Path, changed: Collection[Path]) -> set[Path]:
    """The test files that import one of `changed`, at whatever distance, or are among them. What is no Python may be
    read by any test: a change of it asks for all of them."""
    files = [path for folder in ("dtrain", "tests", "tools") for path in (root / folder).rglob("*.py")]
    tests = {path for path in files if path.name.startswith("test_")}
    if any(path.suffix != ".py" and path.suffix != ".md" for path in changed):
        return tests
    users: dict[Path, set[Path]] = {}
    for path in files:
        for name in imported(tree_of(path)):
            for used in _files_of(root, name):
                users.setdefault(used, set()).add(path)
    found, left = set(), set(changed)
    while left:
        path = left.pop()
        found.add(path)
        left |= users.get(path, set()) - found
    return tests & found


def _files_of(root: Path, name: str) -> Iterator[Path]:
    """The files that an import of `name`, a module or something in one, runs."""
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        stem = root.joinpath(*parts[:count])
        yield from (path for path in (stem / "__init__.py", stem.with_suffix(".py")) if path.is_file())


@cache
def starters(path: Path) -> frozenset[str]:
    """The functions and classes of a test file, tests and fixtures among them, that start a process or a whole run."""
    tree, root = tree_of(path), Path(__file__).parents[1]
    names = set(STARTING_NAMES)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name for alias in node.names if _starts(alias.name)}
        elif isinstance(node, ast.ImportFrom):
            helpers = root.joinpath(*node.module.split(".")).with_suffix(".py")
            starting = starters(helpers) if node.module.startswith("tests.") and helpers.is_file() else frozenset()
            names |= {
                alias.asname or alias.name
                for alias in node.names
                if alias.name in starting or _starts(node.module) or _starts(f"{node.module}.{alias.name}")
            }
    used = {
        node.name: {ast.unparse(part) for part in ast.walk(node) if isinstance(part, ast.Name | ast.Attribute)}
        | ({argument.arg for argument in node.args.args} if isinstance(node, ast.FunctionDef) else set())  # fixtures
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    found: set[str] = set()
    while more := {name for name, parts in used.items() if name not in found and parts & (names | found)}:
        found |= more
    return frozenset(found)


def _starts(module: str) -> bool:
    return any(module == one or module.startswith(f"{one}.") for one in STARTING_MODULES)
