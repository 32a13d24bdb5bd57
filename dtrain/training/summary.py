"""Lines for the terminal on a run before its first step, and when it is done."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dtrain import __version__
from dtrain.parallel.mesh import Runtime
from dtrain.policy import Policy
from dtrain.recipe import Recipe
from dtrain.recipe.schema import DataSource
from dtrain.training import eval_sets
from dtrain.training.metrics import Recorder, records
from dtrain.training.metrics.terminal import plot, shorten_to_line
from dtrain.training.model_facts import count_weights
from dtrain.training.setup import schedule as scheduling
from dtrain.training.setup import sizes as sizing
from dtrain.training.sizing import MACHINE
from dtrain.training.spec import RunSpec

if TYPE_CHECKING:
    from dtrain.methods import Method

LABEL = 10  # characters of a label with the blanks behind it
PLOTTED = 8  # values from which on a curve is drawn
SHOWN = 60  # characters of an answer


@dataclass(frozen=True)
class BuiltRun:
    """A run whose model is built.

    Attributes:
        spec: The run's spec.
        policy: Its model.
        runtime: This rank.
        recorder: The sinks of its metrics.
        before_gib: Memory of this process before the model was built, in GiB.
    """

    spec: RunSpec
    policy: Policy
    runtime: Runtime
    recorder: Recorder
    before_gib: float


def labelled_line(label: str, text: str) -> str:
    """A line of a table without borders."""
    return f"{label:<{LABEL}}{text}"


def opening_lines(run: BuiltRun) -> Iterator[str]:
    """The sizes of a run that is built: model, rows, mesh, batch, steps; then the choices that were made for it."""
    written = run.spec.original_recipe
    recipe, sizes, policy, rows = run.spec.recipe, run.spec.sizes, run.policy, run.spec.rows["train"]
    count, trained = count_weights(policy.model)
    of_it = "" if trained == count else f" ({_short(trained)} of them trained)"
    yield labelled_line("model", f"{recipe.model.path}, {_short(count)} parameters{of_it}, init {recipe.model.init}")
    if policy.model.config.vision is not None:
        yield labelled_line("vision", _vision(run))
    elif policy.model.config.is_text_tower and recipe.model.init != "scratch":
        yield labelled_line("", "its other parts (a vision tower) are not trained: an export has them as the files do")
    counted = written.train.global_batch == "auto" or recipe.train.epochs is not None
    per_pass = f"{rows.rows_in_epoch(0):,} rows a pass, " if counted else ""
    packed = f"packed to {rows.capacity:,} tokens" if rows.packing else f"of up to {rows.capacity:,} tokens"
    yield labelled_line("data", f"{rows.samples.meta['samples']:,} {rows.samples.noun}, {per_pass}{packed}")
    world = f"{sizes.world_size} processes: {sizes.axes}" if sizes.world_size > 1 else "one process"
    yield labelled_line("mesh", f"{world}, {policy.device.type}")
    auto = " (auto)" if written.train.global_batch == "auto" else ""
    yield labelled_line(
        "batch",
        f"global batch {sizes.global_batch}{auto} = micro batch {sizes.micro_batch} × accumulation "
        f"{sizes.accumulation} × dp {sizes.dp}",
    )
    yield from run.runtime.size_notes
    yield labelled_line("steps", _steps(run))
    if recipe.train.validate_every == "auto" and run.spec.validate_every is not None:
        yield labelled_line("", f"a validation every {run.spec.validate_every} of them (auto), and at the end")
    yield from run.spec.method.choices
    yield f"compute in {str(policy.precision.compute).removeprefix('torch.')} ({policy.precision.reason})"
    if policy.device.type == "cuda":
        kernel = policy.model.model.kernel
        yield f"attention: {kernel.name}" + (f" ({kernel.note})" if kernel.note else "")
        if policy.model.config.linear_attention is not None:
            why = f" ({policy.model.model.no_flash_delta_reason})" if policy.model.model.no_flash_delta_reason else ""
            yield "linear attention: " + (f"torch{why}" if policy.model.model.flash_delta is None else "fla")
    if policy.model.uncompiled_reason is not None:
        yield f"note: train.compile=true, and layers run uncompiled: {policy.model.uncompiled_reason}"
    yield from _notes(run)
    yield from run.recorder.choices


def describe_run(run: BuiltRun, planned: int = 0) -> dict[str, Any]:
    """about.json of the run. planned: bytes of a rank's tensors at their peak, where there is a plan."""
    device, (parameters, trained) = run.policy.device, count_weights(run.policy.model)
    is_cuda = device.type == "cuda"
    return {
        "dtrain": __version__,
        "torch": torch.__version__,
        "started": time.time(),
        "device": torch.cuda.get_device_name(device) if is_cuda else device.type,
        "world_size": run.spec.sizes.world_size,
        "mesh": {**run.spec.sizes.shape, "ep": run.spec.sizes.ep},
        "batch": {name: getattr(run.spec.sizes, name) for name in ("global_batch", "micro_batch", "accumulation")},
        "compute": str(run.policy.precision.compute).removeprefix("torch."),
        "parameters": parameters,
        "trained": trained,
        "steps": run.spec.total_steps,
        "planned": planned or None,
        MACHINE: dict(run.runtime.machine),
        "memory_before_gib": 0.0 if is_cuda else run.before_gib,
    }


