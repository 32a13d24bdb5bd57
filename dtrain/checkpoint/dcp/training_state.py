"""The state of training as named tensors and JSON: model, optimizer and random number generators.

A run that trains one layer with AdamW has these tensors:

    model.model.layers.0.mlp.up_proj.weight               the weight
    optim.model.layers.0.mlp.up_proj.weight.exp_avg       a tensor of the optimizer's state
    optim.model.layers.0.mlp.up_proj.weight.exp_avg_sq
    optim.model.layers.0.mlp.up_proj.weight.step

and this JSON (`optimizer_state`):

    {"groups": [{"params": ["model.layers.0.mlp.up_proj.weight"], "values": {"lr": 1e-5, "betas": [0.9, 0.999], ...}}],
     "state": {"model.layers.0.mlp.up_proj.weight": {"tensors": ["step", "exp_avg", "exp_avg_sq"], "values": {}}}}

Names are those of the model's state dict, so a checkpoint does not depend on the order of the parameters.

Resuming takes two steps, because DCP fills tensors in place, and a new optimizer has none yet:

    optimizer_state = store.read_state(step)["optimizer"]
    restore_optimizer(model, optimizer, optimizer_state)       # allocates the state's tensors, sets options and scalars
    store.load(step, training_tensors(model, optimizer))       # fills model and optimizer in place

Random number generators are Python's, torch's on the CPU, and torch's on this rank's CUDA device, as JSON. dtrain's own
random numbers depend on the seed and the logical position, so these generators matter only to other code, such as a
reward function or a user's method. On the saved number of ranks each rank continues exactly. A rank that gets a copy of
another rank's state (`CheckpointStore.read_rank_state`) is seeded from that state and the number of the copy, so its
numbers are reproducible, and differ from those of the other rank.
"""

import base64
import binascii
import random
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dtrain.base.errors import UserError
from dtrain.base.randomness import digest
from dtrain.checkpoint.dcp.shards import TensorShard
from dtrain.optim.local_shard import ShardOptimizer, allocate_state
from dtrain.parallel.placement import local_tensor

SCORE_WEIGHT = "model.score.weight"  # only models that score texts have it
_SCALAR = (bool, int, float, str, type(None))


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and persistent buffers of a model by name. No collective.

    Tied tensors appear once, under their first name. FSDP modules with gathered weights are resharded.

    Returns:
        The model's own tensors of any shape, DTensors under FSDP.
    """
    tensors = model.state_dict(keep_vars=True)
    return {name: tensors[name] for name in tensor_aliases(model)}


def tensor_aliases(model: nn.Module) -> dict[str, list[str]]:
    """Return all names of each tensor, by its first name, which is its name in `model_tensors`.

    Example:
        >>> model = nn.ModuleDict({"embed": nn.Embedding(4, 2), "head": nn.Linear(2, 4, bias=False)})
        >>> model["head"].weight = model["embed"].weight
        >>> tensor_aliases(model)
        {'embed.weight': ['embed.weight', 'head.weight']}
    """
    names: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
    return {tensor_names[0]: tensor_names for tensor_names in names.values()}


def frozen_names(model: nn.Module) -> set[str]:
    """Return the names in `model_tensors` of parameters that are not trained."""
    frozen = set()
    for name, tensor in model_tensors(model).items():
        if isinstance(tensor, nn.Parameter) and not tensor.requires_grad:
            frozen.add(name)
    return frozen


def training_tensors(model: nn.Module, optimizer: Optimizer | None = None, *, frozen: bool = True) -> dict[str, Tensor]:
    """Return the tensors of a model and of its optimizer's state under a checkpoint's names. No collective.

    They share storage with the originals, so they can be saved and loaded into.

    Args:
        model: The model.
        optimizer: Its optimizer, which may have no state yet. None: only the model.
        frozen: Whether parameters that are not trained are included.

    Raises:
        UserError: If it is unknown which part of the full tensor a tensor of the optimizer is.
    """
    excluded = set() if frozen else frozen_names(model)
    tensors = {f"model.{name}": tensor for name, tensor in model_tensors(model).items() if name not in excluded}
    if optimizer is None:
        return tensors
    names = _parameter_names(model)
    for parameter, entries in optimizer.state.items():
        name = _name(names, parameter)
        for key, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"optim.{name}.{key}"] = _sharded_state(value, parameter, name, key, optimizer)
    return tensors


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return the part of an optimizer that a checkpoint stores as JSON: groups, options and scalars. No collective.

    Options that are not numbers, strings or sequences of these are left out. On a resume, the new optimizer's options
    are used for them.

    Args:
        model: The model.
        optimizer: Its optimizer.

    Returns:
        {"groups": [{"params": [names], "values": {option: value}}],
         "state": {name: {"tensors": [keys], "values": {key: value}}}}

    Raises:
        UserError: If the state of a parameter has other objects than tensors and such values. The resumed run would
            lack them.
    """
    names = _parameter_names(model)
    groups = []
    for group in optimizer.param_groups:
        options = {}
        for key, value in group.items():
            if key != "params" and _is_json(value):
                options[key] = _as_json(value)
        groups.append({"params": [_name(names, parameter) for parameter in group["params"]], "values": options})
    state = {}
    for parameter, entries in optimizer.state.items():
        name = _name(names, parameter)
        tensor_keys, scalars = [], {}
        for key, value in entries.items():
            if isinstance(value, Tensor):
                tensor_keys.append(key)
                continue
            if not _is_json(value):
                raise UserError(
                    f"optimizer {type(optimizer).__name__} keeps {type(value).__name__} {key!r} for {name}: "
                    "dtrain saves tensors and numbers; choose another optimizer.name, or checkpoint.every=null"
                )
            scalars[key] = _as_json(value)
        state[name] = {"tensors": tensor_keys, "values": scalars}
    return {"groups": groups, "state": state}


