"""Full weights of a model with its adapters merged, one tensor at a time, and the base weights of an adapter.

`full_weights` describes the weights of a model in memory as `FullWeight`s. A `FullWeight` knows its name, shape and
dtype at once, and gathers or computes its values only when `read` is called. So a model of any size can be written or
sent with the memory of one tensor. Only `merge_in_place` changes the model.

`BaseWeights` reads weights that a run has frozen, in one process, from the files at its model.path, because a run's
steps do not contain them. They are read as they were in training: in the dtype of computation or in 4 bits. `RunFacts`
finds these files by the run's config.yaml, and compares their content with what the run has read.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

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
from dtrain.checkpoint.huggingface.converted import is_library_model
from dtrain.checkpoint.huggingface.file_rows import FusedWeight, fused_weights
from dtrain.checkpoint.huggingface.read import check_fit
from dtrain.checkpoint.huggingface.safetensor_files import COPIED_DTYPES, DTYPES_BY_NAME, WeightFiles, weight_files
from dtrain.checkpoint.peft.config import ADAPTER
from dtrain.models.common.config import ModelConfig
from dtrain.models.common.decoder import CausalLM
from dtrain.models.common.moe import Router
from dtrain.parallel.placement import to_parameter_device
from dtrain.parallel.tensor import full_precision_modules

if TYPE_CHECKING:
    from dtrain.models.transformers.conversion import Conversion
    from dtrain.models.transformers.model import TransformersCausalLM

_MAX_RECIPE_ENTRIES = 100_000  # entries of a config.yaml, counting those that YAML's aliases repeat


@dataclass(frozen=True)
class FullWeight:
    """A weight that is read only when it is needed.

    Attributes:
        names: All names of it in the model, or its one name in a file.
        shape: Its shape.
        dtype: Dtype in which it is written: the base's own, or that of the file.
        read: `read(dtype)` returns the full tensor on any device: a new tensor or the model's own.
        collective: Whether `read` communicates, so that every rank must call it. Otherwise only the rank that writes
            the file calls it.
        exact: Whether it is written in float32 or better.
    """

    names: list[str]
    shape: torch.Size
    dtype: torch.dtype
    read: Callable[[torch.dtype], Tensor]
    collective: bool = False
    exact: bool = False

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.shape.numel() * self.dtype.itemsize

    def in_file(self, name: str, dtype: torch.dtype | None) -> "FullWeight":
        """Return the weight with its name and dtype in a file.

        Args:
            name: Name of the tensor in the file.
            dtype: Dtype in the file. None keeps the weight's dtype. Integers always keep their dtype.
        """
        if dtype is None or not self.dtype.is_floating_point:
            return replace(self, names=[name])
        return replace(self, names=[name], dtype=widen_exact(dtype, self.exact))


def full_weights(model: nn.Module) -> dict[str, FullWeight]:
    """Return the weights of a model with its adapters merged, by their names in files, in the model's order.

    Tied weights appear once. FSDP modules are resharded.

    Args:
        model: The model, plain or sharded.

    Collectives:
        None here. `read` of a sharded weight has one all-gather, and one for each sharded tensor of its adapter.
    """
    layers = {name: submodule for name, submodule in model.named_modules() if isinstance(submodule, Adapted)}
    tensors, exact = model_tensors(model), exact_names(model)
    weights: dict[str, FullWeight] = {}
    for name, names in tensor_aliases(model).items():
        module, _, parameter = name.rpartition(".")
        layer = layers.get(module)
        if is_adapter(name) or (layer is not None and parameter == SCALES):
            continue  # part of the weight
        is_quantized = layer is not None and parameter == CODES
        has_adapter = layer is not None and parameter == "weight" and layer.wrapper is not None
        if layer is not None and (is_quantized or has_adapter):
            weight_name = f"{module}.weight"
            weights[weight_name] = _adapted_weight(layer, weight_name)
        else:
            tensor = tensors[name]
            weights[name] = FullWeight(
                names,
                tensor.shape,
                tensor.dtype,
                read=partial(_gather_as, tensor),
                collective=isinstance(tensor, DTensor),
                exact=name in exact,
            )
    return weights_in_files(model, weights)


def weights_in_files(model: nn.Module | ModelConfig, weights: Mapping[str, FullWeight]) -> dict[str, FullWeight]:
    """Convert the weights of a model to the tensors of its files, in which matrices may be joined or experts separate.

    The module `file_rows` describes the differences between the two.

    Args:
        model: The model, or its ModelConfig if the weights are those of an adapter.
        weights: Weights by the model's names.

    Returns:
        Weights by the files' names.
    """
    if is_library_model(model):
        return _converted_weights(model, weights)
    stacks: dict[str, _ExpertStack] = {}
    in_files: dict[str, FullWeight] = {}
    for fused in fused_weights(model, weights):
        first = weights[fused.parts[0]]
        if fused.expert is None:
            in_files[fused.name] = _join_parts(fused, [weights[part] for part in fused.parts])
        else:
            stack = stacks.setdefault(fused.parts[0], _ExpertStack(first))
            read = partial(stack.matrix, fused.expert)
            in_files[fused.name] = replace(first, names=[fused.name], shape=first.shape[1:], read=read)
    return in_files


class _ExpertStack:
    """Reads the matrices of a stack [E, ..] of experts one by one.

    The stack is read (and gathered) once for all of its matrices, and freed when each of them has been read once.
    """

    def __init__(self, stack: FullWeight):
        self._stack = stack
        self._tensors: dict[torch.dtype, Tensor] = {}
        self._num_unread: dict[torch.dtype, int] = {}

    def matrix(self, number: int, dtype: torch.dtype) -> Tensor:
        """Return the matrix of an expert."""
        if dtype not in self._tensors:
            self._tensors[dtype] = self._stack.read(dtype)
            self._num_unread[dtype] = self._stack.shape[0]
        matrix = self._tensors[dtype][number]
        self._num_unread[dtype] -= 1
        if self._num_unread[dtype] == 0:
            del self._tensors[dtype]
        return matrix


def _converted_weights(model: "TransformersCausalLM", weights: Mapping[str, FullWeight]) -> dict[str, FullWeight]:
    """Return the tensors that transformers' `save_pretrained` writes, by their names in files."""
    from dtrain.models.transformers.conversion import plan_saving  # loads transformers

    by_library_name = {model.library_name(name): weight for name, weight in weights.items()}
    shapes = {name: tuple(weight.shape) for name, weight in by_library_name.items()}
    in_files: dict[str, FullWeight] = {}
    for conversion in plan_saving(model.library_model, shapes):
        sources = {name: by_library_name[name] for name in conversion.source_names}
        first, *others = sources.values()
        if conversion.converter is None:
            (file_name,) = conversion.targets
            in_files[file_name] = replace(first, names=[file_name])
            continue
        results = _Converted(conversion, sources)
        for file_name, shape in conversion.targets.items():
            in_files[file_name] = FullWeight(
                [file_name],
                shape=torch.Size(shape),
                dtype=reduce(torch.promote_types, [other.dtype for other in others], first.dtype),
                read=partial(results.read, file_name),
                collective=any(source.collective for source in sources.values()),
                exact=any(source.exact for source in sources.values()),
            )
    return in_files


