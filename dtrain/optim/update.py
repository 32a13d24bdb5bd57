"""Parameter groups, learning-rate schedules, and the update of a step.

`SCHEDULES` has the schedules by name; others are built by import path, or from stages. `Updater` is all that follows a
step's backward: the gradient norm, clipping, the optimizer's step, and float16's loss scale. `policy/optimizer.py`
builds the optimizer.
"""

import importlib
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
from dtrain.base.ranges import closest_name
from dtrain.optim.local_shard import ShardOptimizer, allocate_state
from dtrain.parallel.fsdp import get_host_masters
from dtrain.parallel.placement import bytes_of, clip_grads_, grad_norm, local_tensor, nonfinite_names, scale_grads_


def parameter_groups(named_parameters: Iterable[tuple[str, nn.Parameter]], weight_decay: float) -> list[dict[str, Any]]:
    """Return two groups: tensors of two or more dimensions, embeddings included, decay; the others, and biases of
    stacks of experts, do not.

    Parameters that need no gradient are left out, and so is a group without parameters.
    """
    decaying: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in named_parameters:
        if parameter.requires_grad:
            (decaying if parameter.ndim >= 2 and not name.endswith(".bias") else others).append(parameter)
    groups = [{"params": decaying, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _cosine(progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * progress))


# Name → the factor between 1 and min_lr_ratio at `progress` (0 to 1) through the decay. Formulas: transformers'
# get_constant_schedule_with_warmup, get_cosine_with_min_lr_schedule_with_warmup, get_linear_schedule_with_warmup (which
# ends at 0; here at min_lr_ratio), get_wsd_schedule (whose decay is a cosine; its warm-up starts at 0 here).
SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "cosine": _cosine,
    "linear": lambda progress: 1.0 - progress,
    "wsd": _cosine,
}
_WSD_DECAY_SHARE = 0.2  # of the steps, where `kwargs: {decay_steps: N}` does not say


def _factor(name: str, total_steps: int, warmup_steps: int, min_lr_ratio: float, decay_steps: int, step: int) -> float:
    """Return the factor of the learning rate by the schedule `name` at `step`, counted from 0.

    Warm-up is step ÷ warmup_steps; then a plateau, where decay_steps leaves room for one; the decay would reach
    min_lr_ratio at step = total_steps.
    """
    if step < warmup_steps:
        return step / warmup_steps
    plateau_end = max(warmup_steps, total_steps - decay_steps)
    if step < plateau_end or name == "constant":
        return 1.0
    progress = min(1.0, (step - plateau_end) / max(1, total_steps - plateau_end))
    return max(0.0, SCHEDULES[name](progress) * (1.0 - min_lr_ratio) + min_lr_ratio)


class Schedule:
    """Schedule of learning rates by optimizer step. Its state is the number of steps taken, and nothing else.

    make: builds the scheduler on an optimizer whose groups hold their base learning rates. Loading replays that many
    steps on a fresh scheduler, so that one interface serves every class of torch's, whatever it keeps, and a recipe
    changed in between counts as if it had been so from the start.
    """

    def __init__(self, optimizer: Optimizer, make: Callable[[Optimizer], LRScheduler]):
        self._optimizer = optimizer
        self._make = make
        self._base_lrs = [group["lr"] for group in optimizer.param_groups]
        self._restart()

    def _restart(self) -> None:
        for group, lr in zip(self._optimizer.param_groups, self._base_lrs, strict=True):
            group["lr"] = lr
            group.pop("initial_lr", None)
        self._scheduler = self._make(self._optimizer)
        self.steps = 0

    def step(self) -> None:
        """Go to the next step; called once after each optimizer step (also after one that was skipped)."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*before.*optimizer.step")
            self._scheduler.step()
        self.steps += 1

    def get_last_lr(self) -> list[float]:
        """Return the learning rates that the next optimizer step uses, one per parameter group."""
        return [float(group["lr"]) for group in self._optimizer.param_groups]

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go to the step of `state`, and set the learning rates of the optimizer's groups."""
        self._restart()
        for _ in range(state["steps"]):
            self.step()


