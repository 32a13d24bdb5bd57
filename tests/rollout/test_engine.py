"""The engine: transformers' tokens and logprobs, the same whatever is in the batch, stops, and work that comes late."""

from dataclasses import replace

import pytest
import torch
import transformers

from dtrain import models
from dtrain.adapters.config import AdapterConfig
from dtrain.adapters.lora import build_with_adapters
from dtrain.base.errors import UserError
from dtrain.base.randomness import random_uniform
from dtrain.inference import engine as engine_module
from dtrain.inference.engine import Engine
from dtrain.inference.request import Request, SamplingParams
from dtrain.inference.sampling import StopTexts, request_key
from tests.models.oracle import VARIANTS, VOCAB, make, save

pytestmark = pytest.mark.slow

PROMPTS = [[3, 14, 15, 9, 2, 6], [5], [35, 89, 79, 32, 38, 46, 26, 43, 38, 32, 79], list(range(40)), [5, 6]]


def build(variant, dtype=torch.float64):
    model = models.build(models.parse_config(VARIANTS[variant]().to_dict()), dtype=dtype)
    models.init_weights(model, 0)
    return model


def mixed(max_new=20):
    """Several samples of each prompt, each with settings and a length of its own."""
    kinds = [
        SamplingParams(max_new, 0.0),
        SamplingParams(max_new + 15, 1.0),
        SamplingParams(max_new - 7, 0.7, top_k=5, top_p=0.9),
        SamplingParams(1, 1.3, min_p=0.02),
        SamplingParams(max_new, 1.0, stop_ids=(3, 4, 5, 6, 7, 8)),
    ]
    return [Request(p, kind, 1, i, j) for i, p in enumerate(PROMPTS) for j, kind in enumerate(kinds)]


