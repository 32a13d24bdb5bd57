"""`dtrain export`: a run, one of its checkpoints, or an exported directory, to a Hugging Face directory."""

import json
import subprocess
import sys
import textwrap

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file

from dtrain import models
from dtrain.base.errors import UserError
from dtrain.checkpoint.dcp.store import CheckpointStore
from dtrain.checkpoint.dcp.training_state import optimizer_state, training_tensors
from dtrain.checkpoint.huggingface.export import export
from dtrain.training.directory import RunDirectory
from tests.checkpoint.families import FAMILIES, MULTIMODAL, logits, save_family
from tests.running import run
from tests.tiny import save_weights, tiny_recipe, write_model
from tests.world import run_world

IDS = torch.arange(24).view(2, 12) % 67


def train_a_little(model, steps):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        model(IDS).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def make_run(path, family, steps=(1, 2), scratch=False):
    """A run's directory with a checkpoint per step; returns the model after the last."""
    source = path.parent / "source"
    save_family(family, source)
    (source / "tokenizer.json").write_text("{}")
    run = RunDirectory(path).acquire()
    init = "scratch" if scratch else "pretrained"
    run.config.write_text(f"model: {{path: {source}, init: {init}}}\n")
    run.copy_model_files(source)
    model = models.from_pretrained(source)
    for step in steps:
        optimizer = train_a_little(model, 1)
        state = {"optimizer": optimizer_state(model, optimizer)}
        CheckpointStore(run.checkpoints).save(step, training_tensors(model, optimizer), state)
    run.release()
    return model.eval()


def check(out, model):
    loaded, info = hf.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info.values()), info
    with torch.no_grad():
        assert (model(IDS) - logits(loaded.eval(), IDS)).abs().max() < 1e-4
    return loaded


@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_of_every_family(tmp_path, family):
    model = make_run(tmp_path / "run", family)
    assert export(tmp_path / "run", tmp_path / "out") == f"step 2 of {tmp_path / 'run'}"
    check(tmp_path / "out", model)
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    if family == MULTIMODAL:
        source = load_file(tmp_path / "source" / "model.safetensors")
        out = load_file(tmp_path / "out" / "model.safetensors")
        copied = "vision_tower.post_layernorm.weight"
        assert source.keys() == out.keys() and torch.equal(source[copied], out[copied])


def test_a_step_and_a_dtype(tmp_path):
    make_run(tmp_path / "run", "llama-pad")
    model = models.from_pretrained(tmp_path / "source")
    train_a_little(model, 1)
    assert "step 1" in export(tmp_path / "run" / "checkpoints" / "step-1", tmp_path / "out", "bfloat16")
    out = load_file(tmp_path / "out" / "model.safetensors")
    assert out.keys() == load_file(tmp_path / "source" / "model.safetensors").keys()
    assert all(torch.equal(tensor, model.state_dict()[name].bfloat16()) for name, tensor in out.items())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("family", ["qwen3", MULTIMODAL])
def test_an_exported_directory_is_converted(tmp_path, family):
    model = make_run(tmp_path / "run", family)
    export(tmp_path / "run", tmp_path / "one")
    export(tmp_path / "one", tmp_path / "two", "float64")
    tensors = load_file(tmp_path / "two" / "model.safetensors")
    assert (tensors["vision_tower.post_layernorm.weight"].dtype == torch.float32) if family == MULTIMODAL else True
    assert any(tensor.dtype == torch.float64 for tensor in tensors.values())
    check(tmp_path / "two", model)


def test_a_joined_tensor_of_frozen_and_trained_rows_keeps_the_trained_ones_exact(tmp_path):
    base = save_weights(write_model(tmp_path / "base", "phi3"))  # in float32; the run trains in float64
    shape = ["model.init=pretrained", f"model.path={base}", "train.steps=1", "scheduler.warmup_steps=0"]
    shape += ["train.freeze=['*.q_proj.*']", "checkpoint.every=1", "checkpoint.export=final"]
    found = run(tiny_recipe(tmp_path, *shape)).run.directory
    export(found, tmp_path / "out")
    mine, right = (load_file(path / "model.safetensors") for path in (tmp_path / "out", found / "export"))
    assert all(torch.equal(mine[name], tensor) for name, tensor in right.items() if "qkv_proj" in name)


