"""Stage tokenizer: the tokenizer of the model's directory."""

from typing import TYPE_CHECKING

from dtrain.data import Tokenizer
from dtrain.run.host import Host

if TYPE_CHECKING:
    from dtrain.run.spec import RunSpec


def resolve(spec: "RunSpec", host: Host) -> bool:
    """Read the tokenizer. Raises UserError."""
    spec.tokenizer = Tokenizer.from_directory(spec.recipe.model.directory)
    return True
