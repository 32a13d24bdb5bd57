"""Imports run downwards: the rooms in their order, what none of them loads, and who reads the environment."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import dtrain
from tests.depends import imported, tree_of

PACKAGE = Path(dtrain.__file__).parent

# From top to bottom: a room imports from floors below its own.
FLOORS = (
    ("__main__",),
    ("cli",),
    ("hosts",),
    ("launch", "environment"),
    ("plan",),
    ("preflight",),
    ("trainer",),
    ("resume",),
    ("methods",),
    ("policy",),
    ("models", "rollout", "checkpoint", "data", "losses", "optim", "metrics"),
    ("attention",),
    ("parallel",),
    ("batch", "orphans", "randomness", "addresses"),
)
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
# Along a floor: a model reads its weights through checkpoint, an export and a generation build the model they are of,
# a cache of data knows its files by checkpoint's digests.
DOORS = {
    ("models", "checkpoint"),
    ("checkpoint", "models"),
    ("data", "checkpoint"),
    ("rollout", "models"),
    ("rollout", "checkpoint"),
    ("rollout", "data"),
}
# Rooms beside the core: loaded by name (import_module) where they are needed, and imported by nobody.
ROOMS = {"hosts"}
KNOW_THE_RECIPE = {"cli", "hosts", "launch", "plan", "preflight", "trainer", "resume", "methods", "policy"}
FOREIGN = {"numpy", "transformers", "ray"}
EXTRAS = {"pyarrow", "datasets", "tensorboard", "wandb"}
TORCH_FREE = """
    dtrain dtrain.errors dtrain.config dtrain.cli dtrain.launch dtrain.preflight dtrain.models.config
    dtrain.data dtrain.data.files dtrain.data.formats dtrain.data.tokenizer dtrain.data.template dtrain.data.sample
    dtrain.data.preferences dtrain.data.pairs dtrain.data.prompts
    dtrain.checkpoint dtrain.checkpoint.files dtrain.checkpoint.rundir dtrain.rollout dtrain.rollout.rewards
    dtrain.rollout.rewards.worker dtrain.rollout.http dtrain.rollout.ahead dtrain.rollout.shared_directory
    dtrain.rollout.serve.answers dtrain.rollout.environments.worker
""".split()


@cache
def trees() -> dict[Path, ast.Module]:
    return {path.relative_to(PACKAGE): tree_of(path) for path in sorted(PACKAGE.rglob("*.py"))}


def room_of(path: Path) -> str:
    return path.parts[0].removesuffix(".py")


def rooms_used() -> Iterator[tuple[str, str, str]]:
    """(file, its room, a room that it imports from)."""
    for path, tree in trees().items():
        for name in imported(tree):
            parts = name.split(".")
            if parts[0] == "dtrain" and len(parts) > 1 and room_of(path) not in ("__init__", parts[1]):
                yield str(path), room_of(path), parts[1]


def test_every_room_has_its_floor():
    assert {room_of(path) for path in trees()} - FLOOR.keys() == {"__init__", "errors", "config", "json_files"}


def test_imports_run_downwards():
    wrong = [
        f"{path} imports {used}"
        for path, room, used in rooms_used()
        if used in FLOOR.keys() - ROOMS and not (FLOOR.get(room, len(FLOORS)) < FLOOR[used] or (room, used) in DOORS)
    ]
    assert not wrong


def test_nobody_imports_a_room_beside_the_core():
    wrong = [
        f"{path} imports {name}"
        for path, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in imported(node)
        if name.startswith("dtrain.") and name.split(".")[1] in ROOMS - {room_of(path)}
    ]
    assert not wrong


def test_only_the_upper_rooms_know_the_recipe():
    knowing = {room for _, room, used in rooms_used() if used == "config"}
    assert knowing - {"config"} <= KNOW_THE_RECIPE


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
    assert set(reading) <= {"launch/start.py"}


def test_what_needs_no_torch_loads_none():
    code = f"import sys, importlib\nfor name in {TORCH_FREE}:\n    importlib.import_module(name)\n"
    code += "    assert not {'torch', 'transformers'} & sys.modules.keys(), name"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
