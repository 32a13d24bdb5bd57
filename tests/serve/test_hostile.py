"""`dtrain serve` against strangers: each hostile request is answered, and a good one after it gives the same tokens."""

import json
import re
import socket
from urllib.parse import urlsplit

import pytest

from dtrain.commands.serve.fields import ApiError, Field, check, read_object
from dtrain.commands.serve.protocol import CHAT, COMPLETION
from tests.serve.serving import GREEDY, assert_well, make_model, naive_ids, post, raw, serving
from tests.tiny import VOCAB


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("hostile"), 1)


@pytest.fixture(scope="module")
def open_server(model):
    with serving(model) as (url, _):
        yield url


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
    """Bytes that follow on the same connection are not read as a request: the answer is the only one."""
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


@pytest.mark.parametrize("part", [b"GET /hea", b"GET /health HTTP/1.1\r\nHost: localhost\r\n", post(b"{", length=9)])
def test_a_request_that_breaks_off_is_told_so(open_server, part):
    with socket.create_connection((urlsplit(open_server).hostname, urlsplit(open_server).port), 10) as sock:
        sock.sendall(part)
        sock.shutdown(socket.SHUT_WR)
        answer = sock.recv(1 << 16)
    assert answer.startswith(b"HTTP/1.1 400 ") and b"Connection: close" in answer


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
    answer = {"role": "assistant", "content": "w9", "refusal": None, "annotations": [], "audio": None}
    messages = [
        {"role": "system", "content": "w5"},
        {"role": "user", "content": parts, "name": "n"},
        answer,
        {"role": "tool", "content": "w7", "tool_call_id": "c"},
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": True}}]
    body = {"messages": messages, "tools": tools, "tool_choice": "auto", "max_completion_tokens": 2, "logprobs": None,
            "parallel_tool_calls": True, "response_format": {"type": "text"}, "modalities": ["text"]}  # fmt: skip
    assert raw(open_server, post(body, path="/v1/chat/completions"))[0] == 200
    messages[2] = {**answer, "tool_calls": [call]}  # which this model's template would leave out
    status, refusal = raw(open_server, post(body, path="/v1/chat/completions"))
    assert status == 400 and "messages[2] has tool_calls" in str(refusal)


def test_an_unknown_field_is_told_the_nearest():
    for table, wrong, right in (
        (COMPLETION, "max_token", "max_tokens"),
        (COMPLETION, "Temperature", "temperature"),
        (CHAT, "max_completion_token", "max_completion_tokens"),
        (CHAT, "message", "messages"),
        (COMPLETION, "qqq", None),
    ):
        hint = f"; did you mean {right}?" if right else ""
        with pytest.raises(ApiError) as caught:
            check({wrong: 1}, table)
        assert str(caught.value).endswith(f"{wrong} is no field that dtrain serve knows{hint}")


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
