"""A plan held to the truth: its shards and its traffic against what real trainer runs on gloo ranks hold and send."""

import json
from collections import Counter
from contextlib import ExitStack

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

from dtrain.commands.plan.hardware import GPUS
from dtrain.commands.plan.plan import make_plan, resolve_plan
from dtrain.commands.plan.search import ClosedForms
from dtrain.commands.plan.step import plan_step
from dtrain.parallel.mesh import Runtime
from dtrain.parallel.placement import local_tensor
from dtrain.training import load_recipe
from dtrain.training.trainer import Trainer
from tests.cases import run_cases
from tests.tiny import tiny_recipe, write_model

LENGTH = 16  # tokens of a sample: two of them fill a row, as in a plan's batch


class Sent(TorchDispatchMode):
    """Messages and bytes by kind and size of the group, each collective read by its own signature."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = str(func).rpartition(".")[0]
        if name == "c10d._allgather_base_":
            self.add("all-gather", args[0], args[2])
        elif name == "c10d._reduce_scatter_base_":
            self.add("reduce-scatter", args[1], args[2])
        elif name == "c10d.allreduce_":
            self.add("all-reduce", args[0][0], args[1])
        elif name == "c10d.send":
            self.add("send", args[0][0], args[1])
        elif name == "_c10d_functional.all_gather_into_tensor":
            self.add("all-gather", out, args[2])
        elif name == "_c10d_functional.reduce_scatter_tensor":
            self.add("reduce-scatter", args[0], args[3])
        elif name == "_c10d_functional.all_reduce":
            self.add("all-reduce", args[0], args[2])
        elif name == "_c10d_functional.all_to_all_single":
            self.add("all-to-all", args[0], args[3])
        else:
            quiet = ("c10d.recv_", "_c10d_functional.wait_tensor", "_c10d_functional._wrap_tensor_autograd")
            assert func.namespace not in ("c10d", "_c10d_functional") or name in quiet, name
        return out

    def add(self, kind, tensor, group):
        if isinstance(group, str):
            ranks = dist.distributed_c10d._resolve_process_group(group).size()
        else:
            ranks = ProcessGroup.unbox(group).size()
        self.found[kind, ranks, "messages"] += 1
        self.found[kind, ranks, "bytes"] += tensor.numel() * tensor.element_size()


def trained(rank, recipe, world_size):
    """This rank's bytes of parameters, gradients and optimizer state, and what is sent from one step of the optimizer
    to the next."""
    sent, held, counted = [], {}, Sent()
    with ExitStack() as stack:
        trainer = Trainer.open(recipe, Runtime(rank=rank, local_rank=rank, world_size=world_size), stack)
        start = trainer.resume()
        policy = trainer.policy

        def weigh(*_):
            grads = [local_tensor(p.grad) for p in policy.model.parameters()]
            held["gradients"] = sum(grad.numel() * grad.element_size() for grad in grads)
            sent.append(counted.found.copy())

        policy.optimizer.register_step_pre_hook(weigh)
        with counted:
            trainer.loop(start)
    shards = [local_tensor(parameter.detach()) for parameter in policy.model.parameters()]
    held["parameters"] = sum(shard.numel() * shard.element_size() for shard in shards)
    states = [value for state in policy.optimizer.state.values() for value in state.values()]
    locals_ = [local_tensor(value) for value in states]
    held["state"] = sum(value.numel() * value.element_size() for value in locals_)
    return held, sent[1] - sent[0]


MESHES = {
    "dp2, llama, nothing even": ("llama", {"tied": False}, 2, []),
    "tp2, sp off, biases": (
        "llama",
        {"attention_bias": True, "mlp_bias": True},
        2,
        ["parallel.tp=2", "parallel.sequence_parallel=false"],
    ),
    "tp4 with 2 KV heads, checkpointing": (
        "qwen3",
        {"tied": False},
        4,
        ["parallel.tp=4", "train.activation_checkpointing=full", "train.dtype=float32", "train.global_batch=4"],
    ),
    "cp2, gather, SGD": (
        "gemma3",
        {},
        2,
        ["parallel.cp=2", "optimizer.name=sgd", "optimizer.kwargs={momentum: 0.9}", "train.global_batch=4"],
    ),
    "cp3, ring, mixed": (
        "qwen3",
        {},
        3,
        ["parallel.cp=3", "parallel.cp_rotate=ring", "train.dtype=bfloat16", "train.global_batch=4"],
    ),
    "dp2 ep2 tp2, experts": ("qwen3-moe", {"tied": False}, 4, ["parallel.ep=2", "parallel.tp=2"]),
}


@pytest.mark.parametrize("ranks", sorted({ranks for _, _, ranks, _ in MESHES.values()}))
def test_shards_and_traffic_are_those_of_a_real_run(tmp_path, ranks):
    rows = tmp_path / "full.jsonl"
    row = json.dumps({"input_ids": [7] * LENGTH, "labels": [7] * LENGTH}) + "\n"
    rows.write_text(row * 100)
    recipes = {}
    for name, (family, changes, size, options) in MESHES.items():
        if size == ranks:
            path = write_model(tmp_path / name, family, **changes)
            settings = [f"model.path={path}", f"data.train.path={rows}", "train.global_batch=8", "train.micro_batch=2"]
            settings += [
                "launch.device=cpu",
                "train.steps=2",
                "scheduler.warmup_steps=0",
                f"run.dir={tmp_path / name / 'runs'}",
            ]
            recipes[name] = tiny_recipe(tmp_path, *settings, *options)
    for name, real in run_cases(trained, ranks, {name: (one, ranks) for name, one in recipes.items()}).items():
        assert_as_planned(name, recipes[name], real)


def assert_as_planned(name, recipe, real):
    ranks = len(real)
    for rank in (0, ranks - 1) if ranks == 2 else (0,):
        held, sent = real[rank]
        step = plan_step(resolve_plan(recipe, ranks, "cpu"), rank=rank)
        assert {"parameters": step.parameters, "gradients": step.gradients, "state": step.optimizer_state} == held, name
        planned = Counter()
        for (_, kind, group, _), (count, size) in step.traffic.items():
            planned[kind, group, "messages"] += count
            planned[kind, group, "bytes"] += size
        # Which rank has how many rows of tokens depends on the router: a plan shares them out evenly.
        for key in (one for one in planned if one[0] == "all-to-all"):
            assert planned[key] * ranks == sum(of_rank[key] for _, of_rank in real), name
            sent[key] = planned[key]
        assert planned == sent, name
    assert step.smallest_parameters == min(held["parameters"] for held, _ in real), name
    assert max(held["parameters"] for held, _ in real) == real[0][0]["parameters"], name


# Units, and how many of them the backward gathers again by default and under reshard_after_forward: true.
UNITS = {
    "llama, tied": ("llama", {}, [], lambda layers: (layers + 1, layers - 1, layers + 1)),
    "llama, untied": ("llama", {"tied": False}, [], lambda layers: (layers + 3, layers - 1, layers + 2)),
    "of each micro-batch": (
        "llama",
        {"tied": False},
        ["parallel.reduce_each=true"],
        lambda layers: (layers + 3, layers - 1, layers + 2),
    ),
    "a classifier": ("llama", {}, ["method=reward"], lambda layers: (layers + 2, layers - 1, layers + 1)),
    "gemma4": ("gemma4", {}, [], lambda layers: (layers + 2, layers - 1, layers + 1)),
    "an adapter": ("llama", {}, ["lora={}"], lambda layers: (layers + 1, layers - 1, layers + 1)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", UNITS)
def test_a_search_knows_how_often_units_are_gathered(tmp_path, name):
    """Its closed form gives as many messages and bytes of FSDP as a traced step has."""
    family, changes, options, units_of = UNITS[name]
    path = write_model(tmp_path / "model", family, **changes)
    for reshard in ("default", "true", "false"):
        words = [f"model.path={path}", "train.global_batch=4", "train.micro_batch=1", *options]
        recipe = tiny_recipe(tmp_path, *words, f"parallel.reshard_after_forward={reshard}")
        plan = make_plan(recipe, 2, GPUS["h100"])
        units, *again = units_of(plan.spec.model_config.num_hidden_layers)
        gathers = units + {"default": again[0], "true": again[1], "false": 0}[reshard]
        (_, _, _, *gathered), (_, _, _, *reduced) = ClosedForms(plan).messages(plan.spec.sizes)[:2]
        traced = {kind: plan.step.traffic["fsdp", kind, 2, False] for kind in ("all-gather", "reduce-scatter")}
        assert gathered[0] == traced["all-gather"][0] == plan.spec.sizes.accumulation * gathers
        assert reduced[0] == traced["reduce-scatter"][0]
        assert gathered[1] == pytest.approx(traced["all-gather"][1], rel=0.02)  # shards are padded
        assert reduced[1] == pytest.approx(traced["reduce-scatter"][1], rel=0.02)


def test_a_teachers_likeliest_tokens_travel_over_tp(tmp_path):
    """Its k candidates of each rank, an id and a logit each, and the student's logits at the k that are chosen."""
    student, teacher = (write_model(tmp_path / name, "llama", tied=False) for name in ("student", "teacher"))
    words = [f"model.path={student}", f"distill.teacher={teacher}", "method=distill", "data.packing=false"]
    recipe = tiny_recipe(tmp_path, *words, "parallel.tp=2", "train.dtype=float32", "train.global_batch=2")

    def gathered(k):
        traffic = plan_step(resolve_plan(load_recipe(recipe, [f"distill.top_k={k}"]), 2, "cpu")).traffic
        assert ("fsdp", "all-gather", 2, False) not in traffic
        return traffic["tp", "all-gather", 2, False][1]

    tokens = 2 * (32 - 1)
    assert gathered(9) - gathered(5) == tokens * 4 * 2 * (2 * 4 + 4)
