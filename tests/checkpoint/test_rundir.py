"""The lock dies with its holder, changed recipes are guarded, metrics are cut."""

import errno
import fcntl
import json
import os
import signal
import stat
import subprocess
import sys
import textwrap
import time

import pytest

from dtrain.base.errors import UserError
from dtrain.base.files import atomic_write_text
from dtrain.launch.start import validate
from dtrain.training.directory import Difference, RunDirectory, check_changes
from tests.running import metrics, run, trajectory
from tests.tiny import tiny_recipe, write_rows

HOLDER = textwrap.dedent("""
    import os, sys, time
    from dtrain.training.directory import RunDirectory
    RunDirectory(sys.argv[1]).acquire()
    child = os.fork() if sys.argv[2] == "fork" else 1
    if child:
        print(child, flush=True)
    time.sleep(60)
""")


@pytest.fixture
def holder(request, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path), getattr(request, "param", "alone")], stdout=subprocess.PIPE
    )
    child = int(process.stdout.readline())
    yield process
    process.kill()
    process.wait()
    if child > 1:
        os.kill(child, signal.SIGKILL)


def test_a_second_run_waits_then_names_the_holder(holder, tmp_path):
    told = []
    began = time.monotonic()
    with pytest.raises(UserError, match=rf"in use by process {holder.pid} on {os.uname().nodename}"):
        RunDirectory(tmp_path).acquire(wait=0.5, print_line=told.append)
    assert 0.5 <= time.monotonic() - began < 5
    assert len(told) == 1 and str(holder.pid) in told[0]


@pytest.mark.parametrize(("host", "seconds"), [(os.uname().nodename, 30), ("elsewhere", 120)])
def test_the_lock_of_another_host_is_waited_for_longer(holder, tmp_path, host, seconds):
    (tmp_path / "lock").write_text(json.dumps({"host": host, "pid": 7}))

    class Told(Exception):
        pass

    def tell(line):
        assert f"process 7 on {host}; waiting up to {seconds} s" in line
        raise Told

    with pytest.raises(Told):
        RunDirectory(tmp_path).acquire(print_line=tell)


@pytest.mark.parametrize("holder", ["alone", "fork"], indirect=True)
def test_the_lock_dies_with_its_holder_even_when_its_workers_live(holder, tmp_path):
    holder.kill()
    holder.wait()
    run = RunDirectory(tmp_path).acquire(wait=5)
    assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
    run.release()


def test_a_released_directory_can_be_held_by_another_process(tmp_path):
    RunDirectory(tmp_path).acquire(wait=0).release()
    code = "import sys; from dtrain.training.directory import RunDirectory; RunDirectory(sys.argv[1]).acquire(wait=0)"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)


def test_importing_it_loads_no_torch():
    code = "import sys, dtrain.training.directory; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_directory_that_cannot_be_made_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file/run cannot be made: .*/file: Not a directory"):
        RunDirectory(tmp_path / "file" / "run").acquire()


def test_model_files_are_kept(tmp_path):
    run = RunDirectory(tmp_path / "run").acquire()
    model = tmp_path / "model"
    model.mkdir()
    (model / "additional_chat_templates").mkdir()
    tool_use = "additional_chat_templates/tool_use.jinja"
    for name in ("config.json", "tokenizer.json", "chat_template.jinja", tool_use, "model.safetensors"):
        (model / name).write_text(name)
    run.copy_model_files(model)
    kept = [str(path.relative_to(run.model)) for path in run.model.rglob("*") if path.is_file()]
    assert sorted(kept) == [tool_use, "chat_template.jinja", "config.json", "tokenizer.json"]
    run.copy_model_files(run.model, chat_template="{{ own }}")
    assert (run.model / "config.json").read_text() == "config.json"
    assert (run.model / "chat_template.jinja").read_text() == "{{ own }}"
    assert not (run.model / tool_use).exists()  # it would write rows with tools, in the place of the own template
    run.release()


CHANGES = [
    Difference("train.steps", 10, 20),
    Difference("data.num_workers", 0, 2),
    Difference("optimizer.lr", 1e-5, 2e-5),
    Difference("data.fingerprint", "aa", "bb"),
    Difference("scheduler.name", "cosine", None),
]


def test_guarded_changes_are_refused_together_and_the_override_is_named():
    with pytest.raises(UserError) as caught:
        check_changes(CHANGES, [])
    message = str(caught.value)
    assert "optimizer.lr: 1e-05 -> 2e-05" in message and "data.fingerprint: aa -> bb" in message
    assert "checkpoint.allow_changes=[optimizer.lr,data.fingerprint]" in message
    assert "train.steps" not in message and "num_workers" not in message


