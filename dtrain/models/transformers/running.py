"""The forward that is running, for modules of transformers that only receive tensors.

A layer of transformers calls its linear layers and its attention function with tensors, and cannot pass dtrain's
`MicroBatchContext` on to them. The forward of a micro-batch is therefore a context variable, which `running` sets for
the duration of a call. Like torch's grad mode it belongs to the running call of a thread, and to no model.

    TransformersDecoder.states        sets it for the forward of the model
    TransformersLayer.__call__        adds it to the arguments of each layer, so that activation checkpointing, which
                                      calls the layer again in the backward, has it too
    TransformersLayer.forward         sets it for the layer
    attend, TransformersLinear        read it
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dtrain.attention.kernels import Kernel
from dtrain.models.common.masks import AttentionMasks
from dtrain.models.common.micro_batch import AdapterContext, DecodingCache
from dtrain.parallel.collectives import all_reduce_in_backward


class SharedInput:
    """Cache of the last input of a colwise layer, so that layers with the same input share one all-reduce.

    For example, q_proj, k_proj and v_proj are called with the same tensor. All three read the result of one
    `all_reduce_in_backward`, so autograd adds up their three gradients first, and then sums them over the ranks.
    """

    def __init__(self) -> None:
        self._input: Tensor | None = None
        self._entered: Tensor | None = None

    def enter(self, hidden: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return a tensor with the values of `hidden`, whose gradient is summed over the ranks.

        Collectives:
            One all-reduce in the backward for consecutive calls with the same tensor.
        """
        if self._entered is None or self._input is not hidden:
            self._input, self._entered = hidden, all_reduce_in_backward(hidden, group)
        return self._entered

    def clear(self) -> None:
        """Forget the tensor, whose graph would otherwise be kept."""
        self._input = self._entered = None


@dataclass(frozen=True, eq=False)
class RunningForward:
    """The state of a forward that attention and linear layers read. Either `masks` or `cache` is None.

    Attributes:
        kernel: The model's attention kernel.
        masks: Masks of the micro-batch. None with a KV cache.
        cache: KV cache, which computes attention in place of the kernel. None in training.
        adapters: Whether adapters take part, and their dropout.
        is_double: Whether the model is in float64, so that all of it computes in float64 (`DoublePrecision`).
        shared_input: The last input of a sharded linear layer.
    """

    kernel: Kernel
    masks: AttentionMasks | None
    cache: DecodingCache | None
    adapters: AdapterContext | None
    is_double: bool = False
    shared_input: SharedInput = field(default_factory=SharedInput)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, sinks: Tensor | None
    ) -> Tensor:
        """Compute attention of a layer.

        Args:
            layer: Number of the layer.
            q: [B, S, H, hd].
            k: [B, S, kv, hd].
            v: [B, S, kv, hd_v].
            scale: Factor of the scores.
            window: Number of keys that a query sees. None: all earlier ones. Not read with a cache, which knows the
                windows of all layers.
            sinks: Attention sinks, [H].

        Returns:
            [B, S, H, hd_v].
        """
        if self.masks is None:
            if self.cache is None:
                raise RuntimeError("this forward has neither masks nor a cache")
            return self.cache.attend(layer, q, k, v, scale, sinks=sinks)
        return self.kernel(q, k, v, self.masks.for_window(window), scale, sinks)


_running: ContextVar[RunningForward | None] = ContextVar("running_forward", default=None)


def get_running() -> RunningForward | None:
    """Return the forward that is running. None outside of one."""
    return _running.get()


@contextmanager
def running(forward: RunningForward | None) -> Iterator[None]:
    """Context in which `forward` is the running forward."""
    token = _running.set(forward)
    try:
        with DoublePrecision() if forward is not None and forward.is_double else nullcontext():
            yield
    finally:
        _running.reset(token)


class DoublePrecision(TorchFunctionMode):
    """Context in which functions of torch that compute in float32 compute in float64.

    The norms, rotary tables and softmax of transformers are float32 even in a model in float64, where two correct
    results, for example those of two meshes, would differ by 1e-7.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func` with float64 in place of each argument that is float32."""
        kwargs = {name: _doubled(value) for name, value in (kwargs or {}).items()}
        if func is Tensor.float:
            func = Tensor.double
        return func(*(_doubled(arg) for arg in args), **kwargs)


def _doubled(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


class Unset(Enum):
    """Type of `UNSET`."""

    UNSET = "unset"


UNSET = Unset.UNSET
"""Default of an argument for which None has a meaning."""


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None | Unset = UNSET,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **unused: object,
) -> tuple[Tensor, None]:
    """Compute the attention of a transformers layer by dtrain's kernel, as transformers' `AttentionInterface` calls it.

    Args:
        module: The attention module.
        query: [B, H, S, hd].
        key: [B, kv, S, hd].
        value: [B, kv, S, hd_v].
        attention_mask: None, because no mask function is registered for dtrain. The mask is that of the micro-batch.
        scaling: Factor of the scores. None: 1/sqrt(hd).
        dropout: Probability of dropout, which must be 0.
        sliding_window: Number of keys that a query sees. None: all earlier ones. UNSET: see `get_window`.
        s_aux: Attention sinks, [H].
        softcap: Must be None.
        is_causal: Must not be False. None: the module's attribute, if it has one.
        unused: Further arguments, which do not change the result of a causal layer.

    Returns:
        [B, S, H, hd_v], and None in place of the attention weights.

    Raises:
        NotImplementedError: For attention that dtrain's kernels do not compute. The proof at a run's start reports it.
    """
    forward = get_running()
    if forward is None:
        raise RuntimeError("attention of a transformers model was called outside of the model's forward")
    check_attention(module, attention_mask, dropout=dropout, softcap=softcap, is_causal=is_causal)
    window = get_window(module, sliding_window)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    # Attention takes [B, S, heads, hd].
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    output = forward.attend(get_layer_index(module), q, k, v, scale, window, s_aux)
    return output, None


def check_attention(
    module: torch.nn.Module,
    attention_mask: Tensor | None,
    *,
    dropout: float,
    softcap: float | None,
    is_causal: bool | None,
) -> None:
    """Raise NotImplementedError for attention that dtrain's kernels do not compute. The arguments are `attend`'s."""
    if softcap is not None:
        raise NotImplementedError(f"its attention caps the scores (softcap {softcap})")
    if attention_mask is not None:
        raise NotImplementedError("its attention has a mask of its own")
    if dropout:
        raise NotImplementedError(f"its attention has dropout ({dropout})")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if not is_causal:
        raise NotImplementedError("its attention is not causal")


def get_window(module: torch.nn.Module, sliding_window: int | None | Unset) -> int | None:
    """Return the number of keys that a query of an attention module of transformers sees. None: all earlier ones.

    Most modules pass the window as an argument. The argument decides if there is one: Exaone4's layers all have the
    attribute `sliding_window`, and those with full attention pass None. Modules that pass nothing have the attribute.

    Args:
        module: The attention module.
        sliding_window: The argument. UNSET if the module has passed none.
    """
    if isinstance(sliding_window, Unset):
        return getattr(module, "sliding_window", None)
    return sliding_window


def get_layer_index(module: torch.nn.Module) -> int:
    """Return the number of the layer of an attention module of transformers."""
    index = getattr(module, "layer_idx", None)
    if not isinstance(index, int):
        raise NotImplementedError(f"{type(module).__name__} does not know the number of its layer")
    return index
