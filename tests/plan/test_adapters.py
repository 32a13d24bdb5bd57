"""Plans of adapters: their bytes against those of real steps, what a plan tells of them, and the sizes that are
promised."""

import json

import pytest

from dtrain import config
from dtrain.models.config import read_config
from dtrain.plan import report
from dtrain.plan.hardware import GPUS
from dtrain.plan.plan import make_plan
from dtrain.plan.step import plan_step
from tests.plan.test_peak import SHAPE, peaks_of_a_step
from tests.plan.test_traffic import trained
from tests.test_recipes import LLAMA_3_1_8B
from tests.tiny import tiny_recipe, write_model
from tests.world import run_world

pytestmark = pytest.mark.turns(6)

MIXED = "train.dtype=bfloat16"
CASES = {
    "one process, mixed": (1, ["lora.rank=8", MIXED, "train.activation_checkpointing=full"]),
    "one process, float32": (1, ["lora.rank=8", "train.dtype=float32"]),
    "dora, dropout, dp2": (2, ["lora.dora=true", "lora.dropout=0.1", MIXED]),
    "tp2, the head trained whole": (2, ["lora.modules_to_save=[lm_head]", "parallel.tp=2", MIXED]),
    "dpo, against the adapter off": (1, ["method=dpo", "lora={}", "train.micro_batch=1", MIXED]),
    "dpo, the reference moves": (1, ["method=dpo", "lora={}", "train.micro_batch=1", MIXED, "dpo.sync_every=2"]),
    "q and v of some layers, cp2": (2, ["lora.target=.*layers.[02].*[qv]_proj", "parallel.cp=2", MIXED]),
}
SAMPLED = ("one process, mixed", "dpo, against the adapter off")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in SAMPLED else pytest.mark.full) for name in CASES]
)
def test_the_planned_peak_is_that_of_a_real_step(tmp_path, name):
    ranks, options = CASES[name]
    path = write_model(tmp_path / "model", "qwen3", tied=False, **SHAPE)
    settings = [f"model.path={path}", "data.max_length=256", "launch.device=cpu"]
    recipe = tiny_recipe(tmp_path, *settings, "train.global_batch=4", "train.micro_batch=2", *options)
    planned = plan_step(recipe, read_config(path), config.sizes(recipe, ranks), device="cpu").peak
    living, allocated, process = max(run_world(peaks_of_a_step, ranks, recipe, ranks))
    print(f"{name}: planned {planned:,}, living {living:,}, allocated {allocated:,}, process {process:,} bytes")
    assert planned == pytest.approx(living, rel=0.005)