def test_what_tensors_are_kept_in_is_not_offered():
    kept = [Difference("optimizer.state", "int8", "float32"), Difference("train.masters", "float32", "bfloat16")]
    with pytest.raises(UserError, match="set optimizer.state=int8 and train.masters=float32 back") as caught:
        check_changes([*CHANGES, *kept], ["optimizer", "data", "train"])
    assert "allow_changes" not in str(caught.value) and "optimizer.lr" not in str(caught.value)
    with pytest.raises(UserError, match=r"allow_changes=\[optimizer.lr,data.fingerprint\]"):
        check_changes([*CHANGES, *kept], [])
    for change in (Difference("optimizer.name", "adamw", "muon"), Difference("train.dtype", "float32", "float64")):
        with pytest.raises(UserError, match=f"set {change[0]}={change[1]} back") as caught:
            check_changes([change], ["optimizer", "train"])
        assert "allow_changes" not in str(caught.value)
    assert check_changes([Difference("train.dtype", "float32", "bfloat16")], []) == ["train.dtype: float32 -> bfloat16"]


def test_named_changes_pass_and_are_printed():
    lines = check_changes(CHANGES, ["optimizer", "data.fingerprint"])
    assert len(lines) == 5 and lines[0] == "train.steps: 10 -> 20" and lines[4] == "scheduler.name: cosine -> null"
    with pytest.raises(UserError, match="optimizer.lr"):
        check_changes(CHANGES, ["optimizer.l", "data"])
    for key in ("model.path", "run.seed", "tokenizer"):
        with pytest.raises(UserError, match=key):
            check_changes([Difference(key, 1, 2)], [])


def test_null_refuses_a_used_directory(tmp_path):
    run = RunDirectory(tmp_path)
    run.refuse_used(None)
    run.metrics.write_text('{"step": 1, "loss": 0.5}\n')
    with pytest.raises(UserError, match="metrics of an earlier run.*resume=null"):
        run.refuse_used(None)
    run.metrics.unlink()
    (run.checkpoints / "step-1").mkdir(parents=True)
    with pytest.raises(UserError, match="checkpoints of an earlier run"):
        run.refuse_used(None)


def test_a_file_is_the_old_or_the_new_one(tmp_path, monkeypatch):
    file = tmp_path / "config.yaml"
    atomic_write_text(file, "old")

    def fail(descriptor):
        raise OSError("the disk is full")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="full"):
        atomic_write_text(file, "new")
    assert file.read_text() == "old"


# ---- file systems that do less


def answer(monkeypatch, function, code):
    """Let a system call answer as a file system without it does; fsync for directories only."""
    module = os if function == "fsync" else fcntl
    own = getattr(module, function)

    def answered(file, *arguments):
        if function == "fsync" and not stat.S_ISDIR(os.fstat(file if isinstance(file, int) else file.fileno()).st_mode):
            return own(file, *arguments)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(module, function, answered)


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_that_does_not_sync_directories_is_noted(tmp_path, monkeypatch, capsys, code):
    shape = ("checkpoint.every=5", "checkpoint.export=final")
    usual = run(tiny_recipe(tmp_path, *shape, name="usual"))
    assert "does not sync directories" not in capsys.readouterr().out
    answer(monkeypatch, "fsync", code)
    recipe = run(tiny_recipe(tmp_path, *shape, f"data.cache_dir={tmp_path}/cache"))
    assert capsys.readouterr().out.count("does not sync directories") == 1
    assert trajectory(recipe) == trajectory(usual)
    longer = run(tiny_recipe(tmp_path, *shape, "train.steps=12"))
    assert [row["step"] for row in metrics(longer)] == list(range(1, 13))


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK, errno.EINVAL])
def test_a_file_system_without_locks_is_named_with_the_key(tmp_path, monkeypatch, code):
    write_rows(tmp_path / "rows.jsonl")
    run(tiny_recipe(tmp_path, "train.steps=3", name="cached"))
    answer(monkeypatch, "lockf", code)
    with pytest.raises(UserError, match="run.dir: this file system has no file locks .*Set run.lock=false"):
        run(tiny_recipe(tmp_path))
    shape = ("run.lock=false", "checkpoint.every=10")
    run(tiny_recipe(tmp_path, *shape))
    validate(tiny_recipe(tmp_path, *shape, "train.steps=12"))
    again = run(tiny_recipe(tmp_path, *shape, "train.steps=12"))
    assert [row["step"] for row in metrics(again)] == list(range(1, 13))
    answer(monkeypatch, "flock", code)
    (tmp_path / "rows.jsonl").write_text((tmp_path / "rows.jsonl").read_text() * 2)
    with pytest.raises(UserError, match=r"\.lock: this file system has no file locks .*Set data\.cache_dir"):
        run(tiny_recipe(tmp_path, "run.lock=false", name="other"))


@pytest.mark.parametrize(("call", "file"), [("pwrite", "lock"), ("fsync", ".began.json.new")])
def test_a_full_disk_at_the_start_is_named(tmp_path, monkeypatch, call, file):
    run(tiny_recipe(tmp_path, "train.steps=3", name="cached"))

    own = getattr(os, call)

    def full(file, *arguments):
        if stat.S_ISDIR(os.fstat(file).st_mode):
            return own(file, *arguments)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, full)
    with pytest.raises(UserError, match=rf"{tmp_path}/runs/run/{file}: No space left on device"):
        run(tiny_recipe(tmp_path))
