"""The context that shards tensors in place, and the attention of the models called inside it."""

import contextlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dtrain.attention.foreign.local_masks import Buffer
from dtrain.attention.foreign.running_modules import RunningModules
from dtrain.attention.foreign.sharded_attention import ShardedAttention
from dtrain.parallel.context.batch import mesh_rank, shard_sequence

GATHERED = (None, "allgather")
ROTATED = ("alltoall", "addtoall", "ring")


def create_context_parallel_ctx(
    cp_mesh: DeviceMesh,
    cp_buffers: Sequence[Tensor],
    cp_seq_dims: Sequence[int],
    cp_no_restore_buffers: Collection[Tensor],
    cp_rotate_method: str | None = None,
    *,
    num_padding: int | Tensor = 0,
) -> AbstractContextManager[None]:
    """Create a context inside which tensors and attention are sharded over the context-parallel ranks.

    On entry every buffer [..., S, ...] becomes this rank's shard [..., S/cp, ...] of itself, in place and head-tail. On
    exit all buffers but `cp_no_restore_buffers` are restored, after exceptions too. A buffer's tensor object changes
    its storage, so views that were made before keep the full buffer. The context can be entered once.

    Inside, `torch.nn.functional.scaled_dot_product_attention` over local tokens, q [B, H, S/cp, hd] and k, v
    [B, kv, S/cp, hd], attends to the keys of all ranks. It accepts:

    - `is_causal=True` without a mask: causal over the S tokens. A sliding window is read from the calling module
      (`sliding_window`, or its `config`), as transformers has it.
    - no mask and not causal: every query sees every key.
    - the mask that transformers builds from the local tokens, [B or 1, 1, S/cp, S/cp], bool or float: causal, with a
      sliding window, packed documents (the full positions must be one of the buffers), or a 2-D padding mask.
    - any mask over all keys in their natural order: [..., S/cp, S] for the local queries, [..., S, S] or [..., 1, S].
      It is applied as it is. No causal mask or window is added to it.

    Everything else raises at the call, on every rank: dropout, cross-attention, keys from a cache, masks with another
    meaning, layers that mix tokens in another way (convolutions, linear attention), and attention that does not go
    through this function (eager, flex, variable-length, `nn.MultiheadAttention`). Models of dtrain must have a
    context-parallel kernel over the same ranks. Their calls are not changed.

    The backward may run inside the context or after it. After it, the buffers that it reads (input ids, labels) must be
    in `cp_no_restore_buffers`, which torch checks. Modules that are computed again in the backward (activation
    checkpointing) would attend to local tokens after the context: run the backward inside then. Otherwise the context
    or `torch.utils.checkpoint` raises. Functions outside of modules cannot be checkpointed.

    Args:
        cp_mesh: One-dimensional mesh of the ranks that share rows. With one rank nothing is changed.
        cp_buffers: Tensors to shard, with the same content on every rank.
        cp_seq_dims: The sequence dimension of each buffer.
        cp_no_restore_buffers: The entries of `cp_buffers` that stay sharded on exit.
        cp_rotate_method: None or "allgather" gathers keys and values. "alltoall" (also "addtoall", "ring") rotates
            them, except under a mask over all keys, which needs memory for S keys in any case.
        num_padding: Number of padding tokens at the end of the S tokens, for all rows or for each, [B]. Causal
            attention never sees them. Attention that is not causal leaves them out.

    Raises:
        ValueError: For an unknown method, a buffer without a dimension, a length that 2·cp does not divide, or a buffer
            that requires grad, which a change in place would lose.
        RuntimeError: On exit, after the buffers were restored, if the modules that were called attended to local tokens
            only: they have no context-parallel kernel of dtrain, and they either did not call
            `scaled_dot_product_attention` or called it in compiled code.

    Collectives:
        Entering and leaving: none. Each attention call: an all-gather of 12 integers, which the host reads, and the
        exchange of keys and values. In the backward: the exchange of their gradients.
    """
    methods = (*GATHERED, *ROTATED)
    if cp_rotate_method not in methods:
        raise ValueError(f"cp_rotate_method={cp_rotate_method!r}: there are {', '.join(map(repr, methods))}")
    if len(cp_buffers) != len(cp_seq_dims):
        raise ValueError(f"{len(cp_buffers)} buffers and {len(cp_seq_dims)} sequence dimensions: give one per buffer")
    for index, buffer in enumerate(cp_buffers):
        if buffer.requires_grad:
            raise ValueError(f"buffer {index} requires grad: cut it with shard_tokens, which keeps its gradient")
    size = cp_mesh.size()
    rank = mesh_rank(cp_mesh)
    buffers = []
    for tensor, dim in zip(cp_buffers, cp_seq_dims, strict=True):
        full = tensor.detach()
        shard = shard_sequence(full, rank, size, dim)
        buffers.append(Buffer(tensor, full, shard, dim % max(full.dim(), 1)))
    # Tensors are compared by identity: == would compare their elements.
    kept_ids = {id(tensor) for tensor in cp_no_restore_buffers}
    return _sharded(buffers, kept_ids, cp_mesh, cp_rotate_method in ROTATED, num_padding)


@contextlib.contextmanager
def _sharded(
    buffers: Sequence[Buffer], kept_ids: set[int], cp_mesh: DeviceMesh, rotates: bool, num_padding: int | Tensor
) -> Iterator[None]:
    """Shard buffers and attention inside the context. On exit, restore the buffers whose ids are not in `kept_ids`."""
    with torch.no_grad():
        for buffer in buffers:
            buffer.tensor.set_(buffer.shard)  # type: ignore[call-overload]  # torch's stubs only know storages
    modules = RunningModules(cp_mesh)
    try:
        if cp_mesh.size() == 1:
            yield
        else:
            attention = ShardedAttention(cp_mesh, buffers, modules, rotates, num_padding)
            with modules.watched(attention), attention:
                yield
            modules.check(
                num_calls=attention.num_calls,
                num_deferred_calls=attention.num_deferred_calls,
                is_compiled=attention.is_compiled,
            )
    finally:
        with torch.no_grad():
            for buffer in buffers:
                if id(buffer.tensor) not in kept_ids:
                    buffer.tensor.set_(buffer.full)  # type: ignore[call-overload]
