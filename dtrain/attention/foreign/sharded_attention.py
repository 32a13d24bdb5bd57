"""Attention calls inside a context-parallel context: caught, checked, compared between ranks, and computed."""

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.eval_frame import skip_code
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

from dtrain.attention.context import ContextKernel, GatherKernel, RingKernel
from dtrain.attention.foreign.local_masks import Buffer, LocalMasks, position_buffer
from dtrain.attention.foreign.running_modules import RunningModules, kernels_of
from dtrain.attention.kernels import Kernel, SdpaKernel
from dtrain.attention.visibility import Visibility
from dtrain.base.torch_functions import without_torch_functions
from dtrain.parallel.collectives import all_gather
from dtrain.parallel.context.batch import SequenceGather, gather_sequence, mesh_rank, shard_sequence

CUMSUM = (torch.cumsum, Tensor.cumsum)
SOFTMAX = (F.softmax, torch.softmax, torch.special.softmax, Tensor.softmax)
FULL_LAYERS = ("full_attention", "attention")
WINDOW_LAYERS = ("sliding_attention",)
HIDDEN = -1  # the document of keys that a padding mask hides


class CallKind(IntEnum):
    """Source of a call's visibility."""

    LOCAL_MASK = 0  # by the meaning of a causal mask over local tokens
    BIDIRECTIONAL = 1  # every key is seen
    FULL_MASK = 2  # the caller's mask covers the keys of all ranks


