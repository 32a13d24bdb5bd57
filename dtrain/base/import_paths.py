"""The search path for the code that a recipe names."""

import sys
from pathlib import Path


def search_path() -> list[str]:
    """Return sys.path with the working directory at its end where it is not on it yet: a file there may have the name
    of a library, and does not take its place."""
    here = str(Path.cwd())
    return list(sys.path) if here in sys.path or "" in sys.path else [*sys.path, here]
