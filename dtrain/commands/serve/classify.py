"""A reward model or classifier behind HTTP: texts and conversations to the outputs of its head (vLLM's `/classify`)."""

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

CLASSIFY: Table = {
    "model": TEXT,
    "input": Field(convert=texts_or_ids),
    "messages": Field(list, maximum=4096, items=Field(dict, items=MESSAGE)),
    "tools": Field(list, maximum=4096, items=Field(dict)),
    "add_special_tokens": Field(bool, True),
    **dict.fromkeys(("user", "rid", "request_id", "priority"), IGNORED),
}


class Classifier:
    """A model that computes for one caller at a time. It has the methods of a worker that `start.serve` calls.

    Attributes:
        failure: Always None: an error ends only the request.
    """

    failure: str | None = None

    def __init__(self, model: CausalLM):
        self.model = model
        self._turn = threading.Lock()
        self._closing = False

    def start(self) -> None:
        """Do nothing: the model computes on the threads of the callers."""

    def compute_scores(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return the head's outputs of texts.

        Args:
            rows: Token ids of each text.

        Returns:
            Scores, [texts, labels], as of `inference.engine.classify_rows`.

        Raises:
            ApiError: If the server is ending.
        """
        with self._turn:
            if self._closing:
                raise ApiError(503, "the server is ending")
            return classify_rows(self.model, rows, TOKENS_PER_BATCH)

    def end(self, grace: float, hurry: Callable[[], bool] = lambda: False) -> bool:
        """Refuse new requests, and wait at most `grace` seconds for the running one. Return whether it ended."""
        self._closing = True
        is_idle = self._turn.acquire(timeout=grace)
        if is_idle:
            self._turn.release()
        return is_idle


class ClassifyService(Routes):
    """The routes of a classifier: `/classify` (also under `/v1`), `/v1/models`, `/health`.

    Args:
        worker: The model.
        encoder: Reads texts and conversations as training does.
        name: Name of the model.
        names: Names of the outputs, in their order.
        key: As of `Routes`.
        hosts: As of `Routes`.
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
        """Return the body of the response to `/classify`.

        Each text has `scores`, the head's outputs, `probs`, their softmax (the sigmoid of a single output), and
        `label`, the name of the most likely output.
        """
        if fields["model"] not in (None, self.name):
            raise ApiError(404, f"the model is {self.name}, not {fields['model'][:80]}", "model")
        rows = self._rows(fields)
        scores = self.worker.compute_scores(rows)  # [texts, labels]
        probs = scores.softmax(1) if scores.shape[1] > 1 else scores.sigmoid()
        data = []
        for index, text_probs in enumerate(probs):
            data.append(
                {
                    "index": index,
                    "label": self.names[int(text_probs.argmax())],
                    "probs": text_probs.tolist(),
                    "num_classes": len(self.names),
                    "scores": scores[index].tolist(),
                }
            )
        tokens = sum(len(row) for row in rows)
        return {
            "id": f"classify-{secrets.token_hex(12)}",
            "object": "list",
            "created": int(time.time()),
            "model": self.name,
            "data": data,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0},
        }

    def _rows(self, fields: Mapping[str, Any]) -> list[list[int]]:
        """Return the token ids of each text. Raises ApiError."""
        if (fields["input"] is None) == (fields["messages"] is None):
            raise ApiError(400, "give either input (a text, token ids, or a list of them) or messages", "input")
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
                problem = f"text {index} has {len(row)} tokens, and the model reads 1 to {self.encoder.max_length}"
                raise ApiError(400, problem, "input")
        return rows

    def _ids(self, text_or_ids: str | list[int], specials: bool) -> list[int]:
        if isinstance(text_or_ids, str):
            return self.encoder.encode_text(text_or_ids) if specials else self.encoder.tokenizer.encode(text_or_ids)
        if max(text_or_ids) >= self.worker.model.config.vocab_size:
            raise ApiError(400, f"the id {max(text_or_ids)} is not in the vocabulary", "input")
        return text_or_ids


def label_names(config: Path, num_labels: int) -> list[str]:
    """Return the names of a classifier's outputs from `id2label` of its config.json, such as LABEL_0 if it has none.

    Args:
        config: Path of config.json, which an adapter does not have.
        num_labels: Number of outputs.
    """
    id2label = read_json(config).get("id2label") if config.is_file() else {}
    if not isinstance(id2label, dict):
        id2label = {}
    return [str(id2label.get(str(index), f"LABEL_{index}")) for index in range(num_labels)]


# Largest number of tokens of one forward. A longer text forms a batch of its own.
TOKENS_PER_BATCH = 1 << 14
