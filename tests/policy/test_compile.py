"""Compiled layers: two graphs for rows of all lengths, on every mesh and under every kernel, and eager's numbers.

By aot_eager, which traces as inductor does and compiles nothing; one test takes inductor itself.
"""

import shutil
import warnings
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor import metrics as generated

from dtrain import models
from dtrain.attention.packing import Packing
from dtrain.attention.varlen import VarlenKernel
from dtrain.base import compiled as compilers
from dtrain.memory import compilation as regions
from dtrain.models.common.micro_batch import MicroBatchContext
from dtrain.parallel.mesh import Runtime, StopFlag
from dtrain.parallel.placement import local_tensor
from dtrain.training.trainer import train, train_checked
from tests.pretend.worlds import run_pretend
from tests.running import metrics
from tests.tiny import tiny_grpo, tiny_recipe, write_model, write_pairs, write_rows
from tests.world import run_world

ROWS = [(48, 48), (48, 48), (48, 16), (31, 9), (20, 7), (64, 13), (40, 40)]  # lengths of rows and of their documents
COMPILE = torch.compile


def by_aot_eager():
    torch.compile = partial(COMPILE, backend="aot_eager")
    compilers.has_triton = lambda: True  # a pretend card has none


def forget_compiled():
    """Begin without what this process, or the one that forked it, has compiled."""
    torch._dynamo.reset()
    counters.clear()


def graphs():
    return counters["stats"]["unique_graphs"]


def kept_for_backward(model):
    """Told of every tensor that a forward keeps, and the bytes of the storages of those that are no parameters."""
    held = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        weights = {local_tensor(one).untyped_storage().data_ptr() for one in model.parameters()}  # as FSDP has them now
        if storage.data_ptr() not in weights:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), held


