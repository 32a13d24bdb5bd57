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
        tokens: Tokens that are not padding.
        pairs: Pairs of a token and a token of its document, for the FLOPs of attention.
        windowed_pairs: The same with at most `sliding_window` tokens for each token.
        vision_flops: FLOPs of the vision tower; 0 for text and in evaluations.
    """

    trained_tokens: int
    documents: int
    tokens: int
    pairs: int
    windowed_pairs: int
    vision_flops: int


class Totals:
    """Totals of a step over all ranks, on the device until they are read.

    Reading waits for the device. `Policy.optimizer_step` waits for the gradient norm anyway, so it reads the totals in
    the same copy; after that `read` costs nothing.

    Args:
        on_device: Float64 [n], the same on every rank.
    """

    def __init__(self, on_device: Tensor):
        self.on_device = on_device
        self._on_host: Tensor | None = None

    def set(self, on_host: Tensor) -> None:
        """Accept the host's copy, [n], that the caller has read together with something else."""
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

    If several calls of `forward_backward` come before an `optimizer_step`, each of them has all of its events. Forwards
    without a backward, as those of `Policy.logprobs` and `Policy.evaluate`, have the first four events, also with the
    weights of the reference. Forwards of a teacher, of a reward model and of `Policy.another` are not observed.

    Example:
        class Timer(StepObserver):
            def update_begins(self) -> None:
                self.began = time.perf_counter()

            def update_ends(self) -> None:
                print(time.perf_counter() - self.began)

        policy = Policy(recipe, config, mesh, runtime, observer=Timer())
    """

    def forward_begins(self, batch: Batch) -> None:
        """A micro-batch enters the model.

        Args:
            batch: The rows on the host, before they are divided over context parallel ranks.
        """

    def head_begins(self) -> None:
        """The hidden states of all layers are computed, and the loss is about to be."""

    def head_ends(self) -> None:
        """The loss, or what else is computed from the hidden states, is there."""

    def forward_ends(self) -> None:
        """The forward of the micro-batch has returned."""

    def backward_begins(self) -> None:
        """The backward of the micro-batch begins."""

    def backward_ends(self) -> None:
        """The backward of the micro-batch is done. FSDP may have reduced its gradients."""

    def gradients_complete(self, model: nn.Module) -> None:
        """The gradients of all micro-batches of a `Policy.forward_backward` are in the parameters' `.grad`, as shards.

        Args:
            model: The model that is trained.
        """

    def update_begins(self) -> None:
        """`Policy.optimizer_step` begins."""

    def update_ends(self) -> None:
        """`Policy.optimizer_step` has changed the weights, or has skipped the step, and cleared the gradients.

        This event does not follow if the step raises an error.
        """
