"""Generation: transformers' generate token for token, rows of different lengths, stopping, seeds, and directories."""

import io

import pytest
import torch
import transformers

from dtrain import models
from dtrain.base.errors import UserError
from dtrain.data.text.template import choose_template
from dtrain.data.text.tokenizer import Tokenizer
from dtrain.inference.generate import encode_prompt, generate, generate_text
from tests.models.oracle import VARIANTS, VOCAB
from tests.tiny import tiny_recipe, write_model

PROMPTS = [[3, 14, 15, 9, 2, 6], [5], [35, 89, 79, 32, 38, 46, 26, 43, 38, 32, 79], [50, 28, 84]]


def pair(variant, tmp_path):
    """The same random weights in transformers and here."""
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(VARIANTS[variant]()).eval().double()
    theirs.save_pretrained(tmp_path)
    return theirs, models.from_pretrained(tmp_path, dtype=torch.float64)


def theirs_alone(model, prompt, count, eos_ids=()):
    ids = torch.tensor([prompt])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=list(eos_ids) or None,
        pad_token_id=0,
    )
    return output[0, len(prompt) :].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["llama3.1", "mistral-window", "qwen2-window", "qwen3", "gemma3"])
def test_greedy_is_transformers_one_prompt_at_a_time(variant, tmp_path):
    theirs, ours = pair(variant, tmp_path)
    completions = generate(ours, PROMPTS, max_new_tokens=20, eos_ids=[])
    assert completions == [theirs_alone(theirs, prompt, 20) for prompt in PROMPTS]
    # A row may stop anywhere: the third token that came becomes an EOS, with another one beside it.
    eos_ids = [completions[0][2], completions[2][7]]
    stopped = generate(ours, PROMPTS, max_new_tokens=20, eos_ids=eos_ids)
    assert stopped == [theirs_alone(theirs, prompt, 20, eos_ids) for prompt in PROMPTS]
    assert len(stopped[0]) <= 3 and stopped[0][-1] in eos_ids and len({len(row) for row in stopped}) > 1


@pytest.fixture(scope="module")
def model():
    model = models.build(models.parse_config(VARIANTS["qwen3"]().to_dict()))
    models.init_weights(model, 0)
    return model


def test_draws_depend_on_seed_and_prompt_and_not_on_the_batch(model):
    def draw(prompts, **options):
        settings = {"max_new_tokens": 12, "eos_ids": [], "temperature": 1.0, "seed": 3, **options}
        return generate(model, prompts, **settings)

    whole = draw(PROMPTS)
    assert draw(PROMPTS) == whole
    assert draw(PROMPTS[:2]) == whole[:2]
    assert draw(PROMPTS, seed=4) != whole
    assert draw(PROMPTS, top_k=1) == generate(model, PROMPTS, max_new_tokens=12, eos_ids=[])
    twice = draw([PROMPTS[0], PROMPTS[0]])
    assert twice[0] == whole[0] and twice[1] != twice[0]
    assert draw(PROMPTS, max_new_tokens=5) == [row[:5] for row in whole]


def test_rows_that_end_leave_and_the_others_go_on_the_same(model):
    free = generate(model, PROMPTS, max_new_tokens=15, eos_ids=[], temperature=1.0)
    eos = free[1][0]
    stopped = generate(model, PROMPTS, max_new_tokens=15, eos_ids=[eos], temperature=1.0)
    assert stopped[1] == [eos]
    for row, whole in zip(stopped, free, strict=True):
        assert row == (whole[: whole.index(eos) + 1] if eos in whole else whole)


def test_the_last_look_comes_with_the_last_token_where_looks_are_rare(model, monkeypatch):
    expected = generate(model, PROMPTS, max_new_tokens=11, eos_ids=[1, 2, 3], temperature=1.0)
    monkeypatch.setattr("dtrain.inference.engine._STEPS_PER_READ", {})
    monkeypatch.setattr("dtrain.inference.engine._STEPS_PER_READ_ELSEWHERE", 4)
    assert generate(model, PROMPTS, max_new_tokens=11, eos_ids=[1, 2, 3], temperature=1.0) == expected


def test_nothing_asked_nothing_given_and_the_mode_stays(model):
    model.train()
    assert generate(model, [], max_new_tokens=5, eos_ids=[]) == []
    assert generate(model, PROMPTS[:1], max_new_tokens=0, eos_ids=[]) == [[]]
    assert len(generate(model, PROMPTS[:1], max_new_tokens=1, eos_ids=[])[0]) == 1
    assert model.training


