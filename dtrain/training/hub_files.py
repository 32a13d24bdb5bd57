"""Models and datasets that a recipe names by their ids on the Hugging Face hub: finding and downloading their files.

A model or dataset that is not in this machine's cache is not a problem: a run downloads it after all other checks, and
`dtrain validate` queries the hub about the same files. Imports no torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

from dtrain.base.errors import Problem, UserError
from dtrain.base.hub import (
    cached_model_directory,
    download_model,
    incomplete_download_message,
    is_model_id,
    look_up_model,
    missing_files,
)
from dtrain.base.ranges import directory_hint, plural
from dtrain.data.sources.files import files_to_copy, is_url, source_entries, source_paths, uncached_datasets
from dtrain.data.sources.hub import DatasetPart
from dtrain.recipe import Recipe
from dtrain.recipe.schema import DataSource, Source
from dtrain.recipe.world import replace_keys
from dtrain.training import eval_sets
from dtrain.training.registry import build_method


class HubModel(NamedTuple):
    """A model that a recipe names by an id on the hub.

    Attributes:
        key: The recipe's key.
        name: The id, such as "Qwen/Qwen3-0.6B".
        needs_weights: Whether the run reads its weights. With model.init=scratch it does not.
    """

    key: str
    name: str
    needs_weights: bool


class HubDataset(NamedTuple):
    """A dataset that a recipe names by an id on the hub.

    Attributes:
        key: The recipe's key, for example "data.train.path".
        name: The id, for example "openai/gsm8k".
        part: The subset, split and revision that the recipe names.
    """

    key: str
    name: str
    part: DatasetPart


@dataclass(frozen=True)
class SmallFiles:
    """A recipe whose models have their small files (config.json, tokenizer) on this machine.

    Attributes:
        recipe: The recipe with the models' directories.
        pending_downloads: For each key, a line on the files that the run downloads first.
        problems: A problem for each model and dataset that the hub refuses.
    """

    recipe: Recipe
    pending_downloads: Mapping[str, str]
    problems: Sequence[Problem]


def _data_hub() -> ModuleType:
    """Import the module for datasets on the hub, which a run on local files does not need."""
    from dtrain.data.sources import hub

    return hub


def with_local_model(recipe: Recipe, *, fetch: bool = False) -> Recipe:
    """Replace each model's id on the hub (`Qwen/Qwen3-0.6B`) by its directory in the hub's cache.

    Args:
        recipe: The recipe.
        fetch: Whether to download models and datasets that are not in the cache. Without it, such a model keeps its id.
            A dataset always keeps its id.

    Raises:
        UserError: If the hub refuses a download.
    """
    for key, name, needs_weights in model_ids(recipe):
        path = cached_model_directory(name, weights=needs_weights)
        if path is None and fetch:
            try:
                path = download_model(name, weights=needs_weights, key=key)
            except UserError as error:
                raise UserError(_refused(key, name, error).text) from error
        if path is not None:
            recipe = replace_keys(recipe, {key: str(path)})
    if not fetch:
        return recipe
    for key, name, part in absent_data(recipe):
        try:
            _data_hub().download(name, part, key.removesuffix(".path"))
        except UserError as error:
            raise UserError(_refused(key, name, error).text) from error
    return recipe


def with_small_files(recipe: Recipe) -> SmallFiles:
    """Download the small files of models on the hub, and look up the files that the run would download."""
    pending_downloads: dict[str, str] = {}
    problems: list[Problem] = []
    for key, name, needs_weights in model_ids(recipe):
        try:
            if needs_weights:
                directory, size = look_up_model(name, key)
                pending_downloads[key] = (
                    f"{key}={name}: the run downloads its weights from the hub, {size / 2**30:.2f} GiB"
                )
            else:
                directory = download_model(name, weights=False, key=key)
            recipe = replace_keys(recipe, {key: str(directory)})
        except UserError as error:
            problems.append(_refused(key, name, error))
    for key, name, part in absent_data(recipe):
        try:
            count = len(_data_hub().fetch_listing(name, part, key.removesuffix(".path")).paths)
        except UserError as error:
            problems.append(_refused(key, name, error))
            continue
        pending_downloads[key] = (
            f"{key}={name}: the run downloads {count} {plural(count, 'file')} from the hub and checks the rows then"
        )
    return SmallFiles(recipe, pending_downloads, problems)


def _refused(key: str, name: str, error: UserError) -> Problem:
    """Return the problem of a model or dataset that the hub refuses."""
    reason = str(error).removeprefix(f"{key}: ")  # some of these errors name the key already
    return Problem(key, f"{key}={name}: {reason}")


def missing_problems(recipe: Recipe) -> list[Problem]:
    """Return a problem for each model and dataset that `with_local_model` would fetch."""
    problems = []
    for key, name, needs_weights in model_ids(recipe):
        missing = missing_files(name, weights=needs_weights)
        if missing:
            problems.append(
                Problem(key, f"{key}={incomplete_download_message(name, missing, f'dtrain download {name}')}")
            )
            continue
        text = (
            f"{key}={name} is not a directory here, and as a model of the Hugging Face hub it is not in this machine's "
            f"cache{directory_hint(name)}"
        )
        problems.append(Problem(key, text, f"Fetch it with `dtrain download {name}`"))
    for key, name, part in absent_data(recipe):
        problems.append(Problem(key, _data_hub().describe_uncached(name, part, key)))
    return problems


def model_ids(recipe: Recipe) -> list[HubModel]:
    """Return every model that the recipe names by an id on the hub."""
    named = [HubModel("model.path", recipe.model.path or "", recipe.model.init == "pretrained")]
    named += [HubModel(key, path, True) for key, path in build_method(recipe).other_models()]
    return [model for model in named if model.name and is_model_id(model.name)]


def sources_of(recipe: Recipe) -> list[tuple[Source, str]]:
    """Return every source of rows with its key: the sources of the splits, then those of the sets of `eval`."""
    sources: list[tuple[Source, str]] = []
    for key, split in (("data.train", recipe.data.train), ("data.val", recipe.data.val)):
        if isinstance(split, DataSource):
            sources += source_entries(split, key)
    sources += [(eval_set.section, eval_set.key) for eval_set in eval_sets.list_eval_sets(recipe.eval)]
    return sources


def absent_data(recipe: Recipe) -> list[HubDataset]:
    """Return every dataset on the hub that is not in this machine's cache."""
    absent = []
    for source, key in sources_of(recipe):
        for name, part in uncached_datasets(source, key):
            absent.append(HubDataset(f"{key}.path", name, part))
    return absent


def has_urls(recipe: Recipe) -> bool:
    """Check whether the recipe names files of rows by URLs."""
    for source, _ in sources_of(recipe):
        if any(is_url(path) for path in source_paths(source)):
            return True
    return False


def to_copy(recipe: Recipe) -> list[str]:
    """Return a line for each file at a URL that a run copies into its cache.

    Args:
        recipe: The recipe, whose paths were checked already.

    Raises:
        UserError: If a path names no files.
    """
    lines = []
    for source, key in sources_of(recipe):
        for path in source_paths(source):
            for file in files_to_copy(path, f"{key}.path", recipe.cache):
                size = "" if file.size is None else f", {file.size / 2**20:.1f} MiB"
                lines.append(f"{key}.path={path}: the run copies {file.url} into {recipe.cache}{size}")
    return lines
