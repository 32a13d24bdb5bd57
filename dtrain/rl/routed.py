"""Routed experts on the wire, as an engine's router took them: a NumPy array as a file (.npy) in base64, as vLLM has
it, or int32 in base64 without a head, SGLang's; and the checked tensor that a trainer takes of it.

An array is [tokens, layers, k], of prompt and completion together, without the completion's last token, which no
forward pass has read; some servers send a row for it too. Some count layers without experts among the layers, some
write -1 where they do not know, and vLLM 0.21 sends prompt and completion apart, as lists.
"""

import ast
import base64
import math
import struct
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dtrain.base.errors import UserError
from dtrain.models.common.config import ModelConfig

MAGIC = b"\x93NUMPY"
LONGEST_HEAD = 4096
_KINDS = {
    **{"|u1": torch.uint8, "|i1": torch.int8, "<i2": torch.int16, "<u2": torch.uint16},
    **{"<i4": torch.int32, "<u4": torch.uint32, "<i8": torch.int64},
}


def to_npy_text(routed: Tensor) -> str:
    """Return an int16 tensor [..] on the host as .npy in base64."""
    head = str({"descr": "<i2", "fortran_order": False, "shape": tuple(routed.shape)})
    head += " " * (-(len(MAGIC) + 4 + len(head) + 1) % 64) + "\n"
    data = routed.numpy().tobytes()  # row by row
    return base64.b64encode(MAGIC + b"\x01\x00" + struct.pack("<H", len(head)) + head.encode() + data).decode()


@dataclass(frozen=True)
class RoutedExpertsReader:
    """Reader of the routed experts that servers send for a model whose sparse layers have these `numbers`, of `count`
    experts each, `top` of a token, among `layers` layers."""

    count: int
    top: int
    numbers: tuple[int, ...]
    layers: int

    @classmethod
    def of(cls, config: ModelConfig) -> "RoutedExpertsReader":
        """Return the reader of a model. Raises ValueError for one without experts."""
        if (sizes := config.experts) is None:
            raise ValueError("a model without experts routes nothing")
        return cls(sizes.num_experts, sizes.top_k, tuple(sizes.layers), config.num_hidden_layers)

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
        except (ValueError, TypeError, LookupError, SyntaxError, OverflowError, RuntimeError, struct.error) as error:
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
    """Return [n, ..] int64 of a .npy file's bytes."""
    size = "<H" if data[6] == 1 else "<I"
    (length,) = struct.unpack_from(size, data, 8)
    start = 8 + struct.calcsize(size)
    if length > LONGEST_HEAD:
        raise ValueError(f"a head of {length} bytes")
    head = ast.literal_eval(data[start : start + length].decode("latin1").strip())
    shape = tuple(head["shape"])
    if head["fortran_order"] or not shape or not all(isinstance(extent, int) and extent >= 0 for extent in shape):
        raise ValueError(f"the array {head}")
    rest = bytearray(data[start + length :])
    kind = _KINDS[head["descr"]]
    flat = torch.frombuffer(rest, dtype=kind).long() if rest else torch.zeros(0).long()
    if len(flat) != math.prod(shape):
        raise ValueError(f"{len(flat)} numbers for {list(shape)}")
    return flat.view(shape)
