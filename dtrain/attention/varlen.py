"""The kernels of variable-length attention, and the check of the one for CUDA on a device.

`VarlenKernel` is for CUDA in half precision. `TreeKernel` is for CPUs, and uses variable-length calls only for rows in
which sequences share their beginning (`attention.tree`).

Its time is proportional to the sum of the documents' squared lengths, and no mask is stored. With a mask it would be
the square of the row's length: for example, 8 documents of 512 tokens in a row take 8 · 512² instead of 4096², an
eighth. `attention.packing` lists the calls of a forward, and `attention.segments` has the operations.

torch contains FlashAttention-2. If their packages are installed, `choose_version` replaces its operations by those of
FlashAttention-3 on Hopper and FlashAttention-4 on Blackwell, forward and backward, for the process.

Before `segments.Flash` is used on a device, `check_varlen` compares a small case of every kind that the model needs
with `SdpaKernel`, forward and backward. For an exchange, this process computes its ranks one after the other.
"""

from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import attention
from torch.nn.attention import SDPBackend, sdpa_kernel

from dtrain.attention.blocks import BlockByBlock, Gradients, Partial, sinks_grad, with_sinks
from dtrain.attention.context import over_keys
from dtrain.attention.kernels import Gathering, Kernel, SdpaKernel
from dtrain.attention.packing import Packing
from dtrain.attention.segments import Flash, FlashOnCpu, Steps, VarlenBlocks, calls_to_device
from dtrain.attention.tree import TreePacking
from dtrain.attention.visibility import MaskStreams, Visibility
from dtrain.base.batch import Batch
from dtrain.base.ranks import Ranks
from dtrain.parallel.context.batch import join_sequence, shard_sequence

VERSIONS = {9: ("FA3", "flash_attn_interface"), 10: ("FA4", "flash_attn")}
"""torch's name of a version and its package, by the major number of the GPU's compute capability."""

_CHECK_LENGTHS = ((1, 61, 66, 128), (62, 138, 56))  # documents of two rows of 256, the last of them padding
_CHECK_NODES, _CHECK_PARENTS = (61, 66, 1, 56, 72), (-1, 0, 1, 1, 0)  # a row of 256 with shared beginnings
_CHECK_WINDOW = 100  # a window that hides something of these
# Errors that are raised if torch, a kernel's package or the device does not support an operation.
UNSUPPORTED = RuntimeError, ValueError, TypeError, AttributeError, AssertionError
# Largest ratio of the kernel's error to SDPA's error, both relative to float32. It is above 1, because the kernel adds
# in another order.
_ERROR_FACTOR = 4.0

_refused_versions: set[str] = set()
"""Versions that failed the check of a model of this process. They stay off, because all models share one version."""


class VarlenRows(NamedTuple):
    """Form of a visibility that `VarlenKernel` reads: variable-length calls, or masks of the other kernel.

    Attributes:
        num_tokens: Tokens of a row on this rank. Sequence parallel may have padded rows further. That padding is not
            computed by variable-length calls, and its output is 0.
        steps: The calls for each exchange of keys. None: the other kernel computes these rows.
        masks: The result of the other kernel's `prepare`. None if there are calls.
        is_tree: Whether the calls are those of a `TreePacking`, whose results are merged.
    """

    num_tokens: int
    steps: Steps | None
    masks: Any
    is_tree: bool = False


