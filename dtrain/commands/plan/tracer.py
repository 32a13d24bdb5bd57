"""Counts the memory, messages and arithmetic of every operation of a traced step.

The bytes of a collective are those of the whole message: the output of an all-gather, the input of a reduce-scatter or
an all-to-all, the tensor of an all-reduce, the tensor that is sent to the next rank of a ring.

`PlanObserver` tells the tracer which part of the step the next operations belong to. A pass is one micro-batch through
the model. Forwards without a backward, for example those of a reference model, are passes too.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.attention.varlen
from torch import Tensor, nn
from torch.distributed.distributed_c10d import GroupName
from torch.utils.flop_counter import flop_registry, mm_flop, sdpa_backward_flop, sdpa_flop

from dtrain.attention.kernels import Kernel
from dtrain.base.batch import Batch
from dtrain.base.fused import tensors_in
from dtrain.base.torch_functions import storage_key
from dtrain.commands.plan.compiled import CompiledRegions
from dtrain.commands.plan.memory import NOT_COUNTED, MemoryTimeline, OpOverload, Phase
from dtrain.commands.plan.planned_device import MetaKernels, Operands, flash_workspace
from dtrain.memory.activation_offload import HostMemory
from dtrain.parallel.collectives import wait
from dtrain.parallel.mesh import Mesh
from dtrain.parallel.placement import bytes_of, local_tensor
from dtrain.policy import Policy, StepObserver

_COLLECTIVE_KINDS = {
    "_allgather_base_": "all-gather",
    "allgather_": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "allreduce_": "all-reduce",
    "all_reduce": "all-reduce",
    "alltoall_base_": "all-to-all",
    "all_to_all_single": "all-to-all",
}
_NO_MESSAGE = {"recv_", "wait_tensor", "_wrap_tensor_autograd"}

_aten = torch.ops.aten
_FLOPS = {
    **flop_registry,
    _aten._grouped_mm: lambda rows, matrices, *_, **__: 2 * rows.numel() * matrices.shape[-1],
    _aten._scaled_dot_product_flash_attention_for_cpu: sdpa_flop,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: sdpa_backward_flop,
}


def _varlen_operands(args: tuple) -> tuple[Tensor, Tensor, int]:
    """Return q and k, each [tokens, heads, hd], and the number of documents, for packed rows."""
    q, k, document_ends = args[1], args[2], args[6]
    return q, k, len(document_ends) - 1


def _flash_operands(args: tuple) -> tuple[Tensor, Tensor, int]:
    """Return q and k, each [tokens, heads, hd], and the number of rows, for a batch [B, heads, S, hd]."""
    q, k = args[1], args[2]
    return q.transpose(1, 2).flatten(0, 1), k.transpose(1, 2).flatten(0, 1), len(q)


# Backward kernels of flash attention.
_FLASH_BACKWARD = {
    torch.ops.torch_attn._varlen_attn_backward: _varlen_operands,
    _aten._scaled_dot_product_flash_attention_backward: _flash_operands,
}
# Prefixes of the names of operations that compute nothing.
_NO_COMPUTE = (
    "aten::empty",
    "aten::detach",
    "aten::_local_scalar",
    "aten::lift",
    "fsdp::record_grad_output_stream",
)


class Collective(NamedTuple):
    """A kind of collective.

    Attributes:
        dimension: Dimension of the mesh. "all" for numbers that all ranks share.
        kind: Kind, such as "all-gather".
        ranks: Number of ranks of its group.
        on_host: Whether it sends tensors of the host.
    """

    dimension: str
    kind: str
    ranks: int
    on_host: bool


class Cost(NamedTuple):
    """Key of a count in `Tracer.counts`.

    Attributes:
        pass_index: The pass through the model. None outside a pass.
        kind: One of
            "flops": FLOPs of matrix products and attention, including masked pairs, by `dtype`,
            "moved": bytes that other operations read and write,
            "kernels": number of operations that are not views,
            "messages", "bytes": number and bytes of the messages of `collective`,
            "overlapped": FLOPs, by `dtype`, between the start of a `collective` of cp and the wait for it, which can
                hide the collective.
        collective: The kind of collective. None for counts that are not about one.
        dtype: Dtype of the operands. None for counts that are not FLOPs.
    """

    pass_index: int | None
    kind: str
    collective: Collective | None = None
    dtype: torch.dtype | None = None


class CollectiveReader:
    """Finds the collectives among the operations that torch dispatches, and their dimensions of the mesh.

    Several dimensions of a mesh may have the same ranks, and so the same process group. The operation then identifies
    the dimension: collectives of FSDP write into a given tensor, and those of cp return a new tensor. A tp group of
    several ranks never has the same ranks as another group.

    Args:
        mesh: The mesh.
    """

    def __init__(self, mesh: Mesh):
        self._tp = mesh.tp.get_group().group_name if mesh.tp.size() > 1 else None
        self._ep = mesh.ep.get_group().group_name if mesh.ep is not None else None
        self._replicate = mesh.fsdp["dp_replicate"].get_group().group_name if mesh.fsdp.ndim == 2 else None

    def read(self, func: OpOverload, args: tuple, out: Any, in_pass: bool) -> tuple[Collective, int] | None:
        """Return the collective of an operation and its bytes. None if the operation is not a collective.

        Args:
            func: The operation.
            args: Its arguments.
            out: Its result.
            in_pass: Whether the operation is inside a pass through the model.
        """
        if func.namespace not in ("c10d", "_c10d_functional"):
            return None
        name = _operation_name(func).split("::")[1]
        if name in _NO_MESSAGE:
            return None
        kind = _COLLECTIVE_KINDS.get(name, name)
        tensors = tensors_in(args)
        if name == "all_gather_into_tensor":
            tensors = [out]
        elif kind == "all-gather":  # the arguments are the output, then the input
            tensors = tensors[:-1]
        elif name in ("_reduce_scatter_base_", "alltoall_base_"):
            tensors = tensors[1:]
        size = sum(tensor.nbytes for tensor in tensors)
        group = _group_of(args)
        is_in_place = func.namespace == "c10d"
        dimension = self._dimension(group.group_name, is_in_place, kind, in_pass)
        on_host = not any(tensor.is_meta for tensor in tensors)
        return Collective(dimension, kind, group.size(), on_host), size

    def _dimension(self, group: str, is_in_place: bool, kind: str, in_pass: bool) -> str:
        """Return the dimension of the mesh over which a collective runs. "all" if it is outside the model.

        Args:
            group: Name of the process group.
            is_in_place: Whether the collective writes into a given tensor. Functional ones return a new tensor.
            kind: Kind of collective.
            in_pass: Whether it is inside a pass through the model.
        """
        if group == self._tp:
            return "tp"
        if group == self._ep and kind == "all-to-all":
            return "ep"
        if not is_in_place or kind == "send":
            return "cp"
        if in_pass and kind in ("all-gather", "reduce-scatter"):
            return "fsdp"
        if in_pass and kind == "all-reduce" and group == self._replicate:
            return "dp_replicate"
        return "all"


def _operation_name(func: OpOverload) -> str:
    """Return the name of an operation without its overload, as "aten::add"."""
    return func.name().split(".")[0]


def _group_of(args: tuple) -> dist.ProcessGroup:
    """Return the process group of a collective: an object among its arguments, or a name, which is the last text."""
    for argument in args:
        if isinstance(argument, torch.ScriptObject):
            with suppress(RuntimeError):  # the other object of the operation says how it reduces
                return dist.ProcessGroup.unbox(argument)
    name = next(argument for argument in reversed(args) if isinstance(argument, str))
    return dist.distributed_c10d._resolve_process_group(GroupName(name))


class Tracer(MetaKernels):
    """Dispatch mode that counts the cost of each operation.

    Args:
        mesh: The mesh.
        on_host: Whether the planned device is a CPU, whose gloo works on a copy of what it reduces and scatters.

    Attributes:
        memory: Memory of the device.
        host: Memory of real tensors, which are the host's.
        current: The pass that is running. None outside a pass.
        is_forward: Whether it is in its forward.
        counts_costs: Whether the costs of operations are counted.
        regions: Compiled regions, if layers are compiled.
        counts: The costs.
    """

    def __init__(self, mesh: Mesh, on_host: bool):
        super().__init__()
        self.on_host = on_host
        self.memory = MemoryTimeline("temporaries")
        self.host = MemoryTimeline("rows")
        self.counts: Counter[Cost] = Counter()
        self.current: int | None = None
        self.is_forward = False
        self.counts_costs = True
        self.regions: CompiledRegions | None = None
        self._workspaces: dict[tuple, int] = {}  # bytes that fused functions use while they run
        self._flops: dict[tuple, int] = {}  # by operation and operands, because torch's formulas are slow
        self._collectives = CollectiveReader(mesh)
        # Collectives of cp that have not been waited for, by their output. Their inputs are kept alive.
        self._running: dict[int, tuple[Collective, list[Tensor]]] = {}

    def see_all(self, tensors: Iterable[Tensor], part: str) -> None:
        """Count this rank's shards of `tensors`, each [...], as `part` of the device's memory."""
        for tensor in tensors:
            self.memory.see(local_tensor(tensor).detach(), part)

    def before_view(self, tensor: Tensor) -> None:
        """Override `MetaKernels.before_view`: a view costs nothing but the memory of `tensor`."""
        timeline = self.memory if tensor.is_meta else self.host
        timeline.see(tensor)

    def computed(self, func: OpOverload, operands: Operands) -> Any:
        """Override `MetaKernels.computed`: compute the operation and count its cost."""
        args, memory = operands.args, self.memory
        memory.poll()
        if self.on_host and func is torch.ops.c10d._reduce_scatter_base_.default and args[0].shape != args[1].shape:
            memory.add_workspace(args[1].untyped_storage().nbytes())
        out = super().computed(func, operands)
        results = tensors_in(out)
        all_tensors = [*operands.tensors, *results]
        device_tensors = [tensor for tensor in all_tensors if tensor.is_meta]
        memory.after(func, device_tensors)
        flash_operands = _FLASH_BACKWARD.get(func.overloadpacket)
        if flash_operands is not None:
            q, k, num_documents = flash_operands(args)
            memory.add_workspace(flash_workspace(q, k, num_documents))
        if len(device_tensors) < len(all_tensors):
            for tensor in all_tensors:
                if not tensor.is_meta:
                    self.host.see(tensor)
        if self.regions is not None and self.regions.sources is not None:
            self.regions.sources.after(func, operands.tensors, results)
        message = self._collectives.read(func, args, out, self.current is not None)
        if message is not None and message[0].on_host and message[0].dimension == "fsdp":
            # FSDP sends no tensors of the host. These are sizes of images, which the dp ranks exchange as objects.
            message = None
        if message is not None:
            collective, size = message
            self.counts[Cost(self.current, "messages", collective)] += 1
            self.counts[Cost(self.current, "bytes", collective)] += size
            if collective.dimension == "cp" and func.namespace == "_c10d_functional":
                self._running[storage_key(out)] = collective, tensors_in(args)
        elif func is wait.default:
            self._running.pop(storage_key(args[0]), None)
        elif device_tensors and self.counts_costs:
            self._count_cost(func, operands, out, device_tensors)
        return out

    def as_one_kernel(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function that is one kernel on a GPU: it reads its arguments and writes its results once.

        A function that only writes into its arguments is called once for arguments of the same shapes.
        """
        counts_costs, self.counts_costs = self.counts_costs, False
        key = (function, torch.is_grad_enabled(), Operands(arguments, {}).key)
        out = None
        self.memory.poll()
        if key in self._workspaces:
            self.memory.add_workspace(self._workspaces[key])
        else:
            mark = self.memory.mark()
            out = function(*arguments)
            if out is None and not torch.is_grad_enabled():
                self._workspaces[key] = self.memory.peak_since(mark)
        self.counts_costs = counts_costs
        if counts_costs:
            sizes = {id(tensor): tensor.nbytes for tensor in tensors_in((*arguments, out)) if tensor.is_meta}
            self.counts[Cost(self.current, "kernels")] += 1
            self.counts[Cost(self.current, "moved")] += sum(sizes.values())
        return out

    def compile_part(self, part: Callable[..., Any], is_selective: bool = False) -> Callable[..., Any]:
        """Return a part of a layer as a compiled region.

        The part runs uncompiled, and the costs that it would have after compilation are counted.

        Args:
            part: Function of tensors.
            is_selective: Whether selective checkpointing is inside.
        """
        if self.regions is None:
            self.regions = CompiledRegions()
        return self.regions.region(part, is_selective)

    def few(self, rounds: Sequence[Any]) -> Iterator[Any]:
        """Yield only three rounds of a loop whose rounds are alike: the first two and the last.

        The costs of the second round are counted for those that are left out too. Their memory is that of the second.
        """
        for number, item in enumerate(rounds):
            is_last = number == len(rounds) - 1
            if number >= 2 and not is_last:
                continue
            before = self.counts.copy()
            yield item
            if number == 1:
                num_left_out = max(0, len(rounds) - 3)
                for cost, value in self.counts.items():
                    self.counts[cost] = value + num_left_out * (value - before[cost])

    def _count_cost(self, func: OpOverload, operands: Operands, out: Any, tensors: list) -> None:
        """Count the kernel, FLOPs and moved bytes of an operation. `tensors` are its operands and results."""
        args, kwargs = operands.args, operands.kwargs
        formula = _FLOPS.get(func.overloadpacket)
        self.counts[Cost(self.current, "kernels")] += 1
        if func.overloadpacket in (_aten.addmm, _aten.addmm_):
            # The first argument is added to the product, and may have another dtype.
            formula, args, kwargs = mm_flop, args[1:3], {}
        if formula is not None:
            self._count_flops(func, operands, formula, args, kwargs, out)
        moves = _moves(func)
        is_outside = True
        if self.regions is not None and (formula is not None or moves):
            is_overwritten = func.overloadpacket is _aten.copy_  # its first operand is written and not read
            read = (args[1:] if is_overwritten else args, () if "out" in kwargs else kwargs)
            inputs = [self.memory.see(tensor) for tensor in tensors_in(read) if tensor.is_meta]
            outputs = [self.memory.see(tensor) for tensor in tensors_in(out) if tensor.is_meta]
            moved, is_outside = self.regions.moved(inputs, outputs, formula is not None)
            self.counts[Cost(self.current, "moved")] += moved
        if is_outside and formula is None and moves:
            distinct = {id(tensor): tensor for tensor in tensors}
            self.counts[Cost(self.current, "moved")] += sum(tensor.nbytes for tensor in distinct.values())

    def _count_flops(
        self, func: OpOverload, operands: Operands, formula: Callable, args: tuple, kwargs: dict, out: Any
    ) -> None:
        dtype = next(argument.dtype for argument in args if isinstance(argument, Tensor))
        key = func, operands.key
        flops = self._flops.get(key)
        # With operands that have values, such as the ends of documents, the FLOPs depend on the values.
        if flops is None or not all(tensor.is_meta for tensor in operands.tensors):
            flops = self._flops[key] = formula(*args, **kwargs, out_val=out)
        self.counts[Cost(self.current, "flops", dtype=dtype)] += flops
        for collective, _ in self._running.values():
            self.counts[Cost(self.current, "overlapped", collective, dtype)] += flops


