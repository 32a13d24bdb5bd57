"""Full weights of a model with its adapters merged, one tensor at a time, and the base weights of an adapter.

`full_weights` gives the weights of a model in memory. They are read and not written; only `merge_in_place` changes
the model.

`BaseWeights` reads the weights that a run has frozen, on one process, from the files at its model.path: a run's steps
leave them out. They are read as they were in training, in the dtype that the run computed in or in 4 bits. `RunFacts`
finds these files by the run's config.yaml, and compares their content with what the run read.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from dtrain.adapters import nf4
from dtrain.adapters.config import is_adapter
from dtrain.adapters.lora import Adapted, Adapter, adapted_layers, remove_adapters
from dtrain.adapters.nf4 import CODES, PARTS, SCALES, NF4Weight, has_nf4_weight
from dtrain.base import hub
from dtrain.base.errors import UserError
from dtrain.base.json_files import check_json_size, digest, read_text
from dtrain.base.model_directory import CONFIG, has_weights
from dtrain.base.ranks import Ranks, file_digests
from dtrain.checkpoint.dcp.store import MANIFEST, CheckpointStore
from dtrain.checkpoint.dcp.training_state import model_tensors, tensor_aliases
from dtrain.checkpoint.huggingface import quantized
from dtrain.checkpoint.huggingface.file_rows import FusedWeight, fused_weights
from dtrain.checkpoint.huggingface.read import check_fit
from dtrain.checkpoint.huggingface.safetensor_files import COPIED_DTYPES, DTYPES_BY_NAME, WeightFiles, weight_files
from dtrain.checkpoint.peft.config import ADAPTER
from dtrain.models.common.config import ModelConfig
from dtrain.models.common.decoder import CausalLM
from dtrain.models.common.moe import Router
from dtrain.parallel.placement import to_parameter_device
from dtrain.parallel.tensor import full_precision_modules

_MOST_RECIPE_ENTRIES = 100_000  # entries, with what aliases repeat


@dataclass(frozen=True)
class FullWeight:
    """A weight of [shape]. names: all that the model knows it by, or the one in a file. dtype: the base's own, or the
    file's. `read(dtype)` gives it whole, a new tensor or the model's own, on any device; collective: every rank calls
    it, and otherwise a file's writer alone. exact: it is written in float32 at least."""

    names: list[str]
    shape: torch.Size
    dtype: torch.dtype
    read: Callable[[torch.dtype], Tensor]
    collective: bool = False
    exact: bool = False

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def in_file(self, name: str, dtype: torch.dtype | None) -> "FullWeight":
        """The tensor `name` of a file, in `dtype`; None: its own."""
        own = self.dtype if dtype is None or not self.dtype.is_floating_point else widen_exact(dtype, self.exact)
        return replace(self, names=[name], dtype=own)


def full_weights(model: nn.Module) -> dict[str, FullWeight]:
    """Return the weights of `model` by the name of files, in the model's order, each [any shape], tied ones once. No
    collective; FSDP modules go back to their shards. `read` gathers the weight, in its own dtype where an adapter is
    merged into it, and the adapter: an all-gather for each that is sharded."""
    layers = {name: submodule for name, submodule in model.named_modules() if isinstance(submodule, Adapted)}
    tensors, exact, weights = model_tensors(model), exact_names(model), {}
    for name, names in tensor_aliases(model).items():
        module, _, parameter = name.rpartition(".")
        layer = layers.get(module)
        if is_adapter(name) or (layer is not None and parameter == SCALES):
            continue
        if layer is not None and (parameter == CODES or (parameter == "weight" and layer.wrapper is not None)):
            name = f"{module}.weight"
            weights[name] = _adapted_weight(layer, name)
        else:
            tensor = tensors[name]
            read, is_sharded = partial(_gather_as, tensor), isinstance(tensor, DTensor)
            weights[name] = FullWeight(names, tensor.shape, tensor.dtype, read, is_sharded, name in exact)
    return weights_in_files(model, weights)


def weights_in_files(model: nn.Module | ModelConfig, weights: Mapping[str, FullWeight]) -> dict[str, FullWeight]:
    """The weights of `model`, or of one of this ModelConfig, by files' names: joined where these join them, and of a
    stack the matrices where files have these."""
    stacks: dict[str, _ExpertStack] = {}
    whole: dict[str, FullWeight] = {}
    for fused in fused_weights(model, weights):
        first = weights[fused.parts[0]]
        if fused.expert is None:
            whole[fused.name] = _join_parts(fused, [weights[part] for part in fused.parts])
        else:
            stack = stacks.setdefault(fused.parts[0], _ExpertStack(first))
            read = partial(stack.matrix, fused.expert)
            whole[fused.name] = replace(first, names=[fused.name], shape=first.shape[1:], read=read)
    return whole


class _ExpertStack:
    """Reader of a stack [E, ..] of experts, one matrix at a time: the whole is read at the first, and let go of when
    each was asked for once."""

    def __init__(self, stack: FullWeight):
        self._stack = stack
        self._whole: dict[torch.dtype, list[Tensor]] = {}  # and once for each matrix that is left

    def matrix(self, number: int, dtype: torch.dtype) -> Tensor:
        """The matrix of this number."""
        if not self._whole.get(dtype):
            self._whole[dtype] = [self._stack.read(dtype)] * self._stack.shape[0]
        return self._whole[dtype].pop()[number]


