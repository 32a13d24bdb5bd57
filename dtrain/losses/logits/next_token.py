"""Log-probabilities of next tokens, for each layout of logits: plain, vocabulary-parallel, DTensor and packed.

Targets are the unshifted token ids. They are shifted inside: position t gets log p of token t + 1, so rows of S tokens
give S - 1 values, in the natural order of the sequence, on every rank. Values are float32 (float64 for float64 logits).

Under context parallel with groups (`cp_group`), a rank has the head and the tail chunk of each row. Example: S = 8 and
cp = 2, tokens t0 to t7:

    logits of rank 0    positions 0 1 6 7      targets there  t1 t2 t7 -
    logits of rank 1    positions 2 3 4 5      targets there  t3 t4 t5 t6
    result              log p of t1 to t7 at positions 0 to 6, on both ranks

With DTensors the caller defines the order of the shards: `seq_index[i]` is the token at position i of the sharded
sequence, [0, 1, 6, 7, 2, 3, 4, 5] in the example.

The two differ in the backward. With groups, each cp rank may have a loss of its own, and the ranks' gradients are
summed. With DTensors, every cp rank must have the same loss, and each rank uses its own gradient only.
"""

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate, Shard

from dtrain.losses.head.filtered import Exchange, filtered_logprobs
from dtrain.losses.head.logprobs import TrainingSamplingParams, need_top_k_or_top_p_filtering
from dtrain.losses.head.sources import GivenLogits
from dtrain.losses.head.vocabulary import Group, group_rank, group_size
from dtrain.losses.logits.groups import Bounds, allgather_cp_sharded_tensor, assert_on_device, shard_bounds, shard_like
from dtrain.losses.logits.logprob import ChunkedDistributedLogprob, check_chunk
from dtrain.parallel.collectives import all_gather, gather_along
from dtrain.parallel.context.batch import find_sequences, get_rank_positions
from dtrain.parallel.placement import chunk_bounds

NO_TARGET = -1  # an id outside of every vocabulary, which gives a log-probability of 0.0 and no gradient


def logprobs_of_targets(
    logits: Tensor,
    target: Tensor,
    start: int | Tensor,
    end: int | Tensor,
    group: Group,
    inference_only: bool,
    chunk_size: int | None,
    sampling_params: TrainingSamplingParams | None,
) -> Tensor:
    """Compute log p of targets that are already shifted.

    Args:
        logits: This rank's shard, [B, S, V/tp].
        target: Ids of the full vocabulary, [B, S]. An id outside of the vocabulary gives 0 and no gradient.
        start: The first id of this rank's shard.
        end: The last id of this rank's shard, plus 1.
        group: Ranks over which the vocabulary is sharded. None if it is not.
        inference_only: Whether to return values without a gradient.
        chunk_size: Bound on the positions of the sequence in a tile. None: no bound.
        sampling_params: Compute log p after this top-k and top-p. None: no filter.

    Returns:
        [B, S] on every rank.

    Collectives:
        Those of `ChunkedDistributedLogprob`, or with a filter those of `ChunkedDistributedLogprobWithSampling`.
    """
    if sampling_params is not None and need_top_k_or_top_p_filtering(sampling_params):
        top_k, top_p = sampling_params.top_k, sampling_params.top_p
        sampled = ChunkedDistributedLogprobWithSampling
        return sampled.apply(logits, target, group, top_k, top_p, chunk_size, inference_only)
    return ChunkedDistributedLogprob.apply(logits, target, start, end, chunk_size, group, inference_only)


def next_tokens(ids: Tensor) -> Tensor:
    """Shift ids [B, S] by one. The last position gets NO_TARGET.

    Example:
        >>> next_tokens(torch.tensor([[5, 6, 7]]))
        tensor([[ 6,  7, -1]])
    """
    return torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], NO_TARGET)], 1)


