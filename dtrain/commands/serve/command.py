"""The command `dtrain serve`: its arguments and its entry point. No torch until it runs."""

import argparse
from pathlib import Path

from dtrain.commands.arguments import DIRECTORY, add_device, add_family, at_least
from dtrain.commands.web import check_installed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `dtrain serve`."""
    parser.add_argument("directory", metavar="DIR", type=Path, help=DIRECTORY)
    host = "address to listen on; any but this machine's own needs --api-key-file (default: 127.0.0.1)"
    parser.add_argument("--host", default="127.0.0.1", help=host)
    port = "port to listen on; 0 chooses a free one (default: 8000)"
    parser.add_argument("--port", type=at_least(0), default=8000, help=port)
    parser.add_argument("--name", help="model name that clients use (default: DIR as you typed it)")
    parser.add_argument("--chat-template", metavar="FILE", help="chat template to use instead of the model's own")
    length = "maximum length of prompt and completion together, in tokens (default: the model's)"
    parser.add_argument("--max-length", type=at_least(1), metavar="N", help=length)
    rows = "maximum number of completions that are decoded in one batch"
    parser.add_argument("--max-rows", type=at_least(1), metavar="N", help=rows)
    tokens = "maximum number of tokens in the KV cache"
    parser.add_argument("--max-tokens", type=at_least(1), metavar="N", help=tokens)
    key = "file with the key that clients must send"
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help=key)
    control = "let clients with the key pause the server and update its weights, by broadcast or from files below DIR"
    parser.add_argument("--control", type=Path, metavar="DIR", help=control)
    adapter = "adapter of the model, in PEFT's format, that clients select by this name"
    parser.add_argument("--adapter", type=_parse_adapter, metavar="NAME=DIR", help=adapter)
    watch = "directory to watch: the newest complete step-N in it is loaded when it appears"
    parser.add_argument("--watch", type=Path, metavar="SHARED", help=watch)
    grace = "seconds to finish running requests when the server is asked to end (default: 30)"
    parser.add_argument("--grace", type=at_least(0), default=30, metavar="S", help=grace)
    access_log = "do not print a line for each request"
    parser.add_argument("--no-access-log", dest="access_log", action="store_false", help=access_log)
    add_device(parser)
    add_family(parser)


def _parse_adapter(text: str) -> tuple[str, Path]:
    name, _, directory = text.partition("=")
    if not name or not directory:
        raise argparse.ArgumentTypeError(f"{text} must be NAME=DIR")
    return name, Path(directory)


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    from dtrain.base.hub import find_model_directory
    from dtrain.commands.families import register_families

    check_installed("dtrain serve")
    find_model_directory(arguments.directory)  # a wrong name fails here, before torch is imported
    register_families(arguments.directory, arguments.family)
    from dtrain.commands.serve.start import serve_directory

    serve_directory(arguments, lambda line: print(line, flush=True))
    return 0
