"""The data section to rows, what is said on the way, and the preview."""

import io
import json
import re
from types import SimpleNamespace

import pytest

from dtrain.base.errors import UserError
from dtrain.commands.preview import preview
from dtrain.data.formats.labels import Label
from dtrain.data.sources.sources import open_rows
from dtrain.data.text.template import ChatTemplate
from dtrain.data.text.tokenizer import Tokenizer
from dtrain.launch import validate
from dtrain.training import load_recipe
from dtrain.training.host import DryHost
from dtrain.training.inputs import RunInputs, World
from dtrain.training.setup import first_rows
from tests.data import templates
from tests.data.makers import byte_level, save, write_jsonl
from tests.running import metrics, run
from tests.tiny import tiny_recipe, write_model

CHAT = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Me."}]


class Terminal(io.StringIO):
    """Output that is a terminal's."""

    def isatty(self):
        return True


def section(**more):
    plain = dict(max_length=64, packing=True, loss_on="assistant", shuffle=True, too_long="truncate", num_workers=0)
    unset = dict(val=None, cache_dir=None, chat_template=None, template_kwargs={}, prompts_as=None)
    plain["special_tokens"] = "structure"
    return SimpleNamespace(**{**plain, **unset, **more})


def split(path=None, format="auto", sources=None):
    return SimpleNamespace(path=path, format=format, sources=sources)


@pytest.fixture
def model(tmp_path):
    return save(tmp_path / "model", byte_level(), templates.QWEN25)


def opened(model, data, **options):
    said = []
    rows = open_rows(data, tokenizer=Tokenizer.from_directory(model), print_line=said.append, progress=False, **options)
    return rows, "\n".join(said)


def test_says_what_it_found_chose_and_left_out(tmp_path, model):
    long = [CHAT[0], {"role": "assistant", "content": "x" * 99}]
    rows = [{"messages": chat} for chat in (*[CHAT] * 5, CHAT[:1], long)]
    file = write_jsonl(tmp_path / "a.jsonl", rows)
    _, said = opened(model, section(train=split(str(file))), cache_dir=tmp_path / "cache")
    assert f"{file}: format messages (detected)" in said
    assert "tokenizer_config.json (chat_template)" in said
    assert "train data: 6 samples of 7 rows" in said
    assert "1 samples truncated to data.max_length=64" in said
    assert f"1 rows left out without a trained token: {file}:6 (no trained token)" in said
    _, said = opened(model, section(train=split(str(file)), too_long="drop", cache_dir=str(tmp_path / "own")))
    assert "1 rows dropped, longer than data.max_length=64" in said and (tmp_path / "own").is_dir()


def test_a_template_that_is_handed_in_is_not_chosen_again(tmp_path, model):
    data = section(train=split(str(write_jsonl(tmp_path / "a.jsonl", [{"messages": CHAT}] * 5))))
    template = ChatTemplate(templates.QWEN3, "the run's", {})
    _, printed = opened(model, data, template=template, cache_dir=tmp_path / "cache")
    assert "chat template: the run's" in printed


def test_weighted_sources(tmp_path, model):
    chat = write_jsonl(tmp_path / "a.jsonl", [{"messages": CHAT}] * 10)
    text = write_jsonl(tmp_path / "b.jsonl", [{"text": "two"}] * 10)
    sources = [
        SimpleNamespace(path=str(chat), format="auto", weight=2.0),
        SimpleNamespace(path=[str(text)], format="text", weight=0.3),
    ]
    rows, said = opened(model, section(train=split(sources=sources), packing=False))
    assert rows.rows_in_epoch(0) == 23 and "so all of their tokens are trained" in said
    assert rows.total_rows() is None


def test_validation_is_one_unshuffled_epoch(tmp_path, model):
    file = write_jsonl(tmp_path / "a.jsonl", [{"text": f"{number}"} for number in range(10)])
    rows, said = opened(model, section(val=split(str(file)), packing=False), split="val", epochs=7)
    assert [placement.samples for placement in rows.sample_groups()] == [[index] for index in range(10)]
    assert "data.val" in said


