"""Parts on the rates of the device: products, attention, the head, optimizers, nf4, and messages between GPUs.

Each rate stands beside its share of the board's figure (dtrain/base/gpus.toml) and the share that `dtrain plan` takes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtrain.base.hardware import find_board
from tools.gpu.ranks import Run
from tools.gpu.runs import Options

if TYPE_CHECKING:
    import torch

    from dtrain.commands.plan.hardware import Hardware

REPEATS = 10
OPTIMIZERS: dict[str, tuple[dict[str, Any], str]] = {  # fields of the section, dtype of the weights
    "adamw": ({}, "float32"),
    "adamw, moments in int8": ({"state": "int8"}, "float32"),
    "adamw, moments in int8, masters in bfloat16": ({"state": "int8"}, "bfloat16"),
    "muon": ({"name": "muon"}, "float32"),
}


def rates(options: Options, run: Run, root: Path) -> Iterator[str]:
    yield from run(rates_rank, 1, options.small)[0]


def rates_rank(rank: int, size: int, small: bool) -> list[str]:
    import torch

    device = torch.device("cuda", rank)
    torch.cuda.reset_peak_memory_stats()
    board = _board(rank)
    wide = (256, 64, 128, 1003) if small else (8192, 4096, 14336, 128256)
    lines = []
    products = _products(lines, board, device, *wide[:3])
    _attention(lines, board, device, 256 if small else 8192)
    moved = _elementwise(lines, board, device, 2**16 if small else 2**28)
    _head(lines, products, moved, device, wide[0], wide[1], wide[3])
    _optimizers(lines, moved, device, 2**12 if small else 2**26)
    _nf4(lines, moved, device, *wide[1:3])
    return lines


def _products(
    lines: list[str], board: "Hardware | None", device: "torch.device", tokens: int, width: int, inner: int
) -> float:
    """Return the FLOP/s of a large product."""
    import torch
    import torch.nn.functional as F

    x = torch.randn(tokens, width, dtype=torch.bfloat16, device=device)
    weight = torch.randn(inner, width, dtype=torch.bfloat16, device=device)
    flops = 2 * tokens * width * inner
    rate = flops / _seconds(lambda: x @ weight.t())
    taken = f"; plan takes {board.reach:.0%}" if board else ""
    lines.append(f"ok  products: {_teraflops(rate, board)}{taken}")
    stack = torch.randn(8, inner, width, dtype=torch.bfloat16, device=device)
    ends = torch.arange(1, 9, dtype=torch.int32, device=device) * (tokens // 8)
    try:
        seconds = _seconds(lambda: F.grouped_mm(x, stack.transpose(1, 2), offs=ends))
    except (RuntimeError, NotImplementedError) as error:
        lines.append(f"--  grouped products: {str(error).splitlines()[0]}")
    else:
        lines.append(f"ok  grouped products, 8 experts: {_teraflops(flops / seconds, board)}{taken}")
    return rate


def _attention(lines: list[str], board: "Hardware | None", device: "torch.device", length: int) -> None:
    """Causal attention of 32 heads of 128 to 8, by each kernel of torch's."""
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q = torch.randn(1, 32, length, 128, dtype=torch.bfloat16, device=device, requires_grad=True)
    k, v = (torch.randn(1, 32, length, 128, dtype=torch.bfloat16, device=device, requires_grad=True) for _ in range(2))
    flops = 2 * 32 * length**2 * 128  # of the visible half of two products
    for name, backend, version in (
        ("FlashAttention-2", SDPBackend.FLASH_ATTENTION, None),
        ("FlashAttention-3", SDPBackend.FLASH_ATTENTION, "FA3"),
        ("cuDNN", SDPBackend.CUDNN_ATTENTION, None),
    ):
        try:
            with _flash_attention(version), sdpa_kernel(backend):
                forward = _seconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
                gradients = partial(torch.autograd.grad, out, (q, k, v), torch.ones_like(out), retain_graph=True)
                backward = _seconds(gradients)
        except (RuntimeError, ImportError, ValueError) as error:
            lines.append(f"--  {name}: {str(error).splitlines()[0]}")
            continue
        taken = f"; plan takes {board.reach:.0%}" if board else ""
        ways = f"forward {_teraflops(flops / forward, board)}, backward {_teraflops(2.5 * flops / backward, board)}"
        lines.append(f"ok  {name}: {ways}{taken}")


@contextmanager
def _flash_attention(version: str | None) -> Iterator[None]:
    """Context in which torch's flash attention is that of a library, where there is a `version`. Raises ImportError."""
    if version is None:
        yield
        return
    from torch.nn import attention

    attention.activate_flash_attention_impl(version)
    try:
        yield
    finally:
        attention.restore_flash_attention_impl()


