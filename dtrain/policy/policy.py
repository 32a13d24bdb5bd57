"""Policy: a model on a mesh with its optimizer; the one object through which the trainer and the methods train.

The path of a batch: host rows of this dp rank → `batching.assemble` → counts over all ranks → `score.Scorer.at_head`
per micro-batch (the loss is computed inside the root's forward, from hidden states) → backward →
`optim.update.Updater`.

Owners: the policy has model, updater and reference, and hands the first two to its parts; `checkpoint` has an adapter's
base, and knows whether files hold the frozen weights; `weights` has the receivers and the tensors that are shared.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from dtrain.base.batch import COMPLETED, IMAGE_STREAMS, Batch, document_lengths, next_tokens, trained_tokens
from dtrain.checkpoint.huggingface.read import read_weights
from dtrain.models.common.config import ModelConfig
from dtrain.models.common.decoder import CausalLM
from dtrain.models.common.routing import BalanceLoss, RoutingRecord, RoutingTotals
from dtrain.optim.update import LossScale, Updater, build_optimizer, build_scheduler
from dtrain.parallel.mesh import Mesh
from dtrain.parallel.placement import reshard_model, weights_changed
from dtrain.parallel.runtime import Runtime
from dtrain.policy.batching import Batching, Fixed, MicroBatch, all_reduced, micro_batches, scatter, take
from dtrain.policy.build import build_model, offloads
from dtrain.policy.checkpoint import PolicyCheckpoint
from dtrain.policy.config import PolicyConfig
from dtrain.policy.offloader import DeviceMonitor, PolicyOffloader
from dtrain.policy.precision import choose_precision
from dtrain.policy.reference import Reference
from dtrain.policy.score import Loss, Scorer
from dtrain.policy.weights import WeightSender
from dtrain.recipe.automatic import without_auto

if TYPE_CHECKING:
    from dtrain.losses import TrainingSamplingParams
    from dtrain.models.vision.flops import ImageFlops
    from dtrain.optim.sums import GradientSums


def sync_gradients(model: nn.Module, is_last: bool, reduce_each: bool = False) -> None:
    """Set how the next backward leaves the gradients. After the last micro-batch of a step they are reduced; before,
    they stay as this rank computed them, or with `reduce_each` are reduced over the shards, though not yet over
    replicas."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(is_last or reduce_each)
        model.set_requires_all_reduce(is_last)
        model.set_is_last_backward(is_last)


def _method_of(part: str, method: Callable[..., Any]) -> property:
    """Return `method` of a policy's `part` as a method of the policy."""
    return property(attrgetter(f"{part}.{method.__name__}"), doc=method.__doc__)


