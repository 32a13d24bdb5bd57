"""The `dtrain` command: parses the command line, calls the command's module, and turns errors into an exit status.

Imports no torch. The commands that need torch import it when they are called. Exit status: 0 success, 1 an error (its
message is on stderr), 2 wrong usage, 130, 143 and 138 after Ctrl-C, SIGTERM and SIGUSR1 (a pre-emption).
"""

import argparse
import importlib
import io
import json
import os
import re
import shutil
import signal
import sys
import textwrap
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
    add_family,
    add_recipe,
    add_sampling,
    at_least,
    keep_carriage_returns,
)

GROUPS = {
    "train": ("run", "validate", "plan"),
    "recipes": ("ls", "cp", "cat", "convert", "help"),
    "models and data": ("download", "preview"),
    "use a model": ("generate", "chat", "eval", "serve", "export", "push"),
    "look at runs": ("report", "compare"),
    "this installation": ("env", "completion"),
}
"""The commands by task, as `dtrain --help` shows them."""

ASKED_TO_COMPLETE, COMPLETION_LINE = "_ARGCOMPLETE", "COMP_LINE"
"""Environment variables with which a shell asks for completions of a line (`dtrain completion`)."""

COMMANDS = {
    "convert": ("dtrain.commands.convert", "write a recipe from a file of another tool, such as TRL or axolotl"),
    "plan": ("dtrain.commands.plan.command", "estimate the memory, traffic and time of a run, without GPU and weights"),
    "eval": ("dtrain.commands.eval.command", "answer the prompts of data files and score the answers"),
    "chat": ("dtrain.commands.chat.command", "chat with a model in the terminal"),
    "report": ("dtrain.commands.report.command", "write an HTML page about runs: curves, answers, differences"),
    "compare": ("dtrain.commands.report.compare", "compare runs in the terminal"),
    "push": ("dtrain.commands.push.command", "upload a run's export to the Hugging Face hub, with a model card"),
    "serve": ("dtrain.commands.serve.command", "serve a model over HTTP with OpenAI's API"),
    "completion": ("dtrain.commands.completion", "print a script that completes dtrain's command line in bash or zsh"),
    "env": ("dtrain.commands.env", "print versions and devices, for bug reports"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line.

    Args:
        argv: Words after `dtrain`. None: those of this process.

    Returns:
        The exit status.
    """
    parser = _parser()
    if COMPLETION_LINE in os.environ and ASKED_TO_COMPLETE in os.environ:
        from dtrain.commands.completion import complete

        complete(parser, parser.commands, os.environ[COMPLETION_LINE])
    typed = sys.argv[1:] if argv is None else list(argv)
    _check_command(parser, typed)
    arguments, rest = parser.parse_known_args(typed)
    if hasattr(arguments, "overrides"):
        # argparse accepts overrides only before the first option. Those after it are in `rest`.
        arguments.overrides += [word for word in rest if not word.startswith("-")]
        rest = [word for word in rest if word.startswith("-")]
    if hasattr(arguments, "topics"):  # `dtrain help --learning-rate` explains the key as well
        arguments.topics += rest
        rest = []
    _check_options(parser.commands[typed[0]], typed[1:], rest)
    try:
        arguments.command(arguments)
        sys.stdout.flush()
        return 0
    except (UserError, Stopped) as error:
        print(f"dtrain: {error}", file=sys.stderr)
        return 128 + error.signum if isinstance(error, Stopped) else 1
    except KeyboardInterrupt as error:  # its argument is the number of a second signal, which may not be SIGINT
        print("dtrain: interrupted", file=sys.stderr)
        return 128 + (error.args[0] if error.args else signal.SIGINT)
    except BrokenPipeError:  # the program that reads our output, such as `head`, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def command() -> None:
    """Run `main` as a program and exit.

    A terminal or a pipe may have an encoding that lacks some characters (ASCII under LC_ALL=C, Latin-1, GBK). Those are
    written as escapes such as \\u2605.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a closed stream is None
            stream.reconfigure(errors="backslashreplace")
    status = main()
    if "torch" in sys.modules:
        # Skip the interpreter's teardown. A thread of a process group that is still alive then sometimes aborts a run
        # that has finished.
        with suppress(BrokenPipeError):
            sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


class _Command(argparse.ArgumentParser):
    """The parser of a command, whose arguments are added when it is used.

    Attributes:
        module_name: Module that adds the arguments. None once it has added them.
        commands: Parsers of the sub-commands by name.
    """

    module_name: str | None = None
    commands: Mapping[str, "_Command"]

    def parse_known_args(self, args=None, namespace=None):
        self.add_late_arguments()
        return super().parse_known_args(args, namespace)

    def format_help(self) -> str:
        self.add_late_arguments()
        return super().format_help()

    def add_late_arguments(self) -> None:
        """Add the arguments of a command that is in a module of its own. Does nothing if they are there."""
        if self.module_name is not None:
            module = importlib.import_module(self.module_name)
            self.module_name = None
            module.add_arguments(self)
            self.set_defaults(command=module.run)


class _MainParser(_Command):
    """The top-level parser, whose help groups the commands by task.

    Attributes:
        summaries: The text of each command in the help.
    """

    summaries: dict[str, str]

    def format_help(self) -> str:
        width = min(100, shutil.get_terminal_size((100, 0)).columns)
        lines = [self.format_usage(), f"{self.description}"]
        column = max(len(name) for name in self.summaries) + 4
        for title, names in GROUPS.items():
            lines += ["", f"{title}:"]
            for name in names:
                start = f"  {name}".ljust(column)
                lines.append(textwrap.fill(start + self.summaries[name], width, subsequent_indent=" " * column))
        lines += ["", "options:", "  -h, --help  show this help", "  --version   show dtrain's version", ""]
        more = "`dtrain COMMAND --help` shows the options of a command. `dtrain help KEY` explains a key of a recipe."
        lines += [textwrap.fill(more, width), ""]
        return "\n".join(lines)


def _parser() -> _MainParser:
    """Build the parser of the whole command line."""
    parser = _MainParser(prog="dtrain", description="Fine-tune open-weight language models on one or many GPUs.")
    parser.add_argument("--version", action="version", version=f"dtrain {__version__}")
    parser.summaries = {}
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=_Command)

    def add(name: str, command, text: str, recipe: bool = False) -> _Command:
        parser.summaries[name] = text
        sub = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        sub.set_defaults(command=command)
        if recipe:
            add_recipe(sub)
        return sub

    add("run", _run, "train a model with a recipe", recipe=True)
    validate = add("validate", _validate, "check a recipe and report all of its errors, without training", recipe=True)
    validate.add_argument("--world-size", type=at_least(1), metavar="N", help=PROCESSES)
    shows = "print training data as the model receives it: text, lengths, packing"
    preview = add("preview", _preview, shows, recipe=True)
    num_samples = "number of samples to print (default: 3)"
    preview.add_argument("--samples", type=at_least(0), default=3, metavar="N", help=num_samples)
    _add_list_arguments(add("ls", _ls, "list the recipes that ship with dtrain, or runs with --runs"))
    _add_copy_arguments(add("cp", _cp, "copy a shipped recipe to a file that you can edit"))
    add("cat", _cat, "print a recipe").add_argument("recipe", metavar="RECIPE", help=RECIPE)
    topic = "keys such as optimizer.lr, sections, metrics or commands"
    add("help", _help, "explain keys of a recipe, metrics and commands").add_argument("topics", nargs="*", help=topic)
    _add_export_arguments(add("export", _export, "export a run, a checkpoint or an adapter for use by other tools"))
    download = "download a model or a dataset from the Hugging Face hub into the cache of this machine"
    _add_download_arguments(add("download", _download, download))
    _add_generate_arguments(add("generate", _generate, "complete prompts with a model"))
    for name, (module_name, text) in COMMANDS.items():
        add(name, None, text).module_name = module_name
    parser.commands = commands.choices
    return parser


def _add_list_arguments(parser: argparse.ArgumentParser) -> None:
    runs = "list the runs of DIR (default: runs) with state, last step, loss, size and age"
    parser.add_argument("--runs", nargs="?", const=Path("runs"), type=Path, metavar="DIR", help=runs)
    parser.add_argument("--json", action="store_true", help="print a JSON list")


def _add_copy_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help=RECIPE)
    parser.add_argument("target", metavar="TARGET", type=Path, help="the new file, or a directory for it")