class VarlenKernel(Kernel):
    """Variable-length attention for rows with a `Packing` (several documents, sharded rows, or a window), or with a
    `TreePacking` (shared beginnings).

    It contains another kernel, which exchanges the keys. That kernel also computes, under masks, the rows without a
    packing: plain causal rows on one rank, bidirectional images, documents whose positions do not increase by 1, and
    documents in several pieces.

    If the caller does not pass the packing, documents and positions are copied from the device to the host, once per
    forward and kind of layer.

    Args:
        flash: Implementation of variable-length attention. None: torch's own.
        masked: `SdpaKernel` for full rows, `GatherKernel` or `RingKernel` under context parallel. None: full rows.
        note: Why this kernel was chosen although another was requested.
    """

    takes_packing = True

    def __init__(self, flash: Flash | None = None, masked: Kernel | None = None, note: str = ""):
        self.flash = flash or Flash()
        self.masked = masked or SdpaKernel()
        self.note = note
        self.name = "varlen" + self.masked.exchange
        self.group = self.masked.group
        self.gathers = self.masked.gathers
        self.is_context_parallel = self.masked.is_context_parallel

    def computes_from(self, packing: Packing | TreePacking, window: int | None) -> bool:
        return self.masked.has_calls(packing, window)

    def take_rows(self, batch: Batch) -> None:
        """Pass the rows on to the other kernel."""
        self.masked.take_rows(batch)

    def keys(self, local: MaskStreams, packing: Packing | TreePacking | None = None) -> MaskStreams | None:
        return None if packing is not None else self.masked.keys(local)

    def prepare(self, visibility: Visibility, dtype: torch.dtype, device: torch.device) -> VarlenRows:
        packing = self._find_packing(visibility)
        if packing is None:
            masks = self.masked.prepare(visibility, dtype, device)
            return VarlenRows(visibility.queries, None, masks)
        num_ranks = 1 if self.group is None else self.group.size()
        calls_of_steps = self.masked.calls(packing, visibility.window)
        # Copy the calls of all steps to the device in one copy, and divide them into steps afterwards.
        segments = calls_to_device(chain.from_iterable(calls_of_steps), device)
        steps: Steps = []
        start = 0
        for calls in calls_of_steps:
            steps.append(segments[start : start + len(calls)])
            start += len(calls)
        return VarlenRows(packing.length // num_ranks, steps, None, packing.is_tree)

    def _find_packing(self, visibility: Visibility) -> Packing | TreePacking | None:
        """Return the packing of the rows that variable-length calls compute. None if the other kernel computes them."""
        sees_to_image_ends = visibility.query_ends is not None
        is_only_causal = visibility.packing is None and visibility.is_causal
        return None if sees_to_image_ends or is_only_causal else find_packing(visibility)

    def begin_gather(self, k: Tensor, v: Tensor, prepared: VarlenRows) -> Gathering:
        if prepared.steps is not None:
            # The packing does not count the padding of sequence parallel, so it is not sent.
            k, v = k[:, : prepared.num_tokens], v[:, : prepared.num_tokens]
        return self.masked.begin_gather(k, v, prepared.masks)

    def over(
        self, q: Tensor, k: Tensor, v: Tensor, prepared: VarlenRows, scale: float, sinks: Tensor | None = None
    ) -> Tensor:
        if prepared.steps is None:
            return self.masked.over(q, k, v, prepared.masks, scale, sinks)
        tokens = q[:, : prepared.num_tokens]
        if prepared.is_tree:
            out = self._over_tree(tokens, k, v, prepared.steps, scale, sinks)
        else:
            out = self.masked.over_segments(self.flash, tokens, k, v, prepared.steps, scale, sinks)
        num_padding = q.shape[1] - out.shape[1]
        return F.pad(out, (0, 0, 0, 0, 0, num_padding)) if num_padding else out

    def _over_tree(self, q: Tensor, k: Tensor, v: Tensor, steps: Steps, scale: float, sinks: Tensor | None) -> Tensor:
        """Compute attention of a row with shared beginnings. The arguments are those of `Kernel.over_segments`."""
        flat_q, flat_k, flat_v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)  # [tokens, heads, hd or hd_v]
        attention = VarlenBlocks(self.flash, scale)
        out = BlockByBlock.apply(flat_q.contiguous(), flat_k, flat_v, steps, self.masked.ring(), attention, sinks)
        return out.unflatten(0, q.shape[:2])


class TreeKernel(VarlenKernel):
    """Variable-length attention for rows with a `TreePacking`. Another kernel computes all other rows, under masks.

    On a CPU, variable-length calls are no gain for packed rows, whose masks hide most keys of a span of queries. They
    are one for shared beginnings, where the keys of other completions are between those that a query sees.

    Args:
        flash: Implementation of variable-length attention. None: `FlashOnCpu`.
        masked: As for `VarlenKernel`.
        note: As for `VarlenKernel`.
    """

    takes_packing = False

    def __init__(self, flash: Flash | None = None, masked: Kernel | None = None, note: str = ""):
        super().__init__(flash or FlashOnCpu(), masked, note)
        self.name = self.masked.name

    def computes_from(self, packing: Packing | TreePacking, window: int | None) -> bool:
        return packing.is_tree and super().computes_from(packing, window)

    def keys(self, local: MaskStreams, packing: Packing | TreePacking | None = None) -> MaskStreams | None:
        tree = packing if packing is not None and packing.is_tree else None
        return super().keys(local, tree)

    def _find_packing(self, visibility: Visibility) -> Packing | TreePacking | None:
        packing = visibility.packing
        return packing if packing is not None and packing.is_tree else None


