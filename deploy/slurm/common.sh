# Read by prolog.sh and epilog.sh: settings, and what both do with a job's daemon. Slurm sets no PATH.

PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
. "$here/settings.env"

say() { echo "ckptd: job ${SLURM_JOB_ID:-?}: $*" >&2; }

# as_owner COMMAND…: run it as the owner of $run, with the environment of that daemon and no other.
as_owner() {
    local uid gid
    uid=$(stat -c %u "$run") && gid=$(id -g "$uid") || return 1
    # shellcheck disable=SC2086 # CKPTD_SLURM_EXTRA is a list
    setpriv --reuid="$uid" --regid="$gid" --init-groups env -i PATH="$PATH" HOME=/ \
        $CKPTD_SLURM_EXTRA CKPTD_RUNTIME_DIR="$run" CKPTD_SEGMENT_DIR="$segments" CKPTD_MEMORY="$CKPTD_SLURM_MEMORY" \
        CKPTD_RETAIN_DETACHED_S="$CKPTD_SLURM_KEEP_S" "$@"
}

# Names the folders of a job: $run and $segments.
of_job() { run=$CKPTD_SLURM_RUN/$1 segments=$CKPTD_SLURM_SEGMENTS/$1; }

# Whether a daemon holds $run. (The lock is looked at as its owner: root follows no link of a user.)
# shellcheck disable=SC2016 # for the inner shell
is_running() { as_owner sh -c '[ -e "$1" ] && ! flock --nonblock "$1" true' sh "$run/.ckptd.lock"; }

# Ends the daemon of $run, and frees its memory. Links in the folders are not followed.
end_daemon() {
    if [ -d "$run" ]; then
        as_owner touch "$run/ended" # the prolog's loop starts no further daemon
        as_owner "$CKPTD_SLURM_BIN/ckptctl" stop --wait --timeout 60 >/dev/null 2>&1
        if is_running; then # the process that it has written into its lock, as its owner: root kills for no user
            say "the daemon in $run does not stop: SIGKILL"
            # shellcheck disable=SC2016 # for the inner shell
            as_owner sh -c 'kill -KILL "$(head -n 1 "$1")"' sh "$run/.ckptd.lock"
        fi
    fi
    rm -rf --one-file-system -- "$segments" "$run"
}

# Ends the daemon of a job that was requeued, and has not come back in time: $run/kept is still there.
end_if_expired() {
    of_job "$1"
    [ -n "$(as_owner find "$run/kept" ! -newermt "-$CKPTD_SLURM_KEEP_S seconds" 2>/dev/null)" ] || return 0
    end_daemon
    rm -f "$CKPTD_SLURM_RUN/.start-$1"
}

# A folder that root owns and nobody else may write to.
root_folder() {
    [ -e "$1" ] || install -d -m 755 -- "$1"
    [ ! -L "$1" ] && [ "$(stat -c '%u %a' -- "$1")" = "0 755" ] && return
    say "$1 must be a folder of root with mode 755; found: $(stat -c '%U %a' -- "$1")"
    return 1
}
