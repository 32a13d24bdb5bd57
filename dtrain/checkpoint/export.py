"""From a run or one of its checkpoints to a Hugging Face directory, on one process, tensor by tensor."""

from pathlib import Path
from typing import Any

import torch
import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor, nn

from dtrain.checkpoint.huggingface import check_fit
from dtrain.checkpoint.huggingface_write import Entry, Layout, layout_of, write_entries
from dtrain.checkpoint.model_files import CONFIG, has_untrained_parts, read_model_config
from dtrain.checkpoint.safetensor_files import DTYPES, WeightFiles
from dtrain.checkpoint.store import CheckpointStore, locate
from dtrain.checkpoint.training_state import aliases, model_tensors
from dtrain.errors import UserError
from dtrain.json_files import check_shape, read_text
from dtrain.parallel.ranks import Ranks

_RECIPE_PARTS = 100_000  # entries, with what aliases repeat
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}


def export(source: str | Path, out: str | Path, dtype: str | None = None) -> str:
    """Write a Hugging Face directory `out` from `source`: a run's directory (its newest whole checkpoint), a
    `checkpoints/step-N`, or a directory that is in that format already. Returns a line that says what was read.

    dtype: "bfloat16", "float16", "float32" or "float64"; None keeps that of each tensor. config.json, tokenizer and
    chat template come from the run's `model/`, weights that dtrain does not train from its `model.path`. Memory: one
    tensor. No process group is needed or used. UserError where something is missing or damaged; `out` is whole or
    absent.
    """
    source, out = Path(source), Path(out)
    if dtype is not None and dtype not in _DTYPES:
        raise UserError(f"--dtype {dtype}: choose one of {', '.join(_DTYPES)}")
    wanted = _DTYPES[dtype] if dtype is not None else None
    if not source.is_dir():
        raise UserError(f"{source} is no directory: give a run's directory, a checkpoints/step-N, or an exported model")
    ranks = Ranks(alone=True)
    if (source / CONFIG).is_file() and WeightFiles.exist(source):
        layout, said = layout_of(source), f"weights of {source}"
        model, files = _model(layout), WeightFiles(source)
        entries = [layout.entry(files, name, wanted) for name in check_fit(model, files).values()]
    else:
        store, step = locate(source, ranks)
        run = store.directory.absolute().parent
        held = {"step": step, "save": store.read_state(step).get("save")}
        layout, said = _run_layout(run, held), f"step {step} of {run}"
        model = _model(layout)
        entries = _saved_entries(model, store, step, layout, wanted)
    write_entries(model, entries, layout, out, ranks=ranks)
    return said


def _model(layout: Layout) -> nn.Module:
    """The model that config.json describes, without memory: it knows its tensors' names in files."""
    # Imported here: models reads its weights through this room.
    from dtrain import models

    return models.build(models.read_config(layout.source), device="meta")


def _saved_entries(
    model: nn.Module, store: CheckpointStore, step: int, layout: Layout, dtype: torch.dtype | None
) -> list[Entry]:
    fill, saved, tensors = store.opened(step), store.tensors(step), model_tensors(model)
    names = {names[0]: layout.name(model, names) for names in aliases(model).values()}
    entries = []
    for key, (shape, kept) in saved.items():
        if not key.startswith("model."):
            continue
        name = key.removeprefix("model.")
        if name not in names or tuple(tensors[name].shape) != shape:
            raise UserError(
                f"{store.path(step)} has {name} of {list(shape)}, which the model of its run's config.json lacks"
            )

        def read(key: str = key, shape: tuple[int, ...] = shape, kept: torch.dtype = kept) -> Tensor:
            tensor = torch.empty(shape, dtype=kept)
            fill({key: tensor})
            return tensor

        entries.append(Entry(names.pop(name), shape, dtype or kept, read))
    if names:
        raise UserError(f"{store.path(step)} lacks {len(names)} tensors of its model, the first {next(iter(names))}")
    return entries


def _run_layout(run: Path, held: dict[str, Any]) -> Layout:
    """Small files from the run's own copy; weights that are copied through from the model that it started from."""
    path, scratch = _model_path(run)
    own = run / "model"
    source = own if (own / CONFIG).is_file() else path
    if source is None:
        raise UserError(f"{run} has neither model/{CONFIG} nor a config.yaml that says model.path")
    config = read_model_config(source)
    files = WeightFiles(path) if path is not None and WeightFiles.exist(path) else None
    if files is None and has_untrained_parts(config) and not scratch:
        raise UserError(
            f"the model of {run} has parts that dtrain does not train (a vision tower); they are copied from its "
            f"model.path, and {path} has no weights: put them there again"
        )
    return Layout(source, config, files, held=held)


def _model_path(run: Path) -> tuple[Path | None, bool]:
    """model.path of the run's recipe, and whether the model started from scratch."""
    if not (run / "config.yaml").is_file():
        return None, False
    text = read_text(run / "config.yaml")
    try:
        check_shape(yaml.load(text, Loader=yaml.BaseLoader), _RECIPE_PARTS)
        recipe = OmegaConf.create(text)
        init, path = (  # of an environment that is gone, perhaps
            OmegaConf.select(recipe, key, throw_on_resolution_failure=False) for key in ("model.init", "model.path")
        )
    except (OmegaConfBaseException, yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{run / 'config.yaml'}: {str(error) or 'it is nested too deep'}") from error
    return Path(path) if path and isinstance(path, str) else None, init == "scratch"