def find_packing(visibility: Visibility) -> Packing | TreePacking | None:
    """Return the packing of full rows.

    If it is not given, plain rows have one document each. Otherwise the positions and documents of the keys are copied
    from the device, and the host waits for them.

    Args:
        visibility: The mask of a kind of layer.

    Returns:
        The packing. None if the rows are not packed (`Packing.of`), or if documents see those of their ancestors.
    """
    if visibility.packing is not None:
        return visibility.packing
    if visibility.key_last_documents is not None:
        return None
    if visibility.is_by_index:
        return Packing.one_document_per_row(visibility.rows, visibility.queries)
    positions, documents = visibility.key_positions, visibility.key_documents
    if positions is None:
        return None
    if documents is None:
        return Packing.of(positions.expand(visibility.rows, -1).cpu(), None)
    on_device = torch.stack([positions.expand_as(documents), documents])
    host_positions, host_documents = on_device.cpu().unbind(0)  # one copy for both
    return Packing.of(host_positions, host_documents)


def choose_version(device: torch.device, prove: Callable[[bool], str | None], ranks: Ranks) -> tuple[str | None, str]:
    """Activate FlashAttention-3 or 4 if every rank has it and it passes the check. Otherwise use torch's own version.

    Args:
        device: The device.
        prove: Function that checks the active version. Its argument is True for version 3 or 4. It returns the problem,
            the same on every rank, or None if the results are correct.
        ranks: All ranks.

    Returns:
        The problem of the active version, or None, and a note for the user.

    Collectives:
        One gather of the versions' names, and the collectives of `prove`.
    """
    name, note = _activate_later_version(device)
    names = ranks.gather_results(lambda: name)
    if len(set(names)) > 1:
        _refuse_version(name)
        installed = [name_of_rank for name_of_rank in names if name_of_rank is not None]
        name, note = None, note or f"FA2: {installed[0]} is not on every rank"
    if name is not None:
        problem = prove(True)
        if problem is None:
            return None, name
        _refuse_version(name)
        note = f"FA2: {name}: {problem}"
    return prove(False), note


def _activate_later_version(device: torch.device) -> tuple[str | None, str]:
    """Activate FlashAttention-3 or 4, if it is installed for a device.

    Returns:
        Its name, or None if it is not active. And the reason why an installed version cannot be used, or "".
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return None, ""
    major, _ = torch.cuda.get_device_capability(device)
    if major not in VERSIONS:
        return None, ""
    name, package = VERSIONS[major]
    if find_spec(package) is None:
        return None, ""
    if name in _refused_versions:
        return None, f"FA2: another model of this run has refused {name}"
    try:
        attention.activate_flash_attention_impl(name)
    # Raised if the versions of torch and of the package do not fit each other.
    except (ImportError, OSError, RuntimeError, AttributeError, ValueError) as error:
        return None, f"FA2: {name} does not load: {first_line(error)}"
    return name, ""


def _refuse_version(name: str | None) -> None:
    """Restore torch's own version, and do not activate version `name` again in this process."""
    if name is not None:
        _refused_versions.add(name)
        attention.restore_flash_attention_impl()


