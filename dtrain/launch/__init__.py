"""The start of a run: from a recipe to ranks that have met, on one machine or many. Imports no torch.

start        in place, in processes of its own, or as a rank of torchrun's or srun's; alone reads the environment
agent        several ranks on this machine: the launcher, and the worker that it starts
workers      those processes, watched by their heartbeats
job          the private directory that launcher and workers share
rank         one rank: its process group, its signals, what running out of memory means
validate     what the processes of a run would refuse before its first step, without one
devices      the device of a rank, and what is wrong with it or with those of all ranks together
place        where a rank is among those of its run, by what torchrun and SLURM say

Ranks that torchrun or srun started watch over one another: `dtrain.launch.hosts`.
"""

from dtrain.launch.start import launch, validate, work

__all__ = ["launch", "validate", "work"]
