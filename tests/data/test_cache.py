"""The cache: made once, whole or not at all, the same from one process or many."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import pytest
import torch

from dtrain.base import ranks as identity
from dtrain.base.errors import UserError
from dtrain.data.formats.encoder import Encoder
from dtrain.data.formats.formats import Text
from dtrain.data.rows import cache, pool
from dtrain.data.rows.cache import Source, open_cache
from dtrain.data.text.tokenizer import Tokenizer
from tests.data.makers import byte_level, save, write_jsonl


@pytest.fixture
def coder(tmp_path):
    return Encoder(Tokenizer.from_directory(save(tmp_path / "model", byte_level())), None, max_length=64)


def texts(count):
    return [{"text": f"the number {number} " + "and so on " * (number % 7)} for number in range(count)]


def open_(coder, file, cache_dir, **options):
    return open_cache([Source((file,), ("text",))], coder, cache_dir=cache_dir, **options)


def contents(samples):
    return [(ids.tolist(), mask.tolist()) for index in range(len(samples)) for ids, mask in samples[index]]


def test_holds_what_the_encoder_says(tmp_path, coder):
    file = write_jsonl(tmp_path / "a.jsonl", texts(50))
    samples = open_(coder, file, tmp_path / "cache")
    for index, row in enumerate(texts(50)):
        ids, trained = coder.encode(Text("", row["text"]))
        assert contents(samples)[index] == (ids[:64], [bool(flag) for flag in trained[:64]])
        assert samples.origin(index) == (str(file), index + 1)
    assert samples.lengths(torch.arange(50)).tolist() == [len(samples[index][0][0]) for index in range(50)]
    assert samples.meta["tokens"] == sum(len(ids) for ids, _ in contents(samples))
    assert samples.meta["trained_tokens"] == sum(sum(mask) for _, mask in contents(samples))


@pytest.mark.trap(
    "tokens of another file taken from the cache",
    "axolotl-ai-cloud/axolotl #341",
    "training on the data of before",
    "the key is the content of the files and every option",
)
def test_made_once_and_keyed_by_all_that_matters(tmp_path, coder, monkeypatch):
    file, root = write_jsonl(tmp_path / "a.jsonl", texts(20)), tmp_path / "cache"
    built = []
    build = cache._write_samples
    monkeypatch.setattr(cache, "_write_samples", lambda *arguments: (built.append(1), build(*arguments))[1])
    first = open_(coder, file, root)
    assert contents(open_(coder, file, root)) == contents(first) and len(built) == 1
    assert open_cache([Source((file,), ("text",), 0.5)], coder, cache_dir=root).fingerprint != first.fingerprint
    assert len(built) == 1  # a weight is no reason to tokenise again
    other = Encoder(coder.tokenizer, None, max_length=64, loss_on="all")
    open_(other, file, root)
    assert len(built) == 2
    open_(Encoder(coder.tokenizer, None, max_length=32), file, root)
    assert len(built) == 3
    os.utime(file, ns=(1, 1))
    again = open_(coder, file, root)
    assert len(built) == 3 and again.fingerprint == first.fingerprint  # another time is no other content
    write_jsonl(file, texts(21))
    assert open_(coder, file, root).fingerprint != first.fingerprint and len(built) == 4
    content, stat = file.read_bytes(), file.stat()
    file.write_bytes(content.replace(b"number", b"nombre"))
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # another content at the same size and time
    other = open_(coder, file, root)
    assert file.stat().st_mtime_ns == stat.st_mtime_ns and other.meta["left_out"] == []
    assert contents(other)[0] == contents(open_cache([Source((file,), ("text",))], coder, cache_dir=None))[0]
    assert len(built) == 6
    file.write_bytes(content)
    open_(coder, file, root)
    assert len(built) == 6  # and the content of then is in the cache of then
    next(root.glob("*/tokens.bin")).write_bytes(b"cut")
    for _ in range(3):
        assert len(open_(coder, file, root)) == 21


@pytest.mark.processes
def test_processes_give_what_one_gives(tmp_path, coder, monkeypatch):
    files = [write_jsonl(tmp_path / f"{count}.jsonl", texts(count)) for count in (700, 1, 900)]
    sources = [Source(tuple(files[:2]), ("text", "text")), Source((files[2],), ("text",), 2.0)]
    alone = open_cache(sources, coder, cache_dir=None)
    monkeypatch.setattr(cache, "MIN_PARALLEL_BYTES", 0)
    monkeypatch.setattr(pool, "MAX_PENDING", 1)
    together = open_cache(sources, coder, cache_dir=tmp_path / "cache", num_workers=3)
    assert contents(alone) == contents(together) and alone.fingerprint == together.fingerprint
    assert [share.first for share in together.sources] == [0, 701] and together.origin(701) == (str(files[2]), 1)


@pytest.mark.processes
def test_errors_of_processes(tmp_path, coder, monkeypatch):
    monkeypatch.setattr(cache, "MIN_PARALLEL_BYTES", 0)
    file = write_jsonl(tmp_path / "a.jsonl", [*texts(600), {"text": 5}, *texts(600), {"text": 6}])
    with pytest.raises(UserError, match=r"a\.jsonl:601: text must be a string"):
        open_(coder, file, tmp_path / "cache", num_workers=2)
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]
    with pytest.raises(RuntimeError, match="a tokenising process died with exit status"):
        with pool.Pool(coder, 1) as workers:
            workers._processes[0].kill()
            list(workers.encode([(None, "text")]))


def test_nothing_to_train_on(tmp_path, coder):
    with pytest.raises(UserError, match="the dataset is empty"):
        open_(coder, write_jsonl(tmp_path / "a.jsonl", []), None)
    rows = [{"input_ids": [1, 2], "labels": [-100, -100]}] * 3
    source = Source((write_jsonl(tmp_path / "b.jsonl", rows),), ("tokenized",))
    with pytest.raises(UserError, match=r"not one of 3 rows has a trained token.*b\.jsonl:1"):
        open_cache([source], coder, cache_dir=None)


def test_rows_left_out_are_listed(tmp_path, coder):
    rows = [{"input_ids": [1, 2], "labels": [-100, 2 if number % 2 else -100]} for number in range(60)]
    source = Source((write_jsonl(tmp_path / "b.jsonl", rows),), ("tokenized",))
    samples = open_cache([source], coder, cache_dir=tmp_path / "cache")
    assert (
        len(samples) == 30
        and samples.meta["untrained"] == 30
        and len(samples.meta["left_out"]) == cache.MAX_LISTED_ROWS
    )
    lines = (samples.directory / "left_out.txt").read_text().splitlines()
    assert len(lines) == 30 and lines[1].endswith("b.jsonl:3: no trained token")


BUILD = """
import sys, time
from pathlib import Path
from dtrain.data.rows import cache
from dtrain.data.formats.encoder import Encoder
from dtrain.data.text.tokenizer import Tokenizer
model, file, root, wait = sys.argv[1:]
coder = Encoder(Tokenizer.from_directory(model), None, max_length=64)
add = cache._CacheWriter.add
def slow(self, *arguments):
    add(self, *arguments)
    print("built", flush=True)
    time.sleep(float(wait))
