"""Masks of the trained tokens, worked out by hand, for every template and every kind of row."""

import pytest
from tokenizers import normalizers
from transformers import PreTrainedTokenizerFast

from dtrain.base.errors import UserError
from dtrain.data.formats.encoder import NO_TRAINED_TOKEN, NO_TRAINED_TOKEN_LEFT, TOO_LONG, Encoder
from dtrain.data.formats.formats import normalise
from dtrain.data.sources.files import Chunk
from dtrain.data.text.template import choose_template
from dtrain.data.text.tokenizer import Tokenizer
from tests.data import templates
from tests.data.makers import byte_level, metaspace, save

ASK = {"role": "user", "content": " Who? "}


def say(content, **more):
    return {"role": "assistant", "content": content, **more}


def encoder(directory, template=None, make=byte_level, variables=None, **options):
    save(directory, make(), template)
    tokenizer = Tokenizer.from_directory(directory)
    chosen = choose_template(directory, tokenizer, None, variables)
    return Encoder(tokenizer, chosen, **{"max_length": 4096, **options})


def trained(coder, row, name="messages"):
    """The text of each trained stretch of tokens."""
    ids, mask = coder.encode(normalise(row, name))
    assert len(ids) == len(mask)
    stretches, last = [], 0
    for token, inside in zip(ids, mask, strict=True):
        if inside and not last:
            stretches.append([])
        if inside:
            stretches[-1].append(token)
        last = inside
    return [coder.tokenizer.decode(stretch) for stretch in stretches]


CALLS = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}] * 2
PLAIN = [ASK, say(" Me.\n"), ASK, say("Still me, 東京 🙂!")]
THINK = [ASK, say("<think>\nold\n</think>\n\nMe."), ASK, say("<think>\nnew\n</think>\n\nStill.")]
EMPTY = "<think>\n\n</think>\n\n"
OPENED = [say("Hi."), ASK, say("Me.")]
EXPECTED = [
    ("HEADER_AFTER_USER", {}, OPENED, ["Hi.<|eot_id|>", "Me.<|eot_id|>"]),
    ("HEADER_AFTER_USER", {}, [{"role": "system", "content": "Hi"}, *OPENED], ["Hi.<|eot_id|>", "Me.<|eot_id|>"]),
    ("DEFAULT_IN_LOOP", {}, OPENED, ["Hi.[/]", "Me.[/]"]),
    ("DEFAULT_IN_LOOP", {}, OPENED[:1], ["Hi.[/]"]),
    ("QWEN3", {}, OPENED, ["Hi.<|im_end|>", EMPTY + "Me.<|im_end|>"]),
    ("LLAMA3", {}, PLAIN, ["Me.<|eot_id|>", "Still me, 東京 🙂!<|eot_id|>"]),
    ("QWEN25", {}, PLAIN, [" Me.\n<|im_end|>", "Still me, 東京 🙂!<|im_end|>"]),
    ("GEMMA3", {}, PLAIN, ["Me.<end_of_turn>", "Still me, 東京 🙂!<end_of_turn>"]),
    ("BY_INDEX", {}, PLAIN, [" Me.\n<|im_end|>", "Still me, 東京 🙂!<|im_end|>"]),
    ("GENERATION", {}, PLAIN, [" Me.\n", "Still me, 東京 🙂!"]),
    ("LLAMA2", {}, PLAIN, ["  Me.\n <|eot_id|>", " Still me, 東京 🙂! <|eot_id|>"]),
    # Earlier thinking is gone from the conversation; the last turn's is written by the model.
    ("QWEN3", {}, THINK, ["Me.<|im_end|>", "<think>\nnew\n</think>\n\nStill.<|im_end|>"]),
    ("QWEN3", {}, PLAIN, [" Me.\n<|im_end|>", EMPTY + "Still me, 東京 🙂!<|im_end|>"]),
    # The channel is the model's own to name; the prompt ends before it.
    (
        "CHANNELS",
        {},
        [ASK, say("Me."), ASK, say("Still.", thinking="hm")],
        [
            "<|channel|>final<|message|>Me.<|end|>",
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Still.<|return|>",
        ],
    ),
    (
        "OLMO3",
        {},
        [ASK, say("Let me see.", tool_calls=CALLS), {"role": "tool", "content": "2"}, say("Two."), ASK, say("2.")],
        ["Let me see.<function_calls>add(a=1)\nadd(a=1)</function_calls><|im_end|>", "Two.<|im_end|>", "2.<|eot_id|>"],
    ),
    # An empty thinking block in the prompt is not trained; thinking that stands there all the same is.
    ("QWEN3", {"enable_thinking": False}, PLAIN, [" Me.\n<|im_end|>", "Still me, 東京 🙂!<|im_end|>"]),
    ("QWEN3", {"enable_thinking": False}, THINK, ["Me.<|im_end|>", "<think>\nnew\n</think>\n\nStill.<|im_end|>"]),
]


