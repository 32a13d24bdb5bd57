"""Optimizers, learning-rate schedules, and the update of a step.

    update                  parameter groups, schedules, and the update of a step
    adam                    the update of AdamW and Adam as functions
    muon                    Muon for matrices, with AdamW for everything else
    local_shard             a rank's shard of a parameter as a matrix, the base of optimizers that step such shards,
                            and rounding to bfloat16 by random bits that are the same on every mesh

`policy/optimizer.py` builds a recipe's optimizer. Low-bit states and states in host memory are in `memory/`.

dtrain's own optimizers step local shards as plain tensors, in float32 or better, and give the same numbers on every
mesh: products and sums are rounded one by one, and random bits depend on an element's index in the full parameter.
Between a CPU and a GPU the last bits may differ, because they divide and take roots in different ways.
"""