class Policy:
    """Policy, built on every rank of `mesh` (collective). `optimizer` is None until `init_optimizer`.

    build: what makes the model, with `build_model`'s arguments. checkpoint, offloader, weights, monitor: what saves and
    loads it, moves it to the host and back, sends its weights, and reads its device.
    """

    def __init__(
        self,
        recipe: PolicyConfig,
        config: ModelConfig,
        mesh: Mesh,
        runtime: Runtime,
        build: Callable[..., CausalLM] = build_model,
    ):
        rank, device = self.rank, self.device = runtime.rank, runtime.device
        recipe = without_auto(recipe, mesh.dp_size)
        self.recipe, self.mesh = recipe, mesh
        self.precision = choose_precision(recipe.train.dtype, device.type, recipe.train.masters)
        model = self.model = build(recipe, config, mesh, self.precision, device)
        self.scorer = Scorer(model, mesh, device)
        self.updater: Updater | None = None
        self.sums: GradientSums | None = None  # of gradients in bfloat16
        self.reference: Reference | None = None
        is_on_host = bool(recipe.parallel.optimizer_offload) and device.type == "cuda"  # the optimizer's state
        self.gradient_device = device if is_on_host else None
        self.checkpoint = PolicyCheckpoint(
            model,
            recipe.model.directory,
            self.precision.compute,
            template=recipe.data.chat_template,
            holds_base=recipe.model.init == "scratch",
        )
        self.offloader = PolicyOffloader(
            model, device, keeps_parameters=offloads(recipe, device), keeps_state=is_on_host
        )
        self.weights = WeightSender(model, rank, device, self.precision.compute)
        self.monitor = DeviceMonitor(rank, device)
        if recipe.lora is not None and recipe.lora.path is not None:
            self.checkpoint.keep_base()
            self._read_adapter(recipe.lora.path)

    # Known by name to NeMo-RL's users, who call them on the policy.
    save_checkpoint = _method_of("checkpoint", PolicyCheckpoint.save_checkpoint)
    load_checkpoint = _method_of("checkpoint", PolicyCheckpoint.load_checkpoint)
    return_state_dict = _method_of("checkpoint", PolicyCheckpoint.return_state_dict)
    prepare_for_training = _method_of("offloader", PolicyOffloader.prepare_for_training)
    prepare_for_lp_inference = _method_of("offloader", PolicyOffloader.prepare_for_lp_inference)
    offload_before_refit = _method_of("offloader", PolicyOffloader.offload_before_refit)
    offload_after_refit = _method_of("offloader", PolicyOffloader.offload_after_refit)
    move_optimizer_to_device = _method_of("offloader", PolicyOffloader.move_optimizer_to_device)
    move_to_device = _method_of("offloader", PolicyOffloader.move_to_device)
    move_to_cpu = _method_of("offloader", PolicyOffloader.move_to_cpu)
    move_to_cuda = _method_of("offloader", PolicyOffloader.move_to_cuda)
    move_buffer_to_device = _method_of("offloader", PolicyOffloader.move_buffer_to_device)
    prepare_refit_info = _method_of("weights", WeightSender.prepare_refit_info)
    init_collective = _method_of("weights", WeightSender.init_collective)
    broadcast_weights_for_collective = _method_of("weights", WeightSender.broadcast_weights_for_collective)
    prepare_weights_for_ipc = _method_of("weights", WeightSender.prepare_weights_for_ipc)
    get_weights_ipc_handles = _method_of("weights", WeightSender.get_weights_ipc_handles)
    get_gpu_info = _method_of("monitor", DeviceMonitor.get_gpu_info)
    reset_peak_memory_stats = _method_of("monitor", DeviceMonitor.reset_peak_memory_stats)
    start_gpu_profiling = _method_of("monitor", DeviceMonitor.start_gpu_profiling)
    stop_gpu_profiling = _method_of("monitor", DeviceMonitor.stop_gpu_profiling)

    @property
    def optimizer(self) -> Optimizer | None:
        """Optimizer of the parameters that are trained; None before `init_optimizer`."""
        return None if self.updater is None else self.updater.optimizer

    def init_optimizer(self, total_steps: int) -> None:
        """Build the recipe's optimizer over the parameters and its schedule over `total_steps` optimizer steps."""
        recipe = self.recipe
        if self.precision.master == torch.bfloat16 and recipe.parallel.reduce_each:
            from dtrain.optim.sums import GradientSums

            self.sums = GradientSums(self.model.named_parameters(), recipe.run.seed)
        named = self.model.named_parameters()
        optimizer = build_optimizer(recipe.optimizer, named, recipe.run.seed, self.gradient_device)
        self.updater = self.checkpoint.updater = self.offloader.updater = Updater(
            self.model,
            optimizer,
            build_scheduler(recipe.scheduler, optimizer, total_steps),
            max_grad_norm=recipe.train.max_grad_norm,
            skip_nonfinite=recipe.train.skip_nonfinite,
            loss_scale=LossScale() if self.precision.compute == torch.float16 else None,
        )

    def train(
        self,
        batch: Batch,
        loss_fn: Loss,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | Batching | None = None,
    ) -> dict[str, Any]:
        """Train on `batch`, this dp rank's rows [n, S], as `batch.complete` takes them; n may differ between ranks and
        be 0 on some. Streams of the caller's own, for `loss_fn`, are what `batching` says.

        gbs: rows of one optimizer step over all dp ranks, as many of each (default: the whole batch is one step); mbs:
        rows of a micro-batch (default: the recipe's), or another way to make them (`batching`). Ranks with fewer rows
        take part with micro-batches of padding, in which each stream has its pad value, 0 for the caller's. A row that
        sample_mask leaves out is no row of its step: `loss_fn` does not see it, nor is it a sequence that counts.
        loss_fn(source, micro_batch, global_seqs, global_tokens) -> (loss, metrics): the sum of its losses over all
        micro-batches and dp and cp ranks is the step's loss, so it divides by the global counts itself; its metrics are
        scalars that are summed likewise. A stream `routed_experts` says to which experts of a mixture tokens go
        (`batch.STREAMS`).
        eval_mode: losses alone; no gradient, no optimizer needed.

        Returns, on the host, `global_loss` [steps], `sums` (each metric's sum, float64 [steps]), `tokens` [steps, 3]
        (trained tokens, documents, non-padding tokens), `pairs` [steps, 2] (of a token and one of its document, and of
        those within the model's window), `vision_flops` [steps] (of the tower), all three over all ranks, `loads` (of a
        mixture of experts, each [steps]; `Routing.measures`), `grad_norm` (of the last step, before clipping), `lr`
        (that it used), `rank`, and `all_mb_metrics` (each metric of this rank, a list by micro-batch).
        The collectives are those of `batching.take`, and per step one all-reduce of the counts on the host before the
        backward, one of loss and metrics after it; one more before where the rows of a micro-batch vary. With images an
        all-gather of their sizes for each micro-batch, over dp on the host. Raises ValueError
        as `batching.take` does, and for a gbs that is not as many rows of each dp rank.
        """
        updater = None if eval_mode else self.updater
        if updater is None and not eval_mode:
            raise RuntimeError("Policy.train needs init_optimizer first; with eval_mode=True it does not")
        if gbs is not None and (gbs < 1 or gbs % self.mesh.dp_size):
            raise ValueError(f"gbs={gbs} must be a multiple of the {self.mesh.dp_size} data-parallel ranks")
        taken = take(batch, self.mesh.dp, self.model.config.vocab_size)
        batching = self._batching(mbs)
        per_step = gbs // self.mesh.dp_size if gbs else max(taken.most_rows, 1)
        totals, counts, metrics = [], [], []
        norm = lr = None
        routing_settings = self.model.routing
        self.model.train(not eval_mode)
        for start in range(0, max(taken.most_rows, 1), per_step):
            rows, images = taken.of_step(slice(start, start + per_step))
            most = min(per_step, taken.most_rows - start)
            batches, _ = micro_batches(rows, batching, most, self.mesh.dp, taken.by_row, images)
            counts.append(all_reduced(self._counts(rows, () if updater is None else batches), self.mesh.dp))
            # Padding alone still divides by one: a step without a trained token has loss 0, not NaN.
            tokens, sequences, *_ = counts[-1].clamp(min=1)
            divisors = [count.to(self.device, non_blocking=True) for count in (sequences, tokens)]
            routing: list[Tensor] = []
            if updater is None:
                loss, measured = self._evaluate(batches, loss_fn, divisors)
            else:
                lr = updater.scheduler.get_last_lr()[0]
                if self.model.adapters is not None:
                    self.model.adapters.step = updater.scheduler.steps
                loss, measured, routing = self._backward(updater, batches, loss_fn, divisors)
            metrics += measured
            names = list(measured[0])
            total = self._summed(loss, measured, routing)
            if updater is not None:
                norm, total = updater.update(total)
            totals.append(total)
        whole = torch.stack(totals, 1).cpu()  # [1 + metrics (+ layers · experts), steps]
        routing_measures: dict[str, Tensor] = {}
        if routing_settings is not None and updater is not None:
            routing_measures = routing_settings.measures(whole[1 + len(names) :])
        return {
            "loads": routing_measures,
            "global_loss": whole[0],
            "sums": dict(zip(names, whole[1:], strict=False)),
            "tokens": torch.stack(counts)[:, :3],
            "pairs": torch.stack(counts)[:, 3:5],
            "vision_flops": torch.stack(counts)[:, 5],
            "grad_norm": norm,
            "lr": lr,
            "rank": self.rank,
            "all_mb_metrics": {name: [values[name] for values in metrics] for name in names},
        }

    def _summed(self, loss: Tensor, measured: Sequence[dict[str, Tensor]], seen: Sequence[Tensor]) -> Tensor:
        """Return a step's loss, its metrics and `seen`, summed over micro-batches and ranks, float64 [n] on the
        device. One all-reduce."""
        zero = torch.zeros((), dtype=torch.float64, device=self.device)
        sums = [sum((values[name].detach().double() for values in measured), zero) for name in measured[0]]
        return all_reduced(torch.cat([torch.stack([loss.double(), *sums]), *seen]), self.mesh.dp_cp)

    def _counts(self, rows: Batch, batches: Sequence[MicroBatch]) -> Tensor:
        """Return the counts of a step's rows on this dp rank, int64 [6]: trained tokens, documents, tokens; pairs of a
        token and one of its document, and of those within the model's window; the tower's FLOPs for `batches`."""
        lengths = document_lengths(rows)
        window = self.model.config.sliding_window or 1  # without one, no layer's FLOPs are those of its pairs
        pairs = [int((lengths * keys).sum()) for keys in (lengths, lengths.clamp(max=window))]
        vision = round(sum(self._image_flops.of(batch.images) for batch in batches if batch.images is not None))
        return torch.tensor([trained_tokens(rows), len(lengths), int(lengths.sum()), *pairs, vision])

    @cached_property
    def _image_flops(self) -> "ImageFlops":
        from dtrain.models.vision.flops import ImageFlops  # a model of text alone loads no tower

        return ImageFlops(*self.model.model.vision)

    def get_logprobs(self, batch: Batch, micro_batch_size: int | Batching | None = None) -> dict[str, Tensor]:
        """Return {"logprobs": [n, S]} on the CPU: at position i the log-probability of token i given those before it in
        its document, 0 at the first and on padding, whatever is trained. `batch` as for `train`.

        The same on every cp and tp rank; max(float32, the dtype of computation). Collective.
        """
        (values,) = self._scored(batch, micro_batch_size, lambda rows: [self.scorer.logprobs(rows)], every_token=True)
        return {"logprobs": values.roll(1, 1)}  # the last position has no label

    def label_logprobs(
        self,
        batch: Batch,
        micro_batch_size: int | Batching | None = None,
        sampling: "TrainingSamplingParams | None" = None,
    ) -> Tensor:
        """Return log p(labels) at the labels, else 0: [n, S] on the CPU. `batch` as for `train`; a token without a
        label costs no product of the head. sampling: of the distribution after this temperature and these filters,
        −inf where they leave a label out. Collective."""
        return self._scored(batch, micro_batch_size, lambda rows: [self.scorer.logprobs(rows, sampling)])[0]

    def label_entropies(
        self, batch: Batch, micro_batch_size: int | Batching | None, sampling: "TrainingSamplingParams"
    ) -> Tensor:
        """Return entropies of the distributions that labels were drawn from (before top-k and top-p), at the labels,
        else 0: [n, S] on the CPU. `batch` as for `train`. Collective."""
        return self._scored(batch, micro_batch_size, lambda rows: [self.scorer.entropies(rows, sampling)])[0]

    def get_topk_logits(
        self, batch: Batch, k: int, micro_batch_size: int | Batching | None = None
    ) -> dict[str, Tensor]:
        """Return {"topk_logits", "topk_indices"}, both [n, S, k] on the CPU: at every position the k largest logits
        (after the model's softcap), descending, and their token ids, equal ones by ascending id; 0 on padding. `batch`
        as for `train`; its labels play no part. k > V means V. The same on every cp and tp rank. Collective.
        """
        score = partial(self.scorer.topk_logits, k=k)
        logits, ids = self._scored(batch, micro_batch_size, score, every_token=True)
        return {"topk_logits": logits, "topk_indices": ids}

    def init_reference_model(self, path: str | None = None, *, base: bool = False) -> None:
        """Keep a copy of the trained weights as they are now, or of all weights of the model at `path`, which must be
        of the same shapes. Collective with a path. Raises UserError where that model does not fit.

        base: keep the model without its adapters, as happens too where they are new: nothing of these is copied then.
        """
        if path is not None:
            self.reference = Reference(self.model, whole=True, adapters=False)
            with self.reference.in_place():
                read_weights(self.model, path)
        elif base and self.checkpoint.base is not None:
            self.reference = self.checkpoint.base
        else:
            is_trained = self.updater is not None and self.updater.scheduler.steps > 0
            is_new = self.recipe.lora is not None and self.checkpoint.base is None and not is_trained
            self.reference = Reference(self.model, whole=False, adapters=not (base or is_new))

    @contextmanager
    def use_reference_model(self) -> Iterator[None]:
        """Context in which the model holds the reference's weights, and their router decides, whatever `routed_experts`
        say; after it, its own again, errors included. No collective."""
        if self.reference is None:
            raise RuntimeError("use_reference_model needs init_reference_model first")
        with self.reference.in_place():
            yield

    def get_reference_policy_logprobs(
        self, batch: Batch, micro_batch_size: int | Batching | None = None
    ) -> dict[str, Tensor]:
        """Return `get_logprobs` of the reference: {"reference_logprobs": [n, S]}."""
        with self.use_reference_model():
            return {"reference_logprobs": self.get_logprobs(batch, micro_batch_size)["logprobs"]}

    def _read_adapter(self, path: str) -> None:
        from dtrain.checkpoint.peft.files import read_adapter  # a run without an adapter loads none of it

        read_adapter(self.model, path)
        weights_changed(self.model)

    def _scored(
        self,
        batch: Batch,
        micro_batch_size: int | Batching | None,
        score: Callable[[Batch], Sequence[Tensor]],
        every_token: bool = False,
    ) -> list[Tensor]:
        """Return the tensors [b, s, ..] that `score` gives of each host micro-batch, as [n, S, ..] of the batch on the
        CPU. Streams beside the rows' own, images' and `routed_experts` are not read; every_token: nor are labels, but
        `next_tokens` in their place."""
        names = {*COMPLETED, *IMAGE_STREAMS, "images", "routed_experts"}
        if every_token:
            names -= {"labels", "token_mask", "sample_mask"}
        if self.reference is not None and self.reference.is_in_place:
            names -= {"routed_experts"}  # chosen by other weights: the reference's router decides itself
        read = {name: value for name, value in batch.items() if name in names}
        batch, _, most_rows, _, images = take(read, self.mesh.dp, self.model.config.vocab_size)
        if every_token:
            batch["labels"] = next_tokens(batch)
        batching = self._batching(micro_batch_size)
        batches, plan = micro_batches(batch, batching, most_rows, self.mesh.dp, images=images)
        self.model.eval()
        scores = [[tensor.cpu() for tensor in score(rows)] for rows in batches]
        reshard_model(self.model)
        return [scatter(parts, batch, plan, batching.packs) for parts in zip(*scores, strict=True)]

    def _batching(self, mbs: int | Batching | None) -> Batching:
        return Fixed(mbs or self.recipe.train.micro) if mbs is None or isinstance(mbs, int) else mbs

    def _backward(
        self, updater: Updater, batches: Sequence[Batch], loss_fn: Loss, divisors: Sequence[Tensor]
    ) -> tuple[Tensor, list[dict[str, Tensor]], list[Tensor]]:
        """Add gradients of the sum of `loss_fn` over the micro-batches, times the loss scale, to `.grad`; reduced once,
        at the last, or with `parallel.reduce_each` over the shards at every one.

        Returns this rank's loss (a detached scalar, unscaled, a mixture's balance loss with it), the metrics of each
        micro-batch, and in a mixture of experts the totals of its routing ([n] float64).
        """
        scale = updater.loss_scale.scale if updater.loss_scale is not None else 1.0
        total, metrics = torch.zeros((), device=self.device), []
        routing, factor = self.model.routing, self.recipe.moe.balance
        balance = None
        if routing is not None and factor:
            balance = BalanceLoss(factor / (routing.num_layers * divisors[0]), scale)
        totals = RoutingTotals()
        for index, batch in enumerate(batches):
            is_last = index == len(batches) - 1
            sync_gradients(self.model, is_last, bool(self.recipe.parallel.reduce_each))
            if self.sums is not None:
                self.sums.begin(updater.scheduler.steps, index, is_last)
            record = RoutingRecord()
            loss, measured = self.scorer.at_head(batch, loss_fn, *divisors, balance=balance, record=record)
            (loss * scale if scale != 1.0 else loss).backward()
            total = total + loss.detach()
            metrics.append(measured)
            if routing is not None:
                total = total + record.balance_loss()
                totals.add(record)
        if self.sums is not None:
            self.sums.finish()
        return total, metrics, [] if routing is None else [totals.flat()]

    @torch.no_grad()
    def _evaluate(
        self, batches: Sequence[Batch], loss_fn: Loss, divisors: Sequence[Tensor]
    ) -> tuple[Tensor, list[dict[str, Tensor]]]:
        results = [self.scorer.at_head(batch, loss_fn, *divisors) for batch in batches]
        reshard_model(self.model)
        return torch.stack([loss for loss, _ in results]).sum(), [measured for _, measured in results]
