"""GRPO with its rollouts from a server process: the run of the native engine, number for number; and a dead server."""

import json
import threading
from pathlib import Path

import pytest

from dtrain.base.errors import ServiceUnavailable, UserError
from tests.methods.comparing import assert_same_metrics, assert_same_samples
from tests.running import assert_same, interrupt, metrics, run
from tests.serve.serving import Process, ask, controlled, key_file, make_model, wait_until
from tests.tiny import tiny_grpo

FIXED = ("train.steps=6", "train.micro_batch=2", "grpo.sampling.temperature=0.8", "grpo.sampling.top_p=0.9")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    # Weights come from the folders of all tests.
    options = controlled(tmp_path_factory.getbasetemp())
    process = Process(make_model(tmp_path_factory.mktemp("servers"), 1), "--max-rows", "8", *options)
    yield process
    process.kill()


def over_http(root, server, *overrides, name, family="qwen3"):
    settings = ["grpo.engine=http", f"grpo.server.urls=[{server.url}]", "grpo.server.timeout=60"]
    settings += [f"grpo.server.api_key_file={key_file(root)}", *overrides]
    return tiny_grpo(root, *FIXED, *settings, family=family, name=name)


@pytest.mark.parametrize(
    "world_size, shape", [(1, ("grpo.server.weights=broadcast",)), (2, ("parallel.tp=2",)), (2, ())]
)
def test_a_run_over_a_server_is_the_run_of_the_native_engine(tmp_path, server, world_size, shape):
    native = tiny_grpo(tmp_path, *FIXED, name="native")
    served = over_http(tmp_path, server, *shape, name="served")
    run(native)
    run(served, world_size)
    assert_same(served, native, rtol=1e-9)
    samples = Path(served.run.dir) / "served" / "samples.jsonl"
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    assert [row.pop("version") for row in rows] == [row["step"] - 1 for row in rows]  # as many steps as went before
    samples.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert_same_samples(served, native)
    assert_same_metrics(served, native)


def test_rollouts_ahead_are_of_older_weights_within_bounds(tmp_path, server):
    recipe = over_http(tmp_path, server, "grpo.max_off_policy_steps=2", "grpo.server.weights=broadcast", name="ahead")
    run(recipe)
    rows = [row for row in metrics(recipe) if "loss" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert rows[0]["mismatch_kl"] == pytest.approx(0, abs=1e-9) and any(row["mismatch_kl"] > 1e-9 for row in rows[2:])
    assert ask(server.url, "/health")[1]["status"] == "ok"


def test_a_server_that_dies_ends_the_run_in_its_name_with_the_state_saved(tmp_path):
    process = Process(make_model(tmp_path, 1), "--max-rows", "8", *controlled(tmp_path))
    changes = ("grpo.server.retries=0", "grpo.server.timeout=5", "train.steps=100000", "checkpoint.every=100000")
    recipe = over_http(tmp_path, process, *changes, name="dead")
    file = Path(recipe.run.dir) / "dead" / "metrics.jsonl"

    def kill():
        wait_until(lambda: file.exists() and '"loss"' in file.read_text(), 300)
        process.kill()

    killing = threading.Thread(target=kill)
    killing.start()
    with pytest.raises(ServiceUnavailable, match=process.url):
        run(recipe)
    killing.join()
    last = [row["step"] for row in metrics(recipe) if "loss" in row][-1]
    assert (Path(recipe.run.dir) / "dead" / "checkpoints" / f"step-{last}").is_dir()


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    root = tmp_path_factory.mktemp("mixtures")
    process = Process(make_model(root, 1, family="qwen3-moe"), *controlled(tmp_path_factory.getbasetemp()))
    yield process
    process.kill()


REPLAY = ("grpo.router_replay=true", "moe.balance=0.1")


def test_replay_changes_nothing_where_server_and_trainer_have_the_same_weights(tmp_path, mixture):
    shape = ("train.global_batch=16", "train.steps=3", "moe.balance=0.1")
    native = tiny_grpo(tmp_path, *FIXED, *shape, family="qwen3-moe", name="native")
    served = over_http(tmp_path, mixture, *shape, *REPLAY, name="served", family="qwen3-moe")
    run(native)
    run(served)
    assert_same(served, native, rtol=1e-9)
    assert [row["router_replay_differs"] for row in metrics(served) if "loss" in row] == [0, 0, 0]


def test_a_replayed_run_resumes_within_a_rollout_on_another_mesh(tmp_path, mixture):
    """Two steps a rollout: at the second the trainer's router has moved away from the one that drew."""
    shape = (*REPLAY, "train.steps=4", "grpo.beta=0.1", "scheduler.warmup_steps=0", "checkpoint.every=20")
    whole = over_http(tmp_path, mixture, *shape, name="whole", family="qwen3-moe")
    run(whole)
    resumed = over_http(tmp_path, mixture, *shape, name="resumed", family="qwen3-moe")
    with pytest.raises((Exception, AssertionError), match="stopped after step"):
        interrupt(resumed, 1, 3)
    off = over_http(tmp_path, mixture, *shape, "grpo.router_replay=false", name="resumed", family="qwen3-moe")
    with pytest.raises(UserError, match=r"within a rollout(.|\n)*grpo.router_replay: true -> false"):
        run(off)
    run(over_http(tmp_path, mixture, *shape, "parallel.ep=2", name="resumed", family="qwen3-moe"), 2)
    assert_same_metrics(resumed, whole)
    differing = [row["router_replay_differs"] for row in metrics(whole) if "loss" in row]
    assert differing[::2] == [0, 0] and min(differing[1::2]) > 0.01


def test_a_server_that_tells_no_experts_is_refused_before_any_work(tmp_path, server):
    recipe = over_http(tmp_path, server, *REPLAY, name="dense", family="qwen3-moe")
    with pytest.raises(UserError, match=r"only a mixture of experts has any\). Servers must report routed experts"):
        run(recipe)
