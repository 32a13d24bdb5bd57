"""The interface between losses and the model.

A method's loss never sees logits [B, S, V]: they would be the largest tensor of a step by far. Instead it is called
inside the root module's forward, where the head's weight is available, with a `LogprobSource`. The source computes the
values that the loss requests in tiles, from the hidden states and the head's weight.

For example, an SFT loss over the labelled tokens:

    def loss(source, batch, global_sequences, global_tokens):
        total = source.weighted_sum()              # Σ log p(label), this rank's tokens
        return -total / global_tokens, {}

    loss_value, metrics = scorer.run_at_head(micro_batch, loss, num_sequences, num_tokens)
    loss_value.backward()

`Scorer.run_at_head` prepares one micro-batch for this. For rows of 8 tokens on 2 context-parallel (cp) ranks:

1. The host counts documents, and decides whether attention needs their borders.
2. Every stream [B, 8] is sharded over cp to [B, 4], and copied to the device.
3. A `MicroBatchContext` is built: positions, packing, images, routing, adapters.
4. `model.with_head(fn, input_ids, context)` runs the layers and calls `fn` with hidden states [B, 4, D] and the head's
   weight [V/tp, D].

If the documents of a micro-batch share their beginnings (`prompt_sharing`), the model computes a shorter row, and the
loss gets the hidden states and streams of the positions that it reads, [1, E], E for each cp rank.

The function has to run inside of the forward because FSDP frees the head's weight when the forward returns. A weight
that is read later is only this rank's shard, without an error.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dtrain.attention.packing import Packing
from dtrain.attention.tree import TreePacking
from dtrain.base.batch import (
    IGNORE_INDEX,
    IMAGE_STREAMS,
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
from dtrain.parallel.collectives import all_gather, all_reduce_in_forward
from dtrain.parallel.context.batch import pad_right, shard_streams
from dtrain.parallel.mesh import Mesh
from dtrain.parallel.tensor import ScoreHead
from dtrain.policy.batching import MicroBatch
from dtrain.policy.prompt_sharing import RankTokens
from dtrain.policy.results import StepObserver

if TYPE_CHECKING:
    from dtrain.losses.head.logprobs import HeadLogprobs, TrainingSamplingParams
    from dtrain.losses.policy.formulas import Documents

Loss = Callable[["LogprobSource", Batch, Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]]
"""`loss(source, batch, global_sequences, global_tokens) -> (loss, metrics)`. See `Policy.forward_backward`."""

_MODEL_ONLY_STREAMS = ("routed_experts", "dropout_tokens", *IMAGE_STREAMS)  # a loss does not see them

_ALIGNMENT = 16  # bytes: a multiple of every dtype's size, so a stream may begin at any multiple of it


class ModelInputs(NamedTuple):
    """Arguments of a model's forward.

    Attributes:
        input_ids: This rank's tokens, [B, S/cp].
        context: The context of the micro-batch.
        loss_states: If documents share tokens that are computed once: which of this rank's hidden states the loss
            reads, [E] int64. None: all.
    """

    input_ids: Tensor
    context: MicroBatchContext
    loss_states: Tensor | None = None

    def states_for_loss(self, hidden: Tensor) -> Tensor:
        """Return the hidden states that the loss reads: `hidden` [B, S/cp, D] or a part of it, [1, E, D]."""
        if self.loss_states is None:
            return hidden
        # By an index and not by `index_select`, whose backward adds in an undefined order on CUDA.
        return hidden[0][self.loss_states][None]


class LabelledPositions(NamedTuple):
    """Input of a loss over the positions that have a label.

    Attributes:
        hidden: Hidden states of all positions, [B · S/cp, D].
        head_weight: The head's weight, [V/tp, D].
        labels: The labels, [T].
        positions: The flat positions that have them, [T].
    """

    hidden: Tensor
    head_weight: Tensor
    labels: Tensor
    positions: Tensor


class LogprobSource:
    """Log-probabilities of one micro-batch's labels, computed on request from hidden states and the head's weight.

    Valid only inside of the function that receives it, because FSDP frees the head's weight afterwards.

    Args:
        hidden: Hidden states of this rank, [B, S/cp, D]. If documents share tokens, those of the positions that the
            loss reads, [1, E, D]. In shapes of this class, B is then 1 and S/cp is E.
        head_weight: The head's weight, [V/tp, D]. A classifier's is [labels, D/tp].
        batch: This rank's part of every stream, on the device, for the same positions as `hidden`.
        inputs: Arguments with which the model was called.
        num_documents: Documents of the micro-batch, over all cp ranks.
        head: Settings of the head.

    Attributes:
        inputs: Arguments with which the model was called, for another model's forward on the same tokens.
        num_documents: Documents of the micro-batch, over all cp ranks.
        shard: This rank's part of the vocabulary; None if it is not sharded.
    """

    def __init__(
        self,
        hidden: Tensor,
        head_weight: Tensor,
        batch: Batch,
        inputs: ModelInputs,
        num_documents: int,
        head: "HeadSettings",
    ):
        self._hidden = hidden
        self._head_weight = head_weight
        self._batch = batch
        self.inputs = inputs
        self.num_documents = num_documents
        self._cp, self._score_head = head.cp, head.score
        self._softcap = head.softcap
        self.shard = head.shard

    @property
    def head_input(self) -> HeadInput:
        """Hidden states [B · S/cp, D] and head weight of this rank, for a loss that the method computes itself."""
        return HeadInput(self._hidden.flatten(0, 1), self._head_weight, self._softcap)

    def token_loss_sums(self, loss: TokenLossFn, *, label_smoothing: float = 0.0) -> TokenSums:
        """Sum a loss of log p(label) over this rank's labelled positions, and count the correct predictions.

        Arguments and collectives are those of `losses.head.weighted_sum.token_loss_sums`.

        Returns:
            Scalars, the same on every tp rank.
        """
        hidden, weight, labels, index = self._labelled
        return token_loss_sums(
            hidden,
            weight,
            labels,
            index,
            loss,
            label_smoothing=label_smoothing,
            softcap=self._softcap,
            shard=self.shard,
        )

    def weighted_sum(self, token_weights: Tensor | None = None) -> Tensor:
        """Compute Σ token_weights · log p(label) over this rank's labelled positions.

        Args:
            token_weights: Constants, [B, S/cp]. Not read where there is no label. None means ones.

        Returns:
            A scalar, the same on every tp rank.
        """
        hidden, weight, labels, index = self._labelled
        if token_weights is None:
            weights = torch.ones(index.shape, device=index.device)
        else:
            weights = token_weights.flatten().index_select(0, index)
        return weighted_logprob_sum(hidden, weight, labels, weights, index, softcap=self._softcap, shard=self.shard)

    @property
    def _labelled(self) -> LabelledPositions:
        index = self._batch["label_index"]
        labels = self._batch["labels"].flatten().index_select(0, index)
        return LabelledPositions(self._hidden.flatten(0, 1), self._head_weight, labels, index)

    def logprobs(self, *, temperature: float = 1.0, entropy: bool = False, log_p2: bool = False) -> "HeadLogprobs":
        """Compute log p(label) at every position of this rank.

        For a sum with known weights `weighted_sum` is cheaper.

        Args:
            temperature: Divides the logits.
            entropy: Compute the entropy of the distribution too.
            log_p2: Compute log Σ p² too.

        Returns:
            Tensors [B, S/cp], 0 where there is no label, the same on every tp rank. Log-probabilities and entropies are
            differentiable, whatever the loss does with them.
        """
        from dtrain.losses.head.logprobs import logprobs_from_hidden_states  # a plain SFT run does not need it

        return logprobs_from_hidden_states(
            self._hidden,
            self._head_weight,
            self._batch["labels"],
            temperature=temperature,
            entropy=entropy,
            log_p2=log_p2,
            index=self._batch["label_index"],
            softcap=self._softcap,
            shard=self.shard,
        )

    def sampled_logprobs(self, sampling: "TrainingSamplingParams", *, entropy: bool = False) -> "HeadLogprobs":
        """Compute `logprobs` of the distribution from which the labels were sampled.

        Args:
            sampling: Temperature, top-k and top-p.
            entropy: Compute the entropy too. It is that of the distribution before top-k and top-p.

        Returns:
            As `logprobs`, −inf where top-k or top-p exclude the label.
        """
        from dtrain.losses.head.filtered import filtered_logprobs_from_hidden_states  # only for sampled labels
        from dtrain.losses.head.logprobs import HeadLogprobs, need_top_k_or_top_p_filtering

        if not need_top_k_or_top_p_filtering(sampling):
            return self.logprobs(temperature=sampling.temperature, entropy=entropy)
        entropies = None
        if entropy:
            entropies = self.logprobs(temperature=sampling.temperature, entropy=True).entropy
        logprobs = filtered_logprobs_from_hidden_states(
            self._hidden,
            self._head_weight,
            self._batch["labels"],
            sampling,
            index=self._batch["label_index"],
            softcap=self._softcap,
            shard=self.shard,
        )
        return HeadLogprobs(logprobs, entropies)

    def sum_by_document(self, values: Tensor) -> Tensor:
        """Sum values over the tokens of each document, also if cp distributes a document over several ranks.

        Documents are numbered row by row, as in `batch.document_ids`.

        Args:
            values: [.., B, S/cp].

        Returns:
            [.., documents], the same on every cp rank. In the backward, each rank passes the gradient to its own
            tokens. This is correct if every cp rank computes the same loss from the sums; see `count_once`.

        Collectives:
            Under cp one all-reduce, none in the backward.
        """
        sums = sum_by_document(values, self._batch["document_ids"], self.num_documents)
        return self._sum_over_cp(sums)

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
        return self._required_score_head.product(self._hidden.to(dtype), self._head_weight.to(dtype))

    def scores(self) -> Tensor:
        """Compute the outputs of a classifier for each document, at the document's only position with a label.

        Returns:
            [documents, labels] in max(float32, the dtype of computation), the same on every tp and cp rank.

        Raises:
            ValueError: If the model has a vocabulary's head.

        Collectives:
            One all-reduce over tp, and one over cp.
        """
        index = self._batch["label_index"]
        dtype = compute_dtype(self._hidden.dtype)
        hidden = self._hidden.flatten(0, 1).index_select(0, index).to(dtype)  # [T, D]
        values = self._required_score_head.product(hidden, self._head_weight.to(dtype))  # [T, labels]
        ids = self._batch["document_ids"].flatten().index_select(0, index)
        # Only one cp rank has the position of a document. The sum over the ranks adds zeros to its value.
        outputs = values.new_zeros(self.num_documents, values.shape[1]).index_add(0, ids, values)
        return self._sum_over_cp(outputs)

    @property
    def _required_score_head(self) -> ScoreHead:
        if self._score_head is None:
            raise ValueError("this model has the head of a language model, and computes no scores")
        return self._score_head

    def _sum_over_cp(self, values: Tensor) -> Tensor:
        return values if self._cp.size() == 1 else all_reduce_in_forward(values, self._cp.get_group())

    def sequences(self, mask: Tensor) -> "Documents":
        """Return the documents of the micro-batch, for losses of `losses.policy`.

        Args:
            mask: Which tokens count, [B, S/cp].

        Collectives:
            Under cp one all-reduce.
        """
        from dtrain.losses.policy.formulas import Documents  # only for reinforcement learning

        return Documents(self._batch["document_ids"], self.num_documents, mask, self._cp.get_group())

    def count_once(self, value: Tensor) -> Tensor:
        """Return this rank's share of a value that is the same on every cp rank.

        The loss of a step is summed over the cp ranks, so a value that all of them have would count cp times. Here the
        first rank returns the value and the others return 0. A division by cp would round, for example by cp = 3, and
        would not keep counts integers. Every rank keeps the full gradient, because it passes the gradient to its own
        tokens only.

        For example, a loss of 2.5 on 3 cp ranks becomes 2.5, 0 and 0, and its derivative by each of them is 1.

        Args:
            value: Computed from `sum_by_document`, [..], of any dtype.
        """
        if self._cp.size() == 1:
            return value
        constant = value.detach()
        share = constant if self._cp.get_local_rank() == 0 else torch.zeros_like(constant)
        # value - constant is 0 with the gradient of `value`.
        return share + (value - constant) if value.requires_grad else share


@dataclass(frozen=True)
class HeadSettings:
    """Settings of a head that follow from the model and the mesh.

    Attributes:
        softcap: Logits become softcap · tanh(logits / softcap). None: unchanged.
        shard: This rank's part of the vocabulary. None if the vocabulary is not sharded.
        cp: The context-parallel mesh.
        score: The head of a classifier or critic. None for a language model.
    """

    softcap: float | None
    shard: VocabShard | None
    cp: DeviceMesh
    score: ScoreHead | None = None

    @classmethod
    def from_model(cls, model: CausalLM, mesh: Mesh) -> "HeadSettings":
        """Read the settings of a model on a mesh."""
        head = model.head
        shard = None
        # A user's own parallel plan may leave the head unsharded under tp. Then `vocab_start` is None too.
        if head.vocab_start is not None:
            largest = -(-model.config.vocab_size // mesh.tp.size())  # rounded up
            shard = VocabShard(head.vocab_start, mesh.tp.get_group(), largest)
        score = head if isinstance(head, ScoreHead) else None
        return cls(model.config.final_logit_softcapping, shard, mesh.cp, score)


class TopkLogits(NamedTuple):
    """The k largest logits at every position.

    Attributes:
        values: The logits, [B, S, k], descending; 0 on padding.
        ids: Their token ids, [B, S, k]; 0 on padding.
    """

    values: Tensor
    ids: Tensor


class LocalStreams(NamedTuple):
    """Streams of one micro-batch on this rank, on the host.

    Attributes:
        model: Streams that the model reads, [B, S/cp, ..].
        loss: Streams that the loss reads. The same dict, unless documents share tokens that are computed once.
    """

    model: Batch
    loss: Batch


class Scorer:
    """Computes losses and log-probabilities of micro-batches with a model on a mesh.

    Args:
        model: The model.
        mesh: Its mesh.
        device: Its device.
        observer: Receives the events of each forward. None for no observer.
    """

    def __init__(self, model: CausalLM, mesh: Mesh, device: torch.device, observer: StepObserver | None = None):
        self.model, self.mesh, self.device = model, mesh, device
        self._observer = StepObserver() if observer is None else observer
        self._head = HeadSettings.from_model(model, mesh)

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
        """Run the forward of one micro-batch, and call a function inside of it, at the head.

        If `fn` is a `Loss` and `more` has the global counts, the result is the loss, ready for the backward, and the
        metrics. The forwards of several micro-batches may come before the first backward, because each call has its own
        context.

        Args:
            batch: One micro-batch on the host, of full rows (not sharded over cp). A plain dict of streams [n, S, ..]
                has no images.
            fn: Called as `fn(source, local, *more)` with a `LogprobSource` and this rank's part of every stream on the
                device.
            more: Further arguments of `fn`.
            balance: The balance loss of a mixture of experts. None if there is none.
            record: Filled by the sparse layers of a mixture of experts. None discards the record.
            adapters: Whether the model's adapters take part.
            step: The optimizer step, from which the dropout of adapters is computed in training.

        Returns:
            The result of `fn`.

        Raises:
            ValueError: If `routed_experts` does not fit the model.

        Collectives:
            Those of the model and of `fn`. With a vision tower one all-gather of objects over dp.
        """
        micro_batch = batch if isinstance(batch, MicroBatch) else MicroBatch(batch)
        self._observer.forward_begins(batch)
        _check_routed_experts(batch, self.model)
        document_count = num_documents(batch)
        streams = self._select_streams(micro_batch, adapters, step)
        # Counted on the host, where it costs no synchronisation. Under cp these are this rank's tokens.
        num_real_tokens = int((streams.model["seq_ids"] != PADDING_SEQ_ID).sum())
        model_streams = _to_device(streams.model, self.device)
        local = model_streams if streams.loss is streams.model else _to_device(streams.loss, self.device)

        # Streams that only the model reads are removed, so a loss does not see them.
        replayed_experts = model_streams.pop("routed_experts", None)
        dropout_tokens = model_streams.pop("dropout_tokens", None)
        routing = None
        if self.model.routing is not None:
            routing = MicroBatchRouting(
                document_ids=model_streams["document_ids"],
                copies=model_streams.pop("copies", None),
                num_documents=document_count,
                num_real_tokens=num_real_tokens,
                replayed_experts=replayed_experts,
                balance=balance,
                record=RoutingRecord() if record is None else record,
            )
        micro_batch_context = self._build_context(
            micro_batch, model_streams, routing, _adapter_context(adapters, dropout_tokens)
        )
        loss_states = model_streams.pop("loss_states", None)
        inputs = ModelInputs(model_streams["input_ids"], micro_batch_context, loss_states)

        def at_head(hidden: Tensor, head_weight: Tensor) -> Any:
            states = inputs.states_for_loss(hidden)
            source = LogprobSource(states, head_weight, local, inputs, document_count, self._head)
            self._observer.head_begins()
            result = fn(source, local, *more)
            self._observer.head_ends()
            return result

        result = self.model.with_head(at_head, inputs.input_ids, inputs.context)
        self._observer.forward_ends()
        return result

    def _select_streams(self, micro_batch: MicroBatch, adapters: bool, step: int) -> LocalStreams:
        """Return this rank's part of every stream on the host. No collective.

        The streams are those of the batch, `document_ids`, and `dropout_tokens` if adapters with dropout are trained.
        """
        streams = {**micro_batch, "document_ids": document_ids(micro_batch)}
        settings = self.model.adapters
        if adapters and settings is not None and settings.dropout and self.model.training:
            streams["dropout_tokens"] = settings.dropout_tokens(micro_batch, step)
        if micro_batch.shared_row is not None:
            cp_rank, cp_size = self.mesh.cp.get_local_rank(), self.mesh.cp.size()
            rank_tokens = micro_batch.shared_row.on_rank(cp_rank, cp_size, micro_batch["labels"][0])
            return _shared_streams(streams, rank_tokens, micro_batch.per_row)
        if self.mesh.cp.size() > 1:
            streams = shard_streams(streams, self.mesh.cp, keep=micro_batch.per_row)
        return LocalStreams(streams, streams)

    def _build_context(
        self,
        micro_batch: MicroBatch,
        local: Batch,
        routing: MicroBatchRouting | None,
        adapters: AdapterContext | None,
    ) -> MicroBatchContext:
        """Build the context of a micro-batch, and remove the streams of images from `local`.

        Args:
            micro_batch: Full rows on the host.
            local: This rank's part of every stream that the model reads, on the device.
            routing: The routing of a mixture of experts.
            adapters: The context of the adapters.

        Collectives:
            Those of `_images`.
        """
        shared_row = micro_batch.shared_row
        has_document_mask = shared_row is not None or self._needs_document_mask(micro_batch)
        has_positions = has_document_mask or self.mesh.cp.size() > 1 or not _counts_from_zero(micro_batch)
        return MicroBatchContext(
            position_ids=local["position_ids"] if has_positions else None,
            seq_ids=local["seq_ids"] if has_document_mask else None,
            last_seq_ids=None if shared_row is None else local["last_seq_ids"],
            packing=self._packing(micro_batch, has_document_mask),
            images=self._images(micro_batch.images, local),
            routing=routing,
            adapters=adapters,
        )

    def _needs_document_mask(self, batch: Batch) -> bool:
        """Check whether attention or routing needs the document of each token.

        Rows of one document each need no mask but the causal one, which hides the padding at their ends from every
        token. The plain causal kernel is faster.
        """
        has_several_documents = bool((batch["seq_ids"] > PADDING_SEQ_ID + 1).any())
        if has_several_documents or self.model.config.experts is None:
            return has_several_documents
        # In a mixture of experts, padding must not be routed. Sharding over cp adds padding.
        return self.mesh.cp.size() > 1 or bool((batch["seq_ids"] == PADDING_SEQ_ID).any())

    def _images(self, images: RowImages | None, local: Batch) -> Images | None:
        """Build the images of a micro-batch for the model, and remove their streams from `local`.

        Rows without an image also have an `Images`, because the vision tower runs on every rank: its collectives must
        match.

        Returns:
            None for a model without a vision tower.

        Collectives:
            Over dp one all-gather of objects.
        """
        config = self.model.config
        if config.vision is None:
            return None
        rows = images or RowImages([], [])
        pixels, grids, order = rows.distinct(config.vision.values_per_patch, config.vision.num_tokens)
        # Cast on the host: in half precision only half of the bytes are copied to the device.
        tower_weights = [weight for tower in self.model.model.vision for weight in tower.parameters()]
        pixels = pixels.to(tower_weights[0].dtype)
        if self.device.type == "cuda":
            pixels = pixels.pin_memory()
        features = local.pop("image_features", torch.full_like(local["input_ids"], -1))
        if len(order):
            # An image that several rows share is computed once: map the rows' features to those of distinct images.
            order = order.to(self.device, non_blocking=True)
            features = torch.where(features >= 0, order[features.clamp(min=0)], features)
        rotary_ids, ends = local.pop("rotary_ids", None), local.pop("image_ends", None)
        has_rotary_sections = any(rope.sections is not None for rope in config.ropes.values())
        rank_images = None
        if self.mesh.dp_size > 1:
            rank_images = RankImages(self._gather_grids(grids), self.mesh.dp.get_group())
        return Images(
            pixels.to(self.device, non_blocking=True),
            grids,
            features,
            rotary_ids if has_rotary_sections else None,
            ends if config.bidirectional_types else None,
            rank_images,
        )

    def _gather_grids(self, grids: list[Grid]) -> list[list[Grid]]:
        """Gather the grids of every dp rank's images in this micro-batch. One all-gather of objects over dp."""
        return Ranks(self.mesh.dp.get_group()).gather_results(lambda: grids)

    def _packing(self, batch: MicroBatch, has_document_mask: bool) -> Packing | TreePacking | None:
        """Return the starts of a micro-batch's documents, for kernels that compute document by document.

        The starts are those in full rows, padded as for sharding over cp.

        Returns:
            None if cp is 1 and no document mask is needed, or the model does not read the starts.
        """
        cp = self.mesh.cp.size()
        if batch.shared_row is not None:
            return batch.shared_row.packing(cp)
        if not self.model.model.takes_packing:
            return None
        if not has_document_mask and cp == 1:
            return None
        multiple = 2 * cp if cp > 1 else 1  # the layout of cp assigns two chunks to each rank
        positions = pad_right(batch["position_ids"], multiple, STREAMS["position_ids"].pad, 1)
        if not has_document_mask:
            return Packing.of(positions)
        return Packing.of(positions, pad_right(batch["seq_ids"], multiple, STREAMS["seq_ids"].pad, 1))

    @torch.no_grad()
    def logprobs(
        self, batch: Batch, sampling: "TrainingSamplingParams | None" = None, *, adapters: bool = True
    ) -> Tensor:
        """Compute log p(label) at every position of one micro-batch, without gradients.

        Args:
            batch: One micro-batch on the host, [B, S].
            sampling: Temperature and filters of the distribution. None is the model's own.
            adapters: Whether the model's adapters take part.

        Returns:
            [B, S] on the device, in the order of the batch, 0 where there is no label. The same on every cp and tp
            rank.

        Collectives:
            Those of the forward. Under cp one all-gather.
        """
        from dtrain.losses.head.logprobs import TrainingSamplingParams  # a plain SFT run does not need it

        sampling = sampling or TrainingSamplingParams()

        def label_logprobs(source: LogprobSource) -> Tensor:
            return source.sampled_logprobs(sampling).logprobs

        return self.token_values(batch, label_logprobs, adapters=adapters)

    @torch.no_grad()
    def entropies(self, batch: Batch, sampling: "TrainingSamplingParams", *, adapters: bool = True) -> Tensor:
        """Compute the entropy of the distribution at every label of one micro-batch, without gradients.

        Arguments, shape and collectives are those of `logprobs`.
        """

        def entropy(source: LogprobSource) -> Tensor | None:
            return source.sampled_logprobs(sampling, entropy=True).entropy

        return self.token_values(batch, entropy, adapters=adapters)

    def token_values(
        self, batch: Batch, fn: Callable[[LogprobSource], Tensor | None], *, adapters: bool = True
    ) -> Tensor:
        """Compute a value for every token of one micro-batch.

        Args:
            batch: One micro-batch on the host, [B, S].
            fn: Returns the values [B, S/cp] of this rank's positions.
            adapters: Whether the model's adapters take part.

        Returns:
            [B, S] on the device, in the order of the batch, the same on every cp rank.

        Collectives:
            Those of the forward and of `fn`. Under cp one all-gather.
        """
        local = self.run_at_head(batch, lambda source, _: fn(source), adapters=adapters)
        return self._gather_over_cp(local, batch)

    @torch.no_grad()
    def topk_logits(self, batch: Batch, k: int, *, adapters: bool = True) -> TopkLogits:
        """Compute the k largest logits at every position of one micro-batch, without gradients.

        Args:
            batch: One micro-batch on the host, [B, S].
            k: Number of logits.
            adapters: Whether the model's adapters take part.

        Returns:
            Tensors on the device, in the order of the batch, the same on every cp and tp rank.

        Collectives:
            Those of the forward. Under cp two all-gathers.
        """
        from dtrain.losses.head.topk import topk_logits_from_hidden_states  # training does not need it

        def topk_at_head(source: LogprobSource, local: Batch) -> list[Tensor]:
            # The head is computed for real tokens only.
            index = (local["seq_ids"].flatten() != PADDING_SEQ_ID).nonzero().squeeze(1)
            topk = topk_logits_from_hidden_states(source.head_input, k, index, shard=source.shard)
            shape = local["seq_ids"].shape
            results = []
            for part in topk:  # values and ids, [T, k] each
                flat = part.new_zeros(shape.numel(), part.shape[1]).index_copy(0, index, part)
                results.append(flat.view(*shape, -1))
            return results

        values, ids = self.run_at_head(batch, topk_at_head, adapters=adapters)
        return TopkLogits(self._gather_over_cp(values, batch), self._gather_over_cp(ids, batch))

    def _gather_over_cp(self, local: Tensor, batch: Batch) -> Tensor:
        """Gather values [B, S/cp, ..] to [B, S, ..] in the order of the batch. Under cp one all-gather."""
        cp = self.mesh.cp
        shared_row = batch.shared_row if isinstance(batch, MicroBatch) else None
        if shared_row is not None:
            loss_tokens = torch.cat(shared_row.loss_tokens(cp.size(), batch["labels"][0]))
            places = (loss_tokens >= 0).nonzero()[:, 0]  # the others are padding
            index = _to_device({"places": places, "tokens": loss_tokens[places]}, self.device)
            values = local if cp.size() == 1 else all_gather(local, 1, cp.get_group())
            full = values.new_zeros(1, batch["input_ids"].shape[1], *values.shape[2:])
            full[0, index["tokens"]] = values[0, index["places"]]
            return full
        return local if cp.size() == 1 else context.gather_tokens(local, cp, batch["input_ids"].shape[1])


