"""The start of a run: from a recipe to ranks that can communicate, on one machine or many. Imports no torch.

start         decides where a run happens: in this process, in processes that it starts, or as a rank of torchrun or
              srun. Only this module reads the environment
rank_info     rank, world size and rendezvous address of this process, from the environment of torchrun or SLURM
processes     several ranks on this machine: the launcher, and the worker that it starts
rank          one rank, step by step: plan, device, sizes, process group, log; checks that all ranks have the same
              recipe, versions and run directory
rendezvous    how ranks of torchrun or SLURM find each other, and which failure is shown
exits         how a rank ends early: its response to signals, and its error in the file that torch's elastic agent
              reads
devices       the device of each rank, and checks that the devices of all ranks can work together
"""

from dtrain.launch.start import launch, validate, work

__all__ = ["launch", "validate", "work"]
