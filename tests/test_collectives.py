"""Every collective of an optimizer step, counted, against the formulas of dtrain/parallel/README.md."""

import math
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dtrain import recipe as config
from dtrain.losses.head.sources import head_tile_rows
from dtrain.models.read_config import read_config
from dtrain.parallel.mesh import Runtime, build_mesh
from dtrain.policy import Policy
from dtrain.training import build_method
from tests.tiny import tiny_recipe, write_model
from tests.world import run_world

KINDS = {
    "_allgather_base_": "all-gather",
    "allgather_": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "all_gather_into_tensor_coalesced": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "reduce_scatter_": "reduce-scatter",
    "allreduce_": "all-reduce",
    "all_reduce": "all-reduce",
    "send": "send",
    "recv_": "receive",
}


LENGTH = 16  # tokens of a row, all with a label


class Counted(TorchDispatchMode):
    """Counts by kind; what is none of the kinds above is counted under its own name."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional", "c10d_functional"):
            name = func._schema.name.split("::")[1]
            if name not in ("wait_tensor", "_wrap_tensor_autograd"):  # nothing is sent by these
                self.found[KINDS.get(name, name)] += 1
        return func(*args, **(kwargs or {}))


def a_step(rank, recipe, world_size, eval_mode):
    """The collectives of one step on this rank, after one that makes what is made once."""
    runtime = Runtime(rank=rank, local_rank=rank, world_size=world_size)
    sizes = config.derive_sizes(recipe, world_size)
    mesh = build_mesh(runtime, dp_replicate=sizes.dp_replicate, dp_shard=sizes.dp_shard, cp=sizes.cp, tp=sizes.tp)
    policy = Policy(recipe, read_config(recipe.model.path), mesh, runtime)
    policy.init_optimizer(10)
    rows = recipe.train.global_batch // sizes.dp
    ids = torch.randint(60, (rows, LENGTH), generator=torch.Generator().manual_seed(rank))
    documents = (torch.arange(LENGTH) // 8).expand(rows, -1)
    positions = (torch.arange(LENGTH) % 8).expand(rows, -1)
    batch = {"input_ids": ids, "labels": ids, "position_ids": positions, "seq_ids": documents}
    loss = build_method(recipe).loss
    for _ in range(2):
        counted = Counted()
        with counted:
            rows_of_step = {name: stream.clone() for name, stream in batch.items()}
            if eval_mode:
                policy.evaluate(rows_of_step, loss)
            else:
                policy.forward_backward(rows_of_step, loss)
                policy.optimizer_step()
    return dict(counted.found)


def expected(model, sizes, recipe, eval_mode):
    """README's table, written out."""
    layers, micro = model.num_hidden_layers, sizes.accumulation
    shards, replicas, cp, tp = sizes.dp_shard * sizes.cp, sizes.dp_replicate, sizes.cp, sizes.tp
    backward = not eval_mode
    found = Counter()
    untied = not model.tie_word_embeddings
    units = layers + 1 + 2 * untied  # layers, the root, and where they are not tied embedding and head
    if shards > 1:
        gathers = {
            "default": units + backward * (layers - 1),
            True: units + backward * (units - untied),  # the embedding once
            False: units,
        }
        # Without a backward nothing between the micro-batches gives back what is kept: it is gathered once.
        kept = {"default": 2 + untied, True: 0, False: units}[recipe.parallel.reshard_after_forward]
        per_pass = gathers[recipe.parallel.reshard_after_forward]
        found["all-gather"] += micro * per_pass if backward else micro * (per_pass - kept) + kept
        found["reduce-scatter"] += backward * units
    if replicas > 1:
        found["all-reduce"] += backward * units
    if tp > 1:
        crossings = micro * (2 * layers + 1) * (1 + backward)
        if recipe.parallel.sequence_parallel:
            found["all-gather"] += crossings
            found["reduce-scatter"] += crossings
        else:
            # Forward: what leaves the embedding and every block; backward: what entered every block, and the head.
            found["all-reduce"] += crossings
        columns = -(-model.vocab_size // tp)
        tokens = recipe.train.micro_batch * LENGTH // cp
        found["all-gather"] += micro * math.ceil(tokens / head_tile_rows(columns, "cpu"))  # the loss
        found["all-reduce"] += backward * partial_gradients(model, tp, bool(recipe.parallel.sequence_parallel))
    if cp > 1:
        found["all-gather"] += micro  # positions and documents
        if recipe.parallel.cp_rotate == "allgather":
            found["all-gather"] += micro * layers
            found["reduce-scatter"] += backward * micro * layers
        else:
            exchanges = micro * layers * ((cp - 1) + backward * (cp - 1 + cp))
            found["send"] = found["receive"] = exchanges
    if backward and recipe.train.activation_checkpointing == "full":
        add_recomputed(found, recipe, cp, tp, micro * layers, 1 + ("Gemma3" in model.architecture))
    dp = sizes.dp > 1
    found["all-reduce"] += 2 * dp + (sizes.dp * cp > 1) + backward  # rows, counts; the loss; the norm
    return {kind: count for kind, count in found.items() if count}


def add_recomputed(found, recipe, cp, tp, times, sums):
    """A layer's forward again, up to what its backward needs: the MLP's sum only where a norm follows it."""
    if tp > 1 and recipe.parallel.sequence_parallel:
        found["all-gather"] += 2 * times
        found["reduce-scatter"] += sums * times
    elif tp > 1:
        found["all-reduce"] += sums * times
    if cp > 1 and recipe.parallel.cp_rotate == "allgather":
        found["all-gather"] += times
    elif cp > 1:
        for kind in ("send", "receive"):
            found[kind] += (cp - 1) * times


def partial_gradients(model, tp, sequence_parallel):
    """Parameters that every tp rank holds whole, and reads for a part of the tokens, heads or outputs."""
    has_head_norms = "Qwen3" in model.architecture or "Gemma3" in model.architecture
    gemma = "Gemma3" in model.architecture
    per_layer = 2 * has_head_norms + model.o_bias + model.mlp_bias
    if model.num_key_value_heads < tp:
        per_layer += 2 + 2 * model.qkv_bias
    if sequence_parallel:
        per_layer += 4 if gemma else 2
    return model.num_hidden_layers * per_layer + sequence_parallel


MESHES = {
    "one": (1, []),
    "dp2": (2, []),
    "dp3, given back": (3, ["parallel.reshard_after_forward=true"]),
    "dp2, kept": (2, ["parallel.reshard_after_forward=false"]),
    "dp_replicate2": (2, ["parallel.dp_replicate=2"]),
    "dp_replicate2 dp2": (4, ["parallel.dp_replicate=2"]),
    "tp2": (2, ["parallel.tp=2", "parallel.sequence_parallel=false"]),
    "tp2+sp": (2, ["parallel.tp=2"]),
    "tp4+sp": (4, ["parallel.tp=4"]),
    "cp2": (2, ["parallel.cp=2"]),
    "cp2 ring": (2, ["parallel.cp=2", "parallel.cp_rotate=ring"]),
    "cp3 ring": (3, ["parallel.cp=3", "parallel.cp_rotate=ring"]),
    "dp2 tp2": (4, ["parallel.tp=2", "parallel.sequence_parallel=false"]),
    "dp2 cp2": (4, ["parallel.cp=2"]),
    "tp2+sp cp2 ring": (4, ["parallel.tp=2", "parallel.cp=2", "parallel.cp_rotate=ring"]),
    "dp2, again": (2, ["train.activation_checkpointing=full"]),
    "tp2, again": (2, ["parallel.tp=2", "parallel.sequence_parallel=false", "train.activation_checkpointing=full"]),
    "tp2+sp cp2, again": (4, ["parallel.tp=2", "parallel.cp=2", "train.activation_checkpointing=full"]),
    "cp3 ring, again": (3, ["parallel.cp=3", "parallel.cp_rotate=ring", "train.activation_checkpointing=full"]),
}
MODELS = {
    "qwen3": ("qwen3", {}),
    "llama, all biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, untied": ("llama", {"tied": False}),
    "gemma3": ("gemma3", {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}),
    "qwen2": ("qwen2", {}),
}


# Mesh, model and whether the step evaluates. A model's own traffic is of tp: biases of `qwen2` and `llama`, norms of
# `qwen3` and `gemma3`, which adds two a layer, and key heads that are fewer than the ranks.
CASES = (
    ("one", "qwen3", False),
    ("dp2", "llama, all biases", False),
    ("dp2", "gemma3", True),
    ("dp3, given back", "gemma3", False),
    ("dp2, kept", "qwen2", False),
    ("dp2, kept", "qwen3", True),
    ("dp_replicate2", "qwen3", False),
    ("dp_replicate2 dp2", "llama, all biases", False),
    ("tp2", "llama, all biases", False),
    ("tp2", "gemma3", True),
    ("tp2+sp", "gemma3", False),
    ("tp4+sp", "qwen2", False),
    ("cp2", "qwen2", True),
    ("cp2 ring", "gemma3", False),
    ("cp3 ring", "qwen2", False),
    ("dp2 tp2", "qwen2", False),
    ("dp2 cp2", "gemma3", False),
    ("tp2+sp cp2 ring", "llama, all biases", False),
    ("dp2, again", "qwen3", False),
    ("tp2, again", "gemma3", False),
    ("tp2+sp cp2, again", "gemma3", False),
    ("cp3 ring, again", "llama, all biases", False),
    *(
        (mesh, "llama, untied", False)
        for mesh in ("dp3, given back", "dp2, kept", "dp_replicate2 dp2", "dp2 tp2", "dp2 cp2")
    ),
    ("dp2, again", "llama, untied", False),
    ("dp2", "llama, untied", True),
)


def steps(rank, cases, world_size):
    """The collectives of a step of each case, by its name."""
    return {name: a_step(rank, recipe, world_size, eval_mode) for name, recipe, eval_mode, _ in cases}


@pytest.mark.parametrize("ranks", sorted({MESHES[mesh][0] for mesh, _, _ in CASES}))
def test_a_step_sends_what_the_table_says(tmp_path, ranks):
    cases = []
    for mesh, model, eval_mode in CASES:
        size, options = MESHES[mesh]
        if size == ranks:
            family, changes = MODELS[model]
            path = write_model(tmp_path / model, family, **changes)
            recipe = tiny_recipe(tmp_path, f"model.path={path}", "train.global_batch=24", *options)
            batch = 2 * recipe.train.micro_batch * config.derive_sizes(recipe, ranks).dp
            recipe = tiny_recipe(tmp_path, f"model.path={path}", f"train.global_batch={batch}", *options)
            sizes = config.derive_sizes(recipe, ranks)
            assert sizes.accumulation == 2
            table = expected(read_config(path), sizes, recipe, eval_mode) if ranks > 1 else {}
            cases.append((f"{mesh}, {model}{', eval' * eval_mode}", recipe, eval_mode, table))
    for results in run_world(steps, ranks, cases, ranks, timeout=300.0):
        assert results == {name: table for name, _, _, table in cases}


def test_every_mesh_and_model_has_a_case():
    assert {mesh for mesh, _, _ in CASES} == set(MESHES) and {model for _, model, _ in CASES} == set(MODELS)


def test_a_large_vocabulary_sends_its_loss_in_tiles(tmp_path):
    path = write_model(tmp_path / "model", "llama", vocab_size=2**16 + 1, hidden_size=8)
    options = ["train.global_batch=36", "train.micro_batch=12", "parallel.tp=2"]
    recipe = tiny_recipe(tmp_path, f"model.path={path}", *options)
    table = expected(read_config(path), config.derive_sizes(recipe, 2), recipe, False)
    assert table["all-gather"] == 3 * (2 * (2 * 2 + 1) + 3)  # 192 tokens in tiles of 64
    for found in run_world(a_step, 2, recipe, 2, False):
        assert found == table
