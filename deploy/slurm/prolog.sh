#!/bin/bash
# Prolog= of slurm.conf: sees to it that a ckptd runs on this node before a job does. docs/slurm.md says how to use it.
# It ends with 0, and the job runs, whatever happens, unless CKPTD_SLURM_REQUIRED=yes.
here=$(dirname "$(realpath "$0")")
. "$here/common.sh"

# Also without the epilog's timer, as after a restart of the node's services.
sweep() {
    local folder
    for folder in "$CKPTD_SLURM_RUN"/*/; do
        [ ! -d "$folder" ] || end_if_expired "$(basename "$folder")"
    done
}

# Started again where it was killed: its memory is still there. The loop ends when it was stopped (0), when no further
# try would help (2: a setting, 3: another daemon, 4: a folder), or when the epilog has begun to end it.
daemon_of_the_job() {
    root_folder "$CKPTD_SLURM_RUN" && root_folder "$CKPTD_SLURM_SEGMENTS" || return 1
    sweep
    of_job "$SLURM_JOB_ID"
    echo "${SLURM_JOB_RESTART_COUNT:-0}" >"$CKPTD_SLURM_RUN/.start-$SLURM_JOB_ID"
    for folder in "$run" "$segments"; do
        [ -d "$folder" ] || install -d -m 700 -o "$SLURM_JOB_UID" -g "$(id -g "$SLURM_JOB_UID")" "$folder" || return 1
    done
    as_owner rm -f "$run/kept" "$run/ended"
    is_running && return # this job's, from before its requeue
    # shellcheck disable=SC2016 # for the inner shell
    as_owner setsid --fork bash -c '
        exec </dev/null >>"$CKPTD_RUNTIME_DIR/ckptd.log" 2>&1
        while [ -d "$CKPTD_RUNTIME_DIR" ] && [ ! -e "$CKPTD_RUNTIME_DIR/ended" ]; do
            "$0" run
            case $? in 0 | 2 | 3 | 4) exit ;; esac
            sleep 1
        done' "$CKPTD_SLURM_BIN/ckptd"
    as_owner "$CKPTD_SLURM_BIN/ckptctl" wait --timeout "$CKPTD_SLURM_WAIT_S" >/dev/null && return
    say "no daemon answers in $run; the end of its log:"
    as_owner tail -n 5 "$run/ckptd.log" >&2
    return 1
}

daemon_of_the_node() {
    systemctl start "$CKPTD_SLURM_UNIT" &&
        CKPTD_RUNTIME_DIR=$CKPTD_SLURM_NODE_RUN CKPTD_DAEMON_USER=$CKPTD_SLURM_NODE_USER \
            "$CKPTD_SLURM_BIN/ckptctl" wait --timeout "$CKPTD_SLURM_WAIT_S" >/dev/null && return
    say "$CKPTD_SLURM_UNIT.service does not answer in $CKPTD_SLURM_NODE_RUN"
    return 1
}

case $CKPTD_SLURM_DAEMON in
job) daemon_of_the_job ;;
node) daemon_of_the_node ;;
*) say "CKPTD_SLURM_DAEMON=$CKPTD_SLURM_DAEMON in $here/settings.env is neither job nor node" && false ;;
esac || [ "$CKPTD_SLURM_REQUIRED" != yes ]
