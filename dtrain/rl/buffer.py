"""The completions of one rollout as tensors, the same on every rank, which its updates read and a checkpoint keeps; and
the position of a run in its rollouts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from dtrain.base.batch import IGNORE, ROW_STREAMS, Batch, collate
from dtrain.data import Cursor

# Per token of a completion, in the buffer and (where its label stands, one place before) as a stream of the batch.
PER_TOKEN = ("sampling_logprobs", "old_logprobs", "reference_logprobs")


@dataclass
class Position:
    """Position of a run in its rollouts.

    rollout: their number so far; done: updates of the last one; step: optimizer steps, which is the version of the
    weights; cursor, epochs: of the data, where the next rollout's prompts begin, None before the first; checked:
    whether engine and trainer were compared.
    """

    rollout: int = 0
    done: int = 0
    step: int = 0
    cursor: Cursor | None = None
    epochs: float = 0.0
    checked: bool = False


@dataclass(frozen=True)
class Sample:
    """A completion: the ids of its prompt and its own, which of those the model drew, and their log-probabilities.

    sampled [s]: tokens of `ids` that the model drew; others are an environment's. logprobs [s]: 0 where not sampled.
    finish: stop, length, and in an environment turns or lost, which failed: what the completion is worth is unknown.
    longest: tokens of the longest turn that the model drew, infinite where one was cut. routed: of all tokens, as
    `Completion` has them.
    """

    prompt: Sequence[int]
    ids: Sequence[int]
    sampled: Sequence[bool]
    logprobs: Sequence[float]
    finish: str
    version: int | None = None
    earned: float | None = None  # in an environment
    longest: float = 0
    calls: tuple[int, int] = (0, 0)  # of tools, and how many failed
    routed: Tensor | None = field(default=None, compare=False)
    metrics: Mapping[str, float] = field(default_factory=dict)  # the environment's


@dataclass
class Buffer:
    """N sequences, each a prompt and its completion, concatenated: T tokens in all.

    lengths [N] int64; tokens [T] int64; trained [T] bool; advantages [N] float64; counted [N] bool: takes part in the
    updates at all. per_token: [T] float64 each, 0 where a token is not trained. routed: where tokens went in the
    engine, [T, layers, k] int16 (`batch.STREAMS`), None where their own router decides.
    """

    lengths: Tensor
    tokens: Tensor
    trained: Tensor
    advantages: Tensor
    counted: Tensor
    per_token: dict[str, Tensor] = field(default_factory=dict)
    routed: Tensor | None = None

    @classmethod
    def of(cls, samples: Sequence[Sample], advantages: Tensor, counted: Tensor, trains: Tensor) -> "Buffer":
        """Return the buffer of N samples. counted, trains [N] bool: whether a sample takes part, and whether its tokens
        are trained there. advantages [N]."""
        tokens, trained, logprobs = [], [], []
        for sample, is_trained in zip(samples, trains.tolist(), strict=True):
            tokens += [*sample.prompt, *sample.ids]
            trained += [False] * len(sample.prompt) + [is_trained and drawn for drawn in sample.sampled]
            logprobs += [0.0] * len(sample.prompt) + list(sample.logprobs)
        return cls(
            torch.tensor([len(sample.prompt) + len(sample.ids) for sample in samples]),
            torch.tensor(tokens),
            torch.tensor(trained),
            advantages.double(),
            counted,
            {"sampling_logprobs": torch.tensor(logprobs, dtype=torch.float64)},
            _routed(samples, len(tokens)),
        )

    @classmethod
    def empty(
        cls, sequences: int, tokens: int, per_token: Sequence[str], routed: Sequence[int] | None = None
    ) -> "Buffer":
        """Return a buffer of that size without values, to load into. per_token: names of its streams; routed: layers
        and k, where it has routed experts."""
        return cls(
            torch.zeros(sequences, dtype=torch.int64),
            torch.zeros(tokens, dtype=torch.int64),
            torch.zeros(tokens, dtype=torch.bool),
            torch.zeros(sequences, dtype=torch.float64),
            torch.zeros(sequences, dtype=torch.bool),
            {name: torch.zeros(tokens, dtype=torch.float64) for name in per_token},
            None if routed is None else torch.full((tokens, *routed), -1, dtype=torch.int16),
        )

    def __len__(self) -> int:
        return len(self.lengths)

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor by name, [N], [T] and [T, ..]."""
        names = ("lengths", "tokens", "trained", "advantages", "counted", *(() if self.routed is None else ("routed",)))
        return {name: getattr(self, name) for name in names} | self.per_token

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return these sequences as rows [n, S] with the streams that the loss reads."""
        streams, bounds = (*ROW_STREAMS, "advantages", *self.per_token), list(pairwise(self._offsets()))
        batch = collate([self._row(index, *bounds[index]) for index in indices], streams)
        if self.routed is not None:
            shape = (*batch["input_ids"].shape, *self.routed.shape[1:])
            batch["routed_experts"] = self.routed.new_full(shape, -1)
            for row, index in zip(batch["routed_experts"], indices, strict=True):
                start, end = bounds[index]
                row[: end - start] = self.routed[start:end]
        return batch

    def flat(self, values: Tensor, indices: Sequence[int]) -> Tensor:
        """Return `values` [n, S], computed at the positions of the labels of `batch(indices)`, as float64 [tokens of
        these sequences]: each at the token that its label names."""
        rows = zip(values, self.lengths[list(indices)].tolist(), strict=True)
        shifted = [torch.cat([row.new_zeros(1), row[: length - 1]]) for row, length in rows]
        return torch.cat(shifted).double() if shifted else torch.zeros(0, dtype=torch.float64)

    def place(self, name: str, values: Tensor, order: Sequence[int]) -> None:
        """Keep `values` [T] of stream `name`, which hold the sequences in `order`."""
        kept = torch.zeros_like(self.tokens, dtype=torch.float64)
        offsets = self._offsets()
        for index, piece in zip(order, values.split(self.lengths[list(order)].tolist()), strict=True):
            kept[offsets[index] : offsets[index + 1]] = piece
        self.per_token[name] = torch.where(self.trained, kept, 0)

    def _offsets(self) -> list[int]:
        return [0, *self.lengths.cumsum(0).tolist()]

    def _row(self, index: int, start: int, end: int) -> dict[str, Tensor]:
        tokens, trained = self.tokens[start:end], self.trained[start:end]

        def before(values: Tensor, fill: float) -> Tensor:
            """Return `values` shifted one position to the left, where the label stands."""
            return torch.cat([values[1:], values.new_full((1,), fill)])

        labels = before(torch.where(trained, tokens, IGNORE), IGNORE)
        row = {
            "input_ids": tokens,
            "labels": labels,
            "position_ids": torch.arange(len(tokens)),
            "seq_ids": torch.zeros_like(tokens),
            "advantages": torch.where(labels == IGNORE, 0.0, self.advantages[index]),
        }
        return row | {name: before(values[start:end], 0.0) for name, values in self.per_token.items()}


def _routed(samples: Sequence[Sample], tokens: int) -> Tensor | None:
    """Return the routed experts of all samples [T, layers, k]; None where no sample has them."""
    routed = [sample.routed for sample in samples if sample.routed is not None]
    if not routed:
        return None
    joined = torch.cat(routed)
    if len(joined) != tokens:
        raise ValueError(f"the samples' experts are those of {len(joined)} tokens, and they have {tokens}")
    return joined
