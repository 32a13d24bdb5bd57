"""Routed experts on the wire, as an engine's router took them: a NumPy array as a file (.npy) in base64, as vLLM has
it, or int32 in base64 without a head, SGLang's; and the checked tensor that a trainer takes of it.

An array is [tokens, layers, k], of prompt and completion together, without the completion's last token, which no
forward pass has read; some servers send a row for it too. Some count layers without experts among the layers, some
write -1 where they do not know, and vLLM 0.21 sends prompt and completion apart, as lists.
"""

import base64
import io
from dataclasses import dataclass
from tokenize import TokenError
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dtrain.base.errors import UserError
from dtrain.models.common.config import ModelConfig

MAGIC = b"\x93NUMPY"
LONGEST_HEAD = 4096


def to_npy_text(routed: Tensor) -> str:
    """Return an int16 tensor [..] on the host as .npy in base64."""
    file = io.BytesIO()
    np.save(file, routed.numpy())
    return base64.b64encode(file.getvalue()).decode()


@dataclass(frozen=True)
class RoutedReader:
    """Reader of the routed experts that servers send for a model whose sparse layers have these `numbers`, of `count`
    experts each, `top` of a token, among `layers` layers."""

    count: int
    top: int
    numbers: tuple[int, ...]
    layers: int

    @classmethod
    def of(cls, config: ModelConfig) -> "RoutedReader":
        """Return the reader of a model. Raises ValueError for one without experts."""
        if (sizes := config.experts) is None:
            raise ValueError("a model without experts routes nothing")
        return cls(sizes.count, sizes.top, tuple(sizes.layers), config.num_hidden_layers)

    def nothing(self, tokens: int) -> Tensor:
        """Return [tokens, sparse layers, k] int16 of -1: unknown."""
        return torch.full((tokens, len(self.numbers), self.top), -1, dtype=torch.int16)

    def read(self, sent: Any, tokens: int) -> Tensor:
        """Return the experts of `tokens` tokens, prompt and completion, that a server has `sent` in one part or a tuple
        of them: [tokens, sparse layers, k] int16, -1 where it does not say. Everything is checked: raises UserError for
        another shape, an expert that there is not, and one that a token has twice."""
        parts = [self._array(part, tokens) for part in (sent if isinstance(sent, tuple) else (sent,))]
        shapes = [[*part.shape] for part in parts]
        depths = {tuple(shape[1:]) for shape in shapes if shape[0]}
        fits = depths <= {(len(self.numbers), self.top)} or depths == {(self.layers, self.top)}
        if not fits or sum(shape[0] for shape in shapes) not in (tokens - 1, tokens):
            shown = " and ".join(map(str, shapes))
            wanted = f"[{tokens - 1}, {len(self.numbers)}, {self.top}]"
            raise UserError(f"its routed experts are {shown}, not {wanted}: does it serve this very model?")
        experts = torch.cat([part for part in parts if len(part)] or [self.nothing(0).long()])
        if experts.shape[1] != len(self.numbers):
            experts = experts[:, list(self.numbers)]
        ordered = experts.sort(-1).values
        is_unknown = (ordered == -1).all(-1)  # [tokens, layers]
        outside = ((ordered < 0) | (ordered >= self.count)).any(-1) & ~is_unknown
        if outside.any():
            low, high = int(experts.min()), int(experts.max())
            raise UserError(f"its routed experts are from {low} to {high}, and the model has {self.count} of a layer")
        if ((ordered.diff(dim=-1) == 0).any(-1) & ~is_unknown).any():
            raise UserError("its routed experts name one twice for a token, where the model takes different ones")
        # A token is known in all layers, or in none.
        ordered = ordered.masked_fill(is_unknown.any(1)[:, None, None], -1).to(torch.int16)
        return torch.cat([ordered[: tokens - 1], self.nothing(1)])

    def _array(self, part: Any, tokens: int) -> Tensor:
        """Return one part, a list or a text, as [n, ..] int64. Raises UserError for what cannot be read."""
        try:
            if isinstance(part, list):
                experts = torch.tensor(part) if part else torch.zeros(0, dtype=torch.int64)
                if experts.is_floating_point() or experts.dtype == torch.bool:
                    raise ValueError("numbers that are not whole")
                return experts
            data = base64.b64decode(part, validate=True)
            return _of_npy(data) if data.startswith(MAGIC) else self._of_int32(data, tokens)
        except (ValueError, TypeError, OverflowError, RuntimeError, SyntaxError, TokenError) as error:
            raise UserError(f"its routed experts cannot be read: neither .npy nor int32 in base64 ({error})") from error

    def _of_int32(self, data: bytes, tokens: int) -> Tensor:
        """Return [n, layers, k] int64 of bare int32 numbers; n and layers are those that fit their count."""
        flat = torch.frombuffer(bytearray(data), dtype=torch.int32).long() if data else torch.zeros(0).long()
        for rows in (tokens - 1, tokens):
            for layers in dict.fromkeys((len(self.numbers), self.layers)):
                if len(flat) == rows * layers * self.top:
                    return flat.view(rows, layers, self.top)
        raise ValueError(f"{len(flat)} numbers for {tokens} tokens")


def _of_npy(data: bytes) -> Tensor:
    """Return [n, ..] int64 of a .npy file's bytes. Raises ValueError."""
    file = io.BytesIO(data)
    read_head = np.lib.format.read_array_header_1_0 if data[6:7] == b"\x01" else np.lib.format.read_array_header_2_0
    np.lib.format.read_magic(file)
    shape, is_fortran, kind = read_head(file, max_header_size=LONGEST_HEAD)
    if is_fortran or not shape or kind.kind not in "iu":
        raise ValueError(f"the array {kind.str} {shape}")
    return torch.from_numpy(np.frombuffer(file.read(), kind).reshape(shape).astype(np.int64))
