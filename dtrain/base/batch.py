"""The batch contract: the shape, dtype and pad value of every stream, and how batches are made, cut and trimmed.

A batch is a dict of tensors, batch first. `labels` are already shifted (labels[t] is the token after input_ids[t]);
they are shifted once, when the rows are made, and nothing below shifts again. Images of the rows are stored next to
the tensors, on the host (`RowImages`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

IGNORE_INDEX = -100  # the label of a position without loss
PADDING_SEQ_ID = -1  # the seq_id of padding

Batch = dict[str, Tensor]
Row = Mapping[str, Tensor]

Grid = tuple[int, int, int]  # frames (1 of an image), rows and columns of patches


@dataclass(frozen=True)
class Stream:
    """Per-token tensor of a batch. `pad` fills the right; None means that the values go on counting."""

    pad: float | int | None
    dtype: torch.dtype


STREAMS = {
    "input_ids": Stream(0, torch.int64),
    "labels": Stream(IGNORE_INDEX, torch.int64),
    "position_ids": Stream(None, torch.int64),
    "seq_ids": Stream(PADDING_SEQ_ID, torch.int64),
    "document_ids": Stream(PADDING_SEQ_ID, torch.int64),  # seq_ids counted through the whole batch
    "token_weights": Stream(0.0, torch.float64),
    "reference_logprobs": Stream(0.0, torch.float64),  # of labels, where these stand; so are those that follow
    "old_logprobs": Stream(0.0, torch.float64),  # by the weights that an update starts from
    "sampling_logprobs": Stream(0.0, torch.float64),  # by the engine that drew the labels
    "advantages": Stream(0.0, torch.float64),
    "desirable": Stream(0.0, torch.float64),  # of labels: 1 in a reply that is wanted, -1 in one that is not
    "padding_mask": Stream(True, torch.bool),
    "routed_experts": Stream(-1, torch.int16),  # [.., layers, k]: where the token itself goes, below 0 as it will
    "image_features": Stream(-1, torch.int64),  # which feature of the row's images a token is, -1 of text
    "rotary_ids": Stream(0, torch.int64),  # [.., 3]: positions in time, height and width
    "image_ends": Stream(2**30, torch.int64),  # the position of the last token of a token's image, of a text's its own
    "targets": Stream(0.0, torch.float64),  # of a document, at its one label: its class or number, a pair's margin
}
ROW_STREAMS = ("input_ids", "labels", "position_ids", "seq_ids")  # what a data row has; methods add the others
IMAGE_STREAMS = ("image_features", "rotary_ids", "image_ends")  # what the rows of a model with a vision tower have too
PER_ROW_STREAMS = ("input_lengths", "sample_mask")  # [n], of a caller's batch
# The streams that `complete_batch` reads.
COMPLETED_STREAMS = frozenset({*ROW_STREAMS, *PER_ROW_STREAMS, "attention_mask", "token_mask"})


def pad_stream(name: str, values: Tensor, length: int) -> Tensor:
    """Pad `values` [s, ..] of stream `name` on the right to [length, ..]."""
    stream = STREAMS[name]
    missing = length - values.shape[0]
    if stream.pad is None:
        first = int(values[-1]) + 1 if values.shape[0] else 0
        tail = torch.arange(first, first + missing, dtype=stream.dtype)
    else:
        tail = torch.full((missing, *values.shape[1:]), stream.pad, dtype=stream.dtype)
    return torch.cat([values.to(stream.dtype), tail])


def collate(rows: Sequence[Row], streams: Sequence[str] = ROW_STREAMS) -> Batch:
    """Collate rows (dicts of [s, ..] tensors, each row its own s) to a batch [len(rows), S, ..], S the longest row's
    length; where the rows have streams of images, these too.

    No rows give a batch of shape [0, 1].
    """
    streams = [*streams, *(name for name in IMAGE_STREAMS if rows and name in rows[0])]
    length = max((row["input_ids"].shape[0] for row in rows), default=1)
    return {
        name: torch.stack([pad_stream(name, row[name], length) for row in rows])
        if rows
        else torch.empty((0, length), dtype=STREAMS[name].dtype)
        for name in streams
    }


def num_rows(batch: Batch) -> int:
    return batch["input_ids"].shape[0]


def trim(batch: Batch) -> Batch:
    """Cut off the columns on the right that are padding in every row; one column stays. Host tensors only."""
    used = (batch["seq_ids"] != PADDING_SEQ_ID).any(0).nonzero()
    length = int(used[-1]) + 1 if used.numel() else 1
    return {name: tensor[:, :length] for name, tensor in batch.items()}


def document_ids(batch: Batch) -> Tensor:
    """Return [B, S]: the document of each position, counted row by row through the whole batch; −1 on padding."""
    seq_ids = batch["seq_ids"]
    counts = seq_ids.amax(1, keepdim=True) + 1  # [B, 1]
    return torch.where(seq_ids == PADDING_SEQ_ID, PADDING_SEQ_ID, seq_ids + counts.cumsum(0) - counts)


def num_documents(batch: Batch) -> int:
    """Return the number of documents of the batch. Host tensors only."""
    return int((batch["seq_ids"].amax(1) + 1).sum()) if num_rows(batch) else 0


def document_lengths(batch: Batch) -> Tensor:
    """Return the number of tokens of each document of the batch, [documents] int64. Host tensors only."""
    ids = document_ids(batch)
    return ids[ids != PADDING_SEQ_ID].bincount()


def sum_by_document(values: Tensor, ids: Tensor, count: int) -> Tensor:
    """Sum values [.., B, S] over each of `count` documents, [.., count]; ids [B, S] are the batch's `document_ids`."""
    sums = values.new_zeros(*values.shape[:-2], count + 1)  # the first: padding
    return sums.index_add(-1, (ids + 1).flatten(), values.flatten(-2))[..., 1:]


