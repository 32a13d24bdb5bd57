"""What the terminal is told of a run before its first step, and when it is done."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtrain import eval_section, sizing
from dtrain.config.schema import DataSource, Recipe
from dtrain.methods.facts import facts_of
from dtrain.models.layers import weights_in

if TYPE_CHECKING:
    from dtrain.trainer import Trainer

LABEL = 10  # characters of a label with the blanks behind it
AVERAGED = 10  # steps at either end whose mean a curve is told by


def labelled(label: str, text: str) -> str:
    """A line of a table without borders."""
    return f"{label:<{LABEL}}{text}"


def opening(trainer: "Trainer", asked: Recipe) -> Iterator[str]:
    """The sizes of a run that is built: model, rows, mesh, batch, steps; then the choices that were made for it. asked:
    the recipe before `train.global_batch=auto` had a number."""
    recipe, sizes, policy, rows = trainer.recipe, trainer.sizes, trainer.policy, trainer.rows
    parameters = list(policy.model.parameters())
    count = sum(map(weights_in, parameters))
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    size, part = (f"{number / 1e6:.1f} M" if number >= 1e5 else f"{number:,}" for number in (count, trained))
    of_it = "" if trained == count else f" ({part} of them trained)"
    yield labelled("model", f"{recipe.model.path}, {size} parameters{of_it}, init {recipe.model.init}")
    if policy.model.config.is_text_tower and recipe.model.init != "scratch":
        yield labelled("", "its other parts (a vision tower) are not trained: an export has them as the files do")
    counted = asked.train.global_batch == "auto" or recipe.train.epochs is not None
    per_pass = f"{rows.rows_in_epoch(0):,} rows a pass, " if counted else ""
    packed = f"packed to {rows.capacity:,} tokens" if rows.packing else f"of up to {rows.capacity:,} tokens"
    yield labelled("data", f"{rows.samples.meta['samples']:,} {rows.samples.noun}, {per_pass}{packed}")
    world = f"{sizes.world_size} processes: {sizes.axes}" if sizes.world_size > 1 else "one process"
    yield labelled("mesh", f"{world}, {policy.device.type}")
    auto = " (auto)" * (asked.train.global_batch == "auto")
    yield labelled(
        "batch",
        f"global batch {sizes.global_batch}{auto} = micro batch {sizes.micro_batch} × accumulation "
        f"{sizes.accumulation} × dp {sizes.dp}",
    )
    yield labelled("steps", _steps(trainer))
    yield from trainer.method.choices
    yield f"compute in {str(policy.precision.compute).removeprefix('torch.')} ({policy.precision.reason})"
    if policy.device.type == "cuda":
        kernel = policy.model.model.kernel
        yield f"attention: {kernel.name}" + (f" ({kernel.note})" if kernel.note else "")
    if policy.model.uncompiled is not None:
        yield f"note: train.compile=true, and layers run uncompiled: {policy.model.uncompiled}"
    yield from _notes(trainer)
    yield from trainer.metrics.choices


def _steps(trainer: "Trainer") -> str:
    recipe, total = trainer.recipe, trainer.total_steps
    schedule, epochs = recipe.scheduler, recipe.train.epochs
    passes = "" if epochs is None else f", {epochs} pass{'es' * (epochs != 1)} over the data"
    if isinstance(schedule, list):
        rate = f"learning rate {recipe.optimizer.lr:g} in {len(schedule)} stages"
    else:
        warmup = sizing.warmup_of(schedule, total)
        rate = f"learning rate {recipe.optimizer.lr:g}, {schedule.name}" + f", {warmup} of warm-up" * (warmup > 0)
    return f"{total:,}{passes}; {rate}"


def _notes(trainer: "Trainer") -> Iterator[str]:
    recipe, longest = trainer.recipe, trainer.policy.model.config.max_position_embeddings
    yield from sizing.notes(recipe, trainer.total_steps)
    if recipe.data.max_length > longest:
        yield (
            f"note: data.max_length={recipe.data.max_length} is more than the {longest} positions that the model was "
            "made for (max_position_embeddings of its config.json)"
        )


def closing(recipe: Recipe, directory: Path, has_export: bool) -> Iterator[str]:
    """What a run that is done has learned, by its metrics.jsonl, and what may be done with it."""
    evals = eval_section.sets(recipe) if recipe.eval is not None else []
    rewards = {f"{one.prefix}reward_mean": f"{one.name} reward" for one in evals}
    names = {**facts_of(recipe).curves, **rewards}
    for name, values in _curves(directory / "metrics.jsonl", names).items():
        whole = name.startswith(("val_", "eval_"))  # of all validation rows, so that one value is no chance
        count = 1 if whole else max(1, min(AVERAGED, len(values) // 2))
        ends = values[:count], values[-count:]
        first, last = (sum(part) / len(part) for part in ends)
        best = f"; the lowest {min(values):.4g}" if name == "val_loss" and min(values) < last else ""
        steps = f"means of the first and last {len(ends[0])}" if len(ends[0]) > 1 else "the first and the last"
        if len(values) > 1:
            yield labelled("result", f"{names[name]} {first:.4g} → {last:.4g} ({steps} of {len(values)}{best})")
    if not has_export:
        return
    yield labelled("next", f'dtrain generate {directory} --prompt "..."')
    yield labelled("", f"dtrain eval {directory} {_questions(recipe)}")
    yield labelled("", f"dtrain serve {directory}")
    if recipe.lora is not None:
        yield labelled("", f"dtrain export {directory} OUT    # whole, the adapter merged")


def _questions(recipe: Recipe) -> str:
    """A file of prompts that the run knows: its validation's; of GRPO else its own; else the user's."""
    kind, val = facts_of(recipe).kind, recipe.data.val
    held = val if isinstance(val, DataSource) else recipe.data.train if kind == "prompts" else None
    return held.path if held and kind != "pairs" and isinstance(held.path, str) else "FILE    # prompts with answers"


def _curves(path: Path, names: Iterable[str]) -> dict[str, list[float]]:
    """Each of the fields that the run measured, over its steps."""
    found: dict[str, list[float]] = {name: [] for name in names}
    with path.open(encoding="utf-8") as file:
        for line in file:
            row: dict[str, Any] = json.loads(line)
            for name, values in found.items():
                if isinstance(row.get(name), int | float):
                    values.append(row[name])
    return {name: values for name, values in found.items() if values}
