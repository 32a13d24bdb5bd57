"""Documents that begin alike, such as the completions of one prompt: their common beginning is computed once.

A causal model computes the same hidden states for equal beginnings. So a micro-batch is computed as a forest: each
common beginning is one *node*, and the nodes that continue it are its children. A token sees its own node up to
itself, and all tokens of its node's ancestors.

Example: one prompt [5, 6, 7] with the completions [8, 9] and [4]. As in every packed micro-batch, the loss sees one row
with both documents, the *full row*. The model computes the *shared row*:

    full row      5 6 7 8 9 | 5 6 7 4       9 tokens, documents 0 0 0 0 0 1 1 1 1
    shared row    5 6 7 | 8 9 | 4           6 tokens
    nodes         0 0 0   1 1   2           lengths 3 2 1, parents -1 0 0
    positions     0 1 2   3 4   3
    last nodes    2 2 2   1 1   2           the last node that sees the token (`last_seq_ids`)

    shared index of the full row's tokens    0 1 2 3 4 0 1 2 5
    first copy of the shared row's tokens    0 1 2 3 4 8

Token 7 predicts 8 in the first document and 4 in the second one. Its hidden state, at shared index 2, is therefore read
twice: the loss gets the hidden states of the full row's positions 2 3 4 7 8. These are all positions that have a label
or belong to one document only, so a loss sees the same documents, labels and streams as without sharing, except for the
tokens of the prompt. The gradients of the two copies are added by the backward of the indexing.

The documents of a group are those with the same value in the stream `prompt_ids`. Methods set it. Batches of supervised
fine-tuning do not have it, and their rows share nothing, even if they begin alike.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from dtrain.attention.tree import TreePacking
from dtrain.base.batch import IGNORE_INDEX, PADDING_SEQ_ID, Batch, Grid, RowImages, document_ids
from dtrain.models.common.config import LINEAR, ModelConfig
from dtrain.parallel.context.batch import get_chunk_indices, shard_sequence

PROMPT_IDS = "prompt_ids"
"""Stream with the number of the group that a token's document belongs to, [n, S]. -1 for none."""

MIN_SAVED_FRACTION = 0.1
"""With `train.share_prompts: auto`, a group shares its beginnings if that saves this part of its tokens or more."""

MIN_BRANCH_TOKENS = 16
"""Completions whose first equal tokens are fewer than this are not joined behind their prompt."""


@dataclass(frozen=True)
class PromptSharing:
    """Settings of a policy for shared prompts.

    Attributes:
        always: Share every common beginning, and not only where it saves a tenth of a group's tokens.
        image_tokens: Function from the size of an image to its number of features. None for a model of text.
    """

    always: bool = False
    image_tokens: Callable[[Grid], int] | None = None


def can_share_prompts(setting: bool | str, config: ModelConfig) -> bool:
    """Check whether a model computes rows with shared beginnings.

    Linear attention has a state that would have to be copied where documents part, so its models compute every document
    on its own. Models of transformers share only if the recipe asks for it, because some of them mix the documents of a
    row (`training.setup.transformers_models` refuses these).

    Args:
        setting: `train.share_prompts`.
        config: Config of the model.
    """
    if setting is False or LINEAR in config.layer_types:
        return False
    return config.transformers is None or setting is True


class Document(NamedTuple):
    """A document of a batch.

    Attributes:
        row: Its row.
        group: Its value of `prompt_ids`, -1 for none.
        content: Everything that a model reads of each token, int64 [s, columns]. Tokens with equal beginnings up to and
            including themselves have equal hidden states.
        num_labels: Number of tokens that have a label.
    """

    row: int
    group: int
    content: Tensor
    num_labels: int

    def __len__(self) -> int:
        return len(self.content)


class Node(NamedTuple):
    """A run of tokens that is computed once.

    Attributes:
        documents: The documents that contain it, by their index.
        begin: Where it begins in each of them.
        length: Number of tokens.
        parent: Index of the node before it, -1 if it begins its documents.
    """

    documents: tuple[int, ...]
    begin: int
    length: int
    parent: int


