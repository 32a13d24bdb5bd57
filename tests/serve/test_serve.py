"""`dtrain serve` as a process of its own: tokens, streams, bad requests, new weights, and how it ends."""

import json
import shlex
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from urllib.parse import urlsplit

import pytest
import torch

from dtrain import models
from dtrain.base.errors import UserError
from dtrain.commands.serve.answers import TextStream
from dtrain.inference.engine import Engine
from dtrain.inference.request import Request, SamplingParams
from dtrain.rl.remote.http import HttpEngine
from dtrain.rl.remote.publish import write_marker
from tests.serve.serving import Process, ask, controlled, events, make_model, naive, wait_until
from tests.tiny import VOCAB

PROMPT = [5, 6, 7]
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\nContent-Type: application/json\r\n"
GREEDY = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "logprobs": 0, "return_token_ids": True}


HELLO = {"messages": [{"role": "user", "content": "w1"}]}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("serve")


@pytest.fixture(scope="module")
def model(root):
    return make_model(root, 1)


@pytest.fixture(scope="module")
def server(model):
    process = Process(model, "--max-rows", "4", "--name", "tiny", *controlled(model.parent))
    yield process
    process.kill()


def text_of(ids):
    return " ".join(f"w{token}" for token in ids)


def test_greedy_tokens_and_logprobs_are_those_of_whole_forwards(server, model):
    ids, logprobs = naive(model, PROMPT, 12)
    assert len(set(ids)) > 3
    for prompt in (PROMPT, [PROMPT], text_of(PROMPT), [text_of(PROMPT)]):
        status, answer = ask(server.url, "/v1/completions", {**GREEDY, "prompt": prompt})
        assert status == 200
        choice = answer["choices"][0]
        assert choice["token_ids"] == ids and choice["text"] == text_of(ids)
        assert choice["prompt_token_ids"] == PROMPT and choice["weight_version"] == 0
        assert torch.tensor(choice["logprobs"]["token_logprobs"]).allclose(torch.tensor(logprobs), rtol=0, atol=1e-9)
        assert choice["logprobs"]["tokens"] == [f"w{token}" for token in ids]
        assert choice["finish_reason"] == ("stop" if ids[-1] == 1 else "length")
        assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": len(ids), "total_tokens": 3 + len(ids)}
        assert answer["model"] == "tiny" and answer["object"] == "text_completion"


def test_draws_are_the_native_engines_whatever_else_is_asked(server, model):
    """Several clients at once, more sequences than rows: each gets what the engine gives for its requests alone."""
    sampling = SamplingParams(max_new_tokens=10, temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, stop_ids=(1,))
    prompts = [[5, 6], [9], [30, 31, 32, 33]]
    engine = Engine(models.from_pretrained(model, torch.float64))

    def asked(seed):
        body = {
            "prompt": prompts, "n": 3, "max_tokens": 10, "temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01,
            "seed": seed, "logprobs": 0, "return_token_ids": True, "return_tokens_as_token_ids": True,
            "prompt_index": 4, "sample_index": 2,
        }  # fmt: skip
        return ask(server.url, "/v1/completions", body)[1]["choices"]

    with ThreadPoolExecutor(6) as threads:
        answers = list(threads.map(asked, range(6)))
    for seed, choices in enumerate(answers):
        requests = [Request(prompt, sampling, seed, 4 + i, 2 + j) for i, prompt in enumerate(prompts) for j in range(3)]
        for choice, expected in zip(choices, engine.generate(requests), strict=True):
            assert choice["token_ids"] == expected.ids and choice["finish_reason"] == expected.finish
            got = torch.tensor(choice["logprobs"]["token_logprobs"], dtype=torch.float64)
            assert got.allclose(torch.tensor(expected.logprobs, dtype=torch.float64), rtol=0, atol=1e-9)
            assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in expected.ids]
    assert len({json.dumps(choices[0]["token_ids"]) for choices in answers}) > 3


