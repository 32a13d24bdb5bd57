"""The token that a score is read at: the last of a conversation as transformers' `apply_chat_template` encodes it, in
training, validation, grpo.reward_model and /classify; against transformers' classifiers."""

import json

import pytest
import torch
import transformers

from dtrain.data.formats.labels import Label, LabelledPairEncoder, LabelledTextEncoder
from dtrain.data.text.template import choose_template
from dtrain.data.text.tokenizer import Tokenizer
from tests.data import templates
from tests.data.makers import byte_level, save, write_jsonl
from tests.methods.comparing import samples_of
from tests.running import metrics, run
from tests.serve.serving import ask
from tests.serve.test_classify import serving
from tests.tiny import tiny_grpo, tiny_recipe, write_model

AUTO = transformers.AutoModelForSequenceClassification
ENDS = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
FORMS = {
    "a newline behind the last turn": (templates.QWEN25, ENDS),
    "nothing behind it": (templates.LLAMA2, {"eos_token": "<|eot_id|>", "pad_token": "<|endoftext|>"}),
    "Llama 3, padding ends turns": (templates.LLAMA3, {"eos_token": "<|eot_id|>", "pad_token": "<|eot_id|>"}),
}
WORDS = "the quick brown fox jumps over the lazy dog answer question two four course helper emoji".split()


def conversation(index):
    asked = [{"role": "user", "content": " ".join(WORDS[index % 9 :: 3]) + "?"}]
    chosen, rejected = (f"{WORDS[(index * 5 + side) % 16]} {WORDS[(index + 3 * side) % 16]}." for side in (1, 2))
    return [asked, *([{"role": "assistant", "content": text}] for text in (chosen, rejected))]


def pairs(root, count=16):
    rows = [dict(zip(("prompt", "chosen", "rejected"), conversation(index), strict=True)) for index in range(count)]
    return write_jsonl(root / "pairs.jsonl", rows)


def directory_of(root, form, family="llama", **changes):
    """A tiny model's directory with a byte-level tokenizer and the form's template."""
    template, named = FORMS[form]
    tokenizer = byte_level()
    directory = write_model(root, family, vocab_size=tokenizer.get_vocab_size(), **changes)
    return save(directory, tokenizer, template, **named)


def classifier(root, form):
    """A classifier as transformers writes it, and itself in float64: padding is the tokenizer's, as TRL sets it."""
    directory = directory_of(root / "rates", form, num_labels=1)
    pad = Tokenizer.from_directory(directory).pad_id
    config = {**json.loads((directory / "config.json").read_text()), "pad_token_id": pad}
    torch.manual_seed(5)
    known = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
    made = AUTO.from_config(known, dtype=torch.float64).eval()
    with torch.no_grad():
        made.score.weight.mul_(30)
    made.save_pretrained(directory)
    return directory, made


def scores_of(model, directory, conversations):
    """Return the score that transformers gives each alone, [N] in float64."""
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
    rows = [tokenizer.apply_chat_template(one, return_dict=False) for one in conversations]
    with torch.no_grad():
        return torch.cat([model(torch.tensor([ids])).logits[:, 0] for ids in rows])


def margins_of(model, directory, count=16):
    asked = [conversation(index) for index in range(count)]
    chosen, rejected = (scores_of(model, directory, [one[0] + one[side] for one in asked]) for side in (1, 2))
    return chosen - rejected


@pytest.mark.parametrize("form", FORMS)
def test_rated_documents_are_those_of_transformers(tmp_path, form):
    """Pairs and examples: a document that is too long keeps its end, and a pair one beginning."""
    directory = directory_of(tmp_path, form)
    ours, theirs = Tokenizer.from_directory(directory), transformers.PreTrainedTokenizerFast.from_pretrained(directory)
    template = choose_template(directory, ours)
    asked, chosen, rejected = conversation(1)
    expected = [theirs.apply_chat_template([*asked, *one], return_dict=False) for one in (chosen, rejected)]

    def documents(kind, row, name, column, most):
        coder = kind(ours, template, label=Label(column), max_length=most)
        return [list(one.ids) for one in coder.encode_row(row, name)]

    row = {"prompt": asked, "chosen": chosen, "rejected": rejected}
    assert documents(LabelledPairEncoder, row, "preference", "margin", 4096) == expected
    example = {"messages": [*asked, *chosen], "label": 1}
    assert documents(LabelledTextEncoder, example, "messages", "label", 4096) == expected[:1]
    for most in (6, max(map(len, expected)) - 3):
        found = documents(LabelledPairEncoder, row, "preference", "margin", most)
        assert max(map(len, found)) == most
        # Where a completion alone is longer, one token of the prompt is left in front of its end.
        assert [ids[1:] for ids in found] == [ids[1 - len(cut) :] for ids, cut in zip(expected, found, strict=True)]
        assert documents(LabelledTextEncoder, example, "messages", "label", most) == [expected[0][-most:]]


