"""Policy: a model on a mesh with its optimizer, through which the trainer and the methods train.

One step of a plain SFT run, for 4 rows on each of 2 data-parallel (dp) ranks with `train.micro_batch=2`:

    policy.forward_backward(batch, loss_fn)
        check_batch                     the streams fit, and are the same on both dp ranks      (batching.py)
        split_into_micro_batches        4 rows -> 2 micro-batches of 2 rows                     (batching.py)
        all-reduce of counts            trained tokens and documents of all 8 rows
        for each micro-batch:
            scorer.run_at_head          forward; the loss is computed inside of it              (score.py)
            loss.backward               FSDP reduces the gradients at the last micro-batch
        all-reduce of loss, metrics     StepResult
    policy.optimizer_step()             norm, clipping, update, schedule                        (optim/update.py)

The counts are all-reduced before the backward, because each loss divides by the counts of the global batch.

The policy owns the model, its sharding, the updater and the reference, and passes them to its parts: `checkpoint` saves
and loads, `offloader` moves weights and optimizer state between device and host, `weights` sends full weights to
inference engines, `monitor` reads the device's memory.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from dtrain.base.batch import (
    COMPLETED_STREAMS,
    IMAGE_STREAMS,
    Batch,
    document_lengths,
    next_token_labels,
    num_trained_tokens,
)
from dtrain.base.errors import UserError
from dtrain.checkpoint.huggingface.read import read_weights
from dtrain.models.common.config import ModelConfig
from dtrain.models.common.routing import BalanceLoss, RoutingRecord, RoutingTotals
from dtrain.models.read_config import read_config
from dtrain.optim.update import Updater
from dtrain.parallel.fsdp import Sharding
from dtrain.parallel.mesh import Mesh, Runtime, build_mesh, init_one_process_group
from dtrain.policy.batching import (
    Batching,
    Fixed,
    MicroBatch,
    StepRows,
    all_reduce,
    check_batch,
    merge_micro_batch_values,
    split_into_micro_batches,
)
from dtrain.policy.build import build_model, offloads_parameters
from dtrain.policy.checkpoint import PolicyCheckpoint
from dtrain.policy.offloader import DeviceMonitor, PolicyOffloader
from dtrain.policy.optimizer import build_gradient_sums, build_updater, offloads_optimizer
from dtrain.policy.options import BuildOptions, PolicyConfig, Precision, choose_precision
from dtrain.policy.prompt_sharing import PROMPT_IDS, PromptSharing, can_share_prompts
from dtrain.policy.reference import Reference
from dtrain.policy.results import StepCounts, StepObserver, StepResult, Totals, UpdateResult
from dtrain.policy.score import LogprobSource, Loss, Scorer
from dtrain.policy.weights import WeightSender
from dtrain.recipe.schema import Lora, Model, Optimizer as OptimizerSection, Recipe
from dtrain.recipe.world import derive_sizes, replace_auto

if TYPE_CHECKING:
    from dtrain.losses import TrainingSamplingParams
    from dtrain.memory.gradient_accumulation import GradientAccumulator
    from dtrain.models.vision.common import ImageFlops

SCORE_HEAD = "score"  # name of a classifier's or critic's head


class BackwardResult(NamedTuple):
    """Result of this rank's forwards and backwards in a step.

    Attributes:
        loss: Sum of the micro-batches' losses, a detached scalar without the loss scale. In a mixture of experts it
            includes the balance loss.
        metrics: Metrics of each micro-batch.
        routing_totals: Totals of a mixture's routing, float64 [n]; None for dense models.
    """

    loss: Tensor
    metrics: list[dict[str, Tensor]]
    routing_totals: Tensor | None


class Policy:
    """A model on a mesh with its optimizer.

    Args:
        recipe: The sections of a recipe that decide how the model is built and trained.
        config: Config of the model.
        mesh: The mesh. Every rank of it builds the policy.
        runtime: This rank and its device.
        precision: The dtypes of the model. None chooses them by the recipe and the device.
        options: Options for building the model that are not in a recipe. None uses the defaults.
        observer: Receives the events of each step. None for no observer.

    Attributes:
        model: The model, sharded over `mesh`.
        sharding: FSDP's state of the model.
        precision: The dtypes of masters, computation and reduction.
        scorer: Computes losses and log-probabilities of micro-batches.
        updater: Optimizer, schedule and loss scale; None before `init_optimizer`.
        reference: The reference model; None before `init_reference_model`.
        checkpoint: Saves and loads model and optimizer.
        offloader: Moves weights and optimizer state between device and host.
        weights: Sends full weights to inference engines.
        monitor: Reads the memory of this rank's device.
        prompt_sharing: How documents with equal numbers in the stream `prompt_ids` share their beginnings. None: every
            document is computed on its own.

    Collectives:
        Those of `build.build_model`.

    Example:
        policy = Policy(recipe, read_config(path), mesh, runtime)
        policy.init_optimizer(total_steps=100)
        result = policy.forward_backward(batch, loss)
        update = policy.optimizer_step()
        print(result.loss, update.grad_norm)
    """

    def __init__(
        self,
        recipe: PolicyConfig,
        config: ModelConfig,
        mesh: Mesh,
        runtime: Runtime,
        precision: Precision | None = None,
        options: BuildOptions | None = None,
        observer: StepObserver | None = None,
    ):
        recipe = replace_auto(recipe, mesh.dp_size)
        device = runtime.device
        self.recipe, self.mesh, self.runtime = recipe, mesh, runtime
        self.rank, self.device = runtime.rank, device
        if precision is None:
            precision = choose_precision(recipe.train.dtype, device.type, recipe.train.masters)
        self.precision = precision
        self.options = BuildOptions() if options is None else options
        self._observer = StepObserver() if observer is None else observer
        model = build_model(recipe, config, mesh, self.precision, device, self.options)
        self.model = model
        self.sharding = Sharding(model)
        self.scorer = Scorer(model, mesh, device, self._observer)
        self.prompt_sharing = _prompt_sharing(recipe.train.share_prompts, config)
        self.updater: Updater | None = None
        self.gradient_sums: GradientAccumulator | None = None  # sums bfloat16 gradients over micro-batches
        self.reference: Reference | None = None
        self._unread_totals: list[Totals] = []  # totals of the steps since the last update, still on the device
        self.checkpoint = PolicyCheckpoint(
            model,
            self.sharding,
            recipe.model.directory,
            self.precision.compute,
            template=recipe.data.chat_template,
            saves_frozen=recipe.model.init == "scratch",
        )
        self.offloader = PolicyOffloader(
            model,
            device,
            keeps_parameters=offloads_parameters(recipe, device),
            keeps_state=offloads_optimizer(recipe, device),
        )
        self.weights = WeightSender(model, self.sharding, self.rank, device, self.precision.compute)
        self.monitor = DeviceMonitor(self.rank, device)
        if recipe.lora is not None and recipe.lora.path is not None:
            self.checkpoint.keep_base_reference()
            if self.options.materialize:
                self._read_adapter(recipe.lora.path)

    @classmethod
    def from_recipe(cls, recipe: Recipe, runtime: Runtime) -> "Policy":
        """Build the policy of a recipe on the mesh of its section `parallel`, for a training loop of your own.

        Args:
            recipe: The recipe. Only its sections on the model, the mesh and the optimizer are read.
            runtime: This rank, as `dtrain.run(..., train=...)` passes it.

        Raises:
            UserError: If the model cannot be read.
            ValueError: If the mesh does not fit the number of ranks.

        Collectives:
            Creates the mesh's process groups, and those of `build.build_model`.

        Example:
            def train(recipe, runtime):
                policy = Policy.from_recipe(recipe, runtime)
                policy.init_optimizer(total_steps=100)

            dtrain.run("sft", ["model.path=Qwen/Qwen3-0.6B", "launch.nproc=2"], train=train)
        """
        if runtime.world_size == 1:
            init_one_process_group(runtime.device.type)
        sizes = derive_sizes(recipe, runtime.world_size)
        mesh = build_mesh(runtime, **sizes.shape, ep=sizes.ep)
        config = read_config(recipe.model.directory, implementation=recipe.model.implementation)
        return cls(recipe, config, mesh, runtime)

    def another(
        self,
        path: str | None = None,
        *,
        labels: int | None = None,
        optimizer: OptimizerSection | None = None,
        adapters: bool | None = None,
    ) -> "Policy":
        """Build a second model that is trained next to this one, on the same mesh and by the same recipe.

        Call its `init_optimizer` to train it, and save it together with this policy by `save_models`
        (`policy/checkpoint.py`).

        Args:
            path: Directory of the model. None builds it from this policy's own files.
            labels: Outputs of a new head, for a critic or a classifier. None keeps the head of a language model.
            optimizer: Its optimizer. None uses the recipe's.
            adapters: Whether it gets new adapters, as the recipe's section `lora` describes them. A new head is then
                trained fully. If False, all its weights are trained. Required if the recipe has the section `lora`.

        Raises:
            UserError: If the model cannot be read, or `adapters` does not fit the recipe.

        Collectives:
            Those of building a policy.

        Example:
            critic = policy.another(labels=1, optimizer=Optimizer(lr=1e-5))
            critic.init_optimizer(total_steps=100)
        """
        recipe = replace(
            self.recipe,
            model=self.recipe.model if path is None else Model(path=path),
            optimizer=optimizer or self.recipe.optimizer,
            lora=self._lora_of_another(adapters, has_new_head=labels is not None),
        )
        config = read_config(recipe.model.directory, labels, implementation=recipe.model.implementation)
        return Policy(recipe, config, self.mesh, self.runtime, options=self.options)

    def _lora_of_another(self, adapters: bool | None, has_new_head: bool) -> Lora | None:
        """Return the section `lora` of a second model. See `another`."""
        section = self.recipe.lora
        if section is None:
            if adapters:
                raise UserError("Policy.another(adapters=True): the recipe has no section lora. Set lora={}")
            return None
        if adapters is None:
            raise UserError(
                "Policy.another: the recipe has lora. Pass adapters=True to train new adapters of the second model, or "
                "adapters=False to train all its weights"
            )
        if not adapters:
            return None
        if section.path is not None:
            raise UserError(
                f"Policy.another(adapters=True): the settings of lora.path={section.path} are those of its own model. "
                "Pass adapters=False, or set lora.rank and lora.target in place of lora.path"
            )
        saved = list(section.modules_to_save)
        if has_new_head and SCORE_HEAD not in saved:
            saved.append(SCORE_HEAD)
        return replace(section, modules_to_save=saved)

    @property
    def optimizer(self) -> Optimizer | None:
        """Optimizer of the trained parameters; None before `init_optimizer`."""
        return None if self.updater is None else self.updater.optimizer

    def init_optimizer(self, total_steps: int) -> None:
        """Build the recipe's optimizer over the parameters and its schedule over `total_steps` optimizer steps."""
        recipe, options = self.recipe, self.options
        self.gradient_sums = build_gradient_sums(recipe, self.precision, self.model.named_parameters())
        updater = build_updater(recipe, self.precision, self.model, self.device, total_steps, options)
        self.updater = updater
        self.checkpoint.updater = updater
        self.offloader.updater = updater

    def forward_backward(
        self, batch: Batch, loss_fn: Loss, micro_batch_size: int | Batching | None = None
    ) -> StepResult:
        """Compute the loss of a global batch and add its gradient to the parameters' `.grad`.

        Gradients of several calls are summed until `optimizer_step`. Each call divides by the counts of its own batch.

        Args:
            batch: This dp rank's rows, as `batch.complete_batch` accepts them, with streams [n, S, ..] or [n, ..] that
                `loss_fn` reads (`batching`). The number of rows may differ between ranks and may be 0. Rows that
                `sample_mask` excludes do not count. In a mixture of experts, the stream `routed_experts` decides to
                which experts a token is sent (`batch.STREAMS`).
            loss_fn: `loss_fn(source, micro_batch, global_sequences, global_tokens) -> (loss, metrics)`. The step's loss
                is the sum of its values over all micro-batches and dp and cp ranks, so it divides by the global counts
                itself. Its metrics are scalars, summed in the same way. On a rank with fewer rows it also receives
                micro-batches of padding, in which every stream has its pad value (0 for the caller's own).
            micro_batch_size: Rows of a micro-batch, or another way to form them (`batching`). None uses the recipe's.

        Raises:
            RuntimeError: Before `init_optimizer`.
            ValueError: If the batch does not fit (`batching.check_batch`), on every rank.

        Collectives:
            Those of `batching.check_batch`. One all-reduce over dp if the number of rows per micro-batch varies. One
            all-reduce of the counts over dp before the backward. The model's own. One all-reduce of loss and metrics
            over dp × cp after the backward. With images an all-gather of their sizes over dp for each micro-batch.
        """
        (step,) = check_batch(batch, self.mesh.dp, self.model.config.vocab_size).split_into_steps()
        return self._forward_backward(step, loss_fn, micro_batch_size)

    def optimizer_step(self) -> UpdateResult:
        """Clip the gradients, update the weights, clear the gradients, and advance the schedule.

        If the gradient norm is not finite, no weight is changed. In float16, the loss scale is then halved. Otherwise
        the step is skipped, and at most `train.skip_nonfinite` steps in a row may be skipped.

        Raises:
            RuntimeError: Before `init_optimizer`.
            UserError: For a norm that is not finite, if the step may not be skipped. The message names the parameters.

        Collectives:
            One all-reduce of the norm, a scalar, and those of the optimizer's own step (Muon has some).
        """
        updater = self._required_updater("optimizer_step")
        self._observer.update_begins()
        lr = updater.scheduler.get_last_lr()[0]
        # The host has to wait for the norm anyway, so it reads the totals of the steps in the same copy.
        unread = self._unread_totals
        self._unread_totals = []
        on_device = [totals.on_device for totals in unread]
        if not on_device:
            on_device = [torch.zeros(0, dtype=torch.float64, device=self.device)]
        grad_norm, on_host = updater.update(torch.cat(on_device))
        sizes = [len(totals.on_device) for totals in unread]
        for totals, values in zip(unread, on_host.split(sizes), strict=True):
            totals.set(values)
        self._observer.update_ends()
        return UpdateResult(grad_norm, lr)

    def evaluate(self, batch: Batch, loss_fn: Loss, micro_batch_size: int | Batching | None = None) -> StepResult:
        """Compute the loss of a global batch without gradients. Needs no optimizer.

        Arguments and collectives are those of `forward_backward`, without a backward.
        """
        (step,) = check_batch(batch, self.mesh.dp, self.model.config.vocab_size).split_into_steps()
        return self._evaluate(step, loss_fn, micro_batch_size)

    def full_weights(
        self, dtype: torch.dtype | None = None, names: Sequence[str] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and the full tensor of each weight, one in memory at a time.

        Adapters are merged into the weights. Tied weights appear once.

        Args:
            dtype: Dtype of the tensors. None uses that of computation.
            names: Weights to yield, in this order. None yields all.

        Collectives:
            One all-gather per sharded weight. Every rank must read the iterator to its end.
        """
        return self.weights.full_tensors(dtype, names)

    def logprobs(
        self,
        batch: Batch,
        micro_batch_size: int | Batching | None = None,
        sampling: "TrainingSamplingParams | None" = None,
    ) -> Tensor:
        """Compute the log-probabilities of a batch's labels, without gradients.

        A token without a label costs no product with the head.

        Args:
            batch: This dp rank's rows, as for `forward_backward`.
            micro_batch_size: As for `forward_backward`.
            sampling: Temperature and filters of the distribution. None is the model's own.

        Returns:
            [n, S] on the CPU, 0 where there is no label, −inf where a filter excludes the label. The same on every tp
            and cp rank.

        Collectives:
            Those of `batching.check_batch` and of the forward.
        """

        def score(rows: Batch) -> list[Tensor]:
            return [self.scorer.logprobs(rows, sampling, adapters=self._has_adapters)]

        return self._scored(batch, micro_batch_size, score, shares_prompts=True)[0]

    @torch.no_grad()
    def token_values(
        self,
        batch: Batch,
        value_fn: Callable[[LogprobSource], Tensor],
        micro_batch_size: int | Batching | None = None,
    ) -> Tensor:
        """Compute a value for every token, such as a critic's, without gradients.

        Args:
            batch: This dp rank's rows, as for `forward_backward`.
            value_fn: Returns the values [B, S/cp] of a micro-batch's positions on this rank, from its source.
            micro_batch_size: As for `forward_backward`.

        Returns:
            [n, S] on the CPU, 0 on padding.

        Collectives:
            Those of `batching.check_batch` and of the forward.
        """

        def score(rows: Batch) -> list[Tensor]:
            return [self.scorer.token_values(rows, value_fn, adapters=self._has_adapters)]

        return self._scored(batch, micro_batch_size, score)[0]

    def entropies(
        self, batch: Batch, micro_batch_size: int | Batching | None, sampling: "TrainingSamplingParams"
    ) -> Tensor:
        """Compute the entropy of the distribution at each label, at the sampling temperature and before its filters.

        Arguments, shape and collectives are those of `logprobs`.
        """

        def score(rows: Batch) -> list[Tensor]:
            return [self.scorer.entropies(rows, sampling, adapters=self._has_adapters)]

        return self._scored(batch, micro_batch_size, score, shares_prompts=True)[0]

    def init_reference_model(self, path: str | None = None, *, base: bool = False) -> None:
        """Store a copy of the current weights as the reference.

        The reference is the model without its adapters if `base` is set, and also if the adapters are new, because new
        adapters change nothing. No weight of an adapter is copied then.

        Args:
            path: Read the reference's weights from this model instead. It must have the same shapes.
            base: Whether the reference is the model without its adapters.

        Raises:
            UserError: If the model at `path` does not fit.

        Collectives:
            Those of reading weights, if there is a path.
        """
        if path is not None:
            self.reference = Reference(self.model, self.sharding, copy_frozen=True, with_adapters=False)
            if self.options.materialize:
                with self.reference.swapped_in():
                    read_weights(self.model, path)
        elif base and self.checkpoint.base_reference is not None:
            self.reference = self.checkpoint.base_reference
        else:
            is_trained = self.updater is not None and self.updater.scheduler.steps > 0
            is_new = self.recipe.lora is not None and self.checkpoint.base_reference is None and not is_trained
            self.reference = Reference(self.model, self.sharding, copy_frozen=False, with_adapters=not (base or is_new))

    @contextmanager
    def use_reference_model(self) -> Iterator[None]:
        """Give the model the reference's weights inside of this context.

        On exit the model gets its own weights back, also after an error. Inside, this policy's forwards use adapters
        only if the reference has adapters. Code that calls the model itself must pass `micro_batch.NO_ADAPTERS` if the
        reference has none. The reference's router chooses the experts, even if a batch has `routed_experts`. No
        collective.

        Raises:
            RuntimeError: Before `init_reference_model`.
        """
        if self.reference is None:
            raise RuntimeError("use_reference_model needs init_reference_model first")
        with self.reference.swapped_in():
            yield

    def _read_adapter(self, path: str) -> None:
        from dtrain.checkpoint.peft.files import read_adapter  # a run without an adapter loads none of it

        with self.sharding.writing():
            read_adapter(self.model, path)

    @property
    def _has_adapters(self) -> bool:
        """Whether forwards use the model's adapters. Those of a reference without adapters do not."""
        if self.reference is None or not self.reference.is_swapped_in:
            return True
        return self.reference.has_adapters

    def _required_updater(self, caller: str) -> Updater:
        if self.updater is None:
            raise RuntimeError(f"Policy.{caller} needs init_optimizer first; Policy.evaluate does not")
        return self.updater

    def _forward_backward(self, step: StepRows, loss_fn: Loss, micro_batch_size: int | Batching | None) -> StepResult:
        """Compute loss and gradients of one step's rows. See `forward_backward`."""
        updater = self._required_updater("forward_backward")
        self.model.train()
        batches = self._micro_batches(step, micro_batch_size)
        counts = all_reduce(self._counts(step.batch, batches, trains=True), self.mesh.dp)
        result = self._backward(updater, batches, loss_fn, self._divisors(counts))
        self._observer.gradients_complete(self.model)
        totals = Totals(self._all_reduce_totals(result))
        self._unread_totals.append(totals)
        metric_names = list(result.metrics[0])
        return StepResult(StepCounts(*counts.tolist()), totals, metric_names, self.model.routing, result.metrics)

    @torch.no_grad()
    def _evaluate(self, step: StepRows, loss_fn: Loss, micro_batch_size: int | Batching | None) -> StepResult:
        """Compute the loss of one step's rows. See `evaluate`."""
        self.model.eval()
        batches = self._micro_batches(step, micro_batch_size)
        counts = all_reduce(self._counts(step.batch, batches, trains=False), self.mesh.dp)
        divisors = self._divisors(counts)
        losses: list[Tensor] = []
        metrics: list[dict[str, Tensor]] = []
        for batch in batches:
            loss, batch_metrics = self.scorer.run_at_head(batch, loss_fn, *divisors, adapters=self._has_adapters)
            losses.append(loss)
            metrics.append(batch_metrics)
        self.sharding.reshard()
        result = BackwardResult(torch.stack(losses).sum(), metrics, routing_totals=None)
        totals = Totals(self._all_reduce_totals(result))
        return StepResult(StepCounts(*counts.tolist()), totals, list(metrics[0]), None, metrics)

    def _micro_batches(self, step: StepRows, micro_batch_size: int | Batching | None) -> list[MicroBatch]:
        batching = self._batching(micro_batch_size)
        return split_into_micro_batches(
            step.batch,
            batching,
            step.max_rows,
            self.mesh.dp,
            step.per_row,
            step.images,
            self.prompt_sharing,
        ).batches

    def _divisors(self, counts: Tensor) -> list[Tensor]:
        """Return the global numbers of sequences and of trained tokens, scalars on the device.

        Both are at least 1, so that a step without a trained token has the loss 0 and not NaN.
        """
        at_least_one = counts.clamp(min=1)
        tokens, sequences = at_least_one[0], at_least_one[1]  # the order of `StepCounts`
        return [count.to(self.device, non_blocking=True) for count in (sequences, tokens)]

    def _all_reduce_totals(self, result: BackwardResult) -> Tensor:
        """Sum a step's loss and metrics over micro-batches and ranks, and the routing totals over ranks.

        Returns:
            Loss, metrics and routing totals, float64 [1 + number of metrics + ...] on the device.

        Collectives:
            One all-reduce over dp × cp.
        """
        values = [result.loss.double()]
        for name in result.metrics[0]:
            total = torch.zeros((), dtype=torch.float64, device=self.device)
            for metrics in result.metrics:
                total = total + metrics[name].detach().double()
            values.append(total)
        parts = [torch.stack(values)]
        if result.routing_totals is not None:
            parts.append(result.routing_totals)
        return all_reduce(torch.cat(parts), self.mesh.dp_cp)

    def _counts(self, rows: Batch, batches: Sequence[MicroBatch], *, trains: bool) -> Tensor:
        """Count a step's rows on this dp rank.

        Args:
            rows: The rows.
            batches: Their micro-batches.
            trains: Whether to count the FLOPs of the vision tower, which evaluations leave out.

        Returns:
            int64 [7], in the order of `StepCounts`.
        """
        lengths = document_lengths(rows)
        window = self.model.config.sliding_window or 1  # without a sliding window, nothing reads the second count
        tokens, pairs, windowed_pairs = int(lengths.sum()), *_num_pairs(lengths, window)
        shared_tokens = 0
        for batch in batches:
            if batch.shared_row is None:
                continue
            all_pairs, all_windowed_pairs = _num_pairs(document_lengths(batch), window)
            pairs += batch.shared_row.num_pairs() - all_pairs
            windowed_pairs += batch.shared_row.num_pairs(window) - all_windowed_pairs
            shared_tokens += batch.shared_row.num_shared_tokens
        vision_flops = 0.0
        for batch in batches:
            if trains and batch.images is not None:
                vision_flops += self._image_flops.total(batch.images)
        counts = StepCounts(
            trained_tokens=num_trained_tokens(rows),
            documents=len(lengths),
            tokens=tokens - shared_tokens,
            pairs=pairs,
            windowed_pairs=windowed_pairs,
            vision_flops=round(vision_flops),
            shared_tokens=shared_tokens,
        )
        return torch.tensor(astuple(counts))

    @cached_property
    def _image_flops(self) -> "ImageFlops":
        from dtrain.models.vision.common import ImageFlops  # a model of text alone loads no tower

        return ImageFlops(*self.model.model.vision)

    def _scored(
        self,
        batch: Batch,
        micro_batch_size: int | Batching | None,
        score: Callable[[Batch], Sequence[Tensor]],
        every_token: bool = False,
        shares_prompts: bool = False,
    ) -> list[Tensor]:
        """Compute `score` of each micro-batch and put the results into the batch's order.

        Args:
            batch: This dp rank's rows. Streams other than the rows' own, images' and `routed_experts` are not read.
            micro_batch_size: As for `forward_backward`.
            score: Returns tensors [b, s, ..] for a host micro-batch.
            every_token: Give every token its next token as label, instead of the batch's labels
                (`DTensorPolicyWorker.get_logprobs`).
            shares_prompts: Whether common beginnings may be computed once. `score` then returns 0 for their tokens that
                have no label.

        Returns:
            Tensors [n, S, ..] on the CPU.
        """
        names = {*COMPLETED_STREAMS, *IMAGE_STREAMS, "images", "routed_experts", PROMPT_IDS}
        if every_token:
            names -= {"labels", "token_mask", "sample_mask"}
        if self.reference is not None and self.reference.is_swapped_in:
            names -= {"routed_experts"}  # chosen by other weights: the reference's router decides itself
        selected = {name: value for name, value in batch.items() if name in names}
        checked = check_batch(selected, self.mesh.dp, self.model.config.vocab_size)
        rows = checked.batch
        if every_token:
            rows["labels"] = next_token_labels(rows)
        batching = self._batching(micro_batch_size)
        sharing = self.prompt_sharing if shares_prompts else None
        micro_batches = split_into_micro_batches(
            rows, batching, checked.max_rows, self.mesh.dp, images=checked.images, sharing=sharing
        )
        self.model.eval()
        results = []  # for each micro-batch, the list of tensors that `score` returns
        for micro_batch in micro_batches.batches:
            results.append([tensor.cpu() for tensor in score(micro_batch)])
        self.sharding.reshard()
        merged = []
        for parts in zip(*results, strict=True):  # the parts of one returned tensor, one for each micro-batch
            merged.append(merge_micro_batch_values(parts, rows, micro_batches.plan, micro_batches.is_packed))
        return merged

    def _batching(self, micro_batch_size: int | Batching | None) -> Batching:
        if micro_batch_size is None:
            return Fixed(self.recipe.train.num_micro_batch_rows)
        if isinstance(micro_batch_size, int):  # 0, as in NeMo-RL's recipes, also means the recipe's
            return Fixed(micro_batch_size or self.recipe.train.num_micro_batch_rows)
        return micro_batch_size

    def _backward(
        self, updater: Updater, batches: Sequence[Batch], loss_fn: Loss, divisors: Sequence[Tensor]
    ) -> BackwardResult:
        """Run the forward and the backward of each micro-batch, which adds loss scale · gradient to `.grad`.

        Gradients are reduced over the ranks once, in the backward of the last micro-batch. With `parallel.reduce_each`
        they are reduced over the shards in every backward.

        Args:
            updater: The updater, for the loss scale and the number of the step.
            batches: This dp rank's micro-batches.
            loss_fn: The loss.
            divisors: The global numbers of sequences and of trained tokens, scalars on the device.
        """
        scale = updater.loss_scale.scale if updater.loss_scale is not None else 1.0
        total = torch.zeros((), device=self.device)
        metrics: list[dict[str, Tensor]] = []
        routing, factor = self.model.routing, self.recipe.moe.balance
        balance = None
        if routing is not None and factor:
            balance = BalanceLoss(factor / (routing.num_layers * divisors[0]), scale)
        routing_totals = RoutingTotals()
        for index, batch in enumerate(batches):
            is_last = index == len(batches) - 1
            self.sharding.sync_gradients(is_last, bool(self.recipe.parallel.reduce_each))
            if self.gradient_sums is not None:
                self.gradient_sums.begin(updater.scheduler.steps, index, is_last)
            record = RoutingRecord()
            loss, batch_metrics = self.scorer.run_at_head(
                batch,
                loss_fn,
                *divisors,
                balance=balance,
                record=record,
                adapters=self._has_adapters,
                step=updater.scheduler.steps,
            )
            self._observer.backward_begins()
            (loss * scale if scale != 1.0 else loss).backward()
            self._observer.backward_ends()
            total = total + loss.detach()
            metrics.append(batch_metrics)
            if routing is not None:
                total = total + record.balance_loss()
                routing_totals.add(record)
        if self.gradient_sums is not None:
            self.gradient_sums.finish()
        return BackwardResult(total, metrics, None if routing is None else routing_totals.flat())


def _prompt_sharing(setting: bool | str, config: ModelConfig) -> PromptSharing | None:
    """Return the settings of a model for shared prompts, given `train.share_prompts`. None: nothing is shared."""
    if not can_share_prompts(setting, config):
        return None
    image_tokens = None if config.vision is None else config.vision.num_tokens
    return PromptSharing(always=setting is True, image_tokens=image_tokens)


def _num_pairs(lengths: Tensor, window: int) -> tuple[int, int]:
    """Return Σ length² and Σ length · min(length, window) over documents, given their lengths, [documents]."""
    return int((lengths * lengths).sum()), int((lengths * lengths.clamp(max=window)).sum())
