"""Pairs: where completions begin, what a limit leaves of them, and that a pair stays together in rows and batches."""

import io
import json
from collections import Counter
from itertools import islice
from types import SimpleNamespace

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from dtrain.base.batch import collate, document_ids
from dtrain.base.errors import UserError
from dtrain.commands.preview import preview
from dtrain.data.formats.encoder import LONG, Encoder
from dtrain.data.formats.pairs import EQUAL, EQUAL_CUT, PairEncoder, fit, normalise_pair
from dtrain.data.rows import cache
from dtrain.data.rows import rows as rows_module
from dtrain.data.rows.cache import Source, open_cache
from dtrain.data.rows.rows import Batches, Cursor, Rows
from dtrain.data.sources.files import Chunk
from dtrain.data.sources.sources import open_rows
from dtrain.data.text.template import choose_template
from dtrain.data.text.tokenizer import Tokenizer
from dtrain.methods import load_recipe
from tests.data import templates
from tests.data.makers import byte_level, metaspace, save, write_jsonl

ASK = {"role": "user", "content": " Who? "}


def say(content, **more):
    return {"role": "assistant", "content": content, **more}


def encoder(directory, template=None, make=byte_level, variables=None, config=(), **options):
    save(directory, make(), template, **dict(config))
    tokenizer = Tokenizer.from_directory(directory)
    chosen = choose_template(directory, tokenizer.special_tokens, None, variables)
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
    found = fit(*ids, 10)
    assert tuple(map(len, found)) == left
    assert found[0] == ids[0][prompt - left[0] :] and found[1] == ids[1][: left[1]] and found[2] == ids[2][: left[2]]
    result = encoder(tmp_path, max_length=10).encode_chunk(chunk(tokenized(*ids)), "tokenized")
    assert result.lengths == [left[0] + left[1], left[0] + left[2]]
    assert result.full == [prompt + chosen, prompt + rejected] and result.lines == [1, 1]
    assert list(result.tokens) == [*found[0], *found[1], *found[0], *found[2]]
    masks = [flag for size in left[1:] for flag in [0] * left[0] + [1] * size]
    assert list(result.trained) == masks


def test_rows_left_out(tmp_path):
    rows = [tokenized([1], [2], [2]), tokenized([1], [2] * 9, [3] * 9), tokenized([1], [2, 2, 2, 3], [2, 2, 2, 4])]
    rows.append(tokenized([1, 1, 1], [2], [2, 3]))
    cut = encoder(tmp_path, max_length=4).encode_chunk(chunk(*rows), "tokenized")
    assert cut.left_out == [(1, EQUAL), (3, EQUAL_CUT)] and cut.lines == [2, 2, 4, 4] and cut.rows == 4
    dropped = encoder(tmp_path, max_length=4, too_long="drop").encode_chunk(chunk(*rows), "tokenized")
    assert dropped.left_out == [(1, EQUAL), (2, LONG), (3, LONG), (4, LONG)] and not dropped.lengths
    with pytest.raises(UserError, match=r"f\.jsonl:2: the row has 10 tokens and data.max_length is 4"):
        encoder(tmp_path, max_length=4, too_long="error").encode_chunk(chunk(*rows), "tokenized")
    with pytest.raises(UserError, match=r"f\.jsonl:1: rejected_ids holds the id 420, beyond .* 420"):
        encoder(tmp_path).encode_chunk(chunk(tokenized([1], [2], [420])), "tokenized")


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    """60 pairs, both documents 2 to 16 tokens; the ids of sample i are i."""
    root = tmp_path_factory.mktemp("pairs")
    data = [tokenized(*([number] * size for size in sizes_of(number))) for number in range(60)]
    source = Source((write_jsonl(root / "a.jsonl", data),), "tokenized")
    return open_cache([source], encoder(root / "model", max_length=16), cache_dir=root / "cache")


def sizes_of(number):
    """Tokens of prompt, chosen and rejected; the completions never equally long."""
    prompt = 1 + number * 5 % 7
    chosen = 1 + number * 7 % 9
    return prompt, chosen, 1 + (chosen + number % 7) % 9


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    monkeypatch.setattr(rows_module, "WINDOW", 16)


def make(samples, **options):
    return Rows(samples, max_length=16, **{"seed": 3, **options})