class SavedGroup(NamedTuple):
    """A parameter group of a checkpoint's optimizer.

    Attributes:
        params: Names of the parameters.
        options: Options such as `lr`.
    """

    params: list[str]
    options: dict[str, Any]


class SavedState(NamedTuple):
    """State of one parameter in a checkpoint's optimizer.

    Attributes:
        tensor_keys: Keys of the tensors, which DCP has.
        scalars: The other values by key.
    """

    tensor_keys: list[str]
    scalars: dict[str, Any]


class SavedOptimizer(NamedTuple):
    """An optimizer as `optimizer_state` describes it.

    Attributes:
        groups: The parameter groups.
        state: The state by name of the parameter.
    """

    groups: list[SavedGroup]
    state: dict[str, SavedState]


def find_first_mismatch(
    model: nn.Module, saved: Mapping[str, Any], sizes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
) -> str | None:
    """Compare the trained parameters of a model with the trained parameters of a checkpoint.

    Args:
        model: The model that would be resumed, which may be on meta.
        saved: What `optimizer_state` returned when the checkpoint was saved.
        sizes: Shape and dtype of the checkpoint's tensors, by name.

    Returns:
        A description of the first difference, or None.
    """
    saved_names: set[str] = set()
    for group in _read_saved_optimizer(saved).groups:
        saved_names.update(group.params)
    trained = {}
    for name, tensor in model_tensors(model).items():
        if isinstance(tensor, nn.Parameter) and tensor.requires_grad:
            trained[name] = tuple(tensor.shape)
    for name, shape in trained.items():
        if name not in saved_names:
            return f"{name} is trained, and the checkpoint has not trained it"
        saved_shape = tuple(sizes[f"model.{name}"][0]) if f"model.{name}" in sizes else None
        if saved_shape is not None and saved_shape != shape:
            return f"{name} is {list(shape)}, and {list(saved_shape)} in the checkpoint"
    only_saved = sorted(saved_names - trained.keys())
    if only_saved:
        return f"the checkpoint has trained {only_saved[0]}, and this recipe does not"
    return None


