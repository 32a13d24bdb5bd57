"""Correspondence between the tensors of a model and the tensors of its files.

Most are the same. There are three exceptions, and only reading and writing need to know about them:

- Files may join the weights of several modules of the model. Phi-3's `qkv_proj.weight` [96, 64] contains the rows of
  q_proj (0 to 31), k_proj (32 to 63) and v_proj (64 to 95). The model has separate modules, because tensor parallelism
  shards each of the three matrices by itself. `ModelConfig.fused_modules` lists the modules that files join. Their
  biases, 4-bit codes and adapters are joined in the same way.
- The model stacks the experts of a layer to one tensor [E, out, in]. Files may have one matrix [out, in] per expert, as
  Mixtral's do. Or they have stacks in which gate and up projection are joined along `out`: one after the other, or
  alternating row by row (gpt-oss, which also transposes every matrix).
- Adapters of such stacks are matrices in PEFT's files (`ExpertAdapterRows`).

`fused_weights` lists the tensors of the files that a model's tensors belong to. `locate_parts` then returns where each
of the model's tensors is stored in one of them, as `FileRows`:

    (fused,) = fused_weights(model, ["...k_proj.weight"])     # FusedWeight("...qkv_proj.weight", (q, k, v))
    shape, rows = locate_parts(fused, fused.name, shapes)     # (96, 64), and by name the rows of q, k and v
    rows["...k_proj.weight"]                                  # FileRows("...qkv_proj.weight", start=32, count=32)

This module loads torch only when it has tensors.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from dtrain.adapters.config import is_adapter
from dtrain.models.common.config import ExpertsConfig, ModelConfig

if TYPE_CHECKING:
    from torch import Tensor

    from dtrain.checkpoint.huggingface.safetensor_files import WeightFiles


@dataclass(frozen=True)
class FileRows:
    """Location of a model's tensor in the files.

    Attributes:
        name: The tensor of the files.
        start: First row of the model's tensor in it.
        count: Number of rows. None: all of the file's tensor.
        expert_names: For files that store experts one by one: the tensors of the files, one for each matrix of the
            model's stack [E, out, in]. Empty otherwise.
        dim: The dimension that `start`, `count` and `step` refer to, in the model's layout.
        step: 2 means every second row.
        is_transposed: Whether the file's matrices are the transposed ones of the model.
    """

    name: str
    start: int = 0
    count: int | None = None
    expert_names: tuple[str, ...] = ()
    dim: int = 0
    step: int = 1
    is_transposed: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors of the files that contain a part of the model's tensor."""
        return self.expert_names or (self.name,)

    def slices(self, local: tuple[slice, ...]) -> tuple[slice, ...]:
        """Return the smallest slices of the file's tensor that contain a part of the model's tensor.

        Args:
            local: The part, one slice per dimension of the model's tensor.

        Returns:
            One slice per dimension of the file's tensor. With `step` they also contain the rows in between.

        Example:
            >>> rows = FileRows("qkv_proj.weight", start=32, count=32)
            >>> rows.slices((slice(0, 8), slice(0, 64)))
            (slice(32, 40, None), slice(0, 64, None))
        """
        slices = list(local)
        if self.count is not None:
            rows = local[self.dim]
            first = rows.start * self.step + self.start
            last = (rows.stop - 1) * self.step + self.start
            slices[self.dim] = slice(first, last + 1)
        if self.is_transposed:
            slices[-2], slices[-1] = slices[-1], slices[-2]
        return tuple(slices)

    def _select(self, stored: "Tensor") -> "Tensor":
        """Return the model's part of what was read with `slices`, as a view."""
        stored = stored.mT if self.is_transposed else stored
        if self.step == 1:
            return stored
        selection = [slice(None)] * self.dim + [slice(None, None, self.step)]
        return stored[tuple(selection)]

    def fill(self, files: "WeightFiles", local: "Tensor", local_slices: tuple[slice, ...]) -> None:
        """Read a part of the model's tensor, cast to the dtype of `local`. No collective.

        Args:
            files: The files.
            local: The part, which is filled.
            local_slices: Which part of the tensor it is, one slice per dimension.
        """
        if not self.expert_names:
            local.copy_(self._select(files.read(self.name, self.slices(local_slices))))
            return
        experts, *matrix_slices = local_slices
        for matrix, name in zip(local, self.expert_names[experts], strict=True):
            matrix.copy_(files.read(name, tuple(matrix_slices)))

    def read(self, files: "WeightFiles") -> "Tensor":
        """Read the model's full tensor in the dtype of the files."""
        if self.expert_names:
            first = files.read(self.name)
            stack = first.new_empty(len(self.expert_names), *first.shape)
            for matrix, name in zip(stack, self.expert_names, strict=True):
                matrix.copy_(files.read(name))
            return stack
        if self.count is None:
            return self._select(files.read(self.name))
        sizes = list(files.stored[self.name].shape)
        if self.is_transposed:
            sizes[-2], sizes[-1] = sizes[-1], sizes[-2]
        sizes[self.dim] = self.count
        everything = tuple(slice(0, size) for size in sizes)
        return self._select(files.read(self.name, self.slices(everything)))


