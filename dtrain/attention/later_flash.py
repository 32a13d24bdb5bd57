"""FlashAttention-3 on Hopper and FlashAttention-4 on Blackwell, if their packages are installed.

torch contains version 2. It can replace its operations by those of a later version, forward and backward, for the whole
process.
"""

from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch.nn import attention

from dtrain.base.ranks import Ranks

VERSIONS = {9: ("FA3", "flash_attn_interface"), 10: ("FA4", "flash_attn")}
"""torch's name of a version and its package, by the major number of the GPU's compute capability."""

_refused: set[str] = set()
"""Versions that failed the check of a model of this process. The active version is used by all models."""


def choose(device: torch.device, prove: Callable[[bool], str | None], ranks: Ranks) -> tuple[str | None, str]:
    """Activate the later version if every rank has it and it passes the check. Otherwise use torch's own version.

    Args:
        device: The device.
        prove: Checks the active version. Its argument is whether that is a later version. Returns the problem, the same
            on every rank, or None if the results are correct.
        ranks: All ranks.

    Returns:
        The problem of the version that is used now, or None, and a note for the user.

    Collectives:
        One exchange of the versions, and those of `prove`.
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
    """Activate the later version for a device.

    Returns:
        Its name, or None, and if it is installed but cannot be used, the reason.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return None, ""
    name, package = VERSIONS.get(torch.cuda.get_device_capability(device)[0], ("", ""))
    if not name or find_spec(package) is None:
        return None, ""
    if name in _refused:
        return None, f"FA2: another model of this run has refused {name}"
    try:
        attention.activate_flash_attention_impl(name)
    except (
        ImportError,
        OSError,
        RuntimeError,
        AttributeError,
        ValueError,
    ) as error:  # versions of torch and the package that do not fit
        return None, f"FA2: {name} does not load: {(str(error).splitlines() or [type(error).__name__])[0]}"
    return name, ""


def _refuse(name: str | None) -> None:
    """Restore torch's own version, and do not activate version `name` again in this process."""
    if name is not None:
        _refused.add(name)
        attention.restore_flash_attention_impl()
