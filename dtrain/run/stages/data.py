"""Stage data: the rows of the splits, as the run reads them."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtrain.data import Rows, open_rows
from dtrain.methods.spec import spec_of
from dtrain.run.host import Host
from dtrain.run.stages.sizes import resolve_packing

if TYPE_CHECKING:
    from dtrain.run.spec import RunSpec


def resolve(spec: "RunSpec", host: Host) -> bool:
    """Open the rows of data.train and data.val; the first process of a run to come tokenises, the others wait for its
    cache."""
    for split in splits(spec):
        spec.rows[split] = open_split(spec, split, spec.recipe.cache, host.recorder.say, host.ranks.is_first)
        spec.recipe = resolve_packing(spec.recipe, spec.rows["train"])  # val has it too
    for split, rows in spec.rows.items():
        host.ranks.same(rows.fingerprint, f"data.{split} is not the same on every host")
    spec.columns = {split: rows.samples.column_names() for split, rows in spec.rows.items()}
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


def open_split(spec: "RunSpec", split: str, cache_dir: Path | None, say: Callable[[str], None], progress: bool) -> Rows:
    """Return the rows of a split, tokenised or from the cache. Raises UserError."""
    options = row_options(spec, cache_dir)
    return open_rows(
        spec.recipe.data, split=split, epochs=spec.recipe.train.epochs, say=say, progress=progress, **options
    )
