"""Trades of time for memory: what a run stores, recomputes, moves to host memory or compiles.

activation_checkpointing  layers or MLPs whose activations are recomputed in the backward, all or most of them
activation_offload        activations in host memory between forward and backward
tiles                     layers computed over tiles of their tokens
compilation               the parts of a layer before and after attention, compiled
low_bit_adam              AdamW and Adam over low-bit weights and moments, stored in bfloat16 or int8
optimizer_offload         optimizer state in host memory, copied to the device part by part
host_masters              float32 weights in host memory, with rounded copies on the device
gradient_accumulation     bfloat16 gradients, summed over micro-batches with stochastic rounding
"""
