"""The command `dtrain eval`: its arguments and its entry point. No torch until it runs."""

import argparse
import json
from pathlib import Path
from typing import Any

from dtrain.base.errors import UserError
from dtrain.commands.arguments import DIRECTORY, add_device, add_sampling, at_least


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", type=Path, help=DIRECTORY)
    prompts = "JSON lines (or CSV, parquet) of prompts, as GRPO's data"
    parser.add_argument("data", metavar="DATA", nargs="+", help=prompts)
    usual = "default: math_exact, or text_exact where most answers hold no number"
    judged = f"a reward's name or import path, options as JSON after =; may be repeated ({usual})"
    parser.add_argument("--reward", action="append", metavar="FN[={...}]", help=judged)
    repeated = "answers to each prompt (default: 1)"
    parser.add_argument("--samples", type=at_least(1), default=1, metavar="N", help=repeated)
    parser.add_argument("--limit", type=at_least(1), metavar="N", help="the first N prompts only")
    parser.add_argument("--system", metavar="TEXT", help="the system message of conversations that have none")
    parser.add_argument("--chat-template", metavar="FILE", help="a chat template in place of the model's own")
    variables = "variables for the chat template as JSON, as data.template_kwargs"
    parser.add_argument("--template-kwargs", type=json_object, default={}, metavar="{...}", help=variables)
    plain = "how a prompt that is a plain string is read (default: as the run's data was, else user)"
    parser.add_argument("--prompts-as", choices=("user", "text"), help=plain)
    longest = "default: 512, or half of the model's positions where that is less"
    parser.add_argument("--max-new-tokens", type=at_least(1), metavar="N", help=longest)
    add_sampling(parser)
    unlikely = "draw from those P times as likely as the first"
    parser.add_argument("--min-p", type=float, default=0.0, metavar="P", help=unlikely)
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="a text that ends an answer")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    passing = "the reward from which an answer passes, for pass@k (default: 1)"
    parser.add_argument("--pass-reward", type=float, default=1.0, metavar="R", help=passing)
    timed = "seconds that a reward may take over 512 answers (default: 60)"
    parser.add_argument("--reward-timeout", type=float, default=60.0, metavar="S", help=timed)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write each answer with its rewards as a JSON line")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object, and nothing else")
    parser.add_argument("--max-rows", type=at_least(1), metavar="N", help="answers decoded together")
    add_device(parser)


def json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError
    return value


def run(arguments: argparse.Namespace) -> None:
    from dtrain.commands.eval.evaluate import as_json, as_table, evaluate, with_options

    try:
        report = evaluate(arguments)
    except UserError as error:
        raise UserError(with_options(str(error))) from error
    print(as_json(report) if arguments.json else as_table(report))
