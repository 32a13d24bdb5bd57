"""A run, one of its checkpoints or an adapter, as a directory that others read: one process, tensor by tensor."""

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
    """A model that a source holds, an adapter merged into it; `entries`, its tensors in files, are read when they are
    written. description: of what was read."""

    description: str
    model: CausalLM
    layout: Layout
    entries: list[FullWeight]


@dataclass(frozen=True)
class AdapterExport:
    """An adapter that a source holds. directories: of its tokenizer and template, a later one's over an earlier's.
    description: of what was read."""

    description: str
    adapter: StoredAdapter
    directories: list[Path]


def export(
    source: str | Path, out: str | Path, dtype: str | None = None, form: str | None = None, original_base: bool = False
) -> str:
    """Write a directory `out` from `source`: a run's directory (its newest whole checkpoint), a `checkpoints/step-N`,
    an adapter's directory in PEFT's layout, or a model's in Hugging Face's. Returns a line that says what was read.

    form: of an adapter, or of a run that trained one. "merged", which is also None: a model in Hugging Face's layout,
    the adapter merged into the base as it was trained, rounded to the dtype of computation or to 4 bits, or with
    original_base as its files are; "adapter": alone, in PEFT's layout; "folded": that with its scale in B, for readers
    of plain LoRA.

    dtype: "bfloat16", "float16", "float32" or "float64"; None keeps that of each tensor, of merged ones the base's.
    config.json, tokenizer and chat template come from the run's `model/`, weights that the run did not train from its
    `model.path`, which must hold what it held then. Memory: one tensor. No process group is needed or used. UserError
    where something is missing or damaged; `out` is whole or absent.
    """
    if dtype is not None and dtype not in DTYPES_BY_NAME:
        raise UserError(f"--dtype {dtype}: choose one of {', '.join(DTYPES_BY_NAME)}")
    wanted = DTYPES_BY_NAME[dtype] if dtype is not None else None
    content = open_source(Path(source), wanted, form, original_base)
    if isinstance(content, ModelExport):
        write_entries(content.model, content.entries, content.layout, Path(out), ranks=Ranks(single_process=True))
        return content.description
    write = content.adapter.fold if form == "folded" else content.adapter.copy
    write(Path(out), content.directories, wanted)
    return f"{content.description}, its scale folded into B" if form == "folded" else content.description


def open_source(
    source: Path, dtype: torch.dtype | None, form: str | None, original_base: bool
) -> ModelExport | AdapterExport:
    """The model or adapter in `source`, not yet read. The arguments and errors are those of `export`."""
    if original_base and form not in (None, "merged"):
        raise UserError("--original-base says what --merged merges into; it has no meaning with another form")
    if not source.is_dir():
        raise UserError(f"{source} is no directory: give a run's directory, a checkpoints/step-N, or an exported model")
    step = step_of_adapter(source)
    if step is None and is_adapter_directory(source):
        return _find_adapter(source, dtype, form or "merged", original_base)
    if (source / CONFIG).is_file() and has_weights(source):
        if form is not None:
            raise UserError(f"--{form}: {source} is a whole model, which has no adapter")
        layout = layout_of(source)
        model, files = _model(layout), WeightFiles(source)
        places, exact = check_fit(model, files), exact_names(model)
        kept = {places[name].name for name in exact}
        names = dict.fromkeys(name for rows in places.values() for name in rows.names)
        entries = [stored_weight(files, name, dtype and widen_exact(dtype, name in kept)) for name in names]
        return ModelExport(f"weights of {source}", model, layout, entries)
    return _find_step(*locate_step(step or source, Ranks(single_process=True)), dtype, form, original_base)


def _model(layout: Layout, labels: int = 0) -> CausalLM:
    """The model that config.json describes, on meta; labels: as of `read_config`."""
    return build(read_config(layout.source, labels, vision=layout.has_tower), device="meta")


def _find_adapter(
    source: Path, dtype: torch.dtype | None, form: str, original_base: bool
) -> ModelExport | AdapterExport:
    base = base_of(source)
    layout = layout_of(base, has_tower=has_tower_tensors(source))
    labels = num_outputs_in_adapter(source) or 0
    model = _model(layout, labels)
    adapter = StoredAdapter(source, model)
    if form != "merged":
        return AdapterExport(f"the adapter {source}", adapter, [base, source])
    in_4_bits, kept = (False, None) if original_base else training_precision_of_base(source)
    weights = BaseWeights(_model(layout, labels), WeightFiles(base), kept, in_4_bits=in_4_bits, whole=adapter.whole)
    entries = _entries(model, layout, dtype, {}, None, weights, adapter)
    beside = ", as its run trained beside it" if in_4_bits or kept is not None else ""
    description = f"the adapter {source}, merged into {base}{beside}"
    return ModelExport(description, model, replace(layout, companions=(source,)), entries)


