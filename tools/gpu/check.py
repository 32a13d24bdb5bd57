"""The parts in their order; what they tell goes to the terminal and to the text file as it comes."""

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from dtrain.base.errors import UserError
from tools.gpu.decoding import decoding
from tools.gpu.features import features, grpo, same_bits, streaming
from tools.gpu.layers import layers, memory, trace
from tools.gpu.parity import compiled, half, parity, proof, versions
from tools.gpu.ranks import Run
from tools.gpu.rates import links, rates
from tools.gpu.runs import WRONG, Options
from tools.gpu.stops import hang

Part = Callable[[Options, Run, Path], Iterator[str]]

PARTS: dict[str, Part] = {
    "devices and versions": versions,
    "variable-length attention": proof,
    "float64 against the CPU": parity,
    "half precision against the CPU": half,
    "the same bits": same_bits,
    "a hang": hang,
    "adapters, offload, export": features,
    "GRPO": grpo,
    "weights to another process": streaming,
    "memory": memory,
    "rates": rates,
    "links": links,
    "graph decode against eager": decoding,
    "layers of 8B": layers,
    "a step's trace": trace,
    "compiled against eager": compiled,
}


def check(options: Options, run: Run, parts: Mapping[str, Part] = PARTS) -> int:
    """Carry `parts` out. The exit status: 1 where one found something wrong, or could not be carried out."""
    wrong = []
    with options.out.open("w") as file, tempfile.TemporaryDirectory() as folder:

        def tell(line: str) -> None:
            print(line, flush=True)
            file.write(line + "\n")
            file.flush()

        for name, part in parts.items():
            began = time.monotonic()
            tell(f"== {name}")
            try:
                for line in part(options, run, Path(folder)):
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
    print(f"this is in {options.out.resolve()}: paste it into an issue")
    return 1 if wrong else 0
