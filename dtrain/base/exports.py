"""Names that a package exports without importing their modules at once."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def late_names(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a package's `__getattr__`, which imports a name's module when the name is first used.

    Type checkers cannot follow it: for them, the package imports the same names under `TYPE_CHECKING` and lists them
    in a literal `__all__`.

    Args:
        package: The package's own name.
        modules: Module -> the names that it provides, separated by spaces. A module of the package is given relative
            to it, another module of dtrain by its full name.

    Example:
        >>> load = late_names("dtrain.base", {"ranges": "nearest", "dtrain.base.errors": "UserError"})
        >>> load("UserError").__name__
        'UserError'
    """
    homes = {name: module for module, names in modules.items() for name in names.split()}

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = homes[name] if homes[name].startswith("dtrain.") else f"{package}.{homes[name]}"
        value = getattr(import_module(home), name)
        setattr(sys.modules[package], name, value)  # so that the next use does not come here
        return value

    return load
