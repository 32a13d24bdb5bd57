"""A cache whose files are not as they were written: noticed, said, and made anew, on every rank."""

import json
import os
import shutil

import pytest

from dtrain.base.errors import UserError
from dtrain.data.formats.encoder import Encoder
from dtrain.data.rows.cache import Source, open_cache
from dtrain.data.text.tokenizer import Tokenizer
from tests.data.makers import byte_level, save, write_jsonl
from tests.world import run_world

ROWS = [{"input_ids": [1, 2, 3 + number], "labels": [-100, 2, 3 + number]} for number in range(20)]


@pytest.fixture
def coder(tmp_path):
    return Encoder(Tokenizer.from_directory(save(tmp_path / "model", byte_level())), None, max_length=64)


def open_(tmp_path, coder, rows=ROWS, **options):
    source = Source((write_jsonl(tmp_path / f"{rows[0]['input_ids'][2]}.jsonl", rows),), ("tokenized",))
    return open_cache([source], coder, cache_dir=tmp_path / "cache", **options)


def contents(samples):
    return [(ids.tolist(), mask.tolist()) for index in range(len(samples)) for ids, mask in samples[index]]


def flip(name):
    def damage(place):
        content = bytearray((place / name).read_bytes())
        content[len(content) // 2] ^= 1
        (place / name).write_bytes(content)

    return damage


def edit(**changes):
    def damage(place):
        meta = json.loads((place / "meta.json").read_text())
        (place / "meta.json").write_text(json.dumps(meta | changes))

    return damage


def zero_the_mask(place):
    (place / "trained.bin").write_bytes(bytes((place / "trained.bin").stat().st_size))


def cut(place):
    content = (place / "tokens.bin").read_bytes()
    (place / "tokens.bin").write_bytes(content[:-4])


def swap(place):
    ids, offsets = (place / name for name in ("tokens.bin", "offsets.bin"))
    between = ids.read_bytes()
    ids.write_bytes(offsets.read_bytes())
    offsets.write_bytes(between)


def of_another_cache(place):
    """The same names and sizes, and each file as it was written, for other rows."""
    (other,) = (path for path in place.parent.iterdir() if path.is_dir() and path != place)
    shutil.rmtree(place)
    shutil.copytree(other, place)


def file_of_another_cache(place):
    (other,) = (path for path in place.parent.iterdir() if path.is_dir() and path != place)
    shutil.copy(other / "tokens.bin", place / "tokens.bin")


def no_directory(place):
    shutil.rmtree(place)
    place.write_text("")


DAMAGES = {
    "tokens.bin": [flip("tokens.bin"), cut, swap, file_of_another_cache],
    "trained.bin": [flip("trained.bin"), zero_the_mask, lambda place: (place / "trained.bin").unlink()],
    "offsets.bin": [flip("offsets.bin")],
    "origins.bin": [flip("origins.bin")],
    "left_out.txt": [lambda place: (place / "left_out.txt").write_text("none")],
    "meta.json": [
        edit(rows=7),
        edit(fingerprint="0" * 32),
        flip("meta.json"),
        lambda place: (place / "meta.json").write_text(""),
        lambda place: (place / "meta.json").write_text("[" * 5000),
        lambda place: (place / "meta.json").write_text("{}"),
        lambda place: (place / "meta.json").unlink(),
        of_another_cache,
        no_directory,
    ],
}


@pytest.mark.parametrize("name, damage", [(name, damage) for name, kinds in DAMAGES.items() for damage in kinds])
def test_damage_is_said_and_mended(tmp_path, coder, name, damage):
    open_(tmp_path, coder, ROWS[::-1])
    sound, said = open_(tmp_path, coder), []
    expected, meta = contents(sound), sound.meta
    damage(sound.directory)
    mended = open_(tmp_path, coder, print_line=said.append)
    assert contents(mended) == expected and mended.meta == meta
    assert len(said) == 1 and f"data: the cache {sound.directory} is damaged ({sound.directory / name}" in said[0]
    assert open_(tmp_path, coder, print_line=said.append).meta == meta and len(said) == 1  # once


@pytest.mark.parametrize("damage", [zero_the_mask, edit(rows=7), cut])
def test_ranks_mend_it_together(tmp_path, coder, damage):
    sound = open_(tmp_path, coder)
    expected = contents(sound)
    damage(sound.directory)

    def on_rank(rank):
        said = []
        samples = open_(tmp_path, coder, print_line=said.append)
        return contents(samples), samples.fingerprint, len(said)

    assert run_world(on_rank, 3) == [(expected, sound.fingerprint, 1)] * 3


@pytest.mark.parametrize("first", [0, 2])
def test_a_machine_with_a_sound_cache_goes_on(tmp_path, coder, first):
    """Rank 0, or ranks 0 and 1, have a sound cache of their own; the damage elsewhere is said on all."""
    roots = [tmp_path / f"machine{number}" for number in range(2)]
    source = Source((write_jsonl(tmp_path / "a.jsonl", ROWS),), ("tokenized",))
    sound = [open_cache([source], coder, cache_dir=root) for root in roots]
    inode = sound[0].directory.stat().st_ino
    zero_the_mask(sound[1].directory)

    def on_rank(rank):
        said = []
        samples = open_cache([source], coder, cache_dir=roots[rank > first], print_line=said.append)
        return contents(samples), said

    found = run_world(on_rank, 4)
    said = found[0][1]
    assert found == [(contents(sound[0]), said)] * 4 and len(said) == 1 and str(roots[1]) in said[0]
    assert sound[0].directory.stat().st_ino == inode


def test_a_damaged_cache_that_cannot_be_deleted(tmp_path, coder, monkeypatch):
    sound = open_(tmp_path, coder)
    zero_the_mask(sound.directory)

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    def on_rank(rank):
        with monkeypatch.context() as patch, pytest.raises(UserError) as error:
            patch.setattr(shutil, "rmtree", refuse)
            open_(tmp_path, coder)
        return str(error.value)

    (told,) = set(run_world(on_rank, 2))
    assert str(sound.directory / "trained.bin") in told and "Permission denied" in told and "data.cache_dir" in told


def test_a_cache_is_on_disk_before_it_has_its_name(tmp_path, coder, monkeypatch):
    synced = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (synced.append(os.fstat(descriptor).st_ino), fsync(descriptor)))
    samples = open_(tmp_path, coder)
    inodes = [path.stat().st_ino for path in sorted(samples.directory.iterdir())]
    assert set(inodes) <= set(synced[:-2])
    assert synced[-2:] == [samples.directory.stat().st_ino, samples.directory.parent.stat().st_ino]
