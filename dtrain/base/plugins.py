"""Code from outside of dtrain: objects by import path, and names that installed packages register.

A recipe can name a method, a loss, an optimizer, a data format, a metric sink or a model family in two ways:

- By its import path, `package.module:Name` (or `package.module.Name`). The working directory is searched, too.
- By a short name that an installed package registers in the entry point group `dtrain.plugins`. The name of the entry
  point is the recipe's key, a dot and the short name. For example, a package with these lines in its pyproject.toml
  adds `method: poly` and `sft.loss: poly`:

      [project.entry-points."dtrain.plugins"]
      "method.poly" = "my_package.poly:PolyMethod"
      "sft.loss.poly" = "my_package.poly:poly_loss"

Every process reads the same metadata of installed packages, so a plugin has the same names in every command and on
every rank. Nothing of a package is imported until a recipe uses one of its names. Imports no torch.
"""

import pkgutil
import re
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dtrain.base.errors import UserError
from dtrain.base.processes import import_search_path
from dtrain.base.ranges import closest_name

GROUP = "dtrain.plugins"
REWARDS_KEY = "rewards"
"""The key of rewards: an entry point `rewards.short` adds the reward `short` to `grpo.rewards` and all other lists."""


@cache
def plugins(key: str) -> Mapping[str, str]:
    """Return the names that installed packages register for a key of the recipe, with their import paths.

    Args:
        key: The key, such as "method" or "sft.loss". For data formats it is "data.format", for model families
            "model.family".

    Raises:
        UserError: If two packages register the same name.
    """
    found: dict[str, str] = {}
    for entry_point in entry_points(group=GROUP):
        entry_key, _, name = entry_point.name.rpartition(".")
        if entry_key != key:
            continue
        if found.get(name, entry_point.value) != entry_point.value:
            text = f"two installed packages register {key}={name}: {found[name]} and {entry_point.value}"
            raise UserError(f"{text}. Uninstall one of them, or set {key} to an import path")
        found[name] = entry_point.value
    return MappingProxyType(found)


def misspelt_key_hint(name: str, key: str) -> str:
    """Return the end of a message about an unknown name, if a package registers the name for a misspelt key.

    Args:
        name: The unknown name, such as "focal".
        key: The recipe's key, such as "sft.loss". An entry point `sft.los.focal` is found.
    """
    for entry_point in entry_points(group=GROUP):
        entry_key, _, entry_name = entry_point.name.rpartition(".")
        if entry_name == name and entry_key != key and closest_name(entry_key, [key]):
            return f"; an installed package registers {entry_point.name}, which should be {key}.{name}"
    return ""


