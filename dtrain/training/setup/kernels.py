"""Stage kernels: the kernels of attention, and what the method asks of the device."""

import torch

from dtrain.policy.build import choose_attention, choose_delta
from dtrain.training.host import Host
from dtrain.training.spec import RunSpec


def check_keys(spec: RunSpec) -> list[str]:
    """Check that a kernel for CUDA is not asked of the CPU, or of full precision."""
    recipe = spec.recipe
    unfit = {
        "launch.device=cpu": recipe.launch.device == "cpu",
        f"train.dtype={recipe.train.dtype}": recipe.train.dtype in ("float32", "float64"),
    }
    named = [key for key, is_so in unfit.items() if is_so]
    kernels = {"attention": "varlen", "linear_attention": "fla"}
    problems = []
    if recipe.run.deterministic and recipe.model.linear_attention == "fla":
        problems = [
            "model.linear_attention=fla has no fixed order of sums, which run.deterministic=true asks for: set "
            "model.linear_attention=torch"
        ]
    return problems + [
        f"model.{key}={value} is for CUDA and bfloat16 or float16, and {' and '.join(named)}: set "
        f"model.{key}=auto, which takes it where it can"
        for key, value in kernels.items()
        if named and getattr(recipe.model, key) == value
    ]


def check_models(spec: RunSpec) -> list[str]:
    """Check that there is linear attention for its kernel."""
    model = spec.readable_config
    if model is None or model.linear is not None or spec.recipe.model.linear_attention != "fla":
        return []
    return ["model.linear_attention=fla: this model has no linear attention; leave it out"]


def resolve(spec: RunSpec, host: Host) -> bool:
    """Refuse, in a dry run, what this machine's device cannot do. A run chooses where its ranks build the model: they
    must agree on what each of their devices proves."""
    if host.is_dry and spec.world.is_here and (spec.rows or spec.recipe.data.packing != "auto"):
        recipe, device, longest = spec.recipe, torch.device(spec.world.device_type), spec.method.longest_row()
        host.ask(choose_attention, recipe, spec.model_config, spec.precision, device, longest)
        host.ask(choose_delta, recipe, spec.model_config, spec.precision, device)
        host.ask(spec.method.refuse_device, device)
    return True
