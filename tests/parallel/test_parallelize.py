"""The functions that NeMo-RL's users call, on mixed meshes against one process."""

import math

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, Shard

import dtrain.parallel
from dtrain.parallel import (
    PARALLIZE_FUNCTIONS,
    RotaryEmbedParallel,
    _parallelize_gemma3,
    _parallelize_llama,
    _parallelize_model,
    _parallelize_qwen,
    clip_grad_by_total_norm_,
    get_grad_norm,
    to_local_if_dtensor,
)
from tests.cases import run_cases
from tests.parallel.dense import (
    assert_gradients,
    config_of,
    dense_gradients,
    dense_loss,
    random_batch,
    random_model,
)
from tests.world import run_world

FUNCTIONS = {
    "llama": _parallelize_llama,
    "qwen2": _parallelize_qwen,
    "qwen3": _parallelize_qwen,
    "gemma3": _parallelize_gemma3,
}
FLOAT64 = MixedPrecisionPolicy(torch.float64, torch.float64)


def on_a_mesh(rank, family, config, sizes, sequence, checkpointing):
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard", "tp"))
    data = mesh["replicate", "shard"] if sizes[0] > 1 else mesh["shard"]
    ranks = sizes[0] * sizes[1]
    batches = [random_batch(config.vocab_size, seed=10 + index) for index in range(ranks)]
    model = random_model(config)
    expected_loss, expected = dense_gradients(model, batches)
    parallel = FUNCTIONS[family](
        model, data, mesh["tp"], FLOAT64, OffloadPolicy(), sequence_parallel=sequence,
        activation_checkpointing=checkpointing,
    )  # fmt: skip
    assert parallel is model and isinstance(model, FSDPModule)
    assert all(isinstance(layer, FSDPModule) for layer in model.model.layers)
    loss = dense_loss(model, batches[rank // sizes[2]])
    loss.backward()
    total = loss.detach().clone()
    torch.distributed.all_reduce(total)
    assert abs(total.item() / sizes[2] - expected_loss) <= 1e-12 * abs(expected_loss)
    assert_gradients(model, expected)
    flat = torch.cat([gradient.flatten() for gradient in expected.values()])
    groups = mesh["replicate", "shard"]._flatten("dp").get_group(), mesh["tp"].get_group()
    for p in (1, 2, float("inf")):
        norm = get_grad_norm(model.parameters(), *groups, norm_type=p)
        assert abs(norm - torch.linalg.vector_norm(flat, p).item()) <= 1e-12 * norm
    clip_grad_by_total_norm_(model.parameters(), norm / 3, norm)
    assert_gradients(model, {name: gradient / 3 for name, gradient in expected.items()}, rtol=1e-5)


ON_MESHES = (  # sizes, sequence parallel, checkpointing, family, whether embedding and head are tied
    ((1, 2, 1), False, False, "llama", True),
    ((1, 2, 2), True, True, "gemma3", True),
    ((2, 1, 2), False, True, "qwen2", True),
    ((1, 1, 4), True, False, "qwen3", True),
    ((2, 2, 1), False, True, "llama", False),
    ((1, 2, 2), True, False, "qwen3", False),
)


@pytest.mark.parametrize("ranks", [2, 4])
def test_families_on_meshes_have_the_gradients_of_one_process(tmp_path, ranks):
    cases = {}
    for sizes, sequence, checkpointing, family, tied in ON_MESHES:
        if math.prod(sizes) == ranks:
            config = config_of(tmp_path / family, family, tied=tied)
            cases[f"{family} on {sizes}, tied={tied}"] = family, config, sizes, sequence, checkpointing
    run_cases(on_a_mesh, ranks, cases)


def by_dtype(rank, config, options):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = random_model(config).float()
    batches = [random_batch(config.vocab_size, seed=10 + index) for index in range(2)]
    expected_loss, expected = dense_gradients(model.double(), batches)
    model.float()
    parallel = _parallelize_model(model, mesh["dp"], mesh["tp"], **options)
    logits = parallel(batches[0]["input_ids"])
    assert logits.dtype == options["param_dtype"]  # never the whole logits in float32
    loss = dense_loss(parallel, batches[rank // 2])
    loss.backward()
    assert all(parameter.dtype == parameter.grad.dtype == torch.float32 for parameter in parallel.parameters())
    if options.get("cpu_offload"):
        assert all(parameter.device.type == "cpu" for parameter in parallel.parameters())
    assert_gradients(parallel, expected, rtol=1e-4 if options["param_dtype"] == torch.float32 else 0.1)


def test_one_function_for_every_model(tmp_path):
    config = config_of(tmp_path, tied=False)
    each = (
        {"param_dtype": torch.float32, "sequence_parallel": True, "activation_checkpointing": True},
        {"param_dtype": torch.float32, "cpu_offload": True},
        {"param_dtype": torch.float32, "custom_parallel_plan": "dtrain.models.common.decoder.DECODER_PLAN"},
        {"param_dtype": torch.bfloat16},
    )
    run_cases(by_dtype, 4, {str(options): (config, options) for options in each})


def refusals(rank, config):
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = random_model(config)

    def said(model, tp=mesh["tp"], **options):
        with pytest.raises(ValueError) as error:
            _parallelize_model(model, mesh["dp"], tp, torch.float32, **options)
        return str(error.value)

    assert "Linear has no plan" in said(nn.Linear(2, 2))
    assert "Linear has no plan" in said(nn.Linear(2, 2), tp=None)
    assert "No module named 'gone'" in said(model, custom_parallel_plan="gone.plan")
    assert "matches no module" in said(model, custom_parallel_plan={"modle": "decoder"})
    odd = random_model(config)
    object.__setattr__(odd.config, "num_attention_heads", 3)
    assert "does not divide the model's 3 query heads. Use 1" in said(odd)
    with pytest.raises(ValueError, match="has no plan"):
        _parallelize_llama(nn.Linear(2, 2), mesh["dp"], mesh["tp"], FLOAT64, OffloadPolicy())


def test_what_cannot_be_parallelized(tmp_path):
    run_world(refusals, 2, config_of(tmp_path))


def test_the_table_of_functions_is_read_by_class_and_by_name(tmp_path):
    from transformers import LlamaForCausalLM, Qwen3ForCausalLM

    for family, function in FUNCTIONS.items():
        assert PARALLIZE_FUNCTIONS[type(random_model(config_of(tmp_path / family, family)))] is function
    assert PARALLIZE_FUNCTIONS[Qwen3ForCausalLM] is _parallelize_qwen
    assert LlamaForCausalLM in PARALLIZE_FUNCTIONS and "LlamaForCausalLM" in PARALLIZE_FUNCTIONS
    assert nn.Linear not in PARALLIZE_FUNCTIONS and PARALLIZE_FUNCTIONS.get(nn.Linear) is None
    assert len(dict(PARALLIZE_FUNCTIONS)) == len(PARALLIZE_FUNCTIONS) == 5
    with pytest.raises(KeyError):
        PARALLIZE_FUNCTIONS["GPT2LMHeadModel"]


def test_a_style_for_rotary_modules_says_why_it_means_nothing():
    with pytest.raises(NotImplementedError, match="RotaryEmbedParallel .* have none: .* Leave the entry out"):
        RotaryEmbedParallel(use_local_output=True)


def local_parts(rank):
    mesh = init_device_mesh("cpu", (2,))
    plain = torch.arange(6.0, requires_grad=True)
    assert to_local_if_dtensor(plain) is plain
    placed = DTensor.from_local(torch.arange(3.0), mesh, [Shard(0)])
    local = to_local_if_dtensor(placed)
    assert not isinstance(local, DTensor)
    local.add_(1)  # the same memory
    assert placed.to_local().tolist() == [1.0, 2.0, 3.0]


def test_the_plain_part_of_a_dtensor():
    run_world(local_parts, 2)


def test_the_package_exports_by_name():
    for name in dtrain.parallel.__all__:
        assert callable(getattr(dtrain.parallel, name)) or name == "PARALLIZE_FUNCTIONS"
    with pytest.raises(AttributeError, match="no attribute 'gone'"):
        _ = dtrain.parallel.gone
