"""Comparison of two runs of a method: metrics, completions and weights."""

import json

import pytest

from dtrain.recipe.schema import Recipe
from tests.running import assert_same_rows, assert_same_weights, metrics, run_directory, trajectory, weights

# Times and what the process holds; on another mesh they are others.
CLOCKS = ("_time", "per_sec", "mfu", "gib")


def rows_of(recipe: Recipe) -> list[dict]:
    """Return a run's training rows without times and memory."""
    return [row for row in _without_clocks(recipe) if "loss" in row]


def _without_clocks(recipe):
    rows = []
    for row in metrics(recipe):
        row = {name: row[name] for name in row if not name.endswith(CLOCKS)}
        if "tokens" in row:  # which of them are shared depends on the mesh
            row["tokens"] += row.pop("shared_tokens", 0)
        rows.append(row)
    return rows


def samples_of(recipe: Recipe) -> list[dict]:
    """Return the completions that a run has written, none where its method draws none."""
    path = run_directory(recipe) / "samples.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def assert_same_metrics(recipe: Recipe, reference: Recipe, rtol: float = 1e-9) -> None:
    """Assert that two runs have the same rows of metrics.jsonl, but for times and memory.

    Until the first step with a rate above 0, policy and reference are one model: a pair's margin is rounding noise, and
    so is the share of margins above 0.
    """
    name = recipe.run.name
    ours, theirs = ([row[:2] for row in trajectory(side)] for side in (recipe, reference))
    assert_same_rows(ours, theirs, rtol, rtol, name)
    for row, expected in zip(_without_clocks(recipe), _without_clocks(reference), strict=True):
        is_noise = abs(expected.get("rewards_margin", 1.0)) < 1e-9
        names = [key for key in expected if not (is_noise and key == "accuracy")]
        values, right = {key: row.get(key) for key in names}, {key: expected[key] for key in names}
        assert values == pytest.approx(right, rel=rtol, abs=1e-12), name


def assert_same_samples(recipe: Recipe, reference: Recipe) -> None:
    """Assert that two runs drew the same completions; their numbers to 1e-9."""
    for sample, expected in zip(samples_of(recipe), samples_of(reference), strict=True):
        assert sample.keys() == expected.keys()
        for field, value in expected.items():
            if isinstance(value, float | dict):
                value = pytest.approx(value, rel=1e-9, abs=1e-12)
            assert sample[field] == value, f"{recipe.run.name}: {field}"


def assert_same_run(recipe: Recipe, reference: Recipe) -> None:
    """Assert that two runs in float64 have the same metrics, completions and last weights, to 1e-9."""
    assert_same_metrics(recipe, reference)
    assert_same_samples(recipe, reference)
    assert_same_weights(weights(recipe), weights(reference), 1e-9)
