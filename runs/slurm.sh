#!/usr/bin/env bash
# rmdm on Slurm: one torchrun a node, one rank a GPU. Give it what you would give `rmdm run`:
#   sbatch runs/slurm.sh owt-rmdm --data.dir /shared/data/owt --out /shared/runs/owt-rmdm
# For another number of GPUs: sbatch --nodes=1 --gpus-per-node=8 runs/slurm.sh ...
# Submit the same line again after a time-out or a failure: it goes on from the last checkpoint.
#SBATCH --job-name=rmdm
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -euo pipefail

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
ranks=${SLURM_GPUS_ON_NODE:?ask for GPUs with --gpus-per-node}
export OMP_NUM_THREADS=$((SLURM_CPUS_PER_TASK / ranks))
# Since Slurm 22.05 srun does not take --cpus-per-task over from the job.
export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"

# --signal sends SIGTERM five minutes before the end: the ranks save and leave, for which torchrun gives them 30 s.
srun --kill-on-bad-exit=1 "${RMDM_BIN:-.venv/bin}/torchrun" \
  --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node="$ranks" \
  --rdzv-id="$SLURM_JOB_ID" --rdzv-backend=c10d --rdzv-endpoint="$first:${RMDM_PORT:-29500}" \
  -m rmdm run "$@"
