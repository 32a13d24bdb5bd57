"""Parts on numbers: attention's kernel against its proof, runs on the GPUs against the CPU, compiled against eager."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.tiny import FAMILIES, tiny_recipe
from tools.gpu.ranks import Run
from tools.gpu.runs import WRONG, Options, proof_rank, rows_of, train_rank

EXACT = (1e-9, 1e-9)  # relative, of the loss and of the norm of each step, in float64
HALF = (0.02, 0.1)  # in bfloat16, to float32
ROUGH = {"qwen3.5": 3.0}  # times HALF: rounding grows in tiny linear layers
SMALL = ("llama", "qwen3", "gemma3")  # families, where models are to be few
BY_KERNELS = ("llama", "gemma3", "qwen3.5", "gpt-oss")  # families that differ in the kernels of half precision
THREE = ("train.steps=3",)
MESHES: dict[int, dict[str, tuple[str, ...]]] = {
    2: {
        "fsdp": (),
        "tp": ("parallel.tp=2",),
        "cp": ("parallel.cp=2",),
        "ring": ("parallel.cp=2", "parallel.cp_rotate=ring"),
    },
    4: {
        "hsdp, tp": ("parallel.dp_replicate=2", "parallel.dp_shard=1", "parallel.tp=2"),
        "cp, tp": ("parallel.cp=2", "parallel.tp=2"),
    },
    8: {"fsdp": ("train.micro_batch=1",), "fsdp, cp, tp": ("parallel.cp=2", "parallel.tp=2")},
}  # fmt: skip
EXPERTS = {2: ("parallel.ep=2",), 4: ("parallel.ep=4",), 8: ("parallel.ep=4", "parallel.tp=2")}


def described(rank: int, size: int) -> str:
    from dtrain.commands.env import describe

    return describe()


def versions(options: Options, run: Run, root: Path) -> Iterator[str]:
    yield from run(described, 1)[0].splitlines()


def proof(options: Options, run: Run, root: Path) -> Iterator[str]:
    sizes = ((64, 64),) if options.small else ((64, 64), (128, 128), (192, 128), (256, 256))  # of keys and values
    for head_dim, value_dim in sizes:
        for window in (None, 100):
            for exchange in (None, "allgather", "ring"):
                problem = run(proof_rank, 1, exchange, head_dim, value_dim, window)[0]
                name = f"heads {head_dim} and {value_dim}, window {window}, exchange {exchange}"
                yield f"ok  {name}" if problem is None else f"{WRONG}  {name}: {problem}"


def parity(options: Options, run: Run, root: Path) -> Iterator[str]:
    """Three steps in float64 of each family on one GPU, and of one with windows and one with experts on every mesh."""
    for family in SMALL if options.small else FAMILIES:
        yield from _against_cpu(options, run, root, {1: {"one": ()}}, family)
    sizes = [size for size in MESHES if size <= options.world]
    yield from _against_cpu(options, run, root, {size: MESHES[size] for size in sizes}, "gemma3")
    experts = {size: {"ep": EXPERTS[size]} for size in (sizes[:1] if options.small else sizes)}
    yield from _against_cpu(options, run, root, experts, "qwen3-moe")
    padded = {1: {"one": ()}} | {size: {"cp": MESHES[size]["cp"]} for size in sizes[:1] if not options.small}
    yield from _against_cpu(options, run, root, padded, "gemma3", "data.packing=false")


def half(options: Options, run: Run, root: Path) -> Iterator[str]:
    """Three steps in bfloat16, by the kernels of half precision, against the CPU in float32."""
    for family in SMALL[-1:] if options.small else BY_KERNELS:
        meshes: dict[int, dict[str, Sequence[str]]] = {1: {"one": ()}}
        if family == "gemma3" and options.world > 1:
            meshes[2] = {name: MESHES[2][name] for name in (("ring",) if options.small else ("tp", "cp", "ring"))}
        bounds = [bound * ROUGH.get(family, 1.0) for bound in HALF]
        yield from _against_cpu(options, run, root, meshes, family, dtypes=("float32", "bfloat16"), bounds=bounds)


def compiled(options: Options, run: Run, root: Path) -> Iterator[str]:
    """Three compiled steps in float64 under each kind of checkpointing, against eager ones."""
    if not options.compiled:
        yield "--  left out (--eager)"
        return
    eager = tiny_recipe(root, *THREE, name="eager")
    run(train_rank, 1, eager)
    for kind in ("none", "selective", "full"):
        keys = "train.compile=true", f"train.activation_checkpointing={kind}"
        recipe = tiny_recipe(root, *THREE, *keys, name=f"compiled-{kind}")
        run(train_rank, 1, recipe)
        yield compared(f"checkpointing {kind}", rows_of(recipe), rows_of(eager), EXACT)


def _against_cpu(
    options: Options,
    run: Run,
    root: Path,
    meshes: dict[int, dict[str, Any]],
    family: str,
    *keys: str,
    dtypes: tuple[str, str] = ("float64", "float64"),
    bounds: Sequence[float] = EXACT,
) -> Iterator[str]:
    """Yield a line for each mesh. dtypes: of the CPU's run and of the GPUs'."""
    keys = (*THREE, *keys)
    name = "-".join([family, *(key.partition("=")[2] for key in keys), *dtypes])
    of_cpu = tiny_recipe(root, *keys, f"train.dtype={dtypes[0]}", family=family, name=f"cpu-{name}")
    if not of_cpu.run.directory.exists():
        run(train_rank, 1, of_cpu, "cpu")
    for size, by_name in meshes.items():
        for mesh, mesh_keys in by_name.items():
            words = f"{family} on {size} ({mesh}), {dtypes[1]}" + "".join(f", {key}" for key in keys[1:])
            recipe = tiny_recipe(
                root,
                *keys,
                f"train.dtype={dtypes[1]}",
                *mesh_keys,
                family=family,
                name=f"{name}-{size}-{mesh}".replace(", ", "-"),
            )
            run(train_rank, size, recipe)
            yield compared(words, rows_of(recipe), rows_of(of_cpu), bounds)


def compared(name: str, rows: list, expected: list, bounds: Sequence[float]) -> str:
    """Return the line of a run: how far losses and norms of all steps lie from those expected."""
    off = [
        max(abs(row[field] - other[field]) / abs(other[field]) for row, other in zip(rows, expected, strict=True))
        for field in ("loss", "grad_norm")
    ]
    is_wrong = any(not share <= bound for share, bound in zip(off, bounds, strict=True))
    return f"{WRONG if is_wrong else 'ok'}  {name}: loss off by {off[0]:.1e}, norm by {off[1]:.1e}"
