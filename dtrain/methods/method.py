"""The base class of methods, and `RunContext`, the part of a run that a method uses.

The file of a method has its section of the recipe, and overrides what differs from the base. README.md explains how to
write one. In a step, the trainer calls a method and the policy in this order:

    method.before_step(cursor)                      for example, sample completions
    rows                = next(method.source.batches(...))
    batch               = method.batch(rows)        rows to tensors [n, S], on the host
    batch, loss         = method.prepare(policy, batch)
    result              = policy.forward_backward(batch, loss)      calls `loss` for each micro-batch
    policy.optimizer_step()
    metrics             = method.train_metrics(result.metrics)      totals of the global batch to a row of metrics.jsonl
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor

from dtrain.base.batch import Batch, collate, collate_with_images
from dtrain.base.errors import Problem, UserError
from dtrain.base.ranges import format_value
from dtrain.data.model_directory import ModelDirectory
from dtrain.data.rows.rows import Batches, Cursor, GlobalBatch, Rows
from dtrain.policy import Batching, DynamicShapes, Packed, Policy
from dtrain.policy.prompt_sharing import PROMPT_IDS, number_pairs, number_prompts
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
    """Interface for writing metrics and lines of the terminal; `dtrain.training.metrics.Recorder` implements it."""

    def print_line(self, text: str) -> None:
        """Print a line on the terminal."""

    def log(self, row: Mapping[str, int | float], step: int) -> None:
        """Write a row of metrics."""

    def write_rows(self, name: str, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write rows to <name>.jsonl, for completions ("samples") or answers of an evaluation ("evals")."""

    def drop_answers(self, step: int, name: str) -> None:
        """Remove the answers to the set `name` after `step` from evals.jsonl."""


