"""Samples in a cache on disk, their order, and the rows that ranks take.

cache, cache_seal   the memory-mapped cache of tokenised samples; digests of its files
pool                tokenising in processes of its own
order               the order of samples, packing, shares of ranks
rows                the endless sequence of rows, and a rank's part of each global batch
"""
