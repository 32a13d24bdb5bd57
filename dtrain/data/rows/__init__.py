"""The cache of samples on disk, their order, packed rows, and the batches of each rank.

cache        the memory-mapped cache of tokenised samples, and the digests of its files
image_cache  the images of samples: records, and the bytes of images without a file
pool         processes that tokenise
rows         the order of samples, packing, the endless sequence of rows, and a rank's part of each global batch
workers      processes of torchdata that build rows ahead of time
"""
