"""Kernels of scaled_dot_product_attention on a CUDA device, by the rules of torch 2.13's wheel with cuDNN 9.19.

The order is cuDNN, flash, memory-efficient, math on cards of compute capability 9 and 10, and without cuDNN at the head
on others; `torch.nn.attention.sdpa_kernel` and the switches of torch.backends.cuda hold.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

HALF = (torch.bfloat16, torch.float16)
MOST_MATH_KEYS = 1024  # the composition holds all scores: more keys than this no run may give it


class Choice:
    """capability() -> (major, minor) of the card; note(kind, what): told of every choice."""

    def __init__(self, capability: Callable[[], tuple[int, int]], note: Callable[[str, str], None]):
        self._capability, self._note = capability, note

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask, dropout, causal, scale, gqa) -> int:
        """q [B, H, Q, hd], k and v [B, kv, K, hd]. Raises where no kernel is left, and for the composition over more
        than MOST_MATH_KEYS keys, which a test wants to hear of."""
        fits = {
            SDPBackend.CUDNN_ATTENTION: torch._C._get_cudnn_sdp_enabled() and self._cudnn(q, k, causal),
            SDPBackend.FLASH_ATTENTION: torch._C._get_flash_sdp_enabled() and self._flash(q, k, v, mask, causal),
            SDPBackend.EFFICIENT_ATTENTION: torch._C._get_mem_efficient_sdp_enabled() and self._efficient(q, k, v),
            SDPBackend.MATH: torch._C._get_math_sdp_enabled(),
        }
        found = next((one for one in self._order() if fits.get(one)), None)
        if found is None:
            raise RuntimeError("No available kernel. Aborting execution.")
        shapes = f"q{list(q.shape)} k{list(k.shape)} mask={None if mask is None else list(mask.shape)} causal={causal}"
        self._note("kernel", f"sdpa {found.name}: {str(q.dtype)[6:]} {shapes}")
        if found == SDPBackend.EFFICIENT_ATTENTION and mask is not None:
            if mask.storage_offset() * mask.itemsize % 16:
                raise RuntimeError("attn_bias_ptr is not correctly aligned")  # in half precision; else the kernel dies
        if found == SDPBackend.MATH and k.shape[2] > MOST_MATH_KEYS:
            raise RuntimeError(f"scaled_dot_product_attention takes the math backend, which holds all scores: {shapes}")
        return found.value

    def _order(self) -> list[SDPBackend]:
        order = [SDPBackend(value) for value in torch._C._get_sdp_priority_order()]
        if self._capability()[0] in (9, 10):  # where the user's own order does not put it behind
            order.sort(key=lambda one: one != SDPBackend.CUDNN_ATTENTION)
        return order

    def _half(self, q: Tensor) -> bool:
        return q.dtype == torch.float16 or q.dtype == torch.bfloat16 and self._capability() >= (8, 0)

    def _cudnn(self, q: Tensor, k: Tensor, causal: bool) -> bool:
        size = q.shape[-1]
        is_deterministic = torch.are_deterministic_algorithms_enabled()
        return (
            self._half(q) and self._capability() >= (8, 0) and not is_deterministic
            and size <= 128 and size % 8 == 0 and k.shape[2] != 1
        )  # fmt: skip

    def _flash(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> bool:
        is_square = q.shape[2] == k.shape[2] or not causal
        return (
            self._half(q) and self._capability() >= (8, 0) and mask is None and is_square
            and q.shape[-1] == v.shape[-1] <= 256
        )  # fmt: skip

    def _efficient(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        multiple = 8 if q.dtype in HALF else 4
        is_known = q.dtype in HALF or q.dtype == torch.float32
        aligned = q.shape[-1] % multiple == 0 == v.shape[-1] % multiple
        starts = all(one.storage_offset() % multiple == 0 for one in (q, k, v))
        return is_known and aligned and starts and q.shape[1] == k.shape[1]
