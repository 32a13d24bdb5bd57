"""State of training as named tensors and JSON, and back: model, optimizer and random number generators.

Tensors: `model.<name>`, and `optim.<name>.<key>` for every tensor of the optimizer's state (`exp_avg`, `step`, ...).
Names are those of the model's state dict, so a checkpoint does not depend on the order of parameters. JSON: the
optimizer's groups (lr, initial_lr, betas, ...) and what its state holds beside tensors.

Resuming:

    optimizer_state = store.read_state(step)["optimizer"]
    restore_optimizer(model, optimizer, optimizer_state)       # makes room for the tensors, sets the scalars
    store.load(step, training_tensors(model, optimizer))       # fills model and optimizer in place

Random number generators are Python's, torch's on the CPU, and torch's on this rank's CUDA device, as JSON. dtrain's own
random numbers depend on the seed and the logical position, so these generators matter only to other code, such as a
reward function or a user's method. On the saved world size each rank continues exactly. A rank that gets a copy of
another rank's state (`CheckpointStore.read_rank_state`) is seeded from that state and the number of the copy: always
the same, and unlike the original.
"""

import base64
import binascii
import random
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dtrain.base.errors import UserError
from dtrain.base.randomness import digest
from dtrain.checkpoint.dcp.shards import TensorShard
from dtrain.optim.local_shard import ShardOptimizer, allocate_state
from dtrain.parallel.placement import local_tensor

SCORE_WEIGHT = "model.score.weight"  # of a model that rates texts: a language model has none
_SCALAR = (bool, int, float, str, type(None))


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers, [any shape], by name, tied ones once, under their first name: the model's own
    (DTensors under FSDP). No collective; FSDP modules that still hold gathered weights go back to their shards."""
    tensors = model.state_dict(keep_vars=True)
    return {name: tensors[name] for name in tensor_aliases(model)}


def tensor_aliases(model: nn.Module) -> dict[str, list[str]]:
    """Return, by every name of `model_tensors`, all names of the same tensor, that one first."""
    names: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
    return {tensor_names[0]: tensor_names for tensor_names in names.values()}


def frozen_names(model: nn.Module) -> set[str]:
    """The names in `model_tensors` of parameters that are not trained."""
    tensors = model_tensors(model).items()
    return {name for name, tensor in tensors if isinstance(tensor, nn.Parameter) and not tensor.requires_grad}


def training_tensors(model: nn.Module, optimizer: Optimizer | None = None, *, frozen: bool = True) -> dict[str, Tensor]:
    """Every tensor, [any shape], of `model` and of the state that `optimizer` has by now, under a checkpoint's names.
    They share storage with the originals: to save them, and to load into them. frozen: whether parameters that are not
    trained are among them. No collective."""
    left_out = set() if frozen else frozen_names(model)
    tensors = {f"model.{name}": tensor for name, tensor in model_tensors(model).items() if name not in left_out}
    if optimizer is None:
        return tensors
    names = _parameter_names(model)
    for parameter, entries in optimizer.state.items():
        name = _name(names, parameter)
        for key, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"optim.{name}.{key}"] = _placed(value, parameter, name, key, optimizer)
    return tensors


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return what a checkpoint keeps of `optimizer` as JSON. No collective.

    {"groups": [{"params": [names], "values": {option: value}}],
     "state": {name: {"tensors": [keys], "values": {key: value}}}}

    Options that are no numbers, words or sequences of them stay out: they come from the recipe. Such state is a
    UserError, for the resumed run would lack it."""
    names = _parameter_names(model)
    groups = []
    for group in optimizer.param_groups:
        values = {key: _plain(value) for key, value in group.items() if key != "params" and _is_plain(value)}
        groups.append({"params": [_name(names, parameter) for parameter in group["params"]], "values": values})
    state = {}
    for parameter, entries in optimizer.state.items():
        name = _name(names, parameter)
        values = {key: value for key, value in entries.items() if not isinstance(value, Tensor)}
        for key, value in values.items():
            if not _is_plain(value):
                raise UserError(
                    f"optimizer {type(optimizer).__name__} keeps {type(value).__name__} {key!r} for {name}: "
                    "dtrain saves tensors and numbers; choose another optimizer.name, or checkpoint.every=null"
                )
        tensors = [key for key in entries if key not in values]
        state[name] = {"tensors": tensors, "values": {key: _plain(value) for key, value in values.items()}}
    return {"groups": groups, "state": state}


def find_first_mismatch(
    model: nn.Module, saved: Mapping[str, Any], sizes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
) -> str | None:
    """Return how the first parameter that `model` trains differs from what a checkpoint has trained, or None.

    Args:
        model: The model that would be resumed, which may be on meta.
        saved: What `optimizer_state` returned when the checkpoint was saved.
        sizes: Shape and dtype of the checkpoint's tensors, by name.
    """
    groups, _ = _groups_and_state(saved)
    saved_names = {name for params, _ in groups for name in params}
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
    return f"the checkpoint has trained {only_saved[0]}, and this recipe does not" if only_saved else None


