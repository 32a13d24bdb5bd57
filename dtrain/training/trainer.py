"""The loop: build, resume, step, log, validate, checkpoint.

The files that a batch passes through:

    training/setup/data → data/sources                        opens the files, once, before the first step
    data/formats → text → rows/cache                      rows of files to token ids and a trained mask, once
    data/rows/rows                                        the endless row sequence; a dp rank's rows of a global batch
    methods: batch, prepare                               rows to a batch [n, S] on the host, and what its loss reads
    policy.Policy.forward_backward → policy/batching      micro-batches, counts over all ranks; backward
    policy/score → models → losses/head                   hidden states, the loss inside the root's forward
    policy.Policy.optimizer_step → optim                  norm, clip, update
    metrics                                               the row of metrics.jsonl
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
from dtrain.base.errors import NOTHING_LOST, Interrupted, RecipeError, Stopped, Unavailable, UserError
from dtrain.base.files import replace_text
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
from dtrain.data.rows.rows import Cursor
from dtrain.methods.method import RunContext
from dtrain.models.common.flops import get_text_flops
from dtrain.parallel.mesh import Runtime, build_mesh, init_one_process_group
from dtrain.policy import Policy
from dtrain.policy.options import BuildOptions
from dtrain.policy.results import StepResult, UpdateResult
from dtrain.recipe.schema import Recipe
from dtrain.training import metrics, resume
from dtrain.training.directory import ABOUT, DATA
from dtrain.training.eval_sets import better
from dtrain.training.preflight import shapes
from dtrain.training.resume import Start
from dtrain.training.spec import ResolvedRun, resolve
from dtrain.training.summary import BuiltRun, closing_lines, describe_run, opening_lines

if TYPE_CHECKING:
    from dtrain.training.evaluations import Evaluations

COLLECT_EVERY = 20  # steps, of which Python's young garbage is collected
PLAN_SECONDS = 5.0  # that the end of a short run waits for the plan beside it


def train(recipe: Recipe, runtime: Runtime) -> None:
    """Run `recipe` to its end on this rank. Collective: every rank of the run calls it.

    Raises RecipeError, before any work, with all that `preflight.shapes` finds; the rest as `train_checked`.
    """
    if problems := shapes(recipe, runtime.world_size):
        raise RecipeError(problems)
    train_checked(recipe, runtime)


def train_checked(recipe: Recipe, runtime: Runtime) -> None:
    """Do as `train` with a recipe that was checked, as `launch` has done before any rank starts. Collective.

    Raises UserError for what the user can mend, Stopped when a signal ended the run in order.
    """
    with ExitStack() as stack:
        if not dist.is_initialized():
            init_one_process_group(runtime.device.type)
            stack.callback(dist.destroy_process_group)
        trainer = Trainer.open(recipe, runtime, stack)
        start = trainer.resume()
        if trainer.measure(start.step, start.step >= trainer.total_steps):
            trainer.stop_if_asked()
            lacks_export = trainer.lacks_export(start)
            left = "only the export is left" if lacks_export else "nothing left to do"
            trainer.metrics.say(f"step {start.step} of {trainer.total_steps} is saved already: {left}")
            if lacks_export:
                trainer.export()
            return
        trainer.loop(start)
        if runtime.is_main:
            lines = closing_lines(
                trainer.recipe,
                trainer.method,
                trainer.run.path,
                has_export=recipe.checkpoint.export != "none",
                has_images=trainer.spec.has_images,
            )
            for line in lines:
                trainer.metrics.say(line)


class Trainer:
    """A run on one rank: its data, its policy and its directory. `loop` is the run."""

    def __init__(self, resolved: ResolvedRun, runtime: Runtime, stack: ExitStack):
        """Build the model and everything else that the loop needs. Collective.

        Args:
            resolved: The run's spec, and its ranks and metrics.
            runtime: This rank.
            stack: Closes what the run opens.
        """
        spec = resolved.spec
        recipe = spec.recipe
        self.spec, self.recipe, self.runtime, self._stack = spec, recipe, runtime, stack
        self.ranks, self.metrics = resolved.host.ranks, resolved.recorder
        self.run, self.method, self.store = spec.run, spec.method, spec.store
        self.rows, self.val_rows = spec.rows["train"], spec.rows.get("val")
        self.start, self.identities, self.total_steps = spec.start, spec.identities, spec.total_steps
        self._recipe_text = config.to_yaml(spec.original_recipe)
        mesh = build_mesh(runtime, **spec.sizes.shape, ep=spec.sizes.ep)
        self.before_gib = metrics.memory_gib(runtime.device)
        options = BuildOptions(max_row_length=self.method.max_row_length())
        self.policy = Policy(recipe, spec.model_config, mesh, runtime, spec.precision, options)
        self._built = BuiltRun(spec, self.policy, runtime, self.metrics, self.before_gib)
        self._text_flops = get_text_flops(self.policy.model)
        self.policy.init_optimizer(self.total_steps)
        self.saver, self.patience = self._open_saver()
        self._measured: dict[str, float] = {}  # metrics of the last finished step
        self._cursor = self.start.cursor  # the data position after that step
        begun = self.start.state or {}
        self._held: dict[str, Any] = {"step": self.start.step, "save": begun.get("save")}  # what the newest save holds
        own = self.start.store is self.store and self._held["save"]
        self._mark = run_id_of_save(own) if own else secrets.token_hex(8)  # of this run, part of each save's own mark
        self._validated = self.start.step  # the last step after which that was done, if it was due
        self.evaluations: Evaluations | None = None
        if recipe.eval is not None:
            module = import_module("dtrain.training.evaluations")
            run = self._as_the_method_sees_it()
            self.evaluations = module.Evaluations(spec, self.policy, run)
        self._planned = runtime.wait_for_plan  # asks the plan beside the run; None once its answer was shown
        if runtime.is_main:
            for line in opening_lines(self._built):
                self.metrics.say(line)

    @classmethod
    def open(cls, recipe: Recipe, runtime: Runtime, stack: ExitStack) -> "Trainer":
        """Resolve `recipe` on this rank and build its trainer. `stack` closes what both open. Collective."""
        return cls(resolve(recipe, runtime, stack), runtime, stack)

    def _open_saver(self) -> tuple[Saver, Patience]:
        """Return what saves, closed with the run, and what ends a run that gets no better."""
        recipe, runtime, keep = self.recipe, self.runtime, self.recipe.checkpoint
        direction = better(keep.keep_best or "", recipe.eval)
        retention = Retention(keep.keep_last, keep.keep_every, keep.keep_best, direction)
        on_host = recipe.parallel.optimizer_offload and runtime.device.type == "cuda"  # a copy there would double it
        saver = Saver(
            self.run.checkpoints,
            retention,
            runtime.device,
            background=keep.async_save and keep.every is not None and not on_host,
            write_extra_files=self.policy.checkpoint.adapter_writer,
            collective_timeout=runtime.collective_timeout,
        )
        return self._stack.enter_context(saver), Patience(keep.keep_best, direction, recipe.train.patience)

    def resume(self) -> Start:
        """Load the checkpoint that `checkpoint.resume` picked, or begin, and return where the run starts.

        Prints the differences from the saved recipe. Raises Stopped where a signal comes while the method waits for
        what it needs.
        """
        start = self.start
        if start.weights is not None:
            store, step = start.weights
            self.policy.checkpoint.load_weights(store, step)
            self.metrics.say(f"weights of {store.path(step)}")
        if start.state is not None and start.store is not None:
            self.policy.checkpoint.locate_frozen_weights(start.store, start.step)
        try:
            self.method.begin(self.policy, self.spec.rows, self._as_the_method_sees_it())
        except Interrupted:
            raise Stopped(self._agreed_signal(), NOTHING_LOST) from None
        if start.state is not None:
            resume.restore(start, self.recipe, self.policy, self.method)
            self.metrics.say(f"resumed from {start.path}")
            for line in self.spec.changes:
                self.metrics.say(f"  changed since then: {line}")
        self.ranks.first(lambda: self._describe_run(start))
        self.metrics.resume_at(start.step)
        if self.recipe.train.patience is not None:
            self.patience.values = self.ranks.first(lambda: self.patience.read_values(self.run.metrics))
        if self.evaluations is not None:
            self._measured |= self.evaluations.resume_at(start.step)
        return start

    def _describe_run(self, start: Start) -> None:
        """Write the run's directory: what the run began from, its recipe and data, and the files of its model."""
        replace_text(self.run.began, json.dumps(start.began))
        replace_text(self.run.config, self._recipe_text)
        self.run.write_json(DATA, {split: rows.samples.summary for split, rows in self.spec.rows.items()})
        self.run.write_json(ABOUT, describe_run(self._built))
        self.run.copy_model_files(self.recipe.model.directory, self.policy.checkpoint.chat_template)

    def loop(self, start: Start) -> None:
        """Train from `start` to the last step, saving and validating on the way; the export at the end."""
        recipe, every = self.recipe, self.recipe.checkpoint.every
        batches = self.method.source.batches(self.policy, self.rows, Cursor(*start.cursor))
        self.metrics.start(start.step, self.total_steps)
        step, saved = start.step, start.step if start.state is not None else None
        self.stop_if_asked()
        if gc.isenabled():  # ranks collect at the same steps: while one does, all wait
            gc.disable()
            self._stack.callback(gc.enable)
        clock = time.perf_counter()
        while True:
            self._before_step(step, saved)
            fetch_began = time.perf_counter()
            if (batch := next(batches, None)) is None:
                break
            data_time = time.perf_counter() - fetch_began
            rows, loss = self.method.prepare(self.policy, self.method.batch(batch))
            result = self.policy.forward_backward(rows, loss, self.method.micro_rows)
            update = self.policy.optimizer_step()
            step += 1
            self._cursor = batch.cursor
            self.method.after_step(self.policy, step)
            self._log(step, batch.epoch, result, update, clock, data_time)
            if step - self.start.step == 1:
                self._tell_space()
            last = step == self.total_steps
            if step - start.step > 1 or last:  # the optimizer's state is there from the first update on
                self._tell_plan(PLAN_SECONDS if last else 0.0)
            last = self.measure(step, last)
            signum = self._agreed_signal()
            is_due = every is not None and (last or bool(signum) or step % every == 0)
            if is_due:
                self.save(step, batch.cursor, wait=bool(last or signum))
                saved = step
            if is_due or step % COLLECT_EVERY == 0:
                gc.collect(2 if is_due or step % (25 * COLLECT_EVERY) == 0 else 1)  # all of it beside a save, or seldom
            if signum:
                raise Stopped(signum, self._farewell(step, saved))
            if last:
                break
            clock = time.perf_counter()
        self.metrics.end()
        if recipe.checkpoint.export == "final":
            self._held["step"] = step  # which may not be saved
            self.export()

    def _before_step(self, step: int, saved: int | None) -> None:
        """Prepare what the method needs for the next step. Where that fails, or is given up for a signal, the steps so
        far are saved first."""
        try:
            self.method.before_step(Cursor(*self.start.cursor))
        except Unavailable as error:
            saved = self._save_last(step, saved)
            raise Unavailable(f"{error}\n{self._farewell(step, saved)}" if step else str(error)) from error
        except Interrupted:
            signum = self._agreed_signal()
            saved = self._save_last(step, saved)
            raise Stopped(signum, self._farewell(step, saved) if step else NOTHING_LOST) from None

    def _save_last(self, step: int, saved: int | None) -> int | None:
        if self.recipe.checkpoint.every is None or saved == step or step == 0:
            return saved
        self.save(step, self._cursor, wait=True)
        return step

    def validate(self, step: int) -> None:
        """Write the row of the method's measures over all of `data.val`."""
        if self.val_rows is None:
            return
        fields = self.method.validate(self.policy, self.val_rows)
        self._see(fields)
        self.metrics.val_row(step, **fields)

    def evaluate(self, step: int, is_last: bool) -> None:
        """Judge the model's answers, where they are due. A signal cuts this short: what is left is done on resume."""
        if self.evaluations is None:
            return
        with suppress(Interrupted):
            for fields in self.evaluations.evaluate(step, is_last):
                self._see(fields)

    def measure(self, step: int, is_last: bool) -> bool:
        """Validate and evaluate after `step`, as far as due and not done yet. Return whether the run ends here: as
        `is_last` says, or by `train.patience`."""
        every = self.spec.validate_every
        if every and self._validated != step and (is_last or step % every == 0):
            self.validate(step)
            self._validated = step
        self.evaluate(step, is_last)
        if is_last or not self.patience.is_exhausted:
            return is_last
        most, field = self.patience.max_misses, self.patience.name
        self.metrics.say(f"step {step}  {field} was not better {most} times in a row: train.patience ends the run")
        return self.measure(step, True)

    def _see(self, fields: Mapping[str, float]) -> None:
        self._measured |= fields
        self.patience.record(fields)

    def stop_if_asked(self) -> None:
        """Raise Stopped where a signal came before the first step."""
        if signum := self._agreed_signal():
            raise Stopped(signum, NOTHING_LOST)

    def save(self, step: int, cursor: tuple[int, int], *, wait: bool) -> None:
        """Save everything that a resume needs as `checkpoints/step-N`, then delete the saves that the recipe does not
        keep; with `async_save` in the background, unless it is to `wait`."""
        self._held = {"step": step, "save": f"{self._mark}-{secrets.token_hex(8)}"}
        known = {
            "step": step,
            "cursor": list(cursor),
            "recipe": self._recipe_text,
            "identities": self.identities,
            "data_files": {split: rows.samples.file_digests for split, rows in self.spec.rows.items()},
            "began": self.start.began,
            "save": self._held["save"],
            "dtype": str(self.policy.precision.compute).removeprefix("torch."),
            "metrics": dict(self._measured),
        }
        contents = resume.contents(self.policy, self.method, known)
        self.saver.save(step, *contents, wait=wait)
        if self.recipe.checkpoint.export == "every":
            self.export()

    def export(self) -> None:
        """Write the run's `export/`: a Hugging Face directory in the dtype of computation, or an adapter in PEFT's
        layout."""
        self.policy.checkpoint.export(self.run.export, self.recipe.model.directory, self._held)
        self.metrics.say(f"exported to {self.run.export}")

    def lacks_export(self, start: Start) -> bool:
        """Return whether a run that is at its end was stopped between its last save and the export of it.
        Collective."""
        is_due = self.ranks.first(lambda: read_saved_step(self.run.export) != self._held)
        return self.recipe.checkpoint.export != "none" and is_due

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
        counts, of_text = result.counts, self._text_flops
        flops = (
            of_text.per_token * counts.tokens
            + of_text.per_pair * counts.pairs
            + of_text.per_windowed_pair * counts.windowed_pairs
        )
        self._measured = {}
        self._see({"loss": result.loss})
        self.metrics.train_row(
            step,
            epoch=epoch,
            loss=self._measured["loss"],
            **self.method.train_metrics(result.metrics),
            **result.routing_metrics,
            grad_norm=update.grad_norm,
            lr=update.lr,
            tokens=counts.tokens,
            tokens_per_sec=counts.tokens / step_time,
            mfu=metrics.model_flops_utilisation(
                (flops + counts.vision_flops) / step_time,
                self.runtime.world_size,
                self.runtime.device,
                self.policy.precision.compute,
            ),
            mem_gib=metrics.memory_gib(self.runtime.device),
            step_time=step_time,
            data_time=data_time,
        )

    def _as_the_method_sees_it(self) -> RunContext:
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

    def _tell_space(self) -> None:
        """Report what the run's saves take and what is free, after the update that makes the optimizer's state."""
        every = self.recipe.checkpoint.every
        if every is None or not self.runtime.is_main:
            return
        size = save_bytes(self.policy.checkpoint.tensors())
        retention, directory = self.saver.retention, self.run.checkpoints
        saves = -(-self.total_steps // every)
        free = free_bytes(directory)
        self.metrics.say(f"saves: {space_line(size, retention, saves)}; {format_bytes(free)} are free in {directory}")
        if free < size * (max_concurrent_saves(retention, saves) or 1):
            self.metrics.say(
                "note: that is less than the saves take: lower checkpoint.keep_last, save less often "
                "(checkpoint.every), or set run.dir to a larger disk"
            )

    def _tell_plan(self, wait: float) -> None:
        planned = self._planned(wait) if self._planned is not None else None
        if planned is None:
            return
        self._planned = None
        if self.runtime.is_main:
            self.run.write_json(ABOUT, describe_run(self._built, planned.size))
        measured = f"{metrics.memory_gib(self.runtime.device):.3f} GiB"
        if self.runtime.device.type == "cuda":
            self.metrics.say(f"memory of a rank: {planned.words}, measured {measured}")
        else:
            of_it = f"{self.before_gib:.3f} GiB of it before the model was built"
            self.metrics.say(f"memory of a rank: {planned.words}; the process holds {measured}, {of_it}")

    def _agreed_signal(self) -> int:
        """Return the signal that any rank was sent, on every rank: they must stop after the same step. One all-reduce.

        Raises, on every rank, what a save in the background has failed with on any.
        """
        flags = torch.tensor([self.runtime.stop.signum, int(self.saver.has_failed)])
        if self.runtime.world_size > 1:
            dist.all_reduce(flags, dist.ReduceOp.MAX)
        signum, failed = flags.tolist()
        if failed:
            self.saver.finish()
            raise UserError("the save in the background failed on another rank, which says why in its log")
        return signum

    def _farewell(self, step: int, saved: int | None) -> str:
        if saved == step:
            is_start = step == self.start.step  # which may lie in another run's directory
            where = self.start.path if is_start else self.store.path(step)
            again = is_start or self.recipe.checkpoint.resume is not None
            how = "the same command" if again else "checkpoint.resume=auto"
            return f"stopped after step {step}, which is saved in {where}; {how} goes on there"
        rest = "nothing was saved" if saved is None else f"the steps after {saved} are lost"
        return f"stopped after step {step}; checkpoint.every=null saves no checkpoint, so {rest}"
