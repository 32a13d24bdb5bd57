"""Checks before anything starts: of the recipe, its model, tokenizer and data files.

Loads torch for a model's config.json alone. Of a data file the first row is read, of weights the header. `dtrain
validate` adds what a rank would refuse before its first step (`launch.validate`). A model or dataset of the hub that is
not in the cache is no problem: a run fetches it once all else is right, and `validate` asks the hub for what the run
would.
"""

import os
import re
import shlex
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dtrain.base.errors import RecipeError, UserError, in_words
from dtrain.base.hub import cached, download, is_id, look
from dtrain.base.model_directory import CONFIG, INDEX, SINGLE, TOKENIZER, indexed_files
from dtrain.base.patterns import unmatched
from dtrain.base.ranges import beside
from dtrain.checkpoint.peft.config import base_of, is_adapter_directory, read_header
from dtrain.data.formats.plain_prompts import refuse_without_template
from dtrain.data.sources import hub as data_hub
from dtrain.data.sources import urls
from dtrain.data.sources.files import entries, formats_of, kind_of, resolve
from dtrain.data.text.template import choose_template
from dtrain.data.text.tokenizer import Tokenizer
from dtrain.methods.spec import REWARD_MODEL, spec_of
from dtrain.models.common import nf4_config
from dtrain.models.common.adapter_config import modules
from dtrain.models.common.config import ModelConfig
from dtrain.models.read_config import read_config
from dtrain.parallel.fits import mesh_problems_of_model
from dtrain.recipe import Recipe, read, redact
from dtrain.recipe.schema import DataSource, Source
from dtrain.run import eval_sets
from dtrain.run.check import check


def load(recipe: str | Path | Mapping, overrides: Sequence[str] = ()) -> Recipe:
    """`config.load`, whose RecipeError also lists what `preflight` finds in the rest of a recipe that is wrong."""
    loaded, problems = read(recipe, overrides)
    local = with_local_model(loaded)
    if problems:
        raise RecipeError(together(problems, preflight(local, local.launch.nproc)))
    return local


def together(refused: Sequence[str], problems: Sequence[str]) -> list[str]:
    """Problems of a recipe's text and of what is left of it, each once. What was `refused` is not missing too."""
    keys = [re.split(r"[=:]", problem)[0] for problem in refused]

    def follows(problem: str) -> bool:
        missing = re.match(r"(\S+)(?: or (\S+))? is missing", problem)
        named = [key for key in missing.groups() if key] if missing else []
        emptied = re.match(r"([\w.]+)=\[\]", problem)
        return any(f"{name}.".startswith(f"{key}.") for key in keys for name in named) or bool(
            emptied and any(key.startswith(f"{emptied[1]}[") for key in keys)
        )

    left = [problem for problem in problems if not follows(problem)]
    return list(dict.fromkeys([*refused, *left]))


def with_local_model(recipe: Recipe, *, fetch: bool = False) -> Recipe:
    """`recipe` with the directory in the hub's cache for each model that is named by an id (`Qwen/Qwen3-0.6B`).

    A model that is not in the cache is downloaded with `fetch`, and stays an id without. So is a dataset, which stays
    an id in any case. Raises UserError where the hub does not give them.
    """
    for key, name, weights in _ids(recipe):
        path = cached(name, weights=weights)
        if path is None and fetch:
            with _named(key, name):
                path = download(name, weights=weights, key=key)
        if path is not None:
            recipe = _placed(recipe, key, str(path))
    for key, name, pick in _absent_data(recipe) if fetch else ():
        with _named(key, name):
            data_hub.download(name, pick, key.removesuffix(".path"))
    return recipe


