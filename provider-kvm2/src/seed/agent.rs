//! The script that gives a guest its QEMU guest agent, where it has none.
//!
//! libvirt learns a guest's address from the agent long before the host's ARP
//! table has it, if that ever does. The script runs once, as root, before the
//! user's own scripts, and therefore waits for nothing longer than it must.

/// POSIX sh; ASCII only, so that it can be a 7-bit MIME part.
pub const SCRIPT: &str = include_str!("guest-agent.sh");
/// Name of the script in the guest.
pub const FILE_NAME: &str = "kvm2-guest-agent.sh";
