"""The modules whose forward is running inside a context-parallel context, found by torch's global module hooks."""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import get_process_group_ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from dtrain.attention.kernels import Kernel
from dtrain.base.torch_functions import in_backward


class RunningModules:
    """The modules whose forward is running, and whether they belong to a model with a context-parallel kernel.

    Hooks run in every thread that calls a module. Besides the thread that entered the context, these are autograd's
    threads, which call modules again when activations were checkpointed. So there is one stack per thread.

    Attributes:
        first: The first module that the thread which entered the context called. None if it called none.
        num_recomputed: Outermost modules that a backward inside the context called again.
        num_compiled: Modules called by compiled code whose forward is running. They are not in `stack`.
    """

    def __init__(self, cp_mesh: DeviceMesh):
        self.cp_mesh = cp_mesh
        self.first: nn.Module | None = None
        self.num_recomputed = 0
        self.num_compiled = 0
        self._owner_thread = threading.get_ident()
        self._stacks: dict[int, list[nn.Module]] = {}  # by thread
        # ids of modules of models with a kernel over these ranks. `_own_models` keeps them alive, so ids stay unique.
        self._own_module_ids: set[int] = set()
        self._own_models: list[nn.Module] = []
        self._deferred_threads: set[int] = set()  # see `is_deferred`
        self._recomputing_threads: set[int] = set()  # threads in which the mode was entered for a recomputation

    @contextlib.contextmanager
    def watched(self, mode: TorchFunctionMode) -> Iterator[None]:
        """Follow the modules that are called inside.

        Args:
            mode: It is entered where a backward calls modules again, because the autograd engine runs without the modes
                of the code that called the backward.
        """
        handles: list[RemovableHandle] = [
            register_module_forward_pre_hook(partial(self.enter, mode)),
            register_module_forward_hook(partial(self.leave, mode), always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @property
    def stack(self) -> Sequence[nn.Module]:
        """The running modules of this thread, the outermost first."""
        return self._stacks.get(threading.get_ident(), ())

    @property
    def have_kernel(self) -> bool:
        """True if the running modules belong to a model of dtrain that has a context-parallel kernel."""
        return bool(self.stack) and id(self.stack[0]) in self._own_module_ids

    @property
    def is_deferred(self) -> bool:
        """True if a backward will compute the running modules again.

        `checkpoint(..., use_reentrant=True)` calls modules in no_grad mode, with inputs that have a gradient function.
        """
        return threading.get_ident() in self._deferred_threads

    def enter(self, mode: TorchFunctionMode, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Hook before a module's forward."""
        if torch.compiler.is_compiling():
            # The rest of this function would break the graph. `check` looks at the first module.
            if self.first is None:
                self.first = module
            self.num_compiled += 1
            return
        thread = threading.get_ident()
        stack = self._stacks.setdefault(thread, [])
        stack.append(module)
        if thread == self._owner_thread and self.first is None:
            self.first = module
        if not torch.is_grad_enabled() and _has_gradient_function(args):
            self._deferred_threads.add(thread)
        is_outermost = len(stack) == 1
        if not is_outermost:
            return
        if id(module) not in self._own_module_ids and self._has_kernel(module):
            self._own_models.append(module)
            for part in module.modules():
                self._own_module_ids.add(id(part))
        if in_backward():
            self.num_recomputed += 1
            self._recomputing_threads.add(thread)
            mode.__enter__()

    def leave(self, mode: TorchFunctionMode, module: nn.Module, *_: Any) -> None:
        """Hook after a module's forward, also if it raised."""
        if torch.compiler.is_compiling():
            self.num_compiled -= 1
            return
        thread = threading.get_ident()
        stack = self._stacks.get(thread)
        if not stack or stack[-1] is not module:  # entered before the context, or compiled
            return
        stack.pop()
        if stack:
            return
        self._deferred_threads.discard(thread)
        if thread in self._recomputing_threads:
            self._recomputing_threads.discard(thread)
            mode.__exit__(None, None, None)

    def check(self, *, num_calls: int, num_deferred_calls: int, is_compiled: bool) -> None:
        """Raise if the modules that were called attended to local tokens only, or will do so in the backward.

        Args:
            num_calls: Attention calls that were computed over all ranks.
            num_deferred_calls: Those that a backward will compute again.
            is_compiled: Whether compiled code called attention.

        Raises:
            RuntimeError: With the name of the first module and the fix.
        """
        if num_deferred_calls and not self.num_recomputed:
            raise RuntimeError(
                f"{type(self.first).__name__} ran inside a context-parallel context with activation checkpointing "
                "(use_reentrant=True), and its backward did not. The backward would compute its attention again over "
                "this rank's tokens only: call backward inside the context"
            )
        if self.first is None or self._own_models or self._has_kernel(self.first):
            return
        if num_calls and not is_compiled:
            return
        reason = "computed no attention by torch.nn.functional.scaled_dot_product_attention"
        if is_compiled:
            reason = "is compiled, so its attention cannot be computed over all ranks"
        raise RuntimeError(self.problem(reason))

    def problem(self, reason: str) -> str:
        """Return the message for a model whose attention is local."""
        return (
            f"{type(self.first).__name__} ran inside a context-parallel context, has none of dtrain's "
            f"context-parallel kernels over these {self.cp_mesh.size()} ranks, and {reason}. Each rank saw only its "
            "own part of the rows, so the result is wrong. Use a model of dtrain with such a kernel (Policy builds "
            "one; or model.use_kernel(GatherKernel(SdpaKernel(), cp_mesh))), an uncompiled transformers model with "
            "attn_implementation='sdpa', or call this one on full rows"
        )

    def _has_kernel(self, model: nn.Module) -> bool:
        """Look for a context-parallel kernel over the ranks of `cp_mesh` in the modules of `model`."""
        for kernel in kernels_of(model):
            if kernel.is_context_parallel and self._is_over_these_ranks(kernel):
                return True
        return False

    def _is_over_these_ranks(self, kernel: Kernel) -> bool:
        """Compare the ranks of a kernel's group with those of the mesh.

        Groups are compared by their ranks, because another mesh of the same ranks has a group of its own.
        """
        group = self.cp_mesh.get_group()
        if kernel.group.size() != group.size():
            return False
        return get_process_group_ranks(kernel.group) == get_process_group_ranks(group)


def kernels_of(model: nn.Module) -> Iterator[Kernel]:
    """Yield the kernels of a model. dtrain's models store them as attributes of modules."""
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, Kernel):
                yield value


def _has_gradient_function(args: tuple[Any, ...]) -> bool:
    return any(isinstance(value, Tensor) and value.grad_fn is not None for value in args)