def from_parallel_logits_to_logprobs(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    vocab_start_index: int | Tensor,
    vocab_end_index: int | Tensor,
    tp_group: Group,
    inference_only: bool = False,
    cp_group: Group = None,
    chunk_size: int | None = None,
    sampling_params: TrainingSamplingParams | None = None,
) -> Tensor:
    """Compute log p of the token after each position, from vocabulary-parallel logits.

    Args:
        vocab_parallel_logits: [B, S/cp, V/tp], the head and tail chunk of each row under context parallel.
        target: Unshifted ids in natural order, [B, S]. They may be shorter than cp times the local logits. Then they
            are padded, and the result has the length of the target.
        vocab_start_index: The first id of this rank's shard.
        vocab_end_index: The last id of this rank's shard, plus 1.
        tp_group: Ranks over which the vocabulary is sharded. None if it is not.
        inference_only: Whether to return values without a gradient.
        cp_group: Ranks over which the sequence is sharded. None if it is not. In the backward, the gradients of the cp
            ranks are summed: each may have a loss of its own.
        chunk_size: Bound on the positions in a tile. None: no bound.
        sampling_params: Compute log p after this top-k and top-p. None: no filter.

    Returns:
        [B, S - 1] in natural order, on every rank.

    Raises:
        ValueError: If the target is longer than cp times the local logits, or 2 · cp does not divide that length.

    Collectives:
        Those of the log-probabilities over tp, and one all-gather over cp (a reduce-scatter in the backward).
    """
    following = shard_like(next_tokens(target), vocab_parallel_logits.shape[1], cp_group)
    arguments = (vocab_start_index, vocab_end_index, tp_group, inference_only, chunk_size, sampling_params)
    logprobs = logprobs_of_targets(vocab_parallel_logits, following, *arguments)
    return allgather_cp_sharded_tensor(logprobs, cp_group, seq_dim=1)[:, : target.shape[1] - 1]


def dtensor_from_parallel_logits_to_logprobs(
    vocab_parallel_logits: Tensor,
    target: Tensor | DTensor,
    vocab_start_index: int | Tensor,
    vocab_end_index: int | Tensor,
    tp_group: Group,
    inference_only: bool = False,
    seq_index: Tensor | None = None,
    chunk_size: int | None = None,
    sampling_params: TrainingSamplingParams | None = None,
) -> Tensor:
    """Compute log p of the token after each position, from local logits and a target that may be a DTensor.

    Args:
        vocab_parallel_logits: This rank's logits, [B, S/cp, V/tp].
        target: Unshifted ids, [B, S]. Under context parallel a DTensor on a mesh with a dimension "cp", sharded along
            the sequence as the logits are.
        vocab_start_index: The first id of this rank's shard.
        vocab_end_index: The last id of this rank's shard, plus 1.
        tp_group: Ranks over which the vocabulary is sharded. None if it is not.
        inference_only: Whether to return values without a gradient.
        seq_index: The token at each position of the sharded sequence, [S]. Required under context parallel.
        chunk_size: Bound on the positions in a tile. None: no bound.
        sampling_params: Compute log p after this top-k and top-p. None: no filter.

    Returns:
        [B, S - 1] in natural order, on every rank. Gradients are not summed over cp: all cp ranks must have the same
        loss.

    Raises:
        ValueError: If `seq_index` is missing under context parallel, or the target is not sharded along the sequence.

    Collectives:
        Those of the log-probabilities over tp. Over cp one all-gather of the targets and one of the result.
    """
    cp_group = _context_group(target)
    ids = target.full_tensor() if isinstance(target, DTensor) else target
    if ids.shape[1] != vocab_parallel_logits.shape[1] * group_size(cp_group):
        raise ValueError(
            f"target has {ids.shape[1]} positions, the logits {vocab_parallel_logits.shape[1]} on each of "
            f"{group_size(cp_group)} cp ranks. Under context parallel pass a DTensor sharded over 'cp'"
        )
    arguments = (vocab_start_index, vocab_end_index, tp_group, inference_only, chunk_size, sampling_params)
    if cp_group is None:
        return logprobs_of_targets(vocab_parallel_logits, next_tokens(ids), *arguments)[:, :-1]
    if seq_index is None:
        raise ValueError("seq_index is needed under context parallel: the token at each position")
    length, local = ids.shape[1], vocab_parallel_logits.shape[1]
    # The inverse permutation: `sharded_position[t]` is the position of token t in the sharded sequence.
    sharded_position = torch.empty_like(seq_index)
    sharded_position.scatter_(0, seq_index, torch.arange(length, device=seq_index.device))
    in_natural_order = ids[:, sharded_position]
    following = next_tokens(in_natural_order)[:, seq_index]
    local_positions = slice(cp_group.rank() * local, (cp_group.rank() + 1) * local)
    logprobs = logprobs_of_targets(vocab_parallel_logits, following[:, local_positions], *arguments)
    gathered = all_gather(logprobs.detach(), 1, cp_group)[:, sharded_position]
    # The gathered values have no gradient. Insert this rank's values again, with their graph: the other ranks
    # differentiate their own values.
    return gathered.index_copy(1, seq_index[local_positions], logprobs)[:, :-1]


