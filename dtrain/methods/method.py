"""What every method can do; a method's own file says how it differs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dtrain.batch import Batch, collate
from dtrain.config.schema import Dpo, Grpo, Kto, Recipe
from dtrain.data import Batches, Cursor, GlobalBatch, Rows
from dtrain.data.order import deal
from dtrain.errors import UserError
from dtrain.methods.facts import facts_of
from dtrain.methods.rollout_buffer import Buffer, Position
from dtrain.metrics import Recorder
from dtrain.policy import Batching, DynamicShapes, Packed, Policy
from dtrain.policy.score import LogprobSource, Loss

if TYPE_CHECKING:
    from dtrain.methods.collect import Collector, Rollout


@dataclass(frozen=True)
class RunContext:
    """What a method may use of the run: its metrics, its directory, digests of what it reads by key, as a resume
    compares them, and a stack that closes what the method opens.

    ask_stop: whether this rank was asked to stop. What takes long between two steps may then raise Interrupted, on
    every rank; the run is saved as the last step left it.
    """

    metrics: Recorder
    path: Path
    identities: Mapping[str, str]
    stack: ExitStack
    ask_stop: Callable[[], bool]


class Method:
    """The base of the methods: from rows to a batch, from a batch to a loss, from a loss's sums to what is logged.

    A step goes before_step → batches → batch → prepare → Policy.train with the loss that prepare gives → fields.

    What a method keeps from step to step and a resumed run needs goes through three functions; one that keeps nothing
    leaves them as they are.

    state()      its numbers and words as JSON, the same on every rank
    tensors()    its tensors by name: plain ones (the same on every rank), DTensors, or a `checkpoint.pieces.Piece` of
                 what the ranks hold together; all ranks give the same names
    load(state)  for a resume, before the first step: takes `state()` of the save back and makes room, so that
                 `tensors()` gives tensors of the saved sizes, which are then filled in place. On another world size
                 the ranks may ask for other pieces of them than were saved.
    """

    # "start" where `begin` wants the weights that training starts from, on a resume too; "base": without an adapter.
    needs_start: str | None = None

    def __init__(self, recipe: Recipe):
        self.recipe = recipe
        self.facts = facts_of(recipe)  # what is known of the method before anything is built
        self.kind = self.facts.kind  # what a sample of the data is: examples, pairs, labelled or prompts
        self._rows_of_a_sample = self.facts.rows_of_a_sample(recipe)

    @property
    def micro_rows(self) -> int | Batching:
        """Rows of a batch that make one micro-batch, or how else they are made."""
        of_a_sample = self._rows_of_a_sample
        rows = self.recipe.train.micro_batch * of_a_sample
        is_dynamic = self.facts.is_dynamic(self.recipe)
        return DynamicShapes(rows * self.recipe.data.max_length, of_a_sample) if is_dynamic else rows

    @property
    def choices(self) -> list[str]:
        """What the terminal is told of the method's sizes when a run starts."""
        rows = self.micro_rows
        if not isinstance(rows, DynamicShapes):
            return []
        return [f"micro-batches: rows of like length, up to {rows.tokens:,} tokens with their padding"]

    def examine(self, columns: Mapping[str, Sequence[str]], samples: Mapping[str, int]) -> None:
        """Raise UserError for what the method cannot begin with, as far as that shows before a model is built. columns:
        of the rows of each split, where these are prompts. samples: how many each split has, as far as known."""

    def refuse_device(self, device: torch.device) -> None:
        """Raise UserError where the method's section asks for what `device` does not do."""

    def begin(self, policy: Policy, splits: Mapping[str, Rows], run: RunContext) -> None:
        """Called once, when `policy` holds the weights that training starts from, before the first step and before a
        resume. splits: the rows of `train`, and of `val` where there are some. Collective."""

    def steps_left(self, rows: Rows, cursor: Cursor, saved: Mapping[str, Any]) -> int:
        """Optimizer steps from `cursor` to the end of `train.epochs`: whole batches and a last one that may be short.
        saved: what `state` gave at the start, empty for a fresh one."""
        left = max(0, (rows.total_rows() or 0) - rows.rows_before(cursor))
        return -(-left // self.recipe.train.batch)

    def before_step(self, cursor: Cursor) -> None:
        """What the next step's batch needs that is no data: a rollout. cursor: where the run began. Collective. May
        raise Interrupted, on every rank, where the run is asked to stop, and Unavailable."""

    def batches(self, policy: Policy, rows: Rows, cursor: Cursor) -> Iterator[GlobalBatch]:
        """This dp rank's part of every step from `cursor` on, each with where the next one begins."""
        return iter(
            Batches(
                rows,
                global_batch=self.recipe.train.batch,
                dp_rank=policy.mesh.dp_rank,
                dp_size=policy.mesh.dp_size,
                cursor=cursor,
                num_workers=self.recipe.data.num_workers,
                by_length=self.facts.is_dynamic(self.recipe),
            )
        )

    def batch(self, rows: GlobalBatch, split: str = "train") -> Batch:
        """A dp rank's rows of the data as a batch [n, S] on the host."""
        return collate(rows.rows)

    def prepare(self, policy: Policy, batch: Batch) -> tuple[Batch, Loss]:
        """What must be known before the backward: the batch with the streams that the loss reads, and the loss.
        Collective: a rank without rows takes part."""
        return batch, self.loss

    def loss(
        self, source: LogprobSource, batch: Batch, global_seqs: Tensor, global_tokens: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """This micro-batch's share of the global batch's loss, a scalar, and of the sums that `fields` and `val_fields`
        read, scalars by name."""
        raise NotImplementedError(f"{type(self).__name__} names no loss")

    def after_step(self, policy: Policy, step: int) -> None:
        """Called after each optimizer step."""

    def fields(self, sums: Mapping[str, float]) -> dict[str, float]:
        """A training row's fields of metrics.jsonl, beside `loss`, from the sums over the global batch."""
        return {}

    def validate(self, policy: Policy, rows: Rows) -> dict[str, float]:
        """A validation row's fields: the loss over all of `rows`, summed over all batches and ranks, divided once."""
        sums: dict[str, float] = {}
        for batch, loss in self.validation(policy, rows):
            for name, value in policy.train(batch, loss, eval_mode=True, mbs=self.micro_rows)["sums"].items():
                sums[name] = sums.get(name, 0.0) + value.item()
        return self.val_fields(sums)

    def validation(self, policy: Policy, rows: Rows) -> Iterator[tuple[Batch, Loss]]:
        """`val_batches`, each as `prepare` gives it."""
        return (self.prepare(policy, part) for part in self.val_batches(policy, rows))

    def val_batches(self, policy: Policy, rows: Rows) -> Iterator[Batch]:
        """This dp rank's part of all of `rows`, as many batches on every rank."""
        size, mesh = self.recipe.train.batch, policy.mesh
        by_length = self.facts.is_dynamic(self.recipe)
        parts = Batches(rows, global_batch=size, dp_rank=mesh.dp_rank, dp_size=mesh.dp_size, by_length=by_length)
        return (self.batch(part, "val") for part in parts)

    def val_fields(self, sums: Mapping[str, float]) -> dict[str, float]:
        """A validation row's fields, `val_loss` among them, from the sums over the whole validation set."""
        raise NotImplementedError(f"{type(self).__name__} names no validation loss")

    def state(self) -> dict[str, Any]:
        return {}

    def tensors(self) -> dict[str, Tensor]:
        """By name, [...] each; see the class."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        pass


class MethodWithReference(Method):
    """A method whose loss may compare with a reference: weights that stand still and are read again where they came
    from, or, with the section's `sync_every`, follow the policy's and come with the checkpoint."""

    def __init__(self, recipe: Recipe, section: Dpo | Kto | Grpo):
        super().__init__(recipe)
        self._section = section
        if self.facts.needs_reference(recipe) and section.sync_every is None and section.reference in ("start", "base"):
            self.needs_start = section.reference
        self._moving: Mapping[str, Tensor] = {}

    def keep_reference(self, policy: Policy) -> None:
        """The weights as they are, those without adapters, or those of another model of the same shapes. Collective."""
        named, moves = self._section.reference, self._section.sync_every is not None
        path = None if named in ("start", "base") else named
        policy.init_reference_model(path, base=named == "base")
        if moves and policy.reference is not None:
            self._moving = policy.reference.tensors

    def after_step(self, policy: Policy, step: int) -> None:
        every = self._section.sync_every
        if every is not None and policy.reference is not None and step % every == 0:
            policy.reference.follow(self._section.sync_mix)

    def tensors(self) -> dict[str, Tensor]:
        """The reference's [...] by name, where it moves."""
        return {f"reference.{name}": tensor for name, tensor in self._moving.items()}


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
        return Packed(self.facts.longest_row(self.recipe)) if self.recipe.data.packing else super().micro_rows

    @property
    def rollouts(self) -> Grpo:
        """What a rollout is."""
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
        """Where in a rollout the run is. A rollout whose updates are over is not kept."""
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
        kept = {f"buffer.{name}": one for name, one in self._buffer.tensors().items()} if self._is_begun() else {}
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
        """What may not change within a rollout: its updates are counted."""
        return {"train.global_batch": self.recipe.train.batch}

    def _changed(self, state: Mapping[str, Any]) -> list[str]:
        """What a state within a rollout and the recipe say differently."""
        saved, own = state["settings"], self._settings()
        return [f"{key}: {saved[key]} -> {own[key]}" for key in own if saved[key] != own[key]]

    def _is_begun(self) -> bool:
        return self._position.done < self._steps(len(self._buffer))

    def _steps(self, sequences: int) -> int:
        """Optimizer steps that a rollout of so many completions makes."""
        return -(-sequences // self.recipe.train.batch) * self.rollouts.updates_per_rollout

    def _shares(self, buffer: Buffer, chosen: Sequence[int]) -> list[list[int]]:
        """These completions dealt out over the data-parallel ranks by the FLOPs of training on them."""
        model, ranks = self.policy.model, self.policy.mesh.dp_size
        lengths = buffer.lengths[list(chosen)].tolist()
        costs = [length * model.flops_per_token(length) for length in lengths]
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
        """In which order a pass takes its completions, [total]."""
        return torch.arange(total)

    def _adopt(self, rollout: "Rollout") -> None:
        """Take a rollout over."""
        self._buffer, self._measured = rollout.buffer, rollout.measured
        self._position.rollout, self._position.done = self._position.rollout + 1, 0
        self._position.cursor, self._position.epochs = rollout.cursor, rollout.epochs
