"""Log-probabilities from hidden states in the layout of Megatron's users: sequence first, the sequence cut over the
tensor parallel ranks. Thin functions over `head.logprobs_from_hidden_states`.
"""

from torch import Tensor

from dtrain.losses.head.logprobs import logprobs_from_hidden_states
from dtrain.losses.head.vocabulary import Group, VocabShard, block, group_size
from dtrain.losses.logits.groups import allgather_cp_sharded_tensor, check_bounds, shard_like
from dtrain.losses.logits.next_token import next_tokens
from dtrain.parallel.collectives import gather_along


class ChunkedDistributedHiddenStatesToLogprobs:
    """log p(target) from hidden states [S/tp, B, H]; the logits exist one tile at a time."""

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
        """hidden [S/tp, B, H], target [B, S] global ids, weight [V/tp, H] -> [B, S] on every rank, float32 (float64
        from float64). A target outside [0, V): 0.0 and no gradient.

        Gradients: hidden's for its own part of the sequence, complete; the weight's, summed in float32 over tiles.
        chunk_size: positions of the sequence per tile, None for the function's own choice. Collectives over tp: an
        all-gather of the hidden states and one of three numbers per token; backward one reduce-scatter.
        """
        check_bounds(vocab_start_index, vocab_end_index, output_weight_layer.shape[0])
        hidden = tensor_parallel_hidden_states
        if inference_only:
            hidden, output_weight_layer = hidden.detach(), output_weight_layer.detach()
        if group_size(tp_group) > 1:
            hidden = gather_along(hidden, 0, tp_group)  # [S, B, H]
        if hidden.shape[:2] != target.t().shape:
            held = tuple(hidden.shape[:2])
            raise ValueError(f"hidden states of [S, B] {held} do not fit a target of [B, S] {tuple(target.shape)}")
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
    """hidden [S/(cp·tp), B, H] and target [B, S] unshifted -> [B, S − 1]: log p of the token after each position,
    natural order, on every rank.

    output_weight [V/tp, H]: the head's weight where it is tied to the embedding; output_weight_layer is the layer's
    own, taken where output_weight is None. runtime_gather_output changes nothing: values are whole on every rank.
    Under cp the sequence lies head-tail, and the incoming gradient is summed over cp. Otherwise as
    `ChunkedDistributedHiddenStatesToLogprobs.apply`.
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
