"""`dtrain export`: a run, one of its checkpoints, a model or an adapter as a directory for other programs.

It runs in one process, and writes tensor by tensor. `open_source` finds out what a path contains, without reading
weights. The result is one of two things to write:

    ModelExport      a full model, with an adapter merged if there is one
    AdapterExport    only an adapter, as it is or with its scale folded into B
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dtrain.adapters.config import is_adapter
from dtrain.base.errors import UserError
from dtrain.base.json_files import read_json
from dtrain.base.model_directory import ADAPTER_CONFIG, CONFIG, has_weights, is_adapter_directory
from dtrain.base.ranks import Ranks
from dtrain.checkpoint.dcp.store import CheckpointStore, TensorSpecs, locate_step
from dtrain.checkpoint.dcp.training_state import SCORE_WEIGHT, model_tensors, tensor_aliases
from dtrain.checkpoint.huggingface.merged import (
    BasePrecision,
    BaseWeights,
    FullWeight,
    RunFacts,
    exact_names,
    step_of_adapter,
    stored_weight,
    training_precision_of_base,
    weights_in_files,
    widen_exact,
)
from dtrain.checkpoint.huggingface.read import check_fit
from dtrain.checkpoint.huggingface.safetensor_files import DTYPES_BY_NAME, WeightFiles
from dtrain.checkpoint.huggingface.write import Layout, layout_of, write_entries
from dtrain.checkpoint.peft.config import ADAPTER, BASE, base_of
from dtrain.checkpoint.peft.export import StoredAdapter
from dtrain.checkpoint.peft.tensors import has_tower_tensors, num_outputs_in_adapter
from dtrain.models.building import build
from dtrain.models.common.config import is_in_vision_tower
from dtrain.models.common.decoder import CausalLM
from dtrain.models.read_config import read_config

FORMS = ("merged", "adapter", "folded")


@dataclass(frozen=True)
class ModelExport:
    """A full model to write.

    Attributes:
        description: What was read, for the terminal.
        model: The model on meta.
        layout: Layout of the directory to write.
        entries: The tensors of its files, with the adapter merged. They are read when they are written.
    """

    description: str
    model: CausalLM
    layout: Layout
    entries: list[FullWeight]


@dataclass(frozen=True)
class AdapterExport:
    """An adapter to write by itself.

    Attributes:
        description: What was read, for the terminal.
        adapter: The adapter.
        directories: Directories of its tokenizer and template. A later one's files replace those of an earlier one.
    """

    description: str
    adapter: StoredAdapter
    directories: list[Path]


def export(
    source: str | Path, out: str | Path, dtype: str | None = None, form: str | None = None, original_base: bool = False
) -> str:
    """Write a directory that other programs read.

    config.json, tokenizer and chat template come from the run's `model/`. Weights that the run did not train come from
    its `model.path`, which must have the same content as at that time. One tensor is in memory at a time. No process
    group is needed or used.

    Args:
        source: A run's directory (its newest complete checkpoint), a `checkpoints/step-N`, an adapter's directory in
            PEFT's layout, or a model's in Hugging Face's.
        out: The new directory. It appears when it is complete.
        dtype: "bfloat16", "float16", "float32" or "float64". None keeps the dtype of each tensor, for merged ones that
            of the base.
        form: For an adapter, or a run that trained one. "merged" or None: a model in Hugging Face's layout, with the
            adapter merged into the base as it was in training, rounded to the dtype of computation or to 4 bits.
            "adapter": only the adapter, in PEFT's layout. "folded": that with its scale in B, for readers of plain
            LoRA.
        original_base: Merge into the base as its files have it.

    Returns:
        A line about what was read.

    Raises:
        UserError: If something is missing or damaged.
    """
    if dtype is not None and dtype not in DTYPES_BY_NAME:
        raise UserError(f"--dtype {dtype}: choose one of {', '.join(DTYPES_BY_NAME)}")
    torch_dtype = DTYPES_BY_NAME[dtype] if dtype is not None else None
    content = open_source(Path(source), torch_dtype, form, original_base)
    if isinstance(content, ModelExport):
        write_entries(content.model, content.entries, content.layout, Path(out), ranks=Ranks(single_process=True))
        return content.description
    if form == "folded":
        content.adapter.fold(Path(out), content.directories, torch_dtype)
        return f"{content.description}, its scale folded into B"
    content.adapter.copy(Path(out), content.directories, torch_dtype)
    return content.description


def open_source(
    source: Path, dtype: torch.dtype | None, form: str | None, original_base: bool
) -> ModelExport | AdapterExport:
    """Find the model or adapter in a source, without reading weights. Arguments and errors are those of `export`."""
    if original_base and form not in (None, "merged"):
        raise UserError("--original-base says what --merged merges into; it has no meaning with another form")
    if not source.is_dir():
        raise UserError(
            f"{source} is not a directory: give a run's directory, a checkpoints/step-N, or an exported model"
        )
    step = step_of_adapter(source)
    if step is None and is_adapter_directory(source):
        return _open_adapter(source, dtype, form or "merged", original_base)
    if (source / CONFIG).is_file() and has_weights(source):
        if form is not None:
            raise UserError(f"--{form}: {source} is a whole model, which has no adapter")
        return _open_model(source, dtype)
    store, number = locate_step(step or source, Ranks(single_process=True))
    return _open_step(store, number, dtype, form, original_base)


def _open_model(source: Path, dtype: torch.dtype | None) -> ModelExport:
    """Open a model's directory, whose tensors are copied as its files have them."""
    layout = layout_of(source)
    model, files = _build_on_meta(layout), WeightFiles(source)
    sources = check_fit(model, files)
    exact: set[str] = set()  # names in the files
    for name in exact_names(model):
        exact.update(sources[name].names)
    # A set in order of appearance: several tensors of the model may be parts of one tensor of the files.
    file_names: dict[str, None] = {}
    for rows in sources.values():
        file_names.update(dict.fromkeys(rows.names))
    entries = []
    for name in file_names:
        entry_dtype = None if dtype is None else widen_exact(dtype, name in exact)
        entries.append(stored_weight(files, name, entry_dtype))
    return ModelExport(f"weights of {source}", model, layout, entries)