def _join_parts(fused: FusedWeight, parts: list[FullWeight]) -> FullWeight:
    """Return the weight that joins `parts`. Every rank joins them, those too that do not keep the whole."""
    name = fused.name
    if len(parts) == 1 and not fused.is_transposed:
        return parts[0] if name in parts[0].names else replace(parts[0], names=[name])

    def read(dtype: torch.dtype) -> Tensor:
        return fused.join([part.read(dtype) for part in parts])

    shape = torch.Size(fused.shape([part.shape for part in parts]))
    is_collective, is_exact = any(part.collective for part in parts), any(part.exact for part in parts)
    dtype = reduce(torch.promote_types, [part.dtype for part in parts])
    return FullWeight([name], shape, dtype, read, is_collective, is_exact)


def _adapted_weight(layer: Adapted, name: str) -> FullWeight:
    def read(dtype: torch.dtype) -> Tensor:
        weight = (
            gather_full_tensor(layer.weight) if isinstance(layer, Router) else layer.dense_weight(gather_full_tensor)
        )
        if layer.wrapper is None:
            return weight.to(dtype)
        has_magnitude = isinstance(layer.wrapper, Adapter) and layer.wrapper.dora
        magnitude = gather_full_tensor(layer.get_parameter("lora_magnitude")) if has_magnitude else None
        a, b = gather_full_tensor(layer.get_parameter("lora_A")), gather_full_tensor(layer.get_parameter("lora_B"))
        return merge_adapter(weight, a, b, layer.wrapper.scale, magnitude, dtype)

    if not isinstance(layer, Router) and isinstance(layer.weight_storage, NF4Weight):
        is_sharded = isinstance(layer.get_parameter(CODES), DTensor)
        return FullWeight([name], layer.weight_storage.shape, layer.weight_storage.dtype, read, is_sharded)
    return FullWeight([name], layer.weight.shape, layer.weight.dtype, read, isinstance(layer.weight, DTensor))


