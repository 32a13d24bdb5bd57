"""Calls of tools: every way to write their arguments gives the text that transformers gives for an object."""

import json

import pytest
from transformers import PreTrainedTokenizerFast

from dtrain.base.errors import UserError
from dtrain.data.formats.encoder import Encoder
from dtrain.data.formats.formats import normalise
from dtrain.data.formats.labels import LabelledEncoder
from dtrain.data.formats.pairs import PairEncoder
from dtrain.data.formats.prompts import PromptEncoder
from dtrain.data.sources.files import Chunk
from dtrain.data.text.template import choose_template
from dtrain.data.text.tokenizer import Tokenizer
from tests.data import templates
from tests.data.makers import byte_level, save
from tests.data.test_sample import trained

ABSENT = object()
CITY = {"city": "Oslo", "days": [1, {"ü": 'a "b"'}]}
WAYS = {
    "object": CITY,
    "text": json.dumps(CITY),
    "text without spaces": json.dumps(CITY, ensure_ascii=False, separators=(",", ":")),
}
EMPTY_WAYS = {"object": {}, "text": "{}", "empty": "", "spaces": " \n", "null": None, "null as text": "null"}
EMPTY_WAYS["absent"] = ABSENT
TOOLS = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}]
ASK = {"role": "user", "content": "Rain?"}
TOLD = {"role": "tool", "name": "f", "tool_call_id": "call00000", "content": "no"}
SAY = {"role": "assistant", "content": "No."}


def calling(arguments, content=ABSENT, count=1, **more):
    function = {"name": "f"} if arguments is ABSENT else {"name": "f", "arguments": arguments}
    calls = [{"type": "function", "id": f"call0000{number}", "function": function} for number in range(count)]
    message = {"role": "assistant", "tool_calls": calls, **more}
    return message if content is ABSENT else {**message, "content": content}


def encoder(directory, template, kind=Encoder, **options):
    save(directory, byte_level(), template)
    tokenizer = Tokenizer.from_directory(directory)
    return kind(tokenizer, choose_template(directory, tokenizer), max_length=4096, **options)


def text_of(coder, *messages):
    ids, _ = coder.encode(normalise({"messages": list(messages), "tools": TOOLS}, "messages"))
    return coder.tokenizer.decode(ids)


@pytest.mark.parametrize("family", ["QWEN25", "QWEN35", "LLAMA3", "MISTRAL", "OLMO3", "ANSWERS", "OWN_FORM"])
@pytest.mark.parametrize("ways", [WAYS, EMPTY_WAYS], ids=["arguments", "no arguments"])
def test_every_way_to_write_arguments_gives_the_ids_of_an_object(tmp_path, family, ways):
    coder = encoder(tmp_path, getattr(templates, family))
    oracle = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    row = [ASK, calling(ways["object"], content=""), TOLD, SAY]
    expected = oracle.apply_chat_template(row, tools=TOOLS, return_dict=False)
    for arguments in ways.values():
        messages = [ASK, calling(arguments, content=""), TOLD, SAY]
        ids, _ = coder.encode(normalise({"messages": messages, "tools": TOOLS}, "messages"))
        assert ids == expected, arguments


@pytest.mark.parametrize("content", [ABSENT, None, ""])
@pytest.mark.parametrize("arguments", WAYS.values(), ids=WAYS)
def test_a_template_that_joins_texts_gets_json_and_a_null_content(tmp_path, arguments, content):
    coder = encoder(tmp_path, templates.JOINED)
    written = '{"city": "Oslo", "days": [1, {"ü": "a \\"b\\""}]}'
    expected = f"<user>Rain?<A><calls>function<sep>f\n{written}\n</calls><E><told>no</told>No.<E>"
    assert text_of(coder, ASK, calling(arguments, content), TOLD, SAY) == expected


@pytest.mark.parametrize("family, expected", [
    ("JOINED", ['<calls>function<sep>f\n{"city": "Oslo"}\n</calls><E>', "No.<E>"]),
    ("LOOPED", ['<call>{"name": "f", "arguments": {"city": "Oslo"}}</call><|end|>', "No.\n<|end|>"]),
])  # fmt: skip
@pytest.mark.parametrize("content", [ABSENT, None, ""])
def test_a_call_without_text_is_trained(tmp_path, family, expected, content):
    coder = encoder(tmp_path, getattr(templates, family))
    messages = [ASK, calling('{"city": "Oslo"}', content), TOLD, SAY]
    assert trained(coder, {"messages": messages}) == expected


def test_a_template_that_prints_arguments_gets_json(tmp_path):
    coder = encoder(tmp_path, templates.PRINTED)
    expected = '<user>Rain?</><assistant><call>f {"city": "Oslo"}</call></>'
    for arguments in ({"city": "Oslo"}, '{"city":"Oslo"}'):
        assert text_of(coder, ASK, calling(arguments)) == expected


