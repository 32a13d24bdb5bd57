"""Saves that a run resumes from, through torch's distributed checkpoint.

store             the steps of one run, `checkpoints/step-N`
pieces            tensors of any placement as items of the distributed checkpoint
training_state    model and optimizer as named tensors and JSON, and back
rng               random number generators, likewise
background        saves that training does not wait for
retention         saves that stay
space             what saves take on the disk, and what is free
origin            what a run began from
"""
