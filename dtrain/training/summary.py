"""Lines for the terminal before the first step of a run and after its last.

Most lines are rows of a table without borders: a label of `LABEL_WIDTH` characters, then text. For example:

    model     Qwen/Qwen3-0.6B, 596.0 M parameters, init pretrained
    data      6,709 samples, packed to 2,048 tokens
    batch     global batch 16 = micro batch 4 × accumulation 2 × dp 2
"""

import time
from collections.abc import Mapping
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
from dtrain.training.setup import schedule as scheduling, sizes as sizing
from dtrain.training.sizing import MACHINE
from dtrain.training.spec import RunSpec

if TYPE_CHECKING:
    from dtrain.methods import Method

LABEL_WIDTH = 10  # characters of a label, with the spaces after it
MIN_PLOT_POINTS = 8  # a curve with fewer values is not plotted
ANSWER_CHARS = 60  # characters of a prompt and of an answer that are shown


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
    """Return a row of a table without borders.

    >>> labelled_line("mesh", "one process, cpu")
    'mesh      one process, cpu'
    """
    return f"{label:<{LABEL_WIDTH}}{text}"


def opening_lines(run: BuiltRun) -> list[str]:
    """Return the lines before the first step: model, data, mesh, batch and steps, then the automatic choices."""
    spec = run.spec
    lines = _model_lines(run)
    lines.append(_data_line(spec))
    mesh = "one process"
    if spec.sizes.world_size > 1:
        mesh = f"{spec.sizes.world_size} processes: {spec.sizes.axes}"
    lines.append(labelled_line("mesh", f"{mesh}, {run.policy.device.type}"))
    lines.append(_batch_line(spec))
    lines += run.runtime.size_notes
    lines.append(labelled_line("steps", _steps(run)))
    if spec.recipe.train.validate_every == "auto" and spec.validate_every is not None:
        text = f"a validation every {spec.validate_every} of them (auto), and at the end"
        lines.append(labelled_line("", text))
    lines += spec.method.choices
    lines += _compute_lines(run)
    lines += scheduling.warmup_notes(spec.recipe, spec.total_steps)
    lines += spec.notes
    lines += sizing.position_notes(spec.recipe, spec.source)
    lines += run.recorder.choices
    return lines


def _model_lines(run: BuiltRun) -> list[str]:
    """Return the lines about the model and its vision tower."""
    recipe, model = run.spec.recipe, run.policy.model
    count, trained = count_weights(model)
    part = "" if trained == count else f" ({_short(trained)} of them trained)"
    text = f"{recipe.model.path}, {_short(count)} parameters{part}, init {recipe.model.init}"
    library = model.config.transformers
    if library is not None:
        text += f", {model.config.architecture} of transformers {library.version}"
        if library.omitted_noise:
            text += f", without {', '.join(library.omitted_noise)}"
    lines = [labelled_line("model", text)]
    if model.config.vision is not None:
        lines.append(labelled_line("vision", _vision(run)))
    elif model.config.is_text_tower and recipe.model.init != "scratch":
        text = "the model's other parts (a vision tower) are not trained: an export has them as the files do"
        lines.append(labelled_line("", text))
    return lines


def _vision(run: BuiltRun) -> str:
    """Describe the vision tower, and name the key that decides whether it is trained."""
    count, trained = count_weights(*run.policy.model.model.vision)
    if trained == count:
        part = "trained"
    elif trained > 0:
        part = f"{_short(trained)} of them trained"
    else:
        part = "not trained"
    if trained > 0 and run.spec.recipe.lora is not None:
        key = "lora.target"
    else:
        key = f"train.vision={run.spec.recipe.train.vision}"
    return f"{_short(count)} parameters, {part} ({key})"


def _data_line(spec: RunSpec) -> str:
    """Return the line about the training rows.

    The rows per pass are shown if the batch or the steps follow from them.
    """
    rows = spec.rows["train"]
    per_pass = ""
    if spec.original_recipe.train.global_batch == "auto" or spec.recipe.train.epochs is not None:
        per_pass = f"{rows.rows_in_epoch(0):,} rows a pass, "
    length = f"packed to {rows.capacity:,} tokens" if rows.packing else f"of up to {rows.capacity:,} tokens"
    return labelled_line("data", f"{rows.samples.meta['samples']:,} {rows.samples.noun}, {per_pass}{length}")


