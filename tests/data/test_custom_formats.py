"""A user's function as `data.*.format`: the numbers are those of the same data converted beforehand."""

import json
import sys

import pytest
import yaml

from dtrain.base.errors import RecipeError, UserError
from dtrain.commands.cli import main
from dtrain.launch import validate
from dtrain.recipe.saved import to_yaml
from tests.running import metrics, run, run_all, run_directory, trajectory, weights
from tests.tiny import tiny_dpo, tiny_grpo, tiny_recipe

FUNCTIONS = """
STEP = 1


def forum(row):
    ids = row.pop("body")[::STEP]  # the row is a copy, which may be changed
    return {"input_ids": ids, "labels": [-100 if hidden else token for token, hidden in zip(ids, row["hidden"])]}


def pair(row):
    return {"prompt_ids": row["p"], "chosen_ids": row["c"], "rejected_ids": row["r"]}


def question(row):
    return {"prompt_ids": row["p"], "wanted": row["w"], "answer": row["w"]}


def wrong(row):
    return [row]


def fails(row):
    if row["hidden"][0] == "x":
        row["missing"]
    return forum(row)


def unknown(row):
    return {"body": row["body"]}


def changes(row):
    return forum(row) if row["hidden"][0] != "x" else {"text": "another format"}
"""


