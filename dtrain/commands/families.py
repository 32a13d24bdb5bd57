"""Model families outside of dtrain, for the commands that read a model's directory.

A run directory has config.yaml, whose `model.family` names them. For other directories there is the option --family.
Imports no torch.
"""

import sys
from pathlib import Path

from dtrain.base.errors import UserError
from dtrain.base.plugins import split_import_path
from dtrain.models.registry import FAMILY_KEY, families, register_family
from dtrain.rl.rewards.catalog import find_function_and_file
from dtrain.training.metrics.records import read_recipe


def register_families(directory: Path, named: list[str]) -> None:
    """Register the families of the option --family, and those of the run that a directory belongs to.

    The run's families are printed with their files, because a run may come from a stranger. A module inside of the
    run's own directory is refused for the same reason.

    Args:
        directory: A run, its export, one of its checkpoints, or a model.
        named: Values of --family.

    Raises:
        UserError: If there is no such family.
    """
    for name in named:
        register_family(name)
    run = _find_run(directory)
    if run is None:
        return
    section = read_recipe(run).get("model")
    family = section.get("family") if isinstance(section, dict) else None
    of_run = family if isinstance(family, list) else [family]
    for name in filter(None, of_run):
        architecture = register_family(str(name))
        import_path = f"{families()[architecture].module}:{architecture}"
        _, _, file = find_function_and_file(import_path, "family")
        if Path(file).resolve().is_relative_to(run.resolve()):
            module, _ = split_import_path(import_path)
            text = f"{run / 'config.yaml'} names code inside of the run's own directory, {file}, which is not imported"
            raise UserError(f"{text}. If you trust it, copy it to another directory as the module {module}")
        print(f"{FAMILY_KEY}: {name}, from {file}", file=sys.stderr)


def _find_run(directory: Path) -> Path | None:
    """Return the run that a directory belongs to: itself, or one of the three directories above it. None if none."""
    absolute = directory.absolute()
    for candidate in (absolute, *list(absolute.parents)[:3]):
        if (candidate / "config.yaml").is_file():
            return candidate
    return None
