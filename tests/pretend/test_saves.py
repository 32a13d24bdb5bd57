"""Saves from a card and what resumes from them, exports, and weights sent to a receiver."""

import hashlib
import multiprocessing

import torch
from safetensors.torch import load_file

from dtrain.base.batch import collate
from dtrain.methods.sft import SftMethod
from dtrain.models.read_config import read_config
from dtrain.parallel.mesh import build_mesh, init_one_process_group
from dtrain.policy import Policy, WeightReceiver
from dtrain.recipe import derive_sizes
from tests.policy.test_policy import rows
from tests.policy.test_weights import free_port
from tests.pretend.runs import runtime_of
from tests.pretend.test_sft import EXACT, assert_close, on_card, on_cpu
from tests.pretend.worlds import run_pretend
from tests.stepping import train_step
from tests.tiny import tiny_recipe
from tests.world import fork

SAVES = "checkpoint.every=2", "checkpoint.export=final"


def exported(recipe):
    return load_file(recipe.run.directory / "export" / "model.safetensors")


def test_a_run_is_saved_resumed_and_exported_as_on_the_cpu(tmp_path):
    whole = tiny_recipe(tmp_path, *SAVES, "train.steps=4", name="cpu")
    expected = on_cpu(whole)
    for size, mesh, background in ((1, (), "false"), (2, ("parallel.tp=2",), "true")):
        name, keys = f"card-{size}", (*SAVES, f"checkpoint.async_save={background}")
        # The schedule is of the whole run: the second half is another world's.
        begun = tiny_recipe(tmp_path, *keys, *mesh, "train.steps=4", name=name)
        on_card(tiny_recipe(tmp_path, *keys, *mesh, "train.steps=2", "checkpoint.export=none", name=name), size)
        rows_, _ = on_card(tiny_recipe(tmp_path, *keys, "train.steps=4", name=name), 3 - size)
        assert_close(rows_, expected, EXACT)
        for tensor, other in zip(exported(begun).values(), exported(whole).values(), strict=True):
            assert (tensor - other).abs().max() <= 1e-11 * other.abs().max()


def digests(named):
    return {name: hashlib.sha256(tensor.cpu().view(torch.uint8).numpy().tobytes()).digest() for name, tensor in named}


def received(info, port, pipe):
    receiver = WeightReceiver("127.0.0.1", port, 1, 2, device=torch.device("cuda", 0))
    pipe.send(digests(receiver.receive(info, 5000)))


def sent(rank, recipe):
    """Weights after a step, by a group over nccl, to a process that has a card too."""
    runtime = runtime_of(rank, 1)
    init_one_process_group("cuda")
    derived = derive_sizes(recipe, 1)
    mesh = build_mesh(runtime, dp_shard=derived.dp_shard, cp=derived.cp, tp=derived.tp)
    policy = Policy(recipe, read_config(recipe.model.path), mesh, runtime)
    policy.init_optimizer(4)
    info = policy.weights.prepare_refit_info(torch.bfloat16)
    port = free_port()
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = fork(received, info, port, theirs)  # before the backward, whose threads a fork does not take along
    train_step(policy, collate(rows(4)), SftMethod(recipe).loss)
    policy.weights.init_collective("127.0.0.1", port, 2)
    policy.weights.broadcast_weights_for_collective(torch.bfloat16, 5000)
    full = [(name, tensor) for name, tensor in policy.weights.full_tensors(torch.bfloat16) if name in info]
    assert all(tensor.is_cuda for _, tensor in full) and ours.poll(60)
    assert ours.recv() == digests(full)
    process.join()


def test_weights_reach_a_receiver_over_nccl(tmp_path):
    run_pretend(sent, 1, tiny_recipe(tmp_path, "train.global_batch=4", "train.dtype=float32", family="llama"))


def moved(rank, recipe, size):
    """Two steps, with everything moved to the host and back in between."""
    runtime = runtime_of(rank, size)
    found = []
    for moves in (False, True):
        policy = Policy(recipe, read_config(recipe.model.path), build_mesh(runtime, dp_shard=size), runtime)
        policy.init_optimizer(4)
        batch = collate(rows(4 * size)[rank::size])
        train_step(policy, batch, SftMethod(recipe).loss)
        if moves:
            policy.offloader.offload_before_refit()
            policy.offloader.offload_after_refit()
            assert not any(parameter.is_cuda for parameter in policy.model.parameters())
            policy.offloader.prepare_for_lp_inference()
            policy.logprobs(batch)
            policy.offloader.prepare_for_training()
        result = train_step(policy, batch, SftMethod(recipe).loss)
        found.append([result.loss, result.grad_norm])
    return found


def test_what_was_moved_to_the_host_comes_back(tmp_path):
    stayed, came_back = run_pretend(moved, 2, tiny_recipe(tmp_path, "scheduler.warmup_steps=0"), 2)[0]
    assert stayed == came_back
