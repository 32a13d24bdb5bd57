"""Selective checkpointing: which results of operations are kept, of layers as written and of compiled parts.

Kept are the results of matrix products, attention and reduce-scatters; a tile computes all again. All-to-alls of tokens
are sent again: what they bring is as large as all else that a mixture keeps.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.attention.varlen  # makes torch.ops.torch_attn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from dtrain.parallel.collectives import PARTS, WHOLES

Contexts = Callable[[], tuple[Any, Any]]  # of the forward and of what is computed again, as torch's `checkpoint` takes


@dataclass
class TileComputing:
    """State of a model's tiles (`memory.tiles`). now: whether one is being computed; nothing of it is kept."""

    now: bool = False


KEPT = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten._grouped_mm.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.torch_attn._varlen_attn.default,
        *PARTS,
    }
)
# Compiled parts keep wholes too, for the compiler leaves out the products that they add up. As written, both would be
# more than is kept without checkpointing.
KEPT_COMPILED = KEPT | WHOLES


def _policy(kept: frozenset, tiles: TileComputing, context, operation, *args, **kwargs) -> CheckpointPolicy:
    is_kept = operation in kept and not tiles.now
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def contexts_of(tiles: TileComputing | None = None, kept: frozenset = KEPT) -> Contexts:
    """Return the contexts of layers with `tiles`, of whose results `kept` stay."""
    return partial(create_selective_checkpoint_contexts, partial(_policy, kept, tiles or TileComputing()))


# One object each, for graphs know what it is. What is kept of a tile is let go of at the tile's end.
COMPILED, AS_WRITTEN = contexts_of(kept=KEPT_COMPILED), contexts_of()


def selective(function: Callable[..., Any], contexts: Contexts = COMPILED, **options: Any) -> Callable[..., Any]:
    """Return `function` with selective checkpointing inside, which the partitioner of torch.compile goes by: it keeps
    what the backward needs of what may be kept, and no more. options: of torch's `checkpoint`."""

    def checkpointed(*inputs: Any) -> Any:
        return checkpoint(function, *inputs, use_reentrant=False, context_fn=contexts, **options)

    return checkpointed