def _counts_from_zero(batch: Batch) -> bool:
    """Check whether the positions of every row are 0, 1, 2, ..."""
    positions = batch["position_ids"]
    return not bool((positions != torch.arange(positions.shape[1])).any())


def _adapter_context(enabled: bool, dropout_tokens: Tensor | None) -> AdapterContext | None:
    """Return the context of adapters: NO_ADAPTERS if they are switched off, None if they are applied without dropout.

    None is also the context of a model without adapters.
    """
    if not enabled:
        return NO_ADAPTERS
    return None if dropout_tokens is None else AdapterContext(dropout_tokens=dropout_tokens)


def _check_routed_experts(batch: Batch, model: CausalLM) -> None:
    """Raise ValueError if the stream `routed_experts` does not fit the model."""
    routed = batch.get("routed_experts")
    if routed is None:
        return
    sizes = model.config.experts
    if sizes is None or model.routing is None:
        raise ValueError("stream routed_experts: this model has no experts")
    expected = [*batch["input_ids"].shape, model.routing.num_layers, sizes.top_k]
    is_valid = list(routed.shape) == expected
    if is_valid and routed.numel():
        is_valid = int(routed.min()) >= -1 and int(routed.max()) < sizes.num_experts
    if not is_valid:
        raise ValueError(
            f"stream routed_experts must have shape {expected} and values from -1 to {sizes.num_experts - 1}, and has "
            f"shape {list(routed.shape)}"
        )


