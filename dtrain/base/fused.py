"""Small functions that are one kernel on CUDA, and loops whose iterations are alike.

`Fused` decorates a function of tensors: on CUDA it is compiled, elsewhere it runs as it is written.
`uniform_iterations` marks a loop whose iterations all do the same. `dtrain plan` counts a `Fused` function as one
kernel and executes only some iterations of such a loop.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function, has_torch_function_unary

if TYPE_CHECKING:
    from dtrain.base.compiled import CompiledFunction


class Fused:
    """Decorator for a function of tensors that is compiled on CUDA if Triton supports the GPU.

    All dimensions of the tensors but the last may vary between calls. The function runs as it is written on other
    devices, within a function that is being compiled, and under deterministic algorithms. Calls can be intercepted by a
    `__torch_function__` mode: `dtrain plan` counts a call as one kernel.

    Decorated functions must not pass a varying `value=` to `addcmul` or `alpha=` to `add`: the Inductor of torch 2.13
    drops the number once it has seen a third value and made it a variable.

    Attributes:
        function: The function as it is written.
    """

    def __init__(self, function: Callable[..., Any]):
        self.function = function
        self._compiled: CompiledFunction | None = None

    def will_compile(self, tensor: Tensor) -> bool:
        """Check whether a call with this tensor runs compiled."""
        if has_torch_function((tensor,)) or not tensor.is_cuda or torch.are_deterministic_algorithms_enabled():
            return False
        if self._compiled is None:
            from dtrain.base.compiled import CompiledFunction, missing_compiler_reason  # measured: slow to import

            name = f"{self.function.__module__}.{self.function.__name__}"
            self._compiled = CompiledFunction(self.function, name, num_dynamic_dims=-1)
            self._compiled.runs_uncompiled = missing_compiler_reason("cuda") is not None
        return not self._compiled.runs_uncompiled

    def __call__(self, *arguments: Any) -> Any:
        """Call the function, compiled or not."""
        if torch.compiler.is_compiling():
            return self.function(*arguments)
        tensors = tensors_in(arguments)
        if tensors and has_torch_function(tensors):
            return handle_torch_function(self, tensors, *arguments)
        if any(self.will_compile(tensor) for tensor in tensors) and self._compiled is not None:
            return self._compiled.call_with_tensors(tensors, *arguments)
        return self.function(*arguments)


def uniform_iterations(items: Sequence[Any], tensor: Tensor) -> Iterable[Any]:
    """Mark a loop over `items` as a loop of equal iterations, and return the items to loop over.

    Every iteration must run the same operations on tensors of the same sizes. Only the last iteration may have smaller
    tensors. Memory that outlives an iteration must be allocated in the first one. In `dtrain plan`, a
    `__torch_function__` mode returns only three of the items, and the costs of the other iterations are derived from
    these.

    Args:
        items: The items of the loop.
        tensor: Any tensor of the loop. A `__torch_function__` mode that intercepts operations on this tensor also
            intercepts this call.

    Returns:
        `items`, or the items that the mode returns.
    """
    if has_torch_function_unary(tensor):
        return handle_torch_function(uniform_iterations, (tensor,), items, tensor)
    return items


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in an operation's arguments or outputs.

    torch's own function for this is slow: it would take a tenth of the time of a trace in `dtrain plan`.

    Example:
        >>> len(tensors_in((torch.ones(1), {"a": [torch.ones(2)], "b": 3})))
        2
    """
    if isinstance(value, Tensor):
        return [value]
    tensors: list[Tensor] = []
    if isinstance(value, (list, tuple, dict)):  # noqa: UP038 (a union takes longer, and this is asked very often)
        for item in value.values() if isinstance(value, dict) else value:
            if isinstance(item, Tensor):
                tensors.append(item)
            elif isinstance(item, (list, tuple, dict)):  # noqa: UP038
                tensors += tensors_in(item)
    return tensors
