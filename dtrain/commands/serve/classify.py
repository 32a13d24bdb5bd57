"""A reward model or classifier behind HTTP: texts and conversations to the outputs of its head, in vLLM's words
(`/classify`)."""

import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dtrain.base.json_files import read_json
from dtrain.commands.serve.protocol import IGNORED, MESSAGE, TEXT, ApiError, Field, Table, api_errors, texts_or_ids
from dtrain.commands.serve.routes import Routes
from dtrain.data.formats.formats import read_messages, read_tools
from dtrain.data.formats.pairs import PairEncoder
from dtrain.inference.engine import classify_rows
from dtrain.models.common.decoder import CausalLM

TOGETHER = 1 << 14  # tokens of one forward, beyond a single text
CLASSIFY: Table = {
    "model": TEXT,
    "input": Field(use=texts_or_ids),
    "messages": Field(list, maximum=4096, of=Field(dict, of=MESSAGE)),
    "tools": Field(list, maximum=4096, of=Field(dict)),
    "add_special_tokens": Field(bool, True),
    **dict.fromkeys(("user", "rid", "request_id", "priority"), IGNORED),
}


class Classifier:
    """Model that one caller at a time computes with; `start`, `end` and `failure` are as `server.serve` needs them."""

    failure: str | None = None

    def __init__(self, model: CausalLM):
        self.model = model
        self._turn = threading.Lock()
        self._closing = False

    def start(self) -> None:
        """Do nothing: callers' threads compute."""

    def rate(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return `inference.scores.rate` of the rows. Raises ApiError if the server is ending."""
        with self._turn:
            if self._closing:
                raise ApiError(503, "the server is ending")
            return classify_rows(self.model, rows, TOGETHER)

    def end(self, grace: float, hurry: Callable[[], bool] = lambda: False) -> bool:
        """Take no more work in, and wait `grace` seconds at most for running work. Return whether that ended."""
        self._closing = True
        is_idle = self._turn.acquire(timeout=grace)
        if is_idle:
            self._turn.release()
        return is_idle


class ClassifyService(Routes):
    """The routes of a classifier: `/classify` (also under `/v1`), `/v1/models`, `/health`.

    encoder: as training reads texts and conversations. names: of the outputs, in their order.
    """

    updates = None

    def __init__(
        self, worker: Classifier, encoder: PairEncoder, name: str, names: list[str], key: str | None, hosts: set[str]
    ):
        super().__init__(key, hosts)
        self.worker, self.encoder, self.name, self.names = worker, encoder, name, names
        self.get = {
            "/health": lambda: {"status": "ok"},
            "/v1/models": lambda: self.models(name, encoder.max_length),
        }
        self.act = dict.fromkeys(("/classify", "/v1/classify"), (CLASSIFY, self.classify))

    def classify(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return for each text: `scores`, the head's outputs; `probs`, their softmax, of one output the sigmoid;
        `label`, the likeliest output's name."""
        if fields["model"] not in (None, self.name):
            raise ApiError(404, f"the model is {self.name}, not {fields['model'][:80]}", "model")
        rows = self._rows(fields)
        scores = self.worker.rate(rows)  # [n, labels]
        probs = scores.softmax(1) if scores.shape[1] > 1 else scores.sigmoid()
        data = [
            {"index": index, "label": self.names[int(of_text.argmax())], "probs": of_text.tolist()}
            | {"num_classes": len(self.names), "scores": scores[index].tolist()}
            for index, of_text in enumerate(probs)
        ]
        tokens = sum(map(len, rows))
        head = {"id": f"classify-{secrets.token_hex(12)}", "object": "list", "created": int(time.time())}
        usage = {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0}
        return {**head, "model": self.name, "data": data, "usage": usage}

    def _rows(self, fields: Mapping[str, Any]) -> list[list[int]]:
        """Return the ids of each text. Raises ApiError."""
        if (fields["input"] is None) == (fields["messages"] is None):
            raise ApiError(400, "give input (a text, token ids, or a list of either) or messages, one of them", "input")
        with api_errors("input" if fields["messages"] is None else "messages"):
            if fields["messages"] is not None:
                if self.encoder.template is None:
                    raise ApiError(400, f"{self.name} has no chat template; give a text as input", "messages")
                messages, _ = read_messages(fields["messages"], "messages")
                rows = [self.encoder.encode_conversation(messages, read_tools(fields))]
            else:
                rows = [self._ids(text_or_ids, fields["add_special_tokens"]) for text_or_ids in fields["input"]]
        for index, row in enumerate(rows):
            if not 0 < len(row) <= self.encoder.max_length:
                what = f"text {index} has {len(row)} tokens, and the model reads from 1 to {self.encoder.max_length}"
                raise ApiError(400, what, "input")
        return rows

    def _ids(self, text_or_ids: str | list[int], specials: bool) -> list[int]:
        if isinstance(text_or_ids, str):
            return self.encoder.encode_text(text_or_ids) if specials else self.encoder.tokenizer.encode(text_or_ids)
        if max(text_or_ids) >= self.worker.model.config.vocab_size:
            raise ApiError(400, f"the id {max(text_or_ids)} is beyond the vocabulary", "input")
        return text_or_ids


def label_names(config: Path, labels: int) -> list[str]:
    """Return the outputs' names by the id2label of a config.json; an adapter has none."""
    named = read_json(config).get("id2label") if config.is_file() else {}
    named = named if isinstance(named, dict) else {}
    return [str(named.get(str(index), f"LABEL_{index}")) for index in range(labels)]
