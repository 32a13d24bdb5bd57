"""Choice of what is trained of a vision tower, by `train.vision`."""

from collections.abc import Collection

from dtrain.base.name_patterns import matched
from dtrain.models.vision.common import VisionTower
from dtrain.recipe.schema import Train


def frozen_names(section: Train, tower: VisionTower) -> set[str]:
    """Return the names, in the model of `tower`, of its parameters that `train.vision` freezes."""
    trained = {"frozen": (), "projector": tower.projector, "all": ("*",)}[section.vision]
    return {f"model.{name}" for name, _ in tower.named_parameters() if not matched([name], trained)}


def frozen_patterns(section: Train, tower: VisionTower, names: Collection[str]) -> list[str]:
    """Return a line for each pattern of `train.train_only` that names only what `train.vision` freezes. names: of all
    parameters of the model."""
    frozen = frozen_names(section, tower)
    by_pattern = {pattern: {name for name in names if matched([name], [pattern])} for pattern in section.train_only}
    return [
        f"train.train_only: {pattern} names only parameters that train.vision={section.vision} freezes: set "
        "train.vision=all"
        for pattern, named in by_pattern.items()
        if named and named <= frozen
    ]