def _context_group(target: Tensor | DTensor) -> Group:
    """Return the cp group over which a target is sharded, or None."""
    return _sharding_groups(target, "target", cp=1).get("cp") if isinstance(target, DTensor) else None


def _sharding_groups(tensor: DTensor, name: str, **dims: int) -> dict[str, dist.ProcessGroup]:
    """Return the group of each mesh dimension over which a tensor is sharded.

    Args:
        tensor: Its placements are checked.
        name: For the error.
        dims: The mesh dimensions that may shard the tensor, and which dimension of the tensor each may shard. For
            example, cp=1 allows Shard(1) over "cp".

    Raises:
        ValueError: For every other placement than these and Replicate.
    """
    mesh, groups = tensor.device_mesh, {}
    names = mesh.mesh_dim_names or (None,) * mesh.ndim
    for mesh_dim, (mesh_name, placement) in enumerate(zip(names, tensor.placements, strict=True)):
        if mesh.size(mesh_dim) == 1 or isinstance(placement, Replicate):
            continue
        dim = placement.dim % tensor.dim() if type(placement) is Shard else None
        if mesh_name is None or dim is None or dims.get(mesh_name) != dim:
            allowed = " and ".join(f"Shard({dim}) over {mesh_name!r}" for mesh_name, dim in dims.items())
            raise ValueError(
                f"{name} placed {tensor.placements} on a mesh of {names}: use {allowed}, and Replicate elsewhere"
            )
        groups[mesh_name] = mesh.get_group(mesh_name)
    return groups


def local_logits(logits: DTensor) -> tuple[Tensor, Bounds, Group, Group]:
    """Return this rank's part of a DTensor of logits [B, S, V].

    Returns:
        The local tensor [B, S/cp, V/tp], the bounds of its ids, the tp group over which the vocabulary is sharded, and
        the cp group over which the sequence is sharded. A group is None if there is no sharding over it.

    Raises:
        ValueError: For other placements than Replicate, Shard(2) over "tp" and Shard(1) over "cp".
    """
    groups, start = _sharding_groups(logits, "the logits", cp=1, tp=logits.dim() - 1), 0
    if "tp" in groups:
        start, _ = chunk_bounds(logits.shape[-1], groups["tp"].size(), groups["tp"].rank())
    # If the logits are replicated over a mesh dimension, its ranks have the same loss, and each uses its own gradient.
    local = logits.to_local()
    return local, (start, start + local.shape[-1]), groups.get("tp"), groups.get("cp")


