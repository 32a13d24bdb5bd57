"""Pairs: where completions begin, what a limit leaves of them, and that a pair stays together in rows and batches."""

import pytest
from transformers import PreTrainedTokenizerFast

from dtrain.base.errors import UserError
from dtrain.data.formats.encoder import TOO_LONG
from dtrain.data.formats.pairs import SAME_TOKENS, SAME_TOKENS_CUT, PairEncoder, normalise_pair, truncate_pair
from dtrain.data.sources.files import Chunk
from dtrain.data.text.template import choose_template
from dtrain.data.text.tokenizer import Tokenizer
from tests.data import templates
from tests.data.makers import byte_level, metaspace, save

ASK = {"role": "user", "content": " Who? "}


def say(content, **more):
    return {"role": "assistant", "content": content, **more}


def encoder(directory, template=None, make=byte_level, variables=None, config=(), **options):
    save(directory, make(), template, **dict(config))
    tokenizer = Tokenizer.from_directory(directory)
    chosen = choose_template(directory, tokenizer, None, variables)
    return PairEncoder(tokenizer, chosen, **{"max_length": 4096, **options})


def parts(coder, row):
    """The text of the prompt and of both completions."""
    return [coder.tokenizer.decode(ids) for ids in coder.encode(normalise_pair(row, "preference"))]


PLAIN = {"prompt": [ASK], "chosen": [say("Me, 東京!")], "rejected": [say("You")]}
THINK = {
    "prompt": [ASK, say("<think>\nold\n</think>\n\nMe."), ASK],
    "chosen": [say("<think>\nnew\n</think>\n\nStill.")],
    "rejected": [say("No.")],
}
QWEN_ASK = "<|im_start|>user\n Who? <|im_end|>\n<|im_start|>assistant\n"
QWEN_SYSTEM = "<|im_start|>system\nYou are a helper.<|im_end|>\n"
GEMMA_ASK = "<|begin_of_text|><start_of_turn>user\nWho?<end_of_turn>\n<start_of_turn>model\n"
END, EMPTY = "<|im_end|>", "<think>\n\n</think>\n\n"
EXPECTED = [
    ("QWEN25", {}, PLAIN, [QWEN_SYSTEM + QWEN_ASK, "Me, 東京!" + END, "You" + END]),
    ("GEMMA3", {}, PLAIN, [GEMMA_ASK, "Me, 東京!<end_of_turn>", "You<end_of_turn>"]),
    ("BY_INDEX", {}, PLAIN, [QWEN_ASK, "Me, 東京!" + END, "You" + END]),
    ("LLAMA2", {}, PLAIN, ["<|begin_of_text|>[INST]  Who?  [/INST]", " Me, 東京! <|eot_id|>", " You <|eot_id|>"]),
    # The template writes an empty block into a reply without thinking, and not into the prompt.
    ("QWEN3", {}, PLAIN, [QWEN_ASK, EMPTY + "Me, 東京!" + END, EMPTY + "You" + END]),
    ("QWEN3", {}, THINK, [
        QWEN_ASK + "Me." + END + "\n" + QWEN_ASK, "<think>\nnew\n</think>\n\nStill." + END, EMPTY + "No." + END
    ]),
    # With thinking switched off the prompt holds the block; the prompt of the pair ends where a completion's own does.
    ("QWEN3", {"enable_thinking": False}, THINK, [
        QWEN_ASK + "Me." + END + "\n" + QWEN_ASK + "<think>\n", "new\n</think>\n\nStill." + END,
        "\n</think>\n\nNo." + END,
    ]),
]  # fmt: skip


@pytest.mark.trap(
    "the header of the answer counts as answer",
    "huggingface/trl PR#4201",
    "tokens that the template always writes are trained",
    "completions begin behind the generation prompt",
)
@pytest.mark.parametrize("family, variables, row, expected", EXPECTED)
def test_where_completions_begin(tmp_path, family, variables, row, expected):
    coder = encoder(tmp_path, getattr(templates, family), variables=variables)
    assert parts(coder, row) == expected
    implicit = {"chosen": row["prompt"] + row["chosen"], "rejected": row["prompt"] + row["rejected"]}
    assert parts(coder, implicit) == expected
    repeated = {**implicit, "prompt": row["prompt"]}
    assert parts(coder, repeated) == expected


