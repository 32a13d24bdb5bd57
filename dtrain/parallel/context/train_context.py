"""Context-parallel batches under the names that users of NeMo Automodel know: as context managers, and flat.

`make_cp_batch_for_te` makes one flat sequence of the tokens of packed rows (the "thd" form of variable-length kernels)
and shards it over cp. Each packed sequence is sharded separately in the head-tail layout, so every rank has a part of
each. Therefore 2·cp must divide the padded lengths. Example: two rows of 12 and 12 tokens with padded sequences of 8
and 4, and of 12 tokens, cp = 2:

    flat           24 tokens, cu_seqlens 0 8 12 24
    rank 0         tokens 0 1 6 7 | 8 11 | 12 13 14 21 22 23
    rank 1         tokens 2 3 4 5 | 9 10 | 15 16 17 18 19 20
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dtrain.base.batch import STREAMS
from dtrain.parallel.context.batch import find_sequences, get_rank_positions, mesh_rank, pad_right, shard_sequence

# Entries of a batch that are not copied to the result.
CONSUMED = ("seq_lens", "seq_lens_padded", "attention_mask", "padding_mask", "cu_seqlens", "cu_seqlens_padded")


def make_cp_batch_for_te(
    cp_mesh: DeviceMesh | None,
    batch: Mapping[str, Any],
    qkv_format: str = "thd",
    padding_token_id: int = 0,
    num_chunks: int = 1,
    seq_lens_padding_value: int = -1000,
    return_local_indices: bool = False,
) -> dict[str, Any] | tuple[dict[str, Any], Tensor | None]:
    """Convert a packed batch to flat form, and shard it over cp. `batch` is not changed. No collectives.

    Args:
        cp_mesh: The cp ranks. None: not sharded.
        batch: It must have

            - input_ids [B, S], or embeddings [B, S, H];
            - labels [B, S];
            - seq_lens and seq_lens_padded [B, P]: the lengths of the sequences in each row, without and with the
              padding after them. Unused entries are `seq_lens_padding_value`.

            It may have position_ids [B, S] or [1, S], or [R, B, S] with R coordinates. If they are missing, they count
            from 0 in each sequence. It may have any other entries.
        qkv_format: Only "thd".
        padding_token_id: Not used here, because the lengths define the padding mask.
        num_chunks: Number of chunks into which the rows are divided, in order. With more than one, each tensor of the
            result has a leading dimension of chunks.
        seq_lens_padding_value: See `batch`. In the result, it fills the cu_seqlens of chunks with fewer sequences.
        return_local_indices: Whether to return the indices of this rank's tokens, too.

    Returns:
        A dict with

        - input_ids, labels and every other tensor [B, S, ...], as [T, ...], with T = B · S / cp (or / num_chunks);
        - position_ids [T], or [R, 1, T];
        - padding_mask [T] bool, True on the padding after each sequence;
        - cu_seqlens and cu_seqlens_padded, int32 [N + 1]: both are the cumulative padded lengths, before sharding;
        - max_seqlen, int32 scalar: the longest padded length;
        - qkv_format, and all other entries unchanged, except attention_mask, which is dropped.

        With `return_local_indices`, also the indices of this rank's tokens among the B · S tokens, [T] int64, or None
        if there are several chunks.

    Raises:
        KeyError: If ids, labels or lengths are missing.
        ValueError: For another format, a `num_chunks` that does not divide B, lengths that do not fit their rows or one
            another, or under context parallel padded lengths that 2·cp does not divide.
    """
    if qkv_format != "thd":
        raise ValueError(f"Currently only 'thd' format is supported, got {qkv_format!r}")
    for name in ("input_ids", "labels", "seq_lens", "seq_lens_padded"):
        if batch.get(name) is None:
            raise KeyError(f"{name} is missing: a thd batch needs ids, labels and the lengths of its sequences")
    shape = batch["input_ids"].shape[:2]
    if num_chunks < 1 or shape[0] % num_chunks:
        raise ValueError(f"num_chunks={num_chunks} does not divide the {shape[0]} rows")
    streams: dict[str, Tensor] = {}  # tensors with one value per token
    for name, value in batch.items():
        if isinstance(value, Tensor) and value.shape[:2] == shape and name not in CONSUMED:
            streams[name] = value
    if batch["labels"].shape[:2] != shape:
        raise ValueError(f"labels {list(batch['labels'].shape)} are not as long as input_ids {list(shape)}")
    if return_local_indices:
        streams["local_indices"] = torch.arange(shape.numel(), device=batch["input_ids"].device).view(shape)
    positions = batch.get("position_ids")
    if positions is not None:  # with the dimension of rows first, like the other streams
        streams["position_ids"] = positions.expand(*positions.shape[:-2], *shape).movedim(-2, 0)
    device = batch["input_ids"].device
    lengths = batch["seq_lens"].to(device, torch.int64)
    padded_lengths = batch["seq_lens_padded"].to(device, torch.int64)
    chunks = []
    for index in range(num_chunks):
        rows = slice(index * shape[0] // num_chunks, (index + 1) * shape[0] // num_chunks)
        chunk_streams = {name: stream[rows] for name, stream in streams.items()}
        flat = _flatten(chunk_streams, lengths[rows], padded_lengths[rows], seq_lens_padding_value)
        chunks.append(_shard_thd_chunk_for_te(flat, cp_mesh, qkv_format, seq_lens_padding_value, padding_token_id))
    result = chunks[0] if num_chunks == 1 else _stack(chunks, seq_lens_padding_value)
    indices = result.pop("local_indices", None)
    replaced = {*streams, *CONSUMED, "position_ids"}
    unchanged = {name: value for name, value in batch.items() if name not in replaced}
    result = unchanged | result
    if not return_local_indices:
        return result
    return result, indices if num_chunks == 1 else None


def _shard_thd_chunk_for_te(
    batch: Mapping[str, Any],
    cp_mesh: DeviceMesh | None,
    qkv_format: str,
    seq_lens_padding_value: int,
    padding_token_id: int,
) -> dict[str, Any]:
    """Shard a flat batch of T tokens over cp, as a new dict: the head and tail chunk of each sequence, in order.

    Args:
        batch: Flat tensors [T, ...], position_ids [..., T], and cu_seqlens_padded (or cu_seqlens). Other entries are
            returned unchanged. If padding_mask is missing, it is True where the ids are `padding_token_id`.
        cp_mesh: The cp ranks. None: not sharded.
        qkv_format: Added to the result.
        seq_lens_padding_value: Entries of cu_seqlens with this value are unused.
        padding_token_id: See `batch`.

    Raises:
        ValueError: If cu_seqlens is missing, or if there are embeddings without a padding_mask.
    """
    ends = batch.get("cu_seqlens_padded", batch.get("cu_seqlens"))
    if ends is None:
        raise ValueError("cu_seqlens is missing: a thd batch needs the ends of its sequences")
    ends = ends.to(torch.int32)
    total = batch["input_ids"].shape[0]
    streams: dict[str, Tensor] = {}  # tensors with one value per token
    for name, value in batch.items():
        if not isinstance(value, Tensor) or name in ("cu_seqlens", "cu_seqlens_padded"):
            continue
        if name == "position_ids" or value.shape[:1] == (total,):
            streams[name] = value
    if "padding_mask" not in streams:
        if streams["input_ids"].dim() > 1:
            raise ValueError("padding_mask is missing: it cannot be derived from embeddings")
        streams["padding_mask"] = streams["input_ids"] == padding_token_id
    used = ends[ends != seq_lens_padding_value]
    if cp_mesh is not None and cp_mesh.size() > 1:
        index = _get_rank_positions(used, total, cp_mesh.size(), mesh_rank(cp_mesh))
        for name, stream in streams.items():
            token_dim = -1 if name == "position_ids" else 0
            streams[name] = stream.index_select(token_dim, index)
    lengths = used.diff()
    return {
        **batch,
        **streams,
        "cu_seqlens": ends,
        "cu_seqlens_padded": ends,
        "max_seqlen": lengths.amax() if lengths.numel() else ends.new_zeros(()),
        "qkv_format": qkv_format,
    }


def _get_rank_positions(ends: Tensor, total: int, size: int, rank: int) -> Tensor:
    """Return the flat positions of a rank's tokens, [T / size]. See `batch.get_rank_positions`.

    On CUDA, Transformer Engine's function is used if it is installed.

    Args:
        ends: cu_seqlens, int32 [N + 1].
        total: T.
        size: The number of cp ranks.
        rank: The cp rank.

    Raises:
        ValueError: If 2·size does not divide each length, or the sequences do not have T tokens.
    """
    lengths = ends.diff()
    wrong = lengths[lengths % (2 * size) != 0]
    if wrong.numel():
        raise ValueError(
            f"padded lengths {wrong[:5].tolist()} are not multiples of 2·cp = {2 * size}: pad each sequence to one"
        )
    if int(ends[-1]) != total:
        raise ValueError(f"the sequences have {int(ends[-1])} of {total} tokens: every token must belong to a sequence")
    if ends.is_cuda:
        try:
            import transformer_engine_torch
        except ImportError:
            pass
        else:
            return transformer_engine_torch.thd_get_partitioned_indices(ends, total, size, rank).to(torch.int64)
    return get_rank_positions(ends.to(torch.int64), total, rank, size)


def _flatten(streams: Mapping[str, Tensor], lengths: Tensor, padded: Tensor, sentinel: int) -> dict[str, Tensor]:
    """Concatenate rows: streams [B, S, ...] to [T, ...], and position_ids [B, .., S] to [..., T].

    Args:
        streams: Tensors of some rows.
        lengths: Lengths of the sequences without padding, [B, P].
        padded: Lengths with padding, [B, P].
        sentinel: Value of unused lengths.

    Returns:
        The streams, with padding_mask and cu_seqlens of the padded lengths.

    Raises:
        ValueError: If the lengths do not fit the rows or one another.
    """
    rows, width = streams["input_ids"].shape[:2]
    used = padded != sentinel
    filled = torch.where(used, padded, 0).sum(1)
    if bool((filled != width).any()):
        raise ValueError(f"seq_lens_padded sum to {filled.tolist()} in the rows, which have {width} tokens each")
    if padded.shape != lengths.shape or bool(((lengths != sentinel) != used).any()) or bool((lengths > padded).any()):
        raise ValueError(
            "seq_lens and seq_lens_padded must have the same sequences, none longer than its padded length"
        )
    used_lengths = padded[used]
    ends = torch.cat([used_lengths.new_zeros(1), used_lengths.cumsum(0)])
    positions = torch.arange(rows * width, device=ends.device)
    sequence = find_sequences(positions, ends)
    offsets = positions - ends[sequence]
    flat = {name: stream.flatten(0, 1) for name, stream in streams.items() if name != "position_ids"}
    position_ids = offsets
    if "position_ids" in streams:
        position_ids = streams["position_ids"].movedim(0, -2).flatten(-2)
        if position_ids.dim() > 1:
            position_ids = position_ids[:, None]  # coordinates: [R, 1, T]
    padding_mask = offsets >= lengths[used][sequence]
    return flat | {"position_ids": position_ids, "padding_mask": padding_mask, "cu_seqlens": ends}


def _stack(chunks: list[dict[str, Any]], sentinel: int) -> dict[str, Any]:
    """Stack chunks to [num_chunks, ...]. Shorter cu_seqlens are filled with the sentinel."""
    stacked = dict(chunks[0])
    for name in chunks[0].keys() - {"qkv_format"}:
        parts = [chunk[name] for chunk in chunks]
        if name.startswith("cu_seqlens"):
            longest = max(len(ends) for ends in parts)
            parts = [torch.nn.functional.pad(ends, (0, longest - len(ends)), value=sentinel) for ends in parts]
        stacked[name] = torch.stack(parts)
    return stacked


def get_train_context(
    enable_loss_parallel: bool, enable_compiled_autograd: bool, cp_context: Any = None
) -> Callable[[], Any]:
    """Return a factory of contexts, used as `with train_context():`.

    Args:
        enable_loss_parallel: Whether to enter torch's `loss_parallel()`.
        enable_compiled_autograd: Whether to enable compiled autograd.
        cp_context: A context of `create_context_parallel_ctx`, entered last. It can be entered once. None: not entered.
    """

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if enable_loss_parallel:
                from torch.distributed.tensor.parallel import loss_parallel

                stack.enter_context(loss_parallel())
            if enable_compiled_autograd:
                from torch._dynamo.utils import maybe_enable_compiled_autograd

                stack.enter_context(maybe_enable_compiled_autograd(should_enable=True))
            if cp_context is not None:
                stack.enter_context(cp_context)
            yield

    return context


def make_cp_batch_and_ctx(
    device_mesh: DeviceMesh | None,
    batch: dict[str, Any],
    loss_mask: Tensor | None = None,
    use_te: bool = False,
    padding_token_id: int = 0,
    num_chunks: int = 1,
    seq_lens_padding_value: int = -1000,
    extra_seq_buffers: Mapping[str, int] | None = None,
    labels: Tensor | None = None,
) -> tuple[Callable[[], Any], dict[str, Any]]:
    """Return a context inside which a batch has this cp rank's part of every stream, and the batch.

    Without context parallel these are `contextlib.nullcontext` and the unchanged batch. Otherwise the batch is the same
    dict, changed as follows:

    - `attention_mask` is removed. A causal model computes the same without a mask of padding at the end of rows.
    - `position_ids` are added if they are missing.
    - Every stream is padded on the right to a multiple of 2·cp. On entry of the context it is cut in place to the
      head-tail layout. On exit only `position_ids` are restored.

    The streams are the ids (or embeddings), labels, loss_mask, every other tensor [B, S, ...], and the tensors of
    `extra_seq_buffers`. Everything else in the batch stays as it is. A stream that needs no padding is the caller's own
    tensor, which the context cuts in place. A stream that requires grad is cut here, into a new tensor of its graph.
    No collective.

    Args:
        device_mesh: A mesh with a dimension "cp". None, or a mesh without it: no context parallel.
        batch: input_ids [B, S] or inputs_embeds [B, S, H], labels [B, S], and whatever else the model reads.
        loss_mask: [B, S], added to the batch.
        use_te: Return `contextlib.nullcontext` and the batch of `make_cp_batch_for_te` instead.
        padding_token_id: Pad value of the ids. Embeddings are padded with 0, others as in `batch.STREAMS`, or with 0.
        num_chunks: For `use_te`.
        seq_lens_padding_value: For `use_te`.
        extra_seq_buffers: More streams: the name in the batch, and the dimension that is cut. Not with `use_te`.
        labels: [B, S], added to the batch.

    Returns:
        The context, to be entered once as `with ctx():`, and the batch.

    Raises:
        KeyError: If ids, labels or a name of `extra_seq_buffers` are missing.
        ValueError: If a stream is not as long as the ids, or if `attention_mask` hides anything but padding at the end
            of rows.
    """
    cp_mesh = None
    if device_mesh is not None and "cp" in (getattr(device_mesh, "mesh_dim_names", None) or ()):
        cp_mesh = device_mesh["cp"]
    if use_te:
        if extra_seq_buffers:
            raise ValueError("extra_seq_buffers: the flat form of use_te cuts every stream by its shape")
        return contextlib.nullcontext, make_cp_batch_for_te(  # type: ignore[return-value]  # a dict: no indices asked
            cp_mesh,
            batch,
            padding_token_id=padding_token_id,
            num_chunks=num_chunks,
            seq_lens_padding_value=seq_lens_padding_value,
        )
    if cp_mesh is None or cp_mesh.size() <= 1:
        return contextlib.nullcontext, batch
    if labels is not None:
        batch["labels"] = labels
    if loss_mask is not None:
        batch["loss_mask"] = loss_mask
    tokens = "input_ids"
    if "inputs_embeds" in batch and "input_ids" not in batch:
        tokens = "inputs_embeds"
    for name in (tokens, "labels", *(extra_seq_buffers or ())):
        if name not in batch:
            raise KeyError(f"{name} is missing: context parallel cuts it")
    shape = batch[tokens].shape[:2]
    num_padding = -shape[1] % (2 * cp_mesh.size()) + _padding_of(batch.pop("attention_mask", None), shape)
    _build_position_ids(batch, batch[tokens].device)
    dims = _sequence_dims(batch, tokens, loss_mask is not None, extra_seq_buffers or {})
    for name, dim in dims.items():
        pad = STREAMS[name].pad if name in STREAMS else 0
        if name == tokens:
            pad = 0 if batch[name].is_floating_point() else padding_token_id
        batch[name] = pad_right(batch[name], 2 * cp_mesh.size(), pad, dim)
        if batch[name].requires_grad:
            batch[name] = shard_sequence(batch[name], mesh_rank(cp_mesh), cp_mesh.size(), dim)
    # The context shards the other streams in place, which autograd does not allow for a tensor that requires grad.
    dims = {name: dim for name, dim in dims.items() if not batch[name].requires_grad}
    # Users may replace the package's functions, so these two are looked up in the package when they are called.
    package = import_module(__package__)
    cp_context = package.create_context_parallel_ctx(
        cp_mesh=cp_mesh,
        cp_buffers=[batch[name] for name in dims],
        cp_seq_dims=[*dims.values()],
        cp_no_restore_buffers={batch[name] for name in dims if name != "position_ids"},
        num_padding=num_padding,
    )
    return package.get_train_context(False, False, cp_context), batch


def _sequence_dims(
    batch: Mapping[str, Any], tokens: str, has_loss_mask: bool, extra_seq_buffers: Mapping[str, int]
) -> dict[str, int]:
    """Return the streams of a batch, with the dimension in which each is sharded.

    Args:
        batch: The batch.
        tokens: Name of the ids or embeddings.
        has_loss_mask: Whether the loss mask is a stream, whatever its shape.
        extra_seq_buffers: More streams.

    Raises:
        ValueError: If a stream is not as long as the ids.
    """
    shape = batch[tokens].shape[:2]
    # position_ids may be [3, B, S].
    dims = {tokens: 1, "labels": 1, "position_ids": batch["position_ids"].dim() - 1}
    if has_loss_mask:
        dims["loss_mask"] = 1
    for name, value in batch.items():
        if isinstance(value, Tensor) and value.shape[:2] == shape:
            dims.setdefault(name, 1)
    dims.update(extra_seq_buffers)
    for name, dim in dims.items():
        if batch[name].shape[dim] != shape[1]:
            raise ValueError(f"{name} {list(batch[name].shape)} is not as long as {tokens} {list(batch[tokens].shape)}")
    return dims


def _build_position_ids(batch: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Add `position_ids` [1, S], which count from 0, to a batch without them, and return the batch."""
    if "position_ids" not in batch:
        ids = batch["input_ids" if "input_ids" in batch else "inputs_embeds"]
        batch["position_ids"] = torch.arange(ids.shape[1], device=device)[None]
    return batch


def _padding_of(attention_mask: Any, shape: torch.Size) -> int | Tensor:
    """Return the number of tokens that a mask hides at the end of each row, [B], or 0 without a mask.

    Args:
        attention_mask: [B, S].
        shape: (B, S).

    Raises:
        ValueError: If the mask has another shape, or hides anything but padding at the end of rows.
    """
    if attention_mask is None:
        return 0
    if not isinstance(attention_mask, Tensor) or attention_mask.shape != shape:
        description: object = type(attention_mask).__name__
        if isinstance(attention_mask, Tensor):
            description = list(attention_mask.shape)
        raise ValueError(
            f"attention_mask ({description}) is removed under context parallel, which is correct only for a padding "
            f"mask {list(shape)}. Remove it, and pass masks [B, 1, S/cp, S] to the model inside the context"
        )
    visible = attention_mask.long()
    if bool((visible[:, 1:] > visible[:, :-1]).any()):
        raise ValueError(
            "attention_mask hides tokens in front of visible ones (padding on the left?). Context parallel removes the "
            "mask, which is correct only for padding on the right. Put the padding on the right"
        )
    return shape[1] - visible.sum(1)