@pytest.mark.trap(
    "without generation marks the assistant mask is all zeros",
    "marin-community/marin #7237",
    "nothing is trained and nothing is said",
    "the turns are found in templates without marks",
)
@pytest.mark.parametrize("family, variables, chat, expected", EXPECTED)
def test_assistant_turns(tmp_path, family, variables, chat, expected):
    coder = encoder(tmp_path, getattr(templates, family), variables=variables)
    assert trained(coder, {"messages": chat}) == expected


@pytest.mark.trap(
    "BOS written twice, by the template and by the tokenizer",
    "sgl-project/sglang PR#888",
    "every prompt begins as no training text did",
    "one BOS; ids are those of transformers' apply_chat_template",
)
@pytest.mark.parametrize("family", ["LLAMA3", "QWEN25", "QWEN3", "GEMMA3"])
@pytest.mark.parametrize("make", [byte_level, metaspace, lambda: byte_level(normalizer=normalizers.NFC())])
def test_ids_equal_transformers_and_begin_with_one_bos(tmp_path, family, make):
    coder = encoder(tmp_path, getattr(templates, family), make)
    ids, mask = coder.encode(normalise({"messages": PLAIN}, "messages"))
    oracle = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert ids == oracle.apply_chat_template(PLAIN, return_dict=False)
    assert ids.count(coder.tokenizer.bos_id) == (family in ("LLAMA3", "GEMMA3"))
    end = {"LLAMA3": "<|eot_id|>", "GEMMA3": "<end_of_turn>"}.get(family, "<|im_end|>")
    ending = coder.tokenizer.encode(end)[0]
    assert sum(token == ending and inside for token, inside in zip(ids, mask, strict=True)) == 2


def test_generation_mask_equals_transformers(tmp_path):
    coder = encoder(tmp_path, templates.GENERATION)
    chat = [ASK, say("Me, 東京!"), ASK, say("Still me.\n")]  # a space in front is more than transformers' mask can take
    ids, mask = coder.encode(normalise({"messages": chat}, "messages"))
    oracle = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    out = oracle.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
    assert (ids, list(mask)) == (out["input_ids"], out["assistant_masks"])


TURNS = [ASK, say("one"), ASK, say("two"), {"role": "tool", "content": "7"}, say("three")]
EOT = "<|im_end|>"


@pytest.mark.parametrize("loss_on, expected", [
    ("assistant", ["one" + EOT, "two" + EOT, "three" + EOT]),
    ("completion", ["two" + EOT, "three" + EOT]),
    ("last", ["three" + EOT]),
])  # fmt: skip
def test_loss_on(tmp_path, loss_on, expected):
    assert trained(encoder(tmp_path, templates.QWEN25, loss_on=loss_on), {"messages": TURNS}) == expected


def test_loss_on_all_and_messages_that_are_not_trained(tmp_path):
    coder = encoder(tmp_path, templates.QWEN25, loss_on="all")
    whole = coder.template.render(TURNS)
    assert trained(coder, {"messages": TURNS}) == [whole]
    shut = [*TURNS[:3], {**TURNS[3], "train": False}, *TURNS[4:]]
    before, after = whole.split("<|im_start|>assistant\ntwo<|im_end|>\n")
    assert trained(coder, {"messages": shut}) == [before, after]
    assert trained(encoder(tmp_path, templates.QWEN25), {"messages": shut}) == ["one" + EOT, "three" + EOT]
    assert trained(encoder(tmp_path, templates.QWEN25, loss_on="last"), {"messages": shut}) == ["three" + EOT]


def test_header_without_content_is_not_trained(tmp_path):
    assert trained(encoder(tmp_path, templates.QWEN25), {"messages": [ASK, say("")]}) == [EOT]


@pytest.mark.parametrize("arguments", [{"q": "ü"}, '{"q": "ü"}'])
def test_tool_calls(tmp_path, arguments):
    """Arguments come as an object, or as OpenAI's files have them, as a string of JSON."""
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    row = {"messages": [ASK, say(None, tool_calls=[call]), {"role": "tool", "content": "7"}, say("Seven.")]}
    row["tools"] = [{"type": "function", "function": {"name": "f"}}]
    qwen = trained(encoder(tmp_path / "q", templates.QWEN25), row)
    assert qwen == ['<tool_call>\n{"name": "f", "arguments": {"q": "ü"}}\n</tool_call>' + EOT, "Seven." + EOT]
    llama = trained(encoder(tmp_path / "l", templates.LLAMA3), row)
    assert llama == ['{"name": "f", "parameters": {"q": "ü"}}<|eot_id|>', "Seven.<|eot_id|>"]


