"""A conversation with a model, in a terminal or through a pipe.

`Conversation` has the messages and the engine, whose answers come in pieces. In a terminal each piece is printed when
it comes. Lines from a pipe get one answer each.
"""

import sys
from argparse import Namespace
from collections.abc import Generator, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from dtrain.base.errors import UserError
from dtrain.commands.arguments import keep_carriage_returns
from dtrain.commands.serve.answers import TextStream
from dtrain.commands.serve.updates import attach_adapters, read_adapter_model
from dtrain.data.formats.prompts import Prompt
from dtrain.inference.chats import ChatEncoder, image_part
from dtrain.inference.engine import Engine
from dtrain.inference.generate import choose_device, choose_dtype, image_problem, load
from dtrain.inference.request import Request, SamplingParams
from dtrain.inference.sampling import check_request
from dtrain.training.metrics.terminal import printable

SWITCHES = ("enable_thinking", "thinking")  # the names of this variable in chat templates

HELP = """/again            draw the last answer anew
/reset            begin a new conversation
/system TEXT      the system message of a new conversation; without TEXT none
/image PATH       an image, in front of the next message
/thinking on|off  whether the model thinks first
/adapter on|off   with the adapter of --adapter, or without
/exit             or Ctrl-D; Ctrl-C ends an answer
A line that ends with \\ goes on in the next one."""


@dataclass
class Conversation:
    """A conversation with one model.

    max_length: of prompt and answer together; sampling: its max_new_tokens is the most of an answer. system: the
    first message, None for none. variables: for the chat template. Each answer has draws of its own, the `drawn`-th of
    `seed`. shown: image parts of the next message.
    """

    engine: Engine
    chats: ChatEncoder
    max_length: int
    sampling: SamplingParams
    seed: int = 0
    system: str | None = None
    variables: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, Any]] = field(default_factory=list)  # without the system's
    drawn: int = 0
    shown: list[dict[str, Any]] = field(default_factory=list)

    def show(self, path: Path) -> None:
        """Put the image in a file in front of the next message. Raises UserError if it cannot be used."""
        part = image_part(path)
        self.chats.lay_out(part["image"])
        self.shown.append(part)

    def reset(self) -> None:
        """Begin a new conversation."""
        self.messages.clear()
        self.shown.clear()

    def think(self, on: bool) -> None:
        """Set whether the model thinks first. Raises UserError if the template has no variable for it."""
        template = self.chats.encoder.template
        switch = next((name for name in SWITCHES if template is not None and template.has_variable(name)), None)
        if switch is None:
            raise UserError(f"the chat template has no switch for thinking ({' or '.join(SWITCHES)})")
        self.variables[switch] = on

    def again(self) -> Generator[str]:
        """Return another answer to the last message, in pieces. Raises UserError if there is none."""
        if not self.messages:
            raise UserError("nothing was said yet")
        del self.messages[-1]  # every answer is one, if an empty one
        return self._answer(self._request())

    def say(self, text: str) -> Generator[str]:
        """Return the answer to `text`, in pieces. The pieces drawn until the caller stops are the answer that is kept.

        Raises UserError if the context is full or an image is torn; neither `text` nor images are then added.
        """
        shown, self.shown = self.shown, []
        content = [*shown, {"type": "text", "text": text}] if shown else text
        self.messages.append({"role": "user", "content": content})
        try:
            return self._answer(self._request())
        except UserError:
            self.messages.pop()
            raise

    def _answer(self, request: Request) -> Generator[str]:
        tokenizer = self.chats.encoder.tokenizer
        stream = TextStream(partial(tokenizer.decode, skip_special_tokens=True))
        ticket, num_sent, answer = self.engine.add(request), 0, ""
        try:
            while True:
                ended = dict(self.engine.step())
                ids = ended[ticket].ids[num_sent:] if ticket in ended else self.engine.progress(ticket, num_sent)[0]
                num_sent += len(ids)
                piece = stream.push(ids, last=ticket in ended)
                answer += piece
                if piece:
                    yield piece
                if ticket in ended:
                    return
        finally:
            self.engine.drop_all_work()
            self.messages.append({"role": "assistant", "content": answer})

    def _request(self) -> Request:
        begin = [] if self.system is None else [{"role": "system", "content": self.system}]
        prompt = self.chats.encode(Prompt([*begin, *self.messages], variables=self.variables))
        num_left = self.max_length - len(prompt.ids)
        if num_left < 1:
            raise UserError(
                f"the conversation has {len(prompt.ids)} tokens, and the model's context holds {self.max_length}: "
                "/reset begins a new one"
            )
        self.drawn += 1
        sampling = replace(self.sampling, max_new_tokens=min(num_left, self.sampling.max_new_tokens))
        images = self.chats.images_of(prompt)
        request = Request(prompt.ids, sampling, self.seed, sample_index=self.drawn, images=images)
        self.engine.check(request, "the conversation")
        return request


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
        beside = read_adapter_model(model, arguments.adapter)
        attach_adapters(model, beside)
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