def get_logprobs_from_vocab_parallel_logits(
    vocab_parallel_logits: DTensor,
    input_ids: Tensor | DTensor,
    seq_index: Tensor | None = None,
    chunk_size: int | None = None,
    sampling_params: TrainingSamplingParams | None = None,
) -> Tensor:
    """Compute log p of the token after each position, from a DTensor of logits.

    Args:
        vocab_parallel_logits: [B, S, V] on a mesh of ("tp",) or ("cp", "tp"). The vocabulary is sharded over tp, evenly
            or not, or replicated. The sequence is sharded over cp.
        input_ids: Unshifted ids, [B, S]. Under context parallel a DTensor that is sharded as the logits are.
        seq_index: The token at each position of the sharded sequence, [S]. Required under context parallel.
        chunk_size: Bound on the positions in a tile. None: no bound.
        sampling_params: Compute log p after this top-k and top-p. None: no filter.

    Returns:
        [B, S - 1] in natural order, on every rank. With gradients disabled, no tensor is saved for a backward.
        `dtensor_from_parallel_logits_to_logprobs` describes the gradients.

    Raises:
        ValueError: For other placements, if `input_ids` are not sharded as the logits, or if `seq_index` is missing
            under context parallel.

    Collectives:
        Those of `dtensor_from_parallel_logits_to_logprobs`.
    """
    logits, bounds, tp_group, cp_group = local_logits(vocab_parallel_logits)
    if cp_group is not None and _context_group(input_ids) is None:
        raise ValueError("the logits are sharded over 'cp': input_ids must be a DTensor that is sharded over it, too")
    return dtensor_from_parallel_logits_to_logprobs(
        logits,
        input_ids,
        *bounds,
        tp_group,
        inference_only=not torch.is_grad_enabled(),
        seq_index=seq_index,
        chunk_size=chunk_size,
        sampling_params=sampling_params,
    )


def get_next_token_logprobs_from_logits(
    input_ids: Tensor | DTensor,
    next_token_logits: Tensor | DTensor,
    seq_index: Tensor | None = None,
    vocab_parallel_rank: int | None = None,
    vocab_parallel_group: Group = None,
    context_parallel_group: Group = None,
    sampling_params: TrainingSamplingParams | None = None,
    chunk_size: int | None = None,
) -> Tensor:
    """Compute log p of the token after each position, for every layout of logits.

    The arguments determine the layout:

    - `vocab_parallel_group` is given: the logits are this rank's shard, [B, S/cp, V/tp], of a vocabulary that is
      divided as torch.chunk does. See `from_parallel_logits_to_logprobs`. One more all-reduce determines the shard's
      bounds.
    - The logits are a DTensor: see `get_logprobs_from_vocab_parallel_logits`.
    - The logits are a plain tensor, [B, S, V]: there are no collectives.

    Args:
        input_ids: Unshifted ids, [B, S].
        next_token_logits: The logits.
        seq_index: For a DTensor under context parallel.
        vocab_parallel_rank: This rank's index in `vocab_parallel_group`.
        vocab_parallel_group: Ranks over which the vocabulary is sharded.
        context_parallel_group: Ranks over which the sequence is sharded, head-tail.
        sampling_params: Compute log p after this top-k and top-p. None: no filter.
        chunk_size: Bound on the positions in a tile. None: no bound.

    Returns:
        [B, S - 1] in natural order, on every rank.

    Raises:
        ValueError: If there is a `vocab_parallel_group` without a rank, or for other placements of a DTensor.

    Collectives:
        Those of the function for the layout, and one all-reduce of two numbers with a `vocab_parallel_group` of several
        ranks.

    Example:
        >>> get_next_token_logprobs_from_logits(torch.tensor([[0, 1, 3]]), torch.zeros(1, 3, 4))
        tensor([[-1.3863, -1.3863]])
    """
    if vocab_parallel_group is None and isinstance(next_token_logits, DTensor):
        return get_logprobs_from_vocab_parallel_logits(
            next_token_logits, input_ids, seq_index, chunk_size=chunk_size, sampling_params=sampling_params
        )
    return from_parallel_logits_to_logprobs(
        next_token_logits,
        input_ids.to(next_token_logits.device),
        *shard_bounds(next_token_logits, vocab_parallel_rank, vocab_parallel_group),
        vocab_parallel_group,
        cp_group=context_parallel_group,
        chunk_size=chunk_size,
        sampling_params=sampling_params,
    )


