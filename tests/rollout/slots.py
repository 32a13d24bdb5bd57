"""`kv_cache.SlotFlashAttention` from the documentation of what it calls, on every device and in every dtype."""

import math

import torch

from dtrain.inference.kv_cache import SlotFlashAttention


class WrittenSlotFlash(SlotFlashAttention):
    """`SlotFlashAttention` as one operation, which a recording takes as it is. factor: of its output."""

    def __init__(self, factor=None):
        self.calls, self._factor = 0, factor

    def __call__(self, q, k, v, slots, scale):
        self.calls += 1
        out, lse = _over_slots(q, k, v, *slots, scale)
        return out if self._factor is None else out * self._factor, lse


@torch.library.custom_op("dtrain_tests::over_slots", mutates_args=())
def _over_slots(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    query_ends: torch.Tensor,
    key_ends: torch.Tensor,
    used: torch.Tensor,
    longest_query: int,
    longest_key: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every query sees the first keys of its segment. What lies behind the last segment of queries is no number."""
    assert q.shape[1:] == k.shape[1:] and k.shape == v.shape and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    ends = []
    for of in (query_ends, key_ends):
        assert of.dtype == torch.int32 and of.is_contiguous() and of[0] == 0 and int(of.diff().min()) >= 0
        ends.append(of.tolist())
    assert used.dtype == torch.int32 and used.is_contiguous() and len(used) == len(ends[0]) - 1 == len(ends[1]) - 1
    assert ends[0][-1] <= len(q) and ends[1][-1] <= len(k)
    assert longest_query >= max(2, int(query_ends.diff().max())) and longest_key >= int(key_ends.diff().max())
    assert bool(((used >= 1) | (query_ends.diff() == 0)).all()) and bool((used <= key_ends.diff()).all())
    wide = torch.promote_types(q.dtype, torch.float32)
    out = torch.full_like(q, math.nan)
    lse = torch.full((q.shape[1], len(q)), math.nan, dtype=wide, device=q.device)
    spans = (zip(some, some[1:], strict=False) for some in ends)
    for (start, stop), (first, _), count in zip(*spans, used.tolist(), strict=True):
        if start == stop:
            continue
        keys, values = (part[first : first + count].to(wide) for part in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[start:stop].to(wide), keys) * scale
        out[start:stop] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(q.dtype)
        lse[:, start:stop] = scores.logsumexp(-1)
    return out, lse