def test_the_client_gives_what_the_engine_gives(server, model):
    sampling = SamplingParams(max_new_tokens=7, temperature=0.9, top_k=30, min_p=0.01, stop_ids=(1, 9))
    requests = [Request([5 + i, 6, 7], sampling, 5, i, j) for i in range(3) for j in range(4)]
    expected = Engine(models.from_pretrained(model, torch.float64)).generate(requests)
    client = HttpEngine([server.url], api_key_file=model.parent / "key")
    assert [one.dialect.name for one in client.servers] == ["dtrain"]
    for got, ours in zip(client.generate(requests), expected, strict=True):
        assert (got.ids, got.finish, got.version) == (ours.ids, ours.finish, 0)
        assert got.logprobs == pytest.approx(ours.logprobs, abs=1e-9)
    some = [*requests[:3], *requests[5:]]  # calls of other sizes
    in_groups = [*expected[:3], *expected[5:]]
    assert [completion.ids for completion in client.generate(some)] == [completion.ids for completion in in_groups]
    with pytest.raises(UserError, match="context holds 128"):
        client.generate([replace(requests[0], sampling=SamplingParams(max_new_tokens=1000))])


def test_seeds_repeat_and_none_is_another_each_time(server):
    body = {"prompt": PROMPT, "max_tokens": 16, "temperature": 2.0, "ignore_eos": True}
    texts = [ask(server.url, "/v1/completions", {**body, **seed})[1]["choices"][0]["text"] for seed in
             ({"seed": 3}, {"seed": 3}, {"seed": 4}, {}, {})]  # fmt: skip
    assert texts[0] == texts[1] and len(set(texts)) == 4


def test_a_stream_adds_up_to_the_whole_answer(server):
    body = {**GREEDY, "n": 2, "ignore_eos": True, "stream_options": {"include_usage": True}}
    _, whole = ask(server.url, "/v1/completions", body)
    pieces, last = events(server.url, "/v1/completions", body)
    assert last == "[DONE]" and pieces[-1]["usage"] == whole["usage"] and pieces[-1]["choices"] == []
    for index, expected in enumerate(whole["choices"]):
        mine = [piece["choices"][0] for piece in pieces[:-1] if piece["choices"][0]["index"] == index]
        assert len(mine) > 3
        assert "".join(choice["text"] for choice in mine) == expected["text"]
        assert sum((choice["token_ids"] for choice in mine), []) == expected["token_ids"]
        logprobs = sum((choice["logprobs"]["token_logprobs"] for choice in mine), [])
        assert logprobs == expected["logprobs"]["token_logprobs"]
        assert [choice["finish_reason"] for choice in mine] == [None] * (len(mine) - 1) + ["length"]
        assert mine[0]["prompt_token_ids"] == PROMPT and "prompt_token_ids" not in mine[1]


def test_chat_takes_the_template_and_streams(server, model):
    ids, logprobs = naive(model, [8, 5, 8, 6, 9], 6)
    messages = [{"role": "system", "content": "w5"}, {"role": "user", "content": "w6"}]
    body = {"model": "tiny", "messages": messages, "max_tokens": 6, "temperature": 0, "logprobs": True}
    status, answer = ask(server.url, "/v1/chat/completions", body)
    choice = answer["choices"][0]
    assert status == 200 and answer["object"] == "chat.completion" and answer["usage"]["prompt_tokens"] == 5
    assert choice["message"] == {"role": "assistant", "content": text_of(ids)}
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == pytest.approx(logprobs, abs=1e-9)
    _, told = ask(server.url, "/v1/chat/completions", {**body, "return_token_ids": True})
    assert told["prompt_token_ids"] == [8, 5, 8, 6, 9] and "prompt_token_ids" not in answer  # as vLLM has it
    _, thinking = ask(server.url, "/v1/chat/completions", {**body, "chat_template_kwargs": {"thinking": True}})
    assert thinking["usage"]["prompt_tokens"] == 6
    pieces, _ = events(server.url, "/v1/chat/completions", {**body, "return_token_ids": True})
    assert [piece.get("prompt_token_ids") for piece in pieces[:2]] == [[8, 5, 8, 6, 9], None]
    assert pieces[0]["object"] == "chat.completion.chunk" and pieces[0]["choices"][0]["delta"]["role"] == "assistant"
    assert "".join(piece["choices"][0]["delta"]["content"] for piece in pieces) == choice["message"]["content"]


