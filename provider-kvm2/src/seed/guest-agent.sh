#!/bin/sh
# Makes sure that the QEMU guest agent is installed and running: the hypervisor
# asks it for the addresses of this machine. Whatever happens, the rest of
# cloud-init goes on: this script always ends with 0.

service=qemu-guest-agent
channel=org.qemu.guest_agent.0
# A package manager may be held by an automatic update, or the network may not be
# up yet. Scripts of the user wait meanwhile, so not for ever.
attempts=6
pause=10

say() { echo "kvm2 guest agent: $*"; }
have() { command -v "$1" >/dev/null 2>&1; }
quietly() { "$@" </dev/null >/dev/null 2>&1; }

install_once() {
    if have apt-get; then
        export DEBIAN_FRONTEND=noninteractive
        quietly apt-get -q update
        quietly apt-get -q -y -o DPkg::Lock::Timeout=60 --no-install-recommends install "$service"
    elif have dnf; then
        quietly dnf -y install "$service"
    elif have yum; then
        quietly yum -y install "$service"
    elif have zypper; then
        quietly zypper --non-interactive install "$service"
    elif have apk; then
        quietly apk add --no-cache "$service"
    fi
}

has_package_manager() {
    for manager in apt-get dnf yum zypper apk; do
        have "$manager" && return 0
    done
    return 1
}

install_agent() {
    has_package_manager || return 1
    left=$attempts
    while [ "$left" -gt 0 ]; do
        install_once && have qemu-ga && return 0
        left=$((left - 1))
        [ "$left" -gt 0 ] && sleep "$pause"
    done
    return 1
}

# The port's device where udev has made no link to it.
port() {
    if [ -e "/dev/virtio-ports/$channel" ]; then
        echo "/dev/virtio-ports/$channel"
        return 0
    fi
    for name in /sys/class/virtio-ports/*/name; do
        [ -r "$name" ] || continue
        read -r found <"$name" || continue
        if [ "$found" = "$channel" ]; then
            name=${name%/name}
            echo "/dev/${name##*/}"
            return 0
        fi
    done
    return 1
}

start_agent() {
    if have systemctl; then
        # static units, which udev starts, have nothing to enable
        quietly systemctl enable "$service"
        quietly systemctl start "$service" && return 0
    fi
    if have rc-service; then
        have rc-update && quietly rc-update add "$service" default
        quietly rc-service "$service" start && return 0
    fi
    if have service; then
        quietly service "$service" start && return 0
    fi
    have pidof && quietly pidof qemu-ga && return 0
    if path=$(port); then
        quietly qemu-ga --daemonize --method virtio-serial --path "$path"
    else
        quietly qemu-ga --daemonize
    fi
}

if have qemu-ga; then
    say "already installed"
elif install_agent; then
    say "installed"
else
    say "could not be installed; this machine needs an image that has it, or a package manager and its sources"
    exit 0
fi

if start_agent; then
    say "running"
else
    say "could not be started"
fi
exit 0
