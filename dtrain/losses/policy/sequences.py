"""Sums over the sequences of a micro-batch: padded rows, packed rows with several documents each, and the parts of both
that a context-parallel rank holds."""

import torch
import torch.distributed as dist
from torch import Tensor

from dtrain.base.batch import sum_by_document
from dtrain.parallel.collectives import enter_region, leave_region


class RowSequences:
    """Sequences that are the rows of mask [n, S], true at the tokens that count. No collective.

    lengths [sequences]: masked-in tokens of each sequence, int64, whole on every rank.
    """

    def __init__(self, mask: Tensor):
        self._shape = mask.shape
        self.lengths = mask.long().sum(1)

    def sum(self, values: Tensor) -> Tensor:
        """Σ over each sequence, [..., n, S] -> [..., n]"""
        return values.sum(-1)

    def spread(self, values: Tensor) -> Tensor:
        """At each token its sequence's value, [..., n] -> [..., n, S]"""
        return values.unsqueeze(-1).expand(*values.shape[:-1], *self._shape)


class Documents:
    """Sequences that are the documents of packed or padded rows, or the parts of them that a cp rank holds.

    ids [n, S] int64: `batch.document_ids`, −1 on padding; count: documents of the micro-batch, whole. mask [n, S]: true
    at the tokens that count. group: the cp group, None for none. Making one and each `sum` costs an all-reduce over it,
    and the backward of `sum` another: the true derivative where each cp rank's loss is that of its own tokens.
    """

    def __init__(self, ids: Tensor, count: int, mask: Tensor, group: dist.ProcessGroup | None = None):
        self._ids, self._count = ids, count
        self._group = None if group is None or group.size() == 1 else group
        self.lengths = self.sum(mask.long())

    def sum(self, values: Tensor) -> Tensor:
        """Σ over each sequence, [..., n, S] -> [..., count], whole on every rank that has a part of it"""
        sums = sum_by_document(values, self._ids, self._count)
        return sums if self._group is None else enter_region(leave_region(sums, self._group), self._group)

    def spread(self, values: Tensor) -> Tensor:
        """[..., count] -> [..., n, S]"""
        padded = torch.cat([values.new_zeros(*values.shape[:-1], 1), values], -1)  # the first: padding
        return padded[..., self._ids + 1]


Sequences = RowSequences | Documents
