"""The Markdown pages: every command in them runs, links lead somewhere, keys exist, tables agree with the code."""

import ast
import importlib
import json
import re
import shutil
import sys
from pathlib import Path
from xml.etree.ElementTree import fromstring

import pytest
import yaml

from dtrain.commands.cli import _parser
from dtrain.data.formats import formats
from dtrain.data.formats.labels import read_label
from dtrain.data.formats.pairs import normalise_pair
from dtrain.data.formats.prompts import normalise_prompt
from dtrain.losses import token_options
from dtrain.losses.policy import options as policy_options
from dtrain.losses.preference import options as preference_options
from dtrain.recipe import other_tools, spelling
from dtrain.rl.rewards import catalog as rewards
from dtrain.training import METHODS, load_recipe, recipe_keys
from dtrain.training.resume import DIGESTS
from tests.documented import MODELS, TINY, TINY_GRPO, Directory, tiny_model
from tests.pages import ROOT, Command, Page, all_pages
from tools import coming_from, metrics_reference, recipe_reference

PAGES = [str(path) for path in all_pages()]
PROMISED = (
    "dtrain/README.md",
    "README.md",
    "recipes/README.md",
    "docs/glossary.md",
    "docs/gpus.md",
    "docs/images.md",
    "docs/prompts.md",
    "docs/install.md",
    "docs/coming-from.md",
    "docs/metrics.md",
    "docs/trackers.md",
    "docs/models.md",
    "docs/plugins.md",
    "docs/python.md",
    "docs/real.md",
    "docs/recipe.md",
    "docs/traps.md",
    "docs/troubleshooting.md",
    *(f"docs/tutorials/{name}.md" for name in ("sft", "preferences", "grpo", "new-method", "two-nodes")),
    *(
        f"dtrain/{room}/README.md"
        for room in ("attention", "data", "parallel", "losses", "checkpoint", "rl", "methods")
    ),
)
SECTIONS = sorted({key.split(".")[0] for key in recipe_keys() if "." in key})
KEY = re.compile(rf"((?:{'|'.join(SECTIONS)})(?:\.\w+)+)(?:\[\d+\]\.(\w+))?(?:\s?[=:].*)?")
NOT_KEYS = {"model.plan", "launch.lost_after"}  # an attribute of the model; a former key, in CHANGELOG.md
OWN_NAMES = set(DIGESTS)  # of what a resume compares
SECTIONS_OF_OTHERS = {"env", "scheduler", "backend"}  # without a word for the whole


def page(path):
    return Page(ROOT / path)


@pytest.fixture(autouse=True)
def _own_methods():
    """Remove the methods that a page's script registers when a command imports it in this process."""
    methods = dict(METHODS)
    yield
    METHODS.clear()
    METHODS.update(methods)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("documented"))


def test_the_promised_pages_are_there_and_the_readme_leads_to_them():
    assert set(PROMISED) <= set(PAGES)
    assert len((ROOT / "README.md").read_text().splitlines()) < 250
    assert set(PROMISED) - {"README.md"} <= set(page("README.md").links)


def test_the_drawing_names_files_that_exist():
    texts = [text.text for text in fromstring((ROOT / "docs" / "how.svg").read_text()).iterfind(".//{*}text")]
    named = [text for text in texts if text.endswith(".py")]
    assert named and not [name for name in named if not (ROOT / "dtrain" / name).is_file()]


@pytest.mark.parametrize("path", PAGES)
def test_every_command_runs(path, model, tmp_path):
    found = page(path)
    makes_recipe = any(
        command.words[:2] == ("dtrain", "cp") and command.words[-1] == "my.yaml" for command in found.commands
    )
    directory = Directory(tmp_path).fill(model, makes_recipe=makes_recipe)
    for block in found.blocks:
        if block.language == "python" and (name := re.match(r"# (\w+\.py)\n", block.text)):
            (tmp_path / name[1]).write_text(block.text + "\n")
    for link in found.links:
        if link.startswith("examples/"):
            shutil.copy(ROOT / "docs" / link, tmp_path)
    try:
        for command in found.commands:
            try:
                directory.check(command)
            except AssertionError as error:
                raise AssertionError(f"{path}:{command.line}: {error}") from error
    finally:
        directory.close()


