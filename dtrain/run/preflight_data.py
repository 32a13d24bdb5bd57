"""Checks of the data that a recipe names, before anything starts: files, URLs, datasets of the hub, sets of `eval`.

Of a file the first row is read. Imports no torch.
"""

from contextlib import suppress
from importlib import import_module
from pathlib import Path

from dtrain.base.errors import UserError
from dtrain.data.sources import hub as data_hub
from dtrain.data.sources import urls
from dtrain.data.sources.files import Pick, entries, formats_of, is_data_id, is_url, kind_of, resolve
from dtrain.methods.spec import spec_of
from dtrain.models.read_config import read_config
from dtrain.recipe import Recipe
from dtrain.recipe.schema import DataSource, Source
from dtrain.run import eval_sets
from dtrain.run.preflight_models import is_model


def _sources(recipe: Recipe) -> list[tuple[Source, str]]:
    splits = [("data.train", recipe.data.train), ("data.val", recipe.data.val)]
    sources = [entry for key, split in splits if isinstance(split, DataSource) for entry in entries(split, key)]
    return [*sources, *((each.section, each.key) for each in eval_sets.sets(recipe))]


def _paths(source: Source) -> list[str]:
    return [source.path] if isinstance(source.path, str) else source.path or []


def absent_data(recipe: Recipe) -> list[tuple[str, str, Pick]]:
    """Key and id of every dataset of the hub that is not in the cache, and what of it is wanted."""
    absent = []
    for source, key in _sources(recipe):
        pick = Pick.of(source)
        for name in _paths(source):
            with suppress(UserError):  # a split that is not there: told where the files are looked at
                if is_data_id(name) and data_hub.cached(name, pick, key) is None:
                    absent.append((f"{key}.path", name, pick))
    return absent


def _is_away(recipe: Recipe, path: str, key: str) -> bool:
    """Return whether a URL is still to be copied: its files are then there, and of a kind that is read. Raises
    UserError."""
    remotes = urls.away(path, key, recipe.cache) if is_url(path) else []
    for remote in remotes:
        kind_of(remote.copy, key)
    return bool(remotes)


def has_urls(recipe: Recipe) -> bool:
    return any(is_url(path) for source, _ in _sources(recipe) for path in _paths(source))


def to_copy(recipe: Recipe) -> list[str]:
    """Return what a run of a sound recipe copies into its cache, a line each."""
    return [
        f"{key}.path={path}: the run copies {remote.url} into {recipe.cache}"
        + (f", {remote.size / 2**20:.1f} MiB" if remote.size is not None else "")
        for source, key in _sources(recipe)
        for path in _paths(source)
        for remote in (urls.away(path, f"{key}.path", recipe.cache) if is_url(path) else ())
    ]


def _of_no_hub(source: Source, key: str) -> list[str]:
    """Return keys for datasets of the hub where no path is one."""
    named = [f"{key}.{option.split(' ')[0]}" for option in Pick.of(source).options().split(" --")[1:]]
    if not named or any(map(is_data_id, _paths(source))):
        return []
    return [f"{' and '.join(named)}: for datasets of the Hugging Face hub (owner/name), and {key}.path names files"]


def data_problems(recipe: Recipe, split: DataSource, key: str) -> list[str]:
    problems: list[str] = []
    for source, at in entries(split, key):
        try:
            files = _here(recipe, source, at, problems)
            if files and spec_of(recipe).refuses(recipe, source.format) is None:  # else check says why
                formats_of(files, source.format, spec_of(recipe).kind, source.columns, f"{at}.columns")
        except UserError as error:
            problems.append(str(error))
    return problems


def _here(recipe: Recipe, source: Source, key: str, problems: list[str]) -> list[Path]:
    """The files of a source that are here. Raises UserError."""
    if not source.path or f"{key}.path" in {at for at, _, _ in absent_data(recipe)}:  # check, or `not_here`, says so
        return []
    problems += _of_no_hub(source, key)
    named = [path for path in _paths(source) if not _is_away(recipe, path, f"{key}.path")]
    return resolve(named, f"{key}.path", source, recipe.cache) if named else []


def eval_problems(recipe: Recipe, eval_set: eval_sets.EvalSet) -> list[str]:
    problems: list[str] = []
    files: list[Path] = []
    directory = recipe.model.directory
    positions = read_config(directory, 0).max_position_embeddings if is_model(directory) else None
    for act in (
        lambda: files.extend(_here(recipe, eval_set.section, eval_set.key, problems)),
        lambda: problems.extend(import_module("dtrain.run.eval_section").look(eval_set, files, positions)),
    ):
        try:
            act()
        except UserError as error:
            problems.append(str(error))
    return problems
