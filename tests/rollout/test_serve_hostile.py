"""`dtrain serve` against strangers: each hostile request is answered, and a good one after it gives the same tokens."""

import http.client
import json
import os
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from urllib.parse import urlsplit

import pytest
import torch

from dtrain import models
from dtrain.cli import main
from dtrain.data.prompts import PromptEncoder, PromptOptions
from dtrain.data.template import choose_template
from dtrain.data.tokenizer import Tokenizer
from dtrain.errors import UserError
from dtrain.rollout.engine import Engine
from dtrain.rollout.http import HttpEngine, read_key
from dtrain.rollout.request import Request, SamplingParams
from dtrain.rollout.serve.connection import Limits
from dtrain.rollout.serve.fields import ApiError, Field, check, read_object
from dtrain.rollout.serve.protocol import CHAT, COMPLETION, Parser
from dtrain.rollout.serve.routes import Service
from dtrain.rollout.serve.server import Server
from dtrain.rollout.serve.updates import Updates
from dtrain.rollout.serve.worker import Worker
from tests.rollout.serving import KEY, Process, ask, controlled, key_file, make_model, naive, wait_until
from tests.tiny import VOCAB, write_model

PROMPT = [5, 6, 7]
GREEDY = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "logprobs": 0, "return_token_ids": True}
LOCAL = {"localhost", "127.0.0.1", "[::1]"}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("hostile")


@pytest.fixture(scope="module")
def model(root):
    return make_model(root, 1)


@contextmanager
def serving(directory, key=None, control=None, limits=None, engine=Engine):
    """A server in threads of this process; its address, and the worker."""
    net = models.from_pretrained(directory, torch.float64)
    tokenizer = Tokenizer.from_directory(directory)
    template = choose_template(tokenizer.directory, tokenizer.special_tokens)
    encoder = PromptEncoder(tokenizer, template, max_length=128, options=PromptOptions(128))
    worker = Worker(engine(net, decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=True), max_rows=4))
    service = Service(Parser(encoder, "tiny", 128), worker, Updates(net, worker, control), key, LOCAL)
    server = Server(("127.0.0.1", 0), service, limits)
    worker.start()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", worker
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
        worker.end(0.0)


@pytest.fixture(scope="module")
def open_server(model):
    with serving(model) as (url, _):
        yield url


@pytest.fixture(scope="module")
def keyed(model, root):
    """A process of its own, with a key and control."""
    process = Process(model, *controlled(root), "--max-rows", "4")
    yield process
    process.kill()


def raw(url, data, seconds=10.0):
    """(status, the answer's JSON) to bytes as they are; both None where the server hung up without a word."""
    with socket.create_connection((urlsplit(url).hostname, urlsplit(url).port), seconds) as sock:
        with suppress(BrokenPipeError, ConnectionResetError):  # it may hang up before all is sent
            sock.sendall(data)
        answer = b""
        with suppress(ConnectionResetError):
            while not (found := re.match(rb"HTTP/1.1 (\d+) (?s:.*?)\r\n\r\n((?s:.*))", answer)) or (
                (size := re.search(rb"Content-Length: (\d+)", answer)) and len(found[2]) < int(size[1])
            ):
                part = sock.recv(1 << 16)
                if not part:
                    break
                answer += part
    if not answer:
        return None, None
    return int(found[1]), json.loads(found[2]) if found[2] else None


def post(body, *headers, path="/v1/completions", kind="application/json", length=None):
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    length = len(body) if length is None else length
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Type: {kind}", f"Content-Length: {length}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


def assert_well(url, model, *headers):
    """A good request gets the tokens of whole forwards."""
    status, answer = raw(url, post(GREEDY, "Connection: close", *headers))
    assert status == 200 and answer["choices"][0]["token_ids"] == naive_ids(model)


@cache
def naive_ids(model):
    return naive(model, PROMPT, 6)[0]