def test_a_call_may_be_the_function_by_itself(tmp_path):
    coder = encoder(tmp_path, templates.QWEN25)
    bare = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": '{"city": "Oslo"}'}]}
    assert text_of(coder, ASK, bare) == text_of(coder, ASK, calling({"city": "Oslo"}))


def test_pairs_labelled_replies_and_prompts_read_calls_alike(tmp_path):
    """With a template that writes a text as it is, so that a text which is passed on shows."""
    call, written = "<call>f{city:Oslo}</call>", '{"city": "Oslo"}'
    pairs = encoder(tmp_path / "pairs", templates.OWN_FORM, PairEncoder)
    row = {"prompt": [ASK, calling(written), TOLD], "chosen": [calling(written)], "rejected": [SAY]}
    chosen, rejected = pairs.encode_row(row, "preference")
    begin = f"<|turn>user\nRain?<turn|>\n<|turn>assistant\n{call}<turn|>\n<|turn>tool\nno<turn|>\n<|turn>assistant\n"
    assert pairs.tokenizer.decode(chosen.ids).endswith(f"{begin}{call}<turn|>")
    assert pairs.tokenizer.decode(rejected.ids).endswith(f"{begin}No.<turn|>")

    labelled = encoder(tmp_path / "kto", templates.OWN_FORM, LabelledEncoder)
    row = {"prompt": [ASK], "completion": [calling(written)], "label": True}
    (document,) = labelled.encode_row(row, "prompt_completion")
    assert call in labelled.tokenizer.decode(document.ids)

    prompts = encoder(tmp_path / "prompts", templates.OWN_FORM, PromptEncoder, options=None)
    (document,) = prompts.encode_row({"prompt": [ASK, calling(written), TOLD]}, "prompt_completion")
    assert prompts.tokenizer.decode(document.ids).endswith(begin)


@pytest.mark.parametrize("arguments, says", [
    ("{bad", r"messages\[1\].tool_calls\[0\].function.arguments is {bad, which cannot be read as JSON"),
    ("{'city': 'Oslo'}", "cannot be read as JSON"),
    ('{"a": 1, "a": 2}', "'a' is twice"),
    ("[1]", "must be an object of the arguments by name, or its JSON text, not a list"),
    ('"{}"', "not a string"),
    (7, "not a number"),
])  # fmt: skip
def test_arguments_that_are_no_object_are_refused_with_file_and_line(tmp_path, arguments, says):
    coder = encoder(tmp_path, templates.QWEN25)
    chunk = Chunk("calls.jsonl", [(17, {"messages": [ASK, calling(arguments)]})], 100)
    with pytest.raises(UserError, match=rf"calls.jsonl:17: .*{says}"):
        coder.encode_chunk(chunk, "messages")


@pytest.mark.parametrize("name", ["parameters", "args", "input"])
@pytest.mark.parametrize("is_bare", [True, False])
def test_arguments_under_another_name_are_no_call_without_arguments(name, is_bare):
    """Llama 3 writes parameters, LangChain args, Anthropic input."""
    function = {"name": "f", name: CITY}
    call = function if is_bare else {"type": "function", "function": function}
    message = {"role": "assistant", "tool_calls": [call]}
    with pytest.raises(UserError, match=rf"arguments is missing, and the call has {name}: rename that key"):
        normalise({"messages": [ASK, message, TOLD, SAY]}, "messages")
    function["arguments"] = CITY
    sample = normalise({"messages": [ASK, message, TOLD, SAY]}, "messages")
    assert sample.messages[1]["tool_calls"][0]["function"]["arguments"] == CITY


@pytest.mark.parametrize("family, message, says", [
    ("GEMMA3", calling(CITY), r"messages\[1\] has tool_calls, and the chat template, .* does not write them in full"),
    ("ONE_FORM", calling(CITY, content=""), "does not write them in full"),
    ("LLAMA2", calling(CITY), "does not write them in full"),
    ("PARTS", calling(CITY), "does not write them in full"),  # the names without arguments
    ("PRINTED", calling(CITY, count=2), r"messages\[1\] has 2 tool_calls, .* writes one call in a message"),
    ("JOINED", calling(CITY, content="So."), "has tool_calls and text, .* does not write its call next to text"),
])  # fmt: skip
def test_a_template_that_does_not_write_a_call_is_refused_in_words_of_ours(tmp_path, family, message, says):
    coder = encoder(tmp_path, getattr(templates, family))
    with pytest.raises(UserError, match=says) as refusal:
        coder.encode(normalise({"messages": [ASK, message, TOLD, SAY]}, "messages"))
    assert "refuses the conversation" not in str(refusal.value)
