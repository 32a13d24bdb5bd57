"""The command `dtrain plan`: its arguments and its entry point. No torch until it runs."""

import argparse

from dtrain.base.hardware import BOARDS
from dtrain.commands.arguments import PROCESSES, add_recipe, at_least, positive


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser)
    parser.add_argument("--world-size", type=at_least(1), metavar="N", help=PROCESSES)
    parser.add_argument("--gpu", type=_plain, choices=BOARDS, default="h100", help="default: h100")
    parser.add_argument("--search", action="store_true", help="list the ten best meshes and micro-batches for N ranks")
    budgeted = "for tensors on a GPU (default: 92%% of its memory)"
    parser.add_argument("--memory", type=positive, metavar="GIB", help=budgeted)
    parser.add_argument("--step-time", type=positive, metavar="S", help="say the MFU that steps of S seconds mean")
    parser.add_argument("--gpus-per-node", type=at_least(1), metavar="N", help="default: 8")
    inside = "of a GPU to the others of its node, each way (default: the GPU's own link)"
    parser.add_argument("--link-inside", type=positive, metavar="GB/S", help=inside)
    between = "of a GPU's network card, each way (default: 50, a100: 25, cards on PCIe: 1.25)"
    parser.add_argument("--link-between", type=positive, metavar="GB/S", help=between)
    parser.add_argument("--json", action="store_true", help="print JSON, in bytes and seconds, and nothing else")


def _plain(gpu: str) -> str:
    return gpu.lower().removeprefix("rtx").lstrip(" -_")


def run(arguments: argparse.Namespace) -> None:
    from dtrain.commands.plan.report import answer

    answer(arguments)