def _find_step(
    store: CheckpointStore, step: int, dtype: torch.dtype | None, form: str | None, original_base: bool
) -> ModelExport | AdapterExport:
    directory, run = store.path(step), store.directory.absolute().parent
    facts, state = RunFacts.from_run(run), store.read_state(step)
    description, trains_adapter = f"step {step} of {run}", (directory / ADAPTER / ADAPTER_CONFIG).is_file()
    if (form is not None or original_base) and not trains_adapter:
        option = f"--{form}" if form is not None else "--original-base"
        raise UserError(f"{option}: {run} trained no adapter: leave it out")
    saved_step = {"step": step, "save": state.get("save")}
    has_tower = any(is_in_vision_tower(name.removeprefix("model.")) for name in store.tensor_specs(step))
    layout = _run_layout(run, facts, saved_step, has_tower)
    head = store.tensor_specs(step).get(SCORE_WEIGHT)
    labels = head[0][0] if head is not None else 0
    model, fill = _model(layout, labels), store.open_step(step)
    adapter = StoredAdapter(directory / ADAPTER, model) if trains_adapter else None
    if adapter is not None and form in ("adapter", "folded"):
        named = read_json(adapter.directory / ADAPTER_CONFIG).get(BASE)
        alone = ", whose base lies in no files but the run's steps: --merged writes both" if named is None else ""
        return AdapterExport(f"the adapter of {description}{alone}", adapter, [layout.source])
    stored = store.tensor_specs(step).items()
    saved = {name[6:]: size for name, size in stored if name.startswith("model.") and not is_adapter(name)}
    wanted = model_tensors(model)
    missing = wanted.keys() - saved.keys()
    lost = [name for name in missing if not is_in_vision_tower(name)]  # a run may train a part of the tower alone
    if lost and not facts.freezes:
        raise UserError(f"{directory} is missing {len(lost)} tensors of its model, the first {min(lost)}")
    if original_base and not missing:
        raise UserError(f"--original-base: the base of {run} lies in no files, its steps hold it: leave it out")
    weights = None
    if missing:
        files, kept = WeightFiles(facts.base_directory(state)), None if original_base else facts.training_dtype(state)
        in_4_bits, whole = facts.nf4 and not original_base, adapter.whole if adapter is not None else ()
        weights = BaseWeights(_model(layout, labels), files, kept, in_4_bits=in_4_bits, whole=whole)
    if adapter is not None:
        base = weights.files.directory if weights is not None else "the base that the step holds"
        description = f"{description}, its adapter merged into {base}"

    def read(name: str) -> Tensor:
        shape, kept = saved[name]
        tensor = torch.empty(shape, dtype=kept)
        fill({f"model.{name}": tensor})
        return tensor

    for name, (shape, _) in saved.items():
        if name not in wanted or tuple(wanted[name].shape) != shape:
            text = f"{directory} has {name} of {list(shape)}, which the model of its config.json does not have"
            raise UserError(text)
    return ModelExport(description, model, layout, _entries(model, layout, dtype, saved, read, weights, adapter))


def _entries(
    model: nn.Module,
    layout: Layout,
    dtype: torch.dtype | None,
    saved: TensorSpecs,
    read: Callable[[str], Tensor] | None,
    base: BaseWeights | None,
    adapter: StoredAdapter | None,
) -> list[FullWeight]:
    """The tensors of `model`: those `saved` as `read` gives them, others of the `base`, an adapter merged into them.
    dtype: None for the tensors' own."""
    tensors, known, exact = model_tensors(model), tensor_aliases(model), exact_names(model)

    def weight(name: str) -> FullWeight:
        is_in_base = base is not None and name in base
        if name in saved and read is not None:
            act, own = partial(read, name), saved[name][1]
        elif base is not None and is_in_base:
            act, own = partial(base.read, name), base.dtype_of(name)
        elif adapter is not None and adapter.saves(name):
            act, own = partial(adapter.read, name), adapter.read(name).dtype
        else:
            raise ValueError(f"{name} is nowhere")
        if base is not None and is_in_base and adapter is not None:
            own = base.dtype_of(name)
        merged = partial(adapter.merged, name, act) if adapter is not None else lambda dtype: act().to(dtype)
        return FullWeight(known[name], tensors[name].shape, own, merged, exact=name in exact)

    weights = {name: weight(name) for name in [*saved, *(other for other in tensors if other not in saved)]}
    kept = {name for name in tensors if is_in_vision_tower(name) and name not in saved}
    if adapter is not None:
        kept = {name for name in kept if not (adapter.saves(name) or name.rpartition(".")[0] in adapter.adapted)}
    return [layout.entry(model, whole, dtype, kept) for whole in weights_in_files(model, weights).values()]


def _run_layout(run: Path, facts: RunFacts, saved_step: dict[str, Any], has_tower: bool) -> Layout:
    """Small files from the run's own copy; weights that are copied through from the model that it started from."""
    path, own = facts.path, run / "model"
    source = own if (own / CONFIG).is_file() else path
    if source is None:
        raise UserError(f"{run} has neither model/{CONFIG} nor a config.yaml that says model.path")
    layout = layout_of(source, path, has_tower=has_tower)
    if (layout.is_text_tower_only or (has_tower and layout.files is None)) and not facts.scratch:
        raise UserError(
            f"the model of {run} has parts that dtrain does not train (a vision tower, or what else its files have); "
            f"they are copied from its model.path, and {path} has no weights: put them there again"
        )
    return replace(layout, saved_step=saved_step)
