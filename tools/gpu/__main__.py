"""`python -m tools.gpu`: what tools/check_gpu starts."""

import argparse
import sys
from pathlib import Path

from tools.gpu.check import check
from tools.gpu.ranks import Ranks
from tools.gpu.runs import Options


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="tools/check_gpu", description="What dtrain does on the GPUs of this machine."
    )
    parser.add_argument("--world", type=int, help="GPUs to use (default: all, at most 8)")
    parser.add_argument("--out", type=Path, default=Path("check_gpu.txt"), help="the text file to paste into an issue")
    parser.add_argument("--eager", action="store_true", help="leave out compiled runs")
    parser.add_argument("--small", action="store_true", help="tiny models: whether it runs, not how fast")
    arguments = parser.parse_args()
    import torch

    count = torch.cuda.device_count()
    if count == 0:
        print("torch sees no CUDA device here", file=sys.stderr)
        return 1
    world = arguments.world or min(count, 8)
    if world > count:
        print(f"--world {world}: there are {count} CUDA devices", file=sys.stderr)
        return 1
    ranks = Ranks()
    try:
        options = Options(world, arguments.out, compiled=not arguments.eager, small=arguments.small)
        return check(options, ranks)
    finally:
        ranks.close()


if __name__ == "__main__":
    sys.exit(main())