class _Converted:
    """Reads the results of a conversion of transformers one by one.

    The conversion is computed (and its sources are gathered) once for all of its results. They are freed when each of
    them has been read once.
    """

    def __init__(self, conversion: "Conversion", sources: Mapping[str, FullWeight]):
        self._conversion, self._sources = conversion, sources
        self._results: dict[torch.dtype, dict[str, Tensor]] = {}

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return a result."""
        if name not in self._results.get(dtype, {}):
            tensors = {source: weight.read(dtype) for source, weight in self._sources.items()}
            self._results[dtype] = self._conversion.convert(tensors)
        return self._results[dtype].pop(name)


def _join_parts(fused: FusedWeight, parts: list[FullWeight]) -> FullWeight:
    """Return the weight of a file that joins parts. Every rank reads all parts, since their `read` may communicate."""
    name = fused.name
    if len(parts) == 1 and not fused.is_transposed:
        return parts[0] if name in parts[0].names else replace(parts[0], names=[name])

    def read(dtype: torch.dtype) -> Tensor:
        return fused.join([part.read(dtype) for part in parts])

    return FullWeight(
        [name],
        shape=torch.Size(fused.shape([part.shape for part in parts])),
        dtype=reduce(torch.promote_types, [part.dtype for part in parts]),
        read=read,
        collective=any(part.collective for part in parts),
        exact=any(part.exact for part in parts),
    )


def _adapted_weight(layer: Adapted, name: str) -> FullWeight:
    """Return the weight of a layer that has an adapter or is stored in 4 bits."""

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
    """Return the full tensor of a DTensor as a plain tensor. Plain tensors are returned as they are.

    Args:
        tensor: Tensor of any shape.

    Collectives:
        One all-gather for each mesh dimension that shards the tensor.
    """
    tensor = to_parameter_device(tensor)
    if not isinstance(tensor, DTensor):
        return tensor
    # Gather one mesh dimension at a time, in the order of the mesh (FSDP before TP): torch warns if one call changes
    # several placements.
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
    """Compute W + s·B·A, as PEFT does, and round the result once.

    With DoRA, each row of W + s·B·A is scaled to the norm m.

    Args:
        weight: W, [.., out, in]; [out, in] with DoRA.
        a: A, [.., r, in].
        b: B, [.., out, r].
        scale: s.
        magnitude: m of DoRA, [out]. None without DoRA.
        dtype: Dtype of the result. The computation is in max(float32, the dtypes of `weight` and `a`).

    Returns:
        [.., out, in].

    Reference:
        LoRA, arXiv:2106.09685, section 4.1. DoRA, arXiv:2402.09353, equation 5.
    """
    wide = torch.promote_types(torch.promote_types(weight.dtype, a.dtype), torch.float32)
    merged = weight.to(wide) + (b.to(wide) @ a.to(wide)) * scale
    if magnitude is not None:
        # The smallest number keeps a row of zeros from becoming NaN.
        norms = torch.linalg.norm(merged, dim=1).clamp_(min=torch.finfo(wide).tiny)
        merged = (magnitude.to(wide) / norms)[:, None] * merged
    return merged.to(dtype)


@torch.no_grad()
def merge_in_place(model: CausalLM) -> bool:
    """Merge the adapters of a model into its weights, and remove them. No collective.

    Weights in 4 bits become floating-point weights.

    Args:
        model: The model, unsharded on one device.

    Returns:
        Whether it had adapters.
    """
    layers = adapted_layers(model)
    for name, layer in layers.items():
        weight = _adapted_weight(layer, name)
        merged = weight.read(weight.dtype)
        if has_nf4_weight(layer):
            # Without the instance's attribute, the layer uses the class attribute: storage of floating-point weights.
            del layer.weight_storage
            for parameter in PARTS:
                del layer._parameters[parameter]
            layer.weight = nn.Parameter(merged, requires_grad=False)
        else:
            layer.weight.copy_(merged)
    remove_adapters(model)
    model.adapters = None
    return bool(layers)


def fold_scale(name: str, tensor: Tensor, rank: int, scale: float) -> Tensor:
    """Return a layer's A or B for an equal adapter of scale 1 and a larger rank.

    The scale is multiplied into B, and both are filled up with zeros.

    Args:
        name: Name of the parameter, which ends with lora_A or lora_B.
        tensor: A [r, in] or B [out, r].
        rank: The new rank, at least r.
        scale: The layer's scale.

    Returns:
        A [rank, in] or B [out, rank].

    Example:
        >>> fold_scale("q_proj.lora_B", torch.tensor([[1.0], [2.0]]), rank=2, scale=3.0)
        tensor([[3., 0.],
                [6., 0.]])
    """
    if name.endswith(".lora_A"):
        return F.pad(tensor, (0, 0, 0, rank - tensor.shape[0]))
    return F.pad(tensor * scale, (0, rank - tensor.shape[1]))


def exact_names(model: nn.Module) -> set[str]:
    """Return the names of parameters and buffers that are stored and written in float32 or better."""
    names: set[str] = set()
    for module_name, module in full_precision_modules(model).items():
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        names.update(f"{module_name}.{name}" for name, _ in tensors)
    return names


def widen_exact(dtype: torch.dtype, exact: bool) -> torch.dtype:
    """Return `dtype`, or at least float32 for a tensor that needs full precision.

    Example:
        >>> widen_exact(torch.bfloat16, exact=True)
        torch.float32
    """
    return torch.promote_types(dtype, torch.float32) if exact else dtype


def stored_weight(files: WeightFiles, name: str, dtype: torch.dtype | None = None) -> FullWeight:
    """Return a tensor of existing files as a weight to write.

    Args:
        files: The files.
        name: Name of the tensor.
        dtype: Dtype in which it is written. None keeps its dtype in the files.

    Raises:
        UserError: If dtrain does not copy tensors of this dtype.
    """
    stored = files.stored[name]
    stored_dtype = COPIED_DTYPES.get(stored.kind)
    if stored_dtype is None:
        raise UserError(f"{files.directory}: {name} is {stored.kind}, which dtrain does not copy")
    return FullWeight([name], torch.Size(stored.shape), dtype or stored_dtype, lambda _: files.read(name))


class BaseWeights:
    """Weights of a model in files, as they were in a run's training. Used in one process.

    Args:
        model: The model on meta, without adapters.
        files: The files.
        dtype: Dtype in which the run stored them. None: that of the files.
        in_4_bits: Whether the run rounded linear layers to 4 bits. It has no effect if the files are in 4 bits already.
        unquantized: Names of layers that were not rounded to 4 bits, because they were trained in full.

    Attributes:
        files: The files.
        dtype: As the argument.

    Raises:
        UserError: If the files do not fit the model.
    """

    def __init__(
        self,
        model: CausalLM,
        files: WeightFiles,
        dtype: torch.dtype | None = None,
        *,
        in_4_bits: bool = False,
        unquantized: tuple[str, ...] = (),
    ):
        self.files, self.dtype = files, dtype
        self._exact = exact_names(model)
        compute_dtype = dtype or getattr(torch, model.config.dtype or "float32")
        quantized.convert_to_4_bits(model, files.directory, compute_dtype, nf4=in_4_bits, except_for=unquantized)
        self._quantized_layers = {
            f"{name}.weight": layer for name, layer in model.named_modules() if nf4.has_nf4_weight(layer)
        }
        self._sources = {quantized.file_name(name): source for name, source in check_fit(model, files).items()}

    def __contains__(self, name: str) -> bool:
        """Check whether the files have a weight. Those of a language model have no head of rewards or classes."""
        return name in self._sources

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype of a weight in the files. For a weight in 4 bits, return the dtype of computation."""
        stored_dtype = self.files.stored[self._sources[name].name].dtype
        return stored_dtype or self._quantized_layers[name].weight_storage.dtype

    def read(self, name: str) -> Tensor:
        """Read the full weight as it was in training, in a dtype that can represent it."""
        source = self._sources[name]
        layer = self._quantized_layers.get(name)
        if layer is not None:
            parts = {part: torch.empty_like(layer.get_parameter(part), device="cpu") for part in nf4.PARTS}
            quantized.fill_codes(self.files, source, parts[CODES], parts[SCALES])
            return layer.weight_storage.dense_weight(parts.__getitem__)
        stored = source.read(self.files)
        if self.dtype is None:
            return stored
        return stored.to(widen_exact(self.dtype, name in self._exact))


