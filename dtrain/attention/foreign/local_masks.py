"""Translation of masks over local tokens to masks over the tokens of all ranks.

A meaning is a way to mask all S tokens of a row. There are these, each of which a sliding window may restrict further:

    BY_INDEX              causal over the S tokens
    BY_NATURAL_POSITION   the same, for a model that was given its own global positions
    FIRST_BUFFER << i     causal within the documents of the i-th buffer of positions

`LocalMasks` finds the meanings for which transformers would have built exactly the mask that it was given. A set of
meanings is an integer, the sum of their bits, because ranks exchange it: the intersection of two sets is `a & b`.

Example: 8 tokens on 2 ranks, and one buffer with the positions 0 to 7. Rank 0 has the positions 0 1 6 7, and its mask
has two documents. BY_NATURAL_POSITION and FIRST_BUFFER explain it, so its set is 2 + 4 = 6. Rank 1 has the positions 2
3 4 5 and a causal mask, which all three meanings explain, so its set is 7. The intersection is 6 & 7 = 6. Both meanings
left are causal over the row, and `choose` returns that of the buffer.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dtrain.parallel.context.batch import get_chunk_indices

BY_INDEX = 1
BY_NATURAL_POSITION = 2
FIRST_BUFFER = 4


class Buffer(NamedTuple):
    """A tensor that a context shards in place.

    Attributes:
        tensor: The caller's tensor object. Inside the context its storage is that of `shard`.
        full: The content outside of the context, [..., S, ...].
        shard: This rank's part, [..., S/cp, ...].
        dim: The sequence dimension.
    """

    tensor: Tensor
    full: Tensor
    shard: Tensor
    dim: int


class PositionBuffer(NamedTuple):
    """A buffer that contains position ids.

    Attributes:
        tensor: The caller's tensor object.
        local: This rank's positions, [B or 1, S/cp].
        documents: Number of the document of every token of the full rows, [B or 1, S]. None: each row is one document.
    """

    tensor: Tensor
    local: Tensor
    documents: Tensor | None


class MeaningOfMask(NamedTuple):
    """The explanation of a local mask.

    Attributes:
        meanings: The set of meanings that explain it.
        shown_keys: [B or 1, S/cp] bool, False for keys that a padding mask hides. None: no key is hidden.
    """

    meanings: int
    shown_keys: Tensor | None


class MeaningOfRow(NamedTuple):
    """The one meaning on which all ranks agree.

    Attributes:
        bit: The meaning.
        documents: Number of the document of every token, [B or 1, S]. None: each row is one document.
    """

    bit: int
    documents: Tensor | None


class _Candidate(NamedTuple):
    """A meaning to compare a local mask with. positions: [B or 1, S/cp]. None: the index of the local tokens."""

    bit: int
    positions: Tensor | None


class LocalMasks:
    """Explains local masks, by building the masks that transformers makes for each meaning.

    Args:
        positions: The context's buffers of positions.
        rank: This rank's index on the context-parallel mesh.
        size: The number of context-parallel ranks.
    """

    def __init__(self, positions: Sequence[PositionBuffer], rank: int, size: int):
        self.positions = positions
        self.rank = rank
        self.size = size

    def natural_positions(self, length: int, device: torch.device) -> Tensor:
        """Return the index in the full row of each of `length` local tokens, [S/cp].

        For example, [0, 1, 6, 7] on rank 0 of 2 with 4 local tokens.
        """
        chunk_length = length // 2
        chunk = torch.arange(chunk_length, device=device)
        first, second = get_chunk_indices(self.rank, self.size)
        return torch.cat([chunk + first * chunk_length, chunk + second * chunk_length])

    def explain_causal(self, length: int, window: int | None) -> int:
        """Return the set of meanings for which transformers passes `is_causal=True` and no mask.

        transformers does so if positions increase by 1, because then no document begins within the local tokens.

        Raises:
            ValueError: If a window is shorter than the local tokens. transformers would have passed a mask.
        """
        if window is not None and window < length:
            raise ValueError(
                f"a module with a sliding window of {window} tokens attends to {length} local tokens without a mask "
                "that shows the window: its meaning over all ranks is unknown. Pass a mask [B, 1, S/cp, S]"
            )
        meanings = 0
        for candidate in self._candidates(length, torch.device("cpu")):
            positions = candidate.positions
            if positions is None or bool((positions.diff(dim=1) == 1).all()):
                meanings |= candidate.bit
        return meanings

    def explain_mask(self, mask: Tensor, length: int, window: int | None) -> MeaningOfMask:
        """Return the meanings for which transformers builds the local `mask`, and the keys that padding hides.

        Args:
            mask: [..., S/cp, S/cp], bool (True: seen) or float (0: seen, the smallest number: hidden).
            length: The number of local tokens.
            window: The sliding window of the calling module.

        Raises:
            ValueError: If the mask has another shape, adds a bias to scores, or no meaning explains it.
        """
        if mask.dim() > 4 or mask.dim() < 2 or mask.shape[-2:] != (length, length):
            raise ValueError(
                f"attn_mask {list(mask.shape)} is neither over the {length} local tokens nor over the "
                f"{length * self.size} tokens of all ranks: pass [B, 1, {length}, {length * self.size}]"
            )
        visible = _visible(mask.detach())
        missing_dims = 4 - mask.dim()
        visible = visible.view(*[1] * missing_dims, *mask.shape)  # [B or 1, H or 1, L, L]
        # A token sees itself under every causal mask, so the diagonal shows which keys a padding mask hides.
        shown_keys = visible[:, 0].diagonal(dim1=1, dim2=2)  # [B or 1, L]
        index = torch.arange(length, device=mask.device)[None]
        meanings = 0
        for candidate in self._candidates(length, mask.device):
            if candidate.positions is None:
                causal = _causal(index, window, restarts=False)
            else:
                causal = _causal(candidate.positions.to(mask.device), window, restarts=True)
            # The rows of a batch may be packed differently, so both may have B rows or 1. Other numbers do not fit.
            if visible.shape[0] not in (1, len(causal)) and len(causal) != 1:
                continue
            expected = causal & shown_keys[:, None, :]  # [B or 1, L, L]
            if bool((visible == expected[:, None]).all()):
                meanings |= candidate.bit
        if not meanings:
            with_window = "" if window is None else f" with the module's window of {window} tokens"
            raise ValueError(
                f"the meaning of attn_mask {list(mask.shape)} over all ranks is unknown: it covers local tokens only, "
                f"and is not the causal mask that transformers builds for them{with_window}. Pass a mask over "
                f"all keys in their natural order, [B, 1, {length}, {length * self.size}]"
            )
        return MeaningOfMask(meanings, None if bool(shown_keys.all()) else shown_keys)

    def choose(self, meanings: int, length: int) -> MeaningOfRow:
        """Return the one meaning in a set. All ranks pass the same set, so all return or raise alike.

        Two buffers with the same documents count as one meaning.

        Raises:
            ValueError: If the set is empty, or if its meanings differ.
        """
        choices: list[MeaningOfRow] = []
        for index, positions in enumerate(self.positions):
            bit = FIRST_BUFFER << index
            is_new = not any(_are_same(positions.documents, choice.documents) for choice in choices)
            if meanings & bit and is_new:
                choices.append(MeaningOfRow(bit, positions.documents))
        # Natural positions also explain the mask of a buffer without documents, or of a rank whose local tokens are in
        # one document. They are only a meaning of their own if no buffer explains the masks.
        is_causal_over_row = bool(meanings & BY_INDEX) or (bool(meanings & BY_NATURAL_POSITION) and not choices)
        if is_causal_over_row and not any(choice.documents is None for choice in choices):
            choices.append(MeaningOfRow(BY_INDEX, None))
        if len(choices) != 1:
            found = "several meanings" if choices else "no common meaning"
            raise ValueError(
                f"the attention masks of the {self.size} context-parallel ranks have {found} over all their tokens "
                "(causal by index, or by the documents of a buffer of positions). Pass a mask over all keys in their "
                f"natural order, [B, 1, {length}, {length * self.size}]"
            )
        return choices[0]

    def _candidates(self, length: int, device: torch.device) -> list[_Candidate]:
        """Return the meanings that a mask over `length` local tokens may have."""
        natural = self.natural_positions(length, device)[None]
        candidates = [_Candidate(BY_INDEX, None), _Candidate(BY_NATURAL_POSITION, natural)]
        for index, positions in enumerate(self.positions):
            if positions.local.shape[1] == length:
                candidates.append(_Candidate(FIRST_BUFFER << index, positions.local))
        return candidates


def position_buffer(buffer: Buffer) -> PositionBuffer | None:
    """Return the positions in a buffer, or None if it contains something else.

    Position ids are integers [B or 1, S] that begin at 0, and either count on by 1 or restart at 0. Input ids that look
    so by accident do no harm: no mask is explained by them.
    """
    full = buffer.full
    if full.dim() != 2 or buffer.dim != 1 or full.is_floating_point() or full.dtype == torch.bool or not full.numel():
        return None
    begins_at_zero = bool((full[:, 0] == 0).all())
    is_start = full.diff(dim=1) != 1  # [B, S - 1]: the token after it does not count on
    restarts_at_zero = bool((full[:, 1:][is_start] == 0).all())
    if not begins_at_zero or not restarts_at_zero:
        return None
    documents = None
    if bool(is_start.any()):
        documents = F.pad(is_start, (1, 0)).long().cumsum(1)
    return PositionBuffer(buffer.tensor, buffer.shard, documents)


def _causal(positions: Tensor, window: int | None, *, restarts: bool) -> Tensor:
    """Build a causal mask as transformers does.

    Args:
        positions: [B or 1, L].
        window: The number of keys that a query sees, its own included. None: all before it.
        restarts: Whether a position that does not follow its neighbour by 1 begins another document.

    Returns:
        [B or 1, L, L] bool, True where a query sees a key.
    """
    distance = positions[:, :, None] - positions[:, None, :]
    causal = distance >= 0
    if window is not None:
        causal &= distance < window
    if restarts:
        documents = F.pad(positions.diff(dim=1) != 1, (1, 0)).cumsum(1)
        causal &= documents[:, :, None] == documents[:, None, :]
    return causal


def _visible(mask: Tensor) -> Tensor:
    """Return a bool or float mask as a bool mask, True where a key is seen."""
    if mask.dtype == torch.bool:
        return mask
    visible = mask == 0
    hidden = mask <= torch.finfo(mask.dtype).min
    if not bool((visible | hidden).all()):
        raise ValueError(
            f"attn_mask {list(mask.shape)} covers local tokens only and adds a bias to their scores: the bias of the "
            "other ranks' keys is unknown. Pass a mask over all keys in their natural order, [B, H, S/cp, S]"
        )
    return visible


def _are_same(one: Tensor | None, other: Tensor | None) -> bool:
    """Compare two tensors of document ids, [B or 1, S], either of which may be None."""
    if one is None or other is None:
        return one is other
    if one.shape[1] != other.shape[1]:
        return False
    return torch.equal(*torch.broadcast_tensors(one, other))
