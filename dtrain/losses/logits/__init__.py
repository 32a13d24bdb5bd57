"""Functions of logits by their layout, known by name to NeMo-RL's and Automodel's users.

next_token      dispatch over the layouts, plain, vocabulary-parallel, DTensor, packed; after top-k and top-p
logprob, topk   log-probabilities, softmax and entropies; top-k of a cut vocabulary, and of student and teacher
sequence_first  Megatron's sequence-first hidden states
groups          shards, sums and sequences over the caller's groups

All are importable from `dtrain.losses`. Training uses `losses/head/`.
"""
