"""Method reward: loss and gradient against transformers' classifiers with TRL's formula, and the same numbers on every
mesh."""

import io
import json

import peft
import pytest
import torch
import torch.nn.functional as F
import transformers

from dtrain import models
from dtrain.base.batch import collate
from dtrain.base.errors import UserError
from dtrain.checkpoint.huggingface.export import export
from dtrain.checkpoint.huggingface.model_files import classifier_config
from dtrain.commands.preview import preview
from dtrain.data.formats.labels import Label
from dtrain.inference.generate import load
from dtrain.policy.other_models import add_targets_at_last_tokens
from dtrain.training.dry_run import dry_run
from dtrain.training.inputs import World
from tests.problem_lines import lines, preflight
from tests.running import assert_parity, metrics, run, trajectory, weights
from tests.tiny import save_weights, tiny_recipe, write_model, write_pairs, write_rows

AUTO = transformers.AutoModelForSequenceClassification


def judged_rows(root, task):
    """Tokenized rows with a margin each second one, a class of three, or a number."""
    path = root / f"{task}.jsonl"
    if not path.exists():
        written = write_pairs(path, count=24) if task == "pairs" else write_rows(path, count=24)
        given = [json.loads(line) for line in written.read_text().splitlines()]
        for index, row in enumerate(given):
            if task != "pairs":
                row["label"] = index * 7 % 3 if task == "classes" else index * 0.37 - 2
            elif index % 2:
                row["margin"] = index * 0.1
        path.write_text("".join(json.dumps(row) + "\n" for row in given))
    return path


def recipe_at(root, task, *overrides, **options):
    """Return the recipe of a reward model over a tiny one from scratch, 3 steps."""
    section = ["method=reward", f"reward.task={task}", f"data.train.path={judged_rows(root, task)}", "train.steps=3"]
    section += ["reward.num_labels=3"] if task == "classes" else []
    section += ["reward.center_rewards_coefficient=0.01"] if task == "pairs" else []
    return tiny_recipe(root, *section, *overrides, **options)


def oracle(directory, labels=1, **changes):
    """Return transformers' classifier of a tiny model, in float64."""
    config = {**json.loads((directory / "config.json").read_text()), "num_labels": labels, **changes}
    known = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
    torch.manual_seed(3)
    return AUTO.from_config(known, dtype=torch.float64, experts_implementation="eager").eval()


def written(task, row):
    """The documents of a row, as one batch of transformers: [n, S], ids and mask."""
    if task == "pairs":
        rows = [row["prompt_ids"] + row["chosen_ids"], row["prompt_ids"] + row["rejected_ids"]]
    else:
        rows = [row["input_ids"]]
    return rows


def loss_of(model, task, rows):
    """TRL 1.16's RewardTrainer.compute_loss, and transformers' losses of the two kinds of labels."""
    losses = []
    for row in rows:
        scores = [model(torch.tensor([ids])).logits[0] for ids in written(task, row)]
        if task == "pairs":
            chosen, rejected = scores
            loss = -F.logsigmoid(chosen - rejected - row.get("margin", 0.0)) + 0.01 * (chosen + rejected) ** 2
        elif task == "classes":
            loss = F.cross_entropy(scores[0][None], torch.tensor([row["label"]]))
        else:
            loss = (scores[0] - row["label"]) ** 2
        losses.append(loss.squeeze())
    return torch.stack(losses).mean()


OTHERS = [
    ("pairs", "qwen3-moe"),
    ("classes", "mixtral"),
    ("numbers", "gpt-oss"),
    ("pairs", "qwen3.5"),
    ("pairs", "deepseek-v3"),
]


