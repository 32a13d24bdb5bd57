"""A conversation with a model, in a terminal or through a pipe.

`Conversation` has the messages and the engine, and returns answers piece by piece. `Terminal` prints each piece when it
arrives. Each line from a pipe gets one answer.
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

SWITCHES = ("enable_thinking", "thinking")  # names of the variable for thinking in chat templates

HELP = """/again            generate the last answer again
/reset            begin a new conversation
/system TEXT      begin a new conversation with this system message, or without TEXT with none
/image PATH       put an image before the next message
/thinking on|off  whether the model thinks before it answers
/adapter on|off   whether the adapter of --adapter is used
/exit             end, as Ctrl-D does; Ctrl-C ends an answer
A line that ends with \\ continues on the next line."""


@dataclass
class Conversation:
    """A conversation with one model.

    Attributes:
        engine: Engine of the model.
        chats: Encoder of conversations.
        max_length: Maximum tokens of prompt and answer together.
        sampling: Sampling parameters. Its max_new_tokens limits an answer.
        seed: Seed of the samples.
        system: System message, or None.
        variables: Variables of the chat template.
        messages: Messages without the system message.
        num_answers: Number of answers so far. Each is sampled with an index of its own.
        pending_images: Images for the next message.
    """

    engine: Engine
    chats: ChatEncoder
    max_length: int
    sampling: SamplingParams
    seed: int = 0
    system: str | None = None
    variables: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, Any]] = field(default_factory=list)
    num_answers: int = 0
    pending_images: list[dict[str, Any]] = field(default_factory=list)

    def add_image(self, path: Path) -> None:
        """Put an image before the next message. Raises UserError if the file cannot be used."""
        part = image_part(path)
        self.chats.lay_out(part["image"])
        self.pending_images.append(part)

    def reset(self) -> None:
        """Begin a new conversation."""
        self.messages.clear()
        self.pending_images.clear()

    def set_thinking(self, is_on: bool) -> None:
        """Set whether the model thinks before it answers. Raises UserError if the template has no variable for it."""
        template = self.chats.encoder.template
        for switch in SWITCHES:
            if template is not None and template.has_variable(switch):
                self.variables[switch] = is_on
                return
        raise UserError(f"the chat template has no switch for thinking ({' or '.join(SWITCHES)})")

    def answer_again(self) -> Generator[str]:
        """Generate another answer to the last message, piece by piece.

        Raises:
            UserError: If there is no message yet, or the context is full, for example because thinking was switched on.
                The last answer then stays in the conversation.
        """
        if not self.messages:
            raise UserError("there is no message to answer yet")
        last_answer = self.messages.pop()  # the last message is always an answer, perhaps an empty one
        try:
            return self._answer(self._request())
        except UserError:
            self.messages.append(last_answer)
            raise

    def send(self, text: str) -> Generator[str]:
        """Send a message and generate the answer, piece by piece.

        If the caller stops early, the pieces so far are the answer that stays in the conversation.

        Raises:
            UserError: If the context is full or an image is damaged. The message is then not added.
        """
        images, self.pending_images = self.pending_images, []
        content = [*images, {"type": "text", "text": text}] if images else text
        self.messages.append({"role": "user", "content": content})
        try:
            return self._answer(self._request())
        except UserError:
            self.messages.pop()
            raise

    def _answer(self, request: Request) -> Generator[str]:
        """Generate the completion of a request, and add it to the messages however far it came."""
        tokenizer = self.chats.encoder.tokenizer
        stream = TextStream(partial(tokenizer.decode, skip_special_tokens=True))
        ticket = self.engine.add(request)
        num_sent = 0
        answer = ""
        try:
            is_done = False
            while not is_done:
                ended = dict(self.engine.step())
                is_done = ticket in ended
                if is_done:
                    ids = ended[ticket].ids[num_sent:]
                else:
                    ids, _ = self.engine.progress(ticket, num_sent)
                num_sent += len(ids)
                piece = stream.push(ids, last=is_done)
                answer += piece
                if piece:
                    yield piece
        finally:
            self.engine.drop_all_work()
            self.messages.append({"role": "assistant", "content": answer})

    def _request(self) -> Request:
        """Return the request for the next answer. Raises UserError if the context is full."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        prompt = self.chats.encode(Prompt([*system, *self.messages], variables=self.variables))
        num_left = self.max_length - len(prompt.ids)
        if num_left < 1:
            raise UserError(
                f"the conversation has {len(prompt.ids)} tokens, and the model's context holds {self.max_length}: "
                "/reset begins a new one"
            )
        self.num_answers += 1
        sampling = replace(self.sampling, max_new_tokens=min(num_left, self.sampling.max_new_tokens))
        images = self.chats.images_of(prompt)
        request = Request(prompt.ids, sampling, self.seed, sample_index=self.num_answers, images=images)
        self.engine.check(request, "the conversation")
        return request