def _shared_streams(streams: Batch, rank_tokens: RankTokens, per_row: Collection[str]) -> LocalStreams:
    """Return the streams of a micro-batch whose documents share tokens.

    Args:
        streams: Streams of the full row, [1, L, ..].
        rank_tokens: This rank's part of the shared row.
        per_row: Names of the streams that are not per token, which are returned unchanged.
    """
    model: Batch = {}
    for name in ("input_ids", "position_ids", *_MODEL_ONLY_STREAMS):
        if name in streams:
            model[name] = _take(name, streams[name], rank_tokens.tokens)
    model["seq_ids"] = rank_tokens.nodes[None]
    model["last_seq_ids"] = rank_tokens.last_nodes[None]
    model["loss_states"] = rank_tokens.loss_states
    model["copies"] = rank_tokens.copy_states
    model["document_ids"] = streams["document_ids"][0, rank_tokens.copies]
    loss = {}
    for name, stream in streams.items():
        if name in per_row:
            loss[name] = stream
        elif name not in _MODEL_ONLY_STREAMS:
            loss[name] = _take(name, stream, rank_tokens.loss_tokens)
    return LocalStreams(model, loss)


def _take(name: str, stream: Tensor, tokens: Tensor) -> Tensor:
    """Return the values of a stream [1, L, ..] at some tokens [n], as [1, n, ..]. -1 means padding."""
    pad = (STREAMS[name].pad if name in STREAMS else 0) or 0
    values = stream[0, tokens.clamp(min=0)]
    values[tokens < 0] = pad
    return values[None]


