"""Attention: the causal mask of documents, the kernels, and the exchange of keys under context parallel.

visibility     the keys that a query sees
kernels        the kernels that compute attention, and the choice of one
packing        cu_seqlens of a micro-batch on the host, and the kernel calls that they make
sdpa_by_row    SDPA for tensors without values
segments       variable-length attention of segments of rows, on CUDA
varlen         the kernel of variable-length attention
blocks         queries over one block of keys, and merging blocks
context        context parallel: keys gathered, or passed from rank to rank
foreign        attention of other code inside a context-parallel context
groups         one key head with its query heads at a time
check_varlen   the check of a device before variable-length attention is used
later_flash    FlashAttention-3 and 4 in the place of torch's own
linear         the gated delta rule of Qwen3.5
"""
