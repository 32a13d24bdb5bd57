"""Checks of the models that a recipe names, before anything starts: config.json, tokenizers, headers of weights.

Loads torch for config.json alone.
"""

from collections.abc import Collection
from dataclasses import fields, replace
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

from dtrain.base.errors import UserError
from dtrain.base.hub import is_id
from dtrain.base.model_directory import INDEX, TOKENIZER, files_of_weights, has_weights
from dtrain.base.name_patterns import unmatched
from dtrain.checkpoint.peft.config import base_of, is_adapter_directory
from dtrain.checkpoint.peft.tensors import read_header
from dtrain.data.formats.encoder import refuse_without_template
from dtrain.data.text.template import choose_template
from dtrain.data.text.tokenizer import Tokenizer
from dtrain.methods.spec import REWARD_MODEL, spec_of
from dtrain.models.common import nf4_config
from dtrain.models.common.adapter_config import modules
from dtrain.models.common.config import ModelConfig
from dtrain.models.read_config import read_config
from dtrain.parallel.fits import mesh_problems_of_model
from dtrain.recipe import Recipe


def model_ids(recipe: Recipe) -> list[tuple[str, str, bool]]:
    """Key and id of every model that the recipe names by one, and whether its weights are wanted."""
    named = [("model.path", recipe.model.path, recipe.model.init == "pretrained")]
    named += [(key, path, True) for key, path in spec_of(recipe).other_models(recipe)]
    return [(key, name, weights) for key, name, weights in named if name and is_id(name)]


def model_shapes(recipe: Recipe) -> list[str]:
    absent = {key for key, _, _ in model_ids(recipe)}
    problems: list[str] = []
    model = None
    if recipe.model.path and is_adapter_directory(recipe.model.path):
        problems.append(_is_an_adapter(recipe.model.directory))
    elif recipe.model.path and "model.path" not in absent:
        try:
            model = read_config(recipe.model.path, spec_of(recipe).labels(recipe))
            problems += mesh_problems_of(model, recipe) + _adapter(recipe, model) + _frozen(recipe, model)
            if model.experts is None and recipe.moe.balance > 0:
                problems.append(f"moe.balance={recipe.moe.balance}: this model has no experts; leave it out")
            if model.linear is None and recipe.model.linear_attention == "fla":
                problems.append("model.linear_attention=fla: this model has no linear attention; leave it out")
            if model.experts is None and recipe.grpo.router_replay:
                problems.append("grpo.router_replay=true: this model has no experts; leave it out")
        except UserError as error:
            problems.append(str(error))
    for key, path in spec_of(recipe).other_models(recipe):
        if key in absent:
            continue
        try:
            errors = _other(recipe, model, key, path)
        except UserError as error:
            errors = [str(error)]
        problems += [problem if key in problem else f"{key}={path}: {problem}" for problem in errors]
    return problems


def _is_an_adapter(directory: Path) -> str:
    try:
        base, why = str(base_of(directory)), ""
    except UserError as error:
        base, why = "BASE", f" ({error})"
    return (
        f"model.path={directory} is an adapter in PEFT's layout, not a model: set model.path={base} and "
        f"lora.path={directory} to go on from it{why}"
    )


def _adapter(recipe: Recipe, model: ModelConfig) -> list[str]:
    """Return what weights in 4 bits and the section `lora` ask of `model`, one line each."""
    quantize = "none" if recipe.lora is None else recipe.lora.quantize
    problems = nf4_config.quantize_problems(model, quantize, max(recipe.parallel.tp, 1))
    problems = [
        f"model.path={recipe.model.path}: {problem}" if problem.startswith("its ") else problem for problem in problems
    ]
    return (
        problems
        if recipe.lora is None
        else problems + import_module("dtrain.run.lora_section").lora_problems(recipe, model)
    )


def _frozen(recipe: Recipe, model: ModelConfig) -> list[str]:
    known = [part for module in modules(model) for part in model.parts(module)]
    return unmatched(
        recipe.train.parameter_patterns, [f"{module}.{kind}" for module in known for kind in ("weight", "bias")]
    )


