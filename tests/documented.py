"""The commands of one Markdown page, run one after the other in a tiny directory that holds what they name.

`Directory.check` has a rule for each kind of command and raises for one that none covers. Training is overridden to two
steps of a tiny model, a server listens on a free port; downloads, clusters and other programs are parsed only.
"""

import contextlib
import io
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
import traceback
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from dtrain.base.hub import is_model_id
from dtrain.commands.cli import _parser, main
from dtrain.training import load_recipe
from tests.pages import ROOT, Command
from tests.policy.test_weights import free_port
from tests.serve.serving import make_model, wait_until
from tests.world import fork
from tools import coming_from

MODELS = ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B", "meta-llama/Llama-3.1-8B-Instruct")
LIBRARY_MODEL = "CohereLabs/c4ai-command-r7b-12-2024"  # its modules are those of transformers
COHERE2 = {
    "architectures": ["Cohere2ForCausalLM"],
    "model_type": "cohere2",
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "pad_token_id": None,
}
TINY = (
    "train.steps=2",
    "train.epochs=null",
    "train.global_batch=4",
    "train.micro_batch=2",
    "train.validate_every=null",
    "scheduler.name=constant",
    "scheduler.warmup_steps=1",
    "launch.nproc=1",
    "launch.device=cpu",
    "train.compile=false",
    "checkpoint.every=1",
    "metrics.tensorboard=false",
)
MANY_ROWS = ("train.global_batch=64", "train.steps=10", "train.epochs=null")  # as a cluster's data would make
TINY_GRPO = ("grpo.prompts_per_step=2", "grpo.group_size=2", "grpo.sampling.max_new_tokens=4")
ADDED = {
    "preview": [],
    "generate": ["--max-new-tokens", "4", "--device", "cpu"],
    "eval": ["--max-new-tokens", "4", "--limit", "2", "--device", "cpu"],
    "export": [],
    "plan": ["train.global_batch=16", "data.max_length=64"],
    **dict.fromkeys(("validate", "convert", "ls", "cat", "cp", "env", "help", "report", "compare"), []),
}
"""The commands that run as they stand, and what is added to them."""
OTHERS = {"vllm": "vllm", "python -m sglang.launch_server": "sglang"}
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
_STEP = re.compile(r"(.*/checkpoints)/step-\d+")
_SERVED = "localhost:8000"