@pytest.mark.parametrize("path", PAGES)
def test_links_lead_somewhere(path):
    for link in page(path).links:
        if not link.startswith(("http://", "https://")):
            assert ((ROOT / path).parent / link.split("#")[0]).exists(), link


@pytest.mark.parametrize("path", PAGES)
def test_named_keys_commands_and_tools_exist(path):
    found, known = page(path), set(recipe_keys())
    theirs = {cell for table in found.tables if table[0][0] == "dtrain" for row in table[1:] for cell in row[1:]}
    others = {code for cell in theirs for code in re.findall(r"`([^`]+)`", cell)}
    commands = _parser().format_help()
    for code in found.inline:
        if (key := KEY.fullmatch(code)) and code not in others | NOT_KEYS and not key[1].endswith((".jsonl", ".py")):
            assert is_key(key[1], key[2], known), code
        if command := re.match(r"dtrain ([a-z]+)\b", code):
            assert re.search(rf"^\s+{command[1]}\s", commands, flags=re.MULTILINE), code
        for tool in re.findall(r"(?:^|[ /])(tools/[\w.-]+)", code):
            assert (ROOT / tool).is_file(), tool
        if re.fullmatch(r"(?:dtrain|tests|recipes)/[\w./-]+\.\w+", code):
            assert (ROOT / code).exists(), code


def test_a_key_of_another_tool_is_answered_with_the_one_of_its_row():
    (table,) = [table for table in page("dtrain/methods/README.md").tables if table[0][0] == "dtrain"]
    own = {key.rsplit(".", 1)[-1] for key in recipe_keys()}
    for ours, *theirs in table[1:]:
        for key in re.findall(r"`([^`]+)`", " ".join(theirs)):
            answer = spelling.explain_unknown_key(key) or ""
            told = any(name in answer for name in re.findall(r"`([^`]+)`", ours))
            assert told or not answer and key.rsplit(".", 1)[-1] in own | SECTIONS_OF_OTHERS, (key, answer)


def is_key(key, of_entry, known):
    """A key, a section of keys, a key of one of a list's entries, or an option of a policy loss."""
    if of_entry:
        return key in known and of_entry in ("fn", "weight", "kwargs", "path", "format", "name", "steps")
    if key.startswith("grpo.kwargs."):
        return key.removeprefix("grpo.kwargs.") in policy_options.RANGES
    return key in known | OWN_NAMES or any(one.startswith(f"{key}.") for one in known)


def test_the_reference_of_metrics_is_the_table_s():
    text = (ROOT / "docs" / "metrics.md").read_text()
    assert text == metrics_reference.reference(), "run tools/metrics_reference.py"


def test_the_key_reference_is_the_schema_s():
    assert (ROOT / "docs" / "recipe.md").read_text() == recipe_reference.reference(), "run tools/recipe_reference.py"
    rows = [row for table in page("docs/recipe.md").tables for row in table]
    told = {row[0].strip("`") for row in rows}
    assert all(row[-1] for row in rows)
    as_before = ("data.val.", "distill.sampling.")  # sections of a kind that stands there already
    assert {key for key in recipe_keys() if not key.startswith(as_before)} - told == set()


def test_the_recipes_of_other_tools_files_are_what_dtrain_makes_of_them():
    assert (ROOT / "docs" / "coming-from.md").read_text() == coming_from.page(), "run tools/coming_from.py"
    assert {*coming_from.FILES} == {tool.name for tool in other_tools.TOOLS}


