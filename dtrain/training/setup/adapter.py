"""Setup of the adapter: checks of the section `lora`, of keys that conflict with it, and of its names in the model.

For example, `lora.target=[q_prj]` is compared with the names of the model's layers, and the problem has the fix "Did
you mean q_proj?".
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from dtrain.adapters.config import (
    ALL_LINEAR,
    EMBEDDING_AND_HEAD,
    AdapterConfig,
    is_expert_or_router,
    is_selected,
    parameter_name,
)
from dtrain.base.errors import Problem, UserError
from dtrain.base.name_patterns import matches_suffix, pattern_error, suffix_pattern
from dtrain.base.ranges import closest_name, find_out_of_range, format_value
from dtrain.checkpoint.peft.config import adapter_of, adapter_problems, base_notes, base_problems, misread_problem
from dtrain.models.building import adaptable_shapes, module_names
from dtrain.recipe import Recipe, spelling
from dtrain.recipe.schema import Lora
from dtrain.training.inputs import RunInputs

_Pattern = str | tuple[str, ...]
"""A regular expression for full names of layers, or a list of names."""


def check_keys(inputs: RunInputs) -> list[Problem]:
    """Check the section without a model, and the keys that conflict with it."""
    recipe, section = inputs.recipe, inputs.recipe.lora
    assert section is not None
    problems = _check_expressions(section) + _check_embedding_and_head(section) + _check_trained_weights(recipe)
    if section.quantize == "nf4":
        problems += _check_nf4(recipe)
    key = f"{recipe.method_name}.sync_every"
    sync_every = inputs.method.reference_interval()
    if sync_every is not None:
        text = (
            f"{key}={sync_every} averages the weights of policy and reference, and the average of two adapters is no "
            "adapter of the same rank"
        )
        problems.append(Problem(key, text, f"Set {key}=null, or lora=null"))
    if section.path is None and AdapterConfig.from_values(asdict(section)).parameters:
        problems += _check_adapters_of_experts(section)
    init_from = recipe.checkpoint.init_from
    if section.path is not None and init_from is not None:
        text = (
            f"lora.path={section.path} and checkpoint.init_from={init_from} both set the initial weights of the adapter"
        )
        problems.append(Problem("lora.path", text, "Set one of them to null"))
    return problems


def _check_trained_weights(recipe: Recipe) -> list[Problem]:
    """Refuse keys that select base weights for training, because all base weights are frozen with an adapter."""
    problems = []
    for key, patterns in (("train.train_only", recipe.train.train_only), ("train.freeze", recipe.train.freeze)):
        if patterns:
            text = (
                f"{key}={format_value(patterns)} chooses among the model's own weights, and with lora all "
                "of these are frozen"
            )
            fix = (
                f"Set {key}=[]. lora.target and lora.exclude choose the layers with an adapter, and "
                "lora.modules_to_save the modules that are fully trained"
            )
            problems.append(Problem(key, text, fix))
    vision = recipe.train.vision
    if vision != "frozen":
        text = f"train.vision={vision} trains the model's own weights, and with lora all of these are frozen"
        fix = (
            "Set train.vision=frozen. lora.target, a list or an expression, gives layers of the tower an adapter, and "
            "lora.modules_to_save trains modules of the tower fully"
        )
        problems.append(Problem("train.vision", text, fix))
    return problems


def _check_nf4(recipe: Recipe) -> list[Problem]:
    """Refuse keys that conflict with weights in 4 bits."""
    problems = []
    if recipe.model.init == "scratch":
        text = (
            "lora.quantize=nf4 stores a trained model's weights in 4 bits, and model.init=scratch uses random weights"
        )
        problems.append(Problem("model.init", text, "Set model.init=pretrained, or lora.quantize=none"))
    if recipe.train.dtype == "float64":
        text = (
            "train.dtype=float64 is for exact numbers, and lora.quantize=nf4 rounds the model's own weights to 4 bits"
        )
        problems.append(Problem("train.dtype", text, "Set train.dtype=float32 or bfloat16, or lora.quantize=none"))
    return problems


def _check_adapters_of_experts(section: Lora) -> list[Problem]:
    """Refuse options that PEFT does not have for adapters of experts, if `lora.target` names experts."""
    problems = []
    target = f"lora.target={format_value(section.target)}"
    if section.dropout:
        text = (
            f"lora.dropout={section.dropout}: {target} adds adapters to the experts' matrices, for which PEFT has no "
            "dropout"
        )
        problems.append(Problem("lora.dropout", text, "Set lora.dropout=0, or leave experts out"))
    if section.dora:
        text = f"lora.dora=true: {target} adds adapters to the experts' matrices, for which PEFT has no DoRA"
        problems.append(Problem("lora.dora", text, "Set lora.dora=false, or leave experts out"))
    return problems


def notes(inputs: RunInputs) -> list[str]:
    """Return notes on the section that are not mistakes.

    They are about a learning rate that is low for a fresh adapter, about an adapter at `lora.path` whose base model is
    not known, and about files that PEFT would read differently.
    """
    recipe, section = inputs.recipe, inputs.recipe.lora
    assert section is not None
    lines = _note_on_misread_files(inputs, section)
    if section.path is not None:
        if recipe.model.path and recipe.model.init == "pretrained":
            lines += base_notes(Path(section.path), recipe.model.directory)
        return lines
    lowest, usual = inputs.method.adapter_learning_rates
    if 0 < recipe.optimizer.lr < lowest:
        lines.append(
            f"note: optimizer.lr={recipe.optimizer.lr:g} is low for a fresh adapter, which hardly learns at this rate: "
            f"10 times the rate of full fine-tuning is usual, such as optimizer.lr={usual}"
        )
    return lines


def _note_on_misread_files(inputs: RunInputs, section: Lora) -> list[str]:
    """Return a note if PEFT would read the adapter's files differently from dtrain."""
    model = inputs.readable_config
    if model is None or _check_expressions(section):
        return []
    try:
        problem = misread_problem(adapter_of(asdict(section)), model)
    except UserError:  # reported by check_models
        return []
    return [f"note: {problem}. So export/ is written with the adapter merged"] if problem else []


