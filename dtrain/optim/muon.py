"""Muon: matrices are stepped by their orthogonalised momentum, everything else by AdamW.

Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024. The scale for AdamW's learning rates: Liu
et al., arXiv:2502.16982.

The orthogonalised matrix cannot be computed shard by shard, because each of its elements depends on the full matrix. So
each matrix is gathered on one of the ranks that share it (its owner), orthogonalised there, and broadcast. Ranks take
turns, and the matrices of one wave are orthogonalised at the same time. For example, with FSDP over 3 ranks and
matrices A to E, a first wave has A on rank 0, B on rank 1 and C on rank 2, and a second wave D on rank 0 and E on
rank 1.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtrain.base.fused import Fused
from dtrain.optim.adam import adam_step
from dtrain.optim.local_shard import (
    BitPositions,
    LocalShard,
    ShardOptimizer,
    bit_positions,
    random_bits,
    random_sequence,
    round_bfloat16,
)
from dtrain.parallel.placement import get_sharding_dims, local_tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
SCALES = ("match_rms_adamw", "original")
_MIN_NORM = 1e-7  # a matrix of zeros is divided by it

Group = dict[str, Any]


class Muon(ShardOptimizer):
    """Muon for matrices, and AdamW for embeddings, heads, vectors and stacks of experts.

    All computation is in float32, or in float64 for float64 parameters. The state of a matrix has the keys "step" (on
    the host) and "momentum_buffer", which has the shape of the local shard. bfloat16 weights are rounded
    stochastically.

    Args:
        groups: Parameter groups, with parameters that are plain tensors or DTensors.
        names: Name of each parameter, the same on every mesh.
        seed: Seed of the random bits.
        lr: Learning rate of matrices.
        adam_lr: Learning rate of everything else. None: `lr`.
        momentum: Factor of the momentum. This argument and those up to `adjust_lr_fn` are as in torch.optim.Muon.
        nesterov: Whether to orthogonalise the momentum one update ahead (`_update_momentum`).
        ns_steps: Number of Newton-Schulz iterations.
        ns_coefficients: Coefficients of the polynomial in each iteration.
        adjust_lr_fn: Name of the scale, one of `SCALES`.
        betas: Decays of AdamW's two moments.
        eps: Added to AdamW's denominator.
        weight_decay: Weight decay of groups that do not set their own.

    Raises:
        ValueError: If an option is out of its range.

    Collectives:
        `step` has one reduce and one broadcast per matrix that ranks share, and an all-reduce for each further mesh
        dimension that divides it.
    """

    def __init__(
        self,
        groups: Iterable[Group],
        *,
        names: dict[nn.Parameter, str],
        seed: int,
        lr: float,
        adam_lr: float | None = None,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
        adjust_lr_fn: str = "match_rms_adamw",
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
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
        matrix_groups: list[Group] = []
        adam_groups: list[Group] = []
        for group in groups:
            matrices = [parameter for parameter in group["params"] if is_matrix(names[parameter], parameter)]
            others = [parameter for parameter in group["params"] if not is_matrix(names[parameter], parameter)]
            if matrices:
                matrix_groups.append({**group, **options, "params": matrices})
            if others:
                adam_groups.append({**group, "params": others, "lr": lr if adam_lr is None else adam_lr})
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__([*matrix_groups, *adam_groups], defaults)
        self._seed = seed
        self._names = names
        self._shards: dict[nn.Parameter, LocalShard] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                self._shards[parameter] = LocalShard.of(parameter)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # nothing here is computed twice
        """Step every parameter that has a gradient."""
        # AdamW's parameters come first, because states are written to a checkpoint in the order of their creation.
        for parameter, group in self._with_gradients(is_matrix_group=False):
            shard, name = self._shards[parameter], self._names[parameter]
            adam_step(parameter, self.state[parameter], group, shard, name, self._seed)
        matrices: list[_Matrix] = []
        for parameter, group in self._with_gradients(is_matrix_group=True):
            shard, name = self._shards[parameter], self._names[parameter]
            matrices.append(_Matrix(parameter, self.state[parameter], group, shard, name, _process_groups(parameter)))
        turns: dict[str, int] = {}
        remaining = iter(matrices)
        while wave := _next_wave(remaining):
            self._step_wave(wave, turns)

    def _with_gradients(self, *, is_matrix_group: bool) -> Iterator[tuple[nn.Parameter, Group]]:
        """Yield the parameters that have a gradient, of the groups of matrices or of the other groups."""
        for group in self.param_groups:
            if ("momentum" in group) == is_matrix_group:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        yield parameter, group

    def _step_wave(self, wave: list["_Matrix"], turns: dict[str, int]) -> None:
        """Gather, orthogonalise and step the matrices of a wave.

        Args:
            wave: The matrices.
            turns: For each group of ranks by its name, the number of matrices that it has stepped so far. Updated.

        Collectives:
            Those of `_Matrix.gather` and `_Matrix.broadcast`, for each matrix.
        """
        owners: list[int] = []
        # For each matrix, the full matrix on its owner, and None on the other ranks.
        full: list[Tensor | None] = []
        for matrix in wave:
            owner, ranks = 0, matrix.shared_by
            if ranks is not None:
                turn = turns.get(ranks.group_name, 0)
                turns[ranks.group_name] = turn + 1
                owner = turn % ranks.size()
            owners.append(owner)
            full.append(matrix.gather(matrix.move_momentum(), owner))
        # All gathers come before the first orthogonalisation, so that the owners compute at the same time.
        for index, gathered in enumerate(full):
            if gathered is not None:
                group = wave[index].group
                full[index] = orthogonalize(gathered, group["ns_steps"], group["ns_coefficients"])
        for index, matrix in enumerate(wave):
            update = matrix.broadcast(full[index], owners[index])
            full[index] = None  # free the memory of a full matrix as soon as it was broadcast
            matrix.apply(update, self._seed)


@dataclass(frozen=True)
class _Matrix:
    """A matrix with everything that its step needs.

    Attributes:
        parameter: The matrix with its gradient, sharded.
        state: Optimizer state of the matrix, filled in the first step.
        group: Parameter group of the matrix.
        shard: Local shard of the matrix.
        name: Name of the matrix in the model.
        process_groups: Groups of ranks that share the matrix, one per mesh dimension that shards it, the largest first.
    """

    parameter: nn.Parameter
    state: dict[str, Any]
    group: Group
    shard: LocalShard
    name: str
    process_groups: list[dist.ProcessGroup]

    @property
    def shared_by(self) -> dist.ProcessGroup | None:
        """Group whose ranks take turns as the matrix's owner. None if this rank has the full matrix."""
        return self.process_groups[0] if self.process_groups else None

    def move_momentum(self) -> Tensor:
        """Update the momentum, and return the shard [local_rows, local_columns] of the matrix to orthogonalise."""
        if not self.state:
            local = local_tensor(self.parameter).detach()
            dtype = torch.promote_types(local.dtype, torch.float32)
            self.state["momentum_buffer"] = torch.zeros_like(local, dtype=dtype)
            self.state["step"] = torch.zeros(())
        self.state["step"] += 1
        assert self.parameter.grad is not None
        average = self.shard.as_matrix(self.state["momentum_buffer"])
        gradient = self.shard.as_matrix(self.parameter.grad)
        ahead = _update_momentum(average, gradient, self.group["momentum"], self.group["nesterov"])
        return average if ahead is None else ahead

    def gather(self, local: Tensor, owner: int) -> Tensor | None:
        """Return the full matrix [rows, columns] on its owner, and None on other ranks.

        Args:
            local: The local shard, [local_rows, local_columns].
            owner: Rank in `shared_by`.

        Collectives:
            One reduce, and an all-reduce among the owners for each further group that shares the matrix.
        """
        if self.shared_by is None:
            return local
        full = local.new_zeros(self.shard.num_rows, self.shard.num_columns)
        full[self.shard.slices] = local
        dist.reduce(full, group=self.shared_by, group_dst=owner)
        if self.shared_by.rank() != owner:
            return None
        for other in self.process_groups[1:]:
            dist.all_reduce(full, group=other)
        return full

    def broadcast(self, full: Tensor | None, owner: int) -> Tensor:
        """Return the owner's full matrix [rows, columns] on every rank.

        Args:
            full: The matrix on its owner, None on other ranks.
            owner: Rank in `shared_by`.

        Collectives:
            One broadcast over `shared_by`, none if this rank has the full matrix.
        """
        if full is None:
            dtype = torch.promote_types(self.parameter.dtype, torch.float32)
            device = local_tensor(self.parameter).detach().device
            full = torch.empty(self.parameter.shape, dtype=dtype, device=device)
        if self.shared_by is not None:
            full = full.contiguous()
            dist.broadcast(full, group=self.shared_by, group_src=owner)
        return full

    def apply(self, full: Tensor, seed: int) -> None:
        """Step the local shard by this rank's part of the orthogonalised matrix.

        Args:
            full: The orthogonalised matrix, [rows, columns].
            seed: Seed of the random bits.
        """
        lr = self.group["lr"]
        rate = lr * scale(self.group["adjust_lr_fn"], self.shard.num_rows, self.shard.num_columns)
        scalars = _Scalars(
            weight_factor=torch.tensor(1 - lr * self.group["weight_decay"], dtype=torch.float64),
            rate=torch.tensor(rate, dtype=torch.float64),
        )
        weights, update = self.shard.as_matrix(self.parameter), full[self.shard.slices]
        sequence = random_sequence(seed, int(self.state["step"].item()), self.name)
        for rows in self.shard.row_slices():
            _step_rows(weights[rows], update[rows], scalars, bit_positions(self.shard, rows, sequence))


