"""fla.ops.gated_delta_rule.chunk_gated_delta_rule written out from its documentation, on every device and in every
dtype: token by token."""

import torch

from tests.attention.recurrence import recurred


def chunk_gated_delta_rule(
    q,
    k,
    v,
    g,
    beta,
    scale=None,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    cu_seqlens=None,
    cu_seqlens_cpu=None,
):
    """q, k [B, T, Hk, K], v [B, T, Hv, V], g, beta [B, T, Hv] -> [B, T, Hv, V] in q's dtype, and the last states
    [N, Hv, K, V] of N documents: those that cu_seqlens [N + 1] says of the only row, or the B rows."""
    assert use_qk_l2norm_in_kernel and abs(scale - k.shape[-1] ** -0.5) < 1e-12
    if cu_seqlens is None:
        documents = list(torch.arange(q.shape[:2].numel()).view(q.shape[:2]))
    else:
        ends = cu_seqlens_cpu.tolist()
        assert len(q) == 1 and ends[0] == 0 and ends[-1] == q.shape[1] and cu_seqlens.device == q.device
        assert ends == sorted(set(ends)) and (q.is_cuda or torch.equal(cu_seqlens, cu_seqlens_cpu))
        documents = [torch.arange(*pair) for pair in zip(ends, ends[1:], strict=False)]
    wide = torch.promote_types(q.dtype, torch.float32)
    assert initial_state is None or (initial_state.dtype == wide and len(initial_state) == len(documents))
    # [N, longest]: the tokens of each document, and behind them one that changes no state
    places = torch.nn.utils.rnn.pad_sequence(documents, batch_first=True, padding_value=q.shape[:2].numel())
    places = places.pin_memory().to(q.device, non_blocking=True) if q.is_cuda else places
    flat = [torch.cat([one.flatten(0, 1).to(wide), one.new_zeros(1, *one.shape[2:])]) for one in (q, k, v, g, beta)]
    out, states = recurred(*(one[places] for one in flat), initial_state)
    whole = out.new_zeros(len(flat[0]), *out.shape[2:]).index_put((places,), out)
    return whole[:-1].unflatten(0, q.shape[:2]).to(q.dtype), states if output_final_state else None