def _batch_line(spec: RunSpec) -> str:
    sizes = spec.sizes
    auto = " (auto)" if spec.original_recipe.train.global_batch == "auto" else ""
    text = (
        f"global batch {sizes.global_batch}{auto} = micro batch {sizes.micro_batch} × accumulation "
        f"{sizes.accumulation} × dp {sizes.dp}"
    )
    return labelled_line("batch", text)


def _steps(run: BuiltRun) -> str:
    """Describe the number of steps and the learning rate."""
    recipe, total = run.spec.recipe, run.spec.total_steps
    schedule, epochs = recipe.scheduler, recipe.train.epochs
    passes = ""
    if epochs is not None:
        noun = "pass" if epochs == 1 else "passes"
        passes = f", {epochs:g} {noun} over the data"
    if isinstance(schedule, list):
        rate = f"learning rate {recipe.optimizer.lr:g} in {len(schedule)} stages"
    else:
        warmup = scheduling.warmup_of(schedule, total)
        warm = f", {warmup} of warm-up" if warmup > 0 else ""
        rate = f"learning rate {recipe.optimizer.lr:g}, {schedule.name}{warm}"
    return f"{total:,}{passes}; {rate}"


def _compute_lines(run: BuiltRun) -> list[str]:
    """Return the lines about the dtype, the kernels and the compilation of the model."""
    policy = run.policy
    model = policy.model
    compute = str(policy.precision.compute).removeprefix("torch.")
    lines = [f"compute in {compute} ({policy.precision.reason})"]
    if policy.device.type == "cuda":
        kernel = model.model.kernel
        note = f" ({kernel.note})" if kernel.note else ""
        lines.append(f"attention: {kernel.name}{note}")
        if model.config.linear_attention is not None:
            reason = f" ({model.model.no_flash_delta_reason})" if model.model.no_flash_delta_reason else ""
            name = f"torch{reason}" if model.model.flash_delta is None else "fla"
            lines.append(f"linear attention: {name}")
    if model.uncompiled_reason is not None:
        lines.append(f"note: train.compile=true, and layers run uncompiled: {model.uncompiled_reason}")
    return lines


def describe_run(run: BuiltRun, planned: int = 0) -> dict[str, Any]:
    """Return the content of about.json.

    Args:
        run: The run.
        planned: Bytes of a rank's tensors at their peak, by the plan. 0 without a plan.
    """
    device = run.policy.device
    parameters, trained = count_weights(run.policy.model)
    sizes = run.spec.sizes
    is_cuda = device.type == "cuda"
    return {
        "dtrain": __version__,
        "torch": torch.__version__,
        "started": time.time(),
        "device": torch.cuda.get_device_name(device) if is_cuda else device.type,
        "world_size": sizes.world_size,
        "mesh": {**sizes.shape, "ep": sizes.ep},
        "batch": {
            "global_batch": sizes.global_batch,
            "micro_batch": sizes.micro_batch,
            "accumulation": sizes.accumulation,
        },
        "compute": str(run.policy.precision.compute).removeprefix("torch."),
        "parameters": parameters,
        "trained": trained,
        "steps": run.spec.total_steps,
        "planned": planned or None,
        MACHINE: dict(run.runtime.machine),
        "memory_before_gib": 0.0 if is_cuda else run.before_gib,
    }


def _short(number: int) -> str:
    """Format a number of parameters.

    >>> _short(596_049_920), _short(4_480)
    ('596.0 M', '4,480')
    """
    return f"{number / 1e6:.1f} M" if number >= 1e5 else f"{number:,}"


