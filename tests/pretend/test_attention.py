"""Attention on the pretend card: which kernels run where, that neither a mask nor a wait of the host is in the way, and
that nothing grows with queries × keys."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from dtrain.attention.context import GatherKernel, RingKernel
from dtrain.attention.kernels import SdpaKernel
from dtrain.attention.packing import Packing
from dtrain.attention.varlen import VarlenKernel
from dtrain.attention.visibility import Visibility
from dtrain.parallel.mesh import Runtime
from dtrain.training.trainer import train
from tests.pretend import journal
from tests.pretend.mutants import Mutant
from tests.pretend.runs import rows_of, train_on_card
from tests.pretend.worlds import run_pretend
from tests.tiny import tiny_grpo, tiny_recipe

NEAR = 1.5e-2  # relative, of bfloat16's numbers to float32's
RING = ("parallel.cp=2", "parallel.cp_rotate=ring")
PADDED, TP = "data.packing=false", ("parallel.tp=2", "parallel.sequence_parallel=true", "data.max_length=27")
RUNS = {
    "packed": (1, (), "gemma3"),
    "padded, under a window": (1, (PADDED,), "gemma3"),
    "gathered, padded": (2, ("parallel.cp=2", PADDED, "train.activation_checkpointing=full"), "gemma3"),
    "ring, the sequence cut over tp": (4, (*RING, *TP), "llama"),
    "ring of three": (3, ("parallel.cp=3", RING[1], "train.activation_checkpointing=full"), "llama"),
}
PROOF = ", 256, "  # sdpa's calls of the proof: rows of 256 tokens


@pytest.mark.parametrize("name", RUNS)
def test_half_precision_takes_no_mask(tmp_path, name):
    size, keys, family = RUNS[name]
    keys = ("train.steps=3", "checkpoint.every=null", *keys)
    cpu = [key for key in keys if not key.startswith("parallel.")]
    plain = tiny_recipe(tmp_path, *cpu, "train.dtype=float32", family=family, name="cpu")
    train(plain, Runtime())
    recipe = tiny_recipe(tmp_path, *keys, "train.dtype=bfloat16", family=family, name="card")
    felt = run_pretend(train_on_card, size, recipe, size)
    for row, other in zip(rows_of(recipe), rows_of(plain), strict=True):
        assert abs(row["loss"] - other["loss"]) <= NEAR * other["loss"]
        assert abs(row["grad_norm"] - other["grad_norm"]) <= 5 * NEAR * other["grad_norm"]
    for one in felt:
        assert one.count("kernel", within="varlen flash")
        chosen = [what for what, _ in one.entries["kernel"] if what.startswith("sdpa ")]
        assert all("mask=None" in what for what in chosen if PROOF not in what)
        assert not any("MATH" in what or "CUDNN" in what for what in chosen)
        for kind in ("sync", "pageable"):
            waits = [where for _, where in one.entries.get(kind, {}) if "attention/" in where or "score.py" in where]
            assert all("attention/varlen.py" in where for where in waits), waits


INSTALLED = Mutant("dtrain.attention.linear.flash", "from fla.ops.gated_delta_rule", "from tests.attention.fla")


LINEAR = {"cp": (2, ("parallel.cp=2",)), "padded": (1, (PADDED,))}


@pytest.mark.parametrize("name", LINEAR)
def test_linear_attention_takes_flash_linear_attention(tmp_path, name):
    """A stand-in for it, so that what is around it runs as on a card: no wait of the host outside the proof."""
    size, keys = LINEAR[name]
    keys = ("train.steps=2", "scheduler.warmup_steps=0", "checkpoint.every=null", "train.dtype=bfloat16", *keys)
    cpu = [key for key in keys if not key.startswith("parallel.")]
    plain = tiny_recipe(tmp_path, *cpu, family="qwen3.5", name="cpu")
    train(plain, Runtime())
    recipe = tiny_recipe(tmp_path, *keys, "model.linear_attention=fla", family="qwen3.5", name="card")
    for one in run_pretend(train_on_card, size, recipe, size, mutants=[INSTALLED]):
        for kind in ("sync", "pageable"):
            waits = [where for _, where in one.entries.get(kind, {}) if "attention/linear" in where]
            assert all("attention/linear/flash.py" in where for where in waits), waits
    for row, other in zip(rows_of(recipe), rows_of(plain), strict=True):
        assert abs(row["loss"] - other["loss"]) <= NEAR * other["loss"]
        assert abs(row["grad_norm"] - other["grad_norm"]) <= 5 * NEAR * other["grad_norm"]


def peaks(rank, kind, lengths, dtype):
    """The most bytes that a layer's attention holds, forward and backward, and what kernels torch took."""
    device = torch.device("cuda", rank)
    mesh = init_device_mesh("cuda", (2,), mesh_dim_names=("cp",))["cp"]
    kernels = {
        "gather": VarlenKernel(masked=GatherKernel(SdpaKernel(), mesh)),
        "ring": VarlenKernel(masked=RingKernel(SdpaKernel(), mesh)),
        "masked ring": RingKernel(SdpaKernel(), mesh),
        "masked": SdpaKernel(),
    }
    kernel = kernels[kind]
    found = []
    for length in lengths:
        packing = Packing(((0, length // 3),), length)
        tokens = length // 2 if kernel.is_context_parallel else length
        positions = torch.arange(length, device=device)[None]
        mine = (
            positions.unflatten(1, (4, -1))[:, [rank, 3 - rank]].flatten(1) if kernel.is_context_parallel else positions
        )
        if "masked" in kind:
            seen = Visibility(tokens, length, 2 * length, mine, positions)
        else:
            seen = Visibility(tokens, length, packing=packing)
        q, k, v = (torch.ones(1, tokens, n, 8, device=device, dtype=dtype).requires_grad_() for n in (2, 1, 1))
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.max_memory_allocated()
        out = kernel(q, k, v, kernel.prepare(seen, dtype, device), 0.3)
        out.backward(torch.ones_like(out))
        found.append(torch.cuda.max_memory_allocated() - before)
    return found, [what for what, _ in journal.entries("kernel")]


@pytest.mark.parametrize("kind", ["gather", "ring"])
def test_nothing_grows_with_queries_times_keys(kind):
    for (short, long), kernels in run_pretend(peaks, 2, kind, (1024, 2048), torch.bfloat16):
        assert long <= 2.1 * short
        assert all("flash" in what for what in kernels)


@pytest.mark.parametrize(("kind", "dtype"), [("masked", torch.float32), ("masked ring", torch.float64)])
def test_no_kernel_holds_all_scores(kind, dtype):
    """Heads of one key group and a mask, which the composition alone would take as they are."""
    for _, kernels in run_pretend(peaks, 2, kind, (1500,), dtype):
        assert not any("MATH" in what for what in kernels)


def test_packed_rollouts_that_would_need_a_long_mask_are_refused(tmp_path):
    """A packed row of GRPO holds a whole micro-batch."""
    unproved = Mutant(
        "dtrain.policy.build",
        "return _first_problem(problems)",
        'return "too old"',
    )
    keys = "train.dtype=bfloat16", "data.max_length=8193", "train.micro_batch=2"
    with pytest.raises(AssertionError, match="packed into rows of 16386: too old.* set data.max_length=8192 or less"):
        run_pretend(train_on_card, 1, tiny_grpo(tmp_path, *keys), 1, mutants=[unproved])