def chat(arguments: Namespace) -> None:
    """Chat with a model until the user ends. Raises UserError.

    Args:
        arguments: Arguments of the command.
    """
    device = choose_device(arguments.device)
    # The vision tower is loaded now and not at the first image, because the model may have an adapter by then, which
    # could not be added to the tower any more. The tower is small compared to the text model.
    has_images = image_problem(arguments.directory) is None
    loaded = load(arguments.directory, choose_dtype(arguments.dtype, device), device, vision=has_images)
    model, tokenizer = loaded
    if arguments.adapter is not None:
        if model.adapters is not None:
            raise UserError(
                f"--adapter {arguments.adapter}: {arguments.directory} already has an adapter: give its base model"
            )
        adapter_model = read_adapter_model(model, arguments.adapter)
        attach_adapters(model, adapter_model)
        model.adapters = adapter_model.adapters
    template = loaded.template(arguments.chat_template)
    if template is None:
        raise UserError(
            f"{arguments.directory} has no chat template: give --chat-template FILE, or complete texts with `dtrain "
            "generate --raw`"
        )
    sampling = SamplingParams(
        arguments.max_new_tokens,
        arguments.temperature,
        arguments.top_k,
        arguments.top_p,
        stop_ids=tuple(tokenizer.eos_ids),
    )
    check_request(Request([0], sampling), model.config.vocab_size, "the conversation", has_decode=False)
    length = model.config.max_position_embeddings
    chats = loaded.chats(template, length, arguments.directory)
    engine = Engine(model, max_rows=1)
    conversation = Conversation(engine, chats, length, sampling, arguments.seed, arguments.system)
    if arguments.thinking is not None:
        conversation.set_thinking(arguments.thinking == "on")
    Terminal(conversation).run()


class Terminal:
    """The loop that reads lines from standard input and prints the answers of a conversation."""

    def __init__(self, conversation: Conversation):
        self.conversation = conversation
        self.is_terminal = sys.stdin.isatty()
        if not self.is_terminal:
            keep_carriage_returns()

    def run(self) -> None:
        """Read lines until the end of input, or /exit."""
        if self.is_terminal:
            with suppress(ImportError):
                import_module("readline")  # lets `input` edit lines and recall earlier ones
            print("Chat with the model. /help lists the commands.")
        for line in self._lines():
            if line == "/exit":
                return
            try:
                if line.startswith("/"):
                    command, _, argument = line[1:].partition(" ")
                    self._run_command(command, argument.strip())
                elif line:
                    self._print(self.conversation.send(line))
            except UserError as error:
                if not self.is_terminal:
                    raise
                print(f"dtrain: {error}", file=sys.stderr)

    def _lines(self) -> Iterator[str]:
        """Yield lines of input. A line that ends with a backslash is joined with the next one."""
        while True:
            text, mark = "", "> "
            while not text or text.endswith("\\"):
                try:
                    line = input(mark if self.is_terminal else "")
                except (EOFError, KeyboardInterrupt):
                    if self.is_terminal:
                        print()
                    return
                if text:
                    text = f"{text[:-1]}\n"  # without the backslash
                text += line.rstrip("\r")
                mark = ". "
                if not text:
                    break
            yield text.strip()

    def _print(self, pieces: Generator[str]) -> None:
        """Print an answer. Ctrl-C ends it."""
        try:
            with closing(pieces):
                for piece in pieces:
                    print(printable(piece), end="", flush=True)
        except KeyboardInterrupt:
            if not self.is_terminal:
                raise
        print(flush=True)

    def _run_command(self, command: str, argument: str) -> None:
        """Run a command of HELP. Raises UserError if it is unknown or cannot be run."""
        conversation = self.conversation
        is_on = argument == "on"
        has_switch = argument in ("on", "off")
        if command == "again":
            self._print(conversation.answer_again())
        elif command == "image" and argument:
            conversation.add_image(Path(argument).expanduser())
        elif command == "reset":
            conversation.reset()
        elif command == "system":
            conversation.reset()
            conversation.system = argument or None
        elif command == "thinking" and has_switch:
            conversation.set_thinking(is_on)
        elif command == "adapter" and has_switch:
            if conversation.engine.model.adapters is None:
                raise UserError("there is no adapter: start the command with --adapter DIR")
            conversation.engine.use_adapters(is_on)
        elif command == "help":
            print(HELP)
        else:
            raise UserError(f"/{command[:40]} is not a command:\n{HELP}")