def next_token_labels(batch: Batch) -> Tensor:
    """Return labels [B, S] for the next token: every token of a document but its first is one, trained or not."""
    ids, seq_ids = batch["input_ids"], batch["seq_ids"]
    labels = torch.full_like(ids, IGNORE_INDEX)
    same = (seq_ids[:, 1:] == seq_ids[:, :-1]) & (seq_ids[:, 1:] != PADDING_SEQ_ID)
    labels[:, :-1] = torch.where(same, ids[:, 1:], IGNORE_INDEX)
    return labels


def complete_batch(batch: Mapping[str, Tensor]) -> Batch:
    """Complete a caller's batch, on the host, detached: missing seq_ids, position_ids and labels are made, masks are
    merged into the labels and dropped.

    input_ids [n, S] alone is required. seq_ids (0, 1, .. in each row, −1 on the padding at its end): from input_lengths
    [n] or attention_mask [n, S], else no padding. labels: every token after a document's first; none on padding, where
    ids are 0. position_ids rise within a document and go on over the padding; they may be [1, S]. token_mask [n, S]
    says which tokens are trained (the token itself, not the place before it), sample_mask [n] which rows. Other streams
    pass as they are. Raises ValueError for a tensor of another shape, padding that is not on the right, and positions
    that do not rise.
    """
    known = {name: value.detach().cpu() if isinstance(value, Tensor) else value for name, value in batch.items()}
    _check_shapes(known)
    lengths, mask = known.pop("input_lengths", None), known.pop("attention_mask", None)
    ids = known["input_ids"]
    places = torch.arange(ids.shape[1])
    if "seq_ids" not in known:
        if lengths is None and mask is not None:
            lengths = mask.long().sum(1)
            if not torch.equal(mask.bool(), places < lengths[:, None]):
                raise ValueError("attention_mask: padding must be on the right of every row")
        if lengths is not None and bool(((lengths < 0) | (lengths > ids.shape[1])).any()):
            raise ValueError(f"input_lengths must be from 0 to the {ids.shape[1]} tokens of a row")
        real = places < (ids.shape[1] if lengths is None else lengths[:, None])
        known["seq_ids"] = torch.where(real, 0, PADDING_SEQ_ID).expand(ids.shape).contiguous()
    seq_ids = known["seq_ids"]
    after, step = seq_ids[:, 1:], seq_ids.diff()
    counts = (after == PADDING_SEQ_ID) | ((after >= 0) & (step == 0)) | ((after > 0) & (step == 1))
    if not bool(counts.all()) or not torch.isin(seq_ids[:, :1], torch.tensor([0, PADDING_SEQ_ID])).all():
        raise ValueError("seq_ids must count a row's documents from 0, with padding (-1) on the right alone")
    if "position_ids" not in known:
        begins = torch.ones_like(seq_ids, dtype=torch.bool)
        begins[:, 1:] = seq_ids[:, 1:] != seq_ids[:, :-1]
        known["position_ids"] = places - torch.where(begins, places, 0).cummax(1).values
    positions, padding = known["position_ids"].expand(ids.shape), seq_ids == PADDING_SEQ_ID
    if bool(((positions.diff() <= 0) & (step == 0) & (after >= 0)).any()):
        raise ValueError("position_ids must rise within a document: a token sees what is at its place or before")
    going_on = positions.masked_fill(padding, -1).cummax(1).values + 1 + places - (~padding).sum(1, keepdim=True)
    known["position_ids"] = torch.where(padding, going_on, positions)
    if "labels" not in known:
        known["labels"] = next_token_labels(known)
    token_mask, sample_mask = known.pop("token_mask", None), known.pop("sample_mask", None)
    untrained = padding
    if token_mask is not None:
        untrained = untrained | ~token_mask.bool().roll(-1, 1)
        untrained[:, -1:] = True
    if sample_mask is not None:
        untrained = untrained | ~sample_mask.bool()[:, None]
    known["labels"] = known["labels"].masked_fill(untrained, IGNORE_INDEX)
    known["input_ids"] = ids.masked_fill(padding, 0)
    return known | {name: known[name].long() for name in ROW_STREAMS}


