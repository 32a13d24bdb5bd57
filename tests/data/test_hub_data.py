"""Datasets of the hub, through huggingface_hub's own client from a hub on loopback, and offline after."""

import json
import os
import subprocess
import sys

import pytest
from huggingface_hub import constants

from dtrain.base.errors import UserError
from dtrain.commands import cli
from dtrain.data.sources.files import is_dataset_id
from dtrain.data.sources.hub import DatasetPart, cached_files, choose_files, download, read_card
from dtrain.launch import launch
from dtrain.training.preflight import load
from tests.loopback_hub import hub, jsonl, parquet  # noqa: F401 (a fixture)
from tests.problem_lines import missing_problems, preflight
from tests.tiny import tiny_recipe, write_rows

NAME = "someone/tiny-rows"
CONFIGS = """---
license: mit
configs:
- config_name: main
  default: true
  data_files:
  - split: train
    path: main/train-*
  - split: test_sft
    path: [main/test-*, main/more/**]
- config_name: socratic
  data_files:
  - {split: train, path: socratic/*.parquet}
- config_name: all
  data_dir: everything
- config_name: one
  data_files: "one.jsonl"
---
# Rows
"""
LISTING = """
README.md .gitattributes main/train-00000-of-00002.parquet main/train-00001-of-00002.parquet
main/test-00000-of-00001.parquet main/more/deep/a.jsonl socratic/a.parquet socratic/deep/b.parquet
everything/train.csv everything/dev.csv one.jsonl images/a.png
""".split()


def choose(listing, readme, split, subset, folder):
    """The files of a split, of a repository with this README.md."""
    (folder / "README.md").write_text(readme)
    return choose_files(NAME, listing, read_card(folder / "README.md", NAME), split, subset, "data.train")


@pytest.mark.parametrize(
    ("split", "subset", "expected"),
    [
        ("train", None, ["main/train-00000-of-00002.parquet", "main/train-00001-of-00002.parquet"]),
        ("test_sft", "main", ["main/more/deep/a.jsonl", "main/test-00000-of-00001.parquet"]),
        ("train", "socratic", ["socratic/a.parquet"]),
        ("validation", "all", ["everything/dev.csv"]),
        ("dev", "all", ["everything/dev.csv"]),
        ("train", "one", ["one.jsonl"]),
    ],
)
def test_by_the_readme(tmp_path, split, subset, expected):
    assert choose(LISTING, CONFIGS, split, subset, tmp_path) == expected


@pytest.mark.parametrize(
    ("listing", "split", "subset", "expected"),
    [
        ("train.jsonl test.jsonl README.md", "train", None, "train.jsonl"),
        ("rows.jsonl.gz", "train", None, "rows.jsonl.gz"),
        ("a.csv b.csv", "train", None, "a.csv b.csv"),
        ("data/train-00000-of-00001.parquet data/test-00000-of-00001.parquet", "test", None,
         "data/test-00000-of-00001.parquet"),
        ("data/train_sft-00000-of-00001-0123456789abcdef.parquet data/test_sft-00000-of-00001.parquet", "train_sft",
         None, "data/train_sft-00000-of-00001-0123456789abcdef.parquet"),
        ("train/0.jsonl train/1.jsonl valid/0.jsonl", "validation", None, "valid/0.jsonl"),
        ("en/train.jsonl de/train.jsonl", "train", "de", "de/train.jsonl"),
        ("en/train.jsonl en/test.jsonl", "test", None, "en/test.jsonl"),
        ("gsm-train.jsonl gsm_test.jsonl", "train", None, "gsm-train.jsonl"),
        ("helpful/train.jsonl train.jsonl", "train", None, "train.jsonl"),
        ("helpful/train.jsonl train.jsonl", "train", "helpful", "helpful/train.jsonl"),
        ("data/a.json dataset_infos.json .cache/train.jsonl", "train", None, "data/a.json"),
    ],
)  # fmt: skip
def test_by_names(tmp_path, listing, split, subset, expected):
    assert choose(listing.split(), "", split, subset, tmp_path) == expected.split()


