"""The interface of losses to the model: log-probabilities of a micro-batch's labels, from inside the root's forward,
token by token or summed by document."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dtrain.attention.packing import Packing
from dtrain.base.batch import (
    IGNORE_INDEX,
    PADDING_SEQ_ID,
    STREAMS,
    Batch,
    Grid,
    RowImages,
    document_ids,
    num_documents,
    sum_by_document,
)
from dtrain.base.ranks import Ranks
from dtrain.losses.head.vocabulary import HeadInput, VocabShard, compute_dtype
from dtrain.losses.head.weighted_sum import TokenLossFn, TokenSums, token_loss_sums, weighted_logprob_sum
from dtrain.models.common.decoder import CausalLM
from dtrain.models.common.micro_batch import NO_ADAPTERS, AdapterContext, Images, MicroBatchContext, RankImages
from dtrain.models.common.routing import BalanceLoss, MicroBatchRouting, RoutingRecord
from dtrain.parallel import context
from dtrain.parallel.collectives import all_reduce_in_forward
from dtrain.parallel.context.batch import pad_right, shard_streams
from dtrain.parallel.mesh import Mesh
from dtrain.parallel.tensor import ScoreHead
from dtrain.policy.results import StepObserver

if TYPE_CHECKING:
    from dtrain.losses.head.logprobs import HeadLogprobs, TrainingSamplingParams
    from dtrain.losses.policy.formulas import Documents


class ModelInputs(NamedTuple):
    """Arguments of a model's forward.

    Attributes:
        input_ids: This rank's tokens, [B, S/cp].
        context: The context of the micro-batch.
    """

    input_ids: Tensor
    context: MicroBatchContext


_ALIGNED = 16  # bytes: where a stream of any dtype may begin
Loss = Callable[["LogprobSource", Batch, Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]]


class LogprobSource:
    """Head of one micro-batch's forward. Valid only inside the loss it is handed to."""

    def __init__(
        self,
        hidden: Tensor,
        head_weight: Tensor,
        batch: Batch,
        inputs: ModelInputs,
        documents: int,
        head: "HeadSettings",
    ):
        self._hidden = hidden  # [B, S/cp, D]
        self._head_weight = head_weight  # [V/tp, D]
        self._batch = batch
        self.inputs = inputs  # what the model was called with, for another model's forward on the same tokens
        self.num_documents = documents  # of the micro-batch, whole
        self._cp, self._score = head.cp, head.score
        self.shard = head.shard  # part of the vocabulary that the head's weight is; None for all of it
        self._of_head: Any = {"softcap": head.softcap, "shard": head.shard}

    @property
    def head_input(self) -> HeadInput:
        """Hidden states [B · S/cp, D] and weight behind the logits of this rank's positions, for losses of a method's
        own."""
        return HeadInput(self._hidden.flatten(0, 1), self._head_weight, self._of_head["softcap"])

    def token_loss_sums(self, loss: TokenLossFn, *, label_smoothing: float = 0.0) -> TokenSums:
        """Return sums over this rank's labelled positions, scalars, the same on every tp rank: of `loss` of log
        p(label), which may be smoothed, and of labels that are the likeliest token. See the function."""
        hidden, weight, labels, index = self._labelled
        return token_loss_sums(hidden, weight, labels, index, loss, label_smoothing=label_smoothing, **self._of_head)

    def weighted_sum(self, token_weights: Tensor | None = None) -> Tensor:
        """Return Σ token_weights · log p(label) over this rank's labelled positions, a scalar, alike on every tp rank.

        token_weights: [B, S/cp], constants, not read where there is no label; None for ones.
        """
        hidden, weight, labels, index = self._labelled
        weights = (
            torch.ones(index.shape, device=index.device)
            if token_weights is None
            else token_weights.flatten().index_select(0, index)
        )
        return weighted_logprob_sum(hidden, weight, labels, weights, index, **self._of_head)

    @property
    def _labelled(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Hidden states [B · S/cp, D], head, the labels [T], and their places [T]."""
        index = self._batch["label_index"]
        labels = self._batch["labels"].flatten().index_select(0, index)
        return self._hidden.flatten(0, 1), self._head_weight, labels, index

    def logprobs(self, *, temperature: float = 1.0, entropy: bool = False, log_p2: bool = False) -> "HeadLogprobs":
        """Return log p(label) of every position of this rank, [B, S/cp], 0 where there is no label; on request the
        entropy and log Σ p². The same on every tp rank; the first two are
        differentiable, whatever the loss does with them. For a sum with known weights `weighted_sum` is cheaper.
        """
        from dtrain.losses.head.logprobs import logprobs_from_hidden_states

        return logprobs_from_hidden_states(
            self._hidden,
            self._head_weight,
            self._batch["labels"],
            temperature=temperature,
            entropy=entropy,
            log_p2=log_p2,
            index=self._batch["label_index"],
            **self._of_head,
        )

    def sampled_logprobs(self, sampling: "TrainingSamplingParams", *, entropy: bool = False) -> "HeadLogprobs":
        """Return `logprobs` of the distribution that labels were drawn from: −inf where top-k or top-p leave a label
        out. The entropy is that of all tokens."""
        from dtrain.losses.head.filtered import filtered_logprobs_from_hidden_states
        from dtrain.losses.head.logprobs import HeadLogprobs, need_top_k_or_top_p_filtering

        if not need_top_k_or_top_p_filtering(sampling):
            return self.logprobs(temperature=sampling.temperature, entropy=entropy)
        entropies = self.logprobs(temperature=sampling.temperature, entropy=True).entropy if entropy else None
        logprobs = filtered_logprobs_from_hidden_states(
            self._hidden,
            self._head_weight,
            self._batch["labels"],
            sampling,
            index=self._batch["label_index"],
            **self._of_head,
        )
        return HeadLogprobs(logprobs, entropies)

    def sum_by_document(self, values: Tensor) -> Tensor:
        """Return Σ of `values` [.., B, S/cp] over each document of the micro-batch, [.., documents], on every cp rank.

        The documents are counted row by row, as in `batch.document_ids`. Under cp one all-reduce, which the derivative
        passes by: the losses that the cp ranks go on with must be the same.
        """
        sums = sum_by_document(values, self._batch["document_ids"], self.num_documents)
        return sums if self._cp.size() == 1 else all_reduce_in_forward(sums, self._cp.get_group())

    def token_scores(self) -> Tensor:
        """Compute the outputs of a classifier or critic at every position of this rank.

        Returns:
            [B, S/cp, labels] in max(float32, the dtype of computation), the same on every tp rank.

        Raises:
            ValueError: If the model has a vocabulary's head.

        Collectives:
            Over tp one all-reduce.
        """
        dtype = compute_dtype(self._hidden.dtype)
        return self._required_score.product(self._hidden.to(dtype), self._head_weight.to(dtype))

    @property
    def _required_score(self) -> ScoreHead:
        if self._score is None:
            raise ValueError("this model has a vocabulary's head, and gives no scores")
        return self._score

    def scores(self) -> Tensor:
        """Return a classifier's outputs [documents, labels], each read at its document's one label, in max(float32, the
        dtype); whole on every rank of tp and cp, as `sum_by_document`. Over tp one all-reduce, over cp another."""
        index = self._batch["label_index"]
        dtype = compute_dtype(self._hidden.dtype)
        hidden = self._hidden.flatten(0, 1).index_select(0, index).to(dtype)  # [T, D]
        values = self._required_score.product(hidden, self._head_weight.to(dtype))  # [T, labels]
        ids = self._batch["document_ids"].flatten().index_select(0, index)
        outputs = values.new_zeros(self.num_documents, values.shape[1]).index_add(0, ids, values)
        return outputs if self._cp.size() == 1 else all_reduce_in_forward(outputs, self._cp.get_group())

    def sequences(self, mask: Tensor) -> "Documents":
        """Return the documents of the micro-batch as a policy loss takes them; mask [B, S/cp]: the tokens that count.
        Under cp one all-reduce."""
        from dtrain.losses.policy.formulas import Documents

        return Documents(self._batch["document_ids"], self.num_documents, mask, self._cp.get_group())

    def count_once(self, value: Tensor) -> Tensor:
        """Return this rank's share of a value that every cp rank computes alike, so that a sum over the ranks counts it
        once.

        The first rank has the value and the others have 0. The sum is exact, also for counts and for a number of ranks
        such as 3, by which a division would round. The gradient is the full one on every rank, because each rank passes
        it to its own tokens only.

        Args:
            value: Computed from `sum_by_document`, [..], of any dtype.
        """
        if self._cp.size() == 1:
            return value
        own = value.detach()
        share = own if self._cp.get_local_rank() == 0 else torch.zeros_like(own)
        return share + (value - own) if value.requires_grad else share


@dataclass(frozen=True)
class HeadSettings:
    """Settings of the head: the model and the mesh."""

    softcap: float | None
    shard: VocabShard | None
    cp: DeviceMesh
    score: ScoreHead | None = None  # of a classifier

    @classmethod
    def of(cls, model: CausalLM, mesh: Mesh) -> "HeadSettings":
        head = model.head
        start = head.vocab_start  # None too where a plan of the user's own leaves the head whole
        largest = -(-model.config.vocab_size // mesh.tp.size())
        shard = None if start is None else VocabShard(start, mesh.tp.get_group(), largest)
        score = head if isinstance(head, ScoreHead) else None
        return cls(model.config.final_logit_softcapping, shard, mesh.cp, score)


class Scorer:
    """Losses and log-probabilities of micro-batches on a model on a mesh.

    Args:
        model: The model.
        mesh: Its mesh.
        device: Its device.
        observer: Receives the events of each forward. None if nobody observes.
    """

    def __init__(self, model: CausalLM, mesh: Mesh, device: torch.device, observer: StepObserver | None = None):
        self.model, self.mesh, self.device = model, mesh, device
        self._observer = StepObserver() if observer is None else observer
        self._head = HeadSettings.of(model, mesh)

    def run_at_head(
        self,
        batch: Batch,
        fn: Callable[..., Any],
        *more: Any,
        balance: BalanceLoss | None = None,
        record: RoutingRecord | None = None,
        adapters: bool = True,
        step: int = 0,
    ) -> Any:
        """Return `fn(source, local, *more)`, called inside the root's forward, with a graph that is ready for backward.

        A `Loss`, with the global counts in `more`, returns its loss and metrics. Several micro-batches may be in
        flight: each call has a context of its own. Rows of one document each, with positions from 0, take the plain
        causal kernel.

        Args:
            batch: One host micro-batch of full rows.
            fn: Called with a `LogprobSource`, with this rank's part of every stream on the device, and with `more`.
            more: Further arguments of `fn`.
            balance: The balance loss of a mixture of experts. None if there is none.
            record: Filled by the sparse layers of a mixture of experts. None if nobody reads it.
            adapters: Whether the model's adapters take part.
            step: The optimizer step, from which the dropout of adapters is computed in training.
        """
        self._observer.forward_begins(batch)
        is_packed = bool((batch["seq_ids"] > PADDING_SEQ_ID + 1).any())
        if self.model.config.experts is not None:  # padding is not routed
            is_packed |= self.mesh.cp.size() > 1 or bool((batch["seq_ids"] == PADDING_SEQ_ID).any())
        counted = torch.arange(batch["position_ids"].shape[1])
        by_position = is_packed or self.mesh.cp.size() > 1 or bool((batch["position_ids"] != counted).any())
        count, whole = num_documents(batch), {**batch, "document_ids": document_ids(batch)}
        _check_routed(batch, self.model)
        settings = self.model.adapters
        if adapters and settings is not None and settings.dropout and self.model.training:
            whole["dropout_tokens"] = settings.dropout_tokens(batch, step)
        if self.mesh.cp.size() > 1:
            whole = shard_streams(whole, self.mesh.cp, keep=getattr(batch, "per_row", ()))
        local = _to_device(whole, self.device)
        replayed = local.pop("routed_experts", None)
        routing = None
        if self.model.routing is not None:
            routing = MicroBatchRouting(
                document_ids=local["document_ids"],
                num_documents=count,
                num_real_tokens=int((whole["seq_ids"] != PADDING_SEQ_ID).sum()),
                replayed_experts=replayed,
                balance=balance,
                record=RoutingRecord() if record is None else record,
            )
        context = MicroBatchContext(
            position_ids=local["position_ids"] if by_position else None,
            seq_ids=local["seq_ids"] if is_packed else None,
            packing=self._packing(batch, is_packed) if self.model.model.takes_packing else None,
            images=self._images(batch, local),
            routing=routing,
            adapters=_adapter_context(adapters, local.pop("dropout_tokens", None)),
        )
        inputs = ModelInputs(local["input_ids"], context)

        def within(hidden: Tensor, head_weight: Tensor) -> Any:
            source = LogprobSource(hidden, head_weight, local, inputs, count, self._head)
            self._observer.head_begins()
            result = fn(source, local, *more)
            self._observer.head_ends()
            return result

        result = self.model.with_head(within, inputs.input_ids, inputs.context)
        self._observer.forward_ends()
        return result

    def _images(self, batch: Batch, local: Batch) -> Images | None:
        """Return the images of a host micro-batch, and their places among this rank's tokens; of a model without a
        vision tower None, with one also where the rows have no image. Over dp one all-gather of objects."""
        config = self.model.config
        if config.vision is None:
            return None
        rows: RowImages = getattr(batch, "images", None) or RowImages([], [])
        pixels, grids, order = rows.distinct(config.vision.values_per_patch, config.vision.num_tokens)
        weights = (weight for tower in self.model.model.vision for weight in tower.parameters())
        pixels = pixels.to(next(weights).dtype)  # in half precision half as much to copy
        if self.device.type == "cuda":
            pixels = pixels.pin_memory()
        features = local.pop("image_features", torch.full_like(local["input_ids"], -1))
        if len(order):
            order = order.to(self.device, non_blocking=True)
            features = torch.where(features >= 0, order[features.clamp(min=0)], features)
        rotary_ids, ends = local.pop("rotary_ids", None), local.pop("image_ends", None)
        has_axes = any(rope.sections is not None for rope in config.ropes.values())
        return Images(
            pixels.to(self.device, non_blocking=True),
            grids,
            features,
            rotary_ids if has_axes else None,
            ends if config.bidirectional_types else None,
            RankImages(self._by_dp_rank(grids), self.mesh.dp.get_group()) if self.mesh.dp_size > 1 else None,
        )

    def _by_dp_rank(self, grids: list[Grid]) -> list[list[Grid]]:
        """Return the grids of the images that each dp rank has in this micro-batch. grids: of this rank's."""
        return Ranks(self.mesh.dp.get_group()).gather_results(lambda: grids)

    def _packing(self, batch: Batch, is_packed: bool) -> Packing | None:
        """Return the packing of a host micro-batch's whole rows, padded as they are cut over cp; None for plain rows of
        one rank."""
        cp = self.mesh.cp.size()
        if not is_packed and cp == 1:
            return None
        multiple = 2 * cp if cp > 1 else 1
        names = ("position_ids", "seq_ids") if is_packed else ("position_ids",)
        positions, *owners = (pad_right(batch[name], multiple, STREAMS[name].pad, 1) for name in names)
        return Packing.of(positions, *owners)

    @torch.no_grad()
    def logprobs(
        self, batch: Batch, sampling: "TrainingSamplingParams | None" = None, *, adapters: bool = True
    ) -> Tensor:
        """Return log p(label) at every position of one host micro-batch [B, S], 0 where there is none; on the device,
        the same on every cp and tp rank, in the order of the batch. sampling: as labels were drawn. adapters: whether
        they take part. Under cp one all-gather."""
        from dtrain.losses.head.logprobs import TrainingSamplingParams

        sampling = sampling or TrainingSamplingParams()
        return self.token_values(batch, lambda source: source.sampled_logprobs(sampling).logprobs, adapters=adapters)

    @torch.no_grad()
    def entropies(self, batch: Batch, sampling: "TrainingSamplingParams", *, adapters: bool = True) -> Tensor:
        """Return, by position as `logprobs`, the entropy where there is a label, else 0, [B, S]."""

        def entropy(source: LogprobSource) -> Tensor | None:
            return source.sampled_logprobs(sampling, entropy=True).entropy

        return self.token_values(batch, entropy, adapters=adapters)

    def token_values(
        self, batch: Batch, fn: Callable[[LogprobSource], Tensor | None], *, adapters: bool = True
    ) -> Tensor:
        """Return `fn`'s values [B, S/cp] as [B, S] on every rank. adapters: whether they take part."""
        local = self.run_at_head(batch, lambda source, _: fn(source), adapters=adapters)
        cp = self.mesh.cp
        return local if cp.size() == 1 else context.gather_tokens(local, cp, batch["input_ids"].shape[1])

    @torch.no_grad()
    def topk_logits(self, batch: Batch, k: int, *, adapters: bool = True) -> tuple[Tensor, Tensor]:
        """Return the k largest logits at every position of one host micro-batch and their ids, both [B, S, k], 0 on
        padding; on the device, the same on every cp and tp rank, in the order of the batch. adapters: whether they take
        part. Under cp two all-gathers.
        """
        from dtrain.losses.head.topk import topk_logits_from_hidden_states

        def at_head(source: LogprobSource, local: Batch) -> list[Tensor]:
            index = (local["seq_ids"].flatten() != PADDING_SEQ_ID).nonzero().squeeze(1)
            topk = topk_logits_from_hidden_states(source.head_input, k, index, shard=source.shard)
            shape = local["seq_ids"].shape
            return [
                part.new_zeros(shape.numel(), part.shape[1]).index_copy(0, index, part).view(*shape, -1)
                for part in topk
            ]

        cp, length = self.mesh.cp, batch["input_ids"].shape[1]
        local = self.run_at_head(batch, at_head, adapters=adapters)
        values, ids = (context.gather_tokens(part, cp, length) for part in local)
        return values, ids


def _adapter_context(enabled: bool, dropout_tokens: Tensor | None) -> AdapterContext | None:
    """Return the context of adapters. None if they take part without dropout, as in a model without adapters."""
    if not enabled:
        return NO_ADAPTERS
    return None if dropout_tokens is None else AdapterContext(dropout_tokens=dropout_tokens)


def _check_routed(batch: Batch, model: CausalLM) -> None:
    """Raise ValueError for `routed_experts` of another model."""
    if (routed := batch.get("routed_experts")) is None:
        return
    sizes = model.config.experts
    if sizes is None or model.routing is None:
        raise ValueError("stream routed_experts: this model has no experts")
    expected = [*batch["input_ids"].shape, model.routing.num_layers, sizes.top_k]
    if list(routed.shape) != expected or (
        routed.numel() and not -1 <= int(routed.min()) <= int(routed.max()) < sizes.num_experts
    ):
        raise ValueError(f"stream routed_experts must be {expected}, from -1 to {sizes.num_experts - 1}")


def _to_device(batch: Batch, device: torch.device) -> Batch:
    """Return a host micro-batch on `device`, with `label_index` [T]: the flat positions that have a label.

    The index is made on the host, where it costs no synchronisation. To a GPU all goes in one copy out of pinned
    memory, which the host does not wait for; the streams are views of it.
    """
    streams = {**batch, "label_index": (batch["labels"].flatten() != IGNORE_INDEX).nonzero().squeeze(1)}
    if device.type != "cuda":
        return {name: stream.to(device) for name, stream in streams.items()}
    sizes = (-(-stream.nbytes // _ALIGNED) * _ALIGNED for stream in streams.values())
    starts = list(accumulate(sizes, initial=0))
    here = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=True)

    def views(buffer: Tensor) -> Batch:
        pairs = zip(streams.items(), starts, strict=False)
        return {n: buffer[at : at + s.nbytes].view(s.dtype).view(s.shape) for (n, s), at in pairs}

    for name, view in views(here).items():
        view.copy_(streams[name])
    return views(here.to(device, non_blocking=True))
