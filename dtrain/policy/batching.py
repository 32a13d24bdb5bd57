"""Micro-batches of a caller's batch.

At the entry (`check_batch`) each stream is checked to be the same on every dp rank, or there is an error on all. A
stream
[n, S, ..] has a value for each token: it is cut, packed and padded with the rows. Any other [n, ..] has one for each
row, and stays beside it. The shape decides, so a row's own vector that may be as long as the rows is given as
[n, 1, K]. Ranks may have any number of rows, so a rank without rows learns from the others what streams there are.

Then a step's rows become micro-batches (`build_micro_batches`): a number of rows each, as many as a number of tokens
allows, or
packed. What a loss sees differs only in shape: the documents, their tokens and their order stay.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dtrain.base.batch import IGNORE_INDEX, PADDING_SEQ_ID, ROW_STREAMS, STREAMS, Batch, RowImages, complete_batch, trim
from dtrain.base.randomness import random_key
from dtrain.base.ranks import Ranks
from dtrain.data.rows.rows import pack

RESERVED_STREAMS = ("document_ids", "label_index")  # names that a loss finds in its micro-batch beside the caller's


@dataclass(frozen=True)
class StreamSpec:
    """Kind of a stream on one rank: its dtype, and its shape without n. per_token: of a row of `length` tokens."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    length: int

    @property
    def per_token(self) -> bool:
        return self.shape[:1] == (self.length,)

    @property
    def key(self) -> tuple[Any, ...]:
        """Key that is equal for streams that can be one."""
        return (self.dtype, True, *self.shape[1:]) if self.per_token else (self.dtype, False, *self.shape)


class StepRows(NamedTuple):
    """This dp rank's rows of one optimizer step.

    Attributes:
        batch: Every stream of the rows, [n, S, ..], or [n, ..] for a stream in `per_row`.
        per_row: Names of the streams that have a value for each row instead of each token.
        max_rows: The largest number of rows that any dp rank has in this step.
        images: Images of the rows; None if the caller passes none.
    """

    batch: Batch
    per_row: frozenset[str]
    max_rows: int
    images: RowImages | None


class CheckedBatch(NamedTuple):
    """A complete batch (`batch.complete_batch`), whose streams have the same names, dtypes and kinds on every dp rank.

    Attributes:
        batch: Every stream, [n, S, ..] or [n, ..]. Streams per token have their pad value on padding.
        per_row: Names of the streams that have a value for each row instead of each token.
        max_rows: The largest number of rows that any dp rank has.
        sample_mask: Which rows `sample_mask` includes, bool [n]; None for all.
        images: Images of the rows; None if the caller passes none.
    """

    batch: Batch
    per_row: frozenset[str]
    max_rows: int
    sample_mask: Tensor | None
    images: RowImages | None = None

    def split_into_steps(self, rows_per_step: int | None = None) -> list[StepRows]:
        """Split the rows into optimizer steps, as many on every rank, without the rows that `sample_mask` excludes.

        Args:
            rows_per_step: Rows of this dp rank in one step. None makes one step of the whole batch.
        """
        total = max(self.max_rows, 1)
        size = rows_per_step or total
        return [self._step(start, size) for start in range(0, total, size)]

    def _step(self, start: int, size: int) -> StepRows:
        rows = slice(start, start + size)
        max_rows = min(size, self.max_rows - start)
        if self.sample_mask is None:
            batch = {name: tensor[rows] for name, tensor in self.batch.items()}
            images = None if self.images is None else self.images.select(range(len(self.images))[rows])
            return StepRows(batch, self.per_row, max_rows, images)
        kept = torch.arange(len(self.sample_mask))[rows][self.sample_mask[rows]]
        batch = {name: tensor[kept] for name, tensor in self.batch.items()}
        images = None if self.images is None else self.images.select(kept.tolist())
        return StepRows(batch, self.per_row, max_rows, images)


