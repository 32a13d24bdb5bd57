"""The linear layer of all families, and the interfaces through which `dtrain.adapters` changes it.

The models import neither adapters nor 4-bit weights. Instead, `dtrain.adapters` sets two objects on a layer:

    weight_storage   stores the weight in another format, for example NF4
    wrapper          computes the forward in place of the layer, for example LoRA

Both read parameters by name that are registered on the layer. So tensor parallelism, FSDP, the optimizer and
checkpoints handle these parameters like any others. `moe` has the counterparts for experts.
"""

from collections.abc import Callable
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor, nn

from dtrain.base.batch import Batch
from dtrain.models.common.micro_batch import AdapterContext
from dtrain.parallel.tensor import LocalParameters, TensorParallel

ReadParameter = Callable[[str], Tensor]
"""Returns a parameter of the layer, or this rank's shard of it, by name."""


class WeightStorage(Protocol):
    """Storage of a linear layer's weight W [out, in] in the layer's parameters."""

    def product(self, x: Tensor, bias: Tensor | None, read: ReadParameter) -> Tensor:
        """Compute x · Wᵀ + bias.

        Args:
            x: [.., in].
            bias: [out], or None.
            read: Returns a parameter by name.

        Returns:
            [.., out].
        """

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
    """Computes the forward of a linear layer in place of the layer, for example LoRA.

    Attributes:
        scale: Factor of the wrapper's addition.
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
        """Probability with which the wrappers drop an input element in training."""

    def dropout_tokens(self, batch: Batch, step: int) -> Tensor:
        """Return a number for each token, from which dropout is computed in an optimizer step, [B, S] int64."""


class Linear(LocalParameters, nn.Linear):
    """A linear layer of a block.

    Attributes:
        weight_storage: Storage of the weight in the layer's parameters.
        wrapper: Computes the forward in place of the layer. None leaves the forward as it is.
        tp: Set by the style `rowwise`, under which a rank stores some of the weight's columns.
        sequence_tp: Set by the style `sequence`. Under sequence parallel, a rank computes some of the tokens.
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
            adapters: Context of the micro-batch for the wrapper. None: the wrapper takes part without dropout.
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
            part: Returns the tensor to read in place of each parameter. None reads this rank's shard, as in a forward:
                [out/tp, in] or [out, in/tp] under tensor parallelism.

        Returns:
            [out, in], or its shard.
        """
        if part is None:
            return self.weight_storage.dense_weight(self.local)
        return self.weight_storage.dense_weight(lambda name: part(getattr(self, name)))