@cache
def _moves(func: OpOverload) -> bool:
    """Return whether an operation computes something from the tensors that it reads."""
    return func.namespace in ("aten", "fsdp") and not _operation_name(func).startswith(_NO_COMPUTE)


class PlanObserver(StepObserver):
    """Observer of one planned step.

    Args:
        tracer: The tracer of the step's operations.
        kernel: The model's attention kernel. It receives the rows of each micro-batch before the forward.

    Attributes:
        passes: Number of passes so far.
        host_bytes: Bytes of the host's tensors at the last pass.
        micro_batch_bytes: Bytes of that pass's own rows.
        gradient_bytes: Bytes of this rank's gradients, once they are complete.
    """

    def __init__(self, tracer: Tracer, kernel: Kernel):
        self._tracer, self._kernel = tracer, kernel
        self.passes = 0
        self.host_bytes = self.micro_batch_bytes = self.gradient_bytes = 0

    def forward_begins(self, batch: Batch) -> None:
        tracer, memory = self._tracer, self._tracer.memory
        self._kernel.take_rows(batch)
        self.host_bytes = tracer.host.total()
        self.micro_batch_bytes = bytes_of(batch.values())
        # New storages are "temporaries" until an event shows what they are. Those that are left from the pass before
        # are the gradients of its backward.
        memory.rename("temporaries", "gradients")
        tracer.current = self.passes
        tracer.is_forward = True
        self.passes += 1
        memory.begin(Phase("begin", tracer.current))

    def head_begins(self) -> None:
        memory = self._tracer.memory
        memory.rename("temporaries", "activations")  # what the layers have left is kept for the backward
        memory.begin(Phase("head", self._tracer.current))

    def head_ends(self) -> None:
        self._tracer.memory.rename("temporaries", "loss")

    def forward_ends(self) -> None:
        self._tracer.is_forward = False
        self._tracer.memory.begin(Phase("backward", self._tracer.current))

    def gradients_complete(self, model: nn.Module) -> None:
        tracer, memory = self._tracer, self._tracer.memory
        self.gradient_bytes = bytes_of(parameter.grad for parameter in model.parameters())
        memory.rename("temporaries", "gradients")
        tracer.current = None
        memory.begin(Phase("update"))

    def watch_layers(self, layers: Iterable[nn.Module]) -> None:
        """Begin a phase at each layer's forward, before each layer's backward, and where a layer is recomputed.

        Activation checkpointing recomputes a layer by calling it once more, within the backward of the micro-batch. So
        its forward hooks run again, and `Tracer.is_forward` is False then.
        """
        tracer = self._tracer

        def before_forward(index, module, inputs):
            name = "forward" if tracer.is_forward else "again"
            tracer.memory.begin(Phase(name, tracer.current, index))

        def before_backward(index, grad):
            tracer.memory.begin(Phase("backward", tracer.current, index))

        def after_forward(index, module, inputs, output):
            hidden = output[0] if isinstance(output, tuple) else output
            if hidden.requires_grad and tracer.is_forward:
                # The gradient of a layer's output is known just before the layer's own backward.
                hidden.register_hook(partial(before_backward, index))

        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(partial(before_forward, index))
            layer.register_forward_hook(partial(after_forward, index))

    def watch_optimizer(self, policy: Policy, device_type: str) -> None:
        """Leave the operations of a fused optimizer step out of the traced costs.

        On the device such a step reads and writes each of its tensors once, while the trace has an operation for each
        line of its formula. `hardware.estimate_step` computes its time from the bytes of these tensors. The operations
        of an optimizer that is not fused are counted one by one, in addition.
        """
        updater = policy.updater
        assert updater is not None, "init_optimizer comes first"
        is_counted = not updater.is_fused_step(device_type)

        def before(*_: object) -> None:
            self._tracer.counts_costs = is_counted

        def after(*_: object) -> None:
            self._tracer.counts_costs = True

        updater.optimizer.register_step_pre_hook(before)
        updater.optimizer.register_step_post_hook(after)


