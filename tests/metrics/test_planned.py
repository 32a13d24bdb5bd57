"""The plan beside a run: the peak that the command tells, and nothing where it cannot tell."""

import pytest

from dtrain import config
from dtrain.metrics.planned import PlannedPeak
from dtrain.models.config import read_config
from dtrain.plan.step import plan_step
from tests.tiny import tiny_recipe


def test_a_run_asks_for_its_planned_peak_and_waits_for_nothing(tmp_path):
    recipe = tiny_recipe(tmp_path, "launch.device=cpu")
    path = tmp_path / "config.yaml"
    path.write_text(config.to_yaml(recipe))
    with PlannedPeak(path, 2, "cpu") as planned, PlannedPeak(tmp_path / "gone.yaml", 2, "cpu") as failed:
        assert planned.gib() is None
        expected = plan_step(recipe, read_config(recipe.model.path), config.sizes(recipe, 2), device="cpu").peak
        assert planned.gib(wait=120) == pytest.approx(expected / 2**30, rel=1e-12)
        assert planned.gib() == planned.gib(wait=1)
        assert failed.gib(wait=120) is None
