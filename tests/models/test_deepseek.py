"""DeepSeek-V3 on meshes and in files: the ways of training, the router's choices and its bias, the forms of files, what
a config may say. tests/attention/test_mla.py compares its attention with transformers'."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dtrain import models
from dtrain.base.errors import Stopped, UserError
from dtrain.checkpoint.huggingface.export import export
from dtrain.checkpoint.huggingface.merged import full_weights
from dtrain.checkpoint.huggingface.write import write_directory
from dtrain.commands.serve.updates import _tensors_by_name
from dtrain.inference.varlen_decode import choose_varlen_decode
from dtrain.models.common.config import SIGMOID, ExpertsConfig, LatentAttention, RouterSettings
from dtrain.models.common.flops import get_text_flops
from dtrain.models.common.moe import Router, SparseMLP, connect_routing, select_top_k
from dtrain.models.common.routing import BalanceLoss, MicroBatchRouting
from dtrain.models.deepseek import DeepseekV3Mixture
from dtrain.models.registry import FAMILIES
from tests.models.oracle import VARIANTS, make, save
from tests.models.published import CONFIGS
from tests.problem_lines import preflight
from tests.running import assert_each, interrupt, run, run_all, run_directory, trajectory, weights
from tests.tiny import save_weights, tiny_dpo, tiny_grpo, tiny_recipe, write_model

FAMILY, BIAS = "deepseek-v3", "mlp.gate.e_score_correction_bias"


def sft(root, name, *overrides):
    shape = ["train.global_batch=12", "train.steps=3", "scheduler.warmup_steps=0", "moe.balance=0.5"]
    return tiny_recipe(root, *shape, *overrides, family=FAMILY, name=name, tied=False)


def assert_same(ours, expected):
    for mine, right in zip(trajectory(ours), trajectory(expected), strict=True):
        assert mine[:2] == pytest.approx(right[:2], rel=1e-9)


WAYS = {
    "Muon and experts over ranks": ["parallel.ep=2", "optimizer.name=muon"],
    "an adapter and cut heads": ["parallel.tp=2", "lora={rank: 4, dora: true, dropout: 0.2}"],
    "an adapter and a ring": ["parallel.cp=2", "parallel.cp_rotate=ring", "lora={rank: 4}"],
    "latents alone": ["parallel.tp=2", "train.train_only=['*_a_*']"],
    "whole sequences": ["parallel.tp=2", "parallel.sequence_parallel=false"],
    "gathered keys, computed again": ["parallel.cp=2", "train.activation_checkpointing=full"],
}
OF_NUMBERS = ("lora", "optimizer", "train.train_only")  # options that decide them


def test_ways_of_training_change_no_number(tmp_path):
    alone, together = {}, {}
    for way, options in WAYS.items():
        same = [option for option in options if option.startswith(OF_NUMBERS)]
        rows = 12 if any(option.startswith(("parallel.tp", "parallel.cp")) for option in options) else 6
        alone[way] = sft(tmp_path, f"{way}, alone", "train.micro_batch=12", "checkpoint.every=3", *same)
        together[way] = sft(tmp_path, way, f"train.micro_batch={rows}", "checkpoint.every=3", *options)
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
    one = run(tiny_dpo(tmp_path, "train.micro_batch=4", family=FAMILY, name="one"))
    options = ["train.micro_batch=1", "parallel.ep=2", "parallel.tp=2"]
    assert_same(run(tiny_dpo(tmp_path, *options, family=FAMILY, name="many"), 4), one)


def test_rollouts_draw_the_same_tokens_on_every_mesh(tmp_path):
    """Decoding gives the log-probabilities that training computes, and experts of a rollout can be replayed."""
    shape = ["train.steps=2", "scheduler.warmup_steps=0"]
    one = run(tiny_grpo(tmp_path, *shape, family=FAMILY, name="one"))
    options = [*shape, "train.micro_batch=4", "parallel.ep=2", "parallel.tp=2"]
    assert_same(run(tiny_grpo(tmp_path, *options, family=FAMILY, name="many"), 4), one)


def test_a_run_goes_on_with_another_mesh(tmp_path):
    shape = ["train.micro_batch=6", "checkpoint.every=2"]
    whole = run(sft(tmp_path, "whole", *shape, "parallel.tp=2"), 2)
    with pytest.raises((Stopped, AssertionError), match="stopped after step"):
        interrupt(sft(tmp_path, "parts", *shape, "parallel.tp=2"), 2, 2)
    assert_same(run(sft(tmp_path, "parts", *shape, "parallel.ep=2"), 2), whole)


def test_heads_that_do_not_divide_are_refused(tmp_path):
    problems = preflight(sft(tmp_path, "three", "parallel.tp=3"), 3)
    assert any("parallel.tp=3 does not divide the model's 4 query heads" in problem for problem in problems)


def router_of(**settings):
    """A router over 8 experts with an identity in place of its weights: a token's hidden states are its logits."""
    config = models.parse_config(VARIANTS["deepseek-v3"]().to_dict() | {"hidden_size": 8})
    all_settings = {"is_normalized": True, "score_function": SIGMOID, "has_selection_bias": True} | settings
    router = Router(config, ExpertsConfig(8, 2, 5, RouterSettings(**all_settings), layers=(0,))).double()
    with torch.no_grad():
        router.weight.copy_(torch.eye(8))
        router.selection.e_score_correction_bias.zero_()
    return router


