"""Policy: a model on a mesh with its optimizer; the one object through which the trainer and the methods train.

The path of a batch: host rows of this dp rank → `batching.assemble` → counts over all ranks → `score.Scorer.at_head`
per micro-batch (the loss is computed inside the root's forward, from hidden states) → backward → `optim.Updater`.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from dtrain.base.batch import COMPLETED, Batch, documents, next_tokens, real_tokens, trained_tokens
from dtrain.checkpoint.huggingface.read import read_weights
from dtrain.models.common.config import ModelConfig
from dtrain.models.common.decoder import CausalLM
from dtrain.optim.update import LossScale, Updater, build_optimizer, build_scheduler
from dtrain.parallel.fsdp import reshard_model, sync_gradients
from dtrain.parallel.mesh import Mesh
from dtrain.parallel.runtime import Runtime
from dtrain.policy.batching import Batching, Fixed, MicroBatch, Taken, assemble, row_lengths, scatter, take
from dtrain.policy.build import build_model
from dtrain.policy.memory import Memory
from dtrain.policy.precision import choose_precision
from dtrain.policy.reference import Reference
from dtrain.policy.saved import Saved
from dtrain.policy.score import Loss, Scorer
from dtrain.policy.weights import WeightsOut
from dtrain.recipe.schema import Recipe

if TYPE_CHECKING:
    from dtrain.losses import TrainingSamplingParams


class Policy(Saved, Memory, WeightsOut):
    """Policy, built on every rank of `mesh` (collective). `optimizer` is None until `init_optimizer`.

    build: what makes the model, with `build_model`'s arguments.
    """

    def __init__(
        self,
        recipe: Recipe,
        config: ModelConfig,
        mesh: Mesh,
        runtime: Runtime,
        build: Callable[..., CausalLM] = build_model,
    ):
        self.recipe = recipe
        self.mesh = mesh
        self.rank = runtime.rank
        self.device = runtime.device
        self.offloaded = recipe.parallel.cpu_offload and runtime.device.type != "cpu"
        self.optimizer_offloaded = recipe.parallel.optimizer_offload and runtime.device.type == "cuda"
        self.offload_device = self.device if self.optimizer_offloaded else None  # of the optimizer's state
        self.precision = choose_precision(recipe.train.dtype, runtime.device.type, recipe.train.masters)
        self.model = build(recipe, config, mesh, self.precision, runtime.device)
        self.scorer = Scorer(self.model, mesh, self.device)
        self.loss_scale = LossScale() if self.precision.compute == torch.float16 else None
        self.optimizer: Optimizer | None = None
        self._updater: Updater | None = None
        self._sums: Any = None  # of gradients in bfloat16
        self.reference: Reference | None = None
        self._base: Reference | None = None
        self._saves_frozen = recipe.model.init == "scratch"
        if recipe.lora is not None and recipe.lora.path is not None:
            self._load_adapter(partial(self._read_adapter, recipe.lora.path))

    def init_optimizer(self, total_steps: int) -> None:
        """Build the recipe's optimizer over the parameters and its schedule over `total_steps` optimizer steps."""
        train = self.recipe.train
        if self.precision.master == torch.bfloat16 and self.recipe.parallel.reduce_each:
            from dtrain.optim.sums import GradientSums

            self._sums = GradientSums(self.model.named_parameters(), self.recipe.run.seed)
        named = self.model.named_parameters()
        self.optimizer = build_optimizer(self.recipe.optimizer, named, self.recipe.run.seed, self.offload_device)
        self._updater = Updater(
            self.model,
            self.optimizer,
            build_scheduler(self.recipe.scheduler, self.optimizer, total_steps),
            max_grad_norm=train.max_grad_norm,
            skip_nonfinite=train.skip_nonfinite,
            loss_scale=self.loss_scale,
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
        (trained tokens, documents, non-padding tokens, over all ranks), `loads` (of a mixture of experts, each [steps];
        `Routing.measures`), `grad_norm` (of the last step, before clipping), `lr` (that it used), `rank`, and
        `all_mb_metrics` (each metric of this rank, a list by micro-batch).
        The collectives are those of `batching.take`, and per step one all-reduce of the counts on the host before the
        backward, one of loss and metrics after; one more before where the rows of a micro-batch vary. Raises ValueError
        as `batching.take` does, and for a gbs that is not as many rows of each dp rank.
        """
        updater = None if eval_mode else self._updating
        if gbs is not None and (gbs < 1 or gbs % self.mesh.dp_size):
            raise ValueError(f"gbs={gbs} must be a multiple of the {self.mesh.dp_size} data-parallel ranks")
        batch, by_row, most_rows, counted = self._take(batch)
        batching = self._batching(mbs)
        per_step = gbs // self.mesh.dp_size if gbs else max(most_rows, 1)
        totals, counts, metrics = [], [], []
        norm = lr = None
        routing = self.model.routing
        self.model.train(not eval_mode)
        for start in range(0, max(most_rows, 1), per_step):
            of_step = slice(start, start + per_step)
            rows = {name: tensor[of_step] for name, tensor in batch.items()}
            if counted is not None:
                rows = {name: tensor[counted[of_step]] for name, tensor in rows.items()}
            batches, _ = self._micro_batches(rows, batching, min(per_step, most_rows - start), by_row)
            count = self._summed(_counts(rows), self.mesh.dp)
            counts.append(count)
            # Padding alone still divides by one: a step without a trained token has loss 0, not NaN.
            both = (count[1], count[0])  # sequences, tokens
            divisors = [n.clamp(min=1).to(self.device, non_blocking=True) for n in both]
            if updater is None:
                loss, measured = self._evaluate(batches, loss_fn, divisors)
            else:
                lr = updater.scheduler.get_last_lr()[0]
                if self.model.adapters is not None:
                    self.model.adapters.step = updater.scheduler.steps
                loss, measured = self._backward(batches, loss_fn, divisors)
                norm = updater.update()
            metrics += measured
            names = list(measured[0])
            seen = [] if updater is None or routing is None else [routing.seen()]
            zero = torch.zeros((), dtype=torch.float64, device=self.device)
            sums = [sum((values[name].detach().double() for values in measured), zero) for name in names]
            totals.append(self._summed(torch.cat([torch.stack([loss.double(), *sums]), *seen]), self.mesh.dp_cp))
        whole = torch.stack(totals, 1).cpu()  # [1 + metrics (+ layers · experts), steps]
        return {
            "loads": {} if routing is None or updater is None else routing.measures(whole[1 + len(names) :]),
            "global_loss": whole[0],
            "sums": dict(zip(names, whole[1:], strict=False)),
            "tokens": torch.stack(counts),
            "grad_norm": norm,
            "lr": lr,
            "rank": self.rank,
            "all_mb_metrics": {name: [values[name] for values in metrics] for name in names},
        }

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
        elif base and self._base is not None:
            self.reference = self._base
        else:
            trained = self._updater is not None and self._updater.scheduler.steps > 0
            is_new = self.recipe.lora is not None and self._base is None and not trained
            self.reference = Reference(self.model, whole=False, adapters=not (base or is_new))

    @contextmanager
    def use_reference_model(self) -> Iterator[None]:
        """Context in which the model holds the reference's weights, and their router decides, whatever `routed_experts`
        say; after it, its own again, errors included. No collective."""
        if self.reference is None:
            raise RuntimeError("use_reference_model needs init_reference_model first")
        with self.reference.in_place(), self.scorer.without_replay():
            yield

    def get_reference_policy_logprobs(
        self, batch: Batch, micro_batch_size: int | Batching | None = None
    ) -> dict[str, Tensor]:
        """Return `get_logprobs` of the reference: {"reference_logprobs": [n, S]}."""
        with self.use_reference_model():
            return {"reference_logprobs": self.get_logprobs(batch, micro_batch_size)["logprobs"]}

    @property
    def _updating(self) -> Updater:
        if self._updater is None:
            raise RuntimeError("Policy.train needs init_optimizer first; with eval_mode=True it does not")
        return self._updater

    def _scored(
        self,
        batch: Batch,
        micro_batch_size: int | Batching | None,
        score: Callable[[Batch], Sequence[Tensor]],
        every_token: bool = False,
    ) -> list[Tensor]:
        """Return the tensors [b, s, ..] that `score` gives of each host micro-batch, as [n, S, ..] of the batch on the
        CPU. Streams beside the rows' own and `routed_experts` are not read; every_token: nor are labels, but
        `next_tokens` in their place."""
        names = {*COMPLETED, "routed_experts"} - ({"labels", "token_mask", "sample_mask"} if every_token else set())
        batch, _, most_rows, _ = self._take({name: value for name, value in batch.items() if name in names})
        if every_token:
            batch["labels"] = next_tokens(batch)
        batching = self._batching(micro_batch_size)
        batches, plan = self._micro_batches(batch, batching, most_rows)
        self.model.eval()
        scores = [[tensor.cpu() for tensor in score(rows)] for rows in batches]
        reshard_model(self.model)
        return [scatter(parts, batch, plan, batching.packs) for parts in zip(*scores, strict=True)]

    def _take(self, batch: Mapping[str, Any]) -> Taken:
        group = self.mesh.dp.get_group() if self.mesh.dp_size > 1 else None
        return take(batch, group, self.model.config.vocab_size)

    def _batching(self, mbs: int | Batching | None) -> Batching:
        return Fixed(mbs or self.recipe.train.micro_batch) if mbs is None or isinstance(mbs, int) else mbs

    def _micro_batches(
        self, rows: Batch, batching: Batching, most_rows: int, by_row: Collection[str] = ()
    ) -> tuple[list[MicroBatch], list[list[int]]]:
        """Return the micro-batches of a step, as many on every rank, and the indices of the rows that each holds.
        most_rows: of all ranks; by_row: streams with a value for each row."""
        plan = batching.plan(row_lengths(rows))
        passes = -(-most_rows // batching.rows) if isinstance(batching, Fixed) else self.most_over_dp(len(plan))
        return assemble(rows, plan, max(1, passes), batching.packs, by_row), plan

    def most_over_dp(self, value: int) -> int:
        """Return the largest of the dp ranks' values. One all-reduce."""
        return int(self._summed(torch.tensor([value]), self.mesh.dp, dist.ReduceOp.MAX))

    def _backward(
        self, batches: Sequence[Batch], loss_fn: Loss, divisors: Sequence[Tensor]
    ) -> tuple[Tensor, list[dict[str, Tensor]]]:
        """Add gradients of the sum of `loss_fn` over the micro-batches, times the loss scale, to `.grad`; reduced once,
        at the last, or with `parallel.reduce_each` over the shards at every one.

        Returns this rank's loss (a detached scalar, unscaled, a mixture's balance loss with it) and the metrics of each
        micro-batch.
        """
        scale = self.loss_scale.scale if self.loss_scale is not None else 1.0
        total, metrics = torch.zeros((), device=self.device), []
        routing, balance = self.model.routing, self.recipe.moe.balance
        if routing is not None:
            routing.begin(balance / (routing.layers * divisors[0]) if balance else None, scale)
        for index, batch in enumerate(batches):
            is_last = index == len(batches) - 1
            sync_gradients(self.model, is_last, self.recipe.parallel.reduce_each)
            if self._sums is not None:
                self._sums.begin(self._updating.scheduler.steps, index, is_last)
            loss, measured = self.scorer.at_head(batch, loss_fn, *divisors)
            (loss * scale if scale != 1.0 else loss).backward()
            total = total + loss.detach()
            metrics.append(measured)
            if routing is not None:
                total = total + routing.add()
        if routing is not None:
            routing.end()
        if self._sums is not None:
            self._sums.finish()
        return total, metrics

    @torch.no_grad()
    def _evaluate(
        self, batches: Sequence[Batch], loss_fn: Loss, divisors: Sequence[Tensor]
    ) -> tuple[Tensor, list[dict[str, Tensor]]]:
        results = [self.scorer.at_head(batch, loss_fn, *divisors) for batch in batches]
        reshard_model(self.model)
        return torch.stack([loss for loss, _ in results]).sum(), [measured for _, measured in results]

    def sum_over_dp(self, values: Tensor) -> Tensor:
        """Return host `values` [..], summed in place over the ranks that hold different samples. One all-reduce."""
        return self._summed(values, self.mesh.dp)

    def gather_over_dp(self, rows: Tensor) -> tuple[Tensor, int]:
        """Return host rows [n, ..] of every dp rank, in the ranks' order, and where this rank's begin; n may differ.

        Two all-gathers."""
        size = self.mesh.dp_size
        if size == 1:
            return rows, 0
        group = self.mesh.dp.get_group()
        counts = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
        dist.all_gather(counts, torch.tensor([len(rows)]), group=group)
        lengths = [int(count) for count in counts]
        parts = [rows.new_zeros(max(lengths), *rows.shape[1:]) for _ in range(size)]
        padded = torch.cat([rows, rows.new_zeros(max(lengths) - len(rows), *rows.shape[1:])])
        dist.all_gather(parts, padded, group=group)
        joined = torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])
        return joined, sum(lengths[: self.mesh.dp_rank])

    @staticmethod
    def _summed(values: Tensor, mesh: DeviceMesh, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Return `values`, reduced in place over the ranks of a one-dimensional mesh."""
        if mesh.size() > 1:
            dist.all_reduce(values, op, group=mesh.get_group())
        return values


def _counts(rows: Batch) -> Tensor:
    return torch.tensor([trained_tokens(rows), documents(rows), real_tokens(rows)])
