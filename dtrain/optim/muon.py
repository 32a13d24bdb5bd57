"""Muon: the momentum of each matrix, orthogonalised whole; everything else by AdamW.

Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024; the scale for AdamW's rates: Liu et al.,
arXiv:2502.16982. A shard's orthogonalisation is no part of the whole's, so matrices are gathered: the ranks that share
them take turns, each works on its own, and every one gets its part of the result.
"""

import math
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtrain.base.fused import Fused
from dtrain.optim.adam import AT_ONCE, LowBitAdam
from dtrain.optim.moments import round_bfloat16
from dtrain.optim.places import Numbers, element_bits, stream
from dtrain.parallel.placement import cut_by, local_tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
SCALES = ("match_rms_adamw", "original")
_LEAST = 1e-7  # a matrix of zeros is divided by it


class Muon(LowBitAdam):
    """Muon for matrices but embeddings and heads; AdamW for these, vectors and the rest, at adam_lr.

    Options as torch.optim.Muon's; eps and betas are AdamW's. Computed in float32 or better. Of each matrix: "step", on
    the host, and "momentum_buffer", which lies as the parameter does. For each matrix that ranks share a reduce and a
    broadcast of all of it among them.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        names: dict[nn.Parameter, str],
        lr: float,
        adam_lr: float | None = None,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
        adjust_lr_fn: str = "match_rms_adamw",
        **adam: Any,
    ):
        if not 0 <= momentum < 1 or not 1 <= ns_steps < 100 or adjust_lr_fn not in SCALES or len(ns_coefficients) != 3:
            raise ValueError(
                f"momentum={momentum} must be from 0 up to 1, ns_steps={ns_steps} from 1 to 99, adjust_lr_fn="
                f"{adjust_lr_fn} one of {', '.join(SCALES)}, and ns_coefficients three numbers"
            )
        options = {
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "ns_coefficients": tuple(ns_coefficients),
            "adjust_lr_fn": adjust_lr_fn,
        }
        matrices, others = [], []
        for group in groups:
            matrices.append({**group, **options, "params": [p for p in group["params"] if is_matrix(names[p], p)]})
            rest = [p for p in group["params"] if not is_matrix(names[p], p)]
            others.append({**group, "params": rest, "lr": lr if adam_lr is None else adam_lr})
        filled = [group for group in (*matrices, *others) if group["params"]]
        super().__init__(filled, names=names, lr=lr, state="float32", **adam)

    def _is_adams(self, group: dict[str, Any]) -> bool:
        return "momentum" not in group

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # as of its base
        super().step()
        matrices = (
            (parameter, group)
            for group in self.param_groups
            if not self._is_adams(group)
            for parameter in group["params"]
            if parameter.grad is not None
        )
        turns: dict[str, int] = {}
        while wave := list(_wave(matrices)):
            self._step_wave(wave, turns)

    def _step_wave(self, wave: list[tuple[nn.Parameter, dict[str, Any]]], turns: dict[str, int]) -> None:
        """Step the matrices of a wave. turns: by group of ranks, the number of matrices that it has worked on."""
        owned: list[tuple[int, dist.ProcessGroup | None]] = []
        held: list[Tensor | None] = []
        for parameter, group in wave:
            groups, owner = _groups(parameter), 0
            if groups:
                turn = turns.get(groups[0].group_name, 0)
                turns[groups[0].group_name], owner = turn + 1, turn % groups[0].size()
            owned.append((owner, groups[0] if groups else None))
            held.append(self._gather(parameter, self._direction(parameter, group), owner, groups))
        for index, whole in enumerate(held):
            if whole is not None:
                group = wave[index][1]
                held[index] = orthogonalize(whole, group["ns_steps"], group["ns_coefficients"])
        for index, (parameter, group) in enumerate(wave):
            (owner, shared), whole, held[index] = owned[index], held[index], None
            if whole is None:
                dtype = torch.promote_types(parameter.dtype, torch.float32)
                whole = torch.empty(parameter.shape, dtype=dtype, device=local_tensor(parameter).detach().device)
            if shared is not None:
                whole = whole.contiguous()
                dist.broadcast(whole, group=shared, group_src=owner)
            self._apply(parameter, whole, group)

    def _direction(self, parameter: nn.Parameter, group: dict[str, Any]) -> Tensor:
        """Update the momentum and return this rank's part [held_rows, held_columns] of the matrix to orthogonalise."""
        place, state = self._stepped[parameter].place, self.state[parameter]
        if not state:
            local = local_tensor(parameter).detach()
            dtype = torch.promote_types(local.dtype, torch.float32)
            state["momentum_buffer"] = torch.zeros_like(local, dtype=dtype)
            state["step"] = torch.zeros(())
        state["step"] += 1
        assert parameter.grad is not None
        average = place.of_local(state["momentum_buffer"])
        ahead = _average(average, place.of_local(parameter.grad), group["momentum"], group["nesterov"])
        return average if ahead is None else ahead

    def _gather(
        self, parameter: nn.Parameter, part: Tensor, owner: int, groups: list[dist.ProcessGroup]
    ) -> Tensor | None:
        """Return the whole of `part` [held_rows, held_columns], [rows, columns], on the owner; None elsewhere."""
        place = self._stepped[parameter].place
        if not groups:
            return part
        whole = part.new_zeros(place.rows, place.columns)
        whole[place.slices] = part
        dist.reduce(whole, group=groups[0], group_dst=owner)
        if groups[0].rank() != owner:
            return None
        for other in groups[1:]:
            dist.all_reduce(whole, group=other)
        return whole

    def _apply(self, parameter: nn.Parameter, whole: Tensor, group: dict[str, Any]) -> None:
        """Step by this rank's part of `whole` [rows, columns]."""
        stepped = self._stepped[parameter]
        place, lr = stepped.place, group["lr"]
        rate = lr * scale(group["adjust_lr_fn"], place.rows, place.columns)
        weights, update = place.of_local(parameter), whole[place.slices]
        name = stream(self.seed, int(self.state[parameter]["step"].item()), stepped.name)
        factors = tuple(torch.tensor(factor, dtype=torch.float64) for factor in (1 - lr * group["weight_decay"], rate))
        for rows in place.runs(AT_ONCE):
            _step(weights[rows], update[rows], factors, place.numbers(rows, name))


