"""Prompts with images: transformers' tokens and logprobs, whatever else is decoded beside them."""

from dataclasses import replace

import pytest
import torch

from dtrain import models
from dtrain.attention.context import GatherKernel
from dtrain.attention.kernels import SdpaKernel
from dtrain.base.errors import UserError
from dtrain.inference.engine import Engine
from dtrain.inference.native import NativeEngine
from dtrain.inference.request import Request, SamplingParams
from dtrain.parallel.apply import apply_plan
from dtrain.parallel.fsdp import mixed_precision, shard_model
from dtrain.parallel.mesh import Runtime, build_mesh
from dtrain.rl.remote.http import HttpEngine
from tests.models.oracle import save
from tests.models.test_vision_models import CASES, IMAGE, images_of, make, token_rows
from tests.models.vision.oracle import WideIslands
from tests.rollout.test_engine import same
from tests.rollout.test_graphs import Makers
from tests.rollout.test_native import policy_of
from tests.world import run_world

DRAWN = 8
LENGTHS = (31, 28, 25)  # of the prompts, which are read together


def iterate_prompts(case, config):
    """Token ids of each prompt, its pixels, its grids and its images; those without images have None."""
    rows = token_rows(case)
    generator, prompts = torch.Generator().manual_seed(1), []
    for ids, length, grids in zip(rows, LENGTHS, case.grids, strict=True):
        ids = ids[None, :length]
        patches = sum(rows * columns for _, rows, columns in grids)
        pixels = torch.rand(patches, config.vision.values_per_patch, generator=generator, dtype=torch.float64)
        images = images_of(replace(case, grids=(grids,)), ids, pixels, config) if grids else None
        prompts.append((ids, pixels, grids, images))
    return prompts


def asked(prompts, tokens=DRAWN, **more):
    return [
        Request(ids[0].tolist(), SamplingParams(tokens, 0.0), images=images, **more) for ids, _, _, images in prompts
    ]


def drawn_by_transformers(theirs, case, ids, pixels, grids):
    """Return the tokens and their logprobs of a prompt."""
    given = {"attention_mask": torch.ones_like(ids)}
    if grids:
        given |= {case.types: (ids == IMAGE).int(), **case.inputs(pixels, grids)}
    options = dict(do_sample=False, max_new_tokens=DRAWN, return_dict_in_generate=True, output_logits=True)
    with WideIslands():
        output = theirs.generate(ids, **given, **options, eos_token_id=None, pad_token_id=0)
    tokens = output.sequences[0, ids.shape[1] :].tolist()
    logprobs = [row[0].log_softmax(-1)[token].item() for row, token in zip(output.logits, tokens, strict=True)]
    return tokens, logprobs


@pytest.mark.parametrize("name", CASES)
def test_greedy_tokens_and_logprobs_are_transformers(name, tmp_path):
    case, (narrow, theirs) = CASES[name], make(name)
    ours = models.from_pretrained(save(narrow, tmp_path), torch.float64, vision=True)
    prompts = iterate_prompts(case, ours.config)
    completions = Engine(ours).generate(asked(prompts))
    for (ids, pixels, grids, _), completion in zip(prompts, completions, strict=True):
        tokens, logprobs = drawn_by_transformers(theirs, case, ids, pixels, grids)
        assert completion.ids == tokens
        assert completion.logprobs == pytest.approx(logprobs, rel=0, abs=1e-9)
        assert completion.logprobs == pytest.approx(scored(ours, case, ids, pixels, grids, completion), rel=0, abs=1e-9)


@torch.no_grad()
def scored(model, case, ids, pixels, grids, completion):
    """Return the logprobs of a completion by the forward of training."""
    whole = torch.cat([ids, torch.tensor([completion.ids])], 1)
    text = torch.cat([ids, torch.zeros(1, len(completion.ids), dtype=torch.int64)], 1)
    images = images_of(replace(case, grids=(grids,)), text, pixels, model.config) if grids else None
    logprobs = model(whole, images=images)[0, ids.shape[1] - 1 : -1].log_softmax(-1)
    return logprobs.gather(1, whole[0, ids.shape[1] :, None])[:, 0].tolist()


def built(name):
    """Return a random model of a case, and its prompts."""
    torch.manual_seed(0)
    model = models.build(models.parse_config(CASES[name].config().to_dict(), vision=True), dtype=torch.float64)
    models.init_weights(model, 0)
    for parameter in model.parameters():  # larger than at the start of a training, so that images count
        parameter.data += torch.randn_like(parameter) / 4
    return model, iterate_prompts(CASES[name], model.config)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3-vl", "gemma3"])
