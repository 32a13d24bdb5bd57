"""Decoding by graphs: the tokens of an engine without them, over rows that come, go and grow, by replays alone."""

import pytest
import torch

from dtrain.base.errors import UserError
from dtrain.inference import engine as engine_module
from dtrain.inference.cached_attention import Decode
from dtrain.inference.engine import Engine
from dtrain.inference.graphs import GraphedSteps
from dtrain.inference.kv_cache import KeyValues
from dtrain.inference.request import Request, SamplingParams
from tests.replay import NotCapturable, Recording, Replays
from tests.rollout.test_engine import PROMPTS, build, same


class Makers(list):
    """Every maker that an engine has asked for."""

    def steps(self, model, **options):
        return GraphedSteps(model, torch.device("cpu"), self, **options)

    def __call__(self, device):
        self.append(Replays(device))
        return self[-1]

    def total(self, name):
        return sum(getattr(one, name) for one in self)


def requests(longest=24):
    """Several samples of each prompt, with settings of their own; no top-p, which reads the host on a CPU."""
    kinds = [
        SamplingParams(longest, 0.0),
        SamplingParams(longest + 15, 1.0),
        SamplingParams(longest - 7, 0.7, top_k=5),
        SamplingParams(1, 1.3, min_p=0.02),
        SamplingParams(longest, 1.0, stop_ids=(3, 4, 5, 6, 7, 8)),
    ]
    return [Request(p, kind, 1, i, j) for i, p in enumerate(PROMPTS) for j, kind in enumerate(kinds)]


@pytest.mark.parametrize("variant", ["llama3.1", "gemma3"])
@pytest.mark.slow
def test_the_tokens_are_those_without_graphs(variant):
    model, asked = build(variant), requests()
    expected, makers = Engine(model).generate(asked), Makers()
    same(Engine(model, steps=makers.steps(model)).generate(asked), expected)
    assert makers.total("replayed") > makers.total("captured") > 0
    assert {one.finish for one in expected} == {"stop", "length"}


@pytest.mark.slow
def test_rows_come_and_go(monkeypatch):
    """Few rows at a time, ended ones noticed late: shapes come again, and replays go on with other rows."""
    monkeypatch.setattr(engine_module, "_STEPS_PER_READ", {"cpu": 3})
    model, asked, makers = build("qwen3"), requests(12), Makers()
    same(Engine(model, max_rows=4, steps=makers.steps(model)).generate(asked), Engine(model).generate(asked))
    assert makers.total("replayed") > makers.total("captured")


def test_one_sample_of_each_prompt():
    model, makers = build("qwen3"), Makers()
    asked = [Request(prompt, SamplingParams(20), 1, index) for index, prompt in enumerate(PROMPTS[:2] + PROMPTS[4:])]
    same(Engine(model, steps=makers.steps(model)).generate(asked), Engine(model).generate(asked))
    # Three rows in one pool, which begins with 32 keys: one shape. One replay is the proof.
    assert makers.total("captured") == 1 and makers.total("replayed") == 19


@pytest.mark.parametrize(
    ("count", "samples", "table"), [(1, 3, (1, 8)), (1, 1, (1, 1)), (5, 2, (8, 2)), (3, 3, (4, 4))]
)
def test_rows_of_prompts_are_rounded_up(count, samples, table):
    """To eight only where there is one prompt: elsewhere every prompt's products would grow."""
    store = KeyValues([None])
    prompts = [store.new_prompt(20) for _ in range(count)]
    for row in range(count * samples):
        store.new_row(row)
    decode = Decode(store, [prompt for prompt in prompts for _ in range(samples)], torch.device("cpu"), fixed=True)
    assert decode.products.parts[0].table.shape == table


def test_weights_that_moved_are_captured_anew():
    model, makers = build("qwen3"), Makers()
    asked = [Request(PROMPTS[0], SamplingParams(30, 0.0))]
    engine = Engine(model, steps=makers.steps(model))
    engine.add(asked[0])
    for _ in range(6):
        engine.step()
    captured = makers[-1].captured
    model.lm_head.weight.data = model.lm_head.weight.data * -1.0
    for _ in range(4):
        engine.step()
    ids, _ = engine.progress(1)
    assert makers[-1].captured == captured + 1
    model.lm_head.weight.data = model.lm_head.weight.data * -1.0
    before = Engine(model).generate([Request(PROMPTS[0], SamplingParams(7, 0.0))])[0].ids
    assert ids[:7] == before[:7]  # the first six steps give seven tokens
    model.lm_head.weight.data = model.lm_head.weight.data * -1.0
    after = Engine(model).generate([Request([*PROMPTS[0], *ids[:7]], SamplingParams(4, 0.0))])[0].ids
    assert ids[7:11] == after


