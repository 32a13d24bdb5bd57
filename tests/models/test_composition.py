"""The decoder under what the policy puts around it: checkpointing, FSDP2, torch.compile, meta and fake tensors."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._composable import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from dtrain import models
from dtrain.models.common.functions import ACTIVATIONS, gated_activation, rms_norm
from dtrain.models.common.micro_batch import MicroBatchContext
from tests.cases import run_cases
from tests.models.oracle import VARIANTS, packed_rows
from tests.world import run_world

BATCH = packed_rows([[40, 1, 33], [70, 12]], padding=[16, 8])


def build(variant="gemma3", dtype=torch.float64):
    model = models.build(models.parse_config(VARIANTS[variant]().to_dict()), dtype=dtype)
    models.init_weights(model, 0)
    return model


def loss_of(hidden, weight):
    return (hidden @ weight.T).square().mean()


def step(model):
    loss = model.with_head(loss_of, BATCH[0], MicroBatchContext(*BATCH[1:]))
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}


def assert_same(left, right, tolerance=1e-12):
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.trap(
    "activation checkpointing changes what is trained",
    "huggingface/transformers #26221",
    "some layers get no gradient",
    "not one bit changes",
)
@pytest.mark.parametrize("variant", ["gemma3", "llama3.2"])
def test_activation_checkpointing_changes_no_bit(variant):
    model = build(variant)
    for layer in model.model.layers:
        checkpoint(layer)
    assert_same(step(model), step(build(variant)), 0.0)


@pytest.mark.slow
def test_compiled_layers():
    variant = "gemma3"
    model = build(variant)
    for layer in model.model.layers:
        layer.compile(fullgraph=True, backend="aot_eager")  # tests/policy/test_compile.py has torch's own kernels
    assert_same(step(model), step(build(variant)), 1e-10)


def _fsdp(rank, world_size, variant, param_dtype):
    expected = step(build(variant))
    mesh = init_device_mesh("cpu", (world_size,))
    model = build(variant)
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float64)
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    register_fsdp_forward_method(model, "with_head")
    ours = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in step(model).items()}
    if param_dtype == torch.float64:
        assert_same(ours, expected)
    return ours["loss"].dtype == param_dtype and abs(ours["loss"] / expected["loss"] - 1).item() < 0.05


def test_fsdp():
    each = [(variant, dtype) for variant in ("gemma3", "llama3.2") for dtype in (torch.float64, torch.bfloat16)]
    for name, ranks in run_cases(_fsdp, 2, {str(case): (2, *case) for case in each}).items():
        assert ranks == [True, True], name


def _functions_on_dtensors(rank):
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    x, up, weight = torch.randn(2, 6, 8), torch.randn(2, 6, 8), torch.randn(8)
    results = []
    for distribute in (False, True):
        a, b, w = x.clone(), up.clone(), weight.clone()
        if distribute:
            a, b, w = (distribute_tensor(t, mesh, [p]) for t, p in ((a, Shard(1)), (b, Shard(1)), (w, Replicate())))
        leaves = [t.requires_grad_() for t in (a, b, w)]
        out = gated_activation(rms_norm(a, w, 1e-6), b, ACTIVATIONS["silu"])
        out.square().sum().backward()
        results.append([t.full_tensor() if distribute else t for t in (out, *(leaf.grad for leaf in leaves))])
    return all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(*results, strict=True))


def test_functions_run_on_sequence_sharded_dtensors():
    assert run_world(_functions_on_dtensors, 2) == [True, True]


def test_meta_then_memory_then_weights():
    model = models.build(models.parse_config(VARIANTS["llama3.2"]().to_dict()), dtype=torch.float64, device="meta")
    assert all(p.is_meta for p in model.parameters()) and not list(model.buffers())
    model.to_empty(device="cpu")
    model.tie_weights()
    models.init_weights(model, 0)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert_same(step(model), step(build("llama3.2")), 0.0)


def test_a_plan_can_trace_it_without_memory():
    model = models.build(models.parse_config(VARIANTS["gemma3"]().to_dict()), device="meta")
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        ids, positions, owners = (stream.new_empty(stream.shape) for stream in BATCH)
        model.with_head(loss_of, ids, MicroBatchContext(positions, owners)).backward()
        assert model(ids).shape == (2, 90, 97)


def test_local_heads_are_counted_from_the_projections():
    """One of two tensor-parallel ranks: half the heads, half of o_proj's columns; the two sum to the whole."""
    whole = build("qwen3")
    attention = whole.model.layers[0].self_attn
    from dtrain.attention.visibility import Visibility
    from dtrain.models.common.functions import rotary_tables

    hidden = torch.randn(2, 10, 48, dtype=torch.float64)
    rotary = rotary_tables(whole.config.ropes["full_attention"], 16, torch.arange(10)[None], torch.float64)
    mask = attention.kernel.prepare(Visibility(10, 10), torch.float64, hidden.device)

    def attend(attention):
        return attention.o_proj(attention(*attention.project(hidden, rotary, None), mask))

    expected = attend(attention)
    total = torch.zeros_like(expected)
    for rank in range(2):
        part = build("qwen3").model.layers[0].self_attn
        for projection in (part.q_proj, part.k_proj, part.v_proj):
            projection.weight = torch.nn.Parameter(projection.weight.chunk(2, 0)[rank])
        part.o_proj.weight = torch.nn.Parameter(part.o_proj.weight.chunk(2, 1)[rank])
        total += attend(part)
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=1e-12)