def _read_saved_optimizer(saved: Mapping[str, Any]) -> SavedOptimizer:
    """Read what `optimizer_state` returned. Raises UserError."""
    try:
        groups = [SavedGroup(group["params"], group["values"]) for group in saved["groups"]]
        state = {name: SavedState(entries["tensors"], entries["values"]) for name, entries in saved["state"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError("the checkpoint's optimizer state is damaged, or not written by dtrain") from error
    return SavedOptimizer(groups, state)


def restore_optimizer(
    model: nn.Module, optimizer: Optimizer, saved: Mapping[str, Any], *, keep_options: Collection[str] = ()
) -> None:
    """Prepare a new optimizer for `CheckpointStore.load`.

    Its state is allocated, and its options and scalars are set to the saved ones. Parameters keep their values.

    Args:
        model: The model.
        optimizer: The new optimizer.
        saved: What `optimizer_state` returned when the checkpoint was saved.
        keep_options: Options that keep the recipe's value (`lr`, ...), because the user allows this change.

    Raises:
        UserError: If the groups, or the keys of the state, differ from the saved ones.

    Collectives:
        Those of the optimizer's step, if it has some.
    """
    names = _parameter_names(model)
    groups, saved_state = _read_saved_optimizer(saved)
    _check_groups(optimizer, names, groups)
    # Allocate the state of all parameters, then remove the state of those that had none when the checkpoint was saved.
    allocate_state(optimizer)
    not_restored = set(saved_state)
    for parameter, entries in list(optimizer.state.items()):
        name = _name(names, parameter)
        if name not in saved_state:  # it had no gradient yet when the checkpoint was saved
            del optimizer.state[parameter]
            continue
        not_restored.discard(name)
        tensor_keys, scalars = saved_state[name]
        allocated = sorted(key for key, value in entries.items() if isinstance(value, Tensor))
        if allocated != sorted(tensor_keys):
            raise UserError(
                f"the checkpoint's optimizer keeps {sorted(tensor_keys)} for {name}, optimizer "
                f"{type(optimizer).__name__} as the recipe has it keeps {allocated}: set optimizer.name back, or begin "
                "another run with these weights (checkpoint.init_from, run.name)"
            )
        entries.update(scalars)
    if not_restored:
        raise UserError(
            f"the checkpoint has optimizer state for {sorted(not_restored)[:5]}, which the run does not train"
        )
    for group, saved_group in zip(optimizer.param_groups, groups, strict=True):
        values = saved_group.options
        for key in values.keys() - set(keep_options):
            group[key] = _like(group.get(key), values[key])


def _parameter_names(model: nn.Module) -> dict[int, str]:
    """Return the name of each tensor of a model by its id."""
    return {id(tensor): name for name, tensor in model_tensors(model).items()}


def _name(names: dict[int, str], parameter: Tensor) -> str:
    if id(parameter) not in names:
        raise ValueError(f"the optimizer has a parameter {tuple(parameter.shape)} that the model does not have")
    return names[id(parameter)]


def _sharded_state(value: Tensor, parameter: Tensor, name: str, key: str, optimizer: Optimizer) -> Tensor:
    """Return a tensor of the optimizer's state as a DTensor, `TensorShard` or full tensor.

    These three forms determine which part of the full tensor a rank has. The state of torch's optimizers for a DTensor
    consists of DTensors, and needs no change. dtrain's own optimizers, and imported ones, may have plain tensors for
    the local shard of a parameter.

    Args:
        value: The tensor of the state.
        parameter: The parameter that it belongs to.
        name: Name of the parameter.
        key: Key of the tensor in the parameter's state, such as "exp_avg".
        optimizer: The optimizer.

    Raises:
        UserError: If it is unknown which part of the full tensor `value` is.
    """
    if isinstance(value, DTensor):
        if any(placement.is_partial() for placement in value.placements):
            raise UserError(
                f"optimizer {type(optimizer).__name__}: {key!r} of {name} is placed as {value.placements}, which no "
                "checkpoint can hold; choose another optimizer.name"
            )
        return value
    if not isinstance(parameter, DTensor) or value.dim() == 0:
        return value
    if isinstance(optimizer, ShardOptimizer):
        location = optimizer.state_location(parameter, key)
        if location is not None:
            return TensorShard.from_offsets(value, location.global_size, location.offsets)
    if value.shape == local_tensor(parameter).shape:
        shard = TensorShard.from_tensor(parameter)
        return TensorShard.from_offsets(value, shard.global_size, shard.offsets)
    raise UserError(
        f"optimizer {type(optimizer).__name__} keeps {key!r} of shape {tuple(value.shape)} for {name}, of which this "
        f"rank has {tuple(local_tensor(parameter).shape)} of {tuple(parameter.shape)}: dtrain cannot tell which part "
        "of the full tensor it is; run on one process, or choose another optimizer.name"
    )


def _check_groups(optimizer: Optimizer, names: dict[int, str], saved: list[SavedGroup]) -> None:
    """Raise UserError if the optimizer's parameter groups differ from the saved ones."""
    built_groups = [{_name(names, parameter) for parameter in group["params"]} for group in optimizer.param_groups]
    saved_groups = [set(group.params) for group in saved]
    all_built: set[str] = set().union(*built_groups)
    all_saved: set[str] = set().union(*saved_groups)
    only_saved, only_built = sorted(all_saved - all_built), sorted(all_built - all_saved)
    if only_saved and only_built:
        raise UserError(
            f"the checkpoint has trained {only_saved[0]} and not {only_built[0]}, this recipe trains the second and "
            "not the first: resume with the model, the recipe and the release of dtrain that wrote it, or begin a new "
            "run"
        )
    if built_groups != saved_groups:
        moved: set[str] = set()
        for built, other in zip(built_groups, saved_groups, strict=False):
            moved |= built ^ other
        raise UserError(
            f"the checkpoint's optimizer has {len(saved_groups)} parameter groups, the recipe's {len(built_groups)}; "
            f"they differ in {sorted(moved)[:5]} (optimizer, model)"
        )


def _is_json(value: Any) -> bool:
    """Check whether a value is a scalar, a tensor without dimensions, or a nested sequence of these."""
    if isinstance(value, Tensor):
        return value.dim() == 0
    if isinstance(value, list | tuple):
        return all(_is_json(item) for item in value)
    return isinstance(value, _SCALAR)


def _as_json(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    return value.item() if isinstance(value, Tensor) else value


def _like(built: Any, saved: Any) -> Any:
    """Convert a saved option to the type of the new optimizer's option. JSON has no tensors and no tuples.

    A tensor is filled in place, because a captured CUDA graph reads from this tensor's memory.

    Args:
        built: The option of the new optimizer.
        saved: The saved option.
    """
    if isinstance(built, Tensor):
        return built.fill_(saved)
    if isinstance(built, tuple) and isinstance(saved, list) and len(built) == len(saved):
        return tuple(_like(built_item, saved_item) for built_item, saved_item in zip(built, saved, strict=True))
    return saved


def random_state() -> dict[str, Any]:
    """Return the state of every random number generator of this process, as JSON."""
    version, words, gauss = random.getstate()
    state = {"python": [version, list(words), gauss], "torch": _bytes_to_text(torch.get_rng_state())}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = _bytes_to_text(torch.cuda.get_rng_state())
    return state


def set_random_state(state: dict[str, Any], copy: int = 0) -> None:
    """Set the random number generators of this process.

    If this process has CUDA and the state has none, CUDA's generator is seeded from the state of the CPU's.

    Args:
        state: What `random_state` returned.
        copy: 0 restores the state. Other numbers seed the generators from the state and this number.

    Raises:
        UserError: For anything that `random_state` has not written.
    """
    try:
        version, words, gauss = state["python"]
        cpu = _text_to_bytes(state["torch"])
        cuda = _text_to_bytes(state["cuda"]) if "cuda" in state else None
        if copy == 0:
            random.setstate((version, tuple(words), gauss))
            torch.set_rng_state(cpu)
        else:
            random.seed(_seed_of_copy(state["torch"], copy, "python"))
            torch.default_generator.manual_seed(_seed_of_copy(state["torch"], copy, "torch"))
        if torch.cuda.is_available():
            if copy == 0 and cuda is not None:
                torch.cuda.set_rng_state(cuda)
            else:
                torch.cuda.manual_seed(_seed_of_copy(state["torch"], copy, "cuda"))
    except (KeyError, TypeError, ValueError, RuntimeError, binascii.Error) as error:
        raise UserError(f"the checkpoint's random state is damaged ({error})") from error


def _seed_of_copy(text: str, copy: int, generator: str) -> int:
    """Return a seed of 63 bits for a generator's copy."""
    return int.from_bytes(digest(generator, copy, text), "big") >> 1


def _bytes_to_text(state: torch.Tensor) -> str:
    return base64.b64encode(bytes(state.tolist())).decode()


def _text_to_bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.uint8)
