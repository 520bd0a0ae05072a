# shellcheck shell=bash
# One hypervisor of the lab: namespaces, directories, libvirt, DHCP, CONNECT targets, sshd.

# in_host COMMAND...: in the host's mount, UTS and network namespaces (what root on that machine would see).
in_host() { "${HV_ENTER[@]}" "$@"; }

host_virsh() { virsh -q -c "$HV_URI" "$@"; }

# --- namespaces -------------------------------------------------------------------------------------------------

host_net_up() {
    if ! ns_inode "$HV_NET" >/dev/null; then
        rm -f "$HV_NET"
        ip netns add "$HV_NETNS"
    fi
    if ! ip -n "$HV_NETNS" link show br0 >/dev/null 2>&1; then
        ip -n "$HV_NETNS" link set lo up
        # A fixed MAC: otherwise the bridge takes the lowest of its taps and changes it when a guest goes.
        ip -n "$HV_NETNS" link add br0 address "52:54:01:0$LAB_ID:0$HV_N:01" type bridge forward_delay 0 stp_state 0
        ip -n "$HV_NETNS" addr add "$HV_GW/24" dev br0
        ip -n "$HV_NETNS" link set br0 up
    fi
}

# Runs inside the new mount namespace, with everything of the machine still in place.
# shellcheck disable=SC2016
HOST_MOUNTS='
set -eu
run=$1 data=$2 name=$3
mount --make-rprivate /
hostname "$name"
for pair in "$data/etc:/etc/libvirt" "$run/libvirt:/run/libvirt" "$data/lib:/var/lib/libvirt" \
            "$data/firmware:/usr/share/qemu/firmware" "$data/log:/var/log/libvirt" "$data/cache:/var/cache/libvirt"; do
    mkdir -p "${pair#*:}"
    mount --rbind "${pair%%:*}" "${pair#*:}"
done
# Accounts of this host only: the machine itself gets no new users.
for f in passwd group shadow hosts; do mount --bind "$data/accounts/$f" "/etc/$f"; done
# A host without KVM, on every machine: where /dev/kvm exists it may be useless, and libvirt only looks whether it
# opens. This device number belongs to no driver. ($4 = kvm leaves it in place.)
if [ -e /dev/kvm ] && [ "$4" != kvm ]; then
    mknod -m 600 "$run/nokvm" c 10 250
    mount --bind "$run/nokvm" /dev/kvm
fi
# /sys/class/net shows the network namespace of whoever mounted it.
mount -t sysfs sysfs /sys
'"$LAB_FORGET_MOUNTS"

host_accounts() {
    local a=$HV_DATA/accounts gid
    mkdir -p "$a"
    gid=$(getent group libvirt | cut -d: -f3)
    # kvm2lab: may use the socket and nothing else. kvm2exec: the same with a shell. kvm2none: a shell, no socket.
    { grep -v '^kvm2' /etc/passwd
      echo "kvm2lab:x:64200:${gid:-64200}:lab:/nonexistent:/usr/sbin/nologin"
      echo "kvm2exec:x:64201:${gid:-64200}:lab:/:/bin/sh"
      echo "kvm2none:x:64202:64202:lab:/:/bin/sh"; } >"$a/passwd"
    { grep -v '^kvm2' /etc/group
      [ -n "$gid" ] || echo "libvirt:x:64200:"
      echo "kvm2none:x:64202:"; } >"$a/group"
    # sshd without PAM refuses an account whose password field says locked ("!"); "*" only means that no password fits.
    { grep -v '^kvm2' /etc/shadow
      for u in kvm2lab kvm2exec kvm2none; do echo "$u:*:20000:0:99999:7:::"; done; } >"$a/shadow"
    chmod 640 "$a/shadow"
    printf '127.0.0.1 localhost\n%s %s\n' "$HV_GW" "$HV_HOSTNAME" >"$a/hosts"
}