def is_import_path(name: str) -> bool:
    """Check for the form of an import path.

    Example:
        >>> is_import_path("my_losses:focal"), is_import_path("my_losses.focal"), is_import_path("focal")
        (True, True, False)
    """
    return bool(re.fullmatch(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*[.:][^\W\d]\w*", name))


def split_import_path(path: str) -> tuple[str, str]:
    """Return the module and the name of an import path.

    Example:
        >>> split_import_path("my_package.losses:focal")
        ('my_package.losses', 'focal')
    """
    module, _, name = path.rpartition(":" if ":" in path else ".")
    return module, name


def registered_path(name: str, key: str) -> str:
    """Return the import path that an installed package registers for a name. Other names are returned unchanged.

    Example:
        >>> registered_path("my_losses:focal", "sft.loss")
        'my_losses:focal'
    """
    return plugins(key).get(name, name)


def import_path_of(obj: Any, name: str) -> str:
    """Return the import path by which another process of this machine imports a class or a function.

    A script's own module is `__main__`, which is another module in another process. It is named by the script's file,
    whose directory is on `sys.path`. For example, `PolyMethod` of `python train_poly.py` is `train_poly:PolyMethod`.

    Args:
        obj: The class or function.
        name: Its name for errors, such as "method poly".

    Raises:
        UserError: If it is defined within a function, in a notebook, or in a script that cannot be imported.
    """
    if "<locals>" in obj.__qualname__:
        text = f"{name} is defined inside of the function {obj.__qualname__.partition('.<locals>')[0]}"
        raise UserError(f"{text}, where other processes do not find it. Move it to the top level of its module")
    return f"{importable_module(obj.__module__, name)}:{obj.__qualname__}"


def importable_module(module: str, name: str) -> str:
    """Return the name by which other processes import a module. Arguments and errors are those of `import_path_of`."""
    if module != "__main__":
        return module
    main = sys.modules["__main__"]
    if main.__spec__ is not None:  # started by python -m
        return main.__spec__.name
    file = getattr(main, "__file__", None)  # an interpreter and a notebook have none
    if file is None:
        raise UserError(
            f"{name} is defined in a notebook or in the interpreter, where other processes do not find it. Move it to "
            "a module, or set launch.nproc=1"
        )
    stem = Path(file).stem
    if not stem.isidentifier():
        fix = re.sub(r"\W", "_", stem)
        raise UserError(f"{name} is defined in {file}, which cannot be imported. Name the file {fix}.py")
    return stem


def import_object(path: str, key: str, known: Iterable[str] = ()) -> Any:
    """Import the object that a recipe names.

    Args:
        path: Its import path, or a name that an installed package registers for `key`.
        key: Key of the recipe, which errors name. The index of an entry is not part of a plugin's key: "scheduler.name"
            has the plugins of "scheduler[0].name".
        known: Names that dtrain itself has for the key, which errors suggest.

    Raises:
        UserError: If the path is not an import path, or cannot be imported.

    Example:
        >>> import_object("math:sqrt", "sft.loss")
        <built-in function sqrt>
    """
    plugin_key = re.sub(r"\[\d+\]", "", key)
    registered = plugins(plugin_key)
    import_path = registered.get(path, path)
    if not is_import_path(import_path):
        names = [*known, *registered]
        near = closest_name(path, names)
        hint = f" Did you mean {near}?" if near else ""
        choices = ", ".join([*names, "an import path such as package.module:Name"])
        raise UserError(f"{key}={path} is unknown{misspelt_key_hint(path, plugin_key)}.{hint} Known: {choices}")
    module_name, name = split_import_path(import_path)
    sys.path[:] = import_search_path()
    try:
        module = import_module(module_name)
    except ImportError as error:
        fix = "Its module must be in the working directory, on PYTHONPATH or installed"
        near = _similar_module(module_name, error)
        if near:
            fix = f"Did you mean {near}{import_path.removeprefix(module_name)}?"
        raise UserError(f"{key}={path} cannot be imported: {error}. {fix}") from error
    except SyntaxError as error:
        raise UserError(f"{key}={path} cannot be imported: {error.filename}:{error.lineno}: {error.msg}") from error
    if not hasattr(module, name):
        near = closest_name(name, vars(module))
        hint = f"Did you mean {module_name}:{near}?" if near else "Check the name after the module."
        raise UserError(f"{key}={path}: {module_name} has no {name}. {hint}")
    return getattr(module, name)


def _similar_module(module: str, error: ImportError) -> str | None:
    """Return the existing module that a mistyped one probably means, from the modules next to it.

    Args:
        module: The module, such as "my_package.lossses".
        error: The error of its import. There is no similar module if the import of something else failed.
    """
    missing = error.name
    if not isinstance(error, ModuleNotFoundError) or missing is None or not f"{module}.".startswith(f"{missing}."):
        return None
    parent, _, name = missing.rpartition(".")
    locations = sys.path
    if parent:
        spec = find_spec(parent)
        locations = spec.submodule_search_locations or [] if spec else []
    near = closest_name(name, [found.name for found in pkgutil.iter_modules(locations)])
    if near is None:
        return None
    return module.replace(missing, f"{parent}.{near}" if parent else near, 1)