@pytest.mark.parametrize(
    ("prompts", "settings", "message"),
    [
        ([[1], []], {}, "prompt of request 1 is empty"),
        ([[VOCAB]], {}, f"prompt of request 0 has a token id outside the model's vocabulary of {VOCAB}"),
        ([[1]], {"temperature": -1.0}, "temperature=-1.0"),
        ([[1]], {"top_p": 0.0}, "top_p=0.0"),
        ([[1]], {"top_k": -2}, "top_k=-2"),
        ([[1]], {"max_new_tokens": -1}, "max_new_tokens=-1"),
    ],
)
def test_mistakes_are_named(model, prompts, settings, message):
    with pytest.raises(UserError, match=message):
        generate(model, prompts, **{"max_new_tokens": 2, "eos_ids": [], **settings})


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run with a checkpoint and an export."""
    from dtrain.parallel.mesh import Runtime
    from dtrain.training.trainer import train

    root = tmp_path_factory.mktemp("finished")
    recipe = tiny_recipe(root, "train.steps=2", "checkpoint.every=2", "checkpoint.export=final", "train.dtype=float32")
    train(recipe, Runtime())
    return root / "runs" / "run"


def text_of(directory, **options):
    settings = {"max_new_tokens": 8, "raw": True, "device": "cpu", "dtype": "float32", **options}
    return list(generate_text(directory, ["w5 w6 w7", "w9"], **settings))


def test_text_of_a_run_a_checkpoint_and_an_export_is_the_same(finished):
    from_export = text_of(finished / "export")
    assert len(from_export) == 2 and all(word.startswith("w") for text in from_export for word in text.split())
    assert text_of(finished) == from_export
    assert text_of(finished / "checkpoints" / "step-2") == from_export
    (finished / "export").rename(finished / "moved")
    assert text_of(finished) == from_export
    (finished / "moved").rename(finished / "export")


def test_prompts_from_a_pipe_give_a_line_each(finished, monkeypatch, capsys):
    from dtrain.commands.cli import main

    arguments = ["generate", str(finished / "export"), "--raw", "--max-new-tokens", "8", "--device", "cpu"]
    monkeypatch.setattr("sys.stdin", io.StringIO("w5 w6 w7\nw9\n"))
    assert main([*arguments, "--dtype", "float32"]) == 0
    assert capsys.readouterr().out.splitlines() == text_of(finished / "export")
    # Only \n and \r\n end a line: a form feed, U+2028 and a lone \r belong to the prompt.
    piped = io.TextIOWrapper(io.BytesIO("w5\rw6\u2028w7\x0c\r\nw9".encode()), encoding="utf-8")
    monkeypatch.setattr("sys.stdin", piped)
    assert main([*arguments, "--dtype", "float32"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    monkeypatch.setattr("dtrain.inference.generate.generate_text", lambda *_, **__: iter(["one\ntwo", "three"]))
    monkeypatch.setattr("sys.stdin", io.StringIO("a\nb\n"))
    assert main(arguments) == 0
    assert capsys.readouterr().out == "one\\ntwo\nthree\n"
    monkeypatch.setattr("sys.stdin", type("Terminal", (), {"isatty": lambda self: True})())
    assert main(arguments) == 1
    assert "no prompt: give --prompt" in capsys.readouterr().err


def test_prompts_take_the_chat_template_unless_raw(tmp_path):
    directory = write_model(tmp_path)
    (directory / "chat_template.jinja").write_text(
        "{% for m in messages %}w8 {{ m.content }} {% endfor %}{% if add_generation_prompt %}w9{% endif %}"
    )
    tokenizer = Tokenizer.from_directory(directory)
    template = choose_template(directory, tokenizer)
    assert encode_prompt(tokenizer, "w5", template) == [8, 5, 9]
    assert encode_prompt(tokenizer, "w5", None) == [5]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("nowhere", {}, "no such directory"),
        (".", {}, "holds neither a model"),
        (".", {"device": "tpu"}, "device=tpu is unknown"),
        (".", {"dtype": "int8"}, "dtype=int8 is unknown"),
    ],
)
def test_directories_that_hold_nothing_are_told(tmp_path, name, options, message):
    with pytest.raises(UserError, match=message):
        text_of(tmp_path / name, **options)