def check_batch(batch: Mapping[str, Any], dp: DeviceMesh, vocab_size: int) -> CheckedBatch:
    """Return this dp rank's rows of a caller's batch, checked.

    Collective: an all-reduce of three integers, and where the ranks' streams are not alike an all-gather of what they
    are. Raises ValueError, on every dp rank alike, for what `batch.complete_batch` refuses, a token id outside the
    vocabulary, a stream that is no tensor or has no row for each of the ids', one that other ranks with rows lack, and
    one whose dtype or shape differs between them.
    """
    kinds: dict[str, StreamSpec] = {}
    full: Batch = {}
    problem = None
    images, batch = batch.get("images"), {name: stream for name, stream in batch.items() if name != "images"}
    try:
        full = complete_batch(batch)
        kinds = _kinds(full, vocab_size)
        if images is not None and len(images) != len(full["input_ids"]):
            raise ValueError(f"images of {len(images)} rows beside {len(full['input_ids'])} of input_ids")
    except ValueError as error:
        problem = str(error)
    rows = len(full["input_ids"]) if full else 0
    max_rows, is_agreed = rows, True
    if dp.size() > 1:
        digest = random_key(problem or sorted((name, *kind.key) for name, kind in kinds.items())) % 2**62
        # max(x) == -max(-x) exactly if all ranks have the same x, so one all-reduce answers both questions.
        largest = all_reduce(torch.tensor([rows, digest, -digest]), dp, dist.ReduceOp.MAX)
        max_rows = int(largest[0])
        is_agreed = bool(largest[1] == -largest[2])
    if not is_agreed:
        everyone = Ranks(dp.get_group()).gather_results(lambda: (problem, rows, kinds))
        problem, kinds = _resolve(everyone)
    if problem is not None:
        raise ValueError(problem)
    for name in full.keys() - kinds.keys() - set(ROW_STREAMS):  # of a rank without rows
        del full[name]
    per_row = frozenset(name for name, kind in kinds.items() if not kind.per_token)
    padding = full["seq_ids"] == PADDING_SEQ_ID
    for name, kind in kinds.items():
        tail = kind.shape if name in per_row else (full["input_ids"].shape[1], *kind.shape[1:])
        stream = full[name] if rows else torch.empty((0, *tail), dtype=kind.dtype)
        if name not in per_row and bool(padding.any()):
            stream = stream.masked_fill(padding.view(*padding.shape, *[1] * (stream.dim() - 2)), _pad_of(name))
        full[name] = stream
    sample_mask = batch["sample_mask"].cpu().bool() if "sample_mask" in batch else None
    return CheckedBatch(full, per_row, max_rows, sample_mask, images)


def _kinds(batch: Mapping[str, Any], vocab_size: int) -> dict[str, StreamSpec]:
    """Return the kind of every stream beside the rows' own. Raises ValueError."""
    ids, labels = batch["input_ids"], batch["labels"]
    for name, values in (
        ("input_ids", ids),
        ("labels", labels[labels != IGNORE_INDEX]),
    ):  # tensor parallel would take 0
        if values.numel() and not 0 <= int(values.min()) <= int(values.max()) < vocab_size:
            low, high = int(values.min()), int(values.max())
            raise ValueError(f"{name} are from {low} to {high}, and the model has {vocab_size} tokens")
    kinds = {}
    for name, value in batch.items():
        if name in ROW_STREAMS:
            continue
        if not isinstance(value, Tensor) or value.is_nested or value.layout != torch.strided:
            kind = value.layout if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"stream {name} is a {kind}; streams are dense tensors [n, S, ..] or [n, ..]")
        if name in RESERVED_STREAMS:
            raise ValueError(f"stream {name}: the name is taken, give it another")
        if value.shape[:1] != ids.shape[:1]:
            raise ValueError(
                f"stream {name} is {list(value.shape)} beside input_ids {list(ids.shape)}: its first axis is the rows"
            )
        kinds[name] = StreamSpec(value.dtype, tuple(value.shape[1:]), ids.shape[1])
    return kinds


