"""The tools: the quickstart's data, exact match, the benchmark, and set-up's decisions."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch

from tests.forked_python import ForkedPython

ROOT = Path(__file__).resolve().parents[1]
FEW_PICTURES = ("--train", 60, "--val", 4, "--heldout", 20)  # of tools/make_shapes.py


def run_tool(name, *arguments, check=True, **environ):
    """Run a tool by an interpreter of its own."""
    return finished([ROOT / "tools" / name, *arguments], subprocess.Popen, check, environ)


def fork_tool(name, *arguments, check=True):
    """Run a tool that needs torch, which a fork has."""
    code = f"import runpy; runpy.run_path({str(ROOT / 'tools' / name)!r}, run_name='__main__')"
    return finished(["-c", code, *arguments], ForkedPython, check, {})


def finished(arguments, popen, check, environ):
    command = [sys.executable, *map(str, arguments)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environ}
    started = popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ, cwd=ROOT)
    out, err = started.communicate(timeout=300)
    if check:
        assert started.returncode == 0, err
    return subprocess.CompletedProcess(command, started.returncode, out, err)


@pytest.fixture(scope="module")
def arithmetic(tmp_path_factory):
    directory = tmp_path_factory.mktemp("arithmetic")
    run_tool("make_arithmetic.py", directory)
    return directory


def pairs(path):
    found = []
    for line in path.read_text().splitlines():
        user, assistant = json.loads(line)["messages"]
        a, b = map(int, re.fullmatch(r"(\d+) \+ (\d+)", user["content"]).groups())
        assert (user["role"], assistant["role"]) == ("user", "assistant")
        assert assistant["content"] == str(a + b)
        found.append((a, b))
    return found


def test_held_out_operands_never_meet_in_training(arithmetic):
    train, val, heldout = (pairs(arithmetic / f"{name}.jsonl") for name in ("train", "val", "heldout"))
    meet = {frozenset(pair) for pair in train}
    assert len(heldout) >= 500 and len(set(heldout)) == len(heldout)
    assert not meet & {frozenset(pair) for pair in heldout}
    assert not meet & {frozenset(pair) for pair in val}
    assert not {frozenset(pair) for pair in val} & {frozenset(pair) for pair in heldout}
    assert len(set(train)) == len(train) > 6000


def test_the_data_are_the_same_bytes_every_time(arithmetic, tmp_path):
    run_tool("make_arithmetic.py", tmp_path, PYTHONHASHSEED="7")
    for path in sorted(arithmetic.rglob("*.json*")):
        assert (tmp_path / path.relative_to(arithmetic)).read_bytes() == path.read_bytes(), path.name


def test_the_model_directory_is_one_that_transformers_reads(arithmetic):
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(arithmetic / "model")
    config = transformers.AutoConfig.from_pretrained(arithmetic / "model")
    model = transformers.AutoModelForCausalLM.from_config(config)
    assert 2e6 < sum(parameter.numel() for parameter in model.parameters()) < 4e6
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "47 + 58"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|user|>47 + 58<|end|><|assistant|>"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text and max(ids) < config.vocab_size
    digits = tokenizer("105")["input_ids"]
    assert [tokenizer.decode([index]) for index in digits] == ["1", "0", "5"]


def test_too_much_held_out_is_refused(tmp_path):
    ended = run_tool("make_arithmetic.py", tmp_path, "--digits", 1, "--heldout", 50, check=False)
    assert ended.returncode != 0 and "leave nothing to train on" in ended.stderr


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    directory = tmp_path_factory.mktemp("shapes")
    run_tool("make_shapes.py", directory, *FEW_PICTURES)
    return directory


def read_pictures(path):
    """Pixels [H, W, 3] and answer of each row."""
    from PIL import Image

    pictures = []
    for line in path.read_text().splitlines():
        question, answer = json.loads(line)["messages"]
        image, text = question["content"]
        assert (image["type"], text) == ("image", {"type": "text", "text": "What do you see?"})
        pictures.append((np.asarray(Image.open(path.parent / image["image"]), dtype=int), answer["content"]))
    return pictures


def name_of(pixels):
    """The name of a picture, read from its pixels: how many quarters are painted, which channels lead, how full a
    shape's box is."""
    painted = np.ptp(pixels, axis=-1) > 0  # [H, W], the ground is grey
    quarters = [part for half in np.split(painted, 2) for part in np.split(half, 2, axis=1) if part.any()]
    red, green, blue = pixels[painted][0]
    colour = "yellow" if min(red, green) > 180 else ("red", "green", "blue")[np.argmax((red, green, blue))]
    box = quarters[0][quarters[0].any(axis=1)][:, quarters[0].any(axis=0)]
    fullness = box.mean()
    shape = "square" if fullness == 1 else "circle" if fullness > 0.65 else "triangle"
    count = ("one", "two", "three", "four")[len(quarters) - 1]
    return f"{count} {colour} {shape}{'s' if len(quarters) > 1 else ''}"


