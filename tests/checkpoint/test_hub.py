"""Models by their hub id: from a cache as huggingface_hub lays it out, and its errors in plain words. No network."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

from dtrain import models
from dtrain.base import hub
from dtrain.base.errors import UserError
from dtrain.checkpoint.huggingface.write import write_directory
from dtrain.checkpoint.peft.config import base_of
from dtrain.commands import cli
from dtrain.launch import launch
from dtrain.training.preflight import load
from tests.loopback_hub import hub as loopback  # noqa: F401 (a fixture)
from tests.problem_lines import missing_problems, preflight
from tests.tiny import save_weights, tiny_grpo, tiny_recipe, write_model

NAME = "someone/Tiny-0.1B"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The hub's cache, with one model in it: blobs, a snapshot of links, and the name of its commit."""
    root = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(root))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    source = write_model(tmp_path / "source")
    model = models.build(models.read_config(source))
    models.init_weights(model, 0)
    written = tmp_path / "written"
    write_directory(model, written, source)
    repository, commit = root / f"models--{NAME.replace('/', '--')}", "0123456789" * 4
    snapshot = repository / "snapshots" / commit
    for directory in (repository / "blobs", repository / "refs", snapshot):
        directory.mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    for number, file in enumerate(written.iterdir()):
        file.rename(repository / "blobs" / str(number))
        (snapshot / file.name).symlink_to(repository / "blobs" / str(number))
    return snapshot


@pytest.mark.parametrize(
    ("path", "is_id"),
    [(NAME, True), ("Qwen/Qwen3-0.6B", True), ("./a/b", False), ("/a/b", False), ("a/b/c", False), ("a", False),
     ("~/a", False), ("../a", False), ("a/b c", False), ("a/", False)],
)  # fmt: skip
def test_what_reads_as_an_id(path, is_id):
    assert hub.is_model_id(path) == is_id


def test_a_directory_of_the_name_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path(NAME).mkdir(parents=True)
    assert not hub.is_model_id(NAME)


def test_a_run_takes_a_cached_model_without_a_network(tmp_path, cache):
    recipe = load(
        tiny_recipe(
            tmp_path, f"model.path={NAME}", "model.init=pretrained", "train.steps=1", "scheduler.warmup_steps=0"
        )
    )
    assert recipe.model.path == str(cache) and preflight(recipe, 1) == []
    launch(recipe)
    assert (tmp_path / "runs" / "run" / "metrics.jsonl").exists()


def test_a_reward_model_has_an_id_too(tmp_path, cache):
    recipe = load(tiny_grpo(tmp_path, f"grpo.reward_model.path={NAME}"))
    assert recipe.grpo.reward_model.path == str(cache)


def test_a_part_of_a_model_is_not_taken_for_the_whole(tmp_path, cache):
    (cache / "model.safetensors").unlink()
    recipe = load(tiny_recipe(tmp_path, f"model.path={NAME}", "model.init=pretrained"))
    assert "Fetch it with `dtrain download someone/Tiny-0.1B`" in missing_problems(recipe)[0]
    assert load(tiny_recipe(tmp_path, f"model.path={NAME}", "model.init=scratch")).model.path == str(cache)


