"""The linear layer of all families, and the interfaces by which `dtrain.adapters` changes it.

The models import neither adapters nor 4-bit weights. `dtrain.adapters` sets objects on the layers of a model:

    weight_storage   stores the weight in another format, for example NF4
    wrapper          computes the forward in place of the layer, for example LoRA

Neither owns tensors. They read parameters that are registered on the layer, by name, so that tensor parallelism, FSDP,
the optimizer and checkpoints handle these like any other parameter. `moe` has the counterparts for experts.
"""

from collections.abc import Callable
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor, nn

from dtrain.base.batch import Batch
from dtrain.models.common.micro_batch import AdapterContext
from dtrain.parallel.tensor import LocalParameters, TensorParallel

ReadParameter = Callable[[str], Tensor]
"""Returns a parameter of the layer, or this rank's part of it, by name."""


class WeightStorage(Protocol):
    """Storage of a linear layer's weight W [out, in] in the layer's parameters."""

    def product(self, x: Tensor, bias: Tensor | None, read: ReadParameter) -> Tensor:
        """Return x · Wᵀ + bias, [.., in] -> [.., out]."""

    def dense_weight(self, read: ReadParameter) -> Tensor:
        """Return W [out, in] as a dense tensor in the dtype of computation."""


class DenseWeight:
    """Storage of W in one parameter, `weight` [out, in]."""

    def product(self, x: Tensor, bias: Tensor | None, read: ReadParameter) -> Tensor:
        """Override `WeightStorage.product`: [.., in] -> [.., out]."""
        return F.linear(x, read("weight"), bias)

    def dense_weight(self, read: ReadParameter) -> Tensor:
        """Return the parameter `weight`, [out, in]."""
        return read("weight")


class LinearWrapper(Protocol):
    """What computes the forward of a linear layer in place of the layer.

    Attributes:
        scale: Factor of what the wrapper adds.
    """

    scale: float

    def __call__(self, layer: "Linear", x: Tensor, context: AdapterContext | None) -> Tensor:
        """Return the output of `layer` in the micro-batch of `context`, [.., in] -> [.., out].

        If the context is not `enabled`, this is the layer's own product.
        """


class WrapperSettings(Protocol):
    """Settings that the wrappers of a model share."""

    @property
    def dropout(self) -> float:
        """Share of the inputs that the wrappers drop in training."""

    def dropout_tokens(self, batch: Batch, step: int) -> Tensor:
        """Return the number of each token from which dropout is computed in an optimizer step, [B, S] int64."""


class Linear(LocalParameters, nn.Linear):
    """A linear layer of a block.

    Attributes:
        weight_storage: Storage of the weight in the layer's parameters.
        wrapper: Computes the forward in place of the layer. None leaves the forward as it is.
        tp: Set by the style `rowwise`, under which a rank stores some of the weight's columns.
        cut: Set by the style `sequence`, which may divide the tokens of the input.
        key_heads: Number of key heads, in a projection to keys or values.
    """

    weight_storage: WeightStorage = DenseWeight()
    wrapper: LinearWrapper | None = None
    tp: TensorParallel | None = None
    sequence_tp: TensorParallel | None = None
    key_heads: int | None = None

    def forward(self, x: Tensor, adapters: AdapterContext | None = None) -> Tensor:
        """Compute the layer's output, [..., in] -> [..., out].

        Args:
            x: [..., in].
            adapters: The micro-batch's context for the wrapper. None: the wrapper takes part without dropout.
        """
        if self.wrapper is not None:
            return self.wrapper(self, x, adapters)
        bias = None if self.bias is None else self.local("bias")
        return self.product(x, bias)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Compute x · Wᵀ + bias without the wrapper, [..., in] -> [..., out]."""
        return self.weight_storage.product(x, bias, self.local)

    def dense_weight(self, part: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Return W as a dense tensor in the dtype of computation.

        Args:
            part: Returns the tensor to read for each parameter. None reads what this rank computes with inside a
                forward: [out/tp, in] or [out, in/tp] under tensor parallel.

        Returns:
            [out, in].
        """
        if part is None:
            return self.weight_storage.dense_weight(self.local)
        return self.weight_storage.dense_weight(lambda name: part(getattr(self, name)))
