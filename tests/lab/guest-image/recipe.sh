# shellcheck shell=bash
# How a guest image is made. Sourced by build; the hash of this file is part of each image's name.
#
# A root directory is made once from Debian packages and kept as an archive; each variant is that directory with a
# small change, packed into a disk without loop devices:
#   1  EFI system partition: a unified kernel image (UEFI), and syslinux with kernel and initrd (BIOS)
#   2  ext4 root, filled by mkfs.ext4 -d
# Everything serves one end: a short way from power-on to an answering guest agent and proxy under plain emulation,
# where each process start costs tens of milliseconds.

GUEST_SUITE=bookworm
GUEST_PACKAGES=(
    linux-image-cloud-amd64 busybox-static kmod udev
    systemd systemd-sysv systemd-resolved dbus iproute2 iputils-ping curl
    # python3-cffi-backend: cloud-init imports it through jsonschema, and nothing pulls it in here.
    cloud-init python3-cffi-backend netplan.io
    qemu-guest-agent squid
)

# Loaded by the initrd, in this order: what stands between the kernel and its root file system.
# The others are there because insmod here is cheaper than udev, modprobe and their tables later.
GUEST_INITRD_MODULES=(virtio_pci virtio_blk ext4 virtio_net virtio_console isofs af_packet button evdev)

# Kept of the kernel's modules, beside everything that those depend on: a short list also makes udev's start short.
GUEST_MODULES=(virtio_pci virtio_blk virtio_net virtio_console virtio_scsi virtio_rng virtio_balloon sr_mod sd_mod
    ext4 isofs vfat nls_ascii nls_cp437 nls_utf8 dummy af_packet autofs4 dm_mod loop overlay crc32c_generic crc32c_intel
    qemu_fw_cfg efivarfs evdev button)

# mitigations=off: flushes that protect nobody here are expensive to emulate. The rest spares waits and output.
# noxsave: saving and using the wide vector registers is the slowest that an emulated processor can do; without it the
# kernel and the C library stay with SSE2. no5lvl, nosmap, nopku: less work at each page walk and system call.
GUEST_CMDLINE="root=/dev/vda2 rootfstype=ext4 ro console=ttyS0 quiet loglevel=4 mitigations=off nokaslr no_timer_check tsc=reliable random.trust_cpu=on audit=0 rcupdate.rcu_expedited=1 cryptomgr.notests systemd.show_status=0 systemd.log_level=warning systemd.gpt_auto=0 noxsave no5lvl nopku clearcpuid=smap,smep,umip panic=5"

# --- the common root -----------------------------------------------------------------------------------------------

# The archive's name covers only what it depends on, so that a change of the configuration below does not ask for all
# packages again.
guest_root_archive_path() {
    printf '%s/root-%s.tar.zst' "$LAB_CACHE" "$({ echo "$GUEST_SUITE ${GUEST_PACKAGES[*]}"; declare -f guest_root_archive; } | sha256sum | cut -c1-12)"
}

