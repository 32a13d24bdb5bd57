"""Weights in 4 bits: bitsandbytes' codes, products with them, and how a rank reads its part of them.

nf4.json holds what bitsandbytes 0.50.2 made of `MATRIX`: `PYTHONPATH=.:BITSANDBYTES python -m tests.adapters.test_nf4`
writes it again.
"""

import hashlib
import itertools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dtrain import models
from dtrain.adapters.nf4 import LEVELS, dequantize, nf4_product, quantize
from dtrain.checkpoint.huggingface import quantized
from dtrain.checkpoint.huggingface.file_rows import FileRows
from dtrain.checkpoint.huggingface.read import read_weights
from dtrain.checkpoint.huggingface.safetensor_files import WeightFiles
from dtrain.parallel.mesh import Runtime, build_mesh
from dtrain.parallel.placement import local_slices, local_tensor
from dtrain.policy.build import build_model
from dtrain.policy.options import choose_precision
from tests.tiny import save_weights, tiny_recipe, write_model
from tests.world import run_world

FIXTURE = Path(__file__).with_name("nf4.json")
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
NF4 = ["model.init=pretrained", "lora.quantize=nf4", "lora.rank=4"]


def matrix():
    """[75, 256] float32 from whole numbers alone: rows of several magnitudes, a block of zeros, one whose quotients are
    the midpoints between levels, one of a single tiny weight, and one whose codes a division would make others."""
    numbers = torch.arange(75 * 256) * 7919 % 65537
    weight = ((numbers - 32768).float() / 32768).view(75, 256) * 2.0 ** -(torch.arange(75) % 9)[:, None]
    levels = torch.tensor(LEVELS)
    weight[0, :64] = 0
    weight[1, :64] = 1
    weight[1, 1:16] = (levels[1:] + levels[:-1]) / 2
    weight[2, :64] = 0
    weight[2, 5] = 1e-30
    weight[3, :64] = 133 / 128
    weight[3, 1:4] = torch.tensor([-0.3529481291770935, 0.12495271861553192, 0.8951299786567688])
    return weight


MATRIX = matrix()


