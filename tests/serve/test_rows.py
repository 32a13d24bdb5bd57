"""Rows that fail alone: temperatures near 0, logits that are not finite, and faults in one client's work."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from dtrain import models
from dtrain.base.errors import UserError
from dtrain.commands.serve.protocol import ApiError
from dtrain.inference import engine as engine_module
from dtrain.inference.engine import Engine
from dtrain.inference.request import Request, SamplingParams
from tests.serve.serving import GREEDY, PROMPT, assert_well, make_model, naive, naive_ids, post, raw, serving
from tests.tiny import write_model

OK = {"prompt": [5], "max_tokens": 1}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("rows")


@pytest.fixture(scope="module")
def model(root):
    return make_model(root, 1)


@pytest.fixture(scope="module")
def open_server(model):
    with serving(model) as (url, _):
        yield url


@pytest.mark.parametrize("temperature", [1e-50, 1e-320, 5e-324, 1e-38, 1e-9, 1e300])
def test_extreme_temperatures_are_finite(open_server, model, temperature):
    """Near 0 they are greedy; the neighbours in the batch keep their tokens."""
    body = {**GREEDY, "temperature": temperature, "seed": 1}
    with ThreadPoolExecutor(4) as threads:
        good = [threads.submit(raw, open_server, post({**GREEDY, "max_tokens": 40, "ignore_eos": True})) for _ in "ab"]
        status, answer = raw(open_server, post(body))
        good = [one.result() for one in good]
    assert status == 200
    if temperature < 1:
        assert answer["choices"][0]["token_ids"] == naive_ids(model)
    expected, _ = naive(model, PROMPT, 40, stop_ids=())
    assert all(status == 200 and answer["choices"][0]["token_ids"] == expected for status, answer in good)


@pytest.fixture(scope="module", params=["qwen3", "gemma3"])
def poisoned(root, request):
    """A model whose tokens 60 and 0 are NaN, and the same one without; neither is ever the likeliest."""
    source = write_model(root / request.param, request.param, tied=False)
    net = models.build(models.read_config(source), torch.float64)
    models.init_weights(net, 1)
    with torch.no_grad():
        for name, tensor in net.named_parameters():
            if "norm" not in name:
                tensor.mul_(4)
        net.lm_head.weight[[0, 60]] = 0.0
    sound = models.build(models.read_config(source), torch.float64)
    sound.load_state_dict(net.state_dict())
    with torch.no_grad():
        for token in (60, 0):
            net.model.embed_tokens.weight[token] = float("nan")
    return net, sound


@pytest.mark.slow
@pytest.mark.parametrize("look_every", [1, 16])
def test_a_poisoned_row_fails_alone(poisoned, look_every, monkeypatch):
    """Its neighbours draw the tokens of a batch with sound weights, as do rows that get its place in the cache later;
    padding with a poisoned token harms no one."""
    monkeypatch.setattr(engine_module, "_STEPS_PER_READ", {"cpu": look_every})
    net, sound = poisoned
    sampling = SamplingParams(max_new_tokens=40, temperature=0.0)
    lengths = (16, 10, 13, 7, 1, 2)  # those that come later leave some of the poisoned prompt's place unwritten
    good = [Request([5 + index] * length, sampling, 3, index) for index, length in enumerate(lengths)]
    bad = Request([60, 5, 6] * 7, sampling, 3, 9)

    def drawn(net, first, later):
        """Completions by place; `later` ones come when the poisoned one is gone."""
        engine = Engine(net, max_rows=8)
        tickets = {engine.add(request): index for index, request in enumerate(first)}
        found, failed = {}, []
        for step in range(200):
            if step == 5:
                tickets |= {engine.add(request): len(first) + index for index, request in enumerate(later)}
            try:
                found |= {tickets[ticket]: completion for ticket, completion in engine.step()}
            except UserError as error:
                assert "not finite" in str(error)
                failed += [tickets[ticket] for ticket in error.tickets]
        assert not engine.has_work
        return found, failed

    expected, none = drawn(sound, [*good[:2], bad, *good[2:4]], good[4:])
    found, failed = drawn(net, [*good[:2], bad, *good[2:4]], good[4:])
    assert not {60, 0} & {token for index in (0, 1, 3, 4, 5, 6) for token in expected[index].ids}  # none draws it
    assert not none and failed == [2]
    for index in (0, 1, 3, 4, 5, 6):
        assert found[index].ids == expected[index].ids and len(found[index].ids) == 40
        assert found[index].logprobs == pytest.approx(expected[index].logprobs, rel=0, abs=1e-12)


def test_a_row_that_meets_the_poison_late_fails_late(poisoned):
    net, sound = poisoned
    path = Engine(sound).generate([Request([5, 6], SamplingParams(8, 0.0))])[0].ids
    late = max(index for index in range(7) if path[index] not in path[:index])
    assert late > 1
    turned = models.build(net.config, torch.float64)
    turned.load_state_dict(sound.state_dict())
    with torch.no_grad():
        turned.model.embed_tokens.weight[path[late]] = float("nan")
    engine = Engine(turned, max_rows=4)
    bad, good = engine.add(Request([5, 6], SamplingParams(8, 0.0))), engine.add(Request([9], SamplingParams(1, 0.0)))
    seen, found = [], {}
    with pytest.raises(UserError, match="not finite") as told:
        while True:
            found.update(engine.step())
            seen = engine.progress(bad)[0]
    assert told.value.tickets == [bad] and seen == path[: late + 1]
    while engine.has_work:
        found.update(engine.step())
    assert list(found) == [good]


@pytest.mark.slow
def test_a_poisoned_request_is_500_and_its_neighbours_are_answered(poisoned, model):
    """Over HTTP: whole answers and streams."""
    net, sound = poisoned

    class Poisoned(Engine):
        def __init__(self, _, **options):
            super().__init__(net, **options)

    expected = Engine(sound).generate([Request([5], SamplingParams(60, 0.0))])[0].ids
    body = {"max_tokens": 60, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    with serving(model, engine=Poisoned) as (url, worker), ThreadPoolExecutor(6) as threads:
        good = [threads.submit(raw, url, post({**body, "prompt": [5]})) for _ in range(3)]
        bad = [threads.submit(raw, url, post({**body, "prompt": [60], "stream": one})) for one in (True, False)]
        assert {one.result()[0] for one in bad} == {500}
        assert "not finite" in bad[0].result()[1]["error"]["message"]
        assert [one.result()[1]["choices"][0]["token_ids"] for one in good] == [expected] * 3
        assert worker.failure is None


def test_a_fault_in_the_engine_ends_its_requests_and_not_the_thread(model, capfd):
    """Whatever a step, an entry or an act raises."""

    class Faulty(Engine):
        faults: list = []

        def step(self):
            if self.faults:
                raise self.faults.pop()
            return super().step()

        def add(self, request):
            if request.seed == 666:
                raise OverflowError("Overflow when unpacking long")
            return super().add(request)

    with serving(model, engine=Faulty) as (url, worker):
        for fault in (RuntimeError("CUDA out of memory"), IndexError("x"), MemoryError(), OverflowError("y")):
            Faulty.faults.append(fault)
            status, answer = raw(url, post({**OK, "n": 3}))
            assert status == 500 and type(fault).__name__ in answer["error"]["message"]
            assert_well(url, model)
        assert raw(url, post({**OK, "seed": 666}))[0] == 500
        with pytest.raises(ApiError, match="ZeroDivisionError"):
            worker.run_between_steps(lambda: 1 // 0)
        assert_well(url, model)
        assert worker.failure is None and worker.load == (0, 0)
    assert "CUDA out of memory" in capfd.readouterr().err


def test_a_fault_beside_the_engine_is_500_and_its_traceback_is_logged(model, monkeypatch, caplog):
    with serving(model) as (url, worker):
        with monkeypatch.context() as broken:
            broken.setattr(worker, "submit", lambda *_: 1 // 0)
            status, answer = raw(url, post(OK))
        assert status == 500 and "an error in the server" in answer["error"]["message"]
        assert_well(url, model)
    assert "ZeroDivisionError" in caplog.text