OK = {"prompt": [5], "max_tokens": 1}
DEEP = b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
BODIES = {
    "top_k of 2**70": {**OK, "top_k": 2**70},
    "top_k of 2**63": {**OK, "top_k": 2**63},
    "top_k below -1": {**OK, "top_k": -2},
    "a bool for top_k": {**OK, "top_k": True},
    "n of a million": {**OK, "n": 10**6},
    "too many completions": {**OK, "prompt": [[5]] * 5, "n": 1024},
    "n of 1.0": {**OK, "n": 1.0},
    "a seed too large": {**OK, "seed": 2**63},
    "a seed too small": {**OK, "seed": -(2**63) - 1},
    "a seed as text": {**OK, "seed": "7"},
    "a prompt index of 2**64": {**OK, "prompt_index": 2**64},
    "max_tokens of 2**63": {**OK, "max_tokens": 2**63},
    "an id beyond the vocabulary": {**OK, "prompt": [VOCAB]},
    "an id of 2**100": {**OK, "prompt": [2**100]},
    "an id below 0": {**OK, "prompt": [5, -1]},
    "an id that is a bool": {**OK, "prompt": [True]},
    "an id that is a float": {**OK, "prompt": [5.0]},
    "prompts of lists of lists": {**OK, "prompt": [[[5]]]},
    "a prompt that is an object": {**OK, "prompt": {"ids": [5]}},
    "half a character": {**OK, "prompt": "\ud800"},
    "a stop id beyond the vocabulary": {**OK, "stop_token_ids": [VOCAB]},
    "stop ids by the thousand": {**OK, "stop_token_ids": [5] * 5000},
    "a stop of 1 MB": {**OK, "stop": "x" * 2**20},
    "stops by the hundred": {**OK, "stop": ["x"] * 500},
    "a stop that is a number": {**OK, "stop": [1]},
    "stream as a number": {**OK, "stream": 1},
    "stream_options as a list": {**OK, "stream_options": []},
    "an unknown field of stream_options": {**OK, "stream_options": {"include_usages": True}},
    "include_usage as text": {**OK, "stream_options": {"include_usage": "yes"}},
    "temperature as text": {**OK, "temperature": "1"},
    "temperature as a bool": {**OK, "temperature": True},
    "temperature as a list": {**OK, "temperature": [1]},
    "temperature of NaN": b'{"prompt": [5], "temperature": NaN}',
    "temperature of Infinity": b'{"prompt": [5], "temperature": Infinity}',
    "temperature of -Infinity": b'{"prompt": [5], "temperature": -Infinity}',
    "temperature of 1e999": b'{"prompt": [5], "temperature": 1e999}',
    "a number of 5000 digits": b'{"prompt": [5], "temperature": ' + b"9" * 5000 + b"}",
    "a fraction of 5000 digits": b'{"prompt": [5], "temperature": 0.' + b"9" * 5000 + b"}",
    "top_p of 0": {**OK, "top_p": 0},
    "top_p of 2": {**OK, "top_p": 2},
    "min_p below 0": {**OK, "min_p": -0.1},
    "a penalty": {**OK, "frequency_penalty": 0.1},
    "a penalty that is false": {**OK, "frequency_penalty": False},
    "a logit bias": {**OK, "logit_bias": {"5": 100}},
    "logprobs of 2**70": {**OK, "logprobs": 2**70},
    "a key twice": b'{"prompt": [5], "max_tokens": 1, "max_tokens": 2}',
    "a key twice inside": b'{"prompt": [5], "stream_options": {"include_usage": true, "include_usage": false}}',
    "a very deep body": DEEP,
    "a depth of 40": b'{"metadata": ' + b"[" * 40 + b"]" * 40 + b"}",
    "depth behind a string that hides brackets": b'{"user": "]]]]]]]]]]", "metadata": ' + b'[{"a":' * 40 + b"}",
    "brackets that only close": b"]" * 200_000,
    "a million values": b'{"prompt": [' + b"1," * 2**20 + b"1]}",
    "a million objects": b'{"prompt": [' + b"{}," * 400_000 + b"{}]}",
    "quotes that never close": b'{"a": ' + b'"\\"' * 100_000,
    "no UTF-8": b'{"prompt": "\xff\xfe"}',
    "UTF-16": json.dumps(OK).encode("utf-16"),
    "a BOM": b"\xef\xbb\xbf" + json.dumps(OK).encode(),
    "NUL bytes": b"\0" * 1000,
    "two values": b'{"prompt": [5]} {"prompt": [5]}',
    "a list": b"[]",
    "null": b"null",
    "nothing": b"",
    "half a body": b'{"prompt": [5',
    "an unknown field": {**OK, "max_token": 1},
    "an unknown field of 1 MB": {**OK, "x" * 2**20: 1},
}
CHATS = {
    "messages as text": {"messages": "[" * 100_000},
    "messages as an object": {"messages": {}},
    "no messages": {"messages": []},
    "a message that is text": {"messages": ["w5"]},
    "a message without a role": {"messages": [{"content": "w5"}]},
    "a role that is a number": {"messages": [{"role": 1, "content": "w5"}]},
    "an unknown role": {"messages": [{"role": "root", "content": "w5"}]},
    "an unknown field of a message": {"messages": [{"role": "user", "contents": "w5"}]},
    "ShareGPT's words": {"messages": [{"from": "human", "value": "w5"}]},
    "content that is a number": {"messages": [{"role": "user", "content": 5}]},
    "content that is an object": {"messages": [{"role": "user", "content": {"text": "w5"}}]},
    "an image": {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///"}}]}]},
    "a part without a text": {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
    "a part that is a number": {"messages": [{"role": "user", "content": [5]}]},
    "half a character": {"messages": [{"role": "user", "content": "\ud800"}]},
    "tool calls as text": {"messages": [{"role": "assistant", "tool_calls": "[" * 100_000}]},
    "arguments that are deep": {
        "messages": [
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 100_000}}]},
            {"role": "user", "content": "w5"},
        ]
    },
    "a call that is a list": {"messages": [{"role": "assistant", "tool_calls": [[]]}]},
    "tools as text": {"messages": [{"role": "user", "content": "w5"}], "tools": "[" * 100_000},
    "tools of numbers": {"messages": [{"role": "user", "content": "w5"}], "tools": [1]},
    "a template of one's own": {"messages": [{"role": "user", "content": "w5"}], "chat_template": "{{ 1 }}"},
}


