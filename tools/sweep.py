"""Runs, kills and broken files drawn at random: what no list of cases holds.

    tools/sweep --minutes 120 --seed 1         a line for each failure, then a table of what was drawn
    tools/sweep --only 1:37                    that draw again

Three kinds of draws: a run of any method with any options on any mesh, held to one process; a run killed at a random
instant, held to an uninterrupted one; a file with random damage, which `dtrain validate` has to answer in words. A draw
is a function of the seed and its number. It runs in a process of its own. The sweep gates nothing.
"""

import argparse
import contextlib
import io
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from dtrain.base.orphans import end_with_parent
from dtrain.commands.cli import main as dtrain
from tests import test_every_pair as pairs
from tests.checkpoint import test_kills as kills
from tests.methods import test_every_method as methods
from tests.methods.comparing import assert_same_run
from tests.methods.recipes import recipe_of
from tests.mistakes import write_sound
from tests.running import run
from tests.tiny import save_weights

WAIT = 600  # seconds of a draw, beyond which it hangs
BROKEN = ("sft.yaml", "rows.jsonl", "pairs.jsonl", "prompts.jsonl", "config.json", "tokenizer.json",
          "tokenizer_config.json", "model.safetensors")  # fmt: skip
VALUES = (None, True, -1, 0, 1 << 62, 1e308, "", "\ud800", "\u202e" * 9, [], {}, [[]] * 9, {"a": {"a": {}}})

Case = dict[str, str]


def drawn(draw: random.Random, axes: dict, can_run: Callable[[Case], bool]) -> Case:
    while True:
        case = {axis: draw.choice([*values]) for axis, values in axes.items()}
        if can_run(case):
            return case


def run_of_sft(draw: random.Random, root: Path) -> tuple[Case, Callable[[], None]]:
    case = drawn(draw, pairs.AXES, pairs.can_run)

    def check() -> None:
        alone = pairs.recipe_of(root, "alone", case, pairs.MODEL, "train.micro_batch=12")
        accumulation = 1 if case["accumulation"] == "1" else 2
        micro_batch = f"train.micro_batch={12 // (pairs.size(case, 'dp') * accumulation)}"
        mesh = pairs.recipe_of(root, "mesh", case, pairs.AXES, micro_batch)
        pairs.same(run(mesh, pairs.ranks_of(case), timeout=WAIT), run(alone), case)

    return case, check


def run_of_method(draw: random.Random, root: Path) -> tuple[Case, Callable[[], None]]:
    case = drawn(draw, methods.AXES, methods.can_run)

    def check() -> None:
        shape, method = {"family": case["family"]}, case["method"]
        of_model, of_mesh = (methods.overrides_of(case, axes) for axes in (methods.MODEL, methods.AXES))
        alone = recipe_of(root, method, *of_model, "train.micro_batch=12", name="alone", **shape)
        mesh = recipe_of(root, method, *of_mesh, name="mesh", **shape)
        assert_same_run(run(mesh, methods.ranks_of(case), timeout=WAIT), run(alone))

    return case, check


def killed_run(draw: random.Random, root: Path) -> tuple[Case, Callable[[], None]]:
    targets = [draw.choice(["launcher", "worker", "all"]) for _ in range(draw.randint(1, 3))]
    case = {"method": draw.choice(["sft", "lora", "grpo"]), "killed": ", ".join(targets)}

    def check() -> None:
        (root / "whole").mkdir()
        (root / "killed").mkdir()
        whole = run(kills.recipe_of(case["method"], root / "whole", len(targets), kills.LAST), 2, timeout=WAIT)
        kills.kill_and_go_on(root / "killed", whole, draw, targets)

    return case, check


def broken_file(draw: random.Random, root: Path) -> tuple[Case, Callable[[], None]]:
    case = {"file": draw.choice(BROKEN), "damage": draw.choice(["bytes", "cut", "doubled", "value", "key"])}

    def check() -> None:
        write_sound(root)
        model = root / "qwen3-tied"
        save_weights(model)
        files = {path.name: path for path in (*root.iterdir(), *model.iterdir()) if path.is_file()}
        path = files[case["file"]]
        path.write_bytes(damaged(draw, path.read_bytes(), case["damage"]))
        text = io.StringIO()
        for name in ("sft", "dpo", "grpo"):
            with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
                status = dtrain(["validate", str(root / f"{name}.yaml"), "model.init=pretrained"])
            assert status in (0, 1, 2), f"status {status}"
        assert "Traceback" not in text.getvalue(), text.getvalue()[-500:]

    return case, check


