"""Stage adapter: the section `lora` and what surrounds it, by itself and for the model that it meets."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from dtrain.adapters.config import (
    ALL_LINEAR,
    ENDS,
    AdapterConfig,
    is_parameter,
    matches,
    parameter_name,
)
from dtrain.base.errors import UserError
from dtrain.base.name_patterns import matches_suffix, pattern_error, suffix_pattern
from dtrain.base.ranges import nearest, out_of_range, shown
from dtrain.checkpoint.peft.base import base_notes, base_problems
from dtrain.checkpoint.peft.config import adapter_of, adapter_problems, misread_problem
from dtrain.models.shapes import adaptable, modules
from dtrain.recipe import key_aliases
from dtrain.recipe.schema import Lora
from dtrain.training.setup.model import config_with_tower
from dtrain.training.spec import RunSpec


def check_keys(spec: RunSpec) -> list[str]:
    """Return what is wrong with the section, beside its ranges, and with keys that do not go with it; one line each."""
    recipe, section = spec.recipe, spec.recipe.lora
    assert section is not None
    errors = _expressions(section) + _ends(section)
    for key, patterns in (("train_only", recipe.train.train_only), ("freeze", recipe.train.freeze)):
        if patterns:
            errors.append(
                f"train.{key}={shown(patterns)} chooses among the model's own weights, and with lora these all stay as "
                f"they are: set train.{key}=[]; lora.target and lora.exclude choose the layers with an adapter, "
                "lora.modules_to_save what is trained whole beside it"
            )
    if recipe.train.vision != "frozen":
        errors.append(
            f"train.vision={recipe.train.vision} trains the model's own weights, and with lora these all stay as they "
            "are: set train.vision=frozen; lora.target, a list or an expression, gives layers of the tower an adapter, "
            "lora.modules_to_save trains modules of it whole"
        )
    is_nf4 = section.quantize == "nf4"
    if is_nf4 and recipe.model.init == "scratch":
        errors.append(
            "model.init=scratch draws weights, and lora.quantize=nf4 holds those of a trained model in 4 bits: "
            "set model.init=pretrained, or lora.quantize=none"
        )
    if is_nf4 and recipe.train.dtype == "float64":
        errors.append(
            "train.dtype=float64 is for exact numbers, and lora.quantize=nf4 rounds the model's own weights to 4 bits: "
            "set train.dtype=float32 or bfloat16, or lora.quantize=none"
        )
    if (every := getattr(getattr(recipe, recipe.method, None), "sync_every", None)) is not None:
        errors.append(
            f"{recipe.method}.sync_every={every} mixes the weights of reference and policy, and those of two adapters "
            f"have no mixture of the same rank: set {recipe.method}.sync_every=null, or lora=null"
        )
    if section.path is None and AdapterConfig.of(asdict(section)).parameters:
        errors += _of_experts(f"lora.target={shown(section.target)}", section)
    if section.path is not None and recipe.checkpoint.init_from is not None:
        errors.append(
            f"lora.path={section.path} and checkpoint.init_from={recipe.checkpoint.init_from} both say where the "
            "adapter begins: set one of them to null"
        )
    return errors


def _of_experts(what: str, section: Lora) -> list[str]:
    """Return what does not go with adapters of experts; `what` asks for these."""
    errors = []
    if section.dropout:
        errors.append(
            f"lora.dropout={section.dropout}: PEFT adds the adapters for {what} to the experts' matrices, and drops no "
            "inputs there: set lora.dropout=0, or leave experts out"
        )
    if section.dora:
        errors.append(f"lora.dora=true: PEFT has none of experts ({what}): set lora.dora=false, or leave experts out")
    return errors


def notes(spec: RunSpec) -> list[str]:
    """Return notes on a section that is no mistake: that a fresh adapter hardly learns at a low rate, and that
    an adapter at `path` may be of another model."""
    recipe, section = spec.recipe, spec.recipe.lora
    low, usual = spec.method.adapter_rates
    assert section is not None
    misread = _misread(spec, section)
    if section.path is not None and recipe.model.path and recipe.model.init == "pretrained":
        return misread + base_notes(Path(section.path), recipe.model.directory)
    if section.path is not None or not 0 < recipe.optimizer.lr < low:
        return misread
    return misread + [
        f"note: optimizer.lr={recipe.optimizer.lr:g} is low for a fresh adapter, which hardly learns at it: 10 times "
        f"that of full fine-tuning is usual, such as optimizer.lr={usual}"
    ]


def _misread(spec: RunSpec, section: Lora) -> list[str]:
    """Return a note if PEFT would load another adapter from the run's files."""
    model = spec.readable_config
    if model is None or _expressions(section):
        return []
    try:
        problem = misread_problem(adapter_of(asdict(section)), model)
    except UserError:  # reported by check_models
        return []
    return [f"note: {problem}. So export/ is written with the adapter merged"] if problem else []