@pytest.mark.parametrize("name", BODIES)
def test_a_hostile_body_is_refused_and_nothing_else_suffers(open_server, model, name):
    status, answer = raw(open_server, post(BODIES[name]))
    assert status == 400, (status, answer)
    assert set(answer["error"]) == {"message", "type", "param", "code"} and len(answer["error"]["message"]) < 3000
    assert_well(open_server, model)


@pytest.mark.parametrize("name", CHATS)
def test_a_hostile_chat_is_refused_and_nothing_else_suffers(open_server, model, name):
    status, answer = raw(open_server, post({"max_tokens": 1, **CHATS[name]}, path="/v1/chat/completions"))
    assert status == 400, (status, answer)
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert_well(open_server, model)


GET = "GET /health HTTP/1.1\r\nHost: localhost\r\n"
POST = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
BODY = json.dumps(OK)
HEADS = {
    "length -1": (POST + f"Content-Length: -1\r\n\r\n{BODY}", 400),
    "length +5": (POST + f"Content-Length: +5\r\n\r\n{BODY}", 400),
    "length 1e3": (POST + f"Content-Length: 1e3\r\n\r\n{BODY}", 400),
    "length 0x10": (POST + f"Content-Length: 0x10\r\n\r\n{BODY}", 400),
    "length of arabic digits": (POST + f"Content-Length: \u0663\r\n\r\n{BODY}", 400),
    "length empty": (POST + f"Content-Length: \r\n\r\n{BODY}", 400),
    "length 5, 5": (POST + f"Content-Length: 5, 5\r\n\r\n{BODY}", 400),
    "length twice": (POST + f"Content-Length: {len(BODY)}\r\nContent-Length: {len(BODY)}\r\n\r\n{BODY}", 400),
    "length twice, other": (POST + f"Content-Length: {len(BODY)}\r\nContent-Length: 0\r\n\r\n{BODY}", 400),
    "length of 100 digits": (POST + f"Content-Length: {'9' * 100}\r\n\r\n{BODY}", 400),
    "length of 10**17": (POST + f"Content-Length: {10**17}\r\n\r\n{BODY}", 413),
    "length and chunks": (POST + f"Content-Length: {len(BODY)}\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    "chunks": (POST + "Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 411),
    "chunks, misspelt": (POST + "Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", 411),
    "no length": (POST + f"\r\n{BODY}", 411),
    "a folded header": (POST + f"X-A: b\r\n c: d\r\nContent-Length: {len(BODY)}\r\n\r\n{BODY}", 400),
    "a folded length": (POST + f"Content-Length:\r\n {len(BODY)}\r\n\r\n{BODY}", 400),
    "a space before the colon": (POST + f"Content-Length : {len(BODY)}\r\n\r\n{BODY}", 400),
    "a header without a name": (GET + ": x\r\n\r\n", 400),
    "a header without a colon": (GET + "Nonsense\r\n\r\n", 400),
    "a NUL in a header": (GET + "X: a\0b\r\n\r\n", 400),
    "a bare CR": (GET + "X: a\rContent-Length: 5\r\n\r\n", 400),
    "bare LF": ("GET /health HTTP/1.1\nHost: localhost\n\n", 400),
    "no Host": ("GET /health HTTP/1.1\r\n\r\n", 400),
    "Host twice": (GET + "Host: localhost\r\n\r\n", 400),
    "another Host": (GET.replace("localhost", "evil.example") + "\r\n", 403),
    "another Host with a port": (GET.replace("localhost", "evil.example:8000") + "\r\n", 403),
    "a Host that only begins well": (GET.replace("localhost", "localhost.evil.example") + "\r\n", 403),
    "a Host with a name": (GET.replace("localhost", "localhost:1@evil.example") + "\r\n", 403),
    "HTTP/0.9": ("GET /health\r\n\r\n", 400),
    "HTTP/2": ("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
    "HTTP/1.1 misspelt": ("GET /health HTTP/1.1x\r\nHost: localhost\r\n\r\n", 400),
    "two spaces": ("GET  /health HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
    "a control character in the path": ("GET /he\x07alth HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
    "no ASCII in the path": ("GET /hé HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
    "a path of IPv6 that is none": ("GET //[ HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
    "dots in the path": ("GET /../../etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
    "another path": ("GET /admin HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
    "a path of 100 kB": ("GET /" + "a" * 100_000 + " HTTP/1.1\r\nHost: localhost\r\n\r\n", 414),
    "a header of 100 kB": (GET + "X: " + "a" * 100_000 + "\r\n\r\n", 431),
    "spaces by the ten thousand": (GET + "X:" + " " * 10_000 + "\0\r\n\r\n", 400),
    "headers by the ten thousand": (GET + "".join(f"X{i}: 1\r\n" for i in range(10_000)) + "\r\n", 431),
    "PUT": ("PUT /health HTTP/1.1\r\nHost: localhost\r\n\r\n", 405),
    "DELETE": ("DELETE /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n", 405),
    "OPTIONS": ("OPTIONS /v1/completions HTTP/1.1\r\nHost: localhost\r\nOrigin: http://evil.example\r\n\r\n", 405),
    "OPTIONS *": ("OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n", 405),
    "CONNECT": ("CONNECT example.com:443 HTTP/1.1\r\nHost: localhost\r\n\r\n", 405),
    "a verb of one's own": ("BREW /health HTTP/1.1\r\nHost: localhost\r\n\r\n", 501),
    "a verb in small letters": ("get /health HTTP/1.1\r\nHost: localhost\r\n\r\n", 501),
    "GET for POST": ("GET /v1/completions HTTP/1.1\r\nHost: localhost\r\n\r\n", 405),
    "GET with a body": (GET + "Content-Length: 5\r\n\r\nhello", 400),
    "no Content-Type": (POST.split("Content-Type")[0] + f"Content-Length: {len(BODY)}\r\n\r\n{BODY}", 415),
    "text/plain": (post(OK, kind="text/plain"), 415),
    "a form": (post(OK, kind="application/x-www-form-urlencoded"), 415),
    "another charset": (post(OK, kind="application/json; charset=utf-7"), 415),
    "gzip": (post(OK, "Content-Encoding: gzip"), 415),
    "an odd Expect": (post(OK, "Expect: tea"), 417),
    "60 MB": (post(b"", length=60_000_000), 413),
    "a weight route": (post({"model_path": "/"}, path="/update_weights_from_disk"), 404),
    "pause": (post({}, path="/pause"), 404),
}


@pytest.mark.parametrize("name", HEADS)
def test_a_hostile_head_is_answered_and_the_connection_ends(open_server, model, name):
    """What follows on the same connection is not read as a request: the answer is the only one."""
    data, expected = HEADS[name]
    data = data if isinstance(data, bytes) else data.encode("latin-1" if "é" in data else "utf-8")
    status, answer = raw(open_server, data)
    assert status == expected and answer["error"]["code"] == expected, answer
    assert_well(open_server, model)


def test_a_request_behind_a_refused_one_is_not_taken(open_server):
    """Request smuggling: two opinions of where the first one ends."""
    inner = "GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for head in (f"Content-Length: {len(inner)}\r\nTransfer-Encoding: chunked\r\n", "Transfer-Encoding: chunked\r\n"):
        with socket.create_connection((urlsplit(open_server).hostname, urlsplit(open_server).port), 10) as sock:
            sock.sendall((POST + head + "\r\n0\r\n\r\n" + inner).encode())
            answer = b""
            while part := sock.recv(1 << 16):
                answer += part
        assert answer.count(b"HTTP/1.1 ") == 1 and b"Connection: close" in answer and b"owned_by" not in answer


def test_head_has_no_body_and_pipelined_requests_are_answered_in_order(open_server):
    with socket.create_connection((urlsplit(open_server).hostname, urlsplit(open_server).port), 10) as sock:
        sock.sendall(b"HEAD /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        sock.sendall(post(OK) + b"\r\n" + post({**OK, "top_k": 2**70}) + (GET + "Connection: close\r\n\r\n").encode())
        answer = b""
        while part := sock.recv(1 << 16):
            answer += part
    assert re.findall(rb"HTTP/1.1 (\d+)", answer) == [b"405", b"200", b"400", b"200"]
    assert b"Allow: GET, POST" in answer and b"\r\n\r\nHTTP/1.1 200" in answer


def test_a_client_that_waits_for_100_continue_gets_it(open_server):
    with socket.create_connection((urlsplit(open_server).hostname, urlsplit(open_server).port), 10) as sock:
        body = json.dumps(OK).encode()
        sock.sendall(post(b"", "Expect: 100-continue", "Connection: close", length=len(body)))
        assert sock.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(body)
        assert sock.recv(1000).startswith(b"HTTP/1.1 200 ")


def test_fields_that_clients_send_along_are_taken(open_server, model):
    extra = {
        "user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "n": 1, "stop": None, "top_k": 0,
        "stream_options": {"include_usage": True}, "frequency_penalty": 0.0, "presence_penalty": 0, "best_of": 1,
        "logit_bias": {}, "echo": False, "suffix": "", "seed": 3, "repetition_penalty": 1.0, "min_tokens": 0,
        "skip_special_tokens": True, "priority": 0, "request_id": "r",
    }  # fmt: skip
    status, answer = raw(open_server, post({**GREEDY, **extra}, kind="application/json; charset=UTF-8"))
    assert status == 200 and answer["choices"][0]["token_ids"] == naive_ids(model)
    parts = [{"type": "text", "text": "w6"}]
    call = {"id": "c", "type": "function", "index": 0, "function": {"name": "f", "arguments": '{"a": [1]}'}}
    messages = [
        {"role": "system", "content": "w5"},
        {"role": "user", "content": parts, "name": "n"},
        {"role": "assistant", "content": None, "refusal": None, "annotations": [], "audio": None, "tool_calls": [call]},
        {"role": "tool", "content": "w7", "tool_call_id": "c"},
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": True}}]
    body = {"messages": messages, "tools": tools, "tool_choice": "auto", "max_completion_tokens": 2, "logprobs": None,
            "parallel_tool_calls": True, "response_format": {"type": "text"}, "modalities": ["text"]}  # fmt: skip
    assert raw(open_server, post(body, path="/v1/chat/completions"))[0] == 200


def test_an_unknown_field_is_told_the_nearest():
    for table, wrong, right in (
        (COMPLETION, "max_token", "max_tokens"),
        (COMPLETION, "Temperature", "temperature"),
        (CHAT, "max_completion_token", "max_completion_tokens"),
        (CHAT, "message", "messages"),
        (COMPLETION, "qqq", ""),
    ):
        with pytest.raises(ApiError, match=f"{wrong} is no field .* the nearest known field is {right}"):
            check({wrong: 1}, table)


def test_tables_read_every_value_by_kind():
    """Each field of the tables with values of every kind: wrong ones are refused by name, or the field is ignored."""
    values = [True, 1, 2**63, -1, 1.5, "x", [], [1], ["x"], {}, {"x": 1}, [[]], [None], [{}]]
    for table in (COMPLETION, CHAT):
        for name, field in table.items():
            taken = 0
            for value in values:
                try:
                    check({name: value}, table)
                    taken += 1
                except ApiError as error:
                    assert error.status == 400 and name in str(error), (name, value)
            assert taken < len(values) or field == Field(), name


@pytest.mark.parametrize("raw_body, words", [(b'{"a": {"b": 1, "b": 2}}', "twice"), (b"{", "not JSON")])
def test_json_is_read_strictly(raw_body, words):
    with pytest.raises(ApiError, match=words):
        read_object(raw_body)


def test_strings_are_no_structure():
    """Brackets, commas and digits in texts count for nothing."""
    text = '[{"' * 1000 + "," * (1 << 20) + "9" * 1000 + "\\" * 501 + '"'
    assert read_object(json.dumps({"a": text}).encode()) == {"a": text}


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


@pytest.fixture(scope="module")
def poisoned(root):
    """A model whose tokens 60 and 0 are NaN, and the same one without; neither is ever the likeliest."""
    directory = root / "poisoned"
    source = write_model(directory, "qwen3", tied=False)
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


def test_a_poisoned_row_fails_alone(poisoned):
    """Its neighbours' tokens and logprobs are the bits of a batch with sound weights, as are those that get its place
    in the cache after it; padding with a poisoned token harms no one."""
    net, sound = poisoned
    sampling = SamplingParams(max_new_tokens=40, temperature=0.0)
    good = [Request([5 + index] * (1 + 3 * index), sampling, 3, index) for index in range(6)]
    bad = Request([60, 5, 6], sampling, 3, 9)

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
    late = max(index for index in range(8) if path[index] not in path[:index])
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


def test_a_poisoned_request_is_500_and_its_neighbours_are_answered(root, model):
    """Over HTTP; weights with one NaN token, served."""
    directory = root / "one-nan"
    (directory / "source").mkdir(parents=True)
    source = write_model(directory / "source", "qwen3", tied=False)
    net = models.build(models.read_config(source), torch.float64)
    models.init_weights(net, 1)

    class Poisoned(Engine):
        def __init__(self, _, **options):
            super().__init__(net, **options)

    body = {"max_tokens": 60, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    with serving(model, engine=Poisoned) as (url, worker):
        expected = raw(url, post({**body, "prompt": [5]}))[1]["choices"][0]["token_ids"]
        with torch.no_grad():
            net.model.embed_tokens.weight[60] = float("nan")
        with ThreadPoolExecutor(6) as threads:
            good = [threads.submit(raw, url, post({**body, "prompt": [5]})) for _ in range(3)]
            bad = [threads.submit(raw, url, post({**body, "prompt": [60]})) for _ in range(3)]
            assert {one.result()[0] for one in bad} == {500}
            assert "not finite" in bad[0].result()[1]["error"]["message"]
            answers = [one.result() for one in good]
        if 60 not in expected:
            assert all(one[1]["choices"][0]["token_ids"] == expected for one in answers)
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
            worker.between_steps(lambda: 1 // 0)
        assert_well(url, model)
        assert worker.failure is None and worker.load == (0, 0)
    assert "CUDA out of memory" in capfd.readouterr().err


def test_a_fault_beside_the_engine_is_500(model, monkeypatch, capfd):
    monkeypatch.setattr(threading, "excepthook", lambda told: print(told.exc_value))
    with serving(model) as (url, worker):
        monkeypatch.setattr(worker, "submit", lambda *_: 1 // 0)
        status, answer = raw(url, post(OK))
    assert status == 500 and "fault" in answer["error"]["message"]
    assert "division" in capfd.readouterr().out


MEETING = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}
CONTROL = [
    ("/pause", {}),
    ("/flush_cache", {}),
    ("/weight_checker", {"action": "checksum"}),
    ("/update_weights_from_disk", {"model_path": "/nowhere"}),
    ("/init_weights_update_group", MEETING),
    ("/update_weights_from_distributed", {"names": ["x"], "dtypes": ["float32"], "shapes": [[1]]}),
]


@pytest.mark.parametrize("path, body", CONTROL)
def test_control_needs_the_key_and_no_browser(keyed, model, path, body):
    assert ask(keyed.url, path, body, Authorization="")[0] == 401
    assert ask(keyed.url, path, body, Authorization="Bearer secre")[0] == 401
    assert ask(keyed.url, path, body, Authorization="secret")[0] == 401
    assert ask(keyed.url, path, body, Origin="http://localhost:8000")[0] == 403
    assert ask(keyed.url, path, json.dumps(body).encode(), **{"Content-Type": "text/plain"})[0] == 415
    assert ask(keyed.url, path, {**body, "surprise": 1})[0] == 400
    assert ask(keyed.url, "/health")[1]["status"] == "ok"


def test_control_is_not_there_unless_asked_for(model):
    with serving(model, key="secret") as (url, _):
        for path, body in CONTROL:
            status, answer = ask(url, path, body)
            assert status == 404 and "--control" in answer["error"]["message"]
            assert ask(url, path, body, Authorization="")[0] == 401
        with pytest.raises(UserError, match="--control"):
            client = HttpEngine([url], timeout=5, retries=0, api_key_file=key_file(model.parent))
            client.update_from_directory(model, 1)


@pytest.mark.parametrize("kind", ["..", "link", "elsewhere", "a file"])
def test_weights_come_from_below_the_directory_alone(keyed, root, kind, tmp_path):
    outside = make_model(tmp_path, 5)
    (outside / "STABLE").touch()
    path = {"..": f"{root}/../{tmp_path.name}/model", "elsewhere": str(outside), "a file": str(root / "key")}.get(kind)
    if kind == "link":
        path = str(root / f"link-{tmp_path.name}")
        os.symlink(outside, path)
    status, answer = ask(keyed.url, "/update_weights_from_disk", {"model_path": path})
    assert status == (404 if kind == "a file" else 403), answer
    assert ask(keyed.url, "/health")[1]["weight_version"] == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"master_port": 70000}, {"master_port": "1"}, {"rank_offset": 0}, {"rank_offset": 2}, {"world_size": 2**40},
        {"master_address": 5}, {"master_address": None}, {"backend": "mpi"}, {"group_name": 1},
    ],
)  # fmt: skip
def test_a_group_is_met_with_sound_fields_alone(keyed, changes):
    status, answer = ask(keyed.url, "/init_weights_update_group", {**MEETING, **changes})
    assert status == 400, answer


@pytest.mark.parametrize(
    "changes",
    [{"names": "x"}, {"names": [1]}, {"shapes": [[-1]]}, {"shapes": [["1"]]}, {"shapes": [[True]]},
     {"dtypes": ["int8"]}, {"weight_version": "9" * 5000}, {"weight_version": -1}, {"weight_version": True},
     {"mode": []}, {"names": ["model.norm.weight"] * 2, "dtypes": ["float32"] * 2, "shapes": [[32]] * 2}],
)  # fmt: skip
def test_a_bucket_has_sound_fields_alone(keyed, changes):
    body = {"names": ["model.norm.weight"], "dtypes": ["float32"], "shapes": [[32]], **changes}
    status, answer = ask(keyed.url, "/update_weights_from_distributed", body)
    assert status == 400, answer
    assert ask(keyed.url, "/health")[1]["status"] == "ok"


def resident(process):
    """MB of a process in memory."""
    status = open(f"/proc/{process.process.pid}/status").read()
    return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024


@pytest.mark.parametrize("key, status", [(None, 401), ("secret", 413)])
def test_large_bodies_take_no_memory(keyed, model, key, status):
    """40 connections that send 60 MB each: refused by their heads."""
    ask(keyed.url, "/v1/completions", GREEDY)
    before, highest = resident(keyed), [0.0]
    head = post(b"", *([f"Authorization: Bearer {key}"] if key else []), length=60_000_000)
    over = threading.Event()

    def watch():
        while not over.wait(0.02):
            highest[0] = max(highest[0], resident(keyed))

    watching = threading.Thread(target=watch)
    watching.start()
    with ThreadPoolExecutor(40) as threads:
        answers = list(threads.map(lambda _: raw(keyed.url, head + bytes(20_000_000), 60)[0], range(40)))
    over.set()
    watching.join()
    assert answers == [status] * 40
    assert highest[0] - before < 100
    assert_well(keyed.url, model, "Authorization: Bearer secret")


def test_bodies_under_way_are_bounded_together(model):
    with serving(model, limits=Limits(bodies=2000)) as (url, _):
        with socket.create_connection((urlsplit(url).hostname, urlsplit(url).port), 10) as slow:
            slow.sendall(post(b"{", length=1500))
            time.sleep(0.2)
            status, answer = raw(url, post({**OK, "user": "x" * 1000}))
            assert status == 503 and "reading" in answer["error"]["message"]
            assert_well(url, model)
        time.sleep(0.2)
        assert raw(url, post({**OK, "user": "x" * 1000}))[0] == 200


SLOW = Limits(head_seconds=0.6, body_seconds=0.6, idle_seconds=0.6)


@pytest.mark.parametrize("start", [b"GET /health HTTP/1.1\r\nX-", b"", post(b'{"a": "', length=5000)])
def test_a_slow_client_meets_its_deadline(model, start):
    """A byte now and then does not move the deadline."""
    with serving(model, limits=SLOW) as (url, _):
        begun = time.monotonic()
        with socket.create_connection((urlsplit(url).hostname, urlsplit(url).port), 10) as sock:
            answer = b""
            sock.sendall(start)
            sock.settimeout(0.1)
            with suppress(ConnectionResetError, BrokenPipeError):
                while time.monotonic() < begun + 8:
                    if start:
                        sock.sendall(b"a")
                    with suppress(TimeoutError):
                        part = sock.recv(1 << 16)
                        answer += part
                        if not part:
                            break
        assert time.monotonic() - begun < 5
        assert answer.startswith(b"HTTP/1.1 408 ") if start else answer == b""
        assert_well(url, model)


def test_connections_are_bounded_and_told(model):
    with serving(model, limits=Limits(connections=3, head_seconds=1.5)) as (url, _):
        held = [socket.create_connection((urlsplit(url).hostname, urlsplit(url).port), 10) for _ in range(3)]
        wait_until(lambda: raw(url, GET.encode() + b"\r\n")[0] == 503)
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=10)
        connection.request("GET", "/health")
        answer = connection.getresponse()
        assert answer.status == 503 and answer.headers["Retry-After"] and b"connections" in answer.read()
        for sock in held[:2]:
            sock.close()
        wait_until(lambda: raw(url, GET.encode() + b"\r\n")[0] == 200)
        held[2].close()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "0", "192.0.2.1", "::ffff:0.0.0.0"])
def test_a_public_address_needs_a_key(model, capsys, host):
    assert main(["serve", str(model), "--host", host, "--port", "0", "--device", "cpu"]) == 1
    error = capsys.readouterr().err
    assert "--api-key-file" in error or "no such address" in error


@pytest.mark.parametrize(
    "options, words",
    [
        (["--control", "."], "--api-key-file"),
        (["--control", "/nowhere", "--api-key-file", "key"], "no such directory"),
        (["--host", "no.such.host.invalid"], "no such address"),
        (["--host", ""], "no such address"),
        (["--port", "99999"], "99999"),
        (["--host", "a" * 300], "no such address"),
    ],
)
def test_starts_that_are_refused(model, capsys, options, words, monkeypatch):
    key_file(model.parent)
    monkeypatch.chdir(model.parent)
    assert main(["serve", str(model), "--device", "cpu", *options]) == 1
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "two words", "two\nlines", "schlüssel", "a\0b"])
def test_a_key_is_one_word_of_plain_signs(tmp_path, content):
    (tmp_path / "key").write_text(content)
    with pytest.raises(UserError, match="one line"):
        read_key(tmp_path / "key")


def test_the_key_is_in_no_command_line(keyed):
    command = open(f"/proc/{keyed.process.pid}/cmdline").read()
    assert "secret" not in command and KEY["Authorization"].split()[1] == "secret"