def build_scheduler(section, optimizer: Optimizer, total_steps: int) -> Schedule:
    """Return the schedule of a recipe's `scheduler` section, or of a list of them, over `total_steps` optimizer steps.

    `name` is a key of `SCHEDULES`, or the import path of one of torch's schedulers or of any callable
    `(optimizer, **kwargs) -> LRScheduler`. In a list each stage counts its own steps from 0 over `steps` steps (the
    last one may leave them out and take the rest), which makes the milestones of torch's SequentialLR.

    Raises UserError: an unknown name, a path that does not import, arguments refused, a scheduler that needs a metric,
    stages without steps.
    """
    if not isinstance(section, (list, tuple)):
        return Schedule(optimizer, _maker(section, total_steps, "scheduler"))
    lengths = stage_lengths([stage.steps for stage in section], total_steps)
    stages = enumerate(zip(section, lengths, strict=True))
    makers = [_maker(stage, length, f"scheduler[{index}]") for index, (stage, length) in stages]
    milestones = list(accumulate(lengths[:-1]))

    def sequence(optimizer: Optimizer) -> LRScheduler:
        schedulers = [make(optimizer) for make in makers]
        return SequentialLR(optimizer, schedulers, milestones) if milestones else schedulers[0]

    return Schedule(optimizer, sequence)


def stage_lengths(steps: list[int | None], total_steps: int) -> list[int]:
    """Return the optimizer steps of each stage; None, allowed in the last one, takes the rest (at least one)."""
    if not steps:
        raise UserError("scheduler: [] has no stages; give a list of stages with steps, or one schedule")
    for index, length in enumerate(steps):
        if length is None and index < len(steps) - 1:
            raise UserError(f"scheduler[{index}].steps is missing: only the last stage may leave its steps out")
        if length is not None and length < 1:
            raise UserError(f"scheduler[{index}].steps={length} must be at least 1")
    known = sum(length for length in steps if length is not None)
    return [max(1, total_steps - known) if length is None else length for length in steps]


def _maker(section, total_steps: int, key: str) -> Callable[[Optimizer], LRScheduler]:
    kwargs = dict(section.kwargs or {})
    if section.name not in SCHEDULES:
        target = import_named(section.name, f"{key}.name", SCHEDULES)
        return lambda optimizer: _construct(optimizer, target, section.name, kwargs, key)
    warmup = section.num_warmup_steps(total_steps)
    decay_steps = total_steps - warmup
    if section.name == "wsd":
        decay_steps = kwargs.pop("decay_steps", None) or max(1, round(_WSD_DECAY_SHARE * total_steps))
    if kwargs:
        raise UserError(f"{key}.kwargs: {section.name} does not know {', '.join(map(str, kwargs))}")
    at = partial(_factor, section.name, total_steps, warmup, section.min_lr_ratio, decay_steps)
    return lambda optimizer: LambdaLR(optimizer, at)


def _construct(optimizer: Optimizer, target: Callable, name: str, kwargs: dict, key: str) -> LRScheduler:
    try:
        scheduler = target(optimizer, **kwargs)
    except (TypeError, ValueError) as error:
        raise UserError(f"{key}.name={name} refuses its settings: {error}. See {key}.kwargs") from error
    required = [
        parameter.name
        for parameter in inspect.signature(scheduler.step).parameters.values()
        if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
    ]
    if required:
        raise UserError(
            f"{key}.name={name} needs {', '.join(required)} at every step, which the training loop does not have; "
            "take a schedule that depends on the step alone"
        )
    return scheduler