class _Call(NamedTuple):
    """A checked attention call.

    Attributes:
        q: [B, H, S/cp, hd].
        k: [B, kv, S/cp, hd].
        v: [B, kv, S/cp, hd_v].
        scale: Factor of the scores.
        kind: Source of the visibility.
        mask: The caller's mask, for FULL_MASK: [..., S/cp or S or 1, S].
        window: The sliding window of the calling module, the query's own key included. None: no window.
        meanings: For LOCAL_MASK, the set of meanings that explain this rank's mask.
        shown_keys: [B or 1, S/cp] bool, False for keys that a padding mask hides. None: no key is hidden.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    kind: CallKind
    mask: Tensor | None = None
    window: int | None = None
    meanings: int = 0
    shown_keys: Tensor | None = None


class _CallReport(NamedTuple):
    """The integers by which ranks compare a call. With `has_error` the others are zeros.

    All fields from `kind` on have to be the same on every rank.
    """

    has_error: int = 0
    meanings: int = 0
    hides_keys: int = 0
    kv_heads: int = 0
    kind: int = 0
    window: int = 0  # -1: no window
    rows: int = 0
    heads: int = 0
    length: int = 0
    head_size: int = 0
    value_head_size: int = 0
    rotates: int = 0

    @classmethod
    def of(cls, call: _Call, rotates: bool) -> "_CallReport":
        rows, heads, length, head_size = call.q.shape
        return cls(
            meanings=call.meanings,
            hides_keys=int(call.shown_keys is not None),
            kv_heads=call.k.shape[1],
            kind=int(call.kind),
            window=-1 if call.window is None else call.window,
            rows=rows,
            heads=heads,
            length=length,
            head_size=head_size,
            value_head_size=call.v.shape[3],
            rotates=int(rotates),
        )

    def arguments(self) -> list[int]:
        """Return the fields that have to be the same on every rank, without `rotates`."""
        sizes = [self.rows, self.heads, self.length, self.head_size, self.value_head_size]
        return [self.kind, self.window, *sizes]


class _Agreement(NamedTuple):
    """The ranks' common facts about a call.

    Attributes:
        meanings: The meanings that explain the masks of all ranks.
        hides_keys: Whether a padding mask hides keys of any rank.
        kv_heads: The largest number of key heads of a rank.
    """

    meanings: int
    hides_keys: bool
    kv_heads: int


class ShardedAttention(TorchFunctionMode):
    """Computes scaled_dot_product_attention over the ranks of a mesh, and refuses attention that it cannot compute.

    Attributes:
        num_calls: Calls that were computed over all ranks.
        num_deferred_calls: Calls that a backward will compute again.
        is_compiled: Whether compiled code has called attention, which then attends to local tokens only.
    """

    def __init__(
        self,
        cp_mesh: DeviceMesh,
        buffers: Sequence[Buffer],
        modules: RunningModules,
        rotates: bool,
        num_padding: int | Tensor,
    ):
        super().__init__()
        self.mesh = cp_mesh
        self.modules = modules
        self.rotates = rotates
        self.num_padding = num_padding
        self.size = cp_mesh.size()
        self.rank = mesh_rank(cp_mesh)
        self.num_calls = 0
        self.num_deferred_calls = 0
        self.is_compiled = False

        self.lengths = {buffer.shard.shape[buffer.dim] for buffer in buffers}
        self._buffer_ids = {id(buffer.tensor) for buffer in buffers}
        positions = [found for found in map(position_buffer, buffers) if found is not None]
        self._position_ids = {id(found.tensor) for found in positions}
        self._masks = LocalMasks(positions, self.rank, self.size)

        # transformers counts positions with torch.arange if it is not given any. See `_check_modules`.
        self._reads_positions = False
        self._makes_positions = False

        self._kernel: ContextKernel | None = None
        # What a kernel prepares for a mask is the same in every layer of one kind. Its type is the kernel's.
        self._prepared: dict[tuple[Any, ...], Any] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Look at every call of torch inside the context, and replace attention."""
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            self._look_at_compiled(func)
            return func(*args, **kwargs)
        if func is _announce_call:  # from a context inside this one
            self.num_calls += 1
            return func(*args)
        for value in args:
            if id(value) in self._position_ids:
                self._reads_positions = True
        if self.modules.have_kernel:
            return func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        if self.modules.stack and self._counts_positions(func, args):
            self._makes_positions = True
        problem = self._problem_of(func, args, kwargs)
        if problem:
            raise NotImplementedError(
                f"{problem} inside a context-parallel context, where it would see only this rank's part of the rows. "
                "Use torch.nn.functional.scaled_dot_product_attention (transformers: attn_implementation='sdpa'), or "
                "call it outside the context on full rows"
            )
        return func(*args, **kwargs)

    def _look_at_compiled(self, func: Any) -> None:
        """Note attention in code that is being compiled, where it cannot be replaced."""
        if func is F.scaled_dot_product_attention:
            self.is_compiled = True
        if "flex_attention" in str(func):
            raise NotImplementedError("flex_attention inside a context-parallel context sees local tokens only")

    def _counts_positions(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Detect position ids that a model makes from local tokens, by `arange` or `cumsum` (OPT, RoBERTa)."""
        if not args:
            return False
        if func is torch.arange:
            return args[0] in self.lengths
        given = args[0]
        is_sum = func in CUMSUM and isinstance(given, Tensor)
        return is_sum and given.dim() == 2 and given.shape[1] in self.lengths

    # Computations that would see local tokens only

    def _problem_of(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Describe a computation that would mix local tokens only. Return an empty string for all other calls.

        This runs for every call of torch, so the cheap comparisons come first.
        """
        if func is F.multi_head_attention_forward:
            return "nn.MultiheadAttention was called"
        if func is F.pad and self.modules.stack and id(args[0]) in self._buffer_ids:
            # transformers shifts labels in this way: F.pad(labels, (0, 1))[..., 1:]
            return (
                f"{type(self.modules.stack[0]).__name__} shifted labels {list(args[0].shape)} (compute the loss from "
                "its logits, or pass labels to transformers as shift_labels)"
            )
        if str(getattr(func, "__module__", "")).startswith("torch._ops"):
            return _problem_of_operator(str(func))
        if func is F.conv1d:
            return self._problem_of_convolution(args, kwargs)
        if func in SOFTMAX:
            return self._problem_of_softmax(args, kwargs)
        return ""

    def _problem_of_convolution(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Describe a convolution over tokens. They are the last dimension, possibly padded by width - 1."""
        given = args[0] if args else kwargs.get("input")
        if not isinstance(given, Tensor):
            return ""
        weight = args[1] if len(args) > 1 else kwargs["weight"]
        width = weight.shape[-1]
        possible_lengths = {given.shape[-1], given.shape[-1] - width + 1}
        if width > 1 and possible_lengths & self.lengths:
            return f"a convolution over the tokens of a row, {list(given.shape)}, was called"
        return ""

    def _problem_of_softmax(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Describe a softmax over attention scores, [B, H, queries, keys]. Attention sinks add one more key."""
        given = args[0] if args else kwargs.get("input")
        if not isinstance(given, Tensor) or given.dim() != 4:
            return ""
        queries, keys = given.shape[-2:]
        if queries in self.lengths and keys in (queries, queries + 1):
            return f"attention scores {list(given.shape)} were computed without a kernel (eager attention)"
        return ""

    # One call

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
        """Compute scaled_dot_product_attention, whose arguments these are, over the tokens of all ranks.

        Collectives:
            One all-gather of 12 integers, and the exchange of keys and values.
        """
        # A rank that refuses the call still takes part in the all-gather, or the others would wait for it.
        call = None
        error: Exception | None = None
        try:
            call = self._check(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        except (NotImplementedError, ValueError) as problem:
            error = problem
        report = _CallReport(has_error=1) if call is None else _CallReport.of(call, self.rotates)
        reports = self._gather_reports(report, query.device)
        if error is not None:
            raise error
        assert call is not None
        agreement = self._compare(report, reports)
        if call.k.shape[1] != agreement.kv_heads:
            # transformers repeats keys for their query heads if it has a mask, which not every rank needs.
            repeats = agreement.kv_heads // call.k.shape[1]
            k = call.k.repeat_interleave(repeats, dim=1)
            v = call.v.repeat_interleave(repeats, dim=1)
            call = call._replace(k=k, v=v)
        self.num_calls += 1
        self.num_deferred_calls += int(self.modules.is_deferred)
        _announce_call(query)
        with without_torch_functions():  # contexts may be nested: the outer one must not see these calls
            if call.kind == CallKind.FULL_MASK:
                out = self._attend_under_mask(call)
            else:
                out = self._attend_by_meaning(call, agreement)
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
        q = _with_four_dims(query)
        k = _with_four_dims(key)
        v = _with_four_dims(value)
        if k.shape[:2] != v.shape[:2] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
            raise ValueError(f"attention of {shapes}: these do not fit one another")
        is_shared_by_all = k.shape[1] == 1  # without enable_gqa too, by broadcasting (Falcon)
        if q.shape[1] != k.shape[1] and not is_shared_by_all and (not enable_gqa or q.shape[1] % k.shape[1]):
            raise ValueError(
                f"attention of {shapes}: q and k have different numbers of heads (enable_gqa={enable_gqa})"
            )
        if mask is not None and is_causal:
            raise ValueError("scaled_dot_product_attention takes attn_mask or is_causal=True, not both")
        if scale is None:
            scale = q.shape[3] ** -0.5

        if mask is not None and mask.shape[-1] == length * self.size:
            if mask.dim() < 2 or mask.shape[-2] not in (1, length, length * self.size):
                raise ValueError(f"attn_mask {list(mask.shape)} does not fit {shapes} over {self.size} ranks")
            return _Call(q, k, v, scale, CallKind.FULL_MASK, mask=mask)
        window = _window_of(self.modules.stack)
        if window is not None and not isinstance(window, int):
            raise NotImplementedError(f"the calling module's sliding_window={window!r} is not a number of tokens")
        if mask is None and not is_causal:
            if window is not None:
                raise NotImplementedError(f"attention in both directions with a window of {window} tokens")
            return _Call(q, k, v, scale, CallKind.BIDIRECTIONAL)
        if mask is None:
            meanings = self._masks.explain_causal(length, window)
            return _Call(q, k, v, scale, CallKind.LOCAL_MASK, window=window, meanings=meanings)
        explained = self._masks.explain_mask(mask, length, window)
        return _Call(
            q,
            k,
            v,
            scale,
            CallKind.LOCAL_MASK,
            window=window,
            meanings=explained.meanings,
            shown_keys=explained.shown_keys,
        )

    def _check_modules(self) -> None:
        """Raise for running modules that mix tokens in an unknown way, or that were not given their positions."""
        stack = self.modules.stack
        if self.modules.num_compiled:
            raise NotImplementedError(
                "attention of a compiled module inside a context-parallel context: its window cannot be read. Call the "
                "module uncompiled"
            )
        if stack and any(kernels_of(stack[0])):
            raise NotImplementedError(self.modules.problem("attends with another kernel of dtrain"))
        for module in stack:
            # transformers names the layers that are not attention, such as linear_attention, in its config.
            config = getattr(module, "config", None)
            layer_types = getattr(config, "layer_types", None) or ()
            unknown = set(layer_types) - {*FULL_LAYERS, *WINDOW_LAYERS}
            if getattr(config, "attention_chunk_size", None) is not None:
                unknown.add("chunked_attention")
            if unknown:
                raise NotImplementedError(
                    f"{type(module).__name__} has layers of type {', '.join(sorted(unknown))}, which would see only "
                    "this rank's part of the rows. Only full and sliding-window attention can run in this context"
                )
        if stack and self._masks.positions and not self._reads_positions and self._has_own_positions():
            raise ValueError(
                f"{type(stack[0]).__name__} counts positions from 0 on every rank, because it was not "
                "given the position_ids of this context: call it with position_ids=batch['position_ids']"
            )

    def _has_own_positions(self) -> bool:
        """Detect position ids of the running model's own, made in this call or stored in a buffer (BERT)."""
        names = [name.rpartition(".")[2] for name, _ in self.modules.stack[0].named_buffers()]
        return self._makes_positions or "position_ids" in names

    # Agreement of the ranks

    def _gather_reports(self, report: _CallReport, device: torch.device) -> list[_CallReport]:
        """Return the reports of all ranks. One all-gather, which the host reads."""
        rows = all_gather(torch.tensor([report], device=device), 0, self.mesh.get_group())
        return [_CallReport(*row) for row in rows.tolist()]

    def _compare(self, own: _CallReport, reports: Sequence[_CallReport]) -> _Agreement:
        """Compare the calls of all ranks.

        Raises:
            NotImplementedError: If another rank has refused the call.
            ValueError: If the calls differ, or if their numbers of key heads do not fit one another.
        """
        for rank, report in enumerate(reports):
            if report.has_error:
                raise NotImplementedError(
                    f"rank {rank} of the {self.size} context-parallel ranks has refused this attention call; its own "
                    "error says why"
                )
            if report.arguments() != own.arguments() or report.rotates != own.rotates:
                raise ValueError(
                    f"the context-parallel ranks call attention with different arguments: rank {rank} has (kind, "
                    f"window, q's shape, v's head size) {report.arguments()}, this one has {own.arguments()}"
                )
        common_meanings = own.meanings
        for report in reports:
            common_meanings &= report.meanings
        hides_keys = any(report.hides_keys for report in reports)
        kv_heads = [report.kv_heads for report in reports]
        if any(max(kv_heads) % heads for heads in kv_heads):
            raise ValueError(f"the context-parallel ranks have {kv_heads} key heads")
        return _Agreement(common_meanings, hides_keys, max(kv_heads))

    # Computation

    def _attend_by_meaning(self, call: _Call, agreement: _Agreement) -> Tensor:
        """Compute attention by positions and documents, with the context's kernel. Returns [B, H, S/cp, hd_v]."""
        rows, _, length, _ = call.q.shape
        device = call.q.device
        meaning_bit = 0
        documents = None  # of all tokens, [B, S]
        if call.kind == CallKind.LOCAL_MASK:
            meaning = self._masks.choose(agreement.meanings, length)
            meaning_bit = meaning.bit
            if meaning.documents is not None:
                documents = meaning.documents.to(device).expand(rows, -1)
        if agreement.hides_keys:  # padding may differ in every call
            prepared = self._prepare(call, *self._with_padding(call, documents))
        else:
            cache_key = (meaning_bit, call.kind, call.window, rows, length, call.q.dtype, device)
            if cache_key not in self._prepared:
                self._prepared[cache_key] = self._prepare(call, documents, documents)
            prepared = self._prepared[cache_key]
        q, k, v = call.q.transpose(1, 2), call.k.transpose(1, 2), call.v.transpose(1, 2)  # [B, S/cp, heads, ..]
        return self._context_kernel()(q, k, v, prepared, call.scale).transpose(1, 2)

    def _with_padding(self, call: _Call, documents: Tensor | None) -> tuple[Tensor, Tensor]:
        """Move keys that a padding mask hides to a document of their own, which no other token sees.

        For example, with padding on the left and on the right, `x` hidden and one document:

            tokens       x  x  a  b  x
            keys        -1 -1  0  0 -1
            queries     -1 -1  0  0  0

        Args:
            call: Its `shown_keys` are this rank's.
            documents: [B, S], or None if each row is one document.

        Returns:
            The documents of the keys and of the queries, [B, S] each. Queries before the first shown key see the
            hidden document, because a kernel needs at least one key for each query.

        Collectives:
            One all-gather.
        """
        rows, _, length, _ = call.q.shape
        if call.shown_keys is None:
            shown = torch.ones(rows, length, dtype=torch.long, device=call.q.device)
        else:
            shown = call.shown_keys.long().expand(rows, -1)
        all_shown = gather_sequence(shown.contiguous(), self.mesh.get_group())  # [B, S]
        if documents is None:
            documents = torch.zeros_like(all_shown)
        key_documents = documents.masked_fill(all_shown == 0, HIDDEN)
        is_before_first_shown = all_shown.cumsum(dim=1) == 0
        query_documents = documents.masked_fill(is_before_first_shown, HIDDEN)
        return key_documents, query_documents

    def _prepare(self, call: _Call, key_documents: Tensor | None, query_documents: Tensor | None) -> Any:
        """Prepare the context's kernel for a mask.

        Args:
            call: Its kind, window and sizes count.
            key_documents: Documents of the keys of all ranks, [B, S]. None: each row is one document.
            query_documents: The same for the queries of all ranks.
        """
        rows, _, length, _ = call.q.shape
        device = call.q.device
        total = length * self.size
        query_positions = self._masks.natural_positions(length, device)[None]  # [1, S/cp]
        if key_documents is not None:
            query_positions = query_positions.expand(rows, -1)
        local_documents = None
        if query_documents is not None:
            local_documents = shard_sequence(query_documents, self.rank, self.size)
        query_ends = None
        if call.kind == CallKind.BIDIRECTIONAL:
            # The last position that a query sees is the last token that is not padding.
            padding = torch.as_tensor(self.num_padding, device=device).view(-1, 1)  # [1 or B, 1]
            query_ends = (total - 1 - padding).clamp(min=0).expand(-1, length)
        visibility = Visibility(
            queries=length,
            keys=total,
            window=call.window,
            query_positions=query_positions,
            key_positions=torch.arange(total, device=device)[None],
            query_documents=local_documents,
            key_documents=key_documents,
            rows=rows,
            query_ends=query_ends,
        )
        return self._context_kernel().prepare(visibility, call.q.dtype, device)

    def _attend_under_mask(self, call: _Call) -> Tensor:
        """Compute attention to gathered keys under the caller's mask over all keys. Returns [B, H, S/cp, hd_v]."""
        assert call.mask is not None
        length = call.q.shape[2]
        mask = call.mask
        if mask.shape[-2] == length * self.size:  # rows for the queries of all ranks
            mask = mask.index_select(-2, self._masks.natural_positions(length, mask.device))
        k, v = SequenceGather([call.k, call.v], self.mesh.get_group(), dim=2).wait()
        is_grouped = call.q.shape[1] != call.k.shape[1]
        return F.scaled_dot_product_attention(call.q, k, v, attn_mask=mask, scale=call.scale, enable_gqa=is_grouped)

    def _context_kernel(self) -> ContextKernel:
        if self._kernel is None:
            kernel_type: Callable[[Kernel, DeviceMesh], ContextKernel] = RingKernel if self.rotates else GatherKernel
            self._kernel = kernel_type(SdpaKernel(), self.mesh)
        return self._kernel


def _announce_call(query: Tensor) -> None:
    """Let the contexts around this one count an attention call that is computed here."""
    if has_torch_function((query,)):
        handle_torch_function(_announce_call, (query,), query)


def _problem_of_operator(name: str) -> str:
    """Describe an attention operator that is not torch's own, such as torch_attn._varlen_attn or flash_attn's."""
    is_attention = "attn" in name or "attention" in name
    if is_attention and "backward" not in name and not name.startswith("aten."):
        return f"the operator {name} was called"
    return ""


def _with_four_dims(tensor: Tensor) -> Tensor:
    """Return [L, hd], [H, L, hd] or [B, H, L, hd] as [B, H, L, hd]."""
    missing_dims = 4 - tensor.dim()
    return tensor.view(*[1] * missing_dims, *tensor.shape)


def _window_of(stack: Sequence[nn.Module]) -> Any:
    """Return the sliding window of the innermost running module that has one, as transformers stores it.

    transformers stores the window as an attribute of the attention module, or of the config of a module around it. The
    caller checks that the value is a number, because any module may have an attribute of this name. None means that
    there is no window.
    """
    for module in reversed(stack):
        config = getattr(module, "config", None)
        layer_types = getattr(config, "layer_types", None)
        layer = getattr(module, "layer_idx", None)
        if layer_types and layer is not None and layer_types[layer] in FULL_LAYERS:
            return None  # even if the module has a sliding_window, which may be that of other layers (Exaone 4)
        if hasattr(module, "sliding_window"):
            return module.sliding_window
        if config is not None:
            return getattr(config, "sliding_window", None)
    return None


# Where a graph breaks, Dynamo would compile these as functions of their own, and it does not compare `func` when it
# uses such code again: `tensor.shape` then returned the device (torch 2.13). Calls that are traced are not affected.
skip_code(ShardedAttention.__torch_function__.__code__)
skip_code(RunningModules.enter.__code__)
skip_code(RunningModules.leave.__code__)
