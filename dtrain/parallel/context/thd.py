"""Packed batches as one flat run of tokens (the "thd" form of variable-length kernels), cut over cp sequence by
sequence.

Every sequence is cut head-tail by itself, so a rank holds a part of each and the padded lengths count: 2·cp divides
them.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dtrain.parallel.context.batch import held_positions, mesh_rank, sequence_of

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
    """A packed [B, S] batch as a new dict in flat form, cut over cp. No collective; `batch` stays as it is.

    In: input_ids [B, S], or embeddings [B, S, H]; labels [B, S]; position_ids [B, S], [1, S], or [R, B, S] with an axis
    of coordinates in front (where missing they count from 0 in every sequence); seq_lens and seq_lens_padded [B, P],
    the lengths of the sequences in each row without and with the padding behind them, unused slots holding
    `seq_lens_padding_value`; and whatever else the model reads.

    Out: input_ids, labels, position_ids, padding_mask (bool, True behind a sequence's own tokens, whatever fills them)
    and every other tensor [B, S, ...] as [T, ...], or [num_chunks, T, ...] with the rows dealt out in order, T divided
    by cp; positions with coordinates as [R, 1, T]; cu_seqlens and cu_seqlens_padded int32 [N + 1], both the cumulative
    padded lengths of the whole sequences (chunks with fewer are filled up with the sentinel); max_seqlen, the longest
    padded length, int32 [] or [num_chunks]; qkv_format. What else there is, tensors of other shapes too, passes as it
    is; attention_mask is dropped. return_local_indices: also which of the B · S tokens this rank holds [T] int64, None
    for chunks.

    Raises ValueError for another format, rows that num_chunks does not divide, lengths that do not fit their rows or
    one another, and, under cp, padded lengths that 2·cp does not divide; KeyError for missing ids, labels or lengths.
    """
    if qkv_format != "thd":
        raise ValueError(f"Currently only 'thd' format is supported, got {qkv_format!r}")
    for name in ("input_ids", "labels", "seq_lens", "seq_lens_padded"):
        if batch.get(name) is None:
            raise KeyError(f"{name} is missing: a thd batch needs ids, labels and the lengths of its sequences")
    shape = batch["input_ids"].shape[:2]
    if num_chunks < 1 or shape[0] % num_chunks:
        raise ValueError(f"num_chunks={num_chunks} does not divide the {shape[0]} rows, and none is dropped")
    names = [name for name, value in batch.items() if isinstance(value, Tensor) and value.shape[:2] == shape]
    streams = {name: batch[name] for name in names if name not in CONSUMED}
    if batch["labels"].shape[:2] != shape:
        raise ValueError(f"labels {list(batch['labels'].shape)} are not as long as input_ids {list(shape)}")
    if return_local_indices:
        streams["local_indices"] = torch.arange(shape.numel(), device=batch["input_ids"].device).view(shape)
    positions = batch.get("position_ids")
    if positions is not None:  # the rows first, as in the others
        streams["position_ids"] = positions.expand(*positions.shape[:-2], *shape).movedim(-2, 0)
    lengths = [batch[name].to(batch["input_ids"].device, torch.int64) for name in ("seq_lens", "seq_lens_padded")]
    chunks = []
    for index in range(num_chunks):
        rows = slice(index * shape[0] // num_chunks, (index + 1) * shape[0] // num_chunks)
        part = {name: stream[rows] for name, stream in streams.items()}
        flat = _flatten(part, lengths[0][rows], lengths[1][rows], seq_lens_padding_value)
        chunks.append(_shard_thd_chunk_for_te(flat, cp_mesh, qkv_format, seq_lens_padding_value, padding_token_id))
    made = chunks[0] if num_chunks == 1 else _stack(chunks, seq_lens_padding_value)
    indices = made.pop("local_indices", None)
    made = {name: value for name, value in batch.items() if name not in (*streams, *CONSUMED, "position_ids")} | made
    return (made, indices if num_chunks == 1 else None) if return_local_indices else made


def _shard_thd_chunk_for_te(
    batch: Mapping[str, Any],
    cp_mesh: DeviceMesh | None,
    qkv_format: str,
    seq_lens_padding_value: int,
    padding_token_id: int,
) -> dict[str, Any]:
    """This cp rank's head and tail chunk of every sequence of a flat batch of T tokens, in the sequences' order: a new
    dict.

    The sequences end at cu_seqlens_padded (or cu_seqlens). position_ids [..., T] and every other tensor [T, ...] are
    cut; the rest stays as it is. A padding_mask that is missing is where the ids are `padding_token_id`; embeddings
    have to bring one.
    """
    ends = batch.get("cu_seqlens_padded", batch.get("cu_seqlens"))
    if ends is None:
        raise ValueError("cu_seqlens is missing: a thd batch needs the ends of its sequences")
    ends = ends.to(torch.int32)
    total = batch["input_ids"].shape[0]
    tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor) and name not in CONSUMED[-2:]}
    streams = {name: value for name, value in tensors.items() if name == "position_ids" or value.shape[:1] == (total,)}
    if "padding_mask" not in streams:
        if streams["input_ids"].dim() > 1:
            raise ValueError("padding_mask is missing: embeddings do not tell what is padding")
        streams["padding_mask"] = streams["input_ids"] == padding_token_id
    used = ends[ends != seq_lens_padding_value]
    if cp_mesh is not None and cp_mesh.size() > 1:
        index = _held_tokens(used, total, cp_mesh.size(), mesh_rank(cp_mesh))
        dims = {"position_ids": -1}
        streams = {name: stream.index_select(dims.get(name, 0), index) for name, stream in streams.items()}
    lengths = used.diff()
    return {
        **batch,
        **streams,
        "cu_seqlens": ends,
        "cu_seqlens_padded": ends,
        "max_seqlen": lengths.amax() if lengths.numel() else ends.new_zeros(()),
        "qkv_format": qkv_format,
    }


def _held_tokens(ends: Tensor, total: int, size: int, rank: int) -> Tensor:
    """Flat positions [T / size] that a rank holds of sequences ending at `ends` [N + 1] int32, whose first is 0.

    Transformer Engine's function where it is installed, which is for CUDA alone.
    """
    lengths = ends.diff()
    wrong = lengths[lengths % (2 * size) != 0]
    if wrong.numel():
        raise ValueError(
            f"padded lengths {wrong[:5].tolist()} are no multiples of 2·cp = {2 * size}; pad each sequence to one, no "
            "token is dropped"
        )
    if int(ends[-1]) != total:
        raise ValueError(f"the sequences end at {int(ends[-1])} of {total} tokens; every token belongs to one")
    if ends.is_cuda:
        try:
            import transformer_engine_torch
        except ImportError:
            pass
        else:
            return transformer_engine_torch.thd_get_partitioned_indices(ends, total, size, rank).to(torch.int64)
    return held_positions(ends.to(torch.int64), total, rank, size)


def _flatten(streams: Mapping[str, Tensor], own: Tensor, padded: Tensor, sentinel: int) -> dict[str, Tensor]:
    """Some rows, one after the other: streams [T, ...] and cu_seqlens of the padded lengths. position_ids [B, .., S] as
    [..., T]."""
    rows, width = streams["input_ids"].shape[:2]
    used = padded != sentinel
    filled = torch.where(used, padded, 0).sum(1)
    if bool((filled != width).any()):
        raise ValueError(f"seq_lens_padded sum to {filled.tolist()} in the rows, which hold {width} tokens each")
    if padded.shape != own.shape or bool(((own != sentinel) != used).any()) or bool((own > padded).any()):
        raise ValueError("seq_lens and seq_lens_padded must name the same sequences, none longer than with its padding")
    lengths = padded[used]
    ends = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    positions = torch.arange(rows * width, device=ends.device)
    sequence = sequence_of(positions, ends)
    offsets = positions - ends[sequence]
    flat = {name: stream.flatten(0, 1) for name, stream in streams.items() if name != "position_ids"}
    places = offsets
    if "position_ids" in streams:
        places = streams["position_ids"].movedim(0, -2).flatten(-2)
        places = places if places.dim() == 1 else places[:, None]
    padding_mask = offsets >= own[used][sequence]
    return flat | {"position_ids": places, "padding_mask": padding_mask, "cu_seqlens": ends}


def _stack(chunks: list[dict[str, Any]], sentinel: int) -> dict[str, Any]:
    """Chunks as one batch: [num_chunks, ...], the ends of the shorter ones filled up with the sentinel."""
    stacked = dict(chunks[0])
    for name in chunks[0].keys() - {"qkv_format"}:
        parts = [chunk[name] for chunk in chunks]
        if name.startswith("cu_seqlens"):
            longest = max(len(ends) for ends in parts)
            parts = [torch.nn.functional.pad(ends, (0, longest - len(ends)), value=sentinel) for ends in parts]
        stacked[name] = torch.stack(parts)
    return stacked
