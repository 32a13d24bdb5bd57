"""The environment of other projects' clients and readers, and the scripts in tests/real that run in it."""

import hashlib
import os
import re
import subprocess
import tomllib
from collections.abc import Sequence
from pathlib import Path

from real_servers import environment, install, install_torch

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "tests" / "real"
PACKAGES = (
    "openai",
    "lm-eval[api]",
    "verifiers>=0.1.14,<0.4",
    "pytest",
    "peft>=0.21",
    "gguf>=0.17",
    "transformers>=5",
)
NOT_INSTALLED = 77  # a script's status where its package lacks


def needed() -> list[str]:
    """Return the packages, and what dtrain and `dtrain serve` need; dtrain itself is found by PYTHONPATH."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [*project["dependencies"], *project["optional-dependencies"]["serve"], *PACKAGES]


def fill(python: Path) -> None:
    needs = needed()
    torch = next(need for need in needs if re.match("torch[<>=]", need))
    install_torch(python, torch)
    install(python, *needs)


def run_scripts(names: Sequence[str]) -> int:
    """Run the scripts of these names, all where there are none; return how many failed."""
    name = f"clients-{hashlib.sha256(' '.join(needed()).encode()).hexdigest()[:8]}"
    python = environment(name, fill)
    failed = 0
    for script in sorted(SCRIPTS.glob("*.py")):
        if script.stem in ("__init__", "common") or (names and script.stem not in names):
            continue
        variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        status = subprocess.run([str(python), str(script)], cwd=ROOT, env=variables).returncode
        outcome = {0: "ok", NOT_INSTALLED: "not installed"}.get(status, f"FAILED ({status})")
        print(f"tests/real/{script.name}: {outcome}", flush=True)
        failed += status not in (0, NOT_INSTALLED)
    return failed
