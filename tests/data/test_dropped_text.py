"""Text that a chat template leaves out of the messages that should be trained: it is counted and reported, and more
than half of it needs a confirmation."""

import re

import pytest
from transformers import PreTrainedTokenizerFast

from dtrain.base.errors import UserError
from dtrain.commands.cli import main
from dtrain.data.sources.sources import open_rows
from dtrain.data.text.tokenizer import Tokenizer
from dtrain.recipe import to_yaml
from tests.data import templates
from tests.data.makers import byte_level, save, write_jsonl
from tests.data.test_pair_batches import section
from tests.running import run
from tests.tiny import tiny_recipe, write_model

ASK = {"role": "user", "content": "What is 2 + 2?"}
THOUGHT, ANSWER = "<think>\nI add two to two.\n</think>\n\n", 'It is "four" <b>.'
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}


def say(content, **more):
    return {"role": "assistant", "content": content, **more}


IN_TEXT = [ASK, say(THOUGHT + ANSWER)]
TWO_TURNS = [*IN_TEXT, ASK, say(THOUGHT + ANSWER)]
IN_FIELD = [ASK, say(ANSWER, reasoning_content="I add two to two.")]
BESIDE = [ASK, say("I look it up.", tool_calls=[CALL])]
# Template, messages, data.loss_on, the texts that should be trained, and those that the template leaves out.
CASES = [
    ("R1", IN_TEXT, "assistant", [THOUGHT + ANSWER], [THOUGHT]),
    ("R1", TWO_TURNS, "last", [THOUGHT + ANSWER], [THOUGHT]),
    ("R1", [ASK, say(ANSWER)], "assistant", [ANSWER], []),
    ("QWEN25", IN_FIELD, "assistant", ["I add two to two.", ANSWER], ["I add two to two."]),
    ("QWEN25", IN_TEXT, "all", [ASK["content"], THOUGHT + ANSWER], []),
    ("QWEN3", IN_FIELD, "assistant", ["I add two to two.", ANSWER], []),
    ("QWEN3", TWO_TURNS, "assistant", [THOUGHT + ANSWER] * 2, [THOUGHT]),  # of the first turn
    ("QWEN3", TWO_TURNS, "last", [THOUGHT + ANSWER], []),
    ("LLAMA3", BESIDE, "assistant", ["I look it up.", 'add({"a": 2})'], ["I look it up."]),
    ("LLAMA3", [ASK, say(" It is four.\n")], "assistant", ["It is four."], []),
    ("ONLY_PARTS", IN_TEXT, "assistant", [THOUGHT + ANSWER], []),
]


def opened(tmp_path, template, rows, kind="examples", **more):
    said = []
    tokenizer = Tokenizer.from_directory(save(tmp_path / "model", byte_level(), template))
    data = section(write_jsonl(tmp_path / "a.jsonl", rows), **{"max_length": 512, "packing": False, **more})
    rows = open_rows(data, kind=kind, tokenizer=tokenizer, print_line=said.append, progress=False)
    return rows.samples, "\n".join(said)


@pytest.mark.parametrize("template, messages, loss_on, texts, dropped", CASES)
def test_dropped_characters_are_counted(tmp_path, template, messages, loss_on, texts, dropped):
    template = getattr(templates, template)
    samples, said = opened(tmp_path, template, [{"messages": messages}] * 3, loss_on=loss_on)
    oracle = PreTrainedTokenizerFast.from_pretrained(tmp_path / "model")
    parts = [{**row, "content": [{"type": "text", "text": row["content"]}]} for row in messages]
    written = oracle.apply_chat_template(parts if template == templates.ONLY_PARTS else messages, tokenize=False)
    wanted = sum(map(len, texts)) * 3
    assert (samples.text.characters, samples.text.dropped) == (wanted, sum(map(len, dropped)) * 3)
    note = f"leaves out {samples.text.dropped} of the {wanted} characters that should be trained, in 3 rows"
    assert (note in said) == ("leaves out" in said) == bool(dropped)
    if dropped:
        assert written.count(dropped[0].strip()) < "".join(texts).count(dropped[0].strip())
        assert f"{tmp_path}/a.jsonl:1: {dropped[0].strip()!r}" in said


def test_texts_of_a_template_that_reads_parts_are_parts(tmp_path):
    samples, _ = opened(tmp_path, templates.ONLY_PARTS, [{"messages": [ASK, say(ANSWER)]}])
    ((ids, trained),) = samples[0]
    oracle = PreTrainedTokenizerFast.from_pretrained(tmp_path / "model")
    parts = [{**row, "content": [{"type": "text", "text": row["content"]}]} for row in (ASK, say(ANSWER))]
    assert ids.tolist() == oracle.apply_chat_template(parts, return_dict=False)
    assert oracle.decode(ids[trained]) == ANSWER + "<|im_end|>"