def check_models(spec: RunSpec) -> list[str]:
    """Return what of the section does not fit the model, one line each. Nothing where `check_keys` finds it wrong in
    itself, or the model has a problem of its own."""
    recipe, section, model = spec.recipe, spec.recipe.lora, spec.readable_config
    errors: list[str] = []
    if section is None or model is None or _expressions(section) or out_of_range(section):
        return errors
    whole = config_with_tower(spec)
    if section.path is not None:
        wrong = adapter_problems(asdict(section), model) and adapter_problems(asdict(section), whole)
        if not wrong and recipe.model.init == "pretrained":
            wrong = base_problems(Path(section.path), recipe.model.directory)
        return errors + wrong
    config, layers = adapter_of(asdict(section)), adaptable(whole)
    errors += _targets(config, list(layers)) + _patterns(config, list(layers))
    own_parameters = modules(whole)
    errors += _saved(config, own_parameters)
    if problem := config.dropout_problem(adaptable(model)):
        errors.append(problem)
    if experts := [name for name in config.saved(own_parameters) if ".experts." in name or ".sparse." in name]:
        errors.append(
            f"lora.modules_to_save={shown(section.modules_to_save)} means {len(experts)} stacks of experts, the first "
            f"{experts[0]}, for which an adapter's files have no place: leave them out, or name experts in lora.target"
        )
    # For the embedding or the head in lora.target, `check_keys` says what to do.
    leaves_none = not errors and not _ends(section) and not config.adapted(layers)
    if leaves_none and config.saved(layers):
        errors.append(
            f"lora.modules_to_save={shown(section.modules_to_save)} trains whole what lora.target="
            f"{shown(section.target)} means, which leaves no layer to adapt: name fewer modules there"
        )
    elif leaves_none:
        errors.append(
            f"lora.exclude={shown(section.exclude)} leaves no layer of lora.target={shown(section.target)} to adapt: "
            "name fewer layers in lora.exclude, or more in lora.target"
        )
    return errors + _ranks(config, layers)


def _expressions(section: Lora) -> list[str]:
    """Regular expressions that are none."""
    named = [(f"lora.{key}", getattr(section, key)) for key in ("target", "exclude")]
    named = [(key, value) for key, value in named if isinstance(value, str)]
    named += [(f"lora.{key}", name) for key in ("rank_pattern", "alpha_pattern") for name in getattr(section, key)]
    errors = []
    for key, text in named:
        if error := pattern_error(suffix_pattern(text) if "pattern" in key else text):
            names = "" if "pattern" in key else "; names alone are written [q_proj, v_proj]"
            hint = f"`.*` stands for any text, \\. for a dot{names}"
            errors.append(f"{key}: {text[:200]} is no regular expression ({error}); {hint}")
    return errors


def _ends(section: Lora) -> list[str]:
    """Targets that are the embedding or the head, which get no adapter."""
    if _expressions(section) or section.target == ALL_LINEAR:
        return []
    # A text that is just a name, lora.target=lm_head, means the same as the list with it.
    is_name = isinstance(section.target, str) and section.target in _names_of_ends()
    names = [section.target] if is_name else section.target
    errors = []
    for end in ENDS:
        short, is_saved = end.rpartition(".")[2], any(end.endswith(name) for name in section.modules_to_save)
        if not _matches(end, section.target) or (section.exclude and _matches(end, section.exclude)):
            continue
        if isinstance(names, str) and not is_saved:
            errors.append(
                f"lora.target={section.target} matches {end} too, which gets no adapter: put it in "
                f"lora.modules_to_save, [{short}], to train it whole, or in lora.exclude"
            )
        elif not isinstance(names, str):
            has_others = not set(names) <= _names_of_ends()
            rest = "take it out of lora.target" if has_others else "name linear layers in lora.target, or all-linear"
            errors.append(
                f"lora.target names {short}, which gets no adapter: put it in lora.modules_to_save, [{short}], where "
                f"it is trained whole, and {rest}"
            )
    return errors


def _names_of_ends() -> set[str]:
    """Return the full and the short names of the embedding and the head."""
    return {name for end in ENDS for name in (end, end.rpartition(".")[2])}


