"""Attention of other code under context parallel: `create_context_parallel_ctx`, and what it does to models inside it.

Inside the context every rank holds S/cp tokens of each row, in the head-tail layout. A model that was written without
context parallel calls `scaled_dot_product_attention` with these tokens only. The context sees the call by a
`TorchFunctionMode` and computes it with our own context-parallel kernels, so that the queries of each rank attend to
the keys of all ranks. The difficult part is the mask: such a model builds it from its local tokens.

Example: 8 tokens over 2 ranks, a causal model of transformers. Rank 0 holds the tokens 0 1 | 6 7, rank 1 holds
2 3 | 4 5. The positions of rank 0 jump from 1 to 6, which transformers takes for the start of a new document:

    mask of rank 0    1 . . .        mask of rank 1: none, and is_causal=True
                      1 1 . .
                      . . 1 .
                      . . 1 1

With a cache (`use_cache=True`) the same model does not look at positions, and rank 0 sends no mask either. In both
cases one process would have been causal over all 8 tokens. So a local mask is not used but explained: we build the
local masks that transformers makes for each global meaning (causal by index, or by the positions in one of the
context's buffers, with the window of the calling module) and compare. The ranks exchange which meanings explain their
masks. If exactly one meaning explains the masks of all ranks, it is computed; otherwise every rank raises at this call.
"""

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.eval_frame import skip_code
from torch.distributed import get_process_group_ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function
from torch.utils.hooks import RemovableHandle

from dtrain.attention.context import ContextKernel, GatherKernel
from dtrain.attention.kernels import Kernel, SdpaKernel, Visibility
from dtrain.attention.ring import RingKernel
from dtrain.base.torch_functions import without_torch_functions
from dtrain.parallel.activation_offload import in_backward
from dtrain.parallel.collectives import all_gather
from dtrain.parallel.context.batch import chunks_of, gather_sequence, mesh_rank, shard_sequence

GATHERED = (None, "allgather")
ROTATED = ("alltoall", "addtoall", "ring")

CUMSUM = (torch.cumsum, Tensor.cumsum)
SOFTMAX = (F.softmax, torch.softmax, torch.special.softmax, Tensor.softmax)
FULL_LAYERS = ("full_attention", "attention")
WINDOW_LAYERS = ("sliding_attention",)

LOCAL, BIDIRECTIONAL, EXPLICIT = range(3)  # kinds of calls
HIDDEN = -1  # the document of keys that a padding mask hides

# Bits of meanings: the first two, then one for each buffer of positions.
BY_INDEX, BY_NATURAL_POSITION, FIRST_BUFFER = 1, 2, 4