@pytest.mark.parametrize("path", PAGES)
def test_code_that_is_shown_is_sound(path):
    for block in page(path).blocks:
        if block.language == "python":
            ast.parse(block.text)
        if block.language == "yaml":
            load_recipe(yaml.safe_load(block.text))
    for code in page(path).inline:
        if code.startswith('{"'):
            json.loads(code.replace(": ...", ': ""'))


@pytest.mark.parametrize("room", sorted(str(path.parent) for path in (ROOT / "dtrain").rglob("__init__.py")))
def test_the_map_of_a_room_names_its_files_and_no_others(room):
    room = Path(room)
    told = ast.get_docstring(ast.parse((room / "__init__.py").read_text()))
    files = {path.stem for path in room.glob("*.py")} | {path.parent.name for path in room.glob("*/__init__.py")}
    assert files - {"__init__", "__main__"} <= set(re.findall(r"\w+", told))
    for line in told.splitlines():
        if names := re.match(r"(?:    )?(\w+(?:, \w+)*) {2,}\S", line):
            assert set(names[1].split(", ")) <= files, line


def test_rows_that_are_shown_are_of_their_format():
    found, kinds = page("dtrain/data/README.md"), ("examples", "pairs", "labelled", "prompts")
    shown = [table for table in found.tables if any('`{"' in cell for row in table for cell in row)]
    assert len(shown) == len(kinds)
    read = {"examples": formats.normalise, "pairs": normalise_pair, "prompts": normalise_prompt}
    read["labelled"] = lambda row, name: formats.normalise(read_label(row)[1], name)
    for kind, table in zip(kinds, shown, strict=True):
        named = set()
        for cells in table[1:]:
            row = json.loads(re.search(r"`(\{\".*\})`", " ".join(cells))[1])
            name = formats.detect_format(row, kind)
            read[kind](row, name)
            named |= set(re.findall(r"`(\w+)`", cells[0]))
            assert kind in ("pairs", "labelled") or name in cells[0], cells
        assert kind in ("pairs", "labelled") or named == set(formats.FORMATS_BY_KIND[kind]) - {"preference"}


def test_the_tables_of_losses_and_rewards_are_the_code_s():
    tables = {table[0][0].strip("`"): table for table in page("dtrain/losses/README.md").tables}
    assert first_words(tables["sft.loss"]) == set(token_options.LOSSES)
    assert first_words(tables["dpo.loss"]) | {"aot_pair"} == set(preference_options.LOSSES)
    assert first_words(tables["grpo.loss"]) == set(policy_options.LOSSES)
    options = dict(policy_options.SHARED)
    for loss in policy_options.LOSSES.values():
        options |= loss.options
    told = {
        name: value
        for row in tables["option (default)"][1:]
        for name, value in re.findall(r"`(\w+)` \(`?([^)`]+)`?\)", row[0])
    }
    assert set(told) | {"dppo_ratio_cap"} == set(options)
    for name, value in told.items():
        if value != "the loss's own":
            assert {"null": None, "false": False}.get(
                value, value if not value[0].isdigit() else float(value)
            ) == options[name], name
    rows = {table[0][0]: table for table in page("dtrain/rl/README.md").tables}["name"]
    for row in rows[1:]:
        assert set(re.findall(r"`(\w+)`", row[2])) == set(rewards.REWARDS[row[0].strip("`")])
    assert len(rows) - 1 == len(rewards.REWARDS)


def first_words(table):
    return {re.match(r"`(\w+)`", row[0])[1] for row in table[1:]}


