"""One training step of a policy, for tests."""

from functools import partial
from typing import NamedTuple

from dtrain.policy import DTensorPolicyWorker
from dtrain.policy.results import StepResult

# The worker without what its users get by default; for batches of several optimizer steps.
bare_worker = partial(DTensorPolicyWorker, init_optimizer=False, init_reference_model=False)


class Step(NamedTuple):
    """Loss and gradient norm of a step, and the rest of its result."""

    loss: float
    grad_norm: float
    result: StepResult


def train_step(policy, batch, loss_fn, micro_batch_size=None):
    """Compute gradients of `batch` and update the weights."""
    result = policy.forward_backward(batch, loss_fn, micro_batch_size)
    update = policy.optimizer_step()
    return Step(result.loss, update.grad_norm, result)
