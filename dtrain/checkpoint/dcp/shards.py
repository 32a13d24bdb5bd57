"""Tensors of any placement in torch's distributed checkpoint (DCP), and DCP's metadata as JSON.

A `TensorShard` is what one rank holds of a tensor, with the tensor's size and the piece's place in it. torch's own
path for
DTensors takes the place from `compute_local_shape_and_global_offset`, which is wrong for some uneven FSDP×TP shards;
here it comes from `parallel.placement`. DCP pickles its metadata and whatever is not a tensor: only pieces go through
it, and their table is JSON:

    {"version": 1, "tensors": {name: {"dtype": "float32", "size": [6, 4],
        "chunks": [{"offsets": [0, 0], "sizes": [3, 4], "file": "__0_0.distcp", "start": 0, "length": 1234}, ...]}}}
"""

import io
import json
import math
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from dtrain.base.errors import UserError
from dtrain.base.files import ChecksumStream, FileRecord
from dtrain.base.json_files import loads
from dtrain.parallel.placement import local_slices, local_tensor

_VERSION = 1


class TensorShard(Tensor):
    """A local tensor with its place in a global one. DCP's planners ask it for what it writes and reads; they ignore
    any object but Tensors off rank 0. `size()` is the global size, which they compare with the checkpoint's; `local` is
    the plain tensor, sharing storage with the one that it was made of."""

    local: Tensor
    global_size: torch.Size
    offsets: torch.Size

    @classmethod
    def from_offsets(cls, local: Tensor, global_size: tuple[int, ...], offsets: tuple[int, ...]) -> "TensorShard":
        """`local` [sizes], which lies at `offsets` of a tensor [global_size]. No collective, no copy."""
        piece = local.detach().as_subclass(cls)
        piece.local = local.detach()
        piece.global_size = torch.Size(global_size)
        piece.offsets = torch.Size(offsets)
        return piece

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> "TensorShard":
        """Return what this rank holds, [its sizes], of `tensor` (plain, DTensor or a Piece). No collective, no copy.
        Ranks that hold the same piece (replicas, plain tensors) write it once."""
        if isinstance(tensor, TensorShard):
            return tensor
        offsets = tuple(piece.start for piece in local_slices(tensor))
        return cls.from_offsets(local_tensor(tensor), tuple(tensor.shape), offsets)

    def size(self, dim: int | None = None):
        return self.global_size if dim is None else self.global_size[dim]

    def __create_write_items__(self, fqn: str, _) -> list[WriteItem]:
        index, properties = MetadataIndex(fqn, self.offsets), TensorProperties(dtype=self.local.dtype)
        data = [TensorWriteData(chunk, properties, self.global_size) for chunk in self.__create_chunk_list__()]
        return [WriteItem(index, WriteItemType.SHARD, tensor_data=shard_data) for shard_data in data]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(self.offsets, self.local.shape)] if self.local.numel() else []

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self.local


class _CountedFiles(FileSystem):
    """torch's file system, noting name, size and checksum of every file written through it."""

    def __init__(self):
        self.records: dict[str, FileRecord] = {}
        self.failure: OSError | None = None

    @contextmanager
    def create_stream(self, path, mode):
        with super().create_stream(path, mode) as stream:
            if mode != "wb":
                yield stream
                return
            counted = ChecksumStream(stream)
            try:
                yield counted
            finally:
                self.failure = counted.failure
            self.records[Path(path).name] = counted.record


class ShardWriter(FileSystemWriter):
    """Writes pieces, one synced file per rank, into `directory`. After the save, `records` holds this rank's files with
    size and checksum; `table`, on the coordinator, the JSON text that finds the pieces again, for the caller to write.
    """

    fs: _CountedFiles
    table: str

    def __init__(self, directory: Path):
        super().__init__(directory, single_file_per_rank=True, sync_files=True, overwrite=False)
        self.fs = _CountedFiles()
        self.records = self.fs.records

    def write_data(self, plan: SavePlan, planner: SavePlanner):
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            raise self.fs.failure or error from error

    def finish(self, metadata: Metadata, results: list) -> None:
        places = {result.index: result.storage_data for written in results for result in written}
        tensors = {}
        for name, stored in metadata.state_dict_metadata.items():
            if not isinstance(stored, TensorStorageMetadata):
                raise TypeError(f"{name} is no tensor")
            chunks = []
            for chunk in stored.chunks:
                place = places[MetadataIndex(name, chunk.offsets)]
                at = {"file": place.relative_path, "start": place.offset, "length": place.length}
                chunks.append({"offsets": list(chunk.offsets), "sizes": list(chunk.sizes), **at})
            dtype = str(stored.properties.dtype).removeprefix("torch.")
            tensors[name] = {"dtype": dtype, "size": list(stored.size), "chunks": chunks}
        self.table = json.dumps({"version": _VERSION, "tensors": tensors})


