"""Samples in a cache on disk, their order, and the rows that ranks take.

cache        the memory-mapped cache of tokenised samples, and the digests of its files
image_cache  the images of samples: where they are, and their bytes where they have no file of their own
pool         tokenising in processes of its own
rows         the order of samples, packing, the endless sequence of rows, and a rank's part of each global batch
workers      rows made ahead of time in processes of torchdata
"""
