"""The parts of the check. Each is a generator of lines; a line that begins with WRONG is a finding."""

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.tiny import FAMILIES, tiny_recipe
from tools.gpu.ranks import Run
from tools.gpu.runs import decode_rank, hang_rank, peak_rank, proof_rank, rows_of, shape_recipe, train_rank

WRONG = "WRONG"
# Relative, of the loss and of the norm after three steps.
BOUNDS = {"float32": (1e-4, 1e-3), "bfloat16": (0.02, 0.1)}
ROUGH = {"qwen3.5": 3.0}  # times these: rounding grows in tiny linear layers
SMALL = ("llama", "qwen2", "qwen3", "gemma3")  # families, where models are to be few
CLOSE = 0.05  # planned to allocated
PATIENCE = 10.0  # seconds that the provoked hang waits in its collective
ANSWERED = 90.0  # seconds in which it is to end


@dataclass(frozen=True)
class Asked:
    """world: GPUs. small: tiny models."""

    world: int
    out: Path
    compiled: bool = True
    small: bool = False


def described(rank: int, size: int) -> str:
    from dtrain.commands.env import describe

    return describe()


def versions(asked: Asked, run: Run, root: Path) -> Iterator[str]:
    yield from run(described, 1)[0].splitlines()


def parity(asked: Asked, run: Run, root: Path) -> Iterator[str]:
    """Three steps of each family on the CPU in float32, and on the GPUs."""
    meshes = [(1, ())] + [(size, ("train.micro_batch=1",)) for size in (2, 4, 8) if size <= asked.world]
    if asked.world > 1:
        meshes += [(2, ("parallel.tp=2",)), (2, ("parallel.cp=2",)), (2, ("parallel.cp=2", "parallel.cp_rotate=ring"))]
    for family in SMALL if asked.small else FAMILIES:
        widest = not asked.small or family == "gemma3"
        for packing in ("true", "false") if widest else ("true",):
            keys = "train.steps=3", f"data.packing={packing}"
            of_cpu = tiny_recipe(root, *keys, "train.dtype=float32", family=family, name=f"cpu-{family}-{packing}")
            run(train_rank, 1, of_cpu, "cpu")
            for dtype in BOUNDS:
                is_whole = packing == "true" and widest and not (asked.small and dtype == "float32")
                for size, mesh in meshes if is_whole else meshes[:1]:
                    words = [one.partition(".")[2] for one in mesh]
                    name = "-".join([family, packing, dtype, str(size), *words])
                    recipe = tiny_recipe(root, *keys, f"train.dtype={dtype}", *mesh, family=family, name=name)
                    run(train_rank, size, recipe)
                    bounds = [bound * ROUGH.get(family, 1.0) for bound in BOUNDS[dtype]]
                    yield _compared(name, rows_of(recipe), rows_of(of_cpu), bounds)


def _compared(name: str, rows: list, expected: list, bounds: Sequence[float]) -> str:
    off = [
        max(abs(row[field] - other[field]) / abs(other[field]) for row, other in zip(rows, expected, strict=True))
        for field in ("loss", "grad_norm")
    ]
    is_wrong = any(not one <= bound for one, bound in zip(off, bounds, strict=True))
    return f"{WRONG if is_wrong else 'ok'}  {name}: loss off by {off[0]:.1e}, norm by {off[1]:.1e}"


def proof(asked: Asked, run: Run, root: Path) -> Iterator[str]:
    for head_dim in (64,) if asked.small else (64, 128, 256):
        for window in (None, 100):
            for exchange in (None, "allgather", "ring"):
                problem = run(proof_rank, 1, exchange, head_dim, window)[0]
                name = f"head {head_dim}, window {window}, exchange {exchange}"
                yield f"ok  {name}" if problem is None else f"{WRONG}  {name}: {problem}"


def memory(asked: Asked, run: Run, root: Path) -> Iterator[str]:
    """The peak of a step against `dtrain plan`, and the kernels that were chosen."""
    from dtrain.commands.plan.plan import resolve_plan
    from dtrain.commands.plan.step import plan_step

    length = 512 if asked.small else 4096
    meshes = [(1, ())] + ([(2, ()), (2, ("parallel.tp=2",)), (2, ("parallel.cp=2",))] if asked.world > 1 else [])
    for shape in ("0.6B", "1B"):
        for size, mesh in meshes:
            keys = "train.global_batch=2", "train.steps=2", *mesh
            recipe = shape_recipe(root, shape, length, asked.small, *keys, name="memory")
            planned = plan_step(resolve_plan(recipe, size, "cuda")).peak
            found = run(peak_rank, size, recipe)
            most, off = max(peak for peak, _ in found), planned / max(peak for peak, _ in found) - 1
            words = f"{shape} on {size} {' '.join(mesh)}: planned {planned / 2**30:.3f} GiB, held {most / 2**30:.3f}"
            yield f"{'ok' if abs(off) <= CLOSE else WRONG}  {words} ({off:+.1%}); attention {found[0][1]}"


