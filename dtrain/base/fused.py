"""Functions of tensors that are one kernel on a GPU whose compiler is here, and run as written elsewhere; loops whose
rounds are alike. A plan counts the ones as a kernel, and follows some rounds of the others."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function, has_torch_function_unary

if TYPE_CHECKING:
    from dtrain.base.compiled import CompiledFunction


class Fused:
    """`function` of tensors, of which all sizes but the last vary, compiled on a GPU that Triton knows. Elsewhere,
    within what is compiled, and under deterministic algorithms it runs as it is written. A function mode can take its
    calls: a plan counts one as one kernel.

    Functions here do not give a varying `value=` to `addcmul` or `alpha=` to `add`: torch 2.13's Inductor drops the
    number once it has seen a third value and made it a variable."""

    def __init__(self, function: Callable[..., Any]):
        self.function = function
        self._compiled: CompiledFunction | None = None

    def will_compile(self, tensor: Tensor) -> bool:
        """Return whether a call with `tensor` [..] is compiled."""
        if has_torch_function((tensor,)) or not tensor.is_cuda or torch.are_deterministic_algorithms_enabled():
            return False
        if self._compiled is None:
            from dtrain.base.compiled import CompiledFunction, missing_compiler_reason

            name = f"{self.function.__module__}.{self.function.__name__}"
            self._compiled = CompiledFunction(self.function, name, num_dynamic_dims=-1)
            self._compiled.runs_uncompiled = missing_compiler_reason("cuda") is not None
        return not self._compiled.runs_uncompiled

    def __call__(self, *arguments: Any) -> Any:
        tensors = [] if torch.compiler.is_compiling() else tensors_in(arguments)
        if tensors and has_torch_function(tensors):
            return handle_torch_function(self, tensors, *arguments)
        if any(map(self.will_compile, tensors)) and self._compiled is not None:
            return self._compiled.call_with_tensors(tensors, *arguments)
        return self.function(*arguments)


def uniform_iterations(items: Sequence[Any], tensor: Tensor) -> Iterable[Any]:
    """Return `items`, for each of which a loop does the same with tensors of the same sizes, smaller ones for the last
    perhaps; all that it keeps is there after the first. A mode of torch's functions that sees `tensor`, any of the
    loop's, may answer with some of the items: `dtrain plan` follows three of them."""
    return (
        handle_torch_function(uniform_iterations, (tensor,), items, tensor)
        if has_torch_function_unary(tensor)
        else items
    )


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors of an operation's arguments or outputs; torch's own walk takes a tenth of a trace."""
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