@pytest.mark.parametrize("train, words", [
    (split(), ["data.train.path is not set"]),
    (split("a/b"), ["data.train.path", "`dtrain download --data a/b`"]),
    (split("{text}", "preference"), ["preferences", "set method=dpo"]),
    (split("{text}", "chatml"), ["data.train.format is 'chatml'", "sharegpt"]),
    (split("{odd}"), ["odd.jsonl:1", "question", "prompt, completion"]),
    (split("{none}"), ["the dataset is empty", "none.jsonl"]),
    (split("{mixed}"), ["mixed.jsonl:2", "format is text", "looks like format messages"]),
    (split("{text}", sources=[split("{text}")]), ["both set"]),
    (split(sources=[SimpleNamespace(path="{text}", format="auto", weight=-1)]), ["data.train.sources[0].weight is -1"]),
])  # fmt: skip
def test_mistakes(tmp_path, model, train, words):
    rows = {"text": [{"text": "a"}], "odd": [{"question": "a"}], "none": []}
    rows["mixed"] = [{"text": "a"}, {"messages": CHAT}]
    for name, content in rows.items():
        write_jsonl(tmp_path / f"{name}.jsonl", content)

    def filled(source):
        path = source.path and source.path.replace("{", f"{tmp_path}/").replace("}", ".jsonl")
        sources = [filled(inner) for inner in getattr(source, "sources", None) or []] or None
        return SimpleNamespace(**{**vars(source), "path": path, "sources": sources})

    with pytest.raises(UserError) as error:
        opened(model, section(train=filled(train)))
    assert all(word in str(error.value) for word in words), str(error.value)


