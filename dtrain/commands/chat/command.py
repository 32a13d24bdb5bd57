"""The command `dtrain chat`: its arguments and its entry point. No torch until it runs."""

import argparse
from pathlib import Path

from dtrain.commands.arguments import DIRECTORY, add_device, add_sampling, at_least


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", type=Path, help=DIRECTORY)
    beside = "an adapter of DIR's model, in PEFT's layout; /adapter off and on compare"
    parser.add_argument("--adapter", type=Path, metavar="DIR", help=beside)
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument("--chat-template", metavar="FILE", help="a chat template in place of the model's own")
    thought = "whether the model thinks first, where its chat template asks (default: as the template has it)"
    parser.add_argument("--thinking", choices=("on", "off"), help=thought)
    longest = "tokens of an answer (default: 4096, or what the model's context leaves)"
    parser.add_argument("--max-new-tokens", type=at_least(1), default=4096, metavar="N", help=longest)
    add_sampling(parser, temperature=0.7)
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    add_device(parser)


def run(arguments: argparse.Namespace) -> None:
    from dtrain.base.hub import find_model_directory

    find_model_directory(arguments.directory)  # before torch is loaded, which takes long
    from dtrain.commands.chat.terminal import talk

    talk(arguments)
