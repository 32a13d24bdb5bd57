"""The order of the packages, and the modules that optional features keep out of a plain run."""

import ast
import importlib
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

import dtrain
from dtrain.training import METHODS
from tests.depends import tree_of
from tests.tiny import write_model, write_rows
from tools.package_map import README, package_table

PACKAGE = Path(dtrain.__file__).parent
# dtrain.models exports from_pretrained, which reads files, and dtrain.parallel.context a context that computes the
# attention of other code; their names there are a contract with users. The functions by which NeMo-RL's users put a
# model on their meshes have an argument for activation checkpointing.
EXCEPTIONS = {
    ("models/__init__.py", "checkpoint"),
    ("parallel/context/__init__.py", "attention"),
    ("parallel/parallelize.py", "memory"),
}
OPTIONAL_OPTIMIZERS = (
    "optim/muon",
    "memory/low_bit",
    "memory/optimizer_offload",
    "memory/host_masters",
    "memory/gradient_accumulation",
)
NOT_FOR_SFT = (
    "rl",
    "inference",
    "commands/chat",
    "commands/eval",
    "commands/plan",
    "commands/push",
    "commands/report",
    *OPTIONAL_OPTIMIZERS,
)
FOREIGN = {"numpy", "transformers", "ray"}
EXTRAS = {"PIL", "plotly", "pyarrow", "datasets", "tensorboard", "wandb", "trackio", "mlflow", "swanlab"}
TORCH_FREE = """
    dtrain dtrain.base.errors dtrain.recipe dtrain.training.inputs dtrain.training.hub_files
    dtrain.commands.cli dtrain.launch
    dtrain.commands.run dtrain.training.preflight dtrain.models.common.config dtrain.models.read_config
    dtrain.data dtrain.data.sources.files dtrain.data.formats.formats dtrain.data.text.tokenizer
    dtrain.data.text.template dtrain.data.formats.encoder dtrain.data.formats.pairs
    dtrain.data.formats.prompts dtrain.checkpoint dtrain.base.files dtrain.training.directory dtrain.inference
    dtrain.rl.rewards dtrain.rl.rewards.scoring dtrain.rl.remote.http
    dtrain.commands.serve.answers dtrain.rl.environments.calls dtrain.training.metrics
    dtrain.commands.push.command dtrain.commands.report.compare dtrain.commands.report.live dtrain.commands.web
    dtrain.data.images.files dtrain.data.images.families
""".split()
# Packages that import names when they are first used (PEP 562).
LATE = ["methods", "models", "parallel.context"]
SFT = """
import json, sys
from dtrain import run
run(json.loads(sys.argv[1]), [])
print("\\n" + json.dumps([getattr(m, "__file__", None) for n, m in sys.modules.items() if n.split(".")[0] == "dtrain"]))
"""


