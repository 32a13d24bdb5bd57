"""Supervised fine-tuning: the mean negative log-probability of the trained tokens of the global batch."""

from torch import Tensor

from dtrain.batch import Batch
from dtrain.methods.method import Method
from dtrain.policy.score import LogprobSource


class Sft(Method):
    """loss = −Σ log p(label) ÷ trained tokens, both over the whole global batch."""

    streams = ("input_ids", "labels", "position_ids", "seq_ids")

    def loss(
        self, source: LogprobSource, batch: Batch, global_seqs: Tensor, global_tokens: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """This micro-batch's share of the loss, a scalar; no metrics of its own."""
        return -source.weighted_sum() / global_tokens, {}
