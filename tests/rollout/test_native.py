"""The engine on a mesh: every rank gets the tokens and logprobs of one process, whatever the mesh, and the model is
left as it was."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from dtrain import models
from dtrain.attention.context import GatherKernel, RingKernel
from dtrain.attention.kernels import SdpaKernel
from dtrain.base.errors import UserError
from dtrain.inference.engine import Engine
from dtrain.inference.kv_cache import Budget
from dtrain.inference.native import NativeEngine, _MeshPeers, distribute_requests
from dtrain.inference.request import Request, SamplingParams
from dtrain.memory.activation_checkpointing import checkpoint_activations
from dtrain.models.common.micro_batch import MicroBatchContext
from dtrain.parallel.apply import apply_plan
from dtrain.parallel.experts import shard_experts
from dtrain.parallel.fsdp import Sharding, mixed_precision, shard_model
from dtrain.parallel.mesh import Runtime, build_mesh
from dtrain.parallel.placement import local_tensor
from tests.models.oracle import VARIANTS
from tests.rollout.test_engine import same
from tests.rollout.test_graphs import Makers
from tests.world import run_world

PROMPTS = [[3, 14, 15, 9, 2, 6], [5], list(range(17))]
KINDS = [
    SamplingParams(14, 0.0),
    SamplingParams(11, 1.0),
    SamplingParams(9, 0.7, top_k=30, top_p=0.9),
    SamplingParams(12, 1.0, stop_ids=tuple(range(0, 97, 7)), stop=("b",)),
]
REQUESTS = [Request(p, kind, 1, i, j) for i, p in enumerate(PROMPTS) for j, kind in enumerate(KINDS)]


def spelled(ids):
    return "".join("ab"[token % 13 == 0] for token in ids)


def build(variant, dtype=torch.float64):
    model = models.build(models.parse_config(VARIANTS[variant]().to_dict()), dtype=dtype)
    models.init_weights(model, 0)
    return model


def policy_of(model, mesh):
    """Return what the engine needs of a policy."""
    precision = SimpleNamespace(compute=next(model.parameters()).dtype)
    sharding, device = Sharding(model), torch.device("cpu")
    return SimpleNamespace(model=model, sharding=sharding, mesh=mesh, device=device, precision=precision)


def on_mesh(rank, variant, sizes, *, sp=False, ring=False, dtype=torch.float64, compute=torch.float64):
    mesh = build_mesh(Runtime(rank=rank), **sizes)
    model = build(variant, dtype)
    if mesh.tp.size() > 1:
        apply_plan(model, mesh.tp, model.plan, sequence_parallel=sp)
    if mesh.ep is not None:
        shard_experts(model, mesh.ep, mesh.tp)
    if mesh.cp.size() > 1:
        model.use_kernel((RingKernel if ring else GatherKernel)(SdpaKernel(), mesh.cp))
    checkpoint_activations(model, "full")
    shard_model(model, mesh.fsdp, mixed_precision(compute, dtype), expert_mesh=mesh.expert_fsdp)
    return model, mesh


def state_of(model):
    """State that training relies on: shards in place, what is given back after a forward, kernels, cuts and mode."""
    units = [unit for unit in model.modules() if isinstance(unit, FSDPModule)]
    return (
        [local_tensor(parameter).shape for parameter in model.parameters()],
        [
            [group.post_forward_mesh_info is not None for group in unit._get_fsdp_state()._fsdp_param_groups]
            for unit in units
        ],
        [type(layer.self_attn.kernel).__name__ for layer in model.model.layers],
        [module.tp.sequence_parallel for module in model.modules() if getattr(module, "tp", None)],
        model.training,
    )


def completions_of(rank, variant, sizes, options, unshard):
    model, mesh = on_mesh(rank, variant, sizes, **options)
    before = state_of(model)
    engine = NativeEngine(policy_of(model, mesh), decode=spelled, unshard=unshard)
    found = engine.generate(REQUESTS)
    assert state_of(model) == before
    assert engine.generate(REQUESTS[4:5])[0].ids == found[4].ids  # fewer requests than ranks
    ids = torch.arange(16).view(1, 16)
    hidden = torch.zeros(())
    if mesh.cp.size() == 1:  # and it trains on as before
        hidden = model.with_head(lambda hidden, _: hidden.sum(), ids, MicroBatchContext())
        hidden.backward()
    return [(one.ids, one.logprobs, one.finish) for one in found], bool(hidden.isfinite().all())


MESHES = [
    ("gemma3", {"tp": 2}, {"sp": True}, "auto"),
    ("llama3.1", {"cp": 2}, {"ring": True}, "auto"),
    ("qwen3", {"dp_shard": 3}, {}, False),
    ("llama2", {"tp": 4}, {}, "auto"),
    ("llama3.1", {"dp_replicate": 2, "dp_shard": 2}, {}, False),
    ("qwen2-window", {"dp_shard": 2, "tp": 2}, {"sp": True}, False),
    ("qwen3-moe", {"cp": 2, "tp": 2, "ep": 2}, {"sp": True}, False),
]


@pytest.mark.parametrize(("variant", "sizes", "options", "unshard"), MESHES)
def test_a_mesh_gives_the_completions_of_one_process(variant, sizes, options, unshard):
    expected = Engine(build(variant), decode=spelled).generate(REQUESTS)
    assert {one.finish for one in expected} == {"stop", "length"}
    ranks = math.prod(size for name, size in sizes.items() if name != "ep")
    results = run_world(completions_of, ranks, variant, sizes, options, unshard)
    for found, is_finite in results:
        assert is_finite
        for (ids, logprobs, finish), one in zip(found, expected, strict=True):
            assert ids == one.ids and finish == one.finish
            assert logprobs == pytest.approx(one.logprobs, rel=0, abs=1e-12)
        assert found == results[0][0]  # the same bits on every rank


def test_forwards_for_other_ranks_are_in_evaluation_mode(monkeypatch):
    """Dropout of an adapter would draw from the tokens of the last training batch, of another shape."""
    model, modes, go_on = build("qwen3"), [], iter([True, True, False])
    forward, alone = model.next_logits, SimpleNamespace(size=lambda: 1, get_local_rank=lambda: 0)
    monkeypatch.setattr(model, "next_logits", lambda *given: modes.append(model.training) or forward(*given))
    monkeypatch.setattr(_MeshPeers, "others_go_on", lambda self: next(go_on))
    mesh = SimpleNamespace(dp_cp=alone, tp=alone, ep=None, size=1)
    NativeEngine(policy_of(model, mesh)).generate([Request([5], SamplingParams(3, 0.0))])
    assert modes == [False] * 5 and model.training  # three tokens of its own, two forwards for others


def by_graphs(rank, variant, sizes):
    model, mesh = on_mesh(rank, variant, sizes)
    before, makers = state_of(model), Makers()
    # No top-p, whose search reads the host on a CPU.
    asked = [replace(one, sampling=replace(one.sampling, top_p=1.0)) for one in REQUESTS]
    steps = makers.steps(model)
    completions = NativeEngine(policy_of(model, mesh), decode=spelled, unshard=True, steps=steps).generate(asked)
    assert state_of(model) == before and makers.total("replayed") > 0
    same(completions, Engine(build(variant), decode=spelled).generate(asked))
    captured, said = makers.total("captured"), []
    steps, options = makers.steps(model), {"decode": spelled, "unshard": False, "print_line": said.append}
    engine = NativeEngine(policy_of(model, mesh), steps=steps, **options)
    for _ in range(2):
        same(engine.generate(asked), completions)
    assert makers.total("captured") == captured and len(said) == 1 and "full weights on every rank" in said[0]
    engine = NativeEngine(policy_of(model, mesh), steps=makers.steps(model, insists=True), **options)
    with pytest.raises(UserError, match="full weights on every rank"):
        engine.generate(asked)


@pytest.mark.parametrize(("variant", "sizes"), [("qwen3", {"dp_shard": 2}), ("gemma3", {"cp": 2})])
def test_graphs_on_a_mesh(variant, sizes):
    run_world(by_graphs, 2, variant, sizes)


def in_bfloat16(rank):
    model, mesh = on_mesh(rank, "qwen3", {"dp_shard": 2}, dtype=torch.float32, compute=torch.bfloat16)
    completions = NativeEngine(policy_of(model, mesh), unshard=rank >= 0).generate(REQUESTS[:2])
    return [(completion.ids, completion.logprobs) for completion in completions]


def test_masters_in_float32_decode_in_bfloat16():
    """The weights that FSDP gathers are rounded; so are those of the model that is whole here."""
    alone = Engine(build("qwen3", torch.float32).to(torch.bfloat16)).generate(REQUESTS[:2])
    for found in run_world(in_bfloat16, 2):
        for (ids, logprobs), one in zip(found, alone, strict=True):
            assert ids[0] == one.ids[0]
            assert logprobs[0] == pytest.approx(one.logprobs[0], abs=0.05)


def refused(rank):
    model, mesh = on_mesh(rank, "qwen3", {"dp_shard": 2})
    before = state_of(model)
    engine = NativeEngine(policy_of(model, mesh))
    with pytest.raises(UserError, match="request 1 has a token id outside"):
        engine.generate([Request([1], KINDS[0]), Request([1000], KINDS[0])])
    with pytest.MonkeyPatch.context() as patch, pytest.raises(UserError, match="request 0 may come to 160 positions"):
        patch.setattr("dtrain.inference.native.choose_budget", lambda *_, **__: Budget(8, 100, 64))
        engine.generate([Request([1], SamplingParams(99))])
    with pytest.raises(UserError, match="stop texts need a tokenizer"):
        engine.generate([Request([1], KINDS[3])])
    assert engine.generate([]) == [] and state_of(model) == before
    return True


def test_bad_requests_are_refused_on_every_rank():
    assert all(run_world(refused, 2))


def even(requests, places):
    shares = distribute_requests(requests, places)
    assert sorted(index for share in shares for index in share) == list(range(len(requests)))
    loads = [sum(requests[index].sampling.max_new_tokens for index in share) for share in shares]
    return shares, max(loads) / (sum(loads) / places)


def group(prompt, samples, length):
    return [Request(prompt, SamplingParams(length), 0, prompt[0], sample) for sample in range(samples)]


def test_groups_stay_together_where_that_is_even():
    requests = [request for prompt in range(8) for request in group([prompt, 1], 4, 10)]
    shares, ratio = even(requests, 4)
    assert ratio == 1.0
    for prompt in range(8):
        assert sum(any(requests[index].prompt[0] == prompt for index in share) for share in shares) == 1


def test_groups_are_cut_where_there_are_too_few():
    _, ratio = even(group([1, 2, 3], 16, 10), 4)
    assert ratio == 1.0
    _, ratio = even([*group([1], 8, 10), *group([2], 8, 30), *group([3], 8, 20)], 2)
    assert ratio < 1.15
    shares, _ = even(group([1], 1, 5), 3)
    assert sorted(map(len, shares)) == [0, 0, 1]
