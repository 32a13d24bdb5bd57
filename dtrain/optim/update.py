"""Parameter groups, learning-rate schedules, and the update of a step.

`SCHEDULES` has the schedules by name. Others are built by import path, or from stages. `Updater` does everything that
follows the backward of a step: the gradient norm, clipping, the optimizer's step, and the loss scale of float16.
`policy/optimizer.py` builds the optimizer.
"""

import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, SequentialLR

from dtrain.base.errors import UserError
from dtrain.base.plugins import import_object
from dtrain.optim.local_shard import ShardOptimizer, allocate_state
from dtrain.parallel.fsdp import get_host_masters
from dtrain.parallel.placement import bytes_of, clip_grads_, grad_norm, local_tensor, nonfinite_names, scale_grads_


def parameter_groups(named_parameters: Iterable[tuple[str, nn.Parameter]], weight_decay: float) -> list[dict[str, Any]]:
    """Return parameter groups with and without weight decay.

    Tensors with two or more dimensions decay, embeddings included. Vectors do not, and neither do biases of stacks of
    experts, which are matrices [experts, out].

    Args:
        named_parameters: Parameters by name. Those that need no gradient are left out.
        weight_decay: Weight decay of the first group.

    Returns:
        Two groups, or fewer if one would be empty.
    """
    decaying: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in named_parameters:
        if not parameter.requires_grad:
            continue
        if parameter.ndim >= 2 and not name.endswith(".bias"):
            decaying.append(parameter)
        else:
            others.append(parameter)
    groups = [{"params": decaying, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _constant(progress: float) -> float:
    return 1.0


def _cosine(progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def _linear(progress: float) -> float:
    return 1.0 - progress


# The decay of each schedule: a function of the progress through the decay, from 1 at progress 0 to 0 at progress 1.
# `_factor` scales it to the range from 1 to `min_lr_ratio`. The formulas are those of transformers:
#
#     constant    get_constant_schedule_with_warmup
#     cosine      get_cosine_with_min_lr_schedule_with_warmup
#     linear      get_linear_schedule_with_warmup, which always ends at 0; here it ends at `min_lr_ratio`
#     wsd         get_wsd_schedule with a cosine decay; here the warm-up starts at 0
SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": _constant,
    "cosine": _cosine,
    "linear": _linear,
    "wsd": _cosine,
}
# Share of the steps that decay under "wsd", unless the section has `kwargs: {decay_steps: N}`.
_WSD_DECAY_SHARE = 0.2


def _factor(name: str, total_steps: int, warmup_steps: int, min_lr_ratio: float, decay_steps: int, step: int) -> float:
    """Return the factor of the learning rate at a step.

    The warm-up is followed by a constant part, if `decay_steps` leaves room for that, and then by the decay.

    Args:
        name: A key of `SCHEDULES`.
        total_steps: Step at which the decay would reach `min_lr_ratio`.
        warmup_steps: Steps of warm-up, with the factor step / warmup_steps.
        min_lr_ratio: Factor at the end.
        decay_steps: Steps of the decay.
        step: The step, counted from 0.

    Example:
        10 steps, of which 2 are warm-up and the last 4 are a linear decay to 0:

        >>> [round(_factor("linear", 10, 2, 0.0, 4, step), 2) for step in range(10)]
        [0.0, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    if step < warmup_steps:
        return step / warmup_steps
    decay_start = max(warmup_steps, total_steps - decay_steps)
    if step < decay_start or name == "constant":
        return 1.0
    progress = min(1.0, (step - decay_start) / max(1, total_steps - decay_start))
    return max(0.0, SCHEDULES[name](progress) * (1.0 - min_lr_ratio) + min_lr_ratio)


class Schedule:
    """Schedule of learning rates by optimizer step.

    The only state is the number of steps. `load_state_dict` builds a new scheduler and repeats that number of steps.
    Therefore every torch scheduler can be used, also if its own state could not be restored. If the recipe's schedule
    was changed before a resume, the run continues as if it had used the new schedule from the beginning.

    Args:
        optimizer: The optimizer. Its groups have the base learning rates.
        make: Builds a scheduler for the optimizer.

    Attributes:
        steps: The number of steps so far.
    """

    def __init__(self, optimizer: Optimizer, make: Callable[[Optimizer], LRScheduler]):
        self._optimizer = optimizer
        self._make = make
        self._base_lrs = [group["lr"] for group in optimizer.param_groups]
        self._restart()

    def _restart(self) -> None:
        """Go back to step 0."""
        for group, lr in zip(self._optimizer.param_groups, self._base_lrs, strict=True):
            group["lr"] = lr
            group.pop("initial_lr", None)
        self._scheduler = self._make(self._optimizer)
        self.steps = 0

    def step(self) -> None:
        """Go to the next step. Called once after each optimizer step, also if the weights were not changed."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*before.*optimizer.step")
            self._scheduler.step()
        self.steps += 1

    def get_last_lr(self) -> list[float]:
        """Return the learning rates that the next optimizer step uses, one per parameter group."""
        return [float(group["lr"]) for group in self._optimizer.param_groups]

    def state_dict(self) -> dict[str, int]:
        """Return the number of steps."""
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go to the step of `state`, and set the learning rates of the optimizer's groups."""
        self._restart()
        for _ in range(state["steps"]):
            self.step()


def build_scheduler(section, optimizer: Optimizer, total_steps: int) -> Schedule:
    """Build the schedule of a recipe.

    Args:
        section: The `scheduler` section, or a list of them, which are stages. `name` is a key of `SCHEDULES`, or the
            import path of one of torch's schedulers or any callable `(optimizer, **kwargs) -> LRScheduler`. Each stage
            counts its own steps from 0 over `steps` steps. If the last stage has no `steps`, it lasts to the end.
        optimizer: The optimizer.
        total_steps: The number of optimizer steps.

    Raises:
        UserError: If a name is unknown or cannot be imported, arguments are refused, a scheduler needs a metric, or a
            stage has no steps.
    """
    if not isinstance(section, (list, tuple)):
        return Schedule(optimizer, _maker(section, total_steps, "scheduler"))
    lengths = stage_lengths([stage.steps for stage in section], total_steps)
    makers = []
    for index, (stage, length) in enumerate(zip(section, lengths, strict=True)):
        makers.append(_maker(stage, length, f"scheduler[{index}]"))
    milestones = list(accumulate(lengths[:-1]))  # steps at which a stage ends, as torch's SequentialLR has them

    def sequence(optimizer: Optimizer) -> LRScheduler:
        schedulers = [make(optimizer) for make in makers]
        return SequentialLR(optimizer, schedulers, milestones) if milestones else schedulers[0]

    return Schedule(optimizer, sequence)


def stage_lengths(steps: list[int | None], total_steps: int) -> list[int]:
    """Return the optimizer steps of each stage.

    Args:
        steps: Steps of each stage in the recipe. None, allowed in the last one, means the rest, and at least one.
        total_steps: The number of optimizer steps.

    Raises:
        UserError: If there are no stages, if a number of steps is below 1, or if a stage before the last has None.

    Example:
        >>> stage_lengths([100, 300, None], 1000)
        [100, 300, 600]
    """
    if not steps:
        raise UserError("scheduler: [] has no stages; give a list of stages with steps, or one schedule")
    for index, length in enumerate(steps):
        if length is None and index < len(steps) - 1:
            raise UserError(f"scheduler[{index}].steps is missing: only the last stage may leave its steps out")
        if length is not None and length < 1:
            raise UserError(f"scheduler[{index}].steps={length} must be at least 1")
    *first_lengths, last_length = steps
    lengths = [length for length in first_lengths if length is not None]  # none of them is None here
    if last_length is None:
        last_length = max(1, total_steps - sum(lengths))
    return [*lengths, last_length]


def _maker(section, total_steps: int, key: str) -> Callable[[Optimizer], LRScheduler]:
    """Return a function that builds the scheduler of one section, whose key in the recipe is `key`."""
    kwargs = dict(section.kwargs or {})
    if section.name not in SCHEDULES:
        target = import_object(section.name, f"{key}.name", SCHEDULES)
        return lambda optimizer: _construct(optimizer, target, section.name, kwargs, key)
    warmup = section.num_warmup_steps(total_steps)
    decay_steps = total_steps - warmup
    if section.name == "wsd":
        decay_steps = kwargs.pop("decay_steps", None) or max(1, round(_WSD_DECAY_SHARE * total_steps))
    if kwargs:
        raise UserError(f"{key}.kwargs: {section.name} does not know {', '.join(map(str, kwargs))}")
    factor_at = partial(_factor, section.name, total_steps, warmup, section.min_lr_ratio, decay_steps)
    return lambda optimizer: LambdaLR(optimizer, factor_at)


def _construct(optimizer: Optimizer, target: Callable, name: str, kwargs: dict, key: str) -> LRScheduler:
    """Build an imported scheduler. Raises UserError if it refuses its arguments, or if its `step` needs arguments."""
    try:
        scheduler = target(optimizer, **kwargs)
    except (TypeError, ValueError) as error:
        raise UserError(f"{key}.name={name} refuses its settings: {error}. See {key}.kwargs") from error
    required = []
    for parameter in inspect.signature(scheduler.step).parameters.values():
        if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD:
            required.append(parameter.name)
    if required:
        raise UserError(
            f"{key}.name={name} needs {', '.join(required)} at every step, which the training loop does not have; "
            "use a schedule that depends only on the step"
        )
    return scheduler


@dataclass(eq=False)
class LossScale:
    """Dynamic loss scaling for float16 (Micikevicius et al., arXiv:1710.03740, section 3.2).

    The loss is multiplied by the scale before the backward, so that small gradients do not become 0 in float16. The
    scale is halved when the global gradient norm is not finite, and doubled after `growth_interval` steps with a finite
    norm. Every rank has the same norm, and therefore the same scale.

    Attributes:
        scale: The scale, at least 1 after it was halved.
        growth_interval: Number of finite steps in a row after which the scale is doubled.
        finite_steps: Number of finite steps since the scale was changed.
    """

    scale: float = 2.0**16
    growth_interval: int = 2000
    finite_steps: int = 0

    def update(self, finite: bool) -> None:
        """Adapt the scale after a step.

        Args:
            finite: Whether the gradient norm was finite.
        """
        self.finite_steps = self.finite_steps + 1 if finite else 0
        if not finite:
            self.scale = max(self.scale / 2, 1.0)
        elif self.finite_steps == self.growth_interval:
            self.scale, self.finite_steps = self.scale * 2, 0

    def state_dict(self) -> dict[str, float]:
        """Return the state to save."""
        return {"scale": self.scale, "finite_steps": self.finite_steps}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from a saved state."""
        self.scale, self.finite_steps = state["scale"], int(state["finite_steps"])


@dataclass(eq=False)
class Updater:
    """Second half of a step: from the gradients to the new weights.

    Attributes:
        model: The model that is trained.
        optimizer: The optimizer of the model's parameters, or of `local_shards`.
        scheduler: The schedule of the learning rates.
        max_grad_norm: Norm to which gradients are clipped. None does not clip.
        skip_nonfinite: Number of steps in a row that may be skipped because their gradient norm is not finite.
        loss_scale: The loss scale of float16; None in other dtypes.
        local_shards: Plain tensors that the optimizer steps in place of the model's trained parameters, by parameter.
            Each shares the memory of the parameter's local shard. Empty if the optimizer steps the parameters.
        skipped_in_row: Steps that were skipped since the last finite norm.
    """

    model: nn.Module
    optimizer: Optimizer
    scheduler: Schedule
    max_grad_norm: float | None
    skip_nonfinite: int
    loss_scale: LossScale | None
    local_shards: Mapping[nn.Parameter, nn.Parameter] = field(default_factory=dict)
    skipped_in_row: int = 0

    @torch.no_grad()
    def allocate_state(self) -> None:
        """Allocate the optimizer's state, as the first step would. Weights keep their values."""
        allocate_state(self.optimizer)

    def device_state_bytes(self) -> int:
        """Return the bytes on the device that this rank's optimizer state takes during a step.

        If the state is on the host, these are the buffers through which it is copied.
        """
        if self._state_is_on_host and isinstance(self.optimizer, ShardOptimizer):
            return self.optimizer.step_buffer_bytes()
        return bytes_of(self.state_tensors())

    def host_state_bytes(self) -> int:
        """Return the bytes of this rank's optimizer state and float32 weights that are copied to the device at a step.

        0 if the state is on the device.
        """
        if not self._state_is_on_host:
            return 0
        moments = [tensor for tensor in self.state_tensors() if tensor.dim()]
        return bytes_of([*moments, *get_host_masters(self.model)])

    def is_fused_step(self, device_type: str) -> bool:
        """Check whether the optimizer's step reads and writes each of its tensors about once.

        Args:
            device_type: "cuda" or "cpu". Some optimizers of dtrain are fused on CUDA only.
        """
        if isinstance(self.optimizer, ShardOptimizer):
            return self.optimizer.is_fused_on(device_type)
        return True

    def state_tensors(self) -> list[Tensor]:
        """Return the tensors of the optimizer's state so far."""
        states = self.optimizer.state.values()
        return [value for state in states for value in state.values() if isinstance(value, Tensor)]

    @property
    def _state_is_on_host(self) -> bool:
        return isinstance(self.optimizer, ShardOptimizer) and self.optimizer.state_is_on_host

    def update(self, totals: Tensor) -> tuple[float, Tensor]:
        """Clip the gradients, step the optimizer, clear the gradients, and advance the schedule.

        If the gradient norm is not finite, weights and optimizer state are not changed. A loss scale above 1 is then
        halved, and the run continues. Without a loss scale, or at a scale of 1, the step counts as skipped, and at most
        `skip_nonfinite` steps in a row may be skipped.

        Args:
            totals: Totals of the step on the device, float64 [n]. They are copied to the host together with the norm,
                so that the host waits for the device only once.

        Returns:
            The gradient norm before clipping, and `totals` on the host.

        Raises:
            UserError: If more than `skip_nonfinite` steps in a row would be skipped. The message names the parameters.

        Collectives:
            One all-reduce of a scalar, and those of the optimizer's step.
        """
        parameters = list(self.model.parameters())
        if self.loss_scale is not None:
            scale_grads_(parameters, 1.0 / self.loss_scale.scale)
        norm = grad_norm(parameters)
        on_host = torch.cat([norm.detach().to(totals)[None], totals]).cpu()
        norm_value = on_host[0].item()
        finite = math.isfinite(norm_value)
        can_halve_scale = self.loss_scale is not None and self.loss_scale.scale > 1.0
        self.skipped_in_row = 0 if finite or can_halve_scale else self.skipped_in_row + 1
        if self.skipped_in_row > self.skip_nonfinite:
            raise UserError(self._nonfinite_message(norm_value))
        if self.loss_scale is not None and (finite or can_halve_scale):
            self.loss_scale.update(finite)
        if finite:
            if self.max_grad_norm is not None:
                clip_grads_(parameters, self.max_grad_norm, norm)
            self._step()
        self.optimizer.zero_grad(set_to_none=True)
        for parameter in self.local_shards:
            parameter.grad = None
        self.scheduler.step()
        return norm_value, on_host[1:]

    def _step(self) -> None:
        """Step the optimizer. If it steps local shards, these get the local gradients of their parameters."""
        for parameter, shard in self.local_shards.items():
            shard.grad = None if parameter.grad is None else local_tensor(parameter.grad)
        self.optimizer.step()

    def _nonfinite_message(self, norm: float) -> str:
        """Return the error text for a norm that is not finite."""
        names = nonfinite_names(self.model.named_parameters())
        where = "in gradients on another rank, or their norm overflows"
        if names:
            where = f"in the gradients of {', '.join(names[:5])}"
            if len(names) > 5:
                where += f" and {len(names) - 5} more"
        return (
            f"the gradient norm is {norm}: the first non-finite values are {where}. The weights were not changed, and "
            "the last checkpoint is not affected. Lower optimizer.lr, look at the data of this step, or skip up to "
            "N such steps in a row with train.skip_nonfinite=N"
        )
