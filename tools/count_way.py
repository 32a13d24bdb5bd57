"""The way of a batch, counted: the files of dtrain whose code it runs through, and the frames to its loss.

    .venv/bin/python tools/count_way.py [sft|dpo|grpo|distill] [key=value ...]

A tiny recipe runs for three steps in this process under `sys.setprofile`. Prints JSON; tests/test_way.py holds the
numbers.
"""

import importlib
import json
import pkgutil
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import dtrain
from dtrain import recipe as config
from dtrain.methods.method import Method
from dtrain.parallel.runtime import Runtime
from dtrain.run import trainer
from dtrain.run.stages import data
from tests.methods.test_dpo_runs import recipe_of
from tests.tiny import save_weights, tiny_grpo, tiny_recipe, write_model

PACKAGE = f"{Path(dtrain.__file__).parent}/"
# What is written down, and how files are read and written: not on a batch's way.
RECORDS = ("run/metrics/", "run/directory.py", "checkpoint/", "recipe/", "base/files.py")
STEP = 2


def tiny(method: str, root: Path, *overrides: str) -> config.Recipe:
    overrides = ("train.steps=3", *overrides)
    if method == "distill":
        teacher = save_weights(write_model(root / "teacher"), 1)
        return tiny_recipe(root, "method=distill", f"distill.teacher={teacher}", *overrides)
    return {"sft": tiny_recipe, "dpo": recipe_of, "grpo": tiny_grpo}[method](root, *overrides)


def count(recipe: config.Recipe) -> dict[str, Any]:
    """Files and functions of dtrain.

    step: files of the second step, from its rows to the updated weights. way: files of what opens the data, and of the
    loop, but for those that keep records (metrics, checkpoint, config). frames: the functions on the stack from
    `train_checked` to the method's loss.
    """
    way: set[str] = set()
    step: set[str] = set()
    frames: list[str] = []
    within: list[str] = []  # the marked functions that run now
    steps = 0
    marks = {data.open_splits.__code__: "way", trainer.Trainer.loop.__code__: "way"}
    marks[trainer.Policy.train.__code__] = "step"
    for module in pkgutil.walk_packages(dtrain.__path__, "dtrain."):  # a module's own body is no part of the way
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    losses = {kind.loss.__code__ for kind in _kinds(Method)}

    def called(frame: FrameType, event: str, _: Any) -> None:
        nonlocal steps
        code = frame.f_code
        if event == "return" and code in marks:
            within.pop()
        if event != "call" or not code.co_filename.startswith(PACKAGE):
            return
        if code in marks:
            within.append(marks[code])
            steps += marks[code] == "step"
        if within:
            way.add(_file(frame))
        if "step" in within and steps == STEP:
            step.add(_file(frame))
            if code in losses and not frames:
                frames.extend(reversed(_stack(frame)))

    sys.setprofile(called)
    try:
        trainer.train_checked(recipe, Runtime())
    finally:
        sys.setprofile(None)
    way = {file for file in way if not file.startswith(RECORDS)}
    return {"step": sorted(step), "way": sorted(way), "frames": frames}


def _file(frame: FrameType) -> str:
    return frame.f_code.co_filename.removeprefix(PACKAGE)


def _kinds(kind: type) -> list[type]:
    return [kind, *(one for sub in kind.__subclasses__() for one in _kinds(sub))]


def _stack(frame: FrameType | None) -> list[str]:
    found = []
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            found.append(f"{_file(frame)}:{frame.f_code.co_name}")
        frame = frame.f_back
    return found


if __name__ == "__main__":
    method, *overrides = sys.argv[1:] or ["sft"]
    with tempfile.TemporaryDirectory() as directory:
        found = count(tiny(method, Path(directory), *overrides))
    sizes = {f"{name}_count": len(files) for name, files in found.items()}
    print(json.dumps(sizes | found, indent=1))
