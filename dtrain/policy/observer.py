"""Events of a policy's step, for code that measures the step without taking part in it."""

from torch import nn

from dtrain.base.batch import Batch


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