def digest(tensor):
    return hashlib.sha256(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def made_by_bitsandbytes():
    import bitsandbytes.functional as bnb

    made = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        codes, state = bnb.quantize_4bit(MATRIX.to(dtype), quant_type="nf4", blocksize=64)
        whole = bnb.dequantize_4bit(codes, state)
        made[str(dtype)] = {"codes": digest(codes), "absmax": digest(state.absmax), "weight": digest(whole)}
    codes, state = bnb.quantize_4bit(MATRIX, quant_type="nf4", blocksize=64, compress_statistics=True)
    values = state.as_dict()
    absmax = bnb.dequantize_blockwise(state.absmax, state.state2) + state.offset
    made["double"] = {
        "absmax": bytes(values["absmax"].tolist()).hex(),
        "nested_absmax": values["nested_absmax"].tolist(),
        "nested_quant_map": values["nested_quant_map"].tolist(),
        "nested_offset": values["nested_offset"],
        "dequantized": digest(absmax),
        "weight": digest(bnb.dequantize_4bit(codes, state)),
    }
    return made


def fixture():
    return json.loads(FIXTURE.read_text())


def test_the_fixture_is_what_bitsandbytes_makes():
    pytest.importorskip("bitsandbytes")
    assert made_by_bitsandbytes() == fixture()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_codes_scales_and_weights_are_those_of_bitsandbytes(dtype):
    codes, scales = quantize(MATRIX.to(dtype))
    assert codes.shape == (75, 128) and codes.dtype == torch.uint8
    assert scales.shape == (75, 4) and scales.dtype == torch.int32
    found = {"codes": digest(codes), "absmax": digest(scales), "weight": digest(dequantize(codes, scales, dtype))}
    assert found == fixture()[str(dtype)]


@pytest.mark.parametrize("rows", [0, 1, 2000])
def test_tiles_and_cuts_change_no_weight(rows):
    weight = torch.randn(rows, 192, generator=torch.Generator().manual_seed(0))
    codes, scales = quantize(weight)
    whole = dequantize(codes, scales, torch.float32)
    assert whole.shape == weight.shape
    for row in (0, rows // 3, rows - 1):
        part = slice(max(row, 0), row + 1)
        assert torch.equal(dequantize(codes[part, 32:96], scales[part, 1:], torch.float32), whole[part, 64:])


def dense(codes, scales):
    """The weight by the formula, in float64."""
    nibbles = torch.stack([codes >> 4, codes & 15], -1).flatten(1).long()
    absmax = scales.view(torch.float32).double().repeat_interleave(64, 1)
    return torch.tensor(LEVELS, dtype=torch.float64)[nibbles] * absmax


@pytest.mark.parametrize("shape", [(5, 128), (2, 3, 128)])
@pytest.mark.parametrize("biased", [False, True])
def test_a_product_and_its_gradients_are_those_of_the_dense_weight(shape, biased):
    draw = torch.Generator().manual_seed(0)
    codes, scales = quantize(torch.randn(64, 128, generator=draw))
    x = torch.randn(shape, dtype=torch.float64, generator=draw, requires_grad=True)
    bias = torch.randn(64, dtype=torch.float64, generator=draw, requires_grad=True) if biased else None
    weight = dense(codes, scales)
    assert (dequantize(codes, scales, torch.float64) - weight).abs().max() <= 2**-24 * weight.abs().max()
    out = nf4_product(x, codes, scales, bias)
    grad = torch.randn(out.shape, dtype=torch.float64, generator=draw)
    inputs = [x, bias] if biased else [x]
    found = [out, *torch.autograd.grad(out, inputs, grad)]
    right = [x @ weight.t() + (bias if biased else 0), grad @ weight]
    if biased:
        right.append(grad.flatten(0, -2).sum(0))
    for mine, expected in zip(found, right, strict=True):
        assert (mine - expected).abs().max() <= 1e-6 * expected.abs().max()


def quantized_model(directory):
    model = models.build(models.read_config(directory), dtype=torch.float32, device="meta")
    quantized.convert_to_4_bits(model, directory, torch.float32, nf4=True)
    model.to_empty(device="cpu")
    model.tie_weights()
    read_weights(model, directory)
    return model


def test_nothing_dequantized_is_kept_for_the_backward(tmp_path):
    model = quantized_model(base(tmp_path))
    kept = []

    def keep(tensor):
        kept.append((tensor.dtype, tuple(tensor.shape)))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(torch.arange(10)[None]).sum().backward()
    matrices = {tuple(sorted(layer.dense_weight(local_tensor).shape)) for layer in linears(model).values()}
    assert (torch.uint8, (256, 64)) in kept and (torch.int32, (256, 2)) in kept
    assert not [one for one in kept if one[0].is_floating_point and tuple(sorted(one[1])) in matrices]


def base(root, family="llama", **changes):
    directory = root / f"{family}-base"
    return save_weights(write_model(directory, family, tied=False, **SIZES | changes))


def linears(model):
    return {name: one for name, one in model.named_modules() if hasattr(one, "weight_codes")}


def stored_as_bitsandbytes(directory, out, double, change=lambda tensors: None, config=None):
    """The model of `directory` as bitsandbytes' checkpoint, and the codes and absmax that it means, by layer."""
    out.mkdir()
    quantization = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    values = json.loads((directory / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(values | {"quantization_config": quantization | (config or {})}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (out / name).write_text((directory / name).read_text())
    tensors, meant = {}, {}
    quant_map = torch.tensor(fixture()["double"]["nested_quant_map"])
    for name, tensor in load_file(directory / "model.safetensors").items():
        if "_proj.weight" not in name:
            tensors[name] = tensor
            continue
        codes, scales = quantize(tensor.view(-1, 64))  # blocks run on from row to row
        absmax, state = scales.view(torch.float32).flatten(), {"quant_type": "nf4", "blocksize": 64}
        state |= {"dtype": "float32", "shape": list(tensor.shape)}
        if double:
            offset = absmax.mean()
            padded = torch.nn.functional.pad(absmax - offset, (0, -len(absmax) % 256)).view(-1, 256)
            factors = padded.abs().amax(1)
            nearest = (padded / factors[:, None])[..., None].sub(quant_map).abs().argmin(-1)
            tensors[f"{name}.absmax"] = nearest.flatten()[: len(absmax)].to(torch.uint8)
            tensors[f"{name}.nested_absmax"], tensors[f"{name}.nested_quant_map"] = factors, quant_map.clone()
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset.item()}
            absmax = (quant_map[nearest] * factors[:, None]).flatten()[: len(absmax)] + offset
        else:
            tensors[f"{name}.absmax"] = absmax.clone()
        tensors[name], tensors[f"{name}.quant_map"] = codes.reshape(-1, 1), torch.tensor(LEVELS)
        data = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        tensors[f"{name}.quant_state.bitsandbytes__nf4"] = data
        if tensor.shape[1] % 64 == 0:
            rows = tensor.shape[0]
            meant[name.removesuffix(".weight")] = codes.view(rows, -1), absmax.view(rows, -1).view(torch.int32)
    change(tensors)
    save_file(tensors, out / "model.safetensors")
    return out, meant


def test_bitsandbytes_second_quantization_is_undone_to_the_bit(tmp_path):
    stored, (codes, scales) = fixture()["double"], quantize(MATRIX)
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [75, 256]}
    state |= {"nested_blocksize": 256, "nested_offset": stored["nested_offset"]}
    tensors = {
        "w": codes.reshape(-1, 1),
        "w.quant_map": torch.tensor(LEVELS),
        "w.absmax": torch.tensor(list(bytes.fromhex(stored["absmax"])), dtype=torch.uint8),
        "w.nested_absmax": torch.tensor(stored["nested_absmax"]),
        "w.nested_quant_map": torch.tensor(stored["nested_quant_map"]),
        "w.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    files = WeightFiles(tmp_path)
    assert quantized.stored_mismatches(files, "w", (75, 256)) == []
    read_codes, read_scales = torch.zeros_like(codes), torch.zeros_like(scales)
    quantized.fill_codes(files, FileRows("w"), read_codes, read_scales)
    assert torch.equal(read_codes, codes) and digest(read_scales) == stored["dequantized"]
    assert digest(dequantize(read_codes, read_scales, torch.float32)) == stored["weight"]


MESHES = {
    "dp2": (2, []),
    "dp3": (3, []),
    "dp_replicate2 dp2": (4, ["parallel.dp_replicate=2"]),
    "tp2": (2, ["parallel.tp=2"]),
    "tp4, fewer KV heads": (4, ["parallel.tp=4"]),
    "dp2 tp2": (4, ["parallel.tp=2"]),
}


def held_by(rank, recipe, world_size):
    """Return {(layer, part): (slices, bytes)} of the codes and scales on this rank."""
    parallel = recipe.parallel
    shards = world_size // parallel.tp // parallel.dp_replicate
    mesh = build_mesh(Runtime(), dp_replicate=parallel.dp_replicate, dp_shard=shards, cp=1, tp=parallel.tp)
    config, precision = models.read_config(recipe.model.directory), choose_precision(recipe.train.dtype, "cpu")
    model = build_model(recipe, config, mesh, precision, torch.device("cpu"))
    return {
        (name, part): (local_slices(getattr(layer, part)), local_tensor(getattr(layer, part)).numpy().tobytes())
        for name, layer in linears(model).items()
        for part in ("weight_codes", "weight_scales")
    }


KINDS = ("floats", "single", "double")


@pytest.mark.parametrize(
    ("mesh", "kind"),
    [*zip(MESHES, itertools.cycle(KINDS), strict=False)],
)
def test_ranks_hold_the_parts_of_one_whole(tmp_path, mesh, kind):
    ranks, options = MESHES[mesh]
    directory = base(tmp_path, "qwen2", intermediate_size=512, num_attention_heads=8, hidden_size=256)
    whole = {name: quantize(one) for name, one in projections(directory).items()}
    if kind != "floats":
        directory, whole = stored_as_bitsandbytes(directory, tmp_path / "bnb", kind == "double")
    recipe = tiny_recipe(tmp_path, *NF4, *options, f"model.path={directory}", "train.dtype=bfloat16")
    filled = {}
    for of_rank in run_world(held_by, ranks, recipe, ranks):
        for (name, part), (held, data) in of_rank.items():
            right = whole[name][part == "weight_scales"]
            mine = torch.frombuffer(bytearray(data), dtype=right.dtype) if data else right.new_empty(0)
            target = filled.setdefault((name, part), torch.full_like(right, 99))
            target[held] = mine.view(target[held].shape)
    assert len(filled) == 2 * len(whole) == 28
    for (name, part), found in filled.items():
        assert torch.equal(found, whole[name][part == "weight_scales"]), (name, part)


@pytest.mark.parametrize("kind", ["floats", "single", "double"])
def test_tiles_of_a_file_make_one_whole(tmp_path, kind, monkeypatch):
    directory = base(tmp_path)
    whole = {name: quantize(one) for name, one in projections(directory).items()}
    if kind != "floats":
        directory, whole = stored_as_bitsandbytes(directory, tmp_path / "bnb", kind == "double")
    monkeypatch.setattr(quantized, "_TILE", 700)  # 5 rows of 128, 2 of 256
    for name, layer in linears(quantized_model(directory)).items():
        codes, scales = whole[name]
        assert torch.equal(layer.weight_codes, codes) and torch.equal(layer.weight_scales, scales), name


def projections(directory):
    tensors = load_file(directory / "model.safetensors")
    return {name.removesuffix(".weight"): one for name, one in tensors.items() if "_proj.weight" in name}
