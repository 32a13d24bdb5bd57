"""Batches under context parallel as contexts, under the names that NeMo Automodel's users know."""

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import get_process_group_ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from dtrain.base.batch import STREAMS
from dtrain.parallel import context as public
from dtrain.parallel.context.batch import mesh_rank, pad_right, shard_sequence
from dtrain.parallel.context.thd import make_cp_batch_for_te

ROTATIONS = (None, "allgather", "alltoall", "addtoall", "ring")


def get_train_context(
    enable_loss_parallel: bool, enable_compiled_autograd: bool, cp_context: Any = None
) -> Callable[[], Any]:
    """A factory of contexts, used as `with train_context():`. The flags enter torch's `loss_parallel()` and compiled
    autograd; `cp_context` is entered last. A `cp_context` can be entered once."""

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if enable_loss_parallel:
                from torch.distributed.tensor.parallel import loss_parallel

                stack.enter_context(loss_parallel())
            if enable_compiled_autograd:
                from torch._dynamo.utils import maybe_enable_compiled_autograd

                stack.enter_context(maybe_enable_compiled_autograd(should_enable=True))
            if cp_context is not None:
                stack.enter_context(cp_context)
            yield

    return context


def create_context_parallel_ctx(
    cp_mesh: DeviceMesh,
    cp_buffers: Sequence[Tensor],
    cp_seq_dims: Sequence[int],
    cp_no_restore_buffers: Collection[Tensor],
    cp_rotate_method: str | None = None,
) -> AbstractContextManager[None]:
    """A context inside which every buffer [..., S, ...] is this cp rank's part [..., S/cp, ...] of itself, in place and
    head-tail along its dimension of `cp_seq_dims`; on exit all but `cp_no_restore_buffers` are whole again, exceptions
    included. No collective.

    It can be entered once. A buffer's tensor object changes its storage, so views made before keep the whole.
    cp_rotate_method: how keys travel, None | allgather | alltoall (ring and NeMo-RL's addtoall are other names of it);
    the model's kernel decides that when it is built, the name is checked here.

    A model that is called inside must attend with a `ContextKernel` over the same ranks; any other attends to this
    rank's part alone. The kernel is known as an attribute of the called module or of one in it, which dtrain's models
    have. A context in which this thread calls no module (one that only reads its buffers) is left alone, and so is a
    mesh of one rank. An exception from inside is passed on as it is.

    Raises ValueError for another name, a buffer without a dimension, a length that 2·cp does not divide, and a buffer
    with a gradient, which a change in place would lose. Raises RuntimeError on exit, with the buffers whole again,
    where modules were called and none of them has such a kernel.
    """
    if cp_rotate_method not in ROTATIONS:
        raise ValueError(f"cp_rotate_method={cp_rotate_method!r}: there are {', '.join(map(repr, ROTATIONS))}")
    if len(cp_buffers) != len(cp_seq_dims):
        raise ValueError(f"{len(cp_buffers)} buffers and {len(cp_seq_dims)} sequence dimensions: give one per buffer")
    for index, buffer in enumerate(cp_buffers):
        if buffer.requires_grad:
            raise ValueError(f"buffer {index} requires grad: cut it with shard_tokens, which keeps its gradient")
    size, rank = cp_mesh.size(), mesh_rank(cp_mesh)
    wholes = [buffer.detach() for buffer in cp_buffers]
    parts = [shard_sequence(whole, rank, size, dim) for whole, dim in zip(wholes, cp_seq_dims, strict=True)]
    kept = {id(buffer) for buffer in cp_no_restore_buffers}
    return _exchanged([*zip(cp_buffers, parts, wholes, strict=True)], kept, cp_mesh)


@contextlib.contextmanager
def _exchanged(buffers: list[tuple[Tensor, Tensor, Tensor]], kept: set[int], cp_mesh: DeviceMesh) -> Iterator[None]:
    """Each (buffer, part, whole) holds its part inside, and its whole again after, unless its id is in `kept`. cp_mesh:
    of the ranks that the kernel of a model inside exchanges keys with."""
    with torch.no_grad():
        for buffer, part, _ in buffers:
            buffer.set_(part)  # type: ignore[call-overload]  # torch's stubs know storages alone
    watch = _KernelWatch(cp_mesh)
    try:
        if cp_mesh.size() > 1:
            watch.start()
        yield
    finally:
        watch.stop()
        with torch.no_grad():
            for buffer, _, whole in buffers:
                if id(buffer) not in kept:
                    buffer.set_(whole)  # type: ignore[call-overload]
    watch.check()


class _KernelWatch:
    """Hook before every module's forward: it remembers the first module that this thread calls, and is gone once one
    with a context-parallel kernel over the ranks of `cp_mesh` is called, before any compiled layer of it."""

    def __init__(self, cp_mesh: DeviceMesh):
        self.cp_mesh = cp_mesh
        self.model: nn.Module | None = None
        self.is_called = self.has_kernel = False
        self._handle: RemovableHandle | None = None

    def start(self) -> None:
        self._thread = threading.get_ident()
        self._handle = register_module_forward_pre_hook(self)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.remove()

    def __call__(self, module: nn.Module, _: Any) -> None:
        if not torch.compiler.is_compiling() and threading.get_ident() != self._thread:
            return
        if not self.is_called:
            self.is_called, self.model = True, module
        # A whole model compiled in place traces this; the rest would end the graph, and `check` looks at the model too.
        if not torch.compiler.is_compiling() and self._holds_kernel(module):
            self.has_kernel = True
            self.stop()

    def check(self) -> None:
        if self.model is not None and not self.has_kernel and not self._holds_kernel(self.model):
            raise RuntimeError(
                f"{type(self.model).__name__} ran inside a context-parallel context, and none of dtrain's "
                f"context-parallel kernels over these {self.cp_mesh.size()} ranks: each rank attended to its own part "
                "of the rows alone, so what it computed is wrong. Use a model of dtrain's with such a kernel (Policy "
                "builds one; or model.use_kernel(GatherKernel(SdpaKernel(), cp_mesh))), or call this one on whole "
                "rows"
            )

    def _holds_kernel(self, model: nn.Module) -> bool:
        values = (value for module in model.modules() for value in vars(module).values())
        return any(_exchanges_keys(value) and self._is_over_these_ranks(value) for value in values)

    def _is_over_these_ranks(self, kernel: Any) -> bool:
        """Return whether `kernel` exchanges keys with the ranks of the mesh; another mesh of them has its own group."""
        group = self.cp_mesh.get_group()
        is_as_large = kernel.group.size() == group.size()
        return is_as_large and get_process_group_ranks(kernel.group) == get_process_group_ranks(group)


