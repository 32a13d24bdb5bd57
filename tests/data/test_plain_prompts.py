"""Prompts that are plain strings: as a user's messages the ids are those of rows of messages, and what is done is
told."""

import json
from types import SimpleNamespace

import pytest
from transformers import PreTrainedTokenizerFast

from dtrain.base.errors import UserError
from dtrain.commands.cli import main
from dtrain.data.formats.labels import Label
from dtrain.data.formats.prompts import PromptOptions
from dtrain.data.sources.sources import open_rows
from dtrain.data.text.tokenizer import Tokenizer
from dtrain.recipe import to_yaml
from tests.data import templates
from tests.data.makers import byte_level, save, write_jsonl
from tests.data.test_pair_batches import section
from tests.evaluation.test_in_runs import lines
from tests.problem_lines import preflight
from tests.running import run
from tests.serve.serving import TEMPLATE, make_model
from tests.tiny import tiny_recipe, write_model

TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
ASK = "Who are you?"
YES, NO = "I am Bob. ", " Nobody"


def user(text):
    return [{"role": "user", "content": text}]


def assistant(text):
    return [{"role": "assistant", "content": text}]


def opened(tmp_path, rows, kind="examples", template=templates.QWEN25, **more):
    said = []
    tokenizer = Tokenizer.from_directory(save(tmp_path / "model", byte_level(), template))
    given = {name: more.pop(name) for name in ("prompts", "label") if name in more}
    data = section(write_jsonl(tmp_path / "a.jsonl", rows), **{"max_length": 512, "packing": False, **more})
    rows = open_rows(data, kind=kind, tokenizer=tokenizer, print_line=said.append, progress=False, **given)
    return rows.samples, "\n".join(said)


def documents(samples):
    return [(ids.tolist(), mask.tolist()) for index in range(len(samples)) for ids, mask in samples[index]]


PAIR = {"prompt": ASK, "chosen": YES, "rejected": NO}
PAIR_CHAT = {"prompt": user(ASK), "chosen": assistant(YES), "rejected": assistant(NO)}
SINGLE = {"prompt": ASK, "completion": YES}
SINGLE_CHAT = {"prompt": user(ASK), "completion": assistant(YES)}
GRPO = PromptOptions(256, "Be brief.")
DRAWN = PromptOptions(256, loss_on="assistant")
CASES = [
    ("examples", SINGLE, SINGLE_CHAT, {}, {}),
    ("examples", SINGLE, SINGLE_CHAT, {"tools": [TOOL]}, {}),
    ("examples", SINGLE, SINGLE_CHAT, {}, {"loss_on": "all"}),
    ("examples", SINGLE, SINGLE_CHAT, {}, {"template": templates.QWEN3, "template_kwargs": {"enable_thinking": False}}),
    ("labelled", SINGLE, SINGLE_CHAT, {"label": True}, {}),
    ("labelled", PAIR, PAIR_CHAT, {}, {}),
    ("pairs", PAIR, PAIR_CHAT, {}, {}),
    ("pairs", PAIR, PAIR_CHAT, {"system": "Be brief.", "tools": [TOOL]}, {}),
    ("pairs", PAIR, PAIR_CHAT, {"margin": 2.0}, {"label": Label("margin")}),
    ("examples", SINGLE, SINGLE_CHAT, {"label": 1}, {"label": Label("label", 2)}),
    ("prompts", {"prompt": ASK}, {"prompt": user(ASK)}, {"answer": "Bob"}, {"prompts": GRPO}),
    ("prompts", {"prompt": ASK}, {"prompt": user(ASK)}, {"system": "Be rude.", "tools": [TOOL]}, {"prompts": GRPO}),
    ("prompts", SINGLE, SINGLE_CHAT, {}, {"prompts": DRAWN}),
]


@pytest.mark.parametrize("kind, plain, chat, beside, options", CASES)
def test_ids_and_masks_are_those_of_messages(tmp_path, kind, plain, chat, beside, options):
    row = plain | beside
    read, _ = opened(tmp_path / "plain", [row], kind, prompts_as="user", **options)
    written, _ = opened(tmp_path / "chat", [chat | beside], kind, **options)
    assert documents(read) == documents(written)
    text, _ = opened(tmp_path / "text", [{key: row[key] for key in row if key not in ("system", "tools")}], kind,
                     prompts_as="text", **options)  # fmt: skip
    assert documents(text) != documents(read)


@pytest.mark.parametrize("template", ["QWEN25", "LLAMA3", "GEMMA3"])
def test_ids_are_those_of_transformers(tmp_path, template):
    made = getattr(templates, template)
    prompts, _ = opened(tmp_path / "prompts", [{"prompt": ASK}], "prompts", made, prompts_as="user", prompts=GRPO)
    single, _ = opened(tmp_path / "single", [SINGLE], "examples", made, prompts_as="user", loss_on="all")
    oracle = PreTrainedTokenizerFast.from_pretrained(tmp_path / "single" / "model")
    asked = [{"role": "system", "content": "Be brief."}, *user(ASK)]
    expected = oracle.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
    assert documents(prompts)[0][0] == expected
    assert documents(single)[0][0] == oracle.apply_chat_template(user(ASK) + assistant(YES), return_dict=False)


