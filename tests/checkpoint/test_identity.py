"""Digests of what a run reads at its start, and resumes when it has changed."""

import json
import os
import shutil
from pathlib import Path

import pytest

from dtrain.base import ranks as identity
from dtrain.base.errors import Stopped, UserError
from dtrain.base.ranks import file_digests
from tests.checkpoint.processes import checkpoints
from tests.running import interrupt, metrics, run, trajectory
from tests.tiny import save_weights, tiny_recipe, write_model, write_rows
from tests.world import run_world

SIZES = (0, 1, 63, 64, 65, 640, 1000)


def replace_unseen(path, content):
    """Other content of the same size, with the time stamps of the old."""
    stat = path.stat()
    assert len(content) == stat.st_size and content != path.read_bytes()
    path.write_bytes(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


# ---- digests


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.setattr(identity, "CHUNK_BYTES", 64)
    monkeypatch.setattr(identity, "BLOCK_BYTES", 7)
    for size in SIZES:
        (tmp_path / f"{size}").write_bytes(os.urandom(size))
    return [tmp_path / f"{size}" for size in SIZES]


def test_a_digest_is_of_every_byte_and_of_nothing_else(files, tmp_path):
    alone = file_digests(files)
    assert len(set(alone)) == len(files)
    for path in files[1:]:
        content = path.read_bytes()
        for at in {0, len(content) // 2, len(content) - 1}:
            replace_unseen(path, content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
            assert file_digests([path]) != [alone[files.index(path)]]
            replace_unseen(path, content)
    moved = tmp_path / "moved" / "another"
    moved.parent.mkdir()
    shutil.copy(files[-1], moved)
    linked = tmp_path / "link"
    linked.symlink_to(moved)
    os.utime(moved, ns=(1, 1))
    assert file_digests([moved, linked]) == [alone[-1]] * 2 and file_digests([]) == []
    with pytest.raises(UserError, match="nowhere: No such file"):
        file_digests([tmp_path / "nowhere"])


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_share_the_work_and_agree(files, world_size, monkeypatch):
    alone = file_digests(files)
    read, count = identity._chunk_digest, []
    monkeypatch.setattr(identity, "_chunk_digest", lambda file, chunk: (count.append(1), read(file, chunk))[1])

    def on_rank(rank):
        return file_digests(files), len(count)

    found = run_world(on_rank, world_size)
    assert [one for one, _ in found] == [alone] * world_size
    chunks = sum(-(-size // 64) for size in SIZES)
    assert sum(number for _, number in found) == chunks and max(number for _, number in found) <= -(
        -chunks // world_size
    )


def test_machines_read_copies_of_their_own(files, tmp_path):
    """Ranks 0 and 1 hold one set of files, rank 2 another; what differs is told on all of them."""
    alone = file_digests(files)
    shutil.copytree(tmp_path, tmp_path / "other")

    def on_rank(rank):
        mine = [tmp_path / "other" / path.name for path in files] if rank == 2 else files
        try:
            return file_digests(mine, "the files differ")
        except UserError as error:
            return str(error)

    assert run_world(on_rank, 3) == [alone] * 3
    last = tmp_path / "other" / files[-1].name
    replace_unseen(last, bytes([last.read_bytes()[0] ^ 1]) + last.read_bytes()[1:])
    told = run_world(on_rank, 3)
    assert len(set(told)) == 1 and told[0].startswith("the files differ: that of rank 2 on")


# ---- a resume


def grown(root, *overrides, name="run", **more):
    """A run from weights in a file, of which step 3 is saved."""
    if not (root / "model").exists():
        save_weights(write_model(root / "model"))
        (root / "model" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    fixed = (f"model.path={root / 'model'}", "model.init=pretrained", "checkpoint.every=3", "train.steps=6")
    fixed += ("train.global_batch=4",)
    return tiny_recipe(root, *fixed, *overrides, name=name, **more)


def stop_at_the_third_step(recipe):
    with pytest.raises(Stopped, match="stopped after step"):
        interrupt(recipe, 1, 3)


CHANGES = {
    "model.weights": ("model.safetensors", None),
    "model.config": ("config.json", (b'"max_position_embeddings": 128', b'"max_position_embeddings": 127')),
    "model.tokenizer": ("tokenizer.json", (b"w41", b"v41")),
    "data.chat_template": ("chat_template.jinja", (b"[0]", b"[1]")),
}


@pytest.mark.parametrize("key", CHANGES)
def test_what_was_replaced_since_the_save_is_refused_by_its_key(tmp_path, key):
    recipe = grown(tmp_path)
    stop_at_the_third_step(recipe)
    before = metrics(recipe)
    name, change = CHANGES[key]
    path = tmp_path / "model" / name
    content = path.read_bytes()
    replace_unseen(path, content.replace(*change) if change else content[:-5] + bytes([content[-5] ^ 1]) + content[-4:])
    with pytest.raises(UserError, match=rf"{key}: \w+(.|\n)*allow_changes=\[\S*{key}") as caught:
        run(recipe)
    assert metrics(recipe) == before
    keys = str(caught.value).split("allow_changes=")[1].split(". To start")[0]
    allowed = grown(tmp_path, f"checkpoint.allow_changes={keys}")
    run(allowed)
    assert [row["step"] for row in metrics(allowed)] == list(range(1, 7))
    run(grown(tmp_path, "train.steps=8"))  # the change is what was saved since


def test_another_place_with_the_same_content_is_the_same(tmp_path):
    shape = ("data.packing=false", "train.validate_every=3", f"data.val.path={tmp_path / 'val.jsonl'}")
    write_rows(tmp_path / "val.jsonl", count=9, seed=3)
    whole, recipe = grown(tmp_path, *shape, name="whole"), grown(tmp_path, *shape)
    run(whole)
    stop_at_the_third_step(recipe)
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for name in ("model", "rows.jsonl", "val.jsonl"):
        shutil.move(tmp_path / name, moved / name)
    paths = (f"model.path={moved}/model", f"data.train.path={moved}/rows.jsonl", f"data.val.path={moved}/val.jsonl")
    write_rows(tmp_path / "rows.jsonl", seed=5)  # the old name means something else now
    run(grown(tmp_path, *shape, *paths[:1], paths[1], paths[2]))
    assert trajectory(recipe) == trajectory(whole)
    with pytest.raises(UserError, match=r"data\.val\.path(.|\n)*data\.val\.fingerprint: \w+ -> \w+"):
        run(grown(tmp_path, *shape, *paths[:2], f"data.val.path={tmp_path}/rows.jsonl", "train.steps=8"))


def test_rows_that_changed_their_source_are_other_data(tmp_path):
    """The same tokens in the same order, but for where a weight ends."""
    lines = write_rows(tmp_path / "rows.jsonl").read_text().splitlines(keepends=True)

    def sources(cut, where):
        (tmp_path / where).mkdir()
        names = [tmp_path / where / "a.jsonl", tmp_path / where / "b.jsonl"]
        for name, part in zip(names, (lines[:cut], lines[cut:]), strict=True):
            name.write_text("".join(part))
        return f"data.train.sources=[{{path: {names[0]}, weight: 2}}, {{path: {names[1]}, weight: 0.5}}]"

    stop_at_the_third_step(grown(tmp_path, "data.train.path=null", sources(20, "one")))
    run(grown(tmp_path, "data.train.path=null", sources(20, "two")))
    with pytest.raises(UserError, match=r"data\.fingerprint: \w+ -> \w+"):
        run(grown(tmp_path, "data.train.path=null", sources(21, "three"), "train.steps=8"))


def without_digests(recipe, step):
    """The step without what tells it from others."""
    from dtrain.base.files import checksum
    from dtrain.checkpoint.dcp.store import _text_checksum

    path = checkpoints(recipe).path(step)
    state = json.loads((path / "state.json").read_text())
    for key in ("identities", "began", "save"):
        del state[key]
    (path / "state.json").write_text(json.dumps(state))
    content = json.loads((path / "manifest.json").read_text())["content"]
    content["files"]["state.json"] = checksum(path / "state.json")
    (path / "manifest.json").write_text(json.dumps({"content": content, "crc32": _text_checksum(content)}))


def test_a_checkpoint_that_cannot_be_compared_is_refused(tmp_path):
    recipe = grown(tmp_path)
    stop_at_the_third_step(recipe)
    without_digests(recipe, 3)
    with pytest.raises(UserError, match="step-3: .* incompatible version .* no valid save, identities, began"):
        run(recipe)


def test_a_config_laid_out_otherwise_is_the_same_model(tmp_path):
    recipe = tiny_recipe(tmp_path, "checkpoint.every=5", "train.steps=5")
    run(recipe)
    path = Path(recipe.model.path) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()), indent=3, sort_keys=True))
    run(tiny_recipe(tmp_path, "checkpoint.every=5"))
    assert [row["step"] for row in metrics(recipe)] == list(range(1, 11))


@pytest.mark.parametrize("record", ['{"checkpoint.resume": {"a": 1}}', '{"checkpoint.resume": []}'])
def test_a_damaged_record_of_the_start_is_told(tmp_path, record):
    recipe = tiny_recipe(tmp_path)
    directory = Path(recipe.run.dir) / "run"
    directory.mkdir(parents=True)
    (directory / "began.json").write_text(record)
    with pytest.raises(UserError, match="began.json is damaged"):
        run(recipe)


def test_an_export_that_says_nonsense_of_itself_is_written_again(tmp_path):
    recipe = tiny_recipe(tmp_path, "checkpoint.export=final", "checkpoint.every=10")
    run(recipe)
    held = Path(recipe.run.dir) / "run" / "export" / "dtrain.json"
    whole = held.read_text()
    held.write_text("[" * 100_000)
    run(recipe)
    assert held.read_text() == whole