class PlannedMemory(HostMemory):
    """Host memory for activations whose buffers are meta tensors: its sizes are counted, nothing is copied.

    `HostMemory` counts the bytes of all buffers and of all copies, from which a plan computes the host's memory and the
    time of the link.

    Args:
        timeline: The device's memory. On a planned CPU the buffers are in it, as "host activations".
        is_pinned: Whether the planned device is a CUDA device, so that the buffers are pinned memory of the host.
    """

    def __init__(self, timeline: MemoryTimeline, is_pinned: bool):
        super().__init__()
        self._timeline, self._is_pinned = timeline, is_pinned
        self.releases_buffers = not is_pinned

    def can_offload(self, tensor: Tensor) -> bool:
        return tensor.is_meta

    def buffer_size(self, size: int) -> int:
        """Return the size of a buffer for `size` bytes. Pinned buffers are rounded up, as `PinnedMemory` does."""
        return 1 << (size - 1).bit_length() if self._is_pinned else size

    def allocate(self, size: int) -> Tensor:
        # The tracer sees `torch.empty`, and assigns the storage to the timeline's part of that moment.
        timeline = self._timeline
        part_before = timeline.part
        timeline.part = NOT_COUNTED if self._is_pinned else "host activations"
        buffer = torch.empty(size, dtype=torch.uint8, device="meta")
        timeline.part = part_before
        return buffer

    def copy(self, to: Tensor, source: Tensor) -> None:
        """Copy nothing. `HostMemory.copied_bytes` has counted the bytes, which a plan charges to the link."""
