"""The start of a run: from a recipe to ranks that have met, on one machine or many. Imports no torch.

start            in place, in processes of its own, as a rank of torchrun's or srun's, or dry; reads the environment
agent            several ranks on this machine: the launcher, and the worker that it starts
watch            the watch over ranks, on one host and on many; the processes of one machine; the newest checkpoint
job              the private directory that launcher and workers share
consistency      checks that the ranks of a run agree on recipe, versions and directory
rank             one rank: its process group, its log, what running out of memory means
signals          the answer of a run to signals
devices          the device of a rank, and what is wrong with it or with those of all ranks together
place            the place of a rank among those of its run, by what torchrun and SLURM say
hosts            several hosts: their ranks meet and watch over one another

Ranks that torchrun or srun started watch over one another: `dtrain.launch.hosts`.
"""

from dtrain.launch.start import launch, validate, work

__all__ = ["launch", "validate", "work"]
