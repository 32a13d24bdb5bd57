"""The kernel of variable-length attention, on CUDA in half precision.

Its time is proportional to the sum of the documents' squared lengths, and no mask is stored. With a mask it would be
the square of the row's length: for example, 8 documents of 512 tokens in a row take 8 · 512² instead of 4096², an
eighth. `attention.packing` lists the calls of a forward, and `attention.segments` has the operations.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dtrain.attention.kernels import Gathering, Kernel, SdpaKernel
from dtrain.attention.packing import Packing
from dtrain.attention.segments import Flash, Segmented, Steps, put
from dtrain.attention.visibility import Visibility


class VarlenKernel(Kernel):
    """Variable-length attention for rows with a `Packing`: several documents, sharded rows, or a window.

    It contains another kernel, which exchanges the keys. That kernel also computes, by masks, the rows without a
    packing: plain causal rows on one rank, bidirectional images, positions that do not count on by 1 in a document, and
    documents in several pieces.

    If the caller does not pass the packing, documents and positions are copied from the device to the host, once per
    forward and kind of layer.

    Args:
        flash: Operations. None: torch's own.
        masked: `SdpaKernel` for full rows, `GatherKernel` or `RingKernel` under context parallel. None: full rows.
        note: Why this kernel was chosen although another was wanted.
    """

    takes_packing = True

    def __init__(self, flash: Flash | None = None, masked: Kernel | None = None, note: str = ""):
        self.flash, self.masked, self.note = flash or Flash(), masked or SdpaKernel(), note
        self.name = "varlen" + self.masked.exchange
        self.group, self.gathers = self.masked.group, self.masked.gathers
        self.is_context_parallel = self.masked.is_context_parallel

    def keys(
        self, positions: Tensor, documents: Tensor | None, packing: Packing | None = None
    ) -> tuple[Tensor, Tensor | None] | None:
        return None if packing is not None else self.masked.keys(positions, documents)

    def prepare(self, visibility: Visibility, dtype: torch.dtype, device: torch.device) -> Any:
        sees_to_image_ends = visibility.query_ends is not None
        is_only_causal = visibility.packing is None and visibility.is_causal
        packing = None if sees_to_image_ends or is_only_causal else find_packing(visibility)
        if packing is None:
            return self.masked.prepare(visibility, dtype, device)
        ranks = 1 if self.group is None else self.group.size()
        calls_of_steps = self.masked.calls(packing, visibility.window)
        segments = put((call for calls in calls_of_steps for call in calls), device)  # of all steps, in one copy
        steps: Steps = []
        start = 0
        for calls in calls_of_steps:
            steps.append(segments[start : start + len(calls)])
            start += len(calls)
        return Segmented(packing.length // ranks, steps)

    def begin_gather(self, k: Tensor, v: Tensor, prepared: Any) -> Gathering:
        if isinstance(prepared, Segmented):
            k, v = k[:, : prepared.tokens], v[:, : prepared.tokens]
        return self.masked.begin_gather(k, v, prepared)

    def over(self, q: Tensor, k: Tensor, v: Tensor, prepared: Any, scale: float, sinks: Tensor | None = None) -> Tensor:
        if not isinstance(prepared, Segmented):
            return self.masked.over(q, k, v, prepared, scale, sinks)
        tokens = q[:, : prepared.tokens]
        out = self.masked.over_segments(self.flash, tokens, k, v, prepared.steps, scale, sinks)
        missing = q.shape[1] - out.shape[1]
        return F.pad(out, (0, 0, 0, 0, 0, missing)) if missing else out


def find_packing(visibility: Visibility) -> Packing | None:
    """Return the packing of full rows: the given one, that of plain rows, or one read from the device, or None."""
    if visibility.packing is not None:
        return visibility.packing
    if visibility.is_plain:
        return Packing.one_document_per_row(visibility.rows, visibility.queries)
    positions, documents = visibility.key_positions, visibility.key_documents
    if positions is None:
        return None
    if documents is None:
        return Packing.of(positions.expand(visibility.rows, -1).cpu(), None)
    return Packing.of(*torch.stack([positions.expand_as(documents), documents]).cpu().unbind(0))
