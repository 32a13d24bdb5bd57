"""Places of a model's tensors in files: each as a tensor of its own, as rows of one that joins several, or in several.

Files may join what a model holds apart: Phi-3's `qkv_proj.weight` is q_proj, k_proj and v_proj, one below the other. So
every placement of the parts is that of plain matrices; only reading and writing know of the whole. What joins what is
`ModelConfig.fused_modules`, by modules; the parts' biases, codes and adapters are joined alike. The other way round a
model holds a layer's experts as stacks [E, out, in], of which the files may have each matrix, or gate and up joined
along `out`, one behind the other or row by row in turn, or every matrix transposed; of their adapters PEFT's files have
matrices. Loads no torch before it has tensors.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from dtrain.adapters.config import is_adapter
from dtrain.models.common.config import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor

    from dtrain.checkpoint.huggingface.safetensor_files import WeightFiles


@dataclass(frozen=True)
class FileRows:
    """The rows of a file that one tensor of a model is: the tensor `name`, or `count` of its rows from `start` on, each
    `step`-th of them along `dim`; or, where others are given, these one after another, each a matrix of the model's
    stack. is_transposed: whether the file's matrices are the model's is_transposed; dim and slices are the model's."""

    name: str
    start: int = 0
    count: int | None = None
    expert_names: tuple[str, ...] = ()
    dim: int = 0
    step: int = 1
    is_transposed: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors of the files that it is in."""
        return self.expert_names or (self.name,)

    def slices(self, held: tuple[slice, ...]) -> tuple[slice, ...]:
        """Return where the part `held` of the model's tensor, a slice for each dimension, lies in the file's, what
        stands between its rows included."""
        if self.count is not None:
            rows = held[self.dim]
            start, stop = rows.start * self.step + self.start, (rows.stop - 1) * self.step + self.start + 1
            held = (*held[: self.dim], slice(start, stop), *held[self.dim + 1 :])
        return (*held[:-2], held[-1], held[-2]) if self.is_transposed else held

    def _mine(self, read: "Tensor") -> "Tensor":
        """The model's part of what `slices` says, [its sizes]: a view."""
        read = read.mT if self.is_transposed else read
        return read[(*(slice(None),) * self.dim, slice(None, None, self.step))] if self.step > 1 else read

    def fill(self, files: "WeightFiles", local: "Tensor", held: tuple[slice, ...]) -> None:
        """Read the part `held` of it into `local`, [its sizes], cast to its dtype. No collective."""
        if not self.expert_names:
            local.copy_(self._mine(files.read(self.name, self.slices(held))))
            return
        for matrix, name in zip(local, self.expert_names[held[0]], strict=True):
            matrix.copy_(files.read(name, held[1:]))

    def read(self, files: "WeightFiles") -> "Tensor":
        """All of it, [the model's shape], in the dtype of the files."""
        if self.expert_names:
            first = files.read(self.name)
            whole = first.new_empty(len(self.expert_names), *first.shape)
            for matrix, name in zip(whole, self.expert_names, strict=True):
                matrix.copy_(files.read(name))
            return whole
        if self.count is None:
            return self._mine(files.read(self.name))
        sizes = list(files.stored[self.name].shape)
        sizes = [*sizes[:-2], sizes[-1], sizes[-2]] if self.is_transposed else sizes
        sizes[self.dim] = self.count
        return self._mine(files.read(self.name, self.slices(tuple(slice(0, size) for size in sizes))))


@dataclass(frozen=True)
class ExpertAdapterRows(FileRows):
    """Rows of the adapters of `experts` experts: A [E, r, in] or B [E, out, r], in a file [E · r, in] or [out, r · E]:
    A has rows expert by expert, B columns number by number of the rank."""

    experts: int = 1

    def fill(self, files: "WeightFiles", local: "Tensor", held: tuple[slice, ...]) -> None:
        """Override `FileRows.fill`."""
        experts, rows, columns = held
        height, width = files.stored[self.name].shape
        if ".lora_A" in self.name:
            rank = height // self.experts
            stored = files.read(self.name, (slice(experts.start * rank, experts.stop * rank), columns))
            local.copy_(stored.unflatten(0, (-1, rank))[:, rows])
        else:
            stored = files.read(self.name, (slice(rows.start + self.start, rows.stop + self.start), slice(0, width)))
            local.copy_(stored.unflatten(1, (-1, self.experts)).permute(2, 0, 1)[experts, :, columns])

    def read(self, files: "WeightFiles") -> "Tensor":
        """Override `FileRows.read`."""
        stored = files.read(self.name)
        if ".lora_A" in self.name:
            return stored.unflatten(0, (self.experts, -1))
        rows = stored[self.start : self.start + (self.count or len(stored))]
        return rows.unflatten(1, (-1, self.experts)).permute(2, 0, 1)


def adapter_in_file(name: str, tensor: "Tensor") -> "Tensor":
    """The parameter `name` of a model, [any shape], as files have it: see `ExpertAdapterRows`."""
    if tensor.dim() != 3 or not is_adapter(name):
        return tensor
    return tensor.flatten(0, 1) if name.endswith("lora_A") else tensor.permute(1, 2, 0).flatten(1)


