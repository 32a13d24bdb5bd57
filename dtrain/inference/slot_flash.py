"""Variable-length flash attention to the slots of a KV cache, on CUDA in half precision."""

from typing import Any, NamedTuple

from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import AuxRequest, varlen_attn


class Slots(NamedTuple):
    """Segments. query_ends, key_ends: [n + 1] int32, where each begins and the last one ends; queries may stand behind
    the last one. used: [n] int32, the keys that are seen of each. longest_query, longest_key: of a segment, or more."""

    query_ends: Tensor
    key_ends: Tensor
    used: Tensor
    longest_query: int
    longest_key: int


class SlotFlash:
    """The operation: q [T, kv, hd], k and v [K, kv, hd] → [T, kv, hd], and the log-sum-exp [kv, T], float32."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, slots: Slots, scale: float) -> tuple[Tensor, Tensor]:
        # Splits of the keys are left to the kernel: as the products of other layers, it may round by how many rows
        # there are. FlashAttention-2 never splits here; 3 does, but for deterministic algorithms.
        ends, longest = (slots.query_ends, slots.key_ends), (slots.longest_query, slots.longest_key)
        options: dict[str, Any] = {"return_aux": AuxRequest(lse=True), "scale": scale, "seqused_k": slots.used}
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out, lse = varlen_attn(q, k, v, *ends, *longest, **options)
        return out, lse
