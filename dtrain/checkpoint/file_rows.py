"""Where a model's tensors lie in files: each as a tensor of its own, or as rows of one that joins several.

Files may join what a model holds apart: Phi-3's `qkv_proj.weight` is q_proj, k_proj and v_proj, one below the other. So
every placement of the parts is that of plain matrices; only reading and writing know of the whole. What joins what is
`ModelConfig.fused`, by modules; the parts' biases, codes and adapters are joined alike.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn

from dtrain.checkpoint.safetensor_files import WeightFiles
from dtrain.models.config import ModelConfig


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

    def read(self, files: WeightFiles) -> Tensor:
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


def joint_of(model: nn.Module, name: str) -> Joint | None:
    """What joins the parameter `name` of `model` with others in files; None where it has a tensor of its own."""
    config = getattr(model, "config", None)
    module, _, parameter = name.rpartition(".")
    if not isinstance(config, ModelConfig) or (whole := config.whole(module)) == module:
        return None
    return Joint(f"{whole}.{parameter}", tuple(f"{part}.{parameter}" for part in config.parts(whole)))


def joints(model: nn.Module, names: Iterable[str]) -> list[Joint]:
    """The tensors of files that the parameters `names` of `model` are, in order, each once."""
    found = (joint_of(model, name) or Joint(name, (name,)) for name in names)
    return list(dict.fromkeys(found))

