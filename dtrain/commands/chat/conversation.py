"""A conversation: its messages, and the engine that answers, piece by piece."""

from collections.abc import Generator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from dtrain.base.errors import UserError
from dtrain.commands.serve.text import TextStream
from dtrain.data.formats.prompts import Prompt
from dtrain.inference.chats import ChatEncoder, image_part
from dtrain.inference.engine import Engine
from dtrain.inference.request import Request, SamplingParams

SWITCHES = ("enable_thinking", "thinking")  # the names of this variable in chat templates


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
        switch = next((name for name in SWITCHES if template is not None and template.reads(name)), None)
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
            self.engine.abandon()
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