def _matches(name: str, wanted: str | Sequence[str]) -> bool:
    return matches(name, wanted if isinstance(wanted, str) else tuple(wanted))


def _targets(config: AdapterConfig, layers: Sequence[str]) -> list[str]:
    """Entries of target and exclude that match no layer."""
    errors = []
    single = [name for name in layers if is_parameter(name)]
    linears = [name for name in layers if name not in single]
    for entry in config.parameters:
        if not replace(config, parameters=(entry,)).adapted(single):
            ends = dict.fromkeys(".".join(parameter_name(name).split(".")[-2:]) for name in single)
            hint = (
                f"there are experts, {', '.join(ends)}" if single else "this model has none that take one; leave it out"
            )
            errors.append(f"lora.target: {entry} matches no matrices of experts; {hint}")
    for key, wanted in (("target", config.target), ("exclude", config.exclude)):
        entries: list[Any] = [wanted] if isinstance(wanted, str) else [(name,) for name in wanted]
        known = [*linears, *ENDS]  # target: `_ends` speaks of these
        for entry in entries:
            if entry in (ALL_LINEAR, "") or any(matches(name, entry) for name in known):
                if key == "exclude" and (
                    spared := [layer for layer in config.adapted(single) if matches(layer, entry)]
                ):
                    errors.append(
                        f"lora.exclude: {shown(wanted)} matches {spared[0]} too, and experts are left out by "
                        "lora.target alone: write names of linear layers"
                    )
                continue
            name = entry if isinstance(entry, str) else entry[0]
            errors.append(f"lora.{key}: {name} matches no linear layer of the model" + _hint(key, entry, linears))
    return errors


def _hint(key: str, entry: Any, layers: Sequence[str]) -> str:
    short = _ends_of(layers)
    if not isinstance(entry, str):
        near = nearest(entry[0].rpartition(".")[2], short)
        return f"; did you mean {near}?" if near else f"; there are {', '.join(short)}, as in {layers[0]}"
    if meant := key_aliases.meant(f"lora.{key}", entry):
        return f"; did you mean lora.{key}={meant}?"
    if any(entry in (name, name.rpartition(".")[2], "experts") for name in layers):
        return f": a text is a regular expression for whole names, such as {layers[0]}; set lora.{key}=[{entry}]"
    return (
        f": a text is a regular expression for whole names, such as {layers[0]}; names alone are written "
        f"lora.{key}=[{', '.join(short[:2])}]"
    )


def _meant(name: str, names: Sequence[str]) -> str:
    near = nearest(name, names)
    return f"did you mean {near}?" if near else f"there are {', '.join(names) or 'none'}"


def _ends_of(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(name.rpartition(".")[2] for name in names))


def _patterns(config: AdapterConfig, layers: Sequence[str]) -> list[str]:
    """Patterns that no layer with an adapter follows."""
    adapted = [parameter_name(name) for name in config.adapted(layers)]
    errors = []
    for key, patterns in (("rank_pattern", config.rank_pattern), ("alpha_pattern", config.alpha_pattern)):
        for pattern in patterns:
            if not any(matches_suffix(pattern, name) for name in adapted):
                hint = _meant(pattern, _ends_of(adapted))
                errors.append(f"lora.{key}: {pattern} matches the end of no adapted layer's name; {hint}")
    return errors


def _saved(config: AdapterConfig, known: Sequence[str]) -> list[str]:
    """Entries of modules_to_save that match no module."""
    return [
        f"lora.modules_to_save: {entry} matches no module with weights of its own; "
        f"{_meant(entry.rpartition('.')[2], _ends_of(known))}"
        for entry in config.modules_to_save
        if not replace(config, modules_to_save=(entry,)).saved(known)
    ]


def _ranks(config: AdapterConfig, layers: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Ranks above the smaller side of a layer, once for layers of one name and size. A gate of one output
    (shared_expert_gate) takes any: all-linear names it beside large matrices, and PEFT adapts it too."""
    errors: dict[str, None] = {}
    for name, low in config.adapted(layers).items():
        short, (rows, columns) = name.rpartition(".")[2], layers[name][-2:]
        if 1 < (most := min(rows, columns)) < low.rank:
            errors[
                f"lora.rank: an adapter of rank {low.rank} is larger than {short} itself, [{rows}, {columns}]: set "
                f"lora.rank={most} or less, or lora.rank_pattern={{{short}: {most}}}"
            ] = None
    return list(errors)
