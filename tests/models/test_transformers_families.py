"""Families of the transformers library that dtrain does not have: losses and gradients, on one process and on meshes.

The oracle is transformers with eager attention, one document at a time (`library_oracle`).
"""

import json

import pytest
import torch
import transformers
from torch.distributed.device_mesh import init_device_mesh

from dtrain.attention.context import GatherKernel
from dtrain.attention.kernels import SdpaKernel
from dtrain.base.errors import UserError
from dtrain.models import build, parse_config
from dtrain.parallel.apply import apply_plan
from dtrain.parallel.collectives import all_reduce
from dtrain.parallel.context import shard_streams
from dtrain.parallel.parallelize import _parallelize_model
from tests.models.library_configs import tiny_config
from tests.models.library_oracle import (
    DOCUMENTS,
    Numbers,
    backward,
    compute_expected,
    compute_packed,
    copy_weights,
    find_difference,
    make_oracle,
    make_rows,
    packed_streams,
)
from tests.world import run_world

LOSS, GRADIENT = 1e-9, 1e-7
FAMILIES = (
    "apertus", "cohere2", "deepseek_v3", "ernie4_5", "exaone4", "glm4", "gpt2", "helium", "phimoe", "seed_oss",
    "starcoder2",
)  # fmt: skip
# Windows, norms around layers, latent attention with a mixture, xIELU, a mixture with biases, sinks.
ON_MESHES = ("cohere2", "glm4", "deepseek_v3", "apertus", "phimoe", "mimo_v2_flash")
TWINS = ("gemma3_text", "olmo2", "qwen3")


def values_of(model_type):
    values = json.loads(tiny_config(model_type).to_json_string(use_diff=False))
    cls = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[transformers.CONFIG_MAPPING[model_type]]
    return values | {"architectures": [cls.__name__]}


def oracle_of(model_type):
    return make_oracle(tiny_config(model_type))


def model_of(model_type, library_model, implementation="transformers"):
    model = build(parse_config(values_of(model_type), implementation=implementation), torch.float64)
    copy_weights(model, library_model)
    return model


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_packed_row_is_its_documents_one_at_a_time(model_type):
    library_model = oracle_of(model_type)
    expected = compute_expected(library_model)
    assert find_difference(compute_packed(model_of(model_type, library_model)), expected, LOSS, GRADIENT) == ""


@pytest.mark.parametrize("model_type", TWINS)
def test_native_twins_have_the_same_numbers(model_type):
    library_model = oracle_of(model_type)
    native = compute_packed(model_of(model_type, library_model, "native"))
    twin = compute_packed(model_of(model_type, library_model))
    assert find_difference(twin, native, LOSS, GRADIENT) == ""


def on_two_ranks(rank, expected):
    """Compute each family on dp 2, cp 2 and tp 2. Return how the numbers differ."""
    mesh = init_device_mesh("cpu", (2,))
    group = mesh.get_group()
    differences = {}
    for model_type, numbers in expected.items():
        library_model = oracle_of(model_type)
        streams = packed_streams(library_model.config.vocab_size)

        model = model_of(model_type, library_model)
        apply_plan(model, mesh, model.plan, sequence_parallel=False)
        differences[model_type, "tp"] = find_difference(compute_packed(model), numbers, LOSS, GRADIENT)

        model = model_of(model_type, library_model)
        model.use_kernel(GatherKernel(SdpaKernel(), mesh))
        local = shard_streams(streams, mesh)
        logits = model(local["input_ids"], local["position_ids"], local["seq_ids"])
        share = backward(model, logits, local["weights"])
        summed = {name: all_reduce(gradient, group) for name, gradient in share.gradients.items()}
        loss = float(all_reduce(torch.tensor(share.loss, dtype=torch.float64), group))
        differences[model_type, "cp"] = find_difference(Numbers(loss, summed), numbers, LOSS, GRADIENT)

        model = _parallelize_model(model_of(model_type, library_model), mesh, None, torch.float64)
        ids, weights = make_rows(library_model.config.vocab_size)
        # Each rank has one of the documents, in a row of its own.
        document, share_of_weights = (tensor.split(DOCUMENTS, dim=1)[rank] for tensor in (ids, weights))
        share = backward(model, model(document), share_of_weights)
        loss = float(all_reduce(torch.tensor(share.loss, dtype=torch.float64), group))
        differences[model_type, "dp"] = find_difference(Numbers(loss, share.gradients), numbers, LOSS, GRADIENT)
    return {case: difference for case, difference in differences.items() if difference}


def test_families_on_meshes():
    expected = {model_type: compute_expected(oracle_of(model_type)) for model_type in ON_MESHES}
    assert run_world(on_two_ranks, 2, expected) == [{}, {}]


def on_four_ranks(rank, expected):
    """Compute a model of 2 key heads on 4 tp ranks, of which two compute the same head."""
    mesh = init_device_mesh("cpu", (4,))
    differences = {}
    for model_type, numbers in expected.items():
        model = model_of(model_type, oracle_of(model_type))
        assert model.config.num_key_value_heads == 2
        apply_plan(model, mesh, model.plan, sequence_parallel=False)
        differences[model_type] = find_difference(compute_packed(model), numbers, LOSS, GRADIENT)
    return {case: difference for case, difference in differences.items() if difference}


def test_fewer_key_heads_than_ranks():
    expected = {model_type: compute_expected(oracle_of(model_type)) for model_type in ("glm4", "starcoder2")}
    assert run_world(on_four_ranks, 4, expected) == [{}] * 4


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": "x36"}, "hidden_size"),
        ({"layer_types": ["sliding_attention", "weird_attention"]}, "weird_attention"),
        ({"hidden_act": "blurb"}, "does not know 'blurb'"),
    ],
)
def test_a_wrong_field_is_refused_on_one_line_that_names_the_file(changes, named):
    values = {**tiny_config("cohere2").to_dict(), "architectures": ["Cohere2ForCausalLM"], **changes}
    with pytest.raises(UserError, match=named) as refusal:
        parse_config(values, "m/config.json")
    assert str(refusal.value).startswith("m/config.json: transformers")
    assert "\n" not in str(refusal.value)


def test_a_class_without_a_plan_is_refused_under_tp_only():
    model = model_of("gpt2", oracle_of("gpt2"))
    assert set(model.plan) == {"model.wte", "lm_head"}