def _groups_and_state(saved: Mapping[str, Any]) -> tuple[list[tuple[list[str], dict]], dict[str, tuple[list, dict]]]:
    """Return the groups (names, options) and the state (names of tensors, scalars) of a saved `optimizer_state`."""
    try:
        groups = [(group["params"], group["values"]) for group in saved["groups"]]
        state = {name: (entries["tensors"], entries["values"]) for name, entries in saved["state"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError("the checkpoint's optimizer state is damaged, or not written by dtrain") from error
    return groups, state


def restore_optimizer(
    model: nn.Module, optimizer: Optimizer, saved: Mapping[str, Any], *, keep_options: Collection[str] = ()
) -> None:
    """Prepare a new `optimizer` for `CheckpointStore.load`: its state allocated, its options and scalars as `saved` has
    them. keep_options: options that stay as the optimizer was built with them (`lr`, ...), for a change that the user
    allows.
    Parameters keep their values. No collective of its own; the optimizer's step may have some. Raises
    UserError where
    the groups or the kind of state do not fit."""
    names = _parameter_names(model)
    groups, state = _groups_and_state(saved)
    _check_groups(optimizer, names, groups)
    allocate_state(optimizer)
    for parameter, entries in list(optimizer.state.items()):
        name = _name(names, parameter)
        if name not in state:  # it had no gradient yet when the checkpoint was saved
            del optimizer.state[parameter]
            continue
        tensors, values = state.pop(name)
        held = sorted(key for key, value in entries.items() if isinstance(value, Tensor))
        if held != sorted(tensors):
            raise UserError(
                f"the checkpoint's optimizer keeps {sorted(tensors)} for {name}, optimizer "
                f"{type(optimizer).__name__} as the recipe has it keeps {held}: set optimizer.name back, or begin "
                "another run with these weights (checkpoint.init_from, run.name)"
            )
        entries.update(values)
    if state:
        raise UserError(f"the checkpoint has optimizer state for {sorted(state)[:5]}, which the run does not train")
    for group, (_, values) in zip(optimizer.param_groups, groups, strict=True):
        for key in values.keys() - set(keep_options):
            group[key] = _like(group.get(key), values[key])


def _parameter_names(model: nn.Module) -> dict[int, str]:
    return {id(tensor): name for name, tensor in model_tensors(model).items()}


def _name(names: dict[int, str], parameter: Tensor) -> str:
    if id(parameter) not in names:
        raise ValueError(f"the optimizer holds a parameter of {tuple(parameter.shape)} that the model does not have")
    return names[id(parameter)]


def _placed(value: Tensor, parameter: Tensor, name: str, key: str, optimizer: Optimizer) -> Tensor:
    """`value` with its place: its own, or that of the parameter whose shard it was made from."""
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
        place = TensorShard.from_tensor(parameter)
        return TensorShard.from_offsets(value, place.global_size, place.offsets)
    raise UserError(
        f"optimizer {type(optimizer).__name__} keeps {key!r} of shape {tuple(value.shape)} for {name}, of which this "
        f"rank holds {tuple(local_tensor(parameter).shape)} of {tuple(parameter.shape)}: dtrain cannot tell what part "
        "of the whole it is; run on one process, or choose another optimizer.name"
    )


def _check_groups(optimizer: Optimizer, names: dict[int, str], saved: list[tuple[list[str], dict]]) -> None:
    built = [{_name(names, parameter) for parameter in group["params"]} for group in optimizer.param_groups]
    kept = [set(params) for params, _ in saved]
    only_kept, only_built = (sorted(set().union(*a) - set().union(*b)) for a, b in ((kept, built), (built, kept)))
    if only_kept and only_built:
        raise UserError(
            f"the checkpoint has trained {only_kept[0]} and not {only_built[0]}, this recipe trains the second and not "
            "the first: resume with the model, the recipe and the release of dtrain that wrote it, or begin a new run"
        )
    if built != kept:
        moved = sorted(set().union(*(a ^ b for a, b in zip(built, kept, strict=False))))
        raise UserError(
            f"the checkpoint's optimizer has {len(kept)} parameter groups, the recipe's {len(built)}; they differ in "
            f"{moved[:5]} (optimizer, model)"
        )


def _is_plain(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return isinstance(value, _SCALAR)


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.item() if isinstance(value, Tensor) else value


def _like(built: Any, saved: Any) -> Any:
    """`saved` in the form of `built`: a tensor is filled in place, for a captured step reads that very tensor."""
    if isinstance(built, Tensor):
        return built.fill_(saved)
    if isinstance(built, tuple) and isinstance(saved, list) and len(built) == len(saved):
        return tuple(_like(*pair) for pair in zip(built, saved, strict=True))
    return saved


def random_state() -> dict[str, Any]:
    """The state of every generator of this process, as JSON."""
    version, words, gauss = random.getstate()
    state = {"python": [version, list(words), gauss], "torch": _bytes_to_text(torch.get_rng_state())}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = _bytes_to_text(torch.cuda.get_rng_state())
    return state


def set_random_state(state: dict[str, Any], copy: int = 0) -> None:
    """Put the generators of this process into `state` (copy 0), or into one derived from it. CUDA, where this process
    has it and the state does not, is seeded from the CPU's. UserError for what `random_state` has not written."""
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
    return int.from_bytes(digest(generator, copy, text), "big") >> 1


def _bytes_to_text(state: torch.Tensor) -> str:
    return base64.b64encode(bytes(state.tolist())).decode()


def _text_to_bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.uint8)
