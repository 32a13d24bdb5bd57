"""Losses from hidden states and the head's weight, tile by tile. The full logits are never in memory.

Read vocabulary and softmax first: their docstrings have worked examples of the softmax over a sharded vocabulary.

vocabulary      shards of a vocabulary: the ids of each rank, and merging the softmax statistics of shards
softmax         the softmax in tiles, forward and backward
sources         logits in tiles: existing logits, and logits computed from hidden states and a head
weighted_sum    losses of SFT: sums over tokens whose gradient is computed in the forward
logprobs        log-probabilities, entropies and log Σ p² of labels
filtered        log-probabilities after top-k and top-p
kl, topk        divergences from a teacher: over the full vocabulary, and over the teacher's top-k tokens
"""
