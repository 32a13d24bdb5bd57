"""Context parallel: batches in the head-tail layout, and contexts and flat batches under the names of NeMo Automodel.

batch           the head-tail layout: sharding a batch over cp, and gathering
train_context   `get_train_context`, `make_cp_batch_and_ctx`, `make_cp_batch_for_te`

`create_context_parallel_ctx` is in `dtrain.attention.foreign`, because it computes attention. It can be imported from
here, as in NeMo Automodel. `dtrain.attention` imports this package, so the name is imported on first use (PEP 562).
"""

from typing import TYPE_CHECKING, Any

from dtrain.parallel.context.batch import gather_tokens, shard_streams, shard_tokens
from dtrain.parallel.context.train_context import (
    _build_position_ids,
    _shard_thd_chunk_for_te,
    get_train_context,
    make_cp_batch_and_ctx,
    make_cp_batch_for_te,
)

if TYPE_CHECKING:
    from dtrain.attention.foreign import create_context_parallel_ctx
else:  # a type checker would accept any name from __getattr__

    def __getattr__(name: str) -> Any:
        if name == "create_context_parallel_ctx":
            from dtrain.attention.foreign import create_context_parallel_ctx

            return create_context_parallel_ctx
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "_build_position_ids",
    "_shard_thd_chunk_for_te",
    "create_context_parallel_ctx",
    "shard_streams",
    "gather_tokens",
    "get_train_context",
    "make_cp_batch_and_ctx",
    "make_cp_batch_for_te",
    "shard_tokens",
]
