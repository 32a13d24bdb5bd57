"""The start of a run: from a recipe to ranks that have met, on one machine or many. Imports no torch.

start        in place, in processes of its own, or as a rank of torchrun's or srun's; alone reads the environment
agent        several ranks on this machine: the launcher, and the worker that it starts
workers      those processes, watched by their beats
job          the private directory that launcher and workers share
rank         one rank: its device, its signals, its log, what running out of memory means
store        where a rank is among those of its run, and the store where they find one another
rendezvous   ranks that no launcher of ours started meet; the process group comes up
consistency  what those hosts must have in common
coordinator  heartbeats between hosts: a lost rank is named
connection   how ranks reach rank 0's host
"""

from dtrain.launch.start import launch, work

__all__ = ["launch", "work"]