def mesh_problems_of(model: ModelConfig, recipe: Recipe) -> list[str]:
    tp, ep = recipe.parallel.tp, recipe.parallel.ep
    problems = mesh_problems_of_model(model, tp, ep) if tp >= 1 and ep >= 1 else []  # check says so
    if ep > 1 and tuple(map(int, version("torch").split(".")[:2])) < (2, 12):
        problems.append(f"parallel.ep={ep} needs torch 2.12 or newer, and this is {version('torch')}: install one")
    section, masters = recipe.optimizer, recipe.train.masters
    by_rows = {"optimizer.name=muon": section.name == "muon"}
    by_rows |= {f"optimizer.state={section.state}": section.state != "float32"}
    by_rows |= {f"train.masters={masters}": masters != "float32"}
    if model.experts is not None and tp > 1 and any(by_rows.values()):
        named = " and ".join(name for name, is_so in by_rows.items() if is_so)
        problems.append(
            f"{named}: takes parameters by whole rows, and parallel.tp={tp} cuts the rows of the experts' matrices; "
            "leave it out, or set parallel.tp=1 and share experts by parallel.ep"
        )
    if model.experts is not None and recipe.lora is not None and recipe.lora.quantize != "none":
        problems.append(
            f"lora.quantize={recipe.lora.quantize}: the experts, most of this model, would stay as they are; "
            "set lora.quantize=none, and share them by parallel.ep"
        )
    most, length = model.most_positions, recipe.data.max_length
    if most is not None and length > most:
        problems.append(
            f"data.max_length={length}: the model has LongRoPE, and beyond {most} tokens (its "
            f"original_max_position_embeddings) another table of positions; set data.max_length={most} or less"
        )
    return problems


def _other(recipe: Recipe, ours: ModelConfig | None, key: str, path: str) -> list[str]:
    """Return what is wrong with the model at `path`; ours: the one that is trained, where it could be read. Raises
    UserError where this one cannot."""
    directory = Path(path)
    if not directory.is_dir():
        words = {
            "dpo.reference": "start, base, none",
            "grpo.reference": "start, base",
            "kto.reference": "start, base",
        }.get(key)
        named = f"{words} (start: the weights that training starts from), " if words else ""
        raise UserError(f"there is no such directory; give {named}a model's directory, or its id on the hub")
    if is_adapter_directory(directory):
        raise UserError(
            f"it is an adapter in PEFT's layout: `dtrain export {path} OUT` merges it into its base; set {key}=OUT"
        )
    if not (directory / "config.json").is_file():
        export = directory / "export"
        hint = f"set {key}={export}" if export.is_dir() else "give a model's directory"
        raise UserError(f"{key}={path}: it has no config.json, so it is no model; {hint}")
    theirs = read_config(directory, 0 if key == REWARD_MODEL else None)
    if nf4_config.quantize_problems(theirs, "none", 1):
        return [f"{key}={path}: weights in 4 bits are read by lora.quantize=nf4 alone: give the original model"]
    if key == "distill.teacher":
        return _teacher(recipe, ours, theirs)
    if key == REWARD_MODEL:
        return _rating(recipe, theirs)
    return [] if ours is None else reference_problems(ours, theirs, key, path)


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


def _beside(recipe: Recipe, model: ModelConfig) -> Recipe:
    """Return the recipe as another model on the mesh reads it: one without experts lies over ep as over the rest of its
    ranks."""
    return replace(recipe, parallel=replace(recipe.parallel, ep=1)) if model.experts is None else recipe


def _teacher(recipe: Recipe, student: ModelConfig | None, model: ModelConfig) -> list[str]:
    """A teacher fits the mesh and has the student's vocabulary."""
    problems = mesh_problems_of(model, _beside(recipe, model))
    if student is not None and model.vocab_size != student.vocab_size:
        problems.append(
            f"its vocab_size is {model.vocab_size}, and model.path's {student.vocab_size}: their distributions cannot "
            "be compared; take models of one vocabulary"
        )
    return problems


