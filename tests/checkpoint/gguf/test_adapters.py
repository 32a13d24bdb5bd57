"""Adapters as GGUF files: merged, or alone in llama.cpp's layout, with the numbers of the adapter that PEFT reads."""

import pytest
import torch
from gguf import GGUFReader

from dtrain.base.errors import UserError
from dtrain.checkpoint.gguf.export import export_gguf
from dtrain.checkpoint.huggingface.export import export
from tests.adapters.by_peft import save_adapter
from tests.checkpoint.gguf.models import make, values
from tests.checkpoint.gguf.test_models import difference

MIXED = {"rank_pattern": {"k_proj": 2}, "alpha_pattern": {"q_proj": 5}}
RSLORA = {"use_rslora": True}


def adapted(tmp_path, family="llama", **options):
    base = make(tmp_path / "base", family)
    save_adapter(base, tmp_path / "adapter", **options)
    return base, tmp_path / "adapter"


def weights(file):
    return {tensor.name: torch.tensor(tensor.data.copy()).float() for tensor in GGUFReader(file).tensors}


def test_an_adapter_is_merged(tmp_path):
    _, adapter = adapted(tmp_path, use_dora=True)
    assert "merged into" in export_gguf(adapter, tmp_path / "m.gguf", "f32")
    export(adapter, tmp_path / "merged")
    assert difference(tmp_path / "m.gguf", tmp_path / "merged")[0] < 1e-5


@pytest.mark.parametrize("family", ["llama", "phi3"])
@pytest.mark.parametrize(
    ("form", "options"), [("adapter", MIXED), ("folded", MIXED), ("adapter", {"use_rslora": True})]
)
def test_an_adapter_alone_adds_what_the_merge_adds(tmp_path, family, form, options):
    base, adapter = adapted(tmp_path, family, **options)
    export_gguf(adapter, tmp_path / "a.gguf", "f32", form)
    export_gguf(base, tmp_path / "base.gguf", "f32")
    export_gguf(adapter, tmp_path / "merged.gguf", "f32")
    keys, parts = values(tmp_path / "a.gguf"), weights(tmp_path / "a.gguf")
    assert keys["general.type"] == "adapter" and keys["adapter.type"] == "lora"
    before, after = weights(tmp_path / "base.gguf"), weights(tmp_path / "merged.gguf")
    changed = {name for name in after if not torch.equal(before[name], after[name])}
    assert changed == {name.rpartition(".")[0] for name in parts} and len(changed) >= 8
    for name in changed:
        a, b = parts[f"{name}.lora_a"], parts[f"{name}.lora_b"]
        added = b @ a * (keys["adapter.lora.alpha"] / len(a))
        assert torch.allclose(added, after[name] - before[name], atol=1e-6), name


def test_what_llama_cpp_has_no_place_for_is_refused(tmp_path):
    _, adapter = adapted(tmp_path, use_dora=True)
    with pytest.raises(UserError, match="--adapter: the adapter has DoRA's magnitudes.*export it --merged"):
        export_gguf(adapter, tmp_path / "a.gguf", form="adapter")
    save_adapter(tmp_path / "base", tmp_path / "saved", modules_to_save=["input_layernorm"])
    with pytest.raises(UserError, match="--folded: the adapter has fully trained modules"):
        export_gguf(tmp_path / "saved", tmp_path / "a.gguf", form="folded")
    assert not (tmp_path / "a.gguf").exists()
