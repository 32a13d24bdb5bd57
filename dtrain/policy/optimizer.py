"""Building of a recipe's optimizer.

Only this module attaches the optional parts of `memory/` to the optimizer step. They are imported only for recipes that
use them. Without them, the optimizer is one of torch's own classes, or Muon.

    LowBitAdam             low-bit moments, bfloat16 weights, or optimizer state in host memory
    HostMaster             float32 weights in host memory, if the optimizer's state is there
    GradientAccumulator    sums of bfloat16 gradients that are reduced after each micro-batch
"""

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dtrain.base.errors import UserError
from dtrain.base.plugins import import_object
from dtrain.optim.local_shard import ShardOptimizer
from dtrain.optim.update import LossScale, Updater, build_scheduler, parameter_groups
from dtrain.parallel.placement import local_tensor
from dtrain.policy.options import BuildOptions, PolicyConfig, Precision
from dtrain.recipe.schema import Optimizer as OptimizerSection

if TYPE_CHECKING:
    from dtrain.memory.gradient_accumulation import GradientAccumulator

NamedParameters = Iterable[tuple[str, nn.Parameter]]

OPTIMIZERS: dict[str, type[Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "adafactor": torch.optim.Adafactor,
}
"""Classes of torch by `optimizer.name`."""

OPTIMIZER_NAMES = (*OPTIMIZERS, "muon")
"""Every `optimizer.name` without a dot. Muon is dtrain's own and imported only if a recipe names it."""

_ADAMS = ("adamw", "adam")
"""Optimizers that read betas and eps and have a fused kernel. SGD's fused kernel refuses DTensors."""

UNSHARDED_ONLY = (torch.optim.Adafactor, torch.optim.Rprop)
"""Classes of torch whose step fails on DTensors."""

_SPARSE_GRADIENTS_ONLY = (torch.optim.SparseAdam,)


def build_optimizer(
    section: OptimizerSection,
    named_parameters: NamedParameters,
    seed: int = 0,
    offload: torch.device | None = None,
) -> Optimizer:
    """Build the optimizer of a recipe's section `optimizer`.

    `optimizer.name` is one of `OPTIMIZER_NAMES` or the import path of an Optimizer class. `optimizer.kwargs` are passed
    to the class unchanged, and override the section's other fields. A class by import path receives betas and eps if
    its signature has them in AdamW's form. No collective.

    Args:
        section: The recipe's section.
        named_parameters: Parameters of the model, plain tensors or DTensors. Those that need no gradient are left out.
        seed: Seed of the random bits by which low-bit weights and moments are rounded.
        offload: Device of the gradients if the optimizer's state is in host memory; None if it is on their device.

    Raises:
        UserError: For an unknown name, a path that cannot be imported, arguments that the class refuses, and
            parameters that it cannot step.
    """
    named_parameters = list(named_parameters)
    kwargs = dict(section.kwargs or {})
    groups = parameter_groups(named_parameters, kwargs.get("weight_decay", section.weight_decay))
    parameters = [parameter for group in groups for parameter in group["params"]]
    names = {parameter: name for name, parameter in named_parameters}
    adam_fields: dict[str, Any] = {"betas": tuple(section.betas), "eps": section.eps}
    has_low_bit_weights = any(parameter.dtype == torch.bfloat16 for parameter in parameters)
    needs_low_bit_adam = section.state != "float32" or has_low_bit_weights or offload is not None

    build: Callable[..., Optimizer]
    settings: dict[str, Any]
    if section.name == "muon":
        from dtrain.optim.muon import Muon  # only if a recipe names it

        build = partial(Muon, names=names, seed=seed, adam_lr=section.adam_lr)
        settings = adam_fields
    else:
        build = _class_of(section.name, parameters)
        if needs_low_bit_adam:
            build = _low_bit_adam(section, names, seed, offload)
            settings = adam_fields
        else:
            settings = _class_settings(section.name, build, adam_fields, parameters, kwargs)
    try:
        return build(groups, **{"lr": section.lr, **settings, **kwargs})
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"optimizer.name={section.name} refuses its settings: {error}. See optimizer.kwargs") from error


def build_updater(
    recipe: PolicyConfig,
    precision: Precision,
    model: nn.Module,
    device: torch.device,
    total_steps: int,
    options: BuildOptions,
) -> Updater:
    """Build the updater of a model: optimizer, schedule, and in float16 the loss scale. No collective.

    Args:
        recipe: The recipe.
        precision: The dtypes of the model.
        model: The sharded model.
        device: Device of the run.
        total_steps: Optimizer steps of the schedule.
        options: How the model was built.

    Raises:
        UserError: As `build_optimizer`.
    """
    gradient_device = None
    if offloads_optimizer(recipe, device):
        gradient_device = device if options.materialize else torch.device("meta")
    optimizer = build_optimizer(recipe.optimizer, model.named_parameters(), recipe.run.seed, gradient_device)
    local_shards: dict[nn.Parameter, nn.Parameter] = {}
    # Not needed for dtrain's own optimizers, which always step local shards.
    if options.step_local_shards and not isinstance(optimizer, ShardOptimizer):
        named_shards = []
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                shard = local_shards[parameter] = nn.Parameter(local_tensor(parameter).detach())
                named_shards.append((name, shard))
        optimizer = build_optimizer(recipe.optimizer, named_shards, recipe.run.seed)
    return Updater(
        model,
        optimizer,
        build_scheduler(recipe.scheduler, optimizer, total_steps),
        max_grad_norm=recipe.train.max_grad_norm,
        skip_nonfinite=recipe.train.skip_nonfinite,
        loss_scale=LossScale() if precision.compute == torch.float16 else None,
        local_shards=local_shards,
    )