@pytest.mark.parametrize("family", ["LLAMA3", "QWEN25", "QWEN3", "GEMMA3"])
@pytest.mark.parametrize("make", [byte_level, metaspace])
@pytest.mark.parametrize("row", [PLAIN, THINK], ids=["plain", "think"])
def test_ids_equal_transformers(tmp_path, family, make, row):
    """Both documents are transformers' ids through the end of the turn, and part at the common beginning."""
    coder = encoder(tmp_path, getattr(templates, family), make)
    oracle = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    asked = oracle.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
    chosen, rejected = (
        oracle.apply_chat_template(row["prompt"] + row[side], return_dict=False) for side in ("chosen", "rejected")
    )
    end = oracle.convert_tokens_to_ids({"LLAMA3": "<|eot_id|>", "GEMMA3": "<end_of_turn>"}.get(family, END))
    chosen, rejected = (ids[: len(ids) - ids[::-1].index(end)] for ids in (chosen, rejected))
    prompt, *completions = coder.encode(normalise_pair(row, "preference"))
    assert [prompt + completion for completion in completions] == [chosen, rejected]
    assert asked[: len(prompt)] == prompt
    longer = {tuple(ids[: len(prompt) + 1]) for ids in (asked, chosen, rejected)}
    assert len(longer) > 1  # a prompt longer by a token would not be common to the three


def test_tools(tmp_path):
    call = {"type": "function", "function": {"name": "f", "arguments": '{"q": "ü"}'}}
    row = {
        "prompt": [ASK],
        "chosen": [say(None, tool_calls=[call]), {"role": "tool", "content": "7"}, say("Seven.")],
        "rejected": [say("Six.")],
        "tools": [{"type": "function", "function": {"name": "f"}}],
    }
    prompt, chosen, rejected = parts(encoder(tmp_path, templates.QWEN25), row)
    assert '<tools>\n{"type": "function", "function": {"name": "f"}}\n</tools>' in prompt and prompt.endswith(QWEN_ASK)
    assert chosen.startswith('<tool_call>\n{"name": "f", "arguments": {"q": "ü"}}\n</tool_call>' + END)
    assert chosen.endswith("<|im_start|>assistant\nSeven." + END) and rejected == "Six." + END


BOS, EOS = "<|begin_of_text|>", "<|eot_id|>"


@pytest.mark.parametrize("row, expected", [
    ({"prompt": "two and two is", "chosen": " four", "rejected": " five"}, ["two and two is", " four", " five"]),
    # The prompt's last space merges with one completion, whichever it is, and so belongs to both.
    ({"prompt": "two and two is ", "chosen": "!", "rejected": "of"}, ["two and two is", " !", " of"]),
    ({"prompt": "two and two is ", "chosen": "of", "rejected": "!"}, ["two and two is", " of", " !"]),
    ({"chosen": "two and two is four", "rejected": "two and two is of"}, ["two and two is", " four", " of"]),
    ({"chosen": "two and", "rejected": "two and two"}, ["two and", "", " two"]),
    ({"prompt": "two", "chosen": "", "rejected": " and"}, ["two", "", " and"]),
    # A prompt of its own is not lengthened by what the completions begin with alike.
    ({"prompt": "two", "chosen": " and two", "rejected": " and of"}, ["two", " and two", " and of"]),
    ({"prompt": "", "chosen": "two", "rejected": "and"}, ["", "two", "and"]),
    ({"prompt": "<|begin_of_text|>two", "chosen": " and<|eot_id|>", "rejected": " of"}, ["two", " and", " of"]),
    # EOS belongs to a completion that begins with it, not to the prompt.
    ({"prompt": "two", "chosen": "<|eot_id|> and", "rejected": "<|eot_id|> of"},
     ["two", "<|eot_id|> and", "<|eot_id|> of"]),
    # One is the beginning of the other: each keeps a token.
    ({"chosen": "two<|eot_id|>", "rejected": "two<|eot_id|> and"}, ["two", "", "<|eot_id|> and"]),
])  # fmt: skip
def test_strings(tmp_path, row, expected):
    prompt, chosen, rejected = expected
    assert parts(encoder(tmp_path), row) == [BOS + prompt, chosen + EOS, rejected + EOS]