# A package that makes an account replaces /etc/passwd by renaming, which takes the mount over it away in every namespace.
host_accounts_bound() {
    local f
    in_host grep '^kvm2lab:' /etc/passwd >/dev/null || for f in passwd group shadow hosts; do
        in_host mount --bind "$HV_DATA/accounts/$f" "/etc/$f"
    done
}

host_dirs() {
    mkdir -p "$HV_RUN"/{libvirt,ns,pid} "$HV_DATA"/{etc/qemu,etc/storage/autostart,lib/images,lib/small,lib/roomy,lib/inactive,lib/qemu,log,cache,sshd,firmware}
    chmod 755 "$HV_RUN" "$HV_RUN/libvirt" "$HV_DATA"
    chmod 711 "$HV_DATA/lib" "$HV_DATA"/lib/{images,small,roomy,inactive}
    chown "$(id -u libvirt-qemu):$(id -g libvirt-qemu)" "$HV_DATA/lib/qemu"
}

# host_firmware plain|secure|none: which UEFI builds libvirt finds when a domain asks for some. It takes the first that
# fits, on Debian the one with Secure Boot and enrolled keys, which refuses an unsigned kernel such as our guests'.
host_firmware() {
    local f
    rm -f "$HV_DATA"/firmware/*
    for f in /usr/share/qemu/firmware/*.json; do
        case $1 in
            none) continue ;;
            plain) ! grep -q '"secure-boot"' "$f" || continue ;;
        esac
        cp "$f" "$HV_DATA/firmware/"
    done
}

# host_fs NAME SIZE: a file system of its own for fill-up tests, with ext4's usual 5% that only root may use. Mounted in
# the root namespace, so that tests see it, and carried into the host by the recursive bind.
host_fs() {
    local name=$1 size=$2
    local img=$HV_DATA/$name.img dir=$HV_DATA/lib/$name
    ! mounted "$dir" || return 0
    if [ ! -e "$img" ]; then
        truncate -s "$size" "$img"
        mkfs.ext4 -q -F -m 5 -E lazy_itable_init=0,lazy_journal_init=0,nodiscard -O ^has_journal "$img"
    fi
    if ! mount -o loop "$img" "$dir" 2>/dev/null; then
        warn "$HV: no loop device, the pool '$name' is a tmpfs (no root reserve)"
        mount -t tmpfs -o "size=$size,mode=711" "kvm2lab-$name" "$dir"
    fi
    chmod 711 "$dir"
    rmdir "$dir/lost+found" 2>/dev/null || true
}

host_namespaces_up() {
    ns_inode "$HV_MNT" >/dev/null && ns_inode "$HV_UTS" >/dev/null && return 0
    # A namespace file can only be mounted where mounts do not propagate.
    mounted "$HV_RUN/ns" || { mount --bind "$HV_RUN/ns" "$HV_RUN/ns" && mount --make-private "$HV_RUN/ns"; }
    touch "$HV_MNT" "$HV_UTS"
    nsenter --net="$HV_NET" -- unshare --mount="$HV_MNT" --uts="$HV_UTS" --propagation private -- \
        sh -c "$HOST_MOUNTS" kvm2lab-mounts "$HV_RUN" "$HV_DATA" "$HV_HOSTNAME" "${LAB_ACCEL:-tcg}" 8>&- 9>&-
}

# --- libvirt ----------------------------------------------------------------------------------------------------

# auth none: the default asks polkit, which needs D-Bus; the group on the socket decides instead.
# host_uuid: two hypervisors on one machine would otherwise have the same.
# What tests set comes first.
host_libvirtd_conf() {
    [ -e "$HV_DATA/etc/libvirtd-override.conf" ] || : >"$HV_DATA/etc/libvirtd-override.conf"
    cat "$HV_DATA/etc/libvirtd-override.conf" - >"$HV_DATA/etc/libvirtd.conf" <<CONF
unix_sock_group = "libvirt"
unix_sock_ro_perms = "0770"
unix_sock_rw_perms = "0770"
auth_unix_ro = "none"
auth_unix_rw = "none"
host_uuid = "$(cat "$HV_DATA/uuid")"
log_level = 3
log_outputs = "3:file:/var/log/libvirt/libvirtd.log"
CONF
}

host_libvirt_config() {
    [ -e "$HV_DATA/uuid" ] || cat /proc/sys/kernel/random/uuid >"$HV_DATA/uuid"
    host_libvirtd_conf
    cat >"$HV_DATA/etc/virtlogd.conf" <<CONF
log_level = 3
log_outputs = "3:file:/var/log/libvirt/virtlogd.log"
CONF
    # No AppArmor, no cgroups of our own, no extended attributes: what a plain container has. QEMU still drops to
    # its usual unprivileged user, so that permissions and the file system's root reserve behave as on a real host.
    cat >"$HV_DATA/etc/qemu.conf" <<CONF
security_driver = "none"
user = "libvirt-qemu"
group = "libvirt-qemu"
dynamic_ownership = 1
remember_owner = 0
cgroup_controllers = []
namespaces = []
CONF
}

# host_libvirtd_env KEY=VALUE...: variables of libvirtd's environment from its next start on; an empty value takes one away.
host_libvirtd_env() {
    local file=$HV_DATA/etc/libvirtd-env pair
    touch "$file"
    for pair in "$@"; do
        sed -i "/^${pair%%=*}=/d" "$file"
        [ -z "${pair#*=}" ] || printf '%s\n' "$pair" >>"$file"
    done
}

# What libvirt has found out about QEMU is the same for each host; it checks itself that its files and the kernel are
# the ones that the entry was made for.
host_probe_cache() {
    local shared=$LAB_CACHE/qemu-capabilities own=$HV_DATA/cache/qemu/capabilities
    case $1 in
        load) [ ! -d "$shared" ] || [ -d "$own" ] || { mkdir -p "$own" && cp -a "$shared/." "$own/"; } ;;
        save) [ -d "$own" ] && mkdir -p "$shared" && cp -au "$own/." "$shared/" ;;
    esac
}

start_virtlogd() {
    recorded "$HV_RUN/pid/virtlogd" >/dev/null && return 0
    daemon "$HV_RUN/pid/virtlogd" "$HV_DATA/log/virtlogd.out" \
        "${HV_ENTER[@]}" /usr/sbin/virtlogd --pid-file /run/libvirt/virtlogd.pid
    wait_for 20 "$HV: virtlogd" test -S "$HV_RUN/libvirt/virtlogd-sock" || die "$HV: virtlogd did not come up, see $HV_DATA/log"
}

# "version" makes libvirtd probe QEMU, which it would otherwise do in somebody's first call.
libvirtd_answers() { [ -S "$HV_SOCK" ] && timeout 30 virsh -q -c "$HV_URI" version; }

start_libvirtd() {
    recorded "$HV_RUN/pid/libvirtd" >/dev/null && return 0
    # A killed libvirtd leaves its pid file; the file lock in it is gone, so libvirtd itself would cope.
    rm -f "$HV_RUN"/libvirt/libvirt-{sock,sock-ro,admin-sock}
    # Guests inherit the priority: tests wait for them with a time limit, while whoever compiles beside them can wait.
    "${HV_ENTER[@]}" true || die "$HV: its namespaces are gone"
    local env=()
    [ ! -e "$HV_DATA/etc/libvirtd-env" ] || mapfile -t env <"$HV_DATA/etc/libvirtd-env"
    daemon_reaped "$HV_RUN/pid/libvirtd" "$HV_DATA/log/libvirtd.out" \
        nice -n -5 "${HV_ENTER[@]}" env "${env[@]}" /usr/sbin/libvirtd --pid-file /run/libvirt/libvirtd.pid
    wait_for 60 "$HV: libvirtd" libvirtd_answers ||
        { tail -5 "$HV_DATA/log/libvirtd.out" "$HV_DATA/log/libvirtd.log" >&2; die "$HV: libvirtd did not come up"; }
}

# host_pool NAME DIR active|inactive: DIR as the host sees it.
host_pool() {
    local name=$1 dir=$2 want=$3
    if ! host_virsh pool-info "$name" >/dev/null 2>&1; then
        host_virsh pool-define-as "$name" dir --target "$dir" >/dev/null
    fi
    [ "$want" = active ] || return 0
    host_virsh pool-autostart "$name" >/dev/null
    host_virsh pool-list --name | grep -x "$name" >/dev/null || host_virsh pool-start "$name" >/dev/null
}

host_pools() {
    host_pool default /var/lib/libvirt/images active
    host_pool small /var/lib/libvirt/small active
    host_pool roomy /var/lib/libvirt/roomy active
    host_pool inactive /var/lib/libvirt/inactive inactive
}

# --- the network's services -----------------------------------------------------------------------------------------

start_dnsmasq() {
    recorded "$HV_RUN/pid/dnsmasq" >/dev/null && return 0
    # It is also the guests' name server, so that a lookup fails at once and not after a resolver's time-outs.
    cat >"$HV_DATA/dnsmasq.conf" <<CONF
keep-in-foreground
user=root
interface=br0
bind-interfaces
except-interface=lo
no-hosts
no-resolv
no-poll
no-ping
dhcp-authoritative
dhcp-range=$HV_PREFIX.20,$HV_PREFIX.219,255.255.255.0,1h
dhcp-leasefile=$HV_DATA/dnsmasq.leases
local=/lab/
address=/target.lab/$HV_GW
log-dhcp
log-facility=$HV_DATA/log/dnsmasq.log
pid-file=
CONF
    daemon "$HV_RUN/pid/dnsmasq" "$HV_DATA/log/dnsmasq.out" \
        "${HV_ENTER[@]}" /usr/sbin/dnsmasq --conf-file="$HV_DATA/dnsmasq.conf"
}

# What a CONNECT through a guest's proxy can reach: HTTP, HTTPS and a port that sends back what it gets.
start_targets() {
    local d=$HV_DATA/target
    mkdir -p "$d"
    if [ ! -e "$d/cert.pem" ]; then
        openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 3650 -subj "/CN=target.lab" \
            -addext "subjectAltName=DNS:target.lab,IP:$HV_GW" -keyout "$d/key.pem" -out "$d/cert.pem" 2>/dev/null
    fi
    cat >"$d/nginx.conf" <<CONF
$(nginx_preamble "$d")
http {
    access_log off;
$(nginx_temp_paths "$d")
    default_type text/plain;
    server {
        listen $HV_GW:$LAB_HTTP_PORT;
        listen $HV_GW:$LAB_TLS_PORT ssl;
        ssl_certificate $d/cert.pem;
        ssl_certificate_key $d/key.pem;
        location / { return 200 "kvm2-lab $LAB_ID $HV \$remote_addr\n"; }
    }
}
CONF
    recorded "$HV_RUN/pid/target" >/dev/null ||
        daemon "$HV_RUN/pid/target" "$HV_DATA/log/target.log" "${HV_ENTER[@]}" /usr/sbin/nginx -c "$d/nginx.conf"
    recorded "$HV_RUN/pid/echo" >/dev/null ||
        daemon "$HV_RUN/pid/echo" "$HV_DATA/log/echo.log" \
            "${HV_ENTER[@]}" /usr/bin/socat "TCP-LISTEN:$LAB_ECHO_PORT,bind=$HV_GW,reuseaddr,fork" SYSTEM:cat
}

# --- sshd -------------------------------------------------------------------------------------------------------

host_sshd_config() {
    local d=$HV_DATA/sshd t
    mkdir -p /run/sshd
    for t in ed25519 rsa; do
        [ -e "$d/host_$t" ] || ssh-keygen -q -t "$t" -N '' -C "$HV_HOSTNAME" -f "$d/host_$t"
    done
    # sshd takes the first value of a keyword, so what tests set comes first.
    [ -e "$d/override.conf" ] || : >"$d/override.conf"
    cat "$LAB_RUN/id_ed25519.pub" "$LAB_RUN/id_rsa.pub" >"$d/authorized_keys"
    # AllowTcpForwarding must not be "no", nor PermitOpen be set: OpenSSH applies both to unix sockets, too, and then
    # denies the forward although AllowStreamLocalForwarding allows it.
    cat >"$d/sshd_config" <<CONF
Include $d/override.conf
ListenAddress $HV_ADDR:$LAB_SSH_PORT
HostKey $d/host_ed25519
HostKey $d/host_rsa
AuthorizedKeysFile $d/authorized_keys
PidFile none
StrictModes no
UsePAM no
UseDNS no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin no
AllowUsers kvm2lab kvm2exec kvm2none
AllowTcpForwarding local
AllowStreamLocalForwarding local
AllowAgentForwarding no
X11Forwarding no
PermitTunnel no
PermitTTY no
PrintMotd no
LogLevel VERBOSE
CONF
}

sshd_listens() { timeout 2 bash -c "exec 3<>/dev/tcp/$HV_ADDR/$LAB_SSH_PORT && read -r -t 2 banner <&3 && [[ \$banner == SSH-* ]]"; }

# The host's mounts, accounts and name, but the machine's own network: it listens on loopback.
start_sshd() {
    recorded "$HV_RUN/pid/sshd" >/dev/null && return 0
    daemon "$HV_RUN/pid/sshd" "$HV_DATA/log/sshd.log" \
        nsenter --mount="$HV_MNT" --uts="$HV_UTS" --wd=/ -- /usr/sbin/sshd -D -e -f "$HV_DATA/sshd/sshd_config"
    wait_for 20 "$HV: sshd" sshd_listens || { tail -3 "$HV_DATA/log/sshd.log" >&2; die "$HV: sshd did not come up"; }
}

# Connections, i.e. every sshd process of the host but the listener.
sshd_sessions() {
    local listener pid
    listener=$(recorded "$HV_RUN/pid/sshd" || true)
    for pid in $(pids_in_ns mnt "$HV_MNT"); do
        [ "$pid" != "$listener" ] || continue
        [ "$(readlink "/proc/$pid/exe" 2>/dev/null)" != /usr/sbin/sshd ] || printf '%s\n' "$pid"
    done
}

# --- the whole host -----------------------------------------------------------------------------------------------

host_up() {
    host_dirs
    host_accounts
    [ -n "$(ls -A "$HV_DATA/firmware")" ] || host_firmware plain
    host_fs small 96M
    host_fs roomy 3G
    host_net_up
    host_namespaces_up
    host_accounts_bound
    host_libvirt_config
    host_probe_cache load
    start_dnsmasq
    start_targets
    host_sshd_config
    start_virtlogd
    start_libvirtd
    host_probe_cache save
    host_pools
    start_sshd
}

# Everything of the host, in whatever state it is. Guests first, so that nothing restarts or reports them.
host_down() {
    local pids=() qemu=() p
    mapfile -t pids < <({ pids_in_ns mnt "$HV_MNT"; pids_in_ns net "$HV_NET"
                          for p in "$HV_RUN"/pid/*; do recorded "$p" && echo; done; } | grep . | sort -un)
    for p in "${pids[@]}"; do
        case $(readlink "/proc/$p/exe" 2>/dev/null) in */qemu-system-*) qemu+=("$p") ;; esac
    done
    # A stopped process takes no TERM, and a guest needs no goodbye: its disks go away with the lab.
    kill_now "${qemu[@]}"
    end_pids "$HV" "${pids[@]}" || true
    # New children of what has just been ended (an SSH connection accepted in between).
    mapfile -t pids < <({ pids_in_ns mnt "$HV_MNT"; pids_in_ns net "$HV_NET"; } | sort -un)
    kill_now "${pids[@]}"

    if [ -e "$HV_NET" ]; then ip netns del "$HV_NETNS" 2>/dev/null || { umount -l "$HV_NET" 2>/dev/null || true; rm -f "$HV_NET"; }; fi
    unmount_below "$HV_RUN"
    unmount_below "$HV_DATA"
    rm -rf --one-file-system "$HV_RUN" "$HV_DATA"
}
