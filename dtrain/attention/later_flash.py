"""Flash attention of a later version than torch's own, which is 2: 3 on Hopper, 4 on Blackwell, where its package is.

torch puts it in the place of its own operations, forward and backward, for all of this process.
"""

from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch.nn import attention

from dtrain.base.ranks import Ranks

VERSIONS = {9: ("FA3", "flash_attn_interface"), 10: ("FA4", "flash_attn")}
"""torch's name of a version, and the package that brings it, by the first number of a GPU's compute capability."""

_refused: set[str] = set()
"""Versions that a model of this process has refused: what is active serves all its models."""


def choose(device: torch.device, prove: Callable[[bool], str | None], ranks: Ranks) -> tuple[str | None, str]:
    """Take the later version where every rank has it and it proves itself, else torch's own.

    prove: returns, alike on every rank, why what is active is not to be used, None where it computes what it should;
    True: it is a later version. Returns what it says of the version taken, and a note on that. Collective.
    """
    name, note = _activate(device)
    names = ranks.every(lambda: name)
    if len(set(names)) > 1:
        _refuse(name)
        name, note = None, note or f"FA2: {next(filter(None, names))} is not on every rank"
    if name is not None:
        problem = prove(True)
        if problem is None:
            return None, name
        _refuse(name)
        note = f"FA2: {name}: {problem}"
    return prove(False), note


def _activate(device: torch.device) -> tuple[str | None, str]:
    """Activate the later version of `device`. Returns its name, None where there is none, and why one that is installed
    is not taken."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None, ""
    name, package = VERSIONS.get(torch.cuda.get_device_capability(device)[0], ("", ""))
    if not name or find_spec(package) is None:
        return None, ""
    if name in _refused:
        return None, f"FA2: another model of this run has refused {name}"
    try:
        attention.activate_flash_attention_impl(name)
    except (ImportError, OSError, RuntimeError, AttributeError, ValueError) as error:  # another version of either
        return None, f"FA2: {name} does not load: {(str(error).splitlines() or [type(error).__name__])[0]}"
    return name, ""


def _refuse(name: str | None) -> None:
    """Put torch's own back in the place of version `name`, for good."""
    if name is not None:
        _refused.add(name)
        attention.restore_flash_attention_impl()
