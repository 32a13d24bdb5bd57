"""The command `dtrain serve`: its arguments and its entry point. No torch until it runs."""

import argparse
from pathlib import Path

from dtrain.commands.arguments import DIRECTORY, add_device, at_least
from dtrain.commands.web import check_installed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", type=Path, help=DIRECTORY)
    parser.add_argument("--host", default="127.0.0.1", help="where to listen, with a key (default: this machine only)")
    parser.add_argument("--port", type=at_least(0), default=8000, help="default: 8000; 0 takes a free one")
    parser.add_argument("--name", help="what clients call the model (default: DIR as it is typed)")
    parser.add_argument("--chat-template", metavar="FILE", help="a chat template in place of the model's own")
    parser.add_argument("--max-length", type=at_least(1), metavar="N", help="tokens of prompt and completion together")
    parser.add_argument("--max-rows", type=at_least(1), metavar="N", help="completions decoded together")
    parser.add_argument("--max-tokens", type=at_least(1), metavar="N", help="positions of keys and values in memory")
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help="a file with the key that clients must send")
    controlled = "let clients with the key pause the server and give it weights, by broadcast or from below DIR"
    parser.add_argument("--control", type=Path, metavar="DIR", help=controlled)
    beside = "an adapter of DIR's model, in PEFT's layout, which clients ask for by this name"
    parser.add_argument("--adapter", type=_named, metavar="NAME=DIR", help=beside)
    watched = "a directory whose newest whole step-N is read as it appears"
    parser.add_argument("--watch", type=Path, metavar="SHARED", help=watched)
    graced = "seconds to finish what is under way when asked to end (default: 30)"
    parser.add_argument("--grace", type=at_least(0), default=30, metavar="S", help=graced)
    logged = "do not print a line for each request"
    parser.add_argument("--no-access-log", dest="access_log", action="store_false", help=logged)
    add_device(parser)


def _named(text: str) -> tuple[str, Path]:
    name, _, directory = text.partition("=")
    if not name or not directory:
        raise argparse.ArgumentTypeError(f"{text} must be NAME=DIR")
    return name, Path(directory)


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    from dtrain.base.hub import find_model_directory

    check_installed("dtrain serve")
    find_model_directory(arguments.directory)  # before torch is loaded, which takes long
    from dtrain.commands.serve.start import serve_directory

    serve_directory(arguments, lambda line: print(line, flush=True))
    return 0