LOGITS = torch.tensor([[0.5, 0.4, 3.0, -9.0, 1.0, 1.0, 2.0, -8.0]], dtype=torch.float64)


def test_the_two_best_of_a_group_decide_which_groups_are_left():
    scores = LOGITS[0].sigmoid()
    chosen, token_weights, shares = router_of(num_groups=4, num_top_groups=1, scale=2.5)(LOGITS)
    # Sums of pairs: 1.22, 0.95, 1.46, 0.88. The largest score of all is expert 2's.
    assert chosen.tolist() == [[4, 5]] and token_weights.tolist() == [[1.25, 1.25]]
    torch.testing.assert_close(shares[0], scores / scores.sum())
    assert router_of(num_groups=4, num_top_groups=2)(LOGITS)[0].tolist() == [[4, 5]]  # and 0, 1 are left: both below
    assert router_of(num_groups=4, num_top_groups=4)(LOGITS)[0].tolist() == [[2, 6]] == router_of()(LOGITS)[0].tolist()


def test_a_bias_decides_the_choice_and_not_the_weight():
    router, scores = router_of(is_normalized=False), LOGITS[0].sigmoid()
    with torch.no_grad():
        router.selection.e_score_correction_bias[3] = 5.0
        router.selection.e_score_correction_bias[2] = -7.0
    chosen, token_weights, _ = router(LOGITS)
    assert chosen.tolist() == [[3, 6]]
    torch.testing.assert_close(token_weights[0], scores[[3, 6]])


def test_ties_go_to_the_lower_group_and_expert():
    chosen, token_weights, _ = router_of(num_groups=4, num_top_groups=2)(torch.zeros(1, 8, dtype=torch.float64))
    assert chosen.tolist() == [[0, 1]] and token_weights.tolist() == [[0.5, 0.5]]


def test_logits_far_below_zero_give_no_nan():
    """Sigmoids of -800 are 0 in float32: weights too, as in transformers."""
    router = router_of().float()
    _, token_weights, shares = router(torch.full((1, 8), -800.0))
    assert token_weights.tolist() == [[0.0, 0.0]] and not shares.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_largest_of_scores_of_both_signs_are_the_lower_experts(dtype):
    draw = torch.Generator().manual_seed(0)
    scores = (torch.rand(200, 16, generator=draw).mul(6).floor() - 3) / 4 + 0.0
    scores[:50, ::3] = -torch.inf
    for top in (1, 5, 16):
        order = [sorted(range(16), key=lambda expert, row=row: (-row[expert], expert))[:top] for row in scores.tolist()]
        assert select_top_k(scores.to(dtype), top).tolist() == [sorted(experts) for experts in order]