@pytest.mark.trap(
    "a reward read one token beside the end",
    "EleutherAI/gpt-neox PR#1285",
    "scores that no other program gives",
    "transformers' classifier has the same step",
)
@pytest.mark.parametrize(
    ("task", "family"),
    [
        ("pairs", "qwen3"),
        ("classes", "llama"),
        ("numbers", "gemma3"),
        *OTHERS,
    ],
)
def test_a_step_is_transformers_and_its_export_too(tmp_path, task, family):
    """All rows in one step: loss and gradient norm; then the outputs of the export, and of `dtrain export`. To 1e-6,
    outputs 2e-6: transformers has norms and rotary tables in float32."""
    cap = {"final_logit_softcapping": 2.0} if family == "gemma3" else {}  # of a vocabulary's head alone
    plain = write_model(tmp_path / "plain", family, **cap)
    classifier = oracle(plain, labels=3 if task == "classes" else 1, pad_token_id=0)
    classifier.save_pretrained(plain)
    options = [f"model.path={plain}", "model.init=pretrained", "train.steps=1", "train.global_batch=24"]
    options += ["scheduler.warmup_steps=0"]
    options += ["data.packing=false", "checkpoint.every=1", "checkpoint.export=final", "data.max_length=64"]
    recipe = run(recipe_at(tmp_path, task, *options))
    rows = [json.loads(line) for line in judged_rows(tmp_path, task).read_text().splitlines()]
    loss = loss_of(classifier, task, rows)
    loss.backward()
    norm = torch.nn.utils.get_total_norm([one.grad for one in classifier.parameters()])
    (found,) = [row for row in metrics(recipe) if "loss" in row]
    assert found["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert found["grad_norm"] == pytest.approx(norm.item(), rel=1e-6)
    again = tmp_path / "again"
    export(recipe.run.directory, again)
    for out in (recipe.run.directory / "export", again):
        theirs = AUTO.from_pretrained(out, dtype=torch.float64, experts_implementation="eager").eval()
        mine = models.from_pretrained(out, torch.float64, labels=0)
        ids = torch.tensor(written(task, rows[0])[0])[None]
        with torch.no_grad():
            last = (ids[0] != 0).nonzero()[-1].item()
            torch.testing.assert_close(theirs(ids).logits[0], mine(ids)[0, last], rtol=2e-6, atol=1e-7)
            assert (theirs(ids).logits - classifier(ids).logits).abs().max() > 1e-4  # it was trained
    with pytest.raises(UserError, match="method=reward trains it"):
        models.from_pretrained(again)
    with pytest.raises(UserError, match="rates or classifies texts"):
        load(recipe.run.directory / "checkpoints" / "step-1", torch.float64, torch.device("cpu"))


def test_a_language_model_begins_one_whose_body_stays(tmp_path):
    """A tied model's files, a new head on them, the head alone trained: the export has the files' own body."""
    plain = save_weights(write_model(tmp_path / "plain", "qwen3"))
    options = [f"model.path={plain}", "model.init=pretrained", "train.train_only=[score.weight]"]
    recipe = run(recipe_at(tmp_path, "pairs", *options, "checkpoint.every=3", "parallel.tp=2"), 2)
    export(recipe.run.directory, tmp_path / "out")
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    before = transformers.AutoModelForCausalLM.from_pretrained(plain)
    for name, one in before.model.state_dict().items():
        assert torch.equal(theirs.model.state_dict()[name], one)
    first = models.build(models.read_config(plain, 1), torch.float64)
    models.init_weights(first, recipe.run.seed)
    moved = (theirs.score.weight.double() - first.score.weight).abs().max()
    assert 1e-4 < moved < 0.1  # three steps of at most 1e-2 from where the seed drew it


@pytest.mark.parametrize(
    ("family", "shape"),
    [
        ("qwen3-moe", ["parallel.ep=2", "parallel.tp=2", "moe.balance=0.1"]),
        ("qwen3.5", ["parallel.cp=2"]),
    ],
)
def test_mixtures_and_linear_attention_on_meshes(tmp_path, family, shape):
    options = ["train.steps=3", "checkpoint.every=3", "train.global_batch=4"]
    of_one = [word for word in shape if not word.startswith("parallel.")]
    one = run(recipe_at(tmp_path, "pairs", *options, *of_one, "train.micro_batch=4", family=family, name="one"))
    four = recipe_at(tmp_path, "pairs", *options, *shape, "train.micro_batch=2", family=family, name="four")
    assert_parity(run(four, 4), trajectory(one), weights(one))


@pytest.mark.parametrize("begins", ["a language model", "a classifier"])
def test_an_adapter_beside_the_head(tmp_path, begins):
    """One process and dp2·tp2 to 1e-9; the adapter in PEFT, merged by transformers' names, and read here: equal."""
    plain = save_weights(write_model(tmp_path / "plain", "qwen3"))
    if begins == "a classifier":
        oracle(plain, pad_token_id=0).save_pretrained(plain)
    options = [f"model.path={plain}", "model.init=pretrained", "lora={rank: 4, modules_to_save: [score]}"]
    options += ["train.steps=4", "checkpoint.every=4", "optimizer.lr=5e-2", "train.global_batch=4"]
    one = run(recipe_at(tmp_path, "pairs", *options, "train.micro_batch=4", name="one"))
    two = run(recipe_at(tmp_path, "pairs", *options, "train.micro_batch=2", "parallel.tp=2", name="two"), 4)
    assert_parity(two, trajectory(one), weights(one))
    export(one.run.directory, tmp_path / "out")
    export(one.run.directory, tmp_path / "alone", form="adapter")
    export(tmp_path / "alone", tmp_path / "merged")
    auto, ids = transformers.AutoModelForSequenceClassification, torch.tensor([[3, 4, 5, 1]])
    base = auto.from_pretrained(plain, num_labels=1, dtype=torch.float64, pad_token_id=0)
    with torch.no_grad():
        before = base(ids).logits.clone()
        theirs = peft.PeftModel.from_pretrained(base, str(tmp_path / "alone")).eval()(ids).logits
        mine = models.from_pretrained(tmp_path / "alone", torch.float64, labels=0)(ids)[0, -1:]
        merged = [auto.from_pretrained(tmp_path / out, dtype=torch.float64)(ids).logits for out in ("out", "merged")]
    assert (theirs - before).abs().max() > 0.1
    for found in (mine, *merged):
        torch.testing.assert_close(found, theirs, rtol=1e-5, atol=1e-6)


def test_weights_of_another_head_are_refused(tmp_path):
    rates = run(recipe_at(tmp_path, "numbers", "checkpoint.every=3", name="rates"))
    speaks = run(tiny_recipe(tmp_path, "train.steps=3", "checkpoint.every=3", name="speaks"))
    with pytest.raises(UserError, match="is of a language model, without a head of rewards"):
        run(recipe_at(tmp_path, "numbers", f"checkpoint.init_from={speaks.run.directory}", name="other"))
    with pytest.raises(UserError, match="is of a model that rates texts"):
        run(tiny_recipe(tmp_path, f"checkpoint.init_from={rates.run.directory}", name="another"))


def test_numbers_and_names_of_columns_are_read_as_files_have_them(tmp_path):
    classes, numbers, margins = Label("label", 3), Label("label"), Label("margin")
    assert [classes.read({"label": one}) for one in ("2", 1.0, True, 0)] == [2, 1, 1, 0]
    assert [numbers.read({"label": one}) for one in ("-0.5", 3)] == [-0.5, 3]
    assert [margins.read(row) for row in ({"margin": ""}, {}, {"margin": "1"})] == [0, 0, 1]
    for one in (1.5, "1.5", "nan", ""):
        with pytest.raises(UserError, match="label"):
            classes.read({"label": one})
    unread = "no column of this name is read"
    for task, column in (("numbers", "label"), ("pairs", "margin")):
        given = recipe_at(tmp_path, task, f"data.train.columns={{{column}: score}}")
        assert unread not in "\n".join(preflight(given, 1))
    assert unread in "\n".join(preflight(recipe_at(tmp_path, "pairs", "data.train.columns={label: a}"), 1))


def test_a_padding_token_that_ends_texts_is_none_of_a_classifiers(tmp_path):
    """transformers reads the last token that is not it."""
    directory = write_model(tmp_path / "plain")
    said = json.loads((directory / "tokenizer.json").read_text())
    said["added_tokens"] = [{"id": 1, "content": "w1"}, {"id": 0, "content": "w0"}]
    (directory / "tokenizer.json").write_text(json.dumps(said))
    for pad, expected in (("w0", 0), ("w1", None)):
        (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "w1", "pad_token": pad}))
        assert (
            classifier_config({"eos_token_id": 5}, "LlamaForSequenceClassification", 1, directory).get("pad_token_id")
            == expected
        )