@pytest.mark.trap(
    "prompt and answer tokenized together merge at their border",
    "huggingface/trl #2054",
    "a token of the prompt is trained, or an answer lacks one",
    "the ids are those of the whole text, cut between prompt and answer",
)
def test_strings_of_a_metaspace_tokenizer(tmp_path):
    coder = encoder(tmp_path, make=metaspace)
    row = {"prompt": "the lazy dog", "chosen": " says two", "rejected": " stops"}
    prompt, chosen, rejected = coder.encode(normalise_pair(row, "preference"))
    for completion, text in ((chosen, "the lazy dog says two"), (rejected, "the lazy dog stops")):
        whole = coder.tokenizer.encode(text, add_special_tokens=True)
        assert [*prompt, *completion] == [*whole, coder.tokenizer.eos_id]


def test_a_prompt_without_a_token_is_refused(tmp_path):
    coder = encoder(tmp_path, make=lambda: byte_level(None))
    with pytest.raises(UserError, match=r"f\.jsonl:1: the prompt has no token"):
        coder.encode_chunk(chunk({"prompt": "", "chosen": "two", "rejected": "and"}), "preference")
    with pytest.raises(UserError, match=r"f\.jsonl:1: .*no chat template"):
        coder.encode_chunk(chunk(PLAIN), "preference")


def chunk(*rows):
    return Chunk("f.jsonl", list(enumerate(rows, start=1)), 0)


def tokenized(prompt, chosen, rejected):
    return {"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected}


@pytest.mark.trap(
    "the prompt of a pair is cut more than needed",
    "huggingface/trl PR#2209",
    "answers to questions that were cut away",
    "the longer completion says how much of the prompt goes",
)
@pytest.mark.parametrize("prompt, chosen, rejected, left", [
    (5, 5, 3, (5, 5, 3)),  # ten tokens fit
    (6, 5, 3, (5, 5, 3)),  # the longer completion says what goes
    (6, 3, 5, (5, 3, 5)),
    (20, 4, 4, (6, 4, 4)),
    (20, 9, 2, (1, 9, 2)),
    (20, 30, 2, (1, 9, 2)),  # one token of the prompt stays, then the completions are cut
    (1, 12, 15, (1, 9, 9)),
    (3, 8, 1, (2, 8, 1)),
])  # fmt: skip
def test_truncation(tmp_path, prompt, chosen, rejected, left):
    ids = [list(range(start, start + size)) for start, size in ((100, prompt), (200, chosen), (300, rejected))]
    found = truncate_pair(*ids, 10)
    assert tuple(map(len, found)) == left
    assert found[0] == ids[0][prompt - left[0] :] and found[1] == ids[1][: left[1]] and found[2] == ids[2][: left[2]]
    result = encoder(tmp_path, max_length=10).encode_chunk(chunk(tokenized(*ids)), "tokenized")
    assert result.lengths == [left[0] + left[1], left[0] + left[2]]
    assert result.full_lengths == [prompt + chosen, prompt + rejected] and result.lines == [1, 1]
    assert list(result.tokens) == [*found[0], *found[1], *found[0], *found[2]]
    masks = [flag for size in left[1:] for flag in [0] * left[0] + [1] * size]
    assert list(result.trained) == masks


def test_rows_left_out(tmp_path):
    rows = [tokenized([1], [2], [2]), tokenized([1], [2] * 9, [3] * 9), tokenized([1], [2, 2, 2, 3], [2, 2, 2, 4])]
    rows.append(tokenized([1, 1, 1], [2], [2, 3]))
    cut = encoder(tmp_path, max_length=4).encode_chunk(chunk(*rows), "tokenized")
    assert cut.left_out == [(1, SAME_TOKENS), (3, SAME_TOKENS_CUT)] and cut.lines == [2, 2, 4, 4] and cut.rows == 4
    dropped = encoder(tmp_path, max_length=4, too_long="drop").encode_chunk(chunk(*rows), "tokenized")
    assert dropped.left_out == [(1, SAME_TOKENS), (2, TOO_LONG), (3, TOO_LONG), (4, TOO_LONG)] and not dropped.lengths
    with pytest.raises(UserError, match=r"f\.jsonl:2: the row has 10 tokens and data.max_length is 4"):
        encoder(tmp_path, max_length=4, too_long="error").encode_chunk(chunk(*rows), "tokenized")
    with pytest.raises(UserError, match=r"f\.jsonl:1: rejected_ids contains the id 420, beyond .* 420"):
        encoder(tmp_path).encode_chunk(chunk(tokenized([1], [2], [420])), "tokenized")
