"""The lanes of the tests: which cases run, and what of them a change asks for. tools/test names each.

fast     no processes and no whole runs
usual    a slice of the matrices, the day's or that of `--slice K`, and everything else. Of the cases marked `full` one
         in SLICES runs; of a test that starts processes FEW cases, and where a file's tests take `turns(N)` every Nth.
         The others run on other days

A test that starts no process may take `turns(N)` too, by a mark of its own: it does so in both lanes.
all      everything

`--changed REV` keeps, of a lane, the files that depend on what has changed since the commit REV; imports tell.
"""

import datetime
import gc
import sys
import zlib
from pathlib import Path

import pytest

from tests.depends import changed_since, dependent_tests, starters

SLICES = 84  # each case that is marked `full` comes up once in twelve weeks
FEW = 1  # cases a day of a test that starts processes: all of its cases come up within days
STARTS = {"os.fork", "os.forkpty", "os.posix_spawn", "subprocess.Popen"}  # audit events


def pytest_addoption(parser: pytest.Parser) -> None:
    lanes = parser.getgroup("lanes")
    lanes.addoption("--lane", choices=("fast", "usual", "all"), default="usual", help="which cases run")
    lanes.addoption("--slice", type=int, help=f"of the cases marked full, 0 to {SLICES - 1} (default: the day's)")
    lanes.addoption("--changed", metavar="REV", help="only what depends on files changed since REV")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(NoProcesses())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    lane, chosen = config.getoption("lane"), _slice(config)
    more = f", slice {chosen} of {SLICES} (--slice {chosen} repeats it)"
    terminalreporter.write_line(f"lane: {lane}{more if lane != 'all' else ''}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    lane, chosen = config.getoption("lane"), _slice(config)
    depending = None
    if rev := config.getoption("changed"):
        depending = dependent_tests(config.rootpath, changed_since(config.rootpath, rev))
    starting = {path: starters(path) for path in {item.path for item in items}}
    resting = _resting(items, starting, chosen) if lane != "all" else set()

    def runs(item: pytest.Item) -> bool:
        if depending is not None and item.path not in depending or item in resting:
            return False
        if lane == "fast":
            return _is_fast(item, starting)
        return lane == "all" or item.get_closest_marker("full") is None or _number(item) % SLICES == chosen

    kept = [item for item in items if runs(item)]
    if len(kept) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if not runs(item)])
        items[:] = kept


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # what is imported stays: a collection before each fork would look at it again, and take longer than it


def _resting(items: list[pytest.Item], starting: dict[Path, frozenset[str]], chosen: int) -> set[pytest.Item]:
    """Of the tests that take turns, the cases of other days."""
    cases: dict[tuple[Path, str, int], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("full") is not None:
            continue
        turns = item.get_closest_marker("turns")
        if turns in item.own_markers:
            cases.setdefault((item.path, item.originalname, turns.args[0]), []).append(item)
        elif _starts(item, starting):
            key = (item.path, "", turns.args[0]) if turns else (item.path, item.originalname, 0)
            cases.setdefault(key, []).append(item)
    found = set()
    for (_, _, turns), of_test in cases.items():
        days = turns or min(SLICES, -(-len(of_test) // FEW))
        of_test.sort(key=_number)
        found |= {item for index, item in enumerate(of_test) if index % days != chosen % days}
    return found


def _number(item: pytest.Item) -> int:
    """The same for a case wherever it runs."""
    return zlib.crc32(item.nodeid.encode())


def _is_fast(item: pytest.Item, starting: dict[Path, frozenset[str]]) -> bool:
    """Return whether the fast lane runs a test."""
    return item.get_closest_marker("full") is None and not _starts(item, starting)


def _starts(item: pytest.Item, starting: dict[Path, frozenset[str]]) -> bool:
    """Whether a test, or a fixture of it, starts a process or a whole run."""
    names = {item.originalname, *item.fixturenames}
    return item.get_closest_marker("processes") is not None or bool(names & starting[item.path])


def _slice(config: pytest.Config) -> int:
    given = config.getoption("slice")
    return (datetime.date.today().toordinal() if given is None else given) % SLICES


class Started(BaseException):
    """A test that the fast lane runs started a process."""


class NoProcesses:
    """While a test of the fast lane runs, whatever starts a process fails, in every lane: so each lane tells of a test
    that is in the fast one and should not be."""

    def __init__(self):
        self._within = False
        sys.addaudithook(self._refuse)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item):
        self._within = _is_fast(item, {item.path: starters(item.path)})
        try:
            return (yield)
        finally:
            self._within = False

    def _refuse(self, event: str, arguments: tuple) -> None:
        if self._within and event in STARTS:
            raise Started(f"{event}: a test of the fast lane starts no process (tests/depends.py finds those that do)")