def adapter_shape_in_file(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of `adapter_in_file`."""
    if len(shape) != 3 or not is_adapter(name):
        return shape
    experts, rows, columns = shape
    return (experts * rows, columns) if name.endswith("lora_A") else (rows, columns * experts)


@dataclass(frozen=True)
class FusedWeight:
    """The tensor that files call `name`, and the model's tensors that it joins along `dim`, in order; or of a stack the
    matrix of this number. is_interleaved: whether it has a row of each part, then the next of each. is_transposed:
    whether its
    matrices are."""

    name: str
    parts: tuple[str, ...]
    expert: int | None = None
    dim: int = 0
    is_interleaved: bool = False
    is_transposed: bool = False

    def shape(self, shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """Return the shape of the whole, from those of the parts."""
        sizes = list(shapes[0])
        if len(shapes) > 1:
            sizes[self.dim] = sum(shape[self.dim] for shape in shapes)
        return (*sizes[:-2], sizes[-1], sizes[-2]) if self.is_transposed else tuple(sizes)

    def join(self, parts: "Sequence[Tensor]") -> "Tensor":
        """The whole of all parts, contiguous where they are."""
        import torch

        whole = parts[0]
        if len(parts) > 1 and self.is_interleaved:
            whole = torch.stack(list(parts), self.dim + 1).flatten(self.dim, self.dim + 1)
        elif len(parts) > 1:
            whole = torch.cat(list(parts), self.dim)
        return whole.mT.contiguous() if self.is_transposed else whole

    def split(self, whole: "Tensor", parts: "Sequence[Tensor]") -> "Iterable[Tensor]":
        """`join` undone: views of `whole`, as large as `parts`."""
        whole = whole.mT if self.is_transposed else whole
        if len(parts) == 1:
            return [whole]
        if self.is_interleaved:
            return whole.unflatten(self.dim, (-1, len(parts))).unbind(self.dim + 1)
        return whole.split([part.shape[self.dim] for part in parts], self.dim)


def fused_weights(model: Any, names: Iterable[str], stored: Iterable[str] = ()) -> list[FusedWeight]:
    """The tensors of files that the parameters `names` of `model`, or of one of this ModelConfig, are, each once. An
    adapter's A is one of all that the files join, under the first one's name. stored: what files have, which may be the
    experts of a family of stacks one by one, or stacks of a family that has them one by one; without it they are those
    written."""
    config = model if isinstance(model, ModelConfig) else getattr(model, "config", None)
    if not isinstance(config, ModelConfig):
        return [FusedWeight(name, (name,)) for name in names]
    stacked = config.experts is not None and config.experts.is_stacked
    if config.experts is not None and not config.experts.is_transposed:
        stacked = _are_stacked(stored, stacked)
    return list(dict.fromkeys(fused for name in names for fused in _joints(config, name, stacked)))


def _are_stacked(stored: Iterable[str], otherwise: bool) -> bool:
    """Return whether files have experts as stacks; `otherwise` if their names do not say."""
    for name in stored:
        if name.endswith(".experts.0.down_proj.weight"):
            return False
        if name.endswith(".experts.gate_up_proj"):
            return True
    return otherwise


def _joints(config: ModelConfig, name: str, stacked: bool) -> list[FusedWeight]:
    module, _, parameter = name.rpartition(".")
    parent, _, last = module.rpartition(".")
    if last in config.unnamed_modules:
        return [FusedWeight(f"{parent}.{parameter}", (name,))]
    of_experts = config.experts is not None and parent.endswith(".experts") and not is_adapter(name)
    if stacked and of_experts:
        turned, end = (
            config.experts is not None and config.experts.is_transposed,
            "_bias" if parameter == "bias" else "",
        )
        flags = {"is_interleaved": turned, "is_transposed": turned and not end}
        if last == "down_proj":
            return [FusedWeight(f"{module}{end}", (name,), **flags)]
        pair = tuple(f"{parent}.{role}_proj.{parameter}" for role in ("gate", "up"))
        return [FusedWeight(f"{parent}.gate_up_proj{end}", pair, dim=1, **flags)]
    if config.experts is not None and of_experts:
        numbers = range(config.experts.num_experts)
        return [FusedWeight(f"{parent}.{number}.{last}.{parameter}", (name,), number) for number in numbers]
    if (whole := config.file_module(module)) == module:
        return [FusedWeight(name, (name,))]
    parts = tuple(f"{part}.{parameter}" for part in config.model_modules(whole))
    return [FusedWeight(f"{whole}.{parameter}", parts[:1] if parameter == "lora_A" else parts)]


def locate_parts(
    fused: FusedWeight, name: str, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[tuple[int, ...], dict[str, FileRows]]:
    """The shape of the tensor that files call `name`, and where the parts of it lie, whose shapes are given."""
    first = fused.parts[0]
    if fused.expert is not None:
        return shapes[first][1:], {first: FileRows(name, expert_names=(name,))}
    if len(shapes[first]) == 3 and is_adapter(fused.name):
        inner = {part: adapter_shape_in_file(part, shapes[part]) for part in fused.parts}
        shape, rows = locate_parts(replace(fused, dim=0), name, inner)
        experts = shapes[first][0]
        return shape, {part: ExpertAdapterRows(name, of.start, of.count, experts=experts) for part, of in rows.items()}
    whole = fused.shape([shapes[part] for part in fused.parts])
    if len(fused.parts) == 1:
        return whole, {first: FileRows(name, is_transposed=fused.is_transposed)}
    counts = [shapes[part][fused.dim] for part in fused.parts]
    starts, step = (
        (range(len(counts)), len(counts)) if fused.is_interleaved else (accumulate(counts[:-1], initial=0), 1)
    )
    rows = {
        part: FileRows(name, start, count, dim=fused.dim, step=step, is_transposed=fused.is_transposed)
        for part, start, count in zip(fused.parts, starts, counts, strict=True)
    }
    return whole, rows