def _exchanges_keys(value: Any) -> bool:
    """Return whether `value` is a kernel over the keys of all cp ranks (`attention.context.ContextKernel`)."""
    return bool(getattr(value, "is_context_parallel", False))


def make_cp_batch_and_ctx(
    device_mesh: DeviceMesh | None,
    batch: dict[str, Any],
    loss_mask: Tensor | None = None,
    use_te: bool = False,
    padding_token_id: int = 0,
    num_chunks: int = 1,
    seq_lens_padding_value: int = -1000,
    extra_seq_buffers: Mapping[str, int] | None = None,
    labels: Tensor | None = None,
) -> tuple[Callable[[], Any], dict[str, Any]]:
    """`(ctx, batch)`, used as `with ctx():` once, inside which the batch holds this cp rank's part. No collective.

    Without context parallel: `contextlib.nullcontext` and the batch, untouched. With it the same dict: `attention_mask`
    dropped, `position_ids` made where missing, every stream padded on the right to a multiple of 2·cp and cut on entry;
    `position_ids` alone are whole again on exit. The streams are input_ids (or inputs_embeds [B, S, H]) padded with
    `padding_token_id` (embeddings with 0), labels and loss_mask, which join the batch where they are given here, every
    other tensor [B, S, ...] (with its pad value in `batch.STREAMS`, else 0), and those of `extra_seq_buffers`, name ->
    the dimension that is cut. Anything else stays as it is. A tensor that needs no padding is cut itself, the caller's
    own; one that requires grad is cut at once, as a new tensor with its gradient. Raises KeyError where ids or labels
    or a name of extra_seq_buffers are missing, ValueError for a stream that is not as long as the ids.

    use_te: `(nullcontext, make_cp_batch_for_te(...))`; extra_seq_buffers are then a ValueError.
    """
    names = getattr(device_mesh, "mesh_dim_names", None) or ()
    cp_mesh = device_mesh["cp"] if device_mesh is not None and "cp" in names else None
    if use_te:
        if extra_seq_buffers:
            raise ValueError("extra_seq_buffers: the flat form of use_te cuts every stream by its shape")
        return contextlib.nullcontext, make_cp_batch_for_te(  # type: ignore[return-value]  # a dict: no indices asked
            cp_mesh,
            batch,
            padding_token_id=padding_token_id,
            num_chunks=num_chunks,
            seq_lens_padding_value=seq_lens_padding_value,
        )
    if cp_mesh is None or cp_mesh.size() <= 1:
        return contextlib.nullcontext, batch
    batch |= {name: value for name, value in (("labels", labels), ("loss_mask", loss_mask)) if value is not None}
    tokens = "inputs_embeds" if "inputs_embeds" in batch and "input_ids" not in batch else "input_ids"
    for name in (tokens, "labels", *(extra_seq_buffers or ())):
        if name not in batch:
            raise KeyError(f"{name} is missing: context parallel cuts it")
    batch.pop("attention_mask", None)
    shape = batch[tokens].shape[:2]
    _build_position_ids(batch, batch[tokens].device)
    dims = {tokens: 1, "labels": 1, "position_ids": batch["position_ids"].dim() - 1}  # which may be [3, B, S]
    dims |= {"loss_mask": 1} if loss_mask is not None else {}
    others = (name for name, value in batch.items() if isinstance(value, Tensor) and value.shape[:2] == shape)
    dims |= {name: 1 for name in others if name not in dims} | dict(extra_seq_buffers or {})
    for name, dim in dims.items():
        if batch[name].shape[dim] != shape[1]:
            raise ValueError(f"{name} {list(batch[name].shape)} is not as long as {tokens} {list(batch[tokens].shape)}")
    for name, dim in dims.items():
        pad = STREAMS[name].pad if name in STREAMS else 0
        if name == tokens:
            pad = 0 if batch[name].is_floating_point() else padding_token_id
        batch[name] = pad_right(batch[name], 2 * cp_mesh.size(), pad, dim)
        if batch[name].requires_grad:
            batch[name] = shard_sequence(batch[name], mesh_rank(cp_mesh), cp_mesh.size(), dim)
    dims = {name: dim for name, dim in dims.items() if not batch[name].requires_grad}
    cp_context = public.create_context_parallel_ctx(
        cp_mesh=cp_mesh,
        cp_buffers=[batch[name] for name in dims],
        cp_seq_dims=[*dims.values()],
        cp_no_restore_buffers={batch[name] for name in dims if name != "position_ids"},
    )
    return public.get_train_context(False, False, cp_context), batch


def _build_position_ids(batch: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """The batch, with `position_ids` [1, S] counting from 0 where it had none."""
    if "position_ids" not in batch:
        ids = batch["input_ids" if "input_ids" in batch else "inputs_embeds"]
        batch["position_ids"] = torch.arange(ids.shape[1], device=device)[None]
    return batch