def test_strings(tmp_path):
    row = {"prompt": "two and two is", "completion": " four"}
    coder = encoder(tmp_path)
    ids, mask = coder.encode(normalise(row, "prompt_completion"))
    whole = coder.tokenizer.encode("two and two is four", add_special_tokens=True)
    assert ids == [*whole, coder.tokenizer.eos_id] and ids[0] == coder.tokenizer.bos_id
    assert trained(coder, row, "prompt_completion") == [" four<|eot_id|>"]
    everything = [coder.tokenizer.decode(whole[1:]) + "<|eot_id|>"]
    assert trained(encoder(tmp_path, loss_on="all"), row, "prompt_completion") == everything
    assert trained(coder, {"text": "two and two is four"}, "text") == everything
    own = coder.encode(normalise({"text": "<|begin_of_text|>two and two is four<|eot_id|>"}, "text"))[0]
    assert own == ids  # neither is doubled


def test_a_token_of_prompt_and_completion_is_trained(tmp_path):
    coder = encoder(tmp_path)
    row = {"prompt": "two and tw", "completion": "o"}
    assert trained(coder, row, "prompt_completion") == [" two<|eot_id|>"]


def test_strings_of_a_metaspace_tokenizer(tmp_path):
    coder = encoder(tmp_path, make=metaspace)
    ids, mask = coder.encode(normalise({"prompt": "the lazy dog", "completion": " says two"}, "prompt_completion"))
    assert ids[:-1] == coder.tokenizer.encode("the lazy dog says two", add_special_tokens=True)
    first = mask.index(1)
    assert coder.tokenizer.decode(ids[1:first]) == "the lazy dog" and mask[first:] == b"\1" * (len(ids) - first)


def test_prompt_and_completion_as_messages(tmp_path):
    row = {"prompt": TURNS[:3], "completion": TURNS[3:]}
    assert trained(encoder(tmp_path, templates.QWEN25), row, "prompt_completion") == ["two" + EOT, "three" + EOT]
    last = encoder(tmp_path, templates.QWEN25, loss_on="last")
    assert trained(last, row, "prompt_completion") == ["three" + EOT]


def test_tokenized_rows_are_used_as_they_are(tmp_path):
    coder = encoder(tmp_path)
    assert coder.encode(normalise({"input_ids": [9, 8, 7], "labels": [-100, -100, 7]}, "tokenized")) == (
        [9, 8, 7],
        bytearray([0, 0, 1]),
    )
    with pytest.raises(UserError, match="the id 420, beyond the model's vocabulary of 420"):
        coder.encode(normalise({"input_ids": [420]}, "tokenized"))


def chunk(*rows):
    return Chunk("f.jsonl", list(enumerate(rows, start=1)), 0)


def test_too_long(tmp_path):
    rows = [{"input_ids": [1] * 4}, {"input_ids": list(range(10))}, {"input_ids": [1] * 9, "labels": [-100] * 8 + [1]}]
    cut = encoder(tmp_path, max_length=4).encode_chunk(chunk(*rows), "tokenized")
    assert list(cut.tokens) == [1, 1, 1, 1, 0, 1, 2, 3] and cut.lengths == [4, 4] and cut.full_lengths == [4, 10]
    assert cut.left_out == [(3, NO_TRAINED_TOKEN_LEFT)] and cut.lines == [1, 2] and cut.rows == 3
    dropped = encoder(tmp_path, max_length=4, too_long="drop").encode_chunk(chunk(*rows), "tokenized")
    assert dropped.lengths == [4] and dropped.left_out == [(2, TOO_LONG), (3, TOO_LONG)]
    with pytest.raises(UserError, match=r"f\.jsonl:2: the row has 10 tokens and data.max_length is 4"):
        encoder(tmp_path, max_length=4, too_long="error").encode_chunk(chunk(*rows), "tokenized")