def check_models(inputs: RunInputs) -> list[Problem]:
    """Check the section with the model.

    Nothing is checked if `check_keys` has problems with the section, or if config.json cannot be read.
    """
    recipe, section, model = inputs.recipe, inputs.recipe.lora, inputs.readable_config
    if section is None or model is None or _check_expressions(section) or find_out_of_range(section):
        return []
    with_tower = inputs.source.config_with_tower
    if section.path is not None:
        problems = adapter_problems(asdict(section), model)
        if problems:  # it may be an adapter for the model with its vision tower
            problems = adapter_problems(asdict(section), with_tower)
        if not problems and recipe.model.init == "pretrained":
            problems = base_problems(Path(section.path), recipe.model.directory)
        return problems
    config, layers = adapter_of(asdict(section)), adaptable_shapes(with_tower)
    modules = module_names(with_tower)
    problems = _check_targets(config, list(layers))
    problems += _check_patterns(config, list(layers))
    problems += _check_saved_modules(config, modules)
    dropout_problem = config.dropout_problem(adaptable_shapes(model))
    if dropout_problem:
        problems.append(Problem("lora.dropout", dropout_problem))
    problems += _check_saved_experts(section, config, modules)
    # `check_keys` reports the embedding and the head in lora.target.
    has_other_problems = bool(problems) or bool(_check_embedding_and_head(section))
    if not has_other_problems and not config.select_layers(layers):
        problems.append(_no_layer_problem(section, has_saved_layers=bool(config.select_saved_modules(layers))))
    return problems + _check_ranks(config, layers)


def _check_saved_experts(section: Lora, config: AdapterConfig, modules: Sequence[str]) -> list[Problem]:
    """Refuse experts in modules_to_save."""
    saved = config.select_saved_modules(modules)
    experts = [name for name in saved if ".experts." in name or ".sparse." in name]
    if not experts:
        return []
    text = (
        f"lora.modules_to_save={format_value(section.modules_to_save)} matches {len(experts)} stacks of experts, the "
        f"first {experts[0]}, which an adapter's files cannot store"
    )
    return [Problem("lora.modules_to_save", text, "Leave them out, or name experts in lora.target")]


def _no_layer_problem(section: Lora, has_saved_layers: bool) -> Problem:
    """Return the problem of a section that leaves no layer with an adapter."""
    target = f"lora.target={format_value(section.target)}"
    if has_saved_layers:
        text = (
            f"lora.modules_to_save={format_value(section.modules_to_save)} fully trains all modules of {target}, which "
            "leaves no layer with an adapter"
        )
        return Problem("lora.modules_to_save", text, "Name fewer modules in lora.modules_to_save")
    text = f"lora.exclude={format_value(section.exclude)} leaves no layer of {target} with an adapter"
    return Problem("lora.exclude", text, "Name fewer layers in lora.exclude, or more in lora.target")


