"""How a step's rows become micro-batches: a number of rows each, as many as a number of tokens allows, or packed.

What a loss sees differs only in shape: the documents, their tokens and their order within a micro-batch's rows stay.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from dtrain.batch import PADDING_DOCUMENT, STREAMS, Batch, trim
from dtrain.data.packing import pack


@dataclass(frozen=True)
class Fixed:
    """`rows` rows in the batch's order."""

    rows: int
    packs = False

    def plan(self, lengths: Sequence[int]) -> list[list[int]]:
        """The rows of each micro-batch."""
        indices = list(range(len(lengths)))
        return [indices[start : start + self.rows] for start in range(0, len(indices), self.rows)]


@dataclass(frozen=True)
class DynamicShapes:
    """Rows of like length together, as many as fill `tokens` with their padding; a longer row stands alone."""

    tokens: int
    packs = False

    def plan(self, lengths: Sequence[int]) -> list[list[int]]:
        found: list[list[int]] = []
        for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
            if found and (len(found[-1]) + 1) * lengths[found[-1][0]] <= self.tokens:
                found[-1].append(index)
            else:
                found.append([index])
        return found


@dataclass(frozen=True)
class Packed:
    """Rows one behind the other in a single row of up to `tokens`; each document stays blind to the others. A longer
    row stands alone."""

    tokens: int
    packs = True

    def plan(self, lengths: Sequence[int]) -> list[list[int]]:
        fits = [index for index, length in enumerate(lengths) if length <= self.tokens]
        alone = [[index] for index, length in enumerate(lengths) if length > self.tokens]
        return alone + [[fits[place] for place in members] for members in pack([lengths[i] for i in fits], self.tokens)]


Batching = Fixed | DynamicShapes | Packed


def row_lengths(batch: Batch) -> list[int]:
    """Tokens of each row, the padding on the right not counted. Host tensors only."""
    return (batch["seq_ids"] != PADDING_DOCUMENT).sum(1).tolist()


class MicroBatch(dict[str, Tensor]):
    """Rows that one forward takes. by_row: streams with a value for each row, [n, ..]; the others are [n, S, ..]."""

    def __init__(self, streams: Mapping[str, Tensor], by_row: Collection[str] = ()):
        super().__init__(streams)
        self.by_row = frozenset(by_row)


def assemble(
    batch: Batch, plan: Sequence[Sequence[int]], count: int, packs: bool, by_row: Collection[str] = ()
) -> list[MicroBatch]:
    """The micro-batches of `plan`, and padding up to `count` of them, so that every rank runs as many collectives.

    Packed rows keep their streams of `by_row` (and any [n]) as they are, one value behind the other.
    """
    if len(plan) > count:
        raise ValueError(f"{len(plan)} micro-batches do not fit into {count}")
    by_row = {name for name, tensor in batch.items() if name in by_row or tensor.dim() == 1}
    made = []
    for rows in plan:
        some = {name: tensor[list(rows)] for name, tensor in batch.items()}
        streams = {name: some[name] for name in batch if name not in by_row}
        streams = _joined(streams) if packs and len(rows) > 1 else trim(streams)
        made.append(MicroBatch(some | streams, by_row))
    return made + [_padding(batch, by_row) for _ in range(count - len(plan))]


def scatter(values: Sequence[Tensor], batch: Batch, plan: Sequence[Sequence[int]], packs: bool) -> Tensor:
    """What was computed of each micro-batch, [b, s, ..] each, in the batch's own places: [n, S, ..], 0 on padding."""
    count, length = batch["input_ids"].shape
    out = values[0].new_zeros(count, length, *values[0].shape[2:])
    lengths = row_lengths(batch)
    for part, rows in zip(values, plan, strict=False):  # what is beyond the plan was padding
        if packs and len(rows) > 1:
            for row, piece in zip(rows, part[0].split([lengths[row] for row in rows]), strict=True):
                out[row, : lengths[row]] = piece
        else:
            out[list(rows), : part.shape[1]] = part
    return out


def _joined(batch: Batch) -> Batch:
    """All rows of a batch as one, without their padding, the documents numbered on."""
    real = batch["seq_ids"] != PADDING_DOCUMENT  # [b, S]
    per_row = batch["seq_ids"].amax(1, keepdim=True) + 1
    seq_ids = batch["seq_ids"] + per_row.cumsum(0) - per_row
    return {name: tensor[real][None] for name, tensor in batch.items()} | {"seq_ids": seq_ids[real][None]}


def _padding(batch: Batch, by_row: Collection[str]) -> MicroBatch:
    """A row of one token of padding: it trains nothing."""
    streams = {}
    for name, tensor in batch.items():
        tail = tensor.shape[1:] if name in by_row else (1, *tensor.shape[2:])
        pad = STREAMS[name].pad if name in STREAMS and name not in by_row else 0
        streams[name] = tensor.new_full((1, *tail), pad or 0)
    return MicroBatch(streams, by_row)
