"""The `dtrain` command: parses what was typed, calls the room that does it, and turns errors into an exit status.

Imports no torch; the commands that need it do. Exit status: 0 done, 1 an error (told on stderr), 2 wrong usage,
130, 143 and 138 ended in order by Ctrl-C, SIGTERM and SIGUSR1 (a pre-emption).
"""

import argparse
import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from dtrain import __version__
from dtrain.errors import RecipeError, Stopped, UserError

RECIPE = "a recipe's file, or the name of a shipped one (`dtrain ls`)"
OVERRIDES = "what to change in it, such as optimizer.lr=1e-5 or data.train.path=[a.jsonl,b.jsonl]"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: this process's) and return its exit status."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    if rest:
        _refuse(parser, rest)
    try:
        status = arguments.command(arguments)
        sys.stdout.flush()
        return status or 0
    except UserError as error:
        print(f"dtrain: {error}", file=sys.stderr)
        return 1
    except Stopped as error:
        print(f"dtrain: {error}", file=sys.stderr)
        return 128 + error.signum
    except KeyboardInterrupt:
        print("dtrain: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader of our output, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def command() -> None:
    """`main` as a program. Where torch was loaded the process ends without the interpreter's teardown: a process
    group's thread that is still alive then aborts, now and then, a run that is done."""
    status = main()
    if "torch" in sys.modules:
        with suppress(BrokenPipeError):
            sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dtrain", description="Fine-tune open-weight language models, on any mesh.")
    parser.add_argument("--version", action="version", version=f"dtrain {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def add(name: str, command, text: str, recipe: bool = False) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        sub.set_defaults(command=command)
        if recipe:
            sub.add_argument("recipe", metavar="RECIPE", help=RECIPE)
            sub.add_argument("overrides", metavar="key=value", nargs="*", help=OVERRIDES)
        return sub

    add("run", _run, "train what a recipe says", recipe=True)
    validate = add("validate", _validate, "show every error of a recipe at once, and start nothing", recipe=True)
    processes = "processes in all (default: launch.nproc)"
    validate.add_argument("--world-size", type=_at_least(1), metavar="N", help=processes)
    preview = add("preview", _preview, "show rows as the model sees them, lengths, packing, tokens", recipe=True)
    printed = "how many samples to print (default: 3)"
    preview.add_argument("--samples", type=_at_least(0), default=3, metavar="N", help=printed)
    add("ls", _ls, "list the recipes that ship with dtrain")
    copy = add("cp", _cp, "copy a shipped recipe, to edit it")
    copy.add_argument("recipe", metavar="RECIPE", help=RECIPE)
    copy.add_argument("target", metavar="TARGET", type=Path, help="a file that is not there yet, or a directory")
    add("cat", _cat, "print a recipe").add_argument("recipe", metavar="RECIPE", help=RECIPE)
    export = add("export", _export, "write a Hugging Face directory from a run or one of its checkpoints")
    export.add_argument("source", metavar="RUN_OR_CHECKPOINT", type=Path, help="runs/x, or runs/x/checkpoints/step-N")
    export.add_argument("out", metavar="OUT", type=Path, help="the directory to write")
    export.add_argument("--dtype", help="bfloat16, float16, float32 or float64 (default: as saved)")
    download = add("download", _download, "fetch a model from the Hugging Face hub into its cache on this machine")
    download.add_argument("model", metavar="OWNER/NAME", help="such as Qwen/Qwen3-0.6B; model.path takes it as it is")
    generate = add("generate", _generate, "complete prompts with a model")
    generate.add_argument("directory", metavar="DIR", type=Path, help="a model's directory, or a run's")
    generate.add_argument("--prompt", action="append", required=True, help="what the user says; may be repeated")
    generate.add_argument("--raw", action="store_true", help="continue the prompt as it is, without the chat template")
    generate.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="default: 256")
    generate.add_argument("--temperature", type=float, default=0.0, help="0, the default, takes the likeliest token")
    generate.add_argument("--top-k", type=int, metavar="K", help="draw from the K likeliest tokens only")
    generate.add_argument("--top-p", type=float, default=1.0, metavar="P", help="draw from the likeliest of this sum")
    generate.add_argument("--seed", type=int, default=0, help="default: 0")
    generate.add_argument("--dtype", default="auto", help="auto, bfloat16, float16, float32 or float64")
    generate.add_argument("--device", default="auto", help="auto, cpu or cuda")
    add("env", _env, "print versions and devices, for bug reports")
    return parser


def _at_least(least: int) -> Callable[[str], int]:
    """An argument's type: a whole number from `least` on. argparse tells of others."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text} is no whole number of at least {least}")
        return int(text)

    return read


def _refuse(parser: argparse.ArgumentParser, rest: list[str]) -> None:
    dashed = next((word for word in rest if word.startswith("--") and "=" in word), None)
    hint = f": keys of a recipe are written without dashes, {dashed.lstrip('-')}" if dashed else ""
    parser.error(f"unknown arguments: {' '.join(rest)}{hint}")


def _run(arguments: argparse.Namespace) -> int:
    from dtrain.agent import WorkerFailed
    from dtrain.launch import launch
    from dtrain.preflight import load

    try:
        launch(load(arguments.recipe, arguments.overrides))
    except WorkerFailed as error:
        print(f"dtrain: {error}", file=sys.stderr)
        return 1
    return 0


def _validate(arguments: argparse.Namespace) -> int:
    from dtrain import config
    from dtrain.preflight import load, preflight

    recipe = load(arguments.recipe, arguments.overrides)
    world_size = recipe.launch.nproc if arguments.world_size is None else arguments.world_size
    problems = preflight(recipe, world_size)
    if problems:
        raise RecipeError(problems)
    print(f"ok: {recipe.run.name}, {recipe.method} on {world_size} process{'es' * (world_size != 1)}")
    print(config.sizes(recipe, world_size))
    return 0


def _preview(arguments: argparse.Namespace) -> int:
    from dtrain.data.preview import preview
    from dtrain.preflight import load

    recipe = load(arguments.recipe, arguments.overrides)
    preview(recipe, samples=arguments.samples, color=sys.stdout.isatty())
    return 0


def _ls(arguments: argparse.Namespace) -> int:
    from dtrain import config

    shipped = config.shipped()
    width = max((len(name) for name, _ in shipped), default=0)
    for name, text in shipped:
        print(f"{name:<{width}}  {text}")
    return 0


def _cp(arguments: argparse.Namespace) -> int:
    from dtrain import config

    source = config.find(arguments.recipe)
    target = arguments.target / source.name if arguments.target.is_dir() else arguments.target
    try:
        with source.open("rb") as whence, target.open("xb") as whither:
            shutil.copyfileobj(whence, whither)
    except FileExistsError:
        raise UserError(f"{target} is there already; choose another name") from None
    except OSError as error:
        raise UserError(f"{error.filename}: {error.strerror}") from error
    return 0


def _cat(arguments: argparse.Namespace) -> int:
    from dtrain import config

    text = config.find(arguments.recipe).read_bytes()
    sys.stdout.write(text.decode("utf-8", errors="replace"))
    return 0


def _export(arguments: argparse.Namespace) -> int:
    from dtrain.checkpoint.export import export

    said = export(arguments.source, arguments.out, arguments.dtype)
    print(f"wrote {arguments.out} from {said}")
    return 0


def _download(arguments: argparse.Namespace) -> int:
    from dtrain.checkpoint import hub

    if not hub.is_id(arguments.model):
        raise UserError(f"{arguments.model} is no model's id on the hub (owner/name), or a directory has that name")
    print(hub.download(arguments.model))
    return 0


def _generate(arguments: argparse.Namespace) -> int:
    from dtrain.rollout.generate import generate_text

    texts = generate_text(
        arguments.directory,
        arguments.prompt,
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        seed=arguments.seed,
        raw=arguments.raw,
        dtype=arguments.dtype,
        device=arguments.device,
    )
    for text in texts:
        print(text, flush=True)
    return 0


def _env(arguments: argparse.Namespace) -> int:
    from dtrain.environment import describe

    print(describe())
    return 0
