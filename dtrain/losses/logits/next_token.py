"""Log-probabilities of the next tokens from logits in each layout that a model hands out: vocabulary-parallel with
groups, DTensor, plain, packed; and after top-k and top-p. Targets come unshifted here, and are shifted inside.
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
from dtrain.parallel.context.batch import held_positions, sequence_of
from dtrain.parallel.placement import chunk_bounds

NO_TARGET = -1  # no id of any vocabulary: log-probability 0.0 and no gradient


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
    """log p(target) [B, S] from a shard of the logits [B, S, V/tp], filtered and in chunks where that is asked for."""
    if sampling_params is not None and need_top_k_or_top_p_filtering(sampling_params):
        top_k, top_p = sampling_params.top_k, sampling_params.top_p
        sampled = ChunkedDistributedLogprobWithSampling
        return sampled.apply(logits, target, group, top_k, top_p, chunk_size, inference_only)
    return ChunkedDistributedLogprob.apply(logits, target, start, end, chunk_size, group, inference_only)


def next_tokens(ids: Tensor) -> Tensor:
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
    """logits [B, S/cp, V/tp], head-tail over cp; target [B, S] unshifted, natural order -> [B, S − 1]: log p of the
    token after each position, natural order, on every rank.

    A target shorter than cp times the local logits is padded and the result cut to it. Under cp the incoming gradient
    is summed over cp: the true derivative where every cp rank owns a loss. Collectives: those of the log-probabilities
    over tp, and one all-gather over cp. Raises ValueError for a longer target, and for a length that 2·cp does not
    divide.
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
    """This rank's logits [B, S/cp, V/tp] and target [B, S], unshifted -> [B, S − 1] in natural order, on every rank.

    Under context parallel `target` is a DTensor on a mesh with a dimension "cp", sharded along the sequence in the
    order of the logits, and seq_index [S] names the token that position i of that order holds. The incoming gradient
    is not summed over cp: every cp rank must have the same loss. One all-gather of the targets over cp, one of the
    result. Raises ValueError where seq_index is missing under cp, or the target is not sharded along the sequence.
    """
    cp_group = _context_group(target)
    ids = target.full_tensor() if isinstance(target, DTensor) else target
    if ids.shape[1] != vocab_parallel_logits.shape[1] * group_size(cp_group):
        raise ValueError(
            f"target holds {ids.shape[1]} positions, the logits {vocab_parallel_logits.shape[1]} on each of "
            f"{group_size(cp_group)} cp ranks; under context parallel pass a DTensor sharded over 'cp'"
        )
    arguments = (vocab_start_index, vocab_end_index, tp_group, inference_only, chunk_size, sampling_params)
    if cp_group is None:
        return logprobs_of_targets(vocab_parallel_logits, next_tokens(ids), *arguments)[:, :-1]
    if seq_index is None:
        raise ValueError("seq_index is needed under context parallel: the token that each position holds")
    length, local = ids.shape[1], vocab_parallel_logits.shape[1]
    places = torch.empty_like(seq_index).scatter_(0, seq_index, torch.arange(length, device=seq_index.device))
    following = next_tokens(ids[:, places])[:, seq_index]
    mine = slice(cp_group.rank() * local, (cp_group.rank() + 1) * local)
    logprobs = logprobs_of_targets(vocab_parallel_logits, following[:, mine], *arguments)
    gathered = all_gather(logprobs.detach(), 1, cp_group)[:, places]
    # This rank's own values once more, with their graph: the gradient of the others stays with the others.
    return gathered.index_copy(1, seq_index[mine], logprobs)[:, :-1]


def _context_group(target: Tensor | DTensor) -> Group:
    """The cp group of a target that is cut over it; None where it is whole here."""
    return _cut_groups(target, "target", cp=1).get("cp") if isinstance(target, DTensor) else None


def _cut_groups(tensor: DTensor, name: str, **dims: int) -> dict[str, dist.ProcessGroup]:
    """Return the group of each mesh dimension over which `tensor` is cut. dims: the dimension of the tensor that each
    may cut. Raises ValueError naming the placements for all else but Replicate."""
    mesh, groups = tensor.device_mesh, {}
    names = mesh.mesh_dim_names or (None,) * mesh.ndim
    for mesh_dim, (mesh_name, placement) in enumerate(zip(names, tensor.placements, strict=True)):
        if mesh.size(mesh_dim) == 1 or isinstance(placement, Replicate):
            continue
        dim = placement.dim % tensor.dim() if type(placement) is Shard else None
        if mesh_name is None or dim is None or dims.get(mesh_name) != dim:
            allowed = " and ".join(f"Shard({dim}) over {cut!r}" for cut, dim in dims.items())
            raise ValueError(
                f"{name} placed {tensor.placements} on a mesh of {names}: it may be {allowed}, all else Replicate"
            )
        groups[mesh_name] = mesh.get_group(mesh_name)
    return groups


