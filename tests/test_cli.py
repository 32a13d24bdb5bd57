"""The command line as its user meets it: answers at once, errors on stderr with a status, pipes that end well."""

import os
import re
import subprocess
import sys

import pytest

import dtrain
from dtrain import recipe as config
from dtrain.commands.cli import main
from dtrain.training import METHODS, SECTIONS, load_recipe, method_class
from tests.tiny import tiny_recipe


def dtrain_(*arguments, **options):
    return subprocess.run(
        [sys.executable, "-m", "dtrain", *arguments], capture_output=True, text=True, check=False, **options
    )


def write(tmp_path, *overrides):
    path = tmp_path / "mine.yaml"
    path.write_text(config.to_yaml(load_recipe(tiny_recipe(tmp_path), overrides)))
    return str(path)


def test_version_and_help_load_no_torch():
    code = "import sys; from dtrain.commands.cli import main\ntry: main(sys.argv[1:])\n"
    code += "except SystemExit as e: assert not e.code\n"
    code += "assert 'torch' not in sys.modules and 'omegaconf' not in sys.modules"
    for arguments in (["--version"], ["--help"], ["run", "--help"]):
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
        assert (dtrain.__version__ if arguments == ["--version"] else "usage: dtrain") in done.stdout


def test_ls_prints_names_first_and_can_be_cut_short(capsys):
    assert main(["ls"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [name for name, _ in config.list_shipped_recipes([*METHODS])]
    assert [line.split()[0] for line in lines[:3]] == ["sft", "lora-sft", "qlora-sft"]
    assert all(len(line.split()) > 3 and len(line) <= 100 for line in lines) and len(lines) <= 24
    for command in ("ls", "cat sft"):
        done = subprocess.run(
            f"set -o pipefail; {sys.executable} -m dtrain {command} | true", shell=True, executable="/bin/bash",
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.stderr == ""


def test_cat_and_cp(tmp_path, capsys):
    assert main(["cat", "sft"]) == 0
    text = capsys.readouterr().out
    assert text == (config.recipes_dir() / "sft.yaml").read_text()
    target = tmp_path / "my.yaml"
    assert main(["cp", "sft", str(target)]) == 0 and target.read_text() == text
    target.write_text("mine")
    assert main(["cp", "sft", str(target)]) == 1 and target.read_text() == "mine"
    assert "already exists" in capsys.readouterr().err
    assert main(["cp", "sft", str(tmp_path)]) == 0 and (tmp_path / "sft.yaml").read_text() == text
    assert main(["cp", "sft", str(tmp_path / "no" / "such")]) == 1
    assert main(["cat", "nothing"]) == 1


def test_validate_says_ok_with_the_derived_numbers(tmp_path, capsys):
    assert main(["validate", write(tmp_path), "launch.nproc=2", "train.global_batch=16"]) == 0
    out = capsys.readouterr().out
    assert "ok: run, sft on 2 processes" in out
    assert "global batch 16 = micro-batch 2 × accumulation 4 × data-parallel ranks 2" in out
    assert main(["validate", write(tmp_path), "--world-size", "4"]) == 0
    assert "dp_shard 4" in capsys.readouterr().out


def test_validate_shows_every_error_at_once(tmp_path, capsys):
    status = main(["validate", write(tmp_path), "train.steps=0", "model.path=gone", "data.train.path=gone.jsonl"])
    caught = capsys.readouterr()
    assert status == 1 and caught.out == ""
    assert "the recipe has 3 problems" in caught.err and caught.err.count("\n  - ") == 3
    assert main(["validate", write(tmp_path), "train.stpes=1", "lora=1"]) == 1
    assert "2 problems" in capsys.readouterr().err


def test_run_refuses_before_anything_starts(tmp_path, capsys):
    assert main(["run", write(tmp_path), "model.path=gone"]) == 1
    caught = capsys.readouterr()
    assert "there is no directory 'gone'" in caught.err and "Traceback" not in caught.err
    assert not (tmp_path / "runs").exists()


def test_keys_with_dashes_are_answered(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["run", "sft", "--train.steps=3"])
    assert caught.value.code == 2
    assert "without dashes: train.steps=3" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["validate", "sft", "--world-size", "0"], ["preview", "sft", "--samples", "-1"]])
def test_counts_are_counts(words, capsys):
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    assert f"argument {words[2]}: {words[3]} is not a whole number of at least" in capsys.readouterr().err


def test_python_dash_m_and_the_exit_status():
    done = dtrain_("validate", "no-such-recipe")
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("dtrain: there is no recipe no-such-recipe")
    assert dtrain_("nothing").returncode == 2


def test_the_type_of_an_export_is_that_of_its_kind(tmp_path, capsys):
    source = str(tmp_path / "gone")
    assert main(["export", source, str(tmp_path / "m.gguf"), "--dtype", "float16"]) == 1
    assert "the type of a GGUF file is --type f16, bf16, f32 or q8_0" in capsys.readouterr().err
    assert main(["export", source, str(tmp_path / "out"), "--type", "f16"]) == 1
    assert "let OUT end with .gguf, or use --dtype for a directory" in capsys.readouterr().err
    assert main(["export", source, str(tmp_path / "m.gguf"), "--type", "f16"]) == 1
    assert "gone is not a directory" in capsys.readouterr().err


def test_export_and_generate_answer_a_missing_directory(tmp_path, capsys):
    assert main(["export", str(tmp_path / "gone"), str(tmp_path / "out")]) == 1
    assert main(["generate", str(tmp_path / "gone"), "--prompt", "hello"]) == 1
    assert str(tmp_path / "gone") in capsys.readouterr().err


@pytest.mark.parametrize("command", ["generate", "chat", "serve"])
def test_a_missing_directory_is_told_before_torch_is_loaded(tmp_path, command):
    code = "import sys; from dtrain.commands.cli import main\n"
    code += "assert main(sys.argv[1:]) == 1 and 'torch' not in sys.modules"
    given = [sys.executable, "-c", code, command, str(tmp_path / "gone")]
    done = subprocess.run(given, capture_output=True, text=True, check=True, input="")
    assert "gone: no such directory" in done.stderr


def test_env_tells_versions_and_devices(capsys):
    assert main(["env"]) == 0
    out = capsys.readouterr().out
    assert {"dtrain", "python", "torch", "cpu", "cuda"} <= {line.split()[0] for line in out.splitlines()}


def test_preview_prints_samples(tmp_path, capsys):
    assert main(["preview", write(tmp_path), "--samples", "2"]) == 0
    assert "sample" in capsys.readouterr().out


def test_overrides_are_not_asked_for(capsys):
    with pytest.raises(SystemExit):
        main(["run"])
    assert capsys.readouterr().err.endswith("the following arguments are required: RECIPE\n")


@pytest.mark.parametrize(
    ("encoding", "settings"),
    [
        ("ascii", {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}),
        ("latin-1", {"PYTHONIOENCODING": "latin-1", "PYTHONUTF8": "0"}),
        ("gbk", {"PYTHONIOENCODING": "gbk", "PYTHONUTF8": "0"}),
    ],
)
def test_a_terminal_that_lacks_characters_gets_escapes(tmp_path, encoding, settings):
    text = "method: sft  # ★ é 好 👩\n"
    (tmp_path / "mine.yaml").write_text(text, encoding="utf-8")
    given = [sys.executable, "-m", "dtrain", "cat", str(tmp_path / "mine.yaml")]
    done = subprocess.run(given, capture_output=True, check=True, env={**os.environ, **settings})
    assert done.stdout == text.encode(encoding, "backslashreplace")


@pytest.mark.parametrize("recipe", ["quickstart", "quickstart-images"])
def test_the_quickstart_away_from_a_checkout_says_what_makes_its_data(tmp_path, monkeypatch, capsys, recipe):
    monkeypatch.chdir(tmp_path)
    assert main(["validate", recipe]) == 1
    commands = set(re.findall(r"`python (.*?)` makes it", capsys.readouterr().err))
    (command,) = commands
    subprocess.run([sys.executable, *command.split()], check=True, capture_output=True)
    assert main(["validate", recipe]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("command", ["validate", "run", "plan", "preview"])
def test_a_wrong_key_is_answered_before_torch_is_loaded(command):
    """torch takes seconds to import, and a wrong key of any method is known without it."""
    code = "import sys; from dtrain.commands.cli import main\n"
    code += f"for name in {[*METHODS]}:\n"
    code += (
        f"    assert main(['{command}', 'sft', f'method={{name}}', f'{{name}}.nonsense=1', 'optimizer.lrr=1']) == 1\n"
    )
    code += "    assert 'torch' not in sys.modules, name\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("did you mean optimizer.lr?") == len(METHODS)
    assert done.stderr.count("are checked once the recipe can be read") == len(METHODS)


@pytest.mark.parametrize("name", [*METHODS])
def test_the_keys_that_are_known_without_torch_are_those_of_the_method(name):
    assert SECTIONS[name] is method_class(name).Section
