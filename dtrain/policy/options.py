"""How a model is built and stepped besides what its recipe says. A plain run uses the defaults."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from dtrain.attention.kernels import Kernel

if TYPE_CHECKING:
    from dtrain.memory.activation_offload import HostMemory


class CompilePart(Protocol):
    """Compiler of a part of a layer, in place of torch.compile."""

    def __call__(self, part: Callable[..., Any], is_selective: bool = False) -> Callable[..., Any]:
        """Return the compiled part.

        Args:
            part: Function of tensors.
            is_selective: Whether it has selective checkpointing inside (`memory.selective_checkpointing`).
        """
        ...


@dataclass(frozen=True)
class BuildOptions:
    """How models are built, besides what the recipe says.

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
        longest_row: Tokens of the longest row that the model will receive, for which a kernel is chosen. None:
            `data.max_length`.
    """

    materialize: bool = True
    kernel: Kernel | None = None
    host_memory: "HostMemory | None" = None
    compile_part: CompilePart | None = None
    determinism_check: str = "default"
    step_local_shards: bool = False
    longest_row: int | None = None
