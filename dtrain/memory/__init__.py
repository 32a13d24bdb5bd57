"""Trades of time for memory: what a run keeps, recomputes, moves to host memory or compiles.

activation_checkpointing  layers or MLPs whose activations are recomputed in the backward
selective_checkpointing   the operations whose results are kept when the rest of a layer is recomputed
activation_offload        activations in host memory between forward and backward
tiles                     layers computed over tiles of their tokens
compilation               the parts of a layer before and after attention, compiled
"""
