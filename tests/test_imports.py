"""Imports run downwards: the rooms in their order, what none of them loads, and who reads the environment."""

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import dtrain
from tests.depends import imported, tree_of

PACKAGE = Path(dtrain.__file__).parent

# From top to bottom: a room imports from floors below its own.
FLOORS = (
    ("__main__",),
    ("cli",),
    ("typed",),
    ("chat",),
    ("serve", "evaluation", "versions", "push", "report"),
    ("hosts",),
    ("launch",),
    ("plan", "faces"),
    ("remote", "environments"),
    ("trainer",),
    ("preflight", "preview"),
    ("check",),
    ("lora_section",),
    ("summary",),
    ("resume", "sizing", "eval_section", "dry_run"),
    ("methods",),
    ("policy",),
    ("models", "rollout", "checkpoint", "data", "losses", "optim", "metrics"),
    ("attention", "optimizers"),
    ("parallel",),
    ("batch", "orphans", "randomness", "nucleus", "addresses", "arguments"),
)
# Beside the core: who needs one loads it by name (`import_module`), where a command or a recipe asks for it.
ROOMS = {
    "faces",
    "hosts",
    "plan",
    "remote",
    "environments",
    "serve",
    "evaluation",
    "versions",
    "push",
    "chat",
    "report",
}
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
# Along a floor: a model reads its weights through checkpoint, an export and a generation build the model they are of,
# a cache of data knows its files by checkpoint's digests.
DOORS = {
    ("models", "checkpoint"),
    ("checkpoint", "models"),
    ("data", "checkpoint"),
    ("serve", "remote"),
    ("rollout", "models"),
    ("rollout", "checkpoint"),
    ("rollout", "data"),
}
KNOW_THE_RECIPE = {
    "cli",
    "typed",
    "launch",
    "preflight",
    "preview",
    "check",
    "lora_section",
    "eval_section",
    "trainer",
    "resume",
    "sizing",
    "dry_run",
    "summary",
    "methods",
    "policy",
} | ROOMS
FOREIGN = {"numpy", "transformers", "ray"}
EXTRAS = {"plotly", "pyarrow", "datasets", "tensorboard", "wandb"}
TORCH_FREE = """
    dtrain dtrain.base.errors dtrain.recipe dtrain.run.check dtrain.methods.spec dtrain.commands.cli dtrain.launch dtrain.run.preflight
    dtrain.models.common.config dtrain.losses.policy.options dtrain.losses.preference.options
    dtrain.data dtrain.data.sources.files dtrain.data.formats.formats dtrain.data.text.tokenizer dtrain.data.text.template dtrain.data.formats.sample
    dtrain.data.formats.preferences dtrain.data.formats.pairs dtrain.data.formats.prompts
    dtrain.checkpoint dtrain.base.files dtrain.run.directory dtrain.inference dtrain.rl.rewards
    dtrain.rl.rewards.calls dtrain.rl.remote.http dtrain.rl.remote.prefetch dtrain.rl.remote.shared_directory
    dtrain.commands.serve.answers dtrain.rl.environments.calls dtrain.run.metrics dtrain.commands.push.command dtrain.commands.report.compare
    dtrain.commands.report.live
""".split()


@cache
def trees() -> dict[Path, ast.Module]:
    return {path.relative_to(PACKAGE): tree_of(path) for path in sorted(PACKAGE.rglob("*.py"))}


def room_of(path: Path) -> str:
    return path.parts[0].removesuffix(".py")


def at_run_time(tree: ast.Module) -> ast.Module:
    """Without what type checkers alone read."""
    lines = [node for node in tree.body if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")]
    return ast.Module(lines, [])


def rooms_used() -> Iterator[tuple[str, str, str]]:
    """(file, its room, a room that it imports from)."""
    for path, tree in trees().items():
        for name in imported(at_run_time(tree)):
            parts = name.split(".")
            if parts[0] == "dtrain" and len(parts) > 1 and room_of(path) not in ("__init__", parts[1]):
                yield str(path), room_of(path), parts[1]


def test_every_room_has_its_floor():
    assert {room_of(path) for path in trees()} - FLOOR.keys() == {
        "__init__",
        "errors",
        "config",
        "json_files",
        "patterns",
        "ranges",
    }


def test_imports_run_downwards():
    wrong = [
        f"{path} imports {used}"
        for path, room, used in rooms_used()
        if used in FLOOR and not (FLOOR.get(room, len(FLOORS)) < FLOOR[used] or (room, used) in DOORS)
        if used not in ROOMS or room in ROOMS
    ]
    assert not wrong


def test_the_core_imports_no_room_beside_it():
    found = set()
    for path, tree in trees().items():
        nodes = ast.walk(at_run_time(tree))
        statements = ast.Module([node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)], [])
        used = {name.split(".")[1] for name in imported(statements) if name.startswith("dtrain.")} & ROOMS
        found |= {(str(path), room) for room in used if room_of(path) not in ROOMS}
    assert not found


@pytest.mark.parametrize("name", ["dtrain.losses", "dtrain.methods", "dtrain.parallel.context.batch"])
def test_names_that_are_imported_late_are_those_that_type_checkers_see(name):
    module = importlib.import_module(name)
    (seen,) = [
        node
        for node in tree_of(Path(module.__file__)).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    homes = {alias.name: node.module for node in seen.body for alias in node.names}
    assert homes.keys() == module._HOMES.keys()
    for late, home in homes.items():
        assert getattr(module, late) is getattr(importlib.import_module(home), late)
    with pytest.raises(AttributeError, match="gone"):
        module.gone  # noqa: B018


def test_only_the_upper_rooms_know_the_recipe():
    knowing = {room for _, room, used in rooms_used() if used == "config"}
    assert knowing - {"config"} <= KNOW_THE_RECIPE


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


def test_no_foreign_package_and_extras_only_where_they_are_needed():
    for path, tree in trees().items():
        assert not {name.split(".")[0] for name in imported(tree)} & FOREIGN, path
        top = ast.Module([node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)], [])
        assert not {part for name in imported(top) for part in name.split(".")} & EXTRAS, path


def test_the_environment_is_read_in_one_place():
    reading = [
        str(path)
        for path, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv", "os.putenv")
    ]
    assert set(reading) <= {
        "launch/start.py",
        "commands/plan/children.py",
    }  # the latter writes, for a process of its own


def test_what_needs_no_torch_loads_none():
    code = f"import sys, importlib\nfor name in {TORCH_FREE}:\n    importlib.import_module(name)\n"
    code += "    assert not {'torch', 'transformers'} & sys.modules.keys(), name"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