@dataclass(frozen=True)
class RunFacts:
    """Facts about a run's model from its config.yaml.

    Attributes:
        file: The config.yaml, which may be missing.
        path: `model.path`; for an id on the hub, the directory in the cache. None if the recipe does not set it.
        scratch: Whether the run began with random weights.
        freezes: Whether some weights are not trained.
        nf4: Whether frozen linear layers are rounded to 4 bits.
        dtype: Dtype of computation, if the recipe sets one.
        implementation: Whose modules computed the model, as in `read_config`.
    """

    file: Path
    path: Path | None = None
    scratch: bool = False
    freezes: bool = False
    nf4: bool = False
    dtype: torch.dtype | None = None
    implementation: str = "auto"

    @classmethod
    def from_run(cls, run: Path) -> "RunFacts":
        """Read the facts of the run in a directory; the defaults without a config.yaml. Raises UserError if damaged."""
        file = run / "config.yaml"
        if not file.is_file():
            return cls(file)
        text = read_text(file)
        try:
            check_json_size(yaml.load(text, Loader=yaml.BaseLoader), _MAX_RECIPE_ENTRIES)
            recipe = OmegaConf.create(text)
            keys = ["model.path", "model.init", "model.implementation", "train.dtype", "lora"]
            keys += ["train.train_only", "train.freeze"]
            # A value may refer to an environment variable that is not set now. Then it is None.
            values = {key: OmegaConf.select(recipe, key, throw_on_resolution_failure=False) for key in keys}
        except (OmegaConfBaseException, yaml.YAMLError, ValueError, RecursionError) as error:
            raise UserError(f"{file}: {str(error) or 'it is nested too deep'}") from error
        path, lora = values["model.path"], values["lora"]
        model_path = None
        if path and isinstance(path, str):
            model_path = Path(path)
            # An id on the hub, or the directory that the cache has, or had, for it.
            hub_id = path if hub.is_model_id(path) else hub.cached_model_id(model_path)
            if hub_id is not None and not (model_path / CONFIG).is_file():
                model_path = hub.cached_model_directory(hub_id) or model_path
        return cls(
            file,
            path=model_path,
            scratch=values["model.init"] == "scratch",
            freezes=lora is not None or bool(values["train.train_only"]) or bool(values["train.freeze"]),
            nf4=isinstance(lora, DictConfig) and lora.get("quantize") == "nf4",
            dtype=DTYPES_BY_NAME.get(values["train.dtype"]),
            implementation=values["model.implementation"] or "auto",
        )

    def base_directory(self, state: dict[str, Any]) -> Path:
        """Return the directory of the run's base model.

        Args:
            state: State of a step, which identifies the weights that the run has read.

        Raises:
            UserError: If no weights or other weights are there.
        """
        if self.path is None or not has_weights(self.path):
            hint = ""
            hub_id = hub.cached_model_id(self.path) if self.path is not None else None
            if hub_id:
                hint = f", or run `dtrain download {hub_id}`"
            if self.path is not None and not self.path.is_absolute():
                hint += ", or change to the directory in which the run was started, because this path is relative"
            raise UserError(
                f"{self.file}: the run's steps contain only the trained weights, and there are no weights at "
                f"model.path={self.path}, which has the others: put that model there again{hint}"
            )
        expected = state.get("identities", {}).get("model.weights")
        if (
            expected is not None
            and digest(file_digests(weight_files(self.path), ranks=Ranks(single_process=True))) != expected
        ):
            raise UserError(
                f"{self.file}: merging onto a base that differs: the weights at model.path={self.path} are not those "
                "that this run trained on: put these there again"
            )
        return self.path

    def training_dtype(self, state: dict[str, Any]) -> torch.dtype | None:
        """Return the dtype of computation at a step with this state; None if it is unknown."""
        return DTYPES_BY_NAME.get(state.get("dtype", "")) or self.dtype


