"""Stage data: the rows of the splits, as the run reads them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from dtrain.base.errors import UserError
from dtrain.data import Rows, open_rows
from dtrain.data.sources import columns
from dtrain.data.sources.files import (
    absent_ids,
    entries,
    files_to_copy,
    formats_of,
    is_data_id,
    kind_of,
    paths_of,
)
from dtrain.data.sources.files import resolve as find_files
from dtrain.data.sources.hub_splits import Pick
from dtrain.data.text.dropped_text import CONFIRM, WAY_OUT
from dtrain.recipe.schema import DataSource, Source
from dtrain.training.host import Host, problems_of
from dtrain.training.resume import DIGEST_OF_SPLIT
from dtrain.training.spec import RunSpec


def _sections(spec: RunSpec) -> Iterator[tuple[str, DataSource]]:
    """Yield the key and the section of each split that has files of its own."""
    for key, section in (("data.train", spec.recipe.data.train), ("data.val", spec.recipe.data.val)):
        if isinstance(section, DataSource):
            yield key, section


def check_keys(spec: RunSpec) -> list[str]:
    """Check each split's sources: paths, formats that the method takes, names of columns."""
    recipe, method, problems = spec.recipe, spec.method, []
    label = method.label()
    unknown = partial(columns.unknown, more=[label.column] if label else [])
    for key, split in _sections(spec):
        problems += _paths(split, key)
        for source, at in [(split, key), *(entries(split, key) if split.sources else ())]:
            if (why := method.refuses(source.format)) is not None:
                problems.append(f"{at}.format={source.format}: {why}")
            problems += unknown(source.columns, method.kind, source.format, f"{at}.columns")
        problems += [
            f"{key}.{option} goes with {key}.path: give each of {key}.sources its own"
            for option in ("columns", "split", "subset", "revision")
            if split.sources and getattr(split, option) != getattr(DataSource(), option)
        ]
    if recipe.data.val is None and recipe.train.validate_every not in (None, "auto"):
        problems.append(
            f"train.validate_every={recipe.train.validate_every} needs a validation set: set data.val.path, "
            "or data.val=0.05 for a share of the training rows, or train.validate_every=auto"
        )
    return problems


def _paths(split: DataSource, key: str) -> list[str]:
    problems, named = [], entries(split, key)
    if split.sources == []:
        problems, named = [f"{key}.sources is empty: give it at least one {{path, format, weight}}"], []
    if split.path and split.sources is not None:
        problems.append(f"{key}.path and {key}.sources are both set: sources replace path, so set one of them to null")
    missing = [at for source, at in named if not source.path]
    return problems + [f"{at}.path is missing: set it to a file, a glob or a list of them" for at in missing]


def notes(spec: RunSpec) -> list[str]:
    """Return notes on rows that are kept out of training for nothing, and on files that are named twice."""
    return _unused_rows(spec) + _files_named_twice(spec)


def _files_named_twice(spec: RunSpec) -> list[str]:
    lines: list[str] = []
    first_key: dict[Path, str] = {}
    for split_key, split in _sections(spec):
        for source, key in entries(split, split_key):
            for file in _files_or_none(spec, source, key):
                first = first_key.get(file.resolve())
                if first is None:
                    first_key[file.resolve()] = key
                elif first.startswith(split_key):
                    lines.append(f"note: {file} is named twice ({first}.path, {key}.path): its rows count twice")
                else:
                    lines.append(f"note: {file} is in {first}.path and in {key}.path: validation sees trained rows")
    return lines


def _files_or_none(spec: RunSpec, source: Source, key: str) -> list[Path]:
    """Return the files of a source, none where they cannot be read, which `check_files` reports."""
    try:
        return files_here(spec, source, key)
    except (OSError, UserError):
        return []


def _unused_rows(spec: RunSpec) -> list[str]:
    share = spec.recipe.data.val
    if not isinstance(share, float | int) or spec.recipe.train.validate_every is not None:
        return []
    return [f"note: data.val={share} keeps rows out of training; set train.validate_every=auto to see their loss"]


def check_files(spec: RunSpec) -> list[str]:
    """Check that each source's files are there, and the first row of each."""
    problems: list[str] = []
    for key, split in _sections(spec):
        for source, at in entries(split, key):
            problems += of_no_hub(source, at) + problems_of(_check_formats, spec, source, at)
    return problems


def _check_formats(spec: RunSpec, source: Source, key: str) -> None:
    files, method = files_here(spec, source, key), spec.method
    if files and method.refuses(source.format) is None:  # else check_keys says why
        formats_of(files, source.format, method.kind, source.columns, f"{key}.columns")