def create_context_parallel_ctx(
    cp_mesh: DeviceMesh,
    cp_buffers: Sequence[Tensor],
    cp_seq_dims: Sequence[int],
    cp_no_restore_buffers: Collection[Tensor],
    cp_rotate_method: str | None = None,
    *,
    num_padding: int | Tensor = 0,
) -> AbstractContextManager[None]:
    """Create a context inside which tensors and attention are sharded over the context-parallel ranks.

    On entry every buffer [..., S, ...] becomes this rank's shard [..., S/cp, ...] of itself, in place and head-tail. On
    exit all buffers but `cp_no_restore_buffers` are restored, after exceptions too. A buffer's tensor object changes
    its storage, so views that were made before keep the full buffer. The context can be entered once.

    Inside, `torch.nn.functional.scaled_dot_product_attention` over local tokens, q [B, H, S/cp, hd] and k, v
    [B, kv, S/cp, hd], attends to the keys of all ranks. It accepts:

    - `is_causal=True` without a mask: causal over the S tokens. A sliding window is read from the calling module
      (`sliding_window`, or its `config`), as transformers has it.
    - neither: every query sees every key.
    - the mask that transformers builds from the local tokens, [B or 1, 1, S/cp, S/cp], bool or float: causal, with a
      sliding window, packed documents (the full positions must be one of the buffers), or a 2-D padding mask.
    - any mask over all keys in their natural order: [..., S/cp, S] for the local queries, [..., S, S] or [..., 1, S].
      It is used as it is, in addition to nothing else.

    Everything else raises at the call, on every rank: dropout, cross-attention, keys from a cache, masks with another
    meaning, layers that mix tokens in another way (convolutions, linear attention), and attention that does not go
    through this function (eager, flex, variable-length, `nn.MultiheadAttention`). Models of dtrain must have a
    context-parallel kernel over the same ranks; their calls are left alone.

    The backward may run inside the context or after it. After it, the buffers that it reads (input ids, labels) must be
    in `cp_no_restore_buffers`, which torch checks. Modules that are computed again in the backward (activation
    checkpointing) would attend to local tokens after the context: run the backward inside then. Otherwise the context
    or `torch.utils.checkpoint` raises. Functions outside of modules cannot be checkpointed.

    Args:
        cp_mesh: One-dimensional mesh of the ranks that share rows. With one rank nothing is changed.
        cp_buffers: Tensors to shard, of the same content on every rank.
        cp_seq_dims: The sequence dimension of each buffer.
        cp_no_restore_buffers: Those of `cp_buffers` that stay sharded on exit.
        cp_rotate_method: None or "allgather" gathers keys and values. "alltoall" (also "addtoall", "ring") rotates
            them, except under a mask over all keys, which needs memory for S keys in any case.
        num_padding: Padding at the end of the S tokens, of every row or of each, [B]. Only attention that is not causal
            could see it, and does not.

    Raises:
        ValueError: For an unknown method, a buffer without a dimension, a length that 2·cp does not divide, or a buffer
            that requires grad, which a change in place would lose.
        RuntimeError: On exit, after the buffers were restored, if modules were called that neither have a kernel of
            ours nor called `scaled_dot_product_attention`, or called it in compiled code.

    Collectives:
        Entering and leaving: none. Each call: an all-gather of 12 integers, which the host reads, and the exchange of
        keys and values; in the backward the exchange of their gradients.
    """
    methods = (*GATHERED, *ROTATED)
    if cp_rotate_method not in methods:
        raise ValueError(f"cp_rotate_method={cp_rotate_method!r}: there are {', '.join(map(repr, methods))}")
    if len(cp_buffers) != len(cp_seq_dims):
        raise ValueError(f"{len(cp_buffers)} buffers and {len(cp_seq_dims)} sequence dimensions: give one per buffer")
    for index, buffer in enumerate(cp_buffers):
        if buffer.requires_grad:
            raise ValueError(f"buffer {index} requires grad: cut it with shard_tokens, which keeps its gradient")
    size, rank = cp_mesh.size(), mesh_rank(cp_mesh)
    buffers = []
    for buffer, dim in zip(cp_buffers, cp_seq_dims, strict=True):
        full = buffer.detach()
        buffers.append(_Buffer(buffer, full, shard_sequence(full, rank, size, dim), dim % max(full.dim(), 1)))
    kept = {id(buffer) for buffer in cp_no_restore_buffers}
    return _sharded(buffers, kept, cp_mesh, cp_rotate_method in ROTATED, num_padding)


class _Buffer(NamedTuple):
    tensor: Tensor  # the caller's, which holds the shard inside the context
    full: Tensor
    shard: Tensor
    dim: int


@contextlib.contextmanager
def _sharded(
    buffers: Sequence[_Buffer], kept: set[int], cp_mesh: DeviceMesh, rotates: bool, num_padding: int | Tensor
) -> Iterator[None]:
    """Shard `buffers` inside, and the attention of the modules called there; restore all but those `kept` by id."""
    with torch.no_grad():
        for buffer in buffers:
            buffer.tensor.set_(buffer.shard)  # type: ignore[call-overload]  # torch's stubs know storages alone
    modules = _RunningModules(cp_mesh)
    try:
        if cp_mesh.size() == 1:
            yield
        else:
            attention = ShardedAttention(cp_mesh, buffers, modules, rotates, num_padding)
            with modules.watched(attention), attention:
                yield
            modules.check(attention)
    finally:
        with torch.no_grad():
            for buffer in buffers:
                if id(buffer.tensor) not in kept:
                    buffer.tensor.set_(buffer.full)  # type: ignore[call-overload]


