"""Keys and values kept while generating: slot index = position, so rows of different lengths need no bookkeeping.

Prompts are padded on the right. The slots that padding wrote lie beyond its row's position, where no query sees them,
and the row's own tokens overwrite them before one does.
"""

import torch
from torch import Tensor


class KVCache:
    """Per layer two tensors [B, max_length, kv, hd], allocated at the first forward in its dtype and on its device.

    A forward of S tokens either fills the empty cache (positions 0..S-1 in every row) or goes on: S more tokens a row,
    at the positions given. `filled` bounds every position written so far, without asking the device.
    """

    def __init__(self, num_layers: int, max_length: int):
        self.max_length = max_length
        self.filled = 0
        self._positions: Tensor | None = None
        self._keys: list[Tensor | None] = [None] * num_layers
        self._values: list[Tensor | None] = [None] * num_layers

    def begin(self, input_ids: Tensor, positions: Tensor | None) -> Tensor | None:
        """Make room for the tokens of one forward, input_ids [B, S], before the layers write theirs.

        Returns their positions [B, S], or None where they fill the empty cache and see nothing but one another.
        positions None: the tokens follow everything written so far, in every row. Raises ValueError when it is full.
        """
        start, length = self.filled, input_ids.shape[1]
        if start + length > self.max_length:
            raise ValueError(f"the cache holds {self.max_length} positions; {start} + {length} do not fit")
        self.filled += length
        if positions is None and start:
            positions = torch.arange(start, self.filled, device=input_ids.device).expand(input_ids.shape)
        self._positions = positions
        return positions

    def update(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write a layer's keys and values [B, S, kv, hd]; returns the ones to attend to, [B, K, kv, hd].

        K = S in the forward that fills the empty cache, `filled` in those after it.
        """
        if self._keys[layer] is None:
            shape = (keys.shape[0], self.max_length, *keys.shape[2:])
            self._keys[layer], self._values[layer] = keys.new_zeros(shape), values.new_zeros(shape)
        all_keys, all_values = self._keys[layer], self._values[layer]
        if self._positions is None:
            all_keys[:, : self.filled] = keys
            all_values[:, : self.filled] = values
            return keys, values
        rows = torch.arange(keys.shape[0], device=keys.device)[:, None]
        all_keys[rows, self._positions] = keys
        all_values[rows, self._positions] = values
        return all_keys[:, : self.filled], all_values[:, : self.filled]

    def select(self, rows: Tensor) -> None:
        """Keep these rows [n] int64, in this order; a row may be named twice (several samples of one prompt)."""
        for tensors in (self._keys, self._values):
            tensors[:] = [None if tensor is None else tensor.index_select(0, rows) for tensor in tensors]