def _add_export_arguments(parser: argparse.ArgumentParser) -> None:
    source = "runs/x, runs/x/checkpoints/step-N, or the directory of an adapter or a model"
    parser.add_argument("source", metavar="RUN_OR_CHECKPOINT", type=Path, help=source)
    parser.add_argument("out", metavar="OUT", type=Path, help="directory to write, or a file OUT.gguf for llama.cpp")
    dtype = "dtype of a directory: bfloat16, float16, float32 or float64 (default: as saved)"
    parser.add_argument("--dtype", help=dtype)
    parser.add_argument("--type", help="type of OUT.gguf: f16, bf16, f32 or q8_0 (default: f16)")
    forms = parser.add_mutually_exclusive_group()
    merged = "a full model, with an adapter merged into its weights (the default)"
    forms.add_argument("--merged", dest="form", action="store_const", const="merged", help=merged)
    adapter = "only the adapter, in PEFT's format, with the tokenizer's files"
    forms.add_argument("--adapter", dest="form", action="store_const", const="adapter", help=adapter)
    folded = "only the adapter, with its scale multiplied into B, for tools that read plain LoRA (llama.cpp, vLLM)"
    forms.add_argument("--folded", dest="form", action="store_const", const="folded", help=folded)
    original = "merge into the original weights of the base model, even if the run trained on a quantized copy (nf4)"
    parser.add_argument("--original-base", action="store_true", help=original)
    add_family(parser)