def _build_on_meta(layout: Layout, labels: int = 0, implementation: str = "auto") -> CausalLM:
    """Build the model of a config.json on meta, with a head of `labels` outputs if that is not 0."""
    config = read_config(layout.source, labels, vision=layout.has_tower, implementation=implementation)
    return build(config, device="meta")


def _open_adapter(
    source: Path, dtype: torch.dtype | None, form: str, original_base: bool
) -> ModelExport | AdapterExport:
    """Open an adapter's directory, whose adapter_config.json names its base."""
    base = base_of(source)
    layout = layout_of(base, has_tower=has_tower_tensors(source))
    labels = num_outputs_in_adapter(source) or 0
    model = _build_on_meta(layout, labels)
    adapter = StoredAdapter(source, model)
    if form != "merged":
        return AdapterExport(f"the adapter {source}", adapter, [base, source])
    precision = BasePrecision(False, None) if original_base else training_precision_of_base(source)
    weights = BaseWeights(
        _build_on_meta(layout, labels),
        WeightFiles(base),
        precision.dtype,
        in_4_bits=precision.in_4_bits,
        unquantized=adapter.full_layers,
    )
    entries = _entries(model, layout, dtype, None, weights, adapter)
    description = f"the adapter {source}, merged into {base}"
    if precision.in_4_bits or precision.dtype is not None:
        description += ", as it was in training"
    return ModelExport(description, model, replace(layout, companions=(source,)), entries)


@dataclass(frozen=True)
class _StepWeights:
    """The weights of a model that a step of a run has.

    Attributes:
        specs: Shape and dtype of each weight, by its name in the model.
        fill: Fills tensors in place from the step, by their names in the checkpoint.
    """

    specs: TensorSpecs
    fill: Callable[[Mapping[str, Tensor]], None]

    def read(self, name: str) -> Tensor:
        """Read a weight by its name in the model."""
        shape, dtype = self.specs[name]
        tensor = torch.empty(shape, dtype=dtype)
        self.fill({f"model.{name}": tensor})
        return tensor


