"""Completions as responses of OpenAI's API, in one piece or as server-sent events. No torch.

`TextStream` turns tokens into text as they come: complete characters only, and nothing that may be the beginning of a
stop text. Beside OpenAI's fields a choice has vLLM's `stop_reason`, `token_ids`, `prompt_token_ids` and
`routed_experts` where they were requested, and dtrain's `weight_version`: the oldest version of the weights that drew
one of its tokens.
"""

import json
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from dtrain.commands.serve.protocol import ApiRequest
from dtrain.data.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from dtrain.inference.engine import TokenScores


UNFINISHED = "\ufffd"  # written by tokenizers for bytes that make no whole character yet


class TextStream:
    """Text of one completion. decode: token ids -> text with special tokens left out.

    keep: the stop text that ended the completion stays at the end of the text. `stopped` is that text, or None.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = (), keep: bool = False):
        self.stopped: str | None = None
        self._decode, self._stops, self._keep = decode, stops, keep
        self._ids: list[int] = []
        # Text is decoded from `_start` on, and the text of the tokens up to `_read` was returned before: the text of a
        # token may depend on the one before it (the space of a word), not on those further back.
        self._start = self._read = 0
        self._held = ""

    def push(self, ids: Sequence[int], last: bool) -> str:
        """Return the text that `ids` add, or as much of it as is certain; `last`: no more tokens come."""
        if self.stopped is not None:
            return ""
        self._ids += ids
        before = self._decode(self._ids[self._start : self._read])
        whole = self._decode(self._ids[self._start :])
        if last or not whole.endswith(UNFINISHED):
            self._held += whole[len(before) :]
            self._start, self._read = self._read, len(self._ids)
        matches = [(self._held.find(stop), -len(stop), stop) for stop in self._stops if stop in self._held]
        if matches:
            at, _, self.stopped = min(matches)
            return self._held[: at + len(self.stopped)] if self._keep else self._held[:at]
        count = len(self._held) if last else len(self._held) - self._overlap()
        piece, self._held = self._held[:count], self._held[count:]
        return piece

    def _overlap(self) -> int:
        """Return the number of characters at the end of the held text that may begin a stop text."""
        longest = max(map(len, self._stops), default=1) - 1
        for count in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-count:]) for stop in self._stops):
                return count
        return 0


DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class StreamChunk:
    """Tokens of request `index`, all or further ones; finish: None while more may come; prompt: the scores of its
    prompt, if they were requested; routed: with the finish, where prompt and tokens went (`rl.routed`)."""

    index: int
    ids: list[int]
    logprobs: list[float]
    finish: str | None
    version: int
    prompt: "TokenScores | None" = None
    routed: str | None = None


class Answer:
    """The answer to one `Ask`: `whole` from each request's one piece, or `event` by event."""

    def __init__(self, ask: ApiRequest, tokenizer: Tokenizer):
        self.ask, self.tokenizer, self._fields = ask, tokenizer, ask.fields
        self.id = f"{'chatcmpl' if ask.chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        decode, keep = partial(tokenizer.decode, skip_special_tokens=True), ask.fields["include_stop_str_in_output"]
        self._texts = [TextStream(decode, request.sampling.stop, keep) for request in ask.requests]
        self._num_tokens = [0] * len(ask.requests)  # of each request
        self._begun: set[int] = set()

    def whole(self, pieces: Sequence[StreamChunk]) -> dict[str, Any]:
        """Return the body of the answer; `pieces`: one for each request, in any order."""
        choices = [self._choice(piece, "message") for piece in sorted(pieces, key=lambda piece: piece.index)]
        return {**self._head("chat.completion"), **self._prompt(), "choices": choices, "usage": self._usage()}

    def event(self, piece: StreamChunk) -> bytes:
        """Return the server-sent event of `piece`; b"" if it adds nothing that a client may see yet."""
        prompt = {} if self._begun else self._prompt()
        choice = self._choice(piece, "delta")
        text = choice["delta"].get("content") if self.ask.chat else choice["text"]
        if not (text or choice["finish_reason"] or self.ask.logprobs or self._fields["return_token_ids"]):
            return b""
        return server_sent_event({**self._head("chat.completion.chunk"), **prompt, "choices": [choice]})

    def last_events(self) -> bytes:
        """Return the events that end the stream."""
        if not self._fields["stream_options"].get("include_usage"):
            return DONE
        return server_sent_event({**self._head("chat.completion.chunk"), "choices": [], "usage": self._usage()}) + DONE

    def _head(self, kind: str) -> dict[str, Any]:
        kind = kind if self.ask.chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.ask.name}

    def _prompt(self) -> dict[str, Any]:
        """Return what vLLM says of a conversation's prompt beside the choices, where it was requested."""
        is_wanted = self.ask.chat and self._fields["return_token_ids"]
        return {"prompt_token_ids": list(self.ask.requests[0].prompt)} if is_wanted else {}

    def _usage(self) -> dict[str, int]:
        prompt = sum(len(request.prompt) for request in self.ask.requests[:: self._fields["n"]])
        completion = sum(self._num_tokens)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def _choice(self, piece: StreamChunk, speech: str) -> dict[str, Any]:
        stream = self._texts[piece.index]
        is_first = piece.index not in self._begun
        self._begun.add(piece.index)
        self._num_tokens[piece.index] += len(piece.ids)
        text = stream.push(piece.ids, last=piece.finish is not None)
        if self.ask.echo:
            text = self.ask.echo[piece.index // self._fields["n"]] + text
        choice: dict[str, Any] = {"index": piece.index}
        if self.ask.chat:
            choice[speech] = {"role": "assistant", "content": text} if is_first else {"content": text}
        else:
            choice["text"] = text
        choice["logprobs"] = self._logprobs(piece) if self.ask.logprobs else None
        choice["finish_reason"] = piece.finish
        choice["stop_reason"] = self._stop_reason(piece, stream)
        if self._fields["return_token_ids"]:
            choice["token_ids"] = piece.ids
            if is_first:
                choice["prompt_token_ids"] = list(self.ask.requests[piece.index].prompt)
        if piece.routed is not None:
            choice["routed_experts"] = piece.routed
        choice["weight_version"] = piece.version
        return choice

    def _stop_reason(self, piece: StreamChunk, stream: TextStream) -> str | int | None:
        if piece.finish != "stop" or stream.stopped is not None:
            return stream.stopped
        return piece.ids[-1] if piece.ids and piece.ids[-1] not in self.ask.eos_ids else None

    def _logprobs(self, piece: StreamChunk) -> dict[str, Any]:
        tokens = [self._token(token_id) for token_id in piece.ids]
        pairs = list(zip(tokens, piece.logprobs, strict=True))
        if self.ask.chat:
            content = [{"token": token, "logprob": logprob, "bytes": list(token.encode())} for token, logprob in pairs]
            return {"content": [{**entry, "top_logprobs": []} for entry in content]}
        logprobs: list[float | None] = [*piece.logprobs]
        highest: list[dict[str, float] | None] = [{token: logprob} for token, logprob in pairs]
        if (scores := piece.prompt) is not None:  # nothing is before the first token
            tokens = [*map(self._token, self.ask.requests[piece.index].prompt), *tokens]
            logprobs = [None, *scores.logprobs, *logprobs]
            places = zip(map(self._token, scores.argmax_ids), scores.max_logprobs, strict=True)
            highest = [None, *({token: logprob} for token, logprob in places), *highest]
        top = highest if self.ask.with_argmax else None
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": top, "text_offset": None}

    def _token(self, token_id: int) -> str:
        return (
            f"token_id:{token_id}" if self._fields["return_tokens_as_token_ids"] else self.tokenizer.decode([token_id])
        )


def server_sent_event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"