# The packages as installed, before any change; made when missing.
guest_root_archive() {
    local archive mirror work
    archive=$(guest_root_archive_path)
    if [ ! -e "$archive" ]; then
        mirror=$(debian_mirror "$GUEST_SUITE")
        work=$(mktemp -d "$LAB_CACHE/work.XXXXXX")
        say "making the guest's root directory from Debian packages (about a minute)"
        (
            # The initrd is made by hand below; the distribution's would cost half a minute here.
            list=$(IFS=,; echo "${GUEST_PACKAGES[*]}")
            mmdebstrap --mode=root --variant=apt --quiet --include="$list" \
                --aptopt='APT::Install-Recommends "false"' --aptopt='Acquire::Check-Valid-Until "false"' \
                --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
                --dpkgopt='path-exclude=/usr/share/locale/*' --dpkgopt='path-exclude=/usr/share/info/*' \
                --dpkgopt='path-exclude=/usr/share/squid/errors/*/*' --dpkgopt='path-include=/usr/share/squid/errors/templates/*' \
                --essential-hook='chroot "$1" dpkg-divert -q --local --rename --add /usr/sbin/update-initramfs; ln -sf /bin/true "$1/usr/sbin/update-initramfs"' \
                "$GUEST_SUITE" "$work/root" "$mirror" >"$work/log" 2>&1 </dev/null
        ) || { tail -30 "$work/log" >&2; cp "$work/log" "$LAB_CACHE/root-failed.log"; rm -rf "$work"; die "making the guest's root directory failed"; }
        rm -rf "$work"/root/var/lib/apt/lists/* "$work"/root/var/cache/apt/*
        tar -C "$work/root" --zstd --numeric-owner --xattrs -cf "$archive.new" .
        mv "$archive.new" "$archive"
        rm -rf "$work"
    fi
}

guest_slim() {
    local r=$1 kver keep m
    kver=$(ls "$r/lib/modules")
    keep=$(mktemp)
    for m in "${GUEST_MODULES[@]}"; do
        modprobe -d "$r" -S "$kver" --show-depends "$m" 2>/dev/null | awk '$1 == "insmod" { print $2 }'
    done | sed "s|^$r||" | sort -u >"$keep"
    (cd "$r" && find "lib/modules/$kver/kernel" -name '*.ko*' | sed 's|^|/|' | grep -vxFf "$keep" | sed 's|^/||' | xargs -r rm -f)
    rm -f "$keep"
    find "$r/lib/modules/$kver/kernel" -type d -empty -delete
    depmod -b "$r" "$kver"
    rm -rf "$r"/boot/initrd* "$r"/usr/share/{doc,man,info,locale,i18n} \
        "$r"/var/log/*.log "$r"/var/cache/debconf/*-old "$r"/usr/lib/udev/hwdb.d/* "$r"/etc/udev/hwdb.bin "$r"/usr/lib/udev/hwdb.bin
    rm -f "$r/etc/resolv.conf"
    # No packages from anywhere: a guest of the lab has no way out, and asking would only take time.
    rm -rf "$r"/etc/apt/sources.list "$r"/etc/apt/sources.list.d/*
    rm -rf "$r/boot/lost+found"
}

guest_configure() {
    local r=$1 u
    echo guest >"$r/etc/hostname"
    printf '127.0.0.1 localhost\n::1 localhost\n' >"$r/etc/hosts"
    ln -sf /run/systemd/resolve/stub-resolv.conf "$r/etc/resolv.conf"
    # The initrd has mounted everything as it should be.
    : >"$r/etc/fstab"
    # A machine-id of its own per guest: an empty file is filled at boot; D-Bus follows it.
    : >"$r/etc/machine-id"
    rm -f "$r/var/lib/dbus/machine-id"
    mkdir -p "$r/var/lib/dbus"
    ln -s /etc/machine-id "$r/var/lib/dbus/machine-id"

    # Units that do nothing for a test guest.
    for u in systemd-timesyncd.service e2scrub_reap.service e2scrub_all.timer fstrim.timer apt-daily.timer \
        apt-daily-upgrade.timer dpkg-db-backup.timer logrotate.timer man-db.timer systemd-pstore.service \
        systemd-networkd-wait-online.service getty@tty1.service serial-getty@ttyS0.service \
        systemd-update-utmp.service systemd-update-utmp-runlevel.service systemd-hwdb-update.service \
        systemd-binfmt.service systemd-random-seed.service systemd-machine-id-commit.service \
        systemd-journal-flush.service sys-kernel-debug.mount sys-kernel-tracing.mount dev-hugepages.mount \
        dev-mqueue.mount sys-fs-fuse-connections.mount modprobe@.service systemd-tmpfiles-setup-dev.service \
        networkd-dispatcher.service systemd-user-sessions.service \
        systemd-ask-password-wall.path systemd-ask-password-console.path systemd-firstboot.service systemd-sysusers.service \
        systemd-modules-load.service systemd-sysctl.service systemd-network-generator.service kmod-static-nodes.service \
        systemd-remount-fs.service \
        cloud-init-hotplugd.socket getty.target ldconfig.service systemd-journal-catalog-update.service systemd-update-done.service; do
        ln -sf /dev/null "$r/etc/systemd/system/$u"
    done
    # Generators are processes at each boot; these have nothing to generate here.
    mkdir -p "$r/etc/systemd/system-generators"
    for u in cloud-init-generator systemd-cryptsetup-generator systemd-debug-generator systemd-fstab-generator \
        systemd-getty-generator systemd-gpt-auto-generator systemd-hibernate-resume-generator \
        systemd-integritysetup-generator systemd-rc-local-generator systemd-run-generator \
        systemd-system-update-generator systemd-sysv-generator systemd-veritysetup-generator; do
        ln -sf /dev/null "$r/etc/systemd/system-generators/$u"
    done
    # What cloud-init-generator would do after a search for datasources: switch cloud-init on.
    ln -sf /lib/systemd/system/cloud-init.target "$r/etc/systemd/system/multi-user.target.wants/cloud-init.target"
    # Only devices that something waits for; a machine has hundreds of others, each with its rules.
    mkdir -p "$r/etc/systemd/system/systemd-udev-trigger.service.d" "$r/etc/udev/rules.d"
    printf '[Service]\nExecStart=\nExecStart=-udevadm trigger --type=devices --action=add --subsystem-match=net --subsystem-match=block --subsystem-match=virtio-ports --subsystem-match=input\n' \
        >"$r/etc/systemd/system/systemd-udev-trigger.service.d/lab.conf"
    for u in 50-firmware 55-dm 60-autosuspend 60-drm 60-evdev 60-fido-id 60-infiniband 60-persistent-alsa \
        60-persistent-input 60-persistent-storage-dm 60-persistent-storage-tape 60-persistent-v4l 60-sensor 60-serial \
        64-btrfs 66-azure-ephemeral 70-camera 70-joystick 70-memory 70-mouse 70-touchpad 70-uaccess \
        71-seat 73-seat-late 75-probe_mtd 78-sound-card 80-drivers 81-net-dhcp 85-hwclock 95-dm-notify; do
        ln -sf /dev/null "$r/etc/udev/rules.d/$u.rules"
    done
    rm -f "$r"/usr/lib/tmpfiles.d/{debian,home,journal-nocow,legacy,passwd,provision,systemd-nologin,systemd-pstore,systemd-tmp,var,x11,static-nodes-permissions}.conf

    # Ordinary units wait for cloud-init's network stage; the agent can answer long before.
    mkdir -p "$r"/etc/systemd/system/{qemu-guest-agent,systemd-resolved,systemd-logind}.service.d
    printf '[Unit]\nDefaultDependencies=no\nConflicts=shutdown.target\nBefore=shutdown.target\n' \
        >"$r/etc/systemd/system/qemu-guest-agent.service.d/lab.conf"
    # The agent's shutdown and the power button are carried out by it, nothing before that is.
    printf '[Unit]\nAfter=squid.service systemd-networkd.service cloud-init-local.service\n[Service]\nNice=5\n' \
        >"$r/etc/systemd/system/systemd-logind.service.d/lab.conf"
    # Names are looked up late or never, so their service does not compete with the way to the first address.
    printf '[Unit]\nAfter=squid.service systemd-networkd.service cloud-init-local.service\n[Service]\nNice=5\n' \
        >"$r/etc/systemd/system/systemd-resolved.service.d/lab.conf"
    for u in systemd-networkd systemd-resolved; do
        chroot "$r" systemctl -q enable "$u.service" >/dev/null 2>&1
    done
    mkdir -p "$r/etc/systemd/journald.conf.d" "$r/etc/systemd/system.conf.d"
    # Journal lines on the serial console are the only way to see a guest that has no address.
    printf '[Journal]\nStorage=volatile\nForwardToConsole=yes\nTTYPath=/dev/ttyS0\nMaxLevelConsole=warning\n' \
        >"$r/etc/systemd/journald.conf.d/lab.conf"
    printf '[Manager]\nDefaultTimeoutStopSec=5s\nDefaultTimeoutStartSec=60s\nRuntimeWatchdogSec=0\n' >"$r/etc/systemd/system.conf.d/lab.conf"

    guest_cloud_init "$r"
    guest_squid "$r"
}

guest_cloud_init() {
    local r=$1 u
    # Two datasources, of which None is no search: the identification at boot is skipped.
    cat >"$r/etc/cloud/cloud.cfg.d/99-lab.cfg" <<'CONF'
datasource_list: [NoCloud, None]
datasource: {NoCloud: {fs_label: cidata}}
manage_etc_hosts: false
preserve_hostname: false
disable_root: true
ssh_deletekeys: false
ssh_genkeytypes: []
growpart: {mode: "off"}
resize_rootfs: false
apt: {preserve_sources_list: true}
CONF
    # The modules that user data and vendor data of the tests use. Each other one costs an import.
    cat >"$r/etc/cloud/cloud.cfg" <<'CONF'
users: []
cloud_init_modules: [bootcmd, write-files, set_hostname, users-groups]
cloud_config_modules: [runcmd]
cloud_final_modules: [package-update-upgrade-install, scripts-vendor, scripts-per-once, scripts-per-boot, scripts-per-instance, scripts-user, final-message]
system_info:
  distro: debian
  default_user: {name: debian, lock_passwd: true, shell: /bin/bash}
  network: {renderers: [netplan]}
  paths: {cloud_dir: /var/lib/cloud/, templates_dir: /etc/cloud/templates/}
CONF
    # /usr/sbin/netplan is a Python program that, for "generate", starts this one. One interpreter less before DHCP.
    mv "$r/usr/sbin/netplan" "$r/usr/sbin/netplan.python"
    cat >"$r/usr/sbin/netplan" <<'SH'
#!/bin/sh
if [ "$1" = generate ]; then
    shift
    for g in /usr/libexec/netplan/generate /lib/netplan/generate; do [ -x "$g" ] && exec "$g" "$@"; done
fi
exec /usr/sbin/netplan.python "$@"
SH
    chmod 755 "$r/usr/sbin/netplan"
    # The packaged starter first looks its own package up in the metadata of all of them.
    printf '#!/usr/bin/python3 -sE\nimport sys\nfrom cloudinit.cmd.main import main\nsys.exit(main())\n' >"$r/usr/bin/cloud-init"
    # Without it cloud-init does not check user data against its schema, which takes longer than doing what it says.
    rm -rf "$r"/usr/lib/python3/dist-packages/jsonschema*
    # Its HTTP library is a third of what cloud-init loads in each of its four starts, and there is nobody to ask here.
    # (So "#include URL" in user data does not work in a lab guest.)
    rm -rf "$r"/usr/lib/python3/dist-packages/requests "$r"/usr/lib/python3.11/sitecustomize.py "$r"/etc/python3.11/sitecustomize.py
    mkdir "$r/usr/lib/python3/dist-packages/requests"
    printf '__version__ = "2.28.1"\ndef __getattr__(name):\n    return type(name, (IOError,), {})\n' \
        | tee "$r/usr/lib/python3/dist-packages/requests/exceptions.py" >"$r/usr/lib/python3/dist-packages/requests/__init__.py"
    printf 'from . import exceptions\n' >>"$r/usr/lib/python3/dist-packages/requests/__init__.py"
    chroot "$r" python3 -m compileall -q /usr/lib/python3/dist-packages/requests
    # The stages after the network is up give way to the proxy and the agent.
    for u in cloud-init cloud-config cloud-final; do
        mkdir -p "$r/etc/systemd/system/$u.service.d"
        printf '[Service]\nNice=10\n' >"$r/etc/systemd/system/$u.service.d/lab.conf"
    done
}

guest_squid() {
    local r=$1
    cat >"$r/etc/squid/squid.conf" <<'CONF'
http_port 3128
# The lab's networks have no way out, so whoever can reach this port may use it, for any port.
http_access allow all
cache deny all
cache_mem 4 MB
memory_pools off
access_log none
cache_log /var/log/squid/cache.log
cache_store_log none
pinger_enable off
netdb_filename none
shutdown_lifetime 1 seconds
dns_timeout 3 seconds
connect_timeout 5 seconds
visible_hostname guest
via off
max_filedescriptors 1024
workers 1
CONF
    # The packaged unit waits for the network and checks its configuration in a process of its own first.
    cat >"$r/etc/systemd/system/squid.service" <<'CONF'
[Unit]
Description=Squid
DefaultDependencies=no
After=local-fs.target systemd-tmpfiles-setup.service
Before=shutdown.target
Conflicts=shutdown.target

[Service]
Type=simple
RuntimeDirectory=squid
ExecStart=/usr/sbin/squid --foreground -YC
Restart=on-failure

[Install]
WantedBy=multi-user.target
CONF
    chroot "$r" systemctl -q enable squid.service >/dev/null 2>&1
}

# --- variants ------------------------------------------------------------------------------------------------------

guest_variant() {
    local r=$1
    case $2 in
        debian) ;;
        noagent)
            rm -f "$r"/usr/sbin/qemu-ga "$r"/lib/systemd/system/qemu-guest-agent.service "$r"/lib/udev/rules.d/60-qemu-guest-agent.rules
            # Taken out of dpkg's books as well, so that a package manager would say that it is not installed.
            awk -v RS= -v ORS='\n\n' '!/^Package: qemu-guest-agent\n/' "$r/var/lib/dpkg/status" >"$r/var/lib/dpkg/status.new"
            mv "$r/var/lib/dpkg/status.new" "$r/var/lib/dpkg/status"
            ;;
        baked)
            # Each clone has this id, hence one DHCP client id, hence one address. The D-Bus file alone is enough to
            # cause it in an image whose /etc/machine-id was emptied.
            echo 6c61626c61626c61626c61626c616221 >"$r/etc/machine-id"
            rm -f "$r/var/lib/dbus/machine-id"
            cp "$r/etc/machine-id" "$r/var/lib/dbus/machine-id"
            ;;
        dummy)
            # Its driver is loaded before the NIC's (see guest_initrd), so that it comes first in every listing, and its
            # address sorts before the lab's networks.
            mkdir -p "$r/etc/systemd/network"
            printf '[Match]\nName=dummy0\n[Network]\nAddress=10.0.0.1/24\nLinkLocalAddressing=no\nConfigureWithoutCarrier=yes\n[Link]\nRequiredForOnline=no\n' \
                >"$r/etc/systemd/network/10-dummy0.network"
            ;;
    esac
}

# --- the disk -------------------------------------------------------------------------------------------------------

# A hand-made initrd: busybox, three modules with what they need, and a script. The distribution's takes ten times
# as long to unpack and starts udev.
guest_initrd() {
    local r=$1 out=$2 variant=$3 d kver m f i=100 first=()
    [ "$variant" != dummy ] || first=(dummy)
    d=$(mktemp -d)
    kver=$(ls "$r/lib/modules")
    mkdir -p "$d"/{bin,dev,proc,sys,root,modules}
    cp "$r/bin/busybox" "$d/bin/busybox"
    ln -s busybox "$d/bin/sh"
    for m in "${first[@]}" "${GUEST_INITRD_MODULES[@]}"; do
        modprobe -d "$r" -S "$kver" --show-depends "$m" 2>/dev/null | awk '$1 == "insmod" { print $2 }'
    done | awk '!seen[$0]++' >"$d/order"
    while read -r f; do cp "$f" "$d/modules/$((i++))-$(basename "$f")"; done <"$d/order"
    rm "$d/order"
    cat >"$d/init" <<'SH'
#!/bin/sh
b=/bin/busybox
$b mount -t devtmpfs dev /dev
$b mount -t proc proc /proc
for m in /modules/*; do $b insmod "$m" 2>/dev/null; done
# BIOS and UEFI machines, and machines with more disks, may number them differently: go by label.
n=0
until root=$($b findfs LABEL=lab-root 2>/dev/null); do n=$((n + 1)); [ $n -lt 200 ] || { echo "lab: no root file system" >/dev/console; exec $b sh; }; $b usleep 20000; done
$b mount -t ext4 -o rw,noatime "$root" /root || { echo "lab: cannot mount $root" >/dev/console; exec $b sh; }
$b mount --move /dev /root/dev
$b umount /proc
exec $b switch_root /root /lib/systemd/systemd
SH
    chmod 755 "$d/init"
    (cd "$d" && find . | LC_ALL=C sort | cpio -o -H newc -R 0:0 --quiet) >"$out"
    rm -rf "$d"
}

# Unified kernel image: the stub finds command line, kernel and initrd as sections after its own.
guest_uki() {
    local kernel=$1 initrd=$2 cmdline=$3 osrel=$4 out=$5 stub=/usr/lib/systemd/boot/efi/linuxx64.efi.stub
    objcopy \
        --add-section .osrel="$osrel" --change-section-vma .osrel=0x20000 \
        --add-section .cmdline="$cmdline" --change-section-vma .cmdline=0x30000 \
        --add-section .linux="$kernel" --change-section-vma .linux=0x2000000 \
        --add-section .initrd="$initrd" --change-section-vma .initrd=0x6000000 \
        "$stub" "$out"
}

# make_guest VARIANT WORKDIR: leaves the image as WORKDIR/image.
make_guest() {
    local variant=$1 w=$2 r=$2/root archive kver esp_mib=48 root_mib total_mib
    guest_root_archive
    archive=$(guest_root_archive_path)
    say "packing the guest image '$variant'"
    mkdir "$r"
    tar -C "$r" --zstd --numeric-owner --xattrs -xpf "$archive"
    guest_slim "$r"
    guest_configure "$r"
    guest_variant "$r" "$variant"
    kver=$(ls "$r/lib/modules")

    guest_initrd "$r" "$w/initrd" "$variant"
    printf '%s' "$GUEST_CMDLINE" >"$w/cmdline"
    guest_uki "$r/boot/vmlinuz-$kver" "$w/initrd" "$w/cmdline" "$r/usr/lib/os-release" "$w/uki.efi"

    truncate -s ${esp_mib}M "$w/esp"
    mkfs.vfat -F 32 -n LAB-ESP "$w/esp" >/dev/null
    mmd -i "$w/esp" ::/EFI ::/EFI/BOOT ::/syslinux
    mcopy -i "$w/esp" "$w/uki.efi" ::/EFI/BOOT/BOOTX64.EFI
    mcopy -i "$w/esp" "$r/boot/vmlinuz-$kver" ::/vmlinuz
    mcopy -i "$w/esp" "$w/initrd" ::/initrd
    printf 'DEFAULT lab\nPROMPT 0\nTIMEOUT 0\nLABEL lab\n LINUX /vmlinuz\n INITRD /initrd\n APPEND %s\n' "$GUEST_CMDLINE" >"$w/syslinux.cfg"
    mcopy -i "$w/esp" "$w/syslinux.cfg" ::/syslinux/syslinux.cfg
    syslinux --install --directory /syslinux "$w/esp"
    rm -f "$r"/boot/* 2>/dev/null || true

    root_mib=$(( $(du -sm "$r" | cut -f1) * 5 / 4 + 160 ))
    truncate -s ${root_mib}M "$w/rootfs"
    # Small inode tables and no lazy initialisation: the guest's kernel would write the rest at each first boot.
    mkfs.ext4 -q -L lab-root -d "$r" -m 0 -O ^metadata_csum,^has_journal -E lazy_itable_init=0,nodiscard "$w/rootfs"

    total_mib=$((1 + esp_mib + root_mib + 1))
    truncate -s ${total_mib}M "$w/disk"
    sfdisk -q "$w/disk" <<TABLE
label: gpt
start=1MiB, size=${esp_mib}MiB, type=uefi, name=esp, attrs=LegacyBIOSBootable
size=${root_mib}MiB, type=linux, name=root
TABLE
    dd if="$w/esp" of="$w/disk" bs=1M seek=1 conv=notrunc,sparse status=none
    dd if="$w/rootfs" of="$w/disk" bs=1M seek=$((1 + esp_mib)) conv=notrunc,sparse status=none
    dd if=/usr/lib/syslinux/mbr/gptmbr.bin of="$w/disk" bs=440 count=1 conv=notrunc status=none
    say "compressing '$variant'"
    qemu-img convert -q -c -m 2 -W -f raw -O qcow2 -o compat=1.1 "$w/disk" "$w/image"
}