def test_notes_about_templates(tmp_path, model):
    file = str(write_jsonl(tmp_path / "a.jsonl", [{"messages": CHAT}]))
    (tmp_path / "a.jinja").write_text(
        "{{ strftime_now('%Y') }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    _, said = opened(model, section(train=split(file), chat_template=str(tmp_path / "a.jinja")))
    assert "today's date" in said and "no end-of-turn token" in said and "a.jinja (data.chat_template)" in said


@pytest.mark.parametrize("template, eos, words", [
    (templates.QWEN25, "<|im_end|>", []),
    (templates.QWEN25, "<|endoftext|>", ["ends a reply with '<|im_end|>', which is no EOS token", "'<|endoftext|>'"]),
    (templates.QWEN25, None, ["which is no EOS token of the model (none is named)"]),
    (templates.GENERATION, "<|im_end|>", ["leaves the end of a reply, '<|im_end|>', untrained", "{% generation %}"]),
    (templates.GENERATION.replace("{% endgeneration %}", "<|im_end|>{% endgeneration %}"), "<|im_end|>", []),
    (templates.LLAMA2, "</s>", []),
    (templates.OLMO3, "</s>", []),
])  # fmt: skip
def test_replies_that_do_not_end_as_a_generation_does_are_noted(tmp_path, template, eos, words):
    model = save(tmp_path / "model", byte_level(), template, eos_token=eos)
    file = str(write_jsonl(tmp_path / "a.jsonl", [{"messages": CHAT}, {"messages": [*CHAT, *CHAT]}]))
    _, said = opened(model, section(train=split(file), val=split(file)))
    notes = [line for line in said.splitlines() if line.startswith("note: the chat template")]
    assert len(notes) == bool(words) and all(word in note for word, note in zip(words, notes * 2, strict=False)), said
    data = {"train": {"path": file}, "max_length": 64}
    recipe = load_recipe({"data": data, "model": {"path": str(model)}, "run": {"dir": str(tmp_path / "runs")}})
    data = first_rows.look_at_data(RunInputs.of(recipe, World(1)), DryHost())
    assert [line for line in data.notes if "chat template" in line] == notes


def test_endings_are_not_noted_where_no_reply_is_generated_or_the_template_writes_none(tmp_path):
    model = save(tmp_path / "model", byte_level(), templates.QWEN25, eos_token="</s>")
    pair = {"prompt": CHAT[:1], "chosen": CHAT[1:], "rejected": [{"role": "assistant", "content": "No."}], "margin": 1}
    plain = {"prompt": "two and", "completion": " two"}
    for row, kind, label, wanted in (
        (pair, "pairs", None, True),
        (pair, "pairs", Label("margin"), False),
        ({"messages": CHAT, "label": 1}, "examples", Label("label", 2), False),
        (plain, "examples", None, False),
    ):
        file = str(write_jsonl(tmp_path / "a.jsonl", [row] * 2))
        _, said = opened(model, section(train=split(file)), kind=kind, label=label)
        assert ("note: the chat template" in said) is wanted, said


def test_preview(tmp_path, model):
    rows = [{"messages": [*CHAT, *CHAT]}] * 3 + [{"messages": CHAT[:1]}]
    file = write_jsonl(tmp_path / "a.jsonl", rows)
    data = {"train": {"path": str(file)}, "max_length": 128}
    recipe = load_recipe({"data": data, "model": {"path": str(model)}, "run": {"dir": str(tmp_path / "runs")}})
    out = io.StringIO()
    preview(recipe, samples=1, out=out)
    plain = out.getvalue()
    text = (
        "<|im_start|>system\nYou are a helper.<|im_end|>\n"
        + "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n[[Me.<|im_end|>]]\n" * 2
    )
    assert text in plain and plain.count("[[Me.") >= 2
    assert f"{file}:4 (no trained token)" in plain and "format messages (detected)" in plain
    lowest = re.search(r"lengths in tokens: (\d+) to .*\n +(\d+) - ", plain)
    assert lowest and lowest[1] == lowest[2] != "0" and "####" in plain and "% full" in plain and "an epoch: " in plain
    out = Terminal()
    preview(recipe, samples=1, out=out)
    assert "\033[32mMe.<|im_end|>\033[0m\n" in out.getvalue() and "[[Me" not in out.getvalue()


def test_validate_tells_what_is_left_out_cut_and_doubled(tmp_path):
    """As the run tells it, also of data that a dry run reads in part."""
    model = write_model(tmp_path / "model")
    file = tmp_path / "rows.jsonl"
    whole, long, untrained = {"input_ids": [1, 2, 3]}, {"input_ids": [2] * 200}, {"input_ids": [1], "labels": [-100]}
    write_jsonl(file, [whole, long, untrained] * 20)
    shape = [
        "model.init=scratch",
        "train.steps=5",
        "train.global_batch=2",
        "data.max_length=150",
        f"run.dir={tmp_path}",
    ]
    paths = [f"model.path={model}", f"data.train.path=[{file},{file}]", f"data.val.path={file}", "launch.device=cpu"]
    said = validate("sft", [*shape, *paths])
    assert "train data: 40 samples truncated to data.max_length=150; 2,000 tokens cut" in said
    assert any("train data: 40 rows left out without a trained token" in line for line in said)
    assert any("data.max_length=150 is more than the 128 positions" in line for line in said)
    assert f"note: {file} is named twice (data.train.path, data.train.path): its rows count twice" in said
    assert f"note: {file} is in data.train.path and in data.val.path: validation sees trained rows" in said
    large = write_jsonl(tmp_path / "large.jsonl", [whole, long, untrained] * 9000)
    assert large.stat().st_size > first_rows.SMALL_BYTES
    said = validate("sft", [*shape, *paths[:1], f"data.train.path={large}", "launch.device=cpu"])
    assert "train data: 85 of the first 256 rows are left out (no trained token)" in said
    assert "train data: 85 documents of the first 256 rows are cut to data.max_length=150" in said


def test_a_rate_of_0_runs_with_a_note_and_moves_nothing(tmp_path, capfd):
    settings = ["optimizer.lr=0", "train.steps=3", "checkpoint.every=3"]
    recipe = tiny_recipe(tmp_path, *settings)
    assert any("note: optimizer.lr=0" in line for line in validate(recipe))
    run(recipe)
    rows, before = metrics(recipe), tiny_recipe(tmp_path, *settings[1:], "optimizer.lr=1e-30", name="still")
    assert [row["lr"] for row in rows] == [0.0] * 3 and all(row["grad_norm"] > 0 for row in rows)
    assert [row["loss"] for row in rows] == [row["loss"] for row in metrics(run(before))]


@pytest.mark.parametrize(("column", "ours"), [("conversation", "messages"), ("chat", "conversations")])
def test_messages_as_json_text_are_suggested_as_messages(tmp_path, model, column, ours):
    names = ("role", "content") if ours == "messages" else ("from", "value")
    speakers = ("user", "assistant") if ours == "messages" else ("human", "gpt")
    chat = [dict(zip(names, pair, strict=True)) for pair in zip(speakers, ("Who?", "Me."), strict=True)]
    file = write_jsonl(tmp_path / "a.jsonl", [{column: json.dumps(chat)}])
    with pytest.raises(UserError, match=rf"or map them: 'data.train.columns={{{ours}: {column}}}'"):
        opened(model, section(train=split(str(file))))
    source = split(str(file))
    source.columns = {ours: column}
    rows, _ = opened(model, section(train=source))
    assert rows.samples.meta["trained_tokens"] > 0
