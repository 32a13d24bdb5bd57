"""Experts over ranks: one process against ep, with tp, cp and copies, and what they send."""

import re
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from dtrain import models
from dtrain.models.common.config import ExpertsConfig, RouterSettings
from dtrain.models.common.moe import SparseMLP, connect_routing
from dtrain.parallel.experts import shard_experts
from dtrain.parallel.mesh import Runtime
from dtrain.parallel.placement import local_slices, local_tensor
from dtrain.policy import Packed
from dtrain.policy.batching import all_reduce
from dtrain.training.trainer import Trainer
from tests.cases import run_cases
from tests.models.oracle import VARIANTS
from tests.problem_lines import preflight
from tests.running import assert_parity, assert_same, assert_same_rows, metrics, run, run_all, trajectory, weights
from tests.stepping import train_step
from tests.tiny import save_weights, tiny_grpo, tiny_recipe, write_model
from tests.world import run_world

SIZES = ExpertsConfig(
    num_experts=6, top_k=2, intermediate_size=5, router=RouterSettings(is_normalized=True), layers=(0,)
)


class Sent(TorchDispatchMode):
    """The collectives that run inside, by name."""

    def __init__(self):
        super().__init__()
        self.names = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("_c10d_functional", "c10d") and "wait" not in str(func):
            self.names[func._schema.name.split("::")[1]] += 1
        return func(*args, **(kwargs or {}))


def sparse_mlp():
    config = models.parse_config(VARIANTS["qwen3-moe"]().to_dict())
    mlp = SparseMLP(config, SIZES).double()
    connect_routing(mlp, SIZES.num_experts)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in mlp.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
        mlp.gate.weight[:3, 0] += 5.0 * torch.tensor([1, 2, 3])  # the first rank's experts are the fuller ones
    return mlp


def rows_of(rank):
    """Rank 1 has no token."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(1, (9, 0, 4)[rank], 48, generator=generator, dtype=torch.float64).requires_grad_()


def of_rank(rank, size):
    mlp, x = sparse_mlp(), rows_of(rank)
    shard_experts(mlp, init_device_mesh("cpu", (size,), mesh_dim_names=("ep",)), init_device_mesh("cpu", (1,)))
    with Sent() as forward:
        out = mlp(x)
    with Sent() as backward:
        out.square().sum().backward()
    dist.all_reduce(mlp.gate.weight.grad)
    whole = sparse_mlp()
    parts = [rows_of(one) for one in range(size)]
    expected = [whole(one) for one in parts]
    sum(one.square().sum() for one in expected).backward()

    def far(mine, other):
        return float((mine - other).abs().max() / other.abs().max()) if mine.numel() else 0.0

    distances = {"values": far(out, expected[rank]), "input": far(x.grad, parts[rank].grad)}
    for (name, parameter), other in zip(mlp.named_parameters(), whole.parameters(), strict=True):
        of_whole = other.grad[local_slices(parameter)]
        distances[name] = far(local_tensor(parameter.grad), of_whole) if of_whole.any() else 0.0
    return distances, dict(forward.names), dict(backward.names)


def test_uneven_tokens_reach_their_experts_and_come_back_by_three_messages_and_two():
    for distances, forward, backward in run_world(of_rank, 3, 3):
        assert max(distances.values()) < 1e-13, distances
        assert forward == {"all_to_all_single": 3} and backward == {"all_to_all_single": 2}


# name: (ranks, packing, overrides)
MESHES = {
    "dp2 ep2 tp2 not sp": (4, "true", ["parallel.ep=2", "parallel.tp=2", "parallel.sequence_parallel=false"]),
    "dp_replicate2 dp2 ep2": (4, "false", ["parallel.dp_replicate=2", "parallel.ep=2"]),
    "dp6 ep2": (6, "true", ["parallel.ep=2"]),
    "cp2 tp2 ep2": (4, "false", ["parallel.cp=2", "parallel.tp=2", "parallel.ep=2", "parallel.cp_rotate=ring"]),
}


def recipe_of(root, name, ranks, options, packing, family="qwen3-moe"):
    sizes = dict(option.removeprefix("parallel.").split("=") for option in options)
    dp = ranks // int(sizes.get("tp", 1)) // int(sizes.get("cp", 1))
    micro = 12 if ranks == 1 else 12 // (2 * dp)
    shape = ["train.global_batch=12", f"train.micro_batch={micro}", "checkpoint.every=1", f"data.packing={packing}"]
    more = ["train.steps=2", "scheduler.warmup_steps=0", "moe.balance=0.5", *options]
    return tiny_recipe(root, *shape, *more, family=family, tied=False, name=name)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    root = tmp_path_factory.mktemp("experts")
    return root, {way: run(recipe_of(root, f"one-{way}", 1, [], way)) for way in ("true", "false")}


@pytest.mark.trap(
    "the norm lacks experts under expert and tensor parallel together",
    "NVIDIA/Megatron-LM PR#5916",
    "clipping clips too little",
    "norms and weights of one process on every mesh",
)
@pytest.mark.parametrize("ranks", sorted({mesh[0] for mesh in MESHES.values()}))
def test_every_mesh_trains_as_one_process(ranks, one_process):
    """Norms too, of which ep with tp lost some experts' in Megatron PR #5916."""
    root, references = one_process
    chosen = {name: (packing, options) for name, (size, packing, options) in MESHES.items() if size == ranks}
    recipes = [recipe_of(root, name, ranks, options, packing) for name, (packing, options) in chosen.items()]
    for recipe, (packing, _) in zip(run_all(recipes, ranks), chosen.values(), strict=True):
        assert_parity(recipe, trajectory(references[packing]), weights(references[packing]))


