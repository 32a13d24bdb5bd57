#!/usr/bin/env python3
"""Break dtrain in known ways, one at a time, and see that its tests notice.

    tools/mutants.py                     every mutation of tests/mutations/*.toml
    tools/mutants.py losses.toml "mask"  those of a file, or with words in their name
    tools/mutants.py --whole NAME        the whole suite instead of the tests that a mutation names

A mutation names a file, a text that stands there once, what replaces it, and the tests that must fail. Each runs in a
copy of the tree. A line each: caught, MISSED, or RED where the tests fail without the mutation, too; the exit status is
1 where one is not caught.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parent.parent


def mutations(root: Path = ROOT) -> list[dict]:
    """Return the mutations of tests/mutations: {name, file, old, new, tests, area}."""
    entries = []
    for path in sorted((root / "tests/mutations").glob("*.toml")):
        entries += [{**entry, "area": path.name} for entry in tomllib.loads(path.read_text())["mutation"]]
    return entries


def apply(entry: dict, root: Path) -> str:
    """Write a mutation into the tree at `root`, and return the text of the file before."""
    path = root / entry["file"]
    text = path.read_text()
    if text.count(entry["old"]) != 1:
        raise ValueError(f"{entry['name']}: {entry['file']} has its text {text.count(entry['old'])} times, not once")
    path.write_text(text.replace(entry["old"], entry["new"]))
    return text


def copy_tree(to: Path) -> Path:
    """Copy the files of the working tree that git knows or does not ignore, with a link to .venv."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    )  # fmt: skip
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
    (to / ".venv").symlink_to(ROOT / ".venv")
    return to


def is_red(tests: list[str], tree: Path, timeout: float) -> bool:
    """Return whether a test fails; one that hangs counts as failed."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    words = [tree / ".venv/bin/python", "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", *tests]
    process = subprocess.Popen(
        words, cwd=tree, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.wait()
        return True
    if process.returncode not in (0, 1, 2):  # 2: an error while tests are collected
        raise RuntimeError(f"{tests}: pytest ended with {process.returncode}:\n{output.decode()[-2000:]}")
    return process.returncode != 0


def verdict(entry: dict, tree: Path, whole: bool, timeout: float, green: set[tuple[str, ...]]) -> str:
    """Return "caught", or "MISSED", or "RED" where the tests fail without the mutation, too.

    green: tests that are known to pass without one; those that this call finds to pass are added.
    """
    tests = ["tests"] if whole else entry["tests"]
    before = apply(entry, tree)
    try:
        red = is_red(tests, tree, timeout)
    finally:
        (tree / entry["file"]).write_text(before)
    if not red:
        return "MISSED"
    if tuple(tests) not in green:
        if is_red(tests, tree, timeout):
            return "RED"
        green.add(tuple(tests))
    return "caught"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="a file of tests/mutations, or words of a mutation's name")
    parser.add_argument("--jobs", type=int, default=1, help="copies of the tree that run at a time (default 1)")
    parser.add_argument("--timeout", type=float, default=900, help="seconds of a mutation's tests (default 900)")
    parser.add_argument("--whole", action="store_true", help="run every test, not those that the mutation names")
    options = parser.parse_args()
    chosen = [
        entry
        for entry in mutations()
        if not options.words or any(word == entry["area"] or word in entry["name"] for word in options.words)
    ]
    missed: list[str] = []
    green: set[tuple[str, ...]] = set()
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(options.jobs) as pool:
        trees: SimpleQueue[Path] = SimpleQueue()
        for number in range(options.jobs):
            trees.put(copy_tree(Path(directory) / str(number)))

        def judge(entry):
            tree = trees.get()
            try:
                word = verdict(entry, tree, options.whole, options.timeout, green)
            finally:
                trees.put(tree)
            print(f"{word:6}  {entry['area']}: {entry['name']}", flush=True)
            if word != "caught":
                missed.append(entry["name"])

        list(pool.map(judge, chosen))
    print(f"{len(chosen)} mutations, {len(missed)} not caught")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
