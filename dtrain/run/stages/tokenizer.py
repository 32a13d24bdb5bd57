"""Stage tokenizer: the tokenizer of the model's directory."""

from typing import TYPE_CHECKING

from dtrain.base.errors import UserError
from dtrain.data import Tokenizer
from dtrain.run.host import DryHost, Host

if TYPE_CHECKING:
    from dtrain.run.spec import RunSpec


def resolve(spec: "RunSpec", host: Host) -> bool:
    """Read the tokenizer. A dry run goes no further without one: `preflight` has told why."""
    if isinstance(host, DryHost) and not spec.recipe.model.path:
        return False
    try:
        spec.tokenizer = Tokenizer.from_directory(spec.recipe.model.directory)
    except (OSError, UserError):
        if not isinstance(host, DryHost):
            raise
        return False
    return True
