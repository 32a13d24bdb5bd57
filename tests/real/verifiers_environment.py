"""Environments of the library `verifiers` itself: the suite's own tests of them, with the library in place of what
stands in for it."""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.real.common import need  # noqa: E402

need("verifiers>=0.1.14,<0.4", "verifiers")
need("pytest", "pytest")


def main() -> None:
    print(f"verifiers {version('verifiers')}", flush=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", "library"]
    sys.exit(subprocess.run([*command, "tests/environments/test_verifiers.py"], cwd=ROOT).returncode)


if __name__ == "__main__":
    main()
