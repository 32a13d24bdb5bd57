"""The kernels whose choice torch makes inside, by device: attention and the fused norm, on meta tensors; and dtrain's
own attention kernels, as far as they look at values.

`torch.nn.functional` would take the plain composition for meta tensors, whose scores [B, H, S, S] no device with a
fused kernel holds. What is kept for the backward here is what the fused kernels keep: q, k, v, the output and its
log-sum-exp [B, H, S].
"""

from dataclasses import replace

import torch
from torch import Tensor

from dtrain.attention.kernels import HALF, Kernel, SdpaKernel, Visibility
from dtrain.attention.varlen import VarlenKernel
from dtrain.base.batch import Batch, pad_stream
from dtrain.parallel.context.batch import shard_sequence
from dtrain.parallel.mesh import Mesh
from dtrain.policy.build import wants_varlen
from dtrain.policy.precision import choose_precision
from dtrain.recipe.schema import Recipe

aten = torch.ops.aten


class PlannedSdpa(SdpaKernel):
    """The CPU's kernel, which cuts each run of queries to the keys that they see.

    Stand-ins have no values, so a row of the micro-batch on the host says which keys these are; the other rows must be
    like it. It is cut over cp and padded for tp as they are. rank, size: of cp.
    """

    def __init__(self, rank: int, size: int):
        super().__init__()
        self._rank, self._size = rank, size
        self._parts: list[Tensor] = []

    def take(self, batch: Batch) -> None:
        """Take the rows of the forward that follows."""
        length, cut = batch["input_ids"].shape[1], 2 * self._size if self._size > 1 else 1
        padded = -(-length // cut) * cut
        row = torch.stack([pad_stream(name, batch[name][0], padded) for name in ("position_ids", "seq_ids")])  # [2, S]
        ranks = range(self._size)
        self._parts = [shard_sequence(row, rank, self._size) for rank in ranks] if self._size > 1 else [row]

    def seen_keys(self, visible: Tensor, visibility: Visibility, run: slice) -> slice:
        """Return the keys that the queries `run` of the host's row see; visible [B, q, K] of stand-ins is not read."""
        missing = visibility.queries - self._parts[0].shape[1]
        parts = [torch.cat([part, part.new_tensor([[2**30], [-1]]).expand(2, missing)], 1) for part in self._parts]
        chunks = [part.chunk(2, 1) for part in parts]
        keys = torch.cat(
            [*(head for head, *_ in chunks), *(chunk for _, *tail in reversed(chunks) for chunk in tail)], 1
        )
        row = replace(visibility, query_positions=parts[self._rank][:1], key_positions=keys[:1])
        if row.query_documents is not None:
            row = replace(row, query_documents=parts[self._rank][1:], key_documents=keys[1:])
        return super().seen_keys(row.visible(run, torch.device("cpu")), row, run)


def planned_kernel(recipe: Recipe, mesh: Mesh, device_type: str) -> Kernel:
    """Return the kernel that the recipe's model uses on a device of this type, for one cp rank. It is not tried out:
    the device is not here."""
    precision = choose_precision(recipe.train.dtype, device_type, recipe.train.masters)
    if wants_varlen(recipe, precision, device_type):
        return VarlenKernel()
    return PlannedSdpa(mesh.cp.get_local_rank(), mesh.cp.size())


def attention(
    device_type: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """scaled_dot_product_attention of q [B, H, Q, hd], k and v [B, kv, K, hd] by the kernel that a device would take.

    cpu: torch's CPU kernel, with or without a mask. cuda: flash attention where nothing but causality hides keys and
    the dtype is half; else, or with a mask, the memory-efficient one, which takes no grouped heads. float64 never asks
    for it there (`SdpaKernel`).
    """
    if device_type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
        )[0]
    if q.dtype in HALF and attn_mask is None:
        return aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, False, scale=scale)[0]
    bias = None if attn_mask is None else attn_mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    return aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, dropout_p, is_causal, scale=scale)[0]


def flash_workspace(q: Tensor, k: Tensor, documents: int) -> int:
    """Return the bytes that flash attention's backward holds beside its gradients, for q [T, H, hd] and k [K, kv, hd]:
    that of q in float32, rounded up for each document, and under grouped heads those of k and v for each query head."""
    multiple = 32 if q.shape[2] <= 128 else 64
    size = -(-q.shape[2] // multiple) * multiple
    own = (q.shape[0] + 128 * documents) * q.shape[1] * (size + 1) * 4
    grouped = q.shape[1] != k.shape[1]
    return own + (2 * k.shape[0] * q.shape[1] * q.shape[2] * k.element_size() if grouped else 0)


def rms_norm(x: Tensor, shape: tuple[int, ...], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """CUDA's fused norm of x [..., D] by weight [D], in x's dtype: keeps x and one number for each row, and writes each
    gradient once."""
    return _FusedRmsNorm.apply(x, weight, eps)


class _FusedRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        ctx.save_for_backward(x, weight, x.new_empty(*x.shape[:-1], 1))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, grad):
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight), None