def listed(row):
    return {name: tensor.tolist() for name, tensor in row.items()}


def document(number, side, at=0):
    """One document of sample `number`, by hand."""
    prompt, *completions = sizes_of(number)
    size = prompt + completions[side]
    return {
        "input_ids": [number] * size,
        "labels": [-100] * (prompt - 1) + [number] * completions[side] + [-100],
        "position_ids": list(range(size)),
        "seq_ids": [at] * size,
    }


def test_samples_are_pairs(samples):
    assert len(samples) == 60 and samples.documents_per_sample == 2 and samples.meta["rows"] == 60
    lengths = [[sizes_of(number)[0] + size for size in sizes_of(number)[1:]] for number in range(60)]
    assert samples.lengths(torch.arange(60)).tolist() == [sum(pair) for pair in lengths]
    assert samples.full_lengths(3, 6).tolist() == [size for pair in lengths[3:6] for size in pair]
    for number in range(60):
        assert [len(ids) for ids, _ in samples[number]] == lengths[number]
        assert [int(trained.sum()) for _, trained in samples[number]] == list(sizes_of(number)[1:])
        assert samples.origin(number)[1] == number + 1


def test_unpacked_a_pair_is_two_neighbouring_rows(samples):
    rows = make(samples, packing=False, epochs=1)
    assert rows.rows_in_epoch(0) == 60
    for placement in rows.placements():
        (number,) = placement.samples
        assert [listed(row) for row in rows.build([number])] == [document(number, side) for side in (0, 1)]
    assert len(list(rows.iterate())) == 120


def test_packed_a_row_holds_whole_pairs(samples):
    rows, seen = make(samples, epochs=1), Counter()
    assert rows.capacity == 32
    for placement in rows.placements():
        (row,) = rows.build(placement.samples)
        sides = [(number, side) for number in placement.samples for side in (0, 1)]
        expected = [document(number, side, at) for at, (number, side) in enumerate(sides)]
        assert listed(row) == {name: sum((one[name] for one in expected), []) for name in row}
        assert len(row["input_ids"]) <= 32
        seen.update(placement.samples)
    assert seen == Counter(range(60)) and rows.rows_in_epoch(0) < 50


def collect(batches):
    return [([listed(row) for row in b.rows], b.samples, b.size, b.cursor, b.epoch) for b in batches]


@pytest.mark.parametrize("packing", [True, False])
def test_ranks_share_the_same_batches(samples, packing):
    rows = make(samples, packing=packing, epochs=2)
    alone = collect(Batches(rows, global_batch=5))
    assert sum(batch[2] for batch in alone) == rows.total_rows()
    for dp_size in (2, 3):
        ranks = [collect(Batches(rows, global_batch=5, dp_rank=rank, dp_size=dp_size)) for rank in range(dp_size)]
        for number, (all_rows, all_samples, size, cursor, epoch) in enumerate(alone):
            placements = all_rows if packing else [all_rows[at : at + 2] for at in range(0, len(all_rows), 2)]
            assert size == len(placements)
            for rank in range(dp_size):
                mine = placements[rank::dp_size]
                mine = mine if packing else [row for pair in mine for row in pair]
                found = [
                    row["input_ids"][row["seq_ids"].index(at)] for row in mine for at in range(row["seq_ids"][-1] + 1)
                ]
                assert found[::2] == found[1::2]
                assert ranks[rank][number] == (mine, found[::2], size, cursor, epoch)
            assert sorted(sum((ranks[rank][number][1] for rank in range(dp_size)), [])) == sorted(all_samples)


@pytest.mark.processes
@pytest.mark.parametrize("packing", [True, False])
def test_workers_change_nothing_and_any_cursor_resumes(samples, packing):
    rows = make(samples, packing=packing, epochs=2)
    alone = collect(Batches(rows, global_batch=7, dp_rank=1, dp_size=2, cursor=Cursor(0, 3)))
    assert collect(Batches(rows, global_batch=7, dp_rank=1, dp_size=2, cursor=Cursor(0, 3), num_workers=2)) == alone
    after = alone[2][3]
    assert collect(Batches(rows, global_batch=7, dp_rank=1, dp_size=2, cursor=after)) == alone[3:]