class CheckCase(NamedTuple):
    """Inputs of the check of a kernel. They are the same in every process.

    Attributes:
        q: [B, S, H, hd].
        k: [B, S, kv, hd].
        v: [B, S, kv, hd_v].
        grad: Gradient of the output, [B, S, H, hd_v].
        visibility: The mask.
        packing: The documents of the rows, or the nodes of one row.
        scale: Factor of the scores.
        sinks: [H], or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    visibility: Visibility
    packing: Packing | TreePacking
    scale: float
    sinks: Tensor | None = None

    @property
    def inputs(self) -> list[Tensor]:
        """The tensors that receive gradients: q, k, v, and the sinks if there are some."""
        if self.sinks is None:
            return [self.q, self.k, self.v]
        return [self.q, self.k, self.v, self.sinks]


class _Check(NamedTuple):
    """Results of one comparison: the output and the gradients, as tensors in the same order.

    Attributes:
        name: Name of the implementation that is checked.
        results: Its tensors.
        sdpa: Those of SDPA, in the same dtype.
        exact: Those of SDPA in float32.
    """

    name: str
    results: list[Tensor]
    sdpa: list[Tensor]
    exact: list[Tensor]


def check_varlen(
    flash: Flash,
    *,
    heads: int,
    key_heads: int,
    head_dim: int,
    value_dim: int,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
    exchange: str | None = None,
    sinks: bool = False,
    is_later: bool = False,
    shares_beginnings: bool = False,
) -> str | None:
    """Compare variable-length attention on a device with `SdpaKernel`, forward and backward, for small cases.

    The check has its own random generator, so it does not change the random numbers of the run.

    Args:
        flash: Implementation of variable-length attention.
        heads: Query heads of this rank.
        key_heads: Key heads of this rank.
        head_dim: Size of a head of queries and keys.
        value_dim: Size of a head of values.
        window: Number of keys that a query sees, its own included. None: no window.
        dtype: Dtype of the inputs, float16 or bfloat16.
        device: The device.
        exchange: "allgather" or "ring" to also check context parallel. None checks full rows only.
        sinks: Whether the heads have sinks.
        is_later: Whether `choose_version` has activated FlashAttention-3 or 4. SDPA then uses it for plain causal rows,
            too, so these are also checked.
        shares_beginnings: Whether to also check rows with shared beginnings.

    Returns:
        The problem, or None if the results are as close to those in float32 as SDPA's.

    Raises:
        torch.OutOfMemoryError: If the device has too little memory for the check.
        torch.AcceleratorError: If a kernel has failed on the device, which cannot be used any more.
    """
    smaller_window = None if window is None else min(window, _CHECK_WINDOW)

    def make_case(case_dtype: torch.dtype, rows: CheckRows | None = None) -> CheckCase:
        return _check_case(
            rows or _packed_rows(smaller_window, device),
            heads,
            key_heads,
            head_dim,
            value_dim,
            sinks,
            dtype=case_dtype,
            device=device,
        )

    try:
        exact_case, case = make_case(torch.float32), make_case(dtype)
        sdpa = _attend_rows(SdpaKernel(), case)
        exact = _attend_rows(SdpaKernel(), exact_case)
        checks = [_Check("varlen", _attend_rows(VarlenKernel(flash), case), sdpa, exact)]
        if exchange is not None:
            attend = attend_in_ring if exchange == "ring" else attend_gathered
            checks.append(_Check(f"varlen for {exchange}", attend(flash, case), sdpa, exact))
        if is_later:
            checks.append(_check_sdpa(case, exact_case))
        if shares_beginnings:
            # In a ring, masks compute shared beginnings under a window.
            window_of_calls = None if exchange == "ring" else smaller_window
            rows = _row_with_shared_beginnings(1 if exchange is None else 4, window_of_calls, device)
            tree_case, exact_tree_case = make_case(dtype, rows), make_case(torch.float32, rows)
            checks.append(_check_shared_beginnings(flash, tree_case, exact_tree_case, exchange))
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except UNSUPPORTED as error:
        return does_not_run("varlen", error)
    for check in checks:
        problem = describe_difference(check.name, "sdpa", check.results, check.sdpa, check.exact)
        if problem is not None:
            return problem
    return None


def _check_sdpa(case: CheckCase, exact_case: CheckCase) -> _Check:
    """Compute plain causal rows by SDPA, which FlashAttention-3 or 4 computes if it is active, and by torch's math."""
    causal = Visibility(case.visibility.queries, case.visibility.keys, rows=len(case.q))
    rows = case._replace(visibility=causal)
    exact_rows = exact_case._replace(visibility=causal)
    with sdpa_kernel(SDPBackend.MATH):
        by_math = _attend_rows(SdpaKernel(), rows)
    results = _attend_rows(SdpaKernel(), rows)
    return _Check("sdpa of plain rows", results, by_math, _attend_rows(SdpaKernel(), exact_rows))


def _check_shared_beginnings(flash: Flash, case: CheckCase, exact_case: CheckCase, exchange: str | None) -> _Check:
    """Compute a row with shared beginnings by variable-length calls on two ranks, or on one without an exchange."""
    if exchange is None:
        results = _attend_rows(VarlenKernel(flash), case)
    elif exchange == "ring":
        results = attend_in_ring(flash, case)
    else:
        results = attend_tree_gathered(flash, case)
    sdpa, exact = _attend_rows(SdpaKernel(), case), _attend_rows(SdpaKernel(), exact_case)
    return _Check("varlen for shared beginnings", results, sdpa, exact)