@pytest.mark.parametrize(
    ("listing", "readme", "split", "subset", "said"),
    [
        (LISTING, CONFIGS, "test", None, "data.train.split=test: someone/tiny-rows has no such split of subset main. "
         "Its splits are test_sft, train"),
        (LISTING, CONFIGS, "train", "mian", "data.train.subset=mian: someone/tiny-rows has no such subset. "
         "Its subsets are main, socratic, all, one"),
        (["en/train.jsonl", "de/train.jsonl"], "", "train", None, "data.train.subset is not set, but someone/tiny-rows "
         "has the subsets de, en. Name one of them"),
        (["train.jsonl"], "", "test", None, "has no such split. Its splits are train"),
        (["a.tar", "load.py"], "", "train", None, "has no file that dtrain reads (.jsonl, .json, .ndjson, .csv, "
         ".parquet), only .py, .tar. Set data.train.revision=refs/convert/parquet"),
        (["data/train-00000-of-00002.parquet"], "", "train", None, "data/train-*-of-00002 are 1 files, not 2"),
        (["train.jsonl"], "---\n: - {\n---\n", "train", None, "the YAML in front of its README.md is broken"),
        (["a.csv"], "---\nconfigs: [{config_name: x, data_files: data/a**}]\n---\n", "train", None, "README.md has "
         "data/a**, which fsspec cannot read (Invalid pattern: '**' can only be an entire path component). Set "
         "data.train.path to the files, such as hf://datasets/someone/tiny-rows/"),
    ],
)  # fmt: skip
def test_what_is_not_there_is_told_with_what_is(tmp_path, listing, readme, split, subset, said):
    with pytest.raises(UserError) as error:
        choose(listing, readme, split, subset, tmp_path)
    assert said in str(error.value)


@pytest.fixture
def rows(tmp_path, hub):  # noqa: F811
    """The tiny recipe's rows as a dataset of two shards in parquet, and a split in JSON Lines."""
    found = [json.loads(line) for line in write_rows(tmp_path / "rows.jsonl").read_text().splitlines()]
    shards = [parquet(part, tmp_path / "scratch.parquet") for part in (found[:30], found[30:])]
    names = [f"data/train-0000{at}-of-00002.parquet" for at in range(2)]
    hub.datasets[NAME] = {"main": {"data/test.jsonl": jsonl(found[:7]), **dict(zip(names, shards, strict=True))}}
    hub.datasets[NAME]["main"] |= {"README.md": b"# tiny", "huge.bin": b"x" * 1000}
    return found


def losses(recipe):
    lines = map(json.loads, (recipe.run.directory / "metrics.jsonl").read_text().splitlines())
    return [(line.get("loss"), line.get("val_loss")) for line in lines]


def test_a_run_fetches_what_it_needs_and_goes_on_offline(tmp_path, hub, rows, monkeypatch):  # noqa: F811
    shape = [f"data.val={{path: {NAME}, split: test}}", "train.validate_every=2", "train.steps=4"]
    recipe = load(tiny_recipe(tmp_path, f"data.train.path={NAME}", *shape))
    why = "is not a file here, and as a dataset of the Hugging Face hub it is not in this machine's cache"
    assert preflight(recipe, 1) == []
    assert missing_problems(recipe) == [
        f"data.train.path={NAME} {why}. Run `dtrain download --data {NAME}` to download it",
        f"data.val.path={NAME} {why}. Run `dtrain download --data {NAME} --split test` to download it",
    ]
    launch(recipe)
    assert not any("huge" in line for line in hub.asked)
    (tmp_path / "val.jsonl").write_bytes(hub.datasets[NAME]["main"]["data/test.jsonl"])
    shape[0] = f"data.val.path={tmp_path / 'val.jsonl'}"
    local = tiny_recipe(tmp_path, *shape, name="local")
    launch(local)
    assert losses(recipe) == losses(local) and len(losses(local)) == 6
    hub.asked.clear()
    hub.datasets.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    again = tiny_recipe(tmp_path, f"data.train.path={NAME}", "train.steps=2", name="again")
    assert preflight(again, 1) == [] and f"path: {NAME}" in (recipe.run.directory / "config.yaml").read_text()
    launch(again)
    assert hub.asked == []


