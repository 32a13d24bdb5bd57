"""Weights out of a policy: a receiver in another process ends with the same bits; memory moves and comes back."""

import hashlib
import multiprocessing
import socket
import time
from multiprocessing.reduction import ForkingPickler

import pytest
import torch

from dtrain.base.batch import collate
from dtrain.base.errors import UserError
from dtrain.methods.sft import SftMethod
from dtrain.models.read_config import read_config
from dtrain.parallel.mesh import Runtime, build_mesh
from dtrain.policy import Policy, WeightReceiver, get_cpu_state_dict, unshard_fsdp2_model
from dtrain.policy.weights import split_into_buckets
from dtrain.recipe import derive_sizes
from tests.policy.test_policy import rows
from tests.stepping import train_step
from tests.tiny import tiny_recipe
from tests.world import fork, run_world


def policy_of(rank, recipe, world_size):
    derived = derive_sizes(recipe, world_size)
    runtime = Runtime(rank=rank, world_size=world_size)
    mesh = build_mesh(runtime, dp_shard=derived.dp_shard, cp=derived.cp, tp=derived.tp)
    policy = Policy(recipe, read_config(recipe.model.path), mesh, runtime)
    policy.init_optimizer(4)
    return policy


def digest(tensor):
    return hashlib.sha256(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def send(rank, recipe, world_size, port, dtype, bucket_bytes, at):
    """Sends the weights after a step, and gives what they are."""
    policy = policy_of(rank, recipe, world_size)
    train_step(policy, collate(rows(4)), SftMethod(recipe).loss)
    info = policy.weights.prepare_refit_info(dtype)
    if rank == 0:
        torch.save(info, at.with_suffix(".part"))
        at.with_suffix(".part").rename(at)
    policy.weights.init_collective("127.0.0.1", port, 2)
    policy.weights.broadcast_weights_for_collective(dtype, bucket_bytes)
    names = dict(policy.model.named_parameters())
    full = policy.weights.full_tensors(dtype)
    return {name: (digest(tensor), str(tensor.dtype)) for name, tensor in full if name in names}, len(info)


def receive(at, port, bucket_bytes, pipe):
    while not at.exists():
        time.sleep(0.01)
    info = torch.load(at)
    receiver = WeightReceiver("127.0.0.1", port, 1, 2)
    pipe.send({name: (digest(tensor), str(tensor.dtype)) for name, tensor in receiver.receive(info, bucket_bytes)})


@pytest.mark.parametrize(
    "world_size, tp, dtype, bucket_bytes",
    [(1, 1, torch.bfloat16, 1 << 28), (2, 2, None, 1), (4, 2, torch.float32, 5000)],
)
def test_the_receiver_has_the_same_bits(tmp_path, world_size, tp, dtype, bucket_bytes):
    recipe = tiny_recipe(tmp_path, "train.global_batch=4", "train.dtype=float32", f"parallel.tp={tp}", family="llama")
    port, at = free_port(), tmp_path / "info"
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = fork(receive, at, port, bucket_bytes, theirs)
    sent = run_world(send, world_size, recipe, world_size, port, dtype, bucket_bytes, at)
    assert ours.poll(60)
    got = ours.recv()
    process.join()
    expected, count = sent[0]
    assert got == expected and len(got) == count
    assert {kind for _, kind in got.values()} == {str(dtype or torch.float32)}
    assert "lm_head.weight" not in got  # tied: sent once


def test_buckets_hold_every_name_once_and_no_more_than_they_may():
    info = {name: (torch.Size([size]), torch.float32) for name, size in zip("abcdef", [3, 2, 9, 1, 1, 4], strict=True)}
    assert split_into_buckets(info, 20) == [["a", "b"], ["c"], ["d", "e"], ["f"]]
    assert split_into_buckets(info, 1) == [[name] for name in info]


def share(rank, recipe, pipe):
    policy = policy_of(rank, recipe, 1)
    expected = {name: digest(tensor) for name, tensor in policy.weights.full_tensors(torch.float32)}
    for names in policy.weights.prepare_weights_for_ipc(torch.float32, 5000):
        pipe.send_bytes(bytes(ForkingPickler.dumps(policy.weights.get_weights_ipc_handles(names))))
        assert pipe.recv() == {name: expected[name] for name in names}
    pipe.send_bytes(b"")
    return True


def rebuild(pipe):
    while message := pipe.recv_bytes():
        handles = ForkingPickler.loads(message)
        pipe.send({name: digest(function(*arguments)) for name, (function, arguments) in handles.items()})


def test_handles_open_in_another_process(tmp_path):
    recipe = tiny_recipe(tmp_path, "train.dtype=float32")
    ours, theirs = multiprocessing.Pipe()
    process = fork(rebuild, theirs)
    try:
        assert run_world(share, 1, recipe, ours) == [True]
    finally:
        process.kill()
        process.join()


def moved(rank, recipe, world_size):
    """Two steps, with everything moved away and back in between."""
    found = []
    for moves in (False, True):
        policy = policy_of(rank, recipe, world_size)
        batch = collate(rows(4 * world_size)[rank::world_size])
        first = train_step(policy, batch, SftMethod(recipe).loss)
        if moves:
            policy.offloader.offload_before_refit()
            policy.offloader.offload_after_refit()
            policy.offloader.prepare_for_lp_inference()
            assert not policy.model.training
            policy.logprobs(batch)
            policy.offloader.prepare_for_training()
            assert policy.model.training
        second = train_step(policy, batch, SftMethod(recipe).loss)
        found.append([first.loss, second.loss, second.grad_norm])
    assert policy.monitor.get_gpu_info()["device"] == "cpu"
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_was_offloaded_comes_back(tmp_path, world_size):
    recipe = tiny_recipe(tmp_path, "scheduler.warmup_steps=0")
    stayed, came_back = run_world(moved, world_size, recipe, world_size)[0]
    assert stayed == came_back


def saved_and_loaded(rank, recipe, world_size, at):
    policy = policy_of(rank, recipe, world_size)
    batch = collate(rows(4 * world_size)[rank::world_size])
    train_step(policy, batch, SftMethod(recipe).loss)
    policy.checkpoint.save_checkpoint(at / "weights", at / "optimizer", at / "tokenizer")
    with unshard_fsdp2_model(policy.model):
        whole = get_cpu_state_dict(state_generator=policy.model.named_parameters())
    assert all(policy.weights.prepare_refit_info()[name][0] == tensor.shape for name, tensor in whole.items())
    other = policy_of(rank, recipe, world_size)
    other.checkpoint.load_checkpoint(at / "weights", at / "optimizer")
    assert other.checkpoint.return_state_dict().keys() == policy.checkpoint.return_state_dict().keys()
    with pytest.raises(UserError, match="already"):
        policy.checkpoint.save_checkpoint(at / "weights")
    return [train_step(one, batch, SftMethod(recipe).loss).loss for one in (policy, policy, other, other)]


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_was_saved_is_loaded_and_goes_on(tmp_path, world_size):
    recipe = tiny_recipe(tmp_path, "scheduler.warmup_steps=0")
    for losses in run_world(saved_and_loaded, world_size, recipe, world_size, tmp_path):
        assert losses[:2] == losses[2:]
    assert (tmp_path / "tokenizer" / "tokenizer.json").is_file()