def lengths_on(rank, path, device, is_packed, inductor=False):
    """The graphs after each row, how far hidden states and gradients of compiled layers are from those of eager ones,
    and what eager and compiled layers keep for the backward. The first length is the hidden size too."""
    forget_compiled()
    made, kept = [], []
    for is_compiled in (False, True):
        model = models.build(models.read_config(path))
        models.init_weights(model, 0)
        model = model.to(device, torch.bfloat16 if is_packed else torch.float32)
        if is_packed:
            model.use_kernel(VarlenKernel())
        if is_compiled:
            if not inductor:
                by_aot_eager()
            regions.compile_layers(model)
        found, counts = [], []
        for length, document in ROWS:
            at = torch.arange(length)[None].expand(2, -1)
            ids = (7 * at % 60).to(device)
            rows = (at % document, at // document)
            packed = [*(one.to(device) for one in rows), Packing.of(*rows)] if is_packed else []
            hooks, held = kept_for_backward(model)
            with hooks:
                hidden = model.model(ids, MicroBatchContext(*packed))
            weights = torch.linspace(-1, 1, hidden.numel(), device=device).view_as(hidden)
            (hidden.float() * weights).sum().backward()
            found += [hidden.detach().float().cpu(), model.model.layers[0].mlp.up_proj.weight.grad.float().cpu()]
            counts.append(graphs())
        made.append(found)
        kept.append(sum(held.values()))
    return counts, max(float((a - b).abs().max() / a.abs().max()) for a, b in zip(*made, strict=True)), kept


def model_at(root):
    return write_model(root / "model", "llama", hidden_size=48, intermediate_size=56, head_dim=8)


def test_rows_of_all_lengths_take_two_graphs(tmp_path):
    """One graph lies before attention, one after it."""
    [(counts, off, _)] = run_world(lengths_on, 1, model_at(tmp_path), "cpu", False, timeout=180.0)
    assert counts == [2] * len(ROWS)
    assert off < 1e-5


def test_packed_rows_on_a_card_take_two_graphs(tmp_path):
    """And keep no more for the backward than as written, which is what `dtrain plan` counts."""
    [(counts, off, (eager, compiled))] = run_pretend(lengths_on, 1, model_at(tmp_path), "cuda", True, timeout=180.0)
    assert counts == [2] * len(ROWS)
    assert off < 2**-6  # of bfloat16
    assert compiled <= eager


def by_inductor(rank, path):
    torch._inductor.config.compile_threads = 1  # a pool would import torch in a process of its own
    before = generated.generated_kernel_count
    return *lengths_on(rank, path, "cpu", False, inductor=True), generated.generated_kernel_count - before


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs g++ for a CPU")
def test_inductor_gives_eagers_numbers(tmp_path):
    """By few kernels of its own beside the products."""
    [(counts, off, _, kernels)] = run_world(by_inductor, 1, model_at(tmp_path), timeout=600.0)
    assert counts == [2] * len(ROWS)
    assert off < 1e-5
    assert 0 < kernels <= 28


class Counting(StopFlag):
    """Counts the graphs whenever the trainer looks whether it must stop: before the first step, after each step, and
    during rollouts."""

    def __init__(self):
        self.seen = []
        super().__init__()

    @property
    def signum(self):
        self.seen.append(graphs())
        return 0

    @signum.setter
    def signum(self, value):
        assert value == 0, "no signal comes"


def on_rank(rank, recipe, size, device="cpu"):
    by_aot_eager()
    forget_compiled()
    stop = Counting()
    place = torch.device("cuda", rank) if device == "cuda" else torch.device("cpu")
    train_checked(recipe, Runtime(rank=rank, local_rank=rank, world_size=size, device=place, stop=stop))
    return stop.seen


def after_the_third_step(seen):
    """The numbers of graphs that were counted at the end of the last two steps; no rollout begins between them."""
    assert len(seen) >= 1 + STEPS
    return set(seen[-2:])


def sft(root, *keys, name, family="llama"):
    rows = root / "rows.jsonl"
    if not rows.exists():
        write_rows(rows, longest=140)  # over 64 tokens a CPU's mask comes in blocks
    return tiny_recipe(root, "data.max_length=150", "train.global_batch=4", *keys, name=name, family=family)


def qlora(root, *keys, name):
    if not (model := root / "llama-tied").exists():
        write_model(model, "llama", hidden_size=64, intermediate_size=64, head_dim=16)  # blocks of 64 weights
    return sft(root, LORA, "lora.quantize=nf4", *keys, name=name)


def validated(root, *keys, name):
    held_out = write_rows(root / "held-out.jsonl", count=6, longest=140, seed=1)
    return sft(root, f"data.val.path={held_out}", "train.validate_every=1", *keys, name=name)


def dpo(root, *keys, name):
    pairs = root / "pairs.jsonl"
    if not pairs.exists():
        write_pairs(pairs)
    return tiny_recipe(root, "method=dpo", f"data.train.path={pairs}", "train.global_batch=4", *keys, name=name)


STEPS = 4
PAD, FULL = "data.packing=false", "train.activation_checkpointing=full"
SELECTIVE = "train.activation_checkpointing=selective"
TP, LORA = "parallel.tp=2", "lora.rank=4"

# What is run, ranks, keys, and the most graphs that it may take.
CPU = {
    # Without gradients, graphs know how the tensor lies that `attended` is a view of: of rows of up to 64 tokens it is
    # [B, H, S, hd], as SDPA gives it, of longer ones, whose blocks are joined, [B, S, H, hd].
    "validated": (validated, 1, (PAD,), 5),
    "qlora": (qlora, 1, (PAD, SELECTIVE), 4),  # the embedding is frozen, so nothing is owed to the first layer's input
    "tp": (sft, 2, (TP,), 2),
    "mixture": (partial(sft, family="qwen3-moe"), 1, (PAD, SELECTIVE), 2),  # one layer of it is dense
}


@pytest.mark.parametrize("name", CPU)
def test_a_run_compiles_nothing_after_its_third_step(tmp_path, name):
    make, size, keys, most = CPU[name]
    rows = []
    for is_compiled in ("false", "true"):
        compiled = f"train.compile={is_compiled}", f"train.steps={STEPS}", "train.dtype=float32"
        recipe = make(tmp_path, *compiled, *keys, name=f"compiled-{is_compiled}")
        for seen in run_world(on_rank, size, recipe, size, timeout=240.0):
            late = after_the_third_step(seen)
            assert len(late) == 1 and late <= set(range(2, most + 1) if is_compiled == "true" else [0]), seen
        rows.append([(row["loss"], row["grad_norm"]) for row in metrics(recipe) if "loss" in row])
    assert torch.allclose(*map(torch.tensor, rows), rtol=1e-6, atol=0)


HEAD = 4  # of the loss's two functions, for tiles of one row and of several
CARD = {
    "window": (partial(sft, family="gemma3"), 1, (PAD,), 2 + HEAD),
    "lora": (sft, 2, (LORA, FULL), 4 + HEAD),
    "dpo-lora": (dpo, 1, (LORA, SELECTIVE), 6 + HEAD),
    # With shared prompts, a last micro-batch of one completion may come at any step, for which a graph is missing.
    "grpo": (tiny_grpo, 1, ("train.share_prompts=false",), 4 + HEAD),
}


@pytest.mark.parametrize("name", CARD)
def test_a_run_on_cards_compiles_nothing_after_its_third_step(tmp_path, name):
    make, size, keys, most = CARD[name]
    compiled = f"train.steps={STEPS}", "train.dtype=bfloat16", "train.compile=true"
    recipe = make(tmp_path, *compiled, *keys, name="compiled")
    for seen in run_pretend(on_rank, size, recipe, size, "cuda", timeout=240.0):
        late = after_the_third_step(seen)
        assert len(late) == 1 and late <= set(range(2, most + 1)), seen


def of_many_words(rank):
    """The graphs of a function of words, which are compiled in, and what was warned of."""
    by_aot_eager()
    forget_compiled()
    said = SimpleNamespace(word="")
    region = compilers.CompiledFunction(lambda x: x + len(said.word), regions.NAME, 2)
    compilers.MAX_GRAPHS = 4
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for length in range(7):
            said.word = "a" * length
            assert region(torch.zeros(2, 3)).eq(length).all()
    return graphs(), [str(one.message) for one in told if "train.compile" in str(one.message)]


def test_a_part_that_is_compiled_too_often_runs_as_written_and_says_so():
    [(count, [warned])] = run_world(of_many_words, 1)
    assert count == 4
    assert "train.compile" in warned and "4 times" in warned


@pytest.mark.parametrize(
    "keys, why",
    [
        ((), "there is no compiler (g++)"),
        (("lora.rank=4", "lora.dropout=0.1"), "lora.dropout=0.1"),
        (("train.activation_checkpointing=mlp",), "train.activation_checkpointing=mlp"),
    ],
)
def test_a_run_that_cannot_compile_says_why_and_runs(tmp_path, monkeypatch, capsys, keys, why):
    monkeypatch.setattr(shutil, "which", lambda name: None if "g++" in why else name)
    train(tiny_recipe(tmp_path, "train.steps=3", "train.compile=true", *keys), Runtime())
    assert f"note: train.compile=true, and layers run uncompiled: {why}" in capsys.readouterr().err
