"""Adapters of vision towers in PEFT's layout, with PEFT on transformers' multimodal models as the oracle."""

import json

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("peft")

import peft

from dtrain import models
from dtrain.base.model_directory import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from dtrain.checkpoint.dcp.training_state import model_tensors
from dtrain.checkpoint.huggingface.export import export
from dtrain.checkpoint.peft.config import BASE, adapter_problems, read_adapter_config
from dtrain.checkpoint.peft.files import write_adapter
from dtrain.models.common.config import is_in_vision_tower
from dtrain.models.read_config import read_config
from tests.adapters.by_peft import quietly
from tests.models.oracle import save
from tests.models.test_vision_models import CASES, IMAGE, images_of, make, token_rows
from tests.models.vision.oracle import WideIslands

SHAPES = {
    "qwen3-vl": {"target_modules": ["q_proj", "qkv", "attn.proj", "linear_fc1"], "modules_to_save": ["visual.merger"]},
    "qwen2.5-vl": {"target_modules": r".*visual.*(qkv|gate_proj|mlp\.[02])", "use_dora": True},
    "qwen3.5": {"target_modules": "all-linear", "rank_pattern": {r"blocks\.1\.attn\.qkv": 2}},
    "gemma3": {"target_modules": ["q_proj", "fc1"], "modules_to_save": ["multi_modal_projector"]},
    "gemma4": {"target_modules": r".*(embedding_projection|input_proj|o_proj\.linear|layers.*v_proj)"},
}


def peft_model(base, options):
    """PEFT's model of transformers' `base` with a random adapter."""
    wanted = {"r": 4, "lora_alpha": 12, "task_type": "CAUSAL_LM", **options}
    if wanted["target_modules"] == SHAPES["gemma4"]["target_modules"]:
        wanted["exclude_modules"] = r".*vision_tower.*v_proj"  # no linear layer, but one around it
    model = quietly(lambda: peft.get_peft_model(base, peft.LoraConfig(**wanted)))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype), alpha=0.1)
    return model.eval()


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
@torch.no_grad()
def test_an_adapter_of_peft_s_gives_its_logits_and_ours_gives_ours(tmp_path, name):
    case, (narrow, wide) = CASES[name], make(name)
    base, ids = save(narrow, tmp_path / "base"), token_rows(CASES[name])
    grids = [grid for some in case.grids for grid in some]
    config = read_config(base, vision=True)
    patches = sum(height * width for _, height, width in grids)
    pixels = torch.rand(patches, config.vision.values_per_patch, generator=torch.Generator().manual_seed(1)).double()
    inputs = {case.types: (ids == IMAGE).int(), **case.inputs(pixels, grids)}

    def logits(model):
        with WideIslands():
            return model(input_ids=ids, **inputs).logits

    def same(first, second):
        return (first - second).abs().max() < 1e-9 * second.abs().max()

    plain = logits(wide)
    theirs = peft_model(wide, SHAPES[name])
    theirs.save_pretrained(tmp_path / "theirs")
    expected = logits(theirs)
    file = tmp_path / "theirs" / ADAPTER_CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | {BASE: str(base)}))
    assert (expected - plain).abs().max() > 1e-3
    assert not adapter_problems({"path": tmp_path / "theirs"}, config)
    ours = models.from_pretrained(tmp_path / "theirs", torch.float64, vision=True).eval()
    images = images_of(case, ids, pixels, ours.config)
    mine = ours(ids, images=images)
    assert same(mine, expected)

    adapter = read_adapter_config(tmp_path / "theirs")
    write_adapter(tmp_path / "ours", model_tensors(ours), adapter, ours.config, str(base))
    before, after = (load_file(tmp_path / name / ADAPTER_WEIGHTS) for name in ("theirs", "ours"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert any(is_in_vision_tower(key.removeprefix("base_model.model.")) for key in before)
    again = quietly(lambda: peft.PeftModel.from_pretrained(make(name)[1], str(tmp_path / "ours")).eval())
    assert same(logits(again), mine)

    assert any(
        "built without" in str(problem) for problem in adapter_problems({"path": tmp_path / "ours"}, read_config(base))
    )
    file.write_text(json.dumps(json.loads(file.read_text()) | {"lora_dropout": 0.1}))
    (problem,) = map(str, adapter_problems({"path": tmp_path / "theirs"}, config))
    assert "of the vision tower" in problem and "its lora_dropout" in problem

    export(tmp_path / "ours", tmp_path / "merged", "float64")
    merged = models.from_pretrained(tmp_path / "merged", torch.float64, vision=True)
    assert same(merged(ids, images=images), mine)
