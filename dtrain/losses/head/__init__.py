"""Losses from hidden states and the head's weight, tile by tile: logits are never whole.

vocabulary      a softmax over a vocabulary that is cut over ranks and into tiles
weighted_sum    losses of supervised fine-tuning, sums over tokens whose backward is made in the forward
logprobs        log-probabilities, entropies and ranks of labels
filtered        log-probabilities after top-k and top-p
kl, topk        divergences from a teacher: whole, on its top-k
"""
