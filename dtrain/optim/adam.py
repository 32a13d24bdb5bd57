"""AdamW and Adam by torch's formulas, over weights and moments of fewer bits than the arithmetic has.

A parameter is stepped rows at a time, so that what a step allocates does not grow with it.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dtrain.base.fused import Fused
from dtrain.optim import moments
from dtrain.optim.moments import BLOCK, KINDS, Int8, Plain, State, kind_of, round_bfloat16
from dtrain.optim.offload import RING, StateOffloader, largest
from dtrain.optim.places import Numbers, Place, element_bits, stream
from dtrain.parallel.host_masters import Master
from dtrain.parallel.placement import local_tensor

AT_ONCE = 2**22  # elements: 16 MiB in float32
MOMENTS = "exp_avg", "exp_avg_sq"
FEW_BITS = torch.bfloat16, torch.int8, torch.uint8
MASTER = "master"  # key of the masters among the state on the host, beside the keys of the moments


@dataclass(frozen=True)
class _Stepped:
    """Parameter with its state, as a step takes it."""

    name: str
    place: Place
    moments: tuple[Plain, ...]


class LowBitAdam(Optimizer):
    """AdamW, or with decoupled=False Adam (the decay is added to the gradient).

    names: of the parameters, whole and on every mesh the same; seed: of random bits. state: the kind of the moments, of
    those parameters that `kind_of` does not leave out. Weights in bfloat16 are rounded at random, as moments are. Of
    every parameter: "step", on the host, "exp_avg" and "exp_avg_sq", and in int8 each with "_scale". offload: the
    device if these are in pinned host memory, with the parameters (`parallel.host_masters`) or without: of type cuda,
    or meta in a plan, where all stays where it is.

    No collective, but for int8 moments where tensor parallel cuts a block (`moments.Int8`).
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        names: dict[nn.Parameter, str],
        seed: int,
        state: str,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        decoupled: bool = True,
        offload: torch.device | None = None,
    ):
        super().__init__(groups, {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay})
        self.seed, self.decoupled = seed, decoupled
        self._offloader = StateOffloader(offload) if offload is not None and offload.type == "cuda" else None
        self._stepped = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                name, place = names[parameter], Place.of(parameter)
                kind = KINDS[kind_of(name, parameter.shape, state)]
                self._stepped[parameter] = _Stepped(name, place, tuple(kind(place, key) for key in MOMENTS))

    def placed(self, parameter: Tensor, key: str) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Return the size of the whole tensor of state `key` of `parameter` [..], and where this rank's part begins;
        None where it lies as the parameter does."""
        for moment in self._stepped[parameter].moments:
            if isinstance(moment, Int8) and key == moment.scales:
                return moment.scales_at
        return None

    def _is_adams(self, group: dict[str, Any]) -> bool:
        return True

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # nothing here is computed twice
        parts = self._all_parts()
        held = [part.state for part in parts]
        # strict runs the offloader to its end, where the last parts' moments go back to the host.
        for part, state in zip(parts, held if self._offloader is None else self._offloader.through(held), strict=True):
            self._step_rows(part, state)

    def ring_bytes(self) -> int:
        """Return the bytes of state on the device at a time, in a step with the gradients that are there, if the state
        lies on the host."""
        return RING * largest(part.state for part in self._all_parts())

    def _all_parts(self) -> list["_Part"]:
        groups = [group for group in self.param_groups if self._is_adams(group)]
        return [part for group in groups for parameter in group["params"] for part in self._parts(parameter, group)]

    def _parts(self, parameter: nn.Parameter, group: dict[str, Any]) -> Iterator["_Part"]:
        """Yield the parts of `parameter` that are stepped at once, rows by rows; as many on all ranks that share a
        block."""
        if parameter.grad is None:
            return
        stepped, state = self._stepped[parameter], self.state[parameter]
        place = stepped.place
        weights, gradients = place.of_local(parameter), place.of_local(parameter.grad)
        if not state:
            local = local_tensor(parameter).detach()
            dtype = torch.promote_types(weights.dtype, torch.float32)
            for moment in stepped.moments:
                state |= moment.allocate(local, dtype)
            if self._offloader is not None:
                for key, tensor in state.items():
                    state[key] = torch.zeros(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            state["step"] = torch.zeros(())
        state["step"] += 1
        number = int(state["step"].item())
        name = stream(self.seed, number, stepped.name)
        held = {key: _rows(state[key], place) for moment in stepped.moments for key in moment.keys}
        if isinstance(master := local_tensor(parameter), Master):
            held[MASTER], weights = weights, place.of_local(master.copy)
        moment = stepped.moments[0]
        if isinstance(moment, Int8) and not (moment.shares_blocks or moment.before or moment.after):
            scales = {one.scales for one in stepped.moments if isinstance(one, Int8)}
            held = {key: tensor[..., None] if key in scales else _in_blocks(tensor) for key, tensor in held.items()}
            weights, gradients = _in_blocks(weights), _in_blocks(gradients)
        for rows in place.runs(AT_ONCE, BLOCK):  # int8 fills a row's last block up
            part = {key: tensor[rows] for key, tensor in held.items()}
            yield _Part(stepped, group, weights[rows], gradients[rows], part, rows, number, name)

    def _step_rows(self, part: "_Part", state: State) -> None:
        group, place, moment = part.group, part.stepped.place, part.stepped.moments[0]
        (beta1, beta2), lr, decay = group["betas"], group["lr"], group["weight_decay"]
        shrinks = None if not decay else self.decoupled
        factors = (
            1 - lr * decay if self.decoupled else decay,
            beta1,
            1 - beta1,
            beta2,
            1 - beta2,
            (1 - beta2**part.number) ** -0.5,
            group["eps"],
            lr / (1 - beta1**part.number),
        )
        scalars = tuple(torch.tensor(factor, dtype=torch.float64) for factor in factors)
        numbers = place.numbers(part.rows, part.name)
        arguments = part.weights, part.gradient, state, scalars, numbers, shrinks
        # What visits the device lies in one buffer: several dtypes of a storage that a graph writes are refused.
        step = _step if self._offloader is None else _step.function
        if not isinstance(moment, Int8):
            step(*arguments)
        elif moment.shares_blocks:
            _step.function(*arguments, (moment.before, moment.after), moment.agree)
        else:
            step(*arguments, (moment.before, moment.after))


@dataclass(frozen=True)
class _Part:
    """Rows of a parameter with their gradient and state, each [rows, ..]. weights: of a master on the host, which is
    part of the state here, its rounded copy. number: of the step; name: of its bits."""

    stepped: _Stepped
    group: dict[str, Any]
    weights: Tensor
    gradient: Tensor
    state: State
    rows: slice
    number: int
    name: int


@Fused
def _step(
    weights: Tensor,
    gradient: Tensor,
    state: State,
    factors: tuple[Tensor, ...],
    numbers: Numbers,
    shrinks: bool | None,
    edges: tuple[int, int] = (0, 0),
    agree: Callable[[Tensor], None] | None = None,
) -> None:
    """Step rows of a parameter, each tensor as `moments.read` has it. factors: scalars of the host, which a kernel
    takes by value. shrinks: the decay multiplies the weights; False: it is added to the gradient; None: there is none.
    edges, agree: as `moments.write` has them."""
    decay, beta1, rest1, beta2, rest2, correction, eps, rate = factors
    masters = state.get(MASTER, weights)
    values = masters.to(torch.promote_types(masters.dtype, torch.float32))
    gradient = gradient.to(values.dtype)
    first, second = (moments.read(state, key, edges) for key in MOMENTS)
    if shrinks:
        values.mul_(decay)
    elif shrinks is not None:
        gradient = gradient + values * decay
    # Products and sums apart: torch's fused kernels round a tensor's ends otherwise than its middle.
    first.mul_(beta1).add_(gradient * rest1)
    second.mul_(beta2).add_((gradient * rest2).mul_(gradient))
    denominator = second.sqrt().mul_(correction).add_(eps)
    values.sub_((first / denominator).mul_(rate))
    kept = [masters, *(state[key] for key in MOMENTS)]
    bits = gradient
    if any(tensor.dtype in FEW_BITS for tensor in kept):
        bits = element_bits(values.shape, numbers, values.device)
    if masters.dtype == torch.bfloat16:
        masters.copy_(round_bfloat16(values, bits))
    elif masters is not weights:
        weights.copy_(values)
    for key, moment, shift in zip(MOMENTS, (first, second), (16, 40), strict=True):
        if state[key].dtype in FEW_BITS:
            moments.write(state, key, moment, bits >> shift, edges, agree)


def _rows(tensor: Tensor, place: Place) -> Tensor:
    """Return a tensor of the state, [..], as [held_rows, ..]: a scale for each block of a row, or the elements."""
    return tensor.view(place.held_rows, tensor.shape[-1] if tensor.dim() > 1 else 1)


def _in_blocks(tensor: Tensor) -> Tensor:
    """Return [held_rows, held_columns] as [held_rows, blocks, BLOCK]."""
    return tensor.unflatten(1, (tensor.shape[1] // BLOCK, BLOCK))