@dataclass(frozen=True)
class ExpertAdapterRows(FileRows):
    """Location of an adapter's A [E, r, in] or B [E, out, r] of a stack of experts.

    PEFT's files have matrices: A as [E · r, in], expert by expert, and B as [out, r · E], in which the E columns of the
    first rank come first.

    Attributes:
        experts: Number of experts, E.
    """

    experts: int = 1

    def fill(self, files: "WeightFiles", local: "Tensor", local_slices: tuple[slice, ...]) -> None:
        """Override `FileRows.fill`."""
        experts, rows, columns = local_slices
        height, width = files.stored[self.name].shape
        # The experts of A are row blocks of the file's matrix, so only the local experts' rows are read. The experts of
        # B are interleaved in the columns, so all columns are read, and the local ones selected.
        if ".lora_A" in self.name:
            rank = height // self.experts
            stored = files.read(self.name, (slice(experts.start * rank, experts.stop * rank), columns))
            local.copy_(stored.unflatten(0, (-1, rank))[:, rows])
        else:
            stored = files.read(self.name, (slice(rows.start + self.start, rows.stop + self.start), slice(0, width)))
            by_expert = stored.unflatten(1, (-1, self.experts)).permute(2, 0, 1)  # [E, out, r]
            local.copy_(by_expert[experts, :, columns])

    def read(self, files: "WeightFiles") -> "Tensor":
        """Override `FileRows.read`."""
        stored = files.read(self.name)
        if ".lora_A" in self.name:
            return stored.unflatten(0, (self.experts, -1))
        rows = stored[self.start : self.start + (self.count or len(stored))]
        return rows.unflatten(1, (-1, self.experts)).permute(2, 0, 1)


def adapter_in_file(name: str, tensor: "Tensor") -> "Tensor":
    """Return a model's parameter in the form of PEFT's files, which only changes adapters of stacks of experts.

    Args:
        name: Name of the parameter.
        tensor: The parameter of any shape: A [E, r, in] becomes [E · r, in], B [E, out, r] becomes [out, r · E].
    """
    if tensor.dim() != 3 or not is_adapter(name):
        return tensor
    return tensor.flatten(0, 1) if name.endswith("lora_A") else tensor.permute(1, 2, 0).flatten(1)