def build_gradient_sums(
    recipe: PolicyConfig, precision: Precision, named_parameters: NamedParameters
) -> "GradientAccumulator | None":
    """Build the accumulator of gradients, if FSDP reduces bfloat16 gradients after each micro-batch. Else None.

    Without it, FSDP would sum the reduced gradients of micro-batches in bfloat16.
    """
    if precision.master != torch.bfloat16 or not recipe.parallel.reduce_each:
        return None
    from dtrain.memory.gradient_accumulation import GradientAccumulator  # optional

    return GradientAccumulator(named_parameters, recipe.run.seed)


def offloads_optimizer(recipe: PolicyConfig, device: torch.device) -> bool:
    """Check whether the optimizer's state is in pinned host memory. On a CPU it is in host memory anyway."""
    return bool(recipe.parallel.optimizer_offload) and device.type == "cuda"


def move_masters_to_host(model: nn.Module, recipe: PolicyConfig, precision: Precision, device: torch.device) -> None:
    """Move float32 weights to host memory, if the optimizer's state is there and layers compute in another dtype.

    No collective.

    Args:
        model: The sharded model, before its first forward.
        recipe: The recipe.
        precision: The dtypes of the model.
        device: Device of the layers.
    """
    if offloads_optimizer(recipe, device) and precision.master != precision.compute:
        from dtrain.memory.host_masters import move_masters_to_host  # optional

        move_masters_to_host(model, precision.compute)


def sharded_step_error(name: str) -> str:
    """Return the error text for an optimizer of `UNSHARDED_ONLY` and sharded parameters."""
    return (
        f"optimizer.name={name} cannot step sharded parameters: torch's class changes them by operations that DTensor "
        "refuses. Take adamw, or one process (launch.nproc=1) with train.dtype=float32"
    )


def is_torch_optimizer(name: str) -> bool:
    """Check whether `name` is the import path of one of torch's own optimizers, and of no other code of torch."""
    if not name.startswith("torch.optim."):
        return False
    cls = vars(torch.optim).get(name.removeprefix("torch.optim."))
    return isinstance(cls, type) and issubclass(cls, Optimizer)


def _low_bit_adam(
    section: OptimizerSection, names: dict[nn.Parameter, str], seed: int, offload: torch.device | None
) -> Callable[..., Optimizer]:
    """Return `LowBitAdam` with all arguments but the parameter groups, lr, betas, eps and `optimizer.kwargs`."""
    if section.name not in _ADAMS:
        raise UserError(
            f"optimizer.name={section.name} keeps weights and state in float32 on the device: optimizer.state="
            f"{section.state}, train.masters=bfloat16 or parallel.optimizer_offload=true needs adamw or adam"
        )
    from dtrain.memory.low_bit_adam import LowBitAdam  # optional

    is_decoupled = section.name == "adamw"
    return partial(LowBitAdam, names=names, seed=seed, state=section.state, decoupled=is_decoupled, offload=offload)


def _class_of(name: str, parameters: list[nn.Parameter]) -> Callable[..., Optimizer]:
    """Return the class of a name or an import path, after checking that it can step the parameters."""
    cls: Any = OPTIMIZERS.get(name)
    if cls is None:
        cls = import_object(name, "optimizer.name", OPTIMIZER_NAMES)
    if cls in _SPARSE_GRADIENTS_ONLY:
        raise UserError(f"optimizer.name={name} steps sparse gradients only, and these are dense; take adamw")
    if cls in UNSHARDED_ONLY and any(isinstance(parameter, DTensor) for parameter in parameters):
        raise UserError(sharded_step_error(name))
    return cls


def _class_settings(
    name: str,
    cls: Callable[..., Optimizer],
    adam_fields: dict[str, Any],
    parameters: list[nn.Parameter],
    kwargs: dict[str, Any],
) -> dict[str, Any]:
    """Return the arguments of a class that follow from the recipe's section, besides lr.

    Args:
        name: `optimizer.name`.
        cls: Its class.
        adam_fields: The section's betas and eps.
        parameters: The trained parameters.
        kwargs: The recipe's `optimizer.kwargs`.
    """
    if name in _ADAMS:
        can_be_fused = all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in parameters)
        if can_be_fused and kwargs.get("foreach") is None:
            return {**adam_fields, "fused": True}
        return adam_fields
    if name in OPTIMIZERS:
        return {}
    arguments = inspect.signature(cls).parameters
    settings: dict[str, Any] = {}
    # Other classes use the same names for other things: Adafactor's eps, for example, is a pair.
    if "betas" in arguments and len(arguments["betas"].default or ()) == 2:
        settings["betas"] = adam_fields["betas"]
    if "eps" in arguments and isinstance(arguments["eps"].default, float):
        settings["eps"] = adam_fields["eps"]
    return settings
