"""The command `dtrain chat`: its arguments and its entry point. No torch until it runs."""

import argparse
from pathlib import Path

from dtrain.commands.arguments import DIRECTORY, add_device, add_family, add_sampling, at_least


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `dtrain chat`."""
    parser.add_argument("directory", metavar="DIR", type=Path, help=DIRECTORY)
    adapter = "adapter of the model, in PEFT's format; /adapter on and off switch it during the chat"
    parser.add_argument("--adapter", type=Path, metavar="DIR", help=adapter)
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--chat-template", metavar="FILE", help="chat template to use instead of the model's own")
    thinking = "whether the model thinks before it answers, if its chat template has a switch (default: the template's)"
    parser.add_argument("--thinking", choices=("on", "off"), help=thinking)
    longest = "maximum length of an answer (default: 4096, or what is left of the model's context)"
    parser.add_argument("--max-new-tokens", type=at_least(1), default=4096, metavar="N", help=longest)
    add_sampling(parser, temperature=0.7)
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling (default: 0)")
    add_device(parser)
    add_family(parser)


def run(arguments: argparse.Namespace) -> None:
    """Start the chat."""
    from dtrain.base.hub import find_model_directory
    from dtrain.commands.families import register_families

    find_model_directory(arguments.directory)  # a wrong name fails here, before torch is imported
    register_families(arguments.directory, arguments.family)
    from dtrain.commands.chat.terminal import chat

    chat(arguments)