def test_a_moved_run_needs_nothing_of_its_origin(tmp_path):
    model = make_run(tmp_path / "run", "qwen2")
    (tmp_path / "run").rename(tmp_path / "moved")
    for path in (tmp_path / "source").iterdir():
        path.unlink()
    export(tmp_path / "moved", tmp_path / "out")
    check(tmp_path / "out", model)


def test_a_vision_tower_that_is_gone_is_said(tmp_path):
    make_run(tmp_path / "run", MULTIMODAL)
    (tmp_path / "source" / "model.safetensors").unlink()
    with pytest.raises(UserError, match="vision tower.*has no weights"):
        export(tmp_path / "run", tmp_path / "out")
    (tmp_path / "run" / "config.yaml").write_text(f"model: {{path: {tmp_path / 'source'}, init: scratch}}\n")
    export(tmp_path / "run", tmp_path / "out")
    assert isinstance(hf.AutoModelForCausalLM.from_pretrained(tmp_path / "out"), hf.Gemma3ForCausalLM)


def save_sharded(rank, source, directory):
    from torch.distributed.fsdp import fully_shard

    model = models.from_pretrained(source)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    CheckpointStore(directory).save(1, training_tensors(model), {})


def test_a_checkpoint_of_many_ranks_is_exported_by_one(tmp_path):
    model = make_run(tmp_path / "run", "llama3", steps=())
    run_world(save_sharded, 3, tmp_path / "source", tmp_path / "run" / "checkpoints")
    export(tmp_path / "run", tmp_path / "out")
    check(tmp_path / "out", model)


def test_mistakes_are_named(tmp_path):
    make_run(tmp_path / "run", "llama3")
    with pytest.raises(UserError, match="--dtype int8: choose one of"):
        export(tmp_path / "run", tmp_path / "out", "int8")
    with pytest.raises(UserError, match="nowhere is not a directory"):
        export(tmp_path / "nowhere", tmp_path / "out")
    with pytest.raises(UserError, match="no complete checkpoint"):
        export(tmp_path, tmp_path / "out")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("")
    with pytest.raises(UserError, match="taken is already there"):
        export(tmp_path / "run", tmp_path / "taken")
    data = tmp_path / "run" / "checkpoints" / "step-2" / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-3] + b"abc")
    with pytest.raises(UserError, match=f"{data}: damaged"):
        export(tmp_path / "run", tmp_path / "out")
    config = tmp_path / "run" / "model" / "config.json"
    config.write_text(config.read_text().replace('"vocab_size": 97', '"vocab_size": 98'))
    with pytest.raises(UserError, match=r"embed_tokens.weight of \[97, 48\]"):
        export(tmp_path / "run" / "checkpoints" / "step-1", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "source", "taken"]


def test_memory_stays_near_one_tensor(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    config = hf.LlamaConfig(
        vocab_size=10_000,
        hidden_size=1024,
        intermediate_size=10_000,
        num_hidden_layers=1,
        num_attention_heads=8,
        num_key_value_heads=8,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(source)
    run = RunDirectory(tmp_path / "run").acquire()
    run.copy_model_files(source)
    model = models.build(models.read_config(source))
    size = sum(parameter.nbytes for parameter in model.parameters()) >> 20
    CheckpointStore(run.checkpoints).save(1, training_tensors(model), {})
    run.release()
    code = textwrap.dedent(f"""
        import resource
        from dtrain import models
        from dtrain.checkpoint.huggingface.export import export
        models.build(models.read_config({str(source)!r}), device="meta")
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        export({str(tmp_path / "run")!r}, {str(tmp_path / "out")!r})
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before >> 10)
    """)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    # One tensor, of 39 MiB at most, and the chunk that it is read from.
    assert size > 190 and int(result.stdout) < 110, f"{result.stdout} MiB for a model of {size}"
