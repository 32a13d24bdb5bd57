"""Files from the repositories of other tools: each is converted, and its recipe trains a tiny model.

`files/` has a table for each tool, with the keys and values of its example files and no other text. Fields of an entry:

    name     the file in the tool's repository
    method   what the user types behind the file, if only the tool's command names the method
    stops    the keys that dtrain cannot express and that may change numbers, as the error of `dtrain run` names them
    file     keys and values. Chat templates are replaced by one in words of the tiny tokenizer

The model, the data and the sizes are replaced by tiny ones. Formats and columns of the data, the loss, the adapter, the
optimizer, the schedule and all other settings are those of the file.
"""

import json
from pathlib import Path

import pytest
import yaml

from dtrain.recipe.other_tools import TOOLS
from dtrain.training import METHODS, convert_file, load_recipe, recipe_and_problems
from tests import running
from tests.tiny import save_weights, write_model

DIRECTORY = Path(__file__).parent / "files"
TABLES = {"LLaMA-Factory": "llama_factory", "NeMo-RL": "nemo_rl", "alignment-handbook": "alignment_handbook"}
TEMPLATE = "{% for m in messages %}{{ m.role ~ ' ' ~ m.content ~ ' w1 ' }}{% endfor %}"


def entries():
    for tool in TOOLS:
        table = DIRECTORY / f"{TABLES.get(tool.name, tool.name.lower())}.yaml"
        if tool.name != "Unsloth":  # its files are scripts
            for entry in yaml.safe_load(table.read_text()):
                yield pytest.param(tool.name, entry, id=f"{tool.name}: {entry['name']}")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("files")
    # nf4 has blocks of 64 weights
    model = save_weights(write_model(root / "model", hidden_size=64, intermediate_size=64))
    (model / "chat_template.jinja").write_text(TEMPLATE)
    return root


def test_there_are_enough_files_of_each_tool():
    names = [parameters.values[0] for parameters in entries()]
    assert len(names) >= 50 and all(names.count(tool.name) >= 5 for tool in TOOLS if tool.name != "Unsloth")


def convert(entry, root):
    """Return the conversion of an entry, its file, and what the user types behind the file."""
    typed = [f"method={entry['method']}"] if "method" in entry else []
    file = root / "file.yaml"
    file.write_text(yaml.safe_dump(entry["file"], sort_keys=False))
    return convert_file(file, typed), file, typed


@pytest.mark.parametrize(("tool", "entry"), list(entries()))
def test_a_file_is_converted_or_what_dtrain_cannot_express_is_named(tool, entry, root):
    made, file, typed = convert(entry, root)
    assert made.tool in (tool, "TRL" if tool == "alignment-handbook" else tool)
    stops = [keys for keys, _ in made.describe_blocking()]
    assert stops == entry.get("stops", [])
    loaded, problems = recipe_and_problems(file, typed)
    texts = [str(problem) for problem in problems]
    if made.method not in METHODS:
        assert any(text.startswith(f"method={made.method} is not one of") for text in texts)
        return
    for keys in stops:
        assert any(text.startswith(f"{keys}: ") for text in texts)
    assert bool(stops) == bool(texts) == (not loaded.origin_notes)


@pytest.mark.processes  # those of data.num_workers, and of rewards that judge answers
@pytest.mark.parametrize(("tool", "entry"), list(entries()))
def test_the_recipe_of_a_file_trains(tool, entry, root):
    """The recipe as the user would run it, except for its sizes."""
    made, _, _ = convert(entry, root)
    if made.method not in METHODS:  # the test above checks that dtrain says so
        return
    recipe = load_recipe(tiny(made, root))
    running.run(recipe)
    rows = running.metrics(recipe)
    assert [row["step"] for row in rows if "loss" in row] == [1, 2]
    assert all(row["grad_norm"] == row["grad_norm"] for row in rows if "loss" in row)