class BasePrecision(NamedTuple):
    """Precision of an adapter's base in training.

    Attributes:
        in_4_bits: Whether linear layers were rounded to 4 bits.
        dtype: Dtype of the other weights. None: that of the files.
    """

    in_4_bits: bool
    dtype: torch.dtype | None


def training_precision_of_base(adapter: Path) -> BasePrecision:
    """Return the precision of an adapter's base in training.

    This is known if the adapter's directory is `export/` of a run. Otherwise the base is used as its files are.
    """
    run = adapter.absolute().parent
    if adapter.absolute().name != "export" or not (run / "config.yaml").is_file():
        return BasePrecision(False, None)
    facts, store = RunFacts.from_run(run), CheckpointStore(run / "checkpoints", Ranks(single_process=True))
    step = store.latest()
    state = {} if step is None else store.read_state(step)
    return BasePrecision(facts.nf4, facts.training_dtype(state))


def step_of_adapter(adapter: Path) -> Path | None:
    """Return the directory of the step to which an adapter's directory belongs; None if it is not in a step."""
    step = adapter.absolute().parent
    has_run = (step.parent.parent / "config.yaml").is_file()
    is_in_step = adapter.absolute().name == ADAPTER and (step / MANIFEST).is_file()
    return step if is_in_step and has_run else None