def local_logits(logits: DTensor) -> tuple[Tensor, Bounds, Group, Group]:
    """Return this rank's part of a DTensor of logits [B, S, V]: the local tensor, the bounds of its ids, the tp group
    over which the vocabulary is cut and the cp group over which the sequence is, None where it is not cut.

    Raises ValueError naming the placements for all but Replicate, Shard of the vocabulary over "tp", and Shard of the
    sequence over "cp".
    """
    groups, start = _cut_groups(logits, "the logits", cp=1, tp=logits.dim() - 1), 0
    if "tp" in groups:
        start, _ = chunk_bounds(logits.shape[-1], groups["tp"].size(), groups["tp"].rank())
    # A replicated tensor is the same on every rank, and so is the loss: each keeps its own gradient.
    local = logits.to_local()
    return local, (start, start + local.shape[-1]), groups.get("tp"), groups.get("cp")


def get_logprobs_from_vocab_parallel_logits(
    vocab_parallel_logits: DTensor,
    input_ids: Tensor | DTensor,
    seq_index: Tensor | None = None,
    chunk_size: int | None = None,
    sampling_params: TrainingSamplingParams | None = None,
) -> Tensor:
    """A DTensor of logits [B, S, V] on a mesh of ("tp",) or ("cp", "tp") and input_ids [B, S] -> [B, S − 1], natural
    order, on every rank.

    The vocabulary may be sharded over tp, evenly or not, or replicated; the sequence over cp, then input_ids is a
    DTensor sharded as the logits are, and seq_index [S] names the token that each position of the order holds. Without
    a grad mode nothing is saved. Otherwise as `dtensor_from_parallel_logits_to_logprobs`.
    """
    logits, bounds, tp_group, cp_group = local_logits(vocab_parallel_logits)
    if cp_group is not None and _context_group(input_ids) is None:
        raise ValueError("the logits are sharded over 'cp': input_ids must be a DTensor that is, too")
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
    """log p of the token after each position, [B, S − 1] float32 (float64 from float64), by the layout of the logits:

    - a vocab_parallel_group: this rank's shard [B, S/cp, V/tp], cut as torch.chunk cuts, and its rank in the group
      (`from_parallel_logits_to_logprobs`; one small all-reduce more, for the shard's place);
    - a DTensor: `get_logprobs_from_vocab_parallel_logits`;
    - a plain tensor [B, S, V]: no collective.

    input_ids [B, S] unshifted. chunk_size, in sequence positions, and top-k / top-p of sampling_params in all three.
    Raises ValueError where the group comes without a rank, and for placements that fit no case.
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
    """[rows, V/tp] on every rank -> [rows/tp, V]: rank r gets the r-th part of the rows, cut as torch.chunk cuts.

    One all-to-all, and one exchange of shard sizes on the host. No gradient. Raises ValueError for other than 2-D.
    """
    if vocab_parallel_logits.dim() != 2:
        raise ValueError(f"[rows, V/tp] is needed, this is a 2D function; it got {tuple(vocab_parallel_logits.shape)}")
    exchange = Exchange(vocab_parallel_logits.shape[1], tp_group, vocab_parallel_logits.device)
    return exchange.whole_rows(vocab_parallel_logits)


def all_to_all_sq2vp(seq_parallel_logits: Tensor, tp_group: Group) -> Tensor:
    """[rows/tp, V] on every rank -> [rows, V/tp], the inverse of `all_to_all_vp2sq`; the vocabulary is cut as
    torch.chunk cuts. One all-to-all, and one exchange of row counts on the host. No gradient.
    """
    if seq_parallel_logits.dim() != 2:
        raise ValueError(f"[rows/tp, V] is needed, this is a 2D function; it got {tuple(seq_parallel_logits.shape)}")
    # The exchange that undoes it has rows and columns in each other's place.
    exchange = Exchange(len(seq_parallel_logits), tp_group, seq_parallel_logits.device)
    return exchange.whole_rows(seq_parallel_logits.t()).t().contiguous()


class DistributedLogprobWithSampling:
    """log p(target) under top-k / top-p filtering, from logits with a cut vocabulary."""

    @staticmethod
    def apply(
        vocab_parallel_logits: Tensor,
        target: Tensor,
        tp_group: Group,
        top_k: int | None,
        top_p: float,
        inference_only: bool = False,
    ) -> Tensor:
        """logits [B, S, V/tp], target [B, S] global ids -> [B, S] on every rank, float32 (float64 from float64).

        The rule is `apply_top_k_top_p`'s. A filtered target: −inf and a zero gradient row; a target outside [0, V): 0.0
        and a zero gradient. A mask [B·S/tp, V] of the tokens that stay is kept for the backward. Forward: one
        all-to-all, one all-reduce of B·S numbers, one exchange of shard sizes on the host. Backward: two all-to-alls,
        and such an exchange.
        """
        chunked = ChunkedDistributedLogprobWithSampling
        return chunked.apply(vocab_parallel_logits, target, tp_group, top_k, top_p, None, inference_only)


class ChunkedDistributedLogprobWithSampling:
    """`DistributedLogprobWithSampling` in chunks: less memory, and the backward filters again."""

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
        """Return what `DistributedLogprobWithSampling.apply` does, [B, S]; extra memory O(chunk_size · V), chunk_size
        in sequence positions. Per chunk one all-to-all, in the backward two.
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
    """logits [1, T/cp, V/tp], target [1, T] unshifted, cu_seqlens_padded [B + 1] -> [B, unpacked_seqlen − 1]: log p of
    the token after each position of each sequence, 0 beyond its end; an empty sequence gives a row of zeros.

    Sequence b is the span between cu_seqlens_padded[b] and [b + 1]; every cp rank holds its head and tail chunk of
    each, one sequence after the other. target_is_pre_rolled: target [1, T/cp] is shifted and cut already.
    Under cp the incoming gradient is summed over cp. Collectives: those of the log-probabilities over `group`, one
    all-gather over cp. Raises ValueError where shapes do not fit; RuntimeError (on CUDA a device assertion) where 2·cp
    does not divide a sequence's length, the spans go beyond T, or unpacked_seqlen is shorter than a sequence.
    """
    size, local = group_size(cp_group), vocab_parallel_logits.shape[1]
    tokens = local * size
    if target.shape[-1] != (local if target_is_pre_rolled else tokens):
        raise ValueError(
            f"target has {target.shape[-1]} tokens, the logits {local} on each of {size} cp ranks, "
            f"target_is_pre_rolled={target_is_pre_rolled}"
        )
    ends = cu_seqlens_padded.to(vocab_parallel_logits.device, torch.int64)
    # Tokens after the last sequence are one more, which is not returned.
    ends = torch.cat([ends, ends.new_full((1,), tokens)])
    _check(ends, size, unpacked_seqlen)
    starts, lengths = ends[:-2], ends.diff()[:-1]
    if target_is_pre_rolled:
        following = target.flatten()
    else:
        following = _next_in_sequence(target.flatten(), ends)
        if size > 1:
            following = following[held_positions(ends, tokens, group_rank(cp_group), size)]
    arguments = (vocab_start_index, vocab_end_index, group, inference_only, chunk_size, sampling_params)
    logprobs = logprobs_of_targets(vocab_parallel_logits, following[None], *arguments).squeeze(0)  # [T/cp]
    if size > 1:
        logprobs = gather_along(logprobs, 0, cp_group)  # [T], rank after rank
        held = torch.cat([held_positions(ends, tokens, rank, size) for rank in range(size)])
        places = torch.empty_like(held).scatter_(0, held, torch.arange(tokens, device=held.device))
        logprobs = logprobs.index_select(0, places)
    offsets = torch.arange(unpacked_seqlen - 1, device=ends.device)
    inside = offsets < lengths[:, None] - 1  # [B, unpacked_seqlen − 1]
    if not tokens:
        return logprobs.new_zeros(inside.shape)
    places = torch.where(inside, starts[:, None] + offsets, 0)
    return torch.where(inside, logprobs.index_select(0, places.flatten()).view(places.shape), 0)


def _check(ends: Tensor, cp_size: int, unpacked_seqlen: int) -> None:
    lengths = ends.diff()
    rise = (lengths >= 0).all() & (ends[0] == 0)
    assert_on_device(rise, "cu_seqlens_padded must rise from 0 to at most the number of packed tokens")
    fits = (lengths[:-1] <= unpacked_seqlen).all()
    assert_on_device(fits, "unpacked_seqlen is shorter than a packed sequence; nothing is cut off")
    if cp_size > 1:
        even = (lengths % (2 * cp_size) == 0).all()
        assert_on_device(even, f"a packed length is no multiple of {2 * cp_size}, 2·cp; nothing is dropped")


def _next_in_sequence(target: Tensor, ends: Tensor) -> Tensor:
    """[T] -> the token after each in its own sequence, NO_TARGET at its end."""
    positions = torch.arange(len(target), device=target.device)
    last = positions + 1 == ends[1:][sequence_of(positions, ends)]
    return torch.where(last, NO_TARGET, target.roll(-1))
