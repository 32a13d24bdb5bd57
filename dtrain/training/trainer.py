"""The training loop: build the run, resume, then step, log, validate and save until the last step.

The files that a batch passes through:

    training/setup/data → data/sources             opens the files, once, before the first step
    data/formats → text → rows/cache               rows of files to token ids and a mask of trained tokens, once
    data/rows/rows                                 the endless sequence of rows; a dp rank's rows of a global batch
    methods: batch, prepare                        rows to a batch [n, S] on the host, and the loss function
    policy.Policy.forward_backward → policy/batching   micro-batches, counts over all ranks; backward
    policy/score → models → losses/head            hidden states, and the loss inside the root module's forward
    policy.Policy.optimizer_step → optim           gradient norm, clipping, update
    metrics                                        the row of metrics.jsonl

`train` is the entry point. It opens a `Trainer` (which resolves the spec and builds the model), calls `Trainer.resume`
and then `Trainer.loop`.
"""

import gc
import json
import secrets
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dtrain import recipe as config
from dtrain.base.errors import STOPPED_AT_START, Interrupted, RecipeError, ServiceUnavailable, Stopped, UserError
from dtrain.base.files import atomic_write_text
from dtrain.checkpoint.dcp.background import Saver
from dtrain.checkpoint.dcp.retention import (
    Patience,
    Retention,
    format_bytes,
    free_bytes,
    max_concurrent_saves,
    save_bytes,
    space_line,
)
from dtrain.checkpoint.dcp.store import run_id_of_save
from dtrain.checkpoint.huggingface.model_files import read_saved_step
from dtrain.data.rows.rows import Cursor, GlobalBatch
from dtrain.methods.method import RunContext
from dtrain.models.common.flops import get_text_flops
from dtrain.parallel.mesh import Runtime, build_mesh, init_one_process_group
from dtrain.policy import Policy
from dtrain.policy.options import BuildOptions
from dtrain.policy.results import StepCounts, StepResult, UpdateResult
from dtrain.recipe.schema import Recipe
from dtrain.training import metrics, resume
from dtrain.training.directory import ABOUT, DATA
from dtrain.training.eval_sets import better_function
from dtrain.training.inputs import find_library_models
from dtrain.training.metrics.records import read_rows
from dtrain.training.preflight import shape_problems
from dtrain.training.resume import Start
from dtrain.training.spec import ResolvedRun, resolve
from dtrain.training.summary import BuiltRun, closing_lines, describe_run, opening_lines

if TYPE_CHECKING:
    from dtrain.training.evaluations import Evaluations

# Steps between collections of Python's young garbage, and between collections of all garbage.
COLLECT_EVERY = 20
COLLECT_ALL_EVERY = 25 * COLLECT_EVERY
# Seconds that the end of a short run waits for the memory plan, which another process computes.
PLAN_SECONDS = 5.0


def train(recipe: Recipe, runtime: Runtime) -> None:
    """Check a recipe and run it to its end on this rank.

    Args:
        recipe: The recipe.
        runtime: This rank.

    Raises:
        RecipeError: Before any work, with every problem that `preflight.shape_problems` finds.
        UserError: If the run cannot start or continue, for a reason that the user can remove.
        Stopped: If a signal ended the run in order.

    Collectives:
        Every rank of the run calls this.
    """
    problems = shape_problems(recipe, runtime.world_size)
    if problems:
        raise RecipeError(problems)
    train_checked(recipe, runtime)


def train_checked(recipe: Recipe, runtime: Runtime) -> None:
    """Run a recipe that was checked already, as `launch` checks it before any rank starts.

    Raises and communicates as `train` does.
    """
    with ExitStack() as stack:
        if not dist.is_initialized():
            init_one_process_group(runtime.device.type)
            stack.callback(dist.destroy_process_group)
        trainer = Trainer.open(recipe, runtime, stack)
        start = trainer.resume()
        has_all_steps = start.step >= trainer.total_steps
        # Evaluations of the step that is resumed may be missing, and `train.patience` may end the run.
        is_over = trainer.measure(start.step, has_all_steps)
        if is_over:
            trainer.finish_without_steps(start)
            return
        trainer.loop(start)
        trainer.print_closing_lines()


