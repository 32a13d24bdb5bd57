"""The base classes of the methods; a method's own file says how it differs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dtrain.base.batch import Batch, collate
from dtrain.base.run_context import RunContext
from dtrain.data import Batches, Cursor, GlobalBatch, Rows
from dtrain.methods.spec import MethodSpec, spec_of
from dtrain.policy import Batching, DynamicShapes, Packed, Policy
from dtrain.policy.score import LogprobSource, Loss
from dtrain.recipe.schema import Dpo, Grpo, Kto, Recipe


@dataclass(eq=False)
class BatchSource:
    """Source of a method's batches: the data's rows, in their order. state, tensors, load: as a method's."""

    recipe: Recipe
    spec: MethodSpec

    def steps_left(self, rows: Rows, cursor: Cursor, saved: Mapping[str, Any]) -> int:
        """Optimizer steps from `cursor` to the end of `train.epochs`: whole batches and a last one that may be short.
        saved: what the method's `state` gave at the start, empty for a fresh one."""
        left = max(0, (rows.total_rows() or 0) - rows.rows_before(cursor))
        return -(-left // self.recipe.train.batch)

    def batches(self, policy: Policy, rows: Rows, cursor: Cursor) -> Iterator[GlobalBatch]:
        """This dp rank's part of every step from `cursor` on, each with where the next one begins."""
        return iter(self.deal(policy, rows, cursor=cursor, num_workers=self.recipe.data.num_workers))

    def deal(self, policy: Policy, rows: Rows, **more: Any) -> Batches:
        """This dp rank's part of `rows`. more: of `Batches`."""
        size, mesh, by_length = self.recipe.train.batch, policy.mesh, self.spec.is_dynamic(self.recipe)
        return Batches(rows, global_batch=size, dp_rank=mesh.dp_rank, dp_size=mesh.dp_size, by_length=by_length, **more)

    def batch(self, rows: GlobalBatch) -> Batch:
        """A dp rank's rows of the data as a batch [n, S] on the host."""
        return collate(rows.rows)

    def after_step(self, step: int) -> None:
        """Called after each optimizer step."""

    def state(self) -> dict[str, Any]:
        return {}

    def tensors(self) -> dict[str, Tensor]:
        """Return tensors by name, [...] each."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        pass


class Method:
    """The base of the methods: from rows to a batch, from a batch to a loss, from a loss's sums to what is logged.

    A step goes before_step → source.batches → batch → prepare → Policy.train with the loss that prepare gives → fields.

    What a method keeps from step to step and a resumed run needs goes through three functions; one that keeps nothing
    leaves them as they are.

    state()      its numbers and words as JSON, the same on every rank
    tensors()    its tensors by name: plain ones (the same on every rank), DTensors, or a `checkpoint.dcp.pieces.Piece`
    of
                 what the ranks hold together; all ranks give the same names
    load(state)  for a resume, before the first step: takes `state()` of the save back and makes room, so that
                 `tensors()` gives tensors of the saved sizes, which are then filled in place. On another world size
                 the ranks may ask for other pieces of them than were saved.
    """

    # "start" where `begin` wants the weights that training starts from, on a resume too; "base": without an adapter.
    needs_start: str | None = None

    def __init__(self, recipe: Recipe):
        self.recipe = recipe
        self.spec = spec_of(recipe)  # known before anything is built
        self.source = BatchSource(recipe, self.spec)
        self.kind = self.spec.kind  # what a sample of the data is: examples, pairs, labelled or prompts
        # Rows of a batch that make one micro-batch, or how else they are made. Completions are packed as they come: a
        # micro-batch is one row of micro_batch · max_length tokens.
        self.micro_rows: int | Batching = recipe.train.micro_batch * self.spec.rows_of_a_sample(recipe)
        if self.kind == "prompts" and recipe.data.packing:
            self.micro_rows = Packed(self.spec.longest_row(recipe))
        elif self.spec.is_dynamic(recipe):
            tokens = self.micro_rows * recipe.data.max_length
            self.micro_rows = DynamicShapes(tokens, self.spec.rows_of_a_sample(recipe))

    @property
    def choices(self) -> list[str]:
        """Lines for the terminal on the method's sizes when a run starts."""
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

    def before_step(self, cursor: Cursor) -> None:
        """Prepare what the next step's batch needs that is no data: a rollout. cursor: where the run began. Collective.
        May raise Interrupted, on every rank, where the run is asked to stop, and Unavailable."""

    def batch(self, rows: GlobalBatch, split: str = "train") -> Batch:
        """A dp rank's part of a step as a batch [n, S] on the host."""
        return self.source.batch(rows)

    def prepare(self, policy: Policy, batch: Batch) -> tuple[Batch, Loss]:
        """Return what must be known before the backward: the batch with the streams that the loss reads, and the loss.
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
        self.source.after_step(step)

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
        return (self.batch(part, "val") for part in self.source.deal(policy, rows))

    def val_fields(self, sums: Mapping[str, float]) -> dict[str, float]:
        """A validation row's fields, `val_loss` among them, from the sums over the whole validation set."""
        raise NotImplementedError(f"{type(self).__name__} names no validation loss")

    def state(self) -> dict[str, Any]:
        return self.source.state()

    def tensors(self) -> dict[str, Tensor]:
        """Return tensors by name, [...] each; see the class."""
        return self.source.tensors()

    def load(self, state: Mapping[str, Any]) -> None:
        self.source.load(state)


class MethodWithReference(Method):
    """A method whose loss may compare with a reference: weights that stand still and are read again where they came
    from, or, with the section's `sync_every`, follow the policy's and come with the checkpoint."""

    def __init__(self, recipe: Recipe, section: Dpo | Kto | Grpo):
        super().__init__(recipe)
        self._section = section
        if self.spec.needs_reference(recipe) and section.sync_every is None and section.reference in ("start", "base"):
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
        super().after_step(policy, step)
        every = self._section.sync_every
        if every is not None and policy.reference is not None and step % every == 0:
            policy.reference.follow(self._section.sync_mix)

    def tensors(self) -> dict[str, Tensor]:
        """The reference's [...] by name, where it moves."""
        return super().tensors() | {f"reference.{name}": tensor for name, tensor in self._moving.items()}
