"""The client of servers: against vLLM's and SGLang's protocols and their faults; test_serve.py has dtrain's own."""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from dtrain.base.errors import Interrupted, UserError
from dtrain.inference.request import Request, SamplingParams
from dtrain.rl.remote import http_client
from dtrain.rl.remote.dialects import derived_seed
from dtrain.rl.remote.engine import RolloutPrefetcher
from dtrain.rl.remote.http import HttpEngine, group_samples
from tests.remote import fakes
from tests.remote.fakes import FakeSglang, FakeVllm, drawn

SAMPLING = SamplingParams(max_new_tokens=7, temperature=0.9, top_k=30, top_p=0.95, stop_ids=(1,))


def requests_of(prompts=3, samples=4, sampling=SAMPLING, seed=5):
    return [
        Request([5 + index, 6, 7], sampling, seed, index, sample)
        for index in range(prompts)
        for sample in range(samples)
    ]


def engine_of(*servers, **options):
    settings = {"timeout": 20.0, "start_timeout": 5.0, **options}
    return HttpEngine([getattr(server, "url", server) for server in servers], **settings)


def test_samples_of_a_prompt_are_one_call():
    requests = requests_of(2, 3)
    assert group_samples(requests) == [requests[:3], requests[3:]]
    apart = [requests[0], requests[2], requests[1], requests[3]]
    assert group_samples(apart) == [[request] for request in apart]
    assert group_samples([]) == []


def test_vllm_completions_are_read(vllm):
    requests = requests_of()
    for vllm.token_ids in (True, False):
        completions = engine_of(vllm).generate(requests)
        for request, completion in zip(requests, completions, strict=True):
            ids, logprobs = drawn(list(request.prompt), derived_seed(request), 7)
            assert (completion.ids, completion.logprobs, completion.finish) == (ids, logprobs, "length")
            assert completion.version is None
    assert len(vllm.calls) == 6 and {call["n"] for _, call in vllm.calls} == {4}
    body = vllm.calls[0][1]
    settings = {"model": "policy", "max_tokens": 7, "temperature": 0.9, "top_k": 30, "top_p": 0.95, "min_p": 0.0}
    assert settings.items() <= body.items() and body["stop_token_ids"] == [1]


def test_a_sample_has_the_same_seed_however_samples_are_grouped(vllm):
    requests = requests_of()
    engine = engine_of(vllm)
    assert engine.generate(requests) == [engine.generate([request])[0] for request in requests]
    assert len({derived_seed(request) for request in requests}) == len(requests)
    assert derived_seed(requests[0]) != derived_seed(requests_of(seed=6)[0])


def test_stop_tokens_stay(vllm):
    request = requests_of(1, 1)[0]
    third = drawn(list(request.prompt), derived_seed(request), 7)[0][2]
    sampling = SamplingParams(max_new_tokens=7, stop_ids=(third,))
    completion = engine_of(vllm).generate([Request(request.prompt, sampling, request.seed)])[0]
    assert completion.ids[-1] == third and completion.finish == "stop" and len(completion.ids) <= 3


def test_sglang_completions_are_read(sglang):
    requests = requests_of()
    completions = engine_of(sglang).generate(requests)
    for request, completion in zip(requests, completions, strict=True):
        ids, logprobs = drawn(list(request.prompt), derived_seed(request) % 2**31, 7)
        assert (completion.ids, completion.logprobs, completion.finish) == (ids, logprobs, "length")
    sampling = sglang.calls[0][1]["sampling_params"][0]
    assert sampling["stop_token_ids"] == [1] and sampling["ignore_eos"] is False


@pytest.mark.parametrize(
    "fault", [fakes.status(500), fakes.status(503), fakes.status(429), fakes.half_answer, fakes.no_json,
              fakes.hang_up, fakes.aborted]
)  # fmt: skip
def test_passing_errors_are_tried_again(vllm, fault):
    requests = requests_of(2, 2)
    expected = engine_of(vllm).generate(requests)
    vllm.faults = [fault, fault]
    assert engine_of(vllm).generate(requests) == expected


