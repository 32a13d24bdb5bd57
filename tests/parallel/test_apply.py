"""Plans: a user's own tables, what is refused before it trains wrong numbers, and where a plan is found."""

import copy

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from dtrain.base.errors import UserError
from dtrain.models.common.decoder import DECODER_PLAN
from dtrain.models.gemma3 import Gemma3ForCausalLM
from dtrain.models.qwen import Qwen3ForCausalLM
from dtrain.parallel.apply import apply_plan, find_plan
from dtrain.parallel.tensor import colwise
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

ATTENTION = {name: style for name, style in DECODER_PLAN.items() if "self_attn" in name}
MLP = {name: style for name, style in DECODER_PLAN.items() if "mlp" in name}
VOCABULARY = {name: DECODER_PLAN[name] for name in ("model", "model.embed_tokens", "lm_head")}
TORCH_MLP = {
    "model.layers.*.mlp.gate_proj": ColwiseParallel(),
    "model.layers.*.mlp.up_proj": ColwiseParallel(),
    "model.layers.*.mlp.down_proj": RowwiseParallel(),
}
TABLES = {
    "only attention": ATTENTION,
    "only MLPs": MLP,
    "MLPs of the second layer": {name.replace("*", "1"): style for name, style in MLP.items()},
    "only the vocabulary": VOCABULARY,
    "a function as a style": {**DECODER_PLAN, "model.layers.*.mlp.gate_proj": colwise},
    "torch's styles": TORCH_MLP,
    "torch's styles beside ours": {**ATTENTION, **TORCH_MLP},
    "the last pattern counts": {
        "model.layers.*.mlp": "block",
        "model.layers.*.mlp.*": "colwise",
        "model.layers.*.mlp.down_proj": "rowwise",
    },
    "nothing": {},
}


def with_table(rank, config, table):
    model, batch = random_model(config), random_batch(config.vocab_size)
    expected_loss, expected = dense_gradients(model, [batch])
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    apply_plan(model, mesh, table, sequence_parallel=False)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    loss = dense_loss(model, batch)
    assert abs(loss.item() - expected_loss) <= 1e-12 * abs(expected_loss)
    loss.backward()
    assert_gradients(model, expected)


def test_a_table_of_ones_own_gives_the_same_numbers(tmp_path):
    configs = {tied: config_of(tmp_path / str(tied), tied=tied) for tied in (True, False)}
    run_cases(
        with_table, 2, {f"{name}, tied={tied}": (configs[tied], TABLES[name]) for name in TABLES for tied in configs}
    )


def without(plan, *names):
    return {name: style for name, style in plan.items() if name not in names}


LAYER = "model.layers.*"
REFUSED = {
    "no such module": ({"model.layer.*.mlp": "block"}, False, "model.layer.*.mlp: matches no module"),
    "no such style": ({f"{LAYER}.mlp": "blok"}, False, "there is no style 'blok'; there are block, colwise"),
    "input never entered": (without(MLP, f"{LAYER}.mlp"), False, "colwise needs the style block on model.layers.*.mlp"),
    "output never summed": (without(MLP, f"{LAYER}.mlp.down_proj"), False, "a block needs a rowwise layer"),
    "half of a block": (
        without(MLP, f"{LAYER}.mlp.up_proj"),
        False,
        "up_proj: has no style, and model.layers.*.mlp is",
    ),
    "not for a block": (
        {**MLP, f"{LAYER}.mlp.up_proj": "sequence"},
        False,
        "sequence is no style of a layer in a block",
    ),
    "a head without its decoder": (without(VOCABULARY, "model"), False, "vocab_head and decoder go together"),
    "a decoder without its head": ({"model": "decoder"}, False, "vocab_head and decoder go together"),
    "half of a tie": ({"model.embed_tokens": "vocab_embedding"}, False, "share a parameter: both have a style"),
    "a norm left whole": (without(DECODER_PLAN, "model.norm"), True, "model.norm: has no style, and sequence parallel"),
    "nothing cuts the sequence": ({**ATTENTION, **MLP}, True, "needs the styles decoder and vocab_embedding"),
    "a function in a block that nothing cuts": (
        {**MLP, f"{LAYER}.mlp.gate_proj": colwise},
        True,
        "needs the styles decoder and vocab_embedding",
    ),
    "half of a tie, beside torch's styles": (
        {**TORCH_MLP, "model.embed_tokens": "vocab_embedding"},
        False,
        "share a parameter: both have a style",
    ),
    "half of a block, beside torch's styles": (
        {**TORCH_MLP, **without(ATTENTION, f"{LAYER}.self_attn.o_proj")},
        False,
        "model.layers.*.self_attn: a block needs a rowwise layer",
    ),
    "a style of another module": (
        {**MLP, f"{LAYER}.input_layernorm": "block"},
        False,
        "model.layers.*.input_layernorm: block is a style of a Block (dtrain.parallel.tensor), and this is a RMSNorm",
    ),
    "one layer alone": (
        {**MLP, "model.layers.1.mlp.up_proj": "sequence"},
        False,
        "model.layers.1.mlp.up_proj: sequence is no style",
    ),
}