def _gather_as(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    # Cast first: half the bytes travel in half precision.
    return gather_full_tensor(to_parameter_device(tensor).to(dtype))


def gather_full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor, [any shape].

    Collectives:
        One all-gather for each mesh dimension that shards the tensor.
    """
    tensor = to_parameter_device(tensor)
    if not isinstance(tensor, DTensor):
        return tensor
    # One after another, FSDP's first, which cut last: torch warns of several in one call.
    for dim, placement in enumerate(tensor.placements):
        if not isinstance(placement, Replicate):
            placements = list(tensor.placements)
            placements[dim] = Replicate()
            tensor = tensor.redistribute(placements=placements)
    return tensor.to_local()


@torch.no_grad()
def merge_adapter(
    weight: Tensor, a: Tensor, b: Tensor, scale: float, magnitude: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """W + s·B·A of W [.., out, in], A [.., r, in] and B [.., out, r], of DoRA each row m / ‖row‖ times that, m [out]:
    [.., out, in], computed in max(float32, theirs), in PEFT's order, and rounded once, to `dtype`. No collective."""
    wide = torch.promote_types(torch.promote_types(weight.dtype, a.dtype), torch.float32)
    merged = weight.to(wide) + (b.to(wide) @ a.to(wide)) * scale
    if magnitude is not None:
        norms = torch.linalg.norm(merged, dim=1).clamp_(min=torch.finfo(wide).tiny)  # a row of zeros stays one
        merged = (magnitude.to(wide) / norms)[:, None] * merged
    return merged.to(dtype)


@torch.no_grad()
def merge_in_place(model: CausalLM) -> bool:
    """Merge the adapters of `model`, whole on one device, into its weights [.., out, in], and take them out; a merged
    weight that was in 4 bits is a whole one from here on. Returns whether it had any. No collective."""
    layers = adapted_layers(model)
    for name, layer in layers.items():
        weight = _adapted_weight(layer, name)
        whole = weight.read(weight.dtype)
        if has_nf4_weight(layer):
            del layer.weight_storage  # that of its class is left
            for parameter in PARTS:
                del layer._parameters[parameter]
            layer.weight = nn.Parameter(whole, requires_grad=False)
        else:
            layer.weight.copy_(whole)
    remove_adapters(model)
    model.adapters = None
    return bool(layers)


def fold_scale(name: str, tensor: Tensor, rank: int, scale: float) -> Tensor:
    """A layer's A [r, in] or B [out, r], the parameter `name`, as in an adapter of scale 1 and a rank of r or more: the
    scale is in B, and zeros fill both up, to [rank, in] and [out, rank]. No collective."""
    if name.endswith(".lora_A"):
        return F.pad(tensor, (0, 0, 0, rank - tensor.shape[0]))
    return F.pad(tensor * scale, (0, rank - tensor.shape[1]))


def exact_names(model: nn.Module) -> set[str]:
    """Return the names of parameters and buffers that are stored, and written, in float32 or better."""
    names: set[str] = set()
    for module_name, module in full_precision_modules(model).items():
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        names.update(f"{module_name}.{name}" for name, _ in tensors)
    return names


def widen_exact(dtype: torch.dtype, exact: bool) -> torch.dtype:
    """`dtype`, or where a tensor is `exact` float32 at least."""
    return torch.promote_types(dtype, torch.float32) if exact else dtype


def stored_weight(files: WeightFiles, name: str, dtype: torch.dtype | None = None) -> FullWeight:
    """The tensor `name` of `files`, to be written in `dtype` or its own."""
    stored = files.stored[name]
    if (own := COPIED_DTYPES.get(stored.kind)) is None:
        raise UserError(f"{files.directory}: {name} is {stored.kind}, which dtrain does not copy")
    return FullWeight([name], torch.Size(stored.shape), dtype or own, lambda _: files.read(name))


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
        quantized.convert_to_4_bits(model, files.directory, own, nf4=in_4_bits, except_for=whole)
        self._coded = {
            f"{name}.weight": (layer, layer.weight_storage)
            for name, layer in model.named_modules()
            if nf4.has_nf4_weight(layer)
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
            quantized.fill_codes(self.files, source, *parts.values())
            return held.dense_weight(parts.__getitem__)
        stored = source.read(self.files)
        return stored if self.dtype is None else stored.to(widen_exact(self.dtype, name in self._exact))


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
    def from_run(cls, run: Path) -> "RunFacts":
        """Return the facts of the directory `run`, none without a config.yaml. UserError for a damaged one."""
        file = run / "config.yaml"
        if not file.is_file():
            return cls(file)
        text = read_text(file)
        try:
            check_json_size(yaml.load(text, Loader=yaml.BaseLoader), _MOST_RECIPE_ENTRIES)
            recipe = OmegaConf.create(text)
            keys = "model.path", "model.init", "train.dtype", "lora", "train.train_only", "train.freeze"
            path, init, dtype, lora, *chosen = (  # of an environment that is gone, perhaps
                OmegaConf.select(recipe, key, throw_on_resolution_failure=False) for key in keys
            )
        except (OmegaConfBaseException, yaml.YAMLError, ValueError, RecursionError) as error:
            raise UserError(f"{file}: {str(error) or 'it is nested too deep'}") from error
        model_path = None
        if path and isinstance(path, str):  # a directory, or the id that it has, or had, in the cache
            name = path if hub.is_model_id(path) else hub.cached_model_id(Path(path))
            model_path = Path(path)
            if name is not None and not (model_path / CONFIG).is_file():
                model_path = hub.cached_model_directory(name) or model_path
        is_nf4 = isinstance(lora, DictConfig) and lora.get("quantize") == "nf4"
        return cls(
            file, model_path, init == "scratch", lora is not None or any(chosen), is_nf4, DTYPES_BY_NAME.get(dtype)
        )

    def base_directory(self, state: dict[str, Any]) -> Path:
        """The directory of the run's base, which holds what `state`, of a step, says that it read. Raises UserError."""
        if self.path is None or not has_weights(self.path):
            fetch = ""
            if self.path is not None and (name := hub.cached_model_id(self.path)):
                fetch = f", or run `dtrain download {name}`"
            if self.path is not None and not self.path.is_absolute():
                fetch += ", or go to the directory that the run was started in, for this path is relative"
            raise UserError(
                f"{self.file}: the run's steps hold what it trained alone, and there are no weights at model.path="
                f"{self.path}, which has the others: put that model there again{fetch}"
            )
        wanted = state.get("identities", {}).get("model.weights")
        if (
            wanted is not None
            and digest(file_digests(weight_files(self.path), ranks=Ranks(single_process=True))) != wanted
        ):
            raise UserError(
                f"{self.file}: merging onto a base that differs: the weights at model.path={self.path} are not those "
                "that this run trained on: put these there again"
            )
        return self.path

    def training_dtype(self, state: dict[str, Any]) -> torch.dtype | None:
        return DTYPES_BY_NAME.get(state.get("dtype", "")) or self.dtype


def training_precision_of_base(adapter: Path) -> tuple[bool, torch.dtype | None]:
    """Return what the adapter in the directory `adapter`, the export of a run around it, was trained beside: whether in
    4 bits, and in which dtype the run computed. (False, None) of one that lies elsewhere: its base as it is."""
    run = adapter.absolute().parent
    if adapter.absolute().name != "export" or not (run / "config.yaml").is_file():
        return False, None
    facts, store = RunFacts.from_run(run), CheckpointStore(run / "checkpoints", Ranks(single_process=True))
    step = store.latest()
    return facts.nf4, facts.training_dtype({} if step is None else store.read_state(step))


def step_of_adapter(adapter: Path) -> Path | None:
    """The step of a run that has the directory `adapter` as its adapter; None where it lies elsewhere."""
    step = adapter.absolute().parent
    has_run = (step.parent.parent / "config.yaml").is_file()
    return step if adapter.absolute().name == ADAPTER and (step / MANIFEST).is_file() and has_run else None
