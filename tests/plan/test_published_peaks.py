"""Peaks that others have published: each says where it stands, the page has the tool's table, and some are planned."""

import re

import pytest

from dtrain.commands.plan.hardware import GPUS
from tests.models.published import CONFIGS
from tests.test_docs import page
from tools.plan_peaks import HEAD, MEDIAN, METHODS, PUBLISHED, WORST, planned_gib, runs

COUNTERS = {"max_memory_allocated", "max_memory_reserved", "active_bytes.all.peak"}


def test_every_figure_says_where_it_stands():
    for source in PUBLISHED["source"]:
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", source["repository"])
        assert re.fullmatch("[0-9a-f]{40}", source["commit"]) and source["measures"] in COUNTERS
    for run in runs():
        assert run.path and run.gib > 0 and run.logits in METHODS
        assert run.gpu in GPUS and run.gib <= GPUS[run.gpu].memory_gib * (2 if run.gpu == "a10" else 1)
        assert PUBLISHED["model"][run.model]["base"] in CONFIGS
    assert all(entry["source"] and entry["why"] for entry in PUBLISHED["skipped"])
    paths = [run.path for run in runs()]
    assert len({*paths}) == len(paths) >= 30


def test_the_page_counts_every_run_and_keeps_the_bounds():
    (rows,) = [rows for rows in page("docs/gpus.md").tables if rows[0] == list(HEAD)]
    *sources, total = rows[1:]
    counted = [
        (source["name"], f"`{source['measures']}`", len(source["run"]), source["note"])
        for source in PUBLISHED["source"]
    ]
    assert [(name, counter, int(count), note) for name, counter, count, _, _, note in sources] == counted
    assert int(total[2]) == len([*runs()])
    median, worst = (float(cell.removesuffix("%")) / 100 for cell in total[3:5])
    assert median <= MEDIAN and worst <= WORST


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    "words",
    [
        ["8xh100", "4B", "rl-full", "16384"],  # FSDP over 8 ranks, reduced after each micro-batch
        ["TinyLlama", "seq512"],  # an adapter in float16, all logits
        ["csv#none", "1 4"],  # an adapter in bfloat16, flash attention
    ],
)
def test_a_plan_is_near_what_was_measured(words):
    (run,) = runs(*words)
    assert abs(planned_gib(run) / run.gib - 1) < 0.03
