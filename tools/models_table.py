#!/usr/bin/env python3
"""Checks every causal language model of the installed transformers, and writes the table of docs/models.md.

    .venv/bin/python tools/models_table.py --out models.json              all classes, about 15 minutes on 2 cores
    .venv/bin/python tools/models_table.py --out models.json --only cohere2 glm4
    .venv/bin/python tools/models_table.py --out models.json --write      write the table from models.json

Each class is checked with a tiny config (tests/models/library_configs.py) in a process of its own:

1. dtrain reads the config, or refuses it.
2. The run's own proof (`dtrain.models.transformers.proof`) says whether packed rows are right.
3. Independently of the proof, the loss and gradients of a packed row are compared with transformers' eager attention,
   one document at a time. Padded rows are compared if the proof refuses packed ones.
4. Two steps of SFT with dp 2, cp 2 and tp 2 are compared with the same steps on one process, over gloo. They start from
   files that transformers has written.

A class that dtrain accepts and computes wrongly is reported as WRONG, and the tool's exit status is 1.
"""

import argparse
import contextlib
import io
import json
import logging
import os
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.distributed.fsdp
import torch.distributed.tensor
import transformers

sys.path.insert(0, str(Path(__file__).parents[1]))

from dtrain.base.errors import UserError
from dtrain.models import build, parse_config
from dtrain.models.registry import families
from dtrain.models.transformers.config import make_library_config
from dtrain.models.transformers.proof import prove
from tests.models.library_configs import tiny_config
from tests.models.library_oracle import (
    compute_expected,
    compute_packed,
    compute_padded,
    copy_weights,
    find_difference,
    is_causal,
    make_oracle,
)
from tests.running import distance, run, trajectory
from tests.tiny import tiny_recipe, write_model

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
BEGIN, END = "<!-- models of transformers: begin -->", "<!-- models of transformers: end -->"
PACKED, PADDED, REFUSED, ENCODER, WRONG, UNKNOWN = "packed", "padded", "refused", "encoder", "WRONG", "not checked"
SECONDS = 240  # for a class
LOSS_TOLERANCE, GRADIENT_TOLERANCE, MESH_TOLERANCE = 1e-9, 1e-6, 1e-9
MESHES = {
    "dp": ["train.micro_batch=1"],
    "cp": ["train.micro_batch=2", "parallel.cp=2"],
    "tp": ["train.micro_batch=2", "parallel.tp=2", "parallel.sequence_parallel=false"],
}
# Parts of reasons, and the words for them in the table.
_WORDS = {
    "cannot be replaced": "its attention cannot be replaced by dtrain's",
    "the loss is": "other numbers than transformers, found by the proof",
    "meta tensor": "its attention depends on values of the tokens",
}
_SHAPE = ["train.global_batch=4", "scheduler.warmup_steps=0", "train.steps=2", "model.implementation=transformers",
          "model.init=pretrained"]  # fmt: skip


@dataclass
class Result:
    """What is known about a class.

    Attributes:
        model_type: Key of the config.
        architecture: Name of the class.
        status: One of the constants above.
        reason: Why it is not packed, in a few words.
        meshes: The meshes on which it trains.
        refused_meshes: Why it does not train on the others.
        is_native: Whether dtrain has a model of its own for the architecture.
        seconds: Time of the check.
    """

    model_type: str
    architecture: str = ""
    status: str = UNKNOWN
    reason: str = ""
    meshes: list[str] = field(default_factory=list)
    refused_meshes: dict[str, str] = field(default_factory=dict)
    is_native: bool = False
    seconds: float = 0.0