def test_the_method_that_is_shown_trains(model, tmp_path, monkeypatch):
    from dtrain.methods import Method

    (block,) = [block for block in page("dtrain/methods/README.md").blocks if "(Method)" in block.text]
    names = {}
    exec(compile(block.text, "README.md", "exec"), names)
    (shown,) = [
        one for one in names.values() if isinstance(one, type) and issubclass(one, Method) and one is not Method
    ]
    monkeypatch.setitem(METHODS, "unlike", shown)
    directory = Directory(tmp_path).fill(model, makes_recipe=False)
    directory.expect(
        ["run", "my.yaml", "method=unlike", "data.val.path=more.jsonl", "train.global_batch=4",
         "train.validate_every=1", "train.micro_batch=2", "metrics.tensorboard=false", "launch.device=cpu"]
    )  # fmt: skip
    rows = [json.loads(line) for line in (tmp_path / "runs" / "my" / "metrics.jsonl").read_text().splitlines()]
    assert [row["loss"] < 0 for row in rows if "loss" in row] == [True, True]
    assert [row["val_loss"] < 0 for row in rows if "val_loss" in row] == [True, True]


@pytest.mark.parametrize(
    ("name", "table", "words"),
    [
        (
            "focal",
            token_options,
            ["sft", "sft.loss=focal", "sft.kwargs.focus=1.5", "data.train.path=chat.jsonl"],
        ),
        (
            "zero_one",
            preference_options,
            ["dpo", "dpo.loss=zero_one", "dpo.kwargs.sharpness=1.5", "data.train.path=pairs.jsonl"],
        ),
        (
            "soft",
            policy_options,
            ["grpo", "grpo.loss=soft", "grpo.kwargs.softness=1.5", "data.train.path=problems.jsonl"],
        ),
    ],
)
def test_the_losses_that_are_shown_train(name, table, words, model, tmp_path, monkeypatch):

    formulas = table.__name__.replace("token_options", "head.weighted_sum").replace("options", "formulas")
    home = importlib.import_module(formulas)
    shown = page("dtrain/methods/README.md")
    (block,) = [block for block in shown.blocks if block.text.startswith(f"def {name}(")]
    (cells,) = [row for rows in shown.tables for row in rows if f'"{name}"' in row[-1]]
    names = dict(vars(home))
    exec(compile(block.text, "README.md", "exec"), names)
    monkeypatch.setitem(home.FORMULAS, name, names[name])
    whole = {**table.LOSSES, **eval("{" + re.search(r'`(".*)`', cells[-1])[1] + "}", dict(vars(table)))}
    for module in [one for one in sys.modules.values() if getattr(one, "LOSSES", None) is table.LOSSES]:
        monkeypatch.setattr(module, "LOSSES", whole)
    directory = Directory(tmp_path).fill(model, makes_recipe=False)
    words = [
        *words,
        "run.name=shown",
        f"model.path={MODELS[0]}",
        "data.max_length=64",
        *TINY,
        *(TINY_GRPO if name == "soft" else ()),
    ]
    directory.expect(["run", *words])
    directory.expect(["validate", *words, words[2].replace("1.5", "much")], status=1)
    rows = [json.loads(line) for line in (tmp_path / "runs" / "shown" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 2 and (name != "zero_one" or 0 < rows[0]["loss"] < 1)


@pytest.mark.parametrize(
    "words",
    [
        "rm -r runs",
        "dtrain frobnicate",
        "dtrain validate my.yaml train.stpes=3",
        "dtrain run my.yaml data.train.path=gone.jsonl",
        "dtrain export runs/gone/checkpoints/step-3 out",
        "dtrain eval Qwen/Qwen3-0.6B problems.jsonl --reward gone",
        "curl http://localhost:8000/health",
        "tools/gone",
        "torchrun --nproc-per-node 3 -m dtrain run my.yaml train.global_batch=4",
        "vllm serve Qwen/Qwen3-0.6B --gone",
    ],
)
def test_a_command_that_fails_or_that_no_rule_covers_is_seen(words, model, tmp_path):
    directory = Directory(tmp_path).fill(model, makes_recipe=False)
    with pytest.raises((AssertionError, SystemExit, FileNotFoundError)):
        directory.check(Command(tuple(words.split()), 1, False))