def _check_expressions(section: Lora) -> list[Problem]:
    """Check that regular expressions can be compiled."""
    problems = []
    for key, value in (("lora.target", section.target), ("lora.exclude", section.exclude)):
        if isinstance(value, str):
            error = pattern_error(value)
            if error:
                problems.append(_expression_problem(key, value, error, "; a list of names is written [q_proj, v_proj]"))
    for key, patterns in (("lora.rank_pattern", section.rank_pattern), ("lora.alpha_pattern", section.alpha_pattern)):
        for pattern in patterns:
            error = pattern_error(suffix_pattern(pattern))
            if error:
                problems.append(_expression_problem(key, pattern, error))
    return problems


def _expression_problem(key: str, expression: str, error: str, more: str = "") -> Problem:
    """Return the problem of an invalid regular expression. `more` is appended to the fix."""
    text = f"{key}: {expression[:200]} is not a regular expression ({error})"
    return Problem(key, text, f"`.*` stands for any text, \\. for a dot{more}")


def _check_embedding_and_head(section: Lora) -> list[Problem]:
    """Refuse the embedding and the head as targets."""
    if _check_expressions(section) or section.target == ALL_LINEAR:
        return []
    names = section.target
    if isinstance(names, str) and names in _names_of_embedding_and_head():
        names = [names]  # lora.target=lm_head means the same as lora.target=[lm_head]
    key = "lora.target"
    problems = []
    for module in EMBEDDING_AND_HEAD:
        is_excluded = bool(section.exclude) and _matches(module, section.exclude)
        if not _matches(module, section.target) or is_excluded:
            continue
        short = module.rpartition(".")[2]
        train_fully = f"Put it in lora.modules_to_save, [{short}], to train it fully"
        if isinstance(names, str):  # a regular expression
            if not any(module.endswith(name) for name in section.modules_to_save):
                text = f"{key}={section.target} matches {module} too, which gets no adapter"
                problems.append(Problem(key, text, f"{train_fully}, or in lora.exclude"))
            continue
        has_other_names = not set(names) <= _names_of_embedding_and_head()
        rest = f"take it out of {key}" if has_other_names else f"name linear layers in {key}, or all-linear"
        problems.append(Problem(key, f"{key} names {short}, which gets no adapter", f"{train_fully}, and {rest}"))
    return problems


def _names_of_embedding_and_head() -> set[str]:
    """Return the full and the short names of the embedding and the head."""
    names: set[str] = set()
    for module in EMBEDDING_AND_HEAD:
        names.update((module, module.rpartition(".")[2]))
    return names


def _matches(name: str, pattern: str | Sequence[str]) -> bool:
    """Check whether a name matches a regular expression (a string) or an entry of a list of names."""
    return is_selected(name, pattern if isinstance(pattern, str) else tuple(pattern))


def _check_targets(config: AdapterConfig, layers: Sequence[str]) -> list[Problem]:
    """Check that every entry of target and exclude matches a layer."""
    expert_matrices = [name for name in layers if is_expert_or_router(name)]
    linears = [name for name in layers if name not in expert_matrices]
    # `_check_embedding_and_head` reports the embedding and the head in lora.target.
    known_names = [*linears, *EMBEDDING_AND_HEAD]
    problems = _check_expert_targets(config, expert_matrices)
    for key, entries in (("target", config.target), ("exclude", config.exclude)):
        patterns: list[_Pattern] = []
        if isinstance(entries, str):  # a regular expression, all-linear or ""
            patterns.append(entries)
        else:
            for name in entries:
                patterns.append((name,))
        for pattern in patterns:
            if not _matches_a_layer(pattern, known_names):
                problems.append(_unmatched_problem(key, pattern, linears))
            elif key == "exclude":
                problems += _check_excluded_experts(config, expert_matrices, pattern)
    return problems


def _matches_a_layer(pattern: _Pattern, names: Sequence[str]) -> bool:
    """Check whether a pattern matches a name. "all-linear" and "" need no match."""
    return pattern in (ALL_LINEAR, "") or any(is_selected(name, pattern) for name in names)


def _unmatched_problem(key: str, pattern: _Pattern, linears: Sequence[str]) -> Problem:
    """Return the problem of an entry of lora.target or lora.exclude that matches no layer."""
    if isinstance(pattern, str):
        entry, fix = pattern, _hint_for_expression(key, pattern, linears)
    else:
        (entry,) = pattern
        fix = _hint_for_name(entry, linears)
    return Problem(f"lora.{key}", f"lora.{key}: {entry} matches no linear layer of the model", fix)