@pytest.mark.trap(
    "a score read at the first end of turn, which is the padding token too",
    "huggingface/transformers #35352",
    "the prompt is rated, not the answer",
    "the last token that is no padding",
)
def test_a_score_is_read_at_the_last_token_that_is_no_padding():
    """Two packed documents end with pad_token_id 0, one is padding alone, and one stands in a padded row."""
    ids = [torch.tensor(one) for one in ([4, 5, 0, 6, 0, 0, 0, 0], [7, 8])]
    seq_ids = [torch.tensor(one) for one in ([0, 0, 0, 1, 1, 1, 2, 2], [0, 0])]
    rows = [
        {"input_ids": one, "labels": one, "position_ids": torch.arange(len(one)), "seq_ids": owners}
        for one, owners in zip(ids, seq_ids, strict=True)
    ]
    found = add_targets_at_last_tokens(collate(rows), torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64), pad=0)
    assert (found["labels"] == 0).nonzero().tolist() == [[0, 1], [0, 3], [0, 6], [1, 1]]
    assert found["targets"][found["labels"] == 0].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert found["targets"].sum() == 10


@pytest.mark.parametrize(
    ("task", "overrides", "answer"),
    [
        ("classes", ["reward.num_labels=null"], "reward.num_labels is missing"),
        ("classes", ["reward.num_labels=1"], "one class leaves nothing to predict"),
        ("numbers", ["reward.num_labels=4"], "reward.task=numbers has one output"),
        ("pairs", ["reward.center_rewards_coefficient=-1"], "must be a finite number, at least 0"),
        ("pairs", ["lora={}"], "Set lora.modules_to_save=[score]"),
        ("pairs", ["lora={modules_to_save: [norm]}"], "Set lora.modules_to_save=[norm, score]"),
        ("pairs", ["method=sft"], "reward.task is read only by method=reward"),
    ],
)
def test_mistakes_are_named_before_a_run(tmp_path, task, overrides, answer):
    assert answer in "\n".join(preflight(recipe_at(tmp_path, task, *overrides), 1))


