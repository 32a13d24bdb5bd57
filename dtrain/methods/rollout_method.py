"""The base of the methods that train on completions which they draw as training goes on."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dtrain.base.batch import Batch
from dtrain.base.errors import UserError
from dtrain.data import Cursor, GlobalBatch, Rows
from dtrain.data.rows.order import deal
from dtrain.methods.method import Method
from dtrain.models.common.flops import flops_per_token
from dtrain.policy import Batching, Packed, Policy
from dtrain.recipe.schema import Grpo, Recipe
from dtrain.rl.buffer import Buffer, Position

if TYPE_CHECKING:
    from dtrain.rl.collect import Collector, Rollout


class RolloutMethod(Method):
    """A method that trains on rollouts: completions that `_collector` draws to the data's prompts as training goes on,
    held in a buffer that is the same on every rank. Each pass over a rollout takes every completion once,
    train.global_batch of them a step, shared out over the data-parallel ranks by their cost.

    `begin` sets `policy` and `_collector`.
    """

    policy: Policy
    _collector: "Collector"

    def __init__(self, recipe: Recipe, *section: Any):
        super().__init__(recipe, *section)
        self._buffer = Buffer.empty(0, 0, ())
        self._position = Position()
        self._is_over = False  # the data's epochs
        self._measured: dict[str, float] = {}

    @property
    def micro_rows(self) -> int | Batching:
        """Packed, a micro-batch is one row of micro_batch · max_length tokens."""
        return Packed(self.spec.longest_row(self.recipe)) if self.recipe.data.packing else super().micro_rows

    @property
    def rollouts(self) -> Grpo:
        """The settings of a rollout."""
        return self.recipe.grpo

    def steps_left(self, rows: Rows, cursor: Cursor, saved: Mapping[str, Any]) -> int:
        section = self.rollouts
        left = max(0, (rows.total_rows() or 0) - rows.rows_before(cursor))
        whole, rest = divmod(left, section.prompts_per_step)
        steps = whole * self._steps(section.prompts_per_step * section.group_size)
        begun = self._steps(saved["sequences"]) - saved["done"] if saved.get("sequences") else 0
        return begun + steps + self._steps(rest * section.group_size)

    def before_step(self, cursor: Cursor) -> None:
        """Draws a rollout where the updates of the last one are done."""
        if not self._is_begun() and not self._is_over:
            rollout = self._collector.collect(self._position.cursor or cursor, self._position.step)
            self._is_over = rollout is None
            if rollout is not None:
                self._adopt(rollout)

    def batches(self, policy: Policy, rows: Rows, cursor: Cursor) -> Iterator[GlobalBatch]:
        """The minibatches of the rollouts. `samples` are completions of the buffer, this dp rank's share of them."""
        while not self._is_over:
            chosen = self._minibatch()
            samples = self._shares(self._buffer, chosen)[policy.mesh.dp_rank]
            yield GlobalBatch([], samples, len(chosen), self._position.cursor or cursor, self._position.epochs)

    def batch(self, rows: GlobalBatch, split: str = "train") -> Batch:
        return self._buffer.batch(rows.samples)

    def after_step(self, policy: Policy, step: int) -> None:
        self._position.done += 1
        self._position.step = step
        super().after_step(policy, step)

    def state(self) -> dict[str, Any]:
        """Return the run's position within a rollout. A rollout whose updates are over is not kept."""
        place = asdict(self._position)
        place["cursor"] = list(self._position.cursor or (0, 0))
        if not self._is_begun():
            return place
        buffer = self._buffer
        sizes = {"sequences": len(buffer), "tokens": len(buffer.tokens), "per_token": list(buffer.per_token)}
        routed = {} if buffer.routed is None else {"routed": list(buffer.routed.shape[1:])}
        return place | sizes | routed | {"measured": self._measured, "settings": self._settings()}

    def tensors(self) -> dict[str, Tensor]:
        """The buffer's [N], [T] and [T, ..], beside what else is kept."""
        kept = {f"buffer.{name}": tensor for name, tensor in self._buffer.tensors().items()} if self._is_begun() else {}
        return kept | super().tensors()

    def load(self, state: Mapping[str, Any]) -> None:
        """Raises UserError where the recipe has changed what the updates of a rollout that is begun depend on."""
        changed = self._changed(state) if "sequences" in state else []
        if changed:
            raise UserError(
                f"the checkpoint of step {state['step']} stands within a rollout, whose updates go on as they began, "
                "and the recipe has changed them:\n  "
                + "\n  ".join(changed)
                + "\nTake the change back, resume from a step between two rollouts (checkpoint.resume=..), or begin "
                "another run with these weights (checkpoint.init_from, run.name)"
            )
        self._position = Position(**{name: state[name] for name in asdict(self._position)})
        self._position.cursor = Cursor(*state["cursor"]) if state["rollout"] else None
        self._measured = dict(state.get("measured", {}))
        if "sequences" in state:
            self._buffer = Buffer.empty(state["sequences"], state["tokens"], state["per_token"], state.get("routed"))

    def _settings(self) -> dict[str, Any]:
        """Return what may not change within a rollout: its updates are counted."""
        return {"train.global_batch": self.recipe.train.batch}

    def _changed(self, state: Mapping[str, Any]) -> list[str]:
        """Return what a state within a rollout and the recipe say differently."""
        saved, own = state["settings"], self._settings()
        return [f"{key}: {saved[key]} -> {own[key]}" for key in own if saved[key] != own[key]]

    def _is_begun(self) -> bool:
        return self._position.done < self._steps(len(self._buffer))

    def _steps(self, sequences: int) -> int:
        """Optimizer steps that a rollout of so many completions makes."""
        return -(-sequences // self.recipe.train.batch) * self.rollouts.updates_per_rollout

    def _shares(self, buffer: Buffer, chosen: Sequence[int]) -> list[list[int]]:
        """Return these completions dealt out over the data-parallel ranks by the FLOPs of training on them."""
        model, ranks = self.policy.model, self.policy.mesh.dp_size
        lengths = buffer.lengths[list(chosen)].tolist()
        costs = [length * flops_per_token(model, length) for length in lengths]
        # Fixed micro-batches are rows: a rank takes no more of them than its part.
        most = -(-len(chosen) // ranks) if isinstance(self.micro_rows, int) else None
        return [[chosen[place] for place in share] for share in deal(costs, ranks, most)]

    def _minibatch(self) -> list[int]:
        """The completions of this step, over all ranks; those that do not count are left out."""
        total, size = len(self._buffer), self.recipe.train.batch
        pass_number, part = divmod(self._position.done, -(-total // size))
        chosen = self._order(total, pass_number)[part * size : (part + 1) * size].tolist()
        counted = self._buffer.counted.tolist()
        return sorted(index for index in chosen if counted[index])

    def _order(self, total: int, pass_number: int) -> Tensor:
        """Return the order in which a pass takes its completions, [total]."""
        return torch.arange(total)

    def _adopt(self, rollout: "Rollout") -> None:
        """Take a rollout over."""
        self._buffer, self._measured = rollout.buffer, rollout.measured
        self._position.rollout, self._position.done = self._position.rollout + 1, 0
        self._position.cursor, self._position.epochs = rollout.cursor, rollout.epochs
