"""Weights in mxfp4 and in fp8 by blocks: the values that transformers makes of them, whatever slice a rank reads."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from dtrain import models
from dtrain.base.errors import UserError
from dtrain.checkpoint.huggingface import safetensor_files
from dtrain.checkpoint.huggingface.export import export
from dtrain.checkpoint.huggingface.merged import full_weights
from dtrain.checkpoint.huggingface.safetensor_files import WeightFiles
from tests.running import assert_same, run_all, run_directory
from tests.tiny import save_weights, tiny_recipe, write_model

transformers = pytest.importorskip("transformers")
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens", "lm_head"]}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}


def random_bytes(*shape, most=256):
    return torch.randint(0, most, shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


def by_transformers(blocks, scales):
    """[E, out, in/32, 16] and [E, out, in/32] uint8 -> [E, in, out] bfloat16"""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    return convert_moe_packed_tensors(blocks, scales)


def fp8_by_transformers(weight, scales):
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    return Fp8Dequantize(None)._dequantize_one(weight, scales, torch.bfloat16)


CUTS = ((), (slice(1, 2),), (slice(0, 2), slice(5, 71), slice(30, 33)), (slice(1, 3), slice(64, 96)))


def assert_slices(directory, name, right, cuts=CUTS):
    """The whole, and slices that begin and end inside of blocks, some of fewer dimensions."""
    files = WeightFiles(directory)
    assert files.stored[name].dtype == torch.bfloat16 and files.stored[name].shape == right.shape
    assert list(files.stored) == [name]
    for cut in cuts:
        found, wanted = files.read(name, cut[-right.dim() :] or None), right[cut[-right.dim() :]]
        assert found.dtype == torch.bfloat16
        assert torch.equal(found.view(torch.int16), wanted.contiguous().view(torch.int16)), cut


def test_mxfp4_is_what_transformers_makes_of_it(tmp_path):
    """Every code under every exponent that means a number."""
    blocks, scales = random_bytes(3, 36, 3, 16), torch.arange(3 * 36 * 3).view(3, 36, 3).remainder(255).byte()
    save_file({"w_blocks": blocks, "w_scales": scales}, tmp_path / "model.safetensors")
    assert_slices(tmp_path, "w", by_transformers(blocks, scales))


def test_a_stack_in_mxfp4_opens_its_file_once_for_its_values_and_once_for_its_exponents(tmp_path, monkeypatch):
    save_file(
        {"w_blocks": random_bytes(5, 4, 1, 16), "w_scales": random_bytes(5, 4, 1)}, tmp_path / "model.safetensors"
    )
    files, paths, opened = WeightFiles(tmp_path), [], safetensor_files.open_safetensors
    monkeypatch.setattr(safetensor_files, "open_safetensors", lambda path: paths.append(path) or opened(path))
    assert files.read("w").shape == (5, 32, 4) and len(paths) == 2


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_fp8_is_what_transformers_makes_of_it(tmp_path, kind):
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(3, 256, 384, generator=draw).mul(20).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 2, 3, generator=draw).to(kind)
    save_file({"w": weight, "w_scale_inv": scales}, tmp_path / "model.safetensors")
    cuts = (*CUTS, (slice(1, 3), slice(130, 250), slice(250, 384)))
    assert_slices(tmp_path, "w", fp8_by_transformers(weight, scales), cuts)


def test_the_last_blocks_of_fp8_may_be_smaller(tmp_path):
    draw = torch.Generator().manual_seed(0)
    weight, scales = torch.randn(200, 130, generator=draw).to(torch.float8_e4m3fn), torch.rand(2, 2, generator=draw)
    save_file({"w": weight, "w_scale_inv": scales}, tmp_path / "model.safetensors")
    padded = torch.zeros(256, 256).to(torch.float8_e4m3fn)
    padded[:200, :130] = weight
    assert_slices(tmp_path, "w", fp8_by_transformers(padded, scales)[:200, :130])


def with_section(directory, section):
    values = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(values | {"quantization_config": section}))


def in_mxfp4(root, **changes):
    """A tiny gpt-oss whose experts are in mxfp4, and its copy in bfloat16 by transformers' function."""
    sizes = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 96, "num_local_experts": 4} | changes
    plain = save_weights(write_model(root / "plain", "gpt-oss", tied=False, **sizes))
    packed, tensors = write_model(root / "packed", "gpt-oss", tied=False, **sizes), {}
    copy = load_file(plain / "model.safetensors")
    for name, tensor in load_file(plain / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = tensor
            continue
        experts, inner, outer = tensor.shape
        blocks = random_bytes(experts, outer, inner // 32, 16)
        scales = 121 + random_bytes(experts, outer, inner // 32, most=3)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        copy[name] = by_transformers(blocks, scales).contiguous()
    save_file(tensors, packed / "model.safetensors")
    save_file(copy, plain / "model.safetensors")
    with_section(packed, MXFP4)
    return packed, plain


def in_fp8(root):
    """A tiny Qwen3-MoE whose linear layers and experts are in fp8, and its copy in bfloat16 by transformers' class."""
    sizes = {"hidden_size": 192, "moe_intermediate_size": 160, "head_dim": 32, "intermediate_size": 128}
    plain = save_weights(write_model(root / "plain", "qwen3-moe", tied=False, **sizes))
    packed, tensors = write_model(root / "packed", "qwen3-moe", tied=False, **sizes), {}
    copy = load_file(plain / "model.safetensors")
    for name, tensor in load_file(plain / "model.safetensors").items():
        if "_proj" not in name:
            tensors[name] = tensor
            continue
        rows, columns = tensor.shape
        padded = torch.zeros(-(-rows // 128) * 128, -(-columns // 128) * 128)
        padded[:rows, :columns] = tensor
        scales = padded.unflatten(1, (-1, 128)).unflatten(0, (-1, 128)).abs().amax((1, 3)) / 448
        codes = (padded / scales.repeat_interleave(128, 0).repeat_interleave(128, 1)).to(torch.float8_e4m3fn)
        tensors |= {name: codes[:rows, :columns].contiguous(), f"{name}_scale_inv": scales}
        copy[name] = fp8_by_transformers(codes, scales)[:rows, :columns].contiguous()
    save_file(tensors, packed / "model.safetensors")
    save_file(copy, plain / "model.safetensors")
    with_section(packed, FP8)
    return packed, plain


def test_transformers_reads_the_same_model(tmp_path):
    packed, _ = in_mxfp4(tmp_path)
    section = transformers.Mxfp4Config(dequantize=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        packed, dtype=torch.bfloat16, quantization_config=section
    )
    ours = models.from_pretrained(packed, torch.bfloat16)
    mine = {ours.checkpoint_names(name)[0]: weight for name, weight in full_weights(ours).items()}
    for name, parameter in theirs.named_parameters():
        assert torch.equal(mine[name].read(torch.bfloat16), parameter), name


RUNS = {
    "mxfp4": (in_mxfp4, ["lora={rank: 4}"], {"ep2": ["parallel.ep=2"], "tp2": ["parallel.tp=2"]}),
    "fp8": (in_fp8, [], {"dp2": []}),
}


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("kind", RUNS)
def test_runs_are_those_of_the_copy_in_bfloat16(tmp_path, kind):
    """On meshes that cut inside of blocks; what is exported is no longer in few bits."""
    make, options, meshes = RUNS[kind]
    packed, plain = make(tmp_path)

    def recipe(name, model, *more, rows=12):
        shape = [f"model.path={model}", "model.init=pretrained", "train.steps=2", "train.global_batch=12"]
        shape += [f"train.micro_batch={rows}", "scheduler.warmup_steps=0", "checkpoint.every=2", *options]
        return tiny_recipe(tmp_path, *shape, *more, name=name)

    right, alone = run_all([recipe("plain", plain), recipe("packed", packed)])
    assert_same(alone, right, 1e-14)
    for many in run_all([recipe(name, packed, *mesh, rows=6) for name, mesh in meshes.items()], 2):
        assert_same(many, right, 1e-9)
    export(run_directory(alone), tmp_path / "out")
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert exported.keys() == load_file(plain / "model.safetensors").keys()
    assert all(tensor.is_floating_point() and tensor.itemsize > 1 for tensor in exported.values())


@pytest.mark.parametrize(
    "section",
    [
        FP8 | {"weight_block_size": None},
        FP8 | {"weight_block_size": [64, 64]},
        FP8 | {"activation_scheme": "static"},
        FP8 | {"fmt": "e5m2"},
        {"quant_method": "fbgemm_fp8"},
    ],
)
def test_other_forms_of_few_bits_are_refused(tmp_path, section):
    directory = write_model(tmp_path, "qwen3-moe")
    with_section(directory, section)
    with pytest.raises(UserError, match=r"of quantized weights only .* are read; use the original checkpoint; .*fp8"):
        models.read_config(directory)


def test_scales_of_another_form_are_refused_as_before(tmp_path):
    packed, _ = in_fp8(tmp_path)
    tensors = load_file(packed / "model.safetensors")
    name = next(name for name in tensors if name.endswith("q_proj.weight"))
    tensors[f"{name}_scale_inv"] = torch.ones(())
    save_file(tensors, packed / "model.safetensors")
    with pytest.raises(UserError, match=f"{name} is F8_E4M3; quantized weights are not read"):
        models.from_pretrained(packed)
