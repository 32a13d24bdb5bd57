"""Completion of the command line, as bash and zsh ask for it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dtrain.commands.cli import main

# Types a line, presses TAB, and prints the line that readline then has. The program is the one of this environment.
BASH = r"""
export PATH={bin}:$PATH
eval "$(dtrain completion bash)"
COMP_LINE={line}
COMP_POINT=${{#COMP_LINE}}
COMP_TYPE=9
_python_argcomplete dtrain
printf '%s\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture
def program(tmp_path) -> Path:
    """Return a directory with `dtrain` of this checkout, and with runs and files to complete."""
    binary = tmp_path / "bin" / "dtrain"
    binary.parent.mkdir()
    binary.write_text(f'#!/bin/sh\nexec {sys.executable} -m dtrain "$@"\n')
    binary.chmod(0o755)
    for name in ("first", "second"):
        run = tmp_path / "runs" / name
        run.mkdir(parents=True)
        (run / "config.yaml").write_text("method: sft\n")
        (run / "lock").touch()
    (tmp_path / "chat.jsonl").touch()
    (tmp_path / "mine.yaml").touch()
    (tmp_path / "other.txt").touch()
    return tmp_path


def in_bash(program: Path, line: str) -> list[str]:
    """Return the completions that bash is given for the last word of a line."""
    script = BASH.format(bin=program / "bin", line=f"'{line}'")
    done = subprocess.run(["bash", "-c", script], cwd=program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [word.rstrip() for word in done.stdout.splitlines() if word.strip()]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("dtrain va", ["validate"]),
        ("dtrain eval --dev", ["--device"]),
        ("dtrain generate runs/first --device ", ["auto", "cpu", "cuda"]),
        ("dtrain run lora-s", ["lora-sft"]),
        ("dtrain run mi", ["mine.yaml"]),
        ("dtrain run sft optimizer.l", ["optimizer.lr="]),
        ("dtrain validate sft train.steps=3 dpo.be", ["dpo.beta="]),
        # bash takes the text after "=" for the word.
        ("dtrain run sft train.dtype=b", ["bfloat16"]),
        ("dtrain run sft method=", ["sft", "dpo", "kto", "grpo", "distill", "reward"]),
        ("dtrain run sft data.train.path=ch", ["chat.jsonl"]),
        ("dtrain compare runs/f", ["runs/first/"]),
        ("dtrain help optimizer.l", ["optimizer.lr"]),
        ("dtrain completion ", ["bash", "zsh"]),
    ],
)
def test_bash(program, line, expected):
    assert in_bash(program, line) == expected


def test_a_section_is_offered_before_its_keys(program):
    completions = in_bash(program, "dtrain run sft ")
    assert "optimizer." in completions and "method=" in completions and "optimizer.lr=" not in completions
    # A single section has a blank after it in some shells, so its keys follow at once.
    keys = in_bash(program, "dtrain run sft opti")
    assert "optimizer.lr=" in keys and "optimizer." not in keys


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")
@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("dtrain valid", "dtrain validate "),
        ("dtrain run sft optimizer.lr", "dtrain run sft optimizer.lr="),
        ("dtrain run sft train.dtype=bf", "dtrain run sft train.dtype=bfloat16"),
        ("dtrain compare runs/sec", "dtrain compare runs/second/"),
    ],
)
def test_zsh(program, typed, expected):
    """A real zsh in a terminal of its own, in which TAB is pressed."""
    script = rf"""
zmodload zsh/zpty
zpty shell "zsh -f -i"
zpty -w shell 'PS1="> "; unsetopt beep; autoload -U compinit && compinit -u -D'
zpty -w shell 'eval "$(dtrain completion zsh)"; bindkey -e'
zpty -w shell 'show() {{ print -r -- "line<$BUFFER>"; zle kill-buffer }}; zle -N show; bindkey "^X" show'
zpty -w shell 'print ready-$((1+1))'
zpty -r -m shell seen '*ready-2*'
zpty -w -n shell $'{typed}\t\C-X'
zpty -r -m shell seen '*line<*>*'
print -r -- "$seen"
zpty -d shell
"""
    environ = os.environ | {"PATH": f"{program / 'bin'}:{os.environ['PATH']}", "TERM": "dumb"}
    done = subprocess.run(
        ["zsh", "-f", "-c", script], cwd=program, capture_output=True, text=True, check=False, env=environ, timeout=300
    )
    line = done.stdout.rpartition("line<")[2].partition(">")[0]
    assert line.rstrip() == expected.rstrip(), done.stdout + done.stderr


def test_completion_loads_no_torch(program):
    """TAB must be fast. A module that could not be imported would leave no completion."""
    (program / "torch.py").write_text("raise SystemExit('torch was loaded')")
    environ = os.environ | {"PYTHONPATH": f"{program}:{os.environ.get('PYTHONPATH', '')}"}
    script = BASH.format(bin=program / "bin", line="'dtrain run sft grpo.rew'")
    done = subprocess.run(["bash", "-c", script], cwd=program, capture_output=True, text=True, check=False, env=environ)
    assert "grpo.rewards=" in done.stdout.split()


def test_runs_are_offered_by_name(program):
    assert in_bash(program, "dtrain compare ")[:2] == ["runs/first", "runs/second"]
    assert "runs/first" not in in_bash(program, "dtrain run ")


def test_other_shells_are_refused(capsys):
    with pytest.raises(SystemExit):
        main(["completion", "fish"])
    assert "invalid choice: 'fish'" in capsys.readouterr().err
