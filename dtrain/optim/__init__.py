"""Optimizers, schedules, the update of a step, and states in few bits.

    update      a recipe's optimizer and schedule; the update of a step
    adam        AdamW and Adam over weights in bfloat16 and moments in bfloat16 or int8
    moments     storage of a moment: as it is, rounded to bfloat16, or in int8 by blocks
    muon        Muon over whole matrices, with AdamW for all else
    offload     state in pinned host memory, brought to the device part by part
    places      the part of a whole parameter that this rank holds, and random bits for its elements
    sums        gradients in bfloat16, added up over micro-batches

Optimizers of our own step this rank's shards as plain tensors, in float32 or better, and give the same numbers on every
mesh: products and sums are rounded one by one, whatever part of a tensor they are for, and random bits are drawn by an
element's index in the whole. Between a CPU and a GPU last bits may differ: each divides and takes roots its own way.
"""