def test_the_cache_is_used_again_and_is_no_other_kinds(tmp_path, monkeypatch):
    built, build = [], cache._build
    monkeypatch.setattr(cache, "_build", lambda *arguments: (built.append(1), build(*arguments))[1])
    coder = encoder(tmp_path / "model", max_length=16)
    rows = [{**tokenized([1], [2] * (1 + number % 3), [3]), "input_ids": [1, 2]} for number in range(9)]
    source = Source((write_jsonl(tmp_path / "a.jsonl", rows),), "tokenized")
    first, again = (open_cache([source], coder, cache_dir=tmp_path / "cache") for _ in range(2))
    assert len(built) == 1 and first.fingerprint == again.fingerprint
    assert [ids.tolist() for ids, _ in again[2]] == [[1, 2, 2, 2], [1, 3]]
    single = open_cache([source], Encoder(coder.tokenizer, None, max_length=16), cache_dir=tmp_path / "cache")
    assert len(built) == 2 and len(single[0]) == 1 and single.fingerprint != first.fingerprint
    longer = PairEncoder(coder.tokenizer, None, max_length=17)
    assert open_cache([source], longer, cache_dir=tmp_path / "cache").fingerprint == first.fingerprint
    assert len(built) == 3


def test_the_same_tokens_in_pairs_are_other_data(tmp_path):
    coder = encoder(tmp_path / "model", max_length=16)
    pair = Source((write_jsonl(tmp_path / "a.jsonl", [tokenized([1], [2], [3])]),), "tokenized")
    rows = [{"input_ids": [1, token], "labels": [-100, token]} for token in (2, 3)]
    single = Source((write_jsonl(tmp_path / "b.jsonl", rows),), "tokenized")
    pairs = open_cache([pair], coder, cache_dir=tmp_path / "cache")
    singles = open_cache([single], Encoder(coder.tokenizer, None, max_length=16), cache_dir=tmp_path / "cache")
    assert pairs.meta["fingerprint"] == singles.meta["fingerprint"] and pairs.fingerprint != singles.fingerprint


@pytest.mark.processes
def test_processes_give_what_one_gives(tmp_path, monkeypatch):
    coder = encoder(tmp_path / "model", templates.QWEN25, max_length=40)
    rows = [
        {"prompt": f"{number} " * (number % 9), "chosen": [say("x")], "rejected": [say("y z")]} for number in range(600)
    ]
    source = Source((write_jsonl(tmp_path / "a.jsonl", rows),), "preference")
    alone = open_cache([source], coder, cache_dir=None)
    monkeypatch.setattr(cache, "SMALL", 0)
    together = open_cache([source], coder, cache_dir=tmp_path / "cache", num_workers=2)
    assert alone.fingerprint == together.fingerprint and len(together) == 600
    assert 0 < alone.meta["truncated"] < 600
    lengths = [[len(ids) for ids, _ in alone[number]] for number in range(600)]
    full = alone.full_lengths(0, 600).view(600, 2).tolist()
    assert alone.meta["truncated"] == sum(before != after for before, after in zip(full, lengths, strict=True))
    assert alone.meta["tokens_cut"] == sum(map(sum, full)) - alone.meta["tokens"]


def section(file, **more):
    plain = dict(max_length=64, packing=True, loss_on="assistant", shuffle=True, too_long="truncate", num_workers=0)
    unset = dict(val=None, cache_dir=None, chat_template=None, template_kwargs={}, prompts_as=None)
    split = SimpleNamespace(path=str(file), format=more.pop("format", "auto"), sources=None)
    return SimpleNamespace(**{**plain, **unset, "train": split, **more})


def opened(model, data, kind="pairs"):
    said = []
    tokenizer = Tokenizer.from_directory(model)
    rows = open_rows(data, kind=kind, tokenizer=tokenizer, say=said.append, progress=False)
    return rows, "\n".join(said)