def _short(number: int) -> str:
    return f"{number / 1e6:.1f} M" if number >= 1e5 else f"{number:,}"


def _vision(run: BuiltRun) -> str:
    count, trained = count_weights(*run.policy.model.model.vision)
    part = "trained" if trained == count else f"{_short(trained)} of them trained" if trained else "not trained"
    key = "lora.target" if trained and run.spec.recipe.lora else f"train.vision={run.spec.recipe.train.vision}"
    return f"{_short(count)} parameters, {part} ({key})"


def _steps(run: BuiltRun) -> str:
    recipe, total = run.spec.recipe, run.spec.total_steps
    schedule, epochs = recipe.scheduler, recipe.train.epochs
    passes = "" if epochs is None else f", {epochs:g} pass{'es' if epochs != 1 else ''} over the data"
    if isinstance(schedule, list):
        rate = f"learning rate {recipe.optimizer.lr:g} in {len(schedule)} stages"
    else:
        warmup = scheduling.warmup_of(schedule, total)
        warm = f", {warmup} of warm-up" if warmup > 0 else ""
        rate = f"learning rate {recipe.optimizer.lr:g}, {schedule.name}{warm}"
    return f"{total:,}{passes}; {rate}"


def _notes(run: BuiltRun) -> Iterator[str]:
    yield from scheduling.warmup_notes(run.spec.recipe, run.spec.total_steps)
    yield from run.spec.notes
    yield from sizing.position_notes(run.spec.recipe, run.spec.source)


def closing_lines(
    recipe: Recipe, method: "Method", directory: Path, *, has_export: bool, has_images: bool = False
) -> Iterator[str]:
    """Yield the last lines of a run: what it has learned, by its metrics.jsonl, and commands to continue with.

    Args:
        recipe: The recipe.
        method: The recipe's method.
        directory: The run's directory.
        has_export: Whether the run has written its export.
        has_images: Whether the run's data have images.
    """
    evals = eval_sets.sets(recipe.eval)
    rewards = {f"{each.prefix}reward_mean": f"{each.name} reward" for each in evals}
    names = {**method.curves, **rewards}
    rows = list(records.read_rows(directory / "metrics.jsonl"))
    curves = {name: curve for name in names if (curve := records.curve_points(rows, name))}
    drawn = next((name for name, curve in curves.items() if len(curve) >= PLOTTED), "")
    for number, line in enumerate(plot(curves.get(drawn, []))):
        yield labelled_line("" if number else names[drawn], line)
    for name, curve in curves.items():
        values = [value for _, value in curve]
        first, last, count = records.summarize_curve(name, values)
        best = f"; the lowest {min(values):.4g}" if name == "val_loss" and min(values) < last else ""
        steps = f"means of the first and last {count}" if count > 1 else "the first and the last"
        if len(values) > 1:
            yield labelled_line("result", f"{names[name]} {first:.4g} → {last:.4g} ({steps} of {len(values)}{best})")
    yield from _answers(directory)
    yield labelled_line("next", f"dtrain report {directory}")
    if not has_export or method.labels() is not None:
        return
    image = "--image FILE " if has_images else ""
    yield labelled_line("", f'dtrain generate {directory} {image}--prompt "..."')
    yield labelled_line("", f"dtrain eval {directory} {_questions(recipe, method.kind)}")
    yield labelled_line("", f"dtrain serve {directory}")
    if recipe.lora is not None:
        yield labelled_line("", f"dtrain export {directory} OUT    # whole, the adapter merged")


def _questions(recipe: Recipe, kind: str) -> str:
    """Return a file of prompts: the validation file, the training file of a method with prompts, or a placeholder."""
    val = recipe.data.val
    held = val if isinstance(val, DataSource) else recipe.data.train if kind == "prompts" else None
    return held.path if held and kind != "pairs" and isinstance(held.path, str) else "FILE    # prompts with answers"


def _answers(directory: Path) -> Iterator[str]:
    """The first and the last answer to an evaluation's first prompt; of a run without, those of its rollouts."""
    paths = [path for name in ("evals.jsonl", "samples.jsonl") if (path := directory / name).is_file()]
    if not paths:
        return
    from dtrain.training.metrics.records import AnswerFile  # a run without answers loads nothing of them

    for index in map(AnswerFile, paths):
        index.refresh()
        first = next(index.read_step(min(index.steps)), None) if len(index.steps) > 1 else None
        if first is None:
            continue
        same = (answer for answer in index.read_step(max(index.steps)) if answer.key == first.key)
        last = next(same, None) or next(index.read_step(max(index.steps)), first)
        for label, answer in (("answers", first), ("", last)):
            reward = "" if answer.reward is None else f" (reward {answer.reward:.3g})"
            prompt = shorten_to_line(answer.prompt, SHOWN)
            yield labelled_line(label, f"step {answer.step}{reward}: {prompt} → {shorten_to_line(answer.text, SHOWN)}")
        return