def test_rows_that_were_cut_behind_their_turns_are_not_read_from_a_cache(tmp_path):
    directory = directory_of(tmp_path, "nothing behind it")
    tokenizer = Tokenizer.from_directory(directory)
    for kind, marks in ((LabelledPairEncoder, ("pairs", "margins")), (LabelledTextEncoder, ("labels",))):
        before = type("Before", (kind,), {"fingerprint_marks": marks})
        found, old = (one(tokenizer, None, label=Label("label"), max_length=9).fingerprint for one in (kind, before))
        assert found != old


@pytest.mark.trap(
    "a reward model rates texts without the end token that it was trained on",
    "huggingface/trl PR#5813",
    "scores of another position",
    "training, rollouts and server read where transformers' model does",
)
@pytest.mark.parametrize("form", FORMS)
def test_every_reader_reads_where_transformers_does(tmp_path, form):
    """grpo.reward_model, /classify and validation; 1e-5, for transformers' norms are in float32."""
    directory, oracle = classifier(tmp_path, form)
    directory_of(tmp_path / "qwen3-tied", form, "qwen3")
    asked = write_jsonl(tmp_path / "asked.jsonl", [{"prompt": conversation(index)[0]} for index in range(12)])
    options = [f"data.train.path={asked}", f"grpo.reward_model.path={directory}", "grpo.rewards=[]", "train.steps=2"]
    options += ["data.max_length=128"]
    found = run(tiny_grpo(tmp_path, *options, name="drawn"))
    rows = samples_of(found)
    answered = [[*row["prompt"], {"role": "assistant", "content": row["completion"]}] for row in rows]
    right = scores_of(oracle, directory, answered)
    torch.testing.assert_close(torch.tensor([row["reward"] for row in rows]).double(), right, rtol=1e-5, atol=1e-5)

    with serving(directory, max_length=128) as url:
        given = [ask(url, "/classify", {"messages": one})[1]["data"][0]["scores"][0] for one in answered[:4]]
    torch.testing.assert_close(torch.tensor(given).double(), right[:4], rtol=1e-5, atol=1e-5)

    path = pairs(tmp_path)
    options = ["method=reward", f"data.train.path={path}", f"data.val.path={path}", "data.max_length=128"]
    options += [f"model.path={directory}", "model.init=pretrained", "train.steps=1", "train.validate_every=1"]
    rated = run(tiny_recipe(tmp_path, *options, "optimizer.lr=1e-10", "scheduler.warmup_steps=0", name="rated"))
    margins = margins_of(oracle, directory)
    first = next(row for row in metrics(rated) if "val_accuracy" in row)
    assert first["val_rewards_margin"] == pytest.approx(margins.mean().item(), rel=1e-5, abs=1e-5)
    assert first["val_accuracy"] == (margins > 0).double().mean().item()


@pytest.mark.parametrize(
    ("form", "changes"),
    [
        ("a newline behind the last turn", {}),
        # config.json names no padding, so that the export does, and it is what ends a conversation.
        ("Llama 3, padding ends turns", {"eos_token": "<|im_end|>"}),
    ],
)
def test_an_export_rates_as_training_logged(tmp_path, form, changes):
    """The margin of the last validation is that of transformers on the export."""
    directory = directory_of(tmp_path / "plain", form)
    told = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps({**told, **changes}))
    path = pairs(tmp_path)
    options = ["method=reward", f"data.train.path={path}", f"data.val.path={path}", "data.max_length=128"]
    options += [f"model.path={directory}", "train.steps=8", "train.validate_every=8", "checkpoint.every=8"]
    recipe = run(tiny_recipe(tmp_path, *options, "checkpoint.export=final"))
    out = recipe.run.directory / "export"
    margins = margins_of(AUTO.from_pretrained(out, dtype=torch.float64).eval(), out)
    last = [row for row in metrics(recipe) if "val_accuracy" in row][-1]
    assert last["val_rewards_margin"] == pytest.approx(margins.mean().item(), rel=1e-5)
    assert last["val_accuracy"] == (margins > 0).double().mean().item() and margins.std() > 1e-3
