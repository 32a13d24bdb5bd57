"""`segments.Flash` written out from the documentation of what it calls, on every device and in every dtype."""

import math

import torch

from dtrain.attention.segments import Flash


class WrittenFlash(Flash):
    """Segment by segment, the window counted from the segments' ends. Holds its callers to what the kernels ask."""

    calls = 0

    def attend(self, q, k, v, segments, scale):
        return self._computed(q, k, v, segments, scale)[0]

    def attend_with_lse(self, q, k, v, segments, scale):
        assert not torch.is_grad_enabled()
        return self._computed(q, k, v, segments, scale)

    def differentiate(self, grad, q, k, v, merged, segments, scale):
        out, lse = merged
        wide = torch.promote_types(q.dtype, torch.float32)
        q_grad, k_grad, v_grad = (torch.zeros_like(one, dtype=wide) for one in (q, k, v))
        for asked, held, seen in self._segments(q, k, v, segments):
            some_k, some_v = (one[held].to(wide).repeat_interleave(q.shape[1] // k.shape[1], 1) for one in (k, v))
            some_q, some_grad = q[asked].to(wide), grad[asked].to(wide)
            scores = torch.einsum("qhd,khd->hqk", some_q, some_k) * scale
            weights = (scores - lse[:, asked, None]).exp() * seen
            of_weights = torch.einsum("qhd,khd->hqk", some_grad, some_v)
            delta = (some_grad * out[asked].to(wide)).sum(-1).t()[..., None]
            of_scores = weights * (of_weights - delta) * scale
            q_grad[asked] += torch.einsum("hqk,khd->qhd", of_scores, some_k)
            for into, weighted, vectors in ((k_grad, of_scores, some_q), (v_grad, weights, some_grad)):
                of_heads = torch.einsum("hqk,qhd->khd", weighted, vectors)
                into[held] += of_heads.unflatten(1, (k.shape[1], -1)).sum(2)
        return q_grad.to(q.dtype), k_grad.to(k.dtype), v_grad.to(v.dtype)

    def _computed(self, q, k, v, segments, scale):
        self.calls += 1
        wide, outputs, sums = torch.promote_types(q.dtype, torch.float32), [], []
        for asked, held, seen in self._segments(q, k, v, segments):
            some_k, some_v = (one[held].to(wide).repeat_interleave(q.shape[1] // k.shape[1], 1) for one in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q[asked].to(wide), some_k) * scale
            scores = scores.masked_fill(~seen, -math.inf)
            outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), some_v))
            sums.append(scores.logsumexp(-1))
        return torch.cat(outputs).to(q.dtype), torch.cat(sums, 1)

    def seen(self, distance, window, longest_key):
        """[q, k] bool: the distances that a window shows. As FlashAttention-2 reads it, flash_api.cpp: -1 beside a side
        that is given means the longest segment of keys, and not all."""
        left, right = window
        assert left >= -1 and right in (-1, 0)
        if left >= 0 and right < 0:
            return (distance <= left) & (distance >= -longest_key)
        return (distance <= (left if left >= 0 else math.inf)) & (distance >= (0 if right == 0 else -math.inf))

    def _segments(self, q, k, v, segments):
        ends = []
        for tokens, of, longest in (
            (q, segments.query_ends, segments.longest_query),
            (k, segments.key_ends, segments.longest_key),
        ):
            assert tokens.dim() == 3 and tokens.stride(-1) == 1
            assert of.dtype == torch.int32 and of.is_contiguous() and of[0] == 0 and of[-1] == len(tokens)
            lengths = of.diff()
            assert int(lengths.min()) > 0 and longest >= max(2, int(lengths.max()))
            ends.append(of.tolist())
        assert v.shape == k.shape and len(ends[0]) == len(ends[1])
        for (start, stop), (first, last) in zip(*(zip(one, one[1:], strict=False) for one in ends), strict=True):
            at = torch.arange(stop - start)[:, None] + (last - first) - (stop - start)
            seen = self.seen(at - torch.arange(last - first), segments.window, segments.longest_key)
            assert bool(seen.any(1).all()), "a query of a segment without a key"
            yield slice(start, stop), slice(first, last), seen
