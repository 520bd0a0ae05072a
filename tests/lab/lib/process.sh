# shellcheck shell=bash
# Starting, finding and ending the lab's processes.
#
# Two independent ways tell whether a process is the lab's:
#   - its record: a file with pid and start time (a reused pid has another start time);
#   - its mount namespace: every daemon of a lab runs in a mount namespace of that lab, and so do the children
#     that we never see start (QEMU, SSH sessions). That works when all records are lost, too.

proc_starttime() {
    local stat
    # A whole read in one go: the process may end at any moment, and then this fails or is empty.
    IFS= read -r -d '' stat 2>/dev/null <"/proc/$1/stat" || [ -n "${stat:-}" ] || return 1
    stat=${stat##*) } # the command name may hold spaces and parentheses
    # shellcheck disable=SC2086
    set -- $stat
    [ "${1:-Z}" != Z ] || return 1
    printf '%s' "${20}"
}

record() { printf '%s %s\n' "$2" "$(proc_starttime "$2")" >"$1"; }

# recorded FILE: the pid, if that very process still lives.
recorded() {
    local pid start
    read -r pid start 2>/dev/null <"$1" || return 1
    [ -n "$start" ] && [ "$(proc_starttime "$pid" 2>/dev/null)" = "$start" ] || return 1
    printf '%s' "$pid"
}

# daemon RECORD LOG COMMAND...: runs COMMAND in its own session, holding none of our files (a lock kept open by
# a daemon would never be released). COMMAND must stay in the foreground and exec, so that its pid is the daemon's.
daemon() {
    local record=$1 log=$2 pid
    shift 2
    setsid "$@" </dev/null >>"$log" 2>&1 8>&- 9>&- &
    pid=$!
    record "$record" "$pid" || die "could not start $1, see $log"
    disown "$pid" 2>/dev/null || true
}

# daemon_reaped: the same for a daemon that leaves orphans; see reaper.pl.
daemon_reaped() {
    local record=$1 log=$2 tries
    shift 2
    rm -f "$record.raw"
    setsid perl "$LAB_ROOT/lib/reaper.pl" "$record.raw" "$@" </dev/null >>"$log" 2>&1 8>&- 9>&- &
    disown $! 2>/dev/null || true
    for ((tries = 0; tries < 100; tries++)); do
        if [ -s "$record.raw" ]; then
            record "$record" "$(cat "$record.raw")" 2>/dev/null || break
            rm -f "$record.raw"
            return 0
        fi
        sleep 0.05
    done
    die "could not start $1, see $log"
}

# ns_inode FILE: the inode number of a bind-mounted namespace, nothing when FILE is no such mount.
ns_inode() { [ "$(stat -f -c %T "$1" 2>/dev/null)" = nsfs ] && stat -L -c %i "$1"; }

# pids_in_ns mnt|net FILE: processes whose namespace is the one mounted at FILE.
pids_in_ns() {
    local kind=$1 ino p
    ino=$(ns_inode "$2") || return 0
    for p in /proc/[0-9]*; do
        [ "$(readlink "$p/ns/$kind" 2>/dev/null)" = "$kind:[$ino]" ] && printf '%s\n' "${p#/proc/}"
    done
    return 0
}

# end_pids NAME PID...: TERM, up to three seconds, then KILL; waits until they are gone.
end_pids() {
    local what=$1 p left tries
    shift
    [ $# -gt 0 ] || return 0
    # A stopped process does not act on TERM.
    kill -CONT "$@" 2>/dev/null || true
    kill -TERM "$@" 2>/dev/null || true
    for ((tries = 0; tries < 100; tries++)); do
        left=()
        for p in "$@"; do proc_starttime "$p" >/dev/null && left+=("$p"); done
        [ ${#left[@]} -gt 0 ] || return 0
        (( tries != 30 )) || kill -KILL "${left[@]}" 2>/dev/null || true
        sleep 0.1
    done
    warn "$what: still there after KILL: ${left[*]}"
    return 1
}

kill_now() { [ $# -eq 0 ] || kill -KILL "$@" 2>/dev/null || true; }
