"""The batch contract: shape, dtype and padding of every stream, and functions that build, cut and complete batches.

A batch is a dict of tensors with the batch dimension first. `labels` are already shifted: labels[t] is the token after
input_ids[t]. They are shifted once, when the rows are built, and never again. For example, two rows, of which the first
contains two documents of 3 and 2 tokens, and the second one document of 2 tokens and padding:

    input_ids     [[ 5,  6,  7,  8,  9], [ 5,  6,    0,    0,    0]]
    labels        [[ 6,  7, -100, 9, -100], [ 6, -100, -100, -100, -100]]
    position_ids  [[ 0,  1,  2,  0,  1], [ 0,  1,    2,    3,    4]]
    seq_ids       [[ 0,  0,  0,  1,  1], [ 0,  0,   -1,   -1,   -1]]

Images of the rows are stored next to the tensors, on the host (`RowImages`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

IGNORE_INDEX = -100  # the label of a position without loss
PADDING_SEQ_ID = -1  # the seq_id of padding

Batch = dict[str, Tensor]
Row = Mapping[str, Tensor]

Grid = tuple[int, int, int]
"""Size of an image in patches: frames (1 for an image), rows and columns."""


@dataclass(frozen=True)
class Stream:
    """Tensor of a batch with a value for each token.

    Attributes:
        pad: The value on padding. None: the values continue to count up, as for positions.
        dtype: The data type.
    """

    pad: float | int | None
    dtype: torch.dtype


STREAMS = {
    "input_ids": Stream(0, torch.int64),
    "labels": Stream(IGNORE_INDEX, torch.int64),
    "position_ids": Stream(None, torch.int64),
    "seq_ids": Stream(PADDING_SEQ_ID, torch.int64),
    # In rows with shared beginnings: the last document that sees the token (`attention.visibility`).
    "last_seq_ids": Stream(PADDING_SEQ_ID, torch.int64),
    # Like seq_ids, but counted through all rows of the batch instead of through each row.
    "document_ids": Stream(PADDING_SEQ_ID, torch.int64),
    # Documents with the same number begin with the same prompt, which may be computed once (`policy.prompt_sharing`).
    "prompt_ids": Stream(-1, torch.int64),
    "token_weights": Stream(0.0, torch.float64),
    # Log-probabilities of the labels, each at the position of its label: of the reference model, of the weights at the
    # start of an update, and of the engine that sampled the tokens.
    "reference_logprobs": Stream(0.0, torch.float64),
    "old_logprobs": Stream(0.0, torch.float64),
    "sampling_logprobs": Stream(0.0, torch.float64),
    "advantages": Stream(0.0, torch.float64),
    # At labels: 1 in a desirable reply, -1 in an undesirable one (KTO).
    "desirable": Stream(0.0, torch.float64),
    "padding_mask": Stream(True, torch.bool),
    # [..., layers, k]: the experts of the token itself. A negative number leaves the choice to the router.
    "routed_experts": Stream(-1, torch.int16),
    # Index of the image feature among the features of the row's images; -1 for text.
    "image_features": Stream(-1, torch.int64),
    # [..., 3]: rotary positions in time, height and width.
    "rotary_ids": Stream(0, torch.int64),
    # Position of the last token of the image that the token belongs to; for text, of the token itself.
    "image_ends": Stream(2**30, torch.int64),
    # At the one label of each document: its class, its number, or the margin of its pair (reward models).
    "targets": Stream(0.0, torch.float64),
}
ROW_STREAMS = ("input_ids", "labels", "position_ids", "seq_ids")  # of every data row; methods add others
IMAGE_STREAMS = ("image_features", "rotary_ids", "image_ends")  # additional streams of models with a vision tower
PER_ROW_STREAMS = ("input_lengths", "sample_mask")  # [n], in a batch from outside of dtrain
# The streams that `complete_batch` reads.
COMPLETED_STREAMS = frozenset({*ROW_STREAMS, *PER_ROW_STREAMS, "attention_mask", "token_mask"})


def pad_stream(name: str, values: Tensor, length: int) -> Tensor:
    """Pad a stream on the right.

    Args:
        name: Name of the stream.
        values: Its values, [s, ...].
        length: Length of the result, at least s.

    Returns:
        The values in the stream's dtype, [length, ...].
    """
    stream = STREAMS[name]
    num_missing = length - values.shape[0]
    if stream.pad is None:
        first = int(values[-1]) + 1 if values.shape[0] else 0
        padding = torch.arange(first, first + num_missing, dtype=stream.dtype)
    else:
        padding = torch.full((num_missing, *values.shape[1:]), stream.pad, dtype=stream.dtype)
    return torch.cat([values.to(stream.dtype), padding])


def collate(rows: Sequence[Row], streams: Sequence[str] = ROW_STREAMS) -> Batch:
    """Collate rows of different lengths to a batch, padded on the right.

    Args:
        rows: Dicts of tensors [s, ...], where s is the length of the row. Streams of images are included if the rows
            have them.
        streams: The streams to collate.

    Returns:
        Tensors [len(rows), S, ...], where S is the length of the longest row. Without rows, tensors [0, 1].

    Example:
        >>> rows = [{"labels": torch.tensor([5, 6]), "input_ids": torch.tensor([4, 5])}]
        >>> rows.append({"labels": torch.tensor([9]), "input_ids": torch.tensor([8])})
        >>> collate(rows, ["labels"])["labels"].tolist()
        [[5, 6], [9, -100]]
    """
    if not rows:
        return {name: torch.empty((0, 1), dtype=STREAMS[name].dtype) for name in streams}
    streams = [*streams, *(name for name in IMAGE_STREAMS if name in rows[0])]
    length = max(row["input_ids"].shape[0] for row in rows)
    return {name: torch.stack([pad_stream(name, row[name], length) for row in rows]) for name in streams}


def num_rows(batch: Batch) -> int:
    """Return the number of rows of the batch."""
    return batch["input_ids"].shape[0]


def trim(batch: Batch) -> Batch:
    """Cut off the columns on the right that are padding in every row. At least one column stays. Host tensors only."""
    used_columns = (batch["seq_ids"] != PADDING_SEQ_ID).any(0).nonzero()
    length = int(used_columns[-1]) + 1 if used_columns.numel() else 1
    return {name: tensor[:, :length] for name, tensor in batch.items()}


def document_ids(batch: Batch) -> Tensor:
    """Number the documents of a batch row by row.

    Returns:
        The document of each position, [B, S] int64. -1 on padding.

    Example:
        >>> document_ids({"seq_ids": torch.tensor([[0, 0, 1], [0, -1, -1]])}).tolist()
        [[0, 0, 1], [2, -1, -1]]
    """
    seq_ids = batch["seq_ids"]
    num_in_row = seq_ids.amax(1, keepdim=True) + 1  # [B, 1]
    num_before = num_in_row.cumsum(0) - num_in_row  # documents of all rows above
    return torch.where(seq_ids == PADDING_SEQ_ID, PADDING_SEQ_ID, seq_ids + num_before)


def num_documents(batch: Batch) -> int:
    """Return the number of documents of the batch. Host tensors only."""
    return int((batch["seq_ids"].amax(1) + 1).sum()) if num_rows(batch) else 0


def document_lengths(batch: Batch) -> Tensor:
    """Return the number of tokens of each document of the batch, [documents] int64. Host tensors only."""
    ids = document_ids(batch)
    return ids[ids != PADDING_SEQ_ID].bincount()


def sum_by_document(values: Tensor, ids: Tensor, count: int) -> Tensor:
    """Sum values over each document.

    Args:
        values: [..., B, S].
        ids: The batch's `document_ids`, [B, S].
        count: Number of documents.

    Returns:
        [..., count].

    Example:
        >>> sum_by_document(torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[0, 0, -1]]), 1)
        tensor([3.])
    """
    totals = values.new_zeros(*values.shape[:-2], count + 1)
    totals = totals.index_add(-1, (ids + 1).flatten(), values.flatten(-2))
    return totals[..., 1:]  # without the total of padding, whose id is -1


def next_token_labels(batch: Batch) -> Tensor:
    """Return labels for the next token, [B, S].

    Every token of a document except for its first is a label, whether it is trained or not.
    """
    ids, seq_ids = batch["input_ids"], batch["seq_ids"]
    labels = torch.full_like(ids, IGNORE_INDEX)
    same = (seq_ids[:, 1:] == seq_ids[:, :-1]) & (seq_ids[:, 1:] != PADDING_SEQ_ID)
    labels[:, :-1] = torch.where(same, ids[:, 1:], IGNORE_INDEX)
    return labels


def complete_batch(batch: Mapping[str, Tensor]) -> Batch:
    """Complete a batch from outside of dtrain: add missing streams, and merge the masks into the labels.

    Args:
        batch: Tensors on any device. Streams that are not listed here are returned as they are.

            - input_ids [n, S]: required.
            - seq_ids [n, S]: 0, 1, ... for the documents of each row, -1 on padding. Derived from input_lengths [n] or
              attention_mask [n, S] if missing; without these there is no padding.
            - labels [n, S]: every token after a document's first if missing.
            - position_ids [n, S] or [1, S]: must rise within a document. Counted from 0 in each document if missing.
            - token_mask [n, S]: the tokens to train. An entry belongs to the token itself, not to the position before.
            - sample_mask [n]: the rows to train.

    Returns:
        A batch on the host, detached. On padding, ids are 0, there is no label, and positions continue to count up.

    Raises:
        ValueError: For a tensor of another shape, padding that is not on the right, or positions that do not rise.
    """
    streams = {}
    for name, value in batch.items():
        streams[name] = value.detach().cpu() if isinstance(value, Tensor) else value
    _check_shapes(streams)
    input_lengths = streams.pop("input_lengths", None)
    attention_mask = streams.pop("attention_mask", None)
    ids = streams["input_ids"]
    if "seq_ids" not in streams:
        streams["seq_ids"] = _seq_ids(ids, input_lengths, attention_mask)
    seq_ids = streams["seq_ids"]
    _check_seq_ids(seq_ids)
    streams["position_ids"] = _complete_positions(streams.get("position_ids"), seq_ids)
    if "labels" not in streams:
        streams["labels"] = next_token_labels(streams)

    padding = seq_ids == PADDING_SEQ_ID
    untrained = padding
    token_mask, sample_mask = streams.pop("token_mask", None), streams.pop("sample_mask", None)
    if token_mask is not None:
        # The mask of a token decides about the label at the position before.
        untrained = untrained | ~token_mask.bool().roll(-1, 1)
        untrained[:, -1:] = True
    if sample_mask is not None:
        untrained = untrained | ~sample_mask.bool()[:, None]
    streams["labels"] = streams["labels"].masked_fill(untrained, IGNORE_INDEX)
    streams["input_ids"] = ids.masked_fill(padding, 0)
    return streams | {name: streams[name].long() for name in ROW_STREAMS}


def _seq_ids(ids: Tensor, input_lengths: Tensor | None, attention_mask: Tensor | None) -> Tensor:
    """Return the seq_ids [n, S] of rows with one document each. Raises ValueError for padding on the left."""
    columns = torch.arange(ids.shape[1])
    if input_lengths is None and attention_mask is not None:
        input_lengths = attention_mask.long().sum(1)
        if not torch.equal(attention_mask.bool(), columns < input_lengths[:, None]):
            raise ValueError("attention_mask: padding must be on the right of every row")
    if input_lengths is None:
        return torch.zeros(ids.shape, dtype=torch.int64)
    if bool(((input_lengths < 0) | (input_lengths > ids.shape[1])).any()):
        raise ValueError(f"input_lengths must be from 0 to the {ids.shape[1]} tokens of a row")
    is_token = columns < input_lengths[:, None]
    return torch.where(is_token, 0, PADDING_SEQ_ID)


def _check_seq_ids(seq_ids: Tensor) -> None:
    """Raise ValueError unless each row counts its documents from 0, with padding only on the right."""
    # Each position may be padding, stay in the document of the position before, or begin the next document. A document
    # after padding (-1) is refused: seq_id 0 is not above 0, and any other seq_id is a step of more than 1.
    following, step = seq_ids[:, 1:], seq_ids.diff()
    is_padding = following == PADDING_SEQ_ID
    stays = (following >= 0) & (step == 0)
    begins = (following > 0) & (step == 1)
    first_is_valid = torch.isin(seq_ids[:, :1], torch.tensor([0, PADDING_SEQ_ID])).all()
    if not bool((is_padding | stays | begins).all()) or not first_is_valid:
        raise ValueError("seq_ids must count a row's documents from 0, with padding (-1) only on the right")


def _complete_positions(position_ids: Tensor | None, seq_ids: Tensor) -> Tensor:
    """Return position_ids [n, S], which continue over the padding. Raises ValueError if they do not rise."""
    columns = torch.arange(seq_ids.shape[1])
    if position_ids is None:
        begins = torch.ones_like(seq_ids, dtype=torch.bool)
        begins[:, 1:] = seq_ids[:, 1:] != seq_ids[:, :-1]
        start_of_document = torch.where(begins, columns, 0).cummax(1).values
        position_ids = columns - start_of_document
    position_ids = position_ids.expand(seq_ids.shape)
    padding = seq_ids == PADDING_SEQ_ID
    is_inside_document = (seq_ids.diff() == 0) & (seq_ids[:, 1:] >= 0)
    if bool(((position_ids.diff() <= 0) & is_inside_document).any()):
        raise ValueError(
            "position_ids must rise within a document: a token attends to the tokens at lower positions and to itself"
        )
    # On padding: the largest position so far, plus the distance from the last token.
    largest_so_far = position_ids.masked_fill(padding, -1).cummax(1).values
    num_tokens = (~padding).sum(1, keepdim=True)
    continued = largest_so_far + 1 + columns - num_tokens
    return torch.where(padding, continued, position_ids)


def _check_shapes(batch: Mapping[str, Any]) -> None:
    """Raise ValueError for a stream that is no tensor of the right shape and type."""
    ids = batch.get("input_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 2 or (len(ids) and not ids.shape[1]):
        raise ValueError("input_ids must be a tensor [n, S]")
    for name in sorted(COMPLETED_STREAMS & batch.keys()):
        value = batch[name]
        shape = ids.shape[:1] if name in PER_ROW_STREAMS else ids.shape
        expected = f"{name} must be a tensor {list(shape)} for input_ids {list(ids.shape)}"
        if not isinstance(value, Tensor):
            raise ValueError(f"{expected}, not {type(value).__name__}")
        has_one_row_for_all = name == "position_ids" and value.shape == (1, ids.shape[1])
        if value.shape != shape and not has_one_row_for_all:
            raise ValueError(f"{expected}, not {list(value.shape)}")
        if name in (*ROW_STREAMS, "input_lengths") and (value.is_floating_point() or value.dtype == torch.bool):
            raise ValueError(f"{name} must hold integers, not {value.dtype}")


def num_trained_tokens(batch: Batch) -> int:
    """Return the number of positions with a label. Host tensors only."""
    return int((batch["labels"] != IGNORE_INDEX).sum())


class DistinctImages(NamedTuple):
    """The different images of some rows.

    Attributes:
        pixels: Patches of the images one after another, [P, values].
        grids: The size of each image.
        feature_index: For each image token of the rows, in order, the index of its feature in the tower's output for
            `pixels`, [T] int64.
    """

    pixels: Tensor
    grids: list[Grid]
    feature_index: Tensor


@dataclass(frozen=True)
class RowImages:
    """Images of n rows.

    Attributes:
        pixels: For each row, the patches of its images one after another, [P, values].
        grids: For each row, the sizes of its images in the same order.
        keys: For each row, a number for each image. Equal images have equal numbers. None: all images are different.
    """

    pixels: Sequence[Tensor]
    grids: Sequence[Sequence[Grid]]
    keys: Sequence[Sequence[int]] | None = None

    @classmethod
    def from_rows(cls, rows: Sequence[Mapping[str, Tensor]]) -> "RowImages":
        """Return the images of data rows: their `pixels`, `grids` and `image_keys`."""
        pixels, grids, keys = [], [], []
        for row in rows:
            pixels.append(row["pixels"])
            grids.append([(frames, height, width) for frames, height, width in row["grids"].tolist()])
            keys.append(row["image_keys"].tolist())
        return cls(pixels, grids, keys)

    def __len__(self) -> int:
        return len(self.pixels)

    def select(self, rows: Iterable[int]) -> "RowImages":
        """Return the images of some rows, in the order of their indices."""
        rows = list(rows)
        pixels = [self.pixels[row] for row in rows]
        grids = [self.grids[row] for row in rows]
        keys = None
        if self.keys is not None:
            keys = [self.keys[row] for row in rows]
        return RowImages(pixels, grids, keys)

    def distinct(self, values: int, tokens: Callable[[Grid], int]) -> DistinctImages:
        """Return each image of the rows once, and for every use of an image the index of its features.

        Several rows may share an image, as the completions of one prompt do. The vision tower then encodes the image
        once, and the rows gather its features by `feature_index`. For example, two rows that show the same image of 4
        features have the feature index [0, 1, 2, 3, 0, 1, 2, 3].

        Args:
            values: Number of values in a patch, for the shape of `pixels` if there are no images.
            tokens: Function from the size of an image to its number of features.
        """
        pixels: list[Tensor] = []
        grids: list[Grid] = []
        first_features: dict[int, int] = {}  # by the key of an image
        index: list[Tensor] = []
        num_features = 0
        for row, (row_pixels, row_grids) in enumerate(zip(self.pixels, self.grids, strict=True)):
            patches = [frames * height * width for frames, height, width in row_grids]
            # Without keys, count down from -1, so that no image of any row has the same key as another one.
            if self.keys is None:
                row_keys = list(range(-1 - len(index), -1 - len(index) - len(row_grids), -1))
            else:
                row_keys = list(self.keys[row])
            row_images = row_pixels.split(patches) if patches else ()  # `split` does not accept an empty list
            for image, grid, key in zip(row_images, row_grids, row_keys, strict=True):
                if key not in first_features:
                    first_features[key] = num_features
                    num_features += tokens(grid)
                    pixels.append(image)
                    grids.append(grid)
                first = first_features[key]
                index.append(torch.arange(first, first + tokens(grid)))
        return DistinctImages(
            pixels=torch.cat(pixels) if pixels else torch.empty(0, values),
            grids=grids,
            feature_index=torch.cat(index) if index else torch.empty(0, dtype=torch.int64),
        )


def collate_with_images(rows: Sequence[Mapping[str, Tensor]], streams: Sequence[str] = ROW_STREAMS) -> dict[str, Any]:
    """Collate rows as `collate` does, and add their images to the batch.

    Args:
        rows: Rows as for `collate`, which also have `pixels`, `grids` and `image_keys`.
        streams: The streams to collate.

    Returns:
        The batch of `collate`, with an additional entry `images`, a `RowImages`.
    """
    return {**collate(rows, streams), "images": RowImages.from_rows(rows)}