def _rating(recipe: Recipe, model: ModelConfig) -> list[str]:
    """A reward model fits the mesh and has a trained head of one output."""
    problems = mesh_problems_of(model, _beside(recipe, model))
    if model.labels is None or model.has_new_head:
        problems.append("it is a language model: give one with a head of one output, as method=reward trains it")
    elif model.labels != 1:
        problems.append(f"its head has {model.labels} outputs, and a reward is one number: give a model with one")
    return problems


def model_files(recipe: Recipe, awaited: Collection[str]) -> list[str]:
    """Weights and tokenizers: what only a run reads of the models whose config.json is sound."""
    problems = []
    student = recipe.model.directory
    if is_trained := is_model(student):
        problems += _tokenizer(recipe)
        if recipe.model.init == "pretrained" and "model.path" not in awaited:
            problems += _weights(student, ", or model.init=scratch to start from random ones")
    for key, path in spec_of(recipe).other_models(recipe):
        other = Path(path)
        if not is_model(other):
            continue
        problems += [] if key in awaited else _weights(other, key=key)
        if key == REWARD_MODEL:
            problems += _readable(other)
        elif is_trained and (key == "distill.teacher" or (other / TOKENIZER).is_file()):  # a reference may come without
            problems += [f"{key}={path}: {problem}" for problem in differing_tokens(other, student)]
    return problems


def _readable(directory: Path) -> list[str]:
    """Check the tokenizer and template of a model that reads text with its own."""
    try:
        choose_template(directory, Tokenizer.from_directory(directory).special_tokens)
    except UserError as error:
        return [str(error)]
    return []


def is_model(directory: Path) -> bool:
    try:
        read_config(directory, 0)
    except UserError:  # `shapes` tells
        return False
    return True


def _tokenizer(recipe: Recipe) -> list[str]:
    directory = recipe.model.directory
    try:
        tokenizer = Tokenizer.from_directory(directory)
        section = recipe.data
        template = choose_template(directory, tokenizer.special_tokens, section.chat_template, section.template_kwargs)
        refuse_without_template(section.prompts_as, template, directory)
    except UserError as error:
        return [str(error)]
    vocab_size = read_config(directory, 0).vocab_size
    if tokenizer.size > vocab_size:
        return [
            f"{directory}: the tokenizer's highest id is {tokenizer.size - 1}, but config.json's vocab_size is "
            f"{vocab_size}: the model has no embedding for it; take the tokenizer that belongs to this model"
        ]
    return []


def differing_tokens(teacher: Path, student: Path) -> list[str]:
    try:
        tokens, ours = (Tokenizer.from_directory(path).vocabulary for path in (teacher, student))
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


def _weights(directory: Path, otherwise: str = "", key: str = "model.path") -> list[str]:
    """Check the headers of the files; `checkpoint.huggingface.read.check_fit` compares them with the model."""
    index = directory / INDEX
    if not has_weights(directory):
        bins = " (pytorch_model.bin is a pickle, which dtrain does not open)" if any(directory.glob("*.bin")) else ""
        return [
            f"{directory} has neither model.safetensors nor {index.name}{bins}: "
            f"set {key} to a directory with weights{otherwise}"
        ]
    try:
        wanted = files_of_weights(directory) or {}
    except UserError as error:
        return [str(error)]
    missing = [name for name in sorted(wanted) if not (directory / name).is_file()]
    if missing:
        return [f"{index} names files that are not there: {', '.join(missing)}; download the model again"]
    problems = []
    for name, tensors in wanted.items():
        try:
            lacking = sorted(set(tensors) - read_header(directory / name)[0].keys())
        except UserError as error:
            problems.append(f"{key}: {error}")
            continue
        if lacking:
            first = f"first {lacking[0]}; download the model again"
            problems.append(f"{directory / name} is without {len(lacking)} tensors that {INDEX} places there, {first}")
    return problems
