#!/usr/bin/env bash
# Starts a run on the nodes of a SLURM job:  sbatch --nodes 4 scripts/jobs/slurm.sh CONFIG [--KEY VALUE ...]
# Five minutes before the time limit, the run saves a checkpoint and ends. To continue, submit the same job again.
#SBATCH --job-name=lowmem
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
#SBATCH --output=%x-%j.log
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"
source .venv/bin/activate
MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
export MASTER_ADDR MASTER_PORT="${PORT:-$((20000 + SLURM_JOB_ID % 20000))}"
# Every task is a rank, so signals reach it directly, and a rank that fails ends the job.
exec srun --kill-on-bad-exit=1 bash -c '
    export RANK="$SLURM_PROCID" LOCAL_RANK="$SLURM_LOCALID" WORLD_SIZE="$SLURM_NTASKS"
    exec python -m lowmem sft --config "$@" --resume_from_checkpoint auto' lowmem "$@"