def _check_shapes(batch: Mapping[str, Any]) -> None:
    ids = batch.get("input_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 2 or (len(ids) and not ids.shape[1]):
        raise ValueError("input_ids must be a tensor [n, S]")
    for name in sorted(COMPLETED_STREAMS & batch.keys()):
        value, shape = batch[name], ids.shape[:1] if name in PER_ROW_STREAMS else ids.shape
        one_for_all = name == "position_ids" and isinstance(value, Tensor) and value.shape == (1, ids.shape[1])
        if not isinstance(value, Tensor) or not (value.shape == shape or one_for_all):
            actual = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"{name} must be a tensor {list(shape)} beside input_ids {list(ids.shape)}, not {actual}")
        if name in (*ROW_STREAMS, "input_lengths") and (value.is_floating_point() or value.dtype == torch.bool):
            raise ValueError(f"{name} must hold integers, not {value.dtype}")


def num_trained_tokens(batch: Batch) -> int:
    """Return the number of positions with a label. Host tensors only."""
    return int((batch["labels"] != IGNORE_INDEX).sum())


@dataclass(frozen=True)
class RowImages:
    """Images of rows [n]. pixels: of each row [P, values], its images one behind the other; grids: of each row, its
    images' in the same order; keys: of each row, a number for each image that is the same for the same image; None:
    all are different."""

    pixels: Sequence[Tensor]
    grids: Sequence[Sequence[Grid]]
    keys: Sequence[Sequence[int]] | None = None

    @classmethod
    def from_rows(cls, rows: Sequence[Mapping[str, Tensor]]) -> "RowImages":
        """Return the images of data rows: their `pixels`, `grids` and `image_keys`."""
        grids = [[(frames, tall, wide) for frames, tall, wide in row["grids"].tolist()] for row in rows]
        return cls([row["pixels"] for row in rows], grids, [row["image_keys"].tolist() for row in rows])

    def __len__(self) -> int:
        return len(self.pixels)

    def select(self, rows: Iterable[int]) -> "RowImages":
        """Return the images of some rows, in their order."""
        rows = list(rows)
        pixels = [self.pixels[row] for row in rows]
        grids = [self.grids[row] for row in rows]
        if self.keys is None:
            return RowImages(pixels, grids)
        return RowImages(pixels, grids, [self.keys[row] for row in rows])

    def distinct(self, values: int, tokens: Callable[[Grid], int]) -> tuple[Tensor, list[Grid], Tensor]:
        """Return pixels [P, values] and grids of the different images of all rows, row by row, and where the features
        of all images lie among theirs, [T] int64.

        values: of a patch; tokens: gives the number of features of an image. An image that several rows share, as the
        completions of a prompt do, is one.
        """
        parts: list[Tensor] = []
        grids: list[Grid] = []
        starts: dict[int, int] = {}  # by key: the first feature
        order: list[Tensor] = []
        end = 0
        for row, (pixels, of_row) in enumerate(zip(self.pixels, self.grids, strict=True)):
            patches = [frames * tall * wide for frames, tall, wide in of_row]
            keys = range(-1 - len(order), -1 - len(order) - len(of_row), -1) if self.keys is None else self.keys[row]
            parts_of_row = pixels.split(patches) if patches else ()  # `split` refuses an empty list
            for part, grid, key in zip(parts_of_row, of_row, keys, strict=True):
                if key not in starts:
                    starts[key], end = end, end + tokens(grid)
                    parts.append(part)
                    grids.append(grid)
                order.append(torch.arange(starts[key], starts[key] + tokens(grid)))
        joined = torch.cat(parts) if parts else torch.empty(0, values)
        return joined, grids, torch.cat(order) if order else torch.empty(0, dtype=torch.int64)


def collate_with_images(rows: Sequence[Mapping[str, Tensor]], streams: Sequence[str] = ROW_STREAMS) -> dict[str, Any]:
    """Collate rows that have `pixels` as `batch.collate` does; `images` are their `RowImages`."""
    return {**collate(rows, streams), "images": RowImages.from_rows(rows)}
