"""Sharded tensors in torch's distributed checkpoint (DCP), and DCP's metadata as JSON.

A `TensorShard` is one rank's part of a tensor: the local tensor, the global size, and the offsets. For example, a
weight [6, 4] on two ranks:

    rank 0: local [3, 4], offsets (0, 0)     -> writes rows 0 to 2 into __0_0.distcp
    rank 1: local [3, 4], offsets (3, 0)     -> writes rows 3 to 5 into __1_0.distcp

On another mesh, a rank whose shard has rows 2 to 4 reads one row of the first file and two of the second.

Two things of DCP are replaced:

- The offsets. torch computes those of a DTensor by `compute_local_shape_and_global_offset`, which is wrong for some
  uneven FSDP × TP shards. Here they come from `parallel.placement`.
- The metadata. DCP pickles its metadata and everything that is not a tensor, and unpickling a file may run code that is
  in it. Here only tensors go through DCP, and the metadata is JSON:

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
    """This rank's part of a tensor, for DCP.

    This class is a subclass of Tensor, because on ranks other than 0 DCP's planners skip objects that are not tensors.
    The planners call the methods with double underscores to find out which chunks to write and read.

    Attributes:
        local: This rank's part as a plain tensor. It shares storage with the original tensor.
        global_size: Size of the full tensor, which `size()` returns too: planners compare it with the checkpoint's.
        offsets: Index of the first element of `local` in the full tensor, one number per dimension.

    Example:
        >>> rows = torch.zeros(3, 4)
        >>> shard = TensorShard.from_offsets(rows, global_size=(6, 4), offsets=(3, 0))
        >>> shard.size(), shard.local.shape, shard.offsets
        (torch.Size([6, 4]), torch.Size([3, 4]), torch.Size([3, 0]))
    """

    local: Tensor
    global_size: torch.Size
    offsets: torch.Size

    @classmethod
    def from_offsets(cls, local: Tensor, global_size: tuple[int, ...], offsets: tuple[int, ...]) -> "TensorShard":
        """Return the shard of a tensor [global_size] that begins at `offsets`. No collective, no copy."""
        shard = local.detach().as_subclass(cls)
        shard.local = local.detach()
        shard.global_size = torch.Size(global_size)
        shard.offsets = torch.Size(offsets)
        return shard

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> "TensorShard":
        """Return this rank's shard of a tensor. No collective, no copy.

        Ranks that have the same shard (replicas, plain tensors) write it once.

        Args:
            tensor: A plain tensor, a DTensor, or a `TensorShard`, which is returned as it is.
        """
        if isinstance(tensor, TensorShard):
            return tensor
        offsets = tuple(part.start for part in local_slices(tensor))
        return cls.from_offsets(local_tensor(tensor), tuple(tensor.shape), offsets)

    def size(self, dim: int | None = None):
        return self.global_size if dim is None else self.global_size[dim]

    def __create_write_items__(self, fqn: str, _) -> list[WriteItem]:
        index = MetadataIndex(fqn, self.offsets)
        properties = TensorProperties(dtype=self.local.dtype)
        items = []
        for chunk in self.__create_chunk_list__():
            data = TensorWriteData(chunk, properties, self.global_size)
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        return items

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return a list with the chunk of this rank. An empty shard has no chunk."""
        if not self.local.numel():
            return []
        return [ChunkStorageMetadata(self.offsets, self.local.shape)]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self.local