def describe_difference(
    name: str, reference: str, results: Sequence[Tensor], reference_results: Sequence[Tensor], exact: Sequence[Tensor]
) -> str | None:
    """Compare the errors of two implementations, and describe an error that rounding does not explain.

    Args:
        name: Name of the implementation that is checked.
        reference: Name of the implementation that it is compared with.
        results: Tensors of `name`.
        reference_results: The same tensors of `reference`.
        exact: The same tensors, computed in float32.

    Returns:
        A message if an error of `name` is much larger than that of `reference`. None otherwise.
    """
    for result, reference_result, exact_result in zip(results, reference_results, exact, strict=True):
        error = _largest_difference(result, exact_result)
        reference_error = _largest_difference(reference_result, exact_result)
        rounding = torch.finfo(result.dtype).eps * float(exact_result.abs().max())
        # `not <=` is also true if the error is NaN.
        if not error <= _ERROR_FACTOR * reference_error + rounding:
            return (
                f"{name} gives other numbers than {reference} here: {error:.2e} from float32, {reference} "
                f"{reference_error:.2e}"
            )
    return None


def _largest_difference(values: Tensor, exact: Tensor) -> float:
    return float((values.float() - exact).abs().max())


class CheckRows(NamedTuple):
    """Rows of the check of a kernel: their mask, and the packing that describes the same."""

    visibility: Visibility
    packing: Packing | TreePacking


def _packed_rows(window: int | None, device: torch.device) -> CheckRows:
    """Return two rows with several documents each."""
    documents = documents_of(_CHECK_LENGTHS)
    positions = torch.tensor([[position for size in row for position in range(size)] for row in _CHECK_LENGTHS])
    rows, length = documents.shape
    packing = Packing.of(positions, documents)
    assert packing is not None
    documents, positions = documents.to(device), positions.to(device)
    visibility = Visibility(length, length, window, positions, positions, documents, documents, rows, packing)
    return CheckRows(visibility, packing)


def _row_with_shared_beginnings(num_chunks: int, window: int | None, device: torch.device) -> CheckRows:
    """Return a row of nodes at three depths, which is cut into chunks as under context parallel."""
    packing = TreePacking.of(_CHECK_NODES, _CHECK_PARENTS, num_chunks)
    positions, nodes, last_nodes = (stream.to(device) for stream in packing.streams())
    length = packing.length
    visibility = Visibility(
        length,
        length,
        window,
        query_positions=positions,
        key_positions=positions,
        query_documents=nodes,
        key_documents=nodes,
        packing=packing,
        key_last_documents=last_nodes,
    )
    return CheckRows(visibility, packing)