def number_prompts(batch: Batch) -> Tensor:
    """Number the prompts of a batch's documents. A prompt is everything before the first trained token.

    Args:
        batch: Rows on the host, [n, S].

    Returns:
        int64 [n, S]: documents with equal prompts have equal numbers. -1 on padding and in documents without a label.

    Example:
        >>> batch = {"input_ids": torch.tensor([[5, 6, 7], [5, 6, 8]]), "labels": torch.tensor([[-100, 7, -100]] * 2)}
        >>> number_prompts({**batch, "seq_ids": torch.zeros(2, 3, dtype=torch.int64)}).tolist()
        [[0, 0, 0], [0, 0, 0]]
    """
    numbers: dict[tuple[int, ...], int] = {}
    prompt_ids = torch.full_like(batch["seq_ids"], -1)
    for row, seq_ids in enumerate(batch["seq_ids"]):
        for start, end in _document_bounds(seq_ids):
            labelled = (batch["labels"][row, start:end] != IGNORE_INDEX).nonzero()
            if not len(labelled):
                continue
            prompt_end = start + int(labelled[0]) + 1  # the label at a position is the token behind it
            prompt = tuple(batch["input_ids"][row, start:prompt_end].tolist())
            prompt_ids[row, start:end] = numbers.setdefault(prompt, len(numbers))
    return prompt_ids


