"""The base of the methods, and `RunContext`, the part of a run that a method uses.

A method's own file has its section of the recipe and how it differs from the base.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from dtrain.base.batch import Batch, collate, collate_with_images
from dtrain.base.errors import Problem, UserError
from dtrain.base.ranges import format_value
from dtrain.data.model_directory import ModelDirectory
from dtrain.data.rows.rows import Batches, Cursor, GlobalBatch, Rows
from dtrain.policy import Batching, DynamicShapes, Packed, Policy
from dtrain.policy.score import LogprobSource, Loss
from dtrain.recipe.schema import Recipe
from dtrain.recipe.world import choose_global_batch, replace_auto

if TYPE_CHECKING:
    from dtrain.data.formats.labels import Label
    from dtrain.data.formats.prompts import PromptOptions
    from dtrain.models.common.config import ModelConfig
    from dtrain.policy.other_models import RewardModel, Teacher
    from dtrain.policy.reference import Reference


class RunLog(Protocol):
    """Rows and lines that a run writes; `dtrain.training.metrics.Recorder` is one."""

    def say(self, text: str) -> None: ...

    def log(self, row: Mapping[str, int | float], step: int) -> None: ...

    def write_rows(self, name: str, step: int, rows: Iterable[Mapping[str, Any]]) -> None: ...

    def drop_answers(self, step: int, name: str) -> None: ...


@dataclass(frozen=True)
class RunContext:
    """The part of a run that a method, its engines and its evaluations use.

    Attributes:
        metrics: Writes rows and lines.
        path: The run's directory.
        identities: Digests of everything that the run reads at its start, by the keys that a resume compares.
        source: The directory of model.path, with the run's tokenizer and chat template.
        others: The directories of the method's other models, by key.
        stack: Closes what is opened for the run when the run ends.
        should_stop: Returns whether this rank was asked to stop. Work that takes long between two steps may then raise
            Interrupted, on every rank, and the run is saved as the last step left it.
    """

    metrics: RunLog
    path: Path
    identities: Mapping[str, str]
    source: ModelDirectory
    other_models: Mapping[str, ModelDirectory]
    stack: ExitStack
    should_stop: Callable[[], bool]


@dataclass(frozen=True)
class AttachedModels:
    """Frozen models on the policy's mesh that a method needs in its steps.

    Attributes:
        reference: The weights that the loss compares with.
        teacher: The model whose distribution is learned.
        reward_model: The model that rates completions.
    """

    reference: "Reference | None" = None
    teacher: "Teacher | None" = None
    reward_model: "RewardModel | None" = None

    def tensors(self) -> dict[str, list[Tensor]]:
        """Return the tensors of each model by its name: "reference", "teacher" or "reward model"."""
        tensors: dict[str, list[Tensor]] = {}
        if self.reference is not None:
            tensors["reference"] = list(self.reference.tensors.values())
        if self.teacher is not None:
            tensors["teacher"] = list(self.teacher.model.parameters())
        if self.reward_model is not None:
            tensors["reward model"] = list(self.reward_model.model.parameters())
        return tensors


@dataclass(eq=False)
class BatchSource:
    """Source of a method's batches: the data's rows, in their order. state, tensors, load: as a method's."""

    method: "Method"

    @property
    def recipe(self) -> Recipe:
        return self.method.recipe

    def remaining_steps(self, rows: Rows, cursor: Cursor, saved: Mapping[str, Any]) -> int:
        """Optimizer steps from `cursor` to the end of `train.epochs`: whole batches and a last one that may be short.
        saved: what the method's `state` gave at the start, empty for a fresh one."""
        left = max(0, (rows.total_rows() or 0) - rows.rows_before(cursor))
        return -(-left // self.recipe.train.num_batch_rows)

    def batches(self, policy: Policy, rows: Rows, cursor: Cursor) -> Iterator[GlobalBatch]:
        """This dp rank's part of every step from `cursor` on, each with where the next one begins."""
        return iter(self.build_batches(policy, rows, cursor=cursor, num_workers=self.recipe.data.num_workers))

    def build_batches(self, policy: Policy, rows: Rows, **more: Any) -> Batches:
        """This dp rank's part of `rows`. more: of `Batches`."""
        size, mesh, balance_lengths = self.recipe.train.num_batch_rows, policy.mesh, self.method.is_dynamic()
        return Batches(
            rows, global_batch=size, dp_rank=mesh.dp_rank, dp_size=mesh.dp_size, balance_lengths=balance_lengths, **more
        )

    def batch(self, rows: GlobalBatch) -> Batch:
        """A dp rank's rows of the data as a batch [n, S] on the host; `images`: their `RowImages`, where the data have
        any."""
        has_images = bool(rows.rows) and "pixels" in rows.rows[0]
        return collate_with_images(rows.rows) if has_images else collate(rows.rows)

    def after_step(self, step: int) -> None:
        """Called after each optimizer step."""

    def state(self) -> dict[str, Any]:
        return {}

    def tensors(self) -> dict[str, Tensor]:
        """Return tensors by name, [...] each."""
        return {}

    def check_state(self, state: Mapping[str, Any], changed: Sequence[str] = ()) -> None:
        """Raise UserError if this source cannot go on from a saved `state`.

        Args:
            state: State of the method in the checkpoint.
            changed: Changes that the method has found itself, one line each, which a resume does not allow.
        """

    def load(self, state: Mapping[str, Any]) -> None:
        pass


@dataclass
class NoKeys:
    """The section of a method without keys."""


class Method:
    """The base of the methods. Beforehand it answers what the recipe's check, the preview, a plan and the start of a
    run must know; in a run it goes from rows to a batch, from a batch to a loss, from its sums to what is logged.

    It is also made of recipes that are not checked yet, so its constructor neither fails nor costs. Section: the
    dataclass of its keys, which a recipe has under the method's name. section: their values.

    about: the method in words, for a reader. kind: what a sample of the data is: examples, pairs, labelled (replies
    that are wanted or not) or prompts. measures: its fields of metrics.jsonl (training/metrics/records.py), next to
    those of all methods. curves: fields that show what was learned, and their names for a reader. best: what of
    `recipe.schema.BEST_METRICS` it measures. more_steps_hint: what of its section makes a pass more steps.
    adapter_learning_rates: the learning rate below which a fresh adapter hardly learns, and a usual one. models: the
    keys of the section that may name models, whose ends say of which kind (`training.registry.TEACHER`,
    `REWARD_MODEL`). references: what else a reference may be.

    A step goes before_step → source.batches → batch → prepare → Policy.forward_backward with the loss that prepare
    returns → Policy.optimizer_step → fields.

    What a method keeps from step to step and a resumed run needs goes through three functions; one that keeps nothing
    leaves them as they are.

    state()      its numbers and words as JSON, the same on every rank
    tensors()    its tensors by name: plain ones (the same on every rank), DTensors, or a `checkpoint.dcp.shards.Piece`
                 of what the ranks hold together; all ranks give the same names
    load(state)  for a resume, before the first step: takes `state()` of the save back and makes room, so that
                 `tensors()` gives tensors of the saved sizes, which are then filled in place. On another world size
                 the ranks may ask for other pieces of them than were saved.

    `check_state(state)` comes before `load`, also in `dtrain validate`: it raises UserError for a state that this
    method, with this recipe, did not write or cannot go on from.
    """

    Section: type = NoKeys
    about = ""
    kind = "examples"
    measures: tuple[str, ...] = ()
    curves: Mapping[str, str] = MappingProxyType({"loss": "loss", "val_loss": "validation loss"})
    best: tuple[str, ...] = ("val_loss", "loss")
    more_steps_hint: str | None = None
    adapter_learning_rates = (5e-5, "2e-4")
    models: tuple[str, ...] = ()
    references = "start, base"

    def __init__(self, recipe: Recipe):
        self.recipe = replace_auto(recipe)
        self.section = recipe.section

    def variant(self) -> str | None:
        """Return the name of the variant that the section selects, a key of `training.registry.VARIANTS`; None if the
        class itself is meant."""
        return None

    def missing(self) -> list[Problem]:
        """Return problems of required keys that are missing in the section."""
        return []

    def problems(self) -> list[Problem]:
        """Check the section, and other keys that it excludes. Ranges are checked elsewhere."""
        return []

    def completion_length_problems(self) -> list[Problem]:
        """Check that completions of the section's `sampling` leave room for their prompts."""
        new, longest = self.section.sampling.max_new_tokens, self.recipe.data.max_length
        if longest < 2 or new < longest:
            return []
        key = f"{self.recipe.method}.sampling.max_new_tokens"
        text = f"{key}={new} leaves no room for a prompt within data.max_length={longest}, which is for both together"
        return [Problem(key, text, "Lower the first or raise the second")]

    def model_problems(self, model: "ModelConfig") -> list[Problem]:
        """Check the section for the model that is trained."""
        return []

    def format_problem(self, format: str) -> str | None:
        """Return why rows of a format (`data.*.format`) are not for this method; None: they are."""
        if format == "question":
            return "a question has no answer to train on; method=grpo draws its own"
        if format == "preference":
            return f"method={self.recipe.method} does not train on pairs; set method=dpo"
        return None

    def image_problems(self) -> list[Problem]:
        """Return the reasons why rows with images cannot be used."""
        text = f"method={self.recipe.method} trains only on text"
        return [Problem("method", text, "Set method=sft, dpo or grpo, or remove the images")]

    def other_models(self) -> list[tuple[str, str]]:
        """Key and path of the models that are needed beside the one that is trained."""
        return []

    def code(self) -> list[tuple[str, str | None, str]]:
        """(key, name or import path, what it is) of the code that the section may name."""
        return []

    def prompts(self) -> "PromptOptions | None":
        """Return how the data's prompts are made, where it is prompts. Raises UserError for tools whose source does
        not tell."""
        return None

    def labels(self) -> int | None:
        """Outputs of the head that the model has in place of the vocabulary's; None: it has that one."""
        return None

    def label(self) -> "Label | None":
        """The number of each of the data's rows that the loss reads."""
        return None

    def rows_per_sample(self) -> int:
        """Rows of a batch that one of `train.global_batch` is: a pair that is not packed is two."""
        return 2 if self.kind == "pairs" and not self.recipe.data.packing else 1

    def is_dynamic(self) -> bool:
        """Return whether a number of tokens bounds a micro-batch, not one of rows."""
        return self.recipe.train.dynamic_batch

    def automatic_batch(self, rows: int) -> int:
        """Return what `train.global_batch=auto` is, where the first pass over the data has so many rows."""
        return choose_global_batch(rows)

    def row_length(self) -> int:
        """Tokens of a full row: a packed row of pairs holds two sequences' worth."""
        return self.recipe.data.max_length * (2 if self.kind == "pairs" and self.recipe.data.packing else 1)

    def max_row_length(self) -> int:
        """Tokens of the longest row that a forward may be given. Packed completions of a micro-batch are one row."""
        is_packed = self.kind == "prompts" and self.recipe.data.packing
        return self.row_length() * (self.recipe.train.num_micro_batch_rows if is_packed else 1)

    def needs_reference(self) -> bool:
        """Return whether the loss compares with a reference."""
        return False

    def keeps_reference_weights(self) -> bool:
        """Return whether the reference's weights stay on the devices beside the policy's."""
        return self.needs_reference()

    def sends_weights(self) -> bool:
        """Return whether updated weights leave the run over a process group that reaches beyond this host."""
        return False

    @property
    def required_start_weights(self) -> str | None:
        """Return "start" where `begin` wants the weights that training starts from, on a resume too; "base": without an
        adapter."""
        return None

    @cached_property
    def source(self) -> BatchSource:
        """Source of the batches."""
        return BatchSource(self)

    @cached_property
    def micro_rows(self) -> int | Batching:
        """Rows of a batch that make one micro-batch, or how else they are made. Completions are packed as they come: a
        micro-batch is one row of micro_batch · max_length tokens."""
        if self.kind == "prompts" and self.recipe.data.packing:
            return Packed(self.max_row_length())
        of_a_sample = self.rows_per_sample()
        rows = self.recipe.train.num_micro_batch_rows * of_a_sample
        return DynamicShapes(rows * self.recipe.data.max_length, of_a_sample) if self.is_dynamic() else rows

    @property
    def choices(self) -> list[str]:
        """Lines for the terminal on the method's sizes when a run starts."""
        rows = self.micro_rows
        if not isinstance(rows, DynamicShapes):
            return []
        return [f"micro-batches: rows of like length, up to {rows.tokens:,} tokens with their padding"]

    def check_data(self, columns: Mapping[str, Mapping[str, Any]], samples: Mapping[str, int]) -> None:
        """Check what the method needs to begin, as far as possible before a model is built.

        Args:
            columns: By split, a row with every column of the prompts. Empty for other kinds of rows.
            samples: By split, the number of samples, as far as known.

        Raises:
            UserError: If the method cannot begin.
        """

    def check_device_supported(self, device: torch.device) -> None:
        """Raise UserError where the method's section asks for what `device` does not do."""

    def attach_models(self, policy: Policy, others: Mapping[str, "ModelDirectory"]) -> AttachedModels:
        """Build the frozen models that the method needs in its steps, and keep them.

        Called by `begin`, and by a plan, whose policy has no weights.

        Args:
            policy: The policy, with the weights that training starts from.
            others: The directories of `other_models`, by key.

        Raises:
            UserError: If a model cannot be read.

        Collectives:
            Those of building and reading the models.
        """
        return AttachedModels()

    def begin(self, policy: Policy, splits: Mapping[str, Rows], run: RunContext) -> None:
        """Called once, when `policy` holds the weights that training starts from, before the first step and before a
        resume. splits: the rows of `train`, and of `val` where there are some. Collective."""

    def before_step(self, cursor: Cursor) -> None:
        """Prepare what the next step's batch needs that is no data: a rollout. cursor: where the run began. Collective.
        May raise Interrupted, on every rank, where the run is asked to stop, and ServiceUnavailable."""

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
        """This micro-batch's share of the global batch's loss, a scalar, and of the sums that `train_metrics` and
        `val_metrics` read, scalars by name."""
        raise NotImplementedError(f"{type(self).__name__} names no loss")

    def after_step(self, policy: Policy, step: int) -> None:
        """Called after each optimizer step."""
        self.source.after_step(step)

    def train_metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """A training row's fields of metrics.jsonl, beside `loss`, from the sums over the global batch."""
        return {}

    def validate(self, policy: Policy, rows: Rows) -> dict[str, float]:
        """A validation row's fields: the loss over all of `rows`, summed over all batches and ranks, divided once."""
        sums: dict[str, float] = {}
        for batch, loss in self.validation(policy, rows):
            for name, value in policy.evaluate(batch, loss, self.micro_rows).metrics.items():
                sums[name] = sums.get(name, 0.0) + value
        return self.val_metrics(sums)

    def validation(self, policy: Policy, rows: Rows) -> Iterator[tuple[Batch, Loss]]:
        """`val_batches`, each as `prepare` gives it."""
        return (self.prepare(policy, part) for part in self.val_batches(policy, rows))

    def val_batches(self, policy: Policy, rows: Rows) -> Iterator[Batch]:
        """This dp rank's part of all of `rows`, as many batches on every rank."""
        return (self.batch(part, "val") for part in self.source.build_batches(policy, rows))

    def val_metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """A validation row's fields, `val_loss` among them, from the sums over the whole validation set."""
        raise NotImplementedError(f"{type(self).__name__} names no validation loss")

    def state(self) -> dict[str, Any]:
        return self.source.state()

    def tensors(self) -> dict[str, Tensor]:
        """Return tensors by name, [...] each; see the class."""
        return self.source.tensors()

    def check_state(self, state: Mapping[str, Any], changed: Sequence[str] = ()) -> None:
        """Raise UserError if the method cannot go on from the `state` of a checkpoint.

        Needs the recipe only, so `dtrain validate` calls it too. `changed` is as of `BatchSource.check_state`.
        """
        self.source.check_state(state, changed)

    def load(self, state: Mapping[str, Any]) -> None:
        """Take back a `state` that `check_state` has accepted."""
        self.source.load(state)


class MethodWithReference(Method):
    """A method whose loss may compare with a reference: weights that stand still and are read again where they came
    from, or, with the section's `sync_every`, follow the policy's and come with the checkpoint. Its section has
    `reference`, `sync_every` and `sync_mix`."""

    models: tuple[str, ...] = ("reference",)
    _moving: Mapping[str, Tensor] = MappingProxyType({})

    @property
    def _reference_moves(self) -> bool:
        return self.needs_reference() and self.section.sync_every is not None

    @property
    def required_start_weights(self) -> str | None:
        stands = self.needs_reference() and self.section.sync_every is None
        return self.section.reference if stands and self.section.reference in ("start", "base") else None

    def other_models(self) -> list[tuple[str, str]]:
        path = self.section.reference
        return [] if path in (None, "none", "start", "base") else [(f"{self.recipe.method}.reference", str(path))]

    def base_problems(self) -> list[Problem]:
        """Check `reference: base`, the model without its adapter."""
        if self.section.reference != "base" or self.recipe.lora is not None:
            return []
        key = f"{self.recipe.method}.reference"
        text = f"{key}=base is the model without its adapter, and the recipe has no adapter"
        return [Problem(key, text, f"Set {key}=start, or lora={{}}")]

    def loss_on_problems(self, trained: str = "the completion") -> list[Problem]:
        """Refuse a `data.loss_on` that has no effect, because the method always trains the tokens `trained`."""
        loss_on = self.recipe.data.loss_on
        if loss_on == "assistant":
            return []
        method = self.recipe.method
        text = f"data.loss_on={loss_on} has no effect with method={method}, which trains {trained}"
        return [Problem("data.loss_on", text, "Leave it out")]

    def attach_models(self, policy: Policy, others: Mapping[str, "ModelDirectory"]) -> AttachedModels:
        """Override `Method.attach_models`: the reference, if its weights stay on the devices."""
        if self.keeps_reference_weights():
            self.build_reference(policy)
            return AttachedModels(reference=policy.reference)
        return AttachedModels()

    def build_reference(self, policy: Policy) -> None:
        """Give `policy` the reference that the section names: its weights as they are, those without adapters, or those
        of another model of the same shapes. Collective."""
        named, moves = self.section.reference, self.section.sync_every is not None
        path = None if named in ("start", "base") else named
        policy.init_reference_model(path, base=named == "base")
        if moves and policy.reference is not None:
            self._moving = policy.reference.tensors

    def after_step(self, policy: Policy, step: int) -> None:
        super().after_step(policy, step)
        every = self.section.sync_every
        if every is not None and policy.reference is not None and step % every == 0:
            policy.reference.update_towards_policy(self.section.sync_mix)

    def state(self) -> dict[str, Any]:
        return super().state() | {"has_reference": self._reference_moves}

    def check_state(self, state: Mapping[str, Any], changed: Sequence[str] = ()) -> None:
        """Raise UserError if the recipe has changed whether the reference moves, too.

        Only a reference that moves is in the checkpoint. One that stands still is read again where it came from.
        """
        moves = self._reference_moves
        had_moved = state.get("has_reference", moves)  # older versions wrote it for GRPO only
        if had_moved != moves:
            name = self.recipe.method
            holds = "holds the reference that it had moved to" if had_moved else "holds no reference"
            raise UserError(
                f"{name}.sync_every={format_value(self.section.sync_every)}: the checkpoint {holds}, and a resume "
                f"cannot change whether the reference moves. Take the change of section {name} back, or begin another "
                "run with these weights (checkpoint.init_from, run.name)"
            )
        super().check_state(state, changed)

    def tensors(self) -> dict[str, Tensor]:
        """The reference's [...] by name, where it moves."""
        return super().tensors() | {f"reference.{name}": tensor for name, tensor in self._moving.items()}
