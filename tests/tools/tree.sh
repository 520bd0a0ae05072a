# shellcheck shell=bash
# For programs that build: go on in a copy of the sources at one path (see one-tree), so that Cargo builds what was
# changed and not all of a fresh clone. An edit of the sources does not meet a run that is under way.

# in_one_tree PROGRAM ARGS...: begins PROGRAM (tests/run, say) anew in the copy beside the build directory, in this
# process; returns once that is done. Makes CARGO_TARGET_DIR absolute.
in_one_tree() {
    [ "${CARGO_TARGET_DIR#/}" != "$CARGO_TARGET_DIR" ] || CARGO_TARGET_DIR=$PWD/$CARGO_TARGET_DIR
    # the process stays the same, which tells that this is the copy
    [ "${KVM2_IN_TREE:-}" != $$ ] || return 0
    local tree=${CARGO_TARGET_DIR%/}.tree other='' is=''
    # absent the first time
    [ ! -e "$tree.pid" ] || read -r other is <"$tree.pid"
    if [ -n "$other" ] && [ "$other" != $$ ] && grep -qsz -- "$is" "/proc/$other/cmdline"; then
        printf '%s is at work with %s (process %s): wait for it, or set CARGO_TARGET_DIR\n' "$is" "$CARGO_TARGET_DIR" "$other" >&2
        exit 2
    fi
    if tests/tools/one-tree "$tree" >/dev/null; then
        printf '%s %s\n' $$ "$1" >"$tree.pid"
        export KVM2_IN_TREE=$$
        exec "$tree/$1" "${@:2}"
    fi
    printf 'the sources were not copied: all of them are built anew\n' >&2
}
