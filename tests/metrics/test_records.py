"""Records of a run, read again while others write; and small plots for a terminal."""

import json
import random

from dtrain.training.metrics import records
from dtrain.training.metrics.records import AnswerFile, LineFollower, read_rows
from dtrain.training.metrics.terminal import plot, shorten_to_line


def test_lines_are_read_once_whole_and_anew_where_a_file_was_cut_or_replaced(tmp_path):
    path = tmp_path / "a.jsonl"
    lines = LineFollower(path)
    assert list(lines.read_new()) == []
    path.write_bytes(b"one\ntwo\nthr")
    assert list(lines.read_new()) == [(0, b"one\n"), (4, b"two\n")]
    with path.open("ab") as file:
        file.write(b"ee\n")
    assert list(lines.read_new()) == [(8, b"three\n")] and lines.num_restarts == 0 and list(lines.read_new()) == []
    path.write_bytes(b"one\n")  # cut, as a resume does
    assert list(lines.read_new()) == [(0, b"one\n")] and lines.num_restarts == 1
    fresh = path.with_suffix(".new")
    fresh.write_bytes(b"eno\nmore\n")  # replaced by a longer one
    fresh.replace(path)
    assert list(lines.read_new()) == [(0, b"eno\n"), (4, b"more\n")] and lines.num_restarts == 2


def test_a_line_that_is_too_long_is_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "LONGEST_LINE", 100)
    path = tmp_path / "a.jsonl"
    for long in (99, 100, 101, 150, 200, 250):
        path.write_bytes(b"one\n" + b"x" * long + b"\ntwo\n")
        lines = LineFollower(path)
        found = [line for _, line in lines.read_new()]
        assert found[0] == b"one\n" and found[-1] == b"two\n" and len(found) + lines.num_skipped == 3
        assert lines.num_skipped == (long >= 100) and list(lines.read_new()) == [] and lines.num_restarts == 0


def test_rows_leave_out_what_is_damaged(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"a": 1}\n[]\n{"a"\n\xff\n{"a": NaN}\n{"a": 3}')
    assert [str(row["a"]) for row in read_rows(tmp_path / "a.jsonl")] == ["1", "nan"] and list(
        read_rows(tmp_path / "no")
    ) == []


def test_answers_are_found_by_their_steps_in_any_order_of_the_file(tmp_path):
    path, draw = tmp_path / "samples.jsonl", random.Random(0)
    written = [{"step": draw.randrange(5), "group": n, "prompt": "p", "completion": f"c{n}"} for n in range(200)]
    written[7] = {"completion": "other order", "step": 2, "group": 7}
    path.write_text("".join(json.dumps(row) + "\n" for row in written[:150]))
    index = AnswerFile(path)
    assert index.refresh() and not index.refresh()
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in written[150:])
    assert index.refresh()
    for step in range(5):
        assert [one.index for one in index.read_step(step)] == [row["group"] for row in written if row["step"] == step]
    path.write_text("")
    assert index.refresh() and not index.steps and list(index.read_step(2)) == []


def test_a_plot_spans_the_values_and_keeps_a_single_spike():
    spike = [(n, 0.0) for n in range(10_000)]
    spike[5050] = (5050, 1.0)  # in the middle of a column
    lines = plot(spike, width=40, height=4)
    assert len(lines) == 5 and lines[0].startswith("1 ┤") and lines[3].startswith("0 ┤") and "9999" in lines[-1]
    drawn = [line[3:] for line in lines[:4]]
    assert len(drawn[0].replace("\u2800", "")) == 1 and len(drawn[3]) == 40
    rising = plot([(1.0, 1.0), (2.0, 2.0), (3.0, 3.0)], width=10, height=5)
    assert [len(line[3:].rstrip("\u2800")) for line in rising[:5]] == sorted(
        (len(line[3:].rstrip("\u2800")) for line in rising[:5]), reverse=True
    )
    assert plot([(1.0, 1.0)]) == plot([]) == [] and len(plot([(1, 2.0), (2, 2.0)])) == 6


def test_a_text_on_one_line_is_short_and_harmless():
    assert shorten_to_line("a\n b\x1b[31m\tc\ud800", 40) == "a b\\x1b[31m c\\ud800"
    assert shorten_to_line("x" * 100, 10) == "x" * 9 + "…"
