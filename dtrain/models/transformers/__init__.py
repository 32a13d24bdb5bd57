"""Models of the transformers library on dtrain's meshes.

Causal language models of the installed library can be trained if dtrain has no model of its own for the architecture,
or if the recipe sets `model.implementation=transformers`. The decoder consists of transformers' modules, and dtrain
computes attention, experts, the head and the losses. `ModelConfig.transformers` describes such a model, and is None for
dtrain's own.

    config      config.json -> `ModelConfig`, with the shapes of attention from a forward on the meta device
    model       `TransformersCausalLM`, and its decoder, which calls the decoder of transformers
    modules     changed classes of transformers' modules, which read sharded parameters
    running     the running forward, and the attention function that transformers calls
    experts     the function of mixtures of experts that transformers calls, also over expert-parallel ranks
    conversion  conversions of transformers between the tensors of files and model
    plan        tensor-parallel plans of transformers in dtrain's styles
    proof       the proof at a run's start that a small copy computes the same in dtrain as in transformers
    shrinking   the config of that copy

For example, a step of Cohere2 on 2 tp ranks:

1. `policy.score.Scorer` calls `model.with_head(loss, input_ids, context)`.
2. `TransformersDecoder.states` makes the attention masks of the micro-batch, sets the running forward, and calls the
   decoder of transformers with the tokens and their positions.
3. Each layer calls q_proj, k_proj and v_proj. They are `TransformersLinear` with half of the rows each, and share one
   all-reduce in the backward, because they have the same input (`running.SharedInput`).
4. The layer calls `running.attend`, which computes attention by the model's kernel. Packing and context parallelism are
   part of the kernel and its masks. o_proj then sums its outputs over the ranks.
5. The hidden states [B, S, D] return to the scorer, which computes the loss as for any other model.

A model in float64 computes all of this in float64, also where transformers' code asks for float32
(`running.DoublePrecision`).

This package needs the extra `transformers`, and is imported only for a model that needs it.
"""
