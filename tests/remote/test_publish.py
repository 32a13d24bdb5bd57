"""Weights from a trainer's mesh to servers, by a directory and by a broadcast: the same bits; and rollouts ahead."""

import hashlib
import json
import threading
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from dtrain.base.batch import collate
from dtrain.base.errors import UserError
from dtrain.inference.request import Completion, Request, SamplingParams
from dtrain.methods.sft import SftMethod
from dtrain.policy.weights import WeightReceiver, flatten_bucket, join_weight_group
from dtrain.rl.remote.engine import RolloutPrefetcher
from dtrain.rl.remote.http import HttpEngine
from dtrain.rl.remote.publish import (
    MARKER,
    DirectoryPublisher,
    StreamPublisher,
    newest_complete_step,
    prune_steps,
    step_directory,
    write_marker,
)
from tests.policy.test_policy import rows
from tests.policy.test_weights import free_port, policy_of
from tests.remote.fakes import FakeVllm
from tests.serve.serving import Process, ask, controlled, events, key_file, make_model, naive, wait_until
from tests.stepping import train_step
from tests.tiny import tiny_recipe
from tests.world import run_world

LONG = {"prompt": [5, 6, 7], "max_tokens": 110, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.getbasetemp()  # weights come from the folders of all tests


@pytest.fixture(scope="module")
def model(root):
    return make_model(root, 1)


@pytest.fixture(scope="module")
def servers(model, root):
    both = [Process(model, "--max-rows", "4", *controlled(root), dtype="float32") for _ in range(2)]
    yield both
    for process in both:
        process.kill()


def sha256(tensor):
    return hashlib.sha256(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()


def trained(rank, recipe, world_size):
    policy = policy_of(rank, recipe, world_size)
    train_step(policy, collate(rows(4)), SftMethod(recipe).loss)
    return policy


def publish(rank, recipe, world_size, urls, how, versions, shared):
    """Trains a step before each version, and publishes it; what the weights then are, and what the servers have."""
    policy = policy_of(rank, recipe, world_size)
    key = key_file(Path(recipe.run.dir).parent)
    engine = HttpEngine(urls, timeout=60.0, start_timeout=10.0, api_key_file=key) if rank == 0 else None
    if how == "directory":
        publisher = DirectoryPublisher(shared, Path(recipe.model.path), engine)
    else:
        publisher = StreamPublisher(engine, bucket_bytes=5000, dtype=torch.float32)
    found = []
    for version in versions:
        train_step(policy, collate(rows(4)), SftMethod(recipe).loss)
        publisher.publish(policy.model if how == "directory" else policy.weights, version)
        ours = {name: sha256(tensor) for name, tensor in policy.weights.full_tensors(torch.float32)}
        if rank == 0:
            theirs = [ask(url, "/weight_checker", {"action": "checksum"})[1]["checksums"] for url in urls]
            health = [ask(url, "/health")[1] for url in urls]
            request = Request([5, 6], SamplingParams(max_new_tokens=3))
            found.append((ours, theirs, health, engine.generate([request] * 4)))
    if how != "directory":
        publisher.close()
    return found


@pytest.mark.parametrize("world_size, tp, how", [(2, 2, "directory"), (4, 2, "stream"), (1, 1, "stream")])
def test_servers_have_the_trainers_bits(root, servers, world_size, tp, how, tmp_path):
    recipe = tiny_recipe(tmp_path, "train.global_batch=4", "train.dtype=float32", f"parallel.tp={tp}")
    urls = [server.url for server in servers]
    shared = tmp_path / "shared"
    found = run_world(publish, world_size, recipe, world_size, urls, how, [3, 4, 5], shared)[0]
    assert len({json.dumps(ours) for ours, *_ in found}) == 3
    for version, (ours, theirs, health, completions) in zip([3, 4, 5], found, strict=True):
        assert all(checksums == ours for checksums in theirs) and len(ours) > 10
        assert [one["weight_version"] for one in health] == [version, version]
        assert [one["status"] for one in health] == ["ok", "ok"]
        assert [completion.version for completion in completions] == [version] * 4
    if how == "directory":
        assert sorted(path.name for path in shared.iterdir()) == ["step-4", "step-5"]


def publish_and_fail(rank, recipe, urls):
    policy = trained(rank, recipe, 2)
    key = key_file(Path(recipe.run.dir).parent)
    engine = HttpEngine(urls, timeout=5.0, start_timeout=10.0, retries=0, api_key_file=key) if rank == 0 else None
    told = []
    for publisher in (
        StreamPublisher(engine),
        DirectoryPublisher(Path(recipe.run.dir) / "w", Path(recipe.model.path), engine),
    ):
        try:
            publisher.publish(policy.weights if isinstance(publisher, StreamPublisher) else policy.model, 1)
        except UserError as error:
            told.append(str(error))
    return told


def test_every_rank_is_told_where_no_server_takes_the_weights(tmp_path, servers):
    """A server of another model refuses before a group waits for it."""
    recipe = tiny_recipe(tmp_path, "train.global_batch=4", "train.dtype=float32", family="llama")
    url = servers[0].url
    version = ask(url, "/health")[1]["weight_version"]
    told = run_world(publish_and_fail, 2, recipe, [url])
    assert told[0] == told[1] and len(told[0]) == 2
    assert "q_proj.weight is [32, 32], the model has [64, 32]" in told[0][0]
    assert "no server loaded version 1" in told[0][1] and "do not fit" in told[0][1]
    health = {"status": "ok", "weight_version": version, "running": 0, "waiting": 0}
    assert ask(url, "/health")[1] == health


def test_vllm_takes_no_stream():
    fake = FakeVllm()
    try:
        with pytest.raises(UserError, match="or set grpo.server.weights=directory"):
            StreamPublisher(HttpEngine([fake.url]))
    finally:
        fake.close()


def paused_under_way(url, count, talk, mode="keep"):
    """`talk()` in a thread, paused before all of its `count` completions are done; the thread and where its result
    comes."""
    for _ in range(20):
        got = []
        thread = threading.Thread(target=lambda got=got: got.append(talk()))
        thread.start()
        wait_until(lambda thread=thread: not thread.is_alive() or ask(url, "/health")[1]["running"] == count)
        is_early = ask(url, "/health")[1]["running"] == count
        ask(url, "/pause", {"mode": mode})
        if is_early and (mode != "keep" or ask(url, "/health")[1]["running"] == count):
            return thread, got
        ask(url, "/resume", {})
        thread.join()
    raise AssertionError("completions are done before a pause comes")


def test_completions_under_way_go_on_and_say_their_oldest_version(root, servers, model):
    """Weights change between two tokens: what was begun keeps its first version, what comes after has the next, and is
    what the new weights alone give though the prompt is the same."""
    other = make_model(root, 2, "other")
    write_marker(other)
    url = servers[0].url
    back = root / "model"
    write_marker(back)
    assert ask(url, "/update_weights_from_disk", {"model_path": str(back), "weight_version": 50})[0] == 200
    before, _ = naive(back, LONG["prompt"], 110, stop_ids=())
    after, _ = naive(other, LONG["prompt"], 110, stop_ids=())
    thread, streamed = paused_under_way(url, 1, lambda: events(url, "/v1/completions", LONG)[0])
    assert ask(url, "/health")[1]["status"] == "paused"
    waits = ask(url, "/update_weights_from_disk", {"model_path": str(other), "weight_version": 51, "mode": "wait"})
    assert waits[0] == 409
    assert ask(url, "/update_weights_from_disk", {"model_path": str(other), "weight_version": 51})[0] == 200
    fresh = []
    second = threading.Thread(target=lambda: fresh.append(ask(url, "/v1/completions", LONG)[1]["choices"][0]))
    second.start()
    ask(url, "/resume", {})
    thread.join()
    second.join()
    choices = [event["choices"][0] for event in streamed[0]]
    ids = sum((choice["token_ids"] for choice in choices), [])
    assert {choice["weight_version"] for choice in choices} == {50} and len(ids) == 110
    assert ids[0] == before[0] and ids != before
    assert fresh[0]["weight_version"] == 51 and fresh[0]["token_ids"][:20] == after[:20]


@pytest.mark.parametrize("mode, status", [("abort", 503), ("wait", 200)])
def test_abort_and_wait(servers, mode, status):
    url = servers[1].url
    two = {**LONG, "n": 2}
    thread, got = paused_under_way(url, 2, lambda: ask(url, "/v1/completions", two), mode)
    assert ask(url, "/health")[1]["running"] == 0
    ask(url, "/resume", {})
    thread.join()
    assert got[0][0] == status


@pytest.mark.trap(
    "a cache is cleared while half of the weights are new",
    "huggingface/trl PR#6765",
    "answers of two models in one",
    "nothing is decoded until an update is whole",
)
def test_half_an_update_decodes_nothing_until_a_whole_one(servers, root, model):
    """The sender is gone after a bucket: health says so, and a whole directory mends it."""
    url, port = servers[1].url, free_port()
    meeting = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2, "group_name": "g"}
    joined = []
    thread = threading.Thread(target=lambda: joined.append(ask(url, "/init_weights_update_group", meeting)))
    thread.start()
    group = join_weight_group("127.0.0.1", port, 0, 2, torch.device("cpu"), name="g")
    thread.join()
    assert joined[0][0] == 200
    bucket = {"names": ["model.norm.weight"], "dtypes": ["float32"], "shapes": [[32]], "group_name": "g"}
    received = []
    thread = threading.Thread(target=lambda: received.append(ask(url, "/update_weights_from_distributed", bucket)))
    thread.start()
    group.broadcast(flatten_bucket([torch.full((32,), 2.0)]), 0).wait()
    thread.join()
    assert received[0][0] == 200
    status, answer = ask(url, "/health")
    assert status == 503 and "did not end" in answer["error"]["message"]
    assert ask(url, "/resume", {})[0] == 409
    write_marker(model)
    assert ask(url, "/update_weights_from_disk", {"model_path": str(model), "weight_version": 60})[0] == 200
    assert ask(url, "/health")[1]["weight_version"] == 60
    ids = ask(url, "/v1/completions", {**LONG, "max_tokens": 5})[1]["choices"][0]["token_ids"]
    assert ids == naive(model, LONG["prompt"], 5, stop_ids=())[0]


def joins_as_sglang(rank, port, shapes):
    """Rank 0 sends as dtrain does; rank 1 joins by torch's own functions in the order that SGLang calls them."""
    if rank == 0:
        group = join_weight_group("127.0.0.1", port, 0, 2, torch.device("cpu"), name="weight_update_group")
        message = flatten_bucket([torch.arange(size, dtype=torch.float32) for size in shapes])
        group.broadcast(message, 0).wait()
        return message.tolist()
    from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, rendezvous

    store, _, _ = next(rendezvous(f"tcp://127.0.0.1:{port}", 1, 2))
    store = PrefixStore("weight_update_group", store)
    group, _ = _new_process_group_helper(
        2, 1, [], Backend("gloo"), store, group_name="weight_update_group", timeout=timedelta(seconds=30)
    )
    message = torch.empty(sum(shapes) * 4, dtype=torch.uint8)
    dist.distributed_c10d._world.pg_group_ranks[group] = {0: 0, 1: 1}
    dist.broadcast(message, src=0, group=group)
    return message.tolist()


def test_the_group_is_the_one_that_sglang_joins():
    sent, received = run_world(joins_as_sglang, 2, free_port(), [3, 5])
    assert sent == received and len(sent) == 32


@pytest.mark.slow
def test_a_receiver_that_nobody_meets_gives_up():
    with pytest.raises(RuntimeError):
        WeightReceiver("127.0.0.1", free_port(), 1, 2, wait=timedelta(seconds=1))


def test_directories_are_whole_once_marked_and_old_ones_go(tmp_path):
    assert newest_complete_step(tmp_path) is None
    for version in (0, 3, 20, 100):
        step_directory(tmp_path, version).mkdir()
        if version != 100:
            write_marker(step_directory(tmp_path, version))
    assert newest_complete_step(tmp_path) == (20, tmp_path / "step-20")
    write_marker(step_directory(tmp_path, 4 if (tmp_path / "step-4").mkdir() is None else 4))
    prune_steps(tmp_path, 4, 2)  # a run that was resumed from step 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-100", "step-3", "step-4"]
    assert (tmp_path / "step-3" / MARKER).exists()


def answering(*versions):
    """An engine whose calls give the next of `versions` each; lists what it was asked."""
    asked, left = [], list(versions)

    def generate(requests, should_stop=None):
        asked.append([request.prompt_index for request in requests])
        return [Completion([1], [0.0], "stop", version) for version in left.pop(0)]

    return SimpleNamespace(generate=generate, asked=asked)


REQUESTS = [Request([5], SamplingParams(max_new_tokens=1), prompt_index=index) for index in range(3)]


def test_what_is_too_old_is_drawn_again():
    engine = answering([4, 2, 3], [5])
    prefetcher = RolloutPrefetcher(engine, 2)
    prefetcher.start(REQUESTS, 4)
    assert prefetcher.is_running
    completions = prefetcher.result(5)
    assert [completion.version for completion in completions] == [4, 5, 3]
    assert engine.asked == [[0, 1, 2], [1]]
    assert not prefetcher.is_running


def test_versions_that_no_server_tells_are_those_of_the_start():
    prefetcher = RolloutPrefetcher(answering([None, None, 7]), 0)
    prefetcher.start(REQUESTS, 7)
    assert [completion.version for completion in prefetcher.result(7)] == [7, 7, 7]


def test_servers_that_stay_behind_are_an_error():
    prefetcher = RolloutPrefetcher(answering([1, 1, 1], [1, 1, 1]), 1)
    prefetcher.start(REQUESTS, 1)
    with pytest.raises(UserError, match="version 1 of the weights, but the trainer has version 3"):
        prefetcher.result(3)


def test_an_error_in_the_thread_is_raised_where_it_is_taken():
    def generate(requests, should_stop=None):
        raise UserError("no server returned completions")

    prefetcher = RolloutPrefetcher(SimpleNamespace(generate=generate), 1)
    prefetcher.start(REQUESTS, 0)
    with pytest.raises(UserError, match="no server returned"):
        prefetcher.result(0)
    assert not prefetcher.is_running
    with pytest.raises(ValueError, match="start one first"):
        prefetcher.result(0)
    prefetcher.close()


@pytest.mark.slow
def test_it_draws_while_the_trainer_trains():
    begun, go_on = threading.Event(), threading.Event()

    def generate(requests, should_stop=None):
        begun.set()
        assert go_on.wait(10)
        return [Completion([1], [0.0], "stop", 0) for _ in requests]

    prefetcher = RolloutPrefetcher(SimpleNamespace(generate=generate), 1)
    prefetcher.start(REQUESTS, 0)
    assert begun.wait(10)  # and this thread is free
    go_on.set()
    assert len(prefetcher.result(1)) == 3