def saves(asked: Asked, run: Run, root: Path) -> Iterator[str]:
    """A run that is saved half-way and goes on, against one that was not stopped."""
    keys = "train.dtype=bfloat16", "checkpoint.every=2", "checkpoint.async_save=true"
    whole = tiny_recipe(root, *keys, "train.steps=4", name="whole")
    run(train_rank, 1, whole)
    for size in sorted({1, min(2, asked.world)}):
        name = f"resumed-{size}"
        run(train_rank, 1, tiny_recipe(root, *keys, "train.steps=2", name=name))
        resumed = tiny_recipe(root, *keys, "train.steps=4", name=name)
        run(train_rank, size, resumed)
        yield _compared(f"saved on 1, resumed on {size}", rows_of(resumed), rows_of(whole), BOUNDS["bfloat16"])


def speed(asked: Asked, run: Run, root: Path) -> Iterator[str]:
    lengths = (64, 256) if asked.small else (4096, 16384, 65536)
    for shape in ("0.6B", "1B"):
        for length in lengths:
            for compiled in (False, True) if asked.compiled else (False,):
                keys = "train.steps=6", "train.global_batch=1", "train.activation_checkpointing=full"
                keys += (f"train.compile={str(compiled).lower()}",)
                name = f"speed-{shape}-{length}-{compiled}"
                recipe = shape_recipe(root, shape, length, asked.small, *keys, name=name)
                how = "compiled" if compiled else "eager"
                try:
                    run(train_rank, 1, recipe)
                except RuntimeError as error:
                    if "out of memory" not in str(error):
                        raise
                    yield f"--  {shape}, {length} tokens, {how}: out of memory"
                    continue
                rows = rows_of(recipe)[3:]
                rate, memory = statistics.median(row["tokens_per_sec"] for row in rows), rows[-1]["mem_gib"]
                used = rows[-1].get("mfu")
                said = f", mfu {used:.1%}" if used is not None else ""
                yield f"ok  {shape}, {length} tokens, {how}: {rate:,.0f} tokens/s{said}, {memory:.2f} GiB"


def decoding(asked: Asked, run: Run, root: Path) -> Iterator[str]:
    """The same tokens with CUDA graphs as without, and both rates. Graphs round the rows up, so that products may be
    taken in another order: bfloat16's near ties may part, and few rows may."""
    tokens = 12 if asked.small else 256
    for shape in ("0.6B",) if asked.small else ("0.6B", "1B"):
        recipe = shape_recipe(root, shape, 64, asked.small, name="decoding")
        for rows in (8,) if asked.small else (8, 64, 256):
            eager, eager_rate = run(decode_rank, 1, recipe, rows, tokens, False)[0]
            graphs, rate = run(decode_rank, 1, recipe, rows, tokens, True)[0]
            equal = sum(one == other for one, other in zip(eager, graphs, strict=True))
            first = sum(one[:2] == other[:2] for one, other in zip(eager, graphs, strict=True))
            is_wrong = first < 0.9 * rows
            words = f"{shape}, {rows} rows: {equal} equal to the end, {first} in two tokens; tokens/s"
            yield f"{WRONG if is_wrong else 'ok'}  {words} {eager_rate:,.0f} eager, {rate:,.0f} by graphs"


def hang(asked: Asked, run: Run, root: Path) -> Iterator[str]:
    if asked.world < 2:
        yield "--  one GPU: nothing to wait for"
        return
    began = time.monotonic()
    try:
        run(hang_rank, 2, timeout=ANSWERED, patience=PATIENCE)
    except (RuntimeError, AssertionError) as error:
        took, last = time.monotonic() - began, str(error).strip().splitlines()[-1]
        is_answered = "gave no result" not in str(error)
        yield f"{'ok' if is_answered else WRONG}  a collective without its other rank: {took:.0f} s, {last[:200]}"
    else:
        yield f"{WRONG}  a collective without its other rank went through"


PARTS = {
    "devices and versions": versions,
    "variable-length attention": proof,
    "parity with the CPU": parity,
    "memory and kernels": memory,
    "saves": saves,
    "a hang": hang,
    "graph decode against eager": decoding,
    "speed": speed,
}