def with_small_files(recipe: Recipe) -> tuple[Recipe, dict[str, str], list[str]]:
    """Do as `with_local_model` with fetch, but of models the small files alone, and of datasets none.

    Also: key → what the run will download, and what the hub refuses, as it would refuse the run.
    """
    awaited, refused = {}, []
    for key, name, weights in _ids(recipe):
        try:
            with _named(key, name):
                directory, size = look(name, key) if weights else (download(name, weights=False, key=key), 0)
        except UserError as error:
            refused.append(str(error))
            continue
        recipe = _placed(recipe, key, str(directory))
        if weights:
            awaited[key] = f"{key}={name}: the run downloads its weights from the hub, {size / 2**30:.2f} GiB"
    for key, name, pick in _absent_data(recipe):
        try:
            with _named(key, name):
                _, files = data_hub.look(name, pick, key.removesuffix(".path"))
        except UserError as error:
            refused.append(str(error))
            continue
        awaited[key] = (
            f"{key}={name}: the run downloads {len(files)} file{'s' if len(files) != 1 else ''} from the hub, whose "
            "rows are looked at then"
        )
    return recipe, awaited, refused


def _placed(section: Any, key: str, value: str) -> Any:
    """`section` with `value` at `key`."""
    name, _, rest = key.partition(".")
    return replace(section, **{name: _placed(getattr(section, name), rest, value) if rest else value})


