"""Tensors without memory that stand for those of the planned device, and operations on them.

The tensors are torch's meta tensors. They have shapes, dtypes and autograd, but no data. Two modes let a training step
run on them as it would run on the device: `PlannedDevice`, and `MetaKernels` below it.

`PlannedDevice` is a function mode. For example, on a machine without GPU:

    with PlannedDevice(torch.device("cuda", 0)):
        x = torch.empty(4, device="cuda")     # a meta tensor
        x.device                              # device(type='cuda', index=0)

So dtrain and torch's optimizers choose the kernels and tiles that they would choose on the device. Meta tensors never
contain NaN. FSDP must be set up before, because it would open streams on the device. Attention and the fused norm are
replaced by the device's kernels: torch's choice for meta tensors would allocate scores [B, H, S, S], while the kernels
keep q, k, v, the output and its log-sum-exp [B, H, S] for the backward.

`MetaKernels` is a dispatch mode for operations that meta tensors do not support. A collective does not change its
output. A value that the host reads from a tensor is 1 or True, so that a step takes the path of a finite gradient norm.
Collectives of host tensors run on the fake process group, in which every rank has the same tensors as this one. torch's
kernels for meta tensors are slow, and a step repeats few different operations and shapes. Each of them is computed by
torch once, and the shapes of its results are cached.
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

_HOST = torch.device("cpu", 0)  # device of real tensors in the mode; differs from a planned CPU, which has no index
_DEVICE = Tensor.device.__get__
_IS_CUDA = Tensor.is_cuda.__get__  # type: ignore[attr-defined]  # a property; torch's stub says bool
_PROPERTY_ACCESS = type(_DEVICE)

_backward = partial(_engine_run_backward, keep_graph=False, create_graph=False, allow_unreachable=True)


class PlannedDevice(TorchFunctionMode):
    """Function mode in which meta tensors report that they are on `device`.

    Args:
        device: The planned device, of type cpu or cuda.
        few: Function of the rounds of a loop (`base.fused.uniform_iterations`) that returns those to run. None: all.
        fuse: Calls a fused function, which is one kernel on a GPU, with its arguments. Used for cuda.
    """

    def __init__(
        self,
        device: torch.device,
        few: Callable[[Sequence[Any]], Iterable[Any]] | None = None,
        fuse: Callable[..., Any] | None = None,
    ):
        super().__init__()
        self.device, self._few = device, few
        self._fuse = fuse if device.type == "cuda" else None
        self._last_isnan: weakref.ref[Tensor] | None = None  # the last result of `isnan` of a meta tensor

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if isinstance(func, _PROPERTY_ACCESS):  # first, because about half of all calls are
            if func == _DEVICE:
                return self._device_of(args[0])
            return self._device_of(args[0]).type == "cuda" if func == _IS_CUDA else func(*args)
        kwargs = kwargs or {}
        kwargs.pop("pin_memory", None)  # this machine may have no device to pin memory for
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
            # torch disables a mode while it handles a call, but this one must be active in the whole backward. All
            # entries to the backward except the engine's own would call the mode again.
            with self:
                return _backward(args[:1], grad_tensors=(torch.empty_like(args[0]),), inputs=(), accumulate_grad=True)
        if func is torch.autograd.grad and isinstance(gradients := kwargs.get("grad_outputs"), list):
            # The backward of a tile inside a backward. As above.
            with self:
                return _backward(args[0], grad_tensors=tuple(gradients), inputs=args[1], accumulate_grad=False)
        if func is Tensor.pin_memory and args[0].is_meta:
            return args[0]
        if func is Tensor.isnan and args[0].is_meta:
            is_nan = func(*args)
            self._last_isnan = weakref.ref(is_nan)
            return is_nan
        if func is Tensor.any and self._last_isnan is not None and args[0] is self._last_isnan():
            return torch.zeros((), dtype=torch.bool)
        if func is Tensor.cpu and args[0].is_meta:
            return torch.ones(args[0].shape, dtype=args[0].dtype)
        return func(*map(_as_meta, args), **{name: _as_meta(value) for name, value in kwargs.items()})

    def _device_of(self, tensor: Tensor) -> torch.device:
        return self.device if tensor.is_meta else _HOST


class PlannedStream(torch.cpu.Stream):
    """Stream to select around a step whose FSDP is on a CPU.

    It has the ids of a device's stream. FSDP of torch 2.15 passes them to an operation for each tensor that reports to
    be on a GPU.
    """

    stream_id = device_index = device_type = 0


def _as_meta(value: Any) -> Any:
    """Replace a `torch.device` argument by meta, so that the tensor is created without memory.

    The code of a step passes the planned device, or a plain `torch.device("cpu")` in FSDP, for tensors that should be
    on the planned device. It requests a real tensor on the host by `_HOST` (which the `device` of a real tensor
    returns), by the text "cpu", or by no device at all. These arguments are not changed.
    """
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
    """Compute scaled_dot_product_attention with the kernel that the device would use.

    On CPUs this is torch's CPU kernel. On CUDA it is flash attention for half-precision dtypes without a mask, and
    otherwise the memory-efficient kernel, which has no grouped heads. float64 is not passed to it there (`SdpaKernel`).

    Args:
        device_type: "cpu" or "cuda".
        q: Queries, [B, H, Q, hd].
        k: Keys, [B, kv, K, hd].
        v: Values, [B, kv, K, hd].
        attn_mask: Mask, broadcastable to [B, H, Q, K].
        dropout_p: As of torch, like the arguments below.
        is_causal: As of torch.
        scale: As of torch.
        enable_gqa: As of torch.

    Returns:
        The output, [B, H, Q, hd].
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
    """Return the bytes that the backward of flash attention allocates in addition to its gradients.

    These are the gradient of q in float32, rounded up for each document, and with grouped heads the gradients of k and
    v for each query head.

    Args:
        q: Queries, [T, H, hd].
        k: Keys, [K, kv, hd].
        documents: Number of documents.
    """
    num_tokens, num_heads, head_dim = q.shape
    multiple = 32 if head_dim <= 128 else 64
    padded_head_dim = -(-head_dim // multiple) * multiple
    q_bytes = (num_tokens + 128 * documents) * num_heads * (padded_head_dim + 1) * 4
    if num_heads == k.shape[1]:
        return q_bytes
    return q_bytes + 2 * k.shape[0] * num_heads * head_dim * k.element_size()


def device_rms_norm(
    x: Tensor, shape: tuple[int, ...], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Compute CUDA's fused RMSNorm, which keeps x and one number per row, and writes each gradient once.

    Args:
        x: Input, [..., D].
        shape: (D,).
        weight: Weight, [D].
        eps: As of torch.
    """
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
    """The arguments of an operation.

    Attributes:
        args: Positional arguments.
        kwargs: Keyword arguments.
        tensors: Tensors among them, in their order.
        key: Hashable value that, with the operation, determines the shapes of its results.
    """

    def __init__(self, args: tuple, kwargs: dict[str, Any]):
        self.args, self.kwargs = args, kwargs
        self.tensors: list[Tensor] = []
        self.key = self._key((args, kwargs))

    def _key(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            self.tensors.append(value)
            return value.shape, value.stride(), value.dtype
        if isinstance(value, (list, tuple)):  # noqa: UP038 (a union is slower, and this runs for every operation)
            return tuple([self._key(item) for item in value])
        if isinstance(value, dict):
            return tuple([(name, self._key(item)) for name, item in value.items()])
        return type(value), value  # with the type, because 1 == 1.0


class _New(NamedTuple):
    """A result that is a new tensor."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype


class _Argument(NamedTuple):
    """A result that is one of the operation's tensors."""

    position: int


class MetaKernels(TorchDispatchMode):
    """Dispatch mode that computes operations on meta tensors."""

    def __init__(self) -> None:
        super().__init__()
        # Results by operation and operands. None if torch has to compute the operation each time.
        self._results: dict[tuple, Any] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing is compiled here, and torch need not guard each operation against it."""
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # the operation is dispatched again on plain tensors
        with without_torch_functions():  # torch's kernels for meta tensors also ask for devices
            if func.is_view:
                self.before_view(args[0])
                return func(*args, **(kwargs or {}))
            return self.computed(func, Operands(args, kwargs or {}))

    def before_view(self, tensor: Tensor) -> None:
        """Handle a view of `tensor`, [...], before torch makes it. Does nothing here; `Tracer` overrides it."""

    def computed(self, func: OpOverload, operands: Operands) -> Any:
        """Compute an operation that is not a view."""
        args, tensors = operands.args, operands.tensors
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return torch.ones((), dtype=args[0].dtype).item()
        if func.namespace == "c10d" and any(tensor.is_meta for tensor in tensors):
            # An in-place collective returns its outputs, if it has some, and a Work.
            work = FakeWork().boxed()
            return work if len(func._schema.returns) == 1 else (args[0], work)
        if func.namespace not in ("aten", "torch_attn") or not all(tensor.is_meta for tensor in tensors):
            return func(*args, **operands.kwargs)
        key = func, operands.key
        results = self._results.get(key)
        if results is not None:
            return _make_results(results, tensors)
        storages = [storage_key(tensor) for tensor in tensors]
        out = func(*args, **operands.kwargs)
        if key not in self._results:
            # An operation may resize its arguments or give them another storage. Such results cannot be remembered.
            has_same_storages = storages == [storage_key(tensor) for tensor in tensors]
            has_same_shapes = Operands(args, operands.kwargs).key == operands.key
            is_unchanged = has_same_storages and has_same_shapes
            self._results[key] = _describe_results(out, tensors, storages) if is_unchanged else None
        return out


def _describe_results(out: Any, tensors: Sequence[Tensor], storages: Sequence[int]) -> Any:
    """Return a description from which `_make_results` can make equal results.

    Returns:
        The description. None if the results cannot be described, for example if the operation returns a view of an
        argument without being marked as a view.
    """
    if isinstance(out, (list, tuple)):  # noqa: UP038
        results = [_describe_results(item, tensors, storages) for item in out]
        return None if None in results else type(out)(results)
    if not isinstance(out, Tensor):
        return None
    for index, tensor in enumerate(tensors):
        if out is tensor:
            return _Argument(index)
    new = _New(out.shape, out.stride(), out.dtype)
    is_new = out.is_meta and out.storage_offset() == 0 and storage_key(out) not in storages
    if is_new and out.untyped_storage().nbytes() == _make_results(new, ()).untyped_storage().nbytes():
        return new
    return None


def _make_results(results: Any, tensors: Sequence[Tensor]) -> Any:
    """Make the results of an operation on `tensors` from their description."""
    if isinstance(results, _New):
        return torch.empty_strided(results.shape, results.strides, dtype=results.dtype, device=META)
    if isinstance(results, _Argument):
        return tensors[results.position]
    return type(results)(_make_results(item, tensors) for item in results)