def _add_download_arguments(parser: argparse.ArgumentParser) -> None:
    name = "hub id, such as Qwen/Qwen3-0.6B; model.path and data.train.path accept the same id"
    parser.add_argument("name", metavar="OWNER/NAME", help=name)
    parser.add_argument("--data", action="store_true", help="download a dataset, and print the files of the split")
    parser.add_argument("--split", default="train", help="split of the dataset (default: train)")
    parser.add_argument("--subset", help="subset of the dataset (default: its default subset)")
    parser.add_argument("--revision", help="branch, tag or commit of the dataset (default: main)")


def _add_generate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", type=Path, help=DIRECTORY)
    prompt = r"a user message; may be repeated (default: each line of standard input; line breaks are printed as \n)"
    parser.add_argument("--prompt", action="append", help=prompt)
    image = "an image file, placed before the user message; may be repeated"
    parser.add_argument("--image", action="append", default=[], metavar="PATH", type=Path, help=image)
    parser.add_argument("--raw", action="store_true", help="continue the prompt as it is, without the chat template")
    longest = "maximum length of a completion (default: 256)"
    parser.add_argument("--max-new-tokens", type=at_least(1), default=256, metavar="N", help=longest)
    add_sampling(parser)
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling (default: 0)")
    add_family(parser)
    add_device(parser)


def _check_command(parser: _Command, typed: list[str]) -> None:
    """Exit with status 2 if there is no command, or one that dtrain does not have."""
    if not typed:
        parser.print_help(sys.stderr)
        sys.exit(2)
    first = typed[0]
    if first.startswith("-") and first not in ("-h", "--help", "--version"):
        parser.error(f"{first}: a command comes first, such as `dtrain run RECIPE key=value`; --help lists them")
    if not first.startswith("-") and first not in parser.commands:
        from dtrain.commands.suggestions import no_command

        parser.error(no_command(typed, parser.commands))


def _check_options(command: argparse.ArgumentParser, typed: list[str], rest: list[str]) -> None:
    """Exit with status 2 if there is an unknown option, or `key=value` after a command that has only options."""
    takes_keys = any(action.dest in ("overrides", "topics") for action in command._actions)
    has_assignment = any("=" in word for word in typed)
    if rest or (has_assignment and not takes_keys):
        from dtrain.commands.suggestions import unknown_words

        problems = unknown_words(command, takes_keys, typed, rest)
        if problems:
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
    from dtrain.training.preflight import load, print_origin

    recipe = load(arguments.recipe, arguments.overrides)
    from dtrain.commands.preview import preview  # loads torch, which a recipe with a wrong key does not need

    print_origin(recipe)
    with config.redacted_errors(recipe):
        preview(recipe, arguments.samples, hide=lambda text: config.redact(text, recipe))


def _ls(arguments: argparse.Namespace) -> None:
    if arguments.runs is not None:
        from dtrain.commands import run_list

        runs = run_list.list_runs(arguments.runs)
        print(run_list.as_json(runs) if arguments.json else "\n".join(run_list.as_table(runs, arguments.runs)))
        return
    from dtrain.recipe import list_shipped_recipes
    from dtrain.training import METHODS

    recipes = list_shipped_recipes([*METHODS])
    if arguments.json:
        print(json.dumps([{"name": name, "text": text} for name, text in recipes], indent=1))
        return
    width = max((len(name) for name, _ in recipes), default=0)
    for name, text in recipes:
        print(f"{name:<{width}}  {text}")