@pytest.fixture
def root(tmp_path, monkeypatch):
    (tmp_path / "my_formats.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))  # imports add the working directory
    yield tmp_path
    sys.modules.pop("my_formats", None)


def convert(source, target, rename):
    """Write the rows of a file as a forum has them."""
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    target.write_text("".join(json.dumps(rename(row)) + "\n" for row in rows))
    return target


def forum_row(row):
    return {"content": row["input_ids"], "hidden": [label == -100 for label in row["labels"]]}


def forum(root, *overrides, function="my_formats:forum", name="custom", data="forum.jsonl"):
    """A recipe over tokenized rows of a forum, whose function reads the column `body`, and the file has `content`."""
    tiny_recipe(root)  # writes rows.jsonl
    if not (root / "forum.jsonl").exists():
        convert(root / "rows.jsonl", root / "forum.jsonl", forum_row)
    chosen = (f"data.train.path={root / data}", f"data.train.format={function}", "data.train.columns={body: content}")
    return tiny_recipe(root, *chosen, *overrides, name=name)


def assert_same_bits(custom, converted):
    assert trajectory(custom) == trajectory(converted) and len(trajectory(custom)) > 1
    ours, theirs = weights(custom), weights(converted)
    assert ours.keys() == theirs.keys() and all(ours[name].equal(theirs[name]) for name in ours)


def test_rows_of_a_function_give_the_bits_of_rows_converted_beforehand(root):
    for ranks in (1, 2):
        shape = ("train.steps=4", "checkpoint.every=4", "data.val=0.2", "train.validate_every=2")
        converted, custom = tiny_recipe(root, *shape, name=f"own{ranks}"), forum(root, *shape, name=f"custom{ranks}")
        run_all([converted, custom], ranks)
        assert_same_bits(custom, converted)


def test_pairs_prompts_sources_and_sets_of_eval_may_have_a_function(root):
    converted = [tiny_dpo(root, "checkpoint.every=2", name="dpo"), tiny_grpo(root, "checkpoint.every=2", name="grpo")]
    convert(root / "pairs.jsonl", root / "p.jsonl", lambda row: dict(zip("pcr", row.values(), strict=True)))
    convert(root / "prompts.jsonl", root / "q.jsonl", lambda row: {"p": row["prompt_ids"], "w": str(row["wanted"])})
    source = f"{{path: {root / 'p.jsonl'}, format: my_formats.pair}}"
    custom = [
        tiny_dpo(root, "checkpoint.every=2", "data.train.path=null", f"data.train.sources=[{source}]", name="dpo2"),
        tiny_grpo(
            root,
            *("checkpoint.every=2", f"data.train.path={root / 'q.jsonl'}", "data.train.format=my_formats:question"),
            *(f"eval.path={root / 'q.jsonl'}", "eval.format=my_formats:question", "eval.every=2", "eval.limit=3"),
            *("eval.sampling.max_new_tokens=3", "eval.rewards=[{fn: text_exact}]"),
            name="grpo2",
        ),
    ]
    run_all([*converted, *custom])
    for ours, theirs in zip(custom, converted, strict=True):
        assert_same_bits(ours, theirs)
    evaluated = [row["step"] for row in metrics(custom[1]) if "eval_reward_mean" in row]
    answers = (run_directory(custom[1]) / "evals.jsonl").read_text().splitlines()
    assert evaluated and evaluated[-1] == 10 and len(answers) == 3 * len(evaluated)


def test_a_changed_function_reads_the_rows_again_and_a_resume_refuses_other_tokens(root):
    cache = ("data.cache_dir=" + str(root / "cache"), "checkpoint.every=2")
    run(forum(root, *cache, "train.steps=2"))

    def edit(old, new):
        module = root / "my_formats.py"
        module.write_text(module.read_text().replace(old, new))
        sys.modules.pop("my_formats", None)

    def num_caches():
        return len(list((root / "cache").glob("*/meta.json")))

    assert num_caches() == 1
    edit("STEP = 1", "STEP = 1  # the same tokens")
    run(forum(root, *cache, "train.steps=4"))
    assert num_caches() == 2  # tokenised again, and continued, because the tokens are the same
    edit("STEP = 1 ", "STEP = -1 ")
    with pytest.raises(UserError, match="data.fingerprint"):
        run(forum(root, *cache, "train.steps=6"))


def test_worker_processes_convert_rows(root):
    forum(root)
    many = (root / "forum.jsonl").read_text() * 300  # above the size from which processes tokenise
    (root / "many.jsonl").write_text(many)
    assert len(many) > 2 << 20
    shape = ("train.steps=2", "scheduler.warmup_steps=0", "data.num_workers=2")
    custom = forum(root, *shape, data="many.jsonl")
    (root / "many-rows.jsonl").write_text((root / "rows.jsonl").read_text() * 300)
    converted = tiny_recipe(root, *shape, f"data.train.path={root / 'many-rows.jsonl'}", name="many")
    run_all([custom, converted])
    assert trajectory(custom) == trajectory(converted)
    lines = many.splitlines()
    row = json.loads(lines[15_000])
    lines[15_000] = json.dumps(row | {"hidden": ["x", *row["hidden"][1:]]})
    (root / "many.jsonl").write_text("\n".join(lines))
    with pytest.raises(
        UserError, match=r"many\.jsonl:15001: my_formats:fails failed for this row: KeyError: 'missing'"
    ):
        run(forum(root, *shape, function="my_formats:fails", name="worse", data="many.jsonl"))


@pytest.mark.parametrize(
    ("function", "told"),
    [
        ("my_formats:wrong", "forum.jsonl:1: my_formats:wrong returned a list for this row. It must return a dict"),
        ("my_formats:fails", "forum.jsonl:3: my_formats:fails failed for this row: KeyError: 'missing'"),
        ("my_formats:unknown", "forum.jsonl:1: no known format has the keys body."),
        ("my_formats:unknown", "(of the row that my_formats:unknown returned)"),
        ("my_formats:changes", "forum.jsonl:3: the source's format is tokenized, but this row has no input_ids"),
        ("my_formats:changes", "(the row that my_formats:changes returned)"),
        (
            "my_formats:form",
            "data.train.format=my_formats:form: my_formats has no form. Did you mean my_formats:f",
        ),
        ("no_module:forum", "data.train.format=no_module:forum cannot be imported"),
        ("chatml", "data.train.format=chatml is not one of auto, tokenized, messages"),
        ("chatml", "Did you mean messages?"),
        ("forum", "nor an import path"),
    ],
)
def test_mistakes_name_file_line_and_function(root, function, told):
    recipe = forum(root, function=function)
    lines = (root / "forum.jsonl").read_text().splitlines()
    row = json.loads(lines[2])
    lines[2] = json.dumps(row | {"hidden": ["x", *row["hidden"][1:]]})
    (root / "forum.jsonl").write_text("\n".join(lines))
    with pytest.raises(RecipeError) as raised:
        validate(yaml.safe_load(to_yaml(recipe)))
    assert told in str(raised.value)


def test_preview_and_validate_show_the_function(root, capsys):
    recipe = forum(root)
    (root / "my.yaml").write_text(to_yaml(recipe))
    assert main(["preview", "my.yaml", "--samples", "1"]) == 0
    printed = capsys.readouterr()
    assert "forum.jsonl: format tokenized (detected) in rows from my_formats:forum" in printed.out + printed.err
    assert any("ok: custom" in line for line in validate("my.yaml"))
