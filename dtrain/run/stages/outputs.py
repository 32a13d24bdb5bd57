"""Stage outputs: the run's directory, its metrics, its export."""

from typing import TYPE_CHECKING

from dtrain.base.files import refuse_unwritable
from dtrain.run.host import Host

if TYPE_CHECKING:
    from dtrain.run.spec import RunSpec


def resolve(spec: "RunSpec", host: Host) -> bool:
    """Take the run's directory, or look whether it could be taken; refuse an export that cannot be written."""
    host.open_outputs(spec)
    if spec.recipe.checkpoint.export != "none":
        host.first(lambda: _refuse_unwritable(spec))
    return True


def _refuse_unwritable(spec: "RunSpec") -> None:
    if spec.run.path.is_dir():
        refuse_unwritable(spec.run.export)