def _open_step(
    store: CheckpointStore, step: int, dtype: torch.dtype | None, form: str | None, original_base: bool
) -> ModelExport | AdapterExport:
    """Open a step of a run.

    A step contains the trained weights. It contains frozen weights only if they are in no files, for example because
    the run began with random weights.
    """
    directory = store.path(step)
    run = store.directory.absolute().parent
    facts = RunFacts.from_run(run)
    state = store.read_state(step)
    description = f"step {step} of {run}"
    trains_adapter = (directory / ADAPTER / ADAPTER_CONFIG).is_file()
    if (form is not None or original_base) and not trains_adapter:
        option = f"--{form}" if form is not None else "--original-base"
        raise UserError(f"{option}: {run} trained no adapter: leave it out")

    specs = store.tensor_specs(step)
    has_tower = any(is_in_vision_tower(name.removeprefix("model.")) for name in specs)
    layout = _run_layout(run, facts, {"step": step, "save": state.get("save")}, has_tower)
    labels = _num_outputs(specs)
    model = _build_on_meta(layout, labels, facts.implementation)
    weights = _StepWeights(_model_specs(specs), store.open_step(step))
    adapter = StoredAdapter(directory / ADAPTER, model) if trains_adapter else None
    if adapter is not None and form in ("adapter", "folded"):
        base_name = read_json(adapter.directory / ADAPTER_CONFIG).get(BASE)
        note = ", whose base is only in the run's steps: --merged writes both" if base_name is None else ""
        return AdapterExport(f"the adapter of {description}{note}", adapter, [layout.source])

    missing = model_tensors(model).keys() - weights.specs.keys()
    if not facts.freezes:
        _check_all_saved(directory, missing)
    if original_base and not missing:
        raise UserError(
            f"--original-base: the base of {run} is only in its steps, so there is no original to use. Leave it out"
        )
    base = None
    if missing:
        base = BaseWeights(
            _build_on_meta(layout, labels, facts.implementation),
            WeightFiles(facts.base_directory(state)),
            None if original_base else facts.training_dtype(state),
            in_4_bits=facts.nf4 and not original_base,
            unquantized=adapter.full_layers if adapter is not None else (),
        )
    if adapter is not None:
        merged_into = base.files.directory if base is not None else "the base that the step has"
        description = f"{description}, its adapter merged into {merged_into}"
    _check_shapes(directory, weights.specs, model)
    return ModelExport(description, model, layout, _entries(model, layout, dtype, weights, base, adapter))


def _num_outputs(specs: TensorSpecs) -> int:
    """Return the number of outputs of a head of rewards or classes among a step's tensors; 0 without such a head."""
    if SCORE_WEIGHT not in specs:
        return 0
    head_shape, _ = specs[SCORE_WEIGHT]
    return head_shape[0]


def _model_specs(specs: TensorSpecs) -> TensorSpecs:
    """Return shape and dtype of the model's own weights among a step's tensors, by their names in the model."""
    model_specs: TensorSpecs = {}
    for name, spec in specs.items():
        if name.startswith("model.") and not is_adapter(name):
            model_specs[name.removeprefix("model.")] = spec
    return model_specs


def _check_all_saved(directory: Path, missing: Collection[str]) -> None:
    """Raise UserError if a step of a run that trains all weights lacks some of them.

    Only the weights of a vision tower may be missing, because a run may train a part of the tower.
    """
    names = [name for name in missing if not is_in_vision_tower(name)]
    if names:
        raise UserError(f"{directory} is missing {len(names)} tensors of its model, the first {min(names)}")


