"""SDPA for meta tensors, with the same sizes of calls as on a CPU. Used by `dtrain plan`.

On a CPU, `SdpaKernel` reads the mask to find the keys that some queries see, and computes these keys only. Meta tensors
have no values to read. `SdpaByRow` finds the keys from the first row of the micro-batch, which is on the host. The
other rows must have the same documents.
"""

from dataclasses import replace

import torch
from torch import Tensor

from dtrain.attention.kernels import SdpaKernel
from dtrain.attention.visibility import Visibility
from dtrain.base.batch import Batch, pad_stream
from dtrain.parallel.context.batch import join_sequence, shard_sequence


class SdpaByRow(SdpaKernel):
    """`SdpaKernel` that finds the visible keys from a row on the host.

    The row is padded and divided over the cp ranks in the same way as the rows of the micro-batch.

    Args:
        rank: This rank's number in cp.
        size: Number of cp ranks.
    """

    def __init__(self, rank: int, size: int):
        super().__init__()
        self._rank, self._size = rank, size
        self._parts: list[Tensor] = []

    def take_rows(self, batch: Batch) -> None:
        """Store the first row of the micro-batch, divided over the cp ranks."""
        length = batch["input_ids"].shape[1]
        multiple = 2 * self._size if self._size > 1 else 1
        padded = -(-length // multiple) * multiple
        names = [name for name in ("position_ids", "seq_ids", "image_ends") if name in batch]
        row = torch.stack([pad_stream(name, batch[name][0], padded) for name in names])  # [2 or 3, S]
        self._parts = [row]
        if self._size > 1:
            self._parts = [shard_sequence(row, rank, self._size) for rank in range(self._size)]

    def seen_keys(self, visible: Tensor, visibility: Visibility, run: slice) -> slice:
        """Override `SdpaKernel.seen_keys`. The mask `visible` [B, q, K] has no values and is not read."""
        missing = visibility.queries - self._parts[0].shape[1]
        pads = torch.tensor([[2**30], [-1], [2**30]])[: len(self._parts[0])]
        parts = [torch.cat([part, pads.expand(-1, missing)], 1) for part in self._parts]
        own, keys = parts[self._rank], join_sequence(parts)
        row = replace(visibility, query_positions=own[:1], key_positions=keys[:1])
        if row.query_documents is not None:
            row = replace(row, query_documents=own[1:2], key_documents=keys[1:2])
        if row.query_ends is not None:
            row = replace(row, query_ends=own[2:])
        return super().seen_keys(row.visible(run, torch.device("cpu")), row, run)
