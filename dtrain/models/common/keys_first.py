"""The part of a decoder layer before attention, in an order for context parallel.

Where a kernel gathers keys, a layer projects keys and values first, and queries while these travel. Backward the
gradients of keys and values travel while that of queries goes through their projection. Messages are the same, and
sums are added up in the same order: those of queries to those of keys and values.

Left out are layers whose attention goes by groups of heads, which gather one after the other; families that norm q and
k together (Olmo); and compiled layers that are not computed again.
"""

from collections.abc import Callable
from typing import Any, cast

from torch import Tensor

from dtrain.attention.kernels import Gathering
from dtrain.models.common.decoder import Attention, CausalLM, Layer
from dtrain.models.common.micro_batch import AdapterContext

Compiler = Callable[[Callable[..., tuple[Tensor, ...]]], Callable[..., tuple[Tensor, ...]]]


class KeysFirst:
    """Layer's part before attention as two functions of tensors, each as `memory.compilation` gives it."""

    def __init__(self, layer: Layer, compiled: Compiler = lambda function: function):
        self.layer, self.attention = layer, layer.self_attn
        self.keys, self.queries = compiled(self._keys), compiled(self._queries)

    def compile_with(self, compiled: Compiler) -> "KeysFirst":
        return KeysFirst(self.layer, compiled)

    def start_exchange(self, mask: Any) -> tuple[Callable[..., tuple[Tensor, ...]], Any]:
        """Return what a layer calls in place of `before`, and what attends in place of its kernel and `mask`: once."""
        exchange = KeyExchange(self, mask)
        return exchange.before_attention, exchange

    def _keys(self, hidden: Tensor, adapters: AdapterContext | None, *rotary: Tensor) -> tuple[Tensor, ...]:
        """hidden [B, S, D] -> as projections take it, and k and v [B, S, kv, hd]"""
        entered = self.attention.enter(self.layer.input_layernorm(hidden))
        # A view of its own: its gradient is added up before that of queries comes to it.
        return entered, *self.attention.project_keys(entered.view_as(entered), rotary, adapters)

    def _queries(self, entered: Tensor, adapters: AdapterContext | None, *rotary: Tensor) -> tuple[Tensor, ...]:
        """[B, S, D] -> q [B, S, H, hd], and what else a family's attention takes"""
        return self.attention.project_queries(entered, rotary, adapters)


class KeyExchange:
    """Keys and values of one layer and forward, on their way to all ranks from `before` until `wait`."""

    def __init__(self, of: KeysFirst, mask: Any):
        self.projection, self.kernel, self.mask = of, of.attention.kernel, mask
        self.wait: Gathering  # for keys and values as `Kernel.over` takes them

    def before_attention(self, hidden: Tensor, adapters: AdapterContext | None, *rotary: Tensor) -> tuple[Tensor, ...]:
        """Compute as `Layer.before_attention`, and begin the exchange in between."""
        entered, k, v = self.projection.keys(hidden, adapters, *rotary)
        self.wait = self.kernel.begin_gather(k, v, self.mask)
        q, *more = self.projection.queries(entered, adapters, *rotary)
        return q, k, v, *more

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        is_stored: bool = False,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend as a cache does, to the keys of all ranks; k and v are this rank's."""
        return self.kernel.over(q, *self.wait(), self.mask, scale, sinks)


def project_keys_first(model: CausalLM) -> None:
    """Have the layers of `model` project keys first, where they project as `Attention` does. No collective."""
    for layer in cast(list[Layer], model.model.layers):
        is_plain = (
            type(layer).before_attention is Layer.before_attention and type(layer.mixer).project is Attention.project
        )
        layer.keys_first = KeysFirst(layer) if is_plain else None