cache._CacheWriter.add = slow
samples = cache.open_cache([cache.Source((Path(file),), ("text",))], coder, cache_dir=root)
print(len(samples), samples.fingerprint, flush=True)
"""


def builder(tmp_path, file, wait):
    arguments = [sys.executable, "-c", BUILD, str(tmp_path / "model"), str(file), str(tmp_path / "cache"), str(wait)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])


def test_a_killed_build_leaves_no_cache_and_no_lock(tmp_path, coder):
    file = write_jsonl(tmp_path / "a.jsonl", texts(600))
    process = builder(tmp_path, file, 30)
    assert process.stdout.readline() == "built\n"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert list((tmp_path / "cache").glob("*.tmp-*")) and not list((tmp_path / "cache").glob("*/meta.json"))
    start = time.monotonic()
    samples = open_(coder, file, tmp_path / "cache")
    assert len(samples) == 600 and time.monotonic() - start < 300
    assert not list((tmp_path / "cache").glob("*.tmp-*"))


def test_two_processes_build_once(tmp_path, coder):
    file = write_jsonl(tmp_path / "a.jsonl", texts(600))
    both = [builder(tmp_path, file, 0.3) for _ in range(2)]
    outputs = [process.communicate(timeout=300)[0].splitlines() for process in both]
    assert sorted(len(lines) for lines in outputs) == [1, 4]  # three chunks, built by one of them
    assert outputs[0][-1] == outputs[1][-1] == f"600 {open_(coder, file, tmp_path / 'cache').fingerprint}"


def test_workers_end_with_their_parent(coder):
    def parent(pipe):
        with pool.Pool(coder, 2) as workers:
            pipe.send([process.pid for process in workers._processes])
            time.sleep(600)

    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=parent, args=(theirs,))
    process.start()
    workers = ours.recv()
    process.kill()
    process.join()
    deadline = time.monotonic() + 300
    while any(alive(worker) for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(alive(worker) for worker in workers)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_memory_does_not_grow_with_the_set(tmp_path, coder):
    def peak(count):
        file = write_jsonl(tmp_path / f"{count}.jsonl", texts(count))
        tracemalloc.start()
        open_(coder, file, tmp_path / "cache")
        size = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return size

    peak(10)  # with what the first set of a process loads
    assert (
        peak(8000) < 1.2 * peak(1000) + identity.READ_THREADS * identity.BLOCK_BYTES
    )  # threads read it once more, to seal it


def test_meta_is_json(tmp_path, coder):
    samples = open_(coder, write_jsonl(tmp_path / "a.jsonl", texts(5)), tmp_path / "cache")
    meta = json.loads((samples.directory / "meta.json").read_text())
    assert meta["samples"] == 5 and meta["sizes"]["tokens.bin"] == 4 * meta["tokens"]


def test_a_place_that_cannot_hold_it_is_named(tmp_path, coder):
    file = write_jsonl(tmp_path / "a.jsonl", texts(3))
    with pytest.raises(UserError, match=r"a\.jsonl/cache: Not a directory.* set data\.cache_dir"):
        open_(coder, file, file / "cache")
