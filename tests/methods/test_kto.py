"""KTO: transformers' loss, divergence and gradient norm, the same numbers on every mesh, and its rows."""

import json
import random
from types import SimpleNamespace

import pytest
import torch

from dtrain.base.errors import Stopped, UserError
from dtrain.data.formats.labels import is_desirable, read_label
from dtrain.data.sources.sources import open_rows
from dtrain.data.text.tokenizer import Tokenizer
from dtrain.methods.kto import KtoMethod
from dtrain.training.dry_run import dry_run
from dtrain.training.inputs import World
from tests.data.test_sources import section, split
from tests.problem_lines import lines, preflight
from tests.running import interrupt, metrics, run, trajectory
from tests.tiny import VOCAB, save_weights, tiny_recipe, write_model

transformers = pytest.importorskip("transformers")

EXACT = 1e-9  # relative, float64
ROWS_IN_ALL, ROWS_A_STEP = 40, 12
FIELDS = ("loss", "grad_norm", "kl", "rewards_chosen", "rewards_rejected", "rewards_margin", "logps_chosen")


def rows_of(count, seed=0):
    """[(ids, tokens of the prompt, label)], prompts and replies of many lengths."""
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        prompt, reply = draw.randrange(1, 6), draw.randrange(1, 9)
        rows.append(([draw.randrange(2, VOCAB) for _ in range(prompt + reply)], prompt, draw.random() < 0.6))
    return rows


def recipe_of(root, *overrides, name="run", count=ROWS_IN_ALL, family="qwen3"):
    data = root / "labelled.jsonl"
    if not data.exists():
        lines = [
            {"input_ids": ids, "labels": [-100] * prompt + ids[prompt:], "label": label}
            for ids, prompt, label in rows_of(count)
        ]
        data.write_text("\n".join(map(json.dumps, lines)))
        save_weights(write_model(root / f"{family}-tied", family), seed=1)
        save_weights(write_model(root / "reference", family), seed=2)
    fixed = (
        "method=kto",
        "run.seed=3",
        f"data.train.path={data}",
        "model.init=pretrained",
        f"kto.reference={root / 'reference'}",
    )
    shape = ("data.packing=false", "data.shuffle=false", "train.global_batch=12", "train.micro_batch=12")
    more = (
        "train.steps=3",
        "scheduler.warmup_steps=0",
        "kto.beta=0.3",
        "kto.desirable_weight=1.5",
        "kto.undesirable_weight=0.7",
    )
    return tiny_recipe(root, *fixed, *shape, *more, *overrides, name=name, family=family)


def log_p(model, documents):
    """Σ log p of each document's reply, [documents]."""
    found = []
    for ids, prompt in documents:
        logits = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        found.append(logits.gather(1, torch.tensor(ids[1:])[:, None])[prompt - 1 :].sum())
    return torch.stack(found)


def test_the_first_step_is_that_of_transformers(tmp_path):
    recipe = recipe_of(tmp_path, "train.steps=1")
    run(recipe)
    load = transformers.AutoModelForCausalLM.from_pretrained
    policy, reference = (load(tmp_path / name, dtype=torch.float64) for name in ("qwen3-tied", "reference"))
    rows = rows_of(ROWS_IN_ALL)
    (row,) = metrics(recipe)
    own = [(ids, prompt) for ids, prompt, _ in rows[:ROWS_A_STEP]]
    wanted = torch.tensor([label for _, _, label in rows[:ROWS_A_STEP]])
    with torch.no_grad():
        ratios = {}  # of each prompt with the reply of the row that stands so far behind it
        for way in range(1, ROWS_IN_ALL):
            replies = [rows[(index + way) % ROWS_IN_ALL] for index in range(ROWS_A_STEP)]
            mixed = [(ids[:p] + other[q:], p) for (ids, p), (other, q, _) in zip(own, replies, strict=True)]
            ratios[way] = (log_p(policy, mixed) - log_p(reference, mixed)).mean().item()
        then = log_p(reference, own)
    (kl,) = {max(0.0, one) for one in ratios.values() if abs(one - row["kl"]) < 1e-5}
    logps = log_p(policy, own)
    rewards = 0.3 * (logps - then)
    losses = torch.where(wanted, 1.5 * torch.sigmoid(0.3 * kl - rewards), 0.7 * torch.sigmoid(rewards - 0.3 * kl))
    losses.mean().backward()
    norm = torch.stack([one.grad.norm() for one in policy.parameters() if one.grad is not None]).norm()
    expected = {
        "loss": losses.mean(), "grad_norm": norm, "kl": torch.tensor(kl),
        "rewards_chosen": rewards[wanted].mean(), "rewards_rejected": rewards[~wanted].mean(),
        "rewards_margin": rewards[wanted].mean() - rewards[~wanted].mean(), "logps_chosen": logps[wanted].mean(),
    }  # fmt: skip
    assert kl > 0
    # transformers computes norms and rotary tables in float32
    assert {name: row[name] for name in FIELDS} == pytest.approx(
        {name: value.item() for name, value in expected.items()}, rel=2e-5
    )