def test_says_what_it_found_and_left_out(tmp_path):
    model = save(tmp_path / "model", byte_level(), templates.QWEN25)
    same = {**PLAIN, "rejected": PLAIN["chosen"]}
    long = {**PLAIN, "chosen": [say("x" * 99)]}
    file = write_jsonl(tmp_path / "a.jsonl", [PLAIN, same, PLAIN, long])
    rows, said = opened(model, section(file))
    assert f"{file}: format preference (detected)" in said and "tokenizer_config.json (chat_template)" in said
    assert "train data: 3 pairs of 4 rows" in said and "1 pairs truncated to data.max_length=64" in said
    assert f"1 rows left out that teach no preference: {file}:2 ({EQUAL})" in said
    assert rows.capacity == 128
    _, said = opened(model, section(file, too_long="drop"))
    assert "train data: 2 pairs" in said and "1 rows dropped, longer than data.max_length=64" in said
    with pytest.raises(UserError, match="not one of 1 rows teaches a preference .*must differ"):
        opened(model, section(write_jsonl(tmp_path / "b.jsonl", [same])))
    tokens = write_jsonl(tmp_path / "c.jsonl", [tokenized([1], [2], [3])])
    assert "format tokenized (detected)\ntokenized rows are used as they are" in opened(model, section(tokens))[1]


@pytest.mark.parametrize("row, name, kind, words", [
    ({"messages": [ASK]}, "auto", "pairs", ["a.jsonl:1", "format messages", "method=sft"]),
    ({"messages": [ASK]}, "messages", "pairs", ["format messages", "method=sft", "prompt, chosen and rejected"]),
    ({"input_ids": [1]}, "tokenized", "pairs", ["a.jsonl:1", "no prompt_ids", "method=sft"]),
    ({"question": "x"}, "auto", "pairs", ["a.jsonl:1", "question", "preference: chosen, rejected"]),
    (PLAIN, "auto", "examples", ["a.jsonl", "preferences", "set method=dpo"]),
    (PLAIN, "preference", "examples", ["preferences", "set method=dpo"]),
    (tokenized([1], [2], [3]), "auto", "examples", ["a.jsonl:1", "preferences", "set method=dpo"]),
    (tokenized([1], [2], [3]), "tokenized", "examples", ["a.jsonl:1", "no input_ids", "set method=dpo"]),
])  # fmt: skip
def test_each_method_names_the_other(tmp_path, row, name, kind, words):
    model = save(tmp_path / "model", byte_level(), templates.QWEN25)
    with pytest.raises(UserError) as error:
        opened(model, section(write_jsonl(tmp_path / "a.jsonl", [row]), format=name), kind)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize("packing", [True, False])
def test_preview(tmp_path, packing):
    model = save(tmp_path / "model", byte_level(), templates.QWEN25)
    file = write_jsonl(tmp_path / "a.jsonl", [PLAIN] * 4)
    data = {"train": {"path": str(file)}, "max_length": 128, "packing": packing}
    tree = {"method": "dpo", "data": data, "model": {"path": str(model)}, "run": {"dir": str(tmp_path / "runs")}}
    recipe = load_recipe(tree)
    out = io.StringIO()
    preview(recipe, samples=1, out=out)
    ask = QWEN_SYSTEM + QWEN_ASK
    shown = out.getvalue()
    text = f"- chosen:\n{ask}[[Me, 東京!{END}]]\n- rejected:\n{ask}[[You{END}]]\n"
    assert text in shown
    (tokens,) = {json.loads(meta.read_text())["tokens"] for meta in (tmp_path / "runs").glob(".cache/*/meta.json")}
    assert f"mean {tokens / 8:.1f} (max_length 128)" in shown
    if packing:
        rows, _ = opened(model, recipe.data)
        count = rows.rows_in_epoch(0)
        full = 100 * tokens / (256 * count)
        assert f"packed rows of 256 tokens are {full:.1f}% full, {4 / count:.1f} pairs each" in shown
        assert f"an epoch: {count} rows" in shown and "--- row 1" in shown
    else:
        assert shown.count("- chosen:") == 1 and "an epoch: 4 pairs" in shown and "--- pair 1" in shown


def test_a_batch_of_pairs_is_what_the_method_reads(samples):
    """In a collated batch the even documents are the chosen ones, packed or not."""
    for packing in (True, False):
        batch = next(iter(Batches(make(samples, packing=packing), global_batch=4)))
        ids = collate(batch.rows)
        documents = document_ids(ids)
        for at, sample in enumerate(islice(batch.samples, 6)):
            for side in (0, 1):
                inside = documents == 2 * at + side
                assert ids["input_ids"][inside].tolist() == document(sample, side)["input_ids"]
                assert ids["labels"][inside].tolist() == document(sample, side)["labels"]
