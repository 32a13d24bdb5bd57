"""Rows of the splits, opened as a run and its dry run do; beside the stage data."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from dtrain.data import Rows, open_rows
from dtrain.methods import method_of
from dtrain.run.host import Host
from dtrain.run.spec import RunSpec

DIGESTS = {"train": "data.fingerprint", "val": "data.val.fingerprint"}  # of the rows of each split


def splits(spec: RunSpec) -> list[str]:
    """Return the names of the splits that the recipe has."""
    return ["train"] if spec.recipe.data.val is None else ["train", "val"]


def row_options(spec: RunSpec, cache_dir: Path | None) -> dict[str, Any]:
    """Return the arguments of `open_rows` and `looks` that follow from a recipe. Raises UserError."""
    recipe, method = spec.recipe, method_of(spec.recipe)
    return {
        "kind": method.kind,
        "prompts": method.prompts(),
        "label": method.label(),
        "seed": recipe.run.seed,
        "tokenizer": spec.source.tokenizer,
        "cache_dir": cache_dir,
    }


def open_splits(spec: RunSpec, cache_dir: Path | None, host: Host) -> None:
    """Open the rows of the splits, tokenised or from the cache; data.val is packed as data.train is. All or none are
    set. Raises UserError. Collective."""
    recipe, options = spec.recipe, row_options(spec, cache_dir)
    opened: dict[str, Rows] = {}
    for split in splits(spec):
        opened[split] = open_rows(
            recipe.data,
            split=split,
            epochs=recipe.train.epochs,
            say=host.say,
            progress=not host.is_dry and host.ranks.is_first,
            **options,
        )
        if recipe.data.packing == "auto":  # as the training rows are; completions to prompts are packed
            is_packed = opened["train"].packing or options["kind"] == "prompts"
            recipe = replace(recipe, data=replace(recipe.data, packing=is_packed))
    spec.recipe, spec.rows = recipe, opened
    spec.columns = {split: rows.samples.column_names() for split, rows in opened.items()}
    for split, rows in opened.items():
        host.ranks.same(rows.fingerprint, f"data.{split} is not the same on every host")
        spec.identities[DIGESTS[split]] = rows.samples.identity
    spec.plain_prompts = opened["train"].samples.meta["plain_prompts"]
