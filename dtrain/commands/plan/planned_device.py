"""Tensors without memory that stand in for those of the planned device, and operations on them.

The stand-ins are torch's meta tensors: shapes, dtypes and autograd, no bytes and no arithmetic. Two modes make a
training step run on them as it would run on the device: `PlannedDevice`, and `MetaKernels` below it.

`PlannedDevice` answers where a tensor is: a meta tensor says the planned device, so that dtrain and torch's optimizers
choose the kernels and tiles that they would choose there. Whatever is made inside on that device is a meta tensor too,
and none holds NaN. FSDP is to be set up before: a machine that plans has no such device to open streams on. Attention
and the fused norm are computed by what the device's kernels would be, where torch's choice for meta tensors holds
scores [B, H, S, S]; for the backward they keep what those keep: q, k, v, the output and its log-sum-exp [B, H, S].

`MetaKernels` does what meta tensors cannot: a collective leaves its output as it is, and what the host reads of a
tensor is one, or True: a step takes the path of a finite gradient norm. A collective of host tensors is the fake
group's, where every rank holds what this one does. torch's kernels for meta tensors are slow, and a step has few
operations that differ in their shapes. So each is computed by torch once, and its results are remembered: new tensors
by their shapes, or arguments that it gives back.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch.autograd.graph import _engine_run_backward
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from dtrain.base.fused import Fused, uniform_iterations
from dtrain.base.torch_functions import storage_key, without_torch_functions
from dtrain.commands.plan.memory import OpOverload

META = torch.device("meta")

_aten = torch.ops.aten

_HALF = torch.bfloat16, torch.float16

_HOST = torch.device("cpu", 0)  # what real tensors answer, to tell the host from a planned CPU
_DEVICE = Tensor.device.__get__
_IS_CUDA = Tensor.is_cuda.__get__  # type: ignore[attr-defined]  # a property; torch's stub says bool
_ACCESS = type(_DEVICE)

_backward = partial(_engine_run_backward, keep_graph=False, create_graph=False, allow_unreachable=True)


class PlannedDevice(TorchFunctionMode):
    """Function mode in which meta tensors say that they are on `device`, of type cpu or cuda. few: takes the rounds of
    a loop (`base.fused.uniform_iterations`), and returns those that are followed; None: all are.
    fuse: calls a function that is a kernel on a GPU with its arguments."""

    def __init__(
        self,
        device: torch.device,
        few: Callable[[Sequence[Any]], Iterable[Any]] | None = None,
        fuse: Callable[..., Any] | None = None,
    ):
        super().__init__()
        self.device, self._few = device, few
        self._fuse = fuse if device.type == "cuda" else None
        self._nowhere: weakref.ref[Tensor] | None = None  # the last answer to where a meta tensor holds NaN

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if isinstance(func, _ACCESS):  # every other call
            if func == _DEVICE:
                return self._where(args[0])
            return self._where(args[0]).type == "cuda" if func == _IS_CUDA else func(*args)
        kwargs = kwargs or {}
        kwargs.pop("pin_memory", None)  # this machine may have no device to pin for
        if isinstance(func, Fused):
            with self:
                return self._fuse(func.function, *args) if self._fuse is not None else func.function(*args)
        if func is functional.scaled_dot_product_attention:
            return device_attention(self.device.type, *args, **kwargs)
        if func is uniform_iterations:
            return args[0] if self._few is None else self._few(args[0])
        if func is functional.rms_norm:
            return device_rms_norm(*args, **kwargs)
        if func is Tensor.backward:
            # torch takes a mode off while it answers, and this one has to answer all through the backward. Every way
            # in but the engine's own would ask the mode again.
            with self:
                return _backward(args[:1], grad_tensors=(torch.empty_like(args[0]),), inputs=(), accumulate_grad=True)
        if func is torch.autograd.grad and isinstance(gradients := kwargs.get("grad_outputs"), list):
            # A tile's, within a backward; as above.
            with self:
                return _backward(args[0], grad_tensors=tuple(gradients), inputs=args[1], accumulate_grad=False)
        if func is Tensor.pin_memory and args[0].is_meta:
            return args[0]
        if func is Tensor.isnan and args[0].is_meta:
            is_nan = func(*args)
            self._nowhere = weakref.ref(is_nan)
            return is_nan
        if func is Tensor.any and self._nowhere is not None and args[0] is self._nowhere():
            return torch.zeros((), dtype=torch.bool)
        if func is Tensor.cpu and args[0].is_meta:
            return torch.ones(args[0].shape, dtype=args[0].dtype)
        return func(*map(_as_meta, args), **{name: _as_meta(value) for name, value in kwargs.items()})

    def _where(self, tensor: Tensor) -> torch.device:
        return self.device if tensor.is_meta else _HOST


class PlannedStream(torch.cpu.Stream):
    """Stream to select around a step whose FSDP lies on a CPU: one with the numbers of a device's, which FSDP of torch
    2.15 hands to an operation for each tensor that says it is on a GPU."""

    stream_id = device_index = device_type = 0


def _as_meta(value: Any) -> Any:
    """Return meta for an argument that names the planned device, as tensors or the policy say it; for FSDP's "cpu" too.
    The host is the device of a real tensor, or "cpu", or nothing."""
    return META if isinstance(value, torch.device) and value != _HOST else value


def device_attention(
    device_type: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """scaled_dot_product_attention of q [B, H, Q, hd], k and v [B, kv, K, hd] by the kernel that a device would take.

    cpu: torch's CPU kernel, with or without a mask. cuda: flash attention where nothing but causality hides keys and
    the dtype is half; else, or with a mask, the memory-efficient one, which takes no grouped heads. float64 never asks
    for it there (`SdpaKernel`).
    """
    options: dict[str, Any] = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
    if device_type == "cpu":
        return _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=attn_mask, **options)[0]
    if q.dtype in _HALF and attn_mask is None:
        return _aten._scaled_dot_product_flash_attention(q, k, v, **options)[0]
    bias = None if attn_mask is None else attn_mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    options["compute_log_sumexp"] = True
    return _aten._scaled_dot_product_efficient_attention(q, k, v, attn_bias=bias, **options)[0]


def flash_workspace(q: Tensor, k: Tensor, documents: int) -> int:
    """Return the bytes that flash attention's backward holds beside its gradients, for q [T, H, hd] and k [K, kv, hd]:
    that of q in float32, rounded up for each document, and under grouped heads those of k and v for each query head."""
    multiple = 32 if q.shape[2] <= 128 else 64
    size = -(-q.shape[2] // multiple) * multiple
    own = (q.shape[0] + 128 * documents) * q.shape[1] * (size + 1) * 4
    grouped = q.shape[1] != k.shape[1]
    return own + (2 * k.shape[0] * q.shape[1] * q.shape[2] * k.element_size() if grouped else 0)


def device_rms_norm(
    x: Tensor, shape: tuple[int, ...], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """CUDA's fused norm of x [..., D] by weight [D], in x's dtype: keeps x and one number for each row, and writes each
    gradient once."""
    return _FusedRmsNorm.apply(x, weight, eps)


class _FusedRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        ctx.save_for_backward(x, weight, x.new_empty(*x.shape[:-1], 1))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, grad):
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight), None


class Operands:
    """Arguments of an operation. tensors: in their order; key: hashable, decides with the operation on its results."""

    def __init__(self, args: tuple, kwargs: dict[str, Any]):
        self.args, self.kwargs = args, kwargs
        self.tensors: list[Tensor] = []
        self.key = self._key((args, kwargs))

    def _key(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            self.tensors.append(value)
            return value.shape, value.stride(), value.dtype
        if isinstance(value, (list, tuple)):  # noqa: UP038 (a union takes longer, and this is asked very often)
            return tuple([self._key(item) for item in value])
        if isinstance(value, dict):
            return tuple([(name, self._key(item)) for name, item in value.items()])
        return type(value), value  # 1 and 1.0 are equal


class _New(NamedTuple):
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype


class _Argument(NamedTuple):
    place: int


class MetaKernels(TorchDispatchMode):
    """Dispatch mode that computes operations on meta tensors."""

    def __init__(self) -> None:
        super().__init__()
        self._results: dict[tuple, Any] = {}  # by operation and operands; None: torch is to be asked

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: nothing here is compiled, and torch need not guard each operation against it."""
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # it comes again as operations on plain tensors
        with without_torch_functions():  # torch's own kernels for meta tensors ask where these are, too
            if func.is_view:
                self.before_view(args[0])
                return func(*args, **(kwargs or {}))
            return self.computed(func, Operands(args, kwargs or {}))

    def before_view(self, tensor: Tensor) -> None:
        """Take note of `tensor` [..], of which a view is made."""

    def computed(self, func: OpOverload, operands: Operands) -> Any:
        """Return what an operation returns that makes no view."""
        args, tensors = operands.args, operands.tensors
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return torch.ones((), dtype=args[0].dtype).item()
        if func.namespace == "c10d" and any(tensor.is_meta for tensor in tensors):
            work = FakeWork().boxed()  # what an in-place collective returns: its outputs where it has some, and a Work
            return work if len(func._schema.returns) == 1 else (args[0], work)
        if func.namespace not in ("aten", "torch_attn") or not all(tensor.is_meta for tensor in tensors):
            return func(*args, **operands.kwargs)
        key = func, operands.key
        if (results := self._results.get(key)) is not None:
            return _results_anew(results, tensors)
        storages = [storage_key(tensor) for tensor in tensors]
        out = func(*args, **operands.kwargs)
        if key not in self._results:
            is_unchanged = storages == [storage_key(tensor) for tensor in tensors]
            is_unchanged &= Operands(args, operands.kwargs).key == operands.key
            self._results[key] = _results(out, tensors, storages) if is_unchanged else None
        return out


def _results(out: Any, tensors: Sequence[Tensor], storages: Sequence[int]) -> Any:
    """Return the entry from which `_results_anew` makes such results; None if there is none, as for an unannounced view
    of an argument."""
    if isinstance(out, (list, tuple)):  # noqa: UP038
        results = [_results(item, tensors, storages) for item in out]
        return None if None in results else type(out)(results)
    if not isinstance(out, Tensor):
        return None
    for place, tensor in enumerate(tensors):
        if out is tensor:
            return _Argument(place)
    new = _New(out.shape, out.stride(), out.dtype)
    is_new = out.is_meta and out.storage_offset() == 0 and storage_key(out) not in storages
    if is_new and out.untyped_storage().nbytes() == _results_anew(new, ()).untyped_storage().nbytes():
        return new
    return None


def _results_anew(results: Any, tensors: Sequence[Tensor]) -> Any:
    if isinstance(results, _New):
        return torch.empty_strided(results.shape, results.strides, dtype=results.dtype, device=META)
    if isinstance(results, _Argument):
        return tensors[results.place]
    return type(results)(_results_anew(item, tensors) for item in results)