def sparse_mlp():
    config = models.parse_config(VARIANTS["deepseek-v3"]().to_dict())
    mlp = DeepseekV3Mixture(config, config.experts).double()
    connect_routing(mlp, config.experts.num_experts)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in (*mlp.parameters(), *mlp.buffers()):
            tensor.copy_(torch.randn(tensor.shape, generator=generator, dtype=torch.float64) * 0.3)
    return mlp


def test_the_balance_loss_is_of_scores_divided_by_their_sum():
    """arXiv:2412.19437, equations 17 to 20, of two documents."""
    balance = BalanceLoss(torch.tensor(0.7, dtype=torch.float64))
    x = torch.randn(2, 9, 48, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    owners = torch.tensor([[0] * 9, [1] * 6 + [-1] * 3])
    found, right = sparse_mlp(), sparse_mlp()
    routing = MicroBatchRouting(owners, 2, balance=balance)
    (found(x, owners >= 0, routing) * 0).sum().backward()
    scores = (x @ right.gate.weight.t()).sigmoid()
    chosen = right.gate(x.flatten(0, 1))[0].view(2, 9, -1)
    loss = 0.0
    for document in range(2):
        mine = owners == document
        shares = (scores[mine] / scores[mine].sum(-1, keepdim=True)).mean(0)  # P
        choices = torch.nn.functional.one_hot(chosen[mine], 8).sum((0, 1)).double() * 8 / (3 * mine.sum())  # f
        loss = loss + 0.7 * (choices * shares).sum()
    loss.backward()
    assert abs(routing.record.balance_loss() - loss) < 1e-12
    torch.testing.assert_close(found.gate.weight.grad, right.gate.weight.grad, rtol=1e-12, atol=1e-14)


def test_the_bias_keeps_float32_and_is_not_trained(tmp_path):
    """In a model of bfloat16, in a run and in its export, also as bfloat16; from scratch it is 0."""
    model = save_weights(write_model(tmp_path / "model", FAMILY, tied=False))
    tensors = load_file(model / "model.safetensors")
    biases = {name: torch.linspace(-0.3, 0.3, 8) / 3 for name in tensors if name.endswith(BIAS)}
    assert len(biases) == 2 and not any(tensors[name].any() for name in biases)
    save_file(tensors | biases, model / "model.safetensors")
    in_half = models.from_pretrained(model, torch.bfloat16)
    held = [buffer for name, buffer in in_half.named_buffers() if name.endswith("e_score_correction_bias")]
    for buffer, expected in zip(held, biases.values(), strict=True):
        assert buffer.dtype == torch.float32 and torch.equal(buffer, expected)
    options = [f"model.path={model}", "model.init=pretrained", "train.dtype=bfloat16", "checkpoint.every=3"]
    recipe = sft(tmp_path, "run", *options, "train.micro_batch=6", "parallel.tp=2", "parallel.ep=2")
    recipe = run_all([recipe], 4)[0]
    export(run_directory(recipe), tmp_path / "out", dtype="bfloat16")
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert exported.keys() == tensors.keys()
    for name, tensor in exported.items():
        if name in biases:
            assert torch.equal(tensor, biases[name])
        else:
            assert tensor.dtype == torch.bfloat16 and not torch.equal(tensor.float(), tensors[name])


@pytest.mark.parametrize("form", ["one by one", "stacks"])
@torch.no_grad()
def test_experts_of_files_are_matrices_or_stacks(form, tmp_path):
    """Published files have matrices, transformers' own modules stacks."""
    theirs = make("deepseek-v3")
    directory = save(theirs, tmp_path / "model")
    if form == "stacks":
        save_file(theirs.state_dict(), directory / "model.safetensors", metadata={"format": "pt"})
    names = load_file(directory / "model.safetensors").keys()
    assert any(name.endswith("experts.gate_up_proj") for name in names) == (form == "stacks")
    ours, ids = models.from_pretrained(directory), torch.arange(20)[None]
    assert (ours(ids) - theirs(ids).logits).abs().max() < 1e-5 * theirs(ids).logits.abs().max()


def test_layers_that_predict_further_tokens_are_carried(tmp_path):
    """Unchanged, by an export of a model, and by that of a run."""
    model = save_weights(write_model(tmp_path / "model", FAMILY, tied=False, num_nextn_predict_layers=1))
    tensors = load_file(model / "model.safetensors")
    more = {f"model.layers.3.{name}": torch.randn(3, 4).bfloat16() for name in ("eh_proj.weight", "enorm.weight")}
    save_file(tensors | more, model / "model.safetensors")
    ours = models.from_pretrained(model)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.mul_(1.01)
    write_directory(ours, tmp_path / "out", model)
    options = [f"model.path={model}", "model.init=pretrained", "checkpoint.every=3", "train.micro_batch=12"]
    recipe = run(sft(tmp_path, "run", *options))
    export(run_directory(recipe), tmp_path / "of run")
    for name in ("out", "of run"):
        written = load_file(tmp_path / name / "model.safetensors")
        assert written.keys() == (tensors | more).keys()
        for one, tensor in more.items():
            assert torch.equal(written[one], tensor) and written[one].dtype == tensor.dtype
        assert not any(torch.equal(written[one], tensor) for one, tensor in tensors.items() if not one.endswith(BIAS))
        assert json.loads((tmp_path / name / "config.json").read_text())["num_nextn_predict_layers"] == 1
    save_file(tensors | {"model.layers.2.eh_proj.weight": torch.zeros(2)}, model / "model.safetensors")
    with pytest.raises(UserError, match=r"unexpected: model\.layers\.2\.eh_proj\.weight"):
        models.from_pretrained(model)  # one of the model's own layers


@pytest.mark.parametrize(("layers", "predicting"), [(2, 0), (1, 1)])
def test_layers_beyond_those_that_config_json_says_are_refused(tmp_path, layers, predicting):
    """A config.json that says too few layers is of another model than the files, of which a part would be trained."""
    model = save_weights(write_model(tmp_path / "model", FAMILY, tied=False))  # of 3 layers
    counts = {"num_hidden_layers": layers, "num_nextn_predict_layers": predicting}
    write_model(model, FAMILY, tied=False, **counts)
    with pytest.raises(UserError, match=r"unexpected: model\.layers\.2\.input_layernorm\.weight"):
        models.from_pretrained(model)


@torch.no_grad()
def test_what_servers_are_sent_fills_a_model_by_the_names_of_files(tmp_path):
    source = save(make("deepseek-v3"), tmp_path)
    ours, other = models.from_pretrained(source), models.from_pretrained(source)
    for tensor in (*other.parameters(), *other.buffers()):
        tensor.zero_()
    found, stored = _tensors_by_name(other), load_file(source / "model.safetensors")
    sent = {ours.checkpoint_names(name)[0]: weight.read(torch.float32) for name, weight in full_weights(ours).items()}
    assert sent.keys() == stored.keys()
    for name, tensor in sent.items():
        assert tensor.is_contiguous() and torch.equal(tensor, stored[name])
        found[name].fill(tensor)
    assert all(torch.equal(one, other.state_dict()[name]) for name, one in ours.state_dict().items())


def test_flops_are_of_both_head_sizes_and_the_experts_of_a_token():
    config = models.parse_config(VARIANTS["deepseek-v3"]().to_dict())
    model = models.build(config, device="meta")
    numbers = {name: one.numel() for name, one in model.named_parameters() if "embed_tokens" not in name}
    stacks = sum(size for name, size in numbers.items() if ".experts." in name)
    found = get_text_flops(model)
    assert found.per_token == 6 * (sum(numbers.values()) - stacks + stacks * 3 / 8)
    # A score of 18 elements and a sum of values of 14, of 4 heads in 3 layers; 2 a product, 3 products with gradients.
    assert found.per_pair == 6 * 4 * (18 + 14) * 3 and found.per_windowed_pair == 0


def test_matrices_of_a_model_are_counted():
    for variant in ("deepseek-v3", "moonlight"):
        config = models.parse_config(VARIANTS[variant]().to_dict())
        model = models.build(config, device="meta")
        assert config.num_parameters == sum(one.numel() for one in model.parameters() if one.dim() > 1)


PUBLISHED = {"deepseek-v3": 671_026_404_352, "moonlight-16b-a3b": 15_960_108_544}  # of all but layers behind the last


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name):
    config = models.parse_config(CONFIGS[name])
    model = models.build(config, device="meta")
    assert sum(one.numel() for one in model.parameters()) == PUBLISHED[name]
    (shape,) = config.attention_shapes(tp=8)
    assert (shape["head_dim"], shape["value_dim"]) == (192, 128)
    assert models.parse_config(CONFIGS[name] | {"model_type": "kimi_k2"}) == config


