"""Log-probabilities from hidden states in Megatron's layout: the sequence is the first dimension, sharded over tp.

These are adapters for `head.logprobs_from_hidden_states`. H is the hidden size.
"""

from torch import Tensor

from dtrain.losses.head.logprobs import logprobs_from_hidden_states
from dtrain.losses.head.vocabulary import Group, VocabShard, block, group_size
from dtrain.losses.logits.groups import allgather_cp_sharded_tensor, check_bounds, shard_like
from dtrain.losses.logits.next_token import next_tokens
from dtrain.parallel.collectives import gather_along


class ChunkedDistributedHiddenStatesToLogprobs:
    """Log-probabilities of targets from hidden states [S/tp, B, H]. Logits are computed one tile at a time."""

    @staticmethod
    def apply(
        tensor_parallel_hidden_states: Tensor,
        target: Tensor,
        output_weight_layer: Tensor,
        vocab_start_index: int,
        vocab_end_index: int,
        chunk_size: int | None,
        tp_group: Group,
        inference_only: bool = False,
    ) -> Tensor:
        """Compute log p(target), [B, S], on every rank, in float32 (float64 for float64 inputs).

        Args:
            tensor_parallel_hidden_states: This rank's part of the sequence, [S/tp, B, H]. Its gradient is complete.
            target: Ids of the full vocabulary, [B, S]. An id outside [0, V) gives 0.0 and no gradient.
            output_weight_layer: This rank's part of the head's weight, [V/tp, H]. Its gradient is complete, summed over
                the tiles in float32.
            vocab_start_index: The first id of this rank's shard.
            vocab_end_index: The last id of this rank's shard, plus 1.
            chunk_size: Positions of the sequence per tile. None: `vocabulary.block`.
            tp_group: Ranks over which the sequence and the vocabulary are sharded. None if they are not.
            inference_only: Whether to return values without a gradient.

        Raises:
            ValueError: If the shapes or the bounds do not fit.

        Collectives:
            Over tp, one all-gather of the hidden states and one of three numbers per token. One reduce-scatter in the
            backward.
        """
        check_bounds(vocab_start_index, vocab_end_index, output_weight_layer.shape[0])
        hidden = tensor_parallel_hidden_states
        if inference_only:
            hidden, output_weight_layer = hidden.detach(), output_weight_layer.detach()
        if group_size(tp_group) > 1:
            hidden = gather_along(hidden, 0, tp_group)  # [S, B, H]
        if hidden.shape[:2] != target.t().shape:
            given = tuple(hidden.shape[:2])
            raise ValueError(f"hidden states of [S, B] {given} do not fit a target of [B, S] {tuple(target.shape)}")
        tile = None
        if chunk_size is not None:
            rows, ids = block(hidden.device.type)
            tile = (max(1, min(rows, chunk_size * hidden.shape[1])), ids)
        return logprobs_from_hidden_states(
            hidden,
            output_weight_layer,
            target.t(),
            shard=VocabShard(vocab_start_index, tp_group),
            tile=tile,
        ).logprobs.t()


def from_parallel_hidden_states_to_logprobs(
    tensor_parallel_hidden_states: Tensor,
    output_weight_layer: Tensor | None,
    output_weight: Tensor | None,
    runtime_gather_output: bool | None,
    target: Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    tp_group: Group,
    inference_only: bool = False,
    cp_group: Group = None,
    chunk_size: int | None = None,
) -> Tensor:
    """Compute log p of the token after each position.

    Args:
        tensor_parallel_hidden_states: [S/(cp · tp), B, H]. Under context parallel, of the head and the tail chunk.
        output_weight_layer: The head's weight, [V/tp, H]. Used if `output_weight` is None.
        output_weight: The head's weight if it is tied to the embedding, [V/tp, H].
        runtime_gather_output: Ignored, because every rank returns all values. Accepted for compatibility.
        target: Unshifted ids in natural order, [B, S].
        vocab_start_index: The first id of this rank's shard.
        vocab_end_index: The last id of this rank's shard, plus 1.
        tp_group: Ranks over which the sequence and the vocabulary are sharded. None if they are not.
        inference_only: Whether to return values without a gradient.
        cp_group: Ranks over which the sequence is sharded. None if it is not. In the backward, the gradients of the cp
            ranks are summed.
        chunk_size: Positions of the sequence per tile. None: `vocabulary.block`.

    Returns:
        [B, S - 1] in natural order, on every rank.

    Raises:
        ValueError: If there is no weight, or if the shapes do not fit.
    """
    weight = output_weight_layer if output_weight is None else output_weight
    if weight is None:
        raise ValueError("output_weight or output_weight_layer is needed: the head's weight")
    length = tensor_parallel_hidden_states.shape[0] * group_size(tp_group)
    logprobs = ChunkedDistributedHiddenStatesToLogprobs.apply(
        tensor_parallel_hidden_states,
        shard_like(next_tokens(target), length, cp_group),
        weight,
        vocab_start_index,
        vocab_end_index,
        chunk_size,
        tp_group,
        inference_only,
    )
    return allgather_cp_sharded_tensor(logprobs, cp_group)[:, : target.shape[1] - 1]
