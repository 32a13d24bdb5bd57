"""Which experts an engine's router took, on the wire: a NumPy array as a file (.npy) in base64, as vLLM has it, or
int32 in base64 without a head, SGLang's; and what a trainer takes of it.

An array is [tokens, layers, k], of prompt and completion together, without the completion's last token, which nobody
has read; some servers send a row for it too. Some count layers without experts among the layers, and some write -1
where they do not know.
"""

import ast
import base64
import binascii
import math
import struct
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dtrain.errors import UserError
from dtrain.models.config import ModelConfig

MAGIC = b"\x93NUMPY"
LONGEST_HEAD = 4096
_KINDS = {
    **{"|u1": torch.uint8, "|i1": torch.int8, "<i2": torch.int16, "<u2": torch.uint16},
    **{"<i4": torch.int32, "<u4": torch.uint32, "<i8": torch.int64},
}


def to_npy_text(routed: Tensor) -> str:
    """An int16 tensor [..] on the host as .npy in base64."""
    head = str({"descr": "<i2", "fortran_order": False, "shape": tuple(routed.shape)})
    head += " " * (-(len(MAGIC) + 4 + len(head) + 1) % 64) + "\n"
    data = routed.numpy().tobytes()  # row by row
    return base64.b64encode(MAGIC + b"\x01\x00" + struct.pack("<H", len(head)) + head.encode() + data).decode()


@dataclass(frozen=True)
class RoutedReader:
    """What servers say of a model whose sparse layers have these `numbers`, of `count` experts each, `top` of a token,
    among `layers` layers."""

    count: int
    top: int
    numbers: tuple[int, ...]
    layers: int

    @classmethod
    def of(cls, config: ModelConfig) -> "RoutedReader":
        """Raises ValueError for a model without experts."""
        if (sizes := config.experts) is None:
            raise ValueError("a model without experts routes nothing")
        return cls(sizes.count, sizes.top, tuple(sizes.layers), config.num_hidden_layers)

    def nothing(self, tokens: int) -> Tensor:
        """[tokens, sparse layers, k] int16 of -1: nobody says."""
        return torch.full((tokens, len(self.numbers), self.top), -1, dtype=torch.int16)

    def read(self, text: Any, tokens: int) -> Tensor:
        """What a server says of `tokens` tokens, prompt and completion: [tokens, sparse layers, k] int16, -1 where it
        does not say. Nothing that it says is believed: raises UserError for another shape, an expert that there is not,
        and one that a token has twice."""
        found = self._array(text, tokens)
        wanted = f"[{tokens - 1}, {len(self.numbers)}, {self.top}]"
        by_layer = found.dim() == 3 and found.shape[1] == self.layers
        if found.dim() != 3 or found.shape[0] not in (tokens - 1, tokens) or found.shape[2] != self.top:
            raise UserError(f"its routed experts are {list(found.shape)}, not {wanted}: does it serve this very model?")
        if by_layer:
            found = found[:, list(self.numbers)]
        if found.shape[1] != len(self.numbers):
            raise UserError(f"its routed experts are {list(found.shape)}, not {wanted}: does it serve this very model?")
        ordered = found.sort(-1).values
        is_unknown = (ordered == -1).all(-1)  # [tokens, layers]
        outside = ((ordered < 0) | (ordered >= self.count)).any(-1) & ~is_unknown
        if outside.any():
            low, high = int(found.min()), int(found.max())
            raise UserError(f"its routed experts are from {low} to {high}, and the model has {self.count} of a layer")
        if ((ordered.diff(dim=-1) == 0).any(-1) & ~is_unknown).any():
            raise UserError("its routed experts name one twice for a token, where the model takes different ones")
        # A token is known in all layers, or in none.
        ordered = ordered.masked_fill(is_unknown.any(1)[:, None, None], -1).to(torch.int16)
        rest = tokens - 1
        return torch.cat([ordered[:rest], self.nothing(tokens - rest)])

    def _array(self, text: Any, tokens: int) -> Tensor:
        """[..] int64"""
        if not isinstance(text, str):
            raise UserError(f"its routed experts are a {type(text).__name__}, not a text in base64")
        try:
            data = base64.b64decode(text, validate=True)
            return _of_npy(data) if data.startswith(MAGIC) else self._of_int32(data, tokens)
        except (binascii.Error, ValueError, KeyError, SyntaxError, struct.error, TypeError) as error:
            raise UserError(f"its routed experts cannot be read: neither .npy nor int32 in base64 ({error})") from error

    def _of_int32(self, data: bytes, tokens: int) -> Tensor:
        """As many layers as fit."""
        flat = torch.frombuffer(bytearray(data), dtype=torch.int32).long() if data else torch.zeros(0).long()
        for rows in (tokens - 1, tokens):
            for layers in dict.fromkeys((len(self.numbers), self.layers)):
                if len(flat) == rows * layers * self.top:
                    return flat.view(rows, layers, self.top)
        raise ValueError(f"{len(flat)} numbers for {tokens} tokens")


def _of_npy(data: bytes) -> Tensor:
    """[..] int64 of a .npy file's bytes."""
    size = "<H" if data[6] == 1 else "<I"
    (length,) = struct.unpack_from(size, data, 8)
    start = 8 + struct.calcsize(size)
    if length > LONGEST_HEAD:
        raise ValueError(f"a head of {length} bytes")
    head = ast.literal_eval(data[start : start + length].decode("latin1").strip())
    shape = tuple(head["shape"])
    if head["fortran_order"] and len(shape) > 1 or not all(isinstance(one, int) and one >= 0 for one in shape):
        raise ValueError(f"the array {head}")
    rest = bytearray(data[start + length :])
    kind = _KINDS[head["descr"]]
    flat = torch.frombuffer(rest, dtype=kind).long() if rest else torch.zeros(0).long()
    if len(flat) != math.prod(shape):
        raise ValueError(f"{len(flat)} numbers for {list(shape)}")
    return flat.view(shape)
