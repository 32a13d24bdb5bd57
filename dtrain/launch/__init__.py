"""The start of a run: from a recipe to ranks that have met, on one machine or many. Imports no torch.

start            in place, in processes of its own, as a rank of torchrun's or srun's, or dry; reads the environment
place            the place of a rank among those of its run, by what torchrun and SLURM say
processes        several ranks on this machine: the launcher, and the worker that it starts
rank             one rank, step by step: its plan, its device, its sizes, its process group, its log
meeting          ranks of torchrun or SLURM: how they find each other, and which failure is shown
consistency      checks that the ranks of a run agree on recipe, versions and directory
reports          why a rank ended, in the error file that torch's elastic agent reads
signals          how a run answers signals
devices          the device of a rank, and what is wrong with it or with those of all ranks together
"""

from dtrain.launch.start import launch, validate, work

__all__ = ["launch", "validate", "work"]