def test_completions_do_not_depend_on_the_batch(name):
    """Few rows at a time, of several samples, with images and without, that grow out of their first slots; and the
    same ids with another image."""
    model, prompts = built(name)
    ids, pixels, grids, images = prompts[0]
    prompts.append((ids, -pixels, grids, replace(images, pixels=-pixels)))
    kinds = [SamplingParams(36, 0.0), SamplingParams(9, 1.0), SamplingParams(1)]
    requests = [
        replace(request, sampling=kind, prompt_index=index, sample_index=sample)
        for index, request in enumerate(asked(prompts))
        for sample, kind in enumerate(kinds)
    ]
    alone = [Engine(model).generate([request])[0] for request in requests]
    encoded = []
    tower = model.model.vision[0]
    tower.register_forward_hook(lambda module, inputs, features: encoded.append(len(inputs[1])))
    same(Engine(model, max_rows=3).generate(requests), alone)
    assert sorted(encoded) == sorted(len(grids) for _, _, grids, _ in prompts if grids)  # once for all samples
    if name == "qwen3-vl":  # whose rows stand at other rotary positions than in the cache
        makers = Makers()
        same(Engine(model, max_rows=5, steps=makers.steps(model)).generate(requests), alone)
        assert makers.total("replayed") > makers.total("captured") > 0
    for (ids, pixels, grids, _), completion in zip(prompts, alone[:: len(kinds)], strict=True):
        expected = scored(model, CASES[name], ids, pixels, grids, completion)
        assert completion.logprobs == pytest.approx(expected, rel=0, abs=1e-9)
    assert alone[0].ids != alone[-len(kinds)].ids


def test_images_that_a_model_cannot_take_are_refused():
    model, prompts = built("qwen3-vl")
    request, _, text = asked(prompts)
    images = request.images
    tokens = []
    model.model.vision[0].register_forward_hook(lambda *given: tokens.append(given))
    Engine(model).generate([text])
    assert not tokens  # a prompt without images does not run the tower
    bad = {
        "patches of": replace(images, pixels=images.pixels[1:]),
        "tokens for": replace(images, feature_index=images.feature_index.roll(1, 1).clamp(max=3)),
        "rotary_ids of its images": replace(images, rotary_ids=None),
        "ends of its images": replace(images, ends=images.feature_index[0]),
        "index of its images": replace(images, feature_index=images.feature_index[0]),
    }
    for words, wrong in bad.items():
        with pytest.raises(UserError, match=words):
            Engine(model).add(replace(request, images=wrong))
    with pytest.raises(UserError, match="requests to a server cannot have decoded images"):
        HttpEngine.generate(None, [text, request])
    config = models.parse_config(CASES["qwen3-vl"].config().to_dict())
    with pytest.raises(UserError, match="the request has images, and this model has no vision tower"):
        Engine(models.build(config, "meta"), max_rows=1, max_tokens=64, device=torch.device("cpu")).add(request)


def requests_of(name):
    """Return a random model, and requests of which one rank of two gets those with images."""
    model, prompts = built(name)
    first, second, text = asked(prompts)
    return model, [first, second, replace(text, sampling=SamplingParams(16, 0.0))]


def completions_of(rank, name, sizes, unshard):
    mesh = build_mesh(Runtime(rank=rank), **sizes)
    model, requests = requests_of(name)
    if mesh.tp.size() > 1:
        apply_plan(model, mesh.tp, model.plan, sequence_parallel=True)
    if mesh.cp.size() > 1:
        model.use_kernel(GatherKernel(SdpaKernel(), mesh.cp))
    shard_model(model, mesh.fsdp, mixed_precision(torch.float64, torch.float64))
    engine = NativeEngine(policy_of(model, mesh), unshard=unshard)
    return engine.generate(requests), engine.generate(requests[:1])


@pytest.mark.parametrize(
    ("name", "sizes", "unshard"),
    [
        ("qwen3-vl", {"tp": 2}, "auto"),
        ("gemma3", {"dp_shard": 2}, False),
        ("qwen2.5-vl", {"cp": 2}, False),
        ("gemma4-bidirectional", {"cp": 2}, True),
    ],
)
def test_a_mesh_gives_the_completions_of_one_process(name, sizes, unshard):
    """One rank has images, and where weights are gathered layer by layer the other one runs the tower too."""
    model, requests = requests_of(name)
    expected = Engine(model).generate(requests)
    for completions, first in run_world(completions_of, 2, name, sizes, unshard):
        same(completions, expected)
        same(first, expected[:1])