@pytest.mark.slow
def test_calls_under_way_are_given_up_when_asked(vllm):
    requests = requests_of(2, 2)
    expected = engine_of(vllm).generate(requests)
    vllm.faults = [fakes.slow(60.0)] * 2
    engine, began, asked = engine_of(vllm), time.monotonic(), iter([False, True])
    with pytest.raises(Interrupted):
        engine.generate(requests, lambda: next(asked))
    assert time.monotonic() - began < 30 and next(asked, "asked twice") == "asked twice"
    vllm.faults = []
    assert engine.generate(requests) == expected
    prefetcher = RolloutPrefetcher(engine, 1)
    vllm.faults = [fakes.slow(60.0)] * 2
    prefetcher.start(requests, 0)
    with pytest.raises(Interrupted):
        prefetcher.result(0, lambda: True)
    engine.close()
    prefetcher.close()


@pytest.mark.slow
def test_a_server_that_stays_broken_ends_in_its_name_and_what_was_tried(vllm):
    vllm.faults = [fakes.status(500)] * 100
    engine = engine_of(vllm, retries=2)
    with pytest.raises(UserError, match=rf"{vllm.url}: 3 tries, the last error: 500: the cloud passes"):
        engine.generate(requests_of(2, 2))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"logprobs": False}, "completions have no log-probabilities"),
        ({"samples": -1}, "returned 1 completions instead of n=2"),
        ({"samples": 1}, "returned 3 completions instead of n=2"),
        ({"short": True}, '6 tokens and the finish_reason "length", but the request allowed 7'),
    ],
)
def test_answers_that_cannot_be_used_say_why(vllm, change, words):
    for name, value in change.items():
        setattr(vllm, name, value)
    with pytest.raises(UserError, match=words) as caught:
        engine_of(vllm).generate(requests_of(2, 2))
    assert vllm.url in str(caught.value) and len(vllm.calls) <= 2  # the second try would be no better


def test_other_servers_go_on_where_one_dies(vllm):
    other, said = FakeVllm(), []
    engine = engine_of(vllm, other, print_line=said.append)
    requests = requests_of(12, 2)
    expected = engine.generate(requests)
    assert vllm.calls and other.calls
    vllm.calls.clear()
    other.close()
    assert engine.generate(requests) == expected
    assert len(vllm.calls) == 12 and any(other.url in line for line in said)


@pytest.mark.slow
def test_a_server_that_hangs_costs_half_the_time_and_alone_all_of_it(vllm):
    other = FakeVllm()
    vllm.faults = [fakes.slow(30)] * 10
    engine = engine_of(vllm, other, timeout=2.0)
    start = time.monotonic()
    assert len(engine.generate(requests_of(4, 2))) == 8
    assert time.monotonic() - start < 2.0
    other.close()
    with pytest.raises(UserError, match=rf"{vllm.url}: 1 try, the last error: no answer within 1 s"):
        engine_of(vllm, timeout=1.0).generate(requests_of(1, 2))


