"""Functions of logits under the names and arguments that users of NeMo-RL and Automodel know.

next_token      log-probabilities of next tokens, for each layout of logits: plain, vocabulary-parallel, DTensor, packed
logprob         log-probabilities at given ids, softmax, entropy and cross entropy over a sharded vocabulary
topk            the largest logits of a sharded vocabulary, and distillation from a teacher's top-k
sequence_first  log-probabilities from Megatron's sequence-first hidden states
groups          bounds of shards, sums over a group, and the head-tail layout of context parallel

All can be imported from `dtrain.losses`. Training uses `losses/head/`. Letters: B rows, S tokens of a row, V size of
the vocabulary, T packed tokens.
"""
