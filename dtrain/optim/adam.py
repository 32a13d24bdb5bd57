"""AdamW and Adam by torch's formulas, over weights and moments of fewer bits than the arithmetic has.

A parameter is stepped rows at a time, so that what a step allocates does not grow with it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dtrain.optim.moments import BLOCK, KINDS, Int8, Plain, State, kind_of, round_bfloat16
from dtrain.optim.offload import RING, StateOffloader, largest
from dtrain.optim.places import Place, stream
from dtrain.parallel.masters import Master
from dtrain.parallel.placement import local_tensor

AT_ONCE = 2**22  # elements: 16 MiB in float32
MASTER = "master"  # key of the masters among the state on the host, beside the keys of the moments


@dataclass(frozen=True)
class _Stepped:
    """Parameter with its state, as a step takes it."""

    name: str
    place: Place
    moments: tuple[Plain, Plain]


class LowBitAdam(Optimizer):
    """AdamW, or with decoupled=False Adam (the decay is added to the gradient).

    names: of the parameters, whole and on every mesh the same; seed: of random bits. state: the kind of the moments, of
    those parameters that `kind_of` does not leave out. Weights in bfloat16 are rounded at random, as moments are. Of
    every parameter: "step", on the host, "exp_avg" and "exp_avg_sq", and in int8 each with "_scale". offload: the
    device if these lie in pinned host memory, with the parameters (`parallel.masters`) or without: of type cuda, or
    meta in a plan, where all stays where it is.

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
                self._stepped[parameter] = _Stepped(name, place, (kind(place, "exp_avg"), kind(place, "exp_avg_sq")))

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
        for rows in place.runs(AT_ONCE, BLOCK):  # int8 fills a row's last block up
            part = {key: tensor[rows] for key, tensor in held.items()}
            yield _Part(stepped, group, weights[rows], gradients[rows], part, rows, number, name)

    def _step_rows(self, part: "_Part", state: State) -> None:
        (beta1, beta2), lr, decay = part.group["betas"], part.group["lr"], part.group["weight_decay"]
        masters, moments = state.get(MASTER, part.weights), part.stepped.moments
        values = masters.to(torch.promote_types(masters.dtype, torch.float32))
        gradient = part.gradient.to(values.dtype)
        first, second = (moment.read(state) for moment in moments)
        if decay and self.decoupled:
            values.mul_(1 - lr * decay)
        elif decay:
            gradient = gradient + values * decay
        # Products and sums apart: torch's fused kernels round a tensor's ends otherwise than its middle.
        first.mul_(beta1).add_(gradient * (1 - beta1))
        second.mul_(beta2).add_((gradient * (1 - beta2)).mul_(gradient))
        denominator = second.sqrt().mul_((1 - beta2**part.number) ** -0.5).add_(part.group["eps"])
        values.sub_((first / denominator).mul_(lr / (1 - beta1**part.number)))
        needs_bits = masters.dtype == torch.bfloat16 or any(type(moment) is not Plain for moment in moments)
        bits = part.stepped.place.bits(part.rows, part.name, masters.device) if needs_bits else gradient
        if masters.dtype == torch.bfloat16:
            masters.copy_(round_bfloat16(values, bits))
        elif masters is not part.weights:
            part.weights.copy_(values)
        for moment, kept, shift in zip(moments, (first, second), (16, 40), strict=True):
            if type(moment) is not Plain:
                moment.write(state, kept, bits >> shift)


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


def _rows(tensor: Tensor, place: Place) -> Tensor:
    """Return a tensor of the state, [..], as [held_rows, ..]: scales are so, all else has the parameter's elements."""
    is_matrix = tensor.dim() == 2 and len(tensor) == place.held_rows
    return tensor if is_matrix else tensor.view(place.held_rows, place.held_columns)
