"""grpo.cuda_graphs on pretend cards: by the rules of torch.cuda.graph, with the CPU's numbers without graphs."""

import pytest

from tests.adapters.test_nf4 import NF4, base
from tests.pretend.mutants import Mutant
from tests.pretend.runs import rows_of, train_on_card
from tests.pretend.test_methods import grpo
from tests.pretend.test_sft import EXACT, assert_close, on_cpu
from tests.pretend.worlds import run_pretend
from tests.tiny import write_model

GRAPHS = "grpo.cuda_graphs=true", "grpo.sampling.max_new_tokens=12"


def train_and_count(rank, recipe, size):
    from tests.pretend.graphs import Graph

    Graph.replays = 0
    train_on_card(rank, recipe, size)
    return Graph.replays


@pytest.mark.parametrize(
    ("size", "keys", "like"),
    [
        (2, (), ("grpo.sampling.top_p=0.9",)),
        (1, ("lora.rank=4", "lora.dropout=0.1", "train.dtype=bfloat16"), None),
    ],
    ids=["fsdp", "lora"],
)
def test_a_run_with_graphs(tmp_path, size, keys, like):
    keys = f"model.path={write_model(tmp_path / 'model', tied=False)}", *keys
    card = grpo(tmp_path, *GRAPHS, *keys, *(like or ()), name="card")
    replays = run_pretend(train_and_count, size, card, size)
    assert all(count > 10 for count in replays), replays
    if like is not None:
        assert_close(rows_of(card), on_cpu(grpo(tmp_path, GRAPHS[1], *keys, *like, name="cpu")), EXACT)


def captures_of_rollouts(rank, recipe, size):
    import torch

    from dtrain.inference.native import NativeEngine

    Graph = torch.cuda.CUDAGraph  # the pretend one
    counts, generate = [], NativeEngine.generate

    def counted(*given, **named):
        before = Graph.captures
        completions = generate(*given, **named)
        counts.append(Graph.captures - before)
        return completions

    NativeEngine.generate = counted
    train_on_card(rank, recipe, size)
    return counts


@pytest.mark.parametrize(
    ("size", "keys"),
    [(1, ()), (1, ("train.dtype=bfloat16", "lora.rank=4")), (2, ("train.dtype=bfloat16",))],
    ids=["whole", "lora", "fsdp"],
)
def test_the_next_rollout_captures_nothing(tmp_path, size, keys):
    """Before, where nothing is kept, each rollout captures its shapes anew. The numbers are the same."""
    found = []
    for name, mutants in (
        ("kept", ()),
        ("dropped", (Mutant("dtrain.inference.graphs", "MAX_KEPT_SHARE = 1 / 20", "MAX_KEPT_SHARE = 0"),)),
    ):
        recipe = grpo(tmp_path, GRAPHS[1], "train.global_batch=16", *keys, name=name)
        counts = run_pretend(captures_of_rollouts, size, recipe, size, mutants=mutants)[0]
        found.append((counts, rows_of(recipe)))
    (kept, rows), (dropped, others) = found
    print(kept, dropped)
    assert len(kept) == len(dropped) > 1 and kept[0] == dropped[0] > 0
    assert sum(kept[1:]) == 0 and min(dropped) > 0
    assert_close(rows, others, EXACT)


def test_over_weights_in_four_bits(tmp_path):
    found = []
    for graphs in ("true", "false"):
        keys = *NF4, f"model.path={base(tmp_path)}", GRAPHS[1], f"grpo.cuda_graphs={graphs}"
        recipe = grpo(tmp_path, *keys, name=graphs)
        replays = run_pretend(train_and_count, 1, recipe, 1)
        assert (replays[0] > 10) == (graphs == "true"), replays
        found.append(rows_of(recipe))
    assert_close(*found, EXACT)


def test_a_step_that_waits_is_not_captured(tmp_path):
    """A capture that failed would leave torch's allocator in a state that nothing mends."""
    store = "        self.tokens.copy_(tokens)\n        self.logprobs.copy_"
    waits = Mutant("dtrain.inference.graphs", store, f"        tokens.sum().item()\n{store}")
    rows = []
    for name, mutants in (("waits", [waits]), ("graphs", [])):
        recipe = grpo(tmp_path, GRAPHS[1], name=name)
        counts = run_pretend(captures_of_rollouts, 1, recipe, 1, mutants=mutants)[0]
        assert (sum(counts) == 0) == (name == "waits"), counts
        rows.append(rows_of(recipe))
    assert_close(*rows, EXACT)


@pytest.mark.parametrize("module", ["layer", "self.embed_tokens", "self.head"])
def test_what_cannot_be_captured_is_refused(tmp_path, module):
    hooks = Mutant("dtrain.models.common.decoder", f"{module}.forward if skips_hooks else {module}", module)
    model = write_model(tmp_path / "model", tied=False)
    recipe = grpo(tmp_path, *GRAPHS, f"model.path={model}", "train.dtype=bfloat16", name="card")
    with pytest.raises(AssertionError, match="a stream waits"):
        run_pretend(train_and_count, 1, recipe, 1, mutants=[hooks])
