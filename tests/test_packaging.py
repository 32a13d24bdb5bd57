"""The package as users install it: its dependencies and extras, and a wheel in an environment without any extra."""

import ast
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.depends import tree_of
from tests.pages import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
# Name of an import -> name of its distribution, if they differ by more than dashes.
DISTRIBUTIONS = {"PIL": "pillow", "fla": "fla-core", "yaml": "pyyaml", "torch.utils.tensorboard": "tensorboard"}
# Used if users have installed it for their GPUs; it cannot be installed by name everywhere.
NOT_DECLARED = {"transformer-engine-torch"}
# Declared, but imported by another library: by torch, by fsspec, by uvicorn.
NOT_IMPORTED = {"numpy", "aiohttp", "gcsfs", "s3fs", "httptools"}
# Files that a command imports after it has checked that its extra is installed.
OPTIONAL_FILES = {
    "dtrain/commands/report/live.py",
    "dtrain/commands/serve/app.py",
    "dtrain/models/transformers/config.py",
    "dtrain/models/transformers/conversion.py",
    "dtrain/models/transformers/model.py",
    "dtrain/models/transformers/plan.py",
    "dtrain/models/transformers/proof.py",
    "dtrain/models/transformers/shrinking.py",
}


def distributions(requirements: list[str]) -> set[str]:
    """Return the names of the required distributions, those of dtrain's own extras included."""
    names: set[str] = set()
    for requirement in map(Requirement, requirements):
        if requirement.name == "dtrain":
            for extra in requirement.extras:
                names |= distributions(EXTRAS[extra])
        else:
            names.add(canonicalize_name(requirement.name))
    return names


def imports_of(node: ast.AST, is_late: bool = False) -> Iterator[tuple[str, bool]]:
    """Yield each imported module and whether its import is late: in a function, or for type checkers only."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((alias.name, is_late) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield str(child.module), is_late
        is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        is_for_types = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
        yield from imports_of(child, is_late or is_function or is_for_types)


@cache
def imported_distributions() -> list[tuple[Path, str, bool]]:
    """Return each import of a third-party package: the file, the distribution, and whether the import is late."""
    found = []
    for path in sorted((ROOT / "dtrain").rglob("*.py")):
        for module, is_late in imports_of(tree_of(path)):
            package = module.partition(".")[0]
            if package == "dtrain" or package in sys.stdlib_module_names:
                continue
            name = DISTRIBUTIONS.get(module) or DISTRIBUTIONS.get(package) or package
            found.append((path.relative_to(ROOT), canonicalize_name(name), is_late))
    return found


def test_every_import_is_a_declared_dependency():
    """An import at the top of a file needs a dependency. In a function or an optional file, an extra is enough."""
    required = distributions(PROJECT["dependencies"])
    optional = {name for extra, needed in EXTRAS.items() if extra != "dev" for name in distributions(needed)}
    for path, name, is_late in imported_distributions():
        is_optional = is_late or path.as_posix() in OPTIONAL_FILES
        assert name in required or (is_optional and name in optional | NOT_DECLARED), f"{path} imports {name}"


def test_every_declared_dependency_is_used():
    imported = {name for _, name, _ in imported_distributions()}
    declared = distributions(PROJECT["dependencies"])
    declared |= {name for extra, needed in EXTRAS.items() if extra != "dev" for name in distributions(needed)}
    assert not declared - imported - NOT_IMPORTED


def test_all_holds_every_extra_and_messages_name_those_that_exist():
    (everything,) = map(Requirement, EXTRAS["all"])
    assert everything.name == "dtrain"
    assert everything.extras == set(EXTRAS) - {"all", "dev"}
    files = [*(ROOT / "dtrain").rglob("*.py"), *(ROOT / "docs").glob("*.md"), *(ROOT / "dtrain").rglob("README.md")]
    for path in [*files, ROOT / "README.md"]:
        for name in re.findall(r"dtrain\[([a-z-]+)\]", path.read_text(encoding="utf-8")):
            assert name in EXTRAS, f"{path} names the extra {name}"


SEVERAL_COMMANDS = """
import contextlib, io
from dtrain.commands.cli import main
for words in {commands}:
    assert main(words) == 0, words
