"""`continue_final_message`: the prompts of transformers, for templates that strip messages and those that do not."""

import pytest
from transformers import PreTrainedTokenizerFast

from dtrain.commands.serve.protocol import ApiError, Parser
from dtrain.data.formats.prompts import PromptEncoder, PromptOptions
from dtrain.data.text.template import choose_template
from dtrain.data.text.tokenizer import Tokenizer
from dtrain.inference.chats import ChatEncoder
from tests.data import templates
from tests.data.makers import byte_level, save

ASK = {"role": "user", "content": "Who?"}
CALL = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def parser_of(directory, family):
    save(directory, byte_level(), getattr(templates, family))
    tokenizer = Tokenizer.from_directory(directory)
    template = choose_template(directory, tokenizer)
    encoder = PromptEncoder(tokenizer, template, max_length=4096, options=PromptOptions(4096))
    return Parser(ChatEncoder(encoder), "model", 4096)


@pytest.mark.parametrize("family", ["LLAMA3", "QWEN25", "GEMMA3", "QWEN3", "ONLY_PARTS"])
@pytest.mark.parametrize("said", ["It was", " It was ", "end", [{"type": "text", "text": "It was "}]], ids=str)
def test_prompts_are_those_of_transformers(tmp_path, family, said):
    """ "end" is also a part of the text that templates write after a message."""
    parser, oracle = parser_of(tmp_path, family), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    messages = [ASK, {"role": "assistant", "content": said}]
    (request,) = parser.chat({"messages": messages, "continue_final_message": True, "max_tokens": 1}).requests
    parts = [{"type": "text", "text": said}] if isinstance(said, str) else said
    shown = messages
    if family == "ONLY_PARTS":
        ask = {"role": "user", "content": [{"type": "text", "text": "Who?"}]}
        shown = [ask, {"role": "assistant", "content": parts}]
    elif not isinstance(said, str):
        shown = [ASK, {"role": "assistant", "content": parts[0]["text"]}]
    expected = oracle.apply_chat_template(shown, continue_final_message=True, return_dict=False)
    assert list(request.prompt) == expected


@pytest.mark.parametrize(
    ("messages", "fields", "words"),
    [
        ([ASK], {}, "must be the assistant's"),
        ([ASK, {"role": "assistant", "content": "It"}], {"add_generation_prompt": True}, "add_generation_prompt=True"),
        ([ASK], {"add_generation_prompt": False, "continue_final_message": False}, "add_generation_prompt=False"),
        ([ASK, {"role": "assistant", "content": None}], {}, "no content"),
        ([ASK, {"role": "assistant", "content": None, "tool_calls": [CALL]}], {}, "no text that could be continued"),
    ],
)
def test_what_cannot_be_continued_is_refused(tmp_path, messages, fields, words):
    body = {"messages": messages, "continue_final_message": True, "max_tokens": 1, **fields}
    with pytest.raises(ApiError, match=words) as refusal:
        parser_of(tmp_path, "QWEN25").chat(body)
    assert refusal.value.status == 400
