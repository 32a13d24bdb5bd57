"""The kernel of variable-length attention, on CUDA in half precision, and its check on a device.

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
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import attention
from torch.nn.attention import SDPBackend, sdpa_kernel

from dtrain.attention.blocks import Gradients, Partial, sinks_grad, with_sinks
from dtrain.attention.context import over_keys
from dtrain.attention.kernels import Gathering, Kernel, SdpaKernel
from dtrain.attention.packing import Packing
from dtrain.attention.segments import Flash, Segmented, Steps, VarlenBlocks, calls_to_device
from dtrain.attention.visibility import Visibility
from dtrain.base.ranks import Ranks
from dtrain.parallel.context.batch import join_sequence, shard_sequence

VERSIONS = {9: ("FA3", "flash_attn_interface"), 10: ("FA4", "flash_attn")}
"""torch's name of a version and its package, by the major number of the GPU's compute capability."""

_CHECK_LENGTHS = ((1, 61, 66, 128), (62, 138, 56))  # documents of two rows of 256, the last of them padding
_CHECK_WINDOW = 100  # a window that hides something of these
# Errors that are raised if torch, a kernel's package or the device does not support an operation.
UNSUPPORTED = RuntimeError, ValueError, TypeError, AttributeError, AssertionError
# Largest ratio of the kernel's error to SDPA's error, both relative to float32. It is above 1, because the kernel adds
# in another order.
_ERROR_FACTOR = 4.0

_refused_versions: set[str] = set()
"""Versions that failed the check of a model of this process. They stay off, because all models share one version."""


class VarlenKernel(Kernel):
    """Variable-length attention for rows with a `Packing`: several documents, sharded rows, or a window.

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
        self.flash, self.masked, self.note = flash or Flash(), masked or SdpaKernel(), note
        self.name = "varlen" + self.masked.exchange
        self.group, self.gathers = self.masked.group, self.masked.gathers
        self.is_context_parallel = self.masked.is_context_parallel

    def keys(
        self, positions: Tensor, documents: Tensor | None, packing: Packing | None = None
    ) -> tuple[Tensor, Tensor | None] | None:
        return None if packing is not None else self.masked.keys(positions, documents)

    def prepare(self, visibility: Visibility, dtype: torch.dtype, device: torch.device) -> Any:
        sees_to_image_ends = visibility.query_ends is not None
        is_only_causal = visibility.packing is None and visibility.is_causal
        packing = None if sees_to_image_ends or is_only_causal else find_packing(visibility)
        if packing is None:
            return self.masked.prepare(visibility, dtype, device)
        ranks = 1 if self.group is None else self.group.size()
        calls_of_steps = self.masked.calls(packing, visibility.window)
        # Copy the calls of all steps to the device in one copy, and divide them into steps afterwards.
        segments = calls_to_device((call for calls in calls_of_steps for call in calls), device)
        steps: Steps = []
        start = 0
        for calls in calls_of_steps:
            steps.append(segments[start : start + len(calls)])
            start += len(calls)
        return Segmented(packing.length // ranks, steps)

    def begin_gather(self, k: Tensor, v: Tensor, prepared: Any) -> Gathering:
        if isinstance(prepared, Segmented):
            k, v = k[:, : prepared.tokens], v[:, : prepared.tokens]
        return self.masked.begin_gather(k, v, prepared)

    def over(self, q: Tensor, k: Tensor, v: Tensor, prepared: Any, scale: float, sinks: Tensor | None = None) -> Tensor:
        if not isinstance(prepared, Segmented):
            return self.masked.over(q, k, v, prepared, scale, sinks)
        tokens = q[:, : prepared.tokens]
        out = self.masked.over_segments(self.flash, tokens, k, v, prepared.steps, scale, sinks)
        missing = q.shape[1] - out.shape[1]
        return F.pad(out, (0, 0, 0, 0, 0, missing)) if missing else out


def find_packing(visibility: Visibility) -> Packing | None:
    """Return the packing of full rows.

    If it is not given, plain rows have one document each. Otherwise the positions and documents of the keys are copied
    from the device, and the host waits for them.

    Args:
        visibility: The mask of a kind of layer.

    Returns:
        The packing. None if the rows are not packed (`Packing.of`).
    """
    if visibility.packing is not None:
        return visibility.packing
    if visibility.is_plain:
        return Packing.one_document_per_row(visibility.rows, visibility.queries)
    positions, documents = visibility.key_positions, visibility.key_documents
    if positions is None:
        return None
    if documents is None:
        return Packing.of(positions.expand(visibility.rows, -1).cpu(), None)
    return Packing.of(*torch.stack([positions.expand_as(documents), documents]).cpu().unbind(0))


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
        name, note = None, note or f"FA2: {next(filter(None, names))} is not on every rank"
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
    name, package = VERSIONS.get(torch.cuda.get_device_capability(device)[0], ("", ""))
    if not name or find_spec(package) is None:
        return None, ""
    if name in _refused_versions:
        return None, f"FA2: another model of this run has refused {name}"
    try:
        attention.activate_flash_attention_impl(name)
    # Raised if the versions of torch and of the package do not fit each other.
    except (ImportError, OSError, RuntimeError, AttributeError, ValueError) as error:
        return None, f"FA2: {name} does not load: {(str(error).splitlines() or [type(error).__name__])[0]}"
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
        seen: The mask.
        packing: The documents of the rows.
        scale: Factor of the scores.
        sinks: [H], or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    seen: Visibility
    packing: Packing
    scale: float
    sinks: Tensor | None = None

    @property
    def parts(self) -> list[Tensor]:
        """The tensors that receive gradients: q, k, v, and the sinks if there are some."""
        return [*self[:3], *([] if self.sinks is None else [self.sinks])]


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

    Returns:
        The problem, or None if the results are as close to those in float32 as SDPA's.

    Raises:
        torch.OutOfMemoryError: If the device has too little memory for the check.
        torch.AcceleratorError: If a kernel has failed on the device, which cannot be used any more.
    """
    try:
        narrowed = None if window is None else min(window, _CHECK_WINDOW)
        sizes = heads, key_heads, head_dim, value_dim, narrowed, sinks
        wide, case = (_check_case(*sizes, case_dtype, device) for case_dtype in (torch.float32, dtype))
        plain, exact = (_attend_rows(SdpaKernel(), inputs) for inputs in (case, wide))
        checks = [("varlen", _attend_rows(VarlenKernel(flash), case), plain, exact)]
        if exchange is not None:
            results = (attend_in_ring if exchange == "ring" else attend_gathered)(flash, case)
            checks.append((f"varlen for {exchange}", results, plain, exact))
        if is_later:
            causal = Visibility(case.seen.queries, case.seen.keys, rows=len(case.q))
            rows, wide = (inputs._replace(seen=causal) for inputs in (case, wide))
            with sdpa_kernel(SDPBackend.MATH):
                usual = _attend_rows(SdpaKernel(), rows)
            checks.append(
                ("sdpa of plain rows", _attend_rows(SdpaKernel(), rows), usual, _attend_rows(SdpaKernel(), wide))
            )
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except UNSUPPORTED as error:
        return does_not_run("varlen", error)
    return next(filter(None, (describe_difference(name, "sdpa", *numbers) for name, *numbers in checks)), None)


def describe_difference(
    name: str, usual: str, results: Sequence[Tensor], others: Sequence[Tensor], truths: Sequence[Tensor]
) -> str | None:
    """Compare the errors of two implementations, and describe an error that rounding does not explain.

    Args:
        name: Name of the implementation that is checked.
        usual: Name of the implementation that it is compared with.
        results: Tensors of `name`.
        others: The same tensors of `usual`.
        truths: The same tensors, computed in float32.

    Returns:
        A message if an error of `name` is much larger than that of `usual`. None otherwise.
    """
    for result, other, truth in zip(results, others, truths, strict=True):
        off, off_usually = (float((values.float() - truth).abs().max()) for values in (result, other))
        if not off <= _ERROR_FACTOR * off_usually + torch.finfo(result.dtype).eps * float(truth.abs().max()):
            return f"{name} gives other numbers than {usual} here: {off:.2e} from float32, {usual} {off_usually:.2e}"
    return None


def _check_case(
    heads: int,
    key_heads: int,
    head_dim: int,
    value_dim: int,
    window: int | None,
    sinks: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> CheckCase:
    documents = documents_of(_CHECK_LENGTHS)
    positions = torch.tensor([[at for size in row for at in range(size)] for row in _CHECK_LENGTHS])
    rows, count = documents.shape
    packing = Packing.of(positions, documents)
    assert packing is not None
    documents, positions = documents.to(device), positions.to(device)
    seen = Visibility(count, count, window, positions, positions, documents, documents, rows, packing)
    draw = torch.Generator().manual_seed(0)
    q, k, v, grad = (
        torch.randn(rows, count, of, size, generator=draw).to(torch.bfloat16).float().to(device, dtype)
        for of, size in ((heads, head_dim), (key_heads, head_dim), (key_heads, value_dim), (heads, value_dim))
    )
    scores = torch.linspace(-1.0, 3.0, heads, device=device, dtype=dtype) if sinks else None
    return CheckCase(q, k, v, grad, seen, packing, head_dim**-0.5, scores)


def _attend_rows(kernel: Kernel, case: CheckCase) -> list[Tensor]:
    """Return the output and the gradients of q, k, v and sinks."""
    prepared = kernel.prepare(case.seen, case.q.dtype, case.q.device)

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        return kernel(q, k, v, prepared, case.scale, sinks)

    return with_gradients(attend, case.parts, case.grad)


def attend_gathered(flash: Flash, case: CheckCase, size: int = 2) -> list[Tensor]:
    """Compute the same as `_attend_rows`, rank by rank over gathered keys, for `size` ranks. No collectives."""

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        outputs = []
        for rank in range(size):
            calls = calls_to_device(case.packing.over_gathered(case.seen.window, rank, size), q.device)
            mine = shard_sequence(q, rank, size)
            outputs.append(over_keys(flash, mine, k.flatten(0, 1), v.flatten(0, 1), calls, case.scale, sinks))
        return join_sequence(outputs, 1)

    return with_gradients(attend, case.parts, case.grad)


@torch.no_grad()
def attend_in_ring(flash: Flash, case: CheckCase, size: int = 2) -> list[Tensor]:
    """Compute the same as `_attend_rows`, rank by rank in a ring of `size` ranks. No collectives."""
    attention, rows = VarlenBlocks(flash, case.scale), len(case.q)
    q, k, v, grad = ([shard_sequence(part, rank, size).flatten(0, 1) for rank in range(size)] for part in case[:4])
    wide = torch.promote_types(case.q.dtype, torch.float32)
    q_grads, k_grads, v_grads = ([torch.zeros_like(tensor, dtype=wide) for tensor in some] for some in (q, k, v))
    outputs, of_sinks = [], []
    for rank in range(size):
        steps = [calls_to_device(step, case.q.device) for step in case.packing.in_ring(case.seen.window, rank, size)]
        partial: Partial | None = None
        for distance, step in enumerate(steps):
            source = rank - distance
            partial = attention.forward(q[rank], k[source], v[source], step, partial)
        assert partial is not None
        out, lse = with_sinks(attention, partial, case.sinks)
        outputs.append(out)
        merged = Partial(out.to(q[rank].dtype), lse)
        for distance, step in enumerate(steps):
            source = rank - distance
            gradients = Gradients(q_grads[rank], k_grads[source], v_grads[source])
            attention.backward(grad[rank], q[rank], k[source], v[source], merged, step, gradients)
        of_sinks.append(sinks_grad(attention, grad[rank], merged, case.sinks))
    parts = (outputs, q_grads, k_grads, v_grads)
    joined = [join_sequence([shard.unflatten(0, (rows, -1)) for shard in part], 1) for part in parts]
    return joined if case.sinks is None else [*joined, torch.stack(cast(list[Tensor], of_sinks)).sum(0)]


def documents_of(lengths: Sequence[Sequence[int]]) -> Tensor:
    """Return the documents [B, S] of rows, given the lengths of each row's documents.

    The last document of the last row is padding (-1).

    Example:
        >>> documents_of([[2, 1], [1, 2]])
        tensor([[ 0,  0,  1],
                [ 0, -1, -1]])
    """
    documents = torch.tensor([[n for n, size in enumerate(row) for _ in range(size)] for row in lengths])
    documents[-1, -lengths[-1][-1] :] = -1
    return documents


def with_gradients(function: Callable[..., Tensor], parts: Iterable[Tensor], grad: Tensor) -> list[Tensor]:
    """Compute a function and its gradients.

    Args:
        function: Function of `parts`.
        parts: The inputs.
        grad: Gradient of the output, [..].

    Returns:
        The output [..], and the gradients in the shapes of `parts`.
    """
    leaves = [part.clone().requires_grad_() for part in parts]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def does_not_run(name: str, error: Exception) -> str:
    """Return the message for an implementation that raises an error, with the first line of the error."""
    return f"{name} does not run here: {(str(error).splitlines() or [type(error).__name__])[0]}"