def test_stops(server, model):
    ids, _ = naive(model, PROMPT, 12, stop_ids=())
    third = ids[2]
    at = ids.index(third) + 1
    stopped = {**GREEDY, "ignore_eos": True}
    _, answer = ask(server.url, "/v1/completions", {**stopped, "stop_token_ids": [third]})
    choice = answer["choices"][0]
    assert choice["token_ids"] == ids[:at] and choice["finish_reason"] == "stop" and choice["stop_reason"] == third
    word = f"w{third}"
    _, answer = ask(server.url, "/v1/completions", {**stopped, "stop": word})
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "stop" and choice["stop_reason"] == word
    assert choice["text"] == text_of(ids)[: text_of(ids).index(word)]
    assert word in text_of(choice["token_ids"])
    _, answer = ask(server.url, "/v1/completions", {**stopped, "stop": [word], "include_stop_str_in_output": True})
    assert answer["choices"][0]["text"].endswith(word)
    pieces, _ = events(server.url, "/v1/completions", {**stopped, "stop": [word]})
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == choice["text"]


def test_text_waits_for_whole_characters_and_for_what_may_be_a_stop():
    words = {1: b"ab", 2: "é".encode()[:1], 3: "é".encode()[1:], 4: b"<en", 5: b"d>", 6: b"<x"}

    def decode(ids):
        return b"".join(words[token] for token in ids).decode(errors="replace")

    def pushed(ids, **options):
        stream = TextStream(decode, ["<end>"], **options)
        return [stream.push([token], last=index == len(ids) - 1) for index, token in enumerate(ids)], stream.stopped

    assert pushed([1, 2, 3, 1]) == (["ab", "", "é", "ab"], None)
    assert pushed([1, 4, 6, 4]) == (["ab", "", "<en<x", "<en"], None)
    assert pushed([1, 4, 5]) == (["ab", "", ""], "<end>")
    assert pushed([1, 4, 5, 1], keep=True) == (["ab", "", "<end>", ""], "<end>")
    assert pushed([2]) == (["\ufffd"], None)


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/v1/completions", b"{", 400, "not JSON"),
        ("/v1/completions", b"[1]", 400, "must be a JSON object"),
        ("/v1/completions", {}, 400, "prompt must be"),
        ("/v1/completions", {"prompt": []}, 400, "prompt must be"),
        ("/v1/completions", {"prompt": ""}, 400, "no token"),
        ("/v1/completions", {"prompt": [1, -2]}, 400, "prompt must be"),
        ("/v1/completions", {"prompt": [VOCAB]}, 400, f"vocabulary of {VOCAB}"),
        ("/v1/completions", {"prompt": [1], "max_tokens": 128}, 400, "context holds 128"),
        ("/v1/completions", {"prompt": [1], "max_tokens": "many"}, 400, "max_tokens must be a whole number"),
        ("/v1/completions", {"prompt": [1], "temperature": -1}, 400, "temperature=-1 must be at least 0"),
        ("/v1/completions", {"prompt": [1], "top_p": 0}, 400, "top_p=0 must be above 0"),
        ("/v1/completions", {"prompt": [1], "n": 0}, 400, "n=0 must be from 1"),
        ("/v1/completions", {"prompt": [1], "stop": [1]}, 400, "stop must be"),
        ("/v1/completions", {"prompt": [1], "logprobs": 5}, 400, "logprobs"),
        ("/v1/completions", {"prompt": [1], "model": "other"}, 404, "no model 'other'"),
        ("/v1/chat/completions", {}, 400, "messages is missing"),
        ("/v1/chat/completions", {"messages": [{"role": "usr", "content": "w1"}]}, 400, "did you mean 'user'"),
        (
            "/v1/chat/completions",
            {**HELLO, "chat_template_kwargs": {"loud": True}},
            400,
            "is not a variable of this model",
        ),
        (
            "/v1/chat/completions",
            {**HELLO, "chat_template_kwargs": {"messages": 1}},
            400,
            "is not a variable of this model",
        ),
        ("/v1/chat/completions", {**HELLO, "chat_template_kwargs": {"thinking": []}}, 400, "thinking must be true, f"),
        ("/v1/chat/completions", {**HELLO, "chat_template_kwargs": "on"}, 400, "must be an object"),
        ("/v1/embeddings", {}, 404, "there is no /v1/embeddings here"),
        ("/health", {}, 405, "wants GET"),
        ("/update_weights_from_disk", {"model_path": "/nowhere"}, 403, "is not below"),
        ("/update_weights_from_distributed", {"names": ["x"], "dtypes": ["float32"], "shapes": [[1]]}, 400, "'x'"),
        ("/pause", {"mode": "nap"}, 400, "mode='nap'"),
    ],
)
def test_bad_requests_are_answered_with_why(server, path, body, status, words):
    got, answer = ask(server.url, path, body)
    assert got == status and words in answer["error"]["message"]
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert ask(server.url, "/health")[1]["running"] == 0