def _resolve(everyone: list[tuple[str | None, int, dict[str, StreamSpec]]]) -> tuple[str | None, dict[str, StreamSpec]]:
    """Return the problem, None without, and the kinds of the streams on all ranks; ranks without rows play no part."""
    problems = [f"dp rank {rank}: {problem}" for rank, (problem, *_) in enumerate(everyone) if problem is not None]
    if problems:
        return "\n".join(problems), {}
    kinds_of = {rank: kinds for rank, (_, rows, kinds) in enumerate(everyone) if rows}
    agreed = {}
    for name in dict.fromkeys(name for kinds in kinds_of.values() for name in kinds):
        without = [rank for rank, kinds in kinds_of.items() if name not in kinds]
        if without:
            return f"stream {name} is missing on dp rank {without[0]}, which has rows", {}
        kinds = {rank: kinds[name] for rank, kinds in kinds_of.items()}
        first = next(iter(kinds.values()))
        if len({kind.key for kind in kinds.values()}) == 1:
            agreed[name] = first
        elif len({(kind.dtype, kind.shape) for kind in kinds.values()}) == 1:  # as long as some ranks' rows by chance
            agreed[name] = StreamSpec(first.dtype, first.shape, -1)
        else:
            shown = ", ".join(f"[n, {str(kind.shape)[1:-1]}] {kind.dtype} on dp rank {r}" for r, kind in kinds.items())
            return f"stream {name} is not the same on every rank: {shown}", {}
    return None, agreed


@dataclass(frozen=True)
class Fixed:
    """Micro-batches of `rows` rows in the batch's order."""

    rows: int
    is_packed = False

    def plan(self, lengths: Sequence[int]) -> list[list[int]]:
        """Return the rows of each micro-batch."""
        indices = list(range(len(lengths)))
        return [indices[start : start + self.rows] for start in range(0, len(indices), self.rows)]


@dataclass(frozen=True)
class DynamicShapes:
    """Micro-batches of rows of like length, as many as fill `tokens` with their padding; a longer row stands alone.

    rows_per_sample: rows that follow one another and stay neighbours, as long as their longest."""

    tokens: int
    rows_per_sample: int = 1
    is_packed = False

    def plan(self, lengths: Sequence[int]) -> list[list[int]]:
        plan: list[list[int]] = []
        size, widest = self.rows_per_sample, 0
        samples = [range(start, min(start + size, len(lengths))) for start in range(0, len(lengths), size)]
        longest = [max(lengths[row] for row in sample) for sample in samples]
        for index in sorted(range(len(samples)), key=lambda index: (-longest[index], index)):
            if plan and (len(plan[-1]) + len(samples[index])) * widest <= self.tokens:
                plan[-1] += samples[index]
            else:
                plan.append([*samples[index]])
                widest = longest[index]
        return plan


@dataclass(frozen=True)
class Packed:
    """Micro-batches of rows packed into a single row of up to `tokens`; each document stays blind to the others. A
    longer row stands alone."""

    tokens: int
    is_packed = True

    def plan(self, lengths: Sequence[int]) -> list[list[int]]:
        fits = [index for index, length in enumerate(lengths) if length <= self.tokens]
        alone = [[index] for index, length in enumerate(lengths) if length > self.tokens]
        return alone + [[fits[index] for index in members] for members in pack([lengths[i] for i in fits], self.tokens)]


Batching = Fixed | DynamicShapes | Packed