@pytest.mark.trap(
    "every rank has rank 0's experts after loading",
    "huggingface/transformers PR#45662",
    "a router over experts that are not there",
    "each rank reads its own",
)
def test_other_families_read_their_files_and_train_as_one_process(tmp_path):
    def recipe(name, family, ranks, *mesh):
        return recipe_of(tmp_path, name, ranks, [*mesh, "model.init=pretrained"], "true", family)

    families = ("qwen3.5-moe", "gemma4-moe", "gpt-oss", "deepseek-v3")
    for family in families:
        save_weights(write_model(tmp_path / f"{family}-untied", family, tied=False))
    alone = run_all([recipe(f"{family}, alone", family, 1) for family in families])
    # The first has an expert that all ranks share.
    on_mesh = [run(recipe(families[0], families[0], 4, "parallel.ep=2", "parallel.tp=2"), 4)]
    on_mesh += run_all([recipe(family, family, 2, "parallel.ep=2") for family in families[1:]], 2)
    for found, reference in zip(on_mesh, alone, strict=True):
        assert_parity(found, trajectory(reference), weights(reference))


def test_a_teacher_without_experts_lies_beside_a_student_over_ep(tmp_path):
    teacher = save_weights(write_model(tmp_path / "teacher", "llama", tied=False))
    shape = ["method=distill", f"distill.teacher={teacher}"]
    one = run(recipe_of(tmp_path, "one", 1, shape, "true"))
    options = [*shape, "parallel.ep=2"]
    two = recipe_of(tmp_path, "two", 2, options, "true")
    assert preflight(two, 2) == []
    assert_same(run(two, 2), one, rtol=1e-9)


def test_a_run_goes_on_with_another_ep(one_process):
    root, references = one_process
    whole = Path(references["true"].run.dir) / "one-true/checkpoints/step-1"
    ours = run(recipe_of(root, "resumed", 4, ["parallel.ep=4", f"checkpoint.resume={whole}"], "true"), 4)
    assert_same_rows(trajectory(ours), trajectory(references["true"])[1:], 1e-9, 1e-9, "resumed")


def test_grpo_routes_alike_in_rollouts_and_in_training(tmp_path):
    shape = ["train.steps=3", "train.micro_batch=4"]  # the third is of completions that were drawn after an update
    one = run(tiny_grpo(tmp_path, *shape, family="qwen3-moe", name="one"))
    options = [*shape, "parallel.ep=2", "parallel.tp=2"]
    assert_same(run(tiny_grpo(tmp_path, *options, family="qwen3-moe", name="four"), 4), one, rtol=1e-9)


def gradients_on_rank(rank, recipe, world_size):
    """Return this rank's part of the gradients of each step, with its place: [(name, slices, gradient)]. Memory that
    nobody has written is NaN."""
    torch.use_deterministic_algorithms(True)
    found = []
    with ExitStack() as stack:
        trainer = Trainer.open(recipe, Runtime(rank=rank, local_rank=rank, world_size=world_size), stack)
        named = dict(trainer.policy.model.named_parameters())

        def keep(*_):
            found.append([(name, local_slices(p), local_tensor(p.grad).numpy().copy()) for name, p in named.items()])

        trainer.policy.optimizer.register_step_pre_hook(keep)
        trainer.loop(trainer.resume())
    return found


def log_likelihood(source, batch, global_seqs, global_tokens):
    return -source.weighted_sum() / global_tokens, {}


