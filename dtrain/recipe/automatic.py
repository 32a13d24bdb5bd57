"""Keys of a recipe whose `auto` a plan decides: which are open, and recipes with values in place of `auto`.

`commands.plan.choose` decides them for a run, by the memory of its devices. No number that a run computes depends on
one of them. `train.compile`, which rounds otherwise, the kind of device decides.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, TypeVar

from dtrain.base.gpus import C_COMPILERS

Config = TypeVar("Config")

AUTO, COMPILE, MICRO_BATCH = "auto", "train.compile", "train.micro_batch"
USUAL_ROWS = 4
USUAL: dict[str, Any] = {
    MICRO_BATCH: USUAL_ROWS,
    "train.activation_checkpointing": "none",
    "train.activation_offload": False,
    "train.tile": "none",
    "parallel.reduce_each": False,
    "parallel.optimizer_offload": False,
}
"""The keys, and the value of each that costs the least time."""


def value_of(config: Any, key: str) -> Any:
    """Return the value of `key`, "section.name"."""
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def changed(config: Config, overrides: Mapping[str, Any]) -> Config:
    """Return `config` with `overrides`, "section.name" → value, or a longer key."""
    for key, value in overrides.items():
        name, _, rest = key.partition(".")
        config = replace(config, **{name: changed(getattr(config, name), {rest: value}) if rest else value})  # type: ignore
    return config


def as_overrides(values: Mapping[str, Any]) -> list[str]:
    """Return `values` as one types them, "key=value" each."""
    return [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in values.items()]


def as_choices(config: Any, values: Mapping[str, Any]) -> list[str]:
    """Return `values` that were chosen for `auto` in `config`, as a line for the terminal shows them.

    With `train.global_batch=auto` the data decides the global batch later, and a micro-batch that does not divide it is
    lowered then. So what is chosen here is a bound: "train.micro_batch at most 4", and not "train.micro_batch=4".
    """
    texts = []
    for key, value in values.items():
        is_bound = key == MICRO_BATCH and config.train.global_batch == AUTO
        texts += [f"{key} at most {value}"] if is_bound else as_overrides({key: value})
    return texts


def open_keys(config: Any) -> list[str]:
    """Return the keys of USUAL that say `auto`."""
    return [key for key in USUAL if value_of(config, key) == AUTO]


def without_auto(config: Config, dp: int = 1) -> Config:
    """Return `config` with the usual values in place of `auto`, where no plan has decided.

    dp: data-parallel ranks. A micro-batch is then the largest one up to the usual size that divides a rank's rows.
    """
    values = {key: USUAL[key] for key in open_keys(config)}
    values |= {COMPILE: False} if value_of(config, COMPILE) == AUTO else {}
    if not values:
        return config
    total = config.train.global_batch  # type: ignore[attr-defined]
    if "train.micro_batch" in values and isinstance(total, int) and dp > 0 and total > 0:
        values["train.micro_batch"] = largest_divisor(total // dp, USUAL_ROWS)
    return changed(config, values)


@dataclass(frozen=True)
class CompileChoice:
    """The value of `train.compile=auto`.

    Attributes:
        value: Whether layers are compiled.
        reason: Why, for the terminal.
    """

    value: bool
    reason: str


def choose_compile(config: Config, device_type: str, is_here: bool = True) -> CompileChoice:
    """Decide whether layers are compiled with `train.compile=auto`.

    Args:
        config: The recipe.
        device_type: "cuda" or "cpu".
        is_here: Whether the devices are on this machine, whose compilers can be examined. Other machines are taken to
            have compilers.
    """
    if device_type != "cuda":
        return CompileChoice(False, "no CUDA device")
    if config.run.deterministic:  # type: ignore[attr-defined]
        return CompileChoice(False, "run.deterministic=true")
    has_compilers = find_spec("triton") is not None and any(map(shutil.which, C_COMPILERS))
    if is_here and not has_compilers:
        return CompileChoice(False, "Triton and a C compiler are not both installed")
    return CompileChoice(True, "Triton and a C compiler are installed")


def with_compile(config: Config, device_type: str, is_here: bool = True) -> Config:
    """Return `config` with the value of `choose_compile` if `train.compile` is auto."""
    if value_of(config, COMPILE) != AUTO:
        return config
    return changed(config, {COMPILE: choose_compile(config, device_type, is_here).value})


def largest_divisor(number: int, limit: int) -> int:
    """Return the largest divisor of `number` up to `limit`, at least 1."""
    return max([n for n in range(1, min(number, limit) + 1) if number % n == 0], default=1)
