"""The command `dtrain eval`: its arguments and its entry point. No torch until it runs."""

import argparse
import json
from pathlib import Path
from typing import Any

from dtrain.base.errors import UserError
from dtrain.commands.arguments import DIRECTORY, add_device, add_family, add_sampling, at_least


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `dtrain eval`."""
    parser.add_argument("directory", metavar="DIR", type=Path, help=DIRECTORY)
    data = "JSON lines, CSV or parquet files of prompts, in the format of GRPO's data"
    parser.add_argument("data", metavar="DATA", nargs="+", help=data)
    formats = "format of the rows, or the import path of a function that converts them (default: auto, by the columns)"
    parser.add_argument("--format", default="auto", metavar="NAME", help=formats)
    usual = "default: math_exact, or text_exact if most reference answers contain no number"
    reward = f"name or import path of a reward, with its options as JSON after =; may be repeated ({usual})"
    parser.add_argument("--reward", action="append", metavar="FN[={...}]", help=reward)
    samples = "number of answers to each prompt (default: 1)"
    parser.add_argument("--samples", type=at_least(1), default=1, metavar="N", help=samples)
    parser.add_argument("--limit", type=at_least(1), metavar="N", help="use only the first N prompts")
    parser.add_argument("--system", metavar="TEXT", help="system message for conversations that have none")
    parser.add_argument("--chat-template", metavar="FILE", help="chat template to use instead of the model's own")
    variables = "variables of the chat template as JSON, as in data.template_kwargs"
    parser.add_argument("--template-kwargs", type=json_object, default={}, metavar="{...}", help=variables)
    prompts_as = "how to read a prompt that is a plain string (default: as in the run's training data, else user)"
    parser.add_argument("--prompts-as", choices=("user", "text"), help=prompts_as)
    longest = "maximum length of an answer (default: 512, or half of the model's context if that is less)"
    parser.add_argument("--max-new-tokens", type=at_least(1), metavar="N", help=longest)
    add_sampling(parser)
    min_p = "sample only tokens at least P times as likely as the most likely one (default: 0.0)"
    parser.add_argument("--min-p", type=float, default=0.0, metavar="P", help=min_p)
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="text that ends an answer")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling (default: 0)")
    pass_reward = "smallest reward of an answer that counts as correct in pass@k (default: 1)"
    parser.add_argument("--pass-reward", type=float, default=1.0, metavar="R", help=pass_reward)
    timeout = "maximum time in seconds that a reward may take for 512 answers (default: 60)"
    parser.add_argument("--reward-timeout", type=float, default=60.0, metavar="S", help=timeout)
    out = "write each answer with its rewards to this file, as JSON lines"
    parser.add_argument("--out", type=Path, metavar="FILE", help=out)
    parser.add_argument("--json", action="store_true", help="print only the result, as one JSON object")
    rows = "maximum number of answers that are decoded in one batch"
    parser.add_argument("--max-rows", type=at_least(1), metavar="N", help=rows)
    add_device(parser)
    add_family(parser)


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object. Raises ValueError for anything else.

    Example:
        >>> json_object('{"enable_thinking": false}')
        {'enable_thinking': False}
    """
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError
    return value


def run(arguments: argparse.Namespace) -> None:
    """Run the command and print its report."""
    from dtrain.commands.eval.evaluate import as_json, as_table, evaluate, with_options
    from dtrain.commands.families import register_families

    register_families(arguments.directory, arguments.family)
    try:
        report = evaluate(arguments)
    except UserError as error:
        raise UserError(with_options(str(error))) from error
    print(as_json(report) if arguments.json else as_table(report))