def refused(rank, config, table, sequence_parallel):
    model = random_model(config)
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    try:
        apply_plan(model, mesh, table, sequence_parallel=sequence_parallel)
    except UserError as error:
        assert before == {name: id(parameter) for name, parameter in model.named_parameters()}
        torch.distributed.barrier()  # a rank that leaves at once closes what the others are still connecting to
        return str(error)


def test_a_table_that_would_train_wrong_numbers_is_refused(tmp_path):
    config = config_of(tmp_path)
    said = run_cases(refused, 2, {name: (config, *arguments) for name, (*arguments, _) in REFUSED.items()})
    wrong = {
        name: said[name] for name, (*_, message) in REFUSED.items() if any(message not in one for one in said[name])
    }
    assert not wrong


def test_every_problem_of_a_table_is_listed_once_with_what_to_set(tmp_path):
    cases = {
        "several": (config_of(tmp_path / "few"), {"a": "b", "model.layers.*.mlp": "c"}, False),
        "all layers": (config_of(tmp_path / "nine", num_hidden_layers=9), MLP, True),
    }
    said = {name: ranks[0] for name, ranks in run_cases(refused, 2, cases).items()}
    assert said["several"].count("\n") == 3
    lines = said["all layers"].splitlines()[1:]
    fix = "; give it one, or set parallel.sequence_parallel=false"
    assert f"  model.layers.*.self_attn.q_proj: has no style, and sequence parallel cuts what it reads{fix}" in lines
    assert len(lines) == len(set(lines)) < 12


def test_every_pattern_of_the_families_names_a_module(tmp_path):
    for family in ("llama", "qwen2", "qwen3", "gemma3"):
        model = random_model(config_of(tmp_path, family))
        names = {name.replace(".0.", ".*.") for name, _ in model.named_modules()}
        assert set(model.plan) <= names
        with_parameters = {name.replace(".0.", ".*.") for name, module in model.named_modules() if module._parameters}
        assert {name for name in with_parameters if ".1." not in name and ".2." not in name} <= set(model.plan)
    assert Qwen3ForCausalLM.plan != Gemma3ForCausalLM.plan


def a_plan():
    return {"model.layers.*.mlp": "block"}


def a_plan_for(model):
    return dict.fromkeys(model.plan, "block")


A_TABLE = {"lm_head": "vocab_head"}
NO_TABLE = 7


def test_where_a_plan_is_found(tmp_path):
    model = random_model(config_of(tmp_path))
    here = "tests.parallel.test_apply"
    assert find_plan(None, model) is model.plan
    assert find_plan(A_TABLE, model) is A_TABLE
    assert find_plan(f"{here}.A_TABLE", model) is A_TABLE
    assert find_plan(f"{here}.a_plan", model) == a_plan()
    assert find_plan(f"{here}.a_plan_for", model) == dict.fromkeys(model.plan, "block")
    assert find_plan("dtrain.models.common.decoder.DECODER_PLAN", model) is DECODER_PLAN


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no.such.plan", "No module named 'no'"),
        ("tests.parallel.test_apply.gone", "has no gone"),
        ("plan", "Known: an import path such as"),
        ("tests.parallel.test_apply.NO_TABLE", "is a int, not a table"),
    ],
)
def test_where_no_plan_is_found(path, message):
    with pytest.raises(UserError, match=message):
        find_plan(path, None)


def test_a_plan_applied_to_a_copy_leaves_the_model_alone(tmp_path):
    model = random_model(config_of(tmp_path))
    kinds = {name: type(module) for name, module in model.named_modules()}
    run_world(applied_to_a_copy, 2, model)
    assert kinds == {name: type(module) for name, module in model.named_modules()}


def applied_to_a_copy(rank, model):
    copied = copy.deepcopy(model)
    apply_plan(copied, init_device_mesh("cpu", (2,)), copied.plan, sequence_parallel=True)
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    assert type(copied.model).__name__ == type(model.model).__name__
    assert torch.equal(dense_loss(copy.deepcopy(model), random_batch(67)), dense_loss(model, random_batch(67)))
