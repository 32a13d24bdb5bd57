"""tests/mutations: each can be applied, and names tests that exist. tools/mutants.py runs them."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def tool():
    spec = importlib.util.spec_from_file_location("mutants", ROOT / "tools/mutants.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MUTATIONS = tool().mutations()


@pytest.mark.parametrize("entry", MUTATIONS, ids=lambda entry: entry["name"])
def test_it_can_be_applied_and_names_tests(entry):
    assert entry["file"].startswith("dtrain/") and entry["old"] != entry["new"]
    assert (ROOT / entry["file"]).read_text().count(entry["old"]) == 1
    assert entry["tests"]
    for test in entry["tests"]:
        file, _, name = test.partition("::")
        assert not name or f"def {name.partition('[')[0]}(" in (ROOT / file).read_text(), test
        assert (ROOT / file).exists(), test


def test_they_are_many_and_of_every_package():
    names = [entry["name"] for entry in MUTATIONS]
    assert len(names) >= 60 and len(set(names)) == len(names)
    packages = {path.name for path in (ROOT / "dtrain").iterdir() if path.is_dir() and path.name[0] not in "_."}
    assert {entry["file"].split("/")[1] for entry in MUTATIONS} >= packages