def _to_device(batch: Batch, device: torch.device) -> Batch:
    """Copy streams to the device. If there are labels, add `label_index` [T]: the flat positions that have one.

    The index is computed on the host, where it costs no synchronisation. On CUDA, all streams are written to one pinned
    buffer and copied together, and the host does not wait for the copy. The returned streams are views of the buffer on
    the device. For example, streams of 40 and 24 bytes begin at the bytes 0 and 48, the next multiple of 16.
    """
    streams = dict(batch)
    if "labels" in batch:
        streams["label_index"] = (batch["labels"].flatten() != IGNORE_INDEX).nonzero().squeeze(1)
    if device.type != "cuda":
        return {name: stream.to(device) for name, stream in streams.items()}
    aligned_sizes = [-(-stream.nbytes // _ALIGNMENT) * _ALIGNMENT for stream in streams.values()]
    starts = list(accumulate(aligned_sizes, initial=0))

    def views_of(buffer: Tensor) -> Batch:
        views = {}
        for (name, stream), start in zip(streams.items(), starts, strict=False):  # the last start is the end
            part = buffer[start : start + stream.nbytes]
            views[name] = part.view(stream.dtype).view(stream.shape)
        return views

    pinned = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=True)
    for name, view in views_of(pinned).items():
        view.copy_(streams[name])
    return views_of(pinned.to(device, non_blocking=True))