def _check_shapes(directory: Path, specs: TensorSpecs, model: CausalLM) -> None:
    """Raise UserError if a step has a weight that the model does not have, or has with another shape."""
    model_weights = model_tensors(model)
    for name, (shape, _) in specs.items():
        if name not in model_weights or tuple(model_weights[name].shape) != shape:
            text = f"{directory} has {name} of {list(shape)}, which the model of its config.json does not have"
            raise UserError(text)


class _UnmergedWeight(NamedTuple):
    """A weight without the adapter.

    Attributes:
        read: Reads the weight.
        dtype: Dtype of the exported weight if the user names none.
    """

    read: Callable[[], Tensor]
    dtype: torch.dtype


def _unmerged_weight(
    name: str, step: _StepWeights | None, base: BaseWeights | None, adapter: StoredAdapter | None
) -> _UnmergedWeight:
    """Find a weight in the step, else in the files of its base, else in the adapter, such as a new head of rewards."""
    if step is not None and name in step.specs:
        _, dtype = step.specs[name]
        weight = _UnmergedWeight(partial(step.read, name), dtype)
    elif base is not None and name in base:
        weight = _UnmergedWeight(partial(base.read, name), base.dtype_of(name))
    elif adapter is not None and adapter.saves(name):
        weight = _UnmergedWeight(partial(adapter.read, name), adapter.read(name).dtype)
    else:
        raise ValueError(f"{name} is in neither the step, the base nor the adapter")
    # An adapter is merged into the dtype of the base's files.
    if adapter is not None and base is not None and name in base:
        weight = weight._replace(dtype=base.dtype_of(name))
    return weight


def _entries(
    model: nn.Module,
    layout: Layout,
    dtype: torch.dtype | None,
    step: _StepWeights | None,
    base: BaseWeights | None,
    adapter: StoredAdapter | None,
) -> list[FullWeight]:
    """Return the tensors of a model's files, with an adapter merged.

    Args:
        model: The model on meta.
        layout: Layout of the files.
        dtype: Dtype of the tensors in the files. None keeps the dtype of each tensor.
        step: The weights of a step. None if no step is exported.
        base: The weights that the step does not have. None if it has all weights.
        adapter: The adapter. None if there is none.
    """
    tensors, aliases, exact = model_tensors(model), tensor_aliases(model), exact_names(model)
    saved = step.specs if step is not None else {}
    weights = {}
    for name in dict.fromkeys([*saved, *tensors]):
        unmerged = _unmerged_weight(name, step, base, adapter)
        if adapter is not None:
            read = partial(adapter.merged, name, unmerged.read)
        else:
            read = partial(_read_as, unmerged.read)
        weights[name] = FullWeight(aliases[name], tensors[name].shape, unmerged.dtype, read, exact=name in exact)
    # Weights of a vision tower that the run did not train are copied from the source's files.
    from_source = set()
    for name in tensors:
        is_adapted = adapter is not None and (adapter.saves(name) or name.rpartition(".")[0] in adapter.adapted)
        if is_in_vision_tower(name) and name not in saved and not is_adapted:
            from_source.add(name)
    return [layout.entry(model, entry, dtype, from_source) for entry in weights_in_files(model, weights).values()]


def _read_as(read: Callable[[], Tensor], dtype: torch.dtype) -> Tensor:
    return read().to(dtype)


def _run_layout(run: Path, facts: RunFacts, saved_step: dict[str, Any], has_tower: bool) -> Layout:
    """Return the layout of a run's exports.

    Small files come from the run's own copy. Weights that are only copied come from the model that the run started
    from.
    """
    path = facts.path
    copy = run / "model"
    source = copy if (copy / CONFIG).is_file() else path
    if source is None:
        raise UserError(f"{run} has neither model/{CONFIG} nor a config.yaml that says model.path")
    layout = layout_of(source, path, has_tower=has_tower)
    if (layout.is_text_tower_only or (has_tower and layout.files is None)) and not facts.scratch:
        raise UserError(
            f"the model of {run} has parts that dtrain does not train, such as a vision tower. They are copied from "
            f"its model.path, and {path} has no weights: put them there again"
        )
    return replace(layout, saved_step=saved_step)
