"""Rows and sinks: the fields of metrics.jsonl, cuts on resume, sinks that fail, and what a terminal and a pipe show."""

import io
import json
import re
import sys
import types

import pytest
import torch

from dtrain.base.errors import UserError
from dtrain.base.hardware import peak_flops
from dtrain.recipe import schema
from dtrain.training import metrics
from dtrain.training.metrics.terminal import Progress

ROW = {"epoch": 0.25, "loss": 1 / 3, "grad_norm": 2 / 3, "lr": 1e-5, "tokens": 12345, "tokens_per_sec": 1234.5}


def build(run_dir, stream=None, is_main=True, **fields):
    section = schema.Metrics(**{"tensorboard": False, **fields})
    return metrics.build(section, run_dir, "run: {name: x}", is_main, stream=stream or io.StringIO())


def read(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_rows_have_the_fields_in_order_unrounded_and_at_once(tmp_path):
    run = build(tmp_path / "run")
    run.start(0, 2)
    run.train_row(1, data_time=0.5, mfu=None, custom=7, **ROW)
    text = (tmp_path / "run" / "metrics.jsonl").read_text()  # before close: flushed
    assert text.endswith("\n")
    row = json.loads(text)
    assert list(row) == ["step", "epoch", "loss", "grad_norm", "lr", "tokens", "tokens_per_sec", "data_time", "custom"]
    assert row == {"step": 1, "data_time": 0.5, "custom": 7, **ROW}
    run.val_row(1, val_loss=0.1 + 0.2)
    assert read(tmp_path / "run")[1] == {"step": 1, "val_loss": 0.1 + 0.2}
    run.close()
    run.close()


def test_every_thins_the_views_and_the_terminal_but_not_the_record(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    stream = io.StringIO()
    run = build(tmp_path, stream, every=4, tensorboard=True)
    run.start(0, 10)
    for step in range(1, 11):
        run.train_row(step, loss=float(step))
    run.val_row(10, val_loss=0.5)
    run.close()
    assert [row["step"] for row in read(tmp_path)] == [*range(1, 11), 10]
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(4, 4.0), (8, 8.0), (10, 10.0)]
    assert [(event.step, event.value) for event in events.Scalars("val/loss")] == [(10, 0.5)]
    assert "step 1/10" not in stream.getvalue() and "step 10/10" in stream.getvalue()


@pytest.mark.parametrize(("at", "kept"), [(0, 0), (2, 5), (9, 7)])
def test_a_resume_cuts_later_rows_and_a_torn_line(tmp_path, at, kept):
    lines = [{"step": 0, "eval_reward_mean": 0.5}, {"step": 1, "loss": 1.0}, {"step": 1, "val_loss": 2}]
    lines += [{"step": 2, "loss": 0.1}, {"step": 2, "val_loss": 2}]
    lines += [{"step": 3, "loss": 0.3}, {"step": 4, "loss": 0.4}]
    whole = [json.dumps(row) + "\n" for row in lines]
    (tmp_path / "metrics.jsonl").write_text("".join(whole) + '{"step": 5, "lo')
    run = build(tmp_path)
    run.resume_at(at)
    assert (tmp_path / "metrics.jsonl").read_text() == "".join(whole[:kept])
    run.train_row(at + 1, loss=7.0)
    assert read(tmp_path) == [*lines[:kept], {"step": at + 1, "loss": 7.0}]


def test_a_resume_hides_later_events_of_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for start, stop in ((0, 6), (3, 8)):
        run = build(tmp_path, tensorboard=True)
        run.resume_at(start)
        for step in range(start + 1, stop + 1):
            run.train_row(step, loss=start + step / 10)
        run.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"), purge_orphaned_data=True).Reload()
    found = [(event.step, round(event.value, 3)) for event in events.Scalars("train/loss")]
    assert found == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 3.4), (5, 3.5), (6, 3.6), (7, 3.7), (8, 3.8)]


def test_other_ranks_write_nothing(tmp_path, capfd):
    run = build(tmp_path / "run", is_main=False, tensorboard=True)
    run.resume_at(0)
    run.start(0, 1)
    run.train_row(1, loss=1.0)
    run.print_line("hello")
    run.close()
    assert not (tmp_path / "run").exists()
    assert capfd.readouterr() == ("", "")


def test_a_failed_sink_is_warned_of_once_and_training_goes_on(tmp_path):
    stream = io.StringIO()
    run = build(tmp_path, stream, tensorboard=True)
    (tmp_path / "tensorboard").write_text("a file where the directory should be")
    for step in (1, 2, 3):
        run.train_row(step, loss=1.0)
    run.close()
    assert len(read(tmp_path)) == 3
    assert stream.getvalue().count("warning: TensorBoard failed") == 1


