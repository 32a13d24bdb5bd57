"""Results and events of a policy's step.

`StepResult` has the losses and counts of a forward and backward, `UpdateResult` the optimizer's step. A `StepObserver`
is called at the events of a step, for code that measures the step without taking part in it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor, nn

from dtrain.base.batch import Batch
from dtrain.models.common.routing import Routing


@dataclass(frozen=True)
class StepCounts:
    """Counts of one step's global batch, summed over all dp ranks.

    Attributes:
        trained_tokens: Tokens with a label.
        documents: Documents, also called sequences. A packed row has several.
        tokens: Tokens that are computed, without padding. Beginnings that documents share are counted once.
        pairs: Σ length² over the documents, from which the FLOPs of attention are computed. A shared beginning of
            length b is subtracted, as b², for every document but one.
        windowed_pairs: Σ length · min(length, `sliding_window`) in the same way, for layers with a sliding window.
        vision_flops: FLOPs of the vision tower; 0 for text and in evaluations.
        shared_tokens: Tokens of the documents that are not computed, because another document begins with them.
    """

    trained_tokens: int
    documents: int
    tokens: int
    pairs: int
    windowed_pairs: int
    vision_flops: int
    shared_tokens: int = 0


class Totals:
    """Totals of a step over all ranks, on the device until they are read.

    Reading waits for the device. `Policy.optimizer_step` waits for the gradient norm anyway, and copies the totals to
    the host together with it. After that, `read` does not wait.

    Args:
        on_device: Float64 [n], the same on every rank.
    """

    def __init__(self, on_device: Tensor):
        self.on_device = on_device
        self._on_host: Tensor | None = None

    def set(self, on_host: Tensor) -> None:
        """Store the host's copy, [n], which the caller has read together with other values."""
        self._on_host = on_host

    def read(self) -> Tensor:
        """Return the totals on the host, float64 [n]."""
        if self._on_host is None:
            self._on_host = self.on_device.cpu()
        return self._on_host


@dataclass(frozen=True)
class StepResult:
    """Loss and metrics of one global batch, the same on every rank except for `micro_batch_metrics`.

    `loss`, `metrics` and `routing_metrics` wait for the device when one of them is first read. After
    `Policy.optimizer_step` they are on the host already.

    Attributes:
        counts: Counts of the global batch, known before the backward.
        totals: The loss, then the metrics in the order of `names`, then the routing totals of a mixture of experts.
        names: Names of the loss function's metrics.
        routing: Routing of a mixture of experts that was trained; None for dense models and in evaluations.
        micro_batch_metrics: This rank's metrics of each micro-batch, scalars on the device.
    """

    counts: StepCounts
    totals: Totals
    names: Sequence[str]
    routing: Routing | None
    micro_batch_metrics: Sequence[Mapping[str, Tensor]]

    @cached_property
    def loss(self) -> float:
        """The step's loss: the sum of the loss function's values over all micro-batches and ranks, and a mixture's
        balance loss."""
        return self.totals.read()[0].item()

    @cached_property
    def metrics(self) -> dict[str, float]:
        """Each metric of the loss function, summed over all micro-batches and ranks."""
        values = self.totals.read()[1 : 1 + len(self.names)].tolist()
        return dict(zip(self.names, values, strict=True))

    @cached_property
    def routing_metrics(self) -> dict[str, float]:
        """Loads of a mixture's experts (`Routing.metrics`); empty for dense models and in evaluations."""
        if self.routing is None:
            return {}
        routing_totals = self.totals.read()[1 + len(self.names) :]
        return {name: value.item() for name, value in self.routing.metrics(routing_totals).items()}


@dataclass(frozen=True)
class UpdateResult:
    """Result of an optimizer step.

    Attributes:
        grad_norm: Norm of the gradient of the whole model, before clipping. Not finite if the step was skipped.
        lr: Learning rate of the first parameter group that this step used.
    """

    grad_norm: float
    lr: float


class StepObserver:
    """Base class of observers. Its methods do nothing.

    A subclass overrides the events that it needs. It must not change a tensor, and none of its methods may communicate.
    For a batch of two micro-batches, a policy calls these methods:

        Policy.forward_backward
            forward_begins, head_begins, head_ends, forward_ends, backward_begins, backward_ends    micro-batch 1
            forward_begins, head_begins, head_ends, forward_ends, backward_begins, backward_ends    micro-batch 2
            gradients_complete
        Policy.optimizer_step
            update_begins, update_ends

    If several calls of `forward_backward` come before an `optimizer_step`, each call has all of its events. Forwards
    without a backward, for example in `Policy.logprobs` and `Policy.evaluate`, have the first four events, also with
    the weights of the reference. Forwards of a teacher, of a reward model and of `Policy.another` are not observed.

    Example:
        class Timer(StepObserver):
            def update_begins(self) -> None:
                self.began = time.perf_counter()

            def update_ends(self) -> None:
                print(time.perf_counter() - self.began)

        policy = Policy(recipe, config, mesh, runtime, observer=Timer())
    """

    def forward_begins(self, batch: Batch) -> None:
        """Observe the start of a micro-batch's forward.

        Args:
            batch: The rows on the host, before they are sharded over context-parallel ranks.
        """

    def head_begins(self) -> None:
        """Observe that the hidden states of all layers are computed. The loss is computed next."""

    def head_ends(self) -> None:
        """Observe that the loss, or another result of the hidden states, is computed."""

    def forward_ends(self) -> None:
        """Observe that the forward of the micro-batch has returned."""

    def backward_begins(self) -> None:
        """Observe the start of the micro-batch's backward."""

    def backward_ends(self) -> None:
        """Observe the end of the micro-batch's backward. FSDP may have reduced its gradients."""

    def gradients_complete(self, model: nn.Module) -> None:
        """Observe that all gradients of a `Policy.forward_backward` are in the parameters' `.grad`, as shards.

        Args:
            model: The model that is trained.
        """

    def update_begins(self) -> None:
        """Observe the start of `Policy.optimizer_step`."""

    def update_ends(self) -> None:
        """Observe the end of `Policy.optimizer_step`.

        The weights are changed or the step is skipped, and the gradients are cleared. Not called if the step raises an
        error.
        """