def test_validation_does_not_depend_on_the_batch_and_a_resumed_run_goes_on(tmp_path):
    recipe_of(tmp_path)
    val = (f"data.val.path={tmp_path / 'labelled.jsonl'}", "train.validate_every=3", "train.steps=3")
    few, many = (
        recipe_of(tmp_path, *val, f"train.micro_batch={size}", "checkpoint.every=1", name=str(size)) for size in (12, 4)
    )
    whole = run(few)
    with pytest.raises(Stopped):
        interrupt(many, 1, 2)
    run(many)
    losses = [[row[0] for row in trajectory(one)] for one in (many, whole)]
    assert losses[0] == pytest.approx(losses[1], rel=EXACT)
    (expected,), (found,) = ([row for row in metrics(one) if "val_loss" in row] for one in (few, many))
    assert found["val_loss"] == pytest.approx(expected["val_loss"], rel=EXACT)
    still = ("optimizer.lr=1e-30", "scheduler.warmup_steps=0")
    other = run(recipe_of(tmp_path, *val, "train.steps=1", "train.validate_every=1", *still, name="other"))
    first = run(recipe_of(tmp_path, *val[:1], "train.steps=1", "train.validate_every=1", *still,
                          "train.global_batch=5", "train.micro_batch=5", name="five"))  # fmt: skip
    values = [[row["val_kl"], row["val_loss"]] for one in (other, first) for row in metrics(one) if "val_kl" in row]
    assert values[0] == pytest.approx(values[1], rel=EXACT) and values[0][0] > 0


def test_apo_zero_compares_with_zero(tmp_path):
    recipe = run(recipe_of(tmp_path, "kto.loss=apo_zero_unpaired", "train.steps=1"))
    (row,) = metrics(recipe)
    load = transformers.AutoModelForCausalLM.from_pretrained
    policy, reference = (load(tmp_path / name, dtype=torch.float64) for name in ("qwen3-tied", "reference"))
    own = [(ids, prompt) for ids, prompt, _ in rows_of(ROWS_IN_ALL)[:ROWS_A_STEP]]
    wanted = torch.tensor([label for _, _, label in rows_of(ROWS_IN_ALL)[:ROWS_A_STEP]])
    with torch.no_grad():
        rewards = 0.3 * (log_p(policy, own) - log_p(reference, own))
    losses = torch.where(wanted, 1.5 * torch.sigmoid(-rewards), 0.7 * torch.sigmoid(rewards))
    assert row["loss"] == pytest.approx(losses.mean().item(), rel=2e-5) and "kl" not in row


ROWS = {
    "texts": ({"prompt": "w3 w4", "completion": " w5", "label": False}, [("w3 w4 w5", False)]),
    "csv": ({"prompt": "w3 w4", "completion": " w5", "label": "True"}, [("w3 w4 w5", True)]),
    "llama factory": ({"instruction": "w3", "output": "w5", "kto_tag": False}, [("q w3 a w5", False)]),
    "a pair": (
        {"prompt": "w3", "chosen": " w5", "rejected": " w6 w7"},
        [("w3 w5", True), ("w3 w6 w7", False)],
    ),
}  # fmt: skip


TEMPLATE = """{% for m in messages %}{{ ' w8 ' if m.role == 'user' else ' w9 ' }}{{ m.content }}\
{{ ' w1' if m.role == 'assistant' }}{% endfor %}{{ ' w9 ' if add_generation_prompt }}"""


@pytest.mark.parametrize("name", ROWS)
def test_rows_become_replies_that_are_wanted_or_not(tmp_path, name):
    row, expected = ROWS[name]
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row))
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    data = section(train=split(str(path)), packing=False, shuffle=False, chat_template=str(template))
    tokenizer = Tokenizer.from_directory(write_model(tmp_path / "model"))
    rows = open_rows(data, kind="labelled", tokenizer=tokenizer, print_line=lambda line: None, progress=False)
    words = [text.replace("q ", "w8 ").replace("a ", "w9 ") for text, _ in expected]
    found = []
    for index in range(len(rows.samples)):
        ((ids, trained),) = rows.samples[index]
        assert trained[-1] and not trained[0]
        found.append((tokenizer.decode(ids.tolist()).removesuffix(" w1"), is_desirable(rows.samples, index)))
    assert found == [(text, good) for text, (_, good) in zip(words, expected, strict=True)]


def test_a_label_that_is_none_is_told():
    assert read_label({"label": 0, "x": 1}) == read_label({"label": 0.0, "x": 1}) == (False, {"x": 1})
    with pytest.raises(UserError, match="label is 0.7, but it must be true"):
        read_label({"label": 0.7})
    with pytest.raises(UserError, match=r"the row has no label.*data.train.columns=\{label: NAME\}"):
        read_label({"prompt": "a"})


def test_what_cannot_be_is_told_before_the_run(tmp_path):
    recipe = recipe_of(tmp_path, "kto.reference=none", "kto.desirable_weight=0", "kto.undesirable_weight=0")
    problems = preflight(recipe, 1)
    assert any("kto.reference=none: the reward of a reply" in problem for problem in problems)
    assert any("are both 0" in problem for problem in problems)
    lone_reply = recipe_of(
        tmp_path, f"data.val.path={tmp_path / 'one.jsonl'}", "train.validate_every=1", "launch.device=cpu"
    )
    (tmp_path / "one.jsonl").write_text((tmp_path / "labelled.jsonl").read_text().splitlines()[0])
    assert any("data.val has one reply" in line for line in lines(dry_run(lone_reply, World(1)).problems))


@pytest.mark.parametrize(("total", "estimate"), [(-3.0, 0.0), (3.0, 0.75)])
def test_the_estimate_is_never_below_zero(total, estimate):
    alone = SimpleNamespace(mesh=SimpleNamespace(dp=SimpleNamespace(size=lambda: 1)))
    assert KtoMethod._divergence(None, alone, torch.tensor([total, 4.0])).item() == estimate
