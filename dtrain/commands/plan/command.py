"""The command `dtrain plan`: its arguments and its entry point. No torch until it runs."""

import argparse

from dtrain.base.hardware import BOARDS
from dtrain.commands.arguments import PROCESSES, add_recipe, at_least, positive


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `dtrain plan`."""
    add_recipe(parser)
    parser.add_argument("--world-size", type=at_least(1), metavar="N", help=PROCESSES)
    parser.add_argument("--gpu", type=_gpu_key, choices=BOARDS, default="h100", help="GPU model (default: h100)")
    search = "list the ten fastest combinations of mesh and micro-batch for N processes"
    parser.add_argument("--search", action="store_true", help=search)
    memory = "memory for tensors on each GPU (default: 92%% of the GPU's memory)"
    parser.add_argument("--memory", type=positive, metavar="GIB", help=memory)
    step_time = "also print the MFU of a step that takes S seconds"
    parser.add_argument("--step-time", type=positive, metavar="S", help=step_time)
    parser.add_argument("--gpus-per-node", type=at_least(1), metavar="N", help="number of GPUs in a node (default: 8)")
    inside = "bandwidth from a GPU to the others of its node, each way (default: that of the GPU's link)"
    parser.add_argument("--link-inside", type=positive, metavar="GB/S", help=inside)
    between = "bandwidth of a GPU's network card, each way (default: 50, a100: 25, cards on PCIe: 1.25)"
    parser.add_argument("--link-between", type=positive, metavar="GB/S", help=between)
    parser.add_argument("--json", action="store_true", help="print only JSON, in bytes and seconds")


def _gpu_key(gpu: str) -> str:
    """Return the key of a GPU in the table: "RTX 4090" and "4090" are the same."""
    return gpu.lower().removeprefix("rtx").lstrip(" -_")


def run(arguments: argparse.Namespace) -> None:
    """Print the plan."""
    from dtrain.training.preflight import load

    recipe = load(arguments.recipe, arguments.overrides)  # a wrong key fails here, before torch is imported
    from dtrain.commands.plan.report import print_plan

    print_plan(arguments, recipe)