def check_class(model_type: str) -> Result:
    """Check the class of a model type, as the module's docstring describes."""
    result = Result(model_type)
    config_class = transformers.CONFIG_MAPPING[model_type]
    cls = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
    result.architecture = cls.__name__
    result.is_native = cls.__name__ in families()
    try:
        values = json.loads(tiny_config(model_type).to_json_string(use_diff=False))
        values["architectures"] = [cls.__name__]
        library_config = make_library_config(values, "config.json")
        library_model = make_oracle(library_config)
        expected = compute_expected(library_model)
    except Exception as error:  # noqa: BLE001 - a class may raise anything for a config that is not its own
        result.reason = f"transformers does not run it in this form: {first_line(error)}"
        return result
    if not is_causal(library_model):
        result.status, result.reason = ENCODER, "its tokens see later ones"
        return result
    try:
        config = parse_config(values, implementation="transformers")
    except UserError as error:
        result.status, result.reason = REFUSED, short_reason(str(error))
        return result
    proof = prove(values)
    if proof.problem:
        result.status, result.reason = REFUSED, proof.problem
        return result
    model = build(config, torch.float64)
    copy_weights(model, library_model)
    result.status = PADDED if proof.leak else PACKED
    if proof.leak:
        result.reason = f"{proof.leak} mixes documents"
    computed = compute_padded(model) if proof.leak else compute_packed(model)
    difference = find_difference(computed, expected, LOSS_TOLERANCE, GRADIENT_TOLERANCE)
    if difference:
        result.status, result.reason = WRONG, difference
        return result
    check_meshes(values, library_model, result)
    return result


def check_meshes(values: dict[str, Any], library_model: Any, result: Result) -> None:
    """Train on each mesh from files of transformers, compare with one process, and add the results."""
    packing = f"data.packing={'true' if result.status == PACKED else 'false'}"
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        model = write_model(root / "qwen3-tied")
        library_model.float().save_pretrained(model)
        (model / "config.json").write_text(json.dumps(values))
        shape = [*_SHAPE, packing]
        expected = trajectory(run(tiny_recipe(root, *shape, "train.micro_batch=4", name="one")))
        for name, options in MESHES.items():
            if name == "cp" and result.status == PADDED:
                continue
            try:
                rows = trajectory(run(tiny_recipe(root, *shape, *options, name=name), 2, timeout=90))
            except (UserError, AssertionError) as error:
                result.refused_meshes[name] = mesh_reason(str(error))
                continue
            pairs = zip(rows, expected, strict=True)
            error = max(max(distance(ours[0], one[0]), distance(ours[1], one[1])) for ours, one in pairs)
            if error <= MESH_TOLERANCE:
                result.meshes.append(name)
            else:
                result.status, result.reason = WRONG, f"{name} 2 differs from one process by {error:.1e}"


def first_line(error: object) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:160]


def short_reason(message: str) -> str:
    """Return an error of `parse_config` without the names of the file and of the class, and without details."""
    lines = [line.strip().removeprefix("- ") for line in message.splitlines()]
    if len(lines) > 1:
        return lines[1]
    text = lines[0].removeprefix("config.json: ").partition(" ('")[0]
    for start in ("does not run on dtrain's attention: ", "has no layer"):
        if start in text:
            return ("no layer" if start == "has no layer" else "") + text.partition(start)[2]
    return text


def mesh_reason(message: str) -> str:
    """Return the last line of a rank's error that says something."""
    lines = [line.strip() for line in message.splitlines() if line.strip() and not line.startswith("case ")]
    return lines[-1].rpartition("Error: ")[2][:300] if lines else "no message"


def check_all(model_types: list[str], out: Path) -> list[Result]:
    """Check classes, two at a time, each in a forked process. The results are written to `out` as they come."""
    results: dict[str, Result] = {}
    if out.exists():
        results = {row["model_type"]: Result(**row) for row in json.loads(out.read_text())["results"]}
    waiting, running = list(model_types), {}
    with tempfile.TemporaryDirectory() as directory:
        while waiting or running:
            while waiting and len(running) < 2:
                model_type = waiting.pop(0)
                path = Path(directory) / f"{model_type}.json"
                running[fork_check(model_type, path)] = (model_type, path, time.monotonic())
            time.sleep(0.1)
            for process, (model_type, path, start) in list(running.items()):
                seconds = time.monotonic() - start
                has_ended = os.waitpid(process, os.WNOHANG)[0] == process
                if not has_ended and seconds < SECONDS:
                    continue
                if not has_ended:
                    os.kill(process, signal.SIGKILL)
                    os.waitpid(process, 0)
                del running[process]
                result = Result(model_type, reason=f"no result after {seconds:.0f} s")
                if path.exists():
                    result = Result(**json.loads(path.read_text()))
                result.seconds = round(seconds, 1)
                results[model_type] = result
                meshes = ", ".join(result.meshes)
                print(f"{model_type:24} {result.status:12} {meshes:12} {result.reason}", flush=True)
                rows = [asdict(row) for row in results.values()]
                out.write_text(json.dumps({"transformers": version("transformers"), "results": rows}, indent=1))
    return [results[model_type] for model_type in model_types]