@contextmanager
def _named(key: str, name: str) -> Iterator[None]:
    """Put the key that is meant before what the hub says of the block."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{key}={name}: {str(error).removeprefix(f'{key}: ')}") from error


def not_here(recipe: Recipe) -> list[str]:
    """Return what `with_local_model` would fetch, as problems where nothing is fetched."""
    return [
        f"{key}={name} is no directory here, and as a model of the Hugging Face hub it is not in this machine's cache: "
        f"`dtrain download {name}` fetches it{beside(name)}"
        for key, name, _ in _ids(recipe)
    ] + [data_hub.absent(name, pick, key) for key, name, pick in _absent_data(recipe)]


def _ids(recipe: Recipe) -> list[tuple[str, str, bool]]:
    """Key and id of every model that the recipe names by one, and whether its weights are wanted."""
    named = [("model.path", recipe.model.path, recipe.model.init == "pretrained")]
    named += [(key, path, True) for key, path in spec_of(recipe).other_models(recipe)]
    return [(key, name, weights) for key, name, weights in named if name and is_id(name)]


def preflight(recipe: Recipe, world_size: int, awaited: Collection[str] = ()) -> list[str]:
    """Return every problem of `recipe` in a world of `world_size` processes that needs no training to be seen. What a
    run fetches from the hub is none. awaited: keys of models whose weights are not looked at."""
    splits = [("data.train", recipe.data.train), ("data.val", recipe.data.val)]
    looks: list[Callable[[], list[str]]] = [
        lambda: _of_other_methods(recipe) + check(recipe, world_size),
        lambda: _shapes(recipe),
        lambda: _files(recipe, awaited),
        *(partial(_data, recipe, split, key) for key, split in splits if isinstance(split, DataSource)),
        *(partial(_eval, recipe, each) for each in eval_sets.sets(recipe)),
        lambda: _checkpoint(recipe),
        lambda: _export(recipe),
        lambda: [text for text, is_problem in _code(recipe) if is_problem],
    ]
    problems = []
    for look_at in looks:
        try:
            problems += look_at()
        except OSError as error:  # a directory on the way that this user may not enter, a name that is too long
            problems.append(f"{in_words(error)}: let this user read it, or name another place in the recipe")
    return [redact(problem, recipe) for problem in problems]


def named_code(recipe: Recipe) -> list[str]:
    """Return what a run of `recipe` imports because the recipe names it, a line each: the key, its import path, its
    file."""
    return [text for text, is_problem in _code(recipe) if not is_problem]


def shapes(recipe: Recipe, world_size: int) -> list[str]:
    """The problems among them that decide what a step holds and computes: of all files, each model's config.json, which
    must be here."""
    problems = check(recipe, world_size) + not_here(recipe) + _shapes(recipe)
    return [redact(problem, recipe) for problem in problems]


def _shapes(recipe: Recipe) -> list[str]:
    absent = {key for key, _, _ in _ids(recipe)}
    problems: list[str] = []
    model = None
    if recipe.model.path and is_adapter_directory(recipe.model.path):
        problems.append(_is_an_adapter(recipe.model.directory))
    elif recipe.model.path and "model.path" not in absent:
        try:
            model = read_config(recipe.model.path, spec_of(recipe).labels(recipe))
            problems += _misfits(model, recipe) + _adapter(recipe, model) + _frozen(recipe, model)
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


def _of_other_methods(recipe: Recipe) -> list[str]:
    """Return keys that the recipe gives to another method."""
    named = [(key, key.split(".")[0]) for key in getattr(recipe, "unread", ())]
    return [
        f"{key} is read by method={method} alone, and this recipe has method={recipe.method}: leave it out, or set "
        f"method={method}"
        for key, method in named
    ]


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


def _misfits(model: ModelConfig, recipe: Recipe) -> list[str]:
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
    return [] if ours is None else _reference(ours, theirs, key, path)


def _reference(ours: ModelConfig, theirs: ModelConfig, key: str, path: str) -> list[str]:
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
    problems = _misfits(model, _beside(recipe, model))
    if student is not None and model.vocab_size != student.vocab_size:
        problems.append(
            f"its vocab_size is {model.vocab_size}, and model.path's {student.vocab_size}: their distributions cannot "
            "be compared; take models of one vocabulary"
        )
    return problems


def _rating(recipe: Recipe, model: ModelConfig) -> list[str]:
    """A reward model fits the mesh and has a trained head of one output."""
    problems = _misfits(model, _beside(recipe, model))
    if model.labels is None or model.has_new_head:
        problems.append("it is a language model: give one with a head of one output, as method=reward trains it")
    elif model.labels != 1:
        problems.append(f"its head has {model.labels} outputs, and a reward is one number: give a model with one")
    return problems


def _files(recipe: Recipe, awaited: Collection[str]) -> list[str]:
    """Weights and tokenizers: what only a run reads of the models whose config.json is sound."""
    problems = []
    student = recipe.model.directory
    if is_trained := _is_model(student):
        problems += _tokenizer(recipe)
        if recipe.model.init == "pretrained" and "model.path" not in awaited:
            problems += _weights(student, ", or model.init=scratch to start from random ones")
    for key, path in spec_of(recipe).other_models(recipe):
        other = Path(path)
        if not _is_model(other):
            continue
        problems += [] if key in awaited else _weights(other, key=key)
        if key == REWARD_MODEL:
            problems += _readable(other)
        elif is_trained and (key == "distill.teacher" or (other / TOKENIZER).is_file()):  # a reference may come without
            problems += [f"{key}={path}: {problem}" for problem in _differing_tokens(other, student)]
    return problems


def _readable(directory: Path) -> list[str]:
    """Check the tokenizer and template of a model that reads text with its own."""
    try:
        choose_template(directory, Tokenizer.from_directory(directory).special_tokens)
    except UserError as error:
        return [str(error)]
    return []


def _is_model(directory: Path) -> bool:
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


def _differing_tokens(teacher: Path, student: Path) -> list[str]:
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
    """Check the headers of the files; `checkpoint.huggingface.check_fit` compares them with the model."""
    index, single = directory / INDEX, directory / SINGLE
    if not single.is_file() and not index.is_file():
        bins = " (pytorch_model.bin is a pickle, which dtrain does not open)" if any(directory.glob("*.bin")) else ""
        return [
            f"{directory} has neither model.safetensors nor {index.name}{bins}: "
            f"set {key} to a directory with weights{otherwise}"
        ]
    try:
        wanted = {SINGLE: []} if single.is_file() else indexed_files(directory)
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
            problems.append(f"{directory / name} lacks {len(lacking)} tensors that {INDEX} places there, {first}")
    return problems


def _code(recipe: Recipe) -> list[tuple[str, bool]]:
    """Return for each import path of the recipe where it leads, or why it leads nowhere (True). Nothing of it is
    run."""
    stages = recipe.scheduler if isinstance(recipe.scheduler, list) else []
    named: list[tuple[str, Any, str]] = [
        ("optimizer.name", recipe.optimizer.name, "optimizer"),
        *((f"scheduler[{i}].name", stage.name, "scheduler") for i, stage in enumerate(stages)),
        ("scheduler.name", getattr(recipe.scheduler, "name", None), "scheduler"),
        ("parallel.custom_plan", recipe.parallel.custom_plan, "plan"),
        *spec_of(recipe).code(recipe),
        *(code for each in eval_sets.sets(recipe) for code in each.code),
    ]
    lines = []
    by_command = ("server of tools", "environment of verifiers")
    named = [(key, path, what) for key, path, what in named if what in by_command or _is_import_path(path)]
    if not any(path for _, path, _ in named):
        return []
    from dtrain.rl.rewards.find import find_file, find_verifiers
    from dtrain.rl.tools import tool_schema

    for key, path, what in named:
        if what == "server of tools":
            lines += _server(key, path)
        elif what == "environment of verifiers" and path is not None:
            try:
                lines.append((f"{key}: {path}, from {find_verifiers(path)}", False))
            except UserError as error:
                lines.append((f"{key}: {error}", True))
        elif path is not None:
            try:
                origin = find_file(path, what)[2]
                if what == "tool":
                    tool_schema(path)
                lines.append((f"{key}: {path}, from {origin}", False))
            except UserError as error:
                lines.append((f"{key}: {error}", True))
    return lines


def _is_import_path(value: Any) -> bool:
    return isinstance(value, str) and bool(set(".:") & set(value))


def _server(key: str, command: str | None) -> list[tuple[str, bool]]:
    """Find the program of a command that a run starts, as `_code` has it."""
    if command is None:
        return []
    try:
        (program, *_) = shlex.split(command)
    except ValueError as error:
        return [(f"{key}={command} is no command: {error or 'it is empty'}", True)]
    file = shutil.which(program)
    return [(f"{key}: {command}, by {file}" if file else f"{key}={command}: there is no program {program}", not file)]


def _sources(recipe: Recipe) -> list[tuple[Source, str]]:
    splits = [("data.train", recipe.data.train), ("data.val", recipe.data.val)]
    sources = [entry for key, split in splits if isinstance(split, DataSource) for entry in entries(split, key)]
    return [*sources, *((each.section, each.key) for each in eval_sets.sets(recipe))]


def _paths(source: Source) -> list[str]:
    return [source.path] if isinstance(source.path, str) else source.path or []


def _absent_data(recipe: Recipe) -> list[tuple[str, str, data_hub.Pick]]:
    """Key and id of every dataset of the hub that is not in the cache, and what of it is wanted."""
    absent = []
    for source, key in _sources(recipe):
        pick = data_hub.Pick.of(source)
        for name in _paths(source):
            with suppress(UserError):  # a split that is not there: told where the files are looked at
                if data_hub.is_data_id(name) and data_hub.cached(name, pick, key) is None:
                    absent.append((f"{key}.path", name, pick))
    return absent


def _is_away(recipe: Recipe, path: str, key: str) -> bool:
    """Return whether a URL is still to be copied: its files are then there, and of a kind that is read. Raises
    UserError."""
    remotes = urls.away(path, key, recipe.cache) if urls.is_url(path) else []
    for remote in remotes:
        kind_of(remote.copy, key)
    return bool(remotes)


def has_urls(recipe: Recipe) -> bool:
    return any(urls.is_url(path) for source, _ in _sources(recipe) for path in _paths(source))


def to_copy(recipe: Recipe) -> list[str]:
    """Return what a run of a sound recipe copies into its cache, a line each."""
    return [
        f"{key}.path={path}: the run copies {remote.url} into {recipe.cache}"
        + (f", {remote.size / 2**20:.1f} MiB" if remote.size is not None else "")
        for source, key in _sources(recipe)
        for path in _paths(source)
        for remote in (urls.away(path, f"{key}.path", recipe.cache) if urls.is_url(path) else ())
    ]


def _of_no_hub(source: Source, key: str) -> list[str]:
    """Return keys for datasets of the hub where no path is one."""
    named = [f"{key}.{option.split(' ')[0]}" for option in data_hub.Pick.of(source).options().split(" --")[1:]]
    if not named or any(map(data_hub.is_data_id, _paths(source))):
        return []
    return [f"{' and '.join(named)}: for datasets of the Hugging Face hub (owner/name), and {key}.path names files"]


def _data(recipe: Recipe, split: DataSource, key: str) -> list[str]:
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
    if not source.path or f"{key}.path" in {at for at, _, _ in _absent_data(recipe)}:  # check, or `not_here`, says so
        return []
    problems += _of_no_hub(source, key)
    named = [path for path in _paths(source) if not _is_away(recipe, path, f"{key}.path")]
    return resolve(named, f"{key}.path", source, recipe.cache) if named else []


def _eval(recipe: Recipe, eval_set: eval_sets.EvalSet) -> list[str]:
    problems: list[str] = []
    files: list[Path] = []
    directory = recipe.model.directory
    positions = read_config(directory, 0).max_position_embeddings if _is_model(directory) else None
    for act in (
        lambda: files.extend(_here(recipe, eval_set.section, eval_set.key, problems)),
        lambda: problems.extend(import_module("dtrain.run.eval_section").look(eval_set, files, positions)),
    ):
        try:
            act()
        except UserError as error:
            problems.append(str(error))
    return problems


def _checkpoint(recipe: Recipe) -> list[str]:
    resume, init_from = recipe.checkpoint.resume, recipe.checkpoint.init_from
    problems = []
    if any((recipe.run.directory / "checkpoints").glob("step-*")):
        return []  # a run that goes on says itself what it needs of them
    if resume not in (None, "auto") and not Path(resume).is_dir():
        problems.append(
            f"checkpoint.resume={resume}: there is no such directory; auto takes the run's newest checkpoint"
        )
    if init_from is None:
        return problems
    if not Path(init_from).is_dir():
        problems.append(
            f"checkpoint.init_from={init_from}: there is no such directory; give a run's, or a step-N of one"
        )
    elif is_adapter_directory(init_from):
        problems.append(
            f"checkpoint.init_from={init_from} is an adapter's directory, not a run's: set lora.path={init_from} "
            "instead"
        )
    elif (Path(init_from) / "config.json").is_file():
        problems.append(
            f"checkpoint.init_from={init_from} is a model's directory, not a run's: set model.path={init_from} instead"
        )
    elif "model.config" not in recipe.checkpoint.allow_changes:
        problems += _start(recipe, Path(init_from))
    is_adapter = any(any(Path(init_from).glob(place)) for place in ("adapter", "checkpoints/step-*/adapter"))
    if recipe.lora is None and is_adapter:
        problems.append(
            f"checkpoint.init_from={init_from} has an adapter that this run lacks: set lora as it was there, or "
            f"`dtrain export {init_from} OUT`, and set model.path=OUT and checkpoint.init_from=null"
        )
    if recipe.lora is not None and recipe.lora.quantize == "nf4" and not is_adapter:
        problems.append(
            f"checkpoint.init_from={init_from} holds whole weights, and lora.quantize=nf4 rounds those of model.path: "
            f"`dtrain export {init_from} OUT`, and set model.path=OUT and checkpoint.init_from=null"
        )
    return problems


def _start(recipe: Recipe, path: Path) -> list[str]:
    """Return what makes the model whose weights are taken another one than ours, by the files that its run keeps."""
    above = [path, *path.absolute().parents][:3]  # a run's directory, its checkpoints, a step of them
    kept = next((place / "model" for place in above if (place / "model" / CONFIG).is_file()), None)
    ours = recipe.model.directory
    if kept is None or not _is_model(ours) or not _is_model(kept):
        return []
    key = "checkpoint.init_from"
    differences = _reference(read_config(ours), read_config(kept), key, str(path))
    differences += [f"{key}={path}: {problem}" for problem in _differing_tokens(kept, ours)]
    return [f"{problem}, or name the change: checkpoint.allow_changes=[model.config]" for problem in differences]


def _export(recipe: Recipe) -> list[str]:
    """An export takes the place of its whole directory."""
    target = os.path.realpath(recipe.run.directory / "export")  # of a loop of links it gives something
    if recipe.checkpoint.export == "none":
        return []
    read = [("model.path", recipe.model.path), *spec_of(recipe).other_models(recipe)]
    read += [] if recipe.lora is None else [("lora.path", recipe.lora.path)]
    return [
        f"{key}={path} lies where this run puts its export ({target}), which would take its place: choose another "
        "run.name, or checkpoint.export=none"
        for key, path in read
        if path and Path(os.path.realpath(path)).is_relative_to(target)
    ]