def all_to_all_vp2sq(vocab_parallel_logits: Tensor, tp_group: Group) -> Tensor:
    """Convert all rows of a vocabulary shard, [rows, V/tp], to some rows of the full vocabulary, [rows/tp, V].

    Rows are divided over the ranks as torch.chunk does. No gradient.

    Args:
        vocab_parallel_logits: This rank's shard, [rows, V/tp].
        tp_group: Ranks over which the vocabulary is sharded. None if it is not.

    Returns:
        This rank's rows, [rows/tp, V].

    Raises:
        ValueError: If the logits are not 2D.

    Collectives:
        One all-to-all, and one exchange of shard sizes on the host.
    """
    if vocab_parallel_logits.dim() != 2:
        raise ValueError(f"logits must be 2D, [rows, V/tp], and have the shape {tuple(vocab_parallel_logits.shape)}")
    exchange = Exchange(vocab_parallel_logits.shape[1], tp_group, vocab_parallel_logits.device)
    return exchange.to_full_rows(vocab_parallel_logits)


def all_to_all_sq2vp(seq_parallel_logits: Tensor, tp_group: Group) -> Tensor:
    """Convert some rows of the full vocabulary, [rows/tp, V], to all rows of this rank's shard, [rows, V/tp].

    The inverse of `all_to_all_vp2sq`. The vocabulary is divided over the ranks as torch.chunk does. No gradient.

    Args:
        seq_parallel_logits: This rank's rows, [rows/tp, V].
        tp_group: Ranks over which the rows are divided. None if they are not.

    Returns:
        This rank's shard of all rows, [rows, V/tp].

    Raises:
        ValueError: If the logits are not 2D.

    Collectives:
        One all-to-all, and one exchange of the numbers of rows on the host.
    """
    if seq_parallel_logits.dim() != 2:
        raise ValueError(f"logits must be 2D, [rows/tp, V], and have the shape {tuple(seq_parallel_logits.shape)}")
    # The transposed logits are a "vocabulary" of rows that is sharded over the ranks: the same exchange inverts it.
    exchange = Exchange(len(seq_parallel_logits), tp_group, seq_parallel_logits.device)
    return exchange.to_full_rows(seq_parallel_logits.t()).t().contiguous()


class DistributedLogprobWithSampling:
    """Log-probabilities of targets after top-k and top-p, from logits of a sharded vocabulary."""

    @staticmethod
    def apply(
        vocab_parallel_logits: Tensor,
        target: Tensor,
        tp_group: Group,
        top_k: int | None,
        top_p: float,
        inference_only: bool = False,
    ) -> Tensor:
        """Compute log p(target), [B, S], on every rank.

        Args:
            vocab_parallel_logits: This rank's shard, already divided by the temperature, [B, S, V/tp].
            target: Ids of the full vocabulary, [B, S].
            tp_group: Ranks over which the vocabulary is sharded. None if it is not.
            top_k: Keep the k most probable tokens. None, 0 or -1: all. `apply_top_k_top_p` defines both filters.
            top_p: Keep the most probable tokens with this probability in total. 1.0: all.
            inference_only: Whether to return values without a gradient.

        Returns:
            [B, S] on every rank. -inf and no gradient for a target that the filter excludes. 0.0 and no gradient for a
            target outside [0, V). A mask of the kept tokens, [B · S/tp, V], is saved for the backward.

        Collectives:
            Forward: one exchange of shard sizes on the host, one all-to-all, one all-reduce of B · S numbers. Backward:
            one exchange of shard sizes, two all-to-alls.
        """
        chunked = ChunkedDistributedLogprobWithSampling
        return chunked.apply(vocab_parallel_logits, target, tp_group, top_k, top_p, None, inference_only)