def fork_check(model_type: str, path: Path) -> int:
    """Check a class in a forked process that writes its result to `path`. Return the process."""
    process = os.fork()
    if process:
        return process
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            try:
                result = check_class(model_type)
            except Exception:  # noqa: BLE001 - a mistake of this tool or of dtrain, which the table shows
                result = Result(model_type, reason=f"the check failed: {traceback.format_exc()[-600:]}")
        path.write_text(json.dumps(asdict(result)))
    finally:
        os._exit(0)


def write_page(results: list[Result], library: str) -> None:
    """Write the table between the marks of the page."""
    text = PAGE.read_text()
    head, _, rest = text.partition(BEGIN)
    tail = rest.partition(END)[2]
    PAGE.write_text(f"{head}{BEGIN}\n\n{table(results, library)}\n{END}{tail}")


def table(results: list[Result], library: str) -> str:
    """Return the lists and tables of docs/models.md."""
    groups: dict[str, list[Result]] = {}
    for result in sorted(results, key=lambda result: result.model_type):
        kind = result.status
        if kind == PACKED and len(result.meshes) < len(MESHES):
            kind = f"{PACKED} without {' and '.join(mesh for mesh in MESHES if mesh not in result.meshes)}"
        groups.setdefault(kind, []).append(result)
    lines = [f"transformers {library} has {len(results)} types of causal models:", ""]
    lines += ["| result | types | `model_type` |", "| --- | --- | --- |"]
    texts = {
        PACKED: "packed rows on dp 2, cp 2 and tp 2",
        f"{PACKED} without tp": "packed rows on dp 2 and cp 2, not on tp",
        ENCODER: "encoders, whose tokens see later ones: refused",
        UNKNOWN: "not checked: the tiny config of the check does not run in transformers",
    }
    for kind, text in texts.items():
        found = groups.pop(kind, [])
        lines.append(f"| {text} | {len(found)} | {', '.join(_name(result) for result in found)} |")
    for kind, text in ((PADDED, "Padded rows only"), (REFUSED, "Refused")):
        found = groups.pop(kind, [])
        column = "layers that mix documents" if kind == PADDED else "reason"
        lines += ["", f"{text} ({len(found)}):", "", f"| `model_type` | {column} |", "| --- | --- |"]
        by_reason: dict[str, list[str]] = {}
        for result in found:
            reason = result.reason.removesuffix(" mixes documents")
            for part, words in _WORDS.items():
                reason = words if part in reason else reason
            missing = [mesh for mesh in ("dp", "tp") if mesh not in result.meshes]
            if kind == PADDED and missing:
                reason += f"; not on {' and '.join(missing)}"
            by_reason.setdefault(_one_cell(reason), []).append(_name(result))
        lines += [f"| {', '.join(names)} | {reason} |" for reason, names in by_reason.items()]
    for kind, found in groups.items():
        lines += ["", f"{kind}: " + ", ".join(f"{_name(result)} ({_one_cell(result.reason)})" for result in found)]
    return "\n".join(lines) + "\n"


def _name(result: Result) -> str:
    return f"{result.model_type}*" if result.is_native else result.model_type


def _one_cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="file of the results; classes in it are kept")
    parser.add_argument("--only", nargs="*", help="model types to check")
    parser.add_argument("--write", action="store_true", help="write docs/models.md from the results, and check nothing")
    args = parser.parse_args()
    if args.write:
        found = json.loads(args.out.read_text())
        write_page([Result(**row) for row in found["results"]], found["transformers"])
        return 0
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    names = [config.model_type for config in transformers.MODEL_FOR_CAUSAL_LM_MAPPING]
    results = check_all(args.only or list(dict.fromkeys(names)), args.out)
    print(dict(Counter(result.status for result in results)))
    return int(any(result.status == WRONG for result in results))


if __name__ == "__main__":
    sys.exit(main())
