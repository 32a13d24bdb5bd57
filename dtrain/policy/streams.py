"""A caller's batch at the door of the policy: what each stream is, the same on every dp rank, or an error on all.

A stream [n, S, ..] has a value for each token: it is cut, packed and padded with the rows. Any other [n, ..] has one
for each row, and stays beside it. The shape decides, so a row's own vector that may be as long as the rows is given as
[n, 1, K]. Ranks may have any number of rows, so a rank without rows learns from the others what streams there are.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dtrain.batch import IGNORE, PADDING_DOCUMENT, ROW_STREAMS, STREAMS, Batch, complete
from dtrain.checkpoint.ranks import Ranks
from dtrain.randomness import key

OWN = ("document_ids", "label_index")  # names that a loss finds in its micro-batch beside the caller's


@dataclass(frozen=True)
class Kind:
    """A stream of one rank: its dtype, and its shape without n. per_token: of a row of `length` tokens."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    length: int

    @property
    def per_token(self) -> bool:
        return self.shape[:1] == (self.length,)

    @property
    def key(self) -> tuple[Any, ...]:
        """The same for streams that can be one."""
        return (self.dtype, True, *self.shape[1:]) if self.per_token else (self.dtype, False, *self.shape)


class Taken(NamedTuple):
    """A batch in full (`batch.complete`), streams of the same names, dtypes and kinds on every dp rank.

    by_row: the streams with a value for each row; the others are per token, with their pad value on padding. most_rows:
    of all dp ranks. counted [n]: the rows that sample_mask leaves in, None for all."""

    batch: Batch
    by_row: frozenset[str]
    most_rows: int
    counted: Tensor | None


def take(batch: Mapping[str, Any], group: dist.ProcessGroup | None, vocab_size: int) -> Taken:
    """This dp rank's rows of a caller's batch, checked. group: the dp ranks, None for one.

    Collective: an all-reduce of three integers, and where the ranks' streams are not alike an all-gather of what they
    are. Raises ValueError, on every dp rank alike, for what `batch.complete` refuses, a token id outside the
    vocabulary, a stream that is no tensor or has no row for each of the ids', one that other ranks with rows lack, and
    one whose dtype or shape differs between them.
    """
    kinds: dict[str, Kind] = {}
    full, problem = None, None
    try:
        full = complete(batch)
        kinds = _kinds(full, vocab_size)
    except ValueError as error:
        problem = str(error)
    rows = 0 if full is None else len(full["input_ids"])
    most_rows, is_agreed = rows, True
    if group is not None:
        print_of = (
            key(problem or sorted((name, *kind.key) for name, kind in kinds.items())) % 2**62
        )  # tells streams apart
        told = torch.tensor([rows, print_of, -print_of])
        dist.all_reduce(told, dist.ReduceOp.MAX, group=group)
        most_rows, is_agreed = int(told[0]), bool(told[1] == -told[2])
    if not is_agreed:
        everyone = Ranks(group).every(lambda: (problem, rows, kinds))
        problem, kinds = _resolve(everyone)
    if problem is not None:
        raise ValueError(problem)
    for name in full.keys() - kinds.keys() - set(ROW_STREAMS):  # of a rank without rows
        del full[name]
    by_row = frozenset(name for name, kind in kinds.items() if not kind.per_token)
    padding = full["seq_ids"] == PADDING_DOCUMENT
    for name, kind in kinds.items():
        tail = kind.shape if name in by_row else (full["input_ids"].shape[1], *kind.shape[1:])
        stream = full[name] if rows else torch.empty((0, *tail), dtype=kind.dtype)
        if name not in by_row and bool(padding.any()):
            pad = STREAMS[name].pad if name in STREAMS else 0
            stream = stream.masked_fill(padding.view(*padding.shape, *[1] * (stream.dim() - 2)), pad)
        full[name] = stream
    counted = batch["sample_mask"].cpu().bool() if "sample_mask" in batch else None
    return Taken(full, by_row, most_rows, counted)


def _kinds(batch: Mapping[str, Any], vocab_size: int) -> dict[str, Kind]:
    """Of every stream beside the rows' own. Raises ValueError."""
    ids, labels = batch["input_ids"], batch["labels"]
    for name, values in (("input_ids", ids), ("labels", labels[labels != IGNORE])):  # tensor parallel would take 0
        if values.numel() and not 0 <= int(values.min()) <= int(values.max()) < vocab_size:
            low, high = int(values.min()), int(values.max())
            raise ValueError(f"{name} are from {low} to {high}, and the model has {vocab_size} tokens")
    found = {}
    for name, value in batch.items():
        if name in ROW_STREAMS:
            continue
        if not isinstance(value, Tensor) or value.is_nested or value.layout != torch.strided:
            kind = value.layout if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"stream {name} is a {kind}; streams are dense tensors [n, S, ..] or [n, ..]")
        if name in OWN:
            raise ValueError(f"stream {name}: the name is taken, give it another")
        if value.shape[:1] != ids.shape[:1]:
            raise ValueError(
                f"stream {name} is {list(value.shape)} beside input_ids {list(ids.shape)}: its first axis is the rows"
            )
        found[name] = Kind(value.dtype, tuple(value.shape[1:]), ids.shape[1])
    return found


def _resolve(everyone: list[tuple[str | None, int, dict[str, Kind]]]) -> tuple[str | None, dict[str, Kind]]:
    """What is wrong, and the kinds that the streams have on all ranks; ranks without rows have no say."""
    problems = [f"dp rank {rank}: {problem}" for rank, (problem, *_) in enumerate(everyone) if problem is not None]
    if problems:
        return "\n".join(problems), {}
    told = {rank: kinds for rank, (_, rows, kinds) in enumerate(everyone) if rows}
    agreed = {}
    for name in dict.fromkeys(name for kinds in told.values() for name in kinds):
        without = [rank for rank, kinds in told.items() if name not in kinds]
        if without:
            return f"stream {name} is missing on dp rank {without[0]}, which has rows", {}
        kinds = {rank: kinds[name] for rank, kinds in told.items()}
        first = next(iter(kinds.values()))
        if len({kind.key for kind in kinds.values()}) == 1:
            agreed[name] = first
        elif len({(kind.dtype, kind.shape) for kind in kinds.values()}) == 1:  # as long as some ranks' rows by chance
            agreed[name] = Kind(first.dtype, first.shape, -1)
        else:
            shown = ", ".join(f"[n, {str(kind.shape)[1:-1]}] {kind.dtype} on dp rank {r}" for r, kind in kinds.items())
            return f"stream {name} is not the same on every rank: {shown}", {}
    return None, agreed
