"""The recipes that ship with dtrain: their directory, their names, and the file for a name or a path."""

from collections.abc import Sequence
from pathlib import Path

from dtrain.base.errors import UserError
from dtrain.base.ranges import closest_name

CLUSTERS = ("slurm.sh", "kubernetes.yaml")
"""Files next to the shipped recipes that start a run on a cluster. `find_recipe` needs their full names."""
QUICKSTART = "quickstart"
"""Start of the names of the quickstart's recipes, which name their model. All other recipes are general."""

GENERATED_FILES = {
    "build/arithmetic/early": "dtrain export runs/quickstart/checkpoints/step-300 build/arithmetic/early",
    "build/arithmetic/pairs.jsonl": (
        "python {tools}/make_preferences.py runs/quickstart/checkpoints/step-300 build/arithmetic/train.jsonl "
        "build/arithmetic/pairs.jsonl"
    ),
    "build/arithmetic": "python {tools}/make_arithmetic.py build/arithmetic",
    "build/shapes": "python {tools}/make_shapes.py build/shapes",
}
"""Files and directories that the quickstart's recipes read, with the command that makes each.

The first entry that contains a path counts.
"""


def recipes_dir() -> Path:
    """Return the directory of the shipped recipes."""
    return _shipped_directory("recipes")


def tools_dir() -> Path:
    """Return the directory of the scripts that make the quickstart's data."""
    return _shipped_directory("tools")


def how_to_make(path: str) -> str:
    """Return the end of a message about a missing path: the command that makes it, if the quickstart uses it.

    Example:
        >>> how_to_make("build/shapes/train.jsonl")  # doctest: +ELLIPSIS
        ': `python .../make_shapes.py build/shapes` makes it'
        >>> how_to_make("build/other")
        ''
    """
    for made, command in GENERATED_FILES.items():
        if Path(path).is_relative_to(made):
            return f": `{command.format(tools=tools_dir())}` makes it"
    return ""


def _shipped_directory(name: str) -> Path:
    """Return a directory of the repository: in the package of an installed wheel, next to the package in a checkout."""
    package = Path(__file__).resolve().parents[1]
    packaged = package / f"_{name}"
    return packaged if packaged.is_dir() else package.parent / name


def list_shipped_recipes(general: Sequence[str] = ()) -> list[tuple[str, str]]:
    """List the shipped recipes.

    Args:
        general: Names of methods. Their recipes come first, in this order, and each before its variant with an adapter
            (`sft`, `lora-sft`). The quickstart's recipes come last.

    Returns:
        (name, first line of the file's header) for each recipe.
    """

    def sort_key(path: Path) -> tuple[bool, int, int, str]:
        is_quickstart = path.stem.startswith(QUICKSTART)
        method = path.stem.rpartition("-")[2]
        has_rank = method in general and not is_quickstart
        rank = general.index(method) if has_rank else len(general)
        return is_quickstart, rank, len(path.stem), path.stem

    recipes = []
    for path in sorted(recipes_dir().glob("*.yaml"), key=sort_key):
        if path.name in CLUSTERS:
            continue
        with path.open(encoding="utf-8") as file:
            recipes.append((path.stem, file.readline().lstrip("# ").strip()))
    return recipes


def find_recipe(recipe: str | Path) -> Path:
    """Find the file of a recipe.

    Args:
        recipe: The path of a file, or the name of a shipped recipe.

    Raises:
        UserError: If there is no such recipe.
    """
    path = Path(recipe).expanduser()
    if path.is_file():
        return path
    name = str(recipe)
    is_plain_name = path.name == name
    # "slurm.sh" finds that file, but "kubernetes" does not find kubernetes.yaml, which is no recipe.
    file = name if name in CLUSTERS else f"{name}.yaml"
    is_allowed = name in CLUSTERS or file not in CLUSTERS
    shipped_file = recipes_dir() / file
    if is_plain_name and is_allowed and shipped_file.is_file():
        return shipped_file
    if path.is_dir():
        saved = path / "config.yaml"
        hint = f"; the recipe of this run is {saved}" if saved.is_file() else ": name a recipe's file in it"
        raise UserError(f"{recipe or 'the recipe'} is a directory{hint}")

    from dtrain.recipe import models  # measured: only needed for this message

    names = [shipped_name for shipped_name, _ in list_shipped_recipes()]
    former_name = path.name.removesuffix(".yaml")
    general_names = [shipped_name for shipped_name in names if not shipped_name.startswith(QUICKSTART)]
    command = models.former_recipe_command(former_name, general_names)
    if command:
        raise UserError(f"there is no recipe {former_name} any more: `{command}`")
    near = closest_name(path.stem, names)
    hint = f"; did you mean {near}?" if near else "; `dtrain ls` lists the recipes that ship with dtrain"
    raise UserError(f"there is no recipe {recipe}: neither a file nor a shipped recipe{hint}")
