"""The check of a device before a decoding step attends by `slot_flash.SlotFlash`: a small step of all that it will
compute, against the numbers of `cached_attention.Decode`'s products."""

import torch
from torch import Tensor

from dtrain.attention.check_varlen import UNSUPPORTED, difference, does_not_run
from dtrain.attention.kernels import HALF
from dtrain.inference.cached_attention import Decode
from dtrain.inference.kv_cache import KeyValues
from dtrain.inference.slot_flash import SlotFlash
from dtrain.inference.varlen_decode import VarlenDecode
from dtrain.models.common.config import ModelConfig

_PROMPTS = ((1, 3), (37, 1), (130, 2), (25, 1))  # lengths, and rows of each
_ROWS = ((64, 0), (64, 1), (512, 130), (64, 62), (512, 400), (512, 70), (64, 33))  # sizes of slots, and own tokens
_WIDEST = 100  # a window that hides something of these


def choose(config: ModelConfig, dtype: torch.dtype, device: torch.device, tp: int = 1) -> tuple[SlotFlash | None, str]:
    """Return what a model's rows are to attend with when they are decoded, computing in `dtype`; or None, and a note on
    why products do, "" where nothing else was to be had. tp: ranks that share the heads. No collective."""
    if device.type != "cuda" or dtype not in HALF:
        return None, ""
    shapes = config.attention_shapes(tp)
    for shape in shapes:
        if shape["value_dim"] != shape["head_dim"]:
            # Not padded to one size, as rows in training are: a cache would grow by half (192 and 128 elements).
            keys, values = shape["head_dim"], shape["value_dim"]
            return None, f"decoding attends by products: heads have {keys} elements in keys and {values} in values"
    flash = SlotFlash()
    problems = (prove(flash, **shape, dtype=dtype, device=device) for shape in shapes)
    problem = next(filter(None, problems), None)
    return (flash, "") if problem is None else (None, f"decoding attends by products: {problem}")


def prove(
    flash: SlotFlash,
    *,
    heads: int,
    key_heads: int,
    head_dim: int,
    value_dim: int,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
    sinks: bool = False,
) -> str | None:
    """Return why `flash` is not to be used for such heads here; None where it computes what the products do, over rows
    and prompts of several lengths. head_dim, value_dim: of a head of queries and keys, and of values. No collective,
    and no random number of the run's is drawn."""
    windows = [None] if window is None else [None, min(window, _WIDEST)]
    sizes = heads, key_heads, head_dim, value_dim, sinks

    def numbers(flash: SlotFlash | None, compute_dtype: torch.dtype) -> list[Tensor]:
        return _numbers(KeyValues(windows, flash=flash), *sizes, compute_dtype, device)

    try:
        results = numbers(flash, dtype)
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except UNSUPPORTED as error:
        return does_not_run("varlen_attn", error)
    return difference("varlen_attn", "products", results, numbers(None, dtype), numbers(None, torch.float32))


@torch.no_grad()
def _numbers(
    store: KeyValues,
    heads: int,
    key_heads: int,
    head_dim: int,
    value_dim: int,
    sinks: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> list[Tensor]:
    """Return the attention [rows, 1, H, hd] of each layer in a step, over slots that are full of numbers."""
    draw = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw).to(torch.bfloat16).to(device, dtype)

    prompts, of_rows = [], []
    for length, rows in _PROMPTS:
        prompts.append(store.new_prompt(length))
        of_rows += prompts[-1:] * rows
    owners = dict(enumerate(of_rows))
    for row, (capacity, added) in enumerate(_ROWS):
        store.new_row(row, capacity).length = added
    kind = Decode if store.flash is None else VarlenDecode
    decode = kind(store, [owners[slot.owner] for slot in store.rows_in_order()], device, fixed=True)
    decode.begin()
    outputs = []
    for layer in range(len(store.windows)):
        q = random(decode.rows, 1, heads, head_dim)
        k = random(decode.rows, 1, key_heads, head_dim)
        v = random(decode.rows, 1, key_heads, value_dim)
        for pool in store.pools:
            for tensor in pool.layer(layer, k, v):
                tensor.copy_(random(*tensor.shape))
        scores = torch.linspace(-1.0, 3.0, heads, device=device, dtype=dtype) if sinks else None
        outputs.append(decode.attend(layer, q, k, v, head_dim**-0.5, sinks=scores)[decode.places])
    decode.end()
    return outputs
