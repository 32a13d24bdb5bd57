"""Saves from which a run resumes, through torch's distributed checkpoint (DCP).

store             the steps of one run, `checkpoints/step-N`, and the step of another run that it began from
shards            sharded tensors as items of DCP, and DCP's metadata as JSON
training_state    model, optimizer and random number generators as named tensors and JSON
background        saves that training does not wait for
retention         which saves are kept, and the disk space that they need
"""
