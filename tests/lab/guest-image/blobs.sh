# shellcheck shell=bash
# Images that need no operating system. Not executable on their own: sourced by build.

# Valid, small, not bootable: for everything that is about transfer, cache and volumes.
make_tiny() { qemu-img create -q -f qcow2 -o compat=1.1 "$1" 16M && qemu-io -f qcow2 -c 'write -q -P 0x6b 0 256k' "$1" >/dev/null; }
make_tiny_raw() { { head -c 262144 /dev/zero | tr '\0' k; } >"$1" && truncate -s 16M "$1"; }

# As long as a Debian cloud image, and incompressible: for upload measurements.
make_big() { head -c 433651712 /dev/urandom >"$1"; }
