"""The lanes of the tests: which cases run, and what of them a change asks for. tools/test names each.

fast     no processes and no whole runs
usual    every case but those marked `full`, and one of SLICES slices of these: the day's, or that of `--slice K`
all      everything

`--changed REV` keeps, of a lane, the files that depend on what has changed since the commit REV; imports tell.
"""

import datetime
import gc
import sys
import zlib

import pytest

from tests.depends import changed_since, dependent_tests, starters

SLICES = 28  # each case that is marked `full` comes up once in four weeks
STARTS = {"os.fork", "os.forkpty", "os.posix_spawn", "subprocess.Popen"}  # audit events


def pytest_addoption(parser: pytest.Parser) -> None:
    lanes = parser.getgroup("lanes")
    lanes.addoption("--lane", choices=("fast", "usual", "all"), default="usual", help="which cases run")
    lanes.addoption("--slice", type=int, help=f"of the cases marked full, 0 to {SLICES - 1} (default: the day's)")
    lanes.addoption("--changed", metavar="REV", help="only what depends on files changed since REV")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("lane") == "fast":
        config.pluginmanager.register(NoProcesses())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    lane, chosen = config.getoption("lane"), _slice(config)
    more = f", with slice {chosen} of {SLICES} of the full matrices (--slice {chosen} repeats it)"
    terminalreporter.write_line(f"lane: {lane}{more if lane == 'usual' else ''}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    lane, chosen = config.getoption("lane"), _slice(config)
    depending = None
    if rev := config.getoption("changed"):
        depending = dependent_tests(config.rootpath, changed_since(config.rootpath, rev))
    starting = {path: starters(path) for path in {item.path for item in items}} if lane == "fast" else {}

    def runs(item: pytest.Item) -> bool:
        if depending is not None and item.path not in depending:
            return False
        full = item.get_closest_marker("full") is not None
        if lane == "fast":
            return not full and not item.get_closest_marker("processes") and not _needs(item) & starting[item.path]
        return lane == "all" or not full or zlib.crc32(item.nodeid.encode()) % SLICES == chosen

    kept = [item for item in items if runs(item)]
    if len(kept) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if not runs(item)])
        items[:] = kept


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # what is imported stays: a collection before each fork would look at it again, and take longer than it


def _needs(item: pytest.Item) -> set[str]:
    """The names of a test and its fixtures."""
    return {getattr(item, "originalname", item.name), *getattr(item, "fixturenames", ())}


def _slice(config: pytest.Config) -> int:
    given = config.getoption("slice")
    return (datetime.date.today().toordinal() if given is None else given) % SLICES


class Started(BaseException):
    """A test of the fast lane started a process."""


class NoProcesses:
    """While a test runs, whatever starts a process fails: the fast lane stays what it says."""

    def __init__(self):
        self._within = False
        sys.addaudithook(self._refuse)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self):
        self._within = True
        try:
            return (yield)
        finally:
            self._within = False

    def _refuse(self, event: str, arguments: tuple) -> None:
        if self._within and event in STARTS:
            raise Started(f"{event}: a test of the fast lane starts no process (tests/depends.py finds those that do)")
