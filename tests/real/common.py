"""Parts that the programs share: the model, the lines that they print, and how they end."""

import importlib.util
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

NOT_INSTALLED = 77
MODEL = Path(__file__).resolve().parents[2] / "build/SmolLM2-135M-Instruct"


def need(package: str, *modules: str) -> None:
    """End the program where one of `modules` of the package lacks."""
    if any(importlib.util.find_spec(module) is None for module in modules):
        print(f"not installed: pip install '{package}'")
        sys.exit(NOT_INSTALLED)


def model() -> Path:
    """Return the directory of SmolLM2. Ends the program where tools/real-model did not make it."""
    if not (MODEL / "made.json").is_file():
        sys.exit(f"{MODEL} is missing: run tools/real-model")
    return MODEL


def dtrain(*words: str) -> str:
    """Return what a command of dtrain prints. Ends the program where it fails."""
    done = subprocess.run([sys.executable, "-m", "dtrain", *words], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"dtrain {' '.join(words)}\n{done.stdout}{done.stderr}")
    return done.stdout


def trained(root: Path, *overrides: str) -> Path:
    """Return the directory of a run of one step of SFT, in float32."""
    talk = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello!"}]
    (root / "talks.jsonl").write_text(f"{json.dumps({'messages': talk})}\n" * 2)
    settings = ["train={steps: 1, epochs: null, global_batch: 2, micro_batch: 2, dtype: float32}", "optimizer.lr=1e-4"]
    settings += [f"model.path={model()}", f"data.train.path={root / 'talks.jsonl'}", "data.max_length=128"]
    settings += ["scheduler.warmup_steps=0", "metrics.tensorboard=false", "run.name=one", f"run.dir={root}"]
    dtrain("run", "sft", *settings, *overrides)
    return root / "one"


def served_logprobs(url: str, ids: Sequence[int], name: str | None = None) -> list[float]:
    """Return the log-probabilities of all of `ids` but the first, by the server of dtrain and the model or adapter
    `name` there."""
    from tests.serve.serving import ask

    body = {"prompt": list(ids), "max_tokens": 0, "echo": True, "logprobs": 0, "temperature": 0}
    status, answer = ask(url, "/v1/completions", body if name is None else {**body, "model": name})
    if status != 200:
        sys.exit(f"{url} answered {status}: {answer}")
    return answer["choices"][0]["logprobs"]["token_logprobs"][1 : len(ids)]


class Checks:
    """Checks of one program, each a line."""

    def __init__(self) -> None:
        self.failed = 0

    def same(self, name: str, actual: object, expected: object) -> None:
        ok = actual == expected
        self._say(name, ok, "equal" if ok else f"{actual!r}, not {expected!r}")

    def near(self, name: str, actual: Sequence[float], expected: Sequence[float], most: float) -> None:
        if len(actual) != len(expected):
            return self._say(name, False, f"{len(actual)} numbers, not {len(expected)}")
        distance = max((abs(value - right) for value, right in zip(actual, expected, strict=True)), default=math.inf)
        self._say(name, distance <= most, f"{distance:.1e} apart, at most {most:g}")

    def holds(self, name: str, ok: bool, figure: object = "") -> None:
        self._say(name, ok, str(figure))

    def end(self) -> None:
        """End the program."""
        sys.exit(bool(self.failed))

    def _say(self, name: str, ok: bool, figure: str) -> None:
        self.failed += not ok
        print(f"  {name}: {figure} {'ok' if ok else 'FAILED'}", flush=True)
