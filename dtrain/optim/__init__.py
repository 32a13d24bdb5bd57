"""Optimizers, learning-rate schedules, and the update of a step.

    update                  parameter groups, schedules, and the update of a step
    adam                    the update of AdamW and Adam as functions
    muon                    Muon for matrices, with AdamW for everything else
    local_shard             a rank's shard of a parameter as a matrix, the base of optimizers that step such shards,
                            and rounding to bfloat16 by random bits that are the same on every mesh

`policy/optimizer.py` builds a recipe's optimizer. Low-bit states and states in host memory are in `memory/`.

dtrain's own optimizers step local shards as plain tensors, in float32 or better. Their results are the same on every
mesh: each product and each sum is rounded separately, and random bits depend only on an element's index in the full
parameter. Between a CPU and a GPU the last bits may differ, because the two round divisions and roots differently.
"""
