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
    """Options of `build_model`, and of the policy, the teacher and the reward model that it builds.

    `dtrain plan` builds its models with `materialize=False`, so that they have shapes and no memory, and provides
    everything that would need a device.

    Attributes:
        materialize: Whether parameters get memory and values. If not, they stay on the meta device, no weight is read,
            and optimizer state in host memory is on the meta device too.
        kernel: Attention kernel of one cp rank. None chooses by the recipe and the device, and tries the choice.
        host_memory: Host memory for activations (`train.activation_offload`). None allocates it.
        compile_part: Compiles the parts of layers (`train.compile`). None uses torch.compile.
        determinism_check: Argument of torch's `checkpoint`: how recomputed activations are compared.
        step_local_shards: Let torch's optimizers step local shards as plain tensors. This leaves out DTensor's dispatch
            of each operation, which takes minutes on the meta device. Such an optimizer cannot be saved.
        longest_row: Tokens of the longest row that the model will be given. None: `data.max_length`.
    """

    materialize: bool = True
    kernel: Kernel | None = None
    host_memory: "HostMemory | None" = None
    compile_part: CompilePart | None = None
    determinism_check: str = "default"
    step_local_shards: bool = False
    longest_row: int | None = None
