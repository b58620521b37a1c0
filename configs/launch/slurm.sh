#!/bin/bash
# A run on SLURM, one process for each GPU, that outlives its time limit and the loss of a machine:
#
#   sbatch configs/launch/slurm.sh my-run --config configs/moe.yaml --parallel.shard 8
#
# Two minutes before the limit SLURM asks the processes to end; they save, and the job is queued again. What is queued
# again, by this or by SLURM, goes on from the newest good checkpoint of runs/my-run. The run's folder has to lie on a
# disk that all machines share.
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append

name=${1:?give the name of the run, then its options}
shift
if [ -e "runs/$name/config.yaml" ]; then
    resume=(--resume "runs/$name")
else
    resume=(--run.name "$name")
fi
trap : TERM # which is for the processes: this script waits for them

srun python -m experiments.train "${resume[@]}" "$@" \
    --trainer.num_nodes "$SLURM_NNODES" --trainer.devices "$SLURM_NTASKS_PER_NODE"
code=$?
if [ "$code" -eq 143 ]; then # ended by SIGTERM, with a checkpoint
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