def test_a_full_disk_under_the_record_is_told(tmp_path):
    stream = io.StringIO()
    run = build(tmp_path, stream)
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    run.start(0, 9)
    run.train_row(1, loss=1.0)
    run.train_row(2, loss=1.0)
    run.close()
    assert "metrics.jsonl failed" in stream.getvalue() and "No space left" in stream.getvalue()


def test_auto_says_which(tmp_path, monkeypatch):
    assert "tensorboard is installed" in build(tmp_path, tensorboard="auto").choices[0]
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.setattr("dtrain.training.metrics.metrics.is_installed", lambda package: False)
    monkeypatch.setattr("dtrain.training.metrics.trackers.is_installed", lambda package: False)
    assert "off, since tensorboard is not installed (pip install" in build(tmp_path, tensorboard="auto").choices[0]
    for fields, key in (({"tensorboard": True}, "tensorboard"), ({"wandb": "p"}, "wandb")):
        with pytest.raises(UserError, match=rf"metrics\.{key}=.*pip install 'dtrain\[{key}\]'"):
            build(tmp_path, is_main=False, **fields)


class FakeWandb(types.ModuleType):
    """Records what W&B is told; refuses rows when told to."""

    class Error(Exception):
        pass

    def __init__(self):
        super().__init__("wandb")
        self.inits, self.rows, self.broken = [], [], False

    def init(self, **kwargs):
        self.inits.append(kwargs)
        return self

    def define_metric(self, *args, **kwargs):
        pass

    def log(self, row):
        if self.broken:
            raise self.Error("the network is gone")
        self.rows.append(row)

    def finish(self):
        pass


