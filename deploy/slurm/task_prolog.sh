#!/bin/bash
# TaskProlog= of slurm.conf: what it prints becomes the environment of the job's processes, which find the daemon by it.
. "$(dirname "$(realpath "$0")")/settings.env"
if [ "$CKPTD_SLURM_DAEMON" = job ]; then
    run=$CKPTD_SLURM_RUN/$SLURM_JOB_ID
    rm -f "$run/kept" # the job is back
    [ ! -d "$run" ] || echo "export CKPTD_RUNTIME_DIR=$run"
else
    echo "export CKPTD_RUNTIME_DIR=$CKPTD_SLURM_NODE_RUN"
    echo "export CKPTD_DAEMON_USER=$CKPTD_SLURM_NODE_USER"
fi
