"""`python -m tools.gpu`: what tools/check_gpu starts."""

import argparse
import sys
from pathlib import Path

from tools.gpu.check import Asked, check
from tools.gpu.ranks import run


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="tools/check_gpu", description="What dtrain does on the GPUs of this machine."
    )
    parser.add_argument("--world", type=int, help="GPUs to use (default: all, at most 8)")
    parser.add_argument("--out", type=Path, default=Path("check_gpu.txt"), help="the text file to paste into an issue")
    parser.add_argument("--eager", action="store_true", help="leave out compiled runs")
    parser.add_argument("--small", action="store_true", help="tiny models: whether it runs, not how fast")
    asked = parser.parse_args()
    import torch

    found = torch.cuda.device_count()
    if found == 0:
        print("torch sees no CUDA device here", file=sys.stderr)
        return 1
    world = asked.world or min(found, 8)
    if world > found:
        print(f"--world {world}: there are {found} CUDA devices", file=sys.stderr)
        return 1
    return check(Asked(world, asked.out, compiled=not asked.eager, small=asked.small), run)


if __name__ == "__main__":
    sys.exit(main())