def all_reduce(values: Tensor, mesh: DeviceMesh, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Return `values` [..], reduced in place over the ranks of a one-dimensional mesh, as its dp ranks, which hold
    different rows. One all-reduce."""
    if mesh.size() > 1:
        dist.all_reduce(values, op, group=mesh.get_group())
    return values


def gather_rows(rows: Tensor, mesh: DeviceMesh) -> tuple[Tensor, int]:
    """Return host rows [n, ..] of every rank of a one-dimensional mesh, in the ranks' order, and where this rank's
    begin; n may differ. Two all-gathers."""
    if mesh.size() == 1:
        return rows, 0
    group = mesh.get_group()
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(mesh.size())]
    dist.all_gather(counts, torch.tensor([len(rows)]), group=group)
    lengths = [int(count) for count in counts]
    parts = [rows.new_zeros(max(lengths), *rows.shape[1:]) for _ in lengths]
    padded = torch.cat([rows, rows.new_zeros(max(lengths) - len(rows), *rows.shape[1:])])
    dist.all_gather(parts, padded, group=group)
    joined = torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])
    return joined, sum(lengths[: mesh.get_local_rank()])


def row_lengths(batch: Batch) -> list[int]:
    """Return the number of tokens of each row, without the padding on the right. Host tensors only."""
    return (batch["seq_ids"] != PADDING_SEQ_ID).sum(1).tolist()


class MicroBatch(dict[str, Tensor]):
    """Rows that one forward takes. per_row: streams with a value for each row, [n, ..]; the others are [n, S, ..].
    images: of the rows; `image_features` then counts on through all of them."""

    def __init__(self, streams: Mapping[str, Tensor], per_row: Collection[str] = (), images: RowImages | None = None):
        super().__init__(streams)
        self.per_row, self.images = frozenset(per_row), images


def split_into_micro_batches(
    rows: Batch,
    batching: Batching,
    max_rows: int,
    dp: DeviceMesh,
    per_row: Collection[str] = (),
    images: RowImages | None = None,
) -> tuple[list[MicroBatch], list[list[int]]]:
    """Return the micro-batches of this dp rank's `rows`, as many on every rank, and the indices of the rows that each
    holds. max_rows: of all ranks; per_row: streams with a value for each row; images: of the rows. One all-reduce where
    the rows of a micro-batch vary."""
    plan = batching.plan(row_lengths(rows))
    if isinstance(batching, Fixed):
        count = -(-max_rows // batching.rows)
    else:
        count = int(all_reduce(torch.tensor([len(plan)]), dp, dist.ReduceOp.MAX))
    return build_micro_batches(rows, plan, max(1, count), batching.is_packed, per_row, images), plan


def build_micro_batches(
    batch: Batch,
    plan: Sequence[Sequence[int]],
    count: int,
    is_packed: bool,
    per_row: Collection[str] = (),
    images: RowImages | None = None,
) -> list[MicroBatch]:
    """Return the micro-batches of `plan`, then padding up to `count` of them: every rank runs as many collectives.

    Packed rows keep their streams of `per_row` (and any [n]) as they are, one value behind the other.
    """
    if len(plan) > count:
        raise ValueError(f"{len(plan)} micro-batches do not fit into {count}")
    per_row = {name for name, tensor in batch.items() if name in per_row or tensor.dim() == 1}
    made = []
    for rows in plan:
        some = {name: tensor[list(rows)] for name, tensor in batch.items()}
        if "image_features" in some:
            some["image_features"] = _counted_on(some["image_features"])
        streams = {name: some[name] for name in batch if name not in per_row}
        streams = _joined(streams) if is_packed and len(rows) > 1 else trim(streams)
        made.append(MicroBatch(some | streams, per_row, None if images is None else images.select(rows)))
    return made + [_padding(batch, per_row) for _ in range(count - len(plan))]


def merge_micro_batch_values(
    values: Sequence[Tensor], batch: Batch, plan: Sequence[Sequence[int]], is_packed: bool
) -> Tensor:
    """Return the values of micro-batches, [b, s, ..] each, where the batch has the tokens: [n, S, ..], 0 on padding."""
    count, length = batch["input_ids"].shape
    out = values[0].new_zeros(count, length, *values[0].shape[2:])
    lengths = row_lengths(batch)
    for part, rows in zip(values, plan, strict=False):  # what is beyond the plan was padding
        if is_packed and len(rows) > 1:
            for row, piece in zip(rows, part[0].split([lengths[row] for row in rows]), strict=True):
                out[row, : lengths[row]] = piece
        else:
            out[list(rows), : part.shape[1]] = part
    return out


def _joined(batch: Batch) -> Batch:
    real = batch["seq_ids"] != PADDING_SEQ_ID  # [b, S]
    per_row = batch["seq_ids"].amax(1, keepdim=True) + 1
    seq_ids = batch["seq_ids"] + per_row.cumsum(0) - per_row
    return {name: tensor[real][None] for name, tensor in batch.items()} | {"seq_ids": seq_ids[real][None]}


def _counted_on(features: Tensor) -> Tensor:
    """Return the numbers of features [n, S] within their rows as numbers within all of the rows, -1 as it is."""
    counts = (features >= 0).sum(1)
    return torch.where(features >= 0, features + (counts.cumsum(0) - counts)[:, None], features)


def _padding(batch: Batch, per_row: Collection[str]) -> MicroBatch:
    streams = {}
    for name, tensor in batch.items():
        tail = tensor.shape[1:] if name in per_row else (1, *tensor.shape[2:])
        streams[name] = tensor.new_full((1, *tail), 0 if name in per_row else _pad_of(name))
    return MicroBatch(streams, per_row)


def _pad_of(name: str) -> float | int:
    return (STREAMS[name].pad if name in STREAMS else 0) or 0