class Directory:
    """A page's directory: two models, data of every kind, the quickstarts' files, a recipe; its server, while there is
    one."""

    def __init__(self, path: Path):
        self.path = path
        self._ran: dict[str, tuple[str, ...]] = {}  # run's name -> the words that last started it
        self._server: multiprocessing.Process | None = None
        self.address = ""
        self._nodes: list[subprocess.Popen] = []  # started by torchrun, and waiting for the nodes that are missing
        self._port = 0  # at which the nodes of one run meet

    def fill(self, models: Path, *, makes_recipe: bool) -> "Directory":
        for name in MODELS:
            shutil.copytree(models, self.path / name)
        shutil.copytree(models.parent / "library", self.path / LIBRARY_MODEL)
        write_data(self.path)
        (self.path / "key.txt").write_text("secret\n")
        (self.path / "runs").mkdir(exist_ok=True)
        arithmetic = self.path / "build" / "arithmetic"
        shutil.copytree(models, arithmetic / "model")
        for name, source in {"train": "chat", "val": "more", "heldout": "more", "pairs": "pairs"}.items():
            shutil.copy(self.path / f"{source}.jsonl", arithmetic / f"{name}.jsonl")
        if not makes_recipe:
            data = "data: {train: {path: chat.jsonl}, max_length: 64}"
            (self.path / "my.yaml").write_text(f"model: {{path: {MODELS[0]}}}\n{data}\ntrain: {{steps: 2}}\n")
        return self

    def check(self, command: Command) -> None:
        """Run or parse one command. AssertionError where it does not do what its page says."""
        words = list(command.words)
        if words[0] == "dtrain":
            self._dtrain(words[1:], 1 if command.fails else 0)
        elif words[0] == "torchrun":
            self._torchrun(words[1:])
        elif words[0] == "python" and words[1].endswith(".py"):
            self._finish(self._start([sys.executable, *words[1:], *TINY]))
        elif words[0] == "curl":
            self._curl(words[1:])
        elif words[0].startswith("tools/"):
            self._shell_tool(words)
        elif words[0] in ("sbatch", "kubectl"):
            self._cluster(words)
        elif words[:2] == ["pip", "install"]:
            extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
            for word in words[2:]:
                extra = re.fullmatch(r"dtrain\[(\w[\w-]*)\]", word)
                assert extra and extra[1] in extras, word
        elif words[0] == "ollama":
            assert words[1] == "create" and words[3:] == ["-f", "Modelfile"], words
        elif words[:3] == ["python", "-m", "dtrain.rl.environments.verifiers"]:  # tests/environments has a stand-in
            json.loads(words[4])
            shutil.copy(self.path / "problems.jsonl", self.path / f"{words[3]}.jsonl")
        elif words[0] == "lm_eval":  # tests/serve/test_lm_eval.py runs it
            given = dict(one.split("=", 1) for one in words[words.index("--model_args") + 1].split(","))
            assert words[words.index("--model") + 1] == "local-completions"
            assert given["base_url"] == f"http://{_SERVED}/v1/completions" and {"model", "tokenizer"} <= given.keys()
        else:
            other = next((kind for start, kind in OTHERS.items() if " ".join(words).startswith(f"{start} ")), None)
            assert other, f"no rule of tests/documented.py covers: {' '.join(words)}"
            told = (ROOT / "dtrain" / "rl" / "remote" / "dialects.py").read_text()
            for flag in (word for word in words if word.startswith("--") and word not in ("--port", "--model-path")):
                assert flag in told, flag

    def close(self) -> None:
        for node in self._nodes:  # those whose other nodes a failed command never started
            node.kill()
            node.wait()
        self._nodes.clear()
        if self._server is not None:
            os.kill(self._server.pid, signal.SIGTERM)
            self._server.join(20)
            assert self._server.exitcode == 128 + signal.SIGTERM
            self._server = None

    def _dtrain(self, words: list[str], status: int) -> None:
        _parser().parse_known_args(words)
        words = [self._own_step(word) for word in words]
        if words[0] == "run":
            self._run(words)
        elif words[0] == "serve":
            self.close()
            self._serve(words)
        elif words[0] == "export" and words[2].endswith(".gguf"):  # of tokenizers that llama.cpp has: tests/checkpoint
            assert Path(self.path, words[1]).is_dir()
        elif words[0] == "download":
            assert is_model_id(words[1]) and len(words) == 2
        else:
            assert words[0] in ADDED, f"no rule of tests/documented.py covers: dtrain {' '.join(words)}"
            self.expect([*words, *ADDED[words[0]]], status)

    def _run(self, words: list[str]) -> None:
        """`validate` as it stands, then the run itself, two steps long."""
        if any(_SERVED in word for word in words) and self._server is None:
            self._serve(["serve", MODELS[0]])
        words = [word.replace(_SERVED, self.address) for word in words]
        with contextlib.chdir(self.path):  # where a method of the page is imported from
            recipe = load_recipe(self._found(words[1]), words[2:])
        if recipe.method == "grpo" and recipe.grpo.verifiers.name is not None:
            return  # tests/environments/test_verifiers.py runs it, where the package is
        name, begins = recipe.run.name, recipe.checkpoint.init_from
        begins = [f"checkpoint.init_from={self._own_step(begins)}"] if begins else []
        many = MANY_ROWS if any(word.startswith("launch.nproc=") for word in words) else ()
        self.expect(["validate", *words[1:], *begins, *many, "run.name=validated"])  # no earlier command has made it
        keeps = any(word.startswith("checkpoint.") for word in words) or self._ran.get(name) == tuple(words)
        if not keeps:
            shutil.rmtree(self.path / "runs" / name, ignore_errors=True)
        self._ran[name] = tuple(words)
        added = [*TINY, f"data.max_length={min(64, recipe.data.max_length)}"]
        added += TINY_GRPO if recipe.method == "grpo" else ()
        self.expect([*words, *added, *begins])
        weights = "model.safetensors" if recipe.lora is None else "adapter_model.safetensors"
        assert (self.path / "runs" / name / "export" / weights).is_file()

    def _found(self, recipe: str) -> str | Path:
        return self.path / recipe if (self.path / recipe).is_file() else recipe

    def _own_step(self, word: str) -> str:
        """A checkpoint of a run as the oldest that this run has."""
        place = _STEP.search(word)
        if place is None:
            return word
        directory = place[1].split("=")[-1]
        steps = sorted((self.path / directory).glob("step-*"), key=lambda path: int(path.name[5:]))
        assert steps, f"{directory} holds no step: the page has not run it before"
        return f"{place[1]}/{steps[0].name}"

    def expect(self, words: Sequence[str], status: int = 0) -> str:
        """`dtrain` with `words`, here; returns what it printed. A run has a process of its own."""
        if words[0] == "run":
            found, text = self._forked(words)
        else:
            said = io.StringIO()
            with contextlib.chdir(self.path), contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                found = _status(words)
            text = said.getvalue()
        assert found == status, f"dtrain {' '.join(words)}: status {found}\n{text}"
        return text

    def _forked(self, words: Sequence[str]) -> tuple[int | None, str]:
        said = self.path / "said.txt"
        child = fork(_command, self.path, said, list(words))
        child.join(300)
        if child.exitcode is None:
            child.kill()
            child.join()
        return child.exitcode, said.read_text()

    def _serve(self, words: list[str]) -> None:
        said = self.path / "served.txt"
        said.unlink(missing_ok=True)
        words = [*words, "--port", "0", "--device", "cpu", "--max-length", "64"]
        self._server = fork(_command, self.path, said, words)

        def listens() -> bool:
            assert self._server.is_alive(), said.read_text()
            return said.is_file() and " at http://" in said.read_text()

        wait_until(listens, 300)
        self.address = re.search(r" at http://(\S+)", said.read_text())[1]

    def _curl(self, words: list[str]) -> None:
        """The words of curl that the pages use; curl itself is not needed."""
        headers, data, url, rest = {}, None, None, list(words)
        while rest:
            word = rest.pop(0)
            if word == "-H":
                name, _, value = rest.pop(0).partition(":")
                headers[name] = value.strip()
            elif word == "-d":
                data = rest.pop(0)
                json.loads(data)
            elif not word.startswith("-"):
                url = word
            else:
                assert word in ("-N", "-s"), f"no rule of tests/documented.py covers curl's {word}"
        assert _SERVED in url and self._server is not None, "the page has started no server"
        request = urllib.request.Request(url.replace(_SERVED, self.address), data and data.encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            text = answer.read().decode()
        if "stream" in (data or ""):
            assert text.rstrip().endswith("data: [DONE]")
        else:
            assert isinstance(json.loads(text), dict)

    def _torchrun(self, words: list[str]) -> None:
        """Run a script, or all nodes of a run on this machine; only check the recipe of one on other machines."""
        from torch.distributed.run import get_args_parser

        given = get_args_parser().parse_args(words)
        num_nodes = int(given.nnodes.split(":")[-1])
        if not given.module:
            self._finish(self._start([*TORCHRUN, *words, *TINY]))
            return
        assert given.training_script == "dtrain" and given.training_script_args[0] == "run"
        if num_nodes > 1 and given.master_addr == "127.0.0.1":
            self._port = self._port or free_port()
            words = [str(self._port) if word == str(given.master_port) else word for word in words]
            self._nodes.append(self._start([*TORCHRUN, *words, *TINY]))
            if len(self._nodes) == num_nodes:
                while self._nodes:
                    self._finish(self._nodes.pop())
                self._port = 0
            return
        world_size = num_nodes * int(given.nproc_per_node)
        self.expect(["validate", *given.training_script_args[1:], *MANY_ROWS, "--world-size", str(world_size)])

    def _start(self, words: list[str]) -> subprocess.Popen:
        """Start a command in the directory as a process of its own."""
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.Popen(
            words, cwd=self.path, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    def _finish(self, process: subprocess.Popen) -> None:
        """Wait for a process that must succeed."""
        try:
            output, _ = process.communicate(timeout=300)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
        assert process.returncode == 0, f"{process.args}: status {process.returncode}\n{output}"

    def _cluster(self, words: list[str]) -> None:
        files = [word for word in words if word.endswith((".sh", ".yaml"))]
        assert files, f"{' '.join(words)} names no file of recipes/"
        for file in files:
            assert (self.path / file).is_file(), file
            if file.endswith(".sh"):
                subprocess.run(["bash", "-n", self.path / file], check=True)
                self.expect(["validate", *words[words.index(file) + 1 :], *MANY_ROWS, "--world-size", "16"])

    def _shell_tool(self, words: list[str]) -> None:
        """The script itself, as in a checkout whose programs note what they are asked; then each of these commands."""
        if not (self.path / "tools").exists():
            _copy_tools(self.path)
        if words[0].startswith("tools/quickstart-"):  # which look for it by name
            (self.path / "runs" / "quickstart" / "checkpoints" / "step-300").mkdir(exist_ok=True)
        assert os.access(ROOT / words[0], os.X_OK), words[0]
        noted = self.path / "noted.txt"
        noted.write_text("")
        environ = {**os.environ, "NOTED": str(noted)}
        done = subprocess.run([self.path / words[0], *words[1:]], capture_output=True, text=True, env=environ)
        assert done.returncode == 0, done.stderr
        for line in noted.read_text().splitlines():
            program, *rest = line.split("\t")
            if program == "dtrain":
                self._dtrain(rest, 0)
            elif rest[0] == "tools/make_shapes.py":
                few = ["--train", "8", "--val", "2", "--heldout", "2"]
                subprocess.run([sys.executable, ROOT / rest[0], *rest[1:], *few], check=True, cwd=self.path)
            elif rest[0].endswith(".py"):
                assert (ROOT / rest[0]).is_file(), rest[0]


def write_data(directory: Path) -> None:
    """Rows of every kind that the pages name, in words of the tiny tokenizer."""
    asked = [f"w{3 + index} w{4 + index}" for index in range(12)]
    chats = [[{"role": "user", "content": text}, {"role": "assistant", "content": "w5 w6"}] for text in asked]
    pairs = [
        {"prompt": chat[:1], "chosen": chat[1:], "rejected": [{"role": "assistant", "content": "w7"}]} for chat in chats
    ]
    rows = {
        "chat.jsonl": [{"messages": chat} for chat in chats],
        "forum.jsonl": [{"title": f"w{number}", "reply": "w4 w5"} for number in range(1, 9)],
        "more.jsonl": [{"messages": chat} for chat in chats],
        "pairs.jsonl": pairs,
        "problems.jsonl": [{"question": text, "answer": "#### 4"} for text in asked],
    }
    for name, found in rows.items():
        (directory / name).write_text("".join(json.dumps(row) + "\n" for row in found))
    (directory / "axolotl.yaml").write_text(coming_from.AXOLOTL)
    (directory / "alpaca.csv").write_text("instruction,output\nw3 w4,w5\nw6,w7 w8\n")


def tiny_model(directory: Path) -> Path:
    """A tiny model with weights, tokenizer and chat template, and one of transformers next to it, `library`."""
    make_model(directory, 0, out="library", family="llama", **COHERE2)
    return make_model(directory, 0)


def _command(directory: Path, said: Path, words: list[str]) -> None:
    """The main function of a forked process: `dtrain` with `words` in `directory`, its output in `said`."""
    os.chdir(directory)
    file = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
    status = 1
    try:
        status = _status(words)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _status(words: Sequence[str]) -> int:
    """Return the exit status of `dtrain` with `words`."""
    try:
        return main(words)
    except SystemExit as error:  # argparse
        return error.code if isinstance(error.code, int) else 1


def _copy_tools(path: Path) -> None:
    """The shell tools beside programs that note their words; `setup` does nothing."""
    shutil.copytree(ROOT / "tools", path / "tools", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    (path / "tools" / "setup").write_text("#!/bin/sh\n")
    (path / "tools" / "make_arithmetic.py").touch()
    os.utime(path / "tools" / "make_arithmetic.py", (0, 0))
    programs = path / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name in ("dtrain", "python", "ruff", "mypy"):
        program = programs / name
        program.write_text(f'#!/bin/bash\n(printf {name}; printf "\\t%s" "$@"; echo) >>"$NOTED"\n')
        program.chmod(0o755)
