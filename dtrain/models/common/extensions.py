"""Interfaces by which other packages change how a linear layer stores its weight and what computes its forward.

The models import neither adapters nor 4-bit weights: `dtrain.adapters` implements these protocols and sets the objects
on the layers of a model. Shapes: m rows, E experts, ep ranks that share the experts.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from dtrain.base.batch import Batch

ReadParameter = Callable[[str], Tensor]
"""Returns a parameter of the layer, or this rank's part of it, by name."""


class WeightStorage(Protocol):
    """How the parameters of a linear layer store its weight W [out, in]."""

    def product(self, x: Tensor, bias: Tensor | None, read: ReadParameter) -> Tensor:
        """Return x · Wᵀ + bias, [.., in] -> [.., out]."""

    def matrix(self, read: ReadParameter) -> Tensor:
        """Return W [out, in] as a dense tensor in the dtype of computation."""


class ExpertStorage(Protocol):
    """How the parameters of an expert layer store its stack of weights W [E, out, in]."""

    def grouped(self, x: Tensor, counts: Tensor, read: ReadParameter) -> Tensor:
        """Return each row's product with the matrix of its expert.

        Args:
            x: Rows sorted by expert, [m, in].
            counts: Rows of each expert on this rank, [E/ep] int64.
            read: Returns a parameter by name.

        Returns:
            [m, out].
        """

    def matrix(self, read: ReadParameter) -> Tensor:
        """Return W [E, out, in] as a dense tensor in the dtype of computation."""


class ExpertMatrices(Protocol):
    """A stack of matrices [E, out, in] that returns dense matrices by index. A tensor is one."""

    @property
    def shape(self) -> Sequence[int]:
        """The sizes [E, out, in]."""

    def __getitem__(self, index: Any, /) -> Tensor:
        """Return a dense matrix [out, in] for a number, or dense matrices [n, out, in] for a slice."""


class LinearWrapper(Protocol):
    """What computes the forward of a linear layer in place of the layer.

    Attributes:
        scale: Factor of what the wrapper adds.
    """

    scale: float

    def __call__(self, layer: Any, x: Tensor) -> Tensor:
        """Return the output of `layer`, a `decoder.Linear`: [.., in] -> [.., out]."""


class OutputWrapper(Protocol):
    """What is added to the output of an expert layer or a router.

    Attributes:
        scale: Factor of the addition.
    """

    scale: float

    def __call__(self, layer: Any, x: Tensor, out: Tensor, counts: Tensor | None = None) -> Tensor:
        """Return `out` [m, out] with the addition.

        Args:
            layer: The `moe.ExpertLinear` or `moe.Router`.
            x: Its input, [m, in].
            out: Its output, [m, out].
            counts: Rows of each expert, [E/ep] int64. None for a router.
        """


class WrapperState(Protocol):
    """State that the wrappers of a model share (`adapters.lora.AdapterState`)."""

    config: Any
    on: bool
    step: int
    dropout: float
    tokens: Tensor | None

    def numbers(self, batch: Batch) -> Tensor:
        """Return the number of each token from which dropout is computed, [B, S] int64."""


class KeysBeforeQueries(Protocol):
    """An order of the projections in which keys of other ranks travel while queries are projected."""

    def under(self, mask: Any) -> tuple[Callable[..., tuple[Tensor, ...]], Any]:
        """Return, for one forward with `mask`, what replaces `Layer.before`, and the cache that attends."""

    def compiled_by(self, compiled: Callable[..., Any]) -> Any:
        """Return the same with its two functions compiled."""