def number_pairs(batch: Batch) -> Tensor:
    """Number the pairs of a batch, int64 [n, S], -1 on padding. Documents 2i and 2i + 1 are a pair."""
    ids = document_ids(batch)
    return torch.where(ids == PADDING_SEQ_ID, -1, ids // 2)


class SharedPrompts:
    """The documents of a batch that share their beginnings.

    Args:
        batch: Rows on the host, [n, S], with the stream `prompt_ids`.
        images: Images of the rows.
        sharing: How prompts are shared.

    Attributes:
        documents: All documents, row by row.
    """

    def __init__(self, batch: Batch, images: RowImages | None, sharing: PromptSharing):
        self.documents = _read_documents(batch, images, sharing)
        self._documents_by_row: dict[int, list[Document]] = {}
        for document in self.documents:
            self._documents_by_row.setdefault(document.row, []).append(document)
        members: dict[int, list[int]] = {}
        for index, document in enumerate(self.documents):
            members.setdefault(document.group, []).append(index)
        self._shared_groups = set()
        # The attention of a shared row counts tokens, which is right under a window only if positions count on by 1.
        if _has_position_gaps(batch):
            return
        for group, indices in members.items():
            if group < 0 or len(indices) == 1:
                continue
            total = sum(len(self.documents[index]) for index in indices)
            computed = sum(node.length for node in _build_forest(self.documents, [indices]))
            saved = total - computed
            if saved > 0 and (sharing.always or saved >= MIN_SAVED_FRACTION * total):
                self._shared_groups.add(group)

    @property
    def saves(self) -> bool:
        """True if the documents of at least one group share a beginning."""
        return bool(self._shared_groups)

    def linked_samples(self, rows_per_sample: int) -> list[list[list[int]]]:
        """Return the samples that share a beginning with one another, as lists of samples in ascending order.

        Args:
            rows_per_sample: Sample i consists of the rows from i · rows_per_sample on.

        Returns:
            For each list, the rows of each of its samples.
        """
        num_rows = 1 + max(document.row for document in self.documents)
        num_samples = -(-num_rows // rows_per_sample)  # rounded up
        parents = list(range(num_samples))  # a forest of samples; a set of linked samples is one tree

        def root(sample: int) -> int:
            while parents[sample] != sample:
                sample = parents[sample]
            return sample

        first_samples: dict[int, int] = {}  # the first sample of each group
        for document in self.documents:
            if document.group not in self._shared_groups:
                continue
            sample = document.row // rows_per_sample
            first, own = root(first_samples.setdefault(document.group, sample)), root(sample)
            parents[max(first, own)] = min(first, own)
        linked: dict[int, list[list[int]]] = {}
        for sample in range(num_samples):
            first_row = sample * rows_per_sample
            rows = list(range(first_row, min(first_row + rows_per_sample, num_rows)))
            linked.setdefault(root(sample), []).append(rows)
        return list(linked.values())

    def num_tokens(self, rows: Sequence[int]) -> int:
        """Return the number of tokens that count for the limit of a micro-batch, if `rows` are one.

        These are the tokens that are computed, or the labels if there are more of them. Equal completions are computed
        once, but the loss copies their hidden states for each of them.
        """
        num_labels = sum(document.num_labels for document in self._documents_of(rows))
        return max(num_labels, sum(node.length for node in self._forest(rows)))

    def shared_row(self, rows: Sequence[int]) -> "SharedRow | None":
        """Return the shared row of a micro-batch whose rows are joined in this order. None if nothing is shared."""
        documents = self._documents_of(rows)
        if not documents:  # rows of padding
            return None
        shared_row = SharedRow(self._forest(rows), [len(document) for document in documents])
        return shared_row if shared_row.num_shared_tokens else None

    def _documents_of(self, rows: Sequence[int]) -> list[Document]:
        return [document for row in rows for document in self._documents_by_row.get(row, [])]

    def _forest(self, rows: Sequence[int]) -> list[Node]:
        """Return the nodes of some rows in preorder. Their documents are counted through the rows in this order."""
        documents = self._documents_of(rows)
        trees: list[list[int]] = []  # the documents of each tree
        tree_of_group: dict[int, list[int]] = {}
        for index, document in enumerate(documents):
            if document.group in tree_of_group:
                tree_of_group[document.group].append(index)
                continue
            tree = [index]
            trees.append(tree)
            if document.group in self._shared_groups:
                tree_of_group[document.group] = tree
        return _build_forest(documents, trees)


def _read_documents(batch: Batch, images: RowImages | None, sharing: PromptSharing) -> list[Document]:
    """Return the documents of a batch, row by row."""
    columns = [batch["input_ids"][..., None], batch["position_ids"][..., None]]
    if "image_features" in batch:
        columns.append(_number_images(batch["image_features"], images, sharing)[..., None])
    for name in ("rotary_ids", "image_ends", "routed_experts"):
        if name in batch:
            columns.append(batch[name].long().unflatten(1, (-1, 1)).flatten(2))
    content = torch.cat(columns, 2)  # [n, S, columns]
    documents = []
    for row, seq_ids in enumerate(batch["seq_ids"]):
        for start, end in _document_bounds(seq_ids):
            group = int(batch[PROMPT_IDS][row, start])
            num_labels = int((batch["labels"][row, start:end] != IGNORE_INDEX).sum())
            documents.append(Document(row, group, content[row, start:end], num_labels))
    return documents


def _document_bounds(seq_ids: Tensor) -> list[tuple[int, int]]:
    """Return where the documents of a row begin and end, given the row's `seq_ids` [S].

    >>> _document_bounds(torch.tensor([0, 0, 1, -1]))
    [(0, 2), (2, 3)]
    """
    lengths = seq_ids[seq_ids != PADDING_SEQ_ID].bincount().tolist()
    ends = list(accumulate(lengths))
    return [(end - length, end) for end, length in zip(ends, lengths, strict=True)]


def _has_position_gaps(batch: Batch) -> bool:
    """Check whether the positions of any document leave out a number.

    >>> _has_position_gaps({"position_ids": torch.tensor([[0, 1, 0, 2]]), "seq_ids": torch.tensor([[0, 0, 1, 1]])})
    True
    """
    seq_ids = batch["seq_ids"]
    continues = (seq_ids[:, 1:] == seq_ids[:, :-1]) & (seq_ids[:, 1:] != PADDING_SEQ_ID)
    return bool((continues & (batch["position_ids"].diff() != 1)).any())


def _number_images(features: Tensor, images: RowImages | None, sharing: PromptSharing) -> Tensor:
    """Return a number for each image feature, equal for the same feature of equal images, -1 for text, [n, S].

    Args:
        features: Index of each token's feature within its row, -1 for text, [n, S].
        images: Images of the rows.
        sharing: Counts the features of an image.
    """
    if images is None or sharing.image_tokens is None:
        return features
    numbers = features.clone()
    first_features: dict[int, int] = {}  # by the key of an image
    num_features = 0
    for row, grids in enumerate(images.grids):
        row_numbers = []
        for index, grid in enumerate(grids):
            count = sharing.image_tokens(grid)
            # Without keys, all images are different.
            key = -1 - num_features if images.keys is None else images.keys[row][index]
            if key not in first_features:
                first_features[key] = num_features
                num_features += count
            row_numbers.append(torch.arange(first_features[key], first_features[key] + count))
        is_image = features[row] >= 0
        if row_numbers:
            numbers[row, is_image] = torch.cat(row_numbers)[features[row, is_image]]
    return numbers


def _build_forest(documents: Sequence[Document], trees: Sequence[Sequence[int]]) -> list[Node]:
    """Return the nodes of documents in preorder.

    Args:
        documents: All documents.
        trees: The documents of each tree, by their index. Only documents of one tree share beginnings.
    """
    nodes: list[Node] = []
    for tree in trees:
        _add_tree(nodes, documents, tree)
    return nodes


def _add_tree(nodes: list[Node], documents: Sequence[Document], indices: Sequence[int]) -> None:
    """Append the nodes of the tree of some documents in preorder.

    Args:
        nodes: The nodes so far.
        documents: All documents.
        indices: Those of the tree.
    """
    # Documents that are equal before `begin`, and the node of the token there. A stack, because a recursion would be as
    # deep as the tree: an episode of 1000 turns, each turn a document with all turns before it, has 1000 nested nodes.
    pending: list[tuple[Sequence[int], int, int]] = [(indices, 0, -1)]
    while pending:
        members, begin, parent = pending.pop()
        first = documents[members[0]]
        common = min(_common_length(first, documents[index], begin) for index in members)
        if common > begin:
            nodes.append(Node(tuple(members), begin, common - begin, parent))
            parent = len(nodes) - 1
        # A document that ends here needs no further node. The others continue together if their next tokens are equal.
        continuations: dict[bytes | int, list[int]] = {}
        for index in members:
            next_tokens = documents[index].content[common : common + MIN_BRANCH_TOKENS]
            if len(next_tokens) == MIN_BRANCH_TOKENS:
                continuations.setdefault(next_tokens.numpy().tobytes(), []).append(index)
            elif len(next_tokens):
                continuations[index] = [index]
        for together in reversed(list(continuations.values())):
            pending.append((together, common, parent))


def _common_length(first: Document, second: Document, begin: int) -> int:
    """Return the number of tokens with which two documents begin alike, given that `begin` tokens are equal.

    A common beginning contains an image with all its tokens or not at all, because all of them are in `content`.
    """
    length = min(len(first), len(second))
    differs = (first.content[begin:length] != second.content[begin:length]).any(1)
    if bool(differs.any()):
        length = begin + int(differs.int().argmax())
    return length


class RankTokens(NamedTuple):
    """The part of a shared row on one context-parallel rank.

    Attributes:
        tokens: The first copy in the full row of each token of the rank, [T/cp] int64. -1 on padding.
        nodes: Node of each token, -1 on padding, [T/cp].
        last_nodes: Last node that sees the token, -1 on padding, [T/cp].
        loss_tokens: Positions of the full row that the loss reads, [E] int64. -1 on padding.
        loss_states: Index among the rank's tokens of the hidden state of each of them, [E] int64. 0 on padding.
        copies: Positions of the full row whose tokens the rank computes, [n] int64.
        copy_states: Index among the rank's tokens of each of them, [n] int64.
    """

    tokens: Tensor
    nodes: Tensor
    last_nodes: Tensor
    loss_tokens: Tensor
    loss_states: Tensor
    copies: Tensor
    copy_states: Tensor


class SharedRow:
    """The nodes of a micro-batch's joined row, and the map from the tokens of the full row to those of the nodes.

    Args:
        nodes: The nodes in preorder. Their documents are numbers in the row.
        document_lengths: Number of tokens of each document of the full row, which has no padding.

    Attributes:
        lengths: Number of tokens of each node.
        parents: Parent of each node, -1 for none.
        num_shared_tokens: Tokens of the full row that are not computed.
    """

    def __init__(self, nodes: Sequence[Node], document_lengths: Sequence[int]):
        self.lengths = [node.length for node in nodes]
        self.parents = [node.parent for node in nodes]
        starts = list(accumulate(document_lengths, initial=0))
        self._full_length = starts[-1]
        self._shared_index = torch.empty(self._full_length, dtype=torch.int64)  # of each token of the full row
        first_copies = []
        num_tokens = 0
        for node in nodes:
            shared = torch.arange(num_tokens, num_tokens + node.length)
            for document in node.documents:
                begin = starts[document] + node.begin
                self._shared_index[begin : begin + node.length] = shared
            first_begin = starts[node.documents[0]] + node.begin
            first_copies.append(torch.arange(first_begin, first_begin + node.length))
            num_tokens += node.length
        self._first_copies = torch.cat(first_copies)  # [T]
        self._num_tokens = num_tokens
        self.num_shared_tokens = self._full_length - num_tokens

    def packing(self, size: int) -> TreePacking:
        """Return the nodes of the row for attention kernels, given the number of context-parallel ranks."""
        return TreePacking.of(self.lengths, self.parents, num_chunks=1 if size == 1 else 2 * size)

    def num_pairs(self, window: int | None = None) -> int:
        """Return the pairs of query and key that are computed, each document counted as a square as in `StepCounts`.

        Args:
            window: Number of keys that a query sees. None: all of its document.
        """
        ends: list[int] = []  # tokens from the beginning of a document to the end of each node
        total = 0
        for length, parent in zip(self.lengths, self.parents, strict=True):
            before = ends[parent] if parent >= 0 else 0
            end = before + length
            ends.append(end)
            if window is None:
                total += end * end - before * before
            else:
                total += end * min(end, window) - before * min(before, window)
        return total

    def on_rank(self, rank: int, size: int, labels: Tensor) -> RankTokens:
        """Return the part of a context-parallel rank. No collectives.

        Every rank gets the same share of every node (`attention.tree.split_nodes`). The tokens whose values the loss
        reads are on the rank that computes them. They are padded to the same number on every rank.

        Args:
            rank: The rank.
            size: The number of ranks.
            labels: Labels of the full row, [L].
        """
        order = self._order(size)
        _, nodes, last_nodes = self.packing(size).streams()  # [1, T with padding] each
        full = torch.stack([order, nodes[0], last_nodes[0]])
        local, local_nodes, local_last_nodes = shard_sequence(full, rank, size) if size > 1 else full
        is_token = local >= 0
        tokens = torch.where(is_token, self._first_copies[local.clamp(min=0)], -1)

        states = torch.full((self._num_tokens,), -1)  # index among the rank's tokens of each shared token
        states[local[is_token]] = is_token.nonzero()[:, 0]
        copy_states = states[self._shared_index]
        copies = (copy_states >= 0).nonzero()[:, 0]
        loss_tokens = self._loss_tokens_in(order, size, labels)[rank]
        loss_states = torch.where(loss_tokens >= 0, copy_states[loss_tokens.clamp(min=0)], 0)
        return RankTokens(tokens, local_nodes, local_last_nodes, loss_tokens, loss_states, copies, copy_states[copies])

    def loss_tokens(self, size: int, labels: Tensor) -> list[Tensor]:
        """Return the positions of the full row that the loss reads on each context-parallel rank, [E] int64 each.

        These are the positions that have a label or belong to one document only. -1 on padding.

        Args:
            size: The number of ranks.
            labels: Labels of the full row, [L].
        """
        return self._loss_tokens_in(self._order(size), size, labels)

    def _loss_tokens_in(self, order: Tensor, size: int, labels: Tensor) -> list[Tensor]:
        """Return `loss_tokens`, given the result of `_order`."""
        num_copies = self._shared_index.bincount()[self._shared_index]  # [L]
        is_read = (labels != IGNORE_INDEX) | (num_copies == 1)
        ranks = self._rank_of_tokens(order, size)[self._shared_index]  # [L]
        by_rank = [(is_read & (ranks == rank)).nonzero()[:, 0] for rank in range(size)]
        longest = max(1, *(len(tokens) for tokens in by_rank))
        padded = []
        for tokens in by_rank:
            padding = tokens.new_full((longest - len(tokens),), -1)
            padded.append(torch.cat([tokens, padding]))
        return padded

    def _order(self, size: int) -> Tensor:
        """Return the shared tokens in the order of `packing`, in which the row is cut over ranks. -1 is padding."""
        packing = self.packing(size)
        next_tokens = list(accumulate(self.lengths, initial=0))[:-1]  # of each node, the first that is not placed
        parts = []
        for pieces in packing.pieces:  # of each chunk
            for node, count in enumerate(pieces):
                parts.append(torch.arange(next_tokens[node], next_tokens[node] + count))
                next_tokens[node] += count
            num_padding = packing.chunk_length - sum(pieces)
            parts.append(torch.full((num_padding,), -1))
        return torch.cat(parts)

    def _rank_of_tokens(self, order: Tensor, size: int) -> Tensor:
        """Return the context-parallel rank of each shared token, [T] int64, given the result of `_order`."""
        if size == 1:
            return torch.zeros_like(order)
        chunk_length = len(order) // (2 * size)
        ranks_of_chunks = torch.empty(2 * size, dtype=torch.int64)
        for rank in range(size):
            ranks_of_chunks[list(get_chunk_indices(rank, size))] = rank
        ranks = torch.empty(self._num_tokens, dtype=torch.int64)
        is_token = order >= 0
        chunks = torch.arange(len(order)) // chunk_length
        ranks[order[is_token]] = ranks_of_chunks[chunks[is_token]]
        return ranks
