"""The interface of a KV cache to the models: what a forward reads and writes in place of its own kernel and masks."""

from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from dtrain.attention.linear.layer import LinearMask


class Cached(Protocol):
    """The interface that a model's forward reads and writes in place of its own kernel and masks.

    positions: [B or 1, S], the rotary positions of the tokens, but for images that have their own. last: [B], which of
    the S is each row's last one that counts; None where S is 1. turns: the rotary frequencies on the device, by what
    they are made from; the model fills it. bare: whether modules are called without their hooks, which no graph can
    hold.
    """

    positions: Tensor
    last: Tensor | None
    turns: dict[Any, Tensor]
    bare: bool

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, held: bool = False, sinks: Tensor | None = None
    ) -> Tensor:
        """q [B, S, H, hd], k and v [B, S, kv, hd] → [B, S, H, hd]. held: whether `layer` has kept k and v already in
        this forward, and another layer reads them. sinks [H]: as kernels take them."""
        ...

    def linear_mask(self, width: int) -> "LinearMask | None":
        """Return the mask of convolutions of this width over whole prompts; None where rows go on by one token."""
        ...

    def states(self, layer: int) -> tuple[Tensor, ...]:
        """Return what `keep` was last given of each row in this layer of linear attention, [B, ..] each."""
        ...

    def keep(self, layer: int, *states: Tensor) -> None:
        """Keep what each row goes on from, [B, ..] each."""
        ...
