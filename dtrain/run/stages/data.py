"""Stage data: the rows of the splits, as the run reads them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtrain.data import Rows, open_rows
from dtrain.methods.spec import spec_of
from dtrain.run.host import Host

if TYPE_CHECKING:
    from dtrain.run.spec import RunSpec


def resolve(spec: "RunSpec", host: Host) -> bool:
    """Open the rows of data.train and data.val; the first process of a run to come tokenises, the others wait for its
    cache."""
    open_splits(spec, spec.recipe.cache, host.recorder.say, host.ranks.is_first)
    for split, rows in spec.rows.items():
        host.ranks.same(rows.fingerprint, f"data.{split} is not the same on every host")
    spec.is_data_read = True
    if "val" in spec.rows:
        spec.identities["data.val.fingerprint"] = spec.rows["val"].samples.identity
    spec.identities["data.fingerprint"] = spec.rows["train"].samples.identity
    spec.plain_prompts = spec.rows["train"].samples.meta["plain_prompts"]
    return True


def splits(spec: "RunSpec") -> list[str]:
    """Return the names of the splits that the recipe has."""
    return ["train"] if spec.recipe.data.val is None else ["train", "val"]


def row_options(spec: "RunSpec", cache_dir: Path | None) -> dict[str, Any]:
    """Return the arguments of `open_rows` and `looks` that follow from a recipe. Raises UserError."""
    recipe, method = spec.recipe, spec_of(spec.recipe)
    return {
        "kind": method.kind,
        "prompts": method.prompts(recipe),
        "label": method.label(recipe),
        "seed": recipe.run.seed,
        "tokenizer": spec.tokenizer,
        "cache_dir": cache_dir,
    }


def open_splits(
    spec: "RunSpec",
    cache_dir: Path | None,
    say: Callable[[str], None],
    progress: bool,
    names: Sequence[str] | None = None,
) -> None:
    """Open the rows of the splits of these names, None for all, tokenised or from the cache; data.val is packed as
    data.train is. All or none are set. Raises UserError."""
    recipe, options = spec.recipe, row_options(spec, cache_dir)
    opened: dict[str, Rows] = {}
    for split in splits(spec) if names is None else names:
        opened[split] = open_rows(
            recipe.data, split=split, epochs=recipe.train.epochs, say=say, progress=progress, **options
        )
        if recipe.data.packing == "auto":  # as the training rows are; completions to prompts are packed
            is_packed = opened["train"].packing or options["kind"] == "prompts"
            recipe = replace(recipe, data=replace(recipe.data, packing=is_packed))
    spec.recipe, spec.rows = recipe, opened
    spec.columns = {split: rows.samples.column_names() for split, rows in opened.items()}
