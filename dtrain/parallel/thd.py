"""Packed batches as one flat run of tokens (the "thd" form of variable-length kernels), cut over cp sequence by
sequence.

Every sequence is cut head-tail by itself, so a rank holds a part of each and the padded lengths count: 2·cp divides
them.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dtrain.parallel.layout import chunks_of

STREAMS = ("input_ids", "labels", "position_ids", "padding_mask")


def make_cp_batch_for_te(
    cp_mesh: DeviceMesh | None,
    batch: dict[str, Tensor],
    qkv_format: str = "thd",
    padding_token_id: int = 0,
    num_chunks: int = 1,
    seq_lens_padding_value: int = -1000,
) -> dict[str, Any]:
    """A packed [B, S] batch as a new dict in flat form, cut over cp. No collective; `batch` stays as it is.

    In: input_ids, labels [B, S]; position_ids [B, S] (where missing they count from 0 in every sequence); seq_lens and
    seq_lens_padded [B, P], the lengths of the sequences in each row without and with the padding behind them, unused
    slots holding `seq_lens_padding_value`.

    Out: input_ids, labels, position_ids, padding_mask (bool, True behind a sequence's own tokens, whatever id fills
    them) [T], or [num_chunks, T] with the rows dealt out in order, T divided by cp; cu_seqlens and cu_seqlens_padded
    int32 [N + 1], both the cumulative padded lengths of the whole sequences (chunks with fewer are filled up with the
    sentinel); max_seqlen, the longest padded length, int32 [] or [num_chunks]; qkv_format.

    Raises ValueError for another format, rows that num_chunks does not divide, lengths that do not fit their rows or
    one another, and, under cp, padded lengths that 2·cp does not divide; KeyError for missing lengths.
    """
    if qkv_format != "thd":
        raise ValueError(f"Currently only 'thd' format is supported, got {qkv_format!r}")
    for name in ("seq_lens", "seq_lens_padded"):
        if name not in batch:
            raise KeyError(f"{name} is missing: a thd batch needs the lengths of its sequences")
    rows = batch["input_ids"].shape[0]
    if num_chunks < 1 or rows % num_chunks:
        raise ValueError(f"num_chunks={num_chunks} does not divide the {rows} rows, and none is dropped")
    per_chunk = rows // num_chunks
    chunks = []
    for start in range(0, rows, per_chunk):
        part = slice(start, start + per_chunk)
        flat = _flatten({name: tensor[part] for name, tensor in _inputs(batch).items()}, seq_lens_padding_value)
        chunks.append(_shard_thd_chunk_for_te(flat, cp_mesh, qkv_format, seq_lens_padding_value, padding_token_id))
    return chunks[0] if num_chunks == 1 else _stack(chunks, seq_lens_padding_value)


def _shard_thd_chunk_for_te(
    batch: dict[str, Any],
    cp_mesh: DeviceMesh | None,
    qkv_format: str,
    seq_lens_padding_value: int,
    padding_token_id: int,
) -> dict[str, Any]:
    """This cp rank's head and tail chunk of every sequence of a flat [T] batch, in the sequences' order: a new dict.

    The sequences end at cu_seqlens_padded (or cu_seqlens). A stream that is missing stays so, but padding_mask, which
    is then where the ids are `padding_token_id`.
    """
    ends = batch.get("cu_seqlens_padded", batch.get("cu_seqlens"))
    if ends is None:
        raise ValueError("cu_seqlens is missing: a thd batch needs the ends of its sequences")
    ends = ends.to(torch.int32)
    streams = {name: batch[name] for name in STREAMS if name in batch}
    streams.setdefault("padding_mask", streams["input_ids"] == padding_token_id)
    used = ends[ends != seq_lens_padding_value]
    if cp_mesh is not None and cp_mesh.size() > 1:
        index = _held_tokens(used, streams["input_ids"].shape[0], cp_mesh.size(), mesh_rank(cp_mesh))
        streams = {name: stream.index_select(0, index) for name, stream in streams.items()}
    lengths = used.diff()
    return {
        **batch,
        **streams,
        "cu_seqlens": ends,
        "cu_seqlens_padded": ends,
        "max_seqlen": lengths.amax() if lengths.numel() else ends.new_zeros(()),
        "qkv_format": qkv_format,
    }


def mesh_rank(mesh: DeviceMesh) -> int:
    """This rank's place on a one-dimensional mesh, or on a stand-in for one that knows its group alone."""
    return mesh.get_local_rank() if hasattr(mesh, "get_local_rank") else dist.get_rank(group=mesh.get_group())


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
    offsets, sequence = _places(ends.to(torch.int64), total)
    chunk = offsets // (lengths // (2 * size))[sequence]
    head, tail = chunks_of(rank, size)
    return ((chunk == head) | (chunk == tail)).nonzero().squeeze(1)


def _places(ends: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """For each of `total` flat tokens, its offset in its sequence and which sequence that is, both [T] int64."""
    positions = torch.arange(total, device=ends.device)
    sequence = torch.searchsorted(ends[1:].contiguous(), positions, right=True)
    return positions - ends[sequence], sequence


def _inputs(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the flat form is made of; positions for one row stand for all."""
    names = ("input_ids", "labels", "position_ids", "seq_lens", "seq_lens_padded")
    inputs = {name: batch[name] for name in names if name in batch}
    if "position_ids" in inputs:
        inputs["position_ids"] = inputs["position_ids"].expand_as(inputs["input_ids"])
    return inputs


def _flatten(batch: dict[str, Tensor], sentinel: int) -> dict[str, Tensor]:
    """Some rows, one after the other: streams [T] and cu_seqlens of the padded lengths."""
    rows, width = batch["input_ids"].shape
    padded, own = batch["seq_lens_padded"].to(torch.int64), batch["seq_lens"].to(torch.int64)
    used = padded != sentinel
    filled = torch.where(used, padded, 0).sum(1)
    if bool((filled != width).any()):
        raise ValueError(f"seq_lens_padded sum to {filled.tolist()} in the rows, which hold {width} tokens each")
    if padded.shape != own.shape or bool(((own != sentinel) != used).any()) or bool((own > padded).any()):
        raise ValueError("seq_lens and seq_lens_padded must name the same sequences, none longer than with its padding")
    lengths = padded[used]
    ends = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    offsets, sequence = _places(ends, rows * width)
    return {
        "input_ids": batch["input_ids"].flatten(),
        "labels": batch["labels"].flatten(),
        "position_ids": batch["position_ids"].flatten() if "position_ids" in batch else offsets,
        "padding_mask": offsets >= own[used][sequence],
        "cu_seqlens": ends,
    }


def _stack(chunks: list[dict[str, Any]], sentinel: int) -> dict[str, Any]:
    """Chunks as one batch: [num_chunks, ..], the ends of the shorter ones filled up with the sentinel."""
    longest = max(chunk["cu_seqlens"].numel() for chunk in chunks)
    ends = torch.stack(
        [
            torch.nn.functional.pad(chunk["cu_seqlens"], (0, longest - chunk["cu_seqlens"].numel()), value=sentinel)
            for chunk in chunks
        ]
    )
    stacked = {name: torch.stack([chunk[name] for chunk in chunks]) for name in (*STREAMS, "max_seqlen")}
    return {**stacked, "cu_seqlens": ends, "cu_seqlens_padded": ends, "qkv_format": chunks[0]["qkv_format"]}
