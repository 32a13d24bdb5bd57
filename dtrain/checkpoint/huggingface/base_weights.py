"""The base of an adapter, or of frozen parameters, on one process: where it lies, and its weights as they were trained.

A run that freezes weights holds them in the dtype that it computes in, or in 4 bits; its steps leave them out, for the
files at its model.path have them. What they hold is compared with what the run read.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor

from dtrain.adapters import nf4
from dtrain.base import hub
from dtrain.base.errors import UserError
from dtrain.base.json_files import check_shape, digest, read_text
from dtrain.base.model_directory import CONFIG, has_weights
from dtrain.base.ranks import Ranks, digests
from dtrain.checkpoint.dcp.store import MANIFEST, CheckpointStore
from dtrain.checkpoint.huggingface import quantized
from dtrain.checkpoint.huggingface.merged import exact_names, wider
from dtrain.checkpoint.huggingface.read import check_fit
from dtrain.checkpoint.huggingface.safetensor_files import WeightFiles, weight_files
from dtrain.checkpoint.huggingface.stored import BY_NAME
from dtrain.checkpoint.peft.config import ADAPTER
from dtrain.models.common.decoder import CausalLM

_RECIPE_PARTS = 100_000  # entries, with what aliases repeat


@dataclass(frozen=True)
class RunFacts:
    """Facts of a run's model from its config.yaml. path: model.path, or of an id the directory in the hub's cache;
    freezes: whether some of its weights are not trained."""

    file: Path
    path: Path | None = None
    scratch: bool = False
    freezes: bool = False
    nf4: bool = False
    dtype: torch.dtype | None = None  # of computation, where the recipe names one

    @classmethod
    def of(cls, run: Path) -> "RunFacts":
        """Return the facts of the directory `run`, none without a config.yaml. UserError for a damaged one."""
        file = run / "config.yaml"
        if not file.is_file():
            return cls(file)
        text = read_text(file)
        try:
            check_shape(yaml.load(text, Loader=yaml.BaseLoader), _RECIPE_PARTS)
            recipe = OmegaConf.create(text)
            keys = "model.path", "model.init", "train.dtype", "lora", "train.train_only", "train.freeze"
            path, init, dtype, lora, *chosen = (  # of an environment that is gone, perhaps
                OmegaConf.select(recipe, key, throw_on_resolution_failure=False) for key in keys
            )
        except (OmegaConfBaseException, yaml.YAMLError, ValueError, RecursionError) as error:
            raise UserError(f"{file}: {str(error) or 'it is nested too deep'}") from error
        model_path = None
        if path and isinstance(path, str):  # a directory, or the id that it has, or had, in the cache
            name = path if hub.is_id(path) else hub.id_of(Path(path))
            model_path = Path(path)
            if name is not None and not (model_path / CONFIG).is_file():
                model_path = hub.cached(name) or model_path
        is_nf4 = isinstance(lora, DictConfig) and lora.get("quantize") == "nf4"
        return cls(file, model_path, init == "scratch", lora is not None or any(chosen), is_nf4, BY_NAME.get(dtype))

    def base(self, state: dict[str, Any]) -> Path:
        """The directory of the run's base, which holds what `state`, of a step, says that it read. Raises UserError."""
        if self.path is None or not has_weights(self.path):
            fetch = ""
            if self.path is not None and (name := hub.id_of(self.path)):
                fetch = f", or run `dtrain download {name}`"
            if self.path is not None and not self.path.is_absolute():
                fetch += ", or go to the directory that the run was started in, for this path is relative"
            raise UserError(
                f"{self.file}: the run's steps hold what it trained alone, and there are no weights at model.path="
                f"{self.path}, which has the others: put that model there again{fetch}"
            )
        wanted = state.get("identities", {}).get("model.weights")
        if wanted is not None and digest(digests(weight_files(self.path), ranks=Ranks(alone=True))) != wanted:
            raise UserError(
                f"{self.file}: merging onto a base that differs: the weights at model.path={self.path} are not those "
                "that this run trained on: put these there again"
            )
        return self.path

    def trained_in(self, state: dict[str, Any]) -> torch.dtype | None:
        return BY_NAME.get(state.get("dtype", "")) or self.dtype


def step_around(adapter: Path) -> Path | None:
    """The step of a run that has the directory `adapter` as its adapter; None where it lies elsewhere."""
    step = adapter.absolute().parent
    has_run = (step.parent.parent / "config.yaml").is_file()
    return step if adapter.absolute().name == ADAPTER and (step / MANIFEST).is_file() and has_run else None


def trained_beside(adapter: Path) -> tuple[bool, torch.dtype | None]:
    """Return what the adapter in the directory `adapter`, the export of a run around it, was trained beside: whether in
    4 bits, and in which dtype the run computed. (False, None) of one that lies elsewhere: its base as it is."""
    run = adapter.absolute().parent
    if adapter.absolute().name != "export" or not (run / "config.yaml").is_file():
        return False, None
    facts, store = RunFacts.of(run), CheckpointStore(run / "checkpoints", Ranks(alone=True))
    step = store.latest()
    return facts.nf4, facts.trained_in({} if step is None else store.read_state(step))


class BaseWeights:
    """The weights of the model in `files`, by the names of `model`, which is on meta and has no adapters. dtype: that
    they were held in while they were trained; None for the files' own. in_4_bits: whether the linear layers were, but
    for those in `whole`, as they always are of a checkpoint that is in 4 bits. UserError where the files do not fit."""

    def __init__(
        self,
        model: CausalLM,
        files: WeightFiles,
        dtype: torch.dtype | None = None,
        *,
        in_4_bits: bool = False,
        whole: tuple[str, ...] = (),
    ):
        self.files, self.dtype, self._exact = files, dtype, exact_names(model)
        own = dtype or getattr(torch, model.config.dtype or "float32")
        quantized.hold_in_4_bits(model, files.directory, own, nf4=in_4_bits, except_for=whole)
        self._coded = {
            f"{name}.weight": (layer, layer.weight_storage)
            for name, layer in model.named_modules()
            if nf4.holds_codes(layer)
        }
        self._sources = {quantized.file_name(name): source for name, source in check_fit(model, files).items()}

    def __contains__(self, name: str) -> bool:
        """Return whether the files have it: a language model's have no head of rewards or classes."""
        return name in self._sources

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype of the files; of weights that they have in 4 bits what these were computed in."""
        return self.files.stored[self._sources[name].name].dtype or self._coded[name][1].dtype

    def read(self, name: str) -> Tensor:
        """The weight `name`, whole, [its shape], as it was trained, in a dtype that holds that."""
        source = self._sources[name]
        if name in self._coded:
            layer, held = self._coded[name]
            parts = {part: torch.empty_like(layer.get_parameter(part), device="cpu") for part in nf4.PARTS}
            quantized.fill(self.files, source, *parts.values())
            return held.matrix(parts.__getitem__)
        stored = source.read(self.files)
        return stored if self.dtype is None else stored.to(wider(self.dtype, name in self._exact))
