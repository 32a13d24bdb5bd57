"""What can be known to be wrong before anything starts: the recipe, and what its model, tokenizer and data files say.

Imports no torch, so that `dtrain validate` answers at once. Rows are not read here; `run` and `preview` do.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from dtrain.config import Recipe, check, read
from dtrain.config.schema import DataSource
from dtrain.data.files import resolve
from dtrain.data.template import choose_template
from dtrain.data.tokenizer import Tokenizer
from dtrain.errors import RecipeError, UserError
from dtrain.models.config import ModelConfig, read_config


def load(recipe: str | Path | Mapping, overrides: Sequence[str] = ()) -> Recipe:
    """`config.load`, whose RecipeError also lists what `preflight` finds in the rest of a recipe that is wrong."""
    loaded, problems = read(recipe, overrides)
    if problems:
        raise RecipeError(list(dict.fromkeys([*problems, *preflight(loaded, loaded.launch.nproc)])))
    return loaded


def preflight(recipe: Recipe, world_size: int) -> list[str]:
    """Every problem of `recipe` in a world of `world_size` processes that needs no training to be seen."""
    problems = check(recipe, world_size)
    if recipe.model.path:
        problems += _model(recipe)
    problems += _data(recipe.data.train, "data.train")
    if recipe.data.val is not None:
        problems += _data(recipe.data.val, "data.val")
    problems += _checkpoint(recipe)
    return problems


def _model(recipe: Recipe) -> list[str]:
    directory = Path(recipe.model.path)
    try:
        model = read_config(directory)
    except UserError as error:
        return [str(error)]
    problems = _mesh_fits(model, recipe.parallel.tp)
    if recipe.model.init == "pretrained":
        problems += _weights(directory)
    try:
        tokenizer = Tokenizer.from_directory(directory)
        choose_template(directory, tokenizer.special_tokens, recipe.data.chat_template, recipe.data.template_kwargs)
    except UserError as error:
        return [*problems, str(error)]
    if tokenizer.size > model.vocab_size:
        problems.append(
            f"{directory}: the tokenizer's highest id is {tokenizer.size - 1}, but config.json's vocab_size is "
            f"{model.vocab_size}: the model has no embedding for it; take the tokenizer that belongs to this model"
        )
    return problems


def _mesh_fits(model: ModelConfig, tp: int) -> list[str]:
    """What tensor parallel cannot share out: whole query heads, whole groups of KV heads, some vocabulary each."""
    problems = []
    heads, kv_heads, vocabulary = model.num_attention_heads, model.num_key_value_heads, model.vocab_size
    if heads % tp:
        fits = [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
        problems.append(f"parallel.tp={tp} does not divide the model's {heads} query heads; tp may be {_listed(fits)}")
    elif kv_heads % tp and tp % kv_heads:
        problems.append(f"parallel.tp={tp} and the model's {kv_heads} KV heads: neither divides the other; change tp")
    if -(-vocabulary // tp) * (tp - 1) >= vocabulary:
        problems.append(f"parallel.tp={tp} leaves a rank none of the model's {vocabulary} tokens; make it smaller")
    return problems


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


def _weights(directory: Path) -> list[str]:
    index = directory / "model.safetensors.index.json"
    if (directory / "model.safetensors").is_file():
        return []
    if not index.is_file():
        bins = " (pytorch_model.bin is a pickle, which dtrain does not open)" if any(directory.glob("*.bin")) else ""
        return [
            f"{directory} has neither model.safetensors nor {index.name}{bins}: "
            "set model.path to a directory with weights, or model.init=scratch to start from random ones"
        ]
    try:
        files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError):
        return [f"{index} is damaged: it has no weight_map from tensors to files"]
    missing = [name for name in files if not (directory / str(name)).is_file()]
    if missing:
        return [f"{index} names files that are not there: {', '.join(missing)}; download the model again"]
    return []


def _data(source: DataSource, key: str) -> list[str]:
    named = [(source.path, f"{key}.path")]
    if source.sources is not None:
        named = [(entry.path, f"{key}.sources[{index}].path") for index, entry in enumerate(source.sources)]
    problems = []
    for path, at in named:
        if not path:  # check says so
            continue
        try:
            resolve(path, at)
        except UserError as error:
            problems.append(str(error))
    return problems


def _checkpoint(recipe: Recipe) -> list[str]:
    resume = recipe.checkpoint.resume
    if resume in (None, "auto") or Path(resume).is_dir():
        return []
    return [f"checkpoint.resume={resume}: there is no such directory; auto takes the run's newest checkpoint"]