def test_columns_that_rewards_read_stay_as_they_are(tmp_path):
    rows = [SINGLE, {"prompt": ASK, "completion": 5}]
    samples, _ = opened(tmp_path, rows, "prompts", prompts_as="user", prompts=GRPO)
    assert samples.row(0)["columns"] == {"completion": YES, "answer": YES}
    assert samples.row(1)["columns"] == {"completion": 5, "answer": 5}
    assert samples.row(0)["prompt"] == [{"role": "system", "content": "Be brief."}, *user(ASK)]


def plain_lines(said):
    return [line for line in said.splitlines() if "as plain text" in line]


@pytest.mark.parametrize("chosen, done, other", [
    (None, "continued as raw text, without the chat template", "data.prompts_as=user"),
    ("text", "continued as raw text, without the chat template", "data.prompts_as=user"),
    ("user", "read as a user's message, in the chat template", "data.prompts_as=text"),
])  # fmt: skip
@pytest.mark.parametrize("kind, row", [("examples", SINGLE), ("pairs", PAIR), ("prompts", {"prompt": ASK})])
def test_what_is_done_is_told_with_the_other_key(tmp_path, kind, row, chosen, done, other):
    (line,) = plain_lines(opened(tmp_path, [row] * 3, kind, prompts_as=chosen)[1])
    assert line.startswith("train data: 3 prompts as plain text: " + done) and f"({other}: " in line


def test_nothing_is_told_where_there_is_no_choice(tmp_path):
    assert not plain_lines(opened(tmp_path / "1", [SINGLE_CHAT])[1])
    assert not plain_lines(opened(tmp_path / "2", [SINGLE], template=None)[1])
    assert not plain_lines(opened(tmp_path / "3", [{"prompt_ids": [3, 4]}], "prompts")[1])
    assert not plain_lines(opened(tmp_path / "4", [{"text": "abc"}])[1])
    question = {"question": ASK, "chosen": YES, "rejected": NO}
    assert not plain_lines(opened(tmp_path / "5", [question], "pairs")[1])


@pytest.mark.parametrize("chosen", ["text", "user"])
def test_sources_of_strings_and_of_messages_mix(tmp_path, chosen):
    sources = [
        SimpleNamespace(path=str(write_jsonl(tmp_path / f"{name}.jsonl", rows)), format="auto", weight=1.0)
        for name, rows in {"plain": [SINGLE] * 2, "chat": [SINGLE_CHAT] * 3, "text": [{"text": "abc"}]}.items()
    ]
    train = SimpleNamespace(path=None, format="auto", sources=sources)
    samples, said = opened(tmp_path, [], train=train, prompts_as=chosen)
    assert len(plain_lines(said)) == 1 and plain_lines(said)[0].startswith("train data: 2 prompts as plain text")
    found = documents(samples)
    assert (found[0] == found[2]) == (chosen == "user") and found[0] == found[1] and found[2] == found[4]
    assert samples.summary["plain_prompts"] == 2


def test_the_cache_tells_them_apart(tmp_path):
    given = {"cache_dir": str(tmp_path / "cache")}
    places = {opened(tmp_path, [SINGLE], prompts_as=chosen, **given)[0].directory for chosen in (None, "text", "user")}
    assert len(places) == 2


def test_a_share_that_is_validated_on_is_read_alike(tmp_path):
    rows = [{"prompt": f"{ASK} {n}", "completion": YES} for n in range(40)]
    chats = [{"prompt": user(row["prompt"]), "completion": assistant(YES)} for row in rows]
    read, _ = opened(tmp_path / "plain", rows, prompts_as="user", val=0.3)
    written, _ = opened(tmp_path / "chat", chats, val=0.3)
    assert documents(read) == documents(written) and 0 < read.summary["plain_prompts"] == len(read) < 40


def test_mistakes_name_the_key(tmp_path):
    with pytest.raises(UserError, match=r"data\.prompts_as=user .* has none. Name a file with data\.chat_template"):
        opened(tmp_path / "1", [SINGLE], template=None, prompts_as="user")
    with pytest.raises(UserError, match=r"a.jsonl:1: data\.prompts_as=user .* no explicit prompt"):
        opened(tmp_path / "2", [{"chosen": "abc", "rejected": "abd"}], "pairs", prompts_as="user")
    recipe = tiny_recipe(tmp_path, "data.prompts_as=user")
    assert any("data.prompts_as=user" in line and "has none" in line for line in preflight(recipe, 1))


def words(tmp_path, name="plain", rows=8):
    """Rows of words of the tiny tokenizer."""
    made = [{"prompt": f"w{n + 20} w5", "completion": f"w{n + 11}"} for n in range(rows)]
    if name == "chat":
        made = [{"prompt": user(row["prompt"]), "completion": assistant(row["completion"])} for row in made]
    return write_jsonl(tmp_path / f"{name}.jsonl", made)


