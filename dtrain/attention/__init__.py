"""Attention: what a query may see, what computes it, and the keys kept while generating.

kernels   which keys a query may see, what computes attention, and the choice of it
varlen    packed rows on CUDA, by variable-length flash attention
blocks    queries over one block of keys, and merging blocks
context   context parallel: keys gathered, or passed from rank to rank
decode    keys and values of running sequences, and a forward over them
"""
