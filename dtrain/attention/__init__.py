"""Attention: the causal mask of documents, the kernels, and the exchange of keys under context parallel.

README.md explains context parallel with an example. Read visibility, kernels, blocks and context in this order.

visibility     the meaning of the mask: which keys a query sees
kernels        the interface of kernels; those that call torch's scaled_dot_product_attention, for plans too; attention
               for one key head at a time, to save memory
blocks         attention over one block of keys, and merging the results of several blocks
context        context parallel: keys are gathered, or passed around a ring of ranks
packing        the documents of packed rows, and the calls of variable-length attention that compute them
tree           rows in which sequences share their beginning: their layout under context parallel, and their calls
segments       variable-length attention: operations on CUDA and on CPUs
varlen         the kernels that use variable-length attention, for packed rows and shared beginnings, and their check on
               a device; FlashAttention-3 and 4 instead of torch's version 2
foreign        attention of models that are not dtrain's, inside a context-parallel context
linear         the gated delta rule of Qwen3.5
"""
