"""The `dtrain` command: parses the command line, calls the command's module, and turns errors into an exit status.

Imports no torch; the commands that need it do. Exit status: 0 done, 1 an error (written to stderr), 2 wrong usage,
130, 143 and 138 ended in order by Ctrl-C, SIGTERM and SIGUSR1 (a pre-emption).
"""

import argparse
import importlib
import io
import os
import re
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from dtrain import __version__
from dtrain.base.errors import Stopped, UserError
from dtrain.base.json_files import split_lines
from dtrain.base.processes import exit_without_saving, stop_signals_handled_by
from dtrain.commands.arguments import (
    DIRECTORY,
    PROCESSES,
    RECIPE,
    add_device,
    add_recipe,
    add_sampling,
    at_least,
    keep_carriage_returns,
)

COMMANDS = {
    "plan": ("dtrain.commands.plan.command", "show what each rank would hold and send: no GPU and no weights needed"),
    "eval": ("dtrain.commands.eval.command", "answer the prompts of data files and judge the answers"),
    "chat": ("dtrain.commands.chat.command", "talk with a model in the terminal"),
    "report": ("dtrain.commands.report.command", "show runs as one page: curves, answers, groups, what differs"),
    "compare": ("dtrain.commands.report.compare", "show runs side by side in the terminal"),
    "push": ("dtrain.commands.push.command", "send a run's export to the Hugging Face hub, with a model card"),
    "serve": ("dtrain.commands.serve.command", "answer completions over HTTP, as OpenAI's API has them"),
    "env": ("dtrain.commands.env", "print versions and devices, for bug reports"),
}
"""Command -> the module that has its `add_arguments` and `run`, loaded when it is called, and its help."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: this process's) and return its exit status."""
    parser = _parser()
    typed = sys.argv[1:] if argv is None else list(argv)
    _check_command(parser, typed)
    arguments, rest = parser.parse_known_args(typed)
    if hasattr(arguments, "overrides"):  # argparse takes those before the first option only
        arguments.overrides += [word for word in rest if not word.startswith("-")]
        rest = [word for word in rest if word.startswith("-")]
    _check_options(parser.commands[typed[0]], typed[1:], rest)
    try:
        arguments.command(arguments)
        sys.stdout.flush()
        return 0
    except (UserError, Stopped) as error:
        print(f"dtrain: {error}", file=sys.stderr)
        return 128 + error.signum if isinstance(error, Stopped) else 1
    except KeyboardInterrupt as error:  # with the number of a second signal, of whatever kind
        print("dtrain: interrupted", file=sys.stderr)
        return 128 + (error.args[0] if error.args else signal.SIGINT)
    except BrokenPipeError:  # the reader of our output, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def command() -> None:
    """Run `main` as a program. If torch was loaded, the process ends without the interpreter's teardown: a process
    group's thread that is still alive then aborts, now and then, a run that is done.

    A terminal or a pipe may have an encoding that lacks some characters (ASCII under LC_ALL=C, Latin-1, GBK). Those are
    written as escapes such as \\u2605.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a closed stream is None
            stream.reconfigure(errors="backslashreplace")
    status = main()
    if "torch" in sys.modules:
        with suppress(BrokenPipeError):
            sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


class _Command(argparse.ArgumentParser):
    """The parser of a command.

    module_name: of the module that adds its arguments; None once it has. commands: the parsers below this one.
    """

    module_name: str | None = None
    commands: Mapping[str, argparse.ArgumentParser]

    def parse_known_args(self, args=None, namespace=None):
        if self.module_name is not None:
            module, self.module_name = importlib.import_module(self.module_name), None
            module.add_arguments(self)
            self.set_defaults(command=module.run)
        return super().parse_known_args(args, namespace)


def _parser() -> _Command:
    parser = _Command(prog="dtrain", description="Fine-tune open-weight language models, on any mesh.")
    parser.add_argument("--version", action="version", version=f"dtrain {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=_Command)

    def add(name: str, command, text: str, recipe: bool = False) -> _Command:
        sub = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        sub.set_defaults(command=command)
        if recipe:
            add_recipe(sub)
        return sub

    add("run", _run, "train what a recipe says", recipe=True)
    validate = add("validate", _validate, "show every error of a recipe at once, and start nothing", recipe=True)
    validate.add_argument("--world-size", type=at_least(1), metavar="N", help=PROCESSES)
    preview = add("preview", _preview, "show rows as the model sees them, lengths, packing, tokens", recipe=True)
    printed = "how many samples to print (default: 3)"
    preview.add_argument("--samples", type=at_least(0), default=3, metavar="N", help=printed)
    add("ls", _ls, "list the recipes that ship with dtrain")
    copy = add("cp", _cp, "copy a shipped recipe, to edit it")
    copy.add_argument("recipe", metavar="RECIPE", help=RECIPE)
    copy.add_argument("target", metavar="TARGET", type=Path, help="a file that is not there yet, or a directory")
    add("cat", _cat, "print a recipe").add_argument("recipe", metavar="RECIPE", help=RECIPE)
    export = add("export", _export, "write what others read from a run, a checkpoint or an adapter")
    sources = "runs/x, runs/x/checkpoints/step-N, or an adapter's or a model's directory"
    export.add_argument("source", metavar="RUN_OR_CHECKPOINT", type=Path, help=sources)
    export.add_argument("out", metavar="OUT", type=Path, help="the directory to write, or OUT.gguf for llama.cpp")
    export.add_argument("--dtype", help="bfloat16, float16, float32 or float64 (default: as saved)")
    export.add_argument("--type", help="of OUT.gguf: f16, bf16, f32 or q8_0 (default: f16)")
    forms = export.add_mutually_exclusive_group()
    merged = "a whole model, an adapter merged into it (the default)"
    forms.add_argument("--merged", dest="form", action="store_const", const="merged", help=merged)
    alone = "an adapter alone, as PEFT writes it, with the tokenizer's files"
    forms.add_argument("--adapter", dest="form", action="store_const", const="adapter", help=alone)
    folded = "an adapter alone, its scale multiplied into B, for readers of plain LoRA (llama.cpp, vLLM)"
    forms.add_argument("--folded", dest="form", action="store_const", const="folded", help=folded)
    original = "merge into the base's files as they are, and not as the run held them (nf4, a lower precision)"
    export.add_argument("--original-base", action="store_true", help=original)
    fetched = "fetch a model, or a dataset, from the Hugging Face hub into its cache on this machine"
    download = add("download", _download, fetched)
    named = "such as Qwen/Qwen3-0.6B; model.path, or data.train.path, takes it as it is"
    download.add_argument("name", metavar="OWNER/NAME", help=named)
    download.add_argument("--data", action="store_true", help="a dataset; prints the files of the split")
    download.add_argument("--split", default="train", help="of a dataset (default: train)")
    download.add_argument("--subset", help="of a dataset (default: its own)")
    download.add_argument("--revision", help="of a dataset: a branch, a tag or a commit (default: main)")
    generate = add("generate", _generate, "complete prompts with a model")
    generate.add_argument("directory", metavar="DIR", type=Path, help=DIRECTORY)
    spoken = r"what the user says; may be repeated (default: each line of standard input; line breaks come out as \n)"
    generate.add_argument("--prompt", action="append", help=spoken)
    shown = "a file with an image, in front of what the user says; may be repeated"
    generate.add_argument("--image", action="append", default=[], metavar="PATH", type=Path, help=shown)
    generate.add_argument("--raw", action="store_true", help="continue the prompt as it is, without the chat template")
    generate.add_argument("--max-new-tokens", type=at_least(1), default=256, metavar="N", help="default: 256")
    add_sampling(generate)
    generate.add_argument("--seed", type=int, default=0, help="default: 0")
    add_device(generate)
    for name, (module_name, text) in COMMANDS.items():
        add(name, None, text).module_name = module_name
    parser.commands = commands.choices
    return parser


def _check_command(parser: _Command, typed: list[str]) -> None:
    """Exit with status 2 for no command, or one that dtrain does not have."""
    if not typed:
        parser.print_help(sys.stderr)
        sys.exit(2)
    if typed[0].startswith("-") and typed[0] not in ("-h", "--help", "--version"):
        parser.error(f"{typed[0]}: a command comes first, such as `dtrain run RECIPE key=value`; --help lists them")
    if not typed[0].startswith("-") and typed[0] not in parser.commands:
        from dtrain.commands.suggestions import no_command

        parser.error(no_command(typed, parser.commands))


def _check_options(command: argparse.ArgumentParser, typed: list[str], rest: list[str]) -> None:
    """Exit with status 2 for an unknown option, or for `key=value` after a command that takes options only."""
    takes_keys = any(action.dest == "overrides" for action in command._actions)
    if rest or (not takes_keys and any("=" in word for word in typed)):
        from dtrain.commands.suggestions import unknown_words

        if problems := unknown_words(command, takes_keys, typed, rest):
            command.error("\n  ".join(problems))


def _run(arguments: argparse.Namespace) -> None:
    with stop_signals_handled_by(exit_without_saving):  # until the run handles signals itself
        from dtrain.commands.run import start_background_plan
        from dtrain.launch import launch
        from dtrain.launch.exits import WorkerFailed
        from dtrain.training import preflight

        try:
            launch(lambda: preflight.load(arguments.recipe, arguments.overrides), plan=start_background_plan)
        except WorkerFailed as error:
            raise UserError(str(error)) from error


def _validate(arguments: argparse.Namespace) -> None:
    from dtrain.launch import validate

    print("\n".join(validate(arguments.recipe, arguments.overrides, arguments.world_size)))


def _preview(arguments: argparse.Namespace) -> None:
    from dtrain import recipe as config
    from dtrain.commands.preview import preview
    from dtrain.training.preflight import load

    recipe = load(arguments.recipe, arguments.overrides)
    with config.redacted_errors(recipe):
        preview(recipe, arguments.samples, hide=lambda text: config.redact(text, recipe))


def _ls(arguments: argparse.Namespace) -> None:
    from dtrain.recipe import list_shipped_recipes
    from dtrain.training import METHODS

    recipes = list_shipped_recipes([*METHODS])
    width = max((len(name) for name, _ in recipes), default=0)
    for name, text in recipes:
        print(f"{name:<{width}}  {text}")


def _cp(arguments: argparse.Namespace) -> None:
    from dtrain import recipe as config

    source = config.find_recipe(arguments.recipe)
    target = arguments.target / source.name if arguments.target.is_dir() else arguments.target
    try:
        with source.open("rb") as whence, target.open("xb") as whither:
            shutil.copyfileobj(whence, whither)
    except FileExistsError:
        raise UserError(f"{target} is there already; choose another name") from None
    except OSError as error:
        raise UserError(f"{error.filename}: {error.strerror}") from error


def _cat(arguments: argparse.Namespace) -> None:
    from dtrain import recipe as config

    sys.stdout.write(config.find_recipe(arguments.recipe).read_bytes().decode("utf-8", errors="replace"))


def _export(arguments: argparse.Namespace) -> None:
    source, out, kind = arguments.source, arguments.out, arguments.type
    form, original_base = arguments.form, arguments.original_base
    if out.suffix == ".gguf":
        if arguments.dtype is not None:
            raise UserError("--dtype is for directories: the type of a GGUF file is --type f16, bf16, f32 or q8_0")
        from dtrain.checkpoint.gguf.export import export_gguf

        origin = export_gguf(source, out, kind or "f16", form, original_base)
    else:
        if kind is not None:
            raise UserError("--type is for GGUF files: let OUT end with .gguf, or give a directory's --dtype")
        from dtrain.checkpoint.huggingface.export import export

        origin = export(source, out, arguments.dtype, form, original_base)
    print(f"wrote {out} from {origin}")


def _download(arguments: argparse.Namespace) -> None:
    from dtrain.base import hub

    name, kind = arguments.name, "dataset" if arguments.data else "model"
    if not hub.is_model_id(name):
        address = re.match(r"https?://[^/]+/(?:datasets/)?([^/]+/[^/?#]+)", name)
        meant = f": write {address[1]}" if address else ", or a directory has that name"
        raise UserError(f"{name} is no {kind}'s id on the hub (owner/name){meant}")
    if arguments.data:
        from dtrain.data.sources.hub import DatasetPart, download

        files = download(name, DatasetPart(arguments.split, arguments.subset, arguments.revision))
        print("\n".join(map(str, files)))
        return
    if arguments.split != "train" or arguments.subset or arguments.revision:
        raise UserError("--split, --subset and --revision are for datasets: add --data")
    print(hub.download_model(name))


def _generate(arguments: argparse.Namespace) -> None:
    from dtrain.base.hub import find_model_directory

    find_model_directory(arguments.directory)  # before torch is loaded, which takes long
    if arguments.image and arguments.raw:
        raise UserError("--image: images stand in a chat, and --raw is without one: leave --raw out")
    from dtrain.inference.generate import generate_text

    is_piped = arguments.prompt is None
    if is_piped and sys.stdin.isatty():
        raise UserError('no prompt: give --prompt "...", or pipe prompts in, one a line')
    if is_piped:
        keep_carriage_returns()
    prompts = split_lines(sys.stdin.read()) if is_piped else arguments.prompt
    options = ("max_new_tokens", "temperature", "top_k", "top_p", "seed", "raw", "dtype", "device")
    named = {name: getattr(arguments, name) for name in options} | {"images": arguments.image}
    for text in generate_text(arguments.directory, prompts, **named):
        print(text.replace("\n", "\\n") if is_piped else text, flush=True)