@pytest.fixture
def wandb(monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr("dtrain.training.metrics.trackers.is_installed", lambda package: True)
    return fake


def test_wandb_goes_on_in_the_run_that_it_resumes(tmp_path, wandb):
    for start in (0, 2, 0):
        run = build(tmp_path / "name", wandb="project")
        run.resume_at(start)
        run.train_row(start + 1, loss=1.5)
        run.close()
    first, second, fresh = wandb.inits
    assert (first["project"], first["name"], first["config"]) == ("project", "name", {"run": {"name": "x"}})
    assert first["id"] == second["id"] != fresh["id"]
    assert wandb.rows[1] == {"step": 3, "train/loss": 1.5}


def test_wandb_without_network_does_not_stop_the_run(tmp_path, wandb):
    stream = io.StringIO()
    run = build(tmp_path, stream, wandb="project")
    wandb.broken = True
    run.train_row(1, loss=1.5)
    run.train_row(2, loss=1.5)
    assert stream.getvalue().count("Weights & Biases failed") == 1 and "the network is gone" in stream.getvalue()
    assert len(read(tmp_path)) == 2


def test_a_pipe_gets_plain_lines_and_not_one_per_step(tmp_path):
    stream = io.StringIO()
    run = build(tmp_path, stream)
    run.start(10, 1000)
    for step in range(11, 1001):
        run.train_row(step, loss=1.23456, grad_norm=0.5, lr=1e-5, tokens_per_sec=12345.0, mem_gib=1.5)
    run.close()
    text = stream.getvalue()
    assert all(character.isprintable() or character == "\n" for character in text)
    lines = text.splitlines()
    assert len(lines) == 2
    assert "step 11/1000  loss 1.2346  grad norm 0.5  lr 1.00e-05  12.3k tokens/s  1.5 GiB" in lines[0]
    assert lines[1].startswith("step 1000/1000") and lines[1].endswith("00:00 left")


def test_a_terminal_gets_a_bar_with_everything():
    stream = Terminal()
    bar = Progress(stream)
    bar.start(0, 3)
    for step in (1, 2, 3):
        bar.update({"step": step, "loss": 1.25, "grad_norm": 0.5, "lr": 1e-5, "tokens_per_sec": 999.0, "mem_gib": 0.25})
        bar.print_line(f"saved {step}")
    bar.close()
    plain = re.sub(r"\x1b\[\d*m", "", stream.getvalue())
    last = plain.split("\r")[-1]
    assert "3/3" in last and "loss 1.2500 999 tok/s" in last
    assert "step 2/3  loss 1.2500  grad norm 0.5      lr 1.00e-05  999 tok/s    0.2 GiB\n" in plain
    assert "saved 2\n" in plain and plain != stream.getvalue()


@pytest.mark.parametrize("total", [7, 1234, 100_000])
def test_a_bar_is_whole_at_80_columns_and_its_lines_are_few(total, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    stream = Terminal()
    bar = Progress(stream)
    bar.start(0, total)
    row = {"loss": 12.3456, "reward_mean": 0.123, "grad_norm": 0.5, "lr": 1e-5, "tokens_per_sec": 123456.0}
    for step in range(1, total + 1):
        bar.update(row | {"step": step})
    bar.close()
    plain = re.sub(r"\x1b\[\d*[mA]", "", stream.getvalue())
    drawn = [line for line in re.split(r"[\r\n]", plain) if "|" in line and not line.endswith("<?")]
    assert drawn and all(len(line) <= 80 and line.rstrip().endswith("reward 0.123 123k tok/s") for line in drawn)
    assert 1 <= plain.count("step ") <= 22
    assert all(len(line) <= 80 for line in re.split(r"[\r\n]", plain) if line.startswith("step "))


def test_the_bar_behind_a_line_is_of_its_step():
    stream = Terminal()
    bar = Progress(stream)
    bar.start(0, 40)
    for step in range(1, 41):
        bar.update({"step": step, "loss": 1.25, "grad_norm": 10.0 ** -(step % 4), "lr": 1e-5, "mem_gib": 0.25})
    bar.close()
    plain = re.sub(r"\x1b\[\d*[mA]", "", stream.getvalue())
    behind = re.findall(r"step +(\d+)/40  .*\n\r.*\| (\d+)/40 ", plain)
    assert len(behind) >= 20 and all(step == drawn for step, drawn in behind)
    lines = [line for line in re.split(r"[\r\n]", plain) if line.startswith("step ")]
    assert len({line.index("  lr ") for line in lines}) == 1


def test_the_time_that_is_left_is_not_guessed_by_the_first_step(monkeypatch):
    monkeypatch.setattr("dtrain.training.metrics.terminal.time.monotonic", lambda: next(clock))
    for steps, told in ((30, []), (300, ["time      about 04:57 for the 297 steps left"])):
        stream, clock = io.StringIO(), iter([0.0, *map(float, range(30, 70))])  # half a minute, then a second each
        run = Progress(stream)
        run.start(0, steps)
        for step in range(1, 30):
            run.update({"step": step, "loss": 1.0})
        assert [line for line in stream.getvalue().splitlines() if line.startswith("time")] == told


def test_what_a_model_says_does_not_steer_the_terminal():
    for stream in (Terminal(), io.StringIO()):
        Progress(stream).print_line("a\x1b[2Jb\rc\x9bd\te")
        assert "a\\x1b[2Jb\\rc\\x9bd\te\n" in stream.getvalue()


@pytest.mark.parametrize(("line", "marked"), [("warning: x", "31m"), ("note: x", "33m"), ("model     x", "1m")])
def test_a_terminal_has_colours_and_a_file_has_none(line, marked):
    for stream in (Terminal(), io.StringIO()):
        Progress(stream).print_line(line)
        assert (marked in stream.getvalue()) is stream.isatty()


def test_nonfinite_numbers_are_readable_again(tmp_path):
    run = build(tmp_path)
    run.train_row(1, loss=float("nan"), grad_norm=float("inf"))
    row = read(tmp_path)[0]
    assert row["loss"] != row["loss"] and row["grad_norm"] == float("inf")


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA L40S", 362),
        ("NVIDIA A10G", 70),
        ("Tesla V100-SXM2-16GB", None),
        ("NVIDIA GeForce RTX 4090", 165),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 5090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("Tesla T4", None),
    ],
)
def test_peaks_by_device_name(name, tflops):
    assert peak_flops(name) == (tflops and tflops * 1e12)


def test_mfu_is_absent_on_the_cpu_and_memory_is_this_process():
    cpu = torch.device("cpu")
    assert metrics.model_flops_utilisation(6e12, 1, cpu, torch.bfloat16) is None
    before = metrics.memory_gib(cpu)
    held = torch.ones(2**26)  # 0.25 GiB
    assert 0.05 < before < metrics.memory_gib(cpu) < before + 1
    del held


def test_mfu_is_a_share_of_all_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    cuda = torch.device("cuda", 0)
    share = metrics.model_flops_utilisation(6e9 * 82417.0, 4, cuda, torch.bfloat16)
    assert share == pytest.approx(6e9 * 82417.0 / (4 * 989e12))
    assert metrics.model_flops_utilisation(6e9 * 82417.0, 4, cuda, torch.float32) is None
