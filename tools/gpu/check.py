"""The parts in their order; what they tell goes to the terminal and to the text file as it comes."""

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from dtrain.base.errors import UserError
from tools.gpu.parts import PARTS, WRONG, Asked
from tools.gpu.ranks import Run

__all__ = ["Asked", "check"]

Part = Callable[[Asked, Run, Path], Iterator[str]]


def check(asked: Asked, run: Run, parts: Mapping[str, Part] = PARTS) -> int:
    """Carry `parts` out. The exit status: 1 where one found something wrong, or could not be carried out."""
    wrong = []
    with asked.out.open("w") as file, tempfile.TemporaryDirectory() as folder:

        def tell(line: str) -> None:
            print(line, flush=True)
            file.write(line + "\n")
            file.flush()

        for name, part in parts.items():
            began = time.monotonic()
            tell(f"== {name}")
            try:
                for line in part(asked, run, Path(folder)):
                    tell(line)
                    if line.startswith(WRONG):
                        wrong.append(f"{name}: {line}")
            except (RuntimeError, UserError, AssertionError, OSError, ValueError) as error:  # the other parts go on
                tell(f"{WRONG}  {error}")
                wrong.append(f"{name}: {(str(error).strip().splitlines() or ['?'])[-1]}")
            tell(f"   {time.monotonic() - began:.0f} s")
        tell("== " + (f"{len(wrong)} wrong:" if wrong else "nothing wrong"))
        for line in wrong:
            tell(f"   {line}")
    print(f"this is in {asked.out.resolve()}: paste it into an issue")
    return 1 if wrong else 0