def recipe_of(tmp_path, *overrides, data="plain", name="run"):
    model = tmp_path / "qwen3-tied"
    if not model.exists():
        (write_model(model) / "chat_template.jinja").write_text(TEMPLATE)
    path = f"data.train.path={words(tmp_path, data)}"
    return tiny_recipe(tmp_path, path, "train.steps=2", "train.global_batch=4", *overrides, name=name)


def asks(tmp_path):
    rows = [{"prompt": "w11 w12", "answer": "w5"}, {"prompt": user("w11 w12"), "answer": "w5"}]
    for name, row in zip(("string", "message"), rows, strict=True):
        write_jsonl(tmp_path / f"asks-{name}.jsonl", [row])
    sampling = "{max_new_tokens: 4}"
    return f"eval={{path: {tmp_path}/asks-*.jsonl, rewards: [{{fn: text_exact}}], sampling: {sampling}}}"


@pytest.mark.parametrize("data, chosen, is_user", [
    ("plain", "null", False), ("plain", "user", True), ("chat", "null", True), ("chat", "text", False),
])  # fmt: skip
def test_evaluations_ask_as_the_run_trained(tmp_path, monkeypatch, capsys, data, chosen, is_user):
    monkeypatch.chdir(tmp_path)
    recipe = run(recipe_of(tmp_path, f"data.prompts_as={chosen}", asks(tmp_path), "checkpoint.every=2", data=data))
    told = plain_lines("".join(capsys.readouterr()))
    how = "read as a user's message" if is_user else "continued as raw text"
    assert len(told) == (2 if data == "plain" else 1) and all(how in line for line in told)
    assert told[-1].startswith("eval: 1 prompt as plain text")
    answers = [row for row in lines(recipe, "evals") if row["step"] == 2]
    by_message, by_string = sorted(answers, key=lambda row: row["index"])
    assert by_message["prompt"] == user("w11 w12")
    assert by_string["prompt"] == (user("w11 w12") if is_user else "w11 w12")
    for place in (recipe.run.directory, recipe.run.directory / "checkpoints" / "step-2"):
        out = tmp_path / "out.jsonl"
        arguments = ["--max-new-tokens", "4", "--dtype", "float64", "--device", "cpu", "--json", "--out", str(out)]
        assert main(["eval", str(place), str(tmp_path / "asks-string.jsonl"), *arguments]) == 0
        printed = capsys.readouterr()
        assert "DATA: 1 prompt as plain text: " + how in printed.err
        assert json.loads(printed.out) and "(data.prompts_as is --prompts-as here)" in printed.err
        assert json.loads(out.read_text())["prompt"] == by_string["prompt"]
        assert json.loads(out.read_text())["completion"] == by_string["text"]


def test_a_model_is_asked_in_its_chat_template(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make_model(tmp_path, 1)
    asks(tmp_path)

    def prompt(*more):
        out, rest = tmp_path / "out.jsonl", ["--max-new-tokens", "4", "--device", "cpu", "--out", "out.jsonl", *more]
        status = main(["eval", "model", "asks-string.jsonl", *rest])
        return status, json.loads(out.read_text())["prompt"] if status == 0 else capsys.readouterr().err

    assert prompt() == prompt("--prompts-as", "user") == (0, user("w11 w12"))
    assert prompt("--prompts-as", "text") == (0, "w11 w12")
    (tmp_path / "model" / "chat_template.jinja").unlink()
    capsys.readouterr()
    assert prompt() == (0, "w11 w12") and "as plain text" not in capsys.readouterr().err
    status, told = prompt("--prompts-as", "user")
    assert status != 0 and "data.prompts_as=user" in told and "--prompts-as" in told and "--chat-template" in told


def test_a_resume_that_reads_them_otherwise_is_refused(tmp_path):
    run(recipe_of(tmp_path, "checkpoint.every=2"))
    with pytest.raises(UserError, match=r"data\.prompts_as(.|\n)*data\.fingerprint"):
        run(recipe_of(tmp_path, "checkpoint.every=2", "train.steps=4", "data.prompts_as=user"))


def test_a_run_on_strings_as_messages_is_the_run_on_messages(tmp_path):
    read = run(recipe_of(tmp_path, "data.prompts_as=user", name="read"))
    written = run(recipe_of(tmp_path, data="chat", name="written"))
    assert [row["loss"] for row in lines(read)] == [row["loss"] for row in lines(written)]


def test_validate_tells(tmp_path, capsys):
    recipe = recipe_of(tmp_path, asks(tmp_path))
    config = tmp_path / "recipe.yaml"
    config.write_text(to_yaml(recipe))
    for chosen, how in (("null", "continued as raw text"), ("user", "read as a user's message")):
        assert main(["validate", str(config), f"data.prompts_as={chosen}"]) == 0
        told = plain_lines(capsys.readouterr().out)
        assert [line.split(":")[0].strip() for line in told] == ["train data", "eval"]
        assert all(how in line for line in told)