class ShardReader(FileSystemReader):
    """Reads pieces from `directory` by a table that `read_table` has checked."""

    def __init__(self, directory: Path, table: "TensorTable"):
        super().__init__(directory)
        self._table = table

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata(dict(self._table.tensors), storage_data=self._table.places, storage_meta=StorageMeta())

    def read_data(self, plan: LoadPlan, planner: LoadPlanner):
        try:
            return super().read_data(plan, planner)
        except (AssertionError, RuntimeError) as error:  # torch.load's words for a crafted archive
            if isinstance(error, RuntimeError) and "PytorchStreamReader" not in str(error):
                raise
            reason = str(error).splitlines()[0]
            raise UserError(f"a file in {self.path} is not what its table says: {reason}") from error


@dataclass(frozen=True)
class ChunkLocation:
    """The place of a chunk, in the words of torch's reader: bytes of a file, not transformed."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: None = None


@dataclass(frozen=True)
class TensorTable:
    """The tensors of a checkpoint by name, and where their chunks lie."""

    tensors: dict[str, TensorStorageMetadata]
    places: dict[MetadataIndex, ChunkLocation]

    @property
    def sizes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {name: (tuple(entry.size), entry.properties.dtype) for name, entry in self.tensors.items()}


def read_full_tensor(directory: Path, table: TensorTable, name: str) -> Tensor:
    """A tensor of `directory`, [its whole size], from chunks that were seen written, in any thread. No collective."""
    stored = table.tensors[name]
    whole = torch.empty(stored.size, dtype=stored.properties.dtype)
    for chunk in stored.chunks:
        place = table.places[MetadataIndex(name, chunk.offsets)]
        with (directory / place.relative_path).open("rb") as stream:
            stream.seek(place.offset)
            part = torch.load(io.BytesIO(stream.read(place.length)), map_location="cpu", weights_only=True)
        whole[tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))] = part
    return whole


def read_table(path: Path, text: bytes) -> TensorTable:
    """The table in the JSON `text` of `path`. One that a whole save cannot have written (a hole or an overlap between
    chunks, a chunk out of bounds, a file outside the checkpoint, an unknown dtype) is a UserError naming `path`."""
    table = TensorTable({}, {})
    try:
        content = loads(text)
        if content["version"] != _VERSION:
            raise UserError(f"{path}: written in format {content['version']!r}, this dtrain reads format {_VERSION}")
        for name, entry in content["tensors"].items():
            table.tensors[name] = _stored_tensor(entry, name, table.places)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: damaged, or not written by dtrain ({type(error).__name__}: {error})") from error
    return table


def _stored_tensor(entry: dict, name: str, places: dict[MetadataIndex, ChunkLocation]) -> TensorStorageMetadata:
    dtype = getattr(torch, entry["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name}: dtype {entry['dtype']!r}")
    size = _naturals(entry["size"])
    chunks = []
    for chunk in entry["chunks"]:
        offsets, sizes = _naturals(chunk["offsets"]), _naturals(chunk["sizes"])
        start, length = _naturals([chunk["start"], chunk["length"]])
        bounds = zip(offsets, sizes, size, strict=True)
        if any(offset + extent > whole for offset, extent, whole in bounds):
            raise ValueError(f"{name}: a chunk at {list(offsets)} of {list(sizes)} leaves {list(size)}")
        if Path(chunk["file"]).name != chunk["file"]:
            raise ValueError(f"{name}: file {chunk['file']!r} lies outside the checkpoint")
        if length < math.prod(sizes) * dtype.itemsize:
            raise ValueError(f"{name}: {length} bytes cannot hold a chunk of {list(sizes)}")
        index = MetadataIndex(name, offsets)
        if index in places:
            raise ValueError(f"{name}: two chunks at {list(offsets)}")
        places[index] = ChunkLocation(chunk["file"], start, length)
        chunks.append(ChunkStorageMetadata(offsets=offsets, sizes=sizes))
    # The chunks of a save never overlap, so the right volume leaves no hole.
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(size):
        raise ValueError(f"{name}: its chunks do not cover {list(size)}")
    return TensorStorageMetadata(properties=TensorProperties(dtype=dtype), size=size, chunks=chunks)


def _naturals(values: list) -> torch.Size:
    if not all(type(value) is int and 0 <= value < 2**63 for value in values):
        raise ValueError(f"{values} are no sizes")
    return torch.Size(values)
