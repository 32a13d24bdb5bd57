"""Many cases of one test in one world of processes: a world costs more than what most cases do in it."""

from collections.abc import Callable, Mapping
from typing import Any

from tests.world import run_world


def run_cases(
    function: Callable[..., Any], world_size: int, cases: Mapping[str, tuple], timeout: float = 300.0
) -> dict[str, list[Any]]:
    """Run `function(rank, *arguments)` of each case, in order, on `world_size` ranks; return name → the ranks' results.

    Raises AssertionError with the traceback and the name of the first case that fails: no case follows it, since its
    ranks may stand in different collectives.
    """
    ranks = run_world(_each, world_size, function, cases, timeout=timeout)
    return {name: [results[name] for results in ranks] for name in cases}


def _each(rank: int, function: Callable[..., Any], cases: Mapping[str, tuple]) -> dict[str, Any]:
    results = {}
    for name, arguments in cases.items():
        try:
            results[name] = function(rank, *arguments)
        except BaseException as error:
            error.add_note(f"case {name}")
            raise
    return results