def closing_lines(
    recipe: Recipe, method: "Method", directory: Path, *, has_export: bool, has_images: bool = False
) -> list[str]:
    """Return the last lines of a run: what it has learned, by its metrics.jsonl, and commands to continue with.

    Args:
        recipe: The recipe.
        method: The recipe's method.
        directory: The run's directory.
        has_export: Whether the run has written its export.
        has_images: Whether the run's data have images.
    """
    titles = dict(method.curves)  # field of metrics.jsonl -> title
    for eval_set in eval_sets.list_eval_sets(recipe.eval):
        titles[f"{eval_set.prefix}reward_mean"] = f"{eval_set.name} reward"
    lines = _result_lines(titles, directory)
    lines += _answer_lines(directory)
    lines.append(labelled_line("next", f"dtrain report {directory}"))
    generates_text = method.labels() is None
    if not has_export or not generates_text:
        return lines
    image = "--image FILE " if has_images else ""
    lines.append(labelled_line("", f'dtrain generate {directory} {image}--prompt "..."'))
    lines.append(labelled_line("", f"dtrain eval {directory} {_questions(recipe, method.kind)}"))
    lines.append(labelled_line("", f"dtrain serve {directory}"))
    if recipe.lora is not None:
        lines.append(labelled_line("", f"dtrain export {directory} OUT    # the full model, with the adapter merged"))
    return lines


def _result_lines(titles: Mapping[str, str], directory: Path) -> list[str]:
    """Return a plot of the first long curve, and a line for each curve with its first and last values.

    Args:
        titles: The titles of the fields.
        directory: The run's directory.
    """
    rows = list(records.read_rows(directory / "metrics.jsonl"))
    curves = {}
    for field in titles:
        points = records.curve_points(rows, field)
        if points:
            curves[field] = points
    lines = []
    for field, points in curves.items():
        if len(points) >= MIN_PLOT_POINTS:
            for index, line in enumerate(plot(points)):
                lines.append(labelled_line(titles[field] if index == 0 else "", line))
            break  # only one curve is plotted
    for field, points in curves.items():
        if len(points) > 1:
            values = [value for _, value in points]
            lines.append(labelled_line("result", f"{titles[field]} {_change(field, values)}"))
    return lines


def _change(field: str, values: list[float]) -> str:
    """Describe how a curve has changed, for example "4 → 1 (the first and the last of 4; the lowest 0.5)"."""
    summary = records.summarize_curve(field, values)
    if summary.num_averaged > 1:
        compared = f"means of the first and last {summary.num_averaged}"
    else:
        compared = "the first and the last"
    lowest = ""
    if field == "val_loss" and min(values) < summary.last:
        lowest = f"; the lowest {min(values):.4g}"
    return f"{summary.first:.4g} → {summary.last:.4g} ({compared} of {len(values)}{lowest})"


def _questions(recipe: Recipe, kind: str) -> str:
    """Return a file of prompts for `dtrain eval`, or a placeholder.

    It is the validation file, or the training file of a method that trains on prompts.
    """
    source = None
    if isinstance(recipe.data.val, DataSource):
        source = recipe.data.val
    elif kind == "prompts":
        source = recipe.data.train
    if source is None or kind == "pairs" or not isinstance(source.path, str):
        return "FILE    # prompts with answers"
    return source.path


def _answer_lines(directory: Path) -> list[str]:
    """Return lines with the first and the last answer to the same prompt, from evaluations or else from rollouts."""
    for name in ("evals.jsonl", "samples.jsonl"):
        path = directory / name
        if not path.is_file():
            continue
        file = records.AnswerFile(path)
        file.refresh()
        if len(file.steps) < 2:
            continue
        first = next(file.read_step(min(file.steps)), None)
        if first is not None:
            return [_answer_line("answers", first), _answer_line("", _last_answer(file, first))]
    return []


def _last_answer(file: records.AnswerFile, first: records.Answer) -> records.Answer:
    """Return the last step's answer to the question of `first`, or else its first answer to any question."""
    last_step = max(file.steps)
    for answer in file.read_step(last_step):
        if answer.key == first.key:
            return answer
    return next(file.read_step(last_step), first)


def _answer_line(label: str, answer: records.Answer) -> str:
    reward = "" if answer.reward is None else f" (reward {answer.reward:.3g})"
    prompt = shorten_to_line(answer.prompt, ANSWER_CHARS)
    text = shorten_to_line(answer.text, ANSWER_CHARS)
    return labelled_line(label, f"step {answer.step}{reward}: {prompt} → {text}")
