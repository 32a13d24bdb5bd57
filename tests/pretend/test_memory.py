"""A plan's peak for a CUDA device against the bytes that a pretend card hands out for the same step."""

import gc

import pytest
import torch
import torch.distributed as dist

from dtrain import recipe as config
from dtrain.base.batch import collate
from dtrain.base.fused import Fused
from dtrain.commands.plan.plan import resolve_plan
from dtrain.commands.plan.step import plan_step
from dtrain.models.read_config import read_config
from dtrain.parallel.mesh import build_mesh, init_one_process_group
from dtrain.policy import Policy
from dtrain.training import build_method
from dtrain.training.full_rows import full_rows
from tests.policy.test_compile import by_aot_eager
from tests.pretend.runs import runtime_of
from tests.pretend.worlds import run_pretend
from tests.stepping import train_step
from tests.tiny import save_weights, tiny_recipe, write_model

CLOSE = 0.01
# A plan computes compiled parts as written. In the MLP's backward that takes four tensors [S, F] at once, and the graph
# of aot_eager takes less. It shows where a layer's backward is the peak.
CLOSE_COMPILED = 0.02
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 3001,
    "max_position_embeddings": 4096,
}


def peak_of_a_step(rank, recipe, size):
    """Return the most bytes held in a step once the optimizer has its state: the least of nine steps, or of as many
    as reach it three times. A thread of autograd that waits for its turn holds the last graph a while longer."""
    sizes = config.derive_sizes(recipe, size)
    runtime = runtime_of(rank, size)
    if not dist.is_initialized():
        init_one_process_group("cuda")
    mesh = build_mesh(runtime, dp_replicate=sizes.dp_replicate, dp_shard=sizes.dp_shard, cp=sizes.cp, tp=sizes.tp)
    policy = Policy(recipe, read_config(recipe.model.path), mesh, runtime)
    policy.init_optimizer(10)
    method = build_method(recipe)
    if recipe.method == "dpo":
        method.build_reference(policy)
    peaks = []
    while len(peaks) < 10 and peaks[1:].count(min(peaks[1:], default=0)) < 2:
        gc.collect()  # what an earlier recipe's step left, once autograd's threads have let go of it
        torch.cuda.reset_peak_memory_stats()
        rows = full_rows(method, sizes.accumulation)
        batch, loss = method.prepare(policy, collate(rows, list(rows[0])))
        train_step(policy, batch, loss, method.micro_rows)
        peaks.append(torch.cuda.max_memory_allocated())
    return min(peaks[1:])


FULL = ["train.activation_checkpointing=full"]
CASES = {
    "packed": (1, ["data.max_length=1024"]),
    "padded, computed again": (1, ["data.packing=false", "train.activation_checkpointing=full"]),
    "selective": (1, ["train.activation_checkpointing=selective"]),
    "selective, compiled": (1, ["train.activation_checkpointing=selective", "train.compile=true"]),
    "weights larger than activations": (1, ["data.max_length=32"]),
    "fsdp": (2, []),
    "tp": (2, ["parallel.tp=2"]),
    "cp": (2, ["parallel.cp=2", "data.max_length=1024"]),
    "ring": (2, ["parallel.cp=2", "parallel.cp_rotate=ring", "data.max_length=1024"]),
    "dpo": (1, ["method=dpo"]),
    "masters on the host": (1, ["parallel.optimizer_offload=true", "data.max_length=32"]),
    "masters on the host, fsdp": (2, ["parallel.optimizer_offload=true"]),
    "activations on the host": (1, [*FULL, "train.activation_offload=true", "data.max_length=1024"]),
    "all activations on the host, groups of heads, cp": (
        2,
        ["train.activation_offload=true", "train.tile=all", "parallel.cp=2", "data.max_length=1024"],
    ),
    "float32": (1, ["train.dtype=float32", "model.attention=sdpa"]),
}
SPARSE = SHAPE | {"intermediate_size": 768, "vocab_size": 301, "num_local_experts": 4, "num_experts_per_tok": 1}
SMALL_HEAD = ("padded, computed again", "selective", "selective, compiled")  # so that a layer's backward holds most


def peaks_of_steps(rank, recipes, size):
    """The most bytes held in the second step of each recipe, on ranks of one group."""
    by_aot_eager()
    Fused.will_compile = lambda self, tensor: False  # what aot_eager makes of it holds what its one kernel does not
    return [peak_of_a_step(rank, recipe, size) for recipe in recipes]


@pytest.mark.parametrize("size", [1, 2])
def test_the_planned_peak_is_what_the_card_hands_out(tmp_path, size):
    names = [name for name in CASES if CASES[name][0] == size]
    recipes = []
    for name in names:
        sizes = SHAPE | {"vocab_size": 301} if name in SMALL_HEAD else SHAPE
        path = write_model(tmp_path / name, "qwen3", tied=False, **sizes)
        shape = f"model.path={path}", "train.dtype=bfloat16", "data.max_length=512", "train.global_batch=2"
        recipes.append(tiny_recipe(tmp_path, *shape, "train.micro_batch=1", *CASES[name][1]))
    if size == 1:  # dequantised, a stack of experts is as large as what else lives
        names.append("experts in 4 bits")
        path = save_weights(write_model(tmp_path / "experts", "gpt-oss", tied=False, **SPARSE))
        more = ["model.init=pretrained", "lora={rank: 4}", "lora.quantize=nf4", "train.activation_checkpointing=full"]
        shape = f"model.path={path}", "train.dtype=bfloat16", "data.max_length=512", "train.global_batch=2"
        recipes.append(tiny_recipe(tmp_path, *shape, "train.micro_batch=1", *more))
    found = [max(ranks) for ranks in zip(*run_pretend(peaks_of_steps, size, recipes, size, timeout=300.0), strict=True)]
    off = {}
    for name, recipe, allocated in zip(names, recipes, found, strict=True):
        off[name] = plan_step(resolve_plan(recipe, size, "cuda")).peak / allocated - 1
    for name, share in off.items():
        most = CLOSE_COMPILED if "compiled" in name else CLOSE
        assert -CLOSE <= share <= most, (name, off)
