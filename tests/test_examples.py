"""Every example of a docstring prints what it shows."""

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def modules_with_examples() -> list[str]:
    """Return the names of the modules whose docstrings have examples.

    The files are read and not imported: an optional library may be missing for modules that have none.
    """
    names = []
    for file in sorted((ROOT / "dtrain").rglob("*.py")):
        text = file.read_text()
        if ">>> " not in text:
            continue
        parts = file.relative_to(ROOT).with_suffix("").parts
        if parts[-1] == "__init__":
            parts = parts[:-1]
        names.append(".".join(parts))
    return names


@pytest.mark.parametrize("name", modules_with_examples())
def test_examples_print_what_they_show(name: str) -> None:
    module = importlib.import_module(name)
    tests = [test for test in doctest.DocTestFinder().find(module) if test.examples]
    # A docstring that no name of the module reaches, such as one under a decorator that loses it, would be skipped.
    assert tests, f"{name} has `>>>`, but doctest finds no example in it"
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    for test in tests:
        runner.run(test)
    assert runner.summarize(verbose=False).failed == 0