class ChunkedDistributedLogprobWithSampling:
    """`DistributedLogprobWithSampling` in chunks. It takes less memory, and filters again in the backward."""

    @staticmethod
    def apply(
        vocab_parallel_logits: Tensor,
        target: Tensor,
        tp_group: Group,
        top_k: int | None,
        top_p: float,
        chunk_size: int | None,
        inference_only: bool = False,
    ) -> Tensor:
        """Compute log p(target), [B, S], on every rank.

        Args:
            vocab_parallel_logits: This rank's shard, already divided by the temperature, [B, S, V/tp].
            target: Ids of the full vocabulary, [B, S].
            tp_group: Ranks over which the vocabulary is sharded. None if it is not.
            top_k: See `DistributedLogprobWithSampling.apply`.
            top_p: See `DistributedLogprobWithSampling.apply`.
            chunk_size: Positions of the sequence per chunk. Extra memory is O(chunk_size · V). None: one chunk.
            inference_only: Whether to return values without a gradient.

        Returns:
            [B, S], as `DistributedLogprobWithSampling.apply` returns it.

        Raises:
            ValueError: If `chunk_size` is less than 1.

        Collectives:
            Forward: one exchange of shard sizes on the host, one all-to-all per chunk, one all-reduce of B · S numbers.
            Backward: one exchange of shard sizes, two all-to-alls per chunk.
        """
        check_chunk(chunk_size)
        logits = vocab_parallel_logits.detach() if inference_only else vocab_parallel_logits
        max_rows = target.numel() if chunk_size is None else chunk_size * logits.shape[:-2].numel()
        return filtered_logprobs(
            partial(GivenLogits, max_rows=max(1, max_rows), flatten=True),
            logits,
            ids=target.flatten(),
            group=tp_group,
            sampling=TrainingSamplingParams(top_k, top_p),
            keeps_masks=chunk_size is None,
        ).view(target.shape)


