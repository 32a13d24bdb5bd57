"""Context parallel: batches in the head-tail layout, and the contexts and flat batches known by name.

batch, gather   a batch cut over cp to the head-tail layout; what is put together again
train_context   `get_train_context`, `create_context_parallel_ctx`, `make_cp_batch_and_ctx`
thd             packed batches as one run of tokens: `make_cp_batch_for_te`

Names are imported when they are used.
"""

# ruff: noqa: F401
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dtrain.parallel.context.batch import cut_streams, shard_tokens
    from dtrain.parallel.context.gather import gather_tokens
    from dtrain.parallel.context.thd import _shard_thd_chunk_for_te, make_cp_batch_for_te
    from dtrain.parallel.context.train_context import (
        _build_position_ids,
        create_context_parallel_ctx,
        get_train_context,
        make_cp_batch_and_ctx,
    )

_HOMES = {
    "_build_position_ids": "train_context",
    "_shard_thd_chunk_for_te": "thd",
    "create_context_parallel_ctx": "train_context",
    "cut_streams": "batch",
    "gather_tokens": "gather",
    "get_train_context": "train_context",
    "make_cp_batch_and_ctx": "train_context",
    "make_cp_batch_for_te": "thd",
    "shard_tokens": "batch",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
