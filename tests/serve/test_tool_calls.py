"""Calls of tools in requests: as in training, whatever way a client writes their arguments."""

import pytest

from dtrain.commands.serve.protocol import ApiError, Parser
from dtrain.data.formats.prompts import PromptEncoder, PromptOptions
from dtrain.data.text.template import choose_template
from dtrain.data.text.tokenizer import Tokenizer
from dtrain.inference.chats import ChatEncoder
from tests.data import templates
from tests.data.makers import byte_level, save


def request(**function):
    call = {"id": "call00000", "type": "function", "function": {"name": "f", **function}}
    messages = [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call00000", "content": "no"},
    ]
    return {"messages": messages, "max_tokens": 1}


@pytest.fixture
def parser(tmp_path):
    save(tmp_path, byte_level(), templates.OWN_FORM)
    tokenizer = Tokenizer.from_directory(tmp_path)
    template = choose_template(tmp_path, tokenizer)
    encoder = PromptEncoder(tokenizer, template, max_length=4096, options=PromptOptions(4096))
    return Parser(ChatEncoder(encoder), "model", 4096)


def prompt_of(parser, body):
    (request,) = parser.chat(body).requests
    return parser.tokenizer.decode(list(request.prompt))


def test_arguments_may_be_an_object_a_text_or_nothing(parser):
    for arguments in ({"city": "Oslo"}, '{"city": "Oslo"}'):
        assert "<call>f{city:Oslo}</call><turn|>" in prompt_of(parser, request(arguments=arguments))
    for function in ({"arguments": {}}, {"arguments": ""}, {"arguments": None}, {}):
        assert "<call>f{}</call><turn|>" in prompt_of(parser, request(**function))


@pytest.mark.parametrize("arguments", ["{bad", "[1]", '"text"'])
def test_arguments_that_are_no_object_are_a_bad_request(parser, arguments):
    with pytest.raises(ApiError, match=r"messages\[1\].tool_calls\[0\].function.arguments") as refusal:
        parser.chat(request(arguments=arguments))
    assert refusal.value.status == 400
