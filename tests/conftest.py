"""Choice of the tests that run: those of CI, all, the fast ones, or those that a change asks for.

By default every test runs except those of tests/extended.txt: further combinations of options whose parts other tests
cover. `--extended`, `--changed` and a path on the command line include them. `--fast` leaves out each test that
starts a process, as tests/depends.py finds it, and each that is marked `slow`. `--changed REV` keeps the files that
depend on what has changed since the commit REV; imports tell. What runs
is a function of the files alone.
"""

import gc
import os
import subprocess
from functools import partial
from pathlib import Path

import pytest

from tests.depends import changed_since, dependent_tests, starters

STARTS = [(os, name) for name in ("fork", "forkpty", "posix_spawn", "posix_spawnp")]
STARTS += [(subprocess.Popen, "_execute_child")]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--extended", action="store_true", help="also the tests of tests/extended.txt")
    parser.addoption("--fast", action="store_true", help="only what starts no process and takes little time")
    parser.addoption("--changed", metavar="REV", help="only what depends on files changed since REV")


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):  # a worker of pytest-xdist, whose paths are always given
        config.option.extended = config.workerinput["extended"]
    elif config.getoption("changed") or config.args_source is pytest.Config.ArgsSource.ARGS:
        config.option.extended = True
    config.pluginmanager.register(NoProcesses())


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node) -> None:
    """Tell a worker of pytest-xdist whether extended tests run."""
    node.workerinput["extended"] = node.config.getoption("extended")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept = items
    if not config.getoption("extended"):
        extended = _extended_tests()
        kept = [item for item in kept if not _names(item.nodeid) & extended]
    if rev := config.getoption("changed"):
        depending = dependent_tests(config.rootpath, changed_since(config.rootpath, rev))
        kept = [item for item in kept if item.path in depending]
    if config.getoption("fast"):
        starting = {path: starters(path) for path in {item.path for item in kept}}
        kept = [item for item in kept if _is_fast(item, starting)]
    if len(kept) < len(items):
        chosen = set(kept)
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = kept


def _extended_tests() -> set[str]:
    """Return the lines of tests/extended.txt."""
    lines = (Path(__file__).parent / "extended.txt").read_text(encoding="utf-8").splitlines()
    return {line for line in lines if line and not line.startswith("#")}


def _names(node_id: str) -> set[str]:
    """Return a node id, its function and its file: the names by which tests/extended.txt may list it."""
    file, _, _ = node_id.partition("::")
    function, _, _ = node_id.partition("[")
    return {node_id, function, file}


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # what is imported stays: a collection before each fork would look at it again, and take longer than it


def _is_fast(item: pytest.Item, starting: dict[Path, frozenset[str]]) -> bool:
    return item.get_closest_marker("slow") is None and not _starts(item, starting)


def _starts(item: pytest.Item, starting: dict[Path, frozenset[str]]) -> bool:
    """Return whether a test, or a fixture of it, starts a process or a whole run."""
    names = {item.originalname, *item.fixturenames}
    return item.get_closest_marker("processes") is not None or bool(names & starting[item.path])


class Started(BaseException):
    """A test that `--fast` runs started a process."""


class NoProcesses:
    """While a test of `--fast` runs, whatever starts a process fails, with and without `--fast`.

    An audit hook would see the same, but Python calls it at each `id()`, in forks too: a twentieth of all tests' time.
    """

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item):
        if not _is_fast(item, {item.path: starters(item.path)}):
            return (yield)
        with pytest.MonkeyPatch.context() as patched:
            for owner, name in STARTS:
                patched.setattr(owner, name, partial(_refuse, name))
            return (yield)


def _refuse(name: str, *arguments, **options):
    raise Started(f"{name}: a test of --fast starts no process (tests/depends.py finds those that do)")
