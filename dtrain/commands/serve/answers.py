"""Completions as responses of OpenAI's API, as one JSON object or as server-sent events. No torch.

`TextStream` turns tokens into text as they come. For example, with the stop text "END", tokens are returned as follows:

    pushed        returned
    "a E"         "a "          "E" may be the beginning of "END"
    "N"           ""            so may be "EN"
    "X"           "ENX"

In addition to OpenAI's fields a choice has vLLM's `stop_reason`, and its `token_ids`, `prompt_token_ids` and
`routed_experts` if they were requested, and dtrain's `weight_version`: the oldest version of the weights that sampled
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


UNFINISHED = "\ufffd"  # tokenizers write this for the bytes of an incomplete character


class TextStream:
    """The text of one completion, returned piece by piece.

    Only complete characters are returned, and nothing that may be the beginning of a stop text.

    Args:
        decode: Turns token ids into text, without special tokens.
        stops: Texts that end the completion.
        keep: Whether the stop text stays at the end of the text.

    Attributes:
        stopped: The stop text that ended the completion, or None.

    Example:
        >>> stream = TextStream(lambda ids: "".join("abcdef"[index] for index in ids), stops=["cd"])
        >>> stream.push([0, 1, 2], last=False)
        'ab'
        >>> stream.push([4], last=False)
        'ce'
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = (), keep: bool = False):
        self.stopped: str | None = None
        self._decode, self._stops, self._keep = decode, stops, keep
        self._ids: list[int] = []
        # The text of a token may depend on the token before it (the space before a word), but not on earlier tokens.
        # Only the tokens from `_start` on are decoded. The text of the tokens before `_read` is already in `_pending`
        # or was returned.
        self._start = self._read = 0
        self._pending = ""  # text that has not been returned

    def push(self, ids: Sequence[int], last: bool) -> str:
        """Add tokens and return the text that can be returned now.

        Args:
            ids: The next tokens.
            last: Whether they are the last ones.
        """
        if self.stopped is not None:
            return ""
        self._ids += ids
        text_before = self._decode(self._ids[self._start : self._read])
        text = self._decode(self._ids[self._start :])
        if last or not text.endswith(UNFINISHED):
            self._pending += text[len(text_before) :]
            self._start, self._read = self._read, len(self._ids)
        # The first stop text ends the completion, the longest one if several begin at the same character.
        matches = [(self._pending.find(stop), -len(stop), stop) for stop in self._stops if stop in self._pending]
        if matches:
            position, _, self.stopped = min(matches)
            end = position + len(self.stopped) if self._keep else position
            return self._pending[:end]
        count = len(self._pending)
        if not last:
            count -= self._overlap()
        piece, self._pending = self._pending[:count], self._pending[count:]
        return piece

    def _overlap(self) -> int:
        """Return the number of characters at the end of the pending text that may begin a stop text."""
        longest = max(map(len, self._stops), default=1) - 1
        for count in range(min(longest, len(self._pending)), 0, -1):
            if any(stop.startswith(self._pending[-count:]) for stop in self._stops):
                return count
        return 0


DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class StreamChunk:
    """New tokens of one request.

    Attributes:
        index: Index of the request in its call.
        ids: The tokens.
        logprobs: Their log-probabilities.
        finish: Why the completion ended. None if it has not.
        version: Oldest version of the weights that sampled a token of the completion.
        prompt: Scores of the prompt, if they were requested.
        routed: Experts of the tokens as text (`rl.routed`), at the end and if they were requested.
    """

    index: int
    ids: list[int]
    logprobs: list[float]
    finish: str | None
    version: int
    prompt: "TokenScores | None" = None
    routed: str | None = None


