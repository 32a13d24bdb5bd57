"""Where a model's tensors lie in files: each as a tensor of its own, as rows of one that joins several, or in several.

Files may join what a model holds apart: Phi-3's `qkv_proj.weight` is q_proj, k_proj and v_proj, one below the other. So
every placement of the parts is that of plain matrices; only reading and writing know of the whole. What joins what is
`ModelConfig.fused`, by modules; the parts' biases, codes and adapters are joined alike. The other way round a model
holds a layer's experts as stacks [E, out, in], of which the files may have each matrix, or gate and up joined along
`out`; of their adapters PEFT's files have matrices. Imports no torch.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from dtrain.models.adapter_config import is_adapter
from dtrain.models.config import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor

    from dtrain.checkpoint.safetensor_files import WeightFiles


@dataclass(frozen=True)
class FileRows:
    """What one tensor of a model is in files: the tensor `name`, or `count` of its rows from `start` on, counted along
    `dim`; or, where others are given, these one after another, each a matrix of the model's stack."""

    name: str
    start: int = 0
    count: int | None = None
    stacked: tuple[str, ...] = ()
    dim: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors of the files that it is in."""
        return self.stacked or (self.name,)

    def slices(self, held: tuple[slice, ...]) -> tuple[slice, ...]:
        """Where the part `held` of the model's tensor, a slice for each dimension, lies in the file's."""
        if self.count is None:
            return held
        rows = held[self.dim]
        return (*held[: self.dim], slice(rows.start + self.start, rows.stop + self.start), *held[self.dim + 1 :])

    def fill(self, files: "WeightFiles", local: "Tensor", held: tuple[slice, ...]) -> None:
        """Read the part `held` of it into `local`, [its sizes], cast to its dtype. No collective."""
        if not self.stacked:
            return files.copy_into(local, self.name, self.slices(held))
        for index, name in enumerate(self.stacked[held[0]]):
            files.copy_into(local[index], name, held[1:])

    def read(self, files: "WeightFiles") -> "Tensor":
        """All of it, [the model's shape], in the dtype of the files."""
        if self.stacked:
            first = files.read(self.name)
            whole = first.new_empty(len(self.stacked), *first.shape)
            for matrix, name in zip(whole, self.stacked, strict=True):
                matrix.copy_(files.read(name))
            return whole
        if self.count is None:
            return files.read(self.name)
        sizes = list(files.stored[self.name].shape)
        sizes[self.dim] = self.count
        return files.read(self.name, self.slices(_whole(*sizes)))


@dataclass(frozen=True)
class LowRows(FileRows):
    """Of the adapters of `experts` experts A [E, r, in] or B [E, out, r], in a file [E · r, in] or [out, r · E]: A has
    rows expert by expert, B columns number by number of the rank."""

    experts: int = 1

    def fill(self, files: "WeightFiles", local: "Tensor", held: tuple[slice, ...]) -> None:
        """As `FileRows.fill`."""
        local.copy_(self._part(files, held))

    def read(self, files: "WeightFiles") -> "Tensor":
        """As `FileRows.read`."""
        rows, columns = files.stored[self.name].shape
        if ".lora_A" in self.name:
            return self._part(files, _whole(self.experts, rows // self.experts, columns))
        return self._part(files, _whole(self.experts, self.count or rows, columns // self.experts))

    def _part(self, files: "WeightFiles", held: tuple[slice, ...]) -> "Tensor":
        experts, rows, columns = held
        height, width = files.stored[self.name].shape
        if ".lora_A" in self.name:
            rank = height // self.experts
            found = files.read(self.name, (slice(experts.start * rank, experts.stop * rank), columns))
            return found.unflatten(0, (-1, rank))[:, rows]
        found = files.read(self.name, (slice(rows.start + self.start, rows.stop + self.start), slice(0, width)))
        return found.unflatten(1, (-1, self.experts)).permute(2, 0, 1)[experts, :, columns]


def as_in_files(name: str, tensor: "Tensor") -> "Tensor":
    """The parameter `name` of a model, [any shape], as files have it: see `LowRows`."""
    if tensor.dim() != 3 or not is_adapter(name):
        return tensor
    return tensor.flatten(0, 1) if name.endswith("lora_A") else tensor.permute(1, 2, 0).flatten(1)


def shape_in_files(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """That of `as_in_files`."""
    if len(shape) != 3 or not is_adapter(name):
        return shape
    experts, rows, columns = shape
    return (experts * rows, columns) if name.endswith("lora_A") else (rows, columns * experts)


def _whole(*sizes: int) -> tuple[slice, ...]:
    return tuple(slice(0, size) for size in sizes)


@dataclass(frozen=True)
class Joint:
    """The tensor that files call `name`, and the model's tensors that it joins along `dim`, in order; or of a stack the
    matrix of this number."""

    name: str
    parts: tuple[str, ...]
    expert: int | None = None
    dim: int = 0


def joints(model: Any, names: Iterable[str], stored: Iterable[str] = ()) -> list[Joint]:
    """The tensors of files that the parameters `names` of `model`, or of one of this ModelConfig, are, in order, each
    once. An adapter's A is one parameter of all that the files join, and known by the first one's name. stored: what
    files have, which may be the experts of a family of stacks one by one; without it joints are those written."""
    config = model if isinstance(model, ModelConfig) else getattr(model, "config", None)
    if not isinstance(config, ModelConfig):
        return [Joint(name, (name,)) for name in names]
    stacked = config.experts is not None and config.experts.stacked
    stacked = stacked and not any(one.endswith(".experts.0.down_proj.weight") for one in stored)
    return list(dict.fromkeys(joint for name in names for joint in _joints(config, name, stacked)))


def _joints(config: ModelConfig, name: str, stacked: bool) -> list[Joint]:
    module, _, parameter = name.rpartition(".")
    parent, _, last = module.rpartition(".")
    if last in config.unnamed:
        return [Joint(f"{parent}.{parameter}", (name,))]
    of_experts = config.experts is not None and parent.endswith(".experts") and not is_adapter(name)
    if stacked and of_experts:
        if last == "down_proj":
            return [Joint(module, (name,))]
        return [Joint(f"{parent}.gate_up_proj", tuple(f"{parent}.{one}_proj.weight" for one in ("gate", "up")), dim=1)]
    if config.experts is not None and of_experts:
        return [Joint(f"{parent}.{one}.{last}.{parameter}", (name,), one) for one in range(config.experts.count)]
    if (whole := config.whole(module)) == module:
        return [Joint(name, (name,))]
    parts = tuple(f"{part}.{parameter}" for part in config.parts(whole))
    return [Joint(f"{whole}.{parameter}", parts[:1] if parameter == "lora_A" else parts)]


def places(
    joint: Joint, name: str, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[tuple[int, ...], dict[str, FileRows]]:
    """The shape of the tensor that files call `name`, and where the parts of it lie, whose shapes are given."""
    first = shapes[joint.parts[0]]
    if joint.expert is not None:
        return first[1:], {joint.parts[0]: FileRows(name, stacked=(name,))}
    if len(first) == 3 and is_adapter(joint.name):
        inner = {part: shape_in_files(part, shapes[part]) for part in joint.parts}
        shape, rows = places(replace(joint, dim=0), name, inner)
        return shape, {part: LowRows(name, one.start, one.count, experts=first[0]) for part, one in rows.items()}
    if len(joint.parts) == 1:
        return first, {joint.parts[0]: FileRows(name)}
    counts, dim = [shapes[part][joint.dim] for part in joint.parts], joint.dim
    starts = accumulate(counts[:-1], initial=0)
    rows = {
        part: FileRows(name, start, count, dim=dim)
        for part, start, count in zip(joint.parts, starts, counts, strict=True)
    }
    return (*first[:dim], sum(counts), *first[dim + 1 :]), rows


def add_places(found: dict[str, FileRows], more: Mapping[str, FileRows]) -> None:
    """Put `more` places into `found`, of a stack's next matrix behind those before."""
    for part, rows in more.items():
        before = found.get(part)
        found[part] = rows if before is None else replace(before, stacked=before.stacked + rows.stacked)


class Stack:
    """What reads a stack [E, ..] of experts, one matrix at a time: the whole is read at the first, and let go of when
    each was asked for once."""

    def __init__(self, count: int):
        self._count = count
        self._left: dict[Any, int] = {}
        self._whole: dict[Any, Tensor] = {}

    def matrix(self, number: int, read: "Callable[[], Tensor]", key: Any = None) -> "Tensor":
        """The matrix of this number of what `read` reads; key: what `read` depends on beside."""
        if key not in self._whole:
            self._whole[key], self._left[key] = read(), self._count
        self._left[key] -= 1
        whole = self._whole[key] if self._left[key] else self._whole.pop(key)
        return whole[number]