@cache
def trees() -> dict[Path, ast.Module]:
    return {path.relative_to(PACKAGE): tree_of(path) for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def modules() -> dict[str, Path]:
    """Dotted name -> file, of every module."""
    parts = {path: ("dtrain", *path.with_suffix("").parts) for path in trees()}
    return {".".join(name[:-1] if name[-1] == "__init__" else name): path for path, name in parts.items()}


def package_of(path: Path) -> str:
    return path.parts[0] if len(path.parts) > 1 else ""


def imports_of(path: Path) -> Iterator[tuple[Path, bool]]:
    """The files that a file imports, lazy imports and those by name included; and whether for type checkers alone."""

    def names(node: ast.AST, for_types: bool) -> Iterator[tuple[str, bool]]:
        for child in ast.iter_child_nodes(node):
            types = for_types or (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test))
            if isinstance(child, ast.Import):
                yield from ((alias.name, types) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                yield from ((f"{child.module}.{alias.name}", types) for alias in child.names)
            elif isinstance(child, ast.Constant) and isinstance(child.value, str) and child.value in modules():
                yield child.value, types
            yield from names(child, types)

    for name, types in names(trees()[path], False):
        while name and name not in modules():
            name = name.rpartition(".")[0]
        if name and name != "dtrain" and modules()[name] != path:
            yield modules()[name], types


def test_every_package_stands_in_the_order():
    assert {package_of(path) for path in trees()} == {"", *dtrain.PACKAGES}
    assert {str(path) for path in trees() if not package_of(path)} == {"__init__.py", "__main__.py"}


def test_imports_run_in_the_order_of_the_packages():
    order = {name: place for place, name in enumerate(dtrain.PACKAGES)}
    wrong = [
        f"{path} imports {used}"
        for path in trees()
        for used, _ in imports_of(path)
        if (home := package_of(path)) and (there := package_of(used)) and order[there] < order[home]
        if (str(path), there) not in EXCEPTIONS
    ]
    assert not wrong


def test_no_files_import_one_another_in_a_circle():
    users = {path: {used for used, types in imports_of(path) if not types} for path in trees()}
    done: set[Path] = set()
    while ready := [path for path, used in users.items() if path not in done and used <= done]:
        done |= set(ready)
    assert not sorted(map(str, users.keys() - done)), "these import one another, or files that do"


def test_a_plain_sft_run_loads_no_optional_package(tmp_path):
    write_rows(tmp_path / "rows.jsonl", count=40)
    recipe = {
        "method": "sft",
        "run": {"name": "x", "dir": str(tmp_path / "runs")},
        "launch": {"nproc": 1, "device": "cpu"},
        "model": {"path": str(write_model(tmp_path / "llama")), "init": "scratch"},
        "data": {"train": {"path": str(tmp_path / "rows.jsonl")}, "max_length": 64},
        "train": {"steps": 2, "global_batch": 2, "micro_batch": 1, "dtype": "float32"},
        "scheduler": {"warmup_steps": 0},
        "checkpoint": {"every": None, "export": "none"},
        "metrics": {"tensorboard": False, "plan": False},
    }
    command = [sys.executable, "-c", SFT, json.dumps(recipe)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=PACKAGE.parent)
    assert done.returncode == 0, done.stderr
    files = [Path(file) for file in json.loads(done.stdout.splitlines()[-1]) if file]
    names = [str(file.relative_to(PACKAGE)) for file in files]
    assert not [name for name in names if name.startswith(NOT_FOR_SFT)]
    of_methods = {name.removeprefix("methods/") for name in names if name.startswith("methods/")}
    assert of_methods == {"__init__.py", "method.py", "sections.py", "sft.py"}


@pytest.mark.parametrize("name", LATE)
def test_the_names_that_a_package_lists_are_those_that_type_checkers_see_and_that_users_get(name):
    module = importlib.import_module(f"dtrain.{name}")
    tree = tree_of(Path(module.__file__))
    homes = _imported_names(node.body for node in tree.body if _is_for_type_checkers(node))
    at_once = _imported_names([tree.body])
    assert len(module.__all__) == len(set(module.__all__))
    assert set(homes) == set(module.__all__) - set(at_once)
    for late, home in homes.items():
        assert getattr(module, late) is getattr(importlib.import_module(home), late)
    with pytest.raises(AttributeError, match="gone"):
        module.gone  # noqa: B018


def test_the_names_of_dtrain_are_its_packages_and_its_python_api():
    tree = tree_of(PACKAGE / "__init__.py")
    seen = _imported_names(node.body for node in tree.body if _is_for_type_checkers(node))
    assert set(dtrain.PACKAGES) < set(seen)
    assert set(dtrain.__all__) == {*seen, "PACKAGES", "RunResult", "__version__", "run"}
    for name in dtrain.__all__:
        if name in dtrain.PACKAGES or name not in seen:
            assert getattr(dtrain, name) is not None
        else:
            assert getattr(dtrain, name) is getattr(importlib.import_module(seen[name]), name)


def test_every_list_of_public_names_is_literal():
    """Type checkers understand no `__all__` that is computed."""
    for path, tree in trees().items():
        lists = [
            node.value
            for node in tree.body
            if isinstance(node, ast.Assign | ast.AugAssign) and "__all__" in ast.unparse(node).partition("=")[0]
        ]
        assert all(isinstance(value, ast.List) for value in lists), path


def _is_for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def _imported_names(bodies: Iterable[list[ast.stmt]]) -> dict[str, str]:
    """Return the imported names of some lists of statements, each with the module that it comes from."""
    imports = [node for body in bodies for node in body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def test_the_map_of_the_packages_is_what_they_say_of_themselves():
    assert package_table() in README.read_text(), "python tools/package_map.py writes it"


def test_nobody_but_the_methods_asks_for_a_method_s_name():
    asking = [
        f"{path}: {ast.unparse(node)}"
        for path, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare | ast.Match)
        and any(
            isinstance(part, ast.Attribute) and ast.unparse(part).endswith("recipe.method")
            for part in ([node.left, *node.comparators] if isinstance(node, ast.Compare) else [node.subject])
        )
    ]
    assert not [one for one in asking if not one.startswith("methods/")]


def test_a_method_s_name_stands_in_the_methods_and_their_table_alone():
    """As a word of its own, or as an attribute of a recipe; a loss may have a method's name.

    Conversions of other tools' files write recipes, so they name methods too.
    """
    names = {*METHODS} - {"reward"}  # also a word of rewards
    naming = [
        f"{path}:{node.lineno}: {ast.unparse(node)}"
        for path, tree in trees().items()
        if package_of(path) not in ("methods", "losses")
        if str(path) not in ("training/registry.py", "rl/grpo.py", "rl/on_policy.py")
        and not str(path).startswith("recipe/other_tools/")
        for node in ast.walk(tree)
        if (isinstance(node, ast.Constant) and node.value in names)
        or (isinstance(node, ast.Attribute) and node.attr in names)
    ]
    assert not naming


def test_no_foreign_package_and_extras_only_where_they_are_needed():
    for path, tree in trees().items():
        top = ast.Module([node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)], [])
        allowed = {"transformers"} if path.parts[:2] == ("models", "transformers") else set()
        assert not {name.split(".")[0] for name in _imported(tree)} & (FOREIGN - allowed), path
        assert not {part for name in _imported(top) for part in name.split(".")} & EXTRAS, path


def _imported(tree: ast.AST) -> Iterator[str]:
    """Every dotted name that is imported anywhere in `tree`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_the_environment_is_read_in_one_place():
    reading = {
        str(path)
        for path, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv", "os.putenv")
    }
    # children.py writes, for its own process; worker.py only reports CUDA_VISIBLE_DEVICES, as NeMo-RL's callers expect;
    # mcp.py passes all of it on to the tool servers that it starts; cli.py sees a shell's question for completions.
    passing_on = {"rl/environments/mcp.py", "commands/cli.py"}
    assert reading <= {"launch/start.py", "commands/plan/processes.py", "policy/worker.py"} | passing_on


def test_what_needs_no_torch_loads_none():
    code = f"import sys, importlib\nfor name in {TORCH_FREE}:\n    importlib.import_module(name)\n"
    code += "    assert not {'torch', 'transformers'} & sys.modules.keys(), name"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