def replayed_on_rank(rank, recipe, world_size, batching):
    """Two steps on rows whose tokens go to other experts than their router's, but for the last ones: what each says,
    and then the rows' logprobs [6, 20], with the experts and by the router."""
    draw = torch.Generator().manual_seed(3)
    lengths = torch.tensor([20, 7, 13, 4, 16, 9])
    routed = torch.rand(6, 20, 2, 8, generator=draw).argsort(-1)[..., :3].to(torch.int16)
    routed[torch.arange(6), lengths - 1] = -1
    whole = {
        "input_ids": torch.randint(0, 67, (6, 20), generator=draw),
        "input_lengths": lengths,
        "routed_experts": routed,
    }
    with ExitStack() as stack:
        policy = Trainer.open(recipe, Runtime(rank=rank, local_rank=rank, world_size=world_size), stack).policy
        mine = torch.arange(policy.mesh.dp_rank, 6, policy.mesh.dp_size)
        batch = {name: tensor[mine] for name, tensor in whole.items()}
        said = []
        for _ in range(2):
            found = train_step(policy, batch, log_likelihood, batching)
            said += [found.loss, found.grad_norm]
            said += [*found.result.routing_metrics.values()]
        logprobs = torch.zeros(2, 6, 20, dtype=torch.float64)
        logprobs[0, mine] = policy.logprobs(batch, batching)
        policy.init_reference_model()
        with policy.use_reference_model():
            logprobs[1, mine] = policy.logprobs(batch, batching)
        all_reduce(logprobs, policy.mesh.dp)
        del batch["routed_experts"]
        with policy.use_reference_model():
            alone = policy.logprobs(batch, batching)
        assert torch.equal(alone.double(), logprobs[1, mine])
        return said, logprobs.numpy()


REPLAYS = {
    "tp2": ["parallel.tp=2", "train.activation_checkpointing=full"],
    "cp2 ring ep2": ["parallel.cp=2", "parallel.ep=2", "parallel.cp_rotate=ring"],
    "dp_replicate2": ["parallel.dp_replicate=2"],
}


def test_experts_that_are_replayed_are_the_same_on_every_mesh(tmp_path):
    ((said, logprobs),) = run_world(replayed_on_rank, 1, recipe_of(tmp_path, "one", 1, [], "false"), 1, 2)
    assert abs(logprobs[0] - logprobs[1]).max() > 0.01 and 0.3 < said[4] < 1  # the share that differs
    cases = {}
    for mesh, options in REPLAYS.items():
        batching = Packed(24) if "cp" in mesh else 2
        cases[mesh] = recipe_of(tmp_path, mesh, 2, options, "false"), 2, batching
    for mesh, ranks in run_cases(replayed_on_rank, 2, cases).items():
        for found, values in ranks:
            assert found == pytest.approx(said, rel=1e-9), mesh
            assert abs(values - logprobs).max() < 1e-9 * abs(logprobs).max(), mesh


# What others had wrong, and whose gradients show it.
REGRESSIONS = {
    "pytorch #160285: experts' gradients are ep times too large": r".*\.experts\..*",
    "transformers #48687, Automodel #2995: the router sees only what this rank's experts say": r".*\.mlp\.gate\..*",
    "transformers #48205: other ranks' part of what lies before is lost, and rows that nobody wrote are read": r".*",
}


@pytest.mark.trap(
    "experts' gradients ep times too large",
    "pytorch/pytorch #160285",
    "experts learn at another rate",
    "the gradients of one process",
)
@pytest.mark.trap(
    "the router's gradient is of its own rank's experts alone",
    "huggingface/transformers #48687",
    "routing learns from a part of the batch",
    "the gradients of one process",
)
@pytest.mark.trap(
    "rows of a grouped product that nobody wrote are read",
    "huggingface/transformers PR#48205",
    "NaN from the second step on",
    "the gradients of one process, all finite",
)
def test_gradients_are_whole_where_others_lost_parts(tmp_path):
    """Clipped, so each has the whole norm in it (Automodel #3817); an expert without a token has one too (#2995)."""
    write_model(tmp_path / "qwen3-moe-tied", "qwen3-moe", num_experts=32)
    few = ["train.global_batch=4", "train.steps=2", "data.packing=false", "train.max_grad_norm=0.05"]
    shapes = {1: ["train.micro_batch=4"], 4: ["train.micro_batch=1", "parallel.ep=4"]}
    recipes = {n: tiny_recipe(tmp_path, *few, *more, family="qwen3-moe", name=f"{n}") for n, more in shapes.items()}
    (one,) = run_world(gradients_on_rank, 1, recipes[1], 1)
    ranks = run_world(gradients_on_rank, 4, recipes[4], 4)
    assert any(row["moe_idle"] > 0 for row in metrics(recipes[1]))
    for pattern in REGRESSIONS.values():
        for step, whole in enumerate(one):
            expected = {name: grad for name, _, grad in whole if re.fullmatch(pattern, name)}
            assert expected and all(np.isfinite(grad).all() for grad in expected.values())
            for parts in ranks:
                mine = {name: (place, grad) for name, place, grad in parts[step]}
                for name, grad in expected.items():
                    place, part = mine[name]
                    far = np.abs(part - grad[place]).max(initial=0)
                    assert far <= 1e-9 * np.abs(grad).max(), (name, step)