def test_decoding_on_a_gpu_attends_by_products():
    """Flash attention of a step was not tried with heads of two sizes: it steps aside, and says why."""
    config = models.parse_config(CONFIGS["deepseek-v3"])
    reason = "decoding attends by products: heads have 192 elements in keys and 128 in values"
    assert choose_varlen_decode(config, torch.bfloat16, torch.device("cuda")) == (None, reason)


def test_it_is_one_file_of_few_lines():
    path = Path(*FAMILIES["DeepseekV3ForCausalLM"].module.split(".")).with_suffix(".py")
    assert len((Path(models.__file__).parents[2] / path).read_text().splitlines()) <= 300


def test_an_expert_without_a_token_has_a_gradient_of_zeros():
    mlp = sparse_mlp()
    with torch.no_grad():
        mlp.gate.selection.e_score_correction_bias[6] = -1e4
    mlp(torch.randn(1, 9, 48, dtype=torch.float64)).sum().backward()
    assert all((stack.grad[6] == 0).all() for stack in mlp.experts.parameters())
    assert isinstance(mlp, SparseMLP) and all(one.grad.any() for one in mlp.shared_experts.parameters())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scoring_func": "softmax"}, "scoring_func 'softmax': only 'sigmoid' is implemented"),
        ({"topk_method": "greedy"}, "topk_method 'greedy': only 'noaux_tc' is implemented"),
        ({"moe_layer_freq": 2}, "moe_layer_freq 2: only 1 is implemented"),
        ({"n_group": 3}, "n_group 3 of 8 experts: must divide them into groups of two or more"),
        ({"n_group": 8}, "n_group 8 of 8 experts: must divide them into groups of two or more"),
        ({"topk_group": 1}, "topk_group 1 of 4 groups of 2 experts: a token goes to 3 experts"),
        ({"topk_group": 5}, "topk_group 5 of 4 groups of 2 experts: a token goes to 3 experts"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 of 8 experts"),
        ({"num_key_value_heads": 2}, "num_key_value_heads 2: each of the 4 heads has keys of its own here"),
        ({"head_dim": 12}, "head_dim 12 is not qk_rope_head_dim 8"),
        ({"qk_rope_head_dim": 7, "head_dim": 7}, "head_dim 7 is odd, rotary embeddings need pairs"),
        ({"output_router_logits": True}, "output_router_logits True: moe.balance adds a balance loss"),
        ({"attention_dropout": 0.1}, "attention_dropout 0.1: dropout is not implemented"),
        ({"index_topk": 64}, "index_topk 64: not a field that dtrain knows"),  # sparse attention of DeepSeek-V3.2
    ],
)
def test_fields_that_cannot_be_used_are_refused(changes, message):
    with pytest.raises(UserError) as error:
        models.parse_config({**VARIANTS["deepseek-v3"]().to_dict(), **changes})
    assert message in str(error.value)


def test_a_file_that_says_little_is_the_large_model():
    config = models.parse_config({"architectures": ["DeepseekV3ForCausalLM"], "vocab_size": 129_280} | SIZES)
    router, latent = config.experts.router, config.latent_attention
    assert router == RouterSettings(True, SIGMOID, num_groups=8, num_top_groups=4, has_selection_bias=True, scale=2.5)
    assert latent == LatentAttention(
        q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128, is_interleaved=True
    )
    assert (config.experts.num_experts, config.experts.top_k) == (256, 8)
    assert (config.experts.intermediate_size, config.experts.shared_intermediate_size) == (2048, 2048)
    assert config.experts.layers[0] == 3 and config.attention_scale == 192**-0.5


SIZES = {"hidden_size": 7168, "intermediate_size": 18_432, "num_hidden_layers": 61}