@pytest.mark.trap(
    "rows cut before their answer count as trained",
    "Liquid4All/liquid-finetune PR#37",
    "a run that trains nothing looks sound",
    "they are left out and told",
)
def test_rows_without_a_trained_token_are_left_out(tmp_path):
    coder = encoder(tmp_path, templates.QWEN25)
    rows = [{"messages": [ASK]}, {"messages": [ASK, say("x", train=False)]}, {"messages": [ASK, say("x")]}]
    result = coder.encode_chunk(chunk(*rows), "messages")
    assert result.left_out == [(1, NO_TRAINED_TOKEN), (2, NO_TRAINED_TOKEN)] and result.lines == [3]
    # The first token has nothing to be predicted from.
    first = coder.encode_chunk(chunk({"input_ids": [5, 6], "labels": [5, -100]}), "tokenized")
    assert first.left_out == [(1, NO_TRAINED_TOKEN)]


def test_errors_name_file_and_line(tmp_path):
    coder = encoder(tmp_path, templates.GEMMA3)
    with pytest.raises(UserError, match=r"f\.jsonl:2: the chat template, .*must alternate"):
        coder.encode_chunk(chunk({"messages": PLAIN}, {"messages": [ASK, ASK]}), "messages")
    with pytest.raises(
        UserError, match=r"must alternate.*begins with an assistant message.*put a user message in front"
    ):
        coder.encode_chunk(chunk({"messages": OPENED}), "messages")
    with pytest.raises(UserError, match=r"f\.jsonl:1: the source's format is messages.*alpaca"):
        coder.encode_chunk(chunk({"instruction": "a", "output": "b"}), "messages")
    with pytest.raises(UserError, match=r"f\.jsonl:1: .*no chat template.*data.chat_template"):
        encoder(tmp_path / "bare").encode_chunk(chunk({"messages": PLAIN}), "messages")
    with pytest.raises(UserError, match="names no EOS token"):
        save(tmp_path / "no_eos", byte_level(), eos_token=None)
        Encoder(Tokenizer.from_directory(tmp_path / "no_eos"), None, max_length=9).encode_chunk(
            chunk({"text": "a"}), "text"
        )


MERGED = """\
{% for message in messages %}{% if message.role == 'user' %}<|im_start|>{{ message.content }}<|im_end|>{% endif %}\
{% if message.role == 'assistant' %}<|im_start|>{% for m in messages %}{% if m.role != 'user' %}{{ m.content }}\
{% endif %}{% endfor %}<|im_end|>{% endif %}{% endfor %}"""
INNER = """\
{% for message in messages %}{% if message.role == 'user' %}<|im_start|>{{ message.content }}<|im_end|>{% endif %}\
{% if message.role == 'assistant' %}<|im_start|>a:{{ message.content }}{% for m in messages %}{% if m.role == 'tool' %}\
{{ m.content }}{% endif %}{% endfor %}<|im_end|>{% endif %}{% endfor %}"""
REVERSED = """\
{% for i in range(messages | length) %}{{ messages[messages | length - 1 - i].content }}<|im_end|>{% endfor %}"""
TWO_HEADERS = """\
{% for message in messages %}{% if message.content == 'dtrain replies' %}<|im_start|>a: {% else %}b: {% endif %}\
{{ message.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}c: {% endif %}"""


@pytest.mark.trap(
    "without generation marks the assistant mask is all ones",
    "NVIDIA-NeMo/Megatron-Bridge #3359",
    "the prompts are trained too",
    "a template whose turns cannot be told apart is refused",
)
@pytest.mark.parametrize("template", [MERGED, INNER, REVERSED, TWO_HEADERS])
def test_what_cannot_be_told_is_refused(tmp_path, template):
    coder = encoder(tmp_path, template)
    with pytest.raises(UserError, match=r"messages\[1\]: dtrain cannot tell .*generation.*data.loss_on=all"):
        coder.encode(normalise({"messages": [*PLAIN[:2], {"role": "tool", "content": "7"}]}, "messages"))
    everything = encoder(tmp_path, template, loss_on="all")
    assert len(trained(everything, {"messages": PLAIN})) == 1


@pytest.mark.trap(
    "the end of the turn is not trained",
    "meta-pytorch/torchtune #949",
    "the model does not learn to stop",
    "the end of turn is trained wherever the template writes it",
)
def test_end_of_turn_behind_the_turn(tmp_path):
    """Some templates write it in front of the next turn, or at the end of the whole."""
    template = (
        "{% for m in messages %}{% if not loop.first and m.role == 'user' %}{{ eos_token }}{% endif %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}{{ eos_token }}{% endif %}"
    )
    coder = encoder(tmp_path, template)
    assert trained(coder, {"messages": [ASK, say("one"), ASK, say("two")]}) == ["one<|eot_id|>", "two<|eot_id|>"]