def damaged(draw: random.Random, content: bytes, damage: str) -> bytes:
    """Return `content` with damage of a kind at a random place."""
    place = draw.randrange(len(content))
    if damage == "bytes":
        return content[:place] + draw.randbytes(draw.randint(1, 9)) + content[place + 4 :]
    if damage == "cut":
        return content[:place]
    if damage == "doubled":
        return content[:place] + content[: draw.randrange(len(content))] + content[place:]
    lines = content.split(b"\n") if content.startswith(b'{"input') or content.startswith(b'{"prompt') else [content]
    number = draw.randrange(len(lines))
    try:
        tree = json.loads(lines[number])
    except ValueError:
        return content[:place] + json.dumps(draw.choice(VALUES)).encode() + content[place + 1 :]
    nodes = [node for node in _containers(tree) if node]
    node = draw.choice(nodes)
    key = draw.choice([*node] if isinstance(node, dict) else range(len(node)))
    if damage == "value":
        node[key] = draw.choice(VALUES)
    elif isinstance(node, dict):
        node["\u200b" + str(key)] = node.pop(key)
    else:
        node.insert(key, node[key])
    lines[number] = json.dumps(tree).encode()
    return b"\n".join(lines)


def _containers(tree):
    yield from [tree] if isinstance(tree, (dict, list)) else []
    for child in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else []:
        yield from _containers(child)


KINDS = {"run of SFT": run_of_sft, "run of a method": run_of_method, "killed run": killed_run, "file": broken_file}
SHARES = (4, 3, 1, 12)  # draws of each kind, about equal times


def plan(seed: int, number: int, root: Path) -> tuple[str, Case, Callable[[], None]]:
    """Return kind, case and check of a draw."""
    draw = random.Random(f"{seed}:{number}")
    kind = draw.choices([*KINDS], SHARES)[0]
    return kind, *KINDS[kind](draw, root)


def outcome(seed: int, number: int) -> str | None:
    """Run a draw in a process of its own; return what was wrong, in a line."""
    with tempfile.TemporaryDirectory(prefix="dtrain-sweep-") as directory:
        report, parent = Path(directory, "report"), os.getpid()
        child = os.fork()
        if child == 0:
            _child(seed, number, Path(directory), report, parent)
        ends = time.monotonic() + 3 * WAIT
        while not (done := os.waitpid(child, os.WNOHANG))[0]:
            if time.monotonic() > ends:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return "it hangs"
            time.sleep(0.05)
        if done[1] == 0:
            return None
        return report.read_text() if report.exists() else f"the process ended with {done[1]}"


def _child(seed, number, root, report, parent):
    end_with_parent(parent)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  until the process ends
    os.dup2(sys.stdout.fileno(), 1)
    os.dup2(sys.stdout.fileno(), 2)
    status = 1
    try:
        (root / "files").mkdir()
        plan(seed, number, root / "files")[2]()
        status = 0
    except BaseException as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        text = " ".join(f"{type(error).__name__}: {error}".split())
        report.write_text(f"{Path(last.filename).name}:{last.lineno}: {text[:100]} ... {text[-300:]}")
    finally:
        os._exit(status)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10, help="how long (default 10)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", metavar="SEED:NUMBER", help="one draw again")
    parser.add_argument("--json", type=Path, help="write the table and the failures there, too")
    options = parser.parse_args()
    seed, first = map(int, options.only.split(":")) if options.only else (options.seed, 0)
    began, number, seen, failures = time.monotonic(), first, Counter(), []
    while options.only is None or number == first:
        if options.only is None and time.monotonic() - began > 60 * options.minutes:
            break
        kind, case, _ = plan(seed, number, Path())
        seen.update([(kind, "", ""), *((kind, axis, value) for axis, value in case.items())])
        if wrong := outcome(seed, number):
            failures.append(f"tools/sweep --only {seed}:{number}  # {kind}: {', '.join(case.values())}: {wrong}")
            print(failures[-1], flush=True)
        number += 1
    for (kind, axis, value), count in sorted(seen.items()):
        print(f"{count:6}  {kind}{f': {axis} {value}' if axis else ''}")
    minutes = (time.monotonic() - began) / 60
    print(f"{number - first} draws in {minutes:.1f} minutes, {len(failures)} failures")
    if options.json:
        table = [[*key, count] for key, count in sorted(seen.items())]
        options.json.write_text(json.dumps({"seed": seed, "minutes": minutes, "drawn": table, "failures": failures}))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
