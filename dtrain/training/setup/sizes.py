"""Stage sizes: the method and its section, and what the data decide: `train.global_batch=auto`, and the steps."""

from dataclasses import replace

from dtrain import recipe as config
from dtrain.base.errors import UserError
from dtrain.base.ranges import plural, shown
from dtrain.data import Cursor, Rows
from dtrain.recipe.automatic import largest_divisor
from dtrain.training import method_of
from dtrain.training.host import Host
from dtrain.training.spec import RunSpec


def check_keys(spec: RunSpec) -> list[str]:
    """Check the range of every value, the method's section, and the steps."""
    recipe, method = spec.recipe, spec.method
    problems = [f"{key}={shown(value)} must be {sentence}" for key, value, sentence in spec.wrong_values]
    problems += method.missing() + method.problems()
    steps, epochs = recipe.train.steps, recipe.train.epochs
    if steps is None and epochs is None:
        problems.append("train.steps or train.epochs is missing: set one of them")
    if steps is not None and epochs is not None:
        problems.append(f"train.steps={steps} and train.epochs={epochs} exclude each other: set one of them to null")
    if recipe.train.dynamic_batch and recipe.data.packing:
        problems.append("train.dynamic_batch=true is for padded rows: set data.packing=false, or leave it out")
    return problems


def check_files(spec: RunSpec) -> list[str]:
    """Return keys that the recipe gives to another method."""
    return [
        f"{key} is read by method={(other := key.split('.')[0])} alone, and this recipe has "
        f"method={spec.recipe.method}: leave it out, or set method={other}"
        for key in getattr(spec.recipe, "unread", ())
    ]


def position_notes(spec: RunSpec) -> list[str]:
    """Return a note on sequences that are longer than the model's positions."""
    config, length = spec.source.any_config, spec.recipe.data.max_length
    if config is None or length <= config.max_position_embeddings:
        return []
    return [
        f"note: data.max_length={length} is more than the {config.max_position_embeddings} positions that the model "
        "was made for (max_position_embeddings of its config.json)"
    ]


def resolve(spec: RunSpec, host: Host) -> bool:
    """Give the recipe its sizes, and make its method."""
    rows = spec.rows.get("train")
    if host.is_dry:  # a run writes it with the other lines of its opening
        spec.notes += position_notes(spec)
    if rows is not None and host.ask(_resolve_batch, spec, rows) is None:
        return False
    method = host.ask(method_of, spec.recipe)
    if method is None:
        return False
    spec.method = method
    if rows is not None:
        spec.steps = spec.recipe.train.steps or host.ask(method.source.steps_left, rows, Cursor(), {})
    if spec.is_data_read:
        samples = {split: len(rows_of.samples) for split, rows_of in spec.rows.items()}
        host.first(lambda: method.examine(spec.columns, samples))  # it may start a process
    spec.sizes = config.sizes(spec.recipe, spec.world.size)
    return True


def _resolve_batch(spec: RunSpec, rows: Rows) -> bool:
    """Give the recipe a number in place of `train.global_batch=auto`, by the rows of the first pass over them.

    The number is a function of the data and the recipe alone, so every mesh has the same; a micro-batch that does not
    divide a rank's part of it becomes the next smaller one that does. Raises UserError where the data-parallel ranks do
    not divide it.
    """
    recipe = spec.recipe
    if recipe.train.global_batch != "auto":
        return True
    per_pass = rows.rows_in_epoch(0)
    total = method_of(recipe).automatic_batch(per_pass)
    dp = config.sizes(recipe, spec.world.size).dp
    if total % dp:
        fewer = max(n for n in range(1, dp) if total % n == 0)
        raise UserError(
            f"train.global_batch=auto comes to {total} for this data ({per_pass} rows a pass), which {dp} "
            f"data-parallel ranks cannot share: set train.global_batch={-(-total // dp) * dp}, or train on "
            f"{fewer} of them (launch.nproc)"
        )
    micro = largest_divisor(total // dp, recipe.train.micro)
    if micro != recipe.train.micro and spec.written.train.micro_batch != "auto":
        spec.notes.append(
            f"note: train.micro_batch={recipe.train.micro} becomes {micro}, since it does not divide the "
            f"{total // dp} {plural(total // dp, 'row')} that a rank has of the global batch"
        )
    spec.recipe = replace(recipe, train=replace(recipe.train, global_batch=total, micro_batch=micro))
    return True
