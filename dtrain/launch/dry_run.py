"""Dry run: all that the processes of a run would refuse before its first step, without one: `dtrain validate`.

`preflight` is what needs no torch; `run` calls it too. The rest are the stages of `dtrain.run.spec`, which a rank
resolves too. Nothing is trained, no code of a stranger is imported, and no file stays behind. What only the run itself
can tell is left to it: ports, servers, memory, files that are damaged within, what is still to come from the hub, and
what code does that the recipe names.
"""

from collections.abc import Collection, MutableMapping, Sequence
from dataclasses import replace

import torch

from dtrain.base.errors import UserError
from dtrain.launch.devices import choose_device, problems, start_device
from dtrain.launch.place import RankPlace
from dtrain.recipe import Recipe
from dtrain.run.host import DryHost
from dtrain.run.spec import RunSpec, World, resolve


def dry_run(
    recipe: Recipe,
    world_size: int,
    environ: MutableMapping[str, str],
    *,
    here: bool,
    awaited: Collection[str] = (),
    refused: Sequence[str] = (),
) -> tuple[RunSpec, DryHost]:
    """Return the spec of a run of `recipe` in a world of `world_size` processes, as far as it can be resolved, and the
    host with its problems.

    here: whether the run is to be on this machine, whose devices are then asked. awaited, refused: as of `DryHost`.
    """
    host = DryHost(awaited, refused)
    device_type = (host.ask(_device, recipe, max(world_size, 1), environ) if here else None) or "cpu"
    return resolve(recipe, World(world_size, device_type, here), host), host


def _device(recipe: Recipe, count: int, environ: MutableMapping[str, str]) -> str:
    place = RankPlace(world_size=count, local_world_size=count, environ=environ)
    device = choose_device(recipe.launch.device, place)
    if device.type == "cuda":
        places = [replace(place, rank=rank, local_rank=rank) for rank in range(count)]
        devices = [start_device(torch.device("cuda", each.local_rank), each) for each in places]
        refusals = problems(devices, recipe.train.dtype, torch.cuda.get_arch_list() if torch.version.cuda else ())
        if refusals:
            raise UserError("\n".join(refusals))
    return device.type
