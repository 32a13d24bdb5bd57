"""The recipes that ship with dtrain: where they are, their names, and the file of a name or a path."""

from collections.abc import Sequence
from pathlib import Path

from dtrain.base.errors import UserError
from dtrain.base.ranges import closest_name

CLUSTERS = ("slurm.sh", "kubernetes.yaml")
"""Files beside the shipped recipes that start them on a cluster. `find` knows these by their whole name."""
QUICKSTART = "quickstart"
"""Begins the names of the quickstart's recipes, which name a model of their own. The others are general."""

GENERATED_FILES = {
    "build/arithmetic/early": "dtrain export runs/quickstart/checkpoints/step-300 build/arithmetic/early",
    "build/arithmetic/pairs.jsonl": (
        "python {tools}/make_preferences.py runs/quickstart/checkpoints/step-300 build/arithmetic/train.jsonl "
        "build/arithmetic/pairs.jsonl"
    ),
    "build/arithmetic": "python {tools}/make_arithmetic.py build/arithmetic",
    "build/shapes": "python {tools}/make_shapes.py build/shapes",
}
"""Files and directories that the quickstart's recipes read, and the command that makes each. The first that fits
counts."""


def recipes_dir() -> Path:
    """Return the directory of the shipped recipes."""
    return _shipped_directory("recipes")


def how_to_make(path: str) -> str:
    """Return the end of a message that `path` is missing: the command that makes it, if a quickstart's recipe reads it.

    >>> how_to_make("build/shapes/train.jsonl")  # doctest: +ELLIPSIS
    ': `python .../make_shapes.py build/shapes` makes it'
    >>> how_to_make("build/other")
    ''
    """
    for made, command in GENERATED_FILES.items():
        if Path(path).is_relative_to(made):
            return f": `{command.format(tools=_shipped_directory('tools'))}` makes it"
    return ""


def _shipped_directory(name: str) -> Path:
    """Return a directory of the repository: in the package of an installed wheel, beside the package in a checkout."""
    package = Path(__file__).resolve().parents[1]
    packaged = package / f"_{name}"
    return packaged if packaged.is_dir() else package.parent / name


def list_shipped_recipes(general: Sequence[str] = ()) -> list[tuple[str, str]]:
    """Return (name, first line of its header) of every shipped recipe: those of a method of `general`, in its order,
    each before those with an adapter; then the quickstart's."""

    def place(path: Path) -> tuple[bool, int, int, str]:
        is_quickstart, method = path.stem.startswith(QUICKSTART), path.stem.rpartition("-")[2]
        rank = len(general) if is_quickstart or method not in general else general.index(method)
        return is_quickstart, rank, len(path.stem), path.stem

    recipes = []
    for path in sorted(recipes_dir().glob("*.yaml"), key=place):
        if path.name in CLUSTERS:
            continue
        with path.open(encoding="utf-8") as file:
            recipes.append((path.stem, file.readline().lstrip("# ").strip()))
    return recipes


def find_recipe(recipe: str | Path) -> Path:
    """Return the file of a recipe: a path as it is, or the name of a shipped recipe. Raises UserError."""
    path = Path(recipe).expanduser()
    if path.is_file():
        return path
    file = str(recipe) if str(recipe) in CLUSTERS else f"{recipe}.yaml"
    packaged = recipes_dir() / file
    if path.name == str(recipe) and (file == str(recipe) or file not in CLUSTERS) and packaged.is_file():
        return packaged
    if path.is_dir():
        own = path / "config.yaml"
        meant = f"; the recipe of this run is {own}" if own.is_file() else ": name a recipe's file in it"
        raise UserError(f"{recipe or 'the recipe'} is a directory{meant}")
    names = [name for name, _ in list_shipped_recipes()]
    from dtrain.recipe import models  # for the name of a former recipe alone

    name = path.name.removesuffix(".yaml")
    if command := models.former_recipe_command(name, [name for name in names if not name.startswith(QUICKSTART)]):
        raise UserError(f"there is no recipe {name} any more: `{command}`")
    near = closest_name(path.stem, names)
    hint = f"; did you mean {near}?" if near else "; `dtrain ls` lists the recipes that ship with dtrain"
    raise UserError(f"there is no recipe {recipe}: neither a file nor a shipped recipe{hint}")