def test_a_body_that_is_too_large_is_not_read(server):
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port), 10) as raw:
        raw.sendall(HEAD + b"Content-Length: 999999999999\r\n\r\n")
        assert raw.recv(1000).startswith(b"HTTP/1.1 413 ")


def test_a_client_that_hangs_up_is_forgotten(server):
    address = urlsplit(server.url)
    body = json.dumps({"prompt": PROMPT, "max_tokens": 100, "n": 200, "ignore_eos": True}).encode()
    with socket.create_connection((address.hostname, address.port), 10) as raw:
        raw.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        wait_until(lambda: ask(server.url, "/health")[1]["running"] == 4)
    wait_until(lambda: ask(server.url, "/health")[1]["running"] == 0)
    assert ask(server.url, "/health")[1]["waiting"] == 0


def test_the_same_prompt_may_join_while_it_is_being_answered(server, model):
    ids, _ = naive(model, PROMPT, 60, stop_ids=())
    long = {**GREEDY, "max_tokens": 60, "ignore_eos": True}
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(ask, server.url, "/v1/completions", long)
        second = threads.submit(ask, server.url, "/v1/completions", long)
        for answer in (first.result(), second.result()):
            assert answer[1]["choices"][0]["token_ids"] == ids


def test_a_port_that_is_taken_is_told(model, server, capsys):
    from dtrain.commands.cli import main

    port = str(urlsplit(server.url).port)
    assert main(["serve", str(model), "--port", port, "--device", "cpu"]) == 1
    assert f"cannot listen at 127.0.0.1:{port}" in capsys.readouterr().err


