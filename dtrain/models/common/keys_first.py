"""A decoder layer's projections in an order for context parallel: keys and values first, queries while these travel.

    before:  project q, k, v     gather k and v                        attend
    here:    project k, v        begin to gather | project q | wait    attend

In the backward, the gradients of keys and values travel while that of queries goes through its projection. The messages
are the same as before, and so is the order of the sums: the gradient by queries is added to that by keys and values.

Some layers are left out: those whose attention computes groups of heads, which gather one group after the other,
families that normalise q and k together (Olmo), and compiled layers that are not recomputed.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from dtrain.attention.kernels import Gathering
from dtrain.models.common.decoder import Attention, CausalLM, Layer
from dtrain.models.common.micro_batch import AdapterContext

Compiler = Callable[[Callable[..., tuple[Tensor, ...]]], Callable[..., tuple[Tensor, ...]]]


class KeysFirst:
    """The projections of a layer as two functions of tensors, which may be compiled (a `KeysFirstProjection`).

    Args:
        layer: The layer.
        compiled: Compiles a function (`memory.compilation`). None leaves both as written.

    Attributes:
        keys: Computes hidden [B, S, D] -> the input of the projections, k and v.
        queries: Computes the input of the projections -> q, and further tensors of a family's attention.
    """

    def __init__(self, layer: Layer, compiled: Compiler | None = None):
        self.layer, self.attention = layer, layer.self_attn
        self.keys = self._keys if compiled is None else compiled(self._keys)
        self.queries = self._queries if compiled is None else compiled(self._queries)

    def compile_with(self, compiled: Compiler) -> "KeysFirst":
        """Override `KeysFirstProjection.compile_with`."""
        return KeysFirst(self.layer, compiled)

    def start_exchange(self, mask: Any) -> tuple[Callable[..., tuple[Tensor, ...]], Any]:
        """Override `KeysFirstProjection.start_exchange`."""
        exchange = KeyExchange(self, mask)
        return exchange.before_attention, exchange

    def _keys(self, hidden: Tensor, adapters: AdapterContext | None, *rotary: Tensor) -> tuple[Tensor, ...]:
        """Normalise hidden [B, S, D] for the projections, and project it to k and v [B, S, kv, hd]."""
        entered = self.attention.enter(self.layer.input_layernorm(hidden))
        # Keys are projected from a view, whose gradient is summed before that of the queries is added to it.
        return entered, *self.attention.project_keys(entered.view_as(entered), rotary, adapters)

    def _queries(self, entered: Tensor, adapters: AdapterContext | None, *rotary: Tensor) -> tuple[Tensor, ...]:
        """Project normalised hidden states [B, S, D] to q [B, S, H, hd], and further tensors of the family."""
        return self.attention.project_queries(entered, rotary, adapters)


class KeyExchange:
    """The keys and values of one layer in one forward, which are gathered from `before_attention` until `wait`.

    Attributes:
        projection: The layer's projections.
        wait: Waits for keys and values, as `Kernel.over` takes them. Set by `before_attention`.
    """

    def __init__(self, projection: KeysFirst, mask: Any):
        self.projection, self.kernel, self.mask = projection, projection.attention.kernel, mask
        self.wait: Gathering

    def before_attention(self, hidden: Tensor, adapters: AdapterContext | None, *rotary: Tensor) -> tuple[Tensor, ...]:
        """Compute as `Layer.before_attention`, and begin to gather keys and values before queries are projected."""
        entered, k, v = self.projection.keys(hidden, adapters, *rotary)
        self.wait = self.kernel.begin_gather(k, v, self.mask)
        q, *further = self.projection.queries(entered, adapters, *rotary)
        return q, k, v, *further

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
        """Attend to the gathered keys of all ranks, in place of a `DecodingCache`. k and v are not read."""
        all_k, all_v = self.wait()
        return self.kernel.over(q, all_k, all_v, self.mask, scale, sinks)


def project_keys_first(model: CausalLM) -> None:
    """Set `keys_first` of the layers that can project keys first. No collective.

    A layer can do so if it uses `Layer.before_attention` and `Attention.project` unchanged. Layers of the transformers
    library do not have them.
    """
    for layer in model.model.layers:
        if not isinstance(layer, Layer):
            continue
        has_own_before = type(layer).before_attention is not Layer.before_attention
        has_own_project = type(layer.mixer).project is not Attention.project
        layer.keys_first = None if has_own_before or has_own_project else KeysFirst(layer)
