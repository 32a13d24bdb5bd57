"""The observer of a planned step: it tells the tracer which part of the step the next operations belong to.

A pass is one micro-batch through the model. Forwards without a backward are passes too, for example those of a
reference.
"""

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn

from dtrain.attention.kernels import Kernel
from dtrain.base.batch import Batch
from dtrain.commands.plan.memory import LEFT_OUT, MemoryTimeline, Phase
from dtrain.commands.plan.tracer import Tracer
from dtrain.memory.activation_offload import HostMemory
from dtrain.parallel.placement import bytes_of
from dtrain.policy import Policy, StepObserver


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
        line of its formula. `hardware.estimate` computes its time from the bytes of these tensors. The operations of an
        optimizer that is not fused are counted one by one, in addition.
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
        self.is_given_back = not is_pinned

    def moves(self, tensor: Tensor) -> bool:
        return tensor.is_meta

    def taken(self, size: int) -> int:
        """Override `HostMemory.taken`: as of `PinnedMemory` if it is pinned."""
        return 1 << (size - 1).bit_length() if self._is_pinned else size

    def new(self, size: int) -> Tensor:
        # The tracer sees `torch.empty`, and assigns the storage to the timeline's part of that moment.
        timeline = self._timeline
        part_before = timeline.part
        timeline.part = LEFT_OUT if self._is_pinned else "host activations"
        buffer = torch.empty(size, dtype=torch.uint8, device="meta")
        timeline.part = part_before
        return buffer

    def copy(self, to: Tensor, source: Tensor) -> None:
        """Copy nothing. `HostMemory.copied` has counted the bytes, which a plan charges to the link."""