class Trainer:
    """A run on one rank.

    Attributes:
        spec: The spec of the run.
        recipe: The recipe with values in place of `auto`.
        runtime: This rank.
        ranks: All ranks of the run.
        metrics: Writes rows of metrics.jsonl and lines on the terminal.
        run: The run's directory.
        method: The recipe's method.
        store: The run's checkpoints.
        rows: The training rows.
        val_rows: The validation rows. None without `data.val`.
        start: The checkpoint that the run starts from, or a fresh start.
        identities: Digests of everything that the run reads at its start.
        total_steps: The last step.
        before_gib: Memory of this process before the model was built, in GiB.
        policy: The model on the mesh, with its optimizer.
        saver: Writes the checkpoints and deletes those that are not kept.
        patience: Ends the run if `checkpoint.keep_best` does not improve (`train.patience`).
        evaluations: The evaluations of `eval`. None if the recipe has none.
    """

    def __init__(self, resolved: ResolvedRun, runtime: Runtime, stack: ExitStack):
        """Build the model and everything else that the loop needs. Collective.

        Args:
            resolved: The run's spec, and its ranks and metrics.
            runtime: This rank.
            stack: Closes what the run opens.
        """
        spec = resolved.spec
        recipe = spec.recipe
        self.spec = spec
        self.recipe = recipe
        self.runtime = runtime
        self._stack = stack
        self.ranks = resolved.host.ranks
        self.metrics = resolved.recorder
        self.run = spec.run
        self.method = spec.method
        self.store = spec.store
        self.rows = spec.rows["train"]
        self.val_rows = spec.rows.get("val")
        self.start = spec.start
        self.identities = spec.identities
        self.total_steps = spec.total_steps
        self._recipe_text = config.to_yaml(spec.original_recipe)

        mesh = build_mesh(runtime, **spec.sizes.shape, ep=spec.sizes.ep)
        library_models = find_library_models({"model.path": spec.source, **spec.other_models})
        if library_models:
            module = import_module("dtrain.training.setup.transformers_models")  # only for models of transformers
            module.prove_on_mesh(recipe, library_models, mesh, runtime.device, self.ranks)
        self.before_gib = metrics.memory_gib(runtime.device)
        options = BuildOptions(max_row_length=self.method.max_row_length())
        self.policy = Policy(recipe, spec.model_config, mesh, runtime, spec.precision, options)
        self._built = BuiltRun(spec, self.policy, runtime, self.metrics, self.before_gib)
        self._text_flops = get_text_flops(self.policy.model)
        self.policy.init_optimizer(self.total_steps)

        self._choose_better = better_function(recipe.checkpoint.keep_best or "", recipe.eval)
        self.saver = stack.enter_context(self._build_saver())
        self.patience = Patience(recipe.checkpoint.keep_best, self._choose_better, recipe.train.patience)

        self._latest_metrics: dict[str, float] = {}  # metrics of the last finished step; saved with a checkpoint
        self._cursor = self.start.cursor  # position in the data after the last finished step
        self._validated_step: int | None = 0  # the step that was validated last; the untrained model is not validated
        # The step of the newest checkpoint that holds this run's state. None before the first save of a fresh run.
        self._saved_step = None if self.start.state is None else self.start.step
        # Each save has a random mark, "<mark of the run>-<mark of the save>", because a step's number does not identify
        # a save: two runs, or a run that was started over, have steps with the same number. An export records step and
        # mark of the newest save, so that a resumed run can find out whether its export is up to date.
        saved_mark = None if self.start.state is None else self.start.state.get("save")
        self._newest_save: dict[str, Any] = {"step": self.start.step, "save": saved_mark}
        self._run_mark = secrets.token_hex(8)
        if saved_mark is not None and self.start.store is self.store:  # the run continues its own checkpoints
            self._run_mark = run_id_of_save(saved_mark)

        self.evaluations: Evaluations | None = None
        if recipe.eval is not None:
            module = import_module("dtrain.training.evaluations")  # loads rl and inference, which only `eval` needs
            self.evaluations = module.Evaluations(spec, self.policy, self._run_context())
        self._planned = runtime.wait_for_plan  # returns the memory plan once it is ready; None after it was printed
        if runtime.is_main:
            for line in opening_lines(self._built):
                self.metrics.print_line(line)

    @classmethod
    def open(cls, recipe: Recipe, runtime: Runtime, stack: ExitStack) -> "Trainer":
        """Resolve `recipe` on this rank and build its trainer. Collective.

        Args:
            recipe: The recipe, which was checked.
            runtime: This rank.
            stack: Closes what the spec and the trainer open.
        """
        return cls(resolve(recipe, runtime, stack), runtime, stack)

    def _build_saver(self) -> Saver:
        """Return the saver of the run's checkpoints."""
        section = self.recipe.checkpoint
        retention = Retention(section.keep_last, section.keep_every, section.keep_best, self._choose_better)
        # A save in the background copies the tensors to the host first. With `optimizer_offload` the optimizer's state
        # is there already, and the copy would double it.
        has_state_on_host = self.recipe.parallel.optimizer_offload and self.runtime.device.type == "cuda"
        return Saver(
            self.run.checkpoints,
            retention,
            self.runtime.device,
            background=section.async_save and section.every is not None and not has_state_on_host,
            write_extra_files=self.policy.checkpoint.adapter_writer,
            collective_timeout=self.runtime.collective_timeout,
        )

    def resume(self) -> Start:
        """Load the checkpoint that `checkpoint.resume` chose, if any, and print the differences from its recipe.

        Returns:
            The start of the run.

        Raises:
            Stopped: If a signal comes while the method waits for something it needs, such as a server.

        Collectives:
            Over all ranks.
        """
        start = self.start
        if start.init_weights is not None:
            store, step = start.init_weights
            self.policy.checkpoint.load_weights(store, step)
            self.metrics.print_line(f"weights of {store.path(step)}")
        if start.state is not None and start.store is not None:
            self.policy.checkpoint.locate_frozen_weights(start.store, start.step)
        try:
            self.method.begin(self.policy, self.spec.rows, self._run_context())
        except Interrupted:
            raise Stopped(self._agreed_signal(), STOPPED_AT_START) from None
        if start.state is not None:
            resume.restore(start, self.recipe, self.policy, self.method)
            self.metrics.print_line(f"resumed from {start.path}")
            for line in self.spec.changes:
                self.metrics.print_line(f"  changed since then: {line}")
        self.ranks.run_on_first(lambda: self._write_run_files(start))
        self.metrics.resume_at(start.step)
        if start.state is not None:
            self._validated_step = self.ranks.run_on_first(lambda: self._read_validated_step(start.step))
        if self.recipe.train.patience is not None:
            self.patience.values = self.ranks.run_on_first(lambda: self.patience.read_values(self.run.metrics))
        if self.evaluations is not None:
            self._latest_metrics |= self.evaluations.resume_at(start.step)
        return start

    def _read_validated_step(self, step: int) -> int | None:
        """Return `step` if metrics.jsonl has a validation after it, otherwise None. Rank 0 only.

        A checkpoint need not be validated: it may be another run's, or `train.validate_every` or `train.steps` may have
        changed since it was saved.
        """
        for row in read_rows(self.run.metrics):
            is_training_row = "loss" in row
            if row.get("step") == step and not is_training_row and any(name.startswith("val_") for name in row):
                return step
        return None

    def _write_run_files(self, start: Start) -> None:
        """Write the files that describe the run to its directory. Rank 0 only."""
        atomic_write_text(self.run.began, json.dumps(start.origins))
        atomic_write_text(self.run.config, self._recipe_text)
        self.run.write_json(DATA, {split: rows.samples.summary for split, rows in self.spec.rows.items()})
        self.run.write_json(ABOUT, describe_run(self._built))
        self.run.copy_model_files(self.recipe.model.directory, self.policy.checkpoint.chat_template)

    def loop(self, start: Start) -> None:
        """Train from `start` to the last step, with saves and validations, and write the export at the end.

        Raises:
            Stopped: If a signal came. The steps so far are saved, unless `checkpoint.every` is null.

        Collectives:
            Over all ranks.
        """
        batches = self.method.source.batches(self.policy, self.rows, Cursor(*start.cursor))
        self.metrics.start(start.step, self.total_steps)
        step = start.step
        self.stop_if_asked()
        self._take_over_garbage_collection()
        step_began = time.perf_counter()
        while True:
            self._prepare_step(step)
            fetch_began = time.perf_counter()
            batch = next(batches, None)
            if batch is None:  # all epochs are done
                break
            data_time = time.perf_counter() - fetch_began
            result, update = self._train_step(batch)
            step += 1
            self._cursor = batch.cursor
            self.method.after_step(self.policy, step)
            self._log(step, batch.epoch, result, update, step_began, data_time)
            last = step == self.total_steps
            self._print_sizes(step, last)
            last = self.measure(step, last)  # before the save, because `keep_best` compares this step's metrics
            signum = self._agreed_signal()
            every = self.recipe.checkpoint.every
            is_due = every is not None and (last or bool(signum) or step % every == 0)
            if is_due:
                self.save(step, batch.cursor, wait=bool(last or signum))  # no background save outlives the process
            self._collect_garbage(step, is_due)
            if signum:
                raise Stopped(signum, self._farewell(step))
            if last:
                break
            step_began = time.perf_counter()
        self.metrics.end()
        if self.recipe.checkpoint.export == "final":
            self._newest_save["step"] = step  # with checkpoint.every=null this step has no save
            self.export()

    def _train_step(self, batch: GlobalBatch) -> tuple[StepResult, UpdateResult]:
        """Run the forward, the backward and the optimizer's step of a global batch. Collective."""
        rows, loss = self.method.prepare(self.policy, self.method.batch(batch))
        result = self.policy.forward_backward(rows, loss, self.method.micro_rows)
        update = self.policy.optimizer_step()
        return result, update

    def _take_over_garbage_collection(self) -> None:
        """Disable Python's automatic garbage collection until the run ends.

        While one rank collects, all others wait for it in the next collective. So all ranks collect at the same steps
        (`_collect_garbage`).
        """
        if gc.isenabled():
            gc.disable()
            self._stack.callback(gc.enable)

    def _collect_garbage(self, step: int, was_saved: bool) -> None:
        """Collect garbage if it is due after `step`: all of it with a save or rarely, otherwise the young objects."""
        if was_saved or step % COLLECT_ALL_EVERY == 0:
            gc.collect(2)
        elif step % COLLECT_EVERY == 0:
            gc.collect(1)

    def _prepare_step(self, step: int) -> None:
        """Let the method prepare the step after `step`.

        Raises:
            ServiceUnavailable: If a server or another service of the method is gone. The steps so far are saved.
            Stopped: If a signal came while the method waited. The steps so far are saved.
        """
        try:
            self.method.before_step(Cursor(*self.start.cursor))
        except ServiceUnavailable as error:
            self._save_last(step)
            text = f"{error}\n{self._farewell(step)}" if step else str(error)
            raise ServiceUnavailable(text) from error
        except Interrupted:
            signum = self._agreed_signal()
            self._save_last(step)
            raise Stopped(signum, self._farewell(step) if step else STOPPED_AT_START) from None

    def _save_last(self, step: int) -> None:
        """Save `step`, unless it is saved already or the recipe saves nothing."""
        if self.recipe.checkpoint.every is None or self._saved_step == step or step == 0:
            return
        self.save(step, self._cursor, wait=True)

    def measure(self, step: int, is_last: bool) -> bool:
        """Run the validation and the evaluations that are due after `step` and not done yet. Collective.

        Args:
            step: The step.
            is_last: Whether it is the last step of the run.

        Returns:
            Whether the run ends here: `is_last`, or True if `train.patience` ends it.
        """
        every = self.spec.validate_every
        if every and self._validated_step != step and (is_last or step % every == 0):
            self.validate(step)
            self._validated_step = step
        self.evaluate(step, is_last)
        if is_last or not self.patience.is_exhausted:
            return is_last
        max_misses, field = self.patience.max_misses, self.patience.name
        self.metrics.print_line(
            f"step {step}  {field} was not better {max_misses} times in a row: train.patience ends the run"
        )
        return self.measure(step, True)  # a last step may have further validations and evaluations

    def validate(self, step: int) -> None:
        """Measure the loss and the method's metrics over all of `data.val`, and write them as a row. Collective."""
        if self.val_rows is None:
            return
        fields = self.method.validate(self.policy, self.val_rows)
        self._record(fields)
        self.metrics.val_row(step, **fields)

    def evaluate(self, step: int, is_last: bool) -> None:
        """Run the evaluations that are due after `step`. Collective.

        A signal interrupts them. A resumed run does the evaluations that are missing.
        """
        if self.evaluations is None:
            return
        with suppress(Interrupted):
            for fields in self.evaluations.evaluate(step, is_last):
                self._record(fields)

    def _record(self, fields: Mapping[str, float]) -> None:
        """Add fields to the metrics of the current step, and pass them to `patience`."""
        self._latest_metrics |= fields
        self.patience.record(fields)

    def stop_if_asked(self) -> None:
        """Raise Stopped if a signal came before the first step. One all-reduce."""
        signum = self._agreed_signal()
        if signum:
            raise Stopped(signum, STOPPED_AT_START)

    def save(self, step: int, cursor: tuple[int, int], *, wait: bool) -> None:
        """Save a checkpoint as `checkpoints/step-N`, and delete those that the recipe does not keep. Collective.

        Args:
            step: The step that was finished last.
            cursor: The next row of the global sequence: epoch and row.
            wait: Whether to return only after the save is complete. Otherwise, with `checkpoint.async_save`, files are
                written in the background.
        """
        self._newest_save = {"step": step, "save": f"{self._run_mark}-{secrets.token_hex(8)}"}
        run_state = {
            "step": step,
            "cursor": list(cursor),
            "recipe": self._recipe_text,
            "identities": self.identities,
            "data_files": {split: rows.samples.file_digests for split, rows in self.spec.rows.items()},
            "began": self.start.origins,
            "save": self._newest_save["save"],
            "dtype": str(self.policy.precision.compute).removeprefix("torch."),
            "metrics": dict(self._latest_metrics),
        }
        contents = resume.contents(self.policy, self.method, run_state)
        self.saver.save(step, contents.tensors, contents.state, contents.rank_state, wait=wait)
        if self.recipe.checkpoint.export == "every":
            self.export()
        self._saved_step = step

    def export(self) -> None:
        """Write the run's `export/`. Collective.

        It is a Hugging Face directory in the dtype of computation, or an adapter in PEFT's layout.
        """
        self.policy.checkpoint.export(self.run.export, self.recipe.model.directory, self._newest_save)
        self.metrics.print_line(f"exported to {self.run.export}")

    def lacks_export(self) -> bool:
        """Check whether the run was stopped between its last save and the export of it. Collective."""
        is_outdated = self.ranks.run_on_first(lambda: read_saved_step(self.run.export) != self._newest_save)
        return self.recipe.checkpoint.export != "none" and is_outdated

    def finish_without_steps(self, start: Start) -> None:
        """End a run whose start is its last step already, and write its export if that is missing. Collective."""
        self.stop_if_asked()
        lacks_export = self.lacks_export()
        rest = "only the export is left" if lacks_export else "nothing left to do"
        self.metrics.print_line(f"step {start.step} of {self.total_steps} is saved already: {rest}")
        if lacks_export:
            self.export()

    def print_closing_lines(self) -> None:
        """Print what the run has learned, and commands to continue with. Does nothing on ranks other than 0."""
        if not self.runtime.is_main:
            return
        has_export = self.recipe.checkpoint.export != "none"
        has_images = self.spec.has_images
        for line in closing_lines(
            self.recipe, self.method, self.run.path, has_export=has_export, has_images=has_images
        ):
            self.metrics.print_line(line)

    def _log(
        self, step: int, epoch: float, result: StepResult, update: UpdateResult, began: float, data_time: float
    ) -> None:
        """Write the step's row to metrics.jsonl.

        Args:
            step: Number of the step, from 1.
            epoch: Epochs of the data after this step.
            result: Loss, metrics and counts of the step.
            update: The optimizer's step.
            began: `time.perf_counter` at the step's beginning.
            data_time: Seconds that the step waited for its batch.
        """
        step_time = time.perf_counter() - began
        flops_per_sec = self._flops_of_step(result.counts) / step_time
        self._latest_metrics = {}
        self._record({"loss": result.loss})
        shared_tokens = {}
        if self.method.shared_beginnings is not None and self.policy.prompt_sharing is not None:
            shared_tokens["shared_tokens"] = result.counts.shared_tokens
        self.metrics.train_row(
            step,
            epoch=epoch,
            loss=result.loss,
            **self.method.train_metrics(result.metrics),
            **result.routing_metrics,
            grad_norm=update.grad_norm,
            lr=update.lr,
            tokens=result.counts.tokens,
            **shared_tokens,
            tokens_per_sec=result.counts.tokens / step_time,
            mfu=metrics.model_flops_utilisation(
                flops_per_sec, self.runtime.world_size, self.runtime.device, self.policy.precision.compute
            ),
            mem_gib=metrics.memory_gib(self.runtime.device),
            step_time=step_time,
            data_time=data_time,
        )

    def _flops_of_step(self, counts: StepCounts) -> float:
        """Return the training FLOPs of a global batch over all ranks, without recomputation."""
        flops = self._text_flops
        of_tokens = flops.per_token * counts.tokens
        of_pairs = flops.per_pair * counts.pairs
        of_windowed_pairs = flops.per_windowed_pair * counts.windowed_pairs
        return of_tokens + of_pairs + of_windowed_pairs + counts.vision_flops

    def _run_context(self) -> RunContext:
        """Return the part of the run that the method and the evaluations use."""

        def should_stop() -> bool:
            return self.runtime.stop.signum != 0

        return RunContext(
            metrics=self.metrics,
            path=self.run.path,
            identities=self.identities,
            source=self.spec.source,
            other_models=self.spec.other_models,
            stack=self._stack,
            should_stop=should_stop,
        )

    def _print_sizes(self, step: int, is_last: bool) -> None:
        """Print the disk space of the saves and the memory of a rank, after the first steps of this process."""
        if step - self.start.step == 1:
            self._print_disk_space()
        # The optimizer's state exists from the first update on. A step later, the measured memory includes it.
        if step - self.start.step > 1 or is_last:
            self._print_planned_memory(PLAN_SECONDS if is_last else 0.0)

    def _print_disk_space(self) -> None:
        """Print the size of the run's saves and the free disk space. Needs the optimizer's state."""
        every = self.recipe.checkpoint.every
        if every is None or not self.runtime.is_main:
            return
        size = save_bytes(self.policy.checkpoint.tensors())
        retention, directory = self.saver.retention, self.run.checkpoints
        num_saves = -(-self.total_steps // every)
        free = free_bytes(directory)
        space = space_line(size, retention, num_saves)
        self.metrics.print_line(f"saves: {space}; {format_bytes(free)} are free in {directory}")
        if free < size * (max_concurrent_saves(retention, num_saves) or 1):
            self.metrics.print_line(
                "note: that is less than the saves take: lower checkpoint.keep_last, save less often "
                "(checkpoint.every), or set run.dir to a larger disk"
            )

    def _print_planned_memory(self, wait: float) -> None:
        """Print the planned memory of a rank next to the measured one, once, when the plan is ready.

        Args:
            wait: Seconds to wait for the plan.
        """
        if self._planned is None:
            return
        planned = self._planned(wait)
        if planned is None:
            return
        self._planned = None
        if self.runtime.is_main:
            self.run.write_json(ABOUT, describe_run(self._built, planned.size))
        measured = f"{metrics.memory_gib(self.runtime.device):.3f} GiB"
        if self.runtime.device.type == "cuda":
            self.metrics.print_line(f"memory of a rank: {planned.words}, measured {measured}")
        else:
            before = f"{self.before_gib:.3f} GiB of it before the model was built"
            self.metrics.print_line(f"memory of a rank: {planned.words}; the process holds {measured}, {before}")

    def _agreed_signal(self) -> int:
        """Return the signal that any rank has received, or 0, on every rank: all ranks must stop after the same step.

        Raises:
            UserError: On every rank, if a save in the background has failed on any.

        Collectives:
            One all-reduce.
        """
        flags = torch.tensor([self.runtime.stop.signum, int(self.saver.has_failed)])
        if self.runtime.world_size > 1:
            dist.all_reduce(flags, dist.ReduceOp.MAX)
        signum, failed = flags.tolist()
        if failed:
            self.saver.finish()  # raises the error of this rank's own save
            raise UserError("the save in the background failed on another rank, which says why in its log")
        return signum

    def _farewell(self, step: int) -> str:
        """Return the message of a run that stops after `step`: the location of the save, and how to continue."""
        if self._saved_step == step:
            is_start = step == self.start.step  # the save of the start may be in another run's directory
            path = self.start.path if is_start else self.store.path(step)
            continues = is_start or self.recipe.checkpoint.resume is not None
            how = "the same command" if continues else "checkpoint.resume=auto"
            return f"stopped after step {step}, which is saved in {path}; {how} goes on there"
        rest = "nothing was saved" if self._saved_step is None else f"the steps after {self._saved_step} are lost"
        return f"stopped after step {step}; checkpoint.every=null saves no checkpoint, so {rest}"
