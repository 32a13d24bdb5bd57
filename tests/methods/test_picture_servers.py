"""GRPO on rows with images whose rollouts servers draw: the run of the native engine; and servers unlike it."""

import json
import shutil
from pathlib import Path

import pytest

from dtrain.base.errors import ServiceUnavailable, UserError
from tests.methods.comparing import assert_same_metrics, assert_same_samples
from tests.methods.test_picture_methods import grpo
from tests.pictures import write_model
from tests.running import assert_same, metrics, run, run_directory
from tests.serve.serving import Process, controlled, key_file, make_model, serving

# Images of 576 pixels are bounded further, which the server has to be told.
BOUNDED = ("data.image_max_pixels=256", "grpo.sampling.temperature=0.8", "grpo.sampling.top_p=0.9")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("pictures") / "qwen3-vl")


@pytest.fixture(scope="module")
def server(tmp_path_factory, model):
    process = Process(model, "--max-rows", "8", *controlled(tmp_path_factory.getbasetemp()))
    yield process
    process.kill()


def over_http(root, url, *overrides, name):
    settings = ["grpo.engine=http", f"grpo.server.urls=[{url}]", "grpo.server.timeout=60", "grpo.server.retries=0"]
    return grpo(root, *settings, f"grpo.server.api_key_file={key_file(root)}", *overrides, name=name)


@pytest.fixture(scope="module")
def native(model):
    return run(grpo(model.parent, f"model.path={model}", *BOUNDED, name="native"))


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("world_size, shape", [(1, "grpo.server.weights=broadcast"), (2, "parallel.tp=2")])
def test_a_run_over_a_server_is_the_run_of_the_native_engine(model, server, native, world_size, shape):
    served = over_http(model.parent, server.url, f"model.path={model}", *BOUNDED, shape, name=f"served-{world_size}")
    run(served, world_size)
    assert_same(served, native, rtol=1e-9)
    samples = run_directory(served) / "samples.jsonl"
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    assert {row.pop("version") for row in rows} == {0, 2}
    samples.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert_same_samples(served, native)
    assert_same_metrics(served, native)


@pytest.mark.slow
def test_rollouts_with_images_are_drawn_ahead(tmp_path, model):
    ahead = ("grpo.max_off_policy_steps=4", "train.steps=5", "grpo.server.weights=broadcast")
    with serving(model, key="secret", control=tmp_path) as (url, _):
        recipe = over_http(tmp_path, url, f"model.path={model}", *ahead, name="ahead")
        run(recipe)
    rows = [json.loads(line) for line in (run_directory(recipe) / "samples.jsonl").read_text().splitlines()]
    assert {row["version"] for row in rows} == {0, 2}
    assert [row["step"] for row in metrics(recipe) if "loss" in row] == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_a_server_of_other_pixels_is_told_at_the_tokens_behind_images(tmp_path, model):
    other = tmp_path / "other"
    shutil.copytree(model, other)
    file = other / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "image_mean": [0.1] * 3, "image_std": [0.05] * 3}))
    with serving(other, key="secret", control=tmp_path) as (url, _):
        settings = (f"model.path={model}", "grpo.max_mismatch=1e-4", "grpo.server.weights=broadcast")
        with pytest.raises(UserError, match="engine and trainer disagree by (.|\n)*serve this very model"):
            run(over_http(tmp_path, url, *settings, name="other"))


@pytest.mark.slow
def test_a_server_of_texts_is_told(tmp_path, model):
    with serving(make_model(tmp_path, 1), key="secret", control=tmp_path) as (url, _):
        recipe = over_http(tmp_path, url, f"model.path={model}", "grpo.server.weights=broadcast", name="texts")
        with pytest.raises(ServiceUnavailable, match=f"{url}/check_weights: 400"):
            run(recipe)
    assert not (Path(recipe.run.dir) / "texts" / "checkpoints").exists()