class _RecordingFileSystem(FileSystem):
    """torch's file system, which records name, size and checksum of every file that is written through it.

    Attributes:
        records: Size and checksum by file name.
        failure: The error of the disk, if there was one.
    """

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
    """DCP's writer of one synced file per rank, whose metadata becomes JSON.

    Args:
        directory: Directory of the files.

    Attributes:
        records: After the save, size and checksum of this rank's files by name.
        table: After the save, on the coordinator: the JSON text that `read_table` reads. The caller writes it.
    """

    fs: _RecordingFileSystem
    table: str

    def __init__(self, directory: Path):
        super().__init__(directory, single_file_per_rank=True, sync_files=True, overwrite=False)
        self.fs = _RecordingFileSystem()
        self.records = self.fs.records

    def write_data(self, plan: SavePlan, planner: SavePlanner):
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            # torch's zip writer replaces "no space left on device" by an error that says nothing.
            raise self.fs.failure or error from error

    def finish(self, metadata: Metadata, results: list) -> None:
        """Set `table`, where torch would pickle the metadata into a file."""
        locations = {}
        for rank_results in results:
            for result in rank_results:
                locations[result.index] = result.storage_data
        tensors = {}
        for name, stored in metadata.state_dict_metadata.items():
            if not isinstance(stored, TensorStorageMetadata):
                raise TypeError(f"{name} is not a tensor")
            chunks = []
            for chunk in stored.chunks:
                location = locations[MetadataIndex(name, chunk.offsets)]
                chunks.append(
                    {
                        "offsets": list(chunk.offsets),
                        "sizes": list(chunk.sizes),
                        "file": location.relative_path,
                        "start": location.offset,
                        "length": location.length,
                    }
                )
            dtype = str(stored.properties.dtype).removeprefix("torch.")
            tensors[name] = {"dtype": dtype, "size": list(stored.size), "chunks": chunks}
        self.table = json.dumps({"version": _VERSION, "tensors": tensors})


class ShardReader(FileSystemReader):
    """DCP's reader, with metadata from a JSON table instead of a pickle.

    Args:
        directory: Directory of the files.
        table: Their table, as `read_table` returns it.
    """

    def __init__(self, directory: Path, table: "TensorTable"):
        super().__init__(directory)
        self._table = table

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata(dict(self._table.tensors), storage_data=self._table.locations, storage_meta=StorageMeta())

    def read_data(self, plan: LoadPlan, planner: LoadPlanner):
        try:
            return super().read_data(plan, planner)
        except (AssertionError, RuntimeError) as error:
            # torch.load has no error class for a damaged archive. Its messages contain the name of its reader.
            if isinstance(error, RuntimeError) and "PytorchStreamReader" not in str(error):
                raise
            reason = str(error).splitlines()[0]
            raise UserError(f"a file in {self.path} is not what its table says: {reason}") from error


@dataclass(frozen=True)
class ChunkLocation:
    """Bytes of a chunk in a file. The fields have the names that torch's reader expects.

    Attributes:
        relative_path: Name of the file.
        offset: First byte.
        length: Number of bytes.
        transform_descriptors: Always None: nothing is compressed.
    """

    relative_path: str
    offset: int
    length: int
    transform_descriptors: None = None


