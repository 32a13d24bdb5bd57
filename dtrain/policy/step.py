"""What follows a step's backward: the norm, clipping, the update; and float16's loss scale."""

from torch import nn
from torch.optim import Optimizer

from dtrain.errors import UserError
from dtrain.parallel.grads import clip_grads_, grad_norm, nonfinite_names, scale_grads_


class LossScale:
    """Dynamic loss scaling for float16 (Micikevicius et al., arXiv:1710.03740, section 3.2).

    Halved when the global gradient norm is not finite, doubled after `growth_interval` finite steps. The norm is the
    same on every rank, so the scale is too.
    """

    def __init__(self, scale: float = 2.0**16, growth_interval: int = 2000):
        self.scale = scale
        self.growth_interval = growth_interval
        self.finite_steps = 0

    def update(self, finite: bool) -> None:
        if not finite:
            self.scale, self.finite_steps = max(self.scale / 2, 1.0), 0
            return
        self.finite_steps += 1
        if self.finite_steps == self.growth_interval:
            self.scale, self.finite_steps = self.scale * 2, 0

    def state_dict(self) -> dict[str, float]:
        return {"scale": self.scale, "finite_steps": self.finite_steps}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.scale, self.finite_steps = state["scale"], int(state["finite_steps"])


class Updater:
    """The second half of a step: what happens between the gradients and the new weights."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        max_grad_norm: float | None,
        skip_nonfinite: int,
        loss_scale: LossScale | None,
    ):
        self.model = model
        self.optimizer = optimizer
        self.max_grad_norm = max_grad_norm
        self.skip_nonfinite = skip_nonfinite
        self.loss_scale = loss_scale
        self.skipped_in_row = 0

    def update(self) -> float:
        """Clip, step, clear. Returns the norm before clipping.

        A norm that is not finite leaves weights and optimizer as they are: with a loss scale the scale falls; otherwise
        it is skipped up to `skip_nonfinite` times in a row, and then a UserError names the parameters.
        One all-reduce of a scalar, and one host synchronisation to read it.
        """
        parameters = list(self.model.parameters())
        if self.loss_scale is not None:
            scale_grads_(parameters, 1.0 / self.loss_scale.scale)
        norm = grad_norm(parameters)
        value = norm.item()
        finite = value == value and value not in (float("inf"), float("-inf"))
        if self.loss_scale is not None and (finite or self.loss_scale.scale > 1.0):
            self.loss_scale.update(finite)
            self.skipped_in_row = 0
        elif finite:
            self.skipped_in_row = 0
        else:
            self.skipped_in_row += 1
            if self.skipped_in_row > self.skip_nonfinite:
                raise UserError(self._nonfinite_message(value))
        if finite:
            if self.max_grad_norm is not None:
                clip_grads_(parameters, self.max_grad_norm, norm)
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return value

    def _nonfinite_message(self, norm: float) -> str:
        names = nonfinite_names(self.model.named_parameters())
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        where = f"in the gradients of {shown}" if names else "in gradients on another rank, or their norm overflows"
        return (
            f"the gradient norm is {norm}: the first non-finite values are {where}. The weights were not touched and "
            "the last checkpoint stands. Lower optimizer.lr, look at the data of this step, or let up to N such steps "
            "in a row be skipped with train.skip_nonfinite=N"
        )