def test_pictures_show_what_they_are_named(shapes):
    pictures = [picture for name in ("train", "val", "heldout") for picture in read_pictures(shapes / f"{name}.jsonl")]
    assert [name_of(pixels) for pixels, _ in pictures] == [answer for _, answer in pictures]
    words = {word.removesuffix("s") for _, answer in pictures for word in answer.split()}
    assert words == set("one two three four red green blue yellow circle square triangle".split())


def test_no_picture_is_drawn_twice(shapes):
    splits = {name: read_pictures(shapes / f"{name}.jsonl") for name in ("train", "val", "heldout")}
    assert {name: len(pictures) for name, pictures in splits.items()} == {"train": 60, "val": 4, "heldout": 20}
    assert len({pixels.tobytes() for pictures in splits.values() for pixels, _ in pictures}) == 84


def test_the_pictures_are_the_same_bytes_every_time(shapes, tmp_path):
    run_tool("make_shapes.py", tmp_path, *FEW_PICTURES, PYTHONHASHSEED="7")
    files = sorted(path for path in shapes.rglob("*") if path.is_file())
    assert files and all((tmp_path / path.relative_to(shapes)).read_bytes() == path.read_bytes() for path in files)


def test_the_model_of_pictures_is_one_that_transformers_reads(shapes):
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(shapes / "model")
    config = transformers.AutoConfig.from_pretrained(shapes / "model")
    model = transformers.AutoModelForImageTextToText.from_config(config)
    assert 1e6 < sum(parameter.numel() for parameter in model.parameters()) < 2e6
    question = json.loads((shapes / "heldout.jsonl").read_text().splitlines()[0])["messages"][:1]
    text = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    assert text == "<|user|><|vision_start|><|image_pad|><|vision_end|>What do you see?<|end|><|assistant|>"
    assert config.image_token_id in tokenizer(text)["input_ids"]


