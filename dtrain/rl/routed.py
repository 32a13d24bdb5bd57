"""Routed experts on the wire: which experts an engine's router chose for each token.

A server sends an array [tokens, layers, k] for prompt and completion together, for example experts 3 and 7 of 8 for one
token in each of two layers, [[[3, 7], [0, 5]], ...]. No forward has read the completion's last token, so the array has
no row for that token, though some servers send one. The formats are

    vLLM              a NumPy file (.npy) in base64
    vLLM 0.21         the same, prompt and completion apart, as lists
    SGLang            int32 numbers in base64 without a header; the shape follows from their count

Some servers count layers without experts as layers, too. -1 means that the server does not know.
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

MAGIC = b"\x93NUMPY"  # first bytes of a .npy file
MAX_HEADER_BYTES = 4096
FIX_MODEL = "Serve the model of the run"
_NPY_DTYPES = {
    "|u1": torch.uint8,
    "|i1": torch.int8,
    "<i2": torch.int16,
    "<u2": torch.uint16,
    "<i4": torch.int32,
    "<u4": torch.uint32,
    "<i8": torch.int64,
}


def to_npy_text(routed: Tensor) -> str:
    """Encode a tensor as a .npy file in base64.

    Args:
        routed: Routed experts, [tokens, layers, k] int16, on the host.

    Example:
        >>> len(base64.b64decode(to_npy_text(torch.zeros(2, 3, dtype=torch.int16))))  # 128 bytes of head, 12 of data
        140
    """
    header = str({"descr": "<i2", "fortran_order": False, "shape": tuple(routed.shape)})
    # Spaces fill the file's head up to a multiple of 64 bytes: magic, 2 bytes version, 2 bytes length, header, newline.
    num_bytes = len(MAGIC) + 4 + len(header) + 1
    header += " " * (-num_bytes % 64) + "\n"
    version = b"\x01\x00"
    length = struct.pack("<H", len(header))
    data = routed.numpy().tobytes()  # in C order
    return base64.b64encode(MAGIC + version + length + header.encode() + data).decode()


@dataclass(frozen=True)
class RoutedExpertsReader:
    """Reads and checks the routed experts that servers send for a model.

    Attributes:
        num_experts: Experts of a layer.
        top_k: Experts of a token.
        sparse_layers: Indices of the layers with experts.
        num_layers: Layers of the model.
    """

    num_experts: int
    top_k: int
    sparse_layers: tuple[int, ...]
    num_layers: int

    @classmethod
    def of(cls, config: ModelConfig) -> "RoutedExpertsReader":
        """Return the reader for a model. Raises ValueError for a model without experts."""
        experts = config.experts
        if experts is None:
            raise ValueError("a model without experts routes nothing")
        return cls(experts.num_experts, experts.top_k, tuple(experts.layers), config.num_hidden_layers)

    def unknown(self, tokens: int) -> Tensor:
        """Return the experts of tokens whose experts are unknown: -1, [tokens, sparse layers, k] int16.

        Example:
            >>> RoutedExpertsReader(num_experts=8, top_k=2, sparse_layers=(1,), num_layers=3).unknown(1)
            tensor([[[-1, -1]]], dtype=torch.int16)
        """
        return torch.full((tokens, len(self.sparse_layers), self.top_k), -1, dtype=torch.int16)

    def read(self, sent: Any, tokens: int) -> Tensor:
        """Read the routed experts of a completion.

        Args:
            sent: What the server sent: one array, or a tuple of parts that follow one another.
            tokens: Tokens of prompt and completion.

        Returns:
            [tokens, sparse layers, k] int16. Experts are sorted. -1 where the server does not know, and for the last
            token.

        Raises:
            UserError: If the shape is wrong, an expert does not exist, or a token has the same expert twice.
        """
        parts = sent if isinstance(sent, tuple) else (sent,)
        experts = self._join([self._decode(part, tokens) for part in parts], tokens)
        if experts.shape[1] != len(self.sparse_layers):  # the server counts all layers
            experts = experts[:, list(self.sparse_layers)]
        experts = experts.sort(-1).values
        is_unknown = (experts == -1).all(-1)  # [tokens, layers]
        is_outside = ((experts < 0) | (experts >= self.num_experts)).any(-1) & ~is_unknown
        if is_outside.any():
            low, high = int(experts.min()), int(experts.max())
            raise UserError(
                f"the routed experts in the answer are from {low} to {high}, but the model's are from 0 to "
                f"{self.num_experts - 1}. {FIX_MODEL}"
            )
        has_repeated = (experts.diff(dim=-1) == 0).any(-1) & ~is_unknown  # sorted, so equal experts are neighbours
        if has_repeated.any():
            raise UserError(f"the answer has the same routed expert twice for a token. {FIX_MODEL}")
        # The router decides for a token in all layers or in none.
        is_unknown_token = is_unknown.any(1)[:, None, None]
        experts = experts.masked_fill(is_unknown_token, -1).to(torch.int16)
        return torch.cat([experts[: tokens - 1], self.unknown(1)])

    def _join(self, parts: list[Tensor], tokens: int) -> Tensor:
        """Concatenate parts, [n, layers, k] each. Raises UserError if their shapes do not fit the model."""
        # An empty part, such as the experts of an empty completion, may have any shape.
        layer_shapes = {tuple(part.shape[1:]) for part in parts if len(part)}
        num_rows = sum(len(part) for part in parts)
        is_sparse_only = layer_shapes <= {(len(self.sparse_layers), self.top_k)}
        is_all_layers = layer_shapes == {(self.num_layers, self.top_k)}
        if not (is_sparse_only or is_all_layers) or num_rows not in (tokens - 1, tokens):
            shapes = " and ".join(str(list(part.shape)) for part in parts)
            expected = f"[{tokens - 1}, {len(self.sparse_layers)}, {self.top_k}]"
            raise UserError(f"the routed experts in the answer have the shape {shapes}, not {expected}. {FIX_MODEL}")
        non_empty = [part for part in parts if len(part)]
        return torch.cat(non_empty or [self.unknown(0).long()])

    def _decode(self, part: Any, tokens: int) -> Tensor:
        """Decode one part, a list or a text, to [n, ..] int64. Raises UserError if it cannot be read."""
        try:
            if isinstance(part, list):
                experts = torch.tensor(part) if part else torch.zeros(0, dtype=torch.int64)
                if experts.is_floating_point() or experts.dtype == torch.bool:
                    raise ValueError("the numbers are not integers")
                return experts
            data = base64.b64decode(part, validate=True)
            if data.startswith(MAGIC):
                return _decode_npy(data)
            return self._decode_int32(data, tokens)
        except (ValueError, TypeError, LookupError, SyntaxError, OverflowError, RuntimeError, struct.error) as error:
            raise UserError(
                f"the routed experts in the answer cannot be read as .npy or int32 in base64: {error}"
            ) from error

    def _decode_int32(self, data: bytes, tokens: int) -> Tensor:
        """Decode int32 numbers to [n, layers, k] int64. Their count decides between the possible n and layers."""
        flat = torch.frombuffer(bytearray(data), dtype=torch.int32).long() if data else torch.zeros(0).long()
        for num_rows in (tokens - 1, tokens):
            for num_layers in (len(self.sparse_layers), self.num_layers):
                if len(flat) == num_rows * num_layers * self.top_k:
                    return flat.view(num_rows, num_layers, self.top_k)
        raise ValueError(f"{len(flat)} numbers for {tokens} tokens")


def _decode_npy(data: bytes) -> Tensor:
    """Decode the bytes of a .npy file to [n, ..] int64. numpy's own reader could unpickle objects."""
    length_format = "<H" if data[6] == 1 else "<I"  # version 1.0 of the format has 2 bytes, later ones have 4
    (length,) = struct.unpack_from(length_format, data, 8)
    start = 8 + struct.calcsize(length_format)
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"the header has {length} bytes")
    header = ast.literal_eval(data[start : start + length].decode("latin1").strip())
    shape = tuple(header["shape"])
    are_sizes = all(isinstance(size, int) and size >= 0 for size in shape)
    if header["fortran_order"] or not shape or not are_sizes:
        raise ValueError(f"unsupported header {header}")
    content = bytearray(data[start + length :])
    dtype = _NPY_DTYPES[header["descr"]]
    flat = torch.frombuffer(content, dtype=dtype).long() if content else torch.zeros(0).long()
    if len(flat) != math.prod(shape):
        raise ValueError(f"{len(flat)} numbers for {list(shape)}")
    return flat.view(shape)
