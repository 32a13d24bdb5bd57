"""Stage kernels: the attention that the devices give. A run chooses it where the ranks build the model, since they must
agree on what each of their devices proves; a dry run on this machine asks its own."""

from typing import TYPE_CHECKING

import torch

from dtrain.models.read_config import read_config
from dtrain.policy.build import choose_attention, choose_delta
from dtrain.run.host import DryHost, Host

if TYPE_CHECKING:
    from dtrain.run.spec import RunSpec


def resolve(spec: "RunSpec", host: Host) -> bool:
    """Refuse what this machine's device cannot do."""
    recipe, method = spec.recipe, spec.method
    if not isinstance(host, DryHost) or not spec.world.is_here:
        return True
    if spec.rows or recipe.data.packing != "auto":
        device, longest = torch.device(spec.world.device_type), method.spec.longest_row(recipe)
        model_config = host.ask(read_config, recipe.model.directory)
        host.ask(choose_attention, recipe, model_config, spec.precision, device, longest)
        host.ask(choose_delta, recipe, model_config, spec.precision, device)
        host.ask(method.refuse_device, device)
    return True