def test_exact_match_counts(arithmetic, tmp_path):
    from dtrain.inference.generate import LoadedModel, Tokenizer, encode_prompt, generate
    from dtrain.models import build, init_weights, read_config

    directory = arithmetic / "model"
    model, tokenizer = build(read_config(directory)), Tokenizer.from_directory(directory)
    init_weights(model, 5)
    template = LoadedModel(model, tokenizer).template()
    prompts = [encode_prompt(tokenizer, prompt, template) for prompt in ("1 + 2", "3 + 4")]
    first, _ = generate(model, prompts, max_new_tokens=16, eos_ids=tokenizer.eos_ids)
    answer = tokenizer.decode(first, skip_special_tokens=True).strip()
    rows = [("1 + 2", answer), ("3 + 4", "no such answer")]
    problems = tmp_path / "problems.jsonl"
    problems.write_text(
        "".join(
            json.dumps({"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b}]}) + "\n"
            for a, b in rows
        )
    )
    failing = fork_tool("exact_match.py", directory, problems, "--scratch", 5, "--at-least", 60, check=False)
    assert failing.stdout.splitlines()[-1] == "exact match: 50.0% (1 of 2 problems)"
    assert "'3 + 4'" in failing.stdout and failing.returncode == 1
    missing = fork_tool("exact_match.py", tmp_path / "nowhere", problems, check=False)
    assert missing.returncode == 1 and missing.stderr.startswith("exact_match: ")


def test_bench_prints_what_a_recipe_does(tmp_path):
    from tests.tiny import write_model, write_rows

    model, rows = write_model(tmp_path / "model"), write_rows(tmp_path / "rows.jsonl")
    overrides = [f"model.path={model}", "model.init=scratch", f"data.train.path={rows}", "data.max_length=32"]
    overrides.append("train.global_batch=4")
    ended = fork_tool("bench_sft.py", "sft", *overrides, "launch.nproc=2", "--steps", 3, "--warmup", 1)
    result = json.loads(ended.stdout)
    assert (result["recipe"], result["processes"], result["steps"]) == ("sft", 2, 3)
    assert result["tokens_per_sec"] > 0 and result["step_time"] > 0 and result["peak_memory_gib"] > 0.05


def test_preferences_are_right_answers_and_the_models_own_wrong_ones(arithmetic, tmp_path):
    from dtrain import models

    model = models.build(models.read_config(arithmetic / "model"))
    models.init_weights(model, 0)
    directory = tmp_path / "model"
    shutil.copytree(arithmetic / "model", directory)
    safetensors.torch.save_model(model, directory / "model.safetensors", metadata={"format": "pt"})
    out, rows = tmp_path / "pairs.jsonl", tmp_path / "rows.jsonl"
    rows.write_text("".join((arithmetic / "train.jsonl").read_text().splitlines(keepends=True)[:30]))
    for _ in range(2):  # the same bytes again
        ended = fork_tool("make_preferences.py", directory, rows, out, "--pairs", 20)
        assert "20 pairs" in ended.stdout
        kept = out.read_bytes() if out.exists() else None
    assert out.read_bytes() == kept
    for line in out.read_text().splitlines():
        row = json.loads(line)
        a, b = map(int, row["prompt"][0]["content"].split(" + "))
        assert row["chosen"] == [{"role": "assistant", "content": str(a + b)}]
        assert row["rejected"][0]["role"] == "assistant" and row["rejected"][0]["content"] != str(a + b)


@pytest.mark.parametrize(
    "name",
    ["setup", "test", "quickstart", *(f"quickstart-{kind}" for kind in ("lora", "dpo", "grpo", "distill", "images"))],
)
def test_shell_tools_parse(name):
    subprocess.run(["bash", "-n", ROOT / "tools" / name], check=True)
    assert os.access(ROOT / "tools" / name, os.X_OK)


def test_ci_runs_the_tests():
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert "tools/test" in (ROOT / ".ci" / "run").read_text()


def test_ci_runs_the_oldest_and_the_newest_torch():
    oldest, below = re.findall(r'"torch>=2\.(\d+),<2\.(\d+)"', (ROOT / "pyproject.toml").read_text())[0]
    [workflow] = (ROOT / ".github" / "workflows").iterdir()
    assert f'torch: ["2.{oldest}", "2.{int(below) - 1}"]' in workflow.read_text()
    assert f"2.{oldest} to 2.{int(below) - 1}" in " ".join((ROOT / "docs" / "install.md").read_text().split())


def test_setup_refuses_an_old_python(tmp_path):
    (tmp_path / "tools").mkdir()
    copy = tmp_path / "tools" / "setup"
    copy.write_bytes((ROOT / "tools" / "setup").read_bytes())
    old = tmp_path / "python3.9"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    ended = subprocess.run(["bash", copy], env={**os.environ, "PYTHON": str(old)}, capture_output=True, text=True)
    assert ended.returncode == 1 and "needs Python 3.11 or newer" in ended.stderr


def test_losses_are_timed_beside_the_plain_way_and_the_floor():
    sizes = ["--tokens", 16, "--vocab", 64, "--hidden", 8, "--rounds", 1]
    ended = fork_tool("bench_losses.py", "--ops", "topk", "hidden_kl", "--tp", 1, 2, "--device", "cpu", *sizes)
    rows = [json.loads(line) for line in ended.stdout.splitlines()]
    assert [(row["tp"], row.get("op")) for row in rows] == [
        (tp, op) for tp in (1, 2) for op in (None, "topk", "hidden_kl")
    ]
    for row in rows:
        if "op" not in row:
            assert row["speeds"]["bytes"] > 0 and row["speeds"]["flops"] > 0
            continue
        assert set(row["memory_mib"]) == {"dtrain", "plain"}
        assert ("forward_backward" in row) == (row["op"] != "topk")
        timed = row["forward"]
        assert timed["of_floor"] == pytest.approx(timed["floor"] / timed["dtrain"])


def test_the_curves_of_a_run_are_drawn_from_its_metrics(tmp_path):
    rows = [{"step": step, "loss": 1 / step} for step in range(1, 5)] + [{"step": 4, "val_loss": 0.5}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_tool("draw_curves.py", tmp_path, tmp_path / "out.svg")
    picture = (tmp_path / "out.svg").read_text()
    (line,) = re.findall(r'<polyline points="([^"]+)"', picture)
    assert len(line.split()) == 4 and picture.count("<circle") == 1


def test_every_extended_test_exists():
    lines = (ROOT / "tests" / "extended.txt").read_text(encoding="utf-8").splitlines()
    listed = [line for line in lines if line and not line.startswith("#")]
    assert listed
    for line in listed:
        file, _, function = line.partition("::")
        source = (ROOT / file).read_text(encoding="utf-8")
        assert not function or f"def {function.partition('[')[0]}(" in source, line
