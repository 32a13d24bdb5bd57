"""What every method can do; a method's own file says how it differs."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor


class Method:
    """The base of the methods. What a method keeps from step to step and a resumed run needs goes through three of its
    functions; one that keeps nothing leaves them as they are.

    state()      its numbers and words as JSON, the same on every rank
    tensors()    its tensors by name: plain ones (the same on every rank), DTensors, or a `checkpoint.pieces.Piece` of
                 what the ranks hold together; all ranks give the same names
    load(state)  for a resume, before the first step: takes `state()` of the save back and makes room, so that
                 `tensors()` gives tensors of the saved sizes, which are then filled in place. On another world size
                 the ranks may ask for other pieces of them than were saved.
    """

    def state(self) -> dict[str, Any]:
        return {}

    def tensors(self) -> dict[str, Tensor]:
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        pass
