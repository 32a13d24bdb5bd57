"""Functions for callers from outside: what NeMo-RL's and Automodel's users know by name. Nothing in training imports
them; they are found under `dtrain.losses` and `dtrain.parallel.context`.

    logprob, softmax, topk         from logits with a cut vocabulary: log-probabilities; softmax and entropies; top-k
    sampling, distillation         after top-k and top-p; student and teacher
    next_token, packed             by layout of the logits
    sequence_first                 by layout of the hidden states, as Megatron has it
    policy_loss                    policy losses by name, over padded completions
    groups                         shards, sums and sequences over the caller's groups
    train_context, thd             batches under context parallel: contexts; packed rows as one run of tokens
"""