for extra, words in {optional}.items():
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        assert main(words) == 1, words
    assert f"pip install 'dtrain[{{extra}}]'" in errors.getvalue(), errors.getvalue()
"""


class Environment:
    """A virtual environment with a wheel of dtrain and its dependencies, and without any extra.

    The dependencies are links to this environment's own packages, so nothing is downloaded.
    """

    def __init__(self, path: Path, wheel: Path):
        venv.create(path, symlinks=True, with_pip=False)
        self.programs = path / "bin"
        (self.site_packages,) = path.glob("lib/python*/site-packages")
        pip = [sys.executable, "-m", "pip", f"--python={self.programs / 'python'}", "install", "--quiet"]
        run_program([*pip, "--no-deps", "--no-index", wheel], path)
        (installed,) = metadata.distributions(name="dtrain", path=[str(self.site_packages)])
        self.linked: set[str] = set()
        self._link_requirements(installed)

    def run(self, directory: Path, *words: str | Path) -> str:
        """Run a program of this environment in `directory`; return what it prints."""
        return run_program([self.programs / words[0], *words[1:]], directory)

    def _link_requirements(self, package: metadata.Distribution) -> None:
        for requirement in map(Requirement, package.requires or []):
            name = canonicalize_name(requirement.name)
            is_needed = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if not is_needed or name in self.linked:
                continue
            self.linked.add(name)
            found = metadata.distribution(name)
            for part in {file.parts[0] for file in found.files or []} - {"..", "__pycache__"}:
                link = self.site_packages / part
                if not link.exists():
                    link.symlink_to(found.locate_file(part))
            self._link_requirements(found)


def run_program(words: list[str | Path], directory: Path) -> str:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(words, cwd=directory, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A wheel that was built from the source distribution, as installers build it."""
    built = tmp_path_factory.mktemp("built")
    run_program([sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", built], ROOT)
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(built, filter="data")
    source = built / archive.name.removesuffix(".tar.gz")
    run_program([sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", built], source)
    (found,) = built.glob("*.whl")
    return found


def test_a_wheel_without_extras_runs_the_quickstart(wheel, tmp_path):
    environment = Environment(tmp_path / "environment", wheel)
    assert "torch" in environment.linked and "pillow" not in environment.linked
    work = tmp_path / "work"
    work.mkdir()

    assert "quickstart" in environment.run(work, "dtrain", "ls")
    environment.run(work, "dtrain", "cp", "quickstart", "my.yaml")
    assert (work / "my.yaml").read_text() == environment.run(work, "dtrain", "cat", "quickstart")

    make_data = environment.site_packages / "dtrain" / "_tools" / "make_arithmetic.py"
    environment.run(work, "python", make_data, "build/arithmetic")
    # The commands that load torch share one process.
    overrides = ["launch.nproc=1", "train.steps=2", "train.validate_every=2", "scheduler.warmup_steps=1"]
    commands = [
        ["validate", "my.yaml", *overrides],
        ["preview", "my.yaml"],
        ["plan", "my.yaml", "--gpu", "4090"],
        ["run", "my.yaml", *overrides],
        ["generate", "runs/quickstart", "--prompt", "47 + 58", "--max-new-tokens", "2"],
        ["eval", "runs/quickstart", "build/arithmetic/heldout.jsonl", "--limit", "2", "--max-new-tokens", "2"],
        ["export", "runs/quickstart", "out"],
        ["compare", "runs/quickstart", "runs/quickstart"],
        ["push", "runs/quickstart", "someone/adds", "--dry-run"],
        ["env"],
    ]
    # These need an extra, and name it.
    optional = {
        "report": ["report", "runs/quickstart"],
        "serve": ["serve", "runs/quickstart"],
        "gguf": ["export", "runs/quickstart", "out.gguf"],
    }
    code = SEVERAL_COMMANDS.format(commands=commands, optional=optional)
    printed = environment.run(work, "python", "-c", code)
    assert "ok: quickstart, sft on 1 process, 2 steps" in printed
    assert (work / "out" / "model.safetensors").is_file()
