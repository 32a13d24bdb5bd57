"""Parts on a step of real widths: its memory against the plan, its speed under each checkpointing, and its trace."""

import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from dtrain import recipe as config
from dtrain.recipe.schema import Recipe
from tools.gpu.ranks import Run
from tools.gpu.runs import WRONG, Options, opened, rows_of, shape_recipe, train_rank

CLOSE = 0.05  # planned to allocated
MESHES = ((1, "one", ()), (2, "fsdp", ()), (2, "tp", ("parallel.tp=2",)), (2, "cp", ("parallel.cp=2",)))


def memory(options: Options, run: Run, root: Path) -> Iterator[str]:
    """The peak of a step against `dtrain plan`, and the kernels that were chosen."""
    length = 512 if options.small else 4096
    for size, mesh, keys in MESHES[-1:] if options.small else MESHES:
        if size <= options.world:
            keys = ("train.global_batch=2", "train.steps=2", *keys)
            recipe = shape_recipe(root, "0.6B", length, options.small, *keys, name="memory")
            peaks = run(peak_rank, size, recipe)
            line = _beside_plan(f"on {size} ({mesh})", recipe, size, max(peak for peak, _ in peaks))
            yield f"{line}; attention {peaks[0][1]}"


def layers(options: Options, run: Run, root: Path) -> Iterator[str]:
    """Four layers of 8B at 8,192 tokens over all GPUs, under each checkpointing, eager and compiled."""
    length, world = (256 if options.small else 8192), options.world
    for kind in ("selective",) if options.small else ("none", "selective", "full"):
        for is_compiled in ("false", "true")[: 2 if options.compiled else 1]:
            keys = "train.steps=6", f"train.global_batch={world}", f"train.activation_checkpointing={kind}"
            name = f"{kind}, {'compiled' if is_compiled == 'true' else 'eager'}"
            keys += (f"train.compile={is_compiled}",)
            recipe = shape_recipe(root, "8B", length, options.small, *keys, name=name.replace(", ", "-"))
            try:
                run(train_rank, world, recipe)
            except (RuntimeError, AssertionError) as error:
                if "out of memory" not in str(error):
                    raise
                yield f"--  {name}: out of memory"
                continue
            rows = rows_of(recipe)[3:]
            rate = statistics.median(row["tokens_per_sec"] for row in rows)
            mfu = f", mfu {rows[-1]['mfu']:.1%}" if rows[-1].get("mfu") is not None else ""
            seconds = statistics.median(row["step_time"] for row in rows)
            yield f"ok  {name}: {rate:,.0f} tokens/s{mfu}, {seconds:.3f} s a step{_planned_seconds(recipe, world)}"
            yield _beside_plan(name, recipe, world, int(rows[-1]["mem_gib"] * 2**30))


def _beside_plan(name: str, recipe: Recipe, size: int, peak: int) -> str:
    from dtrain.commands.plan.plan import resolve_plan
    from dtrain.commands.plan.step import plan_step

    planned = plan_step(resolve_plan(recipe, size, "cuda")).peak
    off = planned / peak - 1
    words = f"{name}: planned {planned / 2**30:.3f} GiB, held {peak / 2**30:.3f} ({off:+.1%})"
    return f"{'ok' if abs(off) <= CLOSE else WRONG}  {words}"


def _planned_seconds(recipe: Recipe, size: int) -> str:
    import torch

    from dtrain.base.hardware import find_board
    from dtrain.commands.plan.hardware import GPUS, estimate_step
    from dtrain.commands.plan.plan import resolve_plan
    from dtrain.commands.plan.step import plan_step

    board = find_board(torch.cuda.get_device_name(0))
    if board is None:
        return ""
    step = plan_step(resolve_plan(recipe, size, "cuda"))
    return f" (planned {estimate_step(step, config.derive_sizes(recipe, size), GPUS[board]).total:.3f})"


def peak_rank(rank: int, size: int, recipe: Recipe) -> tuple[int, str]:
    """Return the most bytes that a step holds, and the attention kernel with the reason where another was wanted."""
    import torch

    policy, _, step = opened(rank, size, recipe)
    for _ in range(2):  # the optimizer's state is there from the first update on
        torch.cuda.reset_peak_memory_stats()
        step()
    kernel = policy.model.model.kernel
    return torch.cuda.max_memory_allocated(), kernel.name + (f" ({kernel.note})" if kernel.note else "")


def trace(options: Options, run: Run, root: Path) -> Iterator[str]:
    """One step of the layers of 8B under torch's profiler: idle time, gaps, messages that nothing hides."""
    length = 256 if options.small else 8192
    keys = f"train.global_batch={options.world}", "train.activation_checkpointing=full"
    recipe = shape_recipe(root, "8B", length, options.small, *keys, name="trace")
    kernels = run(trace_rank, options.world, recipe)[0]
    if not kernels:
        yield "--  the profiler saw no kernels"
        return
    shares = shares_of(kernels)
    yield f"ok  {len(kernels)} kernels in {shares['seconds']:.3f} s: " + ", ".join(
        f"{name} {shares[name]:.1%}" for name in ("idle", "gaps under 20 us", "NCCL alone")
    )


Kernel = tuple[str, float, float]
"""Name, start and end of a kernel, in microseconds."""


def trace_rank(rank: int, size: int, recipe: Recipe) -> list[Kernel]:
    """Return the kernels of the third step."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    _, _, step = opened(rank, size, recipe)
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    cuda = torch.autograd.DeviceType.CUDA
    events = [event for event in profiler.events() or () if event.device_type == cuda]
    return sorted(
        ((event.name, event.time_range.start, event.time_range.end) for event in events), key=lambda it: it[1]
    )


def shares_of(kernels: Iterable[Kernel]) -> dict[str, float]:
    """Return the seconds from the first kernel's start to the last one's end, and the shares of it in which no kernel
    runs, in which that lasts less than 20 microseconds, and in which kernels of NCCL run and no other."""
    kernels = list(kernels)
    begin, end = min(start for _, start, _ in kernels), max(end for _, _, end in kernels)
    busy = _merged((start, stop) for _, start, stop in kernels)
    computing = _merged((start, stop) for name, start, stop in kernels if "nccl" not in name.lower())
    gaps = [later[0] - earlier[1] for earlier, later in zip(busy, busy[1:], strict=False)]
    whole = end - begin
    return {
        "seconds": whole / 1e6,
        "idle": 1 - _length(busy) / whole,
        "gaps under 20 us": sum(gap for gap in gaps if gap < 20) / whole,
        "NCCL alone": (_length(busy) - _length(computing)) / whole,
    }


def _merged(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[Any] = []
    for start, stop in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return merged


def _length(spans: Iterable[tuple[float, float]]) -> float:
    return sum(stop - start for start, stop in spans)