class _RunningModules:
    """The modules whose forward is running, by global hooks, and which of them have a kernel of ours over `cp_mesh`.

    Attributes:
        first: The first module that was called by the thread that entered the context.
        num_recomputed: Modules that were called in a backward inside the context, not counting modules in them.
        num_compiled: Modules whose forward is running and was called by compiled code. They are not in `stack`.
    """

    def __init__(self, cp_mesh: DeviceMesh):
        self.cp_mesh = cp_mesh
        self.first: nn.Module | None = None
        self._owner = threading.get_ident()
        self._stacks: dict[int, list[nn.Module]] = {}  # by thread: autograd's threads recompute activations
        self._ours: set[int] = set()  # ids of modules; `_roots` keeps them alive
        self._roots: list[nn.Module] = []
        self._deferred: set[int] = set()  # threads that run a module whose gradients will come from a second forward
        self.num_recomputed = 0
        self._recomputing: set[int] = set()  # threads in which `mode` was entered for a recomputation
        self.num_compiled = 0

    @contextlib.contextmanager
    def watched(self, mode: TorchFunctionMode) -> Iterator[None]:
        """Follow the modules inside. `mode` is entered where autograd computes modules again in the backward.

        The autograd engine runs without the modes of the code that called the backward.
        """
        handles: list[RemovableHandle] = [
            register_module_forward_pre_hook(partial(self._enter, mode)),
            register_module_forward_hook(partial(self._leave, mode), always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @property
    def stack(self) -> Sequence[nn.Module]:
        """The running modules of this thread, the outermost first."""
        return self._stacks.get(threading.get_ident(), ())

    @property
    def are_ours(self) -> bool:
        """True if the running modules belong to a model with a context-parallel kernel."""
        return bool(self.stack) and id(self.stack[0]) in self._ours

    @property
    def is_deferred(self) -> bool:
        """True if a backward will compute the running modules again.

        `checkpoint(..., use_reentrant=True)` runs them in no_grad mode with inputs that have a gradient function.
        """
        return threading.get_ident() in self._deferred

    def _enter(self, mode: TorchFunctionMode, module: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling():
            # The rest would end the graph. `check` looks at the first module.
            if self.first is None:
                self.first = module
            self.num_compiled += 1
            return
        thread = threading.get_ident()
        stack = self._stacks.setdefault(thread, [])
        stack.append(module)
        if thread == self._owner and self.first is None:
            self.first = module
        if not torch.is_grad_enabled() and any(
            isinstance(value, Tensor) and value.grad_fn is not None for value in args
        ):
            self._deferred.add(thread)
        if len(stack) > 1:
            return
        if id(module) not in self._ours and self._has_kernel(module):
            self._roots.append(module)
            self._ours.update(id(part) for part in module.modules())
        if in_backward():
            self.num_recomputed += 1
            self._recomputing.add(thread)
            mode.__enter__()

    def _leave(self, mode: TorchFunctionMode, module: nn.Module, *_: Any) -> None:
        if torch.compiler.is_compiling():
            self.num_compiled -= 1
            return
        thread = threading.get_ident()
        stack = self._stacks.get(thread)
        if not stack or stack[-1] is not module:
            return
        stack.pop()
        if stack:
            return
        self._deferred.discard(thread)
        if thread in self._recomputing:
            self._recomputing.discard(thread)
            mode.__exit__(None, None, None)

    def check(self, attention: "ShardedAttention") -> None:
        """Raise if the modules that were called attended to local tokens only, or will do so in the backward."""
        if attention.num_deferred_calls and not self.num_recomputed:
            raise RuntimeError(
                f"{type(self.first).__name__} ran inside a context-parallel context with activation checkpointing "
                "(use_reentrant=True), and its backward did not. The backward would compute its attention again over "
                "this rank's tokens only: call backward inside the context"
            )
        if self.first is None or self._ours or self._has_kernel(self.first):
            return
        if attention.num_calls and not attention.is_compiled:
            return
        reason = "computed no attention by torch.nn.functional.scaled_dot_product_attention"
        if attention.is_compiled:
            reason = "is compiled, so its attention cannot be computed over all ranks"
        raise RuntimeError(self.problem(reason))

    def problem(self, reason: str) -> str:
        """Return the message for a model whose attention is local."""
        return (
            f"{type(self.first).__name__} ran inside a context-parallel context, has none of dtrain's "
            f"context-parallel kernels over these {self.cp_mesh.size()} ranks, and {reason}. Each rank saw only its "
            "own part of the rows, so the result is wrong. Use a model of dtrain with such a kernel (Policy builds "
            "one; or model.use_kernel(GatherKernel(SdpaKernel(), cp_mesh))), an uncompiled transformers model with "
            "attn_implementation='sdpa', or call this one on full rows"
        )

    def _has_kernel(self, model: nn.Module) -> bool:
        """Look for a kernel over the ranks of `cp_mesh` in the modules of `model`."""
        return any(kernel.is_context_parallel and self._is_over_these_ranks(kernel) for kernel in _kernels_of(model))

    def _is_over_these_ranks(self, kernel: Kernel) -> bool:
        """Return whether `kernel` exchanges keys with the ranks of the mesh; another mesh of them has its own group."""
        group = self.cp_mesh.get_group()
        is_as_large = kernel.group.size() == group.size()
        return is_as_large and get_process_group_ranks(kernel.group) == get_process_group_ranks(group)


def _kernels_of(model: nn.Module) -> Iterator[Kernel]:
    """Yield the kernels that modules in `model` have as attributes, which is how dtrain's models have theirs."""
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, Kernel):
                yield value


class _Positions(NamedTuple):
    """Position ids that one of the context's buffers holds.

    local: [B or 1, S/cp]. documents: [B or 1, S], numbers of the documents of the full rows; None: one per row.
    """

    tensor: Tensor
    local: Tensor
    documents: Tensor | None


class _Call(NamedTuple):
    """A checked call. q [B, H, S/cp, hd], k and v [B, kv, S/cp, hd].

    kind: LOCAL (causal, explained by `meanings`), BIDIRECTIONAL or EXPLICIT (`mask` is over all keys). window: keys
    that a query sees, its own included. seen: [B or 1, S/cp] bool, False for keys that a padding mask hides; None: all
    are seen.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    kind: int
    mask: Tensor | None = None
    window: int | None = None
    meanings: int = 0
    seen: Tensor | None = None


class ShardedAttention(TorchFunctionMode):
    """Computes scaled_dot_product_attention over the ranks of a mesh, and refuses attention that it cannot compute.

    Attributes:
        num_calls: Calls that were computed over all ranks.
        num_deferred_calls: Those that a backward will compute again.
        is_compiled: Whether compiled code has called attention, which stays local.
    """

    def __init__(
        self,
        cp_mesh: DeviceMesh,
        buffers: Sequence[_Buffer],
        modules: _RunningModules,
        rotates: bool,
        num_padding: int | Tensor,
    ):
        super().__init__()
        self.mesh, self.modules, self.rotates, self.num_padding = cp_mesh, modules, rotates, num_padding
        self.size, self.rank = cp_mesh.size(), mesh_rank(cp_mesh)
        self.lengths = {buffer.shard.shape[buffer.dim] for buffer in buffers}
        self.positions = [found for buffer in buffers if (found := _positions_of(buffer)) is not None]
        self.num_calls, self.num_deferred_calls, self.is_compiled = 0, 0, False
        self._buffer_tensors = {id(buffer.tensor) for buffer in buffers}
        self._position_tensors = {id(positions.tensor) for positions in self.positions}
        self._reads_positions = self._makes_positions = False
        self._kernel: ContextKernel | None = None
        self._prepared: dict[tuple[Any, ...], Any] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            if func is F.scaled_dot_product_attention:
                self.is_compiled = True
            if "flex_attention" in str(func):
                raise NotImplementedError("flex_attention inside a context-parallel context sees local tokens only")
            return func(*args, **kwargs)
        if func is _announce_call:
            self.num_calls += 1
            return func(*args)
        for value in args:
            if id(value) in self._position_tensors:
                self._reads_positions = True
        if func is F.scaled_dot_product_attention:
            if self.modules.are_ours:
                return func(*args, **kwargs)
            return self._attend(*args, **kwargs)
        if self.modules.stack and self._counts_positions(func, args):
            self._makes_positions = True
        problem = self._problem_of(func, args, kwargs)
        if problem and not self.modules.are_ours:
            raise NotImplementedError(
                f"{problem} inside a context-parallel context, where it would see only this rank's part of the rows. "
                "Use torch.nn.functional.scaled_dot_product_attention (transformers: attn_implementation='sdpa'), or "
                "call it outside the context on full rows"
            )
        return func(*args, **kwargs)

    def _counts_positions(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Return whether a call numbers the local tokens from 0, by `arange` or by a sum over a mask (OPT, RoBERTa)."""
        if not args:
            return False
        if func is torch.arange:
            return args[0] in self.lengths
        given = args[0]
        is_sum = func in CUMSUM and isinstance(given, Tensor)
        return is_sum and given.dim() == 2 and given.shape[1] in self.lengths

    def _problem_of(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Return a description of the computation that `func` would do over local tokens only, or an empty string."""
        if func is F.multi_head_attention_forward:
            return "nn.MultiheadAttention was called"
        if func is F.pad and self.modules.stack and id(args[0]) in self._buffer_tensors:
            # transformers shifts labels so: F.pad(labels, (0, 1))[..., 1:]
            return (
                f"{type(self.modules.stack[0]).__name__} shifted labels {list(args[0].shape)} (compute the loss from "
                "its logits, or pass labels to transformers as shift_labels)"
            )
        if str(getattr(func, "__module__", "")).startswith("torch._ops"):
            name = str(func)  # such as torch_attn._varlen_attn, or flash_attn's
            is_attention = "attn" in name or "attention" in name
            if is_attention and "backward" not in name and not name.startswith("aten."):
                return f"the operator {name} was called"
            return ""
        if func is not F.conv1d and func not in SOFTMAX:
            return ""
        given = args[0] if args else kwargs.get("input")
        if not isinstance(given, Tensor):
            return ""
        if func is F.conv1d:
            weight = args[1] if len(args) > 1 else kwargs["weight"]
            width = weight.shape[-1]
            if width > 1 and not self.lengths.isdisjoint((given.shape[-1], given.shape[-1] - width + 1)):
                return f"a convolution over the tokens of a row, {list(given.shape)}, was called"
            return ""
        # Scores [B, H, queries, keys]; attention sinks add one more key.
        is_scores = given.dim() == 4 and given.shape[-2] in self.lengths and 0 <= given.shape[-1] - given.shape[-2] <= 1
        return (
            f"attention scores {list(given.shape)} were computed without a kernel (eager attention)"
            if is_scores
            else ""
        )

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Compute scaled_dot_product_attention, whose arguments these are, over the tokens of all ranks."""
        call, error = None, None
        try:
            call = self._check(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        except (NotImplementedError, ValueError) as problem:
            error = problem
        meanings, hides_keys, kv_heads = self._agree(call, error, query.device)
        assert call is not None  # `_agree` raises an error of any rank
        if call.k.shape[1] != kv_heads:
            # transformers repeats keys for their query heads if it has a mask, which not every rank needs.
            k, v = (part.repeat_interleave(kv_heads // part.shape[1], 1) for part in (call.k, call.v))
            call = call._replace(k=k, v=v)
        self.num_calls += 1
        self.num_deferred_calls += int(self.modules.is_deferred)
        _announce_call(query)
        with without_torch_functions():  # contexts may be nested: the outer one must not see these calls
            if call.kind == EXPLICIT:
                out = self._attend_under_mask(call)
            else:
                out = self._attend_by_meaning(call, meanings, hides_keys)
        return out.reshape(*query.shape[:-1], value.shape[-1])

    def _check(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        dropout: float,
        is_causal: bool,
        scale: float | None,
        enable_gqa: bool,
    ) -> _Call:
        """Check a call and describe it. No collective.

        Raises:
            NotImplementedError: If it cannot be computed over the ranks.
            ValueError: If the arguments contradict each other or the mask has no meaning that we know.
        """
        self._check_modules()
        shapes = f"q {list(query.shape)}, k {list(key.shape)}, v {list(value.shape)}"
        if any(isinstance(part, DTensor) for part in (query, key, value, mask)):
            raise NotImplementedError("attention of DTensors inside a context-parallel context: pass local tensors")
        if dropout:
            raise NotImplementedError(
                f"attention dropout of {dropout} inside a context-parallel context: set the model's attention_dropout "
                "to 0 or call model.eval()"
            )
        if not 2 <= query.dim() == key.dim() == value.dim() <= 4:
            raise NotImplementedError(f"attention of {shapes}: pass q, k and v with the same 2 to 4 dimensions")
        length = query.shape[-2]
        lengths = f"{sorted(self.lengths)}" if self.lengths else "the local length"
        if key.shape[-2] != length or value.shape[-2] != length or (self.lengths and length not in self.lengths):
            raise NotImplementedError(
                f"attention of {shapes} inside a context-parallel context, whose buffers have {lengths} local tokens "
                "per row. Only self-attention over these tokens can be computed over all ranks: no cross-attention, no "
                "keys of a cache, no other sequences such as the patches of an image. Compute those outside the context"
            )
        if length % 2:
            raise NotImplementedError(f"attention of {shapes}: a rank has two chunks of the same length of each row")
        q, k, v = (part.view(*[1] * (4 - part.dim()), *part.shape) for part in (query, key, value))
        if k.shape[:2] != v.shape[:2] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
            raise ValueError(f"attention of {shapes}: these do not fit one another")
        is_shared_by_all = k.shape[1] == 1  # without enable_gqa too, by broadcasting (Falcon)
        if q.shape[1] != k.shape[1] and not is_shared_by_all and (not enable_gqa or q.shape[1] % k.shape[1]):
            raise ValueError(
                f"attention of {shapes}: q and k have different numbers of heads (enable_gqa={enable_gqa})"
            )
        if mask is not None and is_causal:
            raise ValueError("scaled_dot_product_attention takes attn_mask or is_causal=True, not both")
        scale = q.shape[3] ** -0.5 if scale is None else scale
        call = _Call(q, k, v, scale, LOCAL)
        if mask is not None and mask.shape[-1] == length * self.size:
            if mask.dim() < 2 or mask.shape[-2] not in (1, length, length * self.size):
                raise ValueError(f"attn_mask {list(mask.shape)} does not fit {shapes} over {self.size} ranks")
            return call._replace(kind=EXPLICIT, mask=mask)
        window = _window_of(self.modules.stack)
        if window is not None and not isinstance(window, int):
            raise NotImplementedError(f"the calling module's sliding_window={window!r} is not a number of tokens")
        if mask is None and not is_causal:
            if window is not None:
                raise NotImplementedError(f"attention in both directions with a window of {window} tokens")
            return call._replace(kind=BIDIRECTIONAL)
        if mask is None:
            return call._replace(window=window, meanings=self._meanings_of_causal(length, window))
        meanings, seen = self._meanings_of_mask(mask, q, window)
        return call._replace(window=window, meanings=meanings, seen=seen)

    def _check_modules(self) -> None:
        """Raise for running modules that mix tokens in a way we do not know, or were not given their positions."""
        if self.modules.num_compiled:
            raise NotImplementedError(
                "attention of a compiled module inside a context-parallel context: its window cannot be read. Call the "
                "module uncompiled"
            )
        if self.modules.stack and any(_kernels_of(self.modules.stack[0])):
            raise NotImplementedError(self.modules.problem("attends with another kernel of dtrain"))
        for module in self.modules.stack:
            config = getattr(module, "config", None)
            unknown = {*(getattr(config, "layer_types", None) or ())} - {*FULL_LAYERS, *WINDOW_LAYERS}
            if getattr(config, "attention_chunk_size", None) is not None:
                unknown.add("chunked_attention")
            if unknown:
                raise NotImplementedError(
                    f"{type(module).__name__} has layers of type {', '.join(sorted(unknown))}, which would see only "
                    "this rank's part of the rows. Only full and sliding-window attention can run in this context"
                )
        if self.modules.stack and self.positions and not self._reads_positions and self._has_own_positions():
            raise ValueError(
                f"{type(self.modules.stack[0]).__name__} counts positions from 0 on every rank, because it was not "
                "given the position_ids of this context: call it with position_ids=batch['position_ids']"
            )

    def _has_own_positions(self) -> bool:
        """Return whether the running model has numbered its tokens, or reads their numbers from a buffer (BERT)."""
        names = (name.rpartition(".")[2] for name, _ in self.modules.stack[0].named_buffers())
        return self._makes_positions or "position_ids" in names

    def _own_positions(self, length: int, device: torch.device) -> Tensor:
        """[S/cp]: the place in the row of each local token."""
        chunk = torch.arange(length // 2, device=device)
        return torch.cat([chunk + index * (length // 2) for index in chunks_of(self.rank, self.size)])

    def _meanings(self, length: int, device: torch.device) -> list[tuple[int, Tensor | None]]:
        """Return the meanings that a local mask may have: their bits and positions, [B or 1, S/cp]; None: by index."""
        meanings: list[tuple[int, Tensor | None]] = [
            (BY_INDEX, None),
            (BY_NATURAL_POSITION, self._own_positions(length, device)[None]),
        ]
        for index, positions in enumerate(self.positions):
            if positions.local.shape[1] == length:
                meanings.append((FIRST_BUFFER << index, positions.local))
        return meanings

    def _meanings_of_causal(self, length: int, window: int | None) -> int:
        """Return the meanings, as bits, for which transformers sends `is_causal` and no mask."""
        if window is not None and window < length:
            raise ValueError(
                f"a module with a sliding window of {window} tokens attends to {length} local tokens without a mask "
                "that shows the window: its meaning over all ranks is unknown. Pass a mask [B, 1, S/cp, S]"
            )
        found = 0
        for bit, positions in self._meanings(length, torch.device("cpu")):
            if positions is None or bool((positions.diff(dim=1) == 1).all()):
                found |= bit
        return found

    def _meanings_of_mask(self, mask: Tensor, q: Tensor, window: int | None) -> tuple[int, Tensor | None]:
        """Return the meanings, as bits, for which transformers builds the local `mask`, and the keys that its padding
        mask shows, [B or 1, S/cp] bool; None: all."""
        length = q.shape[2]
        if mask.dim() > 4 or mask.dim() < 2 or mask.shape[-2:] != (length, length):
            raise ValueError(
                f"attn_mask {list(mask.shape)} is neither over the {length} local tokens nor over the "
                f"{length * self.size} tokens of all ranks: pass [B, 1, {length}, {length * self.size}]"
            )
        visible = _visible(mask.detach())
        visible = visible.view(*[1] * (4 - mask.dim()), *mask.shape)
        seen = visible[:, 0].diagonal(dim1=1, dim2=2)  # causal tokens see themselves unless they are padding
        index = torch.arange(length, device=mask.device)[None]
        found = 0
        for bit, positions in self._meanings(length, mask.device):
            causal = _causal(index if positions is None else positions.to(mask.device), window, positions is not None)
            # The rows of a batch may be packed differently.
            if visible.shape[0] not in (1, len(causal)) and len(causal) != 1:
                continue
            if bool((visible == (causal & seen[:, None, :])[:, None]).all()):
                found |= bit
        if not found:
            raise ValueError(
                f"the meaning of attn_mask {list(mask.shape)} over all ranks is unknown: it covers local tokens only, "
                f"and is not the causal mask that transformers builds for them{_and_window(window)}. Pass a mask over "
                f"all keys in their natural order, [B, 1, {length}, {length * self.size}]"
            )
        return found, None if bool(seen.all()) else seen

    def _agree(self, call: _Call | None, error: Exception | None, device: torch.device) -> tuple[int, bool, int]:
        """Compare a call with those of the other ranks. One all-gather, which the host reads.

        Returns the common meanings, whether any rank hides keys, and the most key heads of a rank. Raises the error of
        this rank, or one about the error of another rank.
        """
        values = [1] + [0] * 11
        if call is not None:
            window = -1 if call.window is None else call.window
            sizes = [*call.q.shape, call.v.shape[3]]
            own = [call.meanings, int(call.seen is not None), call.k.shape[1]]
            values = [0, *own, call.kind, window, *sizes, int(self.rotates)]
        values = (values + [0] * 12)[:12]
        group = self.mesh.get_group()
        reports = all_gather(torch.tensor([values], device=device), 0, group).tolist()
        if error is not None:
            raise error
        for rank, report in enumerate(reports):
            if report[0]:
                raise NotImplementedError(
                    f"rank {rank} of the {self.size} context-parallel ranks has refused this attention call; its own "
                    "error says why"
                )
            if report[4:] != values[4:]:
                raise ValueError(
                    f"the context-parallel ranks call attention with different arguments: rank {rank} has (kind, "
                    f"window, q's shape, v's head size) {report[4:-1]}, this one has {values[4:-1]}"
                )
        common = -1
        for report in reports:
            common &= report[1]
        hides_keys = any(report[2] for report in reports)
        kv_heads = max(report[3] for report in reports)
        if any(kv_heads % report[3] for report in reports):
            raise ValueError(f"the context-parallel ranks have {[report[3] for report in reports]} key heads")
        return common, hides_keys, kv_heads

    def _documents_of(self, meanings: int, length: int) -> tuple[int, Tensor | None]:
        """Return the document numbers [B or 1, S] of the one meaning in `meanings`, and its bit; None: no documents.

        All ranks have the same `meanings`, so all return or raise alike.
        """
        choices: list[tuple[int, Tensor | None]] = []
        for index, positions in enumerate(self.positions):
            bit = FIRST_BUFFER << index
            if meanings & bit and not any(_are_same(positions.documents, other) for _, other in choices):
                choices.append((bit, positions.documents))
        # Natural positions are those of a buffer wherever there is one; they count if the caller has made its own.
        is_natural = meanings & BY_INDEX or (meanings & BY_NATURAL_POSITION and not choices)
        if is_natural and not any(documents is None for _, documents in choices):
            choices.append((BY_INDEX, None))
        if len(choices) != 1:
            found = "several meanings" if choices else "no common meaning"
            raise ValueError(
                f"the attention masks of the {self.size} context-parallel ranks have {found} over all their tokens "
                "(causal by index, or by the documents of a buffer of positions). Pass a mask over all keys in their "
                f"natural order, [B, 1, {length}, {length * self.size}]"
            )
        return choices[0]

    def _attend_by_meaning(self, call: _Call, meanings: int, hides_keys: bool) -> Tensor:
        """[B, H, S/cp, hd]: attention by positions and documents, with the kernel of this context."""
        rows, length, device = call.q.shape[0], call.q.shape[2], call.q.device
        total = length * self.size
        own = self._own_positions(length, device)[None]
        ends, documents, bit = None, None, 0
        if call.kind == BIDIRECTIONAL:
            padding = torch.as_tensor(self.num_padding, device=device).view(-1, 1)
            ends = (total - 1 - padding).clamp(min=0).expand(-1, length)  # [1 or B, S/cp]
        else:
            bit, documents = self._documents_of(meanings, length)
        if documents is not None:
            documents = documents.to(device).expand(rows, -1)
        queried = documents  # by the queries of all ranks
        if hides_keys:
            seen = own.new_ones(rows, length) if call.seen is None else call.seen.long().expand(rows, -1)
            all_seen = gather_sequence(seen.contiguous(), self.mesh.get_group())
            base = all_seen.new_zeros(rows, total) if documents is None else documents
            documents = base.masked_fill(all_seen == 0, HIDDEN)
            # Padding on the left sees no token. It sees itself here, so that no row of scores is empty.
            queried = base.masked_fill(all_seen.cumsum(1) == 0, HIDDEN)
        kernel = self._context_kernel()
        key = (bit, call.kind, call.window, rows, length, call.q.dtype, device)
        prepared = None if hides_keys else self._prepared.get(key)
        if prepared is None:
            visibility = Visibility(
                queries=length,
                keys=total,
                window=call.window,
                query_positions=own if documents is None else own.expand(rows, -1),
                key_positions=torch.arange(total, device=device)[None],
                query_documents=None if queried is None else shard_sequence(queried, self.rank, self.size),
                key_documents=documents,
                rows=rows,
                query_ends=ends,
            )
            prepared = kernel.prepare(visibility, call.q.dtype, device)
            if not hides_keys:
                self._prepared[key] = prepared
        # The kernels take heads of one size: zeros change neither scores nor the other values.
        head, value_head = call.q.shape[3], call.v.shape[3]
        size = max(head, value_head)
        q, k = (F.pad(part, (0, size - head)).transpose(1, 2) for part in (call.q, call.k))
        v = F.pad(call.v, (0, size - value_head)).transpose(1, 2)
        out = kernel(q, k, v, prepared, call.scale)
        return out.transpose(1, 2)[..., :value_head]

    def _attend_under_mask(self, call: _Call) -> Tensor:
        """[B, H, S/cp, hd]: attention to the gathered keys under the caller's mask over all keys."""
        assert call.mask is not None
        length, head = call.q.shape[2], call.k.shape[3]
        mask = call.mask
        if mask.shape[-2] == length * self.size:
            mask = mask.index_select(-2, self._own_positions(length, mask.device))
        both = gather_sequence(torch.cat([call.k, call.v], -1), self.mesh.get_group(), dim=2)
        k, v, is_grouped = both[..., :head], both[..., head:], call.q.shape[1] != call.k.shape[1]
        return F.scaled_dot_product_attention(call.q, k, v, attn_mask=mask, scale=call.scale, enable_gqa=is_grouped)

    def _context_kernel(self) -> ContextKernel:
        if self._kernel is None:
            kind: Callable[[Kernel, DeviceMesh], ContextKernel] = RingKernel if self.rotates else GatherKernel
            self._kernel = kind(SdpaKernel(), self.mesh)
        return self._kernel


def _announce_call(query: Tensor) -> None:
    """Tell the contexts around this one that an attention call of theirs is being computed."""
    if has_torch_function((query,)):
        handle_torch_function(_announce_call, (query,), query)


def _positions_of(buffer: _Buffer) -> _Positions | None:
    """Return the positions in a buffer, or None if it holds something else.

    Position ids are integers [B or 1, S] that begin at 0 and either count on or restart at 0. They may be input ids by
    accident, which is harmless: they explain no mask then.
    """
    full = buffer.full
    if full.dim() != 2 or buffer.dim != 1 or full.is_floating_point() or full.dtype == torch.bool or not full.numel():
        return None
    steps = full.diff(dim=1)
    starts = steps != 1
    if bool((full[:, 0] != 0).any()) or bool((starts & (full[:, 1:] != 0)).any()):
        return None
    documents = F.pad(starts, (1, 0)).long().cumsum(1) if bool(starts.any()) else None
    return _Positions(buffer.tensor, buffer.shard, documents)


def _causal(positions: Tensor, window: int | None, restarts: bool) -> Tensor:
    """Return the causal mask [B or 1, L, L] of local positions [B or 1, L] as transformers builds it.

    restarts: positions that do not follow their neighbour by 1 begin another document.
    """
    distance = positions[:, :, None] - positions[:, None, :]
    causal = distance >= 0
    if window is not None:
        causal &= distance < window
    if restarts:
        documents = F.pad(positions.diff(dim=1) != 1, (1, 0)).cumsum(1)
        causal &= documents[:, :, None] == documents[:, None, :]
    return causal


def _visible(mask: Tensor) -> Tensor:
    """Return a bool or float mask as a bool mask, True where a key is seen."""
    if mask.dtype == torch.bool:
        return mask
    visible = mask == 0
    hidden = mask <= torch.finfo(mask.dtype).min
    if not bool((visible | hidden).all()):
        raise ValueError(
            f"attn_mask {list(mask.shape)} covers local tokens only and adds a bias to their scores: the bias of the "
            "other ranks' keys is unknown. Pass a mask over all keys in their natural order, [B, H, S/cp, S]"
        )
    return visible


def _window_of(stack: Sequence[nn.Module]) -> Any:
    """Return the sliding window of the innermost running module that has one in transformers' way; None: no window."""
    for module in reversed(stack):
        config = getattr(module, "config", None)
        kinds, layer = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
        if kinds and layer is not None and kinds[layer] in FULL_LAYERS:
            return None  # whatever the module has as sliding_window, which may be the other layers' (Exaone 4)
        if hasattr(module, "sliding_window"):
            return module.sliding_window
        if config is not None:
            return getattr(config, "sliding_window", None)
    return None


def _and_window(window: int | None) -> str:
    return "" if window is None else f" with the module's window of {window} tokens"


def _are_same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(*torch.broadcast_tensors(one, other)) if one.shape[1] == other.shape[1] else False


# Where a graph breaks, Dynamo would compile these as functions of their own, and it does not compare `func` when it
# uses such code again: `tensor.shape` then returned the device (torch 2.13). Calls that are traced are not affected.
skip_code(ShardedAttention.__torch_function__.__code__)
skip_code(_RunningModules._enter.__code__)
skip_code(_RunningModules._leave.__code__)
