"""The conversation on a terminal: lines in, answers out as they come; or lines of a pipe, an answer to each."""

import sys
from argparse import Namespace
from collections.abc import Generator, Iterator
from contextlib import closing, suppress
from importlib import import_module
from pathlib import Path

from dtrain.base.errors import UserError
from dtrain.commands.chat.conversation import Conversation
from dtrain.commands.serve.adapters import put_in, read_beside
from dtrain.commands.standard_input import keep_carriage_returns
from dtrain.inference.engine import Engine
from dtrain.inference.generate import choose_device, choose_dtype, image_problem, load
from dtrain.inference.request import Request, SamplingParams
from dtrain.inference.sampling import check_request
from dtrain.training.metrics.terminal import printable

HELP = """/again            draw the last answer anew
/reset            begin a new conversation
/system TEXT      the system message of a new conversation; without TEXT none
/image PATH       an image, in front of the next message
/thinking on|off  whether the model thinks first
/adapter on|off   with the adapter of --adapter, or without
/exit             or Ctrl-D; Ctrl-C ends an answer
A line that ends with \\ goes on in the next one."""


def talk(arguments: Namespace) -> None:
    """Hold the conversation of the command's `arguments` to its end. Raises UserError."""
    device = choose_device(arguments.device)
    # At the start: at the first image the model may have adapters, and a tower is small beside its text.
    sees = image_problem(arguments.directory) is None
    loaded = load(arguments.directory, choose_dtype(arguments.dtype, device), device, vision=sees)
    model, tokenizer = loaded
    if arguments.adapter is not None:
        if model.adapters is not None:
            raise UserError(
                f"--adapter {arguments.adapter}: {arguments.directory} has one already: give its base model"
            )
        beside = read_beside(model, arguments.adapter)
        put_in(model, beside)
        model.adapters = beside.adapters
    template = loaded.template(arguments.chat_template)
    if template is None:
        raise UserError(
            f"{arguments.directory} has no chat template: give --chat-template FILE, or complete texts with `dtrain "
            "generate --raw`"
        )
    length = model.config.max_position_embeddings
    stops = tuple(tokenizer.eos_ids)
    sampling = SamplingParams(
        arguments.max_new_tokens, arguments.temperature, arguments.top_k, arguments.top_p, stop_ids=stops
    )
    check_request(Request([0], sampling), model.config.vocab_size, "the conversation", has_decode=False)
    chats, engine = loaded.chats(template, length, arguments.directory), Engine(model, max_rows=1)
    conversation = Conversation(engine, chats, length, sampling, arguments.seed, arguments.system)
    if arguments.thinking is not None:
        conversation.think(arguments.thinking == "on")
    Terminal(conversation).run()


class Terminal:
    """Terminal loop: lines of standard input to `conversation`, its answers to standard output."""

    def __init__(self, conversation: Conversation):
        self.conversation = conversation
        self.is_terminal = sys.stdin.isatty()
        if not self.is_terminal:
            keep_carriage_returns()

    def run(self) -> None:
        """Read lines until the end of input, or /exit."""
        if self.is_terminal:
            with suppress(ImportError):
                import_module("readline")  # `input` then edits lines and keeps those before
            print("Talk to the model; /help has the commands.")
        for line in self._lines():
            if line == "/exit":
                return
            try:
                if line.startswith("/"):
                    self._obey(*line[1:].partition(" ")[::2])
                elif line:
                    self._print(self.conversation.say(line))
            except UserError as error:
                if not self.is_terminal:
                    raise
                print(f"dtrain: {error}", file=sys.stderr)

    def _lines(self) -> Iterator[str]:
        while True:
            text, mark = "", "> "
            while not text or text.endswith("\\"):
                try:
                    line = input(mark if self.is_terminal else "")
                except (EOFError, KeyboardInterrupt):
                    if self.is_terminal:
                        print()
                    return
                text, mark = text[:-1] + ("\n" if text else "") + line.rstrip("\r"), ". "
                if not text:
                    break
            yield text.strip()

    def _print(self, pieces: Generator[str]) -> None:
        try:
            with closing(pieces):
                for piece in pieces:
                    print(printable(piece), end="", flush=True)
        except KeyboardInterrupt:
            if not self.is_terminal:
                raise
        print(flush=True)

    def _obey(self, word: str, rest: str) -> None:
        conversation, rest = self.conversation, rest.strip()
        if word == "again":
            self._print(conversation.again())
        elif word == "image" and rest:
            conversation.show(Path(rest).expanduser())
        elif word in ("reset", "system"):
            conversation.reset()
            if word == "system":
                conversation.system = rest or None
        elif word == "thinking" and rest in ("on", "off"):
            conversation.think(rest == "on")
        elif word == "adapter" and rest in ("on", "off"):
            if conversation.engine.model.adapters is None:
                raise UserError("there is no adapter: --adapter DIR, when the command starts, has one")
            conversation.engine.use_adapters(rest == "on")
        elif word == "help":
            print(HELP)
        else:
            raise UserError(f"/{word[:40]} is no command:\n{HELP}")
