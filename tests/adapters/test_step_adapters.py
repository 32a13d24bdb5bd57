"""Each save of a run that trains an adapter has it in PEFT's layout; so has its export."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("peft")

from dtrain.base.errors import UserError
from dtrain.base.model_directory import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from dtrain.checkpoint.dcp.store import MANIFEST, CheckpointStore
from dtrain.checkpoint.peft.config import read_adapter_config
from tests.adapters.by_peft import load_adapter, load_base
from tests.running import run
from tests.tiny import save_weights, tiny_recipe, write_model

MESHES = {
    "one": (1, []),
    "dp4 in the background": (4, ["checkpoint.async_save=true", "train.micro_batch=1"]),
    "tp4": (4, ["parallel.tp=4", "checkpoint.async_save=false"]),
}
DORA = "lora={rank: 3, dora: true, rslora: true, rank_pattern: {v_proj: 2}, target: [v_proj, down_proj]}"
SAVED = "lora={rank: 2, modules_to_save: [embed_tokens, 0.input_layernorm]}"


def trained(root, lora, *overrides, ranks=1, name="run"):
    base = root / "qwen2-tied"
    if not base.exists():
        save_weights(write_model(base, "qwen2"))
    options = ["model.init=pretrained", "train.steps=2", "checkpoint.every=1", "train.global_batch=4", *overrides]
    return run(tiny_recipe(root, lora, "checkpoint.export=final", *options, family="qwen2", name=name), ranks)


def equal(one, other):
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(("mesh", "lora"), [*zip(MESHES, [SAVED, DORA, SAVED], strict=True)])
def test_every_step_s_adapter_is_loaded_by_peft_as_it_is(tmp_path, mesh, lora):
    ranks, overrides = MESHES[mesh]
    recipe = trained(tmp_path, lora, *overrides, ranks=ranks)
    base, directory = tmp_path / "qwen2-tied", recipe.run.directory
    store = CheckpointStore(directory / "checkpoints")
    assert store.steps() == [1, 2]
    files = [load_file(store.path(step) / "adapter" / ADAPTER_WEIGHTS) for step in (1, 2)]
    assert not equal(*files)
    fill = store.open_step(2)
    for name, (shape, dtype) in store.tensor_specs(2).items():
        parameter = name.rpartition(".")[2]
        if name.startswith("model.") and parameter in ("lora_A", "lora_B", "lora_magnitude"):
            tensor = torch.empty(shape, dtype=dtype)
            fill({name: tensor})
            kind = "lora_magnitude_vector" if parameter == "lora_magnitude" else f"{parameter}.weight"
            key = f"base_model.model.{name.removeprefix('model.').removesuffix(parameter)}{kind}"
            assert torch.equal(files[1][key], tensor), key
    config = json.loads((store.path(2) / "adapter" / ADAPTER_CONFIG).read_text())
    assert config["base_model_name_or_path"] == str(base)
    loaded = load_adapter(base, store.path(2) / "adapter", torch.float64)
    ids = torch.arange(24).view(2, 12)
    with torch.no_grad():
        moved = (loaded(input_ids=ids).logits - load_base(base, torch.float64)(input_ids=ids).logits).abs().max()
    assert moved > 1e-3
    export = directory / "export"
    assert equal(load_file(export / ADAPTER_WEIGHTS), files[1])
    assert json.loads((export / ADAPTER_CONFIG).read_text()) == config
    assert (export / "tokenizer.json").is_file() and not (export / "config.json").exists()
    held = json.loads((export / "dtrain.json").read_text())
    assert held == {"step": 2, "save": store.read_state(2)["save"]}


def test_the_manifest_covers_the_adapter(tmp_path):
    recipe = trained(tmp_path, DORA)
    store = CheckpointStore(recipe.run.directory / "checkpoints")
    names = json.loads((store.path(2) / MANIFEST).read_text())["content"]["files"]
    assert {f"adapter/{ADAPTER_WEIGHTS}", f"adapter/{ADAPTER_CONFIG}"} <= names.keys()
    weights = store.path(2) / "adapter" / ADAPTER_WEIGHTS
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert store.check_contents(2) == [f"{weights}: damaged, its checksum does not match"]
    weights.unlink()
    assert store.steps() == [1]


def test_a_name_that_leaves_the_step_is_damage(tmp_path):
    recipe = trained(tmp_path, DORA)
    store = CheckpointStore(recipe.run.directory / "checkpoints")
    import zlib

    for bad in ("adapter/../../x", "other/x", "adapter/..", "..", "adapter/a/b", "/x"):
        path = store.path(2) / MANIFEST
        content = json.loads(path.read_text())["content"]
        content["files"] = {**content["files"], bad: {"bytes": 1, "crc32": "0"}}
        crc = f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"
        path.write_text(json.dumps({"crc32": crc, "content": content}))
        with pytest.raises(UserError, match="damaged, or not written by dtrain"):
            store.read_state(2)
        del content["files"][bad]
        crc = f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"
        path.write_text(json.dumps({"crc32": crc, "content": content}))
        store.read_state(2)


def test_a_run_goes_on_from_the_adapter_of_a_step(tmp_path):
    first = trained(tmp_path, DORA)
    adapter = first.run.directory / "checkpoints" / "step-2" / "adapter"
    second = trained(tmp_path, f"lora={{path: {adapter}}}", "optimizer.lr=1e-30", name="second")
    store = CheckpointStore(second.run.directory / "checkpoints")
    again = store.path(2) / "adapter"
    assert equal(load_file(again / ADAPTER_WEIGHTS), load_file(adapter / ADAPTER_WEIGHTS))
    assert vars(read_adapter_config(again)) == vars(read_adapter_config(adapter))


def test_a_base_that_no_files_hold_is_not_named(tmp_path):
    recipe = run(tiny_recipe(tmp_path, DORA, "train.steps=1", "scheduler.warmup_steps=0", "checkpoint.every=1"))
    step = recipe.run.directory / "checkpoints" / "step-1"
    assert json.loads((step / "adapter" / ADAPTER_CONFIG).read_text())["base_model_name_or_path"] is None


def test_a_failed_adapter_leaves_no_step(tmp_path):
    store = CheckpointStore(tmp_path)

    def fails(partial, sizes, read):
        (partial / "adapter").mkdir()
        assert torch.equal(read("a"), torch.arange(6.0).view(2, 3))
        raise OSError(28, "No space left on device", "adapter")

    with pytest.raises(UserError, match="No space left"):
        store.save(1, {"a": torch.arange(6.0).view(2, 3)}, {}, None, fails)
    assert not list(tmp_path.iterdir())
    store.save(1, {"a": torch.ones(2)}, {})
    assert store.steps() == [1]
    shutil.rmtree(store.path(1))
