"""Attention masks of one forward, in the form of the model's kernel.

`AttentionMasks` reads the positions and documents of a micro-batch once. The first layer with a window prepares the
mask of this window, and later layers with the same window share it. For example, the 34 layers of Gemma 3 4B need two
masks.
"""

from typing import Any

import torch
from torch import Tensor

from dtrain.attention.kernels import Kernel
from dtrain.attention.visibility import MaskStreams, Visibility
from dtrain.models.common.micro_batch import MicroBatchContext


class AttentionMasks:
    """The masks of one forward without a KV cache.

    Args:
        kernel: The model's kernel.
        context: The micro-batch.
        positions: Positions of the queries, [B or 1, S].
        num_rows: B.
        length: S.
        dtype: Dtype of the queries.
        device: Device of the queries.

    Collectives:
        Under context parallel, one all-gather of positions and documents, unless the kernel reads the packing.
    """

    def __init__(
        self,
        kernel: Kernel,
        context: MicroBatchContext,
        positions: Tensor,
        num_rows: int,
        length: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self._kernel, self._context = kernel, context
        self._positions, self._num_rows, self._length = positions, num_rows, length
        self._dtype, self._device = dtype, device
        self._keys = self._gather_keys()
        self._prepared: dict[tuple[int | None, bool], Any] = {}

    def for_window(self, window: int | None, *, sees_images: bool = False) -> Any:
        """Return the kernel's form of the mask of the layers with a window.

        Args:
            window: Number of keys that a query sees, its own included. None: all earlier ones.
            sees_images: Whether the tokens of an image see the image up to its end.
        """
        image_ends = None
        if sees_images and self._context.images is not None:
            image_ends = self._context.images.ends
        kind = (window, image_ends is not None)
        if kind not in self._prepared:
            visibility = self._visibility(window, image_ends)
            self._prepared[kind] = self._kernel.prepare(visibility, self._dtype, self._device)
        return self._prepared[kind]

    @property
    def _local_streams(self) -> MaskStreams:
        """Positions and documents of this rank's tokens."""
        return MaskStreams(self._positions, self._context.seq_ids, self._context.last_seq_ids)

    def _gather_keys(self) -> MaskStreams | None:
        """Return positions and documents of all keys, as `Kernel.keys`. None if no mask needs them.

        They are not needed for rows of one document on one cp rank, where plain causal attention is right.
        """
        context = self._context
        has_documents = context.seq_ids is not None
        sees_image_ends = context.images is not None and context.images.ends is not None
        if not (has_documents or self._kernel.is_context_parallel or sees_image_ends):
            return None
        # A packing describes causal documents only, so images that see to their ends need the tensors.
        packing = None if sees_image_ends else context.packing
        return self._kernel.keys(self._local_streams, packing)

    def _gather_keys_for_window(self) -> MaskStreams | None:
        """Return positions and documents of all keys for a kernel that computes from the packing only without a window.

        Collectives:
            Under context parallel, one all-gather.
        """
        return self._kernel.keys(self._local_streams)

    def _visibility(self, window: int | None, image_ends: Tensor | None) -> Visibility:
        """Return the mask of the layers with a window, in the form that all kernels read.

        Args:
            window: As in `for_window`.
            image_ends: As `Visibility.query_ends`. None: the layers do not see images up to their ends.
        """
        packing = self._context.packing
        # Without positions and documents of the keys, the mask is causal, or the packing describes it.
        uses_packing = packing is not None and image_ends is None and self._kernel.computes_from(packing, window)
        if self._keys is None and packing is not None and packing.is_tree and not uses_packing:
            self._keys = self._gather_keys_for_window()
        if self._keys is None or uses_packing:
            return Visibility(self._length, self._length, window, rows=self._num_rows, packing=packing)
        return Visibility(
            self._length,
            self._keys.positions.shape[1],
            window,
            self._positions,
            self._keys.positions,
            self._context.seq_ids,
            self._keys.documents,
            self._num_rows,
            query_ends=image_ends,
            key_last_documents=self._keys.last_documents,
        )
