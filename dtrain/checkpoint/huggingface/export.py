"""`dtrain export`: a run, one of its checkpoints, a model or an adapter as a directory for other programs.

It runs in one process, and writes tensor by tensor. `open_source` finds out what a path contains, without reading
weights. The result is one of two things to write:

    ModelExport      a full model, with an adapter merged if there is one
    AdapterExport    only an adapter, as it is or with its scale folded into B
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

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
    exact = {sources[name].name for name in exact_names(model)}  # names in the files
    file_names: dict[str, None] = {}  # a set in order of appearance: several tensors may be in one of the files
    for rows in sources.values():
        file_names.update(dict.fromkeys(rows.names))
    entries = []
    for name in file_names:
        entry_dtype = None if dtype is None else widen_exact(dtype, name in exact)
        entries.append(stored_weight(files, name, entry_dtype))
    return ModelExport(f"weights of {source}", model, layout, entries)


def _build_on_meta(layout: Layout, labels: int = 0) -> CausalLM:
    """Build the model of a config.json on meta, with a head of `labels` outputs if that is not 0."""
    return build(read_config(layout.source, labels, vision=layout.has_tower), device="meta")


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
        whole=adapter.whole,
    )
    entries = _entries(model, layout, dtype, {}, None, weights, adapter)
    is_rounded = precision.in_4_bits or precision.dtype is not None
    description = f"the adapter {source}, merged into {base}{', as it was in training' if is_rounded else ''}"
    return ModelExport(description, model, replace(layout, companions=(source,)), entries)


def _open_step(
    store: CheckpointStore, step: int, dtype: torch.dtype | None, form: str | None, original_base: bool
) -> ModelExport | AdapterExport:
    """Open a step of a run.

    A step contains the trained weights. It contains frozen weights only if they are in no files, for example because
    the run began with random weights.
    """
    directory, run = store.path(step), store.directory.absolute().parent
    facts, state = RunFacts.from_run(run), store.read_state(step)
    description = f"step {step} of {run}"
    trains_adapter = (directory / ADAPTER / ADAPTER_CONFIG).is_file()
    if (form is not None or original_base) and not trains_adapter:
        option = f"--{form}" if form is not None else "--original-base"
        raise UserError(f"{option}: {run} trained no adapter: leave it out")
    specs = store.tensor_specs(step)
    has_tower = any(is_in_vision_tower(name.removeprefix("model.")) for name in specs)
    layout = _run_layout(run, facts, {"step": step, "save": state.get("save")}, has_tower)
    labels = 0
    if SCORE_WEIGHT in specs:
        head_shape, _ = specs[SCORE_WEIGHT]
        labels = head_shape[0]
    model, fill = _build_on_meta(layout, labels), store.open_step(step)
    adapter = StoredAdapter(directory / ADAPTER, model) if trains_adapter else None
    if adapter is not None and form in ("adapter", "folded"):
        base_name = read_json(adapter.directory / ADAPTER_CONFIG).get(BASE)
        note = ", whose base is only in the run's steps: --merged writes both" if base_name is None else ""
        return AdapterExport(f"the adapter of {description}{note}", adapter, [layout.source])

    saved: TensorSpecs = {}
    for name, spec in specs.items():
        if name.startswith("model.") and not is_adapter(name):
            saved[name.removeprefix("model.")] = spec
    model_weights = model_tensors(model)
    missing = model_weights.keys() - saved.keys()
    # A run may train only a part of the vision tower.
    lost = [name for name in missing if not is_in_vision_tower(name)]
    if lost and not facts.freezes:
        raise UserError(f"{directory} is missing {len(lost)} tensors of its model, the first {min(lost)}")
    if original_base and not missing:
        raise UserError(
            f"--original-base: the base of {run} is only in its steps, so there is no original to use. Leave it out"
        )
    base = None
    if missing:
        base = BaseWeights(
            _build_on_meta(layout, labels),
            WeightFiles(facts.base_directory(state)),
            None if original_base else facts.training_dtype(state),
            in_4_bits=facts.nf4 and not original_base,
            whole=adapter.whole if adapter is not None else (),
        )
    if adapter is not None:
        merged_into = base.files.directory if base is not None else "the base that the step has"
        description = f"{description}, its adapter merged into {merged_into}"

    def read(name: str) -> Tensor:
        shape, saved_dtype = saved[name]
        tensor = torch.empty(shape, dtype=saved_dtype)
        fill({f"model.{name}": tensor})
        return tensor

    for name, (shape, _) in saved.items():
        if name not in model_weights or tuple(model_weights[name].shape) != shape:
            text = f"{directory} has {name} of {list(shape)}, which the model of its config.json does not have"
            raise UserError(text)
    return ModelExport(description, model, layout, _entries(model, layout, dtype, saved, read, base, adapter))


def _entries(
    model: nn.Module,
    layout: Layout,
    dtype: torch.dtype | None,
    saved: TensorSpecs,
    read: Callable[[str], Tensor] | None,
    base: BaseWeights | None,
    adapter: StoredAdapter | None,
) -> list[FullWeight]:
    """Return the tensors of a model's files, with an adapter merged.

    Args:
        model: The model on meta.
        layout: Layout of the files.
        dtype: Dtype of the tensors in the files. None keeps the dtype of each tensor.
        saved: Shape and dtype of the tensors that a step has, by name. Empty without a step.
        read: Reads a tensor of the step by its name. None without a step.
        base: The weights that the step does not have. None if it has all weights.
        adapter: The adapter. None if there is none.
    """
    tensors, aliases, exact = model_tensors(model), tensor_aliases(model), exact_names(model)

    def weight(name: str) -> FullWeight:
        # The unmerged weight comes from the step, else from the files of the base. Otherwise only the adapter has it,
        # for example a new head of rewards. `own_dtype` is the dtype of the result if the user names none. If an
        # adapter is merged into a weight of the base's files, it is the dtype of the base.
        is_in_base = base is not None and name in base
        read_base: Callable[[], Tensor]
        if name in saved and read is not None:
            read_base, own_dtype = partial(read, name), saved[name][1]
        elif base is not None and is_in_base:
            read_base, own_dtype = partial(base.read, name), base.dtype_of(name)
        elif adapter is not None and adapter.saves(name):
            read_base, own_dtype = partial(adapter.read, name), adapter.read(name).dtype
        else:
            raise ValueError(f"{name} is in neither the step, the base nor the adapter")
        if base is not None and is_in_base and adapter is not None:
            own_dtype = base.dtype_of(name)
        if adapter is not None:
            read_merged = partial(adapter.merged, name, read_base)
        else:
            read_merged = partial(_read_as, read_base)
        return FullWeight(aliases[name], tensors[name].shape, own_dtype, read_merged, exact=name in exact)

    weights = {name: weight(name) for name in saved}
    for name in tensors:
        if name not in saved:
            weights[name] = weight(name)
    # What a run did not train of a vision tower is copied from the source's files.
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
    path, own_files = facts.path, run / "model"
    source = own_files if (own_files / CONFIG).is_file() else path
    if source is None:
        raise UserError(f"{run} has neither model/{CONFIG} nor a config.yaml that says model.path")
    layout = layout_of(source, path, has_tower=has_tower)
    if (layout.is_text_tower_only or (has_tower and layout.files is None)) and not facts.scratch:
        raise UserError(
            f"the model of {run} has parts that dtrain does not train, such as a vision tower. They are copied from "
            f"its model.path, and {path} has no weights: put them there again"
        )
    return replace(layout, saved_step=saved_step)