def _elementwise(lines: list[str], board: "Hardware | None", device: "torch.device", count: int) -> float:
    """Return the bytes a second of an elementwise kernel."""
    import torch

    from dtrain.commands.plan.hardware import USABLE_BANDWIDTH

    x = torch.ones(count, dtype=torch.bfloat16, device=device)
    out = torch.empty_like(x)
    rate = 2 * x.nbytes / _seconds(lambda: torch.mul(x, 2, out=out))
    share = f", {rate / board.bandwidth:.0%} of the board's; plan takes {USABLE_BANDWIDTH:.0%}" if board else ""
    lines.append(f"ok  elementwise: {rate / 1e12:.2f} TB/s{share}")
    return rate


def _head(
    lines: list[str], products: float, moved: float, device: "torch.device", tokens: int, width: int, vocab: int
) -> None:
    import torch

    from dtrain.losses.head.weighted_sum import weighted_logprob_sum

    hidden = torch.randn(tokens, width, dtype=torch.bfloat16, device=device, requires_grad=True)
    weight = torch.randn(vocab, width, dtype=torch.bfloat16, device=device).mul_(0.02).requires_grad_()
    index = torch.arange(tokens, device=device)
    targets, weights = index % vocab, torch.full((tokens,), 1 / tokens, device=device)

    def step() -> None:
        torch.autograd.grad(weighted_logprob_sum(hidden, weight, targets, weights, index), (hidden, weight))

    seconds = _seconds(step)
    beside = max(seconds - 6 * tokens * width * vocab / products, 0.0)
    lines.append(
        f"ok  head, {tokens:,} tokens: {seconds * 1e3:,.1f} ms; beside its products "
        f"{beside * moved / (tokens * vocab):,.0f} bytes a logit"
    )


def _optimizers(lines: list[str], moved: float, device: "torch.device", count: int) -> None:
    import torch

    from dtrain.policy.optimizer import build_optimizer
    from dtrain.recipe.schema import Optimizer

    for name, (fields, dtype) in OPTIMIZERS.items():
        weight = torch.nn.Parameter(torch.randn(count // 64, 64, device=device).to(getattr(torch, dtype)))
        optimizer = build_optimizer(Optimizer(**fields), [("layers.0.weight", weight)])
        weight.grad = torch.randn_like(weight)
        seconds = _seconds(optimizer.step)
        lines.append(f"ok  {name}: {seconds * 1e3:,.2f} ms, {seconds * moved / weight.numel():,.0f} bytes an element")


def _nf4(lines: list[str], moved: float, device: "torch.device", width: int, inner: int) -> None:
    import torch

    from dtrain.adapters.nf4 import dequantize, quantize

    codes, scales = quantize(torch.randn(inner, width, device=device))
    seconds = _seconds(lambda: dequantize(codes, scales, torch.bfloat16))
    lines.append(f"ok  nf4 to bfloat16: {seconds * moved / (inner * width):,.1f} bytes a weight")


def links(options: Options, run: Run, root: Path) -> Iterator[str]:
    """Measure what all-gather and reduce-scatter send between all GPUs."""
    if options.world < 2:
        yield "--  one GPU: nothing to send to"
        return
    yield from run(links_rank, options.world, 2**16 if options.small else 2**28)[0]


def links_rank(rank: int, size: int, most: int) -> list[str]:
    import torch
    import torch.distributed as dist

    from dtrain.commands.plan.hardware import USABLE_BANDWIDTH

    device = torch.device("cuda", rank)
    board = _board(rank)
    whole = torch.ones(most // 2 // size * size, dtype=torch.bfloat16, device=device)
    part = whole[: len(whole) // size].clone()
    lines = []
    for name, message in (
        ("all-gather", lambda: dist.all_gather_into_tensor(whole, part)),
        ("reduce-scatter", lambda: dist.reduce_scatter_tensor(part, whole)),
    ):
        rate = whole.nbytes * (size - 1) / size / _seconds(message)
        share = f", {rate / board.inside:.0%} of the board's; plan takes {USABLE_BANDWIDTH:.0%}" if board else ""
        lines.append(f"ok  {name} of {whole.nbytes / 2**20:,.0f} MiB on {size}: {rate / 1e9:,.0f} GB/s{share}")
    return lines


def _board(rank: int) -> "Hardware | None":
    """Return what `dtrain plan` knows of the device; None of one that is not in its table."""
    import torch

    from dtrain.commands.plan.hardware import GPUS

    return GPUS.get(find_board(torch.cuda.get_device_name(rank)) or "")


def _teraflops(rate: float, board: "Hardware | None") -> str:
    import torch

    peak = board.arithmetic.get(torch.bfloat16) if board else None
    return f"{rate / 1e12:,.0f} TFLOP/s" + (f" ({rate / peak:.0%} of the peak)" if peak else "")


def _seconds(operation: Callable[[], Any]) -> float:
    """Return the device's seconds for one call of many."""
    import torch

    for _ in range(2):
        operation()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(REPEATS):
        operation()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / REPEATS
