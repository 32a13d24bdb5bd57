"""The start of a run: from a recipe to ranks that have met, on one machine or many. Imports no torch.

start            in place, in processes of its own, as a rank of torchrun's or srun's, or dry; reads the environment
place            the place of a rank among those of its run, by what torchrun and SLURM say
processes        several ranks on this machine: the launcher, and the worker that it starts
rank             one rank, step by step: its plan, its device, its sizes, its process group, its log; checks that
                 the ranks agree on recipe, versions and directory
meeting          ranks of torchrun or SLURM: how they find each other, and which failure is shown
exits            how a rank ends early: its answer to signals, and its error in the file that torch's elastic agent
                 reads
devices          the device of a rank, and what is wrong with it or with those of all ranks together
"""

from dtrain.launch.start import launch, validate, work

__all__ = ["launch", "validate", "work"]
