"""From the product of hidden states and the head's weight to logits: Gemma 2's softcap and the temperature."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Scaling:
    """logits = softcap · tanh(product / softcap) / temperature (arXiv:2408.00118, section 2); softcap None for none.

    Raises ValueError for a temperature or softcap that is not positive.
    """

    temperature: float
    softcap: float | None

    def __post_init__(self) -> None:
        if self.temperature <= 0 or (self.softcap is not None and self.softcap <= 0):
            raise ValueError(f"temperature={self.temperature} and softcap={self.softcap} must be positive")

    def logits_(self, product: Tensor) -> Tensor:
        """In place."""
        if self.softcap is not None:
            product.div_(self.softcap).tanh_().mul_(self.softcap)
        return product if self.temperature == 1.0 else product.div_(self.temperature)

    def slope(self, logits: Tensor) -> Tensor | float | None:
        """d logits / d product, a new tensor or a number; None for 1."""
        if self.softcap is None:
            return None if self.temperature == 1.0 else 1.0 / self.temperature
        ratio = logits * (self.temperature / self.softcap)
        return ratio.square_().sub_(1).mul_(-1.0 / self.temperature)