def _check_case(
    rows: CheckRows,
    heads: int,
    key_heads: int,
    head_dim: int,
    value_dim: int,
    has_sinks: bool,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> CheckCase:
    generator = torch.Generator().manual_seed(0)

    def random(num_heads: int, size: int) -> Tensor:
        values = torch.randn(rows.visibility.rows, rows.visibility.keys, num_heads, size, generator=generator)
        # Rounded to bfloat16, so that the case in float32 has the same numbers.
        return values.to(torch.bfloat16).float().to(device, dtype)

    q = random(heads, head_dim)
    k = random(key_heads, head_dim)
    v = random(key_heads, value_dim)
    grad = random(heads, value_dim)
    sinks = torch.linspace(-1.0, 3.0, heads, device=device, dtype=dtype) if has_sinks else None
    return CheckCase(q, k, v, grad, rows.visibility, rows.packing, head_dim**-0.5, sinks)


def _attend_rows(kernel: Kernel, case: CheckCase) -> list[Tensor]:
    """Return the output and the gradients of q, k, v and sinks."""
    prepared = kernel.prepare(case.visibility, case.q.dtype, case.q.device)

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        return kernel(q, k, v, prepared, case.scale, sinks)

    return with_gradients(attend, case.inputs, case.grad)


def attend_gathered(flash: Flash, case: CheckCase, size: int = 2) -> list[Tensor]:
    """Compute the same as `_attend_rows`, rank by rank over gathered keys, for `size` ranks. No collectives."""

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        outputs = []
        for rank in range(size):
            calls = calls_to_device(case.packing.over_gathered(case.visibility.window, rank, size), q.device)
            local_q = shard_sequence(q, rank, size)
            outputs.append(over_keys(flash, local_q, k.flatten(0, 1), v.flatten(0, 1), calls, case.scale, sinks))
        return join_sequence(outputs, 1)

    return with_gradients(attend, case.inputs, case.grad)


def attend_tree_gathered(flash: Flash, case: CheckCase, size: int = 2) -> list[Tensor]:
    """Compute the same as `attend_gathered` for a row with shared beginnings. No collectives."""
    attention = VarlenBlocks(flash, case.scale)

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        outputs = []
        for rank in range(size):
            calls = calls_to_device(case.packing.over_gathered(case.visibility.window, rank, size), q.device)
            local_q = shard_sequence(q, rank, size)[0]
            out = BlockByBlock.apply(local_q, k[0], v[0], [calls], None, attention, sinks)
            outputs.append(out[None])
        return join_sequence(outputs, 1)

    return with_gradients(attend, case.inputs, case.grad)


@torch.no_grad()
def attend_in_ring(flash: Flash, case: CheckCase, size: int = 2) -> list[Tensor]:
    """Compute the same as `_attend_rows`, rank by rank in a ring of `size` ranks. No collectives."""
    attention = VarlenBlocks(flash, case.scale)
    rows = len(case.q)
    wide = torch.promote_types(case.q.dtype, torch.float32)

    def shards_of(tensor: Tensor) -> list[Tensor]:
        """Return the flat tokens of each rank, [B · S/cp, ..]."""
        return [shard_sequence(tensor, rank, size).flatten(0, 1) for rank in range(size)]

    def join_shards(shards: Sequence[Tensor]) -> Tensor:
        """Return the rows [B, S, ..] of the ranks' flat tokens."""
        return join_sequence([shard.unflatten(0, (rows, -1)) for shard in shards], 1)

    q, k, v, grad = shards_of(case.q), shards_of(case.k), shards_of(case.v), shards_of(case.grad)
    q_grads = [torch.zeros_like(shard, dtype=wide) for shard in q]
    k_grads = [torch.zeros_like(shard, dtype=wide) for shard in k]
    v_grads = [torch.zeros_like(shard, dtype=wide) for shard in v]
    outputs = []
    sink_grads = []  # empty without sinks
    for rank in range(size):
        calls_of_steps = case.packing.in_ring(case.visibility.window, rank, size)
        steps = [calls_to_device(calls, case.q.device) for calls in calls_of_steps]
        partial: Partial | None = None
        for distance, step in enumerate(steps):
            source = rank - distance  # the rank whose keys arrive in this step; negative numbers count from the end
            partial = attention.forward(q[rank], k[source], v[source], step, partial)
        assert partial is not None
        out, lse = with_sinks(attention, partial, case.sinks)
        outputs.append(out)
        merged = Partial(out.to(q[rank].dtype), lse)
        for distance, step in enumerate(steps):
            source = rank - distance
            gradients = Gradients(q_grads[rank], k_grads[source], v_grads[source])
            attention.backward(grad[rank], q[rank], k[source], v[source], merged, step, gradients)
        sink_grad = sinks_grad(attention, grad[rank], merged, case.sinks)
        if sink_grad is not None:
            sink_grads.append(sink_grad)
    results = [join_shards(outputs), join_shards(q_grads), join_shards(k_grads), join_shards(v_grads)]
    if sink_grads:
        results.append(torch.stack(sink_grads).sum(0))
    return results


def documents_of(lengths: Sequence[Sequence[int]]) -> Tensor:
    """Return the documents [B, S] of rows, given the lengths of each row's documents.

    The last document of the last row is padding (-1).

    Example:
        >>> documents_of([[2, 1], [1, 2]])
        tensor([[ 0,  0,  1],
                [ 0, -1, -1]])
    """
    rows = []
    for lengths_of_row in lengths:
        numbers = torch.arange(len(lengths_of_row))
        rows.append(numbers.repeat_interleave(torch.tensor(lengths_of_row)))
    documents = torch.stack(rows)
    num_padding = lengths[-1][-1]
    documents[-1, -num_padding:] = -1
    return documents


def with_gradients(function: Callable[..., Tensor], inputs: Iterable[Tensor], grad: Tensor) -> list[Tensor]:
    """Compute a function and its gradients.

    Args:
        function: Function of `inputs`.
        inputs: Its arguments.
        grad: Gradient of the output, [..].

    Returns:
        The output [..], and the gradients in the shapes of `inputs`.
    """
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def does_not_run(name: str, error: Exception) -> str:
    """Return the message for an implementation that raises an error, with the first line of the error."""
    return f"{name} does not run here: {first_line(error)}"


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or the name of its type if it has no message."""
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__