def test_half_a_download_names_the_shards_that_its_index_lacks(tmp_path, cache, capsys):
    """A cache without a listing of the repository, as other versions of huggingface_hub leave it."""
    (cache / "model.safetensors").rename(cache / "model-00001-of-00003.safetensors")
    shards = {f"layer.{number}": f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)}
    (cache / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    said = f"{NAME}: its download into the hub's cache on this machine is incomplete: 2 files are missing "
    said += "(model-00002-of-00003.safetensors, model-00003-of-00003.safetensors). Run `dtrain download someone/Tiny"
    recipe = load(tiny_recipe(tmp_path, f"model.path={NAME}", "model.init=pretrained"))
    assert said in missing_problems(recipe)[0]
    for command in (["download", NAME], ["generate", NAME, "--prompt", "a"]):
        assert cli.main(command) == 1
        assert said in capsys.readouterr().err


def test_half_a_download_names_the_files_of_the_hubs_listing(tmp_path, loopback, monkeypatch, capsys):  # noqa: F811
    source = save_weights(write_model(tmp_path / "source"))
    loopback.models[NAME] = {"main": {path.name: path.read_bytes() for path in source.iterdir()}}
    loopback.datasets["someone/rows"] = {"main": {f"train-0000{n}-of-00002.jsonl": b'{"text": "a"}\n' for n in (0, 1)}}
    assert cli.main(["download", NAME]) == 0 and cli.main(["download", "--data", "someone/rows"]) == 0
    snapshot = Path(capsys.readouterr().out.splitlines()[0])
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    (rows,) = snapshot.parents[2].glob("datasets--*/snapshots/*/train-00001*")
    for file in (snapshot / "model.safetensors", snapshot / "config.json", rows):
        file.unlink()
    assert cli.main(["download", NAME]) == 1
    assert "2 files are missing (config.json, model.safetensors)" in capsys.readouterr().err
    assert cli.main(["download", "--data", "someone/rows"]) == 1
    assert "1 file is missing (train-00001-of-00002.jsonl). Run `dtrain download --data" in capsys.readouterr().err


def test_offline_and_not_cached_is_said(tmp_path, cache, capsys):
    recipe = tiny_recipe(tmp_path, "model.path=someone/else", "model.init=pretrained")
    with pytest.raises(UserError, match="someone/else is not a directory here and not in the hub's cache"):
        launch(recipe)
    assert cli.main(["download", "someone/else"]) == 1
    assert "the hub cannot be reached" in capsys.readouterr().err
    assert cli.main(["download", NAME]) == 0
    assert capsys.readouterr().out.strip() == str(cache)


def refusing(kind):
    response = SimpleNamespace(headers={}, status_code=401, request=None)

    def snapshot_download(*args, local_files_only=False, **kwargs):
        if local_files_only:
            raise LocalEntryNotFoundError("not here")
        raise kind("401 Client Error. (Request ID: 1)", response=response)

    return snapshot_download


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (
            GatedRepoError,
            "is gated, and you have not accepted its terms. Accept them at https://huggingface.co/meta/x, then",
        ),
        (RepositoryNotFoundError, "the hub has no such model. Check the name"),
    ],
)
def test_gated_and_private_models_are_answered_with_what_to_do(tmp_path, monkeypatch, kind, said):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", refusing(kind))
    with pytest.raises(UserError, match="hf auth login") as caught:
        launch(tiny_recipe(tmp_path, "model.path=meta/x", "model.init=pretrained"))
    assert said in str(caught.value)


def test_other_problems_of_a_recipe_are_told_before_a_download(tmp_path, monkeypatch):
    def never(*args, local_files_only=False, **kwargs):
        assert local_files_only
        raise LocalEntryNotFoundError("not here")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", never)
    with pytest.raises(UserError, match="a problem:\n.*global_batch"):
        launch(tiny_recipe(tmp_path, "model.path=meta/x", "train.global_batch=3"))


def test_only_weights_and_small_files_are_fetched(tmp_path, monkeypatch):
    asked = {}

    def snapshot_download(name, local_files_only=False, allow_patterns=None, **_):
        if not local_files_only:
            asked["patterns"] = allow_patterns
        return str(write_model(tmp_path / "model"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(UserError, match="has no weights in safetensors"):
        hub.download_model("meta/x")
    from fnmatch import fnmatch

    def fetched(name):
        return any(fnmatch(name, pattern) for pattern in asked["patterns"])

    assert all(map(fetched, ["config.json", "tokenizer.json", "model.safetensors", "model-00001-of-00002.safetensors"]))
    assert not any(map(fetched, ["pytorch_model.bin", "modeling_x.py", "original/consolidated.pth", "optimizer.pt"]))


def test_no_hub_is_imported_where_the_model_is_a_directory(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    load(tiny_recipe(tmp_path))


def test_an_adapter_finds_its_base_by_the_id_that_the_cache_has_it_under(tmp_path, cache):
    assert hub.cached_model_id(cache) == NAME and hub.cached_model_id(tmp_path / "source") is None
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": NAME}))
    assert base_of(tmp_path) == cache
    cache.rename(cache.with_name("gone"))
    with pytest.raises(UserError, match=f"not in the hub's cache on this machine: `dtrain download {NAME}`"):
        base_of(tmp_path)


def test_commands_on_directories_take_a_cached_id(cache, capsys):
    assert cli.main(["generate", NAME, "--prompt", "the", "--max-new-tokens", "2"]) == 0
    by_id = capsys.readouterr().out
    assert cli.main(["generate", str(cache), "--prompt", "the", "--max-new-tokens", "2"]) == 0
    assert capsys.readouterr().out == by_id
    assert cli.main(["generate", "someone/Other", "--prompt", "the"]) == 1
    assert "`dtrain download someone/Other`" in capsys.readouterr().err
