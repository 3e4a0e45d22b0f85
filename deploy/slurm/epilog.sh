#!/bin/bash
# Epilog= of slurm.conf: ends the daemon of a job, and frees its memory. docs/slurm.md says how to use it.
#
# If Slurm requeues the job, its restart count is greater here than it was in the prolog. Then the daemon stays: the
# next start finds its snapshots, on this node at once and from other nodes through their daemons. If it has not come back
# after CKPTD_SLURM_KEEP_S, a process that waits for this long ends the daemon. The epilog never fails: a failed epilog drains the node.
here=$(dirname "$(realpath "$0")")
. "$here/common.sh"
if [ "$1" = --expire ]; then
    sleep "$((CKPTD_SLURM_KEEP_S + 1))"
    end_if_expired "$2"
    exit 0
fi
[ "$CKPTD_SLURM_DAEMON" = job ] || exit 0 # the node's daemon frees a job's memory after retain_detached_s

of_job "$SLURM_JOB_ID"
start=$CKPTD_SLURM_RUN/.start-$SLURM_JOB_ID
if [ "${SLURM_JOB_RESTART_COUNT:-0}" -gt "$(cat "$start" 2>/dev/null || echo 0)" ]; then
    as_owner touch "$run/kept" && setsid --fork "$0" --expire "$SLURM_JOB_ID" </dev/null >/dev/null 2>&1
    echo "$SLURM_JOB_RESTART_COUNT" >"$start" # slurmd runs no second prolog if a job comes back within seconds
else
    end_daemon
    rm -f "$start"
fi
exit 0
