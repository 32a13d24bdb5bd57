"""Attention: what a query may see, what computes it, and the keys kept while generating.

kernels   which keys a query may see, what computes attention, and the choice of it
packing   where documents lie, known on the host, and what is to be computed of them
varlen    rows by variable-length flash attention, on CUDA
blocks    queries over one block of keys, and merging blocks
context   context parallel: keys gathered
ring      context parallel: keys passed from rank to rank
proof     what a device must show before variable-length attention is used
delta     linear attention: its convolution, the gated delta rule, and both while decoding
delta_chunks   the gated delta rule by chunks, and its derivative
delta_context  what ranks exchange of linear attention
delta_flash    the rule by flash-linear-attention's kernels
delta_proof    what a device must show before these are used
decode    keys and values of running sequences, and a forward over them
"""
