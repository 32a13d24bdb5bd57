"""Context-parallel batches as context managers, under the names that users of NeMo Automodel know."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dtrain.base.batch import STREAMS
from dtrain.parallel.context.batch import mesh_rank, pad_right, shard_sequence
from dtrain.parallel.context.thd import make_cp_batch_for_te


def get_train_context(
    enable_loss_parallel: bool, enable_compiled_autograd: bool, cp_context: Any = None
) -> Callable[[], Any]:
    """Return a factory of contexts, used as `with train_context():`.

    Args:
        enable_loss_parallel: Whether to enter torch's `loss_parallel()`.
        enable_compiled_autograd: Whether to enable compiled autograd.
        cp_context: A context of `create_context_parallel_ctx`, entered last. It can be entered once. None: not entered.
    """

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if enable_loss_parallel:
                from torch.distributed.tensor.parallel import loss_parallel

                stack.enter_context(loss_parallel())
            if enable_compiled_autograd:
                from torch._dynamo.utils import maybe_enable_compiled_autograd

                stack.enter_context(maybe_enable_compiled_autograd(should_enable=True))
            if cp_context is not None:
                stack.enter_context(cp_context)
            yield

    return context


def make_cp_batch_and_ctx(
    device_mesh: DeviceMesh | None,
    batch: dict[str, Any],
    loss_mask: Tensor | None = None,
    use_te: bool = False,
    padding_token_id: int = 0,
    num_chunks: int = 1,
    seq_lens_padding_value: int = -1000,
    extra_seq_buffers: Mapping[str, int] | None = None,
    labels: Tensor | None = None,
) -> tuple[Callable[[], Any], dict[str, Any]]:
    """Return a context inside which a batch has this cp rank's part of every stream, and the batch.

    Without context parallel these are `contextlib.nullcontext` and the unchanged batch. Otherwise the batch is the same
    dict, changed as follows:

    - `attention_mask` is removed. A causal model computes the same without a mask of padding at the end of rows.
    - `position_ids` are added if they are missing.
    - Every stream is padded on the right to a multiple of 2·cp. On entry of the context it is cut in place to the
      head-tail layout. On exit only `position_ids` are restored.

    The streams are the ids (or embeddings), labels, loss_mask, every other tensor [B, S, ...], and the tensors of
    `extra_seq_buffers`. Everything else in the batch stays as it is. A stream that needs no padding is the caller's own
    tensor, which the context cuts in place. A stream that requires grad is cut here, into a new tensor of its graph.
    No collective.

    Args:
        device_mesh: A mesh with a dimension "cp". None, or a mesh without it: no context parallel.
        batch: input_ids [B, S] or inputs_embeds [B, S, H], labels [B, S], and whatever else the model reads.
        loss_mask: [B, S], added to the batch.
        use_te: Return `contextlib.nullcontext` and the batch of `make_cp_batch_for_te` instead.
        padding_token_id: Pad value of the ids. Embeddings are padded with 0, others as in `batch.STREAMS`, or with 0.
        num_chunks: For `use_te`.
        seq_lens_padding_value: For `use_te`.
        extra_seq_buffers: More streams: the name in the batch, and the dimension that is cut. Not with `use_te`.
        labels: [B, S], added to the batch.

    Returns:
        The context, to be entered once as `with ctx():`, and the batch.

    Raises:
        KeyError: If ids, labels or a name of `extra_seq_buffers` are missing.
        ValueError: If a stream is not as long as the ids, or if `attention_mask` hides anything but padding at the end
            of rows.
    """
    names = getattr(device_mesh, "mesh_dim_names", None) or ()
    cp_mesh = device_mesh["cp"] if device_mesh is not None and "cp" in names else None
    if use_te:
        if extra_seq_buffers:
            raise ValueError("extra_seq_buffers: the flat form of use_te cuts every stream by its shape")
        return contextlib.nullcontext, make_cp_batch_for_te(  # type: ignore[return-value]  # a dict: no indices asked
            cp_mesh,
            batch,
            padding_token_id=padding_token_id,
            num_chunks=num_chunks,
            seq_lens_padding_value=seq_lens_padding_value,
        )
    if cp_mesh is None or cp_mesh.size() <= 1:
        return contextlib.nullcontext, batch
    if labels is not None:
        batch["labels"] = labels
    if loss_mask is not None:
        batch["loss_mask"] = loss_mask
    tokens = "inputs_embeds" if "inputs_embeds" in batch and "input_ids" not in batch else "input_ids"
    for name in (tokens, "labels", *(extra_seq_buffers or ())):
        if name not in batch:
            raise KeyError(f"{name} is missing: context parallel cuts it")
    shape = batch[tokens].shape[:2]
    num_padding = -shape[1] % (2 * cp_mesh.size()) + _padding_of(batch.pop("attention_mask", None), shape)
    _build_position_ids(batch, batch[tokens].device)
    # The dimension in which each stream is cut. position_ids may be [3, B, S].
    dims = {tokens: 1, "labels": 1, "position_ids": batch["position_ids"].dim() - 1}
    if loss_mask is not None:
        dims["loss_mask"] = 1
    for name, value in batch.items():
        if isinstance(value, Tensor) and value.shape[:2] == shape:
            dims.setdefault(name, 1)
    dims.update(extra_seq_buffers or {})
    for name, dim in dims.items():
        if batch[name].shape[dim] != shape[1]:
            raise ValueError(f"{name} {list(batch[name].shape)} is not as long as {tokens} {list(batch[tokens].shape)}")
    for name, dim in dims.items():
        pad = STREAMS[name].pad if name in STREAMS else 0
        if name == tokens:
            pad = 0 if batch[name].is_floating_point() else padding_token_id
        batch[name] = pad_right(batch[name], 2 * cp_mesh.size(), pad, dim)
        if batch[name].requires_grad:
            batch[name] = shard_sequence(batch[name], mesh_rank(cp_mesh), cp_mesh.size(), dim)
    dims = {name: dim for name, dim in dims.items() if not batch[name].requires_grad}
    # Users may replace the package's functions, so these two are looked up in the package when they are called.
    package = import_module(__package__)
    cp_context = package.create_context_parallel_ctx(
        cp_mesh=cp_mesh,
        cp_buffers=[batch[name] for name in dims],
        cp_seq_dims=[*dims.values()],
        cp_no_restore_buffers={batch[name] for name in dims if name != "position_ids"},
        num_padding=num_padding,
    )
    return package.get_train_context(False, False, cp_context), batch


def _build_position_ids(batch: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Add `position_ids` [1, S], which count from 0, to a batch without them, and return the batch."""
    if "position_ids" not in batch:
        ids = batch["input_ids" if "input_ids" in batch else "inputs_embeds"]
        batch["position_ids"] = torch.arange(ids.shape[1], device=device)[None]
    return batch


def _padding_of(attention_mask: Any, shape: torch.Size) -> int | Tensor:
    """Return how many tokens `attention_mask` [B, S] hides at the end of each row, [B]; 0 without a mask."""
    if attention_mask is None:
        return 0
    if not isinstance(attention_mask, Tensor) or attention_mask.shape != shape:
        given = list(attention_mask.shape) if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
        raise ValueError(
            f"attention_mask ({given}) is dropped under context parallel, which is right for a padding mask "
            f"{list(shape)} only. Remove it, and pass masks [B, 1, S/cp, S] to the model inside the context"
        )
    seen = attention_mask.long()
    if bool((seen[:, 1:] > seen[:, :-1]).any()):
        raise ValueError(
            "attention_mask hides tokens before others that it shows (padding on the left?). It is dropped under "
            "context parallel: put the padding on the right"
        )
    return shape[1] - seen.sum(1)
