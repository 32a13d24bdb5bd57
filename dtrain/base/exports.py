"""Names that a package hands out, each imported from its module when it is first used."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def late_names(package: str, modules: Mapping[str, str]) -> tuple[Callable[[str], Any], list[str]]:
    """Return `__getattr__` of a package and the names that it serves. modules: the package's, or full names of
    dtrain's modules elsewhere, each with the names that come from it, parted by spaces.

    Users' type checkers see a name only where the package has it in a literal `__all__` too."""
    homes = {name: module for module, names in modules.items() for name in names.split()}

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = homes[name] if homes[name].startswith("dtrain.") else f"{package}.{homes[name]}"
        value = getattr(import_module(home), name)
        setattr(sys.modules[package], name, value)  # looked up once
        return value

    return load, list(homes)
