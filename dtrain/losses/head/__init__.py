"""Losses from hidden states and the head's weight, tile by tile: logits are never whole.

softmax         the softmax in tiles, forward and backward
sources         logits in tiles: given ones, and those of hidden states and a head
vocabulary      parts of a vocabulary: which ids a rank has, and how statistics of parts merge
weighted_sum    losses of supervised fine-tuning, sums over tokens whose gradient is formed in the forward
logprobs        log-probabilities, entropies and log Σ p² of labels
filtered        log-probabilities after top-k and top-p
kl, topk        divergences from a teacher: whole, on its top-k
"""
