"""Rows of the largest size that a recipe allows, for one step: for plans, and for measurements of memory and time.

Every row is full, and every token is trained that has one before it. All rows have the same images (`RowImages`), but
no two images are alike, so that each is encoded.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dtrain.base.batch import IGNORE, Row, RowImages, collate
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
        images: Their images; None without.
    """

    rows: Sequence[Row]
    images: RowImages | None

    @classmethod
    def of(cls, spec: StepSpec, method: Method, micro_batches: int, device: str) -> "FullRows":
        """Make the rows of a step.

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
        """The pixels of each row's images; empty without."""
        return () if self.images is None else self.images.pixels

    def batch(self) -> dict[str, Any]:
        """Collate the rows, as the trainer does at each step."""
        return build_batch(self.rows, self.images)


def build_batch(rows: Sequence[Row], images: RowImages | None) -> dict[str, Any]:
    """Return the batch of rows as full as `full_rows` makes them. images: of the rows."""
    batch: dict[str, Any] = collate(rows, list(rows[0]))
    return batch if images is None else batch | {"images": images}


def build_images(spec: StepSpec, rows: int, device: str = "cpu") -> RowImages | None:
    """Return the images of `rows` rows, with pixels of zeros on `device`. None without images."""
    if not spec.row_images or (tower := spec.model_config.vision) is None:
        return None
    shape = sum(image.patches for image in spec.row_images), tower.values_per_patch
    grids = [image.grid for image in spec.row_images]
    return RowImages([torch.zeros(shape, device=device) for _ in range(rows)], [grids] * rows)


def full_rows(method: Method, micro_batches: int, spec: StepSpec | None = None) -> list[Row]:
    """Return a rank's rows of a step, as full as the recipe allows: every row of `data.max_length` tokens (a packed row
    of pairs twice as many), every token trained that has one before it; packed rows hold two documents, so that the
    masks are those of packing. spec: with the images of a row, for which every row has the streams."""
    recipe = method.recipe
    length = method.row_length()
    count = micro_batches * recipe.train.micro * method.rows_per_sample()
    documents = split_row(spec.row_images if spec else (), length, 2 if is_packed(method) else 1)
    places = torch.arange(length)
    seq_ids = torch.arange(len(documents)).repeat_interleave(torch.tensor([tokens for tokens, _ in documents]))
    begins = torch.searchsorted(seq_ids, seq_ids)
    streams = {
        "input_ids": torch.ones_like(places),
        "labels": torch.where((begins.roll(-1) == places + 1) | (places == length - 1), IGNORE, 1),
        "position_ids": places - begins,
        "seq_ids": seq_ids,
    }
    if spec is not None and spec.row_images:
        streams |= build_image_streams(documents, ImageReader(spec.source.tokenizer, spec.source.path).processor)
    if method.kind == "prompts":
        of_rollouts = ["old_logprobs", "sampling_logprobs", "advantages", "reference_logprobs"]
        names = of_rollouts if method.needs_reference() else of_rollouts[:-1]
        streams |= {name: torch.zeros(length, dtype=torch.float64) for name in names}
    if method.kind == "labelled":  # the second half are replies that do not belong to their prompts
        streams["desirable"] = torch.where(streams["labels"] == IGNORE, 0.0, 1.0).double()
    rows: list[Row] = [{name: stream.clone() for name, stream in streams.items()} for _ in range(count)]
    others = rows if method.kind == "labelled" else []
    return [*rows, *({**row, "desirable": torch.zeros_like(row["desirable"])} for row in others)]


def split_row(images: Sequence[Layout], length: int, count: int) -> list[tuple[int, Sequence[Layout]]]:
    """Return tokens and images of each document, 1 or 2 of them, of a row of `length` tokens: halves of the row, as far
    as the images of either fit into it behind a token of text."""
    if count == 1:
        return [(length, images)]
    half = -(-len(images) // 2)
    first, second = images[:half], images[half:]
    least, rest = (1 + sum(image.tokens for image in part) for part in (first, second))
    middle = min(max(-(-length // 2), least), length - rest)
    return [(middle, first), (length - middle, second)]


def build_image_streams(
    documents: Sequence[tuple[int, Sequence[Layout]]], processor: ImageProcessor
) -> dict[str, Tensor]:
    """Return the image streams of a row of `documents`, each with its images one behind the other behind its first
    token; [S, ..] each."""
    parts = []
    for length, images in documents:
        places = torch.arange(length)
        parts.append(processor.streams((places > 0) & (places <= sum(image.tokens for image in images)), images))
    streams = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return streams | {"image_features": feature_index(streams["image_features"] >= 0)}
