"""Attention of other code under context parallel: `create_context_parallel_ctx`, and how models inside it compute.

context             the context: it shards tensors in place and starts the parts below
sharded_attention   catches each attention call, and computes it over the tokens of all ranks
local_masks         finds out what a mask over local tokens means over all tokens
running_modules     which modules are running, and whether they are dtrain's own

Inside the context every rank has S/cp tokens of each row, in the head-tail layout. A model that was written without
context parallel calls `scaled_dot_product_attention` with these tokens only. A `TorchFunctionMode` catches the call and
computes it with dtrain's context-parallel kernels, so that the queries of each rank attend to the keys of all ranks.
The difficult part is the mask, because such a model builds it from its local tokens.

Example: 8 tokens over 2 ranks, a causal model of transformers. Rank 0 has the tokens 0 1 | 6 7, rank 1 has 2 3 | 4 5.
The positions of rank 0 jump from 1 to 6, which transformers takes for the start of a new document:

    mask of rank 0    1 . . .        mask of rank 1: none, and is_causal=True
                      1 1 . .
                      . . 1 .
                      . . 1 1

With a cache (`use_cache=True`) the same model does not look at positions, and rank 0 passes no mask either. In both
cases one process would have been causal over all 8 tokens.

So a local mask is not applied. It is only used to find out which mask over all tokens the model means. There are few
candidates, called meanings: causal by index, or causal within the documents that one of the context's position buffers
describes, each with the sliding window of the calling module. For every candidate we build the local mask that
transformers would build, and compare. Then:

1. Each rank computes the set of meanings that explain its own mask. In the example, rank 0 finds {positions}, and
   rank 1 finds {index, positions}.
2. The ranks exchange these sets, together with the shapes of the call. The intersection here is {positions}.
3. If exactly one meaning is left, attention is computed with it. Otherwise every rank raises an error at this call.
"""

from dtrain.attention.foreign.context import create_context_parallel_ctx

__all__ = ["create_context_parallel_ctx"]
