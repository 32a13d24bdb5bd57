"""Options of a policy: the sections of a recipe that it reads, its dtypes, and how its model is built.

`PolicyConfig` lists the sections. `BuildOptions` has options that are not in a recipe, and a normal run uses their
defaults. `Precision` has the dtypes of weights, of the computation in layers, and of the reduction of gradients.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import torch

from dtrain.attention.kernels import Kernel
from dtrain.recipe.schema import Data, Lora, Model, Moe, Optimizer, Parallel, Run, Scheduler, Stage, Train

if TYPE_CHECKING:
    from dtrain.memory.activation_offload import HostMemory


DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}


@runtime_checkable
class PolicyConfig(Protocol):
    """Dataclass with the sections of a recipe that a policy reads. A `Recipe` has them all.

    In section `run`, a policy reads the seed and whether the run is deterministic. In `data`, it reads the length of
    rows, whether rows are packed, and the chat template that is saved with the model.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]
    run: Run
    model: Model
    data: Data
    parallel: Parallel
    train: Train
    lora: Lora | None
    optimizer: Optimizer
    scheduler: Scheduler | list[Stage]
    moe: Moe


class CompilePart(Protocol):
    """Interface of a function that compiles a part of a layer in place of torch.compile."""

    def __call__(self, part: Callable[..., Any], is_selective: bool = False) -> Callable[..., Any]:
        """Return the compiled part.

        Args:
            part: Function of tensors.
            is_selective: Whether selective checkpointing is applied inside of the part (`checkpoint_selectively`).
        """
        ...


@dataclass(frozen=True)
class BuildOptions:
    """Options for building models that are not in a recipe.

    A policy passes its options on: to `build_model`, to its optimizer, and to the teacher, the reward model and the
    second models (`Policy.another`) that are built on its mesh.

    `dtrain plan` builds its models with `materialize=False`, so that they have shapes and no memory, and provides
    everything that would need a device.

    Attributes:
        materialize: Whether parameters get memory and values. If not, they stay on the meta device, no weight is read,
            and optimizer state in host memory is on the meta device too.
        kernel: Attention kernel of one rank. Under context parallel it is wrapped in the exchange of keys. None chooses
            by the recipe and the device, and checks the chosen kernel on the device.
        host_memory: Host memory for activations (`train.activation_offload`). None allocates it.
        compile_part: Compiles the parts of layers (`train.compile`). None uses torch.compile.
        determinism_check: Argument `determinism_check` of torch's `checkpoint`: "default" compares the metadata of
            recomputed activations with that of the first ones, "none" compares nothing.
        step_local_shards: Give torch's optimizers the local shards as plain tensors, in place of the DTensors. On the
            meta device DTensor's dispatch of every operation would take minutes. Such an optimizer cannot be saved.
        max_row_length: Tokens of the longest row that the model will receive, for which a kernel is chosen. None:
            `data.max_length`.
    """

    materialize: bool = True
    kernel: Kernel | None = None
    host_memory: "HostMemory | None" = None
    compile_part: CompilePart | None = None
    determinism_check: str = "default"
    step_local_shards: bool = False
    max_row_length: int | None = None


@dataclass(frozen=True)
class Precision:
    """Dtypes of a run.

    Attributes:
        master: Dtype of trained weights.
        compute: Dtype in which layers compute.
        reduce: Dtype in which gradients are reduced over ranks and summed over micro-batches.
        reason: Where the dtypes come from, for the terminal.
    """

    master: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    reason: str

    @property
    def is_mixed(self) -> bool:
        """Whether the dtypes differ, so that FSDP has to cast."""
        return self.compute != self.master or self.compute != self.reduce


def choose_precision(name: str, device_type: str, masters: str = "float32") -> Precision:
    """Choose the dtypes of a run.

    Masters have the dtype of computation, but at least float32. With `masters="bfloat16"`, masters and computation are
    both bfloat16. Gradients are reduced in float32 or better.

    Args:
        name: `train.dtype`. "auto" means bfloat16 on CUDA and with bfloat16 masters, and float32 otherwise.
        device_type: "cuda" or "cpu".
        masters: `train.masters`.

    Example:
        >>> choose_precision("auto", "cpu").compute
        torch.float32
        >>> choose_precision("bfloat16", "cuda").master
        torch.float32
    """
    reason = "train.dtype"
    if name == "auto":
        name = "bfloat16" if device_type == "cuda" or masters == "bfloat16" else "float32"
        why = "train.masters is bfloat16" if masters == "bfloat16" else f"the device is {device_type}"
        reason = f"train.dtype is auto and {why}"
    compute = DTYPES[name]
    reduce = torch.promote_types(compute, torch.float32)
    master = compute if masters == "bfloat16" else reduce
    return Precision(master, compute, reduce, reason)