def same(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert a.ids == b.ids and a.finish == b.finish
        assert a.logprobs == pytest.approx(b.logprobs, rel=0, abs=1e-12)


@pytest.mark.parametrize("variant", ["llama3.1", "qwen2-window", "qwen3", "gemma3", "qwen3.5", "gemma4", "deepseek-v3"])
def test_greedy_tokens_and_logprobs_are_transformers(variant, tmp_path):
    torch.manual_seed(0)
    config = VARIANTS[variant]()
    config._experts_implementation = "eager"  # torch's grouped product takes no float64
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval().double()
    theirs.save_pretrained(tmp_path)
    ours = models.from_pretrained(tmp_path, dtype=torch.float64)
    requests = [Request(prompt, SamplingParams(20, 0.0)) for prompt in PROMPTS]
    for request, found in zip(requests, Engine(ours).generate(requests), strict=True):
        ids = torch.tensor([request.prompt])
        output = theirs.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=20,
            do_sample=False,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        assert found.ids == output.sequences[0, ids.shape[1] :].tolist()
        scores = torch.cat(output.logits).double().log_softmax(-1)
        expected = scores.gather(1, torch.tensor(found.ids)[:, None])[:, 0].tolist()
        # generate hands its logits out in float32; transformers computes linear attention, Gemma4's norms and
        # DeepSeek's router in it.
        tolerance = 1e-5 if variant in ("qwen3.5", "gemma4", "deepseek-v3") else 1e-6
        assert found.logprobs == pytest.approx(expected, rel=0, abs=tolerance) and found.finish == "length"


@pytest.mark.parametrize("look_every", [1, 16])
@torch.no_grad()
def test_experts_are_those_of_transformers(look_every, tmp_path, monkeypatch):
    """Every token that was read has them, however late the host looks; there are none where none were asked for."""
    theirs = make("qwen3-moe-mixed")
    save(theirs, tmp_path / "model")
    theirs = theirs.double()
    model = models.from_pretrained(tmp_path / "model", torch.float64)
    monkeypatch.setitem(engine_module._STEPS_PER_READ, "cpu", look_every)
    requests = [replace(one, routed=one.sample_index != 1) for one in mixed()]
    drawn = Engine(model, max_rows=4, records_routing=True).generate(requests)
    same(drawn, Engine(model).generate(mixed()))
    told = []
    for module in theirs.modules():
        if type(module).__name__.endswith("TopKRouter"):
            module.register_forward_hook(lambda module, _, out: told.append(out[2].sort(-1).values))
    for request, found in zip(requests, drawn, strict=True):
        if not request.routed:
            assert found.routed is None
            continue
        told.clear()
        theirs(torch.tensor([[*request.prompt, *found.ids]]))
        assert torch.equal(found.routed[:-1].long(), torch.stack(told, 1)[:-1]) and (found.routed[-1] == -1).all()
    with pytest.raises(UserError, match="experts of its tokens, which this engine does not record"):
        Engine(model).generate(requests)


@pytest.mark.trap(
    "log-probabilities without the temperature that tokens were drawn at",
    "huggingface/trl #4159",
    "ratios of 2 where the policy has not changed",
    "those of a whole forward at that temperature",
)
@pytest.mark.parametrize("variant", ["llama3.1", "gemma3-softcap", "qwen3.5", "gemma4", "deepseek-v3"])
@torch.no_grad()
def test_logprobs_are_those_of_a_whole_forward(variant):
    model = build(variant)
    requests = [Request(p, SamplingParams(45, t), 0, i) for i, p in enumerate(PROMPTS) for t in (0.0, 1.0, 0.7)]
    for request, found in zip(requests, Engine(model).generate(requests), strict=True):
        logits = model(torch.tensor([list(request.prompt) + found.ids]))[0, len(request.prompt) - 1 : -1]
        scores = (logits / (request.sampling.temperature or 1.0)).log_softmax(-1)
        expected = scores.gather(1, torch.tensor(found.ids)[:, None])[:, 0].tolist()
        assert found.logprobs == pytest.approx(expected, rel=0, abs=1e-12)


def test_completions_do_not_depend_on_the_batch():
    """Order, company, one row at a time, little memory, and a prompt that is shared or not."""
    model, requests = build("gemma3"), mixed(10)
    expected = Engine(model).generate(requests)
    assert {completion.finish for completion in expected} == {"stop", "length"}
    same(Engine(model, max_rows=1).generate(requests), expected)
    same(Engine(model, max_rows=3).generate(requests), expected)
    same(Engine(model, max_tokens=140).generate(requests), expected)
    order = torch.randperm(len(requests), generator=torch.Generator().manual_seed(0)).tolist()
    shuffled = Engine(model, max_rows=4).generate([requests[index] for index in order])
    same(shuffled, [expected[index] for index in order])
    same(Engine(model).generate(requests[7:8]), expected[7:8])


def near_ties(model, request, found, expected):
    """The margin between the two tokens at which completions part is a matter of float32's rounding."""
    for at, (a, b) in enumerate(zip(found.ids, expected.ids, strict=False)):
        if a != b:
            with torch.no_grad():
                logits = model(torch.tensor([list(request.prompt) + found.ids[:at]]))[0, -1]
            if request.sampling.temperature == 0:
                assert abs(float(logits[a] - logits[b])) < 1e-4 * float(logits.abs().max())
            else:
                # Draws part where a number falls on the border of two tokens' shares.
                shares = (logits.double() / request.sampling.temperature).softmax(-1).cumsum(-1)
                number = float(random_uniform(torch.tensor(at), request_key(request)))
                assert min(abs(number - float(shares[token])) for token in (a, b)) < 1e-5
            return at
    return len(expected.ids)


def test_in_float32_completions_part_at_near_ties_alone():
    model = build("qwen3", torch.float32)
    requests = [
        Request(p, SamplingParams(24, t), 3, i, j) for i, p in enumerate(PROMPTS) for j, t in enumerate((0.0, 1.0))
    ]
    expected = Engine(model).generate(requests)
    for budget in ({"max_rows": 1}, {"max_rows": 3}):
        for request, found, other in zip(requests, Engine(model, **budget).generate(requests), expected, strict=True):
            common = near_ties(model, request, found, other)
            assert found.logprobs[:common] == pytest.approx(other.logprobs[:common], rel=0, abs=1e-4)


def test_samples_of_a_prompt_differ_and_seeds_count():
    model = build("qwen3")

    def draw(seed, prompt_index, sample_index):
        request = Request(PROMPTS[0], SamplingParams(12), seed, prompt_index, sample_index)
        return tuple(Engine(model).generate([request])[0].ids)

    assert len({draw(0, 0, 0), draw(1, 0, 0), draw(0, 1, 0), draw(0, 0, 1)}) == 4
    assert draw(0, 0, 1) == draw(0, 0, 1)


def test_a_group_reads_its_prompt_once(monkeypatch):
    model = build("qwen3")
    read = []
    forward = type(model).next_logits

    def counting(self, input_ids, *more):
        read.append(tuple(input_ids.shape))
        return forward(self, input_ids, *more)

    monkeypatch.setattr(type(model), "next_logits", counting)
    requests = [Request(PROMPTS[2], SamplingParams(6), 0, 0, sample) for sample in range(8)]
    Engine(model, max_rows=4).generate(requests)
    assert [shape for shape in read if shape[1] > 1] == [(1, len(PROMPTS[2]))]
    assert max(shape[0] for shape in read) == 4 and len(read) == 1 + 5 + 5


@pytest.mark.parametrize("look_every", [3, 16])
def test_rare_looks_change_nothing(monkeypatch, look_every):
    model, requests = build("gemma3"), mixed()
    expected = Engine(model).generate(requests)
    monkeypatch.setattr(engine_module, "_STEPS_PER_READ", {"cpu": look_every})
    same(Engine(model, max_rows=5).generate(requests), expected)


def test_work_may_come_and_go_while_others_decode():
    model, requests = build("qwen3"), mixed()
    expected = Engine(model).generate(requests)
    engine = Engine(model, max_rows=6)
    assert not engine.has_work and engine.step() == []
    found, tickets, cancelled = {}, {}, []
    waiting = list(enumerate(requests))
    streamed: dict[int, list[int]] = {}
    while waiting or engine.has_work:
        for index, request in waiting[:2]:
            tickets[engine.add(request)] = index
        del waiting[:2]
        for ticket in tickets.keys() - found.keys() - set(cancelled):
            ids, logprobs = engine.progress(ticket, len(streamed.setdefault(ticket, [])))
            assert len(ids) == len(logprobs)
            streamed[ticket] += ids
        if len(tickets) in (10, 20) and not cancelled[len(tickets) // 10 - 1 :]:
            cancelled.append(max(tickets.keys() - found.keys() - set(cancelled)))
            engine.cancel(cancelled[-1])
            engine.cancel(cancelled[-1])
        found.update(engine.step())
    assert len(cancelled) == 2 and cancelled[0] not in found
    assert found.keys() == tickets.keys() - set(cancelled)
    for ticket, completion in found.items():
        same([completion], [expected[tickets[ticket]]])
        assert completion.ids[: len(streamed.get(ticket, []))] == streamed.get(ticket, [])
    with pytest.raises(KeyError):
        engine.progress(next(iter(found)))


@pytest.mark.trap(
    "keys of prompts kept over an update of the weights",
    "NVIDIA-NeMo/RL PR#4018",
    "answers of two models in one",
    "nothing is kept between calls",
)
def test_an_engine_holds_nothing_between_calls():
    """The weights may have changed: the same requests then give what a fresh engine gives."""
    model, requests = build("qwen3"), mixed()[:5]
    engine = Engine(model)
    before = engine.generate(requests)
    with torch.no_grad():
        model.lm_head.weight.mul_(1.3)
    after = engine.generate(requests)
    same(after, Engine(model).generate(requests))
    assert [one.ids for one in after] != [one.ids for one in before] or after[0].logprobs != before[0].logprobs


WORDS = ["a", "b", "ab", " ", "st", "op", "STOP", "S", "T", "OP", "é"]


def spelled(ids):
    return "".join(WORDS[token % len(WORDS)] for token in ids)


@pytest.mark.parametrize("stop", [("stop",), ("ST", "OPb"), ("é ",), ("aaa", "bab", " st", "T")])
def test_stop_texts_end_with_the_token_that_completes_them(stop):
    model = build("qwen3")

    def requests(stop):
        return [
            Request(p, SamplingParams(40, 1.5, stop=stop), 0, i, j) for i, p in enumerate(PROMPTS) for j in range(3)
        ]

    free = Engine(model).generate(requests(()))
    found = Engine(model, decode=spelled).generate(requests(stop))
    stopped = 0
    for one, whole in zip(found, free, strict=True):
        ends = [n for n in range(1, 41) if any(text in spelled(whole.ids[:n]) for text in stop)]
        assert one.ids == whole.ids[: ends[0] if ends else 40]
        assert one.finish == ("stop" if ends else "length")
        stopped += bool(ends)
    assert stopped


def test_stop_texts_whose_characters_are_cut():
    pieces = [b"caf", b"\xc3", b"\xa9", b" \xe2", b"\x82", b"\xac", b"x", b"y\xe2"]

    def decode(ids):
        return b"".join(pieces[token] for token in ids).decode("utf-8", errors="replace")

    def tokens_until(ids, *stop):
        texts = StopTexts(stop, decode)
        return next((n for n in range(1, len(ids) + 1) if texts.complete(ids[:n])), None)

    assert tokens_until([0, 1, 2, 3, 4, 5], "é") == 3
    assert tokens_until([0, 1, 2, 3, 4, 5], "é €") == 6
    assert tokens_until([0, 1, 2, 3, 4, 5, 6], "€x") == 7
    assert tokens_until([6, 7, 4, 5], "xy") == 2  # complete beside a character that is not
    assert tokens_until([6, 6, 7, 4, 5], "xy€") == 5
    assert tokens_until([0, 1, 2, 3, 4], "€", "f\ufffd€") is None


@pytest.mark.parametrize(
    ("prompt", "settings", "message"),
    [
        ([], {}, "the prompt of request 0 is empty"),
        ([VOCAB], {}, f"outside the model's vocabulary of {VOCAB}"),
        ([-1], {}, f"outside the model's vocabulary of {VOCAB}"),
        ([1], {"temperature": -1.0}, "temperature=-1.0"),
        ([1], {"temperature": float("nan")}, "temperature=nan"),
        ([1], {"top_p": 0.0}, "top_p=0.0"),
        ([1], {"top_k": -2}, "top_k=-2"),
        ([1], {"min_p": 1.5}, "min_p=1.5"),
        ([1], {"max_new_tokens": -1}, "max_new_tokens=-1"),
        ([1], {"stop": ("x",)}, "stop texts need a tokenizer"),
        ([1], {"max_new_tokens": 300}, "may come to 544 positions .* room for 200"),
    ],
)
def test_mistakes_are_named(prompt, settings, message):
    engine = Engine(build("qwen3"), max_tokens=200)
    with pytest.raises(UserError, match=message):
        engine.generate([Request(prompt, SamplingParams(**{"max_new_tokens": 2, **settings}))])
    assert not engine.has_work


def test_logits_that_are_not_finite_are_told():
    model = build("qwen3")
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    engine = Engine(model)
    with pytest.raises(UserError, match="logits are not finite"):
        engine.generate([Request([1], SamplingParams(3))])
    assert not engine.has_work


def test_idle_prompts_make_room():
    """Two prompts with waiting samples fill the memory that either's next sample needs."""
    model = build("qwen3")
    small, large = SamplingParams(8), SamplingParams(60)
    requests = [
        Request(PROMPTS[0], small, 0, 0, 0),
        Request(PROMPTS[0], large, 0, 0, 1),
        Request(PROMPTS[1], small, 0, 1, 0),
        Request(PROMPTS[1], large, 0, 1, 1),
    ]
    same(Engine(model, max_tokens=128).generate(requests), Engine(model).generate(requests))
    same(Engine(model, max_tokens=96).generate(requests), Engine(model).generate(requests))


def test_engines_with_and_without_adapters_decode_side_by_side_on_one_model():
    config = models.parse_config(VARIANTS["qwen3"]().to_dict())
    model = build_with_adapters(config, AdapterConfig(rank=4), torch.float64)
    models.init_weights(model, 0)
    plain = models.build(config, torch.float64)
    plain.load_state_dict({name: tensor for name, tensor in model.state_dict().items() if "lora_" not in name})
    own, adapted, without = Engine(plain), Engine(model), Engine(model)
    without.use_adapters(False)
    expected = [own.generate(mixed()), adapted.generate(mixed())]
    assert [one.ids for one in expected[0]] != [one.ids for one in expected[1]]

    tickets, found = {}, {}
    for engine in (without, adapted):
        tickets[engine] = [engine.add(request) for request in mixed()]
        found[engine] = {}
    with pytest.raises(ValueError, match="an engine without work"):
        without.use_adapters(True)
    while without.has_work or adapted.has_work:
        for engine in (without, adapted):
            found[engine].update(engine.step())
    for engine, completions in zip((without, adapted), expected, strict=True):
        same([found[engine][ticket] for ticket in tickets[engine]], completions)