LIES = {  # a change of vLLM's answer: what is said of it
    "no choice": (lambda answer: answer["choices"].__setitem__(0, 7), "does not have vllm's form .TypeError"),
    "no index": (lambda answer: answer["choices"][0].pop("index"), "does not have vllm's form .KeyError"),
    "a word": (lambda answer: answer["choices"][0].__setitem__("logprobs", "x"), "does not have vllm's form .Attrib"),
    "a half": (lambda answer: answer["choices"][0]["token_ids"].__setitem__(1, 1.5), "has 1.5 as a token id"),
    "below": (lambda answer: answer["choices"][0]["token_ids"].__setitem__(1, -1), "has -1 as a token id"),
    "beyond": (
        lambda answer: answer["choices"][0]["token_ids"].__setitem__(1, 99),
        "sampled the token 99, but the model's ids end at 98",
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_an_answer_that_is_not_the_servers_form_is_told(vllm, lie):
    change, words = LIES[lie]
    complete = vllm.complete

    def lying(body):
        answer = complete(body)
        change(answer)
        return answer

    vllm.complete = lying
    with pytest.raises(UserError, match=words) as caught:
        engine_of(vllm, retries=0, vocab_size=99).generate(requests_of(1, 2))
    assert vllm.url in str(caught.value)


def trickle(handler, body):
    """A byte now and then, for ever."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000000")
    handler.send_header("Connection", "close")
    handler.end_headers()
    with suppress(OSError):
        while True:
            handler.wfile.write(b" ")
            time.sleep(0.05)


def torn(handler, body):
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b"{}")
    handler.close_connection = True
    return True


@pytest.mark.slow
def test_an_answer_has_its_time_and_its_size(vllm, monkeypatch):
    """From its first byte to its last, however they trickle."""
    vllm.faults = [trickle]
    begun = time.monotonic()
    with pytest.raises(UserError, match="no answer within 1 s"):
        engine_of(vllm, timeout=1.0, retries=0).generate(requests_of(1, 1))
    assert time.monotonic() - begun < 5
    vllm.faults = [torn]
    with pytest.raises(UserError, match="the answer ended after 2 bytes"):
        engine_of(vllm, retries=0).generate(requests_of(1, 1))
    monkeypatch.setattr(http_client, "MAX_ANSWER_BYTES", 100)
    with pytest.raises(UserError, match="the answer has more than 0 MiB"):
        engine_of(vllm, retries=0).generate(requests_of(1, 1))


def test_an_error_ends_the_calls_under_way(vllm):
    """A refusal of one request does not wait for another that takes long."""
    vllm.faults = [fakes.slow(30), fakes.status(400)]
    start = time.monotonic()
    with pytest.raises(UserError, match="400: the cloud passes"):
        engine_of(vllm).generate(requests_of(2, 1))
    assert time.monotonic() - start < 5


def test_close_ends_what_is_under_way(vllm):
    vllm.faults = [fakes.slow(30)]
    engine = engine_of(vllm)
    with ThreadPoolExecutor(1) as threads:
        drawing = threads.submit(engine.generate, requests_of(1, 1))
        time.sleep(0.3)
        engine.close()
        with pytest.raises(UserError, match="closed"):
            drawing.result(5)


@pytest.mark.parametrize(
    ("urls", "options", "words"),
    [
        ([], {}, "grpo.server.urls is empty"),
        (["ftp://x"], {}, "is not the address of a server"),
        (["http://x:port"], {}, "http://x:port"),
        (["http://127.0.0.1:9"], {"start_timeout": 0.5}, "127.0.0.1:9: 2 tries, the last error: Connection refused"),
        (["vllm"], {"kind": "tgi"}, "kind=tgi is unknown"),
        (["vllm"], {"model": "other"}, "no such model. Its models are policy"),
        (["vllm"], {"api_key_file": "/nowhere/key"}, "/nowhere/key"),
    ],
)
def test_mistakes_are_told_at_the_start(vllm, urls, options, words):
    with pytest.raises(UserError, match=words):
        engine_of(*[vllm if url == "vllm" else url for url in urls], **options)


def test_a_server_that_is_waited_for_says_for_how_long():
    said = []
    with pytest.raises(UserError, match=r"did not come up within grpo\.server\.start_timeout=0\.6 seconds"):
        engine_of("http://127.0.0.1:9", start_timeout=0.6, print_line=said.append)
    assert len(said) == 1 and said[0].endswith(
        "Waiting for the server for 1 more seconds (grpo.server.start_timeout=0.6)"
    )


def test_a_server_of_another_kind_is_named(vllm):
    vllm.owner = "someone"
    with pytest.raises(UserError, match='the owner of its models is "someone"'):
        engine_of(vllm)
    assert engine_of(vllm, kind="vllm").generate(requests_of(1, 1))


def test_vllm_reads_a_directory(vllm, tmp_path):
    engine = engine_of(vllm)
    engine.update_from_directory(tmp_path, 3)
    paths = [path for path, _ in vllm.calls]
    pause = "/pause?mode=keep&clear_cache=false"
    caches = ["/reset_prefix_cache?reset_running_requests=true", "/reset_encoder_cache"]
    assert paths == [pause, "/collective_rpc", "/update_weight_version", *caches, "/resume"]
    assert vllm.calls[1][1] == {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path)}}
    assert engine.generate(requests_of(1, 1))[0].version == 3
    vllm.routes = ("/reset_prefix_cache",)
    with pytest.raises(UserError, match="VLLM_SERVER_DEV_MODE=1"):
        engine.update_from_directory(tmp_path, 4)


def test_sglang_reads_a_directory_and_says_its_version(sglang, tmp_path):
    engine = engine_of(sglang)
    engine.update_from_directory(tmp_path, 3)
    update = {"model_path": str(tmp_path), "weight_version": "3"}
    expected = [("/pause_generation", {"mode": "retract"}), ("/update_weights_from_disk", update)]
    assert sglang.calls == [*expected, ("/continue_generation", {})]
    assert engine.generate(requests_of(1, 2))[1].version == 3
    sglang.succeeds = False
    with pytest.raises(UserError, match="no such layer"):
        engine.update_from_directory(tmp_path, 4)
    assert sglang.calls[-1][0] == "/continue_generation"


@pytest.mark.slow
def test_a_server_with_old_weights_is_not_asked(sglang, tmp_path):
    """One that did not take the last weights, or was started anew since, gives no completions until it has them."""
    other, said = FakeSglang(), []
    engine = engine_of(sglang, other, print_line=said.append, retries=1)
    other.succeeds = False
    engine.update_from_directory(tmp_path, 1)
    assert any(other.url in line and "version 1" in line for line in said)
    other.calls.clear()
    assert {one.version for one in engine.generate(requests_of(8, 1))} == {1} and not other.calls
    other.succeeds = True
    engine.update_from_directory(tmp_path, 2)
    other.version = "0"  # started anew
    assert {one.version for one in engine.generate(requests_of(8, 1))} == {2}
    sglang.version = "0"
    with pytest.raises(
        UserError, match="has version 0 of the weights instead of version 2, so it may have been restarted"
    ):
        engine.generate(requests_of(1, 1))
    other.close()


def test_a_wrong_key_is_told_with_the_setting(vllm):
    def refuse(path):
        raise fakes.Refusal(401, "Unauthorized")

    vllm.get = refuse
    with pytest.raises(UserError, match="401: Unauthorized. Set grpo.server.api_key_file to a file"):
        engine_of(vllm)


def test_a_context_that_is_too_small_is_told_with_the_flag(vllm):
    def refused(handler, body):
        problem = "max_tokens=400 cannot be greater than max_model_len=256. Please request fewer output tokens."
        handler.answer(400, {"error": {"message": problem, "type": "BadRequestError", "code": 400}})
        return True

    vllm.faults = [refused]
    with pytest.raises(UserError, match="max_model_len=256(.|\n)*a context for prompt and completion .--max-model-len"):
        engine_of(vllm).generate(requests_of(1, 1))


@pytest.mark.parametrize("weight_info", [["2"], "2", 2, {"weight_version": ["2"]}])
def test_vllm_may_report_its_weights_in_another_form(vllm, tmp_path, weight_info):
    """An unknown form counts as a release that does not report the version."""
    usual = vllm.get
    vllm.get = lambda path: weight_info if path == "/weight_info" else usual(path)
    engine = engine_of(vllm)
    engine.update_from_directory(tmp_path, 2)
    assert engine.generate(requests_of(1, 1))[0].version == 2


def test_sglang_may_answer_an_update_in_another_form(sglang, tmp_path):
    sglang.other = lambda path, body: ["ok"] if path == "/update_weights_from_disk" else {"message": "ok"}
    with pytest.raises(UserError, match="no server loaded version 3(.|\\n)*did not confirm"):
        engine_of(sglang).update_from_directory(tmp_path, 3)


@pytest.mark.parametrize("models", [["policy"], [None], {"policy": {}}, "policy"])
def test_a_list_of_models_in_another_form_is_an_error(vllm, models):
    vllm.get = lambda path: {"data": models}
    with pytest.raises(UserError, match="/v1/models"):
        engine_of(vllm, start_timeout=0.1)


@pytest.mark.slow
def test_vllm_that_was_started_anew_is_known_by_what_it_says_of_its_weights(vllm, tmp_path):
    """Its completions do not tell their version; since 0.32 the server does."""
    vllm.weight_version = "default"
    engine = engine_of(vllm, retries=1)
    assert engine.generate(requests_of(1, 1))[0].version is None
    engine.update_from_directory(tmp_path, 2)
    assert engine.generate(requests_of(1, 1))[0].version == 2
    for vllm.weight_version, held in (
        ("default", "the weights that it was started with"),
        ("1", "version 1 of the weights"),
    ):
        with pytest.raises(UserError, match=f"the server has {held} instead of version 2, so it may"):
            engine.generate(requests_of(1, 1))
    engine.update_from_directory(tmp_path, 3)
    assert engine.generate(requests_of(1, 1))[0].version == 3
