"""Before a run: a recipe with the models that are here, its problems, and what the run would fetch first.

A model or dataset of the hub that is not in the cache is no problem: a run fetches it once all else is right, and
`dtrain validate` asks the hub for what the run would. Imports no torch; the stages that check a recipe do.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from dtrain.base.errors import UserError
from dtrain.base.hub import cached, download, incomplete, is_id, look, missing_files
from dtrain.base.problems import RecipeError
from dtrain.base.ranges import beside
from dtrain.data.sources.files import absent_ids, entries, files_to_copy, is_url, paths_of
from dtrain.data.sources.hub_splits import Pick
from dtrain.recipe import Recipe, redact, saved
from dtrain.recipe.automatic import changed
from dtrain.recipe.schema import DataSource, Source
from dtrain.training import eval_sets, method_of, recipe_and_problems
from dtrain.training.spec import RunSpec, World, resolve, stages_of


def load(recipe: str | Path | Mapping, overrides: Sequence[str] = ()) -> Recipe:
    """Load a recipe as `load_recipe` does; its RecipeError also lists what `preflight` finds in the rest."""
    loaded, problems = recipe_and_problems(recipe, overrides)
    local = with_local_model(loaded)
    if problems:
        raise RecipeError(preflight(local, local.launch.processes, refused=problems))
    return local


def preflight(recipe: Recipe, world_size: int, until: str = "files", refused: Sequence[str] = ()) -> list[str]:
    """Return every problem of `recipe` in a world of `world_size` processes that needs no training to be seen: what the
    checks of the stages find, up to `until`, one of `host.DEPTHS`. What a run fetches from the hub is none. refused: as
    of `DryHost`."""
    from dtrain.training.host import DryHost  # with torch

    host = DryHost(refused=refused)
    resolve(recipe, World(world_size), host, until)
    return [redact(problem, recipe) for problem in host.problems]


def shapes(recipe: Recipe, world_size: int) -> list[str]:
    """Return the problems that decide what a step holds and computes: what `check_keys` and `check_models` of the
    stages find. Of all files, each model's config.json is read, which must be here."""
    return [*preflight(recipe, world_size, "models"), *(redact(problem, recipe) for problem in not_here(recipe))]


def notes(recipe: Recipe) -> list[str]:
    """Return notes for the user of `recipe` before a run, which are no mistakes."""
    spec, lines = RunSpec(recipe, World(1)), saved.notes(recipe)
    for stage in stages_of(spec).values():
        lines += stage.notes(spec) if hasattr(stage, "notes") else []
    return lines


def _data_hub() -> ModuleType:
    """Return the module of datasets on the hub, which a run on local files does not load."""
    from dtrain.data.sources import hub

    return hub


def with_local_model(recipe: Recipe, *, fetch: bool = False) -> Recipe:
    """`recipe` with the directory in the hub's cache for each model that is named by an id (`Qwen/Qwen3-0.6B`).

    A model that is not in the cache is downloaded with `fetch`, and stays an id without. So is a dataset, which stays
    an id in any case. Raises UserError where the hub does not give them.
    """
    for key, name, weights in model_ids(recipe):
        path = cached(name, weights=weights)
        if path is None and fetch:
            with _named(key, name):
                path = download(name, weights=weights, key=key)
        if path is not None:
            recipe = changed(recipe, {key: str(path)})
    for key, name, pick in absent_data(recipe) if fetch else ():
        with _named(key, name):
            _data_hub().download(name, pick, key.removesuffix(".path"))
    return recipe


def with_small_files(recipe: Recipe) -> tuple[Recipe, dict[str, str], list[str]]:
    """Do as `with_local_model` with fetch, but of models the small files alone, and of datasets none.

    Also: key → what the run will download, and what the hub refuses, as it would refuse the run.
    """
    awaited: dict[str, str] = {}
    refused: list[str] = []
    for key, name, weights in model_ids(recipe):
        with _named(key, name, refused):
            directory, size = look(name, key) if weights else (download(name, weights=False, key=key), 0)
            recipe = changed(recipe, {key: str(directory)})
            if weights:
                awaited[key] = f"{key}={name}: the run downloads its weights from the hub, {size / 2**30:.2f} GiB"
    for key, name, pick in absent_data(recipe):
        with _named(key, name, refused):
            count = len(_data_hub().look(name, pick, key.removesuffix(".path")).paths)
            awaited[key] = (
                f"{key}={name}: the run downloads {count} file{'s' if count != 1 else ''} from the hub, whose rows are "
                "looked at then"
            )
    return recipe, awaited, refused


@contextmanager
def _named(key: str, name: str, refused: list[str] | None = None) -> Iterator[None]:
    """Put the key that is meant before what the hub says of the block; refused: takes that up in place of a caller."""
    try:
        yield
    except UserError as error:
        text = f"{key}={name}: {str(error).removeprefix(f'{key}: ')}"
        if refused is None:
            raise UserError(text) from error
        refused.append(text)


def not_here(recipe: Recipe) -> list[str]:
    """Return what `with_local_model` would fetch, as problems where nothing is fetched."""
    problems = []
    for key, name, weights in model_ids(recipe):
        missing = missing_files(name, weights=weights)
        if missing:
            problems.append(f"{key}={incomplete(name, missing, f'dtrain download {name}')}")
        else:
            problems.append(
                f"{key}={name} is no directory here, and as a model of the Hugging Face hub it is not in this "
                f"machine's cache: `dtrain download {name}` fetches it{beside(name)}"
            )
    return problems + [_data_hub().absent(name, pick, key) for key, name, pick in absent_data(recipe)]


def model_ids(recipe: Recipe) -> list[tuple[str, str, bool]]:
    """Key and id of every model that the recipe names by one, and whether its weights are wanted."""
    named = [("model.path", recipe.model.path, recipe.model.init == "pretrained")]
    named += [(key, path, True) for key, path in method_of(recipe).other_models()]
    return [(key, name, weights) for key, name, weights in named if name and is_id(name)]


def sources_of(recipe: Recipe) -> list[tuple[Source, str]]:
    splits = [("data.train", recipe.data.train), ("data.val", recipe.data.val)]
    sources = [entry for key, split in splits if isinstance(split, DataSource) for entry in entries(split, key)]
    return [*sources, *((each.section, each.key) for each in eval_sets.sets(recipe.eval))]


def absent_data(recipe: Recipe) -> list[tuple[str, str, Pick]]:
    """Key and id of every dataset of the hub that is not in the cache, and what of it is wanted."""
    return [(f"{key}.path", *each) for source, key in sources_of(recipe) for each in absent_ids(source, key)]


def has_urls(recipe: Recipe) -> bool:
    return any(is_url(path) for source, _ in sources_of(recipe) for path in paths_of(source))


def to_copy(recipe: Recipe) -> list[str]:
    """Return what a run of a sound recipe copies into its cache, a line each."""
    lines = []
    for source, key in sources_of(recipe):
        for path in paths_of(source):
            for file in files_to_copy(path, f"{key}.path", recipe.cache):
                size = "" if file.size is None else f", {file.size / 2**20:.1f} MiB"
                lines.append(f"{key}.path={path}: the run copies {file.url} into {recipe.cache}{size}")
    return lines