@dataclass(frozen=True)
class RunContext:
    """The part of a run that a method, its engines and its evaluations use.

    Attributes:
        metrics: Writes rows and lines.
        path: The run's directory.
        identities: Digests of everything that the run reads at its start, by the keys that a resume compares.
        source: The directory of model.path, with the run's tokenizer and chat template.
        other_models: The directories of the method's other models, by key.
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
    """Source of a method's batches: the rows of the data, in their order.

    Methods that generate their data, such as GRPO, have a source of their own. `state`, `tensors`, `check_state` and
    `load` are as in `Method`.

    Attributes:
        method: The method.
    """

    method: "Method"

    @property
    def recipe(self) -> Recipe:
        """The method's recipe."""
        return self.method.recipe

    def remaining_steps(self, rows: Rows, cursor: Cursor, saved: Mapping[str, Any]) -> int:
        """Return the number of optimizer steps from `cursor` to the end of `train.epochs`.

        The last step may have a short batch.

        Args:
            rows: Rows of the training data.
            cursor: Position in the data.
            saved: The method's `state` at the start of the run. Empty for a fresh run.
        """
        num_rows = max(0, (rows.total_rows() or 0) - rows.rows_before(cursor))
        return -(-num_rows // self.recipe.train.num_batch_rows)  # rounded up

    def batches(self, policy: Policy, rows: Rows, cursor: Cursor) -> Iterator[GlobalBatch]:
        """Yield this dp rank's rows of every step from `cursor` on, each with the cursor of the following step."""
        return iter(self.build_batches(policy, rows, cursor=cursor, num_workers=self.recipe.data.num_workers))

    def build_batches(self, policy: Policy, rows: Rows, **options: Any) -> Batches:
        """Return this dp rank's rows of every step.

        Args:
            policy: The policy, for its mesh.
            rows: Rows of the data.
            options: Other arguments of `Batches`.
        """
        mesh = policy.mesh
        return Batches(
            rows,
            global_batch=self.recipe.train.num_batch_rows,
            dp_rank=mesh.dp_rank,
            dp_size=mesh.dp_size,
            balance_lengths=self.method.is_dynamic(),
            **options,
        )

    def batch(self, rows: GlobalBatch) -> Batch:
        """Collate a dp rank's rows to a batch [n, S] on the host, with their images if they have any."""
        has_images = bool(rows.rows) and "pixels" in rows.rows[0]
        return collate_with_images(rows.rows) if has_images else collate(rows.rows)

    def after_step(self, step: int) -> None:
        """Update the source after an optimizer step. The rows of data files need no update."""

    def state(self) -> dict[str, Any]:
        """Return the state to save, as JSON."""
        return {}

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors to save, by name."""
        return {}

    def check_state(self, state: Mapping[str, Any], changed: Sequence[str] = ()) -> None:
        """Raise UserError if this source cannot continue from a saved `state`.

        Args:
            state: State of the method in the checkpoint.
            changed: Changes that the method has found itself, one line each, which a resume does not allow.
        """

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved `state`."""


@dataclass
class NoKeys:
    """The section of a method without keys."""


class Method:
    """Base class of methods: which data, which loss, which metrics. A method knows no meshes, files or processes.

    Before a run, a method returns facts that the checks of a recipe, the preview, a plan and the start of a run need.
    During a run, it turns rows into a batch, a batch into a loss, and totals of the loss into metrics (see the module).

    A method is also built for recipes that were not checked yet. Its constructor must therefore neither fail nor take
    long.

    A method with state that a resumed run needs overrides these four functions:

        state()             returns JSON values, the same on every rank
        tensors()           returns tensors by name. Each is a plain tensor (the same on every rank), a DTensor, or a
                            `checkpoint.dcp.shards.TensorShard` of a tensor that is distributed over the ranks. All
                            ranks return the same names
        check_state(state)  raises UserError if this method with this recipe cannot continue from a saved `state`.
                            `dtrain validate` calls it, too
        load(state)         restores a saved `state` on a resume, before the first step. It also allocates tensors, so
                            that `tensors()` returns tensors of the saved sizes, which are then filled in place. On
                            another world size, the shards of a rank may differ from those that were saved

    Attributes:
        name: Name of the method's section in a recipe that selects the method by its import path. None: the name of the
            class in snake case without "Method". For example, the section of PolyMethod is `poly`.
        Section: Dataclass of the method's keys, which a recipe has under the method's name.
        section: The values of these keys.
        about: Description of the method, such as "supervised fine-tuning".
        kind: The kind of the data's samples: "examples", "pairs", "labelled" (replies that are wanted or not) or
            "prompts".
        measures: Metrics of the method, besides the metrics of all methods (training/metrics/records.py).
        curves: Metrics that show what was learned, with their titles.
        best: Keys of `recipe.schema.BEST_METRICS` that the method measures.
        more_steps_hint: A change of the section that gives more steps per pass over the data, for a message. For
            example, "a smaller grpo.prompts_per_step".
        adapter_learning_rates: The learning rate below which a new adapter hardly learns, and a usual learning rate.
        models: Keys of the section that may name models. The suffix of a key decides the kind of model
            (`training.registry.TEACHER`, `REWARD_MODEL`). Keys without such a suffix name references.
        references: Values of a reference that are not paths.
        shared_beginnings: The documents of a batch whose common beginning may be computed once
            (`train.share_prompts`): "prompts" for those with equal prompts, "pairs" for documents 2i and 2i + 1. None
            for no documents.
    """

    name: str | None = None
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
    shared_beginnings: Literal["prompts", "pairs"] | None = None

    def __init__(self, recipe: Recipe):
        self.recipe = replace_auto(recipe)
        self.section = recipe.section

    def variant(self) -> str | None:
        """Return the name of the subclass that the section selects (`training.registry.VARIANTS`). None: this class."""
        return None

    def missing(self) -> list[Problem]:
        """Return problems of required keys that are missing in the section."""
        return []

    def problems(self) -> list[Problem]:
        """Check the section, and keys of other sections that conflict with it.

        Ranges of values are checked by `training.setup.sizes`.
        """
        return []

    def completion_length_problems(self) -> list[Problem]:
        """Check that completions of the section's `sampling` leave room for their prompts."""
        max_new_tokens = self.section.sampling.max_new_tokens
        max_length = self.recipe.data.max_length
        if max_length < 2 or max_new_tokens < max_length:
            return []
        key = f"{self.recipe.method_name}.sampling.max_new_tokens"
        text = (
            f"{key}={max_new_tokens} leaves no room for a prompt within data.max_length={max_length}, which is for "
            "both together"
        )
        return [Problem(key, text, "Lower the first or raise the second")]

    def model_problems(self, model: "ModelConfig") -> list[Problem]:
        """Check the section for the model that is trained."""
        return []

    def format_problem(self, format: str) -> str | None:
        """Return the reason why this method cannot use rows of a format (`data.*.format`). None if it can."""
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
        """Return the recipe key and the path of each model that the method needs besides the trained model."""
        return []

    def code(self) -> list[tuple[str, str | None, str]]:
        """Return the user's code that the section names: key, name or import path, and a description."""
        return []

    def prompts(self) -> "PromptOptions | None":
        """Return the options for building prompts from the data. None if the data contain no prompts.

        Raises:
            UserError: If the source of tools does not list them.
        """
        return None

    def labels(self) -> int | None:
        """Return the number of outputs of a head that replaces the vocabulary's head. None: it is not replaced."""
        return None

    def label(self) -> "Label | None":
        """Return the column of the data from which the loss reads a number per row. None if it reads no column."""
        return None

    def rows_per_sample(self) -> int:
        """Return the rows of a batch per sample of `train.global_batch`: two for a pair that is not packed."""
        return 2 if self.kind == "pairs" and not self.recipe.data.packing else 1

    def is_dynamic(self) -> bool:
        """Check whether micro-batches are limited by their number of tokens instead of their number of rows."""
        return self.recipe.train.dynamic_batch

    def automatic_batch(self, rows: int) -> int:
        """Return the value of `train.global_batch=auto` if the first pass over the data has `rows` rows."""
        return choose_global_batch(rows)

    def row_length(self) -> int:
        """Return the tokens of a full row. A packed row of pairs has room for two sequences."""
        has_two_sequences = self.kind == "pairs" and self.recipe.data.packing
        return self.recipe.data.max_length * (2 if has_two_sequences else 1)

    def max_row_length(self) -> int:
        """Return the tokens of the longest row in a forward. Packed completions of a micro-batch are one row."""
        is_packed = self.kind == "prompts" and self.recipe.data.packing
        return self.row_length() * (self.recipe.train.num_micro_batch_rows if is_packed else 1)

    def needs_reference(self) -> bool:
        """Check whether the loss compares with a reference."""
        return False

    def reference_interval(self) -> int | None:
        """Return the steps between two moves of the reference towards the policy. None if it does not move."""
        return None

    def keeps_reference_weights(self) -> bool:
        """Check whether the weights of the reference stay on the devices next to the policy's."""
        return self.needs_reference()

    def sends_weights(self) -> bool:
        """Check whether updated weights are sent over a process group that reaches other hosts than the run's."""
        return False

    @property
    def required_start_weights(self) -> str | None:
        """The weights that the policy must have when `begin` is called, also on a resume.

        "start" means the weights that training starts from, "base" the same without an adapter. None means that on a
        resume the checkpoint's weights are sufficient.
        """
        return None

    @cached_property
    def source(self) -> BatchSource:
        """Source of the batches."""
        return BatchSource(self)

    @cached_property
    def micro_rows(self) -> int | Batching:
        """Rows per micro-batch, or another rule by which a batch is divided into micro-batches.

        With packed completions, a micro-batch is one row of up to `micro_batch` · `max_length` tokens.
        """
        if self.kind == "prompts" and self.recipe.data.packing:
            return Packed(self.max_row_length())
        rows_per_sample = self.rows_per_sample()
        rows = self.recipe.train.num_micro_batch_rows * rows_per_sample
        if self.is_dynamic():
            return DynamicShapes(rows * self.recipe.data.max_length, rows_per_sample)
        return rows

    @property
    def choices(self) -> list[str]:
        """Lines about the method's sizes, which a run prints when it starts."""
        rows = self.micro_rows
        if not isinstance(rows, DynamicShapes):
            return []
        return [f"micro-batches: rows of like length, up to {rows.tokens:,} tokens with their padding"]

    def check_data(self, columns: Mapping[str, Mapping[str, Any]], samples: Mapping[str, int]) -> None:
        """Check the method's requirements on data and services, as far as possible before a model is built.

        Args:
            columns: By split, a row with every column of the prompts. Empty for other kinds of rows.
            samples: By split, the number of samples, as far as known.

        Raises:
            UserError: If the method cannot begin.
        """

    def check_device_supported(self, device: torch.device) -> None:
        """Raise UserError if the section needs something that `device` cannot do."""

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
        """Prepare a run. Called once, before the first step, and before a checkpoint is loaded.

        Args:
            policy: The policy, with the weights that training starts from.
            splits: Rows of "train", and of "val" if there are any.
            run: The run.

        Collectives:
            Those of building models. All ranks call it.
        """

    def before_step(self, cursor: Cursor) -> None:
        """Prepare the next step, for example generate a rollout. All ranks call this before each step.

        Args:
            cursor: Position in the data at which the run began.

        Raises:
            Interrupted: On every rank, if the run is asked to stop.
            ServiceUnavailable: If something outside of the run, such as a server, does not answer.
        """

    def batch(self, rows: GlobalBatch, split: str = "train") -> Batch:
        """Return a dp rank's rows of a step as a batch [n, S] on the host."""
        return self.with_prompt_ids(self.source.batch(rows))

    def with_prompt_ids(self, batch: Batch) -> Batch:
        """Add the stream `prompt_ids`, by which the policy finds documents that begin alike, if the method shares any.

        Args:
            batch: Rows on the host, [n, S].
        """
        if self.shared_beginnings is None or self.recipe.train.share_prompts is False:
            return batch
        number = number_pairs if self.shared_beginnings == "pairs" else number_prompts
        return {**batch, PROMPT_IDS: number(batch)}

    def prepare(self, policy: Policy, batch: Batch) -> tuple[Batch, Loss]:
        """Compute everything that must be known before the backward, such as the reference's log-probabilities.

        All ranks call this function, also ranks without rows, because it may communicate.

        Args:
            policy: The policy.
            batch: This dp rank's batch.

        Returns:
            The batch with the streams that the loss reads, and the loss.
        """
        return batch, self.loss

    def loss(
        self, source: LogprobSource, batch: Batch, global_seqs: Tensor, global_tokens: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the loss of a micro-batch.

        Args:
            source: Log-probabilities of the micro-batch.
            batch: The micro-batch.
            global_seqs: The number of sequences with labels in the global batch.
            global_tokens: The number of labels in the global batch.

        Returns:
            This micro-batch's part of the global batch's loss, a scalar: the parts of all micro-batches and ranks add
            up to the loss. Scalars by name, which are added up in the same way, for `train_metrics` and `val_metrics`.
        """
        raise NotImplementedError(f"{type(self).__name__} names no loss")

    def after_step(self, policy: Policy, step: int) -> None:
        """Update the method's state after an optimizer step.

        Args:
            policy: The policy, with its new weights.
            step: Number of the step, from 1.
        """
        self.source.after_step(step)

    def train_metrics(self, totals: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of a training step besides `loss`.

        Args:
            totals: The scalars that `loss` returned, added up over the global batch.
        """
        return {}

    def validate(self, policy: Policy, rows: Rows) -> dict[str, float]:
        """Return the metrics of a validation. They are means over all `rows`, not means of the batches' means.

        Collectives:
            Those of `prepare` and of `Policy.evaluate`, for each batch.
        """
        totals: dict[str, float] = {}
        for batch, loss in self.validation(policy, rows):
            for name, value in policy.evaluate(batch, loss, self.micro_rows).metrics.items():
                totals[name] = totals.get(name, 0.0) + value
        return self.val_metrics(totals)

    def validation(self, policy: Policy, rows: Rows) -> Iterator[tuple[Batch, Loss]]:
        """Yield the batches of `val_batches`, each prepared, with its loss."""
        for batch in self.val_batches(policy, rows):
            yield self.prepare(policy, batch)

    def val_batches(self, policy: Policy, rows: Rows) -> Iterator[Batch]:
        """Yield this dp rank's batches of all `rows`. Every rank has the same number of batches."""
        for part in self.source.build_batches(policy, rows):
            yield self.batch(part, "val")

    def val_metrics(self, totals: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of a validation, among them `val_loss`.

        Args:
            totals: The scalars that `loss` returned, added up over the validation set.
        """
        raise NotImplementedError(f"{type(self).__name__} names no validation loss")

    def state(self) -> dict[str, Any]:
        """Return the state to save, as JSON. The class describes it."""
        return self.source.state()

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors to save, by name. The class describes them."""
        return self.source.tensors()

    def check_state(self, state: Mapping[str, Any], changed: Sequence[str] = ()) -> None:
        """Raise UserError if the method cannot continue from the `state` of a checkpoint.

        Needs only the recipe, so `dtrain validate` calls it, too.

        Args:
            state: The saved state.
            changed: As in `BatchSource.check_state`.
        """
        self.source.check_state(state, changed)

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a `state` that `check_state` has accepted."""
        self.source.load(state)


class MethodWithReference(Method):
    """Base of methods whose loss may compare with a reference.

    Without `sync_every`, the reference's weights are fixed, and a resume reads them again from their source. With
    `sync_every`, they follow the policy's weights and are saved in each checkpoint. The method's section must have the
    keys `reference`, `sync_every` and `sync_mix`.
    """

    models: tuple[str, ...] = ("reference",)
    # Tensors of a reference that follows the policy, by name.
    _moving: Mapping[str, Tensor] = MappingProxyType({})

    @property
    def _reference_moves(self) -> bool:
        return self.needs_reference() and self.section.sync_every is not None

    def reference_interval(self) -> int | None:
        return self.section.sync_every

    @property
    def required_start_weights(self) -> str | None:
        """Return "start" or "base", if these are the reference's weights and they do not move. Otherwise None."""
        if not self.needs_reference() or self.section.sync_every is not None:
            return None
        return self.section.reference if self.section.reference in ("start", "base") else None

    def other_models(self) -> list[tuple[str, str]]:
        path = self.section.reference
        if path in (None, "none", "start", "base"):
            return []
        return [(f"{self.recipe.method_name}.reference", str(path))]

    def base_problems(self) -> list[Problem]:
        """Check `reference: base`, the model without its adapter."""
        if self.section.reference != "base" or self.recipe.lora is not None:
            return []
        key = f"{self.recipe.method_name}.reference"
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
        """Build the reference, if its weights stay on the devices.

        Arguments, errors and collectives are those of `Method.attach_models`.
        """
        if self.keeps_reference_weights():
            self.build_reference(policy)
            return AttachedModels(reference=policy.reference)
        return AttachedModels()

    def build_reference(self, policy: Policy) -> None:
        """Build the reference that the section names, as `policy.reference`.

        Its weights are the policy's current weights, the same without adapters, or the weights of another model with
        the same shapes.

        Collectives:
            Those of `Policy.init_reference_model`.
        """
        reference = self.section.reference
        path = None if reference in ("start", "base") else reference
        policy.init_reference_model(path, base=reference == "base")
        if self.section.sync_every is not None and policy.reference is not None:
            self._moving = policy.reference.tensors

    def after_step(self, policy: Policy, step: int) -> None:
        """Move the reference towards the policy, every `sync_every` steps."""
        super().after_step(policy, step)
        every = self.section.sync_every
        if every is not None and policy.reference is not None and step % every == 0:
            policy.reference.update_towards_policy(self.section.sync_mix)

    def state(self) -> dict[str, Any]:
        return super().state() | {"has_reference": self._reference_moves}

    def check_state(self, state: Mapping[str, Any], changed: Sequence[str] = ()) -> None:
        """Raise UserError if a resume would change whether the reference moves, besides `Method.check_state`'s reasons.

        A checkpoint has the weights of a reference only if the reference moves. Fixed weights are read again from their
        source.
        """
        moves = self._reference_moves
        had_moved = state.get("has_reference", moves)  # older versions wrote it for GRPO only
        if had_moved != moves:
            name = self.recipe.method_name
            content = "holds the reference that it had moved to" if had_moved else "holds no reference"
            raise UserError(
                f"{name}.sync_every={format_value(self.section.sync_every)}: the checkpoint {content}, and a resume "
                f"cannot change whether the reference moves. Take the change of section {name} back, or begin another "
                "run with these weights (checkpoint.init_from, run.name)"
            )
        super().check_state(state, changed)

    def tensors(self) -> dict[str, Tensor]:
        """Add the tensors of a reference that moves, as "reference.<name>"."""
        return super().tensors() | {f"reference.{name}": tensor for name, tensor in self._moving.items()}
