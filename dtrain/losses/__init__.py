"""Hidden states to log-probabilities, and from those to a loss. Knows no recipe."""

from dtrain.losses.hidden import VocabShard, weighted_logprob_sum

__all__ = ["VocabShard", "weighted_logprob_sum"]
