"""Models of the transformers library on dtrain's meshes.

Any causal language model of the installed library can be trained, if dtrain has none of its own for the architecture,
or if `model.implementation=transformers` asks for it. The modules are those of transformers, and dtrain computes
attention, the head and the losses. Nothing outside of this package knows which implementation a model has.

    config      config.json -> `ModelConfig`, with the shapes of attention from a forward on the meta device
    model       `TransformersCausalLM` and its decoder, which calls that of transformers
    modules     classes of its modules, which read sharded parameters
    running     the running forward, and the attention function that transformers calls
    experts     mixtures of experts, which transformers calls, also over expert-parallel ranks
    conversion  how transformers converts tensors between files and model
    plan        tensor-parallel plans of transformers in dtrain's styles
    proof       the proof at a run's start that a small copy computes what transformers computes
    shrinking   the config of that copy

Data flow of a step of Cohere2 on 2 tp ranks: `policy.score.Scorer` calls `model.with_head(loss, input_ids, context)`.
`TransformersDecoder.states` makes the attention masks of the micro-batch and calls the decoder of transformers with the
tokens and their positions. Each layer calls q_proj, which is a `TransformersLinear` with half of the rows, and then the
function `running.attend`, which computes attention by the model's kernel, whatever the packing and context parallelism.
The hidden states come back to the scorer, and the loss is that of any other model.

This package needs the extra `transformers`, and is imported only for a model that needs it.
"""