def from_parallel_logits_to_logprobs_packed_sequences(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    cu_seqlens_padded: Tensor,
    unpacked_seqlen: int,
    vocab_start_index: int,
    vocab_end_index: int,
    group: Group,
    inference_only: bool = False,
    cp_group: Group = None,
    chunk_size: int | None = None,
    sampling_params: TrainingSamplingParams | None = None,
    target_is_pre_rolled: bool = False,
) -> Tensor:
    """Compute log p of the token after each position of packed sequences, one sequence per row of the result.

    Example: cu_seqlens_padded = [0, 4, 6] and unpacked_seqlen = 5, so tokens a b c d | e f:

        result    [[log p(b), log p(c), log p(d), 0],
                   [log p(f), 0,        0,        0]]

    Args:
        vocab_parallel_logits: [1, T/cp, V/tp]. Under context parallel, a rank has the head and the tail chunk of each
            sequence, one sequence after the other.
        target: Unshifted ids, [1, T].
        cu_seqlens_padded: Sequence b has the packed tokens from entry b to entry b + 1, [B + 1].
        unpacked_seqlen: The length of a row, at least that of the longest sequence.
        vocab_start_index: The first id of this rank's shard.
        vocab_end_index: The last id of this rank's shard, plus 1.
        group: Ranks over which the vocabulary is sharded. None if it is not.
        inference_only: Whether to return values without a gradient.
        cp_group: Ranks over which the sequences are sharded. None if they are not. In the backward, the gradients of
            the cp ranks are summed.
        chunk_size: Bound on the positions in a tile. None: no bound.
        sampling_params: Compute log p after this top-k and top-p. None: no filter.
        target_is_pre_rolled: Whether the target is already shifted and sharded, [1, T/cp].

    Returns:
        [B, unpacked_seqlen - 1]. 0 after the end of a sequence. An empty sequence gives a row of zeros.

    Raises:
        ValueError: If the shapes do not fit.
        RuntimeError: If 2 · cp does not divide the length of a sequence, the sequences have more than T tokens, or one
            is longer than `unpacked_seqlen`. On CUDA it is a device assertion.

    Collectives:
        Those of the log-probabilities over `group`, and one all-gather over cp.
    """
    size, local = group_size(cp_group), vocab_parallel_logits.shape[1]
    tokens = local * size
    if target.shape[-1] != (local if target_is_pre_rolled else tokens):
        raise ValueError(
            f"target has {target.shape[-1]} tokens and the logits {local} on each of {size} cp ranks, with "
            f"target_is_pre_rolled={target_is_pre_rolled}"
        )
    cu_seqlens = cu_seqlens_padded.to(vocab_parallel_logits.device, torch.int64)
    # Treat the tokens after the last sequence as one more sequence, which is not returned.
    cu_seqlens = torch.cat([cu_seqlens, cu_seqlens.new_full((1,), tokens)])
    _check(cu_seqlens, size, unpacked_seqlen)
    starts, lengths = cu_seqlens[:-2], cu_seqlens.diff()[:-1]
    if target_is_pre_rolled:
        following = target.flatten()
    else:
        following = _next_in_sequence(target.flatten(), cu_seqlens)
        if size > 1:
            following = following[get_rank_positions(cu_seqlens, tokens, group_rank(cp_group), size)]
    arguments = (vocab_start_index, vocab_end_index, group, inference_only, chunk_size, sampling_params)
    logprobs = logprobs_of_targets(vocab_parallel_logits, following[None], *arguments).squeeze(0)  # [T/cp]
    if size > 1:
        logprobs = gather_along(logprobs, 0, cp_group)  # [T], rank after rank
        # Invert the permutation to natural order: packed position -> index in the gathered values.
        packed_position = torch.cat([get_rank_positions(cu_seqlens, tokens, rank, size) for rank in range(size)])
        gathered_index = torch.empty_like(packed_position)
        gathered_index.scatter_(0, packed_position, torch.arange(tokens, device=cu_seqlens.device))
        logprobs = logprobs.index_select(0, gathered_index)
    offsets = torch.arange(unpacked_seqlen - 1, device=cu_seqlens.device)
    has_next = offsets < lengths[:, None] - 1  # [B, unpacked_seqlen - 1]
    if not tokens:
        return logprobs.new_zeros(has_next.shape)
    positions = torch.where(has_next, starts[:, None] + offsets, 0)
    return torch.where(has_next, logprobs.index_select(0, positions.flatten()).view(positions.shape), 0)


def _check(cu_seqlens: Tensor, cp_size: int, unpacked_seqlen: int) -> None:
    """Check cu_seqlens on the device. The last entry of `cu_seqlens` is that of the tokens after the last sequence."""
    lengths = cu_seqlens.diff()
    rise = (lengths >= 0).all() & (cu_seqlens[0] == 0)
    assert_on_device(rise, "cu_seqlens_padded must rise from 0 to at most the number of packed tokens")
    fits = (lengths[:-1] <= unpacked_seqlen).all()
    assert_on_device(fits, "unpacked_seqlen is shorter than a packed sequence")
    if cp_size > 1:
        even = (lengths % (2 * cp_size) == 0).all()
        assert_on_device(even, f"the length of a packed sequence is not a multiple of 2·cp = {2 * cp_size}")


def _next_in_sequence(target: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Shift packed ids [T] by one within each sequence. The last token of a sequence gets NO_TARGET."""
    positions = torch.arange(len(target), device=target.device)
    last = positions + 1 == cu_seqlens[1:][find_sequences(positions, cu_seqlens)]
    return torch.where(last, NO_TARGET, target.roll(-1))
