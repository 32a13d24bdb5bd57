#!/usr/bin/env python3
"""Record the numbers of many runs, to compare a refactoring bit for bit with the commit before it.

    git worktree add --detach /tmp/before HEAD~1
    python tools/recorded_runs.py record /tmp/before /tmp/before.json
    python tools/recorded_runs.py record . /tmp/after.json
    python tools/recorded_runs.py compare /tmp/before.json /tmp/after.json

`record` runs the tests of FILES in a checkout, one file after the other. Every run directory that a test leaves is an
entry: the rows of its metrics.jsonl without times and memory, and a digest of each file of weights that the run saved
or exported. If a test fails, its runs are recorded as far as they got, and the exit status is pytest's.

`compare` prints each run that only one recording has, and the first number that differs of each other one. The exit
status is 1 if anything differs.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

# Every method, mesh, family, adapter and tower has runs in these.
FILES = (
    "tests/test_every_pair.py",
    "tests/test_parity.py",
    "tests/test_picture_runs.py",
    "tests/test_tower_runs.py",
    "tests/test_experts.py",
    "tests/adapters/test_trajectories.py",
    "tests/adapters/test_nf4_runs.py",
    "tests/methods/test_every_method.py",
    "tests/methods/test_dpo_runs.py",
    "tests/methods/test_grpo_runs.py",
    "tests/methods/test_kto.py",
    "tests/methods/test_distill.py",
    "tests/methods/test_on_policy.py",
    "tests/methods/test_reward.py",
)
# Parts of names of fields that differ from run to run.
MEASURED = ("time", "per_sec", "mem_gib", "mfu")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="run the tests of a checkout and write the numbers of their runs")
    recording.add_argument("checkout", type=Path)
    recording.add_argument("output", type=Path)
    recording.add_argument("--files", nargs="+", default=FILES, metavar="FILE", help="other test files")
    comparing = commands.add_parser("compare", help="compare two recordings")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "record":
        return record(arguments.checkout.resolve(), arguments.output, arguments.files)
    return compare(json.loads(arguments.before.read_text()), json.loads(arguments.after.read_text()))


def record(checkout: Path, output: Path, files: list[str]) -> int:
    """Run the test files of `checkout` and write what their runs left to `output`. Returns pytest's exit status."""
    runs: dict[str, Any] = {}
    directory = Path(tempfile.mkdtemp(prefix="recorded-runs-"))
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "tmp_path_retention_policy=all"]
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    statuses = []
    for file in files:
        base = directory / Path(file).stem
        command = [sys.executable, "-m", "pytest", *options, f"--basetemp={base}", file]
        statuses.append(subprocess.run(command, cwd=checkout, env=environment).returncode)
        for metrics in sorted(base.rglob("metrics.jsonl")):
            name = str(metrics.parent.relative_to(directory))
            runs[name] = {"rows": rows_of(metrics), "weights": digests_of(metrics.parent, directory)}
        shutil.rmtree(base, ignore_errors=True)
    shutil.rmtree(directory)
    output.write_text(json.dumps(runs, indent=1))
    print(f"{len(runs)} runs, {sum(len(run['rows']) for run in runs.values())} rows recorded in {output}")
    return max(statuses)


def rows_of(metrics: Path) -> list[dict[str, Any]]:
    """Return the rows of a metrics.jsonl without the fields that are measured."""
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [{name: row[name] for name in row if not any(part in name for part in MEASURED)} for row in rows]


def digests_of(run: Path, directory: Path) -> dict[str, str]:
    """Return a digest of each file of tensors below a run directory."""
    digests = {}
    for path in sorted([*run.rglob("*.distcp"), *run.rglob("*.safetensors")]):
        digests[str(path.relative_to(run))] = hashlib.sha256(path.read_bytes()).hexdigest()
    return digests


def compare(before: dict[str, Any], after: dict[str, Any]) -> int:
    """Print the differences of two recordings. Returns 1 if there are any."""
    differences = 0
    for name in sorted(before.keys() ^ after.keys()):
        print(f"{name}: only {'before' if name in before else 'after'}")
        differences += 1
    for name in sorted(before.keys() & after.keys()):
        found = first_difference(before[name], after[name])
        if found is not None:
            print(f"{name}: {found}")
            differences += 1
    num_runs = len(before.keys() | after.keys())
    print(f"{num_runs} runs, {differences} of them differ")
    return int(differences > 0)


def first_difference(before: dict[str, Any], after: dict[str, Any]) -> str | None:
    """Return a line on the first number, or else the first file of weights, in which two runs differ."""
    if len(before["rows"]) != len(after["rows"]):
        return f"{len(before['rows'])} rows before, {len(after['rows'])} after"
    for old, new in zip(before["rows"], after["rows"], strict=True):
        for field in sorted(old.keys() | new.keys()):
            # By their texts: NaN is not equal to itself.
            if json.dumps(old.get(field)) != json.dumps(new.get(field)):
                return f"step {old.get('step')}: {field} {old.get(field)} before, {new.get(field)} after"
    for file in sorted(before["weights"].keys() | after["weights"].keys()):
        if before["weights"].get(file) != after["weights"].get(file):
            return f"weights of {file}"
    return None


if __name__ == "__main__":
    sys.exit(main())
