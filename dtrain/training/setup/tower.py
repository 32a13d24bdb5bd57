"""Stage tower: the model and its optimizer anew, with the vision tower, where the data have images."""

from functools import partial

from dtrain.base.errors import UserError
from dtrain.training.host import Host
from dtrain.training.setup import model, optimizer
from dtrain.training.spec import RunSpec


def resolve(spec: RunSpec, host: Host) -> bool:
    """Build the model that the data want, on the first rank, where it is not the one that is built."""
    if host.known:
        return True
    if spec.recipe.train.vision != "frozen" and spec.rows and not spec.has_images:
        return host.ask(_refuse, spec.recipe.train.vision) is not None
    has_problem = spec.model is None and spec.built_for_images is not None and host.ranks.is_first  # of a dry run
    if spec.built_for_images != spec.has_images and not has_problem:
        for stage in (model, optimizer):
            host.first(partial(stage.build, spec))
        spec.built_for_images = spec.has_images
    return True


def _refuse(vision: str) -> None:
    raise UserError(
        f"train.vision={vision}: no data have images, so the model is built without its vision tower: set "
        "train.vision=frozen"
    )
