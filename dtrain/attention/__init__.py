"""Attention: what a query may see (mask), what computes it (kernels), and the keys kept while generating (cache)."""