def test_a_part_of_a_split_is_not_taken_for_the_whole(hub, rows):  # noqa: F811
    files = download(NAME, DatasetPart())
    assert [file.name for file in files] == ["train-00000-of-00002.parquet", "train-00001-of-00002.parquet"]
    assert cached_files(NAME, DatasetPart()) == files and cached_files(NAME, DatasetPart("test")) is None
    files[1].unlink()
    assert cached_files(NAME, DatasetPart()) is None
    assert download(NAME, DatasetPart()) == files and cached_files(NAME, DatasetPart()) == files


def test_a_cache_without_a_listing_is_known_by_its_names(hub, rows):  # noqa: F811
    """An earlier version of the library wrote none, say."""
    files = download(NAME, DatasetPart())
    for one in files[0].parents[3].rglob("trees/*.json"):
        one.unlink()
    data_hub_tree = sys.modules["huggingface_hub._tree_cache"]
    data_hub_tree._IN_MEMORY_TREE_CACHE.clear()
    assert cached_files(NAME, DatasetPart()) == files
    files[1].unlink()
    with pytest.raises(UserError, match="are 1 files, not 2"):
        cached_files(NAME, DatasetPart())


def test_revisions(hub, rows):  # noqa: F811
    hub.datasets[NAME]["v2"] = {"train.jsonl": jsonl(rows[:3])}
    [file] = download(NAME, DatasetPart(revision="v2"))
    assert file.read_bytes() == jsonl(rows[:3])
    with pytest.raises(UserError, match="has no such revision on the hub"):
        download(NAME, DatasetPart(revision="v3"))
    hub.datasets[NAME]["main"] = {"train.jsonl": jsonl(rows[:5])}
    assert cached_files(NAME, DatasetPart(revision="v2")) == [file]


def test_a_private_or_missing_one_is_said(hub, rows):  # noqa: F811
    hub.private.add(NAME)
    with pytest.raises(UserError, match="the hub has no such dataset. Check the name"):
        download(NAME, DatasetPart())


def test_the_command(hub, rows, capsys):  # noqa: F811
    assert cli.main(["download", "--data", NAME, "--split", "test"]) == 0
    [line] = capsys.readouterr().out.splitlines()
    assert open(line, "rb").read() == jsonl(rows[:7])
    assert cli.main(["download", "--data", NAME, "--split", "dev"]) == 1
    assert "has no such split. Its splits are test, train" in capsys.readouterr().err
    assert cli.main(["download", NAME, "--split", "test"]) == 1
    assert "are for datasets: add --data" in capsys.readouterr().err


def test_keys_of_the_hub_beside_a_file(tmp_path):
    recipe = tiny_recipe(tmp_path, "data.train.split=test", "data.train.revision=v2")
    [problem] = preflight(recipe, 1)
    assert problem.startswith("data.train.split and data.train.revision: only datasets of the Hugging Face hub")


@pytest.mark.parametrize(
    ("path", "is_one"),
    [("trl-lib/Capybara", True), ("openai/gsm8k", True), ("data/rows.jsonl", False), ("data/rows.json.gz", False),
     ("data/rows.PARQUET", False), ("a/b/c", False), ("rows", False), ("./a/b", False)],
)  # fmt: skip
def test_what_reads_as_an_id(path, is_one):
    assert is_dataset_id(path) == is_one


def test_a_process_of_its_own(tmp_path, hub, rows):  # noqa: F811
    """As a user has it: the endpoint and the cache come from the environment."""
    environ = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-m", "dtrain", "download", "--data", NAME]
    found = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert found.returncode == 0 and len(found.stdout.split()) == 2, found.stderr