@dataclass(frozen=True)
class TensorTable:
    """The tensors of a checkpoint, and where their chunks are stored.

    Attributes:
        tensors: Size, dtype and chunks of each tensor, by name.
        locations: The bytes of each chunk, by the tensor's name and the chunk's offsets.
    """

    tensors: dict[str, TensorStorageMetadata]
    locations: dict[MetadataIndex, ChunkLocation]

    @property
    def sizes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each tensor, by name."""
        return {name: (tuple(entry.size), entry.properties.dtype) for name, entry in self.tensors.items()}


def read_full_tensor(directory: Path, table: TensorTable, name: str) -> Tensor:
    """Read a tensor of any shape without DCP, in any thread. No collective.

    Args:
        directory: Directory of the files, which this process has seen complete.
        table: Their table.
        name: Name of the tensor.
    """
    stored = table.tensors[name]
    tensor = torch.empty(stored.size, dtype=stored.properties.dtype)
    for chunk in stored.chunks:
        location = table.locations[MetadataIndex(name, chunk.offsets)]
        with (directory / location.relative_path).open("rb") as stream:
            stream.seek(location.offset)
            content = io.BytesIO(stream.read(location.length))
        part = torch.load(content, map_location="cpu", weights_only=True)
        bounds = zip(chunk.offsets, chunk.sizes, strict=True)
        tensor[tuple(slice(offset, offset + size) for offset, size in bounds)] = part
    return tensor


def read_table(path: Path, text: bytes) -> TensorTable:
    """Read and check a table of tensors.

    Args:
        path: The file of the table, for messages.
        text: Its JSON text.

    Raises:
        UserError: For a table that no save can have written: with chunks that overlap, chunks whose sizes do not add up
            to the tensor's, a chunk out of bounds, a file outside of the checkpoint, or an unknown dtype.
    """
    table = TensorTable({}, {})
    try:
        content = loads(text)
        if content["version"] != _VERSION:
            raise UserError(f"{path}: written in format {content['version']!r}, this dtrain reads format {_VERSION}")
        for name, entry in content["tensors"].items():
            table.tensors[name] = _read_entry(entry, name, table.locations)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: damaged, or not written by dtrain ({type(error).__name__}: {error})") from error
    return table


def _read_entry(entry: dict, name: str, locations: dict[MetadataIndex, ChunkLocation]) -> TensorStorageMetadata:
    """Read the entry of one tensor, and add its chunks to `locations`. Raises ValueError, KeyError or TypeError."""
    dtype = getattr(torch, entry["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name}: dtype {entry['dtype']!r}")
    size = _read_sizes(entry["size"])
    chunks = []
    for chunk in entry["chunks"]:
        offsets, sizes = _read_sizes(chunk["offsets"]), _read_sizes(chunk["sizes"])
        start, length = _read_sizes([chunk["start"], chunk["length"]])
        for offset, extent, dim_size in zip(offsets, sizes, size, strict=True):
            if offset + extent > dim_size:
                raise ValueError(f"{name}: a chunk at {list(offsets)} of {list(sizes)} leaves {list(size)}")
        if Path(chunk["file"]).name != chunk["file"]:
            raise ValueError(f"{name}: file {chunk['file']!r} is outside the checkpoint")
        if length < math.prod(sizes) * dtype.itemsize:
            raise ValueError(f"{name}: {length} bytes cannot hold a chunk of {list(sizes)}")
        index = MetadataIndex(name, offsets)
        if index in locations:
            raise ValueError(f"{name}: two chunks at {list(offsets)}")
        locations[index] = ChunkLocation(chunk["file"], start, length)
        chunks.append(ChunkStorageMetadata(offsets=offsets, sizes=sizes))
    # Chunks that do not overlap and have the volume of the tensor cover all of it.
    num_elements = sum(math.prod(chunk.sizes) for chunk in chunks)
    if num_elements != math.prod(size):
        raise ValueError(f"{name}: its chunks do not cover {list(size)}")
    _check_no_overlap(chunks, name)
    return TensorStorageMetadata(properties=TensorProperties(dtype=dtype), size=size, chunks=chunks)


def _check_no_overlap(chunks: list[ChunkStorageMetadata], name: str) -> None:
    """Raise ValueError if two chunks of a tensor have an element in common.

    The chunks are visited by their first row. A chunk is compared only with the chunks that reach into its rows, so
    1024 shards of rows take 1024 comparisons.
    """
    # A chunk without elements overlaps nothing. A tensor without dimensions has one chunk, at the offsets [].
    nonempty = [chunk for chunk in chunks if len(chunk.offsets) > 0 and chunk.sizes.numel() > 0]
    open_chunks: list[ChunkStorageMetadata] = []
    for chunk in sorted(nonempty, key=lambda chunk: chunk.offsets[0]):
        first_row = chunk.offsets[0]
        open_chunks = [other for other in open_chunks if other.offsets[0] + other.sizes[0] > first_row]
        for other in open_chunks:
            if _overlap(chunk, other):
                raise ValueError(f"{name}: the chunks at {list(other.offsets)} and {list(chunk.offsets)} overlap")
        open_chunks.append(chunk)


def _overlap(first: ChunkStorageMetadata, second: ChunkStorageMetadata) -> bool:
    """Check whether two chunks that are not empty have an element in common."""
    for dim in range(len(first.offsets)):
        first_end = first.offsets[dim] + first.sizes[dim]
        second_end = second.offsets[dim] + second.sizes[dim]
        if first_end <= second.offsets[dim] or second_end <= first.offsets[dim]:
            return False
    return True


def _read_sizes(values: list) -> torch.Size:
    """Return natural numbers below 2^63 as a size. Raises ValueError for anything else."""
    if not all(type(value) is int and 0 <= value < 2**63 for value in values):
        raise ValueError(f"{values} are no sizes")
    return torch.Size(values)