def _help(arguments: argparse.Namespace) -> None:
    from dtrain.commands import help as key_help

    parser = _parser()
    if not arguments.topics:
        print(f"{parser.format_help()}\n{key_help.section_list()}")
        return
    texts = []
    for topic in arguments.topics:
        command = parser.commands.get(topic)
        if command is not None:
            texts.append(command.format_help().rstrip())
        # `eval` and `run` are commands and sections of a recipe.
        if command is None or key_help.is_section(topic):
            texts.append(key_help.describe(topic, parser.commands))
    print("\n\n".join(texts))


def _cp(arguments: argparse.Namespace) -> None:
    from dtrain import recipe as config

    source = config.find_recipe(arguments.recipe)
    target = arguments.target / source.name if arguments.target.is_dir() else arguments.target
    try:
        with source.open("rb") as source_file, target.open("xb") as target_file:
            shutil.copyfileobj(source_file, target_file)
    except FileExistsError:
        raise UserError(f"{target} already exists; choose another name") from None
    except OSError as error:
        raise UserError(f"{error.filename}: {error.strerror}") from error


def _cat(arguments: argparse.Namespace) -> None:
    from dtrain import recipe as config

    sys.stdout.write(config.find_recipe(arguments.recipe).read_bytes().decode("utf-8", errors="replace"))


def _export(arguments: argparse.Namespace) -> None:
    from dtrain.commands.families import register_families

    source, out, gguf_type = arguments.source, arguments.out, arguments.type
    register_families(source, arguments.family)
    form, original_base = arguments.form, arguments.original_base
    if out.suffix == ".gguf":
        if arguments.dtype is not None:
            raise UserError("--dtype is for directories: the type of a GGUF file is --type f16, bf16, f32 or q8_0")
        from dtrain.checkpoint.gguf.export import export_gguf

        origin = export_gguf(source, out, gguf_type or "f16", form, original_base)
    else:
        if gguf_type is not None:
            raise UserError("--type is for GGUF files: let OUT end with .gguf, or use --dtype for a directory")
        from dtrain.checkpoint.huggingface.export import export

        origin = export(source, out, arguments.dtype, form, original_base)
    print(f"wrote {out} from {origin}")


def _download(arguments: argparse.Namespace) -> None:
    from dtrain.base import hub

    name = arguments.name
    if not hub.is_model_id(name):
        kind = "dataset" if arguments.data else "model"
        address = re.match(r"https?://[^/]+/(?:datasets/)?([^/]+/[^/?#]+)", name)
        fix = f": write {address[1]}" if address else ", or a directory has that name"
        raise UserError(f"{name} is not the id of a {kind} on the hub (owner/name){fix}")
    if arguments.data:
        from dtrain.data.sources.hub import DatasetPart, download

        files = download(name, DatasetPart(arguments.split, arguments.subset, arguments.revision))
        print("\n".join(str(file) for file in files))
        return
    if arguments.split != "train" or arguments.subset or arguments.revision:
        raise UserError("--split, --subset and --revision are for datasets: add --data")
    print(hub.download_model(name))


def _generate(arguments: argparse.Namespace) -> None:
    from dtrain.base.hub import find_model_directory
    from dtrain.commands.families import register_families

    find_model_directory(arguments.directory)  # a wrong name fails here, before torch is imported, which takes seconds
    register_families(arguments.directory, arguments.family)
    if arguments.image and arguments.raw:
        raise UserError("--image needs the chat template, which --raw leaves out: leave --raw out")
    from dtrain.inference.generate import generate_text

    is_piped = arguments.prompt is None
    if is_piped and sys.stdin.isatty():
        raise UserError('no prompt: give --prompt "...", or pipe prompts in, one per line')
    if is_piped:
        keep_carriage_returns()
        prompts = split_lines(sys.stdin.read())
    else:
        prompts = arguments.prompt
    options = ("max_new_tokens", "temperature", "top_k", "top_p", "seed", "raw", "dtype", "device")
    settings = {name: getattr(arguments, name) for name in options}
    for text in generate_text(arguments.directory, prompts, images=arguments.image, **settings):
        # One line per prompt, so that completions can be matched with the lines of the input.
        print(text.replace("\n", "\\n") if is_piped else text, flush=True)