class _Scalars(NamedTuple):
    """Coefficients of a matrix's step: float64 scalars on the host, which a compiled kernel receives by value.

    Attributes:
        weight_factor: Factor of the weights, 1 - lr·λ.
        rate: Factor of the orthogonalised matrix.
    """

    weight_factor: Tensor
    rate: Tensor


@Fused
def _update_momentum(average: Tensor, gradient: Tensor, momentum: float, nesterov: bool) -> Tensor | None:
    """Update the momentum in place: average ← μ · average + (1 − μ) · gradient.

    Args:
        average: The momentum, [local_rows, local_columns]; overwritten.
        gradient: The gradient of that shape, in any dtype.
        momentum: The factor μ.
        nesterov: Whether to return the momentum after one more update by the same gradient.

    Returns:
        With `nesterov` μ · average + (1 − μ) · gradient, where `average` is updated already. Otherwise None.
    """
    part = gradient.to(average.dtype) * (1 - momentum)
    average.mul_(momentum).add_(part)
    return part.add_(average * momentum) if nesterov else None


@Fused
def _step_rows(weights: Tensor, update: Tensor, scalars: _Scalars, positions: BitPositions) -> None:
    """Step a slice of a shard's rows.

    Args:
        weights: The weights, [rows, local_columns]; overwritten.
        update: The same rows of the orthogonalised matrix.
        scalars: Coefficients of the step.
        positions: Positions of the bits by which bfloat16 weights are rounded.
    """
    values = weights.to(update.dtype)
    values.mul_(scalars.weight_factor).sub_(update * scalars.rate)
    if weights.dtype == torch.bfloat16:
        values = round_bfloat16(values, random_bits(values.shape, positions, values.device))
    weights.copy_(values)


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Check whether Muon orthogonalises a parameter: a matrix that is no embedding, no head and no experts' bias."""
    is_other = any(part in name for part in ("embed", "lm_head", "score.", ".bias"))
    return parameter.dim() == 2 and not is_other


