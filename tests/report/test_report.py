"""`dtrain report`: what stands on the page is what the run's files say, and nothing else is loaded, run or sent."""

import base64
import hashlib
import http.client
import json
import math
import re
import shutil
import signal
import subprocess
import sys
import threading
import urllib.request
from dataclasses import asdict
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy
import pytest
import yaml

from dtrain.base.errors import UserError
from dtrain.commands.cli import main
from dtrain.commands.report import live
from dtrain.commands.report.charts import MAX_POINTS, histogram, thinned
from dtrain.commands.report.page import MARK, page, page_state
from dtrain.commands.report.results import differences
from dtrain.commands.report.run_files import open_runs
from dtrain.commands.report.sections import picture
from dtrain.commands.web import listen, make_server
from dtrain.training import SECTIONS
from tests.forked_python import ForkedPython

HOSTILE = "</script><script>hit()</script><img src=x onerror=hit()>\"'&\u202e\x1b[31m\ud800\u2028"
ROWS = [
    {"step": n, "loss": 3.0 / n, "lr": 1e-4 * n, "tokens": 100, "step_time": 0.5, "tokens_per_sec": 200.0 + n}
    for n in range(1, 31)
]


class Read(HTMLParser):
    """Tags with their attributes, the texts of scripts, and all other text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.scripts, self.text, self._within = [], [], "", None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._within = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        self._within = None

    def handle_data(self, data):
        if self._within == "script":
            self.scripts[-1] += data
        elif self._within != "style":
            self.text += data


def write_run(directory, rows, recipe=None, *, about=None, samples=(), evals=()):
    directory.mkdir(parents=True, exist_ok=True)
    tree = {"method": "sft", "model": {"path": "m"}, "optimizer": {"lr": 1e-4}, **(recipe or {})}
    (directory / "config.yaml").write_text(yaml.safe_dump(tree))
    for name, lines in (("metrics", rows), ("samples", samples), ("evals", evals)):
        if lines:
            (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    if about:
        (directory / "about.json").write_text(json.dumps(about))
    return directory


def built(*directories, library="/* the library */"):
    data, html = page_state(open_runs(directories), 8)
    return data, Read(page(data, html, library))


def line_of(data, field, run=0):
    (line,) = (one for chart in data["charts"] for one in chart["lines"] if (one["field"], one["run"]) == (field, run))
    return line


def test_the_page_holds_the_metrics_of_every_run_unchanged(tmp_path):
    other = [{**row, "loss": row["loss"] * 2} for row in ROWS[:20]]
    val = [{"step": 10, "val_loss": 0.7, "eval_sums_reward_mean": 0.1, "eval_sums_pass@4": 0.3}]
    runs = write_run(tmp_path / "a", ROWS + val), write_run(tmp_path / "b", other, {"optimizer": {"lr": 3e-4}})
    made, read = built(*runs)
    data = json.loads(next(s for s, (_, given) in zip(read.scripts, scripts(read), strict=True) if "type" in given))
    assert data == json.loads(json.dumps(made)) and data["runs"] == ["a", "b"]
    for number, rows in enumerate((ROWS, other)):
        for field in ("loss", "lr", "tokens_per_sec", "step_time"):
            line = line_of(data, field, number)
            assert (line["x"], line["y"]) == ([row["step"] for row in rows], [row[field] for row in rows])
    assert line_of(data, "val_loss")["y"] == [0.7] and line_of(data, "eval_sums_pass@4")["y"] == [0.3]
    loss = next(chart for chart in data["charts"] if chart["title"] == "Loss")
    assert [line["field"] for line in loss["lines"]] == ["loss", "val_loss", "loss"]
    axes = data["axes"][0]
    assert axes["tokens"] == [100.0 * n for n in range(1, 31)] and axes["hours"][-1] == pytest.approx(15 / 3600)
    assert re.search(r"optimizer\.lr\s*0\.0001\s*0\.0003", read.text)
    assert len(read.text) > 500 and "best 0.7" not in read.text


def scripts(read):
    return [one for one in read.tags if one[0] == "script"]


def test_nothing_is_fetched_and_only_dtrains_scripts_may_run(tmp_path):
    _, read = built(write_run(tmp_path / "a", ROWS), library="const x = '</script>';\r\nhit")
    for tag, given in read.tags:
        assert tag not in ("img", "iframe", "object", "embed", "base", "form", "video", "audio")
        assert not {"src", "srcset", "data", "action"} & given.keys()
        assert given.get("href", "#").startswith("#") or (tag, given["href"]) == ("link", "data:,")
        assert not [name for name in given if name.startswith("on") or name == "style"]
    (policy,) = (given["content"] for tag, given in read.tags if given.get("http-equiv") == "Content-Security-Policy")
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'" and rules["base-uri"] == rules["form-action"] == "'none'"
    assert "connect-src" not in rules and rules["img-src"] == "data:"
    run = [text for text, (_, given) in zip(read.scripts, scripts(read), strict=True) if "type" not in given]
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in run]
    assert rules["script-src"].split() == [f"'sha256-{one}'" for one in digests] and len(run) == 2


def test_words_of_a_run_are_text_wherever_they_stand(tmp_path):
    answer = {"set": HOSTILE, "index": 0, "sample": 0, "prompt": [{"role": HOSTILE, "content": HOSTILE}] * 2}
    answer |= {"text": HOSTILE, "reward": 1.0, "rewards": {HOSTILE: 1.0, "b": 0.0}, "completion_len": 4}
    completion = {"group": 3, "prompt": HOSTILE, "completion": HOSTILE, "reward": 0.5, "rewards": {HOSTILE: 1, "b": 2}}
    rows = [{"step": 1, "loss": 1.0, HOSTILE: 2.0, f"reward/{HOSTILE}": 1.0, f"eval_{HOSTILE}_reward_mean": 1.0}]
    recipe = {"model": {"path": HOSTILE.encode("utf-8", "replace").decode()}, "data": {"train": {"path": "<b>"}}}
    about = {"device": HOSTILE, "dtrain": HOSTILE, "mesh": {"dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 1}}
    runs = [
        write_run(
            tmp_path / "<i>&amp;" / name,
            rows,
            {**recipe, "run": {"tags": name}, "method": "<u>"},
            about=about,
            samples=[
                {"step": 1, **completion, "tokens": 3, "finish": "length"},
                {"step": 1, **completion, "reward": None},
            ],
            evals=[{"step": step, **answer} for step in (0, 1)],
        )
        for name in ("<script>hit()", "two")
    ]
    data, html = page_state(open_runs(runs), 8)
    text = page(data, html, "")
    read = Read(text)
    assert len(scripts(read)) == 3 and "hit()" in read.text
    assert not {"img", "u"} & {tag for tag, _ in read.tags}
    assert not [given for _, given in read.tags if "onerror" in given]
    assert "\x1b" not in text and text.encode() and "\\x1b[31m" in read.text
    assert not re.search("[<>&]", read.scripts[0])
    held = json.loads(read.scripts[0])
    assert held["runs"][0] == "<script>hit()" and any(
        HOSTILE in line["field"] for c in held["charts"] for line in c["lines"]
    )


def test_gaps_damaged_lines_and_missing_files(tmp_path):
    run = write_run(tmp_path / "a", [{"step": 1, "loss": 1.0, "mem_gib": 2.0}], about={"planned": 3 << 30})
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 2, "loss": NaN}\n{"step": 3, "loss": Infinity}\nno row\n\xff\n{"loss": 1}\n[1]\n')
        file.write(b'{"step": 4, "loss": 1e999}\n{"step": 5, "loss": true}\n{"step": 6, "loss": 2.0}\n{"step": 7, "lo')
    data, read = built(run)
    assert line_of(data, "loss")["x"] == [1, 2, 3, 4, 6] and line_of(data, "loss")["y"] == [1.0, None, None, None, 2.0]
    assert "3 not finite" in read.text and "4 damaged" in read.text
    memory = next(chart for chart in data["charts"] if chart["title"].startswith("Peak memory"))
    assert memory["levels"] == [{"run": 0, "name": "planned", "y": 3.0}]
    absurd = dict.fromkeys(("planned", "started", "parameters", "trained", "steps", "memory_before_gib"), 10**400)
    samples = [
        {"step": 1, "completion": "c", "reward": 1e308, "tokens": 10**400},
        {"step": 1, "completion": "c", "tokens": 1},
    ]
    rows = [{"step": n, "loss": value, "tokens": 1e308} for n, value in enumerate((1e308, -1e308, 1e308, 1.0))]
    wild = write_run(tmp_path / "wild", rows, about={**absurd, "mesh": {"dp_shard": -1}}, samples=samples)
    (wild / "data.json").write_text('{"train": {"rows": 1e999, "tokens": "many"}}')
    data, _ = built(wild)
    assert line_of(data, "loss")["y"] == [None, None, None, 1.0] and main(["compare", str(wild)]) == 0
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.yaml").write_text("method: grpo\n")
    data, read = built(bare)
    assert data["charts"] == [] and "no step yet" in read.text and "no row of metrics yet" in read.text
    (bare / "config.yaml").write_text("a: [")
    with pytest.raises(UserError, match="config.yaml is damaged"):
        open_runs([bare])


def test_long_curves_keep_their_first_last_and_extremes(tmp_path):
    steps, values = list(range(50_000)), [math.sin(n / 700) for n in range(50_000)]
    values[12_345], values[23_456], values[34_567] = 9.0, -9.0, None
    x, y = thinned(steps, values)
    assert (
        len(x) <= MAX_POINTS + 1
        and x == sorted(set(x))
        and all(values[step] == value for step, value in zip(x, y, strict=True))
    )
    assert {0, 12_345, 23_456, 34_567, 49_999} <= set(x)
    assert thinned(steps[:MAX_POINTS], values[:MAX_POINTS]) == (steps[:MAX_POINTS], values[:MAX_POINTS])
    for size in (1, 2, 3, 7):  # each stretch of the curve keeps its own extremes nearly
        assert len(thinned(list(range(size)), [1.0] * size)[0]) == size
    _, read = built(write_run(tmp_path / "a", [{"step": n, "loss": 1.0} for n in range(1, 3001)]))
    assert "its curves have up to 3,000 points" in read.text


def test_answers_stand_side_by_side_and_groups_by_their_rewards(tmp_path):
    evals = [
        {"step": step, "set": "sums", "index": index, "sample": 0, "prompt": f"q{index}", "text": f"a{index}@{step}"}
        | {"reward": step / 10, "completion_len": 5, "truncated": step == 0}
        for step in range(0, 100, 10)
        for index in range(20)
    ]
    samples = [
        {
            "step": step,
            "group": group,
            "prompt": "p",
            "completion": f"c{reward}@{step}",
            "reward": reward,
            "advantage": 0.0,
        }
        | {"tokens": 10 * step, "finish": "stop"}
        for step in (1, 2, 3)
        for group in (0, 1)
        for reward in (([0.0, 0.0], [0.2, 1.0])[group])
    ]
    run = write_run(tmp_path / "a", ROWS, evals=evals, samples=samples)
    _, html = page_state(open_runs([run]), 4)
    text = Read(html["answers"]).text
    assert [f"a3@{step}" in text for step in (0, 10, 20, 90)] == [True, False, True, True] and "a4@0" not in text
    assert "4 of 20 prompts" in text and "cut off" in text
    text = Read(html["groups"]).text
    assert all(f"step {step}: prompt 1" in text for step in (1, 2, 3)) and "c0.0@3" not in text
    assert text.index("c1.0@3") < text.index("c0.2@3")  # the best first
    long = "x" * 10_000
    write_run(run, ROWS, evals=[{**evals[0], "text": long}])
    _, html = page_state(open_runs([run]), 4)
    assert "[8,500 more characters]" in html["answers"] and long not in html["answers"]


def test_a_histogram_counts_every_completion_once():
    lengths = [1, 1, 5, 300, 4096, 4096]
    (line,) = histogram("h", "t", "tokens", [(0, "step 1", lengths)])["lines"]
    edges, shares = line["x"], line["y"][:-1]
    assert sum(shares) == pytest.approx(1) and edges[0] == 1 and edges[-1] > 4096
    for left, right, share in zip(edges[:-1], edges[1:], shares, strict=True):
        assert share == pytest.approx(sum(left <= value < right for value in lengths) / 6)


def test_the_mesh_shows_the_ranks_row_by_row_as_a_device_mesh_numbers_them():
    sizes = {"dp_replicate": 2, "dp_shard": 3, "cp": 2, "tp": 2}

    def ranks_of(box):
        """The ranks of a box of HTML, nested as its boxes are; each depth has the class of its dimension."""
        assert box.tag == "b" or box.get("class").split()[0] == list(sizes)[depth(box)]
        return int(box.text) if box.tag == "b" else [ranks_of(inner) for inner in box]

    def depth(box):
        return 0 if box is drawn else 1 + depth(next(outer for outer in drawn.iter() if box in list(outer)))

    drawn = ElementTree.fromstring(picture(sizes))
    assert ranks_of(drawn) == numpy.arange(24).reshape(2, 3, 2, 2).tolist()
    large = picture({"dp_replicate": 1, "dp_shard": 128, "cp": 1, "tp": 8})
    assert "⋯" in large and ">1023<" in large and len(large) < 10_000


def test_the_live_page_follows_and_answers_this_machine_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(live, "REST_FACTOR", 0)
    run = write_run(tmp_path / "a", ROWS[:3])
    sock = listen(live.ADDRESS, 0)
    address, port = sock.getsockname()
    assert address == "127.0.0.1"
    server = make_server(live.make_app(live.LiveReport(open_runs([run]), 8, "")), logs=None)
    thread = threading.Thread(target=server.run, args=([sock],), daemon=True)
    thread.start()
    try:

        def ask(path, host=None):
            client = http.client.HTTPConnection(address, port, timeout=10)
            client.request("GET", path, headers={} if host is None else {"Host": host})
            answer = client.getresponse()
            return answer.status, answer.read().decode()

        for host in ("evil.example", f"evil.example:{port}", "localhost.evil.example", ""):
            assert ask("/", host)[0] == ask("/state", host)[0] == 400
        assert ask("/", f"LOCALHOST:{port}")[0] == 200 and ask("/metrics.jsonl")[0] == 404
        status, text = ask("/")
        seen = re.search(r'data-live="(\w+)"', text)[1]
        assert status == 200 and MARK in text and "connect-src 'self'" in text
        assert ask(f"/state?seen={seen}") == (204, "")
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(ROWS[3]) + '\n{"step": 5, "loss"')
        fresh = json.loads(ask(f"/state?seen={seen}")[1])
        assert line_of(fresh["data"], "loss")["x"] == [1, 2, 3, 4] and fresh["seen"] != seen
        write_run(run, ROWS[:2])  # as a resume cuts it
        assert line_of(json.loads(ask("/state")[1])["data"], "loss")["x"] == [1, 2]
        (run / "config.yaml").write_text("a: [")
        assert ask("/state")[0] == 503
    finally:
        server.should_exit = True
        thread.join(10)


def test_ctrl_c_ends_the_live_page_with_status_0(tmp_path):
    run = write_run(tmp_path / "a", ROWS[:3])
    command = [sys.executable, "-m", "dtrain", "report", str(run), "--live", "--port", "0"]
    with ForkedPython(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        line = process.stdout.readline()
        url = line.split()[0]
        assert urllib.request.urlopen(f"{url}/state", timeout=60).status == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        assert process.stdout.read() == ""


def test_the_live_page_says_which_libraries_it_lacks(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "httptools", None)
    assert main(["report", str(write_run(tmp_path / "a", ROWS)), "--live"]) == 1
    assert "dtrain report --live needs httptools" in (error := capsys.readouterr().err)
    assert "pip install 'dtrain[serve]'" in error


def test_what_cannot_be_reported_is_told_and_nothing_is_overwritten(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("dtrain.commands.report.page.plotly", lambda: "")
    run = str(write_run(tmp_path / "runs" / "a", ROWS))
    (tmp_path / "empty").mkdir()
    out = tmp_path / "r.html"
    for words, message in (
        (
            [str(tmp_path / "runs" / "b")],
            "is not a directory: give the directory of a run, .*; the runs in .*runs are a",
        ),
        ([str(tmp_path / "runs")], "is not the directory of a run: .*it contains the runs a"),
        ([str(tmp_path / "empty")], "is not the directory of a run: it has no metrics.jsonl"),
        ([run, "-o", str(tmp_path)], "is a directory: name a file"),
        ([run, "-o", f"{run}/config.yaml"], "is not a report of dtrain"),
        ([run, "-o", str(tmp_path / "no" / "r.html")], "No such file"),
        ([run, "--live", "--port", "70000"], "cannot listen"),
    ):
        assert main(["report", *words]) == 1
        assert re.search(message, capsys.readouterr().err), words
    assert (tmp_path / "runs" / "a" / "config.yaml").read_text().startswith("method")
    assert main(["report", run, "-o", str(out)]) == main(["report", run, run, "-o", str(out)]) == 0
    assert "wrote" in capsys.readouterr().out and out.read_text().count(run) >= 2  # alike names are told apart


def test_without_the_library_the_command_says_what_to_install(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "plotly.offline", None)
    assert main(["report", str(write_run(tmp_path / "a", ROWS))]) == 1
    assert "pip install 'dtrain[report]'" in capsys.readouterr().err


def test_compare_tells_the_same_in_the_terminal(tmp_path, capsys):
    val = [{"step": step, "val_loss": loss} for step, loss in ((10, 0.9), (20, 0.5), (30, 0.6))]
    one = write_run(tmp_path / "a", ROWS + val)
    two = write_run(tmp_path / "b\x1b[31m", ROWS[:15], {"optimizer": {"lr": 2e-4}, "note": "x " * 300})
    assert main(["compare", str(one), str(two)]) == 0
    said = capsys.readouterr().out
    assert "\x1b" not in said and "b\\x1b[31m" in said
    assert re.search(r"^optimizer\.lr +0\.0001 +0\.0002$", said, re.MULTILINE)
    first, last = (sum(row["loss"] for row in part) / 10 for part in (ROWS[:10], ROWS[-10:]))
    assert f"{first:.4g} → {last:.4g} ★" in said and "0.9 → 0.6, best 0.5 at" in said
    assert said.count("⣀") + said.count("⠤") > 5 and max(map(len, said.splitlines())) <= 110


def test_runs_of_two_methods_differ_in_what_is_no_default(tmp_path):
    sections = {name: asdict(SECTIONS[name]()) for name in ("sft", "grpo", "dpo")}
    answers = {"method": "grpo", "grpo": {**sections["grpo"], "group_size": 4}}
    runs = [
        write_run(tmp_path / "plain", ROWS, {"sft": sections["sft"]}),
        write_run(tmp_path / "older", ROWS, sections),  # as an earlier version saved it
        write_run(tmp_path / "answers", ROWS, answers),
    ]
    assert differences(open_runs(runs[:2])) == []
    rows = {row.label: row.texts for row in differences(open_runs([runs[0], runs[2]]))}
    assert rows == {"method": ["sft", "grpo"], "grpo.group_size": ["8", "4"]}
    rows = {row.label: row.texts for row in differences(open_runs(runs[1:]))}
    assert rows == {"method": ["sft", "grpo"], "grpo.group_size": ["8", "4"]}


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs a browser")
@pytest.mark.processes
def test_a_browser_draws_every_chart_and_has_nothing_to_complain_of(tmp_path):
    pytest.importorskip("plotly")
    evals = [{"step": n, "set": HOSTILE, "index": 0, "prompt": "p", "text": HOSTILE, "reward": 1.0} for n in (1, 2)]
    rows = [{**row, HOSTILE: 1.0, "val_loss": None if n % 5 else 1.0} for n, row in enumerate(ROWS)]
    runs = [write_run(tmp_path / name, rows, evals=evals, about={"planned": 1 << 30}) for name in ("a", "<b>")]
    out = tmp_path / "report.html"
    assert main(["report", *map(str, runs), "-o", str(out)]) == 0
    words = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    words += ["--enable-logging=stderr", "--virtual-time-budget=20000", "--dump-dom", out.as_uri()]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    assert not [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    read = Read(done.stdout)
    assert dict(read.tags)["html"]["data-drawn"] == "yes"
    plots = [given for tag, given in read.tags if "js-plotly-plot" in given.get("class", "")]
    assert len(plots) == len(page_state(open_runs(runs), 8)[0]["charts"]) > 5
    assert "img" not in {tag for tag, _ in read.tags}
