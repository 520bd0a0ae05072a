# shellcheck shell=bash
# Names, places and small verbs that every lab script shares. Sourced, never run.
#
# A lab has a number (0..9). Everything it makes carries that number: directories, addresses, network
# namespaces. So labs of several people and of CI live side by side on one machine.

LAB_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
LAB_RUN_BASE=/run/kvm2-lab          # short, since a unix socket path has 107 characters at most
LAB_DATA_BASE=/var/lib/kvm2-lab     # pools and other bulk
LAB_LOCK_BASE=/run/lock
LAB_CACHE=${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/kvm2-providerd/lab
LAB_IMAGES=$LAB_CACHE/images
LAB_SSH_PORT=2222
LAB_HTTP_PORT=8080
LAB_TLS_PORT=8443
LAB_ECHO_PORT=7007

# What the lab starts outlives its caller, whose temporary directory others may not even write to (swtpm does).
unset TMPDIR

say() { printf 'lab: %s\n' "$*"; }
warn() { printf 'lab: %s\n' "$*" >&2; }
die() { warn "error: $*"; exit 1; }

need_root() { [ "$(id -u)" = 0 ] || die "must run as root: it makes namespaces, mounts and bridges"; }

# The text block at the top of a script, from its second line to the first line that is no comment, is its help.
usage() { sed -n '2,/^[^#]/{/^#/s/^# \{0,1\}//p}' "$0"; }

# use_lab ID: the variables of one lab.
use_lab() {
    LAB_ID=$1
    [[ $LAB_ID =~ ^[0-9]$ ]] || die "lab id must be one digit, not '$LAB_ID'"
    LAB_RUN=$LAB_RUN_BASE/$LAB_ID
    LAB_DATA=$LAB_DATA_BASE/$LAB_ID
    LAB_HTTP_ADDR=127.0.$((LAB_ID + 1)).200
    LAB_HTTP_URL=http://$LAB_HTTP_ADDR:$LAB_HTTP_PORT
}

# use_host hvN: the variables of one hypervisor of the lab.
use_host() {
    HV=$1
    [[ $HV =~ ^hv([1-9])$ ]] || die "host must be hv1..hv9, not '$HV'"
    HV_N=${BASH_REMATCH[1]}
    HV_RUN=$LAB_RUN/$HV
    HV_DATA=$LAB_DATA/$HV
    HV_NETNS=kvm2lab${LAB_ID}$HV
    HV_NET=/run/netns/$HV_NETNS
    HV_MNT=$HV_RUN/ns/mnt
    HV_UTS=$HV_RUN/ns/uts
    HV_HOSTNAME=lab$LAB_ID-$HV
    HV_ENTER=(nsenter --mount="$HV_MNT" --uts="$HV_UTS" --net="$HV_NET" --wd=/ --)
    HV_ADDR=127.0.$((LAB_ID + 1)).$HV_N
    HV_PREFIX=192.168.$((100 + 10 * LAB_ID + HV_N))
    HV_GW=$HV_PREFIX.1
    HV_SOCK=$HV_RUN/libvirt/libvirt-sock
    HV_URI="qemu+unix:///system?socket=$HV_SOCK"
}

# Hosts that this lab has, or half has: by their directories, so that a broken lab can be taken down too.
lab_hosts() {
    local d
    for d in "$LAB_RUN"/hv[1-9] "$LAB_DATA"/hv[1-9]; do
        [ -d "$d" ] && basename "$d"
    done | sort -u
}

# One up, down or fault at a time per lab. The lock file stays: removing a file that others may wait on breaks the lock.
lock_lab() {
    mkdir -p "$LAB_LOCK_BASE"
    exec 9>"$LAB_LOCK_BASE/kvm2-lab-$LAB_ID.lock"
    if ! flock -n 9; then
        say "lab $LAB_ID is busy with another command, waiting for it"
        flock -w 900 9 || die "lab $LAB_ID stayed locked for 15 minutes"
    fi
}

# wait_for SECONDS WHAT COMMAND...: polls; says what it waits for once two seconds have passed.
wait_for() {
    local limit=$1 what=$2 start=$SECONDS told=
    shift 2
    until "$@" >/dev/null 2>&1; do
        (( SECONDS - start < limit )) || return 1
        if [ -z "$told" ] && (( SECONDS - start >= 2 )); then say "waiting for $what"; told=1; fi
        sleep 0.1
    done
}

# unmount_below DIR: every mount at or under DIR, deepest first. Lazily as a last resort: a lab must go down.
unmount_below() {
    local m
    awk -v d="$1" '$5 == d || index($5, d "/") == 1 { print $5 }' /proc/self/mountinfo | sort -r | while read -r m; do
        umount "$m" 2>/dev/null || umount -l "$m" 2>/dev/null || true
    done
}

# For a shell inside a new mount namespace: mounts of this and of other labs came along with the copy, and would keep
# their file systems and namespaces busy after their lab is gone.
LAB_FORGET_MOUNTS='
cut -d" " -f5 /proc/self/mountinfo | grep -E "^(/run/kvm2-lab|/var/lib/kvm2-lab|/run/netns)/" | sort -r |
    while read -r m; do umount -l "$m" 2>/dev/null || true; done
'

# nginx in one process, in the foreground: one pid to know.
nginx_preamble() {
    printf 'daemon off;\nmaster_process off;\nuser root;\npid %s/nginx.pid;\nerror_log stderr warn;\nevents { worker_connections 512; }\n' "$1"
}
nginx_temp_paths() {
    local t
    for t in client_body proxy fastcgi uwsgi scgi; do printf '    %s_temp_path %s/tmp_%s;\n' $t "$1" $t; done
}

mounted() { mountpoint -q "$1" 2>/dev/null || grep -qs " $1 " /proc/self/mountinfo; }

# parse_common_args "$@": takes --id and --help out of the arguments; the rest is left in ARGS.
parse_common_args() {
    local id=${KVM2_LAB_ID:-0}
    ARGS=()
    while [ $# -gt 0 ]; do
        case $1 in
            --id) id=${2:?--id needs a number}; shift 2 ;;
            --id=*) id=${1#*=}; shift ;;
            -h | --help) usage; exit 0 ;;
            # Everything after the first word that is no option belongs to the command (virsh has options, too).
            *) ARGS=("$@"); break ;;
        esac
    done
    use_lab "$id"
}