def scale(adjust_lr_fn: str, rows: int, columns: int) -> float:
    """Return the factor of the learning rate of a matrix.

    Args:
        adjust_lr_fn: "match_rms_adamw" makes the elements of an update as large as AdamW's. "original" is Jordan's.
        rows: Rows of the matrix.
        columns: Columns of the matrix.

    Example:
        >>> scale("match_rms_adamw", 1024, 4096)
        12.8
        >>> scale("original", 4096, 1024)
        2.0
    """
    if adjust_lr_fn == "original":
        return math.sqrt(max(1.0, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns))


def orthogonalize(matrix: Tensor, steps: int, coefficients: tuple[float, float, float]) -> Tensor:
    """Bring the singular values of a matrix near 1, by Newton-Schulz iterations.

    The matrix is first divided by its Frobenius norm, so that no singular value is above 1. Each iteration is the
    polynomial X ← a·X + b·(XXᵀ)X + c·(XXᵀ)²X. It changes the singular values and keeps the singular vectors. Five
    iterations with `COEFFICIENTS` bring singular values from 0.002 to 1 into the range 0.68 to 1.21. More precision is
    not needed.

    Args:
        matrix: [rows, columns], any floating dtype.
        steps: Number of iterations.
        coefficients: a, b and c.

    Returns:
        The orthogonalised matrix, of the same shape and dtype.
    """
    a, b, c = coefficients
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / torch.linalg.vector_norm(x).clamp(min=_MIN_NORM)
    for _ in range(steps):
        gram = x @ x.T
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    return x.T if is_tall else x


def _process_groups(parameter: Tensor) -> list[dist.ProcessGroup]:
    """Return the groups whose ranks share a parameter, the largest first."""
    groups: list[dist.ProcessGroup] = []
    for dim in range(parameter.dim()):
        for mesh, mesh_dim in get_sharding_dims(parameter, dim):
            if mesh.size(mesh_dim) > 1:
                groups.append(mesh.get_group(mesh_dim))
    return sorted(groups, key=lambda group: -group.size())


def _next_wave(matrices: Iterator[_Matrix]) -> list[_Matrix]:
    """Return the next matrices that ranks orthogonalise at the same time, one per rank that shares the first."""
    first = next(matrices, None)
    if first is None:
        return []
    num_ranks = 1 if first.shared_by is None else first.shared_by.size()
    return [first, *islice(matrices, num_ranks - 1)]
