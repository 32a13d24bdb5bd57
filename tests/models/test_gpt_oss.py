"""gpt-oss on meshes and in files: the ways of training, resuming, what servers are sent, biases, what a config may
say."""

from functools import partial

import pytest
import torch

from dtrain import models
from dtrain.base.errors import Stopped, UserError
from dtrain.checkpoint.huggingface.merged import full_weights
from dtrain.commands.serve.updates import _tensors_by_name
from dtrain.models.common.moe import SparseMLP, connect_routing
from dtrain.optim.muon import is_matrix
from dtrain.optim.update import parameter_groups
from tests.models.oracle import VARIANTS, make, save
from tests.running import assert_each, interrupt, run, run_all, trajectory, weights
from tests.tiny import tiny_dpo, tiny_grpo, tiny_recipe


def sft(root, name, *overrides):
    shape = ["train.global_batch=12", "train.steps=3", "scheduler.warmup_steps=0", "moe.balance=0.5"]
    return tiny_recipe(root, *shape, *overrides, family="gpt-oss", name=name, tied=False)


def assert_same(ours, expected):
    for mine, right in zip(trajectory(ours), trajectory(expected), strict=True):
        assert mine[:2] == pytest.approx(right[:2], rel=1e-9)


WAYS = {
    "Muon": ["parallel.ep=2", "optimizer.name=muon"],
    "an adapter": ["parallel.ep=2", "lora={rank: 4}"],
    "sinks alone": ["parallel.tp=2", "train.train_only=['*.sinks']"],
}


def test_ways_of_training_change_no_number(tmp_path):
    alone, together = {}, {}
    for way, options in WAYS.items():
        same = [option for option in options if option.startswith(("lora", "optimizer", "train.train_only"))]
        alone[way] = sft(tmp_path, f"{way}, alone", "train.micro_batch=12", "checkpoint.every=3", *same)
        together[way] = sft(tmp_path, way, "train.micro_batch=6", "checkpoint.every=3", *options)
    run_all([*alone.values()])
    run_all([*together.values()], 2)
    assert_each([(way, partial(assert_one_way, together[way], alone[way])) for way in WAYS])


def assert_one_way(recipe, reference):
    assert_same(recipe, reference)
    mine, right = weights(recipe, 3), weights(reference, 3)
    assert mine.keys() == right.keys()
    for name, tensor in right.items():
        assert (mine[name] - tensor).abs().max() <= 1e-9 * tensor.abs().max(), name


def test_preferences_on_a_mesh(tmp_path):
    one = run(tiny_dpo(tmp_path, "train.micro_batch=4", family="gpt-oss", name="one"))
    assert_same(run(tiny_dpo(tmp_path, "train.micro_batch=1", "parallel.ep=2", family="gpt-oss", name="many"), 2), one)


def test_rollouts_draw_the_same_tokens_on_every_mesh(tmp_path):
    """Decoding, with its caches and windows, gives the log-probabilities that training computes: the loss is 0 at the
    first step, where policy and rollout are one."""
    shape = ["train.steps=2", "scheduler.warmup_steps=0"]
    one = run(tiny_grpo(tmp_path, *shape, family="gpt-oss", name="one"))
    options = [*shape, "train.micro_batch=4", "parallel.ep=2", "parallel.tp=2"]
    assert_same(run(tiny_grpo(tmp_path, *options, family="gpt-oss", name="many"), 4), one)


def test_a_run_goes_on_with_another_ep(tmp_path):
    shape = ["train.micro_batch=6", "checkpoint.every=2"]
    whole = run(sft(tmp_path, "whole", *shape, "parallel.tp=2"), 2)
    with pytest.raises((Stopped, AssertionError), match="stopped after step"):
        interrupt(sft(tmp_path, "parts", *shape, "parallel.tp=2"), 2, 2)
    assert_same(run(sft(tmp_path, "parts", *shape, "parallel.ep=2"), 2), whole)


@torch.no_grad()
def test_what_servers_are_sent_fills_a_model_by_the_names_of_files(tmp_path):
    source = save(make("gpt-oss"), tmp_path)
    ours, other = models.from_pretrained(source), models.from_pretrained(source)
    for parameter in other.parameters():
        parameter.zero_()
    found = _tensors_by_name(other)
    for name, weight in full_weights(ours).items():
        (outer,) = ours.checkpoint_names(name)
        sent = weight.read(torch.float32)
        assert sent.is_contiguous() and found[outer].shape == list(sent.shape)
        found[outer].fill(sent)
    assert all(torch.equal(one, two) for one, two in zip(ours.parameters(), other.parameters(), strict=True))


def test_biases_of_idle_experts_have_gradients_of_zeros():
    config = models.parse_config(VARIANTS["gpt-oss"]().to_dict())
    mlp = SparseMLP(config, config.experts).double()
    connect_routing(mlp, config.experts.num_experts)
    with torch.no_grad():
        for parameter in mlp.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(0))
        mlp.gate.bias[3] = -1e4
    for tokens in (9, 0):
        mlp.zero_grad()
        mlp(torch.randn(1, tokens, 48, dtype=torch.float64)).sum().backward()
        for name in ("gate_proj", "up_proj", "down_proj"):
            grad = mlp.experts.get_submodule(name).bias.grad
            assert bool((grad[3] == 0).all()) and bool((grad != 0).any()) == (tokens > 0)


def test_biases_of_experts_do_not_decay_and_are_no_matrices():
    model = models.build(models.parse_config(VARIANTS["gpt-oss"]().to_dict()), device="meta")
    named = dict(model.named_parameters())
    biases = [named["model.layers.0.mlp.experts.down_proj.bias"], named["model.layers.0.self_attn.scores.sinks"]]
    _, others = parameter_groups(named.items(), 0.1)
    assert all(any(one is bias for one in others["params"]) for bias in biases)
    assert not is_matrix("model.layers.0.mlp.experts.down_proj.bias", biases[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu': only 'silu' is implemented"),
        ({"num_local_experts": 0}, "num_local_experts 0: in this architecture every MLP is a mixture"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 of 6 experts"),
        ({"experts_per_token": 5}, "experts_per_token and num_experts_per_tok differ"),
        ({"output_router_logits": True}, "output_router_logits True: moe.balance adds a balance loss"),
        ({"attention_dropout": 0.1}, "attention_dropout 0.1: dropout is not implemented"),
        ({"sliding_window": None}, "layer_types has sliding_attention, but no sliding_window is set"),
        ({"swiglu_limit": 0.0}, "swiglu_limit"),
        ({"swiglu_beta": 2.0}, "swiglu_beta"),
    ],
)
def test_fields_that_cannot_be_used_are_refused(changes, message):
    with pytest.raises(UserError) as error:
        models.parse_config({**VARIANTS["gpt-oss"]().to_dict(), **changes})
    assert message in str(error.value)


def test_a_file_that_says_little_is_the_large_model():
    config = models.parse_config({"architectures": ["GptOssForCausalLM"]})
    rope = config.ropes["full_attention"]
    assert (config.experts.num_experts, config.experts.top_k, config.experts.clamp) == (128, 4, (1.702, 7.0))
    assert (rope.kind, rope.theta, rope.factor, rope.truncate) == ("yarn", 150_000.0, 32.0, False)
    assert config.layer_types[:2] == ("sliding_attention", "full_attention") and config.sliding_window == 128
