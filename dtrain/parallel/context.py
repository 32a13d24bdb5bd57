"""The public face of context parallel: batches cut to the head-tail layout, under the names that NeMo Automodel's users
know. `layout` has the arithmetic, `attention.context` and `attention.ring` the kernels that compute on such a layout.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dtrain.batch import IGNORE, PADDING_DOCUMENT
from dtrain.parallel.layout import chunks_of, shard_sequence

ROTATIONS = (None, "allgather", "alltoall", "ring")


def get_train_context(
    enable_loss_parallel: bool, enable_compiled_autograd: bool, cp_context: Any = None
) -> Callable[[], Any]:
    """A factory of contexts, used as `with train_context():`. The flags enter torch's `loss_parallel()` and compiled
    autograd; `cp_context` is entered last. A `cp_context` can be entered once."""

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if enable_loss_parallel:
                from torch.distributed.tensor.parallel import loss_parallel

                stack.enter_context(loss_parallel())
            if enable_compiled_autograd:
                from torch._dynamo.utils import maybe_enable_compiled_autograd

                stack.enter_context(maybe_enable_compiled_autograd(True))
            if cp_context is not None:
                stack.enter_context(cp_context)
            yield

    return context


@contextlib.contextmanager
def create_context_parallel_ctx(
    cp_mesh: DeviceMesh,
    cp_buffers: Sequence[Tensor],
    cp_seq_dims: Sequence[int],
    cp_no_restore_buffers: set[Tensor] | Sequence[Tensor],
    cp_rotate_method: str | None = None,
) -> Iterator[None]:
    """Inside, every buffer is this cp rank's part of itself, in place and head-tail along its dimension of
    `cp_seq_dims`; on exit all but `cp_no_restore_buffers` are whole again, exceptions included. No collective.

    A buffer's tensor object changes its storage, so views made before keep the whole. cp_rotate_method: how keys
    travel, None | allgather | alltoall (or ring); the model's kernel decides that when it is built, the name is checked
    here. Raises ValueError for another name, and for a length that 2·cp does not divide.
    """
    if cp_rotate_method not in ROTATIONS:
        raise ValueError(f"cp_rotate_method={cp_rotate_method!r}: there are {', '.join(map(repr, ROTATIONS))}")
    if len(cp_buffers) != len(cp_seq_dims):
        raise ValueError(f"{len(cp_buffers)} buffers and {len(cp_seq_dims)} sequence dimensions: give one per buffer")
    kept = {id(buffer) for buffer in cp_no_restore_buffers}
    size, rank = cp_mesh.size(), cp_mesh.get_local_rank()
    wholes = [buffer.detach()[...] for buffer in cp_buffers]
    parts = [shard_sequence(whole, rank, size, dim) for whole, dim in zip(wholes, cp_seq_dims, strict=True)]
    with torch.no_grad():
        for buffer, part in zip(cp_buffers, parts, strict=True):
            buffer.set_(part)
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, whole in zip(cp_buffers, wholes, strict=True):
                if id(buffer) not in kept:
                    buffer.set_(whole)


def make_cp_batch_and_ctx(
    device_mesh: DeviceMesh | None,
    batch: dict[str, Tensor],
    loss_mask: Tensor | None = None,
    use_te: bool = False,
    padding_token_id: int = 0,
    num_chunks: int = 1,
    seq_lens_padding_value: int = -1000,
    cp_rotate_method: str = "allgather",
) -> tuple[Callable[[], Any], dict[str, Tensor]]:
    """`(ctx, batch)`, used as `with ctx():`, inside which the batch holds this cp rank's part. No collective.

    Without context parallel: `contextlib.nullcontext` and the batch, untouched. With it the same dict: `attention_mask`
    dropped, `position_ids` made where missing, every stream padded on the right to a multiple of 2·cp (input_ids with
    `padding_token_id`, labels −100, loss_mask 0, seq_ids −1, positions continuing) and cut on entry; `position_ids`
    alone are whole again on exit. Raises KeyError where `input_ids` or `labels` is missing.

    use_te: `(nullcontext, make_cp_batch_for_te(...))`.
    """
    cp_mesh = _submesh(device_mesh, "cp")
    if use_te:
        return contextlib.nullcontext, make_cp_batch_for_te(
            cp_mesh,
            batch,
            padding_token_id=padding_token_id,
            num_chunks=num_chunks,
            seq_lens_padding_value=seq_lens_padding_value,
        )
    if cp_mesh is None or cp_mesh.size() <= 1:
        return contextlib.nullcontext, batch
    batch.pop("attention_mask", None)
    _build_position_ids(batch, batch["input_ids"].device)
    if loss_mask is not None:
        batch["loss_mask"] = loss_mask
    pads = {"input_ids": padding_token_id, "labels": IGNORE, "position_ids": None}
    pads |= {name: pad for name, pad in _OPTIONAL_PADS.items() if name in batch}
    multiple = 2 * cp_mesh.size()
    for name, pad in pads.items():
        batch[name] = _pad_right(batch[name], multiple, pad)
    buffers = [batch[name] for name in pads]
    cp_context = create_context_parallel_ctx(
        cp_mesh=cp_mesh,
        cp_buffers=buffers,
        cp_seq_dims=[1] * len(buffers),
        cp_no_restore_buffers={batch[name] for name in pads if name != "position_ids"},
        cp_rotate_method=cp_rotate_method,
    )
    return get_train_context(False, False, cp_context), batch


_OPTIONAL_PADS = {"loss_mask": 0, "seq_ids": PADDING_DOCUMENT, "padding_mask": True}


def make_cp_batch_for_te(
    cp_mesh: DeviceMesh | None,
    batch: dict[str, Tensor],
    qkv_format: str = "thd",
    padding_token_id: int = 0,
    num_chunks: int = 1,
    seq_lens_padding_value: int = -1000,
) -> dict[str, Any]:
    """A packed [B, S] batch as the flat "thd" form of variable-length kernels, cut over cp. No collective.

    In: input_ids, labels [B, S], position_ids (made where missing), seq_lens and seq_lens_padded [B, P], the lengths of
    the sequences in each row without and with their padding, unused slots holding `seq_lens_padding_value`.
    Out: input_ids, labels, position_ids, padding_mask (True on padding) [T], or [num_chunks, T] for num_chunks > 1, T
    divided by cp; cu_seqlens and cu_seqlens_padded, int32, both the cumulative padded lengths (shorter rows of chunks
    end in the sentinel); max_seqlen int; qkv_format.

    Raises ValueError for another format, for a batch that num_chunks does not divide, for padded lengths that do not
    fill the rows or that 2·cp does not divide; KeyError for missing lengths.
    """
    if qkv_format != "thd":
        raise ValueError(f"qkv_format={qkv_format!r}: only 'thd' is there")
    for name in ("seq_lens", "seq_lens_padded"):
        if name not in batch:
            raise KeyError(f"{name} is missing: a thd batch needs the lengths of its sequences")
    rows = batch["input_ids"].shape[0]
    if num_chunks < 1 or rows % num_chunks:
        raise ValueError(f"{rows} rows cannot be cut into {num_chunks} equal chunks; no row is dropped")
    batch = dict(batch)
    _build_position_ids(batch, batch["input_ids"].device)
    if batch["position_ids"].shape[0] != rows:
        batch["position_ids"] = batch["position_ids"].expand(rows, -1)
    per_chunk = rows // num_chunks
    chunks = [
        _shard_thd_chunk_for_te(
            _flat_chunk(batch, slice(start, start + per_chunk), seq_lens_padding_value, padding_token_id),
            cp_mesh,
            qkv_format,
            seq_lens_padding_value,
            padding_token_id,
        )
        for start in range(0, rows, per_chunk)
    ]
    if num_chunks == 1:
        return chunks[0]
    longest = max(chunk["cu_seqlens"].numel() for chunk in chunks)
    for chunk in chunks:
        for name in ("cu_seqlens", "cu_seqlens_padded"):
            missing = longest - chunk[name].numel()
            chunk[name] = torch.nn.functional.pad(chunk[name], (0, missing), value=seq_lens_padding_value)
    streams = ("input_ids", "labels", "position_ids", "padding_mask", "cu_seqlens", "cu_seqlens_padded")
    stacked: dict[str, Any] = {name: torch.stack([chunk[name] for chunk in chunks]) for name in streams}
    return {**stacked, "max_seqlen": max(chunk["max_seqlen"] for chunk in chunks), "qkv_format": qkv_format}


def _flat_chunk(batch: dict[str, Tensor], rows: slice, sentinel: int, padding_token_id: int) -> dict[str, Any]:
    """Some rows of a padded batch, one after the other: streams [T] and the cumulative padded lengths."""
    streams = {name: batch[name][rows].flatten() for name in ("input_ids", "labels", "position_ids")}
    lengths = batch["seq_lens_padded"][rows].flatten()
    lengths = lengths[lengths != sentinel]
    total = streams["input_ids"].numel()
    if int(lengths.sum()) != total:
        raise ValueError(f"seq_lens_padded sum to {int(lengths.sum())}, the rows hold {total} tokens; they must agree")
    ends = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(torch.int32)
    return {
        **streams,
        "padding_mask": streams["input_ids"] == padding_token_id,
        "cu_seqlens": ends,
        "cu_seqlens_padded": ends,
        "max_seqlen": int(lengths.max()) if lengths.numel() else 0,
    }


def _shard_thd_chunk_for_te(
    batch: dict[str, Any],
    cp_mesh: DeviceMesh | None,
    qkv_format: str,
    seq_lens_padding_value: int,
    padding_token_id: int,
) -> dict[str, Any]:
    """This cp rank's head and tail chunk of every sequence of a flat [T] batch, in the sequences' order."""
    batch = {**batch, "qkv_format": qkv_format}
    if cp_mesh is None or cp_mesh.size() <= 1:
        return batch
    ends = batch["cu_seqlens_padded"]
    ends = ends[ends != seq_lens_padding_value].to(torch.int64)
    index = _thd_index(ends, batch["input_ids"].numel(), cp_mesh.size(), cp_mesh.get_local_rank())
    for name in ("input_ids", "labels", "position_ids", "padding_mask"):
        batch[name] = batch[name].index_select(0, index)
    return batch


def _thd_index(ends: Tensor, total: int, size: int, rank: int) -> Tensor:
    """Flat positions [T / size] that a rank holds of sequences ending at `ends` (with a 0 in front)."""
    try:
        import transformer_engine_torch as te
    except ImportError:
        te = None
    lengths = ends.diff()
    if bool((lengths % (2 * size)).any()):
        raise ValueError(
            f"padded lengths {lengths[lengths % (2 * size) != 0].tolist()[:5]} are no multiples of 2·cp = {2 * size}; "
            "pad each sequence to one, tokens are not dropped"
        )
    if te is not None and ends.is_cuda:
        return te.thd_get_partitioned_indices(ends.to(torch.int32), total, size, rank).to(torch.int64)
    offsets = torch.arange(total, device=ends.device)
    sequence = torch.searchsorted(ends[1:].contiguous(), offsets, right=True)
    chunk = (offsets - ends[sequence]) // (lengths // (2 * size))[sequence]
    head, tail = chunks_of(rank, size)
    return ((chunk == head) | (chunk == tail)).nonzero().squeeze(1)


def _build_position_ids(batch: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """The batch, with `position_ids` [1, S] counting from 0 where it had none."""
    if "position_ids" not in batch:
        batch["position_ids"] = torch.arange(batch["input_ids"].shape[1], device=device)[None]
    return batch


def _pad_right(tensor: Tensor, multiple: int, pad: int | bool | None) -> Tensor:
    """[.., S] padded to a multiple; pad None: the values go on counting."""
    missing = -tensor.shape[1] % multiple
    if not missing:
        return tensor
    if pad is None:
        more = torch.arange(1, missing + 1, device=tensor.device, dtype=tensor.dtype)
        return torch.cat([tensor, tensor[:, -1:] + more], 1)
    return torch.nn.functional.pad(tensor, (0, missing), value=pad)


def _submesh(device_mesh: Any, name: str) -> Any:
    return device_mesh[name] if device_mesh is not None and name in (device_mesh.mesh_dim_names or ()) else None
