#!/bin/bash
# dtrain on several nodes under SLURM: srun starts one task for each GPU, and each task is a rank.
#
# What it does: runs a recipe, saves and stops 120 s before the time limit, and queues itself again; the next start goes
#   on from the newest whole checkpoint. So it does at a pre-emption and when a node dies, where SLURM queues it again.
# Run it: dtrain cp slurm.sh . && sbatch slurm.sh sft model.path=/models/Qwen3-8B data.train.path=/data/chat.jsonl
#   The arguments are those of `dtrain run`. Recipe, data, model and run.dir must lie where every node sees them, and so
#   must the Python environment: sbatch passes on the one that is active where it is called.
# Override: the #SBATCH lines, here or by sbatch's options. checkpoint.every says how much a lost node costs at most,
#   launch.collective_timeout after how many seconds a node that has fallen silent ends the run.
#
# Ranks meet on the first node of the job, at a port taken from job and step id: MASTER_ADDR and MASTER_PORT change that.
#
#SBATCH --job-name=dtrain
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

# srun does not take this over from sbatch by itself (since SLURM 22.05): without, each rank may have one core.
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"

# USR1 (above) and TERM (a pre-emption) come to every rank: they save after the same step and exit with 138 or 143.
# The first that ends must not take the others along while they save: those of a lost rank end by themselves. One that
# hangs for good does not; srun ends it 10 minutes after the first.
srun --kill-on-bad-exit=0 --wait=600 python -m dtrain run "${@:-sft}"
status=$?

# Stopped by the time limit is not done: again, from the last checkpoint. After TERM it is SLURM that queues the job
# again, or its user who wanted it to end (scancel). Any other failure is for its user to see.
if [ "$status" -eq 138 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
