"""dtrain: fine-tune open-weight language models; one recipe, any mesh, the same numbers.

`import dtrain` loads no torch: what needs it is loaded when it is first asked for.
"""

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path

__version__ = "0.1.0"

_ROOMS = ("attention", "checkpoint", "config", "data", "losses", "models", "parallel", "policy", "rollout")


def run(recipe: str | Path | Mapping, overrides: Sequence[str] = ()) -> None:
    """Train: what `dtrain run RECIPE key=value ...` does.

    `recipe` is a path, the name of a shipped recipe, or a mapping. Returns when the run is done. Raises
    `dtrain.errors.UserError` for what its user can mend, `Stopped` when a signal ended the run in order, and
    `WorkerFailed`, with the traceback as text, when a process died of anything else.
    """
    from dtrain import launch, preflight

    launch.launch(preflight.load(recipe, overrides))


def __getattr__(name: str):
    if name in _ROOMS:
        return importlib.import_module(f"dtrain.{name}")
    raise AttributeError(f"module 'dtrain' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *_ROOMS]