@Fused
def _average(average: Tensor, gradient: Tensor, momentum: float, nesterov: bool) -> Tensor | None:
    """Move the momentum `average` [..] by a gradient, and with `nesterov` return where the next such move would take
    it."""
    part = gradient.to(average.dtype) * (1 - momentum)
    average.mul_(momentum).add_(part)
    return part.add_(average * momentum) if nesterov else None


@Fused
def _step(weights: Tensor, update: Tensor, factors: tuple[Tensor, Tensor], numbers: Numbers) -> None:
    """Step rows of a matrix by their part of an update. factors: of the weights and of the update, scalars of the host,
    which a kernel takes by value. numbers: of the bits that bfloat16 is rounded by."""
    shrink, rate = factors
    values = weights.to(update.dtype)
    values.mul_(shrink).sub_(update * rate)
    if weights.dtype == torch.bfloat16:
        values = round_bfloat16(values, element_bits(values.shape, numbers, values.device))
    weights.copy_(values)


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Return whether Muon steps `parameter` [..]: a matrix that is neither an embedding nor a head, nor experts'
    biases."""
    return parameter.dim() == 2 and not any(part in name for part in ("embed", "lm_head", "score.", ".bias"))


def scale(adjust_lr_fn: str, rows: int, columns: int) -> float:
    """Return the factor of a matrix's learning rate."""
    if adjust_lr_fn == "original":
        return math.sqrt(max(1.0, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns))  # an update's elements are then as large as AdamW's


def orthogonalize(matrix: Tensor, steps: int, coefficients: tuple[float, float, float]) -> Tensor:
    """Return matrix [rows, columns] with its singular values brought near 1, in its own dtype, by Newton-Schulz's
    iteration with a polynomial of fifth degree."""
    a, b, c = coefficients
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / torch.linalg.vector_norm(x).clamp(min=_LEAST)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def _groups(parameter: Tensor) -> list[dist.ProcessGroup]:
    """Return the groups whose ranks share `parameter` [..], the largest first."""
    cuts = [cut for dim in range(parameter.dim()) for cut in cut_by(parameter, dim)]
    groups = [mesh.get_group(dim) for mesh, dim in cuts if mesh.size(dim) > 1]
    return sorted(groups, key=lambda group: -group.size())


def _wave(matrices: Iterator[tuple[nn.Parameter, dict[str, Any]]]) -> Iterator[tuple[nn.Parameter, dict[str, Any]]]:
    """Yield the next matrices that ranks work on side by side: as many as there are ranks that share the first."""
    for first in matrices:
        yield first
        groups = _groups(first[0])
        yield from islice(matrices, groups[0].size() - 1 if groups else 0)
        return
