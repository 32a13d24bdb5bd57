"""Stage others: the models that a method needs beside the trained one: a reference, a teacher, a reward model."""

from dataclasses import fields
from functools import partial

from dtrain import models
from dtrain.base.errors import UserError
from dtrain.base.model_directory import TOKENIZER, is_adapter_directory
from dtrain.checkpoint.huggingface.read import check_fit
from dtrain.checkpoint.huggingface.safetensor_files import WeightFiles
from dtrain.models.common.config import ModelConfig
from dtrain.training import REWARD_MODEL, TEACHER
from dtrain.training.host import Host, problems_of
from dtrain.training.preflight import model_ids
from dtrain.training.setup.mesh import unfit
from dtrain.training.setup.model import weight_problems
from dtrain.training.spec import ModelDirectory, RunSpec


def check_models(spec: RunSpec) -> list[str]:
    """Check each config.json, and that the models fit the trained one and the mesh."""
    absent = {key for key, _, _ in model_ids(spec.recipe)}
    return [
        problem if key in problem else f"{key}={source.path}: {problem}"
        for key, source in spec.others.items()
        if key not in absent
        for problem in problems_of(_unfit, spec, key, source)
    ]


def _unfit(spec: RunSpec, key: str, source: ModelDirectory) -> list[str]:
    """Return what is wrong with the model at a key. Raises UserError where it cannot be read."""
    path = source.path
    if not path.is_dir():
        words = spec.method.references
        named = f"{words} (start: the weights that training starts from), " if key.endswith(".reference") else ""
        raise UserError(f"there is no such directory; give {named}a model's directory, or its id on the hub")
    if is_adapter_directory(path):
        raise UserError(
            f"it is an adapter in PEFT's layout: `dtrain export {path} OUT` merges it into its base; set {key}=OUT"
        )
    if not (path / "config.json").is_file():
        export = path / "export"
        hint = f"set {key}={export}" if export.is_dir() else "give a model's directory"
        raise UserError(f"{key}={path}: it has no config.json, so it is no model; {hint}")
    theirs = source.config
    if theirs.unquantized is not None:
        return [f"{key}={path}: weights in 4 bits are read of model.path alone: give the original model"]
    ours = spec.readable_config
    if not key.endswith((TEACHER, REWARD_MODEL)):
        return [] if ours is None else reference_problems(ours, theirs, key, str(path))
    # On the mesh beside the trained one; without experts it lies over ep as over the rest of its ranks.
    problems = unfit(spec, theirs, ep=1 if theirs.experts is None else spec.recipe.parallel.ep)
    if key.endswith(REWARD_MODEL) and (theirs.labels is None or theirs.has_new_head):
        problems.append("it is a language model: give one with a head of one output, as method=reward trains it")
    elif key.endswith(REWARD_MODEL) and theirs.labels != 1:
        problems.append(f"its head has {theirs.labels} outputs, and a reward is one number: give a model with one")
    elif not key.endswith(REWARD_MODEL) and ours is not None and theirs.vocab_size != ours.vocab_size:
        problems.append(
            f"its vocab_size is {theirs.vocab_size}, and model.path's {ours.vocab_size}: their distributions cannot "
            "be compared; take models of one vocabulary"
        )
    return problems


def reference_problems(ours: ModelConfig, theirs: ModelConfig, key: str, path: str) -> list[str]:
    """The reference takes the policy's place in one and the same model, so what computes must be equal."""
    free = {"max_position_embeddings", "initializer_range", "bos_token_id", "eos_token_ids", "pad_token_id", "dtype"}
    free |= {"unquantized"}  # what is read in 4 bits is said elsewhere
    names = [field.name for field in fields(ours) if field.name not in free | {"is_text_tower"}]
    differing = [name for name in names if getattr(ours, name) != getattr(theirs, name)]
    if differing:
        pairs = ", ".join(f"{name} {getattr(theirs, name)} and {getattr(ours, name)}" for name in differing[:5])
        return [f"{key}={path} is another kind of model than model.path ({pairs}): give one of the same kind"]
    return []


def check_files(spec: RunSpec) -> list[str]:
    """Check the headers of their weights, and their tokenizers."""
    problems = []
    for key, source in spec.others.items():
        if source.any_config is None:
            continue
        problems += [] if key in spec.awaited else weight_problems(source.path, key=key)
        if key.endswith(REWARD_MODEL):  # it reads text with its own
            problems += problems_of(getattr, source, "template")
        elif spec.source.any_config is not None and (key.endswith(TEACHER) or (source.path / TOKENIZER).is_file()):
            problems += [f"{key}={source.path}: {problem}" for problem in differing_tokens(source, spec.source)]
    return problems


def differing_tokens(teacher: ModelDirectory, student: ModelDirectory) -> list[str]:
    try:
        tokens, ours = (source.tokenizer.vocabulary for source in (teacher, student))
    except UserError as error:
        return [str(error)]
    differing = [token for token, number in ours.items() if tokens.get(token, number) != number]
    if not differing:
        return []
    token = min(differing, key=ours.__getitem__)
    return [
        f"it numbers {len(differing)} tokens otherwise than model.path: {token!r} is {tokens[token]} there and "
        f"{ours[token]} here; take models of one tokenizer"
    ]


def resolve(spec: RunSpec, host: Host) -> bool:
    """Check that their weights fit them, on the first rank."""
    for key, source in spec.others.items():
        if not host.known and key not in spec.awaited:
            host.first(partial(_check_weights, source))
    return True


def _check_weights(source: ModelDirectory) -> None:
    check_fit(models.build(source.config, device="meta"), WeightFiles(source.path))
