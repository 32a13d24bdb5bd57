"""Requests that `dtrain serve` refuses: each is answered, and a good one after it gives the same tokens."""

import gzip
import http.client
import json
from contextlib import suppress
from urllib.parse import urlsplit

import pytest

from dtrain.commands.serve.protocol import CHAT, COMPLETION, ApiError, Field, check
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
    "top_p of 0": {**OK, "top_p": 0},
    "top_p of 2": {**OK, "top_p": 2},
    "min_p below 0": {**OK, "min_p": -0.1},
    "a penalty": {**OK, "frequency_penalty": 0.1},
    "a penalty that is false": {**OK, "frequency_penalty": False},
    "a logit bias": {**OK, "logit_bias": {"5": 100}},
    "logprobs of 2**70": {**OK, "logprobs": 2**70},
    "a very deep body": DEEP,
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


JSON = {"Content-Type": "application/json"}
BODY = json.dumps(OK)
# name: method, path, headers, body, status
REQUESTS = {
    "another Host": ("GET", "/health", {"Host": "evil.example"}, None, 400),
    "another Host with a port": ("GET", "/health", {"Host": "evil.example:8000"}, None, 400),
    "a Host that only begins well": ("GET", "/health", {"Host": "localhost.evil.example"}, None, 400),
    "a Host with a name": ("GET", "/health", {"Host": "localhost:1@evil.example"}, None, 400),
    "dots in the path": ("GET", "/../../etc/passwd", {}, None, 404),
    "another path": ("GET", "/admin", {}, None, 404),
    "PUT": ("PUT", "/health", {}, None, 405),
    "DELETE": ("DELETE", "/v1/models", {}, None, 405),
    "GET for POST": ("GET", "/v1/completions", {}, None, 405),
    "no Content-Type": ("POST", "/v1/completions", {}, BODY, 415),
    "text/plain": ("POST", "/v1/completions", {"Content-Type": "text/plain"}, BODY, 415),
    "a form": ("POST", "/v1/completions", {"Content-Type": "application/x-www-form-urlencoded"}, BODY, 415),
    "another encoding": ("POST", "/v1/completions", {**JSON, "Content-Encoding": "gzip"}, gzip.compress(b"{}"), 400),
    "40 MB": ("POST", "/v1/completions", JSON, b"x" * 40_000_000, 413),
    "40 MB in chunks": ("POST", "/v1/completions", JSON, iter([b"x" * 1_000_000] * 40), 413),
    "a weight route": ("POST", "/update_weights_from_disk", JSON, '{"model_path": "/"}', 404),
    "pause": ("POST", "/pause", JSON, "{}", 404),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_that_is_not_served_is_refused(open_server, model, name):
    method, path, headers, body, status = REQUESTS[name]
    connection = http.client.HTTPConnection(urlsplit(open_server).netloc, timeout=30)
    with suppress(BrokenPipeError, ConnectionResetError):  # the server may refuse before all is sent
        connection.request(method, path, body, headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    assert answer.status == status
    if "Host" not in headers:  # which starlette's middleware refuses as text
        assert json.loads(text)["error"]["code"] == status
    assert_well(open_server, model)


def test_pages_of_other_origins_get_no_permission(open_server):
    """A browser asks before it sends JSON to another origin, and shows no answer without these headers."""
    origin = {"Origin": "http://evil.example"}
    asks = {**origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    for method, headers, body, status in (("OPTIONS", asks, None, 405), ("POST", {**JSON, **origin}, BODY, 200)):
        connection = http.client.HTTPConnection(urlsplit(open_server).netloc, timeout=30)
        connection.request(method, "/v1/completions", body, headers)
        answer = connection.getresponse()
        assert answer.status == status
        assert not [name for name in answer.headers if name.lower().startswith("access-control")]
        connection.close()


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
        assert str(caught.value).endswith(f"{wrong} is not a field that dtrain serve knows{hint}")


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