def import_named(path: str, key: str, names: Iterable[str]) -> Any:
    """Return the object at an import path `package.module.Name`.

    Args:
        path: The import path.
        key: Key of the recipe that has the path, for the error text.
        names: Names that the key accepts in place of a path, for the error text.

    Raises:
        UserError: If the path has no dot, or cannot be imported.
    """
    module_name, _, attribute = path.rpartition(".")
    if not module_name:
        names = list(names)
        near = closest_name(path, names)
        hint = f"; did you mean {near}?" if near else "."
        raise UserError(
            f"{key}={path} is unknown{hint} Known: {', '.join(names)}, or an import path such as torch.optim.Adagrad"
        )
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise UserError(f"{key}={path} cannot be imported: {error}") from error


@dataclass(eq=False)
class LossScale:
    """Dynamic loss scaling for float16 (Micikevicius et al., arXiv:1710.03740, section 3.2).

    Halved when the global gradient norm is not finite, doubled after `growth_interval` finite steps. The norm is the
    same on every rank, so the scale is too.
    """

    scale: float = 2.0**16
    growth_interval: int = 2000
    finite_steps: int = 0

    def update(self, finite: bool) -> None:
        self.finite_steps = self.finite_steps + 1 if finite else 0
        if not finite:
            self.scale = max(self.scale / 2, 1.0)
        elif self.finite_steps == self.growth_interval:
            self.scale, self.finite_steps = self.scale * 2, 0

    def state_dict(self) -> dict[str, float]:
        return {"scale": self.scale, "finite_steps": self.finite_steps}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.scale, self.finite_steps = state["scale"], int(state["finite_steps"])


@dataclass(eq=False)
class Updater:
    """Second half of a step: from the gradients to the new weights.

    Attributes:
        model: The model that is trained.
        optimizer: The optimizer of its parameters, or of `local_shards`.
        scheduler: The schedule of the learning rates.
        max_grad_norm: Norm to which gradients are clipped. None: they are not.
        skip_nonfinite: Steps in a row that may be skipped because their gradient norm is not finite.
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

    def update(self, sums: Tensor) -> tuple[float, Tensor]:
        """Clip, step, clear, and go on in the schedule. Returns the norm before clipping, and `sums` on the host.

        sums: float64 [n] of the step, read with the norm, so that the host waits once for the device.

        A norm that is not finite leaves weights and optimizer as they are: with a loss scale the scale falls; otherwise
        it is skipped up to `skip_nonfinite` times in a row, and then a UserError names the parameters.
        One all-reduce of a scalar.
        """
        parameters = list(self.model.parameters())
        if self.loss_scale is not None:
            scale_grads_(parameters, 1.0 / self.loss_scale.scale)
        norm = grad_norm(parameters)
        read = torch.cat([norm.detach().to(sums)[None], sums]).cpu()
        value = read[0].item()
        finite = math.isfinite(value)
        can_fall = self.loss_scale is not None and self.loss_scale.scale > 1.0
        self.skipped_in_row = 0 if finite or can_fall else self.skipped_in_row + 1
        if self.skipped_in_row > self.skip_nonfinite:
            raise UserError(self._nonfinite_message(value))
        if self.loss_scale is not None and (finite or can_fall):
            self.loss_scale.update(finite)
        if finite:
            if self.max_grad_norm is not None:
                clip_grads_(parameters, self.max_grad_norm, norm)
            self._step()
        self.optimizer.zero_grad(set_to_none=True)
        for parameter in self.local_shards:
            parameter.grad = None
        self.scheduler.step()
        return value, read[1:]

    def _step(self) -> None:
        """Step the optimizer, with the gradients of the local shards if it has these."""
        for parameter, shard in self.local_shards.items():
            shard.grad = None if parameter.grad is None else local_tensor(parameter.grad)
        self.optimizer.step()

    def _nonfinite_message(self, norm: float) -> str:
        names = nonfinite_names(self.model.named_parameters())
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        where = f"in the gradients of {shown}" if names else "in gradients on another rank, or their norm overflows"
        return (
            f"the gradient norm is {norm}: the first non-finite values are {where}. The weights were not touched and "
            "the last checkpoint stands. Lower optimizer.lr, look at the data of this step, or let up to N such steps "
            "in a row be skipped with train.skip_nonfinite=N"
        )