def tiny(made, root):
    """The recipe with a tiny model, tiny data of its formats and columns, and two steps."""
    tree = made.recipe()
    model = str(root / "model")
    tree["model"] = {**tree.get("model", {}), "path": model}
    tree["run"] = {"dir": str(root / "runs"), "name": f"run-{len(list(root.iterdir()))}"}
    data = tree.setdefault("data", {})
    data |= {"max_length": 64, "num_workers": 1}
    data["train"] = on_tiny_rows(data.get("train", {}), made, root)
    if isinstance(data.get("val"), dict):
        data["val"] = on_tiny_rows(data["val"], made, root)
    elif data.get("val") is not None:
        data["val"] = 0.25
    train = tree.setdefault("train", {})
    train.pop("epochs", None)
    train |= {"steps": 2, "global_batch": 4, "micro_batch": 2, "compile": False}
    for name in ("parallel", "launch", "metrics", "checkpoint"):
        tree.pop(name, None)
    tree["metrics"] = {"tensorboard": False}
    tree["checkpoint"] = {"every": None, "export": "none"}
    scheduler = tree.get("scheduler", {})
    if isinstance(scheduler, list):
        for stage in scheduler[:-1]:
            stage["steps"] = 1
    elif "warmup_steps" in scheduler:
        scheduler["warmup_steps"] = 1
    section = tree.get(made.method, {})
    for name in ("reference", "teacher"):
        if section.get(name) not in (None, "base"):
            section[name] = model
    if made.method == "grpo" or section.get("samples") == "student":
        section["prompts_per_step"] = 2 if made.method == "grpo" else 4
        if made.method == "grpo":
            section["group_size"] = 2
        section.setdefault("sampling", {})["max_new_tokens"] = 4
    if made.method in tree or section:
        tree[made.method] = section
    return tree


def on_tiny_rows(section, made, root):
    """A section `data.train` or `data.val` with the same formats and columns, whose paths are tiny files."""
    if section.get("sources"):
        return {"sources": [{**source, "path": write_rows(source, made, root)} for source in section["sources"]]}
    kept = {name: section[name] for name in ("format", "columns") if name in section}
    return {**kept, "path": write_rows(kept, made, root)}


def write_rows(source, made, root):
    """Write 24 rows of a source's format, under the names of its columns. Return the file."""
    name = source.get("format") or METHOD_FORMATS.get(made.method, "messages")
    if made.values.get("distill.samples") == "student":
        name = "prompts"
    file = root / f"rows-{len(list(root.iterdir()))}.jsonl"
    lines = []
    for index in range(24):
        row = FORMATS[name](f"w{3 + index} w4", f"w5 w{6 + index} w7")
        renamed = {}
        for column, value in row.items():
            *sections, leaf = source.get("columns", {}).get(column, column).split(".")
            inner = renamed
            for part in sections:
                inner = inner.setdefault(part, {})
            inner[leaf] = value
        lines.append(json.dumps(renamed))
    file.write_text("\n".join(lines))
    return str(file)


def chat(*texts):
    return [{"role": role, "content": text} for role, text in zip(("user", "assistant"), texts, strict=False)]


METHOD_FORMATS = {"dpo": "preference", "reward": "preference", "kto": "labelled", "grpo": "prompts"}
FORMATS = {
    "messages": lambda asked, said: {"messages": chat(asked, said)},
    "sharegpt": lambda asked, said: {
        "conversations": [{"from": "human", "value": asked}, {"from": "gpt", "value": said}]
    },
    "alpaca": lambda asked, said: {"instruction": asked, "input": "w9", "output": said},
    "prompt_completion": lambda asked, said: {"prompt": asked, "completion": said},
    "text": lambda asked, said: {"text": f"{asked} {said}"},
    "preference": lambda asked, said: {
        "prompt": chat(asked),
        "chosen": chat(asked, said)[1:],
        "rejected": chat(asked, "w9")[1:],
    },
    "labelled": lambda asked, said: {
        "prompt": chat(asked),
        "completion": chat(asked, said)[1:],
        "label": "w4 w5" in said,
    },
    "prompts": lambda asked, said: {
        "prompt": chat(asked),
        "answer": said,
        "reward_model": {"ground_truth": said},
    },
}