class Answer:
    """The response to one `ApiRequest`: `body` at once, or `event` by event.

    Args:
        api_request: The request.
        tokenizer: The model's.
    """

    def __init__(self, api_request: ApiRequest, tokenizer: Tokenizer):
        self.api_request, self.tokenizer, self._fields = api_request, tokenizer, api_request.fields
        self.id = f"{'chatcmpl' if api_request.chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        decode = partial(tokenizer.decode, skip_special_tokens=True)
        keep = api_request.fields["include_stop_str_in_output"]
        self._texts = [TextStream(decode, request.sampling.stop, keep) for request in api_request.requests]
        self._num_tokens = [0] * len(api_request.requests)  # generated so far, of each request
        self._begun: set[int] = set()  # indices of requests that have returned tokens

    def body(self, chunks: Sequence[StreamChunk]) -> dict[str, Any]:
        """Return the response as a JSON object. `chunks` has one for each request, in any order."""
        in_order = sorted(chunks, key=lambda chunk: chunk.index)
        choices = [self._choice(chunk, "message") for chunk in in_order]
        return {**self._head("chat.completion"), **self._prompt(), "choices": choices, "usage": self._usage()}

    def event(self, chunk: StreamChunk) -> bytes:
        """Return the server-sent event of a chunk. Empty if it adds nothing that can be sent yet."""
        prompt = {} if self._begun else self._prompt()
        choice = self._choice(chunk, "delta")
        text = choice["delta"].get("content") if self.api_request.chat else choice["text"]
        has_tokens = self.api_request.logprobs or self._fields["return_token_ids"]
        if not (text or choice["finish_reason"] or has_tokens):
            return b""
        return server_sent_event({**self._head("chat.completion.chunk"), **prompt, "choices": [choice]})

    def last_events(self) -> bytes:
        """Return the events that end the stream."""
        if not self._fields["stream_options"].get("include_usage"):
            return DONE
        return server_sent_event({**self._head("chat.completion.chunk"), "choices": [], "usage": self._usage()}) + DONE

    def _head(self, kind: str) -> dict[str, Any]:
        kind = kind if self.api_request.chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.api_request.name}

    def _prompt(self) -> dict[str, Any]:
        """Return the prompt's tokens, which vLLM puts next to the choices of a chat, if they were requested."""
        if not self.api_request.chat or not self._fields["return_token_ids"]:
            return {}
        return {"prompt_token_ids": list(self.api_request.requests[0].prompt)}

    def _usage(self) -> dict[str, int]:
        # Each prompt has n requests in a row, and is counted once.
        one_per_prompt = self.api_request.requests[:: self._fields["n"]]
        prompt = sum(len(request.prompt) for request in one_per_prompt)
        completion = sum(self._num_tokens)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def _choice(self, chunk: StreamChunk, message_key: str) -> dict[str, Any]:
        """Return the entry of `choices` for a chunk. `message_key` is "message", or "delta" in a stream."""
        stream = self._texts[chunk.index]
        is_first = chunk.index not in self._begun
        self._begun.add(chunk.index)
        self._num_tokens[chunk.index] += len(chunk.ids)
        text = stream.push(chunk.ids, last=chunk.finish is not None)
        if self.api_request.echo:
            text = self.api_request.echo[chunk.index // self._fields["n"]] + text
        choice: dict[str, Any] = {"index": chunk.index}
        if not self.api_request.chat:
            choice["text"] = text
        elif is_first:
            choice[message_key] = {"role": "assistant", "content": text}
        else:
            choice[message_key] = {"content": text}
        choice["logprobs"] = self._logprobs(chunk) if self.api_request.logprobs else None
        choice["finish_reason"] = chunk.finish
        choice["stop_reason"] = self._stop_reason(chunk, stream)
        if self._fields["return_token_ids"]:
            choice["token_ids"] = chunk.ids
            if is_first:
                choice["prompt_token_ids"] = list(self.api_request.requests[chunk.index].prompt)
        if chunk.routed is not None:
            choice["routed_experts"] = chunk.routed
        choice["weight_version"] = chunk.version
        return choice

    def _stop_reason(self, chunk: StreamChunk, stream: TextStream) -> str | int | None:
        """Return the stop text or the stop token that ended the completion. None for an end-of-sequence token."""
        if chunk.finish != "stop" or stream.stopped is not None:
            return stream.stopped
        if chunk.ids and chunk.ids[-1] not in self.api_request.eos_ids:
            return chunk.ids[-1]
        return None

    def _logprobs(self, chunk: StreamChunk) -> dict[str, Any]:
        """Return the log-probabilities of a chunk in the format of chats or of completions."""
        tokens = [self._token(token_id) for token_id in chunk.ids]
        if self.api_request.chat:
            content = []
            for token, logprob in zip(tokens, chunk.logprobs, strict=True):
                content.append({"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []})
            return {"content": content}
        logprobs: list[float | None] = [*chunk.logprobs]
        top: list[dict[str, float] | None] = []
        for token, logprob in zip(tokens, chunk.logprobs, strict=True):
            top.append({token: logprob})
        scores = chunk.prompt
        if scores is not None:
            # The prompt comes first. Its first token has no log-probability, because nothing precedes it.
            prompt = self.api_request.requests[chunk.index].prompt
            tokens = [self._token(token_id) for token_id in prompt] + tokens
            logprobs = [None, *scores.logprobs, *logprobs]
            prompt_top: list[dict[str, float] | None] = [None]
            for token_id, logprob in zip(scores.argmax_ids, scores.max_logprobs, strict=True):
                prompt_top.append({self._token(token_id): logprob})
            top = prompt_top + top
        return {
            "tokens": tokens,
            "token_logprobs": logprobs,
            "top_logprobs": top if self.api_request.with_argmax else None,
            "text_offset": None,
        }

    def _token(self, token_id: int) -> str:
        if self._fields["return_tokens_as_token_ids"]:
            return f"token_id:{token_id}"
        return self.tokenizer.decode([token_id])


def server_sent_event(body: dict[str, Any]) -> bytes:
    r"""Return a server-sent event with a JSON object.

    Example:
        >>> server_sent_event({"a": 1})
        b'data: {"a": 1}\n\n'
    """
    return b"data: " + json.dumps(body).encode() + b"\n\n"
