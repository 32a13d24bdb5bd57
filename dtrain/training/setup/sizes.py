"""Setup of the sizes: the ranges of all values, the batch that the data decide, and the number of steps."""

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from dtrain import recipe as config
from dtrain.base.errors import Problem, RecipeError
from dtrain.base.ranges import plural
from dtrain.data.model_directory import ModelDirectory
from dtrain.data.rows.rows import Cursor, Rows
from dtrain.recipe import Recipe, Sizes
from dtrain.recipe.saved import unused_keys_of
from dtrain.recipe.world import largest_divisor
from dtrain.training.host import Host
from dtrain.training.inputs import RunInputs
from dtrain.training.registry import build_method
from dtrain.training.setup.data import DataFacts

if TYPE_CHECKING:
    from dtrain.methods import Method


@dataclass(frozen=True)
class SizeFacts:
    """The sizes of a run.

    Attributes:
        recipe: The recipe with numbers for `train.global_batch` and `train.micro_batch`, if the rows were read.
        method: The method of that recipe.
        sizes: The mesh and the batch.
        steps: Steps of a fresh run. None if the rows were not read.
        notes: Lines for the user.
    """

    recipe: Recipe
    method: "Method"
    sizes: Sizes
    steps: int | None = None
    notes: tuple[str, ...] = ()


def check_keys(inputs: RunInputs) -> list[Problem]:
    """Check the range of every value, the method's section, and the steps."""
    recipe, method = inputs.recipe, inputs.method
    problems = [wrong_value.to_problem() for wrong_value in inputs.wrong_values]
    problems += method.missing() + method.problems()
    steps, epochs = recipe.train.steps, recipe.train.epochs
    if steps is None and epochs is None:
        text = "train.steps or train.epochs is missing"
        other_keys = ("train.epochs",)
        problems.append(Problem("train.steps", text, "Set one of them", is_missing=True, other_keys=other_keys))
    if steps is not None and epochs is not None:
        text = f"train.steps={steps} and train.epochs={epochs} exclude each other"
        problems.append(Problem("train.steps", text, "Set one of them to null"))
    if recipe.train.dynamic_batch and recipe.data.packing:
        text = "train.dynamic_batch=true is for padded rows, and data.packing packs them"
        problems.append(Problem("train.dynamic_batch", text, "Set data.packing=false, or leave it out"))
    if recipe.train.share_prompts is True and method.shared_beginnings is None:
        text = f"train.share_prompts=true has no effect with method={recipe.method}, whose rows share no prompts"
        problems.append(Problem("train.share_prompts", text, "Leave it out"))
    return problems


def check_files(inputs: RunInputs) -> list[Problem]:
    """Check that the recipe sets no keys of another method."""
    problems = []
    for key in unused_keys_of(inputs.recipe):
        other = key.split(".")[0]
        text = f"{key} is read only by method={other}, and this recipe has method={inputs.recipe.method}"
        problems.append(Problem(key, text, f"Leave it out, or set method={other}"))
    return problems


def position_notes(recipe: Recipe, source: ModelDirectory) -> list[str]:
    """Return a note on sequences that are longer than the model's positions."""
    model, length = source.any_config, recipe.data.max_length
    if model is None or length <= model.max_position_embeddings:
        return []
    return [
        f"note: data.max_length={length} is more than the {model.max_position_embeddings} positions that the model "
        "was made for (max_position_embeddings of its config.json)"
    ]


def decide(inputs: RunInputs, data: DataFacts, host: Host) -> SizeFacts | None:
    """Decide the batch and the number of steps, and let the method check the data on rank 0.

    Args:
        inputs: The run's inputs.
        data: The data. Without rows, only the sizes that follow from the recipe are decided.
        host: The ranks.

    Returns:
        The sizes. None in a dry run that found a problem with them.

    Raises:
        UserError: On every rank, if the ranks cannot share the batch, or if the method cannot use the data.

    Collectives:
        One broadcast, if the data were read.
    """
    recipe = data.recipe
    rows = data.rows.get("train")
    notes: list[str] = []
    if rows is not None:
        recipe_with_batch = host.attempt("train.global_batch", partial(_with_batch, inputs, recipe, rows))
        if recipe_with_batch is None:
            return None
        recipe = recipe_with_batch
        notes += _note_on_micro_batch(inputs, data.recipe, recipe)
    method = host.attempt(recipe.method_name, partial(build_method, recipe))
    if method is None:
        return None
    steps = None
    if rows is not None:
        steps = recipe.train.steps
        if steps is None:
            steps = host.attempt("train.epochs", partial(method.source.remaining_steps, rows, Cursor(), {}))
    if data.is_read:
        num_samples = {split: len(split_rows.samples) for split, split_rows in data.rows.items()}
        # Rank 0 only, because the method may start a process, for example a tool server.
        host.on_first_rank(recipe.method_name, partial(method.check_data, data.example_rows, num_samples))
    return SizeFacts(recipe, method, config.derive_sizes(recipe, inputs.world.size), steps, tuple(notes))


def _with_batch(inputs: RunInputs, recipe: Recipe, rows: Rows) -> Recipe:
    """Return the recipe with a number for `train.global_batch=auto`, which follows from the rows of one pass.

    The number depends only on the data and the recipe, so that it is the same on every mesh. If the micro-batch does
    not divide a rank's share of the batch, it is reduced to the next number that does.

    Raises:
        RecipeError: If the data-parallel ranks do not divide the number.
    """
    if recipe.train.global_batch != "auto":
        return recipe
    rows_per_pass = rows.rows_in_epoch(0)
    total = build_method(recipe).automatic_batch(rows_per_pass)
    dp = config.derive_sizes(recipe, inputs.world.size).dp
    if total % dp:
        fewer = max(n for n in range(1, dp) if total % n == 0)
        text = (
            f"train.global_batch=auto is {total} for this data ({rows_per_pass} rows a pass), which {dp} data-parallel "
            "ranks cannot share"
        )
        fix = f"Set train.global_batch={-(-total // dp) * dp}, or train on {fewer} of them (launch.nproc)"
        raise RecipeError([Problem("train.global_batch", text, fix)])
    micro = largest_divisor(total // dp, recipe.train.num_micro_batch_rows)
    return replace(recipe, train=replace(recipe.train, global_batch=total, micro_batch=micro))


def _note_on_micro_batch(inputs: RunInputs, before: Recipe, after: Recipe) -> list[str]:
    """Return a note if the recipe sets a micro-batch and `_with_batch` has reduced it."""
    if (
        after.train.num_micro_batch_rows == before.train.num_micro_batch_rows
        or inputs.original_recipe.train.micro_batch == "auto"
    ):
        return []
    rows = after.train.num_batch_rows // config.derive_sizes(after, inputs.world.size).dp
    return [
        f"note: train.micro_batch={before.train.num_micro_batch_rows} becomes {after.train.num_micro_batch_rows}, "
        f"since it does not divide the {rows} {plural(rows, 'row')} that a rank has of the global batch"
    ]
