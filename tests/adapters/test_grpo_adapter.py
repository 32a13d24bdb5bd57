"""GRPO with an adapter: the native engine on meshes, and a `dtrain serve` that gets the adapter alone, or merged."""

import json
from pathlib import Path

import pytest

from tests.adapters.test_servers import ADAPTERS
from tests.methods.comparing import assert_same_metrics, assert_same_samples
from tests.running import assert_same, metrics, run
from tests.serve.serving import Process, ask, controlled, key_file, make_model
from tests.tiny import tiny_grpo

FIXED = ("train.steps=5", "train.micro_batch=4", "grpo.sampling.temperature=0.8", "optimizer.lr=0.05")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("base"), 1)


@pytest.fixture(scope="module")
def servers(tmp_path_factory, base):
    """One that keeps its base, and one that gets whole weights."""
    options = "--max-rows", "8", *controlled(tmp_path_factory.getbasetemp())
    both = [Process(base, *options) for _ in range(2)]
    yield both
    for process in both:
        process.kill()


@pytest.fixture(scope="module")
def server(servers):
    return servers[0]


def recipe_of(root, base, adapter, *overrides, name):
    fixed = ["model.init=pretrained", ADAPTERS[adapter], *FIXED, *overrides]
    recipe = tiny_grpo(root, *fixed, name=name)
    recipe.model.path = str(base)
    return recipe


def over_http(root, base, server, adapter, *overrides, name):
    settings = ["grpo.engine=http", f"grpo.server.urls=[{server.url}]", "grpo.server.timeout=60"]
    return recipe_of(
        root, base, adapter, *settings, f"grpo.server.api_key_file={key_file(root)}", *overrides, name=name
    )


@pytest.fixture(scope="module")
def native(tmp_path_factory, base):
    """The run of the native engine in one process, each adapter's once."""
    root, done = tmp_path_factory.mktemp("native"), {}

    def of(adapter):
        if adapter not in done:
            done[adapter] = recipe_of(root, base, adapter, name=f"native-{adapter}")
            run(done[adapter])
        return done[adapter]

    return of


def assert_same_run(recipe, wanted):
    """To 1e-9 in everything that a step reports; the same completions; no gap between who draws and who trains."""
    assert_same(recipe, wanted, rtol=1e-9)
    assert_same_metrics(recipe, wanted)
    rows = [row for row in metrics(recipe) if "loss" in row]
    assert len(rows) == 5 and len({row["reward_mean"] for row in rows}) > 1
    assert all(abs(row["mismatch_kl"]) < 1e-9 for row in rows)


def test_the_native_engine_draws_with_the_adapter_on_a_mesh(tmp_path, base, native):
    recipe = run(recipe_of(tmp_path, base, "lora", "parallel.tp=2", name="mesh"), 2)
    assert_same_run(recipe, native("lora"))
    assert_same_samples(recipe, native("lora"))


@pytest.mark.parametrize(
    "world_size, adapter, options, told",
    [
        (2, "rslora", ["parallel.tp=2"], "only the adapter"),
        (2, "dora", ["parallel.tp=2", "grpo.server.weights=broadcast"], None),
        (1, "saved", [], "merged weights instead of the adapter: no server accepts modules that are trained next to"),
    ],
)
def test_a_run_over_a_server_is_the_run_of_the_native_engine(
    tmp_path, base, servers, native, capfd, world_size, adapter, options, told
):
    wanted, server = native(adapter), servers[told != "only the adapter"]
    capfd.readouterr()
    recipe = over_http(tmp_path, base, server, adapter, *options, name="served")
    run(recipe, world_size)
    samples = Path(recipe.run.dir) / "served" / "samples.jsonl"
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    assert [row.pop("version") for row in rows] == [row["step"] - 1 for row in rows]  # as many steps as went before
    samples.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert_same_samples(recipe, wanted)
    assert_same_run(recipe, wanted)
    log = "".join(capfd.readouterr())
    assert told is None or told in log
    if told == "only the adapter":
        kept = list((Path(recipe.run.dir) / "served" / "weights").iterdir())
        assert len(kept) == 2 and all((one / "adapter_config.json").exists() for one in kept)
        assert ask(server.url, "/v1/models")[1]["data"][1]["id"] == "trained"
        ask(server.url, "/v1/unload_lora_adapter", {"lora_name": "trained"})


def test_servers_get_whole_weights_where_no_files_hold_the_base(tmp_path, base, servers, capfd):
    """Whole weights of another run began this one, and are in none of its files: fresh, and when it goes on."""
    elsewhere = recipe_of(
        tmp_path, base, "lora", "train.steps=2", "checkpoint.every=2", "model.init=scratch", name="one"
    )
    elsewhere.lora = None
    run(elsewhere)
    start = f"checkpoint.init_from={elsewhere.run.directory}"
    for steps in (2, 4):
        options = [start, f"train.steps={steps}", "checkpoint.every=2", "checkpoint.resume=auto"]
        recipe = over_http(tmp_path, base, servers[1], "lora", *options, name="two")
        run(recipe)
        assert "merged weights instead of the adapter: only this run's checkpoints contain its base" in "".join(
            capfd.readouterr()
        )
    rows = [row for row in metrics(recipe) if "loss" in row]
    assert len(rows) == 4 and all(abs(row["mismatch_kl"]) < 1e-9 for row in rows)


def test_a_name_a_version_draws_with_the_weights_of_now(tmp_path, base, server):
    """As vLLM is asked, whose draws are its own: the logprobs are the trainer's at every step."""
    recipe = over_http(tmp_path, base, server, "rslora", "grpo.server.kind=vllm", name="named")
    run(recipe)
    rows = [row for row in metrics(recipe) if "loss" in row]
    assert len(rows) == 5 and all(abs(row["mismatch_kl"]) < 1e-9 for row in rows)
    left = ask(server.url, "/v1/models")[1]["data"][1:]
    assert [card["id"].rpartition("-")[2] for card in left] == ["4"]  # of the last rollout
    assert ask(server.url, "/v1/unload_lora_adapter", {"lora_name": left[0]["id"]})[0] == 200


def test_rollouts_ahead_are_of_older_adapters_within_bounds(tmp_path, base, server):
    options = ["grpo.max_off_policy_steps=2", "grpo.server.weights=adapter"]
    recipe = over_http(tmp_path, base, server, "lora", *options, name="ahead")
    run(recipe)
    rows = [row for row in metrics(recipe) if "loss" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert rows[0]["mismatch_kl"] == pytest.approx(0, abs=1e-9) and any(row["mismatch_kl"] > 1e-9 for row in rows[2:])
    assert ask(server.url, "/v1/unload_lora_adapter", {"lora_name": "trained"})[0] == 200