@pytest.mark.parametrize(("task", "shown"), [("classes", "- label 1:"), ("pairs", "- margin 0.1:\n- chosen:")])
def test_a_preview_shows_what_a_row_is_worth(tmp_path, task, shown):
    out = io.StringIO()
    preview(recipe_at(tmp_path, task, "data.shuffle=false"), 2, out=out)
    assert shown in out.getvalue()


@pytest.mark.parametrize(
    ("task", "change", "answer"),
    [
        ("classes", {"label": 3}, "label is 3, but with reward.num_labels=3 it must be a whole number from 0 to 2"),
        ("classes", {"label": None}, "the row has no label"),
        ("numbers", {"label": "good"}, "label is 'good', but it must be a finite number"),
        ("pairs", {"margin": "wide"}, "margin is 'wide', but it must be a finite number"),
    ],
)
def test_a_row_that_is_wrong_is_named(tmp_path, task, change, answer):
    path = judged_rows(tmp_path, task)
    first, *rest = path.read_text().splitlines()
    path.write_text("\n".join([json.dumps({**json.loads(first), **change}), *rest]) + "\n")
    result = dry_run(recipe_at(tmp_path, task, "launch.device=cpu"), World(1))
    assert f"{path}:1: {answer}" in "\n".join(lines(result.problems))
