"""What `dtrain plan` says of a run that is under way, worked out beside it by a process of low priority."""

import json
import subprocess
import sys
from pathlib import Path

_QUIETLY = "import os, runpy; os.nice(19); runpy.run_module('dtrain', run_name='__main__')"


class PlannedPeak:
    """The peak of a rank's tensors by the plan of the recipe in `config`, a file; a context that ends the process.

    A plan needs a process of its own: torch.distributed must not be up there. It takes seconds of one core, and the run
    does not wait for it. No collective; one rank asks.
    """

    def __init__(self, config: Path, world_size: int, device_type: str):
        words = ["plan", str(config), f"launch.device={device_type}", "--world-size", str(world_size), "--json"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _QUIETLY, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def __enter__(self) -> "PlannedPeak":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def gib(self, wait: float = 0.0) -> float | None:
        """The peak in GiB; None where it is not known within `wait` seconds, or the recipe cannot be planned."""
        try:
            text, _ = self._process.communicate(timeout=wait)
            return json.loads(text)["memory"]["peak"] / 2**30
        except (subprocess.TimeoutExpired, ValueError, KeyError):
            return None
