"""Saves that a run resumes from, through torch's distributed checkpoint.

store             the steps of one run, `checkpoints/step-N`, and the step of another run that it began from
pieces            tensors of any placement as items of the distributed checkpoint
training_state    model, optimizer and random number generators as named tensors and JSON, and back
background        saves that training does not wait for
retention         which saves stay, and the disk space that they need
"""
