"""Rows of the largest size that a recipe allows, for one step: for plans, and for measurements of memory and time.

Every row is full, and every token except for the first of each document is trained. A packed row has two documents, so
that attention needs a mask or calls for packed rows. For example, a packed row of 6 tokens is

    input_ids     1  1  1  1  1  1
    labels        1  1  -  1  1  -      (- is -100: a document's last token has no next token)
    position_ids  0  1  2  0  1  2
    seq_ids       0  0  0  1  1  1

All rows have images of the same layouts. They count as different images, so that the vision tower encodes each of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtrain.base.batch import IGNORE_INDEX, Row, RowImages, collate
from dtrain.data.images.processor import ImageProcessor, Layout
from dtrain.data.images.reader import ImageReader
from dtrain.data.images.tensors import feature_index
from dtrain.methods import Method
from dtrain.training.setup.data import is_packed
from dtrain.training.step_spec import StepSpec


@dataclass(frozen=True)
class FullRows:
    """A rank's full rows of one step.

    Attributes:
        rows: The rows, on the host.
        images: Their images. None for text.
    """

    rows: Sequence[Row]
    images: RowImages | None

    @classmethod
    def of(cls, spec: StepSpec, method: Method, micro_batches: int, device: str) -> "FullRows":
        """Build a rank's rows of a step.

        Args:
            spec: The spec of the step.
            method: The method.
            micro_batches: Number of micro-batches.
            device: Device of the images' pixels, which are zeros.
        """
        rows = full_rows(method, micro_batches, spec)
        return cls(rows, build_images(spec, len(rows), device))

    @property
    def pixels(self) -> Sequence[Tensor]:
        """The pixels of each row's images. Empty for text."""
        return () if self.images is None else self.images.pixels

    def batch(self) -> dict[str, Any]:
        """Collate the rows, as the trainer does at each step."""
        return build_batch(self.rows, self.images)


def build_batch(rows: Sequence[Row], images: RowImages | None) -> dict[str, Any]:
    """Collate rows into a batch, [n, S] for each stream.

    Args:
        rows: The rows.
        images: Their images. None for text.
    """
    batch: dict[str, Any] = collate(rows, list(rows[0]))
    if images is not None:
        batch["images"] = images
    return batch


def build_images(spec: StepSpec, num_rows: int, device: str = "cpu") -> RowImages | None:
    """Return the images of `num_rows` rows, with pixels of zeros on `device`. None if rows have no images."""
    tower = spec.model_config.vision
    if not spec.row_images or tower is None:
        return None
    num_patches = sum(image.patches for image in spec.row_images)
    pixels = [torch.zeros((num_patches, tower.values_per_patch), device=device) for _ in range(num_rows)]
    grids = [image.grid for image in spec.row_images]
    return RowImages(pixels, [grids] * num_rows)


def full_rows(method: Method, micro_batches: int, spec: StepSpec | None = None) -> list[Row]:
    """Return a rank's rows of a step, as full as the recipe allows.

    A row has `data.max_length` tokens. A packed row of pairs has twice as many.

    Args:
        method: The method, with its recipe.
        micro_batches: Number of micro-batches.
        spec: The spec of the step, whose rows may have images. None: rows of text.
    """
    length = method.row_length()
    num_rows = micro_batches * method.recipe.train.num_micro_batch_rows * method.rows_per_sample()
    images = spec.row_images if spec is not None else ()
    documents = split_row(images, length, 2 if is_packed(method) else 1)
    streams = _text_streams([document.num_tokens for document in documents])
    if spec is not None and images:
        processor = ImageReader(spec.source.tokenizer, spec.source.path).processor
        streams |= build_image_streams(documents, processor)
    if method.kind == "prompts":  # completions of rollouts
        names = ["old_logprobs", "sampling_logprobs", "advantages"]
        if method.needs_reference():
            names.append("reference_logprobs")
        for name in names:
            streams[name] = torch.zeros(length, dtype=torch.float64)
    if method.kind != "labelled":
        return [_copy(streams) for _ in range(num_rows)]

    # A batch of KTO has as many mismatched rows as trained rows (`methods.kto`).
    streams["desirable"] = torch.where(streams["labels"] == IGNORE_INDEX, 0.0, 1.0).double()
    rows = [_copy(streams) for _ in range(num_rows)]
    mismatched = [{**row, "desirable": torch.zeros_like(row["desirable"])} for row in rows]
    return rows + mismatched


def _text_streams(lengths: Sequence[int]) -> dict[str, Tensor]:
    """Return the text streams of a row of documents, int64 [S] each.

    Args:
        lengths: Tokens of each document.
    """
    seq_ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    index = torch.arange(len(seq_ids))
    begins = torch.searchsorted(seq_ids, seq_ids)  # the index of the first token of each token's document
    is_last_of_document = begins.roll(-1) == index + 1
    is_last_of_row = index == len(seq_ids) - 1
    return {
        "input_ids": torch.ones_like(index),
        "labels": torch.where(is_last_of_document | is_last_of_row, IGNORE_INDEX, 1),
        "position_ids": index - begins,
        "seq_ids": seq_ids,
    }


def _copy(streams: dict[str, Tensor]) -> Row:
    """Return a row with tensors of its own, because measurements count the memory of each row."""
    return {name: stream.clone() for name, stream in streams.items()}


class RowDocument(NamedTuple):
    """A document of a full row.

    Attributes:
        num_tokens: Its tokens, with those of its images.
        images: Layouts of its images.
    """

    num_tokens: int
    images: Sequence[Layout]


def split_row(images: Sequence[Layout], length: int, count: int) -> list[RowDocument]:
    """Divide a row of `length` tokens into documents of about the same length.

    The first document gets the first half of the images. If a document's images do not fit into half of the row, that
    document is longer. Each document begins with at least one token of text.

    Args:
        images: The images of the row.
        length: Tokens of the row.
        count: Number of documents, 1 or 2.

    Example:
        >>> split_row([], 101, 2)
        [RowDocument(num_tokens=51, images=[]), RowDocument(num_tokens=50, images=[])]
    """
    if count == 1:
        return [RowDocument(length, images)]
    half = -(-len(images) // 2)
    first_images, second_images = images[:half], images[half:]
    min_first = 1 + sum(image.tokens for image in first_images)
    min_second = 1 + sum(image.tokens for image in second_images)
    first_length = min(max(-(-length // 2), min_first), length - min_second)
    return [RowDocument(first_length, first_images), RowDocument(length - first_length, second_images)]


def build_image_streams(documents: Sequence[RowDocument], processor: ImageProcessor) -> dict[str, Tensor]:
    """Return the image streams of a row, [S, ...] each.

    In each document, the first token is text, and the tokens of the images follow one after the other.

    Args:
        documents: The documents of the row.
        processor: The model's image processor.
    """
    parts = []
    for document in documents:
        index = torch.arange(document.num_tokens)
        num_image_tokens = sum(image.tokens for image in document.images)
        is_image = (index > 0) & (index <= num_image_tokens)
        parts.append(processor.streams(is_image, document.images))
    streams = {}
    for name in parts[0]:
        streams[name] = torch.cat([part[name] for part in parts])
    # The processor counts the features of each document from 0; a row counts them over all its documents.
    streams["image_features"] = feature_index(streams["image_features"] >= 0)
    return streams
