"""Where a model's tensors lie in files: each as a tensor of its own, or as rows of one that joins several.

Files may join what a model holds apart: Phi-3's `qkv_proj.weight` is q_proj, k_proj and v_proj, one below the other. So
every placement of the parts is that of plain matrices; only reading and writing know of the whole. What joins what is
`ModelConfig.fused`, by modules; the parts' biases, codes and adapters are joined alike. Imports no torch.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from dtrain.models.config import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor

    from dtrain.checkpoint.safetensor_files import WeightFiles


@dataclass(frozen=True)
class FileRows:
    """What one tensor of a model is in files: the tensor `name`, or `count` of its rows from `start` on."""

    name: str
    start: int = 0
    count: int | None = None

    def slices(self, held: tuple[slice, ...]) -> tuple[slice, ...]:
        """Where the part `held` of the model's tensor, a slice for each dimension, lies in the file's."""
        if self.count is None:
            return held
        return (slice(held[0].start + self.start, held[0].stop + self.start), *held[1:])

    def read(self, files: "WeightFiles") -> "Tensor":
        """All of it, [the model's shape], in the dtype of the files."""
        if self.count is None:
            return files.read(self.name)
        _, *others = files.stored[self.name].shape
        return files.read(self.name, self.slices((slice(0, self.count), *(slice(0, size) for size in others))))


@dataclass(frozen=True)
class Joint:
    """The tensor that files call `name`, and the model's tensors whose rows it is, in order."""

    name: str
    parts: tuple[str, ...]


def joints(model: Any, names: Iterable[str]) -> list[Joint]:
    """The tensors of files that the parameters `names` of `model`, or of one of this ModelConfig, are, in order, each
    once. An adapter's A is one parameter of all that the files join, and known by the first one's name."""
    config = model if isinstance(model, ModelConfig) else getattr(model, "config", None)
    found = (_joint(config, name) if isinstance(config, ModelConfig) else Joint(name, (name,)) for name in names)
    return list(dict.fromkeys(found))


def _joint(config: ModelConfig, name: str) -> Joint:
    module, _, parameter = name.rpartition(".")
    parent, _, last = module.rpartition(".")
    if last in config.unnamed:
        return Joint(f"{parent}.{parameter}", (name,))
    if (whole := config.whole(module)) == module:
        return Joint(name, (name,))
    parts = tuple(f"{part}.{parameter}" for part in config.parts(whole))
    return Joint(f"{whole}.{parameter}", parts[:1] if parameter == "lora_A" else parts)


def places(
    joint: Joint, name: str, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[tuple[int, ...], dict[str, FileRows]]:
    """The shape of the tensor that files call `name`, and where the parts of it lie, whose shapes are given."""
    first = shapes[joint.parts[0]]
    if len(joint.parts) == 1:
        return first, {joint.parts[0]: FileRows(name)}
    counts = [shapes[part][0] for part in joint.parts]
    starts = accumulate(counts[:-1], initial=0)
    rows = {part: FileRows(name, *at) for part, *at in zip(joint.parts, starts, counts, strict=True)}
    return (sum(counts), *first[1:]), rows