def test_weights_from_directories_once_they_are_whole(model, root):
    """By a call, by following a shared directory; with a key; and an end without grace."""
    shared = root / "shared"
    other = make_model(shared, 2, "other")
    process = Process(model, *controlled(root), "--watch", str(shared), "--max-rows", "2", "--grace", "0")

    def choice():
        return ask(process.url, "/v1/completions", GREEDY)[1]["choices"][0]

    try:
        assert ask(process.url, "/v1/completions", GREEDY, Authorization="")[0] == 401
        assert ask(process.url, "/health", Authorization="")[0] == 200
        status, answer = ask(process.url, "/update_weights_from_disk", {"model_path": str(root / "nowhere")})
        assert status == 404 and "no such directory" in answer["error"]["message"]
        body = {"model_path": str(other), "weight_version": "7"}
        status, answer = ask(process.url, "/update_weights_from_disk", body)
        assert status == 409 and "no marker" in answer["error"]["message"]
        assert choice()["token_ids"] == naive(model, PROMPT, 12)[0]
        write_marker(other)
        status, answer = ask(process.url, "/update_weights_from_disk", body)
        assert status == 200 and answer["success"] and answer["weight_version"] == 7
        assert ask(process.url, "/health")[1]["weight_version"] == 7
        expected = naive(other, PROMPT, 12)
        assert choice()["token_ids"] == expected[0] != naive(model, PROMPT, 12)[0] and choice()["weight_version"] == 7
        assert choice()["logprobs"]["token_logprobs"] == pytest.approx(expected[1], abs=1e-9)

        wrong = make_model(root, 3, "wrong")
        (wrong / "model.safetensors").write_bytes(b"no weights")
        write_marker(wrong)
        status, answer = ask(process.url, "/update_weights_from_disk", {"model_path": str(wrong)})
        assert status == 400 and "damaged" in answer["error"]["message"]
        assert choice()["token_ids"] == expected[0]
        assert ask(process.url, "/health")[1]["weight_version"] == 7

        make_model(shared, 4, ".writing").rename(shared / "step-8")
        (shared / "step-9").mkdir()  # being written
        write_marker(shared / "step-8")
        wait_until(lambda: ask(process.url, "/health")[1]["weight_version"] == 8)
        assert choice()["token_ids"] == naive(shared / "step-8", PROMPT, 12)[0]

        got = []
        long = {"prompt": PROMPT, "max_tokens": 120, "n": 500, "ignore_eos": True}
        streamed = []
        asking = [
            threading.Thread(target=lambda: streamed.append(events(process.url, "/v1/completions", long))),
            threading.Thread(target=lambda: got.append(ask(process.url, "/v1/completions", long))),
        ]
        for thread in asking:
            thread.start()
            wait_until(lambda: ask(process.url, "/health")[1]["running"] == 2)
        wait_until(lambda: ask(process.url, "/health")[1]["waiting"] > 500)
        assert process.end(signal.SIGINT) == 128 + signal.SIGINT
        for thread in asking:
            thread.join()
        assert got[0][0] == 503 and "ending" in got[0][1]["error"]["message"]
        pieces, last = streamed[0]
        assert pieces[0]["choices"] and "ending" in json.loads(last)["error"]["message"]
        assert "refused" in process.lines[-1] and any("version 8 of the weights" in line for line in process.lines)
    finally:
        process.kill()


def test_the_command_that_is_shown_is_answered(model, server):
    process = Process(model)
    assert process.url
    wait_until(lambda: len(process.lines) > 1)
    words = shlex.split(process.lines[1])
    assert words[0] == "curl" and words[2:4] == ["-H", "Content-Type: application/json"] and words[4] == "-d"
    path, body = words[1].removeprefix(process.url), json.loads(words[5])
    status, answer = ask(process.url, path, {**body, "max_tokens": 2})
    assert status == 200 and answer["object"].endswith("completion") and answer["choices"][0], answer
    assert process.end(signal.SIGINT) == 130
    assert not any("curl" in line for line in server.lines)  # it wants a key, which is not shown


def test_it_ends_in_order(server):
    """SIGTERM: what is under way is answered, what comes after is refused; the status is the signal's. The last test
    of this file: the server is gone after it."""
    url = server.url
    got = []
    long = {"prompt": PROMPT, "max_tokens": 120, "n": 12, "ignore_eos": True}
    streamed = []
    asking = threading.Thread(target=lambda: got.append(ask(url, "/v1/completions", long)))
    streaming = threading.Thread(target=lambda: streamed.append(events(url, "/v1/completions", {**long, "n": 1})))
    streaming.start()
    asking.start()
    wait_until(lambda: ask(url, "/health")[1]["running"] == 4)
    assert server.end(signal.SIGTERM) == 128 + signal.SIGTERM
    asking.join()
    streaming.join()
    pieces, last = streamed[0]
    assert last == "[DONE]" and pieces[-1]["choices"][0]["finish_reason"] == "length"
    status, answer = got[0]
    assert status == 200 and [len(choice["text"].split()) for choice in answer["choices"]] == [120] * 12
    assert "all running requests were finished" in server.lines[-1]