def of_no_hub(source: Source, key: str) -> list[str]:
    """Return keys for datasets of the hub where no path is one."""
    named = [f"{key}.{option.split(' ')[0]}" for option in Pick.of(source).options().split(" --")[1:]]
    if not source.path or not named or any(map(is_data_id, paths_of(source))):
        return []
    return [f"{' and '.join(named)}: for datasets of the Hugging Face hub (owner/name), and {key}.path names files"]


def files_here(spec: RunSpec, source: Source, key: str) -> list[Path]:
    """Return the files of a source that are here. Raises UserError."""
    if not source.path or absent_ids(source, key):  # check_keys or not_here tells
        return []
    named = [path for path in paths_of(source) if not _needs_copy(spec, path, f"{key}.path")]
    return find_files(named, f"{key}.path", source, spec.cache) if named else []


def _needs_copy(spec: RunSpec, path: str, key: str) -> bool:
    """Return whether a URL is still to be copied: its files are then there, and of a kind that is read. Raises
    UserError."""
    files = files_to_copy(path, key, spec.cache)
    for file in files:
        kind_of(file.copy, key)
    return bool(files)


def resolve(spec: RunSpec, host: Host) -> bool:
    """Open the rows of data.train and data.val; the first process of a run to come tokenises, the others wait for its
    cache. A dry run has had its look at them: `first_rows`."""
    if host.is_dry:
        return True
    open_splits(spec, spec.cache, host.recorder.say, host.ranks.is_first)
    refuse_dropped_text(spec)
    for split, rows in spec.rows.items():
        host.ranks.same(rows.fingerprint, f"data.{split} is not the same on every host")
    spec.is_data_read = True
    return True


def refuse_dropped_text(spec: RunSpec) -> None:
    """Raise UserError where the chat template leaves out more than half of a split's text, unless the recipe confirms
    that."""
    if spec.recipe.data.allow_dropped_text:
        return
    for split, rows in spec.rows.items():
        if rows.samples.text.is_mostly_dropped:
            raise UserError(
                f"data.{split}: {rows.samples.describe_dropped_text()}. That is more than half: {WAY_OUT}, or "
                f"{CONFIRM}=true to train without it"
            )


def accept_images(spec: RunSpec, has_images: bool) -> None:
    """Set that the run has images, where rows have some. Raises UserError where its method or model takes none."""
    if not has_images:
        return
    if problems := spec.method.image_problems():
        raise UserError("\n".join(problems))
    spec.has_images = True
    spec.model_config  # noqa: B018 (refuses a tower that dtrain has not)


def splits(spec: RunSpec) -> list[str]:
    """Return the names of the splits that the recipe has."""
    return ["train"] if spec.recipe.data.val is None else ["train", "val"]


def row_options(spec: RunSpec, cache_dir: Path | None) -> dict[str, Any]:
    """Return the arguments of `open_rows` and `looks` that follow from a recipe. Raises UserError."""
    recipe, method = spec.recipe, spec.method
    return {
        "kind": method.kind,
        "prompts": method.prompts(),
        "label": method.label(),
        "seed": recipe.run.seed,
        "tokenizer": spec.source.tokenizer,
        "template": spec.source.template,
        "cache_dir": cache_dir,
    }


def open_splits(
    spec: RunSpec,
    cache_dir: Path | None,
    say: Callable[[str], None],
    progress: bool,
    names: Sequence[str] | None = None,
) -> None:
    """Open the rows of the splits of these names, None for all, tokenised or from the cache; data.val is packed as
    data.train is. All or none are set. Raises UserError."""
    recipe, options = spec.recipe, row_options(spec, cache_dir)
    opened: dict[str, Rows] = {}
    for split in names or splits(spec):
        opened[split] = open_rows(
            recipe.data, split=split, epochs=recipe.train.epochs, say=say, progress=progress, **options
        )
        if recipe.data.packing == "auto":  # as the training rows are; completions to prompts are packed
            is_packed = opened["train"].packing or options["kind"] == "prompts"
            recipe = replace(recipe, data=replace(recipe.data, packing=is_packed))
    spec.recipe, spec.rows = recipe, opened
    accept_images(spec, any(rows.samples.meta["images"] for rows in opened.values()))
    spec.columns = {split: rows.samples.example_row() for split, rows in opened.items()}
    spec.identities |= {DIGEST_OF_SPLIT[split]: rows.samples.identity for split, rows in opened.items()}
    spec.plain_prompts = opened["train"].samples.meta["plain_prompts"]