class Wrong(Makers):
    """Makers of graphs that do something else than what was captured, or cannot be captured."""

    def __init__(self, change=None):
        self.change = change

    def __call__(self, device):
        self.append(Replays(device))
        replays, capture = self[-1], self[-1].capture

        def refuse(step):
            step()
            raise NotCapturable("read on the host\nat a line")

        def wrongly(step):
            replay = capture(step)
            return lambda: (replay(), self.change(step.__self__))

        replays.capture = wrongly
        replays.run_eagerly = refuse if self.change is None else replays.run_eagerly
        return replays


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (None, "a step of decoding is no graph: read on the host"),
        (lambda step: step.tokens.add_(1), "differs from its kernels: 3 of 3 rows drew another token"),
        (lambda step: step.logprobs.sub_(1e-3), "differs from its kernels: log-probabilities by up to 0.001"),
    ],
)
def test_a_graph_that_is_wrong_is_given_up(change, words):
    """Its step is then taken by kernels, from the states of linear attention before it."""
    model, makers = build("qwen3.5"), Wrong(change)
    asked = [Request(prompt, SamplingParams(6), 1, index) for index, prompt in enumerate(PROMPTS[:2] + PROMPTS[4:])]
    steps = makers.steps(model)
    same(Engine(model, steps=steps).generate(asked), Engine(model).generate(asked))
    assert steps.obstacle is not None and words in steps.obstacle and makers.total("replayed") <= 1
    with pytest.raises(UserError, match="grpo.cuda_graphs=true: a"):
        Engine(model, steps=makers.steps(model, insists=True)).generate(asked)


@pytest.mark.parametrize("variant", ["qwen3", "qwen3.5", "gemma3"])
def test_graphs_are_kept_for_the_next_engine(variant, monkeypatch):
    """With what they read, also where work was given up in numbers that are none."""
    monkeypatch.setattr(engine_module, "_STEPS_PER_READ", {"cpu": 16})
    model, makers = build(variant), Makers()
    asked = [Request(prompt, SamplingParams(6), 1, index) for index, prompt in enumerate(PROMPTS[:2] + PROMPTS[4:])]
    expected, steps = Engine(model).generate(asked), makers.steps(model, keeps=2**30)
    same(Engine(model, steps=steps).generate(asked), expected)
    captured, weight = makers.total("captured"), model.model.embed_tokens.weight
    whole = weight.clone()
    engine = Engine(model, steps=steps)
    engine.add(Request(PROMPTS[2], SamplingParams(6)))
    weight.data.fill_(float("nan"))
    engine.step()
    engine.drop_all_work()
    weight.data.copy_(whole)
    same(Engine(model, steps=steps).generate(asked), expected)
    assert makers.total("captured") == captured == 1
    steps = makers.steps(model, keeps=1000)
    for _ in range(2):
        same(Engine(model, steps=steps).generate(asked), expected)
    assert (
        makers.total("captured") == 3 and "anew in each rollout: what they read takes 0.00 GiB" in steps.not_kept_reason
    )


def test_keys_that_moved_are_captured_anew():
    """A row alone, beside others that need more slots, and alone again."""
    model, makers = build("qwen3"), Makers()
    asked = [Request(PROMPTS[0], SamplingParams(24, 0.0))]
    asked += [Request(PROMPTS[0], SamplingParams(4, 1.0), 1, 0, sample) for sample in range(1, 9)]
    engine, done = Engine(model, steps=makers.steps(model)), {}
    tickets = [engine.add(asked[0])]
    for _ in range(5):
        engine.step()
    tickets += [engine.add(one) for one in asked[1:]]
    while engine.has_work:
        done.update(engine.step())
    same([done[ticket] for ticket in tickets], Engine(model).generate(asked))


def test_what_a_graph_cannot_hold_is_noticed():
    x, cpu = torch.arange(4.0), torch.device("cpu")
    for wrong, words in (
        (lambda: x.sum().item(), "read on the host"),
        (lambda: x[x > 1], "read on the host"),
        (lambda: x + torch.tensor([1.0, 2.0, 3.0, 4.0]), "copies from the host"),
    ):
        with pytest.raises(NotCapturable, match=words), Recording(cpu):
            wrong()
    recording, outside, lost = Recording(cpu), torch.zeros(4), torch.ones(4)
    with recording:
        made = x * 2 + lost
        outside.add_(made)
    recording.end()
    assert outside.tolist() == [0.0] * 4 and made.isnan().all()
    recording.replay()
    x.fill_(1.0)
    recording.replay()
    assert outside.tolist() == [4.0, 6.0, 8.0, 10.0] and made.isnan().all()
    del lost
    with pytest.raises(NotCapturable, match="given back"):
        recording.replay()