def test_completions_of_pairs_and_labelled_replies_are_counted(tmp_path):
    pair = {"prompt": [ASK], "chosen": [say(THOUGHT + ANSWER)], "rejected": [say(THOUGHT + "Five.")]}
    labelled = {"messages": IN_TEXT, "label": True}
    for kind, row, texts in (
        ("pairs", pair, [THOUGHT + ANSWER, THOUGHT + "Five."]),
        ("labelled", pair, [THOUGHT + ANSWER, THOUGHT + "Five."]),
        ("labelled", labelled, [THOUGHT + ANSWER]),
    ):
        samples, said = opened(tmp_path, templates.R1, [row], kind=kind)
        assert samples.text.dropped == len(THOUGHT) * len(texts)
        assert samples.text.characters == sum(map(len, texts))
        assert "in 1 row, for example" in said


# Words of the tiny tokenizer. The template writes of a reply what follows w7.
TEMPLATE = (
    "{% for m in messages %}w8 {{ m.content.split('w7')[-1] }} w9 {% endfor %}"
    "{% if add_generation_prompt %}w8{% endif %}"
)


def test_pairs_that_differ_in_dropped_text_only_say_so(tmp_path):
    row = {
        "prompt": [ASK],
        "chosen": [say(THOUGHT + ANSWER)],
        "rejected": [say("<think>\nNo idea.\n</think>\n\n" + ANSWER)],
    }
    other = {"prompt": [ASK], "chosen": [say(ANSWER)], "rejected": [say("Five.")]}
    samples, _ = opened(tmp_path, templates.R1, [row, other], kind="pairs")
    ((_, line, reason),) = samples.meta["left_out"]
    assert line == 1 and re.search("the same tokens, since the chat template leaves out [0-9]+ characters", reason)


def test_more_than_half_needs_a_confirmation(tmp_path, capsys):
    model = tmp_path / "qwen3-tied"
    (write_model(model) / "chat_template.jinja").write_text(TEMPLATE)
    question = {"role": "user", "content": "w20"}
    long, short = ([question, say(content)] for content in ("w11 w12 w13 w7 w14", "w11 w7 w12 w13 w14"))

    def recipe(*overrides, replies):
        file = write_jsonl(tmp_path / "rows.jsonl", [{"messages": replies}] * 8)
        recipe = tiny_recipe(
            tmp_path, f"data.train.path={file}", "train.steps=1", "scheduler.warmup_steps=0", *overrides
        )
        (tmp_path / "recipe.yaml").write_text(to_yaml(recipe))
        return recipe

    asks = "data.train: the chat template leaves out 120 of the 144 characters"
    with pytest.raises(UserError, match=f"{asks}.*data.chat_template.*data.allow_dropped_text=true"):
        run(recipe(replies=long))
    capsys.readouterr()
    assert main(["validate", str(tmp_path / "recipe.yaml")]) != 0
    assert asks in "".join(capsys.readouterr())
    assert main(["preview", str(tmp_path / "recipe.yaml")]) == 0
    assert asks.replace("data.train", "note: train data") in capsys.readouterr().out
    for override, replies in (("data.allow_dropped_text=true", long), ("run.name=short", short)):
        accepted = recipe(override, replies=replies)
        assert main(["validate", str(tmp_path / "recipe.yaml")]) == 0
        assert "note: train data: the chat template leaves out" in capsys.readouterr().out
        run(accepted)


def test_the_first_rows_of_a_large_file_are_looked_at(tmp_path, capsys):
    model = tmp_path / "qwen3-tied"
    (write_model(model) / "chat_template.jinja").write_text(TEMPLATE)
    chat = [{"role": "user", "content": "w20"}, say("w11 w12 w13 w7 w14")]
    rows = [{"messages": chat, "note": "x" * 16_000}] * 300  # more than 4 MiB
    file = write_jsonl(tmp_path / "rows.jsonl", rows)
    recipe = tiny_recipe(tmp_path, f"data.train.path={file}")
    (tmp_path / "recipe.yaml").write_text(to_yaml(recipe))
    assert main(["validate", str(tmp_path / "recipe.yaml")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    found = re.search(r"leaves out ([\d,]+) of the ([\d,]+) characters .*, in (\d+) of the first (\d+) rows", said)
    dropped, characters, dropping, first = (int(number.replace(",", "")) for number in found.groups())
    assert (dropped, characters, dropping) == (15 * first, 18 * first, first) and first < 300
    assert "the run asks for data.allow_dropped_text=true" in said
