# shellcheck shell=bash
# The Debian packages that the lab needs. The mirror is whatever this machine already uses: nothing here names one.

# libvirt and QEMU come from backports on bookworm, where the release's own are too old to be what people run.
PACKAGES_NEW=(libvirt-daemon-system libvirt-daemon-driver-qemu libvirt-clients libvirt-l10n libvirt-dev qemu-system-x86 qemu-utils)
PACKAGES=(ovmf openssh-server openssh-client dnsmasq-base nginx-light socat iproute2 util-linux e2fsprogs curl jq openssl locales swtpm swtpm-tools)
# Only to build guest images.
PACKAGES_BUILD=(mmdebstrap debian-archive-keyring mtools fdisk dosfstools systemd-boot-efi syslinux syslinux-common binutils cpio kmod zstd xorriso)

os_codename() { (. /etc/os-release && printf '%s' "${VERSION_CODENAME:-}"); }

# The base URI of the machine's own Debian mirror, e.g. to debootstrap from.
debian_mirror() {
    local suite=$1 uri
    uri=$(apt-get indextargets --format '$(CODENAME) $(COMPONENT) $(REPO_URI)' 'Created-By: Packages' 2>/dev/null |
        awk -v s="$suite" '$1 == s && $2 == "main" { print $3; exit }')
    [ -n "$uri" ] || die "this machine's apt configuration has no Debian '$suite' source"
    printf '%s' "$uri"
}

apt_quiet() {
    # Others on this machine may hold dpkg's lock for a while.
    DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=900 -o Dpkg::Use-Pty=0 \
        -o Dpkg::Options::=--force-confdef -o Dpkg::Options::=--force-confold "$@" </dev/null
}

# apt-get update fails at once when another update runs, and DPkg::Lock::Timeout does not cover its lock.
apt_update() {
    local try
    for try in 1 2 3 4 5 6 7 8 9 10; do
        apt_quiet update "$@" >/dev/null 2>&1 && return 0
        sleep "$try"
    done
    return 1
}

ensure_backports() {
    local suite=$1 list=/etc/apt/sources.list.d/kvm2-lab-backports.list mirror
    if ! apt-get indextargets --format '$(CODENAME)' | grep -x "$suite-backports" >/dev/null; then
        mirror=$(debian_mirror "$suite")
        say "adding $suite-backports from this machine's own mirror ($list)"
        printf '# Written by tests/lab/up. Safe to remove when no lab is used.\ndeb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] %s %s-backports main\n' \
            "$mirror" "$suite" >"$list"
    fi
    if ! apt-cache policy 2>/dev/null | grep "a=[a-z-]*backports,.*n=$suite-backports" >/dev/null; then
        say "reading the backports package list"
        # Only this list: an unrelated source of the machine that cannot be reached must not stop us.
        if [ -e "$list" ]; then
            apt_update -o Dir::Etc::sourcelist="$list" -o Dir::Etc::sourceparts=/dev/null -o APT::Get::List-Cleanup=0 ||
                die "cannot read the $suite-backports package list"
        else
            apt_update || die "apt-get update failed"
        fi
    fi
}

missing_packages() {
    local p
    for p in "$@"; do
        [ "$(dpkg-query -W -f '${db:Status-Status}' "$p" 2>/dev/null)" = installed ] || printf '%s\n' "$p"
    done
}

# Packages of daemons start them where there is an init; the lab must not leave a second sshd, libvirtd or nginx behind.
with_services_off() {
    local policy=/usr/sbin/policy-rc.d made='' rc=0
    if [ ! -e $policy ]; then
        printf '#!/bin/sh\nexit 101\n' >$policy && chmod 755 $policy
        made=1
    fi
    "$@" || rc=$?
    [ -z "$made" ] || rm -f $policy
    return $rc
}

# ensure_packages [build]: returns at once when all is there.
ensure_packages() {
    local want=("${PACKAGES[@]}") new=("${PACKAGES_NEW[@]}") missing missing_new suite target=() log
    [ "${1:-}" != build ] || want+=("${PACKAGES_BUILD[@]}")
    suite=$(os_codename)
    mapfile -t missing < <(missing_packages "${want[@]}")
    mapfile -t missing_new < <(missing_packages "${new[@]}")
    # libvirt-dev 9 and libvirt 11 do not go together, so one old piece means all of them again.
    if [ ${#missing_new[@]} -eq 0 ] && [ "$suite" = bookworm ] &&
        dpkg --compare-versions "$(dpkg-query -W -f '${Version}' libvirt-daemon-system)" lt 11; then
        missing_new=("${new[@]}")
    fi
    [ ${#missing[@]} -gt 0 ] || [ ${#missing_new[@]} -gt 0 ] || return 0

    exec 8>"$LAB_LOCK_BASE/kvm2-lab-packages.lock"
    flock -w 1200 8 || die "another lab has been installing packages for 20 minutes"
    log=$(mktemp)
    if ! apt-cache show ovmf >/dev/null 2>&1; then
        say "reading package lists"
        apt_update || warn "apt-get update reported errors; going on with what it got"
    fi
    if [ ${#missing_new[@]} -gt 0 ]; then
        if [ "$suite" = bookworm ]; then ensure_backports "$suite"; target=(-t "$suite-backports"); fi
        say "installing ${new[*]}"
        with_services_off apt_quiet install -y --no-install-recommends "${target[@]}" "${new[@]}" >"$log" 2>&1 ||
            { tail -20 "$log" >&2; die "installing libvirt and QEMU failed"; }
    fi
    if [ ${#missing[@]} -gt 0 ]; then
        say "installing ${missing[*]}"
        with_services_off apt_quiet install -y --no-install-recommends "${missing[@]}" >"$log" 2>&1 ||
            { tail -20 "$log" >&2; die "installing packages failed"; }
    fi
    rm -f "$log"
    exec 8>&-
}

# The directory of a generated locale, for LOCPATH; libvirt's own messages come from its package.
locale_dir() {
    local dir=$LAB_CACHE/locales
    if [ ! -d "$dir/$1" ]; then
        mkdir -p "$dir"
        localedef -i "${1%%.*}" -f "${1##*.}" "$dir/$1" >/dev/null 2>&1 || [ -d "$dir/$1" ] || die "locale $1 cannot be made"
    fi
    printf '%s' "$dir"
}

# A directory with libvirt's drivers and the interface driver, which is not installed: it would be there for every lab.
driver_dir() {
    local dir=$LAB_CACHE/drivers own=/usr/lib/x86_64-linux-gnu/libvirt/connection-driver version tmp
    version=$(dpkg-query -W -f '${Version}' libvirt-daemon-driver-qemu)
    dir=$dir-${version//[^0-9a-z.]/-}
    if [ ! -d "$dir" ]; then
        tmp=$(mktemp -d)
        (cd "$tmp" && apt-get -qq download "libvirt-daemon-driver-interface=$version" >/dev/null 2>&1 && dpkg -x ./*.deb .) ||
            { rm -rf "$tmp"; die "cannot fetch libvirt-daemon-driver-interface $version"; }
        cp -s "$own"/*.so "$tmp"
        cp "$tmp$own"/*.so "$tmp"
        rm -rf "${tmp:?}"/*.deb "${tmp:?}/usr"
        mv -T "$tmp" "$dir" 2>/dev/null || rm -rf "$tmp"
    fi
    printf '%s' "$dir"
}