def adapter_shape_in_file(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the tensor that `adapter_in_file` returns, for a parameter of this name and shape.

    Example:
        >>> adapter_shape_in_file("experts.gate_up_proj.lora_A", (4, 8, 64))
        (32, 64)
    """
    if len(shape) != 3 or not is_adapter(name):
        return shape
    experts, rows, columns = shape
    return (experts * rows, columns) if name.endswith("lora_A") else (rows, columns * experts)


@dataclass(frozen=True)
class FusedWeight:
    """A tensor of the files, and the tensors of the model that it consists of.

    Attributes:
        name: Its name in the files.
        parts: Names of the model's tensors that it joins, in order. Most have one part.
        expert: If the files store experts one by one: number of the expert of the stack `parts[0]`. Otherwise None.
        dim: The dimension along which parts are joined, in the model's layout.
        is_interleaved: Whether rows alternate: the first row of each part, then the second of each part.
        is_transposed: Whether the file's matrices are the transposed ones of the model.
    """

    name: str
    parts: tuple[str, ...]
    expert: int | None = None
    dim: int = 0
    is_interleaved: bool = False
    is_transposed: bool = False

    def shape(self, shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """Return the shape of the joined tensor in the files.

        Args:
            shapes: Shapes of the parts.
        """
        sizes = list(shapes[0])
        if len(shapes) > 1:
            sizes[self.dim] = sum(shape[self.dim] for shape in shapes)
        if self.is_transposed:
            sizes[-2], sizes[-1] = sizes[-1], sizes[-2]
        return tuple(sizes)

    def join(self, parts: "Sequence[Tensor]") -> "Tensor":
        """Join the parts to the tensor of the files. The result is contiguous if the parts are."""
        import torch  # see the module's docstring

        joined = parts[0]
        if len(parts) > 1 and self.is_interleaved:
            joined = torch.stack(list(parts), self.dim + 1).flatten(self.dim, self.dim + 1)
        elif len(parts) > 1:
            joined = torch.cat(list(parts), self.dim)
        return joined.mT.contiguous() if self.is_transposed else joined

    def split(self, joined: "Tensor", parts: "Sequence[Tensor]") -> "Iterable[Tensor]":
        """Undo `join`: return views of the joined tensor with the sizes of `parts`."""
        joined = joined.mT if self.is_transposed else joined
        if len(parts) == 1:
            return [joined]
        if self.is_interleaved:
            return joined.unflatten(self.dim, (-1, len(parts))).unbind(self.dim + 1)
        return joined.split([part.shape[self.dim] for part in parts], self.dim)


def fused_weights(model: Any, names: Iterable[str], stored: Iterable[str] = ()) -> list[FusedWeight]:
    """List the tensors of the files that a model's tensors belong to, each once.

    Adapters of joined layers share one A. The files have it once, and its only part is the first layer's.

    Args:
        model: The model, or its ModelConfig. Any other module has no joined tensors.
        names: Names of the model's tensors.
        stored: Names in existing files, which show whether the files store experts one by one or as stacks. If no name
            shows this, experts have the form in which dtrain writes them for this family.
    """
    config = model if isinstance(model, ModelConfig) else getattr(model, "config", None)
    if not isinstance(config, ModelConfig):
        return [FusedWeight(name, (name,)) for name in names]
    has_stacks = config.experts is not None and config.experts.is_stacked
    if config.experts is not None and not config.experts.is_transposed:
        has_stacks = _has_expert_stacks(stored, default=has_stacks)
    unique: dict[FusedWeight, None] = {}  # a set in order of appearance
    for name in names:
        unique.update(dict.fromkeys(_fused_weights_of(config, name, has_stacks)))
    return list(unique)


def _has_expert_stacks(stored: Iterable[str], default: bool) -> bool:
    """Check whether files store experts as stacks. Returns `default` if no name shows it."""
    for name in stored:
        if name.endswith(".experts.0.down_proj.weight"):
            return False
        if name.endswith(".experts.gate_up_proj"):
            return True
    return default


def _fused_weights_of(config: ModelConfig, name: str, has_stacks: bool) -> list[FusedWeight]:
    """Return the tensors of the files for one tensor of the model: several only if experts are stored one by one."""
    module, _, parameter = name.rpartition(".")
    parent, _, last = module.rpartition(".")
    if last in config.unnamed_modules:
        return [FusedWeight(f"{parent}.{parameter}", (name,))]
    if config.experts is not None and parent.endswith(".experts") and not is_adapter(name):
        return _fused_expert_weights(config.experts, name, has_stacks)
    joined_module = config.file_module(module)
    if joined_module == module:
        return [FusedWeight(name, (name,))]
    parts = tuple(f"{part}.{parameter}" for part in config.model_modules(joined_module))
    if parameter == "lora_A":
        parts = parts[:1]
    return [FusedWeight(f"{joined_module}.{parameter}", parts)]


def _fused_expert_weights(experts: ExpertsConfig, name: str, has_stacks: bool) -> list[FusedWeight]:
    """Return the tensors of the files for one stack of expert matrices of the model.

    For example, `mlp.experts.gate_proj.weight` is a part of `mlp.experts.gate_up_proj` if the files have stacks.
    Otherwise it consists of `mlp.experts.0.gate_proj.weight`, `mlp.experts.1.gate_proj.weight` and so on.
    """
    module, _, parameter = name.rpartition(".")
    parent, _, matrix = module.rpartition(".")
    if not has_stacks:
        matrices = []
        for number in range(experts.num_experts):
            matrices.append(FusedWeight(f"{parent}.{number}.{matrix}.{parameter}", (name,), number))
        return matrices
    is_bias = parameter == "bias"
    suffix = "_bias" if is_bias else ""
    is_interleaved = experts.is_transposed
    is_transposed = experts.is_transposed and not is_bias
    if matrix == "down_proj":
        file_name = f"{module}{suffix}"
        return [FusedWeight(file_name, (name,), is_interleaved=is_interleaved, is_transposed=is_transposed)]
    file_name = f"{parent}.gate_up_proj{suffix}"
    parts = (f"{parent}.gate_proj.{parameter}", f"{parent}.up_proj.{parameter}")
    return [FusedWeight(file_name, parts, dim=1, is_interleaved=is_interleaved, is_transposed=is_transposed)]


class LocatedParts(NamedTuple):
    """A tensor of the files, and where the model's tensors are stored in it.

    Attributes:
        shape: Shape of the tensor in the files.
        rows: Location of each part, by its name in the model.
    """

    shape: tuple[int, ...]
    rows: dict[str, FileRows]


def locate_parts(fused: FusedWeight, name: str, shapes: Mapping[str, tuple[int, ...]]) -> LocatedParts:
    """Return the shape that a tensor of the files must have, and where the model's tensors are stored in it.

    Args:
        fused: The tensor of the files.
        name: Its name in these files, if that is not `fused.name`.
        shapes: Shapes of the model's tensors, by name.
    """
    first = fused.parts[0]
    if fused.expert is not None:
        return LocatedParts(shapes[first][1:], {first: FileRows(name, expert_names=(name,))})
    if len(shapes[first]) == 3 and is_adapter(fused.name):
        return _locate_expert_adapters(fused, name, shapes)
    shape = fused.shape([shapes[part] for part in fused.parts])
    if len(fused.parts) == 1:
        return LocatedParts(shape, {first: FileRows(name, is_transposed=fused.is_transposed)})
    counts = [shapes[part][fused.dim] for part in fused.parts]
    if fused.is_interleaved:
        # Row i of part p is row i * len(parts) + p of the file.
        starts = list(range(len(counts)))
        step = len(counts)
    else:
        starts = list(accumulate(counts[:-1], initial=0))
        step = 1
    part_rows = {}
    for part, start, count in zip(fused.parts, starts, counts, strict=True):
        part_rows[part] = FileRows(name, start, count, dim=fused.dim, step=step, is_transposed=fused.is_transposed)
    return LocatedParts(shape, part_rows)


def _locate_expert_adapters(fused: FusedWeight, name: str, shapes: Mapping[str, tuple[int, ...]]) -> LocatedParts:
    """Do as `locate_parts` for the adapters of stacks of experts, which the files have as matrices."""
    shapes_in_file = {part: adapter_shape_in_file(part, shapes[part]) for part in fused.parts}
    shape, matrix_rows = locate_parts(replace(fused, dim=0), name, shapes_in_file)
    num_experts = shapes[fused.parts[0]][0]
    adapter_rows: dict[str, FileRows] = {}
    for part, rows in matrix_rows.items():
        adapter_rows[part] = ExpertAdapterRows(name, rows.start, rows.count, experts=num_experts)
    return LocatedParts(shape, adapter_rows)