def _check_expert_targets(config: AdapterConfig, expert_matrices: Sequence[str]) -> list[Problem]:
    """Check that every entry of lora.target for experts matches some of their matrices."""
    problems = []
    for entry in config.parameters:
        if replace(config, parameters=(entry,)).select_layers(expert_matrices):
            continue
        fix = "This model has no experts that accept an adapter; leave it out"
        if expert_matrices:
            short_names = [".".join(parameter_name(name).split(".")[-2:]) for name in expert_matrices]
            fix = f"Use {' or '.join(dict.fromkeys(short_names))}"
        problems.append(Problem("lora.target", f"lora.target: {entry} matches no matrices of experts", fix))
    return problems


def _check_excluded_experts(config: AdapterConfig, expert_matrices: Sequence[str], pattern: _Pattern) -> list[Problem]:
    """Refuse an entry of lora.exclude that matches experts, which it does not exclude."""
    matched = [layer for layer in config.select_layers(expert_matrices) if is_selected(layer, pattern)]
    if not matched:
        return []
    text = (
        f"lora.exclude: {format_value(config.exclude)} matches {matched[0]} too, and only lora.target decides which "
        "experts get an adapter"
    )
    return [Problem("lora.exclude", text, "Write names of linear layers")]


def _hint_for_name(name: str, layers: Sequence[str]) -> str:
    """Return the fix for a name that matches no layer."""
    short_names = _short_names(layers)
    near = closest_name(name.rpartition(".")[2], short_names)
    if near:
        return f"Did you mean {near}?"
    return f"There are {', '.join(short_names)}, as in {layers[0]}"


def _hint_for_expression(key: str, expression: str, layers: Sequence[str]) -> str:
    """Return the fix for a regular expression that matches no layer."""
    meant = spelling.find_dtrain_value(f"lora.{key}", expression)
    if meant:
        return f"Did you mean lora.{key}={meant}?"
    rule = f"A text is a regular expression for full names, such as {layers[0]}"
    # The text may be a name that was meant as an entry of a list.
    if expression == "experts" or expression in layers or expression in _short_names(layers):
        return f"{rule}. Set lora.{key}=[{expression}]"
    return f"{rule}. A list of names is written lora.{key}=[{', '.join(_short_names(layers)[:2])}]"


def _nearest_or_all(name: str, names: Sequence[str]) -> str:
    """Return the fix for an unknown name: the most similar of `names`, or all of them."""
    near = closest_name(name, names)
    return f"Did you mean {near}?" if near else f"There are {', '.join(names) or 'none'}"


def _short_names(names: Iterable[str]) -> list[str]:
    """Return the last parts of dotted names, each once."""
    return list(dict.fromkeys(name.rpartition(".")[2] for name in names))


def _check_patterns(config: AdapterConfig, layers: Sequence[str]) -> list[Problem]:
    """Check that every pattern of rank_pattern and alpha_pattern matches a layer with an adapter."""
    adapted = [parameter_name(name) for name in config.select_layers(layers)]
    problems = []
    for key, patterns in (("rank_pattern", config.rank_pattern), ("alpha_pattern", config.alpha_pattern)):
        for pattern in patterns:
            if not any(matches_suffix(pattern, name) for name in adapted):
                text = f"lora.{key}: {pattern} matches the end of no adapted layer's name"
                problems.append(Problem(f"lora.{key}", text, _nearest_or_all(pattern, _short_names(adapted))))
    return problems


def _check_saved_modules(config: AdapterConfig, known: Sequence[str]) -> list[Problem]:
    """Check that every entry of modules_to_save matches a module."""
    key = "lora.modules_to_save"
    problems = []
    for entry in config.modules_to_save:
        if not replace(config, modules_to_save=(entry,)).select_saved_modules(known):
            text = f"{key}: {entry} matches no module with weights of its own"
            problems.append(Problem(key, text, _nearest_or_all(entry.rpartition(".")[2], _short_names(known))))
    return problems


def _check_ranks(config: AdapterConfig, layers: Mapping[str, tuple[int, ...]]) -> list[Problem]:
    """Refuse ranks above the smaller side of a layer, once for all layers of a name and size.

    A gate with one output (shared_expert_gate) may have any rank: all-linear includes it next to large matrices, and
    PEFT adapts it too.
    """
    problems = []
    for name, low_rank in config.select_layers(layers).items():
        short = name.rpartition(".")[2]
        rows, columns = layers[name][-2:]
        largest = min(rows, columns)
        if 1 < largest < low_rank.rank:
            text = f"lora.rank: an adapter of rank {low_rank.rank} is larger than {short} itself, [{rows}, {columns}]"
            fix = f"Set lora.rank={largest} or less, or lora.rank_pattern={{{short}: {largest}}}"
            problems.append(Problem("lora.rank", text, fix))
    return list(dict.fromkeys(problems))
